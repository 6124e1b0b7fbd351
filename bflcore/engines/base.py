"""What an engine is: the middle arrow of a round."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

import attrs

from bflcore.errors import ClientError
from bflcore.options import Component

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from bflcore.inference.base import LocalInference
    from bflcore.messages import Answer, Broadcast, Evaluation, LocalResult, Personalised
    from bflcore.problem.base import Problem

    FitReply = LocalResult | ClientError
    EvaluationReply = Evaluation | ClientError
    SurveyReply = Answer | ClientError
    CalibrateReply = Answer | ClientError
    PersonaliseReply = Personalised | ClientError

__all__ = ["Engine", "Session", "Wrapped"]


class Engine(Component, abc.ABC):
    """Base of engines."""

    kind: ClassVar[str] = "engine"

    def clients_per_step(self, problem: Problem) -> int:
        """Return how many clients one training step trains at most (default: 1)."""
        return 1

    def processes(self, problem: Problem, inference: LocalInference) -> int:
        """Return in how many processes the clients of a run work (default: 1)."""
        return 1

    def workplace(self, problem: Problem, inference: LocalInference) -> str:
        """Say in a few words where the clients run (default: the engine's name)."""
        return f"engine {self.name}"

    @abc.abstractmethod
    def open(
        self, problem: Problem, inference: LocalInference, bins: int
    ) -> AbstractContextManager[Session]:
        """Start the clients; leaving the context releases what they hold."""


class Session(abc.ABC):
    """Clients at work. Replies come back sorted by client id, whoever was fastest.

    A memory is a mapping of names to tensors ``[...]`` of one client, without a client axis.
    """

    @property
    def memories(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The memories ``[...]`` that a checkpoint must hold (default: none, clients keep them).

        Memories are immutable: a client's new memory is a new object.
        """
        return {}

    def use_folder(self, folder: Path) -> None:  # noqa: B027 - optional
        """Take a folder for files that the run does not keep; called before `restore`.

        It need not exist, and is removed at the end (default: no files).
        """

    def restore(self, memories: Mapping[int, Mapping[str, Tensor]]) -> None:  # noqa: B027 - optional
        """Restore memories ``[...]`` from a checkpoint; called before the first round."""

    @abc.abstractmethod
    def survey(self, known: Mapping[str, Tensor], clients: Sequence[int]) -> Iterator[SurveyReply]:
        """Ask for sums over the training data, given the sums ``[...]`` that are known so far."""

    @abc.abstractmethod
    def fit(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[FitReply]:
        """Run `LocalInference.fit`; yield a client's failure as an error instead of raising it."""

    @abc.abstractmethod
    def store(self, result: LocalResult) -> None:
        """Store the memories of clients whose result was accepted."""

    @abc.abstractmethod
    def evaluate(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[EvaluationReply]:
        """Personalise, predict every client's test samples, and sum their metrics.

        Where the problem has validation samples, a second `Evaluation` follows for each client.
        """

    def calibrate(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[CalibrateReply]:
        """Ask for the calibrators' sums over calibration samples, as predicted at the end.

        Called once, after the last round, if the problem has calibrators. Default: nobody can.
        """
        for client in clients:
            yield ClientError(client, "calibrate", "its engine does not calibrate")

    def personalise(
        self, broadcast: Broadcast, clients: Sequence[int]
    ) -> Iterator[PersonaliseReply]:
        """Yield what `LocalInference.personalise` gives each client, for the run directory.

        Called once, after the last round. Default: nothing, the models stay with the clients.
        """
        yield from ()


@attrs.frozen(eq=False)
class Wrapped(Session):
    """Base of sessions that change one thing about another session and forward the rest."""

    session: Session

    @property
    def memories(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The session's memories ``[...]``."""
        return self.session.memories

    def use_folder(self, folder: Path) -> None:
        """Give the folder to the session."""
        self.session.use_folder(folder)

    def restore(self, memories: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Restore the session's memories ``[...]``."""
        self.session.restore(memories)

    def survey(self, known: Mapping[str, Tensor], clients: Sequence[int]) -> Iterator[SurveyReply]:
        """Survey as the session does; `known` are the sums ``[...]`` so far."""
        yield from self.session.survey(known, clients)

    def fit(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[FitReply]:
        """Fit as the session does."""
        yield from self.session.fit(broadcast, clients)

    def store(self, result: LocalResult) -> None:
        """Hand the result to the session."""
        self.session.store(result)

    def evaluate(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[EvaluationReply]:
        """Evaluate as the session does."""
        yield from self.session.evaluate(broadcast, clients)

    def calibrate(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[CalibrateReply]:
        """Calibrate as the session does."""
        yield from self.session.calibrate(broadcast, clients)

    def personalise(
        self, broadcast: Broadcast, clients: Sequence[int]
    ) -> Iterator[PersonaliseReply]:
        """Personalise as the session does."""
        yield from self.session.personalise(broadcast, clients)
