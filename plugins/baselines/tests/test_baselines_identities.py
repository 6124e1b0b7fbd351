"""What special cases of the baselines must equal, bit for bit: FedAvg under the same seed."""

import attrs
import pytest
import torch
from builders import cohort, first_broadcast, problem

from bfl_baselines.inferences import (
    AdaptiveMixture,
    ControlVariates,
    Ditto,
    GroupSnip,
    GroupSparse,
    MetaLearning,
    Staged,
)
from bfl_baselines.plugin import bfl_methods
from bfl_superfed.plugin import LowLossSubspace
from bflcore import Accumulate, Average, Examples, Fixed, Map
from bflcore.engines.local import Local
from bflcore.rounds import Recipe, begin, run_round

OPTIONS = {"local_epochs": 2, "batch_size": 3, "lr": 0.05}
METHODS = list(bfl_methods())
METHOD = {method.name: method for method in METHODS}


def trained(inference, of, hyper=None, rounds=3):
    """Return the server's mean after some rounds, and the clients' memories."""
    recipe = Recipe(inference, Average(), Examples(), hyper or Fixed())
    broadcast = begin(recipe, of)
    with Local(workers=1).open(of, inference, 10) as session:
        for _ in range(rounds):
            broadcast = run_round(recipe, session, broadcast, of.clients).broadcast
        return broadcast.start.mean, dict(session.memories)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize(
    ("kind", "special"),
    [
        (Map, {"anchor": 0.0, "anchor_to": "start"}),
        (Staged, {"fine_tune_epochs": 2}),
        (Ditto, {"pull": 0.3}),
        (AdaptiveMixture, {}),
        (GroupSparse, {"group_lasso": 0.0, "energy": 1.0}),
        (GroupSnip, {"pruned": 0.0}),
        (
            LowLossSubspace,
            {"start": 1.0, "mu": 0.0, "nu": 0.0, "weight_decay": 0.0, "lambda_selection": "fixed"},
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_travels_is_fedavgs(kind, special, optimiser):
    of = problem(sizes=(7, 5, 2), dtype=torch.float32)
    options = {**OPTIONS, "optimiser": optimiser}
    hyper = Accumulate() if kind is GroupSnip else Fixed()
    expected, _ = trained(Map(**options), of)
    assert not torch.equal(expected, of.initial)
    found, _ = trained(kind(**options, **special), of, hyper)
    assert torch.equal(found, expected)


def test_fedprox_that_pulls_is_not_fedavg():
    of = problem(sizes=(7, 5, 2), dtype=torch.float32)
    options = {**OPTIONS, **{k.partition(".")[2]: v for k, v in METHOD["fedprox"].defaults.items()}}
    assert not torch.equal(trained(Map(**options), of)[0], trained(Map(**OPTIONS), of)[0])


def test_scaffold_with_zero_controls_takes_fedavgs_full_batch_step():
    of = problem(sizes=(7, 5, 2), dtype=torch.float32)
    options = {"local_epochs": 1, "batch_size": 10, "lr": 0.05}
    expected, _ = trained(Map(optimiser="sgd", **options), of, rounds=1)
    found, _ = trained(ControlVariates(**options), of, Accumulate(), rounds=1)
    assert torch.equal(found, expected)
    expected, _ = trained(Map(optimiser="sgd", **options), of, rounds=2)
    found, _ = trained(ControlVariates(**options), of, Accumulate(), rounds=2)
    assert not torch.equal(found, expected)  # now the controls are not zero


@pytest.mark.parametrize("name", ["fedper", "local", "lg-fedavg"])
def test_sharing_all_makes_a_split_method_fedavg(name):
    assert METHOD[name].inference == "map"
    assert METHOD[name].share in {"body", "none", "head"}
    assert not METHOD[name].defaults


def test_lg_fedavg_is_fedper_that_shares_the_head():
    fedper, lg = METHOD["fedper"], METHOD["lg-fedavg"]
    parts = ("inference", "aggregator", "weighting", "hyper", "defaults")
    assert all(getattr(fedper, part) == getattr(lg, part) for part in parts)
    assert (fedper.share, lg.share) == ("body", "head")


def test_dittos_own_network_without_a_pull_is_local_training():
    of = problem(sizes=(7, 5, 2), dtype=torch.float32)
    _, memories = trained(Ditto(pull=0.0, **OPTIONS), of)
    alone = attrs.evolve(of, layout=attrs.evolve(of.layout, shared=(False,) * 4))
    _, expected = trained(Map(**OPTIONS), alone)
    for client in of.clients:
        assert torch.equal(memories[client]["own.mean"], expected[client]["personal.mean"])


def test_meta_learning_without_a_step_is_fedavg_on_half_batches():
    of = problem(sizes=(1,), dtype=torch.float32)  # one sample is both halves
    expected, _ = trained(Map(**OPTIONS), of)
    found, _ = trained(MetaLearning(inner_lr=1e-30, **OPTIONS), of)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("sizes", [(1, 2), (3, 1)])
def test_clients_smaller_than_a_batch_train_on_their_samples(method, sizes):
    from bflcore.registry.loading import load_registry

    kind = load_registry().get("inference", method.inference)
    of = problem(sizes=sizes, sharing=method.share)
    inference = kind(local_epochs=2, batch_size=50, lr=0.05)
    start = first_broadcast(inference, of)
    for client in (0, 1):
        members = cohort(of, inference, [client])
        result = inference.fit(of, start, members)
        before = {**start.start.pack(), **members.memory}
        after = {**result.posterior.pack(), **result.memory}
        adapted = inference.personalise(of, start, members)
        assert all(tensor.isfinite().all() for tensor in adapted.values())
        assert any(
            not torch.equal(after[n][0], before[n].reshape(after[n][0].shape)) for n in after
        )
