"""Reports and comparisons of runs. Neither torch nor matplotlib is imported before it is used."""

from bflcore.report.page import write_report

__all__ = ["write_report"]
