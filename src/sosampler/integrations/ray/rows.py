"""Select and classify on a Ray cluster: rows come back as they are done, and what Ray loses is sent once more."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sosampler._util.files import import_parquet
from sosampler._util.workers import ProcessPool, WorkerDied
from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.inference.decode import Decoded, DecodeStep, Outcome, Unfit, attempt
from sosampler.inference.many import RunSummary, row_of, run
from sosampler.inference.options import SelectOptions
from sosampler.inference.rows import Row
from sosampler.inference.select import view_size
from sosampler.integrations.ray.cluster import RaySettings, Stage, absolute, check_address, connected, execute, placed
from sosampler.policies.base import Policy
from sosampler.policies.query import QueryPolicy
from sosampler.policies.registry import get_policy, is_policy_name
from sosampler.video.discover import distinct
from sosampler.video.limits import Limits
from sosampler.video.remote import is_address
from sosampler.video.source import source_name

if TYPE_CHECKING:
    from sosampler.inference.pipeline import BatchClassifier, Pipeline

# Videos of one execution: bounds what the driver holds. Actors are started anew for each.
_VIDEOS_A_WAVE = 100_000
# Videos of a block, the unit that is sent to a worker and done again when the worker dies.
_MAX_VIDEOS_A_BLOCK = 16

Videos = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class NetworkStep:
    """Decoded videos -> rows, by networks that are loaded where this is called."""

    policy: str  # its name in the rows: as the user wrote it, wherever its folder lies on a worker
    sampler: Any  # a folder, or what else `get_policy` takes
    options: dict[str, Any]  # of `select`, or of `Pipeline` where there is a classifier
    with_classifier: bool = False
    device: str | None = None  # None: the GPU if the worker has one

    @cached_property
    def batch_classifier(self) -> BatchClassifier:
        from sosampler.inference.pipeline import BatchClassifier, Pipeline

        if self.with_classifier:
            return Pipeline(self.sampler, device=self.device, **self.options).batch_classifier
        policy = get_policy(self.sampler, device=self.device)
        return BatchClassifier(SelectOptions(policy=policy, **self.options), None)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "batch_classifier"}

    def __call__(self, videos: Sequence[tuple[str, Outcome]]) -> list[Row]:
        """Return one row a video, in their order."""
        rows = []
        results = self.batch_classifier([Decoded(outcome) for _, outcome in videos])
        for (video, _), result in zip(videos, results, strict=True):
            rows.append(row_of(video, result))
            if not isinstance(result, SosamplerError):
                rows[-1].get("selection", rows[-1])["policy"] = self.policy
        return rows


# ---- what runs on the cluster


class _DecodeActor:
    """Decodes videos, in a process of its own: a damaged file that kills it costs one video."""

    def __init__(self, step: Callable[[str], Any], last: bool) -> None:
        from ray import cloudpickle

        self._last = last
        self._timeout = (getattr(getattr(step, "options", None), "limits", None) or Limits()).timeout
        # By value, so that a policy of the user's script works in the process too.
        pickled = cloudpickle.dumps(step)  # type: ignore[no-untyped-call]
        # Entered for as long as the actor lives; the process ends with it.
        self._process = ProcessPool(1, f"{__name__}:serve", (pickled, last), work="decoding")

    def __call__(self, batch: Any) -> Iterator[Any]:
        for name in batch.column("video").to_pylist():
            # One by one, so that several large videos are never in memory together.
            video = os.fsdecode(name)
            try:
                data = self._process.submit(video, self._timeout).result()
            except SosamplerError as error:
                failure = VideoError(error.over(source_name(video))) if isinstance(error, WorkerDied) else error
                data = _pack(video, failure, self._last)
            yield _table([name], [data])


def serve(pickled_and_last: tuple[bytes, bool]) -> Callable[[str], bytes]:
    """Return the function of a decoding process: a video -> its packed outcome."""
    pickled, last = pickled_and_last
    step = pickle.loads(pickled)
    return lambda video: _pack(video, attempt(source_name(video), lambda: step(video)), last)


def _pack(video: str, outcome: Any, last: bool) -> bytes:
    if isinstance(outcome, Unfit):
        why = "its candidates are too large or too small for the sampler; give another size"
        outcome = VideoError(f"{source_name(video)}: {why}")
    return json.dumps(row_of(video, outcome)).encode() if last else pickle.dumps(outcome, protocol=5)


class _NetworkActor:
    """Runs the networks on videos that were decoded."""

    def __init__(self, step: NetworkStep) -> None:
        _ = step.batch_classifier  # load the networks now, not with the first video
        self._step = step

    def __call__(self, batch: Any) -> Any:
        names, data = batch.column("video").to_pylist(), batch.column("data").to_pylist()
        videos = [(os.fsdecode(name), pickle.loads(packed)) for name, packed in zip(names, data, strict=True)]
        try:
            rows = self._step(videos)
        except Exception:  # noqa: BLE001 - one by one, so that the others of this batch get their rows
            rows = [self._alone(*video) for video in videos]
        return _table(names, [json.dumps(row).encode() for row in rows])

    def _alone(self, video: str, outcome: Outcome) -> Row:
        try:
            row = attempt(source_name(video), lambda: self._step([(video, outcome)])[0])
        except SosamplerError as error:
            row = error
        return row_of(video, row) if isinstance(row, SosamplerError) else row


def _table(names: list[bytes], data: list[bytes]) -> Any:
    pa, _ = import_parquet()
    return pa.table({"video": pa.array(names, pa.binary()), "data": pa.array(data, pa.large_binary())})


# ---- the run


def stream_rows(
    videos: Iterable[str], step: Callable[[str], Any], network: NetworkStep | None, settings: RaySettings
) -> Iterator[Row]:
    """Yield a row for each video, as they are done, in no order. Call it connected."""
    coming, decode = iter(videos), Stage(_DecodeActor, (step, network is None))
    while left := {source_name(video): video for video in islice(coming, _VIDEOS_A_WAVE)}:
        for again in (False, True):  # what was lost goes one by one
            if not left:
                break
            block, batch = (1, 1) if again else (_MAX_VIDEOS_A_BLOCK, settings.batch_size)
            classify = None if network is None else Stage(_NetworkActor, (network,), batch)
            rows = [{"video": os.fsencode(video)} for video in left.values()]
            for table in execute(rows, decode, classify, settings, max_block=block):
                for row in map(json.loads, table.column("data").to_pylist()):
                    if row["video"] in left:
                        del left[row["video"]]
                        yield row
        for video in left:
            yield {"video": video, "error": f"{video}: was lost by the cluster twice; see Ray's logs, or try again"}


def select_on_ray(
    videos: Videos,
    out: str | os.PathLike[str],
    options: SelectOptions,
    *,
    settings: RaySettings | None = None,
    device: str | None = None,
    overwrite: bool = False,
    **callbacks: Any,
) -> RunSummary:
    """Choose frames of all videos; write a row for each, without pixels.

    Args:
        videos: paths that all machines of the cluster can read, or addresses whose schemes are in `options`.
        out: a folder for Parquet files, or a file (.parquet, .jsonl, .csv).
        options: as for `select`.
        device: of a sampler: "cpu" or "cuda"; None takes GPUs if the cluster has any.
        overwrite: replace what `out` holds of something else.
        callbacks: `on_progress` and `on_result`, as `sosampler.inference.many.run` takes them.
    """
    options = replace(options, threads=options.threads or 1)
    policy, network = options.resolved_policy, None
    identity = options.identity()
    if isinstance(policy, QueryPolicy):
        # Workers that decode load the model once each, from the same folder.
        step = DecodeStep(replace(options, query_model=str(policy.relevance.model.folder)))
    elif not _has_network(policy, options.policy):
        if device is not None:
            raise InvalidArgument(f"device={device!r} is for trained samplers, not for the policy {policy.name!r}")
        step = DecodeStep(replace(options, policy=policy.spec or options.policy))
    else:
        options = replace(options, size=view_size(policy))  # what it sees in `select`; rows have no pixels
        values = {each.name: getattr(options, each.name) for each in fields(options) if each.name != "policy"}
        network = NetworkStep(policy.name, _sent(options.policy), values, device=device)
        step = DecodeStep.of_candidates(options)
    return _run(videos, out, "selections", identity, step, network, settings, overwrite, callbacks)


def classify_on_ray(
    videos: Videos,
    out: str | os.PathLike[str],
    pipeline: Pipeline,
    *,
    settings: RaySettings | None = None,
    device: str | None = None,
    overwrite: bool = False,
    **callbacks: Any,
) -> RunSummary:
    """Classify all videos as `pipeline` does; write a row for each. Other arguments: see `select_on_ray`."""
    options, policy = replace(pipeline.options, threads=pipeline.options.threads or 1), pipeline.policy
    arguments = dict(pipeline.arguments)
    sampler = arguments.pop("sampler")
    if _has_network(policy, sampler):
        sampler = _sent(sampler)
        step = DecodeStep.of_candidates(options)
    else:
        sampler = policy.spec or sampler
        step = DecodeStep(replace(options, policy=sampler))
    arguments["classifier"] = absolute(arguments["classifier"])
    classifier_options = arguments["classifier_options"] or {}
    weights = absolute(classifier_options.get("weights"))
    arguments["classifier_options"] = {**classifier_options, **({"weights": weights} if weights is not None else {})}
    network = NetworkStep(policy.name, sampler, arguments, with_classifier=True, device=device)
    identity = {**pipeline.identity(), "precision": arguments["precision"]}
    return _run(videos, out, "predictions", identity, step, network, settings, overwrite, callbacks)


def _has_network(policy: Policy, given: Any) -> bool:
    """Return whether it is a trained sampler. Other policies, also "general", run where frames are decoded."""
    return policy.has_weights and not (isinstance(given, str) and is_policy_name(given))


def _sent(sampler: Any) -> Any:
    """Return a sampler as it is sent to workers: a folder, perhaps with a method behind it, by its absolute path."""
    return os.path.abspath(sampler) if isinstance(sampler, (str, os.PathLike)) else sampler


def _run(
    videos: Videos,
    out: str | os.PathLike[str],
    what: str,
    identity: dict[str, Any],
    step: DecodeStep,
    network: NetworkStep | None,
    settings: RaySettings | None,
    overwrite: bool,
    callbacks: dict[str, Any],
) -> RunSummary:
    wide = settings or RaySettings()
    check_address(wide.address)  # before anything is written

    def work(todo: list[str]) -> Generator[Row, None, None]:
        if not todo:
            return
        with connected(wide.address) as ray:
            if network is None:
                yield from stream_rows(todo, step, None, wide)
                return
            device, sized = placed(network.device, wide, ray.cluster_resources())
            yield from stream_rows(todo, step, replace(network, device=device), sized)

    each_once = distinct(str(video) if is_address(video) else Path(os.path.abspath(video)) for video in videos)
    names = [str(video) for video in each_once]
    return run(names, work, what, out=Path(out), identity=identity, overwrite=overwrite, **callbacks)
