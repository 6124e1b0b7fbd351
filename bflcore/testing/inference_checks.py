"""Checks of local inferences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import attrs
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from bflcore.errors import OptionError
from bflcore.inference.base import LocalInference
from bflcore.messages import Broadcast, Cohort, LocalResult
from bflcore.posteriors import DenseGaussian, Gaussian
from bflcore.problem.base import Problem
from bflcore.problem.likelihoods import Categorical, GaussianNoise
from bflcore.testing import honesty_checks, problems
from bflcore.testing.evidence_checks import evidence_is_conserved
from bflcore.testing.honesty_checks import predicted

__all__ = ["checks_of"]

Part = type[LocalInference]

ROUNDS = 8
# Makes columns of which the third is nearly the sum of the others: condition number above 100.
CORRELATED = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.02]]).double()


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:
    """Yield the checks of an inference."""
    yield from (inputs_stay_untouched, survey_is_a_sum_over_clients)
    yield from (results_have_the_declared_family, certainty_is_declared)
    yield from (keeps_the_dtype, repeats_itself)
    yield global_randomness_stays_untouched
    yield from (a_cohort_is_its_clients_alone, padding_is_never_read, order_is_irrelevant)
    yield from (no_data_gives_the_prior_back, loss_falls, memory_survives_storage)
    yield from (predictions_are_probabilities, novel_clients_can_predict)
    if "pools-samples" not in part.tags:  # what a pool trains with is not one client's
        yield a_clients_offset_is_part_of_its_network
    yield from honesty_checks.checks_of(part)
    if "exact-conjugate" in part.tags:
        yield is_exact_on_the_conjugate_problem
    if "conserves-evidence" in part.tags:
        yield evidence_is_conserved


def inputs_stay_untouched(part: Part) -> None:
    """`fit`, `personalise` and `predict` leave broadcast, cohort and problem as they were."""
    inference, of, broadcast, cohort = _case(part, sharing="body")
    x = torch.stack([of.train.of(client)[0][:3] for client in cohort.clients])
    things = {
        "broadcast": broadcast,
        "cohort": cohort,
        "training data": of.train,
        "problem": {"initial": of.initial},
        "block x given to predict": {"x": x},
        "problem's network": of.network.state_dict(keep_vars=True),
    }
    before = problems.copies(*things.values())
    mode = [module.training for module in of.network.modules()]
    result = inference.fit(of, broadcast, cohort)
    own = inference.personalise(of, broadcast, cohort)
    inference.personalise(of, broadcast, attrs.evolve(cohort, novel=True))
    predicted(inference, of, broadcast, attrs.evolve(cohort, memory=own), x)
    for (name, thing), copy in zip(things.items(), before, strict=True):
        problems.assert_same(thing, copy, f"the {name} was changed in place", 0.0)
    if mode != [module.training for module in of.network.modules()]:
        raise AssertionError("the problem's network was switched between train() and eval()")
    kept = problems.copies(result)[0]
    inference.fit(of, broadcast, problems.cohort(of, inference, round=1))
    problems.assert_same(
        result, kept, "a second fit changed the first one's result (keep no tensors)", 0.0
    )


def survey_is_a_sum_over_clients(part: Part) -> None:
    """Answers have a row per client, count its samples, do not read padding, and keep their form.

    The sums are all that the server learns of the data; a cohort without samples shows their form.
    """
    inference, of = problems.build(part), problems.separable()
    cohort = of.cohort(range(len(problems.SIZES)), {}, 0)
    answers = inference.survey(of, cohort)
    if "examples" not in answers or answers["examples"].tolist() != list(cohort.sizes):
        raise AssertionError(
            f"survey gives {sorted(answers)}; expected examples {list(cohort.sizes)} among them"
        )
    x, nobody = cohort.x.clone(), attrs.evolve(cohort, x=cohort.x[:1, :0], y=cohort.y[:1, :0],
                                               clients=(0,), sizes=(0,))  # fmt: skip
    for row, size in enumerate(cohort.sizes):
        x[row, size:] = 1e3
    loud = inference.survey(of, attrs.evolve(cohort, x=x))
    problems.assert_same(loud, answers, "answers with other padding beyond cohort.sizes")
    for row, client in enumerate(cohort.clients):
        alone = inference.survey(of, of.cohort([client], {}, 0))
        mine = {name: tensor[row : row + 1] for name, tensor in answers.items()}
        problems.assert_same(mine, alone, f"the answer of client {client}, compared with it alone")
    form, due = problems.shapes(inference.survey(of, nobody)), problems.shapes(alone)
    if form != due:
        raise AssertionError(f"a cohort without samples gives {form} instead of {due}")


def results_have_the_declared_family(part: Part) -> None:
    """`fit` returns posteriors of `family` that the server accepts, one row per client."""
    from bflcore.engines.screening import screen

    inference, of, broadcast, cohort = _case(part)
    result = inference.fit(of, broadcast, cohort)
    if tuple(result.clients) != cohort.clients:
        raise AssertionError(
            f"fit returns clients {result.clients} for the cohort {cohort.clients}; keep its order"
        )
    if result.posterior.name != part.family:
        raise AssertionError(f"family is {part.family}, but fit gives {result.posterior.name}s")
    for reply in screen(result, broadcast):
        if not isinstance(reply, LocalResult):
            raise AssertionError(f"the server would drop it: {reply}")  # noqa: TRY004
    if result.examples.tolist() != list(cohort.sizes):
        raise AssertionError(
            f"examples are {result.examples.tolist()}, not the sizes {list(cohort.sizes)}"
        )


def certainty_is_declared(part: Part) -> None:
    """`leaves_certain` says whether `fit` gives some parameters a variance of zero."""
    inference, of, broadcast, cohort = _case(part)
    variance = inference.fit(of, broadcast, cohort).posterior.pack().get("variance")
    certain = variance is not None and bool((variance == 0).any())
    if certain != inference.leaves_certain:
        raise AssertionError(
            f"leaves_certain is {inference.leaves_certain}, but fit gives "
            f"{'a' if certain else 'no'} variance of zero; declare it"
        )


def keeps_the_dtype(part: Part) -> None:
    """A float32 problem gives float32 posteriors and predictions."""
    inference = problems.build(part)
    of = problems.surveyed(inference, problems.separable(sharing="body", dtype=torch.float32))
    broadcast, cohort = problems.first_broadcast(inference, of), problems.cohort(of, inference)
    result = inference.fit(of, broadcast, cohort)
    draws = predicted(inference, of, broadcast, attrs.evolve(cohort, memory=result.memory))
    for name, tensor in (problems.tensors(result.posterior) | {"draws": draws}).items():
        if tensor.dtype != torch.float32:
            raise AssertionError(
                f"{name} of a float32 problem is {tensor.dtype}; compute in that of problem.initial"
            )


def repeats_itself(part: Part) -> None:
    """The same cohort gives the same result, bit for bit."""
    inference, of, broadcast, cohort = _case(part)
    first = inference.fit(of, broadcast, cohort)
    problems.assert_same(
        inference.fit(of, broadcast, cohort), first, "a second fit of the same cohort", 0.0
    )


def global_randomness_stays_untouched(part: Part) -> None:
    """Noise comes from the cohort's streams, not from torch's global generator."""
    inference, of, broadcast, cohort = _case(part)
    kept = torch.get_rng_state()
    try:
        results = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            result = inference.fit(of, broadcast, cohort)
            after = attrs.evolve(cohort, memory=result.memory)
            draws = predicted(inference, of, broadcast, after)
            if not torch.equal(torch.get_rng_state(), state):
                raise AssertionError("torch's global generator was used; use cohort.streams(...)")
            results.append({**problems.tensors(result), "draws": draws})
        problems.assert_same(
            results[0], results[1], "under another global seed; use cohort.streams(...)", 0.0
        )
    finally:
        torch.set_rng_state(kept)


def a_cohort_is_its_clients_alone(part: Part) -> None:
    """Each client of a ragged cohort gets the result that it gets alone, up to rounding.

    In particular, steps after a client's last one have no effect on it.
    """
    inference, of, broadcast, cohort = _case(part, sharing="body")
    together = inference.fit(of, broadcast, cohort)
    for index, client in enumerate(cohort.clients):
        alone = inference.fit(of, broadcast, problems.cohort(of, inference, [client]))
        what = f"client {client} of cohort {cohort.clients}, compared with it alone"
        problems.assert_same(together.select([index]), alone, what, 1e-7)


def padding_is_never_read(part: Part) -> None:
    """Values beyond a client's samples do not matter."""
    inference, of, broadcast, cohort = _case(part)
    x, y = cohort.x.clone(), cohort.y.clone()
    for index, size in enumerate(cohort.sizes):
        x[index, size:] = 1e3
        y[index, size:] = 2  # the last class
    loud = inference.fit(of, broadcast, attrs.evolve(cohort, x=x, y=y))
    what = "with other padding beyond cohort.sizes"
    problems.assert_same(loud, inference.fit(of, broadcast, cohort), what, 1e-7)


