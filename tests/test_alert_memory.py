"""What the engine remembers: the end of an alarm, heads that come and go, a restart, another run's baselines."""

import copy
import dataclasses
import json
import math
import pickle
import random

import pytest

from attnmon import alerts
from attnmon.alerts import Alert, AlertEngine, AlertRules, AttentionAlertError
from attnmon.alerts.actions import check_actions

NAN = math.nan
OFF = {field.name: None for field in dataclasses.fields(AlertRules)}
GROWTH = alerts.ScoreGrowth(spread=15, leave_spread=8, crowd_spread=10, largest=100, leave_largest=80, jump=99)
RISE = alerts.EntropyRise(patience=1)


def only(rule, **options):
    """An engine with one rule."""
    return AlertEngine(AlertRules(**{**OFF, rule.name: rule}), **options)


def shown(engine, *rows, quantity="score_spread", layer=0, start=0, path="h.0"):
    """Shows figures of one layer every 10 steps: what was raised, and what ended."""
    raised, ended = [], []
    for index, row in enumerate(rows):
        sample = {} if row is None else {quantity: {layer: row}}
        raised += engine.update(start + 10 * index, sample, layers={layer: path})
        ended += engine.recoveries
    return raised, ended


def through_json(plain):
    """As a file gives it back."""
    return json.loads(json.dumps(plain, allow_nan=False))


def test_the_whole_message_of_an_end():
    (alarm,), (end,) = shown(only(GROWTH), [1.0, 1.0], [1.0, 16.0], *[[1.0, 7.0]] * 9, path="h.0.attn")
    assert end.message == (
        "attention scores too large: over in head 1 of layer 0 (h.0.attn), after an alarm since step 10: score spread "
        "7 (back on the good side) for 3 samples."
    )
    assert (alarm.step, alarm.ended) == (10, False)
    assert (end.step, end.since, end.samples, end.ended, end.remedy) == (40, 10, 3, True, "")
    assert (end.rule, end.severity, end.tag, end.heads) == (alarm.rule, alarm.severity, alarm.tag, alarm.heads)


def test_an_end_tells_the_baseline_that_the_figure_was_compared_with():
    _, (end,) = shown(only(RISE), [0.5], [0.9], *[[0.52]] * 3, quantity="entropy_normalized")
    assert end.evidence[0].baselines == {0: (0.5,)}


def test_an_alarm_lasts_while_one_of_its_signals_holds():
    engine, raised, ended = only(GROWTH), [], []
    for step, (one, other) in enumerate(zip([16, *[7] * 6], [1, 120, 120, 120, 70, 70, 70], strict=True)):
        raised += engine.update(step, {"score_spread": {0: [one]}, "score_max": {0: [other]}})
        ended += engine.recoveries
        assert engine.counts() == {"score_growth": int(step < 6)}
    assert [alert.step for alert in raised] == [0]  # largest |score| joined in: no second alert
    assert [(alert.step, alert.since) for alert in ended] == [(6, 0)]  # nor an end at step 3
    assert [part.quantity for part in ended[0].evidence] == ["score_max"]


def test_what_ends_together_is_one_message_and_each_head_is_told_once():
    engine, grown, well = only(GROWTH), [16.0, 16.0], [7.0, 7.0]
    for step, (first, second) in enumerate([(grown, well), (grown, grown), *[(well, well)] * 3]):
        engine.update(step, {"score_spread": {0: first, 1: second}})
    (end,) = engine.recoveries
    assert "over in all 4 heads of the model, after an alarm since step 0:" in end.summary
    raised, ended = shown(only(GROWTH), [16.0, 1.0], grown, [7.0, 16.0], *[well] * 9)
    assert [(alert.step, alert.heads) for alert in raised] == [(0, {0: (0,)}), (10, {0: (1,)})]
    assert [(alert.step, alert.heads, alert.since) for alert in ended] == [(40, {0: (0,)}, 0), (50, {0: (1,)}, 10)]


def test_an_alarm_may_come_back():
    raised, ended = shown(only(GROWTH), *([[16.0]] + [[7.0]] * 4) * 2)
    assert [alert.step for alert in raised] == [0, 50]
    assert [(alert.step, alert.since) for alert in ended] == [(30, 0), (80, 50)]


