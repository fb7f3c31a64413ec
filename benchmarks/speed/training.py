"""How long it takes from images to a trained sampler: rendering reels, running a classifier, training.

    python benchmarks/speed/training.py --work /tmp/training --out benchmarks/results/training.json
    python benchmarks/speed/training.py --work /tmp/training --out benchmarks/results/training.json \\
        --videos 2700 --rounds 3  # a GPU

Rendering: processes against the threads of one. Classifier: frames a second of `add_teacher`, decoded by processes
against threads of the one that feeds the device. Training: train.py. Everything in turns, in one run.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sosampler as so
from sosampler._util.environment import circumstances, compare, in_turns
from sosampler._util.hardware import usable_cores
from sosampler.bank import annotate as teaching
from sosampler.reels import make as reel_processes

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import write_result
from benchmarks.speed.train import bench_train, table

STILL = {"pan": 0.0, "zoom": 0.0, "blur": 0.0, "fade": 0.0}
SIZES = {"size": 176, "num_candidates": 10, "num_shots": 10, "seconds_per_shot": 1.0, "fps": 4}
THREADS, PROCESSES = "threads", "processes"


def rendering(arguments: argparse.Namespace) -> dict[str, Any]:
    """Reels a second, by threads and by processes."""
    pictures = arguments.pictures or "procedural"
    out = arguments.work / "rendered"
    usual = reel_processes._FRAMES_PER_PROCESS

    def render(frames_a_process: int) -> None:
        shutil.rmtree(out, ignore_errors=True)
        reel_processes._FRAMES_PER_PROCESS = frames_a_process
        so.make_reels(pictures, out, recipe={**STILL, **SIZES}, counts={"train": arguments.videos})

    seconds = in_turns({THREADS: lambda: render(10**9), PROCESSES: lambda: render(1)}, rounds=arguments.rounds)
    reel_processes._FRAMES_PER_PROCESS = usual
    shutil.rmtree(out)
    return _rates("reels", arguments.videos, seconds)


def asking(arguments: argparse.Namespace) -> dict[str, Any]:
    """Frames a second of `add_teacher`, decoded by threads and by processes."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    bank: Any = so.make_reels(
        arguments.pictures or "procedural",
        arguments.work / "asked",
        recipe={**STILL, **SIZES},
        counts={"train": arguments.videos},
    )
    classifier = so.create_classifier(arguments.classifier, class_names=list(bank.classes), device=device)
    usual: Callable[[str, int, int], int] = teaching.num_frame_decoders

    def ask(number: int) -> None:
        shutil.rmtree(bank.path / "teachers", ignore_errors=True)
        teaching.num_frame_decoders = lambda device, cores, frames: number  # type: ignore[assignment]
        so.add_teacher(bank, classifier)

    processes = max(1, min(16, usable_cores() - 1))
    seconds = in_turns({THREADS: lambda: ask(0), PROCESSES: lambda: ask(processes)}, rounds=arguments.rounds)
    teaching.num_frame_decoders = usual
    summary = _rates("frames", sum(len(item) for item in bank), seconds)
    shutil.rmtree(bank.path)
    used_here = usual(torch.device(device).type, usable_cores(), summary["frames"])
    return {**summary, "device": device, "decoding_processes": processes, "decoding_processes_by_default": used_here}


def _rates(what: str, count: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    rates = {way: count / statistics.median(times) for way, times in seconds.items()}
    ratio = compare(seconds, way=PROCESSES, reference=THREADS)
    print(", ".join(f"{way} {rate:.0f} {what}/s" for way, rate in rates.items()), flush=True)
    return {what: count, "seconds": seconds, f"{what}_a_second": rates, "comparisons": [ratio]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pictures", help="a folder of pictures; drawn ones where it is left out")
    parser.add_argument("--classifier", default="resnet50")
    parser.add_argument("--videos", type=int, default=256)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    result = {
        "what": "from pictures to a trained sampler",
        **circumstances(("torch", "torchvision", "timm", "numpy", "pillow", "pyarrow")),
        "usable_cores": usable_cores(),
        "rendering": rendering(arguments),
        "asking": asking(arguments),
        "training": bench_train(
            work=arguments.work,
            classifier=arguments.classifier,
            videos=arguments.videos,
            batch=arguments.batch,
            steps=arguments.steps,
            rounds=arguments.rounds,
            device=arguments.device,
            say=print,
        ),
    }
    result["seconds_in_all"] = round(time.perf_counter() - begin, 1)
    write_result(arguments.out, result)
    print(table(result["training"]))


if __name__ == "__main__":
    main()
