"""The bank that has the pictures of a run's videos; none is better than another one's pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from sosampler.errors import InvalidArgument, SosamplerError, first_line
from sosampler.evaluation.result import label_confidence
from sosampler.report.load import EvaluationRun, Offered, RowKey, RunVideo, RunVideos, is_folder
from sosampler.video.timeline import Indices

if TYPE_CHECKING:
    from sosampler.bank.bank import Bank
    from sosampler.bank.outputs import TeacherItem
    from sosampler.evaluation.result import Evaluation


_SAME_TIME = 1e-3  # seconds; what rounding in a run's file leaves
_MOST_FAILURES = 20  # that are named
_NOT_THERE = "it is not there"

Shown = Sequence[tuple[str, Offered]]
"""Names and candidates of the videos whose pictures are wanted."""


@dataclass(frozen=True, eq=False)
class OpenedBank:
    """The bank of a run, or why there is none."""

    bank: Bank | None  # the split that was evaluated
    notes: tuple[str, ...] = ()
    is_given: bool = False
    misfit: str | None = None  # what is wrong with the given one; None where it is used, or none was given


def open_bank(run: EvaluationRun, shown: Shown, given: Path | None) -> OpenedBank:
    """The given bank where it is the one that was evaluated, else the run's own; with notes where it has gaps.

    Args:
        run: with videos.
        shown: videos whose stored frames must be those of the run.
        given: is looked at before the places that the run names.
    """
    told = run.facts.get("bank")
    misfit = problem = None
    if given is not None:
        found = _opened(given, run, shown)
        if not isinstance(found, str):
            return OpenedBank(*found, is_given=True)
        misfit = found
    for place in _places(told, run.folder):
        found = _opened(place, run, shown)
        if not isinstance(found, str):
            return OpenedBank(*found, misfit=misfit)
        problem = found if problem in (None, _NOT_THERE) else problem
    why = "the run does not say in which bank they are"
    if told:
        why = f"they would be in the bank {told}, but {problem or _NOT_THERE}"
    notes = (f"No pictures are shown: {why}. Give it with --bank.",) if shown else ()
    return OpenedBank(None, notes, misfit=misfit)


def _places(told: Any, folder: Path) -> list[Path]:
    """Where a run's bank may be; it may have been moved together with the run, as in a folder of `sosampler demo`."""
    if not isinstance(told, str) or not told:
        return []
    path = Path(told)
    beside = [folder / path.name, folder.parent / path.name]
    if path.is_absolute():
        return [path, *beside]
    # What a relative path means depends on where the evaluation was started; beside the run it is most likely meant.
    return list(dict.fromkeys([folder / path, folder.parent / path, *beside, path]))


def _opened(place: Path, run: EvaluationRun, shown: Shown) -> tuple[Bank, tuple[str, ...]] | str:
    """The split and what it lacks, or what is wrong with it."""
    from sosampler.bank.bank import Bank

    if not is_folder(place):
        return _NOT_THERE
    split = run.facts.get("split")
    try:
        whole = Bank(place, partial=True)
        bank = whole.split(split) if isinstance(split, str) else whole
        return _difference(bank, run, shown) or (bank, _failures(bank))
    except (SosamplerError, UnicodeEncodeError) as error:  # shards cannot be opened where a path is no text
        return first_line(error)


def _difference(bank: Bank, run: EvaluationRun, shown: Shown) -> str | None:
    """How a bank differs from the one that was evaluated."""
    assert run.videos is not None
    ids = bank.ids
    if {video.id for video in run.videos.videos} - set(ids):
        return "it holds other videos"
    if bank.classes != run.videos.classes:
        return "its classes are others"
    teacher = run.facts.get("teacher")
    wanted = teacher.get("fingerprint") if isinstance(teacher, dict) else None
    if wanted is not None and wanted not in [about["fingerprint"] for about in bank.teachers.values()]:
        return "it lacks the classifier that judged"
    if not all(_same_frames(bank, ids.index(name), offered) for name, offered in shown):
        return "its frames are others"
    return None


