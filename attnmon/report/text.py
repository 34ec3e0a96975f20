"""Figures and tables as HTML text."""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Iterable, Sequence

from attnmon.dashboard.names import BY_NAME, counted, plural, short_number

__all__ = [
    "NOTHING",
    "counted",
    "esc",
    "measured",
    "note",
    "number",
    "path_code",
    "plural",
    "short_path",
    "shortened",
    "signed",
    "table",
    "tick_labels",
    "why_none",
]

NOTHING = "\u2013"  # an en dash, for what was not measured
_MINUS = "\u2212"
_PATH = 72  # characters of a module path
_DIGITS = 7  # what a float32 holds
_SHORT = 6  # characters of a label that is never too long
_FEWEST_KEYS = {"active_share": 64, "score_spread": 8}  # that a row must see to have a figure


def esc(text: object) -> str:
    """Text from outside, for HTML and its attributes.

    Example:
        >>> esc('<b title="x">')
        '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(str(text), quote=True)


def why_none(quantity: str) -> str:
    """Why no sample has a figure of a quantity.

    Example:
        >>> why_none("active_share")
        'only rows that see at least 64 keys have one'
        >>> why_none("entropy")
        'no sample has a figure'
    """
    name, _, argument = quantity.partition("@")
    if name in _FEWEST_KEYS:
        return f"only rows that see at least {_FEWEST_KEYS[name]} keys have one"
    if name in BY_NAME and BY_NAME[name].argument == "N":
        return f"only rows that see more than {argument} keys have one"
    return "no sample has a figure"


def _place(size: float) -> int:
    """The power of ten of a number's first digit."""
    return math.floor(math.log10(size) + 1e-9)


def number(value: float | None, step: float = 0.0) -> str:
    """Three significant digits.

    Args:
        value: The figure.
        step: More digits are written where figures that differ by this much would look alike; 0: never.

    Example:
        >>> number(0.12345)
        '0.123'
        >>> number(0.99991), number(0.99991, 1e-5)
        ('1', '0.99991')
        >>> number(float("nan")) == NOTHING
        True
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    value += 0.0  # minus 0 becomes 0
    text = short_number(value)
    if step > 0 and value != 0 and (digits := min(1 + _place(abs(value)) - _place(step), _DIGITS)) > 3:
        text = _shortened_power(f"{value:.{digits}g}")
    return _signed_well(text)


def _shortened_power(text: str) -> str:
    return text.replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def _signed_well(text: str) -> str:
    return text.replace("-", _MINUS, 1) if text.startswith("-") else text


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Labels of an axis' ticks in their order, each with the digits that their spacing needs.

    Example:
        >>> tick_labels([0.99992, 0.99994]), tick_labels([0.0, 0.5]), tick_labels([0.0, 2e6])
        (['0.99992', '0.99994'], ['0.0', '0.5'], ['0', '2e6'])
    """
    if len(ticks) < 2:
        return [number(tick) for tick in ticks]
    last = _place(ticks[1] - ticks[0])
    fixed = [f"{tick + 0.0:.{max(0, -last)}f}" for tick in ticks]
    powers = [f"{tick:.{max(0, _place(abs(tick)) - last)}e}" if tick else "0" for tick in ticks]
    powers = [_shortened_power(text) for text in powers]
    chosen = fixed if max(map(len, fixed)) <= max(_SHORT, *map(len, powers)) else powers
    return [_signed_well(text) for text in chosen]


def measured(value: float, step: float = 0.0) -> str:
    """A figure that was logged: one that is not finite is named, as a dash would mean that there is none.

    Example:
        >>> measured(0.12345), measured(float("nan")), measured(float("inf"))
        ('0.123', 'NaN', 'infinite')
    """
    if math.isnan(value):
        return "NaN"
    return "infinite" if math.isinf(value) else number(value, step)


def short_path(path: str) -> str:
    """A module path where many have to find room: a very long one without its middle.

    Example:
        >>> short_path("h.0.attn")
        'h.0.attn'
    """
    return path if len(path) <= _PATH else f"{path[: _PATH // 2]}\u2026{path[-_PATH // 2 :]}"


def path_code(path: str) -> str:
    """A module path for a table; the middle of a very long one is left to the pointer's label.

    Example:
        >>> path_code("h.0.attn")
        '<code>h.0.attn</code>'
    """
    title = f' title="{esc(path)}"' if len(path) > _PATH else ""
    return f"<code{title}>{esc(short_path(path))}</code>"


def signed(value: float, step: float = 0.0) -> str:
    """The same with a sign.

    Example:
        >>> signed(0.5)
        '+0.5'
    """
    return f"+{number(value, step)}" if value > 0 and math.isfinite(value) else number(value, step)


def shortened(items: Sequence[str], most: int, between: str = ", ") -> str:
    """A list that ends in "and ... more" where it is long.

    Example:
        >>> shortened(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    return between.join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def note(text: str) -> str:
    """A sentence set apart."""
    return f'<p class="note">{esc(text)}</p>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (), look: str = "") -> str:
    """A table in a box of its own that scrolls where the page is narrow.

    Args:
        columns: Names of the columns, as HTML; empty: the first cell of each row names it.
        rows: Cells, as HTML.
        left: Columns of text, which are set to the left.
        look: Class in the style sheet.
    """
    side = [' class="l"' if place in left else "" for place in range(max(len(columns), 1 + max(left, default=0)))]
    top = "".join(f"<th{side[place]}>{name}</th>" for place, name in enumerate(columns))
    body = "".join(
        "<tr>"
        + "".join(f"<td{side[place] if place < len(side) else ''}>{cell}</td>" for place, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    head = f"<thead><tr>{top}</tr></thead>" if columns else ""
    return f'<div class="scroll"><table class="{look}">{head}<tbody>{body}</tbody></table></div>'
