import itertools
import math

import attrs
import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from torch import nn

from bfl_tdamp import em, export
from bfl_tdamp.message_passing import module_b
from bfl_tdamp.network import Layer, Slab, chain
from bfl_tdamp.plugin import EMGroupSparse, GeometricMean
from bfl_tdamp.posterior import CERTAIN, BernoulliGaussian
from bfl_tdamp.tdamp import Tdamp, outputs
from bflcore import (
    Average,
    Broadcast,
    Examples,
    GaussianNoise,
    IncompatibleError,
    OptionError,
)
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry
from bflcore.testing import problems


def layout():
    return problems.separable(
        network=nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 3))
    ).layout


def separable(*arguments, **named):
    return problems.surveyed(Tdamp(), problems.separable(*arguments, **named))


def posteriors(clients, seed=0):
    return BernoulliGaussian.arbitrary(layout(), clients, problems.generator(seed))


def test_module_b_is_enumeration_of_a_group_of_two_weights():
    """The odds of a group are multiplied by the evidence for its slab over that for zero."""
    mu, v = np.array([0.4, -0.7]), np.array([0.5, 1.2])
    precision, field = np.array([2.0, 0.6]), np.array([1.1, -0.9])  # messages exp(h w - L w^2/2)

    def mass(m, s, lam, h):
        return integrate.quad(
            lambda w: stats.norm.pdf(w, m, s**0.5) * math.exp(h * w - lam * w**2 / 2),
            -12,
            12,
            epsabs=1e-13,
        )[0]

    kept = 0.3 * np.prod([mass(*row) for row in zip(mu, v, precision, field, strict=True)])
    posterior = math.log(kept / 0.7)  # zero: both messages are 1 there
    after = v / (1 + v * precision)
    mean = after * (mu / v + field)
    column = [torch.tensor(t, dtype=torch.float64).view(1, 2, 1) for t in (mu, v, mean, after)]
    odds = torch.logit(torch.tensor([[0.3]], dtype=torch.float64))
    layer = Layer(Slab(column[0], column[1]), None, odds, odds * 0)
    module_b(layer, Slab(column[2] - column[0], column[3]))
    assert float(odds) == pytest.approx(posterior, abs=1e-8)


def test_removed_groups_stay_removed():
    ones = torch.ones(1, 2, 2, dtype=torch.float64)
    odds = torch.tensor([[-CERTAIN, 0.0]], dtype=torch.float64)
    module_b(Layer(Slab(ones, ones), None, odds, odds * 0), Slab(100 * ones, ones / 10))
    assert odds.tolist() == [[-CERTAIN, CERTAIN]]


def test_fusion_is_the_normalised_geometric_mean_by_quadrature():
    q = posteriors(3)
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    share = (weights / weights.sum()).numpy()
    fused = GeometricMean().fuse(q, weights, posteriors(1, 9)[0])
    group = 1  # of the first layer: coordinates 1 and 4 of its 2 x 3 matrix
    log_c = 0.0
    for coordinate in (1, 4):
        mean, s = q.slab_mean[:, coordinate].numpy(), q.slab_variance[:, coordinate].numpy()

        def density(w, mean=mean, s=s):
            return math.exp(float(share @ stats.norm.logpdf(w, mean, s**0.5)))

        mass, first, second = (
            integrate.quad(lambda w, n=n: w**n * density(w), -15, 15, epsabs=1e-13, limit=200)[0]
            for n in range(3)
        )
        log_c += math.log(mass)
        assert float(fused.slab_mean[coordinate]) == pytest.approx(first / mass, abs=1e-8)
        assert float(fused.slab_variance[coordinate]) == pytest.approx(
            second / mass - (first / mass) ** 2, abs=1e-8
        )
    kept = float(share @ np.log(q.probability[:, group].numpy())) + log_c
    removed = float(share @ np.log1p(-q.probability[:, group].numpy()))
    assert float(fused.log_odds[group]) == pytest.approx(kept - removed, abs=1e-8)


