"""Features in a bank are the network's own, survive kills, travel with subsets, and their damage is found."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from sosampler import create_classifier, save_classifier, wrap_classifier
from sosampler._util.progress import Progress
from sosampler.bank import decode as frame_decoding
from sosampler.bank.bank import Bank
from sosampler.bank.format import TEACHER
from sosampler.bank.from_arrays import FrameEntry, subset, write_frames
from sosampler.bank.inspect import bank_info, verify_bank
from sosampler.bank.prepare import add_features, add_teacher, prepare
from sosampler.cli.main import app as commands
from sosampler.cli.prepare import app
from sosampler.errors import ClassifierError, InvalidArgument, SosamplerError
from sosampler.samplers.sosampler import SOSampler
from tests.factories import CLASSES, contents, entries, frames, made, make_videos, pooled, small_net, teacher_by_hand


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10 videos of 3 to 12 frames, one of them of another shape, in shards of 4."""
    listed = entries()
    listed[6] = FrameEntry("v6", (0,), frames(6, 9, height=48, width=40), split="dev")
    path = tmp_path_factory.mktemp("banks") / "bank"
    return write_frames(path, listed, classes=CLASSES, videos_per_shard=4).path


@pytest.fixture
def bank(original: Path, tmp_path: Path) -> Bank:
    return Bank(shutil.copytree(original, tmp_path / "bank"))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def classifier(seed: int = 0) -> Any:
    return wrap_classifier(small_net(seed, classes=3), input_size=32, layout="BCHW")


def small_sampler(**settings: Any) -> SOSampler:
    torch.manual_seed(3)
    return SOSampler(backbone="timm:test_resnet", input_size=32, **settings).eval()


def pictures(item: Any) -> Tensor:
    """uint8 [T, 3, H, W]"""
    return torch.from_numpy(item.frames()).permute(0, 3, 1, 2)


# ---- the numbers


def test_features_are_what_stands_before_the_class_layer(bank: Bank) -> None:
    network = classifier()
    bank = add_features(bank, network, name="heavy", batch=5, precision="float32")
    features = bank.features("heavy")
    assert (len(features), features.width, features.kind, features.precision) == (10, 32, "classifier", "float32")
    assert features.fingerprint == network.fingerprint()
    assert features.gmacs == network.gmacs(1) > 0
    for item, stored in zip(bank, features, strict=True):
        with torch.no_grad():
            own = network.net[:-1](network.preprocessing(pictures(item)))
        assert stored.shape == (len(item), 32)
        assert stored.dtype == np.float32
        np.testing.assert_allclose(stored, own, atol=1e-5)
        probs = network.net[-1](torch.from_numpy(stored.copy())).softmax(-1)
        np.testing.assert_allclose(probs.detach(), network.frame_probs(pictures(item)[None])[0], atol=1e-5)


@pytest.mark.parametrize("head", ["mean", "frameexit"])
def test_features_of_timm_networks(bank: Bank, head: str) -> None:
    torch.manual_seed(0)
    network = create_classifier("timm:test_resnet", num_classes=3, head=head, input_size=64)
    stored = add_features(bank, network).features(network)[6]
    assert stored.dtype == np.float16
    with torch.no_grad():
        clip = network.preprocessing(pictures(bank[6]))
        maps = getattr(network.net, "backbone", network.net).forward_features(clip)
        own = network.net(clip) if head == "frameexit" else network.net.forward_head(maps, pre_logits=True)
    np.testing.assert_allclose(stored, own, atol=2e-3, rtol=2e-3)


