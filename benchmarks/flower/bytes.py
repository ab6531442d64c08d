"""Bytes on the wire in one real round: Flower's FedAvg and FedAdam-SSM on a model like VGG-11.

python benchmarks/flower/bytes.py
"""

from __future__ import annotations

import torch
from measure import Measured, measure, write

from fedsift import Layout, algorithms
from fedsift.codec import Spec, Update, encoded_size, sparse
from fedsift.models import build

DENSITY = 0.05


def predicted(layout: Layout) -> dict[str, float]:
    """A client's uplink by the number of coordinates alone; the mask is drawn at random."""
    d, k = layout.d, round(DENSITY * layout.d)
    mask = torch.zeros(1, d, dtype=torch.bool)
    mask[0, torch.randperm(d, generator=torch.Generator().manual_seed(0))[:k]] = True
    zero = torch.zeros(1, d)
    update = Update(sparse({"w": zero, "m": zero, "v": zero}, mask), (1.0,))
    paper = algorithms.fedadam_ssm(density=DENSITY).phase(1).paper_bits(d) / 8
    return {"fedavg": 4 * d, "ssm_paper": paper, "ssm_frame": encoded_size(update, Spec(layout))}


def table(run: Measured, payload: float) -> dict[str, float]:
    """A link's bytes since the run began; what is not payload is Flower's, HTTP's and TLS's."""
    up, down = run.up[0] - run.idle_up[0], run.down[0] - run.idle_down[0]
    return {
        "uplink": up,
        "uplink_payload": payload,
        "uplink_overhead": up - payload,
        "downlink": down,
        "to_connect_up": run.idle_up[0],
        "to_connect_down": run.idle_down[0],
    }


def main() -> None:
    layout = Layout.of(build("vgg11", (3, 32, 32), seed=0))
    expect = predicted(layout)
    common = {"model": "vgg11", "rounds": 1, "local-steps": 1}
    avg = measure(1, None, method="fedavg", lr=0.01, **common)
    ssm = measure(1, None, method="fedadam-ssm", lr=0.001, density=DENSITY, **common)
    fedavg = table(avg, expect["fedavg"])
    sifted = table(ssm, ssm.history[0]["uplink_bytes"])
    ratio = fedavg["uplink"] / sifted["uplink"]
    wanted = expect["fedavg"] / expect["ssm_frame"]
    write("bytes.json", {
        "model": "vgg11", "parameters": layout.d, "density": DENSITY, "rounds": 1, "seed": 0,
        "fedavg": fedavg, "fedadam_ssm": sifted, "predicted": expect,
        "uplink_ratio": ratio, "uplink_ratio_predicted": wanted,
        "uplink_ratio_by_the_papers_bits": expect["fedavg"] / expect["ssm_paper"],
        "off_by": ratio / wanted - 1,
    })  # fmt: skip
    print(f"uplink ratio {ratio:.3f}, predicted {wanted:.3f}, off by {ratio / wanted - 1:.2%}")


if __name__ == "__main__":
    main()
