"""A network's answers about whole shards, for teachers and for features.

Batches are cut inside a shard and each runs on one thread, so that the numbers depend neither on when a run was broken
off nor on how many threads there are.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain, takewhile
from typing import Any, cast

import numpy as np
import torch

from sosampler.classifiers.layout import to_channels_last
from sosampler.data.asking import Asker, Tables
from sosampler.data.bank_disk import Tally
from sosampler.data.bank_format import (
    AnswersFolder,
    BankFolder,
    BankHead,
    StoredVideo,
    read_json,
    tables_batch,
    write_text,
)
from sosampler.data.bank_writer import writing_shard
from sosampler.data.frame_decoding import BATCHES_AHEAD, InProcesses, num_decoding_processes
from sosampler.data.processes import num_cores
from sosampler.errors import InvalidArgument

_MAX_THREADS = 8

Shard = tuple[int, Iterable[tuple[str, StoredVideo]]]
"""Its number, and id and frames of its videos."""


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
    """One network and one bank: which shards it has not been asked about, and the asking. Enter it to ask."""

    def __init__(self, folder: BankFolder, head: BankHead, asker: Asker, tally: Tally) -> None:
        self._answers, self._asker, self._tally = asker.answers_folder(folder), asker, tally
        _begin(self._answers, asker)
        self.missing = set(self._answers.missing(head.num_shards))
        # Of a bank whose videos are still being decoded, which keeps the processors busy, this is not known.
        all_frames = head.counts["frames"] if head.counts else 0
        self._num_frames = all_frames * len(self.missing) // max(head.num_shards, 1)

    def __enter__(self) -> Teaching:
        """Start what decodes and what asks, and bring torch into the state that suits them."""
        device = self._asker.device.type
        on_cpu = device == "cpu"
        self._torch_threads = torch.get_num_threads()
        self._num_threads = min(self._torch_threads, _MAX_THREADS) if on_cpu else _MAX_THREADS
        self._stack = ExitStack()
        self._in_thread = self._asker.decoder
        num_processes = num_decoding_processes(device, num_cores(), self._num_frames)
        if num_processes:
            self._asker.decoder = self._stack.enter_context(InProcesses(num_processes))
            self._num_threads = BATCHES_AHEAD
        start = partial(torch.set_num_threads, 1) if on_cpu else None
        self._threads = ThreadPoolExecutor(self._num_threads, "sosampler-ask", initializer=start)
        net = self._asker.net
        self._contiguous = to_channels_last(net) if isinstance(net, torch.nn.Module) else []
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._stack.close()
        self._asker.decoder = self._in_thread
        for tensor in self._contiguous:
            tensor.data = tensor.data.contiguous()
        torch.set_num_threads(self._torch_threads)

    def teach(self, shards: Iterable[Shard], on_done: Callable[[], None]) -> None:
        """Ask about all videos of shards, in batches over the borders of videos, and write the answers.

        Batches of the shards that follow are asked about while those of a shard are being written.
        """
        schema = self._asker.schema
        # Of the shards under way: their number, then id and number of frames of each video.
        under_way: deque[tuple[int, deque[tuple[str, int]]]] = deque()

        def batches() -> Iterator[_Batch | None]:
            for number, rows in shards:
                videos: deque[tuple[str, int]] = deque()
                under_way.append((number, videos))
                yield from batches_of(rows, videos, self._asker.batch)
                yield None  # the end of a shard

        answers = self._in_order(batches())
        for first in answers:
            number, waiting = under_way.popleft()
            with writing_shard(self._answers.shard(number), schema, self._tally) as write:
                of_shard = takewhile(lambda tables: tables is not None, chain([first], answers))
                for video_id, tables in by_video(cast(Iterator[Tables], of_shard), waiting):
                    write(tables_batch(schema, video_id, *tables))
                    self._tally.open_videos += 1
                    on_done()

    def _in_order(self, batches: Iterator[_Batch | None]) -> Iterator[Tables | None]:
        """Answers to batches, None in its place."""
        pending: deque[Future[Tables] | None] = deque()
        failed: Exception | None = None
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001 - raised below, once what came before is kept
                failed = error
                break
            if batch is None:
                pending.append(None)
            else:
                positions = np.array(batch.positions, dtype=np.float32)
                pending.append(self._threads.submit(self._asker.ask, batch.jpegs, positions, batch.names))
            while len(pending) > 2 * self._num_threads:
                yield _result(pending.popleft())
        while pending:
            yield _result(pending.popleft())
        if failed is not None:
            raise failed


def _result(answer: Future[Tables] | None) -> Tables | None:
    return None if answer is None else answer.result()


def _begin(answers: AnswersFolder, asker: Asker) -> None:
    """Write the head, or compare with the one that is there and go on with its size of batches."""
    path = answers.head
    about = json.loads(json.dumps(asker.about()))
    if path.exists():
        found = read_json(path, about["kind"], f"delete its folder and {answers.again}")
        if not asker.batch_given:
            asker.batch = about["batch"] = found.get("batch") or asker.batch
        differing = [
            f"{key}={found.get(key)!r}, now {about[key]!r}" for key in asker.decisive if found.get(key) != about[key]
        ]
        if differing:
            raise InvalidArgument(f"{answers.path}: {asker.made} with {'; '.join(differing)}; {asker.remedy}")
        return
    answers.path.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(about, indent=1, ensure_ascii=False) + "\n")


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


def by_video(answers: Iterable[Tables], waiting: deque[tuple[str, int]]) -> Iterator[tuple[str, Tables]]:
    """Cut the stream of answers back into videos."""
    parts: list[Tables] = []
    have = 0
    for answer in answers:
        parts.append(answer)
        have += len(answer[0])
        while waiting and waiting[0][1] <= have:
            video_id, count = waiting.popleft()
            joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
            yield video_id, tuple(table[:count] for table in joined)
            parts, have = [tuple(table[count:] for table in joined)], have - count
