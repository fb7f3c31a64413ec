"""Evaluation of what looks at pictures: samplers, rules that look, and methods on scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sosampler import wrap_classifier
from sosampler.bank.bank import Bank
from sosampler.bank.prepare import add_teacher
from sosampler.errors import InvalidArgument
from sosampler.evaluation import clip_scores as frames
from sosampler.evaluation.evaluate import evaluate
from sosampler.policies.auto import Auto
from sosampler.policies.base import Batch, Policy, choose_one, top
from sosampler.policies.registry import get_policy, with_method
from sosampler.policies.score_rules import (
    METHODS,
    difference_peaks,
    dpp,
    gaussian_kernel,
    median_bandwidth,
    mmr,
    motion_uniform,
)
from sosampler.policies.visual import (
    change_scores,
    dpp_order,
    farthest_first_order,
    kts,
    pixel_features,
    thumbnails,
)
from sosampler.samplers.onnx_sampler import OnnxSampler
from sosampler.samplers.recipe import read_recipe
from tests.factories import (
    FINGERPRINT,
    LABELS,
    TAUGHT_LENGTHS,
    clip,
    confidence,
    distinct,
    random_logits,
    small_net,
    softmax,
    teach,
    write_bank,
)
from tests.factories import NUM_CANDIDATES as T

N = 4


@pytest.fixture(scope="module")
def logits() -> list[np.ndarray]:
    return random_logits(TAUGHT_LENGTHS, LABELS)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory, logits: list[np.ndarray]) -> Bank:
    found = write_bank(tmp_path_factory.mktemp("evaluate") / "bank", TAUGHT_LENGTHS, LABELS, wide=(1, 4))
    teach(found, logits)
    return found


class Bright:
    """A stand-in for a sampler: scores frames by their brightness, and counts what it is shown."""

    def __init__(self, sign: float = 1.0, calibration: tuple[float, float] | None = None) -> None:
        self.sign, self.calibration, self.shown = sign, calibration, 0

    def look(self, frames: Tensor, mask: Tensor | None = None) -> Any:
        self.shown += frames.shape[0] * frames.shape[1]
        light = frames.float().mean((2, 3, 4))
        features = torch.stack([light, light.sin()], -1)
        return type("Said", (), {"scores": self.sign * light, "features": features})

    def confidences(self, scores: Tensor) -> Tensor:
        assert self.calibration is not None
        return torch.sigmoid(self.calibration[0] * scores + self.calibration[1])

    def gmacs(self, num_candidates: int) -> float:
        return 0.5 * num_candidates


def brightest(bank: Bank, number: int, count: int, wanted: int, sign: float = 1.0) -> list[int]:
    offered = distinct(len(bank[number]), count)
    light = {place: sign * bank[number].frames([place]).astype(np.float64).mean() for place in offered}
    chosen = sorted(sorted(offered, key=lambda place: -light[place])[: min(wanted, len(offered))])
    return clip(chosen, wanted)


def test_samplers_see_the_candidates(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, list[int]]] = []

    def reading(bank: Bank, place: int, stored: np.ndarray) -> Any:
        read.append((place, stored.tolist()))
        return read_pictures(bank, place, stored)

    read_pictures = frames._read
    monkeypatch.setattr(frames, "_read", reading)
    policies: dict[str, Any] = {"bright": Bright(), "dark": Bright(-1.0), "uniform": "uniform"}
    done: list[int] = []
    found = evaluate(
        bank,
        policies,
        num_frames=[2, N],
        num_candidates=[5, T],
        bootstrap=0,
        on_progress=lambda progress: done.append(progress.done),
    )
    assert done == list(range(1, 9))
    for count in (5, T):
        for wanted in (2, N):
            for name, sign in (("bright", 1.0), ("dark", -1.0)):
                expected = [brightest(bank, number, count, wanted, sign) for number in range(8)]
                assert found.chosen(name, wanted, count).tolist() == expected
    row = found.row("bright", N, T)
    assert (row.frames_decoded, row.sampler_gmacs) == (T, 4.0)
    # Two samplers and two T, and each picture is read once.
    assert sorted(read) == [
        (place, sorted({*distinct(length, 5), *distinct(length)})) for place, length in enumerate(TAUGHT_LENGTHS)
    ]
    assert policies["bright"].shown == 8 * (5 + T)


def test_chunks_of_pictures_change_nothing(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [np.arange(length) for length in TAUGHT_LENGTHS]
    places = list(range(len(TAUGHT_LENGTHS)))
    whole = list(frames.read_chunks(bank, places, wanted))
    monkeypatch.setattr(frames, "_CHUNK_BYTES", 1)
    small = list(frames.read_chunks(bank, places, wanted))
    assert [len(chunk.videos) for chunk in whole] == [8]
    assert [chunk.indices.tolist() for chunk in small] == [[place] for place in places]
    for place, chunk in enumerate(small):
        pictures = chunk.videos[place]
        assert (pictures.frames == whole[0].videos[place].frames).all()
        assert (pictures.frames == bank[place].frames()).all()
        assert (pictures.positions == bank[place].positions).all()


def test_frame_difference_is_the_policy_of_that_name(bank: Bank) -> None:
    found = evaluate(bank, "frame-difference", num_frames=2, num_candidates=T, bootstrap=0)
    for number, item in enumerate(bank):
        offered = distinct(len(item))
        places = top(change_scores(item.frames(offered)), 2)
        assert found.chosen("frame-difference")[number].tolist() == [offered[place] for place in places]
    assert found.row("frame-difference").sampler_gmacs == 0.0


def _by_change(method: str, pictures: np.ndarray, count: int) -> np.ndarray:
    return METHODS[method](change_scores(pictures).astype(np.float64), count)


@pytest.mark.parametrize("wanted", [1, 2, N])
def test_rules_that_look_are_those_of_select(bank: Bank, wanted: int) -> None:
    slow: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
        "farthest-first": lambda pictures, count: np.sort(farthest_first_order(pixel_features(pictures), count)),
        "dpp": lambda pictures, count: np.sort(dpp_order(pixel_features(pictures), count)),
        "difference-peaks": lambda pictures, count: difference_peaks(change_scores(pictures), count),
        "motion-uniform": lambda pictures, count: motion_uniform(change_scores(pictures), count),
        "kts": lambda pictures, count: kts(pixel_features(pictures), count),
        "thumbnail": lambda pictures, count: thumbnails([Image.fromarray(one).histogram() for one in pictures], count),
    }
    for method in METHODS:
        slow[f"frame-difference+{method}"] = partial(_by_change, method)
    found = evaluate(bank, list(slow), num_frames=wanted, num_candidates=T, bootstrap=0)
    for policy, rule in slow.items():
        for number, item in enumerate(bank):
            offered = distinct(len(item))
            pictures = item.frames(offered)
            places = rule(pictures, min(wanted, len(offered))).tolist()
            assert places == choose_one(get_policy(policy), len(offered), len(places), pictures).positions.tolist()
            assert found.chosen(policy)[number].tolist() == clip([offered[place] for place in places], wanted)
        row = found.row(policy)
        assert (row.sampler_gmacs, row.frames_decoded) == (0.0, T)


@pytest.mark.parametrize("method", METHODS)
def test_methods_on_what_the_oracles_know(bank: Bank, logits: list[np.ndarray], method: str) -> None:
    plain = ["semi-optimal", "semi-optimal-max"]
    given = [f"{policy}+{method}" for policy in plain]
    found = evaluate(bank, [*given, *plain], num_frames=3, num_candidates=T, bootstrap=0, classifier=FINGERPRINT)
    for number, (one, labels) in enumerate(zip(logits, LABELS, strict=True)):
        offered = distinct(len(one))
        probs = [softmax(one[place].astype(np.float64)) for place in offered]
        for policy, values in (
            (given[0], [confidence(each, labels) for each in probs]),
            (given[1], [each.max() for each in probs]),
        ):
            expected = [offered[place] for place in METHODS[method](np.array(values), 3)]
            assert found.chosen(policy)[number].tolist() == expected
    assert any((found.chosen(one) != found.chosen(other)).any() for one, other in zip(given, plain, strict=True))


@pytest.mark.parametrize("calibration", [(0.02, -3.0), None])
@pytest.mark.parametrize("method", METHODS)
def test_methods_on_what_samplers_say(bank: Bank, method: str, calibration: tuple[float, float] | None) -> None:
    sampler, name = Bright(calibration=calibration), f"a+{method}"
    found = evaluate(
        *(bank, {name: sampler, "a": sampler, "a+mmr": sampler}),
        num_frames=3,
        num_candidates=T,
        bootstrap=0,
        classifier=FINGERPRINT,
    )
    for number, item in enumerate(bank):
        offered = distinct(len(item))
        scores = sampler.look(torch.from_numpy(item.frames(offered)).permute(0, 3, 1, 2)[None]).scores[0]
        values = scores if calibration is None else sampler.confidences(scores)
        expected = [offered[place] for place in METHODS[method](values.double().numpy(), 3)]
        assert found.chosen(name)[number].tolist() == expected
    assert (found.chosen(name) != found.chosen("a")).any()
    assert found.row(name).sampler_gmacs == found.row("a").sampler_gmacs


def test_a_saved_sampler_by_its_folder(bank: Bank, tmp_path: Path) -> None:
    from sosampler.samplers.sosampler import SOSampler

    torch.manual_seed(0)
    sampler = SOSampler(backbone="mobilenet_v2", input_size=32, shift=8).freeze()
    sampler.save_pretrained(tmp_path / "runs")
    classifier = wrap_classifier(small_net(classes=3), input_size=32, layout="BCHW")
    add_teacher(bank, classifier)
    found = evaluate(
        bank,
        [f"mine={tmp_path / 'runs'}", tmp_path / "runs", sampler, "uniform"],
        num_frames=3,
        num_candidates=6,
        classifier=classifier,
        bootstrap=0,
        device="cpu",
    )
    assert [row.policy for row in found.rows] == ["mine", str(tmp_path / "runs"), "sosampler", "uniform"]
    for number, item in enumerate(bank):
        offered = distinct(len(item), 6)
        frames = torch.from_numpy(item.frames(offered)).permute(0, 3, 1, 2)[None]
        places = sampler.choose(frames, min(3, len(offered)))[0].tolist()
        assert found.chosen("mine")[number].tolist() == clip([offered[place] for place in places], 3)
    assert (found.chosen("mine") == found.chosen("sosampler")).all()
    row, uniform = found.row("mine"), found.row("uniform")
    assert row.sampler_gmacs == pytest.approx(sampler.gmacs(6))
    assert row.classifier_gmacs == uniform.gmacs == pytest.approx(classifier.gmacs(3))
    assert row.gmacs == pytest.approx(sampler.gmacs(6) + classifier.gmacs(3))
    assert "GMACs" in found.table().splitlines()[0]
    with pytest.raises(InvalidArgument, match="cannot be called 'optimal'"):
        evaluate(bank, {"optimal": sampler}, num_frames=3, num_candidates=6, classifier=classifier)


def test_an_evaluation_names_the_recipes_of_samplers(bank: Bank) -> None:
    samplers = {}
    for name in ("default", "paper", "unknown"):
        samplers[name] = Bright()
        samplers[name].about = {"recipe": read_recipe(name).to_dict()} if name != "unknown" else {}
    found = evaluate(
        *(
            bank,
            {"uniform": "uniform", "ours": samplers["default"], "ours+nms": samplers["default"]}
            | {"printed": samplers["paper"], "other": samplers["unknown"]},
        ),
        num_frames=3,
        num_candidates=T,
        bootstrap=0,
        classifier=FINGERPRINT,
    )
    titles = {"ours": "SOSampler+", "ours+nms": "SOSampler+", "printed": "SOSampler (paper)"}
    assert found.to_dict()["samplers"] == titles
    plain = evaluate(bank, ["uniform"], num_frames=3, num_candidates=T, bootstrap=0, classifier=FINGERPRINT)
    assert "samplers" not in plain.to_dict()


def test_redundancy_aware_forms(bank: Bank) -> None:
    given = ["semi-optimal", "semi-optimal+mmr", "semi-optimal+dpp", "semi-optimal-max+mmr"]
    found = evaluate(bank, given, num_frames=3, num_candidates=T, bootstrap=0, classifier=FINGERPRINT)
    for policy in given:
        for row, length in zip(found.chosen(policy).tolist(), TAUGHT_LENGTHS, strict=True):
            assert set(row) <= set(distinct(length))
            assert len(set(row)) == 3
    # The most confident frame is always among them.
    first = evaluate(bank, given, num_frames=1, num_candidates=T, bootstrap=0, classifier=FINGERPRINT)
    assert (first.chosen("semi-optimal+mmr") == first.chosen("semi-optimal")).all()


@pytest.mark.parametrize("calibration", [(0.02, -3.0), None])
@pytest.mark.parametrize(("method", "pick"), [("mmr", mmr), ("dpp", dpp)])
def test_samplers_that_mind_redundancy(
    bank: Bank, method: str, pick: Callable[..., Tensor], calibration: tuple[float, float] | None
) -> None:
    """However it is written, and against the rule itself, video by video."""
    sampler = Bright(calibration=calibration)
    name = f"a+{method}"
    found = evaluate(
        bank, {name: sampler, "a": sampler}, num_frames=3, num_candidates=T, bootstrap=0, classifier=FINGERPRINT
    )
    assert [row.policy for row in found.rows] == [name, "a"]
    for number, item in enumerate(bank):
        offered = distinct(len(item))
        said = sampler.look(torch.from_numpy(item.frames(offered)).permute(0, 3, 1, 2)[None])
        if calibration is None:
            low, high = said.scores.min(), said.scores.max()
            values = (said.scores - low) / (high - low)
        else:
            values = sampler.confidences(said.scores)
        alike = gaussian_kernel(said.features, median_bandwidth(said.features))
        expected = [offered[place] for place in pick(values, alike, 3)[0].tolist()]
        assert found.chosen(name)[number].tolist() == expected
    assert (found.chosen(name) != found.chosen("a")).any()


@pytest.mark.parametrize("method", ["mmr", "dpp", *METHODS])
def test_a_method_is_heeded_wherever_it_is_written(bank: Bank, method: str, tmp_path: Path) -> None:
    from sosampler.samplers.sosampler import SOSampler

    torch.manual_seed(0)
    sampler = SOSampler(backbone="timm:test_resnet", input_size=32, calibration=(1.0, 0.0)).freeze()
    with torch.no_grad():
        sampler.importance_head.weight.mul_(20)
    folder, name = tmp_path / "runs", f"mine+{method}"
    sampler.save_pretrained(folder)

    def chosen(policy: Any, called: str = name) -> list[list[int]]:
        found = evaluate(
            *(bank, policy), num_frames=3, num_candidates=T, bootstrap=0, classifier=FINGERPRINT, device="cpu"
        )
        rows: list[list[int]] = found.chosen(called).tolist()
        return rows

    expected = chosen({name: sampler})
    assert chosen({"mine": sampler}, "mine") != expected
    assert chosen({name: folder}) == chosen({name: str(folder)}) == chosen([f"{name}={folder}"]) == expected
    assert chosen([f"mine={folder}+{method}"], "mine") == expected
    assert chosen([f"{name}={folder}+{method}"]) == expected
    assert chosen([f"{folder}+{method}"], f"{folder}+{method}") == expected
    policy = get_policy(f"{folder}+{method}", device="cpu")  # and select chooses the same
    for number, item in enumerate(bank):
        offered = distinct(len(item))
        places = choose_one(policy, len(offered), 3, item.frames(offered)).positions
        assert [offered[place] for place in places] == expected[number]
    other = "nms" if method == "mmr" else "mmr"
    with pytest.raises(InvalidArgument, match=f"has the method {method}, but .* has {other}; write one of them"):
        chosen([f"{name}={folder}+{other}"])


class Sharpest(Policy):
    """A policy of one's own: the frames with the most edges."""

    name, needs = "sharpest", frozenset({"frames"})

    def scores(self, batch: Batch) -> np.ndarray:
        assert batch.frames is not None
        return np.abs(np.diff(batch.frames.astype(np.float64), axis=2)).mean((2, 3, 4))


