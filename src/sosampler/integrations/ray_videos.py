"""Videos on a Ray cluster, rows back here as they come. What Ray should lose all the same is sent once more."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from sosampler.data.processes import ProcessPool
from sosampler.errors import SosamplerError, first_line
from sosampler.integrations.ray_data import RaySettings, Stage, execute, import_ray, pool_sizes
from sosampler.steps import Failed, FramesStep, Row, SelectStep

if TYPE_CHECKING:
    from sosampler.network_step import NetworkStep

# Videos of one execution: bounds what the driver holds. Actors are started anew for each.
_VIDEOS_A_WAVE = 100_000
# Videos of a block, the unit that is sent to a worker and done again when the worker dies.
_MAX_VIDEOS_A_BLOCK = 16

# ---- what runs on the cluster


class _First:
    """An actor of a processor: videos -> rows, or what a network needs of them, packed.

    The work is done in a process of its own, which a hostile file may kill without costing more than itself.
    """

    def __init__(self, step: Callable[[str], Any], last: bool) -> None:
        self._last = last
        # Entered for as long as the actor lives; the process ends when it does.
        self._process = ProcessPool(1, f"{__name__}:packing", (step, last), work="decoding")

    def __call__(self, batch: Any) -> Iterator[Any]:
        for name in batch.column("video").to_pylist():
            # One by one, so that many large videos need not be held together.
            yield _table([name], [self._packed(os.fsdecode(name))])

    def _packed(self, video: str) -> bytes:
        try:
            data: bytes = self._process.submit(video).result()
        except SosamplerError as error:  # the process died
            what = str(error).partition(";")[0]
            return _pack(Failed(video, f"{video}: {what}; the file may be damaged, or memory ran out"), self._last)
        return data


def packing(told: tuple[Callable[[str], Any], bool]) -> Callable[[str], bytes]:
    """What the process of a decoding actor does with each video."""
    step, last = told
    return lambda video: _pack(_guarded(step, video), last)


def _pack(found: Any, last: bool) -> bytes:
    return _row_text(found) if last else pickle.dumps(found, protocol=5)


class _Second:
    """An actor with networks: what the first made of the videos -> rows."""

    def __init__(self, step: NetworkStep) -> None:
        _ = step.looking  # load the networks now, not with the first video
        self._step = step

    def __call__(self, batch: Any) -> Any:
        names = batch.column("video").to_pylist()
        videos = [pickle.loads(data) for data in batch.column("data").to_pylist()]
        try:
            rows = self._step(videos)
        except Exception:  # noqa: BLE001 - one of them is at fault: which, is found out one by one
            rows = [
                _guarded(lambda _, one=video: self._step([one])[0], os.fsdecode(name))  # type: ignore[misc]
                for name, video in zip(names, videos, strict=True)
            ]
        return _table(names, [_row_text(row) for row in rows])


def _guarded(step: Callable[[str], Any], video: str) -> Any:
    """Whatever one video leads to, the others go on."""
    try:
        return step(video)
    except Exception as error:  # noqa: BLE001 - see above
        return Failed(video, f"{video}: cannot be done ({type(error).__name__}: {first_line(error)})")


def _row_text(row: Any) -> bytes:
    return json.dumps(row if isinstance(row, dict) else row.to_dict()).encode()


def _table(names: list[bytes], data: list[bytes]) -> Any:
    import pyarrow as pa

    return pa.table({"video": pa.array(names, pa.binary()), "data": pa.array(data, pa.large_binary())})


# ---- the run


def stream_rows(
    videos: Iterable[str], first: SelectStep | FramesStep, second: NetworkStep | None, settings: RaySettings
) -> Iterator[Row]:
    """A row for each video, as they are done, in no order. Call it connected."""
    coming = iter(videos)
    while left := dict.fromkeys(islice(coming, _VIDEOS_A_WAVE)):
        for again in (False, True):
            if not left:
                break
            for row in _one_pass(list(left), first, second, settings, alone=again):
                if row["video"] in left:
                    del left[row["video"]]
                    yield row
        for video in left:
            yield {
                "video": video,
                "error": f"{video}: was lost by the cluster twice; look into Ray's logs, or try again",
            }


def _one_pass(
    videos: list[str], first: Any, second: NetworkStep | None, settings: RaySettings, *, alone: bool
) -> Iterator[Row]:
    """Rows of the videos but for those that were lost."""
    decode = Stage(_First, (first, second is None))
    network = None if second is None else Stage(_Second, (second,), 1 if alone else settings.batch_size)
    rows = [{"video": os.fsencode(video)} for video in videos]
    # A few blocks an actor, so that all of them have work until the end.
    decoders = pool_sizes(import_ray().cluster_resources(), settings, with_network=second is not None).decoders
    rows_a_block = 1 if alone else min(_MAX_VIDEOS_A_BLOCK, max(1, len(rows) // (4 * decoders)))
    for table in execute(rows, decode, network, settings, rows_a_block=rows_a_block):
        for text in table.column("data").to_pylist():
            yield json.loads(text)
