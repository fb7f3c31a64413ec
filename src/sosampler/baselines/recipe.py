"""How a system is trained: every setting once, with its check, and the recipes that come as YAML files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from sosampler._util.validation import one_of, real_number, whole_number
from sosampler.baselines.base import Baseline
from sosampler.baselines.registry import baseline_arguments, create_baseline, list_systems
from sosampler.errors import InvalidArgument, first_line
from sosampler.samplers.recipe import check_known, read_mapping, read_recipe_file

OPTIMIZERS = ("adamw", "sgd")
# Arguments of a system that follow from the bank.
OF_THE_DATA = ("heavy_width", "light_width", "num_classes", "multi_label")


@dataclass(frozen=True, kw_only=True)
class BaselineRecipe:
    """How `train` makes a system. `read_baseline_recipe("frameexit", epochs=3, beta=1e-2)` changes some of it."""

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
    settings: dict[str, Any]  # arguments of the system's class but for those that follow from the bank

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidArgument(f"name={self.name!r} is not allowed; give a text that is not empty")
        one_of("system", self.system, list_systems())
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        self._set("num_candidates", whole_number("num_candidates", self.num_candidates))
        self._set("batch_size", whole_number("batch_size", self.batch_size))
        self._set("seed", whole_number("seed", self.seed, at_least=0))
        self._set("lr", real_number("lr", self.lr, above=0.0))
        self._set("weight_decay", real_number("weight_decay", self.weight_decay, at_least=0.0))
        if self.clip is not None:
            self._set("clip", real_number("clip", self.clip, above=0.0))
        network = _without_memory(self.system, self.settings)
        # As the system understood them, with those that were left out.
        told = {name: value for name, value in network.config.items() if name not in OF_THE_DATA}
        self._set("settings", json.loads(json.dumps(told)))
        self._set("epochs", _checked_epochs(self.epochs, network))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def needs_light(self) -> bool:
        """Whether the system also looks at features of a light network."""
        return _looks_at_light(self.system)

    def build(self, *, heavy_width: int, light_width: int | None, num_classes: int, multi_label: bool) -> Baseline:
        """The system with fresh weights, which depend on the seed alone."""
        widths = {"heavy_width": heavy_width, **({"light_width": light_width} if self.needs_light else {})}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed % 2**63)
            return create_baseline(
                self.system, **widths, num_classes=num_classes, multi_label=multi_label, **self.settings
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values as JSON and YAML have them; `BaselineRecipe(**values)` is the way back."""
        return asdict(self)

    def changed(self, **changes: Any) -> BaselineRecipe:
        """The same with other fields, or other settings of the system by their own names.

        A number of epochs is that of every phase; by names, the other phases keep theirs.
        """
        check_known(changes, recipe_settings(self.system), f"a recipe of {self.system}")
        given = _plain(changes.pop("settings", {}))
        own = [field.name for field in fields(self)]
        given |= {name: changes.pop(name) for name in list(changes) if name not in own}
        if isinstance(epochs := changes.get("epochs"), Mapping):
            changes["epochs"] = {**_each_phase(self.epochs, self.system), **epochs}
        return BaselineRecipe(**{**self.to_dict(), **changes, "settings": {**self.settings, **given}})


def recipe_settings(system: str) -> list[str]:
    """Everything that can be changed in the recipe of a system: its fields and the settings of the class."""
    own = [field.name for field in fields(BaselineRecipe) if field.name != "system"]
    return [*own, *(name for name in baseline_arguments(system) if name not in OF_THE_DATA)]


def refuse_light(system: str, given: Mapping[str, Any]) -> None:
    """Say so where a light network, by the names of its options, is given for a system that has none."""
    useless = [name for name, value in given.items() if value is not None]
    if useless and not _looks_at_light(one_of("system", system, list_systems())):
        others = [name for name in list_systems() if _looks_at_light(name)]
        raise InvalidArgument(
            f"{' and '.join(useless)} would change nothing: {system} looks at no light features, only "
            f"{' and '.join(others)} do; leave {'it' if len(useless) == 1 else 'them'} out"
        )


