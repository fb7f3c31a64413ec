"""`quantize_classifier`: the network of a classifier in int8, for CPUs, measured on frames before it is kept."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosampler import __version__
from sosampler._util.files import check_place, replacing
from sosampler._util.progress import Bar, progress_bar
from sosampler.classifiers.base import Classifier
from sosampler.classifiers.factory import INT8_MODEL, KIND, create_classifier, save_classifier, saved_folder
from sosampler.classifiers.outputs import activate, check_finite
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.engine.backends import INPUT, import_exporter, onnx_of
from sosampler.engine.inputs import InputMaker, channels_first
from sosampler.engine.int8 import ABOUT, FORMAT, check_frame_by_frame, int8_net
from sosampler.errors import InvalidArgument
from sosampler.samplers.export import drop_traces

# One frame of so many is kept aside: the ranges are not taken from it, and both networks are compared on it.
_ASIDE = 4
_FRAMES_AT_ONCE = 8
# What becomes int8: layers with weights, and what lies between them, so that values stay in int8 from one to the next.
_OPERATORS = ("Conv", "Gemm", "MatMul", "Add", "Relu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat")


@dataclass(frozen=True)
class Quantized:
    """What was written, and how far it agrees with the classifier."""

    classifier: str
    folder: str
    file: str
    bytes: int
    fingerprint: str  # of the classifier of which it was made
    num_frames: int  # that the ranges of values were taken from
    num_compared: int  # frames on which both were compared
    same_class: float  # share of these of which both name the same class first
    difference: float  # mean over them of the largest difference of a probability

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def quantize_classifier(classifier: str | Path | Classifier, frames: Any, out: str | Path | None = None) -> Quantized:
    """Write the network of a classifier in int8, which CPUs run two to four times as fast, and compare the two.

    The ranges of values are taken from the frames, so they should be such as the classifier will see: a few hundred
    of the training videos. Every fourth is kept aside, and both networks are compared on those. The result is used by
    `Pipeline`, `FrameEngine` and `sosampler classify` with precision "int8"; weights are kept beside it as they are.

    Args:
        classifier: the folder of a saved one, or a classifier; its network must look at frames one by one.
        frames: uint8 [B, T, H, W, 3] or [B, T, 3, H, W], numpy or torch; or an iterable of such, of any sizes.
        out: folder for the classifier and its int8 network; that from which it was loaded if not given. It becomes
            `classifier.folder`, which whoever wraps a network of their own again sets to use what is there.
    """
    pooled = check_frame_by_frame(create_classifier(classifier) if isinstance(classifier, (str, Path)) else classifier)
    own = None if pooled.folder is None else Path(pooled.folder)
    folder = _place(own, out)
    import_exporter("precision='int8'")
    levels = levels_of(pooled, frames)
    aside = torch.zeros(len(levels), dtype=torch.bool)
    aside[_ASIDE - 1 :: _ASIDE] = True
    if not bool(aside.any()):
        aside[-1] = True
    learned = levels[~aside] if len(levels) > 1 else levels
    # Frames of one video resemble each other; each part of a few should tell of several.
    learned = learned[torch.randperm(len(learned), generator=torch.Generator().manual_seed(0))]
    inputs, net = InputMaker(pooled.preprocessing, torch.device("cpu"), torch.float32), plain_net(pooled.net)
    plain = answers(pooled, lambda part: net(inputs.normalised(part)), levels[aside])
    model = int8_model(pooled, learned)
    about: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "fingerprint": pooled.fingerprint(),
        "num_frames": len(learned),
    }
    entry = model.metadata_props.add()
    entry.key, entry.value = ABOUT, json.dumps(about, sort_keys=True)
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / INT8_MODEL
        file.write_bytes(model.SerializeToString(deterministic=True))
        found = answers(pooled, int8_net(file, pooled.preprocessing, "onnxruntime"), levels[aside])
        if folder != own:
            save_classifier(pooled, folder)
        with replacing(folder / INT8_MODEL) as temporary:
            temporary.write_bytes(file.read_bytes())
    pooled.folder = folder
    written = folder / INT8_MODEL
    return Quantized(
        classifier=pooled.name,
        folder=str(folder),
        file=str(written),
        bytes=written.stat().st_size,
        fingerprint=about["fingerprint"],
        num_frames=len(learned),
        num_compared=int(aside.sum()),
        same_class=float((plain.argmax(1) == found.argmax(1)).double().mean()),
        difference=float((plain - found).abs().amax(1).mean()),
    )


def int8_model(classifier: PooledClassifier, levels: Tensor) -> Any:
    """An ONNX ModelProto with int8 layers; their ranges are those of grey levels uint8 [F, h, w * 3].

    Weights have a range a channel. Activations are uint8: x86 multiplies those with int8 weights in one instruction.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    inputs = InputMaker(classifier.preprocessing, torch.device("cpu"), torch.float32)

    class Frames(CalibrationDataReader):
        def __init__(self, bar: Bar) -> None:
            self._parts, self._bar = iter(levels.split(_FRAMES_AT_ONCE)), bar

        def get_next(self) -> dict[str, np.ndarray] | None:
            part = next(self._parts, None)
            if part is None:
                return None
            self._bar.advance(len(part))
            return {INPUT: inputs.normalised(part).contiguous().numpy()}

    net = plain_net(classifier.net)
    example = torch.zeros(2, 3, *classifier.preprocessing.size)
    with tempfile.TemporaryDirectory() as work, _quietly(), progress_bar("ranges of values", len(levels)) as bar:
        whole, folded, made = (Path(work) / f"{name}.onnx" for name in ("whole", "folded", "made"))
        whole.write_bytes(onnx_of(net, example))
        quant_pre_process(str(whole), str(folded), skip_symbolic_shape=True)  # folds batch norms
        quantize_static(
            str(folded),
            str(made),
            Frames(bar),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(_OPERATORS),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            # Ranges: the mean over parts of each part's extremes, which rare ones do not stretch. Products of two
            # activations (attention) stay as they are.
            extra_options={"CalibMovingAverage": True, "MatMulConstBOnly": True},
        )
        model = onnx.load(made)
    drop_traces(model)
    return model


