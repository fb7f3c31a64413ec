"""`sosampler bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from sosampler.cli import options as shared

app = typer.Typer(
    help="Measure speed on your machine, as ratios in one run.", no_args_is_help=True, rich_markup_mode=None
)

Clips = Annotated[list[Path], Argument(help="Natural videos; each is looped to five minutes of 720p.")]
Work = Annotated[Path, Option("--work", help="Folder for the videos; they are used again.")]
Rounds = Annotated[int, Option("--rounds", min=1, help="How often everything is timed.")]
Out = Annotated[Path | None, Option("--out", "-o", help="Write the result into this JSON file.")]


@app.command("decode")
def decode_command(
    clips: Clips,
    work: Work = Path(".bench"),
    rounds: Rounds = 3,
    hour: Annotated[bool, Option("--hour/--no-hour", help="Also measure memory on a one-hour video.")] = True,
    out: Out = None,
    overwrite: shared.Replace = False,
    json_output: shared.Json = False,
) -> None:
    """Decode candidates, against torchcodec.

    Keyframe and exact candidates are timed. It takes minutes, mostly to encode the videos.
    """
    _check_files(clips, out, overwrite)
    from sosampler.bench.decode import bench_decode, table

    result = bench_decode(clips, work=work, rounds=rounds, hour=hour, say=shared.say)
    _write(result, table(result), out, json_output)


@app.command("select")
def select_command(
    clips: Clips,
    peers: Annotated[
        Path | None, Option(help="A Python with PySceneDetect and video-sampler, to measure these too.")
    ] = None,
    work: Work = Path(".bench"),
    rounds: Rounds = 3,
    out: Out = None,
    overwrite: shared.Replace = False,
    json_output: shared.Json = False,
) -> None:
    """Choose frames, against other tools.

    Kinds of candidates are timed, a bare loop that decodes the same ones, and ffmpeg's thumbnail filter.
    """
    _check_files(clips, out, overwrite)
    from sosampler.bench.select import bench_select, table

    result = bench_select(clips, work=work, rounds=rounds, peers=peers, say=shared.say)
    _write(result, table(result), out, json_output)


@app.command("pipeline")
def pipeline_command(
    clips: Clips,
    sampler: Annotated[Path | None, Option("--sampler", "-s", help="Folder of a trained sampler.")] = None,
    classifier: Annotated[
        Path | None, Option("--classifier", "-c", help="Folder of its classifier.  [default: a random ResNet-50]")
    ] = None,
    reels: Annotated[Path | None, Option(help="Folder of `sosampler reels --to mp4`, for the accuracy.")] = None,
    work: Work = Path(".bench"),
    rounds: Rounds = 3,
    streamed: Annotated[int, Option(min=0, help="Videos for one and two decoders.")] = 24,
    device: shared.Device = None,
    out: Out = None,
    overwrite: shared.Replace = False,
    json_output: shared.Json = False,
) -> None:
    """Go from file to label, against uniform frames.

    Keyframe candidates and a sampler are compared with uniform frames and the same classifier.
    """
    options = shared.without(locals(), "out", "overwrite", "json_output")
    _check_files(clips, out, overwrite)
    from sosampler.bench.pipeline import bench_pipeline, table

    result = bench_pipeline(**options, say=shared.say)
    _write(result, table(result), out, json_output)


def _check_files(clips: list[Path], out: Path | None, overwrite: bool) -> None:
    """Raise where one is no video, or --out holds something else, before anything is encoded."""
    from sosampler._util.files import check_replaceable, is_json_with
    from sosampler.errors import VideoError
    from sosampler.video.source import open_video

    for clip in clips:
        if clip.is_dir():
            raise VideoError(f"{clip}: is a folder; give a natural video to measure with")
        open_video(clip).close()
    if out is not None:
        check_replaceable(out, "a benchmark", is_json_with("machine", "versions"), overwrite=overwrite)


def _write(result: dict[str, Any], text: str, out: Path | None, json_output: bool) -> None:
    """Print a result, and write it where --out is given."""
    from sosampler._util.files import write_text

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(result, indent=1) + "\n")
    shared.echo(result, text, json_output)
