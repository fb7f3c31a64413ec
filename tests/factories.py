"""Make videos, banks, classifiers and samplers for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from math import comb
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import sosampler as so
from sosampler import wrap_classifier
from sosampler._util.files import write_text
from sosampler.bank.bank import Bank
from sosampler.bank.format import FEATURES, VERSION, features_schema, tables_batch, teacher_schema
from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.bank.prepare import prepare
from sosampler.bank.writer import writing_shard
from sosampler.baselines.base import Baseline, BaselineOutput, Views, save_baseline
from sosampler.baselines.registry import baseline_class, create_baseline, list_systems
from sosampler.classifiers.base import Classifier
from sosampler.errors import InvalidArgument
from sosampler.samplers.backbones import create_backbone
from sosampler.samplers.export import Exported, export_sampler
from sosampler.samplers.sosampler import SOSampler
from sosampler.video.candidates import segment_centres, uniform_positions
from sosampler.video.synthetic import numbered_video

# ---- videos and small classifiers

# Frames of each video; the third is broken, the fourth has another shape, the fifth is short.
LENGTHS = {"a.mp4": 90, "b.mp4": 64, "broken.mp4": 0, "wide.mp4": 50, "short.mp4": 7, "c.mp4": 100}


def make_videos(folder: Path) -> Path:
    """Write the videos and `m.csv`; returns the folder."""
    for name, frames in LENGTHS.items():
        if frames:
            numbered_video(folder / name, num_frames=frames, width=256 if name == "wide.mp4" else 192, height=128)
    (folder / "broken.mp4").write_bytes(b"this is not a video")
    lines = [f"{name},{('x', 'y')[place % 2]},{'dev' if place > 3 else 'train'}" for place, name in enumerate(LENGTHS)]
    (folder / "m.csv").write_text("path,label,split\n" + "\n".join(lines) + "\n")
    return folder


def small_net(seed: int = 0, classes: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, classes))
    return nn.Sequential(*layers)


def pooled(seed: int = 0, **options: Any) -> Classifier:
    return wrap_classifier(small_net(seed), input_size=64, resize=72, layout="BCHW", **options)


class Told:
    """Not of this package: gives back where each frame lies as its first probability."""

    name, class_names, preprocessing = "told", ("x", "y"), None

    def frame_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        return torch.stack([positions, 1 - positions], -1)

    def fingerprint(self) -> str:
        return "feedfeedfeedfeed"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(videos: Path, out: Path, classifier: Any = None, **options: Any) -> Bank:
    options = {"num_candidates": 12, "videos_per_shard": 2, "workers": 0} | options
    return prepare(videos / "m.csv", classifier, out, **options)


# ---- banks from arrays

CLASSES = ("run", "jump", "swim")


def picture(number: int, height: int = 32, width: int = 48) -> np.ndarray:
    """Smooth, so that JPEG keeps it."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([127 + 100 * np.sin((x + number * 7 * (c + 1)) / 17 + y / 23) for c in range(3)], -1).astype(
        np.uint8
    )


def frames(number: int, count: int, **size: int) -> np.ndarray:
    return np.stack([picture(100 * number + frame, **size) for frame in range(count)])


def entries(count: int = 10) -> list[FrameEntry]:
    return [
        FrameEntry(
            id=f"v{number}",
            labels=(number % 3,),
            frames=frames(number, 3 + number),
            pts_seconds=np.arange(3 + number) / 2,
            split=("train", "train", "dev", "test")[number % 4],
            group=f"g{number}",
        )
        for number in range(count)
    ]


