"""Heads that learn from nothing, and heads that fail, come to the same figures; and what a failure leaves behind."""

import dataclasses
import json
import math

import pytest

from attnmon import alerts
from attnmon.alerts import AlertEngine, AlertRules
from attnmon.alerts.growth import Growth

OFF = {field.name: None for field in dataclasses.fields(AlertRules)}


def exponential(step):
    """Doubles every 20 steps, from 0.1."""
    return 0.1 * 2.0 ** (step / 20)


def learned(step):
    """The same at first; comes to 30, and stays."""
    return 30.0 / (1.0 + 299.0 * 2.0 ** (-step / 20))


def raised(spread, entropy=0.5, every=5, until=400, rules=None):
    """``(step, rule)`` of what is said of one head of two; the other stays as it is."""
    engine, found = AlertEngine(rules), []
    for step in range(0, until, every):
        values = {"score_spread": {0: [0.6, float(spread(step))]}, "entropy_normalized": {0: [0.8, float(entropy)]}}
        found += [(alert.step, alert.rule) for alert in engine.update(step, values) if alert.severity != "watch"]
    return found


class TestGrowth:
    def follow(self, spread, until, every=5, first=None):
        growth = Growth(first)
        for step in range(0, until, every):
            growth.update(step, spread(step))
        return growth

    @pytest.mark.parametrize("every", [1, 5, 17, 30])
    def test_what_doubles_again_and_again_does_not_slacken(self, every):
        assert self.follow(exponential, 300, every).slackening == pytest.approx(1.0, rel=0.05)

    @pytest.mark.parametrize("every", [1, 5, 17, 30])
    def test_what_comes_to_a_level_does(self, every):
        growth = self.follow(learned, 400, every)
        assert growth.slackening > 2.0
        assert growth.settled == (every <= 30)

    def test_three_samples_have_to_agree(self):
        growth = self.follow(lambda step: exponential(step) if step != 285 else 5.0, 300)
        assert growth.slackening > 1.15  # the step of 285 was one of them
        assert self.follow(lambda step: exponential(step) if step != 250 else 5.0, 300).slackening < 1.15

    def test_what_began_with_more_is_not_from_nothing(self):
        growth = self.follow(lambda step: 0.5 + step, 100)
        assert math.isnan(growth.slackening)
        assert growth.settled
        assert math.isnan(self.follow(exponential, 100, first=2.0).slackening)

    def test_nothing_is_known_of_a_leap(self):
        growth = Growth()
        for step, spread in [(0, 0.3), (50, 0.3), (100, 20.0), (150, 20.0), (200, 20.0)]:
            growth.update(step, spread)
        assert growth.slackening == math.inf

    def test_weeks_are_as_short_as_minutes(self):
        growth = self.follow(lambda step: 0.1 * 1.0001**step, 100_000, every=1)
        assert growth.slackening == pytest.approx(1.0, rel=0.05)
        assert len(json.dumps(growth.plain())) < 2000

    def test_what_is_not_a_figure_changes_nothing(self):
        growth = self.follow(exponential, 200)
        before = growth.plain()
        for figure in (math.nan, math.inf):
            growth.update(200, figure)
        assert growth.plain() == before
        assert self.follow(lambda _: 0.0, 100).slackening == math.inf

    def test_goes_on_from_its_plain_numbers(self):
        whole = self.follow(learned, 300)
        part = Growth.from_plain(json.loads(json.dumps(self.follow(learned, 150).plain(), allow_nan=False)))
        for step in range(150, 300, 5):
            part.update(step, learned(step))
        assert (part.slackening, part.settled, part.plain()) == (whole.slackening, whole.settled, whole.plain())
        with pytest.raises(ValueError, match="Expected the growth of a head"):
            Growth.from_plain([1, 2])


@pytest.mark.parametrize("every", [1, 5, 20])
def test_a_level_counts_where_growth_goes_on(every):
    (step, rule), *_ = raised(exponential, every=every)
    assert rule == "score_growth"
    assert step - 20 * math.log2(150) < every  # at 15, at once


