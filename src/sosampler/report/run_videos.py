"""videos.jsonl of a run, read and checked: what every policy chose of each video, and what was made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sosampler.errors import InvalidArgument
from sosampler.evaluation.per_video import KIND, VERSION

RowKey = tuple[str, int | None, int]
"""Policy, N (None for a system) and T."""
_AGAIN = "`sosampler evaluate --run`"
_ROUNDING = 1e-4  # by which a share in a file may miss 0 or 1


@dataclass(frozen=True)
class Offered:
    """The candidates of a video, in time order; [T] each."""

    slots: tuple[int, ...]  # stored frames, ascending
    seconds: tuple[float, ...]
    confidence: tuple[float, ...]  # of the classifier in the labels, from that frame alone
    scores: Mapping[str, tuple[float | None, ...]]  # by policy


@dataclass(frozen=True)
class Said:
    """One policy's choice, and the answer to it."""

    predicted: int
    probability: float
    confidence: float  # in the labels
    right: bool
    chosen: tuple[int, ...]  # stored frames


@dataclass(frozen=True)
class RunVideo:
    """One video; `said` in the order of the keys."""

    id: str
    labels: tuple[int, ...]
    offered: Mapping[int, Offered]  # by T
    said: tuple[Said, ...]


@dataclass(frozen=True, eq=False)
class RunVideos:
    """All videos of a run."""

    digest: str  # of the rows that they belong to
    classes: tuple[str, ...]
    keys: tuple[RowKey, ...]
    videos: tuple[RunVideo, ...]

    def said(self, key: RowKey) -> list[Said]:
        """What one policy's choices led to, video by video."""
        place = self.keys.index(key)
        return [video.said[place] for video in self.videos]

    def label(self, video: RunVideo) -> str:
        return ", ".join(self.classes[label] for label in video.labels)


def read_run_videos(path: Path) -> RunVideos:
    """The file, or a sentence that names the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: is not text ({error}); write it again with {_AGAIN}") from error
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read ({error.strerror}); give a run that can") from error
    head, count = _parsed(path, 1, lines[0], lambda told: (_head(told), _whole(told["videos"])))
    videos = tuple(
        _parsed(path, number, line, lambda told: _video(told, head)) for number, line in enumerate(lines[1:], start=2)
    )
    if len(videos) != count or not videos:
        raise InvalidArgument(
            f"{path}: is of {count} videos, but has {len(videos)}; copy it again, or write it again with {_AGAIN}"
        )
    if len({video.id for video in videos}) < len(videos):
        raise InvalidArgument(f"{path}: a video is in it twice; write it again with {_AGAIN}")
    return RunVideos(head.digest, head.classes, head.keys, videos)


def _parsed(path: Path, number: int, line: str, make: Callable[[Any], Any]) -> Any:
    try:
        return make(json.loads(line))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise InvalidArgument(
            f"{path}, line {number}: is not of a {KIND} file of version {VERSION} ({type(error).__name__}: {error}); "
            f"write it again with {_AGAIN}"
        ) from error


def _head(told: Any) -> RunVideos:
    if told["kind"] != KIND or told["version"] != VERSION:
        raise ValueError(f"kind {told['kind']!r}, version {told['version']!r}")
    keys = [
        (_is(str, policy), None if frames is None else _whole(frames), _whole(count))
        for policy, frames, count in told["rows"]
    ]
    classes = tuple(_is(str, name) for name in told["classes"])
    return RunVideos(_is(str, told["evaluation"]), classes, tuple(keys), ())


def _video(told: Any, head: RunVideos) -> RunVideo:
    offered = {int(count): _offered(one) for count, one in _is(dict, told["candidates"]).items()}
    said = tuple(_said(one, len(head.classes)) for one in told["answers"])
    labels = tuple(_whole(label, below=len(head.classes)) for label in told["labels"])
    if len(said) != len(head.keys) or not labels:
        raise ValueError(f"{len(said)} answers to {len(head.keys)} rows, {len(labels)} labels")
    for (policy, _, count), one in zip(head.keys, said, strict=True):
        if not set(one.chosen) <= set(offered[count].slots):
            raise ValueError(f"{policy} chose what is no candidate")
    return RunVideo(_is(str, told["id"]), labels, offered, said)


def _offered(told: Any) -> Offered:
    slots = tuple(_whole(slot) for slot in told["slots"])
    if not slots or any(later <= earlier for earlier, later in pairwise(slots)):
        raise ValueError(f"{list(slots)} are no candidates in time order")
    seconds = _numbers(told["seconds"], len(slots))
    confidence = tuple(map(_share, _numbers(told["confidence"], len(slots))))
    scores = {
        _is(str, policy): tuple(None if one is None else _number(one) for one in _of_length(values, len(slots)))
        for policy, values in _is(dict, told["scores"]).items()
    }
    return Offered(slots, seconds, confidence, scores)


def _said(told: Any, num_classes: int) -> Said:
    return Said(
        _whole(told["predicted"], below=num_classes),
        _share(told["probability"]),
        _share(told["confidence"]),
        _is(bool, told["right"]),
        tuple(_whole(slot) for slot in told["chosen"]),
    )


def _is(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _whole(value: Any, below: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (below is not None and value >= below):
        raise ValueError(f"{value!r} is no whole number" + (f" below {below}" if below is not None else ""))
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _share(value: Any) -> float:
    """Of 0..1."""
    found = _number(value)
    if not -_ROUNDING <= found <= 1 + _ROUNDING:
        raise ValueError(f"{value!r} is no share of 0..1")
    return found


def _numbers(values: Any, count: int) -> tuple[float, ...]:
    return tuple(_number(value) for value in _of_length(values, count))


def _of_length(values: Any, count: int) -> Sequence[Any]:
    found: Sequence[Any] = _is(list, values)
    if len(found) != count:
        raise ValueError(f"{len(found)} numbers for {count} candidates")
    return found
