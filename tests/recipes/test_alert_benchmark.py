"""The alert benchmark plants what it says, scores it as it says, and finds its runs again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import _alert_model
import _alert_scoring
import _alert_training
import alert_benchmark as recipe
import numpy as np
import pytest
import torch
from _alert_families import CONTROL, FAMILIES, KINDS, RULES_OF, Family, Plant, Setup, twin
from _alert_model import make_model, reshape_attention
from _alert_training import Batches, Run
from _overhead import Spread

from attnmon.alerts import Alert, AlertEngine, AlertRules, ScoreGrowth

TINY = Setup(layers=2, heads=2, width=16, context=16, batch=2, steps=12, every=2, warmup=2)
TEXTS = {"a": bytes(range(97, 123)) * 80, "b": b"to be or not to be, " * 100}


def tiny(what: Any = None, step: int = 5, setup: Setup = TINY, kind: str = "growth", **plant: Any) -> Family:
    return Family("tiny", kind if what else CONTROL, setup, Plant(what, step, **plant) if what else None)


def trained(family: Family, tmp_path: Path, seed: int = 0) -> Run:
    return _alert_training.train(family, seed, TEXTS, "a", tmp_path)


# -- families -------------------------------------------------------------------------------------------------------


def test_families_are_complete() -> None:
    for kind in KINDS:
        kinds = [family for family in FAMILIES.values() if family.kind == kind]
        assert {family.unseen for family in kinds} == {True, False}, kind
        assert RULES_OF[kind] or kind == CONTROL
    for name, family in FAMILIES.items():
        assert family.name == name
        assert family.setup.width % family.setup.heads == 0
        if family.kind == CONTROL:
            continue
        healthy = twin(family)
        assert healthy.kind == CONTROL
        assert healthy.setup == family.setup
        assert not healthy.unseen or family.unseen  # else its loss would have no twin on the seeds to tune on
        assert family.plant.step < family.setup.steps - 3 * family.setup.every
        assert family.plant.layers is None or max(family.plant.layers) < family.setup.layers
        assert family.plant.heads is None or max(family.plant.heads) < family.setup.heads
    rules = {rule.name for rule in AlertRules().active()}
    assert all(names & rules for kind, names in RULES_OF.items() if kind != CONTROL)
    with pytest.raises(ValueError, match="Expected a control with the setup of 'tiny'"):
        twin(tiny("rate"))


def test_where_something_is_planted() -> None:
    assert tiny().heads() == {}
    assert tiny("rate").heads() == {0: (0, 1), 1: (0, 1)}
    assert tiny("temperature", layers=(1,)).heads() == {1: (0, 1)}
    assert tiny("temperature", layers=(1,), heads=(0,)).heads() == {1: (0,)}
    fault = {"layers": (1,), "heads": (0,), "kind": "nonfinite"}
    assert tiny("nan", hidden=True, **fault).heads() == {1: (0,)}
    assert tiny("nan", **fault).heads() == {0: (0, 1), 1: (0, 1)}  # the next sample finds every weight NaN
    assert tiny("rate").rules() == {"score_growth", "entropy_collapse"}
    assert "entropy_rise" in replace(tiny("rate"), also="uniform").rules()


# -- what is planted ------------------------------------------------------------------------------------------------


def scores(net: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The score over T of every layer, ``(batch, heads, length, length)``."""
    found = []
    real = torch.nn.functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        found.append(query @ key.mT * options["scale"])
        return real(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    _alert_model.logits(net.eval(), ids)
    monkeypatch.undo()
    return found


@pytest.mark.parametrize(
    ("plant", "step", "factor"),
    [
        (Plant("temperature", 5, 0.1), 5, 10.0),
        (Plant("temperature", 5, 0.01, over=10), 9, 10.0),
        (Plant("temperature", 5, 0.01, over=10), 30, 100.0),
        (Plant("temperature", 5, 4.0, layers=(0,), heads=(1,)), 5, 0.25),
        (Plant("query_key_size", 5, 3.0, layers=(0,), heads=(1,)), 5, 9.0),
        (Plant("query_key_size", 5, 3.0), 6, 1.0),  # once only
        (Plant("query_key_growth", 5, 2.0, layers=(0,)), 7, 4.0),  # this step's
        (Plant("query_key_growth", 5, 2.0), 4, 1.0),
        (Plant("fp16", 5, 2.0, layers=(0,), heads=(1,)), 8, 1.0),
    ],
)
def test_scores_are_multiplied_there_and_nowhere_else(
    plant: Plant, step: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = make_model(TINY, 16)
    for block in net.blocks:  # without a bias, which does not grow with the weights
        torch.nn.init.zeros_(block.attention.query.bias)
        torch.nn.init.zeros_(block.attention.key.bias)
    ids = torch.randint(256, (2, 16))
    before = scores(net, ids, monkeypatch)[0]
    reshape_attention(net, plant, step)
    after = scores(net, ids, monkeypatch)[0]
    for head in range(2):
        times = factor if plant.heads is None or head in plant.heads else 1.0
        torch.testing.assert_close(after[:, head], times * before[:, head], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("what", ["inf", "nan", "fp16"])
def test_hidden_faults_reach_the_scores_of_their_head_and_not_the_loss(what: Any, tmp_path: Path) -> None:
    family = tiny(what, 4, kind="nonfinite", size=1000.0, layers=(1,), heads=(0,), hidden=True)
    run = trained(family, tmp_path)
    assert np.isfinite(run.loss).all()
    assert (run.nonfinite[run.steps <= 4] == 0).all()
    late = run.nonfinite[run.steps > 6]
    assert (late[:, 1, 0] > 0).all()
    assert late.sum() == late[:, 1, 0].sum()


def test_a_fault_that_is_not_hidden_ends_the_run(tmp_path: Path) -> None:
    long = replace(TINY, steps=40)
    run = trained(tiny("nan", 4, long, layers=(1,), heads=(0,)), tmp_path)
    assert np.isfinite(run.loss[:4]).all()
    assert np.isnan(run.loss[4:]).all()
    assert 4 < len(run.loss) < 40
    assert run.nonfinite[-1].all()


@pytest.mark.parametrize(
    ("plant", "own", "others"),
    [
        (Plant("rate", 5, 10.0), 1e-2, 1e-2),
        (Plant("query_key_rate", 5, 10.0), 1e-2, 1e-3),
        (Plant("no_warmup", 5, 10.0), 3e-2, 3e-2),
        (Plant("query_key_decay", 5, 7.0), 1e-3, 1e-3),
    ],
)
def test_rates_and_decay(plant: Plant, own: float, others: float) -> None:
    net = make_model(TINY, 16)
    optimizer = _alert_training.make_optimizer(net, 1e-3)
    _alert_training.plant_in_optimizer(plant, optimizer, TINY)
    rest, query_key = optimizer.param_groups
    assert (rest["lr"], query_key["lr"]) == pytest.approx((others, own))
    assert query_key["weight_decay"] == (7.0 if plant.what == "query_key_decay" else 0.01)
    assert rest["weight_decay"] == 0.01
    assert len(query_key["params"]) == 8  # weight and bias of two projections in two layers
    names = [name for name, _ in net.named_parameters()]
    assert len(rest["params"]) + 8 == len(names)


def test_gpt2_grows_in_queries_and_keys_alone() -> None:
    net = make_model(replace(TINY, gpt2=True), 16)
    before = [block.attn.c_attn.weight.detach().clone() for block in net.transformer.h]
    reshape_attention(net, Plant("query_key_growth", 0, 3.0, layers=(1,), heads=(0,)), 0)
    after = [block.attn.c_attn.weight.detach() for block in net.transformer.h]
    torch.testing.assert_close(after[0], before[0])
    grown = torch.ones(48)
    grown[:8] = grown[16:24] = 3.0  # the first head of two, of queries and of keys
    torch.testing.assert_close(after[1], before[1] * grown)
    with pytest.raises(ValueError, match="Expected the recipe's own model to plant 'temperature' in, but got GPT2LM"):
        reshape_attention(net, Plant("temperature", 0, 3.0), 0)


@pytest.mark.parametrize(
    "setup",
    [
        replace(TINY, norm="post"),
        replace(TINY, positions="rotary", dropout=0.1),
        replace(TINY, query_key_norm="rms"),
        replace(TINY, query_key_norm="cosine", cosine=True),
        replace(TINY, gpt2=True),
        replace(TINY, source="train"),
        replace(TINY, pretrained=3, other_text=True),
    ],
    ids=str,
)
def test_every_setup_trains_and_is_measured(setup: Setup, tmp_path: Path) -> None:
    run = trained(tiny(setup=setup), tmp_path)
    assert np.isfinite(run.loss).all()
    assert np.isfinite(run.values["score_spread"]).all()
    assert run.values["score_spread"].shape == (len(run.steps), 2, 2)
    assert run.steps.tolist() == list(range(0, 12 if setup.source == "train" else 13, 2))
    if setup.query_key_norm == "cosine":
        assert run.temperatures == pytest.approx(0.1)
        assert run.rate[-1] < run.rate[2]
    if setup.pretrained:
        assert len(list(tmp_path.glob("pretrained-*"))) == 1
        again = trained(tiny(setup=setup), tmp_path)
        np.testing.assert_array_equal(again.loss, run.loss)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(8), torch.randn(8)
    turned = [_alert_model.rotate(vector.expand(6, 8)) for vector in (query, key)]
    products = turned[0] @ turned[1].T
    for distance in range(-5, 6):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert products.diagonal(0)[0] != pytest.approx(products.diagonal(1)[0].item())


def test_a_planted_run_is_its_twin_until_then(tmp_path: Path) -> None:
    healthy = trained(tiny(), tmp_path)
    planted = trained(tiny("temperature", 5, size=0.1), tmp_path)
    np.testing.assert_array_equal(planted.loss[:5], healthy.loss[:5])
    assert (planted.loss[5:] != healthy.loss[5:]).all()
    early = planted.steps <= 5
    for name, array in planted.values.items():
        np.testing.assert_array_equal(array[early], healthy.values[name][early])
    assert (planted.values["score_spread"][~early] > 5 * healthy.values["score_spread"][~early]).all()
    longer = trained(tiny("context", 5, size=2.0), tmp_path)
    np.testing.assert_array_equal(longer.loss[:5], healthy.loss[:5])
    assert (longer.values["entropy"][~early] > healthy.values["entropy"][~early]).all()


def test_batches_are_of_the_text_and_never_of_its_end() -> None:
    text = bytes(range(100)) * 10
    batches = Batches(text, 3, 0)
    for _ in range(50):
        batch = batches.next(20)
        assert batch.shape == (3, 21)
        assert ((batch[:, 1:] - batch[:, :-1]) % 100 == 1).all()
    probe = Batches(b"a" * 900 + b"b" * 100, 3, 0).probe(20)
    assert probe.shape == (4, 20)
    assert (probe == ord("b")).all()


# -- what is kept ---------------------------------------------------------------------------------------------------


def test_stored_runs_are_judged_as_live_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = tiny("temperature", 4, size=0.02, layers=(1,), kind="sharp")
    kept: list[Any] = []
    as_run = _alert_training.as_run
    monkeypatch.setattr(
        _alert_training, "as_run", lambda samples, *rest: kept.extend(samples) or as_run(samples, *rest)
    )
    run = trained(family, tmp_path)
    path = _alert_training.path_of(tmp_path, family, 0, "a")
    _alert_training.save(run, path)
    found = _alert_scoring.judge(_alert_training.load(path), AlertRules(), 2)
    engine = AlertEngine(AlertRules(), patience=2)
    fields = ("step", "values", "errors", "layers", "temperatures", "nonfinite")
    live = [one for sample in kept for one in engine.update(**{name: getattr(sample, name) for name in fields})]
    assert found
    assert [(one.step, one.message) for one in found] == [(one.step, one.message) for one in live]


def test_files_are_told_apart_and_refused_when_broken(tmp_path: Path) -> None:
    paths = {
        _alert_training.path_of(tmp_path, family, seed, text)
        for family in (tiny(), tiny("rate"), tiny("rate", size=2.0), tiny(setup=replace(TINY, rate=1.0)))
        for seed in (0, 1)
        for text in ("a", "b")
    }
    assert len(paths) == 16
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"Expected a run of this recipe in .*broken.npz.* Delete the file"):
        _alert_training.load(broken)


# -- how it is scored -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([2.0] * 60, [2.0] * 60, None),
        ([2.0] * 30 + [9.0] * 30, [2.0] * 60, 30),  # a tenth of 7 nats
        ([2.0] * 30 + [3.0] * 30, [2.0] * 60, 36),  # 1 - 0.9 ** 7 = 0.52
        ([2.0] * 30 + [3.0] * 30, None, 36),  # its own minimum
        ([2.0] * 30 + [3.0] * 8 + [0.0] * 22, None, None),  # not for ten steps
        ([2.0] * 60, [2.0] * 20 + [1.0] * 40, 26),  # the twin gets better
        ([2.0] * 25 + [math.nan], [2.0] * 60, 25),
        ([9.0] * 10 + [2.0] * 50, [2.0] * 60, None),  # before the plant nothing counts, and later it is over
    ],
)
def test_when_the_loss_shows_damage(ours: list[float], theirs: list[float] | None, expected: int | None) -> None:
    healthy = None if theirs is None else np.array(theirs)
    start = 20 if ours[0] != 9.0 else 40
    assert _alert_scoring.damage_step(np.array(ours), healthy, start) == expected


