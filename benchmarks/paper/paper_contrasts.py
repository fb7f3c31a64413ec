"""Differences between rows of one table, paired by video, and the small JSON file of a place.

`reproduce` compares every row with uniform. What the paper claims is mostly about two other rows: these differences are
made here from what the run kept of every video, with the same bootstrap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler.classifiers.base import activate
from sosampler.evaluation.result import Resamples, interval, multi_hot, resample_counts

CONTRASTS = "contrasts.json"
DRAWS = 2000
HALF = 0.5
_KEPT = (
    *("experiment", "kind", "title", "claim", "metric", "unit", "seeds", "paper", "rows", "left_out", "notes"),
    *("bandwidth", "verdict", "refused"),
)
_OF_RUN = ("device", "versions", "machine", "git", "begun", "ended")

Draws = NDArray[np.float64]  # a metric on all videos, then on each resample
Result = dict[str, Any]


@dataclass(frozen=True)
class Contrast:
    """A sum of rows, each with a weight; made for every N of T that all of them have."""

    name: str
    weights: Mapping[str, float]


_LONG = (
    Contrast("sosampler - ocsampler", {"sosampler": 1, "ocsampler": -1}),
    Contrast("our recipe - ocsampler", {"sosampler-default": 1, "ocsampler": -1}),
    Contrast("ocsampler - uniform", {"ocsampler": 1, "uniform": -1}),
    Contrast("sosampler - uniform", {"sosampler": 1, "uniform": -1}),
    Contrast("our recipe - uniform", {"sosampler-default": 1, "uniform": -1}),
)
OF_EXPERIMENT: dict[str, tuple[Contrast, ...]] = {
    "table1": (
        Contrast("pi_o - uniform", {"optimal": 1, "uniform": -1}),
        Contrast("pi_s - uniform", {"semi-optimal": 1, "uniform": -1}),
        Contrast("pi_o - pi_s", {"optimal": 1, "semi-optimal": -1}),
        Contrast("pi_s - half way to pi_o", {"semi-optimal": 1, "uniform": -HALF, "optimal": -HALF}),
    ),
    "table6": (
        Contrast("ranking - MSE", {"ranking-label": 1, "mse-label": -1}),
        Contrast("ranking - MSE, label guidance", {"ranking-label-lg": 1, "mse-label-lg": -1}),
        Contrast("max - label", {"ranking-max-lg": 1, "ranking-label-lg": -1}),
        Contrast("label guidance - none", {"ranking-label-lg": 1, "ranking-label": -1}),
        Contrast("sosampler - uniform", {"ranking-max-lg": 1, "uniform": -1}),
    ),
    "table5": _LONG,
    "figure4": _LONG,
    "table7": _LONG[-2:],
}


# ---- from the files of one experiment


def write_contrasts(folder: Path, bank: Path) -> list[Result]:
    """contrasts.json beside result.json; nothing where an experiment has none."""
    result = _read(folder / "result.json")
    found = []
    for contrast in OF_EXPERIMENT.get(result["experiment"], ()):
        for pair in _pairs(result, contrast):
            found.append({"name": contrast.name, **_measured(contrast, pair, result, folder, bank)})
    if found:
        (folder / CONTRASTS).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _pairs(result: Result, contrast: Contrast) -> list[tuple[int, int]]:
    """N of T that all rows of a contrast were measured with; with N = T there is nothing to choose."""
    of_rows = [
        [(row["num_frames"], row["num_candidates"]) for row in result["rows"] if row["row"] == name]
        for name in contrast.weights
    ]
    return [pair for pair in of_rows[0] if pair[0] < pair[1] and all(pair in others for others in of_rows)]


def _measured(contrast: Contrast, pair: tuple[int, int], result: Result, folder: Path, bank: Path) -> Result:
    videos = Videos.read(folder / "videos" / f"T={pair[1]}", bank, result)
    total = np.zeros(DRAWS + 1)
    seeds = []
    for name, weight in contrast.weights.items():
        row = next(
            row for row in result["rows"] if row["row"] == name and (row["num_frames"], row["num_candidates"]) == pair
        )
        policies = [f"{row['trained']}#{seed}" for seed in result["seeds"]] if row["trained"] else [name]
        seeds.append(len(policies) if row["trained"] else 0)
        total += weight * np.mean([videos.draws(policy, *pair) for policy in policies], axis=0)
    value, draws = 100 * total[0], 100 * total[1:]
    if result["metric"] == "mAP":  # resamples flatter average precision
        draws = draws - draws.mean() + value
    bounds = interval(draws)
    assert bounds is not None
    return {
        "num_frames": pair[0],
        "num_candidates": pair[1],
        "metric": result["metric"],
        "seeds": max(seeds),
        "videos": len(videos.labels),
        "difference": round(float(value), 3),
        "ci95": [round(bound, 3) for bound in bounds],
    }


@dataclass(frozen=True, eq=False)
class Videos:
    """What a part of an experiment kept of its videos."""

    rows: list[tuple[str, int | None, int]]
    answers: list[list[Result]]  # by video, then by row
    labels: NDArray[np.bool_]  # [V, C]
    ids: list[str]
    metric: str
    bank: Path
    fingerprint: str

    @classmethod
    def read(cls, folder: Path, bank: Path, result: Result) -> Videos:
        with (folder / "videos.jsonl").open(encoding="utf-8") as lines:
            head, *videos = [json.loads(line) for line in lines]
        return cls(
            [(row[0], row[1], row[2]) for row in head["rows"]],
            [video["answers"] for video in videos],
            multi_hot([video["labels"] for video in videos], len(head["classes"])),
            [video["id"] for video in videos],
            result["metric"],
            bank,
            result["classifier"]["fingerprint"],
        )

    def draws(self, policy: str, num_frames: int, num_candidates: int) -> Draws:
        """The metric of one row."""
        # All candidates are one clip, whatever N is.
        at = next(
            place
            for place, (name, count, of) in enumerate(self.rows)
            if name == policy and of == num_candidates and count in (num_frames, num_candidates)
        )
        summary = [answers[at] for answers in self.answers]
        if self.metric == "mAP":
            resamples = Resamples(self.labels, DRAWS, 0)
            measured = resamples.mean_average_precision(self._probabilities([one["chosen"] for one in summary]))
            return np.concatenate(([measured.value], measured.draws))
        right = np.array([one["right"] for one in summary], dtype=np.float64)
        counts = resample_counts(len(right), DRAWS, 0)
        return np.concatenate(([right.mean()], right @ counts / len(right)))

    def _probabilities(self, chosen: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """[V, C] of clips, from the logits that the bank keeps of their frames."""
        import torch

        bank = so.Bank(self.bank)
        teacher = bank.teacher(self.fingerprint)
        if teacher.pooling != "mean":
            raise SystemExit(
                f"{self.bank}: {teacher.about['name']} does not average logits, so mAP cannot be had again"
            )
        place_of = {row.item.id: place for place, row in enumerate(bank.rows)}
        kind = "sigmoid" if bank.multi_label else "softmax"
        found = []
        for name, slots in zip(self.ids, chosen, strict=True):
            kept = teacher[place_of[name]].features
            assert kept is not None
            logits = torch.from_numpy(np.asarray(kept)[list(slots)].astype(np.float64))
            found.append(activate(logits.mean(0), kind).float().numpy())
        return np.stack(found)


# ---- the small file of a place


def collected(folder: Path, about: Mapping[str, Any]) -> Result | None:
    """Everything that is finished in the folder of a bank and a classifier; None where nothing is."""
    results = sorted(folder.glob("*/result.json"))
    experiments = {}
    first: Result = {}
    for path in results:
        summary = _read(path)
        if "experiment" not in summary or not (path.parent / "run.json").is_file():
            continue
        run = _read(path.parent / "run.json")
        first = first or {"bank": summary["bank"], "classifier": summary["classifier"], "run": run}
        experiments[summary["experiment"]] = {key: summary[key] for key in _KEPT if key in summary}
        if (path.parent / CONTRASTS).is_file():
            experiments[summary["experiment"]]["contrasts"] = _read(path.parent / CONTRASTS)
    if not experiments:
        return None
    bank = {key: value for key, value in first["bank"].items() if key != "path"}
    return {
        **about,
        **{key: first["run"].get(key) for key in _OF_RUN if key not in ("begun", "ended")},
        "collected": circumstances(())["date"],
        "bank": bank,
        "classifier": first["classifier"],
        "experiments": experiments,
    }


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