@pytest.mark.parametrize("gap", [[NAN], None])
def test_absence_neither_ends_an_alarm_nor_counts_for_it(gap):
    raised, ended = shown(only(GROWTH), [16.0], *[gap] * 5, [7.0], gap, [7.0], gap, [7.0])
    assert ([alert.step for alert in raised], [alert.step for alert in ended]) == ([0], [100])
    raised, ended = shown(only(alerts.NotMeasured()), [16.0], *[gap] * 5, *[[7.0]] * 3)
    assert "no figures for 3 samples, since step 10" in raised[0].summary
    assert ended[0].summary.endswith("after an alarm since step 30: measured again for 3 samples.")


def test_a_layer_added_in_mid_run_has_a_past_of_its_own():
    engine = only(dataclasses.replace(GROWTH, slope=2.0, slope_spread=8.0, slope_wait=20))
    shown(engine, *[[3.9]] * 30)
    raised, _ = shown(engine, *[[3.9]] * 10, *[[8.1]] * 20, layer=1, start=300)
    assert [(alert.step, alert.heads, alert.since) for alert in raised] == [(500, {1: (0,)}, 400)]
    assert shown(only(alerts.NotMeasured()), *[[1.0]] * 5, [1.0, 1.0]) == ([], [])


@pytest.mark.parametrize(("spread", "said"), [(0.01, []), (3.0, []), (16.0, ["score_growth"])])
def test_a_run_of_one_sample(spread, said):
    engine = AlertEngine()
    values = {"score_spread": {0: [spread]}, "entropy_normalized": {0: [0.99]}, "active_share": {0: [0.9]}}
    raised = engine.update(0, values, layers={0: "h.0"}, temperatures={0: 8.0})
    assert ([alert.rule for alert in raised], engine.recoveries) == (said, [])
    if said:  # what a head shows under a warning is no baseline
        with pytest.raises(ValueError, match="only under a warning"):
            engine.baselines()
    else:
        AlertEngine().take_baselines(through_json(engine.baselines()))


def test_heads_that_follow_a_message_are_gathered():
    engine = only(GROWTH, gather=2)
    rows = [[16.0] * min(count, 5) + [1.0] * (5 - min(count, 5)) for count in (1, 2, 3, 3, 4, 5, 5, 5, 5, 5, 5)]
    raised, _ = shown(engine, *rows)
    told = [(alert.step, alert.heads[0], alert.since) for alert in raised]
    assert told == [(0, (0,), 0), (30, (1, 2), 10), (80, (3, 4), 40)]  # after two samples, then after four
    _, ended = shown(engine, *[[1.0] * 5] * 3, start=110)
    assert [alert.heads for alert in ended] == [{0: (0, 1, 2, 3, 4)}]
    raised, _ = shown(engine, *rows[:4], start=200)
    assert [alert.step for alert in raised] == [200, 230]  # from two again, since nothing was under alarm


def test_nothing_is_said_of_an_alarm_that_ends_while_it_is_held_back():
    raised, ended = shown(only(GROWTH, gather=8), [16.0, 1.0, 1.0], [16.0, 16.0, 1.0], *[[16.0, 1.0, 1.0]] * 5)
    assert [alert.heads for alert in raised] == [{0: (0,)}]
    assert ended == []


def test_a_head_that_is_absent_when_others_are_told_is_told_later():
    rows = [
        [16.0, 1.0, 1.0, 1.0],
        *[[16.0, 16.0, 1.0, 1.0]] * 2,
        [16.0, NAN, 1.0, 16.0],
        *[[16.0, 16.0, 1.0, 16.0]] * 9,
    ]
    raised, _ = shown(only(GROWTH, gather=2), *rows)
    assert {head for alert in raised for head in alert.heads[0]} == {0, 1, 3}


# In the order of `NAMES`
STATES = {
    "well": (0.5, 3.0, 30.0, 0.03, 0.7, 0.02),
    "uniform": (1.0, 0.05, 1.0, 0.9, 0.2, 0.0),
    "grown": (0.3, 20.0, 150.0, 0.03, 0.7, 0.0625),
    "collapsed": (0.02, 14.0, 90.0, 0.01, 0.3, 0.0),
    "absent": (NAN,) * 6,
}
NAMES = ("entropy_normalized", "score_spread", "score_max", "active_share", "separability@10", "jacobian@1.0")
COUNT, CHANGE = 50, 30


