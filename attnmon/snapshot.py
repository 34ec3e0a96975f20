"""What a sampled step leaves behind: plain numbers, no tensors, nothing of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from attnmon import dashboard
from attnmon.alerts import Alert
from attnmon.cost import Cost

__all__ = ["PerHead", "Snapshot"]

PerHead = Mapping[str, Mapping[int, list[float]]]
"""quantity -> layer number -> one number per head."""


@dataclass(frozen=True)
class Snapshot:
    """The figures of one sampled step.

    Attributes:
        step: Optimizer step that the figures belong to: the parameters are those before this step's update.
        values: ``values[quantity][layer]`` is a list of floats, one per query head: the mean over the rows that were
            used. NaN where a head had no usable row; a quantity or layer that was not measured is absent.
        errors: Standard errors of ``values`` over the rows taken as a simple random sample, same shape. NaN with
            fewer than two rows. Of a batch with more sequences than are looked at, they leave out how much the
            sequences differ from each other.
        rows_used: Number of rows behind each value.
        rows_skipped: Number of sampled rows left out of each value: the row sees too few keys for the quantity, sees
            none at all, has a NaN or infinite score, or its figure is infinite (Theorem 2's lower bound at radius 0).
        layers: Module path of each layer number; layers are numbered in the order in which they were first called.
        temperatures: The model's own softmax temperature ``1 / scale`` of each layer.
        nonfinite: Per layer and head, how many sampled rows had a NaN or infinite score.
        padding: Per layer, how many padding positions of the looked-at sequences were left aside.
        not_measured: Module path -> reason, for attention that ran and could not be measured.
        alerts: What the rules said about this sample: one entry per rule that has something new to say.
        alarmed: Rule -> layer number -> heads that are under its alarm, said before or now; an entry for every rule
            that is on.
        limits: Rule -> quantity -> layer number -> one number per head: the limits that the rule has learned from the
            head itself, NaN where it does not judge the head yet. See `attnmon.alerts.AlertRules.fixed_levels` for
            those that are the same for all.
        recoveries: Of which heads the rules say that an alarm is over: one entry per rule.
        source: ``"train"``, ``"probe"`` or ``"validation"``.
        rerun: Whether attention that runs compiled was read in a second pass over the sequences looked at,
            uncompiled, in eval mode and so without dropout.
        cost: What the sample took. It does not count when snapshots are compared.
    """

    step: int
    values: PerHead
    errors: PerHead
    rows_used: Mapping[str, Mapping[int, list[int]]]
    rows_skipped: Mapping[str, Mapping[int, list[int]]]
    layers: Mapping[int, str]
    temperatures: Mapping[int, float]
    nonfinite: Mapping[int, list[int]]
    padding: Mapping[int, int]
    not_measured: Mapping[str, str] = field(default_factory=dict)
    alerts: tuple[Alert, ...] = ()
    alarmed: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    limits: Mapping[str, PerHead] = field(default_factory=dict)
    recoveries: tuple[Alert, ...] = ()
    source: str = "train"
    rerun: bool = False
    cost: Cost | None = field(default=None, compare=False)

    @property
    def alarms(self) -> dict[str, int]:
        """Rule -> number of heads that are under its alarm."""
        return {rule: sum(map(len, layers.values())) for rule, layers in self.alarmed.items()}

    def scalars(self, *, per_head: bool = False, prefix: str = "attn") -> dict[str, float]:
        """What loggers get, under their keys: each layer's mean over its heads, the alarm counts, the cost.

        Args:
            per_head: Adds every head's own figure.
            prefix: First part of each key.
        """
        figures = dashboard.scalars(self.values, per_head=per_head, prefix=prefix)
        figures |= dashboard.warning_scalars(self.alarms, prefix)
        return figures if self.cost is None else figures | dashboard.cost_scalars(asdict(self.cost), prefix)
