"""`sosampler bench sampler`: score, choose and classify frames in memory, against the usual eager code."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sosampler._util.environment import circumstances, compare
from sosampler.bench.in_processes import in_turns_of_processes

REFERENCE = "eager fp32"
TF32 = "eager tf32"  # the same with torch's default, which rounds what convolutions on a GPU multiply to 10 bits
# Ways by name: arguments of FrameEngine, None for the usual code.
CPU_WAYS: dict[str, dict[str, Any] | None] = {
    REFERENCE: None,
    "engine": {},
    "engine, openvino": {"backend": "openvino"},
    "engine, onnxruntime": {"backend": "onnxruntime"},
    "engine, int8": {"precision": "int8"},
    "engine, openvino int8": {"precision": "int8", "backend": "openvino"},
}
GPU_WAYS: dict[str, dict[str, Any] | None] = {
    REFERENCE: None,
    TF32: None,
    "engine": {},
    "engine, sampler fp32": {"sampler_precision": "float32"},
    "engine, eager": {"compiled": "eager"},
    "engine, triton": {"compiled": "triton"},
    "engine, inductor": {"compiled": "inductor"},
}

_LARGE = 32  # videos at a time of which a few runs are long enough to time
_IMPORTS = ("sosampler.engine.frame_engine", "sosampler.samplers.registry", "sosampler.bench.frames")


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
    """Videos a second of every way and batch size, in turns, each way in a process of its own.

    Args:
        sampler: folder of a trained one; None takes random weights that tell frames apart.
        classifier: name or folder; without weights they are random.
        batches: videos at a time.
        size: height and width of the decoded frames.
        threads: torch's, of each process; None leaves them as they are.
        repeats: runs of a round, one on the CPU and 20 on a GPU (5 of large batches) if not given.
        videos: on how many the chosen frames are compared with the sampler's own.
        pictures: folder of natural pictures to compare on; None takes made-up ones. Random weights turn the least
            difference into another choice, so that a comparison in half precision needs a trained sampler as well.
        ways: names of those to measure; None takes all.
    """
    known = CPU_WAYS if device == "cpu" else GPU_WAYS
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
        builds = {name: (build_way, {**task, "engine": known[name], "tf32": name != REFERENCE}) for name in names}
        runs = repeats or (1 if device == "cpu" else 20 if batch < _LARGE else 5)
        seconds, facts, failed = in_turns_of_processes(builds, rounds=rounds, repeats=runs, imports=_IMPORTS, say=say)
        result["batches"].append(_row(batch, seconds, facts, failed))
    return result


def _row(batch: int, seconds: dict[str, list[float]], facts: dict[str, Any], failed: dict[str, str]) -> dict[str, Any]:
    return {
        "batch": batch,
        "videos_per_second": {name: batch / statistics.median(taken) for name, taken in seconds.items()},
        "comparisons": [
            compare(seconds, way=name, reference=REFERENCE)
            for name in seconds
            if name != REFERENCE and REFERENCE in seconds
        ],
        "facts": facts,
        "failed": failed,
    }


def build_way(task: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]]]:
    """In the way's own process: networks, frames on the device, and what one run does."""
    import torch

    from sosampler.bench.frames import (
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
    torch.backends.cudnn.allow_tf32 = task["tf32"]
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
    if task["engine"] is None:
        run_eager = eager_way(sampler, classifier, task["num_frames"])
        planes = frames.movedim(-1, -3).contiguous()
        return (lambda: run_eager(planes)), (lambda: {"threads": threads})
    with tempfile.TemporaryDirectory() as folder:
        if task["engine"].get("precision") == "int8":  # how fast it is does not hang on the frames for its ranges
            quantize_classifier(classifier, smooth_frames(2, 16, shape, seed=2), folder)
        engine = FrameEngine(sampler, classifier, num_frames=task["num_frames"], **task["engine"])

    def facts() -> dict[str, Any]:
        found: dict[str, Any] = {"engine": repr(engine), "threads": threads}
        if task["videos"]:
            if task["pictures"]:
                watched = picture_frames(task["pictures"], task["videos"], count, shape, seed=1).to(device)
            else:
                watched = smooth_frames(task["videos"], count, shape, seed=1).to(device)
            same = agreement(engine, sampler, watched, task["num_frames"])
            found |= {"same_frames_chosen": same.videos, "frames_in_common": same.frames}
            found["videos_compared"] = task["videos"]
        return found

    return (lambda: engine.run(frames).probabilities), facts


def table(result: dict[str, Any]) -> str:
    lines = [result["what"] + f", {result['device_name']}"]
    for row in result["batches"]:
        times = {each["way"]: each["times_faster"] for each in row["comparisons"]}
        for name, rate in row["videos_per_second"].items():
            same = row["facts"].get(name, {}).get("same_frames_chosen")
            told = "" if same is None else f"   same frames on {100 * same:.1f} % of videos"
            lines.append(f"batch {row['batch']:<5}{name:<22}{rate:10.2f} videos/s {times.get(name, 1.0):7.2f}x{told}")
        lines += [f"batch {row['batch']:<5}{name:<22}   failed: {why}" for name, why in row["failed"].items()]
    return "\n".join(lines)


def _device_name(device: str) -> str:
    if device == "cpu":
        return str(circumstances(())["machine"]["cpu"])
    import torch

    return str(torch.cuda.get_device_name(device))


def add_to(app: typer.Typer) -> None:
    """Register `sampler` with the commands of `sosampler bench`."""

    @app.command("sampler")
    def sampler_command(
        sampler: Annotated[str | None, typer.Option("--sampler", "-s", help="Folder; else random weights.")] = None,
        classifier: Annotated[str, typer.Option("--classifier", "-c", help="Its weights are random.")] = "resnet50",
        batch: Annotated[list[int] | None, typer.Option("--batch", "-b", min=1, help="Videos at a time.")] = None,
        device: Annotated[str, typer.Option("--device", help="cpu, or cuda.")] = "cpu",
        threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads of torch.")] = None,
        rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often everything is timed.")] = 5,
        videos: Annotated[int, typer.Option("--videos", min=1, help="To compare chosen frames on.")] = 64,
        pictures: Annotated[str | None, typer.Option("--pictures", help="Folder of pictures for it.")] = None,
        out: Annotated[Path | None, typer.Option("--out", help="Write the result as JSON.")] = None,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Score, choose and classify frames in memory: the engine against the usual eager float32 code."""
        from sosampler._util.devices import check_device
        from sosampler.cli.bench import _give

        check_device(device)
        batches = batch or ([1, 8] if device == "cpu" else [1, 128])
        result = bench_sampler(
            sampler=sampler,
            classifier=classifier,
            batches=batches,
            device=device,
            threads=threads,
            rounds=rounds,
            videos=videos,
            pictures=pictures,
            say=lambda text: typer.echo(text, err=True),
        )
        _give(result, table(result), out, json_output)
