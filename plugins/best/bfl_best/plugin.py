"""The method `bfl-best` and the hook of this plugin."""

from __future__ import annotations

from collections.abc import Iterator

from bflcore import Categorical, Continual, Equal, Method, Variational, hookimpl


class Best(Method):
    """Share a Gaussian over all parameters; clients differ in how frequent their labels are.

    For classification, where clients hold different labels. docs/results/bfl-best.md says what each
    part is worth on validation samples.
    """

    name = "bfl-best"
    reference = "Chen et al. 2023 (BPFed); label prior: Menon et al. 2021, eq. 10"
    likelihood = Categorical(label_prior=1.0)
    inference = Variational(
        initial_sigma=0.2,
        kl_weight=0.3,
        lr=0.003,
        lr_decay=0.03,
        lr_decay_after=50,
    )
    weighting = Equal()
    hyper = Continual()
    share = "all"
    settings = {"rounds": 75}


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield the method."""
    yield Best
