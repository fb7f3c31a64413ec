"""Networks learn: loops, recipes, checkpoints."""

from sosampler.training.recipe import ClassifierRecipe
from sosampler.training.train_classifier import TrainedClassifier, train_classifier
from sosampler.training.train_sampler import TrainedSampler, train

__all__ = ["ClassifierRecipe", "TrainedClassifier", "TrainedSampler", "train", "train_classifier"]