def _samples():
    """Heads that change their state at random; a layer that comes late and goes; another cadence from `CHANGE` on."""
    draw = random.Random(1)
    states = {(layer, head): "well" for layer in range(3) for head in range(2)}
    for index in range(COUNT):
        present = [0, 1, *([2] if 12 <= index < 26 or index >= 32 else [])]
        for place in states:
            if index > 3 and draw.random() < 0.12:
                states[place] = draw.choice([*STATES, "well", "well"])
        yield {
            "step": 50 * min(index, CHANGE) + 7 * max(0, index - CHANGE),
            "values": {
                name: {
                    layer: [STATES[states[layer, head]][at] * draw.uniform(0.95, 1.0) for head in range(2)]
                    for layer in present
                }
                for at, name in enumerate(NAMES)
            },
            "errors": {"entropy_normalized": {0: [0.01, 0.02]}, "score_spread": {1: [0.05, NAN]}},
            "layers": {layer: f"h.{layer}" for layer in present},
            "temperatures": {layer: draw.choice([8.0] * 6 + [2.0, 30.0, 0.05]) for layer in present},
            "nonfinite": {layer: [draw.choice([0] * 9 + [3]) for _ in range(2)] for layer in present},
        }


def _told(engine, samples):
    return [[alert.plain() for alert in (*engine.update(**sample), *engine.recoveries)] for sample in samples]


@pytest.mark.parametrize("gather", [0, 2])
def test_a_run_resumed_anywhere_tells_what_the_unbroken_one_does(gather):
    earlier, unbroken, samples, states, expected = AlertEngine(), AlertEngine(gather=gather), list(_samples()), [], []
    _told(earlier, samples[:20])
    unbroken.take_baselines(earlier.baselines())
    for sample in samples:
        states.append(through_json(unbroken.state_dict()))
        expected += _told(unbroken, [sample])
    every = {(alert["rule"], alert["ended"]) for some in expected for alert in some}
    assert every == {(name, ended) for name in OFF for ended in (False, True)}  # there is something to compare
    for cut, state in list(enumerate(states))[:: 1 + gather]:
        resumed = AlertEngine(gather=gather)
        resumed.load_state_dict(state)
        assert _told(resumed, samples[cut:]) == expected[cut:], cut
        assert resumed.state_dict() == unbroken.state_dict()
        assert (resumed.alarmed(), resumed.messages()) == (unbroken.alarmed(), unbroken.messages())
    for alert in (alert for some in expected for alert in some):
        assert Alert.from_plain(through_json(alert)).plain() == alert


def _learned(*rows):
    engine = only(RISE)
    shown(engine, *rows, quantity="entropy_normalized", layer=3, path="h.3.attn")
    return through_json(engine.baselines())


def test_heads_with_a_given_baseline_are_judged_from_their_first_sample():
    plain = _learned([0.5, 0.3], [0.5, 0.9])  # head 1 under alarm: that is not handed on
    engine, other = only(RISE), only(RISE)
    engine.take_baselines(plain)
    other.take_baselines(plain)
    assert engine.counts() == {"entropy_rise": 0}
    row, quantity = [0.9, 0.3, 0.9], "entropy_normalized"  # nothing is known of head 2
    (alert,), ended = shown(engine, row, quantity=quantity, layer=5, path="h.3.attn")
    assert (alert.heads, alert.evidence[0].baselines, ended) == ({5: (0,)}, {5: (0.5,)}, [])
    assert shown(other, row, quantity=quantity, layer=3, path="h.4.attn") == ([], [])


def test_a_head_with_a_given_baseline_counts_as_settled():
    engine = only(dataclasses.replace(GROWTH, jump=3.0, jump_spread=6.0))
    shown(engine, [0.1], *[[1.5], [2.5]] * 6)
    other = only(dataclasses.replace(GROWTH, jump=3.0, jump_spread=6.0))
    other.take_baselines(through_json(engine.baselines()))
    assert shown(engine, [8.0], start=130)[0] == []
    assert [alert.heads for alert in shown(other, [8.0])[0]] == [{0: (0,)}]


def _with(**numbers):
    plain = _learned([0.5])
    plain["baselines"][0]["layers"]["h.3.attn"]["0"].update(numbers)
    return plain


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        (_with(baseline=NAN), r"got baseline=nan for head 0 of 'h.3.attn' \(rule entropy_rise\). Delete that head's"),
        (_with(scatter=math.inf), "but got scatter=inf"),
        (_with(last=None), "got last=None"),
        (_with(baseline=True), "got baseline=True"),
        (_with(baseline=-0.1), "from 0 to 1, but got baseline=-0.1"),
        (_with(baseline=1e300), "from 0 to 1, but got baseline=1e\\+300"),
        (_with(scatter=1e300), r"from 0 to 1e\+09, but got scatter=1e\+300"),
        ({}, "to be what a monitor saved, but got dict"),
        (None, "to be what a monitor saved, but got NoneType"),
        ({"version": 99, "baselines": []}, "of version 1, but got version 99"),
        ({"version": 1, "baselines": [{"rule": "r", "signal": "s", "layers": {"p": {"x": {}}}}]}, "saved"),
        ({"version": 1, "baselines": [{"rule": "r", "signal": "s", "layers": {"p": {"0": 1}}}]}, "saved"),
    ],
)
def test_broken_baselines_are_refused_and_change_nothing(plain, text):
    engine = only(RISE)
    before = engine.state_dict()
    with pytest.raises(ValueError, match=f"Expected `baselines` .*{text}"):
        engine.take_baselines(plain)
    assert engine.state_dict() == before


