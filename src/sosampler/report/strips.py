"""Show the candidates of a video with what each policy chose: open the bank with the frames, make the strips."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from sosampler._util.arrays import Indices
from sosampler.errors import InvalidArgument, SosamplerError, first_line
from sosampler.report.load import EvaluationRun, RowKey, RunVideo, RunVideos, VideoCandidates, is_folder

if TYPE_CHECKING:
    from sosampler.bank.bank import Bank


_SAME_TIME = 1e-3  # seconds; times in a run's file are rounded
_MAX_FAILURES = 20  # that are listed
_NOT_THERE = "it is not there"

Shown = Sequence[tuple[str, VideoCandidates]]
"""Names and candidates of the videos whose frames are shown."""


@dataclass(frozen=True, eq=False)
class OpenedBank:
    """The bank of a run, or why there is none."""

    bank: Bank | None  # the split that was evaluated
    notes: tuple[str, ...] = ()
    is_given: bool = False
    misfit: str | None = None  # what is wrong with the given one; None where it is used, or none was given


def open_bank(run: EvaluationRun, shown: Shown, given: Path | None) -> OpenedBank:
    """Open the given bank where it is the one that was evaluated, else the run's own; never another one's frames.

    Args:
        run: with videos.
        shown: videos whose stored frames must be those of the run.
        given: is tried before the paths that the run names.
    """
    stored = run.facts.get("bank")
    misfit = problem = None
    if given is not None:
        opened = _opened(given, run, shown)
        if not isinstance(opened, str):
            return OpenedBank(*opened, is_given=True)
        misfit = opened
    for path in _possible_paths(stored, run.folder):
        opened = _opened(path, run, shown)
        if not isinstance(opened, str):
            return OpenedBank(*opened, misfit=misfit)
        problem = opened if problem in (None, _NOT_THERE) else problem
    why = "the run does not name the bank"
    if stored:
        why = f"they would be in the bank {stored}, but {problem or _NOT_THERE}"
    notes = (f"No frames are shown: {why}. Give it with --bank.",) if shown else ()
    return OpenedBank(None, notes, misfit=misfit)


def _possible_paths(stored: Any, folder: Path) -> list[Path]:
    """Return where a run's bank may be; it may have been moved together with the run, as by `sosampler demo`."""
    if not isinstance(stored, str) or not stored:
        return []
    path = Path(stored)
    beside = [folder / path.name, folder.parent / path.name]
    if path.is_absolute():
        return [path, *beside]
    # A relative path depends on where the evaluation was started; beside the run it is most likely meant.
    return list(dict.fromkeys([folder / path, folder.parent / path, *beside, path]))


def _opened(path: Path, run: EvaluationRun, shown: Shown) -> tuple[Bank, tuple[str, ...]] | str:
    """Return the split and notes on what it lacks, or what is wrong with it."""
    from sosampler.bank.bank import Bank

    if not is_folder(path):
        return _NOT_THERE
    split = run.facts.get("split")
    try:
        all_splits = Bank(path, partial=True)
        bank = all_splits.split(split) if isinstance(split, str) else all_splits
        problem = _difference(bank, run, shown)
    except (SosamplerError, UnicodeEncodeError) as error:  # shards cannot be opened where a path is no text
        return first_line(error)
    if problem:
        return problem
    listed = [f"{failure['id']}: {failure['error']}" for failure in bank.failures[:_MAX_FAILURES]]
    more = [f"and {len(bank.failures) - len(listed)} more"] if len(bank.failures) > len(listed) else []
    failed = f"Not in the bank, because they could not be read: {'; '.join([*listed, *more])}."
    return bank, (failed,) if listed else ()


def _difference(bank: Bank, run: EvaluationRun, shown: Shown) -> str | None:
    """Return how a bank differs from the one that was evaluated."""
    assert run.videos is not None
    ids = bank.ids
    if {video.id for video in run.videos.videos} - set(ids):
        return "it holds other videos"
    if bank.classes != run.videos.classes:
        return "it has other classes"
    teacher = run.facts.get("teacher")
    wanted = teacher.get("fingerprint") if isinstance(teacher, dict) else None
    if wanted is not None and wanted not in [about["fingerprint"] for about in bank.teachers.values()]:
        return "it lacks the outputs of the classifier"
    if not all(_same_frames(bank, ids.index(name), candidates) for name, candidates in shown):
        return "it has other frames"
    return None


def _same_frames(bank: Bank, index: int, candidates: VideoCandidates) -> bool:
    """Return whether the stored frames have the times of the run; true of what cannot be read."""
    try:
        video = bank[index]
    except SosamplerError:
        return True
    if max(candidates.slots) >= len(video):
        return False
    times = video.pts_seconds[list(candidates.slots)]
    return bool(np.abs(times - np.array(candidates.seconds)).max() <= _SAME_TIME)


