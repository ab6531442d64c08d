"""Language models on the command line: runs, resuming, comparisons, reports, refused input."""

import json
import math

import pytest
from small_texts import write_model, write_play

from fedsift.cli.entry import main
from fedsift.runs import RunConfig, RunFolder, federation_of, restore_run, train_rounds
from small_runs import data_in

QUICK = (
    "--model", "llm:tiny", "--dataset", "shakespeare", "--clients", "3", "--rounds", "2",
    "--local-steps", "2", "--batch-size", "2", "--block-length", "32", "--lora-rank", "4",
)  # fmt: skip
TINY = ("--model", "llm:tiny")
OF_AUTHORS = ("--partition", "documents", "--client-tests")


@pytest.fixture(autouse=True)
def cwd(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSIFT_DATA", str(tmp_path))
    write_play(tmp_path / "shakespeare")
    return tmp_path


def write_unusable(folder):
    """Write what cannot be used: an empty text, a model of another kind, damaged files."""
    transformers = pytest.importorskip("transformers")
    (folder / "texts").mkdir()
    (folder / "texts" / "long.txt").write_text("word " * 200)
    (folder / "texts" / "empty.txt").write_text("")
    transformers.T5Config().save_pretrained(folder / "t5")
    write_model(folder / "damaged")
    (folder / "damaged" / "model.safetensors").write_bytes(b"not a tensor")
    (folder / "damaged.gguf").write_bytes(b"GGUF" + bytes(20))


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_shows_and_records_perplexity(cwd, capsys):
    assert main(["run", *QUICK, *OF_AUTHORS, "--algorithm", "sift", "--out", "out"]) == 0
    shown = capsys.readouterr()
    assert "perplexity" in shown.out + shown.err
    assert "final perplexity" in shown.out
    records, summary = metrics_of(cwd / "out"), json.loads((cwd / "out/summary.json").read_text())
    assert all(math.isclose(r["perplexity"], math.exp(r["loss"])) for r in records)
    assert all(r["accuracy"] is None and len(r["client_perplexity"]) == 3 for r in records)
    assert summary["final_perplexity"] == records[-1]["perplexity"]
    assert summary["lora_rank"] == 4
    assert (cwd / "out" / "adapter" / "adapter_config.json").exists()
    page = cwd / "out" / "report.html"
    assert "How does perplexity differ between clients?" in page.read_text()
    assert "test perplexity" in json.dumps(data_in(page), ensure_ascii=False)


def test_a_resumed_run_ends_with_the_same_bits(cwd):
    values = {
        "model": "llm:tiny", "dataset": "shakespeare", "clients": 2, "rounds": 3, "local_steps": 2,
        "batch_size": 2, "block_length": 32, "partition": "documents",
    }  # fmt: skip
    config = RunConfig.from_values(values)
    whole, part = (RunFolder.create(cwd / name, config) for name in ("whole", "part"))
    for folder, rounds in ((whole, 3), (part, 1)):
        federation = federation_of(config)
        list(train_rounds(folder, federation, restore_run(folder, federation), rounds))
    part.model_file.unlink()
    assert main(["resume", "part"]) == 0
    assert part.model_file.read_bytes() == whole.model_file.read_bytes()


def test_pieces_of_all_authors_can_be_split_by_other_partitions(cwd):
    assert main(["run", *QUICK, "--partition", "dirichlet", "--out", "out"]) == 0
    assert metrics_of(cwd / "out")[-1]["perplexity"] > 1


def test_own_pairs_of_tokens_train_a_language_model(cwd, monkeypatch):
    (cwd / "own_tokens.py").write_text(
        "import torch\n"
        "def load():\n"
        "    x = torch.arange(40).view(4, 10)\n"
        "    return [(x, x + 1)] * 2, (x, x + 1)\n"
    )
    monkeypatch.syspath_prepend(str(cwd))
    words = ["--data", "own_tokens:load", "--model", "llm:tiny", "--rounds", "1"]
    assert main(["run", *words, "--local-steps", "2", "--lora-rank", "4", "--out", "out"]) == 0
    assert metrics_of(cwd / "out")[-1]["perplexity"] > 1
    assert main(["run", *words, "--block-length", "8", "--out", "other"]) == 2


def test_a_comparison_has_a_perplexity_as_target(cwd, capsys):
    words = ["compare", "--algorithms", "sift,fedsgd", *QUICK, *OF_AUTHORS, "--out", "both"]
    assert main([*words, "--target", "5000"]) == 0
    assert "ppl" in capsys.readouterr().out
    header, *rows = (cwd / "both" / "compare.csv").read_text().splitlines()
    assert {"best_perplexity", "client_perplexity_p90"} < {*header.split(",")}
    assert all(row.split(",")[4] == "1" for row in rows)  # the first round has reached it
    assert main([*words[:-1], "again", "--target", "0.9"]) == 2
    assert "perplexity above 1" in capsys.readouterr().err


def test_the_demo_on_flower_names_the_app_for_language_models(capsys):
    pytest.importorskip("flwr")
    words = ["deploy", "demo", "--model", "llm:tiny", "--dataset", "shakespeare", "--out", "demo"]
    assert main(words) == 2
    assert "examples/flower-llm" in capsys.readouterr().err


REFUSED = {
    "text without a language model": (["--dataset", "sotu", "--model", "cnn"], "llm:PATH"),
    "a language model without text": (["--model", "llm:tiny"], "needs text"),
    "an adapter of a CNN": (["--lora-rank", "4"], "only applies to language models"),
    "a negative rank": (["--dataset", "sotu", "--lora-rank", "-1"], "at least 0, got -1"),
    "an unknown layer": ([*QUICK, "--lora-targets", "zz"], "LoRA cannot be added"),
    "no such model": ([*QUICK, "--model", "llm:none"], "no language model 'none'"),
    "no texts": (["--dataset", "sotu"], "there are no texts in"),
    "client tests of mixed text": ([*QUICK, "--client-tests"], "--partition documents"),
    "a block longer than the model reads": (
        [*QUICK, "--block-length", "600", "--clients", "1"],
        "at most 512, the positions of",
    ),
    "a block longer than all texts": (
        [*QUICK, "--block-length", "100000"],
        "no text has more than 200000 tokens",
    ),
    "a folder without text files": ([*TINY, "--dataset", "folder:none"], "no texts in none"),
    "an empty text": (
        [*TINY, "--dataset", "folder:texts", *OF_AUTHORS, "--clients", "2"],
        "'empty' has 0 blocks",
    ),
    "a model that is no causal one": ([*QUICK, "--model", "llm:t5"], "cannot load the language"),
    "a damaged model": ([*QUICK, "--model", "llm:damaged"], "cannot load the language model"),
    "a damaged GGUF file": ([*QUICK, "--model", "llm:damaged.gguf"], "cannot load the language"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_input_is_refused_in_one_line(case, cwd, capsys):
    write_unusable(cwd)
    capsys.readouterr()
    words, reason = REFUSED[case]
    assert main(["run", *words, "--out", "out"]) == 2
    said = capsys.readouterr().err.strip()
    assert reason in said
    assert "\n" not in said
