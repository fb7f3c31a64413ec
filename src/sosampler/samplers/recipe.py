"""Recipes: all settings of a sampler's training, from YAML files. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from sosampler._util.validation import check_bool, check_float, check_int, check_range, one_of
from sosampler.errors import InvalidArgument, first_line

REWARDS = ("confidence", "label")
BASELINES = ("uniform", "sample")
LIKELIHOODS = ("set", "ordered")


@dataclass(frozen=True, kw_only=True)
class OCSamplerSettings:
    """Settings of OCSampler's training; the defaults are its published ones for ActivityNet."""

    num_frames: int = 6  # N
    reward: str = "confidence"  # "confidence" needs no labels
    baseline: str = "uniform"  # or "sample": a second draw
    likelihood: str = "set"  # or "ordered": of the frames in the order drawn
    entropy: float = 0.0  # weight of the entropy, which keeps the scores from converging early

    def __post_init__(self) -> None:
        check_int("num_frames", self.num_frames)
        one_of("reward", self.reward, REWARDS)
        one_of("baseline", self.baseline, BASELINES)
        one_of("likelihood", self.likelihood, LIKELIHOODS)
        check_float("entropy", self.entropy, at_least=0.0)


TARGETS = ("label", "max")
TARGET_SPACES = ("probability", "log")
LOSSES = ("hinge", "mse", "logistic", "listwise", "reinforce")
PREDICTIONS = ("softmax", "softmax-sigmoid", "sigmoid", "raw")
GUIDANCE = ("logits", "probabilities", "frames")
OPTIMIZERS = ("sgd", "adamw")
CROP_PER = ("video", "frame")
SCALE_FREE = ("logistic", "listwise", "reinforce")  # losses of raw scores and of targets not normalised over T

_NAMES = ("default", "paper", "authors", "ocsampler", "scsampler-rank", "scsampler-ac")
_BASE = "base"  # key of a user's file: the recipe for the settings that the file omits


