"""Create classifiers by name, save them and load them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from sosampler._util.files import load_json, write_text
from sosampler._util.hardware import check_device
from sosampler._util.validation import one_of
from sosampler.classifiers.any_precision import AnyPrecisionClassifier, build_any_precision, from_plain
from sosampler.classifiers.base import INT8, PRECISIONS, Classifier, read_classes, read_names
from sosampler.classifiers.huggingface import build_huggingface, config_from_dict
from sosampler.classifiers.nets.resnet3d import SlowOnly, inflate_resnet50
from sosampler.classifiers.pooled import FrameExitClassifier, build_timm, fit_size, import_timm
from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from sosampler.classifiers.spacetime import build_i3d, build_slowonly, build_torchvision, build_x3d, torchvision_names
from sosampler.classifiers.weights import (
    State,
    check_network_size,
    classes_of,
    from_frameexit_release,
    is_frameexit_release,
    load_weights,
    read_state,
    without_head,
    write_state,
)
from sosampler.errors import InvalidArgument, WeightsError, first_line

CONFIG, WEIGHTS, INT8_MODEL = "config.json", "model.safetensors", "model.int8.onnx"
PRETRAINED = "pretrained"
KIND = "sosampler classifier"  # in config.json; Hugging Face folders have none


# Input of ResNet-50 in the paper and FrameExit: short side 224, centre crop.
_RESNET_INPUT = Preprocessing(size=(224, 224), resize=224)


@dataclass(frozen=True)
class _Builder:
    """A function that builds classifiers, and the options it takes besides the common ones."""

    build: Callable[..., Classifier]
    options: tuple[str, ...] = ()
    downloads: bool = False  # whether weights="pretrained" works

    def __call__(self, name: Any, num_classes: int | None, options: dict[str, Any]) -> Classifier:
        for option in options:
            if option not in self.options:
                allowed = ", ".join(self.options) or "none"
                raise InvalidArgument(f"classifier {name!r} has no option {option!r}; choose from: {allowed}")
        return self.build(num_classes=num_classes, **options)

    def bound(self, *arguments: Any, **keywords: Any) -> _Builder:
        return replace(self, build=partial(self.build, *arguments, **keywords))


_TIMM = _Builder(build_timm, ("head", "stride_on_1x1", "drop_rate", "exit_frames"), downloads=True)
_ANY_PRECISION = _Builder(build_any_precision, ("bits", "clip", "stride_on_1x1", "drop_rate"), downloads=True)
_HUGGING_FACE = _Builder(build_huggingface, ("temporal", "num_frames", "revision"), downloads=True)

_NAMED = {
    "resnet50": _TIMM.bound("resnet50", name="resnet50", preprocessing=_RESNET_INPUT),
    "resnet50_v1": _TIMM.bound("resnet50", name="resnet50_v1", preprocessing=_RESNET_INPUT, stride_on_1x1=True),
    "any_precision_resnet50": _ANY_PRECISION.bound(
        "resnet50", name="any_precision_resnet50", preprocessing=_RESNET_INPUT
    ),
    "any_precision_resnet50_v1": _ANY_PRECISION.bound(
        "resnet50", name="any_precision_resnet50_v1", preprocessing=_RESNET_INPUT, stride_on_1x1=True
    ),
    "timesformer": _HUGGING_FACE,
    "slowonly_r50": _Builder(build_slowonly, ("stride_on_1x1",)),
    "x3d_s": _Builder(build_x3d),
    "i3d": _Builder(build_i3d),
}
_FAMILIES = {
    "timm": _TIMM,
    "any_precision": _ANY_PRECISION,
    "torchvision": _Builder(build_torchvision, downloads=True),
    "hf": _HUGGING_FACE,
}


def list_classifiers(pattern: str = "*") -> list[str]:
    """List the names that `create_classifier` takes, by a pattern such as "*50*".

    timm's names are listed if the pattern starts with "timm:"; every id on the Hugging Face hub works as "hf:...".

    Examples:
        >>> list_classifiers("*50*")
        ['resnet50', 'resnet50_v1', 'any_precision_resnet50', 'any_precision_resnet50_v1', 'slowonly_r50']
    """
    names = [*_NAMED, *(f"torchvision:{name}" for name in torchvision_names())]
    if pattern.startswith("timm:"):
        names = [f"timm:{name}" for name in import_timm().list_models(pattern.removeprefix("timm:"))]
    return [name for name in names if fnmatchcase(name, pattern)]


def create_classifier(
    name: Any,
    *,
    num_classes: int | None = None,
    class_names: Sequence[str] | str | Path | None = None,
    weights: str | Path | None = None,
    new_head: bool | None = False,
    multi_label: bool | None = None,
    input_size: int | tuple[int, int] | None = None,
    preprocessing: Preprocessing | None = None,
    device: str | None = None,
    precision: str | None = None,
    **options: Any,
) -> Classifier:
    """Create a frozen classifier by name.

    Args:
        name: one of `list_classifiers()`, "timm:NAME", "any_precision:NAME" (of a ResNet of timm), "torchvision:NAME",
            "hf:FOLDER or HUB ID", a transformers config, or a folder of `train_classifier` or `save_classifier`.
        num_classes, class_names: of the head; names as a list, or a text file with one per line. By default those of
            the weights file, or the 1000 of ImageNet and the 400 of Kinetics.
        weights: a .safetensors or torch file, or "pretrained" to download those of timm or torchvision.
        new_head: load all but the last layer, for fine-tuning on other classes; None does so only if the numbers of
            classes differ. The attribute `fresh_head` is True then.
        multi_label: sigmoid instead of softmax.
        input_size: height and width, if not the network's default.
        preprocessing: replaces the network's default.
        device: "cpu", "cuda", ...
        precision: "float32" (the default), "bfloat16" or "float16" for autocast.
        options: of the family: head="mean"|"frameexit", stride_on_1x1, drop_rate for 2-D networks, exit_frames for a
            checkpoint of FrameExit's authors (whose classifier for so many frames is loaded, by default the last);
            bits=32|4|2, clip for any-precision ones, bits also for a saved one; temporal="linear"|"nearest",
            num_frames for TimeSformer.

    Examples:
        >>> import torch
        >>> import sosampler as so
        >>> clf = so.create_classifier("timm:test_resnet", class_names=["ant", "bee"], input_size=32)
        >>> clf.num_classes, clf.preprocessing.size
        (2, (32, 32))
        >>> clf.clip_probs(torch.zeros(1, 6, 3, 48, 64, dtype=torch.uint8)).shape  # one clip of six frames
        torch.Size([1, 2])
    """
    target = None if device is None else check_device(device)
    saved = saved_folder(name)
    if saved is not None:
        bits = options.pop("bits", None)
        given = {"num_classes": num_classes, "weights": weights, "class_names": class_names, **options}
        for option, value in given.items():
            if value is not None:
                raise InvalidArgument(
                    f"{name} is a saved classifier with its own {option}; leave {option} out, or name the network"
                )
        classifier = _from_folder(saved)
        if bits is not None:
            if not isinstance(classifier, AnyPrecisionClassifier):
                raise InvalidArgument(f"{name} is a saved {classifier.name}, which has one precision; leave bits out")
            classifier.set_bits(bits)
    else:
        num_classes, names = read_classes(num_classes, class_names)
        classifier = _from_name(name, num_classes, weights, new_head, input_size, options)
        classifier.class_names = names or classifier.class_names
    if multi_label is not None:
        classifier.activation = "sigmoid" if multi_label else "softmax"
    if preprocessing is not None:
        classifier.preprocessing = preprocessing
    if input_size is not None or preprocessing is not None:
        set_input_size(classifier, input_size)
    if precision is not None:
        classifier.precision = one_of("precision", precision, PRECISIONS)
    return classifier if target is None else classifier.to(target)


def _from_name(
    name: Any,
    num_classes: int | None,
    weights: str | Path | None,
    new_head: bool | None,
    input_size: int | tuple[int, int] | None,
    options: dict[str, Any],
) -> Classifier:
    build = _builder(name, new_head)
    if weights == PRETRAINED:
        if not build.downloads:
            raise InvalidArgument(f"{name} has no weights to download; give a file with weights=")
        build = build.bound(pretrained=True)
    state = None if weights is None or weights == PRETRAINED else read_state(weights)
    classifier = build(name, num_classes, options)
    released = state is not None and is_frameexit_release(state)
    if released and not isinstance(classifier, FrameExitClassifier):
        raise WeightsError(f"{weights}: is a checkpoint of FrameExit; give head='frameexit'")
    if "exit_frames" in options and not released:
        raise InvalidArgument(
            "exit_frames is for a checkpoint of FrameExit's authors; give it as weights=, or leave it out"
        )
    if state is not None:
        saved_classes = classes_of(_translate_names(classifier, state), classifier.head_names())
        if num_classes is None and not new_head and saved_classes not in (None, classifier.num_classes):
            classifier = build(name, saved_classes, options)
        if new_head is None:
            new_head = saved_classes != classifier.num_classes
        if input_size is not None and not _same_shapes(classifier, state):
            # Position embeddings may have been trained at that size; otherwise they are resized when loaded.
            other = build(name, classifier.num_classes, options)
            set_input_size(other, input_size)
            classifier = other if _same_shapes(other, state) else classifier
        fit_weights(classifier, state, where=str(weights), new_head=new_head)
    return classifier.freeze()


def fit_weights(classifier: Classifier, state: State, *, where: str, new_head: bool = False) -> None:
    """Load a state; that of a plain 2-D network also fits the backbone of a FrameExit head, a ResNet-50's SlowOnly.

    So does that of a ResNet its any-precision form, and a checkpoint that FrameExit's authors released, with its head.
    """
    translated = _translate_names(classifier, state)
    if isinstance(classifier.net, SlowOnly) and translated is not state:  # trained with ImageNet's normalisation
        classifier.preprocessing = replace(classifier.preprocessing, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    load_weights(classifier.net, translated, where=where, head=classifier.head_names(), new_head=new_head)
    classifier.fresh_head = new_head


def _same_shapes(classifier: Classifier, state: State) -> bool:
    """Return whether all tensors of a state but its head have the shapes of the network."""
    states = classifier.net.state_dict(), _translate_names(classifier, state)
    current, given = (without_head(each, classifier.head_names()) for each in states)
    return all(tensor.shape == current[key].shape for key, tensor in given.items() if key in current)


def _translate_names(classifier: Classifier, state: State) -> State:
    """Rename 2-D weights to the names of a classifier that is built on them; return others unchanged."""
    if isinstance(classifier.net, SlowOnly) and "layer1.0.conv1.weight" in state:
        return inflate_resnet50(state)
    if isinstance(classifier, AnyPrecisionClassifier):
        return from_plain(classifier, state)
    if isinstance(classifier, FrameExitClassifier) and is_frameexit_release(state):
        return from_frameexit_release(state, classifier.options.get("exit_frames"))
    if isinstance(classifier, FrameExitClassifier) and not any(key.startswith("backbone.") for key in state):
        return {f"backbone.{key}": tensor for key, tensor in state.items()}
    return state


def set_input_size(classifier: Classifier, size: int | tuple[int, int] | None = None) -> None:
    """Set another height and width, or those of the preprocessing; raise an error if the network cannot take them."""
    if size is not None:
        classifier.preprocessing = classifier.preprocessing.with_size(size)
    net = getattr(classifier.net, "backbone", classifier.net)
    trial = partial(classifier.gmacs, classifier.length.at_least)
    fit_size(net, classifier.preprocessing.size, trial, classifier.name)


def _builder(name: Any, new_head: bool | None = False) -> _Builder:
    if name is None or isinstance(name, Path):
        raise InvalidArgument(f"classifier {str(name)!r} is not the folder of a saved classifier; give one, or a name")
    if not isinstance(name, str):
        return _HUGGING_FACE.bound(name)  # a transformers config, which it checks
    if name in _NAMED:
        return _NAMED[name]
    family, _, variant = name.partition(":")
    if family in _FAMILIES and variant:
        return _FAMILIES[family].bound(variant, **({"new_head": new_head} if family == "hf" else {}))
    raise InvalidArgument(
        f"classifier {name!r} is unknown; choose one of {', '.join(_NAMED)}, timm:NAME, any_precision:NAME, "
        "torchvision:NAME, hf:FOLDER or HUB ID, or the folder of a saved classifier; for a network of your own use "
        "so.wrap_classifier"
    )


# ---- saved classifiers


def save_classifier(classifier: Classifier, folder: str | Path, *, state: State | None = None) -> Path:
    """Write config.json and model.safetensors, from which `create_classifier(folder)` loads the same classifier.

    `state` replaces the classifier's current weights.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_state(folder / WEIGHTS, classifier.net.state_dict() if state is None else state)
    write_text(folder / CONFIG, json.dumps({"kind": KIND, **classifier.settings()}, indent=1) + "\n")
    return folder


