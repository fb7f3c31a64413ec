"""What a call of `reproduce` requests, and which rows and trainings of an experiment a bank and a classifier allow."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sosampler._util.files import plain
from sosampler._util.hardware import check_device
from sosampler._util.limits import check_count
from sosampler._util.validation import check_int, one_of
from sosampler.bank.bank import Bank
from sosampler.baselines.base import FRAMES, RAW, Baseline, refuse_baseline_folder
from sosampler.baselines.recipe import read_baseline_recipe
from sosampler.baselines.registry import list_samplers, list_systems
from sosampler.classifiers.base import PRECISIONS, class_layer
from sosampler.classifiers.factory import create_classifier, saved_folder
from sosampler.classifiers.weights import read_state
from sosampler.errors import InvalidArgument
from sosampler.evaluation.clip_scores import clips_for
from sosampler.paper.experiments import CASES, INDEPENDENCE, THROUGHPUT, Experiment, Pair, RowRecipe
from sosampler.paper.locations import Location
from sosampler.samplers.folder import is_sampler_folder
from sosampler.samplers.recipe import BEST, SETTINGS, SamplerRecipe, check_known, read_recipe
from sosampler.samplers.registry import PROBED, RECIPES, load_sampler
from sosampler.training.baseline_data import light_source
from sosampler.training.checkpoints import RESULT
from sosampler.training.train_sampler import train

_PRETRAINED = "pretrained"
_MAX_NAME = 80
_MIN_VIDEOS, _MIN_CLASSES = 2, 2  # to train on


# ---- the request


@dataclass(frozen=True)
class Request:
    """The arguments that all experiments share."""

    out: Path
    seeds: tuple[int, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings of every sampler
    weights: str | Path | None = None
    light: Any = None  # a network, or the name of features in a bank
    features: Mapping[str, Any] = field(default_factory=dict)  # the same for each further set of baselines
    device: str | None = None
    precision: str | None = None
    workers: int | None = None
    bootstrap: int = 2000
    num_cases: int = 6
    say: Callable[[str], None] = lambda text: None


def checked_request(
    out: Any,
    seeds: Sequence[int] | int = (0, 1, 2),
    epochs: int | None = None,
    settings: Mapping[str, Any] | None = None,
    weights: Any = None,
    light: Any = None,
    features: Mapping[str, Any] | None = None,
    **others: Any,
) -> Request:
    """Check the arguments before anything is written, and load the networks of baselines."""
    if not isinstance(out, (str, Path)) or not str(out):
        raise InvalidArgument(f"out={out!r} must be a folder")
    if Path(out).exists() and not Path(out).is_dir():
        raise InvalidArgument(f"--out {out}: is a file; give a folder")
    changes = dict(settings or {})
    # The seeds are an argument of their own.
    check_known(changes, [name for name in SETTINGS if name not in ("name", "seed")], "settings of the samplers")
    if epochs is not None:
        changes["epochs"] = check_int("epochs", epochs)
    listed = list(seeds) if isinstance(seeds, (list, tuple, range)) else [seeds]
    chosen = tuple(check_int("seed", seed, at_least=0) for seed in listed)
    if not chosen or len(set(chosen)) < len(chosen):
        raise InvalidArgument(f"seeds={list(chosen)} must be one or more numbers, each once, for example 0,1,2")
    if weights is not None and str(weights) != _PRETRAINED:
        if not isinstance(weights, (str, Path)) or not Path(weights).is_file():
            raise InvalidArgument(f"weights={str(weights)!r}: no such file; give one, or {_PRETRAINED!r}")
        read_state(Path(weights))  # whether it fits shows with the networks that start from it
    loaded = {name: _loaded(f"--features {name}", source) for name, source in (features or {}).items()}
    request = Request(Path(out), chosen, changes, weights, _loaded("--light", light), loaded, **others)
    check_count("bootstrap", request.bootstrap, "MAX_RESAMPLES", at_least=0)
    check_int("num_cases", request.num_cases)
    if request.device is not None:
        check_device(request.device)
    if request.precision is not None:
        one_of("precision", request.precision, PRECISIONS)
    if request.workers is not None:
        check_count("workers", request.workers, "MAX_THREADS", at_least=0)
    return request


def _loaded(option: str, source: Any) -> Any:
    """Load the network of a saved folder, so that it is read once; names of features are resolved by each bank."""
    if not isinstance(source, (str, Path)):
        return source
    refuse_baseline_folder(option.split()[-1].lstrip("-"), source)
    if is_sampler_folder(source):
        return load_sampler(source)
    if saved_folder(source) is not None:
        return create_classifier(str(source))
    if isinstance(source, Path) or source != Path(source).name:  # more than a plain name
        raise InvalidArgument(
            f"{option} {str(source)!r}: no saved sampler or classifier is there; give the folder of a sampler without "
            "shift, or the name of features in the bank"
        )
    return source


def light_fingerprint(bank: Bank, light: Any) -> str:
    """Return the fingerprint of a light network, which depends on its content alone."""
    return light_source(bank, light, None).fingerprint if isinstance(light, str) else str(light.fingerprint())


def features_of(request: Request, baseline: Baseline) -> dict[str, Any]:
    """Return the sources of further sets that were given for a baseline."""
    return {name: source for name, source in request.features.items() if name in baseline.feature_sets}


# ---- trainings


@dataclass(frozen=True)
class Training:
    """A sampler or a baseline of `train` with its settings, but for the seed."""

    sampler: str
    recipe: str | None
    row_settings: dict[str, Any]
    changes: dict[str, Any]  # the user's, which take precedence
    # Of the recipe here, in all rows: by data set and classifier, and the pretraining
    recipe_changes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        sampler: str,
        recipe: str | None,
        settings: Mapping[str, Any],
        changes: Mapping[str, Any],
        recipe_changes: Mapping[str, Any] | None = None,
    ) -> Training:
        """Make one of the settings of a row and the user's changes, of which baselines take only the epochs."""
        one_of("sampler", sampler, list_samplers())
        known = {name: value for name, value in changes.items() if sampler not in list_systems() or name == "epochs"}
        of_recipe = dict(recipe_changes or {})
        if "epochs" in known and "pretrain" in of_recipe:  # a short training has no longer stage before it
            of_recipe["pretrain"] = min(of_recipe["pretrain"], known["epochs"])
        return cls(sampler, recipe, plain(settings), plain(known), plain(of_recipe))

    @classmethod
    def of_row(
        cls, row: RowRecipe, pair: Pair, data: str | None, classifier: str | None, changes: Mapping[str, Any]
    ) -> Training | None:
        """Make that of a row with N and T, for a data set and a classifier of the paper; None for a policy."""
        if row.sampler is None:
            return None
        return cls.of(row.sampler, row.recipe, row.settings_for(pair), changes, row.recipe_changes(data, classifier))

    @property
    def is_baseline(self) -> bool:
        return self.sampler in list_systems()

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Changes to the recipe."""
        return {**self.recipe_changes, **self._row_settings, **self.changes}

    @cached_property
    def _row_settings(self) -> dict[str, Any]:
        """Those of the row; a dictionary among them is completed from the recipe."""
        defaults = self._base.to_dict()
        return {
            name: {**defaults[name], **value}
            if isinstance(value, dict) and isinstance(defaults.get(name), dict)
            else value
            for name, value in self.row_settings.items()
        }

    @cached_property
    def _base(self) -> Any:
        if self.is_baseline:
            return read_baseline_recipe(self.recipe or self.sampler, system=self.sampler, seed=0)
        return read_recipe(self.recipe or RECIPES[self.sampler], **{**self.recipe_changes, "seed": 0})

    def full_recipe(self, seed: int = 0) -> Any:
        """Return the checked recipe of the sampler or the baseline."""
        return self._base.changed(**self.settings, seed=seed)

    def recipe_dict(self) -> dict[str, Any]:
        """Return the recipe as run.json keeps it."""
        recipe = self.full_recipe()
        values = recipe.to_dict()
        values.pop("seed")
        return {"kind": "sampler" if isinstance(recipe, SamplerRecipe) else "system", "trained": self.sampler, **values}

    @cached_property
    def needs_light(self) -> bool:
        return bool(self.is_baseline and self.full_recipe().needs_light)

    @cached_property
    def num_candidates(self) -> int:
        """The smallest number of candidates that it can be trained with; a range is lowered to what a bank has."""
        count = self.full_recipe().num_candidates
        return int(count) if isinstance(count, int) else int(count[0])

    @cached_property
    def name(self) -> str:
        """Of its folder: the recipe, and what the row changes in it.

        >>> Training.of("ocsampler", None, {"num_candidates": 30, "reinforce": {"num_frames": 8}}, {}).name
        'ocsampler-reinforce-num_frames-8-num_candidates-30'
        """
        changes = _changed_values(self._base.to_dict(), self._base.changed(**self._row_settings).to_dict())
        parts = [self.recipe or RECIPES.get(self.sampler, self.sampler), *changes]
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts)).strip("-.")
        if len(name) <= _MAX_NAME:
            return name
        return f"{name[: _MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"

    def folder(self, location: Path, seed: int) -> Path:
        return location / "samplers" / f"{self.name}-{seed}"

    def is_finished(self, location: Path, seed: int) -> bool:
        return (self.folder(location, seed) / RESULT).is_file()


def _changed_values(before: Any, after: Any, name: str = "") -> list[str]:
    """Return "NAME-VALUE" of every value that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*after, *(key for key in before if key not in after)]
        below = (_changed_values(before.get(key), after.get(key), f"{name}-{key}".lstrip("-")) for key in keys)
        return [text for texts in below for text in texts]
    return [] if before == after else [f"{name}-{json.dumps(after)}"]