def teacher_by_hand(bank: Bank, name: str = "f" * 16, views: int = 1, seed: int = 0) -> list[np.ndarray]:
    """A teacher made by hand, without torch: probabilities [T, 3] of each video; features are ten times them."""
    rng = np.random.default_rng(seed)
    folder, answers = bank.folder, []
    about = {"kind": "sosampler teacher", "version": 1, "fingerprint": name[:16], "name": "by hand", "num_classes": 3}
    about |= {
        "pooling": "mean",
        "views": views,
        "precision": "float32",
        "features": {"precision": "float32", "width": 3},
    }
    folder.teacher(name).path.mkdir(parents=True)
    write_text(folder.teacher(name).header, json.dumps(about))
    schema = teacher_schema(3, "float32", 3)
    for shard in range(bank.header.num_shards):
        with writing_shard(folder.teacher(name).shard(shard), schema) as write:
            for row in bank.rows:
                if row.shard == shard:
                    probs = rng.dirichlet(np.ones(3), size=len(bank[len(answers)])).astype(np.float16)
                    answers.append(probs)
                    write(tables_batch(schema, row.item.id, probs, 10 * probs.astype(np.float32)))
    return answers


# ---- a bank with features on which every baseline learns something within seconds

LEARNABLE_CLASSES = ("run", "jump", "swim", "dance")
STORED, USEFUL = 12, 2  # frames of a video, and those among them that show the class
HEAVY_GMACS, LIGHT_GMACS = 4.0, 0.1
FURTHER_GMACS = {"r34": 2.2, "r18": 0.5}  # of the features of other networks
PRICES = {"heavy": HEAVY_GMACS, "light": LIGHT_GMACS, **FURTHER_GMACS}
HEAVY_PRINT, LIGHT_PRINT = "b" * 16, "c" * 16

# Every setting that matters here, so that better recipes change no test.
_COMMON: dict[str, Any] = {
    "num_candidates": STORED,
    "batch_size": 64,
    "optimizer": "adamw",
    "weight_decay": 1e-4,
    "clip": 10.0,
    "device": "cpu",
}
QUICK: dict[str, dict[str, Any]] = {
    "frameexit": _COMMON
    | {"epochs": {"classifiers": 10, "gates": 8}, "lr": 2e-2, "max_frames": STORED, "neck_width": 16}
    | {"gate_widths": [8, 4], "beta": 1e-3, "first_exit": 0.95},
    "liteeval": _COMMON
    | {"epochs": 15, "lr": 2e-2, "coarse_width": 8, "fine_width": 16, "target": 0.17, "budget": 2.0},
    "adaframe": _COMMON
    | {"epochs": 20, "lr": 2e-2, "hidden": 32, "width": 16, "memory_frames": STORED, "max_steps": 3, "mu": 2.0},
    "marl": _COMMON
    | {"epochs": 20, "lr": 1e-2, "agents": 2, "stride": 2, "max_steps": 3, "hidden": 16, "width": 8, "rollouts": 2},
    "ar-net": _COMMON
    | {"epochs": {"class_layers": 4, "policy": 20, "refit": 3}, "lr": 2e-2, "hidden": 16, "dropout": 0.1, "alpha": 0.9},
    "listen-to-look": _COMMON | {"epochs": 20, "lr": 2e-2, "steps": 2, "hidden": 16, "width": 8},
}


def random_frames_bound(frames: int) -> float:
    """The best accuracy that anyone can have who sees so many random frames: all others say nothing of the class."""
    hit = 1 - comb(STORED - USEFUL, frames) / comb(STORED, frames)
    return hit + (1 - hit) / len(LEARNABLE_CLASSES)


