"""A sampler without torch: an exported ONNX network, with preprocessing and scoring in NumPy."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util import limits
from sosampler._util.files import parse_line, read_bytes
from sosampler._util.hardware import onnx_options, usable_cores
from sosampler._util.limits import check_below, check_count
from sosampler._util.validation import check_float, check_int
from sosampler.errors import InvalidArgument, MissingDependency, WeightsError, first_line
from sosampler.samplers.registry import CONFIG, MODEL, WEIGHTS, has_belief, read_config

Pixels = NDArray[np.uint8]
Numbers = NDArray[np.float64]
Scores = NDArray[np.float32]

# The network takes frames uint8 [B, T, 3, h, w] and returns `SamplerOutput`; class logits with a class head only.
INPUT = "frames"
ABOUT = "sosampler"  # key of the file's metadata that holds ours, as JSON
FORMAT = 1
DECORATION = ("about", "class_names")  # settings that do not affect scores

_BATCH_FRAMES = 64  # per run of the network: 3 MB each at 128 x 128

# ---- preprocessing
#
# Scores of neighbouring frames are close, so a difference of one pixel value can change the selection. Therefore this
# computes exactly what torch does with uint8 on the CPU: a triangle filter as wide as the scale, weights rounded to 16
# bits, first along rows, then along columns, rounded in between. Pillow has finer weights and sometimes differs by one.

_MAX_BITS = 22  # of a weight, if all are small; a weight and its sign fit into 16 bits


@dataclass(frozen=True)
class LightPreprocessing:
    """`classifiers.preprocessing.Preprocessing` in NumPy; the network itself normalises."""

    resize: int  # the short side, and the side of the square crop

    @property
    def size(self) -> tuple[int, int]:
        return self.resize, self.resize

    def __call__(self, frames: Pixels) -> Pixels:
        """Resize and crop uint8 [F, 3, H, W] -> uint8 [F, 3, size, size]."""
        height, width = frames.shape[2:]
        down, across = (_cropped_taps(side, min(height, width), self.resize) for side in (height, width))
        # Only rows inside the crop are resized.
        first, last = int(down.indices.min()), int(down.indices.max()) + 1
        down = down._replace(indices=down.indices - first)
        # For rows in which each pixel is three numbers: [3 * size, K].
        channels = (across.indices[:, None] * 3 + np.arange(3)[:, None]).reshape(-1, across.indices.shape[1])
        across = Taps(channels, across.weights.repeat(3, axis=0), across.bits)
        small = np.empty((len(frames), 3, *self.size), dtype=np.uint8)
        for index, frame in enumerate(np.moveaxis(frames, 1, -1)):
            rows = np.ascontiguousarray(frame[first:last]).reshape(last - first, width * 3)  # as they are decoded
            columns = _resample(rows, across, axis=1)
            small[index] = _resample(columns, down, axis=0).reshape(*self.size, 3).transpose(2, 0, 1)
        return small


class Taps(NamedTuple):
    """The K pixels of a row or column that make up each new one, and their integer weights in units of 2^-bits."""

    indices: NDArray[np.int64]  # [new, K]
    weights: NDArray[np.int32]  # [new, K]
    bits: int


def _cropped_taps(side: int, short: int, target: int) -> Taps:
    """Return the taps of one side of a frame after the centre crop, rounded as torchvision does."""
    resized = int(target * side / short)
    first = round((resized - target) / 2)
    indices, weights, bits = _taps(side, resized)
    return Taps(indices[first : first + target], weights[first : first + target], bits)


@lru_cache(maxsize=32)
def _taps(before: int, after: int) -> Taps:
    """Return the taps that resize a side from `before` to `after` pixels."""
    if before == after:
        return Taps(np.arange(after)[:, None], np.ones((after, 1), dtype=np.int32), 0)
    scale = before / after
    support = max(scale, 1.0)
    centre = scale * (np.arange(after) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + support + 0.5).astype(np.int64), before)
    indices = first[:, None] + np.arange(2 * math.ceil(support) + 1)  # [after, K]
    weights = np.maximum(1 - np.abs((indices - centre[:, None] + 0.5) / support), 0)
    weights[indices >= end[:, None]] = 0
    weights /= weights.sum(1, keepdims=True)
    bits = 0
    while bits < _MAX_BITS and int(0.5 + weights.max() * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    return Taps(np.minimum(indices, before - 1), (weights * (1 << bits) + 0.5).astype(np.int32), bits)


def _resample(image: Pixels, taps: Taps, *, axis: int) -> Pixels:
    """Resize one axis of uint8 [H, L]."""
    if not taps.bits:  # only cropped
        return np.take(image, taps.indices[:, 0], axis=axis)
    shape = (len(taps.indices), image.shape[1]) if axis == 0 else (len(image), len(taps.indices))
    total = np.full(shape, 1 << (taps.bits - 1), dtype=np.int32)  # so that the shift below rounds
    part = np.empty_like(total)
    for indices, weights in zip(taps.indices.T, taps.weights.T, strict=True):
        if weights.any():
            np.multiply(np.take(image, indices, axis=axis), weights[:, None] if axis == 0 else weights, out=part)
            total += part
    return (total >> taps.bits).clip(0, 255).astype(np.uint8)


def check_clips(frames: Any) -> Pixels:
    """Return frames, which must be a NumPy array uint8 [B, T, 3, H, W]."""
    if not isinstance(frames, np.ndarray):
        raise InvalidArgument(f"frames are a {type(frames).__name__} but must be a NumPy array, uint8 [B, T, 3, H, W]")
    if frames.ndim != 5 or frames.shape[2] != 3 or frames.dtype != np.uint8:
        hint = ""
        if frames.ndim == 4:
            hint = "; give one video's frames as a batch of one: frames[None]"
        elif frames.ndim == 5 and frames.shape[4] == 3:
            hint = "; the channels are last: use np.moveaxis(frames, -1, -3)"
        raise InvalidArgument(f"frames are {frames.dtype} {list(frames.shape)} but must be uint8 [B, T, 3, H, W]{hint}")
    if 0 in frames.shape:
        raise InvalidArgument(f"frames have shape {list(frames.shape)} and are empty; give at least one frame")
    return frames


# ---- scoring, as `sosampler.Scoring` does in torch

SALIENCY = {"saliency": "max"}
MAX_EVIDENCE_FRAMES = 10
MIN_LIKELIHOOD = 1e-4  # no single frame rules a class out


def check_scoring(settings: dict[str, Any], where: str) -> None:
    """Raise an error if `scores_of` does not support the settings."""
    if settings and settings != SALIENCY and not has_belief(settings):
        raise WeightsError(
            f"{where}: has the scoring {settings}, which this version of sosampler does not support; "
            "install the version that exported it"
        )


def scores_of(
    settings: dict[str, Any], importance: NDArray, class_logits: NDArray | None, *, multi_label: bool = False
) -> NDArray[np.float32]:
    """Return scores [B, T] from importance [B, T] and class_logits [B, T, C]."""
    if not settings:
        return importance.astype(np.float32)
    assert class_logits is not None, "a sampler that scores by classes has a class head"
    logits, head = class_logits.astype(np.float64), importance.astype(np.float64)
    if settings == SALIENCY:  # the log-odds of the highest class probability
        highest = logits.max(-1)
        if not multi_label:
            others = logits.copy()
            np.put_along_axis(others, logits.argmax(-1, keepdims=True), -np.inf, axis=-1)
            highest = highest - _logsumexp(others)[..., 0]
        return np.asarray(highest, dtype=np.float32)
    log_probs = -np.logaddexp(0, -logits) if multi_label else log_softmax(logits)
    belief = log_belief(settings, head, logits, multi_label=multi_label)[:, None]  # [B, 1, C]
    log_of_mean = _logsumexp(belief + log_probs)[..., 0]
    mean_of_log = (np.exp(belief) * log_probs).sum(-1)
    scores = settings["importance"] * head + 0.5 * log_of_mean + 0.5 * mean_of_log
    return np.asarray(scores, dtype=np.float32)


def sigmoid(numbers: Numbers) -> Numbers:
    """Return the logistic function without overflow.

    >>> sigmoid(np.array([-1e4, 0.0, 1e4])).tolist()
    [0.0, 0.5, 1.0]
    """
    return np.asarray(0.5 * (1 + np.tanh(numbers / 2)))


def log_belief(settings: dict[str, Any], importance: Numbers, logits: Numbers, *, multi_label: bool) -> Numbers:
    """Return the belief about the video's class from all of its frames: log probabilities [B, C]."""
    slope, offset = settings["relevance"]
    relevance = sigmoid(slope * importance + offset)[..., None]  # [B, T, 1]
    probs = sigmoid(logits) if multi_label else np.exp(log_softmax(logits))
    if multi_label:
        probs = probs / np.maximum(probs.sum(-1, keepdims=True), 1e-12)
    evidence = np.log(np.maximum(1 - relevance + relevance * probs.shape[-1] * probs, MIN_LIKELIHOOD))  # [B, T, C]
    count = importance.shape[1]
    return log_softmax(settings["belief"] * min(count, MAX_EVIDENCE_FRAMES) / count * evidence.sum(1))


