"""Normalisers by name, for configuration files."""

from __future__ import annotations

import re
from collections.abc import Callable

from attnmon.normalizers._base import Normalizer
from attnmon.normalizers.adjusted import SelfAdjustedSoftmax
from attnmon.normalizers.softmax import ScalableSoftmax, Softmax
from attnmon.normalizers.sparse import Entmax, Sparsemax

__all__ = ["normalizer_from_name"]

_PLAIN: dict[str, Callable[..., Normalizer]] = {
    "softmax": Softmax,
    "sparsemax": Sparsemax,
    "entmax15": Entmax,
    "ssmax": ScalableSoftmax,
    "sa-softmax": SelfAdjustedSoftmax,
}
_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?)"
_WITH_NUMBER: dict[str, Callable[..., Normalizer]] = {
    rf"entmax\({_NUMBER}\)": Entmax,
    rf"ssmax\((?:s=)?{_NUMBER}\)": ScalableSoftmax,
}


def normalizer_from_name(name: str, temperature: float = 1.0) -> Normalizer:
    """Make the normaliser that a configuration file names.

    Source: the normalisers of the Discussion of arXiv 2508.17821.

    Args:
        name: ``"softmax"``, ``"sparsemax"``, ``"entmax15"``, ``"entmax(1.3)"`` (any alpha above 1), ``"ssmax"``
            (s = 1), ``"ssmax(0.5)"`` (any s above 0) or ``"sa-softmax"``; a normaliser's own ``name`` is understood.
        temperature: Absolute temperature.

    Returns:
        The normaliser.

    Raises:
        TypeError: If `temperature` is not a number.
        ValueError: If `name` is none of those, or alpha, s or `temperature` is out of range.

    Example:
        >>> normalizer_from_name("entmax(1.3)", temperature=8.0)
        Entmax(alpha=1.3, temperature=8.0)
        >>> normalizer_from_name("ssmax").name
        'ssmax(s=1)'
    """
    if isinstance(name, str):
        if name in _PLAIN:
            return _PLAIN[name](temperature=temperature)
        for pattern, make in _WITH_NUMBER.items():
            if match := re.fullmatch(pattern, name):
                return make(float(match[1]), temperature)
    raise ValueError(
        "Expected `name` to be one of 'softmax', 'sparsemax', 'entmax15', 'entmax(ALPHA)' with ALPHA above 1, 'ssmax', "
        f"'ssmax(S)' with S above 0, 'sa-softmax', but got {name!r}. An Elementwise has to be made in Python."
    )
