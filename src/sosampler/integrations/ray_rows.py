"""`select` and `classify` for as many videos as there are, on a Ray cluster, into a folder of Parquet files.

Called again with the same arguments it does what is missing: videos without a row, also those that failed. Rows are
written by the process that calls; workers need to see the videos and the folders of networks under the same paths.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sosampler.data.shards import OnProgress, Progress
from sosampler.errors import InvalidArgument
from sosampler.integrations.columns import PREDICTION_COLUMNS, SELECTION_COLUMNS, Column
from sosampler.integrations.parts import writing_parts
from sosampler.integrations.ray_data import RaySettings, check_address, connected, placed
from sosampler.integrations.ray_videos import stream_rows
from sosampler.options import SelectOptions
from sosampler.policies import Policy, list_policies
from sosampler.steps import FramesStep, Row, SelectStep, for_workers, stand_in, wherever

if TYPE_CHECKING:
    from sosampler.network_step import NetworkStep
    from sosampler.pipeline import Pipeline

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
    from sosampler.network_step import NetworkStep

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
    from sosampler.network_step import NetworkStep

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
    from sosampler.classifiers.identity import classifier_identity

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
