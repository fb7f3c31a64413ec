"""Pictures as Pillow opens them, made upright 8-bit RGB."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageOps


def upright_rgb(image: Image.Image) -> Image.Image:
    """As its EXIF rotation asks for, in RGB; 16-bit grey is scaled, where Pillow alone would cut it off at 255."""
    upright: Any = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        upright = Image.fromarray((np.asarray(upright, dtype=np.int64) // 257).clip(0, 255).astype(np.uint8))
    rgb: Image.Image = upright.convert("RGB")
    return rgb
