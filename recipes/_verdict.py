"""Each claim of the paper against what was measured: figure, judgement, criterion and reason, as Markdown and JSON.

Claims about a printed formula and about its corrected form are judged apart; `Finding.form` says which is which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import _judgements as judgements
from _judgements import FAILS, HOLDS, PARTLY, UNKNOWN, Judged
from _series import NotMeasuredError

from attnmon.analysis import Analysis, Change, CriticalSize

__all__ = [
    "FAILS",
    "HOLDS",
    "PARTLY",
    "UNKNOWN",
    "Finding",
    "as_json",
    "as_markdown",
    "changes_table",
    "judge",
]


@dataclass(frozen=True)
class Finding:
    """One claim and what became of it.

    Attributes:
        figure: Of the paper: ``"2a"``; ``"rule 1"`` for one of its rules.
        claim: What it says, in a few words.
        form: ``"paper"``: as the paper has it; ``"corrected"``: what holds in place of a printed formula.
        status: ``"holds"``, ``"partly"``, ``"does not hold"`` or ``"not measured"``.
        measured: The figure.
        criterion: From where on it counts as held.
        why: One sentence from the data.
        numbers: The figures behind it.
    """

    figure: str
    claim: str
    form: str
    status: str
    measured: str
    criterion: str
    why: str
    numbers: Mapping[str, float | None] = field(default_factory=dict)


class _Claim(NamedTuple):
    figure: str
    claim: str
    form: str
    criterion: str
    judge: Callable[[], Judged]


def judge(analysis: Analysis, criticals: Sequence[CriticalSize] = ()) -> list[Finding]:
    """Judge every claim of the paper's experiments, and its rules where this analysis has what they speak of.

    Args:
        analysis: With all tasks or some; a claim whose task is missing is "not measured".
        criticals: Of `critical_top_n`, the first one at the level that counts.

    Returns:
        One finding per claim, in the paper's order.
    """
    findings = []
    for claim in _claims(analysis, criticals):
        try:
            judged = claim.judge()
        except NotMeasuredError as reason:
            judged = Judged(UNKNOWN, "-", f"{str(reason)[0].upper()}{str(reason)[1:]}.", {})
        numbers = {name: judgements.plain(value) for name, value in judged.numbers.items()}
        about = (claim.figure, claim.claim, claim.form)
        findings.append(Finding(*about, judged.status, judged.measured, claim.criterion, judged.why, numbers))
    return findings


def _claims(analysis: Analysis, criticals: Sequence[CriticalSize]) -> list[_Claim]:
    linear = "exponent of a power law 0.8 to 1.2, R^2 of a straight line at least 0.98; partly: exponent 0.6 to 1.4"
    falls = "partly: less than that, but in the same direction"
    return [
        _Claim(
            "2a",
            "the true distance grows about linearly in L",
            "paper",
            linear,
            lambda: judgements.linear(analysis, "distance"),
        ),
        _Claim(
            "2a",
            "the expectation (eq. 10 as printed) grows about linearly in L",
            "paper",
            linear,
            lambda: judgements.linear(analysis, "expected_paper"),
        ),
        _Claim(
            "2a",
            "the bound (Theorem 1.1) is safe",
            "paper",
            "distance <= bound for every head and L; partly: for 99 % of them",
            lambda: judgements.safe(analysis),
        ),
        _Claim(
            "2a",
            "the bound (Theorem 1.1) is loose",
            "paper",
            "median over heads of bound / distance at the longest L at least 2; partly: at least 1.2",
            lambda: judgements.loose(analysis),
        ),
        _Claim(
            "2a",
            "eq. 10 as printed is the expectation over a drawn set",
            "paper",
            "between the Jensen bounds of the true expectation for 99 % of heads and L; partly: for half of them",
            lambda: judgements.true_expectation(analysis),
        ),
        _Claim(
            "2b",
            "diminishing returns beyond N = 20",
            "paper",
            f"change of the distance per added key beyond N = 20 at most half of that up to it; {falls}",
            lambda: judgements.diminishing(analysis),
        ),
        _Claim(
            "2b",
            "distance and expectation (eq. 10 as printed) meet near N = 100",
            "paper",
            "they differ by at most 10 % of the distance at the N nearest to 100, and by more at the smallest N; "
            "partly: at most 25 %",
            lambda: judgements.meet(analysis),
        ),
        _Claim(
            "2b",
            "the bound (Theorem 1.1) tightens as N grows",
            "paper",
            "bound / distance falls from each N to the next; partly: from the smallest N to the largest",
            lambda: judgements.tightens(analysis),
        ),
        _Claim(
            "2c",
            "the critical N grows sub-linearly in L",
            "paper",
            "exponent of a power law over at least 3 lengths below 0.9, and at the longest L most larger N pass, too; "
            "partly: exponent below 1",
            lambda: judgements.sublinear(analysis, criticals),
        ),
        _Claim(
            "2c",
            "the critical N is about 0.06 L",
            "paper",
            "slope of a line through 0 between 0.045 and 0.075; partly: between 0.03 and 0.12",
            lambda: judgements.six_percent(analysis, criticals),
        ),
        _Claim(
            "3",
            "Ns/N falls until N = 16",
            "paper",
            "the mean over heads falls at each step from N = 2 (at 1 it is 1 by definition) to N = 16; partly: from "
            "the smallest of these N to N = 16",
            lambda: judgements.falls(analysis),
        ),
        _Claim(
            "3",
            "from N = 16 on Ns/N stays between 0.70 and 0.85",
            "paper",
            "so do all means over heads; partly: they stay within 0.15 of each other, at another level",
            lambda: judgements.stays(analysis),
        ),
        _Claim(
            "3",
            "the upper bound (Theorem 2 as printed) tracks the maxima",
            "paper",
            "its mean over heads differs from the largest head by at most 0.1, averaged over N; partly: by at most 0.2",
            lambda: judgements.tracks(analysis, "upper"),
        ),
        _Claim(
            "3",
            "the upper bound where its argument holds tracks the maxima",
            "corrected",
            "as above, with the terms that the argument does not cover set to 1",
            lambda: judgements.tracks(analysis, "upper_valid"),
        ),
        _Claim(
            "3",
            "the lower bound (Theorem 2) is loose",
            "paper",
            "Ns/N exceeds it (0 where it is below 0) by at least 0.2, averaged over heads and N; partly: by 0.05",
            lambda: judgements.lower_loose(analysis),
        ),
        _Claim(
            "4",
            "g follows a 1/T law for T < 0.1",
            "paper",
            "log-log slope between -1.25 and -0.75 for every eps; partly: for some eps",
            lambda: judgements.law(analysis),
        ),
        _Claim(
            "4",
            "g is two orders of magnitude lower for T >= 1",
            "paper",
            "largest g below T = 0.1 at least 100 times the largest from T = 1 on, for every eps; "
            "partly: 10 times, or for some eps",
            lambda: judgements.orders(analysis),
        ),
        _Claim(
            "4",
            "g stays below min(1/(4T), sqrt 2), Corollary 3 as printed",
            "paper",
            "for every head, T and eps; partly: for 99 % of them",
            lambda: judgements.below_printed(analysis),
        ),
        _Claim(
            "4",
            "g stays below min(1/(2T), sqrt 2 / eps)",
            "corrected",
            "for every head, T and eps; partly: for 99 % of them",
            lambda: judgements.below_corrected(analysis),
        ),
        _Claim(
            "4",
            "the Jacobian's largest entry stays below 1/(4T)",
            "corrected",
            "for every head and T; partly: for 99 % of them",
            lambda: judgements.norm_below(analysis, "max", 0.25),
        ),
        _Claim(
            "4",
            "the Jacobian's spectral norm stays below 1/(2T)",
            "corrected",
            "for every head and T; partly: for 99 % of them",
            lambda: judgements.norm_below(analysis, "spectral", 0.5),
        ),
        _Claim(
            "rule 1",
            "the active set is small: at most 6 % of the context",
            "paper",
            "active share exp(H)/n at most 0.06 in every head at the longest L; partly: in half of them",
            lambda: judgements.active(analysis),
        ),
        _Claim(
            "rule 3",
            "the model's own temperature is above 0.1",
            "paper",
            "in every layer; partly: in some",
            lambda: judgements.own_temperature(analysis),
        ),
    ]


# -- written down -------------------------------------------------------------------------------------------------


def as_json(findings: Sequence[Finding], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as plain values, without NaN."""
    return {"claims": [asdict(finding) for finding in findings], **facts}


