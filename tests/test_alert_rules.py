"""The rules that judge by change, one exact sequence each: what they say, at which sample, and what they let pass."""

import dataclasses
import math

import pytest

from attnmon import alerts
from attnmon.alerts import AlertEngine, AlertRules

NAN = math.nan
OFF = {field.name: None for field in dataclasses.fields(AlertRules)}
KEYS = {"spread": "score_spread", "largest": "score_max", "entropy": "entropy_normalized", "jacobian": "jacobian@1.0"}

# Numbers of these tests: the sequences below are about the rules, and stay when defaults are tuned.
_DRIFT = {"share": 0.15, "sudden_share": 0.1, "flat_share": 0.12, "flat_patience": 5, "leave_share": 0.3, "hotter": 3.0}
_LEVELS = {"spread": 15.0, "leave_spread": 8.0, "crowd_spread": 10.0, "largest": 100.0, "leave_largest": 80.0}
_CHANGE = {"jump": 3.0, "jump_spread": 6.0, "slope": 2.0, "slope_spread": 8.0, "slope_wait": 20}
DRIFT = alerts.UniformDrift(
    **_DRIFT, crowd_share=0.25, min_entropy=0.95, min_baseline=0.2, learn_better=0.2, learn_worse=0.03
)
GROWTH = alerts.ScoreGrowth(**_LEVELS, **_CHANGE, learn_better=0.1, learn_worse=0.1)
SHARP = alerts.SharpTemperature(learn_better=0.5, learn_worse=0.5, level=0.1, leave=0.12, cut=0.5, min_spread=6.0)
BOUND = alerts.JacobianBound(share=0.9, leave=0.8)
COLLAPSE = alerts.EntropyCollapse(level=0.05, leave=0.1, share=0.5, min_spread=10.0)


def only(rule):
    """An engine with one rule."""
    return AlertEngine(AlertRules(**{**OFF, rule.name: rule}))


def heard(rule, error=0.0, **series):
    """What one rule says of one head: (indices of the samples that raise an alert, of those that end it).

    The series have the names of `KEYS`, or ``temperature``; a number stands for as many samples as the others have.
    """
    count = max(len(one) for one in series.values() if isinstance(one, list))
    rows = {name: one if isinstance(one, list) else [one] * count for name, one in series.items()}
    temperature = rows.pop("temperature", None)
    engine, raised, ended = only(rule), [], []
    for index in range(count):
        values = {KEYS[name]: {0: [row[index]]} for name, row in rows.items()}
        errors = {key: {0: [error]} for key in values}
        temperatures = {0: temperature[index]} if temperature else None
        raised += [index] if engine.update(index, values, errors=errors, temperatures=temperatures) else []
        ended += [index] if engine.recoveries else []
    return raised, ended


CALM = [4.0] * 12  # a head that has settled


@pytest.mark.parametrize(
    ("spread", "entropy", "raised", "ended"),
    [
        ([*CALM, 0.39], 0.99, [12], []),  # less than a tenth of the sample before: one sample is enough
        ([*CALM, 0.59], 0.99, [], []),  # less than 15 % of the baseline: two are,
        ([*CALM, 0.59, 0.58], 0.99, [13], []),
        ([*CALM, *[0.56, 2.0] * 10], 0.99, [], []),  # in a row
        ([*CALM, *[0.64] * 30], 0.99, [], []),
        ([4.0 * 0.95**index for index in range(75)], 0.99, [58], []),  # 5 % a sample, the baseline 3 % of the gap
        ([0.3] * 3 + [0.02] * 9, 0.99, [], []),  # never came to select: what random weights give may dip
        ([0.1] * 3 + [2.0] * 6 + [0.19], 0.99, [9], []),  # it has learned to select
        ([0.3] * 2 + [1.0] * 9 + [0.4] * 99 + [0.05] * 2, 0.99, [111], []),  # and is judged from then on
        ([0.02], 0.99, [], []),
        ([*CALM, NAN, 0.39], 0.99, [13], []),
        ([*CALM, 0.2, 0.2], 0.949, [], []),  # a single key still stands out
        ([*CALM, 0.2, 0.2], 0.95, [12], []),
        ([*CALM, 0.2, 0.2], NAN, [12], []),  # entropy is not measured
        ([*CALM, *[0.2] * 4], [0.5] * 14 + [0.96] * 2, [15], []),
        ([*CALM, 0.2, *[1.3] * 3], 0.99, [12], [15]),  # ends above 30 %,
        ([*CALM, 0.2, *[1.1] * 9], 0.99, [12], []),
        ([*CALM, 0.2, 1.3, 1.3, 1.1, 1.3, 1.3, 1.3], 0.99, [12], [18]),  # three in a row
    ],
)
def test_uniform_drift(spread, entropy, raised, ended):
    assert heard(DRIFT, spread=spread, entropy=entropy) == (raised, ended)


