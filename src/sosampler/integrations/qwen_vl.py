"""Messages for Qwen-VL and OpenAI-compatible servers, with the true times of the chosen frames.

Two formats:

- "video": one video; the processor adds the times, from `processor_kwargs` or `media_io_kwargs`. Two neighbouring
  frames share a patch. Qwen3-VL and later write times into the prompt, Qwen2-VL and Qwen2.5-VL assume evenly spaced
  frames.
- "images": each frame is an image after a text with its time. Exact for any frames and any network that takes several
  images, at about twice the tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from sosampler._util.arrays import jpeg
from sosampler._util.validation import check_int, one_of
from sosampler.errors import InvalidArgument
from sosampler.inference.selection import Selection
from sosampler.integrations.frame_times import seconds_from_start, video_metadata, whole_patches
from sosampler.integrations.pil import to_pil

SHOWN = ("video", "images")
_PATCH = 2  # frames that share a patch in Qwen-VL

Content = list[dict[str, Any]]


def build_messages(
    selections: Selection | Sequence[Selection], prompt: str, *, show: str = "video", system: str | None = None
) -> list[dict[str, Any]]:
    """Return messages for `processor.apply_chat_template` of transformers and for qwen-vl-utils, with Pillow images.

    Args:
        selections: of one video or of several, which come in this order before the prompt.
        show: "video" or "images".
        system: a system message.

    With "video" the processor needs the metadata beside the messages:

        inputs = processor.apply_chat_template(
            build_messages(sel, "What happens?"), processor_kwargs=processor_kwargs(sel),
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")

    with `processor_kwargs` of this module. A list of frames alone loses its times, in qwen-vl-utils too.
    """
    one_of("show", show, SHOWN)
    as_images = _as_images(lambda image: {"type": "image", "image": image})
    return _messages(selections, as_images if show == "images" else _as_video, prompt, system)


def processor_kwargs(selections: Selection | Sequence[Selection]) -> dict[str, Any]:
    """Return the arguments for `build_messages(show="video")`: true frame numbers and rates, and no resampling."""
    return {
        "do_sample_frames": False,
        "video_metadata": [video_metadata(whole_patches(selection, _PATCH)) for selection in _listed(selections)],
    }


def openai_messages(
    selections: Selection | Sequence[Selection],
    prompt: str,
    *,
    show: str = "images",
    system: str | None = None,
    quality: int = 90,
) -> list[dict[str, Any]]:
    """Return messages as plain JSON for a server, with JPEG frames in data URLs.

    "images" works with any server. "video" is vLLM's form for frames that the client has chosen; the request must then
    carry `extra_body={"media_io_kwargs": media_io_kwargs(selection)}`.
    """
    one_of("show", show, SHOWN)
    check_int("quality", quality, at_most=100)

    def picture(image: Image.Image) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{_base64(image, quality)}"}}

    def video(selection: Selection) -> Content:
        files = ",".join(_base64(image, quality) for image in to_pil(_at_least_two(selection)))
        return [{"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{files}"}}]

    return _messages(selections, _as_images(picture) if show == "images" else video, prompt, system)


def media_io_kwargs(selection: Selection) -> dict[str, Any]:
    """Return vLLM's field of that name, for `openai_messages(show="video")` of one video."""
    padded = _at_least_two(selection)
    metadata = video_metadata(padded)
    fields = {name: metadata[name] for name in ("fps", "frames_indices", "total_num_frames", "duration")}
    # Without a number vLLM takes the first 32 frames.
    return {"video": {**fields, "num_frames": len(padded), "do_sample_frames": False}}


def timestamp(seconds: float) -> str:
    """Return a time as Qwen3-VL's processor writes it.

    >>> timestamp(75.04)
    '<75.0 seconds>'
    """
    return f"<{seconds:.1f} seconds>"


def _as_video(selection: Selection) -> Content:
    padded = whole_patches(selection, _PATCH)
    # For qwen-vl-utils, which otherwise assumes two frames a second.
    rate = len(padded) / selection.metadata.duration if selection.metadata.duration > 0 else selection.metadata.fps
    return [{"type": "video", "video": to_pil(padded), "sample_fps": rate}]


def _as_images(content_of: Callable[[Image.Image], dict[str, Any]]) -> Callable[[Selection], Content]:
    def content(selection: Selection) -> Content:
        times = [{"type": "text", "text": timestamp(seconds)} for seconds in seconds_from_start(selection)]
        pairs = zip(times, map(content_of, to_pil(selection)), strict=True)
        return [part for pair in pairs for part in pair]

    return content


def _at_least_two(selection: Selection) -> Selection:
    return whole_patches(selection, _PATCH) if len(selection) == 1 else selection


def _base64(image: Image.Image, quality: int) -> str:
    return base64.b64encode(jpeg(image, quality)).decode("ascii")


def _listed(selections: Selection | Sequence[Selection]) -> list[Selection]:
    listed = [selections] if isinstance(selections, Selection) else list(selections)
    for item in listed:
        if not isinstance(item, Selection):
            raise InvalidArgument(f"a {type(item).__name__} is not a selection; give what so.select returns")
    if not listed:
        raise InvalidArgument("no selection was given; give what so.select returns, or a list of it")
    return listed


def _messages(
    selections: Selection | Sequence[Selection], show: Callable[[Selection], Content], prompt: str, system: str | None
) -> list[dict[str, Any]]:
    parts = [part for selection in _listed(selections) for part in show(selection)]
    if not isinstance(prompt, str):
        raise InvalidArgument(f"prompt is a {type(prompt).__name__}; give a text")
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]


__all__ = ["SHOWN", "build_messages", "media_io_kwargs", "openai_messages", "processor_kwargs", "timestamp"]
