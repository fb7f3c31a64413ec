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

from sosampler.data.bank import read_teacher
from sosampler.data.bank_format import BankFolder, BankHead, StoredVideo, teacher_batch, write_text
from sosampler.data.bank_writer import classes_in_words, tally_of, writing_shard
from sosampler.data.teachers import Answers, Asker
from sosampler.errors import InvalidArgument

_MAX_THREADS = 8
_Batch = tuple[list[bytes], np.ndarray]


class Teaching:
    """One classifier and one bank: which shards it has not been asked about, and the asking. Enter it to ask."""

    def __init__(self, folder: BankFolder, head: BankHead, asker: Asker) -> None:
        check_classes_fit(asker.classifier, head.classes, str(folder.path))
        self._folder, self._asker = folder, asker
        _begin_teacher(folder, asker)
        self.missing = {shard for shard in range(head.num_shards) if not self._path(shard).exists()}
        guess = asker.bytes_a_frame * int(head.settings.get("num_candidates") or 64)
        self.tally = tally_of(head, self._path, guess)

    def _path(self, shard: int) -> Any:
        return self._folder.teacher_shard(self._asker.name, shard)

    def __enter__(self) -> Teaching:
        """Start threads for asking, and bring torch into the state that suits them."""
        on_cpu = self._asker.device.type == "cpu"
        self._torch_threads = torch.get_num_threads()
        self._num_threads = min(self._torch_threads, _MAX_THREADS) if on_cpu else _MAX_THREADS
        start = partial(torch.set_num_threads, 1) if on_cpu else None
        self._threads = ThreadPoolExecutor(self._num_threads, "sosampler-ask", initializer=start)
        self._lay_out(torch.channels_last)  # faster for 2-D convolutions, the same weights
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._lay_out(torch.contiguous_format)
        torch.set_num_threads(self._torch_threads)

    def _lay_out(self, memory_format: Any) -> None:
        net = getattr(self._asker.classifier, "net", None)
        if net is not None:
            net.to(memory_format=memory_format)

    def teach(self, shard: int, rows: Iterable[tuple[str, StoredVideo]], on_done: Callable[[], None]) -> None:
        """Ask about all videos of a shard, in batches over the borders of videos, and write the answers."""
        schema = self._asker.schema
        waiting: deque[tuple[str, int]] = deque()  # id and number of frames of the videos under way
        with writing_shard(self._path(shard), schema, self.tally) as write:
            answers = self._in_order(batches_of(rows, waiting, self._asker.batch))
            for video_id, answer in by_video(answers, waiting):
                write(teacher_batch(schema, video_id, answer.frame_probs, answer.features))
                self.tally.videos += 1
                on_done()

    def _in_order(self, batches: Iterable[_Batch]) -> Iterator[Answers]:
        pending: deque[Future[Answers]] = deque()
        for jpegs, positions in batches:
            pending.append(self._threads.submit(self._asker.ask, jpegs, positions))
            if len(pending) > 2 * self._num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _begin_teacher(folder: BankFolder, asker: Asker) -> None:
    """Write teacher.json, or compare with the one that is there."""
    path = folder.teacher_json(asker.name)
    about = json.loads(json.dumps(asker.about()))
    if path.exists():
        found = read_teacher(folder, asker.name)
        differing = [
            f"{key}={found.get(key)!r}, now {about[key]!r}"
            for key in ("features", "precision", "pooling")
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
    if names == classes or _only_numbers(names) or _only_numbers(classes):
        return
    place = next(place for place, pair in enumerate(zip(names, classes, strict=True)) if pair[0] != pair[1])
    raise InvalidArgument(
        f"{ours}, but the classifier {theirs}: class {place} is {classes[place]!r} here and {names[place]!r} there; "
        "bring the class list into the classifier's order, or give another classifier"
    )


def _only_numbers(names: tuple[str, ...]) -> bool:
    return names == tuple(str(number) for number in range(len(names)))


def batches_of(
    rows: Iterable[tuple[str, StoredVideo]], waiting: deque[tuple[str, int]], at_most: int
) -> Iterator[_Batch]:
    """JPEGs of one size and their positions, at most so many, in order; a batch may hold frames of several videos.

    Adds each video to `waiting`, with the number of its frames.
    """
    jpegs: list[bytes] = []
    positions: list[float] = []
    size: tuple[int, int] | None = None
    for video_id, video in rows:
        waiting.append((video_id, len(video)))
        if jpegs and size != (video.width, video.height):
            yield jpegs, np.array(positions, dtype=np.float32)
            jpegs, positions = [], []
        size = video.width, video.height
        for jpeg, position in zip(video.jpegs, video.positions.tolist(), strict=True):
            jpegs.append(jpeg)
            positions.append(position)
            if len(jpegs) == at_most:
                yield jpegs, np.array(positions, dtype=np.float32)
                jpegs, positions = [], []
    if jpegs:
        yield jpegs, np.array(positions, dtype=np.float32)


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
