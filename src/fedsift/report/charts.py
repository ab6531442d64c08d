"""The report's figures, as plain data for plotly.

A colour is the name of a CSS variable (``--c0``, or ``--c0/0.2`` to see through), so that the page
can draw the same figure in light, in dark and on paper. A :class:`Block` is what stands under one
heading: one or more charts, and the views between which its reader can choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsift.report.collect import Group, Shown, Task, both_ways, megabytes, mibit
from fedsift.runs.uploads import BINS, LOWEST, PER_DECADE
from fedsift.simulation import Record

Chart = dict[str, Any]
PARTS = {
    "w": ("ΔW", "--w"),
    "m": ("ΔM", "--m"),
    "v": ("ΔV", "--v"),
    "mask": ("mask", "--mask"),
    "header": ("header", "--header"),
}
"""What a message's bytes are for: name and colour."""
HEIGHT = 340
"""Of a chart, in pixels; what labels need to keep their distance."""


@dataclass(frozen=True)
class View:
    """One of a block's views: its name, and a chart for each of the block's places."""

    name: str
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Block:
    """A figure with its heading, a sentence on how to read it, and its views."""

    title: str
    note: str
    views: Sequence[View] = field(default_factory=list)
    wide: bool = False


def chart(
    traces: Iterable[Mapping[str, Any]], x: Mapping[str, Any], y: Mapping[str, Any], **layout: Any
) -> Chart:
    """Traces and two axes."""
    return {"data": list(traces), "layout": {"xaxis": dict(x), "yaxis": dict(y), **layout}}


def blocks_of(task: Task) -> list[Block]:
    """Every figure for which the runs have recorded something."""
    found = (
        accuracy_by_traffic(task),
        by_rounds(task),
        bytes_by_part(task),
        overlap(task),
        pairs(task),
        magnitudes(task),
        labels(task),
    )
    return [block for block in found if block.views]


# Curves: a line a group, and a band from its lowest to its highest seed.


def accuracy_by_traffic(task: Task) -> Block:
    """Test accuracy against what a client sent."""
    axes: dict[str, tuple[str, Callable[[Record], float]]] = {
        "paper's Mibit": ("uplink a client by the paper's formula, Mibit", mibit),
        "MB sent": ("uplink a client, MB", megabytes),
        "MB both ways": ("uplink and downlink a client, MB", both_ways),
        "time": ("time, s", lambda r: float(r["seconds"] or 0)),
    }
    groups = [g for g in task.groups if any(x is not None for x in g.means(accuracy))]
    views = [
        View(name, [curves(groups, x, accuracy, title, "test accuracy", percent=True)])
        for name, (title, x) in axes.items()
    ]
    note = "Up and to the left is better: more accuracy for less traffic."
    return Block("Accuracy against traffic", note, views if groups else [])


def by_rounds(task: Task) -> Block:
    """Accuracy and losses against rounds."""
    columns = {"accuracy": "test accuracy", "loss": "test loss", "train_loss": "training loss"}
    views = []
    for key, title in columns.items():
        value = column(key)
        groups = [g for g in task.groups if any(x is not None for x in g.means(value))]
        if groups:
            percent = key == "accuracy"
            views.append(View(title, [curves(groups, rounds, value, "round", title, percent)]))
    several = any(len(group.runs) > 1 for group in task.groups)
    note = "The mean over the seeds; the band spans their lowest and highest." if several else ""
    return Block("Progress by round", note, views)


def column(key: str) -> Callable[[Record], float | None]:
    """A column of the metrics."""
    return lambda record: record.get(key)


accuracy = column("accuracy")


def rounds(record: Record) -> float:
    """The round."""
    return float(record["round"] or 0)


def curves(
    groups: Sequence[Group],
    x: Callable[[Record], float],
    y: Callable[[Record], float | None],
    x_title: str,
    y_title: str,
    percent: bool = False,
) -> Chart:
    """A line for each group with its name at the end."""
    traces: list[Chart] = []
    ends: list[tuple[Group, float, float]] = []
    for group in groups:
        xs, ys = group.means(x), group.means(y)
        known = [(a, b) for a, b in zip(xs, ys, strict=True) if a is not None and b is not None]
        if len(group.runs) > 1:
            traces += band(group, xs, y)
        number = "%{y:.2%}" if percent else "%{y:.2f}"
        traces.append(line(group, xs, ys, f"{number} at %{{x:.2f}}"))
        if known:
            ends.append((group, *known[-1]))
    lows = [value for group in groups for value in group.means(y) if value is not None]
    low, high = min(lows), max(lows)
    room = 0.04 * (high - low) or 0.01
    totals = [end[1] for end in ends]
    is_log = x is not rounds and max(totals) > 3 * min(totals) > 0
    x_axis: dict[str, Any] = {"title": x_title, "type": "log" if is_log else "linear"}
    if not is_log:
        x_axis["rangemode"] = "tozero"
    y_axis: dict[str, Any] = {"title": y_title, "range": [low - room, high + room]}
    if percent:
        y_axis["tickformat"] = ".0%"
    notes = end_labels(ends, high - low + 2 * room) if len(groups) > 1 and x is rounds else []
    return chart(traces, x_axis, y_axis, annotations=notes, target=percent)


