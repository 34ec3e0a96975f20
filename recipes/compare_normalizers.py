"""Compare what softmax and its rivals make of the same scores: separability, entropy and Jacobian norm over L.

    python recipes/compare_normalizers.py --config configs/compare_normalizers/demo.yaml

The arguments of `compare_normalizers` are the schema of the YAML files and of the command line; ``--help`` lists them.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from _figures import save
from _models import check_model, check_vocabulary, choose_device, encode, load_model, train_small_model
from _text import check_checksum, load_pretrained, load_text, split_text, train_tokenizer
from jsonargparse import auto_cli
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from attnmon.analysis import Analysis, AnalysisOptions, analyze

NORMALIZERS = ("softmax", "sparsemax", "entmax15", "ssmax(0.2)", "sa-softmax")
# quantity of a panel: its table, its label, and what it says
PANELS = {
    "ratio": ("separability", "Ns/N at N = {}", "selected keys that can be told apart"),
    "entropy": ("summary", "entropy (nats)", "how many keys share the weight"),
    "jacobian": ("summary", "spectral norm of the Jacobian (1/score)", "how strongly scores move weights"),
}
_LOW, _HIGH = 25, 75  # percentiles of the band over heads
_COLOURS = ("#1b1b1b", "#0072b2", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


def compare_normalizers(
    model: str | None = None,
    text: str | None = None,
    checksum: str | None = None,
    offset: int = 0,
    lengths: Sequence[int] = (32, 64, 128, 256, 512, 1024),
    normalizers: Sequence[str] = NORMALIZERS,
    top_n: int = 10,
    vectors: Literal["embedding", "positioned", "hidden", "value"] = "embedding",
    rows: int | Literal["all"] = 32,
    seed: int = 0,
    device: str | None = None,
    memory_gib: float = 1.0,
    threads: int | None = None,
    out: str | None = None,
    progress: bool = True,
    n_layer: int = 2,
    n_head: int = 8,
    n_embd: int = 96,
    vocab_size: int = 512,
    train_steps: int = 600,
    batch_size: int = 4,
    learning_rate: float = 4e-3,
) -> int:
    """Apply each normaliser to a model's own scores and draw what comes of it over the context length.

    Only the weights are replaced: the scores are those of the model as it was trained, with softmax as a rule, so the
    figure says what a normaliser does to given scores, not what a model trained with it would do.

    Args:
        model: Hub id, local directory or ``.gguf`` file; by default a small GPT-2 is trained first.
        text: File or web address; by default the language reference that Python carries.
        checksum: SHA-256 that the text must have, or null.
        offset: First token of the text that is used.
        lengths: Context lengths L.
        normalizers: Names as `attnmon.normalizers.normalizer_from_name` takes them; an s or alpha in brackets. s = 1
            multiplies the scores by log n, far more than a model trained with softmax bears; about 0.2 leaves them as
            they are at n = 150.
        top_n: N of the separability.
        vectors: What the keys carry.
        rows: ``all``, or how many rows are drawn between each length and the next smaller one.
        seed: Of the drawn rows and of the small model.
        device: Where the model runs; by default the GPU if there is one.
        memory_gib: Memory that the working arrays may take, in GiB, beside the model.
        threads: CPU threads; by default torch decides.
        out: Folder of the results; by default ``runs/compare_normalizers/`` and the name of the model.
        progress: Whether to show progress bars.
        n_layer: Layers of the small model.
        n_head: Heads per layer of the small model.
        n_embd: Width of the small model.
        vocab_size: Entries of the tokenizer that is trained for it.
        train_steps: Steps that the small model is trained for.
        batch_size: Blocks of the longest L per step.
        learning_rate: Peak learning rate of its training.

    Returns:
        0.

    Raises:
        ValueError: An argument is out of its range, or text or model cannot be used.
        ModuleNotFoundError: The package that a normaliser needs is missing.
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"Expected `threads` to be at least 1, but got {threads}. Leave it out: torch decides.")
        torch.set_num_threads(threads)
    if not normalizers:
        raise ValueError(f"Expected `normalizers` to name at least one, but got none. Try {list(NORMALIZERS)}.")
    options = {
        name: AnalysisOptions(
            lengths=tuple(lengths),
            tasks=("separability", "summary"),
            separability_top_n=(top_n,),
            vectors=vectors,
            rows=rows,
            normalizer=name,
            seed=seed,
        )
        for name in normalizers
    }
    if find_spec("entmax") is None and any(name.startswith(("sparsemax", "entmax")) for name in normalizers):
        raise ModuleNotFoundError(
            "Sparsemax and alpha-entmax need the package `entmax`. Install it with: pip install 'attnmon[entmax]'"
        )
    place = choose_device(device)
    check_checksum(checksum)
    console = Console()
    content, sha256 = load_text(text, checksum)
    longest = max(lengths)
    folder = Path(out or Path("runs/compare_normalizers") / Path(model or "small").name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"Expected `out` to be a folder, but making {str(folder)!r} failed: {error.strerror}. Give another one."
        ) from error
    if model is None:
        tokens = encode(train_tokenizer(split_text(content), vocab_size), content, offset, longest, trains=True)
        settings = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "learning_rate": learning_rate}
        settings |= {"vocab_size": vocab_size, "train_steps": train_steps, "batch_size": batch_size, "seed": seed}
        settings |= {"context": longest}
        source = train_small_model(folder / "model", {**settings, "text_sha256": sha256}, text, checksum, progress)
    else:
        check_model(model, longest)
        source = model
        tokens = encode(load_pretrained(AutoTokenizer, model), content, offset, longest)
    net = load_model(source)
    check_vocabulary(net, tokens, model or "the small model")

    analyses: dict[str, Analysis] = {}
    for name, chosen in options.items():
        if progress:
            console.print(name, highlight=False)
        analyses[name] = analyze(
            net,
            tokens,
            chosen,
            device=place,
            memory=int(memory_gib * 2**30),
            folder=folder / "parts",
            progress=progress,
        )
    write_csv(folder / "normalizers.csv", analyses, top_n)
    save(draw(analyses, top_n), folder, "normalizers")
    report(console, analyses, top_n)
    console.print(f"Figure and numbers: {folder}", soft_wrap=True, highlight=False)
    return 0


