"""What `sosampler report` is given: evaluations, with or without their videos, and reproductions of the paper."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.evaluation.per_video import EVALUATION_FILE, VIDEOS_FILE, rows_digest
from sosampler.report.curves import METRIC_NAMES, Row
from sosampler.report.grids import INDEPENDENCE_FILE
from sosampler.report.run_videos import RunVideos, read_run_videos

RESULT_FILE = "result.json"
_DEPTH = 3  # OUT/BANK/CLASSIFIER/EXPERIMENT
# What a row may lack: older files have fewer, and not everything can be measured.
_OPTIONAL = (
    *("confidence", "fidelity", "recovered", "gmacs", "sampler_gmacs", "classifier_gmacs"),
    *("frames_decoded", "ci95", "versus_uniform", "gap", "method"),
)
_ABOUT_OTHER_FILES = ("rows", "notes", "report", "evaluation", "steps")


@dataclass(frozen=True, eq=False)
class EvaluationRun:
    """An evaluation that was written to disk."""

    path: Path  # folder or file
    rows: Sequence[Row]
    facts: dict[str, Any]
    metric: str
    notes: tuple[str, ...]
    videos: RunVideos | None

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent


@dataclass(frozen=True)
class Experiments:
    """Finished experiments of `sosampler reproduce` with one bank and one classifier."""

    path: Path
    folders: tuple[Path, ...]


@dataclass(frozen=True)
class IndependenceRun:
    """What `sosampler independence` wrote."""

    path: Path


AnyRun = EvaluationRun | Experiments | IndependenceRun


def read_runs(path: Path) -> list[AnyRun]:
    """What lies at a place: one run, or one for each bank and classifier of a reproduction."""
    if path.is_file():
        return [_evaluation(path, path)]
    if not path.is_dir():
        raise InvalidArgument(f"{path}: is not there; give a folder of `sosampler evaluate --run`, or such a file")
    experiments = sorted(
        file.parent for depth in range(_DEPTH + 1) for file in path.glob("*/" * depth + RESULT_FILE) if _is_result(file)
    )
    if experiments:
        places = sorted({folder.parent for folder in experiments})
        return [
            Experiments(place, tuple(folder for folder in experiments if folder.parent == place)) for place in places
        ]
    if (path / EVALUATION_FILE).is_file():
        return [_evaluation(path, path / EVALUATION_FILE)]
    if (path / INDEPENDENCE_FILE).is_file():
        return [IndependenceRun(path)]
    raise InvalidArgument(
        f"{path}: holds neither {EVALUATION_FILE} nor {INDEPENDENCE_FILE} nor experiments of `sosampler reproduce`; "
        "give a folder that `sosampler evaluate --run`, `sosampler demo` or `sosampler reproduce` wrote"
    )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a file."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"{path}: is not JSON ({error}); write it again") from error
    if not isinstance(told, dict):
        raise InvalidArgument(f"{path}: is JSON, but no object with rows; write it again")
    return told


def _is_result(path: Path) -> bool:
    """Trainings have a result.json too, which is of no experiment."""
    return "experiment" in read_object(path)


# ---- evaluations


def _evaluation(path: Path, file: Path) -> EvaluationRun:
    told = read_object(file)
    rows = _checked_rows(file, told.get("rows"))
    metric = told.get("metric", "top1")
    if metric not in METRIC_NAMES:
        raise InvalidArgument(f"{file}: metric={metric!r} is unknown; it is {' or '.join(METRIC_NAMES)}")
    notes = told.get("notes", [])
    if not isinstance(notes, list):
        raise InvalidArgument(f"{file}: its notes are {type(notes).__name__}, not a list; write it again")
    videos, missing = _videos(path, told["rows"])
    return EvaluationRun(
        path,
        rows,
        {name: value for name, value in told.items() if name not in _ABOUT_OTHER_FILES},
        metric,
        (*map(str, notes), *missing),
        videos,
    )


def _videos(path: Path, rows: Sequence[Row]) -> tuple[RunVideos | None, list[str]]:
    """The videos beside an evaluation, and why there are none."""
    file = path / VIDEOS_FILE if path.is_dir() else None
    if file is None or not file.is_file():
        again = "`sosampler evaluate --run FOLDER` writes a run that has them"
        return None, [f"Nothing is known of single videos, so none are shown: {again}."]
    videos = read_run_videos(file)
    if videos.digest != rows_digest(rows):
        raise SosamplerError(
            f"{file}: belongs to another evaluation than {EVALUATION_FILE} beside it; write both again with "
            "`sosampler evaluate --run`, or delete it"
        )
    return videos, []


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
        and all(_is_number(row.get(name)) for name in METRIC_NAMES)
        and all(row.get(name) is None or _is_number(row[name]) for name in _OPTIONAL[:7])
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
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_number(one) for one in value)
