"""Write runs on disk as one page."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sosampler._util.validation import check_int
from sosampler.errors import InvalidArgument, SosamplerError, first_line
from sosampler.evaluation.result import EVALUATION_FILE, VIDEOS_FILE
from sosampler.figures.curves import Row, report_figures
from sosampler.report.compare import (
    Contrast,
    Pair,
    cases,
    class_differences,
    contrast_of,
    headline_of,
    sentence_of,
    video_lines,
)
from sosampler.report.load import (
    INDEPENDENCE_FIGURE,
    INDEPENDENCE_FILE,
    RESULT_FILE,
    RUN_FILE,
    AnyRun,
    EvaluationRun,
    Experiments,
    RowKey,
    RunVideo,
    RunVideos,
    VideoCandidates,
    independence_grid,
    is_folder,
    read_runs,
)
from sosampler.report.page import Gallery, Part, Strip, strip_of, write_page
from sosampler.samplers.registry import samplers_in_words

if TYPE_CHECKING:
    from sosampler.bank.bank import Bank

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_ORACLES = ("semi-optimal", "optimal")
_MAX_BASELINES, _MAX_LINES = 2, 4  # in a strip
_SAME_TIME = 1e-3  # seconds; times in a run's file are rounded
_MAX_FAILURES = 20  # that are listed
_NOT_THERE, _UNNAMED = "it is not there", "the run does not name the bank"

Shown = Sequence[tuple[str, VideoCandidates]]
"""Names and candidates of the videos whose frames are shown."""


def write_run_report(
    runs: Paths,
    out: str | os.PathLike[str],
    *,
    title: str | None = None,
    intro: str = "",
    videos: int = 12,
    bank: str | os.PathLike[str] | None = None,
    headline: Pair | None = None,
    experiments: Callable[[Experiments], Part] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write one self-contained HTML file: the comparison, tables, curves, and videos with the chosen frames.

    Args:
        runs: folders of `Evaluation.write_run`, of the demonstration, of `reproduce` or of `independence`, or files of
            `Evaluation.write_json`, of which no single videos are known.
        videos: shown of each run, at most: a third where the sampler is right and uniform wrong, a third the other way
            round, and the first ones of the rest.
        bank: with the frames, if it was moved; it must be that of at least one of the runs.
        headline: N and T of the comparison and of the videos; None: the middle one of those that a learned sampler has.
        experiments: makes the part of experiments of `reproduce`: `sosampler.paper.page.experiments_part`.
        say: called with a line of text for everything that could not be shown.
    """
    check_int("videos", videos, at_least=0)
    paths = [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    if not paths:
        raise InvalidArgument("no run is given; give the folder of at least one")
    given = None if bank is None else Path(bank)
    if given is not None and not is_folder(given):
        raise InvalidArgument(f"--bank {given}: it is not there; give the bank that was evaluated, or leave it out")
    distinct: dict[Path, Path] = {}
    for path in map(Path, paths):
        distinct.setdefault(_real(path), path)
    loaded = [run for path in distinct.values() for run in read_runs(path)]
    _check_out(Path(out), loaded)
    names = names_of([run.path for run in loaded])
    misfits: list[str | None] = []  # of the given bank, run by run
    parts = []
    for run, name in zip(loaded, names, strict=True):
        if isinstance(run, EvaluationRun):
            part, misfit = _evaluation_part(run, name, videos, given, headline)
            parts.append(part)
            if given is not None and run.videos is not None:
                misfits.append(misfit)
        elif isinstance(run, Experiments):
            if experiments is None:
                raise InvalidArgument(f"{run.path}: is of `sosampler reproduce`; make its page with `sosampler report`")
            parts.append(experiments(run))
        else:
            grid = independence_grid(run.path)
            assert grid is not None  # it is what made this a run
            parts.append(Part(title=name, summary=" ".join(grid.above), grids=[grid], facts={"run": str(run.path)}))
    titles = [part.title for part in parts]
    parts = [  # reproductions are named by bank and classifier, which may be those of others
        part if titles.count(part.title) == 1 or part.title == name else replace(part, title=f"{part.title} ({name})")
        for part, name in zip(parts, names, strict=True)
    ]
    if misfits and None not in misfits:
        raise InvalidArgument(f"--bank {given}: {misfits[0]}; give the bank that was evaluated, or leave it out")
    for run, part in zip(loaded, parts, strict=True):
        for note in part.notes[len(run.notes) if isinstance(run, EvaluationRun) else 0 :]:
            say(note)
    if title is None and all(isinstance(run, Experiments) for run in loaded):
        title = "sosampler: the paper's tables and figures"
    default = f"sosampler: {names[0]}" if len(loaded) == 1 else f"sosampler: {len(loaded)} runs"
    return write_page(out, title or default, parts, intro=intro)


def _real(path: Path) -> Path:
    """Return the resolved path, by which two paths of one file are recognised."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # too long, or circular links: reading it will raise
        return path


def _check_out(out: Path, runs: Sequence[AnyRun]) -> None:
    """Raise where the page would replace what it is made from."""
    names = (EVALUATION_FILE, VIDEOS_FILE, INDEPENDENCE_FILE, INDEPENDENCE_FIGURE, RESULT_FILE, RUN_FILE)
    for run in runs:
        folders = (*run.folders, *run.unfinished) if isinstance(run, Experiments) else (run.path,)
        files = [file for path in folders for file in ([path] if path.is_file() else [path / name for name in names])]
        if any(_real(out) == _real(path) for path in files):
            raise InvalidArgument(f"{out} is a file of the run {run.path}; give another name, for example report.html")


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path that differs from the others.

    >>> names_of([Path("/a/run"), Path("/b/run"), Path("/a/other")])
    ['a/run', 'b/run', 'other']
    """
    split = [Path(os.path.abspath(path)).parts for path in paths]
    names = []
    for parts in split:
        for length in range(1, len(parts) + 1):
            if sum(other[-length:] == parts[-length:] for other in split) == 1:
                break
        names.append(str(Path(*parts[-length:])))
    return names


# ---- an evaluation


def _evaluation_part(
    run: EvaluationRun, name: str, count: int, given: Path | None, headline: Pair | None
) -> tuple[Part, str | None]:
    """Return the part of a run, and what is wrong with the given bank."""
    notes = [*run.notes, *run.missing]
    grid = independence_grid(run.folder) if run.path.is_dir() else None
    compared = sentence_of(run.rows, run.metric, run.facts, headline)
    part = Part(
        title=name,
        summary=" ".join(filter(None, [compared, samplers_in_words(run.facts.get("samplers"))])),
        rows=run.rows,
        metric=run.metric,
        headline=headline,
        figures=report_figures(run.rows, run.metric),
        grids=[] if grid is None else [grid],
        notes=notes,
        facts={"run": str(run.path), **run.facts},
    )
    videos = run.videos
    if videos is None:
        return part, None
    contrast = contrast_of(run.rows, run.metric, videos, headline)
    keys = shown_keys(run.rows, run.metric, videos, headline)
    chosen = choose_videos(videos, contrast, count)
    shown = [videos.videos[number] for numbers in chosen.values() for number in numbers]
    bank, misfit = _open_bank(run, [(video.id, video.candidates[keys[0][2]]) for video in shown], given, notes)
    must_read = given is not None and misfit is None
    strips = _strips(videos, shown, keys, bank, notes, must_read=must_read)
    titles = {"success": "Where the sampler helps", "failure": "Where it does harm", "first": "The first videos"}
    compared_cases = all_cases(videos, contrast)
    galleries = []
    for kind, numbers in chosen.items():
        note = _criterion(kind, contrast, len(numbers), len(compared_cases.get(kind, videos.videos)))
        if numbers or (kind != "first" and count):
            galleries.append(Gallery(titles[kind], note, tuple(strips[videos.videos[number].id] for number in numbers)))
    part = replace(part, galleries=galleries)
    if contrast is None:
        notes.append("No learned sampler stands beside uniform with the same N of T, so they are not compared.")
        return part, misfit
    classes, lines = class_differences(videos, contrast), video_lines(videos, contrast)
    return replace(part, contrast=contrast, classes=classes, videos=lines), misfit


def _strips(
    videos: RunVideos,
    shown: Sequence[RunVideo],
    keys: Sequence[RowKey],
    bank: Bank | None,
    notes: list[str],
    *,
    must_read: bool,
) -> dict[str, Strip]:
    """Return strips by video; without frames where these cannot be read, unless they must be."""
    strips, damage = {}, {}
    for video in shown:
        try:
            strips[video.id] = strip_of(videos, video, keys, bank)
        except SosamplerError as error:
            if must_read:
                raise
            strips[video.id], damage[video.id] = strip_of(videos, video, keys, None), first_line(error)
    if damage:
        name, why = next(iter(damage.items()))
        more = f", and of {len(damage) - 1} more" if len(damage) > 1 else ""
        notes.append(f"No frames are shown of {name}{more}, because they cannot be read: {why}.")
    return strips


def _criterion(kind: str, contrast: Contrast | None, shown: int, total: int) -> str:
    """Return which videos a gallery shows, and how many of all that meet the criterion."""
    if contrast is None or kind == "first":
        which = "the first ones" if contrast is None else "the first ones that are not shown above"
        return f"{shown} of {total} videos: {which}, as they come."
    sampler = contrast.sampler[0]
    better, worse = (sampler, "uniform") if kind == "success" else ("uniform", sampler)
    criterion = (
        f"Videos that {better} gets right and {worse} wrong, those first in which {better} leads by most in the "
        "classifier's confidence in the label."
    )
    return f"{criterion} Shown: {shown} of {total}." if total else f"{criterion} There is none."


def all_cases(videos: RunVideos, contrast: Contrast | None) -> dict[str, list[int]]:
    """Return indices of all videos that are a success or a failure, the clearest first."""
    if contrast is None:
        return {}
    both = videos.predictions(contrast.sampler), videos.predictions(contrast.uniform)
    return {kind: cases(*both, success=kind == "success") for kind in ("success", "failure")}


def choose_videos(videos: RunVideos, contrast: Contrast | None, count: int) -> dict[str, list[int]]:
    """Return indices of the videos in each gallery, at most `count` in all and none twice."""
    chosen = {kind: numbers[: -(-count // 3)] for kind, numbers in all_cases(videos, contrast).items()}
    if chosen:
        chosen["failure"] = chosen["failure"][: count - len(chosen["success"])]
    taken = {number for numbers in chosen.values() for number in numbers}
    rest = [number for number in range(len(videos.videos)) if number not in taken]
    return chosen | {"first": rest[: count - len(taken)]}


def shown_keys(rows: Sequence[Row], metric: str, videos: RunVideos, headline: Pair | None) -> list[RowKey]:
    """Return the rows of a strip: uniform, the best sampler, baselines and the oracles, with the headline's N of T.

    Where no policy has these, the first rows of one T.
    """
    compared = headline_of(rows, metric, headline)
    if compared is not None:
        sampler = [] if compared.sampler is None else [compared.sampler["policy"]]
        baselines = [key for key in videos.keys if key[1] is None and key[2] == compared.pair[1]]
        keys: list[RowKey] = [(policy, *compared.pair) for policy in ("uniform", *sampler)]
        keys += [*baselines[:_MAX_BASELINES], *((policy, *compared.pair) for policy in _ORACLES)]
        known = [key for key in keys if key in videos.keys]
        if known:
            return known
    return [key for key in videos.keys if key[2] == videos.keys[0][2]][:_MAX_LINES]


# ---- the bank with the frames


def _open_bank(
    run: EvaluationRun, shown: Shown, given: Path | None, notes: list[str]
) -> tuple[Bank | None, str | None]:
    """Return the split that was evaluated, and what is wrong with the given bank, which is tried first.

    None where neither it nor the run's own is the bank that was evaluated: never another one's frames.
    """
    stored = run.facts.get("bank")
    misfit = problem = None
    for path in [*([] if given is None else [given]), *_possible_paths(stored, run.folder)]:
        opened = _opened(path, run, shown, notes)
        if not isinstance(opened, str):
            return opened, misfit
        if path is given:
            misfit = opened
        else:
            problem = opened if problem in (None, _NOT_THERE) else problem
    why = f"they would be in the bank {stored}, but {problem or _NOT_THERE}" if stored else _UNNAMED
    if shown:
        notes.append(f"No frames are shown: {why}. Give it with --bank.")
    return None, misfit


def _possible_paths(stored: Any, folder: Path) -> list[Path]:
    """Return where a run's bank may be; it may have been moved together with the run, as by `sosampler demo`."""
    if not isinstance(stored, str) or not stored:
        return []
    path = Path(stored)
    beside = [folder / path.name, folder.parent / path.name]
    if path.is_absolute():
        return [path, *beside]
    # A relative path depends on where the evaluation was started; beside the run it is most likely meant.
    return list(dict.fromkeys([folder / path, folder.parent / path, *beside, path]))


def _opened(path: Path, run: EvaluationRun, shown: Shown, notes: list[str]) -> Bank | str:
    """Return the split, or what is wrong with it; notes what it lacks."""
    from sosampler.bank.bank import Bank

    if not is_folder(path):
        return _NOT_THERE
    split = run.facts.get("split")
    try:
        all_splits = Bank(path, partial=True)
        bank = all_splits.split(split) if isinstance(split, str) else all_splits
        problem = _difference(bank, run, shown)
    except (SosamplerError, UnicodeEncodeError) as error:  # shards cannot be opened where a path is no text
        return first_line(error)
    if problem:
        return problem
    failures = [f"{failure['id']}: {failure['error']}" for failure in bank.failures]
    if failures:
        more = [f"and {len(failures) - _MAX_FAILURES} more"] if len(failures) > _MAX_FAILURES else []
        listed = "; ".join([*failures[:_MAX_FAILURES], *more])
        notes.append(f"Not in the bank, because they could not be read: {listed}.")
    return bank


def _difference(bank: Bank, run: EvaluationRun, shown: Shown) -> str | None:
    """Return how a bank differs from the one that was evaluated."""
    assert run.videos is not None
    ids = bank.ids
    if {video.id for video in run.videos.videos} - set(ids):
        return "it holds other videos"
    if bank.classes != run.videos.classes:
        return "it has other classes"
    teacher = run.facts.get("teacher")
    wanted = teacher.get("fingerprint") if isinstance(teacher, dict) else None
    if wanted is not None and wanted not in [about["fingerprint"] for about in bank.teachers.values()]:
        return "it lacks the outputs of the classifier"
    if not all(_same_frames(bank, ids.index(name), candidates) for name, candidates in shown):
        return "it has other frames"
    return None


def _same_frames(bank: Bank, index: int, candidates: VideoCandidates) -> bool:
    """Return whether the stored frames have the times of the run; true of what cannot be read."""
    try:
        video = bank[index]
    except SosamplerError:
        return True
    if max(candidates.slots) >= len(video):
        return False
    times = video.pts_seconds[list(candidates.slots)]
    return bool(np.abs(times - np.array(candidates.seconds)).max() <= _SAME_TIME)
