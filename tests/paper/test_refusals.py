"""What stops a reproduction, and what does not: other settings in one folder, bad input, trainings that diverge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import sosampler as so
from sosampler.bank.bank import Bank
from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.paper import run as runner
from sosampler.paper.locations import find_locations
from sosampler.paper.run import reproduce
from sosampler.training import optim
from sosampler.training.optim import diverged
from tests.factories import TINY, make_bank, teach

SMALL: dict[str, Any] = {"backbone": TINY, "shift": 0, "input_size": 32, "batch_size": 8}
QUICK: dict[str, Any] = {
    "seeds": (0,),
    "epochs": 1,
    "settings": SMALL,
    "device": "cpu",
    "workers": 1,
    "bootstrap": 0,
}


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return make_bank(tmp_path_factory.mktemp("refusals") / "bank", stored=10, train=6, dev=6)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That fit the tiny backbone."""
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    network = timm.create_model(TINY.removeprefix("timm:"), pretrained=False)
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, path)
    return path


@pytest.fixture(scope="module")
def trained(bank: Bank, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where figure II was made, whose sampler table 7 shows too."""
    out = tmp_path_factory.mktemp("trained") / "out"
    reproduce("figureII", {"own": bank}, out=out, **QUICK)
    return out


def state_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


# ---- samplers of another run in the same folder


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("weights", r"paper-0: was trained with other settings: start was None, is '\w+'"),
        ("precision", r"paper-0: was trained with other settings: precision was 'float32', is 'float16'"),
        ("epochs", r"paper-0: was trained with other settings: recipe.epochs was 1, is 2"),
    ],
)
def test_a_sampler_of_other_settings_stops_the_run(
    bank: Bank, trained: Path, weights: Path, change: str, sentence: str
) -> None:
    more: dict[str, Any] = {"weights": weights, "precision": "float16", "epochs": 2}
    before = state_of(trained)
    with pytest.raises(InvalidArgument, match=sentence):
        reproduce(["table1", "table3"], {"own": bank}, out=trained, **{**QUICK, change: more[change]})
    assert state_of(trained) == before


def test_a_sampler_of_another_bank_or_teacher_stops_the_run(bank: Bank, trained: Path, tmp_path: Path) -> None:
    other = make_bank(tmp_path / "bank", stored=10, train=8, dev=6)
    with pytest.raises(InvalidArgument, match=r"paper-0: was trained with other settings: bank.digest was"):
        reproduce("table3", {"own": other}, out=trained, **QUICK)
    out = shutil.copytree(trained, tmp_path / "out")
    same = Bank(shutil.copytree(bank.path, tmp_path / "same"))
    answers = [same.teacher()[place].features for place in range(len(same))]
    teach(same, [answer for answer in answers if answer is not None], name="ab" * 8)
    (out / "own" / "by-hand" / "samplers").rename(out / "samplers")
    for kept in (out / "samplers").glob("*/run.json"):
        told = json.loads(kept.read_text())
        kept.write_text(json.dumps({**told, "bank": {**told["bank"], "path": str(same.path.resolve())}}))
    (out / "own" / "given").mkdir()
    (out / "samplers").rename(out / "own" / "given" / "samplers")
    with pytest.raises(InvalidArgument, match=r"paper-0: was trained with other settings: teacher.name was 'a+', is"):
        reproduce("table3", {"own": same}, classifiers="ab" * 8, out=out, **QUICK)


def test_a_second_run_continues_where_the_cpu_is_fast_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There `train` takes bfloat16 for MobileNetV2, and so must the check of what lies in the folder."""
    bank = make_bank(tmp_path / "bank", stored=10, train=4, dev=4)
    mobilenet = {**QUICK, "settings": {"input_size": 32, "shift": 0, "batch_size": 4}}
    for fast, precision in ((True, "bfloat16"), (False, "float32")):
        out = tmp_path / precision
        monkeypatch.setattr(optim, "cpu_is_fast_in_bfloat16", lambda fast=fast: fast)
        (first,) = reproduce("figureII", {"own": bank}, out=out, **mobilenet)
        (run,) = out.rglob("paper-0/run.json")
        assert json.loads(run.read_text())["precision"] == precision
        (second,) = reproduce("figureII", {"own": bank}, out=out, **mobilenet)
        assert second.result == first.result
        # A trial that ends otherwise the next time changes nothing about a run that has begun.
        monkeypatch.setattr(optim, "cpu_is_fast_in_bfloat16", lambda fast=fast: not fast)
        (third,) = reproduce("figureII", {"own": bank}, out=out, **mobilenet)
        assert third.result == first.result


def test_a_refusal_of_train_is_no_failed_training(bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = runner.train_one

    def refused(training: Any, *rest: Any, **more: Any) -> Any:
        if training.name == "paper":
            raise InvalidArgument("holds a run with other settings")
        return plain(training, *rest, **more)

    monkeypatch.setattr(runner, "train_one", refused)
    with pytest.raises(InvalidArgument, match="holds a run with other settings"):
        reproduce("table6", {"own": bank}, out=tmp_path / "out", **QUICK)
    assert not list((tmp_path / "out").glob("*/*/table6"))


# ---- what is given


def broken_file(folder: Path) -> Path:
    path = folder / "broken.safetensors"
    path.write_text("garbage")
    return path


def other_network(folder: Path) -> Path:
    path = folder / "other.safetensors"
    save_file({"conv.weight": torch.zeros(3)}, path)
    return path


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"weights": broken_file}, "is not a complete safetensors file"),
        ({"weights": other_network}, "other.safetensors"),
        ({"device": "foo"}, "device='foo' cannot be used here"),
        ({"precision": "float8"}, "precision='float8' is unknown"),
        ({"settings": {**SMALL, "backbone": "nonsense"}}, "backbone='nonsense' must be"),
        ({"settings": {**SMALL, "backbone": "timm:nonsense"}}, "timm has no network 'nonsense'"),
        ({"light": "/nowhere"}, "--light '/nowhere': no saved sampler or classifier is there"),
        ({"light": "nowhere"}, "no features called 'nowhere'"),
        ({"features": {"r34": "/nowhere"}}, "--features r34 '/nowhere': no saved sampler or classifier is there"),
    ],
)
def test_bad_input_leaves_nothing_behind(bank: Bank, tmp_path: Path, more: dict[str, Any], sentence: str) -> None:
    given = {name: value(tmp_path) if callable(value) else value for name, value in more.items()}
    with pytest.raises(SosamplerError, match=sentence):
        reproduce("table6", bank.path, out=tmp_path / "out", **{**QUICK, **given})
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told(bank: Bank, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="device='cuda' cannot be used here"):
        reproduce("table1", bank.path, out=tmp_path / "out", **{**QUICK, "device": "cuda"})


