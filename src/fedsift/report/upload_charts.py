"""Charts of the uploads and the clients' data: bytes by part, masks, magnitudes, labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedsift.report.charts import Chart, FigureBlock, View, chart, curve, escaped
from fedsift.report.collect import ReportedRun
from fedsift.report.comparisons import Comparison
from fedsift.report.curves import rounds_axis
from fedsift.report.groups import SeedGroup

PARTS = {
    "w": ("ΔW", "--w"),
    "m": ("ΔM", "--m"),
    "v": ("ΔV", "--v"),
    "c": ("ΔC", "--c"),
    "p": ("payload", "--p"),
    "b": ("buffers", "--b"),
    "mask": ("mask", "--mask"),
    "header": ("header", "--header"),
}
"""Parts of a message: name and color."""
PATTERNS = {"m": "/", "v": "x", "c": ".", "p": "-", "b": "|", "mask": "\\"}
"""The patterns of the parts' bars, so that they can be told apart in black and white."""


def bytes_by_part(comparison: Comparison) -> FigureBlock:
    """Return the chart of a mean upload's bytes by part, in kB and as a share."""
    sizes = {escaped(g.name): s for g in comparison.groups if (s := mean_upload(g.runs))}
    names = list(sizes)[::-1]
    charts = []
    for share in (False, True):
        traces = []
        for part in PARTS:
            shown = [sizes[name].get(part, 0.0) for name in names]
            whole = [sum(sizes[name].values()) for name in names]
            values = [100 * x / y if share else x / 1e3 for x, y in zip(shown, whole, strict=True)]
            if any(shown):
                traces.append(part_bars(names, values, part, share))
        unit = "share of an upload, %" if share else "kB per upload"
        totals = [] if share else [total_label(n, sum(s.values()) / 1e3) for n, s in sizes.items()]
        most = 1.15 * max((sum(s.values()) / 1e3 for s in sizes.values()), default=1)
        x = {"title": unit, "range": [0, 100 if share else most]}
        charts.append(
            chart(traces, x, {"showgrid": False, "ticks": "outside", "ticklen": 4}, barmode="stack",
                  annotations=totals, height=70 + 34 * len(names))
        )  # fmt: skip
    note = "The mean upload of a client over all rounds. A shared mask is sent only once."
    legend = [
        (*pair, PATTERNS.get(part, ""))
        for part, pair in PARTS.items()
        if any(s.get(part) for s in sizes.values())
    ]
    return FigureBlock(
        "Where the bytes go", note, [View("", charts, legend)] if sizes else [], True, "bytes"
    )


def mean_upload(runs: Sequence[ReportedRun]) -> dict[str, float]:
    """Return the bytes of a mean upload, by part."""
    lines = [line for run in runs for line in run.uploads]
    uploads = sum(line.get("uploads", 0) for line in lines)
    if not uploads:
        return {}
    return {part: sum(line["bytes"].get(part, 0) for line in lines) / uploads for part in PARTS}


def part_bars(names: list[str], values: list[float], part: str, share: bool) -> Chart:
    """Return the bars of one part."""
    unit, (title, color) = "%" if share else "kB", PARTS[part]
    pattern = {"shape": PATTERNS.get(part, ""), "fgcolor": "--card", "size": 6, "solidity": 0.18}
    return {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "x": values,
        "name": title,
        "marker": {"color": color, "pattern": {**pattern, "fillmode": "overlay"}},
        "hovertemplate": f"{title}: %{{x:.2f}} {unit}<extra>%{{y}}</extra>",
    }


def total_label(name: str, kilobytes: float) -> Chart:
    """Return the label of a bar with its total."""
    return {
        "x": kilobytes,
        "y": name,
        "text": f" {kilobytes:.2f}",
        "xanchor": "left",
        "showarrow": False,
    }


