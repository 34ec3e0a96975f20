"""Capture of attention calls while a model runs; the only part that knows how models attend."""

from attnmon.capture.attachment import Attachment, attach
from attnmon.capture.context import Hook
from attnmon.capture.discovery import (
    AttentionSite,
    anything_compiled,
    compiled_modules,
    describe_search,
    find_attention,
    is_compiled_function,
    named_layers,
)

__all__ = [
    "Attachment",
    "AttentionSite",
    "Hook",
    "anything_compiled",
    "attach",
    "compiled_modules",
    "describe_search",
    "find_attention",
    "is_compiled_function",
    "named_layers",
]