def line(group: Group, xs: Sequence[Any], ys: Sequence[Any], hover: str, **more: Any) -> Chart:
    """One group's line."""
    return {
        "type": "scatter",
        "mode": "lines" if len(xs) > 1 else "markers",
        "x": xs,
        "y": ys,
        "name": group.name,
        "legendgroup": group.name,
        "line": {"color": f"--c{group.colour}", "dash": group.dash, "width": 2},
        "hovertemplate": f"{hover}<extra>{group.name}</extra>",
        **more,
    }


def band(
    group: Group, xs: Sequence[float | None], y: Callable[[Record], float | None]
) -> list[Chart]:
    """The area between the lowest and the highest of a group's runs."""
    known = [(a, c) for a, c in zip(xs, group.columns(y), strict=True) if None not in c]
    common = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    sides = [
        {**common, "x": [a for a, _ in known], "y": [side(c) for _, c in known]}
        for side in (min, max)
    ]
    sides[1] |= {"fill": "tonexty", "fillcolor": f"--c{group.colour}/0.15"}
    return [{**side, "legendgroup": group.name} for side in sides]


def end_labels(ends: Sequence[tuple[Group, float, float]], span: float) -> list[Chart]:
    """The groups' names right of their lines' ends, none over another."""
    placed = apart([y for _, _, y in ends], 17 / (HEIGHT - 90) * span)
    return [
        {
            "name": "end",
            "x": 1,
            "xref": "paper",
            "y": y,
            "text": group.name,
            "legendgroup": group.name,
            "font": {"color": f"--c{group.colour}", "size": 12},
            "xanchor": "left",
            "showarrow": False,
        }
        for (group, _, _), y in zip(ends, placed, strict=True)
    ]


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Heights moved as little as keeps them a gap apart, in the same order.

    >>> apart([1.0, 1.0, 5.0], 1.0)
    [0.5, 1.5, 5.0]
    """
    order = sorted(range(len(heights)), key=lambda n: heights[n])
    piles: list[tuple[float, list[int]]] = []  # the middle of each pile, and who is in it
    for n in order:
        middle, members = heights[n], [n]
        while piles and piles[-1][0] + gap * (len(piles[-1][1]) + len(members)) / 2 > middle:
            _, below = piles.pop()
            members = below + members
            middle = sum(heights[m] for m in members) / len(members)
        piles.append((middle, members))
    placed = list(heights)
    for middle, members in piles:
        for place, n in enumerate(members):
            placed[n] = middle + gap * (place - (len(members) - 1) / 2)
    return placed


# What was uploaded.


def bytes_by_part(task: Task) -> Block:
    """Bytes of a mean upload by what they are for, in kB and as a share."""
    sizes = {g.name: s for g in task.groups if (s := mean_upload(g.runs))}
    names = list(sizes)[::-1]
    found = []
    for share in (False, True):
        traces = []
        for part, (title, colour) in PARTS.items():
            shown = [sizes[name].get(part, 0.0) for name in names]
            whole = [sum(sizes[name].values()) for name in names]
            values = [100 * x / y if share else x / 1e3 for x, y in zip(shown, whole, strict=True)]
            if any(shown):
                traces.append(bar(names, values, title, colour, share))
        unit = "share of an upload, %" if share else "kB an upload"
        totals = [] if share else [total_label(n, sum(s.values()) / 1e3) for n, s in sizes.items()]
        most = 1.15 * max((sum(s.values()) / 1e3 for s in sizes.values()), default=1)
        x = {"title": unit, "range": [0, 100 if share else most]}
        found.append(
            chart(traces, x, {"automargin": True, "showgrid": False}, barmode="stack",
                  annotations=totals, legend=True, height=150 + 34 * len(names))
        )  # fmt: skip
    note = "A client's mean upload over all rounds. The shared mask is paid for once."
    return Block("Where the bytes go", note, [View("", found)] if sizes else [], wide=True)


def mean_upload(runs: Sequence[Shown]) -> dict[str, float]:
    """Bytes of a mean upload, by part."""
    lines = [line for run in runs for line in run.uploads]
    uploads = sum(line.get("uploads", 0) for line in lines)
    if not uploads:
        return {}
    return {part: sum(line["bytes"].get(part, 0) for line in lines) / uploads for part in PARTS}


def bar(names: list[str], values: list[float], title: str, colour: str, share: bool) -> Chart:
    """One part's bars."""
    unit = "%" if share else "kB"
    return {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "x": values,
        "name": title,
        "marker": {"color": colour},
        "hovertemplate": f"{title}: %{{x:.2f}} {unit}<extra>%{{y}}</extra>",
    }


