"""The rows of an experiment as recipes/<experiment>/<row>.yaml describe them.

A file says who chooses: a `policy` of `evaluate`, or a `sampler` of `train` with a `recipe` and `settings`. In settings
N and T stand for the numbers of the pair, so that a sampler which is trained for one pair alone is trained for each.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from sosampler._util.validation import one_of, whole_number
from sosampler.baselines.registry import list_samplers, list_systems
from sosampler.errors import InvalidArgument
from sosampler.paper.experiments import (
    CASES,
    EXPERIMENTS,
    FIDELITY,
    INDEPENDENCE,
    THROUGHPUT,
    Experiment,
    data_sets,
    read_paper,
)
from sosampler.paper.locations import Place
from sosampler.samplers.recipe import SamplerRecipe, check_known, read_mapping, read_recipe
from sosampler.samplers.registry import RECIPES
from sosampler.training.checkpoints import RESULT

Pair = tuple[int, int]  # N, T

_KEYS = (
    *("table", "row", "title", "classifier", "data", "num_frames", "num_candidates", "pairs"),
    *("policy", "sampler", "recipe", "settings", "dial", "metric", "paper_row", "exceptions", "note"),
)
_NEEDED = ("table", "row", "classifier", "data", "metric")


@dataclass(frozen=True)
class RowRecipe:
    """One row of a table: who chooses how many frames of how many."""

    table: str
    row: str
    title: str
    classifier: tuple[str, ...]  # with which the paper has it
    data: tuple[str, ...]
    pairs: tuple[Pair, ...]
    metric: str
    policy: str | None = None
    sampler: str | None = None
    recipe: str | None = None  # None: the sampler's own
    settings: dict[str, Any] = field(default_factory=dict)
    dial: str | None = None  # of a system: "all" for a row of each value
    paper_row: str = ""  # what the paper calls it
    exceptions: tuple[dict[str, Any], ...] = ()  # other numbers of frames for a data set and a classifier
    note: str = ""

    def pairs_for(self, data: str | None, classifier: str | None) -> tuple[Pair, ...]:
        """N and T for a data set and a classifier of the paper."""
        for other in self.exceptions:
            if other["data"] == data and other["classifier"] == classifier:
                return tuple((other["num_frames"], count) for _, count in self.pairs)
        return self.pairs

    def settings_for(self, pair: Pair) -> dict[str, Any]:
        """The settings with the numbers of a pair in place of N and T."""
        found = _filled(self.settings, {"N": pair[0], "T": pair[1]})
        assert isinstance(found, dict)
        return found


def _filled(value: Any, numbers: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner, numbers) for key, inner in value.items()}
    return numbers.get(value, value) if isinstance(value, str) else value


@cache
def rows_of(experiment: str) -> tuple[RowRecipe, ...]:
    """The rows of an experiment, in the order in which they are shown."""
    return tuple(_read(EXPERIMENTS[experiment], name) for name in EXPERIMENTS[experiment].rows)


def _read(experiment: Experiment, name: str) -> RowRecipe:
    path = files("sosampler.paper").joinpath("recipes", experiment.name, f"{name}.yaml")
    whose = f"recipes/{experiment.name}/{name}.yaml"
    recipe = row_recipe(read_mapping(path.read_text(encoding="utf-8"), whose), whose)
    if (recipe.table, recipe.metric) != (experiment.name, experiment.metric):
        raise InvalidArgument(
            f"{whose}: is of {recipe.table} and {recipe.metric}, but {experiment.name} shows {experiment.metric}"
        )
    return recipe


def row_recipe(values: dict[str, Any], whose: str) -> RowRecipe:
    """A row from what its file says, or what is wrong with the file."""
    check_known(values, _KEYS, whose)
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise InvalidArgument(f"{whose}: has no {', '.join(missing)}; add it")
    given = dict(values)
    if ("policy" in given) == ("sampler" in given):
        raise InvalidArgument(f"{whose}: names a policy and a sampler, or neither; give one of them")
    alone = [key for key in ("recipe", "settings", "dial") if key in given and "sampler" not in given]
    if alone:
        raise InvalidArgument(f"{whose}: {', '.join(alone)} is of a sampler, but it names a policy; leave it out")
    pairs = _pairs(given, whose)
    for key in ("num_frames", "num_candidates", "pairs"):
        given.pop(key, None)
    for key in ("classifier", "data", "exceptions"):
        given[key] = tuple(given.get(key, ()))
    for data in given["data"]:
        one_of(f"{whose}: data", data, data_sets())
    for classifier in given["classifier"]:
        one_of(f"{whose}: classifier", classifier, read_paper()["classifiers"])
    return RowRecipe(
        **{**given, "title": given.get("title", given["row"]), "paper_row": given.get("paper_row", given["row"])},
        pairs=pairs,
    )


def _pairs(values: dict[str, Any], whose: str) -> tuple[Pair, ...]:
    if ("pairs" in values) == ("num_frames" in values):
        raise InvalidArgument(f"{whose}: give pairs, or num_frames and num_candidates")
    if "pairs" in values:
        found = [tuple(pair) for pair in values["pairs"]]
    else:
        frames = values["num_frames"]
        listed = frames if isinstance(frames, list) else [frames]
        found = [(count, values.get("num_candidates")) for count in listed]
    for pair in found:
        if len(pair) != 2 or whole_number("num_frames", pair[0]) > whole_number("num_candidates", pair[1]):
            raise InvalidArgument(f"{whose}: {list(pair)} is no N of T; give two whole numbers, N at most T")
    return tuple((int(frames), int(count)) for frames, count in found)


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
            from sosampler.baselines.recipe import read_system_recipe

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
    from sosampler.training.train_sampler import train

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


_LEAST_TO_TRAIN = 2  # videos
_LEAST_CLASSES = 2


@dataclass(frozen=True)
class PlannedCell:
    """One row with N of T."""

    recipe: RowRecipe
    num_frames: int
    num_candidates: int
    training: Training | None = None

    @property
    def pair(self) -> Pair:
        return self.num_frames, self.num_candidates

    def policy_names(self, seeds: Sequence[int]) -> list[str]:
        """What it is called among the policies of an evaluation: once, or for each seed."""
        if self.training is None:
            return [self.recipe.policy or ""]
        return [f"{self.training.name}#{seed}" for seed in seeds]


@dataclass(frozen=True)
class LeftOut:
    """A row that cannot be had here."""

    recipe: RowRecipe
    num_frames: int
    num_candidates: int
    why: str


@dataclass(frozen=True)
class ExperimentPlan:
    """All of one experiment in one place."""

    experiment: Experiment
    place: Place
    cells: tuple[PlannedCell, ...]
    left_out: tuple[LeftOut, ...]
    refused: str = ""  # why nothing of it can be done here

    @property
    def trainings(self) -> list[Training]:
        """Each once."""
        return list({cell.training.name: cell.training for cell in self.cells if cell.training is not None}.values())

    @property
    def parts(self) -> dict[int, tuple[PlannedCell, ...]]:
        """Cells by T: samplers are often trained for one T, and score its candidates once for all N."""
        found: dict[int, list[PlannedCell]] = {}
        for cell in self.cells:
            found.setdefault(cell.num_candidates, []).append(cell)
        return {count: tuple(cells) for count, cells in found.items()}

    def without(self, failed: Mapping[str, str]) -> ExperimentPlan:
        """Without what could not be trained; `failed`: why, by the name of the training.

        Refused where nothing that was to be trained is left: a table of uniform frames alone shows nothing.
        """
        gone = [cell for cell in self.cells if cell.training is not None and cell.training.name in failed]
        if not gone:
            return self
        reasons = [LeftOut(cell.recipe, *cell.pair, failed[cell.training.name]) for cell in gone if cell.training]
        kept = tuple(cell for cell in self.cells if cell not in gone)
        refused = "" if any(cell.training is not None for cell in kept) else reasons[0].why
        return replace(self, cells=kept, left_out=(*self.left_out, *reasons), refused=refused)


def make_plan(
    experiment: Experiment,
    place: Place,
    *,
    changes: Mapping[str, Any],
    weights: Any = None,
    light: Any = None,
) -> ExperimentPlan:
    """Which rows of an experiment can be had in a place.

    Args:
        changes: settings of every sampler that the user asked for.
        weights, light: with what systems glance at frames.
    """
    if experiment.kind in (INDEPENDENCE, THROUGHPUT) and place.classifier is None:
        why = "the classifier itself is needed; give --classifier FOLDER"
        return ExperimentPlan(experiment, place, (), (), why)
    if experiment.kind == INDEPENDENCE:
        return ExperimentPlan(experiment, place, (), ())
    why = _why_no_judge(place)
    if why:
        return ExperimentPlan(experiment, place, (), (), why)
    cells: list[PlannedCell] = []
    left_out: list[LeftOut] = []
    for recipe in rows_of(experiment.name):
        for pair in recipe.pairs_for(place.data, place.paper_classifier):
            training = None
            if recipe.sampler is not None:
                training = Training.of(recipe.sampler, recipe.recipe, recipe.settings_for(pair), changes)
            why = _why_not(place, pair, training, weights, light)
            if why:
                left_out.append(LeftOut(recipe, *pair, why))
            else:
                cells.append(PlannedCell(recipe, *pair, training))
    if not cells:
        return ExperimentPlan(experiment, place, (), tuple(left_out), left_out[0].why)
    if experiment.kind == CASES and experiment.success is not None and all(cell.training is None for cell in cells):
        why = next(one.why for one in left_out if one.recipe.sampler is not None)
        return ExperimentPlan(experiment, place, (), tuple(left_out), f"it is about a trained sampler, and {why}")
    return ExperimentPlan(experiment, place, tuple(cells), tuple(left_out))


def _why_no_judge(place: Place) -> str:
    """Why clips cannot be judged: there is nothing to measure on, or a classifier that must be run is not at hand."""
    from sosampler.evaluation.clip_scores import clips_for

    if not place.sizes:
        return f"{place.bank.path}: no video has a label, so nothing can be measured; add labels"
    try:
        clips_for(place.bank.teacher(place.teacher), place.classifier)
    except InvalidArgument as error:
        return str(error)
    return ""


def _why_not(place: Place, pair: Pair, training: Training | None, weights: Any, light: Any) -> str:
    """Why a row cannot be had; empty where it can."""
    _, count = pair
    stored = place.most_stored[place.split]
    if count > stored:
        return (
            f"{count} candidates are asked for, but the bank stores at most {stored} frames of a video of {place.split}"
        )
    if training is None:
        return ""
    videos = place.sizes.get("train", 0)
    if videos < _LEAST_TO_TRAIN:
        return f"{videos} videos with a label in the train split are too few to train on"
    stored = place.most_stored["train"]
    if training.num_candidates > stored:
        return (
            f"it is trained with {training.num_candidates} candidates, but the bank stores at most {stored} frames of "
            "a video of train"
        )
    return _why_not_trained(place, training, weights, light)


def _why_not_trained(place: Place, training: Training, weights: Any, light: Any) -> str:
    pooling, name = place.about["pooling"], place.about["name"]
    recipe = training.full_recipe()
    if len(place.bank.classes) < _LEAST_CLASSES and (training.is_system or recipe.scoring):
        return "it looks at how sure it is of one class and not of another, but the bank has only one"
    if not training.is_system:
        if recipe.loss == "reinforce" and pooling != "mean":
            return (
                "it learns from what the classifier says about drawn clips, which only follows from the bank where "
                f"the classifier averages the logits of frames; {name} does not"
            )
        return ""
    if pooling is None:
        return f"it needs features of single frames, but {name} looks at clips as a whole"
    kept = [told["fingerprint"] for told in place.bank.feature_sets.values()]
    if place.classifier is None and place.about["fingerprint"] not in kept:
        return "the bank keeps no features of the classifier, which is not at hand; give --classifier FOLDER"
    if training.needs_light and weights is None and light is None:
        return "it glances at frames with a light network; give --weights (MobileNetV2) or --light"
    return ""


def extra_policies(experiment: Experiment, cells: Sequence[PlannedCell]) -> list[str]:
    """Policies that are measured beside the rows: what they are compared with."""
    wanted = ["uniform", *(["optimal"] if experiment.kind == FIDELITY else [])]
    there = {cell.recipe.policy for cell in cells}
    return [name for name in wanted if name not in there]


def searches_sets(experiment: Experiment, cells: Sequence[PlannedCell]) -> bool:
    """Whether the best sets are searched, for which a classifier of clips is asked hundreds of times a video."""
    return "optimal" in [*extra_policies(experiment, cells), *(cell.recipe.policy for cell in cells)]
