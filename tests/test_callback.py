"""The Lightning callback: what is logged where and when, and what is left behind."""

import copy
import pickle
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from toys import LanguageModule, NanoModel, ValidatedModule, loader, tiny_gpt2, token_batches, trainer

from attnmon import AttentionMonitor, AttentionSaturationWarning


class Recorder(TensorBoardLogger):
    """A TensorBoard logger that remembers what it was given."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, dict(metrics)))
        super().log_metrics(metrics, step)


def events(logger) -> EventAccumulator:
    accumulator = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0, "images": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def attn_calls(logger, prefix="attn/"):
    """What was logged under the prefix, but for what depends on the clock."""
    return [
        (step, {key: value for key, value in metrics.items() if not key.startswith(f"{prefix}monitor/")})
        for step, metrics in logger.calls
        if any(key.startswith(prefix) for key in metrics)
    ]


class TestLogging:
    def test_one_call_per_sample_at_the_step_that_the_module_logs_at(self, tmp_path):
        logger = Recorder(tmp_path, name="run")
        monitor = AttentionMonitor(every_n_steps=2, strict=True)
        trainer(tmp_path, monitor, logger=logger, max_steps=5).fit(LanguageModule(), loader(token_batches(5)))
        calls = attn_calls(logger)
        assert [step for step, _ in calls] == [0, 2, 4]
        module_steps = [step for step, metrics in logger.calls if "loss" in metrics]
        assert module_steps == [0, 1, 2, 3, 4]
        keys = set(calls[0][1])
        assert {
            "attn/entropy/layer_00",
            "attn/entropy/normalized/layer_01",
            "attn/separability/top_10/layer_00",
            "attn/distance/top_5/layer_01",
            "attn/distance/expected_top_5/layer_01",
            "attn/jacobian/temperature_1.0/layer_00",
            "attn/logits/spread/layer_00",
            "attn/logits/max/layer_00",
        } <= keys
        layer = monitor.latest.values["entropy"][0]
        assert calls[-1][1]["attn/entropy/layer_00"] == pytest.approx(sum(layer) / len(layer))

    def test_tensorboard_gets_scalars_images_text_and_layout(self, tmp_path):
        logger = TensorBoardLogger(tmp_path, name="run")
        module = LanguageModule()
        with torch.no_grad():
            module.model.transformer.h[1].attn.c_attn.weight[:, :32] *= 1000  # scores past every limit
        with pytest.warns(AttentionSaturationWarning):
            trainer(tmp_path, AttentionMonitor(every_n_steps=1, per_head=True), logger=logger, max_steps=2).fit(
                module, loader(token_batches(2))
            )
        logger.experiment.flush()
        found = events(logger)
        scalars, images = found.Tags()["scalars"], found.Tags()["images"]
        assert [event.step for event in found.Scalars("attn/entropy/layer_01")] == [0, 1]
        assert "attn/entropy/layer_01/head_01" in scalars
        assert "attn/entropy/heads" in images
        assert len([tag for tag in images if "separability" in tag]) == 4
        assert found.Scalars("attn/warnings/score_growth")[0].value >= 1
        text = found.Tensors("attn/warnings/score_growth/text_summary")[0].tensor_proto.string_val[0].decode()
        assert "transformer.h.1.attn" in text
        assert "custom_scalars__config__" in found.Tags()["tensors"]

    def test_every_logger_and_none(self, tmp_path):
        csv, board = CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="board")
        trainer(tmp_path, AttentionMonitor(1), logger=[csv, board], max_steps=2).fit(
            LanguageModule(), loader(token_batches(2))
        )
        header = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()[0]
        assert "attn/entropy/layer_00" in header
        monitor = AttentionMonitor(1)
        trainer(tmp_path, monitor, max_steps=2).fit(LanguageModule(), loader(token_batches(2)))
        assert monitor.latest.step == 1

    @pytest.mark.parametrize("accumulate", [2, 3])
    def test_accumulation_samples_once_per_optimizer_step(self, tmp_path, accumulate):
        logger = Recorder(tmp_path, name="run")
        monitor = AttentionMonitor(every_n_steps=1, rows="all", sequences=9)
        trainer(
            tmp_path, monitor, logger=logger, max_epochs=2, max_steps=-1,
            accumulate_grad_batches=accumulate,
        ).fit(LanguageModule(), loader(token_batches(4)))  # fmt: skip
        steps = [step for step, _ in attn_calls(logger)]
        assert steps == list(range(4))
        assert monitor.latest.rows_used["entropy"][0] == [3 * 80] * 2
        assert steps == [step for step, metrics in logger.calls if "loss" in metrics]

    def test_manual_optimization_with_two_optimizers(self, tmp_path):
        class Manual(LanguageModule):
            automatic_optimization = False

            def training_step(self, batch, batch_idx):
                loss = self(**batch).loss
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
                self.log("loss", loss)

            def configure_optimizers(self):
                half = list(self.parameters())
                return torch.optim.SGD(half[:5], lr=0.1), torch.optim.SGD(half[5:], lr=0.1)

        logger = Recorder(tmp_path, name="run")
        trainer(tmp_path, AttentionMonitor(2), logger=logger, max_steps=-1, max_epochs=1).fit(
            Manual(), loader(token_batches(5))
        )
        assert [step for step, _ in attn_calls(logger)] == [0, 2, 4]
        assert [step for step, metrics in logger.calls if "loss" in metrics] == [0, 1, 2, 3, 4]

    def test_two_monitors_with_prefixes_of_their_own(self, tmp_path):
        logger = Recorder(tmp_path, name="run")
        monitors = [AttentionMonitor(1), AttentionMonitor(2, prefix="probe", source="probe")]
        trainer(tmp_path, *monitors, logger=logger, max_steps=2).fit(
            ValidatedModule(), loader(token_batches(2)), loader(token_batches(1, seed=9))
        )
        assert len(attn_calls(logger)) == 2
        assert len(attn_calls(logger, "probe/")) == 1
        with pytest.raises(RuntimeError, match="more than one stateful callback of type `AttentionMonitor`"):
            trainer(tmp_path, AttentionMonitor(1), AttentionMonitor(2))


class TestValidationAndProbe:
    def test_validation_is_logged_once_per_validation_and_not_while_sanity_checking(self, tmp_path):
        logger = Recorder(tmp_path, name="run")
        monitor = AttentionMonitor(100, validation_batches=2, rows="all", sequences=9)
        trainer(
            tmp_path, monitor, logger=logger, max_steps=4, val_check_interval=2, num_sanity_val_steps=2
        ).fit(ValidatedModule(), loader(token_batches(4)), loader(token_batches(3, seed=5)))  # fmt: skip
        calls = attn_calls(logger, "attn_val/")
        assert [step for step, _ in calls] == [1, 3]
        assert [step for step, metrics in logger.calls if "val_loss" in metrics] == [1, 3]
        assert monitor.latest_validation.source == "validation"
        assert monitor.latest_validation.rows_used["entropy"][0] == [2 * 3 * 80] * 2
        assert monitor.latest.step == 0

    def test_probe_reads_the_first_validation_batch(self, tmp_path):
        module, probe = ValidatedModule(tiny_gpt2(dropout=0.3)), token_batches(1, seed=5)
        monitor = AttentionMonitor(1, source="probe", rows="all", sequences=9, strict=True)
        expected = {}

        class Look(pl.Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                with torch.no_grad():
                    twin = copy.deepcopy(pl_module.model).eval()
                    twin.set_attn_implementation("eager")
                    weights = twin(probe[0]["input_ids"], output_attentions=True).attentions[0]
                expected[trainer.global_step] = torch.special.entr(weights).sum(-1).mean((0, 2)).tolist()

        trainer(tmp_path, Look(), monitor, max_steps=3).fit(module, loader(token_batches(3)), loader(probe))
        assert monitor.latest.step == 2
        assert monitor.latest.values["entropy"][0] == pytest.approx(expected[2], rel=1e-5)
        assert module.training

    def test_probe_without_validation_data(self, tmp_path):
        with pytest.raises(MisconfigurationException, match="validation data for source='probe'"):
            trainer(tmp_path, AttentionMonitor(1, source="probe")).fit(LanguageModule(), loader(token_batches(2)))

    def test_generation_inside_validation(self, tmp_path):
        class Generates(LanguageModule):
            def validation_step(self, batch, batch_idx):
                self.model.generate(batch["input_ids"][:, :5], max_new_tokens=4, do_sample=False)

        monitor = AttentionMonitor(1, validation_batches=1, strict=True, top_n=(1, 2), rows="all")
        trainer(tmp_path, monitor, max_steps=2).fit(Generates(), loader(token_batches(2)), loader(token_batches(1)))
        assert monitor.latest_validation.rows_used["entropy"][0] == [3 * 5] * 2  # the prompt, not the decode steps


class TestResume:
    def test_a_resumed_run_samples_numbers_and_logs_as_the_unbroken_one(self, tmp_path):
        def run(name, max_steps, checkpoint=None):
            logger = Recorder(tmp_path / name, name="run")
            monitor = AttentionMonitor(every_n_steps=2, rows=8)
            keep = ModelCheckpoint(
                tmp_path / name / "checkpoints", filename="{step}", every_n_train_steps=3, save_top_k=-1
            )
            fit = trainer(
                tmp_path, monitor, keep, logger=logger, max_steps=max_steps, enable_checkpointing=True, max_epochs=-1
            )
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The dirpath has changed|You're resuming from a checkpoint")
                fit.fit(LanguageModule(), loader(token_batches(3)), ckpt_path=checkpoint)
            return monitor, attn_calls(logger)

        _, unbroken = run("unbroken", 8)
        run("first", 3)
        monitor, resumed = run("second", 8, tmp_path / "first" / "checkpoints" / "step=3.ckpt")
        assert [step for step, _ in resumed] == [4, 6]
        assert resumed == unbroken[2:]
        state = torch.load(tmp_path / "second" / "checkpoints" / "step=6.ckpt", weights_only=True)["callbacks"]
        assert state[monitor.state_key]["step"] == 6

    def test_a_new_run_with_the_same_callback_starts_anew(self, tmp_path):
        monitor = AttentionMonitor(every_n_steps=1)
        for _ in range(2):
            trainer(tmp_path, monitor, max_steps=2).fit(LanguageModule(), loader(token_batches(2)))
            assert monitor.latest.step == 1


class TestLeftAsFound:
    @staticmethod
    def assert_clean(model):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        assert torch.overrides._len_torch_function_stack() == 0
        assert ALL_ATTENTION_FUNCTIONS["sdpa"].__name__ == "sdpa_attention_forward"
        assert "eager" not in ALL_ATTENTION_FUNCTIONS
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        pickle.dumps(model.model)

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    @pytest.mark.parametrize("model", [tiny_gpt2, NanoModel])
    def test_after_an_exception_in_the_step(self, tmp_path, error, model):
        class Fails(LanguageModule):
            def training_step(self, batch, batch_idx):
                self.model(batch["input_ids"])
                raise error("stop")

        module = Fails(model())
        monitor = AttentionMonitor(1)
        with pytest.raises((error, SystemExit)):
            trainer(tmp_path, monitor).fit(module, loader(token_batches(2)))
        self.assert_clean(module)
        assert monitor.latest is None

    def test_after_success_and_between_samples(self, tmp_path):
        class Look(pl.Callback):
            def on_before_backward(self, trainer, pl_module, loss):
                if trainer.global_step % 2:
                    TestLeftAsFound.assert_clean(pl_module)

        module = LanguageModule()
        trainer(tmp_path, AttentionMonitor(2), Look(), max_steps=4).fit(module, loader(token_batches(4)))
        self.assert_clean(module)

    def test_pickle_and_deepcopy_before_and_after(self, tmp_path):
        monitor = AttentionMonitor(2, top_n=(1, 5))
        pickle.loads(pickle.dumps(monitor))
        trainer(tmp_path, monitor, max_steps=3).fit(LanguageModule(), loader(token_batches(3)))
        for other in (pickle.loads(pickle.dumps(monitor)), copy.deepcopy(monitor)):
            assert other.latest.values == monitor.latest.values
            assert "log" not in vars(other)  # Lightning binds the module's to it
            trainer(tmp_path, other, max_steps=1).fit(LanguageModule(), loader(token_batches(1)))

    def test_training_is_the_same_to_the_last_bit(self, tmp_path):
        def run(*callbacks):
            module = LanguageModule(tiny_gpt2(dropout=0.1))
            torch.manual_seed(7)
            trainer(tmp_path, *callbacks, max_steps=6).fit(module, loader(token_batches(6)))
            return module.losses, [p.detach().clone() for p in module.parameters()], torch.get_rng_state()

        losses, parameters, state = run()
        for monitor in (AttentionMonitor(1), AttentionMonitor(3)):
            other_losses, other_parameters, other_state = run(monitor)
            assert losses == other_losses
            assert all(map(torch.equal, parameters, other_parameters))
            assert torch.equal(state, other_state)


class TestTrouble:
    def test_no_attention_fails_in_setup(self, tmp_path):
        class Linear(LanguageModule):
            def __init__(self):
                super().__init__(nn.Linear(2, 2))

        with pytest.raises(ValueError, match="Expected `model` to contain attention"):
            trainer(tmp_path, AttentionMonitor()).fit(Linear(), loader(token_batches(1)))

    def test_a_failing_logger_does_not_end_the_run(self, tmp_path):
        class Full(TensorBoardLogger):
            def log_metrics(self, metrics, step=None):
                if any(key.startswith("attn/") for key in metrics):
                    raise OSError("No space left on device")
                super().log_metrics(metrics, step)

        module, monitor, other = LanguageModule(), AttentionMonitor(1), Recorder(tmp_path, name="other")
        with pytest.warns(UserWarning, match="(?s)could not write to logger Full.*No space left") as caught:
            trainer(tmp_path, monitor, logger=[Full(tmp_path), other], max_steps=3).fit(
                module, loader(token_batches(3))
            )
        assert sum("attnmon" in str(w.message) for w in caught) == 1
        assert len(module.losses) == 3
        assert monitor.latest.step == 2
        assert [step for step, _ in attn_calls(other)] == [0, 1, 2]

    def test_forwards_without_gradients_beside_the_training_pass_do_not_count(self, tmp_path):
        class Generates(LanguageModule):
            def training_step(self, batch, batch_idx):
                self.model.generate(batch["input_ids"][:, :8], max_new_tokens=3, do_sample=False)
                return super().training_step(batch, batch_idx)

        plain, monitor = AttentionMonitor(1, rows="all", strict=True), AttentionMonitor(1, rows="all", strict=True)
        trainer(tmp_path, plain, max_steps=1).fit(LanguageModule(), loader(token_batches(1)))
        trainer(tmp_path, monitor, max_steps=1).fit(Generates(), loader(token_batches(1)))
        assert monitor.latest.values == plain.latest.values
        assert monitor.latest.rows_used == plain.latest.rows_used

    def test_a_frozen_backbone_is_measured(self, tmp_path):
        class Frozen(LanguageModule):
            def __init__(self):
                super().__init__()
                self.head = nn.Linear(16, 2)

            def training_step(self, batch, batch_idx):
                with torch.no_grad():
                    hidden = self.model.transformer(batch["input_ids"]).last_hidden_state
                return self.head(hidden).mean()

        monitor = AttentionMonitor(1, strict=True)
        trainer(tmp_path, monitor, max_steps=1).fit(Frozen(), loader(token_batches(1)))
        assert len(monitor.latest.layers) == 2

    @pytest.mark.parametrize(
        ("argument", "value"),
        [
            ("layers", [-1]),
            ("layers", [1.5]),
            ("prefix", ""),
            ("prefix", "a/"),
            ("validation_batches", -1),
            ("every_n_steps", 0),
        ],
    )
    def test_wrong_arguments_fail_in_the_constructor(self, argument, value):
        with pytest.raises(ValueError, match=f"Expected `{argument}`"):
            AttentionMonitor(**{argument: value})


def test_yaml_round_trip():
    """As LightningCLI makes it from a config file, and writes it to one."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=pl.Callback)
    text = """
callback:
  class_path: attnmon.AttentionMonitor
  init_args:
    every_n_steps: 10
    rows: all
    top_n: [1, 5]
    layers: [0, "transformer.h.*"]
    quantities: [default, "precision@5"]
    rules:
      entropy_rise:
        share: 0.5
      active_set: null
"""
    config = parser.parse_string(text)
    monitor = parser.instantiate(config).callback
    again = parser.instantiate(parser.parse_string(parser.dump(config, skip_unset=False))).callback
    for made in (monitor, again):
        assert isinstance(made, AttentionMonitor)
        assert made._options.top_n == (1, 5)
        assert made._options.rows == "all"
        assert made._options.rules.entropy_rise.share == 0.5
        assert made._options.rules.active_set is None
