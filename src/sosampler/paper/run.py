"""Make tables and figures of the paper: check, train what is missing, evaluate, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sosampler._util.hardware import resolve_device
from sosampler._util.locks import locked_folder
from sosampler.bank.bank import Bank
from sosampler.datasets.manifest import Manifest
from sosampler.errors import InvalidArgument, MissingDependency
from sosampler.evaluation.evaluate import evaluate
from sosampler.evaluation.independence import independence, later_by
from sosampler.evaluation.result import VIDEOS_FILE, Evaluation
from sosampler.figures.curves import write_cost_curve
from sosampler.paper.experiments import CASES, CURVE, INDEPENDENCE, THROUGHPUT, Experiment, data_sets, experiments_of
from sosampler.paper.folder import RUN, TABLES, ExperimentFolder, TrainingChecks, has_started, now, write_overview
from sosampler.paper.locations import find_locations
from sosampler.paper.plan import ExperimentPlan, PlannedCell, Training, checked_request, make_plans, train_one
from sosampler.paper.results import (
    UNIFORM,
    applies_here,
    empty_result,
    finished_result,
    independence_result,
    mean_rows,
    metric_of,
    missing_uniform,
    part_name,
    policies_of,
)
from sosampler.paper.tables import name_in_words, table
from sosampler.paper.throughput import add_throughput
from sosampler.report.compare import cases
from sosampler.report.load import RowKey, RunVideos, read_run_videos
from sosampler.report.page import strip_of, write_report
from sosampler.training.checkpoints import check_apart
from sosampler.training.optim import Diverged

VIDEOS = "videos"  # a folder for each part
_FIGURE_RATES = (1.0, 5.0)  # frames a second in the paper's figure of independence
_CHECKED_VIDEOS = 100  # for how far apart stored frames are


@dataclass(frozen=True)
class Reproduction:
    """One table or figure with one bank and one classifier."""

    experiment: Experiment
    folder: Path
    result: dict[str, Any]

    def table(self, style: str = "text") -> str:
        """Return it as "text", "markdown" or "csv"."""
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
    features: Mapping[str, Any] | None = None,
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

    Each sampler is trained once, however many tables show it. Killed and called again with the same arguments, it
    resumes; a folder with other settings is refused before anything is written. Rows whose training diverges are left
    out; any other error stops the run.

    Args:
        experiments: names of `list_experiments()`, or "all": everything that the paper has for the data set.
        banks: folders, "NAME=FOLDER" or {name: folder}. The name of one of the paper's data sets (activitynet,
            mini_kinetics, mini_sports1m, coin) puts that column of the paper beside; other banks get the first column
            of each table for orientation.
        out: folder; below it BANK/CLASSIFIER/EXPERIMENT with run.json, evaluation.json, result.json, table.md, .txt
            and .csv, and videos/T=.../ with the choice and the prediction for every video; BANK/CLASSIFIER/samplers
            with what was trained, and BANK/CLASSIFIER/tables.md with all tables.
        classifiers: saved folders, teachers of the banks, "NAME=" and either, or {name: ...}; None: all teachers of
            each bank. GMACs, throughput, independence and networks of clips need a saved folder.
        weights, light, features: of backbones, light networks and further networks of baselines; with device,
            precision and workers as for `train`.
        epochs, settings: of every sampler instead of those of its recipe, for example {"batch_size": 32}; baselines
            take only the epochs.
        num_cases: videos in figures of single videos.
    """
    plans = _checked_plans(**locals())
    with ExitStack() as stack:
        # Each experiment, not all of `out`: others may be made at the same time.
        for folder in {ExperimentFolder(plan).folder: None for plan in plans if not plan.refused}:
            stack.enter_context(locked_folder(folder))
        runner = _Runner(plans)
        reproductions = []
        for plan in plans:
            reproductions.append(runner.run(plan))
            write_overview(plan.folder)
    _check_any(reproductions)
    return reproductions


