"""Figures, and the HTML report of one or more runs.

From runs to comparisons
    ``collect.py`` reads runs, and ``validation.py`` checks their numbers. ``groups.py`` groups
    those that differ only in their seed, ``comparisons.py`` those that can be compared.
    ``styles.py`` gives each group a name and a look.

Charts and tables
    ``quantities.py`` says what a run measured. ``curves.py``, ``clients.py`` and
    ``upload_charts.py`` make the charts, in the terms of ``charts.py``, and ``tables.py`` the
    tables. ``sections.py`` puts them together.

Output
    ``html.py`` writes the page (``page.html``, ``page.js``, ``page.css``), ``figures.py`` draws
    charts without a browser, and ``files.py`` writes figures and tables as files.
"""

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
