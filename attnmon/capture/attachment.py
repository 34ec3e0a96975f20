"""Attaching to a model: everything that is put on it, and taken off again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from attnmon.capture import _state, compiled, huggingface, multihead, sdpa
from attnmon.capture.context import Context, padding_of_mask
from attnmon.capture.discovery import (
    compiled_roots,
    named_layers,
    site_kind,
    tensor_parallel,
    unsupported_kernels,
)
from attnmon.rerun import CannotCopyError, take_sequences, undisturbed
from attnmon.types import AttentionCall

__all__ = ["Attachment", "attach"]

_EXTRAS = frozenset({"hidden", "embedding", "labels"})
_COMPILED = "it is compiled, and compiled code shows nothing of its attention"
# Calls of a compiled part without gradients may be the steps of a generation, of which there is no end.
_MOST_WITHOUT_GRADIENTS = 8


class Take:
    """Keeps the chosen sequences of a tensor whose first dimension is the batch; detaches it in any case."""

    def __init__(self, batch: int, index: Tensor | None) -> None:
        self.batch = batch
        self.index = index

    @property
    def size(self) -> int:
        """Number of sequences that are kept."""
        return self.batch if self.index is None else self.index.numel()

    def __call__(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The kept part of `tensor`; a tensor without a batch dimension of the call's size is returned whole."""
        tensor = tensor.detach()
        if self.index is None or tensor.shape[dim] != self.batch:
            return tensor
        return tensor.index_select(dim, self.index.to(tensor.device, non_blocking=True))