class Late(Policy):
    """Goes by times."""

    name, needs = "late", frozenset({"frames"})

    def scores(self, batch: Batch) -> np.ndarray:
        assert batch.pts_seconds is not None
        return batch.pts_seconds


def test_policies_see_times(bank: Bank) -> None:
    found = evaluate(bank, Late(), num_frames=2, num_candidates=T, bootstrap=0, classifier=FINGERPRINT)
    for number, item in enumerate(bank):
        assert found.chosen("late")[number].tolist() == distinct(len(item))[-2:]


class Peeking(Policy):
    """Knows the labels: an oracle of one's own, which needs frames too."""

    name, needs = "peeking", frozenset({"frames", "teacher", "labels"})

    def scores(self, batch: Batch) -> np.ndarray:
        assert batch.frames is not None
        scores: np.ndarray = batch.teacher.label_log_confidence()
        return scores


@pytest.mark.parametrize("name", ["sharpest", "sharpest+nms", "sharpest+mmr", "general+dpp", "general+aks"])
def test_the_same_policies_in_select_and_evaluate(bank: Bank, name: str) -> None:
    base, _, method = name.partition("+")
    policy = Sharpest() if base == "sharpest" else get_policy(base)
    policy = with_method(policy, method) if method else policy
    given = {name: Sharpest()} if base == "sharpest" else [name]
    found = evaluate(bank, given, num_frames=3, num_candidates=T, bootstrap=0, classifier=FINGERPRINT)
    for number, item in enumerate(bank):
        offered = distinct(len(item))
        places = choose_one(policy, len(offered), 3, item.frames(offered)).positions
        assert found.chosen(name)[number].tolist() == [offered[place] for place in places]
    assert found.row(name).frames_decoded == T


