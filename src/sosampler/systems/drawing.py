"""Which frames a system is shown in training: others in every epoch where more are known than it is offered."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sosampler.systems.base import Views
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