def train_one(
    training: Training,
    folder: Path,
    seed: int,
    location: Location,
    request: Request,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train into a folder, or find that it was done, and return the result."""
    given: dict[str, Any] = {"bank": location.bank.path, "out": folder, "sampler": training.sampler, "seed": seed}
    given |= {"recipe": training.recipe, "weights": request.weights, "device": request.device, **training.settings}
    if training.is_baseline:
        baseline = training.full_recipe().without_weights()
        classifier = location.heavy if "heavy" in baseline.feature_sets else location.classifier
        given |= {"classifier": classifier, "light": request.light, "features": features_of(request, baseline)}
    else:
        given |= {"classifier": location.teacher, "precision": request.precision, "workers": request.workers}
        recipe = training.full_recipe()
        drawn = recipe.loss == "reinforce" and location.about["pooling"] != "mean"
        # It is run on the clips that are drawn, or for the features that a probe learns from.
        if drawn or (recipe.answer in (BEST, PROBED) and location.has_one_teacher):
            given["classifier"] = location.classifier
    return dict(train(**given, say=say).result)


# ---- plans


@dataclass(frozen=True)
class PlannedCell:
    """One row with N of T."""

    recipe: RowRecipe
    num_frames: int
    num_candidates: int
    training: Training | None = None
    why: str = ""  # this bank and classifier do not allow it

    @property
    def pair(self) -> Pair:
        return self.num_frames, self.num_candidates

    def policy_names(self, seeds: Sequence[int]) -> list[str]:
        """Return its names among the policies of an evaluation: one, or one for each seed."""
        if self.training is None:
            return [self.recipe.policy or ""]
        return [f"{self.training.name}#{seed}" for seed in seeds]


def _kept_and_left_out(cells: Sequence[PlannedCell]) -> tuple[tuple[PlannedCell, ...], tuple[PlannedCell, ...]]:
    return tuple(cell for cell in cells if not cell.why), tuple(cell for cell in cells if cell.why)


@dataclass(frozen=True)
class ExperimentPlan:
    """One experiment with one bank and one classifier."""

    experiment: Experiment
    location: Location
    request: Request
    cells: tuple[PlannedCell, ...] = ()
    left_out: tuple[PlannedCell, ...] = ()
    refused: str = ""  # why nothing of it can be done
    beside: tuple[Location, ...] = ()  # independence: other classifiers of the bank, in the same figure

    @property
    def trainings(self) -> list[Training]:
        """Each once."""
        return list({cell.training.name: cell.training for cell in self.cells if cell.training is not None}.values())

    @property
    def folder(self) -> Path:
        """Of all experiments with this bank and this classifier."""
        return self.location.folder(self.request.out)

    @property
    def parts(self) -> dict[int, tuple[PlannedCell, ...]]:
        """Cells by T: samplers are often trained for one T, and score its candidates once for all N."""
        counts = dict.fromkeys(cell.num_candidates for cell in self.cells)
        return {count: tuple(cell for cell in self.cells if cell.num_candidates == count) for count in counts}

    def without(self, failed: Mapping[str, str]) -> ExperimentPlan:
        """Return the plan without failed trainings, given by name with the reason.

        It is refused where no training is left: a table of uniform frames alone shows nothing.
        """
        cells = [replace(cell, why=failed.get(cell.training.name, "") if cell.training else "") for cell in self.cells]
        kept, gone = _kept_and_left_out(cells)
        if not gone:
            return self
        refused = "" if any(cell.training for cell in kept) else gone[0].why
        return replace(self, cells=kept, left_out=self.left_out + gone, refused=refused)

    @property
    def seeds(self) -> tuple[int, ...]:
        """One for single videos, which one sampler chooses from, and where nothing is trained."""
        one = self.experiment.kind == CASES or not self.trainings
        return self.request.seeds[:1] if one else self.request.seeds

    def _features(self) -> dict[str, str]:
        """Return the fingerprint of each further network, or the name of its features in the bank."""
        sources = self.request.features.items()
        return {name: source if isinstance(source, str) else str(source.fingerprint()) for name, source in sources}

    def settings(self) -> dict[str, Any]:
        """Return all that decides the numbers; run.json keeps it, and a later run must match it."""
        location, request, trains = self.location, self.request, bool(self.trainings)
        weights: dict[str, str] | None = None
        if trains and request.weights is not None:
            weights = {"name": Path(request.weights).name}
            if str(request.weights) != _PRETRAINED:  # a file by its name and content, so that it may move
                weights["sha256"] = hashlib.sha256(Path(request.weights).read_bytes()).hexdigest()[:16]
        return {
            "experiment": self.experiment.name,
            "bank": {**location.identity, "name": location.bank_name, "data": location.data, "split": location.split},
            "classifier": {
                "name": location.classifier_name,
                "teacher": location.teacher,
                "fingerprint": location.about["fingerprint"],
                "at_hand": location.classifier is not None,
            },
            "seeds": list(self.seeds),
            "changes": dict(request.changes) if trains else {},
            "weights": weights,
            "light": light_fingerprint(location.bank, request.light) if trains and request.light is not None else None,
            **({"features": self._features()} if trains and request.features else {}),
            "precision": request.precision,
            "bootstrap": request.bootstrap,
            **({"num_cases": request.num_cases} if self.experiment.kind == CASES else {}),
            **({"beside": [other.about["fingerprint"] for other in self.beside]} if self.beside else {}),
            "rows": [
                {"row": cell.recipe.row, "num_frames": cell.num_frames, "num_candidates": cell.num_candidates}
                | ({"policy": cell.recipe.policy} if cell.training is None else {"recipe": cell.training.recipe_dict()})
                for cell in self.cells
            ],
        }


def make_plans(
    experiments: Sequence[Experiment], location: Location, locations: Sequence[Location], request: Request
) -> list[ExperimentPlan]:
    """Plan experiments with a bank and a classifier; independence has all networks of a bank in one figure."""
    networks = [other for other in locations if other.bank is location.bank and other.classifier is not None]
    plans = []
    for experiment in experiments:
        plan = make_plan(experiment, location, request)
        if experiment.kind == INDEPENDENCE and networks:
            if location is not networks[0]:
                continue
            plan = replace(plan, beside=tuple(networks[1:]))
        plans.append(plan)
    return plans


def make_plan(experiment: Experiment, location: Location, request: Request) -> ExperimentPlan:
    """Decide which rows of an experiment can be made with a bank and a classifier."""
    plan = ExperimentPlan(experiment, location, request)
    if experiment.kind in (INDEPENDENCE, THROUGHPUT) and location.classifier is None:
        return replace(plan, refused="the classifier itself is needed; give --classifier FOLDER")
    if experiment.kind == INDEPENDENCE:
        return plan
    why = _why_no_evaluation(location)
    if why:
        return replace(plan, refused=why)
    network = location.paper_classifier
    every: list[PlannedCell] = []
    for recipe in experiment.rows:
        for pair in recipe.pairs_for(location.data, network):
            training = Training.of_row(recipe, pair, location.data, network, request.changes)
            if training is None or not training.is_baseline or network in (None, *recipe.classifier):
                every.append(PlannedCell(recipe, *pair, training, _why_not(location, pair[1], training, request)))
    cells, left_out = _kept_and_left_out(every)
    if not cells:
        return replace(plan, left_out=left_out, refused=left_out[0].why)
    if experiment.kind == CASES and experiment.success is not None and not any(cell.training for cell in cells):
        why = next(cell.why for cell in left_out if cell.training)
        return replace(plan, left_out=left_out, refused=f"it is about a trained sampler, and {why}")
    return replace(plan, cells=cells, left_out=left_out)


def _why_no_evaluation(location: Location) -> str:
    """Return why clips cannot be scored: no labelled video, or a classifier that must be run is not available."""
    if not location.sizes:
        return f"{location.bank.path}: no video has a label, so nothing can be measured; add labels"
    try:
        clips_for(location.bank.teacher(location.teacher), location.classifier)
    except InvalidArgument as error:
        return str(error)
    return ""


def _why_not(location: Location, count: int, training: Training | None, request: Request) -> str:
    """Return why a row with `count` candidates cannot be made; empty where it can."""
    stored = location.max_stored[location.split]
    if count > stored:
        return (
            f"{count} candidates are needed, but the bank stores at most {stored} frames of a video of {location.split}"
        )
    if training is None:
        return ""
    videos = location.sizes.get("train", 0)
    if videos < _MIN_VIDEOS:
        return f"{videos} videos with a label in the train split are too few to train on"
    stored = location.max_stored["train"]
    if training.num_candidates > stored:
        return (
            f"it is trained with {training.num_candidates} candidates, but the bank stores at most {stored} frames of "
            "a video of train"
        )
    if len(location.bank.classes) < _MIN_CLASSES and (training.is_baseline or training.full_recipe().scoring):
        return "it compares the confidence in several classes, but the bank has only one"
    if not training.is_baseline:
        return ""
    baseline = training.full_recipe().without_weights()
    if "heavy" not in baseline.feature_sets:
        return _why_not_run(location, baseline, request)
    stored_features = [about["fingerprint"] for about in location.bank.feature_sets.values()]
    if location.classifier is None and location.about["fingerprint"] not in stored_features:
        return "the bank has no features of the classifier, which is not available; give --classifier FOLDER"
    if location.classifier is not None:
        try:
            class_layer(location.classifier)  # whose input are the features; a network of clips sees each frame as one
        except InvalidArgument as error:
            return str(error)
    if training.needs_light and request.weights is None and request.light is None:
        return "it scans frames with a light network; give --weights (MobileNetV2) or --light"
    further = [name for name in baseline.feature_sets if name not in ("heavy", "light", *RAW)]
    if missing := [name for name in further if name not in {*location.bank.feature_sets, *request.features}]:
        return (
            f"the bank has no features {' and '.join(missing)}; give "
            f"{' '.join(f'--features {name}=FOLDER' for name in missing)}"
        )
    return ""


def _why_not_run(location: Location, baseline: Baseline, request: Request) -> str:
    """Return why a baseline that runs the classifier itself, on patches or pixels, cannot be made; empty: it can."""
    sets = baseline.feature_sets
    further = {name for name in sets if name not in ("light", *RAW)} - {
        *location.bank.feature_sets,
        *request.features,
    }
    if location.classifier is None and (further or FRAMES in sets):
        return "it runs the classifier itself, which is not available; give --classifier FOLDER"
    try:
        baseline.check_classifier(location.classifier)
    except InvalidArgument as error:
        return str(error)
    if request.weights is None and (baseline.takes_weights or ("light" in sets and request.light is None)):
        return "it looks at whole frames with a light network; give --weights (MobileNetV2)"
    # With weights of its own it makes its features of these and the classifier.
    for name in () if baseline.takes_weights else sorted(further):
        if baseline.frame_network(name, location.classifier, None) is None:
            return f"the bank has no features {name}; give {baseline.made_of[name]}, or --features {name}=FOLDER"
    return ""
