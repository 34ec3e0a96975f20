"""An interrupted analysis goes on where it stopped, and nothing that was computed is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toys import SMALL, VOCABULARY, spread, tiny_gpt2
from transformers import MistralConfig, MistralForCausalLM

from attnmon.analysis import AnalysisOptions, analyze
from attnmon.analysis.engine import _Engine
from attnmon.analysis.parts import Parts

OPTIONS = {
    "lengths": (8, 24),
    "tasks": ("distance", "critical", "separability", "summary"),
    "top_n": (1, 5),
    "critical_top_n": 6,
    "separability_top_n": (1, 4),
}


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (24,), generator=torch.Generator().manual_seed(seed))


def llama_like(config, model, **options):
    torch.manual_seed(0)
    return spread(model(config(**SMALL, **options)))


def equal(first, second) -> None:
    for task, table in first.tables.items():
        for quantity, values in table.values.items():
            np.testing.assert_array_equal(values, second.tables[task].values[quantity])


@pytest.fixture
def measured(monkeypatch):
    """Layers that were measured, in order; `measured.stop_at` raises at that many."""
    original = _Engine._measure

    class Record(list):
        stop_at: int | None = None
        error: BaseException = KeyboardInterrupt()

    record = Record()

    def measure(self, call, sinks, run, index, vectors):
        if record.stop_at is not None and len(record) >= record.stop_at:
            raise record.error
        record.append((run.length, index))
        original(self, call, sinks, run, index, vectors)

    monkeypatch.setattr(_Engine, "_measure", measure)
    return record


@pytest.mark.parametrize("convention", ["visible", "full"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["interrupt", "error"])
def test_goes_on_where_it_stopped(tmp_path, measured, convention, error):
    model = tiny_gpt2(layers=3)
    options = AnalysisOptions(**OPTIONS, convention=convention)
    whole = analyze(model, tokens(), options)
    total = len(measured)
    measured.clear()
    measured.stop_at, measured.error = 2, error
    with pytest.raises(type(error)):
        analyze(model, tokens(), options, folder=tmp_path)
    measured.stop_at = None
    equal(analyze(model, tokens(), options, folder=tmp_path), whole)
    assert len(measured) == total  # none twice
    measured.clear()
    again = analyze(model, tokens(), options, folder=tmp_path)
    assert not measured
    equal(again, whole)
    assert again.notes == whole.notes
    assert again.tables["distance"].seconds > 0  # what computing it once took


def test_parts_of_other_models_texts_and_options_are_told_apart(tmp_path, measured):
    model = tiny_gpt2()
    analyze(model, tokens(), AnalysisOptions(**OPTIONS), folder=tmp_path)
    for changed in (
        lambda: analyze(tiny_gpt2(seed=1), tokens(), AnalysisOptions(**OPTIONS), folder=tmp_path),
        lambda: analyze(model, tokens(1), AnalysisOptions(**OPTIONS), folder=tmp_path),
        lambda: analyze(model, tokens(), AnalysisOptions(**OPTIONS, vectors="value"), folder=tmp_path),
        lambda: analyze(model, tokens(), AnalysisOptions(**OPTIONS | {"lengths": (12, 24)}), folder=tmp_path),
    ):
        measured.clear()
        changed()
        assert len(measured) == 2
    # equal weights, and another way to use them
    narrow, wide = (llama_like(MistralConfig, MistralForCausalLM, sliding_window=window) for window in (3, 12))
    wide.load_state_dict(narrow.state_dict())
    first, second = (analyze(m, tokens(), AnalysisOptions(**OPTIONS), folder=tmp_path) for m in (narrow, wide))
    assert (first.tables["summary"].values["entropy"] < second.tables["summary"].values["entropy"]).any()
    equal(analyze(wide, tokens(), AnalysisOptions(**OPTIONS)), second)
    # a change of one task leaves the others their parts
    folders = set(tmp_path.iterdir())
    analyze(model, tokens(), AnalysisOptions(**OPTIONS | {"top_n": (1, 5, 7)}), folder=tmp_path)
    (new,) = set(tmp_path.iterdir()) - folders
    assert new.name.startswith("distance-")


def test_damage_of_any_kind_is_noticed(tmp_path):
    parts, rng = Parts(tmp_path, {}), np.random.default_rng(0)
    part = {"x": rng.normal(size=(3, 4)), "x/rows": np.ones((3, 4)), "seconds": np.zeros(())}
    parts.save("task", {}, "name", part)
    (path,) = tmp_path.rglob("*.npz")
    whole = path.read_bytes()
    for _ in range(400):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), size=3):
            damaged[place] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(damaged))
        found = parts.load("task", {}, "name")
        assert found is None or all(np.array_equal(found.get(key, value), value) for key, value in part.items())


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="no longer kept"):
        analyze(tiny_gpt2(), tokens(), AnalysisOptions(**OPTIONS), folder=tmp_path / "file" / "parts")


def test_a_damaged_part_is_computed_again(tmp_path, measured):
    model, options = tiny_gpt2(), AnalysisOptions(**OPTIONS)
    whole = analyze(model, tokens(), options, folder=tmp_path)
    (part,) = tmp_path.glob("critical-*/*layer_001.npz")
    part.write_bytes(part.read_bytes()[:100])
    (other,) = tmp_path.glob("distance-*/*layer_000.npz")
    np.savez(other, distance=np.zeros(3), seconds=np.zeros(()))
    measured.clear()
    equal(analyze(model, tokens(), options, folder=tmp_path), whole)
    assert len(measured) == 2


def test_a_full_disk_costs_the_parts_and_not_the_run(tmp_path, monkeypatch):
    model, options = tiny_gpt2(), AnalysisOptions(**OPTIONS)
    whole = analyze(model, tokens(), options)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match="no longer kept.*No space left") as caught:
        equal(analyze(model, tokens(), options, folder=tmp_path), whole)
    assert len(caught) == 1
    assert not list(tmp_path.rglob("*.partial"))
