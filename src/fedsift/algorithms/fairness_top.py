"""Fairness-Top: one shared mask, the top-k of the union of ΔW, ΔM and ΔV.

P. Han, S. Wang and K. K. Leung, "Adaptive Gradient Sparsification for Efficient Federated Learning:
An Online Learning Approach", ICDCS 2020, as the paper uses it in section VI-A.

The mask selects the k coordinates with the largest max(|ΔW|, |ΔM|, |ΔV|). Everything else is as in
FedAdam-SSM.
"""

from __future__ import annotations

from fedsift.adam import AdamStep
from fedsift.algorithms.fedadam_ssm import shared_mask_fedadam
from fedsift.algorithms.method import Algorithm
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import Beta1, Beta2, Density, Epsilon, LearningRate, LocalSteps
from fedsift.selection.masks import top_k_union


@method("fairness-top", label="Fairness-Top", color="#c0629a")
def fairness_top(
    density: Density = 0.05,
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """FedAdam-SSM with the top-k of the union of ΔW, ΔM and ΔV as its shared mask.

    >>> fairness_top().name
    'fairness-top'
    """
    step = AdamStep(lr, beta1, beta2, eps)
    return shared_mask_fedadam(
        lambda update, k: top_k_union(update.delta, k), density, local_steps, step
    )
