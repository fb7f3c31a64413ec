"""A trained sampler without torch: `model.onnx` of its folder, run by onnxruntime on the CPU.

`sosampler export` writes that file. It knows its own settings, whose weights it holds, and by which version of this
arrangement it was written, so that a file that no longer belongs to its folder is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler.checks import whole_number
from sosampler.errors import InvalidArgument, MissingDependency, WeightsError, first_line
from sosampler.policies.rules import top
from sosampler.samplers.light_pixels import LightPreprocessing, Pixels, check_clips
from sosampler.samplers.light_scoring import check_scoring, scores_of, sigmoid
from sosampler.saved_folders import saved_kind

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
        return np.stack([top(of_one, num_frames) for of_one in scores])

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
