"""The settings of `train_classifier` with their defaults and checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sosampler._util.validation import check_bool, check_float, check_int, check_range, one_of
from sosampler.errors import InvalidArgument

OPTIMIZERS = ("sgd", "adamw")
TRAINABLE = ("all", "head")

# Learning rate for a batch of 64, and weight decay.
_RATES = {"sgd": (0.01, 1e-4), "adamw": (1e-4, 0.05)}


@dataclass(frozen=True)
class ClassifierRecipe:
    """Settings of `train_classifier`."""

    epochs: int = 30
    batch_size: int = 64
    optimizer: str | None = None  # None: AdamW for transformers, SGD with Nesterov momentum for convolutions
    lr: float | None = None  # None: 0.01 (SGD) or 1e-4 (AdamW) for a batch of 64, in proportion to the batch
    weight_decay: float | None = None  # None: 1e-4 (SGD) or 0.05 (AdamW); not for biases and norms
    warmup: float = 0.05  # share of all steps in which the rate rises from 0
    label_smoothing: float = 0.1  # for one label a video
    crop_scale: tuple[float, float] = (0.3, 1.0)  # area of the random crop, one for all frames of a clip
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # its width over its height
    flip: bool = True
    trainable: str = "all"  # or "head": everything else is frozen
    num_frames: int = 8  # of a clip from videos; images are clips of one frame
    dev_share: float = 0.1  # of train, where there is no dev split
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("epochs", self.epochs)
        check_int("batch_size", self.batch_size, at_least=2)  # batch normalisation needs two
        if self.optimizer is not None:
            one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.lr is not None:
            check_float("lr", self.lr, above=0.0)
        if self.weight_decay is not None:
            check_float("weight_decay", self.weight_decay, at_least=0.0)
        for name in ("warmup", "label_smoothing", "dev_share"):
            if not 0 <= check_float(name, getattr(self, name)) < 1:
                raise InvalidArgument(f"{name}={getattr(self, name)!r} must be a share from 0 to below 1")
        for name in ("crop_scale", "crop_ratio"):
            object.__setattr__(self, name, check_range(name, getattr(self, name)))
        if self.crop_scale[1] > 1:
            raise InvalidArgument(f"crop_scale={self.crop_scale} must be at most 1, the whole area")
        check_bool("flip", self.flip)
        one_of("trainable", self.trainable, TRAINABLE)
        check_int("num_frames", self.num_frames)
        check_int("seed", self.seed, at_least=0)

    def filled(self, *, transformer: bool) -> ClassifierRecipe:
        """Return the recipe with optimiser, rate and decay for a kind of network."""
        optimizer = self.optimizer or ("adamw" if transformer else "sgd")
        lr, decay = _RATES[optimizer]
        values = self.to_dict() | {
            "optimizer": optimizer,
            "lr": lr * self.batch_size / 64 if self.lr is None else self.lr,
            "weight_decay": decay if self.weight_decay is None else self.weight_decay,
        }
        return ClassifierRecipe(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