def total_label(name: str, kilobytes: float) -> Chart:
    """A bar's length in figures."""
    return {
        "x": kilobytes,
        "y": name,
        "text": f" {kilobytes:.2f}",
        "xanchor": "left",
        "showarrow": False,
    }


def overlap(task: Task) -> Block:
    """How alike two clients' masks are, and how much they cover together."""
    alike, cover, chances = [], [], set()
    for group in task.groups:
        lines = [line for line in group.first.uploads if line.get("masks")]
        for roles in dict.fromkeys(roles for line in lines for roles in line["masks"]):
            known = [(line["round"], line["masks"].get(roles)) for line in lines]
            xs = [n for n, mask in known if mask]
            masks = [mask for _, mask in known if mask]
            said = f"{'mask' if len(roles) > 1 else 'mask of Δ' + roles.upper()}: %{{y:.2%}}"
            dash = {} if len(roles) > 1 else {"line": role_line(group, roles)}
            alike.append(line(group, xs, [m["overlap"] for m in masks], said, **dash))
            cover.append(line(group, xs, [m["union"] for m in masks], said, **dash))
            d = group.first.summary.get("parameters")
            chances |= {round(m["kept"] / d, 4) for m in masks[:1] if d}
    if not alike:
        return Block("", "")
    y = {"title": "overlap of two clients' masks", "tickformat": ".0%", "rangemode": "tozero"}
    by_chance = [level(x, f"by chance {x:.2%}") for x in sorted(chances)]
    together = {**y, "title": "coordinates that any client sends"}
    charts = [
        chart(alike, {"title": "round"}, y, **joined(by_chance)),
        chart(cover, {"title": "round"}, together, **joined(by_chance, "one client ")),
    ]
    note = (
        "Left: the share of its coordinates that a client has in common with another, mean over all "
        "pairs. Right: what all clients together touch, which is what comes back down. A method "
        "with three masks has three lines: ΔW solid, ΔM dashed, ΔV dotted."
    )
    return Block("Do clients choose the same coordinates?", note, [View("", charts)], wide=True)


def role_line(group: Group, role: str) -> dict[str, Any]:
    """The line of one of three masks."""
    dash = {"w": "solid", "m": "dash", "v": "dot"}[role]
    return {"color": f"--c{group.colour}", "dash": dash, "width": 2}


def level(y: float, text: str) -> tuple[Chart, Chart]:
    """A thin line across the chart, and its name."""
    shape = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y,
             "line": {"color": "--muted", "width": 1, "dash": "dot"}}  # fmt: skip
    label = {"xref": "paper", "x": 1, "y": y, "text": text, "xanchor": "right",
             "yanchor": "bottom", "showarrow": False, "font": {"color": "--muted", "size": 11}}  # fmt: skip
    return shape, label


def joined(levels: Sequence[tuple[Chart, Chart]], before: str = "") -> dict[str, Any]:
    """Lines across a chart as parts of its layout."""
    labels = [
        {**label, "text": label["text"].replace("by chance ", before) if before else label["text"]}
        for _, label in levels
    ]
    return {"shapes": [shape for shape, _ in levels], "annotations": labels}


def pairs(task: Task) -> Block:
    """The overlap of each pair of clients, as a square."""
    views = []
    for group in task.groups:
        lines = [line for line in group.first.uploads if any(line.get("shared", {}).values())]
        for line in lines if len(task.groups) == 1 else lines[-1:]:
            name = f"round {line['round']}"
            views.append(
                View(name if len(task.groups) == 1 else f"{group.name}, {name}", [square(line)])
            )
    note = "The share of a client's coordinates that another one sends, too; at most 20 clients."
    return Block("Which clients are alike?", note, views[::-1] if len(task.groups) == 1 else views)


