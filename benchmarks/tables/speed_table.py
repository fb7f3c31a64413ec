"""Write docs/speed.md from the JSON files of the speed benchmarks.

python benchmarks/tables/speed_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.tables.readme_figures import (
    BENCHMARKS,
    ENGINE_BASELINES,
    Files,
    Result,
    numbers,
    range_of,
    read_files,
    values_of,
)

PAGE = BENCHMARKS.parent / "docs" / "speed.md"
ROWS = [
    ("32 keyframe candidates, 1 thread", "keyframe T=32", "torchcodec exact T=32"),
    ("32 exact candidates, 1 thread", "exact T=32", "torchcodec exact T=32"),
    ("10 keyframe candidates, 1 thread, against 6 uniform frames", "keyframe T=10", "torchcodec exact N=6"),
    (
        "the same with 2 threads each",
        "keyframe T=10, 2 threads",
        "torchcodec exact N=6, 2 threads",
    ),
]
LAYOUTS = {"gop250": "every 250 frames", "default": "x264's choice", "gop30": "every 30 frames"}


def table(result: Result) -> str:
    """Return how many times faster than torchcodec decoding is, from the slowest to the fastest of the clips."""
    lines = [f"| keyframes: | {' | '.join(LAYOUTS.values())} |", "|---" * (1 + len(LAYOUTS)) + "|"]
    videos = {layout: [video for video in result["videos"] if video["layout"] == layout] for layout in LAYOUTS}
    for title, way, reference in ROWS:
        cells = []
        for layout in LAYOUTS:
            rows = [row for video in videos[layout] for row in video["comparisons"]]
            ratios = [row["times_faster"] for row in rows if (row["way"], row["reference"]) == (way, reference)]
            cells.append(f"{min(ratios):.1f} to {max(ratios):.1f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    same = [list(numbers(values_of(videos[layout], "torchcodec_same_keyframes"))) for layout in LAYOUTS]
    if all(same):
        cells = [range_of(ratios) for ratios in same]
        clips = len(same[0]) // 2  # each clip with both seek modes of torchcodec
        title = f"32 keyframes, 1 thread, against the same keyframes by torchcodec ({clips} clip{'s' * (clips > 1)})"
        lines.insert(2, f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def decode(result: Result) -> list[str]:
    hour = result["hour"]["rows"][0]
    return [
        "## Decoding",
        f"Most of the time goes into decoding. Times as fast as torchcodec's exact frames, on {_clips(result)} clips, "
        f"each looped to five minutes of 720p H.264 ({_machine(result)}; slowest to fastest clip):",
        table(result),
        "Where keyframe candidates stand against uniform frames, different frames are compared: torchcodec has to "
        "decode more there. Exact frames have the same pixels as torchcodec's and the same timestamps to the last bit.",
        f"Reading {hour['candidates']} exact frames of a one-hour video makes the process grow by "
        f"{hour['grown_mb']:.0f} MB; {hour['frames_mb']:.0f} MB of that are the frames.",
        "`sosampler bench decode your.mp4` measures it on your machine.",
    ]


def choosing(result: Result) -> list[str]:
    """Return how `select` compares with other ways to choose frames, as `sosampler bench select` measured it."""
    rows: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for video in result["videos"]:
        for row in video["comparisons"]:
            rows.setdefault((row["way"], row["reference"]), {}).setdefault(video["layout"], []).append(row)
    lines = [f"| keyframes: | {' | '.join(LAYOUTS.values())} |", "|---" * (1 + len(LAYOUTS)) + "|"]
    for (way, reference), by_layout in rows.items():
        cells = []
        for layout in LAYOUTS:
            ratios = [
                range_of([row[key] for row in by_layout.get(layout, [])]) for key in ("times_faster", "times_less_cpu")
            ]
            cells.append(f"{ratios[0]} ({ratios[1]})")
        lines.append(f"| {way}, against {reference} | {' | '.join(cells)} |")
    return [
        "## Choosing frames",
        f"`select` with its defaults, 8 of 32 candidates by `general`, on {_clips(result)} clips, each looped to five "
        f"minutes of 720p H.264 ({_machine(result)}). Times as fast, slowest to fastest clip; in brackets times less "
        "CPU time. `sosampler select` is the command, from its start on, as the tools of others are.",
        "\n".join(lines),
        "`sosampler bench select your.mp4` measures it on your machine.",
    ]


def file_to_label(result: Result) -> list[str]:
    rows = []
    for video in result["videos"]:
        for row in video["comparisons"]:
            keyframes = LAYOUTS.get(video["layout"], video["layout"])
            ratios = f"{row['times_faster']:.1f} ({range_of(numbers(row['times_faster_by_round']))})"
            rows.append(f"| {video['clip']} | {keyframes} | {row['way']} | {row['reference']} | {ratios} |")
    for name, ratios in result.get("baselines", {}).items():
        by_threads = ratios if isinstance(ratios, dict) else {"": ratios}
        for threads, rounds in by_threads.items():
            baseline = ", ".join(filter(None, (name, threads)))
            rows.append(f"| all clips | all | pipeline | {baseline} | {range_of(numbers(rounds))} |")
    accuracy, hour, memory = result["accuracy"], result["hour"], result["memory"]
    top1 = accuracy["top1_percent"]
    workers = {row["way"]: row["times_faster"] for row in result["workers"]["comparisons"]}
    return [
        "## From a file to its label",
        f"10 keyframe candidates, a sampler, 6 frames and a ResNet-50, {_machine(result)}. Variants and baselines:",
        "\n".join(f"- `{name}`: {words}" for name, words in result["ways"].items()),
        "Times as fast, median (range over rounds):",
        "\n".join(["| clip | keyframes | variant | baseline | times as fast |", "|---|---|---|---|---|", *rows]),
        f"Top-1 on {accuracy['reels']} reels as mp4: {top1['pipeline']:.1f} % with the pipeline, "
        f"{top1['torchcodec']:.1f} % with 6 uniform frames.",
        f"Two decoding processes do {workers['2 decoding']:.1f} times the work of one. After the first "
        f"{memory['settled_after']} of {memory['videos']} small videos memory grows by {memory['grown_mb']:.0f} MB. "
        f"{hour['candidates']} keyframe candidates of an hour of {hour['height']}p take {hour['seconds']:.1f} s and "
        f"{hour['grown_mb']:.0f} MB.",
    ]


def engine(result: Result) -> list[str]:
    rows, notes = [], []
    for measured in result.values():
        device = f"{measured['machine']['cores']} cores" if measured["device"] == "cpu" else measured["device_name"]
        for batch in sorted(measured["batches"], key=lambda row: row["batch"]):
            start = f"| {device} | {batch['batch']}"
            for key, name in ENGINE_BASELINES.items():
                if key in batch.get("baselines", {}):
                    rows.append(f"{start} | engine | {name} | {range_of(numbers(batch['baselines'][key]))} |")
            for row in batch["comparisons"]:
                ratios = f"{row['times_faster']:.1f} ({range_of(numbers(row['times_faster_by_round']))})"
                rows.append(f"{start} | {row['way']} | {row['reference']} | {ratios} |")
            notes += [
                f"- {device}, {name}: the same frames as float32 on {100 * facts['same_frames_chosen']:.0f} % of "
                f"{facts['videos_compared']} videos" + _in_common(facts)
                for name, facts in batch["facts"].items()
                if "same_frames_chosen" in facts
            ]
    remarks = [measured["remark"] for measured in result.values() if "remark" in measured]
    return [
        "## Sampler and classifier on frames in memory",
        "`FrameEngine`: score ten candidates (MobileNetV2 at 128 pixels) and classify six of them (ResNet-50 at 224). "
        "Times as fast, median (range over rounds). `eager fp32` is plain eager code in float32; on a CPU with "
        "bfloat16, autocast with channels-last is a much stronger baseline.",
        "\n".join(
            ["| device | videos at a time | variant | baseline | times as fast |", "|---|---|---|---|---|", *rows]
        ),
        *(f"On the GPU: {remark}." for remark in remarks),
        "Which frames are chosen:",
        "\n".join(notes),
        'On a GPU the sampler runs in float16. `FrameEngine(..., sampler_precision="float32")` keeps it in float32. '
        "What is left then comes mostly from torch's TF32, which `torch.backends.cudnn.allow_tf32 = False` switches "
        "off. int8 has to be requested: `sosampler quantize` makes it from frames of your videos, and `classify "
        "--precision int8` uses it ([int8 on the CPU](classifiers.md#int8-on-the-cpu)).",
    ]


def _in_common(facts: Result) -> str:
    return f", and {100 * facts['frames_in_common']:.1f} % of all frames" if "frames_in_common" in facts else ""


def training(cpu: Result, gpu: Result) -> list[str]:
    rows = []
    for measured in (cpu.get("training", cpu), gpu):
        device = f"{measured['machine']['cores']} cores" if measured["device"] == "cpu" else measured["device"]
        row = measured["comparisons"][0]
        rate = measured["videos_a_second"]["from the bank"]
        teacher = (
            range_of(numbers(values_of(measured, "with_teacher")))
            if "with_teacher" in str(measured)
            else "not measured"
        )
        ratios = f"{row['times_faster']:.1f} ({range_of(numbers(row['times_faster_by_round']))})"
        rows.append(f"| {device} | {ratios} | {teacher} | {rate:,.0f} |")
    return [
        "## Training a sampler",
        "From a bank, in bfloat16 on the GPU, against the classifier run in every step, as in the authors' code "
        "(float32, with TF32 where torch allows it by default). A bank needs the classifier once for every stored "
        "frame; the second ratio includes that time.",
        "\n".join(
            [
                "| device | times as fast, bank ready | times as fast, classifier run included | videos a second |",
                "|---|---|---|---|",
                *rows,
            ]
        ),
    ]


def light(result: Result) -> list[str]:
    clip, cold = result["clip"], result["cold_start_seconds"]
    return [
        "## The install without torch",
        f"It takes {result['install_megabytes']:.0f} MB. A new process needs {cold['sampler']:.2f} s to choose "
        f"{result['num_frames']} frames of a {clip['duration']:.0f}-second clip with the sampler inside the package, "
        f"and {cold['uniform']:.2f} s for uniform frames.",
    ]


def _clips(result: Result) -> int:
    return len({video["clip"] for video in result["videos"]})


def _machine(result: dict[str, Any]) -> str:
    return f"{result['machine']['cores']} cores of {result['machine']['cpu']}"


def page(files: Files) -> str:
    """Return docs/speed.md."""
    paragraphs = [
        "# Speed",
        "All ratios are medians of rounds in which the variants take turns on the same machine. Absolute times of a "
        "shared machine mean little. [Benchmarks](../benchmarks/README.md) lists the files and commands; `python "
        "benchmarks/tables/speed_table.py` writes this page.",
        *decode(files["decode"]),
        *(choosing(files["select"]) if "select" in files else []),
        *file_to_label(files["pipeline"]),
        *engine(files["frame_engine"]),
        *training(files["training"], files["training_gpu"]),
        *light(files["light"]),
    ]
    return "\n\n".join(paragraphs) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(read_files()), encoding="utf-8")
