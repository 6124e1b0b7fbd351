"""Dropout against masks applied by hand, `map`, and the laws every inference keeps."""

import attrs
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from bfl_aggregators import dropout
from bfl_aggregators.dropout import MCDropout
from bflcore import Broadcast, Map, OptionError, Point
from bflcore.cli import main
from bflcore.inference.normals import Noise
from bflcore.inference.point import fit_points as fit_part
from bflcore.randomness import stream
from bflcore.testing.problems import (
    IMAGE,
    cohort,
    convolutional,
    dense,
    first_broadcast,
    normal,
    problem,
)

STEP = {"local_epochs": 1, "batch_size": 100, "optimiser": "sgd", "lr": 0.1}
PROBLEMS = {
    "dense": lambda **given: problem(dense(), **given),
    "convolutional": lambda **given: problem(
        convolutional(), shape=IMAGE, **{"head": "4", **given}
    ),
}
each_problem = pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)


def fitted(inference, of, clients=None):
    return inference.fit(of, first_broadcast(inference, of), cohort(of, inference, clients))


def predicted(inference, of, x, clients=(0,)):
    start = Point(of.initial)
    members = cohort(of, inference, clients)
    return inference.predict(of, Broadcast(0, start, start), members, x).draws


@each_problem
def test_at_rate_zero_training_and_prediction_are_those_of_map(make):
    of = make(sizes=(7, 5, 2))
    options = {"local_epochs": 2, "batch_size": 3, "weight_decay": 0.1, "anchor": 0.2}
    without, plain = (
        fitted(inference(**options), of)
        for inference in (lambda **o: MCDropout(rate=0.0, **o), Map)
    )
    torch.testing.assert_close(without.posterior.mean, plain.posterior.mean)
    torch.testing.assert_close(without.loss, plain.loss)
    x = of.train.of(0)[0][None]
    certain = predicted(MCDropout(rate=0.0, predict_draws=3), of, x)
    exact = predicted(Map(), of, x)
    torch.testing.assert_close(certain, exact.expand_as(certain))


def test_one_step_descends_the_loss_under_masks_applied_by_hand():
    of = problem(sizes=(9,))
    found = fitted(MCDropout(rate=0.4, **STEP), of)
    members = cohort(of, MCDropout())
    order = torch.randperm(9, generator=members.streams("batches")[0])
    x, y = (tensor[order] for tensor in of.train.of(0))
    normals = Noise(members.streams("dropout")).fill(torch.zeros(1, 9, 4, dtype=torch.float64))[0]
    kept = normals > torch.special.ndtri(torch.tensor(0.4, dtype=torch.float64))
    assert 0 < kept.double().mean() < 1

    leaf = of.initial.clone().requires_grad_()
    w1, b1, w2, b2 = of.layout.unflatten(leaf).values()
    hidden = torch.tanh(x @ w1.T + b1) * kept / 0.6
    loss = functional.cross_entropy(hidden @ w2.T + b2, y)
    loss.backward()
    torch.testing.assert_close(found.posterior.mean[0], (leaf - 0.1 * leaf.grad).detach())
    torch.testing.assert_close(found.loss[0], loss.detach())


@each_problem
@pytest.mark.parametrize("sharing", ["all", "body"])
def test_a_cohort_fits_what_its_members_fit_alone(make, sharing):
    of = make(sizes=(7, 5, 2), sharing=sharing)
    inference = MCDropout(rate=0.3, local_epochs=2, batch_size=3)
    together = fitted(inference, of)
    for row, client in enumerate(together.clients):
        alone = fitted(inference, of, [client])
        torch.testing.assert_close(together.posterior.mean[row], alone.posterior.mean[0])
        torch.testing.assert_close(together.loss[row], alone.loss[0])
        for name, tensor in together.memory.items():
            torch.testing.assert_close(tensor[row], alone.memory[name][0])


def test_a_cohort_predicts_what_its_members_predict_alone():
    of = problem()
    inference = MCDropout(predict_draws=4, rate=0.5)
    x = normal(3, 6, 3, seed=5)
    together = predicted(inference, of, x, (0, 1, 2))
    assert together.shape == (3, 4, 6, 2)
    for client in range(3):
        alone = predicted(inference, of, x[[client]], (client,))
        torch.testing.assert_close(together[client], alone[0])


def test_draws_differ_and_are_shared_by_the_samples_of_a_client():
    of = problem()
    inference = MCDropout(rate=0.5, predict_draws=8)
    x = normal(1, 1, 3, seed=5).expand(1, 5, 3)  # one sample five times
    draws = predicted(inference, of, x)[0]
    assert len({tuple(draw[0].tolist()) for draw in draws}) > 4
    torch.testing.assert_close(draws, draws[:, :1].expand_as(draws))
    halves = [predicted(inference, of, part) for part in (x[:, :2], x[:, 2:])]
    torch.testing.assert_close(torch.cat(halves, dim=2)[0], draws)


