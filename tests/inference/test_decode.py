"""Decoding in processes: the right frames in order, bounded memory, and whoever dies costs one video alone."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import sosampler as so
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError, VideoError
from sosampler.inference import decode as decode_stream
from sosampler.inference.decode import Decoded, DecodeStep, FramePool, FrameTask
from sosampler.inference.options import SelectOptions
from sosampler.inference.selection import CandidateFrames, Selection
from sosampler.video.synthetic import numbered_video, read_number

CANDIDATES = DecodeStep(SelectOptions(policy="all", num_candidates=5, size=256, threads=1), choose=False)
SIZES = {"a": (40, 96, 64), "b": (30, 64, 96), "short": (3, 96, 64)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("videos")
    for name, (frames, width, height) in SIZES.items():
        numbered_video(made / f"{name}.mp4", num_frames=frames, width=width, height=height)
    (made / "broken.mp4").write_bytes(b"this is not a video" * 50)
    return made


def decoding(source: Any) -> FrameTask:
    return FrameTask(source, CANDIDATES)


def pixels(one: Decoded) -> np.ndarray:
    assert one.shape is not None
    frames = np.zeros(one.shape, dtype=np.uint8)
    one.take(frames)
    return frames


def pool_of(workers: int = 2, *, processes: bool = True, ahead: int = 4, held: int = 1) -> FramePool:
    return FramePool(workers, processes=processes, ahead=ahead, held=held)


def is_working(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


@pytest.mark.parametrize("processes", [True, False])
def test_frames_in_order(folder: Path, processes: bool) -> None:
    """Larger after smaller and smaller after larger in the same slots, errors in between."""
    names = ["a", "b", "broken", "short", "b", "a", "none"] * 4
    with pool_of(processes=processes) as pool:
        for name, one in zip(names, pool.decoded(decoding(folder / f"{name}.mp4") for name in names), strict=True):
            if name in ("broken", "none"):
                assert isinstance(one.outcome, VideoError)
                assert f"{name}.mp4" in str(one.outcome)
                assert one.shape is None
                continue
            total, width, height = SIZES[name]
            frames, told = pixels(one), one.outcome
            expected = so.select(folder / f"{name}.mp4", policy="all", num_candidates=5)
            assert isinstance(told, CandidateFrames)
            assert frames.shape == (min(total, 5), height, width, 3)
            assert [read_number(frame) for frame in frames] == told.frame_indices.tolist()
            assert told.frame_indices.tolist() == sorted(set(expected.frame_indices.tolist()))
            assert told.candidates.frame_indices.tolist() == expected.frame_indices.tolist()
            np.testing.assert_array_equal(told.pts_seconds, np.unique(expected.pts_seconds))
            assert told.video == expected.video
            assert told.metadata == expected.metadata
            assert told.notes == expected.notes


def test_a_rule_chooses_where_it_is_decoded(folder: Path) -> None:
    options = SelectOptions(policy="frame-difference", num_frames=2, num_candidates=8, threads=1)
    expected = so.select(folder / "a.mp4", 2, policy="frame-difference", num_candidates=8)
    with pool_of() as pool:
        (one,) = pool.decoded([FrameTask(folder / "a.mp4", DecodeStep(options))])
        assert one.shape == (2, 64, 96, 3), "no more than what was chosen travels"
        np.testing.assert_array_equal(pixels(one), expected.frames)
    assert isinstance(one.outcome, Selection)
    assert one.outcome.frame_indices.tolist() == expected.frame_indices.tolist()
    np.testing.assert_array_equal(one.outcome.candidates.scores, expected.candidates.scores)


@pytest.mark.parametrize("kind", ["bytes", "file", "text"])
def test_what_cannot_travel_is_decoded_here(folder: Path, kind: str) -> None:
    data = (folder / "a.mp4").read_bytes()
    source: Any = {"bytes": data, "file": io.BytesIO(data), "text": str(folder / "a.mp4")}[kind]
    assert decoding(source).can_travel() == (kind != "file")
    with pool_of() as pool:
        (one,) = pool.decoded([decoding(source)])
        assert [read_number(frame) for frame in pixels(one)] == [4, 12, 20, 28, 36]


def test_candidates_that_must_be_seen_in_another_size(folder: Path) -> None:
    """Too small for whoever chooses: then that is done in one go, at once, here."""
    usual = SelectOptions(policy="frame-difference", num_frames=2, num_candidates=8, size=32, threads=1)
    small = DecodeStep(usual.with_all_candidates(), choose=False, min_size=48)
    with pool_of() as pool:
        (one,) = pool.decoded([FrameTask(folder / "a.mp4", small, DecodeStep(usual))])
        assert pixels(one).shape == (2, 32, 48, 3)
    assert isinstance(one.outcome, Selection)
    with pool_of() as pool:  # the video has no more than 64
        (one,) = pool.decoded([FrameTask(folder / "a.mp4", replace(CANDIDATES, min_size=500))])
        assert isinstance(one.outcome, CandidateFrames)
        pixels(one)


def test_arguments_at_fault_for_one_video(folder: Path) -> None:
    late = DecodeStep(SelectOptions(policy="all", num_candidates=2, start=1.1, threads=1), choose=False)
    with pool_of() as pool:
        good, bad = pool.decoded(FrameTask(folder / f"{name}.mp4", late) for name in ("a", "b"))
        assert isinstance(bad.outcome, InvalidArgument)
        assert "b.mp4: no frame lies between start=1.1" in str(bad.outcome)
        assert len(pixels(good)) == 2


def test_looks_only_a_little_ahead(folder: Path) -> None:
    taken = 0

    def endless() -> Iterator[FrameTask]:
        nonlocal taken
        while True:
            taken += 1
            yield decoding(folder / "a.mp4")

    with pool_of(ahead=3, held=2) as pool:
        stream = pool.decoded(endless())
        for number in range(1, 8):
            held = [next(stream)]
            assert taken <= number + 3
            pixels(held.pop())
        first, second = next(stream), next(stream)
        assert taken <= 9 + 3, "what is held counts"
        np.testing.assert_array_equal(pixels(first), pixels(second))


def test_large_videos_are_not_decoded_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    def several() -> Iterator[FrameTask]:
        nonlocal taken
        for _ in range(40):
            taken += 1
            yield decoding(folder / "a.mp4")

    monkeypatch.setattr(decode_stream, "MAX_WAITING_BYTES", 5 * 64 * 96 * 3)
    with pool_of(2, ahead=8, held=4) as pool:
        stream = pool.decoded(several())
        pixels(next(stream))
        assert taken == 8, "begun before anybody knew how large they are"
        for number in range(2, 20):
            pixels(next(stream))
            assert taken == max(8, number + 1), "one for each of two workers: the next is begun when one is taken"


def odd_serve(slots: list[int]) -> Callable[[Any], Any]:
    """In a decoding process: a step that acts on the name of the file."""
    good, work = DecodeStep._decode, decode_stream.serve(slots)

    def odd(self: DecodeStep, source: Any) -> Any:
        name = os.path.basename(str(source))
        if "deadly" in name:
            os.kill(os.getpid(), int(name.split("-")[1].split(".")[0]))
        if "odd" in name:
            raise ZeroDivisionError("by zero")
        if "lacking" in name:
            raise MissingDependency("torchcodec is not installed")
        if "talkative" in name:
            print("hello", flush=True)  # noqa: T201
            os.write(1, b"hello")
        return good(self, source)

    DecodeStep._decode = odd  # type: ignore[method-assign]
    return work


@pytest.fixture
def odd_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_stream, "_SERVER", f"{__name__}:odd_serve")


@pytest.mark.usefixtures("odd_worker")
def test_a_worker_that_dies_costs_its_video_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ["a", "deadly-11", "b", "a", "deadly-9", "deadly-11", "talkative", "odd", "b"]
    for name in ("deadly-11", "deadly-9", "odd", "talkative"):
        (folder / f"{name}.mp4").write_bytes((folder / "a.mp4").read_bytes())
    with pool_of() as pool:
        outcomes = []
        for one in pool.decoded(decoding(folder / f"{name}.mp4") for name in names):
            outcomes.append(one.outcome)
            if one.shape is not None:
                frames = pixels(one)
                assert [read_number(frame) for frame in frames] == one.outcome.frame_indices.tolist()  # type: ignore[union-attr]
    told = dict(zip(names, outcomes, strict=True))
    assert "ended with signal SIGSEGV; the file may be damaged, or memory ran out" in str(told["deadly-11"])
    assert "deadly-9.mp4: the process that decoded it ended with signal SIGKILL" in str(told["deadly-9"])
    assert "odd.mp4: an unexpected error (ZeroDivisionError: by zero)" in str(told["odd"])
    assert [isinstance(outcome, CandidateFrames) for outcome in outcomes] == [
        not isinstance(outcome, SosamplerError) for outcome in outcomes
    ]
    assert sum(isinstance(outcome, CandidateFrames) for outcome in outcomes) == 5
    assert capfd.readouterr().err.count("hello") == 2, "what libraries print does not run into the answers"


@pytest.mark.usefixtures("odd_worker")
def test_what_no_video_is_spared_ends_the_stream(folder: Path) -> None:
    with pool_of() as pool, pytest.raises(MissingDependency, match="torchcodec is not installed"):
        list(pool.decoded([decoding(folder / "lacking.mp4")]))


def test_nothing_is_left_open(folder: Path) -> None:
    process = psutil.Process()
    files, before = process.num_fds(), process.children()
    for _ in range(2):
        with pool_of() as pool:
            stream = pool.decoded(decoding(folder / "a.mp4") for _ in range(20))
            pixels(next(stream))
            children = [child for child in process.children() if child not in before]
            assert children
    assert process.num_fds() <= files
    assert not any(is_working(child) for child in children)


def test_workers_are_light() -> None:
    heavy = "[name for name in ('torch', 'timm', 'pyarrow') if name in sys.modules]"
    code = f"import sys, sosampler.inference.decode; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# What is interrupted: a stream of slow videos. The parent tells when its processes are at work.
# Where tests run in the background, a shell has told them to ignore interrupts.
_VICTIM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import numpy as np
from sosampler.inference.decode import DecodeStep, FramePool, FrameTask
from sosampler.inference.options import SelectOptions
step = DecodeStep(SelectOptions(policy="all", num_candidates=5, size=256, threads=1), choose=False)
with FramePool(2, processes=True, ahead=4, held=1) as pool:
    for one in pool.decoded(FrameTask(sys.argv[1], step) for _ in range(10**6)):
        one.take(np.empty(one.shape, dtype=np.uint8))
        print("working", flush=True)
"""


@pytest.mark.parametrize("how", ["interrupt", "interrupt the group", "kill"])
def test_no_orphans(folder: Path, how: str) -> None:
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(folder / "a.mp4")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert victim.stdout is not None
    for _ in range(5):
        assert victim.stdout.readline() == "working\n"
    children = psutil.Process(victim.pid).children(recursive=True)
    assert len(children) == 2
    if how == "kill":
        victim.kill()
    elif how == "interrupt":
        victim.send_signal(signal.SIGINT)
    else:
        os.killpg(victim.pid, signal.SIGINT)
    _, told = victim.communicate(timeout=60)
    assert victim.returncode != 0
    wait_until(lambda: not any(is_working(child) for child in children))
    if how != "kill":
        assert told.count("KeyboardInterrupt") == told.count("Traceback") == 1, told
