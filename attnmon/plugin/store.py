"""The data of the Attention tab as TensorBoard's data provider has it, checked.

Whatever is broken, foreign or of another version is left out and named in a list of problems; it never costs more than
the tag or the sample it is in.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tensorboard import errors
from tensorboard.data.provider import DataProvider, RunTagFilter

from attnmon.dashboard import QUANTITIES
from attnmon.dashboard.names import counted
from attnmon.plugin.alarms import find_alarms
from attnmon.plugin.checks import check_shape, number, run_record, warnings_record
from attnmon.plugin.restarts import in_order, of_present
from attnmon.records import KINDS, PLUGIN, UnreadableError, read_json, tag_of

__all__ = ["MissingError", "Samples", "Store"]

_ALL_SAMPLES = 2**31 - 1
_CACHE_BYTES = 256 * 2**20
_NO_HEADS = "no samples of attention heads that can be read are in this run, so it can't be chosen"
_ORDER = {quantity.name: place for place, quantity in enumerate(QUANTITIES)}


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
        restarts: Steps that the run went back to; what it had written beyond is left out.
        full: Whether these are as many samples as TensorBoard keeps, so that there may have been more.
    """

    steps: tuple[int, ...]
    wall_times: tuple[float, ...]
    frames: tuple[NDArray[np.float32], ...]
    problems: tuple[str, ...] = ()
    restarts: tuple[int, ...] = ()
    full: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads, as many as the largest sample has."""
        rows, columns = (max((frame.shape[axis] for frame in self.frames), default=0) for axis in (0, 1))
        return rows, columns

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


@dataclass(frozen=True)
class _Texts:
    """The records of a tag, in order of their steps, and what could not be read; the rest as in `Samples`."""

    found: tuple[dict[str, Any], ...] = ()
    problems: tuple[str, ...] = ()
    restarts: tuple[int, ...] = ()
    full: bool = False


_Read = TypeVar("_Read", Samples, _Texts)


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
            clocks = _clocks(listed[run])
            for tag, series in listed[run].items():
                try:
                    content = _content(series.plugin_content)
                except UnreadableError as error:
                    problems.append({"run": run, "tag": tag, "text": str(error)})
                else:
                    clock = clocks.get(content["prefix"])
                    tags.append({**content, "tag": tag, "stamp": _stamp(series, clock and listed[run][clock])})
            if tags:
                runs.append({"run": run, "tags": sorted(tags, key=_place)})
            if tags and not any(tag["kind"] == "heads" for tag in tags):
                problems.append({"run": run, "tag": "", "text": _NO_HEADS})
        return {"runs": runs, "problems": problems}

    def samples(self, ctx: object, experiment: str, run: str, tag: str) -> Samples:
        """One quantity of one run.

        Raises:
            MissingError: There is no such run or tag.
            UnreadableError: The tag is not ours, or TensorBoard can't read it.
        """
        return self._read(ctx, experiment, run, tag, "heads", _samples)

    def limits(
        self, ctx: object, experiment: str, run: str, prefix: str, quantity: str
    ) -> tuple[list[tuple[dict[str, Any], Samples]], list[dict[str, str]]]:
        """The limits of a quantity that rules have learned from each head itself.

        Returns:
            The content of each tag's metadata, and what its samples hold; problems as in the catalogue.
        """
        found, problems = [], []
        for tag, content in _contents(self._listed(ctx, experiment, run)).items():
            if (content["kind"], content["prefix"], content.get("quantity")) != ("limits", prefix, quantity):
                continue
            try:
                samples: Samples = self._read(ctx, experiment, run, tag, "limits", _samples)
            except (MissingError, UnreadableError) as error:
                problems.append({"tag": tag, "text": str(error)})
            else:
                found.append((content, samples))
                problems += [{"tag": tag, "text": text} for text in samples.problems]
        return sorted(found, key=lambda one: one[0]["rule"]), problems

    def content(self, ctx: object, experiment: str, run: str, tag: str) -> dict[str, Any]:
        """The content of a tag's metadata.

        Raises:
            MissingError: There is no such run or tag.
            UnreadableError: The tag is not ours.
        """
        return _content(_series(self._listed(ctx, experiment, run), run, tag).plugin_content)

    def run(self, ctx: object, experiment: str, run: str, prefix: str) -> dict[str, Any]:
        """What a run is like, and its warnings.

        Returns:
            ``{"record", "warnings", "alarms", "watched", "restarts", "problems"}``: the newest
            `attnmon.records.run_record` or None; the alerts by step, each with the fields of `attnmon.alerts.Alert`;
            see `attnmon.plugin.alarms.find_alarms`; whether rules watched the run, None where that can't be read in
            full; steps that the run went back to; texts.

        Raises:
            MissingError: There is no such run, or nothing with this prefix in it.
        """
        if not any(content["prefix"] == prefix for content in _contents(self._listed(ctx, experiment, run)).values()):
            raise MissingError(f"There is nothing of attnmon with the prefix {prefix!r} in a run {run!r}.")
        problems: list[str] = []
        restarts: set[int] = set()
        record: dict[str, Any] | None = None
        try:
            texts = self._read(ctx, experiment, run, tag_of("run", prefix), "run", _run_records)
            problems += texts.problems
            restarts |= {*texts.restarts}
            if texts.found:
                check_shape(texts.found[-1], self._shape(ctx, experiment, run, prefix))
                record = texts.found[-1]
        except MissingError:
            problems.append("the run does not say what its layers are called, nor how many heads each has")
        except UnreadableError as error:
            problems.append(f"what the run is like: {error}")
        warned: Sequence[dict[str, Any]] = ()
        watched: bool | None = None
        try:
            texts = self._read(ctx, experiment, run, tag_of("warnings", prefix), "warnings", _warnings_records)
            warned = texts.found
            problems += texts.problems
            restarts |= {*texts.restarts}
            if texts.full:
                kept = counted(self._samples, "record")
                problems.append(f"warnings: TensorBoard keeps {kept} of them and may have left others out")
            elif not texts.problems:
                watched = bool(warned)
        except MissingError:
            watched = False
        except UnreadableError as error:
            problems.append(f"warnings: {error}")
        return {
            "record": record,
            "warnings": [alert for entry in warned for alert in entry["alerts"]],
            "alarms": find_alarms(warned),
            "watched": watched,
            "restarts": sorted(restarts),
            "problems": problems,
        }

    def _listed(self, ctx: object, experiment: str, run: str) -> Mapping[str, Any]:
        listed = self._provider.list_tensors(
            ctx, experiment_id=experiment, plugin_name=PLUGIN, run_tag_filter=RunTagFilter(runs=[run])
        )
        found: Mapping[str, Any] = (listed or {}).get(run, {})
        return found

    def _shape(self, ctx: object, experiment: str, run: str, prefix: str) -> tuple[int, int] | None:
        """Layers and heads of the newest samples, as many as the largest of all quantities has; None if not known."""
        rows, columns = 0, 0
        contents = _contents(self._listed(ctx, experiment, run))
        tags = [tag for tag, one in contents.items() if (one["kind"], one["prefix"]) == ("heads", prefix)]
        try:
            found = self._data(ctx, experiment, run, tags, 1) if tags else {}
        except UnreadableError:  # one of them may have been the largest
            return None
        for newest in found.values():
            for datum in newest:
                if datum.numpy.ndim == 2:
                    rows, columns = max(rows, datum.numpy.shape[0]), max(columns, datum.numpy.shape[1])
        return (rows, columns) if rows and columns else None

    def _data(
        self, ctx: object, experiment: str, run: str, tags: Sequence[str], most: int
    ) -> Mapping[str, Sequence[Any]]:
        """The data of these tags in one call: to the fast loader each call takes some 40 ms, however little it asks."""
        wanted = RunTagFilter(runs=[run], tags=tags)
        try:
            read = self._provider.read_tensors(
                ctx, experiment_id=experiment, plugin_name=PLUGIN, downsample=most, run_tag_filter=wanted
            )
            found: dict[str, Sequence[Any]] = {tag: read[run][tag] for tag in tags}
        except errors.PublicError:
            raise
        except Exception as error:  # of gRPC, or of a tensor that is broken
            what = "this tag" if len(tags) == 1 else "these tags"
            raise UnreadableError(f"TensorBoard can't read {what}: {type(error).__name__}: {error}") from error
        return found

    def _read(
        self, ctx: object, experiment: str, run: str, tag: str, kind: str, build: Callable[[Sequence[Any]], _Read]
    ) -> _Read:
        tags = self._listed(ctx, experiment, run)
        series = _series(tags, run, tag)
        content = _content(series.plugin_content)
        if content["kind"] != kind:
            raise UnreadableError(f"{tag!r} is of kind {content['kind']!r}, not {kind!r}")
        clock = _clocks(tags)[content["prefix"]]
        key, stamp = (experiment, run, tag), _stamp(series, clock and tags[clock])
        with self._lock:
            known = self._cache.get(key)
            if known is not None and known[0] == stamp:
                self._cache.move_to_end(key)
                value: _Read = known[1]
                return value
        written = self._data(ctx, experiment, run, [tag], self._samples)[tag]
        data: list[Any]
        restarts: list[int]
        data, restarts = in_order(written)
        further: list[int] = []
        if clock is not None and clock != tag:
            with contextlib.suppress(UnreadableError):  # said where it is shown
                times: Samples = self._read(ctx, experiment, run, clock, "heads", _samples)
                data, further = of_present(data, times.steps, times.wall_times)
                restarts += [*times.restarts, *further]
        value = replace(build(data), restarts=tuple(sorted({*restarts})), full=len(written) >= self._samples)
        self._keep(key, stamp, value, sum(int(datum.numpy.nbytes) for datum in data))
        return value

    def _keep(self, key: tuple[str, str, str], stamp: object, value: object, size: int) -> None:
        with self._lock:
            self._cache[key] = (stamp, value, size)
            self._cache.move_to_end(key)
            while len(self._cache) > 1 and sum(entry[2] for entry in self._cache.values()) > _CACHE_BYTES:
                self._cache.popitem(last=False)


def _stamp(series: Any, clock: Any) -> list[Any]:
    """Changes with a tag's data, and with the samples that tell which of them still count."""
    return [entry for one in (series, clock) if one is not None for entry in (one.max_step, one.max_wall_time)]


