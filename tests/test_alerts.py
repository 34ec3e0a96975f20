"""The rules, one exact sequence each; their memory; the messages."""

import dataclasses
import json
import math
import pickle
import random
import subprocess
import sys

import pytest

from attnmon.alerts import (
    ALERT_QUANTITIES,
    ActiveSet,
    AlertEngine,
    AlertRules,
    EntropyCollapse,
    EntropyRise,
    NonFinite,
    ScoreGrowth,
    SeparabilityLoss,
    SharpTemperature,
)
from attnmon.dashboard import alert_markdown

NAN = math.nan
OFF = {field.name: None for field in dataclasses.fields(AlertRules)}


def only(rule):
    """An engine with one rule."""
    return AlertEngine(AlertRules(**{**OFF, rule.name: rule}))


def run(engine, quantity, sequence, error=None, every=10, layer=0, start=0):
    """Feed one head's sequence; the indices of the samples that raised an alert."""
    fired = []
    for index, figure in enumerate(sequence):
        step = start + index * every
        errors = {quantity: {layer: [error]}} if error is not None else None
        if engine.update(step, {quantity: {layer: [figure]}}, errors=errors):
            fired.append(index)
    return fired


# --- Each rule, to the sample -----------------------------------------------------------------------------------------


def test_entropy_rise_fires_at_the_third_sample_beyond_the_limit():
    # baseline 0.5, limit 0.5 + 0.4 * 0.5 = 0.7
    assert run(only(EntropyRise()), "entropy_normalized", [0.5] * 5 + [0.69] + [0.8] * 5) == [8]
    assert run(only(EntropyRise()), "entropy_normalized", [0.5] * 5 + [0.69] * 5) == []
    assert run(only(EntropyRise()), "entropy_normalized", [0.5] * 5 + [0.8, 0.8, 0.5] * 4) == []
    assert run(only(EntropyRise(patience=1)), "entropy_normalized", [0.5, 0.8]) == [1]


def test_entropy_rise_needs_no_warm_up_when_fine_tuning():
    assert run(only(EntropyRise()), "entropy_normalized", [0.48, 0.9, 0.9, 0.9]) == [3]


def test_entropy_rise_of_a_head_that_is_already_high():
    # 0.85 cannot rise by 25 % of itself, but it can go most of the way to uniform
    assert run(only(EntropyRise()), "entropy_normalized", [0.85] * 4 + [0.98] * 3) == [6]
    assert run(only(EntropyRise()), "entropy_normalized", [0.95] * 4 + [1.0] * 5) == []  # never was selective


def test_entropy_falling_from_scratch_is_silent():
    engine = AlertEngine(AlertRules(active_set=None))
    draw = random.Random(0)
    for index in range(200):
        entropy = 0.35 + 0.65 * math.exp(-max(0, index - 8) / 25) + draw.gauss(0, 0.01)
        sample = {
            "entropy_normalized": {0: [min(1.0, entropy), min(1.0, 0.05 + 0.95 * math.exp(-index / 40))]},
            "separability@10": {0: [draw.uniform(0.1, 0.5) if index < 12 else 0.6, 0.5]},
            "score_spread": {0: [6.0 * (1 - entropy), 2.0]},
        }
        assert engine.update(index, sample) == []
    # and after that descent a rise is seen, from the level reached
    fired = [index for index in range(5) if engine.update(200 + index, {"entropy_normalized": {0: [0.85, 0.05]}})]
    assert fired == [2]


def test_sink_heads_are_silent():
    draw = random.Random(1)
    values = [0.02 + 0.03 * draw.random() for _ in range(100)]  # more than doubles, and is below the collapse level
    assert run(only(EntropyRise()), "entropy_normalized", values, error=0.005) == []
    assert run(only(EntropyCollapse()), "entropy_normalized", values, error=0.005) == []


def test_noise_within_the_standard_error_is_silent():
    sequence = [0.5, *[0.75] * 6]
    assert run(only(EntropyRise()), "entropy_normalized", sequence, error=0.07) == []  # 3 * 0.07 * sqrt 2 = 0.30
    assert run(only(EntropyRise()), "entropy_normalized", sequence, error=0.05) == [3]  # 0.21
    assert run(only(EntropyRise(sigmas=0)), "entropy_normalized", sequence, error=0.07) == [3]


