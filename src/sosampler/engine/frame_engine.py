"""Score, select and classify: decoded candidates of many videos in, selected frames and probabilities out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sosampler._util.hardware import bfloat16_crashes, check_device, cpu_is_fast_in_bfloat16, keep_memory
from sosampler._util.validation import check_bool, check_int, one_of
from sosampler.classifiers.base import INT8, PRECISIONS, check_finite, check_positions
from sosampler.engine.backends import RuntimeFeatures, check_pooled, int8_classifier, openvino_classifier
from sosampler.engine.networks import TorchClassifier, TorchFeatures, can_be_fused, channels_first, copy_heads
from sosampler.errors import InvalidArgument
from sosampler.samplers.backbones import MOBILENET
from sosampler.samplers.sosampler import SOSampler, check_scores, top_n

BACKENDS = ("torch", "openvino", "onnxruntime")
# How a GPU runs. eager: kernel by kernel. graphs: one CUDA graph, in which cuDNN or Triton kernels join the steps
# around convolutions. triton: the same with Triton kernels only. inductor: a CUDA graph over torch.compile, which takes
# half a minute at the first batch.
MODES = ("eager", "graphs", "triton", "inductor")
_CONV_BACKENDS = {"eager": "eager", "graphs": "cudnn", "triton": "triton", "inductor": "inductor"}
_WORD = 8  # bytes


class EngineResult(NamedTuple):
    """The outputs for B videos of T candidates, on the engine's device."""

    chosen: Tensor  # [B, N] int64, indices of candidates in time order
    scores: Tensor  # [B, T] float32, of the sampler
    probabilities: Tensor | None  # [B, C] float32, of the classifier; None without one, and where it answers by frames
    frame_probabilities: Tensor | None = None  # [B, N, C] float32, of each chosen frame alone, with `by_frames`
    class_logits: Tensor | None = None  # [B, T, C] float32, of the sampler's class head, with `by_frames`

    def check(self, name: str = "the classifier") -> EngineResult:
        """Return itself, or raise an error if a network returned NaN; waits for the device."""
        check_scores(self.scores)
        for probabilities in (self.probabilities, self.frame_probabilities):
            if probabilities is not None:
                check_finite(probabilities, name)
        return self


