"""What every classifier is: a frozen network with preprocessing, class names and an activation."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sosampler._util.files import read_text
from sosampler._util.hardware import autocast
from sosampler._util.limits import check_count
from sosampler._util.validation import check_int
from sosampler.classifiers.preprocessing import Preprocessing, check_frames
from sosampler.errors import ClassifierError, InvalidArgument
from sosampler.video.candidates import segment_centres

log = logging.getLogger("sosampler")
Names = Sequence[str] | str | Path  # of classes: a list, or a text file with one per line


def numbered_names(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))


def names_for(count: int, dataset: str) -> tuple[str, ...]:
    """Return torchvision's names of the 1000 classes of "imagenet" or the 400 of "kinetics"; numbers if not as many."""
    from torchvision.models import ResNet50_Weights, video

    weights = {"imagenet": ResNet50_Weights, "kinetics": video.R3D_18_Weights}[dataset]
    names = tuple(weights.DEFAULT.meta["categories"])
    return names if len(names) == count else numbered_names(count)


def read_names(given: Names) -> tuple[str, ...]:
    """Return class names from a list, or from a text file with one name per line."""
    if isinstance(given, (str, Path)):
        if not Path(given).is_file():
            raise InvalidArgument(
                f"class_names={str(given)!r}: no such file; give a list, or a file with one name per line"
            )
        given = [line.strip() for line in read_text(Path(given)).splitlines() if line.strip()]
    names = list(given)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument(f"class_names={names!r} must be strings that are not empty; give at least one")
    if len(set(names)) < len(names):
        repeated = min(name for name, count in Counter(names).items() if count > 1)
        raise InvalidArgument(f"class_names holds {repeated!r} more than once; give each class a name of its own")
    return tuple(names)


def read_classes(num_classes: int | None, class_names: Names | None) -> tuple[int | None, tuple[str, ...] | None]:
    """Return the number of classes and their names; None for what is not given."""
    if num_classes is not None:
        num_classes = check_count("num_classes", num_classes, "MAX_CONFIG_NUMBER")
    if class_names is None:
        return num_classes, None
    names = read_names(class_names)
    if num_classes not in (None, len(names)):
        raise InvalidArgument(f"num_classes={num_classes} but {len(names)} class names are given; give one of the two")
    return len(names), names


