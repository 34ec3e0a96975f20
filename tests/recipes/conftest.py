from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short English text, a few thousand tokens."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(topics.values())[:20_000], encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A tiny GPT-2 with its tokenizer, laid out like a download from the hub."""
    from _text import train_tokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("model")
    config = GPT2Config(vocab_size=300, n_positions=64, n_layer=2, n_head=2, n_embd=16, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(path)
    train_tokenizer([text_file.read_text(encoding="utf-8")], vocab_size=300).save_pretrained(path)
    return path
