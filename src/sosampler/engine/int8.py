"""Classifiers in int8, as `quantize_classifier` writes them, on the CPU by ONNX Runtime or OpenVINO.

The file is an ONNX network of normalised frames [F, 3, h, w] with conversions to and from int8 around each layer (QDQ).
Its metadata holds the fingerprint of the classifier it was made from; a classifier with other weights is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sosampler.classifiers.base import INT8
from sosampler.classifiers.factory import INT8_MODEL
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.engine.backends import BATCH_FRAMES, OpenVINONet, OrtNet
from sosampler.engine.networks import RuntimeClassifier, can_be_fused
from sosampler.errors import InvalidArgument, WeightsError, first_line

ABOUT = "sosampler"  # key of the file's metadata that holds ours, as JSON
FORMAT = 1

_HOW = "`sosampler quantize FOLDER --bank BANK`, or so.quantize_classifier"


def int8_classifier(classifier: Any, backend: str) -> RuntimeClassifier:
    """Return the int8 version of a classifier: uint8 frames [B, N, 3, H, W] -> probabilities [B, C].

    OpenVINO runs it if that is the backend, else ONNX Runtime.
    """
    net = int8_net(int8_file_of(classifier), classifier.preprocessing, backend)
    return RuntimeClassifier(classifier, net, batch_frames=BATCH_FRAMES)


def int8_net(file: Path, preprocessing: Preprocessing, backend: str) -> OpenVINONet | OrtNet:
    """Return the network of a file: pixels uint8 [F, h, w * 3] -> its output for F frames, float32."""
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
    pooled: PooledClassifier = classifier
    return pooled


def _read_metadata(file: Path) -> dict[str, Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
        about: dict[str, Any] = json.loads(session.get_modelmeta().custom_metadata_map[ABOUT])
        known = about["format"] == FORMAT
    except Exception as error:  # onnxruntime has no common base class for the errors of a damaged file
        raise WeightsError(
            f"{file}: is not a network that `sosampler quantize` wrote ({first_line(error)}); make it again with {_HOW}"
        ) from error
    if not known:
        raise WeightsError(f"{file}: was written by another version of sosampler; make it again with {_HOW}")
    return about
