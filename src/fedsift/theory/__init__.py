"""The paper's theory as functions: its bounds, and how they compare with reality."""

from fedsift.theory.constants import Constants, Estimate, estimate_constants, top_curvature
from fedsift.theory.convergence import (
    Bound,
    Setting,
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
    travel_log_bound,
)
from fedsift.theory.masks import BestMask, Sparsification, best_mask, mask_costs
from fedsift.theory.objective import Objective
from fedsift.theory.order import Order, beta2_limit, coefficient_order
from fedsift.theory.reality import Watched, updates, visited_noise, watch
from fedsift.theory.sharper import sharper_coefficients

__all__ = [
    "BestMask",
    "Bound",
    "Constants",
    "DeviationCoefficients",
    "Estimate",
    "Objective",
    "Order",
    "Recurrence",
    "Setting",
    "Sparsification",
    "Watched",
    "best_mask",
    "beta2_limit",
    "coefficient_order",
    "deviation_coefficients",
    "deviation_recurrence",
    "estimate_constants",
    "local_steps_threshold",
    "mask_costs",
    "nonconvex_bound",
    "nonconvex_rate",
    "pl_bound",
    "pl_rate",
    "sharper_coefficients",
    "top_curvature",
    "travel_log_bound",
    "updates",
    "visited_noise",
    "watch",
]