def _looks_at_light(system: str) -> bool:
    return "light_width" in baseline_arguments(system)


def read_baseline_recipe(
    recipe: str | Path | BaselineRecipe, *, system: str | None = None, **changes: Any
) -> BaselineRecipe:
    """A recipe by the name of its system or from a YAML file, with some of it changed.

    A file may leave out what it takes over from the recipe that comes with the package, in `settings` too. Its name is
    that of the file if it gives none.

    Args:
        recipe: a name of `list_systems()`, a file, or a recipe.
        system: whose recipe it must be; a file need not say so then.
        changes: fields, and settings of the system by their own names.
    """
    if isinstance(recipe, BaselineRecipe):
        found = recipe
    elif not isinstance(recipe, (str, Path)):
        raise InvalidArgument(
            f"recipe={recipe!r} is not allowed for a system; give one of: {', '.join(list_systems())}; a YAML file, or "
            "a BaselineRecipe"
        )
    elif str(recipe) in list_systems():
        found = _own_recipe(str(recipe))
    else:
        found = _read_file(Path(recipe), system)
    if system is not None and found.system != system:
        raise InvalidArgument(
            f"the recipe {found.name!r} is of {found.system}, but {system} is to be trained; "
            f"give sampler={found.system!r}, or a recipe of {system}"
        )
    return found.changed(**changes)


def _own_recipe(system: str) -> BaselineRecipe:
    text = files("sosampler.baselines").joinpath("recipes", f"{system}.yaml").read_text(encoding="utf-8")
    return BaselineRecipe(**read_mapping(text, f"{system}.yaml"))


def _read_file(path: Path, system: str | None) -> BaselineRecipe:
    values = read_recipe_file(path, list_systems())
    meant = values.pop("system", system)
    if meant is None:
        raise InvalidArgument(
            f"the recipe {path} does not say which system it is for; add a line system: NAME with one of: "
            f"{', '.join(list_systems())}"
        )
    base = _own_recipe(one_of(f"system of the recipe {path}", meant, list_systems()))
    return base.changed(**{"name": path.stem, **values})


def _without_memory(system: str, settings: Any) -> Baseline:
    """The system without weights: its class checks the settings."""
    allowed = [name for name in baseline_arguments(system) if name not in OF_THE_DATA]
    check_known(_plain(settings), allowed, f"settings of {system}")
    some = {"heavy_width": 1, "light_width": 1, "num_classes": 2}
    try:
        with torch.device("meta"):
            return create_baseline(
                system,
                **{name: value for name, value in some.items() if name in baseline_arguments(system)},
                **settings,
            )
    except TypeError as error:  # of a text where a list belongs
        raise InvalidArgument(
            f"the settings {dict(settings)} do not fit {system} ({first_line(error)}); see the docstring of its class"
        ) from error


def _plain(settings: Any) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise InvalidArgument(f"settings={settings!r} is not allowed; give names with values")
    return dict(settings)


def _each_phase(epochs: int | dict[str, int], system: str) -> dict[str, int]:
    phases = _without_memory(system, {}).phases
    return dict(epochs) if isinstance(epochs, Mapping) else dict.fromkeys(phases, epochs)


def _checked_epochs(epochs: Any, system: Baseline) -> int | dict[str, int]:
    if not isinstance(epochs, Mapping):
        return whole_number("epochs", epochs)
    for phase, count in epochs.items():
        one_of("phase of epochs", phase, system.phases)
        whole_number(f"epochs[{phase!r}]", count, at_least=0)
    if not any(epochs.values()):
        raise InvalidArgument(f"epochs={dict(epochs)} is not allowed; train at least one phase for one epoch")
    return {phase: int(count) for phase, count in epochs.items()}
