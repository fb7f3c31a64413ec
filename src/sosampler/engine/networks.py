"""The networks of an engine: fused, channels last, in batches that suit the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.v2.functional import center_crop

from sosampler.classifiers.base import to_channels_last
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.classifiers.preprocessing import Preprocessing, check_frames
from sosampler.engine.fuse import fuse_network, replace_max_pools
from sosampler.engine.kernels.blocks import GPU_BACKENDS, SpaceToDepth, set_conv_backend, use_space_to_depth
from sosampler.engine.kernels.triton_kernels import centre_pixels, normalise, normalise_to_blocks
from sosampler.errors import InvalidArgument
from sosampler.samplers.sosampler import SOSampler

# Frames per forward pass. On the CPU few, so that a layer's values stay in the cache; a GPU only must not run out of
# memory.
_SAMPLER_FRAMES_ON_CPU, _CLASSIFIER_FRAMES_ON_CPU = 40, 24
_FRAMES_ON_GPU = 2048
RUNTIME_FRAMES = 16  # of OpenVINO and ONNX Runtime
# Bytes of frames at their original size, in the precision in which a GPU resizes them.
_PIXEL_BYTES_ON_GPU = 8 << 30


class _FastNetwork:
    """A fused copy of a network on a device; `conv_backend` of `CONV_BACKENDS`, or "inductor" for torch.compile."""

    def __init__(
        self, owner: SOSampler | PooledClassifier, device: torch.device, dtype: torch.dtype, conv_backend: str
    ) -> None:
        preprocessing = owner.preprocessing
        frames = torch.zeros(2, 3, *preprocessing.size).uniform_(-2, 2, generator=torch.Generator().manual_seed(0))
        example: tuple[Any, ...] = (frames, 2) if isinstance(owner, SOSampler) else (frames,)
        net, name = (owner.backbone, "the sampler") if isinstance(owner, SOSampler) else (owner.net, owner.name)
        net = fuse_network(float_copy(net), example, name=name, epilogues=conv_backend != "inductor")
        blocks = None
        if conv_backend in GPU_BACKENDS:
            replace_max_pools(net)
            blocks = use_space_to_depth(net)
        net = net.to(device, dtype)
        to_channels_last(net)
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
    """uint8 frames [F, 3, H, W] -> features [F, D] of a sampler's backbone, float32."""

    def __init__(self, sampler: SOSampler, device: torch.device, dtype: torch.dtype, conv_backend: str) -> None:
        super().__init__(sampler, device, dtype, conv_backend)
        self.reach = sampler.backbone.reach

    def __call__(self, frames: Tensor, num_frames: int) -> Tensor:
        """Compute features; each `num_frames` frames in a row are of one video."""
        count = num_frames if self.reach else 1  # neighbours must stay together
        size = max(1, self.max_frames(frames, _SAMPLER_FRAMES_ON_CPU) // count) * count
        parts = [self.net(self.inputs(part), count).float() for part in frames.split(size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class TorchClassifier(_FastNetwork):
    """uint8 frames [B, N, 3, H, W] -> probabilities [B, C] of a pooled classifier."""

    def __init__(
        self, classifier: PooledClassifier, device: torch.device, dtype: torch.dtype, conv_backend: str
    ) -> None:
        super().__init__(classifier, device, dtype, conv_backend)
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
        return self._pooled.activate(parts[0] if len(parts) == 1 else torch.cat(parts))


class RuntimeClassifier:
    """uint8 frames [B, N, 3, H, W] -> probabilities [B, C] of a pooled classifier whose network another runtime runs.

    `net` maps pixels uint8 [F, h, w * 3] to the network's output for F frames, float32. Resizing, layers after the pool
    and activation are the classifier's own, in torch and float32.
    """

    def __init__(self, classifier: PooledClassifier, net: Callable[[Tensor], Tensor]) -> None:
        self.inputs = InputMaker(classifier.preprocessing)
        self._net = net
        self._pooled = _replace_net(classifier, float_copy(classifier.net))

    def __call__(self, frames: Tensor) -> Tensor:
        flat = frames.flatten(0, 1)
        features = torch.cat([self._net(self.inputs.resized(part)) for part in flat.split(RUNTIME_FRAMES)])
        return self._pooled.activate(self._pooled.pool_logits(features.unflatten(0, frames.shape[:2])))


def float_copy(net: nn.Module) -> nn.Module:
    """Return a copy on the CPU in float32 and evaluation mode."""
    return copy.deepcopy(net).cpu().float().eval()


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


def can_be_fused(classifier: Any) -> TypeGuard[PooledClassifier]:
    """Return whether a classifier sees frames one by one, so that a faster network can replace its own."""
    return isinstance(classifier, PooledClassifier) and isinstance(classifier.preprocessing, Preprocessing)


# ---- inputs: decoded uint8 frames -> normalised, on the frames' own device, channels last

_CPU = torch.device("cpu")
_MIDDLE = 128  # pixel value
_ROW_UNIT = 8  # values in half precision: a GPU's fastest matrix products need rows that begin at 16 bytes


def channels_first(frames: Any) -> Tensor:
    """Return uint8 [B, T, H, W, 3] or [B, T, 3, H, W], numpy or torch, as a tensor [B, T, 3, H, W] without a copy."""
    if isinstance(frames, np.ndarray):
        if frames.dtype != np.uint8:
            raise InvalidArgument(f"frames are {frames.dtype} but must be uint8 in 0..255; do not normalise them")
        if not frames.flags.writeable or any(step < 0 for step in frames.strides):
            frames = frames.copy()  # torch cannot use such memory
        frames = torch.from_numpy(frames)
    if isinstance(frames, Tensor) and frames.ndim == 5 and frames.shape[4] == 3 and frames.shape[2] != 3:
        frames = frames.movedim(-1, -3)
    return check_frames(frames)


class InputMaker:
    """uint8 [F, 3, H, W] in any layout -> the network's input [F, 3, h, w] (or blocks) in channels-last memory.

    The CPU resizes uint8 exactly as `Preprocessing` does. A GPU resizes by two matrix products (an antialiased resize
    is linear in rows and in columns), which is 10 to 100 times faster than the general operator. In half precision they
    differ from it by a fraction of a pixel value; a network in float32 gets pixels that were resized in float32.
    """

    def __init__(
        self,
        preprocessing: Preprocessing,
        device: torch.device = _CPU,
        dtype: torch.dtype = torch.float32,
        blocks: SpaceToDepth | None = None,
    ) -> None:
        self.preprocessing, self.blocks = preprocessing, blocks
        self.device, self.dtype = device, dtype
        self.resize_type = torch.float32 if dtype == torch.float32 else torch.float16  # on a GPU
        # For values in 0..255, one entry for each channel of each pixel of a row: [w * 3].
        width = preprocessing.size[1]
        self._mean = (torch.tensor(preprocessing.mean) * 255).repeat(width).to(device)
        self._scale = (1 / (torch.tensor(preprocessing.std) * 255)).repeat(width).to(device)
        self._matrices: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def __call__(self, frames: Tensor) -> Tensor:
        return self.normalised(self.resized(frames))

    def resized(self, frames: Tensor) -> Tensor:
        """Resize uint8 [F, 3, H, W] -> pixel values [F, h, w * 3]: uint8 on the CPU, not yet rounded on a GPU."""
        if frames.device.type == "cpu":
            return self.preprocessing.resized(frames).permute(0, 2, 3, 1).flatten(2)
        return self.resized_by_matrices(frames)

    def resized_by_matrices(self, frames: Tensor) -> Tensor:
        """Resize as a GPU does: values are around zero, where float16 is finest, and rounded by `normalised`."""
        rows, columns, columns_of_pixels = self._resize_matrices(frames.shape[-2], frames.shape[-1])
        if frames.is_contiguous():  # planes: columns first, then the channels of each pixel together
            planes = self._centred(frames.flatten(0, 1)) @ columns  # [F * 3, H, w]
            small = torch.bmm(rows.expand(len(planes), -1, -1), planes)  # [F * 3, h, w]
            return small.unflatten(0, (-1, 3)).permute(0, 2, 3, 1).flatten(2)
        pixels = self._centred(frames.permute(0, 2, 3, 1).flatten(2))  # [F, H, W * 3 and a few zeros]
        return torch.bmm(rows.expand(len(pixels), -1, -1), pixels) @ columns_of_pixels  # [F, h, w * 3]

    def normalised(self, pixels: Tensor) -> Tensor:
        """Round and normalise pixel values [F, h, w * 3] -> [F, 3, h, w], or blocks."""
        if pixels.dtype == torch.uint8:
            output = torch.sub(pixels, self._mean).mul_(self._scale).to(self.dtype)
        elif self.blocks is not None:
            return normalise_to_blocks(pixels, self._mean, self._scale, self.dtype, self.blocks, offset=_MIDDLE)
        else:
            output = normalise(pixels, self._mean, self._scale, self.dtype, offset=_MIDDLE)
        return output.unflatten(2, (-1, 3)).permute(0, 3, 1, 2)

    def _resize_matrices(self, height: int, width: int) -> tuple[Tensor, ...]:
        """Return [h, H], [W, w] and the latter for rows of pixels [W * 3, w * 3], padded with zeros as `_centred`."""
        key = (height, width)
        if key not in self._matrices:
            rows, columns = resize_matrices(self.preprocessing, height, width)
            pixels = torch.kron(columns.T.contiguous(), torch.eye(3))
            padded = [F.pad(matrix, (0, 0, 0, _padded(len(matrix)) - len(matrix))) for matrix in (columns.T, pixels)]
            self._matrices[key] = tuple(matrix.to(self.device, self.resize_type) for matrix in (rows, *padded))
        return self._matrices[key]

    def _centred(self, rows: Tensor) -> Tensor:
        """Return uint8 [F, H, W] as values from -128 to 127, with zeros after each row up to a multiple of 8."""
        return centre_pixels(rows, _MIDDLE, _padded(rows.shape[-1]), self.resize_type)


def _padded(width: int) -> int:
    return -(-width // _ROW_UNIT) * _ROW_UNIT


def resize_matrices(preprocessing: Preprocessing, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return resize and centre crop of frames of this size as [h, H] and [w, W]: small = rows @ frame @ columns.T."""
    target = preprocessing.resize
    if isinstance(target, int):  # the short side; the other is rounded as torchvision does
        other = int(target * max(height, width) / min(height, width))
        target = (target, other) if height <= width else (other, target)
    rows, columns = (
        _resize_matrix(before, after, preprocessing.interpolation)
        for before, after in zip((height, width), target, strict=True)
    )
    probe = torch.arange(target[0] * target[1]).view(1, *target)
    inside = center_crop(probe, list(preprocessing.size))[0]  # which rows and columns the crop keeps
    return rows[inside[:, 0] // target[1]], columns[inside[0] % target[1]]


def _resize_matrix(before: int, after: int, mode: str) -> Tensor:
    """Return [after, before]: the output of torch's resize for unit vectors."""
    if before == after:
        return torch.eye(before)
    unit = torch.eye(before)[None, None]  # columns are unit vectors
    return F.interpolate(unit, size=(after, before), mode=mode, antialias=True, align_corners=False)[0, 0]
