"""Check the paper's claims on the data at hand: figures with intervals, and a verdict by a stated criterion.

The figures come from the files of paper_runs.py, systems.py, samplers.py and independence.py, as far as they are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.tables.paper_tables import FROM_NOTHING
from benchmarks.tables.systems_table import NAMES, PUBLISHED, cost, shown
from sosampler.samplers.registry import TITLES

Result = dict[str, Any]
Files = Mapping[str, Result]  # by name, those of paper_runs.py as "paper/NAME"

HOLDS, FAILS, OPEN = "holds", "does not hold", "undecided"
ONE_RATE = "not counted: one learning rate for both"
NOTHING = "not measured yet"
REAL_CLIPS = ("yoga", "airtlab", "golfdb")
N_OF_T = (6, 10)
CLAIMED_RATE = 1.0  # frames a second
RECIPE_ROWS = {"default": "sosampler", "paper": "paper", "authors": "authors"}  # their rows in systems.py
RIVALS = tuple(name for name in PUBLISHED if name not in RECIPE_ROWS.values())
T_VALUE = 2.776  # 97.5 % of Student's t with four degrees of freedom: two means of three seeds


class Range(NamedTuple):
    """A difference in points and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.1f} ({self.low:+.1f} to {self.high:+.1f})"

    def minus(self, other: Range) -> Range:
        """The difference of two independent ones, whose distances to their bounds add up as squares do.

        >>> print(Range(10, 7, 13).minus(Range(4, 0, 8)))
        +6.0 (+1.0 to +11.0)
        """
        value = self.value - other.value
        down = math.hypot(self.value - self.low, other.high - other.value)
        up = math.hypot(self.high - self.value, other.value - other.low)
        return Range(value, value - down, value + up)


def verdict(difference: Range) -> str:
    """Return the verdict on a claim that a difference is above 0.

    >>> [verdict(Range(*result)) for result in ((2, 1, 3), (-2, -3, -1), (1, -1, 3))]
    ['holds', 'does not hold', 'undecided']
    """
    return HOLDS if difference.low > 0 else FAILS if difference.high < 0 else OPEN


@dataclass(frozen=True)
class Evidence:
    """One measurement for or against a claim."""

    where: str
    figures: str
    verdict: str


@dataclass(frozen=True)
class Claim:
    title: str
    rule: str
    evidence: Callable[[Files], Iterable[Evidence]]
    more: Callable[[Files], list[str]] = lambda _: []  # paragraphs below the table


# ---- reading figures


def contrast(files: Files, name: str, experiment: str, which: str, pair: tuple[int, int] | None = None) -> Range | None:
    """A paired difference of paper_runs.py; the first N of T where none is named."""
    rows = files.get(f"paper/{name}", {}).get("experiments", {}).get(experiment, {}).get("contrasts", [])
    for row in rows:
        if row["name"] == which and pair in (None, (row["num_frames"], row["num_candidates"])):
            return Range(row["difference"], *row["ci95"])
    return None


def to_uniform(rows: Iterable[Mapping[str, Any]], policy: str, pair: tuple[int, int] = N_OF_T) -> Range | None:
    """Points above uniform of all seeds of a policy in rows of an evaluation; bounds are averaged with the values."""
    differences = [
        row["versus_uniform"]
        for row in rows
        if (row["num_frames"], row["num_candidates"]) == pair and _is_seed_of(row["policy"], policy)
    ]
    if not differences or any(each is None or each.get("ci95") is None for each in differences):
        return None
    columns = [[each["difference"], *each["ci95"]] for each in differences]
    return Range(*(100 * sum(column) / len(column) for column in zip(*columns, strict=True)))


def _is_seed_of(name: str, policy: str) -> bool:
    base, _, seed = name.partition("#")
    return base == policy and (not seed or seed.isdecimal())


def run_name(result: Result) -> str:
    network = str(result["classifier"]["name"])
    return f"{result['bank']['name']}, {network}" + (", trained from scratch" if network in FROM_NOTHING else "")


def _runs(files: Files) -> list[tuple[str, Result]]:
    return [(name.removeprefix("paper/"), result) for name, result in files.items() if name.startswith("paper/")]


