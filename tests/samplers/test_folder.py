"""Samplers on disk: saved and loaded they give the same scores; what is missing or damaged is named; no pickle."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sosampler as so
from sosampler._util.files import replacing
from sosampler.baselines.registry import list_samplers
from sosampler.errors import InvalidArgument, SosamplerError, WeightsError
from sosampler.samplers.backbones import create_backbone, load_backbone_weights
from sosampler.samplers.folder import is_sampler_folder, model_card
from sosampler.samplers.registry import load_sampler
from sosampler.samplers.sosampler import SOSampler
from tests.factories import BELIEF, scattered
from tests.samplers.test_sosampler import pictures

ABOUT = {
    "classifier": "resnet50 | <b>mine</b>",
    "dev": 0.8125,
    "seed": 3,
    "recipe": {"name": "default", "lr": 0.0003, "num_candidates": [4, 16]},
}


@pytest.fixture(scope="module")
def sampler() -> SOSampler:
    names = ["run", "jump", "läuft"]
    return scattered(shift=10, num_classes=3, class_names=names, dropout=0.25, calibration=(1.5, -0.25), about=ABOUT)


@pytest.fixture(scope="module")
def original(sampler: SOSampler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "sampler"
    sampler.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    copied = tmp_path / "sampler"
    copied.mkdir()
    for path in original.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    return copied


# ---- there and back


def test_a_loaded_sampler_is_the_saved_one_bit_for_bit(sampler: SOSampler, original: Path) -> None:
    assert sorted(path.name for path in original.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    loaded = SOSampler.from_pretrained(original)
    frames = pictures(2, 5, 3, 40, 50)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    for before, after in zip(sampler.look(frames, mask), loaded.look(frames, mask), strict=True):
        assert torch.equal(before, after)
    assert loaded.config == sampler.config
    assert loaded.fingerprint() == sampler.fingerprint()
    assert loaded.class_names == ("run", "jump", "läuft")
    assert loaded.calibration == (1.5, -0.25)
    assert not loaded.training


@pytest.mark.parametrize("settings", [{"backbone": "timm:resnet10t"}, {"shift": 8}, {"multi_label": True}])
def test_other_networks_come_back_too(settings: dict[str, Any], tmp_path: Path) -> None:
    saved = scattered(**settings)
    saved.save_pretrained(tmp_path)
    frames = pictures(1, 3, 3, 32, 32)
    assert torch.equal(load_sampler(str(tmp_path)).score(frames), saved.score(frames))


def test_load_sampler_freezes_and_goes_to_a_device(original: Path) -> None:
    loaded = load_sampler(original, device="cpu")
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert loaded.device == torch.device("cpu")
    with pytest.raises(InvalidArgument, match="device='nowhere'"):
        load_sampler(original, device="nowhere")


def test_names_of_samplers_need_no_torch() -> None:
    code = "import sys; from sosampler.baselines.registry import list_samplers as names; "
    code += "print(names(), 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names = ["sosampler", "ocsampler", "scsampler", "frameexit", "liteeval", "adaframe", "marl", "ar-net"]
    names += ["videoiq", "adafocus", "adafuse", "ada3d", "listen-to-look"]
    assert printed.split("\n")[0] == f"{names} False"
    assert list_samplers() == names


def test_what_was_changed_after_building_is_saved(tmp_path: Path) -> None:
    sampler = scattered()
    sampler.calibration, sampler.about = (2.0, 0.5), {"dev": 0.9}
    sampler.save_pretrained(tmp_path)
    loaded = SOSampler.from_pretrained(tmp_path)
    assert loaded.calibration == (2.0, 0.5)
    assert loaded.about == {"dev": 0.9}


def test_settings_of_the_call_replace_those_of_the_file(original: Path) -> None:
    assert SOSampler.from_pretrained(original, input_size=64).preprocessing.size == (64, 64)
    with pytest.raises(SosamplerError, match="unknown settings"):
        SOSampler.from_pretrained(original, colour="red")


def test_copies_and_pickles_of_the_object_score_the_same(sampler: SOSampler) -> None:
    frames = pictures(1, 4, 3, 32, 32)
    for other in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert torch.equal(other.score(frames), sampler.score(frames))


def test_saving_twice_replaces_and_leaves_nothing_else(folder: Path) -> None:
    other = scattered(seed=5, about={"dev": 0.123})
    other.save_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert SOSampler.from_pretrained(folder).fingerprint() == other.fingerprint()
    assert "0.123" in (folder / "README.md").read_text(encoding="utf-8")


def test_a_readme_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")
    scattered().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "mine"


def test_saving_into_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InvalidArgument, match="give a folder"):
        scattered().save_pretrained(tmp_path / "file")


def test_a_classifier_is_not_written_over(sampler: SOSampler, tmp_path: Path) -> None:
    so.save_classifier(so.create_classifier("timm:test_resnet", num_classes=2, input_size=32), tmp_path / "classifier")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("[]")
    for name, what in (("classifier", "a saved sosampler classifier"), ("other", "not a sampler's"), ("odd", "not a")):
        before = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        with pytest.raises(InvalidArgument, match=f"{name} holds .*{what}.* give another folder"):
            sampler.save_pretrained(tmp_path / name)
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == before


def test_a_kill_while_saving_never_leaves_new_weights_under_old_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the folder after each file of the second save."""
    new = scattered(shift=10, num_classes=3, calibration=(9.0, 9.0))
    seen: list[bool] = []

    @contextmanager
    def watching(path: Path) -> Iterator[Path]:
        with replacing(path) as temporary:
            yield temporary
        config = folder / "config.json"
        seen.append(config.exists())
        if config.exists():
            assert json.loads(config.read_text())["calibration"] == [9.0, 9.0]

    monkeypatch.setattr("sosampler._util.files.replacing", watching)
    monkeypatch.setattr("sosampler.classifiers.weights.replacing", watching)
    new.save_pretrained(folder)
    assert seen == [False, False, True]  # weights, card, config


