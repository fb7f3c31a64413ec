"""Read runs from disk: evaluations with their videos, reproductions of the paper, the independence of frames."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sosampler._util.files import load_json, parse_line
from sosampler.errors import InvalidArgument, SosamplerError, first_line
from sosampler.evaluation.result import EVALUATION_FILE, KIND, VERSION, VIDEOS_FILE, rows_digest
from sosampler.figures.curves import METRIC_NAMES, Figure, Row

INDEPENDENCE_FILE, INDEPENDENCE_FIGURE = "independence.json", "independence.png"
RESULT_FILE, RUN_FILE = "result.json", "run.json"
_REPRODUCTION = "sosampler reproduction"  # the kind in its run.json
_REPRODUCTION_DEPTH = 3  # OUT/BANK/CLASSIFIER/EXPERIMENT
_AGAIN = "`sosampler evaluate --run`"
_ROUNDING = 1e-4  # by which a fraction in a file may miss 0 or 1
_MAX_INT = 1 << 53
_MAX_LEVELS = 40  # of nested lists and objects
_MAX_FIGURE_BYTES = 2 << 20
_INVALID = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
# What a row may lack: older files have fewer, and not everything can be measured.
_OPTIONAL_FRACTIONS = ("confidence", "fidelity", "ece")
_OPTIONAL_NUMBERS = ("recovered", "gmacs", "sampler_gmacs", "classifier_gmacs", "frames_decoded")
_OPTIONAL = (*_OPTIONAL_FRACTIONS, *_OPTIONAL_NUMBERS, "ci95", "versus_uniform", "gap", "method", "answer")
_NO_FACTS = ("rows", "notes", "report", "evaluation", "steps")


# ---- tables that are shown as they are


@dataclass(frozen=True)
class EmbeddedImage:
    """An image inside of a link."""

    uri: str
    words: str


@dataclass(frozen=True)
class Grid:
    """A table of texts with its header, the text above and below it, and its figures."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    above: Sequence[str] = ()
    below: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    images: Sequence[EmbeddedImage] = ()


def independence_grid(folder: Path) -> Grid | None:
    """Return the table of `sosampler independence` in a folder; None where there is none."""
    path = folder / INDEPENDENCE_FILE
    if not path.is_file():
        return None
    try:
        values = load_json(path, "MAX_LIST_BYTES")
        rows = []
        for row in values["rows"]:
            mean = "" if row["mean"] is None else f"{row['mean']:.3f}"
            redundant = "" if row["redundant"] is None else f"{100 * row['redundant']:.1f}"
            passes = {True: "yes", False: "no", None: ""}[row["passes"]]
            rows.append([str(row["classifier"]), f"{row['rate']:g}", str(row["pairs"]), mean, redundant, passes])
        above = [f"{int(values['videos'])} videos."]
        for facts in values["classifiers"]:
            rate = facts["verdict"]
            words = "at no rate that was measured" if rate is None else f"up to {rate:g} frames a second"
            above.append(f"For {facts['classifier']} frames are independent {words}.")
        below = [str(values["criterion"]), *map(str, values["notes"])]
    except (*_INVALID, OSError) as error:
        raise InvalidArgument(
            f"{path}: is not what `sosampler independence` writes ({type(error).__name__}: {error}); write it again"
        ) from error
    head = ["classifier", "frames a second", "pairs", "mean similarity", "redundant, %", "independent"]
    return Grid("How similar neighbouring frames are", head, rows, above, below, images=independence_figure(folder))


def independence_figure(folder: Path) -> list[EmbeddedImage]:
    """Return the densities that `sosampler independence` drew."""
    path = folder / INDEPENDENCE_FIGURE
    data = path.read_bytes() if path.is_file() and path.stat().st_size <= _MAX_FIGURE_BYTES else b""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return []
    words = "Densities of the similarity of neighbouring frames: a curve for each rate, dashed for frames far apart"
    return [EmbeddedImage("data:image/png;base64," + base64.b64encode(data).decode("ascii"), words)]


# ---- the videos of a run

RowKey = tuple[str, int | None, int]  # policy, N (None for a baseline) and T


