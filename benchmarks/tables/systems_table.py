"""Print the tables of files that benchmarks/accuracy/systems.py wrote, in Markdown.

python benchmarks/tables/systems_table.py benchmarks/systems_*.json            all of each file
python benchmarks/tables/systems_table.py benchmarks/systems_*.json --beside   the table of docs/baselines.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sosampler.samplers.registry import TITLES

Result = dict[str, Any]
Line = dict[str, Any]

FIRST_RECIPE = f"{TITLES['default']} (first recipe)"  # what `default` was before; files of then have it as sosampler
NAMES = {
    "paper": TITLES["paper"],
    "authors": TITLES["authors"],
    "sosampler": f"**{TITLES['default']}**",
    "first": FIRST_RECIPE,
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
    "semi-optimal-max": "π_s, max confidence (oracle)",
    "attainable": "best under the classifier's own belief over all frames (oracle)",
    "class-frames": "the frames that show the class (oracle)",
    "semi-optimal": "π_s, label confidence (oracle)",
    "optimal": "π_o (oracle)",
}
# With class layers of their own
SYSTEMS = ("frameexit", "liteeval", "adaframe", "marl", "ar-net", "videoiq", "adafocus", "adafuse", "ada3d")
SYSTEMS += ("listen-to-look",)
UNIFORM_FRAMES = ", uniform frames"
ANSWER, MEAN, FUSED = "sosampler+answer", "sosampler+mean", "sosampler+fused"
NAMES |= {name + UNIFORM_FRAMES: f"{NAMES[name]}'s own classifier{UNIFORM_FRAMES}" for name in SYSTEMS}
NAMES[ANSWER] = f"{TITLES['default']}'s own answer, no classifier"
NAMES[MEAN] = f"{TITLES['default']}, mean over frames"
NAMES[FUSED] = f"{TITLES['default']}, without the probe"
METRICS = {"top1": "top-1", "mAP": "mAP"}
# The rest would lie on top of each other
NOT_IN_THE_CURVE = {"semi-optimal-max", "attainable", "class-frames", "optimal", ANSWER, MEAN, FUSED}
IN_THE_CURVE = (
    *("uniform", "random", "all"),
    *(name for name in NAMES if name not in NOT_IN_THE_CURVE and not name.endswith(UNIFORM_FRAMES)),
)


def shown(policy: str) -> str:
    """The name of a policy as readers know it, with what stands behind it.

    >>> shown("ocsampler"), shown("sosampler+aks"), shown("random")
    ('OCSampler', 'SOSampler+ with aks', 'random')
    >>> shown("sosampler+answer")
    "SOSampler+'s own answer, no classifier"
    """
    base, plus, method = policy.partition("+")
    if policy in NAMES or not plus or base not in NAMES:
        return NAMES.get(policy, policy)
    return f"{NAMES[base].strip('*')} with {method}"


def of_first_recipe(text: str) -> str:
    """
    >>> of_first_recipe("| **SOSampler+** | 93.9 |"), of_first_recipe("SOSampler+'s own answer")
    ('| **SOSampler+ (first recipe)** | 93.9 |', "SOSampler+ (first recipe)'s own answer")
    """
    return text.replace(TITLES["default"], FIRST_RECIPE)


def percent(line: Line | None, metric: str) -> str:
    """Mean ± standard deviation over seeds."""
    if line is None or line[metric] is None:
        return ""
    spread = line.get(f"{metric}_sd")
    return f"{100 * line[metric]:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() else f"{value:.{digits}f}"


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def within_budget(result: Result) -> str:
    """Every method at the N, or the setting, that was best on dev for at most the cost of six uniform frames."""
    metric = result["metric"]
    rows = []
    for line in sorted(result["at_budget"], key=lambda line: -line[metric]):
        if line["dial"] is not None:
            setting = f"setting {line['dial']}"
        else:
            setting = "" if line["num_frames"] is None else f"N={line['num_frames']}"
        spent = [number(line[key]) for key in ("frames_classified", "frames_decoded")]
        rows.append([shown(line["policy"]), setting, *spent, cost(line, result), percent(line, metric)])
    heads = ["method", "chosen on dev", "frames", "decoded", "GMACs", f"test {METRICS[metric]}, %"]
    return markdown(heads, rows)


def over_budget(result: Result) -> dict[str, Line]:
    """The cheapest row of each learned method that no trial brought within the budget, by method."""
    inside, rows = {line["policy"] for line in result["at_budget"]}, {}
    for method in result["chosen"]:
        own = [line for line in result["table"] if line["policy"].partition("@")[0] == method]
        if own and method not in inside:
            rows[method] = min(own, key=lambda line: float(line["gmacs"]))
    return rows


def beside_the_table(result: Result) -> list[str]:
    """Say which methods are over the budget, and what is counted otherwise elsewhere."""
    metric, over = result["metric"], over_budget(result)
    text = [
        f"No trial of {shown(method)} is within the budget; the best of them with all seeds has "
        f"{percent(line, metric)} % at {number(line['gmacs'])} GMACs."
        for method, line in over.items()
    ]
    counted = {line["policy"]: line for line in result["at_budget"] if UNIFORM_FRAMES not in line["policy"]} | over
    for method, line in counted.items():
        for count, gmacs in (line.get("other_gmacs") or {}).items():
            what = "bit operations, as in its paper" if count == "bits" else f"the {count} of its authors"
            text.append(f"Counted by {what}, {shown(method)} costs {number(gmacs)}.")
    return [" ".join(text)] if text else []


def cost(line: Line, result: Result) -> str:
    """GMACs of a method on test; where they are more than the budget, also those on dev, by which it was chosen."""
    on_dev = f" ({number(line['dev_gmacs'])} on dev)" if line["gmacs"] > result["budget_gmacs"] + 0.05 else ""
    return number(line["gmacs"]) + on_dev


def by_frames(result: Result) -> str:
    """Return the methods that choose N frames, at every N; all use the same classifier."""
    metric = result["metric"]
    lines = {(line["policy"], line["num_frames"]): line for line in result["table"] if line["num_frames"] is not None}
    counts = sorted({count for _, count in lines})
    policies = dict.fromkeys(policy for policy, _ in lines)
    rows = [[shown(policy), *(percent(lines.get((policy, n)), metric) for n in counts)] for policy in policies]
    return markdown([f"{METRICS[metric]}, %", *(f"N={n}" for n in counts)], rows)


def by_dial(result: Result) -> str:
    """Return the baselines with classifiers of their own, at every setting."""
    metric = result["metric"]
    rows = []
    for line in result["table"]:
        if line["dial"] is not None:
            spent = [number(line[key]) for key in ("frames_classified", "frames_decoded", "gmacs")]
            rows.append([shown(line["policy"].partition("@")[0]), line["dial"], *spent, percent(line, metric)])
    return markdown(["baseline", "setting", "frames", "decoded", "GMACs", f"{METRICS[metric]}, %"], rows)


def searches(result: Result) -> str:
    """Return what the search of each baseline gains over uniform frames with its own class layers."""
    metric, at = result["metric"], {line["policy"]: line for line in result["at_budget"]}
    rows = []
    for name in SYSTEMS:
        own, plain = at.get(name), at.get(name + UNIFORM_FRAMES)
        if own is not None and plain is not None:
            costs = [f"{percent(line, metric)} at {cost(line, result)}" for line in (own, plain)]
            rows.append([NAMES[name], *costs, f"{100 * (own[metric] - plain[metric]):+.1f}"])
    return markdown(["baseline", "with its search", "uniform frames, its own classifier", "gain, points"], rows)


def tuning(result: Result) -> str:
    """Say with how much effort every method was tuned."""
    epochs, others = result["asked"].get("trial_epochs"), result.get("tune_videos")
    shorter = "" if epochs is None else f", of {epochs} epochs where a method trains on pictures"
    if others is None:
        where = f"judged on the {result['videos']['dev']} dev videos"
    else:
        where = f"trained on {others['train']} and judged on {others['dev']} dev videos of another bank, "
        where += "which share no image"
    several = "1 trial" if result["trials_each"] == 1 else f"{result['trials_each']} trials"
    return f"{several} of each method{shorter}, {where}"


def earlier_run(result: Result) -> list[str]:
    """Say what a run of before SOSampler's recipes were compared one by one lacks."""
    with_uniform = any(line["policy"].endswith(UNIFORM_FRAMES) for line in result.get("at_budget", ()))
    chosen = set(result.get("chosen", {"paper": 0}))
    if "paper" in chosen or with_uniform or chosen <= {"sosampler", "first"}:
        return []
    search = f", {NAMES['adaframe']} has its earlier search, which saw two distinct frames"
    return [
        f"Of an earlier run: {TITLES['paper']} and {TITLES['authors']} were not among the methods"
        f"{search if 'adaframe' in result['chosen'] else ''}, and no baseline was given uniform frames."
    ]


