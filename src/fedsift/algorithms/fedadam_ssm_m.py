"""FedAdam-SSM_M: the ablation of FedAdam-SSM whose shared mask is the top-k of ΔM.

The paper, section VI-A, "Baselines".

Everything except the mask is as in FedAdam-SSM.
"""

from __future__ import annotations

from fedsift.adam import AdamStep
from fedsift.algorithms.fedadam_ssm import shared_mask_fedadam
from fedsift.algorithms.method import Algorithm
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import Beta1, Beta2, Density, Epsilon, LearningRate, LocalSteps
from fedsift.selection.masks import top_k


@method("fedadam-ssm-m", label="FedAdam-SSM_M", color="#45a3dc")
def fedadam_ssm_m(
    density: Density = 0.05,
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """FedAdam-SSM with the shared mask 1_Topk(ΔM).

    >>> fedadam_ssm_m().name
    'fedadam-ssm-m'
    """
    step = AdamStep(lr, beta1, beta2, eps)
    return shared_mask_fedadam(
        lambda update, k: top_k(update.delta_m, k), density, local_steps, step
    )
