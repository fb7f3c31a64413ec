"""Frames for a sampler's network without torch: resize without aliasing and centre crop, in NumPy.

Scores of neighbouring frames lie close, so a level of a pixel more or less can change who is chosen. Therefore this
does what torch does with uint8 on the CPU, digit by digit: triangles as wide as the scale, weights rounded to 16 bits,
first along rows, then along columns, with levels in between. Pillow, with finer weights, is off by one here and there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.files import saved_kind
from sosampler._util.validation import whole_number
from sosampler.errors import InvalidArgument, MissingDependency, WeightsError, first_line

Pixels = NDArray[np.uint8]

_MOST_BITS = 22  # of a weight, where all are small; those of a weight and its sign fit into 16


@dataclass(frozen=True)
class LightPreprocessing:
    """What `classifiers.preprocessing.Preprocessing` is to torch, up to the normalisation, which the network does."""

    resize: int  # the short side; the crop is a square of as many pixels

    @property
    def size(self) -> tuple[int, int]:
        return self.resize, self.resize

    def __call__(self, frames: Pixels) -> Pixels:
        """uint8 [F, 3, H, W] -> uint8 [F, 3, size, size]"""
        height, width = frames.shape[2:]
        down, across = (_cropped_taps(side, min(height, width), self.resize) for side in (height, width))
        # Rows that are cropped away need not be resized.
        first, last = int(down.places.min()), int(down.places.max()) + 1
        down = down._replace(places=down.places - first)
        small = np.empty((len(frames), 3, *self.size), dtype=np.uint8)
        for place, frame in enumerate(np.moveaxis(frames, 1, -1)):
            rows = np.ascontiguousarray(frame[first:last]).reshape(last - first, width * 3)  # as decoders have them
            columns = _weighed(rows, across.for_colours(), axis=1)
            small[place] = _weighed(columns, down, axis=0).reshape(*self.size, 3).transpose(2, 0, 1)
        return small


class Taps(NamedTuple):
    """Which pixels of a row or column make up each new one, and by how much: whole numbers in units of 2^-bits."""

    places: NDArray[np.int64]  # [new, K]
    weights: NDArray[np.int32]  # [new, K]
    bits: int

    def for_colours(self) -> Taps:
        """For rows of which each pixel is three numbers; [3 new, K]."""
        places = self.places[:, None] * 3 + np.arange(3)[:, None]  # [new, 3, K]
        return Taps(places.reshape(-1, self.places.shape[1]), self.weights.repeat(3, axis=0), self.bits)


def _cropped_taps(side: int, short: int, target: int) -> Taps:
    """Of a side of a frame, for the middle of what it becomes; rounded as torchvision rounds."""
    between = int(target * side / short)
    first = round((between - target) / 2)
    taps = _taps(side, between)
    middle = slice(first, first + target)
    return Taps(taps.places[middle], taps.weights[middle], taps.bits)


@lru_cache(maxsize=32)
def _taps(before: int, after: int) -> Taps:
    """For a side of `before` pixels that becomes one of `after`."""
    if before == after:
        return Taps(np.arange(after)[:, None], np.ones((after, 1), dtype=np.int32), 0)
    scale = before / after
    support = max(scale, 1.0)
    centre = scale * (np.arange(after) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + support + 0.5).astype(np.int64), before)
    places = first[:, None] + np.arange(2 * math.ceil(support) + 1)  # [after, K]
    shares = np.maximum(1 - np.abs((places - centre[:, None] + 0.5) / support), 0)
    shares[places >= end[:, None]] = 0
    shares /= shares.sum(1, keepdims=True)
    bits = 0
    while bits < _MOST_BITS and int(0.5 + shares.max() * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    weights = (shares * (1 << bits) + 0.5).astype(np.int32)
    return Taps(np.minimum(places, before - 1), weights, bits)


def _weighed(picture: Pixels, taps: Taps, *, axis: int) -> Pixels:
    """uint8 [H, L] with one axis brought to another length."""
    if not taps.bits:  # as it is, but for the crop
        return np.take(picture, taps.places[:, 0], axis=axis)
    shape = (len(taps.places), picture.shape[1]) if axis == 0 else (len(picture), len(taps.places))
    total = np.full(shape, 1 << (taps.bits - 1), dtype=np.int32)  # so that the shift below rounds
    part = np.empty_like(total)
    for places, weights in zip(taps.places.T, taps.weights.T, strict=True):
        if weights.any():
            np.multiply(np.take(picture, places, axis=axis), weights[:, None] if axis == 0 else weights, out=part)
            total += part
    return (total >> taps.bits).clip(0, 255).astype(np.uint8)


def check_clips(frames: Any) -> Pixels:
    """Frames as a NumPy array uint8 [B, T, 3, H, W], or say what is wrong with them."""
    if not isinstance(frames, np.ndarray):
        raise InvalidArgument(f"frames are a {type(frames).__name__}; give a NumPy array, uint8 [B, T, 3, H, W]")
    if frames.ndim != 5 or frames.shape[2] != 3 or frames.dtype != np.uint8:
        hint = ""
        if frames.ndim == 4:
            hint = "; put one video's frames into a batch of one: frames[None]"
        elif frames.ndim == 5 and frames.shape[4] == 3:
            hint = "; the channels stand last: np.moveaxis(frames, -1, -3) puts them in their place"
        raise InvalidArgument(f"frames are {frames.dtype} {list(frames.shape)}; give uint8 [B, T, 3, H, W]{hint}")
    if 0 in frames.shape:
        raise InvalidArgument(f"frames have shape {list(frames.shape)}; nothing is in them, give at least one frame")
    return frames


Numbers = NDArray[np.float64]

# As in `samplers.scoring`.
_SALIENCY = {"saliency": "max"}
_BELIEF = {"belief", "relevance", "importance"}
_MOST_WITNESSES = 10
_LEAST = 1e-4


def check_scoring(settings: dict[str, Any], where: str) -> None:
    """These are settings that `scores_of` knows, or say so."""
    if settings and settings != _SALIENCY and set(settings) != _BELIEF:
        raise WeightsError(
            f"{where}: scores frames by {settings}, which this version of sosampler does not know; "
            "install the version that exported it"
        )


def scores_of(
    settings: dict[str, Any], importance: NDArray, class_logits: NDArray | None, *, multi_label: bool = False
) -> NDArray[np.float32]:
    """importance [B, T], class_logits [B, T, C] -> scores [B, T]."""
    if not settings:
        return importance.astype(np.float32)
    assert class_logits is not None, "a sampler that scores by classes has a class head"
    logits, head = class_logits.astype(np.float64), importance.astype(np.float64)
    if settings == _SALIENCY:
        return _saliency(logits, multi_label).astype(np.float32)
    log_probs = -np.logaddexp(0, -logits) if multi_label else _log_softmax(logits)
    about = log_belief(settings, head, logits, multi_label=multi_label)[:, None]  # [B, 1, C]
    log_of_mean = _logsumexp(about + log_probs)[..., 0]
    mean_of_log = (np.exp(about) * log_probs).sum(-1)
    scores = settings["importance"] * head + 0.5 * log_of_mean + 0.5 * mean_of_log
    return np.asarray(scores, dtype=np.float32)


def sigmoid(numbers: Numbers) -> Numbers:
    """Without overflow.

    >>> sigmoid(np.array([-1e4, 0.0, 1e4])).tolist()
    [0.0, 0.5, 1.0]
    """
    return np.asarray(0.5 * (1 + np.tanh(numbers / 2)))


def has_belief(settings: dict[str, Any]) -> bool:
    """Whether a sampler with these settings asks what the whole video is about."""
    return set(settings) == _BELIEF


def log_belief(settings: dict[str, Any], importance: Numbers, logits: Numbers, *, multi_label: bool) -> Numbers:
    """What the video is about, as far as all of its frames tell: log probabilities [B, C]."""
    slope, offset = settings["relevance"]
    relevance = sigmoid(slope * importance + offset)[..., None]  # [B, T, 1]
    shares = sigmoid(logits) if multi_label else np.exp(_log_softmax(logits))
    if multi_label:
        shares = shares / np.maximum(shares.sum(-1, keepdims=True), 1e-12)
    evidence = np.log(np.maximum(1 - relevance + relevance * shares.shape[-1] * shares, _LEAST))  # [B, T, C]
    count = importance.shape[1]
    return _log_softmax(settings["belief"] * min(count, _MOST_WITNESSES) / count * evidence.sum(1))


def _saliency(logits: Numbers, multi_label: bool) -> Numbers:
    """How sure the class head is of any class, as log-odds."""
    highest = logits.max(-1)
    if multi_label:
        return np.asarray(highest)
    others = logits.copy()
    np.put_along_axis(others, logits.argmax(-1, keepdims=True), -np.inf, axis=-1)
    return np.asarray(highest - _logsumexp(others)[..., 0])


def _logsumexp(numbers: Numbers) -> Numbers:
    """Over the last dimension, which stays with length one."""
    highest = numbers.max(-1, keepdims=True)
    return np.asarray(highest + np.log(np.exp(numbers - highest).sum(-1, keepdims=True)))


def _log_softmax(numbers: Numbers) -> Numbers:
    return np.asarray(numbers - _logsumexp(numbers))


MODEL, CONFIG, WEIGHTS = "model.onnx", "config.json", "model.safetensors"
KIND = "sosampler sampler"

# The network: frames uint8 [B, T, 3, h, w] in, for every frame these out. Class logits only with a class head.
INPUT = "frames"
OUTPUTS = ("scores", "importance", "class_logits", "features")
# Key of the file's metadata under which sosampler's own stand, as JSON.
ABOUT = "sosampler"
FORMAT = 1
# Settings that decide no score.
DECORATION = ("about", "class_names")

# Frames that go through the network at once: 3 MB each at 128 x 128.
_FRAMES_AT_ONCE = 64

Scores = NDArray[np.float32]


class OnnxOutput(NamedTuple):
    """What the network says about T candidates of B videos."""

    scores: Scores  # [B, T], what frames are ranked by
    importance: Scores  # [B, T], the linear head
    class_logits: Scores | None  # [B, T, C], where there is a class head
    features: Scores  # [B, T, D]


class OnnxSampler:
    """Scores candidate frames as the `SOSampler` of which it was exported does, in NumPy and on the CPU.

    Args:
        model: the bytes of a file that `sosampler export --format onnx` wrote.
        name: how to call it in messages.
        threads: of the CPU; as many as this process may use if not given.
    """

    def __init__(self, model: bytes, *, name: str = MODEL, threads: int | None = None) -> None:
        self._session = _open(model, name, threads)
        self.told = _read_about(self._session, name)
        self.config: dict[str, Any] = self.told["settings"]
        check_scoring(self.config["scoring"], name)
        self.preprocessing = LightPreprocessing(self.config["input_size"])
        calibration = self.config["calibration"]
        self.calibration: tuple[float, float] | None = None if calibration is None else tuple(calibration)
        self._outputs = [given.name for given in self._session.get_outputs()]

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, threads: int | None = None) -> OnnxSampler:
        """The sampler of a folder with config.json and model.onnx; model.safetensors beside them is not needed."""
        folder = Path(folder)
        _check_kind(folder)
        file = folder / MODEL
        if not file.is_file():
            raise MissingDependency(
                f"{folder}: has no {MODEL}, without which a sampler runs on torch only; write it where torch is, with "
                f"`sosampler export {folder}`, or install sosampler[train]"
            )
        sampler = cls(file.read_bytes(), name=str(file), threads=threads)
        _check_belongs(sampler.told, folder)
        return sampler

    def look(self, frames: Pixels) -> OnnxOutput:
        """uint8 [B, T, 3, H, W] of any size -> all outputs, in bounded memory."""
        frames = check_clips(frames)
        videos = max(1, _FRAMES_AT_ONCE // frames.shape[1])
        parts = [self._look_at_few(frames[begin : begin + videos]) for begin in range(0, len(frames), videos)]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        class_logits = joined.get("class_logits")
        scores = scores_of(
            self.config["scoring"], joined["importance"], class_logits, multi_label=self.config["multi_label"]
        )
        return OnnxOutput(scores, joined["importance"], class_logits, joined["features"])

    def score(self, frames: Pixels) -> Scores:
        """uint8 [B, T, 3, H, W] -> scores [B, T]; the higher, the better."""
        return self.look(frames).scores

    def choose(self, frames: Pixels, num_frames: int) -> NDArray[np.int64]:
        """uint8 [B, T, 3, H, W] -> positions [B, N] of the N best candidates of each video, in time order."""
        scores = self.score(frames)
        if whole_number("num_frames", num_frames) > scores.shape[1]:
            raise InvalidArgument(
                f"num_frames={num_frames} is more than the {scores.shape[1]} candidates; ask for fewer, or offer more"
            )
        return np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :num_frames], axis=1).astype(np.int64)

    def confidences(self, scores: ArrayLike) -> NDArray[np.float64]:
        """Scores [...] -> the confidence in 0..1 to expect of the classifier that sees such a frame alone."""
        if self.calibration is None:
            raise InvalidArgument("this sampler is not calibrated, so its scores only rank; train it with a dev split")
        slope, offset = self.calibration
        return sigmoid(slope * np.asarray(scores, dtype=np.float64) + offset)

    def fingerprint(self) -> str:
        """That of the sampler that was exported: the same weights and settings."""
        return str(self.told["fingerprint"])

    def __repr__(self) -> str:
        size = f"{self.preprocessing.resize}x{self.preprocessing.resize}"
        return f"OnnxSampler({self.config['backbone']}, {size}, {self.fingerprint()})"

    def _look_at_few(self, frames: Pixels) -> dict[str, Scores]:
        """What the network says about frames of as many videos as go at once; a long one in stretches that overlap.

        Through a temporal shift a frame depends on `reach` frames to each side.
        """
        count, reach = frames.shape[1], self.told["reach"]
        parts = []
        for begin in range(0, count, _FRAMES_AT_ONCE):
            end = min(begin + _FRAMES_AT_ONCE, count)
            low, high = max(begin - reach, 0), min(end + reach, count)
            said = self._run(frames[:, low:high])
            parts.append({name: told[:, begin - low : end - low] for name, told in said.items()})
        return {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}

    def _run(self, frames: Pixels) -> dict[str, Scores]:
        batch, count = frames.shape[:2]
        small = self.preprocessing(frames.reshape(batch * count, *frames.shape[2:]))
        wanted = [name for name in self._outputs if name != "scores"]
        return self.run_network(small.reshape(batch, count, *small.shape[1:]), wanted)

    def run_network(self, frames: Pixels, outputs: list[str] | None = None) -> dict[str, Scores]:
        """uint8 [B, T, 3, h, w] of the input size, all at once -> what the file itself gives, by name."""
        names = self._outputs if outputs is None else outputs
        return dict(zip(names, self._session.run(names, {INPUT: frames}), strict=True))


def weights_digest(folder: Path) -> str | None:
    """What tells the weights of a folder from others; None where it has none."""
    file = folder / WEIGHTS
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _open(model: bytes, name: str, threads: int | None) -> Any:
    try:
        onnxruntime = import_module("onnxruntime")
    except ImportError as error:
        raise MissingDependency("onnxruntime is not installed; install it with: pip install sosampler") from error
    problems = onnxruntime.capi.onnxruntime_pybind11_state
    options = onnxruntime.SessionOptions()
    # Said, because otherwise it takes all cores of the machine, also where this process may use a few.
    options.intra_op_num_threads = _num_threads() if threads is None else whole_number("threads", threads)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # cores that wait are free for decoding
    options.log_severity_level = 4  # what fails is told by the error below
    broken = (problems.Fail, problems.InvalidArgument, problems.InvalidGraph, problems.InvalidProtobuf)
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except (*broken, problems.NoModel, problems.NotImplemented, problems.RuntimeException) as error:
        raise WeightsError(
            f"{name}: is not a network that onnxruntime can run ({first_line(error)}); "
            "export it again with `sosampler export`"
        ) from error


def _num_threads() -> int:
    """As many as the user says for torch and its kin, or as there are cores for this process."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    if told.isdecimal() and int(told):
        return int(told)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_about(session: Any, name: str) -> dict[str, Any]:
    """What the file says about itself, if it is one of sosampler's and of this version."""
    text = session.get_modelmeta().custom_metadata_map.get(ABOUT)
    if text is None:
        raise WeightsError(
            f"{name}: was not written by `sosampler export`, so nobody knows what its numbers mean; export the sampler"
        )
    try:
        told = json.loads(text)
    except ValueError as error:
        raise WeightsError(f"{name}: its settings are not JSON ({error}); export the sampler again") from error
    version = told.get("format") if isinstance(told, dict) else None
    if version != FORMAT:
        raise WeightsError(
            f"{name}: is of format {version}, and this version of sosampler reads format {FORMAT}; "
            "export the sampler again with this one, or install that which exported it"
        )
    return dict(told)


def _check_kind(folder: Path) -> None:
    kind = saved_kind(folder)
    if kind is None:
        raise WeightsError(
            f"{folder}: has no {CONFIG}, so it is not a saved sampler; give a folder that training wrote"
        )
    if kind != KIND:
        raise WeightsError(
            f"{folder}: holds {f'a {kind}' if kind else 'something else'} instead of a sampler; "
            "give a folder that training a sampler wrote"
        )


def _check_belongs(told: dict[str, Any], folder: Path) -> None:
    """A sampler that was trained anew in its old folder leaves the old network there."""
    written = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    settings = {key: value for key, value in written.items() if key not in ("kind", *DECORATION)}
    missing = object()
    differ = [key for key, value in settings.items() if told["settings"].get(key, missing) != value]
    digest = weights_digest(folder)
    if differ or (None not in (told["weights"], digest) and told["weights"] != digest):
        what = f"{CONFIG} ({', '.join(differ)})" if differ else WEIGHTS
        raise WeightsError(
            f"{folder}: {MODEL} does not belong to the {what} beside it, which another training or another version of "
            f"sosampler wrote; export again with `sosampler export {folder}`"
        )