# With more candidates than this, images in one row would be too small to see: only the chosen ones are shown.
MAX_COLUMNS = 24
_THUMBNAIL, _SMALL_THUMBNAIL = 88, 64  # pixels of the short side
_QUALITY = 78


@dataclass(frozen=True)
class Answer:
    """The classifier's prediction from the chosen frames."""

    label: str
    probability: float
    right: bool
    confidence: float | None = None  # in the true labels


@dataclass(frozen=True)
class StripLine:
    """One policy's choice among the candidates of a video."""

    policy: str
    chosen: tuple[int, ...]  # indices of candidates, in time order
    answer: Answer | None = None
    scores: tuple[float | None, ...] | None = None  # [T]


@dataclass(frozen=True)
class Strip:
    """One video: its candidates, and what each policy chose."""

    title: str
    label: str
    images: tuple[str, ...]  # [T] data URIs; empty where the frames are not available, "" for one that is not shown
    seconds: tuple[float, ...]  # [T]
    values: tuple[float, ...] | None  # [T] in 0..1: the classifier's confidence in the label, frame by frame
    lines: tuple[StripLine, ...]

    def __post_init__(self) -> None:
        count = len(self.seconds)
        images = self.images or self.seconds
        if len(images) != count or (self.values is not None and len(self.values) != count):
            raise InvalidArgument(f"{self.title}: a strip of {len(images)} images needs as many times and values")
        for line in self.lines:
            if any(not 0 <= index < count for index in line.chosen):
                raise InvalidArgument(f"{self.title}: {line.policy} chose {line.chosen} of {count} candidates")
            if line.scores is not None and len(line.scores) != count:
                raise InvalidArgument(f"{self.title}: {line.policy} has {len(line.scores)} scores of {count}")

    @property
    def is_wide(self) -> bool:
        """Whether the candidates are too many for one row."""
        return len(self.seconds) > MAX_COLUMNS

    @property
    def columns(self) -> tuple[int, ...]:
        """Candidates that have a column: all, or of too many those that a policy chose."""
        if not self.is_wide:
            return tuple(range(len(self.seconds)))
        return tuple(sorted({index for line in self.lines for index in line.chosen}))

    @property
    def positions(self) -> tuple[float, ...]:
        """Of the candidates between the first and the last one, in percent."""
        first, length = self.seconds[0], max(self.seconds[-1] - self.seconds[0], 1e-9)
        return tuple(round(100 * (time - first) / length, 2) for time in self.seconds)


@dataclass(frozen=True)
class Gallery:
    """Strips under one heading."""

    title: str
    note: str  # how they were chosen
    strips: tuple[Strip, ...]


def data_uri(frame: NDArray[np.uint8], side: int = _THUMBNAIL) -> str:
    """Return a frame [H, W, 3] as a small JPEG inside of a link; never enlarged."""
    image = Image.fromarray(frame)
    scale = min(1.0, side / min(image.size))
    if scale < 1:
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        image = image.resize(size, Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def strip_of(videos: RunVideos, video: RunVideo, keys: Sequence[RowKey], bank: Bank | None) -> Strip:
    """Return the strip of one video of a run.

    Args:
        keys: of the rows that are shown, all with the same T.
        bank: with the frames; without one there are no images.
    """
    candidates = video.candidates[keys[0][2]]
    lines = []
    for key in keys:
        prediction = video.predictions[videos.keys.index(key)]
        scores = candidates.confidence if key[0] == "semi-optimal" else candidates.scores.get(key[0])
        label = videos.classes[prediction.predicted]
        answer = Answer(label, prediction.probability, prediction.right, prediction.confidence)
        chosen = _indices_among(np.array(candidates.slots), prediction.chosen)
        lines.append(StripLine(key[0], chosen, answer, scores))
    bare = Strip(video.id, videos.label(video), (), candidates.seconds, candidates.confidence, tuple(lines))
    if bank is None:
        return bare
    frames = bank[bank.ids.index(video.id)].frames([candidates.slots[index] for index in bare.columns])
    side = _SMALL_THUMBNAIL if len(bare.columns) > MAX_COLUMNS else _THUMBNAIL
    images = [""] * len(candidates.slots)
    for index, frame in zip(bare.columns, frames, strict=True):
        images[index] = data_uri(frame, side)
    return replace(bare, images=tuple(images))


def _indices_among(slots: Indices, chosen: ArrayLike) -> tuple[int, ...]:
    """Return the indices of stored frames among the candidates; each once, without the -1 that pad a baseline's."""
    frames = np.asarray(chosen, dtype=np.int64)
    return tuple(np.unique(np.searchsorted(slots, frames[frames >= 0])).tolist())