class Volumes(nn.Module):
    """A network of clips whose class layer is a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Conv3d(3, 6, (1, 3, 3), (1, 2, 2))
        self.last = nn.Conv3d(6, 3, 1)

    def forward(self, clips: Tensor) -> Tensor:
        return self.last(self.body(clips.transpose(1, 2)).relu()).mean((2, 3, 4))


def test_features_of_networks_of_clips(bank: Bank) -> None:
    network = wrap_classifier(Volumes(), input_size=32)
    stored = add_features(bank, network, precision="float32").features()[2]
    clips = network.preprocessing(pictures(bank[2])[:, None])  # each frame as a clip of one
    with torch.no_grad():
        own = network.net.body(clips.transpose(1, 2)).relu().mean((2, 3, 4))
    np.testing.assert_allclose(stored, own, atol=1e-5)


def test_features_of_samplers(bank: Bank) -> None:
    sampler = small_sampler(num_classes=3)
    features = add_features(bank, sampler, batch=3).features(sampler)
    assert (features.kind, features.width, features.gmacs) == (
        "sampler",
        sampler.backbone.num_features,
        sampler.gmacs(1),
    )
    assert features.name == sampler.fingerprint()
    for item, stored in zip(bank, features, strict=True):
        assert (stored.dtype, stored.shape) == (np.float16, (len(item), features.width))
        np.testing.assert_allclose(stored, sampler.look(pictures(item)[None]).features[0], atol=2e-3, rtol=2e-3)


def test_folders_of_networks(bank: Bank, tmp_path: Path) -> None:
    sampler, heavy = small_sampler(), create_classifier("timm:test_resnet", num_classes=3, input_size=32)
    sampler.save_pretrained(tmp_path / "sampler")
    save_classifier(heavy, tmp_path / "classifier")
    add_features(bank.path, tmp_path / "sampler", name="light", device="cpu")
    add_features(bank.path, str(tmp_path / "classifier"))
    assert {name: about["network"] for name, about in bank.feature_sets.items()} == {
        "light": "sampler",
        heavy.fingerprint(): "classifier",
    }
    assert (bank.features("light").name, bank.features(sampler).name) == ("light", "light")
    expected = sampler.look(pictures(bank[0])[None]).features[0]
    np.testing.assert_allclose(bank.features("light")[0], expected, atol=2e-3, rtol=2e-3)


class SlowLinear(nn.Linear):
    """Takes its time, so that several threads are inside at once."""

    def forward(self, values: Tensor) -> Tensor:
        time.sleep(0.003)
        return super().forward(values)


def test_threads_do_not_change_a_byte(bank: Bank, tmp_path: Path, threads: Callable[[int], None]) -> None:
    other = Bank(shutil.copytree(bank.path, tmp_path / "other"))
    network = classifier()
    network.net[-1].__class__ = SlowLinear
    for place, count in ((bank, 1), (other, 6)):
        threads(count)
        add_features(place, network, batch=1)
        add_features(place, small_sampler(), batch=1)
    assert contents(bank.path) == contents(other.path)
    assert torch.get_num_threads() == 6


def test_decoded_frames_are_bounded(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    """With room for one batch only the same comes out."""
    threads(4)
    expected = list(add_features(bank, classifier(), name="a", batch=2).features("a"))
    monkeypatch.setattr(frame_decoding, "_MAX_DECODED_BYTES", 1)
    found = add_features(bank, classifier(), name="b", batch=2).features("b")
    assert all((one == other).all() for one, other in zip(expected, found, strict=True))


def test_the_network_is_left_as_it_was(bank: Bank) -> None:
    network = classifier()
    add_features(bank, network)
    assert not any(layer._forward_pre_hooks for layer in network.modules())
    assert all(weight.is_contiguous() for weight in network.parameters())


def test_features_read_without_torch_by_workers_and_by_split(bank: Bank) -> None:
    add_features(bank, classifier())
    features = bank.features()
    dev = bank.split("dev")
    assert [row.tobytes() for row in dev.features()] == [features[bank.ids.index(name)].tobytes() for name in dev.ids]
    assert [row.shape for row in features[2:4]] == [(5, 32), (6, 32)]
    assert (pickle.loads(pickle.dumps(features))[-1] == features[9]).all()
    hidden = "import sys; sys.modules['torch'] = None; from sosampler.bank.bank import Bank; "
    code = hidden + "print(Bank(sys.argv[1]).features()[4].tobytes().hex())"
    told = subprocess.run([sys.executable, "-c", code, str(bank.path)], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == features[4].tobytes().hex()


# ---- broken off


def test_broken_off_it_goes_on_and_ends_the_same(bank: Bank, tmp_path: Path) -> None:
    other = Bank(shutil.copytree(bank.path, tmp_path / "other"))
    whole: list[tuple[int, int]] = []
    add_features(other, classifier(), batch=4, on_progress=lambda told: whole.append((told.done, told.before)))
    assert whole == [(done, 0) for done in range(1, 11)]
    for stop_at in (2, 7, 10):  # inside of the first shard, the second, the third

        def stop(told: Progress, stop_at: int = stop_at) -> None:
            if told.done == stop_at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            add_features(bank, classifier(), batch=4, on_progress=stop)
    with pytest.raises(SosamplerError, match=r"1 of 3 parts of these features are missing; .*add_features again"):
        bank.features()
    assert not bank_info(bank.path)["features"][0]["complete"]
    assert len(Bank(bank.path, partial=True).features()[0]) == 3
    seen: list[tuple[int, int]] = []
    # It goes on with the batches it began with.
    add_features(bank, classifier(), on_progress=lambda told: seen.append((told.done, told.before)))
    assert seen == [(9, 8), (10, 8)]
    assert contents(bank.path) == contents(other.path)


_KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from tests.bank.test_outputs import add_features, classifier
def kill(told):
    if told.done == 6:
        os.kill(os.getpid(), signal.SIGKILL)
add_features(sys.argv[2], classifier(), name="heavy", on_progress=kill)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills")
def test_killed_it_goes_on(bank: Bank, tmp_path: Path) -> None:
    other = Bank(shutil.copytree(bank.path, tmp_path / "other"))
    command = [sys.executable, "-c", _KILLED, str(Path(__file__).parents[2]), str(bank.path)]
    killed = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    left = sorted(path.name for path in (bank.path / "features" / "heavy").iterdir())
    assert left[0].startswith(".00001.")
    assert left[1:] == ["00000.arrow", "00000.sha256", "features.json"]
    add_features(bank, classifier(), name="heavy")
    add_features(other, classifier(), name="heavy")
    assert contents(bank.path) == contents(other.path)
    assert verify_bank(bank.path) == []


def test_a_shard_that_gained_a_video_loses_its_features(tmp_path: Path) -> None:
    videos = make_videos(tmp_path)
    bank = add_features(made(videos, tmp_path / "bank"), pooled())
    shutil.copy(videos / "a.mp4", videos / "broken.mp4")
    bank = made(videos, tmp_path / "bank", retry_failed=True)
    with pytest.raises(SosamplerError, match="1 of 3 parts of these features are missing"):
        bank.features()
    add_features(bank, pooled())
    assert [len(rows) for rows in bank.features()] == [len(item) for item in bank] == [12, 12, 12, 12, 7, 12]
    assert verify_bank(bank.path) == []


# ---- what else knows about them


def test_subsets_keep_features(bank: Bank, tmp_path: Path) -> None:
    teacher_by_hand(bank)
    add_features(bank, classifier(), name="heavy")
    add_features(bank, small_sampler(), name="light", precision="float32")
    small = subset(bank, tmp_path / "small", classes=["jump"])
    assert small.ids == ["v1", "v4", "v7"]
    for name in ("heavy", "light"):
        assert small.features(name).about == bank.features(name).about
        for place, row in enumerate((1, 4, 7)):
            assert (small.features(name)[place] == bank.features(name)[row]).all()
    assert (small.teacher()[2].frame_probs == bank.teacher()[7].frame_probs).all()
    assert verify_bank(small.path) == []
    add_features(small, classifier(), name="heavy", on_progress=lambda told: pytest.fail("all was there"))


def test_subsets_count_the_bytes_of_features(bank: Bank, tmp_path: Path) -> None:
    wide = wrap_classifier(
        nn.Sequential(nn.Conv2d(3, 4096, 32), nn.Flatten(), nn.Linear(4096, 3)), input_size=32, layout="BCHW"
    )
    without = len(subset(bank, tmp_path / "a", max_mb=0.2))
    add_features(bank, wide)
    small = subset(bank, tmp_path / "b", max_mb=0.2)
    assert len(small) < without
    assert sum(len(data) for data in contents(small.path).values()) <= 0.2e6


def test_info_tells_about_features(bank: Bank) -> None:
    add_features(bank, classifier(), name="heavy")
    (told,) = bank_info(bank.path)["features"]
    assert told["bytes"] == sum(path.stat().st_size for path in (bank.path / "features" / "heavy").iterdir())
    assert told == {
        "name": "heavy",
        "network": "classifier",
        "network_name": classifier().name,
        "fingerprint": classifier().fingerprint(),
        "width": 32,
        "precision": "float16",
        "gmacs": classifier().gmacs(1),
        "complete": True,
        "bytes": told["bytes"],
    }
    (bank.path / "features" / "heavy" / "00001.arrow").unlink()
    result = CliRunner().invoke(app, ["info", str(bank.path)])
    assert f"  features heavy: 32 in float16 of the classifier {classifier().name}, " in result.stdout
    assert "NOT FINISHED" in result.stdout
    assert CliRunner().invoke(app, ["verify", str(bank.path)]).exit_code == 1


# ---- damage


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _other_rows(path: Path) -> None:
    shutil.copy(path.with_name("00000.arrow"), path)


def _other_numbers(path: Path) -> None:
    data = path.read_bytes()
    rows = Bank(path.parents[2]).features()[5].tobytes()
    assert data.count(rows) == 1
    path.write_bytes(data.replace(rows, b"\0\0" + rows[2:]))


def _not_finite(path: Path) -> None:
    rows = Bank(path.parents[2]).features()[5].tobytes()
    path.write_bytes(path.read_bytes().replace(rows, np.float16("nan").tobytes() + rows[2:]))


def _edit(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        head = path.with_name("features.json")
        told = json.loads(head.read_text()) | changes
        head.write_text(json.dumps({key: value for key, value in told.items() if value != "gone"}))

    return edit


@pytest.mark.parametrize(
    ("damage", "said", "readable"),
    [
        (_cut, "00001.arrow: is damaged", False),
        (Path.unlink, "00001.arrow: is missing; give the same network to so.add_features again", False),
        (_other_rows, "00001.arrow: row 0, 'v4', is 'v0'; delete it and give the same network", False),
        (_other_numbers, "00001.arrow: differs from what was written, 00001.sha256 has another checksum", True),
        (_not_finite, "row 1, 'v5', has features that are not finite", True),
        (_edit(width=16), "row 0, 'v0', has features of float16 [3, 32] instead of float16 [3, 16]", False),
        (_edit(precision="float32"), "instead of float32 [3, 32]", False),
        (_edit(width=0), "features.json: width=0, precision='float16' are not valid", False),
        (_edit(gmacs="gone"), "features.json: lacks 'gmacs'", False),
        (_edit(kind="recipe"), "features.json: is not the header of a sosampler features", False),
    ],
)
def test_damage_is_found(bank: Bank, tmp_path: Path, damage: Callable[[Path], None], said: str, readable: bool) -> None:
    add_features(bank, classifier(), name="heavy")
    assert verify_bank(bank.path) == []
    damage(bank.path / "features" / "heavy" / "00001.arrow")
    problems = verify_bank(bank.path)
    assert said in problems[0]
    assert not any("sosampler prepare" in problem for problem in problems)
    if not readable:
        with pytest.raises(SosamplerError, match=r"add_features again|add the features again"):
            list(Bank(bank.path).features())
        with pytest.raises(SosamplerError):
            subset(bank.path, tmp_path / "small")


def test_what_was_deleted_is_made_again(bank: Bank) -> None:
    add_features(bank, classifier())
    whole = contents(bank.path)
    (bank.path / "features" / classifier().fingerprint() / "00001.arrow").unlink()
    add_features(bank, classifier())
    assert contents(bank.path) == whole


# ---- errors


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(images.mean((1, 2, 3))[:, None].abs() * 1e6)


def test_too_large_for_half_precision(bank: Bank) -> None:
    network = wrap_classifier(Large(), input_size=32, layout="BCHW")
    with pytest.raises(ClassifierError, match="too large for half precision; give precision='float32'"):
        add_features(bank, network, name="a")
    shutil.rmtree(bank.path / "features")
    assert np.isfinite(add_features(bank, network, precision="float32").features()[0]).all()


def test_another_network_under_the_same_name(bank: Bank) -> None:
    add_features(bank, classifier(0), name="heavy")
    before = contents(bank.path)
    with pytest.raises(InvalidArgument, match=r"heavy: these features were made with fingerprint=.*another name"):
        add_features(bank, classifier(1), name="heavy")
    with pytest.raises(InvalidArgument, match="precision='float16', now 'float32'"):
        add_features(bank, classifier(0), name="heavy", precision="float32")
    with pytest.raises(InvalidArgument, match="batch=8, now 3"):
        add_features(bank, classifier(0), name="heavy", batch=3)
    assert contents(bank.path) == before


@pytest.mark.parametrize(
    ("network", "options", "said"),
    [
        (classifier, {"name": "../heavy"}, "name='../heavy' cannot name features"),
        (classifier, {"name": ""}, "name='' cannot name"),
        (classifier, {"precision": "int8"}, "precision='int8' is unknown; choose one of: float16, float32"),
        (classifier, {"batch": 0}, "batch=0 must be"),
        (classifier, {"device": "abacus"}, "device='abacus' cannot be used here"),
        (lambda: nn.Linear(2, 2), {}, "a Linear has no features; give a classifier"),
        (lambda: None, {}, "a NoneType has no features"),
        (lambda: Path("nowhere"), {}, "nowhere: no such folder"),
        (lambda: "nonsense", {}, "'nonsense' is unknown"),
        (lambda: SOSampler(shift=8, input_size=32), {}, r"temporal shift.*give a sampler trained with shift=0"),
    ],
)
def test_wrong_arguments_leave_the_bank_alone(bank: Bank, network: Any, options: dict[str, Any], said: str) -> None:
    before = contents(bank.path)
    with pytest.raises(InvalidArgument, match=said):
        add_features(bank, network(), **options)
    assert contents(bank.path) == before


def test_which_features_are_meant(bank: Bank) -> None:
    with pytest.raises(InvalidArgument, match=r"features are not in this bank; it has: none. Add them with"):
        bank.features()
    add_features(bank, classifier(0), name="heavy")
    assert bank.features().name == bank.features(classifier(0).fingerprint()).name == "heavy"
    add_features(bank, classifier(1))
    with pytest.raises(InvalidArgument, match="features are ambiguous, several fit"):
        bank.features()
    with pytest.raises(InvalidArgument, match=f"fingerprint {classifier(2).fingerprint()} are not in this bank"):
        bank.features(classifier(2))
    with pytest.raises(InvalidArgument, match="a float does not identify features"):
        bank.features(0.5)
    with pytest.raises(InvalidArgument, match="must be an int from 0 to 9"):
        bank.features("heavy")["v1"]


def test_a_folder_without_a_bank(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="holds no bank"):
        add_features(tmp_path, classifier())
    assert list(tmp_path.iterdir()) == []


# ---- several networks


def test_several_networks_in_one_pass_are_as_each_alone(
    bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Bank(shutil.copytree(bank.path, tmp_path / "other"))
    large = create_classifier("timm:test_resnet", num_classes=3, input_size=48)
    networks = {"heavy": classifier(), "large": large, "light": small_sampler()}
    for name, network in networks.items():
        add_features(other, network, name=name, batch=4)
    decoded: list[int] = []
    real = frame_decoding._decode_into
    monkeypatch.setattr(
        frame_decoding, "_decode_into", lambda frames, *rest: decoded.append(len(frames)) or real(frames, *rest)
    )
    lines: list[int] = []
    add_features(bank, networks, batch=4, on_progress=lambda told: lines.append(told.done))
    assert lines == list(range(1, 11))
    batches = len(decoded)
    assert sum(decoded) + batches == sum(len(item) for item in bank)  # each frame once; the first of a batch apart
    assert contents(bank.path) == contents(other.path)
    add_features(bank, networks)
    assert len(decoded) == batches
    # A list is named by fingerprints.
    add_features(bank, [large, networks["light"]], batch=4)
    assert {large.fingerprint(), networks["light"].fingerprint()} <= set(bank.feature_sets)


def test_several_networks_broken_off(bank: Bank, tmp_path: Path) -> None:
    """A shard may be there for one network and not for the other, in batches of other sizes."""
    other = Bank(shutil.copytree(bank.path, tmp_path / "other"))
    networks = {"heavy": classifier(), "light": small_sampler(), "more": small_sampler(num_classes=3)}
    add_features(other, {name: networks[name] for name in ("heavy", "light")}, batch=4)
    add_features(other, {"more": networks["more"]}, batch=3)

    def stop(told: Progress) -> None:
        if told.done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_features(bank, {name: networks[name] for name in ("heavy", "light")}, batch=4, on_progress=stop)
    with pytest.raises(KeyboardInterrupt):
        add_features(bank, {"more": networks["more"]}, batch=3, on_progress=stop)
    for file in bank.folder.features("light").path.glob("00000.*"):
        file.unlink()
    add_features(bank, networks)
    assert contents(bank.path) == contents(other.path)


# ---- outputs and features of one classifier, from the same pass


def test_one_pass_gives_outputs_and_features(bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of both are those of two passes, also where a run was broken off after either."""
    network = create_classifier("timm:test_resnet", num_classes=3, input_size=32)
    other, third = (Bank(shutil.copytree(bank.path, tmp_path / name)) for name in ("other", "third"))
    add_features(add_teacher(other, network, batch=4), network, batch=4)
    passes: list[int] = []
    network.net.register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
    add_teacher(third, network, batch=4)
    without, passes[:] = len(passes), []
    add_teacher(bank, network, probe_features=True, batch=4)
    # Before the first frame it is tried, with and without a probe, and their width is learned.
    assert len(passes) == without + 3
    assert contents(bank.path) == contents(other.path)
    assert bank.features_of_teacher(bank.teacher()).name == network.fingerprint()
    for folder in (bank.folder.features(network.fingerprint()), bank.folder.output(TEACHER, network.fingerprint())):
        for file in folder.path.glob("00001.*"):
            file.unlink()
        add_teacher(bank, network, probe_features=True, batch=4)
        assert contents(bank.path) == contents(other.path)
    assert add_teacher(third, network, batch=4).features_of_teacher(third.teacher()) is None


