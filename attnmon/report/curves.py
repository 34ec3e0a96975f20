"""Curves as SVG text. Colours are classes of the page's style sheet, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmon.report.text import esc, number, tick_labels

__all__ = ["Limit", "Line", "Marker", "curves", "sparkline"]

_Figures = NDArray[np.floating[Any]]
_CHART = (680, 230)
_LEFT = 52  # at least; more where the labels need it
_LETTER = 5.8  # width of a label's character, roughly
_POINTS = 160  # of a curve; more can't be told apart at its width


@dataclass(frozen=True)
class Line:
    """One curve: its class in the style sheet, and its name, shown where the pointer rests on it."""

    values: _Figures
    name: str
    look: str = ""


@dataclass(frozen=True)
class Limit:
    """A fixed level."""

    value: float
    name: str


@dataclass(frozen=True)
class Marker:
    """A warning."""

    step: int
    severity: str
    name: str


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        span = self.high - self.low
        return round(self.begin + (self.end - self.begin) * ((value - self.low) / span if span > 0 else 0.5), 1)


def _ticks(low: float, high: float, about: int, least: float = 0.0) -> tuple[float, ...]:
    """Round figures between two ends, at least ``least`` apart: 1 for whole ones."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return (low,)
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = max(next((power * factor for factor in (1, 2, 5) if power * factor >= raw), 10 * power), least)
    return tuple(i * step for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1))


def _thin(count: int, points: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, count - 1, min(count, points)).round().astype(np.int64))


def _path(xs: Sequence[float], ys: Sequence[float | None]) -> str:
    """A curve with gaps where nothing was measured."""
    parts: list[str] = []
    drawing = False
    for x, y in zip(xs, ys, strict=True):
        if y is None:
            drawing = False
            continue
        parts.append(f"{'L' if drawing else 'M'}{x:g} {y:g}")
        drawing = True
    if not parts:
        return ""
    ends = [*parts[1:], "M"]  # a lone point gets a line of no length, which round caps make a dot
    return "".join(part + ("h0" if part[0] == "M" == after[0] else "") for part, after in zip(parts, ends, strict=True))


