"""Folders and files of strangers: one sentence each, in bounded time and memory, before a network is built."""

from __future__ import annotations

import gzip
import json
import resource
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from torch import nn

import sosampler as so
from sosampler._util import limits
from sosampler.baselines.base import KIND, load_system
from sosampler.baselines.recipe import read_baseline_recipe
from sosampler.baselines.registry import list_systems
from sosampler.classifiers.weights import check_network_size, read_state
from sosampler.datasets.manifest import read_manifest
from sosampler.errors import InvalidArgument, SosamplerError, WeightsError
from sosampler.samplers.onnx_sampler import OnnxSampler
from sosampler.samplers.recipe import read_recipe, read_settings
from tests.classifiers import hf_networks
from tests.factories import TINY, believing, believing_folder, frame_exit

SECONDS = 10.0
MEGABYTES = 1500


@contextmanager
def bounded() -> Iterator[None]:
    """Fail where more time or memory is taken than a refusal may cost."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, begin = resource.getrlimit(resource.RLIMIT_AS), time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (used + (MEGABYTES << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - begin < SECONDS  # the machine may be busy with other things


def refused(load: Callable[[], Any], *parts: str) -> None:
    with bounded(), pytest.raises(SosamplerError) as caught:
        load()
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 1000
    for part in parts:
        assert part in sentence, sentence


# ---- the folder of a sampler, a classifier or a baseline

FOLDERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "sampler": (lambda folder: believing().save_pretrained(folder), so.load_sampler),
    "classifier": (
        lambda folder: so.save_classifier(so.create_classifier(TINY, num_classes=3, input_size=32), folder),
        so.create_classifier,
    ),
    "baseline": (frame_exit, load_system),
}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "sampler": {
        "classes": {"num_classes": 10**9, "class_names": None},
        "classes within the limit": {"num_classes": 900_000, "class_names": None},
        "budget": {"budget": 10**9},
        "budget within the limit": {"budget": 999_999},
        "input": {"input_size": 10**6},
        "another network": {"backbone": "timm:vit_giant_patch14_224"},
    },
    "classifier": {
        "classes": {"class_names": [str(number) for number in range(400_000)]},
        "input": {"preprocessing": {"size": 10**6, "resize": 10**6}},
        "another network": {"name": "timm:vit_giant_patch14_224"},
        "a network of the hub": {"name": "hf:someone/unheard-of"},
    },
    "baseline": {
        "classes": {"num_classes": 10**12},
        "width": {"heavy_width": 10**9},
        "gates": {"gate_widths": [10**9, 10**9]},
        "frames": {"max_frames": 10**9},
    },
}


@pytest.fixture(params=FOLDERS)
def artefact(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Callable[[], Any]]:
    save, load = FOLDERS[request.param]
    folder = tmp_path / "folder"
    save(folder)
    load(folder)  # what is imported and cached counts for nobody
    return request.param, folder, lambda: load(folder)


def test_sizes_that_would_take_gigabytes(artefact: tuple[str, Path, Callable[[], Any]]) -> None:
    kind, folder, load = artefact
    config = json.loads((folder / "config.json").read_text())
    for name, changes in SIZES[kind].items():
        values = json.loads(json.dumps(config))
        inner = values["config"] if kind == "baseline" else values
        for key, value in changes.items():
            inner[key] = {**inner[key], **value} if isinstance(value, dict) else value
        (folder / "config.json").write_text(json.dumps(values))
        refused(load, "config.json" if name != "a network of the hub" else "no hf_config")


@pytest.mark.parametrize("name", list_systems())
def test_sizes_in_the_config_of_a_baseline(tmp_path: Path, name: str) -> None:
    baseline = read_baseline_recipe(name).without_weights()
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    config, sizes = baseline.config, [key for key, value in baseline.config.items() if type(value) is int]
    assert "num_classes" in sizes
    for changes in [{"num_classes": 900_000}, *({size: 10**9} for size in sizes)]:
        saved = {"kind": KIND, "name": name, "config": config | changes, "about": {}}
        (tmp_path / "config.json").write_text(json.dumps(saved))
        refused(lambda: load_system(tmp_path), "config.json")


def test_a_layer_whose_bytes_torch_cannot_count(tmp_path: Path) -> None:
    refused(lambda: check_network_size(lambda: nn.Linear(10**10, 10**10), 9, tmp_path / "config.json"), "config.json")


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"kind":' * 5000 + "1" + "}" * 5000, '{"a": ' + "9" * 5000 + "}", "{", "[]", "\x00"]
)
def test_configs_that_are_none(artefact: tuple[str, Path, Callable[[], Any]], text: str) -> None:
    _, folder, load = artefact
    (folder / "config.json").write_text(text)
    refused(load)


def test_a_config_without_end(artefact: tuple[str, Path, Callable[[], Any]]) -> None:
    _, folder, load = artefact
    with open(folder / "config.json", "ab") as file:
        file.truncate(50 << 30)  # of zeros, which take no room on the disk
    refused(load)


# ---- transformers

HF_SIZES = [
    {"num_labels": 10**9},
    {"num_hidden_layers": 10**6},
    {"num_hidden_layers": 250},
    {"hidden_size": 10**8},
    {"hidden_size": 65536, "num_attention_heads": 4},
    {"intermediate_size": 900_000},
    {"image_size": 32_000},
]


@pytest.mark.parametrize("changes", HF_SIZES, ids=str)
@pytest.mark.parametrize("saved", [False, True], ids=["folder", "saved"])
def test_sizes_in_a_config_of_transformers(tmp_path: Path, changes: dict[str, Any], saved: bool) -> None:
    folder = tmp_path / "net"
    classifier = hf_networks.save(folder)
    if saved:
        so.save_classifier(classifier, folder)
    config = json.loads((folder / "config.json").read_text())
    inner = config["options"]["hf_config"] if saved else config
    inner |= changes
    (folder / "config.json").write_text(json.dumps(config))
    refused(lambda: so.create_classifier(folder if saved else f"hf:{folder}"))


# ---- weights


def test_weights_larger_than_their_file(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"w": torch.zeros(1, dtype=torch.float16).expand(100_000, 100_000)}, path)
    refused(lambda: read_state(path), "w.pt: holds tensors larger than the file")
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        torch.save({"w": torch.zeros(1 << 20)}, path)
        with zipfile.ZipFile(path) as plain:
            for name in plain.namelist():
                packed.writestr(name, plain.read(name))
    refused(lambda: read_state(tmp_path / "packed.pt"), "packed.pt: is compressed")
    with open(tmp_path / "huge.safetensors", "wb") as file:
        file.truncate(10 << 40)
    refused(lambda: read_state(tmp_path / "huge.safetensors"), "of memory are free")


# ---- ONNX


def network(nodes: list[Any], constants: list[Any] = (), **about: Any) -> bytes:  # type: ignore[assignment]
    """A network that takes frames of 32 x 32 and adds `extra`, made by `nodes`, to their mean."""
    frames = helper.make_tensor_value_info("frames", TensorProto.UINT8, ["b", "t", 3, 32, 32])
    outputs = [helper.make_tensor_value_info("importance", TensorProto.FLOAT, None)]
    outputs.append(helper.make_tensor_value_info("features", TensorProto.FLOAT, None))
    nodes = [
        *nodes,
        helper.make_node("Cast", ["frames"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["f"], ["mean"], axes=[2, 3, 4], keepdims=0),
        helper.make_node("Add", ["mean", "extra"], ["importance"]),
        helper.make_node("ReduceMean", ["f"], ["features"], axes=[3, 4], keepdims=0),
    ]
    graph = helper.make_graph(nodes, "g", [frames], outputs, list(constants))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 9
    settings = {"backbone": "x", "calibration": None, "input_size": 32, "multi_label": False, "scoring": {}}
    text = {"format": 1, "settings": settings, "reach": 0, "fingerprint": "f", "weights": None, **about}
    model.metadata_props.add(key="sosampler", value=json.dumps(text))
    return bytes(model.SerializeToString())


def number(value: Any, name: str, kind: Any = np.int64) -> Any:
    return numpy_helper.from_array(np.array(value, dtype=kind), name)


SOUND = ([helper.make_node("Identity", ["zero"], ["extra"])], [number(0.0, "zero", np.float32)])
FRAMES = np.zeros((1, 4, 3, 32, 32), dtype=np.uint8)


def test_a_network_by_hand_runs() -> None:
    assert OnnxSampler(network(*SOUND)).score(FRAMES).tolist() == [[0, 0, 0, 0]]


def huge(size: int, *, shape: str = "size") -> tuple[list[Any], list[Any]]:
    one = numpy_helper.from_array(np.array([1.0], dtype=np.float32))
    nodes = [
        helper.make_node("ConstantOfShape", [shape], ["big"], value=one),
        helper.make_node("ReduceSum", ["big"], ["extra"], keepdims=0),
    ]
    return nodes, [number([size], "size")]


def test_huge_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (10**10, 10**15):
        refused(lambda size=size: OnnxSampler(network(*huge(size))).score(FRAMES), "limits.MAX_ONNX_BYTES")  # type: ignore[misc]


def test_a_network_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ONNX_SECONDS", 0.5)
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["c"], ["c2"]),
            helper.make_node("Add", ["x", "one"], ["x2"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, []),
        ],
        [
            helper.make_tensor_value_info("c2", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x2", TensorProto.FLOAT, []),
        ],
    )
    nodes = [helper.make_node("Loop", ["times", "yes", "zero"], ["extra"], body=body)]
    constants = [number(2**62, "times"), number(True, "yes", np.bool_), number(0.0, "zero", np.float32)]
    constants.append(number(1.0, "one", np.float32))
    refused(lambda: OnnxSampler(network(nodes, constants)).score(FRAMES), "within 0.5 s (limits.ONNX_SECONDS)")


SETTINGS = {"backbone": "x", "calibration": None, "input_size": 32, "multi_label": False, "scoring": {}}


@pytest.mark.parametrize(
    "about",
    [
        {"settings": {}},
        {"settings": None},
        {"settings": {**SETTINGS, "input_size": 10**9}},
        {"settings": {**SETTINGS, "input_size": 64}},
        {"settings": {**SETTINGS, "calibration": ["a", "b"]}},
        {"settings": {**SETTINGS, "calibration": 3}},
        {"settings": {**SETTINGS, "scoring": "none"}},
        {"settings": {**SETTINGS, "scoring": {"saliency": "max"}}},  # without class logits
        {"reach": 10**9},
        {"reach": "far"},
        {"format": {"deep": json.loads("[" * 200 + "]" * 200)}},
    ],
    ids=str,
)
def test_metadata_that_are_wrong(about: dict[str, Any]) -> None:
    refused(lambda: OnnxSampler(network(*SOUND, **about)).score(FRAMES), "model.onnx")


def test_no_metadata_and_wrong_shapes() -> None:
    model = onnx.load_from_string(network(*SOUND))
    del model.metadata_props[:]
    refused(lambda: OnnxSampler(model.SerializeToString()), "was not written by `sosampler export`")
    wide = network(SOUND[0], [number([[[0.0]]], "zero", np.float32)])  # one dimension too many
    refused(lambda: OnnxSampler(wide).score(FRAMES), "its output 'importance' has the shape [1, 1, 4]")
    fixed = onnx.load_from_string(network(*SOUND))
    fixed.graph.input[0].type.tensor_type.shape.dim[3].dim_value = 16
    refused(lambda: OnnxSampler(fixed.SerializeToString()), "but must take")
    other = onnx.load_from_string(network(*SOUND))
    other.graph.output[0].name = "something"
    refused(lambda: OnnxSampler(other.SerializeToString()))


def test_a_folder_with_such_a_network(clip: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(believing_folder()[0], folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.onnx").write_bytes(network(*huge(10**12)))
    refused(lambda: so.select(clip, 2, policy=str(folder)))
    with open(folder / "model.onnx", "ab") as file:
        file.truncate(50 << 30)
    refused(lambda: so.select(clip, 2, policy=str(folder)))


# ---- recipes, settings and lists


def test_recipes(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{name}: &{name} [{', '.join(['*' + before] * 9)}]"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    bombs = [
        "\n".join(lines),
        "[" * 100_000,
        "{a: " * 5000,
        "? [a]\n: 1",
        "\x00",
        "a: 1\na: 2",
        "- 1",
        "lr: 1" + ":1" * 50_000,
    ]
    bombs.append("".join(f"k{number}: 1\n" for number in range(20_000)))
    for text in bombs:
        path.write_text(text)
        refused(lambda: read_recipe(path))
    with open(path, "ab") as file:
        file.truncate(50 << 30)
    refused(lambda: read_recipe(path), "more than 262144 bytes (limits.MAX_RECIPE_BYTES)")
    path.write_text("epochs: &e 3\nbatch_size: *e")
    refused(lambda: read_recipe(path), "the alias *e; write the value itself")
    refused(lambda: read_settings(["lr=&a [*a, *a]"]))


def test_packed_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LIST_BYTES", 1 << 20)
    path = tmp_path / "m.csv.gz"
    path.write_bytes(gzip.compress(bytes(1 << 28)))
    from sosampler._util.files import read_text

    refused(lambda: read_text(path), "more than 1048576 bytes (limits.MAX_LIST_BYTES)")
    (tmp_path / "m.csv").write_bytes(bytes(2 << 20))
    refused(lambda: read_manifest(tmp_path / "m.csv"), "limits.MAX_LIST_BYTES")


def test_arguments_of_that_size() -> None:
    for build in (
        lambda: so.SOSampler(num_classes=10**9),
        lambda: so.SOSampler(input_size=10**6),
        lambda: so.create_classifier(TINY, num_classes=10**9),
        lambda: so.create_classifier(TINY, input_size=10**6),
    ):
        with bounded(), pytest.raises((InvalidArgument, WeightsError), match=r"\(limits\.MAX_"):
            build()
