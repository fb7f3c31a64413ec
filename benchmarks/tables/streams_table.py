"""The sections of docs/results/streams.md, and what README says of streams.

`result` is streams.json; `recipes` is streams_recipes.json, an earlier run in which the recipes of the paper and of the
authors were trained beside this package's.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from benchmarks.accuracy.systems_trials import TRAINED, read_policy
from benchmarks.tables import systems_table
from benchmarks.tables.systems_table import markdown, number, percent
from sosampler.samplers.registry import TITLES

Result = dict[str, Any]
Line = dict[str, Any]

OWN = "default"
NAMES = {
    OWN: f"**{TITLES[OWN]}**",
    f"{OWN}+mean": f"{TITLES[OWN]}, mean over frames",
    f"{OWN}+weighted": f"{TITLES[OWN]}, weighted mean",
    f"{OWN}+fused": f"{TITLES[OWN]}, fused",
    f"{OWN}+probed": f"{TITLES[OWN]}, probed",
    f"{OWN}+answer": f"{TITLES[OWN]}, own answer without the classifier",
    f"{OWN}+auto": f"{TITLES[OWN]}, `auto`",
    "authors": TITLES["authors"],
    "paper": TITLES["paper"],
    "uniform": "uniform frames",
    "uniform, probe": "uniform frames, the probe's own answer",
    "random": "random frames",
    "all": "all frames",
    "class-frames": "the frames that show the class (oracle)",
    "semi-optimal": "π_s, label confidence (oracle)",
    "semi-optimal-max": "π_s, max confidence (oracle)",
    "attainable": "best under the classifier's own belief over all frames (oracle)",
    "optimal": "π_o (oracle)",
}
# What a complete comparison has besides, by policy and by bank
_OTHERS = {name: systems_table.NAMES[name] for name in systems_table.PUBLISHED if name != "sosampler"}
_BANKS = {
    "key10": "ten keyframe candidates",
    "long32": "long streams with 32 candidates",
    "long100": "long streams with 100 candidates",
}
ANSWERS = (OWN, f"{OWN}+mean", f"{OWN}+weighted", f"{OWN}+fused", f"{OWN}+probed")
ORACLES = ("class-frames", "attainable", "semi-optimal-max", "semi-optimal", "optimal")
METRIC = "top1"
SIX, ALL = 6, 10


def shown(policy: str) -> str:
    """
    >>> shown("default+nms"), shown("kts"), shown("uniform")
    ('SOSampler+ with nms', '`kts`', 'uniform frames')
    """
    base, plus, method = policy.partition("+")
    if policy in NAMES:
        return NAMES[policy]
    return f"{NAMES[base].strip('*')} with {method}" if plus and base in NAMES else f"`{policy}`"


def cells(result: Result) -> dict[tuple[str, int | None], Line]:
    """Lines of the table by policy and N."""
    return {(line["policy"], line["num_frames"]): line for line in result["table"]}


def best(result: Result) -> Line:
    """The own recipe at the N, or the tolerance of `auto`, that was best on dev within the budget."""
    own = [line for line in result["at_budget"] if line["policy"] in (OWN, f"{OWN}+auto")]
    return max(own, key=lambda line: float(line["dev"]))


def of_the_way(result: Result, value: float) -> float:
    """Share of the way from uniform frames at N=6 to the mean over the frames that show the class."""
    at = cells(result)
    low, high = at["uniform", SIX][METRIC], _class_frames(result)[METRIC]
    return float((value - low) / (high - low))


def _class_frames(result: Result) -> Line:
    return next(line for line in result["table"] if line["policy"] == "class-frames")


def frames_of(line: Line) -> str:
    """
    >>> frames_of({"num_frames": 2}), frames_of({"num_frames": None, "frames_classified": 2.53})
    ('2 frames', '2.5 frames on average')
    """
    if line["num_frames"] is not None:
        return "1 frame" if line["num_frames"] == 1 else f"{line['num_frames']} frames"
    return f"{number(line['frames_classified'])} frames on average"


def sections(
    result: Result,
    recipes: Result | None = None,
    systems: Result | None = None,
    files: Result | None = None,
    both: Result | None = None,
) -> list[str]:
    """Paragraphs of the page, with what is there of systems_streams.json, long_streams.json and recipes.json."""
    return [
        *_short(result),
        "## By the number of frames",
        f"Top-1 in % on {result['streams']['test']} test streams, mean ± standard deviation over seeds. All rows "
        "have the same classifier.",
        _by_frames(result),
        "## Within the cost of six uniform frames",
        f"N, or the tolerance of `auto`, is the best on {result['streams']['dev']} dev streams for at most "
        f"{number(result['budget_gmacs'])} GMACs. The intervals are 95 % on test and allow for clips that streams "
        "share. Most streams of a class show the same few source videos, whose part in the accuracy of the class they "
        "cannot see: they are rather too narrow.",
        _within_budget(result),
        *_known_of_test(result),
        "## `auto`",
        "One frame after another, until the belief is sure or more frames are not expected to help.",
        _auto(result),
        *_calibration(result),
        *_by_class(result),
        *_other_banks(result),
        *([] if files is None else _from_files(files)),
        *([] if systems is None else _systems(systems, recipes, result)),
        *([] if recipes is None else _recipes(recipes)),
        *([] if both is None else _both_kinds(both)),
        *_classifiers(result, recipes),
        *_notes(result, recipes, systems, files),
    ]


def _short(result: Result) -> list[str]:
    at, chosen = cells(result), best(result)
    uniform, oracle = at["uniform", SIX], _class_frames(result)
    return [
        f"{NAMES[OWN].strip('*')} with {frames_of(chosen)} (chosen on dev, {number(chosen['gmacs'])} GMACs) has "
        f"{percent(chosen, METRIC)} %{_before(result)}, uniform frames with six ({number(uniform['gmacs'])} GMACs) "
        f"{percent(uniform, METRIC)} %, all ten {percent(at['all', ALL], METRIC)} %. The mean over the frames that "
        f"show the class, if one knew which, has {percent(oracle, METRIC)} %: "
        f"{100 * of_the_way(result, chosen[METRIC]):.0f} % of the way is covered." + _over_the_way(result, chosen),
        *probe_alone(result),
    ]


def _over_the_way(result: Result, chosen: Line) -> str:
    """Return why more than the mean over the frames that show the class can be reached."""
    if of_the_way(result, chosen[METRIC]) <= 1:
        return ""
    return " It is no bound: that mean is the classifier's alone, and the sampler's class head and probe know more."


def probe_alone(result: Result) -> list[str]:
    """Return what the probe gives without the sampler, as one sentence, where that was measured."""
    lines = [line for line in result["at_budget"] if line["policy"] == "uniform, probe"]
    return [
        f"The probe alone, on {frames_of(line)} evenly spread (chosen on dev), is right in {percent(line, METRIC)} % "
        f"at {number(line['gmacs'])} GMACs; what is above that is the sampler's."
        for line in lines
    ]


def seen_of_test(result: Result) -> list[str]:
    """Return what was known of test when the probe was built, and when the rule for the other answers was made."""
    if "first_answer_rule" not in result or not _has_probe(result):
        return []
    first, fused = result["first_answer_rule"], without_probe(result)
    kept = " and ".join(f"`{kind}` for {first['kept'].count(kind)}" for kind in dict.fromkeys(first["kept"]))
    return [
        "The probe was built after test figures of the other answers, and of methods that learn class layers of their "
        "own, were known; its settings were chosen on dev.",
        f"Without it `fused` has {percent(fused, METRIC)} % with {frames_of(fused)}, chosen on dev, "
        f"{100 * of_the_way(result, fused[METRIC]):.0f} % of the way. The rule by which `train` chooses among the "
        "answers without a probe was changed after test figures of these samplers were known, too: for samplers of an "
        f"earlier run the first rule had kept {kept} of {len(first['kept'])} seeds, {percent(first['line'], METRIC)} % "
        f"with {frames_of(first['line'])}.",
    ]


def _known_of_test(result: Result) -> list[str]:
    known = seen_of_test(result)
    return [f"{' '.join(known)} [Decisions](../decisions.md#samplers-and-losses) say why."] if known else []


def without_probe(result: Result) -> Line:
    """Return the line of the fused answer within the budget."""
    return next(line for line in result["at_budget"] if line["policy"] == f"{OWN}+fused")


def _has_probe(result: Result) -> bool:
    return any(line["policy"] == f"{OWN}+probed" for line in result["table"])


def _before(result: Result) -> str:
    if not _has_probe(result):
        return ""
    value = 100 * without_probe(result)[METRIC]
    return f" ({value:.1f} % without a layer of the sampler's own on the classifier's features)"


def _by_frames(result: Result) -> str:
    lines = cells(result)
    counts = sorted({count for _, count in lines if count is not None})
    own = [name for name in NAMES if name not in ORACLES and any(policy == name for policy, _ in lines)]
    rules = [policy for policy, _ in lines if policy not in NAMES and "+auto" not in policy]
    oracles = [name for name in ORACLES if any(policy == name for policy, _ in lines)]
    rows = [
        [shown(policy), *(percent(lines.get((policy, count)), METRIC) for count in counts)]
        for policy in dict.fromkeys([*own, *rules, *oracles])
        if not policy.endswith("+auto") and any((policy, count) in lines for count in counts)
    ]
    return markdown(["", *(f"N={count}" for count in counts)], rows)


def _within_budget(result: Result) -> str:
    rows = []
    for line in sorted(result["at_budget"], key=lambda line: -line[METRIC]):
        if line["policy"] in ORACLES:
            continue
        low, high = line["ci95"][METRIC]
        rows.append(
            [
                shown(line["policy"]),
                _setting(line),
                number(line["frames_classified"]),
                number(line["gmacs"]),
                percent({METRIC: line["dev"]}, METRIC),
                percent(line, METRIC),
                f"{100 * low:.1f} to {100 * high:.1f}",
                f"{100 * of_the_way(result, line[METRIC]):.0f} %",
                str(line["seeds"]),
            ]
        )
    heads = ["", "chosen on dev", "frames", "GMACs", "dev, %", "test, %", "95 %", "of the way", "seeds"]
    return markdown(heads, rows)


def _setting(line: Line) -> str:
    """
    >>> _setting({"dial": "0.01", "num_frames": None}), _setting({"dial": None, "num_frames": None})
    ('tolerance 0.01', '')
    """
    if line["dial"] is not None:
        return f"tolerance {line['dial']}"
    return "" if line["num_frames"] is None else f"N={line['num_frames']}"


def _auto(result: Result) -> str:
    rows = [
        [line["dial"], number(line["frames_classified"]), number(line["gmacs"]), percent(line, METRIC)]
        for line in result["table"]
        if line["policy"].startswith(f"{OWN}+auto")
    ]
    return markdown(["tolerance", "frames", "GMACs", "top-1, %"], rows)


def _calibration(result: Result) -> list[str]:
    """Return how far the probabilities of each answer are from the share that is right; means over seeds."""
    errors: dict[tuple[str, int], list[float]] = {}
    for row in result.get("test", {}).get("rows", ()):
        if row["num_frames"] is not None and row["ece"] is not None:
            errors.setdefault((read_policy(row["policy"]).name, row["num_frames"]), []).append(row["ece"])
    names = [name for name in (*ANSWERS, "uniform") if any(policy == name for policy, _ in errors)]
    counts = sorted({count for policy, count in errors if policy in names})
    rows = [
        [shown(name), *(f"{100 * mean(errors[name, n]):.1f}" if (name, n) in errors else "" for n in counts)]
        for name in names
    ]
    if not rows:
        return []
    return [
        "## Calibration",
        "Expected calibration error on test in points: how far an answer's probability is from the share that is "
        "right (15 bins of equal width).",
        markdown(["", *(f"N={count}" for count in counts)], rows),
    ]


def _by_class(result: Result) -> list[str]:
    """Return what each class gains, most first; nothing where that was not measured."""
    found: dict[str, dict[str, float]] = result["test"].get("by_class", {}) if "test" in result else {}
    if not found:
        return []
    numbers = {line["num_frames"]: line for line in result["at_budget"] if line["policy"] == OWN}
    (count,) = numbers
    uniform, own, known = f"uniform@{SIX}", f"{OWN}@{count}", "class-frames@None"
    listed = sorted(found.items(), key=lambda item: item[1][uniform] - item[1][own])
    rows = []
    for label, values in listed:
        low, high = (100 * values[name] for name in (uniform, own))
        rows.append([label, f"{low:.0f}", f"{high:.0f}", f"{high - low:+.0f}", f"{100 * values[known]:.0f}"])
    lost = sum(values[own] < values[uniform] for values in found.values())
    heads = ["class", f"{SIX} uniform frames", f"{NAMES[OWN].strip('*')}, N={count}", "gain", "class frames known"]
    return [
        "## By class",
        f"Top-1 in % on test. {lost} of {len(found)} classes lose. Where even the frames that show the class are named "
        "wrong (last column), the classifier does not know the class, and only the sampler's class head and its probe "
        "can. The clips are not published. On your own streams `sosampler report` shows frames of videos that gain and "
        "of videos that lose.",
        markdown(heads, rows),
    ]


def with_own_network(systems: Result) -> list[str]:
    """Return the methods that look at all frames with the network that the own recipe trained."""
    settings = {name: systems["trials"][f"{name}#{place}"]["settings"] for name, place in systems["chosen"].items()}
    return [_OTHERS[name] for name, chosen in settings.items() if chosen.get("light") == TRAINED]


def ahead_at_their_cost(result: Result, systems: Result) -> list[Line]:
    """Return the lines of other methods that are better than the own recipe with any N that costs no more.

    Lines that cost less than one chosen frame are compared with the sampler's own answer.
    """
    own = [line for line in result["table"] if line["policy"] in (OWN, f"{OWN}+answer")]
    found = []
    for line in systems["table"]:
        if read_policy(line["policy"]).name.partition(",")[0] in _OTHERS and line.get("gmacs") is not None:
            cheaper = [other[METRIC] for other in own if other["gmacs"] <= line["gmacs"] + 1e-9]
            if not cheaper or max(cheaper) < line[METRIC]:
                found.append(line)
    return found


def _systems(systems: Result, recipes: Result | None, result: Result) -> list[str]:
    own = best(result)
    found, text = systems_table.sections(systems, "Other learned methods"), []
    ahead = [line for line in systems.get("at_budget", ()) if line["policy"] in _OTHERS and line[METRIC] > own[METRIC]]
    if ahead:
        text += [
            f"Ahead of {TITLES[OWN]} ({percent(own, METRIC)} % at {number(own['gmacs'])} GMACs) are "
            + " and ".join(
                f"{_OTHERS[line['policy']]} ({percent(line, METRIC)} % at {number(line['gmacs'])})" for line in ahead
            )
            + "."
        ]
    elif "table" in systems and not ahead_at_their_cost(result, systems):
        text += [
            f"None of them is ahead of {TITLES[OWN]} at any cost: for every line below, {TITLES[OWN]} with some number "
            "of frames, or its own answer without the classifier, is better at the same or a lower cost."
        ]
    if recipes is not None:
        trials = len(recipes["dev_trials"])
        text += [
            f"{TITLES[OWN]}, which is not among them, had {trials} trials on the same dev streams, and about forty "
            "ways to fit its probe were compared on them (first seed)."
        ]
    if names := with_own_network(systems):
        text += [
            f"Looking at all frames with the trained network of {TITLES[OWN]} was better on dev than with ImageNet's "
            f"for {', '.join(names)}, and is what stands here."
        ]
    text += [
        f"All of them learn class layers of their own from the classifier's features, as {TITLES[OWN]} does with its "
        "probe."
    ]
    return [*found[:2], " ".join(text), *found[2:]]


def _recipes(recipes: Result) -> list[str]:
    """Return this package's recipe beside those of the paper and of the authors, all of one earlier run."""
    lines = cells(recipes)
    counts = sorted({count for policy, count in lines if policy == OWN and count is not None})
    shown_rows = [name for name in (OWN, f"{OWN}+mean", "authors", "paper", "uniform") if (name, counts[0]) in lines]
    rows = [
        [shown(name), *(percent(lines[name, count], METRIC) for count in counts), str(lines[name, counts[0]]["seeds"])]
        for name in shown_rows
    ]
    behind = min(
        lines[OWN, count][METRIC] - lines[name, count][METRIC]
        for name in ("authors", "paper")
        for count in counts
        if (name, count) in lines
    )
    return [
        "## The recipes of the paper and of the authors",
        f"Of an earlier run on the same streams, with networks trained on an H200: the classifier by the same settings "
        f"(uniform frames beside it, for comparison), and {TITLES[OWN]} before the rule by which `train` keeps or "
        "drops the belief was made stricter. That was done after its figures here were known: one of its three seeds "
        "had dropped its belief, and was the worst of them. At every N the other two recipes are at least "
        f"{100 * behind:.1f} points behind. They are as they come, not tuned here.",
        markdown(["", *(f"N={count}" for count in counts), "seeds"], rows),
        recipes["half_precision"],
    ]


