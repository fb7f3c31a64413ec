"""`make_reels`: untrimmed videos with labels, composed from pictures or clips, as a bank or as mp4 files.

For a bank several processes render. Each picture is decoded once, into memory that all of them share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from sosampler._util.arrays import Frames, Indices
from sosampler._util.files import plain, remove_leftovers
from sosampler._util.hardware import usable_cores
from sosampler._util.limits import check_count
from sosampler._util.progress import OnProgress, Progress
from sosampler._util.validation import check_int, one_of
from sosampler._util.workers import CAN_SHARE_MEMORY, Pixels, ProcessPool, SharedPixels, Work
from sosampler.bank.bank import Bank
from sosampler.bank.format import BankFolder, StoredVideo, read_header
from sosampler.bank.from_arrays import FrameEntry, stored_by_threads, stored_entry, write_entries
from sosampler.datasets.manifest import SPLITS, Item, Manifest
from sosampler.datasets.manifest_io import MANIFEST_SUFFIXES
from sosampler.datasets.segments import SEGMENTS_FILE, Segment, write_segments
from sosampler.errors import InvalidArgument
from sosampler.reels import render
from sosampler.reels.clips import Background
from sosampler.reels.images import PROCEDURAL, Picture, PictureCache, Pictures, open_sources, open_sports22
from sosampler.reels.make_streams import make_streams, stream_recipe
from sosampler.reels.recipe import PRESETS, SPORTS22, Reel, ReelRecipe, pair_of
from sosampler.reels.settings import begin_files, check_same_reels
from sosampler.reels.streams import STREAM_PRESETS, StreamRecipe

_COUNTS = {"train": 300, "dev": 100, "test": 100}
_DEV_PER_TRAIN = 10  # sports22: one of so many reels for the sampler is for dev
# Each split has its own seed, three for each seed of the caller. Seed 0 gives those of sports22.
_SEED_OF = {"dev": 0, "train": SPORTS22["train"].seed, "test": SPORTS22["test"].seed}
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


def make_reels(
    pictures: str | os.PathLike[str] | Pictures | Manifest,
    out: str | os.PathLike[str],
    *,
    to: str = "bank",
    preset: str | None = "demo",
    recipe: ReelRecipe | StreamRecipe | Mapping[str, Any] | None = None,
    counts: Mapping[str, int] | None = None,
    seed: int = 0,
    num_classes: int | None = None,
    background: Background = None,
    classifier_share: float = 0.5,
    quality: int = 90,
    crf: int = 18,
    workers: int | None = None,
    say: Callable[[str], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Bank | Manifest:
    """Make labelled untrimmed videos, in which only some shots show the class, out of labelled pictures or clips.

    Everything follows from the pictures, the recipe and the seed. Killed and called again with the same arguments it
    resumes; a folder with other reels is refused. Every reel is a group of its own (its id).

    The preset "sports22" makes the reels of the project's first measurement: 3000 of the half of the train pictures
    on which the classifier was not trained (seed 1), 3000 of the test pictures (seed 2). The last 300 of the former
    are dev. Dev there shares its pictures with train, in other reels, so it is somewhat easier than test, which shares
    none; counts={"train": 3000, "test": 3000} leaves dev out.

    The presets "streams" (ten shots) and "long-streams" (60 shots, three to five minutes) compose mp4 files from video
    clips: shots of one class, by different clips, among shots of background. A group of clips is never in two splits.
    In train and dev, streams never show a group that is set apart for the classifier: those clips, and all of test,
    are listed in `classifier.csv`, a manifest for `train_classifier`; background that is set apart likewise is in
    `classifier_background.csv`. Clips that cannot be read or last less than a second are not shown, and are listed in
    `skipped.jsonl`.

    Beside mp4 files, `segments.jsonl` says when each video shows its class and what it is made of. `prepare` carries it
    into the bank.

    Args:
        pictures: a folder with one folder per class, or with train/ and test/ (and dev/) that hold such folders;
            pictures without a class in a folder `distractors` beside them, which may be divided likewise. Or
            "procedural": drawn pictures. Or an open source. The splits never share a picture (but see above). For
            streams a manifest of clips, in which rows without a label are background; without splits its groups are
            divided, a fifth each for dev and test.
        out: folder of the bank, or of the files and their manifest.csv.
        to: "bank", the candidate frames alone, or "mp4", real files. Streams are always mp4.
        preset: "demo", "sports22", "streams", "long-streams", or None for the plain `ReelRecipe`.
        recipe: changes to the preset's recipe, as {"share": (0.1, 0.3)}; or a complete recipe instead of it. A changed
            size changes picture_size with it, unless that is given too.
        counts: reels of each split, 0 where it is left out; None: the preset's, or 300, 100 and 100.
        seed: of the reels and of procedural pictures.
        num_classes: of procedural pictures; 8 where it is left out.
        background: of streams: manifests (their labels do not matter) or folders of videos, one or a list.
        classifier_share: of streams: share of the groups of each class, and of background, in train and dev that is
            set apart for the classifier. It depends on the clips alone, not on seed or recipe.
        quality: of a bank's JPEGs.
        crf: x264's quality of mp4 files.
        workers: processes that render for a bank or write streams, or threads where there are few reels; None: one per
            core. The bytes do not depend on it. Files of reels of pictures are written one after another.
        say: called with a line of text about clips that are not shown.
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
    if preset is not None:
        one_of("preset", preset, (*PRESETS, *STREAM_PRESETS))
    if preset in STREAM_PRESETS or isinstance(recipe, StreamRecipe):
        if to != "mp4" or isinstance(recipe, ReelRecipe) or isinstance(pictures, Pictures) or num_classes is not None:
            raise InvalidArgument(
                f"preset={preset!r} composes mp4 files from a manifest of clips; give to='mp4' (--to mp4), and nothing "
                "that is for pictures"
            )
        check_int("seed", seed, at_least=0, at_most=2**30 - 1)
        return make_streams(
            pictures,
            background,
            Path(out),
            stream_recipe(preset, recipe),
            counts=_checked_counts(default_counts(preset) if counts is None else counts),
            seeds={split: 3 * seed + own for split, own in _SEED_OF.items()},
            classifier_share=classifier_share,
            crf=crf,
            workers=workers,
            say=say,
            on_progress=on_progress,
        )
    is_manifest = isinstance(pictures, (str, os.PathLike)) and Path(pictures).suffix.lower() in MANIFEST_SUFFIXES
    if background is not None or isinstance(pictures, Manifest) or is_manifest:
        raise InvalidArgument(
            f"preset={preset!r} composes from folders of pictures; for clips give one of: {', '.join(STREAM_PRESETS)}"
        )
    chosen = reel_recipe(preset, recipe)
    render.check_file_options(chosen.size if to == "mp4" else 0, crf)  # before anything is written
    num_workers = usable_cores() if workers is None else check_count("workers", workers, "MAX_THREADS")
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
    check_int("seed", seed, at_least=0, at_most=2**30 - 1)
    if num_classes is not None and pictures != PROCEDURAL:
        raise InvalidArgument(
            f"num_classes={num_classes} must not be given with these pictures, which have their own classes; "
            f'leave it out, or give "{PROCEDURAL}" pictures'
        )
    if is_sports22:
        sources = open_sports22(pictures, list(wanted), size=recipe.picture_size)
    else:
        sources = open_sources(pictures, list(wanted), size=recipe.picture_size, seed=seed, num_classes=num_classes)
    planned = []
    for split, count in wanted.items():
        if pair_of(recipe.share)[0] < 1 and not sources[split].num_distractors:
            raise InvalidArgument(
                f"there are no distractors for {split}; put pictures without a class into a folder 'distractors' "
                "beside those of the classes, or give share=1"
            )
        # Dev of sports22 continues where train ends.
        continues = is_sports22 and split == "dev"
        skipped = wanted.get("train", 0) if continues else 0
        own_seed = 3 * seed + _SEED_OF["train" if continues else split]
        reels = render.plan_from(sources[split], recipe, count=skipped + count, seed=own_seed)
        planned.append(ReelSplit(split, reels[skipped:], sources[split]))
    return planned


