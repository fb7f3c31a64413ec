"""Chosen frames as Pillow images, and a choice among Pillow images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from sosampler._util.validation import whole_number
from sosampler.errors import InvalidArgument
from sosampler.inference.options import USUAL_POLICY
from sosampler.inference.select import select
from sosampler.inference.selection import Selection
from sosampler.integrations.frame_times import decoded
from sosampler.policies.base import choose_one
from sosampler.policies.registry import get_policy


def to_pil(selection: Selection) -> list[Image.Image]:
    """The frames in time order. Each image's `info` holds its "frame_index" and "pts_seconds"."""
    images = []
    for frame, index, seconds in zip(
        decoded(selection), selection.frame_indices.tolist(), selection.pts_seconds.tolist(), strict=True
    ):
        image = Image.fromarray(frame)
        image.info.update(frame_index=index, pts_seconds=seconds)
        images.append(image)
    return images


def select_pil(source: Any, num_frames: int | None = None, **options: Any) -> list[Image.Image]:
    """`select`, with the chosen frames as RGB images; `options` are those of `select`.

    `source` may also be a list of Pillow images, the frames of a video in time order. Then the chosen ones of these
    very objects are returned, all of them where there are no more; `options` are `policy` and `seed`.

    >>> from sosampler.video.synthetic import numbered_video
    >>> [image.info["frame_index"] for image in select_pil(numbered_video(num_frames=90), 3, policy="uniform")]
    [15, 45, 75]
    """
    if isinstance(source, (list, tuple)):
        return _among(source, num_frames, **options)
    return to_pil(select(source, num_frames, **options))


def _among(
    images: Sequence[Any], num_frames: int | None, *, policy: Any = None, seed: int = 0, **unknown: Any
) -> list[Image.Image]:
    if unknown:
        raise InvalidArgument(
            f"{', '.join(unknown)}: does not apply to a list of images; among images, policy and seed can be given"
        )
    for place, image in enumerate(images):
        if not isinstance(image, Image.Image):
            raise InvalidArgument(f"item {place} is a {type(image).__name__}; give Pillow images, or one video")
    if not images:
        raise InvalidArgument("an empty list of images was given; give the frames of a video in time order")
    rule = get_policy(USUAL_POLICY if policy is None else policy)
    if rule.candidate_mode:
        raise InvalidArgument(
            f"policy {rule.name!r} needs a video, for its {rule.candidate_mode}s; give one, or take another policy"
        )
    wanted = 8 if num_frames is None else whole_number("num_frames", num_frames)
    whole_number("seed", seed, at_least=0)
    if wanted >= len(images) or rule.name == "all":
        return list(images)
    frames = None
    if rule.needs_frames:
        # Policies compare frames of one size; what is returned keeps its own.
        size = images[0].size
        frames = np.stack([np.asarray(image.convert("RGB").resize(size)) for image in images])  # [T, H, W, 3] uint8
    return [images[place] for place in choose_one(rule, len(images), wanted, frames, seed=seed).positions]
