"""The optional second reader: torchcodec. Needs a system FFmpeg."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from sosampler._util.arrays import Frames, Indices, Seconds
from sosampler.errors import MissingDependency, VideoError, first_line
from sosampler.video.limits import Limits, Size, TimeLimit, check_size, target_size
from sosampler.video.pyav_index import check_for_others
from sosampler.video.reader import FrameBatch, FrameView, RgbView, Timeline, VideoMetadata

# What torchcodec raises: errors of FFmpeg and failed allocations, and indices that it does not find.
_ERRORS = (RuntimeError, ValueError, IndexError, MemoryError)

_UNTOLD = "the file may be damaged, and torchcodec does not tell which frames are: decoder='pyav' does"


def import_decoders() -> Any:
    """torchcodec.decoders, or one sentence about what is missing."""
    try:
        import torchcodec
        from torchcodec import decoders
    except (ImportError, RuntimeError, OSError) as error:
        raise MissingDependency(_missing(first_line(error))) from error
    # Without FFmpeg it imports all the same and fails at its first use.
    if getattr(torchcodec, "ffmpeg_major_version", "unknown") is None:
        raise MissingDependency(_missing("no FFmpeg libraries were found"))
    return decoders


def _missing(why: str) -> str:
    return (
        f"torchcodec cannot be used ({why}); install it with pip install 'sosampler[torchcodec]' and FFmpeg from your "
        "system, or use decoder='pyav', which needs neither"
    )


def _reason(error: Exception) -> str:
    """The sentence in a torchcodec error, without the function and source line before it and the trace after it."""
    return str(error).splitlines()[0].rsplit("cpp:", 1)[-1].split(", ", 1)[-1] if str(error) else type(error).__name__


class _Reading(ABC):
    """What a reader on top of `VideoDecoder.get_frames_at` has in common."""

    decoder = "torchcodec"
    name: str
    notes: list[str]
    file_bytes: int | None = None
    transfer: dict[str, Any] | None = None
    _limits: Limits

    @abstractmethod
    def timeline(self) -> Timeline: ...

    @abstractmethod
    def _decoder_for(self, size: Size) -> Any: ...

    @abstractmethod
    def _codec(self) -> tuple[int, int, float, str]: ...

    def close(self) -> None:
        """Nothing to do: torchcodec closes with its objects."""

    @property
    def total_num_frames(self) -> int:
        return len(self.timeline())

    def keyframe_indices(self) -> Indices:
        return self.timeline().keyframe_indices

    def locate_keyframes(self, positions: Indices, behind: Seconds | None = None) -> tuple[Indices, Seconds]:
        frame_indices = self.timeline().behind_keyframes(positions, 0 if behind is None else behind)
        return frame_indices, self.timeline().seconds(frame_indices)

    def seconds_apart(self, frame_indices: Indices, others: Indices) -> Seconds:
        return self.timeline().seconds(others) - self.timeline().seconds(frame_indices)

    @property
    def metadata(self) -> VideoMetadata:
        width, height, rotation, codec = self._codec()
        timeline = self.timeline()
        return VideoMetadata(
            total_num_frames=len(timeline),
            fps=len(timeline) / timeline.duration if timeline.duration > 0 else 0.0,
            duration=timeline.duration,
            start_seconds=float(timeline.seconds(0)),
            width=width,
            height=height,
            rotation=round(rotation) % 360,
            codec=codec,
            num_keyframes=int(timeline.is_keyframe.sum()),
            decoder=self.decoder,
        )

    def read(self, frame_indices: Indices, *, size: Size = None) -> FrameBatch:
        requested, size = np.asarray(frame_indices, dtype=np.int64), check_size(size)
        width, height = target_size(*self._codec()[:2], size)
        self._limits.check_bytes(self.name, len(requested), width, height, self.file_bytes)
        try:
            batch = self._decoder_for(size).get_frames_at(requested.tolist())
        except _ERRORS as error:
            raise VideoError(
                f"{self.name}: torchcodec could not decode {len(requested)} frames ({_reason(error)}); "
                "the file may be damaged: decoder='pyav' replaces damaged frames by their neighbours"
            ) from error
        return FrameBatch(_to_frames(batch.data), requested, batch.pts_seconds.numpy().astype(np.float64))

    def view(self, frame_indices: Indices, *, size: Size, max_bytes: int) -> FrameView:
        return RgbView(self, frame_indices, size=size, max_bytes=max_bytes)


def _to_frames(data: Any) -> Frames:
    # [N, 3, H, W] or [N, H, W, 3], as the user opened it. torchcodec decodes to the latter and gives the former as a
    # view, so the strides tell them apart even for images three pixels wide.
    channels_first = data.shape[1] == 3 and (data.shape[-1] != 3 or data.stride(1) == 1)
    frames = data.permute(0, 2, 3, 1) if channels_first else data
    return np.ascontiguousarray(frames.cpu().numpy())


class TorchcodecReader(_Reading):
    """Frames of a path, bytes or file-like object through torchcodec in exact mode."""

    def __init__(self, source: Path | bytes | Any, *, name: str, threads: int, limits: Limits) -> None:
        self.name = name
        self.notes = []
        self._source, self._threads, self._limits = source, threads, limits
        self._decoders = import_decoders()
        self._by_size: dict[Size, Any] = {}
        with TimeLimit(name, limits) as time:
            # torchcodec has no limits of its own, and opens whatever files a manifest names.
            self._claims = check_for_others(source, name=name, limits=limits, time=time)
            self.file_bytes = self._claims.file_bytes
            try:
                self._full = self._new_decoder([])
                self._frames = self._scan()
            except _ERRORS as error:
                if isinstance(error, VideoError):
                    raise
                raise VideoError(
                    f"{name}: not a video that torchcodec can read ({_reason(error)}); give a video file, or try "
                    "decoder='pyav'"
                ) from error
            time.check()
        limits.check_pixels(name, *self._codec()[:2])
        limits.check_frames(name, len(self._frames))
        limits.check_duration(name, self._frames.duration)

    def _rewound(self) -> Any:
        if not isinstance(self._source, (Path, bytes)):
            self._source.seek(0)
        return self._source

    def _new_decoder(self, transforms: list[Any]) -> Any:
        return self._decoders.VideoDecoder(
            self._rewound(),
            stream_index=self._claims.stream,
            num_ffmpeg_threads=self._threads,
            seek_mode="exact",
            dimension_order="NHWC",
            transforms=transforms or None,
        )

    def _scan(self) -> Timeline:
        index = self._decoders.Demuxer(self._rewound(), streams=self._claims.stream).streams[0].scan()
        pts = index._pts.numpy().astype(np.int64)
        if not len(pts):
            raise VideoError(
                f"{self.name}: the video stream holds no frame; the file is damaged or was cut off, copy it again"
            )
        order = np.argsort(pts, kind="stable")
        if (np.diff(order) < 0).any():
            self.notes.append("the times of the frames are not in order; the frames are numbered by their times")
        pts = pts[order]
        if len(pts) != len(self._full):
            raise VideoError(
                f"{self.name}: torchcodec counts {len(self._full)} frames, and {len(pts)} when it counts again; use "
                "decoder='pyav', which can"
            )
        if (np.diff(pts) <= 0).any():
            raise VideoError(
                f"{self.name}: torchcodec finds frames without a time of their own; use decoder='pyav', which can"
            )
        named = self._claims.num_frames
        if len(pts) != named and self._claims.is_complete:
            raise VideoError(
                f"{self.name}: torchcodec finds {len(pts)} frames, and the file's index has {named}; use "
                "decoder='pyav', which counts those that are there"
            )
        if len(pts) < named:
            self.notes.append(f"{len(pts)} of the {named} frames in its index are there; {_UNTOLD}")
        base = Fraction(index._time_base_num, index._time_base_den)
        end = int(pts[-1]) + max(1, int(index._duration[order[-1]]))
        return Timeline(pts, base, index.is_key_frame.numpy().astype(np.bool_)[order], end)

    def timeline(self) -> Timeline:
        return self._frames

    def _decoder_for(self, size: Size) -> Any:
        if size is None:
            return self._full
        if size not in self._by_size:
            from torchcodec.transforms import Resize

            width, height, _, _ = self._codec()
            to_width, to_height = target_size(width, height, size)
            self._by_size = {size: self._new_decoder([Resize((to_height, to_width))])}
        return self._by_size[size]

    def read(self, frame_indices: Indices, *, size: Size = None) -> FrameBatch:
        batch, timeline = super().read(frame_indices, size=size), self.timeline()
        # Near damaged data, and where times go back, torchcodec gives the frame that comes next, with its own time.
        used = timeline.index_at(batch.pts_seconds)
        pairs = zip(batch.frame_indices.tolist(), used.tolist(), strict=True)
        notes = [f"torchcodec gave frame {other} in the place of frame {one}" for one, other in pairs if one != other]
        if notes:
            notes.append(_UNTOLD)
        return FrameBatch(batch.frames, used, batch.pts_seconds, tuple(dict.fromkeys(notes)))

    def _codec(self) -> tuple[int, int, float, str]:
        return _codec_of(self._full.metadata)


def _codec_of(meta: Any) -> tuple[int, int, float, str]:
    rotation = getattr(meta, "rotation", None) or 0.0
    return int(meta.width), int(meta.height), float(rotation), str(meta.codec)


class OpenTorchcodecReader(_Reading):
    """Frames of a `VideoDecoder` that the user opened; its own size, device and seek mode are kept."""

    def __init__(self, decoder: Any, *, limits: Limits) -> None:
        self.name = "<VideoDecoder>"
        self.notes = []
        self._given, self._limits = decoder, limits
        meta = decoder.metadata
        limits.check_pixels(self.name, meta.width or 0, meta.height or 0)
        limits.check_frames(self.name, len(decoder))
        limits.check_duration(self.name, meta.end_stream_seconds - meta.begin_stream_seconds)
        self._frames: Timeline | None = None

    def timeline(self) -> Timeline:
        if self._frames is None:
            # A VideoDecoder keeps its pts table to itself. Evenly spaced times serve for choosing by time;
            # the timestamps of what is read are the decoder's own.
            meta, count = self._given.metadata, len(self._given)
            self.notes.append("choosing by time took the frames of the VideoDecoder as evenly spaced")
            microseconds = np.round(
                np.linspace(meta.begin_stream_seconds, meta.end_stream_seconds, count + 1) * 1e6
            ).astype(np.int64)
            keys = np.zeros(count, dtype=np.bool_)
            with suppress(VideoError):  # of approximate seeking, which knows none
                keys[self.keyframe_indices()] = True
            self._frames = Timeline(microseconds[:-1], Fraction(1, 1_000_000), keys, int(microseconds[-1]))
        return self._frames

    @property
    def total_num_frames(self) -> int:
        return len(self._given)

    def keyframe_indices(self) -> Indices:
        try:
            return np.asarray(self._given._get_key_frame_indices().numpy(), dtype=np.int64)
        except (AttributeError, RuntimeError) as error:
            raise VideoError(
                "<VideoDecoder>: does not list its keyframes (opened with seek_mode='approximate'?); "
                "open it with seek_mode='exact', or give the path"
            ) from error

    def _codec(self) -> tuple[int, int, float, str]:
        return _codec_of(self._given.metadata)

    def _decoder_for(self, size: Size) -> Any:
        return self._given

    def read(self, frame_indices: Indices, *, size: Size = None) -> FrameBatch:
        batch = super().read(frame_indices)
        size = check_size(size)
        height, width = batch.frames.shape[1:3]
        to_width, to_height = target_size(width, height, size)
        if (to_width, to_height) == (width, height):
            return batch
        import torch
        from torch.nn.functional import interpolate

        planes = torch.from_numpy(batch.frames).permute(0, 3, 1, 2)
        resized = interpolate(planes, size=(to_height, to_width), mode="bilinear", antialias=True)
        return FrameBatch(_to_frames(resized), batch.frame_indices, batch.pts_seconds, batch.notes)
