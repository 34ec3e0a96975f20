"""Wrong arguments, each with a text that says what was expected."""

import math

import pytest
from toys import VOCABULARY, tiny_gpt2, token_batches

from attnmon import watch
from attnmon.options import MonitorOptions


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("every_n_steps", 0, "Expected `every_n_steps` to be a whole number of at least 1, but got 0"),
        ("every_n_steps", 2.5, "Expected `every_n_steps` to be a whole number of at least 1, but got 2.5"),
        ("every_n_steps", True, "Expected `every_n_steps`"),
        ("rows", 0, "Expected `rows` to be a whole number of at least 1 or 'all', but got 0"),
        ("rows", "some", "Expected `rows`"),
        ("sequences", -1, "Expected `sequences`"),
        ("top_n", (5, 0), "Expected `top_n` to be a whole number of at least 1, but got 0"),
        ("top_n", (1.5,), "Expected `top_n` to be a whole number of at least 1, but got 1.5"),
        ("top_n", (), "Expected `top_n` to name at least one"),
        ("temperatures", (0.0,), "Expected every entry of `temperatures` to be a positive finite number, but got 0.0"),
        ("temperatures", (-1.0,), "Expected every entry of `temperatures`"),
        ("temperatures", (math.nan,), "Expected every entry of `temperatures`"),
        ("source", "test", "Expected `source` to be one of 'train', 'probe', but got 'test'"),
        ("vectors", "key", "Expected `vectors` to be one of 'value', 'hidden', 'embedding', but got 'key'"),
        ("tokens", "all", "Expected `tokens`"),
        ("quantities", ("entropie",), "but got 'entropie'. Did you mean 'entropy'"),
        ("quantities", ("separability@x",), "to carry a whole N >= 1, as in 'separability@10', but got"),
        ("quantities", ("entropy@3",), "to carry no argument"),
        ("quantities", ("jacobian@-1",), "a positive multiple"),
        ("patience", 0, "Expected `patience`"),
    ],
)
def test_wrong_arguments(argument, value, text):
    with pytest.raises(ValueError, match=text.replace("(", r"\(").replace("`", "`")):
        MonitorOptions(**{argument: value})


def test_a_number_means_a_list_of_one():
    options = MonitorOptions(top_n=5, temperatures=0.5, epsilons=0.01)
    assert (options.top_n, options.temperatures, options.epsilons) == ((5,), (0.5,), (0.01,))


@pytest.mark.parametrize("argument", ["alerts", "strict", "normalize_vectors"])
def test_flags_are_flags(argument):
    with pytest.raises(TypeError, match=f"Expected `{argument}` to be True or False, but got 'yes'"):
        MonitorOptions(**{argument: "yes"})


def test_what_is_not_a_model_or_a_state_or_a_writer():
    with pytest.raises(TypeError, match="Expected `model` to be a torch.nn.Module, but got int"):
        watch(3)
    with pytest.raises(ValueError, match="Expected `state_dict` to be one that a monitor returned"):
        watch(tiny_gpt2()).load_state_dict({"a": 1})
    with pytest.raises(TypeError, match="Expected `writer` to be a TensorBoard writer, .* list of these, but got int"):
        watch(tiny_gpt2(), writer=3)


def test_a_string_where_a_list_belongs():
    with pytest.raises(TypeError, match="Expected `quantities` to be a list or tuple, but got 'entropy'"):
        MonitorOptions(quantities="entropy")


def test_probe_without_a_batch():
    with pytest.raises(ValueError, match="Expected `probe` to be a batch or a function"):
        watch(tiny_gpt2(), source="probe")


def test_vocabulary_is_what_the_batches_draw_from():
    assert token_batches(1)[0]["input_ids"].max() < VOCABULARY
