"""Two processes (gloo, on the CPU): their sums meet, neither waits for the other, and training does not notice."""

import math
import multiprocessing as mp
import os
import pickle
import traceback
import warnings
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from toys import (
    Bits,
    LanguageModule,
    MemoryLogger,
    bits_of,
    digest,
    loader,
    random_states,
    seed_all,
    tiny_gpt2,
    token_batches,
    trainer,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from attnmon import AttentionMonitor, AttentionSaturationWarning, watch
from attnmon.metrics import AttentionEntropy, SeparabilityRatio, TopNDistance

EVERYTHING = {"rows": "all", "sequences": 99, "strict": True}
LENGTH = 70


# -- two processes that are given jobs --------------------------------------------------------------------------------


def serve(rank: int, folder: str, pipe) -> None:
    """Runs one job after the other: a name and its arguments come in, a result or a traceback goes out."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "test"}
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated|.*does not have many workers")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        job, arguments = task
        try:
            result = ("result", globals()[job](rank, **arguments))
        except BaseException:
            result = ("error", traceback.format_exc())
        pipe.send_bytes(pickle.dumps(result))
    dist.destroy_process_group()


class Pair:
    """Two processes of one process group, started at the first job and again after a failure."""

    def __init__(self, folders) -> None:
        self.folders = folders
        self.processes = []
        self.pipes = []

    def run(self, job, **arguments) -> list:
        """The results of both."""
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((job.__name__, arguments))
        answers, patience = [], 30
        for rank, pipe in enumerate(self.pipes):
            kind, value = pickle.loads(pipe.recv_bytes()) if pipe.poll(patience) else ("error", "no answer")
            if kind == "error":
                patience = 5
            answers.append((rank, kind, value))
        errors = [f"rank {rank}: {value}" for rank, kind, value in answers if kind == "error"]
        if errors:
            self.stop()
            pytest.fail("\n".join(errors))
        return [value for _, _, value in answers]

    def start(self) -> None:
        context = mp.get_context("spawn")
        folder = str(self.folders.mktemp("pair"))
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, folder, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)
        for pipe in self.pipes:
            assert pipe.recv() == "ready"

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
        self.stop()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    both = Pair(tmp_path_factory)
    yield both
    both.close()


def collectives() -> int:
    """How many collective operations this process has started, in every group and by whatever means."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


# -- a plain loop -----------------------------------------------------------------------------------------------------


def rank_batch(rank: int) -> dict[str, torch.Tensor]:
    """Batches of unequal size."""
    return token_batches(1, batch=1 + 2 * rank, length=LENGTH, seed=rank)[0]


def measure(rank: int) -> list:
    """Three steps: figures of both ranks' rows."""
    model, snapshots = tiny_gpt2(), []
    with watch(model, 1, **EVERYTHING) as monitor:
        for _ in range(3):
            model(**rank_batch(rank)).loss.backward()
            snapshots.append(monitor.step().values)
    return snapshots


def all_padding(rank: int) -> list:
    """Rank 1 brings nothing but padding, then does not run the model at all."""
    model, snapshots = tiny_gpt2(), []
    batch = rank_batch(rank)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"]) if rank == 0 else torch.zeros_like(batch["input_ids"])
    with watch(model, 1, **EVERYTHING) as monitor:
        for step in range(2):
            if rank == 0 or step == 0:
                model(**batch).loss.backward()
            snapshots.append(monitor.step().values)
    return snapshots


def one_fails(rank: int) -> list:
    """An error on one rank switches both off, with nobody left waiting."""
    from attnmon import window

    model, snapshots = tiny_gpt2(), []
    with warnings.catch_warnings(record=True) as caught, watch(model, 1) as monitor, pytest.MonkeyPatch.context() as m:
        warnings.simplefilter("always")
        for step in range(3):
            if rank == 1 and step == 1:
                m.setattr(window.Window, "_add", lambda *_: 1 / 0)
            model(**rank_batch(rank)).loss.backward()
            snapshots.append(monitor.step() is not None)
        return [*snapshots, sum("switched off" in str(w.message) for w in caught)]


def rank_rows(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and vectors of unequal numbers of rows."""
    generator = torch.Generator().manual_seed(rank)
    weights = torch.randn(1 + rank, 3, 4 + rank, 12, generator=generator).softmax(-1)
    return weights, torch.randn(1 + rank, 3, 12, 5, generator=generator)


def update_classes(rows: list) -> list:
    """Mean, error and counts of the metric classes after these updates."""
    results = []
    for metric, take in [(AttentionEntropy(3), 1), (SeparabilityRatio(3, (2, 5)), 2), (TopNDistance(3, (2, 5)), 2)]:
        for update in rows:
            metric.update(*update[:take])
        results += [metric.compute(), metric.standard_error(), metric.rows_used, metric.rows_skipped]
    return results


def classes(rank: int) -> list:
    """torchmetrics sums over the ranks by itself."""
    return update_classes([rank_rows(rank)])


def same(one: dict, other: dict, rel: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, layers in one.items():
        assert layers.keys() == other[name].keys()
        for layer, heads in layers.items():
            for a, b in zip(heads, other[name][layer], strict=True):
                assert a == pytest.approx(b, rel=rel, abs=1e-9) or (math.isnan(a) and math.isnan(b)), name


def single(batch: dict[str, torch.Tensor]) -> dict:
    model = tiny_gpt2()
    with watch(model, 1, **EVERYTHING) as monitor:
        model(**batch).loss.backward()
        return monitor.step().values


def test_figures_are_those_of_one_process_that_saw_all_rows(pair):
    first, second = pair.run(measure)
    together = {key: torch.cat([rank_batch(0)[key], rank_batch(1)[key]]) for key in ("input_ids", "labels")}
    expected = single(together)
    for step in range(3):
        same(first[step], expected)
        same(second[step], expected)


def test_a_rank_with_nothing_but_padding_and_one_without_a_forward(pair):
    first, second = pair.run(all_padding)
    expected = single(rank_batch(0))
    for step in range(2):
        same(first[step], expected)
        same(second[step], expected)


def test_a_failure_on_one_rank_switches_both_off(pair):
    first, second = pair.run(one_fails)
    assert first == [True, False, False, 1]
    assert second == [True, False, False, 0]  # the first process warns for all


def test_metric_classes_merge_over_ranks(pair):
    expected = update_classes([rank_rows(0), rank_rows(1)])
    for results in pair.run(classes):
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value)


# -- torch's wrappers under a plain loop ------------------------------------------------------------------------------

STEPS = 6


def rank_batches(rank: int, padded: bool = False) -> list[dict[str, torch.Tensor]]:
    batches = token_batches(STEPS, batch=1 + 2 * rank, length=LENGTH, seed=rank)
    for batch in batches:
        # what is padding, and all of it where rank 1 is to bring no row
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if padded and rank == 1:
            batch["attention_mask"][:] = 0
    return batches


def shard(model):
    mesh = init_device_mesh("cpu", (2,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {
    "fully_shard": shard,
    "fsdp": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "ddp": torch.nn.parallel.DistributedDataParallel,
}


def loop(rank: int, wrapper: str, every_n_steps: int | None, dropout: float = 0.0, **arguments) -> dict:
    """What a loop computes and measures, how many collectives each of its steps takes, and the sizes reduced."""
    seed_all(7 + rank)
    model = WRAPPERS[wrapper](tiny_gpt2(dropout=dropout).train())
    seed_all(7 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    snapshots, counts, bits, sizes = {}, [], [], []
    if arguments:
        arguments["probe"] = rank_batch(rank)
    monitor = None if every_n_steps is None else watch(model, every_n_steps, **EVERYTHING, **arguments)

    def reduce(tensor, *args, reduce=dist.all_reduce, **kwargs):
        sizes.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, nullcontext() if monitor is None else monitor:
        patch.setattr(dist, "all_reduce", reduce)
        for batch in rank_batches(rank):
            before = collectives()
            loss = model(**batch).loss
            loss.backward()
            bits.append(digest([loss, *(p.grad for p in model.parameters())]))
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None and (snapshot := monitor.step()) is not None:
                snapshots[snapshot.step] = snapshot
            counts.append(collectives() - before)
    bits += [digest(list(model.parameters())), random_states()]
    return {"bits": bits, "counts": counts, "sizes": sizes, "snapshots": snapshots}


class Together(LanguageModule):
    """One process that computes what two do: each step sees the batches of both."""

    def training_step(self, batches, batch_idx):
        return torch.stack([self(**batch).loss for batch in batches]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Starts(pl.Callback):
    """The number of collectives when each step begins; goes before the monitor."""

    def __init__(self) -> None:
        self.at = []

    def on_train_batch_start(self, *_):
        self.at.append(collectives())


class Ends(pl.Callback):
    """The same when it ends, and the monitor's snapshots; goes after the monitor."""

    def __init__(self, monitor: AttentionMonitor | None) -> None:
        self.monitor = monitor
        self.snapshots = {}
        self.at = []

    def on_train_batch_end(self, *_):
        self.at.append(collectives() if dist.is_initialized() else 0)
        if self.monitor is not None and self.monitor.latest is not None:
            self.snapshots[self.monitor.latest.step] = self.monitor.latest


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The snapshots of one process that saw the rows of both: with rank 1's rows, and with these as padding."""

    def run(padded: bool):
        monitor = AttentionMonitor(1, **EVERYTHING)
        keep = Ends(monitor)
        fit = trainer(tmp_path_factory.mktemp("together"), monitor, keep, max_steps=STEPS)
        batches = [rank_batches(rank, padded) for rank in range(2)]
        fit.fit(Together(), loader(list(zip(*batches, strict=True))))
        return keep.snapshots

    return {padded: run(padded) for padded in (False, True)}


def check_snapshots(result: dict, expected: dict, every_n_steps: int) -> None:
    assert list(result["snapshots"]) == list(range(0, STEPS, every_n_steps))
    for step, snapshot in result["snapshots"].items():
        same(snapshot.values, expected[step].values, rel=1e-4)
        assert snapshot.rows_used == expected[step].rows_used
        assert snapshot.padding == expected[step].padding
        names = [name.removeprefix("model.") for name in snapshot.layers.values()]
        assert names == ["transformer.h.0.attn", "transformer.h.1.attn"]


def check_counts(counts: list[int], without: list[int], every_n_steps: int) -> None:
    """One reduction at each sample; at the first one, names and numbers of heads are agreed on as well."""
    extra = [a - b for a, b in zip(counts, without, strict=True)]
    assert all(more == 0 for step, more in enumerate(extra) if step % every_n_steps)
    assert extra[0] <= 4
    assert all(extra[step] == 1 for step in range(every_n_steps, STEPS, every_n_steps))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models_measure_as_one_process_does(pair, together, wrapper):
    for result in pair.run(loop, wrapper=wrapper, every_n_steps=2):
        check_snapshots(result, together[False], 2)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models_train_to_the_same_bits_with_one_reduction_per_sample(pair, wrapper):
    without = pair.run(loop, wrapper=wrapper, every_n_steps=None, dropout=0.1)
    for every_n_steps in (1, 3):
        results = pair.run(loop, wrapper=wrapper, every_n_steps=every_n_steps, dropout=0.1)
        for result, plain in zip(results, without, strict=True):
            assert result["bits"] == plain["bits"]
            check_counts(result["counts"], plain["counts"], every_n_steps)
            samples = len(range(0, STEPS, every_n_steps))
            assert len(result["sizes"]) == samples + 1  # the first says that there is something to agree on
            assert len(set(result["sizes"][1:])) == 1
            assert plain["sizes"] == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_probe_of_wrapped_models_leaves_the_bits(pair, wrapper):
    without = pair.run(loop, wrapper=wrapper, every_n_steps=None, dropout=0.1)
    results = pair.run(loop, wrapper=wrapper, every_n_steps=2, dropout=0.1, source="probe")
    for result, plain in zip(results, without, strict=True):
        assert result["bits"] == plain["bits"]
        assert list(result["snapshots"]) == [2, 4, 6]
        same(result["snapshots"][6].values, results[0]["snapshots"][6].values)


# -- Lightning --------------------------------------------------------------------------------------------------------


class Ranked(Together):
    """What each of the two processes trains; `configure_model` shards it where the strategy leaves that to it."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def training_step(self, batch, batch_idx):
        return self(**batch).loss

    def validation_step(self, batch, batch_idx):
        self(**batch)

    def configure_model(self):
        if self.device_mesh is not None and not isinstance(self.model, torch.distributed.fsdp.FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.transformer.h:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)


class FSDPOnCPU(FSDPStrategy):
    """Lightning's strategy, with the device named that it otherwise takes from CUDA."""

    def _setup_model(self, model):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def strategy_of(name: str):
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if name == "model_parallel":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return FSDPOnCPU(process_group_backend="gloo", auto_wrap_policy={GPT2Block})


def fit(
    rank: int,
    folder: str,
    strategy: str,
    every_n_steps: int | None,
    dropout: float = 0.0,
    growth: bool = False,
    padded: bool = False,
    validation: tuple[int, int] = (1, 1),
    **arguments,
) -> dict:
    """What a Trainer computes, measures, logs and warns of in one of two processes."""
    seed_all(7 + rank)
    module = Ranked(tiny_gpt2(dropout=dropout))
    if growth:
        with torch.no_grad():
            module.model.transformer.h[1].attn.c_attn.weight[:, :32] *= 1000
    seen, logger, starts = Bits(), MemoryLogger(), Starts()
    monitor = None if every_n_steps is None else AttentionMonitor(every_n_steps, **(EVERYTHING | arguments))
    ends = Ends(monitor)
    callbacks = [starts, *([] if monitor is None else [monitor]), ends, seen]
    run = trainer(
        folder, *callbacks, logger=logger, max_steps=STEPS, devices=2, strategy=strategy_of(strategy),
        plugins=[TorchElasticEnvironment()], use_distributed_sampler=False,
        limit_val_batches=2 if monitor is not None and monitor.validation_batches else 1,
    )  # fmt: skip
    seed_all(7 + rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AttentionSaturationWarning)
        warnings.filterwarnings("always", "attnmon does not look at validation batches")
        run.fit(module, loader(rank_batches(rank, padded)), loader(rank_batches(rank)[: validation[rank]]))
    bits = bits_of(seen, module, []) if strategy == "ddp" else [seen.losses, random_states()]
    return {
        "bits": [bits, digest(list(module.parameters()))],
        "counts": [end - start for start, end in zip(starts.at, ends.at, strict=True)],
        "snapshots": ends.snapshots,
        "logged": [step for step, _ in logger.of("attn")],
        "warned": [str(warning.message) for warning in caught],
        "validation": None if monitor is None else monitor.latest_validation,
    }


STRATEGIES = ["ddp", "fsdp", "model_parallel"]


@pytest.mark.parametrize("padded", [False, True], ids=["unequal", "one_all_padding"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lightning_measures_as_one_process_does(pair, together, tmp_path, strategy, padded):
    for result in pair.run(fit, folder=str(tmp_path), strategy=strategy, every_n_steps=2, padded=padded):
        check_snapshots(result, together[padded], 2)


@pytest.mark.parametrize("source", ["train", "probe"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lightning_trains_to_the_same_bits_with_one_reduction_per_sample(pair, tmp_path, strategy, source):
    arguments = {"folder": str(tmp_path), "strategy": strategy, "dropout": 0.1}
    without = pair.run(fit, every_n_steps=None, **arguments)
    for every_n_steps in (1, 3):
        results = pair.run(fit, every_n_steps=every_n_steps, source=source, **arguments)
        for result, plain in zip(results, without, strict=True):
            assert result["bits"] == plain["bits"]
            assert list(result["snapshots"]) == list(range(0, STEPS, every_n_steps))
            if source == "train" or strategy == "ddp":  # a sharded model gathers its parameters for a probe
                check_counts(result["counts"], plain["counts"], every_n_steps)


def test_only_the_first_rank_warns_and_logs(pair, tmp_path):
    first, second = pair.run(fit, folder=str(tmp_path), strategy="ddp", every_n_steps=2, growth=True)
    assert first["logged"] == [0, 2, 4]
    assert any("score" in message for message in first["warned"])
    assert second["logged"] == second["warned"] == []
    for result in (first, second):
        assert [alert.rule for alert in result["snapshots"][0].alerts] == ["score_growth"]


VALIDATES = {"strategy": "ddp", "every_n_steps": 100, "validation_batches": 2}


def test_a_rank_with_less_validation_data(pair, tmp_path):
    first, second = pair.run(fit, folder=str(tmp_path), validation=(2, 1), **VALIDATES)
    assert first["validation"].rows_used["entropy"] == {0: [(2 * 1 + 1 * 3) * LENGTH] * 2, 1: [5 * LENGTH] * 2}
    same(first["validation"].values, second["validation"].values)


def test_a_rank_without_validation_data_is_not_waited_for(pair, tmp_path):
    """Lightning runs no validation hook there."""
    arguments = {"folder": str(tmp_path), "validation": (2, 0), **VALIDATES}
    pair.run(fit, **arguments | {"validation_batches": 0})  # Lightning itself does not mind
    first, second = pair.run(fit, **arguments)
    assert list(first["snapshots"]) == list(second["snapshots"]) == [0]
    assert first["validation"] is second["validation"] is None
    assert len(first["warned"]) == 1
    assert second["warned"] == []


def at_its_own_pace(rank: int) -> list[int]:
    """Steps that a process samples whose clock goes faster than the other's."""
    model, now = tiny_gpt2(), [0.0]

    def look() -> float:
        now[0] += 0.001 * (1 + 3 * rank)
        return now[0]

    with pytest.MonkeyPatch.context() as patch, watch(model, 1, max_overhead=0.05, alerts=False) as monitor:
        patch.setattr("time.perf_counter", look)
        steps = []
        for step in range(40):
            model(**rank_batch(rank)).loss.backward()
            now[0] += 0.02
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if monitor.step() is not None:
                    steps.append(step)
    return steps


def test_processes_agree_on_how_seldom_to_sample(pair):
    first, second = pair.run(at_its_own_pace)
    assert first == second
    assert 2 <= len(first) < 20


def heads_of_one_process(rank: int) -> list[str]:
    """Tensor parallelism: each process has half of the heads, which its sums may not be mixed with the other's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = ProjectedAttention()
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    with warnings.catch_warnings(record=True) as caught, watch(model, 1, strict=True) as monitor:
        warnings.simplefilter("always")
        model(torch.randn(2, 30, 16)).sum().backward()
        assert monitor.step() is None
    return [str(warning.message) for warning in caught if "attnmon" in str(warning.message)]


class ProjectedAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        query, key, value = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return self.o(out.transpose(1, 2).flatten(2))


def test_heads_spread_over_processes_are_named_and_not_measured(pair):
    first, second = pair.run(heads_of_one_process)
    assert "tensor parallelism" in first[0]
    assert second == []


@pytest.mark.filterwarnings("ignore:.*DistributedSampler|.*`use_distributed_sampler")
def test_ddp_spawn_takes_the_callback_to_its_processes(tmp_path):
    """Everything is pickled; what comes back is what was logged."""
    logger = CSVLogger(tmp_path, name="csv", flush_logs_every_n_steps=1)
    batches = token_batches(4, batch=2, length=LENGTH)
    run = trainer(
        tmp_path, AttentionMonitor(1, **EVERYTHING), logger=logger, max_steps=1, devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", start_method="spawn"),
    )  # fmt: skip
    run.fit(LanguageModule(), loader(batches))
    lines = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    row = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    seen = {key: torch.cat([batches[0][key], batches[1][key]]) for key in ("input_ids", "labels")}
    heads = single(seen)["entropy"][1]
    assert float(row["attn/entropy/layer_01"]) == pytest.approx(sum(heads) / 2, rel=1e-6)


def real_fsdp(rank: int, folder: str) -> None:
    """On one GPU, with and without the monitor."""
    bits = []
    for every_n_steps in (None, 1):
        seed_all()
        module, seen = Together(tiny_gpt2(attn_implementation="eager")), Bits()
        monitors = [] if every_n_steps is None else [AttentionMonitor(every_n_steps, **EVERYTHING)]
        strategy = FSDPStrategy(auto_wrap_policy={GPT2Block})
        run = trainer(folder, seen, *monitors, max_steps=STEPS, accelerator="gpu", strategy=strategy)
        run.fit(module, loader([[batch] for batch in rank_batches(0)]))
        bits.append([seen.losses, random_states()])
    torch.save({"bits": bits, "latest": monitors[0].latest}, f"{folder}/result.pt")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Lightning's FSDPStrategy itself needs a GPU")
def test_fsdp_on_a_gpu(tmp_path):
    torch.multiprocessing.spawn(real_fsdp, (str(tmp_path),), nprocs=1)
    result = torch.load(tmp_path / "result.pt", weights_only=False)
    assert result["bits"][0] == result["bits"][1]
    assert list(result["latest"].layers.values()) == ["model.transformer.h.0.attn", "model.transformer.h.1.attn"]
