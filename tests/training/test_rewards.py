"""OCSampler with classifiers that do not average logits, and its budget head."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sosampler as so
from sosampler.classifiers.base import Classifier
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.evaluation import clip_scores
from sosampler.policies.base import choose_one
from sosampler.policies.learned import LearnedPolicy, expected_of
from sosampler.samplers.export import export_sampler
from sosampler.training import loop as loop_module
from sosampler.training import rewards, train_sampler
from sosampler.training.rewards import ClipClassifier, budget_targets, clip_outputs, fit_budget
from sosampler.training.sampler_data import crop
from sosampler.training.train_sampler import SamplerLoop, train
from tests.classifiers import hf_networks
from tests.factories import SAMPLER_CLASSES, SMALL, TINY, bright_video, scattered, scenes, write_teacher

CPU = torch.device("cpu")
OCSAMPLER: dict[str, Any] = SMALL | {
    "sampler": "ocsampler",
    "shift": 0,
    "epochs": 1,
    "reinforce": {"num_frames": 2, "reward": "label"},
}


class ColourMax(PooledClassifier):
    """Classes are colours; the brightest of all frames decides."""

    pooling = "max"

    def __init__(self) -> None:
        preprocessing = Preprocessing(size=(32, 32), resize=32, mean=(0.0,) * 3, std=(1.0,) * 3)
        net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        super().__init__(net, name=type(self).__name__, preprocessing=preprocessing, class_names=SAMPLER_CLASSES)

    def pool_logits(self, features: Tensor) -> Tensor:
        return 8 * features.amax(-2)


class MeanOfProbabilities(ColourMax):
    pooling = "mean of probabilities"

    def pool_logits(self, features: Tensor) -> Tensor:
        return (8 * features).softmax(-1).mean(-2).log()


def x3d() -> Classifier:
    """A 3-D network of random weights."""
    torch.manual_seed(0)
    return so.create_classifier("x3d_s", class_names=SAMPLER_CLASSES, input_size=32)


def timesformer() -> Classifier:
    classifier = hf_networks.build(num_labels=3)
    classifier.class_names = SAMPLER_CLASSES
    return classifier


def frameexit() -> Classifier:
    torch.manual_seed(0)
    classifier = so.create_classifier(TINY, head="frameexit", class_names=SAMPLER_CLASSES, input_size=32)
    classifier.net.fc.weight.data.mul_(50)  # clips that differ
    return classifier


def colour_bank(folder: Path, *, train: int = 32, dev: int = 16, stored: int = 8) -> so.Bank:
    """Two frames of each video glow in the colour of its class, the others less in another colour."""
    rng = np.random.default_rng(0)
    entries = []
    for number in range(train + dev):
        label, count = number % 3, stored - number % 2
        frames = rng.normal(40, 10, (count, *((40, 52), (64, 36))[number // 2 % 2], 3))
        useful = rng.permutation(count)[:2]
        frames[..., (label + 1) % 3] += 60
        frames[useful, ..., label] += 150
        frames[useful, ..., (label + 1) % 3] -= 60
        split = "train" if number < train else "dev"
        frames = frames.clip(0, 255).astype(np.uint8)
        entries.append(so.FrameEntry(id=f"v{number}", labels=(label,), frames=frames, split=split))
    return so.write_frames(folder, entries, classes=SAMPLER_CLASSES, videos_per_shard=20, quality=95)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return colour_bank(tmp_path_factory.mktemp("data") / "bank", train=12, dev=6)


def by_hand(bank: so.Bank, classifier: Any, row: int, stored: list[int]) -> Tensor:
    """The classifier on the frames themselves."""
    video = bank[row]
    frames = torch.from_numpy(video.frames(stored)).movedim(-1, 1)[None]
    return classifier.clip_probs(frames, torch.from_numpy(video.positions[stored])[None])[0]


# ---- rewards


@pytest.mark.parametrize("multi_label", [False, True])
def test_outputs_of_clips_follow_from_those_of_frames(multi_label: bool) -> None:
    """Of classifiers that average logits, up to half precision; also where a frame is sure."""
    logits = 3 * torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 0], logits[1, 2, 3] = 40, -40
    probs = logits.sigmoid() if multi_label else logits.softmax(-1)
    positions = torch.tensor([[1, 4], [0, 3], [1, 5], [2, 5]])
    mean = logits.take_along_dim(positions[..., None], 1).mean(1)
    outputs = clip_outputs(probs, multi_label=multi_label)
    torch.testing.assert_close(
        outputs(positions), mean.sigmoid() if multi_label else mean.softmax(-1), atol=1e-4, rtol=0
    )
    sure = outputs(torch.tensor([[0, 1], [2, 3], [0, 1], [0, 1]]))
    assert sure.isfinite().all()
    # A frame that is sure counts as one with a probability of 1 - 1e-7, or 1e-7.
    odds = torch.tensor([1e-7]).logit() if multi_label else torch.tensor([1e-7]).log()
    if multi_label:
        other = probs[1, 3, 3].logit()
        torch.testing.assert_close(sure[1, 3], ((odds[0] + other) / 2).sigmoid())
        torch.testing.assert_close(sure[0, 0], ((-odds[0] + probs[0, 1, 0].logit()) / 2).sigmoid(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("make", [frameexit, ColourMax, MeanOfProbabilities, x3d, timesformer])
def test_clips_are_classified_as_the_classifier_does(
    bank: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    """All the clips of which a training asks, drawn and of the baseline, and those of dev."""
    classifier = make()
    so.add_teacher(bank, classifier)
    seen: list[tuple[np.ndarray, np.ndarray, Tensor]] = []
    real = ClipClassifier.__call__

    def watching(clips: ClipClassifier, rows: np.ndarray, stored: np.ndarray) -> Tensor:
        found = real(clips, rows, stored)
        seen.append((rows, stored, found))
        return found

    monkeypatch.setattr(ClipClassifier, "__call__", watching)
    trained = train(bank.path, out=tmp_path / "run", classifier=classifier, **OCSAMPLER | {"batch_size": 4})
    assert trained.result["metric"] == "top1"
    assert trained.result["num_frames"] == 2
    assert sum(len(rows) for rows, *_ in seen) == 2 * 12 + 3 * 6  # of dev: the sampler, uniform and semi-optimal
    assert {row for rows, *_ in seen[:6] for row in rows} == set(range(12))  # two clips in each of three steps
    for rows, stored, found in seen:
        assert (np.diff(stored) >= 0).all()  # in time order; a short video repeats frames
        expected = torch.stack([by_hand(bank, classifier, *pair) for pair in zip(rows, stored.tolist(), strict=True)])
        # Features of frames are kept in half precision.
        torch.testing.assert_close(found, expected, atol=2e-3 if hasattr(classifier, "pool") else 1e-5, rtol=0)
        assert not found.requires_grad


@pytest.mark.parametrize("make", [frameexit, timesformer])
def test_memory_is_bounded_and_the_order_kept(bank: so.Bank, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Videos of two sizes, in any order, one more than once; then a chunk for almost every video."""
    classifier = make()
    so.add_teacher(bank, classifier)
    rows = np.array([5, 2, 9, 2, 0, 7])
    stored = np.array([[0, 1], [3, 4], [2, 6], [0, 6], [1, 1], [5, 6]])
    clips = ClipClassifier(so.Bank(bank.path).teacher(classifier), classifier, CPU, "float32")
    whole = clips(rows, stored)
    monkeypatch.setattr(rewards, "_MAX_NUMBERS", 1)
    monkeypatch.setattr(rewards, "_MAX_FRAMES", 2)
    monkeypatch.setattr(clip_scores, "_CHUNK_BYTES", 2 * 40 * 52 * 3 + 1)
    torch.testing.assert_close(clips(rows, stored), whole, atol=1e-6, rtol=0)
    one = torch.stack([by_hand(bank, classifier, *pair) for pair in zip(rows, stored.tolist(), strict=True)])
    torch.testing.assert_close(whole, one, atol=5e-4, rtol=0)
    assert (whole[1] - whole[3]).abs().max() > 1e-3  # two clips of one video


