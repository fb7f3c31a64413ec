"""Frames from which an int8 network is calibrated: spread over videos, or over the training split of a bank."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sosampler._util.arrays import Frames
from sosampler._util.validation import check_int
from sosampler.bank.bank import Bank
from sosampler.errors import InvalidArgument, VideoError

log = logging.getLogger("sosampler")


def bank_frames(bank: str | Path | Bank, count: int) -> Iterator[Frames]:
    """Yield about `count` stored frames of the training videos, evenly; uint8 [1, k, H, W, 3], one video at a time."""
    train = (bank if isinstance(bank, Bank) else Bank.open(bank)).split("train")
    if not len(train):
        raise InvalidArgument(f"{train.path}: has no training videos; give a bank with a train split")
    indices, each = _shares(len(train), count)
    for index in indices:
        item = train[index]
        yield item.frames(item.uniform(min(each, len(item))))[None]


def video_frames(videos: Sequence[Any], count: int, size: int) -> Iterator[Frames]:
    """Yield about `count` frames of videos, evenly, with at most this short side; uint8 [1, k, H, W, 3], one at a time.

    Videos that cannot be read are named in the log; there must be one that can.
    """
    from sosampler.inference.select import select

    indices, each = _shares(len(videos), count)
    failed: VideoError | None = None
    seen = 0
    for index in indices:
        try:
            chosen = select(videos[index], each, policy="uniform", num_candidates=each, size=size, on_short="fewer")
        except VideoError as error:
            failed = error
            log.warning("left out: %s", error)
            continue
        assert chosen.frames is not None
        seen += 1
        yield chosen.frames[None]
    if failed is not None and not seen:
        raise failed


def _shares(num_videos: int, count: int) -> tuple[list[int], int]:
    """Return which videos are read, and how many frames of each."""
    count = check_int("num_frames", count)
    indices = np.linspace(0, num_videos - 1, min(num_videos, count)).round().astype(int).tolist()
    return indices, math.ceil(count / len(indices))
