"""A sampler's folder without torch: the same pixels, scores and choice as with it; what does not belong is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

import sosampler as so
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.errors import InvalidArgument, MissingDependency, WeightsError
from sosampler.policies import learned as policies
from sosampler.policies.registry import get_policy
from sosampler.policies.score_rules import METHODS
from sosampler.samplers import onnx_sampler as module
from sosampler.samplers.onnx_sampler import LightPreprocessing, OnnxSampler, check_scoring, scores_of
from sosampler.samplers.sosampler import Scoring
from tests.factories import BELIEF, believing, believing_folder, scenes, shifted, shifted_onnx
from tests.test_light import _WITHOUT, HEAVY, HIDDEN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy to change."""
    copied = tmp_path / "run"
    shutil.copytree(believing_folder()[0], copied)
    return copied


@pytest.fixture(scope="module")
def light() -> OnnxSampler:
    return OnnxSampler.from_pretrained(believing_folder()[0])


# ---- pixels

SIZES = [(48, 64), (64, 48), (37, 91), (91, 37), (720, 1280), (32, 32), (32, 45), (20, 31), (31, 20), (5, 400)]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pixels_against_torchvision(height: int, width: int) -> None:
    """Larger, smaller and as it is, of either shape."""
    frames = scenes(1, 2, height, width)[0]
    for side in (32, 47):
        ours = LightPreprocessing(side)(frames.numpy())
        theirs = Preprocessing(size=(side, side), resize=side).resized(frames).numpy()
        assert ours.shape == theirs.shape == (2, 3, side, side)
        if "AVX" in torch.backends.cpu.get_cpu_capability():
            np.testing.assert_array_equal(ours, theirs)
        else:  # torchvision then resizes in floating point
            assert np.abs(ours.astype(int) - theirs).max() <= 1


def test_channels_last_frames() -> None:
    stored = np.ascontiguousarray(scenes(1, 3)[0].permute(0, 2, 3, 1).numpy())  # [T, H, W, 3]
    plain = LightPreprocessing(32)(np.ascontiguousarray(stored.transpose(0, 3, 1, 2)))
    np.testing.assert_array_equal(LightPreprocessing(32)(stored.transpose(0, 3, 1, 2)), plain)


# ---- scores

SCORINGS: list[dict[str, Any]] = [{}, BELIEF, {"belief": 0.5, "relevance": [-1.0, 2.0], "importance": 0.0}]


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("settings", [*SCORINGS, {"saliency": "max"}], ids=str)
def test_scoring_against_torch(settings: dict[str, Any], multi_label: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 4, 10, 33):
        importance = torch.randn(3, count, generator=generator) * 2
        logits = torch.randn(3, count, 5, generator=generator) * 4
        logits[0, 0] = torch.tensor([60.0, -60.0, 0.0, 0.0, 0.0])  # sure beyond what float32 can say of the rest
        theirs = Scoring(settings, multi_label=multi_label, num_classes=5).double()(
            importance.double(), logits.double()
        )
        ours = scores_of(settings, importance.numpy(), logits.numpy(), multi_label=multi_label)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)


def test_scoring_of_another_version_is_refused() -> None:
    with pytest.raises(WeightsError, match="which this version of sosampler does not support"):
        check_scoring({"attention": 3}, "x.onnx")


