"""A sampler as one network without Python around it: uint8 frames of its input size in, all outputs out."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sosampler.samplers.onnx_sampler import INPUT, OUTPUTS
from sosampler.samplers.sosampler import SOSampler


class DeployedSampler(nn.Module):
    """Normalises and scores. Frames come resized and cropped, because that is cheaper where they are decoded."""

    def __init__(self, sampler: SOSampler) -> None:
        super().__init__()
        self.sampler = sampler
        preprocessing = sampler.preprocessing
        self.register_buffer("pixel_mean", torch.tensor(preprocessing.mean).view(3, 1, 1))
        self.register_buffer("pixel_std", torch.tensor(preprocessing.std).view(3, 1, 1))

    def forward(self, frames: Tensor) -> tuple[Tensor, ...]:
        """uint8 [B, T, 3, h, w] -> those of `output_names`, in that order."""
        said = self.sampler((frames.float() / 255 - self.pixel_mean) / self.pixel_std)
        # Two outputs may be one tensor, which graphs cannot name twice.
        scores, importance = said.scores.clone(), said.importance.clone()
        if said.class_logits is None:
            return scores, importance, said.features
        return scores, importance, said.class_logits, said.features


def output_names(sampler: SOSampler) -> list[str]:
    return [name for name in OUTPUTS if name != "class_logits" or sampler.class_head is not None]


def on_cpu(sampler: SOSampler, *, half: bool = False) -> SOSampler:
    """A frozen copy in float32; `half` rounds its weights to what half precision can hold.

    Only weights of convolutions and linear layers are rounded: the rest is small, and norms need their range.
    """
    copied: SOSampler = copy.deepcopy(sampler).cpu().float().freeze()
    copied.precision = "float32"
    if half:
        for parameter in copied.parameters():
            if parameter.ndim > 1:
                parameter.copy_(_rounded(parameter))
    return copied


def _rounded(weights: Tensor) -> Tensor:
    """To half precision and back; what is too large for it stays as it is."""
    rounded = weights.half().float()
    return torch.where(rounded.isfinite(), rounded, weights)


def trace(sampler: SOSampler) -> ExportedProgram:
    """The network as a graph for any number of videos and of candidates. The sampler is one of `on_cpu`."""
    size = sampler.input_size
    # Neither number is one, which a graph would take for a constant.
    example = torch.zeros(2, 3, 3, size, size, dtype=torch.uint8)
    free = {INPUT: {0: Dim("batch", min=1), 1: Dim("candidates", min=1)}}
    with torch.no_grad():
        program: ExportedProgram = torch.export.export(
            DeployedSampler(sampler).eval(), (example,), dynamic_shapes=free, strict=False
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # names files of the machine that exports
    return program


def trial_frames(sampler: SOSampler, videos: int, candidates: int) -> Tensor:
    """uint8 [B, T, 3, h, w] on which an exported network is compared with its sampler, the same every time."""
    generator = torch.Generator().manual_seed(videos * 1000 + candidates)
    size = sampler.input_size
    # Coarse pictures: noise of single pixels looks alike to a network, and so would all scores.
    coarse = torch.rand(videos * candidates, 3, 8, 8, generator=generator) * 255
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    return smooth.round().byte().unflatten(0, (videos, candidates))


def expected(sampler: SOSampler, frames: Tensor) -> dict[str, Any]:
    """What the sampler itself says about frames, by output name, as NumPy arrays."""
    said = sampler.look(frames)._asdict()
    return {name: said[name].numpy() for name in output_names(sampler)}
