import math
import os
import time
from pathlib import Path

import attrs
import pytest
import torch

from bflcore import (
    Average,
    ClientError,
    Continual,
    Equal,
    Fixed,
    LocalInference,
    Map,
    RunError,
    Variational,
)
from bflcore.engines.local import OVERHEAD, SMALL, Local
from bflcore.engines.pool import InProcessPool
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.problems import problem

INFERENCES = [
    Map(local_epochs=2, batch_size=3),
    Variational(local_epochs=2, batch_size=3, estimator="reparameterisation"),
    Variational(local_epochs=2, batch_size=3, estimator="local-reparameterisation"),
    Variational(local_epochs=2, batch_size=3, estimator="flipout"),
]


def rounds(inference, engine, of=None, number=3, hyper=None):
    """Run a few rounds; return the last posterior, the losses and every client's figures."""
    of = of or problem(sharing="body")
    recipe = Recipe(inference, Average(), Equal(), hyper or Continual())
    broadcast, losses = begin(recipe, of), []
    with engine.open(of, inference, 10) as session:
        for _ in range(number):
            done = run_round(recipe, session, broadcast, of.clients)
            broadcast = done.broadcast
            losses.append(done.loss)
        found = list(session.evaluate(broadcast, of.clients))
    return broadcast, losses, [{k: v.tolist() for k, v in e.personal.items()} for e in found]


@pytest.mark.parametrize("inference", INFERENCES, ids=lambda i: getattr(i, "estimator", i.name))
def test_clients_trained_together_equal_clients_trained_alone(inference):
    alone, alone_losses, _ = rounds(inference, Local(workers=1, chunk=1))
    together, losses, _ = rounds(inference, Local(workers=1, chunk=10))
    for name, tensor in alone.start.pack().items():
        torch.testing.assert_close(together.start.pack()[name], tensor, rtol=1e-9, atol=1e-9)
    assert losses == pytest.approx(alone_losses, rel=1e-9)


def test_two_worker_processes_compute_what_one_does_to_the_bit():
    inference = INFERENCES[2]
    one, losses, figures = rounds(inference, Local(workers=1))
    two, other_losses, other_figures = rounds(inference, Local(workers=2))
    assert other_losses == losses
    assert other_figures == figures
    for name, tensor in one.start.pack().items():
        assert torch.equal(two.start.pack()[name], tensor)


def test_memories_on_disk_give_what_memories_in_the_process_give_to_the_bit():
    held, losses, figures = rounds(INFERENCES[1], Local(workers=2))
    stored, other_losses, other_figures = rounds(INFERENCES[1], Local(workers=2, memory_limit=0))
    assert (other_losses, other_figures) == (losses, figures)
    assert torch.equal(stored.start.mean, held.start.mean)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of open files are POSIX's")
