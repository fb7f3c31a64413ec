"""Classifiers in int8: they agree with float32, really run in int8, and refuse what does not fit."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sosampler as so
from benchmarks.speed.frames import lively_sampler, smooth_frames
from sosampler.bank.inspect import bank_frames, video_frames
from sosampler.classifiers.factory import INT8_MODEL, WEIGHTS, classifier_identity
from sosampler.cli.main import main
from sosampler.engine.backends import int8_classifier, int8_net
from sosampler.engine.frame_engine import FrameEngine
from sosampler.errors import InvalidArgument, SosamplerError, WeightsError
from sosampler.video.synthetic import numbered_video
from tests.doc_blocks import ROOT
from tests.factories import entries

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

SIZE = (56, 72)


def scattered_classifier(**options: Any) -> Any:
    """Return a classifier with random weights whose outputs differ between frames."""
    torch.manual_seed(0)
    classifier = so.create_classifier(
        "timm:test_resnet", class_names=["ant", "bee", "cat", "dog"], input_size=48, **options
    )
    for layer in classifier.net.modules():
        if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d):
            layer.momentum = None
    classifier.net.train()
    with torch.no_grad():
        classifier(classifier.preprocessing(smooth_frames(2, 16, SIZE, seed=5).movedim(-1, -3)))
        last = classifier.net.fc
        last.weight.mul_(3.0 / last.weight.std() / last.in_features**0.5)
    return classifier.freeze()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a quantized classifier."""
    folder = so.save_classifier(scattered_classifier(), tmp_path_factory.mktemp("int8") / "classifier")
    so.quantize_classifier(folder, smooth_frames(4, 12, SIZE, seed=1))
    return folder


@pytest.fixture(scope="module")
def sampler() -> Any:
    return lively_sampler(input_size=64)


@pytest.fixture
def again(folder: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(folder, tmp_path / "again"))


@pytest.mark.parametrize("backend", ["torch", "onnxruntime", "openvino"])
def test_int8_agrees_with_float32(folder: Path, sampler: Any, backend: str) -> None:
    if backend == "openvino":
        pytest.importorskip("openvino")
    classifier = so.create_classifier(folder)
    frames = smooth_frames(12, 6, SIZE, seed=2)
    plain = FrameEngine(sampler, classifier, num_frames=3, precision="float32").run(frames)
    engine = FrameEngine(sampler, classifier, num_frames=3, precision="int8", backend=backend)
    actual = engine.run(frames)
    assert "int8" in repr(engine)
    assert torch.equal(actual.chosen, plain.chosen), "the sampler stays in float32"
    assert plain.probabilities is not None
    assert actual.probabilities is not None
    assert len(plain.probabilities.argmax(1).unique()) > 1, "the test needs outputs that differ"
    difference = (actual.probabilities - plain.probabilities).abs()
    assert float(plain.probabilities.std(0).max()) > 0.1
    assert 0 < float(difference.mean()) < 0.03
    assert float(difference.max()) < 0.2