def curves(
    steps: NDArray[np.int64],
    lines: Sequence[Line],
    *,
    label: str,
    band: tuple[_Figures, _Figures] | None = None,
    limits: Sequence[Limit] = (),
    markers: Sequence[Marker] = (),
    zero: bool = False,
) -> str:
    """Figures over steps.

    Args:
        steps: Their steps.
        lines: The curves, each as long as ``steps``.
        label: What it shows, for readers that can't see it.
        band: Lowest and highest figure of all heads at each step.
        limits: Levels to be drawn; one far outside the curves is named at the chart's edge instead.
        markers: Warnings, as triangles below the curves.
        zero: Whether the line of 0 is drawn.
    """
    width, height = _CHART
    right, bottom = width - 10, height - 34
    every = [line.values for line in lines] + list(band or ())
    finite = np.concatenate([values[np.isfinite(values)] for values in every]) if every else np.array([])
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    reach = 0.6 * ((high - low) or abs(high) or 1.0)
    near = [limit for limit in limits if low - reach <= limit.value <= high + reach]
    far = [limit for limit in limits if limit not in near]
    low, high = min([low, *(limit.value for limit in near)]), max([high, *(limit.value for limit in near)])
    pad = 0.05 * ((high - low) or abs(high) or 1.0)
    y = _Axis(low - pad, high + pad, bottom, 8)
    rows = _ticks(y.low, y.high, 5)
    labels = tick_labels(rows)
    left = max(_LEFT, round(12 + _LETTER * max(map(len, labels))))
    x = _Axis(*((int(steps[0]), int(steps[-1])) if len(steps) else (0, 1)), left, right)
    fine = (y.high - y.low) / 100

    parts = [f'<svg class="curves" role="img" aria-label="{esc(label)}" viewBox="0 0 {width} {height}">']
    for tick, name in zip(rows, labels, strict=True):
        parts.append(f'<path class="grid" d="M{left} {y.at(tick):g}H{right}"/>')
        parts.append(f'<text class="tick end" x="{left - 5}" y="{y.at(tick) + 3.5:g}">{name}</text>')
    parts.append(f'<text class="tick end" x="{left - 14}" y="{height - 4}">step</text>')
    for tick in _ticks(x.low, x.high, 8, least=1.0):
        parts.append(f'<text class="tick mid" x="{x.at(tick):g}" y="{height - 4}">{tick:.0f}</text>')
    if zero:
        parts.append(f'<path class="axis" d="M{left} {y.at(0.0):g}H{right}"/>')
    if band is not None and len(steps):
        parts.append(_band(x, y, steps, *band))
    kept = _thin(len(steps), _POINTS)
    xs = [x.at(step) for step in steps[kept].tolist()]
    for line in lines:
        ys = [y.at(value) if math.isfinite(value) else None for value in line.values[kept].tolist()]
        parts.append(f'<path class="line {line.look}" d="{_path(xs, ys)}"><title>{esc(line.name)}</title></path>')
    for limit in near:
        parts.append(f'<path class="limit" d="M{left} {y.at(limit.value):g}H{right}"/>')
        parts.append(_limit_name(limit, fine, left, y.at(limit.value) - 4))
    for place, limit in enumerate(far):
        above = limit.value > high
        at = 18 + 13 * place if above else bottom - 6 - 13 * place
        parts.append(_limit_name(limit, fine, left, at, f", {'above' if above else 'below'} this chart"))
    for marker in markers:
        shape = f'<path class="mark {esc(marker.severity)}" d="M{x.at(marker.step):g} {bottom + 4}l4.5 9h-9z">'
        parts.append(f"{shape}<title>{esc(marker.name)}</title></path>")
    return "".join([*parts, "</svg>"])


def _limit_name(limit: Limit, fine: float, left: float, y: float, more: str = "") -> str:
    text = f"{esc(limit.name)}: {number(limit.value, fine)}{more}"
    return f'<text class="tick limit-name" x="{left + 4}" y="{y:g}">{text}</text>'


def _band(x: _Axis, y: _Axis, steps: NDArray[np.int64], low: _Figures, high: _Figures) -> str:
    """From the lowest to the highest head; of samples that share a place, the widest."""
    starts = _thin(len(steps), _POINTS)
    bottom = np.minimum.reduceat(np.where(np.isfinite(low), low, np.inf), starts)
    top = np.maximum.reduceat(np.where(np.isfinite(high), high, -np.inf), starts)
    good = np.isfinite(bottom) & np.isfinite(top)
    xs = [x.at(step) for step in steps[starts][good].tolist()]
    if not xs:
        return ""
    up = [f"{a:g} {y.at(b):g}" for a, b in zip(xs, top[good].tolist(), strict=True)]
    down = [f"{a:g} {y.at(b):g}" for a, b in zip(xs, bottom[good].tolist(), strict=True)]
    return f'<path class="band" d="M{"L".join([*up, *down[::-1]])}z"><title>lowest to highest head</title></path>'


def sparkline(values: _Figures, low: float, high: float, *, points: int = 40) -> str:
    """A curve without axes; all of a table share one scale.

    Example:
        >>> print(sparkline(np.float32([0.0, 1.0]), 0.0, 1.0))
        <svg class="spark" viewBox="0 0 96 20" aria-hidden="true"><path d="M2 18L94 2"/></svg>
    """
    kept = _thin(len(values), points)
    x, y = _Axis(0, max(len(values) - 1, 1), 2, 94), _Axis(low, high, 18, 2)
    ys = [y.at(value) if math.isfinite(value) else None for value in values[kept].tolist()]
    path = _path([x.at(place) for place in kept.tolist()], ys)
    return f'<svg class="spark" viewBox="0 0 96 20" aria-hidden="true"><path d="{path}"/></svg>'
