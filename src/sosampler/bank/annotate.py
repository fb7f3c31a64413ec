"""Asking a network about stored frames, a batch at a time: what is common to teachers and to features."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain, takewhile
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sosampler._util.validation import one_of, whole_number
from sosampler._util.workers import num_cores
from sosampler.bank.format import (
    TEACHER_KIND,
    VERSION,
    AnswersFolder,
    BankFolder,
    BankHead,
    StoredVideo,
    read_json,
    tables_batch,
    teacher_schema,
    write_text,
)
from sosampler.bank.frame_decoding import BATCHES_AHEAD, FrameDecoder, InProcesses, InThread, num_decoding_processes
from sosampler.bank.outputs import first_difference, teacher_folder_name
from sosampler.bank.writer import Tally, classes_in_words, writing_shard
from sosampler.classifiers.cost import to_channels_last
from sosampler.errors import ClassifierError, InvalidArgument

# Frames that go through the network at once: on a processor each thread has such a batch.
_CPU_BATCH, _DEVICE_BATCH = 8, 128
_FLOAT16_MAX = float(np.finfo(np.float16).max)

Tables = tuple[np.ndarray, ...]
"""What a network says about T frames: [T, any width] each, one for each column of its shards."""


class Asker(ABC):
    """A network, and how it is asked. `ask` is called by several threads at once.

    A subclass says what is asked (`_answers`) and how it is kept (`schema`, `about`, `answers_folder`).
    """

    made: str  # for messages: what was done, such as "this teacher was prepared"
    remedy: str  # for messages: what to do where it was made differently
    decisive: tuple[str, ...]  # keys of `about` that must not change from one run to the next

    def __init__(self, device: Any, batch: int | None) -> None:
        self.device = torch.device(device)
        default_batch = _CPU_BATCH if self.device.type == "cpu" else _DEVICE_BATCH
        self.batch = default_batch if batch is None else whole_number("batch", batch)
        self.batch_given = batch is not None  # otherwise what was begun goes on with its own
        self.decoder: FrameDecoder = InThread()
        self._device_lock = threading.Lock()

    @property
    @abstractmethod
    def net(self) -> Any:
        """The module that does the work, None where there is none."""

    @property
    @abstractmethod
    def schema(self) -> Any:
        """Columns of the shards."""

    @property
    @abstractmethod
    def bytes_a_frame(self) -> int:
        """Of what is kept."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """The head of the folder."""

    @abstractmethod
    def answers_folder(self, folder: BankFolder) -> AnswersFolder:
        """Where the answers lie in a bank."""

    @abstractmethod
    def _answers(self, frames: Tensor, positions: np.ndarray) -> Tables:
        """uint8 [1, F, 3, H, W] and positions [F] in 0..1 -> what is kept about each frame."""

    def ask(self, jpegs: list[bytes], positions: np.ndarray, names: list[str]) -> Tables:
        """About F frames of one size, each by itself; positions [F] in 0..1, and the video of each."""
        with self.decoder.decoded(jpegs, names) as decoded:
            frames = as_tensor(decoded)
            if self.device.type == "cpu":
                return self._answers(frames, positions)
            with self._device_lock:  # one batch at a time on the device, while others are decoded
                return self._answers(frames, positions)


def as_tensor(frames: np.ndarray) -> Tensor:
    """uint8 [F, H, W, 3] -> [1, F, 3, H, W]"""
    return torch.from_numpy(frames).permute(0, 3, 1, 2)[None]


def blank_frame() -> Tensor:
    """uint8 [1, 1, 3, 64, 64], for a first question."""
    return as_tensor(np.zeros((1, 64, 64, 3), dtype=np.uint8))


def kept_features(features: Tensor, precision: str, name: str, remedy: str) -> np.ndarray:
    """[F, D] in the precision in which it is kept; the remedy is for those that half precision cannot hold."""
    kept: np.ndarray = features.float().cpu().numpy()
    if precision == "float32":
        return kept
    if float(np.abs(kept).max()) > _FLOAT16_MAX:
        raise ClassifierError(f"{name} gives features too large for half precision; {remedy}")
    small: np.ndarray = kept.astype(np.float16)
    return small


MAX_VIEWS = 4


class TeacherAsker(Asker):
    """A classifier, and how it is asked."""

    made = "this teacher was prepared"
    remedy = "give the same again, or delete its folder"
    decisive = ("features", "precision", "pooling", "batch")

    def __init__(
        self, classifier: Any, *, views: int = 1, features: bool | str = True, batch: int | None = None
    ) -> None:
        self.classifier = classifier
        self.views = whole_number("views", views)
        if views > MAX_VIEWS:
            raise InvalidArgument(f"views={views} is not allowed; give a number from 1 to {MAX_VIEWS}")
        for member in ("frame_probs", "fingerprint", "class_names", "name"):
            if not hasattr(classifier, member):
                raise InvalidArgument(
                    f"a {type(classifier).__name__} has no {member}; give a classifier of so.create_classifier or "
                    "so.wrap_classifier, or the name of one"
                )
        super().__init__(getattr(classifier, "device", "cpu"), batch)
        self.num_classes = len(classifier.class_names)
        self.pooled = hasattr(classifier, "frame_features") and hasattr(classifier, "pool")
        self.pooling: str | None = classifier.pooling if self.pooled else None
        self.features = self._precision(features)  # "float32", "float16" or None
        self.feature_width = self._ask_once()
        self.fingerprint: str = classifier.fingerprint()

    def _precision(self, features: bool | str) -> str | None:
        if not self.pooled or features is False:
            return None
        if features is True:
            # Logits are averaged and then decide by small differences: half precision is off by 0.008 at 16, which can
            # turn an argmax. Features before a class layer are many, and their rounding errors cancel.
            return "float32" if self.pooling == "mean" else "float16"
        return one_of("features", features, ("float32", "float16"))

    def _ask_once(self) -> int | None:
        """D of the features, and an early word where the classifier cannot be asked."""
        if self.pooled:
            return int(self._features(blank_frame()).shape[-1])
        self.classifier.frame_probs(blank_frame(), torch.zeros(1, 1))
        return None

    def answers_folder(self, folder: BankFolder) -> AnswersFolder:
        return folder.teacher_answers(teacher_folder_name(self.fingerprint, self.views))

    @property
    def net(self) -> Any:
        return getattr(self.classifier, "net", None)

    @property
    def schema(self) -> Any:
        return teacher_schema(self.num_classes, self.features, self.feature_width)

    @property
    def bytes_a_frame(self) -> int:
        width = self.feature_width if self.features else 0
        return 2 * self.num_classes + (4 if self.features == "float32" else 2) * (width or 0)

    def about(self) -> dict[str, Any]:
        """teacher.json"""
        preprocessing: Any = getattr(self.classifier, "preprocessing", None)
        return {
            "kind": TEACHER_KIND,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "name": self.classifier.name,
            "num_classes": self.num_classes,
            "class_names": list(self.classifier.class_names),
            "multi_label": bool(getattr(self.classifier, "multi_label", False)),
            "pooling": self.pooling,
            "views": self.views,
            "batch": self.batch,  # decides the last bits of the answers
            "precision": getattr(self.classifier, "precision", "float32"),
            "features": {"precision": self.features, "width": self.feature_width} if self.features else None,
            "preprocessing": preprocessing.to_dict() if hasattr(preprocessing, "to_dict") else None,
        }

    # ---- one batch

    def _features(self, frames: Tensor) -> Tensor:
        """[1, F, 3, H, W] -> [1, F, D], the mean over views."""
        views = [self.classifier.frame_features(view) for view in views_of(frames, self.views)]
        return torch.stack(views).mean(0)

    def _answers(self, frames: Tensor, positions: np.ndarray) -> Tables:
        if self.pooled:
            features = self._features(frames)
            probs = self.classifier.pool(features.unsqueeze(-2))[0]  # a clip of one for each frame
            kept = () if self.features is None else (self._kept(features[0], self.features),)
        else:
            where = torch.from_numpy(positions)[None]
            views = [self.classifier.frame_probs(view, where) for view in views_of(frames, self.views)]
            probs, kept = torch.stack(views).mean(0)[0], ()
        return halved(probs.float().cpu().numpy()), *kept

    def _kept(self, features: Tensor, precision: str) -> np.ndarray:
        return kept_features(features, precision, self.classifier.name, "prepare with features='float32'")


def views_of(frames: Tensor, count: int) -> list[Tensor]:
    """The first `count` of four views of frames [..., H, W]: as they are, mirrored, and the squares at either end.

    Classifiers crop the centre themselves, so the squares show what that leaves out.
    """
    height, width = frames.shape[-2:]
    side = min(height, width)
    views: list[Callable[[], Tensor]] = [
        lambda: frames,
        lambda: frames.flip(-1),
        lambda: frames[..., :side, :side],
        lambda: frames[..., height - side :, width - side :],
    ]
    return [view() for view in views[:count]]


def halved(probs: np.ndarray) -> np.ndarray:
    """Probabilities [F, C] in half precision, the most probable class still the first with the largest number."""
    half = probs.astype(np.float16)
    rows = np.arange(len(half))
    top = probs.argmax(-1)
    best = half[rows, top]
    # Rounding keeps the order but makes ties, and of those the first would win.
    tied_before = (half == best[:, None]) & (np.arange(half.shape[1]) < top[:, None])
    below = np.nextafter(best, np.float16(0))
    return np.where(tied_before, below[:, None], half)


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