def make_learnable_bank(folder: Path, *, train: int, dev: int, multi_label: bool = False, seed: int = 0) -> Bank:
    """Videos in which two neighbouring frames show the class; features "heavy" and "light" stand beside the frames.

    Heavy features of the other frames tell on which side these two are. Light features tell which they are, and
    nothing of the class. Features of further networks are the heavy ones with more noise, the more the cheaper.
    """
    rng = np.random.default_rng(seed)
    entries, heavy, light = [], [], []
    picture = rng.integers(0, 255, (STORED, 8, 8, 3), dtype=np.uint8)
    for number, split in enumerate(["train"] * train + ["dev"] * dev):
        label = int(rng.integers(len(LEARNABLE_CLASSES)))
        several = {label, (label + 1) % len(LEARNABLE_CLASSES)} if multi_label and number % 3 == 0 else {label}
        labels = tuple(sorted(several))
        entries.append(FrameEntry(id=f"v{number:04d}", labels=labels, frames=picture, split=split))
        start = int(rng.integers(STORED - USEFUL + 1))
        time = np.arange(STORED)
        shown = (time >= start) & (time < start + USEFUL)
        first = rng.normal(0, 0.3, (STORED, 6))
        first[np.ix_(shown, labels)] += 3
        first[:, 4] += np.where(time < start, 1, np.where(shown, 0, -1))
        second = rng.normal(0, 0.3, (STORED, 3))
        second[:, 0] += 2 * shown
        heavy.append(first)
        light.append(second)
    bank = write_frames(
        folder, entries, classes=LEARNABLE_CLASSES, multi_label=multi_label, videos_per_shard=400, quality=50
    )
    write_features(bank, "heavy", heavy, kind="classifier", fingerprint=HEAVY_PRINT, gmacs=HEAVY_GMACS)
    write_features(bank, "light", light, kind="sampler", fingerprint=LIGHT_PRINT, gmacs=LIGHT_GMACS)
    for noise, (name, gmacs) in enumerate(FURTHER_GMACS.items(), 1):
        blurred = [features + rng.normal(0, noise, features.shape) for features in heavy]
        write_features(bank, name, blurred, kind="classifier", fingerprint=name[-2:] * 8, gmacs=gmacs)
    return Bank(folder)


def write_features(
    bank: Bank,
    name: str,
    features: list[np.ndarray],
    *,
    kind: str,
    fingerprint: str,
    gmacs: float,
    precision: str = "float16",
) -> None:
    """Features [T, D] of each video, as `add_features` would have written them for some network."""
    answers, width = bank.folder.features(name), features[0].shape[1]
    about = {
        "kind": FEATURES.kind,
        "version": VERSION,
        "name": name,
        "network": kind,
        "network_name": f"by hand, {name}",
        "fingerprint": fingerprint,
        "width": width,
        "precision": precision,
        "computed_in": "float32",
        "batch": 1,
        "gmacs": gmacs,
        "preprocessing": {},
    }
    answers.path.mkdir(parents=True)
    write_text(answers.header, json.dumps(about))
    schema = features_schema(precision, width)
    for shard in range(bank.header.num_shards):
        with writing_shard(answers.shard(shard), schema) as write:
            for number, row in enumerate(bank.rows):
                if row.shard == shard:
                    write(tables_batch(schema, row.item.id, features[number].astype(precision)))


# ---- small banks with given teacher outputs

FINGERPRINT = "ab" * 8
# The third is shorter than T and the last is shorter than N.
TAUGHT_LENGTHS = [12, 9, 5, 16, 8, 8, 11, 3]
LABELS: list[tuple[int, ...]] = [(0,), (1,), (2,), (0,), (1,), (2,), (1,), (0,)]
NUM_CANDIDATES = 8


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    found: np.ndarray = powers / powers.sum(-1, keepdims=True)
    return found