@dataclass(frozen=True)
class VideoCandidates:
    """The candidates of a video, in time order; [T] each."""

    slots: tuple[int, ...]  # stored frames, ascending
    seconds: tuple[float, ...]
    confidence: tuple[float, ...]  # of the classifier in the labels, from that frame alone
    scores: Mapping[str, tuple[float | None, ...]]  # by policy


@dataclass(frozen=True)
class Prediction:
    """One policy's choice, and the classifier's prediction from it."""

    predicted: int
    probability: float
    confidence: float  # in the labels
    right: bool
    chosen: tuple[int, ...]  # stored frames


@dataclass(frozen=True)
class RunVideo:
    """One video; `predictions` in the order of the keys."""

    id: str
    labels: tuple[int, ...]
    candidates: Mapping[int, VideoCandidates]  # by T
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True, eq=False)
class RunVideos:
    """All videos of a run."""

    digest: str  # of the rows that they belong to
    classes: tuple[str, ...]
    keys: tuple[RowKey, ...]
    videos: tuple[RunVideo, ...]

    def predictions(self, key: RowKey) -> list[Prediction]:
        """Return the predictions from one policy's choices, video by video."""
        index = self.keys.index(key)
        return [video.predictions[index] for video in self.videos]

    def label(self, video: RunVideo) -> str:
        return ", ".join(self.classes[label] for label in video.labels)


