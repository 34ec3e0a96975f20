"""Draw the figures of "Limitations of Normalization in Attention Mechanism" for a model, and judge the paper's claims.

    python recipes/reproduce_figures.py --config configs/figures/demo.yaml

The arguments of `reproduce_figures` are the schema of the YAML files and of the command line; ``--help`` lists them.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import _figures
import _series
import _verdict
import torch
from _models import check_model, check_vocabulary, choose_device, encode, load_model, train_small_model
from _text import cache_folder, check_checksum, load_pretrained, load_text, split_text, train_tokenizer
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from attnmon.analysis import Analysis, AnalysisOptions, CriticalSize, analyze, effective_set_size
from attnmon.analysis import compare as compare_analyses
from attnmon.analysis import critical_top_n as find_critical

ALGORITHMS = {
    "distance": "Algorithms 1 and 2 (distances, one pass)",
    "critical": "Algorithm 3 (critical N, every N)",
    "separability": "Algorithm 4 (Ns/N and Theorem 2)",
    "sensitivity": "Algorithm 5 (finite differences)",
    "jacobian": "exact Jacobian norms (beside Algorithm 5)",
    "summary": "entropy, active share, score spread, Jacobian at the model's own T",
}
CONVENTIONS = {"visible": "the keys that a row may see (visible)", "full": "all L keys (full)"}
PACKAGES = ("attnmon", "torch", "transformers", "numpy", "scipy", "matplotlib")
ENCODER = (
    "The model is an encoder: every row sees all n = L keys, and each L was run by itself. Algorithms 1 to 5, and so "
    "Figures 2 to 4, apply to it as they stand. What does not apply: the paper's causal rows, whose number of keys "
    "grows along the text (a mean over L mixes all n up to L there, and has n = L only here), the next-token loss, "
    "and the effective attention set size N*_tau, which is read off that loss."
)


@dataclass
class Run:
    """What a run knows besides its analysis."""

    folder: Path
    model: str
    text: str
    text_sha256: str
    tokens: Tensor
    causal: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    sections: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Any:
        """Note the wall time of a stage."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = time.perf_counter() - begun


