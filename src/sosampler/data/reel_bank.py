"""Reels straight into a bank: their candidate frames as JPEGs, no video in between."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from sosampler.checks import whole_number
from sosampler.data import reel_frames
from sosampler.data.bank import Bank
from sosampler.data.bank_format import BankFolder, StoredVideo, read_head
from sosampler.data.pictures import Pictures
from sosampler.data.reel_processes import ReelTask, num_render_processes, rendered_by_processes
from sosampler.data.reels import Reel, ReelRecipe
from sosampler.data.shards import OnProgress
from sosampler.data.write_frames import FrameEntry, stored_by_threads, write_entries
from sosampler.errors import InvalidArgument
from sosampler.video.reader import Frames
from sosampler.video.timeline import Indices


@dataclass(frozen=True, eq=False)
class ReelSplit:
    """The reels of one split and the pictures that they show."""

    split: str  # "train", "dev" or "test"
    reels: Sequence[Reel]
    pictures: Pictures


def write_reel_bank(
    out: str | os.PathLike[str],
    splits: Sequence[ReelSplit],
    *,
    quality: int = 90,
    workers: int = 1,
    on_progress: OnProgress | None = None,
) -> Bank:
    """Write the candidates of reels as a bank. Killed and called again with the same reels it goes on.

    Every reel is a group of its own, so that reels which share pictures may stand in two splits; that the pictures of
    splits are disjoint is up to whoever planned them.

    Args:
        out: the bank's folder.
        quality: of the JPEGs, 1 to 100.
        workers: processes that render, or threads of this one where there are few reels; the bytes are the same.
        on_progress: called after each reel.
    """
    made_by = told_of(splits)
    folder = BankFolder(Path(out))
    if folder.bank_json.exists():
        check_same_reels(folder.path, read_head(folder).settings.get("made_by"), made_by)
    return write_entries(
        out,
        [entry for split in splits for entry in reel_entries(split)],
        partial(_stored, quality=quality, workers=whole_number("workers", workers)),
        classes=splits[0].pictures.class_names,
        quality=quality,
        made_by=made_by,
        on_progress=on_progress,
    )


def reel_entries(split: ReelSplit) -> Iterator[FrameEntry]:
    """What a bank keeps of each reel: the candidates, each frame once. A reel is rendered when its turn comes."""
    for reel in split.reels:
        frames, places = np.unique(reel.candidate_indices, return_index=True)  # short reels repeat frames
        yield FrameEntry(
            id=f"{split.split}-{reel.id}",
            labels=(reel.label,),
            frames=_Rendering(reel, split.pictures, places),
            pts_seconds=reel.candidate_seconds[places],
            split=split.split,
            frame_indices=frames,
            duration=reel.duration,
            total_num_frames=reel.total_num_frames,
        )


@dataclass(frozen=True, eq=False)
class _Rendering:
    """The frames of a reel that are kept, when they are asked for."""

    reel: Reel
    pictures: Pictures
    places: Indices  # among the candidates

    def __call__(self) -> Frames:
        frames: Frames = reel_frames.candidate_frames(self.reel, self.pictures)[self.places]
        return frames


def _stored(entries: list[FrameEntry], *, quality: int, workers: int) -> Generator[StoredVideo]:
    """What the bank keeps of each reel, in order: from processes where that pays, otherwise from threads."""
    renderings = [cast(_Rendering, entry.frames) for entry in entries]
    sources = list({id(rendering.pictures): rendering.pictures for rendering in renderings}.values())
    num_frames = sum(len(rendering.places) for rendering in renderings)
    num_processes = num_render_processes(workers, sources, num_frames)
    if num_processes < 2:
        yield from stored_by_threads(entries, quality=quality, num_threads=workers)
        return
    number_of = {id(source): number for number, source in enumerate(sources)}
    tasks = [
        ReelTask(replace(entry, frames=()), rendering.reel, number_of[id(rendering.pictures)], rendering.places)
        for entry, rendering in zip(entries, renderings, strict=True)
    ]
    yield from rendered_by_processes(tasks, sources, quality=quality, num_processes=num_processes)


# --- what reels are made of, to be compared when a folder is written to again -----------------------------------------


def told_of(splits: Sequence[ReelSplit], **more: Any) -> dict[str, Any]:
    """All that decides the frames, as plain JSON values: recipe, seeds, counts, pictures."""
    recipe: ReelRecipe = splits[0].reels[0].recipe
    told = {
        "kind": "reels",
        "rendering": reel_frames.RENDER_VERSION,
        "recipe": recipe.to_dict(),
        "seeds": {part.split: part.reels[0].seed for part in splits},
        "counts": {part.split: len(part.reels) for part in splits},
        "pictures": {part.split: part.pictures.fingerprint() for part in splits},
        **more,
    }
    plain: dict[str, Any] = json.loads(json.dumps(told))  # as it will be read back: lists, no tuples
    return plain


def check_same_reels(path: Path, found: Any, asked: dict[str, Any]) -> None:
    """Refuse to go on with a folder of other reels, naming no more than what differs."""
    if not isinstance(found, dict) or found.get("kind") != "reels":
        raise InvalidArgument(f"{path}: holds something else than reels; give another folder")
    before, now = _flat(found), _flat(asked)
    differing = [
        # Fingerprints mean nothing to people.
        "other pictures" if name == "pictures" else f"{name}={before.get(name)!r}, now {now.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if differing:
        raise InvalidArgument(
            f"{path}: holds reels made with {'; '.join(differing)}; give the same again to go on with them, "
            "or another folder for new ones"
        )


def _flat(told: dict[str, Any]) -> dict[str, Any]:
    recipe = told.get("recipe")
    return {**(recipe if isinstance(recipe, dict) else {}), **{k: v for k, v in told.items() if k != "recipe"}}
