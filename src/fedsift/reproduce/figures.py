"""Draw the figures as PNG and SVG."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from fedsift.algorithms import find
from fedsift.reproduce.experiments import Experiment
from fedsift.reproduce.plan import PlannedRun
from fedsift.reproduce.results import Curve
from fedsift.reproduce.rival_results import TunedRuns
from fedsift.reproduce.updates import ROLE_NAMES, density_of

SETTINGS = {
    "iid": "IID",
    "noniid": "θ = 0.1",
    "theta-0.5": "θ = 0.5",
    "theta-1": "θ = 1",
}
TASKS = {
    "cnn-fashion-mnist": "CNN on Fashion-MNIST",
    "resnet18-svhn": "ResNet-18 on SVHN",
    "resnet18-cifar10": "ResNet-18 on CIFAR-10",
    "vgg11-cifar10": "VGG-11 on CIFAR-10",
    "cnn-500-clients": "CNN on Fashion-MNIST, 20 of 500 clients",
    "cnn-5000-clients": "CNN on Fashion-MNIST, 50 of 5,000 clients",
    "cnn-5-steps": "CNN on Fashion-MNIST, 5 local steps",
    "cnn-100-steps": "CNN on Fashion-MNIST, 100 local steps",
    "cnn-100-clients": "CNN on Fashion-MNIST, 100 clients",
    "vit-tiny-cifar10": "ViT-Tiny on CIFAR-10",
    "char-lm": "Transformer on characters",
}
SYMBOLS = {"local_steps": "L", "lr": "η", "density": "α"}
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "savefig.dpi": 150,
    "svg.hashsalt": "fedsift",  # makes the file reproducible
}
TRAFFIC = {
    "mibit": "uplink per client, Mibit (the paper's formula)",
    "megabytes": "uplink per client, MB (as sent)",
    "both": "uplink and downlink per client, MB (as sent)",
}


@contextmanager
def saved_figure(path: Path, title: str, columns: int = 1) -> Iterator[list[Axes]]:
    """Yield a row of axes, and save the figure as PNG and SVG afterwards."""
    with mpl.rc_context(STYLE):
        width = 5.4 * columns + 1.2 * (columns == 1)
        figure = Figure(figsize=(width, 4.2), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False, sharey=True)
        figure.suptitle(title, fontsize=11)
        yield list(axes[0])
        if columns == 1:
            figure.legend(loc="outside right center", fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path.with_suffix(".png"))
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def draw_curves(experiment: Experiment, curves: Sequence[Curve], path: Path) -> None:
    """Draw Figs. 2, 3, 5 to 8 or sift's: one task and setting, one curve per line."""
    run = curves[0].line[0].run
    with saved_figure(path, f"{experiment.title}: {name_of_data(run)}") as (axes,):
        styles = styles_of([curve.line[0].run.config.algorithm for curve in curves])
        for curve, style in zip(curves, styles, strict=True):
            _plot(axes, curve, experiment.x, _legend(experiment, curve.line[0].run), style)
        _label_x(axes, experiment.x, curves)
        axes.axhline(100 * run.target, color="0.4", ls=":", lw=1)
        axes.set_ylabel("test accuracy, %")


def name_of_data(run: PlannedRun) -> str:
    """Return the name of a run's model and data."""
    names = {"iid": "IID", "dirichlet": f"Dirichlet {run.config.theta:g}"}
    return f"{TASKS[run.task]}, {names.get(run.config.partition, 'by document')}"


def draw_rivals(experiment: Experiment, comparison: TunedRuns, path: Path) -> None:
    """Draw accuracy against the uplink and against both ways, for settings tuned for the target."""
    shown = [
        (entry, comparison.tests[label])
        for entry in comparison.entries
        if comparison.tests.get(label := entry.lines.get("task", ""))
    ]
    run = shown[0][1][0].run
    styles = styles_of([entry.method for entry, _ in shown])
    with saved_figure(path, f"{experiment.title}: {name_of_data(run)}", 2) as panels:
        for axes, x in zip(panels, ("megabytes", "both"), strict=True):
            for (entry, line), style in zip(shown, styles, strict=True):
                name = label_of(entry.method) + ("" if entry.is_tuned else ", not tuned")
                _plot(axes, Curve.of(line), x, name, style)
            _label_x(axes, x, [])
            axes.axhline(100 * run.target, color="0.4", ls=":", lw=1)
        panels[0].set_ylabel("test accuracy, %")
        panels[0].figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8
        )


