"""Samplers against rules and oracles on reels of pictures: top-1, fidelity to the optimal policy, share of the gain.

    python benchmarks/accuracy/samplers.py PICTURES --classifier-weights RESNET50 --sampler-weights MOBILENETV2 \
        --work RUNS --out benchmarks/results/samplers.json

PICTURES has the layout of sports22 (train/, test/ with one folder a class, distractors/). A ResNet-50 is fine-tuned on
the first half of the training pictures; reels for the samplers show the other half, reels for testing show the test
pictures. Every recipe is trained with each seed on the reels of ten candidates; the same samplers then choose from
longer reels. Killed and started again, it goes on with what lies in RUNS. `--stage` does one step alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler.reels.make import reel_recipe
from sosampler.reels.recipe import SPORTS22

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the import below

from benchmarks.common import fast_precision

# name -> the options of `sosampler train`; the first three are the recipes of the package
RECIPES: dict[str, list[str]] = {
    "default": ["--recipe", "default"],
    "authors": ["--recipe", "authors"],
    "paper": ["--recipe", "paper"],
}
# One thing changed each, one seed
VARIANTS: dict[str, list[str]] = {
    "authors, label confidence": ["--recipe", "authors", "--set", "target=label"],
    "default, no distillation": ["--set", "distill=0"],
    "default, pairwise logistic": [
        "--recipe",
        "default",
        "--set",
        "loss=logistic",
        "--set",
        "target_space=probability",
    ],
    "default, max confidence": ["--set", "target=max"],
    "default, shift 10": ["--set", "shift=10"],
}
RULES_AND_ORACLES = (
    "uniform",
    "random",
    "all",
    "semi-optimal-max",
    "attainable",
    "class-frames",
    "semi-optimal",
    "optimal",
)
NUM_FRAMES = (1, 2, 3, 4, 6, 8)
STAGES = ("classifier", "reels", "teacher", "train", "evaluate")  # the first two may run side by side
LONG = ((8, 30), (16, 60), (32, 100))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--classifier-weights", type=Path, required=True)
    parser.add_argument("--sampler-weights", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=3, help="Samplers that are trained at a time.")
    parser.add_argument("--counts", type=int, nargs=3, default=[2700, 300, 3000], help="Reels: train, dev, test.")
    parser.add_argument("--long-count", type=int, default=500, help="Reels of each longer kind to test on.")
    parser.add_argument("--long-train", type=int, default=300, help="And to train on, for systems.py; 0 for none.")
    parser.add_argument(
        "--tune",
        type=int,
        nargs=2,
        default=[2000, 1000],
        help="Reels of tune10, for systems.py: train, dev; 0 0: none.",
    )
    parser.add_argument("--classifier-epochs", type=int, default=12, help="More, and it is sure of distractors too.")
    parser.add_argument("--epochs", type=int, default=None, help="Of the samplers; default: their recipes'.")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--variants", action="store_true", help="Train the variants too, with the first seed.")
    parser.add_argument("--candidates", type=int, nargs="+", default=[10, 30, 60, 100], help="T: 10, 30, 60, 100.")
    parser.add_argument("--trained-on", default=None, help="The device of the trainings, where RUNS came from another.")
    parser.add_argument("--stage", choices=STAGES, default=None)
    arguments = parser.parse_args()
    stages: dict[str, Callable[[argparse.Namespace], None]] = dict(
        zip(STAGES, (train_classifier, make_reels, ask_classifier, train_samplers, evaluate), strict=True)
    )
    for name, stage in stages.items():
        if arguments.stage in (None, name):
            begin = time.perf_counter()
            stage(arguments)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)


def bank_folders(arguments: argparse.Namespace) -> dict[int, Path]:
    """The bank of each wanted T."""
    return {count: arguments.work / f"bank{count}" for count in arguments.candidates}


def train_classifier(arguments: argparse.Namespace) -> None:
    trained = so.train_classifier(
        classifier_pictures(arguments.pictures, arguments.work / "classifier_pictures"),
        "resnet50_v1",
        out=arguments.work / "classifier",
        weights=arguments.classifier_weights,
        input_size=176,
        epochs=arguments.classifier_epochs,
        precision=fast_precision(),
    )
    print(f"classifier: {trained.result}", flush=True)


def make_reels(arguments: argparse.Namespace) -> None:
    for count, path in bank_folders(arguments).items():
        begin = time.perf_counter()
        so.make_reels(
            arguments.pictures,
            path,
            preset="sports22",
            recipe={"num_shots": count, "num_candidates": count},
            counts=dict(zip(("train", "dev", "test"), arguments.counts, strict=True))
            if count == 10
            else {"test": arguments.long_count} | ({"train": arguments.long_train} if arguments.long_train else {}),
        )
        print(f"reels of {count}: {time.perf_counter() - begin:.0f} s", flush=True)
    if 10 in arguments.candidates and all(arguments.tune):
        so.make_reels(
            tuning_pictures(arguments.pictures, arguments.work / "tuning_pictures"),
            arguments.work / "tune10",
            preset=None,
            recipe=reel_recipe("sports22", {"num_shots": 10, "num_candidates": 10}),
            counts=dict(zip(("train", "dev"), arguments.tune, strict=True)),
        )


def ask_classifier(arguments: argparse.Namespace) -> None:
    """What the classifier says about every frame goes into the banks."""
    classifier = so.create_classifier(arguments.work / "classifier")
    if torch.cuda.is_available():
        classifier.to("cuda")
        classifier.precision = "bfloat16"
    for path in bank_folders(arguments).values():
        so.add_teacher(path, classifier)


def classifier_pictures(pictures: Path, folder: Path) -> Path:
    """Links to the part of the training pictures that the classifier may see."""
    part = SPORTS22["classifier"]
    for kind in _folders(pictures / part.folder):
        _link(sorted(kind.iterdir())[part.start : part.stop], folder / "train" / kind.name)
    return folder


def tuning_pictures(pictures: Path, folder: Path, reel_set: str = "train") -> Path:
    """Links to the pictures that samplers (or "classifier") may see, one in five for dev, which shares none with train.

    Distractors are divided likewise.
    """
    part = SPORTS22[reel_set]
    kinds = {kind.name: sorted(kind.iterdir())[part.start : part.stop] for kind in _folders(pictures / part.folder)}
    kinds["distractors"] = sorted((pictures / part.distractors).iterdir())
    for name, found in kinds.items():
        cut = len(found) - len(found) // 5
        for split, some in (("train", found[:cut]), ("dev", found[cut:])):
            _link(some, folder / (f"distractors/{split}" if name == "distractors" else f"{split}/{name}"))
    return folder


def _folders(path: Path) -> list[Path]:
    return sorted(one for one in path.iterdir() if one.is_dir())


def _link(pictures: list[Path], place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        link = place / picture.name
        if not link.exists():
            link.symlink_to(picture.resolve())


def runs_of(arguments: argparse.Namespace) -> dict[tuple[str, int], list[str]]:
    """Options of `sosampler train` by (name, seed)."""
    chosen = {name: RECIPES[name] for name in arguments.recipes}
    wanted = {(name, seed): options for name, options in chosen.items() for seed in arguments.seeds}
    if arguments.variants:
        wanted |= {(name, arguments.seeds[0]): options for name, options in VARIANTS.items()}
    return wanted


def finished_runs(arguments: argparse.Namespace) -> dict[tuple[str, int], Path]:
    """Folders by (name, seed). Unfinished runs are printed and not measured."""
    wanted = {run: run_folder(arguments, *run) for run in runs_of(arguments)}
    missing = [folder.name for folder in wanted.values() if not (folder / "result.json").exists()]
    if missing:
        print(f"not trained, and so not measured: {', '.join(missing)}", flush=True)
    return {run: folder for run, folder in wanted.items() if folder.name not in missing}


def run_folder(arguments: argparse.Namespace, name: str, seed: int) -> Path:
    folder: Path = arguments.work / "samplers" / f"{name.replace(',', '').replace(' ', '-')}-{seed}"
    return folder


def train_samplers(arguments: argparse.Namespace) -> None:
    bank = arguments.work / "bank10"

    def one(run: tuple[tuple[str, int], list[str]]) -> None:
        (name, seed), options = run
        out = run_folder(arguments, name, seed)
        more = [] if arguments.epochs is None else ["--epochs", str(arguments.epochs)]
        begin = time.perf_counter()
        command = [sys.executable, "-m", "sosampler", "train", str(bank), "--out", str(out), "--seed", str(seed)]
        command += [*options, "--weights", str(arguments.sampler_weights), *more]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{name}, seed {seed}: {done.stderr.strip()[-2000:]}")
        print(f"{name}, seed {seed}: {time.perf_counter() - begin:.0f} s", flush=True)

    with ThreadPoolExecutor(arguments.parallel) as pool:
        list(pool.map(one, runs_of(arguments).items()))


def evaluate(arguments: argparse.Namespace) -> None:
    samplers = {}
    finished = finished_runs(arguments)
    for (name, seed), folder in finished.items():
        sampler = so.load_sampler(folder)
        if torch.cuda.is_available():
            sampler.to("cuda")
            sampler.precision = "bfloat16"
        samplers[f"{name}#{seed}"] = sampler
    for seed in (seed for name, seed in finished if name == "default"):  # the same weights without the belief
        plain = so.SOSampler.from_pretrained(run_folder(arguments, "default", seed), scoring={})
        plain.precision = samplers[f"default#{seed}"].precision
        samplers[f"default, importance alone#{seed}"] = plain.to(samplers[f"default#{seed}"].device)
    classifier = so.create_classifier(arguments.work / "classifier")
    folders = bank_folders(arguments)
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for pairs in (tuple((wanted, 10) for wanted in NUM_FRAMES), *((pair,) for pair in LONG)):
        count = pairs[0][1]
        if count not in folders:
            continue
        chosen = {name: sampler for name, sampler in samplers.items() if count == 10 or name.split("#")[0] in RECIPES}
        begin = time.perf_counter()
        found = so.evaluate(
            folders[count],
            {name: name for name in RULES_AND_ORACLES} | chosen,
            pairs=pairs,
            classifier=classifier,
            split="test",
            device="cpu",  # the arithmetic; samplers stay where they are
            bootstrap=500,  # what is published are means over seeds
        ).to_dict()
        print(f"T={count}: {time.perf_counter() - begin:.0f} s", flush=True)
        rows += found["rows"]
        facts[f"T={count}"] = {key: value for key, value in found.items() if key not in ("rows", "bank")}
        write_result(arguments, rows, facts)
    for line in table(rows):
        print(json.dumps(line), flush=True)


def write_result(arguments: argparse.Namespace, rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    result = {
        "what": "samplers, rules and oracles on reels of sports22 pictures with a fine-tuned ResNet-50 at 176 px",
        **circumstances(("torch", "torchvision", "timm", "numpy", "scikit-learn")),
        "device": device_of(arguments),
        "classifier": json.loads((arguments.work / "classifier" / "result.json").read_text()),
        "seeds": arguments.seeds,
        "reels": {
            "train, dev, test": arguments.counts,
            "longer": arguments.long_count,
            "longer, train": arguments.long_train,
        },
        "epoch_seconds": {
            f"{name}#{seed}": epoch_seconds(folder) for (name, seed), folder in finished_runs(arguments).items()
        },
        "parallel": arguments.parallel,
        "table": table(rows),
        "evaluations": facts,
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def device_of(arguments: argparse.Namespace) -> str:
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return here if arguments.trained_on is None else f"{arguments.trained_on} (training), {here} (measuring)"


def epoch_seconds(folder: Path) -> float:
    """Seconds of all epochs of a run, with evaluation, without starting and decoding; a kill does not shorten them."""
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return round(sum(float(json.loads(line)["seconds"]) for line in lines), 1)


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a policy, N and T: means over seeds, and their standard deviation where there are several."""
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["policy"].split("#")[0], row["num_frames"], row["num_candidates"])
        groups.setdefault(key, []).append(row)
    lines = []
    for (policy, num_frames, num_candidates), found in groups.items():
        line: dict[str, Any] = {"policy": policy, "num_frames": num_frames, "num_candidates": num_candidates}
        line["seeds"] = len(found)
        for name in ("top1", "mAP", "fidelity", "recovered", "gmacs"):
            values = [row[name] for row in found if row[name] is not None]
            line[name] = round(statistics.mean(values), 4) if values else None
            if len(values) > 1 and name != "gmacs":
                line[f"{name}_sd"] = round(statistics.stdev(values), 4)
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
