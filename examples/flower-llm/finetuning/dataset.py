"""The text of one site."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsift import llm
from fedsift.data.text import stdlib_documents


def load_text(
    config: Mapping[str, Any], node: Mapping[str, Any], partition: int, partitions: int
) -> llm.TextClients:
    """Return the blocks of a site's text: of the files in its folder, or of some of Python's code.

    A SuperNode names its folder in its node config: ``text="/path/to/texts"``.
    """
    texts: Sequence[str] = [d.text for d in stdlib_documents()[partition::partitions]][:3]
    if "text" in node:
        files = sorted(Path(node["text"]).glob("*.txt"))
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    streams = llm.tokenize({"site": tuple(texts)}, llm.load_tokenizer(config["model"]))
    return streams.split(1, config["block-length"])