class FrameEngine:
    """A sampler and a classifier, optimised to process many videos.

    Both are copied: later changes of the originals have no effect. Samplers other than `SOSampler`, and classifiers
    that see whole clips, are called as they are.

    Args:
        sampler: an `SOSampler`, or any object with its `score`.
        classifier: of `create_classifier` or `wrap_classifier`, or any object with `clip_probs`; None to select only.
        num_frames: N, how many candidates the classifier sees.
        device: where both run; None takes the sampler's.
        precision: of the classifier: "float32", "bfloat16" or "float16". None takes bfloat16 on GPUs that have it, on
            a CPU if a trial shows that it is faster, else float32. "int8" runs on a CPU, for classifiers prepared with
            `quantize_classifier`; by ONNX Runtime unless the backend is OpenVINO.
        sampler_precision: of the sampler's network on a GPU; on a CPU it is float32. None takes the classifier's, but
            float16 for bfloat16 where values stay small enough: it keeps the order of close scores better. "float32"
            also resizes in float32, so that nearly always the same frames are selected as by the sampler itself, more
            so where torch may not use TF32.
        backend: "torch"; "openvino", on the CPU; "onnxruntime", on the CPU for the sampler (the classifier in torch).
        compiled: on a GPU one of `MODES`; None takes "graphs".
        by_frames: give the classifier's answers for the chosen frames one by one, and those of an `SOSampler`'s class
            head, instead of one answer.

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
        by_frames: bool = False,
    ) -> None:
        self.by_frames = check_bool("by_frames", by_frames)
        self.num_frames = check_int("num_frames", num_frames)
        self.backend = one_of("backend", backend, BACKENDS)
        if not hasattr(sampler, "score"):
            raise InvalidArgument(f"sampler is a {type(sampler).__name__} with no score; give an SOSampler")
        if classifier is not None and not hasattr(classifier, "clip_probs"):
            raise InvalidArgument(
                f"classifier is a {type(classifier).__name__} with no clip_probs; give one of so.create_classifier"
            )
        self.device = check_device(getattr(sampler, "device", "cpu") if device is None else device)
        on_cpu, on_gpu = self.device.type == "cpu", self.device.type == "cuda"
        if self.backend != "torch" and not on_cpu:
            raise InvalidArgument(f"backend={backend!r} runs on the CPU, not on {self.device}; give device='cpu'")
        default = "graphs" if on_gpu else "eager"
        self.mode = one_of("compiled", default if compiled is None else compiled, MODES)
        if self.mode != "eager" and not on_gpu:
            raise InvalidArgument(f"compiled={compiled!r} needs a CUDA GPU, not {self.device}; leave it out")
        onednn = "onednn" if torch.backends.mkldnn.is_available() else "eager"
        self._conv_backend = onednn if on_cpu else _CONV_BACKENDS[self.mode]
        self.precision = _resolve_precision(self.device, precision)
        if sampler_precision is not None:
            one_of("sampler_precision", sampler_precision, PRECISIONS)
        if on_cpu:
            keep_memory()
        self.sampler, self.classifier = sampler, classifier
        if classifier is not None and self.precision == INT8:
            check_pooled(classifier)
        self._heads = copy_heads(sampler, self.device) if isinstance(sampler, SOSampler) else None
        self._features = None if self._heads is None else self._make_features(sampler, sampler_precision)
        self._fast_classifier = self._make_classifier(classifier) if can_be_fused(classifier) else None
        if classifier is not None and self._fast_classifier is None and hasattr(classifier, "to"):
            classifier.to(self.device)
        can_capture = self._features is not None and (classifier is None or self._fast_classifier is not None)
        self._graphs = GraphedCalls(self._compute) if self.mode != "eager" and can_capture else None

    def _make_features(self, sampler: SOSampler, precision: str | None) -> Callable[[Tensor, int], Tensor]:
        if self.backend != "torch":
            return RuntimeFeatures(sampler, self.backend)
        if self.device.type == "cpu":
            precision = "float32"  # the network is small, and its scores decide
        elif precision is None:
            # MobileNetV2's values stay small (ReLU6).
            small = self.precision == "bfloat16" and sampler.backbone.name == MOBILENET
            precision = "float16" if small else self.precision
        return TorchFeatures(sampler, self.device, getattr(torch, precision), self._conv_backend)

    def _make_classifier(self, classifier: Any) -> Callable[[Tensor], Tensor]:
        if self.precision == INT8:
            return int8_classifier(classifier, self.backend)
        if self.backend == "openvino":
            return openvino_classifier(classifier, bfloat16=self.precision == "bfloat16")
        return TorchClassifier(classifier, self.device, getattr(torch, self.precision), self._conv_backend)

    @torch.no_grad()
    def run(self, frames: Any, positions: Any = None) -> EngineResult:
        """Score the candidates of B videos, T each, select the N best and classify them.

        On a GPU this returns before the device has finished, and NaN is not checked: `result.check()` does both.
        `positions` [B, T] are where the candidates lie in their video, 0..1, for classifiers that use it.
        """
        frames = self._on_device(frames)
        if frames.shape[1] < self.num_frames:
            raise InvalidArgument(
                f"num_frames={self.num_frames} is more than the {frames.shape[1]} real candidates of a video; "
                "give a smaller num_frames or more candidates"
            )
        positions = check_positions(positions, frames)
        if self._graphs is not None:  # networks that use no positions
            return EngineResult(*self._graphs(frames))
        result = EngineResult(*self._compute(frames, positions))
        return result if self.device.type != "cpu" else result.check(getattr(self.classifier, "name", "the classifier"))

    @torch.no_grad()
    def score(self, frames: Any) -> Tensor:
        """Score the candidates of B videos: [B, T]."""
        return self._scores(self._on_device(frames))

    @torch.no_grad()
    def classify(self, frames: Any, positions: Any = None) -> Tensor:
        """Classify selected frames of B videos, N each, positions [B, N]: probabilities [B, C]."""
        if self.classifier is None:
            raise InvalidArgument("this engine has no classifier; give one to FrameEngine")
        frames = self._on_device(frames)
        return self._probabilities(frames, check_positions(positions, frames))

    def _compute(self, frames: Tensor, positions: Tensor | None = None) -> Outputs:
        """Run everything without waiting for the device."""
        scores, class_logits = self._look(frames)
        chosen = top_n(scores, self.num_frames)
        if self.classifier is None:
            return chosen, scores, None
        positions = None if positions is None else positions.to(chosen.device).gather(1, chosen)
        gathered = _gather_frames(frames, chosen)
        if not self.by_frames:
            return chosen, scores, self._probabilities(gathered, positions)
        singly = gathered.flatten(0, 1)[:, None]  # [B * N, 1, 3, H, W]
        positions = None if positions is None else positions.flatten()[:, None]
        return chosen, scores, None, self._probabilities(singly, positions).unflatten(0, chosen.shape), class_logits

    def _scores(self, frames: Tensor) -> Tensor:
        return self._look(frames)[0]

    def _look(self, frames: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the sampler's scores [B, T] and class logits [B, T, C], where it has them."""
        if self._features is None or self._heads is None:
            return self.sampler.score(frames).to(self.device), None
        features = self._features(frames.flatten(0, 1), frames.shape[1])  # [B * T, D]
        output = self._heads.apply_heads(features.unflatten(0, frames.shape[:2]))
        return output.scores.float(), None if output.class_logits is None else output.class_logits.float()

    def _probabilities(self, frames: Tensor, positions: Tensor | None) -> Tensor:
        if self._fast_classifier is not None:
            return self._fast_classifier(frames)
        return self.classifier.clip_probs(frames, positions)

    def _on_device(self, frames: Any) -> Tensor:
        return channels_first(frames).to(self.device, non_blocking=True)

    def __repr__(self) -> str:
        classifier = "" if self.classifier is None else f", {getattr(self.classifier, 'name', 'classifier')}"
        return (
            f"FrameEngine({type(self.sampler).__name__}{classifier}, N={self.num_frames}, {self.device}, "
            f"{self.precision}, {self.backend}, {self.mode})"
        )


