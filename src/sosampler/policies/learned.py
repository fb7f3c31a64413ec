"""A learned sampler as a policy of `select`: on torch, or without it through onnxruntime."""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError
from sosampler.policies.auto import AutoFrames, Numbers, count_frames, expected_by_belief, expected_by_confidence
from sosampler.policies.positional import top
from sosampler.policies.registry import Choice, Policy, pool_size
from sosampler.policies.score_rules import METHODS
from sosampler.policies.visual import typical_order
from sosampler.samplers.onnx_sampler import CONFIG, MODEL, WEIGHTS, OnnxSampler, has_belief, log_belief, sigmoid
from sosampler.video.reader import Frames
from sosampler.video.timeline import Indices

# One video at a time goes through a sampler: it uses all cores or the whole device, while other threads decode.
_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_locks_guard = threading.Lock()
# Samplers that are kept after they were loaded from a folder.
_KEPT = 4
# The device that is the CPU without torch.
ONNX = "onnx"
# What a sampler of torch is made of; the extra for torchcodec brings torch alone.
_TORCH = ("torch", "torchvision", "safetensors")


def policy_of(sampler: Any, *, name: str = "sosampler", method: str = "", device: Any = None) -> Policy:
    """The policy that chooses the N candidates to which the sampler gives the highest scores.

    `method` is another way to choose from the scores, one of `selectors.METHODS`; it is told in the policy's name.
    """
    if method:
        one_of("method", method, METHODS)
        name = f"{name}+{method}"
    if isinstance(sampler, OnnxSampler):
        check_light_device(device)
    elif device is not None:
        from sosampler._util.devices import check_device

        sampler = sampler.to(check_device(device))

    def choose(num_candidates: int, num_frames: int, frames: Frames | None, seed: int) -> Choice:
        assert frames is not None, "select decodes the candidates for policies that need them"
        scores = score_frames(sampler, frames, name)
        if not method:
            return Choice(top(scores, num_frames), scores)
        return Choice(METHODS[method](_weights(sampler, scores), num_frames), scores)

    def choose_auto(frames: Frames, auto: AutoFrames) -> Choice:
        said = look_at(sampler, frames, name)
        expected = expected_of(sampler, said)
        scores = _array(said.scores)[0]
        return Choice(top(scores, int(count_frames(expected, auto)[0])), scores, expected[0])

    def identity() -> str:
        fingerprint: str = sampler.fingerprint()
        return f"{fingerprint}+{method}" if method else fingerprint

    why_not = None if method else why_no_number(sampler, name)
    says = "the N candidates to which a trained sampler gives the highest scores"
    return Policy(
        name,
        f"{says}, by {method}" if method else says,
        choose,
        default_candidates=pool_size,
        needs_frames=True,
        least_size=least_size(sampler.preprocessing),
        identity=identity,
        choose_auto=None if method or why_not else choose_auto,
        no_auto=why_not,
    )


def load_policy(folder: str | os.PathLike[str], *, method: str = "", device: Any = None) -> Policy:
    """The policy of a saved sampler. A folder is read once a process, and again when its files have changed.

    Torch runs it if it is installed, without `device` on the GPU if there is one. Without torch, with device="onnx",
    and where the folder has no other network, onnxruntime runs its model.onnx on the CPU.
    """
    path = Path(folder).resolve()
    # Training anew into the same folder changes one or the other.
    stamp = tuple(_stamp(path / file) for file in (CONFIG, WEIGHTS, MODEL))
    only_onnx = (path / MODEL).is_file() and not (path / WEIGHTS).is_file()
    if device == ONNX or only_onnx or not _is_there(_TORCH):
        check_light_device(device)
        sampler = _loaded_without_torch(path, stamp)
    else:
        sampler = _loaded(path, stamp[:2], _torch_device(device))
    return policy_of(sampler, name=os.fspath(folder), method=method)


def _is_there(packages: tuple[str, ...]) -> bool:
    """Whether all can be imported; none is."""
    try:
        return all(find_spec(package) is not None for package in packages)
    except ModuleNotFoundError:
        return False


def check_light_device(device: Any) -> None:
    if device is None or str(device) in (ONNX, "cpu"):
        return
    if not _is_there(_TORCH):
        raise MissingDependency(f"device={str(device)!r} needs torch; install sosampler[train], or leave it out")
    raise InvalidArgument(
        f"device={str(device)!r} is not for a sampler that onnxruntime runs; give cpu, or leave it out; "
        f"on torch it runs from a folder with {WEIGHTS}"
    )


def _torch_device(device: Any) -> Any:
    import torch

    from sosampler._util.devices import check_device

    return check_device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)


def _stamp(path: Path) -> tuple[int, int]:
    if not path.is_file():
        return 0, 0  # whoever loads it says what is missing
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=_KEPT)
def _loaded(path: Path, stamp: tuple[tuple[int, int], ...], device: Any) -> Any:
    from sosampler.samplers.registry import load_sampler

    return load_sampler(path).to(device)


@lru_cache(maxsize=_KEPT)
def _loaded_without_torch(path: Path, stamp: tuple[tuple[int, int], ...]) -> OnnxSampler:
    return OnnxSampler.from_pretrained(path)


def score_frames(sampler: Any, frames: Frames, name: str) -> np.ndarray:
    """Candidates of one video, uint8 [T, H, W, 3] -> scores [T]."""
    scores: np.ndarray = _array(_asked(sampler, "score", frames))[0]
    _check_finite(scores, name)
    return scores


