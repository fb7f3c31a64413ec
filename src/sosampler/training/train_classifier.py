"""`train_classifier`: fine-tune a classifier on images, videos or a bank."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sosampler._util.hardware import autocast, keep_memory, resolve_device, usable_cores
from sosampler._util.limits import check_count
from sosampler._util.locks import locked_folder
from sosampler.bank.bank import Bank
from sosampler.classifiers.base import Classifier, activate, numbered_names, to_channels_last
from sosampler.classifiers.factory import (
    WEIGHTS,
    create_classifier,
    fit_weights,
    read_settings,
    save_classifier,
    saved_folder,
    set_input_size,
)
from sosampler.classifiers.weights import read_state
from sosampler.datasets.manifest import Manifest
from sosampler.errors import ClassifierError, InvalidArgument
from sosampler.evaluation.result import mean_average_precision, top1
from sosampler.training.checkpoints import CHECKPOINT, RunFolder
from sosampler.training.classifier_data import (
    ClassifierBatches,
    ClassifierRecipe,
    ClipExamples,
    DataSource,
    Example,
    evaluation_batches,
    open_source,
)
from sosampler.training.distributed import Processes
from sosampler.training.loop import LoopOptions, TrainingLoop
from sosampler.training.optim import diverged, freeze_first, make_optimizer, settled_precision


@dataclass(frozen=True)
class TrainedClassifier:
    """The result of `train_classifier`: the best weights by dev, and their scores."""

    classifier: Classifier
    folder: Path
    result: dict[str, Any]

    def __repr__(self) -> str:
        return f"TrainedClassifier({self.folder}, {self.result['metric']}, dev {self.result['dev']})"


def train_classifier(
    data: str | Path | Manifest | Bank,
    classifier: str | Path | Classifier = "resnet50",
    *,
    out: str | Path,
    weights: str | Path | None = None,
    input_size: int | tuple[int, int] | None = None,
    recipe: ClassifierRecipe | None = None,
    device: str | None = None,
    precision: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    options: dict[str, Any] | None = None,
    exclusive: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> TrainedClassifier:
    """Fine-tune a classifier and keep the weights that are best on the dev split.

    Args:
        data: a folder with one folder a class (of images or videos; folders `train`, `dev` and `test` may be above
            them), a CSV or JSONL manifest, or a bank. Without a dev split, a part of train is used.
        classifier: a name for `create_classifier`, a saved folder, or a classifier whose classes are those of the data.
        out: folder for the best weights (`create_classifier(out)` loads them), the log and the result. Called again
            with the same settings, a killed run resumes.
        weights: to start from; the head is new unless that of the file has as many classes as the data. SlowOnly
            also starts from a 2-D ResNet-50.
        input_size: height and width of the classifier's input.
        recipe, settings: a `ClassifierRecipe`, and single fields of it: epochs=30, lr=0.02, ...
        device: default: the GPU if there is one.
        precision: "float32", "bfloat16" or "float16"; default: bfloat16 on GPUs that have it.
        workers: processes that read examples; default: a core each, on a CPU half of the cores, up to 8.
        overwrite: start again in a folder that holds another run; its weights and decoded frames are removed.
        options: of the classifier's family, as for `create_classifier`.
        exclusive: whether classes exclude each other: softmax and cross-entropy of one label a video, or sigmoid and
            binary cross-entropy; None: as the data says.
        say: is given a line of text for each epoch.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import sosampler as so
        >>> with TemporaryDirectory() as folder:
        ...     reels = {"counts": {"train": 4, "dev": 2}, "num_classes": 2, "recipe": {"size": 48}}
        ...     bank = so.make_reels("procedural", f"{folder}/bank", **reels)
        ...     small = {"input_size": 32, "epochs": 1, "num_frames": 2, "workers": 0}
        ...     trained = so.train_classifier(bank, "timm:test_resnet", out=f"{folder}/classifier", **small)
        ...     so.create_classifier(f"{folder}/classifier").class_names == bank.classes
        True
    """
    recipe = recipe or ClassifierRecipe()
    for name in settings:
        if name not in ClassifierRecipe.__dataclass_fields__:
            allowed = ", ".join(ClassifierRecipe.__dataclass_fields__)
            raise InvalidArgument(f"train_classifier has no setting {name!r}; a recipe has: {allowed}")
    recipe = replace(recipe, **settings)
    target = resolve_device(device or None)
    if target.type == "cpu":
        keep_memory()
    precision = settled_precision(target, precision)
    if workers is None:  # on a CPU the network needs cores too
        workers = max(1, min(8, usable_cores() // (2 if target.type == "cpu" else 1)))
    check_count("workers", workers, "MAX_THREADS", at_least=0)
    source = open_source(data, recipe, exclusive)
    if source.kind == "images":
        recipe = replace(recipe, num_frames=1)
    num_train = sum(item.split == "train" for item in source.manifest.items)
    recipe = replace(recipe, batch_size=min(recipe.batch_size, num_train))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed % 2**63)  # the new head is drawn on the CPU
        network = starting_network(
            classifier,
            source.manifest.classes,
            multi_label=not source.manifest.exclusive,
            weights=weights,
            input_size=input_size,
            options=options or {},
        )
    network.length.fitted(recipe.num_frames, network.name)
    if recipe.trainable == "head" and not network.head_names():
        raise InvalidArgument(f"the head of {network.name} is not known; train all of it: trainable='all'")
    recipe = recipe.filled(transformer=any(isinstance(module, nn.LayerNorm) for module in network.modules()))
    run = RunFolder(Path(out))
    run_path, data_path = run.folder.resolve(), source.path.resolve()
    # In a folder of classes the run would be taken for a class; a bank in the run's folder would be deleted with it.
    is_folder = isinstance(data, (str, Path)) and source.kind != "bank" and data_path.is_dir()
    if run_path == data_path or run_path in data_path.parents or (is_folder and data_path in run_path.parents):
        raise InvalidArgument(f"out={run.folder} and the data {source.name} lie inside each other; keep them apart")
    kind = "pictures" if source.kind == "images" else source.kind  # the name in files
    run_settings = {
        "data": {"kind": kind, "path": str(data_path), "digest": source.digest()},
        "classifier": network.settings(),
        # The user is responsible for the weights of a network that is given as an object.
        "start": None if isinstance(classifier, Classifier) else network.fingerprint(),
        "recipe": recipe.to_dict(),
        "precision": precision,
    }
    with locked_folder(run.folder):  # now, because a new folder beside those of classes would be one of them
        run.begin(run_settings, overwrite=overwrite)
        if (finished := run.result()) is not None:
            say(f"{run.folder}: this run is finished")
            where = run.folder / WEIGHTS
            fit_weights(network, read_state(where, names_as_they_are=True), where=str(where))
            return TrainedClassifier(network.freeze(), run.folder, finished)
        return _open_and_train(network, source, recipe, run, target, precision, workers, say)


def _open_and_train(
    network: Classifier,
    source: DataSource,
    recipe: ClassifierRecipe,
    run: RunFolder,
    target: torch.device,
    precision: str,
    workers: int,
    say: Callable[[str], None],
) -> TrainedClassifier:
    """Read the examples of a run that has begun, and train."""
    begun = (run.folder / CHECKPOINT).exists()
    splits, unreadable = source.open(
        network.preprocessing, recipe, frames_folder=run.frames, workers=workers, check=not begun
    )
    head = "a new head" if network.fresh_head else "the head of the weights"
    left_out = f" ({unreadable} videos are unreadable)" if unreadable else ""
    say(
        f"{network!r} with {head}, on {target} in {precision}: {len(splits['train'])} {source.kind} to train on, "
        f"{len(splits['dev'])} dev, {len(splits['test'])} test{left_out}"
    )
    network.to(target)
    if target.type != "cpu":
        to_channels_last(network.net)
    try:
        with torch.random.fork_rng(devices=[]):  # loaders draw a seed for their workers
            metric = "mAP" if source.manifest.multi_label else "top1"
            rest: dict[str, Any] = {"precision": precision, "workers": workers, "say": say, "metric": metric}
            return _train(network, splits, unreadable, recipe, run, **rest)
    except InvalidArgument as error:
        # A worker process wraps an error into its traceback; the last line is the message.
        raise type(error)(str(error).strip().splitlines()[-1].split("InvalidArgument: ")[-1]) from error
    finally:
        network.freeze()


def _train(
    network: Classifier,
    splits: dict[str, ClipExamples],
    unreadable: int,
    recipe: ClassifierRecipe,
    run: RunFolder,
    *,
    precision: str,
    workers: int,
    say: Callable[[str], None],
    metric: str,
) -> TrainedClassifier:
    fresh_head = network.fresh_head
    batches = ClassifierBatches(splits["train"], workers=workers, pin_memory=network.device.type == "cuda")
    dev_batches = evaluation_batches(splits["dev"], workers=min(workers, 4))
    assert recipe.lr is not None, "a recipe is filled before its training begins"
    processes = Processes(str(network.device), alone=True)
    options = LoopOptions(recipe.epochs, recipe.lr, recipe.seed, processes, say, run, precision, ema=recipe.ema or None)
    loop = ClassifierLoop(network, recipe, batches, dev_batches, options, metric)
    loop.train()
    loop.load_best()
    network.net.load_state_dict(loop.best_state)
    save_classifier(network, run.folder, state=loop.best_state)
    scores: dict[str, Any] = {"dev": loop.best["score"]}
    if len(splits["test"]):
        test_batches = evaluation_batches(splits["test"], workers=workers)
        on_test = measure_modes(network, test_batches, precision, multi_label=loop.metric == "mAP")
        scores["test"] = on_test.pop(loop.metric)
        scores |= {f"test_{name}": score for name, score in on_test.items() if name.startswith(f"{loop.metric}_")}
    network.freeze()
    result = {
        "metric": loop.metric,
        **scores,
        "best_epoch": loop.best["epoch"],
        "epochs": recipe.epochs,
        "fresh_head": fresh_head,
        "sizes": {name: len(examples) for name, examples in splits.items()},
        "unreadable": unreadable,
        "num_classes": network.num_classes,
        "fingerprint": network.fingerprint(),
    }
    run.finish(result)
    shown = ", ".join(f"{name} {100 * score:.2f} %" for name, score in scores.items())
    say(f"best of epoch {loop.best['epoch'] + 1}: {loop.metric} {shown}; written to {run.folder}")
    if loop.history[loop.best["epoch"]].get("dev_answers") == 1:
        say(
            f"the classifier {network.name} gives the same answer for every video of dev; train "
            "it longer, with another learning rate, or from other weights"
        )
    return TrainedClassifier(network, run.folder, result)


class ClassifierLoop(TrainingLoop):
    """The fine-tuning of a classifier on labelled clips."""

    def __init__(
        self,
        classifier: Classifier,
        recipe: ClassifierRecipe,
        batches: ClassifierBatches,
        dev: DataLoader[Example],
        options: LoopOptions,
        metric: str = "top1",
    ) -> None:
        self.classifier, self.recipe, self.dev, self.precision = classifier, recipe, dev, options.precision
        self.metric = metric
        layers = dict(classifier.net.named_modules())
        self.head = [layers[name] for name in classifier.head_names() if name in layers]
        classifier.requires_grad_(recipe.trainable == "all")
        if recipe.trainable == "head":
            for layer in self.head:
                layer.requires_grad_(True)
        self.frozen = freeze_first(classifier.net, recipe.freeze) if recipe.trainable == "all" else []
        assert recipe.lr is not None, "a recipe is filled before its training begins"
        own_groups = classifier.own_groups(recipe.lr) if recipe.trainable == "all" else []
        optimizer, scheduler = make_optimizer(classifier, recipe, len(batches), own_groups, momentum=0.9, nesterov=True)
        super().__init__(classifier.net, batches, options, optimizer, scheduler)

    def start_epoch(self, epoch: int) -> None:
        self.classifier.train(self.recipe.trainable == "all")
        if self.recipe.trainable == "head":  # running statistics of the frozen part do not change
            for layer in self.head:
                layer.train()
        for layer in self.frozen:
            layer.eval()

    def loss(self, batch: Example) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of one label a clip where classes exclude each other, else binary cross-entropy.

        Of a network with several modes the sum over them; those after the first also learn its probabilities.
        """
        frames, targets, positions = (part.to(self.device, non_blocking=True) for part in batch)
        clips = self.classifier.preprocessing.normalised(frames)
        if self.recipe.mixup:
            shares = targets if self.classifier.multi_label else F.one_hot(targets.argmax(1), targets.shape[1]).float()
            clips, targets = _mixed(clips, shares, self.recipe.mixup)
        with autocast(self.device, self.precision):
            first, *others = (self.classifier(clips, positions).float() for _ in self.classifier.modes())
        loss = self._label_loss(first, targets)
        taught = activate(first.detach(), self.classifier.activation)
        imitation = F.binary_cross_entropy_with_logits if self.classifier.multi_label else F.cross_entropy
        for scores in others:
            loss = loss + self._label_loss(scores, targets) + imitation(scores, taught)
        return loss, {}

    def _label_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        if self.classifier.multi_label:
            return F.binary_cross_entropy_with_logits(scores, targets)
        # Of several labels the first counts; a mixed clip has the labels of two.
        wanted = targets if self.recipe.mixup else targets.argmax(1)
        return F.cross_entropy(scores, wanted, label_smoothing=self.recipe.label_smoothing)

    def evaluate(self) -> dict[str, float | None]:
        try:
            with self._averaged():
                return {**measure_modes(self.classifier, self.dev, self.precision, multi_label=self.metric == "mAP")}
        except ClassifierError as error:
            reason = f"the scores on dev are not finite after epoch {self.line['epoch'] + 1}"
            raise diverged(reason, self.options.lr, self.precision) from error

    @contextmanager
    def _averaged(self) -> Generator[None]:
        """Give the classifier the averaged weights for a while, where there are such."""
        if self.average is None:
            yield
            return
        learned = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.network.load_state_dict(self.average.module.state_dict())
        try:
            yield
        finally:
            self.network.load_state_dict(learned)


