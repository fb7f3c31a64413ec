"""The network that training starts from: by name with or without weights, a saved one, or a user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from sosampler._util.devices import check_device
from sosampler._util.memory import usable_cores
from sosampler._util.validation import whole_number
from sosampler.bank.bank import Bank
from sosampler.classifiers.base import Classifier, numbered_names
from sosampler.classifiers.cost import to_channels_last
from sosampler.classifiers.factory import (
    WEIGHTS,
    SavedSettings,
    create_classifier,
    fit_weights,
    read_settings,
    saved_folder,
    set_input_size,
)
from sosampler.classifiers.weights import read_state
from sosampler.classifiers.wrap import WrappedClassifier
from sosampler.datasets.manifest import Manifest
from sosampler.errors import InvalidArgument
from sosampler.training.checkpoints import RunFolder
from sosampler.training.classifier_data import ClassifierData, open_source
from sosampler.training.classifier_loop import ClassifierLoop, main_metric, measure, predict
from sosampler.training.examples import TrainingBatches, evaluation_batches
from sosampler.training.optim import settled_precision
from sosampler.training.recipe import ClassifierRecipe

InputSize = int | tuple[int, int] | None


def starting_network(
    classifier: str | Path | Classifier,
    classes: tuple[str, ...],
    *,
    multi_label: bool,
    weights: str | Path | None,
    input_size: InputSize,
    options: dict[str, Any],
) -> Classifier:
    """A classifier for these classes; `fresh_head` tells whether its last layer is random."""
    if isinstance(classifier, Classifier):
        if input_size is not None or options:
            raise InvalidArgument(f"{classifier.name} is built already; leave input_size and options out, or name it")
        return _own_network(classifier, classes, multi_label=multi_label, weights=weights)
    for option in options:
        if option in signature(create_classifier).parameters:
            raise InvalidArgument(f"options cannot hold {option!r}; it is an argument of its own, or follows the data")
    folder = saved_folder(classifier)
    if folder is None:
        if weights is not None and Path(weights).name == WEIGHTS and saved_folder(Path(weights).parent) is not None:
            known = read_settings(Path(weights).parent, for_weights=True).class_names
            new_head = True if known != classes else None  # the same classes may stand behind another kind of head
        else:
            new_head = None  # by the number of classes, all that a plain file tells
        return create_classifier(
            classifier,
            class_names=classes,
            multi_label=multi_label,
            weights=weights,
            new_head=new_head,
            input_size=input_size,
            **options,
        )
    if weights is not None or options:
        raise InvalidArgument(f"{classifier} is a saved classifier and brings its own weights and options")
    return _saved_network(read_settings(folder), folder, classes, multi_label=multi_label, input_size=input_size)


def _own_network(
    classifier: Classifier, classes: tuple[str, ...], *, multi_label: bool, weights: str | Path | None
) -> Classifier:
    if classifier.num_classes != len(classes):
        raise InvalidArgument(
            f"{classifier.name} has {classifier.num_classes} classes, the data {len(classes)} "
            f"({', '.join(classes[:5])}, ...); give a network with as many outputs"
        )
    if classifier.class_names not in (classes, numbered_names(len(classes))):
        place = next(
            i for i, (own, of_data) in enumerate(zip(classifier.class_names, classes, strict=True)) if own != of_data
        )
        raise InvalidArgument(
            f"{classifier.name} calls class {place} {classifier.class_names[place]!r}, the data {classes[place]!r}; "
            "give the data a class list in the network's order, or the network no names"
        )
    if isinstance(classifier, WrappedClassifier) and classifier.outputs == "probabilities":
        raise InvalidArgument(f"{classifier.name} returns probabilities; training needs its logits")
    classifier.class_names, classifier.fresh_head = classes, False
    classifier.activation = "sigmoid" if multi_label else "softmax"
    if weights is not None:
        fit_weights(classifier, read_state(weights), where=str(weights))
    return classifier


def _saved_network(
    saved: SavedSettings, folder: Path, classes: tuple[str, ...], *, multi_label: bool, input_size: InputSize
) -> Classifier:
    """A saved classifier; with other classes it gets a fresh head."""
    network = create_classifier(
        saved.source,
        class_names=classes,
        multi_label=multi_label,
        preprocessing=saved.preprocessing,
        **saved.options,
    )
    network.name = saved.name
    state = read_state(folder / WEIGHTS)
    fit_weights(network, state, where=str(folder / WEIGHTS), new_head=saved.class_names != classes)
    network.preprocessing = saved.preprocessing
    if input_size is not None:
        set_input_size(network, input_size)
    return network


def check_trainable(network: Classifier, recipe: ClassifierRecipe) -> None:
    """What can be told about a recipe before anything is decoded or written."""
    network.length.fitted(recipe.num_frames, network.name)
    if recipe.trainable == "head" and not network.head_names():
        raise InvalidArgument(f"the head of {network.name} is not known; train all of it: trainable='all'")


def is_transformer(network: Classifier) -> bool:
    return any(isinstance(module, torch.nn.LayerNorm) for module in network.modules())


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
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> TrainedClassifier:
    """Fine-tune a classifier and keep the weights that are best on the dev split.

    Args:
        data: a folder with one folder a class (of pictures or videos; `train`, `dev`, `test` folders may stand above
            them), a CSV or JSONL manifest, or a bank. Where there is no dev split it is carved out of train.
        classifier: a name for `create_classifier`, a saved folder, or a classifier whose classes are those of the data.
        out: folder for the best weights (`create_classifier(out)` loads them), the log and the result. Run again with
            the same settings, a killed run goes on.
        weights: to start from; the head is fresh unless the file's head has as many classes as the data. SlowOnly
            also starts from a 2-D ResNet-50.
        input_size: height and width of the classifier's input.
        recipe, settings: a `ClassifierRecipe`, and single fields of it: epochs=30, lr=0.02, ...
        device: default: the GPU if there is one.
        precision: "float32", "bfloat16" or "float16"; default: bfloat16 on GPUs that have it.
        workers: processes that read examples; default: up to 8.
        overwrite: start again in a folder that holds another run; its weights and decoded frames are removed.
        options: of the classifier's family, as for `create_classifier`.
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
    recipe = _recipe(recipe, settings)
    place = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision = settled_precision(place, precision)
    workers = min(8, usable_cores()) if workers is None else whole_number("workers", workers, at_least=0)
    source = open_source(data, recipe)
    source.check()
    if source.kind == "pictures":
        recipe = replace(recipe, num_frames=1)
    recipe = replace(recipe, batch_size=min(recipe.batch_size, source.num_train))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed % 2**63)  # the fresh head, on the CPU
        network = starting_network(
            classifier,
            source.classes,
            multi_label=source.multi_label,
            weights=weights,
            input_size=input_size,
            options=options or {},
        )
    check_trainable(network, recipe)
    recipe = recipe.filled(transformer=is_transformer(network))
    run = RunFolder(Path(out))
    here, there = run.folder.resolve(), source.path.resolve()
    # A folder of classes would take the run for a class; a bank in the run's folder would go with the run.
    is_folder = isinstance(data, (str, Path)) and source.kind != "bank" and there.is_dir()
    if here == there or here in there.parents or (is_folder and there in here.parents):
        raise InvalidArgument(f"out={run.folder} and the data {source.name} lie inside each other; keep them apart")
    if overwrite:
        run.clear()
    run.begin(
        {
            "data": {"kind": source.kind, "path": str(source.path.resolve()), "digest": source.digest()},
            "classifier": network.settings(),
            # A network of the user's own is the user's to build again.
            "start": None if isinstance(classifier, Classifier) else network.fingerprint(),
            "recipe": recipe.to_dict(),
            "precision": precision,
        }
    )
    finished = run.result()
    if finished is not None:
        say(f"{run.folder}: this run is finished")
        return TrainedClassifier(_best_of(network, run), run.folder, finished)
    opened = source.opened(
        network.preprocessing, recipe, frames_folder=run.frames, workers=workers, check=not run.has_checkpoint
    )
    head = "a fresh head" if network.fresh_head else "the head of the weights"
    left_out = f" ({opened.unreadable} videos are unreadable)" if opened.unreadable else ""
    say(
        f"{network!r} with {head}, on {place} in {precision}: {opened.sizes['train']} {source.kind} to train on, "
        f"{opened.sizes['dev']} dev, {opened.sizes['test']} test{left_out}"
    )
    network.to(place)
    if place.type != "cpu":
        to_channels_last(network.net)
    try:
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
            return _train(network, opened, recipe, run, precision=precision, workers=workers, say=say)
    finally:
        network.freeze()


def _train(
    network: Classifier,
    data: ClassifierData,
    recipe: ClassifierRecipe,
    run: RunFolder,
    *,
    precision: str,
    workers: int,
    say: Callable[[str], None],
) -> TrainedClassifier:
    fresh_head = network.fresh_head
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
        "fresh_head": fresh_head,
        "sizes": data.sizes,
        "unreadable": data.unreadable,
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


def _best_of(network: Classifier, run: RunFolder) -> Classifier:
    """The network with its best weights."""
    fit_weights(network, read_state(run.folder / WEIGHTS, names_as_they_are=True), where=str(run.folder / WEIGHTS))
    return network.freeze()
