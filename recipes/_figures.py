"""The paper's figures from an analysis: same axes, scales and colours; corrected forms in a style of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Drawing needs the package `matplotlib`. Install it with: pip install 'attnmon[figures]'"
    ) from error

import numpy as np
import torch
from _series import (
    LABELS,
    Array,
    Grid,
    NotMeasuredError,
    Record,
    distance_over_length,
    distance_over_top_n,
    largest_tested,
    over_heads,
    sensitivity,
    separability_over_top_n,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from matplotlib.ticker import NullFormatter, NullLocator

from attnmon.analysis import Analysis, CriticalSize
from attnmon.functional import separability

matplotlib.use("Agg")
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "attnmon",  # the same figure is the same file
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
_COLOURS = {"distance": "tab:green", "expected_paper": "tab:blue", "upper_bound": "tab:red"}
_MARKERS = {"distance": "o", "expected_paper": "s", "upper_bound": "^"}


_P = ParamSpec("_P")


def _styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    @wraps(draw)
    def styled(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return styled


def save(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Write a figure as PNG and SVG, without dates or versions in it."""
    paths = folder / f"{name}.png", folder / f"{name}.svg"
    with matplotlib.rc_context(_STYLE):
        for path, metadata in zip(paths, ({"Software": None}, {"Date": None}), strict=True):
            # beside its place first: a run that is stopped leaves no half figure
            partial = path.with_name(f".{path.name}")
            figure.savefig(partial, format=path.suffix[1:], dpi=150, metadata=metadata, bbox_inches="tight")
            os.replace(partial, path)
    return paths


@_styled
def figure_2a(analysis: Analysis) -> Figure:
    """Distance, printed expectation and bound over L at N = 5; the corrected expectation's Jensen bounds as a band."""
    grid = distance_over_length(analysis)
    figure, axes = _figure()
    _distances(axes, grid)
    axes.set(xlabel="context length L (tokens)", title=f"Figure 2a: N = {grid.top_n}, mean over {_heads(analysis)}")
    _legend(axes)
    return figure


@_styled
def figure_2b(analysis: Analysis) -> Figure:
    """The same over N at the longest L."""
    grid = distance_over_top_n(analysis)
    figure, axes = _figure()
    _distances(axes, grid)
    axes.set(
        xlabel="selected keys N",
        title=f"Figure 2b: L = {grid.length}, mean over {_heads(analysis)}",
    )
    _remark(axes, "each N over the rows that see more than N keys")
    _legend(axes)
    return figure


@_styled
def figure_2c(analysis: Analysis, criticals: Sequence[CriticalSize]) -> Figure:
    """The critical N over L, a line for each level of the test, with 0.06 L; open where no N measured is critical."""
    if not criticals:
        raise NotMeasuredError("the task 'critical' was not run")
    figure, axes = _figure()
    lengths = np.array(analysis.lengths, dtype=float)
    styles = (("tab:purple", "o", "-"), ("tab:orange", "s", "--"), ("tab:brown", "^", ":"))
    for critical, (colour, marker, line) in zip(criticals, styles, strict=False):
        sizes = np.array([np.nan if size is None else size for size in critical.size])
        axes.plot(lengths, sizes, line, color=colour, marker=marker, label=f"critical N, alpha = {critical.alpha:g}")
        none = np.isnan(sizes)
        if none.any():
            label = f"none up to here, alpha = {critical.alpha:g}"
            size = 9 if marker == "s" else 5  # one around the other where they coincide
            style: dict[str, Any] = {"color": colour, "marker": marker, "ms": size, "fillstyle": "none"}
            axes.plot(lengths[none], largest_tested(analysis)[none], linestyle="none", label=label, **style)
    axes.plot(lengths, 0.06 * lengths, color="0.3", linestyle=(0, (5, 3)), label="0.06 L")
    axes.set(
        xlabel="context length L (tokens)",
        ylabel="critical N (keys)",
        title=f"Figure 2c: Kolmogorov-Smirnov test over {_heads(analysis)}",
    )
    _ticks(axes, lengths)
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