def plan_reproduction(experiments: Iterable[str] | str, banks: Any, **arguments: Any) -> list[dict[str, Any]]:
    """Return what `reproduce` with the same arguments would train and evaluate, without writing anything.

    One dictionary for each experiment, bank and classifier: its folder and state, rows, rows that are left out,
    trainings with seed, folder and state, and evaluations. A state is "finished", "started" or "missing".
    """
    return [_plan_dict(plan) for plan in _checked_plans(experiments, banks, **arguments)]


def _checked_plans(
    experiments: Iterable[str] | str, banks: Any, classifiers: Any = None, **arguments: Any
) -> list[ExperimentPlan]:
    """Check everything that can be checked before the first file is written."""
    request = checked_request(**arguments)
    names = [experiments] if isinstance(experiments, str) else list(experiments)
    experiments_of(names)  # checks the names before banks are opened
    locations = find_locations(banks, classifiers, device=request.device, precision=request.precision)
    plans = []
    for location in locations:
        check_apart(request.out, location.bank)
        plans += make_plans(experiments_of(names, location.data), location, locations, request)
    _check_any(plans)
    checks = TrainingChecks(request)
    for plan in plans:
        if not plan.refused:
            ExperimentFolder(plan).check(plan.settings())
            checks.check(plan)
    for name in dict.fromkeys(location.bank_name for location in locations if location.named and not location.data):
        request.say(
            f"--bank {name}: none of the paper's data sets ({', '.join(data_sets())}), so its figures are of another "
            "one and for orientation only"
        )
    return plans


def _check_any(made: Sequence[ExperimentPlan | Reproduction]) -> None:
    """Raise where nothing at all can be done."""
    if all(one.refused for one in made):
        raise InvalidArgument(f"{made[0].experiment.name}: {made[0].refused}")


def _plan_dict(plan: ExperimentPlan) -> dict[str, Any]:
    location, folder = plan.location, ExperimentFolder(plan)
    finished = not plan.refused and folder.result() is not None
    parts = {} if plan.refused else folder.finished_parts()

    def state(is_finished: bool, has_started: bool = False) -> str:
        return "finished" if is_finished else "started" if has_started else "missing"

    def row(cell: PlannedCell, **more: Any) -> dict[str, Any]:
        numbers = {"num_frames": cell.num_frames, "num_candidates": cell.num_candidates}
        return {"row": cell.recipe.row, "title": cell.recipe.title, **numbers, **more}

    return {
        "experiment": plan.experiment.name,
        "title": plan.experiment.title,
        "bank": {"name": location.bank_name, "path": str(location.bank.path), "split": location.split},
        "classifier": location.classifier_name,
        "folder": str(folder.folder),
        "state": state(finished, (folder.folder / RUN).exists()),
        "refused": plan.refused or None,
        "rows": [
            row(cell, policy=cell.recipe.policy, training=cell.training and cell.training.name) for cell in plan.cells
        ],
        "left_out": [row(cell, why=cell.why) for cell in plan.left_out],
        "trainings": [
            {
                "name": training.name,
                "seed": seed,
                "folder": str(training.folder(plan.folder, seed)),
                "state": state(
                    training.is_finished(plan.folder, seed), has_started(training.folder(plan.folder, seed))
                ),
            }
            for training in plan.trainings
            for seed in plan.seeds
        ],
        "evaluations": [
            {"num_candidates": count, "state": state(finished or part_name(count) in parts)} for count in plan.parts
        ],
    }


# ---- the run


def _training_title(plan: ExperimentPlan, training: Training, seed: int) -> str:
    return f"training {training.name}, seed {seed} ({plan.location.title})"


def _evaluation_title(plan: ExperimentPlan, count: int) -> str:
    return f"{plan.experiment.name}: evaluating with {count} candidates ({plan.location.title})"


def _measurement_title(plan: ExperimentPlan) -> str:
    return f"{plan.experiment.name}: measuring {plan.experiment.kind} ({plan.location.title})"


