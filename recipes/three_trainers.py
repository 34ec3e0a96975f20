"""Train one model with Lightning, with transformers.Trainer and with Fabric: the monitor reports the same figures.

    python recipes/three_trainers.py --config configs/three_trainers/demo.yaml

The arguments of `three_trainers` are the schema of the YAML files and of the command line; ``--help`` lists them.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from _text import TextData
from datasets import disable_progress_bars
from finetune import CausalLM, hide_noise
from jsonargparse import auto_cli
from lightning.pytorch.loggers.logger import Logger
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from attnmon import AttentionMonitor, watch
from attnmon.integrations.transformers import AttentionMonitorCallback

Batches = list[dict[str, Tensor]]
Reported = dict[int, dict[str, float]]
"""Step -> key -> figure."""

# keys of the printed table and their headings
SHOWN = {
    "entropy/normalized": "H / log n",
    "separability/top_10": "Ns/N, N=10",
    "distance/top_10": "distance",
    "jacobian/temperature_1.0": "Jacobian",
    "logits/spread": "score spread",
}


class Kept(Logger):
    """A logger that keeps what it is given."""

    name = "kept"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep the figures of a step."""
        self.calls.append((-1 if step is None else step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: these are the same for all."""


class InOrder(Trainer):
    """A Trainer that takes the batches as they come, as the others do; its own loader would shuffle them."""

    def get_train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The batches in their order."""
        batches: Any = self.train_dataset
        return DataLoader(batches, batch_size=None)


def with_lightning(module: CausalLM, batches: Batches, options: Mapping[str, Any]) -> Reported:
    """Train with Lightning's Trainer and its callback."""
    logger = Kept()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=len(batches),
        logger=logger,
        log_every_n_steps=len(batches),
        limit_val_batches=0,
        callbacks=[AttentionMonitor(**options)],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    loader: DataLoader[Any] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list will do
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no `val_dataloader`")
        trainer.fit(module, loader)
    return reported(logger.calls)


def with_transformers(module: CausalLM, batches: Batches, options: Mapping[str, Any]) -> Reported:
    """Train with transformers.Trainer and its callback."""
    made: Any = module.configure_optimizers()
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=len(batches),
            max_grad_norm=0.0,  # no clipping, as in the others
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = InOrder(
            module.net,
            arguments,
            train_dataset=[{**batch, "labels": batch["input_ids"]} for batch in batches],
            optimizers=(made["optimizer"], made["lr_scheduler"]["scheduler"]),
            compute_loss_func=loss_of,
            callbacks=[AttentionMonitorCallback(**options)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return reported([(int(entry["step"]), entry) for entry in trainer.state.log_history])


def with_fabric(module: CausalLM, batches: Batches, options: Mapping[str, Any]) -> Reported:
    """Train in a loop of one's own, with Fabric; without it, the loop is the same."""
    made: Any = module.configure_optimizers()
    logger = Kept()
    fabric = L.Fabric(accelerator="cpu", devices=1, loggers=logger)
    net, optimizer = fabric.setup(module.net, made["optimizer"])
    with watch(net, writer=fabric.logger, **options) as monitor:
        for batch in batches:
            fabric.backward(loss_of(net(**batch), batch["input_ids"]))
            optimizer.step()
            made["lr_scheduler"]["scheduler"].step()
            optimizer.zero_grad()
            monitor.step()
    return reported(logger.calls)


TRAINERS: dict[str, Callable[[CausalLM, Batches, Mapping[str, Any]], Reported]] = {
    "Lightning": with_lightning,
    "transformers.Trainer": with_transformers,
    "Fabric": with_fabric,
}


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Mean cross-entropy of the next token, as `finetune.CausalLM` has it."""
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def reported(calls: list[tuple[int, dict[str, float]]]) -> Reported:
    """What the monitor reported, but for what the clock decides."""
    found: Reported = {}
    for step, figures in calls:
        ours = {k: v for k, v in figures.items() if k.startswith("attn/") and not k.startswith("attn/monitor/")}
        if ours:
            found[step] = ours
    return found


def take(data: TextData, steps: int) -> Batches:
    """As many batches of a text as there are steps; the text begins again where it ends."""
    data.prepare_data()
    data.setup("fit")
    blocks, size = data.train_blocks["input_ids"], data.batch_size
    places = [[(step * size + place) % len(blocks) for place in range(size)] for step in range(steps)]
    return [{"input_ids": torch.stack([blocks[place] for place in batch])} for batch in places]


def three_trainers(
    model: str | None = None,
    text: str | None = None,
    checksum: str | None = None,
    steps: int = 120,
    every_n_steps: int = 20,
    batch_size: int = 4,
    context: int = 64,
    n_layer: int = 2,
    n_head: int = 4,
    n_embd: int = 64,
    vocab_size: int = 512,
    learning_rate: float = 4e-3,
    rows: int = 64,
    seed: int = 0,
    threads: int = 1,
) -> int:
    """Train one model with three trainers and compare what the monitor reports.

    Args:
        model: Hub id, local directory or ``.gguf`` file of a model to fine-tune. By default a GPT-2 is made from the
            sizes below.
        text: Text file or address; by default the language reference that every CPython carries.
        checksum: SHA-256 that the text must have.
        steps: Optimizer steps of each run.
        every_n_steps: Steps between two samples.
        batch_size: Blocks per batch.
        context: Tokens per block.
        n_layer: Layers.
        n_head: Heads per layer.
        n_embd: Width.
        vocab_size: Entries of the vocabulary that is trained on the text.
        learning_rate: Peak learning rate of AdamW.
        rows: Query positions looked at per sequence.
        seed: Of the weights and of the rows.
        threads: CPU threads. With more, sums may come in another order in each run, and differ in the last digit.

    Returns:
        0 if all figures are the same to the last digit, else 1.
    """
    for name, value in (("steps", steps), ("every_n_steps", every_n_steps), ("threads", threads)):
        if value < 1:
            raise ValueError(f"Expected `{name}` to be at least 1, but got {value}.")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    data = TextData(text, checksum, tokenizer=model, vocab_size=vocab_size, context=context, batch_size=batch_size)
    batches = take(data, steps)
    module = CausalLM(model, n_layer, n_head, n_embd, vocab_size, context, learning_rate=learning_rate)
    switch_off_dropout(module)
    options = {"every_n_steps": every_n_steps, "rows": rows, "seed": seed, "per_head": True}
    runs, weights = {}, {}
    for name, train in TRAINERS.items():
        own = copy.deepcopy(module)
        runs[name] = train(own, batches, options)
        weights[name] = list(own.net.parameters())
    return report(Console(), runs, weights)


def switch_off_dropout(module: nn.Module) -> None:
    """Dropout would draw from a generator that each trainer leaves in another state."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def report(console: Console, runs: Mapping[str, Reported], weights: Mapping[str, list[nn.Parameter]]) -> int:
    """Print the three beside each other and say whether they agree."""
    first, *others = runs
    last = max(runs[first])
    table = Table("layer", *runs, title=f"Step {last}, mean over the heads of a layer")
    for layer in range(sum(key.startswith("attn/entropy/layer_") and "head" not in key for key in runs[first][last])):
        for name, heading in SHOWN.items():
            found = [run.get(last, {}).get(f"attn/{name}/layer_{layer:02d}") for run in runs.values()]
            table.add_row(f"{layer}  {heading}", *("-" if value is None else f"{value:.10g}" for value in found))
    console.print(table)
    for name in others:
        if not all(map(torch.equal, weights[name], weights[first])):
            console.print(f"The weights that {name} trained are not those of {first}.")
    differ = [name for name in others if runs[name] != runs[first]]
    if differ:
        console.print(f"{', '.join(differ)}: not the figures that {first} reports.")
        return 1
    steps, count = ", ".join(map(str, runs[first])), sum(map(len, runs[first].values()))
    console.print(f"All three report the same {count} figures, to the last digit, at steps {steps}.", soft_wrap=True)
    return 0


if __name__ == "__main__":
    hide_noise()
    disable_progress_bars()
    disable_progress_bar()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    try:
        sys.exit(auto_cli(three_trainers, as_positional=False))
    except ValueError as error:
        sys.exit(f"ValueError: {error}")
