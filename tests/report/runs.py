"""Runs of `sosampler evaluate --run`, made up without an evaluation, for tests of reports."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np

from sosampler.evaluation.result import EVALUATION_FILE, KIND, VERSION, VIDEOS_FILE, rows_digest
from sosampler.paper.page import experiments_part
from sosampler.report.run_report import write_run_report

POLICIES = ("uniform", "mine", "semi-optimal", "optimal")
CLASSES = ("run", "jump", "swim")
SEVERAL = ((1, 6), (2, 6), (4, 6))  # N of T that make curves


def made_up_row(policy: str, frames: int, candidates: int, top1: float, **more: Any) -> dict[str, Any]:
    oracle = policy.endswith("optimal")
    row = {
        "policy": policy,
        "num_frames": frames,
        "num_candidates": candidates,
        "top1": top1,
        "mAP": min(1.0, top1 + 0.05),
        "confidence": top1,
        "fidelity": 1.0 if policy == "optimal" else 0.5,
        "recovered": None,
        "gmacs": None if oracle else 0.1 * frames + (0.3 if policy == "mine" else 0.0),
        "sampler_gmacs": None if oracle else 0.3 if policy == "mine" else 0.0,
        "classifier_gmacs": 0.1 * frames,
        "frames_classified": frames,
        "frames_decoded": frames if policy == "uniform" else candidates,
        "ci95": {"top1": [max(0.0, top1 - 0.1), min(1.0, top1 + 0.1)]},
        "versus_uniform": {"num_frames": frames, "metric": "top1", "difference": 0.2, "ci95": [0.1, 0.3]},
        "seconds": 0.1,
        "gap": {"max": 0.0, "mean": 0.0, "share_below_1e-3": 1.0} if policy == "optimal" else None,
        "method": "enumeration" if policy == "optimal" else None,
    }
    return row | more


def made_up_video(
    rng: np.random.Generator, name: str, label: int, num_classes: int, pairs: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """A video with as many stored frames as candidates; the learned sampler is right more often than uniform."""
    candidates = {}
    for count in dict.fromkeys(count for _, count in pairs):
        candidates[str(count)] = {
            "slots": list(range(count)),
            "positions": [(place + 0.5) / count for place in range(count)],
            "seconds": [float(place) for place in range(count)],
            "confidence": rng.random(count).round(4).tolist(),
            "scores": {"mine": rng.normal(size=count).round(3).tolist()},
        }
    answers = []
    for frames, count in pairs:
        for policy in POLICIES:
            right = bool(rng.random() < {"uniform": 0.5, "mine": 0.7}.get(policy, 0.9))
            predicted = label if right else (label + 1) % num_classes
            confidence = round(float(rng.uniform(0.5, 1.0) if right else rng.uniform(0.0, 0.4)), 4)
            answers.append(
                {
                    "predicted": predicted,
                    "probability": confidence if right else round(float(rng.uniform(0.4, 0.6)), 4),
                    "confidence": confidence,
                    "right": right,
                    "chosen": sorted(rng.permutation(count)[:frames].tolist()),
                }
            )
    return {"id": name, "labels": [label], "candidates": candidates, "answers": answers}


def write_made_up_run(
    folder: Path,
    *,
    ids: Sequence[str],
    classes: Sequence[str] = CLASSES,
    pairs: Sequence[tuple[int, int]] = ((2, 6),),
    seed: int = 0,
    **facts: Any,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write evaluation.json and videos.jsonl; gives both as they stand there, without the head of the second."""
    rng = np.random.default_rng(seed)
    videos = [made_up_video(rng, name, number % len(classes), len(classes), pairs) for number, name in enumerate(ids)]
    keys = [(policy, frames, count) for frames, count in pairs for policy in POLICIES]
    rows = [
        made_up_row(*key, float(np.mean([video["answers"][place]["right"] for video in videos])))
        for place, key in enumerate(keys)
    ]
    told = {
        "metric": "top1",
        "bank": "not/there",
        "split": "test",
        "num_videos": len(ids),
        "teacher": {"name": "resnet"},
        "seed": 3,
        "versions": {"sosampler": "0.1.0"},
        "notes": ["a note <b>"],
        **facts,
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EVALUATION_FILE).write_text(json.dumps(told), encoding="utf-8")
    head = {
        "kind": KIND,
        "version": VERSION,
        "evaluation": rows_digest(rows),
        "videos": len(videos),
        "classes": list(classes),
        "rows": keys,
    }
    lines = [json.dumps(line) for line in (head, *videos)]
    (folder / VIDEOS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return told, videos


def text_of(*runs: Path, out: Path, **options: Any) -> str:
    """The page of some runs."""
    page = write_run_report(runs, out / "report.html", experiments=experiments_part, **options)
    return page.read_text(encoding="utf-8")


def heads_of(text: str) -> list[str]:
    """Its headings."""
    return [unescape(re.sub(r"<[^>]*>", "", head)) for head in re.findall(r'class="head"[^>]*>(.*?)</h\d>', text)]
