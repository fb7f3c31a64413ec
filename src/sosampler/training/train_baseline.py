"""`train` for baselines, which decide frame by frame what to see next, and with which network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosampler import __version__
from sosampler._util.hardware import check_device, keep_memory
from sosampler._util.locks import one_run_at_a_time
from sosampler._util.validation import check_float, check_int, one_of
from sosampler.bank.annotate import check_classes_fit
from sosampler.bank.bank import Bank
from sosampler.baselines.base import (
    AUDIO,
    FRAMES,
    Baseline,
    Views,
    decoded_frames,
    load_system,
    predict,
    save_baseline,
    video_gmacs,
)
from sosampler.baselines.frameexit import read_release
from sosampler.baselines.recipe import OPTIMIZERS, BaselineRecipe, read_baseline_recipe
from sosampler.classifiers.base import digest_of
from sosampler.classifiers.factory import create_classifier
from sosampler.classifiers.weights import read_state
from sosampler.errors import InvalidArgument
from sosampler.evaluation.result import mean_average_precision, top1
from sosampler.samplers.recipe import SamplerRecipe, list_recipes
from sosampler.training.baseline_data import (
    BaselineBatches,
    FeatureSource,
    bank_views,
    feature_sources,
    heavy_source,
    keep_features,
    near_device,
    own_classifier,
)
from sosampler.training.checkpoints import RunFolder, bank_identity, check_apart
from sosampler.training.distributed import Processes
from sosampler.training.loop import LoopOptions, TrainingLoop
from sosampler.training.optim import Diverged, diverged, finite_or_none, is_finite, seed_generators
from sosampler.training.sampler_data import labelled_rows

KIND = "system"  # in files
_FIT_OPTIONS = ("num_candidates", "epochs", "lr", "batch_size", "seed", "optimizer", "weight_decay", "clip")
_ON_DEV = ("metric", "dev", "dev_frames", "dev_frames_decoded", "dev_gmacs")  # None where there is no dev split


@dataclass(frozen=True)
class TrainedSystem:
    """The result of `train`: the baseline, and its scores on dev."""

    system: Baseline
    folder: Path
    result: dict[str, Any]

    def __repr__(self) -> str:
        return f"TrainedSystem({self.system.name}, {self.folder}, {self.result['metric']}, dev {self.result['dev']})"


def train_baseline(
    bank: str | Path | Bank,
    out: str | Path,
    name: str,
    recipe: Any,
    classifier: Any,
    light: Any,
    weights: str | Path | None,
    features: Mapping[str, Any] | None,
    device: str | None,
    overwrite: bool,
    say: Callable[[str], None],
    **settings: Any,
) -> TrainedSystem:
    """Train a baseline on the train split of a bank; see `train` for the arguments.

    Features that are not in the bank yet are computed for all of its videos first, which is most of the work and
    resumes after a kill. Training itself takes seconds to minutes: killed, it starts again and gives the same weights.
    Features of all stored frames of the split are in memory, 2 bytes a number, or 4 where they are stored in float32;
    pixels are decoded, and sound is read, for each batch; pixels once, where a fourth of a GPU's free memory holds
    them.
    Each epoch shows other T of these, as for samplers. T is at most the frames of the longest video, and no baseline
    sees more frames than in its training.

    The last epoch is kept and not the best on dev, because the cost of a baseline differs from epoch to epoch.
    """
    processes = Processes(device)
    with processes.together():
        if processes.count > 1:
            raise InvalidArgument(
                f"{name} is trained in one process, not in {processes.count}; start it without a launcher"
            )
    if isinstance(recipe, SamplerRecipe) or (isinstance(recipe, str) and recipe in list_recipes()):
        given = recipe if isinstance(recipe, str) else recipe.name
        raise InvalidArgument(
            f"the recipe {given!r} is of a sampler, but {name} is a baseline; leave out the recipe, or give a YAML "
            f"file of settings for {name}"
        )
    recipe = read_baseline_recipe(name if recipe is None else recipe, system=name, **settings)
    bank = bank if isinstance(bank, Bank) else Bank(bank)
    sizes = {split: len(rows) for split, rows in labelled_rows(bank).items()}
    if AUDIO in recipe.feature_sets:
        bank.audio()  # raises where the bank has no sound
    networks = {"classifier": classifier, "light": light, "weights": weights, "features": features}
    blank = recipe.without_weights()
    own = None  # the classifier of a baseline that needs no features of it
    if "heavy" not in blank.feature_sets:
        networks["classifier"] = own = own_classifier(classifier)
        blank.check_classifier(own)
    sources = feature_sources(bank, blank, **networks)
    if own is not None and blank.same_classes:
        check_classes_fit(own, bank.classes, str(bank.path))
    run = RunFolder(Path(out), KIND)
    check_apart(run.folder, bank)
    own_weights = weights if blank.takes_weights else None
    run.begin(run_settings(bank, sources, recipe, own, own_weights), overwrite=overwrite)
    target = str(processes.device)
    if run.result() is not None:
        say(f"{run.folder}: this run is finished")
    else:
        keep_features(bank, list(sources.values()), device=target, say=say)
        run.begin(
            run_settings(bank, sources, recipe, own, own_weights)
        )  # again: features may differ from what was expected
        _train(Bank(bank.path), sources, recipe, run, sizes, own, weights, target, say)
    return TrainedSystem(load_system(run.folder, target), run.folder, run.result() or {})


def run_settings(
    bank: Bank,
    sources: Mapping[str, FeatureSource],
    recipe: BaselineRecipe,
    own: Any = None,
    weights: str | Path | None = None,
) -> dict[str, Any]:
    """Return what decides the outcome of a run.

    `own`: the classifier of a baseline without its features; `weights`: of a network of its own.
    """
    by_set = {name: source.identity(bank) for name, source in sources.items()}
    settings: dict[str, Any] = {
        "bank": bank_identity(bank),
        "heavy": by_set.pop("heavy", None),
        "light": by_set.pop("light", None),
    }
    if by_set:
        settings["sets"] = by_set
    if own is not None:
        settings["classifier"] = own.fingerprint()
    if weights is not None:
        settings["weights"] = digest_of({}, read_state(weights)) if Path(weights).is_file() else str(weights)
    if AUDIO in recipe.feature_sets:
        settings[AUDIO] = bank.audio().fingerprint
    return settings | {"recipe": recipe.to_dict()}


def _independent_classes(bank: Bank, heavy: FeatureSource | None, own: Any) -> bool:
    """Return whether classes do not exclude each other: as the classifier's own, as far as that is known."""
    network = own if heavy is None else heavy.network
    if network is not None and hasattr(network, "multi_label"):
        return bool(network.multi_label)
    if heavy is not None and heavy.fingerprint in bank.teachers:
        return bank.teacher(heavy.fingerprint).multi_label
    return not bank.exclusive