def run_of(loss: float = 2.0, damage: int | None = None) -> Run:
    steps = np.arange(0, 101, 5)
    losses = np.full(100, loss)
    if damage is not None:
        losses[damage:] = 20.0
    shape = (len(steps), 2, 2)
    return Run(
        steps=steps,
        values={"score_spread": np.ones(shape)},
        errors={"score_spread": np.zeros(shape)},
        temperatures=np.ones(shape[:2]),
        nonfinite=np.zeros(shape, dtype=np.int64),
        loss=losses,
        rate=np.ones(100),
        layers=("a", "b"),
        about={"family": "tiny", "seed": 3, "text": "a"},
    )


def alert(step: int, rule: str, heads: dict[int, tuple[int, ...]], severity: str = "warn") -> Alert:
    return Alert(step, rule, rule, severity, heads, {}, step, 1, (), "", "")


def scored(family: Family, alerts: list[Alert], damage: int | None = None) -> _alert_scoring.Outcome:
    return _alert_scoring.score(family, "score", run_of(damage=damage), run_of(), alerts)


def test_a_head_named_exactly_and_in_time() -> None:
    family = tiny("query_key_growth", 20, layers=(1,), heads=(0,))
    found = scored(family, [alert(30, "score_growth", {1: (0,)}), alert(40, "score_growth", {0: (1,)})], damage=60)
    assert (found.next_sample, found.first, found.damage, found.lead) == (25, 30, 60, 30)
    assert (found.exact, found.in_time, found.sudden) == (True, True, False)
    assert found.first_rules == ("score_growth",)
    assert found.heads == {1: (0,)}
    assert not found.false


