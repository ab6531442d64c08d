"""FedAdam-SSM_M: the ablation of FedAdam-SSM whose shared mask is the top-k of ΔM.

The paper, section VI-A, "Baselines"; everything but the mask is FedAdam-SSM's.
"""

from __future__ import annotations

from fedsift.algorithms.fedadam_ssm import shared_mask_fedadam
from fedsift.algorithms.method import Algorithm, method
from fedsift.selection.masks import top_k


@method("fedadam-ssm-m")
def fedadam_ssm_m(
    density: float = 0.05,
    local_steps: int = 30,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
) -> Algorithm:
    """FedAdam-SSM with the shared mask 1_Topk(ΔM).

    >>> fedadam_ssm_m().name
    'fedadam-ssm-m'
    """
    return shared_mask_fedadam(
        lambda start, end, k: top_k(end.m - start.m, k),
        density, local_steps, lr, beta1, beta2, eps,
    )  # fmt: skip
