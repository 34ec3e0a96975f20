"""Lint, types, the direction of imports, and what the package is made of."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "configs" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["-m", "ruff", "check", "--no-cache", "."], id="lint"),
        pytest.param(["-m", "mypy"], id="types"),
        pytest.param(
            ["-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"],
            id="import contract",
        ),
    ],
)
def test_static_check(arguments: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_top_level_holds_only_what_the_design_names() -> None:
    tracked = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    made_by_tools = {"runs", "build", "dist", "attnmon.egg-info", "__pycache__"}
    assert tracked - made_by_tools == {"pyproject.toml", "README.md", "attnmon", "recipes", "tests", "configs"}


def test_every_dependency_is_pinned_to_a_version_that_it_allows() -> None:
    pins = {re.sub("[-_.]+", "-", pin.name).lower(): pin for pin in CONSTRAINTS}
    wanted = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    for requirement in map(Requirement, wanted):
        if requirement.name == PROJECT["name"]:
            continue
        (pin,) = pins[re.sub("[-_.]+", "-", requirement.name).lower()].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version, prereleases=True), requirement
    assert str(pins["torch"]) == "torch==2.13.0"


def test_no_file_names_a_package_index() -> None:
    for path in [ROOT / "pyproject.toml", ROOT / "configs" / "constraints.txt", ROOT / ".ci" / "run"]:
        assert not re.search(r"index-url|find-links|pypi\.org", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("module", ["attnmon", "attnmon.functional", "attnmon.monitor"])
def test_lightning_is_not_imported_by_anything_but_the_callback(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(name.startswith('lightning.pytorch') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300, stdin=subprocess.DEVNULL).returncode == 0
