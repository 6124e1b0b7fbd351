"""Reports and comparisons of finished runs."""

from bflcore.report.page import write_report
from bflcore.report.table import compare_table, render_table

__all__ = ["compare_table", "render_table", "write_report"]
