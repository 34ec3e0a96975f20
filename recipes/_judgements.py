"""How each claim of the paper is judged: from the figures of an analysis to a status, a figure and a reason.

A claim that an analysis has no figures for raises `NotMeasuredError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from _series import (
    Array,
    Grid,
    NotMeasuredError,
    critical_over_top_n,
    distance_over_length,
    distance_over_top_n,
    largest_tested,
    over_heads,
    printed_bound,
    sensitivity,
    sensitivity_bound,
    separability_over_top_n,
)

from attnmon.analysis import Analysis, CriticalSize

HOLDS, PARTLY, FAILS, UNKNOWN = "holds", "partly", "does not hold", "not measured"
_ROUNDING = 1 + 1e-5  # of float32 sums, in a comparison that is exact on paper


class Judged(NamedTuple):
    """What became of a claim, with a sentence from the data."""

    status: str
    measured: str
    why: str
    numbers: dict[str, float | None]


# -- Figure 2 -----------------------------------------------------------------------------------------------------


def linear(analysis: Analysis, quantity: str) -> Judged:
    grid = distance_over_length(analysis)
    lengths, values = _points(grid.axis, over_heads(grid.values[quantity]))
    exponent, r2 = _exponent(lengths, values), _straightness(lengths, values)
    status = _graded(0.8 <= exponent <= 1.2 and r2 >= 0.98, 0.6 <= exponent <= 1.4)
    bend = "straight" if 0.9 <= exponent <= 1.1 else ("bent down" if exponent < 1 else "bent up")
    return Judged(
        status,
        f"~ L^{exponent:.2f}, R^2 = {r2:.3f}",
        f"From L = {lengths[0]:g} to {lengths[-1]:g} (a factor of {lengths[-1] / lengths[0]:g}) the mean over heads at "
        f"N = {grid.top_n} grows by a factor of {values[-1] / values[0]:.3g}: the curve is {bend}.",
        {"exponent": exponent, "r_squared": r2, "first": values[0], "last": values[-1]},
    )


def safe(analysis: Analysis) -> Judged:
    grid = distance_over_length(analysis)
    share, count, total = _share_below(grid.values["distance"], grid.values["upper_bound"])
    return Judged(
        _graded(share == 1, share >= 0.99),
        f"{_of(count, total)} heads x L",
        f"The mean distance exceeds the mean bound in {total - count} of {total} cases.",
        {"share": share, "cases": total},
    )


def loose(analysis: Analysis) -> Judged:
    grid = distance_over_length(analysis)
    ratios = _ratio(grid.values["upper_bound"], grid.values["distance"])
    by_length = over_heads(ratios, "median")
    lengths, values = _points(grid.axis, by_length, least=1)
    at_last = ratios[:, grid.axis.index(lengths[-1])]
    return Judged(
        _graded(values[-1] >= 2, values[-1] >= 1.2),
        f"bound / distance = {values[-1]:.3g}",
        f"Over the heads at L = {lengths[-1]:g} the ratio runs from {np.nanmin(at_last):.3g} to "
        f"{np.nanmax(at_last):.3g}; at L = {lengths[0]:g} its median is {values[0]:.3g}.",
        {"median_ratio": values[-1], "median_ratio_shortest": values[0]},
    )


def true_expectation(analysis: Analysis) -> Judged:
    grid = distance_over_length(analysis)
    printed, low, high = (grid.values[f"expected_{name}"] for name in ("paper", "lower", "upper"))
    known = np.isfinite(printed) & np.isfinite(low) & np.isfinite(high)
    if not known.any():
        raise NotMeasuredError("no head has all three at any L")
    inside = (printed * _ROUNDING >= low) & (printed <= high * _ROUNDING)
    share = float(inside[known].mean())
    factor = float(np.median(_ratio(printed, (low + high) / 2)[known]))
    side = "above" if float(np.median((printed - high)[known])) > 0 else "below"
    side = "inside" if share > 0.5 else side
    return Judged(
        _graded(share >= 0.99, share >= 0.5),
        f"inside for {share:.1%}, factor {factor:.3g}",
        f"At N = {grid.top_n} eq. 10 as printed is in the median {factor:.3g} times the middle of the Jensen bounds of "
        f"the expectation over a drawn set, {side} {'them' if side != 'inside' else 'those bounds'}.",
        {"share_inside": share, "median_factor": factor},
    )


def diminishing(analysis: Analysis) -> Judged:
    grid = distance_over_top_n(analysis)
    sizes, values = _points(grid.axis, over_heads(grid.values["distance"]), least=3)
    turn = _nearest(sizes, 20)
    if turn in (0, len(sizes) - 1):
        raise NotMeasuredError("N on both sides of 20 are needed")
    before = abs(values[turn] - values[0]) / (sizes[turn] - sizes[0])
    after = abs(values[-1] - values[turn]) / (sizes[-1] - sizes[turn])
    ratio = after / before if before else math.inf
    return Judged(
        _graded(ratio <= 0.5, ratio < 1),
        f"per key {after:.3g} after, {before:.3g} before",
        f"From N = {sizes[0]:g} to {sizes[turn]:g} the mean distance goes from {values[0]:.4g} to {values[turn]:.4g}, "
        f"to N = {sizes[-1]:g} on to {values[-1]:.4g}: each key beyond {sizes[turn]:g} changes it {ratio:.2g} times as "
        "much as one before.",
        {"change_per_key_before": before, "change_per_key_after": after, "ratio": ratio},
    )


def meet(analysis: Analysis) -> Judged:
    grid = distance_over_top_n(analysis)
    distance, expected = over_heads(grid.values["distance"]), over_heads(grid.values["expected_paper"])
    sizes, gaps = _points(grid.axis, expected / distance - 1, least=2)
    last = _nearest(sizes, 100)
    near, first = abs(gaps[last]), abs(gaps[0])
    status = _graded(near <= 0.1 and near < first, near <= 0.25 and near < first)
    why = (
        f"Expectation over distance is {gaps[0]:+.1%} at N = {sizes[0]:g} and {gaps[last]:+.1%} at N = {sizes[last]:g}"
    )
    crossing = _crossing(analysis)
    why += f"; the two curves cross at N = {crossing}." if crossing else "; the two curves do not cross."
    return Judged(
        status,
        f"{gaps[last]:+.1%} at N = {sizes[last]:g}",
        why,
        {"gap_first": gaps[0], "gap_near_100": gaps[last], "crossing": crossing},
    )


def _crossing(analysis: Analysis) -> int | None:
    """The first N at which the order of mean distance and mean expectation turns, at the longest L."""
    try:
        grid = critical_over_top_n(analysis)
    except NotMeasuredError:
        grid = distance_over_top_n(analysis)
    gaps = over_heads(grid.values["expected_paper"]) - over_heads(grid.values["distance"])
    for before, after, size in zip(gaps, gaps[1:], grid.axis[1:], strict=False):
        if before * after <= 0:  # False for NaN
            return int(size)
    return None


def tightens(analysis: Analysis) -> Judged:
    grid = distance_over_top_n(analysis)
    ratios = over_heads(grid.values["upper_bound"]) / over_heads(grid.values["distance"])
    sizes, values = _points(grid.axis, ratios, least=2)
    return Judged(
        _graded(bool(np.all(np.diff(values) < 0)), bool(values[-1] < values[0])),
        f"bound / distance {values[0]:.3g} to {values[-1]:.3g}",
        "It is " + _listed(sizes, values, "N") + ".",
        {"ratio_first": values[0], "ratio_last": values[-1]},
    )


def _critical_points(analysis: Analysis, criticals: Sequence[CriticalSize]) -> tuple[Array, Array, str]:
    """The L that have a critical N, those N, and what there is to say of all L and levels."""
    if not criticals:
        raise NotMeasuredError("the task 'critical' was not run")
    largest = largest_tested(analysis)
    lists = []
    for critical in criticals:
        sizes = (
            f"above {most}" if size is None else str(size) for size, most in zip(critical.size, largest, strict=True)
        )
        each = (f"{size} at L = {length}" for size, length in zip(sizes, analysis.lengths, strict=True))
        lists.append(f"at alpha = {critical.alpha:g} it is " + ", ".join(each))
    found = np.array([size is not None for size in criticals[0].size])
    sizes_found = np.array([size for size in criticals[0].size if size is not None], dtype=float)
    text = "; ".join(lists) + _beyond(criticals[0], analysis.lengths[-1])
    return np.array(analysis.lengths, dtype=float)[found], sizes_found, f"{text[0].upper()}{text[1:]}."


def _beyond(critical: CriticalSize, length: int) -> str:
    """Whether the test goes on passing beyond the critical N of the longest L: the first need not be the last word."""
    if critical.size[-1] is None:
        return ""
    passed, later = _later(critical)
    return f"; at L = {length} the test passes at {passed} of the {later} larger N, too"


def _later(critical: CriticalSize) -> tuple[int, int]:
    """At how many N beyond the critical one of the longest L the test passes, and how many there are."""
    size = critical.size[-1]
    later = critical.p_values[-1][size or 0 :]
    later = later[np.isfinite(later)]
    return int((later >= critical.alpha).sum()), len(later)


def sublinear(analysis: Analysis, criticals: Sequence[CriticalSize]) -> Judged:
    lengths, sizes, text = _critical_points(analysis, criticals)
    if len(lengths) < 2:
        return Judged(UNKNOWN, f"found at {len(lengths)} of {len(analysis.lengths)} L", text, {})
    exponent = _exponent(lengths, sizes)
    passed, later = _later(criticals[0])
    settled = len(lengths) >= 3 and 2 * passed >= later
    return Judged(
        _graded(exponent < 0.9 and settled, exponent < 1),
        f"~ L^{exponent:.2f}",
        text,
        {"exponent": exponent, "larger_n_that_pass": passed, "larger_n": later},
    )


def six_percent(analysis: Analysis, criticals: Sequence[CriticalSize]) -> Judged:
    lengths, sizes, text = _critical_points(analysis, criticals)
    if not len(lengths):
        share = float((largest_tested(analysis) / np.array(analysis.lengths)).max())
        status = FAILS if share > 0.12 else UNKNOWN
        return Judged(status, f"above {share:.2f} L", f"{text} No N that was tested is critical.", {"above": share})
    slope = float((lengths * sizes).sum() / (lengths**2).sum())
    shares = sizes / lengths
    return Judged(
        _graded(0.045 <= slope <= 0.075, 0.03 <= slope <= 0.12),
        f"{slope:.3f} L",
        f"Critical N over L runs from {shares.min():.3f} to {shares.max():.3f} over the {len(lengths)} L where it was "
        "found; a fixed share would be linear growth, so this and the claim before it cannot both hold exactly.",
        {"slope": slope, "share_min": shares.min(), "share_max": shares.max()},
    )


# -- Figure 3 -----------------------------------------------------------------------------------------------------


def falls(analysis: Analysis) -> Judged:
    sizes, values = _ratio_means(separability_over_top_n(analysis))
    values, sizes = values[sizes >= 2], sizes[sizes >= 2]  # at N = 1 it is 1 but for ties
    turn = _nearest(sizes, 16) if len(sizes) else 0
    if turn == 0:
        raise NotMeasuredError("two N from 2 to 16 are needed")
    means = values[: turn + 1]
    return Judged(
        _graded(bool(np.all(np.diff(means) < 0)), bool(means[-1] < means[0])),
        f"{means[0]:.3f} to {means[-1]:.3f}",
        "The mean over heads is " + _listed(sizes[: turn + 1], means, "N") + ".",
        {"first": means[0], "at_16": means[-1]},
    )


def stays(analysis: Analysis) -> Judged:
    sizes, values = _ratio_means(separability_over_top_n(analysis))
    values, sizes = values[sizes >= 16], sizes[sizes >= 16]
    if not len(values):
        raise NotMeasuredError("an N from 16 on is needed")
    low, high = float(values.min()), float(values.max())
    return Judged(
        _graded(low >= 0.70 and high <= 0.85, high - low <= 0.15),
        f"{low:.3f} to {high:.3f}",
        f"The mean over heads is {_listed(sizes, values, 'N')}; levels move with the model.",
        {"min": low, "max": high},
    )


def tracks(analysis: Analysis, bound: str) -> Judged:
    grid = separability_over_top_n(analysis)
    _wanted(grid, bound)
    largest, mean = over_heads(grid.values["ratio"], "max"), over_heads(grid.values[bound])
    sizes, gaps = _points(grid.axis, mean - largest, least=1)
    gap = float(np.abs(gaps).mean())
    share, count, total = _share_below(grid.values["ratio"], grid.values[bound])
    return Judged(
        _graded(gap <= 0.1, gap <= 0.2),
        f"off by {gap:.3f} on average",
        f"Bound less maximum is {_listed(sizes, gaps, 'N', '+.2f')}; the heads' own means stay below their bound in "
        f"{_of(count, total)} cases.",
        {"mean_absolute_gap": gap, "share_of_heads_below": share},
    )


def lower_loose(analysis: Analysis) -> Judged:
    grid = separability_over_top_n(analysis)
    _wanted(grid, "lower")
    lower, ratio = grid.values["lower"], grid.values["ratio"]
    known = ~np.isnan(lower) & ~np.isnan(ratio)
    if not known.any():
        raise NotMeasuredError("no head has a lower bound")
    gap = float((ratio - np.maximum(lower, 0))[known].mean())
    void = float((lower <= 0)[known].mean())
    return Judged(
        _graded(gap >= 0.2, gap >= 0.05),
        f"{gap:.3f} below Ns/N",
        f"It is at most 0, and so says nothing, in {void:.1%} of the {int(known.sum())} heads x N.",
        {"mean_gap": gap, "share_void": void},
    )


# -- Figure 4 -----------------------------------------------------------------------------------------------------


def law(analysis: Analysis) -> Judged:
    data = sensitivity(analysis)
    temperatures = np.array(data.temperatures)
    below: dict[float, float] = {}
    above: dict[float, float] = {}
    bends: dict[float, float] = {}
    for place, epsilon in enumerate(data.epsilons):
        curve = over_heads(data.sensitivity[:, :, place], "max")
        for slopes, use in ((below, temperatures < 0.1 * (1 - 1e-9)), (above, temperatures >= 0.1 * (1 - 1e-9))):
            use = use & (curve > 0)
            if use.sum() >= 2:
                slopes[epsilon] = _exponent(temperatures[use], curve[use])
        bends[epsilon] = math.sqrt(2) / epsilon
    if not below:
        raise NotMeasuredError("two T below 0.1 with g above 0 are needed")
    lawful = [epsilon for epsilon, slope in below.items() if -1.25 <= slope <= -0.75]
    return Judged(
        _graded(len(lawful) == len(data.epsilons), bool(lawful)),
        ", ".join(f"T^{slope:.2f}" for slope in below.values()),
        f"Below T = 0.1 the exponent is {_listed(tuple(below), tuple(below.values()), 'eps', '.2f')}; from there on it "
        f"is {_listed(tuple(above), tuple(above.values()), 'eps', '.2f')}. Whatever T, g cannot exceed sqrt 2 / eps: "
        f"{_listed(tuple(bends), tuple(bends.values()), 'eps')}.",
        {f"exponent_eps_{epsilon:g}": slope for epsilon, slope in below.items()},
    )


def orders(analysis: Analysis) -> Judged:
    data = sensitivity(analysis)
    temperatures = np.array(data.temperatures)
    low, high = temperatures < 0.1, temperatures >= 1
    if not low.any() or not high.any():
        raise NotMeasuredError("T below 0.1 and from 1 on are needed")
    ratios = {}
    for place, epsilon in enumerate(data.epsilons):
        curve = over_heads(data.sensitivity[:, :, place], "max")
        if np.isfinite(curve[low]).any() and np.isfinite(curve[high]).any() and np.nanmax(curve[high]) > 0:
            ratios[epsilon] = float(np.nanmax(curve[low]) / np.nanmax(curve[high]))
    if not ratios:
        raise NotMeasuredError("g is 0 from T = 1 on")
    values = tuple(ratios.values())
    return Judged(
        _graded(min(values) >= 100, max(values) >= 10),
        "factor " + ", ".join(f"{value:.3g}" for value in values),
        "The largest g below T = 0.1 over the largest from T = 1 on is " + _listed(tuple(ratios), values, "eps") + ".",
        {f"factor_eps_{epsilon:g}": value for epsilon, value in ratios.items()},
    )


def below_printed(analysis: Analysis) -> Judged:
    data = sensitivity(analysis)
    bound = printed_bound(data.temperatures)[:, None]
    share, count, total = _share_below(data.sensitivity, np.broadcast_to(bound, data.sensitivity.shape))
    why = f"{total - count} of {total} means over rows lie above it"
    if data.spectral is not None:
        quarter = np.broadcast_to(0.25 / np.array(data.temperatures), data.spectral.shape)
        _, below, cases = _share_below(data.spectral, quarter)
        why += f"; the exact spectral norm, which the corollary speaks of, exceeds 1/(4T) in {cases - below} of {cases}"
    return Judged(_graded(share == 1, share >= 0.99), _of(count, total), why + ".", {"share": share})


def below_corrected(analysis: Analysis) -> Judged:
    data = sensitivity(analysis)
    bound = np.stack([sensitivity_bound(data.temperatures, epsilon) for epsilon in data.epsilons], axis=1)
    full = np.broadcast_to(bound, data.sensitivity.shape)
    share, count, total = _share_below(data.sensitivity, full)
    closest = float(np.nanmax(_ratio(data.sensitivity, full)))
    return Judged(
        _graded(share == 1, share >= 0.99),
        _of(count, total),
        f"{total - count} of {total} means over rows lie above it; the closest reaches {closest:.1%} of it.",
        {"share": share, "closest": closest},
    )


def norm_below(analysis: Analysis, norm: str, factor: float) -> Judged:
    data = sensitivity(analysis)
    values = data.max if norm == "max" else data.spectral
    if values is None:
        raise NotMeasuredError("the exact Jacobian was not measured")
    bound = np.broadcast_to(factor / np.array(data.temperatures), values.shape)
    share, count, total = _share_below(values, bound)
    closest = float(np.nanmax(_ratio(values, bound)))
    return Judged(
        _graded(share == 1, share >= 0.99),
        _of(count, total),
        f"{total - count} of {total} means over rows lie above it; the closest reaches {closest:.1%} of it.",
        {"share": share, "closest": closest},
    )


# -- rules --------------------------------------------------------------------------------------------------------


def active(analysis: Analysis) -> Judged:
    if "summary" not in analysis.tables:
        raise NotMeasuredError("the task 'summary' was not run")
    shares = analysis.tables["summary"].at("active_share")[:, -1]
    shares = shares[np.isfinite(shares)]
    if not len(shares):
        raise NotMeasuredError("no head has rows of 64 keys or more")
    large = int((shares > 0.06).sum())
    return Judged(
        _graded(large == 0, large <= len(shares) / 2),
        f"{large} of {len(shares)} heads above 6 %",
        f"The active share at L = {analysis.lengths[-1]} is {np.median(shares):.1%} in the median head and "
        f"{shares.max():.1%} in the largest.",
        {"heads_above": large, "heads": len(shares), "median": float(np.median(shares))},
    )


def own_temperature(analysis: Analysis) -> Judged:
    own = np.array(analysis.temperatures, dtype=float)
    if not len(own):
        raise NotMeasuredError("no layer was measured")
    low, high = float(own.min()), float(own.max())
    return Judged(
        _graded(low > 0.1, high > 0.1),
        f"T = {low:.3g}" if low == high else f"T = {low:.3g} to {high:.3g}",
        f"{int((own <= 0.1).sum())} of {len(own)} layers attend at T = 0.1 or less.",
        {"min": low, "max": high},
    )


# -- arithmetic ---------------------------------------------------------------------------------------------------


def _graded(holds: bool, partly: bool) -> str:
    return HOLDS if holds else PARTLY if partly else FAILS


def _points(axis: Sequence[float], values: Array, least: int = 2) -> tuple[Array, Array]:
    """The points that have a value."""
    known = np.isfinite(values)
    if known.sum() < least:
        raise NotMeasuredError(f"{int(known.sum())} points have a value, {least} are needed")
    return np.array(axis, dtype=float)[known], values[known]


def _ratio(above: Array, below: Array) -> Array:
    """Quotients; NaN where the lower number is 0."""
    quotients: Array = np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below != 0)
    return quotients


def _exponent(x: Array, y: Array) -> float:
    """Slope of a straight line through log y over log x."""
    if np.any(y <= 0):
        raise NotMeasuredError("a power law needs positive figures")
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def _straightness(x: Array, y: Array) -> float:
    """R^2 of a straight line."""
    line = np.polyval(np.polyfit(x, y, 1), x)
    spread = float(((y - y.mean()) ** 2).sum())
    return 1 - float(((y - line) ** 2).sum()) / spread if spread else 1.0


def _of(count: int, total: int) -> str:
    """A share in whole cases: a rounded percentage would call all what is all but one."""
    return f"all {total}" if count == total else f"{count} of {total}"


def _share_below(values: Array, bound: Array) -> tuple[float, int, int]:
    known = ~np.isnan(values) & ~np.isnan(bound)
    total = int(known.sum())
    if not total:
        raise NotMeasuredError("no head has both figures")
    count = int((values <= bound + (_ROUNDING - 1) * np.abs(bound))[known].sum())
    return count / total, count, total


def _nearest(points: Array, wanted: float) -> int:
    return int(np.argmin(np.abs(points - wanted)))


def _ratio_means(grid: Grid) -> tuple[Array, Array]:
    return _points(grid.axis, over_heads(grid.values["ratio"]), least=1)


def _wanted(grid: Grid, name: str) -> None:
    if name not in grid.values:
        raise NotMeasuredError(f"{name!r} was not measured")


def _listed(points: Sequence[float] | Array, values: Sequence[float] | Array, name: str, form: str = ".3g") -> str:
    return ", ".join(f"{value:{form}} at {name} = {point:g}" for point, value in zip(points, values, strict=True))


def plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
