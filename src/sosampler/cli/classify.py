"""`sosampler classify`."""

from __future__ import annotations

from typing import Annotated

import typer

from sosampler.cli import options as shared
from sosampler.inference.options import SelectOptions

_DEFAULT_POLICY = "uniform"


def classify_command(
    videos: shared.Videos,
    classifier: Annotated[
        str, typer.Option("--classifier", "-c", help="Folder of a saved classifier, or the name of one.")
    ],
    sampler: shared.Sampler = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help=f"Choose by a policy instead, as in select.  [default: {_DEFAULT_POLICY}]"),
    ] = None,
    num_frames: Annotated[
        str | None,
        shared.num_frames_option("Frames that the classifier sees; auto: the sampler decides.  [default: 6]"),
    ] = None,
    auto_min: shared.AutoMin = None,
    auto_max: shared.AutoMax = None,
    auto_tolerance: shared.AutoTolerance = None,
    num_candidates: Annotated[int, typer.Option("-t", "--num-candidates", help="Frames to choose from.")] = 10,
    top: Annotated[int, typer.Option("--top", help="How many classes to list.")] = 5,
    candidates: shared.Candidates = None,
    grid: shared.Grid = SelectOptions.grid,
    start: shared.Start = None,
    end: shared.End = None,
    on_short: shared.OnShort = SelectOptions.on_short,
    snap_tolerance: shared.SnapTolerance = SelectOptions.snap_tolerance,
    seed: shared.Seed = SelectOptions.seed,
    size: Annotated[
        int | None,
        typer.Option("--size", help="Short side of the frames.  [default: 256, more if a network takes more]"),
    ] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="A file with the classifier's weights.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="KEY=VALUE of the classifier, e.g. head=frameexit.")
    ] = None,
    input_size: Annotated[int | None, typer.Option("--input-size", help="Height and width of its input.")] = None,
    device: shared.Device = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="float32, bfloat16, float16; int8 after `sosampler quantize`.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Videos in one call of the classifier.")] = 8,
    threads: shared.Threads = None,
    workers: shared.Workers = None,
    decoder: shared.Decoder = "pyav",
    folder_fps: shared.FolderFps = None,
    max_pixels: shared.MaxPixels = None,
    max_frames: shared.MaxFrames = None,
    max_duration: shared.MaxDuration = None,
    out: shared.Out = None,
    json_output: shared.Json = False,
    engine: shared.Engine = "local",
    address: shared.Address = None,
) -> None:
    """Classify videos from a few frames of each. Exit code 1 if some of many failed."""
    arguments = shared.select_arguments(locals())
    chosen = shared.policy_or_sampler(policy, sampler) or _DEFAULT_POLICY
    on_ray = shared.check_engine(engine, address)
    from sosampler.inference.rows import check_out
    from sosampler.video.discover import listed_videos
    from sosampler.video.source import import_torch

    if on_ray:
        out = shared.check_ray_out(out)
    elif out is not None:
        check_out(out)
    paths = listed_videos(videos)
    import_torch()  # raises with how to install it
    from sosampler.inference.many import classify_videos
    from sosampler.inference.pipeline import Pipeline

    given = {"weights": weights, "input_size": input_size, **shared.key_values(option or [])}
    pipeline = Pipeline(
        chosen,
        classifier,
        classifier_options={name: value for name, value in given.items() if value is not None},
        batch_size=batch_size,
        device="cpu" if on_ray else device,  # on a cluster the workers' devices count
        precision=precision,
        top=top,
        workers=workers,
        **arguments,
    )
    if not on_ray:
        code = shared.run_and_report(
            lambda on_row, on_progress: classify_videos(pipeline, paths, out, on_row=on_row, on_progress=on_progress),
            "predictions",
            one=len(paths) == 1,
            json_output=json_output,
            ray=False,
        )
        raise typer.Exit(code)
    from sosampler.integrations.ray.cluster import RaySettings
    from sosampler.integrations.ray.rows import classify_on_ray

    settings, target = RaySettings(address, decoders=workers, batch_size=batch_size), out
    assert target is not None, "checked above"
    code = shared.run_and_report(
        lambda _, on_progress: classify_on_ray(
            paths, target, pipeline, settings=settings, device=device, on_progress=on_progress
        ),
        "predictions",
        one=False,
        json_output=json_output,
        ray=True,
    )
    raise typer.Exit(code)