def test_scatter_between_samples_counts_as_noise():
    calm, restless = [0.5] * 30, [0.4, 0.6] * 15
    assert run(only(EntropyRise()), "entropy_normalized", calm + [0.76] * 3) == [32]
    assert run(only(EntropyRise()), "entropy_normalized", restless + [0.76] * 3) == []


def test_a_slow_drift_is_not_learned_away():
    ramp = [0.5 + 0.01 * index for index in range(50)]  # to 0.99 over 50 samples
    fired = run(only(EntropyRise()), "entropy_normalized", [0.5] * 10 + ramp)
    assert len(fired) == 1
    assert fired[0] < 55


def test_the_baseline_follows_a_head_that_gets_more_selective():
    # down to 0.4 in 5 samples: at the quick rate the baseline is there in 15, at the slow one it would need 60
    sequence = [0.9] * 3 + [0.8, 0.7, 0.6, 0.5] + [0.4] * 15
    assert run(only(EntropyRise()), "entropy_normalized", sequence + [0.68] * 3) == [24]


def test_trouble_is_not_learned():
    engine = only(EntropyRise())
    assert run(engine, "entropy_normalized", [0.5] * 3 + [0.9] * 500) == [5]
    assert engine.counts() == {"entropy_rise": 1}


def test_separability_loss():
    # baseline 0.7, limit 0.42
    assert run(only(SeparabilityLoss()), "separability@10", [0.7] * 4 + [0.41] * 3) == [6]
    assert run(only(SeparabilityLoss()), "separability@10", [0.7] * 4 + [0.43] + [0.35] * 3) == [7]
    assert run(only(SeparabilityLoss()), "separability@10", [0.7] * 4 + [0.43] * 9) == []
    assert run(only(SeparabilityLoss()), "separability@10", [0.7] * 4 + [0.35] * 9, error=0.12) == []
    assert run(only(SeparabilityLoss()), "separability@10", [0.5] * 4 + [1.0] * 9) == []


@pytest.mark.parametrize(
    ("present", "read"),
    [
        (["separability@1", "separability@5", "separability@20"], "separability@5"),
        (["separability@32"], "separability@32"),
    ],
)
def test_separability_reads_the_n_nearest_ten(present, read):
    engine = only(SeparabilityLoss())
    alerts = []
    for index in range(6):
        values = {name: {0: [0.7 if index < 3 or name != read else 0.1]} for name in present}
        alerts += engine.update(index, values)
    assert [alert.evidence[0].quantity for alert in alerts] == [read]


def test_separability_is_judged_only_where_a_head_selects():
    engine = only(SeparabilityLoss())
    for index, (ratio, entropy) in enumerate([(0.5, 0.99)] * 3 + [(0.2, 0.99)] * 5):  # before training selects
        assert engine.update(index, {"separability@10": {0: [ratio]}, "entropy_normalized": {0: [entropy]}}) == []
    for index, (ratio, entropy) in enumerate([(0.7, 0.5)] * 3 + [(0.1, 0.02)] * 5):  # a single key: collapse's business
        assert engine.update(10 + index, {"separability@10": {0: [ratio]}, "entropy_normalized": {0: [entropy]}}) == []
    for index in range(50):  # back to uniform, but not beyond the limit: not learned either
        engine.update(20 + index, {"separability@10": {0: [0.45]}, "entropy_normalized": {0: [1.0]}})
    fired = [
        index
        for index in range(4)
        if engine.update(70 + index, {"separability@10": {0: [0.38]}, "entropy_normalized": {0: [1.0]}})
    ]
    assert fired == [2]  # the baseline learned while it selected still stands


