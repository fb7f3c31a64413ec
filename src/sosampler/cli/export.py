"""`sosampler export` and `sosampler quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from sosampler.cli import options as shared
from sosampler.errors import InvalidArgument


def export_command(
    sampler: Annotated[str, Argument(metavar="RUN", help="Folder of a trained sampler, or its id on Hugging Face.")],
    format: Annotated[str, Option("--format", "-f", help="onnx.")] = "onnx",
    out: Annotated[Path | None, Option("--out", "-o", help=".onnx file or folder.  [default: RUN/model.onnx]")] = None,
    half: Annotated[bool, Option("--half", help="Round weights to half precision: a file of half the size.")] = False,
    overwrite: shared.Replace = False,
    json_output: shared.Json = False,
) -> None:
    """Export a trained sampler to ONNX, for any number of videos and candidates.

    `select --policy RUN` runs model.onnx of the sampler's folder where torch is not installed.
    """
    if format != "onnx":  # checked before torch is imported
        raise InvalidArgument(f"--format {format} must be onnx; other runtimes read such a file")
    from sosampler._util.files import check_replaceable
    from sosampler.samplers.export import export_sampler
    from sosampler.samplers.onnx_sampler import ABOUT

    if out is not None:
        # The key of the metadata that `export` writes.
        check_replaceable(
            out, "an exported sampler", lambda file: ABOUT.encode() in file.read_bytes(), overwrite=overwrite
        )
    done = export_sampler(sampler, format=format, out=out, half=half)
    text = f"{done.file}: {done.bytes / 1e6:.1f} MB; its scores differ from torch's by {done.difference:.1e} at most"
    shared.echo(done.to_dict(), text, json_output, err=True)


def quantize_command(
    classifier: Annotated[str, Argument(help="Folder of a saved classifier, or the name of one.")],
    bank: Annotated[Path | None, Option("--bank", "-b", help="Calibrate on training videos of this bank.")] = None,
    videos: Annotated[list[str] | None, Option(help="Calibrate on these videos, as in classify; repeatable.")] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="Folder to write.  [default: the classifier's own]")] = None,
    weights: shared.Weights = None,
    num_frames: Annotated[int, Option("--num-frames", "-n", min=1, help="Calibration frames.")] = 256,
    json_output: shared.Json = False,
) -> None:
    """Quantize a classifier to int8 for fast inference on a CPU, used by `classify --precision int8`.

    Activation ranges come from frames, which should be like those it will see. A quarter of the frames is held out to
    compare int8 with float32.
    """
    if (bank is None) == (not videos):
        raise InvalidArgument("--bank or --videos must be given, and not both; they hold the calibration frames")
    from sosampler.bank.inspect import bank_frames, video_frames
    from sosampler.engine.quantize import quantize_classifier
    from sosampler.inference.pipeline import load_classifier
    from sosampler.policies.learned import min_short_side
    from sosampler.video.discover import listed_videos

    network: Any = load_classifier(classifier, device="cpu", weights=weights)
    if bank is not None:
        frames = bank_frames(bank, num_frames)
    else:
        frames = video_frames(listed_videos(videos or []), num_frames, min_short_side(network.preprocessing))
    done = quantize_classifier(network, frames, out)
    text = (
        f"{done.file}: {done.bytes / 1e6:.1f} MB from {done.num_frames} frames; of {done.num_compared} others it names "
        f"the same class as float32 for {100 * done.same_class:.1f} %"
    )
    shared.echo(done.to_dict(), text, json_output, err=True)
