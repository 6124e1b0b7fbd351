"""Compute the tables and draw the pictures of docs/evidence.md: ``python docs/draw_evidence.py``.

Ten clients hold the samples of a linear regression with known noise. Each finds its posterior
exactly, so that what is wrong afterwards is wrong with the counting alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from torch import Tensor

from bfl_glm.low_rank import MORE, common_basis
from bflcore import (
    Aggregator,
    Broadcast,
    Cohort,
    Equal,
    Gaussian,
    HyperUpdate,
    LocalInference,
    LocalResult,
    Problem,
    component,
    option,
)
from bflcore.engines.local import Local
from bflcore.inference.memory import local_result
from bflcore.inference.sites import SiteInference
from bflcore.posteriors import DenseGaussian, LowRankGaussian
from bflcore.registry.loading import load_registry
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.conjugate import NOISE, ExactSites, pooled, regression
from bflcore.testing.problems import surveyed

DOCS = Path(__file__).parent
PAGE, IMAGES = DOCS / "evidence.md", DOCS / "images"
CLIENTS, SAMPLES, INPUTS = 10, 30, 6
ROUNDS = (1, 5, 20)
RULES = (
    "average",
    "linear-pool",
    "log-linear-pool",
    "weighted-sum",
    "weighted-conflation",
    "conflation",
    "weight-consolidation",
)
UPDATES = ("fixed", "continual", "empirical-bayes")
SPEED = (1, 5, 20, 50, 200)
RANKED = (1, 10, 50)
SIZES = {10: (2, 4, 8), 50: (4, 16)}  # coefficients: ranks
TOGETHER = {"damping": 0.5, "momentum": 0.5}


@component
class ExactPosterior(LocalInference):
    """Return the best mean-field posterior under the prior that the server sends."""

    name = "exact-posterior"
    family = "gaussian"

    def initial(self, problem: Problem) -> Gaussian:
        """Return the first prior."""
        return ExactSites().initial(problem)

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Return what a client without a site returns."""
        prior = broadcast.prior.map(lambda tensor: tensor.expand(len(cohort.clients), -1))
        found, loss = ExactSites().tilt(problem, broadcast, cohort, prior)
        return local_result(problem, cohort, found, loss)

    predict = ExactSites.predict


@component
class DenseSites(SiteInference):
    """Return the exact posterior of all parameters together."""

    name = "dense-sites"
    family = "dense-gaussian"

    def initial(self, problem: Problem) -> DenseGaussian:
        """Return the first prior."""
        one = ExactSites().initial(problem)
        return DenseGaussian(one.mean, one.variance.reciprocal().diag())

    def tilt(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, cavity: DenseGaussian
    ) -> tuple[DenseGaussian, Tensor]:
        """Add the data's precision to the cavity's."""
        natural = {name: tensor.clone() for name, tensor in cavity.natural().items()}
        for row, size in enumerate(cohort.sizes):
            x, y = cohort.x[row, :size], cohort.y[row, :size]
            natural["precision"][row] += x.mT @ x / NOISE
            natural["shift"][row] += (x.mT @ y).flatten() / NOISE
        return DenseGaussian.from_natural(natural), cohort.x.new_zeros(len(cohort.sizes))

    predict = ExactSites.predict


