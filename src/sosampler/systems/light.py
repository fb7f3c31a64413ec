"""The light network of systems that glance at frames before they look: MobileNetV2 at a small size."""

from __future__ import annotations

from pathlib import Path

import torch

from sosampler.samplers.backbones import MOBILENET, load_backbone_weights
from sosampler.samplers.sosampler import SOSampler

LIGHT_SIZE = 128  # pixels, as samplers see frames
_SEED = 0


def light_network(weights: str | Path) -> SOSampler:
    """MobileNetV2 without shift, frozen; the same weights always give the same fingerprint.

    It has the form of a sampler because features of these are kept in banks; nobody asks for its score.

    Args:
        weights: of the backbone: a safetensors file with torchvision's or timm's names, or "pretrained".
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_SEED)  # the head that is not used is part of the fingerprint
        network = SOSampler(backbone=MOBILENET, shift=0, input_size=LIGHT_SIZE)
    load_backbone_weights(network.backbone, weights)
    return network.freeze()
