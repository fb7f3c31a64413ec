"""Networks learn: loops, recipes, checkpoints."""

from sosampler.training.recipe import ClassifierRecipe
from sosampler.training.train_classifier import TrainedClassifier, train_classifier

__all__ = ["ClassifierRecipe", "TrainedClassifier", "train_classifier"]