def test_only_the_input_is_centred_at_its_mean_over_all_samples_that_train():
    """A weighted mean of the clients' means, so that sums of inputs and counts are all it needs."""
    of = attrs.evolve(problems.separable((9, 6, 3)), clients=(0, 1), novel=(2,))
    of = problems.surveyed(Tdamp(), of)
    centre = Tdamp().initial(of).centre.numpy()
    means = [np.mean(of.train.of(client)[0].numpy(), 0) for client in (0, 1)]
    assert centre[:4] == pytest.approx((9 * means[0] + 6 * means[1]) / 15)
    assert not centre[4:].any()
    assert not Tdamp(centred=False).initial(of).centre.any()


def test_identical_clients_agree():
    q = posteriors(1)
    same = q[[0, 0, 0]]
    fused = GeometricMean().fuse(same, torch.tensor([1.0, 2.0, 3.0]).double(), posteriors(1, 4)[0])
    for name in ("slab_mean", "slab_variance", "log_odds"):
        torch.testing.assert_close(getattr(fused, name), getattr(q, name)[0], atol=1e-12, rtol=0)


def test_disagreement_lowers_the_odds_and_certainty_withstands_it():
    q = posteriors(2)
    even = torch.ones(2).double()
    fused = GeometricMean().fuse(q, even, q[0])
    assert bool((fused.log_odds < q.log_odds.mean(0)).all())
    certain = attrs.evolve(q, log_odds=torch.full_like(q.log_odds, CERTAIN))
    assert bool((GeometricMean().fuse(certain, even, q[0]).log_odds == CERTAIN).all())


def test_partial_sums_may_be_taken_in_any_grouping():
    q, prior = posteriors(4), posteriors(1, 7)[0]
    w = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    rule = GeometricMean()
    whole = rule.fuse(q, w, prior)
    for cut in (1, 2, 3):
        left, right = (
            rule.add(rule.start(prior), q[rows], w[rows]) for rows in (slice(cut), slice(cut, None))
        )
        problems.assert_same(rule.finish(rule.merge(left, right)), whole, f"cut at {cut}", 1e-10)


def linear_problem(x, y, sizes=None, outputs=1):
    network = nn.Sequential(nn.Linear(x.shape[1], outputs, bias=False))
    return separable(
        sizes or (len(x),),
        network=network,
        likelihood=GaussianNoise(noise_variance=0.5),
        data=(x, y),
    )


def test_a_linear_layer_reaches_exact_bayesian_regression():
    """Orthogonal inputs, one sample a minibatch, a sample's own evidence small: Bayes' rule."""
    x, y = orthogonal(900)
    of = linear_problem(x, y)
    inference = sweeping()
    broadcast = problems.first_broadcast(inference, of)
    found = inference.fit(of, broadcast, problems.cohort(of, inference)).posterior
    mean, precision = exact(broadcast, x, y)
    assert float(precision.min()) > 1.5 / V  # the data matter
    torch.testing.assert_close(found.slab_mean[0], mean, atol=0, rtol=5e-3)
    torch.testing.assert_close(found.slab_variance[0], 1 / precision, atol=0, rtol=5e-3)


V = 0.1  # first variance of a weight: 0.3 over three inputs


def exact(broadcast, x, y, sweeps=1):
    """Return mean and precision of a regression with noise 40 whose data count `sweeps` times."""
    precision = 1 / V + sweeps * x.square().sum(0) / 40
    return (broadcast.start.slab_mean / V + sweeps * (x * y).sum(0) / 40) / precision, precision


