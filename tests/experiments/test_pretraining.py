"""Pre-training: whose samples, which draws, and what becomes of the posterior."""

import csv
import json
import tomllib

import attrs
import pytest
import torch

from bflcore import Broadcast, Cohort, Continual, Fixed, Gaussian, Map, RunError, Variational
from bflcore.cli import main
from bflcore.experiments.pretraining import pool_samples, pretrain
from bflcore.problem.base import Shares
from bflcore.randomness import SERVER
from bflcore.rounds import Recipe, begin
from bflcore.testing.problems import problem

OPTIONS = {"local_epochs": 2, "batch_size": 3}


def recipe(inference, hyper=None):
    return Recipe(inference, None, None, hyper or Fixed())


def first(inference, of):
    return begin(recipe(inference), of)


def rows(x):
    return {tuple(row) for row in x.tolist()}


def test_the_pool_is_a_share_of_the_training_clients_samples_and_of_nobody_elses():
    of = problem(sizes=(40, 30, 20, 50), novel=(3,))
    x, y = pool_samples(of, 0.3).train.of(0)
    assert len(x) == len(y) == 27  # of 90
    owners = [rows(of.train.of(client)[0]) for client in range(4)]
    assert all(rows(x) & owner for owner in owners[:3])
    assert not rows(x) & owners[3]
    labels = {
        tuple(row): int(label)
        for row, label in zip(of.train.x.tolist(), of.train.y.tolist(), strict=True)
    }
    assert [labels[tuple(row)] for row in x.tolist()] == y.tolist()


def test_the_pool_is_drawn_by_the_runs_seed():
    sizes = (40, 30)
    one, again, other = (pool_samples(problem(sizes=sizes, seed=s), 0.5).train.x for s in (0, 0, 1))
    assert torch.equal(one, again)
    assert rows(one) != rows(other)
    assert rows(pool_samples(problem(sizes=sizes), 0.2).train.x) <= rows(one)


@pytest.mark.parametrize(("fraction", "expected"), [(1e-9, 1), (0.5, 7), (1.0, 14)])
def test_the_pool_holds_one_sample_at_least_and_all_at_most(fraction, expected):
    of = problem()
    x, _ = pool_samples(of, fraction).train.of(SERVER)
    assert len(rows(x)) == len(x) == expected


@pytest.mark.parametrize("inference", [Map(**OPTIONS), Variational(**OPTIONS)])
def test_start_and_prior_are_what_the_inference_makes_of_the_pool(inference):
    of = problem()
    sent = first(inference, of)
    after, loss = pretrain(recipe(inference), of, sent, 0.5)
    pool = pool_samples(of, 0.5)
    x, y = pool.train.of(0)
    member = Cohort((SERVER,), x[None], y[None], (len(x),), {}, of.seed, 0)
    expected = inference.fit(pool, sent, member)
    assert (after.round, loss) == (0, float(expected.loss[0]))
    for name, tensor in expected.posterior[0].pack().items():
        assert not torch.equal(tensor, sent.start.pack()[name])
        assert torch.equal(after.start.pack()[name], tensor)
        assert torch.equal(after.prior.pack()[name], tensor)


def test_only_shared_coordinates_are_pre_trained():
    of = problem(sharing="body")
    inference = Variational(**OPTIONS)
    before = inference.initial_memory(of)
    after, _ = pretrain(recipe(inference), of, first(inference, of), 0.5)
    assert after.start.mean.shape == (of.layout.shared_total,)
    remembered = inference.initial_memory(of)
    assert all(torch.equal(remembered[name], before[name]) for name in before)
    assert torch.equal(before["personal.mean"], of.layout.split(of.initial)[1])


@attrs.frozen(kw_only=True)
class Certain(Variational):
    """Knows its first coordinate for certain."""

    name = "certain"

    def fit(self, problem, broadcast, cohort):
        result = super().fit(problem, broadcast, cohort)
        variance = result.posterior.variance.clone()
        variance[:, 0] = 0
        return attrs.evolve(result, posterior=Gaussian(result.posterior.mean, variance))


