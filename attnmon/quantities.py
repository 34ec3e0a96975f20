"""The names of what can be asked of a monitor, and the step from rows to one number per row for each of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmon import functional as F
from attnmon.masks import masked_softmax
from attnmon.metrics import entropy_statistics, jacobian_norms, score_max, selection_statistics
from attnmon.metrics._together import Carried, Scratch, row_figures
from attnmon.metrics.entropy import ENTROPY_STATISTICS
from attnmon.rows import RowBatch

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
    """What `measure` makes of some rows.

    Attributes:
        values: ``(len(columns), batch, num_heads, rows)``, NaN where a row has no such figure.
        output: ``(batch, num_heads, rows, v_head_dim)``, the weighted sum of the values.
        largest: ``(batch, num_heads, rows)``, the largest absolute score, bias and all; NaN for a row that sees
            nothing.
    """

    values: Tensor
    output: Tensor
    largest: Tensor


class Measurer:
    """Makes one number per row for every column, of one chunk of rows after the other.

    Args:
        columns: What to measure.
        generator: For the random directions of the sensitivity.
    """

    def __init__(self, columns: Sequence[Column], generator: torch.Generator) -> None:
        self.columns = columns
        self.generator = generator
        self._bases = {column.base for column in columns}
        self._sizes = sorted({column.top_n for column in columns if column.top_n is not None})
        self._multiples = sorted({c.temperature for c in columns if c.base in _JACOBIAN and c.temperature is not None})
        self._scratch = Scratch()
        self._carried: tuple[Tensor, Carried] | None = None

    def measure(self, batch: RowBatch, *, temperature: float, vectors: Tensor | None) -> Measured:
        """Measure a chunk.

        Args:
            batch: The rows. Their scores are overwritten.
            temperature: The model's own, so that Jacobian norms are those with respect to the raw scores.
            vectors: What the keys of the call carry: ``(batch, num_kv_heads or 1, kv_len, d)``; None if there is no
                such thing.
        """
        known = self._together(batch, vectors)
        weights = masked_softmax(batch.logits, batch.mask) if known is None else known["weights"]
        measured = {} if known is None else self._named(known)
        # Views of a chunk's scores: what is the same for all rows is there once.
        n = batch.logits.shape[-1]
        carried = None if vectors is None else vectors[:, :, None, :n]
        left = [column for column in self.columns if column not in measured]
        measured |= _measure(batch, weights, left, temperature, carried, self.generator)
        for column in self.columns:
            if column.base in _JACOBIAN:  # the logits are the raw scores over the temperature, hence the norm times it
                measured[column] = measured[column] / temperature
        nothing = torch.full_like(batch.logits[..., 0], float("nan"))
        values = torch.stack([batch.per_head(measured.get(column, nothing)) for column in self.columns])
        own = known is not None and "output" in known and vectors is batch.all_values
        output = known["output"].view(*batch.logits.shape[:3], -1) if own and known else weights @ batch.values
        largest = known["score_max"].view(batch.logits.shape[:3]) if known else score_max(batch.logits, mask=batch.mask)
        return Measured(values, batch.per_head(output), batch.per_head(largest))

    def release(self) -> None:
        """Lets go of what belongs to the keys of the last call."""
        self._carried = None

    def _together(self, batch: RowBatch, vectors: Tensor | None) -> dict[str, Tensor] | None:
        """What can be made in one pass, ``(batch * num_kv_heads, group * rows)`` each and the weights as they are."""
        logits = batch.logits
        if logits.device.type != "cpu" or logits.dtype != torch.float32 or batch.scores is not logits:
            return None
        shape = logits.shape
        sizes = [size for size in self._sizes if size < shape[-1]]
        carried = None
        if vectors is not None and sizes and vectors.dtype == torch.float32:
            if self._carried is None or self._carried[0] is not vectors:
                whole = vectors.expand(-1, shape[1], -1, -1).flatten(0, 1)
                self._carried = (vectors, Carried(whole, self._scratch))
            carried = self._carried[1]
        found = row_figures(
            logits.flatten(0, 1),
            batch.mask.flatten(0, 1),
            carried,
            self._scratch,
            top_n=sizes,
            temperatures=self._multiples,
            want={_FIELDS.get(base, base) for base in self._bases},
        )
        if found is not None:
            found["weights"] = found["weights"].view(shape)
        return found

    def _named(self, found: dict[str, Tensor]) -> dict[Column, Tensor]:
        shape = found["weights"].shape
        sizes = [size for size in self._sizes if size < shape[-1]]
        named = {}
        for column in self.columns:
            field = found.get(_FIELDS.get(column.base, column.base))
            if field is None:
                continue
            if column.top_n is not None:
                if column.top_n not in sizes:
                    continue
                field = field[..., sizes.index(column.top_n)]
            elif column.temperature is not None:
                field = field[..., self._multiples.index(column.temperature)]
            named[column] = field.reshape(shape[:3])
        return named


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
