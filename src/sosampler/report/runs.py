"""What `sosampler report` is given: evaluations, with or without their videos, and reproductions of the paper."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler.errors import InvalidArgument, SosamplerError, first_line
from sosampler.evaluation.per_video import EVALUATION_FILE, VIDEOS_FILE, rows_digest
from sosampler.report.curves import METRIC_NAMES, Row
from sosampler.report.grids import INDEPENDENCE_FILE
from sosampler.report.run_videos import RunVideos, read_run_videos

RESULT_FILE, RUN_FILE = "result.json", "run.json"
_REPRODUCTION = "sosampler reproduction"  # the kind in its run.json
_DEPTH = 3  # OUT/BANK/CLASSIFIER/EXPERIMENT
_MOST_LEVELS = 40  # of lists and objects in each other
_ROUNDING = 1e-6  # by which a share may miss 0 or 1
_LARGEST = 1 << 53  # whole number
# What a row may lack: older files have fewer, and not everything can be measured.
_OPTIONAL_SHARES = ("confidence", "fidelity")
_OPTIONAL_NUMBERS = ("recovered", "gmacs", "sampler_gmacs", "classifier_gmacs", "frames_decoded")
_OPTIONAL = (*_OPTIONAL_SHARES, *_OPTIONAL_NUMBERS, "ci95", "versus_uniform", "gap", "method")
_ABOUT_OTHER_FILES = ("rows", "notes", "report", "evaluation", "steps")


@dataclass(frozen=True, eq=False)
class EvaluationRun:
    """An evaluation that was written to disk."""

    path: Path  # folder or file
    rows: Sequence[Row]
    facts: dict[str, Any]
    metric: str
    notes: tuple[str, ...]  # of the evaluation
    videos: RunVideos | None
    missing: tuple[str, ...] = ()  # what else a reader should know

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent


@dataclass(frozen=True)
class Experiments:
    """Finished experiments of `sosampler reproduce` with one bank and one classifier."""

    path: Path
    folders: tuple[Path, ...]
    unfinished: tuple[Path, ...] = ()


@dataclass(frozen=True)
class IndependenceRun:
    """What `sosampler independence` wrote."""

    path: Path


AnyRun = EvaluationRun | Experiments | IndependenceRun


def read_runs(path: Path) -> list[AnyRun]:
    """What lies at a place: one run, or one for each bank and classifier of a reproduction."""
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be looked at ({error.strerror}); give another path") from error
    if is_file:
        return [_evaluation(path, path)]
    if not is_folder:
        raise InvalidArgument(f"{path}: is not there; give a folder of `sosampler evaluate --run`, or such a file")
    experiments = _experiments(path)
    # In the folder of an experiment, evaluation.json is the experiment's.
    own = not any(path in (*run.folders, *run.unfinished) for run in experiments)
    if own and (path / EVALUATION_FILE).is_file():
        return [_evaluation(path, path / EVALUATION_FILE), *experiments]
    if any(run.folders for run in experiments):
        return [*experiments]
    if experiments:
        names = ", ".join(str(folder) for run in experiments for folder in run.unfinished)
        raise InvalidArgument(f"{path}: no experiment is finished ({names}); run `sosampler reproduce` again first")
    if (path / INDEPENDENCE_FILE).is_file():
        return [IndependenceRun(path)]
    raise InvalidArgument(
        f"{path}: holds neither {EVALUATION_FILE} nor {INDEPENDENCE_FILE} nor experiments of `sosampler reproduce`; "
        "give a folder that `sosampler evaluate --run`, `sosampler demo` or `sosampler reproduce` wrote"
    )


def is_folder(path: Path) -> bool:
    """Also of what can be no path, as a name that is too long."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a file."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise InvalidArgument(f"{path}: is nested too deeply; write it again") from error
    except ValueError as error:
        raise InvalidArgument(f"{path}: is not JSON ({first_line(error)}); write it again") from error
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read ({error.strerror}); give a file that can") from error
    if not isinstance(told, dict):
        raise InvalidArgument(f"{path}: is JSON, but no object with rows; write it again")
    level: list[Any] = [told]
    for _ in range(_MOST_LEVELS):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
    if level:
        raise InvalidArgument(f"{path}: is nested too deeply; write it again")
    return told


# ---- reproductions


def _experiments(path: Path) -> list[Experiments]:
    """Of each bank and classifier below a folder: what is finished, and what was begun."""
    files = [path.glob("*/" * depth + name) for depth in range(_DEPTH + 1) for name in (RESULT_FILE, RUN_FILE)]
    folders = sorted({file.parent for found in files for file in found})
    finished = {folder for folder in folders if _is_finished(folder)}
    begun = {folder for folder in folders if folder not in finished and _is_reproduction(folder)}
    return [
        Experiments(
            place,
            tuple(folder for folder in folders if folder in finished and folder.parent == place),
            tuple(folder for folder in folders if folder in begun and folder.parent == place),
        )
        for place in sorted({folder.parent for folder in finished | begun})
    ]


