"""The settings of language models: which model, which adapters, and how the text is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fedsift.data.authors import is_text
from fedsift.errors import ConfigError
from fedsift.llm import CausalLM, LoRA, load_model
from fedsift.task.user_code import LANGUAGE_MODEL, is_user_code

if TYPE_CHECKING:
    from fedsift.runs.config import RunConfig

LANGUAGE_SETTINGS = (
    "lora_rank", "lora_alpha", "lora_targets", "lora_dropout", "block_length",
    "gradient_checkpointing",
)  # fmt: skip
"""Fields of a configuration that only apply to language models."""


def is_language_model(model: str) -> bool:
    """Whether a model is a language model.

    >>> is_language_model("llm:tiny"), is_language_model("cnn")
    (True, False)
    """
    return model.startswith(LANGUAGE_MODEL)


def check_language_settings(config: RunConfig) -> None:
    """Refuse text without a language model, and settings that do not apply or are out of range."""
    if not is_language_model(config.model):
        if is_text(config.dataset):
            raise ConfigError(
                f"the text {config.dataset} needs a language model: --model llm:PATH, or llm:tiny"
            )
        refuse_changed(config, LANGUAGE_SETTINGS, "language models (--model llm:PATH)")
        return
    if is_user_code(config.dataset):
        refuse_changed(config, ("block_length",), "text by author, and not to own data")
    elif not is_text(config.dataset):
        raise ConfigError(
            f"the language model {config.model} needs text: --dataset sotu, shakespeare or "
            "folder:PATH, or --data package.module:function"
        )
    if config.block_length < 1:
        raise ConfigError(f"block-length must be at least 1, got {config.block_length}")
    if config.lora_rank < 0:
        raise ConfigError(f"lora-rank must be at least 0, got {config.lora_rank}")
    lora_of(config)


def refuse_changed(config: RunConfig, names: tuple[str, ...], what: str) -> None:
    """Refuse settings that were given although they only apply to something else."""
    for name in names:
        if getattr(config, name) != config.__dataclass_fields__[name].default:
            raise ConfigError(f"{name.replace('_', '-')} only applies to {what}")


def lora_of(config: RunConfig) -> LoRA | None:
    """Return the settings of LoRA; None if the whole model is trained."""
    if config.lora_rank == 0:
        return None
    names = [name.strip() for name in config.lora_targets.split(",")]
    targets: Any = names[0] if len(names) == 1 and names[0] == "all-linear" else names
    return LoRA(config.lora_rank, config.lora_alpha, targets, config.lora_dropout)


def model_name(config: RunConfig) -> str:
    """Return the name of the language model, as :func:`fedsift.llm.load_model` takes it."""
    return config.model.removeprefix(LANGUAGE_MODEL)


def language_model(config: RunConfig) -> CausalLM:
    """Load the language model, with its adapters.

    On a GPU with ``precision = "bf16"``, frozen parameters are stored in bfloat16.
    """
    is_half = config.precision == "bf16" and config.torch_device() == "cuda"
    model = load_model(
        model_name(config),
        lora_of(config),
        torch.bfloat16 if is_half else torch.float32,
        config.gradient_checkpointing,
        config.seed,
    )
    longest = model.max_positions
    if is_text(config.dataset) and longest is not None and config.block_length > longest:
        raise ConfigError(
            f"block-length must be at most {longest}, the positions of {config.model}, "
            f"got {config.block_length}"
        )
    return model
