"""Who is chosen: N of T candidates. Adding a policy is adding an entry to the table below.

A learned sampler is a policy too; torch or onnxruntime is imported only when one is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sosampler.errors import InvalidArgument
from sosampler.policies import positional as rules
from sosampler.policies.auto import AUTO, AutoFrames
from sosampler.policies.score_rules import METHODS, difference_peaks, split_method
from sosampler.policies.visual import change_scores, dpp_diverse, farthest_first, pixel_features
from sosampler.video.reader import Frames
from sosampler.video.timeline import Indices

# Candidates that a policy is offered where the user names no number: enough to choose from, at least four a frame.
_POOL = 32

# Short side of the frames that the network of the general sampler looks at.
GENERAL_SIZE = 128


def pool_size(num_frames: int) -> int:
    """T where the user names none, for policies that choose freely among their candidates."""
    return max(_POOL, 4 * num_frames)


@dataclass(frozen=True)
class Choice:
    """Positions among the candidates, in time order, and a score for every candidate where the policy has one."""

    positions: Indices  # [N]
    scores: np.ndarray | None = None  # [T]
    expected: np.ndarray | None = None  # [T], of the k best at k - 1, where their number was left to the policy


@dataclass(frozen=True)
class Policy:
    """A rule that chooses. `choose(num_candidates, num_frames, frames, seed)`; frames only if `needs_frames`."""

    name: str
    says: str
    choose: Callable[[int, int, Frames | None, int], Choice]
    default_candidates: Callable[[int], int]
    needs_frames: bool = False
    candidate_mode: str | None = None  # the only candidate mode that makes sense for it
    # Short side of the frames that it must see at least, in their own proportions, where the video has that; None for
    # a policy that is content with whatever size was asked for.
    least_size: int | None = None
    # What tells a learned policy from another of the same name: changes with its weights.
    identity: Callable[[], str] | None = None
    # Chooses how many, too; None for a policy that does not know what a frame is worth.
    choose_auto: Callable[[Frames, AutoFrames], Choice] | None = None
    no_auto: str | None = None  # why not, where a sampler is at fault

    def by_itself(self, auto: AutoFrames) -> Policy:
        """The same policy, but N is only the most that it may take."""
        choose_auto = self.choose_auto
        if choose_auto is None:
            raise InvalidArgument(
                self.no_auto
                or f"num_frames={AUTO!r} is for trained samplers, which know what a frame is worth, and not for "
                f"the policy {self.name!r}; give a number, or the folder of a sampler without a method behind it"
            )

        def choose(num_candidates: int, num_frames: int, frames: Frames | None, seed: int) -> Choice:
            assert frames is not None, "select decodes the candidates for policies that need them"
            most = min(auto.most, num_frames)
            return choose_auto(frames, replace(auto, least=min(auto.least, most), most=most))

        return replace(self, choose=choose)


def _frame_difference(num_candidates: int, num_frames: int, frames: Frames | None, seed: int) -> Choice:
    assert frames is not None, "select decodes the candidates for policies that need them"
    scores = change_scores(frames)
    return Choice(rules.top(scores, num_frames), scores)


def _difference_peaks(num_candidates: int, num_frames: int, frames: Frames | None, seed: int) -> Choice:
    assert frames is not None, "select decodes the candidates for policies that need them"
    scores = change_scores(frames)
    return Choice(difference_peaks(scores, num_frames), scores)


def _by_looks(rule: Callable[[ArrayLike, int], Indices]) -> Callable[[int, int, Frames | None, int], Choice]:
    """Choose by what the candidates look like; no candidate has a score of its own."""

    def choose(num_candidates: int, num_frames: int, frames: Frames | None, seed: int) -> Choice:
        assert frames is not None, "select decodes the candidates for policies that need them"
        return Choice(rule(pixel_features(frames), num_frames))

    return choose


def _general(num_candidates: int, num_frames: int, frames: Frames | None, seed: int) -> Choice:
    from sosampler.policies.learned import general_order

    assert frames is not None, "select decodes the candidates for policies that need them"
    order, value = general_order(frames, num_frames)
    return Choice(np.sort(order), value)


def _general_identity() -> str:
    from sosampler.policies.learned import general_sampler

    return general_sampler().fingerprint()


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
            default_candidates=pool_size,
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
            default_candidates=pool_size,
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
            default_candidates=pool_size,
            needs_frames=True,
        ),
        Policy(
            "frameexit",
            "the first N of FrameExit's coarse-to-fine order",
            lambda t, n, frames, seed: Choice(rules.frameexit(t, n)),
            default_candidates=lambda n: max(10, n),
        ),
        Policy(
            "difference-peaks",
            "the N most prominent peaks of the change between pictures",
            _difference_peaks,
            default_candidates=pool_size,
            needs_frames=True,
        ),
        Policy(
            "farthest-first",
            "again and again the picture least like those chosen, from the middle on",
            _by_looks(farthest_first),
            default_candidates=pool_size,
            needs_frames=True,
        ),
        Policy(
            "dpp",
            "N pictures unlike each other: greedy mode of a determinantal point process",
            _by_looks(dpp_diverse),
            default_candidates=pool_size,
            needs_frames=True,
        ),
        Policy(
            "general",
            "clear pictures that show what the video shows, none twice: a sampler that ships with the package",
            _general,
            default_candidates=pool_size,
            needs_frames=True,
            least_size=GENERAL_SIZE,
            identity=_general_identity,
        ),
    )
}

# Named policies whose scores the methods of `selectors` may choose from, as they may from those of any sampler.
SCORED = ("frame-difference",)

# What a folder must hold to be taken for a saved sampler.
_CONFIG = "config.json"


def get_policy(policy: Any, *, device: Any = None) -> Policy:
    """The policy that is meant: a name, a sampler, the folder of a saved sampler, or a `Policy` as it is.

    "+aks", "+its" or "+nms" behind a folder or "frame-difference" chooses from its scores in another way than the N
    best.

    `device` is where a sampler runs: one given as an object stays where it is unless told, one that is loaded goes to
    the GPU if there is one. "onnx" loads a folder without torch, as is done anyway where torch is not installed.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str) and policy in _POLICIES:
        if device is not None and _POLICIES[policy].identity is not None:
            from sosampler.policies.learned import check_light_device

            check_light_device(device)
        return _POLICIES[policy]
    if isinstance(policy, str) and (parts := split_method(policy))[0] in SCORED:
        return _chosen_by(_POLICIES[parts[0]], parts[1])
    if isinstance(policy, (str, os.PathLike)):
        return _from_folder(policy, device)
    if hasattr(policy, "score") and hasattr(policy, "preprocessing"):
        from sosampler.policies.learned import policy_of

        return policy_of(policy, device=device)
    raise InvalidArgument(
        f"policy is a {type(policy).__name__}; give one of: {', '.join(_POLICIES)}, a sampler, or the folder of one"
    )