def default_counts(preset: str | None) -> dict[str, int]:
    if preset != "sports22":
        return dict(_COUNTS)
    train, test = SPORTS22["train"].count, SPORTS22["test"].count
    dev = train // _DEV_PER_TRAIN
    return {"train": train - dev, "dev": dev, "test": test}


def _checked_counts(counts: Mapping[str, int]) -> dict[str, int]:
    for split, count in counts.items():
        one_of("a split in counts", split, SPLITS)
        check_int(f"the count of {split}", count, at_least=0)
    wanted = {split: int(counts[split]) for split in SPLITS if counts.get(split)}
    if not wanted:
        raise InvalidArgument(f"counts={dict(counts)} contains no reel; give at least one")
    return wanted


def _write_files(out: Path, splits: Sequence[ReelSplit], crf: int, on_progress: OnProgress | None) -> Manifest:
    """Write mp4 files, their manifest and segments. Names change with the plan, the pictures and the quality."""
    videos = out / "videos"
    begin_files(out, settings_of(splits, crf=crf))
    videos.mkdir(exist_ok=True)
    # Reels are written in order, so the files that are there are those of the first ones.
    before = sum(not file.name.startswith(".") for file in videos.glob("*.mp4"))
    progress = Progress(sum(len(part.reels) for part in splits), before=before)
    items = []
    segments: dict[str, list[Segment]] = {}
    for part in splits:
        source = part.pictures.fingerprint()
        name_of = lru_cache(maxsize=None)(part.pictures.name_of)
        for reel in part.reels:
            name = f"{part.split}-{reel.id}-{reel.digest(source, render.RENDER_VERSION, crf)}"
            path = videos / f"{name}.mp4"
            if not path.exists():  # written under another name first, so one that is there is complete
                remove_leftovers(path, only_of_dead=True)
                render.write_reel(path, reel, part.pictures, crf=crf)
            items.append(Item(name, f"videos/{path.name}", (reel.label,), part.split))
            segments[name] = [
                Segment(
                    start=round(shot.first_frame / reel.recipe.fps, 6),
                    end=round((shot.first_frame + shot.num_frames) / reel.recipe.fps, 6),
                    shows_class=shot.shows_class,
                    source=name_of(shot.label, shot.picture),
                )
                for shot in reel.shots
            ]
            progress.done += 1
            if progress.done > before and on_progress is not None:
                on_progress(progress)
    write_segments(out / SEGMENTS_FILE, segments)
    manifest = Manifest(tuple(items), splits[0].pictures.class_names, root=out)
    manifest.write(out / "manifest.csv")
    return manifest


