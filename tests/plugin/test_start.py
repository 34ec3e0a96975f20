"""What the tab costs TensorBoard's start."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

from plugin.conftest import write_run

from attnmon.plugin import AttentionLoader

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "lightning", "transformers", "datasets", "torchmetrics")


def _python(code: str, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_tensorboard_finds_the_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["tensorboard_plugins"] == {"attnmon": "attnmon.plugin:AttentionLoader"}
    found = [e for e in importlib.metadata.entry_points(group="tensorboard_plugins") if e.name == "attnmon"]
    assert found, "attnmon's entry point is not installed: pip install -e ."
    assert found[0].load() is AttentionLoader


def test_entry_point_imports_next_to_nothing():
    code = (
        "import sys, tensorboard.plugins.base_plugin; before = set(sys.modules)\n"
        "import attnmon.plugin\n"
        "print(*sorted(m for m in set(sys.modules) - before if m.partition('.')[0] not in sys.stdlib_module_names))"
    )
    assert _python(code).split() == ["attnmon", "attnmon.plugin"]


def test_starting_tensorboard_does_not_import_torch(tmp_path):
    write_run(tmp_path / "run", [0])
    code = (
        "import sys\n"
        "from tensorboard import default, program\n"
        "from tensorboard.backend import application\n"
        "from tensorboard.backend.event_processing.data_ingester import LocalDataIngester\n"
        "board = program.TensorBoard(plugins=default.get_plugins())\n"
        "board.configure(argv=['', '--logdir=' + sys.argv[1], '--reload_interval=0', '--reload_task=blocking'])\n"
        "data = LocalDataIngester(board.flags); data.start()\n"
        "app = application.TensorBoardWSGIApp(board.flags, board.plugin_loaders, data.data_provider,\n"
        "    board.assets_zip_provider, data.deprecated_multiplexer)\n"
        "from werkzeug.test import Client\n"
        "answer = Client(app).get('/data/plugin/attnmon/catalogue')\n"
        "print(answer.status_code, len(answer.json['runs']), [name for name in sys.argv[2:] if name in sys.modules])"
    )
    assert _python(code, str(tmp_path), *HEAVY).split(maxsplit=2) == ["200", "1", "[]\n"]


def test_tensorboard_starts_where_the_rest_cannot_be_imported(tmp_path):
    code = (
        "import sys; sys.modules['attnmon.records'] = None  # an import of it fails\n"
        "from tensorboard import default, program\n"
        "from tensorboard.backend import application\n"
        "from tensorboard.backend.event_processing.data_ingester import LocalDataIngester\n"
        "board = program.TensorBoard(plugins=default.get_plugins())\n"
        "board.configure(argv=['', '--logdir=' + sys.argv[1]])\n"
        "data = LocalDataIngester(board.flags)\n"
        "app = application.TensorBoardWSGIApp(board.flags, board.plugin_loaders, data.data_provider,\n"
        "    board.assets_zip_provider, data.deprecated_multiplexer)\n"
        "from werkzeug.test import Client\n"
        "listing = Client(app).get('/data/plugins_listing').json\n"
        "print('attnmon' in listing, 'scalars' in listing)"
    )
    assert _python(code, str(tmp_path)).split() == ["False", "True"]
