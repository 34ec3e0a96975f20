"""Every row, every N and every head of a model on a text: the static side, for figures and for comparisons."""

from attnmon.analysis.capacity import heads_needed
from attnmon.analysis.compare import Change, Comparison, compare, compare_models
from attnmon.analysis.critical import CriticalSize, critical_top_n
from attnmon.analysis.engine import analyze
from attnmon.analysis.intervention import EffectiveSetSize, effective_set_size, truncated_loss
from attnmon.analysis.options import AnalysisOptions
from attnmon.analysis.result import Analysis, Table

__all__ = [
    "Analysis",
    "AnalysisOptions",
    "Change",
    "Comparison",
    "CriticalSize",
    "EffectiveSetSize",
    "Table",
    "analyze",
    "compare",
    "compare_models",
    "critical_top_n",
    "effective_set_size",
    "heads_needed",
    "truncated_loss",
]
