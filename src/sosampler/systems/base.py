"""What every sequential or early-exit system is: views in, probabilities and the frames it really used out.

Shapes: B videos, T candidates in time order, C classes, D heavy and d light features a frame. The heavy features come
from the frozen classifier (before its class layer), the light ones from a small network. A system may read the features
of a frame only if it says so in `seen_heavy` and `seen_light`: these two are what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler.checks import one_of, real_number, whole_number
from sosampler.classifiers.devices import check_device
from sosampler.errors import InvalidArgument
from sosampler.samplers.targets import label_shares

OPTIMIZERS = ("adamw", "sgd")


class Views(NamedTuple):
    """What is known about the candidates of some videos."""

    heavy: Tensor  # [B, T, D]
    light: Tensor  # [B, T, d]
    mask: Tensor | None = None  # bool [B, T], True = a real candidate; None = all are

    @property
    def real(self) -> Tensor:
        """bool [B, T], True = a real candidate."""
        return self.mask if self.mask is not None else self.heavy.new_ones(self.heavy.shape[:2], dtype=torch.bool)

    def some(self, rows: Tensor) -> Views:
        """Some of the videos; `rows` int64 or bool as torch indexes."""
        return Views(self.heavy[rows], self.light[rows], None if self.mask is None else self.mask[rows])

    def filled(self) -> Views:
        """With 0 at what is not real: padding, even NaN, then reaches no sum and no gradient."""
        if self.mask is None:
            return self
        unreal = ~self.mask[:, :, None]
        return Views(self.heavy.masked_fill(unreal, 0), self.light.masked_fill(unreal, 0), self.mask)

    def to(self, device: torch.device) -> Views:
        """On a device, in at least float32."""
        mask = None if self.mask is None else self.mask.to(device)
        return Views(_raised(self.heavy.to(device)), _raised(self.light.to(device)), mask)


class SystemOutput(NamedTuple):
    """What a system said and what it looked at."""

    probabilities: Tensor  # [B, C]
    seen_heavy: Tensor  # bool [B, T], frames that went through the heavy network
    seen_light: Tensor  # bool [B, T], frames that went through the light network
    steps: Tensor | None = None  # int64 [B], where the system's own layers run more or less often than it sees frames


class System(nn.Module):
    """Base of all systems.

    A subclass sets `name`, and `phases` if it trains in several, calls `super().__init__(config)` with the JSON values
    that build it again, and defines `loss`, `decide` and `own_gmacs`. It may have a dial: a setting that trades
    accuracy for cost when it runs and that no weight's shape depends on.
    """

    name: str = ""
    phases: tuple[str, ...] = ("all",)
    dial: str = ""  # its key in the config
    dial_values: tuple[float, ...] = ()  # some, from cheap to costly

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config: dict[str, Any] = dict(config)
        self.about: dict[str, Any] = {}  # of a trained one: on what and how, as `load_system` found it
        self.multi_label = bool(config.get("multi_label", False))

    def loss(
        self,
        views: Views,
        labels: Tensor,
        *,
        generator: torch.Generator | None = None,
        progress: float = 1.0,
        phase: str | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to minimise and its parts without gradient.

        Args:
            views: of a batch, in float32.
            labels: multi-hot [B, C], at least one label a video.
            generator: source of all random draws (`draw_uniform`, `draw_gumbel`).
            progress: share of the phase that is done, 0 to 1, for what is annealed.
            phase: one of `phases`; None = the first.
        """
        raise NotImplementedError

    def decide(self, views: Views, generator: torch.Generator | None) -> SystemOutput:
        """What `run` calls, in eval mode and without gradient."""
        raise NotImplementedError

    def own_gmacs(self, num_candidates: int, seen: SystemOutput) -> Tensor:
        """Giga multiply-adds [B] of the system's own layers for each video, besides the heavy and the light network.

        Args:
            num_candidates: T.
            seen: what `run` returned.
        """
        raise NotImplementedError

    def run(self, views: Views, *, generator: torch.Generator | None = None) -> SystemOutput:
        """Look at videos one decision after another; the same views give the same output."""
        views = self.check(views)
        modes = [(module, module.training) for module in self.modules()]  # in a phase they differ
        self.eval()
        try:
            with torch.no_grad():
                return self.decide(views, generator)
        finally:
            for module, training in modes:
                module.training = training

    def turned(self, value: float) -> System:
        """A system with the same weights in the same memory and another value of the dial, checked as any setting.

        Training one of the two, or moving it to a device, does so to both.
        """
        if not self.dial:
            raise InvalidArgument(f"{self.name} has no dial that could be turned to {value!r}; leave it as it is")
        with torch.device("meta"):  # layers that have a shape and no memory; these weights take their place
            other = type(self)(**{**self.config, self.dial: value})
        other._parameters, other._buffers, other._modules = self._parameters, self._buffers, self._modules
        other.training, other.about = self.training, self.about
        return other

    def phase_parameters(self, phase: str) -> Iterator[nn.Parameter]:
        """What is trained in a phase."""
        yield from self.parameters()

    def train_phase(self, phase: str) -> None:
        """Train mode for what is trained in a phase; a subclass leaves the rest in eval mode."""
        self.train()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def activate(self, logits: Tensor) -> Tensor:
        """Probabilities of classes from logits [..., C]."""
        return logits.sigmoid() if self.multi_label else logits.softmax(dim=-1)

    def label_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """How badly logits [..., C] name the labels [..., C], one number each: [...].

        Cross-entropy, where several true labels share the target; for `multi_label` binary, mean over classes.
        """
        if self.multi_label:
            wanted = labels.to(logits.dtype).expand_as(logits)
            return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(dim=-1)
        return -(label_shares(labels, logits.dtype) * logits.log_softmax(dim=-1)).sum(dim=-1)

    def check(self, views: Views) -> Views:
        """Views on this device and in float32, or say what does not fit; `heavy_width`, `light_width` of the config."""
        for name, features in (("heavy", views.heavy), ("light", views.light)):
            width = self.config.get(f"{name}_width", features.shape[-1])
            if features.dim() != 3 or features.shape[-1] != width:
                raise InvalidArgument(
                    f"{name} features of shape {list(features.shape)} do not fit {self.name}; "
                    f"give [videos, candidates, {width}]"
                )
        if views.heavy.shape[:2] != views.light.shape[:2] or not views.heavy.shape[1]:
            raise InvalidArgument(
                f"heavy and light features are of {list(views.heavy.shape[:2])} and {list(views.light.shape[:2])} "
                "videos and candidates; give both for the same candidates, at least one"
            )
        if views.mask is not None:
            if views.mask.shape != views.heavy.shape[:2] or views.mask.dtype != torch.bool:
                raise InvalidArgument(
                    f"a mask of shape {list(views.mask.shape)} and type {views.mask.dtype} does not fit; "
                    f"give bool {list(views.heavy.shape[:2])}"
                )
            if not bool(views.mask.any(dim=1).all()):
                raise InvalidArgument("a video has no real candidate in the mask; leave such videos out")
        return views.to(self.device)


