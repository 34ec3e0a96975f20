"""The data of the Attention tab as TensorBoard's data provider has it, checked.

Whatever is broken, foreign or of another version is left out and named in a list of problems; it never costs more than
the tag or the sample it is in.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tensorboard import errors
from tensorboard.data.provider import DataProvider, RunTagFilter

from attnmon.dashboard import QUANTITIES
from attnmon.records import KINDS, PLUGIN, UnreadableError, read_json, tag_of

__all__ = ["MissingError", "Samples", "Store"]

_ALL_SAMPLES = 2**31 - 1
_CACHE_BYTES = 256 * 2**20
_ORDER = {quantity.name: place for place, quantity in enumerate(QUANTITIES)}
_T = TypeVar("_T")


class MissingError(KeyError):
    """No such run, tag or step; the text says which."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Samples:
    """One quantity of one run.

    Attributes:
        steps: In rising order, each once.
        wall_times: Seconds since 1970.
        frames: Per step ``(layers, heads)``; NaN where there is no such head, or it was not measured.
        problems: What was left out.
    """

    steps: tuple[int, ...]
    wall_times: tuple[float, ...]
    frames: tuple[NDArray[np.float32], ...]
    problems: tuple[str, ...] = ()

    def frame(self, step: int) -> NDArray[np.float32] | None:
        """The sample of a step, None where it was not kept."""
        return self.frames[self.steps.index(step)] if step in self.steps else None

    def extent(self) -> tuple[float, float] | None:
        """Least and largest finite value, None where there is none."""
        ends = [(float(finite.min()), float(finite.max())) for finite in map(_finite, self.frames) if finite.size]
        return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else None

    def change(self, baseline: int) -> float | None:
        """Largest absolute difference from the sample of a step."""
        base = self.frame(baseline)
        if base is None:
            return None
        sizes = [
            float(np.abs(finite).max()) for finite in (_finite(_minus(f, base)) for f in self.frames) if finite.size
        ]
        return max(sizes, default=None)

    def head(self, layer: int, head: int) -> NDArray[np.float32]:
        """One head's figure at every step."""
        return np.array(
            [f[layer, head] if layer < f.shape[0] and head < f.shape[1] else np.nan for f in self.frames], np.float32
        )


def _finite(frame: NDArray[np.float32]) -> NDArray[np.float32]:
    return frame[np.isfinite(frame)]


def _minus(frame: NDArray[np.float32], base: NDArray[np.float32]) -> NDArray[np.float32]:
    rows, columns = map(min, frame.shape, base.shape)
    return frame[:rows, :columns] - base[:rows, :columns]


