"""From a video file to a row, in plain steps that any engine can send to its workers.

A step is a function of one video, or of a few that were decoded: no queue, no cluster, no shared state. Each can be
pickled, and loads what is heavy only where it is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.inference.options import SelectOptions
from sosampler.inference.select import select_with
from sosampler.inference.selection import Selection
from sosampler.policies.base import Batch, Policy

if TYPE_CHECKING:
    from sosampler.inference.decode import OfferedVideo


Row = dict[str, Any]
"""A selection or a prediction as its `to_dict` gives it, or "video" and "error" of a video that is at fault."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Failed:
    """A video from which nothing could be had, and why."""

    video: str
    error: str

    def to_dict(self) -> Row:
        return {"video": self.video, "error": self.error}


def tried(video: str, work: Callable[[], _T]) -> _T | Failed:
    """What the work gives, or what is wrong with this video; an error that is nobody's input is raised."""
    try:
        return work()
    except (VideoError, InvalidArgument) as error:
        # Also an argument that is at fault for one video only: its length, its range.
        text = str(error)
    except OSError as error:
        text = f"cannot be read ({error.strerror or error}); check its permissions"
    except MemoryError:
        text = "does not fit into memory; ask for fewer or smaller frames"
    return Failed(video, text if video in text else f"{video}: {text}")


def select_video(
    video: str, options: SelectOptions, then: Callable[[Selection], None] | None = None
) -> Selection | Failed:
    """The chosen frames of one video; `then` is given them with their pixels, and its errors count as the video's."""

    def work() -> Selection:
        selection = select_with(video, options)
        if then is not None:
            then(selection)
        return selection

    return tried(video, work)


# ---- steps of one video, for processors


@dataclass(frozen=True)
class SelectStep:
    """A path becomes the row of its selection. For policies that need no network."""

    options: SelectOptions

    def __call__(self, video: str) -> Row:
        return select_video(video, self.options).to_dict()


@dataclass(frozen=True)
class FramesStep:
    """A path becomes frames for a network: those that the policy chose, or all candidates for a sampler."""

    options: SelectOptions
    choose: bool  # here, by the options' policy
    least_size: int = 1  # short side that whoever chooses later must see at least

    def __call__(self, video: str) -> Selection | OfferedVideo | Failed:
        from sosampler.inference.decode import FrameTask, Unfit, attempt

        task = FrameTask(video, self.options, choose=self.choose, least_size=self.least_size)
        found = tried(video, lambda: attempt(task))
        if isinstance(found, SosamplerError):
            return Failed(video, str(found))
        if isinstance(found, Unfit):
            return Failed(
                video, f"{video}: its candidates are too large or too small to be handed on; give another size"
            )
        return found


# ---- for networks, which are `sosampler.inference.network_step`


class _StandIn(Policy):
    """A learned policy without its network: it has the same candidates, and can be pickled."""

    needs = frozenset({"frames"})

    def __init__(self, policy: Policy) -> None:
        self.name, self.description = policy.name, policy.description
        self.candidate_mode, self.min_size = policy.candidate_mode, policy.min_size
        self._refusal = policy.auto_refusal()

    def choose(self, batch: Batch, num_frames: int) -> Any:
        raise AssertionError("the process that holds the network chooses")

    def auto_refusal(self) -> str | None:
        return self._refusal


def stand_in(policy: Policy) -> Policy:
    """Return a learned policy without its network, for processes that only decode its candidates."""
    return _StandIn(policy)


def as_text(video: str) -> str:
    """A file name need not be text; what is not becomes \\xNN."""
    return os.fsencode(video).decode("utf-8", "backslashreplace")


def wherever(name: str | os.PathLike[str]) -> str:
    """The same file or folder from any current folder; a name that is no path here stays as it is."""
    return os.path.abspath(name) if os.path.exists(name) else os.fspath(name)


def for_workers(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a classifier as they are to be told to another machine."""
    weights = settings.get("weights")
    return settings if weights is None else {**settings, "weights": wherever(weights)}