def test_active_set_waits_then_says_it_once():
    assert run(only(ActiveSet(wait=0)), "active_share", [0.9] * 10) == [2]
    assert run(only(ActiveSet()), "active_share", [0.9] * 30) == [10]
    assert run(only(ActiveSet()), "active_share", [0.9] * 8 + [0.04] * 30) == []
    assert run(only(ActiveSet(wait=0)), "active_share", [0.06] * 10) == []  # the paper says: more than
    assert run(only(ActiveSet(wait=0)), "active_share", [0.063] * 10, error=0.01) == []
    # between leave and level nothing ends; below leave it does, and crossing again says it again
    again = [0.9] * 3 + [0.055] * 5 + [0.9] * 3 + [0.04] * 3 + [0.9] * 3
    assert run(only(ActiveSet(wait=0)), "active_share", again) == [2, 16]


def test_entropy_collapse_is_low_and_fallen():
    assert run(only(EntropyCollapse()), "entropy_normalized", [0.5] * 4 + [0.04] * 3) == [6]
    assert run(only(EntropyCollapse()), "entropy_normalized", [0.5] * 4 + [0.06] * 9) == []  # not low enough
    assert run(only(EntropyCollapse()), "entropy_normalized", [0.07] * 4 + [0.04] * 9) == []  # not fallen by half
    assert run(only(EntropyCollapse()), "entropy_normalized", [0.5] * 4 + [0.04] * 9, error=0.16) == []


def test_entropy_collapse_wants_large_scores_where_they_are_known():
    for spread, expected in ((2.0, []), (12.0, [5]), (NAN, [5])):
        engine, fired = only(EntropyCollapse()), []
        for index, entropy in enumerate([0.6] * 3 + [0.04] * 4):
            sample = {"entropy_normalized": {0: [entropy]}, "score_spread": {0: [spread if index > 2 else 3.0]}}
            fired += [index] if engine.update(index, sample) else []
        assert fired == expected


def test_score_growth_at_one_sample():
    assert run(only(ScoreGrowth()), "score_spread", [9.0, 12.6, 14.99, 15.0, 16.0]) == [3]
    assert run(only(ScoreGrowth()), "score_max", [40.0, 99.9, 100.0]) == [2]
    assert run(only(ScoreGrowth()), "score_spread", [15.5] * 5, error=0.2) == []
    assert run(only(ScoreGrowth()), "score_spread", [16.0] + [11.0] * 5 + [16.0] + [7.0] * 3 + [16.0]) == [0, 10]


def test_score_growth_does_not_repeat_a_head_for_its_second_figure():
    engine = only(ScoreGrowth())
    first = engine.update(0, {"score_spread": {0: [16.0, 5.0]}, "score_max": {0: [50.0, 50.0]}})
    second = engine.update(1, {"score_spread": {0: [16.0, 5.0]}, "score_max": {0: [120.0, 130.0]}})
    assert [alert.heads for alert in first] == [{0: (0,)}]
    assert [alert.heads for alert in second] == [{0: (1,)}]
    assert engine.counts() == {"score_growth": 2}


def test_which_of_its_figures_speaks_of_how_many_heads():
    sample = {"score_spread": {0: [16.0, 5.0, 18.0]}, "score_max": {0: [120.0, 130.0, 140.0]}}
    (alert,) = only(ScoreGrowth()).update(0, sample)
    words = "score spread 16 to 18 in 2 of them (limit 15) and largest |score| 120 to 140 (limit 100) at step 0"
    assert words in alert.summary
    assert [evidence.heads for evidence in alert.evidence] == [{0: (0, 2)}, {0: (0, 1, 2)}]


def test_sharp_temperature():
    engine = only(SharpTemperature())
    values = {"entropy": {0: [1.0, 1.0], 1: [1.0, 1.0]}}
    (alert,) = engine.update(0, values, temperatures={0: 8.0, 1: 0.1}, layers={1: "h.1.attn"})
    assert alert.heads == {1: (0, 1)}
    assert "all 2 heads of layer 1 (h.1.attn)" in alert.summary
    assert engine.update(1, values, temperatures={0: 8.0, 1: 0.1}) == []
    assert only(SharpTemperature()).update(0, values, temperatures={0: 0.11, 1: 8.0}) == []


