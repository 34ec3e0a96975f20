"""What each kind of logger gets, with the real libraries, offline."""

from __future__ import annotations

import copy
import csv
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.fabric.loggers import TensorBoardLogger as FabricTensorBoardLogger
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter
from toys import LanguageModule, MemoryLogger, ValidatedModule, loader, spread, tiny_gpt2, token_batches, trainer

from attnmon import AttentionMonitor, watch
from attnmon.loggers import flat_heads, make_sink
from attnmon.options import MonitorOptions
from attnmon.records import read_json

pytestmark = pytest.mark.filterwarnings("ignore::attnmon.AttentionSaturationWarning")


def loud(heads: int = 2) -> LanguageModule:
    """A model whose second layer has scores past every limit."""
    module = LanguageModule(tiny_gpt2(heads=heads))
    with torch.no_grad():
        module.model.transformer.h[1].attn.c_attn.weight[:, : 16 * heads] *= 1000
    return module


def fit(tmp_path, *loggers, module=None, steps: int = 2, monitor=None, **arguments) -> AttentionMonitor:
    monitor = AttentionMonitor(1, **({"strict": True} | arguments)) if monitor is None else monitor
    trainer(tmp_path, monitor, logger=list(loggers), max_steps=steps).fit(
        loud() if module is None else module, loader(token_batches(steps))
    )
    return monitor


def events(folder) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


# -- Lightning's loggers ----------------------------------------------------------------------------------------------


def test_csv_has_a_column_for_every_scalar(tmp_path):
    monitor = fit(tmp_path, CSVLogger(tmp_path, name="csv", flush_logs_every_n_steps=1), steps=3, per_head=True)
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    ours = [row for row in rows if row["attn/entropy/layer_00"]]
    assert [row["step"] for row in ours] == ["0", "1", "2"]
    scalars = {key: value for key, value in monitor.latest.scalars(per_head=True).items() if "/monitor/" not in key}
    assert len(scalars) > 100
    assert {key: float(ours[-1][key]) for key in scalars} == pytest.approx(scalars)
    assert [row["step"] for row in rows if row["loss"]] == ["0", "1", "2"]


def test_tensorboard_gets_the_data_of_the_tab_for_training_and_validation(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="run")
    monitor = AttentionMonitor(1, validation_batches=1, strict=True)
    trainer(tmp_path, monitor, logger=logger, max_steps=4, val_check_interval=2).fit(
        ValidatedModule(), loader(token_batches(4)), loader(token_batches(1, seed=5))
    )
    (file,) = [path for path in (tmp_path / "run" / "version_0").iterdir() if "tfevents" in path.name]
    found = events(file.parent)
    assert [event.step for event in found.Tensors("attnmon/attn/entropy/normalized")] == [0, 1, 2, 3]
    assert [event.step for event in found.Tensors("attnmon/attn_val/entropy/normalized")] == [1, 3]
    (run,) = found.Tensors("attnmon/attn/run")
    record = read_json(run.tensor_proto.string_val[0])
    assert record["every_n_steps"] == 1
    assert ("score_spread", 15.0) in {(level["quantity"], level["limit"]) for level in record["levels"]}
    (run,) = found.Tensors("attnmon/attn_val/run")
    assert read_json(run.tensor_proto.string_val[0])["source"] == "validation"


def test_a_second_fit_goes_on_in_the_same_folder(tmp_path):
    logger, monitor = TensorBoardLogger(tmp_path, name="run"), AttentionMonitor(1, strict=True)
    for _ in range(2):
        trainer(tmp_path, monitor, logger=logger, max_steps=2).fit(LanguageModule(), loader(token_batches(2)))
    files = list((tmp_path / "run" / "version_0").glob("*tfevents*"))  # the writer begins a new one after the end
    assert len(files) == 2
    for path in files:
        assert [event.step for event in events(path).Tensors("attnmon/attn/entropy")] == [0, 1]
        assert events(path).Tensors("custom_scalars__config__")
    for other in (pickle.loads(pickle.dumps(monitor)), copy.deepcopy(monitor)):  # without the open files
        fit(tmp_path / "other", TensorBoardLogger(tmp_path / "other"), monitor=other)


def test_no_rules_no_levels(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="run")
    fit(tmp_path, logger, alerts=False)
    (run,) = events(logger.log_dir).Tensors("attnmon/attn/run")
    assert read_json(run.tensor_proto.string_val[0])["levels"] == []


