"""Time the static analysis: per algorithm, head and row, against a loop over rows, and how it grows with L and N.

    python recipes/benchmark_analysis.py --model HuggingFaceTB/SmolLM2-135M --text my.txt

Without a model it times a GPT-2 of the given size with random weights, without a text the one that Python carries.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import _loops
import torch
from _models import choose_device
from _text import load_pretrained, load_text, split_text, train_tokenizer
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

from attnmon.analysis import Analysis, AnalysisOptions, analyze

TASKS = {
    "distance": "1 and 2",
    "critical": "3",
    "separability": "4",
    "sensitivity": "5",
    "jacobian": "Jacobian",
    "summary": "entropy",
}


def benchmark_analysis(
    model: str | None = None,
    text: str | None = None,
    length: int = 1024,
    lengths: Sequence[int] = (256, 512, 1024),
    sizes: Sequence[int] = (25, 50, 100),
    rows: int = 24,
    n_layer: int = 2,
    n_head: int = 12,
    n_embd: int = 768,
    threads: int | None = None,
    device: str | None = None,
    memory_gib: float = 1.0,
) -> None:
    """Print how long every algorithm takes.

    Args:
        model: Hub id, local directory or ``.gguf`` file; null: a GPT-2 of the sizes below, random weights.
        text: File or address; null: the documentation that Python carries.
        length: Context length L of the main table; all rows of all heads.
        lengths: Context lengths of the growth table.
        sizes: Largest N of Algorithm 3 in the growth table.
        rows: Rows that the loop is timed on.
        n_layer: Layers of the random model.
        n_head: Its heads per layer.
        n_embd: Its width.
        threads: CPU threads; null: torch decides.
        device: ``"cpu"``, ``"cuda"``; null: a GPU if there is one.
        memory_gib: Budget for the working arrays.
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"Expected `threads` to be at least 1, but got {threads}. Leave it out: torch decides.")
        torch.set_num_threads(threads)
    shortest = 101 + rows  # the loop's rows have an N of up to 100
    if rows < 1 or length < shortest or min(lengths) < 2 or min(sizes) < 1:
        raise ValueError(
            f"Expected `length` to be at least {shortest} for {rows} `rows`, `lengths` at least 2 and `sizes` at least "
            f"1, but got {length}, {list(lengths)} and {list(sizes)}. Use longer contexts or fewer rows."
        )
    place = choose_device(device)
    console = Console()
    longest = max(length, *lengths)
    net, tokens = load(model, text, longest, n_layer, n_head, n_embd)
    net = net.to(place)

    def run(options: AnalysisOptions) -> tuple[Analysis, float]:
        begun = time.perf_counter()
        found = analyze(net, tokens, options, memory=int(memory_gib * 2**30), progress=console.is_terminal)
        return found, time.perf_counter() - begun

    options = AnalysisOptions(lengths=(*(2**k for k in range(5, 32) if 2**k < length), length))
    before = time_loops(net, tokens[:length], options, rows)
    whole, total = run(options)
    after = time_loops(net, tokens[:length], options, rows)
    heads = len(whole.heads)
    columns = ("algorithm", "seconds", "ms a head", "us a row", "loop, us a row", "loop / ours")
    table = Table(*columns, title=f"L = {length}, {heads} heads, every row, {len(whole.lengths)} lengths")
    for task, name in TASKS.items():
        seconds = whole.tables[task].seconds
        ours = seconds / heads / length
        loop = statistics.mean([before[task], after[task]]) if task in before else None
        versus = ("-", "-") if loop is None else (f"{1e6 * loop:.0f}", f"{loop / ours:.0f}")
        table.add_row(name, f"{seconds:.2f}", f"{1e3 * seconds / heads:.1f}", f"{1e6 * ours:.1f}", *versus)
    console.print(table)
    console.print(
        f"{total:.1f} s in all on {whole.about['device']} with {torch.get_num_threads()} threads. The loop is timed on "
        f"{rows} rows before and after."
    )

    growth = Table("L", *TASKS.values(), "all", title="Seconds over L")
    for size in lengths:
        fewer = {"top_n": options.top_n, "separability_top_n": options.separability_top_n}
        small = {name: tuple(n for n in values if n < size) for name, values in fewer.items()}
        found, took = run(replace(options, lengths=(size,), critical_top_n=min(100, size - 1), **small))  # type: ignore[arg-type]
        growth.add_row(str(size), *(f"{found.tables[task].seconds:.2f}" for task in TASKS), f"{took:.2f}")
    console.print(growth)
    by_size = Table("Algorithm 3: N up to", "seconds")
    for size in sizes:
        found, _ = run(replace(options, tasks=("critical",), critical_top_n=size))
        by_size.add_row(str(size), f"{found.tables['critical'].seconds:.2f}")
    console.print(by_size)
    if place.type == "cuda":
        console.print(f"Largest GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    else:
        import resource

        console.print(f"Largest memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def load(
    model: str | None, text: str | None, longest: int, n_layer: int, n_head: int, n_embd: int
) -> tuple[nn.Module, Tensor]:
    """A model and the first tokens of a text, ``(longest,)``."""
    words, _ = load_text(text)
    if model is None:
        tokenizer = train_tokenizer(split_text(words), 1024)
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=1024,
            n_positions=longest,
            n_layer=n_layer,
            n_head=n_head,
            n_embd=n_embd,
            bos_token_id=0,
            eos_token_id=0,
        )
        net: nn.Module = GPT2LMHeadModel(config)
    else:
        tokenizer = load_pretrained(AutoTokenizer, model)
        net = load_pretrained(AutoModelForCausalLM, model, dtype=torch.float32)
    ids = tokenizer(words[: 40 * longest], add_special_tokens=False, verbose=False)["input_ids"][:longest]
    if len(ids) < longest:
        raise ValueError(
            f"Expected `text` to have at least {longest} tokens, but got {len(ids)}. Give a longer text or a shorter "
            "`length`."
        )
    return net, torch.tensor(ids)


