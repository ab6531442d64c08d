import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest

from fedsift.advise import calibration
from fedsift.cli import main
from fedsift.theory.deviation import deviation_coefficients


def run(*words):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(words))
    output = out.getvalue() + err.getvalue()
    return SimpleNamespace(exit_code=code, output=output, stdout=out.getvalue())


def test_bounds_prints_every_theorem():
    done = run("bounds")
    assert done.exit_code == 0, done.output
    for word in ("Theorem 1", "Proposition 1", "Theorem 2", "Theorem 3", "printed", "vacuous"):
        assert word in done.output


def test_bounds_as_json_match_the_functions():
    done = run("bounds", "--json", "--local-steps", "7", "--d", "100", "--rho", "2")
    found = json.loads(done.output)
    wanted = deviation_coefficients(
        l=7, d=100, beta1=0.9, beta2=0.999, eps=1e-6, lr=1e-3, rho=2.0, grad_bound=9.8,
        sigma_l=14.0, sigma_g=1.9, batch=64,
    )  # fmt: skip
    assert found["theorem_1"]["log_gamma"] == wanted.log_gamma
    assert found["theorem_2"]["vacuous"] is True
    assert found["theorem_1"]["vacuous"] is True


def test_the_logarithm_of_zero_is_null():
    found = json.loads(run("bounds", "--json", "--beta1", "0").output)
    assert found["theorem_1"]["log_lambda"] is None


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--beta2", "1"), ("--eps", "0"), ("--local-steps", "0"), ("--lr", "0"), ("--gap", "-1"),
        ("--grad-bound", "nan"), ("--mu", "0"), ("--density", "2"), ("--d", "9" * 400),
    ],
)  # fmt: skip
def test_bad_constants_give_a_one_line_error(flag, value):
    done = run("bounds", flag, value)
    assert done.exit_code == 2
    assert flag.removeprefix("--") in done.output


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--grad-bound", "1e80"), ("--local-steps", "1" + "0" * 200), ("--d", "1" + "0" * 300)],
)
def test_a_bound_that_overflows_gives_an_error(flag, value):
    done = run("bounds", flag, value)
    assert done.exit_code == 2
    assert "vacuous" in done.output


def test_a_hundred_million_local_steps_are_fast():
    found = json.loads(run("bounds", "--json", "--local-steps", "100000000").output)
    assert found["sharper"]["log_gamma"] > 1e6
    assert found["sharper"]["vacuous"] is True


@pytest.fixture
def models(tmp_path, monkeypatch):
    """The name of a module with small models."""
    (tmp_path / "advised_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "advised_models"


MODELS = """
from torch import nn

def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def five_classes():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
"""


def test_advise_prints_advice_and_json(models, monkeypatch):
    monkeypatch.setattr(calibration, "MAX_ROUNDS", 2)
    model = f"{models}:linear"
    words = ("advise", "--model", model, "--clients", "2", "--batch-size", "4",
             "--calibration-rounds", "1")  # fmt: skip
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found["choice"]) == {"algorithm", "local_steps", "lr", "density"}
    assert found["command"].startswith(f"fedsift run --model {model} --clients 2 ")
    assert found["predicted"] is None or math.isfinite(found["predicted"])
    shown = run(*words)
    assert "learning rate" in shown.stdout
    assert "next: fedsift run" in shown.stdout


@pytest.mark.parametrize(
    "words", [("--dataset", "nothing"), ("--budget-mbit", "0"), ("--target", "2"), ("--model", "x")]
)
def test_bad_advice_options_give_a_one_line_error(words):
    done = run("advise", *words)
    assert done.exit_code == 2
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--sigma-l", "1e200"), ("--sigma-g", "1e160"), ("--gap", "1e-320"), ("--beta2", "5e-324")],
)
def test_extreme_constants_give_numbers_or_a_one_line_error(flag, value):
    done = run("bounds", flag, value)
    assert done.exit_code == 0 or done.output.startswith("fedsift: ")


def test_a_model_that_run_refuses_is_refused(models):
    done = run("advise", "--clients", "3", "--model", f"{models}:five_classes")
    assert done.exit_code == 2
    assert "labels from 0 to 9" in " ".join(done.output.split())
