"""Which optimizer steps are sampled."""

from __future__ import annotations

__all__ = ["due"]


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
