"""Who is chosen: N of T candidates. Adding a policy is adding an entry to the table below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np

from sosampler.checks import one_of
from sosampler.policies import rules
from sosampler.policies.difference import change_scores
from sosampler.video.reader import Frames
from sosampler.video.timeline import Indices

# Candidates that a policy is offered where the user names no number: enough to choose from, at least four a frame.
_POOL = 32


def _pool(num_frames: int) -> int:
    return max(_POOL, 4 * num_frames)


@dataclass(frozen=True)
class Choice:
    """Positions among the candidates, in time order, and a score for every candidate where the policy has one."""

    positions: Indices  # [N]
    scores: np.ndarray | None = None  # [T]


@dataclass(frozen=True)
class Policy:
    """A rule that chooses. `choose(num_candidates, num_frames, frames, seed)`; frames only if `needs_frames`."""

    name: str
    says: str
    choose: Callable[[int, int, Frames | None, int], Choice]
    default_candidates: Callable[[int], int]
    needs_frames: bool = False
    candidate_mode: str | None = None  # the only candidate mode that makes sense for it


def _frame_difference(num_candidates: int, num_frames: int, frames: Frames | None, seed: int) -> Choice:
    assert frames is not None, "select decodes the candidates for policies that need them"
    scores = change_scores(frames)
    return Choice(rules.top(scores, num_frames), scores)


_POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(
            "uniform",
            "the middle of each of N equal stretches",
            lambda t, n, frames, seed: Choice(rules.uniform(t, n)),
            default_candidates=lambda n: n,
        ),
        Policy(
            "random",
            "N candidates drawn by seed",
            lambda t, n, frames, seed: Choice(rules.random(t, n, seed)),
            default_candidates=_pool,
        ),
        Policy(
            "all",
            "every candidate",
            lambda t, n, frames, seed: Choice(np.arange(t, dtype=np.int64)),
            default_candidates=lambda n: n,
        ),
        Policy(
            "centre",
            "the N candidates next to the middle",
            lambda t, n, frames, seed: Choice(rules.centre(t, n)),
            default_candidates=_pool,
        ),
        Policy(
            "keyframe",
            "N of the encoder's own keyframes, evenly spread; the cheapest to decode",
            lambda t, n, frames, seed: Choice(rules.uniform(t, n)),
            default_candidates=lambda n: n,
            candidate_mode="keyframe",
        ),
        Policy(
            "frame-difference",
            "the N candidates at which the picture changes most",
            _frame_difference,
            default_candidates=_pool,
            needs_frames=True,
        ),
        Policy(
            "frameexit",
            "the first N of FrameExit's coarse-to-fine order",
            lambda t, n, frames, seed: Choice(rules.frameexit(t, n)),
            default_candidates=lambda n: max(10, n),
        ),
    )
}


def get_policy(name: str) -> Policy:
    return _POLICIES[one_of("policy", name, _POLICIES)]


def list_policies(pattern: str = "*") -> list[str]:
    """Names of the policies that match a pattern such as "frame*"."""
    return [name for name in _POLICIES if fnmatch(name, pattern)]


def describe_policies() -> dict[str, str]:
    return {policy.name: policy.says for policy in _POLICIES.values()}


__all__ = ["Choice", "Policy", "describe_policies", "get_policy", "list_policies"]