def test_all_outputs_against_torch(light: OnnxSampler) -> None:
    frames = scenes(3, 7)
    ours, theirs = light.look(frames.numpy()), believing().look(frames)
    for name, value in theirs._asdict().items():
        np.testing.assert_allclose(getattr(ours, name), value.numpy(), atol=1e-4, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(light.confidences(ours.scores), believing().confidences(theirs.scores), atol=1e-4)
    assert light.fingerprint() == believing().fingerprint()
    assert light.calibration == (1.5, -0.25)


@pytest.mark.parametrize("name", ["believing", "shifted"])
def test_selections_agree_with_torch(name: str, light: OnnxSampler) -> None:
    ours, theirs = (light, believing()) if name == "believing" else (OnnxSampler(shifted_onnx()[0]), shifted())
    frames = scenes(120, 10, 45, 80, seed=5)
    chosen, wanted = ours.choose(frames.numpy(), 4), theirs.choose(frames, 4).numpy()
    assert (chosen == wanted).all(1).mean() >= 0.99
    assert len(np.unique(wanted, axis=0)) > 30, "videos that all get one answer prove nothing"


@pytest.mark.parametrize("name", ["believing", "shifted"])
def test_segments_of_a_long_video(name: str, light: OnnxSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = light if name == "believing" else OnnxSampler(shifted_onnx()[0])
    frames = scenes(2, 23).numpy()
    whole = sampler.look(frames)
    monkeypatch.setattr(module, "_BATCH_FRAMES", 5)
    for part, all_at_once in zip(sampler.look(frames), whole, strict=True):
        if all_at_once is not None:
            np.testing.assert_allclose(part, all_at_once, atol=1e-4, rtol=1e-4)


def test_invalid_frames(light: OnnxSampler) -> None:
    good = scenes(1, 3).numpy()
    for frames, message in [
        ([[1]], "frames are a list but must be a NumPy array"),
        (good[0], r"frames\[None\]"),
        (good.transpose(0, 1, 3, 4, 2), "channels are last"),
        (good.astype(np.float32), "frames are float32"),
        (good[:, :0], "are empty"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            light.score(frames)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="num_frames=4 must be at most the 3 candidates"):
        light.choose(good, 4)
    with pytest.raises(InvalidArgument, match="not calibrated"):
        OnnxSampler(shifted_onnx()[0]).confidences([0.0])
    with pytest.raises(InvalidArgument, match="threads=0"):
        OnnxSampler(shifted_onnx()[0], threads=0)


# ---- as a policy


def test_a_folder_selects_the_same_frames_by_onnx_and_torch(clip: Path) -> None:
    folder = believing_folder()[0]
    with_torch = so.select(clip, 4, num_candidates=12, policy=get_policy(folder, device="cpu"))
    without = so.select(clip, 4, num_candidates=12, policy=get_policy(folder, device="onnx"))
    assert without.frame_indices.tolist() == with_torch.frame_indices.tolist()
    assert without.policy == with_torch.policy == str(folder)
    assert without.candidates.scores is not None
    assert not np.array_equal(without.candidates.scores, with_torch.candidates.scores), "both would be the same network"
    np.testing.assert_allclose(without.candidates.scores, with_torch.candidates.scores, atol=1e-4)


def test_torch_is_preferred_if_there_are_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(policies, "_load_torch", lambda *given: made.append("torch") or believing())
    monkeypatch.setattr(
        policies, "_load_onnx", lambda *given: made.append("onnx") or OnnxSampler.from_pretrained(folder)
    )
    get_policy(folder)
    get_policy(folder, device="onnx")
    (folder / "model.safetensors").rename(folder / "elsewhere")
    get_policy(folder)
    (folder / "elsewhere").rename(folder / "model.safetensors")
    monkeypatch.setattr(policies, "find_spec", lambda package: None if package == "torchvision" else object())
    get_policy(folder)
    assert made == ["torch", "onnx", "onnx", "onnx"]


def test_identity_and_size_agree_with_torch() -> None:
    folder = believing_folder()[0]
    ours, theirs = get_policy(f"{folder}+nms", device="onnx"), get_policy(f"{folder}+nms", device="cpu")
    assert ours.fingerprint() == theirs.fingerprint() is not None
    assert (ours.name, ours.min_size, ours.description) == (theirs.name, theirs.min_size, theirs.description)


@pytest.mark.parametrize("method", METHODS)
def test_methods_use_confidences(method: str, clip: Path, light: OnnxSampler) -> None:
    sel = so.select(clip, 5, num_candidates=20, policy=get_policy(f"{believing_folder()[0]}+{method}", device="onnx"))
    scores = sel.candidates.scores
    assert scores is not None
    confidences = 1 / (1 + np.exp(0.25 - 1.5 * scores.astype(np.float64)))
    assert sel.frame_indices.tolist() == sel.candidates.frame_indices[METHODS[method](confidences, 5)].tolist()


def test_an_onnx_sampler_is_a_policy(clip: Path, light: OnnxSampler) -> None:
    sel = so.select(clip, 4, num_candidates=12, policy=light)
    by_folder = so.select(clip, 4, num_candidates=12, policy=get_policy(believing_folder()[0], device="onnx"))
    np.testing.assert_array_equal(sel.candidates.scores, by_folder.candidates.scores)
    assert sel.policy == "sosampler"
    with pytest.raises(InvalidArgument, match="device='cuda' is not for a sampler that onnxruntime runs"):
        get_policy(light, device="cuda")


def test_a_changed_file_is_read_again(folder: Path, clip: Path) -> None:
    policy = get_policy(folder, device="onnx")
    assert policies._load_onnx.cache_info().currsize
    misses = policies._load_onnx.cache_info().misses
    get_policy(folder, device="onnx")
    assert policies._load_onnx.cache_info().misses == misses
    (folder / "model.onnx").write_bytes((folder / "model.onnx").read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.onnx: is not a network that ONNX Runtime can run"):
        get_policy(folder, device="onnx")
    assert len(so.select(clip, 3, policy=policy)) == 3


# ---- what does not belong


def with_about(folder: Path, change: dict[str, Any] | str | None) -> None:
    model = onnx.load(folder / "model.onnx")
    (entry,) = model.metadata_props
    if change is None:
        del model.metadata_props[:]
    else:
        entry.value = change if isinstance(change, str) else json.dumps({**json.loads(entry.value), **change})
    onnx.save(model, folder / "model.onnx")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, r"has format 2 but must have format 1; export the sampler again"),
        ("{", "its metadata are not JSON"),
        ("[]", "has format None"),
        (None, "was not written by `sosampler export`"),
        ({"weights": "0" * 64}, r"model\.onnx does not belong to the model\.safetensors beside it"),
    ],
)
def test_files_of_another_version(change: dict[str, Any] | str | None, message: str, folder: Path) -> None:
    with_about(folder, change)
    with pytest.raises(WeightsError, match=message):
        OnnxSampler.from_pretrained(folder)


def test_an_outdated_network_is_refused(folder: Path) -> None:
    other = believing().config | {"calibration": [9.0, 0.0]}
    (folder / "config.json").write_text(json.dumps({"kind": "sosampler sampler", **other}))
    with pytest.raises(WeightsError, match=r"does not belong to the config\.json \(calibration\).*sosampler export"):
        OnnxSampler.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"kind": "sosampler sampler", **believing().config, "attention": 1}))
    with pytest.raises(WeightsError, match=r"config\.json \(attention\) beside it, which .* another version"):
        OnnxSampler.from_pretrained(folder)
    # What is said about it may change, and settings that are not written are those it was exported with.
    config = {"kind": "sosampler sampler", "backbone": believing().config["backbone"], "about": {"dev": 0.5}}
    (folder / "config.json").write_text(json.dumps(config))
    OnnxSampler.from_pretrained(folder)


