"""OpenVINO's way in, one for the whole process."""

from __future__ import annotations

import copy
import io
import logging
import threading
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosampler.classifiers.pooled import PooledClassifier
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.engine.inputs import InputMaker
from sosampler.engine.networks import ForeignClassifier
from sosampler.errors import MissingDependency
from sosampler.samplers.sosampler import SOSampler

_ONE_AT_A_TIME = threading.Lock()


def openvino_core() -> Any:
    """The `openvino.Core` that everybody here shares; it lives until the process ends. OpenVINO must be installed.

    On Linux each core gives its thread a stack for signal handlers, and takes that memory away when it goes. It then
    puts back the stack that it had found; where two cores end in the order in which they began, that is the stack of
    the first, which is gone. The next signal, a Ctrl-C or the end of a child process, kills the process without a word.
    """
    with _ONE_AT_A_TIME:
        return _made()


@cache
def _made() -> Any:
    return import_module("openvino").Core()


_FRAMES_AT_ONCE = 16  # a layer's values stay near the cores


class OpenVINOFeatures:
    """uint8 frames [F, 3, H, W] -> features [F, D] of a sampler's backbone, in float32: what it says decides."""

    def __init__(self, sampler: SOSampler) -> None:
        self._backbone = copy.deepcopy(sampler.backbone).cpu().float().eval()
        self._preprocessing = sampler.preprocessing
        self.inputs = InputMaker(sampler.preprocessing, torch.device("cpu"), torch.float32)
        self._nets: dict[int, OpenVINONet] = {}
        if not self._backbone.reach:
            self._net(1)  # says at once what is missing

    def __call__(self, frames: Tensor, num_frames: int) -> Tensor:
        if self._backbone.reach:  # the shift is written into the graph for a number of frames; videos stay together
            at_once = max(1, _FRAMES_AT_ONCE // num_frames) * num_frames
            net = self._net(num_frames)
        else:
            at_once, net = _FRAMES_AT_ONCE, self._net(1)
        return torch.cat([net(self.inputs.resized(part)) for part in frames.split(at_once)])

    def _net(self, num_frames: int) -> OpenVINONet:
        if num_frames not in self._nets:
            module = _OfFrames(self._backbone, num_frames)
            self._nets[num_frames] = OpenVINONet(module, self._preprocessing, example_frames=2 * num_frames)
        return self._nets[num_frames]


class _OfFrames(nn.Module):
    """A backbone of videos of one length, as a network of frames alone."""

    def __init__(self, backbone: nn.Module, num_frames: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.num_frames = num_frames

    def forward(self, frames: Tensor) -> Tensor:
        found: Tensor = self.backbone(frames, self.num_frames)
        return found


def openvino_classifier(classifier: PooledClassifier, *, bfloat16: bool = False) -> ForeignClassifier:
    """uint8 frames [B, N, 3, H, W] -> probabilities [B, C] of a pooled classifier."""
    net = copy.deepcopy(classifier.net).cpu().float().eval()
    runs = OpenVINONet(net, classifier.preprocessing, bfloat16=bfloat16)
    return ForeignClassifier(classifier, runs, frames_at_once=_FRAMES_AT_ONCE)


class OpenVINONet:
    """Grey levels uint8 [F, h, w * 3] -> what a network gives for F frames, float32.

    Mean and std are taken out by OpenVINO itself. `net`: of torch, or an ONNX file. `bfloat16` allows it where the chip
    has it; what a file says in int8 is computed so in any case.
    """

    def __init__(
        self, net: nn.Module | Path, preprocessing: Preprocessing, *, example_frames: int = 2, bfloat16: bool = False
    ) -> None:
        openvino = import_openvino()
        height, width = preprocessing.size
        if isinstance(net, Path):
            model = openvino_core().read_model(net)
        else:
            example = torch.zeros(example_frames, 3, height, width)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about how the converter traces
                model = openvino.convert_model(net, example_input=example)
        model.reshape({0: openvino.PartialShape([-1, 3, height, width])})
        model = _with_preprocessing(openvino, model, preprocessing)
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        settings["INFERENCE_PRECISION_HINT"] = "bf16" if bfloat16 else "f32"
        self._shape = (height, width, 3)
        self._request = openvino_core().compile_model(model, "CPU", settings).create_infer_request()

    def __call__(self, levels: Tensor) -> Tensor:
        frames = np.ascontiguousarray(levels.numpy()).reshape(-1, *self._shape)
        found = self._request.infer([frames], share_inputs=True)[0]
        return torch.from_numpy(np.array(found))  # a copy: the next call writes into the same memory


def _with_preprocessing(openvino: Any, model: Any, preprocessing: Preprocessing) -> Any:
    """The model behind uint8 [F, h, w, 3]: float, channels first, mean and std."""
    steps = openvino.preprocess.PrePostProcessor(model)
    entry = steps.input(0)
    entry.tensor().set_element_type(openvino.Type.u8).set_layout(openvino.Layout("NHWC"))
    entry.model().set_layout(openvino.Layout("NCHW"))
    work = entry.preprocess().convert_element_type(openvino.Type.f32)
    work.mean([255 * value for value in preprocessing.mean]).scale([255 * value for value in preprocessing.std])
    return steps.build()


def import_openvino() -> Any:
    try:
        import_module("openvino.preprocess")
        return import_module("openvino")
    except ImportError as error:
        raise MissingDependency("backend='openvino' needs OpenVINO; install sosampler[openvino]") from error


INPUT = "frames"
_ort_backend_FRAMES_AT_ONCE = 16


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
            at_once = max(1, _ort_backend_FRAMES_AT_ONCE // num_frames) * num_frames
            session = self._session(num_frames)
        else:
            at_once, session = _ort_backend_FRAMES_AT_ONCE, self._session(1)
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
