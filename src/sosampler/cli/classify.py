"""`sosampler classify`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from typer import Option

from sosampler.cli import options as shared
from sosampler.inference.options import SelectOptions

_DEFAULT_POLICY = "uniform"


def classify_command(
    videos: shared.Videos,
    classifier: Annotated[str, Option("--classifier", "-c", help="Folder of a saved classifier, or the name of one.")],
    sampler: shared.Sampler = None,
    policy: Annotated[
        str | None, Option(help=f"Choose by a policy instead, as in select.  [default: {_DEFAULT_POLICY}]")
    ] = None,
    num_frames: Annotated[
        str | None,
        shared.num_frames_option("Frames that the classifier sees; auto: the sampler decides.  [default: 6]"),
    ] = None,
    auto_min: shared.AutoMin = None,
    auto_max: shared.AutoMax = None,
    auto_tolerance: shared.AutoTolerance = None,
    num_candidates: Annotated[int, Option("-t", "--num-candidates", help="Frames to choose from.")] = 10,
    top: Annotated[int, Option(help="How many classes to list.")] = 5,
    candidates: shared.Candidates = None,
    grid: shared.Grid = SelectOptions.grid,
    start: shared.Start = None,
    end: shared.End = None,
    on_short: shared.OnShort = SelectOptions.on_short,
    snap_tolerance: shared.SnapTolerance = SelectOptions.snap_tolerance,
    seed: shared.Seed = SelectOptions.seed,
    size: Annotated[
        int | None, Option(help="Short side of the frames.  [default: 256, more if a network takes more]")
    ] = None,
    weights: shared.Weights = None,
    option: shared.ClassifierOption = None,
    input_size: shared.InputSize = None,
    device: shared.Device = None,
    precision: Annotated[
        str | None, Option(help="float32, bfloat16, float16; int8 after `sosampler quantize`.")
    ] = None,
    batch_size: Annotated[int, Option(help="Videos in one call of the classifier.")] = 8,
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
    given = locals()
    arguments = shared.select_arguments(given)
    chosen = shared.policy_or_sampler(policy, sampler) or _DEFAULT_POLICY
    on_ray = shared.check_engine(engine, address)
    from sosampler.inference.rows import check_out
    from sosampler.video.discover import listed_videos
    from sosampler.video.source import import_torch

    target: Any = shared.check_ray_out(out) if on_ray else out and check_out(out)
    paths = listed_videos(videos)
    import_torch()  # raises with how to install it
    from sosampler.inference.pipeline import Pipeline

    pipeline = Pipeline(
        chosen,
        classifier,
        classifier_options=shared.given(given, "weights", "input_size") | shared.key_values(option),
        batch_size=batch_size,
        device="cpu" if on_ray else device,  # on a cluster the workers' devices count
        precision=precision,
        top=top,
        workers=workers,
        **arguments,
    )
    work: Any
    if on_ray:
        from sosampler.integrations.ray.cluster import RaySettings
        from sosampler.integrations.ray.rows import classify_on_ray

        settings = RaySettings(address, decoders=workers, batch_size=batch_size)
        work = partial(classify_on_ray, out=target, pipeline=pipeline, settings=settings, device=device)
    else:
        from sosampler.inference.many import classify_videos

        work = partial(classify_videos, pipeline, out=target)
    shared.run_and_report(work, paths, "predictions", json_output=json_output, on_ray=on_ray)
