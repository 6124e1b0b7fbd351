"""Running an experiment, from round to round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

from bflcore.engines.faults import unreliable
from bflcore.errors import RunError
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.records import Record, Summary
from bflcore.rounds import Recipe, begin, run_round, sample_cohort

if TYPE_CHECKING:
    from bflcore.engines.base import Session
    from bflcore.experiments.checkpoint import Checkpoint, Checkpoints
    from bflcore.experiments.prepare import Prepared

__all__ = ["Progress", "Run", "execute"]

Progress = Callable[[int, float, "Record | None"], None]


def execute(
    prepared: Prepared,
    directory: RunDirectory,
    progress: Progress = lambda *_: None,
    session: Session | None = None,
) -> Record:
    """Run every round that is left, evaluate, write everything; return the summary.

    A directory with a checkpoint goes on from there, bit for bit. `progress` is called after
    each round with its number, its training loss, and the record of its evaluation if there was
    one; pre-training is round 0. `session`: clients that are at work already, in place of those
    that the experiment's engine would start. Raises `RunError` when too few clients give a valid
    result, or when the checkpoint cannot be read or written.
    """
    with directory.held(), directory.checkpoints as checkpoints:
        result = Run(prepared, directory, checkpoints, progress).finished(session)
    directory.write_json("summary.json", result)
    return result


class Run:
    """A run between two rounds: the server's state, the counters, and where they are kept."""

    def __init__(
        self,
        prepared: Prepared,
        directory: RunDirectory,
        checkpoints: Checkpoints,
        progress: Progress,
    ) -> None:
        self.experiment, self.problem = prepared.experiment, prepared.problem
        self.directory, self.checkpoints, self.progress = directory, checkpoints, progress
        experiment = self.experiment
        self.recipe = Recipe(
            experiment.inference, experiment.aggregator, experiment.weighting, experiment.hyper
        )
        self.summary = Summary(experiment.method)
        self.broadcast = begin(self.recipe, self.problem)

    def finished(self, given: Session | None = None) -> Record:
        """Restore what there is, run the rounds that are left, and return the summary."""
        run, problem = self.experiment.run, self.problem
        saved = self._restored()
        every = run.eval_every or max(1, run.rounds // 20)
        engine, inference = self.experiment.engine, self.experiment.inference
        with nullcontext(given) if given else engine.open(problem, inference, run.bins) as opened:
            opened.restore(saved.memories if saved else {})
            session = unreliable(opened, run.seed, run.drop_out, run.corrupt)
            if saved is None:
                self._pretrain(session)
                self._keep(session)
            for number in range(self.broadcast.round + 1, run.rounds + 1):
                clients = sample_cohort(
                    problem.clients, run.cohort or len(problem.clients), run.seed, number - 1
                )
                done = run_round(
                    self.recipe, session, self.broadcast, clients, run.min_clients, run.block
                )
                self.broadcast = done.broadcast
                self.summary.count(number, done)
                record = None
                if number % every == 0 or number == run.rounds:
                    record = self._evaluate(session, number, done.loss, done.report)
                if number % run.checkpoint_every == 0 or number == run.rounds:
                    self._keep(session)
                self.progress(number, done.loss, record)
        return self.summary.finish()

    def _restored(self) -> Checkpoint | None:
        """Take back what the newest checkpoint holds, and nothing that came after it."""
        saved = self.checkpoints.read(type(self.broadcast.start), self.problem.device)
        reached = saved.broadcast.round if saved else -1
        records = self.directory.rewind(reached)
        for logger in self.experiment.loggers:
            logger.rewind(self.directory.path, reached)
        if saved is None:
            return None
        for name, tensor in self.broadcast.start.pack().items():
            found = saved.broadcast.start.pack()[name]
            if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
                raise RunError(
                    f"{self.checkpoints.folder}: {name} is {found.dtype} {list(found.shape)}, but "
                    f"the model needs {tensor.dtype} {list(tensor.shape)}; run it again"
                )
        if len(records) != saved.state["evaluated"]:
            raise RunError(
                f"{self.directory.metrics}: {len(records)} of {saved.state['evaluated']} evaluated "
                f"rounds up to round {reached} are left; put the file back, or run it again"
            )
        self.broadcast = saved.broadcast
        self.summary.restore(saved.state, records)
        return saved

    def _pretrain(self, session: Session) -> None:
        fraction = self.experiment.run.pretrain
        if fraction:
            self.broadcast, loss = self.summary.pretrained(
                self.recipe, self.problem, self.broadcast, fraction
            )
            self.progress(0, loss, self._evaluate(session, 0, loss, {}))

    def _evaluate(
        self, session: Session, number: int, loss: float, report: Mapping[str, float]
    ) -> Record:
        record = self.summary.evaluated(number, loss, report, session, self.broadcast, self.problem)
        self.directory.append(record)
        for logger in self.experiment.loggers:
            logger.log(self.directory.path, record)
        self.directory.write_json("evaluation.json", self.summary.evaluation)
        return record

    def _keep(self, session: Session) -> None:
        written = [path for path in (self.directory.metrics,) if path.exists()]
        self.checkpoints.write(
            self.broadcast, session.memories, self.summary.state(), after=written
        )
