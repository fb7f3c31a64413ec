"""`sosampler mcp`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from sosampler.cli import options as shared


def mcp_command(
    folders: Annotated[
        list[Path], Argument(help="Folders whose videos the assistant may see; nothing else is opened.")
    ],
    policy: Annotated[str | None, Option(help="As in select.  [default: general]")] = None,
    sampler: shared.Sampler = None,
    candidates: shared.Candidates = None,
    query_model: Annotated[
        str | None,
        Option(envvar="SOSAMPLER_QUERY_MODEL", help="Image-text model for queries: a folder or hub name."),
    ] = None,
    max_images: Annotated[int, Option(help="Images that one call may give at most.")] = 17,
    max_pixels: shared.MaxPixels = None,
    max_frames: shared.MaxFrames = None,
    max_duration: shared.MaxDuration = None,
    max_bytes: shared.MaxBytes = None,
    timeout: shared.Timeout = None,
) -> None:
    """Let an assistant watch videos: a server of the Model Context Protocol on standard input and output."""
    given = locals()
    from sosampler.integrations.mcp import VideoTools, make_server

    chosen = shared.policy_or_sampler(policy, sampler)
    tools = VideoTools(folders, chosen, query_model, max_images, shared.limits_of(given), candidates)
    make_server(tools).run()
