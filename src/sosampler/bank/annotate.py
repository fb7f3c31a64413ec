"""Run networks on stored frames, a batch at a time: a classifier as a teacher, or any networks for their features."""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from sosampler._util.files import differences, plain, write_text
from sosampler._util.hardware import check_device, keep_memory, usable_cores
from sosampler._util.validation import check_int, one_of
from sosampler._util.workers import in_order
from sosampler.bank.decode import BATCHES_AHEAD, FrameDecoder, num_frame_decoders
from sosampler.bank.format import (
    FEATURES,
    PRECISIONS,
    TEACHER,
    VERSION,
    BankFolder,
    BankHeader,
    OutputFolder,
    OutputKind,
    StoredVideo,
    features_schema,
    first_difference,
    read_json,
    tables_batch,
    teacher_schema,
)
from sosampler.bank.outputs import read_output_header
from sosampler.bank.writer import describe_classes, writing_shard
from sosampler.baselines.patches import FrameFeatures
from sosampler.classifiers.base import BATCH_FRAMES, Classifier, Penultimate, check_finite, to_channels_last
from sosampler.classifiers.factory import create_classifier
from sosampler.classifiers.probed import probe_refusal
from sosampler.errors import ClassifierError, InvalidArgument
from sosampler.samplers.folder import is_sampler_folder
from sosampler.samplers.registry import load_sampler
from sosampler.samplers.sosampler import SOSampler

# Frames in a batch: on the CPU each thread has such a batch.
_CPU_BATCH, _DEVICE_BATCH = 8, 128
_MAX_THREADS = 8
_FLOAT16_MAX = float(np.finfo(np.float16).max)

Tables = tuple[np.ndarray, ...]
"""Outputs for T frames: [T, any width] each, one for each column of the shards."""

Shard = tuple[int, Iterable[tuple[str, StoredVideo]]]
"""Its number, and id and frames of its videos."""

_Batch = list[tuple[bytes, float, str]]
"""Frames of one size, of one video or several: JPEG, position in 0..1, and the video for messages."""


