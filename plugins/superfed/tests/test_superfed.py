"""SuPerFed against eq. 3 by autograd, its special cases, and what a client holds back."""

import attrs
import pytest
import torch
from builders import cohort, first_broadcast, normal, problem

from bfl_superfed import mixing, prediction, subspace
from bfl_superfed.plugin import LowLossSubspace
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
from bflcore.inference.gradient import batches
from bflcore.options import build
from bflcore.registry.loading import load_registry
from bflcore.rounds import Recipe, begin, run_round

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
    local = 0.5 * normal(len(members.sizes), of.layout.total, seed=7)
    ones = torch.ones_like(members.memory["started"])
    return attrs.evolve(members, memory={**members.memory, "local": local, "started": ones})


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
def test_one_step_descends_eq_3_as_autograd_finds_it(mixes, prox):
    of = problem(sizes=(9,))
    inference = LowLossSubspace(
        mixing=mixes, prox=prox, mu=0.4, nu=1.5, start=0.0, lambda_selection="fixed", **ONE_STEP
    )
    members = begun(of, inference)
    # The server's model, and a start that differs from it: the pull's direction is defined.
    server = of.initial
    federated = (server + 0.1 * normal(of.layout.total, seed=3)).requires_grad_()
    local = members.memory["local"][0].clone().requires_grad_()
    layers = [0, 0, 1, 1] if mixes == "layer" else [0, 0, 0, 0]
    drawn = torch.rand(
        1, max(layers) + 1, generator=members.streams("lambda")[0], dtype=torch.float64
    )[0]
    mix = torch.cat([drawn[i].expand(n) for i, n in zip(layers, of.layout.sizes, strict=True)])
    outputs = of.forward(((1 - mix) * federated + mix * local)[None], members.x)[0]
    shift = federated - server
    pull = (
        shift.square().sum() / 2
        if prox == "squared"
        else sum(piece.norm() for piece in shift.split(of.layout.sizes))
    )
    decay = 0.01 / 2 * (federated.square().sum() + local.square().sum())
    cosine = torch.nn.functional.cosine_similarity(federated, local, dim=0)
    objective = of.likelihood.nll(outputs, members.y[0]).mean() + 0.4 * pull + 1.5 * cosine**2
    (objective + decay).backward()

    pieces = mixing.layers(inference, of)
    lambdas = mixing.draw(members, (1,), len(pieces), like=of.initial)
    for piece, at in zip(pieces, lambdas[0, :, 0, 0], strict=True):
        assert (mix[piece] == at).all()
    models = torch.stack([federated, local])[None].detach()
    slope = torch.autograd.functional.jacobian(
        lambda w: of.likelihood.nll(of.forward(w[None], members.x)[0], members.y[0]).mean(),
        torch.lerp(models[0, 0], models[0, 1], mix),
    )
    stack = torch.stack([*models[0], slope, server])
    products = mixing.terms(inference, lambdas)[0, :, 0]
    products[:, :, :2] += mixing.cosine_terms(models, 1.5 * models.new_tensor(mixing.COSINE))
    found = torch.cat([c @ stack[:, piece] for c, piece in zip(products, pieces, strict=True)], 1)
    if prox == "norm":
        found[0] += 0.4 * mixing.directions(of, shift[None].detach())[0]
    torch.testing.assert_close(found, torch.stack([federated.grad, local.grad]))


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
        members.memory["local"][0].clone().requires_grad_(),
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
    torch.testing.assert_close(result.memory["local"][0], models[1].detach())


def test_where_a_direction_is_undefined_the_gradient_is_zero():
    of = problem(sizes=(9,))
    zero = torch.zeros_like(of.initial)
    assert not mixing.directions(of, zero[None]).any()
    for federated, local in ((of.initial, zero), (zero, of.initial), (zero, zero)):
        models = torch.stack([federated, local])[None].float()
        push = models.new_tensor(mixing.COSINE)
        assert not torch.bmm(mixing.cosine_terms(models, push), models).any()


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
    assert [inference.personal(of, number) for number in range(5)] == [False] * 2 + [True] * 3
    hundred = attrs.evolve(of, rounds=100)
    assert LowLossSubspace(start=0.29).personal(hundred, 29)  # 0.29 * 100 < 29 in floating point
    assert not LowLossSubspace(start=0.29).personal(hundred, 28)
    assert not LowLossSubspace(start=1.0).personal(of, 99)
    for number, started in ((1, 0.0), (2, 1.0)):
        broadcast = first_broadcast(inference, of, number)
        memory = inference.fit(of, broadcast, cohort(of, inference, round=number)).memory
        assert memory["started"].tolist() == [started] * 3
        assert bool(memory["local"].any()) == bool(started)


