"""Reels rendered by several processes. Each picture is decoded once, into memory that all of them share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from sosampler.data.bank_format import StoredVideo
from sosampler.data.child_processes import CAN_SHARE_MEMORY
from sosampler.data.pictures import Picture, PictureCache, Pictures
from sosampler.data.processes import Answer, ProcessPool
from sosampler.data.reel_frames import candidate_frames
from sosampler.data.reels import Reel, Shot
from sosampler.data.shared_pixels import Pixels, SharedPixels
from sosampler.data.write_frames import FrameEntry, stored_entry
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
                "sosampler.data.reel_processes:renderer",
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
