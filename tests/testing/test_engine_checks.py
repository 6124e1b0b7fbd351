"""Engines with one mistake fail the checks that name it, and no others."""

from contextlib import contextmanager

import attrs
import pytest

from bflcore.engines.base import Engine, Session
from bflcore.engines.local import Local
from bflcore.errors import ClientError
from bflcore.messages import Answer, Evaluation
from bflcore.testing import engine_checks
from bflcore.testing.engine_checks import FAULTY_ROUND

from .verdicts import failing, label, reasons, sentences, wrong

UNTOUCHED = "inputs stay untouched"
ANSWERS = "answers equal the local engines"
ROUNDS = "two rounds equal the local engines"
EVALUATION = "evaluation equals the local engines"
SORTED = "replies are sorted by client"
FIT = "a client that fails to fit is blamed"
EVALUATE = "a client that fails to evaluate is blamed"


class Relay(Session):
    """Pass everything on to a right session: what a wrong one changes a little."""

    def __init__(self, session):
        self.session = session
        self.broadcasts = []

    def survey(self, known, clients):
        return self.session.survey(known, clients)

    def fit(self, broadcast, clients):
        self.broadcasts.append(broadcast)
        return self.session.fit(broadcast, clients)

    def store(self, result):
        self.session.store(result)

    def evaluate(self, broadcast, clients):
        return self.session.evaluate(broadcast, clients)

    def close(self):
        pass


class Relayed(Engine):
    """Run clients in this process."""

    name = "relayed"
    session = Relay

    @contextmanager
    def open(self, problem, inference, bins):
        with Local(workers=1).open(problem, inference, bins) as session:
            relay = self.session(session)
            yield relay
            relay.close()


def engine(mistake, **methods):
    session = type("WrongRelay", (Relay,), methods)
    return wrong(Relayed, mistake, session=session)


def replies(stage, change):
    """Return a method that changes the replies of a stage."""

    def changed(self, broadcast, clients):
        found = list(getattr(Relay, stage)(self, broadcast, clients))
        return iter(change(found))

    return {stage: changed}


def errors(stage, change):
    """Return a method that changes the errors among the replies of a stage."""
    return replies(
        stage,
        lambda found: [change(one) if isinstance(one, ClientError) else one for one in found],
    )


def swap_posteriors(found):
    if any(isinstance(one, ClientError) for one in found):
        return found
    first, second, *rest = found
    return [
        attrs.evolve(first, posterior=second.posterior),
        attrs.evolve(second, posterior=first.posterior),
        *rest,
    ]


def swap_evaluations(found):
    if any(isinstance(one, ClientError) for one in found):
        return found
    first, second, *rest = found
    swapped = [Evaluation(0, second.personal, None), Evaluation(1, first.personal, None)]
    return [*swapped, *rest]


def raise_errors(found):
    if failures := [one.reason for one in found if isinstance(one, ClientError)]:
        raise RuntimeError(failures[0])
    return found


def lose_the_innocent(found):
    return [one for one in found if isinstance(one, ClientError)] or found


def fail_all(found):
    """Blame everybody when one fails, as an engine does that trains all at once."""
    if not any(isinstance(one, ClientError) for one in found):
        return found
    return [ClientError(client, "fit", "RuntimeError: out of luck") for client in range(3)]


def first_round_again(self, broadcast, clients):
    known = broadcast if broadcast.round == FAULTY_ROUND else attrs.evolve(broadcast, round=0)
    return self.session.fit(known, clients)


def move_the_start(self):
    self.broadcasts[0].start.mean.add_(1)


def blamed(client=0, stage="", reason=""):
    """Return an error that differs from the right one by what is given."""
    return lambda e: ClientError(e.client + client, stage or e.stage, reason or e.reason)


def backwards(found):
    return found[::-1]


def all_but_the_last(found):
    return found[:2]


