"""`sosampler bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sosampler.bench import optimal, pipeline, sampler, train

app = typer.Typer(help="Measure speed, as ratios in one run.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass  # makes `bench` a group even while it has few commands


@app.command("decode")
def decode_command(
    clips: Annotated[list[Path], typer.Argument(help="Natural videos; each is looped to five minutes of 720p.")],
    work: Annotated[Path, typer.Option("--work", help="Folder for the videos; they are used again.")] = Path(".bench"),
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often everything is timed.")] = 3,
    hour: Annotated[bool, typer.Option("--hour/--no-hour", help="Also measure memory on a one-hour video.")] = True,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result as JSON.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode candidates: keyframe and exact, against torchcodec exact. Takes minutes, mostly to encode the videos."""
    check_files(clips)
    from sosampler.bench.decode import bench_decode, table

    result = bench_decode(clips, work=work, rounds=rounds, hour=hour, say=lambda text: typer.echo(text, err=True))
    give(result, table(result), out, json_output)


@app.command("resize")
def resize_command(
    clip: Annotated[Path, typer.Argument(help="A natural video.")],
    size: Annotated[int, typer.Option("--size", min=1, help="Short side.")] = 256,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result as JSON.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Shrink frames: swscale in one pass, PIL and torch."""
    check_files([clip])
    from sosampler.bench.resize import bench_resize

    result = bench_resize(clip, size=size)
    lines = [
        f"{name:<8}{took:8.3f} ms a frame, mean difference to PIL {result['mean_difference_to_PIL'].get(name, 0.0):.3f}"
        for name, took in result["milliseconds_a_frame"].items()
    ]
    give(result, "\n".join(lines), out, json_output)


@app.command("prepare")
def prepare_command(
    clips: Annotated[list[Path], typer.Argument(help="Natural videos, used in turns.")],
    classifier: Annotated[str, typer.Option("--classifier", "-c", help="Its weights are random.")] = "resnet50",
    videos: Annotated[int, typer.Option("--videos", min=1, help="How many go into the bank.")] = 12,
    work: Annotated[Path, typer.Option("--work", help="Folder for the bank while it is timed.")] = Path(".bench"),
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often everything is timed.")] = 3,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result as JSON.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prepare a bank with 1 and 2 workers, against a plain loop: decode, then classify, video by video."""
    check_files(clips)
    from sosampler.bench.prepare import bench_prepare, table

    result = bench_prepare(
        clips,
        classifier=classifier,
        work=work,
        videos=videos,
        rounds=rounds,
        say=lambda text: typer.echo(text, err=True),
    )
    give(result, table(result), out, json_output)


def check_files(clips: list[Path]) -> None:
    """Whether they are videos, before anything is encoded."""
    from sosampler.errors import VideoError
    from sosampler.video.source import open_video

    for clip in clips:
        if clip.is_dir():
            raise VideoError(f"{clip}: is a folder; give a natural video to measure with")
        open_video(clip).close()  # says what is wrong with it before anything is encoded


def give(result: dict[str, Any], text: str, out: Path | None, json_output: bool) -> None:
    """Print a result, and write it where that was asked for."""
    from sosampler._util.files import replacing

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    typer.echo(json.dumps(result) if json_output else text)


_give = give

for _module in (sampler, pipeline, train, optimal):  # each knows its own options; all of them import little
    _module.add_to(app)