class TestWandb:
    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        wandb = pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        monkeypatch.chdir(tmp_path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)  # the library's own
            yield WandbLogger(project="attnmon", save_dir=tmp_path, offline=True)
            wandb.finish()

    def test_scalars_images_and_alerts(self, tmp_path, run, monkeypatch):
        published = []
        monkeypatch.setattr(
            type(run.experiment._interface), "publish_alert", lambda _, *arguments: published.append(arguments)
        )
        logged = []
        log = run.experiment.log
        monkeypatch.setattr(run.experiment, "log", lambda data, *a, **k: (logged.append(data), log(data, *a, **k)))
        monitor = fit(tmp_path, run)
        scalars = [data for data in logged if "attn/entropy/layer_00" in data]
        assert [data["trainer/global_step"] for data in scalars] == [0, 1]
        assert run.experiment.summary["attn/entropy/layer_00"] == pytest.approx(
            monitor.latest.scalars()["attn/entropy/layer_00"]
        )
        images = [data for data in logged if "attn/entropy/heads" in data]
        assert [data["trainer/global_step"] for data in images] == [0, 1]
        media = list(tmp_path.glob("wandb/offline-run-*/files/media/images/attn/**/*.png"))
        assert len(media) == 2 * len(monitor.latest.values)
        title, text, level, pause = published[0]
        assert title == "attn: attention scores too large"
        assert "transformer.h.1.attn" in text
        assert (level, pause) == ("WARN", 300_000)


