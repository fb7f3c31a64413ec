"""How much memory a pipeline takes: over very many videos, and for a very long one. In processes of their own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sosampler._util.files import replacing
from sosampler.bench.decode import CHUNK_FRAMES, FPS, encode_chunk, join_packets
from sosampler.errors import InvalidArgument, SosamplerError

if TYPE_CHECKING:
    from sosampler.datasets.manifest import Manifest
    from sosampler.inference.pipeline import Pipeline


Say = Callable[[str], None]

_MANY = """
import json, sys, time
from itertools import islice
from pathlib import Path
import psutil, torch
import sosampler as so
from sosampler.samplers import SOSampler
from sosampler.synthetic import numbered_video
work, count, settled = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
videos = [work / f"small.{number}.mp4" for number in range(3)]
for video, (width, height) in zip(videos, [(96, 64), (64, 64), (64, 96)]):
    numbered_video(video, num_frames=12, width=width, height=height)
classifier = so.create_classifier("timm:test_resnet", num_classes=3, input_size=32)
sampler = SOSampler(backbone="timm:test_resnet", input_size=32).freeze()
pipe = so.Pipeline(sampler, classifier, num_candidates=6, num_frames=3, workers=2)
def used():
    me = psutil.Process()
    return sum(one.memory_info().rss for one in (me, *me.children(recursive=True))) / 2**20
begin = time.perf_counter()
results = pipe.stream((videos[number % 3] for number in range(count)), on_error="raise")
for _ in islice(results, settled): pass
before = most = used()
for number, _ in enumerate(results):
    if number % 250 == 0:
        most = max(most, used())
for video in videos: video.unlink()
print(json.dumps({"videos": count, "settled_after": settled, "mb_then": before, "most_mb_later": most,
                  "grown_mb": most - before, "videos_a_second": count / (time.perf_counter() - begin)}))
"""

_HOUR = """
import json, sys, time
import torch
import sosampler as so
from sosampler._util.environment import peak_memory_mb
from sosampler.samplers import SOSampler
classifier = so.create_classifier("resnet50")
pipe = so.Pipeline(SOSampler().freeze(), classifier, num_candidates=256, num_frames=8, candidates="keyframe")
pipe(sys.argv[2])
before, begin = peak_memory_mb(), time.perf_counter()
chosen = pipe(sys.argv[1]).selection
print(json.dumps({"grown_mb": peak_memory_mb() - before, "seconds": time.perf_counter() - begin,
                  "decoding_seconds": chosen.timing["total"], "candidates": len(chosen.candidates),
                  "distinct": len(set(chosen.candidates.frame_indices.tolist())), "frames": len(chosen),
                  "height": chosen.metadata.height, "duration": chosen.metadata.duration}))
