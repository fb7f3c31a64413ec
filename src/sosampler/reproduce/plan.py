"""What an experiment has to do with one bank and one classifier: which rows it can have, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sosampler.errors import InvalidArgument
from sosampler.reproduce.experiments import CASES, FIDELITY, INDEPENDENCE, THROUGHPUT, Experiment
from sosampler.reproduce.places import Place
from sosampler.reproduce.rows import Pair, RowRecipe, rows_of
from sosampler.reproduce.trainings import Training

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
    from sosampler.evaluation.clips import clips_for

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
