"""`sosampler select` and `sosampler classify`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

from sosampler.cli import options as shared
from sosampler.errors import InvalidArgument
from sosampler.inference.options import DEFAULT_NUM_FRAMES, DEFAULT_POLICY, SelectOptions

_CLASSIFY_POLICY = "uniform"


def select_command(
    videos: shared.Videos,
    num_frames: Annotated[
        str | None,
        shared.num_frames_option(
            f"How many frames to choose; auto: as many as each video needs.  [default: {DEFAULT_NUM_FRAMES}]"
        ),
    ] = None,
    total: Annotated[
        int | None,
        Option(help="One budget for all videos: the frames worth labelling, as images in the folder --out."),
    ] = None,
    at_least: Annotated[int | None, Option(help="With --total: frames of each video.  [default: 0]")] = None,
    auto_min: shared.AutoMin = None,
    auto_max: shared.AutoMax = None,
    auto_tolerance: shared.AutoTolerance = None,
    num_candidates: Annotated[
        int | None, Option("-t", "--num-candidates", help="How many to choose from.  [default: by policy]")
    ] = None,
    policy: Annotated[
        str | None,
        Option(
            help="general (a sampler that ships with the package), uniform, random, all, centre, keyframe, "
            "frame-difference, frameexit, difference-peaks, motion-uniform, farthest-first, dpp, kts, thumbnail, "
            "general-text, a trained sampler's folder, or MODULE:CLASS. +aks, +its, +nms, +mmr, +dpp or +facility "
            "behind one with scores spreads the choice.  [default: general; uniform with --no-decode and where all "
            "candidates are taken; query+mmr with --query]"
        ),
    ] = None,
    prefer: Annotated[
        str | None, Option(help="text: for slides and screen recordings, whose text is the content, not a title.")
    ] = None,
    sampler: shared.Sampler = None,
    query: Annotated[str | None, Option(help="A question or a concept: choose the frames that fit it.")] = None,
    query_model: Annotated[
        str | None,
        Option(help="Image-text model for --query: a folder or hub name.  [default: $SOSAMPLER_QUERY_MODEL]"),
    ] = None,
    device: shared.Device = None,
    candidates: shared.Candidates = None,
    grid: shared.Grid = SelectOptions.grid,
    fps: Annotated[float | None, Option(help="Candidates at this rate instead of a number.")] = None,
    start: shared.Start = None,
    end: shared.End = None,
    on_short: shared.OnShort = SelectOptions.on_short,
    snap_tolerance: shared.SnapTolerance = SelectOptions.snap_tolerance,
    seed: shared.Seed = SelectOptions.seed,
    size: Annotated[int | None, Option(help="Short side of the frames.  [default: as stored]")] = None,
    decode: Annotated[bool, Option(help="Decode the chosen frames, or give numbers and times only.")] = True,
    json_output: shared.Json = False,
    out: shared.Out = None,
    overwrite: shared.Replace = False,
    frames_folder: Annotated[Path | None, Option("--save-frames", help="Write the frames into this folder.")] = None,
    image_format: Annotated[str, Option(help="jpg or png, for --save-frames and --total.")] = "jpg",
    sheet: Annotated[Path | None, Option("--contact-sheet", help="Write an image of all chosen frames.")] = None,
    decoder: shared.Decoder = "pyav",
    threads: shared.Threads = None,
    workers: shared.Workers = None,
    folder_fps: shared.FolderFps = None,
    max_pixels: shared.MaxPixels = None,
    max_frames: shared.MaxFrames = None,
    max_duration: shared.MaxDuration = None,
    max_bytes: shared.MaxBytes = None,
    timeout: shared.Timeout = None,
    max_read: shared.MaxRead = None,
    retries: shared.Retries = None,
    shard: shared.Shard = None,
    metrics: shared.Metrics = None,
    schemes: shared.Schemes = SelectOptions.schemes,  # type: ignore[assignment]
    engine: shared.Engine = "local",
    address: shared.Address = None,
) -> None:
    """Choose the frames of one video or of many.

    Exit code 1 if some of many failed. Of 100 videos or more, an estimate of the time and of the bytes read from
    addresses is printed when the first 8 are done.
    """
    given = locals()
    arguments = shared.select_arguments(given)
    on_ray = shared.check_engine(engine, address)
    chosen: Any = shared.policy_or_sampler(policy, sampler)
    if total is not None:
        _select_total(given, chosen)
    if at_least is not None:
        raise InvalidArgument(f"--at-least {at_least} is for --total, one budget for all videos; add that")
    if device is not None and query is not None:
        from sosampler.policies.query import query_policy

        if on_ray:
            raise InvalidArgument(f"--device {device} does not go with --query and --engine ray; leave it out")
        chosen = query_policy(query, query_model, chosen, device=device)
    elif device is not None and not on_ray:
        from sosampler.policies.registry import get_policy

        chosen = get_policy(chosen or DEFAULT_POLICY, device=device)
        if not chosen.has_weights:
            raise InvalidArgument(
                f"--device {device} is for trained samplers, not for the policy {chosen.name!r}; leave it out"
            )
    options = SelectOptions(policy=chosen, **arguments)
    place, upload = shared.place_of(out, overwrite=overwrite)
    work: Any
    if on_ray:
        place = shared.check_ray_out(
            place, "selections", overwrite=overwrite, save_frames=frames_folder, contact_sheet=sheet
        )
        from sosampler.integrations.ray.cluster import RaySettings
        from sosampler.integrations.ray.rows import select_on_ray

        settings = RaySettings(address, decoders=workers)
        work = partial(select_on_ray, out=place, options=options, settings=settings, device=device, overwrite=overwrite)
    else:
        from sosampler.inference.many import SelectJob

        work = SelectJob(options, place, frames_folder, image_format, sheet, workers, overwrite).run
    from sosampler.video.discover import listed_videos

    paths = shared.shard_of(listed_videos(videos, leave_out=frames_folder, schemes=options.schemes), shard)
    if upload is not None:
        work = upload.after(work)
    shared.run_and_report(work, paths, "selections", json_output=json_output, on_ray=on_ray, metrics=metrics)


# Options of `select` that do not go with one budget for all videos, which writes a folder of images.
_NOT_WITH_TOTAL = (
    *("num_frames", "auto_min", "auto_max", "auto_tolerance", "query", "query_model"),
    *("device", "frames_folder", "sheet", "address", "shard", "metrics"),
)


def _select_total(given: dict[str, Any], policy: Any) -> NoReturn:
    """Run `select --total` and exit: with code 1 if some videos failed."""
    defaults = {"on_short": SelectOptions.on_short, "decode": True, "engine": "local"}
    wrong = list(shared.given(given, *_NOT_WITH_TOTAL))
    wrong += [name for name, value in defaults.items() if given[name] != value]
    wrong += ["schemes"] if given["schemes"] else []
    if wrong:
        flags = {
            "frames_folder": "--save-frames",
            "sheet": "--contact-sheet",
            "decode": "--no-decode",
            "schemes": "--allow-scheme",
        }
        name = flags.get(wrong[0], f"--{wrong[0].replace('_', '-')}")
        raise InvalidArgument(f"{name} does not go with --total, one budget for all videos; leave one of them out")
    from sosampler.video.remote import is_address

    if given["out"] is None:
        raise InvalidArgument(f"--total {given['total']} writes images; give a folder for them with --out FOLDER")
    if is_address(given["out"]):
        raise InvalidArgument(f"--total {given['total']} writes a folder of images; give one here, not an address")
    from sosampler.inference.total import FAILED, FRAMES, SET_HERE, select_total

    out, json_output = Path(given["out"]), given["json_output"]
    with shared.show_progress("videos", lines=False) as show:
        done = select_total(
            given["videos"],
            given["total"],
            out=out,
            at_least=given["at_least"] or 0,
            image_format=given["image_format"],
            workers=given["workers"],
            overwrite=given["overwrite"],
            on_progress=show,
            policy=policy,
            **shared.without(shared.select_arguments(given), *SET_HERE),
        )
    text = f"{len(done)} of {done.num_candidates} candidates of {done.num_videos} videos; see {out / FRAMES}"
    shared.echo(done.to_dict(), text, json_output)
    for note in done.notes:
        shared.say(f"note: {note}")
    if done.video_notes:
        example = done.video_notes[0]["notes"][0]
        shared.say(f"{len(done.video_notes)} of {done.num_videos} videos have notes, such as: {example}")
    shared.say_failures(done.failures)
    if done.failures:
        shared.say(f"{len(done.failures)} of {done.num_videos} videos failed; the rest are done; see {out / FAILED}")
    raise typer.Exit(1 if done.failures else 0)


def classify_command(
    videos: shared.Videos,
    classifier: Annotated[str, Option("--classifier", "-c", help="Folder of a saved classifier, or the name of one.")],
    sampler: shared.Sampler = None,
    policy: Annotated[str | None, Option(help=f"Or a policy, as in select.  [default: {_CLASSIFY_POLICY}]")] = None,
    num_frames: Annotated[
        str | None,
        shared.num_frames_option("Frames that the classifier sees; auto: the sampler decides.  [default: 6]"),
    ] = None,
    auto_min: shared.AutoMin = None,
    auto_max: shared.AutoMax = None,
    auto_tolerance: shared.AutoTolerance = None,
    auto_sure: shared.AutoSure = None,
    answer: shared.Answer = None,
    num_candidates: Annotated[int, Option("-t", "--num-candidates", help="Frames to choose from.")] = 10,
    top: Annotated[int, Option(help="How many classes to list.")] = 5,
    candidates: shared.Candidates = None,
    grid: shared.Grid = SelectOptions.grid,
    start: shared.Start = None,
    end: shared.End = None,
    on_short: shared.OnShort = SelectOptions.on_short,
    snap_tolerance: shared.SnapTolerance = SelectOptions.snap_tolerance,
    seed: shared.Seed = SelectOptions.seed,
    size: Annotated[int | None, Option(help="Short side of the frames.  [default: at least 256, by network]")] = None,
    weights: shared.Weights = None,
    option: shared.ClassifierOption = None,
    input_size: shared.InputSize = None,
    device: shared.Device = None,
    precision: Annotated[str | None, Option(help="float32, bfloat16, float16, or int8 after `quantize`.")] = None,
    batch_size: Annotated[int, Option(help="Videos in one call of the classifier.")] = 8,
    threads: shared.Threads = None,
    workers: shared.Workers = None,
    decoder: shared.Decoder = "pyav",
    folder_fps: shared.FolderFps = None,
    max_pixels: shared.MaxPixels = None,
    max_frames: shared.MaxFrames = None,
    max_duration: shared.MaxDuration = None,
    max_bytes: shared.MaxBytes = None,
    timeout: shared.Timeout = None,
    max_read: shared.MaxRead = None,
    retries: shared.Retries = None,
    shard: shared.Shard = None,
    metrics: shared.Metrics = None,
    schemes: shared.Schemes = SelectOptions.schemes,  # type: ignore[assignment]
    out: shared.Out = None,
    overwrite: shared.Replace = False,
    json_output: shared.Json = False,
    engine: shared.Engine = "local",
    address: shared.Address = None,
) -> None:
    """Classify videos from a few frames of each.

    Exit code 1 if some of many failed. Of 100 videos or more, an estimate of the time and of the bytes read from
    addresses is printed when the first 8 are done.
    """
    given = locals()
    arguments = shared.select_arguments(given)
    chosen = shared.policy_or_sampler(policy, sampler) or _CLASSIFY_POLICY
    on_ray = shared.check_engine(engine, address)
    from sosampler._util.hardware import import_torch
    from sosampler.inference.rows import check_out
    from sosampler.video.discover import listed_videos

    place, upload = shared.place_of(out, overwrite=overwrite)
    checked: Any = shared.check_ray_out if on_ray else check_out
    target: Any = checked(place, "predictions", overwrite=overwrite) if on_ray or place is not None else None
    paths = shared.shard_of(listed_videos(videos, schemes=arguments["schemes"]), shard)
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
        answer=answer,
        auto_sure=auto_sure,
        **arguments,
    )
    work: Any
    if on_ray:
        from sosampler.integrations.ray.cluster import RaySettings
        from sosampler.integrations.ray.rows import classify_on_ray

        settings = RaySettings(address, decoders=workers, batch_size=batch_size)
        work = partial(
            classify_on_ray, out=target, pipeline=pipeline, settings=settings, device=device, overwrite=overwrite
        )
    else:
        from sosampler.inference.many import classify_videos

        work = partial(classify_videos, pipeline, out=target, overwrite=overwrite)
    if upload is not None:
        work = upload.after(work)
    shared.run_and_report(work, paths, "predictions", json_output=json_output, on_ray=on_ray, metrics=metrics)
