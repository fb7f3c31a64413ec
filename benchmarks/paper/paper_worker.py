"""A process of paper_runs.py that stays: jobs come in, a line each, and replies go out, so that torch starts once.

What a job needs besides its own arguments stands in `Common`, which is the first line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import end_with_parent
from benchmarks.paper.paper_places import ALL_SEEDS, SPECS, Spec

MARK = "reply "  # other lines that a library may print are passed over
Job = dict[str, Any]
Reply = dict[str, Any]  # seconds, and "result" or "failed"


@dataclass(frozen=True)
class Common:
    """What all jobs share."""

    work: str
    pictures: str
    resnet50: str
    mobilenet: str
    i3d: str
    precision: str | None  # None: the package's own choice
    reel_counts: dict[str, list[int]]  # by bank: train, dev, test
    classifier_epochs: int
    sampler_epochs: int | None  # None: those of the recipes
    reuse: str | None = None  # folder of samplers that samplers.py trained on bank10
    workers: int | None = None  # of trainings of classifiers
    patience: float = 0.0  # seconds for which files that are still on their way are waited for

    @property
    def folder(self) -> Path:
        return Path(self.work)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def awaited(common: Common, *paths: Path | str) -> None:
    """Wait for files that are brought while other work has begun."""
    until = time.monotonic() + common.patience
    for path in map(Path, paths):
        while not path.exists():
            if time.monotonic() > until:
                raise FileNotFoundError(f"{path} is not there")
            time.sleep(0.5)


# ---- what is needed first


def make_reels(common: Common, bank: str) -> None:
    """One of the banks of reels."""
    import sosampler as so
    from benchmarks.paper import paper_classifiers

    counts = common.reel_counts[bank]
    if bank == "cls10":
        paper_classifiers.make_classifier_reels(Path(common.pictures), common.folder, counts[:2])
    elif bank == "clips10":
        paper_classifiers.make_clip_reels(Path(common.pictures), common.folder, counts)
    else:
        shots = int(bank.removeprefix("bank"))
        wanted = {split: count for split, count in zip(("train", "dev", "test"), counts, strict=True) if count}
        recipe = {"num_shots": shots, "num_candidates": shots}
        so.make_reels(common.pictures, common.folder / bank, preset="sports22", recipe=recipe, counts=wanted)


def train_resnet50(common: Common) -> Any:
    """The classifier of samplers.py, on pictures; one that lies there is taken as it is."""
    from benchmarks.accuracy import samplers

    folder = common.folder / "classifier"
    if (folder / "config.json").exists() and (folder / "model.safetensors").exists():
        return "was there"
    awaited(common, common.resnet50)
    samplers.train_classifier(
        argparse.Namespace(
            pictures=Path(common.pictures),
            work=common.folder,
            classifier_weights=Path(common.resnet50),
            classifier_epochs=common.classifier_epochs,
        )
    )
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def train_clip_network(common: Common, name: str) -> Any:
    from benchmarks.paper import paper_classifiers

    if paper_classifiers.CLASSIFIERS[name].start == "i3d":
        awaited(common, common.i3d)
    more: dict[str, Any] = {} if common.classifier_epochs > 1 else {"epochs": 1}  # rehearsals
    return paper_classifiers.train_one(
        name, common.folder, common.folder / "classifier", Path(common.i3d), workers=common.workers, **more
    )


def teach(common: Common, place: str) -> None:
    """The classifier's answers go into the bank; a bank of clips is a copy by links, for each has one writer."""
    from benchmarks.paper import paper_classifiers
    from sosampler.bank.format import BankFolder

    spec = SPECS[place]
    bank = common.folder / spec.bank
    if spec.bank.startswith("clips10-") and not bank.exists():
        part = bank.with_name(f"{bank.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        # But for the lock: a link to it would be the same lock.
        lock = BankFolder(common.folder / "clips10").lock.name
        shutil.copytree(common.folder / "clips10", part, copy_function=os.link, ignore=shutil.ignore_patterns(lock))
        part.rename(bank)
    paper_classifiers.teach_one(bank, common.folder / spec.classifier)


def rebuild(common: Common, place: str) -> None:
    """The classifier of a set of real clips, whose bank is there, mostly with the classifier's answers."""
    import sosampler as so
    from benchmarks.accuracy import realvid

    spec = SPECS[place]
    awaited(common, common.folder / spec.bank, common.resnet50)
    bank, folder = so.Bank(common.folder / spec.bank), common.folder / spec.classifier
    if not bank.teachers or not (folder.parent / realvid.HEAD).exists():
        realvid.finish(spec.name, bank, Path(common.resnet50), folder.parent, say)
    elif not (folder / "config.json").exists():
        realvid.rebuild(bank, Path(common.resnet50), folder)


def keep_features(common: Common, place: str) -> None:
    """What systems look at, before several of them start."""
    import torch

    from sosampler.training.baseline_data import heavy_source, keep_features, light_source

    here = _place(common, place)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sources = [heavy_source(here.bank, here.heavy), light_source(here.bank, None, common.mobilenet)]
    keep_features(here.bank, sources, device=device, say=say)


# ---- trainings and measurements


@lru_cache(maxsize=4)
def _place(common: Common, name: str) -> Any:
    from sosampler.paper.locations import find_locations

    spec = SPECS[name]
    (place,) = find_locations(
        {spec.bank_name: common.folder / spec.bank},
        {spec.classifier_name: str(common.folder / spec.classifier)},
        precision=common.precision,
    )
    return place


def spec_of(common: Common, name: str) -> Spec:
    """With the wanted epochs."""
    from dataclasses import replace

    spec = SPECS[name]
    return spec if common.sampler_epochs is None else replace(spec, epochs=common.sampler_epochs)


def train(common: Common, place: str, experiment: str, training: str, seed: int) -> Any:
    """One sampler or system, into the folder in which `reproduce` looks for it."""
    from sosampler.errors import SosamplerError
    from sosampler.paper.plan import Request, train_one

    spec, here = spec_of(common, place), _place(common, place)
    (wanted,) = [one for one in spec.trainings(experiment) if one.name == training]
    folder = wanted.folder(spec.folder(common.folder), seed)
    request = Request(common.folder / "out", (seed,), weights=common.mobilenet, precision=common.precision)
    there = None if common.reuse is None else Path(common.reuse) / f"{training}-{seed}"
    if there is not None and (there / "result.json").is_file() and not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(there.resolve(), target_is_directory=True)
        try:
            return train_one(wanted, folder, seed, here, request, say)
        except SosamplerError as error:  # of another bank or with other settings
            folder.unlink()
            say(f"{there}: is trained anew, {error}")
    return train_one(wanted, folder, seed, here, request, say)


def measure(common: Common, place: str, experiment: str, seeds: list[int]) -> Any:
    """One table or figure; all that it shows is trained."""
    from benchmarks.paper import paper_contrasts
    from sosampler.paper.run import reproduce

    spec = spec_of(common, place)
    (found,) = reproduce(
        [experiment],
        {spec.bank_name: common.folder / spec.bank},
        out=common.folder / "out",
        classifiers={spec.classifier_name: str(common.folder / spec.classifier)},
        weights=common.mobilenet,
        seeds=seeds or [0],
        epochs=spec.epochs,
        settings=spec.settings,
        precision=common.precision,
        say=say,
    )
    paper_contrasts.write_contrasts(found.folder, common.folder / spec.bank)


# By what golf_events.py calls them; the paper's recipe is trained with as many candidates as there are to choose from.
GOLF_TRAININGS = {"default": "default", "paper": "paper-num_candidates-16"}


def golf(common: Common, place: str) -> Any:
    """How often the chosen frames show an event of the swing."""
    from benchmarks.paper import golf_events

    spec = spec_of(common, place)
    samplers = spec.folder(common.folder) / "samplers"
    named = {
        f"{name}#{seed}": samplers / f"{training}-{seed}"
        for name, training in GOLF_TRAININGS.items()
        for seed in ALL_SEEDS
        if (samplers / f"{training}-{seed}" / "result.json").is_file()
    }
    return golf_events.write(
        common.folder / spec.bank,
        common.folder / spec.classifier,
        (common.folder / spec.bank).parent / "events.json",
        named,
        common.folder / "golf_events.json",
        precision=common.precision,
    )


JOBS: dict[str, Callable[..., Any]] = {
    "reels": make_reels,
    "resnet50": train_resnet50,
    "clip network": train_clip_network,
    "teach": teach,
    "rebuild": rebuild,
    "features": keep_features,
    "train": train,
    "measure": measure,
    "golf": golf,
}


# ---- the process


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(common: Common, job: Job) -> Reply:
    """One job. What the package refuses, or this machine cannot do, is in the reply; mistakes end the process."""
    from sosampler.errors import SosamplerError, first_line

    begin = time.perf_counter()
    arguments = {key: value for key, value in job.items() if key != "do"}
    try:
        result: Reply = {"result": JOBS[job["do"]](common, **arguments)}
    except (SosamplerError, RuntimeError, OSError, ImportError) as error:
        say(traceback.format_exc())
        result = {"failed": f"{type(error).__name__}: {first_line(error)}"}
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"seconds": round(time.perf_counter() - begin, 1), **result}


def main() -> None:
    end_with_parent()
    common = _hashable(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        job = json.loads(line)
        say(f"-- {line.strip()}")
        print(MARK + json.dumps(run(common, job), default=str), flush=True)


class _Counts(dict[str, list[int]]):
    """For the cache of places, whose key holds it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


def _hashable(result: dict[str, Any]) -> Common:
    return Common(**result | {"reel_counts": _Counts(result["reel_counts"])})


if __name__ == "__main__":
    main()
