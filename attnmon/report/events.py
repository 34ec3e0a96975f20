"""Event files read from end to end, in bounded memory: what is ours and the scalars that go with it, nothing else."""

from __future__ import annotations

import csv
import math
import re
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from attnmon.dashboard.names import QUANTITIES
from attnmon.records import KINDS, PLUGIN, UnreadableError, read_json

__all__ = ["Column", "Events", "LayerTag", "layer_tag", "read_csv", "read_events"]

_IN_MEMORY = 128 * 2**20  # bytes of figures kept in memory before they go to a temporary file
_MOST_VALUES = 10_000_000  # figures of one sample
_FRAME = 16  # bytes around each record of an event file: its length and two checksums


@dataclass(frozen=True)
class LayerTag:
    """What the name of a scalar says: the figure of one layer, or of one head."""

    prefix: str
    quantity: str
    path: str
    layer: int
    head: int | None


def _known_paths() -> list[tuple[re.Pattern[str], str, str]]:
    """Pattern of each quantity's path, its name, and the argument that stands in for the pattern's groups."""
    patterns = []
    for quantity in QUANTITIES:
        path = quantity.tag
        if quantity.argument == "m, epsilon":
            path = path.format("{}_epsilon_{}")
        pattern = re.escape(path).replace(r"\{\}", "([^/]+?)")
        patterns.append((re.compile(f"(?:(.+)/)?{pattern}"), quantity.name, quantity.argument))
    # The longest first: a prefix of its own must not swallow the first part of a longer path.
    return sorted(patterns, key=lambda entry: -entry[0].pattern.count("/"))


_KNOWN = _known_paths()
_LAYER = re.compile(r"(?P<place>.+)/layer_(?P<layer>\d{2,})(?:[/_]head_(?P<head>\d{2,}))?")


@cache
def layer_tag(tag: str) -> LayerTag | None:
    """Reads the name of a scalar; None if it isn't the figure of a layer.

    Example:
        >>> layer_tag("attn/separability/top_10/layer_03/head_07")
        LayerTag(prefix='attn', quantity='separability@10', path='separability/top_10', layer=3, head=7)
        >>> layer_tag("train/loss") is None
        True
    """
    match = _LAYER.fullmatch(tag)
    if match is None:
        return None
    place, layer, head = match["place"], int(match["layer"]), None if match["head"] is None else int(match["head"])
    for pattern, name, argument in _KNOWN:
        known = pattern.fullmatch(place)
        if known is not None and known[1]:
            quantity = f"{name}@{','.join(known.groups()[1:])}" if argument else name
            return LayerTag(known[1], quantity, place[len(known[1]) + 1 :], layer, head)
    prefix, _, path = place.partition("/")
    return LayerTag(prefix, path, path, layer, head) if path else None


@dataclass
class Column:
    """Steps and figures of one tag, in the order in which they were written.

    Attributes:
        order: Number of the event that each came with, counted over all files of the run.
        steps: Its step.
        values: The figure; of a tensor, its place among the stored ones; of a text, its place in ``texts``.
    """

    order: array[int] = field(default_factory=lambda: array("q"))
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, order: int, step: int, value: float) -> None:
        self.order.append(order)
        self.steps.append(step)
        self.values.append(value)


class Events:
    """What the files of a run hold.

    Attributes:
        described: Metadata of each of our tags, see `attnmon.records.metadata`.
        columns: Our tensors and texts, by tag; ``values`` is where to find them.
        scalars: The scalars that a report uses, by tag.
        texts: JSON texts.
        shapes: Shape of each stored tensor.
        notes: What could not be read, in words.
        times: Earliest and latest wall time, seconds since 1970; None without an event.
    """

    def __init__(self) -> None:
        self.described: dict[str, dict[str, Any]] = {}
        self.columns: dict[str, Column] = {}
        self.scalars: dict[str, Column] = {}
        self.texts: list[bytes] = []
        self.shapes: list[tuple[int, int]] = []
        self.notes: list[str] = []
        self.times: tuple[float, float] | None = None
        self.order = 0
        self._unreadable: set[str] = set()
        self._places: array[int] = array("q")
        self._store: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115 - lives on

    def close(self) -> None:
        """Lets go of the stored tensors."""
        self._store.close()

    def note(self, text: str) -> None:
        """Once each."""
        if text not in self.notes:
            self.notes.append(text)

    def tensors(self, numbers: Sequence[int]) -> NDArray[np.float32]:
        """Stored layer x head tensors, ``(len(numbers), layers, heads)``, the smaller ones filled up with NaN."""
        shapes = [self.shapes[number] for number in numbers]
        size = tuple(max((shape[axis] for shape in shapes), default=0) for axis in (0, 1))
        result = np.full((len(numbers), *size), np.nan, dtype=np.float32)
        for place, (number, (rows, columns)) in enumerate(zip(numbers, shapes, strict=True)):
            self._store.seek(self._places[number])
            content = self._store.read(4 * rows * columns)
            result[place, :rows, :columns] = np.frombuffer(content, dtype=np.float32).reshape(rows, columns)
        return result

    def add_scalar(self, tag: str, step: int, value: float) -> None:
        """Keeps a scalar if a report uses it."""
        found = layer_tag(tag)
        if found is not None:
            parts = found.prefix.split("/")  # a trainer may have put a name of its own before ours
            ours = ("/".join([PLUGIN, *parts[place:], found.path]) for place in range(len(parts)))
            if any(name in self.described for name in ours):
                return  # the tensor of the same quantity says more
        elif not ("/warnings/" in tag or "/monitor/" in tag or "loss" in tag.lower()):
            return
        self.scalars.setdefault(tag, Column()).add(self.order, step, value)

    def add_tensor(self, tag: str, step: int, values: NDArray[Any]) -> None:
        """Stores a layer x head tensor."""
        if values.ndim != 2 or values.dtype.kind != "f":
            self.note(
                f"A sample of {tag!r} was left out: it is not a layer x head table of floats, but "
                f"{values.dtype} of shape {values.shape}."
            )
            return
        self._store.seek(0, 2)
        self._places.append(self._store.tell())
        self._store.write(np.ascontiguousarray(values, dtype=np.float32).tobytes())
        self.columns.setdefault(tag, Column()).add(self.order, step, len(self.shapes))
        self.shapes.append((values.shape[0], values.shape[1]))

    def add_text(self, tag: str, step: int, values: NDArray[Any]) -> None:
        """Stores a JSON text."""
        content = values.item() if values.size == 1 else None
        if not isinstance(content, bytes | str):
            self.note(f"A record of {tag!r} was left out: it is not a text.")
            return
        self.columns.setdefault(tag, Column()).add(self.order, step, len(self.texts))
        self.texts.append(content if isinstance(content, bytes) else content.encode())

    def describe(self, tag: str, content: bytes) -> None:
        """Takes the metadata of a tag of ours, or says why not."""
        try:
            described = read_json(content)
            str(described).encode()  # halves of surrogate pairs can't be written
            if described.get("kind") not in KINDS or not isinstance(described.get("prefix"), str):
                raise UnreadableError(f"kind {described.get('kind')!r}, prefix {described.get('prefix')!r}")
        except (UnreadableError, UnicodeEncodeError) as error:
            if tag not in self.described:
                self._unreadable.add(tag)
                self.note(f"{tag!r} was left out: {error}.")
            return
        self._unreadable.discard(tag)
        self.described[tag] = described

    def unreadable(self, tag: str) -> bool:
        """Whether a tag is ours, but what it holds could not be told."""
        return tag in self._unreadable

    def skips(self, tag: str) -> bool:
        """Whether nothing is known of a tag that makes it ours."""
        return tag not in self.described or tag in self._unreadable


