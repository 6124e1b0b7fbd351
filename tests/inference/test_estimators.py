"""The three gradient estimators against autograd with the same noise, and against quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from bflcore import Variational
from bflcore.inference.estimators import estimator
from bflcore.inference.gradient import Batch
from bflcore.inference.normals import Noise
from bflcore.problem.likelihoods import GaussianNoise
from bflcore.randomness import stream
from bflcore.testing.problems import IMAGE, cohort, convolutional, dense, normal, problem

NAMES = ("reparameterisation", "local-reparameterisation", "flipout")
each_estimator = pytest.mark.parametrize("name", NAMES)

PROBLEMS = {
    "dense": lambda: problem(dense()),
    "convolutional": lambda: problem(convolutional(), shape=IMAGE, head="4"),
    "no bias": lambda: problem(nn.Sequential(nn.Linear(3, 2, bias=False)), head="0"),
    "a layer alone": lambda: problem(nn.Linear(3, 2), head=""),
}
each_problem = pytest.mark.parametrize("of", [make() for make in PROBLEMS.values()], ids=PROBLEMS)


class Tied(nn.Module):
    """Two layers share a weight: it is one random variable."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def streams(clients, seed=0):
    return [stream(seed, 0, client, "noise") for client in range(clients)]


def normals(source, *shape):
    """Draw the noise of one client as the estimators do."""
    return source.fill(torch.empty(1, *shape, dtype=torch.float64))[0]


def whole(of, client=0):
    """Return all samples of a client as one batch."""
    x, y = of.train.of(client)
    return Batch(x[None], y[None], (len(x),))


def parameters(of):
    """Return a mean and a sigma that are nobody's initial values."""
    total = of.layout.total
    return of.initial + 0.1 * normal(total, seed=3), 0.3 * normal(total, seed=4).exp()


def differentiate(of, outputs_of, mean, sigma, batch):
    """Return the loss and its gradients in the mean and in log sigma by autograd."""
    m, rho = mean.clone().requires_grad_(), sigma.log().requires_grad_()
    loss = of.likelihood.nll(outputs_of(m, rho.exp()), batch.y[0]).mean()
    return loss.detach(), *torch.autograd.grad(loss, (m, rho))


def compare(of, name, outputs_of):
    mean, sigma = parameters(of)
    batch = whole(of)
    estimate = estimator(name, of, streams(1), batch.x[0, :1])
    found = estimate(mean[None], sigma[None], batch)
    for ours, theirs in zip(found, differentiate(of, outputs_of, mean, sigma, batch), strict=True):
        torch.testing.assert_close(ours[0], theirs, rtol=1e-10, atol=1e-12)


def call(of, vector, x):
    return functional_call(of.network, of.layout.unflatten(vector), (x,))


@each_problem
def test_reparameterisation_is_autograd_through_one_draw_of_the_weights(of):
    eps = normals(Noise(streams(1)), of.layout.total)
    x = whole(of).x[0]
    compare(of, "reparameterisation", lambda m, s: call(of, m + s * eps, x))


