"""Networks on the CPU by OpenVINO and ONNX Runtime."""

from __future__ import annotations

import copy
import io
import logging
import threading
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosampler.classifiers.pooled import PooledClassifier
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.engine.networks import InputMaker, RuntimeClassifier
from sosampler.errors import MissingDependency
from sosampler.samplers.sosampler import SOSampler

BATCH_FRAMES = 16  # per call, so that a layer's values stay in the cache
INPUT = "frames"  # of an ONNX graph
_CORE_LOCK = threading.Lock()


class RuntimeFeatures:
    """uint8 frames [F, 3, H, W] -> features [F, D] of a sampler's backbone, always in float32."""

    def __init__(self, sampler: SOSampler, backend: str) -> None:
        self._backend = backend
        self._backbone = copy.deepcopy(sampler.backbone).cpu().float().eval()
        self.inputs = InputMaker(sampler.preprocessing, torch.device("cpu"), torch.float32)
        self._nets: dict[int, Callable[[Tensor], Tensor]] = {}
        if not self._backbone.reach:
            self._net(1)  # report a missing package now

    def __call__(self, frames: Tensor, num_frames: int) -> Tensor:
        size, net = BATCH_FRAMES, self._net(num_frames if self._backbone.reach else 1)
        if self._backbone.reach:  # a shifted graph is for one number of frames, and videos stay together
            size = max(1, BATCH_FRAMES // num_frames) * num_frames
        return torch.cat([net(self.inputs.resized(part)) for part in frames.split(size)])

    def _net(self, num_frames: int) -> Callable[[Tensor], Tensor]:
        if num_frames not in self._nets:
            preprocessing = self.inputs.preprocessing
            module, count = _FixedLengthBackbone(self._backbone, num_frames), 2 * num_frames
            if self._backend == "openvino":
                self._nets[num_frames] = OpenVINONet(module, preprocessing, example_frames=count)
            else:
                import_exporter()
                model = onnx_of(module, torch.zeros(count, 3, *preprocessing.size))
                self._nets[num_frames] = OrtNet(model, preprocessing)
        return self._nets[num_frames]


class _FixedLengthBackbone(nn.Module):
    """A backbone for videos of `num_frames` frames, as a network of frames [F, 3, h, w] only."""

    def __init__(self, backbone: nn.Module, num_frames: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.num_frames = num_frames

    def forward(self, frames: Tensor) -> Tensor:
        features: Tensor = self.backbone(frames, self.num_frames)
        return features


# ---- OpenVINO


def openvino_core() -> Any:
    """Return the one `openvino.Core` of this process, which lives until the process ends.

    On Linux each core gives its thread a stack for signal handlers and frees it when the core is deleted. It then
    restores the previous stack; if two cores are deleted in the order of creation, that is the stack of the first,
    which is gone. The next signal, a Ctrl-C or the end of a child process, kills the process silently.
    """
    with _CORE_LOCK:
        return _create_core()


@cache
def _create_core() -> Any:
    return import_module("openvino").Core()


def openvino_classifier(classifier: PooledClassifier, *, bfloat16: bool = False) -> RuntimeClassifier:
    """Return a pooled classifier that OpenVINO runs: uint8 frames [B, N, 3, H, W] -> probabilities [B, C]."""
    net = OpenVINONet(copy.deepcopy(classifier.net).cpu().float().eval(), classifier.preprocessing, bfloat16=bfloat16)
    return RuntimeClassifier(classifier, net, batch_frames=BATCH_FRAMES)


class OpenVINONet:
    """Pixels uint8 [F, h, w * 3] -> the output of a network for F frames, float32. OpenVINO itself normalises.

    Args:
        net: a torch module, or an ONNX file.
        bfloat16: allow it where the CPU has it; int8 layers of a file are computed in int8 in any case.
    """

    def __init__(
        self, net: nn.Module | Path, preprocessing: Preprocessing, *, example_frames: int = 2, bfloat16: bool = False
    ) -> None:
        try:
            import_module("openvino.preprocess")
            openvino = import_module("openvino")
        except ImportError as error:
            raise MissingDependency("backend='openvino' needs OpenVINO; install sosampler[openvino]") from error
        height, width = preprocessing.size
        if isinstance(net, Path):
            model = openvino_core().read_model(net)
        else:
            example = torch.zeros(example_frames, 3, height, width)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about how the converter traces
                model = openvino.convert_model(net, example_input=example)
        model.reshape({0: openvino.PartialShape([-1, 3, height, width])})
        steps = openvino.preprocess.PrePostProcessor(model)  # uint8 [F, h, w, 3] -> float, channels first, normalised
        entry = steps.input(0)
        entry.tensor().set_element_type(openvino.Type.u8).set_layout(openvino.Layout("NHWC"))
        entry.model().set_layout(openvino.Layout("NCHW"))
        work = entry.preprocess().convert_element_type(openvino.Type.f32)
        work.mean([255 * value for value in preprocessing.mean]).scale([255 * value for value in preprocessing.std])
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "bf16" if bfloat16 else "f32",
        }
        self._shape = (height, width, 3)
        self._request = openvino_core().compile_model(steps.build(), "CPU", settings).create_infer_request()

    def __call__(self, pixels: Tensor) -> Tensor:
        frames = np.ascontiguousarray(pixels.numpy()).reshape(-1, *self._shape)
        output = self._request.infer([frames], share_inputs=True)[0]
        return torch.from_numpy(np.array(output))  # a copy: the next call overwrites this memory


# ---- ONNX Runtime


class OrtNet:
    """Pixels uint8 [F, h, w * 3] -> the output of an ONNX model for F normalised frames, float32."""

    def __init__(self, model: bytes, preprocessing: Preprocessing) -> None:
        import onnxruntime

        self._inputs = InputMaker(preprocessing, torch.device("cpu"), torch.float32)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        # Idle threads that spin would take the cores from torch's, which run next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def __call__(self, pixels: Tensor) -> Tensor:
        frames = self._inputs.normalised(pixels).contiguous()
        (output,) = self._session.run(None, {INPUT: frames.numpy()})
        return torch.from_numpy(output)


def onnx_of(net: nn.Module, example: Tensor) -> bytes:
    """Return a network of frames [F, 3, h, w] as the bytes of an ONNX file, for any F."""
    file = io.BytesIO()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
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


def import_exporter(feature: str = "backend='onnxruntime'") -> None:
    """Raise MissingDependency if a package that the ONNX export needs is missing."""
    try:
        for name in ("onnx", "onnxscript", "onnxruntime"):  # torch writes with the first two
            import_module(name)
    except ImportError as error:
        raise MissingDependency(f"{feature} needs onnxruntime, onnx and onnxscript; install sosampler[onnx]") from error
