"""Models that one batch of all clients would compute wrongly run in another way."""

import pytest
import torch
from stacked_models import (
    CLIENTS,
    TOKENS,
    WORDS,
    Embedded,
    Logits,
    after_two_rounds,
    assert_same,
    federation,
    llama,
    lora_on,
    text,
    way_of,
)
from torch import nn
from torch.nn import functional

from fedsift.engine import Stacked

BY_VMAP = "all clients at once, by torch.vmap"


class Mixing(nn.Module):
    """Adds the mean over the batch, so a sample's output depends on the others."""

    def forward(self, x):
        return x + x.mean(0, keepdim=True)


class SlightlyMixing(nn.Module):
    """Adds a twentieth of the mean over the batch."""

    def forward(self, x):
        return x + x.mean(0, keepdim=True) / 20


class MixingInTraining(Mixing):
    """Mixes samples in training mode only, as ghost batches or mixup would."""

    def forward(self, x):
        return super().forward(x) if self.training else x


class Direct(nn.Module):
    """Uses the parameters of another module, which does not run."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        return x + x @ self.inner.weight + self.inner.bias


class SequenceFirst(nn.Module):
    """Turns the samples to the second axis for its inner layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("layer", [Mixing, SlightlyMixing, MixingInTraining, Direct, SequenceFirst])
def test_models_that_would_be_computed_wrongly_run_in_another_way(layer):
    torch.manual_seed(0)
    fed = federation(Embedded(layer()), *text())
    engine = assert_same(fed, BY_VMAP)
    (step,) = engine.steps.values()
    assert "all clients in one batch" in dict(step.chosen.refused)


def test_a_layer_that_mixes_samples_within_units_is_noticed():
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(4, 4),
        nn.BatchNorm1d(4, affine=False, track_running_stats=False),
        nn.Linear(4, 3),
    )
    x, y = torch.randn(CLIENTS, 6, 4), torch.randint(0, 3, (CLIENTS, 6))
    fed = federation(model, x, y, functional.cross_entropy)
    engine = Stacked(fed.task, fed.algorithm)
    after_two_rounds(fed, engine)
    assert way_of(engine) != "all clients in one batch"


def test_a_module_that_only_looks_like_one_of_llama_runs_as_it_is():
    model = llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = type("SiLU", (nn.Tanh,), {})()
    fed = federation(Logits(lora_on(model)), *text())
    engine = assert_same(fed)
    (step,) = engine.steps.values()
    assert step.gradients.rewritten == []
    assert "; without faster forms of its layers: " in step.line


class Twice(nn.Module):
    """One layer that two others share, as T5's encoder and decoder share their embedding."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.first = nn.Sequential(self.inner, nn.GELU())
        self.second = nn.Sequential(self.inner, nn.Tanh())

    def forward(self, x):
        return self.second(self.first(x))


def test_a_layer_with_two_parents_is_one_unit():
    torch.manual_seed(0)
    fed = federation(Embedded(Twice()), *text())
    assert_same(fed)
    assert not any("forward" in module.__dict__ for module in fed.task.model.modules())


def test_the_encoder_and_decoder_of_t5():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    x, y = text()
    inputs = {"input_ids": x, "decoder_input_ids": x}
    fed = federation(
        transformers.T5ForConditionalGeneration(config), inputs, y,
        lambda found, y: functional.cross_entropy(found.logits.flatten(0, 1), y.flatten()),
    )  # fmt: skip
    assert_same(fed, BY_VMAP, tolerance=1e-4)  # its positions have no axis of samples


class GatedUnit(nn.Module):
    """It looks like the MLP of Llama, and has a parameter of its own."""

    def __init__(self):
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(self, name, nn.Linear(32, 32, bias=False))
        self.act_fn, self.scale = nn.SiLU(), nn.Parameter(torch.full((32,), 0.5))

    def forward(self, x):
        return self.scale * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_a_unit_may_look_like_a_layer_that_has_a_faster_form():
    torch.manual_seed(0)
    fed = federation(Embedded(GatedUnit()), *text())
    assert_same(fed)
    assert not any("forward" in module.__dict__ for module in fed.task.model.modules())


class PositionalCausal(nn.Module):
    """Causal attention whose arguments have no names."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, device=x.device)
        return self.attention(x, x, x, None, False, mask, True, True)[0]


def test_attention_may_be_causal_by_position():
    torch.manual_seed(0)
    assert_same(federation(Embedded(PositionalCausal()), *text()))


def test_ignored_labels_do_not_count_in_the_mean():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, 4, 6, generator=draw)
    y = torch.randint(0, 5, (CLIENTS, 4), generator=draw)
    y[:, :3] = -100
    y[0, 1] = 2
    model = nn.Sequential(nn.Linear(6, 8), nn.ELU(), nn.Linear(8, 5))
    assert_same(federation(model, x, y, functional.cross_entropy))
