"""Streams of real clips: files, banks and a classifier for systems.py.

    python benchmarks/accuracy/streams.py ACTIONS --more-background REALVID --weights WEIGHTS --work RUNS \
        --out benchmarks/results/streams.json

ACTIONS holds `manifest.csv` (path, label, group, split; no label: background) and the clips that it lists. REALVID
holds `manifest.csv` as for banks.py; its sets airtlab and yoga are further background. WEIGHTS holds
`resnet50_imagenet.safetensors`, `mobilenetv2_imagenet.safetensors` and `i3d_kinetics400.safetensors`. The stages, which
`--stage` runs one at a time, and all of which go on after a kill:


- clips: RUNS/clips.csv, RUNS/background.csv. A group with clips in several splits is put into that with most of them.
- streams: RUNS/streams (ten shots) and RUNS/long_streams (sixty), mp4 files.
- banks: RUNS/bank10 and RUNS/key10 (exact and keyframe candidates), RUNS/long32 and RUNS/long100, and RUNS/trimmed,
  the clips that no stream of train and dev shows.
- classifier: classifiers of RUNS/trimmed; of the ResNet-50s the best on its dev clips is kept. It needs no decoder.
- samplers: RUNS/samplers, by the recipes and seeds named. It needs no decoder either.
- measure: the classifier on trimmed test clips, by one frame and by all of a clip; rules, oracles and samplers on
  streams, first on dev, where N is chosen, then once on test.

`systems.py streams RUNS/bank10 --classifier RUNS/classifier --few-clips ...` trains and measures the other methods.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sosampler as so
from sosampler._util.arrays import Indices
from sosampler._util.environment import circumstances
from sosampler._util.hardware import usable_cores
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.datasets.manifest import SPLITS
from sosampler.policies.base import Batch, Policy
from sosampler.policies.learned import probe_outputs
from sosampler.samplers.answer import Evidence
from sosampler.samplers.registry import PROBED
from sosampler.video.candidates import segment_centres

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.accuracy import systems_trials as trials
from benchmarks.accuracy.train_many import Trainers
from benchmarks.common import Results, device, end_with_parent, fast_precision

BACKGROUND_SETS = ("airtlab", "yoga")  # not golfdb: golf is a class of the clips
INPUT_SIZE = 160  # the short side of the clips
CLIP_FRAMES = 8  # stored of each clip
QUALITY = 80  # of the JPEGs in banks, which travel to another machine
RESNET, I3D = "resnet50_imagenet.safetensors", "i3d_kinetics400.safetensors"
MOBILENET = "mobilenetv2_imagenet.safetensors"
_MOST: dict[str, Any] = {"lr": 3e-3, "mixup": 0.2, "ema": 0.99, "epochs": 20, "num_frames": 8}
# Arguments of `train_classifier`, by name. Few clips a class: most or all of the network stays as ImageNet left it.
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "head": {"trainable": "head", "lr": 0.1, "epochs": 20, "num_frames": 8},
    "last layers": {"freeze": 0.75, **_MOST},
    "last layers, longer": {"freeze": 0.75, **_MOST, "epochs": 40},
    "last layers, two frames": {"freeze": 0.75, **_MOST, "epochs": 40, "num_frames": 2},
    "last stage": {"freeze": 0.4, **_MOST},
    "all": {**_MOST},
    "all, two frames": {**_MOST, "epochs": 40, "num_frames": 2},
}
# Networks that see clips, to compare with.
CLIP_CLASSIFIERS: dict[str, dict[str, Any]] = {
    "slowonly": {"classifier": "slowonly_r50", "weights": RESNET, "options": {"stride_on_1x1": True}, **_MOST},
    "i3d": {"classifier": "i3d", "weights": I3D, **_MOST},
}
# name -> (T, kind of candidates, whether of the long streams)
BANKS = {
    "bank10": (10, "exact", False),
    "key10": (10, "keyframe", False),
    "long32": (32, "exact", True),
    "long100": (100, "exact", True),
}
TRIMMED = "trimmed"
OWN = "default"
RECIPES = (OWN, "authors", "paper")
ANSWERS = ("mean", "weighted", "fused", "probed", "answer")  # the last one is the sampler's own, without the classifier
TOLERANCES = (0.0, 0.0025, 0.01, 0.02, 0.05)  # of num_frames="auto"
LONG_NUM_FRAMES, LONG_ORACLES = [1, 2, 4, 8, 16], ("class-frames", "semi-optimal")
BOOTSTRAP = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("actions", type=Path)
    parser.add_argument("--more-background", type=Path, default=None, help="A folder as REALVID.")
    parser.add_argument("--weights", type=Path, required=True, help="A folder as WEIGHTS.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--counts", type=int, nargs=3, default=[2000, 500, 1500], help="Streams: train, dev, test.")
    parser.add_argument("--long-count", type=int, default=300, help="Long streams, all test.")
    parser.add_argument("--classifiers", nargs="+", default=None, help="Some of those listed here; default: all.")
    parser.add_argument("--classifier-epochs", type=int, default=None, help="Default: those of each trial.")
    parser.add_argument("--banks", nargs="+", choices=[*BANKS, TRIMMED], default=[*BANKS, TRIMMED])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--parallel", type=int, default=1, help="Classifiers or samplers trained at a time.")
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


# ---- banks


def make_banks(arguments: argparse.Namespace, results: Results) -> None:
    for name in arguments.banks:
        begin = time.perf_counter()
        if name == TRIMMED:
            manifest, settings = "streams/classifier.csv", {"num_candidates": CLIP_FRAMES}
        else:
            count, kind, is_long = BANKS[name]
            manifest = f"{'long_streams' if is_long else 'streams'}/manifest.csv"
            settings = {"num_candidates": count, "candidates": kind}
        options: dict[str, Any] = {"workers": arguments.workers, "quality": QUALITY, **settings}
        so.prepare(arguments.work / manifest, out=arguments.work / name, **options)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)


# ---- classifiers


def train_classifiers(arguments: argparse.Namespace, results: Results) -> None:
    every = CLASSIFIERS | CLIP_CLASSIFIERS
    if arguments.classifiers is not None:
        every = {name: every[name] for name in arguments.classifiers}
    with ProcessPoolExecutor(arguments.parallel, get_context("spawn"), end_with_parent) as processes:
        tasks = {name: processes.submit(train_one, arguments, name, settings) for name, settings in every.items()}
        rows = {name: task.result() for name, task in tasks.items()}
    for name, row in rows.items():
        print(f"{name}: {row}", flush=True)
    rows = results.data.get("classifiers", {}) | rows
    best = max((name for name in CLASSIFIERS if name in rows), key=lambda name: rows[name]["dev"])
    target = arguments.work / "classifier"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder_of(arguments, best), target)
    results.put(classifiers=rows, classifier=best)


def folder_of(arguments: argparse.Namespace, name: str) -> Path:
    folder: Path = arguments.work / "classifiers" / name.replace(",", "").replace(" ", "_")
    return folder


def train_one(arguments: argparse.Namespace, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train a classifier, and measure it on the dev clips: frames by themselves, and whole clips."""
    begin = time.perf_counter()
    options = {"classifier": "resnet50_v1", "weights": RESNET, **settings}
    if arguments.classifier_epochs is not None:
        options["epochs"] = arguments.classifier_epochs
    options["weights"] = arguments.weights / options["weights"]
    options["workers"] = max(1, usable_cores() // arguments.parallel)
    bank, out = arguments.work / TRIMMED, folder_of(arguments, name)
    trained = so.train_classifier(bank, out=out, input_size=INPUT_SIZE, precision=fast_precision(), **options)
    seconds = round(time.perf_counter() - begin, 1)
    row = {
        **settings,
        "sizes": trained.result["sizes"],
        "seconds": seconds,
        **accuracies(trained.classifier, bank, "dev"),
    }
    # A sampler chooses single frames, so a classifier is judged by frames and clips alike.
    row["dev"] = (row["frames"] + row["clips"]) / 2
    return row


def accuracies(classifier: Any, path: Path, split: str) -> dict[str, float]:
    """Top-1 of a split of the trimmed clips: of single frames, and of whole clips."""
    bank = so.Bank(path).split(split)
    classifier.to(device())
    frames, clips = [], []
    for row, item in enumerate(bank.items):
        pixels = torch.from_numpy(bank[row].frames())[None].permute(0, 1, 4, 2, 3)  # [1, T, 3, H, W]
        if pixels.shape[1] < CLIP_FRAMES:  # a short video has fewer frames
            pixels = pixels[:, np.linspace(0, pixels.shape[1] - 1, CLIP_FRAMES).round().astype(int)]
        if isinstance(classifier, PooledClassifier):  # the network runs once for both
            logits = classifier.frame_features(pixels)
            of_clip, of_frames = classifier.pool(logits), classifier.pool(logits[:, :, None])
        else:
            of_clip = classifier.clip_probs(pixels, torch.linspace(0, 1, pixels.shape[1])[None])
            of_frames = classifier.frame_probs(pixels)
        clips.append(int(of_clip.argmax()) in item.labels)
        of_frames = of_frames[0].argmax(-1).tolist()
        frames.append(np.mean([label in item.labels for label in of_frames]))
    return {"frames": float(np.mean(frames)), "clips": float(np.mean(clips))}


# ---- samplers


def train_samplers(arguments: argparse.Namespace, results: Results) -> None:
    """Every recipe with every seed, the first seeds first."""
    classifier = so.create_classifier(arguments.work / "classifier", device=device())
    bank = arguments.work / "bank10"
    teach(bank, classifier)
    tasks = {
        f"{recipe}#{seed}": {
            "bank": str(bank),
            "out": str(sampler_folder(arguments, recipe, seed)),
            "recipe": recipe,
            "seed": seed,
            "classifier": classifier.fingerprint(),
            "weights": str(arguments.weights / MOBILENET),
        }
        for seed in arguments.seeds
        for recipe in arguments.recipes
        if not is_trained(sampler_folder(arguments, recipe, seed))
    }
    with Trainers(arguments.parallel, arguments.work / "logs") as trainers:
        replies = trainers.train(tasks, lambda name, reply: print(f"{name}: {reply['seconds']:.0f} s", flush=True))
    if failed := {name: reply["failed"] for name, reply in replies.items() if "failed" in reply}:
        raise SystemExit("; ".join(f"{name}: {text}" for name, text in failed.items()))


def teach(bank: Path, classifier: Any) -> None:
    """Run the classifier on the frames that have no outputs or features yet."""
    classifier.precision = fast_precision()
    so.add_teacher(bank, classifier, probe_features=True)


def sampler_folder(arguments: argparse.Namespace, recipe: str, seed: int) -> Path:
    folder: Path = arguments.work / "samplers" / f"{recipe}-{seed}"
    return folder


def is_trained(folder: Path) -> bool:
    return (folder / "result.json").exists()


def trained_samplers(arguments: argparse.Namespace) -> dict[str, str]:
    """Folders by row. Those that are not trained are printed and not measured."""
    wanted = {(recipe, seed): sampler_folder(arguments, recipe, seed) for recipe in RECIPES for seed in arguments.seeds}
    missing = [folder.name for folder in wanted.values() if not is_trained(folder)]
    if missing:
        print(f"not trained, and so not measured: {', '.join(missing)}", flush=True)
    return {f"{recipe}#{seed}": str(folder) for (recipe, seed), folder in wanted.items() if is_trained(folder)}


# ---- measuring


class UniformProbe(Policy):
    """Evenly spread frames, answered by a sampler's probe alone: what its class layers give without a choice."""

    name, needs, answer = "uniform, probe", frozenset({"frames"}), PROBED

    def __init__(self, sampler: Any) -> None:
        self.probe, self.scale = sampler.probe, sampler.about["probe"]["scale"]

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        return np.stack([segment_centres(count, num_frames) for count in batch.counts.tolist()])

    def gmacs(self, num_candidates: int) -> float:
        return num_candidates * float(self.probe.weight.numel()) / 1e9

    def evidence(self, batch: Batch) -> Evidence:
        return Evidence(np.ones(batch.mask.shape), None, batch.mask)

    def frame_logits(self, batch: Batch) -> np.ndarray:
        outputs = probe_outputs(self.probe, batch.teacher.probed_features())
        outputs[..., :-1] += self.scale * super().frame_logits(batch)
        return outputs

    def combined(self, evidence: Evidence, logits: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """Return softmax(sum_t log(1 - r_t + r_t p_t(c) C)), as the probe has learned it."""
        outputs = torch.from_numpy(logits)
        chance = outputs.shape[2] - 1
        shown, hidden = (torch.nn.functional.logsigmoid(sign * outputs[..., -1:]) for sign in (1, -1))
        each = torch.logaddexp(hidden, shown + outputs[..., :-1].log_softmax(-1) + np.log(chance))
        return (each * torch.from_numpy(seen[..., None])).sum(1).softmax(-1).numpy()


def measure(arguments: argparse.Namespace, results: Results) -> None:
    found, chosen = results.needed("classifiers", "classifier"), results["classifier"]
    precision = fast_precision()
    classifier = so.create_classifier(arguments.work / "classifier", device=device())
    classifier.precision = precision
    if "test" not in found[chosen]:
        found[chosen]["test"] = accuracies(classifier, arguments.work / TRIMMED, "test")
        results.put(classifiers=found)
    # One object each, so that its outputs are computed once for all of its rows.
    samplers = {name: so.load_sampler(folder, device=device()) for name, folder in trained_samplers(arguments).items()}
    for sampler in samplers.values():
        sampler.precision = precision
    known = fingerprints(samplers)
    own = [name for name in samplers if name.startswith(f"{OWN}#")]
    answers = {f"{name}+{way}": samplers[name] for name in own for way in ANSWERS}
    spread = {f"{name}+{method}": samplers[name] for name in own for method in trials.METHODS}
    plain = dict.fromkeys((*trials.RULES, *trials.SELECTORS, "general"))
    policies = {name: name for name in plain} | samplers | answers | spread
    if (
        own and samplers[own[0]].probe is not None
    ):  # the probe does not depend on the sampler, so it is the same for all
        policies |= {UniformProbe.name: UniformProbe(samplers[own[0]])}
    for split in ("dev", "test"):
        if results.data.get(split, {}).get("samplers") == known or "bank10" not in arguments.banks:
            continue
        oracles = {name: name for name in trials.ORACLES}
        found = measured(arguments, classifier, "bank10", split, policies | oracles, list(trials.NUM_FRAMES))
        rows = rows_of(found)
        autos = {name: samplers[name] for name in own}
        if autos:
            rows += rows_of(
                measured(arguments, classifier, "bank10", split, autos, ["auto"], auto_tolerance=TOLERANCES)
            )
        classes = by_class(found, ["uniform", "all", "class-frames", *own])
        results.put(**{split: {"rows": rows, "samplers": known, "by_class": classes}})
    if "test" in results.data:
        dev, test = (trials.means(results[split]["rows"], "top1") for split in ("dev", "test"))
        budget = trials.budget_of(dev)
        results.put(budget_gmacs=budget, table=test, at_budget=trials.at_budget(dev, test, "top1", budget))
    others = results.data.get("other_banks", {})
    for name in arguments.banks:
        if name in BANKS and name != "bank10" and others.get(name, {}).get("samplers") != known:
            few = {name: name for name in (*trials.RULES, *LONG_ORACLES)} | samplers
            counts = list(trials.NUM_FRAMES) if BANKS[name][0] == 10 else LONG_NUM_FRAMES
            rows = rows_of(measured(arguments, classifier, name, "test", few, counts))
            others[name] = {"table": trials.means(rows, "top1"), "rows": rows, "samplers": known}
            results.put(other_banks=others)


def measured(
    arguments: argparse.Namespace,
    classifier: Any,
    bank: str,
    split: str,
    policies: dict[str, Any],
    num_frames: list[Any],
    **options: Any,
) -> so.Evaluation:
    """All policies on one split of a bank."""
    begin = time.perf_counter()
    opened = so.Bank(arguments.work / bank)
    known = opened.teachers  # they may have come from another machine
    if classifier.fingerprint() not in known or opened.features_of_teacher(opened.teacher(classifier)) is None:
        teach(arguments.work / bank, classifier)
    result = so.evaluate(
        arguments.work / bank,
        policies,
        num_frames=num_frames,
        num_candidates=BANKS[bank][0],
        classifier=classifier,
        split=split,
        device=device(),
        bootstrap=BOOTSTRAP if split == "test" else 0,  # dev only chooses
        **options,
    )
    print(f"{bank}, {split}: {len(policies)} policies, {time.perf_counter() - begin:.0f} s", flush=True)
    return result


def rows_of(result: so.Evaluation) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result.to_dict()["rows"]
    return rows


def by_class(result: so.Evaluation, policies: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the share of the videos of each class that are right, by policy@N; of samplers the mean over seeds."""
    assert result.per_video is not None
    rows = result.per_video.bank.rows
    labels = np.array([rows[position].item.labels[0] for position in result.per_video.positions])
    hits: dict[str, list[np.ndarray]] = {}
    for cell, predictions in result.per_video.predictions.items():
        if cell.policy in policies:
            name = f"{trials.read_policy(cell.policy).name}@{cell.num_frames}"
            hits.setdefault(name, []).append(predictions.right)
    return {
        label: {
            name: float(np.mean([right[labels == index].mean() for right in seeds])) for name, seeds in hits.items()
        }
        for index, label in enumerate(result.per_video.bank.classes)
        if (labels == index).any()
    }


def fingerprints(samplers: dict[str, Any]) -> dict[str, str]:
    return {name: sampler.fingerprint() for name, sampler in samplers.items()}


STAGES: dict[str, Callable[[argparse.Namespace, Results], None]] = {
    "clips": write_clips,
    "streams": make_streams,
    "banks": make_banks,
    "classifier": train_classifiers,
    "samplers": train_samplers,
    "measure": measure,
}

if __name__ == "__main__":
    main()