def order_is_irrelevant(part: Part) -> None:
    """Clients of equal size may be in any order."""
    inference = problems.build(part)
    of = problems.surveyed(inference, problems.separable(sizes=(6, 6)))
    broadcast = problems.first_broadcast(inference, of)
    first = inference.fit(of, broadcast, problems.cohort(of, inference, [0, 1]))
    second = inference.fit(of, broadcast, problems.cohort(of, inference, [1, 0]))
    problems.assert_same(second.select([1, 0]), first, "in another order", 1e-7)


def no_data_gives_the_prior_back(part: Part) -> None:
    """Without samples, if start and prior are equal, the posterior is the prior."""
    inference = problems.build(part)
    of = problems.surveyed(inference, problems.separable(sizes=(6, 0)))
    broadcast = problems.first_broadcast(inference, of)
    broadcast = attrs.evolve(broadcast, start=broadcast.prior)
    result = inference.fit(of, broadcast, problems.cohort(of, inference, [1]))
    problems.assert_same(
        result.posterior[0], broadcast.prior, "the posterior of a client without data", 1e-6
    )
    if not bool(result.loss.isfinite().all()):
        raise AssertionError(f"the loss of a client without data is {float(result.loss[0])}")


def loss_falls(part: Part) -> None:
    """Starting each round from its own posterior, a client's loss falls."""
    inference = problems.build(part)
    of = problems.surveyed(inference, problems.separable(sizes=(24,), sharing="body"))
    broadcast, memory = problems.first_broadcast(inference, of), None
    losses: list[float] = []
    for number in range(ROUNDS):
        cohort = problems.cohort(of, inference, memory=memory, round=number)
        result = inference.fit(of, broadcast, cohort)
        losses.append(float(result.loss[0]))
        broadcast = _followed(inference, broadcast, result)
        memory = dict(result.memory)
    if not min(losses[-2:]) < losses[0]:
        shown = ", ".join(f"{loss:.4f}" for loss in losses)
        raise AssertionError(f"over {ROUNDS} rounds LocalResult.loss is {shown}: it does not fall")


