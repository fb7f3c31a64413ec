"""Streams of real clips: files, a classifier, and banks for systems.py.

    python benchmarks/accuracy/streams.py ACTIONS --more-background REALVID --classifier-weights RESNET50 --work RUNS \
        --out benchmarks/results/streams.json

ACTIONS holds `manifest.csv` (path, label, group, split; no label: background) and the clips that it lists. REALVID
holds `manifest.csv` as for banks.py; its sets airtlab and yoga are further background. The stages, which `--stage` runs
one at a time, and all of which go on after a kill:

- clips: RUNS/clips.csv, RUNS/background.csv. A group with clips in several splits is put into that with most of them.
- streams: RUNS/streams (ten shots) and RUNS/long_streams (sixty), mp4 files.
- classifier: a ResNet-50 on clips that no stream of train and dev shows; of the trials below the best on its dev clips.
- banks: RUNS/bank10 and RUNS/key10 (exact and keyframe candidates), RUNS/long32 and RUNS/long100, RUNS/trimmed (the
  test clips themselves), each with the classifier's answers.
- measure: the classifier on trimmed test clips, by one frame and by all of a clip; rules and oracles on streams.

`systems.py streams RUNS/bank10 --classifier RUNS/classifier ...` then trains and measures all methods.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler.datasets.manifest import SPLITS

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.accuracy.systems_trials import NUM_FRAMES, ORACLES, RULES
from benchmarks.common import Results

BACKGROUND_SETS = ("airtlab", "yoga")  # not golfdb: golf is a class of the clips
INPUT_SIZE = 160  # the short side of the clips
CLIP_FRAMES = 8
# Settings of `train_classifier`, by name. Few clips a class: most or all of the network stays as ImageNet left it.
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "head": {"trainable": "head", "lr": 0.1, "epochs": 20},
    "last layers": {"freeze": 0.75, "lr": 3e-3, "mixup": 0.2, "ema": 0.99, "epochs": 20},
    "all": {"lr": 3e-3, "mixup": 0.2, "ema": 0.99, "epochs": 20},
}
# name -> (T, kind of candidates, whether of the long streams)
BANKS = {
    "bank10": (10, "exact", False),
    "key10": (10, "keyframe", False),
    "long32": (32, "exact", True),
    "long100": (100, "exact", True),
}
RULES_AND_ORACLES = (*RULES, *ORACLES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("actions", type=Path)
    parser.add_argument("--more-background", type=Path, default=None, help="A folder as REALVID.")
    parser.add_argument("--classifier-weights", type=Path, required=True, help="Of ResNet-50, from ImageNet.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--counts", type=int, nargs=3, default=[2000, 500, 1500], help="Streams: train, dev, test.")
    parser.add_argument("--long-count", type=int, default=300, help="Long streams, all test.")
    parser.add_argument("--classifier-epochs", type=int, default=None, help="Default: those of each trial.")
    parser.add_argument("--banks", nargs="+", choices=list(BANKS), default=list(BANKS))
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--stage", choices=list(STAGES), default=None)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.out)
    for name, stage in STAGES.items():
        if arguments.stage in (None, name):
            begin = time.perf_counter()
            stage(arguments, results)
            results.took(name, time.perf_counter() - begin)
            print(f"{name}: {results['seconds'][name][-1]:.0f} s", flush=True)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---- clips and streams


def write_clips(arguments: argparse.Namespace, results: Results) -> None:
    rows = read_rows(arguments.actions)
    splits = one_split_a_group((row["group"], row["split"]) for row in rows)
    clips = [(str(row["path"]), row["label"], row["group"], splits[row["group"]]) for row in rows]
    write_rows(arguments.work / "clips.csv", ("path", "label", "group", "split"), clips)
    more = [] if arguments.more_background is None else read_rows(arguments.more_background)
    background = [(str(row["path"]), f"{row['set']}-{row['group']}") for row in more if row["set"] in BACKGROUND_SETS]
    write_rows(arguments.work / "background.csv", ("path", "group"), background)
    moved = sum(row["split"] != splits[row["group"]] for row in rows)
    results.put(
        what="streams of real clips, and a classifier for them",
        **circumstances(("torch", "torchvision", "timm", "numpy", "av")),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        clips={split: sum(bool(label) and split == other for _, label, _, other in clips) for split in SPLITS},
        num_classes=len({label for _, label, _, _ in clips if label}),
        background=len(background) + sum(not label for _, label, _, _ in clips),
        moved_to_the_split_of_their_group=moved,
    )


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of a manifest, with whole paths."""
    with (folder / "manifest.csv").open(newline="", encoding="utf-8") as lines:
        return [{**row, "path": (folder / row["path"]).resolve()} for row in csv.DictReader(lines)]