def _both_kinds(both: Result) -> list[str]:
    """Return recipes on dev of reels and of streams, or of what is measured of these."""
    videos = both["videos"]
    kinds, counts = [kind for kind in ("reels", "streams") if kind in both], list(both["reels"]["uniform"]["top1"])
    rows = [
        [
            "uniform frames" if name == "uniform" else name,
            *(f"{100 * both[kind][name]['top1'][count]:.1f}" for kind in kinds for count in counts),
        ]
        for name in both["reels"]
    ]
    shown_videos = " and ".join(
        f"{videos[kind]['dev']} dev {kind} ({videos[kind]['train']} to train)" for kind in kinds
    )
    return [
        "## One recipe for both kinds",
        f"Top-1 in % on {shown_videos}, one seed, {both['epochs']} epochs each, reels with a classifier of their own. "
        "The first recipe is what `default` was before; it was chosen on reels alone. Test was not used."
        + (
            "" if "streams" in both else " For dev streams there are trials of an earlier run, at the end of this page."
        ),
        markdown(["", *(f"{kind}, N={count}" for kind in kinds for count in counts)], rows),
    ]


def _classifiers(result: Result, recipes: Result | None) -> list[str]:
    tried = (recipes or result)["classifiers"]
    rows = [
        [
            f"**{name}**" if name == result["classifier"] else name,
            f"{100 * found['frames']:.1f}",
            f"{100 * found['clips']:.1f}",
        ]
        for name, found in tried.items()
    ]
    chosen = result["classifiers"][result["classifier"]]
    test, sizes = chosen["test"], chosen["sizes"]
    again = ""
    if recipes is not None:
        again = f" The trials are of the earlier run. Trained again for these figures, `{result['classifier']}` has "
        again += f"{100 * chosen['frames']:.1f} and {100 * chosen['clips']:.1f} %."
    return [
        "## The classifier",
        f"A ResNet-50 from ImageNet weights, fine-tuned on {sizes['train']} clips that no stream of train and dev "
        f"shows, chosen on {sizes['dev']} dev clips by the mean of both columns. On {sizes['test']} trimmed test clips "
        f"it names {100 * test['frames']:.1f} % of single frames and {100 * test['clips']:.1f} % of clips right. "
        "`slowonly` and `i3d` see clips; with one trial each they are not better, so the streams are classified by "
        "frames." + again,
        markdown(["trial", "frames of dev clips, %", "dev clips, %"], rows),
    ]