def _mixed(clips: Tensor, targets: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Mix each clip and its targets with those of another (Zhang et al., "mixup", ICLR 2018); one weight a batch.

    Drawn on the CPU, whose generator is seeded before each step.
    """
    weight = float(torch.distributions.Beta(strength, strength).sample())
    order = torch.randperm(len(clips)).to(clips.device)
    return clips.lerp(clips[order], 1 - weight), targets.lerp(targets[order], 1 - weight)


@torch.no_grad()
def predict(classifier: Classifier, batches: DataLoader[Example], precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities [B, C] and multi-hot targets [B, C] of all examples in their fixed view."""
    classifier.eval()
    probabilities, truth = [], []
    for frames, targets, positions in batches:
        clips = classifier.preprocessing.normalised(frames.to(classifier.device, non_blocking=True))
        with autocast(classifier.device, precision):
            scores = classifier(clips, positions.to(classifier.device))
        probabilities.append(classifier.probabilities(scores.float()).cpu())
        truth.append(targets)
    return torch.cat(probabilities).numpy(), torch.cat(truth).numpy()


def measure(probabilities: np.ndarray, targets: np.ndarray, *, multi_label: bool) -> dict[str, float]:
    scores = {"top1": top1(probabilities, targets)}
    if multi_label:
        scores["mAP"] = mean_average_precision(probabilities, targets)
    if len(np.unique(targets.argmax(1))) > 1:
        scores["answers"] = float(len(np.unique(probabilities.argmax(1))))  # distinct predicted classes
    return scores


def measure_modes(
    classifier: Classifier, batches: DataLoader[Example], precision: str, *, multi_label: bool
) -> dict[str, float]:
    """Return what `measure` does; of a network with several modes their means, then each by its own name."""
    by_mode = {
        mode: measure(*predict(classifier, batches, precision), multi_label=multi_label) for mode in classifier.modes()
    }
    first, *others = by_mode.values()
    if not others:
        return first
    means = {name: fmean(scores[name] for scores in by_mode.values()) for name in first}
    return means | {f"{name}_{mode}": scores[name] for mode, scores in by_mode.items() for name in first}


def starting_network(
    classifier: str | Path | Classifier,
    classes: tuple[str, ...],
    *,
    multi_label: bool,
    weights: str | Path | None,
    input_size: int | tuple[int, int] | None,
    options: dict[str, Any],
) -> Classifier:
    """Create a classifier for these classes; its `fresh_head` is True where the last layer is random."""
    if isinstance(classifier, Classifier):
        if input_size is not None or options:
            raise InvalidArgument(
                f"{classifier.name} is already built; leave out input_size and options, or give its name"
            )
        return _user_network(classifier, classes, multi_label=multi_label, weights=weights)
    for option in options:
        if option in signature(create_classifier).parameters:
            raise InvalidArgument(
                f"options must not have {option!r}; it is an argument of its own, or follows from the data"
            )
    folder = saved_folder(classifier)
    data: dict[str, Any] = {"class_names": classes, "multi_label": multi_label}
    if folder is None:
        new_head, known = None, None  # by the number of classes, all that is known of a plain file
        if weights is not None and Path(weights).name == WEIGHTS and saved_folder(Path(weights).parent) is not None:
            known = read_settings(Path(weights).parent, for_weights=True)
            new_head = True if known.class_names != classes else None  # the same classes may have another kind of head
        network = create_classifier(
            classifier, weights=weights, new_head=new_head, input_size=input_size, **data, **options
        )
        if known is not None and known.options.get("stride_on_1x1") != network.options.get("stride_on_1x1"):
            # They would fit all the same, and predict nonsense.
            raise InvalidArgument(
                f"{weights} are of {known.name}, whose bottlenecks have their stride on another convolution than those "
                f"of {network.name}; give both with _v1 in the name, or both without"
            )
        return network
    if weights is not None or options:
        raise InvalidArgument(f"{classifier} is a saved classifier with weights and options of its own; leave both out")
    saved = read_settings(folder)
    network = create_classifier(saved.source, preprocessing=saved.preprocessing, **data, **saved.options)
    network.name = saved.name
    state = read_state(folder / WEIGHTS)
    fit_weights(network, state, where=str(folder / WEIGHTS), new_head=saved.class_names != classes)
    network.preprocessing = saved.preprocessing
    if input_size is not None:
        set_input_size(network, input_size)
    return network


def _user_network(
    classifier: Classifier, classes: tuple[str, ...], *, multi_label: bool, weights: str | Path | None
) -> Classifier:
    if classifier.num_classes != len(classes):
        raise InvalidArgument(
            f"{classifier.name} has {classifier.num_classes} classes, the data {len(classes)} "
            f"({', '.join(classes[:5])}, ...); give a network with as many outputs"
        )
    if classifier.class_names not in (classes, numbered_names(len(classes))):
        pairs = enumerate(zip(classifier.class_names, classes, strict=True))
        number, name, wanted = next((number, name, wanted) for number, (name, wanted) in pairs if name != wanted)
        raise InvalidArgument(
            f"{classifier.name} calls class {number} {name!r}, the data {wanted!r}; "
            "give the data a class list in the network's order, or the network no names"
        )
    if classifier.options.get("outputs") == "probabilities":
        raise InvalidArgument(f"{classifier.name} returns probabilities; training needs its logits")
    classifier.class_names, classifier.fresh_head = classes, False
    classifier.activation = "sigmoid" if multi_label else "softmax"
    if weights is not None:
        fit_weights(classifier, read_state(weights), where=str(weights))
    return classifier