def plain_net(net: nn.Module) -> nn.Module:
    return copy.deepcopy(net).cpu().float().eval()


def levels_of(classifier: PooledClassifier, frames: Any) -> Tensor:
    """Frames as the user has them -> grey levels uint8 [F, h, w * 3] of the network's input size."""
    inputs = InputMaker(classifier.preprocessing, torch.device("cpu"), torch.float32)
    parts: Iterable[Any] = [frames] if isinstance(frames, (np.ndarray, Tensor)) else frames
    found = [inputs.resized(channels_first(part).flatten(0, 1).cpu()).contiguous() for part in parts]
    if not found:
        raise InvalidArgument("there are no frames; give a few hundred of the videos that the classifier will see")
    return torch.cat(found)


@torch.no_grad()
def answers(classifier: PooledClassifier, net: Callable[[Tensor], Tensor], levels: Tensor) -> Tensor:
    """Grey levels [F, h, w * 3] -> probabilities [F, C] of each frame by itself, the network being `net` of them."""
    parts = []
    for part in levels.split(_FRAMES_AT_ONCE):
        rows = check_finite(net(part), classifier.name)
        parts.append(activate(classifier.pool_logits(rows[:, None].to(classifier.device)), classifier.activation))
    return check_finite(torch.cat(parts), classifier.name)


def _place(own: Path | None, out: str | Path | None) -> Path:
    """The folder to write into; found out before the work begins."""
    if out is None:
        if own is None:
            raise InvalidArgument("the classifier has no folder of its own; say with out where to save it")
        return own
    folder = Path(out)
    if own is not None and folder.exists() and folder.samefile(own):
        return own
    check_place(folder, KIND, "classifier")
    if saved_folder(folder) is not None:
        raise InvalidArgument(
            f"{folder} holds a saved classifier, which would be lost; give that folder as the classifier to quantise "
            "it, or another folder to write into"
        )
    return folder


@contextmanager
def _quietly() -> Iterator[None]:
    """onnxruntime's tools write hints to the root logger that are of no use here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
