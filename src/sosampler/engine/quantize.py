"""`quantize_classifier`: write a classifier's network in int8, for CPUs, and compare it with float32."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosampler import __version__
from sosampler._util.files import check_place, remove_leftovers, replacing
from sosampler._util.progress import Bar, progress_bar
from sosampler.classifiers.base import Classifier, activate, check_finite
from sosampler.classifiers.factory import (
    CONFIG,
    INT8_MODEL,
    KIND,
    WEIGHTS,
    create_classifier,
    save_classifier,
    saved_folder,
)
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.engine.backends import ABOUT, FORMAT, INPUT, check_pooled, import_exporter, int8_net, onnx_of
from sosampler.engine.networks import InputMaker, channels_first, float_copy
from sosampler.errors import InvalidArgument
from sosampler.samplers.export import drop_traces

_HELD_OUT = 4  # every fourth frame is not used for the ranges; both networks are compared on it
_BATCH_FRAMES = 8
# Layers with weights, and the operators between them, so that values stay in int8 from one layer to the next.
_OPERATORS = ("Conv", "Gemm", "MatMul", "Add", "Relu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat")


@dataclass(frozen=True)
class Quantized:
    """The written file, and how closely it agrees with the classifier."""

    classifier: str
    folder: str
    file: str
    bytes: int
    fingerprint: str  # of the original classifier
    num_frames: int  # that the activation ranges were taken from
    num_compared: int  # held-out frames
    same_class: float  # fraction of held-out frames on which both give the same top class
    difference: float  # largest difference of a probability, mean over held-out frames

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)


def quantize_classifier(classifier: str | Path | Classifier, frames: Any, out: str | Path | None = None) -> Quantized:
    """Write a classifier's network in int8, which CPUs run two to four times as fast, and compare the two.

    Activation ranges are taken from the frames, so give a few hundred like those the classifier will see. Every fourth
    frame is held out, and both networks are compared on those. `Pipeline`, `FrameEngine` and `sosampler classify` use
    the result with precision "int8"; the float32 weights stay beside it.

    Args:
        classifier: the folder of a saved classifier, or a classifier; its network must see frames one by one.
        frames: uint8 [B, T, H, W, 3] or [B, T, 3, H, W], numpy or torch; or an iterable of such, of any sizes.
        out: folder for the classifier and its int8 network; default: the one it was loaded from. It becomes
            `classifier.folder`; after wrapping your own network again, set that attribute to use the int8 network.
    """
    pooled = check_pooled(create_classifier(classifier) if isinstance(classifier, (str, Path)) else classifier)
    source = None if pooled.folder is None else Path(pooled.folder)
    folder = _output_folder(pooled, source, out)
    import_exporter("precision='int8'")
    pixels = resized_pixels(pooled, frames)
    held_out = torch.arange(len(pixels)) % _HELD_OUT == _HELD_OUT - 1
    held_out[-1] |= not bool(held_out.any())
    calibration = pixels[~held_out] if len(pixels) > 1 else pixels
    # Frames of one video resemble each other; each batch should contain several videos.
    calibration = calibration[torch.randperm(len(calibration), generator=torch.Generator().manual_seed(0))]
    inputs, net = InputMaker(pooled.preprocessing), float_copy(pooled.net)
    expected = classify_pixels(pooled, lambda part: net(inputs.normalised(part)), pixels[held_out])
    model = int8_model(pooled, calibration)
    about: dict[str, Any] = {"format": FORMAT, "version": __version__, "num_frames": len(calibration)}
    about["fingerprint"] = pooled.fingerprint()
    model.metadata_props.add(key=ABOUT, value=json.dumps(about, sort_keys=True))
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / INT8_MODEL
        file.write_bytes(model.SerializeToString(deterministic=True))
        quantized = classify_pixels(pooled, int8_net(file, pooled.preprocessing, "onnxruntime"), pixels[held_out])
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(*(folder / name for name in (INT8_MODEL, WEIGHTS, CONFIG)), only_of_dead=True)
        with replacing(folder / INT8_MODEL) as temporary:
            temporary.write_bytes(file.read_bytes())
        if folder != source:
            save_classifier(pooled, folder)  # last: a folder without a config is taken again after a kill
    pooled.folder = folder
    return Quantized(
        classifier=pooled.name,
        folder=str(folder),
        file=str(folder / INT8_MODEL),
        bytes=(folder / INT8_MODEL).stat().st_size,
        fingerprint=about["fingerprint"],
        num_frames=len(calibration),
        num_compared=int(held_out.sum()),
        same_class=float((expected.argmax(1) == quantized.argmax(1)).double().mean()),
        difference=float((expected - quantized).abs().amax(1).mean()),
    )


def int8_model(classifier: PooledClassifier, pixels: Tensor) -> Any:
    """Return an ONNX ModelProto with int8 layers, calibrated on pixels uint8 [F, h, w * 3]."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    inputs = InputMaker(classifier.preprocessing)

    class Frames(CalibrationDataReader):
        def __init__(self, bar: Bar) -> None:
            self._parts, self._bar = iter(pixels.split(_BATCH_FRAMES)), bar

        def get_next(self) -> dict[str, np.ndarray] | None:
            part = next(self._parts, None)
            if part is None:
                return None
            self._bar.advance(len(part))
            return {INPUT: inputs.normalised(part).contiguous().numpy()}

    example = torch.zeros(2, 3, *classifier.preprocessing.size)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # onnxruntime's tools write hints to the root logger
    try:
        with tempfile.TemporaryDirectory() as work, progress_bar("calibration", len(pixels)) as bar:
            plain, folded, made = (Path(work) / f"{name}.onnx" for name in ("plain", "folded", "made"))
            plain.write_bytes(onnx_of(float_copy(classifier.net), example))
            quant_pre_process(str(plain), str(folded), skip_symbolic_shape=True)  # folds batch norms
            quantize_static(
                str(folded),
                str(made),
                Frames(bar),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=list(_OPERATORS),
                per_channel=True,
                activation_type=QuantType.QUInt8,  # x86 multiplies those with int8 weights in one instruction
                weight_type=QuantType.QInt8,
                # Ranges: the mean over batches of each batch's extremes, so that outliers do not widen them. Products
                # of two activations (attention) stay in float32.
                extra_options={"CalibMovingAverage": True, "MatMulConstBOnly": True},
            )
            model = onnx.load(made)
    finally:
        logging.disable(disabled)
    drop_traces(model)
    return model


