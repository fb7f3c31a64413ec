"""sosampler: pick the few frames of a video that matter, for any frozen video classifier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sosampler.bank.bank import Bank
    from sosampler.bank.from_arrays import FrameEntry, subset, write_frames
    from sosampler.bank.prepare import add_features, add_teacher, prepare
    from sosampler.baselines.base import load_system
    from sosampler.baselines.registry import list_samplers
    from sosampler.classifiers.base import Classifier, VideoClassifier
    from sosampler.classifiers.factory import create_classifier, list_classifiers, save_classifier
    from sosampler.classifiers.pooled import PooledClassifier
    from sosampler.classifiers.preprocessing import Preprocessing
    from sosampler.classifiers.wrap import wrap_classifier
    from sosampler.datasets.manifest import Manifest, make_splits, read_manifest
    from sosampler.engine.quantize import Quantized, quantize_classifier
    from sosampler.errors import (
        ClassifierError,
        InvalidArgument,
        LimitExceeded,
        MissingDependency,
        SosamplerError,
        VideoError,
        WeightsError,
    )
    from sosampler.evaluation.evaluate import evaluate
    from sosampler.evaluation.independence import independence
    from sosampler.evaluation.result import Evaluation
    from sosampler.inference.many import select_many
    from sosampler.inference.pipeline import Pipeline, Prediction
    from sosampler.inference.select import select
    from sosampler.inference.selection import Candidates, Selection
    from sosampler.inference.total import CollectionSelection, select_total
    from sosampler.inference.watch import Window, watch
    from sosampler.policies.auto import Auto
    from sosampler.policies.base import Batch, Policy
    from sosampler.policies.registry import list_policies, register_policy
    from sosampler.reels.make import make_reels
    from sosampler.reels.recipe import ReelRecipe
    from sosampler.reels.streams import StreamRecipe
    from sosampler.samplers.recipe import SamplerRecipe, list_recipes, read_recipe
    from sosampler.samplers.registry import load_sampler
    from sosampler.samplers.sosampler import SOSampler
    from sosampler.training.classifier_data import ClassifierRecipe
    from sosampler.training.train_baseline import TrainedSystem, import_frameexit
    from sosampler.training.train_classifier import TrainedClassifier, train_classifier
    from sosampler.training.train_sampler import TrainedSampler, train
    from sosampler.video.limits import Limits
    from sosampler.video.reader import VideoMetadata
    from sosampler.video.source import open_video

# Where each public name lives. Importing them on first use keeps `import sosampler` and `--help` fast.
_HOMES = {
    "select": "sosampler.inference.select",
    "select_total": "sosampler.inference.total",
    "CollectionSelection": "sosampler.inference.total",
    "select_many": "sosampler.inference.many",
    "create_classifier": "sosampler.classifiers.factory",
    "list_classifiers": "sosampler.classifiers.factory",
    "save_classifier": "sosampler.classifiers.factory",
    "wrap_classifier": "sosampler.classifiers.wrap",
    "Classifier": "sosampler.classifiers.base",
    "PooledClassifier": "sosampler.classifiers.pooled",
    "Preprocessing": "sosampler.classifiers.preprocessing",
    "VideoClassifier": "sosampler.classifiers.base",
    "read_manifest": "sosampler.datasets.manifest",
    "make_splits": "sosampler.datasets.manifest",
    "Manifest": "sosampler.datasets.manifest",
    "prepare": "sosampler.bank.prepare",
    "add_teacher": "sosampler.bank.prepare",
    "Bank": "sosampler.bank.bank",
    "add_features": "sosampler.bank.prepare",
    "write_frames": "sosampler.bank.from_arrays",
    "FrameEntry": "sosampler.bank.from_arrays",
    "subset": "sosampler.bank.from_arrays",
    "make_reels": "sosampler.reels.make",
    "ReelRecipe": "sosampler.reels.recipe",
    "StreamRecipe": "sosampler.reels.streams",
    "train_classifier": "sosampler.training.train_classifier",
    "TrainedClassifier": "sosampler.training.train_classifier",
    "ClassifierRecipe": "sosampler.training.classifier_data",
    "Selection": "sosampler.inference.selection",
    "Window": "sosampler.inference.watch",
    "watch": "sosampler.inference.watch",
    "Candidates": "sosampler.inference.selection",
    "open_video": "sosampler.video.source",
    "VideoMetadata": "sosampler.video.reader",
    "Limits": "sosampler.video.limits",
    "list_policies": "sosampler.policies.registry",
    "register_policy": "sosampler.policies.registry",
    "Policy": "sosampler.policies.base",
    "Batch": "sosampler.policies.base",
    "Auto": "sosampler.policies.auto",
    "SosamplerError": "sosampler.errors",
    "InvalidArgument": "sosampler.errors",
    "VideoError": "sosampler.errors",
    "LimitExceeded": "sosampler.errors",
    "MissingDependency": "sosampler.errors",
    "ClassifierError": "sosampler.errors",
    "WeightsError": "sosampler.errors",
    "train": "sosampler.training.train_sampler",
    "TrainedSampler": "sosampler.training.train_sampler",
    "TrainedSystem": "sosampler.training.train_baseline",
    "import_frameexit": "sosampler.training.train_baseline",
    "SOSampler": "sosampler.samplers.sosampler",
    "load_sampler": "sosampler.samplers.registry",
    "list_samplers": "sosampler.baselines.registry",
    "load_system": "sosampler.baselines.base",
    "SamplerRecipe": "sosampler.samplers.recipe",
    "read_recipe": "sosampler.samplers.recipe",
    "list_recipes": "sosampler.samplers.recipe",
    "evaluate": "sosampler.evaluation.evaluate",
    "Evaluation": "sosampler.evaluation.result",
    "independence": "sosampler.evaluation.independence",
    "quantize_classifier": "sosampler.engine.quantize",
    "Quantized": "sosampler.engine.quantize",
    "Pipeline": "sosampler.inference.pipeline",
    "Prediction": "sosampler.inference.pipeline",
}

__all__ = [
    "Auto",
    "Bank",
    "Batch",
    "Candidates",
    "Classifier",
    "ClassifierError",
    "ClassifierRecipe",
    "CollectionSelection",
    "Evaluation",
    "FrameEntry",
    "InvalidArgument",
    "LimitExceeded",
    "Limits",
    "Manifest",
    "MissingDependency",
    "Pipeline",
    "Policy",
    "PooledClassifier",
    "Prediction",
    "Preprocessing",
    "Quantized",
    "ReelRecipe",
    "SOSampler",
    "SamplerRecipe",
    "Selection",
    "SosamplerError",
    "StreamRecipe",
    "TrainedClassifier",
    "TrainedSampler",
    "TrainedSystem",
    "VideoClassifier",
    "VideoError",
    "VideoMetadata",
    "WeightsError",
    "Window",
    "__version__",
    "add_features",
    "add_teacher",
    "create_classifier",
    "evaluate",
    "import_frameexit",
    "independence",
    "list_classifiers",
    "list_policies",
    "list_recipes",
    "list_samplers",
    "load_sampler",
    "load_system",
    "make_reels",
    "make_splits",
    "open_video",
    "prepare",
    "quantize_classifier",
    "read_manifest",
    "read_recipe",
    "register_policy",
    "save_classifier",
    "select",
    "select_many",
    "select_total",
    "subset",
    "train",
    "train_classifier",
    "watch",
    "wrap_classifier",
    "write_frames",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sosampler' has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "sosampler"):
            raise
        from sosampler.errors import MissingDependency

        raise MissingDependency(
            f"sosampler.{name} needs {missing}; install it with: pip install 'sosampler[train]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
