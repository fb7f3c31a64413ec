"""What a classifier loses in int8: top-1 on labelled pictures in float32 and in int8, and how often both say the same.

    python benchmarks/accuracy/int8.py CLASSIFIER PICTURES --work RUNS --out benchmarks/results/int8.json

CLASSIFIER is the folder of a classifier of the classes of PICTURES, which holds `train/` and `test/` with one folder a
class. The ranges of values are taken from pictures of `train/`, every so many of each class; accuracy and agreement are
those of all pictures of `test/`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler.engine.backends import int8_net
from sosampler.engine.networks import InputMaker
from sosampler.engine.quantize import classify_pixels, resized_pixels
from sosampler.training.classifier_data import read_image

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import RESULTS, Results

DEFAULT = RESULTS / "int8.json"
BACKENDS = ("onnxruntime", "openvino")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classifier", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for the classifier with its int8 network")
    parser.add_argument("--frames", type=int, default=256, help="pictures of train that the network is made from")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--out", type=Path, default=DEFAULT)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    classifier = so.create_classifier(given.classifier, device="cpu")
    side = max(classifier.preprocessing.size)
    train = labelled(given.pictures / "train", classifier.class_names)
    evenly = np.linspace(0, len(train) - 1, min(given.frames, len(train))).round().astype(int)
    shutil.rmtree(given.work / "int8", ignore_errors=True)
    begin = time.perf_counter()
    made = so.quantize_classifier(classifier, (picture(train[place][0], side) for place in evenly), given.work / "int8")
    took = time.perf_counter() - begin
    test = labelled(given.pictures / "test", classifier.class_names)
    truth = torch.tensor([label for _, label in test])
    levels = resized_pixels(classifier, (picture(path, side) for path, _ in test))
    inputs = InputMaker(classifier.preprocessing, torch.device("cpu"), torch.float32)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "float32": lambda part: classifier.net(inputs.normalised(part)),
        **{f"int8, {name}": int8_net(Path(made.file), classifier.preprocessing, name) for name in BACKENDS},
    }
    summary = {}
    for name, net in ways.items():
        summary[name] = classify_pixels(classifier, net, levels)
        print(f"{name}: classified {len(levels)} images")
    rows = list(compared(summary, truth))
    result = {
        "benchmark": "int8",
        "what": f"{classifier.name} at {side} px on {len(test)} test pictures of {classifier.num_classes} classes",
        **circumstances(("torch", "onnxruntime", "openvino", "onnx")),
        "frames_for_ranges": made.num_frames,
        "seconds_to_make": took,
        "megabytes": made.bytes / 1e6,
        "rows": rows,
    }
    Results(given.out).put(**result)
    for row in rows:
        print(f"{row['way']:<20} top-1 {100 * row['top1']:6.2f}   same class {100 * row['same_class']:6.2f} %")


def compared(summary: dict[str, torch.Tensor], truth: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Probabilities [P, C] by way: accuracy, and agreement with float32."""
    plain = summary["float32"]
    for name, probabilities in summary.items():
        first = probabilities.argmax(1)
        yield {
            "way": name,
            "top1": float((first == truth).double().mean()),
            "same_class": float((first == plain.argmax(1)).double().mean()),
            "mean_largest_difference": float((probabilities - plain).abs().amax(1).mean()),
        }


def labelled(folder: Path, class_names: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Pictures below a folder with one folder a class, class by class, with their classes' numbers."""
    found = [(file, number) for number, name in enumerate(class_names) for file in sorted((folder / name).glob("*.*"))]
    if not found:
        raise SystemExit(f"{folder}: has no folders of pictures named {', '.join(class_names[:3])}, ...")
    return found


def picture(path: Path, side: int) -> np.ndarray:
    """uint8 [1, 1, H, W, 3]"""
    return read_image(path, at_least=side)[None, None].copy()


if __name__ == "__main__":
    main()
