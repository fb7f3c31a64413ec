"""Views of a bank's videos: kept features of the candidates that a system may look at."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosampler.checks import whole_number
from sosampler.data.bank import Bank
from sosampler.data.positions import uniform_positions
from sosampler.errors import InvalidArgument
from sosampler.systems.base import Views
from sosampler.training.examples import multi_hot


def bank_views(bank: Bank, *, heavy: Any, light: Any = None, num_candidates: int | None = 10) -> tuple[Views, Tensor]:
    """Features of T candidates of each video, evenly spread, and the labels [V, C].

    All are in memory, as precise as they are kept: 2 bytes a number in half precision, else 4.
    A video with fewer stored frames offers each once; the rest of its row is padding. Videos without a label are left
    out.

    Args:
        bank: a bank or one split of it, with features that `add_features` wrote.
        heavy, light: which features: names, fingerprints or the networks themselves, as `Bank.features` takes them.
            None for light: a system that looks at no light features gets some of width 0.
        num_candidates: T; None: every stored frame, T is then the number of the longest video.
    """
    rows = [row for row, item in enumerate(bank.items) if item.labels]
    if not rows:
        raise InvalidArgument(f"{bank.path}: no video of this part has a label; give another split")
    stored = [len(bank[row]) for row in rows]
    count = max(stored) if num_candidates is None else whole_number("num_candidates", num_candidates)
    places = [np.unique(uniform_positions(one, count)) for one in stored]
    mask = torch.zeros(len(rows), count, dtype=torch.bool)
    for video, chosen in enumerate(places):
        mask[video, : len(chosen)] = True
    first = _features(bank, heavy, rows, places, count)
    second = first[:, :, :0] if light is None else _features(bank, light, rows, places, count)
    labels = torch.stack([multi_hot(bank.rows[row].item.labels, len(bank.classes)) for row in rows])
    return Views(first, second, None if mask.all() else mask), labels


def _features(bank: Bank, name: Any, rows: list[int], places: list[np.ndarray], count: int) -> Tensor:
    """[V, T, D], zeros where a video has no more frames."""
    kept = bank.features(name)
    found = np.zeros((len(rows), count, kept.width), dtype=kept.precision)
    for video, (row, chosen) in enumerate(zip(rows, places, strict=True)):
        found[video, : len(chosen)] = kept[row][chosen]
    return torch.from_numpy(found)
