"""A sampler as one ONNX file, which onnxruntime and other runtimes read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from sosampler import __version__
from sosampler.errors import MissingDependency
from sosampler.export.network import on_cpu, output_names, trace
from sosampler.samplers.onnx_sampler import ABOUT, DECORATION, FORMAT, INPUT
from sosampler.samplers.sosampler import SOSampler

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
