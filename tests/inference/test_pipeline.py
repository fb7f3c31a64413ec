"""`Pipeline`: from a file to a label, one video or many."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sosampler as so
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.errors import InvalidArgument, VideoError
from sosampler.inference.pipeline import Pipeline, Prediction
from sosampler.samplers.sosampler import SOSampler
from sosampler.video.synthetic import numbered_video, read_number
from tests.clips import BY_NAME

CLASSES = ("diving", "football", "judo", "rowing")


@pytest.fixture(scope="module")
def sampler() -> SOSampler:
    torch.manual_seed(0)
    return SOSampler(backbone="timm:resnet10t", input_size=64).freeze()


@pytest.fixture(scope="module")
def classifier() -> so.Classifier:
    torch.manual_seed(1)
    made = so.create_classifier("timm:resnet10t", class_names=CLASSES, input_size=48)
    with torch.no_grad():  # a fresh last layer is small, and all answers would be nearly the same
        made.net.get_classifier().weight.mul_(40)
    made.fresh_head = False
    return made


class Recording:
    """A classifier by its protocol alone: remembers what it was asked, and answers by how bright the frames are."""

    name = "recording"
    class_names = ("dark", "bright")

    def __init__(self, resize: int = 32) -> None:
        self.preprocessing = Preprocessing(size=(32, 32), resize=resize)
        self.frames: list[Tensor] = []
        self.positions: list[np.ndarray] = []

    def clip_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        self.frames.append(frames)
        self.positions.append(positions.numpy())
        bright = frames.float().mean((1, 2, 3, 4)) / 255
        return torch.stack([1 - bright, bright], dim=1)

    def frame_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def gmacs(self, num_frames: int) -> float:
        return 0.0


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of one size, one of another, one again of the first, and a short one."""
    folder = tmp_path_factory.mktemp("videos")
    made = []
    for number, (frames, width, height) in enumerate(
        [(60, 192, 128), (45, 192, 128), (50, 128, 160), (33, 192, 128), (4, 192, 128)]
    ):
        made.append(folder / f"{number}.mp4")
        numbered_video(made[-1], num_frames=frames, width=width, height=height)
    return made


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.mp4"
    path.write_bytes(b"this is not a video" * 50)
    return path


def _places(found: Prediction) -> np.ndarray:
    """Where the chosen frames stand among the candidates."""
    return np.searchsorted(found.selection.candidates.frame_indices, found.selection.frame_indices)


def same(one: Prediction, other: Prediction) -> None:
    assert (one.video, one.label) == (other.video, other.label)
    np.testing.assert_allclose(one.probabilities, other.probabilities, atol=1e-5)
    assert one.selection.frame_indices.tolist() == other.selection.frame_indices.tolist()


