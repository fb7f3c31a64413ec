"""Write the table of docs/scale.md: what ten million videos take, by the rates in the files beside this one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
BEGIN, END = "<!-- by benchmarks/tables/scale_table.py -->\n", "<!-- end -->\n"
VIDEOS = 10_000_000
MACHINES, CORES, GPUS = 10, 64, 8  # of each machine
MISSING = "not measured yet"


@dataclass(frozen=True)
class Step:
    """A step for each video, and the file that holds its rate."""

    what: str
    file: str
    seconds: Callable[[dict[str, Any]], list[float]]  # of one core or one GPU for one video; several: from, to
    unit: str = "core"


def _decoding(variant: str) -> Callable[[dict[str, Any]], list[float]]:
    """Return the median over clips for the fastest and the slowest keyframe layout."""

    def seconds(result: dict[str, Any]) -> list[float]:
        layouts: dict[str, list[float]] = {}
        for video in result["videos"]:
            layouts.setdefault(video["layout"], []).append(median(video["seconds"][variant]))
        medians = sorted(median(times) for times in layouts.values())
        return [medians[0], medians[-1]]

    return seconds


def _engine(device: str, batch: int) -> Callable[[dict[str, Any]], list[float]]:
    """Return the time of the engine at this batch size; a KeyError where the file has none."""

    def seconds(result: dict[str, Any]) -> list[float]:
        rows = {row["batch"]: row for row in result[device]["batches"]}
        row = rows[batch]
        cores = 1 if device == "gpu" else row["facts"]["engine"]["threads"]
        return [cores / row["videos_per_second"]["engine"]]

    return seconds


STEPS = (
    Step("decode 10 keyframe candidates, full size", "decode.json", _decoding("keyframe T=10")),
    Step("decode 32 exact candidates, full size", "decode.json", _decoding("exact T=32")),
    Step(
        "decode 10 keyframe candidates, short side 256",
        "pipeline.json",
        lambda result: [1 / result["workers"]["videos_a_second"]["1 decoding"]],
    ),
    Step(
        "file to label without a GPU: 10 keyframe candidates, sampler, 6 frames, ResNet-50",
        "pipeline.json",
        lambda result: [2 / result["workers"]["videos_a_second"]["2 labelling"]],  # two cores
    ),
    Step("sampler on 10 candidates and ResNet-50 on 6, batch 128", "frame_engine.json", _engine("gpu", 128), "GPU"),
    Step("the same without a GPU, batch 8", "frame_engine.json", _engine("cpu", 8)),
    Step(
        "prepare, of clips shorter than a minute: 64 exact frames in 256, ResNet-50 on each, without a GPU",
        "prepare.json",
        lambda result: [2 / result["videos_a_second"]["prepare, 2 workers"]],  # two cores
    ),
)


def _read(name: str) -> dict[str, Any] | None:
    path = HERE / name
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def seconds_of(step: Step) -> list[float] | None:
    result = _read(step.file)
    try:
        return None if result is None else step.seconds(result)
    except KeyError:  # that part was not run
        return None


def row(step: Step, seconds: list[float] | None) -> str:
    """Return one line: measured, for all videos, and on the machines of the page."""
    if seconds is None:
        return f"| {step.what} | {MISSING} | `{step.file}` | | |"
    hours = [each * VIDEOS / 3600 for each in seconds]
    width = MACHINES * (CORES if step.unit == "core" else GPUS)
    return (
        f"| {step.what} | {_range(seconds)} s of a {step.unit} | `{step.file}` | {_range(hours)} {step.unit}-hours | "
        f"{_range([each / width for each in hours])} h |"
    )


def _range(values: list[float]) -> str:
    texts = list(dict.fromkeys(_short(value) for value in values))
    return " to ".join(texts)


def _short(value: float) -> str:
    """
    >>> _short(0.01234), _short(3.456), _short(12345.6)
    ('0.012', '3.5', '12 000')
    """
    if value >= 100:
        digits = len(str(round(value))) - 2
        return f"{round(value, -digits):,.0f}".replace(",", " ")
    return f"{value:.2g}"


def table() -> str:
    title = f"| for each video | measured | in | {VIDEOS // 1_000_000} million videos | {MACHINES} machines |"
    lines = [title, "|---" * 5 + "|", *(row(step, seconds_of(step)) for step in STEPS)]
    return "\n".join(lines) + "\n\n" + _ray() + "\n"


def _ray() -> str:
    result = _read("ray_scale.json")
    if result is None:
        return f"What Ray itself costs (`ray_scale.json`): {MISSING}."
    rates = result["videos_a_second"]
    return (
        f"What Ray itself costs (`ray_scale.json`): on one machine of {result['machine']['cores']} cores the cluster "
        f"did {rates['ray']:.1f} videos a second where the local engine did {rates['local']:.1f}, "
        f"{100 * rates['ray'] / rates['local']:.0f} %."
    )


def page(text: str) -> str:
    """Return the page with a new table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(table())
