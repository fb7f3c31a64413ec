"""Teachers: a classifier's answers in a bank are its own, whatever the batches, views and threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn

from sosampler import wrap_classifier
from sosampler.bank import decode as decode_pool
from sosampler.bank.annotate import halved, views_of
from sosampler.bank.decode import ByteBudget
from sosampler.bank.prepare import add_teacher, prepare
from sosampler.errors import InvalidArgument
from tests.factories import Told, contents, made, make_videos, pooled, small_net


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_videos(tmp_path_factory.mktemp("videos"))


def tensor(item: Any) -> Tensor:
    return torch.from_numpy(item.frames()).permute(0, 3, 1, 2)[None]


def test_teachers_say_what_the_classifier_says(videos: Path, tmp_path: Path) -> None:
    classifier = pooled()
    bank = made(videos, tmp_path / "bank", classifier, batch=5)
    teacher = bank.teacher(classifier)
    assert (teacher.pooling, teacher.fingerprint) == ("mean", classifier.fingerprint())
    for item, answers in zip(bank, teacher, strict=True):
        frames = tensor(item)
        np.testing.assert_allclose(answers.frame_probs, classifier.frame_probs(frames)[0], atol=5e-4)
        np.testing.assert_allclose(answers.features, classifier.frame_features(frames)[0], atol=1e-5)
        some = [0, 2, 5]
        pooled_probs = classifier.pool(torch.from_numpy(answers.features[some])[None])[0]
        np.testing.assert_allclose(pooled_probs, classifier.clip_probs(frames[:, some])[0], atol=1e-5)


def test_a_frameexit_head_keeps_features_in_half_precision(videos: Path, tmp_path: Path) -> None:
    from sosampler import create_classifier

    torch.manual_seed(0)
    classifier = create_classifier("timm:test_resnet", num_classes=2, head="frameexit", input_size=64)
    bank = made(videos, tmp_path / "bank", classifier)
    answers = bank.teacher(classifier)[1]
    assert (answers.features.dtype, answers.features.shape) == (np.float16, (12, 4096))
    probs = classifier.pool(torch.from_numpy(answers.features[None, 2:6].astype(np.float32)))[0]
    np.testing.assert_allclose(probs, classifier.clip_probs(tensor(bank[1])[:, 2:6])[0], atol=2e-3)


class Clips(nn.Module):
    """A network of clips, for which each frame is a clip of one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net(1)

    def forward(self, clips: Tensor) -> Tensor:
        return self.net(clips.mean(1))


def test_networks_of_clips_see_each_frame_alone(videos: Path, tmp_path: Path) -> None:
    classifier = wrap_classifier(Clips(), input_size=64)
    bank = made(videos, tmp_path / "bank", classifier)
    for index in (0, 2):
        outputs = bank.teacher(classifier, views=1)[index]
        assert outputs.features is None
        np.testing.assert_allclose(outputs.frame_probs, classifier.frame_probs(tensor(bank[index]))[0], atol=5e-4)


def test_views_of_upright_frames_are_its_ends() -> None:
    frames = torch.arange(6 * 4).view(6, 4)
    _, mirrored, top, bottom = views_of(frames, 4)
    assert mirrored[0].tolist() == [3, 2, 1, 0]
    assert (top == frames[:4]).all()
    assert (bottom == frames[2:]).all()


def test_classifiers_are_told_where_frames_lie(videos: Path, tmp_path: Path) -> None:
    bank = made(videos, tmp_path / "bank", Told())
    for item, answers in zip(bank, bank.teacher(Told()), strict=True):
        np.testing.assert_allclose(answers.frame_probs[:, 0], item.pts_seconds / item.duration, atol=1e-3)