def read_events(files: Sequence[Path]) -> Events:
    """Reads event files in order, each as far as it can be read.

    What is cut off or broken is named in ``notes``; all that stands before it is used.
    """
    events = Events()
    for path in files:
        _read_file(events, path)
    return events


def _read_file(events: Events, path: Path) -> None:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    read = 0
    try:
        size = path.stat().st_size  # before reading: a run that goes on writes more meanwhile
        for record in _records(path):
            event = Event.FromString(record)
            read += len(record) + _FRAME
            if event.HasField("summary"):
                _take(events, event)
    except DecodeError:
        events.note(f"{path.name}: a record after byte {read} is not an event; what comes after it was left out.")
        return
    except OSError as error:
        events.note(f"{path.name} could not be read: {error.strerror or error}.")
        return
    if read < size:
        events.note(
            f"{path.name}: the last {size - read} of {size} bytes could not be read; the file is cut off or broken "
            f"there, or the run still writes to it."
        )


def _records(path: Path) -> Iterator[bytes]:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    loader = RawEventFileLoader(str(path))
    yield from loader.Load()


def _take(events: Events, event: Any) -> None:
    events.order += 1
    time, step = float(event.wall_time), int(event.step)
    first, last = events.times or (time, time)
    events.times = min(first, time), max(last, time)
    for value in event.summary.value:
        tag = value.tag
        plugin = value.metadata.plugin_data.plugin_name if value.HasField("metadata") else ""
        if plugin == PLUGIN:
            events.describe(tag, value.metadata.plugin_data.content)
        if value.HasField("simple_value"):
            events.add_scalar(tag, step, value.simple_value)
        elif not value.HasField("tensor"):
            continue
        elif not events.skips(tag):
            if events.described[tag]["kind"] == "limits":
                continue  # a warning carries the limit that was passed
            values = _array(events, tag, value.tensor)
            if values is not None and events.described[tag]["kind"] == "heads":
                events.add_tensor(tag, step, values)
            elif values is not None:
                events.add_text(tag, step, values)
        elif plugin == "scalars" or tag in events.scalars:  # scalars of the newer style: metadata on the first only
            values = _array(events, tag, value.tensor)
            if values is not None and values.size == 1 and values.dtype.kind in "fiu":
                events.add_scalar(tag, step, float(values.item()))


def _array(events: Events, tag: str, tensor: Any) -> NDArray[Any] | None:
    from tensorboard.util.tensor_util import make_ndarray

    # One stored value stands for any number of equal ones: a broken shape must not fill the memory.
    size = math.prod(dim.size for dim in tensor.tensor_shape.dim)
    if size > _MOST_VALUES:
        events.note(f"A value of {tag!r} was left out: it says that it has {size} figures.")
        return None
    try:
        return np.asarray(make_ndarray(tensor))
    except (TypeError, ValueError) as error:
        events.note(f"A value of {tag!r} was left out: {error}.")
        return None


def read_csv(path: Path) -> Events:
    """Reads the ``metrics.csv`` of Lightning's CSV logger: scalars only."""
    events = Events()
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            events.order += 1
            try:
                step = int(float(row["step"]))
            except (KeyError, TypeError, ValueError):
                events.note(f"{path.name}: rows without a step were left out.")
                continue
            for tag, text in row.items():
                if tag and text and isinstance(text, str):
                    value = _number(text)
                    if value is not None:
                        events.add_scalar(tag, step, value)
    return events


def _number(text: str) -> float | None:
    try:
        return float(text)  # a loss that is not a number any more is logged as nan
    except ValueError:
        return None
