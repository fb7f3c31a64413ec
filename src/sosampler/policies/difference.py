"""Frame difference: the frames at which the picture changes most."""

from __future__ import annotations

import numpy as np
from PIL import Image

from sosampler.video.reader import Frames

# Differences are taken on small grey pictures: noise and small shifts average out, and it costs nothing.
_THUMBNAIL = 64


def change_scores(frames: Frames) -> np.ndarray:
    """How much each frame [T, H, W, 3] differs from the one before it: mean absolute grey difference in 0..1, [T].

    The first frame has none before it and is compared with the second.
    """
    small = np.stack([_thumbnail(frame) for frame in frames])  # [T, 64, 64]
    if len(small) < 2:
        return np.zeros(len(small))
    change = np.abs(np.diff(small, axis=0)).mean(axis=(1, 2)) / 255
    return np.concatenate([change[:1], change])


def _thumbnail(frame: np.ndarray) -> np.ndarray:
    grey = Image.fromarray(frame).convert("L")
    return np.asarray(grey.resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX, reducing_gap=2.0), dtype=np.float32)