def test_a_certain_coordinate_gets_a_prior_that_it_can_leave():
    of = problem()
    after, _ = pretrain(recipe(Certain(**OPTIONS)), of, first(Certain(), of), 0.5)
    assert after.start.variance[0] == 0
    assert after.prior.variance[0] == Continual().zero_variance
    assert torch.equal(after.prior.variance[1:], after.start.variance[1:])
    own = recipe(Certain(**OPTIONS), Continual(zero_variance=0.3))
    assert pretrain(own, of, first(Certain(), of), 0.5)[0].prior.variance[0] == 0.3


def test_the_servers_other_state_is_kept():
    of, inference = problem(), Map(**OPTIONS)
    sent = attrs.evolve(first(inference, of), hyper={"noise": torch.ones(1)})
    after, _ = pretrain(recipe(inference), of, sent, 0.5)
    assert isinstance(after, Broadcast)
    assert after.hyper == sent.hyper


def test_a_fit_that_fails_is_one_line():
    of, inference = problem(), Map(**OPTIONS)
    of.train.x.fill_(float("nan"))
    with pytest.raises(RunError, match="--pretrain: inference map gave no valid result on the 7 "):
        pretrain(recipe(inference), of, first(inference, of), 0.5)


QUICK = (
    "--data synthetic --partition natural --clients 3 --rounds 1 --local-epochs 3 --workers 1 "
    "-o dataset.owners=4 -o dataset.samples=30"
)


def bfl(capsys, words):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    return end.value.code, capsys.readouterr().err


def test_a_run_records_shows_and_evaluates_its_pre_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, err = bfl(capsys, f"run fedvi {QUICK} --pretrain 0.25 --out run")
    assert status == 0, err
    assert "pre-training on 25 % of the training samples (reported as round 0)" in err
    assert "round 0/1  loss" in err
    assert tomllib.loads((tmp_path / "run/experiment.toml").read_text())["pretrain"] == 0.25
    lines = [json.loads(one) for one in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1]
    assert lines[0]["bytes"] == {"up": 3 * 8, "down": 0}  # the survey
    assert json.loads((tmp_path / "run/summary.json").read_text())["seconds"]["pretraining"] > 0
    assert bfl(capsys, "run run/experiment.toml --out again")[0] == 0
    again = [json.loads(one) for one in (tmp_path / "again/metrics.jsonl").read_text().splitlines()]
    assert all(a["global.nll"] == b["global.nll"] for a, b in zip(again, lines, strict=True))


def test_figures_that_round_zero_lacks_do_not_shift_the_csvs_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = f"run fedvi {QUICK} --aggregator dwc --pretrain 0.25 --log csv --out run"
    assert bfl(capsys, words)[0] == 0
    lines = [json.loads(one) for one in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    with (tmp_path / "run/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["aggregator.floored"] for row in rows] == ["", "0.0"]
    for row, line in zip(rows, lines, strict=True):
        assert int(row["round"]) == line["round"]
        assert float(row["global.nll.pooled"]) == line["global.nll"]["pooled"]
        assert int(row["bytes.up"]) == line["bytes"]["up"]


def test_a_run_without_pre_training_has_no_round_zero(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, err = bfl(capsys, f"run fedavg {QUICK} --out run")
    assert status == 0
    assert "round 0" not in err
    assert "pre-training" not in err
    assert "pretraining" not in json.loads((tmp_path / "run/summary.json").read_text())["seconds"]


@pytest.mark.parametrize("value", ["-0.1", "1.5", "nan", "a-tenth"])
def test_no_share_of_the_samples_is_refused(value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, err = bfl(capsys, f"run fedavg {QUICK} --pretrain={value}")
    assert status == 2
    assert "--pretrain" in err
    assert "allowed: " in err
    assert not (tmp_path / "runs").exists()


def test_the_pool_holds_no_validation_samples():
    of = problem(sizes=(40, 30))
    own = [list(range(5, 40)), list(range(45, 70))]
    held = [list(range(5)), list(range(40, 45))]
    train, validation = (Shares.gather(of.train.x, of.train.y, part) for part in (own, held))
    pooled = pool_samples(attrs.evolve(of, train=train, validation=validation), 1.0)
    assert pooled.train.size(SERVER) == 60
    assert not rows(pooled.train.x) & rows(validation.x)
