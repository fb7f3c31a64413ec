"""A sampler as OpenVINO's two files, the graph (.xml) and its weights (.bin)."""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from sosampler.engine.backends import openvino_core
from sosampler.errors import MissingDependency
from sosampler.samplers.onnx_sampler import INPUT


class OpenVinoModel:
    """What OpenVINO makes of an ONNX file's bytes."""

    def __init__(self, model: bytes) -> None:
        self._openvino = _import_openvino()
        self._core = openvino_core()
        self._model = self._core.read_model(model)

    def run(self, frames: np.ndarray) -> dict[str, np.ndarray]:
        """uint8 [B, T, 3, h, w] -> outputs by name, in full precision whatever the chip would like better."""
        compiled = self._core.compile_model(self._model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        said = compiled({INPUT: frames})
        return {output.get_any_name(): np.array(said[output]) for output in compiled.outputs}

    def save(self, path: Path) -> list[Path]:
        """Write PATH.xml and PATH.bin. The old graph goes first, so that it never stands beside new weights."""
        weights = path.with_suffix(".bin")
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}.") as folder:
            graph = Path(folder) / path.name
            # Weights that half precision holds exactly are halves already.
            self._openvino.save_model(self._model, graph, compress_to_fp16=False)
            path.unlink(missing_ok=True)
            os.replace(graph.with_suffix(".bin"), weights)
            os.replace(graph, path)
        return [path, weights]


def _import_openvino() -> Any:
    try:
        return import_module("openvino")
    except ImportError as error:
        raise MissingDependency(
            "OpenVINO is not installed; install it with: pip install 'sosampler[onnx,openvino]'"
        ) from error
