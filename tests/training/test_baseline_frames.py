"""Which frames a system is trained with: no more than there are, others in every epoch, and no layer that learns
nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sosampler as so
from sosampler.baselines.base import Views, predict
from sosampler.baselines.frameexit import FrameExit
from sosampler.baselines.recipe import read_baseline_recipe
from sosampler.training.baseline_data import bank_views
from tests.factories import KEPT, QUICK, STORED, make_learnable_bank, make_random_bank, two_sets

EXIT = QUICK["frameexit"] | {"max_frames": 10, "epochs": {"classifiers": 3, "gates": 2}, "batch_size": 8}


def drawn_weights(trained: so.TrainedSystem) -> list[str]:
    """Layers of the trained system that still have the weights they were drawn with."""
    told = trained.system.about["recipe"]
    recipe = read_baseline_recipe("frameexit").changed(
        **{name: value for name, value in told.items() if name not in ("system", "settings")}, **told["settings"]
    )
    fresh = recipe.build(heavy_width=6, light_width=None, num_classes=4, multi_label=False).state_dict()
    learnt = trained.system.state_dict()
    assert set(fresh) == set(learnt)
    return [key for key in fresh if key.endswith("weight") and torch.equal(fresh[key], learnt[key])]


@pytest.mark.parametrize(
    ("stored", "asked", "offered"), [(6, 10, 6), (12, 4, 4), (12, 10, 10), (12, 12, 12), (2, 10, 2)]
)
def test_nothing_is_left_as_it_was_drawn(tmp_path: Path, stored: int, asked: int, offered: int) -> None:
    bank = make_random_bank(tmp_path / "bank", [stored] * 30)
    said: list[str] = []
    trained = so.train(
        bank,
        out=tmp_path / "run",
        sampler="frameexit",
        classifier="heavy",
        say=said.append,
        **EXIT | {"num_candidates": asked},
    )
    most = min(10, offered)
    system = trained.system
    assert system.config["max_frames"] == system.about["recipe"]["settings"]["max_frames"] == most
    assert system.about["num_candidates"] == trained.result["num_candidates"] == offered
    assert system.about["recipe"]["num_candidates"] == offered
    assert drawn_weights(trained) == []
    fewer = f"the bank stores at most {stored} frames a video, so T is {offered} instead of {asked}"
    assert (fewer in said) == (offered < asked)
    assert any(line.startswith(f"frameexit sees at most {most} frames instead of 10") for line in said) == (most < 10)
    # Of longer videos it looks at as many as it has learnt.
    system = so.load_system(tmp_path / "run").with_threshold(0.0)
    system.config["first_exit"] = 2.0
    output = predict(system, two_sets(torch.randn(5, 20, 6), torch.zeros(5, 20, 0)))
    assert output.seen_heavy.sum(1).tolist() == [most] * 5
    again: list[str] = []
    so.train(
        bank,
        out=tmp_path / "run",
        sampler="frameexit",
        classifier="heavy",
        say=again.append,
        **EXIT | {"num_candidates": asked},
    )
    assert again == [f"{tmp_path / 'run'}: this run is finished"]


def test_trained_with_few_candidates_it_is_no_worse_with_more(tmp_path: Path) -> None:
    """With classifiers that nobody taught it was below chance."""
    bank = make_learnable_bank(tmp_path / "bank", train=300, dev=150)
    trained = so.train(
        bank,
        out=tmp_path / "run",
        sampler="frameexit",
        classifier="heavy",
        **QUICK["frameexit"] | {"num_candidates": 4, "max_frames": 10},
    )
    right = []
    for count in (4, STORED):
        views, labels = bank_views(bank.split("dev"), heavy="heavy", num_candidates=count)
        output = predict(trained.system.with_threshold(0.02), views)
        right.append(float((output.probabilities.argmax(1) == labels.argmax(1)).float().mean()))
    assert right[0] == pytest.approx(trained.result["dev_curve"][-1]["top1"])
    assert right[1] > right[0] - 0.1
    assert right[1] > 0.4  # chance is a quarter


def test_all_stored_frames_are_shown_in_the_course_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = make_random_bank(tmp_path / "bank", [STORED, STORED, 3])
    rows = torch.cat([torch.from_numpy(table.copy()) for table in bank.features("heavy")]).float()
    shown: list[set[tuple[int, ...]]] = []
    real = FrameExit.loss

    def watching(self: FrameExit, views: Views, *rest: Any, **named: Any) -> Any:
        assert views.heavy.shape[1] == 4
        found = views.heavy[views.real]
        assert len(found) == 4 + 4 + 3
        numbers = (found[:, None] == rows).all(dim=2).float().argmax(dim=1)
        assert torch.equal(rows[numbers], found)
        shown.append({tuple(numbers.tolist())})
        return real(self, views, *rest, **named)

    monkeypatch.setattr(FrameExit, "loss", watching)
    options = EXIT | {"num_candidates": 4, "epochs": {"classifiers": 30, "gates": 5}}
    so.train(bank, out=tmp_path / "run", sampler="frameexit", classifier="heavy", **options)
    assert {number for one in shown for (numbers,) in [one] for number in numbers} == set(range(2 * STORED + 3))


def test_batches_of_short_videos_stop_no_training(tmp_path: Path) -> None:
    bank = make_random_bank(tmp_path / "bank", [2] * 20 + [10] * 6)
    trained = so.train(bank, out=tmp_path / "run", sampler="frameexit", classifier="heavy", **EXIT | {"batch_size": 2})
    assert drawn_weights(trained) == []


def test_batches_that_cannot_be_normalised_are_told_before_training(tmp_path: Path) -> None:
    bank = make_random_bank(tmp_path / "bank", [1] * 3 + [4] * 5)
    said: list[str] = []
    with pytest.raises(so.InvalidArgument, match="3 videos have one frame; give a larger batch_size"):
        so.train(
            bank,
            out=tmp_path / "run",
            sampler="frameexit",
            classifier="heavy",
            say=said.append,
            **EXIT | {"batch_size": 1},
        )
    assert not any("1/3" in line for line in said)
    so.train(bank, out=tmp_path / "run", sampler="frameexit", classifier="heavy", **EXIT | {"batch_size": 4})


def test_features_beyond_half_precision(tmp_path: Path) -> None:
    bank = make_random_bank(tmp_path / "bank", [4] * 12, precision="float32", scale=1e6)
    options = QUICK["liteeval"] | {"epochs": 1, "num_candidates": 4}
    trained = so.train(bank, out=tmp_path / "run", sampler="liteeval", **KEPT, **options)
    assert all(bool(weight.isfinite().all()) for weight in trained.system.parameters())


def test_numbers_on_dev_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = make_learnable_bank(tmp_path / "bank", train=20, dev=4)
    monkeypatch.setattr(
        "sosampler.training.train_baseline.predict",
        lambda system, views: predict(system, views)._replace(probabilities=torch.full((4, 4), torch.nan)),
    )
    with pytest.raises(so.InvalidArgument, match="marl gives probabilities that are not finite on dev"):
        so.train(bank, out=tmp_path / "run", sampler="marl", **KEPT, **QUICK["marl"] | {"epochs": 1})
