"""Select from or classify many videos, and write a row for each: the work behind the commands and the Ray engine."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sosampler._util.files import remove_leftovers, replacing
from sosampler._util.hardware import usable_cores
from sosampler._util.limits import check_count
from sosampler._util.progress import OnProgress, Progress
from sosampler._util.text import escaped
from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.inference.decode import (
    MAX_WORKERS,
    PROCESSES_FROM,
    DecodeStep,
    FramePool,
    FrameTask,
    attempt,
    decoded_batches,
)
from sosampler.inference.options import SelectOptions
from sosampler.inference.rows import Row, check_out, open_rows
from sosampler.inference.select import select_with
from sosampler.inference.selection import Selection
from sosampler.policies.auto import Auto
from sosampler.policies.registry import can_travel
from sosampler.video.discover import Video, labels
from sosampler.video.source import source_name

if TYPE_CHECKING:
    from sosampler.inference.pipeline import Pipeline

_MANY = 10  # videos with the same label that are remarked on
Work = Callable[[list[str]], Generator[Row, None, None]]
"""Videos -> a row for each, in any order; rows of videos that failed have "video" and "error"."""


@dataclass(frozen=True)
class RunSummary:
    """The result of a run over many videos."""

    out: Path | None
    num_videos: int
    num_before: int  # that an earlier run had done
    num_rows: int  # written, those of earlier runs included
    failures: list[Row]  # video and error
    damaged: Sequence[int] = ()  # numbers of Parquet files that were damaged and made again
    same_label: str | None = None  # that all of many videos of this run got
    num_with_notes: int = 0  # videos of this run whose row has notes
    example_note: str | None = None  # the first of them
    uploaded: str | None = None  # the address that `out` was uploaded to

    @property
    def failed_path(self) -> Path | None:
        """The file that lists the failures."""
        if self.out is None:
            return None
        return self.out / "_failed.jsonl" if self.out.is_dir() else self.out.with_name(f"{self.out.name}.failed.jsonl")


def run(
    videos: Sequence[str],
    work: Work,
    what: str,
    *,
    out: Path | None = None,
    identity: dict[str, Any] | None = None,
    on_row: Callable[[Row], None] | None = None,
    on_progress: OnProgress | None = None,
    on_result: Callable[[Row], None] | None = None,
    repeat: bool = False,
    strict: bool = False,
    overwrite: bool = False,
) -> RunSummary:
    """Do the videos that have no row in `out` yet (`repeat`: all), and write their rows as they come.

    Rows of a file (.jsonl, .csv, .parquet) are in the order of the videos; a folder gets Parquet files. A run resumes
    where `identity` is equal. `what` is "selections" or "predictions". `on_row` is called with each new row where none
    are written, and with that of a single video; `on_result` with every new row and failure. `strict` raises the first
    failure. `overwrite`: replace what `out` holds of something else.
    """
    failures: list[Row] = []
    noted: list[str] = []  # the first note of each video that has any
    labels: Counter[str] = Counter()  # of predictions
    with nullcontext() if out is None else open_rows(out, what, identity or {}, overwrite=overwrite) as rows:
        todo = [video for video in videos if repeat or rows is None or not rows.done(source_name(video))]
        before = len(videos) - len(todo)
        progress = Progress(len(videos), done=before, before=before)
        with closing(work(todo)) as results:
            for row in results:
                if on_result is not None:
                    on_result(row)
                if "error" in row:
                    if strict:
                        raise VideoError(row["error"])
                    failures.append(row)
                    progress.failed += 1
                else:
                    if "label" in row:
                        labels[row["label"]] += 1
                    noted += row.get("selection", row)["notes"][:1]
                    if rows is not None:
                        rows.add(row)
                    if on_row is not None and (rows is None or len(videos) == 1):
                        on_row(row)
                progress.done += 1
                if on_progress is not None:
                    on_progress(progress)
        same = next(iter(labels)) if len(labels) == 1 and labels.total() >= _MANY else None
        notes: dict[str, Any] = {"num_with_notes": len(noted), "example_note": noted[0] if noted else None}
        if rows is None:
            return RunSummary(None, len(videos), 0, 0, failures, same_label=same, **notes)
        rows.finish(failures, [source_name(video) for video in videos])
        return RunSummary(out, len(videos), before, rows.num_rows, failures, rows.damaged, same, **notes)


def row_of(video: str, outcome: Any) -> Row:
    """Return the row of a selection, a prediction, or an error."""
    is_error = isinstance(outcome, SosamplerError)
    return {"video": source_name(video), "error": str(outcome)} if is_error else outcome.to_dict()


# ---- selections


def select_many(
    sources: Iterable[Any],
    num_frames: int | str | Auto | None = None,
    *,
    workers: int | None = None,
    on_error: str = "return",
    **options: Any,
) -> Iterator[Selection | SosamplerError]:
    """Yield the selection of each video, in their order, as they come: memory does not grow with their number.

    Args:
        sources: videos, each whatever `select` takes; they are taken from it as they are needed.
        num_frames: N, as in `select`.
        workers: videos that are decoded at a time; None takes one a core. Many videos are decoded in processes of
            their own, few in threads; 0 decodes one after the other, in this process.
        on_error: "return" yields the error of a video that cannot be read in its place, "raise" raises it.
        options: other arguments of `select`.

    Examples:
        >>> from sosampler.video.synthetic import numbered_video
        >>> videos = [numbered_video(num_frames=count) for count in (30, 60)]
        >>> [sel.frame_indices.tolist() for sel in select_many(videos, 2, policy="uniform")]
        [[7, 22], [15, 45]]
    """
    if isinstance(sources, (str, bytes, os.PathLike)):
        raise InvalidArgument(f"sources={sources!r:.100} is one video; give a list, or call select")
    one_of("on_error", on_error, ("return", "raise"))
    if workers is not None:
        check_count("workers", workers, "MAX_THREADS", at_least=0)
    for name in options:
        if name not in SelectOptions.__dataclass_fields__:
            raise InvalidArgument(f"select_many has no option {name!r}; it takes those of select, workers and on_error")
    return _select_many(sources, SelectOptions(num_frames=num_frames, **options), workers, on_error)


def _select_many(
    sources: Iterable[Any], options: SelectOptions, workers: int | None, on_error: str
) -> Iterator[Selection | SosamplerError]:
    options = for_many(options)
    step = DecodeStep(options, enlarge=True)
    tasks = (FrameTask(source, step) for source in sources)
    with closing(decoded_batches(tasks, workers=workers, batch_size=1)) as batches:
        for (decoded,) in batches:
            frames = None if decoded.shape is None else decoded.take()
            outcome: Any = decoded.outcome
            if isinstance(outcome, SosamplerError) and on_error == "raise":
                raise outcome
            yield outcome if isinstance(outcome, SosamplerError) else replace(outcome, frames=frames)


def for_many(options: SelectOptions) -> SelectOptions:
    """Return options for many videos at a time.

    One decoding thread a video keeps every core busy and wastes nothing at seeks. Other processes find the policy by
    its name; one that they cannot find, or should not load once more, stays here.
    """
    policy = options.resolved_policy
    return replace(options, threads=options.threads or 1, policy=policy.spec if can_travel(policy) else policy)


@dataclass(frozen=True)
class SelectJob:
    """What `sosampler select` does with each video, and where results go."""

    options: SelectOptions
    out: Path | None = None
    frames_folder: Path | None = None
    image_format: str = "jpg"
    sheet: Path | None = None
    workers: int | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        """Refuse before the first video what would fail at every one."""
        one_of("--image-format", self.image_format, IMAGE_FORMATS)
        if self.workers is not None:
            check_count("--workers", self.workers, "MAX_THREADS")
        if (self.frames_folder or self.sheet) and not self.options.decode:
            raise InvalidArgument(
                "--no-decode gives no pixels for --save-frames or --contact-sheet; leave one of them out"
            )
        if self.out is not None:
            check_out(self.out, "selections", overwrite=self.overwrite)

    def run(self, videos: Sequence[Video], **callbacks: Any) -> RunSummary:
        """Select from all videos, and write rows, frames and the contact sheet; `on_row`, `on_progress` as in `run`."""
        names, is_single = [str(video) for video in videos], len(videos) == 1
        if self.sheet is not None and len(videos) > MAX_ROWS:
            raise InvalidArgument(
                f"a contact sheet holds {MAX_ROWS} videos at most, not {len(videos)}; use --save-frames instead"
            )
        folders, folder = {}, self.frames_folder
        if folder is not None:
            # The frames of a single video go into the folder itself.
            parts = [""] if is_single else labels(list(videos))
            folders = {name: folder / part for name, part in zip(names, parts, strict=True)}
        sheet_rows: dict[str, SheetRow] = {}
        where = {"frames_folder": folder and str(folder), "image_format": self.image_format}
        summary = run(
            names,
            lambda todo: self.rows(todo, folders, sheet_rows),
            "selections",
            out=self.out,
            # For a policy with weights it waits until these are read, which otherwise happens while frames are decoded.
            identity=None if self.out is None else {**self.options.identity(), **where},
            repeat=self.sheet is not None or is_single,  # a contact sheet needs the pixels of all
            strict=is_single,
            overwrite=self.overwrite,
            **callbacks,
        )
        if self.sheet is not None and sheet_rows:
            write_contact_sheet([sheet_rows[name] for name in names if name in sheet_rows], self.sheet)
        return summary

    def rows(
        self,
        videos: Sequence[str],
        folders: dict[str, Path] | None = None,
        sheet_rows: dict[str, SheetRow] | None = None,
    ) -> Generator[Row, None, None]:
        """Yield the rows of the videos in their order; frames go to `folders`, and their thumbnails to `sheet_rows`."""
        many = len(videos) > 1
        options = for_many(self.options) if many else self.options
        # In processes a file that kills its decoder costs one video.
        processes = len(videos) >= PROCESSES_FROM and can_travel(options.resolved_policy)
        step = SelectStep(options, folders or {}, self.image_format, tiles=sheet_rows is not None and bool(self.sheet))
        workers = self.workers or min(usable_cores(), MAX_WORKERS) if many else 1
        with FramePool(workers, processes=processes, ahead=2 * workers, held=1) as pool:
            for video, decoded in zip(videos, pool.decoded(FrameTask(one, step) for one in videos), strict=True):
                outcome: Any = decoded.outcome
                if isinstance(outcome, SheetRow):
                    assert sheet_rows is not None
                    sheet_rows[video] = outcome
                    outcome = outcome.selection
                yield row_of(video, outcome)


@dataclass(frozen=True)
class SelectStep:
    """Select from a video and write its frames: the selection without pixels, or its row on a contact sheet."""

    options: SelectOptions
    folders: Mapping[str, Path]  # video -> folder for its frames; empty: they are not written
    image_format: str
    tiles: bool

    def __call__(self, video: str) -> Selection | SheetRow | SosamplerError:
        return attempt(source_name(video), lambda: self._select(video))

    def _select(self, video: str) -> Selection | SheetRow:
        # Only image files need pixels.
        selection = select_with(video, self.options, keep_frames=bool(self.folders) or self.tiles)
        if self.folders:
            save_frames(selection, self.folders[video], image_format=self.image_format)
        return SheetRow.of(selection) if self.tiles else replace(selection, frames=None)


# ---- predictions


def classify_videos(
    pipeline: Pipeline, videos: Sequence[Video], out: Path | None = None, *, overwrite: bool = False, **callbacks: Any
) -> RunSummary:
    """Classify all videos, and write their rows; `on_row` and `on_progress` as in `run`."""

    def work(todo: Sequence[str]) -> Generator[Row, None, None]:
        # A single video gets all cores for its decoding.
        results = [pipeline(todo[0], on_error="return")] if len(todo) == 1 else pipeline.stream(todo)
        for video, result in zip(todo, results, strict=True):
            yield row_of(video, result)

    return run(
        [str(video) for video in videos],
        work,
        "predictions",
        out=out,
        identity=None if out is None else pipeline.identity(),
        repeat=len(videos) == 1,
        strict=len(videos) == 1,
        overwrite=overwrite,
        **callbacks,
    )


# ---- as text


def describe_row(row: Row) -> str:
    """Return a selection or a prediction in words."""
    selection = row.get("selection", row)
    chosen = f"{selection['num_frames']} of {selection['num_candidates']} {selection['candidates']['mode']} candidates"
    metadata = selection["metadata"]
    if "label" in row:
        first, *others = row["top"]
        seconds = f"{row['timing']['total']:.2f} s"
        lines = [
            f"{row['video']}: {first['label']} {first['probability']:.3f} ({chosen}, {selection['policy']}, {seconds})"
        ]
        lines += [f"  {each['probability']:.3f}  {each['label']}" for each in others]
    else:
        auto = selection.get("asked")
        policy = selection["policy"] + (f", auto of {auto['min']} to {auto['max']}" if auto else "")
        lines = [
            f"{row['video']}: {chosen} ({policy}), {metadata['total_num_frames']} frames, {metadata['duration']:.2f} s"
        ]
        scores = selection["scores"] or [None] * selection["num_frames"]
        for index, seconds, score in zip(selection["frame_indices"], selection["pts_seconds"], scores, strict=True):
            suffix = "" if score is None else f"  score {score:.4f}"
            lines.append(f"  frame {index:>7}  {seconds:>10.3f} s{suffix}")
    if transfer := selection.get("transfer"):
        lines.append(f"  {describe_transfer(transfer)}")
    return "\n".join(escaped(line) for line in [*lines, *(f"  note: {note}" for note in selection["notes"])])


def describe_transfer(transfer: Row) -> str:
    """Return in words how much of an address was read.

    >>> describe_transfer({"bytes_read": 2_500_000, "file_bytes": 500_000_000, "requests": 31})
    'read 2.5 of 500.0 MB (0.50 %) in 31 requests'
    """
    read, size = transfer["bytes_read"], transfer["file_bytes"]
    share = f"{100 * read / size:.2f} %"
    return f"read {read / 1e6:.1f} of {size / 1e6:.1f} MB ({share}) in {transfer['requests']} requests"


# ---- image files: the chosen frames, and a contact sheet of them above a timeline

# Larger images are refused by some viewers.
MAX_ROWS = 40

_TILE_WIDTH, _GAP, _MARGIN = 240, 10, 18
_INK, _FAINT, _ACCENT, _PAPER = (28, 28, 30), (150, 150, 156), (196, 64, 32), (255, 255, 255)


@dataclass(frozen=True)
class SheetRow:
    """One video on the sheet: a selection whose frames are thumbnails, so that many fit into memory."""

    selection: Selection  # without frames
    tiles: list[Image.Image]

    @classmethod
    def of(cls, selection: Selection) -> SheetRow:
        if selection.frames is None:
            raise InvalidArgument("a contact sheet needs the frames; select with decode=True")
        return cls(replace(selection, frames=None), [_tile(frame) for frame in selection.frames])

    @property
    def title(self) -> str:
        of = f"{len(self.selection)} of {self.selection.num_candidates} {self.selection.candidates.mode} candidates"
        return escaped(f"{Path(self.selection.video).name}: {of}, policy {self.selection.policy}")

    @property
    def captions(self) -> list[str]:
        chosen = self.selection
        scores = [""] * len(chosen) if chosen.scores is None else [f"   {score:.3f}" for score in chosen.scores]
        frames = zip(chosen.pts_seconds, chosen.frame_indices, scores, strict=True)
        return [f"{_clock(seconds)}   frame {index}{score}" for seconds, index, score in frames]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{int(minutes)}:{rest:06.3f}" if seconds >= 0 else f"{seconds:.3f} s"


def _tile(frame: np.ndarray) -> Image.Image:
    height = max(1, round(frame.shape[0] * _TILE_WIDTH / frame.shape[1]))
    # A tall, narrow frame would push everything else off the sheet.
    scale = min(1.0, 1.5 * _TILE_WIDTH / height)
    size = max(1, round(_TILE_WIDTH * scale)), max(1, round(height * scale))
    return Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)


def draw_contact_sheet(rows: Sequence[SheetRow], max_columns: int = 8) -> Image.Image:
    """Draw one block for each video, one below the other."""
    columns = min(max_columns, max(len(row.tiles) for row in rows))
    width = 2 * _MARGIN + columns * _TILE_WIDTH + (columns - 1) * _GAP
    blocks = [_draw_row(row, columns, width) for row in rows]
    sheet = Image.new("RGB", (width, sum(block.height for block in blocks) + _MARGIN), _PAPER)
    top = 0
    for block in blocks:
        sheet.paste(block, (0, top))
        top += block.height
    return sheet


def write_contact_sheet(rows: Sequence[SheetRow], path: Path) -> None:
    """Write the contact sheet of some videos as an image file."""
    sheet = draw_contact_sheet(rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_image(sheet, path)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{path}: the contact sheet cannot be written ({error}); give a path such as sheet.png"
        ) from error


def _draw_row(row: SheetRow, columns: int, width: int) -> Image.Image:
    title_font, text_font = ImageFont.load_default(size=18), ImageFont.load_default(size=13)
    lines = [row.tiles[i : i + columns] for i in range(0, len(row.tiles), columns)]
    heights = [max(tile.height for tile in line) + 24 for line in lines]
    block = Image.new("RGB", (width, 46 + sum(heights) + 56), _PAPER)
    draw, captions, chosen = ImageDraw.Draw(block), row.captions, row.selection
    draw.text((_MARGIN, 14), row.title, font=title_font, fill=_INK)
    top = 46
    for number, (line, height) in enumerate(zip(lines, heights, strict=True)):
        for column, tile in enumerate(line):
            left = _MARGIN + column * (_TILE_WIDTH + _GAP)
            block.paste(tile, (left + (_TILE_WIDTH - tile.width) // 2, top))
            draw.text((left, top + height - 20), captions[number * columns + column], font=text_font, fill=_INK)
        top += height
    # The timeline has candidates as thin ticks and chosen frames as triangles, distinct without colour.
    y, left, right = top + 20, _MARGIN, width - _MARGIN
    begin, length = chosen.metadata.start_seconds, chosen.metadata.duration

    def positions(seconds: np.ndarray) -> list[float]:
        passed: list[float] = np.clip((seconds - begin) / max(length, 1e-9), 0.0, 1.0).tolist()
        return [left + (right - left) * share for share in passed]

    draw.line((left, y, right, y), fill=_FAINT, width=2)
    for x in positions(chosen.candidates.pts_seconds):
        draw.line((x, y - 5, x, y + 5), fill=_FAINT, width=1)
    for x in positions(chosen.pts_seconds):
        draw.polygon([(x, y - 2), (x - 6, y - 14), (x + 6, y - 14)], fill=_ACCENT)
    draw.text((left, y + 8), _clock(begin), font=text_font, fill=_FAINT)
    draw.text((right, y + 8), _clock(begin + length), font=text_font, fill=_FAINT, anchor="ra")
    return block


def write_image(image: Image.Image, path: Path, **options: Any) -> None:
    """Write an image in the format of its suffix; by way of memory, as Pillow does not notice when a disk is full."""
    suffix = path.suffix.lower()
    # Asking Pillow imports all of its formats.
    image_format = {".jpg": "JPEG", ".png": "PNG"}.get(suffix) or Image.registered_extensions().get(suffix)
    if image_format is None:
        raise ValueError(f"unknown file extension: {suffix}")
    data = io.BytesIO()
    image.save(data, image_format, **options)
    remove_leftovers(path, only_of_dead=True)
    with replacing(path) as temporary:
        temporary.write_bytes(data.getvalue())


IMAGE_FORMATS = ("jpg", "png")


def save_frames(selection: Selection, folder: Path, *, image_format: str = "jpg") -> list[Path]:
    """Write each frame as NNN_frameINDEX_TIMEs.jpg: position in the selection, true frame number, time."""
    if selection.frames is None:
        raise InvalidArgument("there are no frames to save; select with decode=True")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for position, (frame, index, seconds) in enumerate(
            zip(selection.frames, selection.frame_indices, selection.pts_seconds, strict=True)
        ):
            path = folder / f"{position:03d}_frame{index:06d}_{seconds:.3f}s.{image_format}"
            write_image(Image.fromarray(frame), path, quality=95)
            paths.append(path)
    except OSError as error:
        raise InvalidArgument(
            f"{folder}: frames cannot be written there ({error.strerror}); make room, or give another folder"
        ) from error
    return paths
