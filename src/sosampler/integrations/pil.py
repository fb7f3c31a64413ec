"""Chosen frames as Pillow images, and selection from Pillow images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from sosampler._util.validation import check_int
from sosampler.errors import InvalidArgument
from sosampler.inference.options import DEFAULT_NUM_FRAMES, DEFAULT_POLICY
from sosampler.inference.select import select
from sosampler.inference.selection import Selection
from sosampler.integrations.frame_times import decoded
from sosampler.policies.base import choose_one
from sosampler.policies.registry import get_policy


def to_pil(selection: Selection) -> list[Image.Image]:
    """Return the frames in time order. Each image's `info` has its "frame_index" and "pts_seconds"."""
    images = []
    for frame, index, seconds in zip(
        decoded(selection), selection.frame_indices.tolist(), selection.pts_seconds.tolist(), strict=True
    ):
        image = Image.fromarray(frame)
        image.info.update(frame_index=index, pts_seconds=seconds)
        images.append(image)
    return images


def select_pil(source: Any, num_frames: int | None = None, **options: Any) -> list[Image.Image]:
    """Run `select` and return the chosen frames as RGB images; `options` are those of `select`.

    `source` may also be a list of Pillow images, the frames of a video in time order. Then the chosen images are
    returned themselves, all of them where there are no more; `options` are `policy` and `seed`.

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
    for position, image in enumerate(images):
        if not isinstance(image, Image.Image):
            raise InvalidArgument(f"item {position} is a {type(image).__name__}; give Pillow images, or one video")
    if not images:
        raise InvalidArgument("an empty list of images was given; give the frames of a video in time order")
    chosen_policy = get_policy(DEFAULT_POLICY if policy is None else policy)
    if chosen_policy.candidate_mode:
        raise InvalidArgument(
            f"policy {chosen_policy.name!r} needs a video, for its {chosen_policy.candidate_mode}s; give one, or take "
            "another policy"
        )
    wanted = DEFAULT_NUM_FRAMES if num_frames is None else check_int("num_frames", num_frames)
    check_int("seed", seed, at_least=0)
    if wanted >= len(images) or chosen_policy.name == "all":
        return list(images)
    frames = None
    if chosen_policy.needs_frames:
        # Policies compare frames of one size; the returned images keep theirs.
        size = images[0].size
        frames = np.stack([np.asarray(image.convert("RGB").resize(size)) for image in images])  # [T, H, W, 3] uint8
    choice = choose_one(chosen_policy, len(images), wanted, frames, seed=seed)
    return [images[position] for position in choice.positions]
