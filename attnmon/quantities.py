"""The names of what can be asked of a monitor, and the step from rows to one number per row for each of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from attnmon import functional as F
from attnmon.masks import masked_softmax
from attnmon.metrics import entropy_statistics, jacobian_norms, score_max, selection_statistics
from attnmon.metrics._together import TOGETHER, Carried, RowFigures
from attnmon.metrics.entropy import ENTROPY_STATISTICS
from attnmon.rows import RowBatch, Rows
from attnmon.scratch import Scratch

__all__ = ["ALL", "DEFAULT", "Column", "Measured", "Measurer", "expand_quantities"]

_PLAIN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # name -> (scores without bias, weights, mask) -> one number per row
    "participation_ratio": lambda z, a, m: F.participation_ratio(a, mask=m),
    "lemma1_min": lambda z, a, m: F.dispersion_constants(a, mask=m).lower,
    "lemma1_max": lambda z, a, m: F.dispersion_constants(a, mask=m).upper,
    "first_key_weight": lambda z, a, m: F.first_key_weight(a, mask=m),
    "score_spread": lambda z, a, m: F.score_spread(z, mask=m),
    "score_max": lambda z, a, m: F.score_max(z, mask=m),
}
_TOP_N = {  # name -> field of `selection_statistics`
    "separability": "ratio",
    "radius": "radius",
    "precision": "precision",
    "f_score": "f_score",
    "separability_lower": "lower",
    "separability_upper": "upper",
    "separability_upper_valid": "upper_valid",
    "distance": "distance",
    "distance_expected": "expected_paper",
    "distance_upper": "upper_bound",
    "distance_expected_lower": "expected_lower",
    "distance_expected_upper": "expected_upper",
}
_BARE = (*ENTROPY_STATISTICS, *_PLAIN)  # names without an argument
_JACOBIAN = {"jacobian": "spectral", "jacobian_frobenius": "frobenius", "jacobian_max": "max"}
_SENSITIVITY = "sensitivity"
_FIELDS = _TOP_N | _JACOBIAN
# Scores of rows whose figures are finished together: what is kept of them until then takes a few times as much memory.
_HELD = 2_000_000

ALL = (*_BARE, *_TOP_N, *_JACOBIAN, _SENSITIVITY)
DEFAULT = (
    "entropy",
    "entropy_normalized",
    "effective_keys",
    "score_spread",
    "score_max",
    "first_key_weight",
    "separability",
    "distance",
    "distance_expected",
    "jacobian",
)


@dataclass(frozen=True)
class Column:
    """One figure per head: a quantity and the arguments that it carries behind its ``@``.

    Attributes:
        base: The quantity's name without arguments.
        top_n: N of a top-N quantity.
        temperature: Multiple of the model's own temperature, of a Jacobian quantity.
        epsilon: Size of the perturbation of the raw scores, of the finite-difference sensitivity.
    """

    base: str
    top_n: int | None = None
    temperature: float | None = None
    epsilon: float | None = None

    @property
    def name(self) -> str:
        """``base``, ``base@N``, ``base@temperature`` or ``base@temperature,epsilon``."""
        arguments = [repr(x) for x in (self.top_n, self.temperature, self.epsilon) if x is not None]
        return "@".join([self.base, ",".join(arguments)]) if arguments else self.base


def expand_quantities(
    quantities: Sequence[str] | None,
    top_n: Sequence[int],
    temperatures: Sequence[float],
    epsilons: Sequence[float] = (0.1,),
) -> tuple[Column, ...]:
    """Columns for a request.

    Args:
        quantities: Names out of `ALL`; ``"default"`` and ``"all"`` stand for those lists; a name may carry its own
            argument (``"separability@32"``, ``"jacobian@0.05"``, ``"sensitivity@1.0,0.1"``), otherwise it is measured
            at each of the following. None: the default list.
        top_n: N of the top-N quantities.
        temperatures: Multiples of the model's own temperature; 1.0 is always measured beside them.
        epsilons: Perturbation sizes of the sensitivity.

    Raises:
        ValueError: A name is unknown, or carries an argument that it cannot have.
    """
    requested = ("default",) if quantities is None else quantities
    names: list[str] = []
    for name in requested:
        names += DEFAULT if name == "default" else ALL if name == "all" else (name,)
    multiples = sorted({1.0, *map(float, temperatures)})
    columns: dict[Column, None] = {}
    for name in names:
        base, _, argument = name.partition("@")
        if base not in ALL:
            close = difflib.get_close_matches(base, [*ALL, "default", "all"], n=3)
            hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise ValueError(
                f"Expected every entry of `quantities` to be one of {', '.join(ALL)}, 'default' or 'all', "
                f"but got {name!r}.{hint}"
            )
        columns.update(dict.fromkeys(_expand(name, base, argument, top_n, multiples, epsilons)))
    return tuple(columns)


def _expand(
    name: str, base: str, argument: str, top_n: Iterable[int], temperatures: Iterable[float], epsilons: Iterable[float]
) -> list[Column]:
    try:
        if base in _BARE:
            if argument:
                raise ValueError
            return [Column(base)]
        if base in _TOP_N:
            wanted = [int(argument)] if argument else sorted(set(top_n))
            if min(wanted) < 1:
                raise ValueError
            return [Column(base, top_n=n) for n in wanted]
        parts = [float(part) for part in argument.split(",")] if argument else []
        if any(not 0 < part < float("inf") for part in parts) or len(parts) > (2 if base == _SENSITIVITY else 1):
            raise ValueError
        multiples = parts[:1] or list(temperatures)
        if base in _JACOBIAN:
            return [Column(base, temperature=t) for t in multiples]
        return [Column(base, temperature=t, epsilon=e) for t in multiples for e in parts[1:] or sorted(set(epsilons))]
    except ValueError:
        form = (
            "no argument"
            if base in _BARE
            else "a whole N >= 1, as in 'separability@10'"
            if base in _TOP_N
            else "a positive multiple of the model's temperature, as in 'jacobian@0.5'"
            if base in _JACOBIAN
            else "a positive multiple of the model's temperature and an epsilon, as in 'sensitivity@1.0,0.1'"
        )
        raise ValueError(f"Expected {base!r} in `quantities` to carry {form}, but got {name!r}.") from None


@dataclass(frozen=True, eq=False)
class Measured:
    """What a `Measurer` makes of some rows.

    Attributes:
        rows: Which rows.
        values: ``(len(columns), batch, num_heads, rows)``, NaN where a row has no such figure.
        output: ``(batch, num_heads, rows, v_head_dim)``, the weighted sum of the values.
        largest: ``(batch, num_heads, rows)``, the largest absolute score, bias and all; NaN for a row that sees
            nothing.
    """

    rows: Rows
    values: Tensor
    output: Tensor
    largest: Tensor


class Measurer:
    """Makes one number per row for every column.

    Args:
        columns: What to measure.
        generator: For the random directions of the sensitivity.

    Attributes:
        scratch: Memory that the chunks may share.
        together: Whether each of the columns can be made of the rows of several calls at once.
    """

    def __init__(self, columns: Sequence[Column], generator: torch.Generator) -> None:
        self.columns = columns
        self.generator = generator
        self._bases = {column.base for column in columns}
        self.together = all(_FIELDS.get(base, base) in TOGETHER for base in self._bases)
        self._sizes = sorted({column.top_n for column in columns if column.top_n is not None})
        self._multiples = sorted({c.temperature for c in columns if c.base in _JACOBIAN and c.temperature is not None})
        self.scratch = Scratch()

    def measure(self, batches: Iterable[RowBatch], *, temperature: float, vectors: Tensor | None) -> Iterator[Measured]:
        """Measure chunks of rows of the same sequences.

        Args:
            batches: The chunks. Their scores are overwritten.
            temperature: The model's own, so that Jacobian norms are those with respect to the raw scores.
            vectors: What the keys of these sequences carry: ``(batch, num_kv_heads or 1, kv_len, d)``; None if there
                is no such thing.

        Yields:
            All rows in order, those of several chunks at once where that is faster.
        """
        figures = RowFigures(
            self.scratch,
            top_n=self._sizes,
            temperatures=self._multiples,
            want={_FIELDS.get(base, base) for base in self._bases},
        )
        carried: Carried | None = None
        waiting: list[_Waiting] = []
        for batch in batches:
            if _simple(batch, vectors):
                if carried is None and vectors is not None and self._sizes:
                    whole = vectors.expand(-1, batch.logits.shape[1], -1, -1).flatten(0, 1)
                    carried = Carried(whole, self.scratch)
                weights = figures.add(
                    batch.logits.flatten(0, 1), batch.mask.flatten(0, 1), carried, finite=batch.all_finite
                )
                if weights is not None:
                    waiting.append(self._wait(batch, weights.view(batch.logits.shape), temperature, vectors))
                    if figures.held >= _HELD:
                        yield self._joined(waiting, figures.finish(), temperature)
                        waiting = []
                    continue
            if waiting:
                yield self._joined(waiting, figures.finish(), temperature)
                waiting = []
            yield self._alone(batch, temperature, vectors)
        if waiting:
            yield self._joined(waiting, figures.finish(), temperature)

    def _wait(self, batch: RowBatch, weights: Tensor, temperature: float, vectors: Tensor | None) -> _Waiting:
        """What has to be made of a chunk before the next one takes its memory."""
        left = [column for column in self.columns if _FIELDS.get(column.base, column.base) not in TOGETHER]
        measured = _measure(batch, weights, left, temperature, _first_keys(batch, vectors), self.generator)
        known = vectors is batch.all_values and bool(self._sizes)
        output = None if known else batch.per_head(weights @ batch.values)
        return _Waiting(
            Rows(batch.sequences, batch.positions, batch.weight, batch.finite, batch.num_heads),
            batch.logits.shape[2],
            {column: batch.per_head(values) for column, values in measured.items()},
            output,
        )

    def _joined(self, waiting: Sequence[_Waiting], found: dict[str, Tensor], temperature: float) -> Measured:
        """The rows of several chunks.

        Args:
            waiting: What is known of the chunks.
            found: All else, ``(groups, rows of all chunks)`` or ``(groups, rows of all chunks, m)``.
            temperature: The model's own.
        """
        rows = Rows.joined([chunk.rows for chunk in waiting])
        batch, heads = rows.finite.shape[:2]
        sizes = [chunk.size for chunk in waiting]

        def per_head(values: Tensor) -> Tensor:
            """``(m, groups, rows of all chunks)`` to ``(m, batch, num_heads, rows)``."""
            return torch.cat([part.reshape(len(part), batch, heads, -1) for part in values.split(sizes, -1)], -1)

        output = found.pop("output", None)
        for name in _JACOBIAN.values():  # the logits are the raw scores over the temperature, hence the norm times it
            if name in found:
                found[name] = found[name] / temperature
        fields = {name: field[None] if field.dim() == 2 else field.movedim(-1, 0) for name, field in found.items()}
        starts = dict(zip(fields, accumulate(map(len, fields.values()), initial=0), strict=False))
        figures = per_head(torch.cat(list(fields.values())))
        largest = figures[starts["score_max"]]
        places, more = [], [torch.full_like(largest, float("nan"))]
        for column in self.columns:
            field = _FIELDS.get(column.base, column.base)
            if field in starts:
                places.append(starts[field] + self._place(column))
                continue
            places.append(len(figures) + (len(more) if column in waiting[0].measured else 0))
            if column in waiting[0].measured:
                more.append(torch.cat([chunk.measured[column] for chunk in waiting], -1))
        if max(places) >= len(figures):
            figures = torch.cat([figures, torch.stack(more)])
        outputs = [chunk.output for chunk in waiting if chunk.output is not None]
        return Measured(
            rows,
            figures[places],
            per_head(output.movedim(-1, 0)).movedim(0, -1)
            if output is not None and not outputs
            else torch.cat(outputs, 2),
            largest,
        )

    def _place(self, column: Column) -> int:
        """Which of the figures of its field a column is."""
        if column.top_n is not None:
            return self._sizes.index(column.top_n)
        return 0 if column.temperature is None else self._multiples.index(column.temperature)

    def _alone(self, batch: RowBatch, temperature: float, vectors: Tensor | None) -> Measured:
        """A chunk by the functions of each quantity."""
        weights = masked_softmax(batch.logits, batch.mask)
        measured = _measure(batch, weights, self.columns, temperature, _first_keys(batch, vectors), self.generator)
        for column in measured:
            if column.base in _JACOBIAN:
                measured[column] = measured[column] / temperature
        nothing = torch.full_like(batch.logits[..., 0], float("nan"))
        values = torch.stack([batch.per_head(measured.get(column, nothing)) for column in self.columns])
        largest = batch.per_head(score_max(batch.logits, mask=batch.mask))
        return Measured(batch, values, batch.per_head(weights @ batch.values), largest)


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A chunk whose figures are made together with those of the next.

    Attributes:
        rows: Which rows.
        size: How many there are to a group.
        measured: What has been made already, ``(batch, num_heads, rows)``.
        output: ``(batch, num_heads, rows, v_head_dim)``; None if that will be found with the other figures.
    """

    rows: Rows
    size: int
    measured: dict[Column, Tensor]
    output: Tensor | None


