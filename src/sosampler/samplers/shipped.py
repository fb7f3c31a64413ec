"""The general sampler, whose network lies in the package: it needs no training and no torch.

The network (MobileNetV2, run by onnxruntime) says of every frame how much of its content is left (black, blurred and
written frames and those between two shots show little) and gives features by which frames are compared. The choice is
that of `policies.typical`.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from sosampler.errors import SosamplerError
from sosampler.policies.typical import Numbers, typical_order
from sosampler.samplers.light_scoring import sigmoid
from sosampler.samplers.onnx_sampler import OnnxSampler
from sosampler.samplers.policy import lock_of
from sosampler.video.reader import Frames
from sosampler.video.timeline import Indices

FOLDER = Path(__file__).parent / "general"

# Chosen on pictures and clips that were held out of its training (benchmarks/general_sampler.json).
CHOICE: dict[str, float] = {
    "clearness": 0.05,
    "sharpness": 4.0,
    "movement": 8.0,
    "most_movement": 0.1,
    "redundancy": 0.5,
    "alike": 0.7,
}


@lru_cache(maxsize=1)
def general_sampler() -> OnnxSampler:
    """Read once a process."""
    return OnnxSampler.from_pretrained(FOLDER)


def general_order(frames: Frames, num_frames: int) -> tuple[Indices, Numbers]:
    """Candidates of one video, uint8 [T, H, W, 3] -> N of them in the order of choice, and the value of each [T]."""
    sampler = general_sampler()
    with lock_of(sampler):
        said = sampler.look(frames.transpose(0, 3, 1, 2)[None])
    quality = sigmoid(said.scores[0].astype(np.float64))
    if not (np.isfinite(quality).all() and np.isfinite(said.features).all()):
        raise SosamplerError("the general sampler gives scores that are no numbers; install sosampler again")
    return typical_order(quality, said.features[0], num_frames, **CHOICE)
