"""What the tests of the report share."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.runs import Run


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Two layers of two heads, three samples: entropy 0.1 x layer + 0.01 x head + step / 1000."""
    run = Run(tmp_path / "plain")
    run.samples((0, 10, 20), lambda step, layer, head: 0.1 * layer + 0.01 * head + step / 1000, {0: 2, 1: 2})
    for step in (0, 10, 20):
        run.writer.add_scalar("train/loss", 5 - step / 10, step)
    return run.close()
