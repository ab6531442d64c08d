"""Write the fuzzer's seeds: one small frame body per coder and kind of part."""

from pathlib import Path

import torch
from check import LAYOUT

from fedsift.codec import (
    Float,
    Integer,
    Linear,
    Log,
    Means,
    Sign,
    Spec,
    Update,
    dense,
    encode,
    sparse,
)
from fedsift.selection.masks import top_k

CORPUS = Path(__file__).parent / "corpus"
CODERS = {
    "float32": Float("float32"), "bfloat16": Float("bfloat16"), "float16": Float("float16"),
    "float64": Float("float64"), "int8": Linear(8), "int4": Linear(4), "int2": Linear(2),
    "int6-whole": Linear(6, block=None), "sign": Sign(), "log4": Log(4), "log8": Log(8),
    "whole4": Integer(4), "means": Means(),
}  # fmt: skip


def main() -> None:
    """Write every seed."""
    CORPUS.mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, LAYOUT.d, generator=draw)
    spec = Spec(LAYOUT, "fedadam-ssm", round=3, client=1)
    for name, coder in CODERS.items():
        for k in (1, 40):
            chosen = {"w": coder, "m": coder, "v": coder}
            parts = sparse({"w": x, "m": x, "v": x.square()}, top_k(x, k), chosen)
            write(f"{name}-{k}", Update(parts, (64.0,)), spec)
    separate = [sparse({role: x}, top_k(x.roll(i), 9))[0] for i, role in enumerate("wmv")]
    write("separate", Update(tuple(separate), (2.0,)), spec)
    clustered = torch.zeros(1, LAYOUT.d, dtype=torch.bool)
    clustered[0, 100:400] = True
    write("clustered", Update(sparse({"w": x}, clustered, {"w": Sign()}), (1.0,)), spec)
    skewed = {"w": x.sign() + x / 9, "v": x.square().square()}
    for coders in ({"w": Linear(4), "v": Log(4)}, {"w": Linear(2), "v": Log(8)}):
        parts = sparse(skewed, top_k(x, 400), coders)
        write(f"entropy-{coders['v'].name}", Update(parts, (2.5,)), spec)
    write("dense-one-code", Update(dense({"w": torch.ones_like(x)}, Linear(4, None)), (1.0,)), spec)
    write("dense", Update(dense({"w": x}, Sign()), (1.0,)), spec)


def write(name: str, update: Update, spec: Spec) -> None:
    """Write the body of one frame, without the checksum."""
    (CORPUS / name).write_bytes(encode(update, spec)[:-8])


if __name__ == "__main__":
    main()
