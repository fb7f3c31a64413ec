"""`sosampler prepare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sosampler.cli.options import ADDRESS_HELP, check_engine


def prepare_command(
    manifest: Annotated[
        Path | None,
        typer.Argument(
            help="A CSV or JSONL with path and label, or a folder of class folders. "
            "Left out: run a classifier on the bank that is there."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The bank's folder; a run that was killed resumes.")] = Path(
        "bank"
    ),
    classifier: Annotated[
        str | None, typer.Option("--classifier", "-c", help="Name, or folder of a saved one; without it, frames only.")
    ] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="A file with the classifier's weights.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="KEY=VALUE of the classifier, e.g. head=frameexit.")
    ] = None,
    input_size: Annotated[int | None, typer.Option("--input-size", help="Height and width of its input.")] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="Where it runs: cpu, cuda, ...")] = None,
    num_candidates: Annotated[
        int | None, typer.Option("-t", "--num-candidates", help="Frames stored of each video.  [default: 64]")
    ] = None,
    fps: Annotated[float | None, typer.Option("--fps", help="Store frames at this rate instead.")] = None,
    size: Annotated[int, typer.Option("--size", help="Short side of the stored frames; never enlarged.")] = 256,
    quality: Annotated[int, typer.Option("--quality", help="Of the JPEGs, 1 to 100.")] = 90,
    candidates: Annotated[
        str, typer.Option("--candidates", help="exact, keyframe (many times faster) or snap.")
    ] = "exact",
    grid: Annotated[
        str, typer.Option("--grid", help="Positions of the frames: uniform, linspace, stratified or jitter.")
    ] = "uniform",
    seed: Annotated[int, typer.Option("--seed", help="For --grid stratified.")] = 0,
    folder_fps: Annotated[float | None, typer.Option("--folder-fps", help="Rate of folders of frame images.")] = None,
    classes: Annotated[
        Path | None,
        typer.Option("--classes", help="The class list, one name per line.  [default: beside the manifest]"),
    ] = None,
    root: Annotated[Path | None, typer.Option("--root", help="Where relative paths of the manifest start.")] = None,
    features: Annotated[
        bool,
        typer.Option("--features/--no-features", help="Also store the features that a pooled classifier averages."),
    ] = True,
    batch: Annotated[int | None, typer.Option("--batch", help="Frames per batch of the network.")] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", help="Decoding processes.  [default: one per core, fewer for large frames]"),
    ] = None,
    videos_per_shard: Annotated[int, typer.Option("--videos-per-shard", help="Videos in a file of the bank.")] = 32,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try failed videos again.")] = False,
    max_pixels: Annotated[int | None, typer.Option("--max-pixels", help="Refuse larger frames.")] = None,
    max_frames: Annotated[int | None, typer.Option("--max-frames", help="Refuse videos with more frames.")] = None,
    max_duration: Annotated[
        float | None, typer.Option("--max-duration", help="Refuse longer videos (seconds).")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    engine: Annotated[
        str, typer.Option("--engine", help="local, or ray: on a cluster that shares the bank's folder.")
    ] = "local",
    address: Annotated[str | None, typer.Option("--address", help=ADDRESS_HELP)] = None,
) -> None:
    """Decode the videos of a data set once and run a classifier on each frame once. Exit code 1 if some failed."""
    from sosampler.bank.inspect import bank_info
    from sosampler.bank.prepare import prepare
    from sosampler.cli.options import show_progress
    from sosampler.video.limits import Limits

    given = {"max_pixels": max_pixels, "max_frames": max_frames, "max_duration": max_duration}
    limits = Limits(**{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    of_classifier = {"weights": weights, "input_size": input_size, "precision": precision}
    annotation: dict[str, Any] = {"features": features, "batch": batch}
    of_frames: dict[str, Any] = {
        "num_candidates": num_candidates,
        "fps": fps,
        "size": size,
        "quality": quality,
        "candidates": candidates,
        "grid": grid,
        "seed": seed,
        "folder_fps": folder_fps,
        "classes": classes,
        "root": root,
        "videos_per_shard": videos_per_shard,
        "retry_failed": retry_failed,
        "limits": limits,
    }
    named = _settings(classifier, option or [], **of_classifier, device=device)
    if check_engine(engine, address):
        from sosampler.integrations.ray.bank import Teacher, prepare_on_ray
        from sosampler.integrations.ray.cluster import RaySettings

        teacher = None if named is None else Teacher(*named, **annotation)
        cluster = RaySettings(address, decoders=workers)
        with show_progress("preparing") as tell:
            bank = prepare_on_ray(
                manifest, teacher, out, settings=cluster, device=device, on_progress=tell, **of_frames
            )
    else:
        from sosampler import create_classifier

        loaded = None if named is None else create_classifier(named[0], device=device, **named[1])
        with show_progress("preparing") as tell:
            bank = prepare(manifest, loaded, out, workers=workers, on_progress=tell, **annotation, **of_frames)
    failures = bank.failures
    if json_output:
        typer.echo(json.dumps({**bank_info(out), "failures": failures}))
    else:
        typer.echo(f"{bank!r}")
        for failure in failures[:10]:
            typer.echo(f"failed: {failure['error']}", err=True)
        if failures:
            typer.echo(
                f"{len(failures)} of {bank.header.num_items} videos failed, see {bank.folder.failed_jsonl}; "
                "--retry-failed tries them again",
                err=True,
            )
    raise typer.Exit(1 if failures else 0)


def _settings(name: str | None, options: list[str], **given: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the classifier's name or folder and the arguments of `create_classifier` but for the device."""
    from sosampler.errors import InvalidArgument

    stray = [f"--{key.replace('_', '-')}" for key, value in given.items() if value is not None]
    if name is None:
        if options or stray:
            raise InvalidArgument(
                f"{', '.join(stray or ['--option'])} configures a classifier, but none is given; add --classifier"
            )
        return None
    from sosampler.cli.options import key_values

    return name, {**{key: value for key, value in given.items() if key != "device"}, **key_values(options)}


