"""The arguments of `select`: one table of defaults and checks for Python and the command line.

Light at import, so that --help is fast.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sosampler._util.limits import check_below, check_count
from sosampler._util.validation import check_float, check_int, one_of
from sosampler.errors import InvalidArgument
from sosampler.policies.auto import AUTO, Auto

if TYPE_CHECKING:
    from sosampler.policies.base import Policy
    from sosampler.video.limits import Limits, Size

DEFAULT_NUM_FRAMES = 8
# benchmarks/results/general_sampler.json gives the reasons. Uniform where no pixels are decoded, or no choice is left.
DEFAULT_POLICY, FALLBACK_POLICY = "general", "uniform"
DEFAULT_QUERY_POLICY = "query+mmr"
PREFERRED_POLICIES = {"text": "general-text"}  # the default policy by what is preferred
# Of `watch`: frames of a window, its seconds, seconds without a byte, and attempts to open a lost stream again.
WATCH_NUM_FRAMES, WATCH_WINDOW, WATCH_IDLE, WATCH_RECONNECTS = 4, 10.0, 10.0, 5


@dataclass(frozen=True, kw_only=True)
class SelectOptions:
    """The arguments of `select` but for the source; `select` documents each. Invalid values are refused here."""

    num_frames: int | str | Auto | None = None  # or "auto"
    num_candidates: int | None = None
    min_candidates: int | None = None  # so few where the video is short; None: T
    prefer: str | None = None  # what the default policy prefers; None: clear images
    policy: Any = None  # a name, a sampler, the folder of a saved one, or a Policy; None becomes the default here
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
    query: str | None = None
    query_model: Any = None  # a folder, a hub name, or an image-text model
    schemes: tuple[str, ...] = ()  # of addresses that may be opened

    def __post_init__(self) -> None:
        from sosampler.video.candidates import GRIDS, MODES, ON_SHORT
        from sosampler.video.limits import check_size
        from sosampler.video.remote import check_schemes
        from sosampler.video.source import DECODERS

        for name in ("num_frames", "num_candidates", "threads"):
            if getattr(self, name) is not None and (name != "num_frames" or self.auto is None):
                check_count(name, getattr(self, name), "MAX_THREADS" if name == "threads" else "MAX_CANDIDATES")
        for name in ("fps", "folder_fps"):
            if getattr(self, name) is not None:
                check_below(name, check_float(name, getattr(self, name), above=0), "MAX_FPS")
        for name in ("start", "end"):
            if getattr(self, name) is not None:
                check_float(name, getattr(self, name))
        check_float("snap_tolerance", self.snap_tolerance, at_least=0)
        check_int("seed", self.seed, at_least=0)
        one_of("grid", self.grid, GRIDS)
        one_of("on_short", self.on_short, ON_SHORT)
        if self.candidates is not None:
            one_of("candidates", self.candidates, MODES)
        if self.decoder is not None:
            one_of("decoder", self.decoder, DECODERS)
        check_size(self.size)
        object.__setattr__(self, "schemes", check_schemes(self.schemes))
        if self.prefer is not None:
            self._set_preferred()
        if self.query is None:
            self._check_no_query()
        elif self.policy is None:
            object.__setattr__(self, "policy", DEFAULT_QUERY_POLICY)
        if self.policy is None:
            takes_all = self.num_frames is None and self.fps is not None
            takes_all = takes_all or (self.num_frames or DEFAULT_NUM_FRAMES) == self.num_candidates
            object.__setattr__(self, "policy", FALLBACK_POLICY if takes_all or not self.decode else DEFAULT_POLICY)
        self._check_together()

    def _set_preferred(self) -> None:
        policy = PREFERRED_POLICIES[one_of("prefer", self.prefer, PREFERRED_POLICIES)]
        if self.query is not None or self.policy not in (None, DEFAULT_POLICY, policy) or not self.decode:
            raise InvalidArgument(
                f"prefer={self.prefer!r} is for the policy {DEFAULT_POLICY!r}, which decodes and chooses without a "
                "query; leave out prefer, or policy, query and decode=False"
            )
        object.__setattr__(self, "policy", policy)

    def _check_no_query(self) -> None:
        if self.query_model is not None:
            raise InvalidArgument(
                f"query_model={self.query_model!r} was given without a query; give query, or leave it out"
            )
        if isinstance(self.policy, str) and self.policy.partition("+")[0] == "query":
            raise InvalidArgument(f"policy={self.policy!r} chooses for a text; give query too, or take another policy")

    def _check_together(self) -> None:
        """Refuse arguments that contradict each other."""
        policy = self.resolved_policy
        if self.auto is not None and (refusal := policy.auto_refusal()):
            raise InvalidArgument(refusal)
        if self.auto is not None and self.auto.sure is not None:
            raise InvalidArgument(
                f"sure={self.auto.sure:g} of Auto is for a classifier that is asked frame by frame; use it in Pipeline "
                "or evaluate with answer='fused' or 'probed', or leave it out"
            )
        if self.fps is not None and self.num_candidates is not None:
            raise InvalidArgument(
                f"num_candidates={self.num_candidates} and fps={self.fps:g} were both given; give one of them"
            )
        frames, candidates = self.resolved_frames, self.resolved_candidates
        if self.auto is not None and candidates is not None and self.auto.min > candidates:
            raise InvalidArgument(
                f"auto_min={self.auto.min} is more than num_candidates={candidates}; lower it, or raise num_candidates"
            )
        if frames is not None and candidates is not None and frames > candidates:
            raise InvalidArgument(
                f"num_frames={frames} is more than num_candidates={candidates}; "
                "choose at most as many frames as there are candidates, or raise num_candidates"
            )
        if policy.name == "all" and frames != candidates:
            raise InvalidArgument(
                f"policy 'all' takes every candidate, so num_frames={frames} and num_candidates={candidates} "
                "contradict each other; give one of them, or another policy"
            )
        if self.start is not None and self.end is not None and self.end <= self.start:
            raise InvalidArgument(f"end={self.end:g} is not after start={self.start:g}; give an end that is later")
        if policy.candidate_mode and self.candidates not in (None, policy.candidate_mode):
            raise InvalidArgument(
                f"policy {policy.name!r} chooses among {policy.candidate_mode} candidates, not "
                f"candidates={self.candidates!r}; leave candidates out, or take another policy"
            )

    @cached_property
    def resolved_policy(self) -> Policy:
        """The policy object, loaded once, so that the same weights choose from all videos."""
        if self.query is not None:
            from sosampler.policies.query import query_policy

            return query_policy(self.query, self.query_model, self.policy)
        from sosampler.policies.registry import get_policy

        return get_policy(self.policy)

    @cached_property
    def auto(self) -> Auto | None:
        """The bounds of num_frames="auto"; None where a number is given."""
        return auto_of(self.num_frames, self.auto_min, self.auto_max, self.auto_tolerance)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the policy object: it may hold a network, and another process resolves it again."""
        return {name: value for name, value in self.__dict__.items() if name not in ("resolved_policy", "auto")}

    @property
    def opening(self) -> dict[str, Any]:
        """How `open_video` opens a video."""
        return {name: getattr(self, name) for name in ("decoder", "threads", "limits", "folder_fps", "schemes")}

    @property
    def mode(self) -> str:
        """The candidate mode: exact, keyframe, snap or auto."""
        return self.candidates or self.resolved_policy.candidate_mode or self.resolved_policy.default_mode

    @property
    def resolved_candidates(self) -> int | None:
        """T; None where `fps` and the length of the video decide."""
        if self.fps is not None or self.num_candidates is not None:
            return self.num_candidates
        if self.auto is not None:
            return max(self.resolved_policy.default_candidates(DEFAULT_NUM_FRAMES), self.auto.max)
        assert self.num_frames is None or isinstance(self.num_frames, int), "auto is handled above"
        return self.resolved_policy.default_candidates(self.num_frames or DEFAULT_NUM_FRAMES)

    @property
    def resolved_frames(self) -> int | None:
        """N, for "auto" its maximum; None for all candidates that `fps` gives."""
        if self.auto is not None:
            candidates = self.resolved_candidates
            return self.auto.max if candidates is None else min(self.auto.max, candidates)
        assert self.num_frames is None or isinstance(self.num_frames, int), "auto is handled above"
        if self.num_frames is not None or self.fps is not None:
            return self.num_frames
        return self.resolved_candidates if self.resolved_policy.name == "all" else DEFAULT_NUM_FRAMES

    def with_all_candidates(self) -> SelectOptions:
        """Return options that list the same candidates and take all of them, without this policy."""
        names = ("num_frames", "auto_min", "auto_max", "auto_tolerance", "prefer", "query", "query_model")
        changes: dict[str, Any] = dict.fromkeys(names)
        changes |= {"policy": "all", "num_candidates": self.resolved_candidates, "candidates": self.mode}
        if self.num_candidates is None:  # T is the policy's default: short videos list what they have
            changes["min_candidates"] = self.resolved_frames
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.auto is not None:
            bounds = {f"auto_{name}": value for name, value in asdict(self.auto).items() if name != "sure"}
            values |= {"num_frames": AUTO, **bounds}
        limits = None if self.limits is None else asdict(self.limits)
        del values["schemes"]  # they decide what is opened, not what a row holds
        model = values.pop("query_model")
        del values["prefer"]  # the policy says it
        if self.query is None:
            del values["query"]  # rows of earlier versions, which had no queries, resume
        elif model is not None:
            values["query_model"] = str(getattr(model, "name", model))
        return {**values, "policy": self.resolved_policy.name, "limits": limits}

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for the rows of two runs to belong together: also the weights of a sampler."""
        # Limits decide which videos fail, not what the rows of the others hold, and failures are tried again.
        values = {**self.to_dict(), "threads": None, "limits": None}
        fingerprint = self.resolved_policy.fingerprint()
        return values if fingerprint is None else {**values, "policy_identity": fingerprint}


def auto_of(
    num_frames: Any,
    auto_min: int | None,
    auto_max: int | None,
    auto_tolerance: float | None,
    auto_sure: float | None = None,
) -> Auto | None:
    """Return the `Auto` that is meant by `num_frames` and the auto_* arguments; None for a number of frames.

    >>> auto_of("auto", None, 8, None)
    Auto(min=1, max=8, tolerance=0.005, sure=None)
    """
    given = {"min": auto_min, "max": auto_max, "tolerance": auto_tolerance, "sure": auto_sure}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(num_frames, str) and num_frames == AUTO:
        return Auto(**given)  # type: ignore[arg-type]
    if given:
        named = ", ".join(f"auto_{name}={value!r}" for name, value in given.items())
        raise InvalidArgument(f"{named} is for num_frames={AUTO!r}, not for num_frames={num_frames!r}; leave one out")
    return num_frames if isinstance(num_frames, Auto) else None
