"""The text that the recipes work on: from this Python, a file or a web address to blocks of tokens."""

from __future__ import annotations

import hashlib
import os
import re
import urllib.error
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeGuard

from datasets import Dataset
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.hub import download_url_to_file
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"


def load_pretrained(auto_class: Any, model: str, **options: Any) -> Any:
    """Load a model or its tokenizer.

    Args:
        auto_class: A transformers class with `from_pretrained`.
        model: A hub id, a local directory or a ``.gguf`` file.
        options: Further arguments of `from_pretrained`.

    Returns:
        What `auto_class.from_pretrained` returns.

    Raises:
        ValueError: `model` is written as a path but nothing lies there, or what lies there cannot be loaded.
        ModuleNotFoundError: a ``.gguf`` file without the packages that read it.
    """
    path = Path(model).expanduser()
    source = model
    if path.is_dir():
        source = str(path)
    elif path.suffix == ".gguf" and path.is_file():
        for package in ("gguf", "accelerate"):
            if find_spec(package) is None:
                raise ModuleNotFoundError(
                    f"Reading the .gguf file {model!r} needs the package `{package}`. "
                    "Install what is missing with: pip install gguf accelerate"
                )
        source, options = str(path.parent), {**options, "gguf_file": path.name}
    # a hub id is `name` or `owner/name`; anything else can only have been meant as a path
    elif path.exists() or path.suffix == ".gguf" or model.startswith((".", "~", os.sep)) or model.count("/") > 1:
        found = "is a file of another kind" if path.exists() else "does not exist"
        raise ValueError(
            f"Expected `model` to be a hub id, a local directory or a .gguf file, but got {model!r}, which {found}. "
            "Give the path of a directory with a config.json, or a hub id such as 'gpt2'."
        )
    try:
        return auto_class.from_pretrained(source, **options)
    except (OSError, ValueError) as error:  # no such id, no network, no config.json, no weights, no tokenizer
        raise ValueError(
            f"Expected `model` to hold what {auto_class.__name__} can load, but {model!r} failed: {error} "
            "Check the name; without a network give the path of a directory that has the model and its tokenizer."
        ) from error


def read_text(path: Path, checksum: str | None = None) -> str:
    """Read a UTF-8 text file.

    Args:
        path: The file.
        checksum: SHA-256 of its bytes in hexadecimal digits, or None to take the file as it is.

    Returns:
        The text, not empty.

    Raises:
        ValueError: the file is missing, unreadable, not UTF-8 or without text, or its checksum is another.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"Expected `text` to be a readable text file, but reading {str(path)!r} failed: {error.strerror or error}. "
            "Check the path and its permissions, or leave `text` out to use the text that Python carries."
        ) from error
    found = hashlib.sha256(raw).hexdigest()
    if checksum is not None and found != checksum.lower():
        raise ValueError(
            f"Expected `text` to have the SHA-256 checksum {checksum}, but {str(path)!r} has {found}. "
            "Get the right file, or accept this one with `checksum: null` (for a fetched text, delete the file first)."
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"Expected `text` to be UTF-8, but byte {error.start} of {str(path)!r} is 0x{raw[error.start]:02x}. "
            f"Convert it first: iconv -f LATIN1 -t UTF-8 {path} > utf8.txt"
        ) from error
    if not text.strip():
        raise ValueError(f"Expected `text` to hold text, but {str(path)!r} is empty. Give a file with some text in it.")
    return text


def fetch_text(url: str, folder: Path, checksum: str | None = None) -> Path:
    """Download a text once and keep it.

    The checksum of the first download is kept beside the file and every later run is held to it, so that a text that
    changed on disk is noticed even where no `checksum` was given.

    Args:
        url: Where the text is, ``http://`` or ``https://``.
        folder: Where to keep it; made if it is missing.
        checksum: SHA-256 that the download must have, or None to accept what comes.

    Returns:
        The path of the file. Its checksum lies beside it with the ending ``.sha256``.

    Raises:
        ValueError: the download failed or has another checksum.
    """
    name = re.sub(r"[^\w.-]", "_", url.rpartition("/")[2]) or "text"
    path = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{name}"
    recorded = path.with_name(path.name + ".sha256")
    if path.exists() and recorded.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    try:
        download_url_to_file(url, str(path), hash_prefix=checksum and checksum.lower())
    except (OSError, urllib.error.URLError) as error:
        raise ValueError(
            f"Expected `text` to be a file or an address that can be fetched, but fetching {url} failed: {error}. "
            "Fetch it by other means and give the path of the file as `text`."
        ) from error
    except RuntimeError as error:  # what torch raises for a wrong hash; the download is gone by then
        raise ValueError(
            f"Expected `text` to have the SHA-256 checksum {checksum}, but what {url} serves has another: {error}. "
            "If the text has been re-issued, accept it with `checksum: null`."
        ) from error
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    recorded.write_text(found + "\n")
    rank_zero_info(f"Kept {url} as {path} (SHA-256 {found})")
    return path


def cache_folder(folder: str | None = None) -> Path:
    """Where fetched texts are kept: the given folder, or ``attnmon`` in the user's cache."""
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnmon"