# ---- `sosampler bank`

bank_app = typer.Typer(
    help="Inspect, check and copy a bank that `prepare` wrote.", no_args_is_help=True, rich_markup_mode=None
)

BankArgument = Annotated[Path, typer.Argument(help="The bank's folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@bank_app.command("info")
def info_command(bank: BankArgument, json_output: JsonOption = False) -> None:
    """Show videos, classes, splits, settings, teachers, features and size."""
    from sosampler.bank.inspect import bank_info

    info = bank_info(bank)
    typer.echo(json.dumps(info) if json_output else _described(info))


@bank_app.command("verify")
def verify_command(
    bank: BankArgument,
    json_output: JsonOption = False,
) -> None:
    """Read all files and report what is damaged or missing; exit code 1 if something is."""
    from sosampler.bank.inspect import verify_bank

    problems = verify_bank(bank)
    if json_output:
        typer.echo(json.dumps({"path": str(bank), "sound": not problems, "problems": problems}))
    else:
        typer.echo("\n".join(problems) if problems else f"{bank}: sound")
    raise typer.Exit(1 if problems else 0)


@bank_app.command("subset")
def subset_command(
    bank: BankArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder for the smaller bank.")],
    limit: Annotated[int | None, typer.Option("--limit", help="Max. number of videos, spread over classes.")] = None,
    classes: Annotated[
        list[str] | None, typer.Option("--classes", help="Only videos of this class; may be repeated.")
    ] = None,
    splits: Annotated[
        list[str] | None, typer.Option("--split", help="Only train, dev or test; may be repeated.")
    ] = None,
    max_mb: Annotated[float | None, typer.Option("--max-mb", help="Max. size on disk in megabytes.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Copy some of the videos into a smaller bank."""
    from sosampler.bank.from_arrays import subset
    from sosampler.bank.inspect import bank_info
    from sosampler.cli.options import show_progress

    with show_progress("copying") as on_progress:
        subset(
            bank,
            out,
            limit=limit,
            classes=classes or None,
            splits=splits or None,
            max_mb=max_mb,
            on_progress=on_progress,
        )
    info = bank_info(out)
    typer.echo(json.dumps(info) if json_output else _described(info))


def _described(info: dict[str, Any]) -> str:
    splits = ", ".join(f"{count} {name}" for name, count in info["splits"].items())
    state = (
        "" if info["complete"] else f"  NOT FINISHED: {info['shards']['finished']} of {info['shards']['total']} shards"
    )
    lines = [
        f"{info['path']}: {info['num_videos']} videos ({splits or 'none'}), {info['num_failed']} failed{state}",
        f"  {info['num_classes']} classes{', several per video' if info['multi_label'] else ''}: "
        + ", ".join(info["classes"][:8])
        + (", ..." if info["num_classes"] > 8 else ""),
        f"  {info['num_frames'] or 'unknown'} frames, {info['bytes'] / 1e6:.1f} MB, from {info['source']}",
        "  " + ", ".join(f"{key}={value}" for key, value in info["settings"].items() if value is not None),
    ]
    for teacher in info["teachers"]:
        stored = teacher["features"]
        features = f", {stored['width']} features in {stored['precision']}" if stored else ""
        lines.append(
            f"  teacher {teacher['folder']}: {teacher['name']}, views={teacher['views']}{features}, "
            f"{teacher['bytes'] / 1e6:.1f} MB{'' if teacher['complete'] else ', NOT FINISHED'}"
        )
    for features in info["features"]:
        lines.append(
            f"  features {features['name']}: {features['width']} in {features['precision']} of the "
            f"{features['network']} {features['network_name']}, {features['gmacs']:.3g} GMACs per frame, "
            f"{features['bytes'] / 1e6:.1f} MB{'' if features['complete'] else ', NOT FINISHED'}"
        )
    return "\n".join(lines)