def _other_banks(result: Result) -> list[str]:
    text: list[str] = []
    for name, found in result.get("other_banks", {}).items():
        lines = {(line["policy"], line["num_frames"]): line for line in found["table"]}
        counts = sorted({count for _, count in lines if count is not None})
        policies = dict.fromkeys(policy for policy, count in lines if count is not None)
        known = lines.get(("class-frames", None))
        rows = [[shown(policy), *(percent(lines.get((policy, n)), METRIC) for n in counts)] for policy in policies]
        text += [
            f"## {_BANKS[name][0].upper()}{_BANKS[name][1:]}",
            markdown(["", *(f"N={count}" for count in counts)], rows),
            *([] if known is None else [f"The mean over the frames that show the class: {percent(known, METRIC)} %."]),
        ]
    return text


def _answer_of(files: Result) -> str:
    if "answer" in files:
        return f"its answer is `{files['answer']}`"
    return "it was measured before there was a probe, so its answer is `fused`"


def _from_files(result: Result) -> list[str]:
    """Return speed and accuracy from the file of a long stream to its label."""
    rows = []
    for line in result["rows"]:
        low, high = line["ci95"]
        between = [100 * bound for bound in line["above_reference_ci95"]]
        rows.append(
            [
                line["variant"],
                number(line["gmacs"]),
                f"{100 * line[METRIC]:.1f} ({100 * low:.1f} to {100 * high:.1f})",
                ""
                if line["variant"] == line["reference"]
                else f"{100 * line['above_reference']:+.1f} ({between[0]:+.1f} to {between[1]:+.1f})",
                f"{line['times_as_fast']:.2f}",
            ]
        )
    shortest, longest = result["minutes"]
    machine = f"{result['machine']['cores']} cores of {result['machine']['cpu']}"
    heads = ["variant", "GMACs", "top-1, %", "points above the reference", "times as fast"]
    return [
        "## From the file of a long stream to its label",
        f"{result['videos']} test videos of {shortest:.1f} to {longest:.1f} minutes, as x264 encodes them by default, "
        f"one after the other on {machine}, every decoder with {result['threads']} threads. The sampler (first seed) "
        f"chooses among keyframes; {_answer_of(result)}. Uniform frames are read by torchcodec, which in its exact "
        "mode first reads the whole file and in its approximate mode trusts the header; the same classifier runs in "
        "the same engine. The "
        f"reference is `{result['rows'][0]['reference']}`. All variants take turns at each video "
        "(`benchmarks/results/long_streams.json`).",
        markdown(heads, rows),
    ]


