"""Array types that every part shares, and images as JPEG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

Indices = NDArray[np.int64]
Seconds = NDArray[np.float64]
Frames = NDArray[np.uint8]  # [N, H, W, 3] RGB, unless a comment says otherwise


def jpeg(image: Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()
