"""Export a trained sampler to ONNX, for any number of videos and candidates."""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sosampler import __version__
from sosampler._util.files import replacing
from sosampler._util.locks import locked_file
from sosampler._util.validation import check_bool
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError
from sosampler.samplers.onnx_sampler import ABOUT, DECORATION, FORMAT, INPUT, OnnxSampler, weights_digest
from sosampler.samplers.registry import MODEL, load_sampler
from sosampler.samplers.sosampler import SOSampler


class DeployedSampler(nn.Module):
    """Normalise and score frames. Resizing and cropping stay outside: they are cheaper where frames are decoded."""

    def __init__(self, sampler: SOSampler) -> None:
        super().__init__()
        self.sampler = sampler
        self.register_buffer("pixel_mean", torch.tensor(sampler.preprocessing.mean).view(3, 1, 1))
        self.register_buffer("pixel_std", torch.tensor(sampler.preprocessing.std).view(3, 1, 1))

    def forward(self, frames: Tensor) -> tuple[Tensor, ...]:
        """uint8 [B, T, 3, h, w] -> the outputs of `output_names`, in that order."""
        output = self.sampler((frames.float() / 255 - self.pixel_mean) / self.pixel_std)
        # Two outputs may be one tensor, which graphs cannot name twice.
        output = output._replace(scores=output.scores.clone(), importance=output.importance.clone())
        return tuple(tensor for tensor in output if tensor is not None)


def output_names(sampler: SOSampler) -> list[str]:
    """Return the names of the graph's outputs; class logits only where the sampler has a class head."""
    class_logits = [] if sampler.class_head is None else ["class_logits"]
    return ["scores", "importance", *class_logits, "features"]


def on_cpu(sampler: SOSampler, *, half: bool = False) -> SOSampler:
    """Return a frozen copy in float32; `half` rounds its weights to values that half precision can hold."""
    copied: SOSampler = copy.deepcopy(sampler).cpu().float().freeze()
    copied.precision = "float32"
    if half:
        for parameter in copied.parameters():
            if parameter.ndim > 1:  # of convolutions and linear layers: the rest is small, and norms need their range
                rounded = parameter.half().float()
                parameter.copy_(torch.where(rounded.isfinite(), rounded, parameter))  # out of range: unchanged
    return copied


def trace(sampler: SOSampler) -> ExportedProgram:
    """Trace the network with free batch and candidate dimensions. The sampler comes from `on_cpu`."""
    # A dimension of one would be traced as a constant.
    example = torch.zeros(2, 3, 3, sampler.input_size, sampler.input_size, dtype=torch.uint8)
    free = {INPUT: {0: Dim("batch", min=1), 1: Dim("candidates", min=1)}}
    with torch.no_grad():
        program: ExportedProgram = torch.export.export(
            DeployedSampler(sampler).eval(), (example,), dynamic_shapes=free, strict=False
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # names files of the machine that exports
    return program


_WORTH_HALVING = 256  # smaller tensors are not worth a cast node of their own


def onnx_bytes(sampler: SOSampler, *, weights: str | None = None) -> bytes:
    """Return the ONNX file's bytes. Batch and candidates are free dimensions; the input is uint8 at the input size.

    Weights that half precision holds exactly are stored as float16, which halves the file of a rounded sampler.
    `weights` is the digest of the weights file that the network belongs to, if it lies in a sampler's folder.
    """
    sampler = on_cpu(sampler)
    model = _converted(trace(sampler), output_names(sampler))
    for value in (*model.graph.input, *model.graph.output):
        dimensions = value.type.tensor_type.shape.dim
        dimensions[0].dim_param, dimensions[1].dim_param = "batch", "candidates"
    del model.graph.value_info[:]  # holds the old dimension names; runtimes infer it
    drop_traces(model)
    _store_as_half(model.graph)
    about = {  # what lets the file run without the sampler's folder
        "format": FORMAT,
        "version": __version__,
        "settings": {key: value for key, value in sampler.config.items() if key not in DECORATION},
        "class_names": None if sampler.class_names is None else list(sampler.class_names),
        "fingerprint": sampler.fingerprint(),
        "weights": weights,
        "reach": sampler.backbone.reach,
    }
    model.metadata_props.add(key=ABOUT, value=json.dumps(about, sort_keys=True))
    return bytes(model.SerializeToString(deterministic=True))


def _converted(program: ExportedProgram, outputs: list[str]) -> Any:
    """Convert to an ONNX ModelProto and fold constants; batch norms are left to the runtime."""
    try:
        import onnx  # noqa: F401
        from onnxscript import opset20, optimizer
    except ImportError as error:
        raise MissingDependency(
            "ONNX files need onnx and onnxscript; install them with: pip install 'sosampler[onnx]'"
        ) from error

    def remainder(dividend: Any, divisor: Any) -> Any:
        """Replace torch's translation, which needs a constant divisor; here it is the number of candidates."""
        return opset20.Mod(dividend, divisor)

    made = torch.onnx.export(
        program,
        dynamo=True,
        input_names=[INPUT],
        output_names=outputs,
        opset_version=20,
        custom_translation_table={torch.ops.aten.remainder.Scalar: remainder},
        optimize=False,
        verbose=False,
    )
    assert made is not None, "without a file name the program is returned"
    optimizer.fold_constants(made.model)
    optimizer.remove_unused_nodes(made.model)
    return made.model_proto


def drop_traces(model: Any) -> None:
    """Drop source locations: they hold paths of the exporting machine and are larger than the graph itself."""
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    model.graph.doc_string = ""
    for part in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]


