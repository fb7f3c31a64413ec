"""Asking a classifier about stored frames: one batch, its views, and the precision in which the answers are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosampler.checks import one_of, whole_number
from sosampler.data.asking import Asker, Tables, blank_frame, kept_features
from sosampler.data.bank_format import TEACHER_KIND, VERSION, AnswersFolder, BankFolder, teacher_schema
from sosampler.data.bank_teachers import first_difference, teacher_folder_name
from sosampler.data.bank_writer import classes_in_words
from sosampler.errors import InvalidArgument

MAX_VIEWS = 4


class TeacherAsker(Asker):
    """A classifier, and how it is asked."""

    made = "this teacher was prepared"
    remedy = "give the same again, or delete its folder"
    decisive = ("features", "precision", "pooling", "batch")

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
        super().__init__(getattr(classifier, "device", "cpu"), batch)
        self.num_classes = len(classifier.class_names)
        self.pooled = hasattr(classifier, "frame_features") and hasattr(classifier, "pool")
        self.pooling: str | None = classifier.pooling if self.pooled else None
        self.features = self._precision(features)  # "float32", "float16" or None
        self.feature_width = self._ask_once()
        self.fingerprint: str = classifier.fingerprint()

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
        if self.pooled:
            return int(self._features(blank_frame()).shape[-1])
        self.classifier.frame_probs(blank_frame(), torch.zeros(1, 1))
        return None

    def answers_folder(self, folder: BankFolder) -> AnswersFolder:
        return folder.teacher_answers(teacher_folder_name(self.fingerprint, self.views))

    @property
    def net(self) -> Any:
        return getattr(self.classifier, "net", None)

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

    def _features(self, frames: Tensor) -> Tensor:
        """[1, F, 3, H, W] -> [1, F, D], the mean over views."""
        views = [self.classifier.frame_features(view) for view in views_of(frames, self.views)]
        return torch.stack(views).mean(0)

    def _answers(self, frames: Tensor, positions: np.ndarray) -> Tables:
        if self.pooled:
            features = self._features(frames)
            probs = self.classifier.pool(features.unsqueeze(-2))[0]  # a clip of one for each frame
            kept = () if self.features is None else (self._kept(features[0], self.features),)
        else:
            where = torch.from_numpy(positions)[None]
            views = [self.classifier.frame_probs(view, where) for view in views_of(frames, self.views)]
            probs, kept = torch.stack(views).mean(0)[0], ()
        return halved(probs.float().cpu().numpy()), *kept

    def _kept(self, features: Tensor, precision: str) -> np.ndarray:
        return kept_features(features, precision, self.classifier.name, "prepare with features='float32'")


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


def check_classes_fit(classifier: Any, classes: tuple[str, ...], where: str) -> None:
    """As many classes, and where both sides name them, the same names in the same order."""
    names = tuple(classifier.class_names)
    ours, theirs = f"{where} has {classes_in_words(classes)}", f"{classifier.name} {classes_in_words(names)}"
    if len(names) != len(classes):
        raise InvalidArgument(
            f"{ours}, but the classifier {theirs}; give the classifier's class list with the manifest (classes), or a "
            "classifier of these classes"
        )
    place = first_difference(names, classes)
    if place is None:
        return
    raise InvalidArgument(
        f"{ours}, but the classifier {theirs}: class {place} is {classes[place]!r} here and {names[place]!r} there; "
        "bring the class list into the classifier's order, or give another classifier"
    )