def _limit_frames(recipe: BaselineRecipe, stored: int, say: Callable[[str], None]) -> BaselineRecipe:
    """Return the recipe with no more candidates than the longest video has, and no layers for further frames.

    Such layers would keep their random weights, and run where videos are longer.
    """
    available = min(recipe.num_candidates, stored)
    changes = {"num_candidates": available}
    if available < recipe.num_candidates:
        say(f"the bank stores at most {stored} frames a video, so T is {available} instead of {recipe.num_candidates}")
    max_frames = recipe.settings.get("max_frames", 0)
    if max_frames > available:
        say(f"{recipe.system} sees at most {available} frames instead of {max_frames}, because T is {available}")
        changes["max_frames"] = available
    return recipe.changed(**changes)


def _train(
    bank: Bank,
    sources: dict[str, FeatureSource],
    recipe: BaselineRecipe,
    run: RunFolder,
    sizes: dict[str, int],
    own: Any,
    weights: str | Path | None,
    device: str,
    say: Callable[[str], None],
) -> None:
    """Train, measure on dev, and write the folder and the result."""
    features = {name: source.describe(bank) for name, source in sources.items()}
    prices = {name: about["gmacs"] for name, about in features.items()}
    training = bank.split("train")
    recipe = _limit_frames(recipe, max(len(video) for video in training if video.labels), say)
    baseline = recipe.build(
        **{f"{name}_{fact}": about[fact] for name, about in features.items() for fact in ("width", "gmacs")},
        num_classes=len(bank.classes),
        multi_label=_independent_classes(bank, sources.get("heavy"), own),
        num_candidates=recipe.num_candidates,
    )
    baseline.take_networks({"heavy": own} | {name: source.network for name, source in sources.items()}, weights)
    sets: dict[str, Any] = {name: about["name"] for name, about in features.items()}
    if FRAMES in baseline.feature_sets:
        sets[FRAMES] = baseline.frame_size
    if AUDIO in baseline.feature_sets:
        sets[AUDIO] = True
    views, labels = bank_views(training, num_candidates=None, **sets)
    parameters = sum(weight.numel() for weight in baseline.parameters())
    unlabelled = f" ({sizes['unlabelled']} without a label are left out)" if sizes["unlabelled"] else ""
    say(
        f"{baseline.name}, {parameters / 1e6:.2f} M parameters, on {device}: {sizes['train']} videos to train on, "
        f"{sizes['dev'] or 'no'} dev{'' if sizes['dev'] else ' split'}{unlabelled}"
    )
    options = {name: getattr(recipe, name) for name in _FIT_OPTIONS}
    history = fit(baseline, near_device(views, torch.device(device)), labels, device=device, say=say, **options)
    if not is_finite(baseline):
        raise diverged(f"weights of {baseline.name} are not finite", recipe.lr, "float32")
    del views, labels
    measured, curve, each_step = dict.fromkeys(_ON_DEV), [], []
    measured["metric"] = metric = "mAP" if bank.multi_label else "top1"
    if sizes["dev"]:
        views, labels = bank_views(bank.split("dev"), num_candidates=recipe.num_candidates, **sets)
        views = near_device(views, torch.device(device))
        scores = measure_baseline(baseline, views, labels, prices, metric=metric)
        measured["dev"] = scores.pop(metric)
        measured |= {f"dev_{key}": value for key, value in scores.items()}
        for value in baseline.threshold_values:  # from cheap to costly
            point = measure_baseline(baseline.with_threshold(value), views, labels, prices, metric=metric)
            curve.append({"dial": baseline.threshold, "value": value, **point})
        each_step = [
            {"steps": k, **measure_baseline(other, views, labels, prices, metric=metric)}
            for k, other in baseline.with_each_step()
        ]
    further = {name: about for name, about in features.items() if name not in ("heavy", "light")}
    about = {
        "classifier": features["heavy"]["network"] if "heavy" in features else getattr(own, "name", None),
        "bank": bank.path.resolve().name,
        "classes": list(bank.classes),
        "num_candidates": recipe.num_candidates,
        "heavy": features.get("heavy"),
        "light": features.get("light"),
        **({"sets": further} if further else {}),
        **({AUDIO: bank.audio().fingerprint} if AUDIO in sets else {}),
        **measured,
        "seed": recipe.seed,
        "sosampler": __version__,
        "recipe": recipe.to_dict(),
    }
    save_baseline(run.folder, baseline, about)
    run.log(history)
    result = {
        **measured,
        "dev_curve": curve,
        "sizes": sizes,
        "num_candidates": recipe.num_candidates,
        "epochs": recipe.epochs,
        "seed": recipe.seed,
        **{name: features[name]["fingerprint"] if name in features else None for name in ("heavy", "light")},
    }
    if further:
        result["sets"] = {name: about["fingerprint"] for name, about in further.items()}
    if each_step:  # "frames" of these are distinct ones
        result["dev_steps"] = each_step
    run.finish(result)
    scored = ""
    if measured["dev"] is not None:
        scored = (
            f"dev {metric} {100 * measured['dev']:.2f} % with {measured['dev_frames']:.2f} frames in the heavy "
            f"network, {measured['dev_frames_decoded']:.2f} decoded, {measured['dev_gmacs']:.3f} GMACs a video; "
        )
    say(f"{scored}written to {run.folder}")