def write_rows(path: Path, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as lines:
        csv.writer(lines).writerows([header, *rows])


def one_split_a_group(rows: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return for each group the split with most of its clips; of equal ones the first of train, dev and test.

    >>> one_split_a_group([("a", "test"), ("a", "train"), ("a", "test"), ("b", "test"), ("b", "train")])
    {'a': 'test', 'b': 'train'}
    """
    counts: dict[str, Counter[str]] = {}
    for group, split in rows:
        counts.setdefault(group, Counter())[split] += 1
    return {group: max(SPLITS, key=lambda split: counted[split]) for group, counted in counts.items()}


def make_streams(arguments: argparse.Namespace, results: Results) -> None:
    counts = dict(zip(SPLITS, arguments.counts, strict=True))
    for preset, folder, wanted in (
        ("streams", "streams", counts),
        ("long-streams", "long_streams", {"train": 0, "dev": 0, "test": arguments.long_count}),
    ):
        if any(wanted.values()):
            begin = time.perf_counter()
            so.make_reels(
                arguments.work / "clips.csv",
                arguments.work / folder,
                to="mp4",
                preset=preset,
                counts=wanted,
                background=arguments.work / "background.csv" if arguments.more_background else None,
                workers=arguments.workers,
                say=lambda text: print(text, flush=True),
            )
            print(f"{folder}: {time.perf_counter() - begin:.0f} s", flush=True)
    results.put(streams=counts, long_streams=arguments.long_count)


# ---- the classifier


def train_classifier(arguments: argparse.Namespace, results: Results) -> None:
    found: dict[str, Any] = {}
    for name, settings in CLASSIFIERS.items():
        if arguments.classifier_epochs is not None:
            settings = settings | {"epochs": arguments.classifier_epochs}
        begin = time.perf_counter()
        trained = so.train_classifier(
            arguments.work / "streams" / "classifier.csv",
            "resnet50_v1",
            out=arguments.work / "classifiers" / name.replace(" ", "_"),
            weights=arguments.classifier_weights,
            input_size=INPUT_SIZE,
            num_frames=CLIP_FRAMES,
            **settings,
        )
        found[name] = {**settings, "dev": trained.result["dev"], "sizes": trained.result["sizes"]}
        found[name]["seconds"] = round(time.perf_counter() - begin, 1)
        print(f"{name}: {found[name]}", flush=True)
    best = max(found, key=lambda name: float(found[name]["dev"]))
    target = arguments.work / "classifier"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(arguments.work / "classifiers" / best.replace(" ", "_"), target)
    results.put(classifiers=found, classifier=best)


# ---- banks


def make_banks(arguments: argparse.Namespace, results: Results) -> None:
    classifier = so.create_classifier(arguments.work / "classifier", device=device())
    sources = {
        name: ("long_streams" if is_long else "streams", {"num_candidates": count, "candidates": kind})
        for name, (count, kind, is_long) in BANKS.items()
        if name in arguments.banks
    }
    for name, (folder, settings) in sources.items():
        begin = time.perf_counter()
        so.prepare(
            arguments.work / folder / "manifest.csv",
            classifier,
            arguments.work / name,
            workers=arguments.workers,
            **settings,
        )
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    trimmed = arguments.work / "streams" / "classifier.csv"
    so.prepare(trimmed, classifier, arguments.work / "trimmed", num_candidates=CLIP_FRAMES, workers=arguments.workers)


def measure(arguments: argparse.Namespace, results: Results) -> None:
    classifier = arguments.work / "classifier"
    trimmed = so.evaluate(
        arguments.work / "trimmed",
        ["uniform", "all"],
        pairs=[(1, CLIP_FRAMES)],
        classifier=classifier,
        split="test",
        device=device(),
    ).to_dict()
    rows: dict[str, Any] = {}
    for name in arguments.banks:
        count, _, _ = BANKS[name]
        pairs = [(wanted, count) for wanted in (NUM_FRAMES if count == 10 else (4, 8, 16))]
        found = so.evaluate(
            arguments.work / name, RULES_AND_ORACLES, pairs=pairs, classifier=classifier, split="test", device=device()
        )
        rows[name] = found.to_dict()["rows"]
        print(name, found.table(), sep="\n", flush=True)
    results.put(trimmed=trimmed["rows"], rules=rows)


STAGES: dict[str, Callable[[argparse.Namespace, Results], None]] = {
    "clips": write_clips,
    "streams": make_streams,
    "classifier": train_classifier,
    "banks": make_banks,
    "measure": measure,
}

if __name__ == "__main__":
    main()