class TestOneVideo:
    def test_selects_then_classifies(self, sampler: SOSampler, classifier: so.Classifier, clip: Path) -> None:
        pipe = Pipeline(sampler, classifier, num_candidates=12, num_frames=4, top=3, keep_frames=True)
        found = pipe(clip)
        # The clip's short side is 128, below the 256 that a pipeline decodes, so frames stay as they are.
        sel = so.select(clip, 4, num_candidates=12, policy=sampler)
        assert found.selection.frame_indices.tolist() == sel.frame_indices.tolist()
        assert [read_number(frame) for frame in found.selection.frames] == sel.frame_indices.tolist()
        # The pipeline's networks are made ready for speed, so the last digits may differ.
        np.testing.assert_allclose(found.selection.candidates.scores, sel.candidates.scores, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found.selection.scores, found.selection.candidates.scores[_places(found)])
        offered = so.select(clip, policy="all", num_candidates=12)
        scores = sampler.score(offered.to_torch()[None])[0].numpy()
        np.testing.assert_allclose(found.selection.candidates.scores, scores, rtol=1e-5, atol=1e-6)

        expected = classifier.clip_probs(sel.to_torch()[None])[0].numpy()
        np.testing.assert_allclose(found.probabilities, expected, atol=1e-4)
        assert found.label == CLASSES[int(expected.argmax())]
        assert found.probability == pytest.approx(float(expected.max()), abs=1e-4)
        assert [label for label, _ in found.top] == [CLASSES[place] for place in np.argsort(-expected)[:3]]
        assert (np.diff([probability for _, probability in found.top]) <= 0).all()
        uniform = classifier.clip_probs(so.select(clip, 4, policy="uniform").to_torch()[None])[0].numpy()
        assert np.abs(uniform - expected).max() > 1e-3, "other frames must give another answer, or this proves nothing"

    def test_large_videos_are_seen_at_the_size_of_banks(self, sampler: SOSampler, classifier: so.Classifier) -> None:
        data = numbered_video(num_frames=20, width=480, height=320)
        pipe = Pipeline(sampler, classifier, num_candidates=6, num_frames=2)
        sel = so.select(data, 2, num_candidates=6, policy=sampler, size=256)
        found = pipe(data)
        assert found.selection.frame_indices.tolist() == sel.frame_indices.tolist()
        np.testing.assert_allclose(found.probabilities, classifier.clip_probs(sel.to_torch()[None])[0], atol=1e-4)

    @pytest.mark.parametrize(
        ("given", "resize", "seen"), [(None, 32, 256), (None, 288, 288), (96, 288, 96), (1000, 32, 320)]
    )
    def test_size(self, given: int | None, resize: int, seen: int) -> None:
        asked = Recording(resize)
        pipe = Pipeline("uniform", asked, num_candidates=3, num_frames=3, size=given)
        pipe(numbered_video(num_frames=6, width=480, height=320))
        assert list(asked.frames[0].shape) == [1, 3, 3, seen, int(480 * seen / 320)]

    @pytest.mark.parametrize("name", ["late_start", "variable_rate"])
    def test_where_frames_lie_in_the_video(self, name: str, tmp_path: Path) -> None:
        """The same numbers that a bank holds for the same frames."""
        (tmp_path / "v.mp4").write_bytes(BY_NAME[name].data)
        (tmp_path / "m.csv").write_text("path,label\nv.mp4,a\n")
        bank = so.prepare(tmp_path / "m.csv", None, tmp_path / "bank", num_candidates=5, workers=0)
        asked = Recording()
        found = Pipeline("all", asked, num_candidates=5)(tmp_path / "v.mp4")
        assert found.selection.frame_indices.tolist() == bank[0].frame_indices.tolist()
        np.testing.assert_array_equal(asked.positions[0], bank[0].positions[None])
        assert (np.diff(asked.positions[0][0]) > 0).all()

    def test_where_frames_lie_in_a_part(self, clip: Path) -> None:
        asked = Recording()
        found = Pipeline("uniform", asked, num_candidates=3, num_frames=3, start=1.0, end=2.0)(clip)
        assert found.selection.frame_indices.tolist() == [35, 45, 55]
        np.testing.assert_allclose(asked.positions[0], [[5 / 30, 15 / 30, 25 / 30]], atol=1e-6)

    @pytest.mark.parametrize("kind", ["path", "text", "bytes", "file"])
    def test_every_kind_of_source(self, kind: str, clip: Path, classifier: so.Classifier) -> None:
        source: Any = {"path": clip, "text": str(clip), "bytes": clip.read_bytes()}.get(kind)
        found = Pipeline("uniform", classifier)(source if source is not None else io.BytesIO(clip.read_bytes()))
        np.testing.assert_allclose(found.probabilities, Pipeline("uniform", classifier)(clip).probabilities, atol=1e-6)

    def test_a_short_video_still_fills_the_clip(self, sampler: SOSampler, videos: list[Path]) -> None:
        asked = Recording()
        found = Pipeline(sampler, asked, num_candidates=10, num_frames=6)(videos[4])
        assert asked.frames[0].shape[1] == 6
        assert set(found.selection.frame_indices) == {0, 1, 2, 3}

    def test_pixels_are_kept_only_if_asked_for(self, clip: Path) -> None:
        assert Pipeline("uniform", Recording())(clip).selection.frames is None
        assert Pipeline("uniform", Recording(), keep_frames=True)(clip).selection.frames.shape == (6, 128, 192, 3)

    def test_plain_values(self, sampler: SOSampler, classifier: so.Classifier, clip: Path) -> None:
        found = Pipeline(sampler, classifier, top=2)(clip)
        told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert told["label"] == found.label == told["top"][0]["label"]
        assert len(told["top"]) == 2
        assert told["selection"]["frame_indices"] == found.selection.frame_indices.tolist()
        assert repr(found).startswith(f"Prediction({str(clip)!r}, {found.label!r}, probability=0.")
        assert found.timing["total"] == pytest.approx(found.timing["select"] + found.timing["classify"])
        assert len(Pipeline("uniform", classifier, top=99)(clip).top) == len(CLASSES)

    def test_a_multi_label_classifier(self, clip: Path) -> None:
        torch.manual_seed(2)
        module = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 3))
        wrapped = so.wrap_classifier(
            module, input_size=32, layout="BCHW", multi_label=True, class_names=["a", "b", "c"]
        )
        found = Pipeline("uniform", wrapped, num_frames=3)(clip)
        frames = so.select(clip, 3, num_candidates=10, policy="uniform").to_torch()
        np.testing.assert_allclose(found.probabilities, wrapped.clip_probs(frames[None])[0], atol=1e-6)
        assert len(found.top) == 3


