"""The bank that has the pictures of a run's videos; none is better than another one's pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sosampler.errors import SosamplerError, first_line
from sosampler.report.run_videos import Offered
from sosampler.report.runs import EvaluationRun, is_folder

if TYPE_CHECKING:
    from sosampler.data.bank import Bank

_SAME_TIME = 1e-3  # seconds; what rounding in a run's file leaves
_MOST_FAILURES = 20  # that are named
_NOT_THERE = "it is not there"

Shown = Sequence[tuple[str, Offered]]
"""Names and candidates of the videos whose pictures are wanted."""


@dataclass(frozen=True, eq=False)
class OpenedBank:
    """The bank of a run, or why there is none."""

    bank: Bank | None  # the split that was evaluated
    notes: tuple[str, ...] = ()
    is_given: bool = False
    misfit: str | None = None  # what is wrong with the given one; None where it is used, or none was given


def open_bank(run: EvaluationRun, shown: Shown, given: Path | None) -> OpenedBank:
    """The given bank where it is the one that was evaluated, else the run's own; with notes where it has gaps.

    Args:
        run: with videos.
        shown: videos whose stored frames must be those of the run.
        given: is looked at before the places that the run names.
    """
    told = run.facts.get("bank")
    misfit = problem = None
    if given is not None:
        found = _opened(given, run, shown)
        if not isinstance(found, str):
            return OpenedBank(*found, is_given=True)
        misfit = found
    for place in _places(told, run.folder):
        found = _opened(place, run, shown)
        if not isinstance(found, str):
            return OpenedBank(*found, misfit=misfit)
        problem = found if problem in (None, _NOT_THERE) else problem
    why = "the run does not say in which bank they are"
    if told:
        why = f"they would be in the bank {told}, but {problem or _NOT_THERE}"
    notes = (f"No pictures are shown: {why}. Give it with --bank.",) if shown else ()
    return OpenedBank(None, notes, misfit=misfit)


def _places(told: Any, folder: Path) -> list[Path]:
    """Where a run's bank may be; it may have been moved together with the run, as in a folder of `sosampler demo`."""
    if not isinstance(told, str) or not told:
        return []
    path = Path(told)
    beside = [folder / path.name, folder.parent / path.name]
    if path.is_absolute():
        return [path, *beside]
    # What a relative path means depends on where the evaluation was started; beside the run it is most likely meant.
    return list(dict.fromkeys([folder / path, folder.parent / path, *beside, path]))


def _opened(place: Path, run: EvaluationRun, shown: Shown) -> tuple[Bank, tuple[str, ...]] | str:
    """The split and what it lacks, or what is wrong with it."""
    from sosampler.data.bank import Bank

    if not is_folder(place):
        return _NOT_THERE
    split = run.facts.get("split")
    try:
        whole = Bank(place, partial=True)
        bank = whole.split(split) if isinstance(split, str) else whole
        return _difference(bank, run, shown) or (bank, _failures(bank))
    except (SosamplerError, UnicodeEncodeError) as error:  # shards cannot be opened where a path is no text
        return first_line(error)


def _difference(bank: Bank, run: EvaluationRun, shown: Shown) -> str | None:
    """How a bank differs from the one that was evaluated."""
    assert run.videos is not None
    ids = bank.ids
    if {video.id for video in run.videos.videos} - set(ids):
        return "it holds other videos"
    if bank.classes != run.videos.classes:
        return "its classes are others"
    teacher = run.facts.get("teacher")
    wanted = teacher.get("fingerprint") if isinstance(teacher, dict) else None
    if wanted is not None and wanted not in [about["fingerprint"] for about in bank.teachers.values()]:
        return "it lacks the classifier that judged"
    if not all(_same_frames(bank, ids.index(name), offered) for name, offered in shown):
        return "its frames are others"
    return None


def _same_frames(bank: Bank, place: int, offered: Offered) -> bool:
    """Whether the stored frames have the times that the run tells; what cannot be read differs in nothing."""
    try:
        video = bank[place]
    except SosamplerError:
        return True
    if max(offered.slots) >= len(video):
        return False
    times = video.pts_seconds[list(offered.slots)]
    return bool(np.abs(times - np.array(offered.seconds)).max() <= _SAME_TIME)


def _failures(bank: Bank) -> tuple[str, ...]:
    """Videos that could not be read when the bank was made."""
    failures = bank.failures
    named = [f"{one['id']}: {one['error']}" for one in failures[:_MOST_FAILURES]]
    more = [f"and {len(failures) - len(named)} more"] if len(failures) > len(named) else []
    return (f"Not in the bank, because they could not be read: {'; '.join([*named, *more])}.",) if failures else ()
