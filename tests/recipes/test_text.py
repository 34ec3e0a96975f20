from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import _text
import pytest
import torch
from _text import TextData, fetch_text, load_pretrained, read_text, train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer


def blocks_of(**arguments: Any) -> TextData:
    data = TextData(**{"context": 16, "vocab_size": 300, **arguments})
    data.prepare_data()
    data.setup("fit")
    return data


# -- blocks -------------------------------------------------------------------------------------------------------


def test_blocks_are_the_text_cut_up(text_file: Path) -> None:
    data = blocks_of(text=str(text_file))
    assert data.tokenizer is not None
    text = text_file.read_text(encoding="utf-8")
    blocks = [*data.train_blocks["input_ids"], *data.val_blocks["input_ids"]]
    pieces = [data.tokenizer.decode(block) for block in blocks]
    # a block may begin or end inside the bytes of a character
    assert all(piece.strip("\N{REPLACEMENT CHARACTER}") in text for piece in pieces)
    assert abs(len(text) - sum(map(len, pieces))) < 100  # disjoint, and complete but for less than one block
    assert len(data.val_blocks) == round(0.1 * len(pieces))


def test_the_same_text_gives_the_same_blocks(text_file: Path) -> None:
    one, two = blocks_of(text=str(text_file)), blocks_of(text=str(text_file))
    for a, b in zip(one.val_dataloader(), two.val_dataloader(), strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"])
        assert a["input_ids"].shape[1] == 16
    assert not torch.equal(one.train_blocks[0]["input_ids"], one.val_blocks[0]["input_ids"])


def test_no_text_given_takes_the_one_python_carries() -> None:
    data = blocks_of(context=128, vocab_size=1024)
    assert len(data.train_blocks) > 500
    assert data.tokenizer is not None
    assert " the " in data.tokenizer.decode(torch.cat(list(data.train_blocks[:20]["input_ids"])))


def test_the_tokenizer_of_the_model_is_used(model_dir: Path, text_file: Path) -> None:
    data = blocks_of(text=str(text_file), tokenizer=str(model_dir), vocab_size=999)
    assert data.tokenizer is not None
    assert len(data.tokenizer) == 300


def test_tokenizer_can_encode_any_text() -> None:
    tokenizer = train_tokenizer(["only a few letters"], vocab_size=257)
    text = "Größe, 数, \x00 and 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 1}, r"Expected `context` to be at least 2 tokens, but got 1"),
        ({"batch_size": 0}, r"Expected `batch_size` to be at least 1, but got 0"),
        ({"val_fraction": 0.0}, r"Expected `val_fraction` to lie between 0 and 1, but got 0\.0"),
        ({"val_fraction": 1.0}, r"Expected `val_fraction` to lie between 0 and 1, but got 1\.0"),
        ({"vocab_size": 256}, r"Expected `vocab_size` to be at least 257 .* but got 256"),
        ({"checksum": "abc"}, r"Expected `checksum` to be 64 hexadecimal digits \(SHA-256\), but got 'abc'"),
    ],
)
def test_argument_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextData(**arguments)


def test_missing_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected `text` to be a readable text file.*none\.txt.*No such file.*Check"):
        blocks_of(text=str(tmp_path / "none.txt"))


def test_unreadable_text(tmp_path: Path) -> None:  # a folder: the one thing that root cannot read either
    with pytest.raises(ValueError, match=r"Expected `text` to be a readable text file.*Is a directory"):
        blocks_of(text=str(tmp_path))


def test_undecodable_text(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("Größe".encode("latin-1"))
    with pytest.raises(ValueError, match=r"Expected `text` to be UTF-8, but byte 2 of .*latin1\.txt' is 0xf6.*iconv"):
        blocks_of(text=str(path))


@pytest.mark.parametrize("content", [b"", b" \n\n\t", b"\xef\xbb\xbf"], ids=["empty", "blank", "byte order mark"])
def test_empty_text(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"Expected `text` to hold text, but .*empty\.txt' is empty"):
        blocks_of(text=str(path))


def test_text_shorter_than_one_context(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Too short.")
    message = r"at least two blocks of `context` = 16 tokens.* but got \d+ tokens from .*short\.txt.*smaller"
    with pytest.raises(ValueError, match=message):
        blocks_of(text=str(path))


def test_checksum_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("some text")
    right = hashlib.sha256(b"some text").hexdigest()
    assert read_text(path, right.upper()) == "some text"
    with pytest.raises(ValueError, match=rf"checksum {'0' * 64}, but .*text\.txt' has {right}.*checksum: null"):
        read_text(path, "0" * 64)


# -- fetching -----------------------------------------------------------------------------------------------------


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address that serves ``served/book.txt`` under `tmp_path`."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "book.txt").write_text("A text.\n" * 500)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served")))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/book.txt"
    server.shutdown()
    server.server_close()
    thread.join()


def test_fetched_once_and_kept(tmp_path: Path, address: str) -> None:
    cache = tmp_path / "cache"
    data = blocks_of(text=address, cache_dir=str(cache))
    assert len(data.train_blocks) > 10
    (tmp_path / "served" / "book.txt").unlink()  # a second fetch would fail
    assert fetch_text(address, cache).read_text() == "A text.\n" * 500


def test_fetched_with_the_right_checksum(tmp_path: Path, address: str) -> None:
    right = hashlib.sha256(b"A text.\n" * 500).hexdigest()
    assert len(blocks_of(text=address, cache_dir=str(tmp_path / "cache"), checksum=right).train_blocks) > 10


def test_fetched_with_another_checksum(tmp_path: Path, address: str) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"SHA-256 checksum 0{64}, but what http\S* serves.*`checksum: null`"):
        blocks_of(text=address, cache_dir=str(cache), checksum="0" * 64)
    assert not list(cache.iterdir())  # nothing that a later run would take for the text


def test_kept_text_that_changed_is_noticed(tmp_path: Path, address: str) -> None:
    path = fetch_text(address, tmp_path / "cache")
    path.write_text("Another text.\n" * 500)
    with pytest.raises(ValueError, match=r"SHA-256 checksum [0-9a-f]{64}, but .*book\.txt' has .*delete the file"):
        blocks_of(text=address, cache_dir=str(tmp_path / "cache"))


def test_fetch_fails(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match=r"fetching http\S*none\.txt failed: .*404.*path of the file as `text`"):
        blocks_of(text=address.replace("book", "none"), cache_dir=str(tmp_path / "cache"))


# -- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "nowhere.gguf"])
def test_unknown_model_path(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Expected `model` to be .*, but got '{name}', which does not exist.*Give"):
        load_pretrained(AutoModelForCausalLM, name)


def test_model_file_of_another_kind(text_file: Path) -> None:
    with pytest.raises(ValueError, match=r"which is a file of another kind"):
        load_pretrained(AutoModelForCausalLM, str(text_file))


@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoTokenizer])
def test_directory_without_a_model(tmp_path: Path, auto_class: Any) -> None:
    with pytest.raises(ValueError, match=rf"Expected `model` to hold what {auto_class.__name__} can load, but .*"):
        load_pretrained(auto_class, str(tmp_path))


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_gguf_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(_text, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(ModuleNotFoundError, match=rf"needs the package `{package}`.*pip install gguf accelerate"):
        load_pretrained(AutoModelForCausalLM, str(tmp_path / "model.gguf"))
