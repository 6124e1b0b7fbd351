"""SuPerFed against eq. 3 by autograd, its special cases, and what a client holds back."""

import attrs
import pytest
import torch

from bfl_superfed import mixing, prediction
from bfl_superfed.superfed import LowLossSubspace, initial_local_models
from bflcore import (
    Average,
    Broadcast,
    Continual,
    Examples,
    Fixed,
    GaussianNoise,
    Map,
    OptionError,
    Point,
)
from bflcore.engines.local import Local
from bflcore.experiments.resolve import resolve
from bflcore.inference.base import Explorable
from bflcore.inference.gradient import Gradient, batches, mean_loss, steps
from bflcore.inference.memory import keep_own
from bflcore.options import build
from bflcore.registry.loading import load_registry
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.problems import cohort, first_broadcast, normal, problem

SGD = {
    "optimiser": "sgd",
    "momentum": 0.9,
    "weight_decay": 0.01,
    "lr": 0.05,
    "lr_decay": 0.1,
    "local_epochs": 2,
    "batch_size": 3,
}
ONE_STEP = SGD | {"local_epochs": 1, "batch_size": 100, "lr_decay": 0.0}


def train(inference, of, rounds=3, hyper=None):
    recipe = Recipe(inference, Average(), Examples(), hyper or Fixed())
    broadcast = begin(recipe, of)
    found = []
    with Local(workers=1).open(of, inference, 10) as session:
        for _ in range(rounds):
            found.append(run_round(recipe, session, broadcast, of.clients))
            broadcast = found[-1].broadcast
        return found, dict(session.memories)


def begun(of, inference):
    """Clients that have a local model of their own."""
    members = cohort(of, inference)
    return with_local(members, 0.5 * normal(len(members.sizes), of.layout.total, seed=7))


def with_local(members, local):
    return attrs.evolve(members, memory=keep_own(members.memory, Point(local)))


def test_the_recipes_are_the_papers():
    mixes_models, mixes_layers = (
        resolve(load_registry(), name, {}, {}) for name in ("superfed-mm", "superfed-lm")
    )
    assert (mixes_models.inference.mixing, mixes_models.inference.nu) == ("model", 1.0)
    assert (mixes_layers.inference.mixing, mixes_layers.inference.nu) == ("layer", 2.0)
    for method in (mixes_models, mixes_layers):
        assert (method.inference.mu, method.inference.start) == (0.01, 0.4)
        assert (method.aggregator, method.weighting) == (Average(), Examples())
        # Table A1
        assert (method.inference.optimiser, method.inference.momentum) == ("sgd", 0.9)
        assert (method.inference.lr, method.inference.lr_decay) == (0.01, 0.01)
        assert (method.inference.local_epochs, method.inference.batch_size) == (10, 10)
        assert (method.run.cohort, method.model.name) == (5, "two-nn")


@pytest.mark.parametrize("sharing", ["all", "body"])
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_never_personalising_is_fedavg_and_with_a_pull_fedprox_bit_for_bit(mu, sharing):
    of = attrs.evolve(problem(sharing=sharing), rounds=3)
    hyper = Continual() if mu else Fixed()  # FedProx's anchor is the server's last model
    ours, _ = train(LowLossSubspace(start=1.0, nu=0.0, mu=mu, **SGD), of, hyper=hyper)
    theirs, _ = train(Map(anchor=mu, **SGD), of, hyper=hyper)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.broadcast.start.mean, other.broadcast.start.mean)
        assert mine.loss == other.loss


def test_the_pull_changes_the_result():
    of = problem()
    plain, _ = train(LowLossSubspace(start=1.0, mu=0.0, **SGD), of)
    pulled, _ = train(LowLossSubspace(start=1.0, mu=0.3, **SGD), of)
    assert not torch.equal(plain[-1].broadcast.start.mean, pulled[-1].broadcast.start.mean)


