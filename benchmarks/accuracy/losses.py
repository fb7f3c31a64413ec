"""Ranking against squared errors, each loss with the learning rate that is best for it on dev; measured once on test.

    python benchmarks/accuracy/losses.py BANK --tune-bank BANK --classifier FOLDER --sampler-weights MOBILENETV2 \
        --work RUNS --out benchmarks/results/losses.json --seeds 0 1 2 --parallel 4

The banks are those of samplers.py (bank10, tune10). All losses compare softmax over T of the head with softmax over T
of the label's confidence, and nothing else is trained. Their gradients differ by orders of magnitude, so that one rate
for all would decide the outcome: each has the same number of rates, a factor of ten apart. A rate at the end of its
list is reported (`at_the_edge`). Killed and started again, it resumes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler.training.optim import settled_precision

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.accuracy.systems import teach
from benchmarks.accuracy.systems_trials import NUM_CANDIDATES, means
from benchmarks.accuracy.train_many import Task, Trainers
from benchmarks.common import Results

SETTINGS: dict[str, Any] = {"recipe": "paper", "target": "label", "class_head": False, "lam": 1.0}
RATES: dict[str, tuple[float, ...]] = {
    "hinge": (1e-3, 1e-2, 1e-1, 1.0),  # Eq. 3, its sign corrected
    "mse": (1e-1, 1.0, 10.0, 100.0),  # the mean square of the authors' code
    "l2": (1e-3, 1e-2, 1e-1, 1.0),  # the norm that the paper prints
}
NUM_FRAMES = (1, 2, 3, 4, 6)
DEV_FRAMES = 3  # the number by which a rate is chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bank", type=Path)
    parser.add_argument("--tune-bank", type=Path, required=True, help="Its dev shares no pictures with its train.")
    parser.add_argument("--classifier", type=Path, required=True, help="Its saved folder.")
    parser.add_argument("--sampler-weights", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=3, help="Trainings at a time.")
    parser.add_argument("--trial-epochs", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=None, help="Default: those of the recipe.")
    arguments = parser.parse_args()
    results = Results(arguments.out)
    classifier = so.create_classifier(arguments.classifier, device="cuda" if torch.cuda.is_available() else "cpu")
    for bank in (arguments.bank, arguments.tune_bank):
        teach(bank, classifier)
    arguments.fingerprint = classifier.fingerprint()
    results.put(
        what="losses of a sampler on reels of pictures, each with its own learning rate chosen on dev",
        **circumstances(("torch", "torchvision", "numpy")),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        settings=SETTINGS,
        seeds=arguments.seeds,
        trial_epochs=arguments.trial_epochs,
        epochs=arguments.epochs,
        videos={name: len(so.Bank(arguments.bank).split(name)) for name in ("train", "test")},
        tune_videos={name: len(so.Bank(arguments.tune_bank).split(name)) for name in ("train", "dev")},
    )
    trials = {
        f"{loss}#{rate:g}": task_of(arguments, arguments.tune_bank, loss, rate, arguments.seeds[0], trial=True)
        for loss, rates in RATES.items()
        for rate in rates
    }
    failed = train(arguments, trials)
    dev = {row["policy"]: row for row in measure(arguments, arguments.tune_bank, trials, "dev", (DEV_FRAMES,))}
    chosen = {}
    for loss, rates in RATES.items():
        best = max(rates, key=lambda rate: dev.get(f"{loss}#{rate:g}", {"top1": -1.0})["top1"])
        chosen[loss] = {"lr": best, "at_the_edge": best in (rates[0], rates[-1])}
    results.put(dev={name: row["top1"] for name, row in dev.items()}, failed=failed, chosen=chosen)
    print(chosen, flush=True)
    finals = {
        f"{loss}#{seed}": task_of(arguments, arguments.bank, loss, choice["lr"], seed)
        for loss, choice in chosen.items()
        for seed in arguments.seeds
    }
    if failed := train(arguments, finals):
        raise SystemExit(f"not trained: {failed}")
    rows = measure(arguments, arguments.bank, finals, "test", NUM_FRAMES)
    results.put(table=means(rows, "top1"))
    for line in results["table"]:
        print(line["policy"], line["num_frames"], line["top1"], line.get("top1_sd"), flush=True)


def task_of(
    arguments: argparse.Namespace, bank: Path, loss: str, rate: float, seed: int, *, trial: bool = False
) -> Task:
    epochs = arguments.trial_epochs if trial else arguments.epochs
    settings = {**SETTINGS, "loss": loss, "lr": rate, "seed": seed} | ({} if epochs is None else {"epochs": epochs})
    out = arguments.work / f"{'trial-' if trial else ''}{loss}-{rate:g}-{seed}"
    given = {"classifier": arguments.fingerprint, "weights": str(arguments.sampler_weights)}
    return {"bank": str(bank), "out": str(out), **given, **settings}


def train(arguments: argparse.Namespace, tasks: dict[str, Task]) -> dict[str, str]:
    """Train what is not trained yet, and return what failed, such as rates that diverge."""
    left = {name: task for name, task in tasks.items() if not (Path(task["out"]) / "result.json").exists()}
    with Trainers(arguments.parallel, arguments.work / "logs") as trainers:
        replies = trainers.train(left, lambda name, reply: print(name, reply["seconds"], "s", flush=True))
    return {name: reply["failed"] for name, reply in replies.items() if "failed" in reply}


def measure(
    arguments: argparse.Namespace, bank: Path, tasks: dict[str, Task], split: str, num_frames: tuple[int, ...]
) -> list[dict[str, Any]]:
    trained = {name: task["out"] for name, task in tasks.items() if (Path(task["out"]) / "result.json").exists()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = so.evaluate(
        bank,
        {"uniform": "uniform", "semi-optimal": "semi-optimal"} | trained,
        pairs=tuple((count, NUM_CANDIDATES) for count in num_frames),
        classifier=arguments.classifier,
        split=split,
        device=device,
        precision=settled_precision(torch.device(device), None),
        bootstrap=200,
    ).to_dict()["rows"]
    return rows


if __name__ == "__main__":
    main()
