"""TensorBoard's entry point to the Attention tab.

TensorBoard imports this module when it starts, whatever it is going to show, and does not start where that fails. So
nothing else of attnmon, and nothing heavy, is imported here; the rest is, guarded, once TensorBoard asks for the tab.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tensorboard.plugins import base_plugin

if TYPE_CHECKING:
    import argparse

__all__ = ["SAMPLES_KEPT", "AttentionLoader"]

SAMPLES_KEPT = 1000  # of each tag, unless --samples_per_plugin says otherwise; TensorBoard's own numbers are 100 and 10


class AttentionLoader(base_plugin.TBLoader):  # type: ignore[misc]  # TensorBoard has no annotations
    """Makes the tab, or leaves it out where it can't be made: TensorBoard starts in any case."""

    def fix_flags(self, flags: argparse.Namespace) -> None:
        """Has TensorBoard keep enough samples; what the user asked for stays."""
        samples = getattr(flags, "samples_per_plugin", None)
        if isinstance(samples, dict):
            samples.setdefault("attnmon", SAMPLES_KEPT)

    def load(self, context: base_plugin.TBContext) -> base_plugin.TBPlugin | None:
        """The plugin, or None."""
        try:
            from attnmon.plugin.plugin import AttentionPlugin

            return AttentionPlugin(context)
        except Exception:
            logging.getLogger("tensorboard").warning("The Attention tab of attnmon is left out:", exc_info=True)
            return None
