"""Which steps are sampled."""

import pytest

from attnmon.schedule import due, picture_due


def test_every_n_steps_from_the_first_on():
    assert [step for step in range(11) if due(step, 5)] == [0, 5, 10]
    assert all(due(step, 1) for step in range(3))
    assert [step for step in range(3) if due(step, 1000)] == [0]


@pytest.mark.parametrize("every", [0, -1])
def test_distance_below_one(every):
    with pytest.raises(ValueError, match=rf"Expected `every_n_steps` to be an integer >= 1, but got {every}"):
        due(0, every)


@pytest.mark.parametrize(("step", "every"), [(1.0, 5), (1, 5.0), (True, 5), (1, True), ("1", 5)])
def test_not_an_integer(step, every):
    with pytest.raises(TypeError, match="to be an integer >="):
        due(step, every)


def test_negative_step():
    with pytest.raises(ValueError, match="Expected `step` to be an integer >= 0, but got -1"):
        due(-1, 5)


def test_a_long_run_draws_a_few_dozen_pictures():
    drawn = [sample for sample in range(100_001) if picture_due(sample)]
    assert drawn[:12] == [*range(11), 20]
    assert drawn[-1] == 100_000
    assert len(drawn) == 10 + 9 * 4 + 1