def tuned_only(result: Result) -> list[str]:
    """Name the methods that have trials and no figure on test."""
    measured = {line["policy"].partition("@")[0] for line in result.get("table", [])}
    names = [shown(method) for method in result["chosen"] if method not in measured]
    return [f"Tuned, but not measured on test: {', '.join(names)}."] if names and measured else []


def trials(result: Result) -> str:
    """What every method tried, and which was taken."""
    rows = []
    for method, place in result["chosen"].items():
        own = [trial for name, trial in result["trials"].items() if name.partition("#")[0] == method]
        scores = [_score(one) for one in own]
        settings = ", ".join(f"{name} {value}" for name, value in own[place]["settings"].items()) or "its recipe"
        rows.append([shown(method), "; ".join(scores), settings])
    return markdown(["method", f"dev {METRICS[result['metric']]} of its trials, %", "taken"], rows)


def _score(trial: dict[str, Any]) -> str:
    if trial["dev"] is not None:
        return f"{100 * trial['dev']:.1f}"
    return "failed" if "failed" in trial else "over the budget"


def longer(result: Result) -> str:
    """N of more candidates; one seed."""
    metric, found = result["metric"], result["longer"]
    at = {(row["policy"], pair): row for pair, measured in found.items() for row in measured["rows"]}
    # A sampler trained with the T of its column has one line for all of them.
    policies = dict.fromkeys(_same_line(policy, pair) for policy, pair in at)
    rows = []
    for policy in policies:
        cells = [at.get((policy.replace(", as many", f", T={pair.partition('/')[2]}"), pair)) for pair in found]
        name, _, trained = policy.partition(", ")
        label = shown(name) + (f", trained with {trained}" if trained else "")
        rows.append([label, *(percent(cell, metric) for cell in cells)])
    return markdown([f"{METRICS[metric]}, %", *(pair.replace("/", " of ") for pair in found)], rows)