class Store:
    """Reads through a data provider, with either of TensorBoard's loaders behind it.

    Args:
        provider: TensorBoard's.
        samples: Samples to read of each tag; 0 means all that TensorBoard has kept.
    """

    def __init__(self, provider: DataProvider, samples: int) -> None:
        self._provider = provider
        self._samples = samples or _ALL_SAMPLES
        self._cache: OrderedDict[tuple[str, str, str], tuple[object, Any, int]] = OrderedDict()
        self._lock = threading.Lock()  # TensorBoard serves requests in threads

    def catalogue(self, ctx: object, experiment: str) -> dict[str, Any]:
        """What there is to show.

        Returns:
            ``{"runs": [{"run", "tags": [...]}], "problems": [{"run", "tag", "text"}]}``. Each tag has the content of
            its metadata, see `attnmon.records.metadata`, its name and a ``stamp`` that changes with its data.
        """
        listed = self._provider.list_tensors(ctx, experiment_id=experiment, plugin_name=PLUGIN) or {}
        runs, problems = [], []
        for run in sorted(listed, key=_natural):
            tags = []
            for tag, series in listed[run].items():
                try:
                    content = _content(series.plugin_content)
                except UnreadableError as error:
                    problems.append({"run": run, "tag": tag, "text": str(error)})
                else:
                    tags.append({**content, "tag": tag, "stamp": _stamp(series)})
            if tags:
                runs.append({"run": run, "tags": sorted(tags, key=_place)})
        return {"runs": runs, "problems": problems}

    def samples(self, ctx: object, experiment: str, run: str, tag: str) -> Samples:
        """One quantity of one run.

        Raises:
            MissingError: There is no such run or tag.
            UnreadableError: The tag is not ours, or TensorBoard can't read it.
        """
        return self._read(ctx, experiment, run, tag, "heads", _samples)

    def run(self, ctx: object, experiment: str, run: str, prefix: str) -> dict[str, Any]:
        """What a run is like, and its warnings.

        Returns:
            ``{"record", "warnings", "problems"}``: the newest `attnmon.records.run_record` or None; the alerts by
            step, each with the fields of `attnmon.alerts.Alert`; texts.
        """
        problems: list[str] = []
        record: dict[str, Any] | None = None
        try:
            found, texts = self._read(ctx, experiment, run, tag_of("run", prefix), "run", _run_records)
            record = found[-1] if found else None
            problems += texts
        except MissingError:
            problems.append("the run does not say what its layers are called, nor how many heads each has")
        except UnreadableError as error:
            problems.append(f"what the run is like: {error}")
        warnings: list[dict[str, Any]] = []
        try:
            warnings, texts = self._read(ctx, experiment, run, tag_of("warnings", prefix), "warnings", _alerts)
            problems += texts
        except MissingError:
            pass  # a run without a warning
        except UnreadableError as error:
            problems.append(f"warnings: {error}")
        return {"record": record, "warnings": warnings, "problems": problems}

    def _read(
        self, ctx: object, experiment: str, run: str, tag: str, kind: str, build: Callable[[Sequence[Any]], _T]
    ) -> _T:
        wanted = {
            "experiment_id": experiment,
            "plugin_name": PLUGIN,
            "run_tag_filter": RunTagFilter(runs=[run], tags=[tag]),
        }
        listed = self._provider.list_tensors(ctx, **wanted) or {}
        series = listed.get(run, {}).get(tag)
        if series is None:
            raise MissingError(f"There is no tag {tag!r} in the run {run!r}.")
        found = _content(series.plugin_content)["kind"]
        if found != kind:
            raise UnreadableError(f"{tag!r} is of kind {found!r}, not {kind!r}")
        key, stamp = (experiment, run, tag), _stamp(series)
        with self._lock:
            known = self._cache.get(key)
            if known is not None and known[0] == stamp:
                self._cache.move_to_end(key)
                value: _T = known[1]
                return value
        try:
            data = self._provider.read_tensors(ctx, downsample=self._samples, **wanted)[run][tag]
        except errors.PublicError:
            raise
        except Exception as error:  # of gRPC, or of a tensor that is broken
            raise UnreadableError(f"TensorBoard can't read this tag: {type(error).__name__}: {error}") from error
        value = build(data)
        self._keep(key, stamp, value, sum(int(datum.numpy.nbytes) for datum in data))
        return value

    def _keep(self, key: tuple[str, str, str], stamp: object, value: object, size: int) -> None:
        with self._lock:
            self._cache[key] = (stamp, value, size)
            self._cache.move_to_end(key)
            while len(self._cache) > 1 and sum(entry[2] for entry in self._cache.values()) > _CACHE_BYTES:
                self._cache.popitem(last=False)


def _stamp(series: Any) -> list[Any]:
    return [series.max_step, series.max_wall_time]


def _natural(name: str) -> list[tuple[int, str]]:
    """For sorting ``version_2`` before ``version_10``."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


def _place(tag: Mapping[str, Any]) -> tuple[Any, ...]:
    name, _, argument = tag.get("quantity", "").partition("@")
    return (tag["prefix"], KINDS.index(tag["kind"]), _ORDER.get(name, len(_ORDER)), _numbers(argument), tag["tag"])


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def _content(raw: bytes) -> dict[str, Any]:
    """The content of a tag's metadata, each field of the type that the tab takes it to be."""
    content = read_json(raw)
    kind, prefix = content.get("kind"), content.get("prefix")
    if kind not in KINDS or not isinstance(prefix, str):
        raise UnreadableError(f"kind {kind!r} with prefix {prefix!r}, where a kind is one of {', '.join(KINDS)}")
    clean: dict[str, Any] = {"kind": kind, "prefix": prefix}
    if kind == "heads":
        quantity = content.get("quantity")
        if not isinstance(quantity, str) or not quantity:
            raise UnreadableError(f"quantity {quantity!r}, where a name is expected")
        clean["quantity"] = quantity
        for name in ("title", "unit", "rise", "fall"):
            clean[name] = content[name] if isinstance(content.get(name), str) else ""
        clean["title"] = clean["title"] or quantity
        limits = content.get("limits")
        pair = limits if isinstance(limits, list) and len(limits) == 2 else [None, None]
        clean["limits"] = [_number(end) for end in pair]
    return clean


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _last_of_each_step(data: Iterable[Any]) -> list[Any]:
    """A run that was resumed repeats steps: the later one counts."""
    kept = {int(datum.step): datum for datum in data}
    return [kept[step] for step in sorted(kept)]