def test_what_is_wrong_is_found_wrong() -> None:
    family = tiny("query_key_growth", 20, layers=(1,), heads=(0,))
    assert scored(family, []).first is None
    assert scored(family, [alert(30, "score_growth", {1: (0,)}, "watch")]).first is None
    assert scored(family, [alert(30, "entropy_rise", {1: (0,)})]).first is None
    assert scored(family, [alert(30, "score_growth", {1: (1,)})]).first is None
    more = scored(family, [alert(30, "score_growth", {0: (0,), 1: (0,)})])
    assert (more.first, more.exact) == (30, False)
    other = scored(family, [alert(30, "entropy_rise", {1: (0,)}), alert(35, "score_growth", {1: (0,)})])
    assert (other.first, other.first_rules) == (35, ("entropy_rise",))
    late = scored(family, [alert(60, "score_growth", {1: (0,)})], damage=60)
    assert (late.in_time, late.lead) == (False, 0)
    early = scored(family, [alert(20, "score_growth", {1: (0,)})])  # this probe is run before the step
    assert early.first is None
    assert [entry["step"] for entry in early.false] == [20]
    in_training = replace(family, setup=replace(TINY, source="train"))
    assert scored(in_training, [alert(20, "score_growth", {1: (0,)})]).first == 20
    from_start = tiny("temperature", 0, size=0.1, kind="sharp")
    assert scored(from_start, [alert(0, "sharp_temperature", {1: (0,)})]).next_sample == 0


