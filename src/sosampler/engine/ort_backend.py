"""A sampler's backbone by ONNX Runtime: exported in memory, on the CPU."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sosampler.engine.inputs import InputMaker
from sosampler.engine.openvino_backend import _OfFrames
from sosampler.errors import MissingDependency
from sosampler.samplers.sosampler import SOSampler

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
            (rows,) = session.run(None, {"frames": self.inputs(part).contiguous().numpy()})
            parts.append(torch.from_numpy(rows))
        return torch.cat(parts)

    def _session(self, num_frames: int) -> Any:
        if num_frames not in self._sessions:
            onnxruntime = _import_onnxruntime()
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            options.log_severity_level = 3
            self._sessions[num_frames] = onnxruntime.InferenceSession(
                self._exported(num_frames), options, providers=["CPUExecutionProvider"]
            )
        return self._sessions[num_frames]

    def _exported(self, num_frames: int) -> bytes:
        """The backbone as an ONNX file's bytes, for any number of frames that is a multiple of `num_frames`."""
        example = torch.zeros(2 * num_frames, 3, self._size, self._size)
        file = io.BytesIO()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's own deprecations
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            torch.onnx.export(
                _OfFrames(self._backbone, num_frames),
                (example,),
                file,
                input_names=["frames"],
                output_names=["features"],
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("count", min=1)},),
                verbose=False,
            )
        return file.getvalue()


def _import_onnxruntime() -> Any:
    try:
        import_module("onnxscript")  # the exporter writes with it
        return import_module("onnxruntime")
    except ImportError as error:
        raise MissingDependency(
            "backend='onnxruntime' needs onnxruntime, onnx and onnxscript; install sosampler[onnx]"
        ) from error
