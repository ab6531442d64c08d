"""The kernels for one batch of all clients against PyTorch in float64.

Where there is no GPU, Triton interprets them.
"""

import pytest
import torch
from stacked_models import (
    DEVICE,
    TOKENS,
    Logits,
    after_two_rounds,
    assert_same,
    federation,
    llama,
    lora_on,
    text,
)
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from fedsift.engine import Reference, Stacked
from fedsift.engine.gpu.gradients import SingleGradients
from fedsift.engine.gpu.one_batch import blocks, losses, norms, rewrites
from fedsift.engine.gpu.one_batch.gradients import OneBatchGradients
from fedsift.engine.gpu.one_batch.norms import normalized
from fedsift.engine.gpu.weight import Weight
from fedsift.models.transformer import TransformerBlock

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to test")


@pytest.mark.parametrize("is_centered", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_the_normalization_kernels(is_centered, is_shared):
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


@pytest.mark.parametrize("label", [-1, 50])
def test_labels_that_are_no_classes_give_nan_and_not_memory_of_others(label):
    from fedsift.engine.gpu.one_batch.losses import losses_and_slope

    labels = torch.tensor([[[3, 4]], [[label, 4]]], device=DEVICE)
    losses, slope = losses_and_slope(torch.randn(2, 1, 2, 50, device=DEVICE), labels)
    assert losses.isfinite().tolist() == [True, False]
    assert slope.isfinite().flatten(1).all(1).tolist() == [True, False]


def test_the_kernels_of_llama():
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


@pytest.fixture
def kernels(monkeypatch):
    """Kernels for tensors of any device."""
    for module in (losses, norms, rewrites):
        monkeypatch.setattr(module, "has_kernels", lambda x: x.dtype != torch.float64)
    monkeypatch.setattr(blocks, "has_block_kernels", lambda x: x.dtype != torch.float64)


def gradients_of(model, *data):
    """Return the gradients that all clients have in one batch, and those that each has alone."""
    fed = federation(model, *data, batch_size=1)
    task = Stacked(fed.task, fed.algorithm).stacked_task
    draw = torch.Generator(DEVICE).manual_seed(0)
    rows, found = torch.arange(0, 18, 6, device=DEVICE)[:, None], []
    for kind in (OneBatchGradients, SingleGradients):
        gradients = kind(task, len(rows))
        start = fed.task.layout.read(fed.task.model).expand(len(rows), -1)
        noise = torch.randn(start.shape, generator=draw.manual_seed(0), device=DEVICE)
        gradients.pack(start + 0.01 * noise, gradients.buffers.x.w)
        gradients.check(rows)
        gradients.compute(rows)
        found.append(gradients)
    return found


@pytest.mark.parametrize("has_mask", [False, True])
def test_adapters_on_a_llama_have_the_same_gradients_with_kernels(kernels, has_mask):
    x, y = text()
    mask = torch.ones_like(x)
    mask[:, ::2, TOKENS // 2 :] = 0
    inputs = {"input_ids": x, "attention_mask": mask} if has_mask else x
    ours, theirs = gradients_of(Logits(lora_on(llama(num_hidden_layers=1))), inputs, y)
    assert ours.rewritten
    torch.testing.assert_close(ours.buffers.gradient, theirs.buffers.gradient)
    torch.testing.assert_close(ours.buffers.loss, theirs.buffers.loss)


def test_heads_that_are_turned_in_part_are_not_turned_by_the_kernel(kernels):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.StableLmConfig(
        vocab_size=20, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=TOKENS,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    assert config.rope_parameters["partial_rotary_factor"] < 1
    model = transformers.StableLmForCausalLM(config)
    assert any(map(rewrites.is_rotary_attention, model.modules()))
    ours, theirs = gradients_of(Logits(lora_on(model)), *text())
    assert ours.rewritten
    torch.testing.assert_close(ours.buffers.gradient, theirs.buffers.gradient)


def block(is_causal):
    """A pre-norm block, and parameters and memory for gradients of two clients."""
    torch.manual_seed(0)
    module = TransformerBlock(32, 2, is_causal)
    values = {
        name: torch.stack([p.detach() + 0.1 * torch.randn_like(p) for _ in range(2)]).to(DEVICE)
        for name, p in module.named_parameters()
    }
    return module, {n: Weight(p, p, torch.full_like(p, 7.0)) for n, p in values.items()}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [20, 70])  # of one block, and of two blocks of queries
def test_the_kernels_of_a_pre_norm_block(is_causal, tokens):
    from fedsift.engine.gpu.one_batch.blocks import fused_block

    module, weights = block(is_causal)
    x = torch.randn(4, tokens, 32, device=DEVICE, requires_grad=True)
    anchor = torch.empty((), requires_grad=True)
    ours = fused_block(module, weights, 2, anchor)(x)
    leaf = x.detach().cpu().double().requires_grad_()
    own = [
        {n: w.value[c].cpu().double().requires_grad_() for n, w in weights.items()} for c in (0, 1)
    ]
    pairs = zip(own, leaf.chunk(2), strict=True)
    theirs = torch.cat([functional_call(module.double(), p, (rows,)) for p, rows in pairs])
    slope = torch.randn_like(theirs)
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-5)
    (found,) = torch.autograd.grad(ours, x, slope.to(ours))
    expected, *rest = torch.autograd.grad(theirs, [leaf, *own[0].values(), *own[1].values()], slope)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-4)
    written = [w.gradient[client] for client in (0, 1) for w in weights.values()]
    for a, b in zip(written, rest, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-4)


