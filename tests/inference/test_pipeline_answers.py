"""One answer for one video, whether the pipeline, evaluate or a worker of a cluster gives it."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.calibration import calibration_curve
from typer.testing import CliRunner

import sosampler as so
from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.classifiers.base import Penultimate
from sosampler.cli.main import app
from sosampler.engine.frame_engine import FrameEngine
from sosampler.errors import InvalidArgument
from sosampler.evaluation.evaluate import evaluate
from sosampler.evaluation.result import calibration_error
from sosampler.inference.pipeline import Pipeline
from sosampler.integrations.ray.rows import NetworkStep
from sosampler.policies.learned import LearnedPolicy
from sosampler.samplers.answer import combine, log_answers
from sosampler.samplers.sosampler import SOSampler

CLASSES = ("ant", "bee", "cat")
T = 6
BELIEF = {"belief": 2.0, "relevance": [4.0, 1.0], "importance": 0.2}
SETTINGS: dict[str, Any] = {
    "default": "fused",
    "weighted": {"power": 1.5, "scale": 0.8},
    "fused": {"power": 1.2, "strength": 1.1, "classifier": 0.6, "sampler": 0.5},
    "probed": {"power": 1.2, "strength": 1.1, "classifier": 0.6, "sampler": 0.5, "probe": 0.9, "relevance": 0.7},
    "sure": [[0.0, 0.95], [0.02, 0.6]],
    "sure_probed": [[0.0, 0.97], [0.02, 0.7]],
}
ANSWERS = ("mean", "weighted", "fused", "probed")


class World:
    """A sampler, a classifier, and videos that are in a bank and, the same pixels, in folders of images."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.sampler = SOSampler(
            backbone="timm:test_resnet.r160_in1k",
            input_size=32,
            num_classes=3,
            class_names=CLASSES,
            scoring=BELIEF,
            calibration=(0.9, 0.3),
        )
        self.classifier = so.create_classifier("timm:test_resnet", class_names=CLASSES, input_size=32)
        rng = np.random.default_rng(0)
        entries = []
        for number, count in enumerate((T, T, T, T, T, 4)):  # the last is short
            coarse = torch.from_numpy(rng.uniform(0, 255, (count, 3, 4, 4))).float()
            smooth = torch.nn.functional.interpolate(coarse, size=(40, 48), mode="bilinear").round().byte()
            frames = smooth.permute(0, 2, 3, 1).numpy()
            entries.append(FrameEntry(id=f"v{number}", labels=(number % 3,), frames=frames, split="test"))
        bank = write_frames(folder / "bank", entries, classes=CLASSES)
        with torch.no_grad():  # fresh layers are small, and all answers would be nearly the same
            self.classifier.net.get_classifier().weight.mul_(40)
            self.sampler.class_head.weight.mul_(60)
            self.sampler.importance_head.weight.mul_(60)
        self.classifier.fresh_head = False
        width = self.classifier.net.num_features
        self.probe = (
            torch.randn(4, width, generator=torch.Generator().manual_seed(3)),
            torch.tensor([0.2, 0, -0.2, 0.1]),
        )
        self.sampler.set_probe(*self.probe, self.classifier.fingerprint())
        self.sampler.answer = SETTINGS
        so.save_classifier(self.classifier, folder / "classifier")
        self.sampler.freeze().save_pretrained(folder / "sampler")
        self.bank = so.add_features(so.add_teacher(bank, self.classifier), self.classifier, precision="float32")
        self.folder, self.videos = folder, []
        for number in range(len(self.bank)):
            images = folder / "videos" / f"v{number}"
            images.mkdir(parents=True)
            for place, frame in enumerate(self.bank[number].frames()):
                Image.fromarray(frame).save(images / f"{place:03d}.png")
            self.videos.append(images)

    def pipeline(self, **options: Any) -> Pipeline:
        given = {"num_candidates": T, "num_frames": 2, "device": "cpu", "folder_fps": 1.0, "workers": 0}
        return Pipeline(str(self.folder / "sampler"), self.classifier, **given | options)

    def by_hand(self, video: int, answer: str, num_frames: int) -> tuple[list[int], np.ndarray]:
        """The chosen frames and the answer, from what the networks say about single frames."""
        frames = torch.from_numpy(np.stack(self.bank[video].frames())).permute(0, 3, 1, 2)[None]
        output = self.sampler.look(frames)
        seen = np.zeros(output.scores.shape, dtype=bool)
        chosen = sorted(np.argsort(-output.scores[0].numpy(), kind="stable")[:num_frames].tolist())
        seen[0, chosen] = True
        probs = self.classifier.frame_probs(frames).numpy()
        if answer == "mean":
            return chosen, self.classifier.clip_probs(frames[:, chosen]).numpy()[0]
        evidence = LearnedPolicy(self.sampler).evidence_of(output.scores, output.class_logits, np.ones_like(seen))
        logits = log_answers(probs, multi_label=False)
        if answer == "probed":
            penultimate = Penultimate(self.classifier)
            with penultimate.watching():
                features = penultimate(frames[0])
            logits = np.concatenate([logits, (features @ self.probe[0].T + self.probe[1]).numpy()[None]], axis=2)
        return chosen, combine(answer, SETTINGS[answer], evidence, logits, seen)[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("answer", ANSWERS)
def test_pipeline_evaluate_and_a_worker_agree(world: World, answer: str) -> None:
    pipe = world.pipeline(answer=answer)
    found = pipe(world.videos)
    fast = world.pipeline(answer=answer, precision="float32").warm_up()(world.videos)
    named = {f"s+{answer}": world.sampler}
    res = evaluate(
        world.bank, named, num_frames=2, num_candidates=T, bootstrap=0, device="cpu", classifier=world.classifier
    )
    (row,) = res.rows
    assert (row.policy, row.answer) == (f"s+{answer}", answer)
    (cell,) = res.per_video.predictions
    evaluated = res.per_video.predictions[cell]
    network = pickle.loads(pickle.dumps(_worker(pipe)))
    rows = network([(str(video), pipe.tasks(1)("").step(video)) for video in world.videos])
    answers = []
    for number, prediction in enumerate(found):
        chosen, expected = world.by_hand(number, answer, 2)
        answers.append(expected)
        assert prediction.answer == prediction.to_dict()["answer"] == rows[number]["answer"] == answer
        assert prediction.selection.frame_indices.tolist() == chosen
        np.testing.assert_allclose(prediction.probabilities, expected, atol=1e-4)
        np.testing.assert_allclose(fast[number].probabilities, expected, atol=1e-4)
        assert evaluated.predicted[number] == expected.argmax()
        assert evaluated.probability[number] == pytest.approx(expected.max(), abs=1e-4)
        assert rows[number]["probability"] == pytest.approx(expected.max(), abs=1e-4)
    assert res.chosen(f"s+{answer}").tolist() == [world.by_hand(number, answer, 2)[0] for number in range(6)]
    labels = np.eye(3)[[number % 3 for number in range(6)]]
    assert row.ece == pytest.approx(calibration_error(answers, labels), abs=1e-3)


def _worker(pipe: Pipeline) -> NetworkStep:
    arguments = {**pipe.arguments}
    return NetworkStep("named", arguments.pop("sampler"), arguments, with_classifier=True, device="cpu")


def test_the_sampler_says_which_answer(world: World) -> None:
    """The best on dev is the default; a name or an option says another."""
    default = world.pipeline()
    assert default.answer == "fused"
    assert default(world.videos[0]).answer == "fused"
    assert "answer" in default.identity()
    assert world.pipeline(answer="mean").identity().get("answer") is None
    folder = str(world.folder / "sampler")
    assert Pipeline(f"{folder}+weighted", world.classifier, num_frames=2).answer == "weighted"
    with pytest.raises(InvalidArgument, match="contradicts"):
        Pipeline(f"{folder}+weighted", world.classifier, num_frames=2, answer="fused")
    policies = {"default": folder, "mean": f"{folder}+mean", "nms": f"{folder}+nms"}
    options = {"num_frames": 2, "num_candidates": T, "bootstrap": 0, "device": "cpu"}
    res = evaluate(world.bank, [*(f"{name}={given}" for name, given in policies.items()), "uniform"], **options)
    assert {row.policy: row.answer for row in res.rows} == {
        "default": "fused",
        "mean": "mean",
        "nms": "fused",
        "uniform": "mean",
    }
    weighted = evaluate(world.bank, [f"a={folder}", "uniform"], answer="weighted", **options)
    assert [row.answer for row in weighted.rows] == ["weighted", "mean"]
    assert "weighted" in weighted.table()
    assert "ECE %" in weighted.table()
    assert "ECE" not in evaluate(world.bank, ["uniform"], **options).table()
    rows = json.loads(json.dumps(weighted.to_dict()))["rows"]
    assert (rows[0]["answer"], rows[0]["ece"]) == ("weighted", weighted.rows[0].ece)


@pytest.mark.parametrize(
    ("answer", "cases"),
    [
        ("fused", [({"auto_sure": 0.8}, 0.8), ({}, 0.95), ({"auto_tolerance": 0.05}, 0.6), ({"auto_min": 2}, 0.95)]),
        ("probed", [({"auto_sure": 0.8}, 0.8), ({"auto_tolerance": 0.05}, 0.7), ({}, 0.97)]),
    ],
)
def test_one_frame_after_another(world: World, answer: str, cases: list[tuple[dict[str, Any], float]]) -> None:
    """Stops where the belief from scratch is sure first; evaluate counts the same frames and answers alike."""
    for given, sure in cases:
        options = {**given, "answer": answer}
        least = options.get("auto_min", 1)
        pipe = world.pipeline(num_frames="auto", **options)
        found = pipe(world.videos)
        res = evaluate(
            world.bank,
            {"s": world.sampler},
            num_frames="auto",
            num_candidates=T,
            bootstrap=0,
            device="cpu",
            classifier=world.classifier,
            **options,
        )
        (row,) = res.rows
        (cell,) = res.per_video.predictions
        rows = _worker(pipe)([(str(video), pipe.tasks(1)("").step(video)) for video in world.videos])
        counts = []
        for number, prediction in enumerate(found):
            most = len(world.bank[number])
            steps = [world.by_hand(number, answer, count)[1] for count in range(1, most + 1)]
            count = next((k for k in range(least, most + 1) if steps[k - 1].max() >= sure), most)
            counts.append(count)
            assert prediction.selection.num_frames == count
            assert prediction.selection.frame_indices.tolist() == world.by_hand(number, answer, count)[0]
            np.testing.assert_allclose(prediction.probabilities, steps[count - 1], atol=1e-4)
            settings = prediction.selection.asked
            assert settings["sure"] == sure
            np.testing.assert_allclose(settings["belief"], [step.max() for step in steps[:count]], atol=1e-4)
            assert rows[number]["selection"]["frame_indices"] == prediction.selection.frame_indices.tolist()
            said = res.per_video.predictions[cell].probability[number]
            assert said == pytest.approx(steps[count - 1].max(), abs=1e-4)
        assert row.policy == "s+auto"
        assert row.frames_classified == pytest.approx(np.mean(counts))
        assert row.classifier_gmacs == pytest.approx(np.mean([world.classifier.gmacs(count) for count in counts]))
    assert len(set(counts)) > 1
    identities = [world.pipeline(num_frames="auto", **{**given, "answer": answer}).identity() for given, _ in cases]
    assert all(one != other for place, one in enumerate(identities) for other in identities[:place])
    auto = so.Auto(max=4, sure=0.8)
    assert max(found.selection.num_frames for found in world.pipeline(num_frames=auto)(world.videos)) <= 4


def test_the_engine_by_frames(world: World) -> None:
    frames = torch.from_numpy(np.stack([np.stack(world.bank[number].frames()) for number in range(5)]))
    whole = FrameEngine(world.sampler, world.classifier, num_frames=2, precision="float32").run(frames)
    single = FrameEngine(world.sampler, world.classifier, num_frames=2, precision="float32", by_frames=True).run(frames)
    assert single.probabilities is None
    assert torch.equal(single.chosen, whole.chosen)
    mean = single.frame_probabilities.log().mean(1).softmax(-1)
    torch.testing.assert_close(mean, whole.probabilities, atol=1e-4, rtol=1e-4)
    output = world.sampler.look(frames.movedim(-1, -3))
    torch.testing.assert_close(single.class_logits, output.class_logits, atol=1e-3, rtol=1e-3)


def test_a_probe_needs_its_classifier(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where its features are not to be had, "probed" that was asked for is refused, and as a default gives way."""
    world_answers = {**SETTINGS, "default": "probed"}
    sampler = copy.deepcopy(world.sampler)
    sampler.answer = world_answers
    assert Pipeline(sampler, world.classifier, num_frames=2).answer == "probed"
    other = copy.deepcopy(world.classifier)
    with torch.no_grad():
        next(other.net.parameters()).mul_(1.1)
    for options, text in (
        ({"classifier": other}, "its probe reads features of the classifier"),
        ({"precision": "int8"}, "has no outputs for a probe"),
        ({"classifier": _without_class_layer()}, "its probe reads features of the classifier"),
    ):
        given = {"classifier": world.classifier, "num_frames": 2, **options}
        with pytest.raises(InvalidArgument, match=text):
            Pipeline(sampler, given.pop("classifier"), answer="probed", **given)
    assert Pipeline(sampler, other, num_frames=2).answer == "fused"
    assert "the answer is 'fused' instead of 'probed', since its probe reads" in caplog.text
    # A network that changes its class layer's outputs, whose features a bank may have all the same
    changing = _without_class_layer()
    probed = copy.deepcopy(sampler)
    probed.set_probe(torch.zeros(4, 12), torch.zeros(4), changing.fingerprint())
    caplog.clear()
    assert Pipeline(probed, changing, num_frames=2).answer == "fused"
    assert "does not average what one linear layer gives for each frame" in caplog.text
    # A bank without features
    options = {"num_frames": 2, "num_candidates": T, "bootstrap": 0, "device": "cpu"}
    bare = so.add_teacher(
        write_frames(
            tmp_path / "bank",
            [FrameEntry(id="v", labels=(0,), frames=np.stack(world.bank[0].frames()))],
            classes=CLASSES,
        ),
        world.classifier,
    )
    with pytest.raises(InvalidArgument, match="has no features of the classifier; add them with `sosampler bank"):
        evaluate(bare, {"s": sampler}, answer="probed", **options)
    notes: list[str] = []
    assert evaluate(bare, {"s": sampler}, say=notes.append, **options).rows[0].answer == "fused"
    assert any("instead of 'probed'" in text for text in notes)


def test_the_own_answer_does_not_pay_for_the_probe(world: World) -> None:
    sampler = copy.deepcopy(world.sampler)
    sampler.answer = {**SETTINGS, "default": "probed"}
    given = {"num_candidates": T, "num_frames": 2, "bootstrap": 0, "device": "cpu", "classifier": world.classifier}
    rows = {row.policy: row for row in evaluate(world.bank, {"s": sampler, "s+answer": sampler}, **given).rows}
    assert rows["s"].answer == "probed"
    assert rows["s+answer"].gmacs == pytest.approx(sampler.gmacs(T), rel=1e-9)
    assert rows["s"].sampler_gmacs > rows["s+answer"].sampler_gmacs


def test_large_videos_are_chosen_elsewhere(world: World) -> None:
    """Where all candidates would be too large, the choice brings along what the answer needs."""
    pipe = world.pipeline(size=20)  # below what the sampler takes
    found = pipe(world.videos[0])
    assert found.answer == "fused"
    assert np.isfinite(found.probabilities).all()


def test_what_cannot_be(world: World, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(world.folder / "sampler")
    clips = so.wrap_classifier(_ClipNet(), input_size=32, class_names=CLASSES, name="clips")
    with pytest.raises(InvalidArgument, match="clips sees whole clips and has no answers for single frames"):
        Pipeline(folder, clips, num_frames=2, answer="fused")
    assert Pipeline(folder, clips, num_frames=2).answer == "mean"  # the best on dev gives way
    assert "instead of 'fused'" in caplog.text
    with pytest.raises(InvalidArgument, match="'fused' is for trained samplers"):
        Pipeline("uniform", world.classifier, num_frames=2, answer="fused")
    with pytest.raises(InvalidArgument, match="choose one of: mean, weighted, fused, probed"):
        world.pipeline(answer="best")
    plain = SOSampler(backbone="timm:test_resnet.r160_in1k", input_size=32, num_classes=3)
    with pytest.raises(InvalidArgument, match="has no answer 'weighted'"):
        Pipeline(plain, world.classifier, num_frames=2, answer="weighted")
    other = so.create_classifier("timm:test_resnet", class_names=("x", "y"), input_size=32)
    with pytest.raises(InvalidArgument, match=r"other classes \(3\) than the classifier \(2\)"):
        Pipeline(folder, other, num_frames=2, answer="fused")
    assert Pipeline(folder, other, num_frames=2, answer="weighted").answer == "weighted"
    unprobed = {key: value for key, value in SETTINGS.items() if "probed" not in key}
    raw = SOSampler(backbone="timm:test_resnet.r160_in1k", input_size=32, num_classes=3, answer=unprobed)
    with pytest.raises(InvalidArgument, match="is not calibrated"):
        Pipeline(raw, world.classifier, num_frames=2, answer="weighted")
    for options, text in (
        (
            {"answer": "mean", "num_frames": "auto", "auto_sure": 0.9},
            "auto_sure=0.9 is for samplers with answer='fused'",
        ),
        ({"num_frames": 2, "auto_sure": 0.9}, "is for num_frames='auto'"),
        ({"num_frames": "auto", "auto_sure": 1.5}, "auto_sure=1.5 must be above 0 and at most 1"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            world.pipeline(**options)
    with pytest.raises(InvalidArgument, match="use it in Pipeline or evaluate"):
        so.select(world.videos[0], so.Auto(sure=0.9), policy=folder)
    with pytest.raises(InvalidArgument, match="there is none among the policies"):
        evaluate(world.bank, [f"{folder}+mean"], num_frames=[2, "auto"], num_candidates=T, auto_sure=0.9, bootstrap=0)


def _without_class_layer() -> so.Classifier:
    """A network of frames whose classes are the rows of a table."""

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))

        def forward(self, frames: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.adaptive_avg_pool2d(frames, 2).flatten(1) @ self.table

    return so.wrap_classifier(Table(), class_names=CLASSES, input_size=16, layout="BCHW")


class _ClipNet(torch.nn.Module):
    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        return clips.mean((1, 3, 4)) * 3


def test_commands(world: World, tmp_path: Path) -> None:
    def run(*arguments: Any) -> dict[str, Any]:
        done = CliRunner().invoke(app, [str(part) for part in arguments])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    video, folder = world.videos[1], world.folder
    given = [
        "-c",
        folder / "classifier",
        "-s",
        folder / "sampler",
        "-t",
        T,
        "--folder-fps",
        1,
        "--device",
        "cpu",
        "--json",
    ]
    for answer in ANSWERS:
        found = run("classify", video, "-n", 2, "--answer", answer, *given)
        assert found["answer"] == answer
        assert found["probability"] == pytest.approx(world.by_hand(1, answer, 2)[1].max(), abs=1e-4)
    found = run("classify", video, "-n", "auto", "--auto-sure", 0.3, *given)
    assert found["selection"]["asked"]["sure"] == 0.3
    rows = [
        "-p",
        f"{folder / 'sampler'}+fused",
        "-p",
        f"{folder / 'sampler'}+mean",
        "-n",
        "2,auto",
        "--auto-sure",
        "0.5",
    ]
    found = run(
        "evaluate",
        folder / "bank",
        *rows,
        "-t",
        T,
        "--bootstrap",
        0,
        "--device",
        "cpu",
        "--json",
        "--run",
        tmp_path / "run",
    )
    assert [(row["policy"].rpartition("+")[2], row["answer"]) for row in found["rows"]] == [
        ("fused", "fused"),
        ("mean", "mean"),
        ("auto", "fused"),
    ]
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "-o", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "<td>fused</td>" in text
    assert "ECE, %" in text


def test_calibration_error_against_scikit_learn_and_a_loop() -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet([0.4] * 4, 500)
    labels = np.eye(4)[(rng.random((500, 1)) > probs.cumsum(1)).sum(1).clip(0, 3)]
    highest, hits = probs.max(1), labels[np.arange(500), probs.argmax(1)]
    share, mean = calibration_curve(hits, highest, n_bins=15, strategy="uniform")
    counts = np.histogram(highest, np.linspace(0, 1, 16))[0]
    assert calibration_error(probs, labels) == pytest.approx((np.abs(share - mean) * counts[counts > 0]).sum() / 500)
    total = 0.0
    for index in range(15):
        inside = [row for row in range(500) if min(int(highest[row] * 15), 14) == index]
        if inside:
            total += abs(sum(hits[row] for row in inside) - sum(highest[row] for row in inside)) / 500
    assert calibration_error(probs, labels) == pytest.approx(total)
    assert calibration_error([[1.0, 0.0]], [[1, 0]]) == 0.0