def reproduce_figures(
    model: str | None = None,
    text: str | None = None,
    checksum: str | None = None,
    cache_dir: str | None = None,
    offset: int = 0,
    lengths: tuple[int, ...] = (32, 64, 128, 256, 512, 1024),
    vectors: Literal["embedding", "positioned", "hidden", "value"] = "embedding",
    convention: Literal["visible", "full"] = "visible",
    tasks: tuple[str, ...] = ("distance", "critical", "separability", "sensitivity", "summary"),
    top_n: tuple[int, ...] = (1, 5, 10, 20, 100),
    critical_top_n: int = 100,
    separability_top_n: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 100),
    temperatures: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
    epsilons: tuple[float, ...] = (1e-3, 0.1, 10.0),
    alpha: float = 0.01,
    rows: int | Literal["all"] = "all",
    tau: tuple[float, ...] | None = None,
    compare: str | None = None,
    seed: int = 0,
    device: str | None = None,
    memory_gib: float = 1.0,
    threads: int | None = None,
    out: str | None = None,
    progress: bool = True,
    n_layer: int = 2,
    n_head: int = 8,
    n_embd: int = 96,
    vocab_size: int = 512,
    train_steps: int = 600,
    batch_size: int = 4,
    learning_rate: float = 4e-3,
) -> int:
    """Draw the paper's figures for a model and judge its claims.

    Args:
        model: Hub id, local directory or ``.gguf`` file. By default a small GPT-2 is trained on the text first.
        text: A UTF-8 text file, or an ``http(s)://`` address whose text is fetched once and kept; by default the
            language reference that every CPython carries (`pydoc_data.topics`, English, 0.5 MB).
        checksum: SHA-256 that the bytes of `text` must have. None accepts any file; a fetched text is then still
            held to the checksum of its first download.
        cache_dir: Where fetched texts are kept; by default ``attnmon`` in the user's cache.
        offset: First token of the text that is used.
        lengths: Context lengths L, in tokens.
        vectors: What the keys carry, x: the L2-normalised token embedding, embedding plus learned position, the input
            of the attention module, or the head's value vector.
        convention: What a row is: the keys that it may see, or (``full``) all L keys, those that it may not see with
            weight 0, as the paper's listings may be read.
        tasks: What is measured: ``distance`` (Algorithms 1 and 2), ``critical`` (3), ``separability`` (4),
            ``sensitivity`` (5), ``summary``.
        top_n: N of Figures 2a (the one nearest to 5) and 2b.
        critical_top_n: Largest N that may turn out critical.
        separability_top_n: N of Figure 3.
        temperatures: Softmax temperatures T of Figure 4, on the raw scores.
        epsilons: Sizes eps of the perturbation in Figure 4.
        alpha: Level of the Kolmogorov-Smirnov test; the paper's 0.01 and 0.05 are both drawn, and this one is judged.
        rows: ``all``, or how many rows are drawn between each length and the next smaller one.
        tau: Shares by which the loss may rise, for the effective attention set size N*_tau; None skips it.
        compare: A second model, or the ``analysis.npz`` of an earlier run, to set this one against.
        seed: Of the random directions, of drawn rows, and of the small model.
        device: Where the model runs; by default the GPU if there is one.
        memory_gib: Memory that the working arrays may take, in GiB, beside the model.
        threads: CPU threads; by default torch decides.
        out: Folder of the results; by default ``runs/figures/`` and the name of the model.
        progress: Whether to show a progress bar.
        n_layer: Layers of the small model.
        n_head: Heads per layer of the small model.
        n_embd: Width of the small model.
        vocab_size: Entries of the tokenizer that is trained for it.
        train_steps: Steps that the small model is trained for.
        batch_size: Blocks of the longest L per step.
        learning_rate: Peak learning rate of its training.

    Returns:
        0, or 1 if a figure or another part could not be made; `verdict.md` says which, and everything else is there.

    Raises:
        ValueError: An argument is out of its range, or text or model cannot be used: before anything long has run.
        ModuleNotFoundError: A package that reads the model, draws or tests is missing.
    """
    begun = time.perf_counter()
    console = Console()
    options = AnalysisOptions(
        lengths=tuple(lengths),
        tasks=tuple(tasks),
        top_n=tuple(top_n),
        critical_top_n=critical_top_n,
        separability_top_n=tuple(separability_top_n),
        temperatures=tuple(temperatures),
        epsilons=tuple(epsilons),
        vectors=vectors,
        convention=convention,
        rows=rows,
        seed=seed,
    )
    _check_sizes(options)
    if "critical" in options.tasks and find_spec("scipy") is None:
        raise ModuleNotFoundError(
            "The Kolmogorov-Smirnov test needs the package `scipy`. Install it with: pip install 'attnmon[figures]'"
        )
    _check_numbers(alpha, offset, threads, memory_gib, tau)
    check_checksum(checksum)
    place = choose_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    content, sha256 = load_text(text, checksum, cache_folder(cache_dir))
    longest = max(options.lengths or ())
    earlier = _earlier(compare, longest)

    folder = _folder(out, model)

    begun_model = time.perf_counter()
    if model is None:
        small = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "learning_rate": learning_rate}
        training = {"vocab_size": vocab_size, "train_steps": train_steps, "batch_size": batch_size, "seed": seed}
        tokens = encode(train_tokenizer(split_text(content), vocab_size), content, offset, longest, trains=True)
        settings = small | training | {"context": longest, "text_sha256": sha256}
        source = train_small_model(folder / "model", settings, text, checksum, progress)
        named = f"GPT-2 of {n_layer} layers, {n_head} heads and width {n_embd}, trained here for {train_steps} steps"
    else:
        check_model(model, longest)
        source = named = model
        tokens = encode(load_pretrained(AutoTokenizer, model), content, offset, longest)
    net = load_model(source)
    check_vocabulary(net, tokens, named)
    run = Run(folder, named, text or "pydoc_data.topics, which Python carries", sha256, tokens)
    run.seconds["loading or training the model"] = time.perf_counter() - begun_model
    how: dict[str, Any] = {"device": place, "memory": int(memory_gib * 2**30), "folder": folder / "parts"}
    how["progress"] = progress

    with run.timed("analysis"):
        analysis = analyze(net, tokens, options, **how)
    try:
        analysis.save(folder / "analysis.npz")
    except OSError as error:  # a full disk, say: the figures may still fit
        run.failures.append(f"analysis.npz: {type(error).__name__}: {error}")
    run.causal = bool(analysis.about.get("causal", True))
    with run.timed("Kolmogorov-Smirnov tests"):
        criticals = critical_sizes(analysis, alpha)
    with run.timed("figures"):
        draw(run, analysis, criticals)
    findings = _verdict.judge(analysis, criticals)
    _describe(run, analysis, time.perf_counter() - begun)
    write_verdict(run, findings)  # what follows may take long or fail: the verdict is there already

    if tau is not None:
        with run.timed("effective attention set size"):
            _attempt(run, "Effective attention set size", lambda: set_sizes(on(net, place), tokens, tau))
    if compare is not None:
        with run.timed("comparison"):
            other = earlier or (lambda: analyze(load_model(compare), tokens, options, **how))
            _attempt(run, "Comparison", lambda: compare_with(run, analysis, other(), compare))
    _describe(run, analysis, time.perf_counter() - begun)
    write_verdict(run, findings)
    report(console, run, findings)
    return 1 if run.failures else 0


