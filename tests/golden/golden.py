"""Clips made without the package, and expected values kept in JSON files beside the tests.

The tests of this folder use the public names of `sosampler` and its command alone, so that they hold while everything
inside the package moves. `python tests/golden/update.py` writes the expected values anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import runpy
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

UPDATE = os.environ.get("SOSAMPLER_UPDATE_GOLDEN") == "1"
EXPECTED = Path(__file__).parent / "expected"


# ---- expected values


def check(name: str, value: Any, *, rel: float = 0.0, abs_tol: float = 0.0) -> None:
    """Compare with the kept value: floats within the tolerance, all else exactly."""
    path = EXPECTED / f"{name}.json"
    value = json.loads(json.dumps(value, default=_plain))
    if UPDATE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(_compact(value) + "\n", encoding="utf-8")
        return
    assert path.exists(), f"{path}: no expected value; run python tests/golden/update.py"
    wrong = list(_differences(value, json.loads(path.read_text(encoding="utf-8")), name, rel, abs_tol))
    assert not wrong, f"{len(wrong)} values differ from {path.name}:\n" + "\n".join(wrong[:20])


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(type(value))


def _compact(value: Any, depth: int = 0) -> str:
    """JSON with one line for each entry of the two outer levels, so that a change is easy to read."""
    if isinstance(value, dict) and value and depth < 2:
        pad = " " * (depth + 1)
        rows = [f"{pad}{json.dumps(key)}: {_compact(value[key], depth + 1)}" for key in value]
        return "{\n" + ",\n".join(rows) + "\n" + pad[1:] + "}"
    return json.dumps(value)


def _differences(new: Any, old: Any, where: str, rel: float, abs_tol: float) -> Any:
    if isinstance(new, dict) and isinstance(old, dict):
        for key in sorted({*new, *old}):
            if key not in new or key not in old:
                yield f"{where}.{key}: {'missing' if key not in new else 'new'}"
            else:
                yield from _differences(new[key], old[key], f"{where}.{key}", rel, abs_tol)
    elif isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        for index, (left, right) in enumerate(zip(new, old, strict=True)):
            yield from _differences(left, right, f"{where}[{index}]", rel, abs_tol)
    elif isinstance(new, float) and isinstance(old, float):
        same = math.isclose(new, old, rel_tol=rel, abs_tol=abs_tol) or (math.isnan(new) and math.isnan(old))
        if not same:
            yield f"{where}: {new!r}, expected {old!r}"
    elif type(new) is not type(old) or new != old:
        yield f"{where}: {new!r}, expected {old!r}"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def key_paths(value: Any, where: str = "") -> set[str]:
    """Every key of nested objects, as `outer.inner`, with `[]` for the entries of lists."""
    if isinstance(value, dict):
        return {f"{where}.{key}".lstrip(".") for key in value}.union(
            *(key_paths(inner, f"{where}.{key}".lstrip(".")) for key, inner in value.items())
        )
    if isinstance(value, list):
        return set().union(*(key_paths(inner, f"{where}[]") for inner in value))
    return set()


# ---- the command


def sosampler(*arguments: Any, code: int = 0) -> str:
    """Run `python -m sosampler` in this process, where torch is imported already, and return its output."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sosampler", *map(str, arguments)])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_module("sosampler", run_name="__main__")
                ended: Any = 0
            except SystemExit as end:
                ended = end.code or 0
    assert ended == code, f"{arguments}: exit code {ended}\n{out.getvalue()}\n{err.getvalue()}"
    return out.getvalue()


# ---- clips


def scenes(count: int, width: int = 48, height: int = 32, *, every: int = 5, seed: int = 0) -> list[np.ndarray]:
    """Frames [H, W, 3] uint8: a new random texture `every` frames, which moves by a different step in each scene."""
    rng = np.random.default_rng(seed)
    frames = []
    for number in range(count):
        scene, step = divmod(number, every)
        if step == 0:
            coarse = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
            texture = coarse.repeat(4, axis=0).repeat(4, axis=1)[:height, :width]
        frames.append(np.ascontiguousarray(np.roll(texture, step * (scene + 1), axis=1)))
    return frames


def encode(
    path: Path,
    frames: Sequence[np.ndarray],
    *,
    gop: int = 8,
    bframes: int = 0,
    fps: int = 10,
    pts: Sequence[int] | None = None,
    rotation: int = 0,
) -> Path:
    """Write RGB H.264 without loss: what is decoded is what was given, whatever the encoder's version."""
    import av

    fixed = f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes={bframes}:b-adapt=0:b-pyramid=0:log-level=error"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(
            "libx264rgb", rate=Fraction(fps), options={"qp": "0", "preset": "veryfast", "x264-params": fixed}
        )
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "rgb24"
        stream.codec_context.time_base = Fraction(1, fps)
        stream.codec_context.thread_count = 1
        if rotation:
            stream.set_display_rotation(rotation)
        for number, frame in enumerate(frames):
            image = av.VideoFrame.from_ndarray(frame, format="rgb24")
            image.pts, image.time_base = number if pts is None else pts[number], Fraction(1, fps)
            container.mux(stream.encode(image))
        container.mux(stream.encode(None))
    return path


def image_folder(path: Path, frames: Sequence[np.ndarray]) -> Path:
    from PIL import Image

    path.mkdir()
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(path / f"img_{number:05d}.png")
    return path


def make_clips(folder: Path) -> dict[str, Path]:
    uneven = np.cumsum([0, *(1 + np.arange(29) * 7 % 5)]).tolist()
    return {
        "constant": encode(folder / "constant.mp4", scenes(40)),
        "b-frames": encode(folder / "b-frames.mp4", scenes(40, seed=1), bframes=3, gop=12),
        "variable rate": encode(folder / "variable.mp4", scenes(30, seed=2), pts=uneven),
        "rotated": encode(folder / "rotated.mp4", scenes(24, seed=3), rotation=90),
        "odd size": encode(folder / "odd.mp4", scenes(24, 51, 37, seed=4)),
        "one keyframe": encode(folder / "one-keyframe.mp4", scenes(40, seed=5), gop=250, bframes=2),
        "short": encode(folder / "short.mp4", scenes(3, every=1, seed=6)),
        "images": image_folder(folder / "images", scenes(20, seed=7)),
    }
