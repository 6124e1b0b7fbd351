"""Running an experiment, from round to round."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bflcore.engines.base import Session
from bflcore.engines.faults import simulate_faults
from bflcore.engines.screening import screen_evaluations, screen_personalised
from bflcore.engines.trust import FEWEST, Standing
from bflcore.errors import OptionError, RoundError, RunError, RunWarning
from bflcore.experiments.coefficients import FILE as COEFFICIENTS
from bflcore.experiments.coefficients import coefficients_of
from bflcore.experiments.models import OWN, STORED
from bflcore.experiments.pretraining import pretrain
from bflcore.experiments.records import Record, Records
from bflcore.experiments.samples import FILE as SAMPLES
from bflcore.experiments.samples import kept, telling_samples
from bflcore.experiments.stability import Stability, extremes
from bflcore.experiments.surveys import calibrate, survey
from bflcore.files import writing
from bflcore.randomness import SERVER
from bflcore.rounds import Recipe, Round, begin, run_round, sample_cohort

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.experiments.checkpoint import Checkpoint, Checkpoints
    from bflcore.experiments.directory import RunDirectory
    from bflcore.experiments.prepare import Prepared
    from bflcore.problem.base import Problem

__all__ = ["Progress", "Run", "evaluation_sample", "execute"]

DECIDING = 0.8  # share of all weight with which one client decides what is learnt

Progress = Callable[[int, float, "Record | None"], None]


def execute(
    prepared: Prepared,
    directory: RunDirectory,
    progress: Progress = lambda *_: None,
    session: Session | None = None,
) -> Record:
    """Run the remaining rounds, evaluate, write everything; return the summary.

    A directory with a checkpoint continues from there, bit for bit. `progress` is called after
    each round with its number, its training loss, and the record of its evaluation if there was
    one; pre-training is round 0. `session` holds clients that are already running; by default the
    experiment's engine starts them. Raises `RunError` when too few clients gave a valid
    result, when the checkpoint cannot be read, or when the directory is removed; `WriteError` when
    a file cannot be written.
    """
    try:
        with directory.lock(), directory.checkpoints as checkpoints:
            summary = Run(prepared, directory, checkpoints, progress).execute(session)
        directory.write_json("summary.json", summary)
    except Exception as error:
        if directory.path.is_dir():
            raise
        raise RunError(
            f"{directory.path}: the run directory was removed while the run was writing to it; "
            "start the run again"
        ) from error
    return summary


class Run:
    """A run between two rounds: the server's state, the records, and where both are kept."""

    def __init__(
        self,
        prepared: Prepared,
        directory: RunDirectory,
        checkpoints: Checkpoints,
        progress: Progress,
    ) -> None:
        self.prepared = prepared
        self.experiment, self.problem = prepared.experiment, prepared.problem
        self.directory, self.checkpoints, self.progress = directory, checkpoints, progress
        parts = prepared.experiment
        self.recipe = Recipe(parts.inference, parts.aggregator, parts.weighting, parts.hyper)
        ids = [client.id for client in prepared.description.clients]
        self.records = Records(parts.method, ids)
        self._warned = False
        self.standing = Standing()
        self.broadcast = begin(self.recipe, self.problem)

    def execute(self, given: Session | None = None) -> Record:
        """Restore the last checkpoint, run the remaining rounds, and return the summary."""
        run, engine, inference = self.experiment.run, self.experiment.engine, self.recipe.inference
        memories = self.restore()
        opening = nullcontext(given) if given else engine.open(self.problem, inference, run.bins)
        with opening as clients:
            if self.problem.calibrators and type(clients).calibrate is Session.calibrate:
                raise OptionError(
                    f"--calibration-fraction: engine {engine.name} does not calibrate; leave it "
                    "out, or use --engine local"
                )
            clients.use_folder(self.directory.memories)
            clients.restore(memories or {})
            session = simulate_faults(clients, run.seed, run.drop_out, run.corrupt)
            if memories is None:
                self._survey(session)
                self._pretrain(session)
                self._checkpoint(session)
            del memories  # they may be large, and the session holds them
            for number in range(self.broadcast.round + 1, run.rounds + 1):
                self._round(session, number)
        found = extremes(self.broadcast.start)
        for excess in self.records.unstable:
            _warn(self.stability.reminder(excess, found))
        return self.records.summary()

    @cached_property
    def stability(self) -> Stability:
        """What the server's posterior is compared with; known after the survey."""
        return Stability.of(self.recipe, begin(self.recipe, self.problem))

    def restore(self) -> Mapping[int, Mapping[str, Tensor]] | None:
        """Continue from the newest checkpoint; discard what was written after it.

        Returns the clients' memories ``[...]``; None if there is no checkpoint yet. Raises
        `RunError` if the checkpoint does not belong to this experiment.
        """
        saved = self.checkpoints.read_sound(type(self.broadcast.start), self.problem.device)
        reached = saved.broadcast.round if saved else -1
        records = self.directory.rewind(reached)
        with writing(self.directory.path):
            for logger in self.experiment.loggers:
                logger.rewind(self.directory.path, reached)
        if saved is None:
            return None
        self._check(saved, records)
        self.problem = self.problem.surveyed(saved.broadcast.survey)
        self.broadcast = begin(self.recipe, self.problem).followed_by(saved.broadcast)
        self.records.restore(saved.state, records)
        self.standing = Standing.unpack(saved.state.get("standing", {}))
        return saved.memories

    def _check(self, saved: Checkpoint, records: list[Record]) -> None:
        """Refuse a checkpoint of another model, or one whose lines of metrics are lost."""
        stored = saved.broadcast.start.pack()
        for name, tensor in self.broadcast.start.pack().items():
            found = stored[name]
            if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
                raise RunError(
                    f"{self.checkpoints.folder}: {name} is {found.dtype} {list(found.shape)}, but "
                    f"the model needs {tensor.dtype} {list(tensor.shape)}; start the run again"
                )
        if len(records) != saved.state["evaluated"]:
            raise RunError(
                f"{self.directory.metrics}: {len(records)} of {saved.state['evaluated']} evaluated "
                f"rounds up to round {saved.broadcast.round} can be read, the others are lost or "
                "damaged; restore the file, or start the run again"
            )

    def _round(self, session: Session, number: int) -> None:
        """Run one round; evaluate and write a checkpoint where one is due."""
        run, everyone = self.experiment.run, self.problem.clients
        clients = sample_cohort(everyone, run.cohort or len(everyone), run.seed, number - 1)
        limits = run.due(len(clients)), run.block, run.trust, self.standing
        try:
            done = run_round(self.recipe, session, self.broadcast, clients, *limits)
        except RoundError as error:
            if not (grown := self.stability.growth(self.broadcast.start)):
                raise
            raise RoundError(f"{error}; {grown} by round {number - 1}") from error
        self.broadcast, self.standing = done.broadcast, done.standing
        self.records.add_round(number, done)
        self._warn_of_weight(number, done)
        found = extremes(self.broadcast.start)
        for excess in self.records.add_excesses(self.stability.excesses(number, found)):
            _warn(self.stability.warning(excess))
        record, last = None, number == run.rounds
        if last and self.problem.calibrators:
            self._calibrate(session)
        if last or number % (run.eval_every or max(1, run.rounds // 20)) == 0:
            measured = {f"posterior.{name}": value for name, value in found.items()}
            record = self._evaluate(session, number, done.loss, {**done.report, **measured})
        if last:
            self._keep_models(session)
            self._keep_coefficients()
            self._keep_samples(session)
        if last or number % run.checkpoint_every == 0:
            self._checkpoint(session)
        self.progress(number, done.loss, record)

    def _warn_of_weight(self, number: int, done: Round) -> None:
        """Say once that a single client decides what is learnt."""
        client, share = done.heaviest
        if self._warned or share < DECIDING or len(done.replied) < FEWEST:
            return
        self._warned = True
        _warn(
            f"round {number}: client {client} holds {share:.0%} of all weight and decides the "
            "fused posterior almost alone; --weighting equal counts clients alike"
        )

    def _survey(self, session: Session) -> None:
        """Ask the clients for sums over their data, and begin with what they answered."""
        found = survey(self.recipe.inference, self.problem, session, self._due())
        self.records.add_answers(0, found)
        self.standing = Standing(found.reported)
        self.problem = self.problem.surveyed(found.sums)
        self.broadcast = begin(self.recipe, self.problem)

    def _calibrate(self, session: Session) -> None:
        """Ask the clients for sums over their calibration samples; they stay in the broadcast."""
        self.broadcast, found = calibrate(self.problem, session, self.broadcast, self._due())
        self.records.add_answers(self.broadcast.round, found)

    def _due(self) -> int:
        """Return how many clients must answer a question to all: without any there is no sum."""
        return max(1, self.experiment.run.due(len(self.problem.clients)))

    def _pretrain(self, session: Session) -> None:
        fraction = self.experiment.run.pretrain
        if not fraction:
            return
        clock = time.perf_counter()
        self.broadcast, loss = pretrain(self.recipe, self.problem, self.broadcast, fraction)
        self.records.seconds["pretraining"] = time.perf_counter() - clock
        self.progress(0, loss, self._evaluate(session, 0, loss, {}))

    def _evaluate(
        self, session: Session, number: int, loss: float, server: Mapping[str, Any]
    ) -> Record:
        """Evaluate the clients that are due and write the metrics wherever they go."""
        clock, run = time.perf_counter(), self.experiment.run
        everyone = (*self.problem.clients, *self.problem.novel)
        sample = evaluation_sample(self.problem, run.eval_clients)
        asked = everyone if number == run.rounds else sample
        replies = screen_evaluations(list(session.evaluate(self.broadcast, asked)), asked)
        self.records.seconds["evaluation"] += time.perf_counter() - clock
        server = {"clients": {"evaluated": len(asked), "all": len(everyone)}, **server}
        part = sample if len(sample) < len(asked) else ()
        record = self.records.add_evaluation(
            number, loss, server, replies, self.problem.novel, part
        )
        self.directory.append(record)
        with writing(self.directory.path):
            for logger in self.experiment.loggers:
                logger.log(self.directory.path, record)
        self.directory.write_json("evaluation.json", self.records.evaluation)
        return record

    def _keep_models(self, session: Session) -> None:
        """Store the models with which the clients predict at the end."""
        clock = time.perf_counter()
        everyone = (*self.problem.clients, *self.problem.novel)
        replies = screen_personalised(session.personalise(self.broadcast, everyone), everyone)
        self.directory.models.write(self.broadcast.round, replies)
        self.records.seconds["evaluation"] += time.perf_counter() - clock

    def _keep_coefficients(self) -> None:
        """Store the coefficients of a linear predictor, with names of columns."""
        found = coefficients_of(self.prepared, self.problem, self.broadcast)
        if found is not None:
            self.directory.write_json(COEFFICIENTS, found)

    def _keep_samples(self, session: Session) -> None:
        """Store a few test samples for the report, unless that is a question of privacy."""
        if not kept(self.experiment):
            return
        clock = time.perf_counter()
        clients = evaluation_sample(self.problem, self.experiment.run.eval_clients)
        trained = [client for client in clients if client not in self.problem.novel]
        stored = self.directory.models.index(self.broadcast.round)
        initial = self.recipe.inference.initial_memory(self.problem)

        def memory_of(client: int) -> Mapping[str, Tensor] | None:
            """Return the memory ``[...]`` with which a client predicts."""
            if stored.get(client) == OWN:
                return self.directory.models.read(client, self.problem.device)
            if stored.get(client) == STORED:
                return session.memories.get(client) or initial
            return None

        found = telling_samples(
            self.problem, self.recipe.inference, self.broadcast, trained, memory_of
        )
        if found:
            self.directory.write_json(SAMPLES, found)
        self.records.seconds["evaluation"] += time.perf_counter() - clock

    def _checkpoint(self, session: Session) -> None:
        metrics = self.directory.metrics
        written = [metrics] if metrics.exists() else []
        state = {**self.records.state(), "standing": self.standing.pack()}
        self.checkpoints.write(self.broadcast, session.memories, state, written)


def evaluation_sample(problem: Problem, count: int) -> tuple[int, ...]:
    """Return the clients that are evaluated before the last round.

    They are `count` of those that train (0: all), drawn once per run, and as many of those held
    out of training.
    """
    drawn = [
        sample_cohort(clients, count or len(clients), problem.seed, SERVER, "evaluation")
        for clients in (problem.clients, problem.novel)
    ]
    return (*drawn[0], *drawn[1])


def _warn(text: str) -> None:
    warnings.warn(text, RunWarning, stacklevel=3)
