"""The network that training starts from: by name with or without weights, a saved one, or a user's own."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch

from sosampler.classifiers.base import Classifier
from sosampler.classifiers.labels import numbered_names
from sosampler.classifiers.registry import (
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
from sosampler.errors import InvalidArgument
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
