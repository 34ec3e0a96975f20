"""What a logger is given: tags, per-layer scalars, layer x head images, TensorBoard's layout, warnings as text.

Everything here is a pure function of plain numbers.
"""

from attnmon.dashboard.images import heads_image, quantity_image
from attnmon.dashboard.layout import custom_scalars_layout
from attnmon.dashboard.names import (
    QUANTITIES,
    Quantity,
    cost_scalars,
    image_tag,
    scalar_tag,
    scalars,
    title,
    warning_scalars,
    warning_tag,
)
from attnmon.dashboard.text import alert_markdown

__all__ = [
    "QUANTITIES",
    "Quantity",
    "alert_markdown",
    "cost_scalars",
    "custom_scalars_layout",
    "heads_image",
    "image_tag",
    "quantity_image",
    "scalar_tag",
    "scalars",
    "title",
    "warning_scalars",
    "warning_tag",
]