def _same_frames(bank: Bank, place: int, offered: Offered) -> bool:
    """Whether the stored frames have the times that the run tells; what cannot be read differs in nothing."""
    try:
        video = bank[place]
    except SosamplerError:
        return True
    if max(offered.slots) >= len(video):
        return False
    times = video.pts_seconds[list(offered.slots)]
    return bool(np.abs(times - np.array(offered.seconds)).max() <= _SAME_TIME)


def _failures(bank: Bank) -> tuple[str, ...]:
    """Videos that could not be read when the bank was made."""
    failures = bank.failures
    named = [f"{one['id']}: {one['error']}" for one in failures[:_MOST_FAILURES]]
    more = [f"and {len(failures) - len(named)} more"] if len(failures) > len(named) else []
    return (f"Not in the bank, because they could not be read: {'; '.join([*named, *more])}.",) if failures else ()


# With more candidates than this, pictures in one row would be too small to see: only the chosen ones are shown.
MAX_COLUMNS = 24
_THUMBNAIL, _SMALL_THUMBNAIL = 88, 64  # pixels of the short side
_QUALITY = 78


@dataclass(frozen=True)
class Answer:
    """What was made of a chosen clip."""

    label: str
    probability: float
    right: bool
    confidence: float | None = None  # in the true labels


@dataclass(frozen=True)
class StripLine:
    """One policy's choice among the candidates of a video."""

    policy: str
    chosen: tuple[int, ...]  # places among the candidates, in time order
    answer: Answer | None = None
    scores: tuple[float | None, ...] | None = None  # [T]


@dataclass(frozen=True)
class Strip:
    """One video: its candidates and who chose which."""

    title: str
    label: str
    pictures: tuple[str, ...]  # [T] data URIs; empty where the pictures are not at hand, "" for one that is not shown
    seconds: tuple[float, ...]  # [T]
    values: tuple[float, ...] | None  # [T] in 0..1: the classifier's confidence in the label, frame by frame
    lines: tuple[StripLine, ...]

    def __post_init__(self) -> None:
        count = len(self.seconds)
        pictures = self.pictures or self.seconds
        if len(pictures) != count or (self.values is not None and len(self.values) != count):
            raise InvalidArgument(f"{self.title}: a strip of {len(pictures)} pictures needs as many times and values")
        for line in self.lines:
            if any(not 0 <= place < count for place in line.chosen):
                raise InvalidArgument(f"{self.title}: {line.policy} chose {line.chosen} of {count} candidates")
            if line.scores is not None and len(line.scores) != count:
                raise InvalidArgument(f"{self.title}: {line.policy} has {len(line.scores)} scores of {count}")

    @property
    def is_wide(self) -> bool:
        """Whether the candidates are too many for one row."""
        return len(self.seconds) > MAX_COLUMNS

    @property
    def columns(self) -> tuple[int, ...]:
        """Candidates that have a column: all, or of too many those that anybody chose."""
        if not self.is_wide:
            return tuple(range(len(self.seconds)))
        return tuple(sorted({place for line in self.lines for place in line.chosen}))

    @property
    def places(self) -> tuple[float, ...]:
        """Where candidates lie between the first and the last one, in percent."""
        first, length = self.seconds[0], max(self.seconds[-1] - self.seconds[0], 1e-9)
        return tuple(round(100 * (one - first) / length, 2) for one in self.seconds)


@dataclass(frozen=True)
class Gallery:
    """Strips under one heading."""

    title: str
    note: str  # by which rule they were chosen
    strips: tuple[Strip, ...]


def data_uri(frame: NDArray[np.uint8], side: int = _THUMBNAIL) -> str:
    """A picture [H, W, 3] as a small JPEG inside of a link; never enlarged."""
    picture = Image.fromarray(frame)
    scale = min(1.0, side / min(picture.size))
    if scale < 1:
        size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


# ---- of a run on disk