class Annotator(ABC):
    """A network, and how its outputs are stored. `annotate` is called by several threads at a time."""

    kind: OutputKind
    decisive: tuple[str, ...]  # keys of `about` that must not change from one run to the next
    made: str  # for messages
    remedy: str  # for messages, where it was made differently

    def __init__(self, device: Any, batch: int | None) -> None:
        self.device = torch.device(device)
        default_batch = _CPU_BATCH if self.device.type == "cpu" else _DEVICE_BATCH
        if self.device.type == "cpu":
            keep_memory()
        self.batch = default_batch if batch is None else check_int("batch", batch)
        self.batch_given = batch is not None  # otherwise a run is resumed with the batch that it began with
        self._device_lock = threading.Lock()

    net: Any  # the module that does the work; None where there is none
    schema: Any  # columns of the shards
    name: str  # of the folder

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Return the header of the folder."""

    @abstractmethod
    def run(self, frames: Tensor, positions: np.ndarray) -> Tables:
        """Map uint8 [1, F, 3, H, W] and positions [F] in 0..1 to what is stored for each frame."""

    def folder(self, bank: BankFolder) -> OutputFolder:
        return bank.output(self.kind, self.name)

    def annotate(self, frames: Tensor, positions: np.ndarray) -> Tables:
        """Run the network on uint8 [1, F, 3, H, W], each frame alone."""
        with nullcontext() if self.device.type == "cpu" else self._device_lock:  # one batch at a time
            return self.run(frames, positions)

    def begin(self, bank: BankFolder) -> OutputFolder:
        """Write the header, or compare it with the one that is there and continue with its batch size."""
        folder, about = self.folder(bank), plain(self.about())
        if not folder.header.exists():
            folder.path.mkdir(parents=True, exist_ok=True)
            write_text(folder.header, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
            return folder
        saved = read_json(folder.header, self.kind.kind, f"delete its folder and {self.kind.again}")
        if not self.batch_given:
            self.batch = about["batch"] = saved.get("batch") or self.batch
        different = differences(*({key: values.get(key) for key in self.decisive} for values in (saved, about)))
        if different:
            raise InvalidArgument(f"{folder.path}: {self.made} with {'; '.join(different)}; {self.remedy}")
        return folder


def _blank_frame() -> Tensor:
    """uint8 [1, 1, 3, 64, 64], to try a network before it runs on a bank."""
    return torch.zeros(1, 1, 3, 64, 64, dtype=torch.uint8)


def _as_stored(features: Tensor, precision: str, name: str, remedy: str) -> np.ndarray:
    """Return [F, D] in the precision in which it is stored."""
    values: np.ndarray = features.float().cpu().numpy()
    if precision == "float32":
        return values
    if float(np.abs(values).max()) > _FLOAT16_MAX:
        raise ClassifierError(f"{name} gives features too large for half precision; {remedy}")
    return values.astype(np.float16)


class TeacherAnnotator(Annotator):
    """A classifier, whose probabilities and, where it is pooled, features are stored."""

    kind = TEACHER
    decisive = ("features", "precision", "pooling", "batch")
    made = "this teacher was prepared"
    remedy = "give the same again, or delete its folder"

    def __init__(self, classifier: Any, *, features: bool | str = True, batch: int | None = None) -> None:
        self.classifier = classifier
        for member in ("frame_probs", "fingerprint", "class_names", "name"):
            if not hasattr(classifier, member):
                raise InvalidArgument(
                    f"a {type(classifier).__name__} has no {member}; give a classifier of so.create_classifier or "
                    "so.wrap_classifier, or the name of one"
                )
        super().__init__(getattr(classifier, "device", "cpu"), batch)
        self.net = getattr(classifier, "net", None)
        self.num_classes = len(classifier.class_names)
        self.pooled = hasattr(classifier, "frame_features") and hasattr(classifier, "pool")
        self.pooling: str | None = classifier.pooling if self.pooled else None
        self.features: str | None = None  # precision in which they are stored
        if self.pooled and features is True:
            # Logits are averaged and then decide by small differences: half precision is off by 0.008 at 16, which can
            # change an argmax. Features before a class layer are many, and their rounding errors cancel.
            self.features = "float32" if self.pooling == "mean" else "float16"
        elif self.pooled and features is not False:
            self.features = one_of("features", features, PRECISIONS[::-1])
        # Fails here, before anything is written, where the classifier cannot run.
        if self.pooled:
            self.feature_width: int | None = int(classifier.frame_features(_blank_frame()).shape[-1])
        else:
            classifier.frame_probs(_blank_frame(), torch.zeros(1, 1))
            self.feature_width = None
        self.name = self.fingerprint = str(classifier.fingerprint())
        self.schema = teacher_schema(self.num_classes, self.features, self.feature_width)
        self.inputs: TeacherInputs | None = None  # stores the input of the class layer from the same passes

    def about(self) -> dict[str, Any]:
        preprocessing: Any = getattr(self.classifier, "preprocessing", None)
        return {
            "kind": TEACHER.kind,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "name": self.classifier.name,
            "num_classes": self.num_classes,
            "class_names": list(self.classifier.class_names),
            "multi_label": bool(getattr(self.classifier, "multi_label", False)),
            "pooling": self.pooling,
            "views": 1,  # earlier versions could average several views of each frame
            "batch": self.batch,  # decides the last bits of the outputs
            "precision": getattr(self.classifier, "precision", "float32"),
            "features": {"precision": self.features, "width": self.feature_width} if self.features else None,
            "preprocessing": preprocessing.to_dict() if hasattr(preprocessing, "to_dict") else None,
        }

    def run(self, frames: Tensor, positions: np.ndarray) -> Tables:
        if not self.pooled:
            probs = self.classifier.frame_probs(frames, torch.from_numpy(positions)[None])[0]
            return (halved(probs.float().cpu().numpy()),)
        features = self.classifier.frame_features(frames)  # [1, F, D]
        if self.inputs is not None:
            self.inputs.keep(frames)
        probs = self.classifier.pool(features.unsqueeze(-2))[0]  # a clip of one for each frame
        tables: Tables = (halved(probs.float().cpu().numpy()),)
        if self.features is not None:
            remedy = "prepare with features='float32'"
            tables += (_as_stored(features[0], self.features, self.classifier.name, remedy),)
        return tables


def halved(probs: np.ndarray) -> np.ndarray:
    """Return probabilities [F, C] in half precision; the first largest number is still the most probable class."""
    half = probs.astype(np.float16)
    top = probs.argmax(-1)[:, None]
    best = np.take_along_axis(half, top, -1)
    # Rounding keeps the order but makes ties, and of those the first would win.
    tied_before = (half == best) & (np.arange(half.shape[1]) < top)
    return np.where(tied_before, np.nextafter(best, np.float16(0)), half)


def views_of(frames: Tensor, count: int) -> list[Tensor]:
    """Return the first `count` of four views of frames [..., H, W]: unchanged, mirrored, and the squares at either end.

    Teachers of earlier versions may have averaged them. Classifiers crop the centre, so the squares show what that
    leaves out.
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


