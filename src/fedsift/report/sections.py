"""The content of a report: for each comparison its figures and tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from fedsift.report import tables
from fedsift.report.charts import FigureBlock, slug
from fedsift.report.clients import by_client
from fedsift.report.collect import ReportedRun
from fedsift.report.comparisons import Comparison, arrange, likely_target, ranked
from fedsift.report.curves import by_rounds, by_traffic
from fedsift.report.tables import Table
from fedsift.report.upload_charts import bytes_by_part, labels, magnitudes, overlap, pairs

FIGURES = (by_traffic, by_rounds, by_client, bytes_by_part, overlap, magnitudes, pairs, labels)
"""Functions that make the figures, in the page's order; figures without views are omitted."""


TWO_FEDADAMS = (
    "fedadam runs Adam on the clients, as in the paper of FedAdam-SSM. "
    "What Flower calls FedAdam is fedopt, which runs Adam on the server."
)


@dataclass(frozen=True)
class Section:
    """The figures and tables of one comparison."""

    id: str
    comparison: Comparison
    target: float | None
    results: Table
    tiles: Sequence[tuple[str, str]]
    blocks: Sequence[FigureBlock]
    fairness: Table | None
    same: Sequence[tuple[str, str]]
    differing: Table | None
    runs: Table | None
    origin: str = ""
    """The folder of the runs, to tell runs on own data without a name from others."""

    @property
    def seeds(self) -> int:
        """The largest number of seeds of a group."""
        return tables.most_seeds(self.comparison)

    @property
    def name(self) -> str:
        """The data, the model and the partition."""
        return ", ".join([self.comparison.name, *self.partition])

    @property
    def folder_name(self) -> str:
        """The name of the folder of its files, where there are several sections."""
        return slug(self.name)

    @property
    def partition(self) -> list[str]:
        """The partition in words; the runs' folder if the clients came with their data."""
        partition = self.comparison.partition
        own = [f"in {self.origin}"] if self.origin else []
        return own if partition == "own" else [f"partition {partition}"]

    @property
    def tables(self) -> list[Table]:
        """Every table of the section."""
        found = (self.results, self.fairness, self.differing, self.runs)
        return [table for table in found if table is not None and table.columns]

    @property
    def naming(self) -> str:
        """A warning, if a run is of one of the two methods that are called FedAdam."""
        names = {run.algorithm.removeprefix("compressed-") for run in self.comparison.runs}
        return TWO_FEDADAMS if names & {"fedadam", "fedopt"} else ""

    @property
    def about(self) -> str:
        """A line with what the section's runs have in common."""
        comparison, same = self.comparison, dict(self.same)
        words = [comparison.name.replace(", ", " · ")]
        counts = {d for run in comparison.runs if (d := run.summary.get("parameters"))}
        if len(counts) == 1:
            words[0] += f" ({counts.pop():,} parameters)"
        if "clients" in same:
            words.append(tables.number_of(same["clients"], "client"))
        words += self.partition
        lengths = {tables.rounds_text(run) for run in comparison.runs}
        if len(lengths) == 1:
            words.append(tables.number_of(lengths.pop(), "round"))
        if self.seeds > 1:
            words.append(f"up to {self.seeds} seeds")
        return " · ".join(words)


def sections_of(runs: Sequence[ReportedRun], target: float | None = None) -> list[Section]:
    """Return a section for each set of runs that can be compared."""
    comparisons = arrange(runs)
    named = zip(comparisons, origins([c.runs for c in comparisons]), strict=True)
    return [section(c, n, target, origin) for n, (c, origin) in enumerate(named)]


def origins(sets: Sequence[Sequence[ReportedRun]]) -> list[str]:
    """Return the folder of each set of runs relative to their common one; "" if it adds nothing."""
    if not all(run.folder for runs in sets for run in runs):
        return [""] * len(sets)
    folders = [os.path.commonpath([os.path.abspath(run.folder) for run in runs]) for runs in sets]
    names = [os.path.relpath(folder, os.path.commonpath(folders)) for folder in folders]
    return ["" if name == os.curdir else name for name in names]


def section(comparison: Comparison, number: int, target: float | None, origin: str) -> Section:
    """Return the section of a comparison; without a target, choose one."""
    target = target or likely_target(comparison)
    comparison = ranked(comparison, target)
    same, differing = tables.settings(comparison)
    return Section(
        id=f"comparison{number}",
        comparison=comparison,
        target=target,
        results=tables.comparison_table(comparison, target),
        tiles=tables.tiles(comparison) if len(comparison.groups) == 1 else [],
        blocks=[block for make in FIGURES if (block := make(comparison)).views],
        fairness=tables.fairness_table(comparison),
        same=same,
        differing=differing,
        runs=tables.every_run(comparison),
        origin=origin,
    )
