"""A client's samples: arrays, nested dicts and tuples of arrays, or a torch ``Dataset``.

Inputs x and labels y are *trees*: a tensor, or nested dicts, tuples and lists of tensors whose
first axis is the sample. A dict is passed to the model as keyword arguments, ``model(**x)``, a
tuple or list as arguments, ``model(*x)``.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

Tree = Any
"""A tensor, or nested dicts, tuples and lists of tensors."""
Pair = tuple[Tree, Tree]
TensorPair = tuple[Tensor, Tensor]
SMALL_INTEGERS = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32
)  # fmt: skip


def map_tree(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply a function to the tensors of trees of the same structure.

    >>> map_tree(len, {"a": torch.zeros(2), "b": (torch.zeros(3),)})
    {'a': 2, 'b': (3,)}
    """
    first = trees[0]
    if isinstance(first, Tensor):
        return function(*trees)
    if isinstance(first, Mapping):
        return {key: map_tree(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple | list):
        return tuple(map_tree(function, *parts) for parts in zip(*trees, strict=True))
    return function(*trees)


def leaves_of(tree: Tree) -> list[Any]:
    """Return the tensors of a tree.

    >>> len(leaves_of(({"a": torch.zeros(2)}, torch.zeros(2))))
    2
    """
    found: list[Any] = []
    map_tree(found.append, tree)
    return found


def call_model(model: nn.Module, x: Tree) -> Any:
    """Return the model's output for a batch: ``model(x)``, ``model(**x)`` or ``model(*x)``.

    >>> call_model(nn.Bilinear(2, 3, 1), (torch.zeros(4, 2), torch.zeros(4, 3))).shape
    torch.Size([4, 1])
    """
    arguments, keywords = model_arguments(x)
    return model(*arguments, **keywords)


def model_arguments(x: Tree) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
    """Return the positional and the keyword arguments that a batch is for a model."""
    if isinstance(x, dict):
        return (), x
    return (x if isinstance(x, tuple) else (x,)), {}


def num_samples(tree: Tree) -> int:
    """Return the number of samples in a tree.

    >>> num_samples({"input_ids": torch.zeros(5, 7)})
    5
    """
    return len(leaves_of(tree)[0])


def sample_shapes(tree: Tree) -> tuple[tuple[int, ...], ...]:
    """Return the shape of one sample in each tensor of a tree.

    >>> sample_shapes((torch.zeros(5, 7), torch.zeros(5)))
    ((7,), ())
    """
    return tuple(tuple(leaf.shape[1:]) for leaf in leaves_of(tree))


def select_rows(tree: Tree, rows: Tensor) -> Tree:
    """Return the given samples of a tree."""
    return map_tree(lambda x: x.index_select(0, rows.to(x.device)), tree)


@dataclass(frozen=True)
class DatasetItems:
    """A map-style ``Dataset`` of pairs (x, y), whose items are fetched at every use.

    ``name`` says in errors whose data this is. Samples of float64 are converted to ``dtype``.
    """

    name: str
    dataset: Any
    dtype: torch.dtype
    device: torch.device

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, rows: Sequence[int], seed: int) -> Pair:
        """Fetch and collate items, on the CPU. All global random generators are seeded for it."""
        with restored_random():
            return self.fetch_seeded(rows, seed)

    def fetch_seeded(self, rows: Sequence[int], seed: int) -> Pair:
        """Do the same, but leave the generators as they are afterwards."""
        seed_generators(seed)
        try:
            x, y = collate(self._items(rows))
        except Exception as problem:  # the user's Dataset may raise anything
            reason = next(iter(str(problem).strip().splitlines()), "")
            raise ValueError(
                f"the Dataset of {self.name} fails: {type(problem).__name__}: {reason}"
            ) from problem
        return convert_inputs(x, self.dtype), convert_labels(y, self.dtype)

    def fetch_to_device(self, rows: Sequence[int], seed: int) -> Pair:
        """Fetch and collate items, and move them to the device."""
        x, y = self.fetch(rows, seed)
        return to_device(x, self.device), to_device(y, self.device)

    def _items(self, rows: Sequence[int]) -> list[Any]:
        """Fetch items, all at once if the Dataset can."""
        if hasattr(self.dataset, "__getitems__"):
            items = list(self.dataset.__getitems__(rows))
        else:
            items = [self.dataset[row] for row in rows]
        if not isinstance(items[0], tuple | list) or len(items[0]) != 2:
            raise TypeError(f"its items must be pairs (x, y), got {type_names(items[0])}")
        return items


