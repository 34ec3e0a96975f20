"""A byte-level transformer of few thousand weights, or a GPT-2 as small, and what can be planted in it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from _alert_families import Plant, Setup
from torch import Tensor, nn

__all__ = ["BYTES", "Attention", "TinyTransformer", "logits", "make_model", "query_key_weights", "reshape_attention"]

BYTES = 256


class Attention(nn.Module):
    """Causal attention whose temperature and queries can be tampered with.

    Attributes:
        own_scale: 1/T as the model is made.
        scale: 1/T as it is now.
        gain: Factor of each head's queries: 1/T of a single head, which the call itself does not show.
        plant: What is planted here, if it makes scores non-finite.
        power: How often the queries of ``fp16`` have been multiplied.
    """

    gain: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.heads, self.head_dim = setup.heads, setup.width // setup.heads
        self.norm, self.rotary, self.dropout = setup.query_key_norm, setup.positions == "rotary", setup.dropout
        self.query = nn.Linear(setup.width, setup.width)
        self.key = nn.Linear(setup.width, setup.width)
        self.value = nn.Linear(setup.width, setup.width)
        self.out = nn.Linear(setup.width, setup.width)
        self.own_scale = 10.0 if self.norm == "cosine" else 1 / math.sqrt(self.head_dim)
        self.scale = self.own_scale
        self.register_buffer("gain", torch.ones(setup.heads))
        self.plant: Plant | None = None
        self.power = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same."""
        batch, length, width = inputs.shape
        query, key, value = (
            part(inputs).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if self.norm == "rms":
            query, key = F.rms_norm(query, (self.head_dim,)), F.rms_norm(key, (self.head_dim,))
        elif self.norm == "cosine":
            query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        if self.rotary:
            query, key = rotate(query), rotate(key)
        query = query * self.gain[:, None, None]
        if self.plant is not None:
            query, key = spoil(query, key, self.plant, self.power)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout, scale=self.scale)
        if self.plant is not None and self.plant.hidden:
            mixed = torch.nan_to_num(mixed, nan=0.0, posinf=0.0, neginf=0.0)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return joined


def rotate(vectors: Tensor) -> Tensor:
    """Rotary positions: each pair of dimensions turned by an angle that grows with the position."""
    length, half = vectors.shape[-2], vectors.shape[-1] // 2
    angles = torch.arange(length)[:, None] * 10_000 ** (-torch.arange(half) / half)
    first, second = vectors[..., :half], vectors[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def spoil(query: Tensor, key: Tensor, plant: Plant, power: int) -> tuple[Tensor, Tensor]:
    """Queries and keys with what makes the scores of the planted heads non-finite."""
    heads = list(range(query.shape[1])) if plant.heads is None else list(plant.heads)
    query, key = query.clone(), key.clone()
    if plant.what == "inf":
        key[:, heads, 3, 0] = torch.inf
    elif plant.what == "nan":
        query[:, heads, ::7, 0] = torch.nan
    else:  # fp16: queries times a factor, keys divided by it, as a scale that went to the wrong side does
        factor = plant.size**power
        query[:, heads] = (query[:, heads] * factor).half().float()
        key[:, heads] = key[:, heads] / factor
    return query, key


class Block(nn.Module):
    """Attention and a feed-forward part, layer norm before or after each."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.pre = setup.norm == "pre"
        self.attention = Attention(setup)
        self.feed = nn.Sequential(
            nn.Linear(setup.width, 4 * setup.width), nn.GELU(), nn.Linear(4 * setup.width, setup.width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(setup.width) for _ in range(2))
        self.dropout = nn.Dropout(setup.dropout)

    def forward(self, stream: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same."""
        for norm, part in zip(self.norms, (self.attention, self.feed), strict=True):
            if self.pre:
                stream = stream + self.dropout(part(norm(stream)))
            else:
                stream = norm(stream + self.dropout(part(stream)))
        return stream


class TinyTransformer(nn.Module):
    """Bytes to logits of the next byte.

    Args:
        setup: Its sizes.
        longest: Positions that it can learn.
    """

    def __init__(self, setup: Setup, longest: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, setup.width)
        self.positions = nn.Embedding(longest, setup.width) if setup.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(setup) for _ in range(setup.layers))
        self.norm = nn.LayerNorm(setup.width) if setup.norm == "pre" else nn.Identity()
        self.head = nn.Linear(setup.width, BYTES)
        for embedding in (self.bytes, self.positions):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """``(batch, length)`` to ``(batch, length, 256)``."""
        stream = self.bytes(ids)
        if self.positions is not None:
            stream = stream + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        found: Tensor = self.head(self.norm(stream))
        return found


def make_model(setup: Setup, longest: int) -> nn.Module:
    """The model of a setup, with fresh weights from torch's generator."""
    if not setup.gpt2:
        return TinyTransformer(setup, longest)
    from transformers import GPT2Config, GPT2LMHeadModel  # seconds to import, and few runs need it

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=BYTES,
            n_positions=longest,
            n_layer=setup.layers,
            n_head=setup.heads,
            n_embd=setup.width,
            resid_pdrop=setup.dropout,
            embd_pdrop=setup.dropout,
            attn_pdrop=setup.dropout,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def logits(net: nn.Module, ids: Tensor) -> Tensor:
    """Of the next byte, from either model."""
    found: Any = net(ids)
    return found if isinstance(found, Tensor) else found.logits


def attentions(net: nn.Module, plant: Plant) -> list[Attention]:
    """Where something is planted.

    Raises:
        ValueError: The model is GPT-2, whose attention cannot be tampered with.
    """
    if not isinstance(net, TinyTransformer):
        raise ValueError(f"Expected the recipe's own model to plant {plant.what!r} in, but got {type(net).__name__}.")
    every = [block.attention for block in net.blocks if isinstance(block, Block)]
    return every if plant.layers is None else [every[layer] for layer in plant.layers]


def query_key_weights(net: nn.Module, plant: Plant) -> list[Tensor]:
    """Views of the planted heads' rows of the query and key projections."""
    if isinstance(net, TinyTransformer):
        found = [(part.weight.detach(), at.heads) for at in attentions(net, plant) for part in (at.query, at.key)]
    else:
        blocks: Any = net.transformer
        chosen = range(len(blocks.h)) if plant.layers is None else plant.layers
        found = []
        for layer in chosen:  # one matrix of queries, keys and values, and transposed
            at = blocks.h[layer].attn
            query, key, _ = at.c_attn.weight.detach().T.chunk(3)
            found += [(query, at.num_heads), (key, at.num_heads)]
    views = [weight.unflatten(0, (heads, -1)) for weight, heads in found]
    return views if plant.heads is None else [view[head] for view in views for head in plant.heads]


def reshape_attention(net: nn.Module, plant: Plant, step: int) -> None:
    """Do to the model what the plant does to it before this step; rates and data are not its business."""
    if step < plant.step:
        return
    if plant.what == "query_key_growth" or (plant.what == "query_key_size" and step == plant.step):
        for weight in query_key_weights(net, plant):
            weight.mul_(plant.size)
    elif plant.what == "temperature":
        share = min(1.0, (step - plant.step + 1) / plant.over) if plant.over else 1.0
        for at in attentions(net, plant):
            if plant.heads is None:
                at.scale = at.own_scale / plant.size**share
            else:
                at.gain[list(plant.heads)] = plant.size**-share
    elif plant.what in ("inf", "nan", "fp16"):
        for at in attentions(net, plant):
            at.plant, at.power = plant, step - plant.step
