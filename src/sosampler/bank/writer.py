"""Writing a bank: one writer at a time, shards that are missing, and the header once all are there.

Every file gets its name when it is complete, so a run that was killed resumes with the shards that are missing.
"""

from __future__ import annotations

import json
import operator
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sosampler._util.files import FULL, checksum_path, checksum_text, differences, replacing, write_text
from sosampler._util.locks import locked
from sosampler._util.progress import OnProgress, Progress
from sosampler.bank.format import (
    COUNTS,
    PREPARE_AGAIN,
    BankFolder,
    BankHeader,
    Failure,
    Shown,
    StoredVideo,
    failed_ids,
    frames_batch,
    frames_schema,
    import_pyarrow,
    items_text,
    open_shard,
    read_failures,
    read_header,
    read_row,
    read_shard,
    read_shown,
    shown_text,
)
from sosampler.datasets.manifest import Item
from sosampler.errors import InvalidArgument, SosamplerError

if TYPE_CHECKING:
    from sosampler.bank.annotate import Annotator

Results = Iterator[StoredVideo | Failure]
"""Of the items that were given, in their order."""

# What a killed run may leave; see `sosampler._util.files.replacing` for the names.
_LEFTOVER = re.compile(
    r"\.(bank|items|failed|shown|videos_root|teacher|features|audio|\d+(\.failed|\.retry)?)\.\d+\.part\.(json|jsonl|txt|arrow|sha256)"
    r"|\d+\.(retry|retried)\.arrow"
)


@contextmanager
def writing_bank(folder: BankFolder) -> Iterator[None]:
    """Hold a bank for writing, and explain a full disk."""
    _check_foreign_files(folder)
    with locked(folder.lock, "this bank"):
        for leftover in _leftovers(folder):
            leftover.unlink(missing_ok=True)
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise SosamplerError(
                f"{folder.path}: cannot be written any further ({os.strerror(error.errno or 0)}), "
                f"{shutil.disk_usage(folder.path).free / 1e6:.1f} MB are free. What is finished stays valid: free disk "
                "space and run the same command again, or prepare fewer, smaller frames in another folder"
            ) from error


def _check_foreign_files(folder: BankFolder) -> None:
    """Refuse a folder that holds files of something else, before anything is written there."""
    if not folder.path.exists():
        return
    if not folder.path.is_dir():
        raise InvalidArgument(f"{folder.path}: is a file; give a folder for the bank")
    if folder.bank_json.exists():
        read_header(folder)  # raises where it is not a bank's
        return
    # A bank that was killed at its very beginning has a lock, and perhaps an empty folder for frames.
    expected: set[Path] = set()
    if folder.lock.exists():
        expected = {folder.items_jsonl, folder.frames_folder, folder.lock, *_leftovers(folder)}
    foreign = sorted(entry.name for entry in folder.path.iterdir() if entry not in expected)
    if expected and folder.frames_folder.is_dir() and any(folder.frames_folder.iterdir()):
        foreign.append(folder.frames_folder.name)
    if foreign:
        raise InvalidArgument(
            f"{folder.path}: holds other files ({', '.join(foreign[:3])}); give a new folder, or one with a bank"
        )


def _leftovers(folder: BankFolder) -> Iterator[Path]:
    outputs = [path for kind in ("teachers", "features", "audio") for path in folder.path.glob(f"{kind}/*")]
    for parent in filter(Path.is_dir, (folder.path, folder.frames_folder, *outputs)):
        yield from [entry for entry in parent.iterdir() if _LEFTOVER.fullmatch(entry.name)]


def begin(folder: BankFolder, header: BankHeader, items: Sequence[Item]) -> BankHeader:
    """Write the header, or return that of the bank that is there if it is the same one. Call it locked."""
    if folder.bank_json.exists():
        saved = read_header(folder)
        _check_same(folder, saved, header, items)
        return saved
    folder.frames_folder.mkdir(exist_ok=True)
    try:
        write_text(folder.items_jsonl, items_text(items))
        header.write(folder)  # last: where it is, the rest is
    except BaseException:
        folder.items_jsonl.unlink(missing_ok=True)  # without a header it would be a foreign file
        folder.frames_folder.rmdir()
        raise
    return header


def _check_same(folder: BankFolder, saved: BankHeader, given: BankHeader, items: Sequence[Item]) -> None:
    different = differences(saved.settings, given.settings)
    with open(folder.items_jsonl, encoding="utf-8", newline="\n") as lines:
        same_items = saved.num_items == len(items) and all(map(operator.eq, lines, items_text(items)))
    if saved.source != given.source:
        problem = f"made from {saved.source}, not {given.source}"
    elif different:
        problem = f"prepared with {'; '.join(different)}"
    elif saved.classes != given.classes or saved.multi_label != given.multi_label:
        problem = f"of {describe_classes(saved.classes)}, now {describe_classes(given.classes)}"
    elif saved.exclusive != given.exclusive:
        kinds = {True: "exclude each other", False: "are independent"}
        problem = f"whose classes {kinds[saved.exclusive]}, now they {kinds[given.exclusive]}"
    elif saved.videos_per_shard != given.videos_per_shard:
        problem = f"with {saved.videos_per_shard} videos per shard, now {given.videos_per_shard}"
    elif not same_items:
        problem = f"of another manifest ({saved.num_items} videos, now {len(items)})"
    else:
        return
    raise InvalidArgument(
        f"{folder.path}: holds a bank {problem}; give the same again to resume it, or another folder for a new one"
    )


