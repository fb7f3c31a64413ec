"""Published weights in this package's networks: ResNet-50 names photographs, I3D labels videos.

    python benchmarks/accuracy/recognise.py --resnet50 WEIGHTS --pictures FOLDER \\
        --i3d WEIGHTS --videos A.mp4 --out OUT.json

FOLDER has one folder a class; of those whose name stands for a class of ImageNet (see COUNTERPARTS) all pictures are
named, and the share is counted for which the counterpart is first, or among the first five.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler.training.classifier_data import read_image

COUNTERPARTS = {
    "baseball": ["baseball", "ballplayer"],
    "basketball": ["basketball"],
    "formula1": ["racer"],
    "ice_hockey": ["puck"],
    "motogp": ["crash helmet", "moped", "motor scooter"],
    "table_tennis": ["ping-pong ball"],
    "volleyball": ["volleyball"],
    "weight_lifting": ["barbell", "dumbbell"],
}


def name_pictures(weights: Path, pictures: Path) -> dict[str, Any]:
    classifier = so.create_classifier("resnet50_v1", weights=weights)
    found: dict[str, Any] = {}
    for folder, names in COUNTERPARTS.items():
        wanted = [number for number, name in enumerate(classifier.class_names) if name in names]
        ranks = []
        for path in sorted((pictures / folder).glob("*.jpg")):
            frame = torch.from_numpy(read_image(path, at_least=448).transpose(2, 0, 1).copy())
            order = classifier.clip_probs(frame[None, None])[0].argsort(descending=True)
            ranks.append(int(torch.isin(order, torch.tensor(wanted)).nonzero()[0]))
        share = [float(np.mean(np.array(ranks) < least)) for least in (1, 5)]
        found[folder] = {"counterparts": names, "pictures": len(ranks), "first": share[0], "among_five": share[1]}
        print(f"{folder:>15}: first {share[0]:.2f}, among five {share[1]:.2f} of {len(ranks)}")
    return found


def label_videos(weights: Path, videos: list[Path]) -> dict[str, Any]:
    classifier = so.create_classifier("i3d", weights=weights)
    found: dict[str, Any] = {}
    for video in videos:
        for count in (64, 32, 8):
            chosen = so.select(video, count, policy="uniform", size=256)
            probabilities = classifier.clip_probs(chosen.to_torch()[None])[0]
            best = probabilities.topk(5)
            found[f"{video.name}, {count} frames"] = [
                [classifier.class_names[int(number)], round(float(value), 4)]
                for value, number in zip(best.values, best.indices, strict=True)
            ]
            print(video.name, count, found[f"{video.name}, {count} frames"][:3])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resnet50", type=Path, required=True)
    parser.add_argument("--pictures", type=Path, required=True)
    parser.add_argument("--i3d", type=Path, required=True)
    parser.add_argument("--videos", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    result = {
        "what": "published weights in this package's networks",
        **circumstances(("torch", "torchvision", "timm")),
        "resnet50": name_pictures(arguments.resnet50, arguments.pictures),
        "i3d": label_videos(arguments.i3d, arguments.videos),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