def test_the_config_is_plain_json(original: Path) -> None:
    config = json.loads((original / "config.json").read_text(encoding="utf-8"))
    assert config["kind"] == "sosampler sampler"
    assert config["shift"] == 10
    assert config["class_names"] == ["run", "jump", "läuft"]
    assert config["calibration"] == [1.5, -0.25]
    assert config["about"] == ABOUT


def test_the_card_tells_what_it_is_and_cannot_be_broken_by_names(original: Path) -> None:
    text = (original / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\nlibrary_name: sosampler\n")
    for part in ("mobilenet_v2", "one in 10 channels", "32x32", "0.8125", '"lr": 0.0003', " M |", "from_pretrained"):
        assert part in text
    assert "resnet50 \\| &lt;b>mine&lt;/b>" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 3 for line in rows)


@pytest.mark.parametrize(("shift", "scoring"), [(0, {}), (0, BELIEF), (10, {}), (10, BELIEF)])
def test_the_card_says_what_a_score_depends_on(shift: int, scoring: dict[str, Any]) -> None:
    text = model_card(SOSampler(shift=shift, scoring=scoring, num_classes=3).config, 1000, 0.1)
    assert ("the neighbouring candidates" in text) == (shift == 10)
    assert ("what the other candidates show" in text) == (scoring == BELIEF)
    assert "scored by itself" not in text


