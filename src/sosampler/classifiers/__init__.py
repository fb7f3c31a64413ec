"""The frozen classifier: one protocol for every network that names what a video shows."""

from sosampler.classifiers.base import Classifier, VideoClassifier
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.classifiers.registry import create_classifier, list_classifiers, save_classifier
from sosampler.classifiers.wrap import wrap_classifier

__all__ = [
    "Classifier",
    "PooledClassifier",
    "Preprocessing",
    "VideoClassifier",
    "create_classifier",
    "list_classifiers",
    "save_classifier",
    "wrap_classifier",
]
