"""`write_run_report`: runs on disk as one page."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sosampler._util.validation import whole_number
from sosampler.errors import InvalidArgument, SosamplerError, first_line
from sosampler.evaluation.result import EVALUATION_FILE, VIDEOS_FILE
from sosampler.figures.curves import Row, report_figures
from sosampler.report.compare import (
    FAILURE_RULE,
    SUCCESS_RULE,
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
    INDEPENDENCE_FILE,
    INDEPENDENCE_PICTURE,
    RESULT_FILE,
    RUN_FILE,
    AnyRun,
    EvaluationRun,
    Experiments,
    RowKey,
    RunVideo,
    RunVideos,
    independence_grid,
    is_folder,
    read_runs,
)
from sosampler.report.page import Part, write_page
from sosampler.report.strips import Gallery, OpenedBank, Strip, open_bank, strip_of

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_ORACLES = ("semi-optimal", "optimal")
_MOST_SYSTEMS, _MOST_LINES = 2, 4  # in a strip


def write_run_report(
    runs: Paths,
    out: str | os.PathLike[str],
    *,
    title: str | None = None,
    intro: str = "",
    videos: int = 12,
    bank: str | os.PathLike[str] | None = None,
    headline: Pair | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write one HTML file that opens anywhere: the finding, tables, curves, and videos with the chosen frames.

    Args:
        runs: folders of `Evaluation.write_run`, of the demonstration, of `reproduce` or of `independence`, or files of
            `Evaluation.write_json`, of which no single videos are known.
        out: the file.
        title: of the page.
        intro: a paragraph below it.
        videos: shown of each run, at most: a third where the sampler is right and uniform wrong, a third the other way
            round, and the first ones of the rest.
        bank: where the pictures are, if not where the runs say; it must be that of at least one of them.
        headline: N and T of the finding and of the videos; None: the middle one of those that a learned sampler has.
        say: told what could not be shown.
    """
    whole_number("videos", videos, at_least=0)
    paths = [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    if not paths:
        raise InvalidArgument("no run is given; give the folder of at least one")
    given = None if bank is None else Path(bank)
    if given is not None and not is_folder(given):
        raise InvalidArgument(f"--bank {given}: it is not there; give the bank that was evaluated, or leave it out")
    distinct: dict[Path, Path] = {}
    for path in map(Path, paths):
        distinct.setdefault(_real(path), path)
    found = [run for path in distinct.values() for run in read_runs(path)]
    _check_out(Path(out), found)
    names = names_of([run.path for run in found])
    misfits: list[str | None] = []  # of the given bank, run by run
    parts = [_part(run, name, videos, given, headline, misfits) for run, name in zip(found, names, strict=True)]
    parts = _told_apart(parts, names)
    if misfits and None not in misfits:
        raise InvalidArgument(f"--bank {given}: {misfits[0]}; give the bank that was evaluated, or leave it out")
    for run, part in zip(found, parts, strict=True):
        for note in part.notes[len(run.notes) if isinstance(run, EvaluationRun) else 0 :]:
            say(note)
    return write_page(out, title or _title(found, names), parts, intro=intro)


def _real(path: Path) -> Path:
    """By which two ways to one place are known."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # too long, or links in a circle: reading it will tell
        return path


def _check_out(out: Path, runs: Sequence[AnyRun]) -> None:
    """A page must not take the place of what it was made from."""
    for run in runs:
        folders = (*run.folders, *run.unfinished) if isinstance(run, Experiments) else (run.path,)
        files = [path for folder in folders for path in ([folder] if folder.is_file() else _files_of(folder))]
        if any(_real(out) == _real(path) for path in files):
            raise InvalidArgument(f"{out} is a file of the run {run.path}; give another name, for example report.html")


def _files_of(folder: Path) -> list[Path]:
    names = (EVALUATION_FILE, VIDEOS_FILE, INDEPENDENCE_FILE, INDEPENDENCE_PICTURE, RESULT_FILE, RUN_FILE)
    return [folder / name for name in names]


def _title(runs: Sequence[AnyRun], names: Sequence[str]) -> str:
    if all(isinstance(run, Experiments) for run in runs):
        return "sosampler: the paper's tables and figures"
    return f"sosampler: {names[0]}" if len(runs) == 1 else f"sosampler: {len(runs)} runs"


def names_of(paths: Sequence[Path]) -> list[str]:
    """The end of each path, as much of it as tells it from the others.

    >>> names_of([Path("/a/run"), Path("/b/run"), Path("/a/other")])
    ['a/run', 'b/run', 'other']
    """
    ways = [Path(os.path.abspath(path)).parts for path in paths]
    names = []
    for way in ways:
        for length in range(1, len(way) + 1):
            if sum(other[-length:] == way[-length:] for other in ways) == 1:
                break
        names.append(str(Path(*way[-length:])))
    return names


def _told_apart(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """Reproductions are called by bank and classifier, which may be those of others."""
    titles = [part.title for part in parts]
    return [
        part if titles.count(part.title) == 1 or part.title == name else replace(part, title=f"{part.title} ({name})")
        for part, name in zip(parts, names, strict=True)
    ]


def _part(
    run: AnyRun, name: str, count: int, given: Path | None, headline: Pair | None, misfits: list[str | None]
) -> Part:
    if isinstance(run, EvaluationRun):
        return _evaluation_part(run, name, count, given, headline, misfits)
    if isinstance(run, Experiments):
        from sosampler.paper.page import experiments_part

        return experiments_part(run)
    grid = independence_grid(run.path)
    assert grid is not None  # it is what made this a run
    return Part(title=name, summary=" ".join(grid.above), grids=[grid], facts={"run": str(run.path)})


# ---- an evaluation


def _evaluation_part(
    run: EvaluationRun, name: str, count: int, given: Path | None, headline: Pair | None, misfits: list[str | None]
) -> Part:
    notes = [*run.notes, *run.missing]
    grid = independence_grid(run.folder) if run.path.is_dir() else None
    known: dict[str, Any] = {}
    if run.videos is not None:
        known, misfit = _about_videos(run, run.videos, count, given, headline, notes)
        if given is not None:
            misfits.append(misfit)
    return Part(
        title=name,
        summary=sentence_of(run.rows, run.metric, run.facts, headline),
        rows=run.rows,
        metric=run.metric,
        headline=headline,
        figures=report_figures(run.rows, run.metric),
        grids=[] if grid is None else [grid],
        notes=notes,
        facts={"run": str(run.path), **run.facts},
        **known,
    )


def _about_videos(
    run: EvaluationRun, videos: RunVideos, count: int, given: Path | None, headline: Pair | None, notes: list[str]
) -> tuple[dict[str, Any], str | None]:
    """Galleries, classes and the list of videos; and what is wrong with the given bank.

    Adds to the notes what is missing.
    """
    contrast = contrast_of(run.rows, run.metric, videos, headline)
    keys = shown_keys(run.rows, run.metric, videos, headline)
    found = all_cases(videos, contrast)
    chosen = choose_videos(videos, contrast, count)
    shown = [videos.videos[number] for numbers in chosen.values() for number in numbers]
    opened = open_bank(run, [(video.id, video.offered[keys[0][2]]) for video in shown], given)
    notes.extend(opened.notes)
    strips = _strips(videos, shown, keys, opened, notes)
    titles = {"success": "Where the sampler helps", "failure": "Where it does harm", "first": "The first videos"}
    galleries = []
    for kind, numbers in chosen.items():
        note = _rule(kind, contrast, len(numbers), len(found.get(kind, videos.videos)))
        if numbers or (kind != "first" and count):
            galleries.append(Gallery(titles[kind], note, tuple(strips[videos.videos[one].id] for one in numbers)))
    if contrast is None:
        notes.append("No learned sampler stands beside uniform with the same N of T, so they are not compared.")
        return {"galleries": galleries}, opened.misfit
    compared = {
        "contrast": contrast,
        "classes": class_differences(videos, contrast),
        "videos": video_lines(videos, contrast),
    }
    return {"galleries": galleries, **compared}, opened.misfit


def _strips(
    videos: RunVideos, shown: Sequence[RunVideo], keys: Sequence[RowKey], opened: OpenedBank, notes: list[str]
) -> dict[str, Strip]:
    """By the video's name; without pictures where these cannot be read, unless somebody asks for this very bank."""
    strips, damage = {}, {}
    for video in shown:
        try:
            strips[video.id] = strip_of(videos, video, keys, opened.bank)
        except SosamplerError as error:
            if opened.is_given:
                raise
            strips[video.id], damage[video.id] = strip_of(videos, video, keys, None), first_line(error)
    if damage:
        name, why = next(iter(damage.items()))
        more = f", and of {len(damage) - 1} more" if len(damage) > 1 else ""
        notes.append(f"No pictures are shown of {name}{more}, because they cannot be read: {why}.")
    return strips


def _rule(kind: str, contrast: Contrast | None, shown: int, total: int) -> str:
    """`total`: of the videos that the rule is true of."""
    if contrast is None or kind == "first":
        which = "the first ones" if contrast is None else "the first ones that are not shown above"
        return f"{shown} of {total} videos: {which}, as they come."
    rule = (SUCCESS_RULE if kind == "success" else FAILURE_RULE).format(sampler=contrast.sampler[0])
    return f"{rule} Shown: {shown} of {total}." if total else f"{rule} There is none."


def all_cases(videos: RunVideos, contrast: Contrast | None) -> dict[str, list[int]]:
    """Numbers of all videos that are a success or a failure, the clearest first."""
    if contrast is None:
        return {}
    both = videos.said(contrast.sampler), videos.said(contrast.uniform)
    return {kind: cases(*both, success=kind == "success") for kind in ("success", "failure")}


def choose_videos(videos: RunVideos, contrast: Contrast | None, count: int) -> dict[str, list[int]]:
    """Numbers of the videos in each gallery, at most `count` in all and none twice."""
    found = {kind: numbers[: -(-count // 3)] for kind, numbers in all_cases(videos, contrast).items()}
    if found:
        found["failure"] = found["failure"][: count - len(found["success"])]
    taken = {number for numbers in found.values() for number in numbers}
    rest = [number for number in range(len(videos.videos)) if number not in taken]
    return found | {"first": rest[: count - len(taken)]}


def shown_keys(rows: Sequence[Row], metric: str, videos: RunVideos, headline: Pair | None) -> list[RowKey]:
    """Whose choices a strip shows: uniform, the best sampler, systems and the oracles, with the headline's N of T.

    Where nobody has these, the first rows of one T.
    """
    found = headline_of(rows, metric, headline)
    if found is not None:
        sampler = [] if found.sampler is None else [found.sampler["policy"]]
        systems = [key for key in videos.keys if key[1] is None and key[2] == found.pair[1]]
        keys: list[RowKey] = [(policy, *found.pair) for policy in ("uniform", *sampler)]
        keys += [*systems[:_MOST_SYSTEMS], *((policy, *found.pair) for policy in _ORACLES)]
        known = [key for key in keys if key in videos.keys]
        if known:
            return known
    return [key for key in videos.keys if key[2] == videos.keys[0][2]][:_MOST_LINES]
