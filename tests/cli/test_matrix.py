"""Every combination of parts that is said to fit runs a round, and every other is refused.

Combinations come from the registry, so an installed plugin's parts are covered without a word
here. What a client sends does not depend on the server's parts: it is fitted once for each
inference and hyperparameter update, and fused in every way.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict

import pytest
import torch
from torch import nn

from bflcore import ClientError, GaussianNoise, IncompatibleError, OptionError
from bflcore.cli import main
from bflcore.cli.matrix import combinations
from bflcore.engines.local import Local
from bflcore.experiments.compatibility import FITTED, check
from bflcore.registry.loading import load_registry
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.problems import IMAGE, Replies, convolutional, dense, problem, surveyed

REGISTRY = load_registry()
INFERENCES = [part.name for part in REGISTRY.inferences.values()]
QUICK = {"local_epochs": 1, "batch_size": 4, "predict_draws": 2}  # where an inference has these
SINGLE = {"dtype": torch.float32}


def rectified():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


# The first that an inference accepts is its problem.
PROBLEMS = {
    "classification": lambda: problem(dense(), **SINGLE),
    "classification, body shared": lambda: problem(dense(), sharing="body", **SINGLE),
    "rectified units": lambda: problem(rectified(), **SINGLE),
    "images": lambda: problem(convolutional(), shape=IMAGE, head="4", **SINGLE),
    "regression": lambda: problem(rectified(), likelihood=GaussianNoise(), **SINGLE),
    "linear regression": lambda: problem(nn.Linear(3, 2), likelihood=GaussianNoise(), **SINGLE),
}


def made(kind, name):
    part = REGISTRY.of(kind)[name]
    known = getattr(part, "__attrs_attrs__", ())
    return part(**{f.name: QUICK[f.name] for f in known if f.name in QUICK})


def recipe_of(row):
    return Recipe(made("inference", row["inference"]), *(made(kind, row[kind]) for kind in FITTED))


def combinations_of(inference, *, fits):
    rows = combinations(REGISTRY)
    return [row for row in rows if row["inference"] == inference and row["fits"] == fits]


def accepted_problem(inference):
    """Return the first problem that `inference` works on; fail with its reasons if there is none.

    A part's own refusal (`check`, or one stated by a client) passes on to the next problem.
    """
    reasons = []
    for name, make in PROBLEMS.items():
        of = make()
        row = combinations_of(inference.name, fits=True)[0]
        try:
            inference.check(of)
            of = surveyed(inference, of)
            sent = begin(recipe_of(row), of)
            with Local(workers=1).open(of, inference, 10) as session:
                replies = list(session.fit(sent, of.clients))
        except (OptionError, IncompatibleError) as refusal:
            reasons.append(f"{name}: {refusal}")
            continue
        refusals = [str(reply) for reply in replies if isinstance(reply, ClientError)]
        if not refusals:
            return of
        reasons.append(f"{name}: {refusals[0]}")
    return pytest.fail(f"{inference.name} accepts no problem: " + "; ".join(reasons))


@pytest.mark.parametrize("name", INFERENCES)
def test_every_combination_that_fits_runs_a_round_and_can_go_on(name):
    inference = made("inference", name)
    of = accepted_problem(inference)
    rows = combinations_of(name, fits=True)
    assert rows, f"no server fits {name}"
    failures = []
    with Local(workers=1).open(of, inference, 10) as session:

        @functools.cache
        def sent_and_replies(hyper):
            row = next(row for row in rows if row["hyper"] == hyper)
            sent = begin(recipe_of(row), of)
            return sent, list(session.fit(sent, of.clients))

        tried = defaultdict(bool)
        for row in rows:
            sent, replies = sent_and_replies(row["hyper"])
            done = run_round(recipe_of(row), Replies(*replies), sent, of.clients, len(of.clients))
            after = done.broadcast
            assert (after.round, type(after.start)) == (1, type(sent.start)), row
            assert after.start.invalid() is after.prior.invalid() is None, row
            pair = (row["aggregator"], row["hyper"])
            if not tried[pair]:  # once is enough: under other weights it is the same code
                tried[pair] = True
                further = [*session.fit(after, of.clients), *session.evaluate(after, of.clients)]
                failures += [(row, str(f)) for f in further if isinstance(f, ClientError)]
    assert not failures


@pytest.mark.parametrize("name", INFERENCES)
def test_every_other_combination_is_refused_with_what_would_fit(name):
    for row in combinations_of(name, fits=False):
        parts = [REGISTRY.of(kind)[row[kind]] for kind in FITTED]
        with pytest.raises(IncompatibleError, match="that fit: "):
            check(REGISTRY, REGISTRY.inferences[name], *parts)


def test_the_matrix_has_both_kinds_of_combinations():
    verdicts = [row["fits"] for row in combinations(REGISTRY)]
    assert True in verdicts
    assert False in verdicts


@pytest.mark.parametrize(
    "words",
    [
        "fedvi -o inference.prior_sigma=1 --aggregator conflation --weighting max-discrepancy",
        "fedvi -o inference.prior_sigma=1 --data digits --aggregator dwc --pretrain 0.1",
        "mc-dropout --data digits --aggregator median --share body",
    ],
)
def test_whole_runs_on_digits_learn(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quick = "--clients 3 --train-per-class 20 --test-per-class 10 --rounds 2 --json"
    fast = "--local-epochs 8 --lr 0.01 --workers 1"
    with pytest.raises(SystemExit) as end:
        main(["run", *words.split(), *quick.split(), *fast.split()])
    captured = capsys.readouterr()
    assert end.value.code == 0, captured.err
    assert json.loads(captured.out)["final"]["personal.accuracy"]["mean"] > 0.5  # chance: 0.1


def test_the_matrix_names_the_weightings_that_fit(bfl):
    _, text, _ = bfl("matrix")
    of_points, of_gaussians = (
        next(
            line
            for line in text.partition(f"{name}  (gives")[2].splitlines()
            if "weightings:" in line
        )
        for name in ("map", "variational")
    )
    assert "distance" in of_gaussians
    assert "distance" not in of_points
