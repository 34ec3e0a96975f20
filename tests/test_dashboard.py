"""Tags, scalars, images, TensorBoard's layout."""

import math
import re
import time

import numpy as np
import pytest

from attnmon.dashboard import (
    QUANTITIES,
    cost_scalars,
    custom_scalars_layout,
    heads_image,
    image_tag,
    quantity_image,
    scalar_tag,
    scalars,
    title,
    warning_scalars,
    warning_tag,
)

NAN = math.nan
TAGS = {
    "entropy": "attn/entropy/layer_03",
    "entropy_normalized": "attn/entropy/normalized/layer_03",
    "effective_keys": "attn/entropy/effective_keys/layer_03",
    "active_share": "attn/entropy/active_share/layer_03",
    "participation_ratio": "attn/entropy/participation_ratio/layer_03",
    "lemma1_min": "attn/entropy/lemma1_min/layer_03",
    "lemma1_max": "attn/entropy/lemma1_max/layer_03",
    "first_key_weight": "attn/logits/first_key_weight/layer_03",
    "score_spread": "attn/logits/spread/layer_03",
    "score_max": "attn/logits/max/layer_03",
    "separability@10": "attn/separability/top_10/layer_03",
    "precision@10": "attn/separability/precision_top_10/layer_03",
    "f_score@10": "attn/separability/f_score_top_10/layer_03",
    "radius@10": "attn/separability/radius_top_10/layer_03",
    "separability_lower@10": "attn/separability/lower_top_10/layer_03",
    "separability_upper@10": "attn/separability/upper_top_10/layer_03",
    "separability_upper_valid@10": "attn/separability/upper_valid_top_10/layer_03",
    "distance@10": "attn/distance/top_10/layer_03",
    "distance_expected@10": "attn/distance/expected_top_10/layer_03",
    "distance_upper@10": "attn/distance/upper_top_10/layer_03",
    "distance_expected_lower@10": "attn/distance/expected_lower_top_10/layer_03",
    "distance_expected_upper@10": "attn/distance/expected_upper_top_10/layer_03",
    "jacobian@1.0": "attn/jacobian/temperature_1.0/layer_03",
    "jacobian_frobenius@1.0": "attn/jacobian/frobenius_temperature_1.0/layer_03",
    "jacobian_max@1.0": "attn/jacobian/max_temperature_1.0/layer_03",
    "sensitivity@1.0,0.1": "attn/jacobian/sensitivity_temperature_1.0_epsilon_0.1/layer_03",
}


@pytest.mark.parametrize(("quantity", "tag"), TAGS.items())
def test_tags(quantity, tag):
    assert scalar_tag(quantity, 3) == tag
    assert scalar_tag(quantity, 3, 7) == f"{tag}/head_07"
    assert scalar_tag(quantity, 3, prefix="val/attn") == f"val/{tag}"


def test_the_table_and_the_tags_cover_each_other():
    assert [quantity.name for quantity in QUANTITIES] == list(dict.fromkeys(q.name for q in QUANTITIES))
    assert {quantity.name for quantity in QUANTITIES} == {name.partition("@")[0] for name in TAGS}
    for quantity in QUANTITIES:
        assert quantity.range
        assert quantity.rise
        assert quantity.fall
        assert quantity.title
        assert ("{}" in quantity.tag) == ("{}" in quantity.title) == bool(quantity.argument)


def test_layer_and_head_numbers():
    assert scalar_tag("entropy", 0).endswith("/layer_00")
    assert scalar_tag("entropy", 99).endswith("/layer_99")
    assert scalar_tag("entropy", 126, 100) == "attn/entropy/layer_126/head_100"


@pytest.mark.parametrize(
    ("quantity", "tag"),
    [
        ("my metric@0.5 (new)", "attn/my_metric_0.5_new/layer_00"),
        ("mine/sub", "attn/mine/sub/layer_00"),
        ("separability", "attn/separability/layer_00"),  # without its N: no known path
        ("jacobian@1e+02", "attn/jacobian/temperature_1e_02/layer_00"),
        ("@", "attn/_/layer_00"),
    ],
)
def test_unknown_quantities_get_a_path_that_every_logger_takes(quantity, tag):
    assert scalar_tag(quantity, 0) == tag
    assert re.fullmatch(r"[A-Za-z0-9_.\-/]+", tag)


def test_no_two_quantities_share_a_tag():
    tags = [scalar_tag(quantity, 3) for quantity in TAGS] + [image_tag(quantity) for quantity in TAGS]
    assert len(set(tags)) == len(tags)
    assert image_tag("entropy") == "attn/entropy/heads"
    assert warning_tag("nonfinite") == "attn/warnings/nonfinite"


