"""`reproduce`: tables and figures of the paper from banks, with the paper's own figures beside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler.errors import InvalidArgument
from sosampler.files import replacing
from sosampler.reproduce.before import BeforeTraining
from sosampler.reproduce.clock import Clock, Part
from sosampler.reproduce.experiments import (
    CASES,
    INDEPENDENCE,
    THROUGHPUT,
    Experiment,
    experiments_of,
    list_experiments,
)
from sosampler.reproduce.measuring import part_name
from sosampler.reproduce.outcome import empty_result, finished_result
from sosampler.reproduce.places import find_places, sentence_of_name
from sosampler.reproduce.plan import ExperimentPlan, make_plan, searches_sets
from sosampler.reproduce.records import RESULT, ExperimentFolder, now
from sosampler.reproduce.request import Request, checked_request, seeds_of, settings_of
from sosampler.reproduce.steps import (
    draw_figures,
    evaluate_part,
    measure_independence,
    measure_throughput,
    noting_what_is_missing,
    show_cases,
)
from sosampler.reproduce.tables import name_in_words, table
from sosampler.reproduce.trainings import Training, train_one
from sosampler.training.bank_identity import check_apart
from sosampler.training.divergence import Diverged

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
    finished = [folder / name for name in list_experiments() if (folder / name / RESULT).is_file()]
    pages = [path / TABLES["markdown"] for path in finished if (path / TABLES["markdown"]).is_file()]
    if pages:
        write_text(folder / OVERVIEW, "\n".join(page.read_text(encoding="utf-8") for page in pages))


def _write_tables(folder: Path, result: dict[str, Any], *, only_missing: bool = False) -> None:
    for style, name in TABLES.items():
        if not only_missing or not (folder / name).is_file():
            write_text(folder / name, table(result, style))


def device_name(device: str | None) -> str:
    """What the numbers were measured on."""
    import torch

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.cuda.get_device_name(where) if where.type == "cuda" else str(where)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def _silent(text: str) -> None:
    pass
