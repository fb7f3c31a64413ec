"""Score, choose and classify: batches of decoded candidates in, chosen frames and probabilities out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sosampler._util.cpu_bfloat16 import bfloat16_ends_the_process, cpu_is_good_at_bfloat16
from sosampler._util.devices import check_device
from sosampler._util.validation import one_of, true_or_false, whole_number
from sosampler.classifiers.base import INT8, PRECISIONS, check_positions
from sosampler.classifiers.outputs import check_finite
from sosampler.engine.cuda_graphs import GraphedCalls
from sosampler.engine.cuda_graphs import keep_memory as keep_freed_memory
from sosampler.engine.inputs import channels_first
from sosampler.engine.int8 import check_frame_by_frame, int8_classifier
from sosampler.engine.networks import TorchClassifier, TorchFeatures, can_be_fused, heads_of, judged
from sosampler.errors import InvalidArgument, WeightsError
from sosampler.samplers.backbones import MOBILENET
from sosampler.samplers.ranking import top_n
from sosampler.samplers.sosampler import SOSampler

BACKENDS = ("torch", "openvino", "onnxruntime")
# How a GPU is kept busy: "eager" starts kernel after kernel; "graphs" all at once, with the passes around convolutions
# joined with them or with each other; "triton" the same with each other only; "inductor" all at once over
# torch.compile, which takes half a minute at the first batch.
MODES = ("eager", "graphs", "triton", "inductor")
_WORD = 8  # bytes
_WAYS = {"eager": "steps", "graphs": "cudnn", "triton": "triton", "inductor": "inductor"}


class EngineResult(NamedTuple):
    """What came out for B videos of T candidates, on the engine's device."""

    chosen: Tensor  # [B, N] int64, positions among the candidates in time order
    scores: Tensor  # [B, T] float32, of the sampler
    probabilities: Tensor | None  # [B, C] float32, of the classifier; None without one

    def check(self, name: str = "the classifier") -> EngineResult:
        """Itself, or say that a network gave NaN; waits for the device."""
        bad = int((~torch.isfinite(self.scores)).sum())
        if bad:
            raise WeightsError(
                f"the sampler gives NaN or infinite scores for {bad} of {self.scores.numel()} frames; "
                "run it with precision='float32', or train it again with a lower learning rate"
            )
        if self.probabilities is not None:
            check_finite(self.probabilities, name)
        return self


