"""Further networks for systems.py, which some systems choose between or switch, trained on the classifier's pictures.

    python benchmarks/accuracy/networks.py PICTURES --classifier RUNS/classifier --classifier-weights RESNET50 \
        --sampler-weights MOBILENETV2 --work RUNS

PICTURES and RUNS are those of samplers.py. RUNS/networks then holds folders:

- r34, r18: the second and the third network of AR-Net. Its ResNet-34 and ResNet-18 need ImageNet weights of their own;
  here they are the given ResNet-50, fine-tuned at 112 pixels, and the given MobileNetV2, frozen, at 112 pixels.
- any_precision: VideoIQ's network, from the classifier.
- slowonly: Ada3D's network, an inflated ResNet-50, trained on reels of the classifier's own pictures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sosampler as so
from sosampler.baselines.base import light_network
from sosampler.reels.make import reel_recipe

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.accuracy.samplers import classifier_pictures, tuning_pictures

SMALLER = 112  # pixels a side of r34 and r18


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--classifier", type=Path, required=True, help="Its saved folder.")
    parser.add_argument("--classifier-weights", type=Path, required=True, help="Of ResNet-50, from ImageNet.")
    parser.add_argument("--sampler-weights", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--reels", type=int, nargs=2, default=[1000, 100], help="For slowonly: train, dev.")
    parser.add_argument("--only", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    arguments = parser.parse_args()
    for name in arguments.only:
        begin = time.perf_counter()
        NETWORKS[name](arguments, arguments.work / "networks" / name)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)


def train_smaller(arguments: argparse.Namespace, out: Path) -> None:
    _train(arguments, "resnet50_v1", arguments.classifier_weights, SMALLER, out)


def keep_light(arguments: argparse.Namespace, out: Path) -> None:
    light_network(arguments.sampler_weights, SMALLER).save_pretrained(out)


def train_any_precision(arguments: argparse.Namespace, out: Path) -> None:
    size = so.create_classifier(arguments.classifier).preprocessing.size[0]
    weights = arguments.classifier / "model.safetensors"
    _train(arguments, "any_precision_resnet50_v1", weights, size, out)


def train_slowonly(arguments: argparse.Namespace, out: Path) -> None:
    size = so.create_classifier(arguments.classifier).preprocessing.size[0]
    pictures = tuning_pictures(arguments.pictures, arguments.work / "clip_pictures", "classifier")
    bank = arguments.work / "clips10"
    so.make_reels(
        pictures,
        bank,
        preset=None,
        recipe=reel_recipe("sports22", {"num_shots": 10, "num_candidates": 10}),
        counts=dict(zip(("train", "dev"), arguments.reels, strict=True)),
    )
    settings = {"data": bank, "num_frames": 10, "options": {"stride_on_1x1": True}}
    _train(arguments, "slowonly_r50", arguments.classifier_weights, size, out, **settings)


def _train(arguments: argparse.Namespace, network: str, weights: Path, size: int, out: Path, **settings: Any) -> None:
    """Fine-tune a network, on the classifier's pictures unless other data is given."""
    pictures = classifier_pictures(arguments.pictures, arguments.work / "classifier_pictures")
    options = {"data": pictures, "weights": weights, "input_size": size, "epochs": arguments.epochs, **settings}
    trained = so.train_classifier(classifier=network, out=out, **options)
    print(f"{out.name}: {trained.result}", flush=True)


NETWORKS: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    "r34": train_smaller,
    "r18": keep_light,
    "any_precision": train_any_precision,
    "slowonly": train_slowonly,
}

if __name__ == "__main__":
    main()
