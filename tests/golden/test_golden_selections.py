"""Which frames every policy chooses of every kind of clip, with times, scores and pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sosampler as so
from golden import check, make_clips, sha256

POLICIES = so.list_policies()  # of the package: examples in docstrings register others while tests run
SPREAD = ("frame-difference+nms", "frame-difference+aks", "frame-difference+its")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_clips(tmp_path_factory.mktemp("clips"))


def summary(source: Path, num_frames: int | None = 3, **options: Any) -> dict[str, Any]:
    if source.is_dir():
        options = {"folder_fps": 5} | options
    try:
        sel = so.select(source, num_frames, **options)
    except so.SosamplerError as error:
        return {"error": type(error).__name__}
    return {
        "policy": sel.policy,
        "frames": sel.frame_indices,
        "seconds": np.round(sel.pts_seconds, 6),
        "scores": None if sel.scores is None else np.round(np.asarray(sel.scores, dtype=np.float64), 4),
        "candidates": sel.candidates.frame_indices,
        "notes": len(sel.notes),
        "pixels": None if sel.frames is None else [sha256(frame.tobytes()) for frame in sel.frames],
        "shape": None if sel.frames is None else list(np.shape(sel.frames)),
    }


def test_policies(clips: dict[str, Path]) -> None:
    policies = (*POLICIES, *SPREAD)
    check("policies", {
        name: {
            policy: summary(path, None if policy == "all" else 3, num_candidates=8, policy=policy)
            for policy in policies
        }
        for name, path in clips.items()
    }, abs_tol=2e-4)  # fmt: skip


def test_candidates(clips: dict[str, Path]) -> None:
    cases: dict[str, dict[str, Any]] = {
        **{f"mode {mode}": {"candidates": mode} for mode in ("exact", "keyframe", "snap")},
        "snap closely": {"candidates": "snap", "snap_tolerance": 0.15},
        **{f"grid {grid}": {"grid": grid, "seed": 3} for grid in ("uniform", "linspace", "stratified", "jitter")},
        "fps": {"num_candidates": None, "fps": 4},
        "start": {"start": 0.9},
        "end": {"end": 1.3},
        "start and end": {"start": 0.5, "end": 1.5},
        "no decoding": {"policy": "uniform", "decode": False},
        "seed": {"policy": "random", "seed": 5},
        "as many as candidates": {"num_frames": 6},
        "defaults": {"num_candidates": None, "policy": None},
        **{f"too few, {mode}": {"num_frames": 5, "on_short": mode} for mode in ("repeat", "fewer", "error")},
    }
    base: dict[str, Any] = {"num_candidates": 6, "policy": "frame-difference"}
    check("candidates", {
        name: {case: summary(path, **{**base, **options}) for case, options in cases.items()}
        for name, path in clips.items()
    }, abs_tol=2e-4)  # fmt: skip


def test_small_frames(clips: dict[str, Path]) -> None:
    """Scaled pixels may differ by a rounding between processors: shapes, and means within one level."""
    found = {}
    for name in ("constant", "rotated", "odd size"):
        for size in (16, (20, 12)):
            sel = so.select(clips[name], 2, policy="uniform", size=size)
            found[f"{name} {size}"] = [list(np.shape(sel.frames)), float(np.mean(sel.frames))]
    check("sizes", found, abs_tol=1.0)


def test_metadata(clips: dict[str, Path]) -> None:
    found = {}
    for name, path in clips.items():
        video = so.open_video(path, folder_fps=5 if path.is_dir() else None)
        meta = video.metadata
        video.close()
        found[name] = {key: getattr(meta, key) for key in meta.__dataclass_fields__ if key != "decoder"}
    check("metadata", found, abs_tol=1e-6)
