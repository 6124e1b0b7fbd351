"""The recipes; where a default differs from the part's own, the README says where it is from."""

from __future__ import annotations

from collections.abc import Iterator

from bfl_baselines import (
    apfl,
    ditto,
    fedpop,
    group_snip,
    group_sparse,
    per_fedavg,
    pfedbayes,
    pfedme,
    pooled,
    scaffold,
    staged,
)
from bflcore import FedAvg, LocalInference, Method, Posterior, hookimpl


class Local(FedAvg):
    """Train every client alone; nothing travels."""

    name = "local"
    reference = "the lower bound of Chen et al. 2024 (FedSI), Table 1"
    share = "none"


class FedAvgFineTuned(Method):
    """Train by federated averaging, and fine-tune at every client before it predicts."""

    name = "fedavg-ft"
    reference = "McMahan et al. 2017; fine-tuned as in Chen et al. 2024 (FedSI), section 5"
    inference = "staged"
    defaults = {"inference.fine_tune_epochs": 5}  # noqa: RUF012 - declared in Method


class FedProx(FedAvg):
    """Train by federated averaging with a quadratic pull to the server's network."""

    name = "fedprox"
    reference = "Li et al. 2020 (FedProx), eq. 2"
    defaults = {"inference.anchor": 0.01, "inference.anchor_to": "start"}  # noqa: RUF012


class Scaffold(Method):
    """Train by federated averaging with control variates against client drift."""

    name = "scaffold"
    reference = "Karimireddy et al. 2020, Algorithm 1, option II"
    inference = "scaffold"
    weighting = "equal"
    hyper = "accumulate"
    defaults = {"inference.lr": 0.05}  # noqa: RUF012


class FedPer(FedAvg):
    """Share the body and keep the head, trained together."""

    name = "fedper"
    reference = "Arivazhagan et al. 2019, Algorithm 1"
    share = "body"


class FedRep(Method):
    """Share the body and keep the head, trained in turn: first the head, then the body."""

    name = "fedrep"
    reference = "Collins et al. 2021, Algorithm 1"
    inference = "staged"
    share = "body"
    defaults = {"inference.stages": "personal-then-shared"}  # noqa: RUF012


class FedBABU(Method):
    """Train the body under a head that stays random, and fine-tune all before predicting."""

    name = "fedbabu"
    reference = "Oh, Kim & Yun 2022, Algorithm 1"
    inference = "staged"
    share = "body"
    defaults = {"inference.stages": "shared", "inference.fine_tune_epochs": 5}  # noqa: RUF012


class LGFedAvg(FedAvg):
    """Share the head and keep the body, trained together."""

    name = "lg-fedavg"
    reference = "Liang et al. 2020, Algorithm 1"
    share = "head"


class PerFedAvg(Method):
    """Meta-learn a network that one step adapts to a client."""

    name = "per-fedavg"
    reference = "Fallah, Mokhtari & Ozdaglar 2020, Algorithm 1, first order"
    inference = "per-fedavg"


class APFL(Method):
    """Share a network and predict with an adaptive mixture of it and one's own."""

    name = "apfl"
    reference = "Deng, Kamani & Mahdavi 2020, Algorithm 1"
    inference = "apfl"


class PFedMe(Method):
    """Share the centre of the clients' Moreau envelopes and predict with their minimisers."""

    name = "pfedme"
    reference = "Dinh, Tran & Nguyen 2020, Algorithm 1 with beta = 1"
    inference = "pfedme"
    weighting = "equal"
    defaults = {"inference.optimiser": "sgd", "inference.lr": 0.05}  # noqa: RUF012


class Ditto(Method):
    """Share FedAvg's network and predict with one's own, pulled towards it."""

    name = "ditto"
    reference = "Li et al. 2021, Algorithm 1"
    inference = "ditto"


class PFedBayes(Method):
    """Share a Gaussian and predict with one's own, whose prior it is."""

    name = "pfedbayes"
    reference = "Zhang et al. 2022, Algorithm 1"
    inference = "pfedbayes"
    weighting = "equal"
    hyper = "continual"
    defaults = {  # noqa: RUF012
        "inference.initial_sigma": 0.0789,  # softplus(-2.5), the paper's rho
        "inference.kl_weight": 10.0,  # the paper's zeta
    }


class FedPop(Method):
    """Share a body and sample the heads by Langevin dynamics under a common prior."""

    name = "fedpop"
    aliases = ("fedsoul",)
    reference = "Kotelevskii et al. 2022, Algorithm 1"
    inference = "langevin"
    hyper = "accumulate"
    share = "body"


class GroupSparseSGD(Method):
    """Train by federated averaging with a group lasso that prunes neurons."""

    name = "sgd-group-sparse"
    reference = "Scardapane et al. 2017, eq. 6"
    inference = "group-sparse"
    defaults = {"inference.optimiser": "sgd", "inference.lr": 0.05}  # noqa: RUF012


class GroupSNIP(Method):
    """Prune neurons by connection sensitivity, then train by federated averaging."""

    name = "group-snip"
    reference = "Lee, Ajanthan & Torr 2019, eq. 5, over groups"
    inference = "group-snip"
    hyper = "accumulate"


class Centralised(Method):
    """Train on all data in one place: the upper bound on the global test."""

    name = "centralised"
    reference = "the usual upper bound; Fischer et al. 2024, Table 1"
    inference = "pooled"
    defaults = {"cohort": 1}  # noqa: RUF012


@hookimpl
def bfl_posteriors() -> Iterator[type[Posterior]]:
    """Yield the family of Langevin's draws."""
    yield fedpop.Particles


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield what the recipes need beyond `map`."""
    yield from (staged.Staged, per_fedavg.MetaLearning, scaffold.ControlVariates)
    yield from (ditto.Ditto, apfl.AdaptiveMixture, pfedme.MoreauEnvelope)
    yield from (pfedbayes.PersonalBayes, fedpop.Langevin)
    yield from (group_sparse.GroupSparse, group_snip.GroupSnip, pooled.Pooled)


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield every baseline."""
    yield from (Local, FedAvgFineTuned, FedProx, Scaffold, FedPer, FedRep, FedBABU, LGFedAvg)
    yield from (PerFedAvg, APFL, PFedMe, Ditto, PFedBayes, FedPop)
    yield from (GroupSparseSGD, GroupSNIP, Centralised)
