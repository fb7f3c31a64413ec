"""Sound in a bank: the audio around each stored frame, read from the video files once their frames are stored."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler._util.arrays import Seconds
from sosampler._util.files import differences, write_text
from sosampler._util.progress import OnProgress, Progress
from sosampler._util.workers import ProcessPool, Work, WorkerDied
from sosampler.bank.format import (
    AUDIO,
    VERSION,
    BankFolder,
    BankHeader,
    OutputFolder,
    audio_batch,
    audio_schema,
    failed_ids,
    open_shard,
    read_json,
    read_row,
)
from sosampler.bank.writer import writing_shard
from sosampler.datasets.manifest import Item
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.inference.decode import attempt
from sosampler.video import audio
from sosampler.video.audio import Sound, silence, sound_around
from sosampler.video.limits import Limits

NAME = "log-mel"
_SERVER = "sosampler.bank.audio:audio_reader"


@dataclass(frozen=True)
class AudioTask:
    """The times of one video at which its sound is wanted."""

    path: str
    pts_seconds: Seconds  # [T]
    limits: Limits


def read_sound(task: AudioTask) -> Sound:
    """Return the sound of a video; a track that cannot be decoded is silent, and a note says why."""
    if not os.path.exists(task.path):
        raise InvalidArgument(
            f"{task.path}: no such file, although the bank has frames of it; put it back, and run the same command "
            "again to continue"
        )
    outcome = attempt(task.path, lambda: sound_around(Path(task.path), task.pts_seconds, limits=task.limits))
    return _undecoded(task, str(outcome)) if isinstance(outcome, SosamplerError) else outcome


def _undecoded(task: AudioTask, reason: str) -> Sound:
    # Without the path: a bank does not depend on where its videos lay.
    return silence(len(task.pts_seconds), f"its audio cannot be decoded: {reason.removeprefix(f'{task.path}: ')}")


def audio_reader(_: None) -> Work:
    """Return the function that a child process applies to each task."""
    return read_sound


class AudioReader(ProcessPool):
    """Reads the sound of videos in `workers` processes, so that a broken file can kill only those; 0: in this one."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, _SERVER, work="reading sound")

    def call(self, task: AudioTask, timeout: float | None = None) -> Any:
        try:
            return super().call(task, timeout or task.limits.timeout)
        except WorkerDied as died:
            return _undecoded(task, died.over(task.path))


def add_audio(
    folder: BankFolder,
    header: BankHeader,
    items: Sequence[Item],
    path_of: Callable[[Item], Path],
    *,
    workers: int,
    limits: Limits,
    on_progress: OnProgress | None = None,
) -> None:
    """Write the shards of sound that are missing. Call it locked, when all frames are there."""
    output, schema = folder.output(AUDIO, NAME), audio_schema(audio.BANDS, audio.COLUMNS)
    _begin(output)
    missing = output.missing(header.num_shards)
    before = header.num_items - sum(len(header.shard_range(shard)) for shard in missing)
    progress = Progress(header.num_items, done=before, before=before, stage="sound")

    def advance() -> None:
        progress.done += 1
        if on_progress is not None:
            on_progress(progress)

    def tasks() -> Iterator[AudioTask]:
        for shard in missing:
            readable = _readable(folder, header, items, shard)
            for item, seconds in zip(readable, _times(folder.frames(shard)), strict=True):
                yield AudioTask(os.path.abspath(path_of(item)), seconds, limits)

    with AudioReader(workers) as reader:
        sounds = reader.results(tasks())
        for shard in missing:
            readable = _readable(folder, header, items, shard)
            for _ in range(len(header.shard_range(shard)) - len(readable)):
                advance()
            with writing_shard(output.shard(shard), schema) as write:
                for item in readable:
                    sound = next(sounds)
                    write(audio_batch(schema, item.id, sound.spectra, sound.has_audio, sound.notes))
                    advance()


def _readable(folder: BankFolder, header: BankHeader, items: Sequence[Item], shard: int) -> list[Item]:
    failed = failed_ids(folder.failed(shard))
    return [item for item in header.shard_items(items, shard) if item.id not in failed]


def _times(path: Path) -> Iterator[Seconds]:
    """Yield the times of the stored frames of each video of a shard, [T]."""
    shard = open_shard(path)
    for row in range(shard.num_record_batches):
        yield read_row(shard, row, path).column("pts_seconds").values.to_numpy().copy()


def _begin(output: OutputFolder) -> None:
    """Write the header, or compare it with the one that is there."""
    about = _about()
    if not output.header.exists():
        output.path.mkdir(parents=True, exist_ok=True)
        write_text(output.header, json.dumps(about, indent=1) + "\n")
        return
    saved = read_json(output.header, AUDIO.kind, f"delete its folder and {AUDIO.again}")
    different = differences(saved, about)
    if different:
        raise InvalidArgument(
            f"{output.path}: this sound was prepared with {'; '.join(different)}; delete this folder and {AUDIO.again}"
        )


def _about() -> dict[str, Any]:
    settings = {
        "sample_rate": audio.SAMPLE_RATE,  # Hz
        "seconds": audio.SECONDS,
        "bands": audio.BANDS,
        "columns": audio.COLUMNS,
        "window": audio.WINDOW,  # samples
        "hop": audio.HOP,  # samples
        "low": audio.LOW,  # Hz
        "high": audio.HIGH,  # Hz
        "floor": audio.FLOOR,
    }
    fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    return {"kind": AUDIO.kind, "version": VERSION, "name": NAME, "fingerprint": fingerprint, **settings}
