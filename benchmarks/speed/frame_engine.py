"""How much faster the engine scores, chooses and classifies frames than eager code.

    python benchmarks/speed/frame_engine.py --device cpu --threads 2
    python benchmarks/speed/frame_engine.py --device cuda --threads 8 --batch 128 1 --rounds 4 --videos 300 \\
        --variants "eager tf32" engine "engine, sampler fp32" "autocast bf16 channels-last" compile "eager loop"

T = 10 candidates of 340x256 in memory (on a GPU: in its memory), the sampler at 128 px, N = 6 of them to a ResNet-50 at
224 px, resizing and normalising included. Baselines: the method as its authors wrote it in float32 (nearest resize for
the sampler, a Python loop to gather, channels first), with all videos of a batch together (`eager`) or one at a time
(`eager_loop`), on a GPU also with TF32 (`eager_tf32`, torch's default for convolutions); the same code under autocast
in bfloat16 with channels-last memory; and that with both networks under `torch.compile`. All variants take turns, each
in a process of its own. Both devices are kept in one file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sosampler._util.environment import circumstances, compare

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import RESULTS, Results
from benchmarks.speed.in_processes import in_turns_of_processes

REFERENCE, OURS = "eager fp32", "engine"
# Eager variants by name: their options. The key in `baselines` is that of BASELINES.
EAGER: dict[str, dict[str, Any]] = {
    "eager tf32": {"tf32": True},
    REFERENCE: {},
    "eager loop": {"one_at_a_time": True},
    "autocast bf16 channels-last": {"autocast": True, "tf32": True},
    "compile": {"autocast": True, "compiled": True, "tf32": True},
}
BASELINES = {
    "eager tf32": "eager_tf32",
    REFERENCE: "eager",
    "eager loop": "eager_loop",
    "autocast bf16 channels-last": "autocast_bf16_channels_last",
    "compile": "compile",
}
# Arguments of FrameEngine by name.
CPU_ENGINES: dict[str, dict[str, Any]] = {
    OURS: {},
    "engine, openvino": {"backend": "openvino"},
    "engine, onnxruntime": {"backend": "onnxruntime"},
    "engine, int8": {"precision": "int8"},
    "engine, openvino int8": {"precision": "int8", "backend": "openvino"},
}
GPU_ENGINES: dict[str, dict[str, Any]] = {
    OURS: {},
    "engine, sampler fp32": {"sampler_precision": "float32"},
    "engine, eager": {"compiled": "eager"},
    "engine, triton": {"compiled": "triton"},
    "engine, inductor": {"compiled": "inductor"},
}
_LARGE = 32  # videos at a time of which a few runs are long enough to time
_IMPORTS = ("sosampler.engine.frame_engine", "sosampler.samplers.registry", "benchmarks.speed.frames")


def bench_sampler(
    *,
    sampler: str | None = None,
    classifier: str = "resnet50",
    batches: Sequence[int] = (1, 8),
    num_candidates: int = 10,
    num_frames: int = 6,
    size: tuple[int, int] = (256, 340),
    device: str = "cpu",
    threads: int | None = None,
    rounds: int = 5,
    repeats: int | None = None,
    videos: int = 64,
    pictures: str | None = None,
    ways: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure videos a second of every variant and batch size, in turns, each variant in a process of its own.

    Args:
        sampler: folder of a trained one; None takes random weights that tell frames apart.
        classifier: name or folder; without weights they are random.
        batches: videos at a time.
        size: height and width of the decoded frames.
        threads: torch's, of each process; None leaves them as they are.
        repeats: runs of a round, one on the CPU and 20 on a GPU (5 of large batches) if not given.
        videos: on how many the chosen frames are compared with the sampler's own.
        pictures: folder of natural images to compare on; None takes synthetic ones. Random weights turn the smallest
            difference into another choice, so that a comparison in half precision needs a trained sampler as well.
        ways: names of the variants to measure; None takes all.
    """
    on_cpu = device == "cpu"
    engines = CPU_ENGINES if on_cpu else GPU_ENGINES
    known = [*(name for name in EAGER if not on_cpu or name != "eager tf32"), *engines]
    names = [REFERENCE, *(name for name in (ways or known) if name != REFERENCE)]
    result: dict[str, Any] = {
        "benchmark": "frame engine",
        "what": f"T={num_candidates} candidates of {size[1]}x{size[0]} in memory, N={num_frames} to {classifier}",
        **circumstances(("torch", "torchvision", "openvino", "onnxruntime", "triton")),
        "device": device,
        "device_name": _device_name(device),
        "sampler": Path(sampler).name if sampler else "random weights",
        "compared_on": "natural pictures" if pictures else "made-up pictures",
        "rounds": rounds,
        "batches": [],
    }
    for batch in batches:
        say(f"batch {batch}")
        task = {
            "sampler": sampler,
            "classifier": classifier,
            "batch": batch,
            "num_candidates": num_candidates,
            "num_frames": num_frames,
            "size": size,
            "device": device,
            "threads": threads,
            "videos": videos if batch == batches[0] else 0,
            "pictures": pictures,
        }
        builds = {name: (build_way, {**task, "engine": engines.get(name), "eager": EAGER.get(name)}) for name in names}
        runs = repeats or (1 if on_cpu else 20 if batch < _LARGE else 5)
        seconds, facts, failed = in_turns_of_processes(builds, rounds=rounds, repeats=runs, imports=_IMPORTS, say=say)
        result["batches"].append(_row(batch, seconds, facts, failed))
    return result


