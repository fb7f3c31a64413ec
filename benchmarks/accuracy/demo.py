"""The demonstration with several seeds: how far the learned sampler is ahead of uniform on drawn pictures.

    python benchmarks/accuracy/demo.py --work DEMOS --out benchmarks/results/demo.json

What is finished in DEMOS is not done again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sosampler._util.environment import circumstances
from sosampler.demo import run_demo

KEPT = ("policy", "num_frames", "num_candidates", "top1", "ci95", "versus_uniform", "fidelity", "recovered", "gmacs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    runs = []
    for seed in arguments.seeds:
        found = run_demo(arguments.work / f"seed{seed}", seed=seed, say=print)
        runs.append({"seed": seed, "rows": [{key: row[key] for key in KEPT} for row in found["rows"]]})
    result = {
        "what": "`sosampler demo` with several seeds: 150 test videos of drawn pictures, 16 candidates",
        **circumstances(("torch", "timm", "av", "numpy")),
        "runs": runs,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
