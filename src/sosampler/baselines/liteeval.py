"""LiteEval: a small recurrent network sees every frame and decides when the large one is worth its cost.

After Wu, Xiong, Jiang and Davis, "LiteEval: A Coarse-to-Fine Framework for Resource Efficient Video Recognition",
NeurIPS 2019. As in the paper: a coarse LSTM on light features of every frame, a fine LSTM on heavy ones, a binary gate
by hard Gumbel-softmax, the first entries of the fine state replaced by the coarse state where the gate is closed, the
class layer on the fine state, and cross-entropy plus the squared distance of the gates' mean from a target. It is
online: a decision at a frame depends on no later one.
Different: both feature networks are frozen; the budget may also hold for a batch instead of each video; the schedule of
the temperature is chosen here. In training, gates are drawn; at run time a gate opens above the threshold `gate_open`,
so that the number of frames is near the target only as far as the gates are near 0 or 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sosampler._util.validation import check_bool, check_float, check_int, one_of
from sosampler.baselines.base import Baseline, BaselineOutput, Loss, Rng, Views, draw_gumbel, matrix_gmacs
from sosampler.errors import InvalidArgument

State = tuple[Tensor, Tensor]  # hidden and cell, [B, H] each


class LiteEval(Baseline):
    """Coarse and fine LSTM with a gate between them."""

    name = "liteeval"
    feature_sets = ("heavy", "light")
    threshold = "gate_open"
    threshold_values = (0.9, 0.5, 0.2, 0.05, 0.005, 0.0)  # 0 opens every gate

    def __init__(
        self,
        heavy_width: int,  # D, heavy features of a frame
        light_width: int,  # d, light features of a frame
        num_classes: int,
        *,
        coarse_width: int = 64,  # state of the coarse LSTM
        fine_width: int = 512,  # state of the fine LSTM, at least `coarse_width`
        target: float = 0.3,  # share of the frames for which the gate should open
        budget: float = 2.0,  # weight of the budget term
        budget_per: str = "video",  # the target holds for every video; "batch": videos may differ
        temperature: tuple[float, float] = (5.0, 0.5),  # of the Gumbel-softmax at the start and at the end of training
        gate_open: float = 0.5,  # at run time the gate opens where its probability is above this; 0 opens it always
        multi_label: bool = False,  # probabilities by sigmoid instead of softmax
    ) -> None:
        if fine_width < coarse_width:
            raise InvalidArgument(
                f"fine_width={fine_width!r} is less than coarse_width={coarse_width!r}, which is copied into it; "
                "give at least as much"
            )
        if check_float("target", target, at_least=0) > 1:
            raise InvalidArgument(f"target={target!r} must be a share of frames from 0 to 1")
        if check_float("gate_open", gate_open, at_least=0) > 1:
            raise InvalidArgument(f"gate_open={gate_open!r} must be a probability from 0 to 1")
        if len(temperature) != 2:
            raise InvalidArgument(f"temperature={temperature!r} must be two numbers, at the start and at the end")
        config = {
            "heavy_width": check_int("heavy_width", heavy_width),
            "light_width": check_int("light_width", light_width),
            "num_classes": check_int("num_classes", num_classes),
            "coarse_width": check_int("coarse_width", coarse_width),
            "fine_width": check_int("fine_width", fine_width),
            "target": float(target),
            "budget": check_float("budget", budget, at_least=0),
            "budget_per": one_of("budget_per", budget_per, ("video", "batch")),
            "temperature": [check_float("temperature", value, above=0) for value in temperature],
            "gate_open": float(gate_open),
            "multi_label": check_bool("multi_label", multi_label),
        }
        super().__init__(config)
        self.coarse = nn.LSTMCell(light_width, coarse_width)
        self.fine = nn.LSTMCell(heavy_width + light_width, fine_width)
        self.gate = nn.Linear(coarse_width + fine_width, 2)  # closed, open
        self.classify = nn.Linear(fine_width, num_classes)

    def temperature(self, progress: float) -> float:
        """Return the temperature, which falls from the first to the second value by the same factor in each step."""
        start, end = self.config["temperature"]
        return float(start * (end / start) ** progress)

    def loss(
        self, views: Views, labels: Tensor, *, generator: Rng = None, progress: float = 1.0, phase: str | None = None
    ) -> Loss:
        """Return the label loss after the last frame + budget · (mean gate − target)²."""
        real, views = views.real, views.filled()
        coarse, fine = self._start(views)
        temperature, gates = self.temperature(progress), []
        for step in range(real.shape[1]):
            light, heavy, here = views.light[:, step], views.heavy[:, step], real[:, step, None]
            next_coarse = self.coarse(light, coarse)
            noise = draw_gumbel((len(light), 2), generator, light.device)
            soft = ((self._gate_logits(next_coarse, fine) + noise) / temperature).softmax(dim=1)[:, 1:]
            hard = (soft > 0.5).to(soft.dtype)
            opened = hard + soft - soft.detach()  # forward 0 or 1, backward the gradient of the soft gate
            sharp, synchronised = self.fine(torch.cat([heavy, light], dim=1), fine), synchronise(fine, next_coarse)
            coarse = _where(here, next_coarse, coarse)
            fine = _where(here, _mix(opened, sharp, synchronised), fine)
            gates.append(torch.where(here, opened, 0)[:, 0])
        opened_frames, frames = torch.stack(gates, dim=1).sum(dim=1), real.sum(dim=1)
        usage = opened_frames.sum() / frames.sum()
        shares = opened_frames / frames if self.config["budget_per"] == "video" else usage
        budget = ((shares - self.config["target"]) ** 2).mean()
        label = self.label_loss(self.classify(fine[0]), labels).mean()
        parts = {"label": label.detach(), "budget": budget.detach(), "usage": usage.detach()}
        return label + self.config["budget"] * budget, parts

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        return self._classified(views, None)

    def classify_frames(self, views: Views, chosen: Tensor) -> BaselineOutput:
        """Open the gate at the chosen frames; the coarse LSTM sees every frame, as always."""
        return self._classified(views, chosen)

    def _classified(self, views: Views, chosen: Tensor | None) -> BaselineOutput:
        """Classify with gates that open at the frames `chosen`, bool [B, T]; None: where they decide to."""
        real = views.real
        coarse, fine = self._start(views)
        opened = torch.zeros_like(real)
        min_gap = torch.tensor(self.config["gate_open"], dtype=torch.float64).logit().item()  # of the gate's two logits
        for step in range(real.shape[1]):
            rows = real[:, step].nonzero()[:, 0]
            if not len(rows):
                continue
            light = views.light[rows, step]
            fine_here = _rows(fine, rows)
            coarse_here = self.coarse(light, _rows(coarse, rows))
            if chosen is None:
                logits = self._gate_logits(coarse_here, fine_here)
                opens = logits[:, 1] - logits[:, 0] > min_gap
            else:
                opens = chosen[rows, step]
            opening = opens.nonzero()[:, 0]
            next_fine = synchronise(fine_here, coarse_here)
            if len(opening):
                # Heavy features are read only here.
                opened[rows[opening], step] = True
                heavy = views.heavy[rows[opening], step]
                sharp = self.fine(torch.cat([heavy, light[opening]], dim=1), _rows(fine_here, opening))
                next_fine = _put(next_fine, opening, sharp)
            coarse, fine = _put(coarse, rows, coarse_here), _put(fine, rows, next_fine)
        return BaselineOutput(self.activate(self.classify(fine[0])), {"heavy": opened, "light": real})

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        """Count coarse LSTM and gate for each frame, the fine LSTM where the gate opened, the class layer once."""
        return self.frames_gmacs(seen) + matrix_gmacs(self.gate) * seen.seen_light.sum(dim=1)

    def frames_gmacs(self, seen: BaselineOutput) -> Tensor:
        coarse = matrix_gmacs(self.coarse) * seen.seen_light.sum(dim=1)
        return coarse + matrix_gmacs(self.fine) * seen.seen_heavy.sum(dim=1) + matrix_gmacs(self.classify)

    def _start(self, views: Views) -> tuple[State, State]:
        widths = (self.config["coarse_width"], self.config["fine_width"])
        coarse, fine = (views.light.new_zeros(len(views.light), width) for width in widths)
        return (coarse, coarse), (fine, fine)

    def _gate_logits(self, coarse: State, fine: State) -> Tensor:
        """Return [B, 2] from the coarse state after this frame and the fine one before it."""
        return self.gate(torch.cat([coarse[0], fine[0]], dim=1))


def synchronise(fine: State, coarse: State) -> State:
    """Return the fine state with its first entries replaced by the coarse one."""
    width = coarse[0].shape[1]
    hidden, cell = (torch.cat([small, large[:, width:]], dim=1) for small, large in zip(coarse, fine, strict=True))
    return hidden, cell


def _mix(gate: Tensor, opened: State, closed: State) -> State:
    """Mix two states by the gate [B, 1], which gets a gradient."""
    return gate * opened[0] + (1 - gate) * closed[0], gate * opened[1] + (1 - gate) * closed[1]


def _where(here: Tensor, new: State, old: State) -> State:
    return torch.where(here, new[0], old[0]), torch.where(here, new[1], old[1])


def _rows(state: State, rows: Tensor) -> State:
    return state[0][rows], state[1][rows]


def _put(state: State, rows: Tensor, new: State) -> State:
    """Replace some rows of a state."""
    return state[0].index_copy(0, rows, new[0]), state[1].index_copy(0, rows, new[1])
