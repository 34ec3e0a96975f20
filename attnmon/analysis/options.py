"""What an analysis measures, checked before anything is run."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnmon.metrics._checks import _check_positive
from attnmon.normalizers import normalizer_from_name

__all__ = ["CONVENTIONS", "TASKS", "VECTORS", "AnalysisOptions"]

TASKS = ("distance", "critical", "separability", "sensitivity", "summary")
VECTORS = ("value", "embedding", "positioned", "hidden")
CONVENTIONS = ("visible", "full")


@dataclass(frozen=True)
class AnalysisOptions:
    """What `analyze` measures.

    The tasks, with the quantities and the grid of each one's table:

    - ``"distance"`` (Algorithms 1 and 2 in one pass): the fields of `attnmon.functional.top_n_distance` at `top_n`;
    - ``"critical"`` (Algorithm 3): ``distance`` and ``expected_paper`` at every N up to `critical_top_n`;
    - ``"separability"`` (Algorithm 4): ``ratio`` (which is Ns/N) and the three bounds of
      `attnmon.functional.separability_bounds` at `separability_top_n`;
    - ``"sensitivity"`` (Algorithm 5): ``sensitivity``, the finite difference g over `temperatures` x `epsilons`;
    - ``"summary"``: ``entropy``, ``entropy_normalized``, ``active_share``, ``score_spread`` and ``jacobian``, the
      spectral norm at the model's own temperature; no grid;
    - and with ``"sensitivity"`` a second table ``"jacobian"``: ``spectral`` and ``max`` (the largest entry) of the
      exact Jacobian over `temperatures`.

    Attributes:
        lengths: Context lengths L. None: the powers of two from 32 to the length of the tokens, and that length.
        tasks: Which of the tasks.
        top_n: N of ``"distance"``.
        critical_top_n: Largest N of ``"critical"``.
        separability_top_n: N of ``"separability"``.
        temperatures: Absolute softmax temperatures T on the raw scores ``q . k``.
        epsilons: Sizes of the perturbation of the raw scores.
        vectors: What the keys carry: ``"embedding"`` (of the token), ``"positioned"`` (token plus learned position
            embedding), ``"hidden"`` (input of the attention module) or ``"value"`` (the head's own).
        normalize_vectors: Whether they are L2-normalised. None: token embeddings are, as Algorithm 4 says, the others
            are not.
        convention: What a row is: ``"visible"``, the keys that it may see; ``"full"``, all L keys, those that it may
            not see with weight 0, as the paper's listings may be read. Concerns all tasks but ``"summary"`` and
            ``"jacobian"``.
        rows: ``"all"``, or how many rows are drawn, stratified over position, from between each length and the next
            smaller one.
        normalizer: Name of what makes weights from the scaled scores, see `attnmon.normalizers.normalizer_from_name`;
            ``"softmax"`` is the model's own. The task ``"sensitivity"`` needs it; the others take any.
        seed: Of the random directions and of drawn rows.

    Raises:
        TypeError: A number is not of the kind expected.
        ValueError: An argument is out of its range.

    Example:
        >>> AnalysisOptions(lengths=(32, 64), tasks=("critical",)).critical_top_n
        100
    """

    lengths: Sequence[int] | None = None
    tasks: Sequence[str] = TASKS
    top_n: Sequence[int] = (1, 5, 10, 20, 100)
    critical_top_n: int = 100
    separability_top_n: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 100)
    temperatures: Sequence[float] = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    epsilons: Sequence[float] = (1e-3, 0.1, 10.0)
    vectors: str = "embedding"
    normalize_vectors: bool | None = None
    convention: str = "visible"
    rows: int | str = "all"
    normalizer: str = "softmax"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("vectors", self.vectors, VECTORS)
        _check_choice("convention", self.convention, CONVENTIONS)
        tasks = (self.tasks,) if isinstance(self.tasks, str) else _sequence("tasks", self.tasks)
        object.__setattr__(self, "tasks", tasks)
        for task in tasks:
            _check_choice("tasks", task, TASKS)
        if self.normalize_vectors not in (None, True, False):
            raise TypeError(
                f"Expected `normalize_vectors` to be True, False or None, but got {self.normalize_vectors!r}."
            )
        if not self.tasks:
            raise ValueError(f"Expected `tasks` to name at least one of {', '.join(TASKS)}, but got none.")
        for name in ("top_n", "separability_top_n"):
            object.__setattr__(self, name, _whole(name, getattr(self, name), 1))
        if self.lengths is not None:
            object.__setattr__(self, "lengths", _whole("lengths", self.lengths, 2))
        for name, least in (("critical_top_n", 1), ("seed", 0)):
            object.__setattr__(self, name, _whole(name, (getattr(self, name),), least)[0])
        for name in ("temperatures", "epsilons"):
            values, _ = _check_positive(name, _sequence(name, getattr(self, name)))
            object.__setattr__(self, name, tuple(sorted(set(values))))
        object.__setattr__(self, "tasks", tuple(task for task in TASKS if task in self.tasks))
        if self.rows != "all":
            if isinstance(self.rows, str):
                raise ValueError(f"Expected `rows` to be 'all' or a number of rows, but got {self.rows!r}.")
            object.__setattr__(self, "rows", _whole("rows", (self.rows,), 1)[0])
        normalizer_from_name(self.normalizer)  # an unknown name is an error
        if self.normalizer != "softmax" and "sensitivity" in self.tasks:
            raise ValueError(
                f"Expected `tasks` without 'sensitivity' for normalizer={self.normalizer!r}: Algorithm 5 is about "
                "softmax. Its Jacobian is in the 'summary'."
            )


def _check_choice(name: str, value: Any, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"Expected `{name}` to be one of {', '.join(map(repr, valid))}, but got {value!r}.")


def _sequence(name: str, values: Any) -> tuple[Any, ...]:
    try:
        if isinstance(values, (str, bytes)):
            raise TypeError
        return tuple(values)
    except TypeError:
        raise TypeError(f"Expected `{name}` to be a sequence, but got {values!r}. Use ({values!r},).") from None


def _whole(name: str, values: Iterable[Any], least: int) -> tuple[int, ...]:
    given = []
    for value in _sequence(name, values):
        try:
            if isinstance(value, bool):
                raise TypeError
            given.append(operator.index(value))
        except TypeError:
            raise TypeError(
                f"Expected `{name}` to be integer, but got {value!r} of type {type(value).__name__}."
            ) from None
        if given[-1] < least:
            raise ValueError(f"Expected `{name}` to be at least {least}, but got {value}.")
    if not given:
        raise ValueError(f"Expected `{name}` to hold at least one number, but got none.")
    return tuple(sorted(set(given)))
