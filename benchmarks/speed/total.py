"""How long the choice over a whole collection takes, and how much memory, with made-up features.

    python benchmarks/speed/total.py --out benchmarks/results/total.json

Candidates are scenes with noise: each scene of a video is a random direction, its frames lie around it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from sosampler._util.environment import circumstances, peak_memory_mb
from sosampler.policies.collection import FEATURE_DIMS, choose_distinct, reduced

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import RESULTS, write_result

FRAMES_A_SCENE, FRAMES_A_VIDEO, NETWORK_DIMS = 8, 32, 1280


def made_up(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return quality [N], reduced features [N, D] as they are stored, and videos [N]."""
    rng = np.random.default_rng(seed)
    features = np.empty((count, FEATURE_DIMS), dtype=np.float16)
    for start in range(0, count, 1024):
        scenes = rng.standard_normal((1024 // FRAMES_A_SCENE, NETWORK_DIMS), dtype=np.float32)
        frames = scenes.repeat(FRAMES_A_SCENE, 0)
        frames += 0.3 * rng.standard_normal(frames.shape, dtype=np.float32)
        features[start : start + 1024] = reduced(frames)[: count - start]
    return rng.uniform(0.2, 1, count).astype(np.float32), features, np.arange(count) // FRAMES_A_VIDEO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", type=int, default=100_000)
    parser.add_argument("--total", type=int, default=500)
    parser.add_argument("--out", type=Path, default=RESULTS / "total.json")
    args = parser.parse_args()
    quality, features, videos = made_up(args.candidates)
    before, began, cpu = peak_memory_mb(), time.perf_counter(), time.process_time()
    chosen = choose_distinct(quality, features, args.total, groups=videos)
    result = {
        "benchmark": "total",
        "what": "time and memory of the choice over a collection, with made-up features",
        **circumstances(("numpy",)),
        "candidates": args.candidates,
        "total": args.total,
        "feature_dims": FEATURE_DIMS,
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "stored_mb": round(features.nbytes / 2**20, 1),
        "peak_mb": round(peak_memory_mb(), 1),
        "peak_before_mb": round(before, 1),
        "distinct_scenes": len(np.unique(chosen.positions // FRAMES_A_SCENE)),
        "distinct_videos": len(np.unique(videos[chosen.positions])),
        "min_distance": round(float(chosen.distances.min()), 4),
    }
    write_result(args.out, result)


if __name__ == "__main__":
    main()
