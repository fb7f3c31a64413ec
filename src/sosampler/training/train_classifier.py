"""`train_classifier`: fine-tune any classifier on pictures, videos or a bank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sosampler.checks import one_of
from sosampler.classifiers.base import PRECISIONS, Classifier
from sosampler.classifiers.registry import WEIGHTS, create_classifier, fit_weights
from sosampler.classifiers.weights import read_state
from sosampler.classifiers.wrap import WrappedClassifier
from sosampler.data.bank import Bank
from sosampler.data.manifest import Manifest
from sosampler.errors import InvalidArgument
from sosampler.training.checkpoints import RunFolder
from sosampler.training.classifier_data import ClassifierData, open_data
from sosampler.training.classifier_loop import ClassifierLoop, main_metric, measure, predict
from sosampler.training.examples import TrainingBatches, evaluation_batches
from sosampler.training.recipe import ClassifierRecipe


@dataclass(frozen=True)
class TrainedClassifier:
    """What came out of `train_classifier`: the best weights by dev, and how good they are."""

    classifier: Classifier
    folder: Path
    result: dict[str, Any]

    def __repr__(self) -> str:
        return f"TrainedClassifier({self.folder}, {self.result['metric']}, dev {self.result['dev']})"


def train_classifier(
    data: str | Path | Manifest | Bank,
    classifier: str | Classifier = "resnet50",
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
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> TrainedClassifier:
    """Fine-tune a classifier and keep the weights that are best on the dev split.

    Args:
        data: a folder with one folder a class (of pictures or videos; `train`, `dev`, `test` folders may stand above
            them), a CSV or JSONL manifest, or a bank. Where there is no dev split it is carved out of train.
        classifier: a name for `create_classifier`, or a classifier whose classes are those of the data.
        out: folder for the best weights (`create_classifier(out)` loads them), the log and the result. Run again with
            the same settings, a killed run goes on.
        weights: to start from; the head is fresh unless the file's head has as many classes as the data. SlowOnly
            also starts from a 2-D ResNet-50.
        input_size: height and width of the classifier's input.
        recipe, settings: a `ClassifierRecipe`, and single fields of it: epochs=30, lr=0.02, ...
        device: default: the GPU if there is one.
        precision: "float32", "bfloat16" or "float16"; default: bfloat16 on GPUs that have it.
        workers: processes that read examples; default: up to 8.
        overwrite: start again in a folder that holds another run.
        options: of the classifier's family, as for `create_classifier`.
        say: is given a line of text for each epoch.
    """
    recipe = _recipe(recipe, settings)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    precision = _precision(device, precision)
    run = RunFolder(Path(out))
    workers = min(8, os.cpu_count() or 1) if workers is None else workers
    opened = open_data(data, recipe=recipe, frames_folder=run.folder / "frames", workers=workers)
    _check_data(opened, data)
    if opened.kind == "pictures":
        recipe = replace(recipe, num_frames=1)
    torch.manual_seed(recipe.seed)  # the fresh head
    network, head = _network(classifier, opened, weights, input_size, options or {})
    recipe = recipe.filled(transformer=_is_transformer(network))
    if overwrite:
        run.clear()
    run.begin(
        {
            "data": str(data) if isinstance(data, (str, Path)) else repr(data),
            "sizes": opened.sizes,
            "classifier": network.settings(),
            "weights": None if weights is None else str(weights),
            "recipe": recipe.to_dict(),
            "precision": precision,
        }
    )
    finished = run.result()
    if finished is not None:
        say(f"{run.folder}: this run is finished")
        return TrainedClassifier(_best_of(network, run), run.folder, finished)
    say(
        f"{network!r} with {head} head, on {device} in {precision}: "
        f"{opened.sizes['train']} {opened.kind} to train on, {opened.sizes['dev']} dev, {opened.sizes['test']} test"
    )
    network.to(device)
    if device != "cpu":
        network.to(memory_format=torch.channels_last)
    return _train(network, opened, recipe, run, precision=precision, workers=workers, head=head, say=say)


def _train(
    network: Classifier,
    data: ClassifierData,
    recipe: ClassifierRecipe,
    run: RunFolder,
    *,
    precision: str,
    workers: int,
    head: str,
    say: Callable[[str], None],
) -> TrainedClassifier:
    train, dev = (data.examples(split, network.preprocessing, recipe) for split in ("train", "dev"))
    batches = TrainingBatches(train, workers=workers, pin_memory=network.device.type == "cuda")
    dev_batches = evaluation_batches(dev, batch_size=recipe.batch_size, workers=min(workers, 4))
    loop = ClassifierLoop(network, recipe, batches, dev_batches, run, precision=precision, say=say)
    try:
        loop.train()
        best = _best_of(network, run)
        scores: dict[str, Any] = {"dev": loop.best["score"]}
        if data.sizes["test"]:
            test = data.examples("test", network.preprocessing, recipe)
            found = predict(best, evaluation_batches(test, batch_size=recipe.batch_size, workers=workers), precision)
            scores["test"] = measure(*found, multi_label=best.multi_label)[main_metric(best)]
    except InvalidArgument as error:
        # A worker process wraps what it raised into its traceback; the last line is the sentence.
        raise InvalidArgument(str(error).strip().splitlines()[-1].split("InvalidArgument: ")[-1]) from error
    result = {
        "metric": main_metric(best),
        **scores,
        "best_epoch": loop.best["epoch"],
        "epochs": recipe.epochs,
        "head": head,
        "sizes": data.sizes,
        "num_classes": best.num_classes,
        "fingerprint": best.fingerprint(),
    }
    run.finish(result)
    shown = ", ".join(f"{name} {100 * scores[name]:.2f} %" for name in scores)
    say(f"best of epoch {loop.best['epoch'] + 1}: {main_metric(best)} {shown}; written to {run.folder}")
    return TrainedClassifier(best, run.folder, result)


def _recipe(recipe: ClassifierRecipe | None, settings: dict[str, Any]) -> ClassifierRecipe:
    recipe = recipe or ClassifierRecipe()
    for name in settings:
        if name not in ClassifierRecipe.__dataclass_fields__:
            allowed = ", ".join(ClassifierRecipe.__dataclass_fields__)
            raise InvalidArgument(f"train_classifier has no setting {name!r}; a recipe has: {allowed}")
    return replace(recipe, **settings)


def _precision(device: str, precision: str | None) -> str:
    if precision is not None:
        return one_of("precision", precision, PRECISIONS)
    if not device.startswith("cuda"):
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"


def _check_data(data: ClassifierData, source: Any) -> None:
    for split in ("train", "dev"):
        if not data.sizes[split]:
            raise InvalidArgument(f"{source}: no examples in the {split} split; give some, or a dev_share above 0")
    if len(data.classes) < 2 and not data.multi_label:
        raise InvalidArgument(f"{source}: has {len(data.classes)} class; a classifier needs at least 2 to tell apart")


def _network(
    classifier: str | Classifier,
    data: ClassifierData,
    weights: str | Path | None,
    input_size: int | tuple[int, int] | None,
    options: dict[str, Any],
) -> tuple[Classifier, str]:
    """The network to train, and whether its head is fresh or that of the weights."""
    if isinstance(classifier, Classifier):
        if classifier.num_classes != len(data.classes):
            raise InvalidArgument(
                f"{classifier.name} has {classifier.num_classes} classes, the data {len(data.classes)} "
                f"({', '.join(data.classes[:5])}, ...); give a network with as many outputs"
            )
        if isinstance(classifier, WrappedClassifier) and classifier.outputs == "probabilities":
            raise InvalidArgument(f"{classifier.name} returns probabilities; training needs its logits")
        classifier.class_names = data.classes
        classifier.activation = "sigmoid" if data.multi_label else "softmax"
        if weights is not None:
            fit_weights(classifier, read_state(weights), where=str(weights))
        return classifier, "its own"
    network = create_classifier(
        classifier,
        class_names=data.classes,
        multi_label=data.multi_label,
        input_size=input_size,
        weights=weights,
        new_head=None,
        **options,
    )
    return network, "a fresh" if network.fresh_head else "the old"


def _is_transformer(network: Classifier) -> bool:
    return any(isinstance(module, torch.nn.LayerNorm) for module in network.modules())


def _best_of(network: Classifier, run: RunFolder) -> Classifier:
    """The network with its best weights."""
    fit_weights(network, read_state(run.folder / WEIGHTS), where=str(run.folder / WEIGHTS))
    return network.freeze()
