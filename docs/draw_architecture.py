"""Draw the pictures of architecture.md, and write its generated parts, from the code itself.

    python docs/draw_architecture.py            # write images/*.svg and the page's generated parts
    python docs/draw_architecture.py --check    # exit with 1 where the page is out of date

The layers are those that `make lint` enforces (pyproject.toml); arrows are imports; the way of a
posterior is recorded while one round runs.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

import grimp
import matplotlib as mpl
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
IMAGES = ROOT / "docs" / "images"
STYLE = {"font.family": "DejaVu Sans", "font.size": 8, "svg.hashsalt": "bflcore"}
INK, PAPER, BLUE, GREY = "#1f2933", "#ffffff", "#2166ac", "#9aa5b1"


def main() -> None:
    """Write everything, or check that the page is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    way = way_of_a_posterior()
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in {"tree": tree(), "layers": layer_lines(), "way": way_lines(way)}.items():
        text = replaced(text, name, lines)
    if check:
        sys.exit(text != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    IMAGES.mkdir(exist_ok=True)
    draw_layers(IMAGES / "layers.svg")
    draw_way(way, IMAGES / "round.svg")


def replaced(text: str, name: str, lines: list[str]) -> str:
    """Put lines between the page's marks ``<!-- name -->`` and ``<!-- /name -->``."""
    block = "\n".join(["```", *lines, "```"])
    return re.sub(
        rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
        lambda match: f"{match.group(1)}{block}\n{match.group(2)}",
        text,
        flags=re.DOTALL,
    )


def tree() -> list[str]:
    """Return the package's modules, with the first line of each docstring."""
    rows = []
    top = ROOT / "bflcore"
    for path in sorted(top.iterdir(), key=lambda p: (p.is_dir(), p.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            rows.append((f"{path.name}/", summary(path / "__init__.py")))
            inside = sorted(p for p in path.iterdir() if p.suffix == ".py" and p.stem[0] != "_")
            rows += [(f"    {p.name}", summary(p)) for p in inside]
            folders = sorted(p for p in path.iterdir() if (p / "__init__.py").exists())
            rows += [(f"    {p.name}/", summary(p / "__init__.py")) for p in folders]
        elif path.suffix == ".py":
            rows.append((path.name, summary(path)))
    width = max(len(name) for name, _ in rows) + 2
    return ["bflcore/", *(f"  {name:<{width}}{text}".rstrip() for name, text in rows)]


def summary(path: Path) -> str:
    """Return the first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def layers() -> list[list[str]]:
    """Return the enforced layers from the top, each a list of modules."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    found = next(one["layers"] for one in contracts if one["type"] == "layers")
    return [[name.strip().removeprefix("bflcore.") for name in line.split("|")] for line in found]


def layer_lines() -> list[str]:
    """Return the layers as text, the top one first."""
    return ["   ".join(line) for line in layers()]


def imports() -> list[tuple[str, str]]:
    """Return the imports between the modules of the layers, without those that others imply."""
    graph = grimp.build_graph("bflcore", cache_dir=None)
    known = [name for line in layers() for name in line]
    direct = {
        importer: {
            imported
            for imported in known
            if importer != imported
            and graph.direct_import_exists(
                importer=f"bflcore.{importer}", imported=f"bflcore.{imported}", as_packages=True
            )
        }
        for importer in known
    }
    reached: dict[str, set[str]] = {}
    for name in reversed(known):  # from the bottom: what is imported is known by then
        reached[name] = direct[name].union(*(reached[below] for below in direct[name]))
    return [
        (importer, imported)
        for importer in known
        for imported in sorted(direct[importer])
        if not any(imported in reached[other] for other in direct[importer])
    ]


def draw_layers(path: Path) -> None:
    """Draw one box per module or package, one row per layer, and arrows for imports."""
    rows = layers()
    places = {
        name: ((i + 0.5) / len(line), -row)
        for row, line in enumerate(rows)
        for i, name in enumerate(line)
    }
    # Boxes of rows with one module alternate in place, so that arrows do not hide each other.
    for row, line in enumerate(rows):
        if len(line) == 1:
            places[line[0]] = (0.5 + 0.22 * ((row % 3) - 1), -row)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 0.62 * len(rows)), layout="constrained")
        axis = figure.add_subplot()
        for importer, imported in imports():
            (x, y), (to_x, to_y) = places[importer], places[imported]
            axis.annotate(
                "", (to_x, to_y + 0.22), (x, y - 0.22),
                arrowprops={"arrowstyle": "->", "color": GREY, "lw": 0.9,
                            "connectionstyle": "arc3,rad=0.12"},
            )  # fmt: skip
        for name, (x, y) in places.items():
            axis.text(x, y, name, ha="center", va="center", color=INK,
                      bbox={"boxstyle": "round,pad=0.45", "fc": PAPER, "ec": BLUE})  # fmt: skip
        axis.set(xlim=(0, 1), ylim=(-len(rows) + 0.4, 0.6))
        axis.axis("off")
        save(figure, path)


Step = tuple[str, str]  # module, function


def way_of_a_posterior() -> list[Step]:
    """Run one round of `fedvi` and return the functions through which posteriors pass, in order."""
    import torch

    from bflcore import Posterior
    from bflcore.messages import Broadcast, LocalResult
    from bflcore.testing.problems import separable

    steps: list[Step] = []

    def carries(frame: FrameType) -> bool:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        values = [frame.f_locals.get(name) for name in names if name != "self"]
        return any(isinstance(value, Posterior | Broadcast | LocalResult) for value in values)

    def ours(frame: FrameType) -> str:
        return str(frame.f_globals.get("__name__", ""))

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        module = ours(frame)
        name = frame.f_code.co_qualname
        hidden = "<" in name or name.rpartition(".")[2].startswith("_")
        if not module.startswith("bflcore.") or hidden or ".posteriors." in module:
            return
        if event == "call" and carries(frame):
            step = (module.removeprefix("bflcore."), name)
            if step not in steps:
                steps.append(step)

    run = one_round(separable())
    with torch.random.fork_rng():
        sys.setprofile(watch)
        try:
            run()
        finally:
            sys.setprofile(None)
    return steps


def one_round(of: Any) -> Any:
    """Return a function that runs a round of `fedvi`, its clients in this process."""
    from bflcore import FedVI
    from bflcore.engines.local import Local
    from bflcore.rounds import Recipe, begin, run_round

    recipe = Recipe(FedVI.inference, FedVI.aggregator, FedVI.weighting, FedVI.hyper)

    def run() -> None:
        with Local(workers=1).open(of, recipe.inference, 10) as session:
            run_round(recipe, session, begin(recipe, of), of.clients)

    return run


def way_lines(way: list[Step]) -> list[str]:
    """Return the way as text: module and function."""
    width = max(len(module) for module, _ in way) + 2
    return [f"{i:>2}  {module:<{width}}{name}" for i, (module, name) in enumerate(way, 1)]


def draw_way(way: list[Step], path: Path) -> None:
    """Draw the modules side by side and the way through them from top to bottom."""
    order = [name for line in layers()[::-1] for name in line]

    def height(module: str) -> int:
        return order.index(module.partition(".")[0])

    modules = sorted({module for module, _ in way}, key=lambda m: (-height(m), m))
    place = {module: i for i, module in enumerate(modules)}
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(1.0 + 0.85 * len(modules), 1.4 + 0.26 * len(way)), layout="constrained"
        )
        axis = figure.add_subplot()
        for module, x in place.items():
            axis.axvline(x, color=GREY, lw=0.5, zorder=0)
            axis.text(x, 0.2, module, rotation=40, ha="left", va="bottom", color=INK)
        xs = [place[module] for module, _ in way]
        ys = [-(i + 1) for i in range(len(way))]
        axis.plot(xs, ys, "-", color=BLUE, lw=1.2, alpha=0.5)
        axis.plot(xs, ys, "o", color=BLUE, ms=4)
        for (_, name), x, y in zip(way, xs, ys, strict=True):
            axis.annotate(name, (x, y), (5, 2), textcoords="offset points", color=INK, fontsize=7)
        axis.set(xlim=(-0.5, len(modules) + 0.8), ylim=(-len(way) - 1, 3.2))
        axis.axis("off")
        save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write an SVG that is the same for the same code."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