def load_text(text: str | None = None, checksum: str | None = None, folder: Path | None = None) -> tuple[str, str]:
    """The text of a file, of an address (fetched once and kept), or the one that this Python carries.

    Args:
        text: A file, an ``http(s)://`` address, or None for the language reference in `pydoc_data.topics`.
        checksum: SHA-256 that its bytes must have, or None.
        folder: Where a fetched text is kept; by default `cache_folder`.

    Returns:
        The text, not empty, and the SHA-256 of its bytes.

    Raises:
        ValueError: As `read_text` and `fetch_text`.
    """
    if text is None:
        from pydoc_data.topics import topics

        carried = "\n\n".join(topics.values())
        return carried, hashlib.sha256(carried.encode()).hexdigest()
    if is_address(text):
        path = fetch_text(text, folder or cache_folder(), checksum)
        checksum = checksum or path.with_name(path.name + ".sha256").read_text().strip()
    else:
        path = Path(text).expanduser()
    return read_text(path, checksum), hashlib.sha256(path.read_bytes()).hexdigest()


def is_address(text: str | None) -> TypeGuard[str]:
    """Whether a text has to be fetched."""
    return text is not None and text.startswith(("http://", "https://"))


def check_checksum(checksum: str | None) -> None:
    """Refuse what cannot be a SHA-256."""
    if checksum is not None and not re.fullmatch("[0-9a-fA-F]{64}", checksum):
        raise ValueError(f"Expected `checksum` to be 64 hexadecimal digits (SHA-256), but got {checksum!r}.")


def split_text(text: str) -> list[str]:
    """Cut a text into paragraphs: a tokenizer's cost and its warnings grow with the length of one piece."""
    return re.split(r"(?<=\n\n)", text)


def train_tokenizer(pieces: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer.

    Args:
        pieces: The text, in pieces.
        vocab_size: Largest number of entries; at least the 256 bytes and the end-of-text token.

    Returns:
        The tokenizer; it can encode any text, not only this one.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        pieces,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT)