def _chosen_by(policy: Policy, method: str) -> Policy:
    """A policy that gives scores, with another way to choose from them."""

    def choose(num_candidates: int, num_frames: int, frames: Frames | None, seed: int) -> Choice:
        scores = policy.choose(num_candidates, num_frames, frames, seed).scores
        assert scores is not None, "whoever is in SCORED gives scores"
        return Choice(METHODS[method](scores, num_frames), scores)

    return replace(policy, name=f"{policy.name}+{method}", says=f"{policy.says}, by {method}", choose=choose)


def _from_folder(given: str | os.PathLike[str], device: Any) -> Policy:
    text = os.fspath(given)
    # A folder may itself be called like that, and is then taken as it is.
    name, method = (text, "") if Path(text).is_dir() else split_method(text)
    folder = Path(name)
    if (folder / _CONFIG).is_file():
        from sosampler.policies.learned import load_policy

        return load_policy(name, method=method, device=device)
    if folder.is_dir():
        raise InvalidArgument(
            f"policy={text!r} is a folder without {_CONFIG}, so it holds no sampler; "
            f"give the folder of a trained one, or one of: {', '.join(_POLICIES)}"
        )
    raise InvalidArgument(
        f"policy={text!r} is unknown; choose one of: {', '.join(_POLICIES)}, or give the folder of a trained sampler; "
        f"{', '.join('+' + method for method in METHODS)} go behind such a folder or {' or '.join(SCORED)}"
    )


def list_policies(pattern: str = "*") -> list[str]:
    """Names of the policies that match a pattern such as "frame*"; those with a method behind them are not listed.

    Examples:
        >>> list_policies("frame*")
        ['frame-difference', 'frameexit']
    """
    return [name for name in _POLICIES if fnmatch(name, pattern)]


def describe_policies() -> dict[str, str]:
    return {policy.name: policy.says for policy in _POLICIES.values()}
