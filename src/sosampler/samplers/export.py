"""The formats that samplers are exported to. Light, so that the command line's help is fast."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sosampler import __version__
from sosampler._util.files import replacing
from sosampler._util.validation import one_of, true_or_false
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError
from sosampler.samplers.onnx_sampler import ABOUT, DECORATION, FORMAT, INPUT, OUTPUTS, OnnxSampler, weights_digest
from sosampler.samplers.openvino_file import OpenVinoModel
from sosampler.samplers.registry import load_sampler
from sosampler.samplers.sosampler import SOSampler

SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2", "openvino": ".xml"}


def default_name(format: str) -> str:
    """How an exported file is called in a sampler's folder.

    >>> default_name("torch-export")
    'model.pt2'
    """
    return f"model{SUFFIXES[format]}"


class DeployedSampler(nn.Module):
    """Normalises and scores. Frames come resized and cropped, because that is cheaper where they are decoded."""

    def __init__(self, sampler: SOSampler) -> None:
        super().__init__()
        self.sampler = sampler
        preprocessing = sampler.preprocessing
        self.register_buffer("pixel_mean", torch.tensor(preprocessing.mean).view(3, 1, 1))
        self.register_buffer("pixel_std", torch.tensor(preprocessing.std).view(3, 1, 1))

    def forward(self, frames: Tensor) -> tuple[Tensor, ...]:
        """uint8 [B, T, 3, h, w] -> those of `output_names`, in that order."""
        said = self.sampler((frames.float() / 255 - self.pixel_mean) / self.pixel_std)
        # Two outputs may be one tensor, which graphs cannot name twice.
        scores, importance = said.scores.clone(), said.importance.clone()
        if said.class_logits is None:
            return scores, importance, said.features
        return scores, importance, said.class_logits, said.features


def output_names(sampler: SOSampler) -> list[str]:
    return [name for name in OUTPUTS if name != "class_logits" or sampler.class_head is not None]


def on_cpu(sampler: SOSampler, *, half: bool = False) -> SOSampler:
    """A frozen copy in float32; `half` rounds its weights to what half precision can hold.

    Only weights of convolutions and linear layers are rounded: the rest is small, and norms need their range.
    """
    copied: SOSampler = copy.deepcopy(sampler).cpu().float().freeze()
    copied.precision = "float32"
    if half:
        for parameter in copied.parameters():
            if parameter.ndim > 1:
                parameter.copy_(_rounded(parameter))
    return copied


def _rounded(weights: Tensor) -> Tensor:
    """To half precision and back; what is too large for it stays as it is."""
    rounded = weights.half().float()
    return torch.where(rounded.isfinite(), rounded, weights)


def trace(sampler: SOSampler) -> ExportedProgram:
    """The network as a graph for any number of videos and of candidates. The sampler is one of `on_cpu`."""
    size = sampler.input_size
    # Neither number is one, which a graph would take for a constant.
    example = torch.zeros(2, 3, 3, size, size, dtype=torch.uint8)
    free = {INPUT: {0: Dim("batch", min=1), 1: Dim("candidates", min=1)}}
    with torch.no_grad():
        program: ExportedProgram = torch.export.export(
            DeployedSampler(sampler).eval(), (example,), dynamic_shapes=free, strict=False
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # names files of the machine that exports
    return program


def trial_frames(sampler: SOSampler, videos: int, candidates: int) -> Tensor:
    """uint8 [B, T, 3, h, w] on which an exported network is compared with its sampler, the same every time."""
    generator = torch.Generator().manual_seed(videos * 1000 + candidates)
    size = sampler.input_size
    # Coarse pictures: noise of single pixels looks alike to a network, and so would all scores.
    coarse = torch.rand(videos * candidates, 3, 8, 8, generator=generator) * 255
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    return smooth.round().byte().unflatten(0, (videos, candidates))


def expected(sampler: SOSampler, frames: Tensor) -> dict[str, Any]:
    """What the sampler itself says about frames, by output name, as NumPy arrays."""
    said = sampler.look(frames)._asdict()
    return {name: said[name].numpy() for name in output_names(sampler)}


# Tensors below this many numbers are not worth a node of their own.
_WORTH_HALVING = 256


def onnx_bytes(sampler: SOSampler, *, weights: str | None = None) -> bytes:
    """The file's bytes. Batch and number of candidates stay free; the input is uint8 of the sampler's input size.

    Weights that half precision holds exactly are stored so, which halves the file of a sampler that was saved so.

    Args:
        sampler: any; a copy of it goes to the CPU.
        weights: digest of the weights file to which the network belongs, if it lies in a sampler's folder.
    """
    sampler = on_cpu(sampler)
    model = _converted(trace(sampler), output_names(sampler))
    _name_dimensions(model.graph)
    drop_traces(model)
    _store_as_half(model.graph)
    entry = model.metadata_props.add()
    entry.key, entry.value = ABOUT, json.dumps(about(sampler, weights), sort_keys=True)
    found: bytes = model.SerializeToString(deterministic=True)
    return found


def about(sampler: SOSampler, weights: str | None) -> dict[str, Any]:
    """What a file must say about itself to be run without the sampler's folder."""
    return {
        "format": FORMAT,
        "version": __version__,
        "settings": {key: value for key, value in sampler.config.items() if key not in DECORATION},
        "class_names": None if sampler.class_names is None else list(sampler.class_names),
        "fingerprint": sampler.fingerprint(),
        "weights": weights,
        "reach": sampler.backbone.reach,
    }


def _converted(program: ExportedProgram, outputs: list[str]) -> Any:
    """The graph as an ONNX ModelProto, constants folded; norms are left to the runtime, whose folding is not stored."""
    try:
        import onnx  # noqa: F401
        from onnxscript import opset20, optimizer
    except ImportError as error:
        raise MissingDependency(
            "ONNX files need onnx and onnxscript; install them with: pip install 'sosampler[onnx]'"
        ) from error

    def remainder(dividend: Any, divisor: Any) -> Any:
        """torch's own translation takes a divisor that is known; here it is the number of candidates."""
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
    assert made is not None, "without a file name it is given back"
    optimizer.fold_constants(made.model)
    optimizer.remove_unused_nodes(made.model)
    return made.model_proto


def _name_dimensions(graph: Any) -> None:
    """The free dimensions get names that say what they are."""
    for value in (*graph.input, *graph.output):
        dimensions = value.type.tensor_type.shape.dim
        dimensions[0].dim_param, dimensions[1].dim_param = "batch", "candidates"
    del graph.value_info[:]  # still has the old names, and runtimes find out by themselves


def drop_traces(model: Any) -> None:
    """Where in the code each node comes from: paths of the machine that exports, larger than the graph itself."""
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    model.graph.doc_string = ""
    for part in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]


def _store_as_half(graph: Any) -> None:
    """float32 tensors without digits beyond half precision become float16 and a cast; not a bit changes."""
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
