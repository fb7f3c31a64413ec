"""How near the certified search for the optimal policy comes to its bound, on made-up logits.

    python benchmarks/accuracy/certified.py --out benchmarks/results/certified.json

A video has T frames; a share of them, drawn from .25 to .65, shows the true class with a margin drawn from N(4, 2), the
others any class with a margin drawn from N(3, 2); all classes have unit noise. N of T are chosen; the gap is how much
more confidence in the true class any subset could have, in probability.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sosampler._util.environment import circumstances
from sosampler.policies.optimal import optimal_mean_logits

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.speed.optimal import made_up

PAIRS = ((8, 30), (16, 60), (32, 100))


def measured(num_frames: int, num_candidates: int, videos: int, classes: int, seed: int) -> dict[str, Any]:
    logits, labels = made_up(videos, num_candidates, classes, seed)
    begin = time.process_time()
    found = optimal_mean_logits(logits, labels, num_frames)
    seconds = time.process_time() - begin
    confidence = found.log_confidence.exp()
    return {
        "num_frames": num_frames,
        "num_candidates": num_candidates,
        "method": found.method,
        "largest_gap": float(found.gap.max()),
        "share_below_1e-3": float((found.gap < 1e-3).double().mean()),
        "share_with_confidence_between_0.1_and_0.9": float(((confidence > 0.1) & (confidence < 0.9)).double().mean()),
        "cpu_seconds_a_video": round(seconds / videos, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--videos", type=int, default=1000)
    parser.add_argument("--classes", type=int, default=22)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(*pair, arguments.videos, arguments.classes, arguments.seed) for pair in PAIRS]
    result = {
        "what": "gap of the certified optimal policy on made-up logits of a mean-logit classifier",
        **circumstances(("torch", "numpy")),
        "videos": arguments.videos,
        "classes": arguments.classes,
        "seed": arguments.seed,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
