"""Inferences with one mistake fail the checks that name it, and no others."""

from itertools import count

import attrs
import pytest
import torch

from bflcore import Gaussian, Map, Variational
from bflcore.problem.likelihoods import GaussianNoise, Predictive
from bflcore.testing import inference_checks

from .verdicts import failing, label, reasons, sentences, wrong

UNTOUCHED = "inputs stay untouched"
SURVEY = "survey is a sum over clients"
FAMILY = "results have the declared family"
CERTAIN = "certainty is declared"
DTYPE = "keeps the dtype"
REPEATS = "repeats itself"
GLOBAL = "global randomness stays untouched"
ALONE = "a cohort is its clients alone"
PADDING = "padding is never read"
ORDER = "order is irrelevant"
NO_DATA = "no data gives the prior back"
LOSS = "loss falls"
MEMORY = "memory survives storage"
PREDICTIONS = "predictions are probabilities"
NOVEL = "novel clients can predict"
OFFSET = "a clients offset is part of its network"
EXACT = "is exact on the conjugate problem"
TESTS = "test samples are never read"
EACH = "predictions are of each sample alone"
FIT_SEED = "fits follow seed and round"
PREDICT_SEED = "predictions follow seed and round"
MEAN_LOSS = "loss is the mean per sample"
DETACHED = "results are detached"
PROCESS = "leaves the process as it was"
HONEST = {TESTS, EACH, FIT_SEED, PREDICT_SEED, MEAN_LOSS, DETACHED, PROCESS}
ALL_BUT_EXACT = {
    *(UNTOUCHED, SURVEY, FAMILY, DTYPE, REPEATS, GLOBAL, ALONE, PADDING, ORDER, NO_DATA, LOSS),
    *(MEMORY, PREDICTIONS, NOVEL, CERTAIN, OFFSET),
    *HONEST,
}

TIMES = count()
KEPT = {}


def after(change):
    """Return a `fit` that lets `change` at the right result."""

    def fit(self, problem, broadcast, cohort):
        return change(Map.fit(self, problem, broadcast, cohort), broadcast, cohort)

    return fit


def moved(result, shift):
    return attrs.evolve(result, posterior=result.posterior.map(lambda mean: mean + shift))


def move_start(result, broadcast, cohort):
    broadcast.start.mean.add_(0.1)
    return result


def overwrite_padding(result, broadcast, cohort):
    for row, size in enumerate(cohort.sizes):
        cohort.x[row, size:] = -1
    return result


def reuse_a_buffer(result, broadcast, cohort):
    mean = result.posterior.mean
    buffer = KEPT.setdefault((mean.shape, mean.dtype), mean.clone()).copy_(mean)
    return attrs.evolve(result, posterior=result.posterior.map(lambda _: buffer))


def draw_and_ignore(result, broadcast, cohort):
    torch.rand(1)
    return result


def sort_rows(result, broadcast, cohort):
    order = sorted(range(len(cohort.clients)), key=lambda row: cohort.clients[row])
    return attrs.evolve(result, posterior=result.posterior[order])


def with_a_counter(self, problem):
    return {**Map.initial_memory(self, problem), "count": torch.zeros(1)}


def forget_the_counter(result, broadcast, cohort):
    memory = {name: tensor for name, tensor in result.memory.items() if name != "count"}
    return attrs.evolve(result, memory=memory)


def predict_logits(self, problem, broadcast, cohort, x):
    found = Map.predict(self, problem, broadcast, cohort, x)
    return Predictive(found.draws.log())


def predict_logits_in_closed_form(self, problem, broadcast, cohort, x):
    found = Map.predict(self, problem, broadcast, cohort, x)
    return Predictive(found.draws, closed_form=found.mean.log())


def predict_with_the_bare_network(self, problem, broadcast, cohort, x):
    return Map.predict(self, attrs.evolve(problem, offset=None), broadcast, cohort, x)


def personalise_badly(when):
    def personalise(self, problem, broadcast, cohort):
        memory = Map.personalise(self, problem, broadcast, cohort)
        bad = {name: tensor * float("nan") for name, tensor in memory.items()}
        return bad if cohort.novel is when else memory

    return personalise


def lose_the_loss(result, broadcast, cohort):
    share = torch.tensor(cohort.sizes) / torch.tensor(cohort.sizes)
    return attrs.evolve(result, loss=result.loss * share)


