"""The text data from Python's standard library: documents, partition, training."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedsift
from fedsift import algorithms
from fedsift.cli import main
from fedsift.data import load, loss_of, partition_indices, sequence_cross_entropy, text
from fedsift.engine import Forked, Reference, Stacked
from fedsift.engine.processes import forked
from fedsift.models import build
from fedsift.models.transformer import CharacterEmbedding, TransformerBlock
from fedsift.simulation import Options, prepare


@pytest.fixture(scope="module")
def stdlib():
    return load("python-stdlib")


def read(codes):
    return "".join(text.ALPHABET[code] for code in codes)


def test_targets_are_the_samples_shifted_by_one_character(stdlib):
    x, y = stdlib.train
    assert x.dtype == y.dtype == torch.int64
    assert x.shape == y.shape == (len(stdlib.documents), text.CONTEXT)
    whole = "".join(c if c in text.ALPHABET else "?" for c in text.stdlib_documents()[0].text)
    mine = read(x[stdlib.documents == 0].flatten().tolist())
    assert whole.startswith(mine)
    assert 0 < len(whole) - len(mine) <= text.CONTEXT
    assert torch.equal(y[:, :-1], x[:, 1:])
    assert torch.equal(y[0, -1], x[1, 0])  # the next sample starts where this one ends


def test_the_test_set_has_documents_that_no_client_trains_on(stdlib):
    x_test, _ = stdlib.test
    assert 100 < len(x_test) <= text.MAX_TEST_SAMPLES
    library = text.stdlib_documents()
    kept = [d for n, d in enumerate(library) if n % text.HELD_OUT != text.HELD_OUT - 1]
    assert int(stdlib.documents.max()) + 1 == len(kept)
    whole = "\0".join(read(text.encode_characters(d.text)) for d in kept)
    shared = sum(read(sample.tolist()) in whole for sample in x_test)
    assert shared < len(x_test) / 20  # two modules may contain the same license


def test_every_code_is_in_the_alphabet(stdlib):
    for x in (*stdlib.train, *stdlib.test):
        assert 0 <= int(x.min()) <= int(x.max()) < len(text.ALPHABET)


def module(folder: Path, name: str, content: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode())


def test_only_public_modules_of_a_minimum_size_are_read_sorted_by_name(tmp_path):
    fair = "x = 1\r\n" * 1000
    taken = ["json/decoder.py", "abc.py", "email/mime/text.py"]
    left = ["_weakrefset.py", "json/__init__.py", "test/support.py", "unittest/test_x.py",
            "numpy.py", "tkinter/font.py", "email/test/data.py"]  # fmt: skip
    for name in (*taken, *left):
        module(tmp_path, name, fair)
    module(tmp_path, "ast.py", fair * 100)
    module(tmp_path, "this.py", "short")
    found = list(text.documents_in(tmp_path))
    assert [d.name for d in found] == ["abc", "ast", "email/mime/text", "json/decoder"]
    assert [len(d.text) for d in found] == [6000, text.MAX_LENGTH, 6000, 6000]


def test_a_python_without_sources_gives_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=f"not in {tmp_path}; use a Python that includes them"):
        text.stdlib_documents.__wrapped__()


def test_different_text_has_a_different_digest(monkeypatch):
    before = text.stdlib_digest()
    first, *others = text.stdlib_documents()
    for changed in (replace(first, text=first.text + "."), replace(first, name="other")):
        monkeypatch.setattr(text, "stdlib_documents", lambda changed=changed: (changed, *others))
        assert text.stdlib_digest() != before
    monkeypatch.setattr(text, "stdlib_documents", lambda: (first, *others))
    assert text.stdlib_digest() == before


@given(st.lists(st.integers(0, 9), min_size=10, max_size=60), st.integers(0, 5), st.data())
def test_documents_are_not_divided_and_no_client_is_empty(labels, seed, data):
    y = np.array(labels)
    clients = data.draw(st.integers(1, len(set(labels))))
    rows = partition_indices("documents", y, clients, seed, theta=1.0)
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(y)))
    owners = [{int(label) for label in y[part]} for part in rows]
    assert sum(map(len, owners)) == len(set(labels))
    assert min(map(len, owners)) >= 1


def test_more_clients_than_documents_are_refused():
    with pytest.raises(ValueError, match=r"3 whole documents.*between 1 and 3"):
        partition_indices("documents", np.array([0, 0, 1, 2, 2]), 4, seed=0, theta=1.0)


def test_a_character_is_predicted_from_earlier_ones_only():
    model = build("char-transformer", (text.CONTEXT,), seed=0).eval()
    x = torch.randint(0, len(text.ALPHABET), (2, text.CONTEXT))
    changed = x.clone()
    changed[:, 70] = (changed[:, 70] + 1) % len(text.ALPHABET)
    with torch.no_grad():
        before, after = model(x), model(changed)
    assert torch.equal(before[:, :70], after[:, :70])
    assert not torch.equal(before[:, 70], after[:, 70])


# Training a small Transformer.

CONTEXT = 12


def small():
    torch.manual_seed(0)
    blocks = [TransformerBlock(16, 2, is_causal=True) for _ in range(2)]
    return nn.Sequential(
        CharacterEmbedding(8, CONTEXT, 16), *blocks, nn.LayerNorm(16), nn.Linear(16, 8)
    )


def words(samples, seed):
    """Samples of a text in which each character is followed by the next one or the one after it."""
    draw = np.random.default_rng(seed)
    codes = np.cumsum(1 + draw.integers(0, 2, (samples, CONTEXT + 1)), 1) % 8
    return torch.from_numpy(codes[:, :-1]), torch.from_numpy(codes[:, 1:])


def federation(name="fedadam-ssm"):
    known = algorithms.settings_of(name)
    wanted = {"density": 0.2, "local_steps": 3, "lr": 0.01}
    method = algorithms.find(name)(**{k: v for k, v in wanted.items() if k in known})
    clients = [words(20, seed) for seed in range(4)]
    return prepare(
        small(),
        clients,
        words(1100, 9),
        method,
        Options(
            batch_size=8,
            participation=1.0,
            dropout=0.0,
            min_clients=0,
            wire="count",
            loss=loss_of(clients[0][1]),
            seed=0,
            device="cpu",
        ),
    )


def two_rounds(fed):
    snapshot, scores = fed.initial_snapshot(), []
    for _ in range(2):
        snapshot, _ = fed.run_round(snapshot)
        scores.append(fed.engine.evaluate(snapshot.state.w))
    return snapshot, scores


@pytest.mark.parametrize("name", ["fedadam-ssm", "sift"])
def test_all_engines_train_text_as_the_reference_does(name, monkeypatch):
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    fed = federation(name)
    expected, scores = two_rounds(replace(fed, engine=Reference(fed.task)))
    several, their_scores = two_rounds(
        replace(fed, engine=Forked(fed.task, fed.algorithm, processes=2))
    )
    assert their_scores == scores
    for one, other in zip(several.state, expected.state, strict=True):
        assert torch.equal(one, other)
    stacked, near = two_rounds(replace(fed, engine=Stacked(fed.task, fed.algorithm)))
    torch.testing.assert_close(near[0][1], scores[0][1], rtol=1e-4, atol=0)
    if name == "fedadam-ssm":  # the codes of sift may round to another side
        torch.testing.assert_close(stacked.state.w, expected.state.w, rtol=1e-3, atol=1e-4)


def test_accuracy_and_loss_are_means_over_all_characters():
    fed = federation()
    snapshot, scores = two_rounds(fed)
    model = small()
    fed.task.layout.write(snapshot.state.w, model)
    x, y = fed.task.test
    with torch.no_grad():
        output = model(x)
    right = (output.argmax(-1) == y).double().mean().item()
    loss = nn.functional.cross_entropy(output.transpose(1, 2), y).item()
    assert scores[-1] == pytest.approx((right, loss), rel=1e-3)


def test_a_text_is_learned():
    result = fedsift.simulate(
        small(), [words(60, seed) for seed in range(3)], test=words(100, 9),
        algorithm=algorithms.fedadam(lr=0.01, local_steps=10), rounds=8, batch_size=16,
        loss=sequence_cross_entropy,
    )  # fmt: skip
    assert (
        result.history[-1]["accuracy"] > 0.4
    )  # at most 0.5, as the next character is one of two; a random guess has 1/8
    assert result.history[-1]["loss"] < 0.9  # at least log 2


RUN = ["--dataset", "python-stdlib", "--partition", "documents", "--clients", "3", "--rounds", "2",
       "--local-steps", "1", "--batch-size", "2", "--device", "cpu"]  # fmt: skip


@pytest.fixture
def small_test_set(monkeypatch, tmp_path):
    monkeypatch.setattr(text, "MAX_TEST_SAMPLES", 5)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_records_its_text_and_cannot_be_resumed_on_another(
    small_test_set, monkeypatch, capsys
):
    assert main(["run", *RUN, "--out", "mine"]) == 0
    summary = json.loads((small_test_set / "mine" / "summary.json").read_text())
    assert (summary["model"], summary["parameters"]) == ("char-transformer", 636_128)
    assert summary["environment"]["corpus"] == text.stdlib_digest()
    assert 0 <= summary["final_accuracy"] < 1
    config = small_test_set / "mine" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    monkeypatch.setattr("fedsift.runs.checkpoint.digest_of", lambda name: "another")
    capsys.readouterr()
    assert main(["resume", "mine"]) == 2
    assert "another version of python-stdlib" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(small_test_set)
    monkeypatch.setattr(text, "MAX_TEST_SAMPLES", 5)
    assert main(["resume", "mine"]) == 0


def test_check_prints_the_digest_of_the_text(capsys):
    assert main(["data", "check", "python-stdlib"]) == 0
    assert text.stdlib_digest() in capsys.readouterr().out


OWN = """
from torch import nn

def letters():
    return nn.Sequential(nn.Embedding(96, 4), nn.Linear(4, 96))
"""


def test_a_user_model_accepts_character_codes(small_test_set, monkeypatch):
    (small_test_set / "my_letters.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(small_test_set))
    assert main(["run", *RUN, "--model", "my_letters:letters", "--out", "own"]) == 0
    with pytest.raises(ValueError, match="fails on samples of shape 128"):
        build("my_letters:letters", (128,), seed=0)