def _systems(files: Files) -> list[tuple[str, list[Result]]]:
    """Rows on test of systems.py's files."""
    found = [(name, files.get(f"systems_{name}", {}).get("test", {}).get("rows")) for name in ("reels", *REAL_CLIPS)]
    return [(name, rows) for name, rows in found if rows]


# ---- the claims


def near_optimal(files: Files) -> Iterable[Evidence]:
    for name, result in _runs(files):
        half = contrast(files, name, "table1", "pi_s - half way to pi_o")
        both = [contrast(files, name, "table1", f"{who} - uniform") for who in ("pi_s", "pi_o")]
        if half is not None and None not in both:
            figures = f"π_s {both[0]}, π_o {both[1]} above uniform; π_s above half way: {half}"
            yield Evidence(run_name(result), figures, verdict(half))
    for name, rows in _systems(files):
        ours, best = to_uniform(rows, "semi-optimal"), to_uniform(rows, "optimal")
        if f"paper/{name}" not in files and ours is not None and best is not None:
            half = ours.minus(Range(*(0.5 * bound for bound in best)))
            figures = f"π_s {ours}, π_o {best} above uniform; π_s above half way: {half}, as if not paired"
            yield Evidence(f"{name}, resnet50", figures, verdict(half))


def _of_table6(*names: str) -> Callable[[Files], Iterable[Evidence]]:
    def found(files: Files) -> Iterable[Evidence]:
        for name, result in _runs(files):
            for which in names:
                difference = contrast(files, name, "table6", which)
                if difference is not None:
                    guided = ", with label guidance" if which.endswith("guidance") else ""
                    yield Evidence(f"{run_name(result)}{guided}", str(difference), verdict(difference))

    return found


def between_seeds(one: Result, other: Result, metric: str = "top1") -> Range:
    """Return the difference of two means over three seeds each, with an interval from the seeds' spread alone.

    >>> print(between_seeds({"top1": 0.9, "top1_sd": 0.01, "seeds": 3}, {"top1": 0.88, "top1_sd": 0.01, "seeds": 3}))
    +2.0 (-0.3 to +4.3)
    """
    error = math.sqrt(sum(row[f"{metric}_sd"] ** 2 / row["seeds"] for row in (one, other)))
    value = one[metric] - other[metric]
    return Range(*(100 * number for number in (value, value - T_VALUE * error, value + T_VALUE * error)))


def ranking_is_better(files: Files) -> Iterable[Evidence]:
    """Each loss with the rate that is best for it on dev; then the paper's table, where one rate decides."""
    lines = {
        row["policy"]: row
        for row in files.get("losses", {}).get("table", [])
        if (row["num_frames"], row["num_candidates"]) == N_OF_T
    }
    for loss, title in (("mse", "MSE"), ("l2", "the printed L2 norm")):
        if loss in lines and "hinge" in lines:
            difference = between_seeds(lines["hinge"], lines[loss])
            figures = f"ranking {_mean(lines['hinge'])}, {title} {_mean(lines[loss])}; difference {difference}"
            yield Evidence(f"reels, resnet50, own rates, against {title}", figures, verdict(difference))
    for each in _of_table6("ranking - MSE", "ranking - MSE, label guidance")(files):
        yield Evidence(each.where, each.figures, ONE_RATE)


def _mean(row: Result, metric: str = "top1") -> str:
    return f"{100 * row[metric]:.1f} ± {100 * row[f'{metric}_sd']:.1f}"


def ahead_at_equal_cost(files: Files) -> Iterable[Evidence]:
    """The three recipes against the best other method within the cost of six uniform frames, on reels."""
    systems, budget = files.get("systems_reels", {}), files.get("systems_reels", {}).get("budget_gmacs")
    others = [row for row in systems.get("at_budget", []) if row["policy"] in RIVALS and row.get("top1_sd") is not None]
    if not others:
        return
    best = max(others, key=lambda row: row["top1"])
    measured = {row["policy"]: row for row in systems["at_budget"]}
    for recipe, name in RECIPE_ROWS.items():
        own = measured.get(name)
        how = "N by dev"
        if own is None:  # not among the methods that were tuned: its best N on test
            rows = [row for row in files.get("samplers", {}).get("table", []) if row["policy"] == recipe]
            within = [row for row in rows if row["num_candidates"] == N_OF_T[1] and row["gmacs"] <= budget]
            if not within:
                continue
            own, how = max(within, key=lambda row: row["top1"]), "not tuned, its best N on test"
        difference = between_seeds(own, best)
        figures = (
            f"{_mean(own)} at {own['gmacs']:.1f} GMACs ({how}); {NAMES[best['policy']]} {_mean(best)} at "
            f"{best['gmacs']:.1f}; difference {difference}"
        )
        yield Evidence(f"reels, resnet50, {TITLES[recipe]}", figures, verdict(difference))