def test_a_figure_of_a_sampler_needs_one(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank", stored=10, train=0, dev=6)
    with pytest.raises(InvalidArgument, match="figureII: it is about a trained sampler, and 0 videos with a label"):
        reproduce(["figureII", "figureIII"], bank.path, out=tmp_path / "out", **QUICK)
    found = reproduce(["figure2", "figureIII"], bank.path, out=tmp_path / "out", **QUICK)
    assert [bool(one.refused) for one in found] == [False, True]
    assert not found[1].folder.exists()


def test_rows_that_need_two_classes_are_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    splits = [*["train"] * 4, *["dev"] * 4]
    videos = [
        FrameEntry(id=f"v{number}", labels=(0,), frames=rng.integers(0, 255, (10, 40, 52, 3), np.uint8), split=split)
        for number, split in enumerate(splits)
    ]
    bank = write_frames(tmp_path / "bank", videos, classes=("only",), multi_label=False, videos_per_shard=20)
    with torch.random.fork_rng(devices=[]):
        classifier = so.create_classifier("timm:test_resnet", class_names=["only"], input_size=32)
    so.add_teacher(bank, classifier)
    given: dict[str, Any] = {"classifiers": {"own": classifier}, "out": tmp_path / "out"}
    (one,) = reproduce("tableII", bank.path, **given, **QUICK)
    baselines = {"adaframe", "ar-net", "adafocus", "frameexit"}
    assert {row["row"] for row in one.result["left_out"]} == {*baselines, "sosampler-default"}
    assert all("the bank has only one" in row["why"] for row in one.result["left_out"])


def test_a_name_that_is_no_data_set_is_told(bank: Bank, tmp_path: Path) -> None:
    said: list[str] = []
    for name in ("reels", "ActivityNet-v1.3", None):
        (one,) = reproduce("table1", bank if name is None else {name: bank}, out=tmp_path / str(name), say=said.append)
        assert one.result["bank"]["data"] == ("activitynet" if name == "ActivityNet-v1.3" else None)
    told = [text for text in said if text.startswith("--bank")]
    assert told == [
        "--bank reels: none of the paper's data sets (activitynet, mini_kinetics, mini_sports1m, coin), so its figures "
        "are of another one and for orientation only"
    ]


# ---- trainings that come to nothing


def test_a_failed_training_is_tried_once_and_its_rows_are_left_out(
    bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, tried = runner.train_one, list[str]()

    def failing(training: Any, *rest: Any, **more: Any) -> Any:
        tried.append(training.name)
        if training.name in ("paper", "authors", "default"):
            raise diverged("the loss is nan near step 3", lr=1.0, precision="float32")
        return plain(training, *rest, **more)

    monkeypatch.setattr(runner, "train_one", failing)
    names = ["table6", "figureII", "figureIII"]
    found = reproduce(names, bank.path, out=tmp_path / "out", **QUICK)
    why = "training with seed 0 failed: the loss is nan near step 3; lower the learning rate (lr=1)"
    assert [one.refused for one in found] == ["", why, why]
    assert tried.count("paper") == 1
    assert {row["row"]: row["why"] for row in found[0].result["left_out"]} == {"ranking-max-lg": why}
    assert len(found[0].result["rows"]) == 5
    assert not found[1].folder.exists()
    with pytest.raises(InvalidArgument, match="figureII: training with seed 0 failed"):
        reproduce(names[1:], bank.path, out=tmp_path / "out", **QUICK)


def test_a_rate_that_is_too_high_is_a_failed_training(bank: Bank, tmp_path: Path) -> None:
    settings = {**SMALL, "lr": 1e30, "optimizer": "sgd"}
    found = reproduce(["table1", "figureII"], bank.path, out=tmp_path / "out", **{**QUICK, "settings": settings})
    assert [one.refused.partition(":")[0] for one in found] == ["", "training with seed 0 failed"]


# ---- files that somebody changed


def test_damaged_folders_are_told_or_mended(bank: Bank, tmp_path: Path) -> None:
    (one,) = reproduce("table1", {"own": bank}, out=tmp_path / "out", **QUICK)
    text = (one.folder / "table.md").read_text()
    (one.folder / "table.md").unlink()
    reproduce("table1", {"own": bank}, out=tmp_path / "out", **QUICK)
    assert (one.folder / "table.md").read_text() == text
    kept = (one.folder / "result.json").read_text()
    (one.folder / "result.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"result.json: has no experiment, kind, title; delete the folder"):
        reproduce("table1", {"own": bank}, out=tmp_path / "out", **QUICK)
    (one.folder / "result.json").unlink()
    for parts in ("[]", '{"T=10": []}', '{"T=10": {"rows": [{}], "notes": []}}'):
        (one.folder / "evaluation.json").write_text(f'{{"parts": {parts}}}')
        with pytest.raises(InvalidArgument, match=r"evaluation.json: is not what a reproduction writes"):
            reproduce("table1", {"own": bank}, out=tmp_path / "out", **QUICK)
    (one.folder / "evaluation.json").unlink()
    reproduce("table1", {"own": bank}, out=tmp_path / "out", **QUICK)
    again = json.loads((one.folder / "result.json").read_text())
    assert again["rows"] == json.loads(kept)["rows"]


def test_other_numbers_of_videos_to_show_are_other_settings(bank: Bank, tmp_path: Path) -> None:
    reproduce("figure2", {"own": bank}, out=tmp_path / "out", num_cases=2, **QUICK)
    with pytest.raises(InvalidArgument, match="num_cases was 2, is 5"):
        reproduce("figure2", {"own": bank}, out=tmp_path / "out", num_cases=5, **QUICK)


def test_a_light_network_is_known_by_its_content(bank: Bank, tmp_path: Path) -> None:
    from sosampler.paper.experiments import EXPERIMENTS
    from sosampler.paper.plan import checked_request, make_plan

    told = []
    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            so.SOSampler(backbone=TINY, shift=0, input_size=32).save_pretrained(tmp_path / name)
        request = checked_request(tmp_path / "out", 0, 1, SMALL, None, tmp_path / name)
        plan = make_plan(EXPERIMENTS["table6"], find_locations(bank)[0], request)
        told.append(plan.settings()["light"])
    assert told[0] == told[1] != told[2]


# ---- names of folders


def test_two_teachers_of_one_name_get_folders_of_their_own(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank", stored=8, train=4, dev=4)
    answers = [bank.teacher()[place].features for place in range(len(bank))]
    teach(bank, answers, name="ab" * 8)
    teach(bank, answers, name="cd" * 8)
    places = find_locations(bank)
    assert [place.classifier_name for place in places] == ["by-hand", "given", "given-cdcdcdcd"]
    # One that comes later does not take the name, wherever its own name stands.
    teach(bank, answers, name="0a" * 8)
    assert [place.classifier_name for place in find_locations(Bank(bank.path))] == [
        *("given-0a0a0a0a", "by-hand", "given", "given-cdcdcdcd"),
    ]
    assert [place.classifier_name for place in find_locations(bank, "cd" * 8)] == ["given-cdcdcdcd"]
    named = find_locations([bank], ["resnet50=" + "ab" * 8, "by hand"])
    assert [place.classifier_name for place in named] == ["resnet50", "by-hand"]
    assert [place.teacher for place in named] == ["ab" * 8, "a" * 16]
    assert [place.paper_classifier for place in named] == ["resnet50", None]
