"""Asking a classifier about stored frames: one batch, its views, and the precision in which the answers are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosampler.checks import one_of, whole_number
from sosampler.data.bank import decode_jpeg
from sosampler.data.bank_format import TEACHER_KIND, VERSION, teacher_schema
from sosampler.data.bank_teachers import teacher_folder_name
from sosampler.errors import ClassifierError, InvalidArgument

MAX_VIEWS = 4
# Frames that go through the network at once: on a processor each thread has such a batch.
_CPU_BATCH, _DEVICE_BATCH = 8, 128
# Decoded frames of all threads together; a batch larger than that goes alone.
_MAX_DECODED_BYTES = 512 << 20
_FLOAT16_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Answers:
    """About some frames."""

    frame_probs: np.ndarray  # [T, C] float16
    features: np.ndarray | None  # [T, D]

    def __getitem__(self, frames: slice) -> Answers:
        return Answers(self.frame_probs[frames], None if self.features is None else self.features[frames])


class Room:
    """So many bytes for all threads together: `taking` waits until there is room, or until nobody else has any."""

    def __init__(self, num_bytes: int) -> None:
        self._all, self._taken = num_bytes, 0
        self._changed = threading.Condition()

    @contextmanager
    def taking(self, num_bytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + num_bytes <= self._all)
            self._taken += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= num_bytes
                self._changed.notify_all()


class Asker:
    """A classifier, and how it is asked."""

    def __init__(
        self, classifier: Any, *, views: int = 1, features: bool | str = True, batch: int | None = None
    ) -> None:
        self.classifier = classifier
        self.views = whole_number("views", views)
        if views > MAX_VIEWS:
            raise InvalidArgument(f"views={views} is not allowed; give a number from 1 to {MAX_VIEWS}")
        for member in ("frame_probs", "fingerprint", "class_names", "name"):
            if not hasattr(classifier, member):
                raise InvalidArgument(
                    f"a {type(classifier).__name__} has no {member}; give a classifier of so.create_classifier or "
                    "so.wrap_classifier, or the name of one"
                )
        self.device = torch.device(getattr(classifier, "device", "cpu"))
        default_batch = _CPU_BATCH if self.device.type == "cpu" else _DEVICE_BATCH
        self.batch = default_batch if batch is None else whole_number("batch", batch)
        self.batch_given = batch is not None  # otherwise a teacher that was begun goes on with its own
        self.num_classes = len(classifier.class_names)
        self.pooled = hasattr(classifier, "frame_features") and hasattr(classifier, "pool")
        self.pooling: str | None = classifier.pooling if self.pooled else None
        self.features = self._precision(features)  # "float32", "float16" or None
        self.feature_width = self._ask_once()
        self.fingerprint: str = classifier.fingerprint()
        self._device_lock = threading.Lock()
        self._room = Room(_MAX_DECODED_BYTES)

    def _precision(self, features: bool | str) -> str | None:
        if not self.pooled or features is False:
            return None
        if features is True:
            # Logits are averaged and then decide by small differences: half precision is off by 0.008 at 16, which can
            # turn an argmax. Features before a class layer are many, and their rounding errors cancel.
            return "float32" if self.pooling == "mean" else "float16"
        return one_of("features", features, ("float32", "float16"))

    def _ask_once(self) -> int | None:
        """D of the features, and an early word where the classifier cannot be asked."""
        blank = self._tensor(np.zeros((1, 64, 64, 3), dtype=np.uint8))
        if self.pooled:
            return int(self._features(blank).shape[-1])
        self.classifier.frame_probs(blank, torch.zeros(1, 1))
        return None

    @property
    def name(self) -> str:
        """Of the teacher's folder."""
        return teacher_folder_name(self.fingerprint, self.views)

    @property
    def schema(self) -> Any:
        return teacher_schema(self.num_classes, self.features, self.feature_width)

    @property
    def bytes_a_frame(self) -> int:
        width = self.feature_width if self.features else 0
        return 2 * self.num_classes + (4 if self.features == "float32" else 2) * (width or 0)

    def about(self) -> dict[str, Any]:
        """teacher.json"""
        preprocessing: Any = getattr(self.classifier, "preprocessing", None)
        return {
            "kind": TEACHER_KIND,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "name": self.classifier.name,
            "num_classes": self.num_classes,
            "class_names": list(self.classifier.class_names),
            "multi_label": bool(getattr(self.classifier, "multi_label", False)),
            "pooling": self.pooling,
            "views": self.views,
            "batch": self.batch,  # decides the last bits of the answers
            "precision": getattr(self.classifier, "precision", "float32"),
            "features": {"precision": self.features, "width": self.feature_width} if self.features else None,
            "preprocessing": preprocessing.to_dict() if hasattr(preprocessing, "to_dict") else None,
        }

    # ---- one batch

    def _tensor(self, frames: np.ndarray) -> Tensor:
        return torch.from_numpy(frames).permute(0, 3, 1, 2)[None]  # uint8 [1, F, 3, H, W]

    def _features(self, frames: Tensor) -> Tensor:
        """[1, F, 3, H, W] -> [1, F, D], the mean over views."""
        views = [self.classifier.frame_features(view) for view in views_of(frames, self.views)]
        return torch.stack(views).mean(0)

    def ask(self, jpegs: list[bytes], positions: np.ndarray, names: list[str]) -> Answers:
        """About F frames of one size, each by itself; positions [F] in 0..1, and the video of each."""
        first = decode_jpeg(jpegs[0], repr(names[0]))
        with self._room.taking(len(jpegs) * first.nbytes):
            decoded = np.empty((len(jpegs), *first.shape), dtype=np.uint8)
            for place, data in enumerate(jpegs):
                decoded[place] = first if place == 0 else decode_jpeg(data, repr(names[place]))
            frames = self._tensor(decoded)
            if self.device.type == "cpu":
                return self._classified(frames, positions)
            with self._device_lock:  # one batch at a time on the device, while other threads decode
                return self._classified(frames, positions)

    def _classified(self, frames: Tensor, positions: np.ndarray) -> Answers:
        if self.pooled:
            features = self._features(frames)
            probs = self.classifier.pool(features.unsqueeze(-2))[0]  # a clip of one for each frame
            kept = None if self.features is None else _kept(features[0], self.features, self.classifier.name)
        else:
            where = torch.from_numpy(positions)[None]
            views = [self.classifier.frame_probs(view, where) for view in views_of(frames, self.views)]
            probs, kept = torch.stack(views).mean(0)[0], None
        return Answers(halved(probs.float().cpu().numpy()), kept)


