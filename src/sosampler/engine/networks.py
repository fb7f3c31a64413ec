"""The two networks of an engine in torch: fused, channels last, in parts that suit the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sosampler.classifiers.outputs import activate
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.engine.fuse import fused, pool_fast
from sosampler.engine.inputs import InputMaker
from sosampler.engine.kernels.blocks import GPU_WAYS, Blocks, see_blocks, set_way
from sosampler.samplers.sosampler import SOSampler

# Frames that go through a network at once. On the CPU as few as keep a layer's values near the cores; a GPU is only
# kept from running out of memory.
_SAMPLER_FRAMES_ON_CPU, _CLASSIFIER_FRAMES_ON_CPU = 40, 24
_FRAMES_ON_GPU = 2048
# Bytes of frames in their stored size, in the precision in which a GPU resizes them.
_PIXEL_BYTES_ON_GPU = 8 << 30


def frames_at_once(frames: Tensor, on_cpu: int, inputs: InputMaker) -> int:
    """How many of frames [F, 3, H, W] go through a network with these inputs at once on their device."""
    if frames.device.type == "cpu":
        return on_cpu
    frame_bytes = 3 * int(frames.shape[-1] * frames.shape[-2]) * int(inputs.resize_type.itemsize)
    return max(1, min(_FRAMES_ON_GPU, _PIXEL_BYTES_ON_GPU // frame_bytes))


class TorchFeatures:
    """uint8 frames [F, 3, H, W] -> features [F, D] of a sampler's backbone, float32.

    `way` is how fused convolutions compute; "inductor" is torch.compile over plain ones.
    """

    def __init__(self, sampler: SOSampler, device: torch.device, dtype: torch.dtype, way: str) -> None:
        size = sampler.input_size
        example = (torch.zeros(2, 3, size, size).uniform_(-2, 2, generator=torch.Generator().manual_seed(0)), 2)
        backbone: nn.Module = copy.deepcopy(sampler.backbone).cpu().float()
        backbone = fused(backbone, example, name="the sampler", epilogues=way != "inductor")
        blocks = _suited(backbone, way)
        self.net = _settled(backbone, device, dtype, way)
        self.inputs = InputMaker(sampler.preprocessing, device, dtype, blocks)
        self.reach = sampler.backbone.reach

    def __call__(self, frames: Tensor, num_frames: int) -> Tensor:
        """`num_frames`: T, how many frames of each video follow each other."""
        at_once = frames_at_once(frames, _SAMPLER_FRAMES_ON_CPU, self.inputs)
        if self.reach:  # neighbours must stay together
            at_once = max(1, at_once // num_frames) * num_frames
        count = num_frames if self.reach else 1
        parts = [self.net(self.inputs(part), count).float() for part in frames.split(at_once)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class TorchClassifier:
    """uint8 frames [B, N, 3, H, W] -> probabilities [B, C] of a pooled classifier."""

    def __init__(self, classifier: PooledClassifier, device: torch.device, dtype: torch.dtype, way: str) -> None:
        self.name, self.activation = classifier.name, classifier.activation
        example = torch.zeros(2, 3, *classifier.preprocessing.size)
        example.uniform_(-2, 2, generator=torch.Generator().manual_seed(0))
        net = copy.deepcopy(classifier.net).cpu().float()
        net = fused(net, (example,), name=classifier.name, epilogues=way != "inductor")
        self.inputs = InputMaker(classifier.preprocessing, device, dtype, _suited(net, way))
        self.pooled = with_net(classifier, _settled(net, device, dtype, way))

    def __call__(self, frames: Tensor) -> Tensor:
        num_frames = frames.shape[1]
        flat = frames.flatten(0, 1)
        at_once = max(1, frames_at_once(flat, _CLASSIFIER_FRAMES_ON_CPU, self.inputs) // num_frames) * num_frames
        parts = []
        for part in flat.split(at_once):
            clips = self.inputs(part).unflatten(0, (-1, num_frames))  # [b, N, 3, h, w]
            rows = self.pooled.features(clips)
            # Logits are averaged in full; a layer behind the pool has the network's own precision.
            rows = rows.float() if self.pooled.pooling == "mean" else rows
            parts.append(self.pooled.pool_logits(rows).float())
        return activate(parts[0] if len(parts) == 1 else torch.cat(parts), self.activation)


class ForeignClassifier:
    """uint8 frames [B, N, 3, H, W] -> probabilities [B, C] of a pooled classifier whose network another runtime runs.

    Args:
        classifier: resizing, layers behind the pool and activation are its own, in torch and float32.
        net: grey levels uint8 [F, h, w * 3] -> what the network gives for F frames, float32.
        frames_at_once: so many frames go through `net` at most.
    """

    def __init__(self, classifier: PooledClassifier, net: Callable[[Tensor], Tensor], *, frames_at_once: int) -> None:
        self.inputs = InputMaker(classifier.preprocessing, torch.device("cpu"), torch.float32)
        self.activation = classifier.activation
        self._net = net
        self._pool = with_net(classifier, copy.deepcopy(classifier.net).cpu().float().eval())
        self._frames_at_once = frames_at_once

    def __call__(self, frames: Tensor) -> Tensor:
        flat = frames.flatten(0, 1)
        rows = torch.cat([self._net(self.inputs.resized(part)) for part in flat.split(self._frames_at_once)])
        return activate(self._pool.pool_logits(rows.unflatten(0, frames.shape[:2])), self.activation)


def with_net(classifier: PooledClassifier, net: nn.Module) -> PooledClassifier:
    """The same classifier around another network; the one given keeps its own."""
    other = copy.copy(classifier)
    other._modules = dict(classifier._modules)
    other.net = net
    return other


def heads_of(sampler: SOSampler, device: torch.device) -> SOSampler:
    """A sampler on the device that has heads and scoring but no backbone."""
    heads: SOSampler = copy.copy(sampler)
    heads._modules = {name: copy.deepcopy(module) for name, module in sampler._modules.items() if name != "backbone"}
    heads.to(device).requires_grad_(False).eval()
    return heads


def judged(heads: SOSampler, features: Tensor, num_frames: int) -> Tensor:
    """Features [B * T, D] -> scores [B, T], exactly as the sampler itself does."""
    return heads._judge(features.unflatten(0, (-1, num_frames)), None).scores.float()


def can_be_fused(classifier: Any) -> bool:
    """Pooled classifiers look at frames one by one, so that their network can be replaced by a faster one."""
    return isinstance(classifier, PooledClassifier) and isinstance(classifier.preprocessing, Preprocessing)


def _suited(net: nn.Module, way: str) -> Blocks | None:
    """Changes of a fused network, in place, that suit a GPU: how it begins, for which it tells, and how it pools."""
    if way not in GPU_WAYS:
        return None
    pool_fast(net)
    return see_blocks(net)


def _settled(net: nn.Module, device: torch.device, dtype: torch.dtype, way: str) -> nn.Module:
    """The network in its place and precision, channels last."""
    net = net.to(device, dtype)
    for parameter in net.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    if way == "inductor":
        compiled: nn.Module = torch.compile(net, dynamic=False)
        return compiled
    set_way(net, way)
    return net
