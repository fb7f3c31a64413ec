"""num_frames="auto" through select, the pipeline, evaluate and their commands, on torch and without it."""

from __future__ import annotations

import json
import subprocess
import sys
from atexit import register
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import sosampler as so
from sosampler.bank.bank import Bank
from sosampler.cli.evaluate import evaluate_command
from sosampler.cli.select import select_command
from sosampler.errors import InvalidArgument
from sosampler.evaluation.evaluate import evaluate
from sosampler.figures.curves import LEARNED, SYSTEM, looks_of_rows
from sosampler.inference.options import SelectOptions
from sosampler.inference.select import select_with
from sosampler.policies.auto import Auto
from sosampler.policies.base import count_frames, expected_by_belief, expected_by_confidence
from sosampler.policies.learned import expected_of
from sosampler.policies.registry import get_policy
from sosampler.report.run_report import write_run_report
from sosampler.samplers.export import export_sampler
from sosampler.samplers.onnx_sampler import OnnxSampler
from sosampler.samplers.sosampler import SOSampler
from tests.factories import (
    BELIEF,
    EXPORT_TINY,
    LABELS,
    TAUGHT_LENGTHS,
    distinct,
    random_logits,
    scattered,
    scenes,
    softmax,
    teach,
    write_bank,
)
from tests.factories import NUM_CANDIDATES as T

FREE: dict[str, Any] = {"auto_max": 6, "auto_tolerance": 0.0}


@cache
def believing() -> SOSampler:
    """Scores by what the whole video is about, and is sure of some videos only."""
    sampler = scattered(seed=1, backbone=EXPORT_TINY, num_classes=3, scoring=BELIEF)
    with torch.no_grad():
        said = sampler.look(scenes(4, 8))
        sampler.importance_head.bias.sub_(said.importance.mean() + 0.5)
        sampler.class_head.bias.sub_(said.class_logits.mean((0, 1)))  # frames differ in what they show
    return sampler.freeze()


@cache
def believing_folder() -> Path:
    """With what runs without torch."""
    folder = Path(mkdtemp(prefix="sosampler-test-"))
    register(rmtree, folder)
    believing().save_pretrained(folder)
    export_sampler(folder)
    return folder


@cache
def ranking() -> SOSampler:
    """Scores by its importance alone, and says what they mean."""
    return scattered(seed=3, backbone=EXPORT_TINY, calibration=(0.8, -3.0)).freeze()


def by_hand(sampler: SOSampler, frames: torch.Tensor, auto: Auto) -> tuple[np.ndarray, list[int]]:
    """What is expected of the k best of one video, and which are taken; torch's own scoring as the oracle."""
    said = sampler.look(frames[None])
    if said.class_logits is not None:
        belief = sampler.scoring.log_belief(said.importance.double(), said.class_logits.double())
        expected = expected_by_belief(said.scores.numpy(), said.class_logits.numpy(), belief.numpy())
    else:
        expected = expected_by_confidence(said.scores.numpy(), sampler.confidences(said.scores).numpy())
    count = int(count_frames(expected, auto)[0])
    return expected[0], sorted(said.scores[0].argsort(descending=True, stable=True)[:count].tolist())


# ---- select


@pytest.mark.parametrize("make", [believing, ranking])
def test_select_takes_what_the_sampler_decides(make: Any, clip: Path) -> None:
    sampler = make()
    offered = so.select(clip, policy="all", num_candidates=12)
    numbers = set()
    for tolerance in (0.0, 0.02, 1.0):
        auto = Auto(min=1, max=6, tolerance=tolerance)
        expected, chosen = by_hand(sampler, offered.to_torch(), auto)
        found = so.select(
            clip, "auto", num_candidates=12, policy=sampler, auto_min=1, auto_max=6, auto_tolerance=tolerance
        )
        assert found.frame_indices.tolist() == offered.frame_indices[chosen].tolist()
        told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert told["num_frames"] == len(chosen) == len(told["frame_indices"])
        asked = told["asked"]
        assert (asked["num_frames"], asked["min"], asked["max"], asked["tolerance"]) == ("auto", 1, 6, tolerance)
        np.testing.assert_allclose(asked["expected"], expected[:6], atol=1e-5)
        numbers.add(len(chosen))
    assert len(numbers) > 1, "a number that is always the same proves nothing"


