"""All clients' samples in one batch: the same training as one client after another.

Where there is no GPU, Triton interprets the kernels.
"""

from dataclasses import replace
from operator import itemgetter

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedsift import algorithms
from fedsift.engine import Reference, Stacked
from fedsift.engine.gpu.one_batch.gradients import OneBatchGradients
from fedsift.engine.gpu.one_batch.norms import normalized
from fedsift.engine.gpu.one_batch.rewrites import is_gated, is_rotary_attention
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


class Positions(nn.Module):
    """Learned positions: parameters of no known layer, looked up for one sample."""

    def __init__(self):
        super().__init__()
        self.places, self.scale = nn.Embedding(TOKENS, 32), nn.Parameter(torch.ones(32))

    def forward(self, x):
        return x * self.scale + self.places(torch.arange(TOKENS, device=x.device)[None])


def encoder(**options):
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **options)


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
def test_layers_train_each_client_with_its_own_parameters(layer):
    torch.manual_seed(0)
    assert_same(federation(Embedded(layer()), *text()))


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


class Mixing(nn.Module):
    """Adds the mean over the batch, so a sample's output depends on the others."""

    def forward(self, x):
        return x + x.mean(0, keepdim=True)


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


@pytest.mark.parametrize("layer", [Mixing, Direct, SequenceFirst])
def test_models_that_would_be_computed_wrongly_run_in_another_way(layer):
    torch.manual_seed(0)
    fed = federation(Embedded(layer()), *text())
    engine = assert_same(fed, "all clients at once, by torch.vmap")
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


def test_a_module_that_only_looks_like_one_of_llama_runs_as_it_is():
    model = llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = type("SiLU", (nn.Tanh,), {})()
    fed = federation(Logits(lora_on(model)), *text())
    engine = assert_same(fed)
    (step,) = engine.steps.values()
    assert step.gradients.rewritten == []


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


@pytest.mark.parametrize("is_centered", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_the_normalization_kernels(is_centered, is_shared):
    pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to test")
    from fedsift.engine.gpu.one_batch.norms import Normalization

    torch.manual_seed(0)
    x = torch.randn(3, 7, 2, 20, device=DEVICE, requires_grad=True)
    weight = torch.randn(1 if is_shared else 3, 20, device=DEVICE, requires_grad=not is_shared)
    bias = torch.randn(3, 20, device=DEVICE, requires_grad=True) if is_centered else None
    both = weight, bias
    if is_shared and is_centered:  # as ``normalized`` passes them
        both = weight.expand(3, -1), bias
    ours = Normalization.apply(x, *both, 1e-5, is_centered)
    leaves = [t.detach().cpu().double().requires_grad_(t.requires_grad) for t in (x, weight)]
    leaves += [] if bias is None else [bias.detach().cpu().double().requires_grad_()]
    theirs = normalized(*leaves, *[None] * (3 - len(leaves)), 1e-5, is_centered)
    assert_gradients_close(ours, theirs, [t for t in (x, weight, bias) if t is not None], leaves)


def assert_gradients_close(ours, theirs, our_leaves, their_leaves):
    slope = torch.randn_like(theirs)
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-5)
    pairs = [(a, b) for a, b in zip(our_leaves, their_leaves, strict=True) if a.requires_grad]
    found = torch.autograd.grad(ours, [a for a, _ in pairs], slope.to(ours))
    expected = torch.autograd.grad(theirs, [b for _, b in pairs], slope)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-4)


def test_the_cross_entropy_kernel():
    pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to test")
    from fedsift.engine.gpu.one_batch.losses import losses_and_slope

    torch.manual_seed(0)
    output, labels = torch.randn(2, 3, 2, 5000), torch.randint(0, 5000, (2, 3, 2))
    labels[0, 0] = -100
    output[1, 0, 0, 7] = float("-inf")
    losses, slope = losses_and_slope(output.to(DEVICE), labels.to(DEVICE))
    output = output.double().requires_grad_()
    pairs = zip(output, labels, strict=True)
    expected = torch.stack(
        [functional.cross_entropy(o.flatten(0, 1), y.flatten()) for o, y in pairs]
    )
    (gradient,) = torch.autograd.grad(expected.sum(), output)
    torch.testing.assert_close(losses.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope.cpu().double(), gradient, rtol=1e-4, atol=1e-7)


def test_the_kernels_of_llama():
    pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to test")
    from fedsift.engine.gpu.one_batch.rewrites import Gate, Rotation

    torch.manual_seed(0)
    gate, x = (torch.randn(3, 1500, device=DEVICE, requires_grad=True) for _ in range(2))
    leaves = [t.detach().cpu().double().requires_grad_() for t in (gate, x)]
    theirs = functional.silu(leaves[0]) * leaves[1]
    assert_gradients_close(Gate.apply(gate, x), theirs, [gate, x], leaves)
    for samples in (1, 4):  # with the same angles for all samples, or with each sample's own
        heads = torch.randn(4, 6, 3, 64, device=DEVICE, requires_grad=True)
        cos, sin = torch.randn(2, samples, 6, 64, device=DEVICE)
        leaf = heads.detach().cpu().double().requires_grad_()
        first, second = leaf.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        theirs = leaf * cos.cpu()[:, :, None] + turned * sin.cpu()[:, :, None]
        assert_gradients_close(Rotation.apply(heads, cos, sin), theirs, [heads], [leaf])


def test_the_product_kernel():
    pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to test")
    from fedsift.engine.gpu.one_batch.layers import Product

    torch.manual_seed(0)
    given = [torch.randn(*s, device=DEVICE) for s in [(2, 40, 24), (2, 36, 24), (2, 36)]]
    leaves = [t.cpu().double().requires_grad_() for t in given]
    ours = [t.to(torch.bfloat16 if DEVICE == "cuda" else t.dtype).requires_grad_() for t in given]
    theirs = leaves[0] @ leaves[1].mT + leaves[2][:, None]
    if DEVICE == "cuda":
        y = Product.apply(*ours)
        torch.testing.assert_close(y.cpu().double(), theirs, rtol=0.05, atol=0.2)
    else:
        assert_gradients_close(Product.apply(*ours), theirs, ours, leaves)


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
