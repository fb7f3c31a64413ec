"""What systems.py compares: the methods, the settings that each may try, and how the best is found."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Settings = dict[str, Any]
Row = dict[str, Any]

NUM_CANDIDATES = 10
NUM_FRAMES = (1, 2, 3, 4, 5, 6, 8)  # five with a sampler cost about as much as six without
BUDGET_FRAMES = 6  # trials that cost more than so many evenly spread frames, on the mean, are not chosen

RULES = ("uniform", "random", "all")
ORACLES = ("semi-optimal-max", "attainable", "class-frames", "semi-optimal", "optimal")
METHODS = ("aks", "its", "nms")
SELECTORS = (
    "frame-difference",
    "difference-peaks",
    "motion-uniform",
    "farthest-first",
    "dpp",
    "kts",
    "thumbnail",
    *(f"frame-difference+{method}" for method in METHODS),
)

TRAINED = "sosampler"  # light features of the sampler that the first trial of this method trains, or its seed

FIRST = "first"  # what the recipe `default` was before; measured only where it is named
FIRST_SETTINGS: Settings = {
    "freeze": 0.0,
    "dropout": 0.0,
    "lam": 0.9,
    "guidance": "logits",
    "distill": 1.0,
    "calibrate": 1.0,
}

# Arguments of `so.train`, the method's own recipe first. `--trials` takes so many from the front, of every method.
TRIALS: dict[str, tuple[Settings, ...]] = {
    "sosampler": (
        {},
        {"lr": 3e-4},
        {"shift": 10},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"lr": 3e-3},
    ),
    FIRST: (FIRST_SETTINGS,),
    # Both papers start from a sampler's network that was trained on the labels.
    "paper": (
        {"recipe": "paper"},
        {"recipe": "paper", "pretrain": 4},
        {"recipe": "paper", "pretrain": 4, "lr": 1e-2},
        {"recipe": "paper", "lr": 1e-2},
        {"recipe": "paper", "pretrain": 4, "lr": 1e-1},
        {"recipe": "paper", "pretrain": 10, "lr": 1e-2},
    ),
    "authors": (
        {"recipe": "authors"},
        {"recipe": "authors", "pretrain": 4},
        {"recipe": "authors", "pretrain": 4, "lr": 0.05},
        {"recipe": "authors", "lr": 0.05},
        {"recipe": "authors", "pretrain": 4, "dropout": 0.0},
        {"recipe": "authors", "pretrain": 10},
    ),
    "ocsampler": (
        {},
        {"reinforce": {"reward": "label"}, "pretrain": 4},
        {"reinforce": {"reward": "label"}, "optimizer": "adamw", "lr": 1e-3, "warmup": 0.1, "clip": 5.0},
        {"reinforce": {"reward": "label", "entropy": 0.01}, "lr": 0.02},
        {"reinforce": {"reward": "label", "num_frames": 3}, "lr": 0.02},
        {"reinforce": {"entropy": 0.01}, "lr": 0.02},
    ),
    "scsampler": (
        {"recipe": "scsampler-rank"},
        {"recipe": "scsampler-ac"},
        {"recipe": "scsampler-rank", "lr": 3e-4},
        {"recipe": "scsampler-ac", "lr": 3e-4},
        {"recipe": "scsampler-rank", "margin": 0.1},
        {"recipe": "scsampler-ac", "lr": 3e-3},
    ),
    "frameexit": (  # gates learn from losses on train, which are small; a smaller beta looks at more frames
        {},
        {"beta": 1e-4},
        {"beta": 1e-4, "lr": 3e-4},
        {"beta": 1e-5, "lr": 1e-4},
        {"beta": 1e-2},
        {"beta": 1e-1, "lr": 3e-4},
    ),
    "liteeval": (
        {},
        {"target": 0.5},
        {"target": 0.5, "light": TRAINED},
        {"budget_per": "video"},
        {"lr": 3e-4},
        {"target": 0.5, "lr": 3e-4},
        {"lr": 3e-3},
    ),
    "adaframe": (
        {},
        {"lr": 3e-4},
        {"light": TRAINED},
        {"rollouts": 4},
        {"rollouts": 4, "deviation": 0.2, "lr": 3e-4},
        {"deviation": 0.2},
        {"lr": 3e-3},
    ),
    "marl": (
        {},
        {"lr": 3e-4},
        {"entropy_weight": 0.1},
        {"agents": 5},
        {"agents": 5, "lr": 3e-4},
        {"lr": 3e-3},
    ),
    "ar-net": (  # alpha: weight of the labels against the cost
        {},
        {"alpha": 0.9},
        {"lr": 3e-4},
        {"alpha": 0.8},
        {"alpha": 0.9, "lr": 3e-4},
        {"balance": 1.0},
    ),
    "videoiq": (
        {},
        {"efficiency": 0.5},
        {"lr": 3e-4},
        {"dropout": 0.5},
        {"efficiency": 0.5, "lr": 3e-4},
        {"balance": 0.5},
    ),
    "adafocus": (  # a patch of 96 of 176 pixels has the share of the frame that 128 of 224 has
        {"patch": 96, "grid": 5},
        {"patch": 96, "grid": 5, "lr": 1e-3},
        {"patch": 96, "grid": 5, "dropout": 0.8},
        {"patch": 128, "grid": 5},
        {"patch": 128, "grid": 5, "lr": 1e-3},
        {"patch": 96, "grid": 5, "entropy_weight": 0.001},
    ),
    "adafuse": (
        {},
        {"efficiency": 0.2},
        {"lr": 3e-3},
        {"efficiency": 0.4},
        {"efficiency": 0.2, "lr": 3e-3},
        {"train_backbone": False},
    ),
    "ada3d": (
        {},
        {"frames_penalty": 2.0},
        {"lr": 3e-4},
        {"frames_penalty": 0.5},
        {"frames_penalty": 2.0, "lr": 3e-4},
        {"convs_penalty": 0.5},
    ),
    "listen-to-look": (
        {},
        {"steps": 2},
        {"light": TRAINED},
        {"lr": 3e-4},
        {"steps": 2, "lr": 3e-4},
        {"lr": 3e-3},
    ),
}
# Trials where classes have few clips (`--few-clips`), at least two a method: samplers may leave most of their network
# as ImageNet left it, as the recipe `default` does.
FROZEN: Settings = {"freeze": 0.75}
FEW_CLIPS: dict[str, tuple[Settings, ...]] = {
    "sosampler": ({}, {"freeze": 0.5}, {"freeze": 0.0}),
    "paper": ({"recipe": "paper"}, {"recipe": "paper", "lr": 1e-2, **FROZEN}),
    "authors": ({"recipe": "authors"}, {"recipe": "authors", **FROZEN}),
    "ocsampler": ({}, {"reinforce": {"reward": "label"}, **FROZEN}),
    "scsampler": ({"recipe": "scsampler-rank", **FROZEN}, {"recipe": "scsampler-ac", **FROZEN}),
    "liteeval": ({"target": 0.5}, {"target": 0.5, "light": TRAINED}),
    "adaframe": ({}, {"light": TRAINED}),
    "listen-to-look": ({}, {"light": TRAINED}),
}
# Methods that are recipes of another sampler
SAMPLERS = {FIRST: "sosampler", "paper": "sosampler", "authors": "sosampler"}
# Train on pictures and then choose N frames
PICTURES = ("sosampler", FIRST, "paper", "authors", "ocsampler", "scsampler")
# Systems that run networks on pictures or patches in training; those that are left read features
HEAVY = ("adafocus", "adafuse", "ada3d")
# Systems that read pixels, and how they divide the epochs of a trial where trials on pictures are shorter
PIXELS: dict[str, dict[str, float]] = {"adafuse": {"drawn": 0.75, "likeliest": 0.25}, "ada3d": {"policy": 1.0}}
# Folders of networks.py that a system needs
NETWORKS = {"ar-net": ("r34", "r18"), "videoiq": ("any_precision",), "ada3d": ("slowonly",)}

UNIFORM, OWN_CLASSIFIER = "uniform", ", uniform frames"


def trial_epochs(method: str, shorter: int | None) -> int | dict[str, int] | None:
    """Epochs of a trial; None: those of the recipe.

    >>> trial_epochs("paper", 4), trial_epochs("adafuse", 4), trial_epochs("marl", 4)
    (4, {'drawn': 3, 'likeliest': 1}, None)
    """
    if shorter is None or method in PICTURES:
        return shorter
    shares = PIXELS.get(method)
    return None if shares is None else {phase: max(1, round(share * shorter)) for phase, share in shares.items()}


_POLICY = re.compile(r"(?P<base>[^#@+]+)(#(?P<seed>\w+))?(?P<method>\+\w+)?(@(?P<dial>.+))?")


class Policy(NamedTuple):
    """What the name of a row says."""

    name: str  # with a method behind it, without seed and dial
    seed: str  # or trial; "" where there is none
    dial: str  # of a system, "" for others


def read_policy(text: str) -> Policy:
    """
    >>> read_policy("sosampler#1+aks"), read_policy("frameexit#0@0.5").dial
    (Policy(name='sosampler+aks', seed='1', dial=''), '0.5')
    >>> read_policy("marl#0@uniform@3")
    Policy(name='marl, uniform frames', seed='0', dial='3')
    """
    found = _POLICY.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not the name of a row of this benchmark")
    name, dial = found["base"] + (found["method"] or ""), found["dial"] or ""
    if dial.startswith(UNIFORM):  # its own class layers without its search
        name, dial = name + OWN_CLASSIFIER, dial.removeprefix(f"{UNIFORM}@")
    return Policy(name, found["seed"] or "", dial)


def is_of(policy: str, name: str) -> bool:
    """
    >>> is_of("marl#0@uniform@3", "marl#0"), is_of("marl#0", "marl#0"), is_of("marl#01", "marl#0")
    (True, True, False)
    """
    return policy == name or policy.startswith((f"{name}+", f"{name}@"))


def budget_of(rows: Iterable[Row]) -> float:
    """GMACs of evenly spread frames."""
    (found,) = (row["gmacs"] for row in rows if row["policy"] == "uniform" and row["num_frames"] == BUDGET_FRAMES)
    return float(found)


def best_within(rows: Iterable[Row], metric: str, budget: float) -> Row | None:
    """The best row that costs no more than the budget on the mean; of equal ones the cheapest."""
    allowed = [row for row in rows if row["gmacs"] is not None and row["gmacs"] <= budget + 1e-9]
    return max(allowed, key=lambda row: (row[metric], -row["gmacs"]), default=None)


def best_trial(trials: Sequence[dict[str, Any]]) -> int:
    """Place of the trial with the highest dev score; of equal ones the cheapest, then the first.

    Where none keeps within the budget, that which comes nearest to it: it has no place at the budget, but in the curve.
    """
    scored = [place for place, trial in enumerate(trials) if trial.get("dev") is not None]
    if scored:
        return max(scored, key=lambda place: (trials[place]["dev"], -trials[place]["at"]["gmacs"], -place))
    cheapest = {
        place: min(row["gmacs"] for row in trial["curve"]) for place, trial in enumerate(trials) if trial.get("curve")
    }
    if not cheapest:
        result = "; ".join(str(trial.get("failed")) for trial in trials)
        raise SystemExit(f"no trial of {trials[0]['method'] if trials else 'a method'} can be chosen: {result}")
    return min(cheapest, key=lambda place: cheapest[place])


def means(rows: Iterable[Row], metric: str) -> list[Row]:
    """One line a policy and N, or dial: means over seeds, the standard deviation where there are several.

    The interval is the mean of the seeds' intervals, each of them over videos.
    """
    groups: dict[tuple[str, int | None, str, int], list[Row]] = {}
    for row in rows:
        name, _, dial = read_policy(row["policy"])
        groups.setdefault((name, row["num_frames"], dial, row["num_candidates"]), []).append(row)
    lines = []
    for (name, num_frames, dial, num_candidates), found in groups.items():
        line: Row = {"policy": f"{name}@{dial}" if dial else name, "num_frames": num_frames, "dial": dial or None}
        line |= {"num_candidates": num_candidates, "seeds": len(found)}
        for key in (metric, "confidence", "fidelity", "recovered", "gmacs", "frames_classified", "frames_decoded"):
            values = [row[key] for row in found if row[key] is not None]
            line[key] = round(statistics.mean(values), 5) if values else None
            if len(values) > 1:
                line[f"{key}_sd"] = round(statistics.stdev(values), 5)
        if others := [row["other_gmacs"] for row in found if row.get("other_gmacs")]:
            line["other_gmacs"] = {
                name: round(statistics.mean(other[name] for other in others), 5) for name in others[0]
            }
        bounds = [row["ci95"][metric] for row in found if metric in row["ci95"]]
        if bounds:
            line["ci95"] = {metric: [round(statistics.mean(side), 5) for side in zip(*bounds, strict=True)]}
        lines.append(line)
    return lines


def at_budget(dev: Sequence[Row], test: Sequence[Row], metric: str, budget: float) -> list[Row]:
    """For each policy the N or dial that is best on dev within the budget, with what it does on test.

    `dev`, `test`: lines of `means`. Oracles have no cost and are left out.
    """
    names = dict.fromkeys(line["policy"].partition("@")[0] for line in dev)
    found = []
    for name in names:
        best = best_within((line for line in dev if line["policy"].partition("@")[0] == name), metric, budget)
        if best is not None:
            same = ("policy", "num_frames", "num_candidates")
            line = next(line for line in test if all(line[key] == best[key] for key in same))
            found.append({**line, "policy": name, "dev": best[metric], "dev_gmacs": best["gmacs"]})
    return found