def _store_as_half(graph: Any) -> None:
    """Store float32 tensors that float16 holds exactly as float16 plus a cast; values do not change."""
    from onnx import TensorProto, helper, numpy_helper

    casts = []
    for tensor in graph.initializer:
        if tensor.data_type != TensorProto.FLOAT:
            continue
        numbers = numpy_helper.to_array(tensor)
        with np.errstate(over="ignore"):
            half = numbers.astype(np.float16)
        if numbers.size < _WORTH_HALVING or not np.array_equal(half.astype(np.float32), numbers):
            continue
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(half, f"{name}.half"))
        casts.append(helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


# (videos, candidates) on which the exported network must give the sampler's scores.
_TRIALS = ((1, 1), (2, 5))
_TOLERANCE = 1e-4  # largest difference of a score, relative to the largest score or to 1
FORMAT_NAME = "onnx"


@dataclass(frozen=True)
class Exported:
    """What was written, and how closely it agrees with the sampler."""

    sampler: str
    format: str
    file: str
    files: tuple[str, ...]
    bytes: int
    fingerprint: str  # of the weights in the file
    inputs: dict[str, list[str | int]]  # name -> uint8 dimensions
    outputs: list[str]
    difference: float  # largest difference of a score from the sampler's own, on trial frames

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {**asdict(self), "files": list(self.files)}


def export_sampler(
    source: str | Path | SOSampler, *, format: str = FORMAT_NAME, out: str | Path | None = None, half: bool = False
) -> Exported:
    """Write a trained sampler as an ONNX file, for any number of videos and candidates.

    The network takes frames uint8 [batch, candidates, 3, h, w] of the sampler's input size (`sampler.preprocessing`
    describes the resize) and returns scores, importance, class logits where it has a class head, and features.

    Args:
        source: the folder of a trained sampler, its id on the Hugging Face hub, or the sampler itself.
        format: "onnx". Other runtimes (OpenVINO, TensorRT) read such a file.
        out: a file, or a folder for model.onnx; by default the sampler's own folder. There `select` runs model.onnx
            where torch is not installed.
        half: round weights to half precision, for a file of half the size; scores change a little.
    """
    if format != FORMAT_NAME:
        raise InvalidArgument(f"format={format!r} must be {FORMAT_NAME!r}; other runtimes read such a file")
    check_bool("half", half)
    path = _output_path(source, out)
    if isinstance(source, SOSampler):
        name, digest = "sosampler", None
    else:
        name, digest, source = str(source), weights_digest(Path(source)), load_sampler(source)
    if source.budget is not None:
        raise InvalidArgument(
            f"{name}: its budget head, which decides how many frames a video needs, cannot be exported; train without "
            "it: reinforce={budget: false}"
        )
    sampler = on_cpu(source, half=half)
    model = onnx_bytes(sampler, weights=digest)
    difference = _max_difference(sampler, OnnxSampler(model), path)
    with locked_file(path), replacing(path) as temporary:
        temporary.write_bytes(model)
    return Exported(
        sampler=name,
        format=format,
        file=str(path),
        files=(str(path),),
        bytes=path.stat().st_size,
        fingerprint=sampler.fingerprint(),
        inputs={INPUT: ["batch", "candidates", 3, sampler.input_size, sampler.input_size]},
        outputs=output_names(sampler),
        difference=difference,
    )


def _max_difference(sampler: SOSampler, exported: OnnxSampler, path: Path) -> float:
    """Return the largest difference of a score on fixed frames; raise if it is too large."""
    largest, size = 0.0, sampler.input_size
    for videos, candidates in _TRIALS:
        generator = torch.Generator().manual_seed(videos * 1000 + candidates)
        # Coarse images: single-pixel noise would give every frame almost the same score.
        coarse = torch.rand(videos * candidates, 3, 8, 8, generator=generator) * 255
        smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
        frames = smooth.round().byte().unflatten(0, (videos, candidates))
        reference = sampler.score(frames).numpy()
        difference = float(np.abs(exported.run_network(frames.numpy())["scores"] - reference).max())
        # Not "greater than": a NaN must not pass.
        if not difference <= _TOLERANCE * max(1.0, float(np.abs(reference).max())):
            raise SosamplerError(
                f"{path}: not written, because the exported network gives other scores than the sampler (they differ "
                f"by {difference:.2g}); try other versions of torch and onnxruntime"
            )
        largest = max(largest, difference)
    return largest


def _output_path(source: str | Path | SOSampler, out: str | Path | None) -> Path:
    """Return the file to write, checked before the work begins."""
    if out is None:
        if isinstance(source, SOSampler) or not Path(source).is_dir():
            given = "a sampler in memory" if isinstance(source, SOSampler) else f"{source} (not a local folder)"
            raise InvalidArgument(f"{given} has no folder to write to; give out, a file or a folder")
        out = source
    path = Path(out)
    path = path / MODEL if path.is_dir() else path
    if path.suffix != ".onnx":
        raise InvalidArgument(f"out={str(out)!r} must be a folder or end with .onnx; give such a name")
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder; give another file name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InvalidArgument(
            f"{path}: cannot be written ({error.strerror or error}); give a writable location with out"
        ) from error
    return path
