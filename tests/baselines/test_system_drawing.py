"""What a system is shown in training: other frames in every epoch, in float32, from views that stay as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sosampler.baselines.base import Baseline, Views
from sosampler.errors import InvalidArgument
from sosampler.training.baseline_data import draw_candidates
from sosampler.training.train_baseline import fit
from sosampler.video.candidates import stratified_positions
from tests.factories import two_sets


class Watching(Baseline):
    """Remembers what it was shown."""

    name = "watching"

    def __init__(self) -> None:
        super().__init__({"heavy_width": 1, "num_classes": 2})
        self.layer = nn.Linear(1, 2)
        self.shown: list[Views] = []

    def loss(
        self,
        views: Views,
        labels: Tensor,
        *,
        generator: torch.Generator | None = None,
        progress: float = 1.0,
        phase: str | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.shown.append(views)
        return self.layer(views.filled().heavy).mean(), {}


def numbered(lengths: list[int], dtype: torch.dtype = torch.float16) -> tuple[Views, Tensor]:
    """Heavy features that are 100 · video + frame, light ones the negative of it; padding is NaN."""
    longest = max(lengths)
    heavy = (100 * torch.arange(len(lengths))[:, None] + torch.arange(longest))[:, :, None].to(dtype)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    heavy = heavy.masked_fill(~mask[:, :, None], torch.nan)
    labels = torch.zeros(len(lengths), 2)
    labels[:, 0] = 1
    return two_sets(heavy, -heavy, None if bool(mask.all()) else mask), labels


def seen(system: Watching, epochs: int) -> list[dict[int, list[int]]]:
    """For each epoch the frames that each video showed."""
    steps = len(system.shown) // epochs
    found: list[dict[int, list[int]]] = []
    for epoch in range(epochs):
        found.append({})
        for views in system.shown[epoch * steps : (epoch + 1) * steps]:
            for heavy, light, real in zip(views.heavy, views.light, views.real, strict=True):
                assert torch.equal(light[real], -heavy[real])
                numbers = heavy[real][:, 0].int().tolist()
                found[-1][numbers[0] // 100] = [number % 100 for number in numbers]
    return found


def test_every_epoch_shows_other_frames_one_of_each_stretch() -> None:
    lengths, epochs = [12, 12, 10, 3, 12, 4], 30
    system, (views, labels) = Watching(), numbered(lengths)
    fit(system, views, labels, num_candidates=4, epochs=epochs, batch_size=4, lr=1e-9)
    shown = seen(system, epochs)
    for video, length in enumerate(lengths):
        frames = [one[video] for one in shown]
        if length <= 4:
            assert all(one == list(range(length)) for one in frames)  # each once, the rest is padding
            continue
        edges = np.arange(5) * length // 4
        for place in range(4):
            stretch = set(range(edges[place], edges[place + 1]))
            assert {one[place] for one in frames} == stretch  # all of these come up, and nothing else
    # The same seed shows the same, another shows others.
    again, other = Watching(), Watching()
    fit(again, views, labels, num_candidates=4, epochs=epochs, batch_size=4, lr=1e-9)
    fit(other, views, labels, num_candidates=4, epochs=epochs, batch_size=4, lr=1e-9, seed=1)
    assert seen(again, epochs) == shown
    assert seen(other, epochs) != shown


@pytest.mark.parametrize("count", [None, 12, 40])
def test_where_no_more_is_known_all_is_shown(count: int | None) -> None:
    system, (views, labels) = Watching(), numbered([12, 5])
    fit(system, views, labels, num_candidates=count, epochs=2)
    assert seen(system, 2) == [{0: list(range(12)), 1: list(range(5))}] * 2


def test_drawn_from_real_frames_wherever_they_stand() -> None:
    real = torch.tensor([[False, True, True, False, True, True, True], [True] * 7, [False] * 6 + [True]])
    drawn = draw_candidates(real, 2, np.random.default_rng(0))
    assert real.gather(1, drawn.positions)[drawn.real].all()
    assert drawn.real.tolist() == [[True, True], [True, True], [True, False]]
    # As those of samplers: chances are the same in every stretch.
    tally = np.zeros((2, 7))
    expected = np.zeros((2, 7))
    rng = np.random.default_rng(1)
    for _ in range(4000):
        first, second = draw_candidates(real[1:2], 2, rng).positions[0].tolist()
        tally[[0, 1], [first, second]] += 1
        expected[[0, 1], stratified_positions(7, 2, rng)] += 1
    np.testing.assert_allclose(tally / 4000, expected / 4000, atol=0.04)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_features_stay_as_they_are_and_batches_are_raised(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in float32 at once would take twice the memory."""
    system, (views, labels) = Watching(), numbered([6] * 20, dtype)
    real, moved = Views.to, []

    def watched(self: Views, device: Any) -> Views:
        moved.append(len(self.heavy))
        return real(self, device)

    monkeypatch.setattr(Views, "to", watched)
    fit(system, views, labels, epochs=2, batch_size=5)
    assert set(moved) == {5}
    assert views.heavy.dtype == dtype
    assert all(one.heavy.dtype == one.light.dtype == torch.float32 for one in system.shown)


def test_a_number_that_cannot_be() -> None:
    views, labels = numbered([4, 4])
    with pytest.raises(InvalidArgument, match="num_candidates=0"):
        fit(Watching(), views, labels, num_candidates=0)