def orthogonal(samples):
    x = torch.eye(3, dtype=torch.float64).repeat(samples // 3, 1)
    x = x * torch.randn(samples, 1, generator=problems.generator(3), dtype=torch.float64)
    noise = torch.randn(samples, 1, generator=problems.generator(4), dtype=torch.float64)
    return x, 2 * x.sum(1, keepdim=True) + noise


def sweeping(**options):
    """Return an inference that is Bayes' rule, to a sample's own evidence, on `orthogonal`."""
    return Tdamp(
        **{"noise": 40.0, "local_epochs": 1, "batch_size": 1, "centred": False, "momentum": 0,
           "variance": 0.3, "forgetting": 1.0} | options
    )  # fmt: skip


def test_the_geometric_mean_of_pooled_clients_is_exact_regression_on_all_data():
    """Clients of 600 and 300 samples, each counted as often as all 900 weigh against them."""
    x, y = orthogonal(900)
    of = linear_problem(x, y, (600, 300))
    inference = sweeping()
    broadcast = problems.first_broadcast(inference, of)
    sent = inference.fit(of, broadcast, problems.cohort(of, inference))
    fused = GeometricMean().fuse(sent.posterior, sent.examples.double(), broadcast.prior)
    data = [torch.cat([of.train.of(client)[part] for client in of.clients]) for part in (0, 1)]
    mean, precision = exact(broadcast, *data)
    torch.testing.assert_close(fused.slab_variance, 1 / precision, atol=0, rtol=5e-3)
    torch.testing.assert_close(fused.slab_mean, mean, atol=0.02, rtol=0)


def overlapping():
    """Return inputs whose columns are nearly the same, and targets along and across them."""
    noise = problems.generator(8)
    common = torch.randn(40, 1, generator=noise, dtype=torch.float64)
    x = common + 0.3 * torch.randn(40, 3, generator=noise, dtype=torch.float64)
    return x, torch.stack([x.sum(1), 5 * (x[:, 0] - x[:, 1])], 1)


def after_one_minibatch(**options):
    """Return mu, v, mu+ and v+ ``[2, 3]`` of one minibatch of `overlapping`; S, U ``[40, 2]``."""
    x, y = overlapping()
    of = linear_problem(x, y, outputs=2)
    inference = sweeping(noise=0.5, batch_size=40, **options)
    broadcast = problems.first_broadcast(inference, of)
    found = inference.fit(of, broadcast, problems.cohort(of, inference)).posterior
    mu, v, mean, variance = (
        t.numpy().reshape(2, 3)
        for q in (broadcast.start, found)
        for t in (q.slab_mean, q.slab_variance)
    )
    width = x.numpy() ** 2 @ v.T + 0.5
    return mu, v, mean, variance, ((y.numpy() - x.numpy() @ mu.T) / width, 1 / width)


def test_a_full_step_goes_to_the_conjugate_mean():
    mu, v, mean, variance, (s, u) = after_one_minibatch(line_search=False)
    x = overlapping()[0].numpy()
    lam, g = u.T @ x**2, s.T @ x
    assert variance == pytest.approx(v / (1 + v * lam))
    assert mean == pytest.approx(variance * (mu / v + mu * lam + g))


def test_a_searched_step_maximises_each_rows_local_quadratic_along_its_full_step():
    mu, v, mean, variance, (s, u) = after_one_minibatch()
    x = overlapping()[0].numpy()
    best = []
    for row in (0, 1):
        full = variance[row] * (s[:, row] @ x)

        def loss(t, row=row, full=full):
            moved = t * x @ full
            prior = ((t * full) ** 2 / v[row]).sum()
            return -s[:, row] @ moved + 0.5 * (u[:, row] @ moved**2 + prior)

        found = optimize.minimize_scalar(
            loss, bounds=(0, 1), method="bounded", options={"xatol": 1e-9}
        )
        assert (mean - mu)[row] / full == pytest.approx([found.x] * 3, rel=1e-5)
        best.append(found.x)
    assert best[0] < 0.6  # along the common direction the full step overshoots
    assert best[1] > best[0] + 0.1


def test_the_first_outputs_scale_with_the_last_layers_means():
    of = separable()
    small, whole = (Tdamp(output_scale=scale).initial(of).slab_mean for scale in (0.1, 1.0))
    last = of.layout.slices["2.weight"]
    assert torch.equal(small[: last.start], whole[: last.start])
    torch.testing.assert_close(10 * small[last], whole[last])


def test_predictions_count_the_data_once_or_as_often_as_training():
    x, y = orthogonal(300)
    of = linear_problem(x, y)
    variances = {}
    for once in (True, False):
        inference = sweeping(local_epochs=4, count_once=once)
        broadcast = problems.first_broadcast(inference, of)
        found = inference.fit(of, broadcast, problems.cohort(of, inference)).posterior
        sent = attrs.evolve(broadcast, start=found[0])
        cohort = problems.cohort(of, inference)
        draws = inference.predict(of, sent, cohort, torch.eye(3).double()[None]).draws
        variances[once] = draws.var(1, correction=0)[0, :, 0]
    _, four = exact(broadcast, x, y, 4)
    _, once = exact(broadcast, x, y)
    torch.testing.assert_close(variances[False], 1 / four, atol=0, rtol=5e-3)
    torch.testing.assert_close(variances[True], 1 / once, atol=0, rtol=5e-3)


def test_a_posterior_that_counts_the_data_once_has_the_variance_of_one_sweep():
    x, y = orthogonal(300)
    of = linear_problem(x, y)
    inference = sweeping(local_epochs=4)
    broadcast = problems.first_broadcast(inference, of)
    found = inference.fit(of, broadcast, problems.cohort(of, inference)).posterior
    assert float(found.counted) == 4
    _, four = exact(broadcast, x, y, 4)
    _, once = exact(broadcast, x, y)
    torch.testing.assert_close(found.slab_variance[0], 1 / four, atol=0, rtol=5e-3)
    single = found.once(broadcast.prior.slab_variance)
    torch.testing.assert_close(single.slab_variance[0], 1 / once, atol=0, rtol=5e-3)
    assert torch.equal(single.slab_mean, found.slab_mean)


def test_what_is_forgotten_is_not_counted():
    of = separable((12,))
    inference = Tdamp(local_epochs=3, batch_size=4, forgetting=0.9)
    broadcast = problems.first_broadcast(inference, of)
    found = inference.fit(of, broadcast, problems.cohort(of, inference)).posterior
    a_sweep = 0.9 ** (1 / 3)
    assert float(found.counted) == pytest.approx(a_sweep + a_sweep**2 + 0.9)


@pytest.mark.parametrize("location", [-2.7, -1.0, -0.3, 0.0, 0.25])
def test_the_best_noise_maximises_the_expected_likelihood(location):
    def loss(log_v):
        return -integrate.quad(
            lambda t: (
                math.exp(t - math.exp(t)) * stats.norm.logcdf(-(location + t) / math.exp(log_v / 2))
            ),
            -40,
            4,
            limit=300,
        )[0]

    found = math.log(em.best_noise(location))
    best = optimize.minimize_scalar(loss, bounds=(found - 1.5, found + 1.5), method="bounded").x
    assert found == pytest.approx(best, abs=0.05)


def test_the_noise_is_left_alone_where_none_is_best():
    assert em.best_noise(0.6) is None


@pytest.mark.parametrize("target", [0.5, 0.3, 0.2, 0.1])
def test_pruning_ends_at_the_deadline_with_exactly_the_target(target):
    count, hyper = 200, EMGroupSparse(target=target, deadline=4)
    loss = torch.randn(count, generator=problems.generator(), dtype=torch.float64).exp()
    certain = torch.full((count,), CERTAIN, dtype=torch.float64)
    q, left = attrs.evolve(posteriors(1)[0], log_odds=certain), [count]
    for done in (1, 2, 3, 4, 5):
        q = em.prune(hyper, q, loss, done)
        kept = q.log_odds > 0
        left.append(int(kept.sum()))
        assert float(loss[kept].min()) >= float(loss[~kept].max())
    assert left[-2:] == [round(target * count)] * 2
    shares = [now / before for before, now in itertools.pairwise(left[:-1])]
    assert shares == pytest.approx([target**0.25] * 4, rel=0.1)  # the same share every round
    assert bool((q.log_odds.abs() == CERTAIN).all())


def test_what_the_data_removed_comes_back_only_where_too_few_are_left():
    odds = torch.tensor([-CERTAIN, 3.0, -1.0, 2.0], dtype=torch.float64)
    q = attrs.evolve(posteriors(1)[0], log_odds=odds)
    loss = torch.tensor([9.0, 1.0, 2.0, 3.0], dtype=torch.float64)  # most of the removed one
    kept = [
        (em.prune(EMGroupSparse(target=target, deadline=1), q, loss, 1).log_odds > 0).tolist()
        for target in (0.5, 1 - 1e-9)
    ]
    assert kept == [[False, False, True, True], [True] * 4]
    early = em.prune(EMGroupSparse(target=0.9, deadline=99), q, loss, 1)
    assert torch.equal(early.log_odds, odds)


def test_by_log_odds_all_groups_are_removed_at_once_and_only_when_enough_are_probable():
    odds = 4 * torch.randn(20, generator=problems.generator(2), dtype=torch.float64) + 3
    q = attrs.evolve(posteriors(1)[0], log_odds=odds)
    probable = int((1 / (1 + np.exp(-odds.numpy())) > 0.99).sum())
    assert 2 < probable < 18
    waiting = em.cut(EMGroupSparse(target=probable / 20, rank="log-odds"), q)
    assert waiting is q
    target = probable - 1
    hyper = EMGroupSparse(target=target / 20, rank="log-odds", rho=0.8)
    found = em.cut(hyper, q).log_odds
    kept = np.argsort(-odds.numpy())[:target]
    expected = np.full(20, -CERTAIN)
    expected[kept] = math.log(4)
    assert found.numpy() == pytest.approx(expected)


@pytest.mark.parametrize("rank", ["saliency", "log-odds"])
def test_the_rank_decides_how_the_target_is_reached(rank):
    """In the first of ten rounds, saliency removes a few groups and log-odds all but the target."""
    of = separable()
    broadcast = problems.first_broadcast(Tdamp(rho=0.999), of)
    q = broadcast.start  # 10 groups
    hyper = EMGroupSparse(target=0.3, rank=rank, learn_noise=False)
    found = hyper.update(broadcast, q, {"weight": torch.ones(())}).start.log_odds
    assert int((found > -CERTAIN).sum()) == {"saliency": 9, "log-odds": 3}[rank]


def test_the_loss_without_a_group_is_that_of_the_data_alone():
    """The data's log likelihood at zero against the mean: of the posterior over its prior."""
    q = attrs.evolve(posteriors(1)[0], counted=torch.full((1,), 3.0, dtype=torch.float64))
    first = 3 * q.slab_variance
    found = em.loss_without(q, first)
    for group, coordinates in ((1, (1, 4)), (3, (8, 10, 12))):  # of 2 x 3, and 2, and 3 x 2
        expected = 0.0
        for i in coordinates:
            mean, gain = q.slab_mean[i], (1 / q.slab_variance[i] - 1 / first[i]) / 3
            seen = 1 / math.sqrt(gain)
            expected += stats.norm.logpdf(mean, mean, seen) - stats.norm.logpdf(0, mean, seen)
        assert float(found[group]) == pytest.approx(float(expected))


def test_the_loss_is_balanced_among_matrices_by_the_root_of_their_means():
    odds = torch.tensor([9.0, -CERTAIN, 9.0, -CERTAIN, -CERTAIN], dtype=torch.float64)
    q = attrs.evolve(posteriors(1)[0], log_odds=odds)  # 3 groups and 2
    loss = torch.tensor([4.0, 70.0, 14.0, 5.0, 6.0], dtype=torch.float64)
    found = em.balance(q, loss)
    torch.testing.assert_close(found[:3], loss[:3] / 3)  # the mean of 4 and 14 is 9
    assert torch.equal(found[3:], loss[3:])  # nothing is kept there


def fitted(likelihood=None):
    of = separable(likelihood=likelihood)
    inference = Tdamp(local_epochs=1, batch_size=4)
    broadcast = problems.first_broadcast(inference, of)
    return of, broadcast.start


def test_moments_are_those_of_sampled_networks():
    """The forward pass on its own: one layer, whose outputs are Gaussian given the input."""
    x = torch.randn(5, 3, generator=problems.generator(5), dtype=torch.float64)
    of = linear_problem(x, torch.zeros(5, 1).double())
    q = attrs.evolve(
        Tdamp().initial(of), log_odds=torch.tensor([0.5, -0.2, 1.0], dtype=torch.float64)
    )
    p, v = outputs(of, q.map(lambda t: t[None]), x[None])
    noise = torch.randn(200_000, 3, generator=problems.generator(6), dtype=torch.float64)
    draws = q.map(lambda t: t.expand(len(noise), -1)).sample(noise)
    z = draws @ (x - q.centre).T
    torch.testing.assert_close(z.mean(0), p[0, :, 0], atol=0.05, rtol=0)
    torch.testing.assert_close(z.var(0), v[0, :, 0], atol=0, rtol=0.03)


def test_an_exported_network_computes_what_the_means_compute(tmp_path):
    of, q = fitted()
    odds = q.log_odds.clone()
    odds[torch.tensor([1, 5, 8])] = -CERTAIN  # an input and two hidden neurons
    q = attrs.evolve(q, log_odds=odds)
    model = export.pruned(of, q)
    x = of.train.x
    expected, _ = outputs(of, q.map(lambda t: t[None]), x[None], "mean")
    torch.testing.assert_close(model(x), expected[0])
    assert model.widths == (3, 4, 3)
    assert model.parameters == 3 * 4 + 4 + 4 * 3 + 3
    assert model.seconds(x) > 0
    export.input_image(model, (1, 2, 2), tmp_path / "inputs.png")
    assert (tmp_path / "inputs.png").read_bytes().startswith(b"\x89PNG")


def test_a_regression_predicts_mean_and_variance():
    x = torch.randn(6, 3, generator=problems.generator(5), dtype=torch.float64)
    of = linear_problem(x, torch.zeros(6, 1).double())
    inference = Tdamp(noise=0.7)
    q = inference.initial(of)
    p, v = outputs(of, q.map(lambda t: t[None]), x[None])
    found = inference.predict(of, Broadcast(0, q, q), problems.cohort(of, inference), x[None])
    torch.testing.assert_close(found.draws.mean(1), p)
    torch.testing.assert_close(found.draws.var(1, correction=0), v)
    assert float(found.noise) == pytest.approx(0.7)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x + self.one(x).relu())


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten()), "Unflatten"),
        (Residual(), "not a chain"),
        (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), "Tanh"),
    ],
)
def test_other_networks_are_refused_in_one_line(network, words):
    of = separable()
    other = attrs.evolve(of, network=network.double())
    with pytest.raises(IncompatibleError, match=words) as caught:
        chain(other)
    assert "\n" not in str(caught.value)
    assert "allowed" in str(caught.value)


