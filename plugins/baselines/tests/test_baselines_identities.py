"""What special cases of the baselines must equal, bit for bit: FedAvg under the same seed."""

import attrs
import pytest
import torch

from bfl_baselines.apfl import AdaptiveMixture
from bfl_baselines.ditto import PulledNetwork
from bfl_baselines.group_snip import GroupSnip
from bfl_baselines.group_sparse import GroupSparse
from bfl_baselines.per_fedavg import MetaLearning
from bfl_baselines.plugin import bfl_methods
from bfl_baselines.scaffold import ControlVariates
from bfl_baselines.staged import Staged
from bflcore import Accumulate, Average, Examples, Fixed, Map
from bflcore.engines.local import Local
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.problems import cohort, first_broadcast, problem

OPTIONS = {"local_epochs": 2, "batch_size": 3, "lr": 0.05}
METHODS = [method.name for method in bfl_methods()]


def resolved(method, **file):
    return resolve(load_registry(), method, file, {})


def trained(inference, of, hyper=None, rounds=3, first=0):
    """Return the server's mean after some rounds, and the clients' memories."""
    recipe = Recipe(inference, Average(), Examples(), hyper or Fixed())
    broadcast = attrs.evolve(begin(recipe, of), round=first)
    with Local(workers=1).open(of, inference, 10) as session:
        for _ in range(rounds):
            broadcast = run_round(recipe, session, broadcast, of.clients).broadcast
        return broadcast.start.mean, dict(session.memories)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize(
    ("name", "special"),
    [
        ("map", {"anchor": 0.0, "anchor_to": "start"}),
        (Staged.name, {"fine_tune_epochs": 2}),
        (PulledNetwork.name, {"pull": 0.3}),
        (AdaptiveMixture.name, {}),
        (GroupSparse.name, {"group_lasso": 0.0, "target": 1.0}),
        (
            "low-loss-subspace",  # of another plugin
            {"start": 1.0, "mu": 0.0, "nu": 0.0, "weight_decay": 0.0, "lambda_selection": "fixed"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_server_receives_what_fedavg_sends(name, special, optimiser):
    of = problem(sizes=(7, 5, 2), dtype=torch.float32)
    options = {**OPTIONS, "optimiser": optimiser}
    expected, _ = trained(Map(**options), of)
    assert not torch.equal(expected, of.initial)
    kind = load_registry().inferences[name]
    found, _ = trained(kind(**options, **special), of)
    assert torch.equal(found, expected)


def test_snip_that_prunes_nothing_is_fedavg_from_round_2_on():
    of = problem(sizes=(7, 5, 2), dtype=torch.float32)
    expected, _ = trained(Map(**OPTIONS), of, rounds=2, first=1)
    found, _ = trained(GroupSnip(pruned=0.0, **OPTIONS), of, Accumulate(), rounds=3)
    torch.testing.assert_close(found, expected)


def test_fedprox_that_pulls_is_not_fedavg():
    of = problem(sizes=(7, 5, 2), dtype=torch.float32)
    pulled = resolved("fedprox", inference=OPTIONS).inference
    assert not torch.equal(trained(pulled, of)[0], trained(Map(**OPTIONS), of)[0])


def test_scaffold_with_zero_controls_takes_fedavgs_full_batch_step():
    of = problem(sizes=(7, 5, 2), dtype=torch.float32)
    options = {"local_epochs": 1, "batch_size": 10, "lr": 0.05}
    expected, _ = trained(Map(optimiser="sgd", **options), of, rounds=1)
    found, _ = trained(ControlVariates(**options), of, Accumulate(), rounds=1)
    assert torch.equal(found, expected)
    expected, _ = trained(Map(optimiser="sgd", **options), of, rounds=2)
    found, _ = trained(ControlVariates(**options), of, Accumulate(), rounds=2)
    assert not torch.equal(found, expected)  # now the controls are not zero


@pytest.mark.parametrize(
    ("method", "share", "other"),
    [
        ("fedper", "all", "fedavg"),
        ("local", "all", "fedavg"),
        ("lg-fedavg", "all", "fedavg"),
        ("fedper", "head", "lg-fedavg"),
        ("fedavg", "none", "local"),
    ],
)
def test_methods_that_differ_only_in_what_is_shared(method, share, other):
    assert attrs.evolve(resolved(method, share=share), method=other) == resolved(other)


def test_their_sharing_is_the_papers():
    shares = {name: resolved(name).run.share for name in METHODS}
    body = {name for name, share in shares.items() if share == "body"}
    assert body == {"fedper", "fedrep", "fedbabu", "fedpop"}
    assert (shares.pop("lg-fedavg"), shares.pop("local")) == ("head", "none")
    assert {share for name, share in shares.items() if name not in body} == {"all"}


def test_dittos_own_network_without_a_pull_is_local_training():
    of = problem(sizes=(7, 5, 2), dtype=torch.float32)
    _, memories = trained(PulledNetwork(pull=0.0, **OPTIONS), of)
    alone = attrs.evolve(of, layout=attrs.evolve(of.layout, shared=(False,) * 4))
    _, expected = trained(Map(**OPTIONS), alone)
    for client in of.clients:
        assert torch.equal(memories[client]["own.mean"], expected[client]["personal.mean"])


def test_meta_learning_without_a_step_is_fedavg_on_half_batches():
    of = problem(sizes=(1,), dtype=torch.float32)  # one sample is both halves
    expected, _ = trained(Map(**OPTIONS), of)
    found, _ = trained(MetaLearning(inner_lr=1e-30, **OPTIONS), of)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sizes", [(1, 2), (3, 1)])
def test_clients_smaller_than_a_batch_train_on_their_samples(method, sizes):
    experiment = resolved(method, inference={"local_epochs": 2, "batch_size": 50, "lr": 0.05})
    of, inference = problem(sizes=sizes, sharing=experiment.run.share), experiment.inference
    start = first_broadcast(inference, of, round=1)  # group-snip trains from round 2 on
    for client in (0, 1):
        members = cohort(of, inference, [client], round=1)
        result = inference.fit(of, start, members)
        before = {**start.start.pack(), **members.memory}
        after = {**result.posterior.pack(), **result.memory}
        adapted = inference.personalise(of, start, members)
        assert all(tensor.isfinite().all() for tensor in adapted.values())
        assert any(
            not torch.equal(after[n][0], before[n].reshape(after[n][0].shape)) for n in after
        )
