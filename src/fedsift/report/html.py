"""The report of one or more runs: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsift.disk import replace_file
from fedsift.runs.compare import MIBIT, Row
from fedsift.simulation import Record


@dataclass(frozen=True)
class Shown:
    """One run as the report shows it."""

    name: str
    history: Sequence[Record]
    summary: Mapping[str, Any]


def write_report(runs: Sequence[Shown], path: Path, title: str, rows: Sequence[Row] = ()) -> None:
    """Write the report of the given runs, with their comparison if there is one."""
    from plotly.offline import get_plotlyjs

    chart = figure_of(runs).to_html(full_html=False, include_plotlyjs=False)
    page = PAGE.format(
        title=html.escape(title),
        plotly=get_plotlyjs(),
        chart=chart,
        comparison=comparison_table(rows) if rows else "",
        results=results_table(runs),
        settings=settings_table(runs),
    )
    replace_file(path, page.encode())


def figure_of(runs: Sequence[Shown]) -> Any:
    """Accuracy against Mibit, accuracy against rounds, loss against rounds."""
    from plotly.colors import qualitative
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    titles = ("accuracy by traffic", "accuracy by round", "test loss by round")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles)
    for run, color in zip(runs, qualitative.D3 * len(runs), strict=False):
        mibit = [float(r["uplink_bits_paper"] or 0) / MIBIT for r in run.history]
        rounds = [r["round"] for r in run.history]
        accuracy = [r["accuracy"] for r in run.history]
        loss = [r["loss"] for r in run.history]
        for place, (x, y) in enumerate(((mibit, accuracy), (rounds, accuracy), (rounds, loss)), 1):
            line = Scatter(
                x=x, y=y, name=run.name, legendgroup=run.name, showlegend=place == 1,
                mode="lines+markers", marker_size=4, line_color=color,
            )  # fmt: skip
            figure.add_trace(line, row=1, col=place)
    figure.update_xaxes(title_text="uplink, Mibit a client", row=1, col=1)
    figure.update_xaxes(title_text="round", row=1, col=2)
    figure.update_xaxes(title_text="round", row=1, col=3)
    figure.update_yaxes(tickformat=".0%", row=1, col=1)
    figure.update_yaxes(tickformat=".0%", row=1, col=2)
    figure.update_layout(
        height=440, template="plotly_white", margin={"t": 50, "l": 50, "r": 20, "b": 50},
        legend={"orientation": "h", "y": -0.25},
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font_color="#808890",
    )  # fmt: skip
    figure.update_xaxes(gridcolor="rgba(128,136,144,0.2)", zeroline=False)
    figure.update_yaxes(gridcolor="rgba(128,136,144,0.2)", zeroline=False)
    return figure


RESULTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "final_accuracy": ("final accuracy", lambda x: f"{100 * x:.2f} %"),
    "best_accuracy": ("best accuracy", lambda x: f"{100 * x:.2f} %"),
    "uplink_bits_paper": ("uplink by the paper's formula", lambda x: f"{x / MIBIT:.2f} Mibit"),
    "uplink_bytes": ("uplink", lambda x: f"{x / 1e6:.2f} MB"),
    "downlink_bytes": ("downlink", lambda x: f"{x / 1e6:.2f} MB"),
    "seconds_per_round": ("seconds a round", lambda x: f"{x:.2f}"),
}
"""The summary's columns that are results, with their heading and how they are written."""


def results_table(runs: Sequence[Shown]) -> str:
    """A row a run, a column a result."""
    head = ["run", "rounds", *(heading for heading, _ in RESULTS.values())]
    rows = [
        [
            run.name,
            str(run.summary["rounds"]),
            *(
                "–" if run.summary[key] is None else write(run.summary[key])
                for key, (_, write) in RESULTS.items()
            ),
        ]
        for run in runs
    ]
    return table(head, rows)


def comparison_table(rows: Sequence[Row]) -> str:
    """What each method had sent when it reached the target."""
    head = ["to the target", "Mibit", "ratio", "MB sent", "round"]
    return table(
        head,
        [
            [
                row.algorithm,
                "∞" if row.mibit is None else f"{row.mibit:.2f}",
                "–" if row.ratio is None else f"{row.ratio:.2f}×",
                "–" if row.megabytes is None else f"{row.megabytes:.2f}",
                "–" if row.round is None else str(row.round),
            ]
            for row in rows
        ],
    )


def settings_table(runs: Sequence[Shown]) -> str:
    """A row a setting, a column a run."""
    hidden = {*RESULTS, "seconds", "environment"}
    keys = {k: None for run in runs for k in run.summary if k not in hidden}
    rows = [[key, *(str(run.summary.get(key, "–")) for run in runs)] for key in keys]
    places = {k: None for run in runs for k in run.summary.get("environment", {})}
    rows += [
        [key, *(str(run.summary.get("environment", {}).get(key, "–")) for run in runs)]
        for key in places
    ]
    return table(["setting", *(run.name for run in runs)], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table.

    >>> table(["a"], [["<1"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;1</td></tr></tbody></table>'
    """

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1d2329; --paper: #fff; --line: #d9dee3; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e3e7eb; --paper: #14181c; --line: #353c43; }}
}}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); }}
.wide {{ overflow-x: auto; }}
@media print {{ body {{ max-width: none; margin: 0; }} }}
</style>
<script>{plotly}</script>
</head>
<body>
<h1>{title}</h1>
<div class="wide">{comparison}</div>
<div class="wide">{results}</div>
<div>{chart}</div>
<h2>Configuration and environment</h2>
<div class="wide">{settings}</div>
</body>
</html>
"""
