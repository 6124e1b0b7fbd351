"""The methods; the README says where each option comes from."""

from __future__ import annotations

from collections.abc import Iterator

from bfl_baselines import inferences as parts
from bfl_baselines.particles import Particles
from bflcore import Accumulate, Continual, Equal, LocalInference, Map, Method, Posterior, hookimpl


class Local(Method):
    """Train every client alone; nothing travels."""

    name = "local"
    reference = "the lower bound of Chen et al. 2024 (FedSI), Table 1"
    inference = Map()
    share = "none"


class FedAvgFineTuned(Method):
    """Train by federated averaging, and fine-tune at every client before it predicts."""

    name = "fedavg-ft"
    reference = "McMahan et al. 2017; fine-tuned as in Chen et al. 2024 (FedSI), section 5"
    inference = parts.Staged(fine_tune_epochs=5)


class FedProx(Method):
    """Train by federated averaging with a quadratic pull to the server's network."""

    name = "fedprox"
    reference = "Li et al. 2020 (FedProx), eq. 2"
    inference = Map(anchor=0.01, anchor_to="start")


class Scaffold(Method):
    """Train by federated averaging with control variates against client drift."""

    name = "scaffold"
    reference = "Karimireddy et al. 2020, Algorithm 1, option II"
    inference = parts.ControlVariates(lr=0.05)
    weighting = Equal()
    hyper = Accumulate()


class FedPer(Method):
    """Share the body and keep the head, trained together."""

    name = "fedper"
    reference = "Arivazhagan et al. 2019, Algorithm 1"
    inference = Map()
    share = "body"


class FedRep(Method):
    """Share the body and keep the head, trained in turn: first the head, then the body."""

    name = "fedrep"
    reference = "Collins et al. 2021, Algorithm 1"
    inference = parts.Staged(stages="personal-then-shared")
    share = "body"


class FedBABU(Method):
    """Train the body under a head that stays random, and fine-tune all before predicting."""

    name = "fedbabu"
    reference = "Oh, Kim & Yun 2022, Algorithm 1"
    inference = parts.Staged(stages="shared", fine_tune_epochs=5)
    share = "body"


class LGFedAvg(Method):
    """Share the head and keep the body, trained together."""

    name = "lg-fedavg"
    reference = "Liang et al. 2020, Algorithm 1"
    inference = Map()
    share = "head"


class PerFedAvg(Method):
    """Meta-learn a network that one step adapts to a client."""

    name = "per-fedavg"
    reference = "Fallah, Mokhtari & Ozdaglar 2020, Algorithm 1, first order"
    inference = parts.MetaLearning()


class APFL(Method):
    """Share a network and predict with an adaptive mixture of it and one's own."""

    name = "apfl"
    reference = "Deng, Kamani & Mahdavi 2020, Algorithm 1"
    inference = parts.AdaptiveMixture()


class PFedMe(Method):
    """Share the centre of the clients' Moreau envelopes and predict with their minimisers."""

    name = "pfedme"
    reference = "Dinh, Tran & Nguyen 2020, Algorithm 1 with beta = 1"
    inference = parts.MoreauEnvelope(optimiser="sgd", lr=0.05)
    weighting = Equal()


class Ditto(Method):
    """Share FedAvg's network and predict with one's own, pulled towards it."""

    name = "ditto"
    reference = "Li et al. 2021, Algorithm 1"
    inference = parts.Ditto()


class PFedBayes(Method):
    """Share a Gaussian and predict with one's own, whose prior it is."""

    name = "pfedbayes"
    reference = "Zhang et al. 2022, Algorithm 1"
    inference = parts.PersonalBayes(
        initial_sigma=0.0789,  # softplus(-2.5), the paper's rho
        kl_weight=10.0,  # the paper's zeta
    )
    weighting = Equal()
    hyper = Continual()


class FedPop(Method):
    """Share a body and sample the heads by Langevin dynamics under a common prior."""

    name = "fedpop"
    aliases = ("fedsoul",)
    reference = "Kotelevskii et al. 2022, Algorithm 1"
    inference = parts.Langevin()
    hyper = Accumulate()
    share = "body"


class GroupSparseSGD(Method):
    """Train by federated averaging with a group lasso that prunes neurons."""

    name = "sgd-group-sparse"
    reference = "Scardapane et al. 2017, eq. 6"
    inference = parts.GroupSparse(optimiser="sgd", lr=0.05)


class GroupSNIP(Method):
    """Prune neurons by connection sensitivity, then train by federated averaging."""

    name = "group-snip"
    reference = "Lee, Ajanthan & Torr 2019, eq. 5, over groups"
    inference = parts.GroupSnip()
    hyper = Accumulate()


class Centralised(Method):
    """Train on all data in one place: the upper bound on the global test."""

    name = "centralised"
    reference = "the usual upper bound; Fischer et al. 2024, Table 1"
    inference = parts.Pooled()
    settings = {"cohort": 1}


@hookimpl
def bfl_posteriors() -> Iterator[type[Posterior]]:
    """Yield the family of Langevin's draws."""
    yield Particles


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield what the recipes need beyond `map`."""
    yield from (parts.Staged, parts.Ditto, parts.AdaptiveMixture, parts.MoreauEnvelope)
    yield from (parts.MetaLearning, parts.ControlVariates, parts.GroupSparse, parts.GroupSnip)
    yield from (parts.PersonalBayes, parts.Langevin, parts.Pooled)


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield every baseline."""
    yield from (Local, FedAvgFineTuned, FedProx, Scaffold, FedPer, FedRep, FedBABU, LGFedAvg)
    yield from (PerFedAvg, APFL, PFedMe, Ditto, PFedBayes, FedPop)
    yield from (GroupSparseSGD, GroupSNIP, Centralised)