def strip_of(videos: RunVideos, video: RunVideo, keys: Sequence[RowKey], bank: Bank | None) -> Strip:
    """One video of a run.

    Args:
        keys: of the rows that are shown, all with the same T.
        bank: where the pictures are; without one there are none.
    """
    offered = video.offered[keys[0][2]]
    lines = []
    for key in keys:
        said = video.said[videos.keys.index(key)]
        scores = offered.confidence if key[0] == "semi-optimal" else offered.scores.get(key[0])
        answer = Answer(videos.classes[said.predicted], said.probability, said.right, said.confidence)
        lines.append(StripLine(key[0], _places_among(np.array(offered.slots), said.chosen), answer, scores))
    bare = Strip(video.id, videos.label(video), (), offered.seconds, offered.confidence, tuple(lines))
    if bank is None:
        return bare
    return Strip(bare.title, bare.label, _pictures(bare, offered.slots, bank), bare.seconds, bare.values, bare.lines)


def _pictures(strip: Strip, slots: Sequence[int], bank: Bank) -> tuple[str, ...]:
    """Only of the columns; smaller where they are many."""
    video = bank[bank.ids.index(strip.title)]
    frames = video.frames([slots[place] for place in strip.columns])
    side = _SMALL_THUMBNAIL if len(strip.columns) > MAX_COLUMNS else _THUMBNAIL
    found = [""] * len(slots)
    for place, frame in zip(strip.columns, frames, strict=True):
        found[place] = data_uri(frame, side)
    return tuple(found)


# ---- of an evaluation in memory


def strips_of(
    bank: Bank,
    evaluation: Evaluation,
    policies: Sequence[str],
    *,
    num_frames: int,
    num_candidates: int,
    count: int = 6,
) -> list[Strip]:
    """The first `count` videos of an evaluation.

    Args:
        bank: the split that was evaluated.
        evaluation: where the policies' choices are.
        policies: that are shown, in this order; also systems, whose answers are their own and not shown.
        num_frames, num_candidates: N and T.
    """
    places = {row.item.id: place for place, row in enumerate(bank.rows)}
    teacher = bank.teacher(evaluation.facts["teacher"]["fingerprint"], views=evaluation.facts["teacher"]["views"])
    # Only the mean of logits can be taken without the classifier.
    answers = teacher.pooling == "mean" and bool(teacher.about["features"]) and not bank.multi_label
    systems = {row.policy for row in evaluation.rows if row.num_frames is None}
    chosen = {
        policy: evaluation.chosen(policy, None if policy in systems else num_frames, num_candidates)
        for policy in policies
    }
    strips = []
    for number, name in enumerate(evaluation.ids[:count]):
        video, told = bank[places[name]], teacher[places[name]]
        slots = np.unique(video.uniform(min(num_candidates, len(video))))
        strips.append(
            Strip(
                title=name,
                label=", ".join(bank.classes[label] for label in video.labels),
                pictures=tuple(data_uri(frame) for frame in video.frames(slots)),
                seconds=tuple(video.pts_seconds[slots].tolist()),
                values=tuple(label_confidence(told, video.labels, slots).tolist()),
                lines=tuple(
                    StripLine(
                        policy,
                        _places_among(slots, own[number]),
                        _answer(told, own[number], video.labels, bank.classes)
                        if answers and policy not in systems
                        else None,
                    )
                    for policy, own in chosen.items()
                ),
            )
        )
    return strips


def _places_among(slots: Indices, chosen: ArrayLike) -> tuple[int, ...]:
    """Where the chosen stored frames stand among the candidates; each once, and without the -1 behind a system's."""
    frames = np.asarray(chosen, dtype=np.int64)
    return tuple(np.unique(np.searchsorted(slots, frames[frames >= 0])).tolist())


def _answer(told: TeacherItem, chosen: Indices, labels: Sequence[int], classes: Sequence[str]) -> Answer:
    assert told.features is not None
    logits = told.features[chosen].astype(np.float64).mean(axis=0)
    probs = np.exp(logits - logits.max())
    best = int(probs.argmax())
    return Answer(classes[best], float(probs[best] / probs.sum()), best in labels)