class TestManyVideos:
    @pytest.mark.parametrize("batch_size", [1, 2, 8])
    def test_as_one_by_one(
        self, sampler: SOSampler, classifier: so.Classifier, videos: list[Path], batch_size: int
    ) -> None:
        pipe = Pipeline(sampler, classifier, num_candidates=8, num_frames=3, batch_size=batch_size)
        together = pipe(videos)
        assert [found.video for found in together] == [str(video) for video in videos]
        for video, found in zip(videos, together, strict=True):
            same(found, pipe(video))
        assert len({round(found.probability, 4) for found in together}) == len(videos)

    def test_equally_large_frames_share_a_call(self, videos: list[Path]) -> None:
        asked = Recording()
        pipe = Pipeline("uniform", asked, num_candidates=3, num_frames=3, batch_size=4)
        assert len(pipe(videos)) == 5
        assert [list(frames.shape) for frames in asked.frames] == [
            [3, 3, 3, 128, 192],  # 0, 1 and 3 of the first four
            [1, 3, 3, 160, 128],
            [1, 3, 3, 128, 192],
        ]
        # Each row of a call is the clip of its own video, at its own places.
        places = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (0, 2), 4: (2, 0)}
        for number, (call, row) in places.items():
            alone = Recording()
            Pipeline("uniform", alone, num_candidates=3, num_frames=3)(videos[number])
            torch.testing.assert_close(asked.frames[call][row], alone.frames[0][0])
            np.testing.assert_array_equal(asked.positions[call][row], alone.positions[0][0])

    def test_a_tuple_and_nothing(self, videos: list[Path]) -> None:
        pipe = Pipeline("uniform", Recording())
        assert [found.video for found in pipe(tuple(videos[:2]))] == [str(video) for video in videos[:2]]
        assert pipe([]) == []
        assert len(pipe(videos[:1])) == 1

    def test_bad_ones_take_their_own_place_only(self, videos: list[Path], broken: Path, tmp_path: Path) -> None:
        pipe = Pipeline("uniform", Recording(), batch_size=2)
        results = pipe([videos[0], broken, tmp_path / "none.mp4", videos[1]])
        assert [type(result).__name__ for result in results] == ["Prediction", "VideoError", "VideoError", "Prediction"]
        assert str(broken) in str(results[1])
        assert "no such file" in str(results[2])
        same(results[3], pipe(videos[1]))
        with pytest.raises(VideoError, match=r"broken\.mp4"):
            pipe([videos[0], broken, videos[1]], on_error="raise")

    def test_one_bad_video(self, broken: Path) -> None:
        pipe = Pipeline("uniform", Recording())
        with pytest.raises(VideoError, match=r"broken\.mp4"):
            pipe(broken)
        assert isinstance(pipe(broken, on_error="return"), VideoError)
        with pytest.raises(InvalidArgument, match="on_error='skip' is unknown; choose one of: raise, return"):
            pipe(broken, on_error="skip")
        with pytest.raises(InvalidArgument, match="on_error='skip' is unknown"):
            pipe([broken], on_error="skip")

    def test_an_argument_at_fault_for_one_video(self, videos: list[Path]) -> None:
        results = Pipeline("uniform", Recording(), start=1.7)([videos[0], videos[1]])
        assert isinstance(results[0], Prediction)
        assert isinstance(results[1], InvalidArgument)
        assert str(videos[1]) in str(results[1])

    def test_a_folder_without_rights(self, videos: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("sosampler.inference.select.open_video", refuse)
        (result,) = Pipeline("uniform", Recording())(videos[:1])
        assert isinstance(result, VideoError)
        assert "cannot be read (Permission denied)" in str(result)

    def test_a_stream_looks_only_a_little_ahead(self, videos: list[Path]) -> None:
        taken = 0

        def endless() -> Iterator[Path]:
            nonlocal taken
            while True:
                taken += 1
                yield videos[taken % 2]

        stream = Pipeline("uniform", Recording(), num_frames=2, batch_size=2, workers=2).stream(endless())
        found = [next(stream) for _ in range(3)]
        assert [result.video for result in found] == [str(videos[number]) for number in (1, 0, 1)]
        assert taken < 15
        stream.close()  # type: ignore[attr-defined]


class TestWhatItIsMadeOf:
    def test_folders_and_names(self, sampler: SOSampler, classifier: so.Classifier, tmp_path: Path, clip: Path) -> None:
        sampler.save_pretrained(tmp_path / "sampler")
        so.save_classifier(classifier, tmp_path / "classifier")
        pipe = Pipeline(str(tmp_path / "sampler"), tmp_path / "classifier", device="cpu", num_frames=4)
        same(pipe(clip), Pipeline(sampler, classifier, num_frames=4)(clip))
        assert repr(pipe).endswith("4 of 10 exact candidates, short side 256)")

    def test_numbers_by_default(self, classifier: so.Classifier) -> None:
        assert (Pipeline("uniform", classifier).num_frames, Pipeline("uniform", classifier).num_candidates) == (6, 10)
        assert Pipeline("uniform", classifier, num_candidates=4).num_frames == 4
        assert Pipeline("all", classifier).num_frames == 10

    def test_keyframes(self, clip: Path) -> None:
        found = Pipeline("uniform", Recording(), num_candidates=3, num_frames=3, candidates="keyframe")(clip)
        assert found.selection.frame_indices.tolist() == [0, 30, 60]

    def test_an_untrained_network_by_name_is_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="has a random last layer, so its answers mean nothing; give its"):
            Pipeline("uniform", "timm:resnet10t")

    def test_precision_and_device(self, clip: Path) -> None:
        torch.manual_seed(3)
        made = so.create_classifier("timm:resnet10t", num_classes=3, input_size=32)
        exact = Pipeline("uniform", made, device="cpu")(clip).probabilities
        half = Pipeline("uniform", made, precision="float16")
        assert made.precision == "float16"
        np.testing.assert_allclose(half(clip).probabilities, exact, atol=2e-2)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"num_frames": 11}, "num_frames=11 is more than num_candidates=10"),
            ({"num_candidates": 0}, "num_candidates=0 must be"),
            ({"batch_size": 0}, "batch_size=0 must be"),
            ({"top": 0}, "top=0 must be"),
            ({"workers": -1}, "workers=-1 must be an int of at least 0"),
            ({"size": 0}, "size=0 must be"),
            ({"keep_frames": "no"}, "keep_frames='no' must be"),
            ({"candidates": "some"}, "candidates='some' is unknown"),
            ({"precision": "int4"}, "precision='int4' is unknown"),
            ({"device": "nowhere"}, "device='nowhere' cannot be used here"),
            ({"grid": "round"}, "grid='round' is unknown"),
            ({"fps": 3.0}, "a pipeline has no option 'fps'; besides its own it takes: grid, start, end"),
            ({"colour": "red"}, "a pipeline has no option 'colour'"),
            ({"sampler": "best"}, "policy='best' is unknown"),
            ({"classifier": 3}, "a int has no clip_probs; give a classifier of so.create_classifier"),
            ({"classifier": "nonet"}, "classifier 'nonet' is unknown"),
        ],
    )
    def test_wrong_ones_are_refused_before_the_first_video(
        self, given: dict[str, Any], said: str, classifier: so.Classifier
    ) -> None:
        arguments = {"sampler": "uniform", "classifier": classifier, **given}
        with pytest.raises(InvalidArgument, match=said):
            Pipeline(arguments.pop("sampler"), arguments.pop("classifier"), **arguments)

    def test_more_frames_than_the_network_takes(self) -> None:
        module = nn.Sequential(nn.Flatten(), nn.Linear(4 * 3 * 32 * 32, 2))
        wrapped = so.wrap_classifier(module, input_size=32, num_frames=4)
        assert Pipeline("uniform", wrapped, num_frames=3).num_frames == 3
        with pytest.raises(InvalidArgument, match="takes at most 4 frames per clip but 6 were given"):
            Pipeline("uniform", wrapped)
