"""The results of language models, computed from histories that are written by hand."""

import csv
import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "reproduce" / "llm" / "results.py"


def record(number, perplexity, megabytes, **more):
    """A line of metrics.jsonl; one without a perplexity was not evaluated."""
    return {
        "round": number, "accuracy": None, "loss": perplexity and perplexity / 10,
        "perplexity": perplexity, "uplink_bytes": 1e6 * megabytes,
        "downlink_bytes": 2e6 * megabytes, **more,
    }  # fmt: skip


@pytest.fixture
def script():
    """The script, as a module."""
    spec = spec_from_file_location("llm_results", SCRIPT)
    module = module_from_spec(spec)
    sys.modules["llm_results"] = module
    yield spec.loader.exec_module(module) or module
    del sys.modules["llm_results"]


def write_run(folder, validation, losses):
    """Write a run that ends with this loss on the validation data."""
    folder.mkdir(parents=True)
    clients = {f"client_perplexity_{name}": 9.0 for name in ("mean", "worst", "p90", "std")}
    lines = [record(0, 50.0, 0, validation_loss=5.0, **clients)]
    for number, loss in enumerate(losses, 1):
        lines.append(record(number, 10 * loss, number, validation_loss=validation, **clients))
    lines.append(record(len(losses) + 1, None, 99))  # not evaluated
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text('{"environment": {"commit": "abc"}}')


def test_settings_are_chosen_on_the_validation_data_alone(script, tmp_path):
    runs = tmp_path / "runs" / "sotu"
    write_run(runs / "fedavg-adam" / "lr-0.001-eps-1e-12" / "seed-0", 3.0, [3.6, 3.4])
    write_run(runs / "sift" / "lr-0.003-eps-1e-12" / "seed-0", 3.2, [3.1, 3.0])  # best on the test
    write_run(runs / "sift" / "lr-0.001-eps-1e-12" / "seed-0", 2.9, [3.5, 3.4])
    write_run(runs / "sift" / "lr-0.001-eps-1e-12" / "seed-1", 2.9, [3.4, 3.3])
    (tmp_path / "results").mkdir()
    script.main(str(tmp_path / "runs"), str(tmp_path / "results"))
    with (tmp_path / "results" / "llm-comparison.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert (rows["sift"]["lr"], rows["sift"]["eps"], rows["sift"]["seeds"]) == (
        "0.001",
        "1e-12",
        "2",
    )
    assert float(rows["sift"]["target"]) == 3.4  # of federated averaging
    assert float(rows["sift"]["mb_up_to_target"]) == 1.5  # in rounds 2 and 1, a MB each
    assert float(rows["sift"]["mb_both_to_target"]) == 4.5
    assert float(rows["sift"]["loss_at_1_mb_up"]) == pytest.approx(3.45)
    assert (tmp_path / "results" / "llm-sotu.png").read_bytes().startswith(b"\x89PNG")