def test_too_many_outputs_for_the_target_are_refused():
    x = torch.randn(6, 3, generator=problems.generator(5), dtype=torch.float64)
    of = linear_problem(x, torch.zeros(6, 1).double())
    network = nn.Sequential(nn.Linear(3, 2, bias=False)).double()
    with pytest.raises(OptionError, match="2 outputs for 1"):
        Tdamp().check(attrs.evolve(of, network=network))


def test_pooled_counts_are_refused_where_weights_do_not_undo_them():
    registry, equal = load_registry(), {"weighting": {"name": "equal"}}
    with pytest.raises(IncompatibleError, match="weighting equal does not weigh") as caught:
        resolve(registry, "em-tdamp", {}, equal)
    assert "\n" not in str(caught.value)
    assert "--weighting examples" in str(caught.value)
    assert "-o inference.pooled=false" in str(caught.value)
    once = resolve(registry, "em-tdamp", {}, equal | {"inference": {"pooled": False}})
    assert not once.inference.pooled


def test_pooled_counts_are_refused_by_rules_that_ignore_weights():
    class Deaf(Average):
        """Ignores weights."""

        name = "deaf"
        weighs = False

    with pytest.raises(IncompatibleError, match="aggregator deaf does not weigh"):
        Tdamp().check_parts({"aggregator": Deaf(), "weighting": Examples()})
    Tdamp(pooled=False).check_parts({"aggregator": Deaf(), "weighting": Examples()})