def test_many_clients_need_few_open_files():
    import resource

    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = problem(sizes=[2] * 90, sharing="body")
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 60, allowed[1])
    )
    try:
        _, losses, figures = rounds(INFERENCES[1], Local(workers=2), of=clients, number=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert len(losses) == 2
    assert len(figures) == 90


@attrs.frozen(kw_only=True)
class Faulty(LocalInference):
    """Train as `map` does, except for one client."""

    name = "faulty"
    family = "point"
    how: str = "raise"
    inner: Map = Map(local_epochs=1)

    def initial(self, problem):
        return self.inner.initial(problem)

    def fit(self, problem, broadcast, cohort):
        if 1 in cohort.clients:
            if self.how == "raise":
                raise ValueError("no power today\nand more")
            if self.how == "exit":
                os._exit(7)
            cohort = (
                attrs.evolve(cohort, x=cohort.x.masked_fill(torch.tensor(True), float("nan")))
                if len(cohort.clients) == 1
                else cohort
            )
        return self.inner.fit(problem, broadcast, cohort)

    def predict(self, problem, broadcast, cohort, x):
        return self.inner.predict(problem, broadcast, cohort, x)


def one_round(engine, how, clients=(0, 1, 2), min_clients=1):
    of, inference = problem(), Faulty(how=how)
    recipe = Recipe(inference, Average(), Equal(), Fixed())
    with engine.open(of, inference, 10) as session:
        return run_round(recipe, session, begin(recipe, of), clients, min_clients)


@pytest.mark.parametrize(
    ("engine", "how", "reason"),
    [
        (Local(workers=1), "raise", "ValueError: no power today"),
        (Local(workers=1, chunk=3), "raise", "ValueError: no power today"),
        (Local(workers=1), "nan", "loss is nan"),
        (Local(workers=2), "exit", r"its worker process died \(exit code 7\)"),
        (Local(workers=1, client_timeout=99), "exit", r"its worker process died \(exit code 7\)"),
    ],
)
def test_a_client_that_fails_is_dropped_with_its_reason_and_the_round_goes_on(engine, how, reason):
    done = one_round(engine, how)
    assert done.replied == (0, 2)
    (failure,) = done.dropped
    assert (failure.client, failure.stage) == (1, "fit")
    with pytest.raises(ClientError, match=reason):
        raise failure
    clean = one_round(engine, "raise", clients=(0, 2))
    assert torch.equal(done.broadcast.start.mean, clean.broadcast.start.mean)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_traceback_of_a_client_travels_from_its_worker_to_the_log(workers, caplog):
    caplog.set_level("DEBUG", "bflcore")
    (failure,) = one_round(Local(workers=workers), "raise").dropped
    (entry,) = caplog.records
    assert entry.getMessage().startswith(
        "client 1 failed in fit: ValueError: no power today and more at engines/test_local.py:"
    )
    for text in ("Traceback", "test_local.py", 'raise ValueError("no power today\\nand more")'):
        assert text in entry.getMessage()
        assert text in failure.trace


def sized(samples, rounds):
    """Return a problem of 3 clients with so many samples each, in so many rounds."""
    return attrs.evolve(problem(sizes=[samples] * 3), rounds=rounds)


def test_a_small_problem_runs_in_one_process_and_a_large_one_in_one_per_core(monkeypatch):
    monkeypatch.setattr("bflcore.engines.local.cores", lambda: 2)
    inference, passes = Map(local_epochs=10), 10 * 3 * 100
    parameters = problem().layout.total
    rounds = math.ceil(SMALL / (passes * (OVERHEAD + parameters)))
    chosen = [Local().processes(sized(100, r), inference) for r in (0, rounds - 1, rounds)]
    assert chosen == [1, 1, 2]
    longer = inference.replace(local_epochs=20)
    assert Local().processes(sized(100, rounds // 2 + 1), longer) == 2
    assert Local(workers=2).processes(sized(1, 1), inference) == 2
    assert Local(workers=9).processes(sized(1, 1), inference) == 3
    monkeypatch.setattr("bflcore.engines.local.cores", lambda: 64)
    assert Local().processes(sized(100, rounds), inference) == 3


def test_a_run_opens_as_many_processes_as_it_says(monkeypatch):
    opened = []
    monkeypatch.setattr("bflcore.engines.pool.ProcessPool", lambda *given: opened.append(given))
    with Local().open(problem(), Map(), 10) as session:
        assert isinstance(session.pool, InProcessPool)
    assert opened == []


def test_a_round_with_too_few_results_stops_and_says_why():
    with pytest.raises(RunError, match="round 1: 2 of 3 clients.*3 are needed.*no power today"):
        one_round(Local(workers=1), "raise", min_clients=3)


@attrs.frozen(kw_only=True)
class Slow(Map):
    """Client 1 never comes to an end."""

    name = "slow"

    def fit(self, problem, broadcast, cohort):
        if 1 in cohort.clients:
            time.sleep(600)
        return super().fit(problem, broadcast, cohort)


@pytest.mark.thorough
def test_a_client_over_time_is_dropped_and_its_worker_replaced():
    of, inference = problem(), Slow(local_epochs=1)
    recipe = Recipe(inference, Average(), Equal(), Fixed())
    # Long enough for an honest client on a busy machine; client 2 needs the replaced worker.
    with Local(workers=1, client_timeout=20.0).open(of, inference, 10) as session:
        done = run_round(recipe, session, begin(recipe, of), of.clients)
    assert done.replied == (0, 2)
    assert [(e.client, e.reason) for e in done.dropped] == [
        (1, "it took longer than 20 s (--client-timeout)")
    ]
