"""``python -m attnmon.report RUN_DIR [RUN_DIR]``."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence

from attnmon.report.find import ReportError, find_run
from attnmon.report.write import write_report

__all__ = ["main"]

_LARGE = 100_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m attnmon.report",
        description="Writes one self-contained HTML page, and JSON beside it, about the attention heads of a run, or "
        "of two runs and how they differ, from their TensorBoard event files, or the metrics.csv of Lightning's CSV "
        "logger.",
    )
    parser.add_argument(
        "run_dir",
        nargs="+",
        metavar="RUN_DIR",
        help="folder with the event files or the metrics.csv of a run; one or two",
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="a folder, or a file that ends in .html (.json with --json); by default attention_report.html, or "
        "attention_comparison.html, in the folder of the first run",
    )
    parser.add_argument("--json", action="store_true", help="write the JSON file only")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    options = parser.parse_args(arguments)
    if options.json and options.open:
        parser.error("--open shows the page, which --json does not write: leave one of them out")
    try:
        _announce(options.run_dir)
        path = write_report(options.run_dir, options.output, page=not options.json)
    except ReportError as error:
        parser.error(str(error))
    sys.stdout.write(f"{path}\n")
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _announce(run_dirs: Sequence[str]) -> None:
    """Says so where reading takes a while: TensorBoard's reader checks every byte, in Python."""
    size = sum(path.stat().st_size for run_dir in run_dirs for path in find_run(run_dir).files)
    if size > _LARGE:
        sys.stderr.write(f"Reading {size / 1e6:.0f} MB of logs; a minute is enough for 200 to 300 MB.\n")


if __name__ == "__main__":
    sys.exit(main())
