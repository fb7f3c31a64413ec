"""Mutilated files end in a selection or in a sentence, never in another exception and never in a crash."""

from __future__ import annotations

import numpy as np
import pytest

import sosampler as so
from tests.clips import BY_NAME

KINDS = ["h264", "open_gop", "fragmented", "hevc", "vp9_webm", "mpeg4_avi", "mkv", "mpeg_ts", "raw_h264", "av1"]


def mutilated(data: bytes, seed: int) -> bytes:
    """Cut, overwrite, drop or double a part of the file, wherever the seed says."""
    rng = np.random.default_rng(seed)
    damaged = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, len(damaged)))
        length = int(rng.integers(1, max(2, len(damaged) // 8)))
        match rng.integers(0, 5):
            case 0:
                del damaged[max(at, 64) :]
            case 1:
                damaged[at : at + length] = rng.bytes(len(damaged[at : at + length]))
            case 2:
                del damaged[at : at + length]
            case 3:
                damaged[at:at] = damaged[at : at + length]
            case _:
                for place in rng.integers(0, len(damaged), 8):  # single bytes, so that headers lie
                    damaged[place] = rng.integers(0, 256)
    return bytes(damaged)


@pytest.mark.parametrize("mode", ["exact", "keyframe"])
@pytest.mark.parametrize("kind", KINDS)
def test_mutilated_files(kind: str, mode: str) -> None:
    limits = so.Limits(max_pixels=4_000_000, max_frames=100_000)
    survived = 0
    for seed in range(30):
        data = mutilated(BY_NAME[kind].data, seed)
        try:
            sel = so.select(data, num_frames=4, candidates=mode, limits=limits, threads=1 + seed % 2, policy="uniform")
        except so.SosamplerError as refusal:
            sentence = str(refusal)
        else:
            sentence = "selected"
            survived += 1
            assert sel.frames is not None
            assert len(sel) == 4
            assert np.isfinite(sel.pts_seconds).all()
            assert sel.metadata.fps >= 0
        assert sentence
        assert "\n" not in sentence
    assert survived, "at least the mildest damage should be survived"
