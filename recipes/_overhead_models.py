"""What overhead.py measures on: a GPT-2 and its training step, bare attention, and the same figures by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from _overhead import Variant
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from attnmon.cost import Cost
from attnmon.loop import Watch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOP_WEIGHTS = 20


def make_gpt2(
    n_layer: int, n_head: int, n_embd: int, vocab_size: int, length: int, dropout: float, device: torch.device
) -> GPT2LMHeadModel:
    """A GPT-2 with fresh weights and fused attention."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=length,
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    net = GPT2LMHeadModel(config)
    net.set_attn_implementation("sdpa")
    net.to(device)  # type: ignore[arg-type]
    net.train()
    return net


class Training:
    """A model, one batch and AdamW.

    Args:
        model: The model, on its device.
        ids: The batch of tokens, ``(batch, length)``.
        precision: ``"fp32"``, or ``"bf16"`` for autocast.
    """

    def __init__(self, model: GPT2LMHeadModel, ids: Tensor, precision: str) -> None:
        self.model, self.ids, self.precision = model, ids, precision
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(self) -> None:
        """Forward, backward, optimizer."""
        with self._precision():
            loss = self._loss(self.model(input_ids=self.ids).logits)
        self._update(loss)

    def step_by_hand(self) -> list[list[list[float]]]:
        """The same with the model's own weights returned, and entropy and top weights of every row from them.

        Returns:
            Per layer the mean over the rows, ``[entropy in nats, summed weight of the top 20]`` for each head.
        """
        with self._precision():
            output = self.model(input_ids=self.ids, output_attentions=True)
            loss = self._loss(output.logits)
        with torch.no_grad():
            figures = torch.stack([figures_by_hand(weights.float()) for weights in output.attentions])
        del output  # else the logits stay through the backward pass
        self._update(loss)
        numbers: list[list[list[float]]] = figures.tolist()
        return numbers

    def materialise(self) -> None:
        """Weights that can be returned: eager attention."""
        self.model.set_attn_implementation("eager")

    def fuse(self) -> None:
        """Fused attention again."""
        self.model.set_attn_implementation("sdpa")

    def _loss(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), self.ids[:, 1:].flatten())

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.ids.device.type, DTYPES[self.precision])

    def _update(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def figures_by_hand(weights: Tensor) -> Tensor:
    """Entropy and summed top weights of all rows of ``(batch, heads, rows, n)``, as means ``(2, heads)``."""
    entropy = -(weights * weights.clamp(min=torch.finfo(weights.dtype).tiny).log()).sum(-1)
    top = weights.topk(min(TOP_WEIGHTS, weights.shape[-1])).values.sum(-1)
    return torch.stack([entropy, top]).mean(dim=(1, 3))


class FusedAttention(nn.Module):
    """Causal attention and nothing else, over a query, key and value that are always the same."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.inputs = (query, key, value)

    def forward(self) -> Tensor:
        query, key, value = self.inputs
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class AttentionStack(nn.Module):
    """Layers of bare attention, one after the other, as they come in a model but without all that lies between.

    Args:
        shape: ``(batch, heads, length, head_dim)``.
        layers: How many.
        device: Where.
        dtype: Of query, key and value, which all layers share.
        trains: Whether they want gradients.
    """

    def __init__(
        self, shape: Sequence[int], layers: int, device: torch.device, dtype: torch.dtype, trains: bool = False
    ) -> None:
        super().__init__()
        self.inputs = [torch.randn(*shape).to(device, dtype).requires_grad_(trains) for _ in range(3)]
        self.gradient = torch.randn(*shape).to(device, dtype)
        self.layers = nn.ModuleList(FusedAttention(*self.inputs) for _ in range(layers))

    def forward(self) -> Tensor:
        output = torch.empty(0)
        for layer in self.layers:
            output = layer()
        return output

    def forward_and_backward(self) -> None:
        """One pass of each kind."""
        self().backward(self.gradient)
        for tensor in self.inputs:
            tensor.grad = None

    @torch.no_grad()
    def by_hand(self) -> None:
        """Each layer, and then its weights once more as an n x n array, for entropy and the first key's weight."""
        query, key, _ = self.inputs
        hidden = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool, device=query.device).triu(1)
        for layer in self.layers:
            layer()
            scores = (query.float() @ key.float().mT) * query.shape[-1] ** -0.5
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            entropy = -(weights * weights.clamp(min=torch.finfo(weights.dtype).tiny).log()).sum(-1)
            torch.stack([entropy, weights[..., 0]]).mean(dim=(1, 3)).tolist()


# -- sampled and not ------------------------------------------------------------------------------------------------


def sampled(name: str, monitor: Watch, run: Callable[[], object], costs: list[Cost] | None = None) -> Variant:
    """A step that is sampled each time, attaching and detaching included.

    Args:
        name: How the tables call it.
        monitor: ``watch(model, every_n_steps=2)``.
        run: The step without the monitor.
        costs: Takes what the monitor itself says of each sample.
    """

    def step() -> None:
        with monitor:
            run()
            snapshot = monitor.step()
        if costs is not None and snapshot is not None and snapshot.cost is not None:
            costs.append(snapshot.cost)

    def skip() -> None:
        with monitor:  # over the step that would not be sampled
            monitor.step()

    return Variant(name, step, after=skip)


def unsampled(name: str, monitor: Watch, run: Callable[[], object]) -> Variant:
    """A step inside `watch` that is never sampled, but for the first, which belongs to the warm-up."""

    def step() -> None:
        with monitor:
            run()
            monitor.step()

    return Variant(name, step)


def check_measured(monitors: Sequence[Watch], layers: int) -> None:
    """Refuses times of monitors that have not measured all layers.

    Raises:
        RuntimeError: A monitor has measured less.
    """
    for monitor in monitors:
        snapshot = monitor.latest
        if snapshot is None or len(snapshot.layers) != layers or snapshot.not_measured:
            found = "nothing" if snapshot is None else f"{len(snapshot.layers)}: {dict(snapshot.not_measured)}"
            raise RuntimeError(f"Expected the monitor to measure {layers} layers, but it measured {found}.")