def test_a_layer_that_is_flat_from_the_start():
    def alarms(*rows):
        engine = only(DRIFT)
        return [
            (index, alert.heads)
            for index, row in enumerate(rows)
            for alert in engine.update(index, {"score_spread": {0: row}})
        ]

    dead, well = [0.03, 0.3, 0.03, 0.3], [0.3] * 4
    assert alarms(well, *[dead] * 9) == [(5, {0: (0, 2)})]  # half of the heads at a tenth, for five samples
    assert alarms(well, *[dead] * 4, well, dead) == []
    assert alarms(well, *[[0.03, 0.3, 0.3, 0.3]] * 9) == []
    assert alarms(*[well] * 8, *[dead] * 9) == []  # later
    assert alarms([0.19] * 4, *[[0.01] * 4] * 9) == []  # there was nothing to lose


def test_uniform_drift_of_a_temperature_that_was_raised():
    hot = [8.0] * 4 + [25.0] * 3
    assert heard(DRIFT, temperature=hot + [13.0] * 3, entropy=0.99) == ([4], [9])  # ends below 8 * sqrt(3) = 13.9
    assert heard(DRIFT, temperature=hot + [14.0] * 9, entropy=0.99) == ([4], [])
    assert heard(DRIFT, temperature=hot, entropy=0.86) == ([4], [])
    assert heard(DRIFT, temperature=hot, entropy=0.84) == ([], [])
    assert heard(DRIFT, temperature=[8.0] * 4 + [23.0] * 3, entropy=0.99) == ([], [])  # not three times the baseline
    assert heard(DRIFT, temperature=[8.0 * 1.3**index for index in range(20)], entropy=0.99) == ([], [])  # goes along
    assert heard(DRIFT, temperature=[800.0] * 4, entropy=0.99) == ([], [])  # from the start


def test_changes_within_the_noise():
    # The error of the fall from the sample before is 1.41 of a sample's: 3 * 1.41 * error against 3.8
    assert heard(DRIFT, error=0.8, spread=[*CALM, 0.2], entropy=0.99)[0] == [12]  # 3.4
    assert heard(DRIFT, error=1.0, spread=[*CALM, 0.2], entropy=0.99)[0] == []  # 4.2
    assert heard(dataclasses.replace(DRIFT, sigmas=0), error=1.0, spread=[*CALM, 0.2], entropy=0.99)[0] == [12]
    # A baseline learned from four samples has 0.75 of it: 3 * error * sqrt(1 + 0.75^2) against a rise of 4.5
    assert heard(GROWTH, error=1.1, spread=[2.0] * 4 + [6.5])[0] == [4]  # 4.1
    assert heard(GROWTH, error=1.3, spread=[2.0] * 4 + [6.5])[0] == []  # 4.9