def _same_line(policy: str, pair: str) -> str:
    return policy.replace(f", T={pair.partition('/')[2]}", ", as many")


def sections(result: Result, title: str = "All samplers and baselines, tuned with equal effort") -> list[str]:
    """Paragraphs of one data set; what is not measured yet is left out."""
    videos = ", ".join(f"{count} {split}" for split, count in sorted(result["videos"].items()))
    text = [
        f"## {title}",
        f"{videos} videos of {result['num_classes']} classes; {tuning(result)}; the best of them with the seeds "
        f"{', '.join(map(str, result['seeds']))} on {result['device']}.",
        *earlier_run(result),
    ]
    if "at_budget" in result:
        text += [
            f"Best within {result['budget_gmacs']:.1f} GMACs (six uniform frames), N or setting chosen on dev; mean "
            "± standard deviation over seeds, without it one seed:",
            within_budget(result),
            *beside_the_table(result),
            "N of ten:",
            by_frames(result),
        ]
        if known := [line for line in result["table"] if line["policy"] == "class-frames"]:
            text += [
                f"All frames that show the class, which only an oracle knows: {percent(known[0], result['metric'])} %."
            ]
        if any(line["dial"] is not None for line in result["table"]):
            text += ["Adaptive number of frames:", by_dial(result)]
        if any(line["policy"].endswith(UNIFORM_FRAMES) for line in result["at_budget"]):
            text += [
                "Baselines learn class layers of their own. What their search is worth is the gain over "
                "uniform frames with the same layers, each within the budget:",
                searches(result),
            ]
    if "chosen" in result:
        text += ["Trials:", trials(result), *tuned_only(result)]
    return text