def _logsumexp(numbers: Numbers) -> Numbers:
    """Reduce the last dimension to length one."""
    highest = numbers.max(-1, keepdims=True)
    return np.asarray(highest + np.log(np.exp(numbers - highest).sum(-1, keepdims=True)))


def log_softmax(numbers: Numbers) -> Numbers:
    return np.asarray(numbers - _logsumexp(numbers))


# ---- the sampler


class SamplerOutput(NamedTuple):
    """The outputs for T candidates of B videos, of torch or NumPy; those of masked candidates have no meaning."""

    scores: Any  # [B, T], what frames are ranked by
    importance: Any  # [B, T], the linear head
    class_logits: Any  # [B, T, C], with a class head, else None
    features: Any  # [B, T, D]


class OnnxSampler:
    """Scores candidate frames as the exported `SOSampler` does, with NumPy on the CPU.

    `model` are the bytes of a file that `sosampler export` wrote. By default it uses the `threads` of this process.
    """

    def __init__(self, model: bytes, *, name: str = MODEL, threads: int | None = None) -> None:
        self._session = open_session(model, name, threads)
        self.metadata = _read_metadata(self._session, name)
        self.config: dict[str, Any] = self.metadata["settings"]
        self._name = name
        check_scoring(self.config["scoring"], name)
        _check_graph(self._session, self.config, name)
        self.preprocessing = LightPreprocessing(self.config["input_size"])
        calibration = self.config["calibration"]
        self.calibration: tuple[float, float] | None = None if calibration is None else tuple(calibration)
        self._outputs = [output.name for output in self._session.get_outputs()]

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, threads: int | None = None) -> OnnxSampler:
        """Load a sampler from a folder with config.json and model.onnx; model.safetensors is not needed."""
        folder = Path(folder)
        config = read_config(folder)
        file = folder / MODEL
        if not file.is_file():
            raise MissingDependency(
                f"{folder}: has no {MODEL}, which a sampler needs without torch; write it with `sosampler export "
                f"{folder}` where torch is installed, or install it here with: pip install 'sosampler[train]'"
            )
        sampler = cls(read_bytes(file, "MAX_LIST_BYTES"), name=str(file), threads=threads)
        _check_belongs(sampler.metadata, config, folder)
        return sampler

    def look(self, frames: Pixels) -> SamplerOutput:
        """Return all outputs for uint8 frames [B, T, 3, H, W] of any size, in bounded memory."""
        frames = check_clips(frames)
        videos = max(1, _BATCH_FRAMES // frames.shape[1])
        parts = [self._run_videos(frames[begin : begin + videos]) for begin in range(0, len(frames), videos)]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        heads = joined["importance"], joined.get("class_logits")
        scores = scores_of(self.config["scoring"], *heads, multi_label=self.config["multi_label"])
        return SamplerOutput(scores, *heads, joined["features"])

    def score(self, frames: Pixels) -> Scores:
        """Return scores [B, T] for uint8 frames [B, T, 3, H, W]; higher is better."""
        scores: Scores = self.look(frames).scores
        return scores

    def choose(self, frames: Pixels, num_frames: int) -> NDArray[np.int64]:
        """Return the indices [B, N] of the N best of uint8 frames [B, T, 3, H, W], in time order."""
        scores = self.score(frames)
        if check_int("num_frames", num_frames) > scores.shape[1]:
            raise InvalidArgument(
                f"num_frames={num_frames} must be at most the {scores.shape[1]} candidates; give fewer, or more "
                "candidates"
            )
        return np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :num_frames], axis=1).astype(np.int64)

    def confidences(self, scores: ArrayLike) -> NDArray[np.float64]:
        """Return the expected confidence in 0..1 of the classifier on each frame alone, from scores of any shape."""
        if self.calibration is None:
            raise InvalidArgument("this sampler is not calibrated, so its scores only rank; train it with a dev split")
        slope, offset = self.calibration
        return sigmoid(slope * np.asarray(scores, dtype=np.float64) + offset)

    def fingerprint(self) -> str:
        """Return the fingerprint of the exported sampler."""
        return str(self.metadata["fingerprint"])

    def __repr__(self) -> str:
        size = f"{self.preprocessing.resize}x{self.preprocessing.resize}"
        return f"OnnxSampler({self.config['backbone']}, {size}, {self.fingerprint()})"

    def _run_videos(self, frames: Pixels) -> dict[str, Scores]:
        """Run the network; on long videos in segments that overlap by the `reach` of a temporal shift to each side."""
        count, reach = frames.shape[1], self.metadata["reach"]
        wanted = [name for name in self._outputs if name != "scores"]  # computed from all frames of a video
        parts = []
        for begin in range(0, count, _BATCH_FRAMES):
            end = min(begin + _BATCH_FRAMES, count)
            low, high = max(begin - reach, 0), min(end + reach, count)
            part = frames[:, low:high]
            small = self.preprocessing(part.reshape(-1, *frames.shape[2:]))
            outputs = self.run_network(small.reshape(*part.shape[:2], *small.shape[1:]), wanted)
            parts.append({name: values[:, begin - low : end - low] for name, values in outputs.items()})
        return {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}

    def run_network(self, frames: Pixels, outputs: list[str] | None = None) -> dict[str, Scores]:
        """Return the file's own outputs by name, for uint8 frames [B, T, 3, h, w] of the input size."""
        names = self._outputs if outputs is None else outputs
        values = run_session(self._session, names, {INPUT: frames}, self._name)
        for output, value in zip(names, values, strict=True):
            # [B, T] of scores and importance, [B, T, C] of class logits, [B, T, D] of features
            if value.shape[:2] != frames.shape[:2] or value.ndim != (2 if output in ("scores", "importance") else 3):
                raise WeightsError(
                    f"{self._name}: its output {output!r} has the shape {list(value.shape)} for frames "
                    f"{list(frames.shape)}; export the sampler again"
                )
        return dict(zip(names, values, strict=True))


