"""Texts by author: speeches by president, plays by role, and folders with one text per client.

``sotu`` are the State of the Union addresses: one JSON file per speech, with its year, the name of
the president and the text. ``shakespeare`` are the plays: one text file per play, in which the name
of the role precedes each speech on a line of its own. Both are read from the data folder.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from fedsift.data.folder import data_folder
from fedsift.data.text import digest_of_texts
from fedsift.task.user_code import TEXT_FOLDER as FOLDER

Documents = Mapping[str, tuple[str, ...]]
"""The texts of each author, by the author's name."""
MIN_SPEECHES = 5
"""Roles with fewer speeches are left out; headings that look like roles are among them."""
ROLE = re.compile(
    r"\n[ \t]*\n[ \t]*(?!ACT\b|SCENE\b|EPILOGUE\b|PROLOGUE\b|[IVXL]+\b)"
    r"(?:([A-Z][A-Za-z' ]{0,30})\.|([A-Z][A-Z' ]{1,30}))[ \t]*\n"
)
"""A role on a line of its own after an empty line: ``HAMLET``, ``Ham.`` or ``LADY MACBETH.``"""
DIRECTION = re.compile(r"[ \t]*\[[^\]]*\]|_|^[ \t]+|[ \t]+$", re.MULTILINE)
"""What is removed from speeches: directions for the stage, marks of italics, indentation."""


def read_sotu(folder: Path) -> Documents:
    """Read the speeches of each president, from the earliest to the latest."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        speech = json.loads(path.read_text(encoding="utf-8"))
        found[str(speech["name"])].append(str(speech["text"]))
    return {name: tuple(texts) for name, texts in found.items()}


def read_plays(folder: Path) -> Documents:
    """Read what each role says in each play, as one text per role."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(folder.glob("*.txt")):
        speeches = speeches_by_role(path.read_text(encoding="utf-8", errors="replace"))
        play = path.stem.removesuffix("_gut")
        for role, said in speeches.items():
            if len(said) >= MIN_SPEECHES:
                found[f"{play}/{role}"] = ("\n\n".join(said),)
    return found


def speeches_by_role(text: str) -> dict[str, list[str]]:
    r"""Return the speeches of each role of a play.

    >>> speeches_by_role("\n\nACT I.\n\nHAM.\nTo be, [Aside]\n  or not.\n\nOphelia.\nMy lord!\n")
    {'HAM': ['To be,\nor not.'], 'OPHELIA': ['My lord!']}
    """
    found: dict[str, list[str]] = defaultdict(list)
    _, *parts = ROLE.split(text)
    for name, capitals, said in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if speech := DIRECTION.sub("", said).strip():
            found[(name or capitals).upper()].append(speech)
    return dict(found)


def read_folder(folder: Path) -> Documents:
    """Read a folder with one text file per client."""
    paths = sorted(path for path in folder.glob("*.txt") if path.is_file())
    return {path.stem: (path.read_text(encoding="utf-8", errors="replace"),) for path in paths}


AUTHORS: dict[str, Callable[[Path], Documents]] = {"sotu": read_sotu, "shakespeare": read_plays}
"""The functions that read the texts of a data set, by its command-line name."""


def is_text(dataset: str) -> bool:
    """Whether a data set is text by author, which needs a language model.

    >>> [is_text(name) for name in ("sotu", "folder:notes", "digits")]
    [True, True, False]
    """
    return dataset in AUTHORS or dataset.startswith(FOLDER)


def read_authors(dataset: str) -> Documents:
    """Read the texts of each author of a data set; refuse one without texts."""
    path, read = data_folder() / dataset, AUTHORS.get(dataset, read_folder)
    if dataset.startswith(FOLDER):
        path = Path(dataset.removeprefix(FOLDER)).expanduser()
    elif dataset not in AUTHORS:
        raise ValueError(
            f"unknown text {dataset!r}; choose one of: {', '.join(AUTHORS)}, or {FOLDER}PATH for a "
            "folder with one .txt file per client"
        )
    if found := read(path):
        return found
    raise ValueError(f"there are no texts in {path}; the guide to language models describes them")


@cache
def digest_of_authors(dataset: str) -> str:
    """Return the SHA-256 of the names and texts of all authors."""
    return digest_of_texts((name, *texts) for name, texts in sorted(read_authors(dataset).items()))
