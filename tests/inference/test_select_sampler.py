"""A learned sampler as a policy of `select`, from Python and from the command line."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import sosampler as so
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.cli.main import main
from sosampler.errors import InvalidArgument, SosamplerError, WeightsError
from sosampler.inference.options import SelectOptions
from sosampler.policies.base import Batch, Policy, top
from sosampler.policies.learned import policy_of
from sosampler.policies.registry import get_policy, with_method
from sosampler.policies.score_rules import METHODS
from sosampler.samplers.sosampler import SOSampler
from sosampler.video.synthetic import numbered_video, read_number
from tests.clips import BY_NAME


def make_sampler(seed: int = 0, input_size: int = 64) -> SOSampler:
    torch.manual_seed(seed)
    return SOSampler(backbone="timm:resnet10t", input_size=input_size).freeze()


@pytest.fixture(scope="module")
def sampler() -> SOSampler:
    return make_sampler()


@pytest.fixture(scope="module")
def folder(sampler: SOSampler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "first"
    sampler.save_pretrained(path)
    return path


def numbers(selection: so.Selection) -> list[int]:
    assert selection.frames is not None
    return [read_number(frame) for frame in selection.frames]


class Brightness:
    """Stands in for a sampler: a frame's score is how bright it is, and it knows how often it was asked at a time."""

    preprocessing = Preprocessing(size=(32, 32), resize=32)

    def __init__(self) -> None:
        self.shapes: list[list[int]] = []
        self.at_once = self.most_at_once = 0
        self._guard = threading.Lock()

    def fingerprint(self) -> str:
        return "bright"

    def score(self, frames: torch.Tensor) -> torch.Tensor:
        with self._guard:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(0.01)
        self.shapes.append(list(frames.shape))
        with self._guard:
            self.at_once -= 1
        return frames.float().mean((2, 3, 4))


