"""`sosampler ui`."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer


def ui_command(
    videos: Annotated[
        list[str] | None,
        typer.Argument(help="Videos to begin with: files, folders or patterns. They are not copied."),
    ] = None,
    sampler: Annotated[
        list[Path] | None,
        typer.Option("--sampler", "-s", help="Folder of a trained sampler to show; may be given several times."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Of trained samplers: cpu, cuda, ...  [default: the GPU if there is one]"),
    ] = None,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on. Another one opens the page to everyone who reaches it."),
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option("--port", help="0: any free one.  [default: 7860, or the next free one]")
    ] = None,
    max_upload: Annotated[str, typer.Option("--max-upload", help="Largest upload, such as 500MB or 2GB.")] = "1GB",
    max_videos: Annotated[int, typer.Option("--max-videos", help="Videos on the page at most.")] = 50,
    max_pixels: Annotated[int | None, typer.Option("--max-pixels", help="Refuse larger frames.")] = None,
    max_frames: Annotated[int | None, typer.Option("--max-frames", help="Refuse videos with more frames.")] = None,
    max_duration: Annotated[
        float | None, typer.Option("--max-duration", help="Refuse longer videos (seconds).")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in the browser.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object, with the address.")] = False,
) -> None:
    """Choose frames on a web page: drop videos, compare with uniform sampling, download frames and JSON.

    The page is served by this machine: it works offline, and nothing is sent anywhere.
    """
    from sosampler._util.validation import check_int
    from sosampler.ui.server import Service, is_local, serve
    from sosampler.ui.videos import size_of
    from sosampler.ui.view import make_controls
    from sosampler.video.discover import expand
    from sosampler.video.limits import Limits

    given = {"max_pixels": max_pixels, "max_frames": max_frames, "max_duration": max_duration}
    limits = Limits(**{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    check_int("--max-videos", max_videos)
    largest = size_of(max_upload)
    controls = make_controls(sampler or [], device=device, limits=limits)
    with tempfile.TemporaryDirectory(prefix="sosampler-ui-", ignore_cleanup_errors=True) as folder, _ended_by_signals():
        service = Service(controls, Path(folder), max_upload=largest, max_videos=max_videos)
        for path in expand(videos or []):
            service.videos.add_file(path)
        with serve(service, host, port) as server:
            if json_output:
                typer.echo(json.dumps({"url": server.url}))
            typer.echo(f"sosampler: the page is at {server.url} until Ctrl-C", err=True)
            if not is_local(host):
                typer.echo("sosampler: everyone who can reach this machine can see the page and its videos", err=True)
            if browser:
                import webbrowser

                webbrowser.open(server.url)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                typer.echo("sosampler: the page is closed, uploads are removed", err=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C, so that uploads are removed then too."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
