"""What a running model loses when every row of its attention keeps the largest weights only."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from attnmon.agreement import disagrees, full_precision
from attnmon.analysis.language_model import check_padding, check_tokens, logits_of, model_options, next_token_loss
from attnmon.analysis.look import count_sinks
from attnmon.capture import attach, describe_search, find_attention, named_layers
from attnmon.masks import masked_softmax
from attnmon.metrics._checks import _check_flag, _check_positive, _check_top_n
from attnmon.rerun import undisturbed
from attnmon.rows import RowBatch, all_rows
from attnmon.types import AttentionCall

__all__ = ["EffectiveSetSize", "effective_set_size", "truncated_loss"]


class EffectiveSetSize(NamedTuple):
    """The effective attention set size of a model, and the losses that it was read off.

    Attributes:
        size: ``N*_tau``, in keys: a number if `tau` is one, else a tuple with one entry per tau. None where even the
            largest N of a given grid raises the loss by more than tau.
        tau: The share, or shares, by which the loss may rise.
        loss: Mean next-token negative log-likelihood of the whole model, in nats per token.
        losses: The same with N keys per row, by N, ascending: all that were evaluated.
        renormalize: Whether the kept weights were made to sum to 1 again.
        longest_row: Largest number of keys that a row could see; with this many and more, the model is whole.
    """

    size: int | tuple[int | None, ...] | None
    tau: float | tuple[float, ...]
    loss: float
    losses: dict[int, float]
    renormalize: bool
    longest_row: int


def truncated_loss(
    model: nn.Module,
    tokens: Tensor,
    top_n: int | None,
    *,
    renormalize: bool = False,
    mask: Tensor | None = None,
) -> float:
    r"""Measure a language model's loss while every row of attention keeps only its largest weights.

    At every layer, head and query, the head's output ``sum_j a_j v_j`` becomes ``sum_{j in I_N} a_j v_j``, or
    ``sum_{j in I_N} a_j v_j / sum_{j in I_N} a_j`` if renormalised, with ``I_N`` the N visible keys of the largest
    weight, ties to the lower index. Later layers work with what earlier ones now give them. A row that sees N keys or
    fewer keeps the output that the model computed, to the last bit. An attention sink (a learned logit beside the
    keys' scores) counts as a key: it may be one of the N, and keeping it adds nothing to the output.

    Source: effective attention set size in "Retrieval Capacity of Self-Attention Under Competition" (2026).

    Reading: close to the whole model's loss, the N keys of each row carry all that the model uses. Unrenormalised,
    small N also shrinks the heads' outputs; renormalised, it tells a little less of how much weight lay elsewhere.

    The model runs in eval mode, without gradients and uncompiled, and is left as it was found. Attention is captured
    where `attnmon.capture.find_attention` finds it; mixing of positions of another kind (convolutions, recurrences)
    goes on as before.

    Args:
        model: A causal language model: called with tokens, it returns logits ``(batch, length, vocabulary)``, bare or
            as ``.logits`` or as the first entry of a tuple.
        tokens: ``(batch, length)``, integers, length at least 2. One forward pass: mind the memory.
        top_n: N, at least 1; None runs the model as it is.
        renormalize: Whether the kept weights are divided by their sum.
        mask: ``(batch, length)``, bool, True = token, False = padding; None if all are. It is given to the model as
            ``attention_mask`` if that has such an argument; a model without one takes padding on the right only.

    Returns:
        Mean negative log-likelihood of each token (but the first) given those before it, in nats per token, at
        least 0. Pairs with padding are left out of the mean, which is taken in float64.

    Raises:
        TypeError: If `tokens` are not integers, `mask` is not bool, `top_n` is not an integer or `model` no module.
        ValueError: If `tokens` or `mask` has another shape, `top_n` is below 1, no attention is found, the model gives
            no logits, a query sees keys behind it, or some layer's attention cannot be replaced: each says why.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Toy(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        ...
        ...     def forward(self, tokens):
        ...         x = self.embed(tokens)[:, None]  # one head
        ...         return self.head(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0])
        >>> model, tokens = Toy(), torch.arange(11)[None]
        >>> truncated_loss(model, tokens, 11) == truncated_loss(model, tokens, None)
        True
        >>> truncated_loss(model, tokens, 2) == truncated_loss(model, tokens, None)
        False
    """
    if top_n is not None:
        sizes, single = _check_top_n(top_n)
        if not single:
            raise TypeError(f"Expected `top_n` to be one integer or None, but got {top_n!r}. Call once for each.")
    _check_flag("renormalize", renormalize)
    run = _Run(model, tokens, mask, renormalize)
    with undisturbed(model):
        return run.loss(None if top_n is None else sizes[0])


def effective_set_size(
    model: nn.Module,
    tokens: Tensor,
    tau: float | Sequence[float] = 0.05,
    *,
    renormalize: bool = False,
    top_n: int | Iterable[int] | None = None,
    mask: Tensor | None = None,
    progress: bool = False,
) -> EffectiveSetSize:
    r"""Find how many keys per row a language model needs to predict nearly as well as with all of them.

    ``N*_tau`` is the least N with ``loss(N) <= (1 + tau) loss``, where ``loss(N)`` is that of `truncated_loss` and
    ``loss`` that of the whole model. It is looked for by doubling N, from 1 to the longest row, and by bisection
    between the last N that fails and the first from which on every evaluated N holds. The loss need not fall steadily
    with N: the result is the least evaluated N from which on all larger evaluated ones hold, and a smaller one may
    hold, too. Several tau share their evaluations, of which there are about ``2 log2(longest row)``, each a little
    slower than a forward pass with materialised attention.

    Source: effective attention set size in "Retrieval Capacity of Self-Attention Under Competition" (2026).

    Reading: small against the length of the rows, attention is selective and its selection is what the model lives
    on. Near the length, the model spreads what it uses over everything; arXiv 2508.17821 warns from 6 % of it on.

    Args:
        model: A causal language model, as for `truncated_loss`.
        tokens: ``(batch, length)``, integers, length at least 2.
        tau: Share by which the loss may rise, above 0, or several: 0.05 is 5 %.
        renormalize: Whether the kept weights are divided by their sum.
        top_n: Evaluate these N instead of searching: an integer of at least 1, or several. `size` is then one of them.
        mask: ``(batch, length)``, bool, True = token, as for `truncated_loss`.
        progress: Whether to write a line to stderr for each evaluation.

    Returns:
        `EffectiveSetSize`: sizes in keys, losses in nats per token. With a search, ``losses[longest_row]`` is the whole
        model's without another run, since it is the same model.

    Raises:
        TypeError: As for `truncated_loss`, or if `tau` is not a number.
        ValueError: As for `truncated_loss`, or if `tau` is not above 0, or the whole model's loss is not finite.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Toy(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        ...
        ...     def forward(self, tokens):
        ...         x = self.embed(tokens)[:, None]  # one head
        ...         return self.head(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0])
        >>> result = effective_set_size(Toy(), torch.arange(11)[None], tau=(0.05, 1000.0))
        >>> result.longest_row, result.size[1]
        (11, 1)
        >>> result.losses[11] == result.loss
        True
    """
    taus, single = _check_positive("tau", tau)
    grid = None if top_n is None else sorted(set(_check_top_n(top_n)[0]))
    _check_flag("renormalize", renormalize)
    _check_flag("progress", progress)
    run = _Run(model, tokens, mask, renormalize)
    losses: dict[int, float] = {}
    with undisturbed(model):
        loss = run.loss(None)
        if not math.isfinite(loss):
            raise ValueError(
                f"Expected the loss of the whole model to be finite, but got {loss}. A share of it means nothing: look "
                "for NaN in the model's parameters, or for overflow in its dtype."
            )
        _report(progress, f"all keys: {loss:.4f} nats per token")

        def evaluate(size: int) -> None:
            begun = time.perf_counter()
            losses[size] = run.loss(size)
            seconds = time.perf_counter() - begun
            _report(progress, f"N = {size}: {losses[size]:.4f}, {losses[size] - loss:+.4f} ({seconds:.1f} s)")

        limits = [(1 + share) * loss for share in taus]
        if grid is None:
            _search(evaluate, losses, loss, limits, lambda: run.longest)
        else:
            for size in grid:
                evaluate(size)
    sizes = tuple(_bracket(losses, limit)[1] for limit in limits)
    return EffectiveSetSize(
        size=sizes[0] if single else sizes,
        tau=taus[0] if single else taus,
        loss=loss,
        losses=dict(sorted(losses.items())),
        renormalize=renormalize,
        longest_row=run.longest,
    )


def _bracket(losses: Mapping[int, float], limit: float) -> tuple[int, int | None]:
    """The largest evaluated N that fails, 0 if none does, and the least above it, None if there is none."""
    fails = max((size for size, loss in losses.items() if not loss <= limit), default=0)
    return fails, min((size for size in losses if size > fails), default=None)


def _search(
    evaluate: Callable[[int], None],
    losses: dict[int, float],
    whole: float,
    limits: Sequence[float],
    longest: Callable[[], int],
) -> None:
    """Fill `losses` until, for every limit, the N below the first that holds is known to fail."""
    evaluate(1)  # which also shows how long the rows are
    size = 2
    while size < longest():
        evaluate(size)
        size *= 2
    losses[longest()] = whole
    while True:
        gaps = [(fails, holds) for fails, holds in (_bracket(losses, limit) for limit in limits) if holds is not None]
        gaps = [(fails, holds) for fails, holds in gaps if holds - fails > 1]
        if not gaps:
            return
        evaluate(sum(gaps[0]) // 2)


def _report(progress: bool, line: str) -> None:
    if progress:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class _Run:
    """Runs of one model on the same tokens. Must be used inside `undisturbed`.

    Attributes:
        longest: Largest number of keys that a row saw in the runs so far, 0 before the first that was truncated.
    """

    def __init__(self, model: nn.Module, tokens: Tensor, mask: Tensor | None, renormalize: bool) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Expected `model` to be a torch.nn.Module, but got {type(model).__name__}.")
        check_tokens(tokens)
        check_padding(mask, tokens)
        layers = {site.layer for site in find_attention(model)}
        self.sites = {module: layer for module, layer in named_layers(model).items() if layer in layers}
        self.model = model
        self.renormalize = renormalize
        device = next((parameter.device for parameter in model.parameters()), tokens.device)
        self.tokens = tokens.to(device)
        self.counted: Tensor | None = None
        self.options = model_options(model, mask)
        if mask is not None:
            mask = mask.to(device)
            self.counted = mask[:, 1:] & mask[:, :-1]
            if not bool(self.counted.any()):
                raise ValueError(
                    "Expected `mask` to leave at least one pair of neighbouring tokens, but got none. True = token."
                )
            self.options = {
                key: value.to(device) if isinstance(value, Tensor) else value for key, value in self.options.items()
            }
        self.longest = 0

    def loss(self, top_n: int | None) -> float:
        """Loss of the whole model, or with `top_n` keys per row."""
        if top_n is None:
            return self._loss()
        truncation = _Truncation(top_n, self.renormalize)
        ran: set[str] = set()
        with attach(self.model, _ignore, _refuse, replace=truncation), _noting(self.sites, ran):
            loss = self._loss()
        if not truncation.layers:
            raise ValueError(
                f"Expected `model` to contain attention that can be replaced, but got {type(self.model).__name__}: "
                f"{describe_search(self.model)}"
            )
        for layer in self.sites.values():
            if layer in ran and layer not in truncation.layers:
                _refuse(layer, "it ran, and its attention was not seen: it must have attended in another way")
        self.longest = max(self.longest, truncation.longest)
        return loss

    def _loss(self) -> float:
        return next_token_loss(
            logits_of(self.model(self.tokens, **self.options), self.tokens), self.tokens, self.counted
        )


class _Truncation:
    """What takes the place of a call's output when each row keeps its `top_n` largest weights.

    Attributes:
        layers: Paths of the modules whose calls were seen.
        longest: Largest number of keys that a row saw.
    """

    def __init__(self, top_n: int, renormalize: bool) -> None:
        self.top_n = top_n
        self.renormalize = renormalize
        self.layers: set[str] = set()
        self.longest = 0

    def __call__(self, call: AttentionCall) -> Tensor | None:
        if call.unexplained:
            named = ", ".join(f"`{name}`" for name in call.unexplained)
            _refuse(call.layer, f"its attention may depend on {named}, which its arguments alone do not explain")
        if call.output is None:
            _refuse(call.layer, "its output cannot be compared with its arguments: it applies dropout in eval mode")
        self.layers.add(call.layer)
        with full_precision(call.query.device):
            return self._truncated(call, call.output)

    def _truncated(self, call: AttentionCall, output: Tensor) -> Tensor | None:
        device = call.query.device
        wrong, behind = (torch.zeros((), dtype=torch.bool, device=device) for _ in range(2))
        longest = torch.zeros((), dtype=torch.int64, device=device)
        order = _order(call)
        answer: Tensor | None = None
        start = 0
        for batch in all_rows(call):
            rows = slice(start, start + batch.positions.shape[1])
            start = rows.stop
            weights = masked_softmax(batch.logits, batch.mask)
            wrong |= disagrees(output, batch, weights)
            if order is not None:
                behind |= _sees_behind(call, batch, *order)
            visible = batch.per_head(batch.mask.sum(dim=-1))  # (batch, num_heads, rows)
            longest = torch.maximum(longest, visible.amax())
            if self.top_n >= weights.shape[-1]:
                continue
            kept = _keep_largest(weights, self.top_n)
            if self.renormalize:
                kept = kept / kept.sum(dim=-1, keepdim=True)
            if answer is None:
                answer = output.to(batch.values.dtype, copy=True)
            changed = (visible > self.top_n) & batch.finite
            rest = answer[:, :, rows]
            answer[:, :, rows] = torch.where(changed[..., None], batch.per_head(kept @ batch.values), rest)
        if bool(behind):
            raise ValueError(
                "Expected `model` to be a causal language model, whose queries see no key behind them, but those of "
                f"`{call.layer}` do. The next-token loss of an encoder means nothing: pass a decoder."
            )
        if bool(wrong):
            _refuse(call.layer, "the output recomputed from its query, key and value is not the one it returned")
        self.longest = max(self.longest, int(longest))
        return answer


def _keep_largest(weights: Tensor, top_n: int) -> Tensor:
    """`weights` (..., n), with 0 for all but the `top_n < n` largest of each row, ties to the lower index."""
    least = weights.topk(top_n, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    kept = weights >= least
    # Ties at 0 may go either way. Others share the places that larger weights leave.
    if bool(((kept.sum(dim=-1, keepdim=True) > top_n) & (least > 0)).any()):
        tied = weights == least
        places = top_n - (weights > least).sum(dim=-1, keepdim=True)
        kept &= ~tied | (tied.cumsum(dim=-1) <= places)
    return weights.masked_fill(~kept, 0.0)


def _order(call: AttentionCall) -> tuple[int, int] | None:
    """How far the keys' positions run ahead of their indices, and where sinks begin; None if causal by its flag."""
    keys = call.key.shape[2] - count_sinks(call)  # sinks have no position
    ahead = keys - call.query.shape[2]
    return None if call.causal_offset is not None and call.causal_offset <= ahead else (ahead, keys)


