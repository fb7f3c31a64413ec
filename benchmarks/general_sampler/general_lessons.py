"""What the general sampler learns from in a step: fresh crops, spoiled anew, and what a frozen ImageNet network says.

There are no labels by hand. Known of each frame:

- what is left of it: how far the teacher says the same about the spoiled frame as about the clean one (overlap of its
  probabilities, likeness of its features), times what a transition leaves; nothing for plain and written frames, all
  where bars were put around it;
- how sure the teacher is: its highest probability for the frame as it is;
- which frames resemble each other: the teacher's features.

Everything happens on the device. Frames are made in the size that the teacher sees, and the student sees the same ones
smaller, as it will see those of videos.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet50

from benchmarks.general_sampler.general_defects import KINDS, as_filmed, draw_kinds, spoil
from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from sosampler.classifiers.weights import load_weights, read_state

_SAYS_NOTHING = ("flat", "title")  # kinds of which a teacher that knows objects has nothing to say
_KNOWN = (*_SAYS_NOTHING, "bars")  # kinds of which what is left needs no teacher
_LEAST_AREA = 0.45  # of a picture in a cut-out


class Lesson(NamedTuple):
    """Frames of one step: first those to which nothing happened, then those that were spoiled."""

    frames: Tensor  # [F, 3, S, S] in 0..1
    retained: Tensor  # [F]
    sure: Tensor  # [F]
    taught: Tensor  # [F, 2048], the teacher's features, of length 1
    asked: Tensor  # places of the frames of which `sure` and `taught` mean something
    kinds: Tensor  # [F], places in KINDS; -1 for frames to which nothing happened; on the CPU


class Teacher(nn.Module):
    """ImageNet's ResNet-50 with its stride on the first convolution of a block: probabilities and features.

    On a GPU its convolutions run in bfloat16.
    """

    def __init__(self, weights: Path) -> None:
        super().__init__()
        self.net = resnet50()
        for layer in (self.net.layer2, self.net.layer3, self.net.layer4):
            layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
        load_weights(self.net, read_state(weights), where=str(weights))
        self.eval().requires_grad_(False)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        net = self.net
        with torch.autocast(frames.device.type, torch.bfloat16, enabled=frames.is_cuda):
            x = net.maxpool(net.relu(net.bn1(net.conv1(frames))))
            x = net.layer4(net.layer3(net.layer2(net.layer1(x))))
        features = x.float().mean((2, 3))
        return net.fc(features).softmax(-1), features


class Lessons:
    """Makes them of some pictures.

    Args:
        pictures, masks: uint8 [P, 3, S, S] and [M, S, S] on the device.
        teacher: on the device.
        teacher_size, size: pixels that teacher and student see.
        spoiled: times that each picture is spoiled.
        weights: of some kinds, where they are not to be those of KINDS.
    """

    def __init__(
        self,
        pictures: Tensor,
        masks: Tensor,
        teacher: Teacher,
        *,
        teacher_size: int,
        size: int,
        spoiled: int,
        weights: dict[str, float],
    ) -> None:
        self.pictures, self.teacher = pictures, teacher
        self.masks = smaller(masks[:, None].float() / 255, teacher_size)[:, 0]
        self.teacher_size, self.size, self.spoiled, self.weights = teacher_size, size, spoiled, weights

    @torch.no_grad()
    def make(self, places: Tensor) -> Lesson:
        """A lesson of these pictures, each as it is and spoiled some times."""
        count, device = len(places), self.pictures.device
        clean = coloured(cut_out(self.pictures[places.to(device, non_blocking=True)].float() / 255, self.teacher_size))
        again = clean.repeat(self.spoiled, 1, 1, 1)
        # Each goes over to another one of the batch, never to itself.
        moved = torch.cat([clean.roll(int(by), 0) for by in torch.randint(1, max(2, count), (self.spoiled,))])
        masks = self.masks[torch.randint(len(self.masks), (len(again),), device=device)]
        kinds = draw_kinds(len(again), self.weights)
        spoiled, left = spoil(again, moved, masks, kinds)
        spoiled = as_filmed(spoiled)

        probs, features = self.teacher(normalised(torch.cat([clean, spoiled])))
        taught = F.normalize(features, dim=1)
        before, after = (part.split([count, len(again)]) for part in (probs, taught))
        overlap = (before[1] * before[0].repeat(self.spoiled, 1)).sqrt().sum(1)
        alike = ((after[1] * after[0].repeat(self.spoiled, 1)).sum(1) * 2 - 1).clamp(0, 1)
        known = _among(kinds, _KNOWN).to(device, non_blocking=True)
        retained = torch.where(known, left, (left * (overlap * alike).sqrt()).clamp(0, 1))
        asked = torch.cat([torch.ones(count, dtype=torch.bool), ~_among(kinds, _SAYS_NOTHING)]).nonzero()[:, 0]
        return Lesson(
            frames=smaller(torch.cat([as_filmed(clean), spoiled]), self.size),
            retained=torch.cat([torch.ones(count, device=device), retained]),
            sure=probs.amax(1),
            taught=taught,
            asked=asked.to(device, non_blocking=True),
            kinds=torch.cat([torch.full((count,), -1), kinds]),
        )


def _among(kinds: Tensor, names: tuple[str, ...]) -> Tensor:
    return torch.isin(kinds, torch.tensor([list(KINDS).index(name) for name in names]))


@cache
def _colours_of_imagenet(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [3, 1, 1]; brought to a device once, because that stops it."""
    mean, std = (torch.tensor(value, device=device).view(3, 1, 1) for value in (IMAGENET_MEAN, IMAGENET_STD))
    return mean, std


def normalised(frames: Tensor) -> Tensor:
    mean, std = _colours_of_imagenet(frames.device)
    return ((frames - mean) / std).contiguous(memory_format=torch.channels_last)


def smaller(pictures: Tensor, size: int) -> Tensor:
    return F.interpolate(pictures, size=(size, size), mode="bilinear", antialias=True)


def cut_out(pictures: Tensor, size: int) -> Tensor:
    """A random square of a good part of each picture, half of them mirrored: [B, 3, size, size]."""
    count, device = len(pictures), pictures.device
    scale = (_LEAST_AREA + (1 - _LEAST_AREA) * torch.rand(count, device=device)).sqrt()
    mirror = torch.where(torch.rand(count, device=device) < 0.5, -1.0, 1.0)
    theta = torch.zeros(count, 2, 3, device=device)
    theta[:, 0, 0], theta[:, 1, 1] = scale * mirror, scale
    theta[:, 0, 2], theta[:, 1, 2] = ((2 * torch.rand(2, count, device=device) - 1) * (1 - scale)).unbind()
    grid = F.affine_grid(theta, [count, 3, size, size], align_corners=False)
    return F.grid_sample(pictures, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def coloured(pictures: Tensor) -> Tensor:
    """Other light, contrast and saturation, within what cameras do."""
    light, contrast, saturation = (0.8 + 0.4 * torch.rand(3, len(pictures), 1, 1, 1, device=pictures.device)).unbind()
    grey = pictures.mean(1, keepdim=True)
    changed = torch.lerp(grey.expand_as(pictures), pictures, saturation.expand_as(pictures))
    middle = changed.mean((1, 2, 3), keepdim=True)
    return ((middle + (changed - middle) * contrast) * light).clamp(0, 1)
