"""`make_reels`: untrimmed videos with labels, composed from pictures, as a bank or as mp4 files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sosampler._util.files import begin, read_settings
from sosampler._util.progress import OnProgress, Progress
from sosampler._util.validation import check_int, one_of
from sosampler._util.workers import num_cores
from sosampler.bank.bank import Bank
from sosampler.datasets.manifest import SPLITS, Manifest
from sosampler.errors import InvalidArgument
from sosampler.reels.bank import ReelSplit, check_same_reels, settings_of, write_reel_bank
from sosampler.reels.images import Pictures, check_num_classes, open_sources, open_sports22
from sosampler.reels.recipe import PRESETS, SPORTS22, ReelRecipe
from sosampler.reels.render import check_file_options, plan_from, write_reels

REELS_FILE = "reels.json"
"""Beside the mp4 files: the settings they were made with."""

_COUNTS = {"train": 300, "dev": 100, "test": 100}
_DEV_PER_TRAIN = 10  # sports22: one of so many reels for the sampler is for dev
# Each split has its own seed, three for each seed of the caller. Seed 0 gives those of sports22.
_SEED_OF = {"dev": 0, "train": SPORTS22["train"].seed, "test": SPORTS22["test"].seed}


def make_reels(
    pictures: str | os.PathLike[str] | Pictures,
    out: str | os.PathLike[str],
    *,
    to: str = "bank",
    preset: str | None = "demo",
    recipe: ReelRecipe | Mapping[str, Any] | None = None,
    counts: Mapping[str, int] | None = None,
    seed: int = 0,
    num_classes: int | None = None,
    quality: int = 90,
    crf: int = 18,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> Bank | Manifest:
    """Make labelled untrimmed videos, in which only some shots show the class, out of labelled pictures.

    Everything follows from the pictures, the recipe and the seed. Killed and called again with the same arguments it
    resumes; a folder with other reels is refused. Every reel is a group of its own (its id).

    The preset "sports22" makes the reels of the project's first measurement: 3000 of the half of the train pictures
    on which the classifier was not trained (seed 1), 3000 of the test pictures (seed 2). The last 300 of the former
    are dev. Dev there shares its pictures with train, in other reels, so it is somewhat easier than test, which shares
    none; counts={"train": 3000, "test": 3000} leaves dev out.

    Args:
        pictures: a folder with one folder per class, or with train/ and test/ (and dev/) that hold such folders;
            pictures without a class in a folder `distractors` beside them, which may be divided likewise. Or
            "procedural": drawn pictures. Or an open source. The splits never share a picture (but see above).
        out: folder of the bank, or of the files and their manifest.csv.
        to: "bank", the candidate frames alone, or "mp4", real files.
        preset: "demo", "sports22", or None for the plain `ReelRecipe`.
        recipe: changes to the preset's recipe, as {"share": (0.1, 0.3)}; or a complete recipe instead of it. A changed
            size changes picture_size with it, unless that is given too.
        counts: reels of each split, 0 where it is left out; None: the preset's, or 300, 100 and 100.
        seed: of the reels and of procedural pictures.
        num_classes: of procedural pictures; 8 where it is left out.
        quality: of a bank's JPEGs.
        crf: x264's quality of mp4 files.
        workers: processes that render for a bank, or threads where there are few reels; None: one per core. The bytes
            do not depend on it. Files are written one after another.
        on_progress: called after each reel.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import sosampler as so
        >>> with TemporaryDirectory() as folder:
        ...     bank = so.make_reels("procedural", folder, counts={"train": 4, "test": 2}, num_classes=3)
        ...     len(bank), len(bank.classes), len(bank.split("test"))
        (6, 3, 2)
    """
    one_of("to", to, ("bank", "mp4"))
    chosen = reel_recipe(preset, recipe)
    check_file_options(chosen.size if to == "mp4" else 0, crf)  # before anything is written
    num_workers = num_cores() if workers is None else check_int("workers", workers)
    splits = plan_splits(pictures, preset, chosen, counts=counts, seed=seed, num_classes=num_classes)
    if to == "bank":
        return write_reel_bank(out, splits, quality=quality, workers=num_workers, on_progress=on_progress)
    return _write_files(Path(out), splits, crf, on_progress)


def reel_recipe(preset: str | None, changes: ReelRecipe | Mapping[str, Any] | None) -> ReelRecipe:
    """Return the recipe of a preset with changes, or a complete one instead of it."""
    base = ReelRecipe() if preset is None else PRESETS[one_of("preset", preset, PRESETS)]
    if isinstance(changes, ReelRecipe):
        return changes
    given = dict(changes or {})
    for name in given:
        one_of("a name in recipe", name, (field.name for field in fields(ReelRecipe)))
    if "size" in given and "picture_size" not in given:
        given["picture_size"] = round(check_int("size", given["size"]) * base.picture_size / base.size)
    return replace(base, **given)


def plan_splits(
    pictures: str | os.PathLike[str] | Pictures,
    preset: str | None,
    recipe: ReelRecipe,
    *,
    counts: Mapping[str, int] | None = None,
    seed: int = 0,
    num_classes: int | None = None,
) -> list[ReelSplit]:
    """Open the pictures and plan the reels of every split that gets some: train, dev, test."""
    is_sports22 = preset == "sports22"
    wanted = _checked_counts(default_counts(preset) if counts is None else counts)
    if check_int("seed", seed, at_least=0) >= 2**30:
        raise InvalidArgument(f"seed={seed} must be an int below 2**30")
    check_num_classes(pictures, num_classes)
    if is_sports22:
        sources = open_sports22(pictures, list(wanted), size=recipe.picture_size)
    else:
        sources = open_sources(pictures, list(wanted), size=recipe.picture_size, seed=seed, num_classes=num_classes)
    _check_distractors(sources, recipe)
    planned = []
    for split, count in wanted.items():
        # Dev of sports22 continues where train ends.
        continues = is_sports22 and split == "dev"
        skipped = wanted.get("train", 0) if continues else 0
        own_seed = 3 * seed + _SEED_OF["train" if continues else split]
        reels = plan_from(sources[split], recipe, count=skipped + count, seed=own_seed)
        planned.append(ReelSplit(split, reels[skipped:], sources[split]))
    return planned


def default_counts(preset: str | None) -> dict[str, int]:
    """Return the reels of each split of a preset."""
    if preset != "sports22":
        return dict(_COUNTS)
    train, test = SPORTS22["train"].count, SPORTS22["test"].count
    dev = train // _DEV_PER_TRAIN
    return {"train": train - dev, "dev": dev, "test": test}


def _checked_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the splits that get reels, in their order."""
    for split, count in counts.items():
        one_of("a split in counts", split, SPLITS)
        check_int(f"the count of {split}", count, at_least=0)
    wanted = {split: int(counts[split]) for split in SPLITS if counts.get(split)}
    if not wanted:
        raise InvalidArgument(f"counts={dict(counts)} contains no reel; give at least one")
    return wanted