def _unfinished_steps(plan: ExperimentPlan) -> Iterator[str]:
    """Yield the titles of steps that are not finished."""
    folder = ExperimentFolder(plan)
    if plan.refused or folder.result() is not None:
        return
    for training in plan.trainings:
        for seed in plan.seeds:
            if not training.is_finished(plan.folder, seed):
                yield _training_title(plan, training, seed)
    finished = folder.finished_parts()
    for count in plan.parts:
        if part_name(count) not in finished or plan.experiment.kind == CASES:
            yield _evaluation_title(plan, count)
    if plan.experiment.kind in (INDEPENDENCE, THROUGHPUT):
        yield _measurement_title(plan)


class _Runner:
    """Runs the steps of all plans one after another: trainings, evaluations, measurements."""

    def __init__(self, plans: Sequence[ExperimentPlan]) -> None:
        self._say = plans[0].request.say
        self._failed: dict[tuple[Path, str], str] = {}  # why, by folder and training: no other table tries again
        self._left = dict.fromkeys(step for plan in plans for step in _unfinished_steps(plan))
        self._total = len(self._left)
        self._say(f"{self._total} steps to run" if self._total else "nothing to run")

    @contextmanager
    def _step(self, title: str) -> Iterator[None]:
        self._say(f"[{self._total - len(self._left) + 1}/{self._total}] {title} ...")
        begin = time.perf_counter()
        yield
        self._skip(title)
        self._say(f"    done in {time.perf_counter() - begin:.0f} s")

    def _skip(self, *titles: str) -> None:
        for title in titles:
            self._left.pop(title, None)

    def run(self, plan: ExperimentPlan) -> Reproduction:
        """Make one table or figure."""
        folder = ExperimentFolder(plan)
        title = f"{name_in_words(plan.experiment.name)} ({plan.location.title})"
        begun, settings = now(), {}
        if not plan.refused:
            finished = folder.result()
            if finished is not None:
                self._say(f"{title}: finished before, {folder.folder}")
                folder.write_tables(finished, only_missing=True)
                return Reproduction(plan.experiment, folder.folder, finished)
            settings = plan.settings()
            plan = self._train(plan)
        if plan.refused:
            self._say(f"{title}: left out, {plan.refused}")
            return Reproduction(plan.experiment, folder.folder, empty_result(plan))
        device = resolve_device(plan.request.device)
        folder.begin(settings, torch.cuda.get_device_name(device) if device.type == "cuda" else str(device), begun)
        if plan.experiment.kind == INDEPENDENCE:
            with self._step(_measurement_title(plan)):
                result = _measure_independence(plan, folder.folder)
        else:
            result = self._evaluate(plan, folder)
        folder.write_tables(result)
        result["files"] = sorted([*result["files"], *TABLES.values()])
        folder.finish(result)
        self._say(f"{title}: written to {folder.folder}")
        return Reproduction(plan.experiment, folder.folder, result)

    def _evaluate(self, plan: ExperimentPlan, folder: ExperimentFolder) -> dict[str, Any]:
        """Evaluate what is not finished, and make the result of all parts."""
        kind = plan.experiment.kind
        for count in plan.parts:
            name, title = part_name(count), _evaluation_title(plan, count)
            if name in folder.finished_parts() and kind != CASES:
                self._skip(title)
                continue
            with self._step(title):
                evaluation, part = evaluate_part(plan, count)
                evaluation.write_run(folder.folder / VIDEOS / name)
                folder.add_part(name, part)
        result = finished_result(plan, folder.finished_parts())
        if kind == THROUGHPUT:
            with self._step(_measurement_title(plan)):
                add_throughput(plan, result)
        elif kind == CASES:
            with _noting_missing_packages(result):  # there is one part
                write_cases(plan, evaluation, folder.folder / VIDEOS / name, result, folder.folder)
        elif kind == CURVE:
            with _noting_missing_packages(result):
                _draw_curves(plan, result, folder.folder)
        return result

    def _train(self, plan: ExperimentPlan) -> ExperimentPlan:
        """Train what is not finished; returns the plan without trainings that diverged."""
        for training in plan.trainings:
            if (plan.folder, training.name) in self._failed:
                continue
            for seed in plan.seeds:
                try:
                    self._train_one(plan, training, seed)
                except Diverged as error:  # other errors stop the run
                    self._failed[plan.folder, training.name] = why = f"training with seed {seed} failed: {error}"
                    self._say(f"    {why}")
                    self._skip(*(_training_title(plan, training, other) for other in plan.seeds))
                    break
        left = plan.without({name: why for (folder, name), why in self._failed.items() if folder == plan.folder})
        if left.refused:
            self._skip(*_unfinished_steps(plan))
        return left

    def _train_one(self, plan: ExperimentPlan, training: Training, seed: int) -> None:
        title = _training_title(plan, training, seed)
        arguments = training, training.folder(plan.folder, seed), seed, plan.location, plan.request
        if training.is_finished(plan.folder, seed):
            self._skip(title)
            train_one(*arguments)  # checks that it was trained with this bank and these weights
            return
        with self._step(title):
            train_one(*arguments, say=lambda text: self._say(f"    {text}"))


