"""Figures and tables as HTML text."""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Iterable, Sequence

from attnmon.dashboard.names import short_number

__all__ = ["NOTHING", "esc", "measured", "note", "number", "path_code", "short_path", "shortened", "signed", "table"]

NOTHING = "\u2013"  # an en dash, for what was not measured
_MINUS = "\u2212"
_PATH = 72  # characters of a module path


def esc(text: object) -> str:
    """Text from outside, for HTML and its attributes.

    Example:
        >>> esc('<b title="x">')
        '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(str(text), quote=True)


def number(value: float | None) -> str:
    """Three significant digits.

    Example:
        >>> number(0.12345)
        '0.123'
        >>> number(float("nan")) == NOTHING
        True
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    value += 0.0  # minus 0 becomes 0
    return short_number(value).replace("-", _MINUS, 1) if value < 0 else short_number(value)


def measured(value: float) -> str:
    """A figure that was logged: one that is not finite is named, as a dash would mean that there is none.

    Example:
        >>> measured(0.12345), measured(float("nan")), measured(float("inf"))
        ('0.123', 'NaN', 'infinite')
    """
    if math.isnan(value):
        return "NaN"
    return "infinite" if math.isinf(value) else number(value)


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


def signed(value: float) -> str:
    """The same with a sign.

    Example:
        >>> signed(0.5)
        '+0.5'
    """
    return f"+{number(value)}" if value > 0 and math.isfinite(value) else number(value)


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
