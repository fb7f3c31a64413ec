"""The work behind `sosampler select`: one video or thousands, side by side, in bounded memory."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from sosampler._util.progress import progress_bar
from sosampler._util.validation import one_of, whole_number
from sosampler.errors import InvalidArgument
from sosampler.inference.images import IMAGE_FORMATS, MAX_ROWS, SheetRow, save_frames, write_rows
from sosampler.inference.options import SelectOptions
from sosampler.inference.rows import Journal, check_out, write_results
from sosampler.inference.select import select_with
from sosampler.inference.selection import Selection
from sosampler.inference.steps import Failed, select_video
from sosampler.video.discover import labels, listed_videos


@dataclass(frozen=True)
class Outputs:
    """Where results go besides the screen."""

    json: bool = False
    out: Path | None = None
    frames_folder: Path | None = None
    image_format: str = "jpg"
    sheet: Path | None = None


@dataclass(frozen=True)
class Done:
    """What remains of a video when its pixels are gone."""

    video: str
    selection: Selection | None = None
    error: str | None = None
    row: SheetRow | None = None


@dataclass(frozen=True)
class Job:
    """What to do with each video."""

    options: SelectOptions
    outputs: Outputs

    def check(self) -> None:
        """Find out before the first video what would fail at every one."""
        one_of("--image-format", self.outputs.image_format, IMAGE_FORMATS)
        wants_pixels = self.outputs.frames_folder or self.outputs.sheet
        if wants_pixels and not self.options.decode:
            raise InvalidArgument(
                "--no-decode gives no pixels for --save-frames or --contact-sheet; leave one of them out"
            )
        if self.outputs.out is not None:
            check_out(self.outputs.out)

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a journal to be continued."""
        folder = self.outputs.frames_folder
        pictures = {"frames_folder": folder and str(folder), "image_format": self.outputs.image_format}
        return {**self.options.identity(), **pictures}

    def __call__(self, video: Path, folder: Path | None) -> Selection:
        selection = select_with(video, self.options)
        self.save(selection, folder)
        return selection

    def save(self, selection: Selection, folder: Path | None) -> None:
        if folder is not None:
            save_frames(selection, folder, image_format=self.outputs.image_format)


def run(paths: Sequence[str], job: Job, *, workers: int | None) -> int:
    """Select from all videos; returns the exit code: 0, 1 if some of many failed. A single failure is raised."""
    job.check()
    if workers is not None:
        whole_number("--workers", workers)
    videos = listed_videos(paths, leave_out=job.outputs.frames_folder)
    if len(videos) == 1:
        return _run_one(videos[0], job)
    # One decoding thread a video and many videos at a time keeps every core busy and wastes nothing at seeks.
    job = replace(job, options=replace(job.options, threads=job.options.threads or 1))
    return _run_many(videos, job, workers or min(os.cpu_count() or 1, 32))


def _run_one(video: Path, job: Job) -> int:
    selection = job(video, job.outputs.frames_folder)
    outputs = job.outputs
    if outputs.sheet is not None:
        write_rows([SheetRow.of(selection)], outputs.sheet)
    if outputs.out is not None:
        write_results(outputs.out, [selection.to_dict()], [])
    typer.echo(json.dumps(selection.to_dict()) if outputs.json else _describe(selection))
    return 0


def _run_many(videos: list[Path], job: Job, workers: int) -> int:
    outputs = job.outputs
    if outputs.sheet is not None and len(videos) > MAX_ROWS:
        raise InvalidArgument(
            f"a contact sheet holds {MAX_ROWS} videos at most, not {len(videos)}; use --save-frames instead"
        )
    journal = Journal(outputs.out, job.fingerprint()) if outputs.out is not None else None
    failures: list[dict[str, str]] = []
    printed: list[dict[str, Any]] = []
    rows: list[SheetRow] = []
    todo = [
        (video, label)
        for video, label in zip(videos, labels(videos), strict=True)
        # A contact sheet needs the pixels of all, so nothing is left out for it.
        if not journal or outputs.sheet is not None or str(video) not in journal.done
    ]
    if len(todo) < len(videos):
        typer.echo(f"continuing: {len(videos) - len(todo)} of {len(videos)} videos are done", err=True)
    try:
        for done in _progress(_work(todo, job, workers), len(todo)):
            if done.selection is None:
                failures.append({"video": done.video, "error": done.error or ""})
                continue
            if done.row is not None:
                rows.append(done.row)
            if journal:
                journal.add(done.selection.to_dict())
            elif outputs.json:
                printed.append(done.selection.to_dict())
            else:
                typer.echo(_describe(done.selection))
    finally:
        if journal:
            journal.close()
    if journal:
        journal.finish(failures, [str(video) for video in videos])
    if outputs.sheet is not None and rows:
        write_rows(rows, outputs.sheet)
    _report(videos, failures, printed, journal, outputs)
    return 1 if failures else 0


def _report(
    videos: list[Path],
    failures: list[dict[str, str]],
    printed: list[dict[str, Any]],
    journal: Journal | None,
    outputs: Outputs,
) -> None:
    if outputs.json:
        summary: dict[str, Any] = {"num_videos": len(videos), "num_failed": len(failures)}
        # With --out the rows are in the file; printing them again would need memory for all.
        summary |= {"out": str(outputs.out), "num_written": journal.num_rows} if journal else {"selections": printed}
        typer.echo(json.dumps({**summary, "failures": failures}))
    elif journal:
        typer.echo(f"{journal.num_rows} selections written to {outputs.out}")
    for failure in failures:
        typer.echo(f"failed: {failure['error']}", err=True)
    if failures:
        rest = "; the rest are done" if len(failures) < len(videos) else ""
        typer.echo(f"{len(failures)} of {len(videos)} videos failed{rest}", err=True)


def _work(todo: list[tuple[Path, str]], job: Job, workers: int) -> Iterator[Done]:
    """Results in the order of the videos; at most two a worker are under way, so memory does not grow."""

    def one(video: Path, label: str) -> Done:
        folder = job.outputs.frames_folder
        saved_to = folder / label if folder else None
        found = select_video(str(video), job.options, lambda selection: job.save(selection, saved_to))
        if isinstance(found, Failed):
            return Done(str(video), error=found.error)
        row = SheetRow.of(found) if job.outputs.sheet is not None else None
        return Done(str(video), selection=replace(found, frames=None), row=row)

    pending: deque[Future[Done]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="sosampler-select") as pool:
        try:
            for video, label in todo:
                pending.append(pool.submit(one, video, label))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _progress(results: Iterator[Done], total: int) -> Iterator[Done]:
    """A bar on standard error, if somebody looks at it."""
    with progress_bar("selecting", total) as bar:
        for result in results:
            yield result
            bar.advance()


def _describe(selection: Selection) -> str:
    lines = [
        f"{selection.video}: {len(selection)} of {selection.num_candidates} {selection.candidates.mode} candidates "
        f"({selection.policy}{_asked(selection)}), {selection.metadata.total_num_frames} frames, "
        f"{selection.metadata.duration:.2f} s"
    ]
    scores = selection.scores if selection.scores is not None else [None] * len(selection)
    for index, seconds, score in zip(selection.frame_indices, selection.pts_seconds, scores, strict=True):
        lines.append(f"  frame {index:>7}  {seconds:>10.3f} s" + (f"  score {score:.4f}" if score is not None else ""))
    lines += [f"  note: {note}" for note in selection.notes]
    return "\n".join(lines)


def _asked(selection: Selection) -> str:
    told = selection.asked
    return "" if told is None else f", auto of {told['min']} to {told['max']}"
