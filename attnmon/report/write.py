"""From run folders to the files of a report."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attnmon.report.compare import compare
from attnmon.report.data import RunData
from attnmon.report.find import ReportError
from attnmon.report.page import GENERATOR, report_html
from attnmon.report.read import MAX_VALUES, read_run
from attnmon.report.summary import FORMAT, report_json

__all__ = ["write_report"]

_NAMES = {1: "attention_report.html", 2: "attention_comparison.html"}


def write_report(
    run_dirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str] | None = None,
    *,
    page: bool = True,
    max_values: int = MAX_VALUES,
) -> Path:
    """Writes the report of a run, or of two and how they differ: an HTML page, and JSON of the same name beside it.

    Args:
        run_dirs: One folder or two, see `read_run`.
        output: A folder, or a file that ends in ``.html`` (``.json`` without the page). None: in the folder of the
            first run, ``attention_report.html`` for one run and ``attention_comparison.html`` for two.
        page: Whether the page is written, or only the JSON.
        max_values: Figures kept of each prefix, see `read_run`.

    Returns:
        The page, or the JSON file without one.

    Raises:
        ReportError: A folder holds no run, or several, or no attention data; or ``output`` is a file that is not a
            report, or can't be written.
    """
    folders = [run_dirs] if isinstance(run_dirs, str | os.PathLike) else list(run_dirs)
    if len(folders) not in _NAMES:
        raise ReportError(
            f"Expected `run_dirs` to be one folder or two, but got {len(folders)}. Compare more in pairs."
        )
    target = _target(output, page, len(folders))
    runs = _told_apart([read_run(folder, max_values=max_values) for folder in folders])
    if target is None:
        target = runs[0].folder / _NAMES[len(runs)]
    comparisons = []
    if len(runs) == 2:
        first, second = (run.sections for run in runs)
        comparisons = [compare(first[prefix], second[prefix]) for prefix in first if prefix in second]
    # What was asked for keeps its spelling: .HTML will do.
    page_path, json_path = (
        target if target.suffix.lower() == suffix else target.with_suffix(suffix) for suffix in (".html", ".json")
    )
    files = {json_path: report_json(runs, comparisons)}
    if page:
        files[page_path] = report_html(runs, comparisons).encode()
    for path in files:
        _check_ours(path)
    for path, content in files.items():
        _write(path, content)
    return page_path if page else json_path


def _target(output: str | os.PathLike[str] | None, page: bool, count: int) -> Path | None:
    if output is None:
        return None
    if not str(output).strip():
        raise ReportError("Expected `output` to be a folder or a file, but got an empty name; `.` is this folder.")
    path, suffix = Path(output), ".html" if page else ".json"
    if path.suffix.lower() == suffix and not path.is_dir():
        return path
    if path.is_file() or (path.suffix and not path.is_dir() and not str(output).endswith(os.sep)):
        raise ReportError(f"Expected `output` to be a folder or a file that ends in {suffix}, but got {path}.")
    return path / _NAMES[count]


def _told_apart(runs: list[RunData]) -> list[RunData]:
    """Runs of one name, with as much of their paths as tells them apart."""
    if len({run.name for run in runs}) == len(runs) or len({run.folder.resolve() for run in runs}) < len(runs):
        return runs
    parts = [run.folder.resolve().parts for run in runs]
    count = len(Path(runs[0].name).parts)
    while len({path[-count:] for path in parts}) < len(runs):
        count += 1
    return [replace(run, name=str(Path(*path[-count:]))) for run, path in zip(runs, parts, strict=True)]


def _check_ours(path: Path) -> None:
    """Only a report may be written over."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            begin = file.read(1000).decode(errors="replace")
    except OSError as error:
        raise ReportError(
            f"Expected `output` to be a file that can be written, but {path}: {error.strerror}."
        ) from None
    if GENERATOR not in begin and f'"format":"{FORMAT}"' not in begin:
        raise ReportError(
            f"Expected `output` to be a new file or an earlier report, but {path} is something else. Name another with "
            f"`--output`."
        )


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: a full disk must not leave half a page."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(content)
            except OSError:
                Path(file.name).unlink()
                raise
        mask = os.umask(0)
        os.umask(mask)
        Path(file.name).chmod(0o666 & ~mask)  # a temporary file is private, a report is as any other file
        Path(file.name).replace(path)
    except OSError as error:
        raise ReportError(
            f"Expected `output` to be a place that can be written, but {path}: {error.strerror or error}. Name another "
            f"with `--output`."
        ) from None