def test_sudden_damage_is_scored_at_the_next_sample() -> None:
    family = tiny("rate", 22, kind="collapse")
    found = scored(family, [alert(25, "score_growth", {0: (0,)})], damage=24)
    assert (found.sudden, found.in_time, found.lead) == (True, True, -1)
    later = scored(family, [alert(30, "score_growth", {0: (0,)})], damage=24)
    assert (later.sudden, later.in_time) == (True, False)


def test_any_alert_of_a_control_is_false_but_a_quiet_one() -> None:
    found = scored(tiny(), [alert(5, "active_set", {0: (0,)}, "watch"), alert(50, "entropy_rise", {0: (0,)})])
    assert [(entry["step"], entry["rule"]) for entry in found.false] == [(50, "entropy_rise")]
    assert found.next_sample is None
    longer = Family("longer", CONTROL, TINY, Plant("context", 5, 2.0))
    assert len(scored(longer, [alert(50, "entropy_rise", {0: (0,)})]).false) == 1


def test_tables_count_runs() -> None:
    family = tiny("query_key_growth", 20, layers=(1,), heads=(0,))
    hit = scored(family, [alert(30, "score_growth", {1: (0,)})], damage=60)
    wide = scored(family, [alert(30, "score_growth", {0: (0,), 1: (0,)})], damage=50)
    missed = scored(family, [alert(10, "entropy_rise", {0: (0,)})])
    healthy = scored(tiny(), [])
    _, *cells = _alert_scoring.kind_table([hit, wide, missed, healthy]).rows[0]
    assert cells[:6] == ["score", 3, "2 of 3", "2 of 2", "1 of 2", "2 of 3"]
    assert cells[6] == Spread(22.5, 25.0, 27.5)
    assert cells[7:] == ["score_growth 2", "1 of 3"]
    assert _alert_scoring.kind_table([healthy]).rows[0][-1] == "0 of 1"
    leads = [_alert_scoring.kind_table([one]).rows[0][7] for one in (hit, scored(family, [], damage=60), missed)]
    assert leads == [30.0, "", "no damage"]
    assert [row[0] for row in _alert_scoring.family_table([hit, healthy]).rows] == ["tiny", "tiny"]
    kinds = [row[3] for row in _alert_scoring.listing([hit, wide, missed, healthy]).rows]
    assert kinds == ["other heads too", "false alarm", "missed"]


