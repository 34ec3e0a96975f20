"""What the Attention tab and the report read from a run's event files, and what a monitor writes there.

Four kinds of data under TensorBoard's plugin name ``attnmon``, all of them tensors, for each prefix (``attn``, and
``attn_val`` for validations):

- ``heads``, tag ``attnmon/<prefix>/<path of the quantity>``: float32 ``(layers, heads)``, one row per layer number and
  as many columns as the layer with the most heads has. NaN where there is no such head, or it was not measured.
- ``limits``, tag ``attnmon/<prefix>/limits/<rule>/<path of the quantity>``: likewise the limits that a rule has learned
  from each head itself; NaN where it does not judge the head.
- ``run``, tag ``attnmon/<prefix>/run``: JSON in a string tensor, see `run_record`; again whenever it changes.
- ``warnings``, tag ``attnmon/<prefix>/warnings``: JSON in a string tensor, see `warnings_record`; at steps with alerts,
  and where heads have recovered.

The content of a tag's metadata is JSON, see `metadata`: which of these it is, and the version of this format. All
JSON here is strict: what is not finite is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnmon.dashboard.names import BY_NAME, path_of, title

if TYPE_CHECKING:
    from attnmon.alerts import Alert

__all__ = [
    "PLUGIN",
    "VERSION",
    "UnreadableError",
    "heads_matrix",
    "metadata",
    "read_json",
    "run_record",
    "tag_of",
    "to_json",
    "warnings_record",
]

PLUGIN = "attnmon"
VERSION = 1
KINDS = ("heads", "limits", "run", "warnings")


class UnreadableError(ValueError):
    """Data that is not ours, broken, or of a later version; the text says which."""


def tag_of(kind: str, prefix: str = "attn", quantity: str = "", rule: str = "") -> str:
    """The tag of a kind of data.

    Args:
        kind: Which.
        prefix: Of the monitor.
        quantity: Of heads and limits.
        rule: Of limits.

    Example:
        >>> tag_of("heads", quantity="separability@10")
        'attnmon/attn/separability/top_10'
        >>> tag_of("warnings")
        'attnmon/attn/warnings'
        >>> tag_of("limits", quantity="score_spread", rule="score_growth")
        'attnmon/attn/limits/score_growth/logits/spread'
    """
    if kind == "limits":
        return f"{PLUGIN}/{prefix}/limits/{rule}/{path_of(quantity)}"
    return f"{PLUGIN}/{prefix}/{path_of(quantity) if kind == 'heads' else kind}"


def metadata(kind: str, prefix: str = "attn", quantity: str = "", rule: Mapping[str, Any] | None = None) -> bytes:
    """The content of a tag's metadata.

    Args:
        kind: Which kind of data.
        prefix: Of the monitor.
        quantity: Of heads and limits.
        rule: Of limits: ``{"rule", "title", "severity", "rises"}``.

    Example:
        >>> read_json(metadata("heads", quantity="entropy_normalized"))["title"]
        'Normalised entropy'
    """
    content: dict[str, Any] = {"version": VERSION, "kind": kind, "prefix": prefix}
    if kind == "heads":
        known = BY_NAME.get(quantity.partition("@")[0])
        content |= {
            "quantity": quantity,
            "title": title(quantity, unit=False),
            "unit": known.unit if known else "",
            "limits": list(known.limits if known else (None, None)),  # ends of the colour scale
            "rise": known.rise if known else "",
            "fall": known.fall if known else "",
        }
    if kind == "limits":
        content |= {"quantity": quantity, **(rule or {})}
    return to_json(content)


def heads_matrix(layers: Mapping[int, Sequence[float]]) -> NDArray[np.float32]:
    """Layer number -> one number per head, as a rectangle filled up with NaN.

    Example:
        >>> heads_matrix({0: [1.0, 2.0], 2: [3.0]})
        array([[ 1.,  2.],
               [nan, nan],
               [ 3., nan]], dtype=float32)
    """
    rows = max(layers, default=-1) + 1
    matrix = np.full((rows, max(map(len, layers.values()), default=0)), np.nan, dtype=np.float32)
    for layer, heads in layers.items():
        matrix[layer, : len(heads)] = heads
    return matrix


def run_record(
    *,
    layers: Mapping[int, str],
    heads: Mapping[int, int],
    temperatures: Mapping[int, float],
    not_measured: Mapping[str, str],
    source: str,
    every_n_steps: int | None,
    levels: Iterable[Mapping[str, Any]],
) -> dict[str, Any]:
    """What does not change from sample to sample.

    Args:
        layers: Module path of each layer number.
        heads: Its number of heads.
        temperatures: Its own softmax temperature.
        not_measured: Module path -> reason.
        source: ``"train"``, ``"probe"`` or ``"validation"``.
        every_n_steps: The cadence; None where there is none, as for validations.
        levels: Fixed limits of the rules, see `attnmon.alerts.AlertRules.fixed_levels`.

    Returns:
        ``{"version", "layers": [{"number", "path", "heads", "temperature"}], "not_measured", "source",
        "every_n_steps", "levels": [{"rule", "title", "severity", "quantity", "limit", "rises"}]}``
    """
    return {
        "version": VERSION,
        "layers": [
            {"number": number, "path": layers[number], "heads": heads[number], "temperature": temperatures[number]}
            for number in sorted(layers)
        ],
        "not_measured": dict(not_measured),
        "source": source,
        "every_n_steps": every_n_steps,
        "levels": [dict(level) for level in levels],
    }


def warnings_record(
    step: int, alerts: Iterable[Alert], alarmed: Mapping[str, Mapping[int, Sequence[int]]]
) -> dict[str, Any]:
    """The alerts of one sample, and the heads that are under alarm after it.

    Args:
        step: Of the sample.
        alerts: What the rules said about it.
        alarmed: Rule -> layer number -> heads.

    Returns:
        ``{"version", "step", "alerts": [...], "alarmed": {rule: {layer: heads}}}``, each alert with the fields of
        `attnmon.alerts.Alert`; layer numbers are strings there, as JSON has no other keys.
    """
    return {
        "version": VERSION,
        "step": step,
        "alerts": [asdict(alert) for alert in alerts],
        "alarmed": {
            rule: {str(layer): list(heads) for layer, heads in layers.items()} for rule, layers in alarmed.items()
        },
    }


def to_json(record: object) -> bytes:
    """Strict JSON in UTF-8.

    Example:
        >>> to_json({1: (math.nan, 2)})
        b'{"1":[null,2]}'
    """
    return json.dumps(_strict(record), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _strict(item: object) -> object:
    if isinstance(item, float):
        return item if math.isfinite(item) else None
    if isinstance(item, Mapping):
        return {str(key): _strict(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_strict(value) for value in item]
    return item


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value


def read_json(content: bytes | str) -> dict[str, Any]:
    """A record, or the content of a tag's metadata.

    Raises:
        UnreadableError: It is not JSON of ours, or of a version that is not known here.
    """
    try:
        record = json.loads(content, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"not JSON of ours: {error}") from None
    if not isinstance(record, dict) or "version" not in record:
        raise UnreadableError("not a record of attnmon")
    if record["version"] != VERSION:
        raise UnreadableError(
            f"version {record['version']!r} of attnmon's data, where version {VERSION} can be read: update attnmon"
        )
    return record