@pytest.mark.parametrize(
    ("spread", "raised", "ended"),
    [
        ([2.0] * 4 + [6.1] + [4.1] * 9, [4], []),  # three times the baseline, and 6; ends half of the way back from 6,
        ([2.0] * 4 + [6.1] + [3.9] * 3, [4], [7]),
        ([2.0] * 4 + [5.9] * 3, [], []),
        ([2.5] * 4 + [7.4] * 3, [], []),
        ([2.0, 6.1], [1], []),  # a fine-tuning run is judged from its second sample
        ([0.29] * 8 + [6.1] * 3, [], []),  # the head selected nothing before
        ([0.3] * 8 + [6.1] * 3, [8], []),
        ([0.1, *[1.5, 2.5] * 6, 8.0, 8.0], [], []),  # unsettled: by half from sample to sample
        ([0.1, *[1.5, 2.5] * 6, *[2.0] * 12, 8.0], [25], []),  # settled since
        ([0.5, *[1.5, 2.5] * 6, 8.0], [13], []),  # settled from its first sample, as in fine-tuning
        ([0.4 * 1.3**index for index in range(14)], [], []),  # to 12 without a calm sample: training from scratch
        ([3.9] * 20 + [8.1] + [6.0] * 9, [20], []),  # slope: twice the baseline, and 8
        ([3.9] * 20 + [8.1] + [5.9] * 3, [20], [23]),  # half of the way back from 8
        ([4.1] * 20 + [8.1] * 3, [], []),
        ([3.5] * 20 + [7.9] * 3, [], []),
        ([3.9] * 10 + [8.1] * 20, [20], []),  # in a head's first 20 samples nothing is said
        ([1.0] * 25 + [1.12**index for index in range(1, 22)], [43], []),  # 12 % a sample, at the first > 8
        ([1.0] * 25 + [1.08**index for index in range(1, 35)], [], []),  # 8 %: 1.8 times the baseline
        ([16.0] + [8.0] * 9, [0], []),  # level
        ([16.0] + [7.9] * 3, [0], [3]),
        ([16.0, 7.9, 7.9, 8.0, 7.9, 7.9, 7.9], [0], [6]),
    ],
)
def test_score_growth_of_one_head(spread, raised, ended):
    assert heard(GROWTH, spread=spread) == (raised, ended)


def test_score_growth_by_the_largest_score():
    assert heard(GROWTH, largest=[99.9] * 9 + [100.0] + [80.0] * 9) == ([9], [])
    assert heard(GROWTH, largest=[99.9] * 9 + [100.0] + [79.9] * 3) == ([9], [12])


def test_score_growth_in_a_crowd():
    def heads(*row):
        return [alert.heads for alert in only(GROWTH).update(0, {"score_spread": {0: [1.0] * 4, 3: row}})]

    assert heads(10.0, 1.0, 10.0, 1.0) == [{3: (0, 2)}]
    assert heads(14.9, 1.0, 1.0, 1.0) == []  # single healthy heads are there
    assert heads(10.0, 10.0, 1.0, 1.0, 1.0) == []
    assert heads(9.9, 9.9, 9.9, 9.9) == []
    assert heads(10.0, 1.0, 1.0) == heads(10.0) == []  # two at least
    assert heads(10.0, 10.0, NAN, NAN) == [{3: (0, 1)}]


def test_the_crowd_counts_heads_beyond_noise_and_each_leaves_by_itself():
    engine = only(GROWTH)
    errors = {"score_spread": {0: [0.0, 0.1]}}
    assert engine.update(0, {"score_spread": {0: [11.0, 10.2]}}, errors=errors) == []
    assert engine.update(1, {"score_spread": {0: [11.0, 10.4]}}, errors=errors) != []
    for step in range(2, 5):
        engine.update(step, {"score_spread": {0: [8.1, 7.9]}})
    assert [alert.heads for alert in engine.recoveries] == [{0: (1,)}]


