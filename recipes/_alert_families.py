"""What alert_benchmark.py trains: healthy runs, and the same runs with something planted in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

__all__ = ["CONTROL", "FAMILIES", "KINDS", "RULES_OF", "Family", "Plant", "Setup", "twin"]

CONTROL = "control"
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "collapse": "P1 entropy collapse with damage to the loss",
        "growth": "P2 score growth without damage at once",
        "uniform": "P3 drift to uniform attention",
        "sharp": "P4 softmax too sharp",
        "nonfinite": "P5 non-finite scores",
        CONTROL: "healthy",
    }
)

_SCORES = frozenset({"score_growth", "entropy_collapse"})
RULES_OF: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "collapse": _SCORES,
        "growth": _SCORES,
        "uniform": frozenset({"entropy_rise", "uniform_drift", "uniform_saturation", "separability_loss"}),
        "sharp": _SCORES | {"sharp_temperature", "jacobian_bound"},
        "nonfinite": frozenset({"nonfinite"}),
        CONTROL: frozenset(),
    }
)
"""Kind of failure -> rules whose alert names it. Scores grow and a softmax gets too sharp in the same figures."""


@dataclass(frozen=True)
class Setup:
    """How a model is made and trained, healthy.

    Attributes:
        layers: Transformer blocks.
        heads: Per layer.
        width: Of the residual stream.
        context: Bytes per sequence.
        norm: Whether layer norm comes before each sub-layer or after its residual sum.
        dropout: Of weights and sub-layers.
        query_key_norm: ``"rms"`` normalises queries and keys, T stays; ``"cosine"`` to unit length, T = 0.1.
        positions: How the model knows them.
        gpt2: The model is transformers' GPT-2 rather than the one of this recipe.
        rate: Peak learning rate of AdamW.
        warmup: Steps of its linear rise.
        cosine: Whether it falls afterwards, as a cosine to a tenth; else it stays.
        batch: Sequences per step.
        steps: Optimizer steps.
        every: Steps between two samples.
        source: What is sampled: held-out sequences in eval mode, or the training batch.
        pretrained: Steps on the same text before the run begins, at ``pretrained_rate``.
        pretrained_rate: Peak learning rate of these.
        other_text: The run itself is on the other text.
        task: What the sequences are: a text, or random symbols of which some are to be had from others at exact places,
            which healthy heads learn to single out; see `_alert_tasks`.
    """

    layers: int = 2
    heads: int = 4
    width: int = 64
    context: int = 64
    norm: Literal["pre", "post"] = "pre"
    dropout: float = 0.0
    query_key_norm: Literal["", "rms", "cosine"] = ""
    positions: Literal["learned", "rotary"] = "learned"
    gpt2: bool = False
    rate: float = 3e-3
    warmup: int = 20
    cosine: bool = False
    batch: int = 8
    steps: int = 300
    every: int = 5
    source: Literal["probe", "train"] = "probe"
    pretrained: int = 0
    pretrained_rate: float = 3e-3
    other_text: bool = False
    task: Literal["text", "periodic", "copy", "reverse", "sum"] = "text"


@dataclass(frozen=True)
class Plant:
    """What is done to a run.

    Attributes:
        what: ``rate`` multiplies the learning rate, ``no_warmup`` as well and without a rise before it;
            ``query_key_rate`` multiplies that of query and key projections; ``query_key_size`` multiplies their
            weights once, ``query_key_growth`` at every step; ``query_key_decay`` sets their weight decay;
            ``temperature`` multiplies T; ``inf``, ``nan`` and ``fp16`` (queries that leave the range of float16 while
            the scores stay as they are) reach the scores; ``context`` multiplies the length of the sequences.
        step: Before which it begins.
        size: By how much.
        layers: Where; None: everywhere.
        heads: Where in these layers; None: everywhere.
        over: Steps in which ``temperature`` gets there, in equal ratios; 0: at once.
        hidden: NaN in outputs and gradients becomes 0, so that the loss does not show it.
    """

    what: Literal[
        "rate",
        "no_warmup",
        "query_key_rate",
        "query_key_size",
        "query_key_growth",
        "query_key_decay",
        "temperature",
        "inf",
        "nan",
        "fp16",
        "context",
    ]
    step: int
    size: float = 1.0
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    over: int = 0
    hidden: bool = False


@dataclass(frozen=True)
class Family:
    """Runs that differ in seed and text only.

    Attributes:
        name: Its name.
        kind: Key of `KINDS`.
        setup: The healthy run.
        plant: What is done to it; a control may have one that does no harm.
        unseen: Whether it is scored only, and no rule may be tuned on it.
        also: Another kind that a run may turn into: without warm-up, a post-norm model's heads collapse or go flat.
    """

    name: str
    kind: str
    setup: Setup
    plant: Plant | None = None
    unseen: bool = False
    also: str = CONTROL

    def heads(self) -> dict[int, tuple[int, ...]]:
        """Layer -> heads in which something is planted, of all heads there are.

        Non-finite scores that are not hidden reach every weight with the gradient of their first step.
        """
        if self.plant is None or self.kind == CONTROL:
            return {}
        everywhere = self.kind == "nonfinite" and not self.plant.hidden
        layers = range(self.setup.layers) if self.plant.layers is None or everywhere else self.plant.layers
        heads = tuple(range(self.setup.heads)) if self.plant.heads is None or everywhere else self.plant.heads
        return dict.fromkeys(layers, heads)

    def rules(self) -> frozenset[str]:
        """Rules whose alert names what is planted."""
        return RULES_OF[self.kind] | RULES_OF[self.also]


_BASE = Setup()
_DEEP = Setup(layers=4, width=48)
_POST = Setup(layers=3, norm="post", warmup=60, rate=2e-3)
_ROTARY = Setup(layers=3, positions="rotary")
_RMS = Setup(query_key_norm="rms", positions="rotary")
_DROPOUT = Setup(dropout=0.1)
_TUNED = Setup(pretrained=300, rate=1e-3, warmup=10, steps=200)
_POST_ROTARY = Setup(layers=4, width=48, norm="post", positions="rotary", dropout=0.1, warmup=60, rate=2e-3)
_GPT2 = Setup(gpt2=True, dropout=0.1)
_TRAIN = Setup(layers=3, source="train", dropout=0.1)
_RARE = Setup(every=50, steps=900)
_OTHER = replace(_TUNED, other_text=True)


def _controls() -> list[Family]:
    setups = {
        "plain": _BASE,
        "deep": _DEEP,
        "post_norm": _POST,
        "rotary": _ROTARY,
        "rms_qk_norm": _RMS,
        "dropout": _DROPOUT,
        "half_rate": replace(_BASE, rate=1.5e-3),
        "double_rate": replace(_BASE, rate=6e-3),
        "no_warmup": replace(_BASE, warmup=0),
        "context_256": replace(_BASE, context=256, batch=2),
        "tune_slow": replace(_TUNED, rate=3e-4),
        "tune": _TUNED,
        "tune_fast": replace(_TUNED, rate=3e-3),
        "post_norm_rotary_dropout": _POST_ROTARY,
        "gpt2": _GPT2,
        "wide": replace(_BASE, width=128, heads=8, rate=2e-3, steps=200),
        "narrow": replace(_BASE, width=32, heads=2),
        "one_layer": replace(_BASE, layers=1),
        "six_layers": replace(_BASE, layers=6, width=48, steps=200),
        "long": replace(_BASE, steps=1500, every=10, cosine=True),
        "cosine_schedule": replace(_ROTARY, cosine=True),
        "rms_qk_norm_fast": replace(_RMS, rate=6e-3, positions="learned"),
        "rotary_no_warmup": replace(_ROTARY, warmup=0, rate=4e-3),
        "cosine_attention": replace(_BASE, query_key_norm="cosine"),
        "sampled_in_training": _TRAIN,
        "every_50": _RARE,
        "tune_other_slow": replace(_OTHER, rate=3e-4),
        "tune_other": _OTHER,
        "tune_other_fast": replace(_OTHER, rate=3e-3),
    }
    longer = Plant("context", 200, 2.0)
    return [
        *(Family(name, CONTROL, setup) for name, setup in setups.items()),
        Family("longer_context", CONTROL, replace(_ROTARY, context=32), longer),
        Family("longer_context_learned", CONTROL, replace(_BASE, context=32), longer),
    ]


def _planted() -> list[Family]:
    return [
        # P1
        Family("rate_from_start", "collapse", _BASE, Plant("rate", 0, 30.0)),
        Family("rate_jump", "collapse", _BASE, Plant("rate", 152, 50.0)),
        Family("huge_query_key_init", "collapse", _BASE, Plant("query_key_size", 0, 8.0)),
        Family("post_norm_no_warmup", "collapse", _POST, Plant("no_warmup", 0, 20.0), also="uniform"),
        # P2
        Family("query_key_rate", "growth", _BASE, Plant("query_key_rate", 102, 20.0)),
        Family("growth_model", "growth", _DEEP, Plant("query_key_growth", 102, 1.008)),
        Family("growth_layer", "growth", _ROTARY, Plant("query_key_growth", 102, 1.01, layers=(1,))),
        Family("growth_head", "growth", _BASE, Plant("query_key_growth", 102, 1.015, layers=(1,), heads=(2,))),
        # P3
        Family("decay_model", "uniform", _BASE, Plant("query_key_decay", 152, 10.0)),
        Family("hot_model", "uniform", _BASE, Plant("temperature", 152, 30.0)),
        Family("hot_layers", "uniform", _DEEP, Plant("temperature", 152, 20.0, layers=(1, 2))),
        Family("hot_head", "uniform", _ROTARY, Plant("temperature", 152, 50.0, layers=(1,), heads=(0,))),
        # P4
        Family("sharp_model", "sharp", _BASE, Plant("temperature", 152, 0.1)),
        Family("sharp_layer", "sharp", _DEEP, Plant("temperature", 152, 1 / 30, layers=(2,))),
        Family("sharp_head", "sharp", _ROTARY, Plant("temperature", 152, 1 / 30, layers=(1,), heads=(3,))),
        Family("sharp_ramp", "sharp", _DROPOUT, Plant("temperature", 102, 1 / 30, over=150)),
        Family("sharp_from_start", "sharp", _BASE, Plant("temperature", 0, 1 / 30)),
        # P5
        Family("inf_head", "nonfinite", _BASE, Plant("inf", 102, layers=(1,), heads=(1,), hidden=True)),
        Family("nan_head", "nonfinite", _POST, Plant("nan", 102, layers=(0,), heads=(3,), hidden=True)),
        Family("nan_in_loss", "nonfinite", _BASE, Plant("nan", 102, layers=(1,), heads=(0,))),
        Family("fp16_head", "nonfinite", _BASE, Plant("fp16", 102, 1.3, layers=(0,), heads=(2,), hidden=True)),
        # the same in other setups, sizes and places
        Family("rate_jump_rotary", "collapse", _ROTARY, Plant("rate", 201, 30.0)),
        Family("rate_jump_gpt2", "collapse", _GPT2, Plant("rate", 127, 60.0)),
        Family("rate_tune", "collapse", _TUNED, Plant("rate", 0, 100.0)),
        Family("huge_init_deep", "collapse", _DEEP, Plant("query_key_size", 0, 12.0)),
        Family(
            "post_norm_rotary_no_warmup",
            "collapse",
            _POST_ROTARY,
            Plant("no_warmup", 0, 30.0),
            also="uniform",
        ),
        Family("query_key_rate_post", "growth", _POST, Plant("query_key_rate", 81, 30.0)),
        Family("growth_gpt2", "growth", _GPT2, Plant("query_key_growth", 81, 1.012)),
        Family("growth_head_in_training", "growth", _TRAIN, Plant("query_key_growth", 81, 1.02, (2,), (0,))),
        Family("growth_every_50", "growth", _RARE, Plant("query_key_growth", 430, 1.006)),
        Family("growth_tune", "growth", _TUNED, Plant("query_key_growth", 60, 1.015, (0,))),
        Family("decay_rotary", "uniform", _ROTARY, Plant("query_key_decay", 121, 15.0)),
        Family("hot_post_norm", "uniform", _POST, Plant("temperature", 181, 40.0)),
        Family("hot_layer_dropout", "uniform", _DROPOUT, Plant("temperature", 181, 20.0, (1,))),
        Family("hot_head_tune", "uniform", _TUNED, Plant("temperature", 91, 30.0, (1,), (2,))),
        Family("hot_every_50", "uniform", _RARE, Plant("temperature", 430, 25.0)),
        Family("sharp_rms_qk_norm", "sharp", _RMS, Plant("temperature", 181, 0.1)),
        Family("sharp_layer_post_norm", "sharp", _POST, Plant("temperature", 181, 0.1, (1,))),
        Family("sharp_layer_tune", "sharp", _TUNED, Plant("temperature", 91, 0.05, (1,))),
        Family("sharp_head_ramp", "sharp", _DEEP, Plant("temperature", 81, 1 / 30, (3,), (1,), over=120)),
        Family("inf_layer_rotary", "nonfinite", _ROTARY, Plant("inf", 61, layers=(2,), hidden=True)),
        Family("inf_in_loss", "nonfinite", _DEEP, Plant("inf", 171, layers=(0,), heads=(0,))),
        Family(
            "fp16_head_in_training",
            "nonfinite",
            _TRAIN,
            Plant("fp16", 61, 1.2, layers=(1,), heads=(3,), hidden=True),
        ),
    ]


_NARROW_HEADS = Setup(heads=8)
_BROAD_HEADS = Setup(layers=3, heads=2, width=96, rate=2e-3)
_MIDDLE = Setup(layers=3, context=128, batch=4, positions="rotary", cosine=True)
_POST_DEEP = Setup(layers=5, width=48, norm="post", warmup=80, rate=1.5e-3)
_RMS_DEEP = Setup(layers=4, width=48, query_key_norm="rms", dropout=0.1)
_GPT2_DEEP = Setup(layers=4, width=48, gpt2=True, rate=2e-3, source="train")
_TUNED_ROTARY = Setup(layers=3, positions="rotary", pretrained=300, rate=1e-3, warmup=10, steps=200)
_EVERY_10 = Setup(layers=3, positions="rotary", dropout=0.1, every=10, steps=500)
_EVERY_25 = Setup(gpt2=True, every=25, steps=800, dropout=0.1)
_COSINE = Setup(layers=3, query_key_norm="cosine", positions="rotary")


def _more() -> list[Family]:
    controls = {
        "narrow_heads": _NARROW_HEADS,
        "broad_heads": _BROAD_HEADS,
        "context_128": _MIDDLE,
        "post_norm_deep": _POST_DEEP,
        "rms_qk_norm_deep": _RMS_DEEP,
        "gpt2_deep_in_training": _GPT2_DEEP,
        "tune_rotary": _TUNED_ROTARY,
        "every_10": _EVERY_10,
        "gpt2_every_25": _EVERY_25,
        "cosine_attention_rotary": _COSINE,
        "broad_heads_half_rate": replace(_BROAD_HEADS, rate=1e-3),
        "broad_heads_double_rate": replace(_BROAD_HEADS, rate=4e-3),
        "rotary_five_layers": replace(_ROTARY, layers=5, width=48, dropout=0.1),
        "long_rotary": replace(_ROTARY, steps=1200, every=10, cosine=True),
        "tune_rotary_other": replace(_TUNED_ROTARY, other_text=True),
        "tune_rotary_fast": replace(_TUNED_ROTARY, rate=2e-3),
    }
    longer = Plant("context", 200, 2.0)
    planted = [
        ("rate_from_start_128", "collapse", _MIDDLE, Plant("rate", 0, 25.0)),
        ("rate_jump_narrow", "collapse", _NARROW_HEADS, Plant("rate", 171, 40.0)),
        ("rate_jump_every_25", "collapse", _EVERY_25, Plant("rate", 430, 40.0)),
        ("rate_jump_tune", "collapse", _TUNED_ROTARY, Plant("rate", 61, 60.0)),
        ("huge_init_broad", "collapse", _BROAD_HEADS, Plant("query_key_size", 0, 10.0)),
        ("query_key_rate_every_10", "growth", _EVERY_10, Plant("query_key_rate", 203, 20.0)),
        ("growth_layer_narrow", "growth", _NARROW_HEADS, Plant("query_key_growth", 81, 1.012, (0,))),
        ("growth_head_128", "growth", _MIDDLE, Plant("query_key_growth", 101, 1.015, (1,), (2,))),
        ("growth_model_post", "growth", _POST_DEEP, Plant("query_key_growth", 101, 1.012)),
        ("growth_head_tune", "growth", _TUNED_ROTARY, Plant("query_key_growth", 41, 1.02, (2,), (1,))),
        ("decay_broad", "uniform", _BROAD_HEADS, Plant("query_key_decay", 121, 15.0)),
        ("hot_gpt2", "uniform", _GPT2_DEEP, Plant("query_key_size", 151, 0.2)),
        ("hot_layer_128", "uniform", _MIDDLE, Plant("temperature", 151, 35.0, (0,))),
        ("hot_layers_rms", "uniform", _RMS_DEEP, Plant("temperature", 181, 25.0, (1, 3))),
        ("hot_head_narrow", "uniform", _NARROW_HEADS, Plant("temperature", 201, 30.0, (0,), (5,))),
        ("hot_model_tune", "uniform", _TUNED_ROTARY, Plant("temperature", 71, 20.0)),
        ("hot_head_every_10", "uniform", _EVERY_10, Plant("temperature", 303, 40.0, (2,), (3,))),
        ("sharp_model_narrow", "sharp", _NARROW_HEADS, Plant("temperature", 151, 0.1)),
        ("sharp_layer_rms", "sharp", _RMS_DEEP, Plant("temperature", 151, 1 / 30, (0,))),
        ("sharp_head_every_10", "sharp", _EVERY_10, Plant("temperature", 303, 0.05, (0,), (1,))),
        ("sharp_ramp_post", "sharp", _POST_DEEP, Plant("temperature", 121, 1 / 30, over=120)),
        ("sharp_from_start_broad", "sharp", _BROAD_HEADS, Plant("temperature", 0, 1 / 30)),
        ("sharp_cosine", "sharp", _COSINE, Plant("temperature", 151, 0.1)),
        ("inf_head_rms", "nonfinite", _RMS_DEEP, Plant("inf", 81, layers=(2,), heads=(3,), hidden=True)),
        ("nan_layer_128", "nonfinite", _MIDDLE, Plant("nan", 121, layers=(0,), hidden=True)),
        ("fp16_head_broad", "nonfinite", _BROAD_HEADS, Plant("fp16", 81, 1.3, layers=(2,), heads=(1,), hidden=True)),
    ]
    return [
        *(Family(name, CONTROL, setup) for name, setup in controls.items()),
        Family("longer_context_128", CONTROL, replace(_MIDDLE, context=64, cosine=False), longer),
        *(Family(*one) for one in planted),
        Family(
            "post_norm_deep_no_warmup",
            "collapse",
            _POST_DEEP,
            Plant("no_warmup", 0, 25.0),
            also="uniform",
        ),
    ]


_PERIODIC = Setup(context=48, positions="rotary", task="periodic", steps=400)
_COPY = replace(_PERIODIC, task="copy")
_COPY_LEARNED = replace(_COPY, positions="learned")


def _exact() -> list[Family]:
    """Tasks that healthy heads solve by looking at one key and no other."""
    controls = {
        "periodic": _PERIODIC,
        "periodic_narrow": replace(_PERIODIC, width=32),
        "periodic_post_norm": replace(_PERIODIC, positions="learned", norm="post", warmup=60, rate=2e-3),
        "copy": _COPY,
        "copy_half_rate": replace(_COPY, rate=1.5e-3),
        "copy_three_layers": replace(_COPY, layers=3, rate=2e-3),
        "copy_learned": _COPY_LEARNED,
    }
    planted = [
        ("rate_from_start_copy", "collapse", _COPY, Plant("rate", 0, 30.0)),
        ("rate_jump_copy", "collapse", _COPY_LEARNED, Plant("rate", 252, 50.0)),
        ("growth_layer_periodic", "growth", _PERIODIC, Plant("query_key_growth", 252, 1.012, (1,))),
        ("sharp_head_periodic", "sharp", _PERIODIC, Plant("temperature", 252, 1 / 30, (1,), (0,))),
        ("hot_layer_copy", "uniform", _COPY, Plant("temperature", 302, 30.0, (0,))),
        ("inf_head_periodic", "nonfinite", _PERIODIC, Plant("inf", 252, layers=(1,), heads=(3,), hidden=True)),
    ]
    return [
        *(Family(name, CONTROL, setup) for name, setup in controls.items()),
        *(Family(*one) for one in planted),
    ]


_POST_SIX = Setup(layers=6, width=48, norm="post", dropout=0.1, warmup=100, rate=1e-3)
_RMS_POST = Setup(layers=3, norm="post", query_key_norm="rms", positions="rotary", warmup=60, rate=2e-3)
_GPT2_WIDE = Setup(layers=3, heads=6, width=96, gpt2=True, dropout=0.1, rate=2e-3, cosine=True)
_ROTARY_WIDE = Setup(heads=8, width=128, positions="rotary", rate=2e-3)
_CONTEXT_192 = Setup(context=192, batch=3, rate=2e-3)
_TUNED_GPT2 = Setup(gpt2=True, pretrained=300, rate=1e-3, warmup=10, steps=200)
_EVERY_20 = Setup(layers=3, dropout=0.1, every=20, steps=700)
_TRAIN_ROTARY = Setup(layers=4, width=48, positions="rotary", source="train", dropout=0.1)
_FIVE = Setup(layers=5, warmup=40, rate=2e-3)
_REVERSE = Setup(context=48, task="reverse", steps=400)
_REVERSE_WIDE = Setup(context=48, heads=8, width=128, rate=2e-3, task="reverse", steps=300)
_SUM = Setup(context=32, task="sum", steps=400)
_PERIODIC_GPT2 = Setup(gpt2=True, context=48, dropout=0.1, task="periodic", steps=400)
_COPY_EVERY_20 = Setup(context=64, positions="rotary", task="copy", every=20, steps=700)
_COPY_WIDE = Setup(context=48, heads=8, width=128, positions="rotary", rate=2e-3, task="copy", steps=300)


def _unseen() -> list[Family]:
    """Runs that no rule was tuned on: other setups, and other places and sizes of what is planted."""
    controls = {
        "post_norm_six": _POST_SIX,
        "rms_qk_norm_post": _RMS_POST,
        "gpt2_wide": _GPT2_WIDE,
        "rotary_wide": _ROTARY_WIDE,
        "context_192": _CONTEXT_192,
        "tune_gpt2": _TUNED_GPT2,
        "every_20": _EVERY_20,
        "rotary_in_training": _TRAIN_ROTARY,
        "five_layers": _FIVE,
        "one_layer_rotary": Setup(layers=1, heads=8, positions="rotary"),
        "rotary_wide_half_rate": replace(_ROTARY_WIDE, rate=1e-3),
        "rotary_wide_double_rate": replace(_ROTARY_WIDE, rate=4e-3),
        "five_layers_no_warmup": replace(_FIVE, warmup=0),
        "long_gpt2": replace(_GPT2, steps=1200, every=10, cosine=True),
        "tune_gpt2_other": replace(_TUNED_GPT2, other_text=True),
        "tune_gpt2_fast": replace(_TUNED_GPT2, rate=2e-3),
        "reverse": _REVERSE,
        "reverse_wide": _REVERSE_WIDE,
        "sum": _SUM,
        "periodic_gpt2": _PERIODIC_GPT2,
        "periodic_96": Setup(context=96, batch=4, positions="rotary", task="periodic", steps=400),
        "copy_every_20": _COPY_EVERY_20,
        "copy_wide": _COPY_WIDE,
    }
    planted = [
        ("rate_from_start_wide", "collapse", _ROTARY_WIDE, Plant("rate", 0, 30.0)),
        ("rate_jump_192", "collapse", _CONTEXT_192, Plant("rate", 161, 40.0)),
        ("rate_jump_five", "collapse", _FIVE, Plant("rate", 221, 30.0)),
        ("rate_jump_every_20", "collapse", _EVERY_20, Plant("rate", 430, 50.0)),
        ("rate_tune_gpt2", "collapse", _TUNED_GPT2, Plant("rate", 31, 100.0)),
        ("huge_init_five", "collapse", _FIVE, Plant("query_key_size", 0, 9.0)),
        ("query_key_rate_gpt2", "growth", _GPT2_WIDE, Plant("query_key_rate", 121, 25.0)),
        ("growth_layer_five", "growth", _FIVE, Plant("query_key_growth", 101, 1.012, (3,))),
        ("growth_head_wide", "growth", _ROTARY_WIDE, Plant("query_key_growth", 91, 1.015, (0,), (6,))),
        ("growth_model_192", "growth", _CONTEXT_192, Plant("query_key_growth", 101, 1.011)),
        ("growth_every_20", "growth", _EVERY_20, Plant("query_key_growth", 250, 1.007, (1,))),
        ("growth_tune_gpt2", "growth", _TUNED_GPT2, Plant("query_key_growth", 41, 1.018)),
        ("decay_post_six", "uniform", _POST_SIX, Plant("query_key_decay", 151, 20.0)),
        ("decay_wide", "uniform", _ROTARY_WIDE, Plant("query_key_decay", 121, 20.0)),
        ("hot_head_wide", "uniform", _ROTARY_WIDE, Plant("temperature", 181, 30.0, (1,), (4,))),
        ("hot_layer_five", "uniform", _FIVE, Plant("temperature", 171, 25.0, (4,))),
        ("hot_model_in_training", "uniform", _TRAIN_ROTARY, Plant("temperature", 161, 40.0)),
        ("hot_model_every_20", "uniform", _EVERY_20, Plant("temperature", 350, 30.0)),
        ("sharp_model_192", "sharp", _CONTEXT_192, Plant("temperature", 151, 0.1)),
        ("sharp_head_in_training", "sharp", _TRAIN_ROTARY, Plant("temperature", 171, 1 / 30, (2,), (1,))),
        ("sharp_layer_post_six", "sharp", _POST_SIX, Plant("temperature", 221, 1 / 30, (5,))),
        ("sharp_ramp_wide", "sharp", _ROTARY_WIDE, Plant("temperature", 101, 1 / 30, over=140)),
        ("sharp_from_start_192", "sharp", _CONTEXT_192, Plant("temperature", 0, 1 / 30)),
        ("sharp_rms_post", "sharp", _RMS_POST, Plant("temperature", 181, 0.1)),
        ("inf_head_five", "nonfinite", _FIVE, Plant("inf", 81, layers=(2,), heads=(3,), hidden=True)),
        ("nan_layer_post_six", "nonfinite", _POST_SIX, Plant("nan", 121, layers=(3,), hidden=True)),
        ("nan_in_loss_wide", "nonfinite", _ROTARY_WIDE, Plant("nan", 131, layers=(1,), heads=(5,))),
        ("rate_from_start_reverse", "collapse", _REVERSE, Plant("rate", 0, 30.0)),
        ("rate_jump_sum", "collapse", _SUM, Plant("rate", 281, 40.0)),
        ("growth_head_copy_every_20", "growth", _COPY_EVERY_20, Plant("query_key_growth", 410, 1.01, (1,), (2,))),
        ("hot_periodic_gpt2", "uniform", _PERIODIC_GPT2, Plant("query_key_size", 301, 0.2)),
        ("sharp_layer_reverse_wide", "sharp", _REVERSE_WIDE, Plant("temperature", 221, 1 / 30, (1,))),
        ("nan_head_copy_wide", "nonfinite", _COPY_WIDE, Plant("nan", 201, layers=(0,), heads=(5,), hidden=True)),
        ("fp16_head_every_20", "nonfinite", _EVERY_20, Plant("fp16", 210, 1.2, layers=(0,), heads=(1,), hidden=True)),
    ]
    return [
        *(Family(name, CONTROL, setup, unseen=True) for name, setup in controls.items()),
        Family(
            "longer_context_wide",
            CONTROL,
            replace(_ROTARY_WIDE, context=32),
            Plant("context", 200, 2.0),
            unseen=True,
        ),
        *(Family(*one, unseen=True) for one in planted),
        Family(
            "post_norm_six_no_warmup", "collapse", _POST_SIX, Plant("no_warmup", 0, 40.0), unseen=True, also="uniform"
        ),
    ]


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for family in [*_controls(), *_planted(), *_more(), *_exact(), *_unseen()]}
)


def twin(family: Family) -> Family:
    """The control that a planted run is but for the plant.

    Raises:
        ValueError: There is none.
    """
    for other in FAMILIES.values():
        if other.kind == CONTROL and other.plant is None and other.setup == family.setup:
            return other
    raise ValueError(f"Expected a control with the setup of {family.name!r}, but there is none in FAMILIES.")
