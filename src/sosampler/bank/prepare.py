"""`prepare` decodes videos and runs a classifier on them; `add_teacher` and `add_features` annotate a finished bank."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sosampler._util.hardware import import_torch, usable_cores
from sosampler._util.limits import check_count
from sosampler._util.progress import OnProgress
from sosampler._util.validation import check_int, one_of
from sosampler.bank.bank import Bank
from sosampler.bank.decode import DecodeTask, FrameSettings, VideoDecoder
from sosampler.bank.format import (
    PRECISIONS,
    VIDEOS_PER_SHARD,
    BankFolder,
    BankHeader,
    Shown,
    import_pyarrow,
    read_header,
    read_items,
)
from sosampler.bank.writer import (
    Results,
    begin,
    check_root,
    make_shards,
    retry_failures,
    write_shown,
    writing_bank,
)
from sosampler.datasets.manifest import Item, Manifest, read_manifest
from sosampler.datasets.segments import SEGMENTS_FILE, Segment, class_flags, read_segments, sources_between
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError
from sosampler.video.limits import Limits, Size

if TYPE_CHECKING:
    from sosampler.bank.annotate import Annotator

# All decoding processes together.
_DECODERS_MB = 1500
# Can be the name of a folder on every operating system.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9_-])?")


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
    exclusive: bool | None = None,
    features: bool | str = True,
    probe_features: bool = False,
    audio: bool = False,
    batch: int | None = None,
    device: str | None = None,
    workers: int | None = None,
    limits: Limits | None = None,
    videos_per_shard: int = VIDEOS_PER_SHARD,
    retry_failed: bool = False,
    on_progress: OnProgress | None = None,
) -> Bank:
    """Decode the candidate frames of all videos once, run a classifier on each once, and store both in a bank.

    Killed at any moment and called again with the same arguments it resumes, and ends with the same bytes. Called with
    another classifier it runs that one on the stored frames; no video is opened. Videos that cannot be read are listed
    in `failed.jsonl` with the reason. A `segments.jsonl` in the manifest's folder (`root`), which says when videos show
    their class, becomes `shows_class` and `sources` of the bank.

    Args:
        manifest: a CSV, a JSONL, a folder of class folders or a `Manifest`; None for a bank that is there already.
        classifier: a classifier, or the name of one; None stores frames only.
        out: the bank's folder.
        num_candidates: frames stored of each video; 64 if not given. Shorter videos give all they have.
        fps: store frames at this rate instead of a number of them.
        size: short side of the stored frames, (height, width), or None for the video's own; never enlarged.
        quality: of the JPEGs, 1 to 100.
        candidates, grid, snap_tolerance, folder_fps: as in `select`.
        seed: for grid="stratified".
        classes, root, multi_label, exclusive: as in `read_manifest`.
        features: also store what a pooled classifier pools: True, False, "float32" or "float16". True takes "float32"
            where these are logits, else "float16".
        probe_features: also store the input of the classifier's class layer, from the same pass, as `add_features`
            does. `train` learns a probe from it, and baselines their class layers.
        audio: also store the sound around each frame, as the log-mel spectrum of one second; `Bank.audio` reads it.
            Files without sound are silent, and noted. Given for a finished bank, it adds the sound alone.
        batch: frames that go through the network at a time.
        device: where the classifier runs.
        workers: decoding processes; None takes one per core, fewer where frames are large, so that memory stays
            bounded; 0 decodes in this process.
        limits: limits for hostile files.
        videos_per_shard: how many videos a file of the bank holds; at most so many are decoded again after a kill.
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
    given = dict(locals())
    import_pyarrow()
    folder = BankFolder(Path(out))
    if workers is not None:
        check_count("workers", workers, "MAX_THREADS", at_least=0)
    annotation: dict[str, Any] = {"features": features, "probe_features": probe_features, "batch": batch}
    if manifest is None:
        _refuse_without_manifest(given)
        opened = Bank(folder.path)  # raises where it cannot be read
        if classifier is None:
            raise InvalidArgument(
                f"{folder.path}: without a manifest only a classifier can be run on the bank; give one, or a manifest"
            )
        return add_teacher(opened, classifier, device=device, on_progress=on_progress, **annotation)
    if not isinstance(manifest, Manifest):
        manifest = read_manifest(manifest, classes=classes, root=root, multi_label=multi_label, exclusive=exclusive)
    if not manifest.items:
        raise InvalidArgument("the manifest is empty; give at least one video")
    header, settings = header_of(manifest, given)
    segments = read_segments(manifest.root / SEGMENTS_FILE, (item.id for item in manifest.items))
    if probe_features and classifier is None:
        raise InvalidArgument("probe_features=True are features of a classifier, but none is given; give one")
    networks: AbstractContextManager[list[Annotator]] = nullcontext([])
    if classifier is not None:
        import_torch()
        from sosampler.bank.annotate import teacher_annotators

        networks = teacher_annotators(classifier, header.classes, folder, device, **annotation)
    num_workers = default_workers(usable_cores(), settings.size) if workers is None else workers
    source = manifest
    with networks as annotators, writing_bank(folder), ExitStack() as stack:
        header = begin(folder, header, manifest.items)
        check_root(folder, manifest.root, manifest.items)

        def decoded(items: list[Item]) -> Results:
            _require_pyav()
            tasks = decode_tasks(source, items, settings, limits or Limits())
            return stack.enter_context(VideoDecoder(num_workers)).results(tasks)

        if retry_failed:
            header = retry_failures(folder, header, manifest.items, decoded)
        first, *others = _by_batch(folder, annotators) or [[]]
        make_shards(folder, header, manifest.items, decoded, first, on_progress)
        for group in others:
            make_shards(folder, header, manifest.items, decoded, group, on_progress)
        if segments:
            write_shown(folder, _shown_of(Bank(folder.path), segments))
        if audio:
            stack.close()  # the processes that decode frames make room for those that read sound
            _require_pyav()
            from sosampler.bank.audio import add_audio

            add_audio(
                *(folder, header, manifest.items, source.path_of),
                workers=num_workers,
                limits=limits or Limits(),
                on_progress=on_progress,
            )
    return Bank(folder.path)


