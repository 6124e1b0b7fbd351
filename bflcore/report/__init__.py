"""Reports and comparisons of finished runs."""

from bflcore.report.page import write_report
from bflcore.report.table import compare_runs, print_table

__all__ = ["compare_runs", "print_table", "write_report"]