def views_of(frames: Tensor, count: int) -> list[Tensor]:
    """The first `count` of four views of frames [..., H, W]: as they are, mirrored, and the squares at either end.

    Classifiers crop the centre themselves, so the squares show what that leaves out.
    """
    height, width = frames.shape[-2:]
    side = min(height, width)
    views: list[Callable[[], Tensor]] = [
        lambda: frames,
        lambda: frames.flip(-1),
        lambda: frames[..., :side, :side],
        lambda: frames[..., height - side :, width - side :],
    ]
    return [view() for view in views[:count]]


def _kept(features: Tensor, precision: str, name: str) -> np.ndarray:
    kept: np.ndarray = features.float().cpu().numpy()
    if precision == "float32":
        return kept
    if float(np.abs(kept).max()) > _FLOAT16_MAX:
        raise ClassifierError(f"{name} gives features too large for half precision; prepare with features='float32'")
    small: np.ndarray = kept.astype(np.float16)
    return small


def halved(probs: np.ndarray) -> np.ndarray:
    """Probabilities [F, C] in half precision, the most probable class still the first with the largest number."""
    half = probs.astype(np.float16)
    rows = np.arange(len(half))
    top = probs.argmax(-1)
    best = half[rows, top]
    # Rounding keeps the order but makes ties, and of those the first would win.
    tied_before = (half == best[:, None]) & (np.arange(half.shape[1]) < top[:, None])
    below = np.nextafter(best, np.float16(0))
    return np.where(tied_before, below[:, None], half)