# ---- steps


def evaluate_part(plan: ExperimentPlan, num_candidates: int) -> tuple[Evaluation, dict[str, Any]]:
    """Evaluate all rows of one T at a time, so that differences are paired by video; also as evaluation.json keeps it.

    Where the table shows another metric than the one by which evaluations compare, uniform rows are added for every N
    that a row is compared with; a baseline's N is only known once it has run.
    """
    location, request, cells = plan.location, plan.request, plan.parts[num_candidates]

    def evaluated(policies: dict[str, str], pairs: Iterable[tuple[int, int]]) -> Evaluation:
        return evaluate(
            location.bank.path,
            policies,
            pairs=list(pairs),
            classifier=location.teacher if location.classifier is None else location.classifier,
            views=None if location.classifier is None else int(location.about["views"]),
            split=location.split,
            seed=plan.seeds[0],
            bootstrap=request.bootstrap,
            device=request.device,
            precision=request.precision,
            say=lambda text: request.say(f"    note: {text}") if applies_here(text) else None,
        )

    evaluation = evaluated(policies_of(plan, cells), dict.fromkeys(cell.pair for cell in cells))
    part = evaluation.to_dict()
    missing = missing_uniform(part["rows"], metric_of(plan))
    if missing:
        part["rows"] += evaluated({UNIFORM: UNIFORM}, missing).to_dict()["rows"]
    return evaluation, part


@contextmanager
def _noting_missing_packages(result: dict[str, Any]) -> Iterator[None]:
    """Keep what was measured, perhaps for hours, where a package that draws it is not installed."""
    try:
        yield
    except MissingDependency as error:
        result["notes"].append(f"not drawn: {error}")


def _measure_independence(plan: ExperimentPlan, folder: Path) -> dict[str, Any]:
    """Measure how similar neighbouring frames are, and write independence.json and independence.png."""
    request = plan.request
    videos, source = _videos_for_independence(plan.location.bank.split(plan.location.split))
    measured = independence(
        videos,
        classifiers=[location.classifier for location in (plan.location, *plan.beside)],
        seed=request.seeds[0],
        device=request.device,
        precision=request.precision,
        say=lambda text: request.say(f"    note: {text}"),
    )
    result = independence_result(plan, measured.to_dict())
    if source:
        result["notes"].append(source)
    with _noting_missing_packages(result):
        result["files"] = [path.name for path in measured.write(folder)]
    return result


def _videos_for_independence(bank: Bank) -> tuple[Bank | Manifest, str]:
    """Return a bank, or its video files where the stored frames are too far apart for the figure; and a note."""
    count = min(len(bank), _CHECKED_VIDEOS)
    times = [np.unique(bank[index].pts_seconds) for index in range(count)]
    sparse = []
    for rate in _FIGURE_RATES:
        with_pairs = sum(len(one) > 1 and len(later_by(one, np.arange(len(one)), 1 / rate)) > 0 for one in times)
        if 2 * with_pairs < count:
            sparse.append(f"{rate:g}")
    if not sparse:
        return bank, ""
    words = f"most videos of the bank store no neighbours at {' and '.join(sparse)} frames a second"
    has_root = bank.folder.videos_root.is_file()  # where relative paths start
    root = Path(bank.folder.videos_root.read_text(encoding="utf-8").rstrip("\n")) if has_root else Path()
    known = [item for item in bank.items if has_root or Path(item.path).is_absolute()]
    items = tuple(item for item in known if (root / item.path).exists())
    if not items:
        return bank, f"{words}, and the video files are not there, so these rates have few pairs or none"
    return Manifest(items, bank.classes, bank.multi_label, root), f"{words}, so frames are read from the video files"


