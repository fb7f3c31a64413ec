"""Named sets of features: what is read, what is counted, and pixels that are decoded when they are taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sosampler as so
from sosampler.baselines.base import (
    Baseline,
    BaselineOutput,
    UniformFrames,
    Views,
    decoded_frames,
    predict,
    trained_on,
    video_gmacs,
)
from sosampler.errors import InvalidArgument
from sosampler.evaluation.evaluate import evaluate
from sosampler.training.baseline_data import bank_views, feature_sources, near_device
from sosampler.training.train_baseline import fit, measure_baseline
from tests.factories import keep, teach

CLASSES = ("run", "jump", "swim")
SIDE = 16
LENGTHS = [6, 3, 5, 6]


class Mixed(Baseline):
    """Sees the first frame in "heavy", the next one in "r34", and the pixels of all; its cost comes with the output."""

    name = "mixed"
    feature_sets = ("heavy", "r34", "frames")
    frame_size = SIDE
    predict_batch = 3

    def __init__(self, heavy_width: int = 4, r34_width: int = 2, num_candidates: int = 5) -> None:
        widths = {"heavy_width": heavy_width, "r34_width": r34_width}
        super().__init__({**widths, "num_classes": 3, "num_candidates": num_candidates})
        self.layer = nn.Linear(1, 3)
        self.shown: list[tuple[torch.Size, torch.dtype]] = []

    def _logits(self, views: Views) -> Tensor:
        self.shown.append((views["frames"].shape, views["frames"].dtype))
        return self.layer(views["frames"].float().mean(dim=(1, 2, 3, 4))[:, None] / 255)

    def loss(self, views, labels, *, generator=None, progress=1.0, phase=None):  # type: ignore[no-untyped-def]
        loss = self.label_loss(self._logits(views.filled()), labels).mean()
        return loss, {}

    def decide(self, views: Views, generator: torch.Generator | None) -> BaselineOutput:
        first, second = (torch.arange(views.shape[1]).expand(views.shape) == number for number in (0, 1))
        seen = {"heavy": first, "r34": second & views.real, "frames": views.real}
        count = views.real.sum(dim=1).double()
        return BaselineOutput(
            self.activate(self._logits(views)), seen, own=0.5 * count, other_gmacs={"bits": 2 * count}
        )


@pytest.fixture
def bank(tmp_path: Path) -> so.Bank:
    rng = np.random.default_rng(0)
    entries = [
        so.FrameEntry(
            id=f"v{number}",
            labels=(number % 2,),
            frames=rng.integers(0, 255, (length, 20, 20 + 4 * number, 3), dtype=np.uint8),
            pts_seconds=np.arange(length) / 2,
            split="train" if number < 2 else "test",
        )
        for number, length in enumerate(LENGTHS)
    ]
    bank = so.write_frames(tmp_path / "bank", entries, classes=CLASSES)
    teach(bank, [rng.normal(size=(length, 3)).astype(np.float32) for length in LENGTHS])
    for name, width, gmacs, fingerprint in (("heavy", 4, 4.0, "ab" * 8), ("r34", 2, 2.0, "ef" * 8)):
        tables = [rng.normal(size=(length, width)).astype(np.float16) for length in LENGTHS]
        keep(bank, name, tables, gmacs, fingerprint)
    return so.Bank(bank.path)


def mixed_views(videos: int = 3, frames: int = 5) -> Views:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 255, (videos, frames, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    features = {
        name: torch.randn(videos, frames, width, generator=generator) for name, width in (("heavy", 4), ("r34", 2))
    }
    mask = torch.ones(videos, frames, dtype=torch.bool)
    mask[0, 3:] = False
    return Views({**features, "frames": pixels}, mask)


def test_every_set_is_taken_filled_and_moved() -> None:
    views = mixed_views()
    assert (len(views), views.shape) == (3, (3, 5))
    part = views.some(torch.tensor([2, 0]), torch.tensor([[0, 1], [3, 2]]))
    assert part["frames"].shape == (2, 2, 3, SIDE, SIDE)
    for name in views.sets:
        assert torch.equal(part[name][1, 1], views[name][0, 2])
    assert part.real.tolist() == [[True, True], [False, True]]
    filled = views.filled()
    assert not filled["frames"][0, 3:].any()
    assert torch.equal(filled["frames"][1:], views["frames"][1:])
    assert not filled["r34"][0, 3:].any()
    moved = replace(views, sets={**views.sets, "r34": views["r34"].half()}).to(torch.device("cpu"))
    assert {name: moved[name].dtype for name in moved.sets} == {
        "heavy": torch.float32,
        "r34": torch.float32,
        "frames": torch.uint8,
    }
    patches = Views({"heavy": torch.full((2, 3, 4, 5), torch.nan)}, torch.tensor([[True, True, False]] * 2))
    assert patches.filled().heavy[:, 2].any() == 0
    assert patches.filled().heavy[:, :2].isnan().all()


def test_each_set_has_its_price() -> None:
    system, views = Mixed(), mixed_views()
    output = predict(system, views)
    assert decoded_frames(output).tolist() == [3, 5, 5]
    spent = video_gmacs(system, output, {"heavy": 4.0, "r34": 2.0})
    assert spent.tolist() == [4 + 2 + 1.5, 4 + 2 + 2.5, 4 + 2 + 2.5]
    assert not output.seen_light.any()
    with pytest.raises(KeyError):  # a price that is not known is not 0
        video_gmacs(system, output, {"heavy": 4.0})
    measured = measure_baseline(system, views, torch.eye(3)[[0, 1, 0]], {"heavy": 4.0, "r34": 2.0})
    assert (measured["frames"], measured["gmacs"]) == (1.0, pytest.approx((7.5 + 8.5 + 8.5) / 3))
    assert measured["other_gmacs"] == {"bits": pytest.approx(2 * 13 / 3)}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"r34": None}, "mixed needs r34 features, but these views have heavy, frames"),
        ({"r34": torch.zeros(3, 5, 3)}, r"r34 features .* give \[videos, candidates, 2\]"),
        ({"r34": torch.zeros(3, 4, 2)}, "heavy and r34 features are of .* same candidates"),
        ({"frames": torch.zeros(3, 5, 3, SIDE, SIDE + 1)}, r"give \[videos, candidates, 3, 16, 16\]"),
    ],
)
def test_sets_that_do_not_fit(changed: dict[str, Tensor | None], text: str) -> None:
    views = mixed_views()
    sets = {name: values for name, values in {**views.sets, **changed}.items() if values is not None}
    with pytest.raises(InvalidArgument, match=text):
        Mixed().run(Views(sets, views.mask))


def test_another_number_of_candidates_than_it_was_trained_for() -> None:
    with pytest.raises(InvalidArgument, match="mixed was trained for 6 candidates a video and cannot run with 5; give"):
        Mixed(num_candidates=6).run(mixed_views())
    with pytest.raises(InvalidArgument, match="cannot run with 5"):
        UniformFrames(Mixed(num_candidates=6)).run(mixed_views())


def test_pixels_are_decoded_when_videos_are_taken(bank: so.Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    views, _ = bank_views(bank, heavy="heavy", frames=SIDE, num_candidates=5)
    assert views.sets["frames"].shape == (4, 5, 3, SIDE, SIDE)
    taken = views.some(torch.tensor([3, 1]))
    assert taken["frames"].dtype == torch.uint8
    for row, video in enumerate([3, 1]):
        item = bank[video]
        slots = item.uniform(5) if len(item) >= 5 else np.array([0, 1, 2, 2, 2])
        frames = item.frames(slots, SIDE)
        left = round((frames.shape[2] - SIDE) / 2)
        wanted = torch.from_numpy(frames[:, :, left : left + SIDE].copy()).permute(0, 3, 1, 2)
        assert torch.equal(taken["frames"][row], wanted)
    some = views.some(torch.tensor([0, 2]), torch.tensor([[4, 0], [1, 1]]))
    whole = views["frames"]
    assert torch.equal(some["frames"], whole[[[0], [2]], [[4, 0], [1, 1]]])
    assert torch.equal(views.some(torch.tensor([True, False, False, True]))["frames"], whole[[0, 3]])

    read: list[int] = []
    frames_of = so.bank.bank.BankItem.frames
    monkeypatch.setattr(
        so.bank.bank.BankItem, "frames", lambda item, *rest, **named: read.append(item.id) or frames_of(item, *rest)
    )
    predict(Mixed(), bank_views(bank, heavy="heavy", r34="r34", frames=SIDE, num_candidates=5)[0], batch_size=2)
    assert sorted(read) == ["v0", "v1", "v2", "v3"]  # each once


def test_training_on_pixels_is_the_same_in_memory_and_from_the_bank(bank: so.Bank) -> None:
    lazy, labels = bank_views(bank, heavy="heavy", r34="r34", frames=SIDE, num_candidates=None)
    whole = replace(lazy, sets={name: lazy[name] for name in lazy.sets})
    systems = []
    for views in (lazy, whole):
        torch.manual_seed(0)
        systems.append(Mixed())
        fit(systems[-1], views, labels, num_candidates=5, epochs=3, batch_size=2)
    assert torch.equal(systems[0].layer.weight, systems[1].layer.weight)
    assert systems[0].shown == [(torch.Size([2, 5, 3, SIDE, SIDE]), torch.uint8)] * 6


def test_an_evaluation_finds_the_sets_again(bank: so.Bank) -> None:
    facts = {
        name: {"name": name, "fingerprint": fingerprint, "width": width, "network": f"net of {name}"}
        for name, width, fingerprint in (("heavy", 4, "ab" * 8), ("r34", 2, "ef" * 8))
    }
    system = Mixed()
    system.about = {
        "classifier": "net of heavy",
        "classes": list(CLASSES),
        "heavy": facts["heavy"],
        "light": None,
        "sets": {"r34": facts["r34"]},
    }
    assert trained_on(system.about) == facts
    found = evaluate(bank, {"mixed": system}, num_frames=1, num_candidates=5, bootstrap=0)
    row = found.row("mixed")
    assert (row.frames_classified, row.frames_decoded) == (1.0, 5.0)
    assert (row.classifier_gmacs, row.sampler_gmacs) == (4.0, 2.0 + 2.5)
    assert row.other_gmacs == {"bits": 10.0}
    assert row.to_dict()["other_gmacs"] == {"bits": 10.0}
    assert found.facts["systems"]["mixed"]["r34"] == facts["r34"]
    with pytest.raises(InvalidArgument, match="trained for 5 candidates a video and cannot run with 4"):
        evaluate(bank, {"mixed": system}, num_frames=1, num_candidates=4, bootstrap=0)
    system.about["sets"] = {"r34": {**facts["r34"], "fingerprint": "00" * 8}}
    with pytest.raises(InvalidArgument, match=r"features of the r34 network net of r34 .* are not in this bank"):
        evaluate(bank, {"mixed": system}, num_frames=1, num_candidates=5, bootstrap=0)
    del system.about["sets"]
    with pytest.raises(InvalidArgument, match="no record of the features"):
        evaluate(bank, {"mixed": system}, num_frames=1, num_candidates=5, bootstrap=0)


def test_features_go_to_a_device_with_room_for_them(bank: so.Bank) -> None:
    views, _ = bank_views(bank, heavy="heavy", r34="r34", frames=SIDE, num_candidates=5)
    size = 4 * 5 * (4 + 2) * 2  # videos, candidates, features, bytes
    there = torch.device("meta")
    near = near_device(views, there, max_bytes=size)
    assert {name: getattr(values, "device", None) for name, values in near.sets.items()} == {
        "heavy": there,
        "r34": there,
        "frames": None,
    }
    assert near.mask is not None
    assert near.mask.device == there
    assert near_device(views, there, max_bytes=size - 1) is views
    assert near_device(views, torch.device("cpu")) is views


def test_pixels_go_to_a_device_with_room_for_them(bank: so.Bank) -> None:
    views, _ = bank_views(bank, heavy="heavy", frames=SIDE, num_candidates=5)
    size = 4 * 5 * (4 * 2 + 3 * SIDE * SIDE)  # videos, candidates, bytes of features and of pixels
    near = near_device(views, torch.device("cpu"), max_bytes=size)
    assert isinstance(near.sets["frames"], torch.Tensor)
    assert torch.equal(near["frames"], views["frames"])
    assert not isinstance(near_device(views, torch.device("cpu"), max_bytes=size - 1).sets["frames"], torch.Tensor)


def test_learning_rates_by_parameter(bank: so.Bank) -> None:
    class Slow(Mixed):
        def lr_factors(self, phase: str) -> dict[nn.Parameter, float]:
            return {self.layer.bias: 0.0}

    views, labels = bank_views(bank, heavy="heavy", r34="r34", frames=SIDE, num_candidates=5)
    changed = []
    for kind in (Mixed, Slow):
        torch.manual_seed(0)
        system = kind()
        before = [weight.clone() for weight in (system.layer.weight, system.layer.bias)]
        (line,) = fit(system, views, labels, epochs=1, lr=0.1, batch_size=2)
        assert line["lr"] == 0.1
        now = (system.layer.weight, system.layer.bias)
        changed.append([not torch.equal(*pair) for pair in zip(before, now, strict=True)])
    assert changed == [[True, True], [True, False]]


def test_sources_of_further_sets(bank: so.Bank) -> None:
    found = feature_sources(bank, Mixed(), classifier="heavy")
    assert {name: source.name for name, source in found.items()} == {"heavy": "heavy", "r34": "r34"}
    assert feature_sources(bank, Mixed(), classifier="heavy", features={"r34": "heavy"})["r34"].name == "heavy"
    with pytest.raises(InvalidArgument, match=r"hold 'r18'; it takes these: r34"):
        feature_sources(bank, Mixed(), classifier="heavy", features={"r18": "heavy"})
    with pytest.raises(InvalidArgument, match="no features called 'nowhere', and no saved classifier or sampler"):
        feature_sources(bank, Mixed(), classifier="heavy", features={"r34": "nowhere"})

    class More(Mixed):
        name, feature_sets = "more", ("heavy", "r18")

    wanted = r"no features 'r18', which more needs; .*--features r18=FOLDER.*sosampler bank add-features .* r18=FOLDER"
    with pytest.raises(InvalidArgument, match=wanted):
        feature_sources(bank, More(), classifier="heavy")
