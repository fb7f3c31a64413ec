"""Write the figures of README.md from the JSON files of the benchmarks.

    python benchmarks/tables/readme_figures.py

Every measured number of README.md stands between the marks below, and a test compares what stands there with the
files. A row of the speed table is left out where its file lacks the baseline that a fair comparison needs; README.md of
this folder lists the keys.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sosampler.bench.select import SCENEDETECT, THUMBNAIL, THUMBNAIL_KEYS, VIDEO_SAMPLER
from sosampler.samplers.registry import OWN_RECIPE, TITLES

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.tables import streams_table
from benchmarks.tables.systems_table import ANSWER, FIRST_RECIPE, FUSED, MEAN, NAMES, cost, of_first_recipe

BENCHMARKS = next(folder for folder in Path(__file__).parents if folder.name == "benchmarks")
README = BENCHMARKS.parent / "README.md"
BEGIN, END = "<!-- figures: {} -->\n", "<!-- end of figures -->\n"

Result = dict[str, Any]
Files = Mapping[str, Result]  # by the name of the file without ".json"

ROWS = {
    "uniform": "uniform frames",
    "paper": TITLES["paper"],
    "authors": TITLES["authors"],
    MEAN: NAMES[MEAN],
    FUSED: NAMES[FUSED],
    "sosampler": f"**{TITLES['default']}**",
    "semi-optimal": "oracle that knows the label (π_s)",
}
OTHER_RECIPES = ("paper", "authors")
ON_STREAMS = {"sosampler": streams_table.OWN, MEAN: f"{streams_table.OWN}+mean", FUSED: f"{streams_table.OWN}+fused"}
FRAMES, ALL = (1, 2, 3, 6), 10
LEARNED = {
    "paper": TITLES["paper"],
    "authors": TITLES["authors"],
    "sosampler": TITLES["default"],
    "ocsampler": "OCSampler",
    "scsampler": "SCSampler",
    "frameexit": "FrameExit",
    "liteeval": "LiteEval",
    "adaframe": "AdaFrame",
    "marl": "MARL",
    "ar-net": "AR-Net",
    "videoiq": "VideoIQ",
    "adafocus": "AdaFocus",
    "adafuse": "AdaFuse",
    "ada3d": "Ada3D",
    "listen-to-look": "Listen to Look",
}
# Baselines of the engine in the order of the table; ratios of other names are not shown
ENGINE_BASELINES = {
    "eager_tf32": "eager with TF32",
    "autocast_bf16_channels_last": "autocast bf16, channels-last",
    "compile": "`torch.compile`",
    "eager": "eager float32",
    "eager_loop": "eager float32, one video after the other",
}


# ---- what it brings


def headline(files: Files) -> str:
    at = _cells(files["reels"])
    return (
        f"{streams_table.headline(files['streams'])} On videos composed of sports images, which are easier, "
        f"{FRAMES[1]} of {ALL} chosen frames give {_percent(at['sosampler', FRAMES[1]]['top1'])} %, {FRAMES[1]} "
        f"uniform ones {_percent(at['uniform', FRAMES[1]]['top1'])} %, all {ALL} "
        f"{_percent(at['all', ALL]['top1'])} %.\n"
    )


def brings(files: Files) -> str:
    """Return the accuracy of SOSampler's recipes beside uniform frames and the oracle, and what stands beside it."""
    result, earlier = files["reels"], files["systems_reels"]
    at, before, streams = _cells(result), _cells(earlier), files["streams"]
    heads = [f"{kind}: {count}" for kind in ("streams", "reels") for count in (*FRAMES, f"all {ALL}")]
    lines = [
        *_streams(files),
        f"Reels: {result['videos']['test']} test videos of ten shots that are unseen images, of "
        f"{result['num_classes']} sports or of something else. Classifier: ResNet-50. "
        f"{' and '.join(ROWS[name] for name in OTHER_RECIPES)} are of an earlier run with another training of the "
        f"classifier, in which {FRAMES[1]} uniform frames had {_percent(before['uniform', FRAMES[1]]['top1'])} %, with "
        f"the best of {earlier['trials_each']} trials each. Both classifiers had {_epochs(files)}. Top-1 in %, mean of "
        f"{len(result['seeds'])} seeds:",
        "",
        f"| frames for the classifier | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for policy, name in ROWS.items():
        of_streams = files["streams_recipes"] if policy in OTHER_RECIPES else streams
        values = [*streams_table.cells_of(of_streams, ON_STREAMS.get(policy, policy), (*FRAMES, ALL))]
        values += [_percent((before if policy in OTHER_RECIPES else at)[policy, count]["top1"]) for count in FRAMES]
        values.append(_percent(at["all", ALL]["top1"]) if policy == "uniform" else "")
        if name.startswith("**"):
            values = [f"**{value}**" if value else "" for value in values]
        lines.append(f"| {name} | {' | '.join(values)} |")
    two, first, everything = at["sosampler", FRAMES[1]], at["first", FRAMES[1]], at["all", ALL]
    lines += [
        "",
        " ".join(
            [
                f"{OWN_RECIPE}. On reels {FRAMES[1]} chosen frames cost {two['gmacs']:.1f} GMACs, sampler included, "
                f"all {ALL} frames {everything['gmacs']:.1f}.",
                *_own_answer(result),
            ]
        ),
        f"{of_first_recipe(_beside_learned_methods(earlier))} They have the other classifier; with that of the table "
        f"{FIRST_RECIPE}, which is what `default` was before it was [chosen anew]"
        f"(docs/results/streams.md#one-recipe-for-both-kinds), has {_percent(first['top1'])} % with {FRAMES[1]} "
        f"frames, {_seeds(first['seeds'])}. {_general(files['general_sampler'])}",
    ]
    return "\n".join(lines) + "\n"


def _streams(files: Files) -> list[str]:
    """Return what stands in README about streams of real clips."""
    result, at = files["streams"], streams_table.cells(files["streams_recipes"])
    systems = files["systems_streams"]
    own = streams_table.with_own_network(systems)
    of_own = f" ({len(files['streams_recipes']['dev_trials'])} of {TITLES['default']})"
    chosen = streams_table.best(result)
    low, high = chosen["ci95"][streams_table.METRIC]
    others = " and ".join(ROWS[name] for name in OTHER_RECIPES)
    beside = [f"{_percent(at[policy, FRAMES[1]]['top1'])} %" for policy in ("uniform", streams_table.OWN)]
    return [
        f"Streams: {result['streams']['test']} test videos of ten shots that are real clips, 25 to 60 % of the time of "
        f"one of {result['num_classes']} actions. The recipe of {TITLES['default']} and the number of frames were "
        f"chosen on dev: {streams_table.frames_of(chosen)}, {_percent(chosen['top1'])} % "
        f"({_percent(low)} to {_percent(high)}) at {chosen['gmacs']:.1f} GMACs. Mean of {chosen['seeds']} seeds. "
        f"{_probe(result)}"
        f"{others} are not tuned here, and of an earlier run with another training of the classifier and fewer "
        "seeds, in which "
        f"{FRAMES[1]} uniform frames had {beside[0]} and {TITLES['default']} {beside[1]}. "
        f"{' '.join(streams_table.seen_of_test(result)[:1])} [More](docs/results/streams.md).",
        f"{_beside_learned_methods(systems, 'other learned methods on streams', of_own)} {', '.join(own)} look at all "
        f"frames with the network that {TITLES['default']} trained."
        + (
            ""
            if streams_table.ahead_at_their_cost(result, systems)
            else f" None of them is ahead of {TITLES['default']} at any cost."
        ),
    ]


def _probe(result: Result) -> str:
    """Return what the probe is, and what it gives without the sampler."""
    known = " ".join(streams_table.probe_alone(result))
    link = "[probe](docs/sampler.md#the-probe), a layer on the classifier's features,"
    return known.replace("The probe", f"The sampler's {link}") + " " if known else ""


def _cells(result: Result) -> dict[tuple[str, int], Result]:
    return {(line["policy"], line["num_frames"]): line for line in result["table"] if line["num_candidates"] == ALL}


def _own_answer(result: Result) -> list[str]:
    """Return how well the sampler alone names the class, where that was measured."""
    found = next((line for line in result["table"] if line["policy"] == ANSWER), None)
    if found is None:
        return []
    return [
        f"On these reels the sampler's own class head, without any classifier, is right in {_percent(found['top1'])} % "
        f"of the videos at {found['gmacs']:.1f} GMACs: single pictures of few classes are easy for it."
    ]


def _epochs(files: Files) -> str:
    """Return how long the classifiers were trained, and what was known when that was chosen."""
    chosen, other = (files[name]["classifier"]["epochs"] for name in ("samplers", "samplers_30_epochs"))
    return (
        f"{chosen} epochs, which was chosen after test figures with {other} were known ([both](docs/results/reels.md))"
    )


def _beside_learned_methods(result: Result, which: str = "learned methods", beside: str = "") -> str:
    lines = [line for line in result["at_budget"] if line["policy"] in LEARNED]
    first, second, *_ = sorted(lines, key=lambda line: -line["top1"])
    names = [
        f"{LEARNED[line['policy']]} ({_percent(line['top1'])} % at {cost(line, result)} GMACs)"
        for line in (first, second)
    ]
    seeds = _seeds(min(first["seeds"], second["seeds"]))
    return (
        f"Of {len(lines)} {which}, with {result['trials_each']} trials each on dev{beside}, the best within "
        f"{result['budget_gmacs']:.1f} GMACs are {names[0]} and {names[1]}; {seeds}."
    )


def _seeds(count: int) -> str:
    """
    >>> _seeds(1), _seeds(3)
    ('one seed', 'mean of 3 seeds')
    """
    return "one seed" if count == 1 else f"mean of {count} seeds"


def _general(result: Result) -> str:
    reels = result["reels"]
    at = {row["policy"]: row for row in reels["rows"] if row["num_frames"] == 3}
    return (
        f"Without training, the sampler inside the package gives {_percent(at['general']['top1'])} % with 3 of {ALL} "
        f"frames of {reels['videos']} other reels; uniform frames give {_percent(at['uniform']['top1'])} %. "
        "This was measured with [earlier settings](docs/general.md#results) of its choice."
    )


# ---- speed


def speed(files: Files) -> str:
    """Return the speed table, a baseline in every row, and the cost of the light install."""
    rows = [
        *_choose(files["select"]),
        *_decode(files["decode"]),
        *_file_to_label(files["pipeline"]),
        *_engine(files["frame_engine"]),
    ]
    for name in ("training", "training_gpu"):
        rows += _training(files[name])
    light = files["light"]
    cold = light["cold_start_seconds"]
    lines = [
        "| task | baseline | times as fast | on |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"The install without torch takes {light['install_megabytes']:.0f} MB. A new process needs "
        f"{cold['sampler']:.2f} s to choose {light['num_frames']} frames of a {light['clip']['duration']:.0f}-second "
        "clip.",
    ]
    return "\n".join(lines) + "\n"


Row = tuple[str, str, str, str]


def _choose(result: Result) -> Iterator[Row]:
    ratios: dict[str, list[float]] = {}
    for row in (row for video in result["videos"] for row in video["comparisons"]):
        if row["reference"] in (THUMBNAIL, THUMBNAIL_KEYS, SCENEDETECT, VIDEO_SAMPLER):
            ratios.setdefault(row["reference"], []).extend(row["times_faster_by_round"])
    yield (
        "choose 8 frames of five minutes, the command from its start on",
        "; ".join(ratios),
        "; ".join(range_of(found) for found in ratios.values()),
        f"{result['machine']['cores']} cores",
    )


def _decode(result: Result) -> Iterator[Row]:
    def ratios(way: str, reference: str) -> list[float]:
        rows = [row for video in result["videos"] for row in video["comparisons"]]
        return [row["times_faster"] for row in rows if (row["way"], row["reference"]) == (way, reference)]

    where = f"{result['machine']['cores']} cores, 1 thread"
    exact = "torchcodec exact T=32"
    yield "decode 32 uniform frames", "torchcodec, the same frames", range_of(ratios("exact T=32", exact)), where
    same = list(numbers(values_of(result, "torchcodec_same_keyframes")))
    if same:
        yield "decode 32 keyframes", "torchcodec, the same keyframes", range_of(same), where
        yield "decode 32 keyframes", "torchcodec, 32 uniform frames", range_of(ratios("keyframe T=32", exact)), where


def _file_to_label(result: Result) -> Iterator[Row]:
    task = "file to label: 10 keyframe candidates, sampler, 6 frames, ResNet-50"
    where = f"{result['machine']['cores']} cores"
    baselines = result.get("baselines")
    if baselines is not None:
        for threads, ratios in baselines.get("torchcodec_uniform", {}).items():
            yield task, f"torchcodec, 6 uniform frames, ResNet-50, {threads}", range_of(numbers(ratios)), where
        if "transformers" in baselines:
            loader = "transformers' video loader, 6 uniform frames, ResNet-50"
            yield task, loader, range_of(numbers(baselines["transformers"])), where
        return
    references = {
        "torchcodec, pipeline's classifier": "torchcodec, 6 uniform frames, the same fast ResNet-50, 1 thread each",
        "torchcodec, 2 threads": "torchcodec, 6 uniform frames, plain ResNet-50, 2 threads each",
        "transformers": "transformers' video loader, 6 uniform frames, plain ResNet-50",
    }
    for reference, baseline in references.items():
        rows = [row for video in result["videos"] for row in video["comparisons"]]
        rounds = [row["times_faster_by_round"] for row in rows if row["reference"] == reference]
        if rounds:
            yield task, baseline, range_of(numbers(rounds)), where


def _engine(result: Result) -> Iterator[Row]:
    for device in ("cpu", "gpu"):
        measured = result.get(device, {"batches": []})
        for row in sorted(measured["batches"], key=lambda row: row["batch"]):
            baselines = dict(row.get("baselines", {}))
            rates = row["videos_per_second"]
            if "eager tf32" in rates:
                baselines.setdefault("eager_tf32", rates["engine"] / rates["eager tf32"])
                baselines.setdefault("eager", rates["engine"] / rates["eager fp32"])
            fair = {"eager_tf32", "autocast_bf16_channels_last"} & set(baselines)
            if not fair:
                continue
            shown = {name: baselines[key] for key, name in ENGINE_BASELINES.items() if key in baselines}
            videos = "1 video" if row["batch"] == 1 else f"{row['batch']} videos"
            where = measured["device_name"] if device == "gpu" else f"{measured['machine']['cores']} cores"
            yield (
                f"score 10 frames, ResNet-50 on 6, {videos} at a time",
                "; ".join(shown),
                "; ".join(range_of(numbers(ratio)) for ratio in shown.values()),
                where,
            )


def _training(result: Result) -> Iterator[Row]:
    measured = result.get("training", result)
    ratios = list(numbers(values_of(measured, "with_teacher")))
    if ratios:
        where = measured["device"] if measured["device"] != "cpu" else f"{measured['machine']['cores']} cores"
        baseline = "the classifier run in every step, as in the authors' code"
        yield "train a sampler, classifier run over the bank included", baseline, range_of(ratios), where


# ---- values


def values_of(result: Any, key: str) -> Iterator[Any]:
    """Yield what stands under a key, wherever in the file it is."""
    if isinstance(result, dict):
        if key in result:
            yield result[key]
        for value in result.values():
            yield from values_of(value, key)
    elif isinstance(result, list):
        for value in result:
            yield from values_of(value, key)


def numbers(ratios: Any) -> Iterator[float]:
    """Yield the numbers of a ratio, a range, or lists of them.

    >>> list(numbers([1.5, [2, 3.0]]))
    [1.5, 2.0, 3.0]
    """
    if isinstance(ratios, (int, float)):
        yield float(ratios)
    else:
        for ratio in ratios.values() if isinstance(ratios, dict) else ratios:
            yield from numbers(ratio)


def range_of(ratios: Iterable[float]) -> str:
    """
    >>> range_of([2.04, 7.41, 3.0]), range_of([12.2])
    ('2.0 to 7.4', '12.2')
    """
    values = sorted(ratios)
    return " to ".join(dict.fromkeys(f"{value:.1f}" for value in (values[0], values[-1])))


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


# ---- the file

BLOCKS: dict[str, Callable[[Files], str]] = {"headline": headline, "what it brings": brings, "speed": speed}


def read_files() -> dict[str, Result]:
    """Return the results of all benchmarks, but those of the paper's tables."""
    paths = [path for path in BENCHMARKS.rglob("*.json") if path.parent.name != "paper"]
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def with_figures(text: str, files: Files) -> str:
    """Return the text of README.md with the figures of the files between its marks."""
    for name, write in BLOCKS.items():
        begin = BEGIN.format(name)
        pattern = re.escape(begin) + ".*?" + re.escape(END)
        block = begin + write(files) + END
        text, count = re.subn(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{README} has the mark {begin.strip()} {count} times; it must have it once")
    return text


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text(encoding="utf-8"), read_files()), encoding="utf-8")
