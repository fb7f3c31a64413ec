"""A classifier's answers about whole shards.

Batches are cut inside a shard and each runs on one thread, so that the numbers depend neither on when a run was broken
off nor on how many threads there are.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from sosampler.data.bank_disk import Tally
from sosampler.data.bank_format import BankFolder, BankHead, StoredVideo, teacher_batch, write_text
from sosampler.data.bank_teachers import first_difference, read_teacher
from sosampler.data.bank_writer import classes_in_words, writing_shard
from sosampler.data.teachers import Answers, Asker
from sosampler.errors import InvalidArgument

_MAX_THREADS = 8


class _Batch:
    """Frames of one size, of one video or several."""

    def __init__(self) -> None:
        self.jpegs: list[bytes] = []
        self.positions: list[float] = []  # in 0..1
        self.names: list[str] = []  # the video of each, for messages

    def add(self, jpeg: bytes, position: float, name: str) -> None:
        self.jpegs.append(jpeg)
        self.positions.append(position)
        self.names.append(name)

    def __len__(self) -> int:
        return len(self.jpegs)


class Teaching:
    """One classifier and one bank: which shards it has not been asked about, and the asking. Enter it to ask."""

    def __init__(self, folder: BankFolder, head: BankHead, asker: Asker, tally: Tally) -> None:
        check_classes_fit(asker.classifier, head.classes, str(folder.path))
        self._folder, self._asker = folder, asker
        _begin_teacher(folder, asker)
        self.missing = {shard for shard in range(head.num_shards) if not self._path(shard).exists()}
        self._tally = tally

    def _path(self, shard: int) -> Any:
        return self._folder.teacher_shard(self._asker.name, shard)

    def __enter__(self) -> Teaching:
        """Start threads for asking, and bring torch into the state that suits them."""
        on_cpu = self._asker.device.type == "cpu"
        self._torch_threads = torch.get_num_threads()
        self._num_threads = min(self._torch_threads, _MAX_THREADS) if on_cpu else _MAX_THREADS
        start = partial(torch.set_num_threads, 1) if on_cpu else None
        self._threads = ThreadPoolExecutor(self._num_threads, "sosampler-ask", initializer=start)
        self._contiguous = _to_channels_last(getattr(self._asker.classifier, "net", None))
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for tensor in self._contiguous:
            tensor.data = tensor.data.contiguous()
        torch.set_num_threads(self._torch_threads)

    def teach(self, shard: int, rows: Iterable[tuple[str, StoredVideo]], on_done: Callable[[], None]) -> None:
        """Ask about all videos of a shard, in batches over the borders of videos, and write the answers."""
        schema = self._asker.schema
        waiting: deque[tuple[str, int]] = deque()  # id and number of frames of the videos under way
        with writing_shard(self._path(shard), schema, self._tally) as write:
            answers = self._in_order(batches_of(rows, waiting, self._asker.batch))
            for video_id, answer in by_video(answers, waiting):
                write(teacher_batch(schema, video_id, answer.frame_probs, answer.features))
                self._tally.open_videos += 1
                on_done()

    def _in_order(self, batches: Iterable[_Batch]) -> Iterator[Answers]:
        pending: deque[Future[Answers]] = deque()
        for batch in batches:
            positions = np.array(batch.positions, dtype=np.float32)
            pending.append(self._threads.submit(self._asker.ask, batch.jpegs, positions, batch.names))
            if len(pending) > 2 * self._num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _to_channels_last(net: Any) -> list[torch.Tensor]:
    """Lay out what 2-D convolutions hold as they work fastest, the same numbers. Returns the tensors that changed."""
    changed = []
    for tensor in [*net.parameters(), *net.buffers()] if isinstance(net, torch.nn.Module) else []:
        if tensor.ndim == 4 and tensor.is_contiguous():  # those of 3-D convolutions have five dimensions
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
            changed.append(tensor)
    return changed


def _begin_teacher(folder: BankFolder, asker: Asker) -> None:
    """Write teacher.json, or compare with the one that is there and go on with its size of batches."""
    path = folder.teacher_json(asker.name)
    about = json.loads(json.dumps(asker.about()))
    if path.exists():
        found = read_teacher(folder, asker.name)
        if not asker.batch_given:
            asker.batch = about["batch"] = found.get("batch") or asker.batch
        differing = [
            f"{key}={found.get(key)!r}, now {about[key]!r}"
            for key in ("features", "precision", "pooling", "batch")
            if found.get(key) != about[key]
        ]
        if differing:
            raise InvalidArgument(
                f"{path.parent}: this teacher was prepared with {'; '.join(differing)}; "
                "give the same again, or delete its folder"
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(about, indent=1, ensure_ascii=False) + "\n")


def check_classes_fit(classifier: Any, classes: tuple[str, ...], where: str) -> None:
    """As many classes, and where both sides name them, the same names in the same order."""
    names = tuple(classifier.class_names)
    ours, theirs = f"{where} has {classes_in_words(classes)}", f"{classifier.name} {classes_in_words(names)}"
    if len(names) != len(classes):
        raise InvalidArgument(
            f"{ours}, but the classifier {theirs}; give the classifier's class list with the manifest (classes), or a "
            "classifier of these classes"
        )
    place = first_difference(names, classes)
    if place is None:
        return
    raise InvalidArgument(
        f"{ours}, but the classifier {theirs}: class {place} is {classes[place]!r} here and {names[place]!r} there; "
        "bring the class list into the classifier's order, or give another classifier"
    )


def batches_of(
    rows: Iterable[tuple[str, StoredVideo]], waiting: deque[tuple[str, int]], at_most: int
) -> Iterator[_Batch]:
    """Frames of one size, at most so many, in order; a batch may hold frames of several videos.

    Adds each video to `waiting`, with the number of its frames.
    """
    batch = _Batch()
    size: tuple[int, int] | None = None
    for video_id, video in rows:
        waiting.append((video_id, len(video)))
        if len(batch) and size != (video.width, video.height):
            yield batch
            batch = _Batch()
        size = video.width, video.height
        for jpeg, position in zip(video.jpegs, video.positions.tolist(), strict=True):
            batch.add(jpeg, position, video_id)
            if len(batch) == at_most:
                yield batch
                batch = _Batch()
    if len(batch):
        yield batch


def by_video(answers: Iterable[Answers], waiting: deque[tuple[str, int]]) -> Iterator[tuple[str, Answers]]:
    """Cut the stream of answers back into videos."""
    parts: list[Answers] = []
    have = 0
    for answer in answers:
        parts.append(answer)
        have += len(answer.frame_probs)
        while waiting and waiting[0][1] <= have:
            video_id, count = waiting.popleft()
            joined = _joined(parts)
            yield video_id, joined[:count]
            parts, have = [joined[count:]], have - count


def _joined(parts: list[Answers]) -> Answers:
    features = [part.features for part in parts if part.features is not None]
    return Answers(np.concatenate([part.frame_probs for part in parts]), np.concatenate(features) if features else None)