def test_non_finite_rows():
    engine = only(NonFinite())
    assert engine.update(0, {}, nonfinite={0: [0, 0], 1: [0, 0]}) == []
    (alert,) = engine.update(1, {}, nonfinite={0: [0, 0], 1: [0, 3]})
    assert (alert.rule, alert.severity, alert.heads) == ("nonfinite", "critical", {1: (1,)})
    assert alert.evidence[0].figures == {1: (3.0,)}
    assert "rows with NaN or infinite scores 3 (limit 1) at step 1" in alert.summary


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_hysteresis():
    # limit 0.7, leave 0.6 for patience samples
    jump, between, back = [0.8] * 3, [0.65] * 6, [0.5] * 3
    assert run(only(EntropyRise()), "entropy_normalized", [0.5] * 3 + jump + between + jump) == [5]
    assert run(only(EntropyRise()), "entropy_normalized", [0.5] * 3 + jump + [0.5] * 2 + jump + jump) == [5]
    assert run(only(EntropyRise()), "entropy_normalized", [0.5] * 3 + jump + back + jump) == [5, 11]


def test_recovery_ends_the_count():
    engine = only(EntropyRise())
    run(engine, "entropy_normalized", [0.5] * 3 + [0.8] * 3)
    assert engine.counts() == {"entropy_rise": 1}
    assert engine.alarmed() == {"entropy_rise": {0: (0,)}}
    run(engine, "entropy_normalized", [0.5] * 3, start=100)
    assert engine.counts() == {"entropy_rise": 0}
    assert engine.messages() == {"entropy_rise": 1}


@pytest.mark.parametrize("gap", [NAN, math.inf, None])
def test_absent_samples_neither_count_nor_reset(gap):
    engine, fired = only(EntropyRise()), []
    for index, entropy in enumerate([gap, 0.5, gap, 0.5, 0.8, gap, 0.8, gap, gap, 0.8, 0.8]):
        values = {} if entropy is None else {"entropy_normalized": {0: [entropy]}}
        fired += [index] if engine.update(index, values) else []
    assert fired == [9]


def test_a_head_of_nothing_but_nan():
    engine = AlertEngine()
    said = []
    for step in range(30):
        said += engine.update(step, {name: {0: [NAN, NAN]} for name in ALERT_QUANTITIES})
    assert [(alert.step, alert.rule, alert.severity) for alert in said] == [(2, "not_measured", "watch")]
    json.dumps(engine.state_dict(), allow_nan=False)


def test_layers_and_heads_may_appear_later():
    engine = only(EntropyRise())
    for step in range(4):
        engine.update(step, {"entropy_normalized": {0: [0.5]}})
    alerts = []
    for step, entropy in enumerate([0.5, 0.5, 0.9, 0.9, 0.9]):
        alerts += engine.update(10 + step, {"entropy_normalized": {0: [0.5, entropy], 7: [entropy]}})
    assert [alert.heads for alert in alerts] == [{0: (1,), 7: (0,)}]


def _samples(count, seed=0):
    draw = random.Random(seed)
    for index in range(count):
        late = index > count // 2
        yield {
            "step": 50 * index,
            "values": {
                "entropy_normalized": {
                    layer: [
                        NAN
                        if draw.random() < 0.1
                        else min(1.0, (0.9 if late and head == 1 else 0.5) + draw.gauss(0, 0.02))
                        for head in range(3)
                    ]
                    for layer in range(2)
                },
                "separability@10": {0: [0.3 if late and draw.random() < 0.8 else 0.7] * 3},
                "active_share": {0: [draw.choice([0.02, 0.2])] * 3},
                "score_spread": {1: [draw.uniform(1, 13) for _ in range(3)]},
                "score_max": {1: [draw.uniform(1, 130) for _ in range(3)]},
            },
            "errors": {"entropy_normalized": {0: [0.01] * 3, 1: [0.01] * 3}},
            "layers": {0: "h.0", 1: "h.1"},
            "temperatures": {0: 8.0, 1: draw.choice([0.05, 8.0])},
            "nonfinite": {0: [0, 0, draw.choice([0, 0, 2])]},
        }


