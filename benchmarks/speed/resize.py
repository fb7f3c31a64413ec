"""How fast a decoded frame becomes a small RGB frame, and how equal the pixels are: swscale, PIL and torch.

python benchmarks/speed/resize.py CLIP --out benchmarks/results/resize.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from sosampler._util.environment import circumstances, compare, in_turns
from sosampler.errors import VideoError
from sosampler.video.limits import Limits, target_size
from sosampler.video.pyav_decode import FrameConverter

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import RESULTS, write_result


def bench_resize(clip: Path, *, size: int = 256, frames: int = 16, rounds: int = 7) -> dict[str, Any]:
    """Measure time and pixels of three ways to make RGB with the given short side."""
    import torch
    from torch.nn.functional import interpolate

    decoded = _decoded(clip, frames)
    width, height = target_size(decoded[0].width, decoded[0].height, size)
    limits, name = Limits(), str(clip)
    in_one_pass = FrameConverter(width, height, name=name, limits=limits)
    full = FrameConverter(decoded[0].width, decoded[0].height, name=name, limits=limits)

    def by_swscale() -> list[np.ndarray]:
        return [in_one_pass(frame) for frame in decoded]

    def by_pil() -> list[np.ndarray]:
        resampling = Image.Resampling.BILINEAR
        return [np.asarray(Image.fromarray(full(frame)).resize((width, height), resampling)) for frame in decoded]

    def by_torch() -> list[np.ndarray]:
        planes = (torch.from_numpy(full(frame)).permute(2, 0, 1)[None] for frame in decoded)
        small = (interpolate(plane, size=(height, width), mode="bilinear", antialias=True) for plane in planes)
        return [plane[0].permute(1, 2, 0).numpy() for plane in small]

    torch.set_num_threads(1)
    seconds = in_turns({"swscale": by_swscale, "PIL": by_pil, "torch": by_torch}, rounds=rounds)
    truth = np.stack(by_pil()).astype(np.int16)
    away = {name: np.abs(np.stack(way()) - truth) for name, way in (("swscale", by_swscale), ("torch", by_torch))}
    return {
        "benchmark": "resize",
        "what": f"a decoded {decoded[0].width}x{decoded[0].height} frame to RGB {width}x{height}, one thread",
        **circumstances(("av", "pillow", "torch", "numpy")),
        "clip": clip.name,
        "rounds": rounds,
        "milliseconds_a_frame": {name: statistics.median(s) / frames * 1000 for name, s in seconds.items()},
        "comparisons": [compare(seconds, way=way, reference="PIL") for way in ("swscale", "torch")],
        "mean_difference_to_PIL": {name: float(d.mean()) for name, d in away.items()},
        "share_of_values_more_than_4_away_from_PIL": {name: float((d > 4).mean()) for name, d in away.items()},
    }


def _decoded(clip: Path, count: int) -> list[Any]:
    frames: list[Any] = []
    with av.open(str(clip)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number % 10 == 0:
                frames.append(frame)
            if len(frames) == count:
                return frames
    if not frames:
        raise VideoError(f"{clip}: no frame could be decoded; give a video that plays")
    return frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clip", type=Path, help="a natural video")
    parser.add_argument("--size", type=int, default=256, help="short side")
    parser.add_argument("--out", type=Path, default=RESULTS / "resize.json")
    given = parser.parse_args()
    result = bench_resize(given.clip, size=given.size)
    write_result(given.out, result)
    for name, took in result["milliseconds_a_frame"].items():
        difference = result["mean_difference_to_PIL"].get(name, 0.0)
        print(f"{name:<8}{took:8.3f} ms a frame, mean difference to PIL {difference:.3f}")


if __name__ == "__main__":
    main()
