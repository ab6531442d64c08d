"""Small models for the engine of a GPU, and federations that train them."""

from dataclasses import replace
from operator import itemgetter

import pytest
import torch
from torch import nn

from fedsift import algorithms
from fedsift.engine import Reference, Stacked
from fedsift.simulation import Options, prepare
from fedsift.task.losses import sequence_cross_entropy
from fedsift.task.samples import map_tree

CLIENTS, BATCH, TOKENS, WORDS = 3, 4, 8, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def federation(model, x, y, loss=sequence_cross_entropy, method=None, **options):
    wanted = {
        "batch_size": BATCH, "loss": loss, "seed": 0, "device": DEVICE, "participation": 1.0,
        "dropout": 0.0, "min_clients": 0, "wire": "count", **options,
    }  # fmt: skip
    clients = [(map_tree(itemgetter(n), x), y[n]) for n in range(CLIENTS)]
    method = method or algorithms.fedadam(local_steps=2, lr=1e-3)
    return prepare(model, clients, clients[0], method, Options(**wanted))


def text(samples=6):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (CLIENTS, samples, TOKENS + 1), generator=draw)
    return ids[..., :-1], ids[..., 1:]


def after_two_rounds(fed, engine):
    fed, engine = replace(fed, engine=engine), engine
    snapshot = fed.initial_snapshot()
    for _ in range(2):
        snapshot, _ = fed.run_round(snapshot)
    return snapshot.state


def way_of(engine):
    (way,) = {step.chosen.way.name for step in engine.steps.values()}
    return way


def assert_same(fed, way="all clients in one batch", tolerance=1e-5):
    """The stack reaches the reference's state, in the given way; return the engine."""
    engine = Stacked(fed.task, fed.algorithm)
    ours, theirs = after_two_rounds(fed, engine), after_two_rounds(fed, Reference(fed.task))
    assert way_of(engine) == way
    for x, y in zip(ours, theirs, strict=True):
        assert (x - y).norm() <= tolerance * y.norm()
    return engine


class Embedded(nn.Module):
    """Tokens to logits, with a layer between the embedding and the head."""

    def __init__(self, layer, is_tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(WORDS, 32), layer
        self.head = nn.Linear(32, WORDS, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)))


def encoder(**options):
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **options)


def llama(**settings):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": TOKENS,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **settings}))


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None):
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return found.logits


def lora_on(model, **settings):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    found = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", **settings)
    )
    for name, p in found.named_parameters():
        if "lora_B" in name:  # zeros at first, behind which a wrong gradient of A would hide
            nn.init.normal_(p, std=0.1)
    return found
