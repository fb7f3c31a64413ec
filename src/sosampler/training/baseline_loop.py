"""Which frames a system is shown in training: others in every epoch where more are known than it is offered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sosampler._util.devices import check_device
from sosampler._util.validation import one_of, real_number, whole_number
from sosampler.baselines.base import Baseline, Views, decoded_frames, predict, video_gmacs
from sosampler.errors import InvalidArgument
from sosampler.evaluation.metrics import mean_average_precision, top1
from sosampler.training.optim import Diverged, finite_or_none
from sosampler.training.sampler_data import stratified


class Drawn(NamedTuple):
    """Candidates of V videos, drawn from all that is known of them."""

    positions: Tensor  # int64 [V, K], places in the views
    real: Tensor  # bool [V, K], False = the video has fewer

    def of(self, views: Views, rows: Tensor) -> Views:
        """Views of the drawn candidates of some videos; `rows` int64 [B]."""
        places, real = (rows[:, None], self.positions[rows]), self.real[rows]
        return Views(views.heavy[places], views.light[places], None if bool(real.all()) else real)


def draw_candidates(real: Tensor, count: int, rng: np.random.Generator) -> Drawn:
    """One random frame of each of `count` equal stretches of each video, in time order, as samplers are shown them.

    A video with fewer frames offers each of them once.

    Args:
        real: bool [V, T], which places of the views hold a frame.
        count: K.
        rng: source of the draw.
    """
    known, steps = real.sum(dim=1, keepdim=True), torch.arange(count, device=real.device)
    # Counted in real frames, as the stretches are.
    drawn = torch.from_numpy(stratified(known[:, 0].cpu().numpy(), count, rng)).to(real.device)
    offered = steps < known
    ranks = torch.where(offered, torch.where(known < count, steps, drawn), 0)
    real_first = (~real).to(torch.uint8).argsort(dim=1, stable=True)
    return Drawn(real_first.gather(1, ranks), offered)


OPTIMIZERS = ("adamw", "sgd")


def fit(
    system: Baseline,
    views: Views,
    labels: Tensor,
    *,
    num_candidates: int | None = None,
    epochs: int | Mapping[str, int] = 20,
    lr: float = 1e-3,
    batch_size: int = 64,
    seed: int = 0,
    device: Any = None,
    optimizer: str = "adamw",
    weight_decay: float = 1e-4,
    clip: float | None = 10.0,
    say: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Train all phases of a system on features in memory; the same arguments give the same weights.

    The weights of the last epoch stay: an earlier one would not only be better or worse, but also spend more or less.

    Args:
        system: trained in place; left in eval mode on `device`.
        views: of the training videos. They stay where and as precise as they are; a batch at a time goes to the device,
            in float32.
        labels: multi-hot [B, C].
        num_candidates: K, if the views hold more frames than the system is to be offered: each epoch shows it others,
            one of each of K equal stretches of a video; None = all, every time.
        epochs: of each phase, or one number a phase; a phase with 0, or with nothing to train, is left out.
        lr: at the start of each phase; falls to 0 as a cosine.
        batch_size: at most so many videos a step; batches of an epoch differ by at most one video.
        seed: of the order of videos and of everything that is drawn.
        device: where it trains; None = where the system is.
        optimizer: "adamw", or "sgd" with momentum 0.9.
        weight_decay: of the optimiser.
        clip: longest gradient, over all weights together; None = any.
        say: gets one line an epoch.

    Returns:
        For each epoch: phase, epoch, loss and its parts (means over videos), and the lr of its first step.
    """
    real_number("lr", lr, above=0), real_number("weight_decay", weight_decay, at_least=0)
    one_of("optimizer", optimizer, OPTIMIZERS)
    counts = _epochs_of_phases(system, epochs)
    _check_labels(views, labels)
    system.to(check_device(device) if device is not None else system.device)
    system.check_shapes(views)
    labels, real = labels.to(system.device), views.real
    offered = real.shape[1] if num_candidates is None else whole_number("num_candidates", num_candidates)
    steps = -(-len(labels) // whole_number("batch_size", batch_size))
    system.check_training(real.sum(dim=1).clamp_max(offered), smallest_batch=len(labels) // steps, phases=[*counts])
    history: list[dict[str, Any]] = []
    for number, (phase, count) in enumerate(counts.items()):
        weights = [weight for weight in system.phase_parameters(phase) if weight.requires_grad]
        if not weights:
            continue
        optimiser = _optimiser(optimizer, weights, lr, weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, count * steps)
        for epoch in range(count):
            system.train_phase(phase)
            row: dict[str, Any] = {"phase": phase, "epoch": epoch, "lr": schedule.get_last_lr()[0]}
            rng = np.random.default_rng([seed, number, epoch])
            order = rng.permutation(len(labels))
            drawn = draw_candidates(real, offered, rng) if offered < real.shape[1] else None
            for step, part in enumerate(np.array_split(order, steps)):
                rows = torch.from_numpy(part).to(views.heavy.device)
                batch = views.some(rows) if drawn is None else drawn.of(views, rows)
                progress = (epoch * steps + step) / (count * steps)
                optimiser.zero_grad(set_to_none=True)
                with _seeded([seed, number, epoch, step], system.device) as generator:
                    wanted = labels[rows.to(system.device)]
                    losses = _backward(system, batch.to(system.device), wanted, generator, progress, phase)
                if clip is not None:
                    nn.utils.clip_grad_norm_(weights, clip)
                optimiser.step()
                schedule.step()
                for key, value in losses.items():
                    row[key] = row.get(key, 0.0) + value * len(rows) / len(labels)
            history.append(row)
            if say is not None:
                numbers = ", ".join(f"{key} {row[key]:.4f}" for key in row if key not in ("phase", "epoch", "lr"))
                say(f"{system.name} {phase} {epoch + 1}/{count}: {numbers}")
    system.eval()
    return history


def _backward(
    system: Baseline, views: Views, labels: Tensor, generator: torch.Generator, progress: float, phase: str
) -> dict[str, float]:
    """Gradients of one batch; its loss and parts as numbers."""
    loss, parts = system.loss(views, labels, generator=generator, progress=progress, phase=phase)
    total = float(loss.detach())
    if not math.isfinite(total):
        raise Diverged(
            f"the loss of {system.name} is {total} in phase {phase!r}, {progress:.0%} of it done; "
            "look for such numbers in the features, or give a lower lr"
        )
    loss.backward()
    return {"loss": total, **{key: float(value) for key, value in parts.items()}}


def _epochs_of_phases(system: Baseline, epochs: int | Mapping[str, int]) -> dict[str, int]:
    given = dict(epochs) if isinstance(epochs, Mapping) else dict.fromkeys(system.phases, epochs)
    for phase, count in given.items():
        one_of("phase", phase, system.phases), whole_number("epochs", count, at_least=0)
    return {phase: given[phase] for phase in system.phases if given.get(phase)}


def _check_labels(views: Views, labels: Tensor) -> None:
    if labels.dim() != 2 or len(labels) != len(views.heavy) or not len(labels):
        raise InvalidArgument(f"labels of shape {list(labels.shape)} do not fit {len(views.heavy)} videos; give [B, C]")
    if not bool((labels > 0).any(dim=1).all()):
        raise InvalidArgument("a video has no label; leave such videos out")


def _optimiser(name: str, weights: list[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(weights, lr=lr, momentum=0.9, weight_decay=weight_decay)
    return torch.optim.AdamW(weights, lr=lr, weight_decay=weight_decay)


@contextmanager
def _seeded(key: list[int], device: torch.device) -> Iterator[torch.Generator]:
    """A generator of the CPU for this key. Layers that draw by themselves (dropout) are seeded too, and no one else."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield torch.Generator().manual_seed(seed)


def metric_of(system: Baseline) -> str:
    """mAP for several labels a video, else top-1."""
    return "mAP" if system.multi_label else "top1"


def measure_baseline(
    system: Baseline, views: Views, labels: Tensor, *, heavy_gmacs: float, light_gmacs: float
) -> dict[str, Any]:
    """The measure by its name, and means over videos of frames and giga multiply-adds.

    Args:
        system: as it is turned.
        views, labels: of videos, as `bank_views` gives them.
        heavy_gmacs, light_gmacs: of one frame in the two networks.
    """
    output = predict(system, views)
    if not bool(output.probabilities.isfinite().all()):
        raise InvalidArgument(
            f"{system.name} gives probabilities that are not finite on dev; look for such numbers in the features of "
            "its videos, or give a lower lr"
        )
    probabilities, truth = output.probabilities.numpy(), labels.cpu().numpy()
    found = mean_average_precision(probabilities, truth) if system.multi_label else top1(probabilities, truth)
    spent = video_gmacs(system, output, heavy_gmacs=heavy_gmacs, light_gmacs=light_gmacs)
    return {
        metric_of(system): finite_or_none(found),
        "frames": float(output.seen_heavy.sum(dim=1).double().mean()),
        "frames_decoded": float(decoded_frames(output).double().mean()),
        "gmacs": float(spent.double().mean()),
    }


def threshold_curve(system: Baseline, views: Views, labels: Tensor, **gmacs: float) -> list[dict[str, Any]]:
    """`measure_baseline` for each value of the dial, from cheap to costly."""
    return [
        {
            "dial": system.threshold,
            "value": value,
            **measure_baseline(system.with_threshold(value), views, labels, **gmacs),
        }
        for value in system.threshold_values
    ]
