"""Names, colors, dashes and markers, by which a reader tells the groups of a comparison apart.

A method has the same color and dash in every report. Within a comparison, each group also has a
marker of its own, so that figures can be read in black and white.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fedsift.algorithms import registered
from fedsift.report.groups import SeedGroup, all_settings, values_of

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MARKERS = {
    "circle": "M4 0A4 4 0 1 1 -4 0A4 4 0 1 1 4 0Z",
    "square": "M-3.5 -3.5H3.5V3.5H-3.5Z",
    "triangle-up": "M0 -4.5L4.2 3H-4.2Z",
    "diamond": "M0 -5L5 0L0 5L-5 0Z",
    "cross": "M-1.5 -4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z",
    "triangle-down": "M0 4.5L4.2 -3H-4.2Z",
    "star": "M0 -5L1.2 -1.6L4.8 -1.5L1.9 .6L3 4L0 2L-3 4L-1.9 .6L-4.8 -1.5L-1.2 -1.6Z",
    "x": "M0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0L-5 -3L-3 -5Z",
    "pentagon": "M0 -4.5L4.3 -1.4L2.6 3.6H-2.6L-4.3 -1.4Z",
    "hexagon": "M0 -4.5L3.9 -2.2V2.2L0 4.5L-3.9 2.2V-2.2Z",
}
"""The markers, by their names in plotly, and their outlines as SVG paths."""
STYLE_SHEET = Path(__file__).with_name("page.css")


@cache
def light_colors() -> dict[str, str]:
    """Return the colors of a light page, by the names of their CSS variables.

    >>> light_colors()["--c0"]
    '#0072b2'
    """
    light = STYLE_SHEET.read_text(encoding="utf-8").partition("@media")[0]
    return dict(re.findall(r"(--\w+): (#[0-9a-f]{6})", light))


@cache
def palette() -> tuple[str, ...]:
    """Return the colors for groups: ``--c0``, ``--c1`` and so on."""
    return tuple(color for name, color in light_colors().items() if re.fullmatch(r"--c\d+", name))


def name_groups(groups: Sequence[SeedGroup]) -> None:
    """Give each group a name, and a look that differs from the others'."""
    by_method: dict[str, list[SeedGroup]] = {}
    for group in groups:
        by_method.setdefault(group.first.algorithm, []).append(group)
    for place, (method, variants) in enumerate(by_method.items()):
        differing = [k for k in all_settings(variants) if len(values_of(variants, k)) > 1]
        color, dash = style_of(method, place)
        for number, group in enumerate(variants):
            group.name = name_of(group, differing)
            if len(by_method) == 1:  # variants of one method differ in color
                group.color = (color + number) % len(palette())
            else:
                group.color = color
                group.dash = dash if len(variants) == 1 else DASHES[number % len(DASHES)]
    for number, group in enumerate(groups):
        group.marker = list(MARKERS)[number % len(MARKERS)]


def name_of(group: SeedGroup, differing: Sequence[str]) -> str:
    """Return a group's method, with the settings in which it differs from others of the method."""
    settings = [
        f"{key.replace('_', '-')} {value}"
        for key in differing
        if (value := group.first.setting(key)) is not None
    ]
    return " · ".join([group.first.algorithm, *settings])


def style_of(method: str, place: int) -> tuple[int, str]:
    """Return a method's place in the palette and its dash: the same in every report.

    A method without its own color gets one by its position among the methods of the report.

    >>> style_of("fedadam-ssm", 5), style_of("efficient-adam", 5), style_of("unknown", 5)
    ((0, 'solid'), (4, 'dash'), (5, 'longdash'))
    """
    known = registered(method)
    if known is None or known.color is None:
        return place % len(palette()), "longdash"
    return nearest_in_palette(known.color), "dash" if known.dashed else "solid"


def nearest_in_palette(color: str) -> int:
    """Return the place of the palette's color that is nearest to a given one.

    >>> nearest_in_palette("#d55e00"), nearest_in_palette("#ff0000")
    (1, 1)
    """
    wanted, *others = (bytes.fromhex(c.removeprefix("#")) for c in (color, *palette()))
    distances = [math.dist(wanted, each) for each in others]
    return distances.index(min(distances))