@dataclass(frozen=True)
class ClipLength:
    """The number of frames per clip that a network takes; longer clips are refused, frames of shorter ones repeated."""

    at_least: int = 1
    at_most: int | None = None
    multiple_of: int = 1

    def fitted(self, num_frames: int, name: str) -> int:
        """Return how many frames the network gets for a clip of `num_frames`."""
        if self.at_most is not None and num_frames > self.at_most:
            raise InvalidArgument(
                f"{name} takes at most {self.at_most} frames per clip but {num_frames} were given; select fewer frames"
            )
        if num_frames < 1:
            raise InvalidArgument(f"{name} was given {num_frames} frames; give at least 1")
        return -(-max(num_frames, self.at_least) // self.multiple_of) * self.multiple_of

    def positions(self, num_frames: int, name: str) -> list[int] | None:
        """Return the frame index for each frame of the network's clip; None if the clip needs no change.

        >>> ClipLength(at_least=8).positions(3, "net")
        [0, 0, 0, 1, 1, 2, 2, 2]
        """
        length = self.fitted(num_frames, name)
        return None if length == num_frames else segment_centres(num_frames, length).tolist()

    def note(self, name: str) -> str | None:
        """Describe the limits for a user."""
        if self.at_most == self.at_least:
            return f"{name} takes exactly {self.at_least} frames: fewer are repeated evenly, more are refused"
        limits = {
            f"fewer than {self.at_least} frames are repeated evenly": self.at_least > 1,
            f"frames are repeated evenly up to a multiple of {self.multiple_of}": self.multiple_of > 1,
            f"more than {self.at_most} frames are refused": self.at_most is not None,
        }
        return f"{name}: {', '.join(text for text in limits if limits[text])}" if any(limits.values()) else None


PRECISIONS = ("float32", "bfloat16", "float16")
INT8 = "int8"  # of networks written by `quantize_classifier`, which engines and pipelines run on the CPU
BATCH_FRAMES = 256  # per forward pass, so that memory stays bounded


@runtime_checkable
class VideoClassifier(Protocol):
    """What the package needs of a classifier; any object with these members works."""

    name: str
    preprocessing: Preprocessing
    class_names: tuple[str, ...]

    def clip_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return probabilities [B, C] of B clips of N frames, uint8 [B, N, 3, H, W]."""

    def frame_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return probabilities [B, T, C] of each frame, uint8 [B, T, 3, H, W], as a clip of one."""

    def gmacs(self, num_frames: int) -> float:
        """Return the giga multiply-adds of one clip."""


class Classifier(nn.Module):
    """A frozen network with its preprocessing, class names and activation.

    Subclasses define `clip_logits`. Inputs are uint8 RGB frames of any size; `positions` [B, N] are the frames'
    positions in their video, 0 at the beginning and 1 at the end, for networks that use them (others ignore them).
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        name: str,
        preprocessing: Preprocessing,
        class_names: Sequence[str],
        length: ClipLength | None = None,
        multi_label: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.name = name
        self.preprocessing = preprocessing
        self.class_names = tuple(class_names)
        self.length = length or ClipLength()
        self.activation = "sigmoid" if multi_label else "softmax"
        self.options = dict(options or {})  # further arguments of create_classifier that rebuild it
        self.precision = "float32"
        self.folder: Path | None = None  # where it is saved, with its int8 network if there is one
        self.fresh_head = True  # whether the last layer is random instead of loaded
        self._warned_repeat = False
        self._gmacs: dict[tuple[int, ...], float] = {}
        self.freeze()

    def clip_logits(self, clips: Tensor, positions: Tensor | None = None) -> Tensor:
        """Compute scores [B, C] of normalised float clips [B, N, 3, h, w]; gradients flow."""
        raise NotImplementedError

    @torch.no_grad()
    def clip_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return float32 probabilities [B, C] of B clips of N frames, uint8 [B, N, 3, H, W]."""
        self.eval()  # running statistics must not change
        frames = check_frames(frames)
        positions = check_positions(positions, frames)
        size = max(1, BATCH_FRAMES // self.length.fitted(frames.shape[1], self.name))
        of_parts = None if positions is None else positions.to(self.device).split(size)
        parts = []
        for index, part in enumerate(frames.split(size)):
            scores = self.scores(self._preprocess(part), None if of_parts is None else of_parts[index])
            parts.append(self.probabilities(scores))
        return torch.cat(parts)

    @torch.no_grad()
    def frame_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return float32 probabilities [B, T, C] of each frame, uint8 [B, T, 3, H, W], as a clip of one."""
        frames = check_frames(frames)
        positions = check_positions(positions, frames)
        clips = frames.flatten(0, 1)[:, None]  # [B * T, 1, 3, H, W]
        positions = None if positions is None else positions.flatten(0, 1)[:, None]
        return self.clip_probs(clips, positions).unflatten(0, frames.shape[:2])

    def gmacs(self, num_frames: int) -> float:
        """Return the giga multiply-adds of a clip, including attention, without decoding and resizing."""
        shape = (1, check_int("num_frames", num_frames), 3, *self.preprocessing.size)
        if shape not in self._gmacs:
            self._gmacs[shape] = count_gmacs(self, torch.empty(shape, device="meta"))
        return self._gmacs[shape]

    def forward(self, clips: Tensor, positions: Tensor | None = None) -> Tensor:
        """Compute scores [B, C] of normalised float clips [B, N, 3, h, w], repeated to the network's clip length."""
        indices = self.length.positions(clips.shape[1], self.name)
        if indices is not None:
            if not self._warned_repeat and clips.device.type != "meta":
                self._warned_repeat = True
                text = "%s: clips of %d frames are repeated evenly to the %d that the network takes"
                log.warning(text, self.name, clips.shape[1], len(indices))
            clips = clips[:, indices]
            positions = None if positions is None else positions[:, indices]
        return self.clip_logits(clips, positions)

    def _preprocess(self, frames: Tensor) -> Tensor:
        return self.preprocessing(frames.to(self.device, non_blocking=True))

    def scores(self, clips: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run `forward` in the classifier's precision; return checked float32 scores [B, C]."""
        with autocast(self.device, self.precision):
            scores = self(clips, positions)
        return check_shape(scores, len(clips), self.num_classes, self.name).float()

    def probabilities(self, scores: Tensor) -> Tensor:
        """Turn the network's scores [..., C] into probabilities [..., C]."""
        check_finite(scores.reshape(-1, scores.shape[-1]), self.name)
        return self.activate(scores)

    def activate(self, scores: Tensor) -> Tensor:
        """Turn scores [..., C] into probabilities without a check, which would wait for the device."""
        return activate(scores, self.activation)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def multi_label(self) -> bool:
        return self.activation == "sigmoid"

    @property
    def device(self) -> torch.device:
        return device_of(self)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def notes(self) -> tuple[str, ...]:
        """Limits that a user should know."""
        note = self.length.note(self.name)
        return () if note is None else (note,)

    def modes(self) -> Iterator[str]:
        """Switch to each way in which the network can run, all of which are trained, and yield its name.

        The first is the one whose answers the others learn from. Afterwards it is as before.
        """
        yield ""

    def own_groups(self, lr: float) -> list[dict[str, Any]]:
        """Return groups for an optimiser, of parameters with another rate or decay than the recipe's."""
        return []

    def head_names(self) -> tuple[str, ...]:
        """Return state-dict prefixes of the layers that a new head replaces, the class layer first."""
        return ()

    def freeze(self) -> Classifier:
        """Switch to evaluation mode and turn gradients off."""
        self.requires_grad_(False).eval()
        return self

    def settings(self) -> dict[str, Any]:
        """Return everything but the weights, as plain JSON values."""
        return {
            "name": self.name,
            "class_names": list(self.class_names),
            "multi_label": self.multi_label,
            "preprocessing": self.preprocessing.to_dict(),
            "options": self.options,
        }

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change with weights, preprocessing and all settings that affect outputs.

        Class names, device and precision do not count.
        """
        settings = {key: value for key, value in self.settings().items() if key != "class_names"}
        settings["length"] = asdict(self.length)
        return digest_of(settings, self.net.state_dict())

    def __repr__(self) -> str:
        height, width = self.preprocessing.size
        size = f"{height}x{width}, {self.num_parameters / 1e6:.2f} M parameters"
        return f"{type(self).__name__}({self.name}, {self.num_classes} classes, {size})"


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's tensors; the CPU if it has none."""
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def check_positions(positions: Any, frames: Tensor) -> Tensor | None:
    """Return positions in the video of frames [B, N, ...] as float32 [B, N] in 0..1, or None."""
    if positions is None:
        return None
    positions = torch.as_tensor(positions, dtype=torch.float32)
    if positions.shape != frames.shape[:2]:
        raise InvalidArgument(
            f"positions have shape {list(positions.shape)} but must be {list(frames.shape[:2])}; give one per frame"
        )
    if not bool(((positions >= 0) & (positions <= 1)).all()):
        raise InvalidArgument(
            f"positions run from {float(positions.min()):.3g} to {float(positions.max()):.3g} but must be in 0..1; "
            "give pts_seconds / duration"
        )
    return positions


class Penultimate:
    """The input of a classifier's class layer for single frames, each as a clip of one.

    For 2-D networks that is the pooled map, for TimeSformer the normalised class token. All frames have the same
    position, so that features depend on the content only. Use it inside `watching`; threads do not interfere.
    """

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier
        self._layer = class_layer(classifier)
        self._local = threading.local()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the input of the class layer inside this context."""
        hook = self._layer.register_forward_pre_hook(lambda _, inputs: setattr(self._local, "features", inputs[0]))
        try:
            yield
        finally:
            hook.remove()

    def __call__(self, frames: Tensor) -> Tensor:
        """Return float32 features [F, D] on the CPU for uint8 frames [F, 3, H, W]."""
        return self.of_clips(self.classifier.preprocessing(frames[:, None].to(self.classifier.device)))

    @torch.no_grad()
    def of_clips(self, clips: Tensor) -> Tensor:
        """Return float32 features [F, D] on the CPU for normalised clips of one frame, [F, 1, 3, h, w]."""
        classifier = self.classifier.eval()
        self._local.features = None
        with autocast(classifier.device, classifier.precision):
            classifier(clips)
        return self.recorded(len(clips))

    def recorded(self, count: int) -> Tensor:
        """Return the features [F, D] of the last pass of the classifier in this thread, over `count` frames."""
        classifier = self.classifier
        features, self._local.features = getattr(self._local, "features", None), None
        if features is None:
            raise ClassifierError(f"{classifier.name} does not use its class layer; give a network that does")
        if features.ndim < 2 or features.shape[0] != count:
            raise ClassifierError(
                f"{classifier.name}: the input of its class layer has shape {list(features.shape)} for {count} "
                "frames but must have one row per frame; give another network"
            )
        # Linear: [F, ..., D]; convolutions: [F, D, ...]. Average over any remaining time and space.
        rows = features.float() if hasattr(self._layer, "out_features") else features.float().movedim(1, -1)
        return check_finite(rows.reshape(count, -1, rows.shape[-1]).mean(1).cpu(), classifier.name)


def class_layer(classifier: Any) -> nn.Module:
    """Return the class layer: the first of `head_names`, else the last layer run that has one output per class."""
    if not isinstance(classifier, Classifier):
        raise InvalidArgument(
            f"a {type(classifier).__name__} shows no features; give a classifier of create_classifier, or wrap your "
            "network with so.wrap_classifier"
        )
    if names := classifier.head_names():
        return classifier.net.get_submodule(names[0])
    used: list[nn.Module] = []
    hooks = [
        layer.register_forward_hook(lambda module, *_: used.append(module))
        for layer in classifier.net.modules()
        if classifier.num_classes in (getattr(layer, "out_features", None), getattr(layer, "out_channels", None))
    ]
    try:
        classifier.clip_probs(torch.zeros(1, 1, 3, *classifier.preprocessing.size, dtype=torch.uint8))
    finally:
        for hook in hooks:
            hook.remove()
    if not used:
        raise InvalidArgument(
            f"{classifier.name} has no layer with {classifier.num_classes} outputs, whose input would be the features; "
            "give a network that ends in a Linear or a convolution over the classes"
        )
    return used[-1]


@torch.no_grad()
def count_gmacs(module: nn.Module, *inputs: Tensor) -> float:
    """Return the giga multiply-adds of `module(*inputs)`: convolutions, matrix products and attention.

    Runs on the meta device, shapes only; a module that reads values on its own device. One multiply-add counts once
    (papers on video call it "GFLOPs"); additions, normalisations and activations are not counted.
    """
    training = module.training
    module.eval()
    try:
        meta = {name: tensor.to("meta") for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        return _count(lambda: functional_call(module, meta, tuple(tensor.to("meta") for tensor in inputs)))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):  # it reads values
        return _count(lambda: module(*(torch.zeros_like(tensor, device=device_of(module)) for tensor in inputs)))
    finally:
        module.train(training)


def _count(run: Callable[[], Any]) -> float:
    # Plain attention is two batched products, which every version of the counter supports.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops()) / 2e9


def to_channels_last(net: nn.Module) -> list[Tensor]:
    """Store the weights of 2-D convolutions channels last, which is faster; return the tensors that changed."""
    # `net.to(memory_format=...)` would refuse those of 3-D convolutions.
    tensors = [tensor for tensor in (*net.parameters(), *net.buffers()) if tensor.ndim == 4 and tensor.is_contiguous()]
    for tensor in tensors:
        tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    return tensors


# ---- outputs


def activate(logits: Tensor, activation: str) -> Tensor:
    """Turn logits [..., C] into probabilities [..., C] in float32."""
    logits = logits.float()
    return logits.softmax(-1) if activation == "softmax" else logits.sigmoid()


def unwrap_output(output: Any, name: str) -> Tensor:
    """Return a module's scores: a tensor, the `logits` of an object or dict, or the first item of a tuple."""
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor):
        raise ClassifierError(
            f"{name} returned a {type(output).__name__}; it must return a tensor [B, classes], "
            "an object or dict with `logits`, or a tuple that starts with one"
        )
    return first


def check_shape(scores: Tensor, batch: int, num_classes: int, name: str) -> Tensor:
    """Return scores, which must have the shape [B, C]."""
    if scores.ndim != 2 or scores.shape[0] != batch:
        raise ClassifierError(
            f"{name} returned shape {list(scores.shape)} for {batch} clips; it must return [{batch}, {num_classes}]: "
            "one row of class scores per clip"
        )
    if scores.shape[1] != num_classes:
        raise ClassifierError(
            f"{name} returned {scores.shape[1]} scores per clip but {num_classes} classes have names; "
            "give as many class names (or num_classes) as the network has outputs"
        )
    return scores


def check_finite(scores: Tensor, name: str) -> Tensor:
    """Return scores [B, ...], which must be neither NaN nor infinite."""
    bad = ~torch.isfinite(scores).flatten(1).all(1)
    if bad.any():
        raise ClassifierError(
            f"{name} returned NaN or infinite scores for {int(bad.sum())} of {len(bad)} clips "
            f"(the first is number {int(bad.nonzero()[0])} of its batch); check its weights and its normalisation, "
            "or run it with precision='float32'"
        )
    return scores


def digest_of(settings: dict[str, Any], state: dict[str, Tensor]) -> str:
    """Return 16 hexadecimal digits that change with JSON settings and with tensors."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for key, tensor in sorted(state.items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def label_shares(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return labels as a distribution over classes, [B, C], equal for all true labels of a video."""
    true = labels.to(dtype)
    return true / true.sum(dim=-1, keepdim=True)
