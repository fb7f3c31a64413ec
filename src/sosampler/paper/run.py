"""How long the rest will take, from how long parts of the same kind took."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sosampler._util.environment import circumstances
from sosampler._util.files import replacing
from sosampler.classifiers.factory import WEIGHTS
from sosampler.errors import InvalidArgument, WeightsError, first_line
from sosampler.paper.experiments import CASES, INDEPENDENCE, THROUGHPUT, Experiment, experiments_of, list_experiments
from sosampler.paper.locations import Place, find_places, sentence_of_name
from sosampler.paper.plan import ExperimentPlan, Training, make_plan, searches_sets, train_one
from sosampler.paper.request import Request, checked_request, light_fingerprint, seeds_of, settings_of
from sosampler.paper.results import empty_result, finished_result, part_name
from sosampler.paper.steps import (
    draw_figures,
    evaluate_part,
    measure_independence,
    measure_throughput,
    noting_what_is_missing,
    show_cases,
)
from sosampler.paper.tables import name_in_words, table
from sosampler.samplers.recipe import SamplerRecipe
from sosampler.training.baseline_data import heavy_source, light_source
from sosampler.training.checkpoints import (
    CHECKPOINT,
    LOG,
    RESULT,
    SETTINGS,
    RunFolder,
    check_apart,
    differences,
    write_json,
)
from sosampler.training.distributed import Processes
from sosampler.training.optim import Diverged
from sosampler.training.preparation import sampler_precision
from sosampler.training.train_baseline import KIND as SYSTEM
from sosampler.training.train_sampler import KIND as SAMPLER
from sosampler.training.train_sampler import new_sampler

DURATIONS = "durations.json"
_KEPT = 20  # of each kind


@dataclass(frozen=True)
class Part:
    """Something that takes a while."""

    kind: str  # parts of one kind take about as long as each other
    title: str
    folder: Path  # of the bank and the classifier, whose durations are kept together
    weight: float = field(default=1.0, compare=False)  # how much longer it takes than the least of its kind


@dataclass
class Clock:
    """Parts that are still to be done. Each is begun and ended with `running`."""

    say: Callable[[str], None]
    left: list[Part] = field(default_factory=list)
    _durations: dict[tuple[Path, str], list[float]] = field(default_factory=dict)

    def plan(self, parts: Sequence[Part]) -> None:
        """What is to be done; kinds that an earlier run has timed are known at once."""
        self.left += parts
        for folder in {part.folder for part in parts}:
            for kind, seconds in _read(folder).items():
                self._durations.setdefault((folder, kind), seconds)

    @contextmanager
    def running(self, part: Part) -> Iterator[None]:
        """Tells what begins; afterwards how long it took and how long the rest will take."""
        self.say(f"{part.title} ...")
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        self._durations.setdefault((part.folder, part.kind), []).append(round(seconds / part.weight, 3))
        if part in self.left:
            self.left.remove(part)
        _write(part.folder, {kind: kept for (folder, kind), kept in self._durations.items() if folder == part.folder})
        self.say(f"    done in {in_words(seconds)}; {self.rest()}")

    def skip(self, part: Part) -> None:
        """It was done before."""
        if part in self.left:
            self.left.remove(part)

    def rest(self) -> str:
        """How much is left, as far as it can be told."""
        if not self.left:
            return "nothing is left"
        known, unknown = 0.0, 0
        for part in self.left:
            seconds = self._durations.get((part.folder, part.kind))
            if seconds:
                known += part.weight * statistics.median(seconds)
            else:
                unknown += 1
        count = f"{len(self.left)} {'part is' if len(self.left) == 1 else 'parts are'} left"
        if unknown == len(self.left):
            return f"{count}, for an unknown time"
        more = f" and {unknown} of unknown length" if unknown else ""
        return f"{count}, for about {in_words(known)}{more}"


def in_words(seconds: float) -> str:
    """
    >>> in_words(4.2), in_words(75), in_words(7500)
    ('4 s', '1 min 15 s', '2 h 5 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _read(folder: Path) -> dict[str, list[float]]:
    """What earlier runs took; a file that cannot be read only costs the forecast."""
    path = folder / DURATIONS
    if not path.is_file():
        return {}
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    if not isinstance(told, dict):
        return {}
    return {
        str(kind): [float(value) for value in seconds if isinstance(value, (int, float))]
        for kind, seconds in told.items()
        if isinstance(seconds, list)
    }


def _write(folder: Path, durations: dict[str, list[float]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DURATIONS, {kind: seconds[-_KEPT:] for kind, seconds in sorted(durations.items())})


RUN, EVALUATION, RESULT_FILE = "run.json", "evaluation.json", "result.json"
VIDEOS = "videos"  # a folder for each part
KIND = "sosampler reproduction"
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "transformers")
_GIT_SECONDS = 20
_OF_ROWS = ("policy", "num_frames", "num_candidates", "top1", "mAP", "ci95", "versus_uniform")
_OF_RESULTS = (
    *("experiment", "kind", "title", "claim", "bank", "classifier", "metric", "seeds", "paper", "rows", "left_out"),
    *("elsewhere", "notes", "files", "refused"),
)


class ExperimentFolder:
    """Files of one experiment with one bank and one classifier.

    run.json: the settings, which must stay the same, and circumstances. evaluation.json: every part as soon as it is
    measured, so that a killed run goes on. result.json: written last.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check(self, settings: dict[str, Any]) -> None:
        """Whether these settings may go on here, without writing anything."""
        path = self.folder / RUN
        if not path.exists():
            others = [name for name in (EVALUATION, RESULT_FILE) if (self.folder / name).exists()]
            if others:
                raise InvalidArgument(
                    f"{self.folder}: holds a {others[0]} that no reproduction wrote and that would be replaced; give "
                    "another --out"
                )
            return
        told = self._read(RUN)
        if told.get("kind") != KIND:
            raise InvalidArgument(f"{self.folder}: holds a {RUN} of something else; give another --out")
        begun = (self.folder / EVALUATION).exists() or (self.folder / RESULT_FILE).exists()
        changed = differences(told.get("settings"), _plain(settings))
        if begun and changed:
            raise InvalidArgument(
                f"{self.folder}: holds a run with other settings: {'; '.join(changed[:3])}; give the same to go on "
                "with it, another --out, or delete the folder"
            )

    def begin(self, settings: dict[str, Any], device: str, begun: str) -> None:
        """Start, or go on; `begun`: when training for it began."""
        self.check(settings)
        if (self.folder / RUN).exists() and self._read(RUN).get("settings") == _plain(settings):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        told = {
            "kind": KIND,
            "settings": _plain(settings),
            "begun": begun,
            "ended": None,
            **circumstances(_PACKAGES),
            "device": device,
            "git": git_state(Path.cwd()),
        }
        write_json(self.folder / RUN, told)

    def finished_parts(self) -> dict[str, Any]:
        """What was measured, by the name of the part."""
        if not (self.folder / EVALUATION).exists():
            return {}
        parts = self._read(EVALUATION).get("parts")
        if not isinstance(parts, dict) or not all(_is_evaluation(told) for told in parts.values()):
            raise InvalidArgument(
                f"{self.folder / EVALUATION}: is not what a reproduction writes; delete the folder to start again"
            )
        return parts

    def videos(self, name: str) -> Path:
        """Where a part says what was chosen of every video, in the form of `Evaluation.write_run`."""
        return self.folder / VIDEOS / name

    def add_part(self, name: str, told: dict[str, Any]) -> None:
        write_json(self.folder / EVALUATION, {"parts": {**self.finished_parts(), name: told}})

    def result(self) -> dict[str, Any] | None:
        """What came out, once it is finished."""
        if not (self.folder / RESULT_FILE).exists():
            return None
        told = self._read(RESULT_FILE)
        missing = [name for name in _OF_RESULTS if name not in told]
        if missing:
            raise InvalidArgument(
                f"{self.folder / RESULT}: has no {', '.join(missing[:3])}; delete the folder to start again"
            )
        return told

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.folder / RUN, {**self._read(RUN), "ended": now()})
        write_json(self.folder / RESULT_FILE, result)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidArgument(f"{path}: is not JSON ({error}); delete the folder to start again") from error
        if not isinstance(told, dict):
            raise InvalidArgument(f"{path}: is not a JSON object; delete the folder to start again")
        return told


def _is_evaluation(told: Any) -> bool:
    """Whether a part has the form that `Evaluation.to_dict` gives it."""
    if not isinstance(told, dict) or not isinstance(told.get("notes"), list) or not isinstance(told.get("rows"), list):
        return False
    return all(isinstance(row, dict) and all(name in row for name in _OF_ROWS) for row in told["rows"])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout in a folder, and whether anything in it differs; None where there is none."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says; None where it is not there or refuses."""
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As they come back from the file."""
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


_BEGUN = (CHECKPOINT, LOG, RESULT, WEIGHTS)


class BeforeTraining:
    """Checks every training of a run; networks of one kind are built once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._built: set[str] = set()
        self._light: dict[Path, dict[str, Any]] = {}

    def check(self, plan: ExperimentPlan) -> None:
        """Whether everything can be trained as asked, and what lies there already was."""
        if self._request.light is not None:
            light_fingerprint(plan.place.bank, self._request.light)  # says what is wrong with it
        for training in plan.trainings:
            self._check_networks(training, plan.place)
            for seed in seeds_of(plan, self._request):
                folder = training.folder(plan.place.folder(self._request.out), seed)
                if _has_begun(folder):
                    self._check_folder(training, plan.place, folder, seed)

    def _check_networks(self, training: Training, place: Place) -> None:
        """Backbones that cannot be had, and weights that do not fit."""
        recipe = training.full_recipe()
        if isinstance(recipe, SamplerRecipe):
            network = [recipe.backbone, recipe.shift, recipe.input_size, recipe.class_head, dict(recipe.scoring)]
            key = json.dumps([str(place.bank.path), *network])
            if key not in self._built:
                new_sampler(place.bank, recipe, self._request.weights)
                self._built.add(key)
        elif recipe.needs_light:
            self._light_identity(place)

    def _light_identity(self, place: Place) -> dict[str, Any]:
        bank, request = place.bank, self._request
        if bank.path not in self._light:
            try:
                self._light[bank.path] = light_source(bank, request.light, request.weights).identity(bank)
            except WeightsError as error:
                raise WeightsError(
                    f"the light network of systems, MobileNetV2, cannot have these weights ({first_line(error)}); give "
                    "--light as well"
                ) from error
        return self._light[bank.path]

    def _check_folder(self, training: Training, place: Place, folder: Path, seed: int) -> None:
        path = folder / SETTINGS
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{path}: cannot be read ({error}); delete the folder to train again") from error
        begun = told.get("precision") if isinstance(told, dict) else None
        wanted = json.loads(json.dumps(self._settings(training, place, seed, begun)))
        # Settings that only `train` knows are left to it.
        kept = {name: told.get(name) for name in wanted} if isinstance(told, dict) else told
        changed = differences(kept, wanted)
        if changed:
            raise InvalidArgument(
                f"{folder}: was trained with other settings: {'; '.join(changed[:3])}; give the same to go on, another "
                "--out, or delete the folder"
            )

    def _settings(self, training: Training, place: Place, seed: int, begun: Any) -> dict[str, Any]:
        """What `train` writes down about a run and compares; `begun` is the precision of the run in the folder."""
        recipe = training.full_recipe(seed)
        told: dict[str, Any] = {"bank": place.identity, "recipe": recipe.to_dict()}
        if isinstance(recipe, SamplerRecipe):
            start = (
                None
                if self._request.weights is None
                else new_sampler(place.bank, recipe, self._request.weights).fingerprint()
            )
            processes = Processes(self._request.device)
            return told | {
                "kind": SAMPLER,
                "teacher": {"name": place.teacher, "asked": "bank"},
                "start": start,
                "precision": sampler_precision(processes, self._request.precision, begun, recipe),
            }
        return told | {
            "kind": SYSTEM,
            "heavy": heavy_source(place.bank, place.heavy).identity(place.bank),
            "light": self._light_identity(place) if recipe.needs_light else None,
        }


def _has_begun(folder: Path) -> bool:
    """Whether anything of a training is there that other settings must not go on with."""
    return RunFolder(folder).frames.exists() or any((folder / name).exists() for name in _BEGUN)


OVERVIEW = "tables.md"
TABLES = {"markdown": "table.md", "text": "table.txt", "csv": "table.csv"}


@dataclass(frozen=True)
class Reproduction:
    """One table or figure with one bank and one classifier."""

    experiment: Experiment
    folder: Path
    result: dict[str, Any]

    def table(self, style: str = "text") -> str:
        """As "text", "markdown" or "csv"."""
        return table(self.result, style)

    @property
    def refused(self) -> str:
        """Why nothing of it could be done with this bank and classifier; empty where it could."""
        return str(self.result.get("refused") or "")


def reproduce(
    experiments: Iterable[str] | str,
    banks: Any,
    *,
    out: str | Path,
    classifiers: Any = None,
    weights: str | Path | None = None,
    light: Any = None,
    seeds: Sequence[int] | int = (0, 1, 2),
    epochs: int | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str | None = None,
    precision: str | None = None,
    workers: int | None = None,
    bootstrap: int = 2000,
    num_cases: int = 6,
    say: Callable[[str], None] = lambda text: None,
) -> list[Reproduction]:
    """Make tables and figures of the paper for each bank and classifier.

    What is needed is trained once, however many tables show it. Killed and called again with the same arguments, it
    goes on; in a folder with other settings it refuses, before anything is written. Rows whose training diverges are
    left out; whatever else is wrong stops the run.

    Args:
        experiments: names of `list_experiments()`, or "all": everything that the paper has for the data set.
        banks: folders, "NAME=FOLDER" or {name: folder}. The name of one of the paper's data sets (activitynet,
            mini_kinetics, mini_sports1m, coin) puts that column of the paper beside; for other banks the first of each
            table stands there for orientation.
        out: folder; below it BANK/CLASSIFIER/EXPERIMENT with run.json, evaluation.json, result.json, table.md, .txt
            and .csv, and videos/T=.../ with what was chosen of and answered about every video;
            BANK/CLASSIFIER/samplers with what was trained, and BANK/CLASSIFIER/tables.md with all tables.
        classifiers: saved folders, teachers of the banks, "NAME=" and either, or {name: ...}; None: all teachers of
            each bank. A saved folder is needed for GMACs, throughput, independence and networks that look at clips.
        weights: start of the samplers' backbones, and of the light network of systems.
        light: another light network for systems, as `train` takes it.
        seeds: each sampler is trained with each.
        epochs, settings: of every sampler instead of those of its recipe, for example {"batch_size": 32}; only epochs
            reaches systems.
        device, precision, workers: as `train` and `evaluate` take them.
        bootstrap: resamples of the videos for 95 % intervals.
        num_cases: videos in figures of single videos.
        say: told what happens, how long it took and how long the rest will take.
    """
    request = checked_request(
        out,
        seeds,
        epochs,
        settings,
        weights,
        light=light,
        device=device,
        precision=precision,
        workers=workers,
        bootstrap=bootstrap,
        num_cases=num_cases,
        say=say,
    )
    asked = [experiments] if isinstance(experiments, str) else list(experiments)
    experiments_of(asked)  # names are checked before banks are opened
    places = find_places(banks, classifiers, device=device, precision=precision)
    plans = []
    for place in places:
        check_apart(request.out, place.bank)
        for experiment in experiments_of(asked, place.data):
            plans.append(make_plan(experiment, place, changes=request.changes, weights=weights, light=request.light))
    _refuse_nothing([(plan.experiment.name, plan.refused) for plan in plans])
    before = BeforeTraining(request)
    for plan in plans:
        if not plan.refused:
            folder_of(plan, request).check(settings_of(plan, request))
            before.check(plan)
    for sentence in dict.fromkeys(sentence_of_name(place) for place in places):
        if sentence:
            say(sentence)
    run = _Run(request, Clock(say))
    run.plan(plans)
    found = []
    for plan in plans:
        found.append(run.one(plan))
        write_overview(plan.place.folder(request.out))
    _refuse_nothing([(one.experiment.name, one.refused) for one in found])
    return found


def _refuse_nothing(refused: Sequence[tuple[str, str]]) -> None:
    """Say why where nothing at all can be done; (experiment, why not) of each."""
    if refused and all(why for _, why in refused):
        raise InvalidArgument(": ".join(refused[0]))


def folder_of(plan: ExperimentPlan, request: Request) -> ExperimentFolder:
    return ExperimentFolder(plan.place.folder(request.out) / plan.experiment.name)


class _Run:
    """Does the parts of all plans one after another."""

    def __init__(self, request: Request, clock: Clock) -> None:
        self._request, self._clock = request, clock
        self._say = request.say
        self._failed: dict[tuple[Path, str], str] = {}  # why, by place and training: no other table tries again

    def plan(self, plans: Sequence[ExperimentPlan]) -> None:
        """Tell what is to be done and, as far as that is known, how long it will take."""
        parts: dict[tuple[Path, str], Part] = {}
        for plan in plans:
            for part in self._parts(plan):
                parts.setdefault((part.folder, part.title), part)
        self._clock.plan(list(parts.values()))
        self._say(self._clock.rest())

    def _parts(self, plan: ExperimentPlan) -> list[Part]:
        """Those that are not finished."""
        folder = folder_of(plan, self._request)
        if plan.refused or folder.result() is not None:
            return []
        place = plan.place.folder(self._request.out)
        seeds = seeds_of(plan, self._request)
        parts = [
            self._training_part(plan, training, seed)
            for training in plan.trainings
            for seed in seeds
            if not training.is_finished(place, seed)
        ]
        finished = folder.finished_parts()
        parts += [
            self._evaluation_part(plan, count)
            for count in plan.parts
            if part_name(count) not in finished or plan.experiment.kind == CASES
        ]
        if plan.experiment.kind in (INDEPENDENCE, THROUGHPUT):
            parts.append(self._extra_part(plan))
        return parts

    def _where(self, plan: ExperimentPlan) -> str:
        return f"{plan.place.bank_name}, {plan.place.classifier_name}"

    def _training_part(self, plan: ExperimentPlan, training: Training, seed: int) -> Part:
        title = f"training {training.name}, seed {seed} ({self._where(plan)})"
        recipe = training.full_recipe()
        kind = f"training {training.sampler}, {recipe.num_candidates} candidates, {recipe.epochs} epochs"
        return Part(kind, title, plan.place.folder(self._request.out))

    def _evaluation_part(self, plan: ExperimentPlan, count: int) -> Part:
        title = f"{plan.experiment.name}: evaluating with {count} candidates ({self._where(plan)})"
        trained = {cell.training.name for cell in plan.parts[count] if cell.training is not None}
        weight = 1.0 + len(trained) * len(seeds_of(plan, self._request))
        kind = f"evaluating with {count} candidates"
        if plan.place.asks_about_clips:
            searches = searches_sets(plan.experiment, plan.parts[count])
            kind += ", the classifier asked about clips" + (" and for the best of all sets" if searches else "")
        return Part(kind, title, plan.place.folder(self._request.out), weight)

    def _extra_part(self, plan: ExperimentPlan) -> Part:
        kind = f"{plan.experiment.kind} measured"
        title = f"{plan.experiment.name}: measuring {plan.experiment.kind} ({self._where(plan)})"
        return Part(kind, title, plan.place.folder(self._request.out))

    # ---- one experiment

    def one(self, plan: ExperimentPlan) -> Reproduction:
        folder = folder_of(plan, self._request)
        title = f"{name_in_words(plan.experiment.name)} ({self._where(plan)})"
        begun, settings = now(), {}
        if not plan.refused:
            finished = folder.result()
            if finished is not None:
                self._say(f"{title}: finished before, {folder.folder}")
                _write_tables(folder.folder, finished, only_missing=True)
                return Reproduction(plan.experiment, folder.folder, finished)
            settings = settings_of(plan, self._request)
            plan = self._trained(plan)
        if plan.refused:
            self._say(f"{title}: left out, {plan.refused}")
            return Reproduction(plan.experiment, folder.folder, empty_result(plan, self._request))
        folder.begin(settings, device_name(self._request.device), begun)
        if plan.experiment.kind == INDEPENDENCE:
            with self._clock.running(self._extra_part(plan)):
                result = measure_independence(plan, self._request, folder.folder)
        else:
            result = self._table(plan, folder)
        _write_tables(folder.folder, result)
        result["files"] = sorted([*result["files"], *TABLES.values()])
        folder.finish(result)
        self._say(f"{title}: written to {folder.folder}")
        return Reproduction(plan.experiment, folder.folder, result)

    def _table(self, plan: ExperimentPlan, folder: ExperimentFolder) -> dict[str, Any]:
        seeds = seeds_of(plan, self._request)
        evaluations = {}
        for count in plan.parts:
            name = part_name(count)
            part = self._evaluation_part(plan, count)
            if name in folder.finished_parts() and plan.experiment.kind != CASES:
                self._clock.skip(part)
                continue
            with self._clock.running(part):
                evaluations[name], told = evaluate_part(plan, count, seeds, self._request)
                evaluations[name].write_run(folder.videos(name))
                folder.add_part(name, told)
        result = finished_result(plan, self._request, folder.finished_parts(), seeds)
        if plan.experiment.kind == THROUGHPUT:
            with self._clock.running(self._extra_part(plan)):
                measure_throughput(plan, self._request, result)
        elif plan.experiment.kind == CASES:
            (evaluation,) = evaluations.values()
            with noting_what_is_missing(result):
                show_cases(plan, self._request, evaluation, result, folder.folder)
        with noting_what_is_missing(result):
            draw_figures(plan, result, folder.folder)
        return result

    # ---- training

    def _trained(self, plan: ExperimentPlan) -> ExperimentPlan:
        """Train what is not finished; the plan without what came to nothing, as with too high a rate."""
        place = plan.place.folder(self._request.out)
        for training in plan.trainings:
            if (place, training.name) not in self._failed:
                why = self._train_seeds(plan, training)
                if why:
                    self._failed[place, training.name] = why
        failed = {name: why for (where, name), why in self._failed.items() if where == place}
        left = plan.without(failed)
        if left.refused and not plan.refused:
            for part in self._parts(plan):
                self._clock.skip(part)
        return left

    def _train_seeds(self, plan: ExperimentPlan, training: Training) -> str:
        """Train with every seed; why it came to nothing, empty where it did not. Other errors stop the run."""
        parts = {seed: self._training_part(plan, training, seed) for seed in seeds_of(plan, self._request)}
        for seed, part in parts.items():
            try:
                self._train_one(plan, training, seed, part)
            except Diverged as error:
                why = f"training with seed {seed} failed: {error}"
                self._indented(why)
                for other in parts.values():
                    self._clock.skip(other)
                return why
        return ""

    def _train_one(self, plan: ExperimentPlan, training: Training, seed: int, part: Part) -> None:
        request, place = self._request, plan.place
        arguments: dict[str, Any] = {
            "bank": place.bank.path,
            "teacher": place.teacher,
            "classifier": place.heavy,
            "weights": request.weights,
            "light": request.light,
            "device": request.device,
            "precision": request.precision,
            "workers": request.workers,
        }
        folder = training.folder(place.folder(request.out), seed)
        if training.is_finished(place.folder(request.out), seed):
            self._clock.skip(part)
            # Finds that it is finished, and was trained with this bank and these weights.
            train_one(training, folder, seed, **arguments, say=_silent)
            return
        with self._clock.running(part):
            train_one(training, folder, seed, **arguments, say=self._indented)

    def _indented(self, text: str) -> None:
        self._say(f"    {text}")


def write_overview(folder: Path) -> None:
    """All finished tables of a bank and a classifier on one page, in the paper's order."""
    finished = [folder / name for name in list_experiments() if (folder / name / RESULT_FILE).is_file()]
    pages = [path / TABLES["markdown"] for path in finished if (path / TABLES["markdown"]).is_file()]
    if pages:
        write_text(folder / OVERVIEW, "\n".join(page.read_text(encoding="utf-8") for page in pages))


def _write_tables(folder: Path, result: dict[str, Any], *, only_missing: bool = False) -> None:
    for style, name in TABLES.items():
        if not only_missing or not (folder / name).is_file():
            write_text(folder / name, table(result, style))


def device_name(device: str | None) -> str:
    """What the numbers were measured on."""

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.cuda.get_device_name(where) if where.type == "cuda" else str(where)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def _silent(text: str) -> None:
    pass