def _samples(data: Sequence[Any]) -> Samples:
    good: list[Any] = []
    strange: list[Any] = []
    for datum in _last_of_each_step(data):
        (good if datum.numpy.ndim == 2 and datum.numpy.dtype.kind in "fiu" else strange).append(datum)
    problems = []
    if strange:
        first = strange[0]
        problems.append(
            f"{len(strange)} of {len(strange) + len(good)} samples are left out, which are not numbers of layers x "
            f"heads; the first, at step {first.step}, has the shape {first.numpy.shape} and type {first.numpy.dtype}"
        )
    frames = tuple(np.asarray(datum.numpy, np.float32) for datum in good)
    changes = [place for place in range(1, len(frames)) if frames[place].shape != frames[place - 1].shape]
    if changes:
        at = changes[0]
        before, after = (" x ".join(map(str, frame.shape)) for frame in frames[at - 1 : at + 1])
        more = f", and {len(changes) - 1} times more" if len(changes) > 1 else ""
        problems.append(
            f"the number of layers x heads changes from {before} to {after} at step {good[at].step}{more}: "
            "each sample is shown as it is, and a head that is not in both has no change"
        )
    return Samples(
        tuple(int(datum.step) for datum in good),
        tuple(float(datum.wall_time) for datum in good),
        frames,
        tuple(problems),
    )


def _texts(data: Sequence[Any], read: Callable[[int, dict[str, Any]], _T]) -> tuple[list[_T], list[str]]:
    """One record per step, and what could not be read."""
    found, failed = [], []
    for datum in _last_of_each_step(data):
        try:
            if datum.numpy.size != 1:
                raise UnreadableError(f"not one text but an array of shape {datum.numpy.shape}")
            text = datum.numpy.item()
            if not isinstance(text, bytes | str):
                raise UnreadableError(f"not a text but {datum.numpy.dtype}")
            found.append(read(int(datum.step), read_json(text)))
        except UnreadableError as error:
            failed.append(f"step {datum.step}: {error}")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            failed.append(f"step {datum.step}: not built as expected ({type(error).__name__}: {error})")
    more = [f"and {len(failed) - 3} records more"] if len(failed) > 3 else []
    return found, failed[:3] + more


def _run_records(data: Sequence[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    return _texts(data, _run_record)


def _run_record(step: int, record: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": step,
        "layers": [
            {
                "number": int(layer["number"]),
                "path": str(layer["path"]),
                "heads": int(layer["heads"]),
                "temperature": _number(layer.get("temperature")),
            }
            for layer in record["layers"]
        ],
        "not_measured": {str(path): str(reason) for path, reason in record.get("not_measured", {}).items()},
        "source": str(record.get("source", "")),
        "every_n_steps": int(record.get("every_n_steps") or 0),
        "levels": [
            {
                "rule": str(level["rule"]),
                "title": str(level["title"]),
                "severity": str(level["severity"]),
                "quantity": str(level["quantity"]),
                "limit": float(level["limit"]),
                "rises": bool(level["rises"]),
            }
            for level in record.get("levels", [])
        ],
    }


def _alerts(data: Sequence[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    by_step, problems = _texts(data, lambda step, record: [_alert(step, alert) for alert in record["alerts"]])
    return [alert for alerts in by_step for alert in alerts], problems


def _alert(step: int, alert: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": step,
        **{name: str(alert[name]) for name in ("rule", "title", "severity", "summary", "remedy")},
        "since": int(alert["since"]),
        "heads": {int(layer): [int(head) for head in heads] for layer, heads in alert["heads"].items()},
        "evidence": [_evidence(part) for part in alert["evidence"]],
    }


def _evidence(part: Mapping[str, Any]) -> dict[str, Any]:
    """An `attnmon.alerts.Evidence` as one row per head."""
    return {
        "quantity": str(part["quantity"]),
        "label": str(part["label"]),
        "rows": {
            (int(layer), int(head)): tuple(
                _number(part[name][layer][place]) for name in ("figures", "baselines", "limits")
            )
            for layer, heads in part["heads"].items()
            for place, head in enumerate(heads)
        },
    }
