"""Write docs/results.md from the JSON files beside this script; a test says when the page is out of date.

    python benchmarks/tables/results_page.py

A section without its file is left out, so the page never holds a figure that was not measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.tables import claims, paper_tables, results_table, systems_table

HERE = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "docs" / "results.md"
HEAD = (
    "# Results\n\nEvery figure has a script and a JSON file under [benchmarks](../benchmarks/README.md), with seeds, "
    "versions and the machine; `python benchmarks/tables/results_page.py` writes this page from them."
)

Result = dict[str, Any]


def table(heads: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def training(result: Result) -> list[str]:
    reels, teacher = result["reels"], result["teacher_seconds"]
    rows = [
        [row["recipe"], str(row["epochs"]), ", ".join(str(seconds) for seconds in row["seconds"])]
        for row in result["rows"]
    ]
    return [
        "## Training time",
        f"On one {result['device']}, {reels['train']} reels of ten {reels['pixels']}-pixel frames (and {reels['dev']} "
        "for dev), whole processes with starting and decoding, three trainings at a time on the same GPU "
        "(`benchmarks/results/sampler_training.json`):",
        table(["recipe", "epochs", "seconds (three seeds)"], rows),
        "The classifier's answers about the 60,000 frames of these reels and of 3000 for testing had taken "
        f"{teacher} s.",
    ]


def certified(result: Result) -> list[str]:
    rows = [
        [
            f"{row['num_frames']} of {row['num_candidates']}",
            f"{row['largest_gap']:.1e}".replace("e-0", "e-"),
            f"{1000 * row['cpu_seconds_a_video']:.1f} ms",
        ]
        for row in result["rows"]
    ]
    return [
        "## The optimal policy beyond enumeration",
        f"How much confidence the certified search may have missed, on {result['videos']} made-up videos of "
        f"{result['classes']} classes each (`benchmarks/results/certified.json`):",
        table(["N of T", "largest gap, in probability", "CPU time a video"], rows),
    ]


def independence(result: Result) -> list[str]:
    sets = result["sets"]
    rates = sorted({rate for found in sets.values() for rate in found["settings"]["rates"]})
    rows = []
    for name, found in sets.items():
        network = found["classifiers"][0]
        shares = {row["rate"]: row["redundant"] for row in found["rows"]}
        cells = ["" if shares.get(rate) is None else f"{100 * shares[rate]:.0f} %" for rate in rates]
        up_to = network["verdict"]
        verdict = "no measured rate" if up_to is None else f"{up_to:g} fps"
        rows.append([name, f"{network['bandwidth']:.1f}", *cells, verdict])
    return [
        "## Frame independence",
        "ResNet-50 with ImageNet weights, seven videos of each set (`benchmarks/results/independence.json`). A pair of "
        "neighbours is redundant if it is more alike than 90 % of the pairs of the same video that lie far apart, or "
        "nearer than a quarter of the bandwidth.",
        table(["set", "bandwidth", *(f"{rate:g} fps" for rate in rates), "independent up to"], rows),
        "Share of redundant pairs. `clips` are sample videos, most of them with a fixed camera; `yoga` are clips of "
        "about ten seconds, so that 0.2 fps means two frames. The paper finds independence up to 1 fps on ActivityNet, "
        "which was not at hand; it does not hold here.",
    ]


def demonstration(result: Result) -> list[str]:
    rows = []
    for run in result["runs"]:
        at = {(row["policy"], row["num_frames"]): row for row in run["rows"]}
        ours = at["sosampler", 3]
        versus = ours["versus_uniform"]
        low, high = (percent(bound) for bound in versus["ci95"])
        rows.append(
            [
                str(run["seed"]),
                percent(at["uniform", 3]["top1"]),
                percent(ours["top1"]),
                f"+{percent(versus['difference'])} ({low} to {high})",
                f"{100 * ours['recovered']:.0f} %",
                percent(at["semi-optimal", 3]["top1"]),
                percent(at["all", 16]["top1"]),
            ]
        )
    heads = ["seed", "uniform", "sosampler", "gain, points (95 %)", "share of π_s's gain", "π_s, label", "all 16"]
    return [
        "## The demonstration",
        "On drawn pictures, where everybody can repeat it (`benchmarks/results/demo.json`; 150 test videos, N=3 of "
        "T=16, top-1 in %):",
        table(heads, rows),
        "The classifier and the sampler are the same small network; the sampler sees 48 pixels, the classifier 64.",
    ]


def samplers(result: Result) -> list[str]:
    counts = result["reels"]["train, dev, test"]
    lines = results_table.by_cell(result)
    of_ten = [results_table.accuracy(lines), results_table.shares(lines)]
    text = [
        "## Samplers on reels of real pictures",
        f"Reels of sports22 pictures, ResNet-50 at 176 pixels; {counts[0]} reels to train on, {counts[1]} for dev, "
        f"{counts[2]} for testing, of pictures that neither the classifier nor the sampler had seen; seeds "
        f"{', '.join(str(seed) for seed in result['seeds'])} on {result['device']} "
        "(`benchmarks/results/samplers.json`; mean ± standard deviation over seeds). Choose from ten:",
        *("\n".join(rows) for rows in of_ten),
    ]
    if any(candidates > 10 for _, _, candidates in lines):
        text += [
            f"Longer reels ({result['reels']['longer']} of each kind), by the samplers that were trained on ten "
            "candidates:",
            "\n".join(results_table.longer(lines)),
        ]
    if any(policy not in results_table.NAMES for policy, _, _ in lines):
        text += ["What single changes do:", "\n".join(results_table.variants(lines))]
    return text


# In the order of the page: the name of a file, and what is made of it
SECTIONS: dict[str, Callable[[Result], list[str]]] = {
    "samplers": samplers,
    "systems_reels": systems_table.sections,
    "systems_yoga": systems_table.sections,
    "systems_airtlab": systems_table.sections,
    "demo": demonstration,
    "sampler_training": training,
    "certified": certified,
    "independence": independence,
}


SYSTEMS = "## All samplers and systems, tuned alike, at what they cost"
PAPER, GOLF = "paper", "golf_events"  # the folder of paper_runs.py, and the file in it that is of no table


def page() -> str:
    """The whole text."""
    files = {path.stem: read(path) for path in sorted(HERE.glob("*.json"))}
    of_paper = {path.stem: read(path) for path in sorted((HERE / PAPER).glob("*.json"))}
    golf = of_paper.pop(GOLF, None)
    of_paper = paper_tables.in_order(of_paper)
    paragraphs = [HEAD]
    of_systems = [name for name in SECTIONS if name.startswith("systems_") and name in files]
    for name, section in SECTIONS.items():
        if name in files:
            paragraphs += [SYSTEMS] if name in of_systems[:1] else []
            paragraphs += section(files[name])
    if "samplers" not in files:
        paragraphs.append(
            "`benchmarks/accuracy/samplers.py` measures uniform, random, all, the three recipes, π_s and π_o on reels "
            "of real pictures with a fine-tuned ResNet-50. It has not been run to its end yet, so there are no figures "
            "of it here."
        )
    paragraphs += paper_tables.sections(of_paper)
    if golf is not None:
        paragraphs += paper_tables.golf(golf)
    paragraphs += claims.sections(files | {f"{PAPER}/{name}": told for name, told in of_paper.items()})
    return "\n\n".join(paragraphs) + "\n"


def read(path: Path) -> Result:
    told: Result = json.loads(path.read_text(encoding="utf-8"))
    return told


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
