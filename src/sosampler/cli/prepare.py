"""`sosampler prepare` and `sosampler bank`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from sosampler._util.text import escaped
from sosampler.cli import options as shared
from sosampler.errors import InvalidArgument

_OF_CLASSIFIER = ("weights", "input_size", "precision")
_OF_FRAMES = (
    *("num_candidates", "fps", "size", "quality", "candidates", "grid", "seed", "folder_fps", "classes", "root"),
    *("exclusive", "audio", "videos_per_shard", "retry_failed"),
)


def prepare_command(
    manifest: Annotated[
        Path | None,
        Argument(
            help="A CSV or JSONL with path and label, or a folder of class folders. "
            "Left out: run a classifier on the bank that is there."
        ),
    ] = None,
    out: Annotated[Path, Option(help="The bank's folder; a run that was killed resumes.")] = Path("bank"),
    classifier: Annotated[
        str | None, Option("--classifier", "-c", help="Name, or folder of a saved one; without it, frames only.")
    ] = None,
    weights: shared.Weights = None,
    option: shared.ClassifierOption = None,
    input_size: shared.InputSize = None,
    precision: shared.Precision = None,
    device: Annotated[str | None, Option(help="Where it runs: cpu, cuda, ...")] = None,
    num_candidates: Annotated[
        int | None, Option("-t", "--num-candidates", help="Frames stored of each video.  [default: 64]")
    ] = None,
    fps: Annotated[float | None, Option(help="Store frames at this rate instead.")] = None,
    size: Annotated[int, Option(help="Short side of the stored frames; never enlarged.")] = 256,
    quality: Annotated[int, Option(help="Of the JPEGs, 1 to 100.")] = 90,
    candidates: Annotated[str, Option(help="exact, keyframe (many times faster), snap or auto.")] = "exact",
    grid: shared.Grid = "uniform",
    seed: Annotated[int, Option(help="For --grid stratified.")] = 0,
    folder_fps: shared.FolderFps = None,
    classes: Annotated[Path | None, Option(help="Class list, one name a line.  [default: beside the manifest]")] = None,
    root: Annotated[Path | None, Option(help="Where relative paths of the manifest start.")] = None,
    exclusive: shared.Exclusive = None,
    features: Annotated[bool, Option(help="Also store the features that a pooled classifier averages.")] = True,
    probe_features: Annotated[
        bool,
        Option("--probe-features", help="Also store the input of its class layer, from which train learns a probe."),
    ] = False,
    audio: Annotated[
        bool, Option("--audio", help="Also store the sound around each frame, also of a bank that is there.")
    ] = False,
    batch: Annotated[int | None, Option(help="Frames per batch of the network.")] = None,
    workers: Annotated[int | None, Option(help="Decoding processes.  [default: cores, fewer for large frames]")] = None,
    videos_per_shard: Annotated[int, Option(help="Videos in a file of the bank.")] = 32,
    retry_failed: Annotated[bool, Option("--retry-failed", help="Try failed videos again.")] = False,
    max_pixels: shared.MaxPixels = None,
    max_frames: shared.MaxFrames = None,
    max_duration: shared.MaxDuration = None,
    max_bytes: shared.MaxBytes = None,
    timeout: shared.Timeout = None,
    json_output: shared.Json = False,
    engine: Annotated[str, Option(help="local, or ray: on a cluster that shares the bank's folder.")] = "local",
    address: shared.Address = None,
) -> None:
    """Decode the videos of a data set once and run a classifier on each frame once. Exit code 1 if some failed."""
    options = locals()
    arguments = shared.given(options, *_OF_FRAMES) | {"limits": shared.limits_of(options)}
    settings = shared.given(options, *_OF_CLASSIFIER)
    stray = [f"--{name.replace('_', '-')}" for name in shared.given(options, *_OF_CLASSIFIER, "device")]
    if probe_features and classifier is None:
        stray.append("--probe-features")
    if classifier is None and (stray or option):
        raise InvalidArgument(
            f"{', '.join(stray or ['--option'])} configures a classifier, but none is given; add --classifier"
        )
    settings |= shared.key_values(option)
    annotation: dict[str, Any] = {"features": features, "batch": batch}
    from sosampler.bank.inspect import bank_info, count_silent

    if shared.check_engine(engine, address):
        from sosampler.integrations.ray.bank import Teacher, prepare_on_ray
        from sosampler.integrations.ray.cluster import RaySettings

        if probe_features:
            raise InvalidArgument(
                "--probe-features is for --engine local; add them later: sosampler bank add-features BANK --features "
                "classifier=FOLDER"
            )
        network = None if classifier is None else Teacher(classifier, settings, **annotation)
        cluster = RaySettings(address, decoders=workers)
        with shared.show_progress("preparing") as on_progress:
            bank = prepare_on_ray(
                manifest, network, out, settings=cluster, device=device, on_progress=on_progress, **arguments
            )
    else:
        from sosampler import create_classifier
        from sosampler.bank.prepare import prepare

        loaded = None if classifier is None else create_classifier(classifier, device=device, **settings)
        with shared.show_progress("preparing") as on_progress:
            annotation["probe_features"] = probe_features
            bank = prepare(manifest, loaded, out, workers=workers, on_progress=on_progress, **annotation, **arguments)
    failures = bank.failures
    info = bank_info(out)
    for teacher in info["teachers"]:
        if teacher["complete"] and (remark := bank.teacher(teacher["folder"]).remark()):
            shared.say(f"note: {remark}")
    if json_output:
        typer.echo(json.dumps({**info, "failures": failures}))
    else:
        typer.echo(f"{bank!r}")
        if audio and (silent := count_silent(bank)):
            shared.say(f"{silent} of {len(bank)} videos have no sound; the notes of Bank.audio() say why")
        shared.say_failures(failures)
        if failures:
            shared.say(
                f"{len(failures)} of {bank.header.num_items} videos failed, see {bank.folder.failed_jsonl}; "
                "--retry-failed tries them again"
            )
    raise typer.Exit(1 if failures else 0)


# ---- `sosampler bank`

app = typer.Typer(
    help="Inspect, check and copy a bank that `prepare` wrote.", no_args_is_help=True, rich_markup_mode=None
)

BankArgument = Annotated[Path, Argument(help="The bank's folder.")]


@app.command("info")
def info_command(bank: BankArgument, json_output: shared.Json = False) -> None:
    """Show videos, classes, splits, settings, teachers, features and size."""
    from sosampler.bank.inspect import bank_info

    info = bank_info(bank)
    shared.echo(info, _described(info), json_output)


@app.command("verify")
def verify_command(bank: BankArgument, json_output: shared.Json = False) -> None:
    """Read all files and report what is damaged or missing; exit code 1 if something is."""
    from sosampler.bank.inspect import verify_bank

    problems = verify_bank(bank)
    result = {"path": str(bank), "sound": not problems, "problems": problems}
    shared.echo(result, "\n".join(map(escaped, problems)) or f"{bank}: sound", json_output)
    raise typer.Exit(1 if problems else 0)


@app.command("subset")
def subset_command(
    bank: BankArgument,
    out: Annotated[Path, Option(help="Folder for the smaller bank.")],
    limit: Annotated[int | None, Option(help="Max. number of videos, spread over classes.")] = None,
    classes: Annotated[list[str] | None, Option(help="Only videos of this class; may be repeated.")] = None,
    splits: Annotated[list[str] | None, Option("--split", help="Only train, dev or test; may be repeated.")] = None,
    max_mb: Annotated[float | None, Option(help="Max. size on disk in megabytes.")] = None,
    json_output: shared.Json = False,
) -> None:
    """Copy some of the videos into a smaller bank."""
    options = shared.without(locals(), "json_output")
    from sosampler.bank.from_arrays import subset

    with shared.show_progress("copying") as on_progress:
        subset(**options, on_progress=on_progress)
    info_command(out, json_output)


@app.command("add-features")
def add_features_command(
    bank: BankArgument,
    features: Annotated[
        list[str],
        Option(help="NAME=FOLDER of a saved classifier or of a sampler without shift; repeatable, in one pass."),
    ],
    device: Annotated[str | None, Option(help="Where the networks run: cpu, cuda, ...")] = None,
    batch: Annotated[int | None, Option(help="Frames per batch of a network.")] = None,
    precision: Annotated[str, Option(help="In which features are stored: float16 or float32.")] = "float16",
    json_output: shared.Json = False,
) -> None:
    """Store features of networks for every frame. Run again, a run that was killed resumes."""
    networks = shared.named_sources(features)
    from sosampler.bank.prepare import add_features

    with shared.show_progress("features") as on_progress:
        add_features(bank, networks, device=device, batch=batch, precision=precision, on_progress=on_progress)
    info_command(bank, json_output)


def _described(info: dict[str, Any]) -> str:
    splits = ", ".join(f"{count} {name}" for name, count in info["splits"].items())
    shards = info["shards"]
    state = "" if info["complete"] else f"  NOT FINISHED: {shards['finished']} of {shards['total']} shards"
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
    if audio := info["audio"]:
        silent = f", {audio['num_silent']} videos without sound" if audio["complete"] else ", NOT FINISHED"
        lines.append(
            f"  sound {audio['name']}: {audio['bands']} bands x {audio['columns']} columns for the "
            f"{audio['seconds']:g} s around each frame, {audio['bytes'] / 1e6:.1f} MB{silent}"
        )
    return "\n".join(map(escaped, lines))
