"""`sosampler select`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sosampler.cli.options import (
    ADDRESS_HELP,
    ENGINE_HELP,
    AutoMax,
    AutoMin,
    AutoTolerance,
    check_engine,
    check_folder,
    number_or_auto,
    run_rows,
)
from sosampler.errors import InvalidArgument
from sosampler.inference.options import DEFAULT_NUM_FRAMES, USUAL_POLICY, SelectOptions

if TYPE_CHECKING:
    from sosampler.policies.base import Policy


def select_command(
    videos: Annotated[
        list[str],
        typer.Argument(
            help="Video files, folders of videos, folders of frame images, patterns in quotes, or a CSV, JSONL or "
            "Parquet file with a column of paths."
        ),
    ],
    num_frames: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--num-frames",
            metavar="INTEGER|auto",
            parser=number_or_auto,
            help=f"How many frames to choose; auto leaves that to a trained sampler.  [default: {DEFAULT_NUM_FRAMES}]",
        ),
    ] = None,
    auto_min: AutoMin = None,
    auto_max: AutoMax = None,
    auto_tolerance: AutoTolerance = None,
    num_candidates: Annotated[
        int | None, typer.Option("-t", "--num-candidates", help="How many to choose from.  [default: by policy]")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help="general (a sampler that ships with the package), uniform, random, all, centre, keyframe, "
            "frame-difference, frameexit, difference-peaks, farthest-first, dpp, or a trained sampler's folder. "
            "+aks, +its or +nms behind a folder or frame-difference spreads the choice in time.  [default: general; "
            "uniform with --no-decode and where all candidates are taken]",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Of a trained sampler: cpu, cuda, ...; default: the GPU if there is one."),
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option("--candidates", help="exact, keyframe (many times faster) or snap.  [default: exact]"),
    ] = None,
    grid: Annotated[
        str, typer.Option("--grid", help="Where candidates lie: uniform, linspace, stratified or jitter.")
    ] = SelectOptions.grid,
    fps: Annotated[float | None, typer.Option("--fps", help="Candidates at this rate instead of a number.")] = None,
    start: Annotated[float | None, typer.Option("--start", help="First moment, in seconds of the timestamps.")] = None,
    end: Annotated[float | None, typer.Option("--end", help="End, in seconds of the timestamps.")] = None,
    on_short: Annotated[
        str, typer.Option("--on-short", help="Too few frames: repeat, fewer or error.")
    ] = SelectOptions.on_short,
    snap_tolerance: Annotated[
        float, typer.Option("--snap-tolerance", help="Seconds, for --candidates snap.")
    ] = SelectOptions.snap_tolerance,
    seed: Annotated[int, typer.Option("--seed", help="For random choices.")] = SelectOptions.seed,
    size: Annotated[int | None, typer.Option("--size", help="Short side of the frames.  [default: as stored]")] = None,
    decode: Annotated[
        bool, typer.Option("--decode/--no-decode", help="Decode the chosen frames, or give numbers and times only.")
    ] = SelectOptions.decode,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a row per video: .parquet, .jsonl or .csv; resumes if killed.")
    ] = None,
    frames_folder: Annotated[
        Path | None, typer.Option("--save-frames", help="Write the frames into this folder.")
    ] = None,
    image_format: Annotated[str, typer.Option("--image-format", help="jpg or png, for --save-frames.")] = "jpg",
    sheet: Annotated[Path | None, typer.Option("--contact-sheet", help="Write a picture of all chosen frames.")] = None,
    decoder: Annotated[str, typer.Option("--decoder", help="pyav or torchcodec.")] = "pyav",
    threads: Annotated[
        int | None, typer.Option("--threads", help="Per video.  [default: all for one video, 1 for many]")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Videos at a time.  [default: one a core]")] = None,
    folder_fps: Annotated[float | None, typer.Option("--folder-fps", help="Rate of a folder of frame images.")] = None,
    max_pixels: Annotated[int | None, typer.Option("--max-pixels", help="Refuse larger frames.")] = None,
    max_frames: Annotated[int | None, typer.Option("--max-frames", help="Refuse videos with more frames.")] = None,
    max_duration: Annotated[
        float | None, typer.Option("--max-duration", help="Refuse longer videos (seconds).")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help=ENGINE_HELP)] = "local",
    address: Annotated[str | None, typer.Option("--address", help=ADDRESS_HELP)] = None,
) -> None:
    """Choose the frames of one video or of many."""
    from sosampler.inference.many import Job, Outputs, run
    from sosampler.video.limits import Limits

    on_ray = check_engine(engine, address)
    given = {"max_pixels": max_pixels, "max_frames": max_frames, "max_duration": max_duration}
    limits = Limits(**{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    options = SelectOptions(
        num_frames=num_frames,
        auto_min=auto_min,
        auto_max=auto_max,
        auto_tolerance=auto_tolerance,
        num_candidates=num_candidates,
        policy=policy if device is None or on_ray else _on_device(policy or USUAL_POLICY, device),
        candidates=candidates,
        grid=grid,
        fps=fps,
        start=start,
        end=end,
        on_short=on_short,
        snap_tolerance=snap_tolerance,
        seed=seed,
        size=size,
        decode=decode,
        decoder=decoder,
        threads=threads,
        limits=limits,
        folder_fps=folder_fps,
    )
    if on_ray:
        folder = check_folder(out, save_frames=frames_folder, contact_sheet=sheet)
        raise typer.Exit(_run_on_ray(videos, folder, options, device, workers, address, json_output))
    outputs = Outputs(json=json_output, out=out, frames_folder=frames_folder, image_format=image_format, sheet=sheet)
    raise typer.Exit(run(videos, Job(options, outputs), workers=workers))


def _on_device(policy: str, device: str) -> Policy:
    from sosampler.policies.registry import get_policy

    found = get_policy(policy, device=device)
    if not found.has_weights:
        raise InvalidArgument(f"--device {device} is for trained samplers, not for the policy {policy!r}; leave it out")
    return found


def _run_on_ray(
    videos: list[str],
    folder: Path,
    options: SelectOptions,
    device: str | None,
    workers: int | None,
    address: str | None,
    json_output: bool,
) -> int:
    from sosampler.integrations.ray.cluster import RaySettings
    from sosampler.integrations.ray.rows import select_on_ray
    from sosampler.video.discover import listed_videos

    settings, paths = RaySettings(address, decoders=workers), listed_videos(videos)
    return run_rows(
        lambda tell: select_on_ray(paths, folder, options, settings=settings, device=device, on_progress=tell),
        "selecting",
        json_output,
    )
