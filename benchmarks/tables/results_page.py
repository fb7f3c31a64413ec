"""Write docs/results.md and the pages below docs/results/ from the JSON files of the benchmarks.

    python benchmarks/tables/results_page.py

A section without its file is left out, so the pages hold no figure that was not measured. A test compares them with
the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.tables import claims, paper_tables, results_table, streams_table, systems_table
from benchmarks.tables.systems_table import FIRST_RECIPE, of_first_recipe
from sosampler.samplers.registry import TITLES

HERE = next(folder for folder in Path(__file__).parents if folder.name == "benchmarks")
DOCS = HERE.parent / "docs"
PAPER, GOLF = "paper", "golf_events"  # the folder of paper_runs.py, and the file in it that belongs to no table

Result = dict[str, Any]
Files = Mapping[str, Result]

# Title and data of each page below docs/results/
INTRODUCTIONS = {
    "streams": (
        "Streams: untrimmed videos made of real clips",
        "A stream has ten shots, each a part of a real clip with its own motion, with cuts and some dissolves between "
        "them, as an mp4 file of about half a minute. One of 34 actions takes 25 to 60 % of the time, in different "
        "clips of it. The others are background. The clips are from UCF101, J-HMDB and MSVD, the background also from "
        "AIRTLab and from yoga clips. Clips of one "
        "source video are never in two splits, and classifier and sampler never see "
        "the same clips. The clips are not published with sosampler. `sosampler reels` makes streams of your own clips "
        "with the same settings ([data](../data.md#reels)).",
    ),
    "reels": (
        "Reels: untrimmed videos made of sports images",
        "A reel has ten shots. 25 to 65 % of them show one of 22 sports, the others show something else (ImageNet "
        "images). Train and test share no image. The sports images come from the web, and their licences are not "
        "stated. They are not published, so these figures cannot be repeated to the digit. `sosampler reels` makes "
        "reels of your own images with the same settings ([data](../data.md#reels)).",
    ),
    "yoga": (
        "Yoga: short clips of one pose",
        "97 real clips of six yoga poses, about ten seconds each, split by scene. The clips are not published with "
        "sosampler, and their licences are not stated.",
    ),
    "airtlab": (
        "AIRTLab: short clips with several labels",
        "301 real clips of violence and of everyday gestures, a few seconds each, split by scene. The metric is mAP. "
        "They are from AIRTLab's data set for violence detection, which its authors publish. The short copies that "
        "were used here are not published.",
    ),
    "golfdb": (
        "GolfDB: golf swings",
        "300 real clips of golf swings. The label is the direction of the camera. They are from GolfDB, which its "
        "authors publish. The short copies that were used here are not published.",
    ),
    "demo": (
        "Drawn videos: the demonstration",
        "`make demo` draws these videos itself, so everybody can repeat this page.",
    ),
    "claims": (
        "The paper's claims",
        "Each claim of the paper on the data at hand, which is none of the paper's.",
    ),
}


# Pages of which some or all sections were measured before the recipe `default` was chosen on streams too
EARLIER = (
    f"{FIRST_RECIPE} is what the recipe `default` was before; [decisions](../decisions.md#samplers-and-losses) say "
    "what changed and why."
)


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


# ---- sections


def training(result: Result) -> list[str]:
    reels, teacher = result["reels"], result["teacher_seconds"]
    rows = [
        [row["recipe"].replace("default", "first recipe"), str(row["epochs"]), ", ".join(map(str, row["seconds"]))]
        for row in result["rows"]
    ]
    return [
        "## Training time",
        f"On one {result['device']}: {reels['train']} reels of ten {reels['pixels']}-pixel frames to train on, "
        f"{reels['dev']} for dev. Whole processes, with start-up and decoding; three trainings at a time on the same "
        "GPU (`benchmarks/results/sampler_training.json`):",
        table(["recipe", "epochs", "seconds (three seeds)"], rows),
        "Running the classifier over the 60,000 frames of these reels and of 3000 test reels had taken "
        f"{teacher} s before.",
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
        f"The most confidence that the certified search can have missed, on {result['videos']} synthetic videos of "
        f"{result['classes']} classes each (`benchmarks/results/certified.json`):",
        table(["N of T", "largest gap, in probability", "CPU time a video"], rows),
    ]


def independence(result: Result) -> list[str]:
    sets = result["sets"]
    rates = sorted({rate for measured in sets.values() for rate in measured["settings"]["rates"]})
    rows = []
    for name, measured in sets.items():
        network = measured["classifiers"][0]
        shares = {row["rate"]: row["redundant"] for row in measured["rows"]}
        cells = ["" if shares.get(rate) is None else f"{100 * shares[rate]:.0f} %" for rate in rates]
        up_to = network["verdict"]
        verdict = "no measured rate" if up_to is None else f"{up_to:g} fps"
        rows.append([name, f"{network['bandwidth']:.1f}", *cells, verdict])
    return [
        "## Frame independence",
        "ResNet-50 with ImageNet weights, seven videos of each set (`benchmarks/results/independence.json`). A pair of "
        "neighbouring frames is redundant if it is more alike than 90 % of the distant pairs of the same video, or "
        "closer than a quarter of the bandwidth.",
        table(["set", "bandwidth", *(f"{rate:g} fps" for rate in rates), "independent up to"], rows),
        "Share of redundant pairs. `clips` are sample videos, most of them with a fixed camera. `yoga` are clips of "
        "about ten seconds, so 0.2 fps means two frames. The paper finds independence up to 1 fps on ActivityNet. "
        "That data set was not at hand, and the finding does not hold here.",
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
    heads = ["seed", "uniform", TITLES["default"], "gain, points (95 %)", "share of π_s's gain", "π_s, label", "all 16"]
    return [
        "`benchmarks/results/demo.json`: 150 test videos, N=3 of T=16, top-1 in %.",
        table(heads, rows),
        "The classifier and the sampler are the same small network. The sampler gets 48 pixels, the classifier 64.",
    ]


def samplers(result: Result) -> list[str]:
    counts = result["reels"]["train, dev, test"]
    lines = results_table.by_cell(result)
    text = [
        "## SOSampler and its recipes",
        f"ResNet-50 at 176 pixels; {counts[0]} reels to train on, {counts[1]} for dev, {counts[2]} for test; seeds "
        f"{', '.join(str(seed) for seed in result['seeds'])} on {result['device']} "
        "(`benchmarks/results/samplers.json`; mean ± "
        "standard deviation over seeds). Recipes as they are; the answer is the mean over the chosen frames. N of ten "
        "candidates:",
        "\n".join(results_table.accuracy(lines)),
        "\n".join(results_table.shares(lines)),
    ]
    if any(candidates > 10 for _, _, candidates in lines):
        text += [
            f"Longer reels ({result['reels']['longer']} of each length), with samplers trained on ten candidates:",
            "\n".join(results_table.longer(lines)),
        ]
    if any(policy not in results_table.NAMES for policy, _, _ in lines):
        text += ["The effect of single changes:", "\n".join(results_table.variants(lines))]
    return text


def more_epochs(result: Result, other: Result) -> list[str]:
    """The classifier of samplers() beside one that was trained longer."""
    chosen, longer = (each["classifier"]["epochs"] for each in (result, other))
    policies = ("uniform", "default, importance alone", "default", "semi-optimal", "all")
    cells = [results_table.by_cell(each) for each in (result, other)]
    rows = []
    for policy in policies:
        for epochs, at in zip((chosen, longer), cells, strict=True):
            figures = [results_table.percent(at.get((policy, count, 10))) for count in (1, 2, 3, 6, 10)]
            rows.append([results_table.NAMES[policy], str(epochs), *figures])
    return [
        f"The classifier has {chosen} epochs, a choice made after test figures with {longer} were known. Both side by "
        f"side (`benchmarks/results/samplers_{longer}_epochs.json`; {TITLES['paper']} and {TITLES['authors']} were not "
        f"trained with {longer}):",
        table(["top-1, %", "epochs of the classifier", *(f"N={count}" for count in (1, 2, 3, 6, 10))], rows),
    ]


# ---- the first page


def front(files: Files, paper: Files, golf: Result | None, names: list[str]) -> str:
    """Return docs/results.md: the answers in short, and what is behind them."""
    answers = [
        *([" ".join(works)] if (works := [*_works(files, paper), *_on_real_clips(files)]) else []),
        *_by_how_much(files),
        *_against_what(files),
        *_without_training(files),
        *_when_not(files, golf),
        *_claims_in_short(files, paper),
        "**How sure?** Intervals are 95 % over test videos, on reels and streams also over the images or clips that "
        "they share; ± is the standard deviation over seeds. Reels are made of still images, streams of real clips. No "
        "data set of the paper was at hand.",
    ]
    links = [f"- [{INTRODUCTIONS[name][0]}](results/{name}.md)" for name in names]
    paragraphs = [
        "# Results",
        "\n".join(f"- {answer}" for answer in answers),
        *(["## One page for each data set", "\n".join(links)] if links else []),
        "The sampler inside the package, `general`, has [a page of its own](general.md). So have [adaptive numbers of "
        "frames](adaptive.md) and [the baselines](baselines.md).",
        "## Where the figures come from",
        "Every figure has a script and a JSON file under [benchmarks](../benchmarks/README.md), with seeds, versions "
        "and the machine. `python benchmarks/tables/results_page.py` writes these pages from them.",
        "The sports images and the clips are not published here: most of their sources state no licence. Each page "
        "describes its data.",
    ]
    return "\n\n".join(paragraphs) + "\n"


def _works(files: Files, paper: Files) -> list[str]:
    """Where SOSampler+ is better than uniform frames, 6 of 10, by its interval."""
    both = {**files, **{f"paper/{name}": result for name, result in paper.items()}}
    gains = {name: claims.gain(both, name) for name in ("reels", "yoga", "airtlab")}
    gains[f"golfdb, {TITLES['paper']}"] = claims.contrast(both, "golfdb", "table6", "sosampler - uniform")
    words = {
        claims.HOLDS: "Yes on",
        claims.OPEN: "Not shown on",
        claims.FAILS: "No on",
    }
    sentences = []
    for verdict, start in words.items():
        sets = [f"{name}: {gain}" for name, gain in gains.items() if gain and claims.verdict(gain) == verdict]
        sentences += [f"{start} {'; '.join(sets)}."] if sets else []
    if not sentences:
        return []
    return [
        f"**Does it work?** {' '.join(sentences)} These are points of top-1 (airtlab: mAP) above uniform frames, 6 of "
        f"10 frames each, of {FIRST_RECIPE} where no other is named: what `default` was [before](decisions.md"
        "#samplers-and-losses). Reels are untrimmed videos. The others are short clips of one scene."
    ]


def _on_real_clips(files: Files) -> list[str]:
    if "streams" not in files:
        return []
    return [f"{streams_table.headline(files['streams'])} These are [streams](results/streams.md)."]


def _by_how_much(files: Files) -> list[str]:
    at, before = (
        {
            (line["policy"], line["num_frames"], line["num_candidates"]): line
            for line in files.get(name, {}).get("table", [])
        }
        for name in ("reels", "systems_reels")
    )
    if any((policy, 2, 10) not in at for policy in ("uniform", "sosampler", "semi-optimal")):
        return []
    two = {policy: percent(line["top1"]) for (policy, n, t), line in at.items() if (n, t) == (2, 10)}
    first, authors, paper = (percent(before[name, 2, 10]["top1"]) for name in ("sosampler", "authors", "paper"))
    every, ours = at["all", 10, 10], at["sosampler", 2, 10]
    return [
        f"**By how much?** On reels, 2 of 10 frames of {TITLES['default']}: {two['sosampler']} % top-1. Uniform "
        f"frames: {two['uniform']} %. All ten frames: {percent(every['top1'])} %.",
        f"**At what cost?** {ours['gmacs']:.1f} GMACs a video for sampler and classifier, {every['gmacs']:.1f} for all "
        "ten frames.",
        f"**With which recipe?** In a comparison with another training of the classifier {FIRST_RECIPE} has {first} %, "
        f"{TITLES['authors']} {authors} %, {TITLES['paper']} {paper} % (2 of 10), each with the best of its trials on "
        "dev.",
        f"**What is the limit?** {two['semi-optimal']} % for π_s, an oracle that knows the label (2 of 10).",
    ]


def _against_what(files: Files) -> list[str]:
    result = files.get("systems_reels", {})
    learned = ("paper", "authors", *systems_table.PUBLISHED)
    lines = [line for line in result.get("at_budget", []) if line["policy"] in learned]
    if not lines:
        return []
    best_first = sorted(lines, key=lambda line: -line[result["metric"]])
    methods = [
        f"{systems_table.shown(line['policy']).strip('*')} {systems_table.percent(line, result['metric'])} % at "
        f"{systems_table.cost(line, result)} GMACs"
        for line in best_first
    ]
    return [
        f"**Against what?** Learned methods on reels, tuned with equal effort, within {result['budget_gmacs']:.1f} "
        f"GMACs (six uniform frames): {of_first_recipe(', '.join(methods))}."
    ]


def _without_training(files: Files) -> list[str]:
    if "general_sampler" not in files:
        return []
    reels = files["general_sampler"]["reels"]
    at = {row["policy"]: percent(row["top1"]) for row in reels["rows"] if row["num_frames"] == 3}
    return [
        f"**Without training?** The sampler inside the package (`general`), 3 of 10 frames of {reels['videos']} reels: "
        f"{at['general']} %, with earlier settings of its choice. Uniform frames: {at['uniform']} %."
    ]


def _when_not(files: Files, golf: Result | None) -> list[str]:
    text = "**When not?** On short clips of one scene take uniform frames."
    if golf is not None:
        at = {row["policy"]: row for row in golf["rows"] if row["num_frames"] == 4}
        if {"default", "frame-difference"} <= set(at):
            text += (
                " A sampler finds what its classifier needs, nothing else. With a classifier of camera directions "
                f"{FIRST_RECIPE} shows {percent(at['default']['hit'])} % of the moments of a golf swing in 4 frames; "
                f"{percent(at['default']['by_chance'])} % is chance, and the policy `frame-difference` shows "
                f"{percent(at['frame-difference']['hit'])} %."
            )
    return [text]


def _claims_in_short(files: Files, paper: Files) -> list[str]:
    both = {**files, **{f"paper/{name}": result for name, result in paper.items()}}
    counts = []
    for claim in claims.CLAIMS:
        verdicts = [each.verdict for each in claim.evidence(both) if each.verdict != claims.ONE_RATE]
        if verdicts:
            counts.append(f'"{claim.title}" in {verdicts.count(claims.HOLDS)} of {len(verdicts)}')
    if not counts:
        return []
    return [f"**Do the paper's claims hold here?** Number of measurements in which they do: {'; '.join(counts)}."]


# ---- all pages


def pages() -> dict[str, str]:
    """Return the text of every page by its path below docs/."""
    paths = sorted(HERE.rglob("*.json"))
    files = {path.stem: read(path) for path in paths if path.parent.name != PAPER}
    paper = {path.stem: read(path) for path in paths if path.parent.name == PAPER}
    golf = paper.pop(GOLF, None)
    paper = paper_tables.in_order(paper)

    def section(write: Any, name: str) -> list[str]:
        return list(write(files[name])) if name in files else []

    bodies = {
        "streams": section(
            lambda result: streams_table.sections(
                result,
                *(files.get(name) for name in ("streams_recipes", "systems_streams", "long_streams", "recipes")),
            ),
            "streams",
        ),
        "reels": [
            *section(lambda result: systems_table.sections(result, f"{TITLES['default']}, rules and oracles"), "reels"),
            *earlier(
                *section(samplers, "samplers"),
                *(more_epochs(*both) if len(both := _of(files, "samplers", "samplers_30_epochs")) == 2 else []),
                *section(systems_table.sections, "systems_reels"),
                *section(systems_table.longer_sections, "systems_reels_longer"),
                *section(training, "sampler_training"),
                *paper_tables.sections(paper, "reels"),
            ),
        ],
        "yoga": earlier(*section(systems_table.sections, "systems_yoga"), *paper_tables.sections(paper, "yoga")),
        "airtlab": earlier(
            *section(systems_table.sections, "systems_airtlab"), *paper_tables.sections(paper, "airtlab")
        ),
        "golfdb": earlier(
            *([] if golf is None else paper_tables.golf(golf)),
            *paper_tables.sections(paper, "golfdb"),
        ),
        "demo": section(demonstration, "demo"),
        "claims": earlier(
            *claims.sections({**files, **{f"{PAPER}/{name}": result for name, result in paper.items()}}),
            *section(independence, "independence"),
            *section(certified, "certified"),
        ),
    }
    texts = {
        f"results/{name}.md": "\n\n".join([f"# {INTRODUCTIONS[name][0]}", INTRODUCTIONS[name][1], *body]) + "\n"
        for name, body in bodies.items()
        if body
    }
    names = [name for name, body in bodies.items() if body]
    return {"results.md": front(files, paper, golf, names), **texts}


def earlier(*paragraphs: str) -> list[str]:
    """Return paragraphs with figures of the first recipe, which they name so."""
    return [EARLIER, *map(of_first_recipe, paragraphs)] if paragraphs else []


def _of(files: Files, *names: str) -> list[Result]:
    return [files[name] for name in names if name in files]


def read(path: Path) -> Result:
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


def main() -> None:
    texts = pages()
    (DOCS / "results").mkdir(exist_ok=True)
    for path in (DOCS / "results").glob("*.md"):
        if f"results/{path.name}" not in texts:
            path.unlink()
    for name, text in texts.items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
