"""VideoIQ: for every frame, how many bits the network that classifies it has, or none.

After Sun, Panda, Chen, Oliva, Feris and Saenko, "Dynamic Network Quantization for Efficient Video Inference",
ICCV 2021. As in the paper: an any-precision network (`classifiers/any_precision.py`) at 32, 4 or 2 bits, or a skip of
the frame; a policy of an LSTM on light features of every frame; decisions by hard Gumbel-softmax with straight-through
gradient; one class layer for all widths on the mean over the frames that were processed; its losses and their weights.
Different: all feature networks are frozen, MobileNetV2 of the policy too; the class layer is trained on the stored
features in a phase of its own and frozen in that of the policy; the decision at run time is the likeliest one, without
noise; a video whose frames are all skipped is classified by the bias of the class layer; the penalty on dear actions at
run time is ours.

Its cost is counted twice: in multiply-adds, of which all widths take the same, since no GPU gains anything from such
widths; and as published in bit operations ("bits"), where 8 x 8 bits and more count as one multiply-add.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.validation import check_bool, check_float, check_int
from sosampler.baselines.base import Baseline, BaselineOutput, Loss, Rng, Views, draw_gumbel, matrix_gmacs
from sosampler.classifiers.any_precision import WIDTHS, AnyPrecisionClassifier
from sosampler.errors import InvalidArgument

SETS = tuple(f"bits{bits}" for bits in WIDTHS)
SKIP = len(WIDTHS)  # the last action
_NETWORK = (
    "an any-precision network as classifier (--classifier FOLDER; `sosampler train-classifier DATA "
    "-c any_precision_resnet50 --weights PLAIN/model.safetensors --out FOLDER` makes one of a ResNet-50)"
)
# Bit operations of each action relative to 8 x 8 bits, at which a multiply-add counts as one.
COSTS = (*(min(bits, 8) ** 2 / 64 for bits in WIDTHS), 0.0)


class VideoIQ(Baseline):
    """A policy that chooses the width in bits for each frame, and a class layer."""

    name = "videoiq"
    feature_sets = (*SETS, "light")
    classifying_sets = SETS
    light_size = 84
    made_of = dict.fromkeys(SETS, _NETWORK)
    phases = ("classifier", "policy")
    threshold = "penalty"
    threshold_values = (16.0, 8.0, 4.0, 2.0, 1.0, 0.0)

    def __init__(
        self,
        bits32_width: int,  # D, features of a frame at each width, which must be the same
        bits4_width: int,
        bits2_width: int,
        light_width: int,  # d, light features of a frame
        num_classes: int,
        *,
        bits32_gmacs: float = 4.089,  # of a frame at any width
        light_gmacs: float = 0.052,
        policy_width: int = 512,  # state of the policy's LSTM
        dropout: float = 0.8,  # of the light features
        efficiency: float = 0.16,  # weight of the mean cost of actions, 1 = all at 32 bits
        balance: float = 1.0,  # weight of the squared distance of actions' usage from equal usage
        entropy: float = 0.0,  # weight of the entropy of decisions; the paper has .1 on Mini-Sports1M
        temperature: tuple[float, float] = (5.0, 0.53),  # of the Gumbel-softmax at the start and at the end of training
        penalty: float = 0.0,  # at run time, times the cost of each action, taken off its logit
        multi_label: bool = False,  # probabilities by sigmoid instead of softmax
    ) -> None:
        widths = (bits32_width, bits4_width, bits2_width)
        if len(set(widths)) > 1:
            raise InvalidArgument(
                f"features at 32, 4 and 2 bits have {bits32_width}, {bits4_width} and {bits2_width} numbers a frame, "
                "but share a class layer; give those of one any-precision network"
            )
        if check_float("dropout", dropout, at_least=0) >= 1:
            raise InvalidArgument(f"dropout={dropout!r} must be at least 0 and below 1")
        if len(temperature) != 2:
            raise InvalidArgument(f"temperature={temperature!r} must be two numbers, at the start and at the end")
        config = {
            **{f"{name}_width": check_int(f"{name}_width", width) for name, width in zip(SETS, widths, strict=True)},
            "light_width": check_int("light_width", light_width),
            "num_classes": check_int("num_classes", num_classes),
            "bits32_gmacs": check_float("bits32_gmacs", bits32_gmacs, at_least=0),
            "light_gmacs": check_float("light_gmacs", light_gmacs, at_least=0),
            "policy_width": check_int("policy_width", policy_width),
            "dropout": float(dropout),
            "efficiency": check_float("efficiency", efficiency, at_least=0),
            "balance": check_float("balance", balance, at_least=0),
            "entropy": check_float("entropy", entropy, at_least=0),
            "temperature": [check_float("temperature", value, above=0) for value in temperature],
            "penalty": check_float("penalty", penalty, at_least=0),
            "multi_label": check_bool("multi_label", multi_label),
        }
        super().__init__(config)
        self.dropout = nn.Dropout(dropout)
        self.policy = nn.LSTMCell(light_width, policy_width)
        self.action = nn.Linear(policy_width, len(COSTS))
        self.policy_classify = nn.Linear(policy_width, num_classes)  # in training alone
        self.classify = nn.Linear(bits32_width, num_classes)

    def frame_network(self, name: str, classifier: Any, weights: str | Path | None) -> Any:
        """Return an any-precision classifier at the width of a set."""
        return classifier.with_bits(_bits_of(name)) if isinstance(classifier, AnyPrecisionClassifier) else None

    def take_networks(self, networks: Mapping[str, Any], weights: str | Path | None) -> None:
        """Refuse a network of another width in a set; nothing is taken."""
        for name in SETS:
            bits = getattr(networks[name], "bits", None)
            if networks[name] is not None and bits != _bits_of(name):
                raise InvalidArgument(
                    f"{name} is given {networks[name].name} at {bits or 'its one width of 32'} bits; give "
                    "the any-precision network as classifier, or in Python NETWORK.with_bits for each set"
                )

    def temperature(self, progress: float) -> float:
        """Return the temperature, which falls from the first to the second value by the same factor in each step."""
        start, end = self.config["temperature"]
        return float(start * (end / start) ** progress)

    def phase_parameters(self, phase: str) -> Iterator[nn.Parameter]:
        of_policy = (self.policy, self.action, self.policy_classify)
        for module in (self.classify,) if phase == "classifier" else of_policy:
            yield from module.parameters()

    def loss(
        self, views: Views, labels: Tensor, *, generator: Rng = None, progress: float = 1.0, phase: str | None = None
    ) -> Loss:
        """Return that of the class layer at every width, or that of the policy; see the two methods."""
        views = views.filled()
        if phase in (None, "classifier"):
            return self._classifier_loss(views, labels)
        return self._policy_loss(views, labels, generator, self.temperature(progress))

    def _classifier_loss(self, views: Views, labels: Tensor) -> Loss:
        """Return the label loss of all frames at each width, and for 4 and 2 bits also that of imitating 32 bits."""
        real = views.real[:, :, None]
        first, *others = (self.classify((views[name] * real).sum(dim=1) / real.sum(dim=1)) for name in SETS)
        parts = {"label": self.label_loss(first, labels).mean()}
        parts["label_low"] = sum((self.label_loss(logits, labels).mean() for logits in others), first.new_zeros(()))
        parts["imitation"] = sum((self._imitation(logits, first).mean() for logits in others), first.new_zeros(()))
        return sum(parts.values(), first.new_zeros(())), {name: part.detach() for name, part in parts.items()}

    def _policy_loss(self, views: Views, labels: Tensor, generator: Rng, temperature: float) -> Loss:
        """Return label loss + imitation of 32 bits + label loss of the policy + w_e E + w_b B + w_h H.

        E: mean over frames of the cost of the drawn action. B: squared distance of the actions' usage from equal usage,
        summed. H: mean entropy of the decisions, which is made small: they become sure.
        """
        real = views.real
        hidden = self._hidden(views)  # [B, T, H]
        logits = self.action(hidden).log_softmax(dim=-1)  # [B, T, 4]
        noise = draw_gumbel(tuple(logits.shape), generator, logits.device)
        soft = ((logits + noise) / temperature).softmax(dim=-1)
        hard = F.one_hot(soft.argmax(dim=-1), len(COSTS)).to(soft.dtype)
        actions = (hard + soft - soft.detach()) * real[:, :, None]  # forward one-hot, backward the gradient of the soft
        classes = self._class_logits(views, actions)
        full = F.one_hot(torch.zeros_like(real, dtype=torch.int64), len(COSTS)) * real[:, :, None]
        with torch.no_grad():
            taught = self._class_logits(views, full.to(soft.dtype))
        frames = real.sum()
        usage = actions.sum(dim=(0, 1)) / frames
        mean_hidden = (hidden * real[:, :, None]).sum(dim=1) / real.sum(dim=1, keepdim=True)
        parts = {
            "label": self.label_loss(classes, labels).mean(),
            "imitation": self._imitation(classes, taught).mean(),
            "policy_label": self.label_loss(self.policy_classify(mean_hidden), labels).mean(),
            "cost": usage @ usage.new_tensor(COSTS),
            "balance": ((usage - 1 / len(COSTS)) ** 2).sum(),
            "entropy": -((logits.exp() * logits).sum(dim=-1) * real).sum() / frames,
        }
        config = self.config
        weights = {"cost": config["efficiency"], "balance": config["balance"], "entropy": config["entropy"]}
        loss = sum((weights.get(name, 1.0) * part for name, part in parts.items()), classes.new_zeros(()))
        return loss, {name: part.detach() for name, part in parts.items()}

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        hidden = self._hidden(views.filled())
        logits = self.action(hidden) - self.config["penalty"] * hidden.new_tensor(COSTS)
        return self._classified(views, logits.argmax(dim=-1), views.real)

    def classify_frames(self, views: Views, chosen: Tensor) -> BaselineOutput:
        """See the chosen frames at 32 bits; the policy does not run."""
        return self._classified(views, torch.where(chosen, 0, SKIP), torch.zeros_like(chosen))

    def _classified(self, views: Views, actions: Tensor, looked: Tensor) -> BaselineOutput:
        """Classify by the actions int64 [B, T]; `looked`: bool [B, T], frames at which the policy looked."""
        real = views.real
        seen = {name: (actions == number) & real for number, name in enumerate(SETS)}
        # Frames are read only in the set that they were seen in.
        used = {name: views[name].masked_fill(~frames[:, :, None], 0) for name, frames in seen.items()}
        weights = torch.stack([*seen.values(), torch.zeros_like(real)], dim=-1)
        logits = self._class_logits(Views(used), weights.to(views[SETS[0]].dtype))
        output = BaselineOutput(self.activate(logits), {**seen, "light": looked})
        prices = (*(share * self.config["bits32_gmacs"] for share in COSTS[:SKIP]), self.config["light_gmacs"])
        spent = [price * frames.sum(dim=1) for price, frames in zip(prices, output.seen.values(), strict=True)]
        return output._replace(other_gmacs={"bits": sum(spent, self.own_gmacs(output))})

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        """Count LSTM and action layer for each frame, the class layer once."""
        return self.frames_gmacs(seen) + matrix_gmacs(self.policy, self.action) * seen.seen_light.sum(dim=1)

    def frames_gmacs(self, seen: BaselineOutput) -> Tensor:
        return torch.full((len(seen.probabilities),), matrix_gmacs(self.classify), device=seen.probabilities.device)

    def _hidden(self, views: Views) -> Tensor:
        """Return the policy's state after each frame, [B, T, H]; padding leaves it as it is."""
        light, real = self.dropout(views.light), views.real
        hidden = cell = light.new_zeros(len(light), self.config["policy_width"])
        states = []
        for step in range(real.shape[1]):
            here = real[:, step, None]
            next_hidden, next_cell = self.policy(light[:, step], (hidden, cell))
            hidden, cell = torch.where(here, next_hidden, hidden), torch.where(here, next_cell, cell)
            states.append(hidden)
        return torch.stack(states, dim=1)

    def _class_logits(self, views: Views, actions: Tensor) -> Tensor:
        """Return logits [B, C] of the mean over processed frames, from one-hot actions [B, T, 4]; of none: the bias."""
        summed = sum(torch.einsum("bt,btd->bd", actions[:, :, number], views[name]) for number, name in enumerate(SETS))
        processed = actions[:, :, :SKIP].sum(dim=(1, 2))
        return self.classify(summed / processed.clamp_min(1)[:, None])

    def _imitation(self, logits: Tensor, taught: Tensor) -> Tensor:
        """Return the loss [B] of logits whose target are the probabilities of `taught`, without a gradient there."""
        target = self.activate(taught.detach())
        if self.multi_label:
            return F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(dim=-1)
        return -(target * logits.log_softmax(dim=-1)).sum(dim=-1)


def _bits_of(name: str) -> int:
    """Return the width of a set in bits."""
    return int(name.removeprefix("bits"))