def resized_pixels(classifier: PooledClassifier, frames: Any) -> Tensor:
    """Return a user's frames as pixels uint8 [F, h, w * 3] of the network's input size."""
    inputs = InputMaker(classifier.preprocessing)
    parts: Iterable[Any] = [frames] if isinstance(frames, (np.ndarray, Tensor)) else frames
    pixels = [inputs.resized(channels_first(part).flatten(0, 1).cpu()).contiguous() for part in parts]
    if not pixels:
        raise InvalidArgument("there are no frames; give a few hundred of the videos that the classifier will see")
    return torch.cat(pixels)


@torch.no_grad()
def classify_pixels(classifier: PooledClassifier, net: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
    """Return probabilities [F, C] of each frame alone, where `net` maps pixels [F, h, w * 3] to features."""
    parts = []
    for part in pixels.split(_BATCH_FRAMES):
        features = check_finite(net(part), classifier.name)
        parts.append(activate(classifier.pool_logits(features[:, None].to(classifier.device)), classifier.activation))
    return check_finite(torch.cat(parts), classifier.name)


def _output_folder(pooled: Classifier, source: Path | None, out: str | Path | None) -> Path:
    """Return the folder to write into, checked before the work begins."""
    if out is None:
        if source is None:
            raise InvalidArgument("the classifier has no folder of its own; give out, a folder to save it in")
        return source
    folder = Path(out)
    if source is not None and folder.exists() and folder.samefile(source):
        return source
    check_place(folder, KIND, "classifier")
    saved = saved_folder(folder)
    # What it wrote before may be written again.
    is_own = saved is not None and (folder / INT8_MODEL).is_file()
    if saved is not None and not (is_own and create_classifier(saved).fingerprint() == pooled.fingerprint()):
        raise InvalidArgument(
            f"{folder} holds a saved classifier, which would be lost; give that folder as the classifier to quantize "
            "it, or another folder to write into"
        )
    return folder
