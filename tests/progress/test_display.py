"""Where progress is shown: a bar in a notebook, one line per round where there is no terminal."""

import io
import re
import sys
from types import ModuleType, SimpleNamespace

import torch
from rich.console import Console
from torch import nn

import fedsift
from fedsift.progress import round_progress

RECORD = {
    "accuracy": 0.5, "loss": 0.25, "clients": 2, "uplink_bytes": 2e6, "downlink_bytes": 3e6,
    "seconds": 2.0,
}  # fmt: skip


def show_rounds(name, rounds, finished=0, **more):
    with round_progress(name, rounds, finished, **more) as show:
        for number in range(finished + 1, rounds + 1):
            show({"round": number, **RECORD})


def test_without_a_terminal_each_round_is_one_line_with_accuracy_bytes_and_time():
    file = io.StringIO()
    show_rounds("sift", 3, lines_to=file)
    lines = file.getvalue().splitlines()
    assert len(lines) == 3
    for number, line in enumerate(lines, start=1):
        assert line.startswith(f"sift round {number}/3 · accuracy 50.00 % · ")
        assert "2.00 MB up, 3.00 MB down per client" in line
        assert "2.0 s" in line
        assert "\x1b" not in line


def test_a_line_has_the_metrics_of_the_user(capsys):
    def mean_error(output, y):
        return (output - y).abs().mean()

    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    fedsift.simulate(
        nn.Linear(3, 1), [(x, x[:, :1])], (x, x[:, :1]), rounds=2, evaluate_every=2,
        loss=nn.functional.mse_loss, metrics={"error": mean_error},
        evaluate=lambda model: {f"n{number}": number for number in range(9)},
    )  # fmt: skip
    first, second = capsys.readouterr().err.splitlines()
    assert "error" not in first
    assert re.search(r" · loss \S+ · error 0\.\d+ · n0 0 · n1 1 · n2 2 · \S+ kB up, ", second)


def test_in_a_notebook_one_bar_is_updated_in_place(monkeypatch):
    shown = []

    def display(formats, raw, display_id=None):
        assert raw  # else IPython would show the dict
        shown.append(formats)
        return SimpleNamespace(update=display)

    module = ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("fedsift.progress.display.Console", NotebookConsole)
    show_rounds("<b>", 4, finished=2)
    html = [formats["text/html"] for formats in shown]
    assert len(html) == 3
    assert html[0] == '<progress value="2" max="4"></progress> &lt;b&gt;'
    assert html[-1].startswith('<progress value="4" max="4"></progress> &lt;b&gt; round 4/4')
    assert "accuracy 50.00 %" in html[-1]
    assert shown[-1]["text/plain"].startswith("<b> round 4/4 · accuracy 50.00 %")


class NotebookConsole(Console):
    """A console as it is in a notebook."""

    def __init__(self, **options):
        super().__init__(force_jupyter=True, **options)
