"""`prepare` on a Ray cluster: some workers write whole shards of the bank, others run the classifier on them.

A shard takes its name only once it is whole, so what a dead worker leaves counts for nothing and its shard is made
again. The bank is the same, byte for byte, as `prepare` makes on one machine. Its folder must lie on a disk that all
machines share.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sosampler._util.files import import_parquet
from sosampler._util.progress import OnProgress, Progress
from sosampler.bank.bank import Bank
from sosampler.bank.decode import FrameSettings, VideoDecoder
from sosampler.bank.format import BankFolder, BankHeader, read_failures, read_header, read_shard
from sosampler.bank.prepare import decode_tasks, header_of, prepare
from sosampler.bank.writer import begin, check_root, fill_shard, writing_bank
from sosampler.datasets.manifest import Manifest, read_manifest
from sosampler.errors import SosamplerError
from sosampler.integrations.ray.cluster import RaySettings, Stage, absolute, check_address, connected, execute, placed
from sosampler.video.limits import Limits

# Shards of one execution: bounds what the driver holds.
_SHARDS_A_WAVE = 2000
# Frames through a network at once, on a GPU.
_GPU_BATCH = 128


@dataclass(frozen=True)
class Teacher:
    """The classifier that annotates the bank, as a worker can find it, and how it is run."""

    name: str  # or the folder of a saved one
    settings: dict[str, Any] = field(default_factory=dict)  # of `create_classifier`: weights, precision, ...
    features: bool | str = True
    batch: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", absolute(self.name))
        if self.settings.get("weights") is not None:
            object.__setattr__(self, "settings", {**self.settings, "weights": absolute(self.settings["weights"])})

    def annotator(self, device: str) -> Any:
        from sosampler.bank.annotate import TeacherAnnotator
        from sosampler.classifiers.factory import create_classifier

        classifier = create_classifier(self.name, device=device, **self.settings)
        return TeacherAnnotator(classifier, features=self.features, batch=self.batch)


def prepare_on_ray(
    manifest: str | os.PathLike[str] | Manifest | None,
    teacher: Teacher | None,
    out: str | os.PathLike[str],
    *,
    settings: RaySettings | None = None,
    device: str | None = None,
    on_progress: OnProgress | None = None,
    **arguments: Any,
) -> Bank:
    """Make a bank on a cluster; called again with the same arguments it resumes. `prepare` documents the arguments.

    Videos that failed before are tried again (`retry_failed`) on this machine, as is what the cluster left undone.
    """
    folder = BankFolder(Path(os.path.abspath(out)))
    annotator = None if teacher is None else teacher.annotator("cpu")
    if manifest is not None and not isinstance(manifest, Manifest):
        given: dict[str, Any] = {name: arguments.get(name) for name in ("classes", "root", "multi_label", "exclusive")}
        manifest = read_manifest(manifest, **given)
    work = None
    if manifest is not None and manifest.items:  # without any, `prepare` raises
        work = _Work(folder, manifest, *header_of(manifest, arguments), arguments.get("limits") or Limits())
    elif manifest is None and teacher is not None:
        Bank(folder.path)  # raises where it cannot be read
        work = _Work(folder, None, read_header(folder))
    if work is not None:
        _make(work, teacher, annotator, settings or RaySettings(), device, on_progress)
    if teacher is not None:
        arguments |= {"features": teacher.features, "batch": teacher.batch}
    return prepare(manifest, annotator and annotator.classifier, folder.path, **arguments)


@dataclass(frozen=True)
class _Work:
    """A bank, and the videos that it is made from; None where only a classifier is run."""

    folder: BankFolder
    manifest: Manifest | None
    header: BankHeader
    frames: FrameSettings | None = None
    limits: Limits | None = None

    def row(self, shard: int) -> dict[str, Any]:
        """Return what a worker needs for a shard."""
        if self.manifest is None or self.folder.frames(shard).exists():
            return {"shard": shard, "work": b""}
        assert self.frames is not None and self.limits is not None, "there are videos to decode"  # noqa: PT018
        items = self.header.shard_items(self.manifest.items, shard)
        tasks = decode_tasks(self.manifest, items, self.frames, self.limits)
        return {"shard": shard, "work": pickle.dumps((items, list(tasks)), protocol=5)}


def _make(
    work: _Work,
    teacher: Teacher | None,
    annotator: Any,
    settings: RaySettings,
    device: str | None,
    on_progress: OnProgress | None,
) -> None:
    """Make all shards that are missing."""
    folder, header = work.folder, work.header
    if annotator is not None:
        from sosampler.bank.annotate import Annotation, check_classes_fit

        check_classes_fit(annotator.classifier, header.classes, str(folder.path))
    check_address(settings.address)  # before anything is written
    with writing_bank(folder):
        if work.manifest is not None:
            header = begin(folder, header, work.manifest.items)
            check_root(folder, work.manifest.root, work.manifest.items)
        missing = {shard for shard in range(header.num_shards) if not folder.frames(shard).exists()}
        if annotator is not None:
            missing |= set(annotator.folder(folder).missing(header.num_shards))
        if not missing:
            return
        with connected(settings.address) as ray:
            network = None
            if annotator is not None:
                device, settings = placed(device, settings, ray.cluster_resources())
                if device.startswith("cuda") and not annotator.batch_given:
                    annotator.batch = _GPU_BATCH  # unless outputs that are there already were made in others
                Annotation(folder, header, [annotator])  # writes the header of the outputs, once, before workers would
                network = Stage(_Annotate, (str(folder.path), teacher, device))
            before = header.num_items - sum(len(header.shard_range(shard)) for shard in missing)
            progress = Progress(header.num_items, done=before, before=before)
            for shard, failed in _shards(work, sorted(missing), network, settings):
                if not folder.frames(shard).exists():
                    raise SosamplerError(
                        f"{folder.path}: a worker wrote {folder.frames(shard).name}, which is not to be seen here; put "
                        "the bank on a disk that all machines share, under the same path"
                    )
                progress.failed += failed
                for _ in header.shard_range(shard):
                    progress.done += 1
                    if on_progress is not None:
                        on_progress(progress)


def _shards(
    work: _Work, shards: Sequence[int], network: Stage | None, settings: RaySettings
) -> Iterator[tuple[int, int]]:
    """Numbers of the shards that are done, as they come, and how many of their videos failed."""
    coming, decode = iter(shards), Stage(_Decode, (str(work.folder.path),))
    while wave := list(islice(coming, _SHARDS_A_WAVE)):
        for table in execute([work.row(shard) for shard in wave], decode, network, settings, max_block=1):
            yield from zip(table.column("shard").to_pylist(), table.column("failed").to_pylist(), strict=True)


# ---- what runs on the cluster


class _Decode:
    """An actor that decodes whole shards, in a process of its own that a broken file may kill."""

    def __init__(self, folder: str) -> None:
        self._folder, self._pool = BankFolder(Path(folder)), VideoDecoder(1)

    def __call__(self, batch: Any) -> Any:
        pa, _ = import_parquet()
        failed = []  # how many videos of each shard
        for shard, work in zip(batch.column("shard").to_pylist(), batch.column("work").to_pylist(), strict=True):
            if work and not self._folder.frames(shard).exists():  # it may be there where only a later step was lost
                items, tasks = pickle.loads(work)
                for _ in fill_shard(self._folder, shard, items, self._pool.results(tasks), lambda: None):
                    pass  # written as it comes
            failed.append(len(read_failures(self._folder.failed(shard))))
        return pa.table({"shard": batch.column("shard"), "failed": pa.array(failed, pa.int64())})


class _Annotate:
    """An actor with the classifier."""

    def __init__(self, folder: str, teacher: Teacher, device: str) -> None:
        from sosampler.bank.annotate import Annotation

        self._folder = BankFolder(Path(folder))
        annotator = teacher.annotator(device)
        self._outputs = annotator.folder(self._folder)
        # Entered for as long as the actor lives.
        self._annotation = Annotation(self._folder, read_header(self._folder), [annotator]).__enter__()

    def __call__(self, batch: Any) -> Any:
        for shard in batch.column("shard").to_pylist():
            if not self._outputs.shard(shard).exists():
                self._annotation.annotate([(shard, read_shard(self._folder.frames(shard)))], lambda: None)
        return batch