def changes_table(changes: Sequence[Change]) -> list[str]:
    """Markdown lines: one row per change."""
    lines = ["| quantity | layer | head | L | arguments | first | second |", "|---|---|---|---|---|---|---|"]
    for change in changes:
        arguments = " ".join(f"{name}={value:g}" for name, value in change.arguments.items()) or "-"
        lines.append(
            f"| {change.quantity} | {change.layer} | {change.head} | {change.length} | {arguments} "
            f"| {change.first:.4g} | {change.second:.4g} |"
        )
    return lines


def as_markdown(
    title: str,
    findings: Sequence[Finding],
    sections: Mapping[str, Sequence[str]],
) -> str:
    """The verdict: a table, the reasons claim by claim, then further sections (heading to lines)."""
    words = {HOLDS: "hold", PARTLY: "hold in part", FAILS: "do not hold", UNKNOWN: "not measured"}
    counted = ", ".join(f"{sum(f.status == status for f in findings)} {word}" for status, word in words.items())
    lines = [
        f"# {title}",
        "",
        f'{len(findings)} claims around the paper "Limitations of Normalization in Attention Mechanism" (arXiv '
        f"2508.17821): {counted}. Form *paper*: the paper's claim, with its formulas as printed. Form *corrected*: the "
        "same claim with the formula that holds in its place.",
        "",
        "| figure | claim | form | status | measured |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {f.figure} | {f.claim} | {f.form} | **{f.status}** | {f.measured} |" for f in findings]
    lines += ["", "## Why", ""]
    for f in findings:
        lines += [
            f"- **{f.figure}: {f.claim}** ({f.form}): *{f.status}*, {f.measured}. {f.why} Criterion: {f.criterion}."
        ]
    for heading, body in sections.items():
        if body:
            lines += ["", f"## {heading}", "", *body]
    return "\n".join(lines) + "\n"