def test_online_the_classifier_sees_clips_of_the_crops(
    bank: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = timesformer()
    so.add_teacher(bank, classifier)
    found = []
    real = SamplerLoop.clip_probs

    def watching(loop: SamplerLoop, batch: Any, probs: Tensor) -> Any:
        classify = real(loop, batch, probs)
        positions = torch.tensor([[0, 3], [1, 2], [2, 3]]).repeat(4, 1)
        found.append((batch, positions, classify(positions)))
        return classify

    monkeypatch.setattr(train_sampler, "_FRAMES_AT_A_TIME", 6)
    monkeypatch.setattr(SamplerLoop, "clip_probs", watching)
    told = OCSAMPLER | {"batch_size": 12, "num_candidates": 4}
    train(bank.path, out=tmp_path / "run", classifier=classifier, teacher="online", **told)
    ((batch, positions, probs),) = found
    size = classifier.preprocessing.size
    crops = crop(batch.frames, batch.draw.crops, batch.sizes, size).unflatten(0, (12, 4))
    clips = torch.stack([video[chosen] for video, chosen in zip(crops, positions, strict=True)])
    with torch.no_grad():
        scores = classifier.scores(classifier.preprocessing.normalised(clips), batch.times.gather(1, positions))
    torch.testing.assert_close(probs, classifier.probabilities(scores), atol=1e-4, rtol=0)


def test_ocsampler_learns_for_a_max_pool_and_beats_random_frames(tmp_path: Path) -> None:
    bank = colour_bank(tmp_path / "bank")
    classifier = ColourMax()
    so.add_teacher(bank, classifier)
    told = OCSAMPLER | {"epochs": 12, "optimizer": "adamw", "lr": 5e-3, "clip": 5.0}
    trained = train(bank.path, out=tmp_path / "run", classifier=classifier, **told)
    assert trained.result["dev"] > trained.result["dev_uniform"] + 0.2
    result = so.evaluate(
        bank.path, ["random", trained.sampler], num_frames=2, num_candidates=8, classifier=classifier, split="dev"
    )
    random, learned = (row.top1 for row in result.rows)
    assert learned > random + 0.2


@pytest.mark.parametrize("stop_at", [1, 3])
def test_killed_it_resumes_with_the_same_bytes(
    bank: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    classifier = timesformer()
    so.add_teacher(bank, classifier)
    told = OCSAMPLER | {"batch_size": 6, "epochs": 2, "dropout": 0.3, "classifier": classifier}
    told |= {"reinforce": {"num_frames": 2, "baseline": "sample", "budget": True, "budget_confidence": 0.1}}
    train(bank.path, out=tmp_path / "whole", **told)
    monkeypatch.setattr(loop_module, "_SAVE_EVERY", -1.0)
    real = SamplerLoop.train_step

    def stopping(loop: SamplerLoop, batch: Any) -> Tensor:
        if loop.step == stop_at:
            raise KeyboardInterrupt
        return real(loop, batch)

    with monkeypatch.context() as patch:
        patch.setattr(SamplerLoop, "train_step", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(bank.path, out=tmp_path / "run", **told)
    with monkeypatch.context() as patch:  # and within the last stage
        patch.setattr(train_sampler, "fit_budget", stopping_at_once)
        with pytest.raises(KeyboardInterrupt):
            train(bank.path, out=tmp_path / "run", **told)
    train(bank.path, out=tmp_path / "run", **told)
    for name in ("model.safetensors", "config.json", "result.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def stopping_at_once(*given: Any) -> None:
    raise KeyboardInterrupt


def test_a_name_is_not_enough_and_clips_may_be_too_long(bank: so.Bank, tmp_path: Path) -> None:
    for make, how in ((frameexit, "joins frames by its own 'max' pool"), (x3d, "frames of a clip together")):
        classifier = make()
        so.add_teacher(bank, classifier)
        with pytest.raises(so.InvalidArgument, match=rf"{how}, but classifier='.*' only names its outputs; give the"):
            train(bank.path, out=tmp_path / "run", classifier=classifier.fingerprint(), **OCSAMPLER)
    folder = tmp_path / "classifier"
    so.save_classifier(frameexit(), folder)
    trained = train(bank.path, out=tmp_path / "run", classifier=folder, **OCSAMPLER)
    assert trained.result["metric"] == "top1"

    class Mean(nn.Module):
        def forward(self, clips: Tensor) -> Tensor:
            return clips.mean((1, 3, 4))

    short = so.wrap_classifier(Mean(), input_size=32, max_frames=1, class_names=SAMPLER_CLASSES, name="short")
    so.add_teacher(bank, short)
    with pytest.raises(so.InvalidArgument, match="short takes at most 1 frames per clip but 2 were given"):
        train(bank.path, out=tmp_path / "short", classifier=short, **OCSAMPLER)


# ---- the budget


def test_targets_are_the_fewest_frames_that_are_enough() -> None:
    generator = torch.Generator().manual_seed(0)
    videos, candidates, frames, confidence = 40, 7, 4, 0.45
    logits = 2 * torch.randn(videos, candidates, 3, generator=generator)
    scores = torch.randn(videos, candidates, generator=generator)
    labels = torch.nn.functional.one_hot(torch.arange(videos) % 3, 3).float()
    labels[::5] = torch.tensor([1.0, 1.0, 0.0])
    asked: list[int] = []

    def clip_probs(rows: np.ndarray, positions: Tensor) -> Tensor:
        asked.append(len(rows))
        return torch.stack([logits[row][where].mean(0).softmax(-1) for row, where in zip(rows, positions, strict=True)])

    found = budget_targets(scores, labels, clip_probs, frames, confidence)
    expected = []
    for row in range(videos):
        order = scores[row].argsort(descending=True).tolist()
        number = frames
        for count in range(frames, 0, -1):
            probs = logits[row][order[:count]].mean(0).softmax(-1)
            if labels[row, probs.argmax()] and probs.max() >= confidence:
                number = count
        expected.append(number)
    assert found.tolist() == expected
    assert set(expected) == {1, 2, 3, 4}
    assert asked == [sum(number > count for number in expected) for count in range(frames - 1)]


def test_a_number_at_the_threshold_is_enough() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0]])
    targets = [
        budget_targets(torch.zeros(1, 3), torch.eye(3)[:1], lambda *given: probs, 3, confidence).item()
        for confidence in (0.5, 0.51)
    ]
    assert targets == [1, 3]


@pytest.mark.parametrize("numbers", [[2], [1, 3], [1, 2, 4]])
def test_the_head_learns_the_numbers_that_occur(numbers: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.tensor(numbers).repeat(60 // len(numbers))
    features = torch.randn(60, 5, generator=generator) * torch.tensor([1.0, 100.0, 0.0, 1e-3, 1.0])
    features[:, 1] += 100 * targets
    features[:, 3] += 1e-3 * targets**2
    weight, bias = fit_budget(features, targets, 4)
    assert (weight.shape, bias.shape) == ((4, 5), (4,))
    probs = (features @ weight.T + bias).softmax(-1)
    others = [number for number in range(1, 5) if number not in numbers]
    assert probs[:, [number - 1 for number in others]].max() < 1e-6
    assert (probs.argmax(1) + 1 == targets).float().mean() > 0.7
    if len(numbers) > 1:  # a regression with an intercept predicts each number as often as it occurs
        counts = torch.tensor([(targets == number).float().mean() for number in range(1, 5)])
        torch.testing.assert_close(probs.mean(0), counts, atol=1e-3, rtol=0)


def test_the_policy_takes_the_median(tmp_path: Path) -> None:
    sampler = scattered(backbone=TINY)
    width = sampler.backbone.num_features
    plain = sampler.fingerprint()
    sampler.set_budget(torch.zeros(3, width), torch.tensor([0.2, 0.5, 0.3]).log())
    assert sampler.fingerprint() != plain
    assert sampler.gmacs(4) == pytest.approx(scattered(backbone=TINY).gmacs(4) + 3 * width / 1e9, rel=1e-9)
    outputs = sampler.look(scenes(2, 5))
    expected = expected_of(sampler, outputs, np.array([5, 2]))
    np.testing.assert_allclose(expected, [[0.4, 1, 1, 1, 1], [0.4, 1, *[-np.inf] * 3]], atol=1e-6)
    # Padding, whatever it holds, has no share in the mean of the features.
    sampler.set_budget(torch.randn(3, width, generator=torch.Generator().manual_seed(0)), torch.zeros(3))
    broken = outputs._replace(features=outputs.features.clone())
    broken.features[1, 2:] = torch.nan
    alone = outputs._replace(scores=outputs.scores[1:, :2], features=outputs.features[1:, :2])
    np.testing.assert_allclose(
        expected_of(sampler, broken, np.array([5, 2]))[1, :2], expected_of(sampler, alone)[0], atol=1e-6
    )
    assert LearnedPolicy(sampler).auto_refusal() is None
    sampler.save_pretrained(tmp_path / "run")
    again = so.load_sampler(tmp_path / "run")
    assert (again.budget, again.fingerprint()) == (3, sampler.fingerprint())
    with pytest.raises(so.InvalidArgument, match=r"budget head, .* cannot be exported; train without it"):
        export_sampler(tmp_path / "run")
    with pytest.raises(so.InvalidArgument, match=r"no budget head; train it with reinforce=\{budget: true\}"):
        scattered(backbone=TINY).frames_needed(outputs.features)


def test_easy_videos_get_few_frames(tmp_path: Path) -> None:
    """Every frame of a bright video is enough; in dark ones two kinds of frames mislead in two ways, and cancel out."""
    rng = np.random.default_rng(0)
    entries, logits = [], []
    for number in range(48):
        label, easy = number % 3, bool(number // 3 % 2)
        split = "train" if number < 32 else "dev"
        frames = bright_video(rng, np.full(8, easy), (40, 40))
        entries.append(so.FrameEntry(id=f"v{number:02d}", labels=(label,), frames=frames, split=split))
        answer = rng.normal(0, 0.01, (8, 3))
        answer[:, label] += 4
        for frame, wrong in product(range(8), (1, 2)):
            if not easy and frame % 2 == wrong - 1:
                answer[frame, (label + wrong) % 3] += 5
        logits.append(answer.astype(np.float32))
    bank = so.write_frames(tmp_path / "bank", entries, classes=SAMPLER_CLASSES, quality=95)
    write_teacher(bank, logits, multi_label=False, pooling="mean")
    told = OCSAMPLER | {"num_candidates": 8, "epochs": 2, "reinforce": {"num_frames": 6, "budget": True}}
    said: list[str] = []
    trained = train(bank.path, out=tmp_path / "run", say=said.append, **told)
    budget = trained.result["budget"]
    assert budget["videos"] == 32
    assert 1 < budget["needed"] < 6
    assert any(line.startswith("budget: dev top1") for line in said)
    result = so.evaluate(
        bank.path, {"oc": trained.sampler}, num_frames=[6, "auto"], num_candidates=8, split="dev", bootstrap=0
    )
    fixed, auto = result.row("oc", 6), result.row("oc+auto")
    assert fixed.top1 == budget["dev_all"] == 1.0
    assert auto.top1 == budget["dev"] > 0.9
    counts = (result.chosen("oc+auto") >= 0).sum(1)
    assert auto.frames_classified == pytest.approx(counts.mean()) == pytest.approx(budget["dev_frames"])
    easy = np.arange(32, 48) // 3 % 2 == 1
    assert set(counts[easy]) == {1}
    assert counts[~easy].min() > 1
    # `select` goes through the same door.
    choice = choose_one(LearnedPolicy(trained.sampler), 8, 8, bank[32].frames(), auto=so.Auto())
    assert choice.positions.tolist() == result.chosen("oc+auto")[0][: counts[0]].tolist()


def test_a_budget_is_the_penalised_regression() -> None:
    """Its gradient is 0: mean log-loss plus half a hundredth of the squared weights of standardised features."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(2, 3, (60, 4)))
    x[:, 3] = 5.0  # says nothing
    y = torch.from_numpy(rng.integers(0, 3, 60))
    weight, bias = fit_budget(x.float(), y + 1, 4)
    assert bias[3] == -30
    assert weight[3].eq(0).all()
    mean, spread = x.mean(0), x.std(0, correction=0)
    spread[3] = 1.0
    features, scaled = (x - mean) / spread, weight[:3].double() * spread
    gap = (x @ weight[:3].double().T + bias[:3].double()).softmax(1) - torch.eye(3, dtype=torch.float64)[y]
    slope = gap.T @ features / 60 + 0.01 * scaled
    assert slope.abs().max() < 1e-4
    assert gap.mean(0).abs().max() < 1e-4
