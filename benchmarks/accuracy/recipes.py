"""Recipes of SOSampler on both kinds of videos that benchmarks have: dev top-1 on reels of pictures and on streams.

    python benchmarks/accuracy/recipes.py PICTURES STREAMS --weights WEIGHTS --work RUNS \
        --out benchmarks/results/recipes.json

PICTURES is as for samplers.py, STREAMS the folder RUNS of streams.py (its bank10 and classifier), WEIGHTS as there.
Reels to train on and reels of dev share no picture (tune10 of samplers.py); their classifier is a ResNet-50 of which
the last layers learned from other pictures. One seed and a few epochs each; test is not used.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler.reels.make import reel_recipe

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.accuracy.samplers import classifier_pictures, tuning_pictures
from benchmarks.accuracy.streams import MOBILENET, RESNET, teach
from benchmarks.accuracy.systems_trials import FIRST_SETTINGS
from benchmarks.common import Results, device, fast_precision

RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "default, freeze 0.5": {"freeze": 0.5},
    "default, freeze 0": {"freeze": 0.0},
    "the first recipe": FIRST_SETTINGS,
}
KINDS = ("reels", "streams")
NUM_FRAMES = (1, 2, 3, 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("streams", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--reels", type=int, nargs=2, default=[1000, 500], help="Train, dev.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="Measure these alone.")
    arguments = parser.parse_args()
    results = Results(arguments.out)
    kinds = {
        kind: make_reels(arguments)
        if kind == "reels"
        else (arguments.streams / "bank10", arguments.streams / "classifier")
        for kind in arguments.kinds
    }
    results.put(
        what="recipes of SOSampler on dev of reels and of streams, one seed",
        **circumstances(("torch", "torchvision", "timm", "numpy")),
        epochs=arguments.epochs,
        videos=results.data.get("videos", {})
        | {
            kind: {part: len(so.Bank(bank).split(part)) for part in ("train", "dev")}
            for kind, (bank, _) in kinds.items()
        },
    )
    for kind, (bank, folder) in kinds.items():
        results.put(**{kind: measure(arguments, kind, bank, folder)})
        print(kind, {name: row["top1"] for name, row in results[kind].items()}, flush=True)


def make_reels(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Return the bank of reels and the folder of their classifier."""
    work = arguments.work
    bank, classifier = work / "tune10", work / "classifier"
    so.make_reels(
        tuning_pictures(arguments.pictures, work / "tuning_pictures"),
        bank,
        preset=None,
        recipe=reel_recipe("sports22", {"num_shots": 10, "num_candidates": 10}),
        counts=dict(zip(("train", "dev"), arguments.reels, strict=True)),
    )
    so.train_classifier(
        classifier_pictures(arguments.pictures, work / "classifier_pictures"),
        "resnet50_v1",
        out=classifier,
        weights=arguments.weights / RESNET,
        input_size=176,
        epochs=12,
        freeze=0.75,
        precision=fast_precision(),
    )
    return bank, classifier


def measure(arguments: argparse.Namespace, kind: str, bank: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Train with each recipe, and measure all on dev together."""
    classifier = so.create_classifier(folder, device=device())
    teach(bank, classifier)
    samplers: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {"uniform": {"settings": None, "seconds": None}}
    for name, settings in RECIPES.items():
        begin = time.perf_counter()
        out = arguments.work / "samplers" / f"{kind}-{name.replace(',', '').replace(' ', '-')}"
        trained = so.train(
            bank,
            out=out,
            classifier=classifier.fingerprint(),
            weights=arguments.weights / MOBILENET,
            epochs=arguments.epochs,
            **settings,
        )
        samplers[name] = trained.sampler
        samplers[name].precision = fast_precision()
        rows[name] = {"settings": settings, "seconds": round(time.perf_counter() - begin, 1)}
        print(f"{kind}, {name}: {rows[name]['seconds']:.0f} s", flush=True)
    found = so.evaluate(
        bank,
        {"uniform": "uniform", **samplers},
        num_frames=list(NUM_FRAMES),
        num_candidates=10,
        classifier=classifier,
        split="dev",
        device=device(),
        bootstrap=0,
    )
    for row in found.to_dict()["rows"]:
        rows[row["policy"]].setdefault("top1", {})[str(row["num_frames"])] = row["top1"]
    return rows


if __name__ == "__main__":
    main()