def _shown_of(bank: Bank, segments: Mapping[str, Sequence[Segment]]) -> dict[str, Shown]:
    """Return what is known of the stored frames, by their true times, of the videos that have segments."""
    shown = {}
    for position, row in enumerate(bank.rows):
        if row.item.id in segments:
            video, listed = bank[position], segments[row.item.id]
            end = video.start_seconds + video.duration
            flags = class_flags(listed, video.pts_seconds)
            shown[row.item.id] = Shown(tuple(flags.tolist()), sources_between(listed, video.start_seconds, end))
    return shown


def _require_pyav() -> None:
    if importlib.util.find_spec("av") is None:
        raise MissingDependency("preparing a bank from videos needs PyAV; install it with: pip install sosampler")


def header_of(manifest: Manifest, arguments: Mapping[str, Any]) -> tuple[BankHeader, FrameSettings]:
    """Return the header of a new bank, and which frames it stores, by some of the arguments of `prepare`."""
    values = {field.name: arguments[field.name] for field in fields(FrameSettings) if field.name in arguments}
    if values.get("num_candidates") is None:
        values["num_candidates"] = FrameSettings.num_candidates if values.get("fps") is None else None
    settings = FrameSettings(**values)
    per_shard = check_int("videos_per_shard", arguments.get("videos_per_shard", VIDEOS_PER_SHARD))
    num_items = len(manifest.items)
    header = BankHeader(
        "videos",
        settings.to_dict(),
        manifest.classes,
        manifest.multi_label,
        num_items,
        per_shard,
        exclusive=manifest.exclusive,
    )
    return header, settings


def decode_tasks(
    manifest: Manifest, items: Iterable[Item], settings: FrameSettings, limits: Limits
) -> Iterator[DecodeTask]:
    """Yield what a decoder needs for each of some videos of a manifest."""
    for item in items:
        # Absolute, so that messages of failures do not depend on the folder from which this was called.
        path = os.path.abspath(manifest.path_of(item))
        yield DecodeTask(path, item.id, item.start, item.end, settings, limits)


def _refuse_without_manifest(given: dict[str, Any]) -> None:
    """Refuse arguments of decoding that are not the default."""
    given["limits"] = None if given["limits"] == Limits() else given["limits"]
    of_network = ("classifier", "features", "probe_features", "batch", "device")
    others = ("manifest", "out", *of_network, "workers", "on_progress")
    defaults = {name: parameter.default for name, parameter in inspect.signature(prepare).parameters.items()}
    stray = [name for name, value in given.items() if name not in others and value != defaults[name]]
    if stray:
        raise InvalidArgument(
            f"{', '.join(stray)} {'control' if len(stray) > 1 else 'controls'} how videos are decoded, but without a "
            f"manifest none is; give the manifest, or leave {'them' if len(stray) > 1 else 'it'} out"
        )