def describe_classes(names: Sequence[str]) -> str:
    """
    >>> describe_classes(["a", "b", "c", "d"])
    '4 classes (a, b, c, ...)'
    """
    return f"{len(names)} classes ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def check_root(folder: BankFolder, root: Path, items: Sequence[Item]) -> None:
    """Refuse to resume with videos of another folder under the same names. Call it locked, after `begin`."""
    if all(os.path.isabs(item.path) for item in items):
        return
    given = os.path.abspath(root)
    if not folder.videos_root.exists():
        write_text(folder.videos_root, given + "\n")
        return
    saved = folder.videos_root.read_text(encoding="utf-8").rstrip("\n")
    if saved != given and os.path.realpath(saved) != os.path.realpath(given):
        raise InvalidArgument(
            f"{folder.path}: holds frames of the videos in {saved}, now {given}; give that folder (root), or another "
            f"one for a new bank; if the same videos were only moved, delete {folder.videos_root}"
        )


def _finish(folder: BankFolder, header: BankHeader) -> None:
    """Count what the shards hold, now that all are there, and mark the bank as complete."""
    counts = dict.fromkeys(COUNTS, 0)
    for shard in range(header.num_shards):
        path = folder.frames(shard)
        reader = open_shard(path)
        stored, failed = reader.num_record_batches, len(read_failures(folder.failed(shard)))
        expected = len(header.shard_range(shard))
        if stored + failed != expected:
            raise SosamplerError(
                f"{path}: holds {stored} videos and {failed} are listed as failed, of {expected}; "
                f"delete it and {PREPARE_AGAIN}"
            )
        counts["videos"] += stored
        counts["failed"] += failed
        for row in range(stored):
            counts["frames"] += len(read_row(reader, row, path).column("frame_indices").values)
    complete = replace(header, complete=True, counts=counts)
    _join_failures(folder, complete)
    if header != complete:
        complete.write(folder)


def _join_failures(folder: BankFolder, header: BankHeader) -> None:
    """Write failed.jsonl of a complete bank, also where it got lost."""
    lines = [
        json.dumps(failure, ensure_ascii=False) + "\n"
        for shard in range(header.num_shards)
        for failure in read_failures(folder.failed(shard))
    ]
    if folder.failed_jsonl.exists() and folder.failed_jsonl.read_bytes() == "".join(lines).encode():
        return
    counted = (header.counts or {}).get("failed")
    if len(lines) != counted:
        raise SosamplerError(
            f"{folder.path}: {len(lines)} failed videos are listed, {folder.bank_json.name} counts {counted}; "
            "`sosampler bank verify` reports which shard must be deleted"
        )
    write_text(folder.failed_jsonl, lines)


def write_shown(folder: BankFolder, shown: dict[str, Shown]) -> None:
    """Write what is known about the contents of the videos of a finished bank, also of one that was written without.

    Call it locked. A bank about which nothing is known has no such file.
    """
    known = {name: each for name, each in shown.items() if each != Shown()}
    saved = read_shown(folder)
    if any(saved[name] != known[name] for name in saved.keys() & known.keys()):
        raise InvalidArgument(
            f"{folder.path}: its shown.jsonl knows other shows_class or sources of these videos; give the same again, "
            "or another folder for a new bank"
        )
    if known.keys() - saved.keys():  # also videos that could not be read before
        write_text(folder.shown_jsonl, shown_text(known | saved))


# ---- shards


def make_shards(
    folder: BankFolder,
    header: BankHeader,
    items: Sequence[Item],
    produce: Callable[[list[Item]], Results],
    annotators: Sequence[Annotator] = (),
    on_progress: OnProgress | None = None,
) -> None:
    """Write the shards that are missing, frames and outputs side by side, and finish the bank. Call it locked.

    `produce` returns the frames of these items, in their order. A shard is annotated while it is being written, or from
    the disk where it was written before; the bytes are the same.
    """
    annotation = None
    if annotators:
        from sosampler.bank.annotate import Annotation  # needs torch

        annotation = Annotation(folder, header, annotators)
    to_fill = [shard for shard in range(header.num_shards) if not folder.frames(shard).exists()]
    to_annotate = annotation.missing if annotation is not None else set()
    done = header.num_items - sum(len(header.shard_range(shard)) for shard in {*to_fill, *to_annotate})
    progress = Progress(header.num_items, done=done, before=done)

    def advance(*, failed: bool = False) -> None:
        progress.done += 1
        progress.failed += failed
        if on_progress is not None:
            on_progress(progress)

    def stored_rows(shard: int) -> Iterator[tuple[str, StoredVideo]]:
        for _ in read_failures(folder.failed(shard)):
            advance(failed=True)
        yield from read_shard(folder.frames(shard))

    new_items = [item for shard in to_fill for item in header.shard_items(items, shard)]
    results: Results = produce(new_items) if to_fill else iter(())
    with annotation if to_annotate and annotation else nullcontext():
        if annotation is not None:
            stored = sorted(to_annotate.difference(to_fill))
            annotation.annotate(((shard, stored_rows(shard)) for shard in stored), advance)
        for shard in to_fill:
            shard_items = header.shard_items(items, shard)
            with closing(fill_shard(folder, shard, shard_items, results, lambda: advance(failed=True))) as rows:
                if annotation is not None and shard in to_annotate:
                    annotation.annotate([(shard, rows)], advance)
                for _ in rows:  # exhausted, the shard gets its name; rows are left only where nothing is annotated
                    advance()
    if to_fill or not header.complete:
        _finish(folder, header)
    else:
        _join_failures(folder, header)


