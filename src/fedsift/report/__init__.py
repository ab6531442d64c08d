"""Plots, and the HTML report of one or more runs."""

from fedsift.report.figures import accuracy_figure
from fedsift.report.html import write_report

__all__ = ["accuracy_figure", "write_report"]