def test_hidden_units_are_dropped_at_the_rate_and_the_rest_scaled_up():
    masks = dropout.draw_mask(Noise([stream(0, 0, 0, "x")]), torch.zeros(1, 200_000), 0.2)
    assert set(masks.unique().tolist()) == {0.0, 1.25}
    # Five standard errors of a fraction of 200,000.
    assert float((masks == 0).double().mean()) == pytest.approx(0.2, abs=5 * (0.16 / 2e5) ** 0.5)


def test_the_data_is_never_dropped():
    of = problem()
    _, shapes = dropout.mask_hidden_units(of)
    assert shapes == {"2.dropout_mask": torch.Size([4])}  # the head's inputs, not the data
    images = PROBLEMS["convolutional"]()
    assert dropout.mask_hidden_units(images)[1] == {"4.dropout_mask": torch.Size([12])}


class Backwards(nn.Module):
    """Declares its layers in another order than it runs them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.body = nn.Linear(3, 4)

    def forward(self, x):
        return self.head(self.body(x))


def test_first_is_the_layer_that_runs_first():
    of = problem(Backwards(), head="head")
    assert set(dropout.mask_hidden_units(of)[1]) == {"head.dropout_mask"}


class Codes(nn.Module):
    """Looks codes up at two places, which are data, not hidden units."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(3, 4), nn.Embedding(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        first, second, _ = x.long().remainder(3).unbind(1)
        return self.head(torch.tanh(self.first(first) + self.second(second)))


def test_what_embeddings_return_is_hidden_and_what_they_look_up_is_not():
    of = problem(Codes(), head="head")
    assert dropout.mask_hidden_units(of)[1] == {"head.dropout_mask": torch.Size([4])}


def test_the_problems_own_network_is_left_as_it_was():
    of = problem()
    x = of.train.of(0)[0]
    before = of.forward(of.initial[None], x[None])
    fitted(MCDropout(**STEP), of)
    predicted(MCDropout(), of, x[None])
    assert not list(of.network.buffers())
    assert torch.equal(of.forward(of.initial[None], x[None]), before)


def test_no_global_generator_is_touched():
    of = problem()
    state = torch.get_rng_state()
    fitted(MCDropout(**STEP), of)
    predicted(MCDropout(), of, of.train.of(0)[0][None])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_novel_client_fits_its_head_under_dropout_and_leaves_the_body():
    of = problem(sharing="body", sizes=(7, 5, 2), novel=(1,))
    inference = MCDropout(rate=0.5, **STEP)
    sent, members = first_broadcast(inference, of), cohort(of, inference, [1])
    memory = inference.personalise(of, sent, members)
    plain = fit_part(Map(**STEP), of, sent, members, "personal").memory
    start = members.memory["personal.mean"]
    assert not torch.equal(memory["personal.mean"], start)
    assert not torch.allclose(memory["personal.mean"], plain["personal.mean"])
    trained = attrs.evolve(members, novel=False)
    assert inference.personalise(of, sent, trained) is members.memory


def test_a_network_without_hidden_units_is_refused():
    of = problem(nn.Sequential(nn.Linear(3, 2)), head="0")
    with pytest.raises(OptionError, match="no hidden units to drop; choose --model mlp"):
        MCDropout().check(of)
    MCDropout().check(problem())


def test_the_command_line_refuses_it_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["run", "mc-dropout", "--data", "synthetic", "-o", "model.hidden=", "--rounds", "1"])
    assert end.value.code == 2
    assert "no hidden units to drop" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_masks_reach_the_network_as_buffers_by_name():
    of, shapes = dropout.mask_hidden_units(problem())
    weights = torch.stack([of.initial, 2 * of.initial])
    x = normal(2, 5, 3, seed=8)
    ones = {name: torch.ones(2, 5, *shape, dtype=x.dtype) for name, shape in shapes.items()}
    ones["2.dropout_mask"][1] = 0  # the second client keeps no hidden unit: its head's bias is left
    outputs = of.forward(weights, x, ones)
    plain = attrs.evolve(of, network=dense()).forward(weights, x)
    torch.testing.assert_close(outputs[0], plain[0])
    bias = of.layout.unflatten(weights[1])["2.bias"]
    torch.testing.assert_close(outputs[1], bias.expand(5, 2))
    single = functional_call(
        of.network,
        of.layout.unflatten(weights[0]) | {name: mask[0] for name, mask in ones.items()},
        (x[0],),
    )
    torch.testing.assert_close(
        of.forward(weights[:1], x[:1], {n: m[:1] for n, m in ones.items()}), single[None]
    )