@_styled
def figure_3(analysis: Analysis) -> Figure:
    """Box plots of Ns/N over N, one box = all heads, with the lower bound and both forms of the upper one."""
    grid = separability_over_top_n(analysis)
    ratio = grid.values["ratio"]
    shown = [place for place in range(len(grid.axis)) if np.isfinite(ratio[:, place]).any()]
    if not shown:
        raise NotMeasuredError("no head has a row with more than N keys")
    figure, axes = _figure()
    places = np.arange(len(shown))
    boxes = [ratio[np.isfinite(ratio[:, place]), place] for place in shown]
    axes.boxplot(
        boxes,
        positions=places,
        widths=0.5,
        patch_artist=True,
        boxprops={"facecolor": "#cfe3f3", "edgecolor": "0.35"},
        medianprops={"color": "0.15"},
        whiskerprops={"color": "0.35"},
        capprops={"color": "0.35"},
        flierprops={"marker": ".", "markersize": 4, "markeredgecolor": "0.4"},
        label=f"Ns/N of {_heads(analysis)}",
    )
    styles = {
        "upper": ("tab:red", "-", "v"),
        "upper_valid": ("tab:orange", "--", "d"),
        "lower": ("tab:purple", "-", "^"),
    }
    hidden: list[str] = []
    for name, (colour, line, marker) in styles.items():
        if name in grid.values:
            bound = over_heads(grid.values[name])[shown]
            if name == "lower":
                hidden = [f"{grid.axis[p]:g}" for p, value in zip(shown, bound, strict=True) if value < 0]
                bound = np.where(bound < 0, np.nan, bound)
            axes.plot(places, bound, line, color=colour, marker=marker, markersize=5, label=LABELS[name])
    axes.set_xticks(places, [f"{grid.axis[place]:g}" for place in shown])
    axes.set(
        xlabel="selected keys N",
        ylabel="share of distinguishable keys Ns/N",
        ylim=(0, 1.05),
        title=f"Figure 3: L = {grid.length}; bounds are means over the heads",
    )
    below = f"; the lower bound is below 0 and not drawn for N = {', '.join(hidden)}" if hidden else ""
    _remark(axes, f"each N over the rows that see more than N keys{below}")
    _legend(axes)
    return figure


@_styled
def figure_4(analysis: Analysis) -> Figure:
    """Log-log: the maximum over heads of g over T, one curve per eps, with the printed and the corrected bound."""
    data = sensitivity(analysis)
    temperatures = np.array(data.temperatures)
    figure, axes = _figure()
    for place, epsilon in enumerate(data.epsilons):
        colour = f"C{place}"
        curve = over_heads(data.sensitivity[:, :, place], "max")
        _positive(axes, temperatures, curve, f"finite difference g, eps = {epsilon:g}", colour)
    if data.spectral is not None:
        spectral = over_heads(data.spectral, "max")
        axes.plot(temperatures, spectral, color="0.45", linewidth=0.9, label=LABELS["spectral"])
    axes.plot(temperatures, 0.25 / temperatures, color="black", linestyle="--", label=LABELS["bound_entry"])
    axes.axhline(2**0.5, color="black", linestyle=(0, (1, 3)), linewidth=1, label=LABELS["bound_cap"])
    axes.plot(
        temperatures, 0.5 / temperatures, color="black", linestyle="-.", linewidth=1, label=LABELS["bound_spectral"]
    )
    own = sorted(set(analysis.temperatures))
    for place, temperature in enumerate(own):
        span = f"{own[0]:.3g}" if len(own) == 1 else f"{own[0]:.3g} to {own[-1]:.3g} over its layers"
        label = f"the model's own T: {span}" if place == 0 else None
        axes.axvline(temperature, color="tab:pink", linestyle=":", linewidth=1.4, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="softmax temperature T (raw score q·k)",
        ylabel="sensitivity (1 / score)",
        title=f"Figure 4: max over {_heads(analysis)}, L = {data.length}",
    )
    _legend(axes)
    return figure


# -- Figure 1 -----------------------------------------------------------------------------------------------------


def illustration() -> list[Record]:
    """Keys on a circle, their weights and what the geometry of eq. 12 says of each: the numbers behind Figure 1."""
    angles = np.deg2rad([101.0, 125.0, 259.0, 348.0, 219.0, 185.0, 22.0, 146.0, 283.0, 65.0])
    weights = np.array([0.20, 0.17, 0.14, 0.12, 0.09, 0.08, 0.07, 0.06, 0.04, 0.03])
    top_n = 4  # the weights descend: the selected keys are the first ones
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    scaled = weights[:, None] * vectors
    centre = scaled[:top_n].sum(axis=0)
    result = separability(torch.tensor(weights), torch.tensor(vectors), top_n)
    radius = float(result.radius)
    distances = np.linalg.norm(scaled - centre, axis=1)
    return [
        {
            "key": key,
            "weight": float(weights[key]),
            "x": float(vectors[key, 0]),
            "y": float(vectors[key, 1]),
            "scaled_x": float(scaled[key, 0]),
            "scaled_y": float(scaled[key, 1]),
            "selected": key < top_n,
            "distinguishable": bool(key < top_n and distances[key] < radius),
            "centre_x": float(centre[0]),
            "centre_y": float(centre[1]),
            "radius": radius,
            "ratio": float(result.ratio),
        }
        for key in range(len(weights))
    ]