def matrix_gmacs(*modules: nn.Module) -> float:
    """Giga multiply-adds of one row through layers that are matrices: Linear, LSTMCell, GRUCell."""
    weights = [weight for module in modules for weight in module.parameters() if weight.dim() == 2]
    return sum(int(weight.numel()) for weight in weights) / 1e9


def draw_uniform(shape: tuple[int, ...], generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Numbers in 0..1. Drawn where the generator lives, so that every device gets the same from one of the CPU."""
    source = device if generator is None else generator.device
    return torch.rand(shape, generator=generator, device=source).to(device)


def draw_gumbel(shape: tuple[int, ...], generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Gumbel noise: −log(−log u)."""
    tiny = torch.finfo(torch.float32).tiny
    return -(-draw_uniform(shape, generator, device).clamp_min(tiny).log()).clamp_min(tiny).log()


def decoded_frames(output: SystemOutput) -> Tensor:
    """How many frames of each video must be decoded, int64 [B]: those that any network saw."""
    return (output.seen_heavy | output.seen_light).sum(dim=1)


def video_gmacs(system: System, output: SystemOutput, *, heavy_gmacs: float, light_gmacs: float) -> Tensor:
    """Giga multiply-adds of each video [B], from the cost of one frame in the heavy and the light network."""
    own = system.own_gmacs(output.seen_heavy.shape[1], output)
    return heavy_gmacs * output.seen_heavy.sum(dim=1) + light_gmacs * output.seen_light.sum(dim=1) + own


def predict(system: System, views: Views, *, batch_size: int = 256, seed: int = 0) -> SystemOutput:
    """`run` on any number of videos, some at a time; the output is on the CPU."""
    whole_number("batch_size", batch_size)
    generator = torch.Generator().manual_seed(seed)
    outputs = [
        system.run(views.some(rows), generator=generator) for rows in torch.arange(len(views.heavy)).split(batch_size)
    ]
    steps = [output.steps.cpu() for output in outputs if output.steps is not None]
    return SystemOutput(
        torch.cat([output.probabilities.cpu() for output in outputs]),
        torch.cat([output.seen_heavy.cpu() for output in outputs]),
        torch.cat([output.seen_light.cpu() for output in outputs]),
        torch.cat(steps) if steps else None,
    )


def fit(
    system: System,
    views: Views,
    labels: Tensor,
    *,
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

    Args:
        system: trained in place; left in eval mode on `device`.
        views: of the training videos.
        labels: multi-hot [B, C].
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
    views, labels = system.check(views), labels.to(system.device)
    steps = -(-len(labels) // whole_number("batch_size", batch_size))
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
            order = np.random.default_rng([seed, number, epoch]).permutation(len(labels))
            for step, part in enumerate(np.array_split(order, steps)):
                rows = torch.from_numpy(part).to(system.device)
                progress = (epoch * steps + step) / (count * steps)
                optimiser.zero_grad(set_to_none=True)
                with _seeded([seed, number, epoch, step], system.device) as generator:
                    losses = _backward(system, views.some(rows), labels[rows], generator, progress, phase)
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
        raise InvalidArgument(
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


def _raised(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
