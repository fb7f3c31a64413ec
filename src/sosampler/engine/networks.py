"""The networks of an engine: fused, channels last, in batches that suit the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sosampler.classifiers.outputs import activate
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.engine.fuse import fuse_network, replace_max_pools
from sosampler.engine.inputs import InputMaker
from sosampler.engine.kernels.blocks import GPU_BACKENDS, set_conv_backend, use_space_to_depth
from sosampler.samplers.sosampler import SOSampler

# Frames per forward pass. On the CPU few, so that a layer's values stay in the cache; a GPU only must not run out of
# memory.
_SAMPLER_FRAMES_ON_CPU, _CLASSIFIER_FRAMES_ON_CPU = 40, 24
_FRAMES_ON_GPU = 2048
# Bytes of frames at their original size, in the precision in which a GPU resizes them.
_PIXEL_BYTES_ON_GPU = 8 << 30


class _FastNetwork:
    """A fused copy of a network on a device, with its input."""

    def __init__(
        self,
        net: nn.Module,
        extra: tuple[Any, ...],  # arguments of its forward after the frames
        preprocessing: Preprocessing,
        device: torch.device,
        dtype: torch.dtype,
        conv_backend: str,
        name: str,
    ) -> None:
        frames = torch.zeros(2, 3, *preprocessing.size).uniform_(-2, 2, generator=torch.Generator().manual_seed(0))
        net = fuse_network(
            copy.deepcopy(net).cpu().float(), (frames, *extra), name=name, epilogues=conv_backend != "inductor"
        )
        blocks = None
        if conv_backend in GPU_BACKENDS:
            replace_max_pools(net)
            blocks = use_space_to_depth(net)
        net = net.to(device, dtype)
        for parameter in net.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        if conv_backend == "inductor":
            net = torch.compile(net, dynamic=False)
        else:
            set_conv_backend(net, conv_backend)
        self.net = net
        self.inputs = InputMaker(preprocessing, device, dtype, blocks)

    def max_frames(self, frames: Tensor, on_cpu: int) -> int:
        """Return how many of the frames [F, 3, H, W] one forward pass takes on their device."""
        if frames.device.type == "cpu":
            return on_cpu
        frame_bytes = 3 * int(frames.shape[-1] * frames.shape[-2]) * int(self.inputs.resize_type.itemsize)
        return max(1, min(_FRAMES_ON_GPU, _PIXEL_BYTES_ON_GPU // frame_bytes))


class TorchFeatures(_FastNetwork):
    """uint8 frames [F, 3, H, W] -> features [F, D] of a sampler's backbone, float32.

    `conv_backend` is one of `CONV_BACKENDS`, or "inductor" for torch.compile.
    """

    def __init__(self, sampler: SOSampler, device: torch.device, dtype: torch.dtype, conv_backend: str) -> None:
        super().__init__(sampler.backbone, (2,), sampler.preprocessing, device, dtype, conv_backend, name="the sampler")
        self.reach = sampler.backbone.reach

    def __call__(self, frames: Tensor, num_frames: int) -> Tensor:
        """Compute features; each `num_frames` frames in a row are of one video."""
        size = self.max_frames(frames, _SAMPLER_FRAMES_ON_CPU)
        if self.reach:  # neighbours must stay together
            size = max(1, size // num_frames) * num_frames
        count = num_frames if self.reach else 1
        parts = [self.net(self.inputs(part), count).float() for part in frames.split(size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class TorchClassifier(_FastNetwork):
    """uint8 frames [B, N, 3, H, W] -> probabilities [B, C] of a pooled classifier."""

    def __init__(
        self, classifier: PooledClassifier, device: torch.device, dtype: torch.dtype, conv_backend: str
    ) -> None:
        super().__init__(
            classifier.net, (), classifier.preprocessing, device, dtype, conv_backend, name=classifier.name
        )
        self.activation = classifier.activation
        self._pooled = _replace_net(classifier, self.net)

    def __call__(self, frames: Tensor) -> Tensor:
        num_frames = frames.shape[1]
        flat = frames.flatten(0, 1)
        size = max(1, self.max_frames(flat, _CLASSIFIER_FRAMES_ON_CPU) // num_frames) * num_frames
        parts = []
        for part in flat.split(size):
            clips = self.inputs(part).unflatten(0, (-1, num_frames))  # [b, N, 3, h, w]
            features = self._pooled.features(clips)
            # Logits are averaged in float32; a layer after the pool has the network's own precision.
            features = features.float() if self._pooled.pooling == "mean" else features
            parts.append(self._pooled.pool_logits(features).float())
        return activate(parts[0] if len(parts) == 1 else torch.cat(parts), self.activation)


class RuntimeClassifier:
    """uint8 frames [B, N, 3, H, W] -> probabilities [B, C] of a pooled classifier whose network another runtime runs.

    Args:
        classifier: resizing, layers after the pool and activation are its own, in torch and float32.
        net: pixels uint8 [F, h, w * 3] -> the network's output for F frames, float32.
        batch_frames: maximum number of frames per call of `net`.
    """

    def __init__(self, classifier: PooledClassifier, net: Callable[[Tensor], Tensor], *, batch_frames: int) -> None:
        self.inputs = InputMaker(classifier.preprocessing, torch.device("cpu"), torch.float32)
        self.activation = classifier.activation
        self._net = net
        self._pooled = _replace_net(classifier, copy.deepcopy(classifier.net).cpu().float().eval())
        self._batch_frames = batch_frames

    def __call__(self, frames: Tensor) -> Tensor:
        flat = frames.flatten(0, 1)
        features = torch.cat([self._net(self.inputs.resized(part)) for part in flat.split(self._batch_frames)])
        return activate(self._pooled.pool_logits(features.unflatten(0, frames.shape[:2])), self.activation)


def _replace_net(classifier: PooledClassifier, net: nn.Module) -> PooledClassifier:
    """Return the classifier around another network; the one given keeps its own."""
    other = copy.copy(classifier)
    other._modules = dict(classifier._modules)
    other.net = net
    return other


def copy_heads(sampler: SOSampler, device: torch.device) -> SOSampler:
    """Return a sampler on the device that has heads and scoring but no backbone."""
    heads: SOSampler = copy.copy(sampler)
    heads._modules = {name: copy.deepcopy(module) for name, module in sampler._modules.items() if name != "backbone"}
    heads.to(device).requires_grad_(False).eval()
    return heads


def can_be_fused(classifier: Any) -> bool:
    """Return whether a classifier sees frames one by one, so that a faster network can replace its own."""
    return isinstance(classifier, PooledClassifier) and isinstance(classifier.preprocessing, Preprocessing)