# -- input --------------------------------------------------------------------------------------------------------


def on(net: PreTrainedModel, place: torch.device) -> torch.nn.Module:
    """The model on that device."""
    module: torch.nn.Module = net
    return module.to(place)


def _check_sizes(options: AnalysisOptions) -> None:
    """Refuse an N that no row can have, before a model is loaded or trained for it."""
    longest = max(options.lengths or ())
    sizes = {"top_n": max(options.top_n), "critical_top_n": options.critical_top_n}
    sizes["separability_top_n"] = max(options.separability_top_n)
    tasks = {"top_n": "distance", "critical_top_n": "critical", "separability_top_n": "separability"}
    for name, size in sizes.items():
        if tasks[name] in options.tasks and size >= longest:
            raise ValueError(
                f"Expected every N in `{name}` to be below the longest of `lengths`, {longest}, but got {size}: no row "
                f"would have a key that is not selected. Use N up to {longest - 1}, or longer lengths."
            )


def _check_numbers(
    alpha: float, offset: int, threads: int | None, memory_gib: float, tau: Sequence[float] | None
) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"Expected `alpha` to lie between 0 and 1, but got {alpha}. The paper has 0.01 and 0.05.")
    if offset < 0:
        raise ValueError(f"Expected `offset` to be 0 or more, but got {offset}.")
    if threads is not None and threads < 1:
        raise ValueError(f"Expected `threads` to be at least 1, but got {threads}. Leave it out: torch decides.")
    if memory_gib < 2**-4:
        raise ValueError(f"Expected `memory_gib` to be at least 1/16, but got {memory_gib}. Try 1.")
    if tau is not None and (not tau or min(tau) <= 0):
        raise ValueError(f"Expected `tau` to hold shares above 0, but got {list(tau)}. Try 0.05, or null to skip it.")


def _earlier(compare: str | None, longest: int) -> Callable[[], Analysis] | None:
    """What to compare with, if it is a saved analysis; a model is only looked at."""
    if compare is None:
        return None
    if not compare.endswith(".npz"):
        check_model(compare, longest)
        return None
    try:
        saved = Analysis.load(Path(compare).expanduser())
    except OSError as error:
        raise ValueError(
            f"Expected `compare` to be a model or an analysis.npz, but reading {compare!r} failed: {error.strerror}."
        ) from error
    return lambda: saved


def _folder(out: str | None, model: str | None) -> Path:
    """Where the results go; made if it is missing."""
    name = Path(model).expanduser().resolve().name.removesuffix(".gguf") if model else "small_model"
    folder = Path(out).expanduser() if out else Path("runs/figures") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"Expected `out` to be a folder, but making {str(folder)!r} failed: {error.strerror}. Give another one."
        ) from error
    return folder


def critical_sizes(analysis: Analysis, alpha: float) -> list[CriticalSize]:
    """The critical N at `alpha` and at the paper's two levels; none if the task was not run."""
    if "critical" not in analysis.tables:
        return []
    return [find_critical(analysis, level) for level in dict.fromkeys((alpha, 0.01, 0.05))]


def draw(run: Run, analysis: Analysis, criticals: Sequence[CriticalSize]) -> None:
    """Draw and tabulate what can be; a figure that fails is noted and leaves the others alone."""
    s, f = _series, _figures
    figures: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "figure_1": (f.figure_1, lambda: iter(f.illustration())),
        "figure_2a": (
            lambda: f.figure_2a(analysis),
            lambda: s.grid_records(analysis, s.distance_over_length(analysis), "length"),
        ),
        "figure_2b": (
            lambda: f.figure_2b(analysis),
            lambda: s.grid_records(analysis, s.distance_over_top_n(analysis), "top_n"),
        ),
        "figure_2c": (lambda: f.figure_2c(analysis, criticals), lambda: s.critical_records(analysis, criticals)),
        "figure_3": (
            lambda: f.figure_3(analysis),
            lambda: s.grid_records(analysis, s.separability_over_top_n(analysis), "top_n"),
        ),
        "figure_4": (lambda: f.figure_4(analysis), lambda: s.sensitivity_records(analysis)),
    }
    lines = []
    for name, (figure, records) in figures.items():
        files = []
        for make in (
            lambda name=name, records=records: s.write_csv(run.folder / f"{name}.csv", records()),
            lambda name=name, figure=figure: f.save(figure(), run.folder, name),
        ):
            try:
                make()
                files.append(make)
            except s.NotMeasuredError as reason:
                lines.append(f"- {name}: not drawn: {reason}")
                break
            except Exception as error:  # whatever it is, the other figures are still wanted
                run.failures.append(f"{name}: {type(error).__name__}: {error}")
                lines.append(f"- {name}: failed: {type(error).__name__}: {error}")
        if len(files) == 2:
            lines.append(f"- [{name}.png]({name}.png), [{name}.svg]({name}.svg), [{name}.csv]({name}.csv)")
    run.sections["Figures"] = lines