def test_every_layer_with_weights_is_int8_in_onnxruntime(folder: Path, tmp_path: Path) -> None:
    """Check the optimised graph that ONNX Runtime runs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "run.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(folder / INT8_MODEL), options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "run.onnx").graph.node)
    net = so.create_classifier(folder).net
    assert kinds["QLinearConv"] == sum(isinstance(layer, nn.Conv2d) for layer in net.modules())
    assert kinds["QGemm"] == 1
    assert not {"Conv", "Gemm", "FusedConv", "NhwcFusedConv"} & set(kinds)


def test_every_convolution_is_int8_in_openvino(folder: Path) -> None:
    pytest.importorskip("openvino")
    net = int8_net(folder / INT8_MODEL, so.create_classifier(folder).preprocessing, "openvino")
    data = [each.get_rt_info() for each in net._request.get_compiled_model().get_runtime_model().get_ops()]
    types = [row["runtimePrecision"].get() for row in data if row["layerType"].get() == "Convolution"]
    assert len(types) == sum(isinstance(layer, nn.Conv2d) for layer in so.create_classifier(folder).net.modules())
    assert all(kind.lower() in ("u8", "i8") for kind in types), types


def test_the_result_and_the_files(tmp_path: Path) -> None:
    classifier = scattered_classifier()
    frames = smooth_frames(2, 10, SIZE, seed=1)
    made = so.quantize_classifier(classifier, list(frames[:, None]), tmp_path / "new")
    assert (made.num_frames, made.num_compared) == (15, 5)
    assert made.same_class >= 0.8
    assert (
        made.bytes == (tmp_path / "new" / INT8_MODEL).stat().st_size < (tmp_path / "new" / WEIGHTS).stat().st_size / 2
    )
    assert json.loads(json.dumps(made.to_dict()))["fingerprint"] == classifier.fingerprint()
    # The classifier can be used directly, and the folder holds the same one.
    clips = frames[:, :3].movedim(-1, -3)
    expected = int8_classifier(classifier, "onnxruntime")(clips)
    assert torch.equal(int8_classifier(so.create_classifier(tmp_path / "new"), "onnxruntime")(clips), expected)
    assert str(tmp_path) not in (tmp_path / "new" / INT8_MODEL).read_bytes().decode("latin-1")


def test_frames_of_several_sizes_and_a_head_after_the_pool(tmp_path: Path) -> None:
    classifier = scattered_classifier(head="frameexit")
    frames = [smooth_frames(1, 12, size, seed=1) for size in (SIZE, (90, 60))]
    so.quantize_classifier(classifier, frames, tmp_path)
    clips = smooth_frames(6, 4, SIZE, seed=3).movedim(-1, -3).contiguous()
    actual, plain = int8_classifier(classifier, "onnxruntime")(clips), classifier.clip_probs(clips)
    assert float(plain.std(0).max()) > 0.02
    assert float((actual - plain).abs().max()) < 0.1


def test_a_wrapped_network_needs_its_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    wrap = {"input_size": 32, "layout": "BCHW", "class_names": ["a", "b", "c"]}
    so.quantize_classifier(so.wrap_classifier(net, **wrap), smooth_frames(1, 8, SIZE), tmp_path)
    classifier = so.wrap_classifier(net, **wrap)
    with pytest.raises(InvalidArgument, match="has no int8 network"):
        int8_classifier(classifier, "onnxruntime")
    classifier.folder = tmp_path
    clips = smooth_frames(2, 3, SIZE, seed=4).movedim(-1, -3)
    assert torch.allclose(int8_classifier(classifier, "onnxruntime")(clips), classifier.clip_probs(clips), atol=0.02)


# ---- errors


def test_changed_weights_are_refused(again: Path, sampler: Any) -> None:
    classifier = so.create_classifier(again)
    with torch.no_grad():
        classifier.net.fc.bias[0] += 0.5
    with pytest.raises(WeightsError, match=r"other weights.*sosampler quantize"):
        FrameEngine(sampler, classifier, num_frames=2, precision="int8")
    so.save_classifier(classifier, again)  # as after fine-tuning again
    with pytest.raises(WeightsError, match="other weights"):
        so.Pipeline("uniform", again, precision="int8", device="cpu")
    with pytest.raises(WeightsError, match="another input"):
        FrameEngine(sampler, so.create_classifier(again, input_size=64), num_frames=2, precision="int8")


@pytest.mark.parametrize("content", [b"", b"\x00" * 400, "float32 onnx"])
def test_other_files_are_refused(again: Path, sampler: Any, content: Any) -> None:
    if content == "float32 onnx":
        model = onnx.load(again / INT8_MODEL)
        del model.metadata_props[:]
        content = model.SerializeToString()
    (again / INT8_MODEL).write_bytes(content)
    with pytest.raises(WeightsError, match="is not a network that `sosampler quantize` wrote"):
        FrameEngine(sampler, so.create_classifier(again), num_frames=2, precision="int8")


def test_int8_is_not_available(folder: Path, sampler: Any) -> None:
    plain = scattered_classifier()
    with pytest.raises(InvalidArgument, match=r"has no int8 network; make one .*sosampler quantize"):
        FrameEngine(sampler, plain, num_frames=2, precision="int8")
    with pytest.raises(InvalidArgument, match="runs on the CPU, not on meta"):
        FrameEngine(sampler, so.create_classifier(folder), num_frames=2, precision="int8", device="meta")
    with pytest.raises(InvalidArgument, match="float32, bfloat16, float16, int8"):
        FrameEngine(sampler, plain, num_frames=2, precision="int4")
    with pytest.raises(InvalidArgument, match=r"float32, bfloat16, float16$"):
        so.create_classifier(folder, precision="int8")


class ClipNet(nn.Module):
    def forward(self, clips: Tensor) -> Tensor:
        return clips.mean((1, 3, 4))


def test_clip_classifiers_are_refused(sampler: Any, tmp_path: Path) -> None:
    clips = so.wrap_classifier(ClipNet(), input_size=32, layout="BTCHW", class_names=["a", "b", "c"])
    with pytest.raises(InvalidArgument, match="see frames one by one"):
        FrameEngine(sampler, clips, num_frames=2, precision="int8")
    with pytest.raises(InvalidArgument, match="see frames one by one"):
        so.quantize_classifier(clips, smooth_frames(1, 4, SIZE), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_killed_before_the_end_it_can_be_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, out = scattered_classifier(), tmp_path / "new"
    frames = smooth_frames(1, 4, SIZE)
    with monkeypatch.context() as killing:
        killing.setattr("sosampler.engine.quantize.replacing", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            so.quantize_classifier(classifier, frames, out)
    for _ in range(2):  # also over its own result
        so.quantize_classifier(scattered_classifier(), frames, out)
        assert {file.name for file in out.iterdir()} == {INT8_MODEL, WEIGHTS, "config.json"}


def test_errors_leave_no_files_and_overwrite_none(folder: Path, tmp_path: Path) -> None:
    classifier = scattered_classifier()
    with torch.no_grad():
        classifier.net.fc.bias.add_(1)  # another one than that in the folder
    frames = smooth_frames(1, 4, SIZE)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(InvalidArgument, match="holds a saved classifier"):
        so.quantize_classifier(classifier, frames, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    with pytest.raises(InvalidArgument, match="has no folder of its own"):
        so.quantize_classifier(classifier, frames)
    with pytest.raises(InvalidArgument, match="no frames"):
        so.quantize_classifier(classifier, [], tmp_path / "out")
    with torch.no_grad():
        classifier.net.fc.bias.fill_(torch.nan)
    with pytest.raises(SosamplerError, match="NaN"):
        so.quantize_classifier(classifier, frames, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- calibration frames


def test_bank_frames_are_of_training_videos(tmp_path: Path) -> None:
    bank = so.write_frames(tmp_path / "bank", entries(10), classes=("ant", "bee", "cat"))
    parts = list(bank_frames(tmp_path / "bank", 9))
    train = [item for item in bank if item.split == "train"]
    assert 0 < len(train) < len(bank)
    assert sum(part.shape[1] for part in parts) >= min(9, len(train))
    stored = {item.id: item.frames() for item in train}
    for part in parts:
        assert any(
            part.shape[2:] == own.shape[1:] and (part[0, 0] == own).all((1, 2, 3)).any() for own in stored.values()
        )
    assert len(list(bank_frames(bank, 2))) == 2


def test_unreadable_videos_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"nothing")
    (tmp_path / "good.mp4").write_bytes(numbered_video(num_frames=30))
    parts = list(video_frames([tmp_path / "bad.mp4", tmp_path / "good.mp4"], 8, 32))
    assert [part.shape[:2] for part in parts] == [(1, 4)]
    assert "bad.mp4" in caplog.text
    with pytest.raises(so.VideoError, match="bad"):
        list(video_frames([tmp_path / "bad.mp4"], 8, 32))


# ---- the command line


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sosampler", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        return int(stopped.value.code or 0), printed.out, printed.err

    return run


def test_quantize_then_classify(cli: Cli, tmp_path: Path, sampler: Any) -> None:
    """As documented, with a policy without network and with a sampler."""
    classifier = so.save_classifier(scattered_classifier(), tmp_path / "classifier")
    sampler.save_pretrained(tmp_path / "sampler")
    (tmp_path / "videos").mkdir()
    for name in ("a", "b"):
        (tmp_path / "videos" / f"{name}.mp4").write_bytes(numbered_video(num_frames=40))
    command = ("classify", tmp_path / "videos", "-c", classifier, "--device", "cpu", "-n", 3, "--json")
    code, _, err = cli(*command, "--precision", "int8")
    assert code == 2
    assert "sosampler quantize" in err
    code, out, err = cli("quantize", classifier, "--videos", tmp_path / "videos", "-n", 16, "--json")
    assert code == 0, err
    printed = json.loads(out)
    assert printed["file"] == str(classifier / INT8_MODEL)
    assert (printed["num_frames"], printed["num_compared"]) == (12, 4)
    for policy in ((), ("--sampler", tmp_path / "sampler")):
        predictions = []
        for precision in ("float32", "int8"):
            code, out, err = cli(*command, *policy, "--precision", precision)
            assert code == 0, err
            predictions.append(json.loads(out)["predictions"])
        for plain, actual in zip(*predictions, strict=True):
            assert actual["selection"]["frame_indices"] == plain["selection"]["frame_indices"]
            assert actual["probability"] == pytest.approx(plain["probability"], abs=0.1)
            assert actual["probability"] != plain["probability"], "int8 rounds"


def test_another_int8_network_has_another_identity(cli: Cli, tmp_path: Path) -> None:
    """An interrupted `classify --out` resumes with the same network, and starts again after `quantize`."""
    classifier = so.save_classifier(scattered_classifier(), tmp_path / "classifier")
    (tmp_path / "videos").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "videos" / f"{name}.mp4").write_bytes(numbered_video(num_frames=40))
    identities = []
    for number in (8, 16):
        code, _, err = cli("quantize", classifier, "--videos", tmp_path / "videos", "-n", number)
        assert code == 0, err
        saved: Any = so.create_classifier(classifier)
        pipelines = [so.Pipeline("uniform", saved, num_frames=3, device="cpu", precision="int8") for _ in range(2)]
        identities.append(pipelines[0].identity())
        assert pipelines[1].identity() == identities[-1]
        assert classifier_identity(saved, "float32") == [saved.name, saved.fingerprint(), *saved.class_names]
    assert identities[0] != identities[1]
    out = tmp_path / "rows.jsonl"
    command = ("classify", tmp_path / "videos", "-c", classifier, "--device", "cpu", "-n", 3, "--out", out)
    code, _, err = cli(*command, "--precision", "int8", "--json")
    assert code == 0, err
    assert len(out.read_text().splitlines()) == 3


def test_quantize_from_a_bank_into_another_folder(cli: Cli, tmp_path: Path) -> None:
    so.write_frames(tmp_path / "bank", entries(6), classes=("ant", "bee", "cat"))
    classifier = so.save_classifier(scattered_classifier(), tmp_path / "classifier")
    code, out, err = cli("quantize", classifier, "--bank", tmp_path / "bank", "-o", tmp_path / "out")
    assert (code, out) == (0, ""), err
    assert "names the same class as float32" in err
    assert not (classifier / INT8_MODEL).exists()
    actual = so.Pipeline("uniform", tmp_path / "out", precision="int8", num_frames=2, device="cpu")
    assert np.isclose(actual(numbered_video(num_frames=20)).probabilities.sum(), 1)
    assert actual.precision == "int8"


@pytest.mark.parametrize("words", [(), ("--bank", "b", "--videos", "v")])
def test_quantize_needs_one_source(cli: Cli, folder: Path, words: tuple[str, ...]) -> None:
    code, _, err = cli("quantize", folder, *words)
    assert code == 2
    assert "not both" in err


def test_the_docs_have_the_measured_figures() -> None:
    data = json.loads((ROOT / "benchmarks" / "results" / "int8.json").read_text(encoding="utf-8"))
    plain, by_ort, by_openvino = data["rows"]
    page = (ROOT / "docs" / "classifiers.md").read_text(encoding="utf-8")
    tops = [f"{100 * row['top1']:.2f} %" for row in data["rows"]]
    assert f"in float32, {tops[1]} in int8 by ONNX Runtime and {tops[2]} by OpenVINO" in page
    assert f"names {tops[0]} of" in page
    same = [f"{100 * row['same_class']:.1f}" for row in (by_ort, by_openvino)]
    assert f"for {same[0]} and {same[1]} % of the pictures" in page
    assert f"{data['frames_for_ranges']} training pictures" in page
    assert plain["same_class"] == 1
