"""The time of a GPU after the last local step: mask, positions, values and encoded sizes.

    python benchmarks/selection.py cnn vgg11

20 clients of FedAdam-SSM at 5 %. First all results are compared with those of a CPU, bit for bit,
also with many ties and zeros. Then each part is timed, and all of them together; milliseconds are
medians.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fedsift.algorithms import fedadam_ssm
from fedsift.algorithms.method import Context, LocalUpdate
from fedsift.cli.timings import median_seconds
from fedsift.codec.frame import Spec, encoded_sizes
from fedsift.codec.update import Update, sparse
from fedsift.models import MODELS, build
from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment
from fedsift.selection.masks import num_kept, positions, top_k
from fedsift.vector import MOMENTS, Layout, State

CLIENTS, DENSITY, SEED = 20, 0.05, 0
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: 1e-3 * x,
    "many ties": lambda x: x.round(decimals=1),
    "mostly zeros": lambda x: x * (x.abs() > 2.5),
    "all equal": torch.ones_like,
}


def states(layout: Layout, w: Tensor, change: Callable[[Tensor], Tensor]) -> tuple[State, ...]:
    """The clients' states before training, one expanded row, and after it."""
    draw = torch.Generator().manual_seed(SEED)
    noise = torch.randn(CLIENTS, layout.d, generator=draw)
    rows = (w, 1e-4 * w.roll(1), 1e-8 * w.square())
    start = State.of(MOMENTS, (x.expand(CLIENTS, -1) for x in rows))
    moved = (x + change(noise.roll(n, -1)) for n, x in enumerate(start))
    return start, State.of(MOMENTS, moved)


def upload_of(layout: Layout, start: State, end: State) -> tuple[Update, list[int]]:
    """The clients' upload, and its size in bytes per client."""
    phase, clients = fedadam_ssm(density=DENSITY).phase(1), tuple(range(CLIENTS))
    parts, _ = phase.send(Context(layout, 1, SEED, clients), LocalUpdate(start, end), {})
    update = Update(parts, (64.0,) * CLIENTS)
    return update, encoded_sizes(update, [Spec(layout, "fedadam-ssm", 1, n) for n in clients])


def check(layout: Layout, w: Tensor, device: str) -> None:
    """Fail unless the device and the CPU agree on the whole upload."""
    for name, change in CHANGES.items():
        start, end = states(layout, w, change)
        ours, our_sizes = upload_of(layout, *moved_to(device, start, end))
        theirs, their_sizes = upload_of(layout, start, end)
        (our, their) = ours.parts[0], theirs.parts[0]
        assert torch.equal(our.indices.cpu(), their.indices), f"{name}: different coordinates"
        for role, coded in our.values.items():
            same = torch.equal(coded.restore().cpu(), their.values[role].restore())
            assert same, f"{name}: different values of {role}"
        assert our_sizes == their_sizes, f"{name}: different sizes"


def moved_to(device: str, start: State, end: State) -> tuple[State, State]:
    """The same states on a device; the start remains one expanded row."""
    moved_start = start.map(lambda x: x[0].to(device).expand(CLIENTS, -1))
    return moved_start, end.map(lambda x: x.to(device))


def milliseconds(layout: Layout, w: Tensor, device: str, repeats: int) -> dict[str, float]:
    """The time of each part, and of all together."""
    start, end = moved_to(device, *states(layout, w, CHANGES["noise"]))
    k = num_kept(DENSITY, layout.d)
    delta = end.w - start.w
    mask = top_k(delta, k)
    update, _ = upload_of(layout, start, end)
    specs = [Spec(layout, "fedadam-ssm", 1, n) for n in range(CLIENTS)]
    parts: dict[str, Callable[[], object]] = {
        "difference": lambda: end.w - start.w,
        "mask": lambda: top_k(delta, k),
        "positions": lambda: positions(mask, k),
        "positions and values": lambda: sparse(LocalUpdate(start, end).differences, mask, k=k),
        "bytes": lambda: encoded_sizes(update, specs),
        "all": lambda: upload_of(layout, start, end),
    }
    for work in parts.values():
        work()
    found = median_seconds(device, repeats, *parts.values())
    return {name: 1e3 * seconds for name, seconds in zip(parts, found, strict=True)} | {
        "kernels": kernels_of(parts["all"])
    }


def kernels_of(work: Callable[[], object]) -> int:
    """The number of kernels and copies that a function starts."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["cnn", "vgg11"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; use --device cpu to time the CPU")
    about = {"environment": environment(RunConfig(device=arguments.device)), "seed": SEED}
    results = {}
    for name in arguments.models:
        model = build(name, MODELS[name].shape, seed=SEED)
        layout, w = Layout.of(model), Layout.of(model).read(model)
        check(layout, w, arguments.device)
        results[name] = milliseconds(layout, w, arguments.device, arguments.repeats)
        times = ", ".join(f"{part} {value:.3g}" for part, value in results[name].items())
        print(f"{name}: identical to the CPU; {times}")
    if arguments.out:
        arguments.out.write_text(json.dumps({**about, "milliseconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