def weights_digest(folder: Path) -> str | None:
    """Return the digest of a folder's weights file; None if it has none."""
    file = folder / WEIGHTS
    if not file.is_file():
        return None
    with open(file, "rb") as weights:
        return hashlib.file_digest(weights, "sha256").hexdigest()


def open_session(
    model: bytes | str, name: str, threads: int | None = None, advice: str = "export it again with `sosampler export`"
) -> Any:
    """Return an ONNX Runtime session of a file's bytes or path, which messages call `name`."""
    try:
        onnxruntime = import_module("onnxruntime")
    except ImportError as error:
        raise MissingDependency("onnxruntime is not installed; install it with: pip install sosampler") from error
    options = onnx_options(onnxruntime)
    # By default it takes all cores of the machine, even where this process may use only some.
    limit = os.environ.get("OMP_NUM_THREADS", "")
    default = int(limit) if limit.isdecimal() and int(limit) else usable_cores()
    options.intra_op_num_threads = default if threads is None else check_count("threads", threads, "MAX_THREADS")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle cores are free for decoding
    options.log_severity_level = 4  # failures raise the error below
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except _problems() as error:
        raise WeightsError(
            f"{name}: is not a network that ONNX Runtime can run ({first_line(error)}); {advice}"
        ) from error


def run_session(
    session: Any, outputs: list[str], inputs: dict[str, Any], name: str, advice: str = "export it again"
) -> list[Any]:
    """Return some outputs of a network; one that runs too long is stopped: a loop in a stranger's file may not end."""
    options = import_module("onnxruntime").RunOptions()
    timer = Timer(limits.ONNX_SECONDS, lambda: setattr(options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        return list(session.run(outputs, inputs, options))
    except _problems() as error:
        raise WeightsError(
            f"{name}: the network cannot be run, within {limits.ONNX_SECONDS:g} s (limits.ONNX_SECONDS) and "
            f"{limits.MAX_ONNX_BYTES >> 20} MiB (limits.MAX_ONNX_BYTES): {first_line(error)}; {advice}"
        ) from error
    finally:
        timer.cancel()


@cache
def _problems() -> tuple[type[Exception], ...]:
    """Return the errors of ONNX Runtime over a file, which have no common base class."""
    errors = import_module("onnxruntime").capi.onnxruntime_pybind11_state
    names = ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NoModel", "NotImplemented")
    return *(getattr(errors, name) for name in names), errors.RuntimeException, errors.EPFail


def _read_metadata(session: Any, name: str) -> dict[str, Any]:
    """Return the file's metadata, which must be of this package and format."""
    text = session.get_modelmeta().custom_metadata_map.get(ABOUT)
    if text is None:
        raise WeightsError(f"{name}: was not written by `sosampler export`; export the sampler with it")
    try:
        metadata = parse_line(text)
    except ValueError as error:
        raise WeightsError(f"{name}: its metadata are not JSON ({error}); export the sampler again") from error
    version = metadata.get("format") if isinstance(metadata, dict) else None
    if version != FORMAT:
        raise WeightsError(
            f"{name}: has format {version} but must have format {FORMAT}; "
            "export the sampler again with this version of sosampler, or install the one that exported it"
        )
    try:
        settings = metadata["settings"]
        calibration, reach = settings["calibration"], check_int("reach", metadata["reach"], at_least=0)
        check_below("reach", reach, "MAX_LAYERS")
        check_count("input_size", settings["input_size"], "MAX_INPUT_SIDE")
        if calibration is not None:
            slope, offset = calibration
            check_float("calibration[0]", slope), check_float("calibration[1]", offset)
        if not isinstance(settings["scoring"], dict) or not isinstance(settings["multi_label"], bool):
            raise InvalidArgument("scoring and multi_label are of another type")
        _ = metadata["fingerprint"], metadata["weights"], settings["backbone"]
    except (KeyError, TypeError, ValueError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else first_line(error)
        raise WeightsError(f"{name}: its metadata are not those of a sampler ({what}); export it again") from error
    return dict(metadata)


def _check_graph(session: Any, settings: dict[str, Any], name: str) -> None:
    """Raise an error if the network does not take frames of its input size, or lacks an output."""
    size, needed = (
        settings["input_size"],
        ["importance", "features", *(["class_logits"] if settings["scoring"] else [])],
    )
    inputs = [(each.name, each.type, len(each.shape), each.shape[2:]) for each in session.get_inputs()]
    outputs = {each.name for each in session.get_outputs()}
    right = [(INPUT, "tensor(uint8)", 5, [3, size, size])]
    if inputs != right or not outputs.issuperset(needed):
        raise WeightsError(
            f"{name}: takes {inputs} and returns {sorted(outputs)}, but must take {right} and return {needed}; export "
            "the sampler again"
        )


def _check_belongs(metadata: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    """Raise an error if model.onnx is of another training or version than the files beside it."""
    settings = {key: value for key, value in config.items() if key not in DECORATION}
    missing = object()
    differ = [key for key, value in settings.items() if metadata["settings"].get(key, missing) != value]
    digest = weights_digest(folder)
    if differ or (None not in (metadata["weights"], digest) and metadata["weights"] != digest):
        what = f"{CONFIG} ({', '.join(differ)})" if differ else WEIGHTS
        raise WeightsError(
            f"{folder}: {MODEL} does not belong to the {what} beside it, which another training or another version of "
            f"sosampler wrote; export again with `sosampler export {folder}`"
        )
