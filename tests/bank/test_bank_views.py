"""Systems on a bank: the views are the kept features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sosampler as so  # noqa: E402
from sosampler.training.baseline_data import bank_views  # noqa: E402
from tests.factories import make_random_bank  # noqa: E402

TINY = "timm:test_resnet.r160_in1k"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bank of short videos, a saved classifier and a saved sampler, under the names of the guide."""
    rng = np.random.default_rng(0)
    entries = [
        so.FrameEntry(
            id=f"{split}{number}",
            labels=(number % 2,),
            frames=rng.integers(0, 255, (length, 40, 40, 3), dtype=np.uint8),
            pts_seconds=np.arange(length) / 2,
            split=split,
        )
        for split, count in (("train", 6), ("test", 4))
        for number, length in enumerate([12, 10, 4, 11, 3, 10][:count])
    ]
    so.write_frames(tmp_path / "bank", entries, classes=("run", "jump"))
    torch.manual_seed(0)
    classifier = so.create_classifier(TINY, num_classes=2, input_size=32)
    so.save_classifier(classifier, tmp_path / "runs/mine")
    so.SOSampler(backbone=TINY, input_size=32).save_pretrained(tmp_path / "runs/sampler")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_views_are_the_kept_features_of_the_candidates(folder: Path) -> None:
    classifier = so.create_classifier("runs/mine")
    bank = so.add_features("bank", classifier, name="heavy")
    bank = so.add_features(bank, so.load_sampler("runs/sampler"), name="light")
    part = bank.split("train")
    views, labels = bank_views(part, heavy="heavy", light="light", num_candidates=5)
    assert views.heavy.shape[:2] == (6, 5)
    assert labels.argmax(1).tolist() == [0, 1, 0, 1, 0, 1]
    assert views.mask is not None
    assert views.mask.sum(1).tolist() == [5, 5, 4, 5, 3, 5]
    for row, item in enumerate(part):
        places = item.uniform(5) if len(item) >= 5 else np.arange(len(item))
        np.testing.assert_array_equal(views.heavy[row, : len(places)].numpy(), part.features("heavy")[row][places])
        np.testing.assert_array_equal(views.light[row, : len(places)].numpy(), part.features("light")[row][places])
    assert bank_views(part, heavy=classifier, light="light", num_candidates=3)[0].mask is None


def test_every_stored_frame(folder: Path) -> None:
    bank = so.add_features("bank", so.create_classifier("runs/mine"), name="heavy")
    views, _ = bank_views(bank, heavy="heavy", num_candidates=None)
    assert views.mask is not None
    assert views.mask.sum(1).tolist() == [len(item) for item in bank] == [12, 10, 4, 11, 3, 10, 12, 10, 4, 11]
    for row, kept in enumerate(bank.features("heavy")):
        np.testing.assert_array_equal(views.heavy[row, : len(kept)].numpy(), kept)


def test_features_are_as_precise_as_they_are_kept(tmp_path: Path) -> None:
    bank = make_random_bank(tmp_path / "bank", [3, 2], precision="float32", scale=1e6)  # beyond half precision
    views, _ = bank_views(bank, heavy="heavy", light="light", num_candidates=3)
    assert (views.heavy.dtype, views.light.dtype) == (torch.float32, torch.float16)
    np.testing.assert_array_equal(views.heavy[0].numpy(), bank.features("heavy")[0])
    assert views.heavy.abs().max() > 65504


def test_a_split_without_videos(folder: Path) -> None:
    bank = so.add_features("bank", so.create_classifier("runs/mine"), name="heavy")
    with pytest.raises(so.InvalidArgument, match="no video of this split has a label"):
        bank_views(bank.split("dev"), heavy="heavy", light="heavy")
