"""What a sampler is shown in training: frames, draws, crops; and the small parts of the loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import sosampler as so
from sosampler._util import hardware as machine
from sosampler.samplers.recipe import read_recipe
from sosampler.training import sampler_data, train_sampler
from sosampler.training.dev import fit_calibration
from sosampler.training.optim import moving_average
from sosampler.training.sampler_data import (
    BankFrames,
    CachedFrames,
    Crops,
    Plan,
    SamplerBatches,
    Shape,
    VideoTable,
    crop,
    draw_crops,
    open_frames,
    points_per_pixel,
    stratified,
)
from sosampler.training.train_sampler import OnlineTeacher, train
from sosampler.video.candidates import uniform_positions
from tests.factories import SAMPLER_QUICK, make_bank

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_bank(tmp_path_factory.mktemp("data") / "bank")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    """Wide, high and small pictures."""
    sizes = ((40, 52), (64, 36), (28, 28))
    return make_bank(tmp_path_factory.mktemp("data") / "mixed", train=12, dev=6, sizes=sizes)


# ---- batches


@pytest.mark.parametrize("square", [False, True])
def test_frames_in_memory_and_frames_read_again_are_the_same(mixed: so.Bank, square: bool) -> None:
    rows = list(range(len(mixed)))
    shape = Shape(32, square=square)
    read = BankFrames(mixed, rows, shape)
    kept = CachedFrames(read, workers=2)
    assert read.nbytes == kept.nbytes
    videos, positions = np.array([3, 1, 0, 5, 2]), np.array([[0, 5], [1, 1], [2, 0], [3, 3], [5, 4]])
    assert torch.equal(read.frames(videos, positions), kept.frames(videos, positions))
    one_size = np.array([0, 3, 6])
    assert torch.equal(read.frames(one_size, positions[:3]), kept.frames(one_size, positions[:3]))
    canvas = kept.frames(videos, positions)
    if square:
        assert canvas.shape[2:] == (32, 32, 3)
        # What the sampler's own preprocessing makes of the same stored pictures.
        preprocessing = so.Preprocessing(size=(32, 32), resize=32)
        stored = torch.from_numpy(mixed[1].frames([1])).movedim(-1, 1)
        off = (preprocessing.resized(stored)[0].float() - canvas[1, 0].movedim(-1, 0).float()).abs()
        assert off.max() <= 2  # two libraries round differently
    else:
        assert canvas.shape[2:4] == (56, 41)  # 64 x 36 -> 56 x 32, 40 x 52 -> 32 x 41
        assert not canvas[0, :, 32:].any()
        assert read.sizes[2].tolist() == [28, 28]  # never enlarged


def test_both_ways_of_reading_train_the_same_sampler(mixed: so.Bank, tmp_path: Path) -> None:
    kept = train(mixed, out=tmp_path / "kept", **SAMPLER_QUICK)
    read = train(mixed, out=tmp_path / "read", cache_bytes=0, **SAMPLER_QUICK | {"workers": 2})
    alone = train(mixed, out=tmp_path / "alone", cache_bytes=0, **SAMPLER_QUICK | {"workers": 0})
    assert kept.result == read.result == alone.result


def test_open_frames_keeps_to_its_memory(mixed: so.Bank) -> None:
    rows, shape = list(range(6)), Shape(32)
    needed = BankFrames(mixed, rows, shape).nbytes
    options = {"device": CPU, "workers": 1}
    assert isinstance(open_frames(mixed, rows, shape, cache_bytes=needed, **options), CachedFrames)
    assert isinstance(open_frames(mixed, rows, shape, cache_bytes=needed - 1, **options), BankFrames)


def test_an_epoch_holds_every_video_once_and_shares_add_up(bank: so.Bank) -> None:
    recipe = read_recipe("default", **{key: SAMPLER_QUICK[key] for key in ("batch_size", "num_candidates")})
    counts, sizes = np.array([8, 6, 3, 20] * 6), np.tile([[40, 52]], (24, 1))
    plan = Plan(counts, sizes, recipe)
    draws = [plan.draw(2, step) for step in range(plan.steps)]
    assert sorted(np.concatenate([draw.videos for draw in draws]).tolist()) == list(range(24))
    lengths = {plan.draw(epoch, step).positions.shape[1] for epoch in range(9) for step in range(3)}
    assert lengths == {4, 6, 8}  # few shapes, from the least to the most
    for draw in draws:
        assert (draw.positions >= 0).all()
        assert (draw.positions < counts[draw.videos][:, None]).all()
        assert (np.diff(draw.positions, axis=1) >= 0).all()
        halves = [draw.part(slice(0, 3)), draw.part(slice(3, 8))]
        for name in ("videos", "positions"):
            assert np.array_equal(np.concatenate([getattr(half, name) for half in halves]), getattr(draw, name))
        assert np.array_equal(np.concatenate([half.crops.boxes for half in halves]), draw.crops.boxes)
    assert not np.array_equal(plan.draw(0, 0).videos, plan.draw(1, 0).videos)
    other = Plan(counts, sizes, recipe.changed(seed=1))
    assert not np.array_equal(plan.draw(0, 0).videos, other.draw(0, 0).videos)


def test_crops_are_drawn_per_video_or_per_frame() -> None:
    counts, sizes = np.full(8, 8), np.tile([[40, 52]], (8, 1))
    recipe = read_recipe("default", batch_size=4, num_candidates=5, crop_per="video")
    boxes = Plan(counts, sizes, recipe).draw(0, 0).crops.boxes.reshape(4, 5, 4)
    assert (boxes == boxes[:, :1]).all()
    assert not (boxes[0] == boxes[1]).any()
    boxes = Plan(counts, sizes, recipe.changed(crop_per="frame")).draw(0, 0).crops.boxes
    assert len(np.unique(boxes, axis=0)) == 20


def test_batches_bring_the_teachers_rows(bank: so.Bank) -> None:
    rows = [5, 2, 9, 30]
    recipe = read_recipe("default", batch_size=2, num_candidates=3)
    source = open_frames(bank, rows, Shape(36), cache_bytes=1 << 30, device=CPU, workers=1)
    teacher = bank.teacher()
    table = VideoTable(bank, rows, teacher)
    batches = SamplerBatches(table, source, recipe, part=slice(0, 2), workers=0)
    found = list(batches.epoch(1))
    assert len(found) == len(batches) == 2
    assert len(list(batches.epoch(1, begin=1))) == 1
    assert torch.equal(next(iter(batches.epoch(1, begin=1))).probs, found[1].probs)
    for batch in found:
        pictures = batch.frames.unflatten(0, (2, 3))
        for place, video in enumerate(batch.draw.videos.tolist()):
            item, positions = bank[rows[video]], batch.draw.positions[place]
            assert np.array_equal(batch.probs[place], teacher[rows[video]].frame_probs[positions])
            assert np.array_equal(batch.labels[place].nonzero().flatten(), item.labels)
            assert np.array_equal(batch.times[place], item.positions[positions])
            assert np.array_equal(pictures[place], item.frames(positions, 36, fast=True))


def test_stratified_frames_are_those_of_the_bank() -> None:
    rng = np.random.default_rng(0)
    counts = np.array([8, 10, 3, 100])
    drawn = np.stack([stratified(counts, 5, rng) for _ in range(300)])  # [300, 4, 5]
    for video, count in enumerate(counts):
        if count < 5:
            assert (drawn[:, video] == uniform_positions(count, 5)).all()
            continue
        edges = np.arange(6) * count // 5
        for segment in range(5):
            seen = set(drawn[:, video, segment].tolist())
            assert seen <= set(range(edges[segment], edges[segment + 1]))
            assert len(seen) > 0.8 * (edges[segment + 1] - edges[segment]) - 1


# ---- crops


def test_a_whole_box_is_a_plain_resize() -> None:
    rng = np.random.default_rng(0)
    smooth = rng.normal(size=(4, 9, 11, 3)).cumsum(1).cumsum(2)
    frames = torch.from_numpy((127 + 15 * smooth).clip(0, 255).astype(np.uint8))
    sizes = np.tile([[9, 11]], (4, 1))
    crops = Crops(np.tile(np.array([0, 0, 11, 9], dtype=np.float32), (4, 1)), np.array([False, True, False, True]))
    found = crop(frames, crops, sizes, (18, 33))
    expected = torch.nn.functional.interpolate(frames.movedim(-1, 1).float(), (18, 33), mode="bilinear")
    expected[1::2] = expected[1::2].flip(-1)
    assert torch.allclose(found, expected, atol=1e-3)


def smooth_pictures(count: int, height: int, width: int) -> torch.Tensor:
    """uint8 [F, H, W, 3]: three ramps, across, down and both, so that a pixel tells its place."""
    down, across = np.mgrid[:height, :width].astype(float)
    picture = np.stack([8 * across, 12 * down, 4 * across + 6 * down], -1)
    return torch.from_numpy(np.repeat(picture[None].astype(np.uint8), count, 0))


def test_boxes_cut_what_slices_cut() -> None:
    frames = smooth_pictures(3, 20, 30)
    corners = ((4, 2), (1, 1), (21, 11))
    boxes = np.array([[left, top, 8, 8] for left, top in corners], dtype=np.float32)
    found = crop(frames, Crops(boxes, np.zeros(3, dtype=bool)), np.tile([[20, 30]], (3, 1)), (8, 8))
    # 20 / 8 asks for two points a pixel and side, whose mean on a ramp is the pixel; a box one off differs by 4 to 12.
    for row, (left, top) in enumerate(corners):
        patch = frames[row, top : top + 8, left : left + 8].movedim(-1, 0).float()
        assert (found[row] - patch).abs().max() < 0.01
    noise = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (3, 20, 30, 3), dtype=np.uint8))
    whole = Crops(np.array([[0, 0, 30, 20]] * 3, dtype=np.float32), np.zeros(3, dtype=bool))
    exact = crop(noise, whole, np.tile([[20, 30]], (3, 1)), (20, 30))
    assert torch.allclose(exact, noise.movedim(-1, 1).float(), atol=1e-3)


def test_a_crop_is_the_same_whoever_is_cut_with_it(tmp_path: Path) -> None:
    """Large and small pictures: the share of one process may hold small ones alone."""
    bank = make_bank(tmp_path / "bank", train=6, dev=2, sizes=((40, 52), (150, 160)))
    net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 3))
    classifier = so.wrap_classifier(net, input_size=24, layout="BCHW", class_names=bank.classes, name="any")
    recipe = read_recipe("default", batch_size=6, num_candidates=3)
    rows = list(range(6))
    source = BankFrames(bank, rows, Shape(128))
    table = VideoTable(bank, rows, bank.teacher())
    teacher = OnlineTeacher(classifier, source.sizes, CPU)
    whole, *parts = (
        next(iter(SamplerBatches(table, source, recipe, part=part, workers=0).epoch(0)))
        for part in (slice(0, 6), *(slice(number, number + 1) for number in range(6)))
    )
    assert points_per_pixel(source.sizes, (24, 24)) == 5
    assert any(points_per_pixel(part.sizes, (24, 24)) == 2 for part in parts)
    expected = teacher(whole.frames, whole)
    found = torch.cat([teacher(part.frames, part) for part in parts])
    assert torch.allclose(found, expected, atol=1e-5)


def test_padding_is_never_seen() -> None:
    """A small picture in a large frame whose rest is white."""
    frames = torch.full((2, 40, 40, 3), 255, dtype=torch.uint8)
    frames[:, :16, :20] = 10
    sizes = np.array([[16, 20]] * 2)
    crops = draw_crops(np.random.default_rng(0), sizes, scale=(0.2, 1.0), ratio=(0.5, 2.0), flip=True)
    assert (crop(frames, crops, sizes, (32, 32)) - 10).abs().max() < 1e-3


def test_shrinking_does_not_alias() -> None:
    """Stripes of one pixel become grey, not stripes."""
    stripes = np.zeros((1, 64, 64, 3), dtype=np.uint8)
    stripes[:, :, ::2] = 255
    crops = Crops(np.array([[0, 0, 64, 64]], dtype=np.float32), np.zeros(1, dtype=bool))
    found = crop(torch.from_numpy(stripes), crops, np.array([[64, 64]]), (16, 16))
    assert (found - 127.5).abs().max() < 1


def test_boxes_are_distributed_as_torchvisions() -> None:
    from torchvision.transforms.v2 import RandomResizedCrop

    scale, ratio, count = (0.08, 1.0), (3 / 4, 4 / 3), 3000
    for height, width in ((120, 160), (90, 320)):
        sizes = np.tile([[height, width]], (count, 1))
        crops = draw_crops(np.random.default_rng(0), sizes, scale=scale, ratio=ratio, flip=True)
        boxes = crops.boxes
        assert (boxes >= 0).all()
        assert (boxes[:, 0] + boxes[:, 2] <= width + 1e-3).all()
        assert (boxes[:, 1] + boxes[:, 3] <= height + 1e-3).all()
        assert 0.45 < crops.flips.mean() < 0.55
        torch.manual_seed(0)
        theirs = RandomResizedCrop(8, scale=scale, ratio=ratio)
        image = torch.empty(3, height, width)
        drawn = [theirs.make_params([image]) for _ in range(count)]
        for place, name in enumerate(("left", "top", "width", "height")):
            peer = np.array([params[name] for params in drawn])
            for share in (10, 50, 90):
                ours_at, theirs_at = np.percentile(boxes[:, place], share), np.percentile(peer, share)
                assert abs(ours_at - theirs_at) < 0.04 * max(height, width), (name, share)
    # A shape that never fits: all of the height, in the middle.
    wide = draw_crops(np.random.default_rng(0), np.array([[10, 1000]]), scale=(1, 1), ratio=(1, 2), flip=False)
    assert wide.boxes[0].tolist() == pytest.approx([490, 0, 20, 10])


# ---- parts


def test_memory_and_cores_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    for name, text in {
        "meminfo": "MemTotal: 1000 kB\nMemAvailable: 1000000 kB\n",
        "self/cgroup": "0::/job/step\n",
    }.items():
        (proc / name).parent.mkdir(parents=True, exist_ok=True)
        (proc / name).write_text(text)
    monkeypatch.setattr(machine, "_PROC", proc)
    monkeypatch.setattr(machine, "_GROUPS", groups)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    assert machine.free_memory() == 1000000 << 10  # no limits, no folders
    assert machine.usable_cores() == 12

    def write(folder: str, files: dict[str, str]) -> None:
        (groups / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (groups / folder / name).write_text(text)

    # The second version; of a group and those above it the narrowest limit counts. Cached files can be given up.
    write("job/step", {"memory.max": "max\n", "memory.current": "5000\n", "cpu.max": "max 100000\n"})
    assert machine.free_memory() == 1000000 << 10
    write("job", {"memory.max": "90000\n", "memory.current": "50000\n", "cpu.max": "350000 100000\n"})
    write("job", {"memory.stat": "anon 30000\ninactive_file 20000\nactive_file 7\n"})
    assert machine.free_memory() == 90000 - 50000 + 20000
    assert machine.usable_cores() == 3
    # The first version; the path is of the host, the container sees its own group at the top.
    (proc / "self/cgroup").write_text("5:cpuset:/\n4:cpu,cpuacct:/docker/1\n3:memory:/docker/1\n")
    write("memory", {"memory.limit_in_bytes": "70000\n", "memory.usage_in_bytes": "60000\n"})
    write("memory", {"memory.stat": "inactive_file 1\ntotal_inactive_file 2000\n"})
    write("cpu", {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"})
    assert machine.free_memory() == 70000 - 60000 + 2000
    assert machine.usable_cores() == 1  # half a core is one still
    write("memory", {"memory.usage_in_bytes": "99000\n"})
    assert machine.free_memory() == 0
    write("cpu", {"cpu.cfs_quota_us": "-1\n"})
    assert machine.usable_cores() == 12
    (proc / "self/cgroup").unlink()
    assert machine.default_cache_bytes() == int(0.4 * (1000000 << 10))


def test_worker_processes_keep_to_the_shared_memory(mixed: so.Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(range(12))
    recipe = read_recipe("default", batch_size=4, num_candidates=4)
    table, source = VideoTable(mixed, rows, mixed.teacher()), BankFrames(mixed, rows, Shape(32))
    batch = 4 * 4 * 56 * 41 * 3  # bytes of the largest, of pictures of 56 x 32 and 32 x 41

    def opened(room: int | None, sharers: int = 1) -> SamplerBatches:
        monkeypatch.setattr(sampler_data, "free_shared_memory", lambda: room)
        return SamplerBatches(table, source, recipe, part=slice(0, 4), workers=2, sharers=sharers)

    assert [opened(room).workers for room in (None, 4 * batch, 3 * batch, 2 * batch, batch)] == [2, 2, 1, 1, 0]
    assert opened(12 * batch, sharers=4).workers == 1
    assert [opened(room)._loader.prefetch_factor for room in (6 * batch, 5 * batch, batch)] == [2, 1, None]
    small = list(opened(batch).epoch(0))  # decoded by the process itself
    assert all(torch.equal(a.frames, b.frames) for a, b in zip(small, opened(None).epoch(0), strict=True))


def test_threads_decode_the_same(mixed: so.Bank) -> None:
    rows, videos, positions = list(range(9)), np.arange(9), np.tile([0, 3], (9, 1))
    one, four = (BankFrames(mixed, rows, Shape(32), threads=threads) for threads in (1, 4))
    assert torch.equal(one.frames(videos, positions), four.frames(videos, positions))


def test_frames_on_the_device_take_no_memory_of_the_machine(mixed: so.Bank) -> None:
    source = BankFrames(mixed, [0, 1], Shape(32))
    assert train_sampler.memory_taken(source) == 0
    kept = CachedFrames(source, workers=1)
    assert train_sampler.memory_taken(kept) == source.nbytes
    assert train_sampler.memory_taken(kept.to(torch.device("meta"))) == 0


def test_running_mean_against_a_loop() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    mean = moving_average(net, 0.5)
    expected = net[0].weight.detach().clone()
    for step in range(6):
        with torch.no_grad():
            net[0].weight.add_(torch.randn(2, 3))
        net[1](torch.randn(4, 2))
        mean.update(net, step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * net[0].weight.detach()
    assert torch.allclose(mean.module[0].weight, expected, atol=1e-6)
    assert mean.module[1].num_batches_tracked == 6


def test_calibration_against_a_search() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(3, 5, 400)
    told = 1 / (1 + np.exp(-(0.4 * scores - 2 + rng.normal(0, 1, 400))))
    a, b = fit_calibration(scores, told)

    def entropy(a: float, b: float) -> float:
        z = a * scores + b
        return float((np.logaddexp(0, z) - told * z).mean())

    around = [entropy(a + da, b + db) for da in (-0.01, 0, 0.01) for db in (-0.05, 0, 0.05)]
    assert min(around) == pytest.approx(entropy(a, b), abs=1e-7)
    assert a == pytest.approx(0.37, abs=0.06)
    parted = fit_calibration([-2.0, -1.0, 1.0, 2.0], [0.0, 0.0, 1.0, 1.0])
    assert np.isfinite(parted).all()
    assert parted[0] > 1
    flat = fit_calibration([1.0, 1.0], [0.2, 0.4])
    assert flat[0] == 0
    assert 1 / (1 + np.exp(-flat[1])) == pytest.approx(0.3, abs=1e-4)