def collate(items: Sequence[Any]) -> Pair:
    """Return a batch of items (x, y): what PyTorch's ``default_collate`` returns, but faster.

    >>> collate([(np.zeros(2, np.float32), 1), (np.ones(2, np.float32), 0)])
    (tensor([[0., 0.],
            [1., 1.]]), tensor([1, 0]))
    """
    x, y = zip(*items, strict=True)
    return stacked(x), stacked(y)


def stacked(parts: Sequence[Any]) -> Tree:
    """Return tensors, arrays, numbers or trees of them with a first axis of samples."""
    if type(parts[0]) is Tensor:
        return torch.stack(cast(tuple[Tensor, ...], parts))
    is_array = type(parts[0]) is np.ndarray and parts[0].dtype.kind in "biuf"
    if is_array or isinstance(parts[0], np.integer | np.floating | int | float):
        return torch.from_numpy(np.array(parts))  # np.stack takes twice as long
    return default_collate(list(parts))


Data = tuple[Any, Any] | DatasetItems
"""A client's samples: a pair of trees (x, y), or the items of a Dataset."""


def size_of(data: Data) -> int:
    """Return the number of samples.

    >>> size_of((torch.zeros(3, 2), torch.zeros(3)))
    3
    """
    return len(data) if isinstance(data, DatasetItems) else num_samples(data[1])


def device_of(data: Data) -> torch.device:
    """Return the device of the batches."""
    if isinstance(data, DatasetItems):
        return data.device
    device: torch.device = leaves_of(data)[0].device
    return device


def first_samples(data: Data, number: int = 2) -> Pair:
    """Return the first samples as a pair of trees."""
    if isinstance(data, DatasetItems):
        return data.fetch_to_device(range(min(number, len(data))), seed=0)
    x, y = data
    return map_tree(lambda t: t[:number], x), map_tree(lambda t: t[:number], y)


def pair_of(data: Data) -> Pair:
    """Return data that is known to be a pair of trees."""
    assert not isinstance(data, DatasetItems)
    return data


def require_tensors(data: Data) -> TensorPair:
    """Return data as a pair of tensors; raise ValueError for any other format."""
    if isinstance(data, tuple | list) and all(isinstance(part, Tensor) for part in data):
        return data[0], data[1]
    raise ValueError("this needs each client's data as a pair of tensors (x, y)")


def as_data(name: str, given: Any, device: str | torch.device, dtype: torch.dtype) -> Data:
    """Check a user's data, and convert it to tensors on the device or to Dataset items.

    Arrays are not copied if possible. float64 becomes ``dtype``, and small integers in labels
    become int64. A ``TensorDataset``, or a subset of one, becomes its tensors.
    """
    given = plain_tensors(given)
    if is_dataset(given):
        items = DatasetItems(name, given, dtype, torch.device(device))
        check_size(name, items)
        return items
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(
            f"{name} must be a pair (x, y) of tensors or NumPy arrays, or a torch Dataset, "
            f"got {type_names(given)}"
        )
    x, y = (map_tree(lambda leaf: as_tensor(name, leaf), part) for part in given)
    check_lengths(name, x, y)
    x, y = convert_inputs(x, dtype), convert_labels(y, dtype)
    return to_device(x, device), to_device(y, device)


def plain_tensors(given: Any) -> Any:
    """Return the tensors of a ``TensorDataset`` or of a subset of one; other data as it is.

    >>> from torch.utils.data import Subset, TensorDataset
    >>> data = TensorDataset(torch.arange(3.0), torch.arange(3))
    >>> [part.tolist() for part in plain_tensors(Subset(data, [2, 0]))]
    [[2.0, 0.0], [2, 0]]
    """
    if type(given) is TensorDataset:
        return given.tensors
    if type(given) is Subset:
        whole = plain_tensors(given.dataset)
        if whole is not given.dataset:
            rows = torch.as_tensor(given.indices)
            return tuple(select_rows(part, rows) for part in whole)
    return given


def is_dataset(given: Any) -> bool:
    """Whether data is a map-style torch ``Dataset`` or behaves like one.

    >>> is_dataset(torch.zeros(2)), is_dataset(Dataset())
    (False, True)
    """
    if isinstance(given, IterableDataset):
        raise ValueError("an IterableDataset has no numbered items: use a map-style Dataset")
    if isinstance(given, Dataset):
        return True
    if isinstance(given, Tensor | np.ndarray | Mapping | Sequence):
        return False
    return hasattr(given, "__getitem__") and hasattr(given, "__len__")


