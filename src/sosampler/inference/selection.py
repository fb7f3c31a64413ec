"""`Selection`: which frames were chosen, when they are shown, and from which candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from sosampler._util.arrays import Frames, Indices, Seconds
from sosampler.errors import SosamplerError
from sosampler.inference.options import SelectOptions
from sosampler.policies.base import Choice
from sosampler.samplers.answer import Evidence
from sosampler.video.candidates import segment_centres
from sosampler.video.reader import FrameBatch, VideoMetadata


@dataclass(frozen=True, eq=False)
class Candidates:
    """The T frames from which a policy chooses."""

    mode: str  # exact, keyframe, snap or auto
    grid: str
    frame_indices: Indices  # [T], in time order; repeats where the video is short
    pts_seconds: Seconds  # [T]
    moved_frames: Indices  # [T] how far each lies behind its position on the grid, in frames
    moved_seconds: Seconds  # [T] the same in seconds
    scores: np.ndarray | None = None  # [T] where the policy gives scores

    def __post_init__(self) -> None:
        count = len(self.frame_indices)
        if not count or any(len(a) != count for a in (self.pts_seconds, self.moved_frames, self.moved_seconds)):
            raise ValueError("candidates need one index, one time and one shift each")
        if np.any(np.diff(self.frame_indices) < 0):
            raise ValueError("candidates must be in time order")

    def __len__(self) -> int:
        return len(self.frame_indices)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}


class Known(NamedTuple):
    """What an answer needs to know of the candidates besides the classifier's answers."""

    evidence: Evidence  # of this video as a batch of one, [1, D]: each distinct candidate once
    positions: Indices  # [N], which of the D each chosen frame is


