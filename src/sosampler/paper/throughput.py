"""Videos a second of sampler and classifier, on frames that are in memory already.

All ways are timed in turns in one run, so that a busy machine troubles them alike; what counts is the ratio to uniform.
Decoding is not in it. A sampler and the classifier after it take videos in batches. A system decides frame by frame, so
the classifier is run frame by frame for it; what it glances at is run at once, and its own small layers for all videos
at once, which flatters it a little.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosampler._util.environment import compare, in_turns
from sosampler._util.validation import whole_number
from sosampler.bank.bank import Bank
from sosampler.errors import InvalidArgument
from sosampler.evaluation.batches import candidate_slots
from sosampler.policies import positional as rules

Way = Callable[[], Any]

VIDEOS, BATCH, ROUNDS = 64, 16, 5
UNIFORM = "uniform"


def frames_in_memory(bank: Bank, num_candidates: int, device: torch.device, *, videos: int = VIDEOS) -> Tensor:
    """uint8 [V, T, 3, H, W] of the first labelled videos, all in the size of the first, on the device."""
    count = whole_number("num_candidates", num_candidates)
    rows = [row for row, item in enumerate(bank.items) if item.labels][: whole_number("videos", videos)]
    if not rows:
        raise InvalidArgument(f"{bank.path}: no video of this part has a label; give another split")
    size = bank[rows[0]].height, bank[rows[0]].width
    pictures = [bank[row].frames(candidate_slots(len(bank[row]), count)[0], size=size) for row in rows]
    return torch.from_numpy(np.stack(pictures).transpose(0, 1, 4, 2, 3).copy()).to(device)


def uniform_way(classifier: Any, frames: Tensor, num_frames: int, *, batch: int = BATCH) -> Way:
    """The classifier alone, on evenly spread frames."""
    places = torch.from_numpy(rules.uniform(frames.shape[1], num_frames)).to(frames.device)

    def run() -> None:
        for part in frames.split(batch):
            classifier.clip_probs(part[:, places])
        _wait(frames.device)

    return run


def sampler_way(sampler: Any, classifier: Any, frames: Tensor, num_frames: int, *, batch: int = BATCH) -> Way:
    """Score all candidates, choose, classify."""

    def run() -> None:
        for part in frames.split(batch):
            places = sampler.choose(part, num_frames).to(part.device)  # [B, N]
            chosen = part[torch.arange(len(part), device=part.device)[:, None], places]
            classifier.clip_probs(chosen)
        _wait(frames.device)

    return run


def system_way(system: Any, views: Any, classifier: Any, light: Any, frames: Tensor) -> Way:
    """What a system would run: the light network on what it glances at, the heavy one on what it sees, frame by frame.

    Args:
        system: trained.
        views: features of the same videos as `frames`, by which it decides.
        classifier: its heavy network.
        light: its light network, or None where it has none.
    """
    from sosampler.baselines.base import predict

    def run() -> None:
        output = predict(system, views)
        for video, (heavy, glanced) in enumerate(zip(output.seen_heavy, output.seen_light, strict=True)):
            if light is not None:
                light.look(frames[video : video + 1, glanced.to(frames.device)])
            for place in heavy.nonzero()[:, 0].tolist():
                classifier.clip_probs(frames[video : video + 1, place : place + 1])
        _wait(frames.device)

    return run


def measure(ways: Mapping[str, Way], num_videos: int, *, rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Videos a second of each way, by the median of the rounds after one to warm up, and their ratio to uniform.

    Args:
        ways: by name; one is called "uniform".
        num_videos: that each way gets through.
    """
    seconds = in_turns(dict(ways), rounds=whole_number("rounds", rounds))
    found = {}
    for name, taken in seconds.items():
        times = compare(seconds, way=name, reference=UNIFORM)["times_faster"]
        found[name] = {"videos_per_second": num_videos / statistics.median(taken), "times_uniform": times}
    return found


def add_to_rows(
    rows: Sequence[dict[str, Any]], measured: Mapping[str, Mapping[str, float]], names: Sequence[str]
) -> None:
    """Write the measured speed into rows of a result; `names` are those of their ways."""
    for row, name in zip(rows, names, strict=True):
        told = measured.get(name, {})
        row["videos_per_second"] = told.get("videos_per_second")
        row["times_uniform"] = told.get("times_uniform")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