def test_a_bank_whose_classifier_ran_in_other_batches(tmp_path: Path) -> None:
    """The teacher's batch size stays, and that of features that are there; nothing is half done."""
    manifest = make_videos(tmp_path) / "m.csv"
    network = create_classifier("timm:test_resnet", class_names=["x", "y"], input_size=32)
    given: dict[str, Any] = {"num_candidates": 4, "workers": 0, "device": "cpu"}
    for name, features_first in (("new", False), ("there", True)):
        out = tmp_path / name
        first = prepare(manifest, network, out, batch=5, **given)
        if features_first:
            add_features(first, network, batch=3)
        found = prepare(manifest, network, out, probe_features=True, **given)
        features = found.features_of_teacher(found.teacher())
        assert features is not None
        assert (found.teacher().about["batch"], features.about["batch"]) == (5, 3 if features_first else 5)
        assert all(len(features[row]) == 4 for row in range(len(found)))


def test_features_that_are_there_in_another_way(bank: Bank) -> None:
    network = create_classifier("timm:test_resnet", num_classes=3, input_size=32)
    bank = add_features(add_teacher(bank, network), network, precision="float32")
    before = contents(bank.path)
    assert contents(add_teacher(bank, network, probe_features=True).path) == before
    # Those of a run that was broken off do not hide a complete set of another name.
    for file in bank.folder.features(network.fingerprint()).path.glob("00001.*"):
        file.unlink()
    assert bank.features_of_teacher(bank.teacher()) is None
    found = add_features(bank, network, name="whole").features_of_teacher(bank.teacher())
    assert found is not None
    assert found.name == "whole"


