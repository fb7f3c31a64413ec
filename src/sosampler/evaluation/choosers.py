"""Every policy behind one interface: `choose(view, num_frames)` -> positions among the candidates.

Rules know the number of candidates alone, oracles know what the classifier says and the labels, samplers have looked
at the pictures before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sosampler.auto_frames import AutoFrames
from sosampler.evaluation.clips import Clips
from sosampler.evaluation.scorers import Scorer, kernel
from sosampler.evaluation.views import CandidateView
from sosampler.policies import rules
from sosampler.policies.adaptive import count_frames
from sosampler.policies.semi_optimal import log_label_confidence, top_n
from sosampler.video.candidates import segment_centres
from sosampler.video.timeline import Indices

RULES: dict[str, Callable[[int, int], Indices]] = {
    "uniform": rules.uniform,
    "centre": rules.centre,
    "frameexit": rules.frameexit,
    "all": segment_centres,
}


@dataclass(frozen=True)
class Chosen:
    """Positions among the candidates, in time order."""

    positions: Tensor  # int64 [B, N]
    gap: NDArray[np.float64] | None = None  # [B], the confidence that the optimal policy may have missed
    method: str | None = None  # how the optimal policy searched


class Chooser(Protocol):
    """A policy; `looks` if it needs all candidates decoded."""

    @property
    def name(self) -> str: ...

    @property
    def looks(self) -> bool: ...

    @property
    def scorer(self) -> Scorer | None: ...

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        """N of the candidates of each video; every video has as many real ones."""
        ...


class RuleChooser:
    """A rule on positions; of a short video on those that it has."""

    looks, scorer = False, None

    def __init__(self, name: str, rule: Callable[[int, int], Indices]) -> None:
        self.name, self._rule = name, rule

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        by_count = {count: self._rule(count, num_frames) for count in np.unique(view.counts).tolist()}
        positions = np.stack([by_count[count] for count in view.counts.tolist()])
        return Chosen(torch.from_numpy(positions).to(view.mask.device))


class RandomChooser:
    """N candidates by chance, the same for the same seed, number of candidates and place in the split."""

    name, looks, scorer = "random", False, None

    def __init__(self, seed: int, num_videos: int) -> None:
        self._seed, self._num_videos = seed, num_videos
        self._scores: dict[int, NDArray[np.float64]] = {}  # by T: [V, T]

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        count = view.num_candidates
        if count not in self._scores:
            self._scores[count] = np.random.default_rng([self._seed, count]).random((self._num_videos, count))
        scores = torch.from_numpy(self._scores[count][view.numbers]).to(view.mask.device)
        return Chosen(top_n(scores, num_frames, view.real))


class SemiOptimalChooser:
    """The N frames that are most confident alone: in the labels, or in whatever they show most ("max")."""

    looks, scorer = True, None

    def __init__(self, name: str, clips: Clips) -> None:
        self.name, self._clips = name, clips

    def log_confidence(self, view: CandidateView) -> Tensor:
        """[B, T]"""
        if self.name not in view.cache:
            log_probs = self._clips.frame_log_probs(view)
            of_max = self.name == "semi-optimal-max"
            view.cache[self.name] = log_probs.amax(-1) if of_max else log_label_confidence(log_probs, view.labels)
        return view.cache[self.name]

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        return Chosen(top_n(self.log_confidence(view), num_frames, view.real))

    def values(self, view: CandidateView) -> Tensor:
        """In 0..1, for policies that weigh them against redundancy."""
        return self.log_confidence(view).exp()

    def similarity(self, view: CandidateView) -> Tensor:
        if "similarity" not in view.cache:
            features = view.frame_probs if view.features is None else view.features
            view.cache["similarity"] = kernel(features, view.mask)
        return view.cache["similarity"]


class OptimalChooser:
    """The N frames whose clip is most confident in the labels."""

    name, looks, scorer = "optimal", True, None

    def __init__(self, clips: Clips, beam_width: int) -> None:
        self._clips, self._beam_width = clips, beam_width

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        found = self._clips.optimal(view, num_frames, self._beam_width)
        return Chosen(found.positions, found.gap.double().cpu().numpy(), found.method)


class ScoreChooser:
    """The N highest scores of whoever looked at the pictures."""

    looks = True

    def __init__(self, name: str, scorer: Scorer) -> None:
        self.name, self.scorer = name, scorer

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        return Chosen(top_n(view.scores[self.scorer.key], num_frames, view.real))

    def values(self, view: CandidateView) -> Tensor:
        # In double precision, in which scores that differ stay apart.
        return self.scorer.in_unit(view.scores[self.scorer.key].double(), view.mask)

    def similarity(self, view: CandidateView) -> Tensor:
        return view.similarity[self.scorer.key]


class AutoChooser:
    """The highest scores of a sampler that decides for each video how many."""

    looks = True

    def __init__(self, name: str, base: ScoreChooser, auto: AutoFrames) -> None:
        self.name, self._auto = name, auto
        self.scorer = base.scorer

    def count(self, view: CandidateView) -> NDArray[np.int64]:
        """N of each video, [B]; none has more than its real candidates."""
        return count_frames(view.expected[self.scorer.key], self._auto)

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        return Chosen(top_n(view.scores[self.scorer.key], num_frames, view.real))


class RedundancyChooser:
    """Another policy's values, weighed against the likeness of what is chosen already."""

    looks = True

    def __init__(self, name: str, base: SemiOptimalChooser | ScoreChooser, method: str) -> None:
        self.name, self._base, self._method = name, base, method
        self.scorer = base.scorer

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        from sosampler.policies.redundancy import dpp, mmr

        pick = mmr if self._method == "mmr" else dpp
        values, similarity = self._base.values(view).float(), self._base.similarity(view).float()
        return Chosen(pick(values, similarity, num_frames, mask=view.real))


class MethodChooser:
    """Another policy's values, from which a rule chooses in another way than the N highest."""

    looks = True

    def __init__(
        self, name: str, base: SemiOptimalChooser | ScoreChooser, rule: Callable[[NDArray[np.float64], int], Indices]
    ) -> None:
        self.name, self._base, self._rule = name, base, rule
        self.scorer = base.scorer

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        values = self._base.values(view).double().cpu().numpy()
        counts = view.counts.tolist()
        rows = [self._rule(row[:count], num_frames) for row, count in zip(values, counts, strict=True)]
        return Chosen(torch.from_numpy(np.stack(rows)).to(view.mask.device))


def choose_all(chooser: Chooser, view: CandidateView, num_frames: int) -> Chosen:
    """The choice for every video. One with fewer frames than are wanted gives all of them, repeated evenly."""
    enough = view.counts >= num_frames
    if enough.all():
        return chooser.choose(view, num_frames)
    positions = np.stack([segment_centres(count, num_frames) for count in view.counts.tolist()])
    some = chooser.choose(view.some(enough), num_frames) if enough.any() else Chosen(view.labels.new_empty(0).long())
    gap = None
    if some.gap is not None or (chooser.name == "optimal" and not enough.any()):
        gap = np.zeros(len(view))  # with all frames chosen nothing can be missed
    if enough.any():
        positions[enough] = some.positions.cpu().numpy()
        if gap is not None and some.gap is not None:
            gap[enough] = some.gap
    return Chosen(torch.from_numpy(positions).to(view.mask.device), gap, some.method)
