"""The epoch loop of every training: steps, dev score, best weights, log, checkpoints, several processes.

A subclass defines how a batch becomes a loss and how dev is measured. Everything random depends on (seed, epoch, step)
alone, so a run that was killed resumes with the same numbers and ends with the same weights. A step does not wait for
the device: losses are summed there and read once an epoch, and now and then for the progress bar.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sosampler._util.progress import progress_bar
from sosampler.errors import WeightsError
from sosampler.training.checkpoints import RunFolder, event_writer
from sosampler.training.distributed import Processes
from sosampler.training.optim import check_loss, diverged, finite_or_none, moving_average, seed_generators

# Seconds between checkpoints within an epoch; a killed run repeats at most as much.
_SAVE_EVERY = 60.0
# Parameters below which a network on a CPU gets one thread
SMALL = 1_000_000


class Batches(Protocol):
    """Batches of every epoch from step `begin` on, the same each time; the length is the steps of an epoch."""

    def __len__(self) -> int: ...

    def epoch(self, number: int, begin: int = 0) -> Iterator[Any]: ...


@dataclass(frozen=True)
class LoopOptions:
    """What a recipe means for the loop, and where it runs."""

    epochs: int
    lr: float  # the highest, for messages
    seed: int
    processes: Processes
    say: Callable[[str], None]  # is given a line of text for each epoch
    run: RunFolder | None = None  # for checkpoints and the log; None keeps nothing
    precision: str = "float32"
    clip: float | None = None  # largest norm of the gradient
    ema: float | None = None  # decay of the moving average of weights


@contextmanager
def threads_for(network: nn.Module, device: torch.device) -> Generator[None]:
    """Compute a small network on a CPU in one thread.

    Its operations take microseconds. Several threads gain nothing then, and wait for each other all the time; on a
    machine whose cores are busy with something else each wait takes a time slice of the system.
    """
    before = torch.get_num_threads()
    if device.type == "cpu" and sum(parameter.numel() for parameter in network.parameters()) < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class TrainingLoop:
    """Trains a network in place and keeps the state that is best on dev, or the last where there is no dev."""

    metric = ""  # key of the dev score that decides which epoch is kept
    check_every = 50  # steps between checks of the loss, which wait for the device
    save_every_epoch = False
    prefer_later = False  # which of two epochs with the same dev score is kept
    logged: tuple[str, ...] = ()  # of "lr" and "seconds"
    title = "training"  # of the progress bar

    def __init__(
        self, network: nn.Module, batches: Batches, options: LoopOptions, optimizer: Optimizer, scheduler: LRScheduler
    ) -> None:
        """Optimiser and scheduler both advance once a step."""
        self.network, self.batches, self.options, self.run = network, batches, options, options.run
        self.optimizer, self.scheduler, self.processes, self.say = optimizer, scheduler, options.processes, options.say
        self.device = self.processes.device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=options.precision == "float16")
        self.average = moving_average(network, options.ema) if options.ema else None
        # What a checkpoint holds the state of.
        self._parts = {"network": network, "optimizer": optimizer, "scheduler": scheduler, "scaler": self.scaler}
        if self.average is not None:
            self._parts["average"] = self.average.module
        self.step = 0  # of all epochs together
        self.line: dict[str, Any] = {}  # of the log, for the current epoch
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {"score": None, "epoch": -1}
        self.best_state: dict[str, Tensor] = {}  # on the CPU
        self._sums: dict[str, Tensor] = {}  # losses of the current epoch, on the device
        self._saved_at = time.perf_counter()
        self._save_error: OSError | None = None  # of the last checkpoint within an epoch
        with self.processes.together():
            self._resume()
        self.forward: Any = self.processes.wrapped(network)  # what a step calls

    # ---- what differs between trainings

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch with its gradient, and parts of it for the log without."""
        raise NotImplementedError

    def share(self, batch: Any) -> float:
        """Return the weight of a batch in the mean of an epoch, 1 for one of full size."""
        return 1.0

    def start_epoch(self, epoch: int) -> None:
        """Set the training mode."""
        self.forward.train()

    def seed_step(self) -> None:
        """Seed what layers draw from, such as dropout; called before each step."""
        number = self.step * self.processes.count + self.processes.rank
        seed_generators(self.device, self.options.seed * 1_000_003 + number)

    def evaluate(self) -> dict[str, float | None]:
        """Return dev scores by name, None for one that is not finite; nothing where there is no dev split."""
        return {}

    def check(self, loss: float) -> None:
        """Raise `Diverged` where training cannot recover from a loss."""
        networks = {self.network, self.evaluated}
        check_loss(loss, *networks, step=self.step, lr=self.options.lr, precision=self.options.precision)

    def epoch_text(self, losses: dict[str, float], scores: dict[str, float | None], *, best: bool) -> str:
        """Describe an epoch in a line."""
        text = f"epoch {self.line['epoch'] + 1}/{self.options.epochs}: loss {losses['loss']:.4f}"
        if self.metric in scores:
            score = scores[self.metric]
            text += ", dev scores are not finite" if score is None else f", dev {self.metric} {100 * score:.2f} %"
            text += " (best)" if best else ""
        return text

    # ---- the loop

    @property
    def evaluated(self) -> nn.Module:
        """The network that is evaluated and kept."""
        return self.network if self.average is None else self.average.module

    def train(self) -> None:
        """Run all epochs that are left."""
        per_epoch, shown = len(self.batches), 0
        events = None
        if self.run is not None and self.processes.is_main:
            events, shown = event_writer(self.run.folder, len(self.history)), per_epoch * self.options.epochs
        gpus = [self.device] if self.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices=gpus),
            threads_for(self.network, self.device),
            warnings.catch_warnings(),
            progress_bar(self.title, shown, done=min(self.step, shown)) as bar,
            events or nullcontext(),
        ):
            # GradScaler may skip the first step of the optimiser; the schedule goes by steps all the same.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            # By what was evaluated, not by steps: a run may be killed between the last step of an epoch and its end.
            for epoch in range(len(self.history), self.options.epochs):
                begin = time.perf_counter()
                if self.line.get("epoch") != epoch:  # else it was restored from a checkpoint
                    self.line = {"epoch": epoch}
                self.start_epoch(epoch)
                for batch in self.batches.epoch(epoch, self.step - epoch * per_epoch):
                    loss = self.train_step(batch)
                    text = ""
                    if self.step % self.check_every == 0:
                        text = f"epoch {epoch + 1}/{self.options.epochs} loss {self._read(loss):.4f}"
                        if self.best["score"] is not None:
                            text += f" best dev {self.metric} {100 * self.best['score']:.1f} %"
                    bar.advance(text=text)
                    self._save_if_due(loss)
                self._end_epoch(begin)
                if events is not None:
                    for name, value in self.history[-1].items():
                        if name != "epoch" and isinstance(value, (int, float)):
                            events.add_scalar(name, value, epoch)

    def train_step(self, batch: Any) -> Tensor:
        """Update the network by a batch and return the loss, on the device."""
        self.seed_step()
        self.optimizer.zero_grad(set_to_none=True)
        loss, parts = self.loss(batch)
        share = self.share(batch)
        # Gradients are averaged over processes; one with more videos counts for more.
        weight = share * self.processes.count if self.processes.count > 1 else 1.0
        self.scaler.scale(loss * weight).backward()
        if self.options.clip is not None:
            self.scaler.unscale_(self.optimizer)
            trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(trained, self.options.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if "lr" in self.logged:
            self.line["lr"] = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        if self.average is not None:
            self.average.update(self.network, self.step)
        self.step += 1
        for name, part in {"loss": loss.detach(), **parts}.items():
            self._sums[name] = self._sums.get(name, 0.0) + part * share
        return loss.detach()

    def _read(self, loss: Tensor) -> float:
        """Wait for the loss. One process stops here if it is not finite, several stop together after the epoch."""
        value = float(loss)
        if self.processes.count == 1 and self.options.precision != "float16":
            self.check(value)
        return value

    def _end_epoch(self, begin: float) -> None:
        sums = self.processes.total(torch.stack(list(self._sums.values()))).tolist()
        losses = {name: total / len(self.batches) for name, total in zip(self._sums, sums, strict=True)}
        with self.processes.together():
            self.check(losses["loss"])
            if self._save_error is not None:
                raise self._save_error
        self._sums = {}
        self.line |= {name: finite_or_none(value) for name, value in losses.items()}
        self.history.append(self.line)
        with self.processes.together():
            if not self.processes.is_main:
                return
            scores = self.evaluate()
            self.line |= {f"dev_{name}": score for name, score in scores.items()}
            best = self._keep_best(scores)
            seconds = time.perf_counter() - begin
            if "seconds" in self.logged:
                self.line["seconds"] = round(seconds, 3)
            text = self.epoch_text(losses, scores, best=best)
            if self.run is not None:
                text += f", {seconds:.1f} s"
                self.run.log(self.history)
                self._save_if_due(None, now=self.save_every_epoch)
            self.say(text)

    def _keep_best(self, scores: dict[str, float | None]) -> bool:
        """Copy the weights where no epoch before was better; return whether they were copied."""
        score, best = scores.get(self.metric), self.best["score"]
        if self.run is None or (scores and score is None):
            return False
        if score is not None and best is not None and (score < best or (score == best and not self.prefer_later)):
            return False
        self.best = {"score": score, "epoch": self.line["epoch"]}
        self.best_state = {key: tensor.to("cpu", copy=True) for key, tensor in self.evaluated.state_dict().items()}
        return True

    def load_best(self) -> None:
        """Give the evaluated network its best weights."""
        if not self.best_state:
            raise diverged("the scores on dev are not finite", self.options.lr, self.options.precision)
        self.evaluated.load_state_dict(self.best_state)

    # ---- checkpoints

    def _save_if_due(self, loss: Tensor | None, *, now: bool = False) -> None:
        """Save where the last checkpoint is old; weights after a loss that is not finite are not saved."""
        due = now or time.perf_counter() - self._saved_at > _SAVE_EVERY
        if self.run is None or not self.processes.is_main or not due:
            return
        if loss is not None and not math.isfinite(self._read(loss)) and self.options.precision != "float16":
            return
        try:
            self.save()
        except OSError as error:
            if loss is None or self.processes.count == 1:
                raise
            self._save_error = error  # raised at the end of the epoch: now the others would wait for this one
            self._saved_at = time.perf_counter()

    def save(self) -> None:
        """Write a checkpoint."""
        assert self.run is not None, "only a run with a folder is saved"
        self.run.save(
            {
                "average": {},
                **{name: part.state_dict() for name, part in self._parts.items()},
                "step": self.step,
                "line": self.line,
                # Of all processes, as far as this one knows.
                "sums": {name: total * self.processes.count for name, total in self._sums.items()},
                "best": self.best,
                "best_state": self.best_state,
                "history": self.history,
            }
        )
        self._saved_at, self._save_error = time.perf_counter(), None

    def _resume(self) -> None:
        if self.run is None or (state := self.run.load()) is None:
            return
        if "scheduler" not in state:
            raise WeightsError(
                f"{self.run.folder}: holds a checkpoint of an earlier version; finish the run with "
                "that version, or start it again: overwrite it"
            )
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.step, self.line, self.best = state["step"], state["line"], state["best"]
        self.history, self.best_state = state["history"], state["best_state"]
        self._sums = {name: total.to(self.device) / self.processes.count for name, total in state["sums"].items()}
        self.say(f"resuming at step {self.step} of {len(self.batches) * self.options.epochs}")