def test_what_has_no_probe_features(bank: Bank, tmp_path: Path) -> None:
    exits = create_classifier("timm:test_resnet", num_classes=3, input_size=32, head="frameexit")
    with pytest.raises(InvalidArgument, match="probe_features=True is for a probe, but the classifier"):
        add_teacher(bank, exits, probe_features=True)
    assert not bank.teachers
    with pytest.raises(InvalidArgument, match="are features of a classifier, but none is given"):
        prepare(make_videos(tmp_path) / "m.csv", out=tmp_path / "none", probe_features=True)
    assert not (tmp_path / "none").exists()


def test_the_command_prepares_both(tmp_path: Path) -> None:
    manifest = make_videos(tmp_path) / "m.csv"
    bare = CliRunner().invoke(commands, ["prepare", str(manifest), "--probe-features"])
    assert isinstance(bare.exception, InvalidArgument)
    assert "--probe-features configures a classifier, but none is given" in str(bare.exception)
    save_classifier(create_classifier("timm:test_resnet", class_names=["x", "y"], input_size=32), tmp_path / "mine")
    given = ["-c", str(tmp_path / "mine"), "-t", "4", "--out", str(tmp_path / "bank"), "--workers", "0"]
    done = CliRunner().invoke(commands, ["prepare", str(manifest), *given, "--probe-features"])
    assert done.exit_code == 1, done.output  # some videos are broken
    made_bank = Bank(tmp_path / "bank")
    found = made_bank.features_of_teacher(made_bank.teacher())
    assert found is not None
    assert found[0].shape[0] == 4