def test_options_are_bounded():
    for target in (0.0, 1.5):
        with pytest.raises(OptionError, match="target"):
            EMGroupSparse(target=target)


@pytest.mark.parametrize("kept", [1.0, 0.7])
def test_forgetting_after_a_sweep_blends_posterior_and_first_prior(kept):
    """One sweep, forgetting `kept`: the posterior without it, to that power, times the prior's."""
    of = separable((12,))
    found = []
    for forgetting in (1.0, kept):
        inference = Tdamp(local_epochs=1, batch_size=4, forgetting=forgetting)
        broadcast = problems.first_broadcast(inference, of)
        found.append(inference.fit(of, broadcast, problems.cohort(of, inference)).posterior)
    whole, blended = found
    first = broadcast.prior.slab_variance
    precision = kept / whole.slab_variance + (1 - kept) / first
    mean = kept / whole.slab_variance * whole.slab_mean / precision
    torch.testing.assert_close(blended.slab_variance, 1 / precision)
    torch.testing.assert_close(blended.slab_mean, mean)


@pytest.mark.parametrize("sweeps", [1, 3, 10])
def test_a_round_forgets_as_much_with_one_sweep_as_with_many(sweeps):
    """Under noise so large that data say nothing, lambda of what was known is left of a round."""
    x, y = orthogonal(6)
    of = linear_problem(x, y)
    inference = sweeping(noise=1e12, local_epochs=sweeps, forgetting=0.7, batch_size=2)
    broadcast = problems.first_broadcast(inference, of)
    known = attrs.evolve(broadcast.start, slab_variance=torch.full((3,), V / 50).double())
    broadcast = attrs.evolve(broadcast, start=known)
    found = inference.fit(of, broadcast, problems.cohort(of, inference)).posterior
    precision = 0.7 * 50 / V + 0.3 / V
    torch.testing.assert_close(found.slab_variance[0], torch.full((3,), 1 / precision).double())
    mean = 0.7 * 50 / V / precision * known.slab_mean
    torch.testing.assert_close(found.slab_mean[0], mean, rtol=1e-6, atol=1e-9)


