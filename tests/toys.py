"""Small models, batches and Lightning modules that several tests train."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from attnmon import watch

VOCABULARY = 61
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
"""Sizes for small models of most families, with grouped queries."""


def spread(model):
    """The model with weights large enough for attention to be far from uniform."""
    for parameter in model.parameters():
        if parameter.dim() > 1 or parameter.shape == (4,):  # (4,): gpt-oss's sinks
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def tiny_gpt2(layers: int = 2, heads: int = 2, positions: int = 96, dropout: float = 0.0, seed: int = 0, **config):
    """A random GPT-2 of 8 numbers per head."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_layer=layers,
            n_head=heads,
            n_embd=8 * heads,
            n_positions=positions,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
            **config,
        )
    )


def token_batches(count: int = 8, batch: int = 3, length: int = 80, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Batches of random tokens as a language model takes them."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (batch, length), generator=generator)
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return batches


class LanguageModule(pl.LightningModule):
    """The module a user would write around a language model."""

    def __init__(self, model: nn.Module | None = None, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.model = tiny_gpt2() if model is None else model
        self.learning_rate = learning_rate
        self.losses: list[float] = []

    def forward(self, input_ids, labels=None, attention_mask=None):
        return self.model(input_ids=input_ids, labels=labels, attention_mask=attention_mask)

    def training_step(self, batch, batch_idx):
        loss = self(**batch).loss
        self.losses.append(loss.item())
        self.log("loss", loss, batch_size=len(batch["input_ids"]))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class ValidatedModule(LanguageModule):
    """The same with a validation."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(**batch).loss, batch_size=len(batch["input_ids"]))


class MemoryLogger(Logger):
    """Keeps what it is given: ``calls`` holds (step, metrics)."""

    name = "memory"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass

    def of(self, prefix: str) -> list[tuple[int | None, dict[str, float]]]:
        """The calls with a key that begins so."""
        return [(step, metrics) for step, metrics in self.calls if any(key.startswith(prefix) for key in metrics)]


def seed_all(seed: int = 7) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def digest(value: Any) -> str:
    """A fingerprint of nested containers of tensors and plain values: another one as soon as a bit differs."""
    sha = hashlib.sha256()

    def add(part: Any) -> None:
        if hasattr(part, "to_local"):  # a shard
            add(part.to_local())
        elif isinstance(part, torch.Tensor):
            add((str(part.dtype), tuple(part.shape)))
            sha.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, np.ndarray):
            sha.update(part.tobytes())
        elif isinstance(part, Mapping):
            add(list(part.items()))
        elif isinstance(part, list | tuple):
            for entry in part:
                add(entry)
        else:
            sha.update(f"{part!r};".encode())

    add(value)
    return sha.hexdigest()[:16]


def random_states() -> dict[str, str]:
    """Fingerprints of every global random generator."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return {name: digest(state) for name, state in states.items()}


class Bits(pl.Callback):
    """Fingerprints of what a run computes on its way."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.gradients: list[str] = []
        self.validations: list[str] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append(digest([p.grad for p in pl_module.parameters()]))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(digest(outputs))

    def on_validation_end(self, trainer, pl_module):
        self.validations.append(digest(trainer.callback_metrics))


def bits_of(seen: Bits, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    return {
        "losses": seen.losses,
        "gradients": seen.gradients,
        "validations": seen.validations,
        "parameters": {name: digest(tensor) for name, tensor in module.state_dict().items()},
        "optimizers": [digest(optimizer.state_dict()) for optimizer in optimizers],
        **random_states(),
    }


def loader(batches) -> DataLoader:
    """A loader that gives these very batches, in order."""
    return DataLoader(batches, batch_size=None)


def trainer(tmp_path, *callbacks, **arguments) -> pl.Trainer:
    """A quiet Trainer on the CPU, without a logger unless one is asked for."""
    defaults = {
        "max_steps": 4,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": tmp_path,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | arguments))


class NanoAttention(nn.Module):
    """Attention as small from-scratch models write it."""

    def __init__(self, width: int = 16, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.heads = heads
        self.dropout = dropout

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class NanoModel(nn.Module):
    """Embeds, attends twice, predicts."""

    def __init__(self, width: int = 16, heads: tuple[int, ...] = (2, 4), dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(NanoAttention(width, h, dropout) for h in heads)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def run_once(model, batch, **arguments):
    """The Snapshot of one training step."""
    arguments = {"every_n_steps": 1, "rows": "all", "sequences": 100, "strict": True} | arguments
    with watch(model, **arguments) as monitor:
        model(**batch).loss.backward()
        return monitor.step()


def run_probe(model, ids) -> dict:
    """The figures of a probe."""
    with watch(model, 1, source="probe", probe=ids, rows="all", sequences=100, strict=True) as monitor:
        return monitor.latest.values