def look_at(sampler: Any, frames: Frames, name: str) -> Any:
    """Candidates of one video, uint8 [T, H, W, 3] -> all that the network says about a batch of this one."""
    said = _asked(sampler, "look", frames)
    _check_finite(_array(said.scores), name)
    return said


def _asked(sampler: Any, what: str, frames: Frames) -> Any:
    clips = frames.transpose(0, 3, 1, 2)[None]  # [1, T, 3, H, W]
    with lock_of(sampler):
        if isinstance(sampler, OnnxSampler):
            return getattr(sampler, what)(clips)
        import torch

        return getattr(sampler, what)(torch.from_numpy(np.ascontiguousarray(clips)))


def _array(scores: Any) -> np.ndarray:
    found: np.ndarray = scores if isinstance(scores, np.ndarray) else scores.float().cpu().numpy()
    return found


def _check_finite(scores: np.ndarray, name: str) -> None:
    if not np.isfinite(scores).all():
        raise SosamplerError(f"{name}: the sampler gives scores that are no numbers; train it again, or load it again")


def _weights(sampler: Any, scores: np.ndarray) -> np.ndarray:
    """What a method weighs [T]: confidences, as in evaluation; the scores themselves where nobody calibrated them."""
    if getattr(sampler, "calibration", None) is None:
        return scores
    if isinstance(sampler, OnnxSampler):
        return sampler.confidences(scores)
    import torch

    confidences: np.ndarray = sampler.confidences(torch.from_numpy(scores)).numpy()
    return confidences


def lock_of(sampler: Any) -> threading.Lock:
    with _locks_guard:
        return _locks.setdefault(sampler, threading.Lock())


def least_size(preprocessing: Any) -> int:
    """Short side of frames that lose nothing when they are brought to a network's input."""
    resize = preprocessing.resize
    return int(resize) if isinstance(resize, int) else int(max(resize))


def why_no_number(sampler: Any, name: str) -> str | None:
    """None for a sampler that knows what a frame is worth; else what it lacks to decide how many are needed."""
    if not hasattr(sampler, "look") or not hasattr(sampler, "config"):
        return (
            f"{name}: a {type(sampler).__name__} gives scores that only rank, so that num_frames='auto' has nothing to "
            "go by; give a number, or an SOSampler"
        )
    if not has_belief(sampler.config["scoring"]) and sampler.calibration is None:
        return (
            f"{name}: this sampler is not calibrated, so that num_frames='auto' has nothing to go by; give a number, "
            "or train it again, which calibrates it"
        )
    return None


def expected_of(sampler: Any, said: Any, counts: NDArray[np.int64] | None = None) -> Numbers:
    """[B, T]: at [:, k - 1] what is expected of the k best candidates; −inf where a video has fewer.

    Args:
        sampler: `SOSampler` or `OnnxSampler`, one of which `why_no_number` knows nothing.
        said: what its `look` gave for B videos with T candidates.
        counts: real candidates of each video [B]; the others stand at the end. None: all are real.
    """
    scores, importance, logits = (_numbers(part) for part in (said.scores, said.importance, said.class_logits))
    assert scores is not None, "whoever looks gives scores"
    if counts is None:
        return _of_whole(sampler, scores, importance, logits)
    expected = np.full(scores.shape, -np.inf)
    for count in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == count)
        parts = [None if part is None else part[rows, :count] for part in (scores, importance, logits)]
        expected[rows, :count] = _of_whole(sampler, *parts)  # type: ignore[arg-type]
    return expected


def _of_whole(sampler: Any, scores: Numbers, importance: Numbers | None, logits: Numbers | None) -> Numbers:
    settings, multi_label = sampler.config["scoring"], sampler.config["multi_label"]
    if has_belief(settings):
        assert importance is not None, "a belief is drawn from both heads"
        assert logits is not None, "a belief is drawn from both heads"
        belief = log_belief(settings, importance, logits, multi_label=multi_label)
        return expected_by_belief(scores, logits, belief, multi_label=multi_label)
    slope, offset = sampler.calibration
    return expected_by_confidence(scores, sigmoid(slope * scores + offset))


def _numbers(part: Any) -> Numbers | None:
    """float64, of a tensor on any device too."""
    if part is None:
        return None
    return np.asarray(part.detach().cpu() if hasattr(part, "detach") else part, dtype=np.float64)


FOLDER = Path(__file__).parents[1] / "samplers" / "general"

# Chosen on pictures and clips that were held out of its training (benchmarks/general_sampler.json).
CHOICE: dict[str, float] = {
    "clearness": 0.05,
    "sharpness": 4.0,
    "movement": 8.0,
    "most_movement": 0.1,
    "redundancy": 0.5,
    "alike": 0.7,
}


@lru_cache(maxsize=1)
def general_sampler() -> OnnxSampler:
    """Read once a process."""
    return OnnxSampler.from_pretrained(FOLDER)


def general_order(frames: Frames, num_frames: int) -> tuple[Indices, Numbers]:
    """Candidates of one video, uint8 [T, H, W, 3] -> N of them in the order of choice, and the value of each [T]."""
    sampler = general_sampler()
    with lock_of(sampler):
        said = sampler.look(frames.transpose(0, 3, 1, 2)[None])
    quality = sigmoid(said.scores[0].astype(np.float64))
    if not (np.isfinite(quality).all() and np.isfinite(said.features).all()):
        raise SosamplerError("the general sampler gives scores that are no numbers; install sosampler again")
    return typical_order(quality, said.features[0], num_frames, **CHOICE)
