"""Names of classes: the well-known lists, and those a user gives."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from sosampler._util.devices import autocast
from sosampler._util.validation import one_of, whole_number
from sosampler.classifiers.cost import count_gmacs
from sosampler.classifiers.outputs import ACTIVATIONS, activate, check_finite, check_shape
from sosampler.classifiers.preprocessing import Preprocessing, check_frames
from sosampler.errors import InvalidArgument
from sosampler.video.candidates import segment_centres


def imagenet_names() -> tuple[str, ...]:
    """The 1000 classes of ImageNet-1k in their usual order, as torchvision names them."""
    from torchvision.models import ResNet50_Weights

    return tuple(ResNet50_Weights.DEFAULT.meta["categories"])


def kinetics400_names() -> tuple[str, ...]:
    """The 400 classes of Kinetics-400 in alphabetical order, as torchvision names them."""
    from torchvision.models.video import R3D_18_Weights

    return tuple(R3D_18_Weights.DEFAULT.meta["categories"])


def numbered_names(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))


def names_for(count: int, known: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """The known list where it has as many classes, numbers otherwise."""
    names = known()
    return names if len(names) == count else numbered_names(count)


def read_names(given: Sequence[str] | str | Path) -> tuple[str, ...]:
    """Class names: a list of them, or a text file with one a line."""
    if isinstance(given, (str, Path)):
        path = Path(given)
        if not path.is_file():
            raise InvalidArgument(
                f"class_names={str(given)!r}: no such file; give a list, or a file with one name a line"
            )
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        names = list(given)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument(f"class_names={names!r} is not allowed; give at least one name, each a text")
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise InvalidArgument(f"class_names holds {twice[0]!r} more than once; every class needs a name of its own")
    return tuple(names)


@dataclass(frozen=True)
class ClipLength:
    """Frames a clip as the network itself takes them.

    Shorter clips are repeated evenly up to `at_least`; longer ones than `at_most` are refused, because somebody has
    to choose and that is the sampler's work. `multiple_of`: repeated evenly up to the next multiple.
    """

    at_least: int = 1
    at_most: int | None = None
    multiple_of: int = 1

    def fitted(self, num_frames: int, name: str) -> int:
        """How many frames the network is given for a clip of `num_frames`."""
        if self.at_most is not None and num_frames > self.at_most:
            raise InvalidArgument(
                f"{name} takes at most {self.at_most} frames a clip but {num_frames} were given; choose fewer frames"
            )
        if num_frames < 1:
            raise InvalidArgument(f"{name} was given {num_frames} frames; give at least 1")
        wanted = max(num_frames, self.at_least)
        return -(-wanted // self.multiple_of) * self.multiple_of

    def positions(self, num_frames: int, name: str) -> list[int] | None:
        """Which frame stands at each place of the network's clip; None where the clip is taken as it is.

        >>> ClipLength(at_least=8).positions(3, "net")
        [0, 0, 0, 1, 1, 2, 2, 2]
        """
        wanted = self.fitted(num_frames, name)
        return None if wanted == num_frames else segment_centres(num_frames, wanted).tolist()

    def note(self, name: str) -> str | None:
        """What a user should know about it."""
        if self.at_least == 1 and self.at_most is None and self.multiple_of == 1:
            return None
        if self.at_most == self.at_least:
            return f"{name} takes exactly {self.at_least} frames: fewer are repeated evenly, more are refused"
        parts = []
        if self.at_least > 1:
            parts.append(f"fewer than {self.at_least} frames are repeated evenly")
        if self.multiple_of > 1:
            parts.append(f"frames are repeated evenly up to a multiple of {self.multiple_of}")
        if self.at_most is not None:
            parts.append(f"more than {self.at_most} frames are refused")
        return f"{name}: " + ", ".join(parts)


log = logging.getLogger("sosampler")

PRECISIONS = ("float32", "bfloat16", "float16")
# What `quantize_classifier` makes of a network: engines and pipelines run it, on the CPU.
INT8 = "int8"

# Frames that go through a network at once where the caller's batch is larger, so that memory stays bounded.
_FRAMES_AT_ONCE = 256


@runtime_checkable
class VideoClassifier(Protocol):
    """What the package asks of a classifier; anything with these members will do."""

    name: str
    preprocessing: Preprocessing
    class_names: tuple[str, ...]

    def clip_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        """uint8 [B, N, 3, H, W] -> probabilities [B, C] of each clip of N frames."""
        ...

    def frame_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        """uint8 [B, T, 3, H, W] -> probabilities [B, T, C] of each frame as a clip of one."""
        ...

    def gmacs(self, num_frames: int) -> float:
        """Giga multiply-adds of one clip."""
        ...


class Classifier(nn.Module):
    """A network with its preprocessing, its class names and its activation, frozen.

    Subclasses give `clip_logits`. Inputs are uint8 RGB frames of any size; `positions` [B, N] says where each frame
    lies in its video, 0 the beginning and 1 the end, for networks that know about time (others ignore it).
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
        self.activation = one_of("activation", "sigmoid" if multi_label else "softmax", ACTIVATIONS)
        self.options = dict(options or {})  # what create_classifier needs besides to build it again
        self.precision = "float32"
        self.folder: Path | None = None  # where it is saved, and its int8 network beside it if there is one
        self.fresh_head = True  # whether the last layer is random, not that of the weights
        self._said_repeated = False
        self._gmacs: dict[tuple[int, ...], float] = {}
        self.freeze()

    # ---- what subclasses give

    def clip_logits(self, clips: Tensor, positions: Tensor | None = None) -> Tensor:
        """Normalised float [B, N, 3, h, w] -> scores [B, C]. Gradients flow, so that training can use it."""
        raise NotImplementedError

    # ---- the protocol

    @torch.no_grad()
    def clip_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        """uint8 [B, N, 3, H, W] -> float32 probabilities [B, C] of each clip."""
        self.eval()  # whoever trained it before: running statistics must not move
        frames = check_frames(frames)
        positions = check_positions(positions, frames)
        at_once = max(1, _FRAMES_AT_ONCE // self.length.fitted(frames.shape[1], self.name))
        parts = []
        for begin in range(0, len(frames), at_once):
            part = slice(begin, begin + at_once)
            clips = self._prepared(frames[part])
            where = None if positions is None else positions[part].to(self.device)
            parts.append(self.probabilities(self.scores(clips, where)))
        return torch.cat(parts)

    @torch.no_grad()
    def frame_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        """uint8 [B, T, 3, H, W] -> float32 probabilities [B, T, C] of each frame as a clip of one."""
        frames = check_frames(frames)
        positions = check_positions(positions, frames)
        clips = frames.flatten(0, 1)[:, None]  # [B * T, 1, 3, H, W]
        where = None if positions is None else positions.flatten(0, 1)[:, None]
        return self.clip_probs(clips, where).unflatten(0, frames.shape[:2])

    def gmacs(self, num_frames: int) -> float:
        """Giga multiply-adds of one clip of `num_frames`, attention included, without decoding and resizing."""
        num_frames = whole_number("num_frames", num_frames)
        shape = (1, num_frames, 3, *self.preprocessing.size)
        if shape not in self._gmacs:
            self._gmacs[shape] = count_gmacs(self, torch.empty(shape, device="meta"))
        return self._gmacs[shape]

    def forward(self, clips: Tensor, positions: Tensor | None = None) -> Tensor:
        """Normalised float [B, N, 3, h, w] -> scores [B, C], clips brought to a length that the network takes."""
        places = self.length.positions(clips.shape[1], self.name)
        if places is not None:
            if not self._said_repeated and clips.device.type != "meta":
                self._said_repeated = True
                log.warning(
                    "%s: clips of %d frames are repeated evenly to the %d that the network takes",
                    *(self.name, clips.shape[1], len(places)),
                )
            clips = clips[:, places]
            positions = None if positions is None else positions[:, places]
        return self.clip_logits(clips, positions)

    # ---- the way from frames to probabilities, step by step

    def _prepared(self, frames: Tensor) -> Tensor:
        return self.preprocessing(frames.to(self.device, non_blocking=True))

    def scores(self, clips: Tensor, positions: Tensor | None = None) -> Tensor:
        """`forward` in the classifier's precision, checked: float32 [B, C]."""
        with autocast(self.device, self.precision):
            scores = self(clips, positions)
        return check_shape(scores, len(clips), self.num_classes, self.name).float()

    def probabilities(self, scores: Tensor) -> Tensor:
        """Scores [..., C] of the network -> probabilities [..., C]."""
        check_finite(scores.reshape(-1, scores.shape[-1]), self.name)
        return activate(scores, self.activation)

    # ---- facts

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def multi_label(self) -> bool:
        return self.activation == "sigmoid"

    @property
    def device(self) -> torch.device:
        for tensor in self._tensors():
            return tensor.device
        return torch.device("cpu")

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.parameters()
        yield from self.buffers()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about this classifier."""
        note = self.length.note(self.name)
        return () if note is None else (note,)

    def head_names(self) -> tuple[str, ...]:
        """Prefixes in the net's state dict of the layers that a fresh head replaces, the class-wise one first."""
        return ()

    def freeze(self) -> Classifier:
        """Evaluation mode and no gradients: how a classifier is used."""
        self.requires_grad_(False)
        self.eval()
        return self

    def settings(self) -> dict[str, Any]:
        """Everything but the weights, as plain JSON values."""
        return {
            "name": self.name,
            "class_names": list(self.class_names),
            "multi_label": self.multi_label,
            "preprocessing": self.preprocessing.to_dict(),
            "options": self.options,
        }

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the weights, the preprocessing and whatever else decides an answer.

        Class names only name the answers; device and precision round them.
        """
        settings = {key: value for key, value in self.settings().items() if key != "class_names"}
        settings["length"] = asdict(self.length)
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
        for key, tensor in sorted(self.net.state_dict().items()):
            digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def extra_repr(self) -> str:
        height, width = self.preprocessing.size
        return (
            f"{self.name}, {self.num_classes} classes, {height}x{width}, {self.num_parameters / 1e6:.2f} M parameters"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


def check_positions(positions: Any, frames: Tensor) -> Tensor | None:
    """Where frames [B, N, ...] lie in their videos: float32 [B, N] in 0..1, or None."""
    if positions is None:
        return None
    positions = torch.as_tensor(positions, dtype=torch.float32)
    if positions.shape != frames.shape[:2]:
        raise InvalidArgument(
            f"positions have shape {list(positions.shape)}, the frames {list(frames.shape[:2])}; give one a frame"
        )
    if not bool(((positions >= 0) & (positions <= 1)).all()):
        raise InvalidArgument(
            f"positions run from {float(positions.min()):.3g} to {float(positions.max()):.3g}; "
            "they must lie in 0..1, the share of the video that is over: pts_seconds / duration"
        )
    return positions