@pytest.mark.parametrize("mixes", ["model", "layer"])
@pytest.mark.parametrize("prox", ["squared", "norm"])
def test_the_gradients_are_those_of_eq_3_as_autograd_finds_them(mixes, prox):
    of = problem(sizes=(9,))
    x, y = of.train.of(0)
    objective = mixing.Objective(of.layout, mixes, mu=0.4, nu=1.5, prox=prox, weight_decay=0.01)
    server = of.initial
    federated = (server + 0.1 * normal(of.layout.total, seed=3)).requires_grad_()
    local = (0.5 * normal(of.layout.total, seed=7)).requires_grad_()
    lam = normal(of.layout.total, seed=4).sigmoid()
    mixture = (1 - lam) * federated + lam * local
    mixture.retain_grad()
    shift = federated - server
    pull = (
        shift.square().sum() / 2
        if prox == "squared"
        else sum(piece.norm() for piece in shift.split(of.layout.sizes))
    )
    decay = 0.01 / 2 * (federated.square().sum() + local.square().sum())
    cosine = torch.nn.functional.cosine_similarity(federated, local, dim=0)
    nll = of.likelihood.nll(of.forward(mixture[None], x[None])[0], y).mean()
    (nll + 0.4 * pull + 1.5 * cosine**2 + decay).backward()
    arguments = (federated, local, server, lam, mixture.grad)
    found = objective.gradients(*(tensor.detach()[None] for tensor in arguments))[0]
    torch.testing.assert_close(found, torch.stack([federated.grad, local.grad]))


def train_plainly(inference, objective, of, members, server, local):
    """Follow eq. 3's gradients as they are written, step by step."""
    models, taken = torch.stack([server, local], dim=1), steps(inference, members)
    rule, loss = inference.update_rule(models, members), server.new_zeros(len(server))
    differentiate, layers = Gradient(of), list(objective.layers.values())
    drawn = mixing.draw_lambdas(members, taken, len(layers), server)
    repeats = torch.tensor([layer.stop - layer.start for layer in layers])
    for batch, lambdas in zip(batches(inference, members), drawn, strict=True):
        k = len(batch.sizes)
        w_f, w_l = models[:k].unbind(1)
        lam = lambdas[:k].repeat_interleave(repeats, dim=1)
        nll, g = differentiate((1 - lam) * w_f + lam * w_l, batch)
        rule.step(objective.gradients(w_f, w_l, server[:k], lam, g))
        loss[:k] += nll
    return models, mean_loss(loss, taken)