def set_sizes(net: torch.nn.Module, tokens: Tensor, tau: Sequence[float]) -> list[str]:
    """Markdown lines with N*_tau of the longest context, both ways."""
    names = " | ".join(f"N* at tau = {share:g}" for share in tau)
    lines = [
        "N* is the least N found such that the next-token loss rises by at most a share tau when every row of every "
        "head keeps only its N largest weights, either as they are or divided by their sum. Small N shrink the heads' "
        "outputs in the first case and bias them toward few keys in the second: neither is always the smaller.",
        "",
        f"| kept weights | {names} | loss of the whole model, and with N keys (nats per token) |",
    ]
    lines.append("|---|" + "---|" * (len(tau) + 1))
    for renormalize in (False, True):
        result = effective_set_size(net, tokens[None], tau=tuple(tau), renormalize=renormalize)
        sizes = result.size if isinstance(result.size, tuple) else (result.size,)
        how = "renormalised" if renormalize else "as they are"
        near = {size for size in sizes if size is not None}
        steps = [n for n in result.losses if n in near or n + 1 in near or n == 1]
        losses = ", ".join(f"{result.losses[n]:.4f} at {n}" for n in steps)
        lines.append(f"| {how} | {' | '.join(str(size) for size in sizes)} | {result.loss:.4f}; {losses} |")
    return lines


def compare_with(run: Run, analysis: Analysis, other: Analysis, name: str) -> list[str]:
    """Write all changes as CSV; Markdown lines with the ten largest."""
    comparison = compare_analyses(analysis, other)
    comparison.write_csv(run.folder / "comparison.csv")
    lines = [*comparison.notes, f"First: this run. Second: {name}. All figures: [comparison.csv](comparison.csv)."]
    largest = [change for change in comparison.changes()[:10] if change.difference]
    if not largest:
        return [*lines, f"At L = {max(set(analysis.lengths) & set(other.lengths))} no figure differs."]
    return [*lines, "The largest changes:", "", *_verdict.changes_table(largest)]


def _attempt(run: Run, heading: str, make: Callable[[], list[str]]) -> None:
    """Fill a section; what goes wrong is written into it."""
    try:
        run.sections[heading] = make()
    except ValueError as error:  # does not apply to this model, or to these two
        run.sections[heading] = [f"Not measured: {error}"]
    except Exception as error:  # an extra must not cost the verdict
        run.sections[heading] = [f"Failed: {type(error).__name__}: {error}"]
        run.failures.append(f"{heading}: {type(error).__name__}: {error}")


