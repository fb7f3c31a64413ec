"""Frames that nobody wants to be chosen, made from good ones on the device: blurred, dark, written on, half way over.

Pictures are float [B, 3, S, S] in 0..1. Everything is drawn from torch's own generator, so a seed decides it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# What may happen to a frame, and how often among those to which something happens.
KINDS = {
    "none": 0.08,
    "caption": 0.06,
    "noise": 0.03,
    "motion": 0.16,
    "defocus": 0.16,
    "coarse": 0.04,
    "compressed": 0.06,
    "dark": 0.09,
    "bright": 0.04,
    "flat": 0.05,
    "title": 0.10,
    "fade": 0.09,
    "wipe": 0.04,
}
_REACH = 20  # pixels to each side of a blur's kernel


def spoil(clean: Tensor, others: Tensor, masks: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Each picture with its own defect, and what that defect leaves of its worth by itself: [B, 3, S, S], [B] in 0..1.

    Args:
        clean: pictures.
        others: what a transition goes over to.
        masks: written words [B, S, S].
        kinds: [B], places in KINDS.
    """
    spoiled, left = clean.clone(), torch.ones(len(clean), device=clean.device)
    for place, name in enumerate(KINDS):
        rows = (kinds == place).nonzero()[:, 0]
        if len(rows) and name in _MAKERS:
            made, worth = _MAKERS[name](clean[rows], others[rows], masks[rows])
            spoiled[rows] = made
            left[rows] = worth
    return spoiled.clamp(0, 1), left


def draw_kinds(count: int, device: torch.device) -> Tensor:
    weights = torch.tensor(list(KINDS.values()), device=device)
    return torch.multinomial(weights, count, replacement=True)


def as_filmed(pictures: Tensor) -> Tensor:
    """A little noise and compression, as every video has."""
    strength = torch.rand(len(pictures), 1, 1, 1, device=pictures.device)
    noisy = pictures + 0.02 * strength * torch.randn_like(pictures)
    stored = compress(noisy, _uniform(noisy, 0.005, 0.06))
    keep = torch.rand(len(pictures), 1, 1, 1, device=pictures.device) < 0.5
    return torch.where(keep, pictures, stored).clamp(0, 1)


# ---- blurs


def convolve(pictures: Tensor, kernels: Tensor) -> Tensor:
    """Each picture with its own kernel [B, K, K]."""
    reach = kernels.shape[-1] // 2
    padded = F.pad(pictures, (reach,) * 4, mode="reflect")
    size = padded.shape[-2:]
    # By Fourier transforms: kernels are large, and there are as many as pictures.
    spread = torch.fft.irfft2(torch.fft.rfft2(padded) * torch.fft.rfft2(kernels, s=size)[:, None], s=size)
    return spread[..., 2 * reach :, 2 * reach :]


def motion_kernels(lengths: Tensor, angles: Tensor) -> Tensor:
    """Lines [B, K, K] of these lengths in pixels."""
    down, right = _grid(lengths)
    turn = angles[:, None, None]
    along = right * turn.cos() + down * turn.sin()
    across = down * turn.cos() - right * turn.sin()
    line = torch.sigmoid(4 * (lengths[:, None, None] / 2 - along.abs())) * (-across.square() * 2).exp()
    return line / line.sum((1, 2), keepdim=True)


def disc_kernels(radii: Tensor) -> Tensor:
    """Discs [B, K, K] of these radii in pixels, as a lens out of focus has them."""
    down, right = _grid(radii)
    disc = torch.sigmoid(3 * (radii[:, None, None] - torch.hypot(down, right)))
    return disc / disc.sum((1, 2), keepdim=True)


def _grid(like: Tensor) -> tuple[Tensor, Tensor]:
    line = torch.arange(-_REACH, _REACH + 1, device=like.device, dtype=like.dtype)
    down, right = torch.meshgrid(line, line, indexing="ij")
    return down[None], right[None]


