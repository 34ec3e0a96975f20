"""The quantities as functions of plain tensors: one value per row, no state."""

from attnmon.metrics.bounds import SeparabilityBounds, separability_bounds
from attnmon.metrics.distance import TopNDistances, top_n_distance
from attnmon.metrics.entropy import active_share, attention_entropy, effective_keys, participation_ratio
from attnmon.metrics.jacobian import softmax_jacobian_norm
from attnmon.metrics.lemmas import DispersionConstants, dispersion_constants, normalizer_jacobian_bound
from attnmon.metrics.logits import first_key_weight, score_max, score_spread
from attnmon.metrics.sensitivity import finite_difference_sensitivity
from attnmon.metrics.separability import Separability, separability

__all__ = [
    "DispersionConstants",
    "Separability",
    "SeparabilityBounds",
    "TopNDistances",
    "active_share",
    "attention_entropy",
    "dispersion_constants",
    "effective_keys",
    "finite_difference_sensitivity",
    "first_key_weight",
    "normalizer_jacobian_bound",
    "participation_ratio",
    "score_max",
    "score_spread",
    "separability",
    "separability_bounds",
    "softmax_jacobian_norm",
    "top_n_distance",
]