# ---- as a bank


@dataclass(frozen=True, eq=False)
class _Rendering:
    """The frames of a reel that are stored; rendered when called."""

    reel: Reel
    source: Pictures | int  # the pictures; for another process their number
    positions: Indices  # among the candidates

    def __call__(self) -> Frames:
        assert isinstance(self.source, Pictures)
        frames: Frames = render.candidate_frames(self.reel, self.source)[self.positions]
        return frames


def write_reel_bank(
    out: str | os.PathLike[str],
    splits: Sequence[ReelSplit],
    *,
    quality: int = 90,
    workers: int = 1,
    on_progress: OnProgress | None = None,
) -> Bank:
    """Write the candidates of reels as a bank, as `make_reels` describes it.

    Every reel is a group of its own, so that reels which share pictures may be in two splits; the caller makes sure
    that the splits share no pictures.
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
    name_of = lru_cache(maxsize=None)(split.pictures.name_of)
    for reel in split.reels:
        frames, positions = np.unique(reel.candidate_indices, return_index=True)  # short reels repeat frames
        shots = [reel.shots[number] for number in reel.shot_numbers(frames)]  # in a fade the one that is seen more
        yield FrameEntry(
            id=f"{split.split}-{reel.id}",
            labels=(reel.label,),
            frames=_Rendering(reel, split.pictures, positions),
            pts_seconds=reel.candidate_seconds[positions],
            split=split.split,
            frame_indices=frames,
            duration=reel.duration,
            total_num_frames=reel.total_num_frames,
            shows_class=[shot.shows_class for shot in shots],
            sources=[name_of(shot.label, shot.picture) for shot in shots],
        )


def _stored(entries: list[FrameEntry], *, quality: int, workers: int) -> Generator[StoredVideo]:
    """Render reels in order: in processes where that is faster, otherwise in threads."""
    renderings = [cast(_Rendering, entry.frames) for entry in entries]
    sources = list({id(rendering.source): cast(Pictures, rendering.source) for rendering in renderings}.values())
    num_processes = num_render_processes(workers, sources, sum(len(rendering.positions) for rendering in renderings))
    if num_processes < 2:
        yield from stored_by_threads(entries, quality=quality, num_threads=workers)
        return
    slots = _slots_for(renderings, sources)
    shape = (sum(map(len, slots)), sources[0].size, sources[0].size, 3)
    number_of = {id(source): number for number, source in enumerate(sources)}
    tasks = (
        replace(entry, frames=replace(rendering, source=number_of[id(rendering.source)]))
        for entry, rendering in zip(entries, renderings, strict=True)
    )
    with SharedPixels() as shared:
        shared.array(shape)
        config = (sources, slots, shared.file, shape, quality)
        server = "sosampler.reels.make:renderer"
        with ProcessPool(num_processes, server, config, files=[shared.file], work="rendering reels") as pool:
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


def _slots_for(renderings: Sequence[_Rendering], sources: Sequence[Pictures]) -> list[Slots]:
    """Assign shared memory to the pictures that are shown, while there is space; sources of one cache share slots."""
    max_slots = _SHARED_BYTES // (3 * sources[0].size ** 2)
    slots: list[Slots] = [{} for _ in sources]
    of_cache = {id(source._cache): own for source, own in zip(reversed(sources), reversed(slots), strict=True)}
    taken = 0
    for rendering in renderings:
        source = cast(Pictures, rendering.source)
        of_source = of_cache[id(source._cache)]
        for shot in rendering.reel.shots:
            key = source.key(shot.label, shot.picture)
            if key not in of_source and taken < max_slots:
                of_source[key] = taken
                taken += 1
    return slots


def _picture_tasks(slots: Sequence[Slots]) -> Iterator[tuple[int, list[Hashable]]]:
    """Yield a source, and the keys of some of its pictures."""
    for number, of_source in enumerate(slots):
        keys = list(of_source)
        for first in range(0, len(keys), _PICTURES_PER_TASK):
            yield number, keys[first : first + _PICTURES_PER_TASK]


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


def renderer(config: tuple[list[Pictures], list[Slots], int, tuple[int, ...], int]) -> Work:
    """Return the function that loads pictures into the shared memory, or renders a reel.

    Args:
        config: sources, slots of each, the shared memory, its shape [slots, S, S, 3], and the quality of JPEGs.
    """
    sources, slots, file, shape, quality = config
    pictures = SharedPixels(file).array(shape)
    caches: dict[int, _SharedCache] = {}  # sources that shared a cache in the parent still do
    before = [source._cache for source in sources]
    for source, cache, own in zip(sources, before, slots, strict=True):
        source._cache = caches.setdefault(id(cache), _SharedCache(own, pictures))

    def work(task: FrameEntry | tuple[int, list[Hashable]]) -> StoredVideo | None:
        if isinstance(task, FrameEntry):
            rendering = cast(_Rendering, task.frames)
            rendering = replace(rendering, source=sources[cast(int, rendering.source)])
            return stored_entry(replace(task, frames=rendering), quality)
        number, keys = task
        for key in keys:
            caches[id(before[number])].fill(key, sources[number]._load(key))
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
