"""Count what a local step of Transformers launches on a GPU, and the bytes that it moves.

    python benchmarks/traffic.py vit-tiny char-transformer --compile

No GPU is needed: nothing is computed. The step of ``fedsift bench --device cuda --precision bf16``
runs on tensors without data, and each operation and Triton kernel is counted with the size of the
tensors that it reads and writes. The milliseconds are for a round at the given bandwidth, as if
every byte came from memory once and nothing else took time. Attention of PyTorch is counted as its
inputs and outputs.

With ``--compile``, Triton also compiles each kernel for an H100 or H200, as it is launched, and the
table shows its registers per thread, bytes spilled per thread and shared memory per block.
"""

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedsift.cli.timed_models import CLIENTS, work_for
from fedsift.cli.timings import federation_for
from fedsift.engine.gpu.arithmetic import arithmetic
from fedsift.engine.gpu.one_batch import backend
from fedsift.engine.gpu.one_batch.gradients import OneBatchGradients
from fedsift.engine.gpu.stacked_task import StackedTask
from fedsift.task.samples import map_tree

BANDWIDTH = 4.0e12
"""Bytes per second that a copy on an H200 reaches."""
FREE = ("empty", "new_empty", "detach", "_unsafe_view", "is_same_size", "lift_fresh", "prim::")
"""Operations that launch nothing."""
ROOT = "fedsift.engine.gpu"
MODULES = (f"{ROOT}.triton", f"{ROOT}.one_batch.triton", f"{ROOT}.one_batch.triton_blocks")
CAPABILITY, WARP = 90, 32
ADAM_BYTES = 4 * 7 + 2
"""Per parameter: W, M and V read and written, the gradient read, and W written in bfloat16."""
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int8: "*i8", torch.bool: "*i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")


class Counts:
    """Launches and bytes by operation, and the distinct launches of Triton kernels."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.kernels: dict[str, Launch] = {}

    def add(self, name: str, tensors: list[Tensor]) -> None:
        """Count a launch that reads or writes each of the tensors once."""
        self.launches[name] += 1
        self.bytes[name] += sum(map(size_of, tensors))


def size_of(x: Tensor) -> int:
    """Return the bytes of a tensor; what an expanded one repeats counts once."""
    return min(x.nbytes, x.untyped_storage().nbytes())


class CountOperations(TorchDispatchMode):
    """Counts PyTorch's operations, except those that return views."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        if not func.is_view and not name.startswith(FREE):
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            made = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
            self.counts.add(name, given + made)
        return found