def check_classes_fit(classifier: Any, classes: tuple[str, ...], where: str) -> None:
    """Check that bank and classifier have as many classes and, where both name them, the same ones in one order."""
    names = tuple(classifier.class_names)
    sides = f"{where} has {describe_classes(classes)}, but the classifier {classifier.name} {describe_classes(names)}"
    if len(names) != len(classes):
        raise InvalidArgument(
            f"{sides}; give the classifier's class list with the manifest (classes), or a classifier of these classes"
        )
    index = first_difference(names, classes)
    if index is not None:
        raise InvalidArgument(
            f"{sides}: class {index} is {classes[index]!r} here and {names[index]!r} there; "
            "bring the class list into the classifier's order, or give another classifier"
        )


def teacher_annotator(
    classifier: Any, classes: tuple[str, ...], folder: BankFolder, device: str | None, **options: Any
) -> TeacherAnnotator:
    """Return the annotator of a classifier, given itself or its name, that fits the classes of a bank."""
    if isinstance(classifier, (str, os.PathLike)):
        classifier = create_classifier(str(classifier), device=device)
    elif device is not None and hasattr(classifier, "to"):
        classifier = classifier.to(check_device(device))
    annotator = TeacherAnnotator(classifier, **options)
    check_classes_fit(classifier, classes, str(folder.path))
    return annotator


@dataclass(frozen=True, eq=False)
class FeatureNetwork:
    """A network that computes D features of each frame alone."""

    network: Any  # a classifier, a sampler or `FrameFeatures`
    kind: str  # "classifier" or "sampler", or that of `FrameFeatures`
    name: str  # of the network
    net: nn.Module  # the module that does the work
    compute: Callable[[Tensor], Tensor]  # uint8 [F, 3, H, W] -> float32 [F, D]
    gmacs: float  # giga multiply-adds of one frame

    @property
    def fingerprint(self) -> str:
        return str(self.network.fingerprint())

    @property
    def precision(self) -> str:
        """In which it computes."""
        return str(self.network.precision)


@contextmanager
def feature_network(network: Any, device: str | None) -> Iterator[FeatureNetwork]:
    """Yield the features of a classifier or a sampler, given itself, its folder or, for classifiers, its name."""
    if isinstance(network, (str, os.PathLike)):
        folder = os.fspath(network)
        if isinstance(network, os.PathLike) and not Path(folder).is_dir():
            raise InvalidArgument(f"{folder}: no such folder; give that of a saved classifier or sampler")
        load = load_sampler if is_sampler_folder(folder) else create_classifier
        network = load(folder, device=device)
    elif not isinstance(network, (Classifier, SOSampler, FrameFeatures)):
        raise InvalidArgument(
            f"a {type(network).__name__} has no features; give a classifier of create_classifier or wrap_classifier, "
            "a SOSampler, or the folder of either"
        )
    elif device is not None:
        network = network.to(check_device(device))
    if isinstance(network, FrameFeatures):
        yield FeatureNetwork(network, network.kind, network.name, network.net, network.compute, network.gmacs())
        return
    if isinstance(network, SOSampler):
        sampler, backbone = network, network.backbone
        if backbone.reach:
            raise InvalidArgument(
                f"{sampler!r} has a temporal shift, so its features of a frame depend on the frames beside it and "
                "cannot be stored; give a sampler trained with shift=0"
            )

        def compute(frames: Tensor) -> Tensor:  # videos of one candidate each
            return check_finite(sampler.look(frames[:, None]).features[:, 0], backbone.name)

        yield FeatureNetwork(sampler, "sampler", backbone.name, backbone, compute, sampler.gmacs(1))
        return
    before = Penultimate(network)
    with before.watching():
        yield FeatureNetwork(network, "classifier", network.name, network.net, before, network.gmacs(1))


class FeatureAnnotator(Annotator):
    """A network whose features are stored."""

    kind = FEATURES
    decisive = ("network", "fingerprint", "width", "precision", "computed_in", "batch")
    made = "these features were made"
    remedy = "give the same again, or another name, or delete this folder"
    other_precision = "give precision='float32'"  # what to do where they are too large

    def __init__(self, source: FeatureNetwork, *, name: str | None, precision: str, batch: int | None) -> None:
        super().__init__(source.network.device, batch)
        self._source, self._precision, self.net = source, precision, source.net
        self.name = source.fingerprint if name is None else name
        self.width = int(source.compute(_blank_frame()[0]).shape[-1])
        self.schema = features_schema(precision, self.width)

    def about(self) -> dict[str, Any]:
        return {
            "kind": FEATURES.kind,
            "version": VERSION,
            "name": self.name,
            "network": self._source.kind,
            "network_name": self._source.name,
            "fingerprint": self._source.fingerprint,
            "width": self.width,
            "precision": self._precision,
            "computed_in": self._source.precision,
            "batch": self.batch,  # decides the last bits
            "gmacs": self._source.gmacs,
            "preprocessing": self._source.network.preprocessing.to_dict(),
        }

    def run(self, frames: Tensor, positions: np.ndarray) -> Tables:
        features = self._source.compute(frames[0])
        return (_as_stored(features, self._precision, self._source.name, self.other_precision),)