@pytest.mark.parametrize(
    ("before", "row", "limits"),
    [
        (2.0, [16.0, 2.0], ["limit: 3 times the baseline and 6"]),  # the level, too: the first way is told
        (6.0, [11.0, 11.0], ["limit 10 where half of a layer passes it"]),
        (2.0, [6.5, 2.0], ["limit: 3 times the baseline and 6"]),
        (3.9, [8.1, 3.9], ["limit: 2 times the baseline, which follows slowly, and 8"]),
        (6.0, [16.0, 11.0], ["limit 15", "limit 10 where half of a layer passes it"]),
    ],
)
def test_which_way_is_told(before, row, limits):
    engine = only(GROWTH)
    for step in range(20):
        assert engine.update(step, {"score_spread": {0: [before, before]}}) == []
    (alert,) = engine.update(20, {"score_spread": {0: row}})
    assert [evidence.limit_text for evidence in alert.evidence] == limits
    assert all(f"{text})" in alert.summary for text in limits)


@pytest.mark.parametrize(
    ("temperature", "spread", "raised", "ended"),
    [
        ([0.1] + [0.12] * 9, 6.0, [0], []),
        ([0.1] + [0.121] * 3, 6.0, [0], [3]),
        ([0.1] * 3, [5.9, 5.9, 6.0], [2], []),  # before, as in cosine attention: its scores are bounded
        ([8.0] * 3 + [3.9] * 9, 5.0, [3], []),  # cut by more than half: said once
        ([8.0] * 3 + [4.1] * 9, 5.0, [], []),
        ([8.0] * 3 + [3.9], 3.0, [3], []),
        ([8.0] * 3 + [3.9], 2.9, [], []),
        ([8.0] * 3 + [3.9], NAN, [3], []),
        ([8.0, 5.0, 3.2], 5.0, [2], []),  # in two steps: 6.5 is the baseline of the second
        ([8.0 * 0.8**index for index in range(19)], 5.0, [], []),  # a ramp to 0.14 is left to the score spread
        ([8.0] * 3 + [3.9] + [5.6] * 9, 5.0, [3], []),  # ends above 8 * sqrt(0.5) = 5.66
        ([8.0] * 3 + [3.9] + [5.7] * 3, 5.0, [3], [6]),
    ],
)
def test_sharp_temperature(temperature, spread, raised, ended):
    assert heard(SHARP, temperature=temperature, spread=spread) == (raised, ended)


def test_a_temperature_cut_to_exactly_half():
    assert heard(SHARP, temperature=[8.0] * 3 + [4.0] * 3, spread=5.0)[0] == [3]


def test_jacobian_bound():
    # At T = 8 the bound is 1/16 = 0.0625: the limit is 0.05625, and it ends below 0.05. At T = 4 the bound is 1/8
    hot, cool = [8.0] * 9, [4.0] * 9
    assert heard(BOUND, jacobian=[0.057] * 3 + [0.051] * 6, temperature=hot) == ([2], [])
    assert heard(BOUND, jacobian=[0.057] * 3 + [0.049] * 6, temperature=hot) == ([2], [5])
    assert heard(BOUND, jacobian=[0.057, 0.057, 0.056] * 3, temperature=hot) == ([], [])
    assert heard(BOUND, jacobian=[0.057] * 9, temperature=cool) == ([], [])
    assert heard(BOUND, jacobian=[0.057] * 9) == ([], [])  # a temperature that is not known has no bound


def test_jacobian_bound_within_the_noise():
    assert heard(BOUND, error=0.01, jacobian=[0.06] * 5, temperature=[8.0] * 5) == ([], [])