def _is_finished(folder: Path) -> bool:
    """Trainings and others have a result.json too, which is of no experiment; a reproduction's own must be whole."""
    file = folder / RESULT_FILE
    if not file.is_file():
        return False
    try:
        return isinstance(read_object(file).get("experiment"), str)
    except InvalidArgument:
        if _is_reproduction(folder):
            raise
        return False


def _is_reproduction(folder: Path) -> bool:
    """Whether `sosampler reproduce` began something here."""
    try:
        return read_object(folder / RUN_FILE).get("kind") == _REPRODUCTION
    except InvalidArgument:
        return False


# ---- evaluations


def _evaluation(path: Path, file: Path) -> EvaluationRun:
    told = read_object(file)
    rows = _checked_rows(file, told.get("rows"))
    metric = told.get("metric", "top1")
    if not isinstance(metric, str) or metric not in METRIC_NAMES:
        raise InvalidArgument(f"{file}: metric={metric!r} is unknown; it is {' or '.join(METRIC_NAMES)}")
    notes = told.get("notes", [])
    if not isinstance(notes, list):
        raise InvalidArgument(f"{file}: its notes are {type(notes).__name__}, not a list; write it again")
    videos, missing = _videos(path, told["rows"], told.get("num_videos"))
    return EvaluationRun(
        path,
        rows,
        {name: value for name, value in told.items() if name not in _ABOUT_OTHER_FILES},
        metric,
        tuple(map(str, notes)),
        videos,
        missing,
    )


def _videos(path: Path, rows: Sequence[Row], count: Any) -> tuple[RunVideos | None, tuple[str, ...]]:
    """The videos beside an evaluation, and why there are none."""
    file = path / VIDEOS_FILE if path.is_dir() else None
    if file is None or not file.is_file():
        again = "`sosampler evaluate --run FOLDER` writes a run that has them"
        return None, (f"Nothing is known of single videos, so none are shown: {again}.",)
    videos = read_run_videos(file)
    if videos.digest != rows_digest(rows) or count not in (None, len(videos.videos)) or not _agree(videos, rows):
        raise SosamplerError(
            f"{file}: belongs to another evaluation than {EVALUATION_FILE} beside it; write both again with "
            "`sosampler evaluate --run`, or delete it"
        )
    return videos, ()


def _agree(videos: RunVideos, rows: Sequence[Row]) -> bool:
    """Whether rows are what their videos say: each top-1 the mean of them."""
    if set(videos.keys) != {(row["policy"], row["num_frames"], row["num_candidates"]) for row in rows}:
        return False
    half = 0.5 / len(videos.videos)  # a video more or less would be twice this
    means = {key: sum(one.right for one in videos.said(key)) / len(videos.videos) for key in videos.keys}
    return all(
        abs(means[row["policy"], row["num_frames"], row["num_candidates"]] - float(row["top1"])) < half for row in rows
    )


def _checked_rows(file: Path, rows: Any) -> list[Row]:
    if not isinstance(rows, list) or not rows:
        raise InvalidArgument(f"{file}: has no rows of an evaluation; give what `sosampler evaluate` wrote")
    return [_checked_row(file, number, row) for number, row in enumerate(rows, start=1)]


def _checked_row(file: Path, number: int, row: Any) -> Row:
    good = (
        isinstance(row, dict)
        and isinstance(row.get("policy"), str)
        and _is_count(row.get("num_candidates"))
        and "num_frames" in row
        and (row["num_frames"] is None or _is_count(row["num_frames"]))
        and all(_is_share(row.get(name)) for name in METRIC_NAMES)
        and all(row.get(name) is None or _is_share(row[name]) for name in _OPTIONAL_SHARES)
        and all(row.get(name) is None or _is_number(row[name]) for name in _OPTIONAL_NUMBERS)
        and _is_number(row.get("frames_classified", 0))
        and (row.get("gap") is None or (isinstance(row["gap"], dict) and _is_number(row["gap"].get("max"))))
        and all(_is_interval(bounds) for bounds in _intervals(row))
    )
    if not good:
        raise InvalidArgument(f"{file}: row {number} is not one of an evaluation; write it again")
    return {**dict.fromkeys(_OPTIONAL), **row}


def _intervals(row: dict[str, Any]) -> list[Any]:
    """All 95 % intervals of a row; [None] stands for something that is none."""
    found = []
    for name in ("ci95", "versus_uniform"):
        told = row.get(name)
        if told is None:
            continue
        if not isinstance(told, dict):
            return [None]
        found += [told[key] for key in told if (name == "ci95" or key == "ci95") and told[key] is not None]
        if name == "versus_uniform" and not _is_number(told.get("difference")):
            return [None]
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST


def _is_number(value: Any) -> bool:
    """A finite one, and none of those whole numbers that no fraction can be made of."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < _LARGEST


def _is_share(value: Any) -> bool:
    return _is_number(value) and -_ROUNDING <= value <= 1 + _ROUNDING


def _is_interval(value: Any) -> bool:
    good = isinstance(value, list) and len(value) == 2 and all(_is_number(one) for one in value)
    return good and -1 - _ROUNDING <= value[0] <= value[1] <= 1 + _ROUNDING
