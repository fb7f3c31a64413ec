"""Array types that every part shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Seconds = NDArray[np.float64]
Frames = NDArray[np.uint8]  # [N, H, W, 3] RGB, unless a comment says otherwise
