"""Fine-tune a causal language model, or train a small one from nothing, with its attention monitored.

    python recipes/finetune.py fit --config configs/finetune/demo.yaml

The arguments of `CausalLM` and `TextData` are the schema of the YAML files and of the command line, for example
``--model.model gpt2 --data.text my.txt --trainer.max_steps 100``; ``fit --help`` lists them.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from typing import Any

import torch
from _text import TextData, load_pretrained
from datasets import disable_progress_bars
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, get_constant_schedule_with_warmup

from attnmon import AttentionMonitor, AttentionSaturationWarning

# the quantities of the closing table and their headings, as many as fit a terminal
SHOWN = {
    "entropy_normalized": "H / log n",
    "effective_keys": "keys exp(H)",
    "separability@10": "Ns/N, N=10",
    "distance@10": "distance",
    "jacobian@1.0": "Jacobian",
    "score_spread": "score spread",
}

attention_warnings = 0
_show_any = warnings.showwarning


class CausalLM(LightningModule):
    """Next-token training of a pretrained model, or of a GPT-2 with fresh weights.

    Args:
        model: Hub id, local directory or ``.gguf`` file of a pretrained model. By default a GPT-2 is made from the
            four sizes below; they are unused otherwise.
        n_layer: Layers.
        n_head: Heads per layer.
        n_embd: Width of the model.
        vocab_size: Entries of the vocabulary; taken from ``data.vocab_size``.
        context: Tokens that the model sees at once; taken from ``data.context``.
        dropout: Dropout of the fresh model.
        learning_rate: Peak learning rate of AdamW.
        warmup_steps: Steps over which the learning rate rises to its peak; it stays there.
        weight_decay: AdamW's weight decay, on matrices only.

    Raises:
        ValueError: an argument is out of its range, `model` cannot be loaded, or it has fewer positions than `context`.
    """

    def __init__(
        self,
        model: str | None = None,
        n_layer: int = 4,
        n_head: int = 4,
        n_embd: int = 128,
        vocab_size: int = 1024,
        context: int = 128,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
        warmup_steps: int = 50,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        if learning_rate <= 0:
            raise ValueError(f"Expected `learning_rate` to be positive, but got {learning_rate}. Try 1e-3.")
        if warmup_steps < 0:
            raise ValueError(f"Expected `warmup_steps` to be 0 or more, but got {warmup_steps}.")
        self.learning_rate, self.warmup_steps, self.weight_decay = learning_rate, warmup_steps, weight_decay
        if model is None:
            if n_embd % n_head:
                raise ValueError(f"Expected `n_embd` to be a multiple of `n_head`, but got {n_embd} and {n_head}.")
            self.net = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=vocab_size,
                    n_positions=context,
                    n_layer=n_layer,
                    n_head=n_head,
                    n_embd=n_embd,
                    resid_pdrop=dropout,
                    embd_pdrop=dropout,
                    attn_pdrop=dropout,
                    bos_token_id=0,  # the end of text is the first entry of the tokenizer that TextData trains
                    eos_token_id=0,
                    use_cache=False,
                )
            )
        else:
            # float32 whatever the file holds: `--trainer.precision` casts the arithmetic, AdamW needs the full weights
            self.net = load_pretrained(AutoModelForCausalLM, model, dtype=torch.float32)
            positions = getattr(self.net.config, "max_position_embeddings", None)
            if positions is not None and context > positions:
                raise ValueError(
                    f"Expected `data.context` to be at most the {positions} positions of {model!r}, but got {context}. "
                    f"Use --data.context {positions} or less."
                )
        self.net.train()  # from_pretrained returns the evaluation mode, and Lightning leaves modes alone

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the next token, in nats."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """The same on held-out blocks."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]  # (batch, context), full blocks: no padding, so no mask
        logits = self.net(input_ids=ids, use_cache=False).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with a linear warm-up."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.weight_decay},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=self.learning_rate,
        )
        schedule = get_constant_schedule_with_warmup(optimizer, self.warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class FinetuneCLI(LightningCLI):
    """The command line: links model and data, sets the threads, and reports at the end of `fit`."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give the model and the data one vocabulary and one context."""
        parser.link_arguments("model.model", "data.tokenizer")
        parser.link_arguments("data.vocab_size", "model.vocab_size")
        parser.link_arguments("data.context", "model.context")
        parser.add_argument("--threads", type=int | None, default=None, help="CPU threads; null: torch decides.")

    def before_instantiate_classes(self) -> None:
        """Set the number of CPU threads."""
        threads = self.config[self.subcommand].threads
        if threads is not None:
            if threads < 1:
                raise ValueError(
                    f"Expected `threads` to be at least 1, but got {threads}. Leave it out: torch decides."
                )
            torch.set_num_threads(threads)

    def after_fit(self) -> None:
        """Print what the monitors saw last and where the curves lie."""
        log_dir = self.trainer.log_dir  # asks the other ranks, so every rank has to
        if not self.trainer.is_global_zero:
            return
        console = Console()
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, AttentionMonitor):
                report(console, callback)
        console.print(f"Attention warnings in this run: {attention_warnings}")
        if self.trainer.loggers and log_dir:
            # soft_wrap: a path broken over two lines cannot be copied
            console.print(f"Curves: tensorboard --logdir {log_dir}", soft_wrap=True, highlight=False)


def report(console: Console, monitor: AttentionMonitor) -> None:
    """Print a monitor's newest Snapshot: a row per layer, the mean over its heads."""
    snapshot = monitor.latest
    if snapshot is None:
        console.print("The monitor has no snapshot: the run took no step that it samples, or nothing was captured.")
        return
    shown = [name for name in SHOWN if name in snapshot.values] or list(snapshot.values)[: len(SHOWN)]
    table = Table(
        "layer",
        *(SHOWN.get(name, name) for name in shown),
        title=f"Attention at step {snapshot.step}, mean over the heads of a layer",
    )
    for layer in snapshot.layers:
        table.add_row(str(layer), *(_mean(snapshot.values[name].get(layer, [])) for name in shown))
    console.print(table)
    alarms = ", ".join(f"{rule} {heads}" for rule, heads in snapshot.alarms.items() if heads)
    console.print(f"Heads under alarm at step {snapshot.step}: {alarms or 'none'}")


def _mean(heads: list[float]) -> str:
    measured = [value for value in heads if not math.isnan(value)]
    return f"{sum(measured) / len(measured):.3g}" if measured else "-"


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Print an attention warning without the place in the code, which says nothing here, and count it."""
    global attention_warnings
    if issubclass(category, AttentionSaturationWarning):
        attention_warnings += 1
        print(f"{category.__name__}: {message}", file=sys.stderr)
    else:
        _show_any(message, category, *place, **more)


def hide_noise() -> None:
    """Keep from the output what a user of these scripts could not change."""
    # the blocks lie in memory: a worker process would cost more than it saves
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # Lightning's own call of a name that torch 2.13 renames
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated")
    # an advertisement for another logger
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: "litlogger" not in r.getMessage())


def main() -> None:
    """Run the command line."""
    hide_noise()
    warnings.showwarning = _show_warning
    disable_progress_bars()
    FinetuneCLI(
        CausalLM,
        TextData,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},  # without a logger every run writes to the same folder
        parser_kwargs={"parser_mode": "yaml"},
    )


if __name__ == "__main__":
    main()