@dataclass(frozen=True, kw_only=True)
class SamplerRecipe:
    """Settings of `train`. Values are in YAML files; `read_recipe("default", epochs=3)` changes some."""

    name: str
    # The network
    backbone: str  # "mobilenet_v2" or "timm:NAME"
    shift: int  # of `shift` channels one comes from the next frame, one from the previous; 0: none
    input_size: int  # height and width in pixels
    dropout: float  # before the importance head
    class_head: bool  # whether a second head predicts classes
    scoring: dict[str, Any]  # settings of `Scoring`
    # The loss: lam · rank + (1 − lam) · guidance + distill · distillation + calibrate · calibration
    target: str  # the classifier's confidence in the "label", or its "max" over classes
    target_space: str  # "probability" or "log"
    tau: float | None  # targets are softmax over T of confidence / tau; None: the confidence itself
    loss: str  # one of LOSSES
    prediction: str  # one of PREDICTIONS: what is compared with the targets
    margin: float  # of the hinge
    weighted: bool  # hinge, logistic: pairs are weighted by their difference in the target
    temperature: float  # listwise: of the targets
    reinforce: dict[str, Any]  # reinforce: fields of `OCSamplerSettings`; {} for other losses
    lam: float  # weight of the ranking loss; 1 − lam is that of label guidance, with a class head
    guidance: str  # what label guidance averages over frames: "logits", "probabilities", or the loss of "frames"
    distill: float  # weight of distillation of the classifier's probabilities, frame by frame
    calibrate: float  # weight of the importance as log-odds of the target confidence
    # The optimisation
    optimizer: str
    lr: float  # for this batch size; decays to 0 by half a cosine
    momentum: float  # of SGD
    weight_decay: float
    epochs: int
    batch_size: int  # videos, of all processes together
    warmup: float  # fraction of all steps in which the rate rises from 0
    clip: float | None  # maximum norm of the gradient; None: no limit
    ema: float  # decay per step of the moving average of the weights; 0: none
    # The data
    num_candidates: int | tuple[int, int]  # T; two numbers: drawn per batch from a few values between them
    crop_scale: tuple[float, float]  # relative area of the random crop
    crop_ratio: tuple[float, float]  # its width over its height
    crop_per: str  # "video": the same crop for all of its frames; "frame": one each
    flip: bool  # half of the videos (or frames) are mirrored
    seed: int

    def __post_init__(self) -> None:
        for name in ("name", "backbone"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise InvalidArgument(f"{name}={getattr(self, name)!r} must be a string that is not empty")
        for name, allowed in _CHOICES.items():
            one_of(name, getattr(self, name), allowed)
        for name, minimum in _MIN_INTEGERS.items():
            self._set(name, check_int(name, getattr(self, name), at_least=minimum))
        for name in _ABOVE_0:
            self._set(name, check_float(name, getattr(self, name), above=0.0))
        for name in _AT_LEAST_0:
            self._set(name, check_float(name, getattr(self, name), at_least=0.0))
        for name in _FRACTIONS:
            self._set(name, check_float(name, getattr(self, name), at_least=0.0))
            if getattr(self, name) >= 1:
                raise InvalidArgument(f"{name}={getattr(self, name)!r} must be at least 0 and below 1")
        for name in ("class_head", "weighted", "flip"):
            check_bool(name, getattr(self, name))
        for name in ("tau", "clip"):
            if getattr(self, name) is not None:
                self._set(name, check_float(name, getattr(self, name), above=0.0))
        for name in ("crop_scale", "crop_ratio"):
            self._set(name, check_range(name, getattr(self, name)))
        self._set("num_candidates", _check_num_candidates(self.num_candidates))
        for name in ("scoring", "reinforce"):
            self._set(name, _copy_json(name, getattr(self, name)))
        self._check_together()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.crop_scale[1] > 1:
            raise InvalidArgument(f"crop_scale={self.crop_scale} must be at most 1, the area of the frame")
        if self.lam > 1:
            raise InvalidArgument(f"lam={self.lam} must be from 0 to 1")
        if self.loss in SCALE_FREE and (self.prediction != "raw" or self.tau is not None):
            raise InvalidArgument(
                f"loss={self.loss!r} needs raw scores, not prediction={self.prediction!r} and tau={self.tau}; "
                "set prediction to raw and tau to null"
            )
        if not self.class_head and self.distill > 0:
            raise InvalidArgument(f"distill={self.distill} needs a class head; set class_head to true or distill to 0")
        self._check_reinforce()
        if self.lam == 0 and not self.class_head and not self.calibrate:
            raise InvalidArgument("lam=0.0 without a class head leaves no loss; raise lam or add a class head")

    def _check_reinforce(self) -> None:
        if self.loss != "reinforce":
            if self.reinforce:
                raise InvalidArgument(
                    f"reinforce={self.reinforce} must be {{}} unless loss='reinforce'; set it to {{}}"
                )
            return
        check_known(self.reinforce, [field.name for field in fields(OCSamplerSettings)], "reinforce")
        num_frames = OCSamplerSettings(**self.reinforce).num_frames
        minimum = self.num_candidates if isinstance(self.num_candidates, int) else self.num_candidates[0]
        if minimum < num_frames:
            raise InvalidArgument(
                f"num_candidates={self.num_candidates} must be at least num_frames={num_frames} of reinforce; "
                "raise num_candidates, or lower num_frames of reinforce"
            )
        if self.scoring:
            raise InvalidArgument(
                "scoring must be {} for loss='reinforce', which draws frames by their importance; set it to {}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; the inverse of `SamplerRecipe.from_dict`."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplerRecipe:
        """Build a recipe from all of its settings."""
        check_known(values, SETTINGS, "a recipe")
        missing = [name for name in SETTINGS if name not in values]
        if missing:
            raise InvalidArgument(f"the recipe has no {', '.join(missing)}; give every setting")
        return cls(**values)

    def changed(self, **settings: Any) -> SamplerRecipe:
        """Return a copy with some settings changed."""
        return SamplerRecipe.from_dict({**self.to_dict(), **settings})


SETTINGS = tuple(field.name for field in fields(SamplerRecipe))

# Allowed values of each setting
_CHOICES = {
    "target": TARGETS,
    "target_space": TARGET_SPACES,
    "loss": LOSSES,
    "prediction": PREDICTIONS,
    "guidance": GUIDANCE,
    "optimizer": OPTIMIZERS,
    "crop_per": CROP_PER,
}
_MIN_INTEGERS = {"shift": 0, "input_size": 32, "epochs": 1, "batch_size": 1, "seed": 0}
_ABOVE_0 = ("temperature", "lr")
_AT_LEAST_0 = ("margin", "lam", "distill", "calibrate", "weight_decay")
_FRACTIONS = ("dropout", "momentum", "warmup", "ema")


def drawn_frames(recipe: SamplerRecipe) -> int:
    """Return how many frames loss="reinforce" draws; 0 for other losses."""
    return OCSamplerSettings(**recipe.reinforce).num_frames if recipe.loss == "reinforce" else 0


def list_recipes() -> list[str]:
    """List the recipes that come with the package.

    Examples:
        >>> list_recipes()
        ['default', 'paper', 'authors', 'ocsampler', 'scsampler-rank', 'scsampler-ac']
    """
    return list(_NAMES)


def read_recipe(recipe: str | Path | SamplerRecipe, **settings: Any) -> SamplerRecipe:
    """Read a recipe by its name or from a YAML file, and change single settings.

    A file may omit settings: they come from the recipe that its key `base` names, by default "default". The recipe's
    name defaults to that of the file.

    Examples:
        >>> read_recipe("paper").loss
        'hinge'
    """
    if isinstance(recipe, SamplerRecipe):
        return recipe.changed(**settings)
    if not isinstance(recipe, (str, Path)):
        raise InvalidArgument(
            f"recipe={recipe!r} must be one of: {', '.join(_NAMES)}; a YAML file, or a SamplerRecipe "
            "(for a dict use SamplerRecipe.from_dict)"
        )
    if str(recipe) in _NAMES:
        text = files("sosampler.samplers").joinpath("recipes", f"{recipe}.yaml").read_text(encoding="utf-8")
        return SamplerRecipe.from_dict({**read_mapping(text, f"{recipe}.yaml"), **settings})
    path = Path(recipe)
    values = read_recipe_file(path, _NAMES)
    check_known(values, (_BASE, *SETTINGS), f"the recipe {path}")
    base = read_recipe(one_of(_BASE, values.pop(_BASE, "default"), _NAMES))
    return base.changed(**{"name": path.stem, **values}).changed(**settings)


def read_settings(texts: Iterable[str], allowed: Sequence[str] = SETTINGS) -> dict[str, Any]:
    """Parse KEY=VALUE strings as settings with the allowed names; values are YAML.

    >>> read_settings(["lr=3e-4", "num_candidates=[4, 16]", "clip=null", "loss=hinge"])
    {'lr': 0.0003, 'num_candidates': [4, 16], 'clip': None, 'loss': 'hinge'}
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise InvalidArgument(f"the setting {text!r} must be KEY=VALUE, for example lr=0.001")
        check_known([name], allowed, "a recipe")
        settings[name] = _load_yaml(value, f"the setting {text!r}")
    return settings


def read_recipe_file(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """Read a user's YAML file; `names` are the package's recipes, for the error message."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"the recipe {str(path)!r} cannot be read ({first_line(error)}); "
            f"give one of: {', '.join(names)}; or a YAML file"
        ) from error
    return read_mapping(text, str(path))


def check_known(names: Iterable[Any], allowed: Sequence[str], whose: str) -> None:
    """Raise an error if a name is not allowed."""
    unknown = [str(name) for name in names if name not in allowed]
    if unknown:
        raise InvalidArgument(f"{', '.join(unknown)}: no such setting in {whose}; choose from: {', '.join(allowed)}")


def read_mapping(text: str, whose: str) -> dict[str, Any]:
    """Parse settings written as YAML."""
    values = _load_yaml(text, whose)
    if not isinstance(values, dict):
        raise InvalidArgument(
            f"{whose} holds {type(values).__name__} but must hold settings; write one KEY: VALUE per line"
        )
    return values


def _load_yaml(text: str, whose: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # the safe loader, which makes plain values only
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InvalidArgument(f"{whose} is not YAML{line} ({error.problem}); fix it") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidArgument(f"{whose} is not YAML ({first_line(error)}); fix it") from error


class _Loader(yaml.SafeLoader):
    """The safe loader, which also reads 3e-4 as a number (text in YAML 1.1) and refuses repeated keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        if repeated:
            raise yaml.YAMLError(f"{', '.join(repeated)} is given twice")
        return dict(super().construct_mapping(node, deep))


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _check_num_candidates(value: Any) -> int | tuple[int, int]:
    """Return T, or its range; a ranking needs two frames."""
    if not isinstance(value, (tuple, list)):
        return check_int("num_candidates", value, at_least=2)
    if len(value) != 2:
        raise InvalidArgument(f"num_candidates={value!r} must be one integer, or two: the minimum and the maximum")
    low, high = (check_int(f"num_candidates[{index}]", number, at_least=2) for index, number in enumerate(value))
    if low > high:
        raise InvalidArgument(f"num_candidates={value!r} must have the minimum first")
    return low, high


def _copy_json(name: str, value: Any) -> dict[str, Any]:
    """Return a copy of a dict of JSON values, which is saved with the sampler."""
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        copy = None
    if not isinstance(copy, dict) or copy != value:
        raise InvalidArgument(f"{name}={value!r} must be a dict of JSON values, or {{}}")
    return copy