def layers(of):
    """Return the perturbed layers by name, with the shapes of their inputs and outputs."""
    found = {}

    def record(path):
        def hook(module, inputs, outputs):
            found[path] = (module, inputs[0].shape[1:], outputs.shape[1:])

        return hook

    handles = [
        module.register_forward_hook(record(path))
        for path, module in of.network.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    of.network(of.train.x[:1])
    for handle in handles:
        handle.remove()
    return found


def forward_with(of, vector, replacements, x):
    """Run the network on `x`, the outputs of some layers replaced by a function of their input."""
    tensors = of.layout.unflatten(vector)
    handles = [
        of.network.get_submodule(path).register_forward_hook(
            lambda module, inputs, outputs, replace=replace: replace(inputs[0])
        )
        for path, replace in replacements.items()
    ]
    try:
        return functional_call(of.network, tensors, (x,))
    finally:
        for handle in handles:
            handle.remove()


def own(of, vector, path):
    """Return weight and bias of a layer within a flat vector."""
    tensors = of.layout.unflatten(vector)
    prefix = f"{path}." if path else ""
    return tensors[f"{prefix}weight"], tensors.get(f"{prefix}bias")


def patches(module, x):
    """Return what each output unit sees, ``[B, positions, fan-in]``, and the output's shape."""
    if isinstance(module, nn.Linear):
        return x[:, None], (module.out_features,)
    seen = functional.unfold(x, module.kernel_size, padding=module.padding, stride=module.stride)
    side = int(seen.shape[-1] ** 0.5)
    return seen.transpose(1, 2), (module.out_channels, side, side)


def moments(module, x, weight, bias):
    """Return patches times weights plus bias, in the shape of the layer's output."""
    seen, shape = patches(module, x)
    sums = seen @ weight.reshape(weight.shape[0], -1).T + (0 if bias is None else bias)
    return sums.transpose(1, 2).reshape(len(x), *shape)


@each_problem
def test_local_reparameterisation_is_autograd_through_noisy_preactivations(of):
    source, x, found = Noise(streams(1)), whole(of).x[0], layers(of)
    noise = {path: normals(source, len(x), *shape) for path, (_, _, shape) in found.items()}
    eps = normals(source, of.layout.total)  # of what is in no such layer

    def outputs(m, s):
        def noisy(path, module):
            def replace(inputs):
                center = moments(module, inputs, *own(of, m, path))
                variance = moments(module, inputs.square(), *own(of, s.square(), path))
                return center + variance.sqrt() * noise[path]

            return replace

        replacements = {path: noisy(path, module) for path, (module, _, _) in found.items()}
        return forward_with(of, m + s * eps, replacements, x)

    compare(of, "local-reparameterisation", outputs)


@each_problem
def test_flipout_is_autograd_through_a_draw_whose_signs_differ_by_sample(of):
    source, x, found = Noise(streams(1)), whole(of).x[0], layers(of)
    signs = {
        path: tuple(
            torch.where(normals(source, len(x), shape[0]) < 0, -1.0, 1.0) for shape in shapes
        )
        for path, (_, *shapes) in found.items()
    }
    eps = normals(source, of.layout.total)

    def outputs_of_sample(m, s, sample):
        """Run one sample with weights of its own: W + s_out (Delta W) s_in."""
        draw = of.layout.unflatten(s * eps)
        for path, (sign_in, sign_out) in signs.items():
            prefix = f"{path}." if path else ""
            flip = sign_out[sample][:, None] * sign_in[sample]
            weight = draw[f"{prefix}weight"]
            flip = flip.reshape(flip.shape + (1,) * (weight.ndim - 2))
            draw[f"{prefix}weight"] = weight * flip
            if f"{prefix}bias" in draw:
                draw[f"{prefix}bias"] = draw[f"{prefix}bias"] * sign_out[sample]
        mean = of.layout.unflatten(m)
        weights = {name: mean[name] + draw[name] for name in mean}
        return functional_call(of.network, weights, (x[[sample]],))

    compare(
        of,
        "flipout",
        lambda m, s: torch.cat([outputs_of_sample(m, s, i) for i in range(len(x))]),
    )


def draws_of(of, name, count, batch, mean, sigma):
    """Return the loss and gradients of `count` independent draws, one a row of a cohort."""
    estimate = estimator(name, of, streams(count), batch.x[0, :1])
    return estimate(
        mean.expand(count, -1).clone(),
        sigma.expand(count, -1).clone(),
        Batch(
            batch.x.expand(count, *batch.x.shape[1:]),
            batch.y.expand(count, *batch.y.shape[1:]),
            batch.sizes * count,
        ),
    )


def within_monte_carlo_error(draws, expected):
    error = draws.std(0) / len(draws) ** 0.5
    excess = (draws.mean(0) - expected).abs() - 5 * error
    return bool((excess < 1e-9).all())


@each_estimator
def test_the_mean_of_many_draws_is_the_closed_form_of_linear_regression(name):
    variance = 0.4
    of = problem(nn.Linear(3, 2), head="", likelihood=GaussianNoise(noise_variance=variance))
    batch, (mean, sigma) = whole(of), parameters(of)
    x, y = batch.x[0], batch.y[0]
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    m = torch.cat([mean[:6].view(2, 3), mean[6:, None]], dim=1)
    s = torch.cat([sigma[:6].view(2, 3), sigma[6:, None]], dim=1)
    # E (y - w x)^2 = (y - m x)^2 + x^2 s^2
    residual = y - design @ m.T
    squares = residual.square() + design.square() @ s.square().T
    loss = 0.5 * (squares / variance + np.log(2 * np.pi * variance)).sum(1).mean()
    d_mean = -(residual.T @ design) / variance / len(x)
    d_rho = s.square() * design.square().sum(0) / variance / len(x)
    expected = [
        loss,
        *(torch.cat([d[:, :3].reshape(-1), d[:, 3]]) for d in (d_mean, d_rho)),
    ]
    found = draws_of(of, name, 4000, batch, mean, sigma)
    for draws, value in zip(found, expected, strict=True):
        assert within_monte_carlo_error(draws, value)


@each_estimator
def test_the_mean_of_many_draws_is_the_quadrature_of_logistic_regression(name):
    of = problem(nn.Linear(3, 2), head="")
    batch, (mean, sigma) = whole(of), parameters(of)
    nodes, weights = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(60))
    x = torch.cat([batch.x[0], torch.ones(7, 1, dtype=torch.float64)], dim=1)
    side = 1.0 - 2.0 * batch.y[0]  # +1 where the label is class 0

    def loss(m, rho):
        """E softplus(-side z), z the difference of the two logits: a Gaussian in one dimension."""
        w = torch.cat([m[:6].view(2, 3), m[6:, None]], dim=1)
        v = torch.cat([rho[:6].view(2, 3), rho[6:, None]], dim=1).mul(2).exp()
        z = x @ (w[0] - w[1]) + nodes[:, None] * (x.square() @ v.sum(0)).sqrt()
        return (weights @ functional.softplus(-side * z) / weights.sum()).mean()

    m, rho = mean.clone().requires_grad_(), sigma.log().requires_grad_()
    exact = loss(m, rho)
    expected = (exact.detach(), *torch.autograd.grad(exact, (m, rho)))
    found = draws_of(of, name, 4000, batch, mean, sigma)
    for draws, value in zip(found, expected, strict=True):
        assert within_monte_carlo_error(draws, value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dense", "flipout"),
        ("convolutional", "flipout"),
        # Not in a convolution: there the noise of each position is drawn by itself.
        ("dense", "local-reparameterisation"),
    ],
)
def test_layerwise_noise_and_weight_draws_agree_through_a_deep_network(kind, name):
    of = PROBLEMS[kind]()
    batch, (mean, sigma) = whole(of), parameters(of)
    one, other = (
        draws_of(of, each, 2000, batch, mean, sigma) for each in ("reparameterisation", name)
    )
    for left, right in zip(one, other, strict=True):
        error = ((left.var(0) + right.var(0)) / 2000).sqrt()
        assert bool(((left.mean(0) - right.mean(0)).abs() < 5 * error + 1e-9).all())