def time_loops(net: nn.Module, tokens: Tensor, options: AnalysisOptions, rows: int) -> dict[str, float]:
    """Seconds a row of the loop, for each algorithm.

    The rows are of random scores over the model's token embeddings, at positions spread over the context: what a row
    costs does not depend on its numbers.
    """
    table: Any = net.get_input_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        embedded = torch.nn.functional.normalize(table(tokens.to(table.weight.device)).float(), dim=-1).cpu()
    generator = torch.Generator().manual_seed(0)
    largest = max(*options.top_n, *options.separability_top_n, options.critical_top_n)
    places = sorted(random.Random(0).sample(range(largest + 1, len(tokens)), rows))
    scores = [torch.randn(place + 1, generator=generator) * 3 for place in places]
    directions = [torch.nn.functional.normalize(torch.randn(len(s), generator=generator), dim=-1) for s in scores]
    weights = [s.softmax(-1) for s in scores]

    def over_rows(function: Callable[..., Any], top_n: Sequence[int]) -> Callable[[], None]:
        def loop() -> None:
            for row in weights:
                function(row, embedded[: len(row)], top_n)

        return loop

    def sensitivities() -> None:
        for row, direction in zip(scores, directions, strict=True):
            _loops.sensitivity(row, direction, options.temperatures, options.epsilons)

    loops = {
        "distance": over_rows(_loops.distance, options.top_n),
        "critical": over_rows(_loops.distance, range(1, options.critical_top_n + 1)),
        "separability": over_rows(_loops.separability, options.separability_top_n),
        "sensitivity": sensitivities,
    }
    seconds = {}
    for task, loop in loops.items():
        begun = time.perf_counter()
        loop()
        seconds[task] = (time.perf_counter() - begun) / rows
    return seconds


if __name__ == "__main__":
    disable_progress_bar()
    try:
        auto_cli(benchmark_analysis, as_positional=False)
    except ValueError as error:
        sys.exit(f"ValueError: {error}")
