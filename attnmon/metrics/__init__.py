"""The quantities that attnmon measures: one module for each, with its function and its `torchmetrics.Metric`.

The functions return one value per row, NaN where the quantity is undefined or the row is not finite; the classes
average rows per head and count what they left out. All share one set of conventions:

- `weights` and `scores` are ``(..., n)``, `vectors` ``(..., n, d)`` broadcastable, `mask` ``(..., n)``, True = visible.
- What lies under the mask is ignored, never renormalised; a zero weight is not a mask; a score of -inf is one.
- `top_n`, `temperature` and `epsilon` take a number or several; a number drops its own dimension.
- Half types compute and return in float32, float32 and float64 stay.

For an engine that wants several quantities of the same rows, `selection_statistics` makes everything that needs a top-N
selection in one pass (fields by name), `jacobian_norms` several norms of the softmax
Jacobian from one sort, and `entropy_statistics` all that follows from the entropy. Pass
rows that share their keys as ``weights (batch, heads, rows, n)`` with ``vectors (batch, heads, 1, n, d)``: such groups
are computed with matrix products. Temporaries stay about `attnmon.metrics._group._BUDGET`. On a CPU some rows are
computed again where rounding could show, which needs their count; on CUDA float32 rows are computed in float64, and
nothing makes the host wait for the device (but for the bounds of Theorem 2).
"""

from attnmon.metrics._statistics import SELECTION_FIELDS, selection_statistics
from attnmon.metrics.bounds import SeparabilityBounds, separability_bounds
from attnmon.metrics.distance import TopNDistance, TopNDistances, top_n_distance
from attnmon.metrics.entropy import (
    AttentionEntropy,
    active_share,
    attention_entropy,
    effective_keys,
    entropy_statistics,
    participation_ratio,
)
from attnmon.metrics.jacobian import SoftmaxJacobianNorm, jacobian_norms, softmax_jacobian_norm
from attnmon.metrics.lemmas import DispersionConstants, dispersion_constants, normalizer_jacobian_bound
from attnmon.metrics.logits import first_key_weight, score_max, score_spread
from attnmon.metrics.sensitivity import finite_difference_sensitivity
from attnmon.metrics.separability import Separability, SeparabilityRatio, separability

__all__ = [
    "SELECTION_FIELDS",
    "AttentionEntropy",
    "DispersionConstants",
    "Separability",
    "SeparabilityBounds",
    "SeparabilityRatio",
    "SoftmaxJacobianNorm",
    "TopNDistance",
    "TopNDistances",
    "active_share",
    "attention_entropy",
    "dispersion_constants",
    "effective_keys",
    "entropy_statistics",
    "finite_difference_sensitivity",
    "first_key_weight",
    "jacobian_norms",
    "normalizer_jacobian_bound",
    "participation_ratio",
    "score_max",
    "score_spread",
    "selection_statistics",
    "separability",
    "separability_bounds",
    "softmax_jacobian_norm",
    "top_n_distance",
]
