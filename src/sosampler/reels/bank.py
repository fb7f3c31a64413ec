"""Reels as a bank, rendered by several processes. Each picture is decoded once, into memory that all of them share."""

from __future__ import annotations

import os
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from sosampler._util.arrays import Frames, Indices
from sosampler._util.files import differences, plain
from sosampler._util.progress import OnProgress
from sosampler._util.validation import check_int
from sosampler._util.workers import CAN_SHARE_MEMORY, Pixels, ProcessPool, SharedPixels, Work
from sosampler.bank.bank import Bank
from sosampler.bank.format import BankFolder, StoredVideo, read_header
from sosampler.bank.from_arrays import FrameEntry, stored_by_threads, stored_entry, write_entries
from sosampler.errors import InvalidArgument
from sosampler.reels import render
from sosampler.reels.images import Picture, PictureCache, Pictures
from sosampler.reels.recipe import Reel

# A process needs about as long to start as it then needs to render so many frames.
_FRAMES_PER_PROCESS = 400
# Of decoded pictures that all processes share, and of those beyond that each process caches itself.
_SHARED_BYTES, _OWN_BYTES = 512 << 20, 32 << 20
_PICTURES_PER_TASK = 16

Slots = dict[Hashable, int]
"""The index of each picture of a source in the shared memory."""


@dataclass(frozen=True, eq=False)
class ReelSplit:
    """The reels of one split and the pictures that they show."""

    split: str  # "train", "dev" or "test"
    reels: Sequence[Reel]
    pictures: Pictures


@dataclass(frozen=True, eq=False)
class _Rendering:
    """The frames of a reel that are stored; rendered when called."""

    reel: Reel
    pictures: Pictures
    positions: Indices  # among the candidates

    def __call__(self) -> Frames:
        frames: Frames = render.candidate_frames(self.reel, self.pictures)[self.positions]
        return frames


def write_reel_bank(
    out: str | os.PathLike[str],
    splits: Sequence[ReelSplit],
    *,
    quality: int = 90,
    workers: int = 1,
    on_progress: OnProgress | None = None,
) -> Bank:
    """Write the candidates of reels as a bank. Killed and called again with the same reels it resumes.

    Every reel is a group of its own, so that reels which share pictures may be in two splits; the caller makes sure
    that the splits share no pictures.

    Args:
        out: the bank's folder.
        quality: of the JPEGs, 1 to 100.
        workers: processes that render, or threads of this one where there are few reels; the bytes are the same.
        on_progress: called after each reel.
    """
    made_by = settings_of(splits)
    folder = BankFolder(Path(out))
    if folder.bank_json.exists():
        check_same_reels(folder.path, read_header(folder).settings.get("made_by"), made_by)
    return write_entries(
        out,
        [entry for split in splits for entry in _entries(split)],
        partial(_stored, quality=quality, workers=check_int("workers", workers)),
        classes=splits[0].pictures.class_names,
        quality=quality,
        made_by=made_by,
        on_progress=on_progress,
    )


def _entries(split: ReelSplit) -> Iterator[FrameEntry]:
    """Yield the candidates of each reel, each frame once. A reel is rendered when its turn comes."""
    for reel in split.reels:
        frames, positions = np.unique(reel.candidate_indices, return_index=True)  # short reels repeat frames
        yield FrameEntry(
            id=f"{split.split}-{reel.id}",
            labels=(reel.label,),
            frames=_Rendering(reel, split.pictures, positions),
            pts_seconds=reel.candidate_seconds[positions],
            split=split.split,
            frame_indices=frames,
            duration=reel.duration,
            total_num_frames=reel.total_num_frames,
        )


def _stored(entries: list[FrameEntry], *, quality: int, workers: int) -> Generator[StoredVideo]:
    """Render reels in order: in processes where that is faster, otherwise in threads."""
    renderings = [cast(_Rendering, entry.frames) for entry in entries]
    sources = list({id(rendering.pictures): rendering.pictures for rendering in renderings}.values())
    num_frames = sum(len(rendering.positions) for rendering in renderings)
    num_processes = num_render_processes(workers, sources, num_frames)
    if num_processes < 2:
        yield from stored_by_threads(entries, quality=quality, num_threads=workers)
        return
    number_of = {id(source): number for number, source in enumerate(sources)}
    tasks = [
        _ReelTask(replace(entry, frames=()), rendering.reel, number_of[id(rendering.pictures)], rendering.positions)
        for entry, rendering in zip(entries, renderings, strict=True)
    ]
    slots = _slots_for(tasks, sources)
    shape = (sum(map(len, slots)), sources[0].size, sources[0].size, 3)
    with ExitStack() as stack:
        shared = stack.enter_context(SharedPixels())
        shared.array(shape)
        config = _RenderConfig(sources, slots, shared.file, shape, quality)
        pool = stack.enter_context(
            ProcessPool(
                num_processes, "sosampler.reels.bank:renderer", config, files=[shared.file], work="rendering reels"
            )
        )
        for _ in pool.results(_picture_tasks(slots)):  # before the first reel, so that no process waits later
            pass
        yield from pool.results(tasks)


