"""Write streams: frames of clips brought to one size and rate, joined and encoded by several processes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from sosampler._util.arrays import Frames
from sosampler._util.files import plain, remove_leftovers, write_text
from sosampler._util.hardware import default_cache_bytes, usable_cores
from sosampler._util.limits import check_count
from sosampler._util.progress import OnProgress, Progress
from sosampler._util.validation import one_of
from sosampler._util.workers import Work
from sosampler.datasets.manifest import Item, Manifest
from sosampler.datasets.segments import SEGMENTS_FILE, Segment, write_segments
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.inference.decode import attempt
from sosampler.reels import render
from sosampler.reels.clips import Background, ClipProcesses, ClipSets, Source, open_clips
from sosampler.reels.images import PictureCache
from sosampler.reels.recipe import pair_of
from sosampler.reels.settings import begin_files
from sosampler.reels.streams import STREAM_PRESETS, Clip, Stream, StreamRecipe, plan_stream
from sosampler.video.reader import VideoMetadata
from sosampler.video.source import open_video

# Increased when the same plan gives other pixels.
_RENDER_VERSION = 1
# Clips up to this length are decoded whole and kept; of longer videos only what a shot shows is decoded.
_MAX_WHOLE_SECONDS = 12.0


def stream_recipe(preset: str | None, changes: StreamRecipe | Mapping[str, Any] | None) -> StreamRecipe:
    """Return the recipe of a preset with changes, or a complete one instead of it."""
    if isinstance(changes, StreamRecipe):
        return changes
    for name in changes or ():
        one_of("a name in recipe", name, (field.name for field in fields(StreamRecipe)))
    return replace(STREAM_PRESETS[preset or "streams"], **(changes or {}))


def make_streams(
    clips: Source,
    background: Background,
    out: Path,
    recipe: StreamRecipe,
    *,
    counts: Mapping[str, int],
    seeds: Mapping[str, int],
    classifier_share: float,
    crf: int,
    workers: int | None,
    say: Callable[[str], None] | None,
    on_progress: OnProgress | None,
) -> Manifest:
    """Write mp4 files and what is known about them, as `make_reels` describes it; every split has its own seed."""
    num_workers = usable_cores() if workers is None else check_count("workers", workers, "MAX_THREADS")
    render.check_file_options(0, crf)
    sets = open_clips(
        clips, background, classifier_share=classifier_share, workers=num_workers, on_progress=on_progress
    )
    _check_pools(sets, counts, recipe)
    if say is not None:
        for note in sets.notes:
            say(note)
    fingerprints = {split: sets.fingerprint(split) for split in counts}
    settings = {
        "kind": "reels",
        "rendering": _RENDER_VERSION,
        "recipe": recipe.to_dict(),
        "seeds": {split: seeds[split] for split in counts},
        "counts": dict(counts),
        "clips": fingerprints,
        "classifier_share": classifier_share,
        "crf": crf,
    }
    # Planned before anything is written: a share that cannot be reached is refused.
    planned = [
        (split, plan_stream(recipe, sets.pools[split], seed=seeds[split], number=number))
        for split, count in counts.items()
        for number in range(count)
    ]
    begin_files(out, plain(settings))
    _write_lists(out, sets)
    videos = out / "videos"
    videos.mkdir(exist_ok=True)
    paths = {
        videos / f"{split}-{stream.id}-{stream.digest(fingerprints[split], _RENDER_VERSION, crf)}.mp4": (split, stream)
        for split, stream in planned
    }
    _write_videos({path: stream for path, (_, stream) in paths.items()}, crf, num_workers, say, on_progress)
    made = {path: entry for path, entry in paths.items() if path.exists()}
    if not made:
        raise SosamplerError(f"{out}: no stream could be written; the messages above say why")
    write_segments(out / SEGMENTS_FILE, {path.stem: _segments(stream) for path, (_, stream) in made.items()})
    items = (
        Item(path.stem, f"videos/{path.name}", (stream.label,), split, group=path.stem)
        for path, (split, stream) in made.items()
    )
    manifest = Manifest(tuple(items), sets.class_names, root=out)
    manifest.write(out / "manifest.csv")
    return manifest


def _check_pools(sets: ClipSets, counts: Mapping[str, int], recipe: StreamRecipe) -> None:
    for split in counts:
        pool = sets.pools[split]
        if not pool.labels:
            raise InvalidArgument(
                f"there is no clip with a label for streams of {split}; give some that are in {split}, or a count of 0"
            )
        if not pool.background and pair_of(recipe.share)[0] < 1:
            raise InvalidArgument(
                f"there is no background for streams of {split}; give videos without a class (background, "
                "--background), or rows without a label"
            )


def _write_lists(out: Path, sets: ClipSets) -> None:
    """Write the clips of the classifier, and those that are not shown."""
    for name, manifest in zip(("classifier.csv", "classifier_background.csv"), sets.classifier, strict=False):
        if manifest.items:
            manifest.write(out / name)
    if sets.skipped:
        write_text(out / "skipped.jsonl", (json.dumps(each) + "\n" for each in sets.skipped))


def _write_videos(
    streams: Mapping[Path, Stream],
    crf: int,
    workers: int,
    say: Callable[[str], None] | None,
    on_progress: OnProgress | None,
) -> None:
    # Written under another name first, so a file that is there is complete.
    tasks = [(str(path), stream, crf) for path, stream in streams.items() if not path.exists()]
    done = len(streams) - len(tasks)
    progress = Progress(len(streams), done=done, before=done)
    num_processes = min(workers, len(tasks)) if workers > 1 else 0
    server, cache = "sosampler.reels.make_streams:writer", default_cache_bytes(workers)
    with ClipProcesses(num_processes, server, cache, work="writing streams") as pool:
        for result in pool.results(tasks):
            progress.done += 1
            if isinstance(result, SosamplerError):
                progress.failed += 1
                if say is not None:
                    say(f"a stream is left out: {result}")
            if on_progress is not None:
                on_progress(progress)


def _segments(stream: Stream) -> list[Segment]:
    """Return when each shot is shown; in a dissolve, the one that is seen more."""
    fps = stream.recipe.fps
    return [
        Segment(
            start=round(shot.first_frame / fps, 6),
            end=round((shot.first_frame + shot.num_frames) / fps, 6),
            shows_class=shot.shows_class,
            source=shot.clip.group,
            clip=shot.clip.name,
            clip_start=round(shot.clip.start + shot.clip_frame / fps, 6),
        )
        for shot in stream.shots
    ]


# ---- rendering


def writer(cache_bytes: int) -> Work:
    """Return the function that writes a stream, given (path, stream, crf)."""
    cache = PictureCache(cache_bytes)

    def write(task: tuple[str, Stream, int]) -> SosamplerError | None:
        path, stream, crf = task
        remove_leftovers(Path(path), only_of_dead=True)
        frames = stream_frames(stream, cache)
        return attempt(path, lambda: render.write_mp4(Path(path), frames, fps=stream.recipe.fps, crf=crf))

    return write


def stream_frames(stream: Stream, cache: PictureCache) -> Iterator[Frames]:
    """Yield all frames of a stream in order, [H, W, 3]; decoded clips are cached."""
    views: dict[int, tuple[int, Frames]] = {}  # of the shots that are visible: the clip's frame it begins with, frames
    for index in range(stream.total_num_frames):
        visible = render.layers(stream, index)
        layers = []
        for number, weight in visible:
            if number not in views:
                views[number] = _view(stream, number, cache)
            shot, (first, frames) = stream.shots[number], views[number]
            # A clip that ends within a dissolve holds its last frame.
            position = min(max(shot.clip_frame + index - shot.first_frame - first, 0), len(frames) - 1)
            layers.append((weight, frames[position]))
        for number in [number for number in views if number < visible[0][0]]:
            del views[number]
        if len(layers) == 1:
            yield layers[0][1]
        else:
            yield np.rint(sum(np.float32(weight) * frame for weight, frame in layers)).astype(np.uint8)


def _view(stream: Stream, number: int, cache: PictureCache) -> tuple[int, Frames]:
    """Return the frames of a clip that a shot shows, also in dissolves, and the number of the first in the clip."""
    shot, fps, size = stream.shots[number], stream.recipe.fps, stream.recipe.height_width
    clip = shot.clip
    if clip.seconds <= _MAX_WHOLE_SECONDS:
        key = (clip, size, fps)
        frames = cache.get(key)
        if frames is None:
            frames = _decoded(clip, 0, clip.num_frames(fps), size, fps)
            cache.put(key, frames)
        return 0, frames
    fade_after = stream.shots[number + 1].fade if number + 1 < len(stream.shots) else 0.0
    first = max(shot.clip_frame - math.ceil(shot.fade / 2), 0)
    end = min(shot.clip_frame + shot.num_frames + math.ceil(fade_after / 2), clip.num_frames(fps))
    return first, _decoded(clip, first, end, size, fps)


def _decoded(clip: Clip, first: int, end: int, size: tuple[int, int], fps: int) -> Frames:
    """Decode frames first..end - 1 of a clip, numbered at the stream's rate: uint8 [F, H, W, 3] of that size."""
    with closing(open_video(clip.path, threads=1)) as reader:
        indices = reader.timeline().index_at(clip.start + np.arange(first, end) / fps)
        batch = reader.read(indices, size=_cover(reader.metadata, size))
    top, left = ((have - want) // 2 for have, want in zip(batch.frames.shape[1:3], size, strict=True))
    frames: Frames = np.ascontiguousarray(batch.frames[:, top : top + size[0], left : left + size[1]])
    return frames


def _cover(video: VideoMetadata, size: tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of the video scaled to cover `size`."""
    scale = max(size[0] / video.height, size[1] / video.width)
    return max(size[0], round(video.height * scale)), max(size[1], round(video.width * scale))
