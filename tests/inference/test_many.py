"""`Pipeline.stream` over many videos: decoded in processes, looked at in batches, answered as if one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

import sosampler as so
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.inference import decode as decode_stream
from sosampler.inference.pipeline import Pipeline, Prediction
from sosampler.policies.base import Batch, Policy
from sosampler.policies.registry import get_policy
from sosampler.samplers.sosampler import SOSampler
from sosampler.video.synthetic import numbered_video, read_number


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Upright and wide ones, a short one, and one that is none."""
    folder = tmp_path_factory.mktemp("videos")
    sizes = [(40, 96, 64), (25, 96, 64), (30, 64, 96), (5, 96, 64)]
    for number, (frames, width, height) in enumerate(sizes):
        numbered_video(folder / f"{number}.mp4", num_frames=frames, width=width, height=height)
    (folder / "broken.mp4").write_bytes(b"this is not a video" * 50)
    return [*(folder / f"{number}.mp4" for number in range(len(sizes))), folder / "broken.mp4"]


@pytest.fixture(scope="module")
def sampler() -> SOSampler:
    torch.manual_seed(0)
    made = SOSampler(backbone="timm:test_resnet", input_size=32).freeze()
    made.calibration = (1.0, 0.0)
    return made


@pytest.fixture(scope="module")
def classifier() -> so.Classifier:
    torch.manual_seed(1)
    made = so.create_classifier("timm:test_resnet", num_classes=4, input_size=48)
    with torch.no_grad():
        made.net.get_classifier().weight.mul_(40)
    return made


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_stream, "PROCESSES_FROM", 1)


class Brightness:
    """Says how bright each clip is, and remembers how many it was asked about at once."""

    name = "brightness"
    class_names = ("dark", "bright")
    preprocessing = Preprocessing(size=(32, 32), resize=32)

    def __init__(self) -> None:
        self.asked: list[int] = []

    def clip_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        self.asked.append(len(frames))
        bright = frames.float().mean((1, 2, 3, 4)) / 255
        return torch.stack([1 - bright, bright], dim=1)

    def frame_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def gmacs(self, num_frames: int) -> float:
        return 0.0


def as_select_says(found: Prediction, video: Path, policy: Any, classifier: so.Classifier, **options: Any) -> None:
    sel = so.select(video, policy=policy, **options)
    assert found.video == str(video)
    assert found.selection.policy == sel.policy
    assert found.selection.frame_indices.tolist() == sel.frame_indices.tolist()
    assert found.selection.candidates.frame_indices.tolist() == sel.candidates.frame_indices.tolist()
    np.testing.assert_array_equal(found.selection.pts_seconds, sel.pts_seconds)
    np.testing.assert_array_equal(found.selection.frames, sel.frames)
    assert found.selection.metadata == sel.metadata
    assert found.selection.notes == sel.notes
    assert (found.selection.scores is None) == (sel.scores is None)
    if sel.scores is not None:
        for one, other in ((found.selection, sel), (found.selection.candidates, sel.candidates)):
            np.testing.assert_allclose(one.scores, other.scores, rtol=1e-3, atol=1e-4)
    expected = classifier.clip_probs(sel.to_torch()[None])[0].numpy()
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-3)


class Last(Policy):
    """Chooses the last ones; no other process knows it."""

    name = "last"

    def choose(self, batch: Batch, num_frames: int) -> Any:
        return batch.counts[:, None] - num_frames + np.arange(num_frames)


@pytest.mark.usefixtures("in_processes")
@pytest.mark.parametrize("who", ["sampler", "sampler+nms", "uniform", "frame-difference", "random", "own"])
def test_as_select_and_the_classifier_say(
    who: str, videos: list[Path], sampler: SOSampler, classifier: so.Classifier, tmp_path: Path
) -> None:
    sampler.save_pretrained(tmp_path / "s")
    policy: Any = {"sampler": sampler, "sampler+nms": f"{tmp_path / 's'}+nms", "own": Last()}.get(who, who)
    pipe = Pipeline(policy, classifier, num_candidates=7, num_frames=3, batch_size=3, workers=2, keep_frames=True)
    asked = [*videos, *reversed(videos)]
    results = list(pipe.stream(asked))
    assert len(results) == len(asked)
    for video, found in zip(asked, results, strict=True):
        if video.stem == "broken":
            assert isinstance(found, VideoError)
            assert str(video) in str(found)
        else:
            assert isinstance(found, Prediction)
            assert [read_number(frame) for frame in found.selection.frames] == found.selection.frame_indices.tolist()
            as_select_says(found, video, policy, classifier, num_frames=3, num_candidates=7)