def _check_distractors(sources: Mapping[str, Pictures], recipe: ReelRecipe) -> None:
    min_share = recipe.share[0] if isinstance(recipe.share, tuple) else recipe.share
    for split, source in sources.items():
        if min_share < 1 and not source.num_distractors:
            raise InvalidArgument(
                f"there are no distractors for {split}; put pictures without a class into a folder 'distractors' "
                "beside those of the classes, or give share=1"
            )


def _write_files(out: Path, splits: list[ReelSplit], crf: int, on_progress: OnProgress | None) -> Manifest:
    settings, file = settings_of(splits, crf=crf), out / REELS_FILE
    saved = read_settings(file)
    if saved is None:
        begin(file, settings)
    else:
        check_same_reels(out, saved, settings)
    # Reels are written in order, so the files that are there are those of the first ones.
    before = sum(not file.name.startswith(".") for file in out.glob("videos/*.mp4"))
    progress = Progress(sum(len(part.reels) for part in splits), done=before, before=before)
    num_done = 0

    def advance(_: Progress) -> None:
        nonlocal num_done
        num_done += 1
        if num_done > before and on_progress is not None:
            progress.done = num_done
            on_progress(progress)

    manifests = [
        write_reels(out, part.reels, part.pictures, split=part.split, group="", crf=crf, on_progress=advance)
        for part in splits
    ]
    return manifests[-1]