def fit(
    baseline: Baseline,  # trained in place; left in eval mode on `device`
    views: Views,
    labels: Tensor,  # multi-hot [B, C]
    *,
    num_candidates: int | None = None,  # K of the candidates that each epoch draws; None = all, every time
    epochs: int | Mapping[str, int] = 20,  # of each phase, or one number a phase; one with 0 is left out
    lr: float = 1e-3,  # at the start of each phase; falls to 0 as a cosine
    batch_size: int = 64,  # max videos a step; batches of an epoch differ by at most one video
    seed: int = 0,  # of the order of videos and of everything that is drawn
    device: Any = None,  # None = that of the baseline
    optimizer: str = "adamw",  # or "sgd" with momentum 0.9
    weight_decay: float = 1e-4,
    clip: float | None = 10.0,  # max norm of the gradient over all weights; None = any
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Train all phases of a baseline on features in memory; the same arguments give the same weights.

    The weights of the last epoch are kept: those of an earlier one would also have another cost. Views keep their
    device and precision; a batch at a time goes to the device, in float32.

    Returns for each epoch: phase, epoch, loss and its parts (means over videos), and the lr of its first step.
    """
    check_float("lr", lr, above=0), check_float("weight_decay", weight_decay, at_least=0)
    one_of("optimizer", optimizer, OPTIMIZERS)
    given = dict(epochs) if isinstance(epochs, Mapping) else dict.fromkeys(baseline.phases, epochs)
    for phase, count in given.items():
        one_of("phase", phase, baseline.phases), check_int("epochs", count, at_least=0)
    if labels.dim() != 2 or len(labels) != len(views) or not len(labels):
        raise InvalidArgument(
            f"labels of shape {list(labels.shape)} must be [B, C] for {len(views)} videos; give one row a video"
        )
    if not bool((labels > 0).any(dim=1).all()):
        raise InvalidArgument("a video has no label; leave out such videos")
    baseline.to(check_device(device) if device is not None else baseline.device)
    if baseline.device.type == "cpu":
        keep_memory()
    baseline.check_shapes(views)
    candidates = views.shape[1] if num_candidates is None else check_int("num_candidates", num_candidates)
    steps = -(-len(labels) // check_int("batch_size", batch_size))
    counts = {phase: given[phase] for phase in baseline.phases if given.get(phase)}
    frames = views.real.sum(dim=1).clamp_max(candidates)
    baseline.check_training(frames, smallest_batch=len(labels) // steps, phases=[*counts])
    labels = labels.to(baseline.device)
    history: list[dict[str, Any]] = []
    for number, (phase, count) in enumerate(counts.items()):
        weights = [weight for weight in baseline.phase_parameters(phase) if weight.requires_grad]
        if not weights:
            continue
        groups = _by_rate(weights, baseline.lr_factors(phase), lr)
        if optimizer == "sgd":
            algorithm: Any = torch.optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=weight_decay)
        else:
            algorithm = torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)
        batches = BaselineBatches(views, labels, num_candidates=candidates, steps=steps, seed=[seed, number])
        options = LoopOptions(count, lr, seed, Processes(str(baseline.device), alone=True), say, clip=clip)
        loop = BaselineLoop(baseline, batches, options, algorithm, phase)
        loop.train()
        history += loop.history
    baseline.eval()
    return history


def _by_rate(weights: Sequence[nn.Parameter], factors: Mapping[nn.Parameter, float], lr: float) -> list[dict[str, Any]]:
    """Return the optimiser's groups of parameters; the first has the recipe's rate, which the log shows."""
    rates = sorted({1.0, *factors.values()}, key=lambda factor: factor != 1.0)
    groups = [(rate, [weight for weight in weights if factors.get(weight, 1.0) == rate]) for rate in rates]
    return [{"params": of_rate, "lr": rate * lr} for rate, of_rate in groups if of_rate]


class BaselineLoop(TrainingLoop):
    """One phase of the training of a baseline on features in memory."""

    check_every = 1
    generator: torch.Generator  # on the CPU, so that every device draws the same
    progress = 0.0  # share of the phase before the current step

    def __init__(
        self, baseline: Baseline, batches: BaselineBatches, options: LoopOptions, optimizer: Any, phase: str
    ) -> None:
        self.baseline, self.phase, self.num_videos, self.seed = baseline, phase, len(batches.labels), batches.seed
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(batches))
        super().__init__(baseline, batches, options, optimizer, scheduler)

    def start_epoch(self, epoch: int) -> None:
        self.baseline.train_phase(self.phase)
        self.line |= {"phase": self.phase, "lr": self.scheduler.get_last_lr()[0]}

    def seed_step(self) -> None:
        key = [*self.seed, *divmod(self.step, len(self.batches))]  # of the phase, epoch, step
        seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
        seed_generators(self.device, seed)  # of layers that draw by themselves, such as dropout
        self.generator = torch.Generator().manual_seed(seed)

    def loss(self, batch: tuple[Tensor, Views]) -> tuple[Tensor, dict[str, Tensor]]:
        labels, views = batch
        self.progress = self.step / (len(self.batches) * self.options.epochs)
        options = {"generator": self.generator, "progress": self.progress, "phase": self.phase}
        return self.baseline.loss(views.to(self.device), labels, **options)

    def share(self, batch: tuple[Tensor, Views]) -> float:
        return len(batch[0]) * len(self.batches) / self.num_videos

    def check(self, loss: float) -> None:
        if not np.isfinite(loss):
            raise Diverged(
                f"the loss of {self.baseline.name} is {loss} in phase {self.phase!r}, {self.progress:.0%} of it done; "
                "look for such numbers in the features, or give a lower lr"
            )

    def epoch_text(self, losses: dict[str, float], scores: dict[str, float | None], *, best: bool) -> str:
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
        return f"{self.baseline.name} {self.phase} {self.line['epoch'] + 1}/{self.options.epochs}: {numbers}"


def measure_baseline(
    baseline: Baseline, views: Views, labels: Tensor, prices: Mapping[str, float], *, metric: str = "top1"
) -> dict[str, Any]:
    """Return the metric by its name, and means over videos of frames and giga multiply-adds.

    `prices`: giga multiply-adds of one frame in the network of each set.
    """
    output = predict(baseline, views)
    if not bool(output.probabilities.isfinite().all()):
        raise InvalidArgument(
            f"{baseline.name} gives probabilities that are not finite on dev; look for such numbers in the features of "
            "its videos, or give a lower lr"
        )
    measure = mean_average_precision if metric == "mAP" else top1
    measured: dict[str, Any] = {
        metric: finite_or_none(measure(output.probabilities.numpy(), labels.cpu().numpy())),
        "frames": float(baseline.classified(output).sum(dim=1).double().mean()),
        "frames_decoded": float(decoded_frames(output).double().mean()),
        "gmacs": float(video_gmacs(baseline, output, prices).double().mean()),
    }
    if output.other_gmacs:
        measured["other_gmacs"] = {name: float(cost.double().mean()) for name, cost in output.other_gmacs.items()}
    return measured


@one_run_at_a_time
def import_frameexit(
    bank: str | Path | Bank,
    weights: str | Path,
    *,
    out: str | Path,
    classifier: Any = None,
    first_exit: float = 0.99,
    gate_exit: float = 0.5,
    device: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Baseline:
    """Make the baseline frameexit of a checkpoint that FrameExit's authors released; nothing is trained.

    Features of its ResNet-50 and the layer after it are computed for the whole bank, once; a killed run resumes.

    Args:
        bank: with the classes of the checkpoint in its order.
        weights: the .pth file, or the same tensors as .safetensors.
        out: folder for the baseline; `load_system(out)` and `evaluate` take it.
        classifier: source of the features, as for `train`; default: the network of the checkpoint.
        first_exit, gate_exit: thresholds of the baseline; these are the authors' for ActivityNet.
        device: default: the GPU if there is one.
        say: is given a line of text about what is done.
    """
    bank = bank if isinstance(bank, Bank) else Bank(bank)
    own = create_classifier("resnet50", head="frameexit", weights=weights)
    if own.num_classes != len(bank.classes):
        raise InvalidArgument(
            f"{weights} has {own.num_classes} classes, but {bank.path} has {len(bank.classes)}; give a bank with the "
            "classes of the checkpoint, in its order"
        )
    source = heavy_source(bank, own if classifier is None else classifier)
    target = str(Processes(device).device)
    keep_features(bank, [source], device=target, say=say)
    heavy = source.describe(Bank(bank.path))
    baseline = read_release(weights, heavy_width=heavy["width"], first_exit=first_exit, gate_exit=gate_exit)
    about = {
        "classifier": heavy["network"],
        "bank": bank.path.resolve().name,
        "classes": list(bank.classes),
        "num_candidates": baseline.max_frames,
        "heavy": heavy,
        "light": None,
        "weights": Path(weights).name,
        "sosampler": __version__,
    }
    save_baseline(out, baseline, about)
    say(f"written to {out}")
    return load_system(out, target)
