"""Two checkpoints, head by head."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from toys import VOCABULARY, tiny_gpt2

from attnmon.analysis import AnalysisOptions, analyze, compare, compare_models

TOKENS = torch.randint(VOCABULARY, (24,), generator=torch.Generator().manual_seed(0))
OPTIONS = AnalysisOptions(lengths=(12, 24), tasks=("distance", "summary"), top_n=(1, 5))


def test_the_head_that_changed_is_found(tmp_path):
    first, second = tiny_gpt2(), tiny_gpt2()
    with torch.no_grad():  # the queries of the last layer's second head
        second.transformer.h[1].attn.c_attn.weight[:, 8:16] *= 500
    comparison = compare_models(first, second, TOKENS, OPTIONS)
    assert comparison.notes == ()
    changes = comparison.changes("entropy")
    assert (changes[0].layer, changes[0].head, changes[0].length) == ("transformer.h.1.attn", 1, 24)
    assert changes[0].difference < -0.1
    assert all(change.difference == 0 for change in changes[1:])
    assert {tuple(c.arguments.items()) for c in comparison.changes("distance", 12)} == {
        (("top_n", 1),),
        (("top_n", 5),),
    }
    comparison.write_csv(tmp_path / "changes.csv")
    with (tmp_path / "changes.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    figures = sum(np.isfinite(v).sum() for t in comparison.first.tables.values() for v in t.values.values())
    assert len(lines) == figures
    assert {line["length"] for line in lines} == {"12", "24"}


def test_what_cannot_be_compared():
    analysis = analyze(tiny_gpt2(), TOKENS, OPTIONS)
    with pytest.raises(ValueError, match="same heads, but got 4 heads in 2 layers.*and 6 in 3"):
        compare(analysis, analyze(tiny_gpt2(layers=3), TOKENS, OPTIONS))
    other = AnalysisOptions(lengths=(12, 24), tasks=("summary",), vectors="value")
    with pytest.raises(ValueError, match="same `vectors`, but got 'embedding' and 'value'"):
        compare(analysis, analyze(tiny_gpt2(), TOKENS, other))
    elsewhere = compare(analysis, analyze(tiny_gpt2(), TOKENS.flip(0), OPTIONS))
    assert "different tokens" in elsewhere.notes[0]
    with pytest.raises(ValueError, match="Expected `length` to be one of"):
        elsewhere.changes(length=13)
    with pytest.raises(ValueError, match="Expected `quantity` to be one that both"):
        elsewhere.changes("nothing")