@pytest.mark.parametrize("cut", [0, 1, 5, 17, 20, 21, 22, 23, 39])
def test_a_resumed_run_behaves_as_the_unbroken_one(cut):
    unbroken = AlertEngine()
    expected = [unbroken.update(**sample) for sample in _samples(40)]
    assert sum(map(len, expected)) > 8  # there is something to compare
    samples = list(_samples(40))
    first = AlertEngine()
    got = [first.update(**sample) for sample in samples[:cut]]
    second = AlertEngine()
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    got += [second.update(**sample) for sample in samples[cut:]]
    assert [[alert.message for alert in alerts] for alerts in got] == [
        [alert.message for alert in alerts] for alerts in expected
    ]
    assert [[alert.heads for alert in alerts] for alerts in got] == [
        [alert.heads for alert in alerts] for alerts in expected
    ]
    assert second.state_dict() == unbroken.state_dict()
    assert second.counts() == unbroken.counts()
    assert second.messages() == unbroken.messages()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"version": 99, "raised": {}, "memory": []},
        {"version": 1, "raised": {}},
        {"version": 1, "raised": {}, "memory": [{"rule": "entropy_rise"}]},
        {"version": 1, "raised": {}, "memory": [{"rule": "r", "quantity": "q", "layers": {"0": {"0": {"x": 1}}}}]},
        {
            "version": 2,
            "raised": {},
            "heads": {},
            "paths": {},
            "given": None,
            "memory": [{"rule": "r", "signal": "q", "layers": {"0": {"0": {"baseline": NAN}}}}],
        },
        {
            "version": 2,
            "raised": {},
            "heads": {},
            "paths": {},
            "given": None,
            "memory": [{"rule": "r", "signal": "q", "layers": {"0": {"0": {"seen": None}}}}],
        },
        None,
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(state):
    engine = only(EntropyRise())
    run(engine, "entropy_normalized", [0.5] * 3)
    before = engine.state_dict()
    with pytest.raises(ValueError, match=r"Expected `state` to be what AlertEngine.state_dict\(\)"):
        engine.load_state_dict(state)
    assert engine.state_dict() == before


