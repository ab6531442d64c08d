"""Figures, and the HTML report of one or more runs."""

from fedsift.report.collect import ReportedRun, read_run
from fedsift.report.files import comparison_figure, export
from fedsift.report.html import report_on, write_report

__all__ = [
    "ReportedRun",
    "comparison_figure",
    "export",
    "read_run",
    "report_on",
    "write_report",
]
