"""From videos to what the networks say of them, in batches and in order: decode, choose, classify."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from sosampler._util.workers import num_cores
from sosampler.classifiers.base import INT8, VideoClassifier
from sosampler.classifiers.outputs import check_finite
from sosampler.engine.int8 import int8_classifier, int8_file_of
from sosampler.errors import SosamplerError
from sosampler.inference.decode import MAX_WAITING_BYTES, Decoded, FramePool, FrameTask, OfferedVideo
from sosampler.inference.options import SelectOptions
from sosampler.inference.select import too_few, with_repeats
from sosampler.inference.selection import Selection
from sosampler.policies.registry import Policy
from sosampler.video.candidates import positions_of
from sosampler.video.reader import Frames
from sosampler.video.timeline import Indices, Seconds

# From so many videos on, starting processes is repaid.
PROCESSES_FROM = 12
_MAX_WORKERS = 32
_MAX_BATCH = 256  # videos: each keeps a file open until the batch is full
_MAX_AHEAD = 64  # videos
_ENGINE_AFTER = 48  # candidates
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Answer:
    """What became of one video that could be read."""

    selection: Selection
    probabilities: np.ndarray  # [C] float32
    seconds: float  # in the networks; of a shared call this video's part


# ---- decoding


def decoded_batches(
    videos: Iterable[Any], task_of: Callable[[Any], FrameTask], *, workers: int | None, batch_size: int
) -> Generator[list[Decoded], None, None]:
    """Videos in order, decoded side by side and a few ahead, `batch_size` at a time, fewer where they are large.

    Few videos are decoded in threads of this process, many in processes; with workers=0 one after the other, here.
    """
    coming = iter(videos)
    first = list(islice(coming, PROCESSES_FROM)) if workers != 0 else []
    count = min(num_cores(), _MAX_WORKERS) if workers is None else max(workers, 1)
    held = min(batch_size, _MAX_BATCH)
    ahead = 1 if workers == 0 else min(held + 2 * count, max(_MAX_AHEAD, 2 * count))
    tasks = map(task_of, chain(first, coming))
    with (
        FramePool(count, processes=len(first) >= PROCESSES_FROM, ahead=ahead, held=held) as pool,
        closing(pool.decoded(tasks)) as arriving,
    ):
        batch: list[Decoded] = []
        for one in arriving:
            batch.append(one)
            if len(batch) == held or sum(each.nbytes for each in batch) >= MAX_WAITING_BYTES // 2:
                yield batch
                batch = []
        if batch:
            yield batch


# ---- choosing and classifying


class Looking:
    """Policy and classifier, asked about many videos at a time.

    Args:
        policy: who chooses where the candidates come undecided.
        sampler: the network behind the policy, where it takes the N best by its scores and nothing else.
        classifier: by its protocol.
        options: how many are chosen, and what is done with short videos.
        precision: of the networks; None takes what the device is good at.
        batch_size: videos that share a call at most.
    """

    def __init__(
        self,
        policy: Policy,
        sampler: Any,
        classifier: VideoClassifier,
        options: SelectOptions,
        *,
        precision: str | None = None,
        batch_size: int = 1,
    ) -> None:
        # Who decides on the number of frames gives each video its own, which the engine cannot.
        self.policy = policy if options.auto is None else policy.by_itself(options.auto)
        self.classifier = classifier
        self.options = options
        self._sampler = sampler if options.auto is None else None
        self._precision = precision
        self._batch_size = batch_size
        self._made: Any = None
        if precision == INT8:
            int8_file_of(classifier)  # what is missing is said before anything is decoded
        self._seen = 0  # candidates
        self._began_without = False
        self._in_use = threading.Lock()  # streams of several threads take turns

    @property
    def engine(self) -> Any:
        """What looks faster than the networks as they are; None where there is no such, or not yet.

        It takes the networks as they are when it is made. On a CPU that costs as much as looking at a few videos does,
        so that one who asks about a single short one gets the answer sooner without.
        """
        if self._made is None and self._sampler is not None:
            on_cpu = getattr(self._sampler, "device", _CPU).type == "cpu"
            precision = self._precision
            if on_cpu and self._seen <= _ENGINE_AFTER and precision in (None, "float32"):
                self._began_without = True
                return None
            if on_cpu and self._began_without:
                precision = "float32"  # as the first videos were looked at
            from sosampler.engine.frame_engine import FrameEngine

            assert self.options.num_wanted is not None
            self._made = FrameEngine(
                self._sampler, self.classifier, num_frames=self.options.num_wanted, precision=precision
            )
        return self._made

    def warm_up(self) -> None:
        """Make the engine now, where there is one to be made."""
        with self._in_use:
            self._seen = max(self._seen, _ENGINE_AFTER + 1)
            assert self._sampler is None or self.engine is not None

    def at(self, batch: Sequence[Decoded]) -> list[Answer | SosamplerError]:
        """Answers in the order of the videos; those with equally many and large frames share a call."""
        with self._in_use:
            self._seen += sum(len(one.outcome.frame_indices) for one in batch if isinstance(one.outcome, OfferedVideo))
            return self._at(batch)

    def _at(self, batch: Sequence[Decoded]) -> list[Answer | SosamplerError]:
        found: dict[int, Answer | SosamplerError] = {}
        ready: dict[int, Selection] = {}  # what is chosen already, or not simply by the N best
        together: dict[tuple[int, ...], list[int]] = {}
        for place, one in enumerate(batch):
            outcome = one.outcome
            if isinstance(outcome, SosamplerError):
                found[place] = outcome
            elif isinstance(outcome, OfferedVideo) and self._is_plain(outcome):
                assert one.shape is not None, "candidates are decoded"
                together.setdefault(one.shape, []).append(place)
            else:
                chosen = self._chosen(one)
                if isinstance(chosen, Selection):
                    ready[place] = chosen
                else:
                    found[place] = chosen
        for places in together.values():
            found |= zip(places, self._by_engine([batch[place] for place in places]), strict=True)
        found |= zip(ready, self._classified(list(ready.values())), strict=True)
        return [found[place] for place in range(len(batch))]

    def _is_plain(self, offered: OfferedVideo) -> bool:
        """Whether the N best are simply taken: there are enough, in time order, and none stands in for another."""
        if self.engine is None or len(offered.frame_indices) < self._wanted(offered):
            return False
        return bool((np.diff(offered.frame_indices) > 0).all())

    def _wanted(self, offered: OfferedVideo) -> int:
        return self.options.num_wanted or len(offered.candidates)

    def _by_engine(self, group: Sequence[Decoded]) -> list[Answer]:
        """Candidates of one shape: scored, chosen from and classified in one go."""
        begin = time.perf_counter()
        # A GPU is prepared for each shape anew, so calls that are shared are all of one size there.
        filled_up = len(group) > 1 and self.engine.device.type == "cuda"
        frames = _together(group, max(len(group), self._batch_size if filled_up else 1))  # [B, T, H, W, 3]
        offered = [one.outcome for one in group if isinstance(one.outcome, OfferedVideo)]
        positions = np.zeros(frames.shape[:2], dtype=np.float32)  # [B, T]
        for row, one in enumerate(offered):
            positions[row] = self._positions(one.pts_seconds, one)
        result = self.engine.run(frames, torch.from_numpy(positions)).check(self.classifier.name)
        chosen, scores = result.chosen.cpu().numpy(), result.scores.float().cpu().numpy()
        probabilities = result.probabilities.float().cpu().numpy()
        seconds = (time.perf_counter() - begin) / len(group)
        return [
            Answer(self._selection(one, chosen[row], scores[row], frames[row]), probabilities[row], seconds)
            for row, one in enumerate(offered)
        ]

    def _chosen(self, one: Decoded) -> Selection | SosamplerError:
        """The chosen frames of one video, asking the policy where that is not done yet."""
        frames = one.take()
        outcome = one.outcome
        if isinstance(outcome, Selection):
            return replace(outcome, frames=frames)
        assert isinstance(outcome, OfferedVideo)
        wanted, count = self._wanted(outcome), len(frames)
        least = wanted if self.options.auto is None else self.options.auto.least
        if least > count and self.options.on_short == "error":
            return too_few(outcome.video, least, count)
        choice = self.policy.choose(count, min(wanted, count), frames, self.options.seed)
        return self._selection(outcome, choice.positions, choice.scores, frames, choice.expected)

    def _selection(
        self,
        offered: OfferedVideo,
        positions: Indices,
        scores: np.ndarray | None,
        frames: Frames,
        expected: np.ndarray | None = None,
    ) -> Selection:
        """What `select` gives. `positions` [<= N] among the D frames, `scores` [D], `expected` [D] of the k best."""
        _, first, candidate_of = np.unique(offered.candidates.frame_indices, return_index=True, return_inverse=True)
        if self.options.auto is None:
            positions = with_repeats(positions, candidate_of, self._wanted(offered), self.options.on_short)
        # A frame that stands in for a damaged one may lie behind its neighbour.
        positions = positions[np.argsort(offered.frame_indices[positions], kind="stable")]
        all_scores = None if scores is None else scores[candidate_of]
        return Selection(
            video=offered.video,
            policy=self.policy.name,
            frame_indices=offered.frame_indices[positions],
            pts_seconds=offered.pts_seconds[positions],
            candidates=replace(offered.candidates, scores=all_scores),
            metadata=offered.metadata,
            scores=None if all_scores is None else all_scores[first[positions]],
            frames=frames[positions],
            timing=offered.timing,
            notes=offered.notes,
            asked=None if self.options.auto is None else self.options.auto.told(expected),
        )

    def _classified(self, selections: Sequence[Selection]) -> list[Answer]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, selection in enumerate(selections):
            assert selection.frames is not None, "a pipeline decodes"
            groups.setdefault(selection.frames.shape, []).append(place)
        found: dict[int, Answer] = {}
        for places in groups.values():
            begin = time.perf_counter()
            some = [selections[place] for place in places]
            frames = torch.stack([selection.to_torch() for selection in some])  # [B, N, 3, H, W]
            positions = np.stack([self._positions(selection.pts_seconds, selection) for selection in some])  # [B, N]
            said = check_finite(self._ask(frames, torch.from_numpy(positions)), self.classifier.name)
            probabilities = said.float().cpu().numpy()
            seconds = (time.perf_counter() - begin) / len(places)
            for place, row in zip(places, probabilities, strict=True):
                found[place] = Answer(selections[place], row, seconds)
        return [found[place] for place in range(len(selections))]

    @property
    def _ask(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Frames [B, N, 3, H, W] that were chosen, and their positions [B, N] -> probabilities [B, C]."""
        if self.engine is not None:
            classify: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self.engine.classify
            return classify
        if self._precision == INT8:
            return lambda frames, _: self._int8(frames)
        return self.classifier.clip_probs

    @cached_property
    def _int8(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return int8_classifier(self.classifier, "onnxruntime")

    def _positions(self, pts_seconds: Seconds, video: Selection | OfferedVideo) -> np.ndarray:
        """In 0..1: the share of the video, or of the part that was asked for, that is over at each frame."""
        metadata, start, end = video.metadata, self.options.start, self.options.end
        begins = metadata.start_seconds if start is None else max(start, metadata.start_seconds)
        ends = metadata.start_seconds + metadata.duration
        return positions_of(pts_seconds, begins, (ends if end is None else min(end, ends)) - begins)


def _together(group: Sequence[Decoded], size: int) -> Frames:
    """Frames of equally large videos in one array, copied once, black ones up to `size` videos."""
    if size == 1:
        return group[0].take()[None]  # without a copy, where it was decoded in this process
    shape = group[0].shape
    assert shape is not None, "candidates are decoded"
    frames = np.empty((size, *shape), dtype=np.uint8)
    for row, one in enumerate(group):
        one.take(frames[row])
    frames[len(group) :] = 0
    return frames
