"""`sosampler watch`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from sosampler.cli import options as shared
from sosampler.inference.options import WATCH_IDLE, WATCH_NUM_FRAMES, WATCH_RECONNECTS, WATCH_WINDOW

if TYPE_CHECKING:
    from sosampler.inference.watch import Window

ROWS = "windows.jsonl"
_ROW_START = b'{"source": '  # of each row
_QUALITY = 95  # of the JPEGs


def watch_command(
    source: Annotated[
        str,
        Argument(
            help="A file that grows, - for standard input, an address (with --allow-scheme), or camera:NAME: camera:0."
        ),
    ],
    num_frames: Annotated[
        str | None,
        shared.num_frames_option(f"How many frames of each window; auto as in select.  [default: {WATCH_NUM_FRAMES}]"),
    ] = None,
    window: Annotated[float, Option(help="Seconds of the stream in a window.")] = WATCH_WINDOW,
    num_candidates: Annotated[
        int | None, Option("-t", "--num-candidates", help="How many frames of a window to choose from.")
    ] = None,
    fps: Annotated[float | None, Option(help="Candidates at this rate instead of a number.")] = None,
    policy: Annotated[str | None, Option(help="As in select.  [default: general]")] = None,
    sampler: shared.Sampler = None,
    query: Annotated[str | None, Option(help="A question or a concept, as in select.")] = None,
    query_model: Annotated[str | None, Option(help="Image-text model for --query, as in select.")] = None,
    seed: shared.Seed = 0,
    size: Annotated[int | None, Option(help="Short side of the frames.  [default: as in the stream]")] = None,
    out: Annotated[
        Path | None, Option("--out", "-o", help=f"Write JPEGs into this folder, and a row a window into {ROWS} there.")
    ] = None,
    json_output: Annotated[bool, Option("--json", help="Print a JSON object a window.")] = False,
    max_windows: Annotated[int | None, Option(help="Stop after so many windows.")] = None,
    idle: Annotated[
        float, Option(help="Seconds without a byte: a file has ended then, and another stream is lost.")
    ] = WATCH_IDLE,
    reconnects: Annotated[
        int, Option(help="How often in a row a lost address or camera is opened again.")
    ] = WATCH_RECONNECTS,
    schemes: Annotated[
        list[str] | None,
        Option("--allow-scheme", help="Open addresses that begin so: http, https, tcp, rtsp or rtsps; repeatable."),
    ] = None,
    camera_option: Annotated[
        list[str] | None, Option(help="KEY=VALUE of FFmpeg for a camera, e.g. video_size=1280x720.")
    ] = None,
    max_pixels: shared.MaxPixels = None,
    max_bytes: shared.MaxBytes = None,
) -> None:
    """Choose frames of a stream while it runs, some of each window of time; Ctrl-C ends it."""
    from sosampler._util.validation import check_int
    from sosampler.inference.watch import watch
    from sosampler.video.limits import Limits

    if max_windows is not None:
        check_int("--max-windows", max_windows)
    given: dict[str, Any] = {"max_pixels": max_pixels, "max_bytes": max_bytes}
    windows = watch(
        source,
        WATCH_NUM_FRAMES if num_frames is None else num_frames,
        window=window,
        num_candidates=num_candidates,
        fps=fps,
        policy=shared.policy_or_sampler(policy, sampler),
        seed=seed,
        size=size,
        idle=idle,
        reconnects=reconnects,
        schemes=tuple(schemes or ()),
        camera_options={key: str(value) for key, value in shared.key_values(camera_option).items()},
        query=query,
        query_model=query_model,
        limits=Limits(**shared.given(given, *given)),
    )
    seen = num = 0
    with nullcontext() if out is None else _writing(out) as writer:
        try:
            for each in windows:
                row = each.to_dict()
                if writer is not None:
                    writer.add(each, row)
                shared.echo(row, describe(each), json_output)
                seen, num = seen + 1, num + len(each)
                if seen == max_windows:
                    break
        except KeyboardInterrupt:
            shared.say("stopped")  # which is how a stream without an end is ended: exit code 0
        finally:
            where = "" if out is None else f", written to {out}"
            if seen:
                shared.say(f"{seen} windows, {num} frames{where}")


def describe(window: Window) -> str:
    """Return a window as one line."""
    length = f"{window.start_seconds:.3f} to {window.end_seconds:.3f} s"
    shown = [
        f"{seconds:.3f} s ({wall})"
        for seconds, wall in zip(window.pts_seconds.tolist(), window.wall_times, strict=True)
    ]
    short = "" if window.ended_by == "full" else f" [{window.ended_by}]"
    notes = "".join(f"; note: {note}" for note in window.notes)
    return f"window {window.number}: {length}{short}: {', '.join(shown)}{notes}"


@contextmanager
def _writing(folder: Path) -> Iterator[_Writer]:
    """Hold a folder for the run, without what a killed one left there."""
    from sosampler._util.files import remove_leftovers
    from sosampler._util.locks import locked_folder
    from sosampler.errors import InvalidArgument

    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"--out {folder}: is a file; give a folder")
    with locked_folder(folder):
        parts = list(folder.glob(".*_window*.part.jpg"))  # .STEM.PROCESS.part.jpg
        remove_leftovers(*(folder / f"{part.name[1:].rsplit('.', 3)[0]}.jpg" for part in parts))
        yield _Writer(folder)


class _Writer:
    """A folder of JPEGs, each written whole, and a file with a JSON line for each window, behind its JPEGs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rows = folder, folder / ROWS
        if self._rows.exists():
            self._remove_half_row()

    def _remove_half_row(self) -> None:
        """Remove the line during which a run was killed."""
        from sosampler.errors import InvalidArgument

        with open(self._rows, "r+b") as file:
            last = b""
            for last in file:  # noqa: B007 - the last one is used
                pass
            if not last or last.endswith(b"\n"):
                return
            if not (last.startswith(_ROW_START) or _ROW_START.startswith(last)):
                raise InvalidArgument(
                    f"{self._rows}: its last line is no row of `watch` and has no end; give another folder, or end "
                    "that line with a line feed"
                )
            file.truncate(file.tell() - len(last))

    def add(self, window: Window, row: dict[str, Any]) -> None:
        """Write the frames of a window, and its row with their names."""
        from PIL import Image

        from sosampler._util.arrays import jpeg
        from sosampler._util.files import replacing

        row["files"] = [
            f"{wall.replace('-', '').replace(':', '')}_window{window.number:06d}_{seconds:.3f}s.jpg"
            for wall, seconds in zip(window.wall_times, window.pts_seconds.tolist(), strict=True)
        ]
        for name, frame in zip(row["files"], window.frames, strict=True):
            with replacing(self._folder / name) as temporary:
                temporary.write_bytes(jpeg(Image.fromarray(frame), _QUALITY))
        with open(self._rows, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