@component
class LowRankSites(SiteInference):
    """Return the exact mean, and a diagonal plus low-rank precision in a common basis."""

    name = "low-rank-sites"
    family = "low-rank-gaussian"
    damps_the_mean_alone = True

    rank: int = option(2, "rank of the correlated part", at_least=1)
    damping: float = option(0.5, "share of a change of the mean", above=0, at_most=1)
    momentum: float = option(0.5, "share of the last change", at_least=0, below=1)

    def survey(self, problem: Problem, cohort: Cohort) -> dict[str, Tensor]:
        """Return the diagonal of X^T X / noise and its image of a random matrix."""
        grams = [one.mT @ one / NOISE for one in self._samples(cohort)]
        sketches = torch.stack([gram @ self._probe(problem) for gram in grams])
        scale = torch.stack([gram.diagonal() for gram in grams])
        return {**super().survey(problem, cohort), "scale": scale, "sketch": sketches}

    def initial(self, problem: Problem) -> LowRankGaussian:
        """Return the first prior, in the basis that the survey gave."""
        one = ExactSites().initial(problem)
        core = one.mean.new_zeros(self.rank, self.rank)
        basis = one.mean.new_zeros(self.rank, len(one.mean))
        if known := problem.survey:
            basis = common_basis(known["sketch"], known["scale"], self._probe(problem), self.rank)
        return LowRankGaussian(one.mean, one.variance.reciprocal(), core, basis)

    def tilt(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, cavity: LowRankGaussian
    ) -> tuple[LowRankGaussian, Tensor]:
        """Solve for the mean; add the data's precision as the basis has it."""
        dual, found = cavity.basis[0] / problem.survey["scale"], []
        for row, x in enumerate(self._samples(cohort)):
            before, y = cavity[row], cohort.y[row, : len(x)]
            along = x @ dual.mT
            rest = x - along @ before.basis
            diagonal = before.diagonal + rest.square().sum(0) / NOISE
            core = before.core + along.mT @ along / NOISE
            full = before.basis.mT @ before.core @ before.basis + before.diagonal.diag()
            right = before.times(before.mean) + (x.mT @ y).flatten() / NOISE
            mean = torch.linalg.solve(full + x.mT @ x / NOISE, right)
            found.append(LowRankGaussian(mean, diagonal, core, before.basis).map(lambda t: t[None]))
        return LowRankGaussian.concatenate(found), cohort.x.new_zeros(len(found))

    def _samples(self, cohort: Cohort) -> list[Tensor]:
        return [cohort.x[row, :size] for row, size in enumerate(cohort.sizes)]

    def _probe(self, problem: Problem) -> Tensor:
        noise = torch.Generator().manual_seed(problem.seed)
        size = (problem.layout.total, self.rank + MORE)
        return torch.randn(size, generator=noise, dtype=torch.float64)

    predict = ExactSites.predict


def history(
    inference: LocalInference,
    rule: str,
    update: str,
    of: Problem,
    rounds: int,
    asked: Callable[[int], Sequence[int]] | None = None,
) -> list[Gaussian]:
    """Return the server's posterior ``[P]`` after each round."""
    registry = load_registry()
    fusing: Aggregator = registry.aggregators[rule]()
    updating: HyperUpdate = registry.hyper_updates[update]()
    recipe = Recipe(inference, fusing, Equal(), updating)
    of = surveyed(inference, of)
    broadcast, found = begin(recipe, of), []
    with Local(workers=1).open(of, inference, bins=1) as session:
        for number in range(rounds):
            clients = of.clients if asked is None else asked(number)
            broadcast = run_round(recipe, session, broadcast, clients).broadcast
            found.append(broadcast.start)
    return found


def sites(of: Problem, rounds: int, damping: float = 1.0) -> list[Gaussian]:
    """Return the posteriors ``[P]`` of clients that keep their sites."""
    return history(ExactSites(damping=damping), "product-of-changes", "continual", of, rounds)


def precision_ratio(posterior: Gaussian, full: Tensor) -> float:
    """Return the mean ratio of precisions ``[P]`` to the exact ones ``[P, P]``."""
    return float((posterior.variance.reciprocal() / full.diagonal()).mean())


def counted(of: Problem) -> dict[tuple[str, str], list[float]]:
    """Return the precision ratio after each round, by rule and prior update."""
    _, full = pooled(of, ExactSites().initial(of))
    found = {
        (rule, update): [
            precision_ratio(one, full)
            for one in history(ExactPosterior(), rule, update, of, max(ROUNDS))
        ]
        for rule in RULES
        for update in UPDATES
    }
    found["sites", ""] = [precision_ratio(one, full) for one in sites(of, max(ROUNDS))]
    return found


