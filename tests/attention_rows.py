"""The rows of a model's attention one by one, and their means: what an analysis has to reproduce."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnmon.analysis import AnalysisOptions
from attnmon.capture import attach
from attnmon.functional import (
    active_share,
    attention_entropy,
    score_spread,
    separability,
    separability_bounds,
    softmax_jacobian_norm,
    top_n_distance,
)


@dataclass
class LayerRows:
    """One layer's heads: scaled scores and weights ``(heads, rows, n)``, vectors ``(heads, n, d)``."""

    scores: Tensor
    weights: Tensor
    mask: Tensor
    vectors: Tensor
    temperature: float


def captured_rows(model: torch.nn.Module, tokens: Tensor, vectors: str, normalize: bool) -> list[LayerRows]:
    layers: list[LayerRows] = []

    def on_call(call):
        group = call.num_heads // call.num_kv_heads
        key, value = (t[0].repeat_interleave(group, 0) for t in (call.key, call.value))
        scores = call.query[0] @ key.mT * call.scale
        rows, n = scores.shape[1:]
        mask = torch.ones(rows, n, dtype=torch.bool)
        if call.causal_offset is not None:
            mask = torch.arange(n) <= torch.arange(rows)[:, None] + call.causal_offset
        if call.attn_mask is not None:
            mask = mask & (call.attn_mask[0, 0] if call.attn_mask.dtype == torch.bool else call.attn_mask[0, 0] == 0)
        mask = mask.expand(scores.shape)
        carried = {"value": value, "hidden": call.hidden, "embedding": call.embedding}[vectors]
        carried = carried if vectors == "value" else carried.expand(call.num_heads, -1, -1)
        if normalize:
            carried = torch.nn.functional.normalize(carried, dim=-1)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        layers.append(LayerRows(scores, weights, mask, carried.clone(), 1 / call.scale))

    context = frozenset({"hidden", "embedding"})
    model.eval()
    with torch.no_grad(), attach(model, on_call, lambda *skip: None, context=context):
        model(tokens)
    return layers


def means(layers: list[LayerRows], options: AnalysisOptions) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """(task, quantity) -> means over the rows ``(heads, *grid)`` and how many rows each is over."""
    found: dict[tuple[str, str], list[Tensor]] = {}

    def put(task: str, quantity: str, values: Tensor) -> None:
        found.setdefault((task, quantity), []).append(values)

    for layer in layers:
        n = layer.weights.shape[-1]
        mask = None if options.convention == "full" else layer.mask
        vectors = layer.vectors[:, None]

        def sizes(wanted, n=n):
            return [size for size in wanted if size < n]

        def padded(values, wanted):
            short = torch.full((*values.shape[:-1], len(wanted) - values.shape[-1]), torch.nan)
            return torch.cat([values, short.to(values)], -1)

        if "distance" in options.tasks:
            distances = top_n_distance(layer.weights, vectors, sizes(options.top_n), mask=mask)
            for name, values in distances._asdict().items():
                put("distance", name, padded(values, options.top_n))
        if "critical" in options.tasks:
            wanted = range(1, options.critical_top_n + 1)
            distances = top_n_distance(layer.weights, vectors, sizes(wanted), mask=mask)
            for name in ("distance", "expected_paper"):
                put("critical", name, padded(getattr(distances, name), wanted))
        if "separability" in options.tasks:
            wanted = options.separability_top_n
            shares = separability(layer.weights, vectors, sizes(wanted), mask=mask)
            bounds = separability_bounds(layer.weights, vectors, sizes(wanted), mask=mask)
            for name, values in ({"ratio": shares.ratio} | bounds._asdict()).items():
                put("separability", name, padded(values, wanted))
        if "sensitivity" in options.tasks:
            for name, norm in (("spectral", "spectral"), ("max", "max")):
                raw = layer.scores * layer.temperature
                put("jacobian", name, softmax_jacobian_norm(raw, options.temperatures, mask=layer.mask, norm=norm))
        if "summary" in options.tasks:
            put("summary", "entropy", attention_entropy(layer.weights, mask=layer.mask))
            put("summary", "entropy_normalized", attention_entropy(layer.weights, mask=layer.mask, normalize=True))
            put("summary", "active_share", active_share(layer.weights, mask=layer.mask))
            put("summary", "score_spread", score_spread(layer.scores, mask=layer.mask))
            own = softmax_jacobian_norm(layer.scores * layer.temperature, layer.temperature, mask=layer.mask)
            put("summary", "jacobian", own)
    out = {}
    for key, parts in found.items():
        values = torch.cat(parts).double().numpy()
        usable = np.isfinite(values)
        count = usable.sum(1)
        total = np.where(usable, values, 0.0).sum(1)
        out[key] = np.where(count > 0, total / np.maximum(count, 1), np.nan), count
    return out
