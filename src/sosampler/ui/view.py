"""The controls of the page, and what it shows of a video. No HTTP in here."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sosampler._util.arrays import jpeg
from sosampler._util.validation import check_int, one_of
from sosampler.errors import InvalidArgument
from sosampler.inference.options import DEFAULT_NUM_FRAMES, DEFAULT_POLICY, SelectOptions
from sosampler.inference.select import select_with
from sosampler.inference.selection import Selection
from sosampler.policies.registry import describe_policies, get_policy
from sosampler.policies.score_rules import METHODS
from sosampler.video.candidates import MODES
from sosampler.video.limits import Limits
from sosampler.video.reader import VideoMetadata
from sosampler.video.source import open_video

# More are hard to see on a page; the command line has no such bounds.
MAX_FRAMES = 64
MAX_CANDIDATES = 1024
BEST = "none"  # diversity: take the N highest scores

_DIVERSITIES = {
    BEST: "the N highest scores, wherever they lie",
    "nms": "each chosen frame keeps its neighbours out",
    "aks": "splits the video where no segment stands out",
    "its": "dense where scores are high, sparse elsewhere",
}
_MODES = {
    "": "as suits the policy: auto, exact frames, or keyframes",
    "auto": "keyframes where they spread over the video, else exact frames",
    "exact": "every frame can be a candidate",
    "keyframe": "keyframes alone: many times faster to decode",
    "snap": "a keyframe where one is near, else the exact frame",
}


@dataclass(frozen=True)
class Settings:
    """The values of the page's controls."""

    num_frames: int = DEFAULT_NUM_FRAMES
    num_candidates: int | None = None  # None: the policy's default
    policy: str = "uniform"  # a name of `Controls.policies`
    candidates: str | None = None
    diversity: str = BEST
    query: str = ""  # in place of the policy


@dataclass(frozen=True)
class Controls:
    """The policies on the page: those of the package, and trained samplers by their folders."""

    samplers: Mapping[str, str] = field(default_factory=dict)  # name on the page -> folder
    device: str | None = None
    limits: Limits = field(default_factory=Limits)
    query_model: Any = None  # an image-text model, where the page takes queries

    @property
    def policies(self) -> list[str]:
        return [*self.samplers, *describe_policies()]

    @property
    def first(self) -> Settings:
        """The settings of a fresh page: the first sampler, else the default policy; uniform is shown beside it."""
        return Settings(policy=next(iter(self.samplers), DEFAULT_POLICY))

    def has_diversity(self, policy: str) -> bool:
        """Return whether methods such as nms can choose from the policy's scores."""
        return policy in self.samplers or get_policy(policy).has_scores

    def to_dict(self) -> dict[str, Any]:
        """Return what the page needs to draw its controls."""
        descriptions = {name: "the candidates that this trained sampler scores highest" for name in self.samplers}
        return {
            "policies": [
                {"name": name, "description": text, "diversity": self.has_diversity(name)}
                for name, text in (descriptions | describe_policies()).items()
            ],
            "modes": [{"name": name, "description": _MODES[name]} for name in ("", *MODES)],
            "diversities": [{"name": name, "description": _DIVERSITIES.get(name, "")} for name in (BEST, *METHODS)],
            "queries": self.query_model is not None,
            "max_frames": MAX_FRAMES,
            "max_candidates": MAX_CANDIDATES,
            "first": asdict(self.first),
        }

    def settings(self, given: Any) -> Settings:
        """Check settings that the page sent; missing ones are those of a fresh page."""
        if not isinstance(given, dict):
            raise InvalidArgument("the settings must be a JSON object, as the page sends it")
        for name in given:
            one_of("a setting", name, asdict(self.first))
        settings = replace(self.first, **given)
        for name, maximum in (("num_frames", MAX_FRAMES), ("num_candidates", MAX_CANDIDATES)):
            value = getattr(settings, name)
            if (name == "num_frames" or value is not None) and check_int(name, value) > maximum:
                raise InvalidArgument(
                    f"{name}={value} is more than this page shows; give at most {maximum}, or use the shell"
                )
        settings = replace(settings, candidates=one_of("candidates", settings.candidates or "", ("", *MODES)) or None)
        one_of("policy", settings.policy, self.policies)
        one_of("diversity", settings.diversity, (BEST, *METHODS))
        if not isinstance(settings.query, str) or (settings.query and self.query_model is None):
            raise InvalidArgument(
                f"query={settings.query!r} must be a text, on a page that was started with --query-model; leave it out"
            )
        if settings.diversity != BEST and not settings.query and not self.has_diversity(settings.policy):
            raise InvalidArgument(
                f"diversity {settings.diversity!r} chooses by scores, which the policy {settings.policy!r} does not "
                f"give; take {BEST!r}, or {' or '.join(name for name in self.policies if self.has_diversity(name))}"
            )
        return settings

    def options(self, settings: Settings) -> SelectOptions:
        """Return the arguments of `select` that give the same frames from Python and the command line."""
        every = settings.policy == "all"  # takes its number from the candidates where they have one
        method = "" if settings.diversity == BEST else f"+{settings.diversity}"
        shared: dict[str, Any] = {
            "num_candidates": settings.num_candidates,
            "candidates": settings.candidates or None,
            "on_short": "fewer",  # showing a frame twice adds nothing
            "limits": self.limits,
        }
        if settings.query:
            query = {"query": settings.query, "query_model": self.query_model, "policy": f"query{method}"}
            return SelectOptions(num_frames=settings.num_frames, **query, **shared)
        policy = get_policy(self.samplers.get(settings.policy, settings.policy) + method, device=self.device)
        return SelectOptions(
            num_frames=None if every and settings.num_candidates is not None else settings.num_frames,
            policy=policy.renamed(settings.policy + method),  # the page does not show paths of the server
            **shared,
        )


