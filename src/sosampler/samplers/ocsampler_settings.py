"""What there is to choose in OCSampler's training. Apart from its loss, so that recipes are read without torch."""

from __future__ import annotations

from dataclasses import dataclass

from sosampler.checks import one_of, real_number, whole_number

REWARDS = ("confidence", "label")
BASELINES = ("uniform", "sample")
LIKELIHOODS = ("set", "ordered")


@dataclass(frozen=True, kw_only=True)
class OCSamplerSettings:
    """What there is to choose in OCSampler's training; the defaults are its configuration for ActivityNet."""

    num_frames: int = 6  # N
    reward: str = "confidence"  # "confidence" needs no labels
    baseline: str = "uniform"  # or "sample": a second draw of the policy
    likelihood: str = "set"  # or "ordered": that of the order in which the frames were drawn
    entropy: float = 0.0  # weight of the entropy, which keeps the policy from settling early

    def __post_init__(self) -> None:
        whole_number("num_frames", self.num_frames)
        one_of("reward", self.reward, REWARDS)
        one_of("baseline", self.baseline, BASELINES)
        one_of("likelihood", self.likelihood, LIKELIHOODS)
        real_number("entropy", self.entropy, at_least=0.0)
