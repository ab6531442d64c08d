"""All clients' samples in one batch: the same training as one client after another."""

import pytest
import torch
from stacked_models import (
    BATCH,
    CLIENTS,
    DEVICE,
    TOKENS,
    WORDS,
    Embedded,
    Logits,
    after_two_rounds,
    assert_same,
    encoder,
    federation,
    llama,
    lora_on,
    text,
    way_of,
)
from torch import nn
from torch.nn import functional

from fedsift.engine import Reference, Stacked
from fedsift.engine.gpu.one_batch.gradients import OneBatchGradients
from fedsift.engine.gpu.one_batch.rewrites import is_gated, is_rotary_attention


class Positions(nn.Module):
    """Learned positions: parameters of no known layer, looked up for one sample."""

    def __init__(self):
        super().__init__()
        self.places, self.scale = nn.Embedding(TOKENS, 32), nn.Parameter(torch.ones(32))

    def forward(self, x):
        return x * self.scale + self.places(torch.arange(TOKENS, device=x.device)[None])


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.LayerNorm(32),
        lambda: nn.RMSNorm(32, eps=1e-6),
        lambda: nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 32)),
        encoder,
        lambda: encoder(norm_first=True),
        Positions,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_train_each_client_with_its_own_parameters(layer, dtype):
    torch.manual_seed(0)
    model = Embedded(layer()).to(dtype)
    assert_same(federation(model, *text()), tolerance={4: 1e-5, 8: 1e-13}[dtype.itemsize])


def test_tied_parameters_get_the_gradients_of_all_their_uses():
    assert_same(federation(Embedded(nn.LayerNorm(32), is_tied=True), *text()))


def test_frozen_layers_are_shared():
    model = Embedded(encoder())
    model.embedding.requires_grad_(False)
    model.layer.self_attn.requires_grad_(False)
    assert_same(federation(model, *text()))


def test_a_frozen_convolution_may_overlap_but_a_trained_one_may_not():
    torch.manual_seed(0)
    x, y = torch.randn(CLIENTS, 6, 3, 8, 8), torch.randint(0, 5, (CLIENTS, 6))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ELU(), nn.Flatten(), nn.Linear(144, 5))
    fed = federation(model, x, y, functional.cross_entropy)
    engine = Stacked(fed.task, fed.algorithm)
    after_two_rounds(fed, engine)
    assert way_of(engine) == "one stream per client"
    model[0].requires_grad_(False)
    assert_same(federation(model, x, y, functional.cross_entropy))


def test_the_forward_functions_are_put_back():
    model = Embedded(encoder())
    fed = federation(model, *text())
    after_two_rounds(fed, Stacked(fed.task, fed.algorithm))
    assert not any("forward" in module.__dict__ for module in fed.task.model.modules())


def test_dropout_differs_between_clients_and_not_between_runs():
    model = Embedded(nn.Dropout(0.5))
    x, y = (t[:1].expand(CLIENTS, -1, -1) for t in text(BATCH))
    fed = federation(model, x, y)
    first, again = (after_two_rounds(fed, Stacked(fed.task, fed.algorithm)) for _ in range(2))
    assert torch.equal(first.w, again.w)
    engine = Stacked(fed.task, fed.algorithm)
    after_two_rounds(fed, engine)
    (step,) = engine.steps.values()
    assert isinstance(step.gradients, OneBatchGradients)
    rows = step.gradients.buffers.gradient
    assert not torch.equal(rows[0], rows[1])  # the same data, other random numbers


def test_a_llama_is_the_reference_to_rounding():
    assert_same(federation(Logits(llama()), *text()))
    assert_same(federation(Logits(llama(tie_word_embeddings=True)), *text()))


def test_adapters_on_a_llama_are_the_reference_to_rounding():
    engine = assert_same(federation(Logits(lora_on(llama())), *text()))
    (step,) = engine.steps.values()
    assert any(is_rotary_attention(x) for x, _ in step.gradients.rewritten)
    assert any(is_gated(x) for x, _ in step.gradients.rewritten)


def test_attention_masks_reach_the_model():
    x, y = text()
    mask = torch.ones_like(x)
    mask[:, ::2, 5:] = 0
    inputs = {"input_ids": x, "attention_mask": mask}
    assert_same(federation(Logits(lora_on(llama())), inputs, y))


def test_adapters_with_dropout_run_layer_by_layer():
    fed = federation(Logits(lora_on(llama(), lora_dropout=0.5)), *text())
    engine = Stacked(fed.task, fed.algorithm)
    after_two_rounds(fed, engine)
    assert way_of(engine) == "all clients in one batch"


@pytest.mark.parametrize("name", ["GPT2", "Bert", "ViT"])
def test_other_models_of_transformers(name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 64}
    plain = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    gpt2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": TOKENS}
    gpt2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    gpt2 |= {"bos_token_id": None, "eos_token_id": None}
    vit = small | {"num_labels": 5, "image_size": 8, "patch_size": 4}
    sizes = {"GPT2": gpt2, "Bert": small | plain, "ViT": vit}[name]
    kind = {
        "GPT2": "GPT2LMHeadModel",
        "Bert": "BertForMaskedLM",
        "ViT": "ViTForImageClassification",
    }
    words = {} if name == "ViT" else {"vocab_size": WORDS}
    config = getattr(transformers, f"{name}Config")(**sizes, **words)
    model = getattr(transformers, kind[name])(config)
    if name == "ViT":
        draw = torch.Generator().manual_seed(0)
        x = {"pixel_values": torch.randn(CLIENTS, 6, 3, 8, 8, generator=draw)}
        y = torch.randint(0, 5, (CLIENTS, 6), generator=draw)
        fed = federation(model, x, y, lambda found, y: functional.cross_entropy(found.logits, y))
    else:
        fed = federation(Logits(model), *text())
    assert_same(fed)


@pytest.mark.skipif(DEVICE == "cpu", reason="fused attention in bfloat16 needs a GPU")
def test_a_gpu_repeats_its_bits_in_bfloat16():
    torch.manual_seed(0)
    model = Embedded(nn.Sequential(*(encoder() for _ in range(3))))
    fed = federation(model, *text(), precision="bf16")
    first, again = (after_two_rounds(fed, Stacked(fed.task, fed.algorithm)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    exact = after_two_rounds(fed, Reference(fed.task))
    change = exact.w - fed.initial_snapshot().state.w
    assert (first.w - exact.w).norm() <= 0.2 * change.norm()  # Adam magnifies rounding errors