def test_oracles_of_ones_own(bank: Bank) -> None:
    found = evaluate(
        bank, [Peeking(), "semi-optimal"], num_frames=3, num_candidates=T, bootstrap=0, classifier=FINGERPRINT
    )
    assert (found.chosen("peeking") == found.chosen("semi-optimal")).all()
    with pytest.raises(InvalidArgument, match="needs the outputs of a teacher"):
        get_policy(Peeking())


def test_auto_as_an_object(bank: Bank) -> None:
    from tests.policies.test_adaptive_samplers import ranking

    options: dict[str, Any] = {"num_candidates": T, "bootstrap": 0, "classifier": FINGERPRINT}
    autos = [Auto(max=6, tolerance=0.0), Auto(max=6, tolerance=0.02)]
    one = evaluate(bank, {"a": ranking()}, num_frames=autos, **options)
    other = evaluate(bank, {"a": ranking()}, num_frames="auto", auto_max=6, auto_tolerance=[0.0, 0.02], **options)
    assert [row.policy for row in one.rows] == ["a+auto@0", "a+auto@0.02"]
    for row in one.rows:
        assert (one.chosen(row.policy) == other.chosen(row.policy)).all()
    with pytest.raises(InvalidArgument, match="auto_max=4 is for num_frames='auto'"):
        evaluate(bank, {"a": ranking()}, num_frames=autos, auto_max=4, **options)
    with pytest.raises(InvalidArgument, match="several Auto have one tolerance"):
        evaluate(bank, {"a": ranking()}, num_frames=[Auto(max=4), Auto(max=5)], **options)


def test_a_sampler_without_torch(bank: Bank) -> None:
    """Scores of a network that takes no mask, also for videos that are shorter than T."""
    from tests.policies.test_adaptive_samplers import believing, believing_folder

    light = OnnxSampler.from_pretrained(believing_folder())
    found = evaluate(
        bank, {"onnx": light, "torch": believing()}, num_frames=3, num_candidates=T, bootstrap=0, classifier=FINGERPRINT
    )
    assert (found.chosen("onnx") == found.chosen("torch")).mean() > 0.9
    assert found.row("onnx").sampler_gmacs is None
