"""Recipes: all settings of a sampler's training, from YAML files. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from sosampler._util.files import read_bytes
from sosampler._util.validation import (
    check_bool,
    check_float,
    check_fraction,
    check_int,
    check_range,
    copy_json,
    one_of,
)
from sosampler.errors import InvalidArgument, first_line
from sosampler.samplers.registry import ANSWERS, MEAN, TITLES

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
    budget: bool = False  # whether a second stage learns how many frames, 1..N, a video needs; for num_frames="auto"
    budget_confidence: float = 0.5  # so sure must a right answer be for its frames to be enough

    def __post_init__(self) -> None:
        check_int("num_frames", self.num_frames)
        one_of("reward", self.reward, REWARDS)
        one_of("baseline", self.baseline, BASELINES)
        one_of("likelihood", self.likelihood, LIKELIHOODS)
        check_float("entropy", self.entropy, at_least=0.0)
        check_bool("budget", self.budget)
        check_fraction("budget_confidence", self.budget_confidence)


TARGETS = ("label", "max")
TARGET_SPACES = ("probability", "log")
BELIEF = "belief"
GUIDANCE = ("logits", "probabilities", "frames", BELIEF)
BEST = "best"  # of the answers, on dev
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
    dropout: float  # before both heads
    class_head: bool  # whether a second head predicts classes
    scoring: dict[str, Any]  # settings of `Scoring`
    # The loss: lam · rank + (1 − lam) · guidance + distill · distillation + calibrate · calibration
    target: str  # the classifier's confidence in the "label", or its "max" over classes
    target_space: str  # "probability" or "log"
    tau: float | None  # targets are softmax over T of confidence / tau; None: the confidence itself
    loss: str
    prediction: str  # what is compared with the targets
    margin: float  # of the hinge
    weighted: bool  # hinge, logistic: pairs are weighted by their difference in the target
    temperature: float  # listwise: of the targets
    reinforce: dict[str, Any]  # reinforce: fields of `OCSamplerSettings`; {} for other losses
    lam: float  # weight of the ranking loss; 1 − lam is that of label guidance, with a class head
    # What label guidance averages over frames: "logits", "probabilities", or the loss of "frames"; or the loss of the
    # "belief" that both heads have together
    guidance: str
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
    # `to_dict` leaves the rest out at its defaults, so that recipes and runs of versions without them stay equal.
    pretrain: int = 0  # epochs of a first stage, in which the backbone learns the labels of the train split; 0: none
    pretrain_lr: float | None = None  # None: 0.01 (sgd) or 0.001 (adamw)
    freeze: float = 0.0  # first layers of the backbone that stay as the weights are, as a share of its parameters
    # How the classifier's answers for the chosen frames become one: "mean", "weighted", "fused", "probed", or "best" on
    # dev
    answer: str = BEST

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.crop_scale[1] > 1:
            raise InvalidArgument(f"crop_scale={self.crop_scale} must be at most 1, the area of the frame")
        for name in ("lam", "freeze"):
            if getattr(self, name) > 1:
                raise InvalidArgument(f"{name}={getattr(self, name)} must be from 0 to 1")
        if self.loss in SCALE_FREE and (self.prediction != "raw" or self.tau is not None):
            raise InvalidArgument(
                f"loss={self.loss!r} needs raw scores, not prediction={self.prediction!r} and tau={self.tau}; "
                "set prediction to raw and tau to null"
            )
        if not self.class_head and self.distill > 0:
            raise InvalidArgument(f"distill={self.distill} needs a class head; set class_head to true or distill to 0")
        if self.loss == "reinforce":
            self._check_reinforce()
        elif self.reinforce:
            raise InvalidArgument(f"reinforce={self.reinforce} must be {{}} unless loss='reinforce'; set it to {{}}")
        if self.lam == 0 and not self.class_head and not self.calibrate:
            raise InvalidArgument("lam=0.0 without a class head leaves no loss; raise lam or add a class head")

    def _check_reinforce(self) -> None:
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
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {name: value for name, value in values.items() if name not in _OPTIONAL or value != _OPTIONAL[name]}

    def identity(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share.

        Runs of versions that knew the mean alone are taken up, so the usual answers are not among them; any can be
        chosen when the sampler is used.
        """
        return {name: value for name, value in self.to_dict().items() if name != "answer" or value not in (BEST, MEAN)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplerRecipe:
        """Build a recipe from all of its settings."""
        check_known(values, SETTINGS, "a recipe")
        if missing := [name for name in SETTINGS if name not in values and name not in _OPTIONAL]:
            raise InvalidArgument(f"the recipe has no {', '.join(missing)}; give every setting")
        return cls(**values)

    def changed(self, **settings: Any) -> SamplerRecipe:
        """Return a copy with some settings changed."""
        return SamplerRecipe.from_dict({**self.to_dict(), **settings})

    def starting_from(self, weights: str | Path | None) -> SamplerRecipe:
        """Return the recipe for a start from these weights: layers that are random and never learned are not frozen."""
        return self if weights is not None or self.pretrain else self.changed(freeze=0.0)


SETTINGS = tuple(field.name for field in fields(SamplerRecipe))
_OPTIONAL = {field.name: field.default for field in fields(SamplerRecipe) if field.default is not MISSING}
_PRETRAIN_LR = {"sgd": 0.01, "adamw": 0.001}


def drawn_frames(recipe: SamplerRecipe) -> int:
    """Return how many frames loss="reinforce" draws; 0 for other losses."""
    return OCSamplerSettings(**recipe.reinforce).num_frames if recipe.loss == "reinforce" else 0


def pretrain_recipe(recipe: SamplerRecipe) -> SamplerRecipe:
    """Return the recipe with the epochs and the learning rate of its stage `pretrain`."""
    lr = _PRETRAIN_LR[recipe.optimizer] if recipe.pretrain_lr is None else recipe.pretrain_lr
    return recipe.changed(epochs=recipe.pretrain, lr=lr)


def list_recipes() -> list[str]:
    """List the recipes that come with the package.

    Examples:
        >>> list_recipes()
        ['default', 'paper', 'authors', 'ocsampler', 'scsampler-rank', 'scsampler-ac']
    """
    return list(_NAMES)


def title_of(recipe: Mapping[str, Any]) -> str:
    """Return what tables call a sampler with this recipe, and which settings differ from the recipe of that name.

    Examples:
        >>> title_of(read_recipe("paper").to_dict()), title_of(read_recipe("default", lr=0.1, seed=3).to_dict())
        ('SOSampler (paper)', 'SOSampler+, other lr')
    """
    name = str(recipe["name"])
    if name not in TITLES:
        return name
    known = {key: value for key, value in read_recipe(name).to_dict().items() if key != "seed"}
    # A recipe of an older version may lack settings, and `to_dict` leaves `freeze` out at 0.
    given = {**known, "freeze": 0.0, **recipe}
    changed = [key for key, value in known.items() if given[key] != value]
    return f"{TITLES[name]}, other {', '.join(changed)}" if changed else TITLES[name]


def read_recipe(recipe: str | Path | SamplerRecipe, **settings: Any) -> SamplerRecipe:
    """Read a recipe by its name or from a YAML file, and change single settings.

    A file may omit settings: they come from the recipe that its key `base` names, by default "default". A file with
    all that `SamplerRecipe.to_dict` writes has no base. The recipe's name defaults to that of the file.

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
    values = {"name": path.stem, **values}
    if _BASE not in values and all(name in values for name in SETTINGS if name not in _OPTIONAL):
        return SamplerRecipe.from_dict(values).changed(**settings)
    base = read_recipe(one_of(_BASE, values.pop(_BASE, "default"), _NAMES))
    return base.changed(**values).changed(**settings)


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
        text = read_bytes(path, "MAX_RECIPE_BYTES").decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"the recipe {str(path)!r} cannot be read ({first_line(error)}); "
            f"give one of: {', '.join(names)}; or a YAML file"
        ) from error
    return read_mapping(text, str(path))


def check_known(names: Iterable[Any], allowed: Sequence[str], whose: str) -> None:
    """Raise an error if a name is not allowed."""
    if unknown := [str(name) for name in names if name not in allowed]:
        raise InvalidArgument(
            f"{', '.join(unknown[:5])[:200]}: no such setting in {whose}; choose from: {', '.join(allowed)}"
        )


def read_mapping(text: str, whose: str, *, aliases: bool = False) -> dict[str, Any]:
    """Parse settings written as YAML; `aliases` (&name, *name) only in files of the package."""
    values = _load_yaml(text, whose, _Loader if aliases else _LoaderWithoutAliases)
    if not isinstance(values, dict):
        raise InvalidArgument(
            f"{whose} holds {type(values).__name__} but must hold settings; write one KEY: VALUE per line"
        )
    return values


def _load_yaml(text: str, whose: str, loader: Any = None) -> Any:
    try:
        return yaml.load(text, Loader=loader or _LoaderWithoutAliases)  # safe loaders, which make plain values only
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InvalidArgument(f"{whose} is not YAML{line} ({error.problem}); fix it") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidArgument(f"{whose} is not YAML ({first_line(error)}); fix it") from error


class _Loader(yaml.SafeLoader):
    """The safe loader, which also reads 3e-4 as a number (text in YAML 1.1) and refuses repeated keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if repeated := sorted(key for key, count in keys.items() if count > 1):
            raise yaml.YAMLError(f"{', '.join(repeated[:3])} is given twice")
        return dict(super().construct_mapping(node, deep))


class _LoaderWithoutAliases(_Loader):
    """Refuses aliases, by which a few lines can stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"the alias *{self.peek_event().anchor}; write the value itself")
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _check_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{name}={value!r} must be a string that is not empty")
    return value


def _check_num_candidates(name: str, value: Any) -> int | tuple[int, int]:
    """Return T, or its range; a ranking needs two frames."""
    if not isinstance(value, (tuple, list)):
        return check_int(name, value, at_least=2)
    if len(value) != 2:
        raise InvalidArgument(f"{name}={value!r} must be one integer, or two: the minimum and the maximum")
    low, high = (check_int(f"{name}[{index}]", number, at_least=2) for index, number in enumerate(value))
    if low > high:
        raise InvalidArgument(f"{name}={value!r} must have the minimum first")
    return low, high


_at_least_0, _above_0 = partial(check_float, at_least=0.0), partial(check_float, above=0.0)

# How each setting is checked
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("name", "backbone"), _check_text),
    "target": partial(one_of, allowed=TARGETS),
    "target_space": partial(one_of, allowed=TARGET_SPACES),
    "loss": partial(one_of, allowed=("hinge", "mse", "l2", "logistic", "listwise", "reinforce")),
    "prediction": partial(one_of, allowed=("softmax", "softmax-sigmoid", "sigmoid", "raw")),
    "guidance": partial(one_of, allowed=GUIDANCE),
    "answer": partial(one_of, allowed=(BEST, *ANSWERS)),
    "optimizer": partial(one_of, allowed=("sgd", "adamw")),
    "crop_per": partial(one_of, allowed=("video", "frame")),
    **dict.fromkeys(("shift", "seed", "pretrain"), partial(check_int, at_least=0)),
    **dict.fromkeys(("epochs", "batch_size"), check_int),
    "input_size": partial(check_int, at_least=32),
    **dict.fromkeys(("temperature", "lr"), _above_0),
    **dict.fromkeys(
        ("tau", "clip", "pretrain_lr"), lambda name, value: None if value is None else _above_0(name, value)
    ),
    **dict.fromkeys(("margin", "lam", "distill", "calibrate", "weight_decay", "freeze"), _at_least_0),
    **dict.fromkeys(("dropout", "momentum", "warmup", "ema"), check_fraction),
    **dict.fromkeys(("class_head", "weighted", "flip"), check_bool),
    **dict.fromkeys(("crop_scale", "crop_ratio"), check_range),
    "num_candidates": _check_num_candidates,
    **dict.fromkeys(("scoring", "reinforce"), copy_json),
}
