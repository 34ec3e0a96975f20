"""Which optimizer steps are sampled, and which samples are drawn."""

from __future__ import annotations

__all__ = ["due", "picture_due"]


def due(step: int, every_n_steps: int) -> bool:
    """Whether the monitor samples at ``step``.

    ``step % every_n_steps == 0``: a pure function of its arguments, so every rank, and a run resumed from a
    checkpoint, samples at the same steps. Step 0 is sampled: before the first update a fine-tuned model shows the
    settled figures that all later ones are compared with.

    Args:
        step: Number of optimizer steps taken so far, 0 or more.
        every_n_steps: Distance between two samples in optimizer steps, 1 or more.

    Returns:
        True where ``step`` is to be sampled.

    Raises:
        ValueError: If ``step`` is negative or ``every_n_steps`` is below 1.
        TypeError: If either is not an integer.

    Example:
        >>> [step for step in range(120) if due(step, every_n_steps=50)]
        [0, 50, 100]
    """
    for name, value, least in (("step", step, 0), ("every_n_steps", every_n_steps, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(
                f"Expected `{name}` to be an integer >= {least}, but got {value!r} of type {type(value).__name__}. "
                f"Pass a whole number of optimizer steps."
            )
        if value < least:
            raise ValueError(
                f"Expected `{name}` to be an integer >= {least}, but got {value}. "
                f"Pass a whole number of optimizer steps, e.g. every_n_steps=50."
            )
    return step % every_n_steps == 0


def picture_due(sample: int) -> bool:
    """Whether the ``sample``-th sample of a run (from 0) is worth its images.

    The first ten are, then every tenth up to the hundredth, every hundredth up to the thousandth, and so on: images
    are most of an event file, TensorBoard shows ten of a tag, and a run of any length so writes a few dozen.

    Example:
        >>> [sample for sample in range(300) if picture_due(sample)][8:]
        [8, 9, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200]
    """
    spacing = 1
    while sample >= 10 * spacing:
        spacing *= 10
    return sample % spacing == 0