@pytest.mark.usefixtures("in_processes")
@pytest.mark.parametrize("on_short", ["repeat", "fewer", "error"])
def test_videos_shorter_than_what_is_asked_for(
    on_short: str, videos: list[Path], sampler: SOSampler, classifier: so.Classifier
) -> None:
    options: dict[str, Any] = {"num_frames": 6, "num_candidates": 9, "on_short": on_short}
    pipe = Pipeline(sampler, classifier, workers=1, keep_frames=True, **options)
    short, long = pipe([videos[3], videos[0]])
    as_select_says(long, videos[0], sampler, classifier, **options)
    if on_short == "error":
        assert isinstance(short, InvalidArgument)
        assert f"{videos[3]}: 9 candidates were requested but only 5 frames are there" in str(short)
    else:
        as_select_says(short, videos[3], sampler, classifier, **options)
        assert len(short.selection) == (6 if on_short == "repeat" else 5)


def test_too_few_keyframes_for_an_error(videos: list[Path], sampler: SOSampler, classifier: so.Classifier) -> None:
    """Candidates repeat frames only where that is allowed, but N may still be more than there are."""
    pipe = Pipeline(sampler, classifier, num_candidates=2, num_frames=2, candidates="keyframe", on_short="error")
    found = pipe(videos[0])
    assert found.selection.frame_indices.tolist() == [0, 30]
    with pytest.raises(InvalidArgument, match=r"2\.mp4.*2 candidates were requested but only 1 keyframes are there"):
        pipe(videos[2])


@pytest.mark.usefixtures("in_processes")
def test_frames_too_small_for_the_sampler(videos: list[Path], sampler: SOSampler, classifier: so.Classifier) -> None:
    options: dict[str, Any] = {"num_frames": 2, "num_candidates": 5, "size": 24}
    (found,) = Pipeline(sampler, classifier, workers=1, keep_frames=True, **options)([videos[0]])
    assert found.selection.frames.shape == (2, 24, 36, 3)
    as_select_says(found, videos[0], sampler, classifier, **options)


@pytest.mark.usefixtures("in_processes")
@pytest.mark.parametrize("policy", ["sampler", "uniform"])
def test_videos_share_calls(videos: list[Path], sampler: SOSampler, policy: str) -> None:
    asked = Brightness()
    pipe = Pipeline(sampler if policy == "sampler" else policy, asked, num_frames=2, batch_size=8, workers=1)
    results = pipe([videos[0], videos[1], videos[2], videos[0], videos[4], videos[1], videos[2], videos[0], videos[1]])
    assert sum(isinstance(result, Prediction) for result in results) == 8
    assert sorted(asked.asked) == [1, 2, 5], "five wide and two upright ones of the first eight, then one"


