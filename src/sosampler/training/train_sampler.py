"""`train`: teach a sampler which frames a frozen classifier is sure about."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import sosampler
from sosampler.checks import one_of, whole_number
from sosampler.classifiers.base import Classifier
from sosampler.classifiers.registry import create_classifier, saved_folder
from sosampler.data.bank import Bank
from sosampler.data.bank_teachers import Teacher
from sosampler.errors import InvalidArgument
from sosampler.samplers import SOSampler
from sosampler.samplers.backbones import load_backbone_weights
from sosampler.samplers.recipe import SamplerRecipe, read_recipe
from sosampler.training.calibration import fit_calibration
from sosampler.training.checkpoints import RunFolder
from sosampler.training.processes import Processes, settled_precision
from sosampler.training.sampler_data import SamplerBatches, VideoTable
from sosampler.training.sampler_dev import EvaluationSet
from sosampler.training.sampler_frames import CachedFrames, Shape, default_cache_bytes, open_frames
from sosampler.training.sampler_loop import SamplerLoop

TEACHERS = ("bank", "online")
KIND = "sampler"
# Pictures are kept this much larger than the network's input, so that crops are seldom enlarged much.
_ROOM_TO_CROP = 1.15
_EVALUATED_CANDIDATES = 10  # T on dev where the recipe draws T at random
_CALIBRATION_VIDEOS = 256  # of train, where there is no dev
# In channels-last memory a step of MobileNetV2 with 64 x 10 frames takes 31 instead of 93 ms on an H200, but cuDNN
# spends 6.5 s on each new shape of a batch, that is on each T: it pays from about so many steps for each T on.
_STEPS_THAT_PAY = 100


@dataclass(frozen=True)
class TrainedSampler:
    """What came out of `train`: the best sampler by dev, and how good it is."""

    sampler: SOSampler
    folder: Path
    result: dict[str, Any]

    def __repr__(self) -> str:
        return f"TrainedSampler({self.folder}, {self.result['metric']}, dev {self.result['dev']})"


def train(
    bank: str | Path | Bank,
    *,
    out: str | Path,
    recipe: str | Path | SamplerRecipe = "default",
    classifier: str | Path | Classifier | None = None,
    weights: str | Path | None = None,
    teacher: str = "bank",
    device: str | None = None,
    precision: str | None = None,
    workers: int | None = None,
    cache_bytes: int | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> TrainedSampler:
    """Train a sampler on a bank and keep the weights that are best on its dev split.

    Args:
        bank: frames and a classifier's answers about them, from `prepare`. Without a dev split the last epoch is kept.
        out: folder for the sampler (`SOSampler.from_pretrained(out)` loads it), the log and the result. Run again with
            the same settings, a killed run goes on.
        recipe, settings: "default", "paper", "authors", a YAML file or a `SamplerRecipe`, and single settings of it:
            epochs=20, lr=1e-3, ...
        classifier: whose answers: the classifier, its saved folder, its fingerprint or its name in the bank; needed
            where the bank has several teachers, and as classifier or folder for teacher="online".
        weights: start of the backbone: a safetensors file with torchvision's or timm's names, or "pretrained".
        teacher: "bank": targets are the kept answers about whole frames. "online": the classifier is asked about the
            same random crops that the sampler sees, which costs its forward pass a step; dev uses the kept answers.
        device: default: the GPU if there is one. Under `accelerate launch` every process has its own.
        precision: "float32", "bfloat16" or "float16"; default: bfloat16 on GPUs that have it.
        workers: threads that decode frames into memory, or processes that decode them again and again where they do
            not fit; default: as many as there are cores, at most 16.
        cache_bytes: memory for decoded frames; default: 40 % of what is free, at most 16 GiB.
        overwrite: start again in a folder that holds another run of a sampler.
        say: is given a line of text for each epoch.
    """
    recipe = read_recipe(recipe, **settings)
    one_of("teacher", teacher, TEACHERS)
    workers = min(16, os.cpu_count() or 1) if workers is None else whole_number("workers", workers, at_least=0)
    bank = bank if isinstance(bank, Bank) else Bank(bank)
    processes = Processes(device)
    if not processes.is_main:
        say = _say_nothing
    precision = settled_precision(processes.device, precision)
    if cache_bytes is None:
        cache_bytes = default_cache_bytes(processes.local_count)
    whole_number("cache_bytes", cache_bytes, at_least=0)
    asked, answers = _teacher(bank, classifier, online=teacher == "online", device=processes.device)
    rows = _rows(bank, processes)
    sampler = _new_sampler(bank, recipe, weights)
    run = RunFolder(Path(out), KIND)
    if processes.is_main:
        _begin(run, bank, answers, sampler, recipe, overwrite, teacher=teacher, weights=weights, precision=precision)
    processes.wait()
    finished = run.result()
    if finished is not None:
        say(f"{run.folder}: this run is finished")
        return TrainedSampler(_saved_sampler(run.folder, processes.device), run.folder, finished)
    sampler.to(processes.device)
    open_ = _Opening(bank, answers, cache_bytes, processes, workers)
    batches = open_.training(rows["train"], recipe, asked)
    taken = batches.source.nbytes if isinstance(batches.source, CachedFrames) else 0
    dev = open_.evaluation(rows["dev"], recipe, taken) if rows["dev"] else None
    if _channels_last_pays(processes.device, batches, recipe):
        sampler.to(memory_format=torch.channels_last)
    say(_first_words(sampler, processes, precision, batches, rows))
    with torch.random.fork_rng(devices=[processes.device] if processes.device.type == "cuda" else []):
        loop = SamplerLoop(
            *(sampler, recipe, batches, dev, run),
            processes=processes,
            precision=precision,
            asked=asked,
            say=say,
        )
        loop.train()
        if processes.is_main:
            fitted = open_.evaluation(rows["train"][:_CALIBRATION_VIDEOS], recipe, taken) if dev is None else dev
            result = _finish(loop, fitted, bank, answers, rows, say)
            run.finish(result)
    processes.wait()
    return TrainedSampler(_saved_sampler(run.folder, processes.device), run.folder, run.result() or {})


def _teacher(
    bank: Bank, classifier: str | Path | Classifier | None, *, online: bool, device: torch.device
) -> tuple[Classifier | None, Teacher]:
    """The classifier if it is to be asked, and its kept answers."""
    meant: Any = classifier
    if isinstance(classifier, (str, Path)) and str(classifier) not in bank.teachers and saved_folder(classifier):
        meant = create_classifier(classifier)
    elif isinstance(classifier, (str, Path)):
        named = [name for name, about in bank.teachers.items() if about["name"] == str(classifier)]
        meant = named[0] if len(named) == 1 else str(classifier)
    if not online:
        return None, bank.teacher(meant)
    if not isinstance(meant, Classifier):
        raise InvalidArgument(
            f"teacher='online' asks the classifier itself, but classifier={classifier!r} is none; "
            "give the classifier or its saved folder"
        )
    return meant.to(device).freeze(), bank.teacher(meant)


def _rows(bank: Bank, processes: Processes) -> dict[str, list[int]]:
    """Places in the bank of the videos of train and dev that have a label."""
    found: dict[str, list[int]] = {"train": [], "dev": [], "unlabelled": []}
    for row, item in enumerate(bank.items):
        split = item.split or "train"
        if split in ("train", "dev"):
            found[split if item.labels else "unlabelled"].append(row)
    least = max(2, processes.count)
    if len(found["train"]) < least:
        raise InvalidArgument(
            f"{bank.path}: {len(found['train'])} videos with a label in the train split; give at least {least}"
        )
    return found


def _new_sampler(bank: Bank, recipe: SamplerRecipe, weights: str | Path | None) -> SOSampler:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed % 2**63)  # fresh layers
        sampler = SOSampler(
            backbone=recipe.backbone,
            shift=recipe.shift,
            input_size=recipe.input_size,
            num_classes=len(bank.classes) if recipe.class_head else None,
            class_names=bank.classes if recipe.class_head else None,
            dropout=recipe.dropout,
            multi_label=bank.multi_label,
            scoring=dict(recipe.scoring),
        )
    if weights is not None:
        load_backbone_weights(sampler.backbone, weights)
    return sampler


def _saved_sampler(folder: Path, device: torch.device) -> SOSampler:
    with torch.random.fork_rng(devices=[]):  # layers are drawn before they are filled
        sampler = SOSampler.from_pretrained(folder)
    sampler.to(device)
    return sampler.freeze()


def _begin(
    run: RunFolder,
    bank: Bank,
    answers: Teacher,
    sampler: SOSampler,
    recipe: SamplerRecipe,
    overwrite: bool,
    *,
    teacher: str,
    weights: str | Path | None,
    precision: str,
) -> None:
    here, there = run.folder.resolve(), bank.path.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise InvalidArgument(f"out={run.folder} and the bank {bank.path} lie inside each other; keep them apart")
    if overwrite:
        run.clear()
    told = [[asdict(item) for item in bank.items], bank.classes, bank.multi_label, bank.settings]
    run.begin(
        {
            "bank": {
                "path": str(there),
                "digest": hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()[:16],
            },
            "teacher": {"name": answers.name, "asked": teacher},
            "start": None if weights is None else sampler.fingerprint(),
            "recipe": recipe.to_dict(),
            "precision": precision,
        }
    )


@dataclass(frozen=True)
class _Opening:
    """How videos of the bank become batches."""

    bank: Bank
    answers: Teacher
    cache_bytes: int
    processes: Processes
    workers: int

    def training(self, rows: list[int], recipe: SamplerRecipe, asked: Classifier | None) -> SamplerBatches:
        largest = max(recipe.input_size, *(asked.preprocessing.size if asked else ()), 1)
        source = self._frames(rows, Shape(math.ceil(_ROOM_TO_CROP * largest)))
        table = VideoTable(self.bank, rows, self.answers)
        batch_size = min(recipe.batch_size, len(rows))
        if batch_size < self.processes.count:
            raise InvalidArgument(
                f"batch_size={batch_size} is less than the {self.processes.count} processes; give each a video at least"
            )
        return SamplerBatches(table, source, recipe, part=self.processes.part(batch_size), workers=self.workers)

    def evaluation(self, rows: list[int], recipe: SamplerRecipe, taken: int) -> EvaluationSet:
        """`taken`: bytes of memory that the frames of training have."""
        source = self._frames(rows, Shape(recipe.input_size, square=True), taken)
        asked = recipe.num_candidates
        most = max(len(self.bank[row]) for row in rows)
        wanted = min(asked if isinstance(asked, int) else _EVALUATED_CANDIDATES, most)
        return EvaluationSet(self.bank, rows, self.answers, source, num_candidates=wanted)

    def _frames(self, rows: list[int], shape: Shape, taken: int = 0) -> Any:
        return open_frames(
            self.bank,
            rows,
            shape,
            cache_bytes=self.cache_bytes - taken,
            device=self.processes.device,
            workers=self.workers,
            show=self.processes.is_main,
        )


def _channels_last_pays(device: torch.device, batches: SamplerBatches, recipe: SamplerRecipe) -> bool:
    lengths = len(batches.plan.num_candidates)
    return device.type == "cuda" and len(batches) * recipe.epochs >= _STEPS_THAT_PAY * lengths


def _first_words(
    sampler: SOSampler, processes: Processes, precision: str, batches: SamplerBatches, rows: dict[str, list[int]]
) -> str:
    source = batches.source
    where = (
        f"frames in memory ({source.nbytes / 1e9:.2f} GB, {source.device.type})"
        if isinstance(source, CachedFrames)
        else "frames do not fit into memory and are decoded again in every epoch"
    )
    several = f" in {processes.count} processes" if processes.count > 1 else ""
    unlabelled = f" ({len(rows['unlabelled'])} without a label are left out)" if rows["unlabelled"] else ""
    dev = f"{len(rows['dev'])} dev" if rows["dev"] else "no dev split, so the last epoch is kept"
    return (
        f"{sampler!r}, on {processes.device}{several} in {precision}: "
        f"{len(rows['train'])} videos to train on, {dev}{unlabelled}; {where}"
    )


def _finish(
    loop: SamplerLoop,
    fitted: EvaluationSet,
    bank: Bank,
    answers: Teacher,
    rows: dict[str, list[int]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Calibrate the best sampler, write it, and tell how good it is."""
    sampler, recipe = loop.judged, loop.recipe
    sampler.load_state_dict(loop.best_state)
    sampler.calibration = fit_calibration(fitted.scores(sampler, loop.precision), fitted.confidence)
    measured: dict[str, Any] = {"metric": fitted.metric, "dev": loop.best["score"]}
    if loop.dev is not None:
        measured |= {
            "dev_uniform": loop.dev.of_uniform(),
            "dev_semi_optimal": loop.dev.of_semi_optimal(),
        }
    measured |= {"num_candidates": fitted.num_candidates, "num_frames": fitted.num_frames}
    sampler.about = {
        "classifier": answers.about["name"],
        "teacher": answers.name,
        "bank": bank.path.resolve().name,
        "num_classes": len(bank.classes),
        **measured,
        "best_epoch": loop.best["epoch"],
        "calibrated_on": "train" if loop.dev is None else "dev",
        "seed": recipe.seed,
        "sosampler": sosampler.__version__,
        "recipe": recipe.to_dict(),
    }
    sampler.save_pretrained(loop.run.folder)
    shown = ", ".join(
        f"{words} {100 * measured[name]:.2f} %"
        for name, words in (("dev", "sampler"), ("dev_uniform", "uniform"), ("dev_semi_optimal", "semi-optimal"))
        if measured.get(name) is not None
    )
    best = f"best of epoch {loop.best['epoch'] + 1}: dev {fitted.metric} of {fitted.num_frames} of "
    say(
        (f"{best}{fitted.num_candidates} frames: {shown}; " if loop.dev is not None else "")
        + f"written to {loop.run.folder}"
    )
    return {
        **measured,
        "best_epoch": loop.best["epoch"],
        "epochs": recipe.epochs,
        "sizes": {name: len(found) for name, found in rows.items()},
        "calibration": list(sampler.calibration or ()),
        "teacher": answers.name,
        "fingerprint": sampler.fingerprint(),
    }


def _say_nothing(text: str) -> None:
    pass
