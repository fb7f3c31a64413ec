"""`sosampler export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sosampler.errors import InvalidArgument


def export_command(
    sampler: Annotated[
        str, typer.Argument(metavar="RUN", help="The folder of a trained sampler, or its id on the Hugging Face hub.")
    ],
    format: Annotated[str, typer.Option("--format", "-f", help="onnx, torch-export or openvino.")] = "onnx",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A file (.onnx, .pt2, .xml) or a folder.  [default: RUN/model.onnx, ...]"),
    ] = None,
    half: Annotated[
        bool, typer.Option("--half", help="Round weights to half precision: files of half the size.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a trained sampler for another runtime, for any number of videos and candidates.

    model.onnx in the sampler's own folder is what `select --policy RUN` runs where torch is not installed.
    """
    from sosampler._util.validation import one_of
    from sosampler.samplers.export import SUFFIXES

    one_of("--format", format, SUFFIXES)
    from sosampler.samplers.export import export_sampler

    done = export_sampler(sampler, format=format, out=out, half=half)
    if json_output:
        typer.echo(json.dumps(done.to_dict()))
    else:
        typer.echo(
            f"{done.file}: {done.bytes / 1e6:.1f} MB; its scores differ from torch's by {done.difference:.1e} at most",
            err=True,
        )


def quantize_command(
    classifier: Annotated[str, typer.Argument(help="Folder of a saved classifier, or the name of one.")],
    bank: Annotated[
        Path | None, typer.Option("--bank", "-b", help="Take frames of the training videos of this bank.")
    ] = None,
    videos: Annotated[
        list[str] | None,
        typer.Option("--videos", help="Take frames of videos, given as in classify; may be given several times."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write.  [default: the classifier's own]"),
    ] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="A file with the classifier's weights.")] = None,
    num_frames: Annotated[int, typer.Option("--num-frames", "-n", min=1, help="Frames to look at.")] = 256,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Bring a classifier to int8, in which a CPU runs it several times as fast; for `classify --precision int8`.

    The ranges of its values are taken from frames, which should be such as it will see. A quarter of them is kept
    aside, and on these the two are compared.
    """
    if (bank is None) == (not videos):
        raise InvalidArgument("--bank and --videos: give one of them, so that there are frames to take ranges from")
    from sosampler.bank.calibration import bank_frames, video_frames
    from sosampler.engine.quantize import quantize_classifier
    from sosampler.inference.pipeline import load_classifier
    from sosampler.policies.learned import least_size
    from sosampler.video.discover import listed_videos

    network: Any = load_classifier(classifier, device="cpu", weights=weights)
    if bank is not None:
        frames = bank_frames(bank, num_frames)
    else:
        assert videos, "checked above"
        frames = video_frames(listed_videos(videos), num_frames, least_size(network.preprocessing))
    done = quantize_classifier(network, frames, out)
    if json_output:
        typer.echo(json.dumps(done.to_dict()))
    else:
        typer.echo(
            f"{done.file}: {done.bytes / 1e6:.1f} MB from {done.num_frames} frames; of {done.num_compared} others it "
            f"names the same class as float32 for {100 * done.same_class:.1f} %",
            err=True,
        )