class Attachment:
    """Capture in force on one model, from `attach` until `detach`; usable as a context manager.

    Forward passes have to run in the thread that attached. Parts that run compiled are left alone, and reported to
    `on_skip` (see `attnmon.capture.compiled_modules`) unless they are run once more.

    Attributes:
        guard: Runs what reads a call; see `attach`.
        layers: The modules that are read now, with their paths.
        roots: The compiled parts that are run once more.
        ran_again: Whether any was.
        once: Whether only their first call with gradients is.
        paused: While True, calls pass through unread.
        tokens: ``(valid, labels)``, each ``(batch, length)`` or None: what the next calls' positions are, for models
            that are not told it themselves; what is found in the arguments of the model comes first.
    """

    def __init__(
        self,
        model: nn.Module,
        on_call: Callable[[AttentionCall], None],
        on_skip: Callable[[str, str], None],
        *,
        context: frozenset[str],
        select: Callable[[int], Tensor | None] | None,
        guard: Callable[[Callable[[], None]], None],
        replace: Callable[[AttentionCall], Tensor | None] | None,
        rerun: bool,
    ) -> None:
        self.paused = False
        self.guard = guard
        self._replace = replace
        self._answer: Tensor | None = None
        everything = named_layers(model)
        roots = compiled_roots(model)
        inside = {part for root in roots for part in root.modules()}
        # Nothing is put on modules that run compiled: hooks there would not fire, or would recompile the model.
        self.layers = {module: layer for module, layer in everything.items() if module not in inside}
        self.roots = frozenset(root for root in roots if rerun and any(map(site_kind, root.modules())))
        self.ran_again = self.once = False
        self._everything = everything
        self._extras = context
        self._without_gradients: dict[nn.Module, int] = {}
        self._gradients: bool | None = None  # of the call that is run once more
        self._on_call = on_call
        self._on_skip = on_skip
        self._select = select
        self._skipped: set[str] = set()
        self._lengths: dict[str, tuple[int, int]] = {}
        self._undo: list[Callable[[], None]] = []
        hidden = [layer for module, layer in everything.items() if module in inside and site_kind(module) is not None]
        sites = _sites(self.layers)
        try:
            self._context = Context(self.layers, context, guard)
            self._undo.append(self._context.close)
            self._undo += _install(self.layers, sites, unseen=not hidden)
            # Where outputs are replaced, what the mode costs counts for less than a call that nobody has found.
            if replace is not None:
                self._undo.append(sdpa.install())
            self._undo.append(compiled.install(roots))
            _state.ACTIVE.append(self)
            for layer in hidden if not rerun else ():
                self.skip(layer, _COMPILED)
            for layer, reason in huggingface.bypassing(self.layers):
                self.skip(layer, reason)
            for layer, kernel in unsupported_kernels(model).items():
                self.skip(layer, f"calls `{kernel}`, whose masks and weights cannot be read from outside")
            if replace is not None:
                for module in sites["multihead"]:
                    self.skip(self.layers[module], multihead.IRREPLACEABLE)
        except BaseException:
            self.detach()
            raise

    @property
    def tokens(self) -> tuple[Tensor | None, Tensor | None] | None:
        """``(valid, labels)`` set from outside, or None."""
        return self._context.tokens

    @tokens.setter
    def tokens(self, value: tuple[Tensor | None, Tensor | None] | None) -> None:
        self._context.tokens = value

    def detach(self) -> None:
        """Take everything off the model again; does nothing the second time."""
        if self in _state.ACTIVE:
            _state.ACTIVE.remove(self)
        while self._undo:
            self._undo.pop()()
        self.layers = {}
        self.roots = frozenset()
        self._everything = {}
        self._lengths.clear()
        self._without_gradients.clear()
        self._answer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    @property
    def running_again(self) -> bool:
        """Whether a compiled part is being run once more."""
        return self._gradients is not None

    @property
    def replaces(self) -> bool:
        """Whether something may take the place of what the modules' attention returns."""
        return self._replace is not None

    def take_answer(self) -> Tensor | None:
        """What takes the place of the output of the call delivered last, `(batch, num_heads, q_len, v_head_dim)`."""
        answer, self._answer = self._answer, None
        return answer

    def skip(self, layer: str, reason: str) -> None:
        """Report, once per layer, why its calls are not captured."""
        if layer not in self._skipped:
            self._skipped.add(layer)
            self._on_skip(layer, reason)

    def run_again(
        self, root: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Run a compiled part as it was written, on copies of what it is called with, and read its attention.

        Args:
            root: The part, out of `roots`.
            original: What runs it, given the stance to run uncompiled.
            args: Positional arguments of the call that is about to be made.
            kwargs: Keyword arguments of that call.
        """
        gradients = torch.is_grad_enabled()
        if self.once and (self.ran_again or not gradients):
            return
        if not gradients:
            self._without_gradients[root] = self._without_gradients.get(root, 0) + 1
            if self._without_gradients[root] > _MOST_WITHOUT_GRADIENTS:
                return
        modules = {m: self._everything[m] for m in root.modules() if m in self._everything}
        select = self._select if self._select is not None else lambda batch: None
        try:
            (args, kwargs), batch, index = take_sequences((args, kwargs), select)
        except CannotCopyError as error:
            for module, layer in modules.items():
                if site_kind(module) is not None:
                    self.skip(layer, f"{_COMPILED}; it can't be run once more on a {error}, which that may change")
            return
        keep = Take(batch or 0, index)
        valid, labels = (None if tensor is None else keep(tensor) for tensor in self._context.known)
        with undisturbed(root), self._reading(modules):
            self.ran_again = True
            self._gradients = gradients
            self._context.tokens = (valid, labels)
            original(*args, **kwargs)

    @contextmanager
    def _reading(self, modules: dict[nn.Module, str]) -> Iterator[None]:
        """Within, these modules are read, and no others."""
        outside = self.layers, self._context
        undo: list[Callable[[], None]] = []
        try:
            self.layers = modules
            self._context = Context(modules, self._extras, self.guard)
            undo.append(self._context.close)
            undo += _install(modules, _sites(modules), unseen=True)
            yield
        finally:
            while undo:
                undo.pop()()
            self.layers, self._context = outside
            self._gradients = None

    def deliver(
        self,
        module: nn.Module,
        sizes: tuple[int, int, int],
        build: Callable[[str, Take], AttentionCall | str],
        *,
        crosses: bool = False,
    ) -> None:
        """Bring one call to its normal form and hand it on.

        Args:
            module: The module that attends.
            sizes: ``(batch, q_len, kv_len)`` of the call.
            build: Makes the call from the layer's name and the choice of sequences, or says why it can't.
            crosses: Whether queries and keys are known to come from different sequences.
        """
        layer = self.layers[module]
        batch, q_len, kv_len = sizes
        if batch == 0 or q_len == 0 or kv_len == 0:
            return
        if self._is_decode_step(layer, q_len, kv_len) and self._replace is None:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.skip(layer, "it runs inside a functorch transform (vmap, grad), whose tensors cannot be read")
            return
        with _state.busy(), torch.no_grad():
            index = self._select(batch) if self._select is not None else None
            take = Take(batch, index)
            call = build(layer, take)
            if isinstance(call, str):
                self.skip(layer, call)
                return
            if tensor_parallel(module, call.query, call.key):
                self.skip(layer, "its heads are spread over processes (tensor parallelism), and each sees only its own")
                return
            if call.unexplained and call.output is None:
                named = ", ".join(f"`{name}`" for name in call.unexplained)
                self.skip(
                    layer,
                    f"its attention may depend on {named}, and there is no output free of dropout to check that with",
                )
                return
            call = self._surround(module, layer, call, take, sizes, crosses)
        gradients = torch.is_grad_enabled() if self._gradients is None else self._gradients
        with _state.busy():
            with torch.set_grad_enabled(gradients):
                self._on_call(call)
            if self._replace is not None:
                with torch.no_grad():
                    self._answer = _checked(call, self._replace(call))

    def _surround(
        self,
        module: nn.Module,
        layer: str,
        call: AttentionCall,
        take: Take,
        sizes: tuple[int, int, int],
        crosses: bool,
    ) -> AttentionCall:
        """Add what the context knows to a call."""
        batch, q_len, kv_len = sizes
        crosses = crosses or looks_crossed(module, layer)
        causal = call.causal_offset is not None or bool(getattr(module, "is_causal", False))
        fields: dict[str, Tensor | None] = {}
        if call.valid is None:
            valid = self._context.valid(batch, q_len, kv_len, cached=causal and not crosses)
            if valid is not None:
                fields["valid"] = take(valid)
            elif q_len == kv_len and not crosses and call.query.shape[2] == call.key.shape[2]:
                fields["valid"] = padding_of_mask(call.attn_mask, take.size, q_len)
        labels = self._context.labels(layer, batch, q_len)
        if labels is not None:
            fields["labels"] = take(labels)
        if "hidden" in self._context.extras and call.hidden is None:
            fields["hidden"] = self._for_keys(self._context.hidden, module, call, take, sizes)
        if "embedding" in self._context.extras:
            fields["embedding"] = self._for_keys(self._context.embedding, module, call, take, sizes)
        return dataclasses.replace(call, **fields) if fields else call  # type: ignore[arg-type]

    @staticmethod
    def _for_keys(
        find: Callable[[nn.Module, int, int], Tensor | None],
        module: nn.Module,
        call: AttentionCall,
        take: Take,
        sizes: tuple[int, int, int],
    ) -> Tensor | None:
        """One vector for each key of a call, zero for a sink, which carries nothing; None if they are not known."""
        batch, _, kv_len = sizes
        keys = call.key.shape[2]
        found = find(module, batch, keys)
        if found is None and keys > kv_len and (found := find(module, batch, kv_len)) is not None:
            found = torch.nn.functional.pad(found, (0, 0, 0, keys - kv_len))
        return None if found is None else take(found)

    def _is_decode_step(self, layer: str, q_len: int, kv_len: int) -> bool:
        """Whether a single query continues a sequence that this module has begun: generation with a cache."""
        before = self._lengths.get(layer)
        self._lengths[layer] = (q_len, kv_len)
        if q_len != 1 or before is None:
            return False
        decoding = before[0] > 1 or kv_len == before[1] + 1
        if decoding:
            self._lengths[layer] = (max(before[0], 1), kv_len)
        return decoding


def _sites(layers: dict[nn.Module, str]) -> dict[str, list[nn.Module]]:
    kinds = {module: site_kind(module) for module in layers}
    return {kind: [m for m, k in kinds.items() if k == kind] for kind in ("huggingface", "multihead", "sdpa")}


def _install(
    layers: dict[nn.Module, str], sites: dict[str, list[nn.Module]], *, unseen: bool
) -> list[Callable[[], None]]:
    """Attach to the attention of `layers`; with `unseen`, look for any if none was found."""
    undo: list[Callable[[], None]] = []
    try:
        if sites["huggingface"]:
            undo.append(huggingface.install(sites["huggingface"]))
        undo.append(multihead.install(layers, sites["multihead"]))
        # The mode costs a little on every torch function, and changes which kernels torch's own modules take.
        if sites["sdpa"] or (unseen and layers and not (sites["huggingface"] or sites["multihead"])):
            undo.append(sdpa.install())
    except BaseException:
        while undo:
            undo.pop()()
        raise
    return undo


def _checked(call: AttentionCall, answer: Tensor | None) -> Tensor | None:
    if answer is None:
        return None
    shape = (*call.query.shape[:3], call.value.shape[3])
    if not isinstance(answer, Tensor) or answer.shape != shape:
        came = f"shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__
        raise ValueError(
            "Expected `replace` to return a tensor (batch, num_heads, q_len, v_head_dim) of shape "
            f"{tuple(shape)}, or None to leave the output as it is, but got {came} at `{call.layer}`."
        )
    return answer


def looks_crossed(module: nn.Module, layer: str) -> bool:
    """Whether a module says of itself that it attends from one sequence to another."""
    if getattr(module, "is_cross_attention", False) is True:
        return True
    name = (layer.rpartition(".")[2] + " " + type(module).__name__).lower()
    return any(word in name for word in ("cross", "encdec", "encoder_attn", "multihead_attn"))


def _unguarded(function: Callable[[], None]) -> None:
    function()


def attach(
    model: nn.Module,
    on_call: Callable[[AttentionCall], None],
    on_skip: Callable[[str, str], None],
    *,
    context: frozenset[str] = frozenset(),
    select: Callable[[int], Tensor | None] | None = None,
    guard: Callable[[Callable[[], None]], None] = _unguarded,
    replace: Callable[[AttentionCall], Tensor | None] | None = None,
    rerun: bool = False,
) -> Attachment:
    """Start capturing the attention calls that the modules of `model` make.

    What the model computes stays the same to the last bit (unless `replace` says otherwise), and `Attachment.detach`
    leaves it as it was found.

    Args:
        model: Any module, wrapped or not.
        on_call: Receives each call in its normal form.
        on_skip: Receives ``(layer, reason)``, once per layer, where calls cannot be captured.
        context: What to collect besides the call: any of ``"hidden"``, ``"embedding"``, ``"labels"``.
        select: Given the number of sequences of a call, the indices of those to keep (1-D, int64, on the CPU), or
            None for all. Every tensor of the call then holds these sequences only.
        guard: Runs every function that reads something while the model runs, this module's own and `on_call`; what
            it lets through goes to whoever runs the model.
        replace: Given a call after `on_call` has seen it, what the module's attention is to return instead of
            `AttentionCall.output`: ``(batch, num_heads, q_len, v_head_dim)`` of any floating dtype, or None for its
            own output. It runs without gradients, and none flow through what it returns. Only the heads' outputs
            are replaced: weights that a function returns beside them remain its own. Calls that are not handed on
            are not replaced either: each such layer is reported to `on_skip`, `nn.MultiheadAttention` at once.
            Single queries that continue a sequence are handed on here. Of several attachments that replace the same
            call, the one made last prevails; all of them see the module's own output.
        rerun: Parts that run compiled are run once more, before each call of them: uncompiled, in eval mode, without
            gradients, on copies of what they are called with (of the sequences of `select` only, where it is clear
            what these are; see `attnmon.rerun.take_sequences`), with the random states put back. That costs one such
            forward pass, and hooks of others on modules inside run in it, too. Grad mode in `on_call` is that of the
            compiled call. False: such parts are reported to `on_skip`.

    Returns:
        The attachment, in force.

    Raises:
        ValueError: `context` names something else; or `replace` is given along with `select`, or returns a tensor of
            another shape (raised while the model runs).
    """
    unknown = frozenset(context) - _EXTRAS
    if unknown:
        raise ValueError(
            f"Expected `context` to name some of {sorted(_EXTRAS)}, but got {sorted(unknown)}. Drop the others."
        )
    if replace is not None and select is not None:
        raise ValueError(
            "Expected `replace` without `select`, but got both: a call is replaced for all of its sequences. Drop "
            "`select`."
        )
    return Attachment(
        model,
        on_call,
        on_skip,
        context=frozenset(context),
        select=select,
        guard=guard,
        replace=replace,
        rerun=rerun and replace is None,
    )