def test_where_videos_are_decoded(videos: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few in threads, many in processes, with workers=0 always here."""

    def children_of(count: int, workers: int) -> int:
        results = Pipeline("uniform", Brightness(), num_frames=2, batch_size=2, workers=workers).stream(
            [videos[0]] * count
        )
        next(results)
        found = len(own_children() - before)
        results.close()  # type: ignore[attr-defined]
        assert own_children() == before
        return found

    before = own_children()
    many = decode_stream.PROCESSES_FROM
    assert children_of(many - 1, 2) == 0
    assert children_of(many, 2) == 2
    assert children_of(many, 0) == 0


def own_children() -> set[int]:
    """Process ids; other tests may have left servers of torch."""
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.usefixtures("in_processes")
def test_a_video_that_kills_its_decoder(
    videos: list[Path], sampler: SOSampler, classifier: so.Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_stream, "_SERVER", "tests.process_server:deadly_decoder")
    before = own_children()
    pipe = Pipeline(sampler, classifier, num_frames=2, workers=1, batch_size=2)
    results = pipe([videos[0], videos[2], videos[1], videos[2], videos[0]])
    assert [isinstance(result, Prediction) for result in results] == [True, False, True, False, True]
    assert f"{videos[2]}: the process that decoded it ended with signal SIGSEGV" in str(results[1])
    np.testing.assert_allclose(results[0].probabilities, results[4].probabilities, atol=1e-5)
    with pytest.raises(VideoError, match="ended with signal SIGSEGV"):
        list(pipe.stream([videos[0], videos[2], videos[1]], on_error="raise"))
    assert own_children() == before


def test_scores_that_are_no_numbers(videos: list[Path], classifier: so.Classifier) -> None:
    broken = SOSampler(backbone="timm:test_resnet", input_size=32).freeze()
    with torch.no_grad():
        broken.importance_head.bias.fill_(float("nan"))
    with pytest.raises(SosamplerError, match=r"no numbers|not finite|NaN"):
        Pipeline(broken, classifier)(videos[0])


@pytest.mark.parametrize("given", ["name", "policy", "named like a rule"])
def test_rules_travel_by_name(
    given: str, videos: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sampler: SOSampler
) -> None:
    """And a policy of one's own never does, whatever it is called."""
    monkeypatch.chdir(tmp_path)
    sampler.save_pretrained(tmp_path / "uniform")  # a folder of that name changes nothing
    policy: Any = {
        "name": "uniform",
        "policy": get_policy("uniform"),
        "named like a rule": Last().renamed("uniform"),
    }[given]
    pipe = Pipeline(policy, Brightness(), num_frames=2, num_candidates=4)
    assert pipe.tasks(1)(videos[0]).can_travel() == (given != "named like a rule")
    chosen = pipe(videos[0]).selection.frame_indices.tolist()
    assert chosen == ([25, 35] if given == "named like a rule" else [15, 35])


def test_networks_in_different_places_stay_there(videos: list[Path], sampler: SOSampler) -> None:
    elsewhere = Brightness()
    elsewhere.device = torch.device("meta")  # type: ignore[attr-defined]
    pipe = Pipeline(sampler, elsewhere, num_frames=2)
    pipe(videos[:1] * 6)
    assert pipe.batch_classifier.engine is None
    expected = so.select(videos[0], 2, num_candidates=10, policy=sampler)
    assert pipe(videos[0]).selection.frame_indices.tolist() == expected.frame_indices.tolist()


def test_speed_is_prepared_once_it_pays(videos: list[Path], sampler: SOSampler, classifier: so.Classifier) -> None:
    one_by_one = Pipeline(sampler, classifier, num_frames=3)
    first = one_by_one(videos[0])
    assert one_by_one.batch_classifier.engine is None
    for _ in range(4):
        again = one_by_one(videos[0])
    assert one_by_one.batch_classifier.engine.precision == "float32", "as at the beginning"
    together = Pipeline(sampler, classifier, num_frames=3, precision="float32")
    found = together(videos[:1] * 6)
    assert together.batch_classifier.engine is not None
    warm = Pipeline(sampler, classifier, num_frames=3, precision="float32").warm_up()
    assert warm.batch_classifier.engine is not None
    assert Pipeline("uniform", classifier).warm_up().batch_classifier.engine is None
    for other in (again, *found, warm(videos[0])):
        assert other.selection.frame_indices.tolist() == first.selection.frame_indices.tolist()
        np.testing.assert_allclose(other.probabilities, first.probabilities, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("in_processes")
@pytest.mark.parametrize("precision", ["float32", None])
def test_on_a_gpu(videos: list[Path], tmp_path: Path, precision: str | None) -> None:
    torch.manual_seed(4)
    SOSampler(backbone="timm:resnet10t", input_size=64).save_pretrained(tmp_path / "s")
    made = so.create_classifier("timm:resnet10t", num_classes=4, input_size=64)
    made.fresh_head = False
    so.save_classifier(made, tmp_path / "c")
    asked = videos[:3] * 6
    here = Pipeline(tmp_path / "s", made, device="cpu", num_frames=3, precision="float32")(asked)
    there = Pipeline(tmp_path / "s", tmp_path / "c", device="cuda", num_frames=3, precision=precision, workers=2)
    assert next(there.classifier.parameters()).is_cuda  # type: ignore[attr-defined]
    found = there(asked)
    if precision is not None:
        for one, other in zip(found, here, strict=True):
            assert one.selection.frame_indices.tolist() == other.selection.frame_indices.tolist()
            np.testing.assert_allclose(one.probabilities, other.probabilities, atol=5e-3)
    for first, again in zip(found[:3], found[3:6], strict=True):
        assert first.selection.frame_indices.tolist() == again.selection.frame_indices.tolist()
