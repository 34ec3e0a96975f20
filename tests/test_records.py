"""The data behind the Attention tab: what is written can be read again, through TensorBoard's own reader."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from attnmon import watch
from attnmon.alerts import AlertRules, NonFinite
from attnmon.records import PLUGIN, UnreadableError, heads_matrix, metadata, read_json, tag_of, to_json
from attnmon.snapshot import Snapshot
from attnmon.tensorboard import TabWriter


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with watch(layer, top_n=(1, 2)) as monitor:
        layer(torch.randn(2, 8, 16)).mean().backward()
        found = monitor.step()
    assert found is not None
    return found


def _read(folder: object) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return events


def _arrays(events: EventAccumulator, tag: str) -> list[np.ndarray]:
    return [tensor_util.make_ndarray(event.tensor_proto) for event in events.Tensors(tag)]


def test_every_quantity_is_read_again_as_it_was(tmp_path, snapshot):
    writer = SummaryWriter(tmp_path)
    tab = TabWriter(writer)
    sizes = [tab.write(dataclasses.replace(snapshot, step=step), every_n_steps=5) for step in (0, 5)]
    writer.close()
    events = _read(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1  # never a second event file
    for quantity, layers in snapshot.values.items():
        tag = tag_of("heads", quantity=quantity)
        content = read_json(events.PluginTagToContent(PLUGIN)[tag])
        assert (content["kind"], content["quantity"]) == ("heads", quantity)
        assert [event.step for event in events.Tensors(tag)] == [0, 5]
        for array in _arrays(events, tag):
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, np.float32([layers[0]]))
    (run,) = _arrays(events, tag_of("run"))  # once: nothing changed
    assert read_json(run.item())["layers"] == [
        {"number": 0, "path": "self_attn", "heads": 2, "temperature": snapshot.temperatures[0]}
    ]
    written = sum(f.stat().st_size for f in tmp_path.iterdir())
    assert 0 < written - sum(sizes) < 100  # the file's own version record
    assert sizes[1] < sizes[0]


def test_the_run_is_described_again_where_it_changed(tmp_path, snapshot):
    writer = SummaryWriter(tmp_path)
    tab = TabWriter(writer)
    tab.write(snapshot)
    tab.write(dataclasses.replace(snapshot, step=1, not_measured={"cross": "flex attention"}))
    writer.close()
    records = [read_json(array.item()) for array in _arrays(_read(tmp_path), tag_of("run"))]
    assert [record["not_measured"] for record in records] == [{}, {"cross": "flex attention"}]


def test_alerts_are_read_again(tmp_path, snapshot):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    nan = torch.full((2, 8, 16), math.nan)
    rules = AlertRules(nonfinite=NonFinite())
    with warnings.catch_warnings(), watch(layer, top_n=(1, 2), rules=rules) as monitor:
        warnings.simplefilter("ignore")  # of empty columns, and the alert itself
        layer(nan).mean().backward()
        bad = monitor.step()
    assert bad is not None
    assert bad.alerts
    writer = SummaryWriter(tmp_path)
    TabWriter(writer, "left").write(bad)
    writer.close()
    (record,) = [read_json(array.item()) for array in _arrays(_read(tmp_path), tag_of("warnings", "left"))]
    assert record["step"] == 0
    assert [alert["rule"] for alert in record["alerts"]] == [alert.rule for alert in bad.alerts]
    assert record["alerts"][0]["heads"] == {"0": [0, 1]}
    assert record["alarmed"]["nonfinite"] == {"0": [0, 1]}
    assert json.loads(to_json(record)) == record  # strict: not a NaN in it


def test_tensorboardx_writes_the_same(tmp_path, snapshot):
    x = pytest.importorskip("tensorboardX")
    writer = x.SummaryWriter(str(tmp_path))
    TabWriter(writer).write(snapshot)
    writer.close()
    assert tag_of("heads", quantity="entropy") in _read(tmp_path).PluginTagToContent(PLUGIN)


def test_a_writer_without_a_way_in_is_left_alone(snapshot):
    class Bare:
        def add_scalar(self) -> None: ...

    tab = TabWriter(Bare())
    assert not tab.available
    assert tab.write(snapshot) == 0


def test_layers_of_different_widths_are_padded():
    matrix = heads_matrix({0: [1.0], 1: [2.0, math.nan, 3.0]})
    np.testing.assert_array_equal(matrix, np.float32([[1, math.nan, math.nan], [2, math.nan, 3]]))
    assert heads_matrix({}).shape == (0, 0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"version":1,"a":1e999}', "not a finite"),
        (b"[1]", "not a record"),
        (b"{}", "not a record"),
        (b'{"version":99}', "version 99"),
    ],
)
def test_what_is_not_ours_is_named(content, says):
    with pytest.raises(UnreadableError, match=says):
        read_json(content)


def test_an_unknown_quantity_describes_itself():
    assert read_json(metadata("heads", quantity="mine"))["title"] == "mine"


def test_fixed_levels_are_those_of_level_rules():
    levels = AlertRules().fixed_levels(["active_share", "score_spread", "entropy_normalized"])
    assert {(level["quantity"], level["limit"]) for level in levels} == {("active_share", 0.06), ("score_spread", 15.0)}
