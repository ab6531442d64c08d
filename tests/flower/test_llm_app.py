"""The Flower app that fine-tunes a language model, with a tiny model and text of its nodes."""

import json
import tomllib
from pathlib import Path

import torch
from flwr.app import Context, RecordDict
from inline import InlineGrid, InlineNode

from fedsift import llm
from fedsift.flower import exchange

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-llm"
SMALL = {"num-server-rounds": 2, "num-clients": 2, "local-steps": 2, "batch-size": 2, "rank": 2}


def test_the_app_trains_adapters_on_the_text_of_its_nodes(tmp_path, monkeypatch):
    import peft

    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.0)
    from finetuning import dataset
    from finetuning.client_app import app as client
    from finetuning.server_app import app as server

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a rose is a rose is a rose " * 60)
    text = dataset.load_text(
        {"model": "tiny", "block-length": 64}, {"text": str(tmp_path / "texts")}, 0, 2
    )
    assert text.clients[0][0].shape == (23, 64)

    about = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    config = about["tool"]["flwr"]["app"]["config"] | SMALL | {"folder": str(tmp_path / "run")}
    grid = InlineGrid((InlineNode(client, n, 2) for n in range(2)), config)
    server(grid, Context(1, 1, {}, RecordDict(), config))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["evaluation"]["metrics"]["loss"] for line in lines]
    assert losses[1] < losses[0] < 5
    base = llm.load_model("tiny", lora=None).model
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")
    weights = [p for name, p in tuned.named_parameters() if "lora_B" in name]
    assert weights
    assert any(bool(p.abs().max() > 0) for p in weights)
    x = torch.zeros(1, 4, dtype=torch.int64)
    assert tuned(x).logits.shape == (1, 4, 96)