def test_folders_of_another_kind(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        OnnxSampler.from_pretrained(tmp_path)
    (folder / "config.json").write_text('{"kind": "sosampler classifier"}')
    with pytest.raises(WeightsError, match="holds a sosampler classifier instead of a sampler"):
        OnnxSampler.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="is not JSON"):
        OnnxSampler.from_pretrained(folder)


def test_any_other_network_is_refused(folder: Path) -> None:
    frames = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "other", [frames], [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(WeightsError, match="was not written by `sosampler export`"):
        OnnxSampler.from_pretrained(folder)


# ---- on a machine without torch


def without_torch(*arguments: object, then: str = "") -> subprocess.CompletedProcess[str]:
    code = _WITHOUT.format(hidden=HIDDEN) if not then else _WITHOUT.format(hidden=HIDDEN).replace("main()", then)
    given = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(given, capture_output=True, text=True, check=False, timeout=120)


def test_select_command_without_torch(clip: Path) -> None:
    folder = believing_folder()[0]
    done = without_torch("select", clip, "-n", 4, "-t", 12, "--policy", f"{folder}+nms", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    printed = json.loads(done.stdout)
    sel = so.select(clip, 4, num_candidates=12, policy=get_policy(f"{folder}+nms", device="cpu"))
    assert printed["frame_indices"] == sel.frame_indices.tolist()
    np.testing.assert_allclose(printed["candidates"]["scores"], sel.candidates.scores, atol=1e-4)


def test_onnx_imports_no_torch(clip: Path) -> None:
    code = (
        "import sys, sosampler as so\nfrom sosampler.policies.registry import get_policy\n"
        f"so.select({str(clip)!r}, 3, policy=get_policy({str(believing_folder()[0])!r}, device='onnx'))\n"
        "print(' '.join(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "onnxruntime" in loaded.split()
    assert not {name.split(".")[0] for name in loaded.split()} & {*HEAVY, "safetensors", "yaml"}


def test_errors_without_torch(clip: Path, folder: Path, tmp_path: Path) -> None:
    """One process for all: starting one takes longer than everything it does."""
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "model.onnx").unlink()
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    with_about(other, {"format": 7})
    calls = [
        ["--policy", str(bare)],
        ["--policy", str(other)],
        ["--policy", str(folder), "--device", "cuda"],
        ["--policy", str(folder), "-n", "20", "-t", "5"],
        ["--policy", str(folder), "-n", "91", "-t", "95", "--on-short", "error"],
    ]
    then = (
        f"\nfor call in {calls!r}:\n    sys.argv = ['sosampler', 'select', {str(clip)!r}, *call]\n"
        "    try:\n        main()\n    except SystemExit as end:\n        print(end.code)"
    )
    done = without_torch(then=then)
    assert done.stdout.split() == ["2"] * len(calls), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(calls)
    assert f"write it with `sosampler export {bare}` where torch is installed" in lines[0]
    assert "has format 7" in lines[1]
    assert "device='cuda' needs torch; install it with: pip install 'sosampler[train]'" in lines[2]
    assert "num_frames=20 is more than num_candidates=5" in lines[3]
    assert "there" in lines[4] or "frames" in lines[4]


def test_missing_file_is_a_missing_dependency(folder: Path) -> None:
    (folder / "model.onnx").unlink()
    with pytest.raises(MissingDependency, match=r"has no model\.onnx"):
        get_policy(folder, device="onnx")
