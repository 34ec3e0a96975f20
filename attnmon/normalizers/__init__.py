"""Softmax and its rivals: how scores become weights, and how strongly the scores move them.

Every normaliser here is a frozen, picklable object with ``name``, ``sums_to_one``, ``weights`` and ``jacobian_norm``;
see `Normalizer` for what these take and return.
"""

from attnmon.normalizers._base import Normalizer
from attnmon.normalizers.adjusted import SelfAdjustedSoftmax
from attnmon.normalizers.elementwise import Elementwise
from attnmon.normalizers.names import normalizer_from_name
from attnmon.normalizers.softmax import ScalableSoftmax, Softmax
from attnmon.normalizers.sparse import Entmax, Sparsemax

__all__ = [
    "Elementwise",
    "Entmax",
    "Normalizer",
    "ScalableSoftmax",
    "SelfAdjustedSoftmax",
    "Softmax",
    "Sparsemax",
    "normalizer_from_name",
]
