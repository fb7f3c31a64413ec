"""The loop that fine-tunes a classifier: steps, evaluation, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from sosampler._util.devices import autocast
from sosampler._util.progress import progress_bar
from sosampler.classifiers.base import Classifier
from sosampler.classifiers.factory import save_classifier
from sosampler.errors import ClassifierError
from sosampler.evaluation.metrics import mean_average_precision, top1
from sosampler.training.checkpoints import RunFolder
from sosampler.training.examples import Example, TrainingBatches
from sosampler.training.optim import check_loss, diverged, finite_or_none, make_optimizer, seed_generators
from sosampler.training.recipe import ClassifierRecipe, rate_at

# Seconds between checkpoints; a killed run repeats at most as much. They hold the network and its momenta, so that one
# for each of many short epochs would take longer than the epochs.
_SAVE_EVERY = 60.0


class ClassifierLoop:
    """Trains a classifier in place and keeps the weights that are best on dev in the run's folder."""

    def __init__(
        self,
        classifier: Classifier,
        recipe: ClassifierRecipe,
        batches: TrainingBatches,
        dev: DataLoader[Example],
        run: RunFolder,
        *,
        precision: str,
        say: Callable[[str], None],
    ) -> None:
        self.classifier, self.recipe, self.batches, self.dev, self.run = classifier, recipe, batches, dev, run
        self.precision, self.say = precision, say
        self.device = classifier.device
        classifier.requires_grad_(recipe.trainable == "all")
        if recipe.trainable == "head":
            for layer in head_layers(classifier):
                layer.requires_grad_(True)
        assert recipe.optimizer is not None, "a recipe is filled before its training begins"
        assert recipe.lr is not None
        assert recipe.weight_decay is not None
        self.optimizer = make_optimizer(
            classifier, recipe.optimizer, lr=recipe.lr, weight_decay=recipe.weight_decay, nesterov=True
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "float16")
        self.step = 0  # of all epochs together
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {"score": -1.0, "epoch": -1}
        self._loss_sum = 0.0  # of the running epoch
        self._best_state: dict[str, Tensor] | None = None  # on the CPU, until it is written
        self._saved_at = time.perf_counter()
        self._resume()

    @property
    def total_steps(self) -> int:
        return len(self.batches) * self.recipe.epochs

    def train(self) -> None:
        per_epoch = len(self.batches)
        with progress_bar("training", self.total_steps, done=self.step) as bar:
            # By what was evaluated, not by steps: a run may be killed between the last step of an epoch and its end.
            for epoch in range(len(self.history), self.recipe.epochs):
                begin = time.perf_counter()
                self._training_mode()
                for batch in self.batches.epoch(epoch, self.step - epoch * per_epoch):
                    loss = self._train_step(batch)
                    bar.advance(text=f"epoch {epoch + 1}/{self.recipe.epochs} loss {loss:.3f} {self._best_text()}")
                    self._save_now_and_then()
                self._end_epoch(epoch, time.perf_counter() - begin)
        self._write_best()

    def _training_mode(self) -> None:
        self.classifier.train(self.recipe.trainable == "all")
        if self.recipe.trainable == "head":  # running statistics of the frozen part stay as they are
            for layer in head_layers(self.classifier):
                layer.train()

    def _train_step(self, batch: Example) -> float:
        # Dropout draws from here; the same numbers in a run that was killed and goes on.
        seed_generators(self.device, self.recipe.seed * 1_000_003 + self.step)
        frames, targets, positions = (part.to(self.device, non_blocking=True) for part in batch)
        rate = rate_at(self.step, self.total_steps, peak=self.recipe.lr or 0.0, warmup=self.recipe.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        clips = self.classifier.preprocessing.normalised(frames)
        with autocast(self.device, self.precision):
            scores = self.classifier(clips, positions)
        loss = classification_loss(scores.float(), targets, self.classifier, self.recipe.label_smoothing)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        value = float(loss.detach())
        if self.precision != "float16":
            self._check(value)
        self._loss_sum += value
        return value

    def _check(self, loss: float) -> None:
        lr = self.recipe.lr or 0.0
        check_loss(loss, self.classifier, step=self.step, lr=lr, precision=self.precision)

    def _end_epoch(self, epoch: int, seconds: float) -> None:
        self._check(self._loss_sum)
        try:
            probabilities, targets = predict(self.classifier, self.dev, self.precision)
        except ClassifierError as error:
            what, lr = f"the scores on dev are not finite after epoch {epoch + 1}", self.recipe.lr or 0.0
            raise diverged(what, lr=lr, precision=self.precision) from error
        scores = measure(probabilities, targets, multi_label=self.classifier.multi_label)
        score = scores[main_metric(self.classifier)]
        loss = self._loss_sum / len(self.batches)
        line = {
            "epoch": epoch,
            "loss": finite_or_none(loss),
            **{f"dev_{name}": value for name, value in scores.items()},
        }
        self._loss_sum = 0.0
        better = self.best["epoch"] < 0 or score > self.best["score"]
        if better:
            self.best = {"score": score, "epoch": epoch}
            self._best_state = {key: tensor.to("cpu", copy=True) for key, tensor in self._net_state().items()}
        self.history.append(line)
        self._save_now_and_then()
        self.run.log(self.history)
        self.say(
            f"epoch {epoch + 1}/{self.recipe.epochs}: loss {loss:.4f}, "
            f"dev {main_metric(self.classifier)} {100 * score:.2f} %{' (best)' if better else ''}, {seconds:.1f} s"
        )

    def _best_text(self) -> str:
        return f"best dev {100 * self.best['score']:.1f} %" if self.best["epoch"] >= 0 else ""

    # ---- where the run stands

    def _net_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.classifier.net.state_dict()
        return state

    def _write_best(self) -> None:
        """The best weights go to disk when a checkpoint does; one that says where they were found comes after them."""
        if self._best_state is not None:
            save_classifier(self.classifier, self.run.folder, state=self._best_state)
            self._best_state = None

    def _save_now_and_then(self) -> None:
        if time.perf_counter() - self._saved_at > _SAVE_EVERY:
            self.save()
            self._saved_at = time.perf_counter()

    def save(self) -> None:
        self._write_best()
        self.run.save(
            {
                "net": self._net_state(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "step": self.step,
                "loss_sum": self._loss_sum,
                "best": self.best,
                "history": self.history,
            }
        )

    def _resume(self) -> None:
        state = self.run.load()
        if state is None:
            return
        self.classifier.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.step, self._loss_sum = state["step"], state["loss_sum"]
        self.best, self.history = state["best"], state["history"]
        self.say(f"going on at step {self.step} of {self.total_steps}")


def main_metric(classifier: Classifier) -> str:
    return "mAP" if classifier.multi_label else "top1"


def measure(probabilities: np.ndarray, targets: np.ndarray, *, multi_label: bool) -> dict[str, float]:
    found = {"top1": top1(probabilities, targets)}
    if multi_label:
        found["mAP"] = mean_average_precision(probabilities, targets)
    return found


@torch.no_grad()
def predict(classifier: Classifier, batches: DataLoader[Example], precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [B, C] and multi-hot targets [B, C] of all examples in their fixed view."""
    classifier.eval()
    found, truth = [], []
    for frames, targets, positions in batches:
        clips = classifier.preprocessing.normalised(frames.to(classifier.device, non_blocking=True))
        with autocast(classifier.device, precision):
            scores = classifier(clips, positions.to(classifier.device))
        found.append(classifier.probabilities(scores.float()).cpu())
        truth.append(targets)
    return torch.cat(found).numpy(), torch.cat(truth).numpy()


def classification_loss(scores: Tensor, targets: Tensor, classifier: Classifier, smoothing: float) -> Tensor:
    """Cross-entropy for one label a clip, binary cross-entropy for several."""
    if classifier.multi_label:
        return functional.binary_cross_entropy_with_logits(scores, targets)
    return functional.cross_entropy(scores, targets.argmax(1), label_smoothing=smoothing)


def head_layers(classifier: Classifier) -> list[nn.Module]:
    """The layers that a fresh head consists of."""
    there = dict(classifier.net.named_modules())
    return [there[name] for name in classifier.head_names() if name in there]