def _sees_behind(call: AttentionCall, batch: RowBatch, ahead: int, keys: int) -> Tensor:
    """Whether a query that is a token sees a key of a later position."""
    index = torch.arange(batch.mask.shape[-1], device=batch.mask.device)
    behind = (index > batch.positions[..., None] + ahead) & (index < keys)  # (batch, rows, n)
    seen = (batch.per_head(batch.mask) & behind[:, None]).any(dim=-1).any(dim=1)
    if call.valid is not None:
        seen = seen & call.valid.bool().gather(-1, batch.positions)
    return seen.any()


def _ignore(call: AttentionCall) -> None:
    pass


def _refuse(layer: str, reason: str) -> NoReturn:
    raise ValueError(
        f"Expected the attention of every layer of `model` to be replaceable, but that of `{layer}` is not: {reason}. "
        "A figure for a model that is truncated in part would mislead."
    )


@contextmanager
def _noting(sites: Mapping[nn.Module, str], ran: set[str]) -> Iterator[None]:
    """Within, `ran` gathers the paths of the modules whose forward is called."""
    handles = []
    try:
        for module, layer in sites.items():
            handles.append(module.register_forward_pre_hook(lambda *_, layer=layer: ran.add(layer)))
        yield
    finally:
        for handle in handles:
            handle.remove()