def test_a_fixed_number_tells_nothing_of_it(clip: Path) -> None:
    assert "asked" not in so.select(clip, 2, policy=ranking()).to_dict()


def test_bounds(clip: Path) -> None:
    found = so.select(clip, "auto", policy=believing(), auto_min=4, auto_max=4)
    assert (len(found), found.num_candidates) == (4, 32)
    assert so.select(clip, "auto", policy=believing(), auto_min=40, auto_max=50).num_candidates == 50
    few = so.select(clip, "auto", policy=believing(), num_candidates=3, auto_tolerance=0.0)
    assert 1 <= len(few) <= 3  # fewer candidates than the maximum
    with pytest.raises(InvalidArgument, match="auto_min=4 is more than num_candidates=3"):
        so.select(clip, "auto", policy=believing(), num_candidates=3, auto_min=4)


def test_a_short_video_gives_what_it_has() -> None:
    from sosampler.video.synthetic import numbered_video

    video = numbered_video(num_frames=3)
    found = so.select(video, "auto", policy=believing(), auto_min=5)
    assert found.frame_indices.tolist() == [0, 1, 2]
    long = numbered_video(num_frames=90)  # three candidates at one a second
    assert len(so.select(long, "auto", policy=believing(), auto_min=5, fps=1)) == 3
    with pytest.raises(InvalidArgument, match="5 frames were requested but only 3"):
        so.select(long, "auto", policy=believing(), auto_min=5, on_short="error", fps=1)


def test_who_cannot_decide(clip: Path) -> None:
    folder = believing_folder()
    with pytest.raises(InvalidArgument, match="not for the policy 'uniform'"):
        so.select(clip, "auto", policy="uniform")
    with pytest.raises(InvalidArgument, match="without a method behind it"):
        so.select(clip, "auto", policy=f"{folder}+nms")
    with pytest.raises(InvalidArgument, match="is not calibrated"):
        so.select(clip, "auto", policy=scattered(backbone=EXPORT_TINY))


def test_without_torch_the_same(clip: Path) -> None:
    folder = believing_folder()
    light, heavy = get_policy(str(folder), device="onnx"), get_policy(str(folder), device="cpu")
    ours, theirs = (so.select(clip, "auto", num_candidates=12, policy=one, **FREE) for one in (light, heavy))
    assert ours.frame_indices.tolist() == theirs.frame_indices.tolist()
    assert ours.asked is not None
    assert theirs.asked is not None
    np.testing.assert_allclose(ours.asked["expected"], theirs.asked["expected"], atol=1e-4)


def test_many_videos_without_torch_the_same() -> None:
    sampler, light = believing(), OnnxSampler.from_pretrained(believing_folder())
    frames = scenes(60, 10, seed=9)
    theirs = expected_of(sampler, sampler.look(frames))
    ours = expected_of(light, light.look(frames.numpy()))
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    counts = [count_frames(expected, Auto(tolerance=0.01)) for expected in (ours, theirs)]
    assert (counts[0] == counts[1]).mean() >= 0.95
    assert len(np.unique(counts[1])) > 2


