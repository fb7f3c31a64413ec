"""Videos on a Ray cluster, rows back here as they come. What Ray should lose all the same is sent once more."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sosampler._util.progress import OnProgress, Progress
from sosampler._util.workers import ProcessPool
from sosampler.errors import InvalidArgument, SosamplerError, first_line
from sosampler.inference.options import SelectOptions
from sosampler.inference.rows import PREDICTION_COLUMNS, SELECTION_COLUMNS, Column, writing_parts
from sosampler.inference.steps import Failed, FramesStep, Row, SelectStep, for_workers, stand_in, wherever
from sosampler.integrations.ray.cluster import (
    RaySettings,
    Stage,
    check_address,
    connected,
    execute,
    import_ray,
    placed,
    pool_sizes,
)
from sosampler.policies.registry import Policy, list_policies

if TYPE_CHECKING:
    from sosampler.inference.network_step import NetworkStep
    from sosampler.inference.pipeline import Pipeline


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


# Short side in which candidates are handed to a sampler where nothing says otherwise.
_LEAST_SIZE = 256

Videos = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class RowsWritten:
    """What a run came to."""

    out: Path
    num_videos: int  # that were asked for
    num_before: int  # that an earlier run had done
    num_rows: int  # in the folder now
    failures: list[Row] = field(default_factory=list)  # video and error
    damaged: list[int] = field(default_factory=list)  # numbers of files that were found damaged and done again


def select_on_ray(
    videos: Videos,
    out: str | os.PathLike[str],
    options: SelectOptions,
    *,
    settings: RaySettings | None = None,
    device: str | None = None,
    on_progress: OnProgress | None = None,
) -> RowsWritten:
    """Choose frames of all videos; a row for each, without pixels.

    Args:
        videos: paths that all machines of the cluster know.
        out: a folder; holds Parquet files afterwards.
        options: as of `select`. A sampler is named by its folder; it sees frames with a short side of `size`, 256 if
            not given, or what it takes where that is more.
        settings: where and how wide.
        device: of a sampler: "cpu" or "cuda"; None takes GPUs if the cluster has any.
        on_progress: called after each video.
    """
    options = replace(options, threads=options.threads or 1)
    rule = options.rule
    about: dict[str, Any] = {"what": "selections", "options": options.identity()}
    if not _is_of_a_folder(rule, options.policy):
        if device is not None:
            raise InvalidArgument(f"device={device!r} is for trained samplers, not for the policy {rule.name!r}")
        step = SelectStep(replace(options, policy=_by_name(options)))
        return _write(videos, out, about, SELECTION_COLUMNS, step, None, settings, on_progress)
    if not isinstance(options.policy, (str, os.PathLike)):
        raise InvalidArgument("a sampler that is an object cannot be sent to a cluster; save it and give its folder")
    from sosampler.inference.network_step import NetworkStep

    asked = options.size if isinstance(options.size, int) else _LEAST_SIZE
    offered = replace(options, policy=stand_in(rule), size=max(asked, rule.least_size or 0))
    about["options"]["size"] = offered.size
    second = NetworkStep(offered, sampler=os.path.abspath(options.policy), device=device)
    first = FramesStep(offered, choose=False, least_size=rule.least_size or 1)
    return _write(videos, out, about, SELECTION_COLUMNS, first, second, settings, on_progress)


def classify_on_ray(
    videos: Videos,
    out: str | os.PathLike[str],
    pipeline: Pipeline,
    *,
    sampler: str | os.PathLike[str],
    classifier: str | os.PathLike[str],
    classifier_settings: dict[str, Any] | None = None,
    precision: str | None = None,
    settings: RaySettings | None = None,
    device: str | None = None,
    on_progress: OnProgress | None = None,
) -> RowsWritten:
    """Name what all videos show; a row for each.

    Args:
        videos, out, settings, device, on_progress: as in `select_on_ray`.
        pipeline: does the same on this machine; says how frames are chosen and how many classes are told.
        sampler: the folder or the name from which the pipeline has its policy.
        classifier: the folder or the name from which it has its classifier.
        classifier_settings: what else `create_classifier` was given: weights, input_size, ...
        precision: as the pipeline was given it.
    """
    from sosampler.inference.network_step import NetworkStep

    options = replace(pipeline.options, threads=pipeline.options.threads or 1)
    rule = pipeline.policy
    learned = _is_of_a_folder(rule, sampler)
    offered = replace(options, policy=stand_in(rule) if learned else os.fspath(sampler))
    about = {"what": "predictions", "options": {**options.identity(), **_of_classifier(pipeline, precision)}}
    second = NetworkStep(
        offered,
        sampler=os.path.abspath(sampler) if learned else None,
        classifier=wherever(classifier),
        settings=for_workers(classifier_settings or {}),
        precision=precision,
        device=device,
        top=pipeline.top,
    )
    first = FramesStep(offered, choose=not learned, least_size=rule.least_size or 1)
    return _write(videos, out, about, PREDICTION_COLUMNS, first, second, settings, on_progress)


def _is_of_a_folder(rule: Policy, given: Any) -> bool:
    """Whether a policy is a trained sampler; others, also the one that ships, choose where frames are decoded."""
    return rule.identity is not None and not (isinstance(given, str) and given in list_policies())


def _by_name(options: SelectOptions) -> Any:
    return options.policy if isinstance(options.policy, str) else options.rule.name


def _of_classifier(pipeline: Pipeline, precision: str | None) -> dict[str, Any]:
    from sosampler.classifiers.factory import classifier_identity

    who = classifier_identity(pipeline.classifier, precision)
    return {"classifier": who, "precision": precision, "top": pipeline.top}


def _write(
    videos: Videos,
    out: str | os.PathLike[str],
    about: dict[str, Any],
    columns: dict[str, Column],
    first: SelectStep | FramesStep,
    second: NetworkStep | None,
    settings: RaySettings | None,
    on_progress: OnProgress | None,
) -> RowsWritten:
    settings, folder = settings or RaySettings(), Path(out)
    names = list(dict.fromkeys(os.path.abspath(video) for video in videos))
    failures: list[Row] = []
    check_address(settings.address)  # before anything is written
    with writing_parts(folder, about, columns) as parts:
        todo = [name for name in names if not parts.done(name)]
        before = len(names) - len(todo)
        progress = Progress(len(names), done=before, before=before)
        if todo:
            with connected(settings.address) as ray:
                if second is not None:
                    where, settings = placed(second.device, settings, ray.cluster_resources())
                    second = replace(second, device=where)
                for row in stream_rows(todo, first, second, settings):
                    if "error" in row:
                        failures.append(row)
                        progress.failed += 1
                    else:
                        parts.add(row)
                    progress.done += 1
                    if on_progress is not None:
                        on_progress(progress)
        parts.flush()
        parts.write_failures(failures)
        return RowsWritten(folder, len(names), before, parts.num_rows, failures, parts.damaged)
