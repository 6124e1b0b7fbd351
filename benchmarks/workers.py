"""Two worker processes against one, ten clients a round."""

from __future__ import annotations

from problems import alternate, problem, report

from bflcore import Average, Continual, Equal, Map, Variational
from bflcore.engines.local import Local
from bflcore.rounds import Recipe, begin, run_round


def main() -> None:
    """Print the ratio for point estimates and for variational inference."""
    work = problem()
    for inference in (Map(), Variational()):
        recipe = Recipe(inference, Average(), Equal(), Continual())
        start = begin(recipe, work)
        with (
            Local(workers=2).open(work, inference, 10) as two,
            Local(workers=1).open(work, inference, 10) as one,
        ):
            ours, theirs = alternate(
                lambda r=recipe, s=start, w=two: run_round(r, w, s, work.clients),
                lambda r=recipe, s=start, w=one: run_round(r, w, s, work.clients),
                repeats=9,
            )
        report(f"{inference.name} round, two workers / one", "<= 0.625", ours, theirs)


if __name__ == "__main__":
    main()