def test_forgetting_fades():
    inference = Tdamp(forgetting=0.9, fading=10.0, local_epochs=4)
    assert [1 - inference.retention(rounds) ** 4 for rounds in (0, 10, 20)] == pytest.approx(
        [0.1, 0.05, 0.1 / 3]
    )


def rounds_with_noise(noise, seed, likelihood=None, rounds=5):
    """Return the losses of rounds that begin with a noise variance."""
    noise_of_x = problems.generator(seed)
    x = torch.randn(60, 4, generator=noise_of_x, dtype=torch.float64)
    y = (x[:, :1] - x[:, 1:2].relu()) if likelihood else (x[:, 0] > 0).long() + (x[:, 1] > 1)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1 if likelihood else 3))
    of = separable((60,), network=network, likelihood=likelihood, data=(x, y))
    of = attrs.evolve(of, seed=seed)
    inference, hyper = Tdamp(local_epochs=1, batch_size=20, noise=noise), EMGroupSparse()
    broadcast, memory, losses = problems.first_broadcast(inference, of), None, []
    for number in range(rounds):
        cohort = problems.cohort(of, inference, memory=memory, round=number)
        result = inference.fit(of, broadcast, cohort)
        weights = torch.ones(1, dtype=torch.float64)
        fused = GeometricMean().fuse(result.posterior, weights, broadcast.prior)
        assert fused.invalid() is None
        total = hyper.summarise(result, weights, broadcast)
        broadcast, memory = hyper.update(broadcast, fused, total), dict(result.memory)
        losses.append(float(result.loss[0]))
    return losses