def memory_survives_storage(part: Part) -> None:
    """A memory that was written and read gives the same results as the original.

    Its tensors keep their names, shapes and dtypes from the first round on.
    """
    inference, of, broadcast, cohort = _case(part, sharing="body")
    result = inference.fit(of, broadcast, cohort)
    kept, fresh = problems.shapes(result.memory), problems.shapes(cohort.memory)
    if kept != fresh:
        raise AssertionError(
            f"initial_memory() gives {fresh}, fit returns the memory {kept}; expected the same "
            "names, shapes and dtypes, fit's with the client axis first"
        )
    stored = load(save({name: t.contiguous() for name, t in result.memory.items()}))
    following = _followed(inference, broadcast, result)
    stayed, read = (
        inference.fit(of, following, problems.cohort(of, inference, memory=memory, round=1))
        for memory in (result.memory, stored)
    )
    problems.assert_same(read, stayed, "from a stored memory", 0.0)


def predictions_are_probabilities(part: Part) -> None:
    """`predict` gives ``[K, S, B, C]`` probabilities, from fitted and personalised memories."""
    inference, of, broadcast, cohort = _case(part, sharing="body")
    result = inference.fit(of, broadcast, cohort)
    after = attrs.evolve(cohort, memory=result.memory)
    _check(predicted(inference, of, broadcast, after))
    own = inference.personalise(of, broadcast, after)
    _check(predicted(inference, of, broadcast, attrs.evolve(after, memory=own)))


def novel_clients_can_predict(part: Part) -> None:
    """A client that was held out of training adapts and predicts."""
    inference, of, broadcast, cohort = _case(part, sharing="body")
    own = inference.personalise(of, broadcast, attrs.evolve(cohort, novel=True))
    _check(predicted(inference, of, broadcast, attrs.evolve(cohort, memory=own)))


