"""The models that the recipes analyse: from the hub, a directory or a file, or trained here; and their tokens."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from _text import load_pretrained, split_text
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, offset: int, longest: int, trains: bool = False) -> Tensor:
    """The tokens from `offset` on, as many as the longest length.

    Raises:
        ValueError: The text is too short.
    """
    # a model trained on the text needs a block to learn from and one to hold out
    needed = max(offset + longest, 2 * longest if trains else 0)
    stream: list[int] = []
    pieces = split_text(text)
    for start in range(0, len(pieces), 256):
        # no special tokens: a begin-of-text token before every paragraph would be a sink that the text hasn't
        batch = tokenizer(pieces[start : start + 256], add_special_tokens=False, verbose=False)["input_ids"]
        stream += [token for tokens in batch for token in tokens]
        if len(stream) >= needed:
            return torch.tensor(stream[offset : offset + longest])
    if offset >= len(stream) > 0:
        raise ValueError(
            f"Expected `offset` to lie within the text, but got {offset} of {len(stream)} tokens. Use a smaller one."
        )
    why = "`offset` and the longest of `lengths`" if offset + longest == needed else "two blocks to train the model on"
    raise ValueError(
        f"Expected `text` to have at least {needed} tokens ({why}), but got {len(stream)}. "
        f"Give a longer text, or `lengths` up to {max(2, (len(stream) - offset) // (2 if trains else 1))}."
    )


def check_model(model: str, longest: int) -> Any:
    """Read a model's configuration and refuse what cannot be analysed, before its weights are loaded.

    Raises:
        ValueError: There is no such model, it has two halves, or fewer positions than the longest length.
    """
    config = load_pretrained(AutoConfig, model)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"Expected `model` to be a decoder or an encoder, but {model!r} has both halves ({config.model_type}), and "
            "one text is not input for both. Give a model of one half, such as 'gpt2' or 'bert-base-uncased'."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and 0 < positions < longest:
        raise ValueError(
            f"Expected `lengths` to be at most the {positions} positions of {model!r}, but got {longest}. "
            f"Use --lengths with values up to {positions}."
        )
    return config


def load_model(model: str) -> PreTrainedModel:
    """Load a model in float32, with the head that its checkpoint has: causal, masked, or none."""
    names = getattr(load_pretrained(AutoConfig, model), "architectures", None) or ["ForCausalLM"]
    if any("CausalLM" in name or "LMHead" in name for name in names):
        kind: Any = AutoModelForCausalLM
    else:
        kind = AutoModelForMaskedLM if any("MaskedLM" in name for name in names) else AutoModel
    net: PreTrainedModel = load_pretrained(kind, model, dtype=torch.float32)
    return net


def train_small_model(
    folder: Path,
    settings: Mapping[str, Any],
    text: str | None,
    checksum: str | None,
    progress: bool,
) -> str:
    """Train a small GPT-2 on the text with finetune.py's model and data, or find the one of an earlier run.

    Returns:
        The folder of the model and its tokenizer.
    """
    for name in ("n_layer", "n_head", "n_embd", "vocab_size", "train_steps", "batch_size"):
        if settings[name] < 1:
            raise ValueError(f"Expected `{name}` to be at least 1, but got {settings[name]}.")
    record, written = json.dumps(settings, sort_keys=True), folder / "training.json"
    if written.is_file() and written.read_text(encoding="utf-8") == record:
        return str(folder)
    # only here: the command line of Lightning takes seconds to import
    from _text import TextData
    from datasets import disable_progress_bars
    from finetune import CausalLM, hide_noise
    from lightning.pytorch import Trainer, seed_everything

    hide_noise()
    disable_progress_bars()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(settings["seed"], verbose=False)
    sizes = {name: settings[name] for name in ("vocab_size", "context")}
    data = TextData(text=text, checksum=checksum, batch_size=settings["batch_size"], **sizes)
    shape = {name: settings[name] for name in ("n_layer", "n_head", "n_embd", "learning_rate")}
    module = CausalLM(**sizes, **shape)
    data.setup("fit")
    Trainer(
        max_epochs=math.ceil(settings["train_steps"] / len(data.train_dataloader())),
        accelerator="cpu",  # so small that a GPU gains nothing, and the same numbers everywhere
        devices=1,
        max_steps=settings["train_steps"],
        limit_val_batches=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=progress,
    ).fit(module, data)
    module.net.save_pretrained(folder)
    if data.tokenizer is not None:
        data.tokenizer.save_pretrained(folder)
    written.write_text(record, encoding="utf-8")  # last: a run that was stopped trains again
    return str(folder)


def check_vocabulary(net: PreTrainedModel, tokens: Tensor, name: str) -> None:
    known = getattr(net.get_input_embeddings(), "num_embeddings", None)
    if known is not None and int(tokens.max()) >= known:
        raise ValueError(
            f"Expected the tokenizer of {name!r} to give tokens below its {known} embeddings, but got "
            f"{int(tokens.max())}. Put the tokenizer that the model was trained with into its directory."
        )


# -- results ------------------------------------------------------------------------------------------------------


def choose_device(device: str | None) -> torch.device:
    """The device of that name; by default the GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.zeros(1, device=device).device
        if place.type == "meta":
            raise RuntimeError("a meta device holds no numbers.")
        return place
    except (RuntimeError, AssertionError) as error:  # unknown, or torch was built without it
        raise ValueError(
            f"Expected `device` to be one that torch can use here, but {device!r} failed: {str(error).splitlines()[0]} "
            "Use cpu, or leave it out."
        ) from error
