"""Language models: fine-tune a pretrained one with LoRA on the texts of many authors.

- ``models.py``: causal language models from a folder, a GGUF file or a hub, or a small random one
- ``adapters.py``: LoRA, and adapters as files that ``peft`` loads
- ``tokens.py``: tokenizers
- ``blocks.py``: the tokens of each client as blocks for training, validation and testing

>>> import fedsift
>>> fedsift.llm.LoRA(rank=8)
LoRA(rank=8, alpha=32.0, targets='all-linear', dropout=0.0)
"""

from fedsift.llm.adapters import LoRA, save_adapter
from fedsift.llm.blocks import TextClients, TokenStreams, load_clients, tokenize
from fedsift.llm.models import TINY, CausalLM, load_model
from fedsift.llm.tokens import Tokenizer, load_tokenizer
from fedsift.task.losses import IGNORED, next_token_loss, perplexity

__all__ = [
    "IGNORED",
    "TINY",
    "CausalLM",
    "LoRA",
    "TextClients",
    "TokenStreams",
    "Tokenizer",
    "load_clients",
    "load_model",
    "load_tokenizer",
    "next_token_loss",
    "perplexity",
    "save_adapter",
    "tokenize",
]
