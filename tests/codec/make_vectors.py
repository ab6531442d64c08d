"""Write the test vectors of the frame format: frames, and their contents as JSON.

    python tests/codec/make_vectors.py

Only a new version of the format may change an existing file.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from fedsift.codec import (
    Bit,
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
from fedsift.codec.header import read_header
from fedsift.vector import Layout

VECTORS = Path(__file__).parent / "vectors"
LAYOUT = Layout(("a", "b", "c"), ((12, 25), (70_000,), (200,)), torch.float32)
RUN, BASE = bytes(range(8)), bytes(range(8, 16))


def numbers(d: int) -> torch.Tensor:
    """Return values of both signs and many magnitudes, by integer arithmetic."""
    raw = (np.arange(d, dtype=np.int64) * 2654435761) % 65_521
    exact = (raw - 32_760) / 2.0 ** (8 + raw % 7)
    return torch.from_numpy(exact.astype(np.float32))[None]


def mask_of(indices: np.ndarray) -> torch.Tensor:
    mask = torch.zeros(1, LAYOUT.d, dtype=torch.bool)
    mask[0, torch.from_numpy(indices)] = True
    return mask


def cases() -> dict[str, Update]:
    x = numbers(LAYOUT.d)
    few = mask_of(np.array([0, 7, 299, 300, 35_000, 70_499]))
    spread = mask_of(np.arange(3, LAYOUT.d, 41))
    clustered = mask_of(np.concatenate([np.arange(310, 700), np.arange(20_000, 20_300, 3)]))
    most = mask_of(np.setdiff1d(np.arange(LAYOUT.d), np.arange(500, 1500, 7)))
    noise = np.frombuffer(hashlib.shake_128(b"fedsift").digest(LAYOUT.d // 8), np.uint8)
    half = mask_of(np.flatnonzero(np.unpackbits(noise)))
    triple = {"w": x, "m": x / 8, "v": x.square()}
    return {
        "ssm-float32": Update(sparse(triple, few), (64.0,)),
        "ssm-spread": Update(
            sparse(triple, spread, {"w": Float("bfloat16"), "m": Float("float16"), "v": Log(4)}),
            (64.0,),
        ),
        "clustered": Update(sparse({"w": x}, clustered, {"w": Linear(4)}), (1.0,)),
        "most": Update(sparse({"w": x}, most, {"w": Sign()}), (1.0,)),
        "bitmap": Update(sparse({"w": x}, half, {"w": Sign()}), (1.0,)),
        "separate": Update(
            (
                *sparse({"w": x}, few),
                *sparse({"m": x}, clustered, {"m": Linear(2)}),
                *sparse({"v": x.square()}, few, {"v": Log(8)}),
            ),
            (3.0,),
        ),
        "sift": Update(
            sparse(
                {"w": x.sign() * (8 + x.abs().log2()), "v": x.square()},
                spread,
                {"w": Linear(4), "v": Log(4)},
            ),
            (2.5,),
        ),
        "packed-int4": Update(sparse({"w": x}, few, {"w": Linear(4)}), (64.0,)),
        "dense-bit": Update(dense({"w": x}, Bit()), (64.0,)),
        "dense-whole4": Update(dense({"w": x}, Integer(4)), (64.0,)),
        "means": Update(sparse({"w": x}, spread, {"w": Means()}), (64.0,)),
        "dense-sign": Update(dense({"m": x}, Sign()), (64.0,)),
        "dense-int6": Update(dense({"w": x}, Linear(6, block=None)), (64.0,)),
    }


def describe(name: str, update: Update, frame: bytes) -> dict[str, object]:
    """Describe what a decoder in another language must find."""
    header, _ = read_header(frame)
    return {
        "file": f"{name}.bin",
        "bytes": len(frame),
        "algorithm": header.algorithm,
        "round": header.round,
        "client": header.client,
        "run": header.run.hex(),
        "base": header.base.hex(),
        "weight": header.weight,
        "parts": [
            {
                "index_coder": about.index.name if about.index else None,
                "k": about.k,
                "indices": summary(None if part.indices is None else part.indices[0]),
                "values": {
                    role: {
                        "coder": coded.coder.name,
                        "bytes": size,
                        **summary(coded.restore()[0]),
                    }
                    for (role, coded), size in zip(
                        part.values.items(), about.value_bytes, strict=True
                    )
                },
            }
            for part, about in zip(update.parts, header.parts, strict=True)
        ],
    }


def summary(x: torch.Tensor | None) -> dict[str, object]:
    """Return the first and last numbers and an exact sum, enough to detect a wrong decoder."""
    if x is None:
        return {}
    listed = x.tolist()
    total = float(np.sum(np.array(listed, np.float64)))
    return {"first": listed[:8], "last": listed[-8:], "sum": total}


def main() -> None:
    VECTORS.mkdir(exist_ok=True)
    spec = Spec(LAYOUT, "fedadam-ssm", round=300, client=5, run=RUN, base=BASE)
    described = []
    for name, update in cases().items():
        frame = encode(update, spec)
        (VECTORS / f"{name}.bin").write_bytes(frame)
        described.append(describe(name, update, frame))
    about = {"layer_offsets": list(LAYOUT.offsets), "d": LAYOUT.d, "frames": described}
    (VECTORS / "vectors.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
