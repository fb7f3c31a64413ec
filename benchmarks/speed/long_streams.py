"""From a long stream's file to its label: speed and accuracy of a sampler on keyframes and of uniform frames, together.

    python benchmarks/speed/long_streams.py RUNS/long_streams --classifier RUNS/classifier \\
        --sampler RUNS/samplers/default-0 --out benchmarks/results/long_streams.json

The folders are those of benchmarks/accuracy/streams.py. Each test video is labelled by all variants in turn, another
one first each time, so that other load on the machine affects them alike. Uniform frames are read by torchcodec and go
through the same engine as the sampler's. Its exact mode reads the whole file first to find every frame; "approximate"
trusts the header, which is right for these files of a constant frame rate. Every variant has as many decoding threads.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler._util.hardware import resolve_device
from sosampler.bench.decode import read_torchcodec
from sosampler.datasets.manifest import read_manifest
from sosampler.datasets.segments import SEGMENTS_FILE, read_segments
from sosampler.engine.frame_engine import FrameEngine
from sosampler.evaluation.result import Resamples
from sosampler.samplers.registry import load_sampler

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import Results

CHOSEN = ((32, 4), (32, 8), (100, 8))  # keyframe candidates, frames
UNIFORM, APPROXIMATE = (4, 8, 16, 32), (8, 16)  # frames, by the decoder's way to find them
REFERENCE = "uniform 8"  # seconds are given as times those of this variant
BOOTSTRAP = 1000

Label = Callable[[Path], np.ndarray]  # from a file to the probabilities [C] of its classes


def variants(sampler: Any, classifier: Any, threads: int) -> tuple[dict[str, Label], dict[str, float]]:
    """How a file gets its label, by name, and the GMACs of each."""
    labels: dict[str, Label] = {}
    gmacs: dict[str, float] = {}
    engine = FrameEngine(sampler, classifier, num_frames=CHOSEN[0][1])
    for candidates, frames in CHOSEN:
        options: dict[str, Any] = {"num_candidates": candidates, "candidates": "keyframe", "threads": threads}
        pipeline = so.Pipeline(sampler, classifier, num_frames=frames, **options).warm_up()
        name = f"keyframes {candidates}, chosen {frames}"
        labels[name] = partial(_probabilities, pipeline)
        gmacs[name] = sampler.gmacs(candidates) + classifier.gmacs(frames)
    for seek_mode, name, counts in (("exact", "uniform {}", UNIFORM), ("approximate", "uniform {}, {}", APPROXIMATE)):
        for frames in counts:
            labels[name.format(frames, seek_mode)] = partial(_uniform, engine, frames, threads, seek_mode)
            gmacs[name.format(frames, seek_mode)] = classifier.gmacs(frames)
    return labels, gmacs


def _probabilities(pipeline: so.Pipeline, path: Path) -> np.ndarray:
    return np.asarray(pipeline(path).probabilities)


def _uniform(engine: FrameEngine, frames: int, threads: int, seek_mode: Any, path: Path) -> np.ndarray:
    pixels = read_torchcodec(path, frames, threads, seek_mode).data.movedim(-1, -3)  # [N, 3, H, W]
    return np.asarray(engine.classify(pixels[None])[0].float().cpu())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("streams", type=Path)
    parser.add_argument("--classifier", type=Path, required=True)
    parser.add_argument("--sampler", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-videos", type=int, default=None)
    parser.add_argument("--threads", type=int, default=2, help="Of every decoder.")
    parser.add_argument("--device")
    given = parser.parse_args()
    where = resolve_device(given.device)
    sampler = load_sampler(given.sampler).to(where)
    classifier = so.create_classifier(given.classifier).to(where)
    manifest = read_manifest(given.streams / "manifest.csv").split("test")
    items = list(manifest.items)[: given.max_videos]
    labels, gmacs = variants(sampler, classifier, given.threads)
    names = list(labels)
    classes = [list(classifier.class_names).index(manifest.classes[item.labels[0]]) for item in items]
    probabilities = {name: np.zeros((len(items), len(classifier.class_names)), dtype=np.float32) for name in names}
    seconds = {name: np.zeros(len(items)) for name in names}
    for name in names:
        labels[name](manifest.path_of(items[0]))  # a warm-up
    for index, item in enumerate(track(items, "labelling")):
        path = manifest.path_of(item)
        for place in range(len(names)):
            name = names[(index + place) % len(names)]
            begin = time.perf_counter()
            probabilities[name][index] = labels[name](path)
            seconds[name][index] = time.perf_counter() - begin
    targets = np.eye(len(classifier.class_names), dtype=bool)[classes]
    segments = read_segments(given.streams / SEGMENTS_FILE, [item.id for item in items])
    sources = [[segment.source for segment in segments[item.id]] for item in items]
    resamples = Resamples(targets, BOOTSTRAP, 0, sources=sources)
    Results(given.out).put(
        what="from the file of a long stream to its label: a sampler on keyframes, and uniform frames by torchcodec",
        **circumstances(("av", "torchcodec", "torch", "timm", "numpy")),
        device=str(where),
        videos=len(items),
        minutes=minutes(manifest, items),
        threads=given.threads,
        sampler=sampler.fingerprint(),
        answer=so.Pipeline(sampler, classifier, num_frames=1).answer,
        classifier=classifier.fingerprint(),
        rows=[row(name, gmacs, probabilities, seconds, resamples) for name in names],
    )
    for line in Results(given.out)["rows"]:
        print(f"{line['variant']}: {100 * line['top1']:.1f} %, {line['times_as_fast']:.2f} times as fast", flush=True)


def minutes(manifest: Any, items: Sequence[Any]) -> list[float]:
    """The shortest and the longest of them."""
    lengths = [float(so.open_video(manifest.path_of(item)).metadata.duration) / 60 for item in items]
    return [min(lengths), max(lengths)]


def row(
    name: str,
    gmacs: dict[str, float],
    probabilities: dict[str, np.ndarray],
    seconds: dict[str, np.ndarray],
    resamples: Resamples,
) -> dict[str, Any]:
    measured, reference = resamples.top1(probabilities[name]), resamples.top1(probabilities[REFERENCE])
    difference = measured.minus(reference)
    return {
        "variant": name,
        "gmacs": gmacs[name],
        "top1": measured.value,
        "ci95": measured.ci95,
        "above_reference": difference.value,
        "above_reference_ci95": difference.ci95,
        "reference": REFERENCE,
        "times_as_fast": float(seconds[REFERENCE].sum() / seconds[name].sum()),
        "share_of_videos_faster": float((seconds[name] < seconds[REFERENCE]).mean()),
    }


if __name__ == "__main__":
    main()
