"""`sosampler mcp`: tools by which an assistant looks at videos, over the Model Context Protocol.

`VideoTools` has all that the tools do; `make_server` gives them to the official SDK, of its first or second generation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from sosampler._util.arrays import Frames, Indices, Seconds, jpeg
from sosampler._util.validation import check_float, check_int
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError, first_line
from sosampler.inference.many import SheetRow, draw_contact_sheet
from sosampler.inference.options import DEFAULT_POLICY, SelectOptions
from sosampler.inference.select import select_with
from sosampler.inference.selection import Selection
from sosampler.policies.auto import AUTO, Auto
from sosampler.policies.registry import get_policy
from sosampler.video.limits import Limits
from sosampler.video.reader import VideoMetadata
from sosampler.video.source import VIDEO_SUFFIXES, open_video

Part = str | Image.Image

DEFAULT_IMAGES = 9  # of one call: a contact sheet and eight frames
MAX_IMAGES = 17
# Long sides of frames, in pixels, from the best to the smallest that still shows something.
_SIDES = (768, 512, 384, 256)
_PIXELS_A_TOKEN = 750  # Anthropic's rule; Qwen-VL has 784
_SHEET_TOKENS = 1600  # larger images are scaled down by most services
_SHEET_COLUMNS = 4
_JPEG_QUALITY = 85
_TOLERANCE = 0.02  # of the number "auto": so little of what the video shows may be missing
_MIN_AUTO = 2
_LISTED = 20  # videos that a message names


@dataclass(frozen=True)
class VideoTools:
    """What the tools do, for the videos in some folders."""

    folders: Sequence[Path]
    policy: Any = None
    query_model: Any = None
    max_images: int = MAX_IMAGES  # that one call may give
    limits: Limits = field(default_factory=Limits)
    candidates: str | None = None  # as in `select`; None: by policy

    def __post_init__(self) -> None:
        """Refuse now what would fail at every call."""
        check_int("--max-images", self.max_images, at_least=2)
        if not self.folders:
            raise InvalidArgument("no folder was given; name those whose videos the assistant may see")
        for folder in self.folders:
            if not folder.is_dir():
                raise InvalidArgument(f"{folder}: no such folder; name folders whose videos the assistant may see")
        object.__setattr__(self, "folders", tuple(folder.resolve() for folder in self.folders))
        object.__setattr__(self, "policy", get_policy(DEFAULT_POLICY if self.policy is None else self.policy))
        SelectOptions(policy=self.policy, candidates=self.candidates)  # which checks them
        if self.query_model is not None:
            from sosampler.policies.image_text import ImageTextModel, load_image_text

            if not isinstance(self.query_model, ImageTextModel):
                object.__setattr__(self, "query_model", load_image_text(self.query_model))

    # ---- the tools

    def video_info(self, path: str) -> dict[str, Any]:
        """Return length, rate, size and the like of a video."""
        file = self.allowed(path)
        with closing(open_video(file, limits=self.limits)) as reader:
            metadata = reader.metadata
        return {
            "path": str(file),
            "start_seconds": metadata.start_seconds,
            "end_seconds": metadata.start_seconds + metadata.duration,
            "fps": metadata.fps,
            "num_frames": metadata.total_num_frames,
            "num_keyframes": metadata.num_keyframes,
            "width": metadata.width,
            "height": metadata.height,
            "codec": metadata.codec,
            "bytes": file.stat().st_size,
        }

    def look_at_video(
        self,
        path: str,
        query: str | None = None,
        start: float | None = None,
        end: float | None = None,
        num_frames: int | str = AUTO,
        max_images: int = DEFAULT_IMAGES,
        max_tokens: int | None = None,
        contact_sheet: bool = True,
    ) -> list[Part]:
        """Return texts and images: what was chosen, a contact sheet, and each frame behind its time."""
        file = self.allowed(path)
        if query is not None and self.query_model is None:
            raise InvalidArgument("query: this server has no image-text model to read it with; leave query out")
        most = check_int("max_images", max_images, at_least=1 + contact_sheet, at_most=self.max_images) - contact_sheet
        if num_frames != AUTO:
            most = check_int("num_frames", num_frames, at_most=most)
        with closing(open_video(file, limits=self.limits)) as reader:
            metadata = reader.metadata
        sheet_tokens = _SHEET_TOKENS
        if max_tokens is not None:
            sheet_tokens = min(sheet_tokens, check_int("max_tokens", max_tokens) // 3)
        budget = None if max_tokens is None else max_tokens - (sheet_tokens if contact_sheet else 0)
        count, side = fit_images(metadata, most, budget)
        shared: dict[str, Any] = {"start": start, "end": end, "limits": self.limits, "on_short": "fewer"}
        shared["candidates"] = self.candidates
        shared |= {"policy": self.policy} if query is None else {"query": query, "query_model": self.query_model}
        decides = query is not None or self.policy.auto_refusal() is None
        number = Auto(min(_MIN_AUTO, count), count, _TOLERANCE) if num_frames == AUTO and decides else count
        options = SelectOptions(num_frames=number, size=_short_side(metadata, side), **shared)
        selection = select_with(file, options, enlarge=False)
        parts: list[Part] = [_described(selection)]
        if contact_sheet:
            sheet = draw_contact_sheet([SheetRow.of(selection)], _SHEET_COLUMNS)
            parts += ["Contact sheet:", _fit_tokens(sheet, sheet_tokens)]
        assert selection.frames is not None, "decoded"
        return parts + _timed(selection.frames, selection.frame_indices, selection.pts_seconds)

    def frames_at(self, path: str, seconds: Sequence[float], max_tokens: int | None = None) -> list[Part]:
        """Return the frames that are shown at some moments, each behind its true time."""
        file = self.allowed(path)
        count = check_int("the number of seconds", len(seconds), at_most=self.max_images)
        moments = np.array([check_float("seconds", value) for value in seconds])
        with closing(open_video(file, limits=self.limits)) as reader:
            metadata, timeline = reader.metadata, reader.timeline()
            begin, end = float(timeline.seconds(0)), float(timeline.to_seconds(timeline.end_pts))
            outside = moments[(moments < begin) | (moments >= end)]
            if len(outside):
                raise InvalidArgument(
                    f"{file.name}: nothing is shown at {outside[0]:g} s; give seconds from {begin:.3f} to below "
                    f"{end:.3f}"
                )
            fitting, side = fit_images(metadata, count, max_tokens)
            if fitting < count:
                raise InvalidArgument(
                    f"max_tokens={max_tokens} is enough for {fitting} of {count} frames; ask for fewer, or give more"
                )
            indices = np.unique(timeline.index_at(moments))
            batch = reader.read(indices, size=_short_side(metadata, side))
        return _timed(batch.frames, batch.frame_indices, batch.pts_seconds)

    # ---- which files may be seen

    def allowed(self, path: str) -> Path:
        """Return the file if it lies in one of the folders, links resolved. Messages do not tell what is outside."""
        given = Path(path)
        for candidate in [given] if given.is_absolute() else [folder / given for folder in self.folders]:
            try:
                file = candidate.resolve(strict=True)
            except (OSError, RuntimeError, ValueError):  # missing, a loop of links, a zero byte
                continue
            if file.is_file() and any(file.is_relative_to(folder) for folder in self.folders):
                return file
        there = list(islice(self._videos(), _LISTED + 1))
        names = f"{', '.join(there[:_LISTED])}{', ...' if len(there) > _LISTED else ''}"
        raise InvalidArgument(
            f"{path}: is no video file in the folders of this server ({', '.join(map(str, self.folders))}); "
            f"{f'there are: {names}' if there else 'there are none'}"
        )

    def _videos(self) -> Iterator[str]:
        for folder in self.folders:
            for file in sorted(folder.rglob("*")):
                if file.suffix.lower() in VIDEO_SUFFIXES and file.is_file():
                    yield str(file.relative_to(folder))


# ---- images that fit


def fit_images(metadata: VideoMetadata, count: int, max_tokens: int | None) -> tuple[int, int]:
    """Return how many frames, and which long side in pixels, stay within a number of tokens.

    Frames become smaller before they become fewer.
    """
    if max_tokens is None:
        return count, _SIDES[0]
    for side in _SIDES:
        if count * _tokens(metadata, side) <= max_tokens:
            return count, side
    each = _tokens(metadata, _SIDES[-1])
    if each > max_tokens:
        raise InvalidArgument(f"max_tokens leaves {max_tokens} for frames, but one needs {each}; give more")
    return max_tokens // each, _SIDES[-1]


def _tokens(metadata: VideoMetadata, side: int) -> int:
    scale = min(1.0, side / max(metadata.width, metadata.height))
    return math.ceil(metadata.width * scale * metadata.height * scale / _PIXELS_A_TOKEN)


def _short_side(metadata: VideoMetadata, side: int) -> int:
    """The short side of frames whose long side is at most `side`; they are never enlarged."""
    scale = min(1.0, side / max(metadata.width, metadata.height))
    return max(1, int(min(metadata.width, metadata.height) * scale))


def _fit_tokens(image: Image.Image, tokens: int) -> Image.Image:
    scale = min(1.0, math.sqrt(tokens * _PIXELS_A_TOKEN / (image.width * image.height)))
    size = max(1, int(image.width * scale)), max(1, int(image.height * scale))
    return image if scale == 1 else image.resize(size, Image.Resampling.LANCZOS)


def _described(selection: Selection) -> str:
    """What an assistant must know about the frames that follow."""
    metadata = selection.metadata
    begin, end = metadata.start_seconds, metadata.start_seconds + metadata.duration
    lines = [
        f"{Path(selection.video).name}: {begin:.3f} to {end:.3f} s, {metadata.total_num_frames} frames of "
        f"{metadata.width}x{metadata.height} at {metadata.fps:g} fps. Chosen: {len(selection)} of "
        f"{selection.num_candidates} candidates by {selection.policy}; what lies between them was not looked at."
    ]
    if selection.query is not None and selection.query["localised"]:
        lines.append(f"They fit the query {selection.query['text']!r} best; whether they show it is for you to judge.")
    return "\n".join([*lines, *(f"Note: {note}" for note in selection.notes)])


def _timed(frames: Frames, indices: Indices, pts_seconds: Seconds) -> list[Part]:
    parts: list[Part] = []
    for frame, index, seconds in zip(frames, indices.tolist(), pts_seconds.tolist(), strict=True):
        parts += [f"{seconds:.3f} s (frame {index}):", Image.fromarray(frame)]
    return parts


# ---- the server

_INSTRUCTIONS = (
    "Look at videos. Begin with look_at_video: it chooses the frames that show what the video shows, or those that fit "
    "a query, and gives their true times. Then look closer: a range of seconds, or frames_at for exact moments. "
    "Seconds are the video's own timestamps in every tool."
)


def make_server(tools: VideoTools) -> Any:
    """Return a server of the official SDK with the tools; `run()` serves standard input and output."""
    kind, image_kind, tool_error = _sdk()
    server = kind("sosampler", instructions=_INSTRUCTIONS)

    @contextmanager
    def tool_errors() -> Iterator[None]:
        """Pass the sentence of an error on; the SDK hides what others say."""
        try:
            yield
        except SosamplerError as error:
            raise tool_error(str(error)) from error

    def contents(parts: list[Part]) -> list[Any]:
        return [
            part if isinstance(part, str) else image_kind(data=jpeg(part, _JPEG_QUALITY), format="jpeg")
            for part in parts
        ]

    def look_at_video(
        path: str,
        query: str | None = None,
        start: float | None = None,
        end: float | None = None,
        num_frames: int | Literal["auto"] = "auto",
        max_images: int = DEFAULT_IMAGES,
        max_tokens: int | None = None,
        contact_sheet: bool = True,
    ) -> list:
        """Look at a video: a contact sheet and the frames that matter, each with its true time.

        Args:
            path: of the video; relative to the folders of this server, or absolute.
            query: what the frames should show, in a few words, such as "a person opens the door".
            start, end: only this range, in seconds.
            num_frames: how many frames; "auto": as many as show what the video shows.
            max_images: the contact sheet and the frames together.
            max_tokens: about how many tokens the images may cost; frames become smaller, then fewer.
            contact_sheet: whether to add one image of all chosen frames above a timeline.
        """
        with tool_errors():
            return contents(
                tools.look_at_video(path, query, start, end, num_frames, max_images, max_tokens, contact_sheet)
            )

    def frames_at(path: str, seconds: list[float], max_tokens: int | None = None) -> list:
        """Show the frames of a video at exact moments, each with its true time.

        Args:
            path: of the video; relative to the folders of this server, or absolute.
            seconds: the moments.
            max_tokens: about how many tokens the images may cost; they become smaller.
        """
        with tool_errors():
            return contents(tools.frames_at(path, seconds, max_tokens))

    def video_info(path: str) -> dict[str, Any]:
        """Tell the length, rate, size and codec of a video without looking at it.

        Args:
            path: of the video; relative to the folders of this server, or absolute.
        """
        with tool_errors():
            return tools.video_info(path)

    for tool, structured in ((look_at_video, False), (frames_at, False), (video_info, None)):
        server.tool(structured_output=structured)(tool)
    return server


def _sdk() -> tuple[Any, Any, type[Exception]]:
    """Return the SDK's server, image and tool error, under the names of its second or first generation."""
    reason = ""
    for home, name in (("mcp.server.mcpserver", "MCPServer"), ("mcp.server.fastmcp", "FastMCP")):
        try:
            module = import_module(home)
        except ImportError as error:
            reason = first_line(error)
            continue
        return getattr(module, name), module.Image, import_module(f"{home}.exceptions").ToolError
    raise MissingDependency(
        f"sosampler mcp needs the package mcp ({reason}); install it with: pip install 'sosampler[mcp]'"
    )


__all__ = ["DEFAULT_IMAGES", "MAX_IMAGES", "VideoTools", "fit_images", "make_server"]
