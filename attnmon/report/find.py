"""Which files belong to the run that a folder holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Found", "ReportError", "find_run"]

_FILES = "event files or a metrics.csv"
_NAMED = 8  # folders spelled out in an error


class ReportError(ValueError):
    """Something the user can put right; the text says what was expected, what came, and what helps."""


@dataclass(frozen=True)
class Found:
    """The files of one run.

    Attributes:
        folder: Where they lie: the folder asked for, or the only one with a run below it.
        files: Event files in the order in which they were begun, or one ``metrics.csv``.
        aside: Other folders with event files below the one asked for, which were left alone.
    """

    folder: Path
    files: tuple[Path, ...]
    aside: tuple[Path, ...] = ()


def find_run(folder: str | os.PathLike[str]) -> Found:
    """Finds the one run in a folder.

    Event files in the folder itself come first; else the only sub-folder with event files is taken, at any depth, as
    Lightning writes ``lightning_logs/version_0``. Without any event file, a ``metrics.csv`` of Lightning's CSV logger
    serves in the same way.

    Raises:
        ReportError: There is no such folder, no run in it, or more than one.
    """
    if not str(folder).strip():
        raise ReportError(f"Expected `run_dir` to be a folder with {_FILES}, but got an empty name.")
    root = Path(folder)
    if not root.exists():
        raise ReportError(f"Expected `run_dir` to be a folder with {_FILES}, but {root} does not exist.")
    if not root.is_dir():
        raise ReportError(
            f"Expected `run_dir` to be a folder with {_FILES}, but {root} is a file. Pass its folder: {root.parent}"
        )
    for pick in (_event_files, _metrics_csv):
        runs = {place: files for place in _folders(root) if (files := pick(place))}
        if root in runs:
            return Found(root, runs.pop(root), tuple(runs))
        if len(runs) == 1:
            ((place, files),) = runs.items()
            return Found(place, files)
        if runs:
            shown = [str(place) for place in runs][:_NAMED]
            more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
            raise ReportError(
                f"Expected `run_dir` to hold one run, but {root} holds {len(runs)}: {', '.join(shown)}{more}. "
                f"Name one of them, or two to compare them."
            )
    raise ReportError(
        f"Expected `run_dir` to hold TensorBoard event files (events.out.tfevents...), or the metrics.csv of "
        f"Lightning's CSV logger, but found none in {root} or below it."
    )


def _folders(root: Path) -> list[Path]:
    return sorted(Path(place) for place, _, _ in os.walk(root))


def _event_files(folder: Path) -> tuple[Path, ...]:
    """By name: it carries the time at which the file was begun."""
    return tuple(sorted(path for path in folder.iterdir() if "tfevents" in path.name and path.is_file()))


def _metrics_csv(folder: Path) -> tuple[Path, ...]:
    path = folder / "metrics.csv"
    return (path,) if path.is_file() else ()