def square(line: Mapping[str, Any]) -> Chart:
    """One round's pairs."""
    roles = next(r for r in line["shared"])
    shared, clients = line["shared"][roles], [str(n) for n in line["clients"]]
    share = [
        [None if i == j else n / row[i] for j, n in enumerate(row)] for i, row in enumerate(shared)
    ]
    trace = {
        "type": "heatmap",
        "x": clients,
        "y": clients,
        "z": share,
        "colorscale": "sequential",
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"tickformat": ".0%"},
        "hovertemplate": "clients %{y} and %{x}: %{z:.2%}<extra></extra>",
    }
    axis = {"type": "category", "showgrid": False, "title": "client"}
    return chart([trace], axis, {**axis, "autorange": "reversed"})


def magnitudes(task: Task) -> Block:
    """The densities of log₁₀ |ΔW|, |ΔM| and |ΔV| in some rounds."""
    views = []
    for group in task.groups:
        lines = [line for line in group.first.uploads if any(line.get("magnitudes", {}).values())]
        if lines:
            views.append(View(group.name, [density(lines, role) for role in ("w", "m", "v")]))
    views = [View(v.name, [c for c in v.charts if c["data"]]) for v in views]
    note = (
        "The values that clients sent, all of a round together, in rounds 1, 2, 5, 10 and so on. "
        "A curve's area is the share of values that are not zero."
    )
    return Block("How large are the updates?", note, views, wide=True)


def density(lines: Sequence[Mapping[str, Any]], role: str) -> Chart:
    """One role's density, a line a round."""
    known = [(line["round"], line["magnitudes"][role]) for line in lines
             if sum(line["magnitudes"].get(role, ())[1:])]  # fmt: skip
    bins = [place for place in range(1, BINS + 1) if any(counts[place] for _, counts in known)]
    first, last = (bins[0] - 1, bins[-1] + 1) if bins else (0, 0)
    traces = []
    for number, (n, counts) in enumerate(known):
        inside = range(max(first, 1), min(last, BINS) + 1)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [round(LOWEST + (place - 0.5) / PER_DECADE, 3) for place in inside],
                "y": [PER_DECADE * counts[place] / sum(counts) for place in inside],
                "name": f"round {n}",
                "line": {"color": f"--s{shade(number, len(known))}", "width": 2, "shape": "spline"},
                "hovertemplate": f"10^%{{x:.1f}}: %{{y:.2f}}<extra>round {n}</extra>",
            }
        )
    name = PARTS[role][0]
    y = {"title": "density, a decade", "rangemode": "tozero"}
    return chart(traces, {"title": f"log₁₀ |{name}|"}, y, legend=True, height=300)


def shade(number: int, count: int) -> int:
    """One of the seven shades, the last for the last round.

    >>> [shade(n, 3) for n in range(3)]
    [0, 3, 6]
    """
    return 6 if count == 1 else round(6 * number / (count - 1))


def labels(task: Task) -> Block:
    """How many samples of each class each client has."""
    by_seed = {run.setting("seed"): run.labels for run in reversed(task.runs) if run.labels}
    seeds = sorted(by_seed, key=str)
    views = [View(f"seed {seed}", [data_chart(by_seed[seed])]) for seed in seeds]
    note = "Samples of each class on each client, and all of a client's on top."
    return Block("Who has which data?", note, views)


def data_chart(counts: Sequence[Sequence[int]]) -> Chart:
    """Samples by class and client, below the clients' totals."""
    clients = list(range(len(counts)))
    classes = list(range(len(counts[0])))
    cells = {
        "type": "heatmap",
        "x": clients,
        "y": classes,
        "z": [[row[c] for row in counts] for c in classes],
        "colorscale": "sequential",
        "xgap": 1 if len(clients) <= 100 else 0,
        "ygap": 1,
        "showscale": True,
        "colorbar": {"len": 0.78, "y": 0, "yanchor": "bottom"},
        "hovertemplate": "client %{x}, class %{y}: %{z:,} samples<extra></extra>",
    }
    totals = {
        "type": "bar",
        "x": clients,
        "y": [sum(row) for row in counts],
        "yaxis": "y2",
        "marker": {"color": "--muted"},
        "hovertemplate": "client %{x}: %{y:,} samples<extra></extra>",
    }
    y: dict[str, Any] = {"title": "class", "domain": [0, 0.78], "showgrid": False}
    if len(classes) <= 12:
        y["dtick"] = 1
    above = {"domain": [0.83, 1], "nticks": 3, "title": ""}
    x = {"title": "client", "showgrid": False}
    return chart([cells, totals], x, y, yaxis2=above, bargap=0.15)
