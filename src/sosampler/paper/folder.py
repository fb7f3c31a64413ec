"""The folders of a reproduction: files of an experiment, and checks of what was trained before."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sosampler._util.environment import circumstances
from sosampler._util.files import load_json, plain, remove_leftovers, write_text
from sosampler.baselines.recipe import BaselineRecipe
from sosampler.classifiers.factory import WEIGHTS
from sosampler.errors import InvalidArgument, WeightsError, first_line
from sosampler.paper.experiments import list_experiments
from sosampler.paper.locations import Location
from sosampler.paper.plan import ExperimentPlan, Request, Training, features_of, light_fingerprint
from sosampler.paper.tables import table
from sosampler.samplers.recipe import SamplerRecipe
from sosampler.samplers.sosampler import SOSampler
from sosampler.training.baseline_data import FeatureSource, feature_sources
from sosampler.training.checkpoints import CHECKPOINT, LOG, RESULT, SETTINGS, RunFolder, differences, write_json
from sosampler.training.train_baseline import KIND as BASELINE
from sosampler.training.train_baseline import run_settings
from sosampler.training.train_sampler import KIND as SAMPLER
from sosampler.training.train_sampler import new_sampler

RUN, EVALUATION, RESULT_FILE = "run.json", "evaluation.json", "result.json"
OVERVIEW = "tables.md"
TABLES = {"markdown": "table.md", "text": "table.txt", "csv": "table.csv"}
KIND = "sosampler reproduction"
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "transformers")
_GIT_SECONDS = 20
_OF_TRAINING = (CHECKPOINT, LOG, RESULT, WEIGHTS)
_ROW_KEYS = ("policy", "num_frames", "num_candidates", "top1", "mAP", "ci95", "versus_uniform")
_RESULT_KEYS = (
    *("experiment", "kind", "title", "claim", "bank", "classifier", "metric", "seeds", "paper", "rows", "left_out"),
    *("elsewhere", "notes", "files", "refused"),
)


class ExperimentFolder:
    """Files of one experiment with one bank and one classifier.

    run.json: the settings, which must stay the same, and the machine. evaluation.json: every part as soon as it is
    measured, so that a killed run resumes. result.json: written last.
    """

    def __init__(self, plan: ExperimentPlan) -> None:
        self.folder = plan.folder / plan.experiment.name

    def check(self, settings: dict[str, Any]) -> None:
        """Raise where these settings may not continue here; nothing is written."""
        written = [name for name in (EVALUATION, RESULT_FILE) if (self.folder / name).exists()]
        if not (self.folder / RUN).exists():
            if written:
                raise InvalidArgument(
                    f"{self.folder}: holds a {written[0]} that no reproduction wrote and that would be replaced; give "
                    "another --out"
                )
            return
        run = self._read(RUN)
        if run.get("kind") != KIND:
            raise InvalidArgument(f"{self.folder}: holds a {RUN} of something else; give another --out")
        if written:
            _check_same(f"{self.folder}: holds a run", run.get("settings"), settings)

    def begin(self, settings: dict[str, Any], device: str, begun: str) -> None:
        """Start or resume; `begun`: when training for it began."""
        self.check(settings)
        remove_leftovers(*(self.folder / name for name in (RUN, EVALUATION, RESULT_FILE, *TABLES.values())))
        if (self.folder / RUN).exists() and self._read(RUN).get("settings") == plain(settings):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        run = {"kind": KIND, "settings": plain(settings), "begun": begun, "ended": None, **circumstances(_PACKAGES)}
        write_json(self.folder / RUN, {**run, "device": device, "git": git_state(Path.cwd())})

    def finished_parts(self) -> dict[str, Any]:
        """Return the measured parts by name."""
        if not (self.folder / EVALUATION).exists():
            return {}
        parts = self._read(EVALUATION).get("parts")
        if not isinstance(parts, dict) or not all(_is_evaluation(part) for part in parts.values()):
            raise self._damaged(EVALUATION, "is not what a reproduction writes")
        return parts

    def add_part(self, name: str, part: dict[str, Any]) -> None:
        write_json(self.folder / EVALUATION, {"parts": {**self.finished_parts(), name: part}})

    def result(self) -> dict[str, Any] | None:
        """Return the result, once it is finished."""
        if not (self.folder / RESULT_FILE).exists():
            return None
        result = self._read(RESULT_FILE)
        missing = [name for name in _RESULT_KEYS if name not in result]
        if missing:
            raise self._damaged(RESULT_FILE, f"has no {', '.join(missing[:3])}")
        return result

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.folder / RUN, {**self._read(RUN), "ended": now()})
        write_json(self.folder / RESULT_FILE, result)

    def write_tables(self, result: dict[str, Any], *, only_missing: bool = False) -> None:
        for style, name in TABLES.items():
            if not only_missing or not (self.folder / name).is_file():
                write_text(self.folder / name, table(result, style))

    def _read(self, name: str) -> dict[str, Any]:
        try:
            values = load_json(self.folder / name, "MAX_LIST_BYTES")
        except ValueError as error:
            raise self._damaged(name, f"is not JSON ({error})") from error
        if not isinstance(values, dict):
            raise self._damaged(name, "is not a JSON object")
        return values

    def _damaged(self, name: str, what: str) -> InvalidArgument:
        return InvalidArgument(f"{self.folder / name}: {what}; delete the folder to start again")


def _check_same(what: str, stored: Any, settings: dict[str, Any]) -> None:
    changed = differences(stored, plain(settings))
    if changed:
        raise InvalidArgument(
            f"{what} with other settings: {'; '.join(changed[:3])}; give the same to resume it, another --out, or "
            "delete the folder"
        )


def _is_evaluation(part: Any) -> bool:
    """Return whether a part has the form of `Evaluation.to_dict`."""
    if not isinstance(part, dict) or not isinstance(part.get("notes"), list) or not isinstance(part.get("rows"), list):
        return False
    return all(isinstance(row, dict) and all(name in row for name in _ROW_KEYS) for row in part["rows"])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout in a folder and whether files differ from it; None where there is none."""
    command = ["git", "-C", str(folder), "--no-optional-locks", "describe", "--always", "--abbrev=64", "--exclude=*"]
    try:
        done = subprocess.run([*command, "--dirty"], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, dirty = done.stdout.strip().partition("-")
    return {"commit": commit, "dirty": bool(dirty)}


def write_overview(folder: Path) -> None:
    """Write all finished tables of a bank and a classifier into one page, in the paper's order."""
    pages = [folder / name / TABLES["markdown"] for name in list_experiments()]
    texts = [page.read_text("utf-8") for page in pages if page.is_file() and (page.parent / RESULT_FILE).is_file()]
    if texts:
        write_text(folder / OVERVIEW, "\n".join(texts))


# ---- checks before training


class TrainingChecks:
    """Checks every training of a run before the first begins; networks of one kind are built once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._built: set[str] = set()
        self._sources: dict[tuple[Path, str], dict[str, FeatureSource]] = {}  # by bank and baseline

    def check(self, plan: ExperimentPlan) -> None:
        """Raise where a network cannot be built, or a folder holds a training with other settings."""
        if self._request.light is not None:
            light_fingerprint(plan.location.bank, self._request.light)  # raises where there is none
        for training in plan.trainings:
            self._check_networks(training, plan.location)
            for seed in plan.seeds:
                folder = training.folder(plan.folder, seed)
                if has_started(folder):
                    self._check_folder(training, plan.location, folder, seed)

    def _check_networks(self, training: Training, location: Location) -> None:
        recipe = training.full_recipe()
        if isinstance(recipe, SamplerRecipe):
            network = [recipe.backbone, recipe.shift, recipe.input_size, recipe.class_head, dict(recipe.scoring)]
            key = json.dumps([str(location.bank.path), *network])
            if key not in self._built:
                _new_sampler(location, recipe, self._request.weights)
                self._built.add(key)
        elif len(recipe.feature_sets) > 1:
            self._sources_of(recipe, location)

    def _sources_of(self, recipe: BaselineRecipe, location: Location) -> dict[str, FeatureSource]:
        bank, request, key = location.bank, self._request, (location.bank.path, recipe.system)
        if key not in self._sources:
            baseline = recipe.without_weights()
            classifier = location.heavy if "heavy" in baseline.feature_sets else location.classifier
            given = {"classifier": classifier, "light": request.light, "weights": request.weights}
            try:
                self._sources[key] = feature_sources(bank, baseline, **given, features=features_of(request, baseline))
            except WeightsError as error:
                raise WeightsError(
                    f"the light network of baselines, MobileNetV2, cannot load these weights ({first_line(error)}); "
                    "give --light as well"
                ) from error
        return self._sources[key]

    def _check_folder(self, training: Training, location: Location, folder: Path, seed: int) -> None:
        path = folder / SETTINGS
        try:
            stored = load_json(path)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{path}: cannot be read ({error}); delete the folder to train again") from error
        wanted = self._settings(training, location, seed)
        # Settings that only `train` knows are left to it.
        compared = {name: stored.get(name) for name in wanted} if isinstance(stored, dict) else stored
        _check_same(f"{folder}: was trained", compared, wanted)

    def _settings(self, training: Training, location: Location, seed: int) -> dict[str, Any]:
        """Return what `train` writes about a run and compares, as far as it is known beforehand."""
        recipe, request = training.full_recipe(seed), self._request
        if not isinstance(recipe, SamplerRecipe):
            return {**run_settings(location.bank, self._sources_of(recipe, location), recipe), "kind": BASELINE}
        weights = request.weights
        settings: dict[str, Any] = {"bank": location.identity, "recipe": recipe.starting_from(weights).identity()}
        start = None if weights is None else _new_sampler(location, recipe, weights).fingerprint()
        settings |= {"kind": SAMPLER, "teacher": {"name": location.teacher, "asked": "bank"}, "start": start}
        # Without a precision `train` resumes with that of the folder.
        return settings if request.precision is None else settings | {"precision": request.precision}


def _new_sampler(location: Location, recipe: SamplerRecipe, weights: str | Path | None) -> SOSampler:
    teacher = location.bank.teacher(location.teacher)
    return new_sampler(location.bank, recipe, weights, multi_label=teacher.multi_label)


def has_started(folder: Path) -> bool:
    """Return whether anything of a training is there that other settings must not continue."""
    return any(path.exists() for path in (RunFolder(folder).frames, *map(folder.joinpath, _OF_TRAINING)))