def default_workers(cores: int, size: Size) -> int:
    """Return one per core, as far as all of them together stay below 1.5 GB.

    Measured with videos of 1920x1080: 113 MB each for frames of 256, 171 to 184 MB for larger ones, as only so many
    decoded frames are held at a time.

    >>> default_workers(2, 256), default_workers(64, 256), default_workers(64, 720), default_workers(64, None)
    (2, 12, 7, 7)
    """
    side = size if isinstance(size, int) else min(size) if isinstance(size, tuple) else None
    megabytes_each = 120 if side is not None and side <= 256 else 200
    return max(1, min(cores, 16, _DECODERS_MB // megabytes_each))


def add_teacher(
    bank: Bank | str | os.PathLike[str],
    classifier: Any,
    *,
    features: bool | str = True,
    probe_features: bool = False,
    batch: int | None = None,
    device: str | None = None,
    on_progress: OnProgress | None = None,
) -> Bank:
    """Run a classifier on the frames of a finished bank; `prepare` documents the arguments."""
    opened = _opened(bank)
    import_torch()
    from sosampler.bank.annotate import teacher_annotators

    given: dict[str, Any] = {"features": features, "probe_features": probe_features, "batch": batch}
    with teacher_annotators(classifier, opened.classes, opened.folder, device, **given) as annotators:
        return _annotate_bank(opened.folder, annotators, on_progress)


def add_features(
    bank: Bank | str | os.PathLike[str],
    network: Any,
    *,
    name: str | None = None,
    device: str | None = None,
    batch: int | None = None,
    precision: str = "float16",
    on_progress: OnProgress | None = None,
) -> Bank:
    """Store the features of networks for every frame of a finished bank; `Bank.features` reads them.

    Of a classifier they are the input of its class layer when it sees one frame as a clip of one; of a sampler the
    features of its backbone. Several networks run in one pass, in which each frame is decoded once; the features are
    the same as one by one. Killed at any moment and called again with the same arguments it resumes, and ends with the
    same bytes; where all is there it does nothing.

    Args:
        bank: the bank, or its folder.
        network: a classifier or a `SOSampler` without a temporal shift; the folder of a saved one; or the name of a
            classifier. Several: a list of these, or {name of the features: network}.
        name: of these features in the bank; None takes the network's fingerprint.
        device: where the networks run; None leaves them where they are.
        batch: frames that go through a network at a time.
        precision: in which features are stored, "float16" or "float32".
        on_progress: called after each video.
    """
    opened = _opened(bank)
    one_of("precision", precision, PRECISIONS)
    networks: list[tuple[str | None, Any]] = [(name, network)]
    if isinstance(network, Mapping):
        networks = list(network.items())
    elif isinstance(network, (list, tuple)):
        networks = [(None, one) for one in network]
    if isinstance(network, (Mapping, list, tuple)) and (name is not None or not networks):
        raise InvalidArgument(
            f"name={name!r} is for one network, but {len(networks)} are given; give {{name: network}} for each, at "
            "least one"
        )
    for given, _ in networks:
        if given is not None and not (isinstance(given, str) and _PLAIN_NAME.fullmatch(given)):
            raise InvalidArgument(
                f"name={given!r} cannot name features; it must consist of letters, digits, '.', '_' and '-' and begin "
                "with a letter or a digit"
            )
    import_torch()
    from sosampler.bank.annotate import FeatureAnnotator, feature_network

    with ExitStack() as stack:
        sources = [(given, stack.enter_context(feature_network(one, device))) for given, one in networks]
        annotators = [
            FeatureAnnotator(source, name=given, precision=precision, batch=batch) for given, source in sources
        ]
        names = [annotator.name for annotator in annotators]
        twice = next((one for one in names if names.count(one) > 1), None)
        if twice is not None:
            raise InvalidArgument(f"two networks would have features called {twice!r}; give each network once")
        return _annotate_bank(opened.folder, annotators, on_progress)


def _opened(bank: Bank | str | os.PathLike[str]) -> Bank:
    """Open a finished bank anew: what was opened earlier may have changed since."""
    import_pyarrow()
    return Bank(bank.path if isinstance(bank, Bank) else bank)


def _annotate_bank(folder: BankFolder, annotators: Sequence[Annotator], on_progress: OnProgress | None) -> Bank:
    """Run networks on the frames of a finished bank that have no outputs of them yet; no video is opened."""

    def missing(items: list[Item]) -> Results:
        raise SosamplerError(
            f"{folder.path}: the frames of {len(items)} videos are missing, {items[0].id!r} is the first; "
            "copy the bank again, or give the manifest to decode them"
        )

    with writing_bank(folder):
        for together in _by_batch(folder, annotators):
            make_shards(folder, read_header(folder), read_items(folder), missing, together, on_progress)
    return Bank(folder.path)


def _by_batch(folder: BankFolder, annotators: Sequence[Annotator]) -> list[list[Annotator]]:
    """Begin with all networks, and return those together that share batches."""
    groups: dict[int, list[Annotator]] = {}
    for annotator in annotators:
        annotator.begin(folder)  # a run that is resumed keeps its batch size
        groups.setdefault(annotator.batch, []).append(annotator)
    return list(groups.values())
