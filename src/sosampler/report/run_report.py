"""`write_run_report`: runs on disk as one page."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sosampler.checks import whole_number
from sosampler.errors import InvalidArgument, SosamplerError, first_line
from sosampler.report.comparing import (
    FAILURE_RULE,
    SUCCESS_RULE,
    Contrast,
    cases,
    class_differences,
    contrast_of,
    video_lines,
)
from sosampler.report.curves import Row, report_figures
from sosampler.report.finding import Pair, headline_of, sentence_of
from sosampler.report.grids import independence_grid
from sosampler.report.page import Part, write_page
from sosampler.report.run_videos import RowKey, RunVideos
from sosampler.report.runs import AnyRun, EvaluationRun, Experiments, read_runs
from sosampler.report.strips import Gallery, strip_of

if TYPE_CHECKING:
    from sosampler.data.bank import Bank

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_ORACLES = ("semi-optimal", "optimal")
_MOST_FAILURES = 20  # of a bank, that are named
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
        bank: where the pictures are, if not where the run says.
        headline: N and T of the finding and of the videos; None: the middle one of those that a learned sampler has.
        say: told what could not be shown.
    """
    whole_number("videos", videos, at_least=0)
    paths = [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    if not paths:
        raise InvalidArgument("no run is given; give the folder of at least one")
    found = [run for path in dict.fromkeys(map(Path, paths)) for run in read_runs(path)]
    parts = [_part(run, videos, None if bank is None else Path(bank), headline, say) for run in found]
    return write_page(out, title or _title(found), parts, intro=intro)


def _title(runs: Sequence[AnyRun]) -> str:
    if all(isinstance(run, Experiments) for run in runs):
        return "sosampler: the paper's tables and figures"
    return f"sosampler: {_name(runs[0].path)}" if len(runs) == 1 else f"sosampler: {len(runs)} runs"


def _name(path: Path) -> str:
    """Of a folder or file, also of "."."""
    return path.name or path.absolute().name


def _part(run: AnyRun, count: int, bank: Path | None, headline: Pair | None, say: Callable[[str], None]) -> Part:
    if isinstance(run, EvaluationRun):
        return _evaluation_part(run, count, bank, headline, say)
    if isinstance(run, Experiments):
        from sosampler.report.reproduction import experiments_part

        return experiments_part(run)
    grid = independence_grid(run.path)
    assert grid is not None  # it is what made this a run
    return Part(title=_name(run.path), summary=" ".join(grid.above), grids=[grid])


# ---- an evaluation


def _evaluation_part(
    run: EvaluationRun, count: int, bank: Path | None, headline: Pair | None, say: Callable[[str], None]
) -> Part:
    notes = list(run.notes)
    grid = independence_grid(run.folder) if run.path.is_dir() else None
    known: dict[str, Any] = {}
    if run.videos is not None:
        known = _about_videos(run, run.videos, count, bank, headline, notes)
    for note in notes[len(run.notes) :]:
        say(note)
    return Part(
        title=_name(run.path),
        summary=sentence_of(run.rows, run.metric, run.facts, headline),
        rows=run.rows,
        metric=run.metric,
        headline=headline,
        figures=report_figures(run.rows, run.metric),
        grids=[] if grid is None else [grid],
        notes=notes,
        facts=run.facts,
        **known,
    )


def _about_videos(
    run: EvaluationRun, videos: RunVideos, count: int, bank: Path | None, headline: Pair | None, notes: list[str]
) -> dict[str, Any]:
    """Galleries, classes and the list of videos; adds to the notes what is missing."""
    pictures = _open_bank(run, bank, notes)
    contrast = contrast_of(run.rows, run.metric, videos, headline)
    keys = shown_keys(run.rows, run.metric, videos, headline)
    chosen = choose_videos(videos, contrast, count)
    titles = {"success": "Where the sampler helps", "failure": "Where it does harm", "first": "The first videos"}
    galleries = []
    for kind, numbers in chosen.items():
        strips = tuple(strip_of(videos, videos.videos[number], keys, pictures) for number in numbers)
        note = _rule(kind, contrast, len(numbers), len(videos.videos))
        if strips or (kind != "first" and count):
            galleries.append(Gallery(titles[kind], note, strips))
    if contrast is None:
        notes.append("No learned sampler stands beside uniform with the same N of T, so they are not compared.")
        return {"galleries": galleries}
    return {
        "galleries": galleries,
        "contrast": contrast,
        "classes": class_differences(videos, contrast),
        "videos": video_lines(videos, contrast),
    }


def _rule(kind: str, contrast: Contrast | None, shown: int, total: int) -> str:
    if contrast is None or kind == "first":
        which = "the first ones" if contrast is None else "the first ones that are not shown above"
        return f"{shown} of {total} videos: {which}, as they come."
    rule = (SUCCESS_RULE if kind == "success" else FAILURE_RULE).format(sampler=contrast.sampler[0])
    return rule if shown else f"{rule} There is none."


def choose_videos(videos: RunVideos, contrast: Contrast | None, count: int) -> dict[str, list[int]]:
    """Numbers of the videos in each gallery, at most `count` in all and none twice."""
    found: dict[str, list[int]] = {}
    if contrast is not None:
        both = videos.said(contrast.sampler), videos.said(contrast.uniform)
        found = {kind: cases(*both, success=kind == "success")[: -(-count // 3)] for kind in ("success", "failure")}
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


def _open_bank(run: EvaluationRun, given: Path | None, notes: list[str]) -> Bank | None:
    """The split that was evaluated; None, with a note, where it is not at hand or is of other videos."""
    from sosampler.data.bank import Bank

    assert run.videos is not None
    told, split = str(run.facts.get("bank", "")), run.facts.get("split")
    # A run that was moved together with its bank, as a folder of the demonstration.
    places = [given] if given is not None else [Path(told), run.folder / Path(told).name] if told else []
    problem = "it is not there"
    for place in places:
        if not place.is_dir():
            continue
        try:
            whole = Bank(place, partial=True)
            bank = whole.split(split) if isinstance(split, str) else whole
        except SosamplerError as error:
            problem = first_line(error)
            continue
        missing = {video.id for video in run.videos.videos} - set(bank.ids)
        if not missing and bank.classes == run.videos.classes:
            notes.extend(_failures(whole))
            return bank
        problem = "it holds other videos" if missing else "its classes are others"
    if given is not None:
        raise InvalidArgument(f"--bank {given}: {problem}; give the bank that was evaluated, or leave it out")
    notes.append(f"No pictures are shown: they would be in the bank {told}, but {problem}. Give it with --bank.")
    return None


def _failures(bank: Bank) -> list[str]:
    """Videos that could not be read when the bank was made."""
    failures = bank.failures
    named = [f"{one['id']}: {one['error']}" for one in failures[:_MOST_FAILURES]]
    more = [f"and {len(failures) - len(named)} more"] if len(failures) > len(named) else []
    return [f"Not in the bank, because they could not be read: {'; '.join([*named, *more])}."] if failures else []