class TeacherInputs(FeatureAnnotator):
    """The input of a teacher's class layer, stored as features, from the same pass as its outputs.

    Where a batch did not go through the teacher just before, as for outputs that are there already, it runs the network
    itself.
    """

    def __init__(self, teacher: TeacherAnnotator, source: FeatureNetwork, *, precision: str) -> None:
        super().__init__(source, name=None, precision=precision, batch=teacher.batch)
        self.batch_given, self._teacher = teacher.batch_given, teacher
        self._local = threading.local()
        teacher.inputs = self

    other_precision = (
        "leave out probe_features, and add them with `sosampler bank add-features BANK --features classifier=FOLDER "
        "--precision float32`"
    )

    def begin(self, bank: BankFolder) -> OutputFolder:
        if not self.folder(bank).header.exists():
            self.batch = self._teacher.batch  # which may have been resumed with another one
        return super().begin(bank)

    def keep(self, frames: Tensor) -> None:
        """Keep the features of the teacher's pass over uint8 [1, F, 3, H, W] that has just ended in this thread."""
        if frames.shape[1] <= BATCH_FRAMES:  # else there were several passes
            self._local.last = frames, self._source.compute.recorded(frames.shape[1])  # type: ignore[attr-defined]

    def run(self, frames: Tensor, positions: np.ndarray) -> Tables:
        kept, self._local.last = getattr(self._local, "last", None), None
        if kept is None or kept[0] is not frames:
            return super().run(frames, positions)
        return (_as_stored(kept[1], self._precision, self._source.name, self.other_precision),)


@contextmanager
def teacher_annotators(
    classifier: Any,
    classes: tuple[str, ...],
    folder: BankFolder,
    device: str | None,
    *,
    probe_features: bool = False,
    **options: Any,
) -> Iterator[list[Annotator]]:
    """Yield what `teacher_annotator` returns; with `probe_features` also what stores the input of its class layer."""
    teacher = teacher_annotator(classifier, classes, folder, device, **options)
    if not probe_features:
        yield [teacher]
        return
    if (refusal := probe_refusal(teacher.classifier)) is not None:
        raise InvalidArgument(f"probe_features=True is for a probe, but {refusal}; leave it out")
    with feature_network(teacher.classifier, None) as source:
        header = folder.features(teacher.fingerprint).header
        known = read_output_header(folder, FEATURES, teacher.fingerprint) if header.exists() else {}
        yield [teacher, TeacherInputs(teacher, source, precision=known.get("precision", "float16"))]


# ---- all shards of a bank