def sigmoid(logits: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1 / (1 + np.exp(-logits))
    return found


def write_bank(
    out: Path,
    lengths: Sequence[int],
    labels: Sequence[tuple[int, ...]],
    *,
    splits: Sequence[str] | None = None,
    multi_label: bool = False,
    wide: Sequence[int] = (),
) -> Bank:
    """Videos with so many stored frames; those numbered in `wide` have other proportions."""
    entries = [
        FrameEntry(
            id=f"v{number}",
            labels=labels[number],
            frames=np.stack(
                [picture(100 * number + 13 * frame, width=64 if number in wide else 48) for frame in range(length)]
            ),
            split=splits[number] if splits else "test",
        )
        for number, length in enumerate(lengths)
    ]
    return write_frames(out, entries, classes=CLASSES, multi_label=multi_label, videos_per_shard=4)


def random_logits(lengths: Sequence[int], labels: Sequence[tuple[int, ...]], seed: int = 0) -> list[np.ndarray]:
    """[T, 3] of each video: noise, with its labels a little higher."""
    rng = np.random.default_rng(seed)
    found = []
    for length, positives in zip(lengths, labels, strict=True):
        logits = 2 * rng.standard_normal((length, 3))
        logits[:, list(positives)] += 0.8
        found.append(logits.astype(np.float32))
    return found


def teach(bank: Bank, logits: Sequence[np.ndarray], *, multi_label: bool = False, name: str = FINGERPRINT) -> None:
    """A mean-pooled teacher with these logits, as `prepare` would write it."""
    activate = sigmoid if multi_label else softmax
    about = {
        "kind": "sosampler teacher",
        "version": 1,
        "fingerprint": name,
        "name": "given",
        "num_classes": 3,
        "multi_label": multi_label,
        "pooling": "mean",
        "views": 1,
        "precision": "float32",
        "features": {"precision": "float32", "width": 3},
    }
    folder = bank.folder
    folder.teacher(name).path.mkdir(parents=True)
    write_text(folder.teacher(name).header, json.dumps(about))
    schema = teacher_schema(3, "float32", 3)
    for shard in range(bank.header.num_shards):
        with writing_shard(folder.teacher(name).shard(shard), schema) as write:
            for row, answer in zip(bank.rows, logits, strict=True):
                if row.shard == shard:
                    write(tables_batch(schema, row.item.id, activate(answer).astype(np.float16), answer))


def distinct(length: int, count: int = NUM_CANDIDATES) -> list[int]:
    """Stored frames that are offered."""
    return sorted(set(uniform_positions(length, count).tolist()))


def clip(chosen: list[int], wanted: int) -> list[int]:
    """What is shown of chosen stored frames: repeated evenly where they are too few."""
    return chosen if len(chosen) >= wanted else [chosen[place] for place in segment_centres(len(chosen), wanted)]


def confidence(probs: np.ndarray, labels: tuple[int, ...]) -> float:
    return float(np.exp(np.mean(np.log(probs[list(labels)]))))


# ---- a bank on which a sampler learns something within seconds, and its teacher

SAMPLER_CLASSES = ("run", "jump", "swim")
TEACHER = "a" * 16

# A network so small that an epoch takes a blink; without and with batch normalisation.
TINY, TINY_WITHOUT_BATCH_NORM = "timm:test_resnet.r160_in1k", "timm:test_convnext.r160_in1k"
SMALL: dict[str, Any] = {
    "backbone": TINY,
    "input_size": 32,
    "epochs": 3,
    "batch_size": 8,
    "num_candidates": [4, 8],
    "device": "cpu",
    "workers": 1,
}
# Every setting that matters here, so that a better default recipe changes no test.
SAMPLER_QUICK: dict[str, Any] = SMALL | {
    "loss": "logistic",
    "prediction": "raw",
    "tau": None,
    "target": "label",
    "target_space": "probability",
    "weighted": True,
    "lam": 1.0,
    "distill": 1.0,
    "calibrate": 0.0,
    "class_head": True,
    "scoring": {},
    "dropout": 0.0,
    "optimizer": "adamw",
    "lr": 3e-3,
    "warmup": 0.05,
    "clip": None,
    "ema": 0.0,
    "crop_scale": [0.5, 1.0],
    "crop_per": "video",
    "freeze": 0.0,
}


def bright_video(rng: np.random.Generator, useful: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [T, H, W, 3]: bright where a frame is useful, dark where not."""
    level = np.where(useful, 190, 60)[:, None, None, None]
    return (level + rng.normal(0, 25, (len(useful), *size, 3))).clip(0, 255).astype(np.uint8)


def make_bank(
    folder: Path,
    *,
    train: int = 32,
    dev: int = 16,
    stored: int = 8,
    sizes: tuple[tuple[int, int], ...] = ((40, 52),),
    multi_label: bool = False,
    pooling: str | None = "mean",
    unlabelled: int = 0,
    seed: int = 0,
) -> Bank:
    """Videos of which some frames are bright, and a teacher that is right about those and wrong about dark ones.

    A video of the mean of uniform frames is often wrong; that of its bright frames never.
    """
    rng = np.random.default_rng(seed)
    entries, logits = [], []
    for number in range(train + dev):
        count = stored - number % 2 * (stored // 4)  # lengths differ
        useful = np.zeros(count, dtype=bool)
        useful[rng.permutation(count)[: max(2, count // 3)]] = True
        label = number % 3
        labels = tuple(sorted({label, (label + 1) % 3})) if multi_label and number % 4 == 0 else (label,)
        entries.append(
            FrameEntry(
                id=f"v{number:03d}",
                labels=labels if number >= unlabelled else (),
                frames=bright_video(rng, useful, sizes[number % len(sizes)]),
                split="train" if number < train else "dev",
            )
        )
        answer = rng.normal(-2 if multi_label else 0, 0.2, (count, 3))
        for frame in range(count):
            if useful[frame]:
                answer[frame, list(labels)] += 4
            else:
                answer[frame, (label + 2) % 3] += 3.5
        logits.append(answer.astype(np.float32))
    bank = write_frames(
        folder, entries, classes=SAMPLER_CLASSES, multi_label=multi_label, videos_per_shard=20, quality=95
    )
    write_teacher(bank, logits, multi_label=multi_label, pooling=pooling)
    return bank


def write_teacher(bank: Bank, logits: list[np.ndarray], *, multi_label: bool, pooling: str | None) -> None:
    folder = bank.folder
    features = {"precision": "float32", "width": 3} if pooling else None
    about = {
        "kind": "sosampler teacher",
        "version": 1,
        "fingerprint": TEACHER,
        "name": "by hand",
        "num_classes": 3,
        "class_names": list(SAMPLER_CLASSES),
        "multi_label": multi_label,
        "pooling": pooling,
        "views": 1,
        "precision": "float32",
        "features": features,
    }
    folder.teacher(TEACHER).path.mkdir(parents=True)
    write_text(folder.teacher(TEACHER).header, json.dumps(about))
    schema = teacher_schema(3, "float32" if features else None, 3 if features else None)
    for shard in range(bank.header.num_shards):
        with writing_shard(folder.teacher(TEACHER).shard(shard), schema) as write:
            for number, row in enumerate(bank.rows):
                if row.shard == shard:
                    probs = probabilities(logits[number], multi_label=multi_label)
                    kept = [logits[number]] if features else []
                    write(tables_batch(schema, row.item.id, probs.astype(np.float16), *kept))


def probabilities(logits: np.ndarray, *, multi_label: bool) -> np.ndarray:
    found = np.exp(logits)
    return found / (1 + found) if multi_label else found / found.sum(-1, keepdims=True)


# ---- banks with given features, and a baseline that can be followed by hand

HEAVY, LIGHT = 4, 2  # widths: of heavy features the first says when to stop, the others are logits
BASELINE_HEAVY_GMACS, BASELINE_LIGHT_GMACS, STEP_GMACS = 4.0, 0.5, 0.25
OTHER = "cd" * 8  # fingerprint of the light network
BASELINE_CLASSES = ["run", "jump", "swim"]


class Peek(Baseline):
    """Looks from the first candidate on until a frame tells it to stop; the light network looks one ahead."""

    name, threshold, threshold_values = "peek", "most", (1, 2, 4)
    feature_sets = ("heavy", "light")

    def __init__(
        self, heavy_width: int, light_width: int, num_classes: int, *, most: int = 3, multi_label: bool = False
    ) -> None:
        super().__init__(
            {
                "heavy_width": heavy_width,
                "light_width": light_width,
                "num_classes": num_classes,
                "most": most,
                "multi_label": multi_label,
            }
        )
        if not isinstance(most, int) or most < 1:
            raise InvalidArgument(f"most={most!r} must be an int")
        self.weight = nn.Parameter(torch.zeros(1))

    def decide(self, views: Views, generator: torch.Generator | None) -> BaselineOutput:
        heavy, light = torch.zeros_like(views.real), torch.zeros_like(views.real)
        probabilities = torch.zeros(len(heavy), self.config["num_classes"])
        for row, count in enumerate(views.real.sum(1).tolist()):
            stop = looks(views.heavy[row, :, 0].tolist(), count, self.config["most"])
            heavy[row, :stop] = True
            light[row, : min(count, stop + 1)] = True
            probabilities[row] = self.activate(views.heavy[row, :stop, 1:].mean(0))
        return BaselineOutput(probabilities, {"heavy": heavy, "light": light}, heavy.sum(1) + 1)

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        assert seen.steps is not None
        return STEP_GMACS * seen.steps


def two_sets(heavy: Tensor, light: Tensor, mask: Tensor | None = None) -> Views:
    """Views of a heavy and a light network."""
    return Views({"heavy": heavy, "light": light}, mask)


def on_heavy_features() -> list[str]:
    """Return the baselines on features of the classifier; the others, on patches and pixels, have such tests too."""
    return [name for name in list_systems() if "heavy" in baseline_class(name).feature_sets]


def with_sets_of(name: str, views: Views, width: int = 3) -> Views:
    """Views with random features in the further sets that a baseline needs."""
    generator = torch.Generator().manual_seed(7)
    further = [one for one in baseline_class(name).feature_sets if one not in views.sets]
    return replaced(views, **{one: torch.randn(*views.shape, width, generator=generator) for one in further})


def replaced(views: Views, **sets: Tensor) -> Views:
    """Views with other values in some sets."""
    return Views({**views.sets, **sets}, views.mask)


def looks(stops: Sequence[float], count: int, most: int) -> int:
    """How many candidates are looked at."""
    for place in range(min(count, most)):
        if stops[place] > 0.5:
            return place + 1
    return min(count, most)


def keep(
    bank: Bank,
    name: str,
    tables: Sequence[np.ndarray],
    gmacs: float,
    fingerprint: str = FINGERPRINT,
    *,
    precision: str = "float16",
) -> None:
    """Features, as `add_features` would write them."""
    folder, width = bank.folder.features(name), tables[0].shape[1]
    about = {
        "kind": FEATURES.kind,
        "version": 1,
        "name": name,
        "network": "classifier",
        "network_name": f"net of {name}",
        "fingerprint": fingerprint,
        "width": width,
        "precision": precision,
        "gmacs": gmacs,
    }
    folder.path.mkdir(parents=True)
    write_text(folder.header, json.dumps(about))
    schema = features_schema(precision, width)
    for shard in range(bank.header.num_shards):
        with writing_shard(folder.shard(shard), schema) as write:
            for row, table in zip(bank.rows, tables, strict=True):
                if row.shard == shard:
                    write(tables_batch(schema, row.item.id, table.astype(precision)))


def tables_of(lengths: Sequence[int], labels: Sequence[tuple[int, ...]], seed: int = 0) -> list[np.ndarray]:
    """Heavy features [T, 4] in half precision."""
    rng = np.random.default_rng([seed, 7])
    logits = random_logits(lengths, labels, seed=seed + 1)
    found = [np.concatenate((rng.random((len(one), 1)) - 0.2, one), axis=1).astype(np.float16) for one in logits]
    found[-1][:, 0] = 0  # the shortest, which is looked at to its end
    return found


def about(**changes: Any) -> dict[str, Any]:
    """What `train` writes about a system."""
    return {
        "classifier": "given",
        "classes": BASELINE_CLASSES,
        "num_candidates": NUM_CANDIDATES,
        "heavy": {"name": "heavy", "fingerprint": FINGERPRINT, "width": HEAVY, "gmacs": BASELINE_HEAVY_GMACS},
        "light": {"name": "light", "fingerprint": OTHER, "width": LIGHT, "gmacs": BASELINE_LIGHT_GMACS},
        **changes,
    }


def peek(**options: Any) -> Peek:
    system = Peek(HEAVY, LIGHT, 3, **options)
    system.about = about()
    return system


def frame_exit(folder: Path, seed: int = 0, **changes: Any) -> str:
    """The folder of a system that looks at no light features."""
    torch.manual_seed(seed)
    system = create_baseline(
        "frameexit", heavy_width=HEAVY, num_classes=3, max_frames=6, neck_width=8, gate_widths=(4, 4), gate_exit=0.25
    )
    with torch.no_grad():
        for name, weight in system.named_parameters():
            if name.startswith("gates") and "decide" in name:
                weight.mul_(10)  # gates that differ between videos
    save_baseline(folder, system, about(light=None, **changes))
    return str(folder)


def given_bank(path: Path, labels: list[tuple[int, ...]] = LABELS, **options: Any) -> tuple[Bank, list[np.ndarray]]:
    bank = write_bank(path, TAUGHT_LENGTHS, labels, **options)
    teach(bank, random_logits(TAUGHT_LENGTHS, labels), multi_label=options.get("multi_label", False))
    tables = tables_of(TAUGHT_LENGTHS, labels)
    keep(bank, "heavy", tables, BASELINE_HEAVY_GMACS)
    keep(bank, "light", [np.zeros((len(table), LIGHT)) for table in tables], BASELINE_LIGHT_GMACS, OTHER)
    return Bank(bank.path), tables


def seen_of(tables: Sequence[np.ndarray], count: int, most: int) -> list[list[int]]:
    """Stored frames that the heavy network is given, video by video."""
    seen = []
    for table in tables:
        offered = distinct(len(table), count)
        seen.append(offered[: looks(table[offered, 0].tolist(), len(offered), most)])
    return seen


def said(tables: Sequence[np.ndarray], seen: Sequence[list[int]], activate: Any = softmax) -> np.ndarray:
    means = [table[places, 1:].astype(np.float32).mean(0) for table, places in zip(tables, seen, strict=True)]
    return np.stack([activate(mean) for mean in means])


def one_hot(labels: Sequence[tuple[int, ...]]) -> np.ndarray:
    return np.array([[label in own for label in range(3)] for own in labels])


# ---- training of baselines: random banks and networks, and the files of a run

RUN_TINY = "timm:test_resnet.r160_in1k"
KEPT = {"classifier": "heavy", "light": "light"}
BRIEF: dict[str, Any] = {"num_candidates": 4, "device": "cpu", "batch_size": 4}  # for networks and banks of no meaning


def make_networks(folder: Path) -> SimpleNamespace:
    """A saved classifier, weights of MobileNetV2 and a saved sampler; all as they were drawn."""
    torch.manual_seed(0)
    so.save_classifier(so.create_classifier(RUN_TINY, num_classes=2, input_size=32), folder / "classifier")
    save_file(create_backbone("mobilenet_v2").weights_net().state_dict(), folder / "mobilenet.safetensors")
    so.SOSampler(backbone=RUN_TINY, input_size=32).save_pretrained(folder / "sampler")
    return SimpleNamespace(
        classifier=folder / "classifier", weights=folder / "mobilenet.safetensors", sampler=folder / "sampler"
    )


def make_plain_bank(folder: Path, *, multi_label: bool = False, dev: int = 3, unlabelled: int = 0) -> so.Bank:
    """A few short videos without any features."""
    rng = np.random.default_rng(0)
    lengths = [5, 4, 3, 5, 4, 6, 5, 4, 2][: 6 + dev]
    entries = [
        so.FrameEntry(
            id=f"v{number}",
            labels=() if number < unlabelled else (number % 2,),
            frames=rng.integers(0, 255, (length, 40, 40, 3), dtype=np.uint8),
            split="train" if number < 6 else "dev",
        )
        for number, length in enumerate(lengths)
    ]
    return so.write_frames(folder, entries, classes=("run", "jump"), multi_label=multi_label, videos_per_shard=4)


def make_random_bank(folder: Path, lengths: list[int], *, precision: str = "float16", scale: float = 1.0) -> so.Bank:
    """Videos of given lengths to train on, with features "heavy" and "light" that say nothing."""
    rng = np.random.default_rng(0)
    entries = [
        so.FrameEntry(
            id=f"v{number}", labels=(number % 4,), frames=rng.integers(0, 255, (length, 8, 8, 3), dtype=np.uint8)
        )
        for number, length in enumerate(lengths)
    ]
    bank = so.write_frames(folder, entries, classes=("run", "jump", "swim", "dance"), quality=50)
    heavy = [scale * rng.normal(size=(length, 6)) for length in lengths]
    light = [rng.normal(size=(length, 3)) for length in lengths]
    write_features(
        bank, "heavy", heavy, kind="classifier", fingerprint=HEAVY_PRINT, gmacs=HEAVY_GMACS, precision=precision
    )
    write_features(bank, "light", light, kind="sampler", fingerprint=LIGHT_PRINT, gmacs=LIGHT_GMACS)
    return so.Bank(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# ---- small samplers and their exports, made once a process because exporting takes seconds

BELIEF = {"belief": 2.0, "relevance": [4.0, 1.0], "importance": 0.2}


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scattered(seed: int = 0, **settings: Any) -> SOSampler:
    """A sampler of random weights whose norms know their input, so that scores differ clearly between frames."""
    torch.manual_seed(seed)
    sampler = SOSampler(**{"input_size": 32, **settings})
    norms = [part for part in sampler.modules() if isinstance(part, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.momentum = 1.0
            norm.bias.normal_(0, 0.2)
        sampler.train()(noise(4, 8, 3, sampler.input_size, sampler.input_size))
        for norm in norms:
            norm.momentum = 0.1
    return sampler.eval()


NAMES = ["run", "jump", "swim"]
_folders: list[TemporaryDirectory] = []  # removed when the process ends
EXPORT_TINY = "timm:test_resnet.r160_in1k"


def _folder() -> Path:
    _folders.append(TemporaryDirectory(prefix="sosampler-test-"))
    return Path(_folders[-1].name)


@cache
def believing() -> SOSampler:
    """Frames are scored by what the whole video is about; weights as they are saved in half precision."""
    sampler = scattered(
        backbone=EXPORT_TINY, num_classes=3, class_names=NAMES, scoring=BELIEF, calibration=(1.5, -0.25)
    )
    with torch.no_grad():
        for parameter in sampler.parameters():
            parameter.mul_(3.0 if parameter.ndim == 2 else 1.0)  # heads that tell frames apart
            if parameter.ndim > 1:
                parameter.copy_(parameter.half().float())
    return sampler.freeze()


@cache
def shifted() -> SOSampler:
    """Frames look at their neighbours, there is no class head, and weights are of full precision."""
    sampler = scattered(shift=10)
    sampler.backbone.features = nn.Sequential(*sampler.backbone.features[:4], nn.Conv2d(24, 1280, 1))
    sampler.backbone.reach = 1
    return sampler.freeze()


@cache
def believing_folder() -> tuple[Path, Exported]:
    """The folder of `believing` with its model.onnx; to be copied by whoever changes it."""
    folder = _folder() / "run"
    believing().save_pretrained(folder)
    return folder, export_sampler(folder)


@cache
def shifted_onnx() -> tuple[bytes, Exported]:
    file = _folder() / "x.onnx"
    done = export_sampler(shifted(), out=file)
    return file.read_bytes(), done


def scenes(videos: int, candidates: int, height: int = 48, width: int = 64, *, seed: int = 0) -> Tensor:
    """uint8 [B, T, 3, H, W]: coarse shapes under fine grain, so that scores and the way of resizing both matter."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(videos * candidates, 3, 5, 5, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=(height, width), mode="bilinear") * 255
    grain = torch.randn(smooth.shape, generator=generator) * 12
    return (smooth + grain).clamp(0, 255).round().byte().unflatten(0, (videos, candidates))
