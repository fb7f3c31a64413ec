"""One budget over many videos: the frames of a whole collection that are worth labelling.

Two passes over the videos: every candidate is scored from a small copy, then the chosen frames alone are decoded in
full. What is known of the candidates stays in the folder, so that a killed run resumes, and another budget is chosen
without scoring again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sosampler._util.arrays import Indices
from sosampler._util.files import begin, differences, plain, read_settings, replacing, write_text
from sosampler._util.hardware import usable_cores
from sosampler._util.limits import check_count
from sosampler._util.locks import locked_folder
from sosampler._util.progress import OnProgress, Progress
from sosampler._util.validation import check_int, one_of
from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.inference.annotation_files import Frame, write_annotation_files
from sosampler.inference.decode import MAX_WORKERS, PROCESSES_FROM, FramePool, FrameTask, Step, attempt
from sosampler.inference.many import IMAGE_FORMATS, for_many, write_image
from sosampler.inference.options import DEFAULT_POLICY, SelectOptions
from sosampler.inference.rows import Row, as_text
from sosampler.inference.select import fit_size, open_candidates, view_size
from sosampler.policies.base import Batch
from sosampler.policies.collection import choose_distinct, reduced
from sosampler.policies.registry import can_travel
from sosampler.video.discover import Video, labels, listed_videos
from sosampler.video.remote import is_address, shown_address
from sosampler.video.source import frame_images, open_video

KIND, VERSION = "sosampler collection", 2
FRAMES, FAILED = "frames.jsonl", "_failed.jsonl"
_RUN, _FEATURES, _IMAGES = "_run.json", "_features", "images"
_AT_A_TIME = 8  # frames in full size in memory
_MAX_NAME = 120  # bytes of a video's name in the names of its images
_MAX_KEY = 12  # hex digits of its key there: among 100,000 videos of one name two are equal once in 50,000 runs
_IMAGE = re.compile(r".+_frame\d{6,}_-?\d+\.\d{3}s\.(jpg|png)")
# Arguments of `select` that a budget over all videos sets itself.
SET_HERE = (
    *("num_frames", "min_candidates", "on_short", "decode", "query", "query_model", "schemes"),
    *("auto_min", "auto_max", "auto_tolerance"),
)


@dataclass(frozen=True)
class CollectionSelection:
    """The frames that were chosen from many videos, and the folder that holds them."""

    out: Path
    frames: list[Frame]  # the rows of frames.jsonl, by video and time
    num_videos: int
    num_candidates: int
    num_before: int  # videos that an earlier run had scored
    failures: list[Row] = field(default_factory=list)  # video and error
    notes: tuple[str, ...] = ()  # on the collection
    video_notes: list[Row] = field(default_factory=list)  # video and notes, of those that have any

    def __len__(self) -> int:
        return len(self.frames)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "out": str(self.out),
            "num_frames": len(self.frames),
            "num_videos": self.num_videos,
            "num_candidates": self.num_candidates,
            "num_done_before": self.num_before,
            "frames": self.frames,
            "failures": self.failures,
            "notes": list(self.notes),
            "num_with_notes": len(self.video_notes),
            "video_notes": self.video_notes,
        }


def select_total(
    videos: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    total: int,
    *,
    out: str | os.PathLike[str],
    at_least: int = 0,
    image_format: str = "jpg",
    workers: int | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> CollectionSelection:
    """Choose the `total` frames of a whole collection that are worth labelling: clear ones that differ.

    They are written as images into the folder `out`, with lists that COCO tools, CVAT, Label Studio, FiftyOne and
    Datumaro import.

    Args:
        videos: files, folders, patterns, or lists of these (.csv, .jsonl, .parquet, .txt).
        total: M, frames of all videos together. Where there are fewer candidates, all are taken, and a note says so.
        out: a new folder, or that of an earlier run with the same options, which is resumed; `total` and `at_least` may
            be others, and are then chosen anew without scoring again.
        at_least: frames of each video, where it has so many candidates.
        image_format: "jpg" or "png".
        workers: videos that are decoded at a time; None takes one a core.
        overwrite: begin anew where `out` holds a run with other options.
        on_progress: called after each video, with the stage "scored" and then "written".
        options: other arguments of `select`: num_candidates (of each video; 32 or more if not given), fps, policy (one
            with scores; "general" if not given), candidates, start, end, size, limits, ...

    Examples:
        >>> import sosampler as so, tempfile
        >>> from sosampler.video.synthetic import numbered_video
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("a.mp4", "b.mp4"):
        ...     _ = (folder / name).write_bytes(numbered_video(num_frames=60))
        >>> chosen = so.select_total(folder, 3, out=folder / "chosen", at_least=1, num_candidates=4)
        >>> len(chosen), sorted({Path(frame["video"]).name for frame in chosen.frames})
        (3, ['a.mp4', 'b.mp4'])
    """
    for name in options:
        if name not in SelectOptions.__dataclass_fields__ or name in SET_HERE:
            raise InvalidArgument(
                f"select_total has no option {name!r}; it takes those of select but for {', '.join(SET_HERE)}"
            )
    folder = Path(out)
    given = [os.fspath(each) for each in ([videos] if isinstance(videos, (str, os.PathLike)) else videos)]
    _refuse_addresses(given)
    listed = listed_videos(given, leave_out=folder)
    _refuse_addresses(listed)  # of lists
    if not listed:
        raise InvalidArgument("videos is empty; give files, folders, patterns or lists of videos")
    paths = [Path(video) for video in listed]
    job = TotalJob.of(len(paths), total, folder, at_least, image_format, workers, overwrite, options)
    return job.run(paths, on_progress=on_progress)


def _refuse_addresses(videos: Sequence[Video]) -> None:
    for video in videos:
        if isinstance(video, str) and is_address(video):
            raise InvalidArgument(
                f"{shown_address(video)}: is an address; a total over videos (--total) takes files of this machine: "
                "download it, and give the file"
            )


@dataclass(frozen=True)
class TotalJob:
    """What `select_total` does."""

    options: SelectOptions
    total: int
    out: Path
    at_least: int
    image_format: str
    workers: int | None
    overwrite: bool

    @classmethod
    def of(
        cls,
        num_videos: int,
        total: int,
        out: Path,
        at_least: int,
        image_format: str,
        workers: int | None,
        overwrite: bool,
        options: dict[str, Any],
    ) -> TotalJob:
        """Check the arguments; refuse before the first video what would fail at every one."""
        check_count("total", total, "MAX_CANDIDATES")
        check_int("at_least", at_least, at_least=0)
        one_of("image_format", image_format, IMAGE_FORMATS)
        if workers is not None:
            check_count("workers", workers, "MAX_THREADS")
        if at_least * num_videos > total:
            raise InvalidArgument(
                f"at_least={at_least} of {num_videos} videos are {at_least * num_videos} frames, more than "
                f"total={total}; raise total, or lower at_least"
            )
        policy = options.get("policy") or (None if options.get("prefer") else DEFAULT_POLICY)
        chosen = {**options, "policy": policy, "num_frames": 1, "on_short": "fewer"}
        select = SelectOptions(**chosen)
        resolved = select.resolved_policy
        if not (resolved.has_scores and resolved.needs_frames):
            raise InvalidArgument(
                f"total is for policies that score frames by what they show, such as general, not for {resolved.name!r}"
                "; leave policy out, or give another"
            )
        if select.fps is None and select.num_candidates is None:
            number = _earlier_candidates(out)  # another total is chosen from the same candidates
            if number is None:
                number = resolved.default_candidates(math.ceil(total / max(num_videos, 1)))
            select = SelectOptions(**{**chosen, "num_candidates": number})
        return cls(select, total, out, at_least, image_format, workers, overwrite)

    def run(self, videos: Sequence[Path], *, on_progress: OnProgress | None = None) -> CollectionSelection:
        """Score, choose, and write images and lists."""
        if self.out.exists() and not self.out.is_dir():
            raise InvalidArgument(f"{self.out}: is a file; give a folder")
        with locked_folder(self.out):
            self._begin()
            # Once: a video that changes during the run must not get another key on the way.
            keys = {str(video): _key(str(video)) for video in videos}
            scored, before, failures = self._score(keys, on_progress)
            if not scored:
                raise VideoError(f"none of {len(keys)} videos could be read, such as {failures[0]['error']}")
            frames = self._choose(scored, dict(zip(keys, _image_prefixes(videos, list(keys.values())), strict=True)))
            num_candidates = sum(len(each.frame_indices) for each in scored.values())
            noted = {video: each.notes for video, each in scored.items()}
            written, unwritten = self._write(frames, keys, noted, on_progress)
            failures += unwritten
            write_text(self.out / FRAMES, (json.dumps(frame, ensure_ascii=False) + "\n" for frame in written))
            write_annotation_files(self.out, written)
            if failures:
                write_text(self.out / FAILED, (json.dumps(row) + "\n" for row in failures))
            else:
                (self.out / FAILED).unlink(missing_ok=True)
        return CollectionSelection(
            self.out,
            written,
            len(keys),
            num_candidates,
            before,
            failures,
            self._notes(num_candidates),
            [{"video": as_text(video), "notes": list(notes)} for video, notes in noted.items() if notes],
        )

    def _notes(self, num_candidates: int) -> tuple[str, ...]:
        if num_candidates >= self.total:
            return ()
        other = ", or take candidates other than keyframe" if self.options.mode == "keyframe" else ""
        return (
            f"{num_candidates} candidates for a total of {self.total}; all are taken; for more raise "
            f"num_candidates or fps{other}",
        )

    def _begin(self) -> None:
        """Save the settings, or check that those of the earlier run are the same."""
        settings = {**self.options.identity(), "image_format": self.image_format}
        now = plain({"kind": KIND, "version": VERSION, "options": settings})
        before = read_settings(self.out / _RUN)
        if before is None:
            begin(self.out / _RUN, now)
        elif not isinstance(before, dict) or before.get("kind") != KIND:
            raise InvalidArgument(f"{self.out}: holds something else; give a new folder")
        elif before != now:
            different = differences(before.get("options") or {}, now["options"])
            if not self.overwrite:
                raise InvalidArgument(
                    f"{self.out}: holds frames chosen with {'; '.join(different) or 'another version'}; give the same "
                    "again to resume, another folder, or add overwrite (--overwrite)"
                )
            for name in (_FEATURES, _IMAGES):
                shutil.rmtree(self.out / name, ignore_errors=True)
            write_text(self.out / _RUN, json.dumps(now, indent=1) + "\n")
        for name in (_FEATURES, _IMAGES):
            (self.out / name).mkdir(exist_ok=True)
            for leftover in (self.out / name).glob(".*.part.*"):
                leftover.unlink()  # of a killed run

    # ---- first pass: scores and features of all candidates

    def _score(self, keys: dict[str, str], on_progress: OnProgress | None) -> tuple[dict[str, Scored], int, list[Row]]:
        """Return what is known of the videos, in their order, of how many an earlier run found it, and failures."""
        folder = self.out / _FEATURES
        known = {video: Scored.load(folder, key) for video, key in keys.items()}
        todo = [video for video, scored in known.items() if scored is None]
        before = len(keys) - len(todo)
        options, failures = self.options if len(todo) == 1 else for_many(self.options), []
        tasks = [(video, ScoreStep(options, folder, keys[video])) for video in todo]
        with closing(self._outcomes(tasks, Progress(len(keys), before, 0, before, "scored"), on_progress)) as done:
            for video, outcome in done:
                if isinstance(outcome, SosamplerError):
                    failures.append(_failure(video, str(outcome)))
                    continue
                known[video] = Scored.load(folder, keys[video])
                if known[video] is None:
                    failures.append(_failure(video, f"{video}: its scores cannot be read from {folder}; run it again"))
        return {video: scored for video, scored in known.items() if scored is not None}, before, failures

    def _outcomes(
        self, tasks: Sequence[tuple[str, Step]], progress: Progress, on_progress: OnProgress | None
    ) -> Generator[tuple[str, Any], None, None]:
        """Yield each video and the outcome of its step, in order."""
        workers = self.workers or min(usable_cores(), MAX_WORKERS)
        # In processes a file that kills its decoder costs one video.
        processes = len(tasks) >= PROCESSES_FROM and can_travel(self.options.resolved_policy)
        with FramePool(min(workers, max(len(tasks), 1)), processes=processes, ahead=2 * workers, held=1) as pool:
            outcomes = pool.decoded(FrameTask(video, step) for video, step in tasks)
            for (video, _), decoded in zip(tasks, outcomes, strict=True):
                progress.done += 1
                progress.failed += isinstance(decoded.outcome, SosamplerError)
                if on_progress is not None:
                    on_progress(progress)
                yield video, decoded.outcome

    # ---- the choice

    def _choose(self, scored: dict[str, Scored], prefixes: dict[str, str]) -> list[Frame]:
        """Return the chosen frames by video and time, without the sizes of their images."""
        groups = np.repeat(np.arange(len(scored)), [len(each.quality) for each in scored.values()])
        quality = np.concatenate([each.quality for each in scored.values()])
        features = np.concatenate([each.features for each in scored.values()])
        chosen = choose_distinct(quality, features, self.total, groups=groups, at_least=self.at_least)
        indices = np.concatenate([each.frame_indices for each in scored.values()])
        seconds = np.concatenate([each.pts_seconds for each in scored.values()])
        names = list(scored)
        frames = []
        for rank in np.argsort(chosen.positions):  # candidates are by video and time
            position = int(chosen.positions[rank])
            video = names[groups[position]]
            index, time = int(indices[position]), float(seconds[position])
            frames.append(
                {
                    "file_name": f"{_IMAGES}/{prefixes[video]}_frame{index:06d}_{time:.3f}s.{self.image_format}",
                    "video": video,
                    "frame_index": index,
                    "pts_seconds": time,
                    "quality": round(float(quality[position]), 6),
                    "distance": round(float(chosen.distances[rank]), 6),
                    "order": int(rank),
                }
            )
        return frames

    # ---- second pass: the chosen frames in full

    def _write(
        self,
        frames: Sequence[Frame],
        keys: dict[str, str],
        noted: dict[str, tuple[str, ...]],
        on_progress: OnProgress | None,
    ) -> tuple[list[Frame], list[Row]]:
        """Write the images that are not there yet; return the frames that have one, with its size, and failures.

        Notes on the way are added to those of the videos, `noted`.
        """
        wanted = {Path(frame["file_name"]).name for frame in frames}
        for entry in list((self.out / _IMAGES).iterdir()):
            if entry.name not in wanted and _IMAGE.fullmatch(entry.name):
                entry.unlink()  # of an earlier choice
        missing: dict[str, list[tuple[int, str]]] = {}
        for frame in frames:
            if not (self.out / frame["file_name"]).exists():
                missing.setdefault(frame["video"], []).append((frame["frame_index"], frame["file_name"]))
        options, failures = self.options if len(missing) == 1 else for_many(self.options), []
        tasks = [(video, WriteStep(options, self.out, keys[video], tuple(files))) for video, files in missing.items()]
        with closing(self._outcomes(tasks, Progress(len(tasks), stage="written"), on_progress)) as done:
            for video, outcome in done:
                if isinstance(outcome, SosamplerError):
                    failures.append(_failure(video, str(outcome)))
                else:
                    noted[video] = tuple(dict.fromkeys((*noted[video], *outcome)))
        written = []
        for frame in frames:
            path = self.out / frame["file_name"]
            if path.exists():
                with Image.open(path) as image:
                    width, height = image.size
                written.append({**frame, "video": as_text(frame["video"]), "width": width, "height": height})
        return written, failures


def _failure(video: str, error: str) -> Row:
    return {"video": as_text(video), "error": error}


def _earlier_candidates(out: Path) -> int | None:
    """Return the number of candidates a video that an earlier run in this folder had."""
    before = read_settings(out / _RUN)
    options = before.get("options") if isinstance(before, dict) and before.get("kind") == KIND else None
    number = options.get("num_candidates") if isinstance(options, dict) else None
    return number if isinstance(number, int) and number > 0 else None


# ---- one video


@dataclass(frozen=True, eq=False)
class Scored:
    """What the choice needs to know of the candidates of one video."""

    frame_indices: Indices  # [T]
    pts_seconds: np.ndarray  # [T] float64
    quality: np.ndarray  # [T] float32, 0..1
    features: np.ndarray  # [T, D] float16, of length 1
    notes: tuple[str, ...]

    def save(self, folder: Path, key: str) -> None:
        with replacing(folder / f"{key}.npz") as temporary:
            np.savez(temporary, **{**vars(self), "notes": np.array(json.dumps(self.notes))})

    @classmethod
    def load(cls, folder: Path, key: str) -> Scored | None:
        """Return what is stored; None where nothing is, or a file that cannot be read."""
        try:
            with np.load(folder / f"{key}.npz", allow_pickle=False) as arrays:
                stored = {name: arrays[name] for name in cls.__dataclass_fields__}
            return cls(**{**stored, "notes": tuple(json.loads(stored["notes"].item()))})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None  # what a full disk or a power cut leaves: it is scored again


def _key(video: str) -> str:
    """Return a name for the content of a video by its path, size and time; one that was changed has another."""
    try:
        files = frame_images(Path(video)) if os.path.isdir(video) else [video]
        stamps = [(os.path.basename(file), (stat := os.stat(file)).st_size, stat.st_mtime_ns) for file in files]
    except OSError:
        stamps = []  # decoding it says why
    text = json.dumps([os.path.abspath(video), stamps])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _check_unchanged(video: str, key: str) -> None:
    if _key(video) != key:
        raise VideoError(f"{video}: changed while it was read; run it again")


@dataclass(frozen=True)
class ScoreStep:
    """Score the candidates of a video, and store what the choice needs; the number of them, or an error."""

    options: SelectOptions
    folder: Path
    key: str  # of the video

    def __call__(self, video: str) -> int | SosamplerError:
        return attempt(video, lambda: self._score(video))

    def _score(self, video: str) -> int:
        policy = self.options.resolved_policy
        with open_candidates(video, self.options) as opened:
            # As `select` shows frames to a policy, without keeping them in full size beside that.
            size = fit_size(view_size(policy), opened.video.metadata)
            seen = opened.read(opened.video.frame_indices, size)
            notes = opened.summary()["notes"]
        # A damaged frame is replaced by its neighbour, which may be a candidate too.
        _, first = np.unique(seen.frame_indices, return_index=True)
        batch = Batch(len(first), np.array([len(first)]), seen.frames[first][None], seen.pts_seconds[first][None])
        # Clearness where the policy knows it: other scores may compare frames of one video only.
        quality: Callable[[Batch], Any] = getattr(policy, "quality", policy.unit_scores)
        scored = Scored(
            seen.frame_indices[first],
            seen.pts_seconds[first],
            np.nan_to_num(np.asarray(quality(batch)[0], dtype=np.float32)),
            reduced(policy.features(batch)[0]),
            notes,
        )
        _check_unchanged(video, self.key)
        scored.save(self.folder, self.key)
        return len(first)


@dataclass(frozen=True)
class WriteStep:
    """Decode some frames of a video and write them as images; notes on it, or an error."""

    options: SelectOptions
    folder: Path
    key: str  # of the video
    files: tuple[tuple[int, str], ...]  # frame number, file below the folder

    def __call__(self, video: str) -> tuple[str, ...] | SosamplerError:
        return attempt(video, lambda: self._write(video))

    def _write(self, video: str) -> tuple[str, ...]:
        reader = open_video(video, **self.options.opening)
        notes: list[str] = []
        try:
            for start in range(0, len(self.files), _AT_A_TIME):
                part = self.files[start : start + _AT_A_TIME]
                batch = reader.read(np.array([index for index, _ in part]), size=self.options.size)
                _check_unchanged(video, self.key)  # an image that is there is of the video that was scored
                notes += batch.notes
                for frame, (_, name) in zip(batch.frames, part, strict=True):
                    write_image(Image.fromarray(frame), self.folder / name, quality=95)
            return (*reader.notes, *notes)
        except OSError as error:
            if error.filename is None or not str(error.filename).startswith(str(self.folder)):
                raise
            raise InvalidArgument(
                f"{self.folder}: frames cannot be written there ({error.strerror}); make room and run the same again"
            ) from error
        finally:
            reader.close()


def _image_prefixes(videos: Sequence[Path], keys: Sequence[str]) -> list[str]:
    """Return a name for each video that a file may have; by its key no image of another or of an older one has it.

    >>> _image_prefixes([Path("x/a b.mp4"), Path("x/y/c.mp4"), Path("x/y_c.mp4")], ["0d", "1e", "2f"])
    ['a_b-0d', 'y_c-1e', 'y_c-2f']
    """
    prefixes = []
    for label, key in zip(labels(list(videos)), keys, strict=True):
        name = re.sub(r"[^\w.-]+", "_", str(Path(label).with_suffix(""))).lstrip("._-")
        prefixes.append(f"{name.encode()[:_MAX_NAME].decode(errors='ignore') or 'video'}-{key[:_MAX_KEY]}")
    return prefixes
