"""AR-Net: a small network chooses for every frame the resolution and the network that it is worth, or skips frames.

After Meng et al., "AR-Net: Adaptive Frame Resolution for Efficient Action Recognition", ECCV 2020. As there: an LSTM on
features of MobileNetV2 at 84 pixels chooses one of seven actions for a frame: ResNet-50 at 224, ResNet-34 at 168 or
ResNet-18 at 112 pixels, its own prediction, or to skip this and the following frames (1, 2 or 4 in all); the logits of
a video are the mean over the frames that were processed by anything; actions are drawn by hard Gumbel-softmax with
straight-through gradients; the loss is alpha · cross-entropy + (1 − alpha) · (E + balance · U), E the multiply-adds of
the actions and U the distance of the seven usage shares from equal ones; three phases: class layers of each network
alone, all jointly, class layers again with the policy fixed.
Different: the four networks are frozen and their features computed once, so that only class layers, LSTM and the two
heads are trained; class layers take the place of whole networks in the first and last phase. Inside a skip both states
of the LSTM stand still and the frames are not read, in training too; the authors' code puts back the hidden state
alone, so that its cell state sees frames that are counted as skipped. At run time the likeliest action is taken and
the same views give the same output; the authors' code draws it. The price of an action comes from the bank. The LSTM
and the class layers are counted in the cost, the light network once for each frame at which the policy looked. Several
labels share the cross-entropy. The threshold is ours: `cost_penalty` times the price of an action is taken from its
logit; 0 is as trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sosampler._util.validation import check_bool, check_float, check_int
from sosampler.baselines.base import Baseline, BaselineOutput, Loss, Rng, Views, draw_gumbel, matrix_gmacs
from sosampler.errors import InvalidArgument

BACKBONES = ("heavy", "r34", "r18")  # sets that have a class layer of their own; actions 0, 1, 2
OWN = 3  # the action that takes the policy's own prediction; skips follow
_UNREAL = -1  # no action: padding
_MIN_PROBABILITY = 1e-8  # of an action, as in the authors' code


class Actions(NamedTuple):
    """What was chosen for B videos of T frames."""

    chosen: Tensor  # int64 [B, T]; inside a skip the action that began it; -1 for padding
    looked: Tensor  # bool [B, T], frames at which the policy looked: real ones that are not inside a skip
    hidden: Tensor  # [B, T, H], state of the LSTM after each frame
    weights: Tensor  # [B, T, A], one-hot of `chosen` with the gradient of the soft action; 0 for padding


class ARNet(Baseline):
    """Policy LSTM on light features, and class layers on those of three networks."""

    name = "ar-net"
    feature_sets = (*BACKBONES, "light")
    classifying_sets = BACKBONES
    light_size = 84
    phases = ("class_layers", "policy", "refit")  # of the authors
    threshold = "cost_penalty"
    threshold_values = (4.0, 2.0, 1.0, 0.5, 0.2, 0.0)

    def __init__(
        self,
        heavy_width: int,  # features of a frame from ResNet-50 at 224 pixels
        r34_width: int,  # from ResNet-34 at 168
        r18_width: int,  # from ResNet-18 at 112
        light_width: int,  # from MobileNetV2 at 84
        num_classes: int,
        *,
        heavy_gmacs: float = 4.089,  # of one frame
        r34_gmacs: float = 2.245,
        r18_gmacs: float = 0.485,
        hidden: int = 512,  # state of the LSTM
        skips: Sequence[int] = (1, 2, 4),  # frames that each skip leaves out, this one among them
        dropout: float = 0.5,  # before the LSTM and the class layers
        alpha: float = 0.95,  # weight of the cross-entropy; the rest is that of the cost
        balance: float = 3.0,  # weight of the distance from equal usage, within the cost
        temperature: tuple[float, float] = (5.0, 0.53),  # of the Gumbel-softmax at the start and the end of "policy"
        cost_penalty: float = 0.0,  # at run time taken from the logit of an action, for each of its GMACs
        multi_label: bool = False,  # probabilities by sigmoid instead of softmax
    ) -> None:
        if check_float("alpha", alpha, at_least=0) > 1:
            raise InvalidArgument(f"alpha={alpha!r} must be a weight from 0 to 1")
        if check_float("dropout", dropout, at_least=0) >= 1:
            raise InvalidArgument(f"dropout={dropout!r} must be a share from 0 to below 1")
        if len(temperature) != 2:
            raise InvalidArgument(f"temperature={temperature!r} must be two numbers, at the start and at the end")
        widths = {"heavy": heavy_width, "r34": r34_width, "r18": r18_width, "light": light_width}
        prices = {"heavy": heavy_gmacs, "r34": r34_gmacs, "r18": r18_gmacs}
        config = {
            **{f"{name}_width": check_int(f"{name}_width", width) for name, width in widths.items()},
            "num_classes": check_int("num_classes", num_classes),
            **{f"{name}_gmacs": check_float(f"{name}_gmacs", price, at_least=0) for name, price in prices.items()},
            "hidden": check_int("hidden", hidden),
            "skips": [check_int("skips", count) for count in skips],
            "dropout": float(dropout),
            "alpha": float(alpha),
            "balance": check_float("balance", balance, at_least=0),
            "temperature": [check_float("temperature", value, above=0) for value in temperature],
            "cost_penalty": check_float("cost_penalty", cost_penalty, at_least=0),
            "multi_label": check_bool("multi_label", multi_label),
        }
        super().__init__(config)
        self.drop_light, self.drop = nn.Dropout(dropout), nn.Dropout(dropout)
        self.cell = nn.LSTMCell(light_width, hidden)
        self.act = nn.Linear(hidden, OWN + 1 + len(skips))
        self.answer = nn.Linear(hidden, num_classes)  # the policy's own prediction
        self.classify = nn.ModuleDict({name: nn.Linear(widths[name], num_classes) for name in BACKBONES})
        for layer in (self.act, self.answer, *self.classify.values()):
            nn.init.normal_(layer.weight, std=0.001)
            nn.init.zeros_(layer.bias)

    def temperature(self, progress: float) -> float:
        """Return the temperature, which falls from the first to the second value by the same factor in each step."""
        start, end = self.config["temperature"]
        return float(start * (end / start) ** progress)

    def prices(self, device: torch.device) -> Tensor:
        """Return GMACs of each action [A]; the policy's own prediction and skips add nothing to what always runs."""
        gmacs = [self.config[f"{name}_gmacs"] for name in BACKBONES]
        return torch.tensor([*gmacs, *[0.0] * (self.act.out_features - len(gmacs))], device=device)

    def loss(
        self, views: Views, labels: Tensor, *, generator: Rng = None, progress: float = 1.0, phase: str | None = None
    ) -> Loss:
        """Phase "class_layers": label loss of each network's mean logits over all frames, mean over the networks.

        Phases "policy" and "refit": alpha · label loss + (1 − alpha) · (E + balance · U).
        """
        views = views.filled()
        if phase in (None, "class_layers"):
            losses = {name: self.label_loss(self._alone(views, name), labels).mean() for name in BACKBONES}
            return torch.stack([*losses.values()]).mean(), {name: loss.detach() for name, loss in losses.items()}
        # The temperature changes the gradient of the policy alone, not what is drawn: in "refit" it is of no account.
        actions = self._drawn(views, self.temperature(progress), generator)
        each = [self.classify[name](self.drop(views[name])) for name in BACKBONES]
        logits = torch.stack([*each, self.answer(actions.hidden)], dim=2)  # [B, T, 4, C]
        used = actions.weights[:, :, : OWN + 1]
        processed = used.detach().sum(dim=(1, 2)).clamp_min(1)
        label = self.label_loss((used[..., None] * logits).sum(dim=(1, 2)) / processed[:, None], labels).mean()
        usage = usage_shares(actions.weights)
        cost, spread = (usage * self.prices(usage.device)).sum(), imbalance(usage)
        alpha, balance = self.config["alpha"], self.config["balance"]
        parts = {"label": label, "cost": cost, "balance": spread, "processed": usage[: OWN + 1].sum()}
        total = alpha * label + (1 - alpha) * (cost + balance * spread)
        return total, {name: value.detach() for name, value in parts.items()}

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        penalty = self.config["cost_penalty"] * self.prices(views.real.device)
        actions = self._unroll(views, lambda logits: _one_hot(logits - penalty))
        seen = {name: actions.chosen == number for number, name in enumerate(BACKBONES)}
        parts = [(self.classify[name], views[name], frames) for name, frames in seen.items()]
        parts.append((self.answer, actions.hidden, actions.chosen == OWN))
        own = matrix_gmacs(self.cell, self.act) * actions.looked.sum(dim=1)
        own = sum((matrix_gmacs(layer) * frames.sum(dim=1) for layer, _, frames in parts), own)
        probabilities = self.activate(self._mean_logits(views, parts))
        return BaselineOutput(probabilities, {**seen, "light": actions.looked}, own=own)

    def classify_frames(self, views: Views, chosen: Tensor) -> BaselineOutput:
        """Run ResNet-50 on the chosen frames; the policy does not look."""
        layer = self.classify["heavy"]
        probabilities = self.activate(self._mean_logits(views, [(layer, views.heavy, chosen)]))
        return BaselineOutput(probabilities, {"heavy": chosen}, own=matrix_gmacs(layer) * chosen.sum(dim=1))

    def frames_gmacs(self, seen: BaselineOutput) -> Tensor:
        return self.own_gmacs(seen)

    def phase_parameters(self, phase: str) -> Iterator[nn.Parameter]:
        yield from (self if phase == "policy" else self.classify).parameters()

    def train_phase(self, phase: str) -> None:
        self.train()
        self.drop_light.train(phase == "policy")  # otherwise the policy is fixed

    def _alone(self, views: Views, name: str) -> Tensor:
        """Return mean logits [B, C] of one network over all real frames, as TSN does."""
        logits = self.classify[name](self.drop(views[name])).masked_fill(~views.real[:, :, None], 0)
        return logits.sum(dim=1) / views.real.sum(dim=1, keepdim=True)

    def _drawn(self, views: Views, temperature: float, generator: Rng) -> Actions:
        """Draw actions for training."""

        def draw(logits: Tensor) -> Tensor:
            logs = logits.softmax(dim=1).clamp_min(_MIN_PROBABILITY).log()
            noise = draw_gumbel((len(logits), logits.shape[1]), generator, logits.device)
            soft = ((logs + noise) / temperature).softmax(dim=1)
            # Forward 0 or 1, backward the gradient of the soft action.
            return _one_hot(soft) + soft - soft.detach()

        return self._unroll(views, draw)

    def _unroll(self, views: Views, choose: Callable[[Tensor], Tensor]) -> Actions:
        """Run the policy over all frames; `choose` maps logits [N, A] to weights of actions, one of them 1."""
        real = views.real
        skips = torch.tensor([0] * (OWN + 1) + self.config["skips"], device=real.device)  # frames left out, by action
        hidden = cell = views.light.new_zeros(len(real), self.config["hidden"])
        weights = views.light.new_zeros(len(real), len(skips))
        remaining = torch.zeros(len(real), dtype=torch.int64, device=real.device)  # frames of a skip, from here on
        looks, states, chosen = [], [], []
        for step in range(real.shape[1]):
            here = real[:, step]
            looks.append(here & (remaining == 0))
            rows = looks[-1].nonzero()[:, 0]
            if len(rows):  # light features are read only here
                state = self.cell(self.drop_light(views.light[rows, step]), (hidden[rows], cell[rows]))
                hidden, cell = (old.index_copy(0, rows, new) for old, new in zip((hidden, cell), state, strict=True))
                action = choose(self.act(state[0]))
                weights = weights.index_copy(0, rows, action)
                remaining = remaining.index_copy(0, rows, skips[action.argmax(dim=1)])
            remaining = torch.where(here, (remaining - 1).clamp_min(0), remaining)
            states.append(hidden)
            chosen.append(weights * here[:, None])
        all_weights = torch.stack(chosen, dim=1)
        actions = torch.where(real, all_weights.detach().argmax(dim=2), _UNREAL)
        return Actions(actions, torch.stack(looks, dim=1), torch.stack(states, dim=1), all_weights)

    def _mean_logits(self, views: Views, parts: Sequence[tuple[nn.Module, Tensor, Tensor]]) -> Tensor:
        """Return mean logits [B, C] over the frames of all parts; 0 where there are none.

        A part is a class layer, its features [B, T, D], and the frames bool [B, T] for which it is taken.
        """
        total = views.heavy.new_zeros(len(views), self.config["num_classes"])
        processed = total.new_zeros(len(views), 1)
        for layer, features, frames in parts:
            rows, positions = frames.nonzero(as_tuple=True)
            total = total.index_add(0, rows, layer(features[rows, positions]))  # features are read only here
            processed += frames.sum(dim=1, keepdim=True)
        return total / processed.clamp_min(1)


def _one_hot(values: Tensor) -> Tensor:
    """Return 1 at the first largest value of each row [N, A], else 0."""
    return torch.zeros_like(values).scatter_(1, values.argmax(dim=1, keepdim=True), 1.0)


def usage_shares(weights: Tensor) -> Tensor:
    """Return the share [A] of real frames that each action has, from one-hot weights [B, T, A]; their sum is 1."""
    total = weights.sum(dim=(0, 1))
    return total / total.detach().sum()


def imbalance(usage: Tensor) -> Tensor:
    """Return the distance of usage shares [A] from equal ones."""
    return torch.linalg.vector_norm(usage - usage.mean())