def test_no_torch_is_imported(clip: Path) -> None:
    folder = believing_folder()
    code = (
        f"import sys, sosampler as so\nfrom sosampler.policies.registry import get_policy\n"
        f"so.select({str(clip)!r}, 'auto', policy=get_policy({str(folder)!r}, device='onnx'))\n"
        "assert 'torch' not in sys.modules and 'onnxruntime' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_all_candidates_are_offered_to_whoever_decides_later(clip: Path) -> None:
    for asked in ({"auto_max": 40}, {"num_candidates": 7, "auto_min": 2}, {"fps": 4.0}):
        options = SelectOptions(num_frames="auto", policy=believing(), **asked)
        whole, chosen = select_with(clip, options.with_all_candidates()), select_with(clip, options)
        assert whole.frame_indices.tolist() == chosen.candidates.frame_indices.tolist()


# ---- the commands


def run(command: Any, *arguments: Any) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_select_command(clip: Path) -> None:
    folder = believing_folder()
    arguments = (clip, "--policy", folder, "--device", "onnx", "-t", 12, "--auto-max", 6, "--auto-tolerance", 0)
    done = run(select_command, *arguments, "-n", "auto", "--auto-min", 2, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    same = so.select(
        clip, "auto", num_candidates=12, policy=get_policy(str(folder), device="onnx"), auto_min=2, **FREE
    ).to_dict()
    assert {**told, "timing": 0} == {**same, "timing": 0}
    text = run(select_command, *arguments, "-n", "auto").stdout
    assert ", auto of 1 to 6)" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-n", "auto", "--policy", "uniform"), "not for the policy 'uniform'"),
        (("-n", "3", "--auto-max", "4"), "auto_max=4 is for num_frames='auto'"),
        (("-n", "0"), "num_frames=0"),
    ],
)
def test_select_command_says_what_is_wrong(clip: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run(select_command, clip, *arguments)
    assert isinstance(done.exception, InvalidArgument)
    assert words in str(done.exception)


def test_a_word_that_is_not_auto(clip: Path) -> None:
    done = run(select_command, clip, "-n", "some")
    assert done.exit_code == 2
    assert "not a valid integer, and not auto" in " ".join(done.output.replace("│", " ").split())


# ---- the pipeline


class Dark:
    """A classifier by its protocol alone that remembers how long its clips were."""

    name, class_names = "dark", ("dark", "bright")
    preprocessing = so.Preprocessing(size=(32, 32), resize=32)

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def clip_probs(self, frames: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        self.lengths += [frames.shape[1]] * len(frames)
        bright = frames.float().mean((1, 2, 3, 4)) / 255
        return torch.stack([1 - bright, bright], dim=1)


def test_the_pipeline_gives_each_video_its_number(clip: Path) -> None:
    from sosampler.video.synthetic import numbered_video

    videos = [clip, numbered_video(num_frames=40), numbered_video(num_frames=2)]
    classifier = Dark()
    pipe = so.Pipeline(believing(), classifier, num_candidates=8, num_frames="auto", auto_tolerance=0.0)
    assert pipe.num_frames == 8  # the most
    results = pipe(videos)
    alone = [so.select(video, "auto", num_candidates=8, policy=believing(), auto_tolerance=0.0) for video in videos]
    for result, one in zip(results, alone, strict=True):
        assert result.selection.frame_indices.tolist() == one.frame_indices.tolist()
        assert result.to_dict()["selection"]["asked"]["num_frames"] == "auto"
        assert 0 <= result.probability <= 1
    assert sorted(classifier.lengths) == sorted(len(one) for one in alone)
    with pytest.raises(InvalidArgument, match="not for the policy 'uniform'"):
        so.Pipeline("uniform", classifier, num_frames="auto")


# ---- evaluate


@pytest.fixture(scope="module")
def logits() -> list[np.ndarray]:
    return random_logits(TAUGHT_LENGTHS, LABELS)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory, logits: list[np.ndarray]) -> Bank:
    found = write_bank(tmp_path_factory.mktemp("adaptive") / "bank", TAUGHT_LENGTHS, LABELS, wide=(1, 4))
    teach(found, logits)
    return found


@pytest.mark.parametrize("make", [believing, ranking])
def test_rows_of_an_evaluation(bank: Bank, logits: list[np.ndarray], make: Any) -> None:
    sampler = make()
    tolerances = [0.0, 0.02]
    found = evaluate(
        bank,
        {"learned": sampler, "uniform": "uniform"},
        num_frames=[2, "auto"],
        num_candidates=[T, 5],
        auto_max=6,
        auto_tolerance=tolerances,
        bootstrap=50,
    )
    assert found.facts["num_frames"] == [2, "auto"]
    assert found.facts["auto"]["+auto@0.02"] == {"num_frames": "auto", "min": 1, "max": 6, "tolerance": 0.02}
    all_counts: set[int] = set()
    for tolerance in tolerances:
        for candidates in (T, 5):
            name = f"learned+auto@{tolerance:g}"
            row, chosen = found.row(name, None, candidates), found.chosen(name, None, candidates)
            right, counts = [], []
            for number, length in enumerate(TAUGHT_LENGTHS):
                offered = distinct(length, candidates)
                frames = torch.from_numpy(bank[number].frames(offered)).permute(0, 3, 1, 2)
                _, picked = by_hand(sampler, frames, Auto(max=6, tolerance=tolerance))
                slots = [offered[place] for place in picked]
                assert [slot for slot in chosen[number].tolist() if slot >= 0] == slots
                answer = softmax(logits[number][slots].mean(0))
                right.append(int(answer.argmax()) in LABELS[number])
                counts.append(len(slots))
            assert row.num_frames is None
            assert row.top1 == pytest.approx(np.mean(right))
            assert row.frames_classified == pytest.approx(np.mean(counts))
            assert row.frames_decoded == candidates
            assert row.versus_uniform is not None
            assert row.versus_uniform["num_frames"] == int(np.ceil(np.mean(counts)))
            all_counts |= set(counts)
    assert len(all_counts) > 2, "a number that hardly differs proves nothing"
    assert found.row("uniform").num_frames == 2
    assert found.row("learned", 2, T).fidelity is not None
    looks = looks_of_rows([row.to_dict() for row in found.rows])
    assert looks["learned+auto@0.02"].kind == LEARNED != SYSTEM
    json.dumps(found.to_dict())


def test_gmacs_are_those_of_the_frames_taken(bank: Bank) -> None:
    class Priced:
        """What a classifier costs that is not linear in its frames."""

        name, class_names = "given", ("a", "b", "c")

        def fingerprint(self) -> str:
            return "ab" * 8

        def clip_probs(self, frames: Any, positions: Any = None) -> Any:
            raise AssertionError("its answers are in the bank")

        def gmacs(self, num_frames: int) -> float:
            return float(num_frames**2)

    found = evaluate(
        bank, {"learned": believing()}, num_frames="auto", num_candidates=T, classifier=Priced(), bootstrap=0, **FREE
    )
    (row,) = found.rows
    counts = (found.chosen("learned+auto") >= 0).sum(1)
    assert row.classifier_gmacs == pytest.approx((counts**2).mean())
    assert row.classifier_gmacs != pytest.approx(counts.mean() ** 2)
    assert row.sampler_gmacs == believing().gmacs(T)


def test_a_run_and_its_table(bank: Bank, tmp_path: Path) -> None:
    folder = believing_folder()
    done = run(
        *(evaluate_command, bank.path, "-p", f"learned={folder}", "-p", "uniform", "-n", "1,auto", "-t", T),
        *("--auto-tolerance", "0,0.05", "--bootstrap", 20, "--run", tmp_path / "run", "--device", "cpu"),
        *("--csv", tmp_path / "rows.csv", "--curve", tmp_path / "curve.png"),
    )
    assert done.exit_code == 0, done.output
    first = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert first == ["learned", "uniform", "learned+auto@0", "learned+auto@0.05"]
    page = write_run_report([tmp_path / "run"], tmp_path / "page.html")
    assert "learned+auto" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("policies", "options", "words"),
    [
        (["uniform"], {"num_frames": "auto"}, "not for the policy 'uniform'; add a number"),
        (["uniform"], {"num_frames": [2, "auto"]}, "there is none among the policies"),
        ({"a": believing}, {"num_frames": 2, "auto_min": 2}, "auto_min=2 is for num_frames='auto'"),
        ({"a": believing}, {"num_frames": "auto", "auto_tolerance": []}, "auto_tolerance is empty"),
        ({"a+auto": believing}, {"num_frames": 2}, "cannot be called 'a.auto'"),
        ({"a": believing}, {"num_frames": "some"}, "num_frames='some'"),
    ],
)
def test_what_evaluate_refuses(bank: Bank, policies: Any, options: dict[str, Any], words: str) -> None:
    given = {name: make() for name, make in policies.items()} if isinstance(policies, dict) else policies
    with pytest.raises(InvalidArgument, match=words):
        evaluate(bank, given, num_candidates=T, **options)