def overlap(comparison: Comparison) -> FigureBlock:
    """Return the charts of the overlap of two clients' masks, and of their union."""
    overlaps, cover, chances = [], [], set()
    for group in reversed(comparison.groups):
        lines = [line for line in group.first.uploads if line.get("masks")]
        for roles in dict.fromkeys(roles for line in lines for roles in line["masks"]):
            known = [(line["round"], line["masks"].get(roles)) for line in lines]
            xs = [n for n, mask in known if mask]
            masks = [mask for _, mask in known if mask]
            hover = f"{'mask' if len(roles) > 1 else 'mask of Δ' + roles.upper()}: %{{y:.2%}}"
            dash = {} if len(roles) > 1 else role_look(group, roles)
            overlaps.append(curve(group, xs, [m["overlap"] for m in masks], hover, **dash))
            cover.append(curve(group, xs, [m["union"] for m in masks], hover, **dash))
            d = group.first.summary.get("parameters")
            chances |= {round(m["kept"] / d, 4) for m in masks[:1] if d}
    if not overlaps:
        return FigureBlock("", "")
    y = {"title": "overlap of two clients' masks", "tickformat": ".0%", "rangemode": "tozero"}
    union = {**y, "title": "coordinates that at least one client sends"}
    charts = [
        chart(overlaps, rounds_axis(comparison.groups), y, **levels(chances, "by chance")),
        chart(cover, rounds_axis(comparison.groups), union, **levels(chances, "one client")),
    ]
    note = (
        "Left: the share of a client's coordinates that another client also sends, mean over all "
        "pairs. Right: the union of all clients' coordinates, which the server sends back."
    )
    if any("of Δ" in trace["hovertemplate"] for trace in overlaps):
        note += " Methods with separate masks for ΔW, ΔM and ΔV: solid, dashed, dotted."
    return FigureBlock(
        "Do clients choose the same coordinates?", note, [View("", charts)], True, "masks"
    )


def role_look(group: SeedGroup, role: str) -> dict[str, Any]:
    """Return the name and the line style of one of three masks."""
    dash = {"w": "solid", "m": "dash", "v": "dot", "c": "dashdot"}[role]
    line = {"color": f"--c{group.color}", "dash": dash, "width": 2}
    return {"name": f"{escaped(group.name)}, {PARTS[role][0]}", "line": line}


def level_mark(y: float, text: str) -> tuple[Chart, Chart]:
    """Return a thin horizontal line, and its label."""
    shape = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": y,
        "y1": y,
        "line": {"color": "--muted", "width": 1, "dash": "dot"},
    }
    label = {
        "xref": "paper",
        "x": 1,
        "y": y,
        "text": text,
        "xanchor": "right",
        "yanchor": "top",
        "showarrow": False,
        "font": {"color": "--muted", "size": 11},
    }
    return shape, label


def levels(heights: Iterable[float], what: str) -> dict[str, Any]:
    """Return horizontal lines as parts of a chart's layout."""
    made = [level_mark(y, f"{what} {y:.2%}") for y in sorted(heights)]
    return {"shapes": [shape for shape, _ in made], "annotations": [label for _, label in made]}


def pairs(comparison: Comparison) -> FigureBlock:
    """Return the charts of the overlap of each pair of clients."""
    views = []
    for group in comparison.groups:
        lines = [line for line in group.first.uploads if any(line.get("shared", {}).values())]
        for line in lines if len(comparison.groups) == 1 else lines[-1:]:
            name = f"round {line['round']}"
            views.append(
                View(
                    name if len(comparison.groups) == 1 else f"{group.name}, {name}",
                    [pairs_chart(line)],
                )
            )
    note = "The share of a client's coordinates that another client also sends; at most 20 clients."
    return FigureBlock(
        "Which clients are similar?",
        note,
        views[::-1] if len(comparison.groups) == 1 else views,
        file="similarity",
    )


def pairs_chart(line: Mapping[str, Any]) -> Chart:
    """Return the chart of one round's pairs."""
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
        **color_range(share),
        "colorscale": "sequential",
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"tickformat": ".0%"},
        "hovertemplate": "clients %{y} and %{x}: %{z:.2%}<extra></extra>",
    }
    axis = {"type": "category", "showgrid": False, "title": "client"}
    return chart([trace], axis, {**axis, "autorange": "reversed"})


