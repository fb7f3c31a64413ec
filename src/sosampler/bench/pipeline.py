"""Measure the time from a file to its label: a pipeline with a sampler, against uniform frames."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sosampler._util.environment import circumstances, compare, in_turns
from sosampler._util.hardware import resolve_device
from sosampler.bench import decode
from sosampler.classifiers.factory import create_classifier
from sosampler.datasets.manifest import read_manifest
from sosampler.engine.frame_engine import FrameEngine
from sosampler.errors import InvalidArgument
from sosampler.inference.decode import DecodeStep, FramePool, FrameTask
from sosampler.inference.options import SelectOptions
from sosampler.inference.pipeline import Pipeline
from sosampler.inference.select import select_with
from sosampler.samplers.registry import load_sampler
from sosampler.samplers.sosampler import SOSampler
from sosampler.video.torchcodec_reader import import_decoders

Say = Callable[[str], None]
Label = Callable[[Path], int]  # from a file to the number of a class

NUM_CANDIDATES, NUM_FRAMES = 10, 6
_CANDIDATES: dict[str, Any] = {"num_candidates": NUM_CANDIDATES, "candidates": "keyframe"}
OURS, OURS_THREADS, OURS_PLAIN = "pipeline", "pipeline, 2 threads", "pipeline, networks as they are"
UNIFORM, UNIFORM_THREADS, UNIFORM_FAST = "torchcodec", "torchcodec, 2 threads", "torchcodec, pipeline's classifier"
UNIFORM_FAST_THREADS = "torchcodec, pipeline's classifier, 2 threads"
TRANSFORMERS = "transformers"
VARIANTS = {
    OURS: f"sampler, {NUM_CANDIDATES} keyframe candidates, {NUM_FRAMES} chosen, one decoding thread",
    OURS_THREADS: "the same with two decoding threads",
    OURS_PLAIN: "the same with one, sampler and classifier as they are instead of in the engine",
    UNIFORM: f"{NUM_FRAMES} uniform exact frames by torchcodec, one thread, the classifier as it is",
    UNIFORM_THREADS: "the same with two decoding threads",
    UNIFORM_FAST: "the same with one, the classifier in the engine, as in the pipeline",
    UNIFORM_FAST_THREADS: "the same with two decoding threads",
    TRANSFORMERS: f"transformers' video processor with its defaults, {NUM_FRAMES} frames; the classifier's network",
}
# Pairs that are compared, and the required ratio.
_COMPARED: tuple[tuple[str, str, float | None], ...] = (
    (OURS, UNIFORM, 1.0),
    (OURS_THREADS, UNIFORM_THREADS, 1.0),
    (OURS, UNIFORM_FAST, None),
    (OURS_THREADS, UNIFORM_FAST_THREADS, None),
    (OURS_PLAIN, UNIFORM, None),
    (OURS, TRANSFORMERS, None),
)
_WORKERS_BAR = 1.7  # two decoding processes against one


def bench_pipeline(
    clips: Sequence[Path],
    *,
    sampler: Any = None,
    classifier: Any = None,
    reels: Path | None = None,
    max_reels: int | None = None,
    work: Path = Path(".bench"),
    rounds: int = 3,
    streamed: int = 24,
    device: str | None = None,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Time every clip, looped to five minutes of 720p, in three keyframe layouts; and measure accuracy on reels.

    Args:
        sampler, classifier: themselves or folders; None: MobileNetV2 and ResNet-50 with random weights, equally fast.
        reels: a folder of `make_reels(to="mp4")` whose test videos are classified; None leaves accuracy out.
        work: folder for the videos, which are used again.
        streamed: videos for one and two decoding processes; 0 leaves them out.
    """
    import_decoders()
    if reels is not None and (sampler is None or classifier is None):
        raise InvalidArgument("accuracy on reels needs networks that know them; give sampler and classifier too")
    network_of_sampler, network = _networks(sampler, classifier, device)
    begin = time.perf_counter()
    labels = _labels(network_of_sampler, network)
    ready = time.perf_counter() - begin  # once a process, so it does not count for pipelines over many videos
    result: dict[str, Any] = {
        "benchmark": "pipeline",
        "what": "seconds from a 720p H.264 file of 8750 frames to the label that a classifier gives it",
        **circumstances(("av", "torchcodec", "torch", "transformers", "timm", "numpy")),
        "ways": {name: VARIANTS[name] for name in labels},
        "sampler": repr(network_of_sampler),
        "classifier": network.name,
        "gmacs": {"sampler": network_of_sampler.gmacs(NUM_CANDIDATES), "classifier": network.gmacs(NUM_FRAMES)},
        "weights": "random" if sampler is None or classifier is None else "trained",
        "threads_of_the_networks": torch.get_num_threads(),
        "seconds_to_make_all_ways_ready": ready,
        "rounds": rounds,
        "videos": [],
    }
    made = []
    for video, clip, layout in decode.looped_videos(list(clips), work, say):
        made.append(video)
        say(f"timing {video.name}")
        result["videos"].append({"clip": clip.name, "layout": layout, **_timed(video, labels, rounds)})
    result["baselines"] = _baselines([video["seconds"] for video in result["videos"]])
    if reels is not None:
        say("classifying reels")
        result["accuracy"] = _accuracy(reels, labels, network.class_names, max_reels)
    if streamed:
        say(f"decoding {streamed} videos with one and with two processes")
        result["workers"] = _workers(made, network_of_sampler, network, streamed, rounds)
    return result