def make_controls(
    samplers: Sequence[Path] = (),
    *,
    device: str | None = None,
    limits: Limits | None = None,
    query_model: str | None = None,
) -> Controls:
    """Return controls with these samplers, named after their folders. Each is loaded once, so that errors show now."""
    model = None
    if query_model is not None:
        from sosampler.policies.image_text import load_image_text

        model = load_image_text(query_model, device=device)
        model.name = Path(query_model).name  # the page does not show paths of the server
    named: dict[str, str] = {}
    for folder in samplers:
        name = unique_name(folder.name or str(folder), {*named, *describe_policies()})
        named[name] = str(folder)
        get_policy(str(folder), device=device)
    return Controls(named, device, limits or Limits(), model)


def unique_name(name: str, taken: set[str]) -> str:
    """Return the name, with a number behind it where it is taken.

    >>> unique_name("clip.mp4", {"clip.mp4"}), unique_name("clip.mp4", set())
    ('clip (2).mp4', 'clip.mp4')
    """
    stem, suffix = Path(name).stem, Path(name).suffix
    number, free = 2, name
    while free in taken:
        number, free = number + 1, f"{stem} ({number}){suffix}"
    return free


# ---- what the page shows of a video

_THUMBNAIL = (320, 240)  # pixels at most: width, height
_QUALITY = 82
_CACHED_STRIPS = 64  # of uniform's frames; they change with N alone


@dataclass(frozen=True)
class Picture:
    """One frame on the page."""

    frame: int  # number in presentation order
    seconds: float
    clock: str
    score: float | None
    url: str  # a small JPEG, as a data: address


@dataclass(frozen=True)
class Strip:
    """The frames that one policy takes, in time order."""

    policy: str
    pictures: tuple[Picture, ...]


