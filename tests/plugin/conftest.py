"""Runs written with the real writer, and real TensorBoard applications that show them."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.util.tensor_util import make_tensor_proto
from torch.utils.tensorboard import SummaryWriter
from werkzeug.test import Client, TestResponse

from attnmon.alerts import AlertEngine, AlertRules, EntropyRise, ScoreGrowth
from attnmon.plugin import AttentionLoader
from attnmon.snapshot import Snapshot
from attnmon.tensorboard import TabWriter

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what TensorBoard brings along
    from tensorboard import default, program
    from tensorboard.backend import application
    from tensorboard.backend.event_processing.data_ingester import LocalDataIngester
    from tensorboard.data import server_ingester

LAYERS, HEADS = 3, 4
STEPS = range(0, 200, 10)
RISEN = (1, 2)  # layer and head whose entropy rises halfway
SPREAD = (2, 0)  # ... and whose scores grow


def figures(step: int, seed: int = 0) -> dict[str, dict[int, list[float]]]:
    """Plain figures in which two heads get into trouble from step 100 on."""
    drawn = np.random.default_rng(seed).uniform(0.2, 0.4, (LAYERS, HEADS)) + step * 1e-5
    spread = 10.0 * drawn
    if step >= 100:
        drawn[RISEN], spread[SPREAD] = 0.9, 12.0
    drawn[0, 3] = np.nan
    return {
        "entropy_normalized": {layer: drawn[layer].tolist() for layer in range(LAYERS)},
        "score_spread": {layer: spread[layer].tolist() for layer in range(LAYERS)},
        "mine": {layer: (-drawn[layer]).tolist() for layer in range(LAYERS)},
    }


def recovering(step: int, seed: int = 0) -> dict[str, dict[int, list[float]]]:
    """Figures whose wide scores are over from step 140 on."""
    found = figures(step, seed)
    return found if step < 140 else found | {"score_spread": figures(0, seed)["score_spread"]}


def snapshot(step: int, values: Mapping[str, Mapping[int, list[float]]], **more: Any) -> Snapshot:
    layers = sorted({layer for table in values.values() for layer in table})
    return Snapshot(
        step=step,
        values=values,
        errors={},
        rows_used={},
        rows_skipped={},
        layers={layer: f"model.layers.{layer}.attn" for layer in layers},
        temperatures=dict.fromkeys(layers, 8.0),
        nonfinite={},
        padding={},
        **more,
    )


def write_run(
    folder: Path,
    steps: Iterable[int] = STEPS,
    *,
    seed: int = 0,
    prefix: str = "attn",
    writer: SummaryWriter | None = None,
    rules_on: bool = True,
    figures: Callable[..., dict[str, dict[int, list[float]]]] = figures,
    own_limits: bool = False,
) -> None:
    """A run's event file, warnings and all; without the limits that each head has of its own, as earlier ones are."""
    mine = writer or SummaryWriter(folder)
    tab = TabWriter(mine, prefix)
    growth, rise = ScoreGrowth(spread=10.0, jump=99.0), EntropyRise(severity="warn")
    rules = AlertRules(entropy_rise=rise, score_growth=growth, uniform_drift=None, not_measured=None)
    engine = AlertEngine(rules)
    for step in steps:
        sample = snapshot(step, figures(step, seed))
        errors = {name: {layer: [0.0] * HEADS for layer in table} for name, table in sample.values.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the alerts themselves
            alerts = rules_on and engine.update(
                step=step,
                values=sample.values,
                errors=errors,
                layers=sample.layers,
                temperatures=sample.temperatures,
                nonfinite={layer: [0] * HEADS for layer in range(LAYERS)},
            )
        sample = dataclasses.replace(sample, alerts=tuple(alerts or ()), alarmed=engine.alarmed() if rules_on else {})
        about: Iterable[Mapping[str, Any]] = ()
        if own_limits:
            sample, about = dataclasses.replace(sample, limits=engine.limits()), rules.own_limits(sample.values)
        tab.write(sample, every_n_steps=10, levels=rules.fixed_levels(sample.values), own_limits=about)
    mine.flush() if writer else mine.close()


def write_tensor(writer: SummaryWriter, tag: str, content: bytes, tensor: object, step: int = 0) -> None:
    """Anything under the plugin's name."""
    summary = Summary()
    value = summary.value.add(tag=tag, tensor=make_tensor_proto(tensor))
    value.metadata.plugin_data.plugin_name = "attnmon"
    value.metadata.plugin_data.content = content
    value.metadata.data_class = 2
    writer._get_file_writer().add_summary(summary, step)


class Board:
    """A TensorBoard application with all of its own plugins and the tab."""

    def __init__(self, logdir: Path, load_fast: bool, *flags: str, loader: type = AttentionLoader) -> None:
        board = program.TensorBoard(plugins=[*default.get_static_plugins(), loader])
        board.configure(argv=["", f"--logdir={logdir}", "--reload_interval=0", "--reload_task=blocking", *flags])
        self.flags = board.flags
        self._server = _data_server(logdir, board.flags) if load_fast else None
        ingester: Any = (
            server_ingester.ExistingServerDataIngester(
                f"localhost:{self._server[1]}", channel_creds_type=board.flags.grpc_creds_type
            )
            if self._server
            else LocalDataIngester(board.flags)
        )
        ingester.start()
        self.multiplexer = None if load_fast else ingester.deprecated_multiplexer
        self.app = application.TensorBoardWSGIApp(
            board.flags,
            board.plugin_loaders,
            ingester.data_provider,
            board.assets_zip_provider,
            self.multiplexer,
        )
        self.client = Client(self.app)

    def get(self, path: str, **arguments: object) -> TestResponse:
        return self.client.get(f"/data/plugin/attnmon/{path}", query_string=arguments)

    def json(self, path: str, **arguments: object) -> Any:
        answer = self.get(path, **arguments)
        assert answer.status_code == 200, answer.text
        assert answer.mimetype == "application/json"
        return answer.json

    def catalogue(self, ready: Callable[[Any], bool] = lambda found: bool(found["runs"])) -> Any:
        """What there is, once the fast loader has read it."""
        for _ in range(200):
            found = self.json("catalogue")
            if ready(found):
                return found
            time.sleep(0.05)
        raise TimeoutError(f"not loaded: {found}")

    def close(self) -> None:
        if self._server:
            self._server[0].kill()
            self._server[0].communicate()


def _data_server(logdir: Path, flags: argparse.Namespace) -> tuple[subprocess.Popen[bytes], int]:
    """The fast loader as TensorBoard starts it (but with an end), and its port."""
    samples = ",".join(f"{name}={'all' if kept == 0 else kept}" for name, kept in flags.samples_per_plugin.items())
    with tempfile.TemporaryDirectory() as folder:
        port = Path(folder) / "port"
        process = subprocess.Popen(
            [
                server_ingester.get_server_binary().path,
                f"--logdir={logdir}",
                "--reload=once",
                f"--samples-per-plugin={samples}",
                "--port=0",
                f"--port-file={port}",
            ],
            stdin=subprocess.DEVNULL,
        )
        for _ in range(400):
            if port.exists() and port.read_text().endswith("\n"):
                return process, int(port.read_text())
            time.sleep(0.05)
        process.kill()
        process.communicate()
    raise TimeoutError("TensorBoard's data server has not started.")


@pytest.fixture(params=["fast", "slow"])
def board(request: pytest.FixtureRequest) -> Any:
    """Makes applications, with either loader."""
    made: list[Board] = []

    def make(logdir: Path, *flags: str, **more: Any) -> Board:
        made.append(Board(logdir, request.param == "fast", *flags, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()