@pytest.mark.parametrize(
    ("entropy", "spread", "raised", "ended"),
    [
        ([0.04] * 6, [10.0] * 6, [5], []),
        ([0.04] * 6, [9.9] * 6, [], []),  # a sink that forms has a single key above a flat row
        ([0.04] * 6, [NAN] * 6, [5], []),
        ([0.04] * 6, [12.0, 12.0, 9.9, 12.0, 12.0, 12.0], [8], []),  # three in a row
        ([0.04] * 3 + [0.11] * 3, [12.0] * 6, [5], [8]),
        ([0.04] * 3 + [0.09] * 6, [12.0] * 9, [5], []),
        ([0.04] * 9, [12.0] * 3 + [3.0] * 6, [5], []),  # the entropy alone ends it
    ],
)
def test_entropy_collapse_in_company(entropy, spread, raised, ended):
    assert heard(COLLAPSE, entropy=[0.6] * 3 + entropy, spread=[3.0] * 3 + spread) == (raised, ended)
    alone = dataclasses.replace(COLLAPSE, min_spread=0)
    assert heard(alone, entropy=[0.6] * 3 + entropy, spread=0.5)[0] == [5]


def test_not_measured():
    rule = alerts.NotMeasured()
    assert heard(rule, spread=[1.0, *[NAN] * 5, *[1.0] * 5]) == ([3], [8])
    assert heard(rule, spread=[1.0, NAN, NAN] * 4) == ([], [])
    assert heard(rule, spread=[NAN] * 9, entropy=0.5) == ([], [])  # one figure is enough


def test_a_layer_is_no_longer_called():
    engine = only(alerts.NotMeasured())
    engine.update(0, {"score_spread": {0: [1.0], 1: [1.0, 1.0]}}, layers={1: "h.1"})
    (alert,) = [alert for step in (10, 20, 30, 40) for alert in engine.update(step, {"score_spread": {0: [1.0]}})]
    assert (alert.step, alert.severity, alert.heads) == (30, "watch", {1: (0, 1)})
    assert alert.summary == (
        "not measured in all 2 heads of layer 1 (h.1): no figures for 3 samples, since step 10; "
        "nothing is known of these heads meanwhile."
    )


def test_heads_whose_rows_are_all_non_finite_are_left_to_the_rule_for_that():
    engine = only(alerts.NotMeasured())
    for step in range(5):
        assert engine.update(step, {"score_spread": {0: [1.0, NAN]}}, nonfinite={0: [0, 7]}) == []


def test_non_finite_rows_are_no_recovery():
    engine = only(alerts.NotMeasured())
    for step in range(9):
        engine.update(step, {"score_spread": {0: [1.0, NAN]}}, nonfinite={0: [0, 7 if step > 4 else 0]})
        assert engine.recoveries == []


@pytest.mark.parametrize(("falling", "entropy", "expected"), [(2, 0.9, [2]), (1, 0.9, []), (2, 0.8, [])])
def test_half_of_a_layer_goes_uniform_together(falling, entropy, expected):
    rule = alerts.UniformDrift(crowd_share=0.3, crowd_entropy=0.85)
    engine, fired = only(rule), []
    for step, (spread, level) in enumerate([(2.0, 0.6), (0.5, entropy), (0.5, entropy), (0.5, entropy)]):
        values = {
            "score_spread": {0: [spread] * falling + [2.0] * (4 - falling)},
            "entropy_normalized": {0: [level] * falling + [0.6] * (4 - falling)},
        }
        if step == 0:
            engine.update(-1, values)  # settled with the second sample
        fired += [step for alert in engine.update(step, values) if alert.heads == {0: tuple(range(falling))}]
    assert fired == expected


def test_heads_that_hardly_selected_are_no_crowd():
    for before, said in ((0.9, []), (1.1, [12])):
        engine, fired = only(alerts.UniformDrift(crowd_baseline=1.0)), []
        for step, spread in enumerate([0.3, *[before] * 10, *[0.25 * before] * 2]):
            values = {"score_spread": {0: [spread] * 4}, "entropy_normalized": {0: [0.9] * 4}}
            fired += [step for _ in engine.update(step, values)]
        assert fired == said