def _series(tags: Mapping[str, Any], run: str, tag: str) -> Any:
    if tag not in tags:
        raise MissingError(f"There is no tag {tag!r} in the run {run!r}.")
    return tags[tag]


def _contents(tags: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The content of the metadata of each tag of ours."""
    found = {}
    for tag, series in tags.items():
        with contextlib.suppress(UnreadableError):  # named in the catalogue
            found[tag] = _content(series.plugin_content)
    return found


def _clocks(tags: Mapping[str, Any]) -> dict[str, str | None]:
    """Prefix -> the quantity that was written last: its samples tell whether a run went back to an earlier step."""
    contents = _contents(tags)
    found: dict[str, str | None] = {content["prefix"]: None for content in contents.values()}
    heads = [{**content, "tag": tag} for tag, content in contents.items() if content["kind"] == "heads"]
    for content in sorted(heads, key=_place):
        best = found[content["prefix"]]
        if best is None or tags[content["tag"]].max_wall_time > tags[best].max_wall_time:
            found[content["prefix"]] = content["tag"]
    return found


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
    if kind in ("heads", "limits"):
        clean["quantity"] = _name(content, "quantity")
    if kind == "limits":
        clean |= {name: _name(content, name) for name in ("rule", "title", "severity")}
        clean["rises"] = bool(content.get("rises"))
    if kind == "heads":
        for name in ("title", "unit", "rise", "fall"):
            clean[name] = content[name] if isinstance(content.get(name), str) else ""
        clean["title"] = clean["title"] or clean["quantity"]
        limits = content.get("limits")
        pair = limits if isinstance(limits, list) and len(limits) == 2 else [None, None]
        clean["limits"] = [number(end) for end in pair]
    return clean


def _name(content: Mapping[str, Any], field: str) -> str:
    value = content.get(field)
    if not isinstance(value, str) or not value:
        raise UnreadableError(f"{field} {repr(value)[:40]}, where a name is expected")
    return value


def _samples(data: Sequence[Any]) -> Samples:
    good: list[Any] = []
    strange: list[Any] = []
    for datum in data:
        (good if datum.numpy.ndim == 2 and datum.numpy.dtype.kind in "fiu" else strange).append(datum)
    problems = []
    if strange:
        first = strange[0]
        every = counted(len(strange) + len(good), "sample")
        problems.append(
            f"{len(strange)} of {every} {'is' if len(strange) == 1 else 'are'} left out, not being numbers of layers x "
            f"heads; the first, at step {first.step}, has the shape {first.numpy.shape} and type {first.numpy.dtype}"
        )
    frames = tuple(np.asarray(datum.numpy, np.float32) for datum in good)
    changes = [place for place in range(1, len(frames)) if frames[place].shape != frames[place - 1].shape]
    if changes:
        at = changes[0]
        before, after = (" x ".join(map(str, frame.shape)) for frame in frames[at - 1 : at + 1])
        more = f", and {counted(len(changes) - 1, 'time')} more" if len(changes) > 1 else ""
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


def _texts(data: Sequence[Any], read: Callable[[int, dict[str, Any]], dict[str, Any]]) -> _Texts:
    """One record per step, and what could not be read."""
    found, failed = [], []
    for datum in data:
        try:
            if datum.numpy.size != 1:
                raise UnreadableError(f"not one text but an array of shape {datum.numpy.shape}")
            text = datum.numpy.item()
            if not isinstance(text, bytes | str):
                raise UnreadableError(f"not a text but {datum.numpy.dtype}")
            found.append(read(int(datum.step), read_json(text)))
        except UnreadableError as error:
            failed.append(f"step {datum.step}: {error}")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            failed.append(f"step {datum.step}: not built as expected ({type(error).__name__}: {error})")
    more = [f"and {counted(len(failed) - 3, 'record')} more"] if len(failed) > 3 else []
    return _Texts(tuple(found), (*failed[:3], *more))


def _run_records(data: Sequence[Any]) -> _Texts:
    return _texts(data, run_record)


def _warnings_records(data: Sequence[Any]) -> _Texts:
    return _texts(data, warnings_record)
