"""Turns LaTeX in the pages into MathML when the site is built, so that no script has to."""

import re
from typing import Any

from latex2mathml.converter import convert

CODE = re.compile(
    r"(^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL
)
FORMULA = re.compile(
    r"\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$])?)\$(?!\w)", re.DOTALL
)
NAME = re.compile(r"<mo>(?!ln|log)([A-Za-z]{2,})</mo>")  # operators have spaces around them
PLACE = "formula-{}-goes-here"
formulas: list[str] = []


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace each formula of a page by a placeholder that Markdown leaves alone."""
    formulas.clear()
    pieces = CODE.split(markdown)[:: CODE.groups + 1]
    codes = [found[0] for found in CODE.finditer(markdown)]
    shown = [FORMULA.sub(place, piece) for piece in pieces]
    return "".join(text + code for text, code in zip(shown, [*codes, ""], strict=True))


def place(found: re.Match[str]) -> str:
    """Convert a formula and return its placeholder."""
    latex, display = (found["block"], "block") if found["block"] else (found["inline"], "inline")
    # latex2mathml knows align*, which GitHub's renderer allows only outside of $$.
    latex = " ".join(latex.split()).replace("{aligned}", "{align*}")
    formulas.append(NAME.sub(r"<mi>\1</mi>", convert(latex, display=display)))
    return PLACE.format(len(formulas) - 1)


def on_page_content(html: str, **kwargs: Any) -> str:
    """Put the formulas in their places."""
    for number, formula in enumerate(formulas):
        html = html.replace(PLACE.format(number), formula, 1)
    return html