class Launch:
    """A launch of a Triton kernel: its arguments, by which it is compiled."""

    def __init__(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.kernel = kernel
        self.options = {name: named[name] for name in OPTIONS if name in named}
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        self.values = {name: values[name] for name in kernel.arg_names}
        self.constants = {n for n, p in self._parameters() if p.is_constexpr}
        self.constants |= {n for n, x in self.values.items() if x is None or is_one(x)}

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        return ((p.name, p) for p in self.kernel.params)

    @property
    def signature(self) -> dict[str, str]:
        """The types of the arguments as Triton names them."""
        return {
            name: "constexpr" if name in self.constants else type_of(x)
            for name, x in self.values.items()
        }

    @property
    def key(self) -> str:
        """What distinguishes compiled forms of a kernel, in one line."""
        shown = {n: x for n, x in self.values.items() if n in self.constants and x is not None}
        types = {t for t in self.signature.values() if t.startswith("*")}
        return f"{self.kernel.__name__} {shown} {sorted(types)} {self.options}"

    def compile(self) -> str:
        """Compile for an H100 and describe what the kernel needs."""
        from triton import compile
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = list(self.values)
        even = {
            (names.index(n),): [["tt.divisibility", 16]]
            for n, x in self.values.items()
            if n not in self.constants and is_even(x)
        }
        constants = {(names.index(n),): self.values[n] for n in self.constants}
        source = ASTSource(self.kernel, self.signature, constants, even)
        built = compile(source, GPUTarget("cuda", CAPABILITY, WARP), self.options)
        shared = f"{built.metadata.shared} B shared"
        return f"{resources(built.asm['cubin'])}, {shared}"


def is_one(x: object) -> bool:
    """Whether Triton treats an argument as a constant because it is 1."""
    return type(x) is int and x == 1


def is_even(x: object) -> bool:
    """Whether a pointer or number is divisible by 16, so that loads are vectorized."""
    return x.storage_offset() % 8 == 0 if isinstance(x, Tensor) else type(x) is int and x % 16 == 0


def type_of(x: object) -> str:
    """Return an argument's type as Triton names it."""
    if isinstance(x, Tensor):
        return TYPES[x.dtype]
    return "fp32" if isinstance(x, float) else "i32"


def resources(cubin: bytes) -> str:
    """Return the registers and spilled bytes of a compiled kernel."""
    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [str(nvidia.cuobjdump.path), "-res-usage", file.name]
        text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return f"{found['REG']} registers, {found['STACK']} B spilled"


class CountedKernel:
    """Stands for a Triton kernel: counts it and computes nothing."""

    def __init__(self, kernel: Any, counts: Counts) -> None:
        self.kernel, self.counts = kernel, counts

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            name = f"{self.kernel.__name__} (Triton)"
            self.counts.add(name, [x for x in args if isinstance(x, Tensor)])
            launched = Launch(self.kernel, args, named)
            self.counts.kernels.setdefault(launched.key, launched)

        return launch


def counted_kernels(counts: Counts) -> ExitStack:
    """Replace all Triton kernels until the context is left."""
    stack = ExitStack()
    for path in MODULES:
        module = import_module(path)
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            kernel = CountedKernel(getattr(module, name), counts)
            stack.enter_context(patch.object(module, name, kernel))
    stack.enter_context(patch.object(backend, "can_use_triton", lambda x: True))
    return stack


def step_counts(name: str) -> Counts:
    """Count one step of all clients."""
    counts, work = Counts(), work_for(name)
    federation = federation_for(name, "cpu", "fp32")
    clients = federation.task.clients
    x, y = (torch.cat([c[n] for c in clients]) for n in (0, 1))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, counted_kernels(counts):
        x, y = map_tree(fake.from_tensor, (x, y))
        task = StackedTask(federation.task, x, y, "bf16")
        gradients = OneBatchGradients(task, CLIENTS)
        rows = torch.zeros(CLIENTS, work.batch, dtype=torch.int64)
        with arithmetic("bf16", torch.device("cpu")), CountOperations(counts):
            gradients.compute(rows)
    counts.launches["Adam"] = 1
    counts.bytes["Adam"] = federation.task.layout.d * CLIENTS * ADAM_BYTES
    return counts


def table(name: str, counts: Counts, bandwidth: float) -> str:
    """Describe the counts of a model, the largest first."""
    steps = work_for(name).steps
    lines = [f"{name}: {steps} steps per round", f"{'per step':44} launches      MB   ms/round"]
    for operation, moved in [*counts.bytes.most_common(), ("all", counts.bytes.total())]:
        launched = counts.launches[operation] or counts.launches.total()
        seconds = steps * moved / bandwidth
        lines.append(f"{operation:44} {launched:8} {moved / 1e6:7.0f} {1e3 * seconds:10.1f}")
    return "\n".join(lines)


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="bytes per second")
    parser.add_argument("--compile", action="store_true", help="compile the kernels")
    given = parser.parse_args()
    for name in given.models:
        counts = step_counts(name)
        print(table(name, counts, given.bandwidth), end="\n\n", flush=True)
        for launch in counts.kernels.values() if given.compile else ():
            print(f"{launch.key}\n    {launch.compile()}", flush=True)


if __name__ == "__main__":
    main()