def test_signals_of_healthy_runs() -> None:
    run = run_of()
    run.values["score_spread"][10, 0, 0] = 4.0
    run.values["score_spread"][0, 1, 1] = np.nan
    rows = {row[0]: row[1:] for row in _alert_scoring.signal_table([run_of(), run]).rows}
    assert rows["score_spread"][0] == 1.0
    assert rows["score_spread"][4] == 4.0
    assert rows["score_spread"][6] == "tiny a 3"
    assert rows["score_spread / the sample's before"][4] == 4.0
    assert rows["score_spread / the sample's before"][0] == 0.25
    assert rows["score_spread / its largest so far"][0] == 0.25


# -- the whole ------------------------------------------------------------------------------------------------------


def test_a_run_is_trained_once_and_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"tune_seeds": (), "score_seeds": (7,), "steps": 12, "output": str(tmp_path)}
    with pytest.raises(ValueError, match="Expected `output` to hold runs to score"):
        recipe.alert_benchmark("nan_in_loss", **options, rescore=True)
    recipe.alert_benchmark("nan_in_loss", **options)
    out = capsys.readouterr().out
    assert "1 of 2: plain, embedded, seed 7" in out
    assert "Kinds of failure" in out
    assert len(list((tmp_path / "runs").glob("*.npz"))) == 2
    result = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    control, planted = result["runs"]
    assert (control["family"], control["false_alarms"]) == ("plain", [])
    assert (planted["signal"], planted["first"], planted["planted_at"]) == ("nonfinite", 10, 6)
    assert "| nan_in_loss | nonfinite | score | 1 | 1 of 1 |" in (tmp_path / "results.md").read_text(encoding="utf-8")

    monkeypatch.setattr(recipe, "train", lambda *_: pytest.fail("it trained again"))
    recipe.alert_benchmark("nan_in_loss", **options)
    quick = AlertRules(score_growth=ScoreGrowth(spread=1e-3, leave_spread=1e-4, slackening=math.inf))
    recipe.alert_benchmark("nan_in_loss", **options, rules=quick, rescore=True)
    control, _ = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["runs"]
    assert [entry["rule"] for entry in control["false_alarms"]] == ["score_growth"]


