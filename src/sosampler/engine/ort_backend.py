"""Networks by ONNX Runtime, on the CPU: a sampler's backbone, exported in memory, and ONNX files."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.engine.inputs import InputMaker
from sosampler.engine.openvino_backend import _OfFrames
from sosampler.errors import MissingDependency
from sosampler.samplers.sosampler import SOSampler

INPUT = "frames"
_FRAMES_AT_ONCE = 16


class OrtFeatures:
    """uint8 frames [F, 3, H, W] -> features [F, D] of a sampler's backbone, float32."""

    def __init__(self, sampler: SOSampler) -> None:
        self._backbone = copy.deepcopy(sampler.backbone).cpu().float().eval()
        self.inputs = InputMaker(sampler.preprocessing, torch.device("cpu"), torch.float32)
        self._size = sampler.input_size
        self._sessions: dict[int, Any] = {}
        if not self._backbone.reach:
            self._session(1)  # says at once what is missing

    def __call__(self, frames: Tensor, num_frames: int) -> Tensor:
        if self._backbone.reach:  # the shift is written into the graph for a number of frames; videos stay together
            at_once = max(1, _FRAMES_AT_ONCE // num_frames) * num_frames
            session = self._session(num_frames)
        else:
            at_once, session = _FRAMES_AT_ONCE, self._session(1)
        parts = []
        for part in frames.split(at_once):
            (rows,) = session.run(None, {INPUT: self.inputs(part).contiguous().numpy()})
            parts.append(torch.from_numpy(rows))
        return torch.cat(parts)

    def _session(self, num_frames: int) -> Any:
        if num_frames not in self._sessions:
            import_exporter()
            # For any number of frames that is a multiple of `num_frames`.
            example = torch.zeros(2 * num_frames, 3, self._size, self._size)
            self._sessions[num_frames] = ort_session(onnx_of(_OfFrames(self._backbone, num_frames), example))
        return self._sessions[num_frames]


class OrtNet:
    """Grey levels uint8 [F, h, w * 3] -> what an ONNX file gives for F normalised frames, float32."""

    def __init__(self, file: Path, preprocessing: Preprocessing) -> None:
        self._inputs = InputMaker(preprocessing, torch.device("cpu"), torch.float32)
        self._session = ort_session(file.read_bytes())

    def __call__(self, levels: Tensor) -> Tensor:
        frames = self._inputs.normalised(levels).contiguous()
        (rows,) = self._session.run(None, {INPUT: frames.numpy()})
        return torch.from_numpy(rows)


def ort_session(model: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Threads that wait for more work would take the cores from torch's, which run next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def onnx_of(net: nn.Module, example: Tensor) -> bytes:
    """A network of frames [F, 3, h, w] as an ONNX file's bytes, for any F."""
    file = io.BytesIO()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(
            net,
            (example,),
            file,
            input_names=[INPUT],
            output_names=["features"],
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("count", min=1)},),
            verbose=False,
        )
    return file.getvalue()


def import_exporter(wanted: str = "backend='onnxruntime'") -> None:
    """Say what is missing to export; `wanted`: for what."""
    try:
        for name in ("onnx", "onnxscript", "onnxruntime"):  # torch writes with the first two
            import_module(name)
    except ImportError as error:
        raise MissingDependency(f"{wanted} needs onnxruntime, onnx and onnxscript; install sosampler[onnx]") from error