def order_as_found(files: Files) -> list[str]:
    """All learned methods of reels within the budget, the best first."""
    systems = files.get("systems_reels", {})
    learned = {*RECIPE_ROWS.values(), *RIVALS}
    rows = [row for row in systems.get("at_budget", []) if row["policy"] in learned and row.get("top1_sd") is not None]
    if not rows:
        return []
    named = [
        f"{shown(row['policy']).strip('*')} {_mean(row)} at {cost(row, systems)}"
        for row in sorted(rows, key=lambda row: -row["top1"])
    ]
    return [f"The order as found, top-1 in % at GMACs: {'; '.join(named)}."]


def ocsampler_fails(files: Files) -> Iterable[Evidence]:
    for name, result in _runs(files):
        for pair in ((8, 30), (16, 60), (32, 100)):
            ours, theirs = (
                contrast(files, name, "table5", f"{who} - uniform", pair) for who in ("sosampler", "ocsampler")
            )
            if ours is not None and theirs is not None:
                yield _against_uniform(run_name(result), pair, theirs, ours, TITLES["paper"])
    for key, found in files.get("systems_reels_longer", {}).get("longer", {}).items():
        frames, candidates = (int(number) for number in key.split("/"))
        pair = frames, candidates
        names = [f"{who}, T={candidates}" for who in ("sosampler", "ocsampler")]
        ours, theirs = (to_uniform(found["rows"], name, pair) for name in names)
        if ours is not None and theirs is not None:
            yield _against_uniform("reels of systems.py, resnet50", pair, theirs, ours, TITLES["default"])


def _against_uniform(where: str, pair: tuple[int, int], theirs: Range, ours: Range, name: str) -> Evidence:
    below = Range(-theirs.value, -theirs.high, -theirs.low)
    figures = f"OCSampler {theirs}, {name} {ours} to uniform"
    return Evidence(f"{where}, {pair[0]} of {pair[1]}", figures, verdict(below))


def shrinks_on_short_videos(files: Files) -> Iterable[Evidence]:
    sources: list[tuple[str, Callable[[str], Range | None]]] = [
        (TITLES["paper"], lambda name: contrast(files, name, "table6", "sosampler - uniform")),
        (TITLES["default"], lambda name: gain(files, name)),
    ]
    for title, gain_on in sources:
        long = gain_on("reels10" if title == TITLES["paper"] else "reels")
        for name in REAL_CLIPS:
            short = gain_on(name)
            if long is not None and short is not None:
                difference = long.minus(short)
                figures = f"reels {long}, {name} {short} above uniform; difference {difference}"
                yield Evidence(f"{name}, {title}", figures, verdict(difference))


def gain(files: Files, name: str) -> Range | None:
    """Return SOSampler+'s gain over uniform by systems.py; on reels, if that was not run, by samplers.py."""
    rows = dict(_systems(files)).get(name)
    if rows is None and name == "reels":
        return to_uniform(files.get("samplers", {}).get("rows", []), "default")
    return None if rows is None else to_uniform(rows, "sosampler")


def independent(files: Files) -> Iterable[Evidence]:
    for name, found in files.get("independence", {}).get("sets", {}).items():
        yield from _at_claimed_rate(f"{name}, ImageNet ResNet-50", found["rows"], found["classifiers"][0]["verdict"])
    for name, result in _runs(files):
        figure = result["experiments"].get("figure1")
        if figure is not None:
            yield from _at_claimed_rate(f"{name}, stored frames", figure["rows"], figure["verdict"])