@pytest.mark.parametrize("every", [1, 5, 20])
def test_a_head_that_learns_to_single_out_keys_is_left_alone(every):
    assert raised(learned, entropy=0.02, every=every) == []


def test_unless_its_largest_score_is_out_of_range():
    engine = AlertEngine()
    for step in range(0, 400, 5):
        spread = learned(step)
        found = engine.update(step, {"score_spread": {0: [spread]}, "score_max": {0: [4.0 * spread]}})
        assert bool(found) == (found != [] and 4.0 * spread >= 100.0)
    assert engine.counts()["score_growth"] == 1


def test_nor_does_its_entropy_collapse():
    def spoken(spread):
        engine, found = AlertEngine(AlertRules(**OFF | {"entropy_collapse": alerts.EntropyCollapse()})), []
        for step in range(0, 400, 5):
            entropy = 1.0 / (1.0 + spread(step))
            values = {"score_spread": {0: [spread(step)]}, "entropy_normalized": {0: [entropy]}}
            found += [alert.rule for alert in engine.update(step, values)]
        return found

    assert spoken(learned) == []
    assert spoken(exponential) == ["entropy_collapse"]


def test_a_settled_head_is_told_by_its_slope():
    """It learned, stood for longer than that took, and then its scores begin to grow."""

    def spread(step):
        return learned(min(step, 130)) * 1.02 ** max(0, step - 400)

    (step, rule), *_ = raised(spread, until=700)
    assert (rule, learned(130)) == ("score_growth", pytest.approx(7.0, abs=0.5))
    assert 400 < step < 500
    # on a steep slope all along
    assert raised(lambda step: 0.1 * 1.02 ** min(step, 240), until=260) == []


def test_baselines_of_another_run_say_that_a_head_has_learned():
    engine = AlertEngine()
    for step in range(5):
        engine.update(step, {"score_spread": {0: [4.0]}}, layers={0: "h.0"})
    given = engine.baselines()
    values = {"score_spread": {0: [0.25]}}
    fresh, told = AlertEngine(), AlertEngine()
    told.take_baselines(given)
    for engine in (fresh, told):
        engine.update(0, values, layers={0: "h.0"})
    values = {"score_spread": {0: [16.0]}}
    assert fresh.update(5, values) == []  # of a leap from nothing it is not known whether it goes on
    assert [alert.rule for alert in told.update(5, values)] == ["score_growth"]


class TestAfterAFailure:
    def said(self, spreads, entropies):
        engine, found = AlertEngine(), []
        for step, (spread, entropy) in enumerate(zip(spreads, entropies, strict=True)):
            values = {"score_spread": {0: [spread]}, "entropy_normalized": {0: [entropy]}}
            found += [alert for alert in engine.update(10 * step, values) if alert.severity != "watch"]
            found += engine.recoveries
        return [(alert.step, alert.rule, alert.ended) for alert in found if alert.severity != "watch"]

    def test_a_head_that_is_back_where_it_was_is_not_going_uniform(self):
        found = self.said([0.6] * 12 + [15.5] * 5 + [0.62] * 5, [0.97] * 12 + [0.3] * 5 + [0.97] * 5)
        assert found == [(120, "score_growth", False), (190, "score_growth", True)]

    def test_one_that_has_lost_what_it_had_is(self):
        found = self.said([0.6] * 12 + [15.5] * 5 + [0.02] * 5, [0.97] * 12 + [0.3] * 5 + [1.0] * 5)
        assert (120, "score_growth", False) in found
        assert (170, "uniform_drift", False) in found

    def test_other_rules_learn_nothing_meanwhile(self):
        engine = AlertEngine()
        rows = [([0.6], [0.97])] * 12 + [([15.5], [0.3])] * 30
        for step, (spread, entropy) in enumerate(rows):
            engine.update(step, {"score_spread": {0: spread}, "entropy_normalized": {0: entropy}}, layers={0: "h"})
        learned = {entry["signal"]: entry["layers"]["h"]["0"]["baseline"] for entry in engine.baselines()["baselines"]}
        assert learned["entropy_normalized"] == pytest.approx(0.97)
        assert learned["score_spread:sudden"] == pytest.approx(0.6)

    def test_an_alarm_ends_for_a_head_that_lives_near_the_limit(self):
        found = self.said([8.1] * 12 + [60.0] * 4 + [8.2] * 4, [0.115] * 12 + [0.001] * 4 + [0.076] * 4)
        assert {rule for _, rule, ended in found if not ended} == {"score_growth", "entropy_collapse"}
        assert {rule for _, rule, ended in found if ended} == {"score_growth", "entropy_collapse"}


