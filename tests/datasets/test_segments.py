"""segments.jsonl: which seconds of a video show its class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sosampler as so
from sosampler.bank.format import Shown
from sosampler.datasets.segments import (
    SEGMENTS_FILE,
    Segment,
    class_flags,
    read_segments,
    sources_between,
    write_segments,
)
from sosampler.errors import InvalidArgument
from sosampler.video.synthetic import numbered_video, read_number


def test_frames_belong_to_the_segment_that_has_begun() -> None:
    segments = [Segment(0.5, 1.0, True, "a"), Segment(1.0, 2.0, False, "b"), Segment(1.9, 3.0, True)]
    times = np.array([0.0, 0.4995, 0.5, 0.98, 0.9995, 1.5, 1.95, 2.9, 3.0])
    # Within a millisecond a time counts as the next one; where segments overlap, one that shows the class suffices.
    assert class_flags(segments, times).tolist() == [False, True, True, True, False, False, True, True, False]
    assert sources_between(segments, 0, 3) == ("a", "b")
    assert sources_between(segments, 1.0, 3) == ("b",)
    assert sources_between(segments, 2.0, 3) is None


def test_what_is_written_is_read(tmp_path: Path) -> None:
    given = {"v": (Segment(0.0, 1.25, True, "g", "a.mp4", 0.5), Segment(1.25, 2.0, False)), "w": ()}
    write_segments(tmp_path / SEGMENTS_FILE, given)
    assert read_segments(tmp_path / SEGMENTS_FILE, ["v", "other"]) == {
        "v": (Segment(0.0, 1.25, True, "g"), Segment(1.25, 2.0, False))
    }
    assert read_segments(tmp_path / "none.jsonl", ["v"]) == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", 'must be a JSON object with "id"'),
        ({"id": 3}, 'must be a JSON object with "id"'),
        ({"id": "v"}, "must be a list of JSON objects"),
        ({"id": "v", "segments": [1]}, "must be a list of JSON objects"),
        ({"id": "v", "segments": [{"start": 2, "end": 1, "shows_class": True}]}, "start=2 and end=1 must be seconds"),
        ({"id": "v", "segments": [{"start": "0", "end": 1, "shows_class": True}]}, "start='0' and end=1"),
        ({"id": "v", "segments": [{"start": 0, "end": 1}]}, "shows_class=None must be true or false"),
        ({"id": "v", "segments": [{"start": 0, "end": 1, "shows_class": True, "source": 7}]}, "source=7 must be"),
        ({"id": "a", "segments": []}, "'a' occurs twice"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, message: str) -> None:
    path = tmp_path / SEGMENTS_FILE
    good = json.dumps({"id": "a", "segments": []})
    path.write_text(f"{good}\n{line if isinstance(line, str) else json.dumps(line)}\n")
    with pytest.raises(InvalidArgument, match="line 2") as error:
        read_segments(path, ["a", "v"])
    assert message in str(error.value)


def test_a_users_own_videos(tmp_path: Path) -> None:
    """The frames say which they are: numbers 20 to 39 of 60 show the class, in a file that starts late."""
    pts = [number + 15 for number in range(60)]
    for name in ("a.mp4", "unknown.mp4"):
        numbered_video(tmp_path / name, num_frames=60, fps=10, pts=pts)
    (tmp_path / "m.csv").write_text("path,label,start,end\na.mp4,x,,\na.mp4,x,4,6\nunknown.mp4,y,,\n")
    segments = [{"start": 3.5, "end": 5.5, "shows_class": True}, {"start": 5.5, "end": 7, "shows_class": False}]
    lines = [json.dumps({"id": name, "segments": segments}) + "\n" for name in ("a.mp4", "a.mp4#4-6", "not there")]
    (tmp_path / SEGMENTS_FILE).write_text("".join(lines))
    bank = so.prepare(tmp_path / "m.csv", out=tmp_path / "bank", num_candidates=12, workers=0)
    for video in (bank[0], bank[1]):
        numbers = [read_number(frame) for frame in video.frames()]
        assert video.shows_class is not None
        assert video.shows_class.tolist() == [20 <= number < 40 for number in numbers]
        assert video.sources is None
    assert bank[2].shows_class is None
    (tmp_path / SEGMENTS_FILE).write_text(lines[0].replace("3.5", "2.5"))
    with pytest.raises(InvalidArgument, match="knows other shows_class"):
        so.prepare(tmp_path / "m.csv", out=tmp_path / "bank", num_candidates=12, workers=0)


def test_a_video_that_could_not_be_read_gets_its_flags_later(tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4"):
        numbered_video(tmp_path / name, num_frames=20, fps=10)
    whole = (tmp_path / "b.mp4").read_bytes()
    (tmp_path / "b.mp4").write_bytes(b"not a video")
    (tmp_path / "m.csv").write_text("path,label\na.mp4,x\nb.mp4,y\n")
    write_segments(tmp_path / SEGMENTS_FILE, {name: [Segment(0, 1, True, "s")] for name in ("a.mp4", "b.mp4")})
    first = so.prepare(tmp_path / "m.csv", out=tmp_path / "bank", num_candidates=4, workers=0)
    assert list(first.shown) == ["a.mp4"]
    (tmp_path / "b.mp4").write_bytes(whole)
    bank = so.prepare(tmp_path / "m.csv", out=tmp_path / "bank", num_candidates=4, workers=0, retry_failed=True)
    assert bank.shown["a.mp4"] == bank.shown["b.mp4"] == Shown((True, True, False, False), ("s",))