def mean_of_neighbours(result, cohort):
    return 0.01 * (result.posterior.mean.mean(0) - result.posterior.mean)


def mean_of_samples(result, cohort):
    return 1e-3 * cohort.x.sum((1, 2))[:, None] / max(1, cohort.x.shape[1])


def by(shift):
    return after(lambda result, broadcast, cohort: moved(result, shift(result, cohort)))


def changed(field, function):
    return after(lambda r, b, c: attrs.evolve(r, **{field: function(getattr(r, field))}))


def count_padding(self, problem, cohort):
    return {
        "examples": torch.tensor(cohort.sizes),
        "x": cohort.x.sum((1, 2)),
    }


def count_nothing(self, problem, cohort):
    return {}


def count_wider_without_samples(self, problem, cohort):
    width = cohort.x.shape[-1] if max(cohort.sizes) else 1
    return {
        "examples": torch.tensor(cohort.sizes),
        "x": cohort.x.new_zeros(len(cohort.sizes), width),
    }


# mistake -> what differs from `Map`, the checks that must fail
MISTAKES = {
    "Moves the broadcast's start in place": (
        {"fit": after(move_start)},
        {UNTOUCHED, REPEATS, GLOBAL, ALONE, PADDING, ORDER, NO_DATA, MEMORY, TESTS, OFFSET},
    ),
    "Overwrites the padding in place": ({"fit": after(overwrite_padding)}, {UNTOUCHED}),
    "Returns a buffer that the next fit fills": (
        {"fit": after(reuse_a_buffer)},
        {UNTOUCHED, ORDER, MEMORY},
    ),
    "Surveys padding": ({"survey": count_padding}, {SURVEY}),
    "Does not count its samples": ({"survey": count_nothing}, {SURVEY}),
    "Has no fixed form of answer": (
        {"survey": count_wider_without_samples},
        ALL_BUT_EXACT - {NO_DATA},  # one of its two clients has the form of none
    ),
    "Declares another family": ({"family": "gaussian"}, {FAMILY}),
    "Counts samples twice": ({"fit": changed("examples", lambda n: 2 * n)}, {FAMILY}),
    "Returns float32 for float64": (
        {"fit": changed("posterior", lambda q: q.map(torch.Tensor.float))},
        {FAMILY, NO_DATA},
    ),
    "Returns float64 for float32": (
        {"fit": changed("posterior", lambda q: q.map(torch.Tensor.double))},
        {DTYPE},
    ),
    "Adds a little of the global generator's noise": (
        {"fit": by(lambda result, _: 1e-12 * torch.randn(1).to(result.posterior.mean))},
        {REPEATS, GLOBAL, MEMORY, TESTS, PROCESS},
    ),
    "Moves the global generator": ({"fit": after(draw_and_ignore)}, {GLOBAL, PROCESS}),
    "Counts its calls": (
        {"fit": by(lambda result, _: 1e-12 * next(TIMES))},
        {REPEATS, GLOBAL, MEMORY, TESTS},
    ),
    "Lets clients influence each other": (
        {"fit": by(mean_of_neighbours)},
        {ALONE},
    ),
    "Sums up samples, padding too": (
        {"fit": by(lambda _, cohort: 1e-3 * cohort.x.sum((1, 2))[:, None])},
        {PADDING},
    ),
    "Sums up labels, padding too": (
        {"fit": by(lambda _, cohort: 1e-3 * cohort.y.sum(1)[:, None])},
        {PADDING},
    ),
    "Averages over samples, padding too": (
        {"fit": by(mean_of_samples)},
        {PADDING, ALONE},
    ),
    "Returns clients in order of ids": ({"fit": after(sort_rows)}, {ORDER}),
    "Moves without data": ({"fit": by(lambda *_: 0.01)}, {NO_DATA}),
    "Has no loss without data": ({"fit": after(lose_the_loss)}, {NO_DATA}),
    "Returns the likelihood for its loss": (
        {"fit": changed("loss", lambda loss: -loss)},
        {LOSS, MEAN_LOSS},
    ),
    "Forgets a part of its memory": (
        {"initial_memory": with_a_counter, "fit": after(forget_the_counter)},
        {MEMORY},
    ),
    "Forgets its personal posterior": (
        {"fit": changed("memory", lambda _: {})},
        {DTYPE, LOSS, MEMORY, PREDICTIONS, OFFSET, *HONEST - {FIT_SEED}},
    ),
    "Counts in the memory in float32 what was float64": (
        {"fit": changed("memory", lambda m: {n: t.float() for n, t in m.items()})},
        {MEMORY},
    ),
    "Predicts logits": ({"predict": predict_logits}, {PREDICTIONS, NOVEL, MEAN_LOSS}),
    "Predicts logits in closed form": (
        {"predict": predict_logits_in_closed_form},
        {PREDICTIONS, NOVEL, MEAN_LOSS},
    ),
    "Predicts with the bare network": ({"predict": predict_with_the_bare_network}, {OFFSET}),
    "Personalises to nothing": ({"personalise": personalise_badly(False)}, {PREDICTIONS}),
    "Adapts novel clients to nothing": ({"personalise": personalise_badly(True)}, {NOVEL}),
}
WRONG = [(wrong(Map, mistake, **fields), names) for mistake, (fields, names) in MISTAKES.items()]


