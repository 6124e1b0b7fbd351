"""What happens at a client: the survey, fitting, evaluation on held-out samples, calibration."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import attrs
import torch
from torch import Tensor

from bflcore.errors import BflError, ClientError, OptionError, described
from bflcore.inference.base import Explorable, answers
from bflcore.messages import Answer, Evaluation, LocalResult, Personalised
from bflcore.problem import metrics
from bflcore.problem.calibration import base as calibration
from bflcore.problem.label_prior import LABEL_COUNTS
from bflcore.problem.ood import ood_sums, ood_unit_scores

if TYPE_CHECKING:
    from bflcore.engines.base import (
        CalibrateReply,
        EvaluationReply,
        FitReply,
        PersonaliseReply,
        SurveyReply,
    )
    from bflcore.inference.base import LocalInference
    from bflcore.messages import Broadcast, Cohort, LocalResult
    from bflcore.problem.base import Problem, Shares
    from bflcore.problem.likelihoods import Likelihood, Predictive

__all__ = ["ClientWorker", "Memory", "Stage", "stack"]

Memory = Mapping[str, Tensor]
Stage = Literal["survey", "fit", "calibrate", "evaluate", "personalise"]
Sums = dict[str, Tensor]

BLOCK = 2048  # samples predicted at a time; bounds memory
# What an inference may raise at the cost of its client only: all but an interruption by the user.
FAILURES = (Exception, SystemExit, GeneratorExit)


def stack(memories: Sequence[Memory]) -> dict[str, Tensor]:
    """Stack the memories of K clients ``[...]`` to ``[K, ...]``."""
    loaded = [dict(memory.items()) for memory in memories]  # each is read once, if it is on disk
    return {name: torch.stack([memory[name] for memory in loaded]) for name in loaded[0]}


@attrs.frozen(eq=False)
class ClientWorker:
    """Does the work of any client: holds the data and the inference for the whole run.

    `bins` is the number of confidence bins of the calibration metrics.
    """

    problem: Problem
    inference: LocalInference
    bins: int

    def survey(
        self, known: Mapping[str, Tensor], clients: Sequence[int], _: Sequence[Memory] = ()
    ) -> list[SurveyReply]:
        """Let each client answer: first what its samples are to be scaled by, if at all.

        `known` ``[...]`` are the sums of the answers so far.
        """
        replies: list[SurveyReply] = []
        problem = self.problem.surveyed(known)
        for client in clients:
            try:
                replies.append(Answer(client, self._answer(problem, client)))
            except FAILURES as error:
                replies.append(_blame(client, "survey", error, self.inference))
        return replies

    def _answer(self, problem: Problem, client: int) -> dict[str, Tensor]:
        if problem.standardise and not problem.survey:
            return problem.moments(client)
        return answers(self.inference, problem, problem.cohort([client], {}, 0))

    def fit(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Sequence[Memory]
    ) -> list[FitReply]:
        """Fit a chunk of clients together; if that fails, one by one to find out who failed.

        Each client is alone where the likelihood counts its labels.
        """
        if len(clients) > 1 and self.problem.likelihood.counts_labels:
            return self._fit_each(broadcast, clients, memories)
        try:
            return [self._fit_together(broadcast, clients, memories)]
        except FAILURES as error:
            if len(clients) == 1:
                return [_blame(clients[0], "fit", error, self.inference)]
            return self._fit_each(broadcast, clients, memories)

    def _fit_each(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Sequence[Memory]
    ) -> list[FitReply]:
        return [
            reply
            for client, memory in zip(clients, memories, strict=True)
            for reply in self.fit(broadcast, [client], [memory])
        ]

    def evaluate(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Sequence[Memory]
    ) -> list[EvaluationReply]:
        """Evaluate clients one by one, on their own test samples and then on validation samples."""
        replies: list[EvaluationReply] = []
        for client, memory in zip(clients, memories, strict=True):
            try:
                replies += self._evaluate_one(broadcast, client, memory)
            except FAILURES as error:
                replies.append(_blame(client, "evaluate", error, self.inference))
        return replies

    def calibrate(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Sequence[Memory]
    ) -> list[CalibrateReply]:
        """Return each client's sums over its calibration samples (see `Calibrator`)."""
        replies: list[CalibrateReply] = []
        for client, memory in zip(clients, memories, strict=True):
            try:
                problem, cohort = self._personalised(broadcast, client, memory)
                replies.append(Answer(client, self._own_sums(problem, broadcast, cohort)))
            except FAILURES as error:
                replies.append(_blame(client, "calibrate", error, self.inference))
        return replies

    def personalise(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Sequence[Memory]
    ) -> list[PersonaliseReply]:
        """Return the memories ``[...]`` with which the clients predict, where they differ."""
        replies: list[PersonaliseReply] = []
        for client, memory in zip(clients, memories, strict=True):
            try:
                problem, cohort = self._personalised(broadcast, client, memory)
                own = {name: tensor[0] for name, tensor in cohort.memory.items()}
                if problem.likelihood.counts_labels:  # without which it could not predict later
                    own[LABEL_COUNTS] = problem.label_counts(cohort)[0]
                changed = None if _equal(own, memory) else own
                sums = self._kept_sums(problem, broadcast, cohort)
                replies.append(Personalised(client, changed, sums))
            except FAILURES as error:
                replies.append(_blame(client, "personalise", error, self.inference))
        return replies

    def _fit_together(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Sequence[Memory]
    ) -> LocalResult:
        """Fit a cohort ordered by falling size; return its result in the order of `clients`."""
        problem = self.problem.surveyed(broadcast.survey)
        size = problem.train.size
        order = sorted(range(len(clients)), key=lambda i: (-size(clients[i]), clients[i]))
        chosen = [clients[i] for i in order]
        memory = stack([memories[i] for i in order])
        cohort = problem.cohort(chosen, memory, broadcast.round)
        result = self.inference.fit(problem.for_client(cohort), broadcast, cohort)
        self._check(result, cohort)
        back = sorted(range(len(chosen)), key=lambda row: chosen[row])
        return result if back == list(range(len(back))) else result.select(back)

    def _check(self, result: LocalResult, cohort: Cohort) -> None:
        """Raise `OptionError` for what other processes could not be sent, or would mix up."""
        name = f"inference {self.inference.name}"
        if not isinstance(result, LocalResult):
            raise OptionError(f"{name} returned {type(result).__name__}; return a LocalResult")
        if tuple(result.clients) != cohort.clients:
            raise OptionError(
                f"{name} returned clients {result.clients} for {cohort.clients}; return the rows "
                "in the cohort's order"
            )
        fields = {
            "posterior": result.posterior.pack(),
            "memory": result.memory,
            "statistic": result.statistics,
        }
        for field, tensors in fields.items():
            for one, tensor in tensors.items():
                if getattr(tensor, "requires_grad", False):
                    raise OptionError(
                        f"{name} returned a {field} whose {one} requires grad; detach it"
                    )
                if type(tensor) is not torch.Tensor:
                    raise OptionError(
                        f"{name} returned a {field} whose {one} is {type(tensor).__name__}; return "
                        "a torch.Tensor"
                    )

    def _evaluate_one(self, broadcast: Broadcast, client: int, memory: Memory) -> list[Evaluation]:
        """Return one client's evaluations: one for each kind of samples that it has."""
        problem, cohort = self._personalised(broadcast, client, memory)
        own = self._kept_sums(problem, broadcast, cohort)
        fitted = calibration.fit(problem.calibrators, client, own, broadcast.calibration)
        tested = self._evaluate_on(problem, problem.test, broadcast, cohort, fitted)
        found = [tested and attrs.evolve(tested, ood=self._ood(problem, broadcast, cohort))]
        if problem.validation:
            held = self._evaluate_on(problem, problem.validation, broadcast, cohort, fitted)
            found.append(held and attrs.evolve(held, validation=True))
        return [evaluation for evaluation in found if evaluation]

    def _personalised(
        self, broadcast: Broadcast, client: int, memory: Memory
    ) -> tuple[Problem, Cohort]:
        """Return the client's problem, and the client as a cohort that is ready to predict."""
        problem = self.problem.surveyed(broadcast.survey)
        cohort = problem.cohort([client], stack([memory]), broadcast.round)
        own = self.inference.personalise(problem.for_client(cohort), broadcast, cohort)
        predicting = problem.for_client(cohort, predicting=True)
        return predicting, attrs.evolve(cohort, memory=own)

    def _evaluate_on(
        self,
        problem: Problem,
        samples: Shares,
        broadcast: Broadcast,
        cohort: Cohort,
        fitted: Sequence[calibration.Fitted],
    ) -> Evaluation | None:
        """Evaluate the personal and the server's model; None for a client without samples."""
        (client,), own = cohort.clients, cohort.memory
        personal, calibrated = self._sums(problem, samples, broadcast, cohort, fitted)
        if not personal:
            return None
        curves = self._curves(problem, samples, broadcast, cohort)
        if problem.layout.personal_total:  # the server's model is not complete
            return Evaluation(client, personal, None, curves, calibrated=calibrated)
        initial = stack([self.inference.initial_memory(problem)])
        shared = personal
        if problem.likelihood.counts_labels or not _equal(own, initial):
            served = attrs.evolve(cohort, memory=initial)
            shared, _ = self._sums(problem.for_server(), samples, broadcast, served)
        return Evaluation(client, personal, shared, curves, calibrated=calibrated)

    @torch.no_grad()
    def _sums(
        self,
        problem: Problem,
        samples: Shares,
        broadcast: Broadcast,
        cohort: Cohort,
        fitted: Sequence[calibration.Fitted] = (),
    ) -> tuple[Sums, Sums]:
        """Return the metrics of the model, and of the calibrated one (empty without `fitted`)."""
        found: tuple[Sums, Sums] = {}, {}
        for made, y in self._predicted(problem, samples, broadcast, cohort):
            blocks = [_measure(problem.likelihood, made, y, self.bins)]
            if fitted:
                adjusted = _measure(
                    problem.likelihood, calibration.adjust(fitted, made), y, self.bins
                )
                figures = calibration.measure(fitted, made, y)
                blocks.append(adjusted | metrics.per_sample(figures))
            for sums, block in zip(found, blocks, strict=False):
                sums.update(metrics.add(sums, block) if sums else block)
        return found

    def _predicted(
        self, problem: Problem, samples: Shares, broadcast: Broadcast, cohort: Cohort
    ) -> Iterator[tuple[Predictive, Tensor]]:
        """Yield the client's predictions of its samples and their targets, block by block."""
        # Every block draws from the same streams: one set of parameter draws for all samples.
        for x, y in _blocks(samples, cohort):
            yield self.inference.predict(problem, broadcast, cohort, x[None]), y

    @torch.no_grad()
    def _own_sums(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> Sums:
        """Return the calibrators' sums over the client's calibration samples."""
        found: Sums = {}
        if problem.calibration:
            predicted = self._predicted(problem, problem.calibration, broadcast, cohort)
            found = calibration.answer(problem.calibrators, predicted)
        return found or problem.uncalibrated()

    def _kept_sums(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> Sums:
        """Return the client's own sums for the calibrators that use them; often none."""
        using = tuple(one for one in problem.calibrators if one.scope != "federated")
        if cohort.novel or not using or not broadcast.calibration:
            return {}
        return self._own_sums(attrs.evolve(problem, calibrators=using), broadcast, cohort)

    @torch.no_grad()
    def _ood(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> Sums | None:
        """Compare the scores of test samples with those of foreign ones, in the last round only."""
        if problem.foreign is None or broadcast.round != problem.rounds:
            return None
        scaling = problem.train.scaling
        foreign = scaling.features(problem.foreign) if scaling else problem.foreign
        own, others = (
            torch.cat(
                [
                    ood_unit_scores(self.inference.predict(problem, broadcast, cohort, x[None]))[0]
                    for x in blocks
                ]
            )
            for blocks in ((x for x, _ in _blocks(problem.test, cohort)), foreign.split(BLOCK))
        )
        return ood_sums(own, others)

    @torch.no_grad()
    def _curves(
        self, problem: Problem, samples: Shares, broadcast: Broadcast, cohort: Cohort
    ) -> dict[str, dict[float, Sums]]:
        total: dict[str, dict[float, Sums]] = {}
        if not isinstance(self.inference, Explorable):
            return total
        for x, y in _blocks(samples, cohort):
            found = self.inference.curves(problem, broadcast, cohort, x[None])
            for axis, predictions in found.items():
                sums = total.setdefault(axis, {})
                for value, predictive in predictions.items():
                    one = _measure(problem.likelihood, predictive, y, self.bins, by_class=False)
                    sums[value] = metrics.add(sums[value], one) if value in sums else one
        return total


def _equal(one: Memory, other: Memory) -> bool:
    """Return whether two memories hold the same values."""
    given = dict(other.items())
    return one.keys() == given.keys() and all(one[name].equal(given[name]) for name in one)


def _blocks(samples: Shares, cohort: Cohort) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = samples.of(*cohort.clients)
    if len(y):  # splitting an empty tensor would give one empty block, which has no metrics
        # Copied, so that results do not depend on where in memory a client's samples begin.
        blocks = (block.clone() for block in x.split(BLOCK))
        yield from zip(blocks, y.split(BLOCK), strict=True)


def _measure(
    likelihood: Likelihood, predictive: Predictive, y: Tensor, bins: int, *, by_class: bool = True
) -> Sums:
    draws = predictive.draws[0]
    if predictive.noise is None:
        closed = None if predictive.closed_form is None else predictive.closed_form[0]
        return metrics.classification_sums(draws, y, bins, closed, by_class=by_class)
    noise = predictive.noise[0] if predictive.noise.ndim else predictive.noise
    variance = draws.var(0, correction=0) + noise
    return metrics.regression_sums(
        draws.mean(0), variance, y, likelihood.log_density(predictive, y)
    )


def _blame(
    client: int, stage: Stage, error: BaseException, inference: LocalInference
) -> ClientError:
    """Return the client's error for whatever its work raised: the round goes on without it."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, ClientError):  # whatever client it names
        return ClientError(client, stage, error.reason, error.trace or trace)
    if isinstance(error, BflError):
        return ClientError(client, stage, str(error), trace)
    return ClientError(client, stage, described(error, inference), trace)
