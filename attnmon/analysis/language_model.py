"""Running a causal language model on tokens, and its next-token loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["check_padding", "check_tokens", "logits_of", "model_options", "next_token_loss"]

_LOSS_ELEMENTS = 4_000_000  # logits that are taken to float64 at a time


def check_tokens(tokens: Tensor) -> None:
    """Refuse what is not ``(batch, length)`` integers with a next token."""
    integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not isinstance(tokens, Tensor) or tokens.dtype not in integers:
        came = str(tokens.dtype) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(
            f"Expected `tokens` to be a tensor of integers (batch, length), but got {came}. Pass the tokenizer's "
            "`input_ids`."
        )
    if tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise ValueError(
            "Expected `tokens` to have shape (batch, length) with a length of at least 2, so that there is a next "
            f"token, but got shape {tuple(tokens.shape)}. Add a batch dimension with `tokens[None]`, or pass more text."
        )


def check_padding(mask: Tensor | None, tokens: Tensor) -> None:
    """Refuse a padding mask that is not bool or not of the tokens' shape."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        came = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"Expected `mask` to be a bool tensor, True where there is a token, but got {came}. Convert ones and zeros "
            "with `mask.bool()`."
        )
    if mask.shape != tokens.shape:
        raise ValueError(
            f"Expected `mask` to have the shape of `tokens`, {tuple(tokens.shape)}, but got {tuple(mask.shape)}."
        )


def model_options(model: nn.Module, mask: Tensor | None) -> dict[str, Any]:
    """What the model is given beside the tokens."""
    names = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {}
    if "use_cache" in names:
        options["use_cache"] = False
    if mask is not None:
        if "attention_mask" in names:
            options["attention_mask"] = mask.long()
        elif bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise ValueError(
                "Expected `mask` to have padding on the right only, since the forward of "
                f"{type(model).__name__} takes no `attention_mask`, but got padding before a token. Pad on the right."
            )
    return options


def logits_of(output: Any, tokens: Tensor) -> Tensor:
    """The logits in what a language model returned."""
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits")
    if logits is None and isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if logits is None:
        logits = output
    shape = tuple(tokens.shape)
    if (
        not isinstance(logits, Tensor)
        or not logits.is_floating_point()
        or logits.dim() != 3
        or logits.shape[:2] != shape
    ):
        shown = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
        raise ValueError(
            f"Expected `model` to return logits ({shape[0]}, {shape[1]}, vocabulary) for `tokens` of shape {shape}, as "
            f"they are or as `.logits`, but got {shown}. Pass the model with its language-modelling head, "
            "returning logits for every position."
        )
    if int(tokens.max()) >= logits.shape[2]:
        raise ValueError(
            f"Expected `tokens` to be below the size of the vocabulary that `model` predicts, {logits.shape[2]}, but "
            f"got {int(tokens.max())}. Use the model's own tokenizer, and the model with its language-modelling head."
        )
    return logits


def next_token_loss(logits: Tensor, tokens: Tensor, counted: Tensor | None) -> float:
    """Mean over the counted pairs (all, if None) of -log p(next token), in float64."""
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    step = max(1, _LOSS_ELEMENTS // logits.shape[2])
    for sequence in range(logits.shape[0]):
        for start in range(0, logits.shape[1] - 1, step):
            part = slice(start, min(start + step, logits.shape[1] - 1))
            scores = logits[sequence, part].double()
            targets = tokens[sequence, part.start + 1 : part.stop + 1].long().to(scores.device)
            losses = scores.logsumexp(dim=-1) - scores.gather(-1, targets[:, None]).squeeze(-1)
            if counted is not None:
                losses = losses.where(counted[sequence, part].to(losses.device), 0.0)
            total += losses.sum()
    pairs = tokens.shape[0] * (tokens.shape[1] - 1) if counted is None else int(counted.sum())
    return float(total) / pairs