def test_alerts_are_plain_and_picklable():
    engine = only(EntropyRise())
    for step in range(5):
        alerts = engine.update(step, {"entropy_normalized": {2: [0.5 if step < 2 else 0.9]}}, layers={2: "h.2"})
    (alert,) = alerts
    assert pickle.loads(pickle.dumps(alert)) == alert
    assert pickle.loads(pickle.dumps(engine)).state_dict() == engine.state_dict()
    plain = dataclasses.asdict(alert)
    assert plain["heads"] == {2: (0,)}
    assert plain["layers"] == {2: "h.2"}
    assert plain["since"] == 2
    assert plain["samples"] == 3
    assert plain["tag"] == "attn/warnings/entropy_rise"
    (evidence,) = alert.evidence
    assert evidence.figures == {2: (0.9,)}
    assert evidence.baselines == {2: (0.5,)}
    assert evidence.limits[2][0] == pytest.approx(0.7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        alert.step = 3


# --- Messages ---------------------------------------------------------------------------------------------------------


def _rise(heads, layers, names):
    """The one alert of ``heads`` rising 0.5 -> 0.9 in a model of ``layers`` layers of 12 heads."""
    engine = only(EntropyRise())
    for step in range(4):
        values = {
            layer: [0.9 if step > 0 and head in heads.get(layer, ()) else 0.5 for head in range(12)]
            for layer in range(layers)
        }
        alerts = engine.update(50 * step, {"entropy_normalized": values}, layers=names)
    (alert,) = alerts
    return alert


PATHS = {layer: f"transformer.h.{layer}.attn" for layer in range(12)}


@pytest.mark.parametrize(
    ("heads", "where"),
    [
        ({3: [5]}, "head 5 of layer 3 (transformer.h.3.attn):"),
        ({3: [0, 1, 2, 7, 11]}, "5 heads of layer 3 (transformer.h.3.attn) [0-2, 7, 11]:"),
        ({3: range(12)}, "all 12 heads of layer 3 (transformer.h.3.attn):"),
        ({3: range(12), 4: range(12)}, "all 24 heads of layers 3, 4 (transformer.h.3.attn, transformer.h.4.attn):"),
        ({layer: range(12) for layer in range(6)}, "all 72 heads of layers 0-5:"),
        ({layer: range(12) for layer in range(12)}, "all 144 heads of the model:"),
        (
            {0: range(12), 3: [1, 2], 4: [9]},
            "15 heads [layer 0 (transformer.h.0.attn): all; layer 3 (transformer.h.3.attn): 1, 2; "
            "layer 4 (transformer.h.4.attn): 9]:",
        ),
        (
            {layer: [layer] for layer in range(12)},
            "12 heads [layer 0: 0; layer 1: 1; layer 2: 2; layer 3: 3; 8 more in layers 4-11]:",
        ),
    ],
)
def test_where(heads, where):
    alert = _rise(heads, 12, PATHS)
    assert f"entropy rising in {where} normalised entropy 0.90 against" in alert.summary
    assert alert.heads == {layer: tuple(names) for layer, names in heads.items()}  # the whole list stays in the data
    assert len(alert.message) < 900


def test_the_whole_message():
    assert _rise({3: [5]}, 12, PATHS).message == (
        "entropy rising in head 5 of layer 3 (transformer.h.3.attn): normalised entropy 0.90 against a baseline of "
        "0.50 (+80%, limit: 40% of the way from the baseline to 1) for 3 samples, since step 50; attention spreads "
        "toward uniform and selects less. Remedy: more heads (narrower ones), or a length-aware or sparse "
        "normaliser (Scalable-Softmax, sparsemax, alpha-entmax); a shorter context; not a sharper temperature, which "
        "raises gradients without gaining separability. If it came suddenly, look at what changed: weight decay on "
        "the query and key projections, the attention scale, the context length."
    )


def test_several_heads_give_ranges_and_name_the_worst():
    engine = only(EntropyRise())
    for step in range(4):
        pair = [0.8, 0.9] if step else [0.5, 0.4]
        alerts = engine.update(step, {"entropy_normalized": {0: [*pair, 0.3]}})
    words = "normalised entropy 0.80 to 0.90 against baselines of 0.40 to 0.50 (most: layer 0 head 1, 0.40 to 0.90"
    assert words in alerts[0].summary


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (EntropyRise, ["more heads", "Scalable-Softmax", "alpha-entmax", "not a sharper temperature"]),
        (SeparabilityLoss, ["more heads", "alpha-entmax"]),
        (ActiveSet, ["more heads", "alpha-entmax"]),
        (EntropyCollapse, ["learning rate", "warm-up", "QK-norm", "QK-clip", "sigmaReparam"]),
        (ScoreGrowth, ["learning rate", "warm-up", "QK-norm", "QK-clip", "sigmaReparam"]),
        (SharpTemperature, ["more heads", "scale"]),
        (NonFinite, ["bfloat16", "learning rate"]),
    ],
)
def test_remedies(rule, words):
    assert all(word in rule.remedy for word in words)
    assert not rule.remedy.endswith(".")
    assert not rule.meaning.endswith(".")


def test_other_heads_under_alarm_are_counted_not_named():
    engine = only(ScoreGrowth())
    engine.update(0, {"score_spread": {0: [16.0, 1.0]}})
    (alert,) = engine.update(10, {"score_spread": {0: [16.0, 16.0]}})
    assert alert.heads == {0: (1,)}
    assert "(2 heads under this alarm now)" in alert.summary


def test_at_most_one_alert_a_rule_and_sample():
    engine = AlertEngine(patience=1)
    sample = {"score_spread": {0: [50.0, 50.0]}, "score_max": {0: [500.0, 500.0]}, "active_share": {0: [0.5, 0.5]}}
    alerts = engine.update(0, sample, temperatures={0: 0.01}, nonfinite={0: [1, 1]})
    assert [alert.rule for alert in alerts] == ["score_growth", "sharp_temperature", "nonfinite"]


