"""What `select` can be told: one table of defaults and checks for Python and the command line.

Light at import, so that --help is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sosampler._util.validation import one_of, real_number, whole_number
from sosampler.errors import InvalidArgument
from sosampler.policies.auto import AUTO, Auto, auto_of

if TYPE_CHECKING:
    from sosampler.policies.base import Policy
    from sosampler.video.limits import Limits, Size


# Frames chosen where nothing says how many.
DEFAULT_NUM_FRAMES = 8
# Who chooses where nothing says who: benchmarks/general_sampler.json says why. Uniform where pictures decide nothing.
USUAL_POLICY, BLIND_POLICY = "general", "uniform"


@dataclass(frozen=True, kw_only=True)
class SelectOptions:
    """The arguments of `select` but for the source; `select` documents each. Wrong ones are refused here."""

    num_frames: int | str | Auto | None = None  # or "auto"
    num_candidates: int | None = None
    policy: Any = None  # a name, a sampler, the folder of a saved one, or a Policy; settled here where it is None
    candidates: str | None = None
    grid: str = "uniform"
    fps: float | None = None
    start: float | None = None
    end: float | None = None
    on_short: str = "repeat"
    snap_tolerance: float = 0.5
    seed: int = 0
    size: Size = None
    decode: bool = True
    decoder: str | None = None
    threads: int | None = None
    limits: Limits | None = None
    folder_fps: float | None = None
    auto_min: int | None = None
    auto_max: int | None = None
    auto_tolerance: float | None = None

    def __post_init__(self) -> None:
        from sosampler.video.candidates import GRIDS, MODES, ON_SHORT
        from sosampler.video.limits import check_size
        from sosampler.video.source import DECODERS

        if isinstance(self.num_frames, Auto):
            auto = auto_of(self.num_frames, self.auto_min, self.auto_max, self.auto_tolerance)
            assert auto is not None, "it is one"
            settled = {"num_frames": AUTO, "auto_min": auto.min, "auto_max": auto.max, "auto_tolerance": auto.tolerance}
            for name, value in settled.items():
                object.__setattr__(self, name, value)
        for name in ("num_frames", "num_candidates", "threads"):
            if getattr(self, name) is not None and (name, getattr(self, name)) != ("num_frames", AUTO):
                whole_number(name, getattr(self, name))
        for name in ("fps", "folder_fps"):
            if getattr(self, name) is not None:
                real_number(name, getattr(self, name), above=0)
        for name in ("start", "end"):
            if getattr(self, name) is not None:
                real_number(name, getattr(self, name))
        real_number("snap_tolerance", self.snap_tolerance, at_least=0)
        whole_number("seed", self.seed, at_least=0)
        one_of("grid", self.grid, GRIDS)
        one_of("on_short", self.on_short, ON_SHORT)
        if self.candidates is not None:
            one_of("candidates", self.candidates, MODES)
        if self.decoder is not None:
            one_of("decoder", self.decoder, DECODERS)
        check_size(self.size)
        if self.policy is None:
            object.__setattr__(self, "policy", BLIND_POLICY if self._takes_all_or_looks_at_none else USUAL_POLICY)
        self._check_together()

    @property
    def _takes_all_or_looks_at_none(self) -> bool:
        """Whether there is nothing for a network to do: no frame is decoded, or every candidate is taken."""
        every = self.num_frames is None and self.fps is not None
        return not self.decode or every or (self.num_frames or DEFAULT_NUM_FRAMES) == self.num_candidates

    def _check_together(self) -> None:
        """What each argument allows but several do not."""
        rule = self.rule
        if self.fps is not None and self.num_candidates is not None:
            raise InvalidArgument(
                f"num_candidates={self.num_candidates} and fps={self.fps:g} were both given; give one of them"
            )
        wanted, offered = self.num_wanted, self.num_offered
        if self.auto is not None and offered is not None and self.auto.min > offered:
            raise InvalidArgument(
                f"auto_min={self.auto.min} is more than num_candidates={offered}; lower it, or raise num_candidates"
            )
        if wanted is not None and offered is not None and wanted > offered:
            raise InvalidArgument(
                f"num_frames={wanted} is more than num_candidates={offered}; "
                "choose at most as many frames as there are candidates, or raise num_candidates"
            )
        if rule.name == "all" and wanted != offered:
            raise InvalidArgument(
                f"policy 'all' takes every candidate, so num_frames={wanted} and num_candidates={offered} "
                "contradict each other; give one of them, or another policy"
            )
        if self.start is not None and self.end is not None and self.end <= self.start:
            raise InvalidArgument(f"end={self.end:g} is not after start={self.start:g}; give an end that is later")
        if rule.candidate_mode and self.candidates not in (None, rule.candidate_mode):
            raise InvalidArgument(
                f"policy {rule.name!r} chooses among {rule.candidate_mode} candidates, not "
                f"candidates={self.candidates!r}; leave candidates out, or take another policy"
            )

    @cached_property
    def rule(self) -> Policy:
        """Found once, so that all videos are chosen from by the same weights."""
        from sosampler.policies.registry import get_policy

        found = get_policy(self.policy)
        refusal = None if self.auto is None else found.auto_refusal()
        if refusal is not None:
            raise InvalidArgument(refusal)
        return found

    @cached_property
    def auto(self) -> Auto | None:
        """How to decide on the number of frames, where that is left to the policy."""
        return auto_of(self.num_frames, self.auto_min, self.auto_max, self.auto_tolerance)

    def __getstate__(self) -> dict[str, Any]:
        """Without the rule, which cannot travel to other processes and is found there again."""
        return {name: value for name, value in self.__dict__.items() if name not in ("rule", "auto")}

    @property
    def mode(self) -> str:
        return self.candidates or self.rule.candidate_mode or "exact"

    @property
    def num_offered(self) -> int | None:
        """T; None where the rate and the video decide."""
        if self.fps is not None or self.num_candidates is not None:
            return self.num_candidates
        if self.auto is not None:
            return max(self.rule.default_candidates(DEFAULT_NUM_FRAMES), self.auto.max)
        assert not isinstance(self.num_frames, (str, Auto)), "no other word is let pass"
        return self.rule.default_candidates(self.num_frames or DEFAULT_NUM_FRAMES)

    @property
    def num_wanted(self) -> int | None:
        """N, or the most that N may be; None for all candidates that a rate gives."""
        if self.auto is not None:
            return self.auto.max if self.num_offered is None else min(self.auto.max, self.num_offered)
        assert not isinstance(self.num_frames, (str, Auto)), "no other word is let pass"
        if self.num_frames is not None or self.fps is not None:
            return self.num_frames
        return self.num_offered if self.rule.name == "all" else DEFAULT_NUM_FRAMES

    def offering_all(self) -> SelectOptions:
        """The same candidates, and every one of them taken, for whoever chooses later."""
        undecided: dict[str, Any] = dict.fromkeys(("num_frames", "auto_min", "auto_max", "auto_tolerance"))
        return replace(self, policy="all", num_candidates=self.num_offered, candidates=self.mode, **undecided)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        from dataclasses import asdict

        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**told, "policy": self.rule.name, "limits": None if self.limits is None else asdict(self.limits)}

    def identity(self) -> dict[str, Any]:
        """What must be equal for the rows of two runs to belong together: also the weights of a trained sampler."""
        told, who = {**self.to_dict(), "threads": None}, self.rule.fingerprint()
        return told if who is None else {**told, "policy_identity": who}
