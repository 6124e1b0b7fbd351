"""Problems (a network, a likelihood, the data of every client), and metrics."""

from bflcore.problem.base import Problem, Shares

__all__ = ["Problem", "Shares"]
