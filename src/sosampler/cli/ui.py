"""`sosampler ui`."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from sosampler._util.limits import UPLOAD_SECONDS
from sosampler.cli import options as shared
from sosampler.video.limits import PAGE_TIMEOUT


def ui_command(
    videos: Annotated[
        list[str] | None, Argument(help="Videos to begin with: files, folders or patterns. They are not copied.")
    ] = None,
    sampler: Annotated[
        list[Path] | None,
        Option("--sampler", "-s", help="Folder of a trained sampler to show; may be given several times."),
    ] = None,
    query_model: Annotated[
        str | None,
        Option(
            envvar="SOSAMPLER_QUERY_MODEL", help="Image-text model: the page then takes queries. Folder or hub name."
        ),
    ] = None,
    device: shared.Device = None,
    host: Annotated[str, Option(help="Address to listen on; others open the page to all who reach it.")] = "127.0.0.1",
    port: Annotated[int | None, Option(help="0: any free one.  [default: 7860, or the next free one]")] = None,
    max_upload: Annotated[str, Option(help="Largest upload, such as 500MB or 2GB.")] = "1GB",
    max_upload_seconds: Annotated[float, Option(help="Time for one upload.")] = UPLOAD_SECONDS,
    max_videos: Annotated[int, Option(help="Videos on the page at most.")] = 50,
    max_pixels: shared.MaxPixels = None,
    max_frames: shared.MaxFrames = None,
    max_duration: shared.MaxDuration = None,
    max_bytes: shared.MaxBytes = None,
    timeout: Annotated[float, Option(help="Seconds for one video.")] = PAGE_TIMEOUT,
    browser: Annotated[bool, Option("--browser", help="Open the page in the browser.")] = False,
    json_output: Annotated[bool, Option("--json", help="Print one JSON object, with the address.")] = False,
) -> None:
    """Choose frames on a web page: drop videos, compare with uniform sampling, download frames and JSON.

    The page is served by this machine: it works offline, and nothing is sent anywhere.
    """
    limits = shared.limits_of(locals())
    from sosampler._util.validation import check_float, check_int
    from sosampler.ui.server import Service, is_local, serve
    from sosampler.ui.videos import size_of
    from sosampler.ui.view import make_controls
    from sosampler.video.discover import expand

    check_int("--max-videos", max_videos)
    check_float("--max-upload-seconds", max_upload_seconds, above=0)
    largest = size_of(max_upload)
    controls = make_controls(sampler or [], device=device, limits=limits, query_model=query_model)
    with tempfile.TemporaryDirectory(prefix="sosampler-ui-", ignore_cleanup_errors=True) as folder, _ended_by_signals():
        service = Service(
            controls,
            Path(folder),
            max_upload=largest,
            max_videos=max_videos,
            max_seconds=max_upload_seconds,
            num_processes=2,  # one chooses frames, the other looks at uploads meanwhile
        )
        for path in expand(videos or []):
            service.videos.add_file(path)
        with closing(service.decoder), serve(service, host, port) as server:
            if json_output:
                typer.echo(json.dumps({"url": server.url}))
            shared.say(f"sosampler: the page is at {server.url} until Ctrl-C")
            if not is_local(host):
                shared.say("sosampler: everyone who can reach this machine can see the page and its videos")
            if browser:
                import webbrowser

                webbrowser.open(server.url)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                shared.say("sosampler: the page is closed, uploads are removed")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C, so that uploads are removed then too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
