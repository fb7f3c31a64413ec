"""Fine-tune ResNet-50 on labelled pictures: choose the recipe on dev, then measure the chosen one on test.

    python benchmarks/accuracy/finetune_pictures.py PICTURES WEIGHTS --work RUNS \\
        --out benchmarks/results/finetune_pictures.json

PICTURES holds `train/` and `test/` with one folder a class; WEIGHTS is an ImageNet ResNet-50 whose stride sits on the
first 1x1 convolution. Every recipe of GRID is trained with each seed (a seed also carves its own dev split out of
train); the one with the best mean dev accuracy is chosen, and only its test accuracies are published. Killed and
started again, it goes on with the runs in RUNS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import sosampler as so
from sosampler._util.environment import circumstances

GRID: dict[str, dict[str, Any]] = {
    "15 epochs": {"epochs": 15},
    "30 epochs": {"epochs": 30},
    "30 epochs, lr 0.02": {"epochs": 30, "lr": 0.02},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--classifier", default="resnet50_v1")
    parser.add_argument("--input-size", type=int, default=176)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=None)
    arguments = parser.parse_args()

    rows = []
    for name, settings in GRID.items():
        runs = []
        for seed in arguments.seeds:
            begin = time.perf_counter()
            trained = so.train_classifier(
                arguments.pictures,
                arguments.classifier,
                out=arguments.work / f"{name} seed {seed}",
                weights=arguments.weights,
                input_size=arguments.input_size,
                seed=seed,
                workers=arguments.workers,
                **settings,
            )
            runs.append({"seed": seed, **trained.result})
            print(f"{name}, seed {seed}: dev {trained.result['dev']:.4f}, {time.perf_counter() - begin:.0f} s")
        rows.append({"recipe": name, "dev_top1": statistics.mean(run["dev"] for run in runs), "runs": runs})
    chosen = max(rows, key=lambda row: row["dev_top1"])
    for row in rows:
        if row is not chosen:
            for run in row["runs"]:
                run.pop("test")
    result = {
        "what": f"{arguments.classifier} fine-tuned on pictures at {arguments.input_size} px, recipe chosen on dev",
        **circumstances(("torch", "torchvision", "timm", "numpy")),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "chosen": chosen["recipe"],
        "test_top1": [run["test"] for run in chosen["runs"]],
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"chosen on dev: {chosen['recipe']}; test {result['test_top1']}")


if __name__ == "__main__":
    main()
