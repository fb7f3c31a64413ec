"""Pictures that reels are made of: of a folder, and drawn ones."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sosampler.errors import InvalidArgument, LimitExceeded
from sosampler.reels.images import PictureCache, PictureFolder, Pictures, ProceduralPictures, open_reel_set
from sosampler.reels.procedural import MAX_CLASSES, class_name
from sosampler.reels.recipe import DISTRACTOR, ReelSet


def folder_of_pictures(root: Path, classes: dict[str, int], size: tuple[int, int] = (40, 30)) -> Path:
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            colour = tuple(np.random.default_rng([len(name), number]).integers(0, 256, 3).tolist())
            Image.new("RGB", size, colour).save(root / name / f"{number:03d}.png")
    return root


class TestPictureFolder:
    def test_classes_and_pictures_are_sorted_and_other_files_left_out(self, tmp_path: Path) -> None:
        root = folder_of_pictures(tmp_path / "p", {"zebra": 3, "ant": 2})
        (root / "ant" / "notes.txt").write_text("no picture")
        (root / "ant" / ".hidden.png").write_bytes(b"no picture")
        (root / "readme.md").write_text("no class")
        (root / ".git").mkdir()
        source = PictureFolder(root, distractors=root / "zebra", size=16)
        assert source.class_names == ("ant", "zebra")
        assert (source.per_class, source.num_distractors, source.size) == ((2, 3), 3, 16)
        expected = np.asarray(Image.open(root / "zebra" / "002.png"))[0, 0]
        assert (source.get(1, 2) == expected).all()
        assert (source.get(DISTRACTOR, 2) == expected).all()
        assert repr(source) == "PictureFolder(2 classes, 5 pictures, 3 distractors, 16 px)"

    def test_the_short_side_is_scaled_and_the_middle_kept(self, tmp_path: Path) -> None:
        (tmp_path / "c").mkdir()
        wide = np.zeros((20, 60, 3), dtype=np.uint8)
        wide[:, 20:40] = (255, 0, 0)  # the middle square
        Image.fromarray(wide).save(tmp_path / "c" / "a.png")
        Image.fromarray(np.ascontiguousarray(wide.transpose(1, 0, 2))).save(tmp_path / "c" / "b.png")
        source = PictureFolder(tmp_path, size=40)
        for number in (0, 1):
            assert source.get(0, number).shape == (40, 40, 3)
            assert (source.get(0, number)[4:-4, 4:-4] == (255, 0, 0)).all()

    def test_upright_and_rgb_whatever_the_file_holds(self, tmp_path: Path) -> None:
        (tmp_path / "c").mkdir()
        halves = np.zeros((32, 32), dtype=np.uint8)
        halves[:16] = 255  # stored: white above
        exif = Image.Exif()
        exif[0x0112] = 3  # to be turned by half a circle
        Image.fromarray(halves).save(tmp_path / "c" / "a.jpg", exif=exif, quality=95)
        picture = PictureFolder(tmp_path, size=32).get(0, 0)
        assert picture.shape == (32, 32, 3)
        assert picture[:12].max() < 20
        assert picture[20:].min() > 235

    def test_halves_are_disjoint_and_complete(self, tmp_path: Path) -> None:
        root = folder_of_pictures(tmp_path / "p", {"a": 7, "b": 6})
        whole = PictureFolder(root, distractors=root / "a", size=8)
        first = whole.take(slice(0, 3), slice(0, 2))
        second = whole.take(slice(3, None), slice(2, None))
        assert (first.per_class, second.per_class) == ((3, 3), (4, 3))
        assert (first.num_distractors, second.num_distractors) == (2, 5)
        assert not set(first.listing()) & set(second.listing())
        assert set(first.listing()) | set(second.listing()) == set(whole.listing())
        assert (second.get(0, 0) == whole.get(0, 3)).all()
        assert len({whole.fingerprint(), first.fingerprint(), second.fingerprint()}) == 3
        with pytest.raises(InvalidArgument, match="leaves none of the 6 pictures of b"):
            whole.take(slice(6, None))

    def test_a_benchmark_names_its_folders(self, tmp_path: Path) -> None:
        folder_of_pictures(tmp_path / "train", {"a": 4, "b": 5})
        folder_of_pictures(tmp_path, {"other": 3})
        opened = open_reel_set(tmp_path, ReelSet("train", "other", 1, 3), size=8)
        assert (opened.per_class, opened.num_distractors) == ((2, 2), 3)

    def test_the_fingerprint_is_about_the_pictures_not_about_where_they_lie(self, tmp_path: Path) -> None:
        one = PictureFolder(folder_of_pictures(tmp_path / "one", {"a": 2}), size=8)
        two = PictureFolder(folder_of_pictures(tmp_path / "two", {"a": 2}), size=8)
        more = PictureFolder(folder_of_pictures(tmp_path / "three", {"a": 3}), size=8)
        assert one.fingerprint() == two.fingerprint()
        assert one.fingerprint() != more.fingerprint()

    def test_bad_folders(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="cannot be listed"):
            PictureFolder(tmp_path / "nowhere")
        with pytest.raises(InvalidArgument, match="holds no folders"):
            PictureFolder(tmp_path)
        (tmp_path / "empty").mkdir()
        with pytest.raises(InvalidArgument, match="empty: holds no pictures"):
            PictureFolder(tmp_path)

    def test_bad_pictures(self, tmp_path: Path) -> None:
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "a.png").write_bytes(b"not a picture")
        Image.new("RGB", (1, 60_000)).save(tmp_path / "c" / "b.png")  # 192 wide it has 2 thousand million pixels
        source = PictureFolder(tmp_path)
        with pytest.raises(InvalidArgument, match=r"a\.png: not an image"):
            source.get(0, 0)
        with pytest.raises(LimitExceeded, match="max_pixels"):
            source.get(0, 1)
        with pytest.raises(InvalidArgument, match="there are 2"):
            source.get(0, 2)
        with pytest.raises(InvalidArgument, match="there are 2"):
            source.get(0, -1)
        with pytest.raises(InvalidArgument, match="label=1"):
            source.get(1, 0)

    def test_memory_is_bounded_and_the_least_recent_goes(self, tmp_path: Path) -> None:
        root = folder_of_pictures(tmp_path / "p", {"a": 5})
        one = 10 * 10 * 3
        source = PictureFolder(root, size=10, cache_bytes=2 * one + 5)
        cache = source.take(slice(0, 5))._cache
        assert cache is source._cache  # halves share it
        first, second = source.get(0, 0), source.get(0, 1)
        assert source.get(0, 0) is first
        source.get(0, 2)
        assert (cache.held_bytes, len(cache)) == (2 * one, 2)
        assert source.get(0, 0) is first
        assert source.get(0, 1) is not second
        nothing = PictureFolder(root, size=10, cache_bytes=0)
        assert nothing.get(0, 0) is not nothing.get(0, 0)
        assert nothing._cache.held_bytes == 0

    def test_pictures_cannot_be_overwritten_and_travel_to_other_processes(self, tmp_path: Path) -> None:
        source = PictureFolder(folder_of_pictures(tmp_path / "p", {"a": 1}), size=10)
        with pytest.raises(ValueError, match="read-only"):
            source.get(0, 0)[0] = 0
        again = pickle.loads(pickle.dumps(source))
        assert (again.get(0, 0) == source.get(0, 0)).all()
        assert isinstance(again._cache, PictureCache)
        assert len(again._cache) == 1


def arrays_of(source: Pictures) -> tuple[np.ndarray, np.ndarray]:
    """All labelled pictures [M, S, S, 3] and their labels [M]."""
    listed = [(label, number) for label, count in enumerate(source.per_class) for number in range(count)]
    return np.stack([source.get(*each) for each in listed]), np.array([label for label, _ in listed])


class TestProceduralPictures:
    def test_the_same_bits_in_another_process(self) -> None:
        program = (
            "import hashlib; from sosampler.reels.images import ProceduralPictures as P\n"
            "p = P(4, 3, num_distractors=3, size=40, seed=9)\n"
            "data = b''.join(p.get(label, n).tobytes() for label in (-1, 3, 0, 2, 1) for n in (2, 0, 1))\n"
            "import sys; sys.stdout.write(hashlib.sha256(data).hexdigest() + ' ' + str('torch' in sys.modules))"
        )
        runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(2)]
        assert runs[0].stdout == runs[1].stdout
        assert runs[0].stdout.endswith(" False"), runs[0].stderr  # and without torch

    def test_pictures_differ_and_depend_on_nothing_but_seed_class_and_number(self) -> None:
        few = ProceduralPictures(3, 2, num_distractors=2, size=32, seed=4)
        many = ProceduralPictures(9, 5, num_distractors=4, size=32, seed=4)
        other = ProceduralPictures(3, 2, num_distractors=2, size=32, seed=5)
        everything = [few.get(label, number) for label in (-1, 0, 1, 2) for number in (0, 1)]
        assert len({picture.tobytes() for picture in everything}) == 8
        assert (few.get(2, 1) == many.get(2, 1)).all()
        assert (few.get(-1, 1) == many.get(-1, 1)).all()
        assert (few.get(2, 1) != other.get(2, 1)).mean() > 0.5
        assert few.fingerprint() != other.fingerprint()

    def test_all_classes_have_names_and_pictures(self) -> None:
        source = ProceduralPictures(MAX_CLASSES, 1, size=32)
        assert len(set(source.class_names)) == MAX_CLASSES
        stacked, labels = arrays_of(source)
        assert stacked.shape == (MAX_CLASSES, 32, 32, 3)
        assert labels.tolist() == list(range(MAX_CLASSES))
        assert class_name(1) == source.class_names[1]
        with pytest.raises(InvalidArgument, match=f"must be at most {MAX_CLASSES}, the number of shapes"):
            ProceduralPictures(MAX_CLASSES + 1, 1)

    def test_colour_does_not_give_the_class_away(self) -> None:
        """The nearest class mean of colour statistics is right about as often as chance."""
        source = ProceduralPictures(5, 120, size=32, seed=3)
        stacked, labels = arrays_of(source)
        flat = stacked.reshape(len(stacked), -1, 3).astype(np.float64)
        features = np.concatenate([flat.mean(1), flat.std(1), np.quantile(flat, [0.1, 0.9], axis=1).sum(0)], axis=1)
        features = (features - features.mean(0)) / features.std(0)
        even = np.arange(len(labels)) % 2 == 0
        means = np.stack([features[even & (labels == c)].mean(0) for c in range(5)])
        distance = np.linalg.norm(features[~even, None] - means, axis=2)
        assert (distance.argmin(1) == labels[~even]).mean() < 0.33  # chance is 0.2

    @pytest.mark.slow
    def test_a_small_network_learns_the_classes_in_a_minute(self) -> None:
        torch = pytest.importorskip("torch")
        nn, functional = torch.nn, torch.nn.functional
        torch.manual_seed(0)
        source = ProceduralPictures(5, 200, size=64)

        def tensors(part: Pictures) -> tuple:
            stacked, labels = arrays_of(part)
            return torch.from_numpy(stacked).permute(0, 3, 1, 2).float() / 127.5 - 1, torch.from_numpy(labels)

        pictures, labels = tensors(source.take(slice(0, 150)))
        widths = [3, 24, 48, 96, 128]
        blocks = [nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise(widths)]
        net = nn.Sequential(*blocks, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(128, 5))
        optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=25 * (750 // 50))
        for _ in range(25):
            for batch in torch.randperm(750).split(50):
                mixed = pictures[batch][:, torch.randperm(3)]  # colours carry nothing
                optimizer.zero_grad()
                functional.cross_entropy(net(mixed), labels[batch]).backward()
                optimizer.step()
                schedule.step()
        pictures, labels = tensors(source.take(slice(150, None)))
        with torch.no_grad():
            right = (net.eval()(pictures).argmax(1) == labels).float().mean().item()
        assert right > 0.7
