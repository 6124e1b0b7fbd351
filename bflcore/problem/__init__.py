"""What is learned, and from what: a network, a likelihood, every client's data; and metrics."""

from bflcore.problem.base import Problem, Shares

__all__ = ["Problem", "Shares"]