@pytest.mark.parametrize("rule", [{}, {"optimiser": "adam", "momentum": 0.0}], ids=["sgd", "adam"])
@pytest.mark.parametrize("prox", ["squared", "norm"])
@pytest.mark.parametrize("mixes", ["model", "layer"])
@pytest.mark.parametrize("sizes", [(9,), (10, 7, 2)], ids=["one client", "a ragged cohort"])
def test_the_fast_round_follows_the_plain_gradients(sizes, mixes, prox, rule):
    of = problem(sizes=sizes)
    inference = LowLossSubspace(mixing=mixes, prox=prox, mu=0.4, nu=1.5, **SGD | rule)
    members, server = cohort(of, inference, round=3), of.initial.expand(len(sizes), -1)
    local = 0.5 * normal(len(sizes), of.layout.total, seed=7)
    arguments = (inference, inference.objective(of), of, members, server, local)
    models, loss = mixing.train(*arguments)
    expected, expected_loss = train_plainly(*arguments)
    assert not torch.allclose(models[:, 1], local)
    torch.testing.assert_close(models, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("prox", ["squared", "norm"])
@pytest.mark.parametrize("mixes", ["model", "layer"])
def test_a_round_is_what_pytorchs_optimiser_makes_of_autograds_gradients(mixes, prox, optimiser):
    of = problem(sizes=(9,))
    options = SGD | {"optimiser": optimiser, "batch_size": 4, "lr_decay": 0.0}
    inference = LowLossSubspace(
        mixing=mixes,
        prox=prox,
        mu=0.4,
        nu=1.5,
        start=0.0,
        lambda_selection="fixed",
        **options,
    )
    members = begun(of, inference)
    result = inference.fit(of, first_broadcast(inference, of), members)
    models = [
        of.initial.clone().requires_grad_(),
        members.memory["own.mean"][0].clone().requires_grad_(),
    ]
    known = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimiser]
    rule = known(models, lr=0.05, **({"momentum": 0.9} if optimiser == "sgd" else {}))
    lambdas = torch.rand(
        6,
        2 if mixes == "layer" else 1,
        generator=members.streams("lambda")[0],
        dtype=torch.float64,
    )
    repeats = torch.tensor(of.layout.sizes).view(lambdas.shape[1], -1).sum(1)
    for at, batch in zip(lambdas, batches(inference, members), strict=True):
        federated, local = models
        mix = at.repeat_interleave(repeats)
        outputs = of.forward(((1 - mix) * federated + mix * local)[None], batch.x)[0]
        shift = federated - of.initial
        pull = shift.square().sum() / 2
        if prox == "norm":
            pull = sum(
                piece.norm() for piece in shift.split(of.layout.sizes) if bool(piece.detach().any())
            )
        cosine = torch.nn.functional.cosine_similarity(federated, local, dim=0)
        decay = 0.01 / 2 * (federated.square().sum() + local.square().sum())
        rule.zero_grad()
        nll = of.likelihood.nll(outputs, batch.y[0]).mean()
        (nll + 0.4 * pull + 1.5 * cosine**2 + decay).backward()
        rule.step()
    torch.testing.assert_close(result.posterior.mean[0], models[0].detach())
    torch.testing.assert_close(result.memory["own.mean"][0], models[1].detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_a_direction_is_undefined_the_gradient_is_zero(dtype):
    of = problem(sizes=(9,), dtype=dtype)
    zero, whole = torch.zeros_like(of.initial)[None], of.initial[None]
    objective = mixing.Objective(of.layout, "model", mu=1.0, nu=1.0, prox="norm", weight_decay=0.0)
    assert not objective.prox_gradient(zero).any()
    inference = LowLossSubspace(prox="norm", **ONE_STEP)
    members = cohort(of, inference)
    for federated, local in ((whole, zero), (zero, whole), (zero, zero)):
        assert not objective.gradients(federated, local, federated, zero, zero).any()
        pushed, free = (
            mixing.train(inference, attrs.evolve(objective, nu=nu), of, members, federated, local)[
                0
            ]
            for nu in (1.0, 0.0)
        )
        assert torch.equal(pushed, free)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixing": "layer", "prox": "norm"},
        {"lambda_selection": "ensemble"},
        {"optimiser": "adam", "lr": 0.01},
    ],
)
@pytest.mark.parametrize("sharing", ["all", "body"])
def test_a_cohort_computes_what_its_clients_compute_alone(options, sharing):
    of = problem(sharing=sharing)
    inference = LowLossSubspace(start=0.0, **SGD | options)
    broadcast = first_broadcast(inference, of)
    together = inference.fit(of, broadcast, cohort(of, inference))
    for row, client in enumerate(together.clients):
        alone = inference.fit(of, broadcast, cohort(of, inference, [client]))
        torch.testing.assert_close(
            together.posterior.mean[row], alone.posterior.mean[0], rtol=1e-9, atol=1e-9
        )
        for name, tensor in alone.memory.items():
            torch.testing.assert_close(together.memory[name][row], tensor[0], rtol=1e-9, atol=1e-9)


def test_personalisation_starts_after_its_share_of_the_rounds():
    inference = LowLossSubspace(start=0.4, **SGD)
    of = attrs.evolve(problem(), rounds=5)
    assert [inference.personalises(of, number) for number in range(5)] == [False] * 2 + [True] * 3
    hundred = attrs.evolve(of, rounds=100)
    assert LowLossSubspace(start=0.29).personalises(
        hundred, 29
    )  # 0.29 * 100 < 29 in floating point
    assert not LowLossSubspace(start=0.29).personalises(hundred, 28)
    assert not LowLossSubspace(start=1.0).personalises(of, 99)
    for number, started in ((1, 0.0), (2, 1.0)):
        broadcast = first_broadcast(inference, of, number)
        memory = inference.fit(of, broadcast, cohort(of, inference, round=number)).memory
        assert memory["started"].tolist() == [started] * 3
        assert bool(memory["own.mean"].any()) == bool(started)


def test_every_client_has_a_random_start_of_its_own_like_the_networks_own():
    of = problem(sizes=(6, 6))
    inference = LowLossSubspace(start=0.0, **SGD)
    first = initial_local_models(of, cohort(of, inference))
    later = initial_local_models(of, cohort(of, inference, round=4))
    assert torch.equal(first, later)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], of.initial)
    for mine, theirs in zip(
        first[0].split(of.layout.sizes), of.initial.split(of.layout.sizes), strict=True
    ):
        assert torch.equal(mine.sort().values, theirs.sort().values)


