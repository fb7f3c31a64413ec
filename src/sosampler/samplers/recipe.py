"""What there is to choose in OCSampler's training. Apart from its loss, so that recipes are read without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from sosampler._util.validation import least_and_most, one_of, real_number, true_or_false, whole_number
from sosampler.errors import InvalidArgument, first_line

REWARDS = ("confidence", "label")
BASELINES = ("uniform", "sample")
LIKELIHOODS = ("set", "ordered")


@dataclass(frozen=True, kw_only=True)
class OCSamplerSettings:
    """What there is to choose in OCSampler's training; the defaults are its configuration for ActivityNet."""

    num_frames: int = 6  # N
    reward: str = "confidence"  # "confidence" needs no labels
    baseline: str = "uniform"  # or "sample": a second draw of the policy
    likelihood: str = "set"  # or "ordered": that of the order in which the frames were drawn
    entropy: float = 0.0  # weight of the entropy, which keeps the policy from settling early

    def __post_init__(self) -> None:
        whole_number("num_frames", self.num_frames)
        one_of("reward", self.reward, REWARDS)
        one_of("baseline", self.baseline, BASELINES)
        one_of("likelihood", self.likelihood, LIKELIHOODS)
        real_number("entropy", self.entropy, at_least=0.0)


TARGETS = ("label", "max")
TARGET_SPACES = ("probability", "log")
LOSSES = ("hinge", "mse", "logistic", "listwise", "reinforce")
PREDICTIONS = ("softmax", "softmax-sigmoid", "sigmoid", "raw")
GUIDANCE = ("logits", "probabilities", "frames")
OPTIMIZERS = ("sgd", "adamw")
CROP_PER = ("video", "frame")
SCALE_FREE = (
    "logistic",
    "listwise",
    "reinforce",
)  # losses of raw scores; their targets are not normalised over T either

_NAMES = ("default", "paper", "authors", "ocsampler", "scsampler-rank", "scsampler-ac")
_BASE = "base"  # key of a user's file: the recipe that has the values the file leaves out