def test_there_may_be_nothing_to_save():
    with pytest.raises(ValueError, match="sampled yet"):
        AlertEngine().baselines()
    engine = only(RISE)
    engine.update(0, {"entropy_normalized": {0: [0.5]}})  # a layer without a path
    with pytest.raises(ValueError, match="no head of a layer with a known path"):
        engine.baselines()


def _alert(**known):
    (alert,), _ = shown(only(RISE), [0.5, 0.5], [0.5, 0.9], quantity="entropy_normalized")
    return dataclasses.replace(alert, **known)


def test_the_state_of_training_in_words_and_as_data():
    assert _alert().training == ""
    assert "Training" not in _alert().message
    alert = _alert(loss=2.5, grad_norm=math.inf, learning_rate=3e-4)
    assert alert.training == "loss 2.50, gradient norm inf, learning rate 0.0003"
    assert alert.message == f"{alert.summary} Training: {alert.training}. Remedy: {alert.remedy}."
    plain = through_json(alert.plain())
    assert (plain["grad_norm"], plain["heads"]) == ("inf", {"0": [1]})
    assert Alert.from_plain(plain) == alert
    assert _alert(loss=0.0).training == "loss 0"  # known, though it is zero
    assert math.isnan(Alert.from_plain(_alert(loss=NAN).plain()).loss)


@pytest.mark.parametrize(
    "change", [{"heads": None}, {"heads": {"x": [0]}}, {"evidence": [{}]}, {"loss": "much"}, {"more": 1}]
)
def test_what_is_no_alert_is_refused(change):
    for plain in ({**_alert().plain(), **change}, {}, None):
        with pytest.raises(ValueError, match=r"Expected an alert as `Alert.plain` gives it, but got "):
            Alert.from_plain(plain)


def test_an_error_with_alerts_survives_a_pickle():
    error = AttentionAlertError(alert for alert in (_alert(loss=1.0), _alert()))
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), other.alerts) == (AttentionAlertError, (_alert(loss=1.0), _alert()))
        assert str(other) == str(error) == f"{_alert(loss=1.0).message} {_alert().message}"


def test_actions_by_severity():
    assert check_actions(None) == check_actions({}) == {"watch": "log", "warn": "warn", "critical": "warn"}
    assert check_actions({"warn": "raise"}) == {"watch": "log", "warn": "raise", "critical": "warn"}
    for wrong in ({"fatal": "stop"}, {"warn": "kill"}, {"warn": None}, {"warn": ["stop"]}, "stop", [("warn", "stop")]):
        with pytest.raises(ValueError, match=r"Expected `actions` to map severities .* but got .* Write e\.g\."):
            check_actions(wrong)


IMPOSSIBLE = {
    alerts.UniformDrift: {"share": 0.9, "sudden_share": 0.9, "leave_share": 0.01, "min_entropy": 1.0, "hotter": 1.0}
    | {"min_baseline": -0.1, "flat_share": 0.9, "flat_patience": 0, "learn_better": 1.0, "learn_worse": 0},
    alerts.ScoreGrowth: {"spread": NAN, "leave_spread": 99, "crowd_spread": 0, "jump": 1.0, "jump_spread": math.inf}
    | {"slope": 0.5, "slope_spread": "8", "slope_wait": 2.5, "largest": -1.0, "leave_largest": 999},
    alerts.SharpTemperature: {"level": 0.2, "leave": True, "cut": 1.0, "min_spread": -1},
    alerts.JacobianBound: {"share": 1.0, "leave": 0.99},
    alerts.NotMeasured: {"patience": 0, "severity": "info", "sigmas": NAN},
}


@pytest.mark.parametrize(
    ("rule", "name", "wrong"), [(rule, name, wrong) for rule, row in IMPOSSIBLE.items() for name, wrong in row.items()]
)
def test_contradicting_or_impossible_numbers(rule, name, wrong):
    with pytest.raises(ValueError, match=rf"Expected `\w+` of `{rule.name}` to be .*, but got .*{wrong}") as caught:
        rule(**{name: wrong})
    assert f"`{name}`" in str(caught.value)