def test_scalars_are_means_over_measured_heads():
    values = {"entropy": {0: [1.0, NAN, 3.0], 1: [NAN, NAN], 2: [math.inf, 0.0]}, "separability@5": {0: [0.5]}}
    assert scalars(values) == {
        "attn/entropy/layer_00": 2.0,
        "attn/entropy/layer_02": 0.0,
        "attn/separability/top_5/layer_00": 0.5,
    }
    assert scalars({"entropy": {0: [1.0, NAN, 3.0]}}, per_head=True, prefix="x") == {
        "x/entropy/layer_00": 2.0,
        "x/entropy/layer_00/head_00": 1.0,
        "x/entropy/layer_00/head_02": 3.0,
    }
    assert scalars({}) == {}
    assert scalars({"entropy": {0: []}}) == {}
    assert warning_scalars({"nonfinite": 2}) == {"attn/warnings/nonfinite": 2.0}


def test_titles():
    assert title("jacobian@0.5") == "Softmax Jacobian, spectral norm, T x 0.5 (1 / score)"
    assert title("sensitivity@1.0,0.1", unit=False) == "Finite-difference sensitivity, T x 1.0, epsilon = 0.1"
    assert title("unknown@3") == "unknown@3"


# --- Images -----------------------------------------------------------------------------------------------------------


def _colours(image):
    return {tuple(colour) for colour in image.reshape(-1, 3)}


def test_image_shape_type_and_ends_of_the_scale():
    image = heads_image({0: [0.0, 1.0], 1: [0.5, 0.5]}, title="t")
    assert image.dtype == np.uint8
    assert image.ndim == 3
    assert image.shape[2] == 3
    assert {(68, 1, 84), (253, 231, 37)} <= _colours(image)


def _count(image, colour):
    return int((image == np.array(colour, dtype=np.uint8)).all(axis=2).sum())


def test_the_value_decides_the_colour_and_the_place():
    low = heads_image({0: [0.0] * 10, 1: [0.0] * 10, 2: [0.0] * 10, 3: [0.0] * 10}, title="t", vmin=0, vmax=1)
    rows = {layer: [0.0] * 10 for layer in range(4)}
    rows[1][7] = 1.0
    one = heads_image(rows, title="t", vmin=0, vmax=1)
    changed = np.argwhere((low != one).any(axis=2))
    top, left = changed.min(axis=0)
    bottom, right = changed.max(axis=0)
    assert low.shape == one.shape
    assert (one[top : bottom + 1, left : right + 1] == (253, 231, 37)).all()
    tall, wide = bottom - top + 2, right - left + 2
    assert (left - 7 * wide) < low.shape[1] / 10
    assert abs(top - tall - 30) < 20


def test_not_measured_is_grey_and_no_such_head_is_hatched():
    def cells(values):
        image = heads_image(values, title="t")
        return _count(image, (176, 176, 176)) // 1400, _count(image, (214, 214, 214)) > 500

    assert cells({0: [0.1] * 4, 1: [0.2] * 4}) == (0, False)
    assert cells({0: [0.1, NAN, 0.3, math.inf], 1: [0.2] * 4}) == (2, False)  # two cells of 39 x 39
    assert cells({0: [0.1] * 4, 1: [0.2]}) == (0, True)


@pytest.mark.parametrize(
    "values",
    [
        {0: [0.5] * 12},
        {0: [0.0]},
        {0: [NAN]},
        {0: [NAN] * 12, 1: []},
        {0: [-1e30, 1e30]},
        {5: [1e-8, 2e-8]},
        {layer: list(range(64)) for layer in range(126)},
    ],
)
def test_any_values_make_an_image(values):
    image = heads_image(values, title="a rather long title for so small a picture (unit)")
    assert image.shape[0] < 1600
    assert image.shape[1] < 1000
    for edge in (image[:4], image[-4:], image[:, :4], image[:, -4:]):
        assert (edge == 255).all()  # nothing is cut off


def test_values_beyond_the_scale_take_its_end_colour():
    image = heads_image({0: [-5.0, 5.0]}, title="t", vmin=0.0, vmax=1.0)
    assert (image == heads_image({0: [0.0, 1.0]}, title="t", vmin=0.0, vmax=1.0)).mean() > 0.95


def test_one_end_of_the_scale_beyond_all_values():
    assert heads_image({0: [3.0, 4.0]}, title="t", vmin=10.0).size
    assert heads_image({0: [3.0, 4.0]}, title="t", vmax=1.0).size


def test_image_arguments():
    with pytest.raises(ValueError, match="at least one layer with at least one head, but got 0 layers"):
        heads_image({}, title="t")
    with pytest.raises(ValueError, match="but got 1 layers"):
        heads_image({0: []}, title="t")
    with pytest.raises(ValueError, match="Expected `vmin` <= `vmax`, but got vmin=2 and vmax=1"):
        heads_image({0: [1.0]}, title="t", vmin=2, vmax=1)


