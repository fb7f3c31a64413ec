"""What helps where a class has few clips: frozen first layers, mixed clips, averaged weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import sosampler as so
from sosampler.training import loop as loop_module
from sosampler.training import train_classifier as module
from sosampler.training.classifier_data import ClassifierRecipe
from sosampler.training.optim import freeze_first
from tests.factories import SAMPLER_QUICK, make_bank

TINY = "timm:test_resnet.r160_in1k"
QUICK = {"epochs": 2, "batch_size": 8, "input_size": 32, "workers": 0, "lr": 0.05, "device": "cpu"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("few") / "pictures", np.random.default_rng(0)
    for name, colour in {"red": (200, 70, 70), "blue": (70, 70, 200)}.items():
        (root / name).mkdir(parents=True)
        for number in range(12):
            pixels = (rng.normal(0, 30, (40, 52, 3)) + colour).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


class TestFreeze:
    def test_layers_from_the_first_on_as_far_as_the_share_goes(self) -> None:
        net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 5))  # 12, 8, 25
        for share, names in {
            0.0: [],
            0.26: [],
            12 / 45: ["0"],
            0.44: ["0"],
            20 / 45: ["0", "2"],
            1.0: ["0", "2", "3"],
        }.items():
            net.requires_grad_(True)
            frozen = [layer for layer in freeze_first(net, share) if any(True for _ in layer.parameters())]
            assert frozen == [net.get_submodule(name) for name in names]
            trainable = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
            assert trainable == [name for name, _ in net.named_parameters() if name.split(".")[0] not in names]

    def test_of_a_sampler(self, tmp_path: Path) -> None:
        """Weights and running statistics of frozen layers stay; the rest learns."""
        bank = make_bank(tmp_path / "bank")
        start = so.train(bank, out=tmp_path / "start", **SAMPLER_QUICK | {"epochs": 1})
        weights = {"weights": tmp_path / "start"}
        trained = so.train(bank, out=tmp_path / "run", **weights, **SAMPLER_QUICK | {"epochs": 2, "freeze": 0.3})
        whole = so.train(bank, out=tmp_path / "whole", **weights, **SAMPLER_QUICK | {"epochs": 1, "freeze": 1.0})
        before, after, fixed = (run.sampler.backbone.state_dict() for run in (start, trained, whole))
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        count = sum(value.numel() for name, value in trained.sampler.backbone.named_parameters() if name not in changed)
        assert 0.1 < count / sum(value.numel() for value in trained.sampler.backbone.parameters()) <= 0.3
        names = list(before)
        assert changed == names[names.index(changed[0]) :]  # from some layer on to the last
        assert all(torch.equal(before[name], fixed[name]) for name in before)
        heads = [run.sampler.importance_head.weight for run in (start, whole)]
        assert not torch.equal(*heads)
        assert trained.sampler.about["recipe"]["freeze"] == 0.3
        assert "freeze" not in start.sampler.about["recipe"]
        # The default recipe freezes, but not what starts from random weights.
        assert so.read_recipe("default").freeze == 0.75
        settings = SAMPLER_QUICK | {"epochs": 1, "freeze": 0.75}
        random = so.train(bank, out=tmp_path / "random", **settings).sampler
        assert random.fingerprint() == start.sampler.fingerprint()  # as with freeze=0
        assert "freeze" not in random.about["recipe"]
        # A first stage has learned something that can be kept.
        recipe = so.read_recipe("default", freeze=0.5, pretrain=2)
        assert recipe.starting_from(None).freeze == recipe.starting_from("pretrained").freeze == 0.5
        assert recipe.changed(pretrain=0).starting_from(None).freeze == 0.0

    def test_of_a_classifier(self, pictures: Path, tmp_path: Path) -> None:
        torch.manual_seed(3)
        start = so.create_classifier(TINY, num_classes=2)
        so.save_classifier(start, tmp_path / "start")
        weights = tmp_path / "start/model.safetensors"
        trained = so.train_classifier(pictures, TINY, out=tmp_path / "run", weights=weights, freeze=0.3, **QUICK)
        before, after = start.net.state_dict(), trained.classifier.net.state_dict()
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        assert changed == list(before)[list(before).index(changed[0]) :]
        assert len(changed) < len(before)


class TestMixup:
    def test_clips_and_targets_are_mixed_alike(self) -> None:
        clips, targets = torch.arange(6.0).reshape(6, 1, 1), torch.eye(6)
        seen = []
        for seed in range(50):
            torch.manual_seed(seed)
            mixed, shares = module._mixed(clips, targets, 0.4)
            torch.testing.assert_close(mixed[:, 0, 0], shares @ torch.arange(6.0))
            torch.testing.assert_close(shares.sum(1), torch.ones(6))
            seen.append(float(shares[0, 0]))
        assert 0.35 < np.mean(seen) - 1 / 12 < 0.65  # half of it, and all where a clip is mixed with itself
        assert min(seen) < 0.1 < 0.9 < max(seen)  # Beta(0.4, 0.4) is mostly near its ends

    def test_the_loss_is_that_of_both_labels(
        self, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[tuple[Tensor, Tensor]] = []
        real = module.ClassifierLoop._label_loss

        def noted(loop: module.ClassifierLoop, scores: Tensor, targets: Tensor) -> Tensor:
            seen.append((scores.detach(), targets))
            return real(loop, scores, targets)

        monkeypatch.setattr(module.ClassifierLoop, "_label_loss", noted)
        losses: list[float] = []
        step = module.ClassifierLoop.train_step
        monkeypatch.setattr(
            module.ClassifierLoop,
            "train_step",
            lambda loop, batch: losses.append(float(step(loop, batch))) or step,  # type: ignore[func-returns-value]
        )
        monkeypatch.setattr(module.ClassifierLoop, "_save_if_due", lambda *_, **__: None)
        so.train_classifier(pictures, TINY, out=tmp_path / "run", mixup=0.4, label_smoothing=0.0, **QUICK)
        for (scores, shares), loss in zip(seen, losses, strict=True):
            assert ((shares > 0).sum(1) <= 2).all()
            assert loss == pytest.approx(float(-(shares * F.log_softmax(scores, 1)).sum(1).mean()), rel=1e-5)
        assert any(((shares > 0) & (shares < 1)).any() for _, shares in seen)


class TestAverage:
    def test_the_average_is_evaluated_and_kept(
        self, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        averages: list[dict[str, Tensor]] = []
        evaluated: list[dict[str, Tensor]] = []
        real, end = module.measure_modes, loop_module.TrainingLoop._end_epoch

        def measured(classifier: so.Classifier, *rest: object, **options: bool) -> dict[str, float]:
            evaluated.append({name: value.clone() for name, value in classifier.net.state_dict().items()})
            return real(classifier, *rest, **options)  # type: ignore[arg-type]

        def ended(loop: module.ClassifierLoop, begin: float) -> None:
            learned = {name: value.clone() for name, value in loop.network.state_dict().items()}
            averages.append({name: value.clone() for name, value in loop.average.module.state_dict().items()})
            end(loop, begin)
            assert all(torch.equal(value, learned[name]) for name, value in loop.network.state_dict().items())
            assert any(not torch.equal(value, learned[name]) for name, value in averages[-1].items())

        monkeypatch.setattr(module, "measure_modes", measured)
        monkeypatch.setattr(module.ClassifierLoop, "_end_epoch", ended)
        trained = so.train_classifier(pictures, TINY, out=tmp_path / "run", ema=0.9, **QUICK)
        for average, state in zip(averages, evaluated, strict=False):
            assert all(torch.equal(value, state[name]) for name, value in average.items())
        best = averages[trained.result["best_epoch"]]
        kept = trained.classifier.net.state_dict()
        assert all(torch.allclose(kept[name].float(), value.float()) for name, value in best.items())
        again = so.create_classifier(tmp_path / "run")
        assert again.fingerprint() == trained.result["fingerprint"]

    def test_a_stopped_run_ends_with_the_same_bytes(
        self, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = {**QUICK, "ema": 0.9, "mixup": 0.2, "freeze": 0.1}
        so.train_classifier(pictures, TINY, out=tmp_path / "whole", **settings)
        monkeypatch.setattr(loop_module, "_SAVE_EVERY", -1.0)
        real = module.ClassifierLoop.train_step

        def stopping(loop: module.ClassifierLoop, batch: object) -> Tensor:
            if loop.step == 3:  # in the second of two epochs
                raise KeyboardInterrupt
            return real(loop, batch)

        monkeypatch.setattr(module.ClassifierLoop, "train_step", stopping)
        with pytest.raises(KeyboardInterrupt):
            so.train_classifier(pictures, TINY, out=tmp_path / "broken", **settings)
        monkeypatch.setattr(module.ClassifierLoop, "train_step", real)
        so.train_classifier(pictures, TINY, out=tmp_path / "broken", **settings)
        for name in ("model.safetensors", "log.jsonl", "result.json"):
            assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("settings", "says"), [({"freeze": 1.0}, "freeze"), ({"ema": -0.1}, "ema"), ({"mixup": -1.0}, "mixup")]
)
def test_bad_settings(settings: dict[str, float], says: str) -> None:
    with pytest.raises(so.InvalidArgument, match=says):
        ClassifierRecipe(**settings)  # type: ignore[arg-type]


def test_runs_of_before_have_the_same_settings() -> None:
    assert not {"freeze", "mixup", "ema"} & set(ClassifierRecipe().to_dict())
    assert ClassifierRecipe(ema=0.9).to_dict()["ema"] == 0.9
