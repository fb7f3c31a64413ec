"""Fine-tuning a classifier: it learns, goes on after a kill as if nothing had happened, and says what is wrong."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import sosampler as so
from sosampler.cli.main import main
from sosampler.evaluation.result import mean_average_precision, top1
from sosampler.training import loop as loop_module
from sosampler.training import train_classifier as module
from sosampler.training.classifier_data import ClassifierBatches, ImageExamples, read_image
from sosampler.training.optim import check_loss, settled_precision, warmup_cosine
from sosampler.video.synthetic import encode_video

TINY = "timm:test_resnet.r160_in1k"
COLOURS = {"red": (200, 70, 70), "green": (70, 200, 70), "blue": (70, 70, 200)}
QUICK = {"epochs": 3, "batch_size": 8, "input_size": 32, "workers": 0, "lr": 0.05, "device": "cpu"}


def coloured(rng: np.random.Generator, colour: tuple[int, int, int], size: tuple[int, int] = (40, 52)) -> np.ndarray:
    return (rng.normal(0, 30, (*size, 3)) + np.array(colour)).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "pictures"
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("test", 5)):
        for name, colour in COLOURS.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                Image.fromarray(coloured(rng, colour)).save(root / split / name / f"{number}.png")
    return root


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight short videos of each colour, as a CSV."""
    root = tmp_path_factory.mktemp("videos")
    rng = np.random.default_rng(1)
    rows = []
    for name, colour in COLOURS.items():
        for number in range(8):
            path = root / f"{name}{number}.mp4"
            path.write_bytes(encode_video([coloured(rng, colour, (48, 64)) for _ in range(10)], fps=10))
            split = "train" if number < 5 else "dev" if number < 7 else "test"
            rows.append({"path": path.name, "label": name, "split": split})
    with (root / "videos.csv").open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, ["path", "label", "split"])
        writer.writeheader()
        writer.writerows(rows)
    return root / "videos.csv"


def test_pictures_are_learnt(pictures: Path, tmp_path: Path) -> None:
    said: list[str] = []
    trained = so.train_classifier(pictures, TINY, out=tmp_path / "run", say=said.append, **QUICK | {"epochs": 6})
    assert trained.result["test"] >= 0.9
    assert trained.result["sizes"] == {"train": 43, "dev": 5, "test": 15}  # dev carved out of train
    assert len([line for line in said if line.startswith("epoch ")]) == 6
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == list(range(6))
    assert log[-1]["loss"] < log[0]["loss"]
    assert max(line["dev_top1"] for line in log) == trained.result["dev"]
    assert not (tmp_path / "run/checkpoint.pt").exists()

    again = so.create_classifier(tmp_path / "run")
    assert again.fingerprint() == trained.classifier.fingerprint() == trained.result["fingerprint"]
    assert again.class_names == tuple(sorted(COLOURS))
    right = 0
    for path in sorted((pictures / "test").rglob("*.png")):
        frame = torch.from_numpy(read_image(path, at_least=64).transpose(2, 0, 1).copy())
        right += again.class_names[int(again.clip_probs(frame[None, None]).argmax())] == path.parent.name
    assert right / 15 == pytest.approx(trained.result["test"])


def test_the_best_epoch_is_kept_not_the_last(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.2, 0.9, 0.5])
    states = []
    real = module.predict

    def predict(classifier, *rest):
        states.append({key: tensor.clone() for key, tensor in classifier.net.state_dict().items()})
        return real(classifier, *rest)

    monkeypatch.setattr(module, "predict", predict)
    monkeypatch.setattr(module, "measure", lambda *found, multi_label: {"top1": next(scores)})
    trained = so.train_classifier(pictures / "train", TINY, out=tmp_path / "run", **QUICK)
    assert trained.result["best_epoch"] == 1
    for key, tensor in trained.classifier.net.state_dict().items():
        assert torch.equal(tensor, states[1][key])
    assert not torch.equal(states[1]["fc.weight"], states[2]["fc.weight"])


