"""Write the figures and tables of a report as files: PNG and SVG, CSV and LaTeX."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from fedsift.report.charts import FigureBlock, View
from fedsift.report.collect import ReportedRun
from fedsift.report.comparisons import arrange, ranked
from fedsift.report.curves import cost_chart, groups_with, rounds_chart
from fedsift.report.figures import draw_view
from fedsift.report.quantities import quantities_of
from fedsift.report.sections import Section
from fedsift.report.tables import Table
from fedsift.runs.disk import replace_file

NUMBERS = {"∞": "inf", "–": ""}
"""Cells that other programs read in another way."""
LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
    "%": r"\%", "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "×": r"$\times$", "∞": r"$\infty$", "θ": r"$\theta$", "·": r"$\cdot$",
    "–": "--",
}  # fmt: skip
"""Characters that LaTeX reads in another way, or that its fonts may lack."""


def export(sections: Sequence[Section], folder: Path) -> None:
    """Write every view of every figure, and every table; each section in a folder of its own.

    A single section is written to the folder itself.
    """
    for section in sections:
        own = folder if len(sections) == 1 else folder / section.folder_name
        own.mkdir(parents=True, exist_ok=True)
        for block in section.blocks:
            for view in block.views:
                export_view(block, view, section, own)
        for table in section.tables:
            replace_file(own / f"{table.file_name}.csv", csv_of(table).encode())
            replace_file(own / f"{table.file_name}.tex", latex_of(table).encode())


def export_view(block: FigureBlock, view: View, section: Section, folder: Path) -> None:
    """Write one view of a figure as PNG and SVG."""
    title = " · ".join(word for word in (block.title, view.name) if word)
    for suffix, content in draw_view(view, title, section.about, section.target).items():
        replace_file(folder / f"{block.file_name(view)}.{suffix}", content)


def comparison_figure(
    runs: Sequence[ReportedRun], path: Path, title: str, target: float | None = None
) -> None:
    """Write the quality of comparable runs, against the uplink and rounds, as PNG and SVG.

    It is the accuracy, or the perplexity of language models, which then have no line at the target.
    """
    (comparison,) = (ranked(found, target) for found in arrange(runs))
    shown = quantities_of(runs)[0]
    charts = [
        cost_chart(comparison, "MB up", shown),
        rounds_chart(groups_with(comparison, shown), shown),
    ]
    for suffix, content in draw_view(View("", charts), title, target=target).items():
        replace_file(path.with_suffix(f".{suffix}"), content)


def texts_of(table: Table) -> list[list[str]]:
    """Return a table as rows of text, the headings first."""
    headings = [table.corner, *(column.name for column in table.columns)]
    return [headings, *([row.name, *(cell.text for cell in row.cells)] for row in table.rows)]


def csv_of(table: Table) -> str:
    """Return a table as CSV; a column of means ± deviations becomes two columns."""
    columns = [split_column(list(column)) for column in zip(*texts_of(table), strict=True)]
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(zip(*(column for group in columns for column in group), strict=True))
    return text.getvalue()


def split_column(cells: list[str]) -> list[list[str]]:
    """Return a column, or one of means and one of deviations.

    >>> split_column(["MB", "1,234", "∞"])
    [['MB', '1234', 'inf']]
    >>> split_column(["MB", "1.20 ± 0.10", "∞"])
    [['MB', '1.20', 'inf'], ['MB ±', '0.10', '']]
    """
    heading, *texts = cells
    parts = [text.partition(" ± ") for text in texts]
    means = [heading, *(number_text(mean) for mean, _, _ in parts)]
    if not any(sign for _, sign, _ in parts):
        return [means]
    return [means, [f"{heading} ±", *(deviation for _, _, deviation in parts)]]


def number_text(text: str) -> str:
    """Return a cell as other programs read it.

    >>> number_text("12.6×"), number_text("27,430"), number_text("–"), number_text("sift, 2")
    ('12.6', '27430', '', 'sift, 2')
    """
    if re.fullmatch(r"[\d.]+×|\d{1,3}(,\d{3})+", text):
        return text.removesuffix("×").replace(",", "")
    return NUMBERS.get(text, text)


def latex_of(table: Table) -> str:
    r"""Return a table as a LaTeX tabular, for a document that uses the package booktabs.

    >>> from fedsift.report.tables import Cell, TableColumn, TableRow
    >>> rows = [TableRow("a_1", [Cell("1.0 ± 0.1")])]
    >>> print(latex_of(Table("", "", "", "method", [TableColumn("best, %")], rows)))
    % \usepackage{booktabs}
    \begin{tabular}{lr}
    \toprule
    method & best, \% \\
    \midrule
    a\_1 & 1.0 $\pm$ 0.1 \\
    \bottomrule
    \end{tabular}
    <BLANKLINE>
    """
    kinds = "".join("l" if column.kind == "folder" else "r" for column in table.columns)
    head, *rows = (f"{' & '.join(map(latex_text, row))} \\\\" for row in texts_of(table))
    lines = [
        r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{l{kinds}}}", r"\toprule", head,
        r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def latex_text(text: str) -> str:
    r"""Return a text that LaTeX prints as it is.

    >>> latex_text(r"100% of {a_b}\n")
    '100\\% of \\{a\\_b\\}\\textbackslash{}n'
    """
    return "".join(LATEX.get(character, character) for character in " ".join(text.split()))
