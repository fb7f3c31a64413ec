"""FrameExit: see frames from coarse to fine and stop as soon as a gate closes.

After Ghodrati, Bejnordi and Habibian, "FrameExit: Conditional Early Exiting for Efficient Video Recognition", CVPR
2021. As in the paper: the order of frames, the running element-wise maximum of per-frame features, one classifier for
each number of frames seen, the first exit by a threshold on the probability, gates on the pooled features of this step
and the one before, their training by pseudo-labels with the tolerance beta·exp(t/2), and the sizes of all layers.
Different: the backbone is frozen, so that only the layers after it are trained, in two phases (classifiers, then gates
with everything else fixed); a video with fewer frames than classifiers ends at its last frame; of one with more, one
frame of each of equal segments is used; neck, gates and classifiers are counted in the cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.limits import check_count
from sosampler._util.validation import check_bool, check_float, check_int
from sosampler.baselines.base import Baseline, BaselineOutput, Loss, Rng, Views, candidates_of_ranks, matrix_gmacs
from sosampler.classifiers.weights import State, frameexit_classifiers, is_frameexit_release, load_weights, read_state
from sosampler.errors import InvalidArgument, WeightsError
from sosampler.policies.positional import frameexit_order, uniform


class FrameExit(Baseline):
    """Early exit over frames in a fixed order.

    Each number of frames has its own classifier, which learns only from videos with that many candidates.
    """

    name = "frameexit"
    phases = ("classifiers", "gates")
    threshold = "gate_exit"
    threshold_values = (0.9, 0.5, 0.1, 0.01, 0.001, 0.0)  # trained gates are near 0 or 1; 0 leaves only the first exit

    def __init__(
        self,
        heavy_width: int,  # D, features of a frame
        num_classes: int,
        *,
        max_frames: int = 10,  # K, frames that are seen where no gate closes
        neck_width: int | None = 4096,  # of the layer before the maximum; None: the features are of a FrameExit head
        gate_widths: Sequence[int] = (128, 64),  # of the two projections in each gate
        beta: float = 1e-3,  # loss at which gates are trained to exit; a larger one exits earlier; choose it on dev
        first_exit: float = 0.99,  # exit after one frame if the highest probability is above this
        gate_exit: float = 0.5,  # exit after later frames if the gate is below this; gates are trained for 0.5
        multi_label: bool = False,  # probabilities by sigmoid instead of softmax
    ) -> None:
        if len(gate_widths) != 2:
            raise InvalidArgument(f"gate_widths={gate_widths!r} must be two ints")
        config = {
            "heavy_width": check_int("heavy_width", heavy_width),
            "num_classes": check_int("num_classes", num_classes),
            "max_frames": check_count("max_frames", max_frames, "MAX_LAYERS"),
            "neck_width": None if neck_width is None else check_int("neck_width", neck_width),
            "gate_widths": [check_int("gate_widths", width) for width in gate_widths],
            "beta": check_float("beta", beta, above=0),
            "first_exit": check_float("first_exit", first_exit, at_least=0),
            "gate_exit": check_float("gate_exit", gate_exit, at_least=0),
            "multi_label": check_bool("multi_label", multi_label),
        }
        super().__init__(config)
        width = heavy_width if neck_width is None else neck_width
        self.max_frames = max_frames
        self.neck = nn.Identity() if neck_width is None else _projection(heavy_width, neck_width)
        self.classifiers = nn.ModuleList(nn.Linear(width, num_classes) for _ in range(max_frames))
        # The first exit has a threshold and the last needs no decision; gates[i] follows frame i + 1 (from 0).
        self.gates = nn.ModuleList(Gate(width, *gate_widths) for _ in range(max_frames - 2))

    def loss(
        self, views: Views, labels: Tensor, *, generator: Rng = None, progress: float = 1.0, phase: str | None = None
    ) -> Loss:
        """Phase "classifiers": mean over the steps of a video of their label losses, then over videos.

        Phase "gates", after `train_phase("gates")`: binary cross-entropy of all gates, mean over their decisions.
        """
        visits, visited = visiting_order(views.real, self.max_frames)
        with torch.set_grad_enabled(phase != "gates" and torch.is_grad_enabled()):
            pooled = self._pooled(views, visits, visited)
            losses = self._step_losses(pooled, labels)
        if phase == "gates":
            return self._gate_loss(pooled, exit_labels(losses, self.config["beta"]), visited)
        losses = losses.masked_fill(~visited, 0)
        total = (losses.sum(dim=1) / visited.sum(dim=1)).mean()
        last = losses.gather(1, visited.sum(dim=1, keepdim=True) - 1).mean()
        return total, {"first": losses[:, 0].mean().detach(), "last": last.detach()}

    def check_training(self, frames: Tensor, *, smallest_batch: int, phases: Collection[str]) -> None:
        visited = frames.clamp_max(self.max_frames)
        if "classifiers" in phases and self.config["neck_width"] and smallest_batch < 2 and bool((visited < 2).any()):
            raise InvalidArgument(
                "a batch of one video with one frame cannot be normalised, but batches may be of one video and "
                f"{int((visited < 2).sum())} videos have one frame; give a larger batch_size, or leave out these videos"
            )
        if "gates" in phases and len(self.gates) and not bool((visited > 2).any()):
            raise _nothing_to_decide()

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        visits, visited = visiting_order(views.real, self.max_frames)
        last = visited.sum(dim=1) - 1  # [B], the step that ends in any case
        probabilities = views.heavy.new_zeros(len(last), self.config["num_classes"])
        seen, gates_run = torch.zeros_like(views.real), torch.zeros_like(last)
        rows = torch.arange(len(last), device=last.device)  # videos that have not exited
        pooled = views.heavy.new_empty(0)  # [len(rows), W]
        for step in range(visits.shape[1]):
            positions = visits[rows, step]
            seen[rows, positions] = True
            features, before = self.neck(views.heavy[rows, positions]), pooled
            pooled = features if step == 0 else torch.maximum(before, features)
            leave = last[rows] == step
            if step == 0:
                first = self.activate(self.classifiers[0](pooled))
                probabilities[rows] = first
                leave = leave | (first.amax(dim=1) > self.config["first_exit"])
            else:
                gated = ~leave
                if gated.any():
                    gates_run[rows[gated]] += 1
                    value = self.gates[step - 1](pooled[gated], before[gated]).sigmoid()
                    leave[gated] = value < self.config["gate_exit"]
                probabilities[rows[leave]] = self.activate(self.classifiers[step](pooled[leave]))
            rows, pooled = rows[~leave], pooled[~leave]
            if not len(rows):
                break
        return BaselineOutput(probabilities, {"heavy": seen}, gates_run)

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        """Count the neck for each frame, the gates that ran, the first classifier and that of the exit.

        `seen.steps` counts the gates that ran; each projects two pooled features.
        """
        frames = seen.seen_heavy.sum(dim=1)
        gates_run = frames * 0 if seen.steps is None else seen.steps
        gate = sum(2 * matrix_gmacs(gate.project) + matrix_gmacs(gate.decide) for gate in self.gates[:1])
        classifiers = matrix_gmacs(self.classifiers[0]) * frames.clamp_max(2)
        return matrix_gmacs(self.neck) * frames + gate * gates_run + classifiers

    def classify_frames(self, views: Views, chosen: Tensor) -> BaselineOutput:
        """Take the maximum over the chosen frames, and the classifier of as many; from the last one on, that one."""
        frames = chosen.sum(dim=1)
        rows, positions = chosen.nonzero(as_tuple=True)
        features = self.neck(views.heavy[rows, positions])
        pooled = features.new_full((*chosen.shape, features.shape[-1]), -torch.inf)
        pooled = pooled.index_put((rows, positions), features).amax(dim=1)
        probabilities = views.heavy.new_zeros(len(chosen), self.config["num_classes"])
        for count in frames.unique().tolist():
            classifier = self.classifiers[min(count, self.max_frames) - 1]
            probabilities[frames == count] = self.activate(classifier(pooled[frames == count]))
        return BaselineOutput(probabilities, {"heavy": chosen})

    def frames_gmacs(self, seen: BaselineOutput) -> Tensor:
        return matrix_gmacs(self.neck) * seen.seen_heavy.sum(dim=1) + matrix_gmacs(self.classifiers[0])

    def phase_parameters(self, phase: str) -> Iterator[nn.Parameter]:
        for module in [self.gates] if phase == "gates" else [self.neck, self.classifiers]:
            yield from module.parameters()

    def train_phase(self, phase: str) -> None:
        self.train(phase != "gates")
        self.gates.train(phase == "gates")

    def _pooled(self, views: Views, visits: Tensor, visited: Tensor) -> Tensor:
        """Return the maximum over the first 1, 2, ... visited frames, [B, K, W]; constant after the last one."""
        rows, steps = visited.nonzero(as_tuple=True)
        features = self.neck(views.heavy[rows, visits[rows, steps]])
        frames = features.new_full((*visits.shape, features.shape[-1]), -torch.inf)
        return running_max(frames.index_put((rows, steps), features))

    def _step_losses(self, pooled: Tensor, labels: Tensor) -> Tensor:
        """Return the label loss of each step's classifier, [B, K]."""
        logits = [self.classifiers[step](pooled[:, step]) for step in range(pooled.shape[1])]
        return self.label_loss(torch.stack(logits, dim=1), labels[:, None])

    def _gate_loss(self, pooled: Tensor, exits: Tensor, visited: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values, targets = [pooled.new_zeros(0)], [pooled.new_zeros(0)]
        for step in range(1, pooled.shape[1] - 1):
            rows = visited[:, step + 1].nonzero()[:, 0]  # no gate decides at a video's last frame
            if len(rows):
                values.append(self.gates[step - 1](pooled[rows, step], pooled[rows, step - 1]))
                targets.append((~exits[rows, step]).to(pooled.dtype))
        logits, stay = torch.cat(values), torch.cat(targets)
        if not len(self.gates):
            raise _nothing_to_decide()
        if not len(logits):  # a batch of short videos; other batches have longer ones
            nothing = torch.stack([weight.sum() for weight in self.gates.parameters()]).sum() * 0
            return nothing, {"exits": nothing.detach(), "right": nothing.detach()}
        right = ((logits >= 0) == (stay > 0)).to(pooled.dtype)
        parts = {"exits": 1 - stay.mean(), "right": right.mean().detach()}
        return F.binary_cross_entropy_with_logits(logits, stay), parts


class Gate(nn.Module):
    """Decides whether to see another frame, from what was pooled until now and until the frame before.

    The sigmoid of its logit is the gate's value; a low one means exit.
    """

    def __init__(self, width: int, first: int, second: int) -> None:
        super().__init__()
        # Convolutions of size 1 on one pixel are Linear layers. The same ones project both inputs.
        self.project = nn.Sequential(_projection(width, first), _projection(first, second))
        self.decide = nn.Linear(2 * second, 1)

    def forward(self, now: Tensor, before: Tensor) -> Tensor:
        """[B, W] twice -> logits [B]."""
        both = self.project(torch.cat([now, before]))
        return self.decide(torch.cat(both.chunk(2), dim=1))[:, 0]


def read_release(path: str | Path, *, heavy_width: int, **settings: Any) -> FrameExit:
    """Return the baseline in a checkpoint that FrameExit's authors released.

    `heavy_width`: of the features that it will get: of its ResNet-50, or of the layer after it, which its classifier
    `resnet50` with head="frameexit" gives. `settings`: of the class, besides those that follow from the file.
    """
    state = read_state(path)
    if not is_frameexit_release(state):
        raise WeightsError(f"{path}: is not a checkpoint of FrameExit's authors; give one, or train the baseline")
    neck, classes = state["mlp.layers.0.weight"], len(state["classifiers.0.weight"])
    if heavy_width not in neck.shape:
        raise WeightsError(
            f"{path}: is for features of {neck.shape[1]} or {neck.shape[0]} numbers, but these have {heavy_width}; "
            "compute them with its own network"
        )
    gates = [len(state[f"exit_selector.0.conv{number}.weight"]) for number in (1, 2)]
    settings |= {"max_frames": frameexit_classifiers(state), "gate_widths": gates}
    settings["neck_width"] = None if heavy_width == len(neck) else len(neck)
    baseline = FrameExit(heavy_width, classes, **settings)
    layers = {"conv1": "project.0.0", "bn1": "project.0.1", "conv2": "project.1.0", "bn2": "project.1.1"}
    renamed: State = {}
    for key, tensor in state.items():
        part, _, rest = key.partition(".")
        if part == "classifiers":
            renamed[key] = tensor
        elif part == "mlp" and settings["neck_width"]:
            renamed[key.replace("mlp.layers.", "neck.")] = tensor
        elif part == "exit_selector":
            number, layer, leaf = rest.split(".", 2)
            if int(number) < len(baseline.gates):  # one more was released, which follows the last frame and never ran
                # Convolutions of size 1, [out, in, 1, 1].
                renamed[f"gates.{number}.{layers.get(layer, 'decide')}.{leaf}"] = (
                    tensor.flatten(1) if tensor.dim() == 4 else tensor
                )
    load_weights(baseline, renamed, where=str(path))
    baseline.requires_grad_(False).eval()
    return baseline


def visiting_order(real: Tensor, max_frames: int) -> tuple[Tensor, Tensor]:
    """Return positions in the order of visits, int64 [B, K], and which of them are visits, bool [B, K].

    Each video has FrameExit's coarse-to-fine order over its own real candidates. If these are more than `max_frames`,
    it is the order over the middles of `max_frames` equal segments. K is `max_frames`, or T if that is less.
    """
    steps = min(max_frames, real.shape[1])
    counts = real.sum(dim=1)
    ranks = torch.zeros(len(real), steps, dtype=torch.int64, device=real.device)
    for count in counts.unique().tolist():
        visits = min(count, steps)
        grid = uniform(count, visits)[frameexit_order(visits)]
        ranks[counts == count, :visits] = torch.from_numpy(grid).to(real.device)
    visited = torch.arange(steps, device=real.device) < counts[:, None]
    return candidates_of_ranks(ranks, real), visited


def running_max(frames: Tensor) -> Tensor:
    """Return the element-wise maximum over frames 0..t for every t, [B, K, W] -> [B, K, W]."""
    return torch.stack(list(accumulate(frames.unbind(1), torch.maximum)), dim=1)


def exit_labels(losses: Tensor, beta: float) -> Tensor:
    """Return where a gate should exit, bool [B, K]: the loss at step t = 0, 1, ... is at most beta·exp(t/2)."""
    steps = torch.arange(losses.shape[1], device=losses.device)
    return losses <= beta * torch.exp(steps / 2)


def _nothing_to_decide() -> InvalidArgument:
    return InvalidArgument(
        "no gate has anything to decide: a gate is between the first and the last frame; "
        "give videos with at least 3 candidates and max_frames of at least 3, or train the classifiers only"
    )


def _projection(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inner, outer), nn.BatchNorm1d(outer), nn.ReLU())
