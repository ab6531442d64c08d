"""Prepares docstrings for the site: doctests become code blocks, Sphinx roles become plain code."""

import re
from typing import Any

import griffe

BARE_DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> ).+\n?)*)+", re.MULTILINE)
ROLE = re.compile(r":(?:class|func|meth|mod):`([^`]+)`")


class Readable(griffe.Extension):
    """A griffe extension; the docstrings in the source stay as they are."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one object's docstring."""
        if obj.docstring:
            obj.docstring.value = readable(obj.docstring.value)


def readable(text: str) -> str:
    """A docstring as Markdown."""
    text = ROLE.sub(r"`\1`", text)
    if "Examples\n---" in text:
        return text  # the numpy style knows what to do
    return BARE_DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text).rstrip()