def _baselines(seconds: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Return how many times as fast the pipeline is, round by round of each video, with as many decoding threads."""

    def rounds(variant: str, reference: str) -> list[list[float]]:
        pairs = [zip(video[variant], video[reference], strict=True) for video in seconds]
        return [[theirs / ours for ours, theirs in of_video] for of_video in pairs]

    by_threads = {"1 thread": rounds(OURS, UNIFORM_FAST), "2 threads": rounds(OURS_THREADS, UNIFORM_FAST_THREADS)}
    ratios: dict[str, Any] = {"torchcodec_uniform": by_threads}
    if all(TRANSFORMERS in video for video in seconds):
        ratios["transformers"] = rounds(OURS, TRANSFORMERS)
    return ratios


# ---- variants


def _networks(sampler: Any, classifier: Any, device: str | None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    where = resolve_device(device)
    if sampler is None:
        sampler = SOSampler().freeze()
    elif isinstance(sampler, (str, Path)):
        sampler = load_sampler(sampler)
    if classifier is None or isinstance(classifier, (str, Path)):
        classifier = create_classifier("resnet50" if classifier is None else classifier)
    return sampler.to(where), classifier.to(where)


def _labels(sampler: Any, classifier: Any) -> dict[str, Label]:
    """Return all variants whose packages are installed."""
    engine = FrameEngine(sampler, classifier, num_frames=NUM_FRAMES)

    def pipeline(threads: int) -> Label:
        pipe = _pipeline(sampler, classifier, threads=threads).warm_up()
        return lambda path: int(pipe(path).probabilities.argmax())

    size = _pipeline(sampler, classifier).size
    options = SelectOptions(policy=sampler, num_frames=NUM_FRAMES, threads=1, size=size, **_CANDIDATES)

    def plain(path: Path) -> int:
        chosen = select_with(path, options, enlarge=False)
        return int(classifier.clip_probs(chosen.to_torch()[None])[0].argmax())

    def uniform(classify: Callable[[Any], Any], threads: int) -> Label:
        def label(path: Path) -> int:
            frames = decode.read_torchcodec(path, NUM_FRAMES, threads).data.movedim(-1, -3)  # [N, 3, H, W]
            return int(classify(frames[None])[0].argmax())

        return label

    variants = {
        UNIFORM: uniform(classifier.clip_probs, 1),
        UNIFORM_THREADS: uniform(classifier.clip_probs, 2),
        UNIFORM_FAST: uniform(engine.classify, 1),
        UNIFORM_FAST_THREADS: uniform(engine.classify, 2),
        OURS: pipeline(1),
        OURS_THREADS: pipeline(2),
        OURS_PLAIN: plain,
    }
    if importlib.util.find_spec("transformers") is not None:
        variants[TRANSFORMERS] = _by_transformers(classifier)
    return variants


def _pipeline(sampler: Any, classifier: Any, **options: Any) -> Pipeline:
    return Pipeline(sampler, classifier, num_frames=NUM_FRAMES, **_CANDIDATES, **options)


def _by_transformers(classifier: Any) -> Label:
    """Sample, decode, resize and normalise by transformers; then run the network."""
    from transformers import VideoMAEVideoProcessor

    preprocessing, sides = classifier.preprocessing, ("height", "width")
    resize = preprocessing.resize
    processor = VideoMAEVideoProcessor(
        do_sample_frames=True,
        num_frames=NUM_FRAMES,
        size={"shortest_edge": resize} if isinstance(resize, int) else dict(zip(sides, resize, strict=True)),
        crop_size=dict(zip(sides, preprocessing.size, strict=True)),
        image_mean=list(preprocessing.mean),
        image_std=list(preprocessing.std),
    )

    def label(path: Path) -> int:
        clips = processor(str(path), return_tensors="pt")["pixel_values"]  # [1, N, 3, h, w]
        with torch.no_grad():
            return int(classifier.scores(clips.to(classifier.device))[0].argmax())

    return label


def _timed(video: Path, labels: dict[str, Label], rounds: int) -> dict[str, Any]:
    seconds = in_turns({name: partial(label, video) for name, label in labels.items()}, rounds=rounds)
    rows = []
    for name, reference, bar in _COMPARED:
        if name in seconds and reference in seconds:
            row = compare(seconds, way=name, reference=reference)
            rows.append({**row, "bar": bar, "met": None if bar is None else row["times_faster"] > bar})
    return {"seconds": seconds, "comparisons": rows}


# ---- accuracy


def _accuracy(reels: Path, labels: dict[str, Label], classes: Sequence[str], limit: int | None) -> dict[str, Any]:
    """Measure how often each variant is right on the test reels, and how long it takes a reel."""
    manifest = read_manifest(reels / "manifest.csv").split("test")
    items = list(manifest.items)[:limit]
    truth = [list(classes).index(manifest.classes[item.labels[0]]) for item in items]
    paths = [manifest.path_of(item) for item in items]
    top1, seconds, predicted = {}, {}, {}
    for name in (UNIFORM, OURS, OURS_PLAIN, TRANSFORMERS):
        if name not in labels:
            continue
        labels[name](paths[0])  # a warm-up
        begin = time.perf_counter()
        predicted[name] = [labels[name](path) for path in paths]
        seconds[name] = (time.perf_counter() - begin) / len(paths)
        top1[name] = 100 * statistics.mean(a == b for a, b in zip(predicted[name], truth, strict=True))
    agree = statistics.mean(a == b for a, b in zip(predicted[OURS], predicted[OURS_PLAIN], strict=True))
    return {
        "reels": len(items),
        "top1_percent": top1,
        "seconds_a_reel": seconds,
        "share_of_equal_labels_with_networks_as_they_are": agree,
        "more_points_than_uniform": top1[OURS] - top1[UNIFORM],
        "met": top1[OURS] > top1[UNIFORM],
    }


# ---- many videos


def _workers(videos: list[Path], sampler: Any, classifier: Any, count: int, rounds: int) -> dict[str, Any]:
    """Measure videos a second of the decoding processes alone, once they run; and to the label, with their start."""
    paths = list(itertools.islice(itertools.cycle(videos), count))
    seconds: dict[str, list[float]] = {"1 decoding": [], "2 decoding": []}
    for _ in range(rounds):
        for workers, times in enumerate(seconds.values(), start=1):
            times.append(_decode(paths, workers))
    labelling: dict[str, Callable[[], Any]] = {
        f"{workers} labelling": partial(
            _pipeline(sampler, classifier, workers=workers).warm_up(), paths, on_error="raise"
        )
        for workers in (0, 1, 2)
    }
    seconds |= in_turns(labelling, rounds=rounds)
    row = compare(seconds, way="2 decoding", reference="1 decoding")
    return {
        "videos": count,
        "videos_a_second": {name: count / statistics.median(times) for name, times in seconds.items()},
        "seconds": seconds,
        "comparisons": [
            {**row, "bar": _WORKERS_BAR, "met": row["times_faster"] >= _WORKERS_BAR},
            compare(seconds, way="2 labelling", reference="1 labelling"),
            compare(seconds, way="2 labelling", reference="0 labelling"),
        ],
    }


def _decode(paths: Sequence[Path], workers: int) -> float:
    """Return seconds for all candidates of all videos, by processes that are warmed up."""
    step = DecodeStep(SelectOptions(policy="all", threads=1, size=256, **_CANDIDATES), choose=False)

    def tasks(some: Sequence[Path]) -> Iterator[FrameTask]:
        return (FrameTask(path, step) for path in some)

    with FramePool(workers, processes=True, ahead=2 * workers + 2, held=1) as pool:
        for frames in pool.decoded(tasks(paths[: 4 * workers])):
            frames.take()
        begin = time.perf_counter()
        for frames in pool.decoded(tasks(paths)):
            frames.take()
        return time.perf_counter() - begin


# ---- text


def table(result: dict[str, Any]) -> str:
    """Return speed by clip and layout, accuracy, then the rest."""
    lines = decode.ratio_lines(result["videos"])
    accuracy = result.get("accuracy")
    if accuracy is None:
        lines.append("accuracy: not measured; give a trained sampler, its classifier and reels")
    else:
        values = ", ".join(f"{name} {value:.1f} %" for name, value in accuracy["top1_percent"].items())
        lines.append(f"top-1 on {accuracy['reels']} reels as mp4: {values}")
    for row in result.get("workers", {}).get("comparisons", []):
        lines.append(f"{row['way']} against {row['reference']}: {row['times_faster']:.2f} times")
    return "\n".join(lines)