def small_transformer(is_causal=True):
    torch.manual_seed(0)
    layers = [TransformerBlock(32, 2, is_causal) for _ in range(2)]
    return nn.Sequential(nn.Embedding(20, 32), *layers, nn.LayerNorm(32), nn.Linear(32, 20))


def test_a_transformer_of_fused_blocks_has_the_same_gradients(kernels):
    ours, theirs = gradients_of(small_transformer(), *text())
    assert len(ours.blocks) == 2
    torch.testing.assert_close(ours.buffers.gradient, theirs.buffers.gradient)
    torch.testing.assert_close(ours.buffers.loss, theirs.buffers.loss)


def test_blocks_without_trainable_layers_before_them_get_their_gradients(kernels):
    model = small_transformer()
    model[0].requires_grad_(False)
    ours, theirs = gradients_of(model, *text())
    assert len(ours.blocks) == 2
    torch.testing.assert_close(ours.buffers.gradient, theirs.buffers.gradient)


def test_two_rounds_with_fused_blocks_are_those_of_the_reference(kernels):
    assert_same(federation(small_transformer(), *text()))


@pytest.mark.skipif(DEVICE == "cpu", reason="products in bfloat16 need a GPU")
def test_a_gpu_runs_fused_blocks_in_bfloat16_and_repeats_their_bits():
    fed = federation(small_transformer(), *text(), precision="bf16")
    engines = [Stacked(fed.task, fed.algorithm) for _ in range(2)]
    first, again = (after_two_rounds(fed, engine) for engine in engines)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    (step,) = engines[0].steps.values()
    assert len(step.gradients.blocks) == 2, step.line
    exact = after_two_rounds(fed, Reference(fed.task))
    change = exact.w - fed.initial_snapshot().state.w
    assert (first.w - exact.w).norm() <= 0.2 * change.norm()  # Adam magnifies rounding errors


def test_blocks_that_the_kernels_do_not_cover_run_as_separate_layers(kernels):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 32), TransformerBlock(32, 4), nn.Linear(32, 20))
    ours, theirs = gradients_of(model, *text())  # heads of width 8
    assert not ours.blocks
    assert "in 4 heads" in ours.remark
    torch.testing.assert_close(ours.buffers.gradient, theirs.buffers.gradient)


def changed_block(change):
    module = TransformerBlock(32, 2)
    change(module)
    return module


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.attention.register_forward_hook(lambda *_: None),
        lambda block: block.network[1].weight.requires_grad_(False),
        lambda block: setattr(block.network[2], "approximate", "tanh"),
        lambda block: block.attention.append(nn.Dropout()),
        lambda block: setattr(block.attention[1].inputs, "bias", None),
    ],
)
def test_modules_that_only_look_like_a_block(change):
    from fedsift.engine.gpu.one_batch.blocks import is_block

    assert is_block(TransformerBlock(32, 2))
    assert not is_block(changed_block(change))


def test_a_block_that_is_used_twice_is_not_fused(kernels):
    from fedsift.engine.gpu.one_batch.blocks import fusible_blocks

    first, second = TransformerBlock(32, 2), TransformerBlock(32, 2)
    second.network[1].weight = first.network[1].weight
    model = nn.Sequential(first, second, TransformerBlock(32, 2))
    assert list(fusible_blocks(model, torch.zeros(1))) == [model[2]]