@pytest.mark.parametrize("stop_at", [3, 7, 13])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """5 steps an epoch: stopped within the first, the second and the third."""
    options = {"drop_rate": 0.3}
    whole = so.train_classifier(pictures, TINY, out=tmp_path / "whole", options=options, **QUICK)
    monkeypatch.setattr(loop_module, "_SAVE_EVERY", -1.0)  # after every step
    real = module.ClassifierLoop.train_step

    def stopping(loop, batch):
        if loop.step == stop_at:
            raise KeyboardInterrupt
        return real(loop, batch)

    monkeypatch.setattr(module.ClassifierLoop, "train_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        so.train_classifier(pictures, TINY, out=tmp_path / "broken", options=options, **QUICK)
    monkeypatch.setattr(module.ClassifierLoop, "train_step", real)
    said: list[str] = []
    leftover = tmp_path / "broken/.checkpoint.123.part.pt"  # as a kill leaves it
    leftover.write_bytes(b"half")
    so.train_classifier(pictures, TINY, out=tmp_path / "broken", options=options, say=said.append, **QUICK)
    assert f"resuming at step {stop_at} of 15" in said
    assert not leftover.exists()
    for name in ("model.safetensors", "log.jsonl", "result.json", "config.json"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert whole.result["dev"] > 0


def test_stopped_between_the_last_step_and_the_evaluation(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    so.train_classifier(pictures, TINY, out=tmp_path / "whole", **QUICK)
    monkeypatch.setattr(loop_module, "_SAVE_EVERY", -1.0)

    def stop(*rest):
        raise KeyboardInterrupt

    for epoch in range(3):
        # Stopped in the evaluation of an epoch; then that is made up for, and the next epoch is stopped at once.
        for home, name in ((module, "predict"), (module.ClassifierLoop, "train_step")):
            if (epoch, name) == (2, "train_step"):
                break
            with monkeypatch.context() as patch:
                patch.setattr(home, name, stop)
                with pytest.raises(KeyboardInterrupt):
                    so.train_classifier(pictures, TINY, out=tmp_path / "broken", **QUICK)
    so.train_classifier(pictures, TINY, out=tmp_path / "broken", **QUICK)
    for name in ("model.safetensors", "log.jsonl", "result.json"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.slow
def test_killed_for_good_and_started_again(pictures: Path, tmp_path: Path) -> None:
    code = (
        "import sys, sosampler as so\n"
        "from sosampler.training import loop as loop_module\n"
        "loop_module._SAVE_EVERY = 0.05\n"
        f"so.train_classifier({str(pictures)!r}, {TINY!r}, out=sys.argv[1], **{QUICK | {'epochs': 12}!r})\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, env=environment)
    rng = np.random.default_rng(0)
    for _ in range(4):
        process = subprocess.Popen([*command, str(tmp_path / "killed")], env=environment)
        while not (tmp_path / "killed/checkpoint.pt").exists() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 1.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([*command, str(tmp_path / "killed")], check=True, env=environment)
    for name in ("model.safetensors", "log.jsonl", "result.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not list((tmp_path / "killed").glob(".*"))


def test_a_finished_run_is_not_run_again_and_another_is_refused(pictures: Path, tmp_path: Path) -> None:
    first = so.train_classifier(pictures, TINY, out=tmp_path / "run", **QUICK)
    said: list[str] = []
    second = so.train_classifier(pictures, TINY, out=tmp_path / "run", say=said.append, **QUICK)
    assert said == [f"{tmp_path / 'run'}: this run is finished"]
    assert second.result == first.result
    assert second.classifier.fingerprint() == first.classifier.fingerprint()
    with pytest.raises(so.InvalidArgument, match=r"recipe.lr was 0.05, is 0.01"):
        so.train_classifier(pictures, TINY, out=tmp_path / "run", **QUICK | {"lr": 0.01})
    third = so.train_classifier(pictures, TINY, out=tmp_path / "run", overwrite=True, **QUICK | {"epochs": 1})
    assert third.result["epochs"] == 1


def test_seeds_decide(pictures: Path, tmp_path: Path) -> None:
    prints = [
        so.train_classifier(pictures, TINY, out=tmp_path / name, seed=seed, **QUICK | {"epochs": 1}).result
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert prints[0] == prints[1]
    assert prints[0]["fingerprint"] != prints[2]["fingerprint"]


def test_workers_change_nothing(pictures: Path, tmp_path: Path) -> None:
    one = so.train_classifier(pictures, TINY, out=tmp_path / "a", **QUICK | {"epochs": 1})
    two = so.train_classifier(pictures, TINY, out=tmp_path / "b", **QUICK | {"epochs": 1, "workers": 2})
    assert one.result == two.result


@pytest.mark.parametrize("classifier", [TINY, "x3d_s"])
def test_videos_are_decoded_once_and_learnt(videos: Path, tmp_path: Path, classifier: str) -> None:
    epochs = 6 if classifier == TINY else 1
    trained = so.train_classifier(
        videos, classifier, out=tmp_path / "run", num_frames=3, **QUICK | {"epochs": epochs, "workers": 1}
    )
    assert trained.result["sizes"] == {"train": 15, "dev": 6, "test": 3}
    bank = so.Bank(tmp_path / "run/decoded_frames")
    assert len(bank) == 24
    if classifier == TINY:
        assert trained.result["test"] == 1.0
    # The same from that bank: the same examples, the same weights.
    banked = so.train_classifier(
        bank.path, classifier, out=tmp_path / "banked", num_frames=3, **QUICK | {"epochs": epochs}
    )
    assert banked.result == trained.result


def test_several_labels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(48):
        red, blue = number % 2, (number // 2) % 2
        picture = coloured(rng, (200 if red else 40, 90, 200 if blue else 40))
        Image.fromarray(picture).save(tmp_path / f"{number}.png")
        labels = ";".join(name for name, on in (("red", red), ("blue", blue)) if on)
        rows.append((f"{number}.png", labels, "train" if number < 36 else "dev"))
    (tmp_path / "m.csv").write_text("path,labels,split\n" + "\n".join(",".join(row) for row in rows), encoding="utf-8")
    trained = so.train_classifier(tmp_path / "m.csv", TINY, out=tmp_path / "run", **QUICK | {"epochs": 8})
    assert trained.result["metric"] == "mAP"
    assert trained.result["dev"] > 0.9
    assert so.create_classifier(tmp_path / "run").multi_label


def test_weights_give_the_start_and_the_head_if_it_fits(pictures: Path, tmp_path: Path) -> None:
    first = so.train_classifier(pictures, TINY, out=tmp_path / "first", **QUICK)
    weights = tmp_path / "first/model.safetensors"
    said: list[str] = []
    once = {**QUICK, "epochs": 1, "lr": 1e-9}
    kept = so.train_classifier(pictures, TINY, out=tmp_path / "kept", weights=weights, say=said.append, **once)
    assert "the head of the weights" in said[0]
    assert not kept.result["fresh_head"]
    assert kept.result["test"] == first.result["test"]
    (tmp_path / "two/red").mkdir(parents=True)
    (tmp_path / "two/blue").mkdir()
    for name in ("red", "blue"):
        for path in (pictures / "train" / name).glob("*.png"):
            (tmp_path / "two" / name / path.name).write_bytes(path.read_bytes())
    fresh = so.train_classifier(tmp_path / "two", TINY, out=tmp_path / "fresh", weights=weights, **once)
    assert fresh.result["fresh_head"]


def test_another_kind_of_head_is_fresh_also_for_the_same_classes(pictures: Path, tmp_path: Path) -> None:
    so.train_classifier(pictures, TINY, out=tmp_path / "first", **QUICK)
    weights = tmp_path / "first/model.safetensors"
    once = {**QUICK, "epochs": 1, "lr": 1e-9, "options": {"head": "frameexit"}}
    trained = so.train_classifier(pictures, TINY, out=tmp_path / "other", weights=weights, **once)
    assert trained.result["fresh_head"]
    backbone = trained.classifier.net.backbone.state_dict()
    assert torch.allclose(backbone["conv1.0.weight"], load_file(weights)["conv1.0.weight"], atol=1e-6)


def test_only_the_head_learns_where_asked(pictures: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    start = so.create_classifier(TINY, num_classes=7)
    so.save_classifier(start, tmp_path / "start")
    trained = so.train_classifier(
        pictures, TINY, out=tmp_path / "run", weights=tmp_path / "start/model.safetensors", trainable="head", **QUICK
    )
    before, after = start.net.state_dict(), trained.classifier.net.state_dict()
    assert [key for key in after if not torch.equal(before[key], after[key])] == ["fc.weight", "fc.bias"]


def test_ones_own_network_learns(pictures: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    wrapped = so.wrap_classifier(net, input_size=32, layout="BCHW", name="mine")
    settings = {key: value for key, value in QUICK.items() if key != "input_size"} | {"epochs": 6}
    trained = so.train_classifier(pictures, wrapped, out=tmp_path / "run", **settings)
    assert trained.result["test"] >= 0.9
    assert trained.classifier is wrapped
    assert set(load_file(tmp_path / "run/model.safetensors")) == set(net.state_dict())  # its owner's own names
    assert not any(parameter.requires_grad for parameter in wrapped.parameters())


def test_a_saved_classifier_is_trained_on(pictures: Path, tmp_path: Path) -> None:
    first = so.train_classifier(pictures, TINY, out=tmp_path / "first", options={"head": "frameexit"}, **QUICK)
    more = {key: value for key, value in QUICK.items() if key != "input_size"} | {"epochs": 1, "lr": 1e-9}
    second = so.train_classifier(pictures, tmp_path / "first", out=tmp_path / "second", **more)
    # Norms see the pictures again, so answers may change; at such a rate weights do not.
    before = dict(first.classifier.net.named_parameters())
    for name, weights in second.classifier.net.named_parameters():
        torch.testing.assert_close(weights, before[name], rtol=0, atol=1e-6)
    assert second.classifier.preprocessing.size == (32, 32)
    assert not second.result["fresh_head"]
    other = small_copy(pictures, tmp_path / "two")
    third = so.train_classifier(other, tmp_path / "first", out=tmp_path / "third", **more)
    assert third.result["fresh_head"]
    assert third.classifier.class_names == ("blue", "red")
    assert third.classifier.pooling == "max"


def test_overwriting_forgets_all_of_the_old_run(videos: Path, tmp_path: Path) -> None:
    """Other videos under the same names: neither the old frames nor the old weights may be used."""
    options = QUICK | {"epochs": 1, "num_frames": 2}
    first = so.train_classifier(videos, TINY, out=tmp_path / "run", **options)
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in videos.parent.iterdir():
        target = path.name.replace("red", "tmp").replace("blue", "red").replace("tmp", "blue")
        (moved / target).write_bytes(path.read_bytes())
    (moved / "videos.csv").write_bytes(videos.read_bytes())
    with pytest.raises(so.InvalidArgument, match=r"data\.path was"):
        so.train_classifier(moved / "videos.csv", TINY, out=tmp_path / "run", **options)
    second = so.train_classifier(moved / "videos.csv", TINY, out=tmp_path / "run", overwrite=True, **options)
    assert second.result["fingerprint"] != first.result["fingerprint"]


def test_unreadable_videos_are_counted_and_never_replaced(videos: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in videos.parent.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    for name in ("red0.mp4", "green7.mp4"):
        (broken / name).write_bytes(b"no video")
    said: list[str] = []
    options = QUICK | {"epochs": 1, "num_frames": 2}
    trained = so.train_classifier(broken / "videos.csv", TINY, out=tmp_path / "run", say=said.append, **options)
    assert trained.result["unreadable"] == 2
    assert trained.result["sizes"] == {"train": 14, "dev": 6, "test": 2}
    assert "2 videos are unreadable" in said[0]
    for path in broken.glob("*[56].mp4"):  # the whole of dev
        path.write_bytes(b"no video")
    with pytest.raises(so.InvalidArgument, match=r"0 examples in the dev split \(8 videos are unreadable"):
        so.train_classifier(broken / "videos.csv", TINY, out=tmp_path / "other", **options)


def test_several_labels_with_windows_that_overlap(tmp_path: Path) -> None:
    """X3D at more than 160 px joins windows; classes that stand by themselves may all be likely."""
    torch.manual_seed(0)
    classifier = so.create_classifier("x3d_s", num_classes=3, multi_label=True)
    classifier.net.blocks[-1].proj.bias.data += 9
    clip = torch.full((1, 1, 3, 182, 182), 128, dtype=torch.uint8)
    assert (classifier.clip_probs(clip) > 0.9).all()


# ---- what cannot be


def small_copy(pictures: Path, target: Path) -> Path:
    for name in ("red", "blue"):
        (target / name).mkdir(parents=True)
        for number in range(10):
            (target / name / f"{number}.png").write_bytes((pictures / "train" / name / f"{number}.png").read_bytes())
    return target


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_picture_is_named(pictures: Path, tmp_path: Path, workers: int) -> None:
    data = small_copy(pictures, tmp_path / "data")
    (data / "red/3.png").write_bytes(b"no picture")
    with pytest.raises(so.InvalidArgument) as caught:
        so.train_classifier(data, TINY, out=tmp_path / "run", **QUICK | {"workers": workers})
    assert "red/3.png: cannot be read as an image" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_data_inside_the_folder_is_never_overwritten(videos: Path, tmp_path: Path) -> None:
    options = QUICK | {"epochs": 1, "num_frames": 2}
    so.train_classifier(videos, TINY, out=tmp_path / "run", **options)
    with pytest.raises(so.InvalidArgument, match="lie inside each other"):
        so.train_classifier(tmp_path / "run/decoded_frames", TINY, out=tmp_path / "run", overwrite=True, **options)
    assert len(so.Bank(tmp_path / "run/decoded_frames")) == 24


def test_a_run_that_has_not_begun_may_change(pictures: Path, tmp_path: Path) -> None:
    """An unreadable picture is told before training; with it removed, the same folder will do."""
    data = small_copy(pictures, tmp_path / "data")
    (data / "red/3.png").write_bytes(b"no picture")
    with pytest.raises(so.InvalidArgument, match=r"red/3.png"):
        so.train_classifier(data, TINY, out=tmp_path / "run", **QUICK)
    (data / "red/3.png").unlink()
    assert so.train_classifier(data, TINY, out=tmp_path / "run", **QUICK).result["dev"] >= 0


def test_files_that_no_run_wrote_are_left_alone(pictures: Path, tmp_path: Path) -> None:
    classifier = so.create_classifier(TINY, num_classes=4)
    so.save_classifier(classifier, tmp_path / "mine")
    for overwrite in (False, True):
        with pytest.raises(so.InvalidArgument, match="not of a training run and would be replaced"):
            so.train_classifier(pictures, TINY, out=tmp_path / "mine", overwrite=overwrite, **QUICK)
    assert so.create_classifier(tmp_path / "mine").fingerprint() == classifier.fingerprint()


def test_other_labels_or_other_weights_are_another_run(pictures: Path, tmp_path: Path) -> None:
    manifest = so.read_manifest(pictures, suffixes={".png"})
    quick = QUICK | {"epochs": 1}
    so.train_classifier(manifest, TINY, out=pictures.parent / "beside", **quick)
    with pytest.raises(so.InvalidArgument, match="lie inside each other"):
        so.train_classifier(pictures, TINY, out=pictures / "run", **quick)
    so.train_classifier(manifest, TINY, out=tmp_path / "run", **quick)
    shifted = replace(
        manifest, items=tuple(replace(item, labels=((item.labels[0] + 1) % 3,)) for item in manifest.items)
    )
    with pytest.raises(so.InvalidArgument, match=r"data\.digest was"):
        so.train_classifier(shifted, TINY, out=tmp_path / "run", **quick)
    so.save_classifier(so.create_classifier(TINY, num_classes=9), tmp_path / "start")
    weights = tmp_path / "start/model.safetensors"
    with pytest.raises(so.InvalidArgument, match="start was"):
        so.train_classifier(manifest, TINY, out=tmp_path / "run", weights=weights, **quick)


def test_a_head_of_other_classes_is_not_kept(pictures: Path, tmp_path: Path) -> None:
    so.save_classifier(so.create_classifier(TINY, class_names=["red", "green", "blue"]), tmp_path / "start")
    weights = tmp_path / "start/model.safetensors"
    trained = so.train_classifier(pictures, TINY, out=tmp_path / "run", weights=weights, **QUICK | {"epochs": 1})
    assert trained.result["fresh_head"]  # three classes as well, but in another order


def test_a_network_with_a_single_child_called_module(pictures: Path, tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))

        def forward(self, frames: torch.Tensor) -> torch.Tensor:
            return self.module(frames)

    settings = {key: value for key, value in QUICK.items() if key != "input_size"}
    wrapped = so.wrap_classifier(Outer(), input_size=32, layout="BCHW")
    assert so.train_classifier(pictures, wrapped, out=tmp_path / "run", **settings).result["dev"] >= 0


def test_the_callers_random_numbers_stay(pictures: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    so.train_classifier(pictures, TINY, out=tmp_path / "run", **QUICK | {"epochs": 1})
    assert torch.equal(torch.rand(3), expected)


def test_pictures_of_16_bits(tmp_path: Path) -> None:
    grey = (np.arange(64 * 64, dtype=np.uint16) * 16).reshape(64, 64)
    Image.fromarray(grey).save(tmp_path / "deep.png")
    found = read_image(tmp_path / "deep.png", at_least=1)
    assert found.shape == (64, 64, 3)
    assert np.abs(found[..., 1].astype(int) - grey // 257).max() == 0


def test_damaged_run_folders_are_told(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    so.train_classifier(pictures, TINY, out=tmp_path / "run", **QUICK)
    (tmp_path / "run/result.json").write_text("{")
    with pytest.raises(so.WeightsError, match=r"result.json: is damaged"):
        so.train_classifier(pictures, TINY, out=tmp_path / "run", **QUICK)
    (tmp_path / "run/result.json").unlink()
    (tmp_path / "run/checkpoint.pt").write_bytes(b"damaged")
    with pytest.raises(so.WeightsError, match=r"checkpoint.pt: cannot be read"):
        so.train_classifier(pictures, TINY, out=tmp_path / "run", **QUICK)


def test_a_network_with_other_names_is_refused(pictures: Path, tmp_path: Path) -> None:
    named = so.create_classifier(TINY, class_names=["red", "green", "blue"], input_size=32)
    with pytest.raises(so.InvalidArgument, match="calls class 0 'red', the data 'blue'"):
        so.train_classifier(pictures, named, out=tmp_path / "run", epochs=1)


def test_a_clip_longer_than_the_network_takes_is_told_before_decoding(videos: Path, tmp_path: Path) -> None:
    with pytest.raises(so.InvalidArgument, match="at most 16 frames"):
        so.train_classifier(videos, "torchvision:mvit_v2_s", out=tmp_path / "run", num_frames=20, device="cpu")
    assert not (tmp_path / "run").exists()


def test_classes_that_do_not_fit(pictures: Path, tmp_path: Path) -> None:
    five = so.create_classifier(TINY, num_classes=5, input_size=32)
    with pytest.raises(so.InvalidArgument, match="has 5 classes, the data 3"):
        so.train_classifier(pictures, five, out=tmp_path / "run", epochs=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"lr": -1.0}, "lr=-1"),
        ({"optimizer": "adam"}, "sgd, adamw"),
        ({"crop_scale": (0.5, 1.5)}, "crop_scale"),
        ({"crop_ratio": (2.0, 1.0)}, "smaller number first"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"trainable": "neck"}, "all, head"),
        ({"no_such": 1}, "no setting 'no_such'"),
        ({"precision": "int8"}, "float32"),
        ({"dev_share": 0.0}, "0 examples in the dev split"),
        ({"batch_size": 1}, "at least 2"),
        ({"workers": -1}, "workers=-1"),
        ({"device": "tpu"}, "device='tpu' cannot be used here"),
        ({"input_size": 1}, "input_size|cannot take frames"),
        ({"options": {"weights": "x"}}, "options must not have 'weights'"),
        ({"options": {"drop_rate": 5}}, "drop_rate=5"),
        ({"options": {"stride_on_1x1": "no"}}, "must be True or False"),
    ],
)
def test_settings_are_checked_before_anything_is_written(
    pictures: Path, tmp_path: Path, settings: dict, says: str
) -> None:
    with pytest.raises(so.InvalidArgument, match=says):
        so.train_classifier(pictures, TINY, out=tmp_path / "run", **QUICK | settings)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_explodes_is_told(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(so.InvalidArgument, match="lower the learning rate"):
        so.train_classifier(pictures, TINY, out=tmp_path / "run", **QUICK | {"lr": 1e30})


def test_float16_that_explodes_is_told(pictures: Path, tmp_path: Path) -> None:
    """Steps are left out while gradients alone overflow; a network that is broken is told, on dev at the latest."""
    options = QUICK | {"lr": 1e30, "precision": "float16", "epochs": 30, "batch_size": 24}
    said: list[str] = []
    with pytest.raises(so.InvalidArgument, match=r"lower the learning rate \(lr=1e\+30\) or train with precision"):
        so.train_classifier(pictures, TINY, out=tmp_path / "run", say=said.append, **options)
    assert len(said) < 12  # not after all epochs


def test_what_cannot_recover_is_told() -> None:
    network = nn.BatchNorm1d(2)
    given = {"step": 7, "lr": 0.1}
    check_loss(1.0, network, precision="bfloat16", **given)
    check_loss(float("inf"), network, precision="float16", **given)
    assert network.running_var is not None
    network.running_var[1] = float("nan")
    for precision in ("float32", "bfloat16", "float16"):
        with pytest.raises(so.InvalidArgument, match="the loss is inf near step 7; lower") as told:
            check_loss(float("inf"), network, precision=precision, **given)
        assert ("float32" in str(told.value)) == (precision != "float32")
    check_loss(1.0, network, precision="float16", **given)


def test_precision_is_what_the_device_does_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that imitates bfloat16 is asked for float16."""
    asked: list[torch.device] = []

    def device(place: torch.device) -> nullcontext[None]:
        asked.append(place)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    second = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert settled_precision(second, None) == "float16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert settled_precision(second, None) == "bfloat16"
    assert asked == [second, second]
    assert settled_precision(torch.device("cpu"), None) == "float32"
    assert settled_precision(second, "float32") == "float32"
    with pytest.raises(so.InvalidArgument, match="precision='int8'"):
        settled_precision(second, "int8")


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sosampler", "train-classifier", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_command_line(pictures: Path, tmp_path: Path) -> None:
    quick = ["--epochs", "2", "--batch-size", "8", "--input-size", "32", "--workers", "0", "--device", "cpu"]
    done = run_cli(
        str(pictures), "--out", str(tmp_path / "run"), "-c", TINY, "--option", "head=frameexit", *quick, "--json"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["sizes"]["test"] == 15
    assert "epoch 2/2" in done.stderr
    assert so.create_classifier(tmp_path / "run").pooling == "max"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "no such file or folder"),
        ([".", "--option", "head"], "KEY=VALUE"),
        ([".", "-c", "resnet5"], "resnet5"),
        ([".", "--weights", "none.safetensors"], "none.safetensors: no such file"),
    ],
)
def test_command_line_mistakes(
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    place = [str(pictures) if part == "." else part for part in arguments]
    monkeypatch.setattr(sys, "argv", ["sosampler", "train-classifier", *place, "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ---- the parts


def test_batches_of_an_epoch_hold_every_example_once(pictures: Path) -> None:
    paths = sorted((pictures / "train").rglob("*.png"))
    recipe = so.ClassifierRecipe(batch_size=8)
    examples = ImageExamples(paths, [(0,)] * len(paths), 3, so.Preprocessing(size=(16, 16), resize=16), recipe)
    batches = ClassifierBatches(examples, workers=0, pin_memory=False)
    first = [list(batch) for batch in _keys(batches, 0)]
    assert sorted(number for batch in first for _, number in batch) == list(range(48))
    assert first != [list(batch) for batch in _keys(batches, 1)]
    assert first[4:] == [list(batch) for batch in _keys(batches, 0, begin=4)]
    assert torch.equal(examples[(0, 3)][0], examples[(0, 3)][0])
    assert not torch.equal(examples[(0, 3)][0], examples[(1, 3)][0])
    assert torch.equal(examples[(None, 3)][0], examples.preprocessing.resized(_pixels(paths[3])))


def _keys(batches: ClassifierBatches, epoch: int, begin: int = 0) -> list:
    batches.epoch(epoch, begin)
    return list(batches._keys)


def _pixels(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(path)).transpose(2, 0, 1).copy())[None]


def test_rate_rises_and_falls_to_nothing() -> None:
    rates = [2.0 * warmup_cosine(step, 100, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert max(rates) == 2.0
    assert all(later <= earlier for earlier, later in pairwise(rates[10:]))
    assert rates[-1] < 0.01


def test_metrics_against_loops() -> None:
    rng = np.random.default_rng(0)
    scores, truth = rng.random((40, 6)), rng.random((40, 6)) < 0.3
    truth[:, 5] = False  # a class without positives is left out
    expected = []
    for label in range(5):
        order = np.argsort(-scores[:, label])
        hits = truth[order, label]
        precision = np.cumsum(hits) / np.arange(1, 41)
        expected.append((precision * hits).sum() / hits.sum())
    assert mean_average_precision(scores, truth) == pytest.approx(np.mean(expected))
    assert top1(scores, truth) == np.mean([truth[row, scores[row].argmax()] for row in range(40)])
    assert np.isnan(mean_average_precision(scores, np.zeros_like(truth)))
