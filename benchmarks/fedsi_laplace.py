"""FedSI's subnetwork Laplace against laplace-torch's on the same work, for one client."""

from __future__ import annotations

import json
import multiprocessing
import resource
from typing import Any

import torch
from problems import alternate, problem, report
from torch import Tensor

from bfl_fedsi import laplace
from bfl_fedsi.fedsi import SubnetworkLaplace
from bflcore.data.torchvision_import import torchvision

ALPHA, SUBNETWORK, PREDICTIONS = 1e-2, 3925, 250
DOUBLES = 4 * SUBNETWORK**2 * 8  # the memory that is allowed, in bytes


class Ours:
    """Selection, inference with the marginal variances, probit predictions."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.work = problem()
        self.weights, self.noise = self.work.initial.to(dtype), torch.ones((), dtype=dtype)
        self.work.network.to(dtype)
        self.x = self.work.train.of(0)[0].to(dtype)
        fraction = SUBNETWORK / len(self.weights)
        self.inference = SubnetworkLaplace(prior_variance=ALPHA, fraction=fraction)
        self.found: Any = None

    def infer(self) -> Tensor:
        """Return the marginal variances ``[R]``."""
        g = torch.full_like(self.weights, ALPHA)
        # The most work there is: of the parameters with the largest variances, few rows matter.
        of = (self.work, self.weights, self.x, self.noise, g)
        self.found = self.inference.subnetwork(*of, "informative", torch.Generator())
        variance: Tensor = self.found.variance
        return variance

    def predict(self) -> Tensor:
        """Return probabilities ``[B, O]``."""
        x = self.x[:PREDICTIONS]
        mean, covariance = laplace.linearise(self.work, self.weights, self.found, x)
        variance = covariance.diagonal(dim1=1, dim2=2)
        return (mean / (1 + torch.pi / 8 * variance).sqrt()).softmax(1)


class Theirs:
    """The same steps by laplace-torch."""

    def __init__(self) -> None:
        torchvision()  # theirs imports it, and may not by itself
        work = problem()
        self.network = work.network
        x, y = work.train.of(0)
        self.x = x[:PREDICTIONS]
        data = torch.utils.data.TensorDataset(x, y)
        self.loader = torch.utils.data.DataLoader(data, batch_size=len(x))
        self.found: Any = None

    def infer(self) -> Tensor:
        """Return the marginal variances ``[S]``."""
        from laplace import DiagLaplace, FullSubnetLaplace
        from laplace.utils import LargestVarianceDiagLaplaceSubnetMask

        of = (self.network, "classification")
        diagonal = DiagLaplace(*of, prior_precision=1 / ALPHA)
        mask = LargestVarianceDiagLaplaceSubnetMask(self.network, SUBNETWORK, diagonal)
        self.found = FullSubnetLaplace(
            *of,
            subnetwork_indices=mask.select(self.loader),
            prior_precision=1 / ALPHA,
        )
        self.found.fit(self.loader)
        variance: Tensor = self.found.posterior_covariance.diagonal()
        return variance

    def predict(self) -> Tensor:
        """Return probabilities ``[B, O]``."""
        probabilities: Tensor = self.found(self.x, link_approx="probit")
        return probabilities


def peak() -> int:
    """Return by how many bytes inference in float64 raises the peak of a fresh process."""
    torch.set_num_threads(1)
    ours = Ours(torch.float64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours.infer()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def main() -> None:
    """Print two ratios and the memory."""
    torch.set_num_threads(1)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        used = pool.apply(peak)
    name = "subnetwork Laplace: peak memory in float64 / four |S| x |S| matrices"
    ratio = round(used / DOUBLES, 3)
    print(json.dumps({"benchmark": name, "bytes": used, "ratio": ratio, "allowed": "<= 1"}))
    ours, theirs = Ours(), Theirs()
    times = alternate(ours.infer, theirs.infer, repeats=3)
    name = "subnetwork Laplace: selection, fit, variances / laplace-torch, one thread"
    report(name, "<= 0.1", *times)
    times = alternate(ours.predict, theirs.predict, repeats=3)
    name = f"subnetwork Laplace: {PREDICTIONS} predictions / laplace-torch, one thread"
    report(name, "<= 0.1", *times)


if __name__ == "__main__":
    main()
