"""What pytorchvideo's SlowOnly-50 and X3D-S give for fixed weights and clips, for the tests of our own.

pytorchvideo is no longer maintained, so its outputs are kept in pytorchvideo_outputs.npz, made in an environment of its
own with torch and pytorchvideo 0.1.5 by

    python -m tests.classifiers.pytorchvideo_outputs
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FILE = Path(__file__).with_suffix(".npz")
NUM_CLASSES = 11
# Frames, height, width. 193 to 224 pixels leave SlowOnly 7 places, one window; the second has two windows along time
# times two along the width.
SLOW_CLIPS = ((8, 193, 193), (9, 193, 240))
# 129 to 160 pixels leave X3D 5 places, one window; 182 is what the published figures are tested at.
X3D_CLIPS = ((13, 129, 129), (13, 182, 182), (15, 129, 200))


def fill(net: nn.Module) -> nn.Module:
    """Give every tensor values that depend on its name and shape alone, so that outputs tell clips apart."""
    state: dict[str, Tensor] = {}
    for name, tensor in net.state_dict().items():
        if not tensor.ndim:
            continue  # how many batches a norm has seen
        random = np.random.default_rng(zlib.crc32(name.encode()))
        shape, fan_in = tuple(tensor.shape), math.prod(tensor.shape[1:])
        if name.endswith("running_var"):
            values = random.uniform(0.5, 1.5, shape)
        elif name.endswith("weight") and tensor.ndim == 1:  # of a norm
            values = random.uniform(0.3, 0.7, shape)
        else:
            scale = 0.2 if tensor.ndim == 1 else math.sqrt((4 if tensor.ndim == 2 else 2) / fan_in)
            values = random.standard_normal(shape, dtype=np.float32) * scale
        state[name] = torch.from_numpy(np.asarray(values, dtype=np.float32))
    net.load_state_dict(state, strict=False)
    return net.eval()


def clips(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal(shape, dtype=np.float32))


def head_input() -> Tensor:
    """What enters X3D's head, [2, 192, 14, 6, 25]: each column of its own, so that the windows disagree."""
    return clips(2, 192, 1, 1, 25).mul(3).expand(-1, -1, 14, 6, -1)


def _make() -> dict[str, np.ndarray]:
    from pytorchvideo.models import hub

    outputs: dict[str, np.ndarray] = {}
    peers: dict[str, Any] = {"slow_r50": (hub.slow_r50, SLOW_CLIPS), "x3d_s": (hub.x3d_s, X3D_CLIPS)}
    for peer, (build, shapes) in peers.items():
        with torch.device("meta"):
            state = build(pretrained=False).state_dict()
        outputs[f"{peer}/names"] = np.array(list(state))
        outputs[f"{peer}/shapes"] = np.array([" ".join(map(str, tensor.shape)) for tensor in state.values()])
        net = fill(build(pretrained=False, model_num_class=NUM_CLASSES))
        for number, shape in enumerate(shapes):
            outputs[f"{peer}/{number}"] = net(clips(1, 3, *shape)).numpy()  # logits; of X3D probabilities
    logits: list[Tensor] = []
    net.blocks[5].proj.register_forward_hook(lambda layer, given, result: logits.append(result))
    outputs["x3d_s/head"] = net.blocks[5](head_input()).numpy()
    outputs["x3d_s/head_of_mean_logits"] = logits[0].mean(dim=(1, 2, 3)).softmax(1).numpy()
    return outputs


if __name__ == "__main__":
    with torch.no_grad():
        np.savez_compressed(FILE, **_make())