class TextData(LightningDataModule):
    """Blocks of consecutive tokens of one text, a share of them held out for validation.

    Args:
        text: A UTF-8 text file, or an ``http(s)://`` address whose text is fetched once and kept; by default the
            language reference that every CPython carries (`pydoc_data.topics`, English, 0.5 MB).
        checksum: SHA-256 that the bytes of `text` must have. None accepts any file; a fetched text is then still
            held to the checksum of its first download.
        cache_dir: Where fetched texts are kept; by default ``attnmon`` in the user's cache.
        tokenizer: Hub id, directory or ``.gguf`` file to take the tokenizer from; by default a byte-level BPE is
            trained on the text at the start.
        vocab_size: Entries of the tokenizer that is trained; unused otherwise.
        context: Tokens per block.
        batch_size: Blocks per batch, on each device.
        val_fraction: Share of the blocks held out, drawn at random but always the same ones.
        num_workers: Processes that load data. 0 is the fastest here: the blocks lie in memory.

    Raises:
        ValueError: an argument is out of its range, or `text` cannot be used.
    """

    def __init__(
        self,
        text: str | None = None,
        checksum: str | None = None,
        cache_dir: str | None = None,
        tokenizer: str | None = None,
        vocab_size: int = 1024,
        context: int = 128,
        batch_size: int = 8,
        val_fraction: float = 0.1,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if context < 2:
            raise ValueError(f"Expected `context` to be at least 2 tokens, but got {context}. Try 128.")
        if batch_size < 1:
            raise ValueError(f"Expected `batch_size` to be at least 1, but got {batch_size}.")
        if not 0 < val_fraction < 1:
            raise ValueError(f"Expected `val_fraction` to lie between 0 and 1, but got {val_fraction}. Try 0.1.")
        if tokenizer is None and vocab_size < 257:
            raise ValueError(
                f"Expected `vocab_size` to be at least 257 (256 bytes and the end of text), but got {vocab_size}. "
                "Try 1024."
            )
        check_checksum(checksum)
        self.text, self.checksum = text, checksum
        self.cache_dir = cache_folder(cache_dir)
        self.tokenizer_source, self.vocab_size = tokenizer, vocab_size
        self.context, self.batch_size, self.val_fraction = context, batch_size, val_fraction
        self.num_workers = num_workers
        self.tokenizer: PreTrainedTokenizerBase | None = None

    def prepare_data(self) -> None:
        """Fetch the text, on one process per node."""
        if is_address(self.text):
            fetch_text(self.text, self.cache_dir, self.checksum)

    def setup(self, stage: str) -> None:
        """Read, tokenise and cut the text into blocks."""
        if self.tokenizer is not None:  # `fit` sets up once, `validate` after it finds the same blocks
            return
        pieces = split_text(load_text(self.text, self.checksum, self.cache_dir)[0])
        if self.tokenizer_source is None:
            self.tokenizer = train_tokenizer(pieces, self.vocab_size)
        else:
            self.tokenizer = load_pretrained(AutoTokenizer, self.tokenizer_source)
        blocks = self._blocks(pieces, self.tokenizer)
        split = blocks.train_test_split(test_size=max(1, round(self.val_fraction * len(blocks))), seed=0)
        self.train_blocks, self.val_blocks = split["train"], split["test"]

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Training blocks, shuffled anew each epoch."""
        return DataLoader(self.train_blocks, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Held-out blocks, always in the same order."""
        return DataLoader(self.val_blocks, self.batch_size, num_workers=self.num_workers)

    def _blocks(self, pieces: list[str], tokenizer: PreTrainedTokenizerBase) -> Dataset:
        context = self.context

        def tokenise(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            # no special tokens: a begin-of-text token before every paragraph would be a sink that the text hasn't
            return {"tokens": tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]}

        def cut(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
            stream = [token for tokens in batch["tokens"] for token in tokens]
            starts = range(0, len(stream) - context + 1, context)
            return {"input_ids": [stream[start : start + context] for start in starts]}

        # a Dataset in memory leaves nothing on disk, and its blocks are of this run's text for sure
        tokens = Dataset.from_dict({"text": pieces}).map(tokenise, batched=True, remove_columns="text", desc="tokenise")
        blocks = tokens.map(cut, batched=True, batch_size=None, remove_columns="tokens", desc="cut")
        if len(blocks) < 2:
            total = sum(map(len, tokens["tokens"]))
            raise ValueError(
                f"Expected `text` to give at least two blocks of `context` = {context} tokens, one to train on and one "
                f"to validate on, but got {total} tokens from {self.text!r}. Give a longer text or a smaller `context`."
            )
        return blocks.with_format("torch")
