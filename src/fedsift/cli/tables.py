"""The closing tables of a run and of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.table import Table

from fedsift.cli.terminal import number_table, plain_table
from fedsift.progress import file_size, percent, times_fewer
from fedsift.progress.text import decimal
from fedsift.report.groups import decimals
from fedsift.report.tables import number_of
from fedsift.runs.compare import (
    CLIENT_COLUMNS,
    PERPLEXITY_COLUMNS,
    Row,
    dense_fedadam_bytes,
    mibit,
    partition_text,
)
from fedsift.runs.config import RunConfig


def summary_table(summary: Mapping[str, Any], loss: float | None = None) -> Table:
    """Return the closing table of a run; the final loss is shown if there is no accuracy."""
    table = plain_table(f"{summary['algorithm']} on {summary['dataset']}", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in summary_rows(summary, loss).items():
        table.add_row(name, value)
    return table


def summary_rows(summary: Mapping[str, Any], loss: float | None) -> dict[str, str]:
    """Return the names and values of the closing table."""
    sent = summary["uplink_bytes"]
    dense = dense_fedadam_bytes(
        summary["parameters"], summary["rounds"], summary["clients"], summary["participation"]
    )
    ratio = times_fewer(sent, dense)
    rows = {
        "model": f"{summary['model']}, {summary['parameters']:,} parameters",
        "federation": f"{number_of(summary['clients'], 'client')}, "
        f"{number_of(summary['rounds'], 'round')}, data {partition_text(summary)}",
        **quality_rows(summary, loss),
        "uplink per client": f"{file_size(sent)}, {ratio} fewer than dense FedAdam",
        "dense FedAdam would send": file_size(dense),
        "by the paper's formula": f"{decimal_text(mibit(summary))} Mibit",
        "downlink per client": file_size(summary["downlink_bytes"]),
        "time": f"{summary['seconds']:.2f} s, {summary['seconds_per_round']:.2f} s/round",
    }
    if summary.get("rejected"):
        rows["rejected"] = f"{summary['rejected']:,} updates; metrics.jsonl has the reasons"
    return rows


def quality_rows(summary: Mapping[str, Any], loss: float | None) -> dict[str, str]:
    """Return the accuracies, or the perplexities or the loss if there are none.

    >>> quality_rows({"final_accuracy": None}, loss=0.25)
    {'final test loss': '0.25'}
    """
    if "final_perplexity" in summary:
        return {f"{x} perplexity": decimal(summary[f"{x}_perplexity"]) for x in ("final", "best")}
    if summary["final_accuracy"] is None and loss is not None:
        return {"final test loss": f"{loss:.4g}"}
    return {f"{x} accuracy": percent(summary[f"{x}_accuracy"]) for x in ("final", "best")}


COMPARISON = ("algorithm", "MB", "vs dense", "Mibit", "round")


def comparison_table(rows: Iterable[Row], title: str, config: RunConfig, parameters: int) -> Table:
    """Return a table like the paper's Table 1 for one task, with MB per client first."""
    rows = list(rows)
    table = plain_table(title)
    unit = "ppl" if is_of_language(rows) else "%"
    for heading in (*COMPARISON, f"best {unit}", f"final {unit}"):
        table.add_column(
            heading, justify="left" if heading == "algorithm" else "right", no_wrap=True
        )
    for row in rows:
        style = "bold green" if row.ratio == 1 else None
        table.add_row(*comparison_cells(row, config, parameters), style=style)
    table.caption = (
        "MB: uplink per client to the target; vs dense: times fewer than dense\n"
        "FedAdam would send in the same rounds; Mibit: by the paper's formula"
    )
    return table


def comparison_cells(row: Row, config: RunConfig, parameters: int) -> list[str]:
    """Return a row's cells in the order of the headings."""
    accuracies = [percent(x).removesuffix(" %") for x in (row.best_accuracy, row.final_accuracy)]
    if row.final_perplexity is not None and row.best_perplexity is not None:
        accuracies = [decimal(x) for x in (row.best_perplexity, row.final_perplexity)]
    if row.round is None or row.megabytes is None or row.mibit is None:
        return [row.algorithm, "∞", "", "–", "–", *accuracies]
    dense = dense_fedadam_bytes(parameters, row.round, config.clients, config.participation)
    return [
        row.algorithm,
        decimal_text(row.megabytes),
        times_fewer(1e6 * row.megabytes, dense),
        decimal_text(row.mibit),
        str(row.round),
        *accuracies,
    ]


def is_of_language(rows: Iterable[Row]) -> bool:
    """Whether rows are of language models, which have a perplexity."""
    return any(row.final_perplexity is not None for row in rows)


def clients_table(rows: Iterable[Row]) -> Table | None:
    """Return a table of what was measured on the clients; None if nothing was."""
    rows = list(rows)
    columns, title, tail = CLIENT_COLUMNS, "accuracy on the clients, %", 10
    show: Callable[[float], str] = percent_without_unit
    if is_of_language(rows):
        columns, title, tail = PERPLEXITY_COLUMNS, "perplexity on the clients", 90
        show = decimal
    rows = [row for row in rows if getattr(row, columns[0]) is not None]
    if not rows:
        return None
    table = number_table(title, ("mean", "worst", f"{tail}th percentile", "deviation"))
    for row in rows:
        table.add_row(row.algorithm, *(show(getattr(row, name)) for name in columns))
    table.caption = "After the last round; deviation: the standard deviation between clients"
    return table


def percent_without_unit(share: float) -> str:
    """Return a share in percent, without the unit.

    >>> percent_without_unit(0.5)
    '50.00'
    """
    return percent(share).removesuffix(" %")


def decimal_text(x: float) -> str:
    """Return a number with two decimals, or more if it is small.

    >>> decimal_text(12.345), decimal_text(0.00494)
    ('12.35', '0.0049')
    """
    return f"{x:.{decimals(x)}f}"
