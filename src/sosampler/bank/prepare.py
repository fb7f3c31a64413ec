"""The run behind every way of making a bank: shards that are missing are filled, and classifiers asked meanwhile."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sosampler._util.progress import OnProgress, Progress
from sosampler._util.validation import whole_number
from sosampler.bank.bank import Bank
from sosampler.bank.decode import DecodeTask, FrameSettings, VideoPool
from sosampler.bank.format import (
    VIDEOS_PER_SHARD,
    BankFolder,
    BankHead,
    StoredVideo,
    import_pyarrow,
    read_failures,
    read_head,
    read_items,
    read_shard,
)
from sosampler.bank.writer import (
    Results,
    Tally,
    begin,
    check_root,
    fill_shard,
    finish,
    restore_failures,
    retry_failures,
    writing_bank,
)
from sosampler.datasets.manifest import Item, Manifest, read_manifest
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError
from sosampler.video.limits import Limits, Size

if TYPE_CHECKING:
    from sosampler.bank.annotate import Asker, Teaching


Row = tuple[str, StoredVideo]


@dataclass
class _Ticker:
    """Counts videos and tells."""

    progress: Progress
    tell: OnProgress | None

    def done(self) -> None:
        self.progress.done += 1
        if self.tell is not None:
            self.tell(self.progress)

    def failed(self) -> None:
        self.progress.failed += 1
        self.done()


def make_shards(
    folder: BankFolder,
    head: BankHead,
    items: Sequence[Item],
    produce: Callable[[list[Item]], Results],
    tally: Tally,
    teaching: Teaching | None = None,
    on_progress: OnProgress | None = None,
) -> BankHead:
    """Make the shards that are missing, frames and answers side by side, and finish the bank. Call it locked.

    `produce` gives the frames of these items, in their order. A shard is asked about while it is being filled, or from
    the disk where it was filled before; it is the same either way. `tally` is that of the frames.
    """
    to_fill = [shard for shard in range(head.num_shards) if not folder.frames(shard).exists()]
    to_teach = teaching.missing if teaching is not None else set()
    to_do = {*to_fill, *to_teach}
    done_before = head.num_items - sum(len(head.shard_range(shard)) for shard in to_do)
    ticker = _Ticker(Progress(head.num_items, done=done_before, before=done_before), on_progress)
    new_items = [items[place] for shard in to_fill for place in head.shard_range(shard)]
    results: Results = produce(new_items) if to_fill else iter(())
    with teaching if to_teach and teaching else nullcontext():
        if teaching is not None:
            stored = sorted(to_teach.difference(to_fill))
            teaching.teach(((shard, _stored_rows(folder, shard, ticker)) for shard in stored), ticker.done)
        for shard in to_fill:
            of_shard = [items[place] for place in head.shard_range(shard)]
            with closing(fill_shard(folder, shard, of_shard, results, tally, ticker.failed)) as rows:
                if teaching is not None and shard in to_teach:
                    teaching.teach([(shard, rows)], ticker.done)
                for _ in rows:  # exhausted, a new shard takes its place; videos are left only where nobody is asked
                    ticker.done()
    if to_fill or not head.complete:
        return finish(folder, head)
    restore_failures(folder, head)
    return head


def _stored_rows(folder: BankFolder, shard: int, ticker: _Ticker) -> Generator[Row]:
    for _ in read_failures(folder.failed(shard)):
        ticker.failed()
    yield from read_shard(folder.frames(shard))


# All decoding processes together.
_DECODERS_MB = 1500


def prepare(
    manifest: str | os.PathLike[str] | Manifest | None,
    classifier: Any = None,
    out: str | os.PathLike[str] = "bank",
    *,
    num_candidates: int | None = None,
    fps: float | None = None,
    size: Size = FrameSettings.size,
    quality: int = FrameSettings.quality,
    candidates: str = FrameSettings.candidates,
    grid: str = FrameSettings.grid,
    snap_tolerance: float = FrameSettings.snap_tolerance,
    folder_fps: float | None = None,
    seed: int = 0,
    classes: Sequence[str] | Path | None = None,
    root: Path | None = None,
    multi_label: bool | None = None,
    views: int = 1,
    features: bool | str = True,
    batch: int | None = None,
    device: str | None = None,
    workers: int | None = None,
    limits: Limits | None = None,
    videos_per_shard: int = VIDEOS_PER_SHARD,
    retry_failed: bool = False,
    on_progress: OnProgress | None = None,
) -> Bank:
    """Decode the candidate frames of all videos once, ask a classifier about each once, and keep both in a bank.

    Killed at any moment and called again with the same arguments it goes on, and ends with the same bytes. Called with
    another classifier it asks that one about the stored frames; no video is opened. Videos that cannot be read are
    listed in `failed.jsonl` with the reason.

    Args:
        manifest: a CSV, a JSONL, a folder of class folders or a `Manifest`; None for a bank that is there already.
        classifier: a classifier, or the name of one; None keeps frames only.
        out: the bank's folder.
        num_candidates: frames kept of each video; 64 if not given. Shorter videos give all they have.
        fps: keep frames at this rate instead of a number of them.
        size: short side of the stored frames, (height, width), or None for the video's own; never enlarged.
        quality: of the JPEGs, 1 to 100.
        candidates, grid, snap_tolerance, folder_fps: as in `select`.
        seed: for grid="stratified".
        classes, root, multi_label: as in `read_manifest`.
        views: 1 to 4 fixed views of each frame, averaged: as it is, mirrored, and the squares at either end.
        features: also keep what a pooled classifier joins: True, False, "float32" or "float16". True takes "float32"
            where these are logits, else "float16".
        batch: frames that go through the network at once.
        device: where the classifier runs.
        workers: decoding processes; None takes one for each core, fewer where frames are large, so that memory stays
            bounded; 0 decodes in this process.
        limits: guards against hostile files.
        videos_per_shard: how many videos a file of the bank holds, and are lost at most when killed.
        retry_failed: try the videos again that failed before.
        on_progress: called after each video.

    Examples:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import sosampler as so
        >>> from sosampler.video.synthetic import numbered_video
        >>> with TemporaryDirectory() as folder:
        ...     _ = numbered_video(Path(folder, "a.mp4"), num_frames=30)
        ...     _ = Path(folder, "videos.csv").write_text("path,label\\na.mp4,ant\\n")
        ...     bank = so.prepare(f"{folder}/videos.csv", out=f"{folder}/bank", num_candidates=10, workers=0)
        ...     len(bank), bank.classes, bank[0].frames([0, 9]).shape
        (1, ('ant',), (2, 128, 192, 3))
    """
    import_pyarrow()
    folder = BankFolder(Path(out))
    if workers is not None:
        whole_number("workers", workers, at_least=0)
    if manifest is None:
        _refuse_without_manifest(
            num_candidates=(num_candidates, None),
            fps=(fps, None),
            size=(size, FrameSettings.size),
            quality=(quality, FrameSettings.quality),
            candidates=(candidates, FrameSettings.candidates),
            grid=(grid, FrameSettings.grid),
            snap_tolerance=(snap_tolerance, FrameSettings.snap_tolerance),
            folder_fps=(folder_fps, None),
            seed=(seed, 0),
            classes=(classes, None),
            root=(root, None),
            multi_label=(multi_label, None),
            limits=(limits or Limits(), Limits()),
            videos_per_shard=(videos_per_shard, VIDEOS_PER_SHARD),
            retry_failed=(retry_failed, False),
        )
        return _add_to_existing(folder, classifier, device, views, features, batch, on_progress)
    if fps is None and num_candidates is None:
        num_candidates = FrameSettings.num_candidates
    settings = FrameSettings(
        num_candidates=num_candidates,
        fps=fps,
        size=size,
        quality=quality,
        candidates=candidates,
        grid=grid,
        snap_tolerance=snap_tolerance,
        seed=whole_number("seed", seed, at_least=0),
        folder_fps=folder_fps,
    )
    num_workers = default_workers(_cores(), settings.size) if workers is None else workers
    if not isinstance(manifest, Manifest):
        manifest = read_manifest(manifest, classes=classes, root=root, multi_label=multi_label)
    if not manifest.items:
        raise InvalidArgument("the manifest is empty; give at least one video")
    head = BankHead(
        source="videos",
        settings=settings.to_dict(),
        classes=manifest.classes,
        multi_label=manifest.multi_label,
        num_items=len(manifest.items),
        videos_per_shard=whole_number("videos_per_shard", videos_per_shard),
    )
    asker = _asker(classifier, head.classes, str(folder.path), device, views, features, batch)
    tallies = _tallies(folder, head, asker)
    with writing_bank(folder, *tallies), ExitStack() as stack:
        head = begin(folder, head, manifest.items)
        check_root(folder, manifest.root, manifest.items)
        source, chosen_limits = manifest, limits or Limits()

        def decoded(items: list[Item]) -> Results:
            _check_decoder()
            # Absolute, so that what failures say does not depend on the folder from which this was called.
            tasks = (
                DecodeTask(
                    os.path.abspath(source.path_of(item)), item.id, item.start, item.end, settings, chosen_limits
                )
                for item in items
            )
            return stack.enter_context(VideoPool(num_workers)).results(tasks)

        if retry_failed:
            head = retry_failures(folder, head, manifest.items, decoded)
        teaching = _teaching(folder, head, asker, tallies)
        make_shards(folder, head, manifest.items, decoded, tallies[0], teaching, on_progress)
    return Bank(folder.path)


def _refuse_without_manifest(**given: tuple[Any, Any]) -> None:
    """Arguments, each with its default, that would say how to decode."""
    stray = [name for name, (value, default) in given.items() if value != default]
    if stray:
        raise InvalidArgument(
            f"{', '.join(stray)} {'say' if len(stray) > 1 else 'says'} how videos are decoded, but without a manifest "
            f"none is; give the manifest, or leave {'them' if len(stray) > 1 else 'it'} out"
        )


def add_teacher(
    bank: Bank | str | os.PathLike[str],
    classifier: Any,
    *,
    views: int = 1,
    features: bool | str = True,
    batch: int | None = None,
    device: str | None = None,
    on_progress: OnProgress | None = None,
) -> Bank:
    """Ask a classifier about the frames of a finished bank; `prepare` documents the arguments."""
    folder = BankFolder(bank.path if isinstance(bank, Bank) else Path(bank))
    return _add_to_existing(folder, classifier, device, views, features, batch, on_progress)


def _add_to_existing(
    folder: BankFolder,
    classifier: Any,
    device: str | None,
    views: int,
    features: bool | str,
    batch: int | None,
    on_progress: OnProgress | None,
) -> Bank:
    Bank(folder.path)  # says what is wrong with it
    if classifier is None:
        raise InvalidArgument(
            f"{folder.path}: without a manifest there is nothing to do but to ask a classifier; give one"
        )
    asker = _asker(classifier, read_head(folder).classes, str(folder.path), device, views, features, batch)
    return ask_about_stored(folder, asker, on_progress)


def ask_about_stored(folder: BankFolder, asker: Asker | None, on_progress: OnProgress | None) -> Bank:
    """Ask a network about all frames of a finished bank that it was not asked about before; no video is opened."""
    tallies = _tallies(folder, read_head(folder), asker)
    with writing_bank(folder, *tallies):
        head = read_head(folder)  # again: a broken-off retry may have been brought to its end
        teaching = _teaching(folder, head, asker, tallies)
        make_shards(folder, head, read_items(folder), partial(_missing, folder), tallies[0], teaching, on_progress)
    return Bank(folder.path)


def _missing(folder: BankFolder, items: list[Item]) -> Results:
    raise SosamplerError(
        f"{folder.path}: the frames of {len(items)} videos are missing, {items[0].id!r} is the first; "
        "copy the bank again, or give the manifest to decode them"
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(cores: int, size: Size) -> int:
    """One a core, as far as all of them together stay below 1.5 GB.

    Measured with videos of 1920x1080: 113 MB each for frames of 256, 171 to 184 MB for larger ones, as only so many
    decoded pictures are held at a time.

    >>> default_workers(2, 256), default_workers(64, 256), default_workers(64, 720), default_workers(64, None)
    (2, 12, 7, 7)
    """
    side = size if isinstance(size, int) else min(size) if isinstance(size, tuple) else None
    megabytes_each = 120 if side is not None and side <= 256 else 200
    return max(1, min(cores, 16, _DECODERS_MB // megabytes_each))


def _check_decoder() -> None:
    if importlib.util.find_spec("av") is None:
        raise MissingDependency("preparing a bank from videos needs PyAV; install it with: pip install av")


def _asker(
    classifier: Any,
    classes: tuple[str, ...],
    where: str,
    device: str | None,
    views: int,
    features: bool | str,
    batch: int | None,
) -> Asker | None:
    if classifier is None:
        return None
    from sosampler.video.source import import_torch

    import_torch()
    from sosampler.bank.annotate import TeacherAsker, check_classes_fit

    if isinstance(classifier, (str, os.PathLike)):
        from sosampler.classifiers.factory import create_classifier

        classifier = create_classifier(str(classifier), device=device)
    elif device is not None and hasattr(classifier, "to"):
        from sosampler._util.devices import check_device

        classifier = classifier.to(check_device(device))
    asker = TeacherAsker(classifier, views=views, features=features, batch=batch)
    check_classes_fit(classifier, classes, where)
    return asker


def _tallies(folder: BankFolder, head: BankHead, asker: Asker | None) -> list[Tally]:
    """Of the frames, and of the classifier's answers."""
    frames = Tally(head, folder.frames)
    if asker is None:
        return [frames]
    counts = head.counts or {"frames": 0, "videos": 0}
    frames_each = counts["frames"] / counts["videos"] if counts["videos"] else head.settings.get("num_candidates") or 64
    path_of = asker.answers_folder(folder).shard
    return [frames, Tally(head, path_of, guess=round(asker.bytes_a_frame * frames_each))]


def _teaching(folder: BankFolder, head: BankHead, asker: Asker | None, tallies: list[Tally]) -> Teaching | None:
    if asker is None:
        return None
    from sosampler.bank.annotate import Teaching

    return Teaching(folder, head, asker, tallies[1])