def _motion(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    lengths = _log_uniform(clean, 3, 2 * _REACH).view(-1)
    angles = torch.rand_like(lengths) * math.pi
    return convolve(clean, motion_kernels(lengths, angles)), _all(clean, 1.0)


def _defocus(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    return convolve(clean, disc_kernels(_log_uniform(clean, 1, 14).view(-1))), _all(clean, 1.0)


def _coarse(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    size = int(torch.randint(10, 48, ()))
    small = F.interpolate(clean, size=size, mode="bilinear", antialias=True)
    return F.interpolate(small, size=clean.shape[-1], mode="bicubic"), _all(clean, 1.0)


def _noise(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    return clean + _uniform(clean, 0.03, 0.35) * torch.randn_like(clean), _all(clean, 1.0)


# ---- compression


def compress(pictures: Tensor, step: Tensor) -> Tensor:
    """Blocks of 8 x 8 as JPEG has them: coefficients in steps that grow with the frequency; step [B, 1, 1, 1]."""
    batch, channels, height, width = pictures.shape
    blocks = pictures.view(batch, channels, height // 8, 8, width // 8, 8).permute(0, 1, 2, 4, 3, 5)
    basis = _cosines(pictures)
    coefficients = basis @ blocks @ basis.T
    order = torch.arange(8, device=pictures.device)
    steps = step[..., None, None] * (1 + 0.6 * (order[:, None] + order[None]))
    rounded = (coefficients / steps).round() * steps
    back = basis.T @ rounded @ basis
    return back.permute(0, 1, 2, 4, 3, 5).reshape(pictures.shape).clamp(0, 1)


def _cosines(like: Tensor) -> Tensor:
    places = torch.arange(8, device=like.device, dtype=like.dtype)
    basis = (math.pi / 8 * (places[None] + 0.5) * places[:, None]).cos() / 2
    basis[0] /= math.sqrt(2)
    return basis


def _compressed(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    return compress(clean, _log_uniform(clean, 0.1, 1.5)), _all(clean, 1.0)


# ---- light


def _dark(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    black = torch.rand(len(clean), 1, 1, 1, device=clean.device) < 0.35
    light = torch.where(black, 0.0, _log_uniform(clean, 0.03, 0.6))
    return light * clean + 0.02 * _uniform(clean, 0, 1) + 0.01 * torch.randn_like(clean), _all(clean, 1.0)


def _bright(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    share = _uniform(clean, 0.3, 1.2).clamp_max(1)
    return clean * (1 - share) + share, _all(clean, 1.0)


def plain(like: Tensor) -> Tensor:
    """One colour, or one that runs into another."""
    first, second = (torch.rand(len(like), 3, 1, 1, device=like.device) for _ in range(2))
    first = torch.where(torch.rand_like(first[:, :1]) < 0.4, first.mean(1, keepdim=True).round(), first)
    one = torch.rand_like(first[:, :1]) < 0.5
    return torch.lerp(first, torch.where(one, first, second), _ramp(like))


def _flat(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    return plain(clean) + 0.03 * _uniform(clean, 0, 1) * torch.randn_like(clean), _all(clean, 0.0)


# ---- words


def _title(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    radii = _uniform(clean, 6, 14).view(-1)
    shadow = convolve(clean, disc_kernels(radii)) * _uniform(clean, 0.1, 0.6)
    behind = torch.where(torch.rand(len(clean), 1, 1, 1, device=clean.device) < 0.75, plain(clean), shadow)
    return _written(behind, masks), _all(clean, 0.0)


def _caption(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """A strip of words above or below; what is shown stays what it is."""
    size = clean.shape[-1]
    strip = F.interpolate(masks[:, None], size=(size // 4, size), mode="bilinear", antialias=True)
    below = torch.rand(len(clean), 1, 1, 1, device=clean.device) < 0.75
    empty = torch.zeros(len(clean), 1, size - size // 4, size, device=clean.device)
    placed = torch.where(below, torch.cat([empty, strip], 2), torch.cat([strip, empty], 2))
    return _written(clean, placed[:, 0]), _all(clean, 1.0)


def _written(behind: Tensor, masks: Tensor) -> Tensor:
    """Words in a colour that can be told from what is behind them."""
    average = behind.mean((1, 2, 3), keepdim=True)
    colour = torch.rand(len(behind), 3, 1, 1, device=behind.device) * 0.35
    colour = torch.where(average < 0.55, 1 - colour, colour)
    return torch.lerp(behind, colour.expand_as(behind), masks[:, None].expand_as(behind))


# ---- from one shot to the next


def _fade(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    share = _uniform(clean, 0.08, 0.5)
    return torch.lerp(clean, others, share), (1 - 2 * share).view(-1)


def _wipe(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    share = _uniform(clean, 0.08, 0.5)
    ramp = _ramp(clean)
    # The line is moved until about the share lies beyond it.
    ordered = ramp.flatten(1).sort(1).values
    place = (share.view(-1, 1) * (ordered.shape[1] - 1)).long()
    border = ordered.gather(1, place)
    covered = torch.sigmoid((border.view(-1, 1, 1, 1) - ramp) * 60)
    found = covered.mean((1, 2, 3))
    return torch.lerp(clean, others, covered.expand_as(clean)), (1 - 2 * torch.minimum(found, 1 - found)).clamp_min(0)


# ---- drawing


def _ramp(like: Tensor) -> Tensor:
    """From 0 to 1 across the picture, in any direction: [B, 1, S, S]."""
    size = like.shape[-1]
    line = torch.linspace(-1, 1, size, device=like.device)
    angle = torch.rand(len(like), 1, 1, device=like.device) * 2 * math.pi
    slope = line[None, None] * angle.cos() + line[None, :, None] * angle.sin()
    low, high = slope.amin((1, 2), keepdim=True), slope.amax((1, 2), keepdim=True)
    return ((slope - low) / (high - low))[:, None]


def _uniform(like: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.rand(len(like), 1, 1, 1, device=like.device)


def _log_uniform(like: Tensor, low: float, high: float) -> Tensor:
    return _uniform(like, math.log(low), math.log(high)).exp()


def _all(like: Tensor, value: float) -> Tensor:
    return torch.full((len(like),), value, device=like.device)


_MAKERS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "caption": _caption,
    "noise": _noise,
    "motion": _motion,
    "defocus": _defocus,
    "coarse": _coarse,
    "compressed": _compressed,
    "dark": _dark,
    "bright": _bright,
    "flat": _flat,
    "title": _title,
    "fade": _fade,
    "wipe": _wipe,
}
