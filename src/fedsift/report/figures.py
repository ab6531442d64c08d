"""Draw the report's charts without a browser, as PNG and SVG."""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from fedsift.report.charts import HEIGHT, MOST_MARKERS, Chart, View
from fedsift.report.styles import light_colors

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CHARACTERS = 60
"""A longer name is cut, to leave room for the chart."""
DASHES: dict[str, Any] = {
    "solid": "-", "dash": (0, (5, 2)), "dot": (0, (1.2, 1.8)), "dashdot": (0, (6, 2, 1.2, 2)),
    "longdash": (0, (8, 3)),
}  # fmt: skip
MARKERS = {
    "circle": "o", "square": "s", "triangle-up": "^", "diamond": "D", "cross": "P",
    "triangle-down": "v", "star": "*", "x": "X", "pentagon": "p", "hexagon": "h",
}  # fmt: skip
"""matplotlib's names of the dashes and markers."""
STYLE: dict[str, Any] = {
    "axes.edgecolor": "0.6",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.25,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "svg.hashsalt": "fedsift",  # makes the file reproducible
    "text.parse_math": False,  # a $ in a name is a $
}


def draw_view(
    view: View, title: str, about: str = "", target: float | None = None
) -> dict[str, bytes]:
    """Return one view of a figure as a file, by suffix: png and svg."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    charts = view.charts
    style: Any = STYLE
    with mpl.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a font may lack characters of a name
        size = (6.4 if len(charts) == 1 else 4.2 * len(charts), height_of(charts))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(charts), squeeze=False)[0]
        for axes, chart in zip(panels, charts, strict=True):
            draw_chart(axes, chart, target if chart["layout"].get("target") else None)
        figure.suptitle(plain_text(title), fontsize=11, fontweight="bold")
        has_bars_above = "yaxis2" in charts[0]["layout"]
        place = 1.26 if has_bars_above else None
        panels[0].set_title(printable(about), fontsize=7, color="0.45", loc="left", y=place)
        draw_legend(figure)
        return {suffix: saved(figure, suffix) for suffix in ("png", "svg")}


def height_of(charts: Sequence[Chart]) -> float:
    """Return the height of a figure in inches."""
    pixels = [float(chart["layout"].get("height", HEIGHT)) for chart in charts]
    return max(2.4, max(pixels) / 80)


def saved(figure: Figure, suffix: str) -> bytes:
    """Return a figure as the contents of a file, the same for the same figure."""
    file = BytesIO()
    metadata = {"Date": None} if suffix == "svg" else {"Software": None}
    figure.savefig(file, format=suffix, metadata=metadata)
    return file.getvalue()


def draw_legend(figure: Figure) -> None:
    """Name everything that several lines or bars show, once, below the charts."""
    known: dict[str, Any] = {}
    for axes in figure.axes:
        named = list(zip(*axes.get_legend_handles_labels(), strict=True))
        for handle, name in named[::-1] if axes.lines else named:  # the best line is the last
            known.setdefault(name, handle)
    if len(known) > 1:
        width = figure.get_figwidth() * 13
        columns = max(1, min(len(known), int(width / (6 + max(map(len, known))))))
        figure.legend(
            list(known.values()), list(known), loc="outside lower center", ncols=columns, fontsize=8
        )


def draw_chart(axes: Axes, chart: Chart, target: float | None) -> None:
    """Draw a chart."""
    layout = chart["layout"]
    below: tuple[Any, Any] | None = None
    left: dict[str, float] = {}
    for trace in chart["data"]:
        if trace["type"] == "scatter":
            below = draw_line(axes, trace, below)
        elif trace["type"] == "heatmap":
            draw_heatmap(axes, trace)
        elif trace.get("yaxis") == "y2":
            draw_bars_above(axes, trace)
        else:
            draw_bars(axes, trace, left)
    for shape in layout.get("shapes", ()):
        axes.axhline(shape["y0"], color="0.5", linestyle=":", linewidth=1)
    if target is not None:
        axes.axhline(target, color="0.5", linestyle=":", linewidth=1)
        write_note(axes, 1, target, f"target {100 * target:g} %", is_right=True)
    for text in layout.get("annotations", ()):
        if text.get("name") != "end":  # the legend has the names
            write_note(
                axes, text["x"], text["y"], text["text"], is_right=text.get("xref") == "paper"
            )
    set_axis(axes, "x", layout["xaxis"])
    set_axis(axes, "y", layout["yaxis"])


def write_note(axes: Axes, x: Any, y: Any, text: str, is_right: bool) -> None:
    """Write a text into a chart, at the right end or to the right of a place."""
    transform = axes.get_yaxis_transform() if is_right else axes.transData
    side = "right" if is_right else "left"
    upright = "top" if is_right else "center"
    words = axes.text(x, y, plain_text(text), ha=side, va=upright, fontsize=7, transform=transform)
    words.set(color="0.4", in_layout=False)  # it is inside the chart


def draw_line(axes: Axes, trace: Chart, below: tuple[Any, Any] | None) -> tuple[Any, Any]:
    """Draw a line, or the band between it and the line before; return its values."""
    xs, ys = ([value_or_nan(x) for x in trace[key]] for key in ("x", "y"))
    if "fill" in trace and below is not None:
        color, opacity = trace["fillcolor"].split("/")
        axes.fill_between(xs, below[1], ys, color=rgb(color), alpha=float(opacity), linewidth=0)
    elif trace["line"]["width"]:
        points = [(x, y) for x, y in zip(xs, ys, strict=True) if not (is_nan(x) or is_nan(y))]
        axes.plot(
            *zip(*points, strict=True) if points else ((), ()), **line_style(trace, len(points))
        )
        for x, y, text in zip(xs, ys, trace.get("text", ()), strict=False):
            side = "left" if "right" in trace["textposition"] else "right"
            edge = "bottom" if "top" in trace["textposition"] else "top"
            label = axes.text(
                x, y, f" {plain_text(text)} ", ha=side, va=edge, fontsize=7, color="0.35"
            )
            label.set_in_layout(False)  # it is inside the chart
    return xs, ys


def line_style(trace: Chart, points: int) -> dict[str, Any]:
    """Return how to draw a line."""
    line, marker = trace["line"], trace.get("marker", {})
    return {
        "color": rgb(line["color"]),
        "linestyle": DASHES[line.get("dash", "solid")] if "lines" in trace["mode"] else "",
        "linewidth": 0.8 * line["width"],
        "marker": MARKERS.get(marker.get("symbol", ""), ""),
        "markersize": 4.5,
        "markevery": max(1, -(-points // MOST_MARKERS)),
        "label": plain_text(trace["name"]),
    }


def draw_bars(axes: Axes, trace: Chart, left: dict[str, float]) -> None:
    """Draw bars; horizontal ones are stacked, and ``left`` has where they begin."""
    name, _, opacity = trace["marker"]["color"].partition("/")
    color, label = rgb(name), plain_text(trace["name"])
    if trace.get("orientation") != "h":
        alpha = float(opacity or 1)
        axes.bar(trace["x"], trace["y"], color=color, alpha=alpha, label=label, width=0.6)
        return
    names = [plain_text(name) for name in trace["y"]]
    shape = trace["marker"]["pattern"]["shape"]
    begin = [left.get(name, 0.0) for name in names]
    axes.barh(
        names, trace["x"], left=begin, color=color, hatch=3 * shape, edgecolor="white", height=0.7,
        linewidth=0, label=label,
    )  # fmt: skip
    left.update({name: a + x for name, a, x in zip(names, begin, trace["x"], strict=True)})


def draw_bars_above(axes: Axes, trace: Chart) -> None:
    """Draw bars in a small chart above the others."""
    above = axes.inset_axes((0, 1.04, 1, 0.2), sharex=axes)
    places = [x + 0.5 for x in trace["x"]]  # as the cells of the map below
    above.bar(places, trace["y"], color=rgb(trace["marker"]["color"]), width=0.85)
    above.tick_params(labelbottom=False, labelsize=7)


def draw_heatmap(axes: Axes, trace: Chart) -> None:
    """Draw a map of colors, with its scale."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import PercentFormatter

    colors = LinearSegmentedColormap.from_list("sequential", [rgb(f"--h{n}") for n in range(5)])
    cells = [[value_or_nan(z) for z in row] for row in trace["z"]]
    image = axes.pcolormesh(
        cells,
        cmap=colors,
        edgecolors="white",
        linewidth=0.4,
        vmin=trace.get("zmin"),
        vmax=trace.get("zmax"),
    )
    scale = axes.figure.colorbar(image, ax=axes, shrink=0.8)
    if "%" in trace["colorbar"].get("tickformat", ""):
        scale.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for name, direction in (("x", axes.xaxis), ("y", axes.yaxis)):
        values = trace[name]
        step = max(1, len(values) // 10)
        direction.set_ticks([n + 0.5 for n in range(0, len(values), step)], values[::step])
    axes.grid(visible=False)


def set_axis(axes: Axes, which: str, about: Mapping[str, Any]) -> None:
    """Set the title, the range and the ticks of an axis."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    direction = getattr(axes, f"{which}axis")
    axes.set(**{f"{which}label": plain_text(about.get("title", ""))})
    if about.get("type") == "log":
        axes.set(**{f"{which}scale": "log"})
        low, high = (10**end for end in about["range"])
        ticks = zip(about["tickvals"], about["ticktext"], strict=True)
        inside = [(value, text) for value, text in ticks if low <= value <= high]
        direction.set_ticks([value for value, _ in inside], [text for _, text in inside])
        direction.set_ticks([], minor=True)
        axes.set(**{f"{which}lim": (low, high)})
    elif "range" in about:
        axes.set(**{f"{which}lim": tuple(about["range"])})
    elif about.get("rangemode") == "tozero":
        axes.set(**{f"{which}lim": (0, None)})
    form = about.get("tickformat", "")
    if form == ",d":
        direction.set_major_locator(MaxNLocator(integer=True))
    elif form:
        direction.set_major_formatter(PercentFormatter(1, int(form[1])))
    if about.get("showgrid") is False:
        direction.grid(visible=False)
    if about.get("autorange") == "reversed":
        direction.set_inverted(True)


def value_or_nan(x: Any) -> Any:
    """Return a value, or NaN if there is none."""
    return math.nan if x is None else x


def is_nan(x: Any) -> bool:
    """Whether a value is NaN; a name is not."""
    return isinstance(x, float) and math.isnan(x)


def rgb(name: str) -> str:
    """Return the color of a light page."""
    return light_colors()[name.partition("/")[0]]


def printable(text: str) -> str:
    """Return a text without control characters."""
    return "".join(character for character in text if character.isprintable())


def plain_text(text: str) -> str:
    """Return a text of a chart without plotly's escapes, and not too long.

    >>> plain_text("&lt;b&gt; %{x}"), plain_text(100 * "a") == 59 * "a" + "…"
    ('<b> %{x}', True)
    """
    text = printable(html.unescape(str(text)))
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
