"""Write the tokens of the 20 longest texts of each task: what the runs need of the data.

    python reproduce/llm/prepare.py llm:smollm2-135m tokens/

The first argument names the language model, whose tokenizer is used. A file has about 2 MB.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from plan import CLIENTS, TASKS

from fedsift.data.authors import read_authors
from fedsift.llm import load_tokenizer, tokenize


def main(model: str, folder: str) -> None:
    """Tokenize and write each task."""
    tokenizer = load_tokenizer(model.removeprefix("llm:"))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        streams = tokenize(read_authors(task), tokenizer, CLIENTS)
        streams.save(Path(folder, f"{task}.safetensors"))
        sizes = [len(tokens) for tokens in streams.tokens]
        print(f"{task}: {sum(sizes):,} tokens, {sizes[0]:,} to {sizes[-1]:,} per client")


if __name__ == "__main__":
    main(*sys.argv[1:])
