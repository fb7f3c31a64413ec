"""Videos a second of sampler and classifier, on frames that are in memory already.

All rows are timed in turns in one run, so that load on the machine affects them alike; what counts is the ratio to
uniform. Decoding is not included. All methods take videos in batches of the same size. A sampler and the classifier
after it run once a batch. A baseline decides frame by frame, so the classifier runs on one frame of every video of the
batch that is not decided yet, then on the next; its other networks run once on all frames that they see of the batch,
and its own small layers once, which flatters it a little.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosampler._util.environment import compare, in_turns
from sosampler.bank.bank import Bank
from sosampler.baselines import base
from sosampler.evaluation.clip_scores import candidate_slots
from sosampler.paper.plan import ExperimentPlan, PlannedCell, Request
from sosampler.policies import positional
from sosampler.samplers.registry import load_sampler
from sosampler.training.baseline_data import bank_views

VIDEOS, BATCH, ROUNDS = 64, 16, 5
UNIFORM = "uniform"


def add_throughput(plan: ExperimentPlan, result: dict[str, Any]) -> None:
    """Time every row on the same frames, and add the speed to the rows of a result."""
    location = plan.location
    classifier, bank = location.classifier, location.bank.split(location.split)
    counts = {cell.num_candidates for cell in plan.cells}
    frames_by = {count: frames_in_memory(bank, count, classifier.device) for count in counts}
    names, runs = [], {}
    for cell in plan.cells:
        name = UNIFORM if cell.recipe.row == UNIFORM else f"{cell.recipe.row} {cell.pair}"
        names.append(name)
        run = _run_of(plan, cell, frames_by[cell.num_candidates])
        if run is not None:
            runs[name] = run
        else:
            result["notes"].append(
                f"{cell.recipe.title} was not timed: one of its networks is not available; give --weights or a sampler "
                "as --light for a light network, and folders as --features for others"
            )
    videos = len(next(iter(frames_by.values())))
    measured = measure(runs, videos)
    for row, name in zip(result["rows"], names, strict=True):
        row |= measured.get(name, {"videos_per_second": None, "times_uniform": None})
    reference = next(cell for cell in plan.cells if cell.recipe.row == UNIFORM)
    result["notes"] += [
        f"videos a second: {videos} videos with frames in memory on {classifier.device}, seed {plan.seeds[0]}, "
        f"batches of {BATCH}, median of {ROUNDS} rounds; decoding is not included",
        f"times uniform: uniform with {reference.num_frames} of {reference.num_candidates} frames is 1, whatever N a "
        "row has; points to uniform are to uniform with as many frames as the row",
    ]


def frames_in_memory(bank: Bank, num_candidates: int, device: torch.device) -> Tensor:
    """Return uint8 [V, T, 3, H, W] of the first labelled videos, all in the size of the first, on the device."""
    indices = [index for index, item in enumerate(bank.items) if item.labels][:VIDEOS]
    size = bank[indices[0]].height, bank[indices[0]].width
    videos = [bank[index].frames(candidate_slots(len(bank[index]), num_candidates)[0], size=size) for index in indices]
    return torch.from_numpy(np.stack(videos).transpose(0, 1, 4, 2, 3).copy()).to(device)


def _run_of(plan: ExperimentPlan, cell: PlannedCell, frames: Tensor) -> Callable[[], None] | None:
    """Return what is timed for a row; None where it needs a network that is not available."""
    location, classifier = plan.location, plan.location.classifier
    if cell.training is None:
        positions = torch.from_numpy(positional.uniform(frames.shape[1], cell.num_frames)).to(frames.device)
        return clip_run(classifier, frames, lambda part: positions.expand(len(part), -1))
    folder = cell.training.folder(plan.folder, plan.seeds[0])
    if not cell.training.is_baseline:
        sampler = load_sampler(folder, device=str(classifier.device))
        sampler.precision = classifier.precision
        return clip_run(classifier, frames, lambda part: sampler.choose(part, cell.num_frames))
    baseline = base.load_system(folder, str(classifier.device))
    networks = {
        name: light_network_of(plan.request, classifier, baseline.light_size)
        if name == "light"
        else _like(classifier, plan.request.features.get(name))
        for name in baseline.feature_sets
        if name != "heavy"
    }
    if any(network is None for network in networks.values()):
        return None
    kept = {name: facts["fingerprint"] for name, facts in base.trained_on(baseline.about).items()}
    views, _ = bank_views(location.bank.split(location.split), **kept, num_candidates=cell.num_candidates)
    return baseline_run(baseline, views, classifier, networks, frames)


def light_network_of(request: Request, classifier: Any, input_size: int = 128) -> Any:
    """Return the light network on the classifier's device and in its precision; None where only features are known."""
    if request.light is None and request.weights is not None:
        return _like(classifier, base.light_network(request.weights, input_size))
    return _like(classifier, request.light) if hasattr(request.light, "look") else None


def _like(classifier: Any, network: Any) -> Any:
    """Return a copy of a network on the classifier's device and in its precision; None for a name of features."""
    if network is None or isinstance(network, str):
        return None
    network = copy.deepcopy(network)  # its precision is part of what identifies trainings
    network.precision = classifier.precision
    return network.to(classifier.device)


def clip_run(
    classifier: Any, frames: Tensor, choose: Callable[[Tensor], Tensor], *, batch: int = BATCH
) -> Callable[[], None]:
    """Return a function that chooses frames of all videos and classifies them; `choose` returns positions [B, N]."""

    def run() -> None:
        for part in frames.split(batch):
            rows = torch.arange(len(part), device=part.device)[:, None]
            classifier.clip_probs(part[rows, choose(part).to(part.device)])
        _wait(frames.device)

    return run


def baseline_run(
    baseline: Any, views: Any, classifier: Any, networks: Mapping[str, Any], frames: Tensor, *, batch: int = BATCH
) -> Callable[[], None]:
    """Return a function that runs a baseline on batches: its other networks, then the classifier step by step.

    `views`: features of the same videos as `frames`, by which it decides. `networks`: samplers and classifiers by
    their sets.
    """

    def run() -> None:
        for begin in range(0, len(frames), batch):
            part = frames[begin : begin + batch]
            output = base.predict(baseline, views.some(torch.arange(begin, begin + len(part))))
            for name, network in networks.items():
                alone = part[output.seen_in(name).to(part.device)][:, None]  # each frame by itself
                if len(alone):
                    network.look(alone) if hasattr(network, "look") else network.clip_probs(alone)
            seen = output.seen_heavy.to(part.device)
            steps = seen.cumsum(dim=1) * seen  # [B, T]: 1 for the first frame of a video that it runs on; 0: skipped
            for step in range(1, int(steps.max()) + 1):
                classifier.clip_probs(part[steps == step][:, None])
        _wait(frames.device)

    return run


def measure(
    runs: Mapping[str, Callable[[], None]], num_videos: int, *, rounds: int = ROUNDS
) -> dict[str, dict[str, float]]:
    """Return videos a second, by the median of the rounds after a warm-up, and the ratio to the run "uniform"."""
    seconds = in_turns(dict(runs), rounds=rounds)
    return {
        name: {
            "videos_per_second": num_videos / statistics.median(taken),
            "times_uniform": compare(seconds, way=name, reference=UNIFORM)["times_faster"],
        }
        for name, taken in seconds.items()
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