def a_clients_offset_is_part_of_its_network(part: Part) -> None:
    """An offset of one client's outputs does what the same numbers inside its network do.

    Whoever runs the network without `Problem.forward` must call `Problem.shifted`; an inference
    that cannot raises `OptionError` in `check`.
    """
    inference, likelihood = problems.build(part), Categorical(label_prior=2.0)
    of = problems.separable(sharing="body", likelihood=likelihood)
    of = problems.surveyed(inference, of)
    try:
        inference.check(of)
    except OptionError:
        return
    cohort = problems.cohort(of, inference, [1])
    bound = of.for_client(cohort, predicting=True)
    numbers, inside = torch.as_tensor(bound.offset), deepcopy(of.network)
    inside.register_forward_hook(lambda _module, _inputs, outputs: outputs + numbers)
    broadcast = problems.first_broadcast(inference, of)

    def work(of: Problem) -> object:
        result = inference.fit(of, broadcast, cohort)
        after = attrs.evolve(cohort, memory=result.memory)
        own = attrs.evolve(after, memory=inference.personalise(of, broadcast, after))
        return {"fit": result, "predict": {"draws": predicted(inference, of, broadcast, own)}}

    problems.assert_same(
        work(bound),
        work(attrs.evolve(of, network=inside, likelihood=Categorical())),
        "with an offset, compared with a network that adds it (use Problem.forward, or shifted)",
        1e-7,
    )


def is_exact_on_the_conjugate_problem(part: Part) -> None:
    """The posterior of a linear regression with known noise is Bayes' own.

    For the family dense-gaussian the columns of the design, and the prior, are correlated; else
    each sample sees one parameter, so that a product over parameters is exact.
    """
    dense, noise = part.family == DenseGaussian.name, 0.5
    x, y = problems.normal(12, 3, seed=3), problems.normal(12, 1, seed=4)
    x = x @ CORRELATED if dense else x * torch.eye(3, dtype=torch.float64).repeat(4, 1)
    network = nn.Sequential(nn.Linear(3, 1, bias=False))
    likelihood = GaussianNoise(noise_variance=noise)
    of = problems.separable((12,), network=network, likelihood=likelihood, data=(x, y))
    before, mean = torch.diag(torch.tensor([2.0, 1.0, 0.5]).double()), problems.normal(3, seed=5)
    before = before + 0.3 if dense else before
    after = before + x.T @ x / noise
    expected = torch.linalg.solve(after, before @ mean + (x.T @ y)[:, 0] / noise)
    prior, due = (
        DenseGaussian(m, precision) if dense else Gaussian(m, precision.diagonal().reciprocal())
        for m, precision in ((mean, before), (expected, after))
    )
    inference = part()
    cohort = problems.cohort(of, inference)
    found = inference.fit(of, Broadcast(0, prior, prior), cohort).posterior
    tolerance = 1e-9 if dense else 1e-5
    problems.assert_same(found[0], due, "against Bayes' rule", tolerance)


def _case(part: Part, sharing: str = "all") -> tuple[LocalInference, Problem, Broadcast, Cohort]:
    inference = problems.build(part)
    of = problems.surveyed(inference, problems.separable(sharing=sharing))
    return inference, of, problems.first_broadcast(inference, of), problems.cohort(of, inference)


def _followed(inference: LocalInference, broadcast: Broadcast, result: LocalResult) -> Broadcast:
    """Return the next broadcast: the first client's posterior is the start.

    It is the prior, too, for inferences that need this of the hyperparameter update.
    """
    start, carried = result.posterior[0], "carries-posterior" in inference.needs.values()
    prior = start if carried else broadcast.prior
    return attrs.evolve(broadcast, round=broadcast.round + 1, start=start, prior=prior)


def _check(draws: Tensor) -> None:
    if draws.ndim != 4 or draws.shape[0] != 3 or tuple(draws.shape[2:]) != (3, 3):
        raise AssertionError(
            f"draws have shape {list(draws.shape)}, not [3 clients, S draws, 3 samples, 3 classes]"
        )
    if not bool(((draws >= 0) & draws.isfinite()).all()):
        raise AssertionError("draws are not all finite numbers >= 0")
    total = draws.sum(-1)
    if not bool((total - 1).abs().max() <= 1e-6):
        worst = float(total.flatten()[(total - 1).abs().argmax()])
        raise AssertionError(f"the probabilities of a sample sum to {worst:.6g}, not 1")
