"""Refused flags and configuration files: exit code 2, one line, nothing written."""

import pytest
from commands import refused

from fedsift.algorithms import METHODS
from fedsift.cli.entry import main
from fedsift.data import DATASETS
from fedsift.models import MODELS


def test_an_interruption_ends_with_130_and_no_traceback(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedsift.cli.entry.app", interrupted)
    assert main(["run"]) == 130
    assert capsys.readouterr().err == ""


def test_a_bug_is_not_disguised(monkeypatch):
    def fail(*_, **__):
        raise KeyError("a bug")

    monkeypatch.setattr("fedsift.cli.entry.app", fail)
    with pytest.raises(KeyError):
        main(["run"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["run", "sift"], "like this: --algorithm sift\n"),
        (["compare", "fedavg", "sift"], "like this: --algorithms fedadam-ssm,sift\n"),
        (["bounds", "sift"], "argument (sift)\n"),
    ],
)
def test_algorithms_without_an_option_are_explained(words, hint, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(hint)


UNKNOWN = {
    "command": (["rnu"], "'run'"),
    "data set": (["run", "--dataset", "cifar10"], "'cifar-10'"),
    "algorithm": (["run", "--algorithm", "fedadam_sm"], "'fedadam-ssm'"),
    "model": (["run", "--model", "vgg-11"], "'vgg11'"),
    "data set to get": (["data", "get", "fashionmnist"], "'fashion-mnist'"),
    "model to time": (["bench", "--models", "resnet"], "'resnet18'"),
    "algorithm to compare": (["compare", "--algorithms", "sfit", "--target", "0.9"], "'sift'"),
}


@pytest.mark.parametrize(("words", "suggestion"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_name_gets_one_suggestion(words, suggestion, cwd, capsys):
    refused(words, capsys, f"id you mean {suggestion}?")
    main(words)
    assert capsys.readouterr().err.lower().count("did you mean") == 1


LONG = "x" * 300


BAD_FLAGS = {
    "unknown algorithm": (["--algorithm", "adam"], ["'adam'", *METHODS]),
    "unknown dataset": (["--dataset", "mnist"], ["'mnist'", *DATASETS]),
    "unknown model": (["--model", "mlp"], ["'mlp'", *MODELS]),
    "a model for other data": (["--model", "cnn"], ["1x28x28", "1x8x8", "small-cnn"]),
    "unknown partition": (["--partition", "sorted"], ["'sorted'", "iid", "dirichlet"]),
    "unknown device": (["--device", "tpu"], ["'tpu'", "auto", "cpu", "cuda"]),
    "density 0": (["--density", "0"], ["density", "(0, 1]"]),
    "density 1.5": (["--density", "1.5"], ["density", "(0, 1]", "1.5"]),
    "density nan": (["--density", "nan"], ["density", "(0, 1]", "nan"]),
    "lr negative": (["--lr", "-0.1"], ["lr", "positive"]),
    "lr infinite": (["--lr", "inf"], ["lr", "positive number"]),
    "lr not a number": (["--lr", "fast"], ["lr", "positive number", "'fast'"]),
    "lr not a schedule": (["--lr", "exp(1)"], ["lr", "unknown schedule 'exp'"]),
    "lr below 0 in a schedule": (["--lr", "constant(-1)"], ["lr", "got -1.0 in round 1"]),
    "beta1 1": (["--beta1", "1"], ["beta1", "[0, 1)"]),
    "eps 0": (["--eps", "0"], ["eps", "positive"]),
    "local-steps 0": (["--local-steps", "0"], ["local-steps", "at least 1"]),
    "more clients than samples": (["--clients", "1439"], ["1439", "between 1 and 1438"]),
    "no clients": (["--clients", "0"], ["between 1 and 1438"]),
    "rounds 0": (["--rounds", "0"], ["rounds", "at least 1"]),
    "half a round": (["--rounds", "1.5"], ["--rounds", "integer"]),
    "batch-size negative": (["--batch-size", "-1"], ["batch-size", "at least 1"]),
    "participation 0": (["--participation", "0"], ["participation", "(0, 1]"]),
    "participation 2": (["--participation", "2"], ["participation", "(0, 1]"]),
    "participation nan": (["--participation", "nan"], ["participation", "(0, 1]"]),
    "dropout 1": (["--dropout", "1"], ["dropout", "[0, 1)"]),
    "dropout negative": (["--dropout", "-0.1"], ["dropout", "[0, 1)"]),
    "min-clients above clients": (["--min-clients", "4"], ["min-clients", "cohort's 3"]),
    "unknown wire": (["--wire", "radio"], ["'radio'", "count", "real"]),
    "seed negative": (["--seed", "-1"], ["seed", "at least 0"]),
    "theta 0": (["--partition", "dirichlet", "--theta", "0"], ["theta", "positive"]),
    "theta infinite": (["--partition", "dirichlet", "--theta", "inf"], ["theta", "positive"]),
    "theta where it does nothing": (["--theta", "5"], ["theta", "--partition dirichlet"]),
    "an empty folder name": (["--out", ""], ["--out", "empty"]),
    "an empty data folder": (["--data-dir", ""], ["--data-dir", "empty"]),
    "bits 9": (["--algorithm", "efficient-adam", "--bits", "9"], ["bits", "2 to 8"]),
    "a setting the algorithm has not": (
        ["--algorithm", "fedadam", "--density", "0.1"],
        ["fedadam", "'density'", "local-steps", "lr"],
    ),
    "unknown flag": (["--densty", "0.1"], ["--densty", "--density"]),
    "a flag without its value": (["--rounds"], ["--rounds"]),
    "missing config file": (["--config", "none.toml"], ["none.toml"]),
    "a folder as config file": (["--config", "."], ["."]),
    "a folder name that is too long": (["--out", LONG], [LONG, "long"]),
}


@pytest.mark.parametrize(("words", "phrases"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_a_bad_flag_is_refused_and_nothing_is_written(words, phrases, cwd, capsys):
    refused(["run", "--clients", "3", "--rounds", "1", *words], capsys, *phrases)
    assert list(cwd.iterdir()) == []


BAD_CONFIGS = {
    "a key spelt in two odd ways": ('"min-clients_" = 1\n"min_clients-" = 2', ["the same key"]),
    "invalid TOML": ("rounds = = 3", ["a.toml", "line 1"]),
    "not even text": (b"\xff\xfe\x00", ["a.toml"]),
    "unknown key": ("round = 3", ["'round'", "rounds", "density"]),
    "unknown section": ("[federation]\nrounds = 3", ["'federation'", "rounds"]),
    "settings is no key": ("settings = {lr = 0.1}", ["'settings'"]),
    "a word for a whole number": ('rounds = "ten"', ["rounds", "whole number", "'ten'"]),
    "a fraction for a whole number": ("clients = 2.5", ["clients", "whole number"]),
    "true for a whole number": ("clients = true", ["clients", "whole number"]),
    "a number for a name": ("dataset = 3", ["dataset", "a string"]),
    "a number for true or false": ("tensorboard = 1", ["tensorboard", "true or false"]),
    "a word for a number": ('lr = "fast"', ["lr", "positive number", "'fast'"]),
    "a list for a number": ("density = [0.1]", ["density", "(0, 1]"]),
    "a list for the algorithm": ('algorithm = ["fedadam"]', ["algorithm", "a string"]),
    "true for a number": ("lr = true", ["lr", "positive number"]),
    "a float for local-steps": ("local-steps = 2.0", ["local-steps", "whole number"]),
    "infinity for local-steps": ("local-steps = inf", ["local-steps", "whole number"]),
    "nan for local-steps": ("local-steps = nan", ["local-steps", "whole number"]),
    "nan for density": ("density = nan", ["density", "(0, 1]"]),
    "a number for a folder": ("out = 5", ["out must be a string", "5"]),
    "a number for the data folder": ("data-dir = 5", ["data-dir must be a string"]),
    "an empty folder name": ('out = ""', ["empty"]),
    "a key in both spellings": ("local_steps = 1\nlocal-steps = 2", ["'local_steps'", "same key"]),
}


@pytest.mark.parametrize(("text", "phrases"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_bad_config_file_is_refused_and_nothing_is_written(text, phrases, cwd, capsys):
    content = text if isinstance(text, bytes) else text.encode()
    (cwd / "a.toml").write_bytes(content)
    refused(["run", "--config", "a.toml"], capsys, *phrases)
    assert [path.name for path in cwd.iterdir()] == ["a.toml"]
