"""Classifiers of several kinds for `sosampler reproduce`, on reels; what they learn from is apart from all else.

    python benchmarks/paper/paper_classifiers.py PICTURES --classifier RESNET50_FOLDER --i3d I3D --work WORK

PICTURES has the layout of sports22. In WORK: `cls10`, reels of the first half of the training pictures, which only
classifiers see; `clips10`, reels as samplers.py makes them, fewer, since networks of clips must classify
every set of frames; and one folder a classifier. Reels of both show the same training distractors.

The ResNet-50 with FrameExit's head and SlowOnly-50 start from the ResNet-50 that samplers.py trains on the pictures
themselves, I3D from its weights for Kinetics-400. FrameExit's head alone is trained, on features that are computed
once: a new layer 4096 wide wrecked the network below it when both were trained (8 % of dev reels right). X3D-S and a
small TimeSformer start from nothing: the weights that their authors published were not at hand, and some thousand
pictures are too few to learn to see from. They show that the code runs with such networks, not how good such networks
are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import sosampler as so
from sosampler.classifiers.factory import WEIGHTS
from sosampler.reels.make import reel_recipe

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.accuracy.samplers import tuning_pictures

TEN = {"num_shots": 10, "num_candidates": 10}
CLIP_FRAMES = 6  # of the clips that classifiers learn from
# About a twentieth of the published ViT-B/16 in multiply-adds, which from nothing would learn no more.
SMALL_TIMESFORMER = {
    **{"image_size": 112, "patch_size": 16, "num_frames": 8, "hidden_size": 384, "num_hidden_layers": 6},
    **{"num_attention_heads": 6, "intermediate_size": 1536},
}


@dataclass(frozen=True)
class Kind:
    """How one classifier is made."""

    registered: str
    start: str | None = None  # "classifier": the ResNet-50 of the pictures; "i3d": its weights; None: nothing
    input_size: int | None = 176
    options: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)  # settings of `train_classifier`
    on_features: bool = False  # only the head is trained, see paper_heads.py; `training` is for that


CLASSIFIERS = {
    "resnet50-frameexit": Kind(
        "resnet50_v1", "classifier", options={"head": "frameexit"}, training={"epochs": 15}, on_features=True
    ),
    "slowonly50": Kind("slowonly_r50", "classifier", options={"stride_on_1x1": True}, training={"epochs": 6}),
    "i3d": Kind("i3d", "i3d", input_size=160, training={"epochs": 6, "batch_size": 16}),
    "x3d_s": Kind("x3d_s", input_size=128, training={"epochs": 20, "lr": 0.05}),
    "timesformer": Kind("timesformer", training={"epochs": 30, "lr": 3e-4}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--classifier", type=Path, required=True, help="The folder that samplers.py trains.")
    parser.add_argument("--i3d", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--counts", type=int, nargs=2, default=[1500, 150], help="Reels of cls10: train, dev.")
    parser.add_argument("--clip-counts", type=int, nargs=3, default=[800, 80, 100], help="Of clips10: and test.")
    parser.add_argument("--only", nargs="+", choices=list(CLASSIFIERS), default=list(CLASSIFIERS))
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--stage", choices=("reels", "train", "teach"), default=None)
    arguments = parser.parse_args()
    for name, stage in (("reels", make_reels), ("train", train), ("teach", teach)):
        if arguments.stage in (None, name):
            begin = time.perf_counter()
            stage(arguments)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)


def make_reels(arguments: argparse.Namespace) -> None:
    make_classifier_reels(arguments.pictures, arguments.work, arguments.counts)
    make_clip_reels(arguments.pictures, arguments.work, arguments.clip_counts)


def make_classifier_reels(pictures: Path, work: Path, counts: list[int]) -> None:
    """cls10: `counts` reels for train and dev."""
    so.make_reels(
        tuning_pictures(pictures, work / "classifier_reel_pictures", "classifier"),
        work / "cls10",
        preset=None,
        recipe=reel_recipe("sports22", TEN),
        counts=dict(zip(("train", "dev"), counts, strict=True)),
    )


def make_clip_reels(pictures: Path, work: Path, counts: list[int]) -> None:
    """clips10: `counts` reels for train, dev and test."""
    so.make_reels(
        pictures,
        work / "clips10",
        preset="sports22",
        recipe=TEN,
        counts=dict(zip(("train", "dev", "test"), counts, strict=True)),
    )


def train(arguments: argparse.Namespace) -> None:
    for name in arguments.only:
        result = train_one(name, arguments.work, arguments.classifier, arguments.i3d, workers=arguments.workers)
        print(f"{name}: {json.dumps(result)}", flush=True)


def train_one(name: str, work: Path, classifier: Path, i3d: Path, **settings: Any) -> dict[str, Any]:
    """Train one classifier into WORK/NAME, or find that it was done; `settings` count more than its own."""
    kind = CLASSIFIERS[name]
    starts = {None: None, "classifier": classifier / WEIGHTS, "i3d": i3d}
    if kind.on_features:
        from benchmarks.paper.paper_heads import train_head

        settings.pop("workers", None)
        return train_head(work / "cls10", kind, starts[kind.start], work / name, **kind.training | settings)
    summary: dict[str, Any] = {"num_frames": CLIP_FRAMES, **kind.training, **settings}
    if kind.registered == "timesformer":
        network: Any = small_timesformer(so.Bank(work / "cls10").classes)
    else:
        network = kind.registered
        summary |= {"weights": starts[kind.start], "options": kind.options, "input_size": kind.input_size}
    trained = so.train_classifier(work / "cls10", network, out=work / name, **summary)
    return dict(trained.result)


def small_timesformer(classes: tuple[str, ...]) -> Any:
    """Always the same for the same number of classes."""
    from transformers import TimesformerConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return so.create_classifier(TimesformerConfig(**SMALL_TIMESFORMER), class_names=classes)


def teach(arguments: argparse.Namespace) -> None:
    """What each classifier says about every frame of clips10 alone goes into it."""
    for name in arguments.only:
        teach_one(arguments.work / "clips10", arguments.work / name)


def teach_one(bank: Path, classifier: Path) -> None:
    network = so.create_classifier(classifier)
    if torch.cuda.is_available():
        network.to("cuda")
        network.precision = "bfloat16"
    so.add_teacher(bank, network)


if __name__ == "__main__":
    main()