def test_markdown():
    engine = only(ScoreGrowth())
    (alert,) = engine.update(7, {"score_spread": {0: [16.0]}, "score_max": {0: [50.0]}}, layers={0: "a|b"})
    text = alert_markdown(alert)
    assert text.startswith("**warn: attention scores too large** (step 7)\n\n")
    assert "| 0 | `a\\|b` | 0 | score spread | 16 |  | 15 |" in text
    assert "**Remedy:** a lower learning rate" in text
    many = only(ScoreGrowth()).update(7, {"score_spread": {0: [16.0] * 100}})[0]
    assert alert_markdown(many, max_rows=10).endswith("and 90 more rows")


# --- Arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience", [0, -1, 2.5, True, "3"])
def test_patience(patience):
    with pytest.raises(ValueError, match=r"Expected `patience` to be an integer >= 1 .* but got"):
        AlertEngine(patience=patience)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: EntropyRise(share=0.0), "Expected `share` of `entropy_rise` to be a number between 0 and 1"),
        (lambda: EntropyRise(share=NAN), "Expected `share` of `entropy_rise`"),
        (lambda: EntropyRise(share="a"), "Expected `share` of `entropy_rise`"),
        (
            lambda: EntropyRise(share=0.2, leave_share=0.3),
            "Expected `leave_share` of `entropy_rise` to be below `share`",
        ),
        (lambda: EntropyRise(patience=0), "Expected `patience` of `entropy_rise`"),
        (lambda: EntropyRise(severity="bad"), "one of watch, warn, critical, but got 'bad'"),
        (lambda: EntropyRise(sigmas=-1), "Expected `sigmas` of `entropy_rise`"),
        (lambda: EntropyRise(learn_worse=1.0), "Expected `learn_worse` of `entropy_rise`"),
        (lambda: SeparabilityLoss(share=0.1), "Expected `leave_share` of `separability_loss` to be below `share`"),
        (lambda: SeparabilityLoss(min_entropy=0.9, max_entropy=0.5), "to be below `max_entropy`"),
        (lambda: ActiveSet(leave=0.07), "Expected `leave` of `active_set` to be below `level`"),
        (lambda: ActiveSet(wait=-1), "Expected `wait` of `active_set`"),
        (lambda: EntropyCollapse(leave=0.04), "Expected `level` of `entropy_collapse` to be below `leave`"),
        (lambda: ScoreGrowth(leave_spread=16.0), "Expected `leave_spread` of `score_growth` to be below `spread`"),
        (
            lambda: ScoreGrowth(largest=50.0, leave_largest=60.0),
            "Expected `leave_largest` of `score_growth` to be below `largest`",
        ),
        (lambda: SharpTemperature(level=0.2), "Expected `level` of `sharp_temperature` to be below `leave`"),
        (lambda: NonFinite(rows=0), "Expected `rows` of `nonfinite`"),
        (lambda: AlertRules(entropy_rise=ScoreGrowth()), "Expected `entropy_rise` of `AlertRules`"),
    ],
)
def test_contradicting_or_impossible_numbers(build, text):
    with pytest.raises(ValueError, match=text):
        build()


def test_rules_of_the_wrong_type():
    with pytest.raises(TypeError, match="Expected `rules` to be an AlertRules or None, but got dict"):
        AlertEngine({"entropy_rise": None})


def test_every_quantity_that_a_rule_reads_is_asked_for():
    signals = [signal.quantity for rule in AlertRules().active() for signal in rule.signals(ALERT_QUANTITIES)]
    assert set(signals) == set(ALERT_QUANTITIES)


def test_the_rules_import_neither_torch_nor_numpy():
    code = (
        "import importlib.util, sys, types, pathlib\n"
        "root = pathlib.Path(importlib.util.find_spec('attnmon').origin).parent\n"
        "package = types.ModuleType('attnmon'); package.__path__ = [str(root)]; sys.modules['attnmon'] = package\n"
        "import attnmon.alerts, attnmon.schedule\n"
        "bad = {'torch', 'numpy', 'lightning'} & set(sys.modules); assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