def _notes(result: Result, recipes: Result | None, systems: Result | None, files: Result | None) -> list[str]:
    text = []
    if recipes is not None:
        text.append(
            f"The recipe of {TITLES[OWN]} was found by {len(recipes['dev_trials'])} trials on the dev streams of the "
            "earlier run, one seed each (`dev_trials` in `benchmarks/results/streams_recipes.json`: dev top-1 at every "
            f"N). The first of them is the first recipe: {_best_trial(recipes, 0)} %, the one that was taken has "
            f"{_best_trial(recipes, None)} %."
        )
    known = {
        line["policy"].partition("@")[0]
        for each in (result, recipes, systems)
        for line in (each or {}).get("table", [])
    }
    missing = [title for name, title in _OTHERS.items() if name not in known]
    missing += [title for name, title in _BANKS.items() if name not in result.get("other_banks", {})]
    if files is None:
        missing.append("the time from a long file to its label")
    if missing:
        text.append(f"Not measured on streams: {', '.join(missing)}.")
    return ["## How the figures came about", " ".join(text)] if text else []


def _best_trial(recipes: Result, place: int | None) -> str:
    """Return the dev score of a trial at its best N; None: of the best trial."""
    scores = [trial["dev"] for trial in recipes["dev_trials"]]
    return f"{100 * (max(scores) if place is None else scores[place]):.1f}"


def headline(result: Result) -> str:
    """One sentence for the top of README."""
    at, chosen = cells(result), best(result)
    return (
        f"On untrimmed videos composed of real clips of {result['num_classes']} actions, a ResNet-50 with "
        f"{frames_of(chosen)} of {ALL} that the sampler chose is right in {100 * chosen[METRIC]:.1f} %"
        f"{_before(result)}. {SIX} uniform frames give {100 * at['uniform', SIX][METRIC]:.1f} %, all {ALL} frames "
        f"{100 * at['all', ALL][METRIC]:.1f} %."
    )


def cells_of(result: Result, policy: str, counts: Sequence[int]) -> list[str]:
    """Return the row of README for a policy; all frames stand in the row of uniform ones."""
    at = cells(result)
    lines = [at.get((policy, count), at.get(("all", count)) if policy == "uniform" else None) for count in counts]
    return ["" if line is None else f"{100 * line[METRIC]:.1f}" for line in lines]
