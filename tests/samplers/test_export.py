"""Exported samplers say what the sampler says, for any number of videos and candidates; nothing is half-written."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import typer

import sosampler as so
from sosampler.cli import main as command_line
from sosampler.cli.export import export_command
from sosampler.engine.backends import openvino_core
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError, WeightsError
from sosampler.samplers import export as module
from sosampler.samplers.export import Exported, export_sampler, on_cpu
from sosampler.samplers.sosampler import SOSampler, top_n
from tests.factories import NAMES, believing, believing_folder, scenes, shifted, shifted_onnx

# Single videos and candidates too: graphs like to take a one for a constant.
SHAPES = [(1, 1), (1, 2), (2, 1), (3, 7), (1, 40)]


def run_onnx(model: bytes, frames: np.ndarray) -> dict[str, np.ndarray]:
    """By onnxruntime itself, with nothing of the package between."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"frames": frames}), strict=True))


def assert_same(outputs: dict[str, np.ndarray], sampler: SOSampler, frames: torch.Tensor) -> None:
    wanted = {name: value for name, value in sampler.look(frames)._asdict().items() if value is not None}
    assert set(outputs) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(outputs[name], value.numpy(), atol=1e-4, rtol=1e-4, err_msg=name)
    keep = (frames.shape[1] + 1) // 2
    assert top_n(torch.from_numpy(outputs["scores"]), keep).tolist() == sampler.choose(frames, keep).tolist()


@pytest.fixture(params=["believing", "shifted"])
def exported(request: pytest.FixtureRequest) -> tuple[SOSampler, bytes]:
    if request.param == "shifted":
        return shifted(), shifted_onnx()[0]
    return believing(), (believing_folder()[0] / "model.onnx").read_bytes()


# ---- parity


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_onnx_in_onnxruntime(exported: tuple[SOSampler, bytes], shape: tuple[int, int]) -> None:
    sampler, model = exported
    frames = scenes(*shape, 32, 32)
    assert_same(run_onnx(model, frames.numpy()), sampler, frames)


def test_scores_differ_between_frames(exported: tuple[SOSampler, bytes]) -> None:
    sampler, _ = exported
    assert float(sampler.score(scenes(3, 7, 32, 32)).std(1).min()) > 0.01


def test_neighbours_affect_a_shifted_sampler() -> None:
    frames = scenes(1, 6, 32, 32)
    alone = run_onnx(shifted_onnx()[0], frames[:, 2:3].numpy())["scores"]
    assert abs(float(alone[0, 0] - run_onnx(shifted_onnx()[0], frames.numpy())["scores"][0, 2])) > 1e-3


def test_openvino_reads_the_file(exported: tuple[SOSampler, bytes]) -> None:
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")
    sampler, model = exported
    core = openvino_core()
    compiled = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert isinstance(compiled, openvino.CompiledModel)
    for shape in [(1, 1), (3, 7)]:
        frames = scenes(*shape, 32, 32)
        output = compiled({"frames": frames.numpy()})
        values = {name.get_any_name(): np.array(output[name]) for name in compiled.outputs}
        assert_same(values, sampler, frames)


# ---- the file


def test_metadata_of_the_file() -> None:
    folder, done = believing_folder()
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model)
    (frames,) = model.graph.input
    assert [dim.dim_param or dim.dim_value for dim in frames.type.tensor_type.shape.dim] == [
        "batch",
        "candidates",
        3,
        32,
        32,
    ]
    (about,) = (json.loads(entry.value) for entry in model.metadata_props if entry.key == "sosampler")
    assert about["fingerprint"] == believing().fingerprint() == done.fingerprint
    assert about["class_names"] == NAMES
    assert done.to_dict()["inputs"] == {"frames": ["batch", "candidates", 3, 32, 32]}
    assert done.outputs == [output.name for output in model.graph.output]
    assert done.difference < 1e-4
    assert done.bytes == (folder / "model.onnx").stat().st_size


def test_no_path_of_this_machine_is_in_the_file() -> None:
    for data in (shifted_onnx()[0], (believing_folder()[0] / "model.onnx").read_bytes()):
        assert b"site-packages" not in data
        assert b".py" not in data


def test_exact_half_precision_is_stored_as_float16() -> None:
    """Of the saved weights not a digit is lost; what has more digits stays in full precision."""
    weights = sum(tensor.numel() for tensor in believing().state_dict().values())
    kinds = {tensor.data_type for tensor in onnx.load(believing_folder()[0] / "model.onnx").graph.initializer}
    assert onnx.TensorProto.FLOAT16 in kinds
    assert believing_folder()[1].bytes < 3 * weights
    full = onnx.load_from_string(shifted_onnx()[0]).graph.initializer
    assert onnx.TensorProto.FLOAT16 not in {tensor.data_type for tensor in full}