"""


def watch_many(work: Path, count: int) -> dict[str, Any]:
    """Memory of a pipeline and its decoding processes: after 500 small videos, and the most of all that follow."""
    work.mkdir(parents=True, exist_ok=True)
    return _in_own_process(_MANY, str(work), str(count), str(min(500, count // 2)))


def watch_hour(clip: Path, work: Path, say: Say) -> dict[str, Any]:
    """By how much the process grows with 256 keyframe candidates of an hour of 1080p, and how long that takes."""
    video, chunk = work / f"{clip.stem}.hour1080.mp4", work / f"{clip.stem}.hour1080.chunk.mp4"
    if not video.exists():
        say(f"encoding {video.name}")
        encode_chunk(clip, chunk, frames=CHUNK_FRAMES, keyframe_interval=250, width=1920, height=1080)
        with replacing(video) as temporary:
            join_packets([chunk] * (3600 * FPS // CHUNK_FRAMES), temporary)
        chunk.unlink()
    say(f"watching memory over {video.name}")
    return {"bytes": video.stat().st_size, **_in_own_process(_HOUR, str(video), str(clip))}


def _in_own_process(code: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SosamplerError(f"measuring memory in a process of its own failed: {done.stderr.strip()[-300:]}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


pipeline_Say = Callable[[str], None]
Label = Callable[[Path], int]  # from a file to the number of a class

NUM_CANDIDATES, NUM_FRAMES = 10, 6
OURS, OURS_THREADS, OURS_PLAIN = "pipeline", "pipeline, 2 threads", "pipeline, networks as they are"
UNIFORM, UNIFORM_THREADS, UNIFORM_FAST = "torchcodec", "torchcodec, 2 threads", "torchcodec, pipeline's classifier"
TRANSFORMERS, DECORD = "transformers", "decord"
WAYS = {
    OURS: f"sampler, {NUM_CANDIDATES} keyframe candidates, {NUM_FRAMES} chosen, one decoding thread",
    OURS_THREADS: "the same with two decoding threads",
    OURS_PLAIN: "the same with one, sampler and classifier called as they are instead of made ready for speed",
    UNIFORM: f"{NUM_FRAMES} uniform exact frames by torchcodec, one thread, the classifier as it is",
    UNIFORM_THREADS: "the same with two decoding threads",
    UNIFORM_FAST: "the same with one, the classifier made ready for speed as in the pipeline",
    TRANSFORMERS: f"transformers' video processor with its defaults, {NUM_FRAMES} frames; the classifier's network",
    DECORD: f"{NUM_FRAMES} uniform frames by decord, the classifier as it is",
}
# Ratios that are reported, and what is asked for.
_COMPARED: tuple[tuple[str, str, float | None], ...] = (
    (OURS, UNIFORM, 1.0),
    (OURS_THREADS, UNIFORM_THREADS, 1.0),
    (OURS, UNIFORM_FAST, None),
    (OURS_PLAIN, UNIFORM, None),
    (OURS, TRANSFORMERS, None),
    (OURS, DECORD, None),
)
_WORKERS_BAR = 1.7  # two decoding processes against one
_GROWTH_BAR_MB = 16  # 10 000 small videos, after the first 500


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
    many: int = 10_000,
    hour: bool = True,
    device: str | None = None,
    say: pipeline_Say = lambda text: None,
) -> dict[str, Any]:
    """Time every clip, looped to five minutes of 720p, in three keyframe layouts; and be right about reels.

    Args:
        clips: natural videos.
        sampler: a sampler or its folder; None: MobileNetV2 with random weights, as fast as a trained one.
        classifier: a classifier or its folder; None: ResNet-50 with random weights.
        reels: a folder of `make_reels(to="mp4")` whose test videos the two are asked about; None leaves accuracy out.
        max_reels: only so many of them.
        work: folder for the videos, which serve again.
        rounds: how often everything is timed.
        streamed: videos for one and two decoding processes; 0 leaves them out.
        many: small videos for the memory that a pipeline takes; 0 leaves them out.
        hour: whether memory is measured on an hour of 1080p too.
        device: of the networks.
        say: is told what is going on.
    """
    from sosampler._util.environment import circumstances
    from sosampler.bench.decode import _videos
    from sosampler.video.torchcodec_reader import import_decoders

    import_decoders()
    if reels is not None and (sampler is None or classifier is None):
        raise InvalidArgument("accuracy on reels needs networks that know them; give sampler and classifier too")
    chooser, network = _networks(sampler, classifier, device)
    begin = time.perf_counter()
    labels = _labels(chooser, network)
    ready = time.perf_counter() - begin  # once a process; pipelines that answer many videos do not wait for it
    result: dict[str, Any] = {
        "benchmark": "pipeline",
        "what": "seconds from a 720p H.264 file of 8750 frames to the label that a classifier gives it",
        **circumstances(("av", "torchcodec", "torch", "transformers", "decord", "timm", "numpy")),
        "ways": {way: WAYS[way] for way in labels},
        "sampler": repr(chooser),
        "classifier": network.name,
        "gmacs": {"sampler": chooser.gmacs(NUM_CANDIDATES), "classifier": network.gmacs(NUM_FRAMES)},
        "weights": "random" if sampler is None or classifier is None else "trained",
        "threads_of_the_networks": _num_threads(),
        "seconds_to_make_all_ways_ready": ready,
        "rounds": rounds,
        "videos": [],
    }
    made = []
    for video, clip, layout in _videos(list(clips), work, say):
        made.append(video)
        say(f"timing {video.name}")
        result["videos"].append({"clip": clip.name, "layout": layout, **_timed(video, labels, rounds)})
    if reels is not None:
        say("asking about reels")
        result["accuracy"] = _accuracy(reels, labels, network.class_names, max_reels)
    if streamed:
        say(f"decoding {streamed} videos with one and with two processes")
        result["workers"] = _workers(made, chooser, network, streamed, rounds)
    if many:
        say(f"watching memory over {many} small videos")
        result["memory"] = watch_many(work, many)
    if hour:
        result["hour"] = watch_hour(Path(clips[0]), work, say)
    return result


def _num_threads() -> int:
    import torch

    return int(torch.get_num_threads())


# ---- the ways


def _networks(sampler: Any, classifier: Any, device: str | None) -> tuple[Any, Any]:
    import torch

    from sosampler.classifiers.factory import create_classifier
    from sosampler.samplers.registry import load_sampler
    from sosampler.samplers.sosampler import SOSampler

    torch.manual_seed(0)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if sampler is None:
        sampler = SOSampler().freeze()
    elif isinstance(sampler, (str, Path)):
        sampler = load_sampler(sampler)
    if classifier is None or isinstance(classifier, (str, Path)):
        classifier = create_classifier("resnet50" if classifier is None else classifier)
    return sampler.to(where), classifier.to(where)


def _labels(sampler: Any, classifier: Any) -> dict[str, Label]:
    """All ways that can be gone here."""
    from sosampler.bench.decode import read_torchcodec
    from sosampler.engine.frame_engine import FrameEngine
    from sosampler.inference.options import SelectOptions
    from sosampler.inference.select import select_with

    ready = FrameEngine(sampler, classifier, num_frames=NUM_FRAMES)

    def pipeline(threads: int) -> Label:
        pipe = _pipeline(sampler, classifier, threads=threads).warm_up()
        return lambda path: int(pipe(path).probabilities.argmax())

    size = _pipeline(sampler, classifier).size
    options = SelectOptions(policy=sampler, num_frames=NUM_FRAMES, threads=1, **_choosing(size))

    def plain(path: Path) -> int:
        chosen = select_with(path, options, no_larger=True)
        return int(classifier.clip_probs(chosen.to_torch()[None])[0].argmax())

    def uniform(ask: Callable[[Any], Any], threads: int) -> Label:
        def label(path: Path) -> int:
            frames = read_torchcodec(path, NUM_FRAMES, threads).data.movedim(-1, -3)  # [N, 3, H, W]
            return int(ask(frames[None])[0].argmax())

        return label

    ways = {
        UNIFORM: uniform(classifier.clip_probs, 1),
        UNIFORM_THREADS: uniform(classifier.clip_probs, 2),
        UNIFORM_FAST: uniform(ready.classify, 1),
        OURS: pipeline(1),
        OURS_THREADS: pipeline(2),
        OURS_PLAIN: plain,
    }
    if importlib.util.find_spec("transformers") is not None:
        ways[TRANSFORMERS] = _by_transformers(classifier)
    if importlib.util.find_spec("decord") is not None:
        ways[DECORD] = _by_decord(classifier)
    return ways


def _choosing(size: int) -> dict[str, Any]:
    return {"num_candidates": NUM_CANDIDATES, "candidates": "keyframe", "size": size}


def _pipeline(sampler: Any, classifier: Any, **options: Any) -> Pipeline:
    from sosampler.inference.pipeline import Pipeline

    return Pipeline(
        sampler,
        classifier,
        num_candidates=NUM_CANDIDATES,
        num_frames=NUM_FRAMES,
        candidates="keyframe",
        **options,
    )


def _by_transformers(classifier: Any) -> Label:
    """Its own sampling, decoding, resizing and normalising; then the network."""
    import torch
    from transformers import VideoMAEVideoProcessor

    made = classifier.preprocessing
    processor = VideoMAEVideoProcessor(
        do_sample_frames=True,
        num_frames=NUM_FRAMES,
        size={"shortest_edge": made.resize} if isinstance(made.resize, int) else _sides(made.resize),
        crop_size=_sides(made.size),
        image_mean=list(made.mean),
        image_std=list(made.std),
    )

    def label(path: Path) -> int:
        clips = processor(str(path), return_tensors="pt")["pixel_values"]  # [1, N, 3, h, w]
        with torch.no_grad():
            return int(classifier.scores(clips.to(classifier.device))[0].argmax())

    return label


def _sides(size: tuple[int, int]) -> dict[str, int]:
    return {"height": size[0], "width": size[1]}


def _by_decord(classifier: Any) -> Label:
    import torch

    from sosampler.video.candidates import segment_centres

    decord: Any = importlib.import_module("decord")  # not installed with the package

    def label(path: Path) -> int:
        reader = decord.VideoReader(str(path), num_threads=1)
        frames = reader.get_batch(segment_centres(len(reader), NUM_FRAMES).tolist()).asnumpy()
        return int(classifier.clip_probs(torch.from_numpy(frames).movedim(-1, -3)[None])[0].argmax())

    return label


def _timed(video: Path, labels: dict[str, Label], rounds: int) -> dict[str, Any]:
    from sosampler._util.environment import compare, in_turns

    seconds = in_turns({way: partial(label, video) for way, label in labels.items()}, rounds=rounds)
    rows = []
    for way, reference, bar in _COMPARED:
        if way in seconds and reference in seconds:
            row = compare(seconds, way=way, reference=reference)
            rows.append({**row, "bar": bar, "met": None if bar is None else row["times_faster"] > bar})
    return {"seconds": seconds, "comparisons": rows}


# ---- accuracy


def _accuracy(reels: Path, labels: dict[str, Label], classes: Sequence[str], limit: int | None) -> dict[str, Any]:
    """How often each way is right about the test reels, and how long it takes a reel."""
    from sosampler.datasets.manifest import read_manifest

    manifest: Manifest = read_manifest(reels / "manifest.csv").split("test")
    items = list(manifest.items)[:limit]
    truth = [list(classes).index(manifest.classes[item.labels[0]]) for item in items]
    paths = [manifest.path_of(item) for item in items]
    asked = {way: label for way, label in labels.items() if way in (OURS, OURS_PLAIN, UNIFORM, TRANSFORMERS)}
    top1, seconds, said = {}, {}, {}
    for way, label in asked.items():
        label(paths[0])  # what is only once is not counted
        begin = time.perf_counter()
        said[way] = [label(path) for path in paths]
        seconds[way] = (time.perf_counter() - begin) / len(paths)
        top1[way] = 100 * statistics.mean(a == b for a, b in zip(said[way], truth, strict=True))
    agree = statistics.mean(a == b for a, b in zip(said[OURS], said[OURS_PLAIN], strict=True))
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
    """Videos a second of the decoding processes alone, once they run; and from file to label, their start included."""
    from sosampler._util.environment import compare, in_turns

    paths = [videos[number % len(videos)] for number in range(count)]
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
        "videos_a_second": {way: count / statistics.median(times) for way, times in seconds.items()},
        "seconds": seconds,
        "comparisons": [
            {**row, "bar": _WORKERS_BAR, "met": row["times_faster"] >= _WORKERS_BAR},
            compare(seconds, way="2 labelling", reference="1 labelling"),
            compare(seconds, way="2 labelling", reference="0 labelling"),
        ],
    }


def _decode(paths: Sequence[Path], workers: int) -> float:
    """Seconds for all candidates of all videos, by processes that have been at work before."""
    from sosampler.inference.decode import FramePool, FrameTask
    from sosampler.inference.options import SelectOptions

    options = SelectOptions(policy="all", threads=1, **_choosing(256))

    def tasks(some: Sequence[Path]) -> Iterator[FrameTask]:
        return (FrameTask(path, options, choose=False) for path in some)

    with FramePool(workers, processes=True, ahead=2 * workers + 2, held=1) as pool:
        for one in pool.decoded(tasks(paths[: 4 * workers])):
            one.take()
        begin = time.perf_counter()
        for one in pool.decoded(tasks(paths)):
            one.take()
        return time.perf_counter() - begin


# ---- for reading


def table(result: dict[str, Any]) -> str:
    """Speed by clip and layout, accuracy beside it, then the rest."""
    lines = [f"{'clip':<34}{'keyframes':<11}{'way':<32}{'reference':<35}{'times faster':>12}  bar"]
    for video in result["videos"]:
        for row in video["comparisons"]:
            lines.append(
                f"{video['clip']:<34}{video['layout']:<11}{row['way']:<32}{row['reference']:<35}"
                f"{row['times_faster']:>12.2f}  {_bar(row)}"
            )
    accuracy = result.get("accuracy")
    if accuracy is None:
        lines.append("accuracy: not measured; give a trained sampler, its classifier and reels")
    else:
        told = ", ".join(f"{way} {value:.1f} %" for way, value in accuracy["top1_percent"].items())
        word = "met" if accuracy["met"] else "MISSED"
        lines.append(f"top-1 on {accuracy['reels']} reels as mp4: {told}; higher than uniform: {word}")
    for row in result.get("workers", {}).get("comparisons", []):
        lines.append(f"{row['way']} against {row['reference']}: {row['times_faster']:.2f} times  {_bar(row)}")
    if memory := result.get("memory"):
        word = "met" if memory["grown_mb"] < _GROWTH_BAR_MB else "MISSED"
        lines.append(
            f"{memory['videos']} small videos: {memory['grown_mb']:.1f} MB more than after {memory['settled_after']}; "
            f"below {_GROWTH_BAR_MB} MB: {word}"
        )
    if hour := result.get("hour"):
        lines.append(
            f"an hour of {hour['height']}p, {hour['candidates']} keyframe candidates: memory grew by "
            f"{hour['grown_mb']:.0f} MB, {hour['seconds']:.1f} s"
        )
    return "\n".join(lines)


def _bar(row: dict[str, Any]) -> str:
    return "" if row.get("bar") is None else f"{row['bar']:g} {'met' if row['met'] else 'MISSED'}"


# ---- the command


def add_to(app: typer.Typer) -> None:
    """Register `sosampler bench pipeline`."""
    app.command("pipeline")(pipeline_command)


def pipeline_command(
    clips: Annotated[list[Path], typer.Argument(help="Natural videos; each is looped to five minutes of 720p.")],
    sampler: Annotated[Path | None, typer.Option("--sampler", "-s", help="Folder of a trained sampler.")] = None,
    classifier: Annotated[
        Path | None, typer.Option("--classifier", "-c", help="Folder of its classifier.  [default: a random ResNet-50]")
    ] = None,
    reels: Annotated[
        Path | None, typer.Option("--reels", help="Folder of `sosampler reels --to mp4`, to be right about.")
    ] = None,
    work: Annotated[Path, typer.Option("--work", help="Folder for the videos; they are used again.")] = Path(".bench"),
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often everything is timed.")] = 3,
    streamed: Annotated[int, typer.Option("--streamed", min=0, help="Videos for one and two decoders.")] = 24,
    many: Annotated[int, typer.Option("--many", min=0, help="Small videos to watch memory over.")] = 10_000,
    hour: Annotated[bool, typer.Option("--hour/--no-hour", help="Also measure memory on an hour of 1080p.")] = True,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, ...")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result as JSON.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """From file to label: keyframe candidates and a sampler, against uniform frames with the same classifier."""
    from sosampler.cli.bench import check_files, give

    check_files(clips)
    result = bench_pipeline(
        clips,
        sampler=sampler,
        classifier=classifier,
        reels=reels,
        work=work,
        rounds=rounds,
        streamed=streamed,
        many=many,
        hour=hour,
        device=device,
        say=lambda text: typer.echo(text, err=True),
    )
    give(result, table(result), out, json_output)