def check_any_noise(seed, likelihood):
    uniform = torch.rand(1, generator=problems.generator(seed), dtype=torch.float64)
    losses = rounds_with_noise(float(10 ** (4 * uniform - 2)), seed, likelihood)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 5  # nats; log 3 is chance, a regression of unit variance has 1.4


TASKS = pytest.mark.parametrize(
    "likelihood", [None, GaussianNoise(noise_variance=1.0)], ids=["classes", "regression"]
)


@TASKS
@pytest.mark.parametrize("seed", range(3))
def test_training_survives_any_first_noise(seed, likelihood):
    check_any_noise(seed, likelihood)


@pytest.mark.thorough
@TASKS
@pytest.mark.parametrize("seed", range(3, 20))
def test_training_survives_any_first_noise_over_many_seeds(seed, likelihood):
    check_any_noise(seed, likelihood)


def test_a_client_that_never_trained_joins_those_that_did():
    """All clients keep the same fields, so that a cohort may mix them."""
    of, inference = separable(), Tdamp(local_epochs=1, batch_size=4)
    broadcast = problems.first_broadcast(inference, of)
    trained = inference.fit(of, broadcast, problems.cohort(of, inference)).memory
    assert trained.keys() == inference.initial_memory(of).keys()


@pytest.mark.parametrize("field", ["slab_variance", "noise"])
@pytest.mark.parametrize(
    ("value", "reason"), [(0.0, "not above 0"), (-1.0, "not"), (1e-42, "below")]
)
def test_a_variance_that_has_no_inverse_is_refused(field, value, reason):
    layout = problems.separable().layout
    noise = torch.Generator().manual_seed(0)
    right = BernoulliGaussian.arbitrary(layout, 1, noise).map(lambda t: t.float())[0]
    assert right.invalid() is None
    tensor = getattr(right, field).clone()
    tensor[0] = value
    assert f"{field} is {reason}" in attrs.evolve(right, **{field: tensor}).invalid()
