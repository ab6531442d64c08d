"""Language models: what is loaded, how texts become blocks, and what training leaves behind."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_texts import write_gguf, write_model, write_play, write_speeches

import fedsift
from fedsift import algorithms, llm
from fedsift.data.authors import read_authors
from fedsift.data.text import encode_characters
from fedsift.engine.scoring import chunk_size
from fedsift.errors import ConfigError

METHOD = algorithms.fedadam_ssm(density=0.2, local_steps=3, lr=0.01)
TINY = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
REAL = Path(
    os.environ.get("FEDSIFT_DATA", "/nowhere"), "smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
)
pytestmark = pytest.mark.filterwarnings("ignore:the test loss")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder with a play and with speeches."""
    monkeypatch.setenv("FEDSIFT_DATA", str(tmp_path))
    write_play(tmp_path / "shakespeare")
    write_speeches(tmp_path / "sotu")
    return tmp_path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a model and its tokenizer."""
    return write_model(tmp_path_factory.mktemp("model"))


# Texts


def test_roles_are_the_clients_of_a_play(data):
    found = read_authors("shakespeare")
    assert set(found) == {f"hamlet/{role}" for role in ("HAM", "OPHELIA", "KING", "GHOST")}
    (text,) = found["hamlet/OPHELIA"]
    assert "Aside" not in text
    assert text.count("\n\n") == 20 - 3 - 1


def test_speeches_of_a_president_are_in_the_order_of_their_years(data):
    found = read_authors("sotu")
    assert [text[:4] for text in found["Ann"]] == ["1790", "1792"]
    assert len(found["Bob"]) == 1


def test_a_folder_has_one_client_per_file(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(name * 300)
    found = llm.load_clients(f"folder:{tmp_path}", llm.load_tokenizer("tiny"), block_length=20)
    assert found.names == ("a", "b")
    with pytest.raises(ValueError, match="no texts in"):
        read_authors(f"folder:{tmp_path / 'none'}")


def test_labels_are_the_next_tokens_and_the_end_of_each_text_is_held_out(data):
    found = llm.load_clients("shakespeare", llm.load_tokenizer("tiny"), 2, 32, validation=3)
    assert found.names == ("hamlet/HAM", "hamlet/OPHELIA")
    (text,) = read_authors("shakespeare")["hamlet/HAM"]
    part = found.parts[0]
    x, y = (
        torch.cat([pair[n] for pair in (part.train, part.validation, part.test)]) for n in (0, 1)
    )
    codes = torch.from_numpy(encode_characters(text))
    assert torch.equal(x.flatten(), codes[: x.numel()])
    assert torch.equal(y.flatten(), codes[1 : x.numel() + 1])
    assert len(part.validation[0]) == 3
    assert len(part.test[0]) == round(0.1 * len(x))
    assert len(found.test[0]) == sum(len(x) for x, _ in found.client_tests)


def test_tokens_travel_without_text_and_tokenizer(data):
    streams = llm.tokenize(read_authors("shakespeare"), llm.load_tokenizer("tiny"), 3)
    streams.save(data / "tokens.safetensors")
    again = llm.TokenStreams.load(data / "tokens.safetensors")
    assert again.names == streams.names
    assert all(np.array_equal(a, b) for a, b in zip(again.tokens, streams.tokens, strict=True))
    (data / "tokens.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="cannot read the tokens"):
        llm.TokenStreams.load(data / "tokens.safetensors")


def test_too_many_clients_and_too_long_blocks_are_refused(data):
    tokenizer = llm.load_tokenizer("tiny")
    with pytest.raises(ConfigError, match="between 1 and 4, the number of authors, got 5"):
        llm.load_clients("shakespeare", tokenizer, 5)
    with pytest.raises(ConfigError, match="'hamlet/HAM' has 0 blocks"):
        llm.load_clients("shakespeare", tokenizer, 1, 10**6)


# Models


def test_the_tiny_model_has_a_million_parameters():
    whole = llm.load_model("tiny", lora=None)
    assert 0.9e6 < sum(p.numel() for p in whole.parameters()) < 1.1e6
    assert all(p.requires_grad for p in whole.parameters())


def test_only_adapters_are_trained_and_only_the_rest_is_in_half_precision():
    model = llm.load_model(TINY, llm.LoRA(rank=4, targets=["q_proj"]), torch.bfloat16, seed=1)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name and "q_proj" in name for name in trained)
    assert sum(p.numel() for p in trained.values()) == 2 * 4 * (16 + 16)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    other = llm.load_model(TINY, llm.LoRA(rank=4, targets=["q_proj"]), torch.bfloat16, seed=2)
    ours, theirs = (m.state_dict().values() for m in (model, other))
    assert not all(map(torch.equal, ours, theirs))


def test_gradient_checkpointing_changes_nothing_but_memory():
    x, y = torch.randint(96, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    gradients = []
    for is_on in (False, True):
        model = llm.load_model(TINY, gradient_checkpointing=is_on).train()
        llm.next_token_loss(model(x), y).backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert any(g.abs().max() > 0 for g in gradients[0])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_folder_gives_the_model_and_its_tokenizer(saved, data):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = llm.load_model(saved, lora=None), llm.load_tokenizer(str(saved))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved)
    x = torch.arange(12).view(2, 6)
    torch.testing.assert_close(model(x), theirs(x).logits)
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    assert tokenizer.encode("to be .").tolist() == theirs("to be .")["input_ids"]
    streams = llm.tokenize({"Ann": ("to be", "not")}, tokenizer)
    assert theirs.decode(streams.tokens[0]) == "to be </s> not </s>"


@pytest.mark.parametrize("name", ["small.gguf", "."])
def test_a_gguf_file_gives_the_model_and_its_tokenizer(name, tmp_path):
    tensors = write_gguf(tmp_path / "small.gguf")
    model = llm.load_model(tmp_path / name, lora=None)
    found = dict(model.model.named_parameters())
    for theirs, ours in (
        ("token_embd", "model.embed_tokens.weight"),
        ("output", "lm_head.weight"),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj.weight"),
    ):
        torch.testing.assert_close(found[ours].detach(), torch.from_numpy(tensors[theirs]))
    tokenizer = llm.load_tokenizer(str(tmp_path / name))
    words = ["<s>", "</s>", *map(chr, range(33, 127)), "Ġ", "Ċ", "th", "the"]
    assert [words[n] for n in tokenizer.encode("the end")] == ["the", "Ġ", "e", "n", "d"]
    assert tokenizer.end == 1


def test_the_loss_is_that_of_hugging_face():
    model = llm.load_model(TINY)
    tokens = torch.randint(96, (3, 9), generator=torch.Generator().manual_seed(0))
    theirs = model.model(input_ids=tokens, labels=tokens).loss  # shifts by itself
    ours = llm.next_token_loss(model(tokens)[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(ours, theirs)
    ignored = torch.cat([tokens[:, 1:], torch.full((3, 1), llm.IGNORED)], 1)
    torch.testing.assert_close(llm.next_token_loss(model(tokens), ignored), theirs)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere", "there is no language model 'nowhere'"), (".", "cannot load the language model")],
)
def test_a_model_that_is_not_there_is_refused_in_one_line(name, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=reason) as problem:
        llm.load_model(name)
    assert "\n" not in str(problem.value)


def test_without_a_network_a_hub_is_not_asked_again_and_again(monkeypatch):
    def no_network(*_):
        raise OSError("Name or service not known")

    monkeypatch.setattr(llm.models, "getaddrinfo", no_network)
    monkeypatch.setattr(llm.models, "getproxies", dict)
    with pytest.raises(ConfigError, match="the hub cannot be reached, and its cache"):
        llm.load_model("owner/nothing")
    monkeypatch.setattr(llm.models, "getproxies", lambda: {"https": "http://proxy:8080"})
    assert llm.models.can_reach_hub()


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}])
def test_wrong_settings_of_lora_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} of LoRA must"):
        llm.LoRA(**wrong)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr("fedsift.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"need transformers: .*pip install '\.\[llm\]'"):
        llm.load_model("tiny")


# Training


@pytest.fixture
def trained(data):
    """A result, the untrained model and the data."""
    found = llm.load_clients("shakespeare", llm.load_tokenizer("tiny"), 3, block_length=32)
    model = llm.load_model(TINY, seed=3)
    result = fedsift.simulate(
        model, found.clients, found.test, METHOD, rounds=3, batch_size=4,
        loss=llm.next_token_loss, client_tests=found.client_tests, progress=False,
    )  # fmt: skip
    return result, model, found


def test_training_reports_perplexity_also_per_client(trained):
    result, model, found = trained
    first, last = result.history[0], result.history[-1]
    assert last["loss"] < first["loss"] - 0.05
    assert result.accuracy is None
    assert f"perplexity={result.perplexity:.4g}, " in repr(result)
    assert math.isclose(last["perplexity"], math.exp(last["loss"]))
    result.load_into(model)
    with torch.no_grad():
        own = [math.exp(llm.next_token_loss(model(x), y)) for x, y in found.client_tests]
    assert last["client_perplexity"] == pytest.approx(own, rel=1e-4)
    assert last["client_perplexity_worst"] == max(last["client_perplexity"])
    assert result.summary()["best_perplexity"] == min(r["perplexity"] for r in result.history[1:])


def test_saved_adapters_are_loaded_by_peft(trained, tmp_path):
    peft = pytest.importorskip("peft")
    result, model, found = trained
    x, _ = found.test
    before = model(x[:2])
    llm.save_adapter(result, model, tmp_path / "adapter")
    torch.testing.assert_close(model(x[:2]), before)  # unchanged
    base = llm.load_model(TINY, lora=None, seed=3).model
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    result.load_into(model)
    torch.testing.assert_close(loaded(x[:2]).logits, model.eval()(x[:2]))
    assert not torch.allclose(model(x[:2]), before)


def test_without_adapters_the_whole_model_is_saved(data, tmp_path):
    transformers = pytest.importorskip("transformers")
    x = torch.zeros(2, 8, dtype=torch.int64)
    model = llm.load_model(TINY, lora=None)
    result = fedsift.simulate(
        model, [(x, x)], None, METHOD, 1, loss=llm.next_token_loss, progress=False
    )
    llm.save_adapter(result, model, tmp_path / "whole")
    result.load_into(model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(loaded(x).logits, model(x))


def test_a_run_folder_has_the_adapters_and_not_the_frozen_model(data, tmp_path):
    found = llm.load_clients("shakespeare", llm.load_tokenizer("tiny"), 2, block_length=32)
    result = fedsift.simulate(
        llm.load_model(TINY), found.clients, found.test, METHOD, 1, batch_size=4,
        loss=llm.next_token_loss, out=tmp_path / "run", progress=False,
    )  # fmt: skip
    tensors = load_file(tmp_path / "run" / "model.safetensors")
    assert all("lora_" in name for name in tensors)
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert torch.equal(fedsift.Result.load(tmp_path / "run").weights, result.weights)


def test_outputs_of_a_large_vocabulary_are_scored_in_small_pieces(data):
    found = llm.load_clients("shakespeare", llm.load_tokenizer("tiny"), 2, block_length=32)
    run = fedsift.rounds(
        llm.load_model(TINY), found.clients, found.test, METHOD, 1, loss=llm.next_token_loss
    )
    assert chunk_size(run.federation.task) == 2048 // 32


@pytest.mark.skipif(not REAL.exists(), reason="needs SmolLM2-135M in FEDSIFT_DATA; takes a minute")
def test_a_real_model_learns(tmp_path):
    x = llm.load_tokenizer(str(REAL)).encode("The capital of France is Paris. " * 20)
    block = torch.from_numpy(x[:32])[None], torch.from_numpy(x[1:33])[None]
    model = llm.load_model(REAL)
    result = fedsift.simulate(
        model, [block, block], block, algorithms.fedadam_ssm(density=0.05, local_steps=1, lr=1e-3),
        rounds=1, loss=llm.next_token_loss, progress=False,
    )  # fmt: skip
    assert result.layout.d == 4_884_480
    first, last = result.history
    assert first["perplexity"] < 20  # it is pretrained
    assert last["loss"] < first["loss"]


def test_nothing_is_imported_before_it_is_used():
    code = (
        "import fedsift.llm, fedsift.cli.training, sys\n"
        "assert not {'transformers', 'peft', 'gguf'} & {*sys.modules}"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
