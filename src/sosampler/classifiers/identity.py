"""Which classifier gave an answer: what must be equal for the rows of two runs to belong together."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from sosampler.classifiers.base import INT8
from sosampler.classifiers.registry import INT8_MODEL


def classifier_identity(classifier: Any, precision: str | None) -> list[Any]:
    """Its name, its fingerprint if it has one, that of its int8 network where that answers, and its classes."""
    fingerprint = getattr(classifier, "fingerprint", None)
    who = [classifier.name, None if fingerprint is None else fingerprint()]
    if precision == INT8:  # made anew of other frames it answers otherwise, of the same weights
        who.append(hashlib.sha256((Path(classifier.folder) / INT8_MODEL).read_bytes()).hexdigest()[:16])
    return [*who, *classifier.class_names]