def test_every_client_has_a_random_start_of_its_own_like_the_networks_own():
    of = problem(sizes=(6, 6))
    inference = LowLossSubspace(start=0.0, **SGD)
    first = subspace.with_local_models(of, cohort(of, inference))["local"]
    later = subspace.with_local_models(of, cohort(of, inference, round=4))["local"]
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
    seen, held = subspace.hold_out(inference, of, members)
    assert seen.sizes == (7, 4)
    later = subspace.hold_out(inference, of, cohort(of, inference, round=6))[1]
    assert all(torch.equal(one, two) for one, two in zip(held, later, strict=True))
    spoiled = members.x.clone()
    for row, rows in enumerate(held):
        spoiled[row, rows] = 1e3
    broadcast = first_broadcast(inference, of)
    clean = inference.fit(of, broadcast, members)
    loud = inference.fit(of, broadcast, attrs.evolve(members, x=spoiled))
    assert torch.equal(clean.posterior.mean, loud.posterior.mean)
    assert torch.equal(clean.memory["local"], loud.memory["local"])
    fixed = attrs.evolve(inference, lambda_selection="fixed")
    assert subspace.hold_out(fixed, of, members)[0].sizes == (10, 5)


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
    assert prediction.choose(clear) == 0.7
    assert prediction.choose(torch.zeros(11, 5)) == 0.3  # of the grid, the nearest to 1/3
    # Lambda 0.8 gains 0.2 on three samples of five and loses 0.2 on two: by 0.04 on average, with
    # a standard error of 0.196 / sqrt(V). Five samples cannot tell; fifty can.
    gains = torch.zeros(11, 5, dtype=torch.float64)
    gains[8] = torch.tensor([0.2, -0.2, 0.2, -0.2, 0.2])
    assert prediction.choose(0.5 - gains) == 0.3
    assert prediction.choose(0.5 - gains.repeat(1, 10)) == 0.8


def test_the_chosen_lambda_comes_from_the_held_out_samples_alone():
    of = problem(sizes=(10, 7))
    inference = LowLossSubspace(start=0.0, validation_fraction=0.5, **SGD)
    members = begun(of, inference)
    broadcast = first_broadcast(inference, of)
    found = inference.personalise(of, broadcast, members, novel=False)["lambda"]
    for row, rows in enumerate(subspace.hold_out(inference, of, members)[1]):
        x, y = members.x[row, rows], members.y[row, rows]
        mixtures = [
            (1 - at) * of.initial + at * members.memory["local"][row] for at in prediction.GRID
        ]
        missed = [prediction.losses(of, w, x, y) for w in mixtures]
        assert float(found[row]) == prediction.choose(torch.stack(missed))
    # A client's lambda follows its labels: those that only the local end predicts choose it.
    sure = attrs.evolve(members, memory={**members.memory, "local": 50 * members.memory["local"]})
    outputs = of.forward(sure.memory["local"], members.x)
    told = attrs.evolve(sure, y=outputs.argmax(-1))
    assert float(inference.personalise(of, broadcast, told, novel=False)["lambda"][0]) > 0


def test_predictions_are_those_of_the_mixture_and_ensembles_average_the_segment():
    of = problem(sizes=(6, 6))
    inference = LowLossSubspace(lambda_selection="fixed", fixed_lambda=0.3)
    memory = begun(of, inference).memory
    x = of.train.x[:8].view(2, 4, 3)
    start = Point(of.initial)
    drawn = inference.predict(of, start, memory, x, []).draws
    whole = 0.7 * of.initial + 0.3 * memory["local"]
    torch.testing.assert_close(drawn[:, 0], of.forward(whole, x).softmax(-1))
    ensemble = attrs.evolve(inference, lambda_selection="ensemble", ensemble_prior="uniform")
    every = ensemble.predict(of, start, memory, x, [])
    assert every.draws.shape == (2, 11, 4, 2)
    curve = inference.curves(of, start, memory, x, [])["lambda"]
    assert list(curve) == list(prediction.GRID)
    for number, value in enumerate(curve.values()):
        torch.testing.assert_close(value.draws[:, 0], every.draws[:, number])


def test_the_falling_prior_weighs_predictions_by_its_density():
    of = problem(sizes=(6, 6))
    inference = LowLossSubspace(lambda_selection="ensemble")
    memory = begun(of, inference).memory
    x = of.train.x[:8].view(2, 4, 3)
    found = inference.predict(of, Point(of.initial), memory, x, []).draws
    assert found.shape == (2, 11, 4, 2)
    fine = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    curves = [
        of.forward(torch.lerp(of.initial, memory["local"], value), x).softmax(-1) for value in fine
    ]
    density = 2 * (1 - fine) / 1000
    expected = (density[:, None, None, None] * torch.stack(curves)).sum(0)
    torch.testing.assert_close(found.mean(1), expected, rtol=0, atol=2e-3)


def test_a_client_without_a_local_model_predicts_with_the_servers():
    of = problem(sizes=(6,))
    inference = LowLossSubspace(fixed_lambda=1.0, lambda_selection="fixed")
    memory = cohort(of, inference).memory
    found = inference.predict(of, Point(of.initial), memory, of.train.x[None], []).draws[0, 0]
    torch.testing.assert_close(found, of.forward(of.initial[None], of.train.x[None])[0].softmax(-1))


def test_a_novel_client_starts_from_the_servers_model():
    of = problem(sizes=(8, 8), novel=(1,))
    options = {"start": 0.0, "lambda_selection": "fixed"}
    inference = LowLossSubspace(**ONE_STEP | {"lr": 1e-9}, **options)
    server = Point(of.initial + 0.2)
    members = cohort(of, inference, [1])
    memory = inference.personalise(of, Broadcast(3, server, server), members, novel=True)
    torch.testing.assert_close(memory["local"][0], server.mean, rtol=0, atol=1e-6)
    learned = attrs.evolve(inference, lr=0.1)
    moved = learned.personalise(of, Broadcast(3, server, server), members, novel=True)
    assert not torch.allclose(moved["local"][0], server.mean)


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
    locals_ = torch.stack([memories[client]["local"] for client in of.clients])
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
