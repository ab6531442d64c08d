"""Causal language models: pretrained ones from disk or a hub, and a small random one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from socket import getaddrinfo
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fedsift.data.folder import data_folder
from fedsift.data.text import ALPHABET
from fedsift.errors import ConfigError, require_packages
from fedsift.llm.adapters import LoRA, add_adapters
from fedsift.seeding import torch_seed

TINY = "tiny"
"""The name of a random Llama with a million parameters, which reads characters."""
TINY_CONFIG: Mapping[str, Any] = {
    "vocab_size": len(ALPHABET),
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Its configuration; another one can be passed as a dict."""
CAUSAL = "fedsift_causal"
"""The name of attention without masks in the interface of Transformers."""


class CausalLM(nn.Module):
    """A causal language model that maps token ids to logits.

    ``model`` is a model of transformers, or one of peft around it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def has_adapters(self) -> bool:
        """Whether only adapters are trained."""
        return hasattr(self.model, "peft_config")

    @property
    def max_positions(self) -> int | None:
        """The length of the longest text that the model can read; None if it is not known."""
        config: Any = self.model.config
        return getattr(config, "max_position_embeddings", None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids ``(samples, positions)`` to logits ``(samples, positions, vocabulary)``."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def load_model(
    name: str | Path | Mapping[str, Any] = TINY,
    lora: LoRA | None = LoRA(),  # noqa: B008
    base_dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    seed: int = 0,
) -> CausalLM:
    """Load a causal language model, and add LoRA to it.

    Parameters
    ----------
    name
        A folder with a model of transformers, a GGUF file or a folder with one, the name of such a
        folder in the data folder, or the name of a model on a hub (``"owner/model"``). ``"tiny"``,
        or a dict with the configuration of a Llama, makes a small random model.
    lora
        The settings of the adapters. None trains all parameters.
    base_dtype
        The data type of the frozen parameters; ``torch.bfloat16`` halves their memory. Parameters
        that are trained are always float32.
    gradient_checkpointing
        Compute activations again in the backward pass, which saves memory and takes longer.
    seed
        Determines all random weights.

    """
    require_packages("language models", "transformers", extra="llm")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "language model"))
        base = random_llama(name) if is_random(name) else pretrained(model_source(str(name)))
        use_causal_attention(base)
        model = base if lora is None else add_adapters(base, lora)
    if gradient_checkpointing:
        enable_checkpointing(base)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else base_dtype)
    return CausalLM(model)


def enable_checkpointing(base: Any) -> None:
    """Let a model of transformers compute activations again in the backward pass."""
    with warnings.catch_warnings():  # the method gets another name in transformers 6
        warnings.simplefilter("ignore", FutureWarning)
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def is_random(name: str | Path | Mapping[str, Any]) -> bool:
    """Whether a model has random weights."""
    return isinstance(name, Mapping) or str(name) == TINY


def use_causal_attention(model: Any) -> None:
    """Let a model compute attention without masks, which blocks of text without padding allow.

    PyTorch's fastest attention takes no mask, and Transformers makes one in CUDA graphs.
    """
    import transformers

    transformers.AttentionInterface.register(CAUSAL, causal_attention)
    if getattr(model.config, "_attn_implementation", None) == "sdpa" and not has_windows(model):
        model.set_attn_implementation(CAUSAL)


def has_windows(model: Any) -> bool:
    """Whether tokens attend to a window of earlier tokens only, for which a model needs masks."""
    return getattr(model.config, "sliding_window", None) is not None


def causal_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend to all earlier tokens: a function for the interface of Transformers.

    >>> x = torch.randn(1, 2, 3, 4)
    >>> causal_attention(None, x, x, x, None)[0].shape
    torch.Size([1, 3, 2, 4])
    """
    mixed = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(1, 2).contiguous(), None


def random_llama(config: object) -> Any:
    """Return a random Llama with this configuration, or the tiny one."""
    import transformers

    values = config if isinstance(config, Mapping) else TINY_CONFIG
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))


def pretrained(source: Mapping[str, Any]) -> Any:
    """Load a pretrained model in float32."""
    import transformers

    return load_quietly(transformers.AutoModelForCausalLM, source, dtype=torch.float32)


def model_source(name: str) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for a model: a folder, a GGUF file or a hub name.

    >>> model_source("HuggingFaceTB/SmolLM2-135M-Instruct")
    {'pretrained_model_name_or_path': 'HuggingFaceTB/SmolLM2-135M-Instruct'}
    """
    path = Path(name).expanduser()
    if not path.exists():
        path = data_folder() / name
    if path.suffix == ".gguf" and path.is_file():
        return gguf_source(path)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if files and not (path / "config.json").exists():
            return gguf_source(files[0])
        return {"pretrained_model_name_or_path": str(path)}
    if "/" in name and not name.startswith((".", "/", "~")):
        return {"pretrained_model_name_or_path": name}
    raise ConfigError(
        f"there is no language model {name!r}: give a folder, a GGUF file, a name on a hub "
        f"(owner/model) or {TINY!r}"
    )


def gguf_source(path: Path) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for a GGUF file."""
    require_packages("language models", "gguf", extra="llm")
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def load_quietly(auto: Any, source: Mapping[str, Any], **given: Any) -> Any:
    """Call ``from_pretrained`` without progress bars; give errors in one line."""
    name = source["pretrained_model_name_or_path"]
    is_offline = not Path(name).exists() and not can_reach_hub()
    try:
        with redirect_stderr(StringIO()):
            return auto.from_pretrained(**source, **given, local_files_only=is_offline)
    except (OSError, ValueError, ImportError, SafetensorError) as problem:
        reason = next(iter(str(problem).strip().splitlines()), "")
        if is_offline:
            reason = "the hub cannot be reached, and its cache on this machine lacks the model"
        raise ConfigError(f"cannot load the language model {name!r}: {reason}") from None


def can_reach_hub() -> bool:
    """Whether the hub's address is known here, without which it would be tried for half a minute.

    Behind a proxy only the proxy knows, so the answer is yes.
    """
    from huggingface_hub.constants import ENDPOINT

    address = urlsplit(ENDPOINT)
    if getproxies().keys() & {address.scheme, "all"}:
        return True
    try:
        getaddrinfo(address.hostname, address.port or address.scheme)
    except OSError:
        return False
    return True
