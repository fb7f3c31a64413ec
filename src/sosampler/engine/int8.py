"""A classifier whose network `quantize_classifier` brought to int8, run on the CPU by ONNX Runtime or OpenVINO.

The file is an ONNX network of normalised frames [F, 3, h, w], with steps to and from int8 around each layer (QDQ). It
knows of which classifier it was made, so that one of other weights is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sosampler.classifiers.base import INT8
from sosampler.classifiers.factory import INT8_MODEL
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.engine.networks import ForeignClassifier, can_be_fused
from sosampler.errors import InvalidArgument, WeightsError, first_line

# Key of the file's metadata under which what is told about it stands, as JSON.
ABOUT = "sosampler"
FORMAT = 1

_HOW = "`sosampler quantize FOLDER --bank BANK`, or so.quantize_classifier"
_FRAMES_AT_ONCE = 16  # a layer's values stay near the cores


def int8_classifier(classifier: Any, backend: str) -> ForeignClassifier:
    """uint8 frames [B, N, 3, H, W] -> probabilities [B, C]; by OpenVINO if that is the backend, else ONNX Runtime."""
    file = int8_file_of(classifier)
    return ForeignClassifier(
        classifier, int8_net(file, classifier.preprocessing, backend), frames_at_once=_FRAMES_AT_ONCE
    )


def int8_net(file: Path, preprocessing: Preprocessing, backend: str) -> Any:
    """Grey levels uint8 [F, h, w * 3] -> what the network of a file gives for F frames, float32."""
    if backend == "openvino":
        from sosampler.engine.backends import OpenVINONet

        return OpenVINONet(file, preprocessing)
    from sosampler.engine.backends import OrtNet

    return OrtNet(file, preprocessing)


def int8_file_of(classifier: Any) -> Path:
    """The file of a classifier that can run in int8, or why it cannot."""
    check_frame_by_frame(classifier)
    if classifier.device.type != "cpu":
        raise InvalidArgument(f"precision={INT8!r} runs on the CPU, not on {classifier.device}; give device='cpu'")
    file = None if classifier.folder is None else Path(classifier.folder) / INT8_MODEL
    if file is None or not file.is_file():
        where = "" if file is None else f" in {file.parent}"
        raise InvalidArgument(
            f"classifier {classifier.name!r} has no int8 network{where}; make one from frames of your videos with "
            f"{_HOW}, or give precision='float32'"
        )
    if _told_by(file).get("fingerprint") != classifier.fingerprint():
        raise WeightsError(
            f"{file}: was made of other weights or another input than this {classifier.name} has; make it again with "
            f"{_HOW}"
        )
    return file


def check_frame_by_frame(classifier: Any) -> PooledClassifier:
    """A classifier whose network sees one frame at a time."""
    if not can_be_fused(classifier):
        name = getattr(classifier, "name", type(classifier).__name__)
        raise InvalidArgument(
            f"precision={INT8!r} is for classifiers that look at frames one by one (resnet50, timm:NAME, ...), and "
            f"{name!r} is none; give 'float32'"
        )
    found: PooledClassifier = classifier
    return found


def _told_by(file: Path) -> dict[str, Any]:
    """What a file says about itself."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
        told = json.loads(session.get_modelmeta().custom_metadata_map[ABOUT])
        known = told["format"] == FORMAT
    except Exception as error:  # onnxruntime has no base class for what a damaged file makes it raise
        raise WeightsError(
            f"{file}: is no network that `sosampler quantize` wrote ({first_line(error)}); make it again with {_HOW}"
        ) from error
    if not known:
        raise WeightsError(f"{file}: was written by another version of sosampler; make it again with {_HOW}")
    found: dict[str, Any] = told
    return found