class OnDevice(Told):
    """Says that it runs on an accelerator: asked by one thread at a time, while others decode."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.inside, self.most = 0, 0

    def frame_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.002)
        self.inside -= 1
        return super().frame_probs(frames, positions)


def test_a_device_is_asked_one_batch_at_a_time(videos: Path, tmp_path: Path) -> None:
    classifier = OnDevice()
    on_device, plain = made(videos, tmp_path / "a", classifier, batch=4), made(videos, tmp_path / "b", Told(), batch=4)
    assert classifier.most == 1
    assert contents(on_device.path) == contents(plain.path)


def test_data_loaders_read_banks(videos: Path, tmp_path: Path) -> None:
    bank = made(videos, tmp_path / "bank", Told())
    teacher = bank.teacher()
    expected = [bank[row].frames([0, 3], size=32).sum() + float(teacher[row].frame_probs.sum()) for row in range(5)]

    class Rows(torch.utils.data.Dataset):
        def __getitem__(self, row: int) -> float:
            return bank[row].frames([0, 3], size=32).sum() + float(teacher[row].frame_probs.sum())

        def __len__(self) -> int:
            return len(bank)

    loaded = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert list(loaded) == expected


@given(arrays.arrays(np.float32, (4, 6), elements=st.floats(0, 1, width=32)))
def test_half_precision_keeps_the_most_probable_class(probs: np.ndarray) -> None:
    half = halved(probs)
    certain = probs.max(-1) > 1e-6
    assert (half.argmax(-1) == probs.argmax(-1))[certain].all()
    np.testing.assert_allclose(half, probs, atol=1e-3)
    assert half.max() <= 1


def test_half_precision_keeps_a_narrow_winner() -> None:
    probs = np.array([[0.49999, 0.50001]], dtype=np.float32)
    assert probs.astype(np.float16).argmax() == 0  # a tie, so that the first wins
    assert halved(probs).argmax() == 1


def test_another_classifier_opens_no_video(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(videos, tmp_path / "bank", pooled(0))
    frames_before = {name: data for name, data in contents(tmp_path / "bank").items() if "teachers" not in name}

    def no_video(*_: Any) -> None:
        raise AssertionError("a video was opened")

    monkeypatch.setattr(decode_pool, "attempt", no_video)
    bank = made(videos, tmp_path / "bank", pooled(1))
    bank = prepare(None, pooled(2), tmp_path / "bank")
    assert len(bank.teachers) == 3
    after = contents(bank.path)
    assert {name: after[name] for name in frames_before} == frames_before
    frames = tensor(bank[3])
    for seed in range(3):
        got = bank.teacher(pooled(seed))[3].frame_probs
        np.testing.assert_allclose(got, pooled(seed).frame_probs(frames)[0], atol=5e-4)


def test_the_layout_of_the_network_is_left_as_it_was(videos: Path, tmp_path: Path) -> None:
    classifier = pooled()
    made(videos, tmp_path / "bank", classifier)
    assert all(weight.is_contiguous() for weight in classifier.parameters())


class Volumes(nn.Module):
    """A network of clips with convolutions in two and in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.flat = nn.Conv2d(3, 4, 3, 2)
        self.deep = nn.Conv3d(4, 4, (1, 3, 3), (1, 2, 2))
        self.last = nn.Linear(4, 2)

    def forward(self, clips: Tensor) -> Tensor:
        maps = torch.stack([self.flat(frame) for frame in clips.unbind(1)], 2)  # [B, C, T, H, W]
        return self.last(self.deep(maps).mean((2, 3, 4)))


def test_networks_with_3d_convolutions_are_asked_and_left_as_they_were(videos: Path, tmp_path: Path) -> None:
    net = Volumes()
    net.flat.to(memory_format=torch.channels_last)
    before = [weight.stride() for weight in net.parameters()]
    classifier = wrap_classifier(net, input_size=64)
    bank = made(videos, tmp_path / "bank", classifier)
    assert [weight.stride() for weight in net.parameters()] == before
    for item, answers in zip(bank, bank.teacher(classifier), strict=True):
        np.testing.assert_allclose(answers.frame_probs, classifier.frame_probs(tensor(item))[0], atol=5e-4)


def test_x3d_teaches(videos: Path, tmp_path: Path) -> None:
    from sosampler import create_classifier

    classifier = create_classifier("x3d_s", num_classes=2, input_size=64)
    bank = made(videos, tmp_path / "bank", classifier, num_candidates=1)
    told = bank.teacher(classifier)[0].frame_probs
    np.testing.assert_allclose(told, classifier.frame_probs(tensor(bank[0]))[0], atol=1e-3)


def test_a_teacher_goes_on_with_the_batches_it_began_with(videos: Path, tmp_path: Path) -> None:
    bank = made(videos, tmp_path / "bank", pooled(), batch=5)
    whole = contents(bank.path)
    (name,) = bank.teachers
    bank.folder.teacher(name).shard(0).unlink()
    with pytest.raises(InvalidArgument, match="this teacher was prepared with batch=5, now 7"):
        add_teacher(bank, pooled(), batch=7)
    add_teacher(bank, pooled())
    assert contents(bank.path) == whole


def test_classes_in_another_order_are_another_teacher(videos: Path, tmp_path: Path) -> None:
    bank = made(videos, tmp_path / "bank", pooled(class_names=["x", "y"]))
    assert bank.teacher(pooled(class_names=["x", "y"])).num_classes == 2
    assert bank.teacher(pooled()).num_classes == 2  # without names
    with pytest.raises(InvalidArgument, match="class 0 called 'x', now 'y'"):
        bank.teacher(pooled(class_names=["y", "x"]))


def test_devices_that_are_not_there(videos: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="device='abacus' cannot be used here"):
        made(videos, tmp_path / "bank", pooled(), device="abacus")
    assert not (tmp_path / "bank").exists()


def test_decoded_frames_of_all_threads_are_bounded() -> None:
    room, inside, most, alone = ByteBudget(100), [0], [0], []
    guard = threading.Lock()

    def take(size: int) -> None:
        with room.taking(size):
            with guard:
                inside[0] += size
                most[0] = max(most[0], min(inside[0], 100 if size < 100 else 0))
                alone.append(size >= 100 and inside[0] != size)
                assert inside[0] <= 100 or inside[0] == size
            time.sleep(0.002)
            with guard:
                inside[0] -= size

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(take, [30, 40, 250, 20, 50, 60] * 5))
    assert not any(alone)
    assert 60 < most[0] <= 100  # more than one at a time


class Broken(Told):
    def frame_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        raise RuntimeError("out of order")


def test_a_classifier_that_cannot_be_asked_is_found_before_decoding(videos: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of order"):
        made(videos, tmp_path / "bank", Broken())
    assert not (tmp_path / "bank").exists()