class TestSingleRows:
    def test_count_for_nothing_that_asks_for_noise(self):
        engine = AlertEngine()
        values, errors = {"score_spread": {0: [20.0, 20.0]}}, {"score_spread": {0: [math.nan, 0.1]}}
        (alert,) = engine.update(0, values, errors=errors, layers={0: "h"})
        assert alert.heads == {0: (1,)}

    def test_but_for_rules_that_ask_for_none(self):
        rules = AlertRules(**OFF | {"score_growth": alerts.ScoreGrowth(sigmas=0.0)})
        errors = {"score_spread": {0: [math.nan]}}
        assert AlertEngine(rules).update(0, {"score_spread": {0: [20.0]}}, errors=errors) != []


class TestWords:
    def test_other_alarms_of_the_same_heads_are_named(self):
        engine = AlertEngine()
        for step in range(4):
            values = {"score_spread": {0: [0.9, 0.9]}, "entropy_normalized": {0: [0.9, 0.9]}}
            assert [a for a in engine.update(step, values, temperatures={0: 8.0}) if a.severity != "watch"] == []
        values = {"score_spread": {0: [18.0, 0.9]}, "entropy_normalized": {0: [0.02, 0.9]}}
        found = {alert.rule: alert for alert in engine.update(4, values, temperatures={0: 0.4})}
        assert set(found) == {"score_growth", "sharp_temperature"}
        assert "Also under alarm there: sharp_temperature since step 4." in found["score_growth"].summary
        assert "the former temperature, T = 8 (a scale of 0.125)" in found["sharp_temperature"].remedy
        assert found["score_growth"].remedy.startswith(
            "that of sharp_temperature first, which may be the cause; else it came at once, so look at what was changed"
        )
        for step in (5, 6):
            found = {alert.rule: alert for alert in engine.update(step, values, temperatures={0: 0.4})}
        assert "Also under alarm there: score_growth since step 4, sharp_temperature since" in (
            found["entropy_collapse"].summary
        )

    def test_non_finite_scores_are_traced_to_the_layer_that_is_called_first(self):
        engine = AlertEngine()
        layers = {0: "h.0.attn", 1: "h.1.attn", 2: "h.2.attn"}
        values = {"score_spread": {layer: [0.6, 0.6] for layer in layers}}
        bad = {1: [0, 7], 2: [64, 64]}
        (alert,) = engine.update(0, values, layers=layers, nonfinite=bad)
        assert "Look first at head 1 of layer 1 (h.1.attn), which is called before the others." in alert.summary
        later = AlertEngine()
        (alert,) = later.update(0, values, layers=layers, nonfinite={1: [0, 7]})
        assert "Look first" not in alert.summary
        everywhere = {layer: [64, 64] for layer in layers}  # by way of the loss
        (alert,) = later.update(5, values, layers=layers, nonfinite=everywhere)
        assert "It began at step 0, with head 1 of layer 1 (h.1.attn): look there first." in alert.summary

    def test_a_layer_that_went_flat_before_it_learned_wants_a_warm_up(self):
        engine, found = AlertEngine(), []
        for step, spread in enumerate([0.3] + [0.02] * 8):
            found += engine.update(step, {"score_spread": {0: [spread] * 4}})
        assert [alert.remedy.split(" or ")[0] for alert in found] == ["a longer warm-up"]


def test_a_limit_brings_the_end_of_its_alarm_along():
    for rule in (alerts.ScoreGrowth(spread=5.0), alerts.ScoreGrowth(largest=10.0), alerts.ScoreGrowth()):
        for signal in rule.signals(["score_spread", "score_max"]):
            enter, leave = rule.limits(signal, 1.0)
            assert leave < enter