def test_held_out_samples_are_never_trained_on_and_stay_the_same():
    of = problem(sizes=(10, 5))
    inference = LowLossSubspace(start=0.0, validation_fraction=0.3, **SGD)
    members = cohort(of, inference)
    seen, held = inference.hold_out(of, members)
    assert seen.sizes == (7, 4)
    later = inference.hold_out(of, cohort(of, inference, round=6))[1]
    assert all(torch.equal(one, two) for one, two in zip(held, later, strict=True))
    spoiled = members.x.clone()
    for row, rows in enumerate(held):
        spoiled[row, rows] = 1e3
    broadcast = first_broadcast(inference, of)
    clean = inference.fit(of, broadcast, members)
    loud = inference.fit(of, broadcast, attrs.evolve(members, x=spoiled))
    assert torch.equal(clean.posterior.mean, loud.posterior.mean)
    assert torch.equal(clean.memory["own.mean"], loud.memory["own.mean"])
    fixed = attrs.evolve(inference, lambda_selection="fixed")
    assert fixed.hold_out(of, members)[0].sizes == (10, 5)


def test_a_held_out_samples_loss_is_the_chance_to_miss_its_label():
    of = problem(sizes=(10,))
    x, y = of.train.x[:10], of.train.y[:10]
    missed = 1 - of.forward(of.initial[None], x[None])[0].softmax(-1)[range(10), y]
    torch.testing.assert_close(prediction.losses(of, of.initial, x, y), missed)
    other = attrs.evolve(of, likelihood=GaussianNoise())
    targets = x[:, :2]
    nll = -torch.distributions.Normal(of.forward(of.initial[None], x[None])[0], 0.1**0.5).log_prob(
        targets
    )
    torch.testing.assert_close(prediction.losses(other, of.initial, x, targets), nll.sum(1))


def test_of_lambdas_that_samples_cannot_tell_apart_the_expected_one_is_chosen():
    grid = torch.tensor(prediction.GRID, dtype=torch.float64)
    clear = (grid - 0.7).abs()[:, None].expand(-1, 20)  # every sample agrees
    assert prediction.nearest_to_expected(clear) == 0.7
    assert (
        prediction.nearest_to_expected(torch.zeros(11, 5)) == 0.3
    )  # of the grid, the nearest to 1/3
    # Lambda 0.8 gains 0.2 on three samples of five and loses 0.2 on two: by 0.04 on average, with
    # a standard error of 0.196 / sqrt(V). Five samples cannot tell; fifty can.
    gains = torch.zeros(11, 5, dtype=torch.float64)
    gains[8] = torch.tensor([0.2, -0.2, 0.2, -0.2, 0.2])
    assert prediction.nearest_to_expected(0.5 - gains) == 0.3
    assert prediction.nearest_to_expected(0.5 - gains.repeat(1, 10)) == 0.8


def test_the_chosen_lambda_comes_from_the_held_out_samples_alone():
    of = problem(sizes=(10, 7))
    inference = LowLossSubspace(start=0.0, validation_fraction=0.5, **SGD)
    members = begun(of, inference)
    broadcast = first_broadcast(inference, of)
    found = inference.personalise(of, broadcast, members)["chosen_lambda"]
    for row, rows in enumerate(inference.hold_out(of, members)[1]):
        x, y = members.x[row, rows], members.y[row, rows]
        mixtures = [
            (1 - at) * of.initial + at * members.memory["own.mean"][row] for at in prediction.GRID
        ]
        missed = [prediction.losses(of, w, x, y) for w in mixtures]
        assert float(found[row]) == prediction.nearest_to_expected(torch.stack(missed))
    # A client's lambda follows its labels: those that only the local end predicts choose it.
    sure = with_local(members, 50 * members.memory["own.mean"])
    outputs = of.forward(sure.memory["own.mean"], members.x)
    told = attrs.evolve(sure, y=outputs.argmax(-1))
    assert float(inference.personalise(of, broadcast, told)["chosen_lambda"][0]) > 0


