"""Systems on disk: there and back bit for bit, and what is missing, strange or damaged is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import sosampler as so
from sosampler.baselines.base import Baseline, Views, is_baseline_folder, load_system, save_baseline
from sosampler.baselines.registry import create_baseline
from sosampler.cli.main import app
from sosampler.errors import InvalidArgument, WeightsError
from tests.factories import on_heavy_features, two_sets, with_sets_of

SMALL: dict[str, dict[str, Any]] = {
    "frameexit": {"heavy_width": 5, "num_classes": 3, "max_frames": 4, "neck_width": 6, "gate_widths": [4, 3]},
    "liteeval": {"heavy_width": 5, "light_width": 4, "num_classes": 3, "coarse_width": 3, "fine_width": 5},
    "adaframe": {"heavy_width": 5, "light_width": 4, "num_classes": 3, "hidden": 6, "width": 4, "max_steps": 4},
    "marl": {"heavy_width": 5, "num_classes": 3, "hidden": 6, "width": 4, "agents": 2},
    "ar-net": {"heavy_width": 5, "light_width": 4, "r34_width": 3, "r18_width": 3, "num_classes": 3, "hidden": 6},
    "listen-to-look": {"heavy_width": 5, "light_width": 4, "num_classes": 3, "hidden": 8, "width": 6},
}
ABOUT = {"classifier": "resnet50", "num_candidates": 7, "dev": 0.5, "light": None, "recipe": {"lr": 0.001}}


def make(name: str, **settings: Any) -> Baseline:
    torch.manual_seed(3)
    return create_baseline(name, **SMALL[name] | settings)


def some_views() -> Views:
    generator = torch.Generator().manual_seed(0)
    return two_sets(torch.randn(9, 7, 5, generator=generator), torch.randn(9, 7, 4, generator=generator))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_baseline(tmp_path / "frameexit", make("frameexit"), ABOUT)
    return tmp_path / "frameexit"


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# ---- there and back


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("name", on_heavy_features())
def test_a_loaded_system_is_the_saved_one_bit_for_bit(name: str, multi_label: bool, tmp_path: Path) -> None:
    system = make(name, multi_label=multi_label)
    for value in system.state_dict().values():  # running statistics that are not those of a new layer
        if value.is_floating_point():
            value.add_(0.1)
    save_baseline(tmp_path / "run", system, ABOUT)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.json", "model.safetensors"]
    assert is_baseline_folder(tmp_path / "run")
    drawn = torch.get_rng_state()
    loaded = so.load_system(str(tmp_path / "run"), device="cpu")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert type(loaded) is type(system)
    assert loaded.config == system.config
    assert loaded.about == ABOUT
    assert not loaded.training
    assert not any(weight.requires_grad for weight in loaded.parameters())
    assert loaded.state_dict().keys() == system.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in system.state_dict().items())
    views = with_sets_of(name, some_views())
    before, after = system.run(views), loaded.run(views)
    assert before.seen.keys() == after.seen.keys() == set(system.feature_sets)
    for first, second in zip([*before, *before.seen.values()], [*after, *after.seen.values()], strict=True):
        assert isinstance(first, dict) or first is second is None or torch.equal(first, second)
    turned = loaded.with_threshold(loaded.threshold_values[-1])
    assert turned.about == ABOUT
    save_baseline(tmp_path / "turned", turned, turned.about)
    assert load_system(tmp_path / "turned").config == turned.config


def test_config_says_what_it_is(folder: Path) -> None:
    told = json.loads((folder / "config.json").read_text())
    assert list(told) == ["kind", "name", "config", "about"]
    assert (told["kind"], told["name"], told["about"]) == ("sosampler system", "frameexit", ABOUT)
    assert told["config"]["gate_exit"] == 0.5
    assert told["config"]["multi_label"] is False


def test_another_system_is_replaced_and_a_kill_leaves_no_mixture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_baseline(folder, make("marl"), {})
    assert load_system(folder).name == "marl"

    def stop(*rest: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sosampler.baselines.base.write_text", stop)
        with pytest.raises(KeyboardInterrupt):
            save_baseline(folder, make("liteeval"), {})
    assert not is_baseline_folder(folder)  # the old weights are no longer under any settings
    save_baseline(folder, make("liteeval"), {})
    assert load_system(folder).name == "liteeval"
    assert not list(folder.glob(".*"))


# ---- what cannot be written


def test_other_things_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is a file; give a folder"):
        save_baseline(tmp_path / "file", make("marl"), {})
    so.SOSampler(backbone="timm:test_resnet.r160_in1k", input_size=32).save_pretrained(tmp_path / "sampler")
    with pytest.raises(InvalidArgument, match="holds a saved sosampler sampler, which would be lost"):
        save_baseline(tmp_path / "sampler", make("marl"), {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("[]")
    with pytest.raises(InvalidArgument, match=r"holds a config.json that is not a baseline's"):
        save_baseline(tmp_path / "other", make("marl"), {})
    assert (tmp_path / "other/config.json").read_text() == "[]"


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    class Own(Baseline):
        name = "own"

    with pytest.raises(InvalidArgument, match="a Own cannot be loaded by its name"):
        save_baseline(tmp_path / "own", Own({}), {})
    for about in ({"dev": float("nan")}, {"net": object()}):
        with pytest.raises(InvalidArgument, match="must be JSON values"):
            save_baseline(tmp_path / "own", make("marl"), about)
    assert not (tmp_path / "own").exists()


# ---- what cannot be read


def test_what_is_no_system_is_named(tmp_path: Path) -> None:
    assert not is_baseline_folder(tmp_path)
    assert not is_baseline_folder(3)
    with pytest.raises(InvalidArgument, match="give the folder of a trained baseline"):
        load_system(3)  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match="no such folder"):
        load_system(tmp_path / "none")
    with pytest.raises(WeightsError, match=r"has no config.json"):
        load_system(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert not is_baseline_folder(tmp_path)
    with pytest.raises(WeightsError, match="is not JSON"):
        load_system(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match="holds something else instead of a baseline"):
        load_system(tmp_path)
    so.SOSampler(backbone="timm:test_resnet.r160_in1k", input_size=32).save_pretrained(tmp_path / "sampler")
    with pytest.raises(WeightsError, match="holds a sosampler sampler instead of a baseline"):
        load_system(tmp_path / "sampler")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": "glimpse"}, r"'glimpse' is no baseline of this version \(frameexit, .*newer sosampler"),
        ({"name": ["marl"]}, "is no baseline of this version"),
        ({"config": [1]}, "not those of a baseline"),
        ({"about": None}, "not those of a baseline"),
        (
            {"config": SMALL["frameexit"] | {"colour": 1}},
            r"unknown settings \(colour\); allowed are heavy_width, .*newer",
        ),
        ({"config": SMALL["frameexit"] | {"max_frames": 0}}, r"max_frames=0 must be.*train the baseline again"),
        ({"config": {"heavy_width": 5}}, "missing 1 required positional argument: 'num_classes'"),
        ({"config": SMALL["frameexit"] | {"num_classes": 4}}, "another shape: classifiers"),
        ({"config": SMALL["frameexit"] | {"max_frames": 5}}, "missing: classifiers.4"),
    ],
)
def test_settings_that_do_not_fit_are_named(folder: Path, values: dict[str, Any], says: str) -> None:
    change(folder, **values)
    with pytest.raises(WeightsError, match=says):
        load_system(folder)


def test_missing_keys_are_named(folder: Path) -> None:
    told = json.loads((folder / "config.json").read_text())
    del told["about"], told["config"]
    (folder / "config.json").write_text(json.dumps(told))
    with pytest.raises(WeightsError, match="lacks config, about; train the baseline again"):
        load_system(folder)


def test_weights_that_do_not_fit_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["neck.0.bias"][1] = torch.inf
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 tensors hold numbers that are not finite: neck.0.bias"):
        load_system(folder)
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(WeightsError, match="not a complete safetensors file"):
        load_system(folder)
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "model.pt")
    with pytest.raises(WeightsError, match=r"has no model.safetensors"):  # pickled weights are not looked at
        load_system(folder)


def test_a_device_that_is_not_there(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="device='nowhere'"):
        load_system(folder, device="nowhere")


# ---- where a sampler is wanted


def test_who_wants_a_sampler_hears_that_it_is_a_system(folder: Path, clip: Path) -> None:
    says = r"holds a trained baseline, which classifies videos itself.*so.load_system.*sosampler evaluate"
    with pytest.raises(InvalidArgument, match=says):
        so.load_sampler(folder)
    with pytest.raises(InvalidArgument, match=says):
        so.select(clip, 3, policy=folder)
    with pytest.raises(InvalidArgument, match=says):
        so.Pipeline(str(folder), so.create_classifier("timm:test_resnet.r160_in1k", num_classes=3, input_size=32))(clip)
    done = CliRunner().invoke(app, ["select", str(clip), "--policy", str(folder)])
    assert done.exit_code != 0
    assert re.search(says, str(done.exception))
