"""Tables of a report that others have laid out: reproductions of the paper, and the independence of frames."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sosampler.errors import InvalidArgument, SosamplerError, first_line
from sosampler.evaluation.result import EVALUATION_FILE, KIND, VERSION, VIDEOS_FILE, rows_digest
from sosampler.figures.curves import METRIC_NAMES, Figure, Row

INDEPENDENCE_FILE, INDEPENDENCE_PICTURE = "independence.json", "independence.png"
_PNG = b"\x89PNG\r\n\x1a\n"
_LARGEST_PICTURE = 2 << 20  # bytes


@dataclass(frozen=True)
class Picture:
    """A picture from a file, inside of a link."""

    uri: str
    words: str


@dataclass(frozen=True)
class Grid:
    """A table of texts with its head, what stands above and below it, and what belongs to it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    above: Sequence[str] = ()
    below: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    pictures: Sequence[Picture] = ()


def grid_of_markdown(text: str) -> Grid:
    """A page of Markdown with one table: heading, paragraphs, the table, a list.

    >>> grid_of_markdown("## T\\n\\nIt says a.  \\n\\n| who | N |\\n| --- | ---: |\\n| a\\\\|b | 1 |\\n\\n- note").rows
    [['a|b', '1']]
    """
    title, above, below, table = "", [], [], []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line.startswith("## "):
            title = line.removeprefix("## ")
        elif line.startswith("| "):
            table.append([cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif line.startswith("- "):
            below.append(line.removeprefix("- "))
        else:
            above.append(line)
    head, rows = (table[0], table[2:]) if table else ([], [])  # below the head is a ruler
    return Grid(title, head, rows, above, below)


def independence_grid(folder: Path) -> Grid | None:
    """What `sosampler independence` wrote into a folder; None where there is nothing."""
    path = folder / INDEPENDENCE_FILE
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        rows = [_rate(row) for row in told["rows"]]
        verdicts = [_verdict(facts) for facts in told["classifiers"]]
        below = [str(told["criterion"]), *map(str, told["notes"])]
        videos = int(told["videos"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
        raise InvalidArgument(
            f"{path}: is not what `sosampler independence` writes ({type(error).__name__}: {error}); write it again"
        ) from error
    head = ["classifier", "frames a second", "pairs", "mean likeness", "redundant, %", "stands by itself"]
    above = [f"{videos} videos.", *verdicts]
    return Grid("How alike neighbouring frames are", head, rows, above, below, pictures=pictures_of(folder))


def _rate(row: Mapping[str, Any]) -> list[str]:
    mean = "" if row["mean"] is None else f"{row['mean']:.3f}"
    redundant = "" if row["redundant"] is None else f"{100 * row['redundant']:.1f}"
    passes = {True: "yes", False: "no", None: ""}[row["passes"]]
    return [str(row["classifier"]), f"{row['rate']:g}", str(row["pairs"]), mean, redundant, passes]


def _verdict(facts: Mapping[str, Any]) -> str:
    rate = facts["verdict"]
    words = "at no rate that was measured" if rate is None else f"up to {rate:g} frames a second"
    return f"For {facts['classifier']} frames stand by themselves {words}."


def pictures_of(folder: Path) -> list[Picture]:
    """The densities that `sosampler independence` drew."""
    path = folder / INDEPENDENCE_PICTURE
    data = path.read_bytes() if path.is_file() and path.stat().st_size <= _LARGEST_PICTURE else b""
    if not data.startswith(_PNG):
        return []
    words = "Densities of the likeness of neighbouring frames: a curve for each rate, dashed for frames far apart"
    return [Picture("data:image/png;base64," + base64.b64encode(data).decode("ascii"), words)]


RowKey = tuple[str, int | None, int]
"""Policy, N (None for a system) and T."""
_AGAIN = "`sosampler evaluate --run`"
_ROUNDING = 1e-4  # by which a share in a file may miss 0 or 1


@dataclass(frozen=True)
class Offered:
    """The candidates of a video, in time order; [T] each."""

    slots: tuple[int, ...]  # stored frames, ascending
    seconds: tuple[float, ...]
    confidence: tuple[float, ...]  # of the classifier in the labels, from that frame alone
    scores: Mapping[str, tuple[float | None, ...]]  # by policy


@dataclass(frozen=True)
class Said:
    """One policy's choice, and the answer to it."""

    predicted: int
    probability: float
    confidence: float  # in the labels
    right: bool
    chosen: tuple[int, ...]  # stored frames


@dataclass(frozen=True)
class RunVideo:
    """One video; `said` in the order of the keys."""

    id: str
    labels: tuple[int, ...]
    offered: Mapping[int, Offered]  # by T
    said: tuple[Said, ...]


@dataclass(frozen=True, eq=False)
class RunVideos:
    """All videos of a run."""

    digest: str  # of the rows that they belong to
    classes: tuple[str, ...]
    keys: tuple[RowKey, ...]
    videos: tuple[RunVideo, ...]

    def said(self, key: RowKey) -> list[Said]:
        """What one policy's choices led to, video by video."""
        place = self.keys.index(key)
        return [video.said[place] for video in self.videos]

    def label(self, video: RunVideo) -> str:
        return ", ".join(self.classes[label] for label in video.labels)


def read_run_videos(path: Path) -> RunVideos:
    """The file, or a sentence that names the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: is not text ({error}); write it again with {_AGAIN}") from error
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read ({error.strerror}); give a run that can") from error
    head, count = _parsed(path, 1, lines[0], lambda told: (_head(told), _whole(told["videos"])))
    videos = tuple(
        _parsed(path, number, line, lambda told: _video(told, head)) for number, line in enumerate(lines[1:], start=2)
    )
    if len(videos) != count or not videos:
        raise InvalidArgument(
            f"{path}: is of {count} videos, but has {len(videos)}; copy it again, or write it again with {_AGAIN}"
        )
    if len({video.id for video in videos}) < len(videos):
        raise InvalidArgument(f"{path}: a video is in it twice; write it again with {_AGAIN}")
    return RunVideos(head.digest, head.classes, head.keys, videos)


def _parsed(path: Path, number: int, line: str, make: Callable[[Any], Any]) -> Any:
    try:
        return make(json.loads(line))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise InvalidArgument(
            f"{path}, line {number}: is not of a {KIND} file of version {VERSION} ({type(error).__name__}: {error}); "
            f"write it again with {_AGAIN}"
        ) from error


def _head(told: Any) -> RunVideos:
    if told["kind"] != KIND or told["version"] != VERSION:
        raise ValueError(f"kind {told['kind']!r}, version {told['version']!r}")
    keys = [
        (_is(str, policy), None if frames is None else _whole(frames), _whole(count))
        for policy, frames, count in told["rows"]
    ]
    classes = tuple(_is(str, name) for name in told["classes"])
    return RunVideos(_is(str, told["evaluation"]), classes, tuple(keys), ())


def _video(told: Any, head: RunVideos) -> RunVideo:
    offered = {int(count): _offered(one) for count, one in _is(dict, told["candidates"]).items()}
    said = tuple(_said(one, len(head.classes)) for one in told["answers"])
    labels = tuple(_whole(label, below=len(head.classes)) for label in told["labels"])
    if len(said) != len(head.keys) or not labels:
        raise ValueError(f"{len(said)} answers to {len(head.keys)} rows, {len(labels)} labels")
    for (policy, _, count), one in zip(head.keys, said, strict=True):
        if not set(one.chosen) <= set(offered[count].slots):
            raise ValueError(f"{policy} chose what is no candidate")
    return RunVideo(_is(str, told["id"]), labels, offered, said)


def _offered(told: Any) -> Offered:
    slots = tuple(_whole(slot) for slot in told["slots"])
    if not slots or any(later <= earlier for earlier, later in pairwise(slots)):
        raise ValueError(f"{list(slots)} are no candidates in time order")
    seconds = _numbers(told["seconds"], len(slots))
    confidence = tuple(map(_share, _numbers(told["confidence"], len(slots))))
    scores = {
        _is(str, policy): tuple(None if one is None else _number(one) for one in _of_length(values, len(slots)))
        for policy, values in _is(dict, told["scores"]).items()
    }
    return Offered(slots, seconds, confidence, scores)


def _said(told: Any, num_classes: int) -> Said:
    return Said(
        _whole(told["predicted"], below=num_classes),
        _share(told["probability"]),
        _share(told["confidence"]),
        _is(bool, told["right"]),
        tuple(_whole(slot) for slot in told["chosen"]),
    )


def _is(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _whole(value: Any, below: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (below is not None and value >= below):
        raise ValueError(f"{value!r} is no whole number" + (f" below {below}" if below is not None else ""))
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _share(value: Any) -> float:
    """Of 0..1."""
    found = _number(value)
    if not -_ROUNDING <= found <= 1 + _ROUNDING:
        raise ValueError(f"{value!r} is no share of 0..1")
    return found


def _numbers(values: Any, count: int) -> tuple[float, ...]:
    return tuple(_number(value) for value in _of_length(values, count))


def _of_length(values: Any, count: int) -> Sequence[Any]:
    found: Sequence[Any] = _is(list, values)
    if len(found) != count:
        raise ValueError(f"{len(found)} numbers for {count} candidates")
    return found


RESULT_FILE, RUN_FILE = "result.json", "run.json"
_REPRODUCTION = "sosampler reproduction"  # the kind in its run.json
_DEPTH = 3  # OUT/BANK/CLASSIFIER/EXPERIMENT
_MOST_LEVELS = 40  # of lists and objects in each other
_runs_ROUNDING = 1e-6  # by which a share may miss 0 or 1
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
    return _is_number(value) and -_runs_ROUNDING <= value <= 1 + _runs_ROUNDING


def _is_interval(value: Any) -> bool:
    good = isinstance(value, list) and len(value) == 2 and all(_is_number(one) for one in value)
    return good and -1 - _runs_ROUNDING <= value[0] <= value[1] <= 1 + _runs_ROUNDING