def test_predictions_are_those_of_the_mixture_and_ensembles_average_the_segment():
    of = problem(sizes=(6, 6))
    inference = LowLossSubspace(lambda_selection="fixed", fixed_lambda=0.3)
    members, broadcast = begun(of, inference), first_broadcast(inference, of)
    x = of.train.x[:8].view(2, 4, 3)
    drawn = inference.predict(of, broadcast, members, x).draws
    whole = 0.7 * of.initial + 0.3 * members.memory["own.mean"]
    torch.testing.assert_close(drawn[:, 0], of.forward(whole, x).softmax(-1))
    ensemble = attrs.evolve(inference, lambda_selection="ensemble", ensemble_prior="uniform")
    every = ensemble.predict(of, broadcast, members, x)
    assert every.draws.shape == (2, 11, 4, 2)
    assert isinstance(inference, Explorable)
    curve = inference.curves(of, broadcast, members, x)["lambda"]
    assert list(curve) == list(prediction.GRID)
    for number, value in enumerate(curve.values()):
        torch.testing.assert_close(value.draws[:, 0], every.draws[:, number])


def test_the_falling_prior_weighs_predictions_by_its_density():
    of = problem(sizes=(6, 6))
    inference = LowLossSubspace(lambda_selection="ensemble")
    members = begun(of, inference)
    x = of.train.x[:8].view(2, 4, 3)
    found = inference.predict(of, first_broadcast(inference, of), members, x).draws
    assert found.shape == (2, 11, 4, 2)
    fine = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    curves = [
        of.forward(torch.lerp(of.initial, members.memory["own.mean"], value), x).softmax(-1)
        for value in fine
    ]
    density = 2 * (1 - fine) / 1000
    expected = (density[:, None, None, None] * torch.stack(curves)).sum(0)
    torch.testing.assert_close(found.mean(1), expected, rtol=0, atol=2e-3)


def test_a_client_without_a_local_model_predicts_with_the_servers():
    of = problem(sizes=(6,))
    inference = LowLossSubspace(fixed_lambda=1.0, lambda_selection="fixed")
    broadcast, members = first_broadcast(inference, of), cohort(of, inference)
    found = inference.predict(of, broadcast, members, of.train.x[None]).draws[0, 0]
    torch.testing.assert_close(found, of.forward(of.initial[None], of.train.x[None])[0].softmax(-1))


def test_a_novel_client_starts_from_the_servers_model():
    of = problem(sizes=(8, 8), novel=(1,))
    options = {"start": 0.0, "lambda_selection": "fixed"}
    inference = LowLossSubspace(**ONE_STEP | {"lr": 1e-9}, **options)
    server = Point(of.initial + 0.2)
    members = cohort(of, inference, [1])
    memory = inference.personalise(of, Broadcast(3, server, server), members)
    torch.testing.assert_close(memory["own.mean"][0], server.mean, rtol=0, atol=1e-6)
    learned = attrs.evolve(inference, lr=0.1)
    moved = learned.personalise(of, Broadcast(3, server, server), members)
    assert not torch.allclose(moved["own.mean"][0], server.mean)


def test_what_travels_costs_what_fedavg_costs():
    of = attrs.evolve(problem(), rounds=3)
    ours, _ = train(LowLossSubspace(start=0.3, **SGD), of)
    theirs, _ = train(Map(**SGD), of)
    assert [(r.bytes_up, r.bytes_down) for r in ours] == [
        (r.bytes_up, r.bytes_down) for r in theirs
    ]


def test_local_models_stay_with_their_clients():
    of = attrs.evolve(problem(), rounds=3)
    _, memories = train(LowLossSubspace(start=0.3, **SGD), of)
    locals_ = torch.stack([memories[client]["own.mean"] for client in of.clients])
    assert len(locals_.unique(dim=0)) == 3


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("fixed_lambda", 1.1, "at least 0 and at most 1"),
        ("fixed_lambda", -0.1, "at least 0 and at most 1"),
        ("start", 1.5, "at least 0 and at most 1"),
        ("start", -0.1, "at least 0 and at most 1"),
        ("validation_fraction", 0.0, "above 0 and below 1"),
        ("mixing", "tensor", "model | layer"),
        ("mu", -1.0, "at least 0"),
    ],
)
def test_a_wrong_option_says_what_is_allowed(name, value, allowed):
    with pytest.raises(OptionError) as caught:
        build(LowLossSubspace, {name: value}, "inference")
    assert str(caught.value) == f"inference.{name}: {value!r} is not allowed; allowed: {allowed}"


def test_the_network_is_the_papers():
    assert resolve(load_registry(), "superfed-mm", {}, {}).model.name == "two-nn"