def color_range(cells: Sequence[Sequence[float | None]]) -> dict[str, float]:
    """Return a range from 0 if all cells have one value, for which the usual range has no limits.

    >>> color_range([[None, 0.0], [0.0, None]]), color_range([[0.2, 0.2]]), color_range([[1, 2]])
    ({'zmin': 0, 'zmax': 1}, {'zmin': 0, 'zmax': 0.2}, {})
    """
    values = {z for row in cells for z in row if z is not None}
    return {"zmin": 0, "zmax": max(values) or 1} if len(values) == 1 else {}


def magnitudes(comparison: Comparison) -> FigureBlock:
    """Return the charts of the densities of log₁₀ |ΔW|, |ΔM|, |ΔV| and others in some rounds."""
    views = []
    for group in comparison.groups:
        lines = [line for line in group.first.uploads if any(line.get("magnitudes", {}).values())]
        charts = [density(lines, role) for role in ("w", "m", "v", "c")]
        if drawn := [chart for chart in charts if chart["data"]]:
            shades = {f"round {n}": shade_of(n, lines) for n in (line["round"] for line in lines)}
            views.append(View(group.name, drawn, list(shades.items())))
    note = (
        "The values that all clients sent in rounds 1, 2, 5, 10 and so on. The area under a curve "
        "is the share of values that are not zero."
    )
    return FigureBlock("How large are the updates?", note, views, True, "magnitudes")


def density(lines: Sequence[Mapping[str, Any]], role: str) -> Chart:
    """Return the chart of one role's density, with one line per round."""
    known = [(line["round"], line["magnitudes"].get(role)) for line in lines]
    known = [(n, found) for n, found in known if found and any(found["counts"])]
    traces = []
    for n, found in known:
        counts, step = [0, *found["counts"], 0], found["step"]
        whole = sum(counts) + found["outside"]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [found["from"] + (place - 0.5) * step for place in range(len(counts))],
                "y": [count / whole / step for count in counts],
                "name": f"round {n}",
                "line": {"color": shade_of(n, lines), "width": 2},
                "hovertemplate": f"10^%{{x:.2f}}: %{{y:.2f}}<extra>round {n}</extra>",
            }
        )
    name = PARTS[role][0]
    y = {"title": "density per decade", "rangemode": "tozero"}
    return chart(traces, {"title": f"log₁₀ |{name}|"}, y, height=300)


def shade_of(n: int, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a round's color: one of seven shades, the darkest for the last round.

    >>> [shade_of(n, [{"round": 1}, {"round": 2}, {"round": 5}]) for n in (1, 2, 5)]
    ['--s0', '--s3', '--s6']
    """
    rounds = [line["round"] for line in lines]
    return f"--s{round(6 * rounds.index(n) / (len(rounds) - 1)) if len(rounds) > 1 else 6}"


def labels(comparison: Comparison) -> FigureBlock:
    """Return the charts of the number of samples of each class on each client."""
    splits: dict[tuple[str, int], Sequence[Sequence[int]]] = {}
    for run in comparison.runs:
        if run.labels:
            splits.setdefault((f"seed {run.setting('seed')}", len(run.labels)), run.labels)
    has_sizes = len({clients for _, clients in splits}) > 1
    views = [
        View(f"{seed}, {clients} clients" if has_sizes else seed, [data_chart(splits[key])])
        for key in sorted(splits)
        for seed, clients in [key]
    ]
    note = "Samples of each class on each client; the bars above are each client's total."
    return FigureBlock("How is the data distributed?", note, views, file="data")


def data_chart(counts: Sequence[Sequence[int]]) -> Chart:
    """Return the chart of samples by class and client, below the clients' totals."""
    clients = list(range(len(counts)))
    classes = list(range(len(counts[0])))
    by_class = [[row[c] for row in counts] for c in classes]
    cells = {
        "type": "heatmap",
        "x": clients,
        "y": classes,
        "z": by_class,
        **color_range(by_class),
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
