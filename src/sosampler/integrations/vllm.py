"""A video loader for vLLM: it chooses frames from the bytes of a request and gives vLLM their true times.

vLLM calls `plugin` in each of its processes, through the entry point group "vllm.general_plugins". The loader is
then selected by name:

    vllm serve MODEL --media-io-kwargs '{"video": {"video_backend": "sosampler", "num_frames": 8}}'

The environment variable VLLM_VIDEO_LOADER_BACKEND=sosampler does the same for models that have no loader of their own
in vLLM; for those that have one (Qwen-VL, GLM-V, ...) vLLM prefers it unless "video_backend" is set.

Settings of the server and of a request reach a loader mixed. So options that could harm a server are bounded here, and
the folder of a trained sampler comes from the environment variable SOSAMPLER_VLLM_POLICY only.
"""

from __future__ import annotations

import logging
import math
import os
from contextlib import closing
from functools import cache
from importlib import import_module
from typing import Any

from sosampler._util.arrays import Frames
from sosampler._util.validation import check_float, check_int, one_of
from sosampler.errors import InvalidArgument, MissingDependency, VideoError, first_line
from sosampler.inference.options import FALLBACK_POLICY, SelectOptions
from sosampler.inference.select import select_with
from sosampler.integrations.frame_times import decoded, video_metadata, whole_patches
from sosampler.policies.base import Policy
from sosampler.policies.registry import get_policy, is_policy_name, list_policies
from sosampler.video.source import DECODERS, open_video

log = logging.getLogger("sosampler")

NAME = "sosampler"
_VIDEO = "vllm.multimodal.video"
POLICY_VARIABLE = "SOSAMPLER_VLLM_POLICY"
_MAX_FRAMES = 768  # the maximum of Qwen-VL's own loader
_MAX_CANDIDATES = 4096
# Arguments of `select` that a request may give; besides them num_frames, fps, policy, size and backend.
_PLAIN = ("num_candidates", "candidates", "grid", "start", "end", "snap_tolerance", "seed")
# Metadata that vLLM's processors read. transformers' VideoMetadata refuses unknown keys.
_METADATA = ("total_num_frames", "fps", "duration", "frames_indices")


def plugin() -> None:
    """Call `register` when vLLM starts; an error must not stop a server that may not use the loader."""
    try:
        register()
    except MissingDependency as error:
        log.warning("%s", error)


def register() -> None:
    """Register the loader in vLLM. May be called more than once, as vLLM does."""
    try:
        video = import_module(_VIDEO)
        registry, base = video.VIDEO_LOADER_REGISTRY, video.VideoLoader
    except (ImportError, AttributeError) as error:
        raise MissingDependency(
            f"the video loader {NAME!r} needs vllm with VIDEO_LOADER_REGISTRY and VideoLoader in {_VIDEO}, which are "
            f"missing ({first_line(error)}); install vllm 0.32 or one like it"
        ) from error
    if NAME not in registry.name2class:
        registry.register(NAME)(loader_class(base))


def loader_class(base: type) -> type:
    """Return the loader as a subclass of vLLM's `VideoLoader`."""

    class SosamplerVideoLoader(base):
        """Chooses frames by content; see `sosampler.integrations.vllm`."""

        @classmethod
        def load_bytes(cls, data: bytes, num_frames: int = -1, **options: Any) -> tuple[Frames, dict[str, Any]]:
            return load_bytes(data, num_frames, **options)

    return SosamplerVideoLoader


def load_bytes(data: bytes, num_frames: int = -1, **options: Any) -> tuple[Frames, dict[str, Any]]:
    """Return chosen frames [N, H, W, 3] uint8 and vLLM's metadata for them.

    Args:
        data: a whole video file.
        num_frames: N, at most; a shorter video returns what it has, one of a single frame returns it twice, since
            networks such as Qwen-VL need two. -1 takes all candidates, and needs `fps` or `num_candidates`.
        options: num_candidates, candidates, grid, fps, start, end, snap_tolerance and seed of `select`; `policy`, a
            name out of `list_policies`; `size`, a short side; `backend`, "pyav" or "torchcodec".

    Raises:
        InvalidArgument: a ValueError, which vLLM answers as a bad request.
    """
    try:
        selection = select_with(data, _options(data, num_frames, options), enlarge=False)
    except VideoError as error:
        raise InvalidArgument(str(error)) from error
    if len(selection) == 1:
        selection = whole_patches(selection, 2)
    metadata = video_metadata(selection)
    fields = {name: metadata[name] for name in _METADATA}
    fields["video_backend"] = f"{NAME}_{selection.metadata.decoder}"
    fields["do_sample_frames"] = False  # the processor must neither drop frames nor number them 0, 1, 2, ...
    return decoded(selection), fields


def _options(data: bytes, num_frames: int, given: dict[str, Any]) -> SelectOptions:
    """Return the options of a request, within bounds."""
    known = ("policy", "fps", "size", "backend", *_PLAIN)
    for name in given:
        if name not in known:
            raise InvalidArgument(
                f"video option {name!r} is unknown to the loader {NAME!r}; it knows: {', '.join(known)}"
            )
    values = {name: given[name] for name in _PLAIN if name in given}
    if "backend" in given:
        values["decoder"] = one_of("backend", given["backend"], DECODERS)
    if given.get("size") is not None:
        values["size"] = check_int("size", given["size"])
    fps = given.get("fps", -1)
    if fps != -1:
        values["fps"] = check_float("fps", fps, above=0)
        _bounded("fps times the video's seconds", _frames_at(data, fps, values), _MAX_CANDIDATES)
    if num_frames == -1:
        if fps == -1 and "num_candidates" not in values:
            raise InvalidArgument(
                "num_frames=-1 would take every frame of the video; give a number, or fps or num_candidates with it"
            )
        values["num_frames"] = values.get("num_candidates")
    else:
        values["num_frames"] = check_int("num_frames", num_frames)
    if values["num_frames"] is not None:
        _bounded("num_frames", values["num_frames"], _MAX_FRAMES)
    if "num_candidates" in values:
        _bounded("num_candidates", check_int("num_candidates", values["num_candidates"]), _MAX_CANDIDATES)
        # vLLM always gives a number of frames, 32 by default.
        values["num_frames"] = min(values["num_frames"], values["num_candidates"])
    # One decoding thread a video: a server handles many in parallel.
    return SelectOptions(**values, policy=_policy(given.get("policy")), on_short="fewer", threads=1)


_loaded = cache(get_policy)  # once a process, not for every request


def _policy(given: Any) -> Policy:
    configured = os.environ.get(POLICY_VARIABLE) or FALLBACK_POLICY
    if given is None or given == configured:
        return _loaded(configured)
    if not isinstance(given, str) or not is_policy_name(given):
        raise InvalidArgument(
            f"policy={given!r} must not be set by a request; choose one of: {', '.join(list_policies())}; the folder "
            f"of a trained sampler is set by the server's environment variable {POLICY_VARIABLE}"
        )
    return _loaded(given)


def _frames_at(data: bytes, fps: float, values: dict[str, Any]) -> int:
    """Return the maximum number of candidates at that rate."""
    with closing(open_video(data, decoder=values.get("decoder"), threads=1)) as reader:
        return math.ceil(min(reader.metadata.duration * fps, reader.total_num_frames))


def _bounded(name: str, value: int, maximum: int) -> None:
    if value > maximum:
        raise InvalidArgument(f"{name}={value} is more than the loader {NAME!r} takes; give at most {maximum}")


__all__ = ["NAME", "POLICY_VARIABLE", "load_bytes", "loader_class", "plugin", "register"]
