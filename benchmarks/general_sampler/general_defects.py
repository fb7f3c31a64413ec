"""Frames that should not be chosen, made from good ones on the device: blurred, dark, written on, half way over.

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
    "caption": 0.05,
    "bars": 0.05,
    "noise": 0.03,
    "motion": 0.13,
    "defocus": 0.13,
    "coarse": 0.03,
    "compressed": 0.05,
    "dark": 0.07,
    "bright": 0.03,
    "flat": 0.04,
    "title": 0.08,
    "fade": 0.16,
    "wipe": 0.14,
}
_REACH = 25  # pixels to each side of a blur's kernel


def spoil(clean: Tensor, others: Tensor, masks: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Each picture with its own defect, and what that defect leaves of its worth by itself: [B, 3, S, S], [B] in 0..1.

    Args:
        clean: pictures.
        others: what a transition goes over to.
        masks: written words [B, S, S].
        kinds: [B], places in KINDS, on the CPU, so that counting them waits for no device.
    """
    spoiled, left = clean.clone(), torch.ones(len(clean), device=clean.device)
    for place, name in enumerate(KINDS):
        rows = (kinds == place).nonzero()[:, 0].to(clean.device, non_blocking=True)
        if len(rows) and name in _MAKERS:
            made, worth = _MAKERS[name](clean[rows], others[rows], masks[rows])
            spoiled[rows] = made
            left[rows] = worth
    return spoiled.clamp(0, 1), left


def draw_kinds(count: int, changed: dict[str, float] | None = None) -> Tensor:
    """Places in KINDS [count], on the CPU; `changed` gives some kinds another weight."""
    weights = torch.tensor(list((KINDS | (changed or {})).values()))
    return torch.multinomial(weights, count, replacement=True)


def as_filmed(pictures: Tensor) -> Tensor:
    """A little noise and compression, as every video has."""
    strength = torch.rand(len(pictures), 1, 1, 1, device=pictures.device)
    noisy = pictures + 0.02 * strength * torch.randn_like(pictures)
    stored = compress(noisy, _uniform(noisy, 0.005, 0.06))
    keep = _chance(pictures, 0.5)
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
    return convolve(clean, disc_kernels(_log_uniform(clean, 1, 17).view(-1))), _all(clean, 1.0)


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
    black = _chance(clean, 0.35)
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
    behind = torch.where(_chance(clean, 0.75), plain(clean), shadow)
    return _written(behind, masks), _all(clean, 0.0)


