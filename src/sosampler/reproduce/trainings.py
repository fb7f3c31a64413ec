"""What has to be trained for a table: each sampler once, however many tables show it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sosampler.checks import one_of
from sosampler.samplers.recipe import SamplerRecipe, read_recipe
from sosampler.samplers.registry import RECIPES, list_samplers
from sosampler.systems import list_systems
from sosampler.training.checkpoints import RESULT

_LONGEST_NAME = 80


@dataclass(frozen=True)
class Training:
    """A sampler or a system of `train` with its settings, but for the seed."""

    sampler: str
    recipe: str | None
    settings_text: str  # of the row, as JSON: two of the same settings are the same
    changes_text: str = "{}"  # what the user asked for besides, which counts more

    @classmethod
    def of(cls, sampler: str, recipe: str | None, settings: Mapping[str, Any], changes: Mapping[str, Any]) -> Training:
        """`settings` of the row; of the user's `changes` only epochs are for systems."""
        one_of("sampler", sampler, list_samplers())
        known = {name: value for name, value in changes.items() if sampler not in list_systems() or name == "epochs"}
        return cls(sampler, recipe, json.dumps(settings, sort_keys=True), json.dumps(known, sort_keys=True))

    @property
    def is_system(self) -> bool:
        return self.sampler in list_systems()

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What is changed in the recipe; a dictionary in it is completed from there."""
        return {**self._of_the_row, **json.loads(self.changes_text)}

    @cached_property
    def _of_the_row(self) -> dict[str, Any]:
        own = self._base().to_dict()
        found = {}
        for name, value in json.loads(self.settings_text).items():
            before = own.get(name)
            found[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
        return found

    def _base(self) -> Any:
        if self.is_system:
            from sosampler.systems.recipe import read_system_recipe

            return read_system_recipe(self.recipe or self.sampler, system=self.sampler, seed=0)
        return read_recipe(self.recipe or RECIPES[self.sampler], seed=0)

    def full_recipe(self, seed: int = 0) -> Any:
        """A `SamplerRecipe` or `SystemRecipe`, checked."""
        return self._base().changed(**self.settings, seed=seed)

    @cached_property
    def needs_light(self) -> bool:
        return bool(self.is_system and self.full_recipe().needs_light)

    @cached_property
    def num_candidates(self) -> int:
        """The fewest candidates that it can be trained with; a range is brought down to what a bank has."""
        told = self.full_recipe().num_candidates
        return int(told) if isinstance(told, int) else int(told[0])

    @cached_property
    def name(self) -> str:
        """Of its folder: the recipe, and what the row changes in it.

        >>> Training.of("ocsampler", None, {"num_candidates": 30, "reinforce": {"num_frames": 8}}, {}).name
        'ocsampler-reinforce-num_frames-8-num_candidates-30'
        """
        parts = [self.recipe or RECIPES.get(self.sampler, self.sampler)]
        base = self._base()
        parts += _differences(base.to_dict(), base.changed(**self._of_the_row).to_dict())
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts)).strip("-.")
        if len(name) <= _LONGEST_NAME:
            return name
        return f"{name[: _LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"

    def folder(self, place: Path, seed: int) -> Path:
        return place / "samplers" / f"{self.name}-{seed}"

    def is_finished(self, place: Path, seed: int) -> bool:
        return (self.folder(place, seed) / RESULT).is_file()


def _differences(before: Any, after: Any, name: str = "") -> list[str]:
    """Names and new values of what differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*after, *(key for key in before if key not in after)]
        return [
            text
            for key in keys
            for text in _differences(before.get(key), after.get(key), f"{name}-{key}" if name else str(key))
        ]
    return [] if before == after else [f"{name}-{json.dumps(after)}"]


def train_one(
    training: Training,
    folder: Path,
    seed: int,
    *,
    bank: Any,
    teacher: str,
    classifier: Any,
    weights: Any,
    light: Any,
    device: str | None,
    precision: str | None,
    workers: int | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train into a folder, or find that it was done; gives the result.

    Args:
        training: what.
        folder: where to.
        seed: of everything that is drawn at random.
        bank: with a train split.
        teacher: name of the classifier's answers in the bank, from which samplers learn.
        classifier: itself or its fingerprint, whose features systems look at.
    """
    from sosampler.training import train

    told: dict[str, Any] = {"bank": bank, "out": folder, "sampler": training.sampler, "recipe": training.recipe}
    told |= {"weights": weights, "device": device, "say": say, "seed": seed, **training.settings}
    if training.is_system:
        told |= {"classifier": classifier, "light": light}
    else:
        told |= {"classifier": teacher, "precision": precision, "workers": workers}
    return dict(train(**told).result)


def recipe_dict(training: Training) -> dict[str, Any]:
    """What run.json says of it."""
    recipe = training.full_recipe()
    told = recipe.to_dict()
    told.pop("seed")
    kind = "sampler" if isinstance(recipe, SamplerRecipe) else "system"
    return {"kind": kind, "trained": training.sampler, **told}