def read_run_videos(path: Path) -> RunVideos:
    """Read a videos.jsonl; errors name the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: is not text ({error}); write it again with {_AGAIN}") from error
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read ({error.strerror}); give a run that can") from error

    def parse(number: int, line: str, make: Callable[[Any], Any]) -> Any:
        try:
            return make(parse_line(line))
        except _INVALID as error:
            raise InvalidArgument(
                f"{path}, line {number}: is not of a {KIND} file of version {VERSION} ({type(error).__name__}: "
                f"{error}); write it again with {_AGAIN}"
            ) from error

    header, count = parse(1, lines[0], lambda values: (_header(values), _int(values["videos"])))
    videos = tuple(
        parse(number, line, lambda values: _video(values, header)) for number, line in enumerate(lines[1:], start=2)
    )
    if len(videos) != count or not videos:
        raise InvalidArgument(
            f"{path}: is of {count} videos, but has {len(videos)}; copy it again, or write it again with {_AGAIN}"
        )
    if len({video.id for video in videos}) < len(videos):
        raise InvalidArgument(f"{path}: a video is in it twice; write it again with {_AGAIN}")
    return RunVideos(header.digest, header.classes, header.keys, videos)


def _header(values: Any) -> RunVideos:
    if values["kind"] != KIND or values["version"] != VERSION:
        raise ValueError(f"kind {values['kind']!r}, version {values['version']!r}")
    keys = [
        (_is(str, policy), None if frames is None else _int(frames), _int(count))
        for policy, frames, count in values["rows"]
    ]
    classes = tuple(_is(str, name) for name in values["classes"])
    return RunVideos(_is(str, values["evaluation"]), classes, tuple(keys), ())


def _video(values: Any, header: RunVideos) -> RunVideo:
    candidates = {int(count): _candidates(part) for count, part in _is(dict, values["candidates"]).items()}
    predictions = tuple(
        Prediction(
            _int(answer["predicted"], below=len(header.classes)),
            _fraction(answer["probability"]),
            _fraction(answer["confidence"]),
            _is(bool, answer["right"]),
            tuple(_int(slot) for slot in answer["chosen"]),
        )
        for answer in values["answers"]
    )
    labels = tuple(_int(label, below=len(header.classes)) for label in values["labels"])
    if len(predictions) != len(header.keys) or not labels:
        raise ValueError(f"{len(predictions)} answers to {len(header.keys)} rows, {len(labels)} labels")
    for (policy, _, count), prediction in zip(header.keys, predictions, strict=True):
        if not set(prediction.chosen) <= set(candidates[count].slots):
            raise ValueError(f"{policy} chose what is no candidate")
    return RunVideo(_is(str, values["id"]), labels, candidates, predictions)


def _candidates(values: Any) -> VideoCandidates:
    slots = tuple(_int(slot) for slot in values["slots"])
    if not slots or any(later <= earlier for earlier, later in pairwise(slots)):
        raise ValueError(f"{list(slots)} are no candidates in time order")

    def listed(given: Any) -> Sequence[Any]:
        if len(_is(list, given)) != len(slots):
            raise ValueError(f"{len(given)} numbers for {len(slots)} candidates")
        return given  # type: ignore[no-any-return]

    return VideoCandidates(
        slots,
        tuple(_number(value) for value in listed(values["seconds"])),
        tuple(_fraction(value) for value in listed(values["confidence"])),
        {
            _is(str, policy): tuple(None if value is None else _number(value) for value in listed(scores))
            for policy, scores in _is(dict, values["scores"]).items()
        },
    )


def _is(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _int(value: Any, below: int = _MAX_INT, at_least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < below:
        raise ValueError(f"{value!r} is no int" + (f" below {below}" if below < _MAX_INT else ""))
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    if not math.isfinite(value) or (isinstance(value, int) and abs(value) >= _MAX_INT):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _fraction(value: Any) -> float:
    number = _number(value)
    if not -_ROUNDING <= number <= 1 + _ROUNDING:
        raise ValueError(f"{value!r} is no fraction of 0..1")
    return number


# ---- runs


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
    """Results of `sosampler independence`."""

    path: Path


AnyRun = EvaluationRun | Experiments | IndependenceRun


def read_runs(path: Path) -> list[AnyRun]:
    """Read one run, or one for each bank and classifier of a reproduction."""
    try:
        is_file, is_there = path.is_file(), path.is_dir()
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be opened ({error.strerror}); give another path") from error
    if is_file:
        return [_evaluation(path, path)]
    if not is_there:
        raise InvalidArgument(f"{path}: is not there; give a folder of {_AGAIN}, or such a file")
    experiments = _experiments(path)
    # In the folder of an experiment, evaluation.json is the experiment's.
    of_experiment = any(path in (*run.folders, *run.unfinished) for run in experiments)
    if not of_experiment and (path / EVALUATION_FILE).is_file():
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
        f"give a folder that {_AGAIN}, `sosampler demo` or `sosampler reproduce` wrote"
    )


def is_folder(path: Path) -> bool:
    """Return whether it is a folder; also of what can be no path, as a name that is too long."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object that is not nested too deeply."""
    try:
        values = load_json(path, "MAX_LIST_BYTES")
    except ValueError as error:
        raise InvalidArgument(f"{path}: is not JSON ({first_line(error)}); write it again") from error
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read ({error.strerror}); give a file that can") from error
    if not isinstance(values, dict):
        raise InvalidArgument(f"{path}: is JSON, but no object with rows; write it again")
    level: list[Any] = [values]
    for _ in range(_MAX_LEVELS):
        inner = (parent.values() if isinstance(parent, dict) else parent for parent in level)
        level = [value for children in inner for value in children if isinstance(value, (dict, list))]
    if level:
        raise InvalidArgument(f"{path}: is nested too deeply; write it again")
    return values


def _experiments(path: Path) -> list[Experiments]:
    """Return the experiments of each bank and classifier below a folder: finished, and started."""
    depths = range(_REPRODUCTION_DEPTH + 1)
    files = [path.glob("*/" * depth + name) for depth in depths for name in (RESULT_FILE, RUN_FILE)]
    folders = sorted({file.parent for matches in files for file in matches})
    finished = [folder for folder in folders if _is_finished(folder)]
    started = [folder for folder in folders if folder not in finished and _is_reproduction(folder)]
    runs = []
    for parent in sorted({folder.parent for folder in (*finished, *started)}):
        both = (tuple(folder for folder in some if folder.parent == parent) for some in (finished, started))
        runs.append(Experiments(parent, *both))
    return runs


def _is_finished(folder: Path) -> bool:
    """Return whether an experiment has a result; trainings and others have a result.json of their own."""
    file = folder / RESULT_FILE
    try:
        return file.is_file() and isinstance(read_object(file).get("experiment"), str)
    except InvalidArgument:
        if _is_reproduction(folder):
            raise
        return False


