"""The language model, with adapters."""

from collections.abc import Mapping
from typing import Any

from fedsift import llm


def make_model(config: Mapping[str, Any]) -> llm.CausalLM:
    """Return the model that the run config names; its frozen part is the same everywhere."""
    return llm.load_model(config["model"], llm.LoRA(rank=config["rank"]))