def test_lightness_rises_along_the_colour_map():
    from attnmon.dashboard.images import _colours as colour_map

    lightness = colour_map().astype(float) @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(lightness) > -0.6).all()
    assert lightness[-1] - lightness[0] > 180


def test_an_image_of_144_heads_is_fast():
    draw = np.random.default_rng(0)
    values = {layer: draw.random(12).tolist() for layer in range(12)}
    quantity_image("entropy_normalized", values)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        quantity_image("entropy_normalized", values)
        best = min(best, time.perf_counter() - start)
    assert best < 0.02  # 2 ms on an idle core


# --- TensorBoard ------------------------------------------------------------------------------------------------------


QUANTITY_LIST = [
    "entropy", "entropy_normalized", "score_spread", "separability@1", "separability@10", "separability@5",
    "jacobian@0.1", "jacobian@1.0", "distance@20", "distance_expected@20",
]  # fmt: skip


def test_layout_leads_with_one_chart_a_family():
    layout = custom_scalars_layout(QUANTITY_LIST)
    assert list(layout) == ["Attention", "Attention: more", "Cost of the monitor"]
    assert list(layout["Attention"]) == [
        "Normalised entropy (H / log n)",
        "Separability Ns/N, N = 10 (share of the selected keys)",
        "Score spread (scores / T)",
        "Softmax Jacobian, spectral norm, T x 1.0 (1 / score)",
        "Top-N distance, N = 20 (vector norm)",
        "Warnings (heads under alarm)",
    ]
    assert len(layout["Attention"]) + len(layout["Attention: more"]) == len(QUANTITY_LIST) + 1
    assert list(custom_scalars_layout([])) == ["Attention", "Cost of the monitor"]


@pytest.mark.parametrize("layers", [None, [0, 3], [0, 3, 101]])
def test_every_curve_is_in_exactly_one_chart(layers):
    charts = [chart for charts in custom_scalars_layout(QUANTITY_LIST, layers).values() for chart in charts.values()]
    patterns = [re.compile(pattern) for kind, tags in charts for pattern in tags if kind == "Multiline"]
    for quantity in QUANTITY_LIST:
        for layer in layers or [0, 3, 101]:
            assert sum(bool(p.match(scalar_tag(quantity, layer))) for p in patterns) == 1
            assert not any(p.match(scalar_tag(quantity, layer, 2)) for p in patterns)  # heads would drown the layers
    assert sum(bool(p.match(warning_tag("entropy_rise"))) for p in patterns) == 1
    if layers:
        assert not any(p.match(scalar_tag("entropy", 1)) for p in patterns)


def test_event_file_round_trip(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugins.custom_scalar import layout_pb2
    from torch.utils.tensorboard import SummaryWriter

    values = {"entropy_normalized": {0: [0.5, 0.7], 1: [0.2, 0.4]}, "separability@10": {0: [0.6, 0.6], 1: [0.5, NAN]}}
    image = quantity_image("entropy_normalized", values["entropy_normalized"])
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars(custom_scalars_layout(values))
        cost = cost_scalars({"seconds": 0.5, "share_of_step": 0.1, "share_of_run": 0.01})
        for tag, value in {**scalars(values), **warning_scalars({"entropy_rise": 1}), **cost}.items():
            writer.add_scalar(tag, value, 50)
        writer.add_image(image_tag("entropy_normalized"), image, 50, dataformats="HWC")
        writer.add_text(warning_tag("entropy_rise"), "text", 50)
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    found = {
        chart.title: [tag for tag in tags["scalars"] for pattern in chart.multiline.tag if re.match(pattern, tag)]
        for category in layout.category
        for chart in category.chart
    }
    assert found == {
        "Normalised entropy (H / log n)": ["attn/entropy/normalized/layer_00", "attn/entropy/normalized/layer_01"],
        "Separability Ns/N, N = 10 (share of the selected keys)": [
            "attn/separability/top_10/layer_00",
            "attn/separability/top_10/layer_01",
        ],
        "Warnings (heads under alarm)": ["attn/warnings/entropy_rise"],
        "Share of the step and of the run": ["attn/monitor/share_of_step", "attn/monitor/share_of_run"],
        "Seconds of a sample": ["attn/monitor/seconds"],
        "Bytes written": [],
        "Steps between samples": [],
    }
    assert tags["images"] == ["attn/entropy/normalized/heads"]
    assert "attn/warnings/entropy_rise/text_summary" in tags["tensors"]  # count and text do not collide
    assert events.Scalars("attn/entropy/normalized/layer_00")[0].value == pytest.approx(0.6)