def bayes(noise_counts):
    """Return a `fit` that is exact for a regression, where the noise counts."""

    def fit(self, problem, broadcast, cohort):
        result = Variational.fit(self, problem, broadcast, cohort)
        if not isinstance(problem.likelihood, GaussianNoise):
            return result
        noise = problem.likelihood.noise_variance if noise_counts else 1.0
        x, y, prior = cohort.x, cohort.y, broadcast.prior
        precision = 1 / prior.variance + x.square().sum(1) / noise
        mean = (prior.mean / prior.variance + (x * y).sum(1) / noise) / precision
        return attrs.evolve(result, posterior=Gaussian(mean, 1 / precision))

    return fit


def conjugate(mistake, **fields):
    return wrong(Variational, mistake, tags=frozenset({"exact-conjugate"}), **fields)


def certain(first):
    """Return a `fit` after which variances are zero from parameter `first` on."""

    def fit(self, problem, broadcast, cohort):
        result = Variational.fit(self, problem, broadcast, cohort)
        q = result.posterior
        zeros = torch.arange(q.variance.shape[1]) >= first
        return attrs.evolve(result, posterior=Gaussian(q.mean, q.variance.masked_fill(zeros, 0.0)))

    return fit


WRONG += [
    (wrong(Variational, "Declares certainty and has none", leaves_certain=True), {CERTAIN}),
    (wrong(Variational, "Keeps its certainty secret", fit=certain(40)), {CERTAIN, NO_DATA}),
    (conjugate("Claims to be exact and is not"), {EXACT}),
    (conjugate("Forgets the noise's variance", fit=bayes(noise_counts=False)), {EXACT}),
]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_inference_fails_exactly(part, expected):
    assert failing(part) == expected


@pytest.mark.parametrize(
    "part",
    [wrong(Map, "Nothing"), conjugate("Nothing", fit=bayes(noise_counts=True))],
    ids=["map", "conjugate"],
)
def test_a_right_inference_passes(part):
    assert failing(part) == set()


def test_every_check_has_an_inference_that_fails_it():
    part = conjugate("Claims everything")
    names = sentences(inference_checks.checks_of(part))
    assert set().union(*(expected for _, expected in WRONG)) == names


@pytest.mark.parametrize(
    ("mistake", "check", "said"),
    [
        ("Moves the broadcast's start in place", UNTOUCHED, "the broadcast was changed in place"),
        ("Returns a buffer that the next fit fills", UNTOUCHED, "a second fit changed the first"),
        ("Returns float32 for float64", FAMILY, "mean is torch.float32 [51], not torch.float64"),
        ("Moves the global generator", GLOBAL, "use cohort.streams(...)"),
        ("Lets clients influence each other", ALONE, "client 0 of cohort (0, 1, 2)"),
        ("Sums up samples, padding too", PADDING, "with other padding beyond cohort.sizes"),
        ("Forgets a part of its memory", MEMORY, "'count': 'float32 [3, 1]'"),
        ("Returns the likelihood for its loss", LOSS, "it does not fall"),
    ],
)
def test_reasons_say_what_to_change(mistake, check, said):
    (part,) = (part for part, _ in WRONG if part.summary() == f"{mistake}.")
    assert said in reasons(part)[check]
