"""What can be set on the page, and what `select` is told for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sosampler._util.validation import one_of, whole_number
from sosampler.errors import InvalidArgument
from sosampler.inference.options import DEFAULT_NUM_FRAMES, USUAL_POLICY, SelectOptions
from sosampler.policies.base import Policy
from sosampler.policies.registry import describe_policies, get_policy
from sosampler.policies.score_rules import METHODS
from sosampler.video.candidates import MODES
from sosampler.video.limits import Limits

MOST_FRAMES = 64
MOST_CANDIDATES = 1024
"""Beyond these a page is no way to look at frames; the command line has no such bounds."""

BEST = "none"
"""The choice among diversities that takes the N best."""

_DIVERSITIES = {
    BEST: "the N highest scores, wherever they lie",
    "nms": "each chosen frame keeps its neighbours out",
    "aks": "splits the video where no stretch stands out",
    "its": "dense where scores are high, sparse elsewhere",
}
_MODES = {
    "": "as the policy likes: exact frames, or keyframes",
    "exact": "every frame can be a candidate",
    "keyframe": "keyframes alone: many times faster to decode",
    "snap": "a keyframe where one is near, else the exact frame",
}


@dataclass(frozen=True)
class Settings:
    """One position of the page's controls."""

    num_frames: int = DEFAULT_NUM_FRAMES
    num_candidates: int | None = None  # None: the policy's own number
    policy: str = "uniform"  # a name of `Offer.policies`
    candidates: str | None = None
    diversity: str = BEST

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Offer:
    """The policies that the page offers: those of the package, and trained samplers by their folders."""

    samplers: Mapping[str, str] = field(default_factory=dict)  # name on the page -> folder
    device: str | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def policies(self) -> list[str]:
        return [*self.samplers, *describe_policies()]

    @property
    def first(self) -> Settings:
        """What a fresh page shows: the first sampler, else what `select` takes; uniform is beside it anyway."""
        if self.samplers:
            return Settings(policy=next(iter(self.samplers)))
        return Settings(policy=USUAL_POLICY)

    def has_diversity(self, policy: str) -> bool:
        return policy in self.samplers or get_policy(policy).has_scores

    def to_dict(self) -> dict[str, Any]:
        """What the page needs to draw its controls."""
        says = {name: "the candidates that this trained sampler scores highest" for name in self.samplers}
        return {
            "policies": [
                {"name": name, "says": text, "diversity": self.has_diversity(name)}
                for name, text in (says | describe_policies()).items()
            ],
            "modes": [{"name": name, "says": _MODES[name]} for name in ("", *MODES)],
            "diversities": [{"name": name, "says": _DIVERSITIES.get(name, "")} for name in (BEST, *METHODS)],
            "most_frames": MOST_FRAMES,
            "most_candidates": MOST_CANDIDATES,
            "first": self.first.to_dict(),
        }

    def settings(self, given: Any) -> Settings:
        """Settings as the page sends them, checked; what is left out is as on a fresh page."""
        if not isinstance(given, dict):
            raise InvalidArgument("the settings are no JSON object; send what the page sends")
        known = self.first.to_dict()
        for name in given:
            one_of("a setting", name, known)
        settings = replace(self.first, **given)
        _bounded("num_frames", settings.num_frames, MOST_FRAMES)
        if settings.num_candidates is not None:
            _bounded("num_candidates", settings.num_candidates, MOST_CANDIDATES)
        one_of("policy", settings.policy, self.policies)
        one_of("diversity", settings.diversity, (BEST, *METHODS))
        if settings.diversity != BEST and not self.has_diversity(settings.policy):
            raise InvalidArgument(
                f"diversity {settings.diversity!r} chooses by scores, which the policy {settings.policy!r} does not "
                f"give; take {BEST!r}, or {' or '.join(name for name in self.policies if self.has_diversity(name))}"
            )
        return settings

    def options(self, settings: Settings) -> SelectOptions:
        """The same as arguments of `select`; these give the same frames from Python and the command line."""
        every = settings.policy == "all"  # takes its number from the candidates where they have one
        return SelectOptions(
            num_frames=None if every and settings.num_candidates is not None else settings.num_frames,
            num_candidates=settings.num_candidates,
            policy=self._rule(settings),
            candidates=settings.candidates or None,
            on_short="fewer",  # the same picture twice tells nothing
            limits=self.limits,
        )

    def _rule(self, settings: Settings) -> Policy:
        method = "" if settings.diversity == BEST else f"+{settings.diversity}"
        rule = get_policy(self.samplers.get(settings.policy, settings.policy) + method, device=self.device)
        return rule.renamed(settings.policy + method)  # a folder's place is nobody's business but the server's


def offer_of(samplers: Sequence[Path] = (), *, device: str | None = None, limits: Limits | None = None) -> Offer:
    """The offer with these samplers' folders, named after themselves. Loads each once, so that a wrong one is told."""
    named: dict[str, str] = {}
    for folder in samplers:
        name = unique_name(folder.name or str(folder), {*named, *describe_policies()})
        named[name] = str(folder)
        get_policy(str(folder), device=device)
    return Offer(named, device, limits or Limits())


def unique_name(name: str, taken: set[str]) -> str:
    """The name, with a number behind it where it is taken.

    >>> unique_name("clip.mp4", {"clip.mp4"}), unique_name("clip.mp4", set())
    ('clip (2).mp4', 'clip.mp4')
    """
    stem, suffix = Path(name).stem, Path(name).suffix
    number, free = 2, name
    while free in taken:
        number, free = number + 1, f"{stem} ({number}){suffix}"
    return free


def _bounded(name: str, value: Any, most: int) -> None:
    if whole_number(name, value) > most:
        raise InvalidArgument(f"{name}={value} is more than this page shows; give at most {most}, or use the shell")
