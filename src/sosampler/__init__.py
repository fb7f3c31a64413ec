"""sosampler: pick the few frames of a video that matter, for any frozen video classifier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sosampler._select import select
    from sosampler.classifiers import (
        Classifier,
        PooledClassifier,
        Preprocessing,
        VideoClassifier,
        create_classifier,
        list_classifiers,
        save_classifier,
        wrap_classifier,
    )
    from sosampler.data.add_features import add_features
    from sosampler.data.bank import Bank
    from sosampler.data.make_reels import make_reels
    from sosampler.data.manifest import Manifest, read_manifest
    from sosampler.data.prepare import add_teacher, prepare
    from sosampler.data.reels import ReelRecipe
    from sosampler.data.splits import make_splits
    from sosampler.data.subset import subset
    from sosampler.data.write_frames import FrameEntry, write_frames
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
    from sosampler.evaluation.rows import Evaluation
    from sosampler.export.quantize import Quantized, quantize_classifier
    from sosampler.pipeline import Pipeline, Prediction
    from sosampler.policies import list_policies
    from sosampler.samplers import SOSampler, list_samplers, load_sampler
    from sosampler.samplers.recipe import SamplerRecipe, list_recipes, read_recipe
    from sosampler.selection import Candidates, Selection
    from sosampler.systems.folder import load_system
    from sosampler.training.recipe import ClassifierRecipe
    from sosampler.training.train_classifier import TrainedClassifier, train_classifier
    from sosampler.training.train_sampler import TrainedSampler, train
    from sosampler.training.train_system import TrainedSystem
    from sosampler.video import Limits, VideoMetadata, open_video

# Where each public name lives. Importing them on first use keeps `import sosampler` and `--help` fast.
_HOMES = {
    "select": "sosampler._select",
    "create_classifier": "sosampler.classifiers",
    "list_classifiers": "sosampler.classifiers",
    "save_classifier": "sosampler.classifiers",
    "wrap_classifier": "sosampler.classifiers",
    "Classifier": "sosampler.classifiers",
    "PooledClassifier": "sosampler.classifiers",
    "Preprocessing": "sosampler.classifiers",
    "VideoClassifier": "sosampler.classifiers",
    "read_manifest": "sosampler.data.manifest",
    "make_splits": "sosampler.data.splits",
    "Manifest": "sosampler.data.manifest",
    "prepare": "sosampler.data.prepare",
    "add_teacher": "sosampler.data.prepare",
    "Bank": "sosampler.data.bank",
    "add_features": "sosampler.data.add_features",
    "write_frames": "sosampler.data.write_frames",
    "FrameEntry": "sosampler.data.write_frames",
    "subset": "sosampler.data.subset",
    "make_reels": "sosampler.data.make_reels",
    "ReelRecipe": "sosampler.data.reels",
    "train_classifier": "sosampler.training",
    "TrainedClassifier": "sosampler.training",
    "ClassifierRecipe": "sosampler.training",
    "Selection": "sosampler.selection",
    "Candidates": "sosampler.selection",
    "open_video": "sosampler.video",
    "VideoMetadata": "sosampler.video",
    "Limits": "sosampler.video",
    "list_policies": "sosampler.policies",
    "SosamplerError": "sosampler.errors",
    "InvalidArgument": "sosampler.errors",
    "VideoError": "sosampler.errors",
    "LimitExceeded": "sosampler.errors",
    "MissingDependency": "sosampler.errors",
    "ClassifierError": "sosampler.errors",
    "WeightsError": "sosampler.errors",
    "train": "sosampler.training",
    "TrainedSampler": "sosampler.training",
    "TrainedSystem": "sosampler.training.train_system",
    "SOSampler": "sosampler.samplers",
    "load_sampler": "sosampler.samplers",
    "list_samplers": "sosampler.samplers",
    "load_system": "sosampler.systems.folder",
    "SamplerRecipe": "sosampler.samplers.recipe",
    "read_recipe": "sosampler.samplers.recipe",
    "list_recipes": "sosampler.samplers.recipe",
    "evaluate": "sosampler.evaluation.evaluate",
    "Evaluation": "sosampler.evaluation.rows",
    "independence": "sosampler.evaluation.independence",
    "quantize_classifier": "sosampler.export.quantize",
    "Quantized": "sosampler.export.quantize",
    "Pipeline": "sosampler.pipeline",
    "Prediction": "sosampler.pipeline",
}

__all__ = [
    "Bank",
    "Candidates",
    "Classifier",
    "ClassifierError",
    "ClassifierRecipe",
    "Evaluation",
    "FrameEntry",
    "InvalidArgument",
    "LimitExceeded",
    "Limits",
    "Manifest",
    "MissingDependency",
    "Pipeline",
    "PooledClassifier",
    "Prediction",
    "Preprocessing",
    "Quantized",
    "ReelRecipe",
    "SOSampler",
    "SamplerRecipe",
    "Selection",
    "SosamplerError",
    "TrainedClassifier",
    "TrainedSampler",
    "TrainedSystem",
    "VideoClassifier",
    "VideoError",
    "VideoMetadata",
    "WeightsError",
    "__version__",
    "add_features",
    "add_teacher",
    "create_classifier",
    "evaluate",
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
    "save_classifier",
    "select",
    "subset",
    "train",
    "train_classifier",
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

        raise MissingDependency(f"sosampler.{name} needs {missing}; install sosampler[train]") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
