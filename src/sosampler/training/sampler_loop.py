"""The loop that trains a sampler: steps, evaluation, checkpoints.

Nothing in a step waits for the device: losses are summed there and read once an epoch, and now and then for the bar.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sosampler._util.devices import autocast
from sosampler._util.progress import Bar, progress_bar
from sosampler.classifiers.base import Classifier
from sosampler.engine.kernels.triton_kernels import can_use
from sosampler.samplers.losses import SamplerLoss
from sosampler.samplers.recipe import SamplerRecipe
from sosampler.samplers.sosampler import SOSampler
from sosampler.training.checkpoints import EventLog, RunFolder
from sosampler.training.crop_kernel import normalised_crops
from sosampler.training.distributed import Processes, sent
from sosampler.training.graphed_steps import GraphedSteps
from sosampler.training.online_teacher import OnlineTeacher
from sosampler.training.optim import RunningMean, check_loss, diverged, finite_or_none, make_optimizer, seed_generators
from sosampler.training.recipe import rate_at
from sosampler.training.sampler_augment import Normaliser, cut, points_a_pixel
from sosampler.training.sampler_data import Batch, SamplerBatches
from sosampler.training.sampler_dev import EvaluationSet, clip_answers

# Seconds between checkpoints within an epoch; a killed run repeats at most as much.
_SAVE_EVERY = 60.0
_LOOK_EVERY = 50  # steps between looks at the loss

EVENTS = "tensorboard"


class SamplerLoop:
    """Trains a sampler in place and keeps the state that is best on dev, or the last where there is no dev."""

    def __init__(
        self,
        sampler: SOSampler,
        recipe: SamplerRecipe,
        batches: SamplerBatches,
        dev: EvaluationSet | None,
        run: RunFolder,
        *,
        processes: Processes,
        precision: str,
        asked: Classifier | None = None,
        graphed: bool = False,
        say: Callable[[str], None],
    ) -> None:
        """`graphed`: whole batches run as CUDA graphs; for one process, and not in float16."""
        self.sampler, self.recipe, self.batches, self.dev, self.run = sampler, recipe, batches, dev, run
        self.processes, self.precision, self.say = processes, precision, say
        self.device = sampler.device
        self.loss = SamplerLoss(recipe, multi_label=sampler.multi_label)
        self.normalised = Normaliser(sampler.preprocessing, self.device)
        # By the largest picture of all, so that a crop looks the same whichever others are cut with it.
        self._points = points_a_pixel(batches.source.sizes, sampler.preprocessing.size)
        self._teacher = None if asked is None else OnlineTeacher(asked, batches.source.sizes, self.device)
        self.optimizer = make_optimizer(
            sampler, recipe.optimizer, lr=recipe.lr, weight_decay=recipe.weight_decay, momentum=recipe.momentum
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "float16")
        self.mean = RunningMean(sampler, recipe.ema) if recipe.ema else None
        self.step = 0  # of all epochs together
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {"score": None, "epoch": -1}
        self.best_state: dict[str, Tensor] = {}  # on the CPU
        self._sums: dict[str, Tensor] = {}  # losses of the running epoch, on the device
        self._saved_at = time.perf_counter()
        self._unsaved: OSError | None = None  # why the last checkpoint within an epoch was not written
        with processes.together():
            self._resume()
        self.layout = memory_layout(sampler)
        self.network = processes.wrapped(sampler)
        self._graphs = GraphedSteps(self._differentiated, sampler) if graphed else None

    @property
    def total_steps(self) -> int:
        return len(self.batches) * self.recipe.epochs

    @property
    def judged(self) -> SOSampler:
        """The network that is evaluated and kept."""
        return self.sampler if self.mean is None else self.mean.network

    def train(self) -> None:
        per_epoch = len(self.batches)
        shown = self.total_steps if self.processes.is_main else 0
        events = EventLog(self.run.folder / EVENTS, len(self.history)) if self.processes.is_main else None
        with progress_bar("training", shown, done=min(self.step, shown)) as bar:
            # By what was evaluated, not by steps: a run may be killed between the last step of an epoch and its end.
            for epoch in range(len(self.history), self.recipe.epochs):
                begin = time.perf_counter()
                self.network.train()
                for batch in self.batches.epoch(epoch, self.step - epoch * per_epoch):
                    loss = self._train_step(batch)
                    self._tell(bar, epoch, loss)
                    self._save_now_and_then(loss)
                self._end_epoch(epoch, begin)
                if events is not None:
                    events.write(self.history[-1])
        if events is not None:
            events.close()

    def _train_step(self, batch: Batch) -> Tensor:
        """One step; the loss comes back on the device."""
        processes = self.processes
        # Dropout draws from here; the same numbers in a run that was killed and goes on.
        number = self.step * processes.count + processes.rank
        seed_generators(self.device, self.recipe.seed * 1_000_003 + number)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        inputs = self._shown(batch)
        # Gradients are averaged over processes; one with more videos counts for more.
        share = len(batch.labels) / self.batches.plan.batch_size
        if self._graphs is not None and share == 1:
            losses = self._graphs(*inputs)
        else:
            self.optimizer.zero_grad(set_to_none=True)
            losses = self._differentiated(*inputs, weight=share * processes.count)
        if self.recipe.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.sampler.parameters(), self.recipe.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.mean is not None:
            self.mean.follow(self.step)
        self.step += 1
        for name, part in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + part * share
        return losses["loss"]

    def _differentiated(self, frames: Tensor, probs: Tensor, labels: Tensor, weight: float = 1.0) -> dict[str, Tensor]:
        """The loss and its parts; gradients of the weighted loss are added to the parameters'."""
        with autocast(self.device, self.precision):
            output = self.network(frames)
        answers = clip_answers(probs, multi_label=self.sampler.multi_label) if self.loss.reinforce else None
        loss, parts = self.loss(output, probs, labels, clip_probs=answers)
        self.scaler.scale(loss * weight).backward()
        return {"loss": loss.detach(), **parts}

    def _shown(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Frames float [B, T, 3, h, w] as the network takes them, the teacher's probabilities and the labels."""
        shape = batch.draw.positions.shape
        pictures = sent(batch.frames, self.device)
        asked = (pictures, batch.draw.cuts, batch.sizes, self.sampler.preprocessing.size, self._points)
        if self.layout is torch.channels_last and can_use(pictures):
            dtype = torch.bfloat16 if self.precision == "bfloat16" else torch.float32  # as the first layer takes them
            frames = normalised_crops(*asked, self.normalised, dtype)
        else:
            frames = self.normalised(cut(*asked)).contiguous(memory_format=self.layout)
        frames = frames.unflatten(0, shape)
        probs = sent(batch.probs, self.device).float() if self._teacher is None else self._teacher(pictures, batch)
        return frames, probs, sent(batch.labels, self.device)

    def _rate(self) -> float:
        return rate_at(self.step, self.total_steps, peak=self.recipe.lr, warmup=self.recipe.warmup)

    def _tell(self, bar: Bar, epoch: int, loss: Tensor) -> None:
        text = ""
        if self.step % _LOOK_EVERY == 0:
            text = f"epoch {epoch + 1}/{self.recipe.epochs} loss {self._looked_at(loss):.4f}"
            if self.dev is not None and self.best["epoch"] >= 0:
                text += f" best dev {self.dev.metric} {100 * self.best['score']:.1f} %"
        bar.advance(text=text)

    def _looked_at(self, loss: Tensor) -> float:
        """The loss; one process stops at once if it is none, several wait for the end of the epoch to stop together."""
        value = float(loss)
        if self.processes.count == 1 and self.precision != "float16":
            self._check(value)
        return value

    def _check(self, loss: float) -> None:
        networks = {self.sampler, self.judged}
        check_loss(loss, *networks, step=self.step, lr=self.recipe.lr, precision=self.precision)

    def _end_epoch(self, epoch: int, begin: float) -> None:
        names = list(self._sums)
        sums = self.processes.total(torch.stack([self._sums[name] for name in names])).tolist()
        losses = {name: total / len(self.batches) for name, total in zip(names, sums, strict=True)}
        with self.processes.together():
            self._check(losses["loss"])
            if self._unsaved is not None:
                raise self._unsaved
        self._sums = {}
        line: dict[str, Any] = {"epoch": epoch, **{name: finite_or_none(value) for name, value in losses.items()}}
        line["lr"] = self.optimizer.param_groups[0]["lr"]
        self.history.append(line)
        with self.processes.together():
            if self.processes.is_main:
                self._judge(line, losses["loss"], begin)
                self.run.log(self.history)
                self.save()

    def _judge(self, line: dict[str, Any], loss: float, begin: float) -> None:
        """Evaluate, keep what is best, and say so."""
        score, text, usable = None, "", True
        if self.dev is not None:
            scores = self.dev.scores(self.judged, self.precision)
            usable = bool(scores.isfinite().all())  # float16 may overflow
            score = self.dev.of_scores(scores) if usable else None
            line[f"dev_{self.dev.metric}"] = score
            text = ", dev scores are not finite" if score is None else f", dev {self.dev.metric} {100 * score:.2f} %"
        # Of equal ones the later, which has learnt longer.
        if usable and (score is None or self.best["score"] is None or score >= self.best["score"]):
            self.best = {"score": score, "epoch": line["epoch"]}
            state = self.judged.state_dict()
            self.best_state = {key: tensor.to("cpu", copy=True) for key, tensor in state.items()}
            text += " (best)" if self.dev is not None else ""
        line["seconds"] = round(time.perf_counter() - begin, 3)
        self.say(f"epoch {line['epoch'] + 1}/{self.recipe.epochs}: loss {loss:.4f}{text}, {line['seconds']:.1f} s")

    def best_sampler(self) -> SOSampler:
        """What was trained, in its best state."""
        if not self.best_state:
            raise diverged("the scores on dev are not finite", lr=self.recipe.lr, precision=self.precision)
        self.judged.load_state_dict(self.best_state)
        return self.judged

    # ---- where the run stands

    def _save_now_and_then(self, loss: Tensor) -> None:
        if not self.processes.is_main or time.perf_counter() - self._saved_at <= _SAVE_EVERY:
            return
        if not math.isfinite(self._looked_at(loss)) and self.precision != "float16":
            return
        try:
            self.save()
        except OSError as error:
            if self.processes.count == 1:
                raise
            self._unsaved = error  # told to all at the end of the epoch: now the others would wait for this one
            self._saved_at = time.perf_counter()

    def save(self) -> None:
        self.run.save(
            {
                "sampler": self.sampler.state_dict(),
                "mean": {} if self.mean is None else self.mean.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "step": self.step,
                # Of all processes, as far as this one can tell.
                "sums": {name: total * self.processes.count for name, total in self._sums.items()},
                "best": self.best,
                "best_state": self.best_state,
                "history": self.history,
            }
        )
        self._saved_at, self._unsaved = time.perf_counter(), None

    def _resume(self) -> None:
        state = self.run.load()
        if state is None:
            return
        self.sampler.load_state_dict(state["sampler"])
        if self.mean is not None:
            self.mean.network.load_state_dict(state["mean"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.best, self.history = state["step"], state["best"], state["history"]
        self._sums = {name: total.to(self.device) / self.processes.count for name, total in state["sums"].items()}
        self.best_state = state["best_state"]
        self.say(f"going on at step {self.step} of {self.total_steps}")


def memory_layout(network: nn.Module) -> torch.memory_format:
    """How the weights of the network's convolutions lie, so that frames come to it in the same way."""
    kernels = [weight for weight in network.parameters() if weight.ndim == 4 and not weight.is_contiguous()]
    return torch.channels_last if kernels else torch.contiguous_format