def test_an_alarm_begins_when_it_is_told():
    engine = only(GROWTH, gather=2)
    told, under = [], []
    for step, row in enumerate([[16.0, 1.0, 1.0, 1.0], *[[16.0, 16.0, 1.0, 1.0]] * 4]):
        told += [(step, alert.num_heads) for alert in engine.update(step, {"score_spread": {0: row}})]
        under.append(engine.counts()["score_growth"])
    assert told == [(0, 1), (3, 1)]
    assert under == [1, 1, 1, 2, 2]


@pytest.mark.parametrize(("saved", "asked"), [("h.0", "model.h.0"), ("model.h.0", "h.0"), ("h.0", "h.0")])
def test_baselines_fit_a_model_inside_another_module(saved, asked):
    first, second = only(RISE), only(RISE)
    shown(first, *[[0.5]] * 3, quantity="entropy_normalized")
    plain = first.baselines()
    (layers,) = [entry["layers"] for entry in plain["baselines"]]
    layers[saved] = layers.pop(next(iter(layers)))
    layers["1.h.10"] = {}
    second.take_baselines(plain)
    told = [
        alert.step
        for step in range(3)
        for alert in second.update(step, {"entropy_normalized": {0: [0.9]}}, layers={0: asked})
    ]
    assert len(told) == 1


class TestOwnLimits:
    def test_are_learned_from_each_head_and_unknown_before(self):
        engine = AlertEngine()
        assert engine.limits() == {}
        values = {"entropy_normalized": {2: [0.5, 0.02]}, "score_spread": {2: [3.2, 0.3]}}
        engine.update(step=0, values=values)
        limits = engine.limits()
        assert limits["entropy_rise"]["entropy_normalized"][2] == pytest.approx([0.7, 0.02 + 0.4 * 0.98])
        assert limits["entropy_collapse"]["entropy_normalized"][2] == pytest.approx([0.05, NAN], nan_ok=True)
        assert limits["score_growth"]["score_spread"][2] == pytest.approx([9.6, 6.0])
        assert limits["uniform_drift"]["score_spread"][2] == pytest.approx([NAN, NAN], nan_ok=True)  # not settled
        engine.update(step=1, values=values)
        assert engine.limits()["uniform_drift"]["score_spread"][2] == pytest.approx([0.15 * 3.2, NAN], nan_ok=True)
        assert set(engine.limits()) == {"uniform_drift", "entropy_rise", "entropy_collapse", "score_growth"}

    @pytest.mark.parametrize(
        ("rule", "quantity", "usual", "past"),
        [
            (RISE, "entropy_normalized", 0.5, 1.001),
            (alerts.EntropyCollapse(patience=1), "entropy_normalized", 0.5, 0.999),
            (alerts.SeparabilityLoss(patience=1), "separability@10", 0.7, 0.999),
            (alerts.ScoreGrowth(spread=50, leave_spread=40), "score_spread", 3.0, 1.001),
            (alerts.UniformDrift(patience=1, sudden_share=0.01), "score_spread", 3.0, 0.999),
        ],
        ids=lambda value: getattr(value, "name", None),
    )
    def test_beyond_them_a_figure_counts(self, rule, quantity, usual, past):
        for factor, expected in ((2 - past, 0), (past, 1)):
            engine = only(rule)
            raised, _ = shown(engine, [usual], [usual], [usual], quantity=quantity)
            assert not raised
            (limit,) = engine.limits()[rule.name][quantity][0]
            raised, _ = shown(engine, [limit * factor], quantity=quantity, start=30)
            assert len(raised) == expected

    def test_come_back_from_a_checkpoint_and_stand_still_under_alarm(self):
        engine = only(RISE)
        shown(engine, [0.5], [0.5], [0.9], quantity="entropy_normalized")
        limits = engine.limits()
        shown(engine, [0.9], [0.9], quantity="entropy_normalized", start=30)
        assert engine.limits() == limits
        again = only(RISE)
        again.load_state_dict(through_json(engine.state_dict()))
        shown(again, [0.9], quantity="entropy_normalized", start=50)
        assert again.limits() == limits

    def test_rules_say_which_there_are(self):
        rules = AlertRules(score_growth=None)
        about = {(limit["rule"], limit["quantity"]) for limit in rules.own_limits(["score_spread", "separability@5"])}
        assert about == {("uniform_drift", "score_spread"), ("separability_loss", "separability@5")}
