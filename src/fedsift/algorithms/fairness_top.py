"""Fairness-Top: one shared mask, the top-k of the union of ΔW, ΔM and ΔV.

P. Han, S. Wang and K. K. Leung, "Adaptive Gradient Sparsification for Efficient Federated Learning:
An Online Learning Approach", ICDCS 2020, as the paper uses it (section VI-A): the k coordinates
with the largest max(|ΔW|, |ΔM|, |ΔV|).
"""

from __future__ import annotations

from fedsift.algorithms.fedadam_ssm import shared_mask_fedadam
from fedsift.algorithms.method import Algorithm, method
from fedsift.selection.masks import top_k_union


@method("fairness-top")
def fairness_top(
    density: float = 0.05,
    local_steps: int = 30,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
) -> Algorithm:
    """FedAdam-SSM with the mask of the union's top-k.

    >>> fairness_top().name
    'fairness-top'
    """
    return shared_mask_fedadam(
        lambda start, end, k: top_k_union(end - start, k),
        density, local_steps, lr, beta1, beta2, eps,
    )  # fmt: skip