def test_layerwise_noise_has_less_variance_than_a_draw_of_the_weights():
    of = problem(dense(), sizes=(40,))
    batch, (mean, sigma) = whole(of), parameters(of)
    spread = {
        name: float(draws_of(of, name, 500, batch, mean, sigma)[1].var(0).sum()) for name in NAMES
    }
    assert spread["local-reparameterisation"] < spread["reparameterisation"] / 2
    assert spread["flipout"] < spread["reparameterisation"] / 2


@pytest.mark.parametrize("name", ["local-reparameterisation", "flipout"])
def test_parameters_of_other_layers_are_drawn_whole(name):
    of = PROBLEMS["convolutional"]()
    batch, (mean, sigma) = whole(of), parameters(of)
    norm = torch.zeros_like(mean, dtype=torch.bool)
    for parameter in ("1.weight", "1.bias"):
        norm[of.layout.slices[parameter]] = True
    calm = torch.where(norm, sigma, 1e-12)  # nothing but the norm is uncertain
    losses, _, d_rho = draws_of(of, name, 8, batch, mean, calm)
    assert float(losses.std()) > 1e-3
    assert bool((d_rho[:, norm].abs() > 1e-6).any())


@each_estimator
@pytest.mark.parametrize("kind", ["dense", "convolutional"])
def test_without_spread_every_estimator_is_plain_backpropagation(name, kind):
    of = PROBLEMS[kind]()
    batch, (mean, _) = whole(of), parameters(of)
    sigma = torch.full_like(mean, 1e-12)
    loss, d_mean, d_rho = estimator(name, of, streams(1), batch.x[0, :1])(
        mean[None], sigma[None], batch
    )
    expected = differentiate(of, lambda m, s: call(of, m + 0 * s, batch.x[0]), mean, sigma, batch)
    torch.testing.assert_close(loss[0], expected[0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(d_mean[0], expected[1], rtol=1e-8, atol=1e-8)
    assert float(d_rho.abs().max()) < 1e-8


def test_an_input_that_is_all_zero_has_finite_gradients():
    of = problem(nn.Sequential(nn.Linear(3, 2, bias=False)), head="0")
    mean, sigma = parameters(of)
    batch = Batch(torch.zeros(1, 4, 3).double(), torch.zeros(1, 4).long(), (4,))
    for name in NAMES:
        found = estimator(name, of, streams(1), batch.x[0, :1])(mean[None], sigma[None], batch)
        assert all(bool(tensor.isfinite().all()) for tensor in found)


@each_estimator
@pytest.mark.parametrize("kind", ["dense", "convolutional"])
def test_each_row_of_a_padded_batch_equals_its_client_alone(name, kind):
    of = PROBLEMS[kind]()
    members = cohort(of, Variational())
    mean, sigma = (torch.stack([t, 1.1 * t, 0.9 * t]) for t in parameters(of))
    weight = torch.zeros(3, 7).double()
    for row, size in enumerate(members.sizes):
        weight[row, :size] = 1 / size
    batch = Batch(members.x, members.y, members.sizes, weight)
    found = estimator(name, of, streams(3), members.x[0, :1])(mean, sigma, batch)
    for row, client in enumerate(members.clients):
        alone = estimator(name, of, [streams(3)[row]], members.x[0, :1])(
            mean[[row]], sigma[[row]], whole(of, client)
        )
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours[row], theirs[0], rtol=1e-11, atol=1e-12)


@each_estimator
def test_calls_draw_afresh_and_a_stream_draws_again_what_it_drew(name):
    of = PROBLEMS["dense"]()
    batch, (mean, sigma) = whole(of), parameters(of)

    def two_calls(seed):
        estimate = estimator(name, of, streams(1, seed), batch.x[0, :1])
        return [estimate(mean[None], sigma[None], batch)[1].clone() for _ in range(2)]

    first, second = two_calls(0)
    assert not torch.equal(first, second)
    assert all(map(torch.equal, two_calls(0), (first, second)))
    assert not torch.equal(two_calls(1)[0], first)


@each_estimator
def test_estimating_leaves_the_networks_parameters_alone(name):
    of = PROBLEMS["dense"]()
    batch, (mean, sigma) = whole(of), parameters(of)
    before = of.layout.flatten(dict(of.network.named_parameters()))
    arguments = mean[None].clone(), sigma[None].clone()
    estimator(name, of, streams(1), batch.x[0, :1])(*arguments, batch)
    assert torch.equal(of.layout.flatten(dict(of.network.named_parameters())), before)
    assert torch.equal(arguments[0][0], mean)
    assert torch.equal(arguments[1][0], sigma)


def test_flipout_gives_all_rows_that_a_linear_layer_sees_of_a_sample_the_same_signs():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x).sum(1)

    of = problem(Rows(), sizes=(6,), shape=(3, 3), head="layer")
    batch, (mean, sigma) = whole(of), parameters(of)
    flipped = draws_of(of, "flipout", 2000, batch, mean, sigma)
    plain = draws_of(of, "reparameterisation", 2000, batch, mean, sigma)
    for left, right in zip(flipped, plain, strict=True):
        error = ((left.var(0) + right.var(0)) / 2000).sqrt()
        assert bool(((left.mean(0) - right.mean(0)).abs() < 5 * error).all())