class TestChoice:
    def test_the_best_by_the_samplers_own_scores(self, sampler: SOSampler, clip: Path) -> None:
        sel = so.select(clip, 4, num_candidates=12, policy=sampler)
        offered = so.select(clip, policy="all", num_candidates=12)
        assert sel.candidates.frame_indices.tolist() == offered.frame_indices.tolist()
        scores = sampler.score(offered.to_torch()[None])[0].numpy()
        assert sel.candidates.scores is not None
        np.testing.assert_allclose(sel.candidates.scores, scores, rtol=1e-5, atol=1e-6)
        best = sorted(sorted(range(12), key=lambda place: -scores[place])[:4])
        assert sel.frame_indices.tolist() == offered.frame_indices[best].tolist() == numbers(sel)
        assert sel.scores is not None
        np.testing.assert_array_equal(sel.scores, sel.candidates.scores[best])
        assert (
            sel.frame_indices.tolist() == offered.frame_indices[sampler.choose(offered.to_torch()[None], 4)[0]].tolist()
        )
        assert best != [1, 4, 7, 10], "a choice that uniform would make proves nothing"
        assert sel.policy == "sosampler"
        json.dumps(sel.to_dict(), allow_nan=False)

    def test_offers_as_many_as_other_pools(self, sampler: SOSampler, clip: Path) -> None:
        assert so.select(clip, 4, policy=sampler).num_candidates == 32
        assert so.select(clip, 10, policy=sampler).num_candidates == 40

    def test_without_pixels_the_same(self, sampler: SOSampler, clip: Path) -> None:
        seen, unseen = (so.select(clip, 3, policy=sampler, num_candidates=9, decode=flag) for flag in (True, False))
        assert unseen.frames is None
        assert unseen.frame_indices.tolist() == seen.frame_indices.tolist()

    @pytest.mark.parametrize("size", [48, (40, 90), (90, 40)])
    def test_small_or_squeezed_frames_are_not_what_it_looks_at(
        self, sampler: SOSampler, clip: Path, size: int | tuple[int, int]
    ) -> None:
        as_stored = so.select(clip, 4, num_candidates=12, policy=sampler)
        sel = so.select(clip, 4, num_candidates=12, policy=sampler, size=size)
        np.testing.assert_array_equal(sel.candidates.scores, as_stored.candidates.scores)
        plain = so.select(clip, policy="all", num_candidates=12, size=size)
        assert plain.frames is not None
        place = [plain.frame_indices.tolist().index(index) for index in sel.frame_indices]
        np.testing.assert_array_equal(sel.frames, plain.frames[place])

    def test_it_sees_the_same_for_every_size(self, clip: Path) -> None:
        for size in (None, 64, 16, (40, 90)):
            bright = Brightness()
            so.select(clip, 2, num_candidates=5, policy=bright, size=size)
            assert bright.shapes == [[1, 5, 3, 128, 192]]  # not enlarged
        large = Brightness()
        so.select(numbered_video(num_frames=10, width=640, height=480), 2, num_candidates=5, policy=large)
        assert large.shapes == [[1, 5, 3, 256, 341]]

    def test_too_much_memory_is_avoided_by_a_second_pass(
        self, sampler: SOSampler, clip: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        once = so.select(clip, 4, policy=sampler)
        monkeypatch.setattr("sosampler.inference.select.MAX_KEPT_BYTES", 1000)
        twice = so.select(clip, 4, policy=sampler)
        assert numbers(twice) == twice.frame_indices.tolist() == once.frame_indices.tolist()

    @pytest.mark.parametrize("mode", ["keyframe", "snap"])
    def test_other_candidates(self, sampler: SOSampler, mode: str) -> None:
        sel = so.select(numbered_video(num_frames=120, gop=12), 3, num_candidates=8, policy=sampler, candidates=mode)
        assert numbers(sel) == sel.frame_indices.tolist()
        assert len(set(sel.frame_indices)) == 3

    def test_a_short_video_shows_each_frame_once(self) -> None:
        bright = Brightness()
        sel = so.select(BY_NAME["two_frames"].data, 6, num_candidates=12, policy=bright)
        assert bright.shapes[0][1] == 2
        assert len(sel) == 6
        assert sel.candidates.scores is not None
        assert len(sel.candidates.scores) == 12

    def test_of_equal_scores_the_earlier(self, clip: Path) -> None:
        class Same(Brightness):
            def score(self, frames: torch.Tensor) -> torch.Tensor:
                return torch.zeros(frames.shape[:2])

        sel = so.select(clip, 3, num_candidates=9, policy=Same())
        assert sel.frame_indices.tolist() == sel.candidates.frame_indices[:3].tolist()

    def test_scores_that_are_no_numbers_are_refused(self, clip: Path) -> None:
        class Broken(Brightness):
            def score(self, frames: torch.Tensor) -> torch.Tensor:
                return torch.full(frames.shape[:2], float("nan"))

        with pytest.raises(SosamplerError, match="not finite; train it again"):
            so.select(clip, 3, policy=Broken())

    def test_one_video_at_a_time_goes_through_a_sampler(self, clip: Path) -> None:
        bright = Brightness()
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda _: so.select(clip, 2, num_candidates=4, policy=bright, size=32), range(12)))
        assert len(bright.shapes) == 12
        assert bright.most_at_once == 1


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded stays beside the samplers of these tests; other devices round differently."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_gpu")
class TestFolders:
    def test_a_folder_is_its_sampler(self, sampler: SOSampler, folder: Path, clip: Path) -> None:
        one = so.select(clip, 4, num_candidates=12, policy=sampler)
        for given in (folder, str(folder)):
            other = so.select(clip, 4, num_candidates=12, policy=given)
            assert other.frame_indices.tolist() == one.frame_indices.tolist()
            np.testing.assert_array_equal(other.candidates.scores, one.candidates.scores)
            assert other.policy == str(folder)

    def test_read_once_and_again_when_it_changes(
        self, tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import sosampler.policies.learned as learned

        loads = []
        load = learned.load_sampler
        monkeypatch.setattr(learned, "load_sampler", lambda path: loads.append(path) or load(path))
        path = tmp_path / "run"
        make_sampler(1).save_pretrained(path)
        first = [so.select(clip, 4, policy=path).candidates.scores for _ in range(2)]
        np.testing.assert_array_equal(*first)
        assert len(loads) == 1
        make_sampler(2).save_pretrained(path)
        again = so.select(clip, 4, policy=path).candidates.scores
        assert len(loads) == 2
        assert np.abs(again - first[0]).max() > 1e-4

    def test_a_rule_is_not_shadowed_by_a_folder_of_its_name(
        self, sampler: SOSampler, tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        sampler.save_pretrained("uniform")
        assert so.select(clip, 3, policy="uniform").frame_indices.tolist() == [15, 45, 75]
        assert so.select(clip, 3, policy=Path("uniform"), num_candidates=9).candidates.scores is not None

    def test_wrong_ones_are_named(self, tmp_path: Path, clip: Path, folder: Path) -> None:
        with pytest.raises(InvalidArgument, match=r"without config\.json, so it holds no sampler; give the folder"):
            so.select(clip, policy=tmp_path)
        with pytest.raises(InvalidArgument, match=r"policy='runs/nope' is unknown; .*or give the folder of a trained"):
            so.select(clip, policy="runs/nope")
        with pytest.raises(InvalidArgument, match="policy is a int; give one of: uniform"):
            so.select(clip, policy=3)
        so.save_classifier(so.create_classifier("timm:resnet10t", num_classes=2), tmp_path / "classifier")
        with pytest.raises(WeightsError, match="holds a sosampler classifier instead of a sampler"):
            so.select(clip, policy=tmp_path / "classifier")
        half = tmp_path / "half"
        half.mkdir()
        (half / "config.json").write_bytes((folder / "config.json").read_bytes())
        with pytest.raises(WeightsError, match=r"model\.safetensors"):
            so.select(clip, policy=half)
        (half / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
        with pytest.raises(WeightsError, match=r"model\.safetensors"):
            so.select(clip, policy=half)


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a calibrated sampler whose scores differ much; by confidence its frames rank in another shape."""
    made = make_sampler(3)
    with torch.no_grad():
        made.importance_head.weight.mul_(400)
    made.calibration = (2.0, -1.0)
    path = tmp_path_factory.mktemp("runs") / "sure"
    made.save_pretrained(path)
    return path


@pytest.mark.usefixtures("without_gpu")
class TestMethods:
    """Ways to choose from a sampler's scores other than the N best."""

    @pytest.mark.parametrize("method", METHODS)
    def test_against_the_rule_itself(self, method: str, folder: Path, clip: Path) -> None:
        plain = so.select(clip, 5, num_candidates=20, policy=folder)
        sel = so.select(clip, 5, num_candidates=20, policy=f"{folder}+{method}")
        scores = plain.candidates.scores
        np.testing.assert_array_equal(sel.candidates.scores, scores)
        assert scores is not None
        places = METHODS[method](scores.astype(np.float64), 5)
        assert sel.frame_indices.tolist() == sel.candidates.frame_indices[places].tolist() == numbers(sel)
        np.testing.assert_array_equal(sel.scores, scores[places])
        assert sel.frame_indices.tolist() != plain.frame_indices.tolist()
        assert sel.policy == f"{folder}+{method}"

    @pytest.mark.parametrize("method", METHODS)
    def test_a_calibrated_sampler_is_weighed_by_its_confidences(self, method: str, sure: Path, clip: Path) -> None:
        sel = so.select(clip, 5, num_candidates=20, policy=f"{sure}+{method}")
        scores = sel.candidates.scores
        assert scores is not None
        confidences = 1 / (1 + np.exp(1 - 2 * scores.astype(np.float64)))
        assert sel.frame_indices.tolist() == sel.candidates.frame_indices[METHODS[method](confidences, 5)].tolist()
        if method == "its":  # the one that heeds more than the order
            assert METHODS[method](scores, 5).tolist() != METHODS[method](confidences, 5).tolist()

    def test_a_sampler_as_it_is(self, sampler: SOSampler, folder: Path, clip: Path) -> None:
        policy = with_method(policy_of(sampler), "nms")
        assert policy.name == "sosampler+nms"
        by_text = so.select(clip, 5, num_candidates=20, policy=f"{folder}+nms")
        assert so.select(clip, 5, num_candidates=20, policy=policy).frame_indices.tolist() == (
            by_text.frame_indices.tolist()
        )
        with pytest.raises(InvalidArgument, match=r"method='best' is unknown; choose one of: aks, its, nms, mmr, dpp"):
            with_method(policy_of(sampler), "best")

    @pytest.mark.parametrize("method", METHODS)
    def test_short_videos(self, method: str, folder: Path) -> None:
        sel = so.select(BY_NAME["two_frames"].data, 6, num_candidates=12, policy=f"{folder}+{method}")
        assert len(sel) == 6
        assert set(sel.frame_indices.tolist()) == {0, 1}
        one = so.select(BY_NAME["two_frames"].data, 1, num_candidates=12, policy=f"{folder}+{method}")
        assert len(one) == 1

    def test_caches_and_journals_tell_them_apart(self, folder: Path, sampler: SOSampler) -> None:
        told = {
            method: SelectOptions(policy=f"{folder}+{method}" if method else str(folder)).identity()
            for method in ("", *METHODS)
        }
        assert {method: facts["policy_identity"] for method, facts in told.items()} == {
            "": sampler.fingerprint(),
            **{method: f"{sampler.fingerprint()}+{method}" for method in METHODS},
        }
        assert len({facts["policy"] for facts in told.values()}) == 4

    def test_a_folder_of_such_a_name_is_taken_as_it_is(self, sampler: SOSampler, tmp_path: Path, clip: Path) -> None:
        make_sampler(5).save_pretrained(tmp_path / "run")
        sampler.save_pretrained(tmp_path / "run+nms")
        sel = so.select(clip, 5, num_candidates=20, policy=tmp_path / "run+nms")
        assert sel.candidates.scores is not None
        np.testing.assert_array_equal(
            sel.candidates.scores, so.select(clip, 5, num_candidates=20, policy=sampler).candidates.scores
        )
        places = top(sel.candidates.scores, 5)
        assert sel.frame_indices.tolist() == sel.candidates.frame_indices[places].tolist()

    def test_wrong_ones_are_named(self, folder: Path, tmp_path: Path, clip: Path) -> None:
        with pytest.raises(
            InvalidArgument,
            match=r"first\+best' is unknown; .*\+aks, \+its, \+nms, \+mmr, \+dpp, \+facility go behind such",
        ):
            so.select(clip, policy=f"{folder}+best")
        with pytest.raises(InvalidArgument, match=r"nope\+nms' is unknown; "):
            so.select(clip, policy=f"{tmp_path / 'nope'}+nms")
        with pytest.raises(InvalidArgument, match=r"' is a folder without config\.json"):
            so.select(clip, policy=f"{tmp_path}+nms")

    def test_pipelines(self, folder: Path, clip: Path) -> None:
        classifier = so.create_classifier("timm:test_resnet", num_classes=2, device="cpu")
        for policy in (f"{folder}+its", "frame-difference+nms", "dpp"):
            pipeline = so.Pipeline(policy, classifier, num_candidates=10, num_frames=3, device="cpu", size=96)
            selection = pipeline(clip).selection
            assert (pipeline.policy.name, selection.policy) == (policy, policy)
            expected = so.select(clip, 3, num_candidates=10, policy=policy, size=96)
            assert selection.frame_indices.tolist() == expected.frame_indices.tolist()


class TestPolicies:
    def test_given_as_it_is(self, clip: Path) -> None:
        rule = get_policy("centre")
        assert get_policy(rule) is rule
        sel = so.select(clip, 2, policy=Last())
        assert sel.policy == "last"
        assert sel.frame_indices.tolist() == sel.candidates.frame_indices[-2:].tolist()
        assert sel.num_candidates == 20

    def test_device(self, sampler: SOSampler) -> None:
        assert get_policy(sampler, device="cpu").name == "sosampler"
        with pytest.raises(InvalidArgument, match="device='nowhere' cannot be used here"):
            get_policy(sampler, device="nowhere")

    def test_options_stay_plain(self, sampler: SOSampler, folder: Path) -> None:
        told = SelectOptions(policy=sampler, limits=so.Limits(max_frames=9)).to_dict()
        assert told["policy"] == "sosampler"
        assert json.loads(json.dumps(told))["limits"]["max_frames"] == 9
        assert SelectOptions(policy=str(folder)).to_dict()["policy"] == str(folder)

    def test_options_travel_to_other_processes(self, folder: Path) -> None:
        for policy in ("uniform", str(folder), f"{folder}+nms", "frame-difference+its"):
            options = SelectOptions(policy=policy, num_frames=3)
            copy = pickle.loads(pickle.dumps(options))
            assert copy == options
            assert copy.resolved_policy.name == options.resolved_policy.name

    def test_import_needs_no_torch(self) -> None:
        code = "import sys, sosampler.policies, sosampler.inference.select; assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Last(Policy):
    name = "last"

    def default_candidates(self, num_frames: int) -> int:
        return 10 * num_frames

    def choose(self, batch: Batch, num_frames: int) -> np.ndarray:
        return batch.counts[:, None] - num_frames + np.arange(num_frames)


@pytest.mark.usefixtures("without_gpu")
class TestCommand:
    @pytest.fixture
    def cli(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[int, str]]:
        def run(*args: object) -> tuple[int, str]:
            monkeypatch.setattr(sys, "argv", ["sosampler", "select", *map(str, args)])
            capsys.readouterr()
            with pytest.raises(SystemExit) as stopped:
                main()
            captured = capsys.readouterr()
            code = int(stopped.value.code or 0)
            return code, captured.out if code < 2 else captured.err

        return run

    def test_many_videos_side_by_side(
        self, cli: Callable[..., tuple[int, str]], folder: Path, tmp_path: Path, sampler: SOSampler
    ) -> None:
        videos = [tmp_path / f"{count}.mp4" for count in (20, 30, 40, 50)]
        for video in videos:
            numbered_video(video, num_frames=int(video.stem))
        code, out = cli(*videos, "-n", 3, "-t", 8, "--policy", folder, "--workers", 4, "--json")
        assert code == 0
        for row, video in zip(json.loads(out)["selections"], videos, strict=True):
            one = so.select(video, 3, num_candidates=8, policy=sampler)
            assert row["frame_indices"] == one.frame_indices.tolist()
            np.testing.assert_allclose(row["candidates"]["scores"], one.candidates.scores, atol=1e-5)
            assert row["policy"] == str(folder)

    def test_device(
        self, cli: Callable[..., tuple[int, str]], folder: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from sosampler.policies import learned as module

        asked: list[str] = []
        load = module._load_torch
        monkeypatch.setattr(
            module,
            "_load_torch",
            lambda path, stamp, device, precision: asked.append(str(device)) or load(path, stamp, device, precision),
        )
        plain = cli(clip, "-n", 3, "-t", 8, "--policy", folder, "--json")
        placed = cli(clip, "-n", 3, "-t", 8, "--policy", folder, "--json", "--device", "cpu:0")
        assert asked == ["cpu", "cpu:0"]
        assert placed[0] == plain[0] == 0
        rows = [json.loads(text) for _, text in (plain, placed)]
        assert [row["frame_indices"] for row in rows] == [rows[0]["frame_indices"]] * 2
        assert [row["policy"] for row in rows] == [str(folder)] * 2
        code, err = cli(clip, "--policy", folder, "--device", "nowhere")
        assert (code, "device='nowhere' cannot be used here" in err) == (2, True)
        code, err = cli(clip, "--policy", "uniform", "--device", "cpu")
        assert code == 2
        assert "--device cpu is for trained samplers, not for the policy 'uniform'; leave it out" in err

    def test_methods(self, cli: Callable[..., tuple[int, str]], folder: Path, clip: Path) -> None:
        for policy in (f"{folder}+nms", "frame-difference+aks", "difference-peaks", "farthest-first", "dpp"):
            code, out = cli(clip, "-n", 3, "-t", 12, "--policy", policy, "--json")
            assert code == 0
            row = json.loads(out)
            one = so.select(clip, 3, num_candidates=12, policy=policy)
            assert (row["policy"], row["frame_indices"]) == (policy, one.frame_indices.tolist())
        code, out = cli(clip, "-n", 3, "-t", 12, "--policy", f"{folder}+nms", "--device", "cpu", "--json")
        assert (code, json.loads(out)["policy"]) == (0, f"{folder}+nms")
        code, err = cli(clip, "--policy", "frame-difference+nms", "--device", "cpu")
        assert code == 2
        assert "is for trained samplers, not for the policy 'frame-difference+nms'" in err

    def test_an_unknown_folder_ends_with_a_sentence(
        self, cli: Callable[..., tuple[int, str]], clip: Path, tmp_path: Path
    ) -> None:
        code, err = cli(clip, "--policy", tmp_path / "nope")
        assert code == 2
        assert "is unknown; choose one of: uniform" in err
        assert "Traceback" not in err

    def test_other_weights_do_not_continue_a_journal(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        make_sampler(1).save_pretrained(path)
        before = SelectOptions(policy=str(path)).identity()
        assert before == SelectOptions(policy=str(path)).identity()
        make_sampler(2).save_pretrained(path)
        after = SelectOptions(policy=str(path)).identity()
        assert json.dumps(before) != json.dumps(after)
        assert "policy_identity" not in SelectOptions(policy="uniform").identity()
