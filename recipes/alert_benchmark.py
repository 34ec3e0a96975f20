"""Score the warnings: runs with something planted in them, and healthy ones, all small enough for a CPU.

    python recipes/alert_benchmark.py --config configs/alert_benchmark/demo.yaml

The arguments of `alert_benchmark` are the schema of the YAML files and of the command line; ``--help`` lists them.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _alert_families import CONTROL, FAMILIES, Family, twin
from _alert_scoring import SETS, Outcome, family_table, judge, kind_table, listing, score, signal_table
from _alert_training import Run, load, path_of, save, train
from _overhead import Table, cell_text
from jsonargparse import auto_cli
from rich.console import Console

from attnmon.alerts import AlertRules

EMBEDDED = "embedded"


@dataclass(frozen=True)
class Task:
    """One run to be there, and the set that it is scored in."""

    family: Family
    group: str
    seed: int
    text: str

    def path(self, folder: Path) -> Path:
        """Its file."""
        return path_of(folder, self.family, self.seed, self.text)


def alert_benchmark(
    families: Sequence[str] | str = "all",
    tune_seeds: Sequence[int] = (0,),
    score_seeds: Sequence[int] = (100,),
    text: str | None = None,
    checksum: str | None = None,
    steps: int | None = None,
    rules: AlertRules | None = None,
    patience: int = 3,
    jobs: int = 1,
    output: str = "runs/alert_benchmark",
    rescore: bool = False,
) -> None:
    """Train what is planted and what is healthy, and print how the rules do on it.

    Every run's samples are kept under ``output``, and a run that lies there is not trained again. A planted run is
    compared with its twin, the same run with nothing planted, which is also a control.

    Args:
        families: Names from `_alert_families.FAMILIES`, as a list or with commas between, or ``all``.
        tune_seeds: Seeds on which rules may be tuned; of the families that are not marked unseen.
        score_seeds: Seeds for scoring only, of all families.
        text: Second text, a file or an address; the first is the language reference that every CPython carries.
            Without it, families that need a second one are left out.
        checksum: SHA-256 that it must have.
        steps: Steps of each run and its pretraining at most, to try the recipe out; None: as long as the families say.
        rules: The rules and their numbers; None: the defaults.
        patience: Samples in a row that a change has to last, where a rule has no number of its own.
        jobs: Processes that train side by side, one thread each.
        output: Folder for runs (``runs``), ``results.json`` and ``results.md``.
        rescore: Score what lies there, with nothing trained.

    Raises:
        ValueError: An argument is out of its range.
    """
    chosen = choose(families)
    check(tune_seeds, score_seeds, steps, patience, jobs)
    if steps is not None:
        chosen = [shorten(family, steps) for family in chosen]
    folder = make_folder(output)
    texts = read_texts(text, checksum)
    tasks = make_tasks(chosen, tune_seeds, score_seeds, list(texts))
    # as wide as the tables where no terminal says how wide it is
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200)
    left_out = sorted({family.name for family in chosen} - {task.family.name for task in tasks})
    if left_out:
        console.print(f"Left out, as there is no second text or no seed for them: {', '.join(left_out)}.")
    if not rescore:
        train_all([task for task in tasks if not task.path(folder).is_file()], texts, folder, jobs, console)
    outcomes, healthy = score_all(tasks, folder, rules, patience, steps)
    if not outcomes:
        raise ValueError(
            f"Expected `output` to hold runs to score, but {output!r} has none of these families and seeds. Leave out "
            "`rescore` to train them."
        )
    if len(outcomes) < len(tasks):
        console.print(f"Scored: {len(outcomes)} of {len(tasks)} runs. The others are not there.")
    tables = [kind_table(outcomes), family_table(outcomes), signal_table(healthy), listing(outcomes)]
    for table in tables:
        console.print(table.to_rich())
    write(Path(output), outcomes, tables, patience, rules)
    console.print(f"Tables: {Path(output) / 'results.md'}", soft_wrap=True)


# -- what is run ----------------------------------------------------------------------------------------------------


def make_tasks(
    families: Sequence[Family], tune_seeds: Sequence[int], score_seeds: Sequence[int], texts: Sequence[str]
) -> list[Task]:
    """Every run of these families and the twins they need; seed by seed, so that a part of them is of all kinds."""
    tasks = []
    for seed in (*score_seeds, *tune_seeds):
        for text in texts:
            for family in families:
                if family.setup.other_text and len(texts) < 2:
                    continue
                if family.setup.task != "text" and text != texts[0]:  # it would be the same run
                    continue
                if seed in score_seeds:
                    tasks.append(Task(family, "unseen" if family.unseen else "score", seed, text))
                elif not family.unseen:
                    tasks.append(Task(family, "tune", seed, text))
    return tasks


def with_twins(families: Sequence[Family]) -> list[Family]:
    """Controls first, and among them the twin of every planted family."""
    twins = [twin(family) for family in families if family.kind != CONTROL]
    every = dict.fromkeys([*(family for family in families if family.kind == CONTROL), *twins, *families])
    return list(every)


def shorten(family: Family, steps: int) -> Family:
    """The family with fewer steps, its plant in the first half of them."""
    setup = replace(family.setup, steps=min(steps, family.setup.steps), pretrained=min(steps, family.setup.pretrained))
    plant = family.plant and replace(family.plant, step=min(family.plant.step, setup.steps // 2))
    return replace(family, setup=setup, plant=plant)


def train_all(tasks: Sequence[Task], texts: Mapping[str, bytes], folder: Path, jobs: int, console: Console) -> None:
    """Train what is not there yet."""
    for number, task in enumerate(in_processes(tasks, texts, folder, jobs), 1):
        console.print(f"{number} of {len(tasks)}: {task.family.name}, {task.text}, seed {task.seed}", soft_wrap=True)


def in_processes(tasks: Sequence[Task], texts: Mapping[str, bytes], folder: Path, jobs: int) -> Iterator[Task]:
    """Each task once it is done."""
    if jobs == 1:
        threads = torch.get_num_threads()
        try:
            start(texts, folder)
            yield from map(work, tasks)
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    with ProcessPoolExecutor(jobs, context, start, (texts, folder)) as pool:
        waiting = [pool.submit(work, task) for task in tasks]
        try:
            for future in as_completed(waiting):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


_shared: dict[str, Any] = {}


def start(texts: Mapping[str, bytes], folder: Path) -> None:
    """What a process needs for all of its runs."""
    torch.set_num_threads(1)  # more gain nothing here, and sums would come in another order
    _shared.update(texts=texts, folder=folder)


def work(task: Task) -> Task:
    """Train one run and keep it."""
    folder = _shared["folder"]
    save(train(task.family, task.seed, _shared["texts"], task.text, folder), task.path(folder))
    return task


# -- scoring --------------------------------------------------------------------------------------------------------


def score_all(
    tasks: Sequence[Task], folder: Path, rules: AlertRules | None, patience: int, steps: int | None = None
) -> tuple[list[Outcome], list[Run]]:
    """Judge the runs that are there; the outcomes, and the healthy runs."""
    outcomes, controls = [], []
    for task in tasks:
        path = task.path(folder)
        if not path.is_file():
            continue
        run = load(path)
        healthy = None
        if task.family.kind == CONTROL:
            controls.append(run)
        else:
            other = twin(FAMILIES[task.family.name])
            other = other if steps is None else shorten(other, steps)
            place = path_of(folder, other, task.seed, task.text)
            if not place.is_file():
                continue
            healthy = load(place)
        outcomes.append(score(task.family, task.group, run, healthy, judge(run, rules, patience)))
    return outcomes, controls


def write(
    folder: Path, outcomes: Sequence[Outcome], tables: Sequence[Table], patience: int, rules: AlertRules | None
) -> None:
    """The tables as Markdown; every outcome, and the rules, as JSON."""
    parts = [table.to_markdown() for table in tables]
    sets = "\n".join(f"- {name}: {words}" for name, words in SETS.items())
    (folder / "results.md").write_text("\n\n".join([*parts, sets]) + "\n", encoding="utf-8")
    content = {
        "rules": asdict(rules or AlertRules()),
        "patience": patience,
        "sets": dict(SETS),
        "runs": [outcome.plain() for outcome in outcomes],
        "tables": [
            {"title": t.title, "columns": t.columns, "rows": [list(map(cell_text, row)) for row in t.rows]}
            for t in tables
        ],
    }
    (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# -- arguments ------------------------------------------------------------------------------------------------------


def choose(families: Sequence[str] | str) -> list[Family]:
    """The families of these names, and their twins.

    Raises:
        ValueError: A name is unknown, or there is none.
    """
    names = [part.strip() for part in (families.split(",") if isinstance(families, str) else families)]
    if names == ["all"]:
        names = list(FAMILIES)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown or not names:
        got = repr(unknown[0]) if unknown else "none"
        raise ValueError(f"Expected `families` to be all, or to name some of {', '.join(FAMILIES)}, but got {got}.")
    return with_twins([FAMILIES[name] for name in names])


def check(tune_seeds: Sequence[int], score_seeds: Sequence[int], steps: int | None, patience: int, jobs: int) -> None:
    """Refuse what cannot be run, before anything is.

    Raises:
        ValueError: An argument is out of its range.
    """
    both = sorted(set(tune_seeds) & set(score_seeds))
    if both:
        raise ValueError(
            f"Expected `score_seeds` to have no seed of `tune_seeds`, but got {both} in both. What was tuned on would "
            "be scored."
        )
    if not (*tune_seeds, *score_seeds):
        raise ValueError("Expected `tune_seeds` and `score_seeds` to have at least one entry together, but got none.")
    for name, value, least in (("steps", steps, 10), ("patience", patience, 1), ("jobs", jobs, 1)):
        if value is not None and value < least:
            raise ValueError(f"Expected `{name}` to be at least {least}, but got {value}.")


def make_folder(output: str) -> Path:
    """The folder of the runs.

    Raises:
        ValueError: It cannot be made.
    """
    folder = Path(output) / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"Expected `output` to be a folder, but making {str(folder)!r} failed: {error.strerror}. Give another one."
        ) from error
    return folder


def read_texts(text: str | None, checksum: str | None) -> dict[str, bytes]:
    """Name -> bytes: the embedded text, and the other one if there is one.

    Raises:
        ValueError: The text cannot be had, or is too short.
    """
    from _text import load_text  # Lightning and datasets take seconds to import, and only this process needs them

    texts = {EMBEDDED: load_text()[0].encode()}
    if text is not None:
        other, found = load_text(text, checksum)
        texts[found[:8]] = other.encode()
        if len(other) < 10_000:
            raise ValueError(f"Expected `text` to have at least 10000 characters, but got {len(other)}.")
    return texts


if __name__ == "__main__":
    try:
        auto_cli(alert_benchmark, as_positional=False)
    except ValueError as error:
        sys.exit(f"ValueError: {error}")
