"""The methods; the README says where each option comes from."""

from __future__ import annotations

from collections.abc import Iterator

from bfl_baselines.apfl import AdaptiveMixture
from bfl_baselines.ditto import PulledNetwork
from bfl_baselines.fedpop import Langevin, Particles
from bfl_baselines.group_snip import GroupSnip
from bfl_baselines.group_sparse import GroupSparse
from bfl_baselines.per_fedavg import MetaLearning
from bfl_baselines.pfedbayes import PersonalBayes
from bfl_baselines.pfedme import MoreauEnvelope
from bfl_baselines.pooled import Pooled
from bfl_baselines.scaffold import ControlVariates
from bfl_baselines.staged import Staged
from bflcore import Accumulate, Continual, Equal, LocalInference, Map, Method, Posterior, hookimpl


class Local(Method):
    """Train each client on its own; nothing is shared."""

    name = "local"
    reference = "the lower bound of Chen et al. 2024 (FedSI), Table 1"
    inference = Map()
    share = "none"


class FedAvgFineTuned(Method):
    """Train by federated averaging; each client fine-tunes before it predicts."""

    name = "fedavg-ft"
    reference = "McMahan et al. 2017; fine-tuned as in Chen et al. 2024 (FedSI), section 5"
    inference = Staged(fine_tune_epochs=5)


class FedProx(Method):
    """Train by federated averaging with a quadratic penalty around the server's network."""

    name = "fedprox"
    reference = "Li et al. 2020 (FedProx), eq. 2"
    inference = Map(anchor=0.01, anchor_to="start")


class Scaffold(Method):
    """Train by federated averaging with control variates against client drift."""

    name = "scaffold"
    reference = "Karimireddy et al. 2020, Algorithm 1, option II"
    inference = ControlVariates(lr=0.05)
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
    inference = Staged(
        stages="personal-then-shared",
        local_epochs=1,  # of the body, after `personal_epochs` of the head
    )
    share = "body"


class FedBABU(Method):
    """Train the body with a fixed random head; fine-tune all parameters before predicting."""

    name = "fedbabu"
    reference = "Oh, Kim & Yun 2022, Algorithm 1"
    inference = Staged(stages="shared", fine_tune_epochs=5)
    share = "body"


class LGFedAvg(Method):
    """Share the head and keep the body, trained together."""

    name = "lg-fedavg"
    reference = "Liang et al. 2020, Algorithm 1"
    inference = Map()
    share = "head"


class PerFedAvg(Method):
    """Meta-learn a network that adapts to a client in one step."""

    name = "per-fedavg"
    reference = "Fallah, Mokhtari & Ozdaglar 2020, Algorithm 1, first order"
    inference = MetaLearning()


class APFL(Method):
    """Share a network; clients predict with an adaptive mixture of it and their own."""

    name = "apfl"
    reference = "Deng, Kamani & Mahdavi 2020, Algorithm 1"
    inference = AdaptiveMixture()


class PFedMe(Method):
    """Share a network around which each client optimises its own (Moreau envelopes)."""

    name = "pfedme"
    reference = "Dinh, Tran & Nguyen 2020, Algorithm 1 with beta = 1"
    inference = MoreauEnvelope(
        optimiser="sgd",
        lr=0.05,
        local_epochs=4,  # the paper's 20 minibatches (R), at 250 samples in batches of 50
    )
    weighting = Equal()


class Ditto(Method):
    """Share the network of FedAvg; clients predict with their own, regularised towards it."""

    name = "ditto"
    reference = "Li et al. 2021, Algorithm 1"
    inference = PulledNetwork()


class PFedBayes(Method):
    """Share a Gaussian that serves as the prior of each client's personal Gaussian."""

    name = "pfedbayes"
    reference = "Zhang et al. 2022, Algorithm 1"
    inference = PersonalBayes(
        initial_sigma=0.0789,  # softplus(-2.5), the paper's rho
        estimator="reparameterisation",  # as in the paper: one draw of the weights per step
        kl_weight=10.0,  # the paper's zeta
        local_epochs=4,  # the paper's 20 minibatches (R), at 250 samples in batches of 50
    )
    weighting = Equal()
    hyper = Continual()


class FedPop(Method):
    """Share a body and sample the heads by Langevin dynamics under a common prior."""

    name = "fedpop"
    aliases = ("fedsoul",)
    reference = "Kotelevskii et al. 2022, Algorithm 1"
    inference = Langevin()
    hyper = Accumulate()
    share = "body"


class GroupSparseSGD(Method):
    """Train by federated averaging with a group lasso that prunes neurons."""

    name = "sgd-group-sparse"
    reference = "Scardapane et al. 2017, eq. 6"
    inference = GroupSparse(optimiser="sgd", lr=0.05)


class GroupSNIP(Method):
    """Prune neurons by connection sensitivity, then train by federated averaging."""

    name = "group-snip"
    reference = "Lee, Ajanthan & Torr 2019, eq. 5, over groups"
    inference = GroupSnip()
    hyper = Accumulate()


class Centralised(Method):
    """Train on all clients' pooled data: an upper bound for the global test."""

    name = "centralised"
    reference = "the usual upper bound; Fischer et al. 2024, Table 1"
    inference = Pooled()
    settings = {"cohort": 1}


@hookimpl
def bfl_posteriors() -> Iterator[type[Posterior]]:
    """Yield the posterior family of Langevin dynamics."""
    yield Particles


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the inferences of the baselines."""
    yield from (Staged, MetaLearning, ControlVariates)
    yield from (PulledNetwork, AdaptiveMixture, MoreauEnvelope)
    yield from (PersonalBayes, Langevin)
    yield from (GroupSparse, GroupSnip, Pooled)


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield every baseline."""
    yield from (Local, FedAvgFineTuned, FedProx, Scaffold, FedPer, FedRep, FedBABU, LGFedAvg)
    yield from (PerFedAvg, APFL, PFedMe, Ditto, PFedBayes, FedPop)
    yield from (GroupSparseSGD, GroupSNIP, Centralised)
