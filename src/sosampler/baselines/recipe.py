"""The settings with which a baseline is trained, and the recipes that ship as YAML files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from sosampler._util.files import plain
from sosampler._util.validation import check_float, check_int, one_of
from sosampler.baselines.base import RAW, Baseline
from sosampler.baselines.registry import baseline_arguments, baseline_class, create_baseline, list_systems
from sosampler.errors import InvalidArgument, first_line
from sosampler.samplers.recipe import check_known, read_mapping, read_recipe_file

OPTIMIZERS = ("adamw", "sgd")
_DRAWN_FOR_CHECKS = 10  # T of a baseline that is built to check its settings alone


@dataclass(frozen=True, kw_only=True)
class BaselineRecipe:
    """How `train` trains a baseline. `read_baseline_recipe("frameexit", epochs=3, beta=1e-2)` changes some of it."""

    name: str
    system: str  # a name of `list_systems()`
    num_candidates: int  # T
    epochs: int | dict[str, int]  # of each phase, or a number for each; a phase with 0 is left out
    lr: float  # at the start of each phase; half a cosine takes it down to 0
    batch_size: int  # videos
    optimizer: str  # "adamw" or "sgd"
    weight_decay: float
    clip: float | None  # largest norm of the gradient; None: any
    seed: int
    settings: dict[str, Any]  # arguments of the class, without those that follow from the bank

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidArgument(f"name={self.name!r} must be text that is not empty")
        one_of("system", self.system, list_systems())
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        checked: dict[str, Any] = {
            "num_candidates": check_int("num_candidates", self.num_candidates),
            "batch_size": check_int("batch_size", self.batch_size),
            "seed": check_int("seed", self.seed, at_least=0),
            "lr": check_float("lr", self.lr, above=0.0),
            "weight_decay": check_float("weight_decay", self.weight_decay, at_least=0.0),
            "clip": None if self.clip is None else check_float("clip", self.clip, above=0.0),
        }
        baseline = _on_meta(self.system, self.settings)
        # With the defaults of those that were left out.
        checked["settings"] = plain({name: baseline.config[name] for name in _class_settings(self.system)})
        checked["epochs"] = _checked_epochs(self.epochs, baseline)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def feature_sets(self) -> tuple[str, ...]:
        """The sets that the baseline needs; see `Baseline.feature_sets`."""
        return self.without_weights().feature_sets

    @property
    def needs_light(self) -> bool:
        """Whether the baseline also needs features of a light network."""
        return "light" in self.feature_sets

    def without_weights(self) -> Baseline:
        """Create the baseline on the meta device, with sizes that mean nothing: its settings alone."""
        return _on_meta(self.system, self.settings)

    def build(self, **from_data: Any) -> Baseline:
        """Create the baseline with random weights, which depend on the seed alone; `from_data`: by `from_bank`."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed % 2**63)
            return _create(self.system, from_data, self.settings)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; `BaselineRecipe(**values)` is the inverse."""
        return asdict(self)

    def changed(self, **changes: Any) -> BaselineRecipe:
        """Return the recipe with other fields, or other settings of the baseline by their own names.

        A number of epochs is that of every phase; by names, the other phases keep theirs.
        """
        check_known(changes, recipe_settings(self.system), f"a recipe of {self.system}")
        given = _mapping(changes.pop("settings", {}))
        names = [field.name for field in fields(self)]
        given |= {name: changes.pop(name) for name in list(changes) if name not in names}
        if isinstance(epochs := changes.get("epochs"), Mapping):
            phases = _on_meta(self.system, {}).phases
            before = self.epochs if isinstance(self.epochs, Mapping) else dict.fromkeys(phases, self.epochs)
            changes["epochs"] = {**before, **epochs}
        return BaselineRecipe(**{**self.to_dict(), **changes, "settings": {**self.settings, **given}})


def recipe_settings(system: str) -> list[str]:
    """Return all settings of the recipe of a baseline: its fields and the arguments of the class."""
    return [*(field.name for field in fields(BaselineRecipe) if field.name != "system"), *_class_settings(system)]


def refuse_light(system: str, given: Mapping[str, Any]) -> None:
    """Refuse the options of a light network, by their names, for a baseline that has none."""
    unused = [name for name, value in given.items() if value is not None]
    with_light = [name for name in list_systems() if "light" in baseline_class(name).feature_sets]
    if unused and one_of("baseline", system, list_systems()) not in with_light:
        raise InvalidArgument(
            f"{' and '.join(unused)} would change nothing: {system} has no light features, only "
            f"{' and '.join(with_light)} do; leave {'it' if len(unused) == 1 else 'them'} out"
        )


def read_baseline_recipe(
    recipe: str | Path | BaselineRecipe, *, system: str | None = None, **changes: Any
) -> BaselineRecipe:
    """Read a recipe by the name of its baseline or from a YAML file, with some of it changed.

    A file overrides the recipe that ships with the package, in `settings` too. Its default name is that of the file.
    `system`: the baseline that the recipe must be for; a file need not name it then. `changes`: fields, and settings of
    the baseline by their own names.
    """
    if isinstance(recipe, BaselineRecipe):
        read = recipe
    elif not isinstance(recipe, (str, Path)):
        raise InvalidArgument(
            f"recipe={recipe!r} must be one of: {', '.join(list_systems())}; a YAML file, or a BaselineRecipe"
        )
    elif str(recipe) in list_systems():
        read = _shipped_recipe(str(recipe))
    else:
        values = read_recipe_file(Path(recipe), list_systems())
        name = values.pop("system", system)
        if name is None:
            raise InvalidArgument(
                f"the recipe {recipe} has no baseline; add a line system: NAME with one of: {', '.join(list_systems())}"
            )
        base = _shipped_recipe(one_of(f"system of the recipe {recipe}", name, list_systems()))
        read = base.changed(**{"name": Path(recipe).stem, **values})
    if system is not None and read.system != system:
        raise InvalidArgument(
            f"the recipe {read.name!r} is of {read.system}, but {system} is to be trained; "
            f"give sampler={read.system!r}, or a recipe of {system}"
        )
    return read.changed(**changes)


def _shipped_recipe(system: str) -> BaselineRecipe:
    text = files("sosampler.baselines").joinpath("recipes", f"{system}.yaml").read_text(encoding="utf-8")
    return BaselineRecipe(**read_mapping(text, f"{system}.yaml"))


def from_bank(system: str) -> list[str]:
    """Return the arguments of a baseline that follow from the bank, as far as its class has them."""
    sets = [name for name in baseline_class(system).feature_sets if name not in RAW]
    of_sets = [f"{name}_{fact}" for fact in ("width", "gmacs") for name in sets]
    return [*of_sets, "num_classes", "multi_label", "num_candidates"]


def _class_settings(system: str) -> list[str]:
    return [name for name in baseline_arguments(system) if name not in from_bank(system)]


def _create(system: str, from_data: Mapping[str, Any], settings: Mapping[str, Any]) -> Baseline:
    """Create a baseline; what it has no argument for is left out."""
    arguments = baseline_arguments(system)
    return create_baseline(system, **{name: from_data[name] for name in from_data if name in arguments}, **settings)


def _on_meta(system: str, settings: Any) -> Baseline:
    """Create the baseline without weights, so that its class checks the settings."""
    check_known(_mapping(settings), _class_settings(system), f"settings of {system}")
    try:
        with torch.device("meta"):
            widths = {name: 1 for name in from_bank(system) if name.endswith("_width")}
            return _create(system, widths | {"num_classes": 2, "num_candidates": _DRAWN_FOR_CHECKS}, settings)
    except TypeError as error:  # for example of text where a list is expected
        raise InvalidArgument(
            f"the settings {dict(settings)} do not fit {system} ({first_line(error)}); see the arguments of its class"
        ) from error


def _mapping(settings: Any) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise InvalidArgument(f"settings={settings!r} must be a mapping of names to values")
    return dict(settings)


def _checked_epochs(epochs: Any, baseline: Baseline) -> int | dict[str, int]:
    if not isinstance(epochs, Mapping):
        return check_int("epochs", epochs)
    checked = {
        one_of("phase of epochs", phase, baseline.phases): check_int(f"epochs[{phase!r}]", count, at_least=0)
        for phase, count in epochs.items()
    }
    if not any(checked.values()):
        raise InvalidArgument(f"epochs={dict(epochs)} must train at least one phase for one epoch")
    return checked