@dataclass(frozen=True, eq=False)
class Selection:
    """N chosen frames of one video, in time order."""

    video: str
    policy: str
    frame_indices: Indices  # [N] true frame numbers in presentation order
    pts_seconds: Seconds  # [N] true presentation times
    candidates: Candidates
    metadata: VideoMetadata
    scores: np.ndarray | None = None  # [N]
    frames: Frames | None = None  # [N, H, W, 3] uint8 RGB; None without decode=True
    timing: dict[str, float] = field(default_factory=dict)  # seconds
    notes: tuple[str, ...] = ()
    # For num_frames="auto": the bounds, and the accuracy that the policy expected of each number.
    asked: dict[str, Any] | None = None
    # Of a query: its text and model, the share of the candidates that its scores are spread over, and whether that is
    # a part of the video ("localised").
    query: dict[str, Any] | None = None
    known: Known | None = field(default=None, repr=False)  # where the answer is not the mean of the frames' answers
    transfer: dict[str, Any] | None = None  # of an address: bytes read, of how many, and in how many requests

    def __post_init__(self) -> None:
        count = len(self.frame_indices)
        if not count or len(self.pts_seconds) != count:
            raise ValueError("a selection needs at least one frame, and a time for each")
        if np.any(np.diff(self.frame_indices) < 0):
            raise ValueError("a selection must be in time order")
        if self.frames is not None and len(self.frames) != count:
            raise ValueError(f"{count} indices but {len(self.frames)} frames")

    def __len__(self) -> int:
        return len(self.frame_indices)

    def __repr__(self) -> str:
        shape = "None" if self.frames is None else f"uint8{list(self.frames.shape)}"
        return (
            f"Selection({self.video!r}, policy={self.policy!r}, frame_indices={self.frame_indices.tolist()}, "
            f"pts_seconds={np.round(self.pts_seconds, 3).tolist()}, num_candidates={self.num_candidates}, "
            f"frames={shape})"
        )

    @property
    def num_frames(self) -> int:
        return len(self.frame_indices)

    @property
    def num_candidates(self) -> int:
        return len(self.candidates)

    def to_torch(self) -> Any:
        """Return the frames as a uint8 tensor [N, 3, H, W]."""
        from sosampler._util.hardware import import_torch

        if self.frames is None:
            raise SosamplerError("this selection holds no frames; select with decode=True")
        torch = import_torch()
        return torch.from_numpy(np.ascontiguousarray(self.frames.transpose(0, 3, 1, 2)))

    def to_video_metadata(self) -> dict[str, Any]:
        """Return the fields of transformers' `VideoMetadata`, with the true frame numbers.

        Pass it with the frames: `processor(videos=[list(sel.frames)], video_metadata=[sel.to_video_metadata()],
        do_sample_frames=False)`. transformers computes times as frame number / fps, which is right for a constant
        frame rate; for a variable one `pts_seconds` of this object holds the true times.
        """
        return {
            "total_num_frames": self.metadata.total_num_frames,
            "fps": self.metadata.fps,
            "width": self.metadata.width,
            "height": self.metadata.height,
            "duration": self.metadata.duration,
            "video_backend": self.metadata.decoder,
            "frames_indices": self.frame_indices.tolist(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pixels, ready for JSON."""
        return {
            "video": self.video,
            "policy": self.policy,
            "num_frames": self.num_frames,
            **({} if self.asked is None else {"asked": dict(self.asked)}),
            **({} if self.query is None else {"query": dict(self.query)}),
            "num_candidates": self.num_candidates,
            "frame_indices": self.frame_indices.tolist(),
            "pts_seconds": self.pts_seconds.tolist(),
            "scores": None if self.scores is None else self.scores.tolist(),
            "candidates": self.candidates.to_dict(),
            **({} if self.transfer is None else {"transfer": dict(self.transfer)}),
            "metadata": self.metadata.to_dict(),
            "video_metadata": self.to_video_metadata(),
            "timing": dict(self.timing),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, eq=False)
class CandidateFrames:
    """The candidates of one video, each distinct frame once, before a policy chooses among them."""

    video: str
    candidates: Candidates  # [T]
    frame_indices: Indices  # [D]; differs from the candidates only where a damaged frame was replaced
    pts_seconds: Seconds  # [D]
    metadata: VideoMetadata
    timing: dict[str, float] = field(default_factory=dict)  # seconds, by the names that a selection has
    notes: tuple[str, ...] = ()
    transfer: dict[str, Any] | None = None  # of an address, as a selection has it
    frames: Frames | None = None  # [D, H, W, 3]; None where they are not decoded, or in another process's memory


def build_selection(
    video: CandidateFrames, options: SelectOptions, choice: Choice, read: Callable[[Indices], FrameBatch] | None = None
) -> Selection:
    """Build the selection of a choice, positions [<= N] and scores [D], among the D distinct frames of a video.

    `video` has its frames, unless `read` decodes them by their numbers or no pixels are wanted.
    """
    distinct, candidate_of = np.unique(video.candidates.frame_indices, return_inverse=True)  # [D], [T] -> 0..D-1
    positions = choice.positions
    wanted = options.resolved_frames or len(candidate_of)
    if options.auto is None and options.on_short == "repeat" and wanted > len(positions):
        # All candidates: with the repeats that they have. Otherwise the chosen frames are repeated evenly.
        takes_all = wanted == len(candidate_of)
        positions = candidate_of if takes_all else positions[segment_centres(len(positions), wanted)]
    if read is None:
        frame_indices, pts_seconds = video.frame_indices[positions], video.pts_seconds[positions]
        frames = None if video.frames is None else video.frames[positions]
    else:
        batch = read(distinct[positions])
        frame_indices, pts_seconds, frames = batch.frame_indices, batch.pts_seconds, batch.frames
    # The neighbour that replaces a damaged frame may lie behind the next one.
    order = np.argsort(frame_indices, kind="stable")
    if (np.diff(order) < 0).any():
        positions, frame_indices, pts_seconds = positions[order], frame_indices[order], pts_seconds[order]
        frames = None if frames is None else frames[order]
    scores, notes = choice.scores, video.notes
    if choice.query is not None:
        from sosampler.policies.query import flat_note

        notes = tuple(filter(None, (*notes, flat_note(choice.query))))
    return Selection(
        video=video.video,
        policy=options.resolved_policy.name,
        frame_indices=frame_indices,
        pts_seconds=pts_seconds,
        candidates=video.candidates if scores is None else replace(video.candidates, scores=scores[candidate_of]),
        metadata=video.metadata,
        scores=None if scores is None else scores[positions],
        frames=frames,
        timing=video.timing,
        notes=notes,
        asked=None if options.auto is None else options.auto.to_dict(choice.expected),
        query=choice.query,
        known=None if choice.evidence is None else Known(choice.evidence, positions),
        transfer=video.transfer,
    )