def view_video(video: Path, options: SelectOptions) -> tuple[dict[str, Any], Selection]:
    """Choose frames of a video by the options, and uniform's frames for comparison.

    Returns all that the page shows, ready for JSON, and the selection without pixels, so that many can be stored.
    """
    selection = select_with(video, options, shown_size=_THUMBNAIL[1])
    assert options.resolved_frames is not None, "the page has no fps"
    chosen, uniform = strip_of(selection), uniform_strip(video, options.resolved_frames, options.limits)
    meta, candidates = selection.metadata, selection.candidates
    view = {
        "facts": facts_of(meta),
        "begin": meta.start_seconds,  # where the timeline begins
        "end": meta.start_seconds + meta.duration,
        "candidate_seconds": candidates.pts_seconds.tolist(),  # [T]
        "candidate_scores": None if candidates.scores is None else _plain(candidates.scores),  # [T]
        "mode": candidates.mode,
        "chosen": asdict(chosen),
        "uniform": asdict(uniform),
        "shared": len({one.frame for one in chosen.pictures} & {one.frame for one in uniform.pictures}),
        "notes": selection.notes,
        "took": selection.timing["total"],  # seconds, for the chosen frames
    }
    return view, replace(selection, frames=None)


def uniform_strip(video: Path, num_frames: int, limits: Limits | None = None) -> Strip:
    """Return the frames of uniform sampling; cached, as they stay the same while policies are tried."""
    stat = os.stat(video)
    return _uniform(video, (stat.st_mtime_ns, stat.st_size), num_frames, limits or Limits())


@lru_cache(maxsize=_CACHED_STRIPS)
def _uniform(video: Path, stamp: tuple[int, int], num_frames: int, limits: Limits) -> Strip:
    options = SelectOptions(num_frames=num_frames, policy="uniform", on_short="fewer", limits=limits)
    return strip_of(select_with(video, options, shown_size=_THUMBNAIL[1]))


def strip_of(selection: Selection) -> Strip:
    """Return the thumbnails of a selection that holds its frames."""
    assert selection.frames is not None, "selected with decode=True"
    scores: Sequence[float | None] = (None,) * len(selection) if selection.scores is None else _plain(selection.scores)
    pictures = [
        Picture(int(index), float(seconds), clock(float(seconds)), score, _data_url(frame))
        for index, seconds, score, frame in zip(
            selection.frame_indices, selection.pts_seconds, scores, selection.frames, strict=True
        )
    ]
    return Strip(selection.policy, tuple(pictures))


def facts_of(meta: VideoMetadata) -> tuple[str, ...]:
    """Return the video in a few words."""
    frames = f"{meta.total_num_frames:,} frames" if meta.total_num_frames != 1 else "1 frame"
    size = f"{meta.width} \N{MULTIPLICATION SIGN} {meta.height}"
    return size, f"{meta.fps:.4g} fps", clock(meta.duration), frames, meta.codec


def read_facts(video: Path, limits: Limits | None = None) -> tuple[str, ...]:
    """Return the same for a file; raise for one that is not a video."""
    with closing(open_video(video, limits=limits)) as reader:
        return facts_of(reader.metadata)


def full_image(video: Path, frame: int, limits: Limits | None = None) -> bytes:
    """Return one frame in its full size, as a JPEG."""
    with closing(open_video(video, limits=limits)) as reader:
        number = min(max(frame, 0), reader.total_num_frames - 1)
        frames = reader.read(np.array([number], dtype=np.int64)).frames
    return jpeg(Image.fromarray(frames[0]), 92)


def clock(seconds: float) -> str:
    """
    >>> clock(3.25), clock(75.04), clock(3725.5), clock(59.96), clock(-0.5)
    ('0:03.2', '1:15.0', '1:02:05.5', '1:00.0', '-0:00.5')
    """
    tenths = round(abs(seconds) * 10)
    minutes, rest = divmod(tenths, 600)
    hours, minutes = divmod(minutes, 60)
    sign = "-" if seconds < 0 and tenths else ""
    head = f"{hours}:{minutes:02d}" if hours else str(minutes)
    return f"{sign}{head}:{rest // 10:02d}.{rest % 10}"


def _data_url(frame: np.ndarray) -> str:
    image = Image.fromarray(frame)
    image.thumbnail(_THUMBNAIL, Image.Resampling.BICUBIC)
    return "data:image/jpeg;base64," + base64.b64encode(jpeg(image, _QUALITY)).decode()


def _plain(scores: np.ndarray) -> tuple[float | None, ...]:
    """Return scores for JSON, which has no NaN and no infinity."""
    return tuple(float(score) if np.isfinite(score) else None for score in scores)
