"""The survey and the calibration: what clients answer, and which answers count."""

from __future__ import annotations

import attrs
import pytest
import torch

from bflcore import Average, ClientError, Examples, Fixed, Map, component
from bflcore.engines.base import Wrapped
from bflcore.engines.local import Local
from bflcore.errors import RunError
from bflcore.experiments.records import Records
from bflcore.experiments.surveys import calibrate, survey
from bflcore.messages import Answer
from bflcore.problem.base import Shares
from bflcore.problem.calibration.conformal import Conformal
from bflcore.rounds import Recipe, begin
from bflcore.testing.problems import Replies, problem

RECIPE = Recipe(Map(), Average(), Examples(), Fixed())


@component
class Asks(Map):
    """Ask for the sum of the inputs, too."""

    name = "asks"

    def survey(self, problem, cohort):
        real = torch.arange(cohort.x.shape[1]) < torch.tensor(cohort.sizes)[:, None]
        sums = (cohort.x * real[..., None]).sum(1)
        return {**super().survey(problem, cohort), "x": sums.double()}


def surveyed(inference, of, min_clients=1):
    with Local(workers=1).open(of, inference, bins=10) as session:
        return survey(inference, of, session, min_clients)


def test_the_survey_sums_over_the_clients_that_train():
    of = problem(novel=(2,))
    found = surveyed(Asks(), of)
    trained = [of.train.of(client)[0] for client in of.clients]
    assert int(found.sums["examples"]) == sum(map(len, trained))
    torch.testing.assert_close(found.sums["x"], torch.cat(trained).sum(0).double())
    assert (found.bytes_up, found.bytes_down) == (2 * (8 + found.sums["x"].nbytes), 0)


def test_samples_are_standardised_before_the_inference_surveys_them():
    of = attrs.evolve(problem(), standardise=True)
    found = surveyed(Asks(), of)
    pooled = torch.cat([of.train.of(client)[0] for client in of.clients])
    torch.testing.assert_close(found.sums["scaling.x"], pooled.sum(0).double())
    torch.testing.assert_close(
        found.sums["x"], torch.zeros_like(found.sums["x"]), atol=1e-4, rtol=0
    )
    moments = 8 + 2 * pooled.shape[1] * 8
    assert found.bytes_up == 3 * (8 + pooled.shape[1] * 8 + moments)
    assert found.bytes_down == 3 * moments


FORM = {"examples": torch.tensor(4)}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"examples": torch.tensor(-1)}, "examples of its answer is not an allowed number"),
        ({"examples": torch.tensor(2.0)}, "its answer has the form"),
        ({"examples": torch.tensor([2])}, "its answer has the form"),
        ({}, "its answer has the form"),
        (None, "malformed answer"),
        (ClientError(1, "survey", "ValueError: no"), "ValueError: no"),
    ],
)
def test_a_faulty_answer_is_left_out_with_its_reason(answer, reason):
    bad = answer if isinstance(answer, ClientError) else Answer(1, answer)
    session = Replies(answers=[Answer(0, FORM), bad, Answer(2, FORM)])
    found = survey(Map(), problem(), session)
    assert int(found.sums["examples"]) == 8
    (dropped,) = found.dropped
    assert (dropped.client, dropped.stage) == (1, "survey")
    assert reason in dropped.reason
    with pytest.raises(RunError, match="2 of 3 clients answered the survey, 3 are needed"):
        survey(Map(), problem(), session, min_clients=3)


def test_answers_that_were_not_asked_for_or_come_twice_are_left_out():
    answers = [
        Answer(0, FORM),
        Answer(1, FORM),
        Answer(1, FORM),
        Answer(77, FORM),
        Answer(-1, FORM),
    ]
    found = survey(Map(), problem(), Replies(answers=answers))
    assert int(found.sums["examples"]) == 8
    assert [(error.client, error.reason) for error in found.dropped] == [
        (1, "it answered twice"),
        (77, "it was not asked"),
        (-1, "it was not asked"),
    ]
    records = Records("fedavg", ["a", "b", "c"])
    records.add_answers(0, found)
    assert [entry.get("id") for entry in records.dropped] == ["b", None, None]


class Answering(Replies):
    """Answers the calibration with what is given."""

    def calibrate(self, broadcast, clients):
        yield from self.answers


def calibrating():
    of = problem()
    rows = [range(start, end) for start, end in zip(of.train.start, of.train.end, strict=True)]
    samples = Shares.gather(of.train.x, of.train.y, rows)
    return attrs.evolve(of, calibration=samples, calibrators=(Conformal(),))


def test_all_sums_of_the_survey_are_over_the_same_clients():
    of = attrs.evolve(problem(), standardise=True)

    @attrs.frozen(eq=False)
    class Faulty(Wrapped):
        """Client 1 answers the first question with the answer to the second."""

        def survey(self, known, clients):
            for reply in self.session.survey(known, clients):
                wrong = Answer(1, {"examples": torch.tensor(6)})
                yield wrong if reply.client == 1 and not known else reply

    with Local(workers=1).open(of, Map(), bins=10) as session:
        found = survey(Map(), of, Faulty(session))
    sizes = {client: of.train.size(client) for client in of.clients}
    assert [error.client for error in found.dropped] == [1]
    assert int(found.sums["scaling.count"]) == sum(sizes.values()) - sizes[1]
    assert int(found.sums["examples"]) == sum(sizes.values()) - sizes[1]


def test_the_calibration_adds_up_the_clients_that_answered_and_counts_bytes():
    of = calibrating()
    broadcast = begin(RECIPE, of)
    with Local(workers=1).open(of, Map(), 10) as session:
        answers = list(session.calibrate(broadcast, of.clients))
        after, found = calibrate(of, session, broadcast)
    total = after.calibration
    assert total["answered"].tolist() == [0, 1, 2]
    counts = sum(answer.sums["conformal.scores"] for answer in answers)
    assert total["conformal.scores"].equal(counts)
    assert int(total["conformal.examples"]) == int(counts.sum()) == 14
    assert found.bytes_up == 3 * (2048 * 8 + 8)
    assert found.bytes_down == 3 * sum(t.nbytes for t in broadcast.sent().values())
    assert after.survey.keys() == broadcast.survey.keys()
    assert after.start is broadcast.start


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: -t, "conformal.examples of its answer is not an allowed number"),
        (lambda t: t.double(), "its answer has the form"),
        (lambda t: t[None], "its answer has the form"),
    ],
)
def test_a_faulty_calibration_answer_is_left_out(change, reason):
    of = calibrating()
    form = of.uncalibrated()
    right = [Answer(k, {name: t + 1 for name, t in form.items()}) for k in range(3)]
    bad = Answer(1, {name: change(t) for name, t in right[1].sums.items()})
    session = Answering(answers=[right[0], bad, right[2]])
    after, found = calibrate(of, session, begin(RECIPE, of))
    assert after.calibration["answered"].tolist() == [0, 2]
    assert int(after.calibration["conformal.examples"]) == 2
    (dropped,) = found.dropped
    assert (dropped.client, dropped.stage) == (1, "calibrate")
    assert reason in dropped.reason
    with pytest.raises(RunError, match="2 of 3 clients answered the calibration, 3 are needed"):
        calibrate(of, session, begin(RECIPE, of), min_clients=3)