def table_of_counts(found: dict[tuple[str, str], list[float]]) -> str:
    """Return the Markdown table of precision ratios."""
    titles = [f"`{update}`, {number}" for update in UPDATES for number in ROUNDS]
    lines = [f"| rule | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for rule in RULES:
        cells = [
            f"{found[rule, update][number - 1]:.3g}" for update in UPDATES for number in ROUNDS
        ]
        lines.append(f"| `{rule}` | {' | '.join(cells)} |")
    exact = [f"{found['sites', ''][number - 1]:.3g}" for number in ROUNDS]
    empty = ["not allowed"] * len(ROUNDS)
    lines.append(f"| `product-of-changes`, with sites | {' | '.join([*empty, *exact, *empty])} |")
    return "\n".join(lines)


def errors(of: Problem, posteriors: Sequence[Gaussian]) -> list[float]:
    """Return the largest error of a mean in posterior standard deviations, by round."""
    mean, full = pooled(of, ExactSites().initial(of))
    sd = torch.linalg.inv(full).diagonal().sqrt()
    return [float(((one.mean - mean) / sd).abs().max()) for one in posteriors]


def speeds(condition: float) -> dict[str, list[float]]:
    """Return the error of the mean by round, for each way to take part."""
    of, rounds = regression((50,) * CLIENTS, 10, condition), max(SPEED)
    turns = history(
        ExactSites(), "product-of-changes", "continual", of, rounds * CLIENTS,
        lambda number: (of.clients[number % CLIENTS],),
    )  # fmt: skip
    dense = history(DenseSites(), "product-of-changes", "continual", of, rounds)
    return {
        "mean field, damping 0.5": errors(of, sites(of, rounds, 0.5)),
        "mean field, damping 0.2": errors(of, sites(of, rounds, 0.2)),
        "mean field, one client after another": errors(of, turns[CLIENTS - 1 :: CLIENTS]),
        "dense": errors(of, dense),
    }


def table_of_speeds(found: dict[float, dict[str, list[float]]]) -> str:
    """Return the Markdown table of errors."""
    lines = [
        f"| condition number | clients | {' | '.join(f'round {n}' for n in SPEED)} |",
        "|---" * (len(SPEED) + 2) + "|",
    ]
    for condition, ways in found.items():
        for way, error in ways.items():
            cells = " | ".join(f"{error[number - 1]:.2g}" for number in SPEED)
            lines.append(f"| {condition:g} | {way} | {cells} |")
    return "\n".join(lines)


def ranks(size: int, condition: float) -> dict[str, list[float]]:
    """Return the error of the mean by round, by what clients know of correlations."""
    of, rounds = regression((50,) * CLIENTS, size, condition), max(RANKED)

    def after(inference: LocalInference) -> list[float]:
        return errors(of, history(inference, "product-of-changes", "continual", of, rounds))

    return {
        "mean field": after(ExactSites(damping=0.5)),
        "mean field, momentum 0.5": after(ExactSites(**TOGETHER)),
        **{f"low rank, {rank}": after(LowRankSites(rank=rank)) for rank in SIZES[size]},
        "dense": after(DenseSites()),
    }


def table_of_ranks(found: dict[tuple[int, float], dict[str, list[float]]]) -> str:
    """Return the Markdown table of errors."""
    titles = " | ".join(f"round {number}" for number in RANKED)
    lines = [f"| coefficients | condition number | family | {titles} |", "|---" * 6 + "|"]
    for (size, condition), ways in found.items():
        for way, error in ways.items():
            cells = " | ".join(f"{error[number - 1]:.2g}" for number in RANKED)
            lines.append(f"| {size} | {condition:g} | {way} | {cells} |")
    return "\n".join(lines)


def draw_ranks(found: dict[tuple[int, float], dict[str, list[float]]]) -> None:
    """Draw the errors of the mean against rounds."""
    size = max(SIZES)
    shown = {condition: ways for (of, condition), ways in found.items() if of == size}
    figure, axes = plt.subplots(1, len(shown), figsize=(11, 3), sharey=True)
    for axis, (condition, ways) in zip(axes, shown.items(), strict=True):
        for way, error in ways.items():
            axis.plot(range(1, len(error) + 1), error, label=way)
        axis.axhline(0.1, color="grey", linewidth=0.8, linestyle=":")
        axis.set(yscale="log", ylim=(1e-4, 30), xlabel="round")
        axis.set_title(f"{size} coefficients, condition number {condition:g}", fontsize=9)
    axes[0].set_ylabel("largest error of a mean\n/ posterior deviation")
    axes[-1].legend(frameon=False, fontsize=7)
    save(figure, "evidence-rank.svg")


def draw_densities(of: Problem) -> None:
    """Draw one parameter's posterior under four ways to count."""
    mean, full = pooled(of, ExactSites().initial(of))
    exact = Gaussian(mean, full.diagonal().reciprocal())
    ways = {
        "average, fixed prior:\na tenth of the data": ("average", "fixed"),
        "conflation, fixed prior:\nthe prior ten times": ("conflation", "fixed"),
        "weight-consolidation, continual:\nthe data once a round": (
            "weight-consolidation",
            "continual",
        ),
    }
    runs = {title: history(ExactPosterior(), *way, of, 20) for title, way in ways.items()}
    runs["sites, continual:\neverything once"] = sites(of, 20)
    figure, axes = plt.subplots(1, len(runs), figsize=(11, 2.6), sharex=True, sharey=True)
    sd = float(exact.variance[0].sqrt())
    grid = torch.linspace(float(mean[0]) - 8 * sd, float(mean[0]) + 8 * sd, 400).double()
    for axis, (title, found) in zip(axes, runs.items(), strict=True):
        for number, shade in zip((1, 5, 20), ("#9ecae1", "#4292c6", "#08306b"), strict=True):
            axis.plot(grid, density(found[number - 1], grid), color=shade, label=f"round {number}")
        axis.plot(grid, density(exact, grid), "k--", linewidth=1, label="exact")
        axis.set_title(title, fontsize=9)
        axis.set_yticks([])
    axes[0].legend(frameon=False, fontsize=7)
    figure.supxlabel("one coefficient of the regression", fontsize=9)
    save(figure, "evidence-densities.svg")


def density(posterior: Gaussian, grid: Tensor) -> Tensor:
    """Return the first parameter's density on `grid`."""
    one = posterior[:1]
    return torch.stack([one.log_density(value[None]) for value in grid]).exp()


def draw_counts(found: dict[tuple[str, str], list[float]]) -> None:
    """Draw the precision ratios against rounds."""
    figure, axis = plt.subplots(figsize=(6.4, 3.4))
    shown = {
        ("average", "fixed"): "average, fixed",
        ("average", "continual"): "average, continual",
        ("conflation", "fixed"): "conflation, fixed",
        ("weight-consolidation", "fixed"): "weight-consolidation, fixed",
        ("weight-consolidation", "continual"): "weight-consolidation, continual",
        ("sites", ""): "sites",
    }
    for key, label in shown.items():
        numbers = range(1, len(found[key]) + 1)
        style = {"linewidth": 3, "color": "black"} if key[0] == "sites" else {"linewidth": 1.5}
        axis.plot(numbers, found[key], label=label, **style)
    axis.set(yscale="log", xlabel="round", ylabel="precision / exact precision")
    axis.legend(frameon=False, fontsize=8)
    save(figure, "evidence-counts.svg")


def draw_speeds(found: dict[float, dict[str, list[float]]]) -> None:
    """Draw the errors of the mean against rounds."""
    figure, axes = plt.subplots(1, len(found), figsize=(11, 3), sharey=True)
    for axis, (condition, ways) in zip(axes, found.items(), strict=True):
        for way, error in ways.items():
            axis.plot(range(1, len(error) + 1), error, label=way)
        axis.axhline(0.1, color="grey", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", yscale="log", ylim=(1e-6, 30), xlabel="round")
        axis.set_title(f"condition number {condition:g}", fontsize=9)
    axes[0].set_ylabel("largest error of a mean\n/ posterior deviation")
    axes[0].legend(frameon=False, fontsize=7)
    save(figure, "evidence-speed.svg")


def save(figure: plt.Figure, name: str) -> None:
    """Write a picture without what changes from run to run."""
    figure.tight_layout()
    figure.savefig(IMAGES / name, metadata={"Date": None})
    plt.close(figure)


def insert(name: str, table: str) -> None:
    """Replace a table of the page, between its two marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(f"<!-- {name} -->\n")
    _, mark, after = rest.partition(f"<!-- end of {name} -->")
    PAGE.write_text(f"{before}<!-- {name} -->\n{table}\n{mark}{after}", encoding="utf-8")


def main() -> None:
    """Compute and draw."""
    mpl.rcParams["svg.hashsalt"] = "evidence"
    of = regression((SAMPLES,) * CLIENTS, INPUTS)
    counts = counted(of)
    insert("counts", table_of_counts(counts))
    draw_densities(of)
    draw_counts(counts)
    found = {condition: speeds(condition) for condition in (5.0, 50.0, 632.0)}
    insert("speeds", table_of_speeds(found))
    draw_speeds(found)
    ranked = {(size, c): ranks(size, c) for size in SIZES for c in (50.0, 420.0, 929.0)}
    insert("ranks", table_of_ranks(ranked))
    draw_ranks(ranked)


if __name__ == "__main__":
    main()