def _gather_frames(frames: Tensor, chosen: Tensor) -> Tensor:
    """Return frames [B, T, 3, H, W] at indices [B, N] -> [B, N, 3, H, W], in the same memory layout."""
    rows = torch.arange(len(frames), device=frames.device)[:, None]
    channels_last = frames.stride(2) == 1
    memory = frames.movedim(2, -1) if channels_last else frames
    shape = memory.shape[2:]
    if memory.is_contiguous() and shape.numel() % _WORD == 0 and memory.storage_offset() % _WORD == 0:
        words = memory.flatten(2).view(torch.int64)  # a GPU takes several times as long to copy single bytes
        gathered = words[rows, chosen].view(torch.uint8).unflatten(2, shape)
    else:
        gathered = memory[rows, chosen]
    return gathered.movedim(-1, 2) if channels_last else gathered


def _resolve_precision(device: torch.device, precision: str | None) -> str:
    if precision is not None:
        one_of("precision", precision, (*PRECISIONS, INT8))
        if precision == INT8 and device.type != "cpu":
            raise InvalidArgument(f"precision='int8' runs on the CPU, not on {device}; give device='cpu'")
        if precision == "bfloat16" and device.type == "cpu" and bfloat16_crashes():
            raise InvalidArgument(
                "precision='bfloat16' ends the process on this CPU, which claims instructions that it does not have; "
                "give 'float32'"
            )
        return precision
    if device.type == "cuda":
        with torch.cuda.device(device):
            return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16" if device.type == "cpu" and cpu_is_fast_in_bfloat16() else "float32"


# ---- CUDA graphs: small batches spend most of their time on starting kernels; a graph starts all with one call

Outputs = tuple[Any, ...]  # tensors or None
Captured = TypeVar("Captured")
_MAX_GRAPHS = 4  # input shapes whose graph and memory are kept
_WARM_UP = 3  # runs before the capture, in which libraries choose their kernels and allocate workspace


def kind_of(tensors: Iterable[Tensor]) -> Any:
    """Return what tensors must have in common to share buffers."""
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)


def capture(compute: Callable[[], Captured], stream: Any) -> tuple[Any, Captured]:
    """Capture `compute()` as a graph after a few runs; return the graph and the outputs of the capture.

    `stream` must be of the device: torch's default capture stream is that of the device it was first used on.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            compute()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(stream.device), torch.cuda.graph(graph, stream=stream):
        outputs = compute()
    return graph, outputs


class GraphedCalls:
    """`compute(*tensors)` as CUDA graphs, one for each combination of input shapes.

    Inputs are copied into the graph's buffers and outputs out of them, so that results are not overwritten. `compute`
    must not wait for the device. Of more than `max_graphs` shapes the least recently used one makes room.
    """

    def __init__(self, compute: Callable[..., Outputs], *, max_graphs: int = _MAX_GRAPHS) -> None:
        self._compute = compute
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Any, tuple[Any, list[Tensor], Outputs]] = OrderedDict()

    def __call__(self, *inputs: Tensor) -> Outputs:
        key = kind_of(inputs)
        if key in self._graphs:
            self._graphs.move_to_end(key)
        else:
            while len(self._graphs) >= self._max_graphs:
                self._graphs.popitem(last=False)
            buffers = [torch.empty_like(tensor).copy_(tensor) for tensor in inputs]
            graph, outputs = capture(lambda: self._run(buffers), torch.cuda.Stream(inputs[0].device))
            self._graphs[key] = (graph, buffers, outputs)
        graph, buffers, outputs = self._graphs[key]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        graph.replay()
        return tuple(None if output is None else output.clone() for output in outputs)

    def _run(self, buffers: list[Tensor]) -> Outputs:
        """Run with cuDNN's fastest kernels, which it finds by trying them in the first run."""
        tf32 = torch.backends.cudnn.allow_tf32
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=tf32):
            return self._compute(*buffers)

    def __len__(self) -> int:
        return len(self._graphs)
