"""Training of systems on features in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosampler.checks import one_of, real_number, whole_number
from sosampler.classifiers.devices import check_device
from sosampler.errors import InvalidArgument
from sosampler.systems.base import System, Views
from sosampler.systems.drawing import draw_candidates
from sosampler.training.divergence import Diverged

OPTIMIZERS = ("adamw", "sgd")


def fit(
    system: System,
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
    system: System, views: Views, labels: Tensor, generator: torch.Generator, progress: float, phase: str
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


def _epochs_of_phases(system: System, epochs: int | Mapping[str, int]) -> dict[str, int]:
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
