"""`sosampler bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Measure speed on your machine, as ratios in one run.", no_args_is_help=True, rich_markup_mode=None
)

Clips = Annotated[list[Path], typer.Argument(help="Natural videos; each is looped to five minutes of 720p.")]
Work = Annotated[Path, typer.Option("--work", help="Folder for the videos; they are used again.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="How often everything is timed.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write the result into this JSON file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("decode")
def decode_command(
    clips: Clips,
    work: Work = Path(".bench"),
    rounds: Rounds = 3,
    hour: Annotated[bool, typer.Option("--hour/--no-hour", help="Also measure memory on a one-hour video.")] = True,
    out: Out = None,
    json_output: Json = False,
) -> None:
    """Decode candidates, against torchcodec.

    Keyframe and exact candidates are timed. It takes minutes, mostly to encode the videos.
    """
    _check_files(clips)
    from sosampler.bench.decode import bench_decode, table

    result = bench_decode(clips, work=work, rounds=rounds, hour=hour, say=lambda text: typer.echo(text, err=True))
    _write(result, table(result), out, json_output)


@app.command("pipeline")
def pipeline_command(
    clips: Clips,
    sampler: Annotated[Path | None, typer.Option("--sampler", "-s", help="Folder of a trained sampler.")] = None,
    classifier: Annotated[
        Path | None, typer.Option("--classifier", "-c", help="Folder of its classifier.  [default: a random ResNet-50]")
    ] = None,
    reels: Annotated[
        Path | None, typer.Option("--reels", help="Folder of `sosampler reels --to mp4`, for the accuracy.")
    ] = None,
    work: Work = Path(".bench"),
    rounds: Rounds = 3,
    streamed: Annotated[int, typer.Option("--streamed", min=0, help="Videos for one and two decoders.")] = 24,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, ...; default: the GPU if there is one.")
    ] = None,
    out: Out = None,
    json_output: Json = False,
) -> None:
    """Go from file to label, against uniform frames.

    Keyframe candidates and a sampler are compared with uniform frames and the same classifier.
    """
    _check_files(clips)
    from sosampler.bench.pipeline import bench_pipeline, table

    result = bench_pipeline(
        clips,
        sampler=sampler,
        classifier=classifier,
        reels=reels,
        work=work,
        rounds=rounds,
        streamed=streamed,
        device=device,
        say=lambda text: typer.echo(text, err=True),
    )
    _write(result, table(result), out, json_output)


def _check_files(clips: list[Path]) -> None:
    """Raise where one is no video, before anything is encoded."""
    from sosampler.errors import VideoError
    from sosampler.video.source import open_video

    for clip in clips:
        if clip.is_dir():
            raise VideoError(f"{clip}: is a folder; give a natural video to measure with")
        open_video(clip).close()


def _write(result: dict[str, Any], text: str, out: Path | None, json_output: bool) -> None:
    """Print a result, and write it where --out is given."""
    from sosampler._util.files import replacing

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    typer.echo(json.dumps(result) if json_output else text)