@contextmanager
def writing_shard(path: Path, schema: Any, *, checksum: bool = True) -> Iterator[Callable[[Any], None]]:
    """Yield a function that appends a record batch; the file gets its name when the block ends without an error."""
    pa = import_pyarrow()
    with replacing(path) as temporary:
        with open(temporary, "wb") as file:
            with pa.ipc.new_file(file, schema) as writer:
                yield writer.write_batch
            file.flush()
            os.fsync(file.fileno())  # a name must not outlive its contents when the power fails
        if checksum:  # before the shard itself, whose name means that all is there
            write_text(checksum_path(path), checksum_text(temporary, path.name))


def fill_shard(
    folder: BankFolder, shard: int, items: Sequence[Item], results: Results, on_failure: Callable[[], None]
) -> Generator[tuple[str, StoredVideo]]:
    """Write the next results as a shard and yield id and frames of each; exhaust it to give the shard its name."""
    failures: list[tuple[Item, Failure]] = []
    with writing_shard(folder.frames(shard), frames_schema()) as write:
        for item in items:
            result = next(results)
            if isinstance(result, Failure):
                failures.append((item, result))
                on_failure()
            else:
                write(frames_batch(item, result))
                yield item.id, result
        # Before the shard itself, whose name means that all is there.
        _write_failures(folder.failed(shard), failures)


def _write_failures(path: Path, failures: Sequence[tuple[Item, Failure]]) -> None:
    rows = [{"id": item.id, "path": item.path, "error": failure.reason} for item, failure in failures]
    if rows:
        write_text(path, [json.dumps(row, ensure_ascii=False) + "\n" for row in rows])
    else:
        path.unlink(missing_ok=True)


def retry_failures(
    folder: BankFolder, header: BankHeader, items: Sequence[Item], produce: Callable[[list[Item]], Results]
) -> BankHeader:
    """Try the videos again that failed, and return the header as it is then. Call it locked.

    A shard is replaced only where one of its videos can be read now. The other videos are copied from the old shard.
    """
    shards = [shard for shard in range(header.num_shards) if folder.frames(shard).exists()]
    to_retry = {shard: ids for shard in shards if (ids := failed_ids(folder.failed(shard)))}
    if not to_retry:
        return header
    shard_items = {shard: header.shard_items(items, shard) for shard in to_retry}
    results = produce([item for shard, ids in to_retry.items() for item in shard_items[shard] if item.id in ids])
    for shard, ids in to_retry.items():
        path, draft = folder.frames(shard), folder.frames(shard).with_suffix(".retry.arrow")
        stored = read_shard(path)
        failures: list[tuple[Item, Failure]] = []
        with writing_shard(draft, frames_schema(), checksum=False) as write:
            for item in shard_items[shard]:
                result = next(results) if item.id in ids else _stored(stored, item, path)
                if isinstance(result, Failure):
                    failures.append((item, result))
                else:
                    write(frames_batch(item, result))
        if len(failures) == len(ids):
            draft.unlink()
            _write_failures(folder.failed(shard), failures)  # the same videos, with the reasons of today
            continue
        if header.complete:
            header = replace(header, complete=False, counts=None)
            header.write(folder)
        folder.failed_jsonl.unlink(missing_ok=True)
        # Rows shift, so the outputs of this shard go too. The old shard goes before the list of failures changes: where
        # this is killed in between, the shard is missing and its videos are decoded again.
        for output in folder.outputs():
            output.shard(shard).unlink(missing_ok=True)
            checksum_path(output.shard(shard)).unlink(missing_ok=True)
        path.unlink()
        _write_failures(folder.failed(shard), failures)
        write_text(checksum_path(path), checksum_text(draft, path.name))
        os.replace(draft, path)
    return header


def _stored(stored: Iterator[tuple[str, StoredVideo]], item: Item, path: Path) -> StoredVideo:
    video_id, video = next(stored, ("", None))
    if video is None or video_id != item.id:
        raise SosamplerError(
            f"{path}: holds {'nothing more' if video is None else repr(video_id)} where {item.id!r} is expected; "
            f"delete it and {PREPARE_AGAIN}"
        )
    return video