@_styled
def figure_1() -> Figure:
    """The illustration: embeddings on a circle, scaled by their weights, the ball around the sum of the selected."""
    keys = illustration()
    first = keys[0]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axes, names, title in (
        (left, ("x", "y"), "embeddings x on the circle"),
        (middle, ("scaled_x", "scaled_y"), "scaled by the weights: a x"),
        (right, ("scaled_x", "scaled_y"), f"ball around s: Ns/N = {first['ratio']:g}"),
    ):
        axes.set_aspect("equal")
        axes.set_title(title, fontsize=10)
        groups = [
            ("not selected", "0.6", "o", lambda key: not key["selected"]),
            ("selected (top N = 4)", "tab:green", "o", lambda key: key["selected"]),
        ]
        if axes is right:
            groups[1:] = [
                ("selected, distinguishable", "tab:green", "o", lambda key: key["distinguishable"]),
                (
                    "selected, not distinguishable",
                    "tab:red",
                    "X",
                    lambda key: key["selected"] and not key["distinguishable"],
                ),
            ]
        for label, colour, marker, belongs in groups:
            points = [(key[names[0]], key[names[1]]) for key in keys if belongs(key)]
            if points:
                axes.scatter(*zip(*points, strict=True), c=colour, marker=marker, s=38, zorder=3, label=label)
    left.add_patch(Circle((0, 0), 1, fill=False, color="0.7"))
    left.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25))
    centre = (first["centre_x"], first["centre_y"])
    right.scatter(*centre, c="black", marker="*", s=90, zorder=4, label="s, sum of the selected a x")
    right.add_patch(
        Circle(centre, first["radius"], color="tab:blue", alpha=0.15, label="radius r: nearest not selected")
    )
    for axes in (left, middle):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=8)
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=8)
    figure.suptitle("Figure 1: when a selected key can be told apart (an illustration, not this model)", fontsize=11)
    return figure


# -- shared -------------------------------------------------------------------------------------------------------


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.2))  # the legend beside it is added on saving
    return figure, figure.subplots()


def _distances(axes: Axes, grid: Grid) -> None:
    points = np.array(grid.axis)
    if not np.isfinite(over_heads(grid.values["distance"])).any():
        raise NotMeasuredError("no head has a row with more than N keys")
    for name, colour in _COLOURS.items():
        if name in grid.values:
            axes.plot(
                points, over_heads(grid.values[name]), color=colour, marker=_MARKERS[name], ms=5, label=LABELS[name]
            )
    if {"expected_lower", "expected_upper"} <= set(grid.values):
        lower, upper = (over_heads(grid.values[f"expected_{side}"]) for side in ("lower", "upper"))
        axes.fill_between(
            points,
            lower,
            upper,
            facecolor="#a9c9e8",
            alpha=0.5,
            edgecolor="tab:blue",
            linestyle=":",
            linewidth=1,
            zorder=1,
            label=LABELS["expected_band"],
        )
    _ticks(axes, points)
    axes.set_ylabel("distance (sum of vector norms)")
    axes.set_ylim(bottom=0)


def _ticks(axes: Axes, points: Array) -> None:
    """A tick at each point measured, less those that would overlap their neighbour."""
    span = float(points[-1] - points[0]) or 1.0
    kept: list[float] = []
    for point in reversed(points.tolist()):
        if not kept or kept[-1] - point >= 0.035 * span:
            kept.append(point)
    axes.set_xticks(kept, [f"{point:g}" for point in kept])


def _positive(axes: Axes, x: Array, y: Array, label: str, colour: str) -> None:
    y = np.where(y > 0, y, np.nan)  # a logarithmic axis has no 0
    axes.plot(x, y, color=colour, marker="o", markersize=4, label=label)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def _remark(axes: Axes, text: str) -> None:
    axes.annotate(text, (0, -0.2), xycoords="axes fraction", fontsize=8, color="0.3", annotation_clip=False)


def _heads(analysis: Analysis) -> str:
    count = len(analysis.heads)
    return f"{count} heads" if count != 1 else "1 head"