def _at_claimed_rate(where: str, rows: Iterable[Result], up_to: float | None) -> Iterable[Evidence]:
    row = next((row for row in rows if row["rate"] == CLAIMED_RATE and row["redundant"] is not None), None)
    words = "at no measured rate" if up_to is None else f"up to {up_to:g} fps"
    if row is None:
        yield Evidence(where, f"no pairs at 1 fps; independent {words}", OPEN)
        return
    bounds = row.get("redundant_ci95")
    range_of = "" if bounds is None else f" ({100 * bounds[0]:.0f} to {100 * bounds[1]:.0f})"
    figures = f"{100 * row['redundant']:.0f} %{range_of} of the pairs at 1 fps are redundant; independent {words}"
    yield Evidence(where, figures, HOLDS if up_to is not None and up_to >= CLAIMED_RATE else FAILS)


CLAIMS = (
    Claim(
        "π_s is near π_o",
        "Near means at least half of π_o's gain over uniform (the paper's own figures: 80 % with ResNet-50, 53 % with "
        "TimeSformer). So the difference is π_s minus half way.",
        near_optimal,
    ),
    Claim(
        "Ranking is better than squared errors",
        "Ranking minus squared errors, 6 of 10 frames, both on the label's confidence. Each loss has the learning rate "
        "that is best for it on dev; the interval is over seeds. In the paper's table both have one rate, at which the "
        "gradient of MSE is hundreds of times smaller; those rows are shown and not counted.",
        ranking_is_better,
    ),
    Claim(
        "SOSampler is ahead of the other learned methods at equal cost",
        "The recipe minus the best other method on reels, within the GMACs of six uniform frames. The interval is over "
        "seeds.",
        ahead_at_equal_cost,
        order_as_found,
    ),
    Claim(
        "The highest confidence is a better target than the label's",
        "Max minus label, 6 of 10 frames, both ranked with label guidance.",
        _of_table6("max - label"),
    ),
    Claim(
        "OCSampler fails at large N and T",
        "Uniform minus OCSampler: the paper has it below uniform from 16 of 60 on.",
        ocsampler_fails,
    ),
    Claim(
        "The gain shrinks on short videos",
        "A sampler's gain over uniform on reels, which are untrimmed by construction, minus that on short clips, 6 of "
        "10 frames. The sets also differ in classes, metric and size.",
        shrinks_on_short_videos,
    ),
    Claim(
        "Frames are independent up to one a second",
        "By the criterion of `sosampler independence`: holds where it finds independence up to 1 fps or "
        "more; undecided where no pair of frames lies a second apart.",
        independent,
    ),
)


def sections(files: Files) -> list[str]:
    """Paragraphs."""
    text = [
        "A claim says that a difference is above 0. It holds where the whole 95 % interval is above 0, and does not "
        "hold where the whole interval is below. It is undecided where the interval contains 0. Figures are points of "
        "the metric. Intervals are over resamples of the videos, those of `reels` also of the images that its videos "
        "share (not those of `reels10`, `reels100` and `clips10`, which are older). They do not cover another training "
        "or other data.",
    ]
    for claim in CLAIMS:
        evidence = list(claim.evidence(files))
        text += [f"## {claim.title}", claim.rule]
        if not evidence:
            text.append(f"{NOTHING.capitalize()}.")
            continue
        rows = [f"| {each.where} | {each.figures} | {each.verdict} |" for each in evidence]
        table = "\n".join(["| where | figures | verdict |", "|---|---|---|", *rows])
        text += [table, in_short(evidence), *claim.more(files)]
    return text


def in_short(evidence: Iterable[Evidence]) -> str:
    """
    >>> in_short([Evidence("a", "", HOLDS), Evidence("b", "", OPEN), Evidence("c", "", HOLDS)])
    'Holds in 2 of 3, does not hold in 0, undecided in 1.'
    """
    counted = (HOLDS, FAILS, OPEN)
    verdicts = [each.verdict for each in evidence if each.verdict in counted]
    counts = {name: verdicts.count(name) for name in counted}
    return f"Holds in {counts[HOLDS]} of {len(verdicts)}, {FAILS} in {counts[FAILS]}, {OPEN} in {counts[OPEN]}."