def _describe(run: Run, analysis: Analysis, total: float) -> None:
    """Fill in what a reader has to know of the run."""
    options = analysis.about["options"]
    layers, heads = len(analysis.layers), len(analysis.heads)
    facts = {
        "model": run.model,
        "heads": f"{heads} in {layers} layers",
        "text": run.text,
        "text_sha256": run.text_sha256,
        "tokens": int(run.tokens.numel()),
        "tokens_sha256": analysis.about.get("tokens_sha256"),
        "lengths": list(analysis.lengths),
        "rows": {"visible": "the keys that a row may see (visible)", "full": "all L keys (full)"}[
            options["convention"]
        ],
        "row_sample": options["rows"],
        "vectors": options["vectors"],
        "seed": options["seed"],
        "device": analysis.about.get("device"),
        "threads": analysis.about.get("threads"),
        "versions": {
            name: _version(name) for name in ("attnmon", "torch", "transformers", "numpy", "scipy", "matplotlib")
        }
        | {"python": platform.python_version()},
    }
    seconds = {task: table.seconds for task, table in analysis.tables.items()}
    run.facts = {
        "run": facts,
        "seconds": {**seconds, "shared by all": analysis.about.get("seconds_shared"), **run.seconds, "total": total},
        "notes": _notes(run, analysis),
        "not_measured": dict(analysis.not_measured),
        "failures": run.failures,
    }
    run.sections["Notes"] = [f"- {note}" for note in run.facts["notes"]]
    run.sections["Layers not measured"] = [f"- `{layer}`: {why}" for layer, why in analysis.not_measured.items()]
    run.sections["The run"] = [
        f"- {name.replace('_', ' ').replace('sha256', 'SHA-256')}: {_shown(value)}" for name, value in facts.items()
    ]
    run.sections["Wall time"] = [
        "| part | seconds |",
        "|---|---|",
        *(f"| {ALGORITHMS.get(task, task)} | {value:.2f} |" for task, value in seconds.items()),
        f"| shared by these: scores and weights of the rows | {analysis.about['seconds_shared']:.2f} |",
        *(f"| {stage} | {value:.2f} |" for stage, value in run.seconds.items()),
        f"| total | {total:.2f} |",
        "",
        "The algorithms' times are those of the run that measured them, also where finished parts were found again.",
    ]
    last = {name: run.sections.pop(name) for name in ("The run", "Wall time")}
    run.sections.update(last)


def _notes(run: Run, analysis: Analysis) -> list[str]:
    notes = list(analysis.notes) + ([] if run.causal else [ENCODER])
    if run.causal and analysis.about["options"]["convention"] == "visible":
        notes.append(
            "Each N is a mean over the rows that see more than N keys: the larger N, the longer these rows are on "
            "average, which matters where N is not small against L."
        )
    if analysis.about["options"]["vectors"] == "embedding":
        seen: set[int] = set()
        for place, token in enumerate(run.tokens.tolist()):
            if token in seen:
                notes = [note for note in notes if "delta = 0" not in note]  # the same with less detail
                notes.append(
                    f"Token {place} (from 0) of the text used is the first that occurred before: a row that sees it "
                    "has two keys with the same embedding, so delta = 0 there and Theorem 2 is taken with xi_i = M A_i."
                )
                break
            seen.add(token)
    return notes


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def write_verdict(run: Run, findings: Sequence[_verdict.Finding]) -> None:
    """Write verdict.md and verdict.json; if that fails, the table on the console is what is left."""
    try:
        _write_verdict(run, findings)
    except OSError as error:
        failure = f"verdict: {type(error).__name__}: {error}"
        if failure not in run.failures:
            run.failures.append(failure)


def _write_verdict(run: Run, findings: Sequence[_verdict.Finding]) -> None:
    order = ("Figures", "Notes", "Layers not measured")
    sections = {name: run.sections[name] for name in order if name in run.sections} | run.sections
    markdown = _verdict.as_markdown(f"The paper's claims on {run.model}", findings, sections)
    (run.folder / "verdict.md").write_text(markdown, encoding="utf-8")
    data = _verdict.as_json(findings, run.facts | {"sections": sections})
    (run.folder / "verdict.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def report(console: Console, run: Run, findings: Sequence[_verdict.Finding]) -> None:
    """Print the verdict as a table and where the files are."""
    table = Table("figure", "claim", "status", "measured", title=f"The paper's claims on {run.model}")
    colours = {_verdict.HOLDS: "green", _verdict.PARTLY: "yellow", _verdict.FAILS: "red"}
    for f in findings:
        claim = f.claim if f.form == "paper" else f"{f.claim} (corrected)"
        table.add_row(f.figure, claim, f.status, f.measured, style=colours.get(f.status, "dim"))
    console.print(table)
    for failure in run.failures:
        console.print(f"Failed: {failure}", style="red", markup=False)
    # soft_wrap: a path broken over two lines cannot be copied
    console.print(f"Reasons: {run.folder / 'verdict.md'}", soft_wrap=True, highlight=False)
    console.print(f"Figures and their numbers: {run.folder}", soft_wrap=True, highlight=False)


def main() -> None:
    """Run the command line; what is wrong with the input is said without a traceback."""
    disable_progress_bar()  # of transformers, for weights that load in a second
    try:
        sys.exit(auto_cli(reproduce_figures, parser_mode="yaml"))
    except KeyboardInterrupt:
        print("Interrupted. What was finished is kept: the same command goes on from there.", file=sys.stderr)
        sys.exit(130)
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        if not str(error).startswith(("Expected ", "Reading ", "Drawing ", "The Kolmogorov")):
            raise  # not one of our own: a fault, whose place matters
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
