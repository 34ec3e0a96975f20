"""Two runs side by side."""

from __future__ import annotations

import numpy as np
import pytest
from report.runs import Run

from attnmon.report import read_run
from attnmon.report.compare import compare
from attnmon.report.data import Section


def _section(folder, steps, shape, figure, **options) -> Section:
    run = Run(folder, **options)
    run.samples(steps, figure, shape)
    return read_run(run.close()).sections["attn"]


def test_differences_are_second_less_first(tmp_path):
    first = _section(tmp_path / "a", (0, 10, 20, 30), {0: 2, 1: 2}, lambda s, layer, head: 0.1 + 0.001 * s)
    second = _section(
        tmp_path / "b", (0, 20, 40), {0: 2, 1: 2}, lambda s, layer, head: 0.2 + 0.001 * s + 0.1 * layer + 0.01 * head
    )
    entry = compare(first, second)
    part = entry.differences["entropy_normalized"]
    assert (entry.by_path, entry.pairs, entry.only) == (True, ((0, 0), (1, 1)), ((), ()))
    assert part.common.tolist() == [0, 20]
    np.testing.assert_allclose(part.layers_common, [[0.105, 0.205]] * 2, atol=1e-6)
    np.testing.assert_allclose(part.heads_common, [[0.1, 0.11], [0.2, 0.21]], atol=1e-6)
    np.testing.assert_allclose(part.heads_end, [[0.11, 0.12], [0.21, 0.22]], atol=1e-6)  # 0.2 + 0.04 less 0.1 + 0.03
    np.testing.assert_allclose(part.layers_end, [0.115, 0.215], atol=1e-6)


def test_layers_go_together_by_path(tmp_path):
    first = _section(tmp_path / "a", (0,), {0: 2, 1: 2, 2: 2}, lambda s, layer, head: 0.1 * layer)
    paths = {0: "h.2.attn", 1: "new", 2: "h.0.attn"}
    second = _section(tmp_path / "b", (5,), {0: 2, 1: 2, 2: 2}, lambda *_: 0.5, paths=paths)
    entry = compare(first, second)
    part = entry.differences["entropy_normalized"]
    assert entry.pairs == ((0, 2), (2, 0))
    assert entry.only == ((1,), (1,))
    np.testing.assert_allclose(part.layers_end, [0.5, 0.3], atol=1e-6)
    assert part.common.tolist() == []
    assert part.heads_common is None


def test_layers_go_together_by_number_where_no_path_is_common(tmp_path):
    first = _section(tmp_path / "a", (0,), {0: 2, 1: 2}, lambda *_: 0.1)
    paths = {0: "x", 1: "y", 2: "z"}
    second = _section(tmp_path / "b", (0,), {0: 2, 1: 2, 2: 2}, lambda *_: 0.2, paths=paths)
    entry = compare(first, second)
    assert (entry.by_path, entry.pairs, entry.only) == (False, ((0, 0), (1, 1)), ((), (2,)))


def test_other_numbers_of_heads_leave_the_layers_means(tmp_path):
    first = _section(tmp_path / "a", (0,), {0: 2, 1: 2}, lambda *_: 0.1)
    second = _section(tmp_path / "b", (0,), {0: 4, 1: 2}, lambda s, layer, head: 0.2 + 0.1 * head)
    entry = compare(first, second)
    part = entry.differences["entropy_normalized"]
    assert entry.other_heads == ((0, 0, 2, 4),)
    np.testing.assert_allclose(part.layers_end, [0.25, 0.15], atol=1e-6)
    assert np.isnan(part.heads_end[0]).all()
    np.testing.assert_allclose(part.heads_end[1, :2], [0.1, 0.2], atol=1e-6)


def test_a_run_of_layer_means_is_compared_by_layers(tmp_path):
    first = _section(tmp_path / "a", (0,), {0: 2}, lambda *_: 0.1, tensors=False)
    second = _section(tmp_path / "b", (0,), {0: 2}, lambda *_: 0.3)
    part = compare(first, second).differences["entropy_normalized"]
    assert part.layers_end.tolist() == pytest.approx([0.2])
    assert np.isnan(part.heads_end).all()
