"""Figures, and the HTML report of one or more runs."""

from fedsift.report.collect import ReportedRun, read_run
from fedsift.report.figures import accuracy_figure
from fedsift.report.html import report_on, write_report

__all__ = ["ReportedRun", "accuracy_figure", "read_run", "report_on", "write_report"]