class Annotation:
    """Some networks and one bank: which shards lack outputs, and the work. Enter it to annotate.

    All networks see the same batches, so that every frame is decoded once. Outputs are those of each network alone.
    """

    def __init__(self, folder: BankFolder, header: BankHeader, annotators: Sequence[Annotator]) -> None:
        self._outputs = [(annotator, annotator.begin(folder)) for annotator in annotators]
        self._batch = annotators[0].batch
        if any(annotator.batch != self._batch for annotator in annotators):
            raise ValueError("networks with batches of different sizes cannot share them")
        self._missing = [set(output.missing(header.num_shards)) for _, output in self._outputs]
        self.missing = set().union(*self._missing)
        # Not known for a bank whose videos are still being decoded, which keeps the CPU busy.
        all_frames = header.counts["frames"] if header.counts else 0
        self._num_frames = all_frames * len(self.missing) // max(header.num_shards, 1)
        self._decoder = FrameDecoder()

    def __enter__(self) -> Annotation:
        """Start the threads and processes, and bring torch into the state that suits them."""
        annotators = [annotator for annotator, _ in self._outputs]
        device, torch_threads = annotators[0].device.type, torch.get_num_threads()
        on_cpu = device == "cpu"
        self._num_threads = min(torch_threads, _MAX_THREADS) if on_cpu else _MAX_THREADS
        self._stack = ExitStack()
        self._stack.callback(torch.set_num_threads, torch_threads)
        num_processes = num_frame_decoders(device, usable_cores(), self._num_frames)
        if num_processes:
            self._stack.callback(setattr, self, "_decoder", self._decoder)
            self._decoder = self._stack.enter_context(FrameDecoder(num_processes))
            self._num_threads = BATCHES_AHEAD
        start = partial(torch.set_num_threads, 1) if on_cpu else None
        self._threads = ThreadPoolExecutor(self._num_threads, "sosampler-annotate", initializer=start)
        networks = [annotator.net for annotator in annotators if isinstance(annotator.net, nn.Module)]
        self._contiguous = [tensor for net in networks for tensor in to_channels_last(net)]
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for tensor in self._contiguous:
            tensor.data = tensor.data.contiguous()
        self._stack.close()

    def annotate(self, shards: Iterable[Shard], on_done: Callable[[], None]) -> None:
        """Run the networks on all videos of shards, in batches across videos, and write the outputs.

        Batches of the shards that follow run while those of a shard are being written.
        """
        # Of the shards under way: their number, then id and number of frames of each video.
        under_way: deque[tuple[int, deque[tuple[str, int]]]] = deque()

        def batches() -> Iterator[tuple[int, _Batch]]:
            for number, rows in shards:
                videos: deque[tuple[str, int]] = deque()
                under_way.append((number, videos))
                for batch in _batches_of(rows, videos, self._batch):
                    yield number, batch
                yield number, []  # the end of a shard

        outputs = in_order(self._submit, batches(), lambda pending: len(pending) <= 2 * self._num_threads)
        for first in outputs:
            number, waiting = under_way.popleft()
            with ExitStack() as files:
                writers = []
                for annotator, output in self._lacking(number):
                    write = files.enter_context(writing_shard(output.shard(number), annotator.schema))
                    writers.append((annotator.schema, write))
                of_shard = takewhile(lambda tables: tables is not None, chain([first], outputs))
                for video_id, tables in _by_video(cast(Iterator[Tables], of_shard), waiting):
                    remaining = iter(tables)  # of all networks, in their order
                    for schema, write in writers:
                        write(tables_batch(schema, video_id, *islice(remaining, len(schema) - 1)))  # the id is a column
                    on_done()

    def _lacking(self, shard: int) -> list[tuple[Annotator, OutputFolder]]:
        """Return the networks without outputs of a shard; where a run was killed they differ."""
        return [pair for pair, missing in zip(self._outputs, self._missing, strict=True) if shard in missing]

    def _submit(self, task: tuple[int, _Batch]) -> Future[Tables | None]:
        shard, batch = task
        return self._threads.submit(self._run if batch else lambda *_: None, shard, batch)

    def _run(self, shard: int, batch: _Batch) -> Tables:
        """Return the outputs of all networks that lack those of a shard, for F frames of one size."""
        jpegs, positions, names = map(list, zip(*batch, strict=True))
        with self._decoder.decoded(jpegs, names) as decoded:
            frames = torch.from_numpy(decoded).permute(0, 3, 1, 2)[None]  # [1, F, 3, H, W]
            shares = np.array(positions, dtype=np.float32)
            return tuple(table for annotator, _ in self._lacking(shard) for table in annotator.annotate(frames, shares))


def _batches_of(
    rows: Iterable[tuple[str, StoredVideo]], waiting: deque[tuple[str, int]], max_frames: int
) -> Iterator[_Batch]:
    """Yield batches of frames of one size, in order; a batch may hold frames of several videos.

    Adds each video to `waiting`, with the number of its frames.
    """
    batch: _Batch = []
    size: tuple[int, int] | None = None
    for video_id, video in rows:
        waiting.append((video_id, len(video)))
        if batch and size != (video.width, video.height):
            yield batch
            batch = []
        size = video.width, video.height
        for jpeg, position in zip(video.jpegs, video.positions.tolist(), strict=True):
            batch.append((jpeg, position, video_id))
            if len(batch) == max_frames:
                yield batch
                batch = []
    if batch:
        yield batch


def _by_video(outputs: Iterable[Tables], waiting: deque[tuple[str, int]]) -> Iterator[tuple[str, Tables]]:
    """Divide the stream of outputs into videos again."""
    parts: list[Tables] = []
    have = 0
    for tables in outputs:
        parts.append(tables)
        have += len(tables[0])
        while waiting and waiting[0][1] <= have:
            video_id, count = waiting.popleft()
            joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
            yield video_id, tuple(table[:count] for table in joined)
            parts, have = [tuple(table[count:] for table in joined)], have - count
