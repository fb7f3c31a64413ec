"""Networks on the CPU by OpenVINO and ONNX Runtime, in float32, bfloat16 and int8."""

from __future__ import annotations

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

from sosampler._util.files import parse_line
from sosampler._util.hardware import onnx_options
from sosampler.classifiers.base import INT8
from sosampler.classifiers.factory import INT8_MODEL
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.engine.networks import RUNTIME_FRAMES, InputMaker, RuntimeClassifier, can_be_fused, float_copy
from sosampler.errors import InvalidArgument, MissingDependency, WeightsError, first_line
from sosampler.samplers.sosampler import SOSampler

INPUT = "frames"  # of an ONNX graph
_CORE_LOCK = threading.Lock()


class RuntimeFeatures:
    """uint8 frames [F, 3, H, W] -> features [F, D] of a sampler's backbone, always in float32."""

    def __init__(self, sampler: SOSampler, backend: str) -> None:
        self._backend = backend
        self._backbone = float_copy(sampler.backbone)
        self.inputs = InputMaker(sampler.preprocessing)
        self._nets: dict[int, Callable[[Tensor], Tensor]] = {}
        if not self._backbone.reach:
            self._net(1)  # report a missing package now

    def __call__(self, frames: Tensor, num_frames: int) -> Tensor:
        count = num_frames if self._backbone.reach else 1  # a shifted graph is for one number of frames
        net, size = self._net(count), max(1, RUNTIME_FRAMES // count) * count  # videos stay together
        return torch.cat([net(self.inputs.resized(part)) for part in frames.split(size)])

    def _net(self, num_frames: int) -> Callable[[Tensor], Tensor]:
        if num_frames not in self._nets:
            preprocessing = self.inputs.preprocessing
            module = _FixedLengthBackbone(self._backbone, num_frames)
            if self._backend == "openvino":
                self._nets[num_frames] = OpenVINONet(module, preprocessing, example_frames=2 * num_frames)
            else:
                import_exporter()
                model = onnx_of(module, torch.zeros(2 * num_frames, 3, *preprocessing.size))
                self._nets[num_frames] = OrtNet(model, preprocessing)
        return self._nets[num_frames]


class _FixedLengthBackbone(nn.Module):
    """A backbone for videos of `num_frames` frames, as a network of frames [F, 3, h, w] only."""

    def __init__(self, backbone: nn.Module, num_frames: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.num_frames = num_frames

    def forward(self, frames: Tensor) -> Tensor:
        return self.backbone(frames, self.num_frames)


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
    net = OpenVINONet(float_copy(classifier.net), classifier.preprocessing, bfloat16=bfloat16)
    return RuntimeClassifier(classifier, net)


class OpenVINONet:
    """Pixels uint8 [F, h, w * 3] -> the output of a module or ONNX file for F frames, float32; it normalises itself.

    `bfloat16` allows it where the CPU has it; int8 layers of a file are computed in int8 in any case.
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

        self._inputs = InputMaker(preprocessing)
        options = onnx_options(onnxruntime)
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


# ---- int8: classifiers as `quantize_classifier` writes them
#
# The file is an ONNX network of normalised frames [F, 3, h, w] with conversions to and from int8 around each layer
# (QDQ). Its metadata holds the fingerprint of the classifier it was made from; other weights are refused.

ABOUT = "sosampler"  # key of the file's metadata that holds ours, as JSON
FORMAT = 1

_HOW = "`sosampler quantize FOLDER --bank BANK`, or so.quantize_classifier"


def int8_classifier(classifier: Any, backend: str) -> RuntimeClassifier:
    """Return the int8 version of a classifier: uint8 frames [B, N, 3, H, W] -> probabilities [B, C]."""
    return RuntimeClassifier(classifier, int8_net(int8_file_of(classifier), classifier.preprocessing, backend))


def int8_net(file: Path, preprocessing: Preprocessing, backend: str) -> OpenVINONet | OrtNet:
    """Return the network of a file, by OpenVINO or ONNX Runtime: pixels uint8 [F, h, w * 3] -> its output, float32."""
    if backend == "openvino":
        return OpenVINONet(file, preprocessing)
    return OrtNet(file.read_bytes(), preprocessing)


def int8_file_of(classifier: Any) -> Path:
    """Return the int8 file of a classifier, or raise an error if it cannot run in int8."""
    check_pooled(classifier)
    if classifier.device.type != "cpu":
        raise InvalidArgument(f"precision={INT8!r} runs on the CPU, not on {classifier.device}; give device='cpu'")
    file = None if classifier.folder is None else Path(classifier.folder) / INT8_MODEL
    if file is None or not file.is_file():
        where = "" if file is None else f" in {file.parent}"
        raise InvalidArgument(
            f"classifier {classifier.name!r} has no int8 network{where}; make one from frames of your videos with "
            f"{_HOW}, or give precision='float32'"
        )
    if _read_metadata(file).get("fingerprint") != classifier.fingerprint():
        raise WeightsError(
            f"{file}: was made from other weights or another input size than this {classifier.name} has; make it again "
            f"with {_HOW}"
        )
    return file


def check_pooled(classifier: Any) -> PooledClassifier:
    """Return a classifier whose network sees one frame at a time, or raise an error."""
    if not can_be_fused(classifier):
        name = getattr(classifier, "name", type(classifier).__name__)
        raise InvalidArgument(
            f"precision={INT8!r} is for classifiers that see frames one by one (resnet50, timm:NAME, ...), and "
            f"{name!r} sees whole clips; give 'float32'"
        )
    return classifier


def _read_metadata(file: Path) -> dict[str, Any]:
    import onnxruntime

    options = onnx_options(onnxruntime)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
        about: dict[str, Any] = parse_line(session.get_modelmeta().custom_metadata_map[ABOUT])
        known = about["format"] == FORMAT
    except Exception as error:  # onnxruntime has no common base class for the errors of a damaged file
        raise WeightsError(
            f"{file}: is not a network that `sosampler quantize` wrote ({first_line(error)}); make it again with {_HOW}"
        ) from error
    if not known:
        raise WeightsError(f"{file}: was written by another version of sosampler; make it again with {_HOW}")
    return about
