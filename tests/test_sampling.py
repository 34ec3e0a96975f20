"""What is read off a sample of rows and sequences is, on average over draws, what all of them give."""

import math
import statistics

import pytest
import torch
from toys import spread, tiny_gpt2, token_batches

from attnmon import watch

QUANTITIES = ("entropy", "score_spread", "first_key_weight", "separability@5", "distance@5", "jacobian@1.0")
DRAWS = 60


def model_and_batch(padded=False):
    model = spread(tiny_gpt2(layers=1)).train()
    batch = token_batches(1, batch=6)[0]
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        for row, length in enumerate((80, 70, 60, 75, 66, 80)):
            batch["attention_mask"][row, length:] = 0
    return model, batch


def figures(model, batch, **arguments):
    """One number per quantity and head."""
    with watch(model, 1, alerts=False, strict=True, **arguments) as monitor:
        model(**batch)
        snapshot = monitor.step()
    return [value for name in QUANTITIES for value in snapshot.values[name][0]]


def draws(model, batch, **arguments):
    return list(zip(*(figures(model, batch, seed=seed, **arguments) for seed in range(DRAWS)), strict=True))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("rows", "sequences"), [(8, 6), (8, 2), (32, 1)])
def test_unbiased(rows, sequences, padded):
    # Of sequences of unequal length the mean over some is a ratio estimate, with a bias of its own.
    if padded and sequences < 6:
        pytest.skip("a ratio estimate")
    model, batch = model_and_batch(padded)
    truth = figures(model, batch, rows="all", sequences=6)
    for values, expected in zip(draws(model, batch, rows=rows, sequences=sequences), truth, strict=True):
        error = statistics.stdev(values) / math.sqrt(DRAWS)
        assert abs(statistics.fmean(values) - expected) < 4 * error


def test_the_bias_of_a_ratio_is_small():
    model, batch = model_and_batch(padded=True)
    truth = figures(model, batch, rows="all", sequences=6)
    for values, expected in zip(draws(model, batch, rows=8, sequences=2), truth, strict=True):
        assert abs(statistics.fmean(values) - expected) < 0.75 * statistics.stdev(values)


@pytest.mark.parametrize(("few", "many"), [({"rows": 4}, {"rows": 16}), ({"sequences": 1}, {"sequences": 4})])
def test_the_error_falls_with_the_square_root_at_least(few, many):
    model, batch = model_and_batch()
    fixed = {"rows": 16, "sequences": 6}
    loose, tight = (draws(model, batch, **(fixed | chosen)) for chosen in (few, many))
    ratios = [statistics.stdev(a) / statistics.stdev(b) for a, b in zip(loose, tight, strict=True)]
    assert statistics.median(ratios) > 2 * 0.8  # a fourth of the rows: half the error, but for what 60 draws leave open


def test_the_reported_error_is_that_of_the_draws():
    model, batch = model_and_batch()
    with watch(model, 1, rows=16, sequences=6, alerts=False) as monitor:
        model(**batch)
        snapshot = monitor.step()
    reported = [error for name in QUANTITIES for error in snapshot.errors[name][0]]
    seen = [statistics.stdev(values) for values in draws(model, batch, rows=16, sequences=6)]
    # Stratified draws do better than the simple random sample that the error is reported for.
    assert all(one < 1.5 * other for one, other in zip(seen, reported, strict=True))