def as_tensor(name: str, leaf: Any) -> Tensor:
    """Return an array as a tensor that shares its memory, if possible."""
    if isinstance(leaf, Tensor):
        return leaf
    if not isinstance(leaf, np.ndarray):
        hint = ": convert it with .to_numpy()" if hasattr(leaf, "to_numpy") else ""
        raise ValueError(
            f"{name} must consist of tensors or NumPy arrays, got {type_names(leaf)}{hint}"
        )
    try:
        with warnings.catch_warnings():  # data is never written, so read-only memory is fine
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(leaf if min(leaf.strides, default=0) >= 0 else leaf.copy())
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{name} has an array of type {leaf.dtype}: {problem}") from None


def convert_inputs(x: Tree, dtype: torch.dtype) -> Tree:
    """Return inputs with float64 converted to the model's dtype."""
    return map_tree(lambda t: t.to(dtype) if t.dtype == torch.float64 else t, x)


def convert_labels(y: Tree, dtype: torch.dtype) -> Tree:
    """Return labels with small integers as int64, and float64 in the model's dtype.

    >>> convert_labels(torch.tensor([1], dtype=torch.int32), torch.float32).dtype
    torch.int64
    """
    return map_tree(
        lambda t: t.long() if t.dtype in SMALL_INTEGERS else convert_inputs(t, dtype), y
    )


def to_device(tree: Tree, device: str | torch.device) -> Tree:
    """Return a tree on a device."""
    return map_tree(lambda t: t.to(device), tree)


def check_lengths(name: str, x: Tree, y: Tree) -> None:
    """Raise ValueError unless inputs and labels have the same number of samples, at least one."""
    sizes = [[len(leaf) if leaf.dim() else -1 for leaf in leaves_of(part)] for part in (x, y)]
    if not all(sizes) or -1 in (flat := [size for part in sizes for size in part]):
        raise ValueError(f"{name} needs at least one array in x and in y, with an axis of samples")
    if len(set(sizes[0])) > 1:
        raise ValueError(f"the inputs of {name} have different numbers of samples: {sizes[0]}")
    if len(set(flat)) > 1:
        raise ValueError(f"{name} has {sizes[0][0]} samples and {sizes[1][0]} labels")
    if not flat[0]:
        raise ValueError(f"{name} has no samples")


def check_size(name: str, items: DatasetItems) -> None:
    """Raise ValueError unless a Dataset has a length, and at least one item."""
    try:
        size = len(items)
    except (TypeError, NotImplementedError):
        raise ValueError(f"the Dataset of {name} has no length: define __len__") from None
    if not size:
        raise ValueError(f"{name} has no samples")


def type_names(x: object) -> str:
    """Return the type of x and, for a tuple or list, of its elements.

    >>> type_names((1, [2.0]))
    '(int, (float))'
    """
    inner = ", ".join(type_names(each) for each in x) if isinstance(x, tuple | list) else ""
    return f"({inner})" if inner else type(x).__name__


@contextmanager
def seeded_random(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python inside the block, then restore them.

    >>> with seeded_random(1):
    ...     x = torch.rand(1), np.random.rand(), random.random()
    >>> with seeded_random(1):
    ...     assert x == (torch.rand(1), np.random.rand(), random.random())
    """
    with restored_random(device):
        seed_generators(seed, device)
        yield


@contextmanager
def restored_random(device: torch.device | None = None) -> Iterator[None]:
    """Restore the global generators of torch, NumPy and Python after the block."""
    with restored_python_random(), restored_torch_random(device):
        yield


@contextmanager
def restored_python_random() -> Iterator[None]:
    """Restore the global generators of NumPy and Python after the block."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def restored_torch_random(device: torch.device | None = None) -> Iterator[None]:
    """Restore the global generators of torch after the block: a fiftieth of the time of both."""
    on_gpu = torch.cuda.get_rng_state(device) if device and is_gpu(device) else None
    on_cpu = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(on_cpu)
        if on_gpu is not None and device:
            torch.cuda.set_rng_state(on_gpu, device)


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of torch, NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    if is_gpu(device):
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def is_gpu(device: torch.device | None) -> bool:
    """Whether a device is a GPU.

    >>> is_gpu(None), is_gpu(torch.device("cuda:0"))
    (False, True)
    """
    return device is not None and device.type == "cuda"