@dataclass(frozen=True, kw_only=True)
class SamplerRecipe:
    """Settings of `train`. The values are in the recipes' files; `read_recipe("default", epochs=3)` changes some."""

    name: str
    # The network
    backbone: str  # "mobilenet_v2" or "timm:NAME"
    shift: int  # one channel in `shift` comes from the next frame, one from the frame before; 0: none
    input_size: int  # pixels of the square that the sampler sees
    dropout: float  # before the importance head
    class_head: bool  # a second head that names the classes
    scoring: dict[str, Any]  # how the heads become one score
    # The loss: lam · rank + (1 − lam) · guidance + distill · distillation + calibrate · calibration
    target: str  # the classifier's confidence in the "label", or its "max" over classes
    target_space: str  # "probability" or "log"
    tau: float | None  # targets are softmax over T of confidence / tau; None: left as they are
    loss: str  # one of LOSSES
    prediction: str  # one of PREDICTIONS: what is compared with the targets
    margin: float  # of the hinge
    weighted: bool  # hinge, logistic: each pair counts by its gap in the target
    temperature: float  # listwise: of the targets
    reinforce: dict[str, Any]  # reinforce: fields of `OCSamplerSettings`; {} for other losses
    lam: float  # share of the ranking loss; the rest goes to label guidance, if there is a class head
    guidance: str  # what label guidance averages over frames: "logits", "probabilities", or the loss of single "frames"
    distill: float  # weight of the classifier's class probabilities, frame by frame
    calibrate: float  # weight of the importance as log-odds of the target confidence
    # The optimisation
    optimizer: str
    lr: float  # for this batch size; half a cosine takes it down to 0
    momentum: float  # of SGD
    weight_decay: float
    epochs: int
    batch_size: int  # videos, of all processes together
    warmup: float  # share of all steps in which the rate rises from 0
    clip: float | None  # largest norm of the gradient; None: any
    ema: float  # decay of the running mean of the weights, a step; 0: none
    # The data
    num_candidates: int | tuple[int, int]  # T; two numbers: drawn for each batch from a few between them
    crop_scale: tuple[float, float]  # area of the random crop
    crop_ratio: tuple[float, float]  # its width over its height
    crop_per: str  # "video": one box for all of its frames; "frame": one each
    flip: bool  # half of the videos (or frames) are mirrored
    seed: int

    def __post_init__(self) -> None:
        for name in ("name", "backbone"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise InvalidArgument(f"{name}={getattr(self, name)!r} is not allowed; give a text that is not empty")
        for name, allowed in _WORDS.items():
            one_of(name, getattr(self, name), allowed)
        for name, least in _WHOLE.items():
            self._set(name, whole_number(name, getattr(self, name), at_least=least))
        for name in _ABOVE_0:
            self._set(name, real_number(name, getattr(self, name), above=0.0))
        for name in _AT_LEAST_0:
            self._set(name, real_number(name, getattr(self, name), at_least=0.0))
        for name in _SHARES:
            self._set(name, _share(name, getattr(self, name)))
        for name in ("class_head", "weighted", "flip"):
            true_or_false(name, getattr(self, name))
        for name in ("tau", "clip"):
            if getattr(self, name) is not None:
                self._set(name, real_number(name, getattr(self, name), above=0.0))
        for name in ("crop_scale", "crop_ratio"):
            self._set(name, least_and_most(name, getattr(self, name)))
        self._set("num_candidates", _num_candidates(self.num_candidates))
        for name in ("scoring", "reinforce"):
            self._set(name, _plain_settings(name, getattr(self, name)))
        self._check_together()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.crop_scale[1] > 1:
            raise InvalidArgument(f"crop_scale={self.crop_scale} is not allowed; a crop has at most the whole area, 1")
        if self.lam > 1:
            raise InvalidArgument(f"lam={self.lam} is not allowed; give a share from 0 to 1")
        if self.loss in SCALE_FREE and (self.prediction != "raw" or self.tau is not None):
            raise InvalidArgument(
                f"loss={self.loss!r} with prediction={self.prediction!r} and tau={self.tau} is not allowed; "
                "it compares raw scores, so set prediction to raw and tau to null"
            )
        if not self.class_head and self.distill > 0:
            raise InvalidArgument(f"distill={self.distill} needs a class head; set class_head to true or distill to 0")
        self._check_reinforce()
        if self.lam == 0 and not self.class_head and not self.calibrate:
            raise InvalidArgument("lam=0.0 without a class head leaves nothing to learn; raise lam or add a class head")

    def _check_reinforce(self) -> None:
        if self.loss != "reinforce":
            if self.reinforce:
                raise InvalidArgument(f"reinforce={self.reinforce} is for loss='reinforce'; set it to {{}}")
            return
        allowed = [field.name for field in fields(OCSamplerSettings)]
        check_known(self.reinforce, allowed, "reinforce")
        wanted = OCSamplerSettings(**self.reinforce).num_frames
        fewest = self.num_candidates if isinstance(self.num_candidates, int) else self.num_candidates[0]
        if fewest < wanted:
            raise InvalidArgument(
                f"num_candidates={self.num_candidates} offers fewer frames than reinforce draws ({wanted}); "
                "raise num_candidates, or lower num_frames of reinforce"
            )
        if self.scoring:
            raise InvalidArgument("scoring must be {} for loss='reinforce', which draws frames by their importance")

    def to_dict(self) -> dict[str, Any]:
        """Plain values as JSON and YAML have them; `SamplerRecipe.from_dict` is the way back."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplerRecipe:
        """A recipe of which every setting is given; names that are unknown or missing are told."""
        check_known(values, SETTINGS, "a recipe")
        missing = [name for name in SETTINGS if name not in values]
        if missing:
            raise InvalidArgument(f"the recipe has no {', '.join(missing)}; give every setting")
        return cls(**values)

    def changed(self, **settings: Any) -> SamplerRecipe:
        """The same with some settings changed."""
        return SamplerRecipe.from_dict({**self.to_dict(), **settings})


SETTINGS = tuple(field.name for field in fields(SamplerRecipe))

# What is allowed, setting by setting
_WORDS = {
    "target": TARGETS,
    "target_space": TARGET_SPACES,
    "loss": LOSSES,
    "prediction": PREDICTIONS,
    "guidance": GUIDANCE,
    "optimizer": OPTIMIZERS,
    "crop_per": CROP_PER,
}
_WHOLE = {"shift": 0, "input_size": 32, "epochs": 1, "batch_size": 1, "seed": 0}  # and the least
_ABOVE_0 = ("temperature", "lr")
_AT_LEAST_0 = ("margin", "lam", "distill", "calibrate", "weight_decay")
_SHARES = ("dropout", "momentum", "warmup", "ema")


def drawn_frames(recipe: SamplerRecipe) -> int:
    """How many frames loss="reinforce" draws; 0 for other losses."""
    return OCSamplerSettings(**recipe.reinforce).num_frames if recipe.loss == "reinforce" else 0


def list_recipes() -> list[str]:
    """Names of the recipes that come with the package.

    Examples:
        >>> list_recipes()
        ['default', 'paper', 'authors', 'ocsampler', 'scsampler-rank', 'scsampler-ac']
    """
    return list(_NAMES)


def read_recipe(recipe: str | Path | SamplerRecipe, **settings: Any) -> SamplerRecipe:
    """A recipe by its name or from a YAML file, with single settings changed.

    A file may leave settings out: they come from the recipe that its key `base` names, or else from "default". Its
    name is that of the file if it gives none.

    Examples:
        >>> read_recipe("paper").loss
        'hinge'
    """
    if isinstance(recipe, SamplerRecipe):
        return recipe.changed(**settings)
    if not isinstance(recipe, (str, Path)):
        raise InvalidArgument(
            f"recipe={recipe!r} is not allowed; give one of: {', '.join(_NAMES)}; a YAML file, or a SamplerRecipe "
            "(SamplerRecipe.from_dict makes one of a dict)"
        )
    if str(recipe) in _NAMES:
        text = files("sosampler.samplers").joinpath("recipes", f"{recipe}.yaml").read_text(encoding="utf-8")
        return SamplerRecipe.from_dict({**read_mapping(text, f"{recipe}.yaml"), **settings})
    return _read_file(Path(recipe)).changed(**settings)


def read_settings(texts: Iterable[str], allowed: Sequence[str] = SETTINGS) -> dict[str, Any]:
    """KEY=VALUE texts as settings of a recipe that knows the allowed names; values are written as in YAML.

    >>> read_settings(["lr=3e-4", "num_candidates=[4, 16]", "clip=null", "loss=hinge"])
    {'lr': 0.0003, 'num_candidates': [4, 16], 'clip': None, 'loss': 'hinge'}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise InvalidArgument(f"the setting {text!r} is not allowed; write KEY=VALUE, for example lr=0.001")
        check_known([name], allowed, "a recipe")
        found[name] = _yaml(value, f"the setting {text!r}")
    return found


def read_recipe_file(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """What a user's YAML file says; `names` of the recipes that come with the package are for the message."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"the recipe {str(path)!r} cannot be read ({first_line(error)}); "
            f"give one of: {', '.join(names)}; or a YAML file"
        ) from error
    return read_mapping(text, str(path))


def _read_file(path: Path) -> SamplerRecipe:
    values = read_recipe_file(path, _NAMES)
    check_known(values, (_BASE, *SETTINGS), f"the recipe {path}")
    base = read_recipe(one_of(_BASE, values.pop(_BASE, "default"), _NAMES))
    return base.changed(**{"name": path.stem, **values})


def check_known(names: Iterable[Any], allowed: Sequence[str], whose: str) -> None:
    """All names are allowed ones, or say which are."""
    unknown = [str(name) for name in names if name not in allowed]
    if unknown:
        raise InvalidArgument(f"{', '.join(unknown)}: no such setting in {whose}; choose from: {', '.join(allowed)}")


def read_mapping(text: str, whose: str) -> dict[str, Any]:
    """Settings written as YAML."""
    values = _yaml(text, whose)
    if not isinstance(values, dict):
        raise InvalidArgument(f"{whose} holds {type(values).__name__}, not settings; write one KEY: VALUE a line")
    return values


def _yaml(text: str, whose: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # the safe loader, which makes plain values only
    except yaml.MarkedYAMLError as error:
        place = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InvalidArgument(f"{whose} is not YAML{place} ({error.problem}); mend it") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidArgument(f"{whose} is not YAML ({first_line(error)}); mend it") from error


class _Loader(yaml.SafeLoader):
    """Safe, reads 3e-4 as a number, which YAML 1.1 takes for text, and refuses to let a key overwrite another."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.YAMLError(f"{', '.join(twice)} is given twice")
        return dict(super().construct_mapping(node, deep))


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _share(name: str, value: Any) -> float:
    if not 0 <= (number := real_number(name, value)) < 1:
        raise InvalidArgument(f"{name}={value!r} is not allowed; give a share of 0 to below 1")
    return number


def _num_candidates(value: Any) -> int | tuple[int, int]:
    """A ranking needs two frames."""
    if not isinstance(value, (tuple, list)):
        return whole_number("num_candidates", value, at_least=2)
    if len(value) != 2:
        raise InvalidArgument(f"num_candidates={value!r} is not allowed; give a number or two, the least and the most")
    low, high = (whole_number(f"num_candidates[{place}]", number, at_least=2) for place, number in enumerate(value))
    if low > high:
        raise InvalidArgument(f"num_candidates={value!r} is not allowed; the least comes first")
    return low, high


def _plain_settings(name: str, value: Any) -> dict[str, Any]:
    """A dictionary that JSON can hold, because it is saved with the sampler."""
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        copy = None
    if not isinstance(copy, dict) or copy != value:
        raise InvalidArgument(f"{name}={value!r} is not allowed; give names with values that JSON has, or {{}}")
    return copy