def _simple(batch: RowBatch, vectors: Tensor | None) -> bool:
    """Whether `RowFigures` may be asked."""
    logits = batch.logits
    return (
        logits.device.type == "cpu"
        and logits.dtype == torch.float32
        and batch.scores is logits
        and (vectors is None or vectors.dtype == torch.float32)
    )


def _first_keys(batch: RowBatch, vectors: Tensor | None) -> Tensor | None:
    """The vectors of the keys of a chunk, to be broadcast over its rows."""
    return None if vectors is None else vectors[:, :, None, : batch.logits.shape[-1]]


def _measure(
    batch: RowBatch,
    weights: Tensor,
    columns: Sequence[Column],
    temperature: float,
    vectors: Tensor | None,
    generator: torch.Generator,
) -> dict[Column, Tensor]:
    """One number per row, ``(batch, num_kv_heads, group * rows)``, for each column that rows over these keys have."""
    n = batch.logits.shape[-1]
    measured: dict[Column, Tensor] = {}
    if any(column.base in ENTROPY_STATISTICS for column in columns):
        statistics = entropy_statistics(weights, mask=batch.mask)
        measured |= {column: statistics[column.base] for column in columns if column.base in ENTROPY_STATISTICS}
    for column in columns:
        if column.base in _PLAIN:
            measured[column] = _PLAIN[column.base](batch.scores, weights, batch.mask)
    sizes = sorted({c.top_n for c in columns if c.top_n is not None and c.top_n < n})
    if vectors is not None and sizes:
        fields = {_TOP_N[c.base] for c in columns if c.base in _TOP_N}
        found = selection_statistics(weights, vectors, sizes, mask=batch.mask, want=sorted(fields))
        for column in columns:
            if column.top_n in sizes:
                measured[column] = found[_TOP_N[column.base]][..., sizes.index(column.top_n)]
    multiples = sorted({c.temperature for c in columns if c.base in _JACOBIAN and c.temperature is not None})
    if multiples:
        wanted = sorted({_JACOBIAN[c.base] for c in columns if c.base in _JACOBIAN})
        norms = jacobian_norms(batch.logits, multiples, mask=batch.mask, norms=wanted)
        for column in columns:
            if column.base in _JACOBIAN and column.temperature is not None:
                measured[column] = norms[_JACOBIAN[column.base]][..., multiples.index(column.temperature)]
    for column in columns:
        if column.base == _SENSITIVITY and column.temperature is not None and column.epsilon is not None:
            measured[column] = F.finite_difference_sensitivity(
                batch.logits * temperature,
                column.temperature * temperature,
                column.epsilon,
                mask=batch.mask,
                generator=generator,
            )
    return measured