def panel(analysis: Analysis, quantity: str, top_n: int) -> np.ndarray:
    """One quantity of a panel, ``(heads, lengths)``."""
    table = analysis.tables[PANELS[quantity][0]]
    return table.at(quantity, top_n=top_n) if table.axes else table.at(quantity)


def draw(analyses: Mapping[str, Analysis], top_n: int) -> Figure:
    """Three panels over L: the median over heads of each normaliser, and the middle half of the heads as a band."""
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    for place, (quantity, (_, label, meaning)) in zip(axes, PANELS.items(), strict=True):
        absent = []
        for index, (name, analysis) in enumerate(analyses.items()):
            values = panel(analysis, quantity, top_n)
            known = np.isfinite(values).any(0)
            if not known.any():
                absent.append(name)
                continue
            low, middle, high = np.nanpercentile(values[:, known], (_LOW, 50, _HIGH), axis=0)
            lengths = np.array(analysis.lengths)[known]
            colour = _COLOURS[index % len(_COLOURS)]
            place.plot(lengths, middle, "o-", ms=3.5, color=colour, label=name)
            place.fill_between(lengths, low, high, color=colour, alpha=0.12, lw=0)
        lengths = next(iter(analyses.values())).lengths
        place.set_xscale("log", base=2)
        place.set_xticks(lengths, [str(length) for length in lengths])
        place.minorticks_off()
        place.set_xlabel("context length L (tokens)")
        place.set_title(f"{label.format(top_n)}\n{meaning}", fontsize=10)
        place.grid(alpha=0.25)
        if quantity == "jacobian":
            place.set_yscale("log")
        if absent:
            place.text(
                0.02, 0.02, f"not defined: {', '.join(absent)}", transform=place.transAxes, fontsize=8, color="0.3"
            )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(analyses), frameon=False)
    heads = len(next(iter(analyses.values())).heads)
    figure.suptitle(f"Normalisers on the same scores: median and middle half of {heads} heads", fontsize=11)
    return figure


def write_csv(path: Path, analyses: Mapping[str, Analysis], top_n: int) -> None:
    """Write every mean of every head, a line each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["normalizer", "quantity", "layer", "head", "length", "value"])
        for name, analysis in analyses.items():
            for quantity in PANELS:
                for (layer, head), row in zip(analysis.heads, panel(analysis, quantity, top_n), strict=True):
                    for length, value in zip(analysis.lengths, row, strict=True):
                        writer.writerow([name, quantity, analysis.layers[layer], head, length, value])


def report(console: Console, analyses: Mapping[str, Analysis], top_n: int) -> None:
    """Print the medians over heads at the longest L."""
    longest = max(next(iter(analyses.values())).lengths)
    headings = (label.format(top_n) for _, label, _ in PANELS.values())
    table = Table("normaliser", *headings, title=f"Median over heads, L = {longest}")
    for name, analysis in analyses.items():
        figures = []
        for quantity in PANELS:
            values = panel(analysis, quantity, top_n)[:, -1]
            values = values[np.isfinite(values)]
            figures.append(f"{np.median(values):.3g}" if len(values) else "-")
        table.add_row(name, *figures)
    console.print(table)


if __name__ == "__main__":
    disable_progress_bar()
    try:
        sys.exit(auto_cli(compare_normalizers, as_positional=False))
    except (ValueError, ModuleNotFoundError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