class Recurrent(nn.Module):
    """Codes, an embedding, a linear layer that runs once per step, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.step = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        state = x.new_zeros(len(x), 2)
        for code in x.long().remainder(3).unbind(1):
            state = torch.tanh(self.embedding(code) + self.step(state))
        return self.head(state)


@pytest.mark.parametrize("name", ["local-reparameterisation", "flipout"])
def test_layers_that_run_several_times_and_embeddings_are_drawn_whole(name):
    of = problem(Recurrent(), sizes=(6,), shape=(4,), head="head")
    x, source, local = whole(of).x[0], Noise(streams(1)), name != "flipout"
    noise = [normals(source, len(x), 2) for _ in range(1 if local else 2)]
    eps = normals(source, of.layout.total)

    def replace(m, s):
        weight, bias = own(of, m, "head")
        spread, bias_spread = own(of, s if local else s * eps, "head")

        def noisy(inputs):
            center = inputs @ weight.T + bias
            if local:
                variance = inputs.square() @ spread.square().T + bias_spread.square()
                return center + variance.sqrt() * noise[0]
            sign_in, sign_out = (torch.where(each < 0, -1.0, 1.0) for each in noise)
            return center + sign_out * ((sign_in * inputs) @ spread.T + bias_spread)

        return noisy

    compare(of, name, lambda m, s: forward_with(of, m + s * eps, {"head": replace(m, s)}, x))


@each_estimator
def test_the_gradient_of_a_tied_weight_is_that_of_the_network_written_with_one_weight(name):
    """Without noise it is that of the plain network, whose two uses autograd adds up."""
    of = problem(Tied(), head="head")
    assert of.layout.total == 9 + 3 + 3 + 6 + 2  # the weight counts once
    mean, _ = parameters(of)
    batch = whole(of)
    leaf = mean.clone().requires_grad_()
    tensors = of.layout.unflatten(leaf)
    first = torch.tanh(
        functional.linear(batch.x[0], tensors["first.weight"], tensors["first.bias"])
    )
    second = torch.tanh(functional.linear(first, tensors["first.weight"], tensors["second.bias"]))
    outputs = functional.linear(second, tensors["head.weight"], tensors["head.bias"])
    loss = of.likelihood.nll(outputs, batch.y[0]).mean()
    (expected,) = torch.autograd.grad(loss, leaf)
    made = estimator(name, of, streams(1), batch.x[0, :1])
    nll, gradient, _ = made(mean[None], torch.full_like(mean, 1e-9)[None], batch)
    torch.testing.assert_close(nll[0], loss.detach(), atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(gradient[0], expected, atol=1e-7, rtol=1e-6)
