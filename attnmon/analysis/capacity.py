"""How many heads a given separability asks for."""

from __future__ import annotations

import math

__all__ = ["heads_needed"]


def heads_needed(separability: float, share: float) -> int:
    r"""Count the heads that together tell a share of the top-N apart, if one head tells a share `separability` apart.

    The least H with ``1 - (1 - p)^H >= q``, for ``p = separability`` and ``q = share``, heads taken as independent:
    a key is covered unless every one of H heads fails on it.

    Source: head capacity in "Retrieval Capacity of Self-Attention Under Competition" (2026), on the separability
    ``Ns/N`` of eq. 12 of arXiv 2508.17821.

    Reading: more heads than the model has means that what a head selects gets lost whatever the others do; falling
    separability during training raises the number. Heads of one model are not independent: it is a lower estimate.

    Args:
        separability: Share p of the selected keys that one head tells apart, in ``(0, 1]``.
        share: Share q of them that all heads together are to tell apart, in ``[0, 1)``.

    Returns:
        Number of heads, at least 0.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If `separability` is not in ``(0, 1]`` or `share` not in ``[0, 1)``.

    Example:
        >>> heads_needed(0.75, 0.99)
        4
    """
    separability = _check_share("separability", separability)
    share = _check_share("share", share)
    if separability <= 0:
        raise ValueError(
            f"Expected `separability` to be above 0 and at most 1, but got {separability}. No number of heads covers "
            "anything if each tells nothing apart."
        )
    if share >= 1:
        raise ValueError(
            f"Expected `share` to be at least 0 and below 1, but got {share}. No number of heads is certain to cover "
            "everything: pass e.g. 0.99."
        )
    if share == 0 or separability == 1:
        return int(share > 0)
    heads = math.log1p(-share) / math.log1p(-separability)
    # 0.19 at 0.1 is two heads, though rounding puts the quotient a little above 2
    nearest = round(heads)
    return max(1, nearest if math.isclose(heads, nearest, rel_tol=1e-12) else math.ceil(heads))


def _check_share(name: str, value: float) -> float:
    if isinstance(value, (bool, str)):
        raise TypeError(f"Expected `{name}` to be a number, but got {value!r} of type {type(value).__name__}.")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"Expected `{name}` to be a number, but got {value!r} of type {type(value).__name__}. Average a tensor "
            "over heads, or pass one head's figure."
        ) from None
    if not 0 <= number <= 1:
        raise ValueError(f"Expected `{name}` to be a share between 0 and 1, but got {number}.")
    return number