def longer_sections(result: Result) -> list[str]:
    """Paragraphs of the stage `longer`."""
    about = f"Samplers of ten candidates, and samplers trained with as many, first seed, on {result['device']}, by the "
    about += "mean over frames; of an earlier run than the tables above:"
    return ["## Longer videos", about, longer(result)]


PUBLISHED = ("sosampler", "ocsampler", "scsampler", *SYSTEMS)


def beside_published(results: list[Result]) -> str:
    """Every learned method: what the paper of SOSampler prints for it, and what was measured, at what cost."""
    rows = []
    for method in ("uniform", "paper", "authors", *PUBLISHED):
        cells = [_published(method)]
        for result in results:
            line = next((one for one in result["at_budget"] if one["policy"] == method), None)
            over = over_budget(result).get(method)
            if over is not None:
                cells.append(f"{percent(over, result['metric'])} at {number(over['gmacs'])} (over the budget)")
            else:
                cells.append("" if line is None else f"{percent(line, result['metric'])} at {cost(line, result)}")
        rows.append([shown(method), *cells])
    heads = [f"{one['name']}, {METRICS[one['metric']]}" for one in results]
    return of_first_recipe(markdown(["method", "published: ActivityNet, mAP", *heads], rows))


def _published(method: str) -> str:
    from sosampler.paper.experiments import read_paper

    # The paper's figure of SOSampler is of its own two recipes, not of this package's.
    wanted = {"paper": "sosampler", "authors": "sosampler", "sosampler": None, "ada3d": "ada2d"}.get(method, method)
    classifier = "slowonly50" if method == "ada3d" else "resnet50"
    own = [
        row
        for row in read_paper()["rows"]
        if (row["row"], row["classifier"], row["data"]) == (wanted, classifier, "activitynet")
        and row["table"] in ("table3", "tableII")
    ]
    before = "SlowOnly-50: " if method == "ada3d" else ""
    return f"{before}{own[0]['value']} at {own[0]['gmacs']}" if own else ""


def draw_curve(result: Result, path: Path) -> None:
    """Accuracy against cost, as .svg and .png."""
    from sosampler.figures.curves import write_cost_curve

    rows = []
    for line in result["table"]:
        name, at, dial = line["policy"].partition("@")
        if name in IN_THE_CURVE:
            # Oracles keep the names by which the figure knows them.
            title = name if line["gmacs"] is None else shown(name).strip("*")
            rows.append({**line, "policy": f"{title}{at}{dial}"})
    for suffix in (".svg", ".png"):
        write_cost_curve(rows, result["metric"], path.with_suffix(suffix), title=result["name"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--curves", type=Path, default=None, help="Folder for the curves, one a file.")
    parser.add_argument("--beside", action="store_true", help="One table: published figures, and those of all files.")
    arguments = parser.parse_args()
    results = {path: json.loads(path.read_text(encoding="utf-8")) for path in arguments.files}
    if arguments.beside:
        print(beside_published(list(results.values())))
        return
    for path, result in results.items():
        print("\n\n".join(sections(result)), end="\n\n")
        if arguments.curves is not None and "table" in result:
            draw_curve(result, arguments.curves / f"{path.stem}.svg")


if __name__ == "__main__":
    main()