def test_sets_of_runs() -> None:
    families = recipe.choose("rate_jump, rate_jump_192,tune_other")
    assert [family.name for family in families] == [
        "tune_other",
        "plain",
        "context_192",
        "rate_jump",
        "rate_jump_192",
    ]
    tasks = recipe.make_tasks(families, (0,), (100,), ["a"])
    assert [(task.family.name, task.group, task.seed) for task in tasks] == [
        ("plain", "score", 100),
        ("context_192", "unseen", 100),
        ("rate_jump", "score", 100),
        ("rate_jump_192", "unseen", 100),
        ("plain", "tune", 0),
        ("rate_jump", "tune", 0),
    ]
    two = recipe.make_tasks(families, (), (100,), ["a", "b"])
    assert [task.text for task in two if task.family.name == "tune_other"] == ["a", "b"]
    assert len(recipe.choose("all")) == len(FAMILIES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"families": "rates"}, "Expected `families` to be all, or to name some of plain, .*, but got 'rates'"),
        ({"families": []}, "Expected `families` to be all, or .*, but got none"),
        ({"tune_seeds": (1, 2), "score_seeds": (2, 3)}, r"Expected `score_seeds` to have no seed .*, but got \[2\]"),
        ({"tune_seeds": (), "score_seeds": ()}, "to have at least one entry together, but got none"),
        ({"steps": 9}, "Expected `steps` to be at least 10, but got 9"),
        ({"patience": 0}, "Expected `patience` to be at least 1, but got 0"),
        ({"jobs": 0}, "Expected `jobs` to be at least 1, but got 0"),
        ({"output": f"{__file__}/here"}, "Expected `output` to be a folder, but making"),
        ({"text": "/nowhere/text.txt"}, "Expected `text` to be a readable text file"),
    ],
)
def test_wrong_arguments(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "train_all", lambda *_: pytest.fail("it got as far as training"))
    with pytest.raises(ValueError, match=message):
        recipe.alert_benchmark(**{"families": "plain", "output": str(tmp_path), **changes})


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short", encoding="utf-8")
    with pytest.raises(ValueError, match="Expected `text` to have at least 10000 characters, but got 9"):
        recipe.read_texts(str(path), None)
