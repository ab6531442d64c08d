"""The paper's theory as functions: its bounds, and how they compare with measurements.

- ``deviation.py``: Theorem 1; ``sharper_bound.py``: a sharper form of it
- ``order.py``: Proposition 1; ``masks.py``: the best shared mask
- ``convergence.py``: Theorems 2 and 3, and Propositions 2 and 3
- ``constants.py``: estimates of their constants; ``objective.py``: the losses as functions
- ``measured_deviation.py``: the real deviation from centralized Adam
- ``convex_trials.py``: random convex problems, to test Theorem 1
- ``log_arithmetic.py``, ``validation.py``: numbers as logarithms; the ranges of the constants
"""

from fedsift.errors import explain_renamed
from fedsift.theory.constants import Constants, Estimate, estimate_constants, top_curvature
from fedsift.theory.convergence import (
    Bound,
    ConvergenceSetting,
    local_steps_threshold,
    nonconvex_bound,
    nonconvex_rate,
    pl_bound,
    pl_rate,
)
from fedsift.theory.deviation import (
    DeviationCoefficients,
    Recurrence,
    deviation_coefficients,
    deviation_recurrence,
    trivial_log_bound,
)
from fedsift.theory.masks import BestMask, Sparsification, best_mask, mask_costs
from fedsift.theory.measured_deviation import (
    GradientNoise,
    RoundComparison,
    client_updates,
    compare_with_centralized,
    gradient_noise,
)
from fedsift.theory.objective import Objective
from fedsift.theory.order import Order, beta2_limit, coefficient_order
from fedsift.theory.sharper_bound import sharper_coefficients

__all__ = [
    "BestMask",
    "Bound",
    "Constants",
    "ConvergenceSetting",
    "DeviationCoefficients",
    "Estimate",
    "GradientNoise",
    "Objective",
    "Order",
    "Recurrence",
    "RoundComparison",
    "Sparsification",
    "best_mask",
    "beta2_limit",
    "client_updates",
    "coefficient_order",
    "compare_with_centralized",
    "deviation_coefficients",
    "deviation_recurrence",
    "estimate_constants",
    "gradient_noise",
    "local_steps_threshold",
    "mask_costs",
    "nonconvex_bound",
    "nonconvex_rate",
    "pl_bound",
    "pl_rate",
    "sharper_coefficients",
    "top_curvature",
    "trivial_log_bound",
]

__getattr__ = explain_renamed(__name__)
