"""Sections of docs/results/ from the files of paper_runs.py: tables of the paper with the paper's column beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sosampler.paper.tables import name_in_words
from sosampler.paper.tables import table as reproduced_table
from sosampler.samplers.registry import TITLES

Result = dict[str, Any]
ORDER = ("table1", "table2", "table5", "table6", "table7", "tableII", "figureI")  # the rows of figure4 are in these
CASES = ("figureII", "figureIII")
FROM_NOTHING = ("timesformer", "x3d_s")
PLACES = ("reels10", "reels10_cost", "reels100", "yoga", "airtlab", "golfdb")  # the others come after these


def in_order(files: Mapping[str, Result]) -> dict[str, Result]:
    """Return the runs in the order of the pages, those with all tables first."""
    ranks = {name: rank for rank, name in enumerate(PLACES)}
    return {name: files[name] for name in sorted(files, key=lambda name: (ranks.get(name, len(ranks)), name))}


def sections(files: Mapping[str, Result], data: str) -> list[str]:
    """Return the paragraphs of all runs on one data set; `files` by the name of the run."""
    runs = [result for result in files.values() if result["data"] == data]
    if not runs:
        return []
    text = [
        "## The paper's tables on this data",
        "Made by `sosampler reproduce` (`benchmarks/paper/`, written by `benchmarks/paper/paper_runs.py`). The paper's "
        "column is on its own data sets and is for orientation only. With several seeds: mean ± standard deviation; "
        "else the 95 % interval over videos.",
    ]
    text += earlier_runs(runs)
    for result in runs:
        text += run_section(result) if _is_full(result) else []
    return text + other_classifiers([result for result in runs if not _is_full(result)])


def earlier_runs(runs: list[Result]) -> list[str]:
    """Say what runs of before SOSampler had three rows lack."""
    rows = [row for result in runs for experiment in result["experiments"].values() for row in experiment["rows"]]
    names = {row.get("row") for row in rows}
    if "sosampler" not in names or "sosampler-authors" in names:
        return []
    search = " AdaFrame has its earlier search, which saw two distinct frames." if "adaframe" in names else ""
    return [
        f"Of an earlier version: {TITLES['authors']} had no row then, and no sampler's network learned the labels "
        f"first.{search}"
    ]


def _is_full(result: Result) -> bool:
    """Return whether a run has tables of its own; other classifiers share some."""
    return str(result["bank"]["name"]) != "clips10"


def run_section(result: Result) -> list[str]:
    """Return all tables of one bank and classifier."""
    bank, experiments = result["bank"], result["experiments"]
    machine = result.get("device") or "an unnamed machine"
    changed = ", ".join(f"{name} {value}" for name, value in result["changes"].items())
    text = [
        f"**{bank['name']}**, classifier {result['classifier']['name']}, {bank['videos']} videos of {bank['split']}, "
        f"on {machine}" + (f"; changed in all recipes: {changed}" if changed else "") + ".",
    ]
    text += [f"Note: {remark}" for remark in result.get("remarks", [])]
    for name in ORDER:
        if name in experiments:
            text += experiment_section(result, experiments[name])
    if "figure1" in experiments:
        text.append(independence_sentence(experiments["figure1"]))
    shown = [
        f"{name_in_words(name)} ({note})"
        for name in CASES
        for note in experiments.get(name, {}).get("notes", [])
        if note.startswith("shown are")
    ]
    if "figure4" in experiments:
        shown.append("Figure 4 (the rows of Table 5, and 6 of 10, as curves)")
    if shown:
        text.append(f"Also made, as pages that are not in the repository: {'; '.join(shown)}.")
    return text


def experiment_section(result: Result, experiment: Result) -> list[str]:
    """Return title, rows, and the reasons for missing rows."""
    seeds = ", ".join(str(seed) for seed in experiment["seeds"])
    trained = any(row.get("seeds") for row in experiment["rows"])
    title = f"{name_in_words(experiment['experiment'])}: {experiment['title']}"
    title += f" (seeds {seeds})" if trained else ""
    if experiment["kind"] == "fidelity":
        return [f"**{title}**, in %; the paper's in brackets.", fidelity_table(experiment)]
    full = {"bank": result["bank"], "classifier": result["classifier"], "elsewhere": [], **experiment}
    lines = reproduced_table(full, "markdown").splitlines()
    grid = [line for line in lines if line.startswith("|")]
    notes = [line for line in lines if line.startswith("- [")]
    return [f"**{title}**", "\n".join(grid), *(["\n".join(notes)] if notes else [])]


def independence_sentence(experiment: Result) -> str:
    """Return Figure 1 as a sentence; of several networks the first."""
    rows = [row for row in experiment["rows"] if row["pairs"] and row["redundant"] is not None]
    first = [row for row in rows if row.get("classifier") == rows[0].get("classifier")]
    shares = [f"{100 * row['redundant']:.0f} % at {row['rate']:g} fps" for row in first]
    up_to = experiment["verdict"]
    words = "at no measured rate" if up_to is None else f"up to {up_to:g} fps"
    shown = ", ".join(shares) or "no pairs"
    title = f"**Figure 1: {experiment['title']}**"
    from_files = any("read from the video files" in note for note in experiment.get("notes", ()))
    where = "frames of the video files" if from_files else "the stored frames"
    return f"{title}. Redundant pairs among {where}: {shown}; independent {words}."


def fidelity_table(experiment: Result) -> str:
    """Return a table with a column for each N."""
    counts = sorted({row["num_frames"] for row in experiment["rows"]})
    titles = list(dict.fromkeys(row["title"] for row in experiment["rows"]))
    at = {(row["title"], row["num_frames"]): row for row in experiment["rows"]}
    rows = [[title, *(_fidelity(at.get((title, count))) for count in counts)] for title in titles]
    return _table(["policy", *(f"N={count}" for count in counts)], rows)


def _fidelity(row: Result | None) -> str:
    if row is None or row["score"] is None:
        return ""
    paper = (row.get("paper") or {}).get("score")
    return f"{row['score']:.1f}" + ("" if paper is None else f" ({paper:g})")


def other_classifiers(runs: list[Result]) -> list[str]:
    """Return Table 1 and the fidelity of π_s from Table 2 for several networks on the same videos."""
    runs = [result for result in runs if "table1" in result["experiments"]]
    if not runs:
        return []
    rows = []
    for result in runs:
        experiments = result["experiments"]
        scores = {row["row"]: row for row in experiments["table1"]["rows"]}
        fidelity = {
            row["num_frames"]: row["score"]
            for row in experiments.get("table2", {}).get("rows", [])
            if row["row"] == "semi-optimal"
        }
        cells = [_score(scores.get(name)) for name in ("uniform", "all", "semi-optimal", "optimal")]
        cells += ["" if fidelity.get(count) is None else f"{fidelity[count]:.0f}" for count in (2, 4, 6)]
        dev = result.get("classifier_training", {}).get("dev")
        rows.append([result["classifier"]["name"], "" if dev is None else f"{100 * dev:.0f}", *cells])
    names = [result["classifier"]["name"] for result in runs]
    bank = runs[0]["bank"]
    heads = ["classifier", "its dev", "uniform", "all ten", "π_s", "π_o"]
    heads += [f"fidelity of π_s, N={count}" for count in (2, 4, 6)]
    text = [
        f"**Tables 1 and 2 with other classifiers**: {bank['videos']} videos of {bank['split']}, 6 of 10 frames, top-1 "
        "in % with 95 % intervals. 'its dev' is the top-1 of the classifier on dev reels after its training. For "
        "networks that take whole clips, π_o is the best of all subsets.",
        _table(heads, rows),
    ]
    fresh = [name for name in names if name in FROM_NOTHING]
    if fresh:
        text.append(
            f"{' and '.join(fresh)}: trained from scratch on reels of 1100 images, as published weights were not at "
            "hand. Their accuracy is low. Their rows show that the method runs with them, not how good they are with "
            "the weights that the paper used."
        )
    if "i3d" in names:
        text.append(
            "i3d: fine-tuned for six epochs from Kinetics-400 weights. It was trained on motion but gets each still "
            "image several times in a row here, so its accuracy is low."
        )
    for result in runs:
        if "table6" in result["experiments"]:
            section = experiment_section(result, result["experiments"]["table6"])
            text += [f"{result['classifier']['name']}, {section[0]}", *section[1:]]
    return text


def _score(row: Result | None) -> str:
    if row is None or row["score"] is None:
        return ""
    bounds = row.get("score_ci95")
    return f"{row['score']:.1f}" + ("" if bounds is None else f" ({bounds[0]:.1f} to {bounds[1]:.1f})")


# ---- golf


GOLF_NAMES = {
    "default": TITLES["default"],
    "paper": TITLES["paper"],
    "semi-optimal": "π_s, label (oracle)",
    "semi-optimal-max": "π_s, max (oracle)",
    "optimal": "π_o (oracle)",
}


def golf(result: Result) -> list[str]:
    """Return how often a moment of the swing is hit."""
    counts = sorted({row["num_frames"] for row in result["rows"]})
    policies = list(dict.fromkeys(row["policy"] for row in result["rows"]))
    at = {(row["policy"], row["num_frames"]): row for row in result["rows"]}
    rows = [["chance", *(f"{100 * at[policies[0], count]['by_chance']:.1f}" for count in counts)]]
    for policy in policies:
        cells = []
        for count in counts:
            row = at[policy, count]
            low, high = row["above_chance_ci95"]
            mark = "" if low <= 0 <= high else " ▲" if low > 0 else " ▼"
            cells.append(f"{100 * row['hit']:.1f}{mark}")
        rows.append([GOLF_NAMES.get(policy, policy), *cells])
    tolerance = result["tolerance_native_frames"]
    return [
        "## Are the moments of the swing among the chosen frames?",
        f"Share of the eight moments that GolfDB marks, in %, with N of {result['num_candidates']} frames of "
        f"{result['videos']} test videos (`benchmarks/results/paper/golf_events.json`). "
        "A moment is hit if a chosen frame lies "
        f"within half the distance between stored frames: {tolerance['median']:g} frames of the original in the median "
        f"({tolerance['least']:g} to {tolerance['most']:g}); {100 * result['in_reach']:.1f} % can be hit at all. ▲ and "
        "▼: the interval of the difference to chance lies above or below 0. No policy knows the moments: the "
        "classifier names the direction of the camera.",
        _table(["policy", *(f"N={count}" for count in counts)], rows),
        *([] if "authors" in policies else [f"{TITLES['authors']} was not measured here."]),
    ]


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)
