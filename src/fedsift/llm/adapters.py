"""LoRA: small trainable matrices next to the frozen ones of a model.

E. J. Hu, Y. Shen, P. Wallis, Z. Allen-Zhu, Y. Li, S. Wang, L. Wang and W. Chen, "LoRA: Low-Rank
Adaptation of Large Language Models", ICLR 2022.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from fedsift.errors import ConfigError, require_packages
from fedsift.vector import copy_sharing_frozen

ALL_LINEAR = "all-linear"
"""The targets of LoRA by default: every linear layer but the output layer."""


@dataclass(frozen=True)
class LoRA:
    """The settings of LoRA, as in ``peft.LoraConfig``.

    ``targets`` are the names of the layers that get adapters, such as ``["q_proj", "v_proj"]``, or
    ``"all-linear"``. The adapters' product is multiplied by ``alpha / rank``.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str | Sequence[str] = ALL_LINEAR
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"the rank of LoRA must be at least 1, got {self.rank}")
        if not self.alpha > 0:
            raise ConfigError(f"alpha of LoRA must be positive, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"the dropout of LoRA must be in [0, 1), got {self.dropout}")


def add_adapters(base: Any, lora: LoRA) -> Any:
    """Freeze a model of transformers, and add adapters of float32 to it."""
    require_packages("language models", "peft", extra="llm")
    import peft

    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        lora_dropout=lora.dropout,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():  # of what peft uses of transformers
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(base, config)
    except ValueError as problem:
        raise ConfigError(f"LoRA cannot be added: {str(problem).splitlines()[0]}") from None


class HasWeights(Protocol):
    """A result of :func:`fedsift.simulate`, or anything else that can set a model's weights."""

    @property
    def load_into(self) -> Callable[[nn.Module], None]:
        """Set a model's weights to the trained ones."""
        ...


def save_adapter(result: HasWeights, model: nn.Module, folder: str | Path) -> Path:
    """Write the trained adapters to a folder that ``peft.PeftModel.from_pretrained`` loads.

    ``model`` is the one that was passed to :func:`fedsift.simulate`, and remains unchanged. Without
    LoRA, the whole model is written, for ``transformers.AutoModelForCausalLM.from_pretrained``.
    """
    trained = copy_sharing_frozen(model)
    result.load_into(trained)
    return write_adapter(trained, folder)


def write_adapter(model: nn.Module, folder: str | Path) -> Path:
    """Write the adapters of a model, or the whole model without LoRA, to a folder."""
    inner: Any = getattr(model, "model", model)
    if not hasattr(inner, "save_pretrained"):
        raise ConfigError(
            "only models of fedsift.llm.load_model, transformers and peft have adapters"
        )
    folder = Path(folder)
    with warnings.catch_warnings():  # peft looks for a file that GGUF models do not have
        warnings.filterwarnings("ignore", "Could not find a config file", UserWarning)
        inner.save_pretrained(folder)
    return folder
