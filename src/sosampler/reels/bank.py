"""Reels rendered by several processes. Each picture is decoded once, into memory that all of them share."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from sosampler._util.progress import OnProgress
from sosampler._util.validation import whole_number
from sosampler._util.workers import CAN_SHARE_MEMORY, Answer, Pixels, ProcessPool, SharedPixels
from sosampler.bank.bank import Bank
from sosampler.bank.format import BankFolder, StoredVideo, read_head
from sosampler.bank.from_arrays import FrameEntry, stored_by_threads, stored_entry, write_entries
from sosampler.errors import InvalidArgument
from sosampler.reels import render as reel_frames
from sosampler.reels.images import Picture, PictureCache, Pictures
from sosampler.reels.recipe import Reel, ReelRecipe, Shot
from sosampler.reels.render import candidate_frames
from sosampler.video.reader import Frames
from sosampler.video.timeline import Indices

# A process is ready after about the time in which it then renders so many.
_FRAMES_A_PROCESS = 400
# Of decoded pictures that all processes share, and of those beyond that each process keeps for itself.
_SHARED_BYTES, _OWN_BYTES = 512 << 20, 32 << 20
_PICTURES_A_TASK = 16

Slots = dict[Hashable, int]
"""Where each picture of a source lies in the shared memory."""


@dataclass(frozen=True, eq=False)
class ReelTask:
    """A reel to render; which of its candidates are kept, and what the bank says about it."""

    entry: FrameEntry  # without its frames
    reel: Reel
    source: int  # which pictures
    places: Indices


@dataclass(frozen=True)
class _Told:
    sources: Sequence[Pictures]
    slots: Sequence[Slots]  # of each source
    file: int
    shape: tuple[int, int, int, int]  # of the shared pictures: [slots, S, S, 3]
    quality: int


_Load = tuple[int, list[Hashable]]
"""The source, and which of its pictures."""


def num_render_processes(workers: int, sources: Sequence[Pictures], num_frames: int) -> int:
    """How many processes pay; less than two where threads of this one do as well.

    Sources of the package travel to other processes. Others may not: they render in threads.
    """
    travels = all(type(source).__module__.startswith("sosampler.") for source in sources)
    if not CAN_SHARE_MEMORY or not travels or len({source.size for source in sources}) > 1:
        return 0
    return min(workers, num_frames // _FRAMES_A_PROCESS)


def rendered_by_processes(
    tasks: Sequence[ReelTask], sources: Sequence[Pictures], *, quality: int, num_processes: int
) -> Iterator[StoredVideo]:
    """What the bank keeps of each reel, in order."""
    slots = _slots_for(tasks, sources)
    shape = (sum(map(len, slots)), sources[0].size, sources[0].size, 3)
    with ExitStack() as stack:
        shared = stack.enter_context(SharedPixels())
        shared.array(shape)
        told = _Told(sources, slots, shared.file, shape, quality)
        pool = stack.enter_context(
            ProcessPool(
                num_processes,
                "sosampler.reels.bank:renderer",
                told,
                files=[shared.file],
                work="rendering",
            )
        )
        for _ in pool.results(_loads(slots)):  # before the first reel, so that nobody waits for anybody later
            pass
        yield from pool.results(tasks)


def _slots_for(tasks: Iterable[ReelTask], sources: Sequence[Pictures]) -> list[Slots]:
    """A place for each picture that is shown, as far as there is room; of sources that share pictures the first's."""
    room = _SHARED_BYTES // (3 * sources[0].size ** 2)
    owner = [next(n for n, other in enumerate(sources) if other._cache is source._cache) for source in sources]
    slots: list[Slots] = [{} for _ in sources]
    taken = 0
    for task in tasks:
        own = slots[owner[task.source]]
        for shot in task.reel.shots:
            key = _key_of(sources[task.source], shot)
            if key not in own and taken < room:
                own[key] = taken
                taken += 1
    return slots


def _key_of(source: Pictures, shot: Shot) -> Hashable:
    return (source._members[shot.label] if shot.shows_class else source._distractors)[shot.picture]


def _loads(slots: Sequence[Slots]) -> Iterator[_Load]:
    for number, own in enumerate(slots):
        keys = list(own)
        for begin in range(0, len(keys), _PICTURES_A_TASK):
            yield number, keys[begin : begin + _PICTURES_A_TASK]


# --- in a process -----------------------------------------------------------------------------------------------------


class _SharedCache(PictureCache):
    """Pictures in shared memory, which were all put there before the first is asked for; others in its own."""

    def __init__(self, slots: Slots, pictures: Pixels) -> None:
        super().__init__(_OWN_BYTES)
        self._slots, self._shared = slots, pictures  # [slots, S, S, 3]

    def get(self, key: Hashable) -> Picture | None:
        slot = self._slots.get(key)
        return super().get(key) if slot is None else self._shared[slot]

    def fill(self, key: Hashable, picture: Picture) -> None:
        self._shared[self._slots[key]] = picture


def renderer(told: _Told) -> Answer:
    """Answers `_Load` with None once the pictures are in the shared memory, and a `ReelTask` with its video."""
    pictures = SharedPixels(told.file).array(told.shape)
    caches: dict[int, _SharedCache] = {}  # sources that shared one before they came here still do
    for number, source in enumerate(told.sources):
        caches.setdefault(id(source._cache), _SharedCache(told.slots[number], pictures))
    before = [source._cache for source in told.sources]
    for source, cache in zip(told.sources, before, strict=True):
        source._cache = caches[id(cache)]

    def answer(task: ReelTask | _Load) -> StoredVideo | None:
        if isinstance(task, ReelTask):
            frames = candidate_frames(task.reel, told.sources[task.source])[task.places]
            return stored_entry(replace(task.entry, frames=frames), told.quality)
        number, keys = task
        cache = caches[id(before[number])]
        for key in keys:
            cache.fill(key, told.sources[number]._load(key))
        return None

    return answer


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