def saved_folder(name: Any) -> Path | None:
    """Return the folder if `name` is that of a saved classifier, else None."""
    if not isinstance(name, (str, Path)) or name in _NAMED:
        return None
    folder = Path(name)
    return folder if (folder / CONFIG).is_file() else None


@dataclass(frozen=True)
class SavedSettings:
    """The config.json of a saved classifier."""

    name: str
    source: Any  # its name, or a transformers config
    class_names: tuple[str, ...]
    multi_label: bool
    preprocessing: Preprocessing
    options: dict[str, Any]


def read_settings(folder: Path, *, for_weights: bool = False) -> SavedSettings:
    """Read the settings of a saved classifier; `for_weights` alone the folder of a wrapped network is accepted too."""
    try:
        config = load_json(folder / CONFIG)
        kind = config.get("kind")
    except (ValueError, AttributeError) as error:
        raise WeightsError(f"{folder / CONFIG}: is not the JSON of a classifier ({error}); save it again") from error
    if kind != KIND:
        raise InvalidArgument(
            f"{folder}: is not a classifier that sosampler saved; for a Hugging Face folder give hf:{folder}"
        )
    try:
        name, options = config["name"], dict(config["options"])
        preprocessing, multi_label = Preprocessing(**config["preprocessing"]), bool(config["multi_label"])
        class_names = read_names(list(config["class_names"]))
    except (KeyError, TypeError) as error:
        raise WeightsError(f"{folder / CONFIG}: {error} is missing or wrong; save the classifier again") from error
    except ValueError as error:
        raise WeightsError(f"{folder / CONFIG}: {first_line(error)}; save the classifier again") from error
    if "layout" in options and not for_weights:
        raise InvalidArgument(
            f"{folder}: holds the weights of a wrapped network {name!r}, which only your own code can build; "
            f"build it, load {WEIGHTS} and wrap it again"
        )
    source: Any = name
    if "hf_config" in options:
        source = config_from_dict(options.pop("hf_config"), str(folder / CONFIG))
    elif not isinstance(name, str) or name.startswith("hf:"):  # which would be fetched
        raise WeightsError(f"{folder / CONFIG}: has the name {name!r} but no hf_config; save the classifier again")
    return SavedSettings(name, source, class_names, multi_label, preprocessing, options)


