"""`export_sampler`: a trained sampler becomes a file for another runtime, compared with itself before it is kept."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sosampler.checks import one_of, true_or_false
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.export.formats import SUFFIXES, default_name
from sosampler.export.network import expected, on_cpu, output_names, trace, trial_frames
from sosampler.export.onnx_file import onnx_bytes
from sosampler.export.openvino_file import OpenVinoModel
from sosampler.files import replacing
from sosampler.samplers.onnx_sampler import INPUT, OnnxSampler, weights_digest
from sosampler.samplers.registry import load_sampler
from sosampler.samplers.sosampler import SOSampler

# Videos and candidates on which an exported network must say what its sampler says.
_TRIALS = ((1, 1), (2, 5))
# By how much its scores may differ, as a share of the largest of them or of 1.
_TOLERANCE = 1e-4

# Frames uint8 [B, T, 3, h, w] -> outputs by name.
Run = Callable[[np.ndarray], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Exported:
    """What was written, and how far it agrees with the sampler."""

    sampler: str
    format: str
    file: str
    files: tuple[str, ...]  # OpenVINO keeps weights in a second one
    bytes: int
    fingerprint: str  # of the weights that are in it
    inputs: dict[str, list[str | int]]  # name -> uint8 dimensions
    outputs: list[str]
    difference: float  # largest of a score from the sampler's own, on trial frames

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "files": list(self.files)}


def export_sampler(
    source: str | Path | SOSampler, *, format: str = "onnx", out: str | Path | None = None, half: bool = False
) -> Exported:
    """Write a trained sampler for another runtime, for any number of videos and candidates.

    The network takes frames uint8 [batch, candidates, 3, h, w] of the sampler's input size (`sampler.preprocessing`
    says how to bring them there) and gives scores, importance, class logits where it has a class head, and features.

    Args:
        source: the folder of a trained sampler, its id on the Hugging Face hub, or the sampler itself.
        format: "onnx", "torch-export" or "openvino".
        out: a file, or a folder for model.onnx, model.pt2 or model.xml; the sampler's own folder if not given. There
            model.onnx is what `select` runs where torch is not installed.
        half: round weights to half precision, for files of half the size; scores change a little. ONNX and OpenVINO.
    """
    one_of("format", format, SUFFIXES)
    if true_or_false("half", half) and format == "torch-export":
        raise InvalidArgument("half=True is for onnx and openvino, whose files can hold such weights; leave it out")
    path = _place(source, format, out)
    own_folder = Path(source) if not isinstance(source, SOSampler) and Path(source).is_dir() else None
    digest = None if own_folder is None else weights_digest(own_folder)
    sampler = source if isinstance(source, SOSampler) else load_sampler(source)
    rounded = on_cpu(sampler, half=half)
    write = {"onnx": _write_onnx, "torch-export": _write_program, "openvino": _write_openvino}[format]
    difference, files = write(rounded, path, digest)
    size = rounded.input_size
    return Exported(
        sampler="sosampler" if isinstance(source, SOSampler) else str(source),
        format=format,
        file=str(path),
        files=tuple(str(file) for file in files),
        bytes=sum(file.stat().st_size for file in files),
        fingerprint=rounded.fingerprint(),
        inputs={INPUT: ["batch", "candidates", 3, size, size]},
        outputs=output_names(rounded),
        difference=difference,
    )


def _write_onnx(sampler: SOSampler, path: Path, digest: str | None) -> tuple[float, list[Path]]:
    model = onnx_bytes(sampler, weights=digest)
    difference = _compare(sampler, OnnxSampler(model).run_network, path)
    with replacing(path) as temporary:
        temporary.write_bytes(model)
    return difference, [path]


def _write_program(sampler: SOSampler, path: Path, digest: str | None) -> tuple[float, list[Path]]:
    program = trace(sampler)
    names = output_names(sampler)
    with replacing(path) as temporary:
        torch.export.save(program, temporary)
        network = torch.export.load(temporary).module()

        def run(frames: np.ndarray) -> dict[str, np.ndarray]:
            with torch.no_grad():
                given = network(torch.from_numpy(frames))
            return {name: said.numpy() for name, said in zip(names, given, strict=True)}

        difference = _compare(sampler, run, path)
    return difference, [path]


def _write_openvino(sampler: SOSampler, path: Path, digest: str | None) -> tuple[float, list[Path]]:
    model = OpenVinoModel(onnx_bytes(sampler, weights=digest))
    difference = _compare(sampler, model.run, path)
    return difference, model.save(path)


def _compare(sampler: SOSampler, run: Run, path: Path) -> float:
    """The largest difference of a score; one that is too large ends the export."""
    largest = 0.0
    for videos, candidates in _TRIALS:
        frames = trial_frames(sampler, videos, candidates)
        wanted, found = expected(sampler, frames)["scores"], run(frames.numpy())["scores"]
        difference = float(np.abs(found - wanted).max())
        # Not "greater than": a NaN must not pass.
        if not difference <= _TOLERANCE * max(1.0, float(np.abs(wanted).max())):
            raise SosamplerError(
                f"{path}: was not written, because the exported network gives other scores than the sampler (they "
                f"differ by {difference:.2g}); try another format, or other versions of torch and the runtime"
            )
        largest = max(largest, difference)
    return largest


def _place(source: str | Path | SOSampler, format: str, out: str | Path | None) -> Path:
    """Where to write; found out before the work begins."""
    if out is None:
        if isinstance(source, SOSampler) or not Path(source).is_dir():
            what = "a sampler in memory" if isinstance(source, SOSampler) else f"{source}: is no folder here, and"
            raise InvalidArgument(f"{what} has no place for the exported file; say with out where to write it")
        out = source
    path = Path(out)
    if path.is_dir():
        path = path / default_name(format)
    if path.suffix != SUFFIXES[format]:
        raise InvalidArgument(
            f"out={str(out)!r}: files of format {format} end with {SUFFIXES[format]}; give such a name or a folder"
        )
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder; give another name for the exported file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InvalidArgument(
            f"{path}: cannot be written ({error.strerror or error}); give a place that can be with out"
        ) from error
    return path