def test_several_networks_that_cannot_be_told_apart(bank: Bank) -> None:
    with pytest.raises(InvalidArgument, match="two networks would have features called"):
        add_features(bank, [classifier(), classifier()])
    with pytest.raises(InvalidArgument, match="name='both' is for one network, but 2 are given"):
        add_features(bank, [classifier(), small_sampler()], name="both")
    with pytest.raises(InvalidArgument, match="but 0 are given"):
        add_features(bank, [])
    with pytest.raises(InvalidArgument, match="name='a/b' cannot name features"):
        add_features(bank, {"a/b": classifier()})
    assert not bank.feature_sets


def test_features_by_the_command(bank: Bank, tmp_path: Path) -> None:
    save_classifier(create_classifier("timm:test_resnet", num_classes=3, input_size=32), tmp_path / "mine")
    small_sampler().save_pretrained(tmp_path / "sampler")
    named = ["--features", f"r34={tmp_path / 'mine'}", "--features", f"light={tmp_path / 'sampler'}"]
    done = CliRunner().invoke(app, ["add-features", str(bank.path), *named, "--device", "cpu", "--json"])
    assert done.exit_code == 0, done.stderr
    assert [one["name"] for one in json.loads(done.stdout)["features"]] == ["light", "r34"]
    assert {name: about["network"] for name, about in bank.feature_sets.items()} == {
        "light": "sampler",
        "r34": "classifier",
    }
    for wrong in ("r34", "r34=", "=x"):
        broken = CliRunner().invoke(app, ["add-features", str(bank.path), "--features", wrong])
        assert "must be NAME=SOURCE" in str(broken.exception)
