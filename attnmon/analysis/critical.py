"""Algorithm 3: from which N on the selected keys are no better than chance."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attnmon.analysis.result import Analysis

__all__ = ["CriticalSize", "critical_top_n"]


class CriticalSize(NamedTuple):
    """The critical N of each length, and the test behind it."""

    size: tuple[int | None, ...]
    p_values: np.ndarray
    alpha: float


def critical_top_n(analysis: Analysis, alpha: float = 0.01) -> CriticalSize:
    r"""Find, for each length, the smallest N at which distance and expectation can't be told apart over the heads.

    The per-head means of ``d_N`` and of ``E_paper`` (eq. 10 as printed) are compared by a two-sample
    Kolmogorov-Smirnov test; N is critical where its p-value first reaches `alpha`.

    Source: Algorithm 3 of arXiv 2508.17821, whose text says alpha = 0.01 and whose listing 0.05.

    Reading: beyond it, selecting more keys separates no better than drawing them. The paper finds about 0.06 L.

    Args:
        analysis: With the task ``"critical"``.
        alpha: Level of the test, in (0, 1).

    Returns:
        ``size``: one N per length of the analysis, None where no N up to the largest one measured passes;
        ``p_values``: float64 ``(lengths, largest N)``, NaN where fewer than two heads have rows; ``alpha``.

    Raises:
        ValueError: The task was not run, or `alpha` is out of range.
        ModuleNotFoundError: scipy is missing.

    Example:
        >>> import numpy as np
        >>> from attnmon.analysis import Table
        >>> expected = np.arange(40.0).reshape(20, 1, 2)
        >>> table = Table({"top_n": (1, 2)}, {"distance": expected + [100, 0], "expected_paper": expected}, {})
        >>> heads = tuple((0, head) for head in range(20))
        >>> critical_top_n(Analysis(("attn",), heads, (1.0,), (64,), {"critical": table})).size
        (2,)
    """
    if not isinstance(alpha, int | float) or not 0 < alpha < 1:
        raise ValueError(f"Expected `alpha` to lie between 0 and 1, but got {alpha!r}. The paper has 0.01 and 0.05.")
    if "critical" not in analysis.tables:
        raise ValueError(
            f"Expected `analysis` to have the task 'critical', but it has {sorted(analysis.tables)}. "
            "Run it with AnalysisOptions(tasks=('critical', ...))."
        )
    try:
        from scipy.stats import ks_2samp
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "The Kolmogorov-Smirnov test needs the package `scipy`. Install it with: pip install 'attnmon[figures]'"
        ) from error
    table = analysis.tables["critical"]
    distance, expected = table.values["distance"], table.values["expected_paper"]
    p_values = np.full(distance.shape[1:], np.nan)
    for length, size in np.ndindex(*p_values.shape):
        left, right = distance[:, length, size], expected[:, length, size]
        left, right = left[np.isfinite(left)], right[np.isfinite(right)]
        if min(len(left), len(right)) >= 2:
            p_values[length, size] = ks_2samp(left, right).pvalue
    grid = [int(size) for size in table.axes["top_n"]]
    found = []
    for row in p_values:
        passed = np.flatnonzero(row >= alpha)  # False for NaN
        found.append(grid[passed[0]] if len(passed) else None)
    return CriticalSize(tuple(found), p_values, alpha)