def answer_for_the_next(self, known, clients):
    found = list(self.session.survey(known, clients))
    sums = [one.sums for one in found]
    return iter([Answer(one.client, s) for one, s in zip(found, sums[1:] + sums[:1], strict=True)])


# mistake -> what the session does instead, the checks that must fail
MISTAKES = {
    "Moves the broadcast in place": ({"close": move_the_start}, {UNTOUCHED}),
    "Answers for another client": ({"survey": answer_for_the_next}, {ANSWERS}),
    "Swaps two clients' posteriors": (replies("fit", swap_posteriors), {ROUNDS, EVALUATION}),
    "Swaps two clients' metrics": (replies("evaluate", swap_evaluations), {EVALUATION}),
    "Forgets memories": ({"store": lambda self, result: None}, {ROUNDS, EVALUATION}),
    "Sends every round as the first": ({"fit": first_round_again}, {ROUNDS, EVALUATION}),
    "Loses the last client": (replies("fit", all_but_the_last), {ROUNDS, EVALUATION, FIT}),
    "Loses the last evaluation": (replies("evaluate", all_but_the_last), {EVALUATION, EVALUATE}),
    "Yields results as they come": (replies("fit", backwards), {SORTED}),
    "Yields metrics as they come": (replies("evaluate", backwards), {SORTED}),
    "Blames the neighbour for a fit": (errors("fit", blamed(client=1)), {FIT}),
    "Blames the neighbour for metrics": (errors("evaluate", blamed(client=-1)), {EVALUATE}),
    "Names the wrong stage of a fit": (errors("fit", blamed(stage="evaluate")), {FIT}),
    "Names the wrong stage of metrics": (errors("evaluate", blamed(stage="fit")), {EVALUATE}),
    "Loses the reason of a fit": (errors("fit", blamed(reason="failed")), {FIT}),
    "Lets exceptions of a fit through": (replies("fit", raise_errors), {FIT}),
    "Lets exceptions of metrics through": (replies("evaluate", raise_errors), {EVALUATE}),
    "Loses the innocent with the guilty": (replies("fit", lose_the_innocent), {FIT}),
    "Fails all with the guilty": (replies("fit", fail_all), {FIT}),
}
WRONG = [(engine(mistake, **methods), names) for mistake, (methods, names) in MISTAKES.items()]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_engine_fails_exactly(part, expected):
    assert failing(part) == expected


def test_a_right_engine_passes():
    assert failing(wrong(Relayed, "Nothing")) == set()


def test_an_engine_that_cannot_open_fails_every_check_with_its_words():
    def open_nothing(self, problem, inference, bins):
        raise ConnectionError("no node answers")

    found = reasons(wrong(Relayed, "Never opens", open=open_nothing))
    assert found.keys() == sentences(engine_checks.checks_of(Relayed))
    assert all(reason.startswith("ConnectionError: no node answers") for reason in found.values())


def test_every_check_has_an_engine_that_fails_it():
    names = sentences(engine_checks.checks_of(Relayed))
    assert set().union(*(expected for _, expected in WRONG)) == names


@pytest.mark.parametrize(
    ("mistake", "check", "said"),
    [
        ("Swaps two clients' posteriors", ROUNDS, "client 0 beside the local engine's: posterior."),
        ("Loses the last client", ROUNDS, "client 2 did not reply"),
        ("Loses the last evaluation", EVALUATION, "no evaluation of the clients 2"),
        ("Yields results as they come", SORTED, "replies of fit come in the order [2, 1, 0]"),
        ("Names the wrong stage of a fit", FIT, "but errors name client 1 in evaluate"),
        ("Lets exceptions of a fit through", FIT, "yield a ClientError for that client instead"),
        ("Fails all with the guilty", FIT, "but errors name client 0 in fit, client 1 in fit"),
    ],
)
def test_reasons_say_what_to_change(mistake, check, said):
    (part,) = (part for part, _ in WRONG if part.summary() == f"{mistake}.")
    assert said in reasons(part)[check]
