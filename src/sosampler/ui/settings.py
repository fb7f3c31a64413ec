"""The controls of the page, and the arguments of `select` that they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sosampler._util.validation import check_int, one_of
from sosampler.errors import InvalidArgument
from sosampler.inference.options import DEFAULT_NUM_FRAMES, DEFAULT_POLICY, SelectOptions
from sosampler.policies.base import Policy
from sosampler.policies.registry import describe_policies, get_policy
from sosampler.policies.score_rules import METHODS
from sosampler.video.candidates import MODES
from sosampler.video.limits import Limits

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
    "": "as the policy requires: exact frames, or keyframes",
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

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Controls:
    """The policies on the page: those of the package, and trained samplers by their folders."""

    samplers: Mapping[str, str] = field(default_factory=dict)  # name on the page -> folder
    device: str | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def policies(self) -> list[str]:
        return [*self.samplers, *describe_policies()]

    @property
    def first(self) -> Settings:
        """The settings of a fresh page: the first sampler, else the default policy; uniform is shown beside it."""
        if self.samplers:
            return Settings(policy=next(iter(self.samplers)))
        return Settings(policy=DEFAULT_POLICY)

    def has_diversity(self, policy: str) -> bool:
        """Return whether methods such as nms can choose from the policy's scores."""
        return policy in self.samplers or get_policy(policy).has_scores

    def to_dict(self) -> dict[str, Any]:
        """Return what the page needs to draw its controls."""
        descriptions = {name: "the candidates that this trained sampler scores highest" for name in self.samplers}
        return {
            "policies": [
                {"name": name, "says": text, "diversity": self.has_diversity(name)}
                for name, text in (descriptions | describe_policies()).items()
            ],
            "modes": [{"name": name, "says": _MODES[name]} for name in ("", *MODES)],
            "diversities": [{"name": name, "says": _DIVERSITIES.get(name, "")} for name in (BEST, *METHODS)],
            "most_frames": MAX_FRAMES,
            "most_candidates": MAX_CANDIDATES,
            "first": self.first.to_dict(),
        }

    def settings(self, given: Any) -> Settings:
        """Check settings that the page sent; missing ones are those of a fresh page."""
        if not isinstance(given, dict):
            raise InvalidArgument("the settings must be a JSON object, as the page sends it")
        known = self.first.to_dict()
        for name in given:
            one_of("a setting", name, known)
        settings = replace(self.first, **given)
        _bounded("num_frames", settings.num_frames, MAX_FRAMES)
        if settings.num_candidates is not None:
            _bounded("num_candidates", settings.num_candidates, MAX_CANDIDATES)
        one_of("policy", settings.policy, self.policies)
        one_of("diversity", settings.diversity, (BEST, *METHODS))
        if settings.diversity != BEST and not self.has_diversity(settings.policy):
            raise InvalidArgument(
                f"diversity {settings.diversity!r} chooses by scores, which the policy {settings.policy!r} does not "
                f"give; take {BEST!r}, or {' or '.join(name for name in self.policies if self.has_diversity(name))}"
            )
        return settings

    def options(self, settings: Settings) -> SelectOptions:
        """Return the arguments of `select` that give the same frames from Python and the command line."""
        every = settings.policy == "all"  # takes its number from the candidates where they have one
        return SelectOptions(
            num_frames=None if every and settings.num_candidates is not None else settings.num_frames,
            num_candidates=settings.num_candidates,
            policy=self._policy(settings),
            candidates=settings.candidates or None,
            on_short="fewer",  # showing a frame twice adds nothing
            limits=self.limits,
        )

    def _policy(self, settings: Settings) -> Policy:
        method = "" if settings.diversity == BEST else f"+{settings.diversity}"
        policy = get_policy(self.samplers.get(settings.policy, settings.policy) + method, device=self.device)
        return policy.renamed(settings.policy + method)  # the page does not show paths of the server


def make_controls(
    samplers: Sequence[Path] = (), *, device: str | None = None, limits: Limits | None = None
) -> Controls:
    """Return controls with these samplers, named after their folders. Each is loaded once, so that errors show now."""
    named: dict[str, str] = {}
    for folder in samplers:
        name = unique_name(folder.name or str(folder), {*named, *describe_policies()})
        named[name] = str(folder)
        get_policy(str(folder), device=device)
    return Controls(named, device, limits or Limits())


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


def _bounded(name: str, value: Any, maximum: int) -> None:
    if check_int(name, value) > maximum:
        raise InvalidArgument(f"{name}={value} is more than this page shows; give at most {maximum}, or use the shell")