def num_render_processes(workers: int, sources: Sequence[Pictures], num_frames: int) -> int:
    """Return how many processes are worth starting; with fewer than two, threads of this process are as fast.

    Sources of the package can be sent to other processes. Others may not: they render in threads.
    """
    can_be_sent = all(type(source).__module__.startswith("sosampler.") for source in sources)
    if not CAN_SHARE_MEMORY or not can_be_sent or len({source.size for source in sources}) > 1:
        return 0
    return min(workers, num_frames // _FRAMES_PER_PROCESS)


@dataclass(frozen=True, eq=False)
class _ReelTask:
    """A reel to render, and which of its candidates are stored."""

    entry: FrameEntry  # without its frames
    reel: Reel
    source: int  # index of its pictures
    positions: Indices


_PictureTask = tuple[int, list[Hashable]]
"""A source, and the keys of some of its pictures."""


@dataclass(frozen=True)
class _RenderConfig:
    sources: Sequence[Pictures]
    slots: Sequence[Slots]  # of each source
    file: int
    shape: tuple[int, int, int, int]  # of the shared pictures: [slots, S, S, 3]
    quality: int


def _slots_for(tasks: Sequence[_ReelTask], sources: Sequence[Pictures]) -> list[Slots]:
    """Assign shared memory to the pictures that are shown, while there is space; sources of one cache share slots."""
    max_slots = _SHARED_BYTES // (3 * sources[0].size ** 2)
    owner = [next(n for n, other in enumerate(sources) if other._cache is source._cache) for source in sources]
    slots: list[Slots] = [{} for _ in sources]
    taken = 0
    for task in tasks:
        source, of_source = sources[task.source], slots[owner[task.source]]
        for shot in task.reel.shots:
            key = (source._members[shot.label] if shot.shows_class else source._distractors)[shot.picture]
            if key not in of_source and taken < max_slots:
                of_source[key] = taken
                taken += 1
    return slots


def _picture_tasks(slots: Sequence[Slots]) -> Iterator[_PictureTask]:
    for number, of_source in enumerate(slots):
        keys = list(of_source)
        for begin in range(0, len(keys), _PICTURES_PER_TASK):
            yield number, keys[begin : begin + _PICTURES_PER_TASK]


# ---- in a child process


class _SharedCache(PictureCache):
    """Pictures in shared memory, which are all put there before the first reel; others in its own."""

    def __init__(self, slots: Slots, pictures: Pixels) -> None:
        super().__init__(_OWN_BYTES)
        self._slots, self._shared = slots, pictures  # [slots, S, S, 3]

    def get(self, key: Hashable) -> Picture | None:
        slot = self._slots.get(key)
        return super().get(key) if slot is None else self._shared[slot]

    def fill(self, key: Hashable, picture: Picture) -> None:
        self._shared[self._slots[key]] = picture


def renderer(config: _RenderConfig) -> Work:
    """Return the function that loads pictures into the shared memory, or renders a reel."""
    pictures = SharedPixels(config.file).array(config.shape)
    caches: dict[int, _SharedCache] = {}  # sources that shared a cache in the parent still do
    for number, source in enumerate(config.sources):
        caches.setdefault(id(source._cache), _SharedCache(config.slots[number], pictures))
    before = [source._cache for source in config.sources]
    for source, cache in zip(config.sources, before, strict=True):
        source._cache = caches[id(cache)]

    def work(task: _ReelTask | _PictureTask) -> StoredVideo | None:
        if isinstance(task, _ReelTask):
            frames = render.candidate_frames(task.reel, config.sources[task.source])[task.positions]
            return stored_entry(replace(task.entry, frames=frames), config.quality)
        number, keys = task
        for key in keys:
            caches[id(before[number])].fill(key, config.sources[number]._load(key))
        return None

    return work


# ---- settings, which are compared when a folder is written to again


def settings_of(splits: Sequence[ReelSplit], **more: Any) -> dict[str, Any]:
    """Return all that decides the frames, as plain JSON values: recipe, seeds, counts, pictures."""
    return plain(
        {
            "kind": "reels",
            "rendering": render.RENDER_VERSION,
            "recipe": splits[0].reels[0].recipe.to_dict(),
            "seeds": {part.split: part.reels[0].seed for part in splits},
            "counts": {part.split: len(part.reels) for part in splits},
            "pictures": {part.split: part.pictures.fingerprint() for part in splits},
            **more,
        }
    )


def check_same_reels(path: Path, saved: Any, given: dict[str, Any]) -> None:
    """Refuse to resume in a folder of other reels, and name what differs."""
    if not isinstance(saved, dict) or saved.get("kind") != "reels":
        raise InvalidArgument(f"{path}: holds something else than reels; give another folder")
    different = differences(_flat(saved), _flat(given))
    if saved.get("pictures") != given["pictures"]:
        different.insert(0, "other pictures")  # their fingerprints mean nothing to people
    if different:
        raise InvalidArgument(
            f"{path}: holds reels made with {'; '.join(different)}; give the same again to resume, "
            "or another folder for new ones"
        )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those of the recipe beside the others, and without fingerprints."""
    recipe = settings.get("recipe")
    others = {name: value for name, value in settings.items() if name not in ("recipe", "pictures")}
    return {**(recipe if isinstance(recipe, dict) else {}), **others}