def _caption(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """A strip of words above or below; what is shown stays what it is."""
    size = clean.shape[-1]
    strip = F.interpolate(masks[:, None], size=(size // 4, size), mode="bilinear", antialias=True)
    below = _chance(clean, 0.75)
    empty = torch.zeros(len(clean), 1, size - size // 4, size, device=clean.device)
    placed = torch.where(below, torch.cat([empty, strip], 2), torch.cat([strip, empty], 2))
    return _written(clean, placed[:, 0]), _all(clean, 1.0)


def _written(behind: Tensor, masks: Tensor) -> Tensor:
    """Words in a colour that differs from what is behind them."""
    average = behind.mean((1, 2, 3), keepdim=True)
    colour = torch.rand(len(behind), 3, 1, 1, device=behind.device) * 0.35
    colour = torch.where(average < 0.55, 1 - colour, colour)
    return torch.lerp(behind, colour.expand_as(behind), masks[:, None].expand_as(behind))


def _bars(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Bars at two sides, as around films of another shape: long straight edges with nothing wrong about them."""
    blurred = convolve(clean, disc_kernels(_uniform(clean, 8, 16).view(-1)))
    filling = torch.rand(len(clean), 1, 1, 1, device=clean.device)
    behind = torch.where(filling < 0.6, torch.zeros_like(clean), torch.where(filling < 0.75, plain(clean), blurred))
    line = torch.linspace(-1, 1, clean.shape[-1], device=clean.device).abs()
    upright = _chance(clean, 0.5)
    from_middle = torch.where(upright, line[:, None], line[None])
    return torch.where(from_middle > _uniform(clean, 0.7, 0.95), behind, clean), _all(clean, 1.0)


# ---- from one shot to the next


def worth_of_mixture(lesser: Tensor) -> Tensor:
    """What is left where another picture has this share, at most a half: a little of it is already a fault."""
    return (1 - 2 * lesser).clamp(0, 1).square()


def _fade(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Over to another picture, or to black or white: these two may have nearly all of the frame already."""
    plainly = _chance(clean, 0.3)
    level = _chance(clean, 0.3).to(clean.dtype)  # black more often than white
    share = torch.where(plainly, _uniform(clean, 0.1, 0.95), _uniform(clean, 0.05, 0.5))
    mixed = torch.lerp(clean, torch.where(plainly, level, others), share)
    return mixed, torch.where(plainly, 1 - share, worth_of_mixture(share)).view(-1)


def _wipe(clean: Tensor, others: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Another picture beyond a border of some shape, which may be soft or drawn as a line; or one pushes the other."""
    share = _uniform(clean, 0.06, 0.5)
    field = _field(clean)
    # The border is moved until about the share lies beyond it.
    ordered = field.flatten(1).sort(1).values
    place = (share.view(-1, 1) * (ordered.shape[1] - 1)).long()
    beyond = ordered.gather(1, place).view(-1, 1, 1, 1) - field
    hard = _chance(clean, 0.7)
    covered = torch.where(hard, (beyond > 0).to(clean.dtype), torch.sigmoid(beyond * _log_uniform(clean, 12, 120)))
    mixed = torch.lerp(clean, others, covered.expand_as(clean))
    lined = _chance(clean, 0.2) & (beyond.abs() < _uniform(clean, 0.005, 0.03))
    mixed = torch.where(lined, torch.rand(len(clean), 3, 1, 1, device=clean.device).round(), mixed)
    found = covered.mean((1, 2, 3))
    pushed, moved = _push(clean, others, share.view(-1))
    pushes = _chance(clean, 0.12)
    lesser = torch.where(pushes.view(-1), moved, torch.minimum(found, 1 - found))
    return torch.where(pushes, pushed, mixed), worth_of_mixture(lesser)


def _push(clean: Tensor, others: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures that another one shoves out at one side, the same for all, and which share [B] it has then."""
    size, turn = clean.shape[-1], int(torch.randint(4, ()))
    offset = (shares * size).round().long()
    columns = torch.arange(size, device=clean.device)[None] + offset[:, None]  # of both side by side
    wide = torch.cat([torch.rot90(picture, turn, (2, 3)) for picture in (clean, others)], 3)
    made = wide.gather(3, columns[:, None, None].expand(-1, 3, size, -1))
    return torch.rot90(made, -turn, (2, 3)), offset / size


def _field(like: Tensor) -> Tensor:
    """What a wipe follows, from low to high: lines, two of them, blinds, rings or the hand of a clock: [B, 1, S, S]."""
    ramp = _ramp(like, upright=0.5)
    line = torch.linspace(-1, 1, like.shape[-1], device=like.device)
    down = line[:, None] - _uniform(like, -0.4, 0.4)
    right = line[None] - _uniform(like, -0.4, 0.4)
    blinds = (ramp * _uniform(like, 2, 7).floor()) % 1
    others = ((ramp - 0.5).abs(), blinds, torch.hypot(down, right), torch.atan2(down, right) / math.pi)
    field, drawn = ramp, _uniform(like, 0, 1)
    for bound, other in zip((0.4, 0.28, 0.2, 0.06), others, strict=True):
        field = torch.where(drawn < bound, other, field)
    return torch.where(_chance(like, 0.5), field, -field)


# ---- drawing


def _ramp(like: Tensor, upright: float = 0.0) -> Tensor:
    """From 0 to 1 across the picture, in any direction, or, so often, along one of its sides: [B, 1, S, S]."""
    size = like.shape[-1]
    line = torch.linspace(-1, 1, size, device=like.device)
    angle = torch.rand(len(like), 1, 1, device=like.device) * 2 * math.pi
    straight = (angle / (math.pi / 2)).round() * (math.pi / 2)
    angle = torch.where(_chance(like, upright).view(-1, 1, 1), straight, angle)
    slope = line[None, None] * angle.cos() + line[None, :, None] * angle.sin()
    low, high = slope.amin((1, 2), keepdim=True), slope.amax((1, 2), keepdim=True)
    return ((slope - low) / (high - low))[:, None]


def _chance(like: Tensor, share: float) -> Tensor:
    """True so often: [B, 1, 1, 1]."""
    return torch.rand(len(like), 1, 1, 1, device=like.device) < share


def _uniform(like: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.rand(len(like), 1, 1, 1, device=like.device)


def _log_uniform(like: Tensor, low: float, high: float) -> Tensor:
    return _uniform(like, math.log(low), math.log(high)).exp()


def _all(like: Tensor, value: float) -> Tensor:
    return torch.full((len(like),), value, device=like.device)


_MAKERS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "caption": _caption,
    "bars": _bars,
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