# ---- what is not a whole sampler


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def only_pickle(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()


def short_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def change_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return damage


def change_config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")

    return damage


def config_text(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text, encoding="utf-8") and None


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (no_config, "has no config.json.*give a folder written by training"),
    "no weights": (no_weights, "has no model.safetensors; copy the complete folder"),
    "only pickle": (only_pickle, "pytorch_model.bin could run code"),
    "short weights": (short_weights, "not a complete safetensors file"),
    "empty weights": (empty_weights, "not a complete safetensors file"),
    "a tensor less": (change_weights(lambda state: state.pop("importance_head.weight")), "1 missing: importance_head"),
    "a tensor more": (change_weights(lambda state: state.update(extra=torch.ones(2))), "1 unknown: extra"),
    "not finite": (
        change_weights(lambda state: state["importance_head.weight"].fill_(float("nan"))),
        "NaN or infinite",
    ),
    "other classes": (change_config(num_classes=4, class_names=None), "of another shape: class_head"),
    "not JSON": (config_text("{"), "is not JSON"),
    "a list": (config_text("[]"), "instead of a sampler"),
    "of a classifier": (change_config(kind="sosampler classifier"), "a sosampler classifier instead of a sampler"),
    "of another library": (config_text('{"model_type": "vit"}'), "something else instead of a sampler"),
    "unknown setting": (change_config(colour="red"), r"unknown settings \(colour\); allowed are backbone, "),
    "unknown backbone": (change_config(backbone="resnet9000"), "config.json: .*resnet9000"),
    "a wrong type": (change_config(input_size="large"), "config.json: .*input_size='large'"),
    "names that are a number": (change_config(class_names=3), "config.json: "),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_folders(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(WeightsError, match=message) as caught:
        SOSampler.from_pretrained(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pickled_code_in_a_folder_never_runs(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (folder / "ran",))

    for name in ("pytorch_model.bin", "model.pt", "training.pkl"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    SOSampler.from_pretrained(folder)
    no_weights(folder)
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin, training\.pkl"):
        SOSampler.from_pretrained(folder)
    assert not (folder / "ran").exists()


def test_what_is_no_folder_is_refused(tmp_path: Path, original: Path) -> None:
    with pytest.raises(WeightsError, match="no such folder"):
        SOSampler.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="no such folder"):
        SOSampler.from_pretrained("./runs/first/nowhere")
    with pytest.raises(WeightsError, match="is a file; give the folder"):
        SOSampler.from_pretrained(original / "model.safetensors")
    assert is_sampler_folder(original)
    assert not is_sampler_folder(tmp_path)
    assert not is_sampler_folder(3)


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="cannot be read from 5; give its folder"):
        load_sampler(5)  # type: ignore[arg-type]


def test_the_folder_of_a_classifier_is_refused(tmp_path: Path) -> None:
    from sosampler.classifiers.factory import save_classifier

    save_classifier(so.create_classifier("timm:resnet10t", num_classes=2), tmp_path)
    assert not is_sampler_folder(tmp_path)
    with pytest.raises(WeightsError, match="a sosampler classifier instead of a sampler"):
        SOSampler.from_pretrained(tmp_path)


# ---- the hub, without a network


def test_a_hub_id_is_read_from_the_cache(sampler: SOSampler, original: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "models--someone--sports"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit, encoding="utf-8")
    (home / "snapshots" / commit).mkdir(parents=True)
    for path in original.iterdir():
        (home / "snapshots" / commit / path.name).write_bytes(path.read_bytes())
    loaded = SOSampler.from_pretrained("someone/sports", cache_dir=tmp_path, local_files_only=True)
    assert loaded.fingerprint() == sampler.fingerprint()
    with pytest.raises(WeightsError, match="someone/nothing: is no local folder, and the Hugging Face hub has no such"):
        SOSampler.from_pretrained("someone/nothing", cache_dir=tmp_path, local_files_only=True)


def test_pushing_uploads_the_three_files(sampler: SOSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    sent: list[str] = []

    class Repo:
        repo_id = "someone/sports"

    def upload(self: HfApi, *, folder_path: Path, **rest: Any) -> str:
        sent.extend(sorted(path.name for path in Path(folder_path).iterdir()))
        return "where it went"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, **rest: Repo())
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    url = sampler.save_pretrained(tmp_path / "here", push_to_hub=True, repo_id="someone/sports")
    assert url == "where it went"
    assert sent == ["README.md", "config.json", "model.safetensors"]


# ---- start weights


def random_state(name: str = "mobilenet_v2", seed: int = 7) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return dict(create_backbone(name).weights_net().state_dict())


def same_weights(backbone: Any, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, state[key]) for key, tensor in backbone.weights_net().state_dict().items())


@pytest.mark.parametrize("shift", [0, 10])
def test_weights_in_torchvisions_names_start_plain_and_shifted_backbones(shift: int, tmp_path: Path) -> None:
    state = random_state()
    extra = {"classifier.1.weight": torch.ones(10, 1280), "classifier.1.bias": torch.ones(10)}
    save_file({**state, **extra}, tmp_path / "weights.safetensors")
    backbone = create_backbone("mobilenet_v2", shift=shift)
    assert not same_weights(backbone, state)
    load_backbone_weights(backbone, tmp_path / "weights.safetensors")
    assert same_weights(backbone, state)


def test_a_saved_sampler_starts_another(sampler: SOSampler, original: Path) -> None:
    backbone = create_backbone("mobilenet_v2")
    load_backbone_weights(backbone, original)
    assert same_weights(backbone, sampler.backbone.state_dict())


def test_a_saved_classifier_starts_a_timm_backbone(tmp_path: Path) -> None:
    from sosampler.classifiers.factory import save_classifier

    classifier = so.create_classifier("timm:resnet10t", num_classes=2)
    save_classifier(classifier, tmp_path / "classifier")
    backbone = create_backbone("timm:resnet10t")
    load_backbone_weights(backbone, tmp_path / "classifier")
    assert same_weights(backbone, classifier.net.state_dict())
    started = SOSampler(backbone="timm:resnet10t")
    started.save_pretrained(tmp_path / "sampler")
    load_backbone_weights(backbone, tmp_path / "sampler")
    assert same_weights(backbone, started.backbone.net.state_dict())


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    backbone = create_backbone("mobilenet_v2")
    state = random_state()
    state.pop("features.3.conv.0.0.weight")
    save_file(state, tmp_path / "less.safetensors")
    with pytest.raises(WeightsError, match=r"1 missing: features\.3\.conv\.0\.0\.weight"):
        load_backbone_weights(backbone, tmp_path / "less.safetensors")
    with pytest.raises(WeightsError, match="no such file"):
        load_backbone_weights(backbone, tmp_path / "nowhere.safetensors")
    save_file(random_state("timm:resnet10t"), tmp_path / "other.safetensors")
    with pytest.raises(WeightsError, match="does not fit the network"):
        load_backbone_weights(backbone, tmp_path / "other.safetensors")


def test_weights_that_cannot_be_downloaded_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.models.mobilenetv2 as theirs

    def offline(*_: Any, **__: Any) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr(theirs.MobileNet_V2_Weights, "get_state_dict", offline)
    with pytest.raises(WeightsError, match=r"no route to host.*load a file of weights"):
        load_backbone_weights(create_backbone("mobilenet_v2"), "pretrained")