def _is_reproduction(folder: Path) -> bool:
    """Return whether `sosampler reproduce` started something here."""
    try:
        return read_object(folder / RUN_FILE).get("kind") == _REPRODUCTION
    except InvalidArgument:
        return False


def _evaluation(path: Path, file: Path) -> EvaluationRun:
    values = read_object(file)
    stored = values.get("rows")
    if not isinstance(stored, list) or not stored:
        raise InvalidArgument(f"{file}: has no rows of an evaluation; give what `sosampler evaluate` wrote")
    rows = []
    for number, row in enumerate(stored, start=1):
        try:
            _check_row(row)
        except _INVALID as error:
            raise InvalidArgument(f"{file}: row {number} is not one of an evaluation; write it again") from error
        rows.append({**dict.fromkeys(_OPTIONAL), **row})
    metric = values.get("metric", "top1")
    if not isinstance(metric, str) or metric not in METRIC_NAMES:
        raise InvalidArgument(f"{file}: metric={metric!r} is unknown; it is {' or '.join(METRIC_NAMES)}")
    notes = values.get("notes", [])
    if not isinstance(notes, list):
        raise InvalidArgument(f"{file}: its notes are {type(notes).__name__}, not a list; write it again")
    facts = {name: value for name, value in values.items() if name not in _NO_FACTS}
    videos, missing = _videos(path, stored, values.get("num_videos"))
    return EvaluationRun(path, rows, facts, metric, tuple(map(str, notes)), videos, missing)


def _videos(path: Path, rows: Sequence[Row], count: Any) -> tuple[RunVideos | None, tuple[str, ...]]:
    """Return the videos beside an evaluation, or why there are none."""
    file = path / VIDEOS_FILE if path.is_dir() else None
    if file is None or not file.is_file():
        again = "`sosampler evaluate --run FOLDER` writes a run that has them"
        return None, (f"Nothing is known of single videos, so none are shown: {again}.",)
    videos = read_run_videos(file)
    if videos.digest != rows_digest(rows) or count not in (None, len(videos.videos)) or not _agree(videos, rows):
        raise SosamplerError(
            f"{file}: belongs to another evaluation than {EVALUATION_FILE} beside it; write both again with {_AGAIN}, "
            "or delete it"
        )
    return videos, ()


def _agree(videos: RunVideos, rows: Sequence[Row]) -> bool:
    """Return whether each top-1 of the rows is the mean of the videos."""
    top1 = {(row["policy"], row["num_frames"], row["num_candidates"]): float(row["top1"]) for row in rows}
    right = {key: sum(prediction.right for prediction in videos.predictions(key)) for key in videos.keys}
    # A video more or less would be a whole one.
    return set(right) == set(top1) and all(abs(right[key] - len(videos.videos) * top1[key]) < 0.5 for key in right)


def _check_row(row: Any) -> None:
    """Raise one of `_INVALID` where it is no row of an evaluation."""
    _is(str, _is(dict, row)["policy"])
    _int(row["num_candidates"], at_least=1)
    if row["num_frames"] is not None:
        _int(row["num_frames"], at_least=1)
    for name in METRIC_NAMES:
        _fraction(row[name])
    _number(row.get("frames_classified", 0))
    for name in (*_OPTIONAL_FRACTIONS, *_OPTIONAL_NUMBERS):
        if row.get(name) is not None:
            (_fraction if name in _OPTIONAL_FRACTIONS else _number)(row[name])
    if row.get("gap") is not None:
        _number(row["gap"]["max"])
    intervals = list(_is(dict, row["ci95"]).values()) if row.get("ci95") is not None else []
    if row.get("versus_uniform") is not None:
        _number(_is(dict, row["versus_uniform"])["difference"])
        intervals.append(row["versus_uniform"].get("ci95"))
    for bounds in intervals:
        if bounds is not None:
            low, high = _is(list, bounds)
            if not -1 - _ROUNDING <= _number(low) <= _number(high) <= 1 + _ROUNDING:
                raise ValueError(f"{bounds} is no interval")