class TestMlflow:
    @pytest.fixture(params=["sqlite:///{}/mlflow.db", "file:{}/mlruns"], ids=["database", "files"])
    def logger(self, request, tmp_path, monkeypatch):
        pytest.importorskip("mlflow")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.chdir(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library's own
            yield MLFlowLogger("attnmon", tracking_uri=request.param.format(tmp_path))

    def test_scalars_per_head_and_artifacts(self, tmp_path, logger):
        monitor = fit(tmp_path, logger, per_head=True)
        metrics = logger.experiment.get_run(logger.run_id).data.metrics
        scalars = flat_heads(monitor.latest.scalars(per_head=True))
        assert "attn/entropy/layer_01_head_01" in scalars
        assert {key: metrics[key] for key in scalars if "/monitor/" not in key} == pytest.approx(
            {key: value for key, value in scalars.items() if "/monitor/" not in key}
        )
        history = logger.experiment.get_metric_history(logger.run_id, "attn/entropy/layer_00")
        assert [metric.step for metric in history] == [0, 1]
        images = [item.path for item in logger.experiment.list_artifacts(logger.run_id, "images")]
        assert len([path for path in images if path.endswith(".png")]) == 2 * len(monitor.latest.values)
        (text,) = [item.path for item in logger.experiment.list_artifacts(logger.run_id, "attn/warnings/score_growth")]
        assert text == "attn/warnings/score_growth/step_000000.md"


def test_one_logger_that_fails_costs_the_others_nothing(tmp_path):
    class Full(CSVLogger):
        def log_metrics(self, metrics, step=None):
            raise OSError("No space left on device")

    class WandbLogger(MemoryLogger):  # has the name, and nothing of what it should be able to do
        pass

    last = MemoryLogger()
    loggers = [Full(tmp_path), WandbLogger(), last]
    module = LanguageModule()
    module.log = lambda *args, **kwargs: None  # only the monitor logs
    with pytest.warns(UserWarning, match="could not write to logger") as caught:
        fit(tmp_path, *loggers, module=module, steps=3, strict=False)
    assert [str(w.message).split(",")[0] for w in caught if "attnmon" in str(w.message)] == [
        "attnmon could not write to logger Full (1 of 3)",
        "attnmon could not write to logger WandbLogger (2 of 3)",
    ]
    assert [step for step, _ in last.of("attn/")] == [0, 1, 2]


def test_images_keep_their_cadence_in_every_logger(tmp_path):
    class WandbLogger(MemoryLogger):
        def __init__(self):
            super().__init__()
            self.steps = []

        def log_image(self, key, images, step):
            assert images[0].shape[2] == 3
            if key == "attn/entropy/heads":
                self.steps.append(step)

    logger = WandbLogger()
    fit(tmp_path, logger, module=LanguageModule(), steps=25, alerts=False)
    assert logger.steps[:10] == list(range(10))
    assert len(logger.steps) < 15
    quiet = WandbLogger()
    fit(tmp_path, quiet, module=LanguageModule(), images=False, alerts=False)
    assert quiet.steps == []


# -- a loop of one's own ----------------------------------------------------------------------------------------------


def loop(model, steps=3, **arguments):
    with watch(model, 1, **({"strict": True} | arguments)) as monitor:
        for batch in token_batches(steps):
            model(**batch).loss.backward()
            monitor.step()
    return monitor


def test_watch_writes_to_loggers_too(tmp_path):
    board, table, memory = (
        FabricTensorBoardLogger(tmp_path / "board"),
        FabricCSVLogger(tmp_path / "csv"),
        MemoryLogger(),
    )
    monitor = loop(tiny_gpt2(), writer=[board, table, memory], per_head=True)
    table.save()
    board.finalize("success")
    scalars = monitor.latest.scalars(per_head=True)
    assert [step for step, _ in memory.calls] == [0, 1, 2]
    assert memory.calls[-1][1] == scalars
    with (tmp_path / "csv" / "lightning_logs" / "version_0" / "metrics.csv").open(newline="") as file:
        assert float(list(csv.DictReader(file))[-1]["attn/entropy/layer_01/head_01"]) == pytest.approx(
            scalars["attn/entropy/layer_01/head_01"]
        )
    found = events(board.log_dir)
    assert [event.step for event in found.Tensors("attnmon/attn/entropy")] == [0, 1, 2]
    assert "attn/entropy/heads" in found.Tags()["images"]
    assert found.Tensors("custom_scalars__config__")


class TestTwoOfOneWriter:
    def test_stand_under_their_own_prefixes_and_on_one_page(self, tmp_path):
        writer = SummaryWriter(tmp_path)
        with (
            watch(tiny_gpt2(), 1, writer=writer) as first,
            watch(tiny_gpt2(layers=3), 1, writer=writer, prefix="teacher") as second,
        ):
            for monitor in (second, first):
                monitor._model(**token_batches(1)[0]).loss.backward()
                monitor.step()
        writer.close()
        found = events(tmp_path)
        assert {"attn/entropy/layer_01", "teacher/entropy/layer_02"} <= set(found.Tags()["scalars"])
        assert {"attnmon/attn/entropy", "attnmon/teacher/entropy"} <= set(found.Tags()["tensors"])
        for page in found.Tensors("custom_scalars__config__"):
            (layout,) = page.tensor_proto.string_val
            assert b"^attn/entropy/normalized/" in layout
            assert b"^teacher/entropy/normalized/" in layout

    def test_need_them_as_long_as_both_are_entered(self, tmp_path):
        writer = SummaryWriter(tmp_path)
        first = watch(tiny_gpt2(), writer=writer)
        second = watch(tiny_gpt2(), writer=[writer])
        with first:
            with pytest.raises(ValueError, match="SummaryWriter to have a `prefix` of its own, but two have 'attn'"):
                second.__enter__()
            with watch(tiny_gpt2(), writer=SummaryWriter(tmp_path / "other")):
                pass
        with second:
            pass
        writer.close()

    @pytest.mark.parametrize("prefix", ["", "attn/", 3])
    def test_need_names(self, prefix):
        with pytest.raises(ValueError, match="Expected `prefix` to be a name"):
            watch(tiny_gpt2(), prefix=prefix)


def test_a_writer_without_a_way_in_gets_the_rest_and_one_warning():
    class Bare:
        def __init__(self):
            self.scalars, self.images = [], []

        def add_scalar(self, tag, value, step):
            self.scalars.append((tag, step))

        def add_image(self, tag, picture, step, dataformats):
            self.images.append((tag, step))

        def add_text(self, tag, text, step): ...
        def add_custom_scalars(self, layout): ...

    writer = Bare()
    with pytest.warns(UserWarning, match="nothing for the Attention tab") as caught:
        loop(tiny_gpt2(), writer=writer, strict=False)
    assert sum("Attention tab" in str(w.message) for w in caught) == 1
    assert ("attn/entropy/layer_00", 2) in writer.scalars
    assert ("attn/entropy/heads", 0) in writer.images


def raising(*_):
    raise RuntimeError("not like this any more")


class TestAChangedWayIn:
    @pytest.mark.parametrize(
        "changed",
        [
            {"_get_file_writer": raising},
            {"_get_file_writer": lambda purpose: None},
            {"_get_file_writer": lambda: SimpleNamespace(add_summary=lambda summary: None)},
            {"_get_file_writer": lambda: SimpleNamespace(add_summary=raising)},
        ],
        ids=["raises", "wants_an_argument", "add_summary_wants_another", "add_summary_raises"],
    )
    def test_costs_the_tab_alone_and_one_warning(self, tmp_path, changed):
        board = SummaryWriter(tmp_path)
        names = ("add_scalar", "add_image", "add_text", "add_custom_scalars")
        writer = SimpleNamespace(**{name: getattr(board, name) for name in names}, **changed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop(loud().model, writer=writer, strict=False)
        board.close()
        said = [str(warning.message) for warning in caught if "Attention tab" in str(warning.message)]
        assert len(said) == 1
        assert "scalars, images and texts go on" in said[0]
        found = events(tmp_path)
        assert [event.step for event in found.Scalars("attn/entropy/layer_00")] == [0, 1, 2]
        assert [event.step for event in found.Images("attn/entropy/heads")] == [0, 1, 2]
        assert any(tag.startswith("attn/warnings/") for tag in found.Tags()["tensors"])
        assert not any(tag.startswith("attnmon/") for tag in found.Tags()["tensors"])

    def test_a_full_disk_is_none(self, tmp_path):
        failing = iter([True, False, False])

        def add_summary(*arguments):
            if next(failing):
                raise OSError(28, "No space left on device")
            written.append(arguments)

        written = []
        board = SummaryWriter(tmp_path)
        names = ("add_scalar", "add_image", "add_text", "add_custom_scalars")
        file = SimpleNamespace(add_summary=add_summary)
        writer = SimpleNamespace(**{name: getattr(board, name) for name in names}, _get_file_writer=lambda: file)
        with pytest.warns(UserWarning, match="(?s)could not write to writer SimpleNamespace.*No space left"):
            loop(tiny_gpt2(), writer=writer, strict=False)
        board.close()
        assert [step for _, step in written] == [1, 2]


def test_each_heads_own_limits_are_in_the_tabs_data(tmp_path):
    writer = SummaryWriter(tmp_path)
    monitor = loop(spread(tiny_gpt2()).train(), steps=2, writer=writer)
    writer.close()
    found = events(tmp_path)
    tag = "attnmon/attn/limits/entropy_rise/entropy/normalized"
    about = read_json(found.SummaryMetadata(tag).plugin_data.content)
    assert about == {
        "version": 1,
        "kind": "limits",
        "prefix": "attn",
        "rule": "entropy_rise",
        "title": "entropy rising",
        "severity": "watch",
        "quantity": "entropy_normalized",
        "rises": True,
    }
    limits = [tensor_util.make_ndarray(event.tensor_proto) for event in found.Tensors(tag)]
    assert [limit.shape for limit in limits] == [(2, 2), (2, 2)]
    expected = monitor.latest.limits["entropy_rise"]["entropy_normalized"]
    assert limits[-1].tolist() == [pytest.approx(expected[layer]) for layer in (0, 1)]


def test_a_writer_that_is_closed_in_between_goes_on_in_a_file_that_can_be_read(tmp_path):
    writer, model = SummaryWriter(tmp_path), tiny_gpt2()
    with watch(model, 1, writer=writer, strict=True) as monitor:
        for batch in token_batches(4):
            model(**batch).loss.backward()
            monitor.step()
            if monitor.step_count == 2:
                writer.close()
                writer.filename_suffix = ".second"  # else, in the same second, the file would be the same
    writer.close()
    first, second = sorted(tmp_path.iterdir(), key=lambda path: path.name.endswith("second"))
    assert [event.step for event in events(first).Tensors("attnmon/attn/entropy")] == [0, 1]
    assert [event.step for event in events(second).Tensors("attnmon/attn/entropy")] == [2, 3]
    assert "attnmon/attn/run" in events(second).PluginTagToContent("attnmon")


def test_what_is_no_logger():
    with pytest.raises(TypeError, match="Expected `writer` to be a TensorBoard writer, a Lightning or Fabric logger"):
        make_sink(object(), MonitorOptions(), prefix="attn")
    for not_made in (MemoryLogger, warnings):
        with pytest.raises(TypeError, match="a writer or a logger itself"):
            make_sink(not_made, MonitorOptions(), prefix="attn")


def test_what_a_logger_holds_back_is_written_at_the_end_of_a_plain_loop(tmp_path):
    logger = CSVLogger(tmp_path)  # by itself it writes at steps 99, 199 and so on
    model = tiny_gpt2()
    with watch(model, every_n_steps=1, top_n=(1,), writer=logger) as monitor:
        for batch in token_batches(2):
            model(**batch).loss.backward()
            monitor.step()
    (file,) = tmp_path.rglob("metrics.csv")
    assert len(file.read_text(encoding="utf-8").splitlines()) == 3