def _from_folder(folder: Path) -> Classifier:
    saved = read_settings(folder)
    build = partial(_builder(saved.source), saved.name, len(saved.class_names), saved.options)
    weights = folder / WEIGHTS
    check_network_size(lambda: build().net, weights.stat().st_size if weights.is_file() else 0, folder / CONFIG)
    classifier = build()
    classifier.name, classifier.class_names = saved.name, saved.class_names
    classifier.preprocessing = saved.preprocessing
    set_input_size(classifier)
    fit_weights(classifier, read_state(folder / WEIGHTS, names_as_they_are=True), where=str(folder / WEIGHTS))
    classifier.activation = "sigmoid" if saved.multi_label else "softmax"
    classifier.folder = folder
    return classifier.freeze()


def classifier_identity(classifier: Any, precision: str | None) -> list[Any]:
    """Return name, fingerprint (if it has one), digest of the int8 network (if that is used) and class names."""
    fingerprint = getattr(classifier, "fingerprint", None)
    identity = [classifier.name, None if fingerprint is None else fingerprint()]
    if precision == INT8:  # other calibration frames give another network from the same weights
        identity.append(hashlib.sha256((Path(classifier.folder) / INT8_MODEL).read_bytes()).hexdigest()[:16])
    return [*identity, *classifier.class_names]
