"""What surrounds an attention call: which positions are tokens, their labels, and the vectors they came from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnmon.capture.discovery import forward_parameters, site_kind
from attnmon.masks import hides

__all__ = ["Context", "Hook", "padding_of_mask"]


def inert(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """What a hook of ours becomes in a copy of the model: it takes itself off when the copy first runs."""
    for hooks, *flags in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
    ):
        for key in [key for key, hook in hooks.items() if hook is inert]:
            del hooks[key]
            for flag in flags:
                flag.pop(key, None)


class Hook:
    """A forward hook that stays behind when the model is copied or pickled."""

    def __init__(self, function: Callable[..., None], guard: Callable[[Callable[[], None]], None]) -> None:
        self.function = function
        self.guard = guard

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        # A compiler that meets the hook leaves it out of the graph.
        if not torch.compiler.is_compiling():
            self.guard(partial(self.function, *args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> str | tuple[Any, ...]:
        return (_make_inert, ())


def _make_inert() -> Callable[..., None]:
    return inert


class _Frame:
    """The padding mask and labels that one model (or encoder, or decoder) was called with."""

    def __init__(self, module: nn.Module, mask: Tensor | None, labels: Tensor | None) -> None:
        self.module = module
        self.mask = mask
        self.labels = labels
        config = getattr(module, "config", None)
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))


class Context:
    """Collects, through hooks, what `extras` asks for, and the padding masks always.

    Args:
        layers: The watched modules with their paths.
        extras: Subset of ``{"hidden", "embedding", "labels"}``.
        guard: Runs what the hooks do.
    """

    def __init__(
        self,
        layers: dict[nn.Module, str],
        extras: frozenset[str],
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        self.extras = extras
        self._guard = guard
        self.tokens: tuple[Tensor | None, Tensor | None] | None = None
        self._frames: list[_Frame] = []
        self._hidden: dict[nn.Module, Tensor] = {}
        self._embedding: dict[nn.Module, dict[tuple[int, int], Tensor]] = {}
        self._handles: list[Any] = []
        try:
            self._hook(layers)
        except BaseException:
            self.close()
            raise

    def _hook(self, layers: dict[nn.Module, str]) -> None:
        covered: list[str] = []  # paths of modules that are told the mask; their descendants are told by them
        for module, layer in layers.items():
            below = any(path == "" or layer == path or layer.startswith(path + ".") for path in covered)
            names = forward_parameters(module)
            told = "attention_mask" in names
            # A pretrained model without the argument, an image tower say, has no padding mask: not even its parent's.
            untold = not {"attention_mask", "kwargs"} & set(names) and _is_pretrained(module)
            if untold or (told and (not below or _is_pretrained(module))):
                if not below and told:
                    covered.append(layer)
                self._add(module.register_forward_pre_hook(Hook(self._enter, self._guard), with_kwargs=True))
                self._add(module.register_forward_hook(Hook(self._leave, self._guard), always_call=True))
            if "embedding" in self.extras and isinstance(module, nn.Embedding):
                self._add(module.register_forward_hook(Hook(self._embed, self._guard)))
            if "hidden" in self.extras and site_kind(module) in ("huggingface", "sdpa"):
                self._add(module.register_forward_pre_hook(Hook(self._see_hidden, self._guard), with_kwargs=True))
        root = next(iter(layers), None)
        if root is not None and "embedding" in self.extras:
            self._add(root.register_forward_pre_hook(Hook(self._forget, self._guard)))

    def _add(self, handle: Any) -> None:
        self._handles.append(handle)

    def close(self) -> None:
        """Remove every hook and forget every tensor."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._frames.clear()
        self._hidden.clear()
        self._embedding.clear()
        self.tokens = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for depth, frame in enumerate(self._frames):  # left over from a forward that did not end
            if frame.module is module:
                del self._frames[depth:]
                break
        if not self._frames:
            self._embedding.clear()
        mask = _argument(module, args, kwargs, "attention_mask")
        if not (isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point()):
            mask = None
        labels = _argument(module, args, kwargs, "labels") if "labels" in self.extras else None
        if not (isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()):
            labels = None
        self._frames.append(_Frame(module, mask, labels))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for depth, frame in enumerate(self._frames):
            if frame.module is module:
                del self._frames[depth:]
                break

    def _forget(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._embedding.clear()

    def _embed(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() == 3:
            self._embedding.setdefault(module, {})[output.shape[0], output.shape[1]] = output.detach()

    def _see_hidden(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("key_value_states", "encoder_hidden_states", "hidden_states", "x")
        candidates = [kwargs.get(names[0]), kwargs.get(names[1]), *args[:1], kwargs.get(names[2]), kwargs.get(names[3])]
        for candidate in candidates:
            if isinstance(candidate, Tensor) and candidate.dim() == 3 and candidate.is_floating_point():
                self._hidden[module] = candidate.detach()
                return
        self._hidden.pop(module, None)

    @property
    def known(self) -> tuple[Tensor | None, Tensor | None]:
        """Padding mask and labels of what runs now, ``(batch, length)`` each: as found, else as set from outside."""
        if not self._frames:
            return (None, None) if self.tokens is None else self.tokens
        if any(frame.is_encoder_decoder for frame in self._frames):
            return None, None
        mask = next((frame.mask for frame in reversed(self._frames) if frame.mask is not None), None)
        labels = next((frame.labels for frame in reversed(self._frames) if frame.labels is not None), None)
        outside = (None, None) if self.tokens is None else self.tokens
        return (outside[0] if mask is None else mask), (outside[1] if labels is None else labels)

    def hidden(self, module: nn.Module, batch: int, kv_len: int) -> Tensor | None:
        """Input that the keys of `module` were made from, if it is known and has as many positions as the keys."""
        seen = self._hidden.get(module)
        if seen is not None and seen.shape[1] == kv_len:
            del self._hidden[module]
        return seen if seen is not None and seen.shape[:2] == (batch, kv_len) else None

    def embedding(self, module: nn.Module, batch: int, kv_len: int) -> Tensor | None:
        """Token embeddings of the keys' positions: those that were looked up first, at these lengths."""
        for outputs in self._embedding.values():
            if (batch, kv_len) in outputs:
                return outputs[batch, kv_len]
        return None

    def valid(self, batch: int, q_len: int, kv_len: int, *, cached: bool) -> Tensor | None:
        """Which of the queries are tokens: ``(batch, q_len)`` bool, or None if no padding mask of that shape is known.

        Args:
            batch: Sequences in the call.
            q_len: Queries in the call.
            kv_len: Keys in the call.
            cached: Whether the queries are the last of the keys' positions, as with a key-value cache.
        """
        known = self._frames[-1].mask if self._frames else None
        if known is None:
            known = self._from_outside(0)
        if known is None or known.dim() != 2 or known.shape[0] != batch:
            return None
        if known.shape[1] == q_len:
            return known if known.dtype == torch.bool else known != 0
        if cached and known.shape[1] == kv_len and kv_len > q_len:
            known = known[:, -q_len:]
            return known if known.dtype == torch.bool else known != 0
        return None

    def labels(self, layer: str, batch: int, q_len: int) -> Tensor | None:
        """Labels of the queries' positions, ``(batch, q_len)``, or None."""
        if "labels" not in self.extras:
            return None
        for frame in self._frames:
            if frame.labels is not None:
                # The labels of an encoder-decoder are those of the decoder's positions, whatever the lengths.
                if frame.is_encoder_decoder and "decoder" not in layer:
                    return None
                return frame.labels if frame.labels.shape == (batch, q_len) else None
        labels = self._from_outside(1)
        return labels if labels is not None and labels.shape == (batch, q_len) else None

    def _from_outside(self, which: int) -> Tensor | None:
        # Of an encoder-decoder it isn't said which of the two sequences is meant.
        if self.tokens is None or any(frame.is_encoder_decoder for frame in self._frames):
            return None
        return self.tokens[which]


def _is_pretrained(module: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def _argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    if name in kwargs:
        return kwargs[name]
    if not args:
        return None
    names = forward_parameters(module)
    return args[names.index(name)] if name in names[: len(args)] else None


def padding_of_mask(mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Padding read off a self-attention mask: a position that no query of its sequence sees is padding.

    Args:
        mask: ``(batch, heads or 1, length or 1, length)``, True = attends or additive; anything else gives None.
        batch: Sequences in the call.
        length: Queries, and keys, in the call.

    Returns:
        ``(batch, length)`` bool, True = token, or None.
    """
    if mask is None or mask.dim() != 4 or mask.shape[0] != batch or mask.shape[-1] != length:
        return None
    visible = mask if mask.dtype == torch.bool else ~hides(mask)
    return visible.any(dim=(1, 2))