def test_half_rounds_a_copy() -> None:
    before = shifted().fingerprint()
    rounded = on_cpu(shifted(), half=True)
    assert rounded.fingerprint() != before == shifted().fingerprint()
    for parameter in rounded.parameters():
        if parameter.ndim > 1:
            assert torch.equal(parameter, parameter.half().float())
    with torch.no_grad():
        quick = copy.deepcopy(shifted())
        quick.precision = "float16"
        large = on_cpu(quick)
        assert large.precision == "float32"
        large.importance_head.weight.fill_(1e6)
    assert torch.isfinite(on_cpu(large, half=True).importance_head.weight).all()


# ---- bad input


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the call is found out before anything is traced."""

    def never(*args: Any, **settings: Any) -> None:
        raise AssertionError("work has begun")

    for name in ("onnx_bytes", "trace", "load_sampler"):
        monkeypatch.setattr(module, name, never)


@pytest.mark.usefixtures("no_work")
def test_invalid_arguments_are_refused_before_tracing(tmp_path: Path) -> None:
    folder = believing_folder()[0]
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken.onnx").mkdir()
    (tmp_path / "taken.onnx" / "model.onnx").mkdir()
    for settings, message in [
        ({"format": "tflite"}, "format='tflite' must be 'onnx'; other runtimes read such a file"),
        ({"out": tmp_path / "x.xml"}, r"must be a folder or end with \.onnx"),
        ({"out": tmp_path / "file" / "x.onnx"}, "cannot be written"),
        ({"out": "/proc/x.onnx"}, "cannot be written"),
        ({"out": tmp_path / "taken.onnx"}, "is a folder; give another file name"),
        ({"half": "yes"}, "half='yes'"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            export_sampler(folder, **settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="a sampler in memory has no folder"):
        export_sampler(believing())
    with pytest.raises(InvalidArgument, match=r"owner/name \(not a local folder\) has no folder"):
        export_sampler("owner/name")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.onnx"]


def test_folders_without_a_sampler(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        export_sampler(tmp_path)
    folder = tmp_path / "newer"
    shutil.copytree(believing_folder()[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention": 8}))
    before = (folder / "model.onnx").read_bytes()
    with pytest.raises(WeightsError, match=r"unknown settings \(attention\).*if a newer sosampler wrote them"):
        export_sampler(folder)
    assert (folder / "model.onnx").read_bytes() == before
    assert not [path for path in tmp_path.rglob(".*")]


@pytest.mark.parametrize("wrong", [0.1, float("nan")])
def test_a_network_with_other_scores_is_not_written(
    wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(self: Any, frames: np.ndarray) -> dict[str, np.ndarray]:
        return {"scores": shifted().score(torch.from_numpy(frames)).numpy() + wrong}

    monkeypatch.setattr(module, "onnx_bytes", lambda sampler, weights: shifted_onnx()[0])
    monkeypatch.setattr(module.OnnxSampler, "run_network", other)
    with pytest.raises(SosamplerError, match=r"not written, because .* \(they differ by (0\.1|nan)\)"):
        export_sampler(shifted(), out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_missing_dependencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingDependency, match=r"sosampler\[onnx\]"):
        export_sampler(shifted(), out=tmp_path)
    assert not list(tmp_path.iterdir())


# ---- the command


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    app = typer.Typer()
    app.command("export")(export_command)
    monkeypatch.setattr(command_line, "app", app)

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sosampler", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            command_line.main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run


def test_command(cli: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, done = believing_folder()
    calls: list[dict[str, Any]] = []

    def exported(source: str, **settings: Any) -> Exported:
        calls.append({"source": source, **settings})
        return done

    monkeypatch.setattr("sosampler.samplers.export.export_sampler", exported)
    code, out, err = cli(folder, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == done.to_dict()
    code, out, err = cli(folder, "--format", "onnx", "--out", tmp_path / "x.onnx", "--half")
    assert (code, out) == (0, "")
    assert "MB; its scores differ from torch's by" in err
    assert calls == [
        {"source": str(folder), "format": "onnx", "out": None, "half": False},
        {"source": str(folder), "format": "onnx", "out": tmp_path / "x.onnx", "half": True},
    ]


def test_command_errors(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    so.save_classifier(so.create_classifier("timm:test_resnet", num_classes=2, input_size=32), tmp_path / "classifier")
    for args, message in [
        ((tmp_path / "classifier",), "holds a sosampler classifier instead of a sampler"),
        ((believing_folder()[0], "--format", "tflite"), "must be onnx"),
        ((believing_folder()[0], "--out", "/proc/x.onnx"), "cannot be written"),
        ((tmp_path / "nothing", "--out", tmp_path / "x.onnx"), "no such folder"),
    ]:
        code, out, err = cli(*args)
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["classifier"]