def _row(batch: int, seconds: dict[str, list[float]], facts: dict[str, Any], failed: dict[str, str]) -> dict[str, Any]:
    ratios = {}
    for name, key in BASELINES.items():
        if name in seconds and OURS in seconds:
            ratios[key] = compare(seconds, way=OURS, reference=name)["times_faster"]
    return {
        "batch": batch,
        "videos_per_second": {name: batch / statistics.median(taken) for name, taken in seconds.items()},
        "baselines": ratios,
        "comparisons": [
            compare(seconds, way=name, reference=REFERENCE)
            for name in seconds
            if name != REFERENCE and REFERENCE in seconds
        ],
        "facts": facts,
        "failed": failed,
    }


def build_way(task: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]]]:
    """Build, in the variant's own process, networks, frames on the device, and the function to time."""
    import torch

    from benchmarks.speed.frames import (
        agreement,
        eager_way,
        lively_sampler,
        picture_frames,
        random_classifier,
        smooth_frames,
    )
    from sosampler.engine.frame_engine import FrameEngine
    from sosampler.engine.quantize import quantize_classifier

    if task["threads"]:
        torch.set_num_threads(task["threads"])
    eager: dict[str, Any] | None = task["eager"]
    torch.backends.cudnn.allow_tf32 = eager is None or eager.get("tf32", False)
    device = torch.device(task["device"])
    if task["sampler"]:
        from sosampler.samplers.registry import load_sampler

        sampler = load_sampler(task["sampler"])
    else:
        sampler = lively_sampler()
    sampler, classifier = sampler.to(device), random_classifier(task["classifier"]).to(device)
    shape, count = task["size"], task["num_candidates"]
    frames = smooth_frames(task["batch"], count, shape).to(device)
    threads = torch.get_num_threads()
    if eager is not None:
        options = {name: value for name, value in eager.items() if name != "tf32"}
        run_eager = eager_way(sampler, classifier, task["num_frames"], **options)
        planes = frames.movedim(-1, -3).contiguous()
        return (lambda: run_eager(planes)), (lambda: {"threads": threads, "tf32": torch.backends.cudnn.allow_tf32})
    with tempfile.TemporaryDirectory() as folder:
        if task["engine"].get("precision") == "int8":  # its speed does not depend on the frames for its ranges
            quantize_classifier(classifier, smooth_frames(2, 16, shape, seed=2), folder)
        engine = FrameEngine(sampler, classifier, num_frames=task["num_frames"], **task["engine"])

    def facts() -> dict[str, Any]:
        values: dict[str, Any] = {"engine": repr(engine), "threads": threads}
        if task["videos"]:
            if task["pictures"]:
                compared = picture_frames(task["pictures"], task["videos"], count, shape, seed=1).to(device)
            else:
                compared = smooth_frames(task["videos"], count, shape, seed=1).to(device)
            same = agreement(engine, sampler, compared, task["num_frames"])
            values |= {"same_frames_chosen": same.videos, "frames_in_common": same.frames}
            values["videos_compared"] = task["videos"]
        return values

    return (lambda: engine.run(frames).probabilities), facts


def table(result: dict[str, Any]) -> str:
    lines = [result["what"] + f", {result['device_name']}"]
    for row in result["batches"]:
        times = {each["way"]: each["times_faster"] for each in row["comparisons"]}
        for name, rate in row["videos_per_second"].items():
            same = row["facts"].get(name, {}).get("same_frames_chosen")
            note = "" if same is None else f"   same frames on {100 * same:.1f} % of videos"
            lines.append(f"batch {row['batch']:<5}{name:<28}{rate:10.2f} videos/s {times.get(name, 1.0):7.2f}x{note}")
        lines += [f"batch {row['batch']:<5}{name:<28}   failed: {why}" for name, why in row["failed"].items()]
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["baselines"].items())
        lines.append(f"batch {row['batch']:<5}times as fast as: {ratios}")
    return "\n".join(lines)


def _device_name(device: str) -> str:
    if device == "cpu":
        return str(circumstances(())["machine"]["cpu"])
    import torch

    return str(torch.cuda.get_device_name(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads of each process")
    parser.add_argument("--batch", type=int, nargs="*", help="videos at a time; 1 8 on the CPU, 1 8 128 on a GPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--videos", type=int, help="to compare chosen frames on; 100 on the CPU, 1000 on a GPU")
    parser.add_argument("--sampler", help="folder of a trained sampler; else random weights that tell frames apart")
    parser.add_argument("--pictures", help="folder of natural images to compare on")
    parser.add_argument("--variants", nargs="*", help="names of the variants to measure; all if not given")
    parser.add_argument("--out", type=Path, default=RESULTS / "frame_engine.json")
    given = parser.parse_args()
    on_cpu = given.device == "cpu"
    result = bench_sampler(
        sampler=given.sampler,
        batches=given.batch or ([1, 8] if on_cpu else [1, 8, 128]),
        device=given.device,
        threads=given.threads,
        rounds=given.rounds,
        videos=given.videos or (100 if on_cpu else 1000),
        pictures=given.pictures,
        ways=given.variants,
        say=print,
    )
    print(table(result))
    Results(given.out).put(**{"cpu" if on_cpu else "gpu": result})


if __name__ == "__main__":
    main()