def _write_page(
    plan: ExperimentPlan, result: dict[str, Any], folder: Path, rows: Sequence[dict[str, Any]], **more: Any
) -> None:
    """Write a page about an experiment, and add it to the files of the result."""
    title = f"{name_in_words(plan.experiment.name)}: {plan.experiment.title}"
    facts = {name: result[name] for name in ("bank", "classifier", "metric", "seeds", "notes")}
    page = write_report(folder / "report", title, rows, facts=facts, **more)
    result["files"].append(str(page.relative_to(folder)))


def _draw_curves(plan: ExperimentPlan, result: dict[str, Any], folder: Path) -> None:
    """Write a page with the curves, and accuracy against cost as a file."""
    rows, metric = mean_rows(result["rows"], result["metric"]), result["metric"]
    _write_page(plan, result, folder, rows, metric=metric, intro=f"The paper claims: {plan.experiment.claim}")
    title = f"{plan.experiment.title}: {plan.location.title}"
    result["files"].append(write_cost_curve(rows, metric, folder / "curve.svg", title=title).name)


# ---- cases: single videos on which a sampler does well or badly, chosen by their numbers and not by hand


def chosen_cases(videos: RunVideos, sampler: str, pair: tuple[int, int], *, success: bool) -> list[int]:
    """Return indices of videos that the sampler gets right and uniform wrong (or not), the largest lead first."""
    of_sampler, of_uniform = videos.predictions((sampler, *pair)), videos.predictions((UNIFORM, *pair))
    return cases(of_sampler, of_uniform, success=success)


def write_cases(plan: ExperimentPlan, evaluation: Evaluation, run: Path, result: dict[str, Any], folder: Path) -> None:
    """Write a page of videos with the frames that each policy chose; adds to the result.

    Args:
        run: folder into which the evaluation was written.
    """
    experiment, request, pair = plan.experiment, plan.request, plan.cells[0].pair
    names = {cell.policy_names(plan.seeds)[0]: cell for cell in plan.cells}
    videos = read_run_videos(run / VIDEOS_FILE)
    if experiment.success is None:
        indices, shown = list(range(min(request.num_cases, len(videos.videos)))), "the first videos"
    else:
        sampler = next(name for name, cell in names.items() if cell.training)
        indices = chosen_cases(videos, sampler, pair, success=experiment.success)[: request.num_cases]
        title = names[sampler].recipe.title
        right, wrong = (title, UNIFORM) if experiment.success else (UNIFORM, title)
        shown = f"videos that {right} gets right and {wrong} wrong, by the difference of confidence in the label"
    result["videos"] = [videos.videos[index].id for index in indices]
    result["notes"].append(f"shown are {shown}: {len(indices)}")
    keys: list[RowKey] = [(name, *pair) for name in names]
    bank = plan.location.bank.split(plan.location.split)
    strips = []
    for index in indices:
        strip = strip_of(videos, videos.videos[index], keys, bank)
        lines = tuple(replace(line, policy=names[line.policy].recipe.title) for line in strip.lines)
        strips.append(replace(strip, lines=lines))
    rows = [row.to_dict() for row in evaluation.rows if row.policy in names]
    _write_page(
        plan,
        result,
        folder,
        [{**row, "policy": names[row["policy"]].recipe.title} for row in rows],
        curves=[],
        strips=strips,
        metric=evaluation.metric,
        intro=f"The paper claims: {experiment.claim} Shown are {shown}.",
        headline=pair,
    )
