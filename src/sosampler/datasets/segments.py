"""Which seconds of a video show its class, and what they are made of: `segments.jsonl` beside a manifest.

One line per video, with the id that it has in the manifest:

    {"id": "a", "segments": [{"start": 0, "end": 2.5, "shows_class": true, "source": "clips/7.mp4"}, ...]}

`prepare` carries it into the bank, as flags of the stored frames and names of sources.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sosampler._util.arrays import Seconds
from sosampler._util.files import at, filled_lines, parse_json, write_text
from sosampler.errors import InvalidArgument

SEGMENTS_FILE = "segments.jsonl"

# A frame belongs to a segment that begins so little later: times in files are rounded.
_TOLERANCE = 1e-3  # seconds


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a video."""

    start: float  # seconds of the video's timestamps
    end: float  # the first moment that does not belong to it
    shows_class: bool
    source: str | None = None  # the picture or video it is made of; videos with a common source are not independent
    clip: str | None = None  # the file that is shown, where a source has several
    clip_start: float | None = None  # seconds: where in that file it begins

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def class_flags(segments: Sequence[Segment], pts_seconds: Seconds) -> NDArray[np.bool_]:
    """Return which frames, given by their times [T], show the class: those in a segment that does."""
    times = np.asarray(pts_seconds, dtype=np.float64) + _TOLERANCE
    flags = np.zeros(times.shape, dtype=np.bool_)
    for segment in segments:
        if segment.shows_class:
            flags |= (segment.start <= times) & (times < segment.end)
    return flags


def sources_between(segments: Sequence[Segment], start: float, end: float) -> tuple[str, ...] | None:
    """Return the sources of the segments between two times, each once and in order; None where none is known."""
    inside = (each for each in segments if each.start < end - _TOLERANCE and each.end > start + _TOLERANCE)
    return tuple(dict.fromkeys(each.source for each in inside if each.source is not None)) or None


def write_segments(path: Path, segments: Mapping[str, Sequence[Segment]]) -> None:
    # ASCII, because names of files may hold lone surrogates, which UTF-8 cannot encode.
    write_text(
        path,
        (
            json.dumps({"id": name, "segments": [each.to_dict() for each in listed]}) + "\n"
            for name, listed in segments.items()
        ),
    )


def read_segments(path: Path, ids: Iterable[str]) -> dict[str, tuple[Segment, ...]]:
    """Read the segments of some videos, by their ids; empty if there is no such file. Other keys are ignored."""
    if not path.is_file():
        return {}
    wanted, read = set(ids), {}
    for line, text in filled_lines(path):
        where = at(path, line)
        values = parse_json(text, where)
        if not isinstance(values, dict) or not isinstance(values.get("id"), str):
            raise InvalidArgument(f'{where}: must be a JSON object with "id", the id of a video in the manifest')
        name, listed = values["id"], values.get("segments")
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise InvalidArgument(f'{where}: "segments" of {name!r} must be a list of JSON objects')
        if name in read:
            raise InvalidArgument(f"{where}: {name!r} occurs twice; put all its segments into one line")
        if name in wanted:
            read[name] = tuple(_segment(each, where) for each in listed)
    return read


def _segment(values: dict[str, Any], where: str) -> Segment:
    start, end = (_time(values.get(name)) for name in ("start", "end"))
    flag, source = values.get("shows_class"), values.get("source")
    if start is None or end is None or start >= end:
        raise InvalidArgument(
            f"{where}: start={values.get('start')!r} and end={values.get('end')!r} must be seconds, start before end"
        )
    if not isinstance(flag, bool):
        raise InvalidArgument(f"{where}: shows_class={flag!r} must be true or false, in every segment")
    if source is not None and not isinstance(source, str):
        raise InvalidArgument(f"{where}: source={source!r} must be a name; leave it out if it is not known")
    return Segment(start, end, flag, source)


def _time(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
