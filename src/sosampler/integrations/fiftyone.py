"""The chosen frames as frame-level fields of a FiftyOne video sample.

FiftyOne numbers frames from 1, this package from 0. FiftyOne itself is not imported: fields are plain JSON, and a
sample is filled through its own `frames`.
"""

from __future__ import annotations

from typing import Any

from sosampler._util.validation import check_bool
from sosampler.errors import InvalidArgument
from sosampler.inference.selection import Selection


def frame_fields(selection: Selection, *, prefix: str = "sosampler", candidates: bool = False) -> dict[str, Any]:
    """Return `{"filepath", "frames": {"16": {"frame_number": 16, "sosampler_selected": True, ...}}}`, ready for JSON.

    Args:
        prefix: what the names of the fields start with: `_selected`, `_seconds` and, where the policy scores,
            `_score`.
        candidates: also list the candidates that were not chosen.

    >>> import sosampler as so
    >>> from sosampler.video.synthetic import numbered_video
    >>> fields = frame_fields(so.select(numbered_video(num_frames=90), 2, policy="uniform"))
    >>> fields["frames"]["23"]
    {'frame_number': 23, 'sosampler_selected': True, 'sosampler_seconds': 0.7333333333333333}
    """
    if not isinstance(prefix, str) or not prefix.isidentifier():
        raise InvalidArgument(f"prefix={prefix!r} must be letters, digits and underscores, such as sosampler")
    rows = _rows(selection, selected=True)
    if check_bool("candidates", candidates):
        # A chosen frame overwrites the same candidate.
        rows = {**_rows(selection.candidates, selected=False), **rows}
    frames = {}
    for index in sorted(rows):
        fields = {f"{prefix}_{name}": value for name, value in rows[index].items()}
        frames[str(index + 1)] = {"frame_number": index + 1, **fields}
    return {"filepath": selection.video, "frames": frames}


def add_frame_fields(sample: Any, selection: Selection, *, prefix: str = "sosampler", candidates: bool = False) -> None:
    """Set these fields on the frames of a FiftyOne video sample; `sample.save()` is left to the caller."""
    if not hasattr(sample, "frames"):
        raise InvalidArgument(f"a {type(sample).__name__} has no frames; give a video sample of FiftyOne")
    for number, fields in frame_fields(selection, prefix=prefix, candidates=candidates)["frames"].items():
        frame = sample.frames[int(number)]
        for name, value in fields.items():
            if name != "frame_number":  # FiftyOne keeps that itself
                frame[name] = value


def _rows(frames: Any, *, selected: bool) -> dict[int, dict[str, Any]]:
    """Return fields by frame number; a repeated frame is listed once."""
    scores = [None] * len(frames) if frames.scores is None else frames.scores.tolist()
    rows: dict[int, dict[str, Any]] = {}
    for index, seconds, score in zip(frames.frame_indices.tolist(), frames.pts_seconds.tolist(), scores, strict=True):
        rows[index] = {"selected": selected, "seconds": seconds}
        if score is not None:
            rows[index]["score"] = score
    return rows