class FrameEngine:
    """A sampler and a classifier, made ready to look at many videos.

    Both are copied as they are now: what is learned later is not seen. Whatever is not an `SOSampler`, or no classifier
    that looks at frames one by one, is called as it is.

    Args:
        sampler: an `SOSampler`, or anything with its `score`.
        classifier: of `create_classifier` or `wrap_classifier`, or anything with `clip_probs`; None to choose only.
        num_frames: N, how many candidates the classifier sees.
        device: where both run; None takes the sampler's.
        precision: of the classifier: "float32", "bfloat16" or "float16". None takes bfloat16 on GPUs that have it, on
            a CPU if a trial shows that it is faster, else float32. "int8" on a CPU, for one that `quantize_classifier`
            was given; ONNX Runtime runs it unless the backend is OpenVINO.
        sampler_precision: of the sampler's network, on a GPU. None takes the classifier's, but float16 for bfloat16
            where values stay small enough: close scores keep their order better. "float32" also resizes in it, so that
            choices are nearly always those of the sampler itself, more so where torch may not use TF32. On a CPU it is
            float32.
        backend: "torch"; "openvino", on the CPU; "onnxruntime", on the CPU for the sampler (the classifier in torch).
        compiled: on a GPU one of `MODES`; None takes "graphs".
        keep_memory: on the CPU let the process keep freed memory, see `engine.allocator`.

    Frames are uint8, [B, T, H, W, 3] as they are decoded or [B, T, 3, H, W], numpy or torch.
    """

    def __init__(
        self,
        sampler: Any,
        classifier: Any = None,
        *,
        num_frames: int,
        device: Any = None,
        precision: str | None = None,
        sampler_precision: str | None = None,
        backend: str = "torch",
        compiled: str | None = None,
        keep_memory: bool = True,
    ) -> None:
        self.num_frames = whole_number("num_frames", num_frames)
        self.backend = one_of("backend", backend, BACKENDS)
        if not hasattr(sampler, "score"):
            raise InvalidArgument(f"a {type(sampler).__name__} has no score; give an SOSampler, or load one")
        if classifier is not None and not hasattr(classifier, "clip_probs"):
            raise InvalidArgument(f"a {type(classifier).__name__} has no clip_probs; give a classifier of the package")
        self.device = check_device(getattr(sampler, "device", "cpu") if device is None else device)
        on_cpu = self.device.type == "cpu"
        if self.backend != "torch" and not on_cpu:
            raise InvalidArgument(f"backend={backend!r} runs on the CPU, not on {self.device}; give device='cpu'")
        if compiled is not None:
            one_of("compiled", compiled, MODES)
            if self.device.type != "cuda" and compiled != "eager":
                raise InvalidArgument(f"compiled={compiled!r} needs a CUDA GPU, not {self.device}; leave it out")
        self.mode = compiled or ("graphs" if self.device.type == "cuda" else "eager")
        self.precision = _settled_precision(self.device, precision)
        self._sampler_precision = None
        if sampler_precision is not None:
            self._sampler_precision = one_of("sampler_precision", sampler_precision, PRECISIONS)
        if on_cpu and true_or_false("keep_memory", keep_memory):
            keep_freed_memory()
        self.sampler, self.classifier = sampler, classifier
        if classifier is not None and self.precision == INT8:
            check_frame_by_frame(classifier)
        self._heads = heads_of(sampler, self.device) if isinstance(sampler, SOSampler) else None
        self._features = None if self._heads is None else self._make_features(sampler)
        self._fast_classifier = self._make_classifier(classifier) if can_be_fused(classifier) else None
        if classifier is not None and self._fast_classifier is None and hasattr(classifier, "to"):
            classifier.to(self.device)
        graphed = self.mode != "eager" and self._features is not None
        whole = classifier is None or self._fast_classifier is not None
        self._graphs = GraphedCalls(self._compute) if graphed and whole else None

    # ---- building

    def _make_features(self, sampler: SOSampler) -> Callable[[Tensor, int], Tensor]:
        if self.backend == "openvino":
            from sosampler.engine.backends import OpenVINOFeatures

            return OpenVINOFeatures(sampler)
        if self.backend == "onnxruntime":
            from sosampler.engine.backends import OrtFeatures

            return OrtFeatures(sampler)
        return TorchFeatures(sampler, self.device, self._sampler_type(sampler), self._way())

    def _make_classifier(self, classifier: Any) -> Callable[[Tensor], Tensor]:
        if self.precision == INT8:
            return int8_classifier(classifier, self.backend)
        if self.backend == "openvino":
            from sosampler.engine.backends import openvino_classifier

            return openvino_classifier(classifier, bfloat16=self.precision == "bfloat16")
        return TorchClassifier(classifier, self.device, getattr(torch, self.precision), self._way())

    def _way(self) -> str:
        if self.device.type == "cpu":
            return "onednn" if torch.backends.mkldnn.is_available() else "steps"
        return _WAYS[self.mode]

    def _sampler_type(self, sampler: SOSampler) -> torch.dtype:
        if self.device.type == "cpu":
            return torch.float32  # it is small, and what it says decides
        if self._sampler_precision is not None:
            asked: torch.dtype = getattr(torch, self._sampler_precision)
            return asked
        if self.precision == "bfloat16" and sampler.backbone.name == MOBILENET:  # its values stay small (ReLU6)
            return torch.float16
        found: torch.dtype = getattr(torch, self.precision)
        return found

    # ---- running

    @torch.no_grad()
    def run(self, frames: Any, positions: Any = None) -> EngineResult:
        """Score the candidates, choose the N best and classify them.

        `positions` [B, T]: where each candidate lies in its video, 0..1, for classifiers that know about time.

        On a GPU it returns before the device has finished, and nothing is checked for NaN: `result.check()` does both.
        """
        frames = self._checked(frames)
        where = check_positions(positions, frames)
        if self._graphs is not None:
            chosen, scores, probabilities = self._graphs(frames)
            assert chosen is not None
            assert scores is not None
            return EngineResult(chosen, scores, probabilities)
        scores = self._scores(frames)
        chosen = top_n(scores, self.num_frames)
        if self.classifier is None:
            result = EngineResult(chosen, scores, None)
        else:
            where = None if where is None else where.to(chosen.device).gather(1, chosen)
            result = EngineResult(chosen, scores, self._probabilities(_gathered(frames, chosen), where))
        return result if self.device.type != "cpu" else result.check(getattr(self.classifier, "name", "the classifier"))

    @torch.no_grad()
    def score(self, frames: Any) -> Tensor:
        """Candidates of B videos -> scores [B, T]."""
        return self._scores(self._on_device(frames))

    @torch.no_grad()
    def classify(self, frames: Any, positions: Any = None) -> Tensor:
        """Frames of B videos that somebody chose, N each, positions [B, N] -> probabilities [B, C]."""
        if self.classifier is None:
            raise InvalidArgument("this engine has no classifier; give one when it is made")
        frames = self._on_device(frames)
        return self._probabilities(frames, check_positions(positions, frames))

    def _compute(self, frames: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """All of it without waiting for the device."""
        scores = self._scores(frames)
        chosen = top_n(scores, self.num_frames)
        if self._fast_classifier is None:
            return chosen, scores, None
        return chosen, scores, self._fast_classifier(_gathered(frames, chosen))

    def _scores(self, frames: Tensor) -> Tensor:
        if self._features is None or self._heads is None:
            scores: Tensor = self.sampler.score(frames)
            return scores.to(self.device)
        num_candidates = frames.shape[1]
        return judged(self._heads, self._features(frames.flatten(0, 1), num_candidates), num_candidates)

    def _probabilities(self, frames: Tensor, positions: Tensor | None) -> Tensor:
        if self._fast_classifier is not None:
            return self._fast_classifier(frames)
        probabilities: Tensor = self.classifier.clip_probs(frames, positions)
        return probabilities

    def _checked(self, frames: Any) -> Tensor:
        frames = self._on_device(frames)
        if frames.shape[1] < self.num_frames:
            raise InvalidArgument(
                f"num_frames={self.num_frames} is more than the {frames.shape[1]} real candidates of a video; "
                "ask for fewer frames or offer more candidates"
            )
        return frames

    def _on_device(self, frames: Any) -> Tensor:
        return channels_first(frames).to(self.device, non_blocking=True)

    def __repr__(self) -> str:
        classifier = "" if self.classifier is None else f", {getattr(self.classifier, 'name', 'classifier')}"
        return (
            f"FrameEngine({type(self.sampler).__name__}{classifier}, N={self.num_frames}, {self.device}, "
            f"{self.precision}, {self.backend}, {self.mode})"
        )


def _gathered(frames: Tensor, chosen: Tensor) -> Tensor:
    """Frames [B, T, 3, H, W] at positions [B, N] -> [B, N, 3, H, W]; those decoded pixel by pixel stay so."""
    rows = torch.arange(len(frames), device=frames.device)[:, None]
    by_pixel = frames.stride(2) == 1  # channels last: index the memory as it lies
    memory = frames.movedim(2, -1) if by_pixel else frames
    shape = memory.shape[2:]
    if memory.is_contiguous() and shape.numel() % _WORD == 0 and memory.storage_offset() % _WORD == 0:
        words = memory.flatten(2).view(torch.int64)  # a GPU copies byte by byte several times as long
        found = words[rows, chosen].view(torch.uint8).unflatten(2, shape)
    else:
        found = memory[rows, chosen]
    return found.movedim(-1, 2) if by_pixel else found


def _settled_precision(device: torch.device, precision: str | None) -> str:
    if precision is not None:
        one_of("precision", precision, (*PRECISIONS, INT8))
        if precision == INT8 and device.type != "cpu":
            raise InvalidArgument(f"precision='int8' runs on the CPU, not on {device}; give device='cpu'")
        if precision == "bfloat16" and device.type == "cpu" and bfloat16_ends_the_process():
            raise InvalidArgument(
                "precision='bfloat16' ends the process on this CPU, which claims instructions that it does not have; "
                "give 'float32'"
            )
        return precision
    if device.type == "cuda":
        with torch.cuda.device(device):
            return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16" if device.type == "cpu" and cpu_is_good_at_bfloat16() else "float32"