def draw_settings(experiment: Experiment, curves: Sequence[Curve], path: Path) -> None:
    """Draw Fig. 4: one task, one panel per method, one curve per data distribution."""
    methods = list(dict.fromkeys(curve.line[0].run.label for curve in curves))
    title = f"{experiment.title}: {TASKS[curves[0].line[0].run.task]}"
    with saved_figure(path, title, len(methods)) as panels:
        for axes, method in zip(panels, methods, strict=True):
            selected = [curve for curve in curves if curve.line[0].run.label == method]
            for curve, style in zip(selected, styles_of([method] * len(selected)), strict=True):
                _plot(axes, curve, experiment.x, SETTINGS[curve.line[0].run.setting], style)
            _label_x(axes, experiment.x, selected)
            axes.set_title(label_of(method), fontsize=10)
            axes.set_xlim(0, min(curve.rounds[-1] for curve in selected))
        panels[0].set_ylabel("test accuracy, %")
        panels[-1].legend(loc="lower right")


def draw_updates(
    experiment: Experiment, task: str, measured: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Draw Fig. 1: the density of log10 of the updates' magnitudes."""
    with saved_figure(path, f"{experiment.title}: {TASKS[task]}, round {measured[0]['round']}") as (
        axes,
    ):
        for role, name in ROLE_NAMES.items():
            centers, density = density_of(measured, role)
            axes.plot(centers, density, label=f"log10 |{name}|")
            axes.fill_between(centers, density, alpha=0.15)
        axes.set(xlabel="log10 of the magnitude", ylabel="density", xlim=_span(measured))


def _span(measured: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    densities = [density_of(measured, role) for role in ROLE_NAMES]
    used = np.concatenate([centers[density > 1e-3] for centers, density in densities])
    return float(used.min()) - 0.5, float(used.max()) + 0.5


SWEEP = [mpl.colormaps["tab10"](i) for i in (3, 0, 2, 1, 4, 7, 5, 6, 8, 9)]
"""Colors of the curves of one method with different settings."""


def styles_of(methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return the color and line style of each curve, given its method.

    A method has its own color, and its further curves are dotted. If there is only one method,
    its curves differ in color.

    >>> [style["ls"] for style in styles_of(["fedsgd", "sparse-fedsgd", "fedsgd"])]
    ['-', '--', ':']
    """
    if len(set(methods)) == 1:
        return [{"color": SWEEP[n % len(SWEEP)], "ls": "-"} for n in range(len(methods))]
    styles = []
    for n, name in enumerate(methods):
        method, is_first = find(name), name not in methods[:n]
        undotted, dotted = ("--", "-.") if method.dashed else ("-", ":")
        color = method.color or SWEEP[n % len(SWEEP)]
        styles.append({"color": color, "ls": undotted if is_first else dotted})
    return styles


def label_of(method: str) -> str:
    """Return a method's label, with a subscript where it has one.

    >>> label_of("fedadam-ssm-m")
    'FedAdam-SSM$_M$'
    """
    return re.sub(r"_(.)", r"$_\1$", find(method).label)


def _plot(axes: Axes, curve: Curve, x: str, name: str, style: Mapping[str, Any]) -> None:
    n = len(axes.lines)
    xs = curve.rounds if x == "round" else getattr(curve, x)
    axes.plot(xs, [100 * a for a in curve.accuracy], label=name, zorder=3 - n / 100, **style)
    low, high = ([100 * a for a in edge] for edge in (curve.lowest, curve.highest))
    axes.fill_between(xs, low, high, color=style["color"], alpha=0.12, lw=0)


def _label_x(axes: Axes, x: str, curves: Sequence[Curve]) -> None:
    if x in TRAFFIC:
        axes.set(xscale="log", xlabel=TRAFFIC[x])
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:  # one-step methods have many more rounds than the others
        axes.set(xlabel="round", xlim=(0, median(curve.rounds[-1] for curve in curves)))


def _legend(experiment: Experiment, run: PlannedRun) -> str:
    swept = {key for line in experiment.lines for key in line if key in SYMBOLS}
    algorithms = {line["algorithm"] for line in experiment.lines}
    values = run.config.flat()
    if len(algorithms) == 1:
        return ", ".join(f"{SYMBOLS[key]} = {values[key]:g}" for key in swept)
    unusual = [key for key in SYMBOLS if f"{key}=" in run.label]
    settings = [f"{SYMBOLS[key]} = {values[key]:g}" for key in unusual]
    return ", ".join([label_of(run.config.algorithm), *settings])
