"""Choose frames before transformers: for `load_video`, video processors, and processors of Video-LLMs.

The hooks of transformers see the number of frames and no pixels, so they cannot choose by content. Here frames are
chosen first; transformers then gets the frames, or their numbers, and their metadata.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from sosampler._util.arrays import Frames, Indices
from sosampler._util.validation import check_bool
from sosampler.errors import InvalidArgument, MissingDependency
from sosampler.inference.options import SelectOptions
from sosampler.inference.select import select_with
from sosampler.inference.selection import Selection
from sosampler.integrations.frame_times import decoded, video_metadata, whole_patches

# Arguments that would make a processor choose or count frames again.
_SET_HERE = ("do_sample_frames", "video_metadata", "num_frames", "fps")


class SampleIndices:
    """A `sample_indices_fn` for transformers' `load_video`; see `as_sample_indices_fn`."""

    def __init__(self, source: Any, options: SelectOptions) -> None:
        self._source = source
        self._options = options

    @cached_property
    def selection(self) -> Selection:
        """The selection, with true times and scores; the video is opened at the first access."""
        if isinstance(self._source, Selection):
            return self._source
        return select_with(self._source, self._options)

    def __call__(self, metadata: Any = None, **_: Any) -> Indices:
        """Return the numbers of the chosen frames, each once; transformers calls it with its metadata of the video."""
        indices: Indices = np.unique(self.selection.frame_indices)
        _check_same_video(self.selection, indices, metadata)
        return indices


def as_sample_indices_fn(source: Any, num_frames: int | None = None, **options: Any) -> SampleIndices:
    """Return a function for `transformers.video_utils.load_video(path, sample_indices_fn=...)`.

    Args:
        source: the same video that `load_video` gets, or a `Selection` made of it.
        num_frames: N; a video with fewer frames returns those it has, since `load_video` reads each frame once.
        options: as in `select`. No frames are kept, so the default policy is uniform. With a policy that needs pixels
            the candidates are decoded here and the chosen frames again by transformers; `load_video` of this module
            decodes once.

    Example:
        video, metadata = load_video("match.mp4", sample_indices_fn=as_sample_indices_fn("match.mp4", 8))
    """
    if isinstance(source, Selection):
        if num_frames is not None or options:
            raise InvalidArgument("a Selection is already made; give a video, or leave num_frames and options out")
        return SampleIndices(source, SelectOptions())
    for name, allowed in (("on_short", "fewer"), ("decode", False)):
        if options.setdefault(name, allowed) != allowed:
            raise InvalidArgument(
                f"{name}={options[name]!r} does not apply: load_video decodes, and reads each frame once; leave it out"
            )
    return SampleIndices(source, SelectOptions(num_frames=num_frames, **options))


def load_video(source: Any, num_frames: int | None = None, **options: Any) -> tuple[Frames, Any]:
    """Return frames [N, H, W, 3] and `VideoMetadata`, as transformers' own `load_video` does, decoded once.

    `source`, `num_frames` and `options` are those of `select`.
    """
    selection = select_with(source, SelectOptions(num_frames=num_frames, **options))
    try:
        from transformers.video_utils import VideoMetadata
    except ImportError as error:
        raise MissingDependency(
            "transformers is not installed; install it with: pip install 'sosampler[hf]'"
        ) from error
    return decoded(selection), VideoMetadata(**video_metadata(selection))


class SelectingProcessor:
    """Chooses frames, then calls a processor of transformers with them and their metadata.

    Args:
        processor: a video processor (`AutoVideoProcessor`), or the processor of a Video-LLM (`AutoProcessor`).
        num_frames: N.
        one_moment_per_patch: repeat each frame as often as a patch of the network is long in time, so that no patch
            mixes frames that lie apart; see `whole_patches`.
        options: other arguments of `select`.

    Example:
        processor = SelectingProcessor(AutoVideoProcessor.from_pretrained(name), 16, policy="runs/sampler")
        model(**processor(["a.mp4", "b.mp4"], return_tensors="pt"))
    """

    def __init__(
        self, processor: Any, num_frames: int | None = None, *, one_moment_per_patch: bool = False, **options: Any
    ) -> None:
        self.processor = processor
        # The part that handles videos: the processor itself, or its member in a Video-LLM's processor.
        self._video_processor = getattr(processor, "video_processor", processor)
        if not callable(processor) or not hasattr(self._video_processor, "sample_frames"):
            raise InvalidArgument(
                f"a {type(processor).__name__} handles no videos; give what AutoVideoProcessor or, for a Video-LLM, "
                "AutoProcessor loads"
            )
        self._one_moment = check_bool("one_moment_per_patch", one_moment_per_patch)
        if options.get("decode") is False:
            raise InvalidArgument("decode=False gives no frames to process; leave it out")
        self.options = SelectOptions(num_frames=num_frames, **options)

    def __repr__(self) -> str:
        return f"SelectingProcessor({type(self.processor).__name__}, policy={self.options.resolved_policy.name!r})"

    def __call__(self, videos: Any, **arguments: Any) -> Any:
        """Return `process(select(videos))`: what the processor returns for the chosen frames."""
        self._check(arguments)
        return self.process(self.select(videos), **arguments)

    def select(self, videos: Any) -> list[Selection]:
        """Choose frames of a video, or of each of a list of videos."""
        many = isinstance(videos, (list, tuple))
        return [select_with(video, self.options) for video in (videos if many else [videos])]

    def process(self, selections: Selection | Sequence[Selection], **arguments: Any) -> Any:
        """Process selections; `arguments` go to the processor: text, images, return_tensors, ..."""
        self._check(arguments)
        listed = [selections] if isinstance(selections, Selection) else list(selections)
        if not listed:
            raise InvalidArgument("no video was given; give one, or a list of them")
        size = int(getattr(self._video_processor, "temporal_patch_size", None) or 1)
        padded = [whole_patches(each, size, one_moment_per_patch=self._one_moment) for each in listed]
        frames, metadata = [decoded(each) for each in padded], [video_metadata(each) for each in padded]
        return self.processor(videos=frames, video_metadata=metadata, do_sample_frames=False, **arguments)

    @staticmethod
    def _check(arguments: dict[str, Any]) -> None:
        for name in _SET_HERE:
            if name in arguments:
                raise InvalidArgument(
                    f"{name} is set by the selection of frames; leave it out, or give num_frames or fps to "
                    "SelectingProcessor itself"
                )


def _check_same_video(selection: Selection, indices: Indices, metadata: Any) -> None:
    """Refuse another video than the one that the frames were chosen from."""
    if metadata is None:
        return
    sides = sorted((selection.metadata.width, selection.metadata.height))  # its reader may not apply the rotation
    width, height = (getattr(metadata, name, None) for name in ("width", "height"))
    total = getattr(metadata, "total_num_frames", None) or 0  # 0 where its reader does not report it
    if width and height and sorted((width, height)) != sides:
        actual = f"{width}x{height} pixels"
    elif total and int(indices[-1]) >= total:
        actual = f"{total} frames"
    else:
        return
    expected = selection.metadata
    name = os.path.basename(selection.video)
    raise InvalidArgument(
        f"frames were chosen from {name} ({expected.width}x{expected.height} pixels, {expected.total_num_frames} "
        f"frames) but the video being read has {actual}; make a sample_indices_fn for each video"
    )


__all__ = ["SampleIndices", "SelectingProcessor", "as_sample_indices_fn", "load_video"]
