"""How often chosen frames show what happens in a golf swing, although the policies do not know where it happens.

    python benchmarks/paper/golf_events.py WORK/golfdb --samplers default#0=FOLDER ... \\
        --out benchmarks/results/paper/golf_events.json

WORK/golfdb is what realvid.py makes: bank, classifier, events.json. GolfDB marks eight moments of every swing, from
address to finish. A moment counts as hit if a chosen frame lies within half the distance between two stored frames of
that video: if, then, the stored frame nearest to it was chosen. What is expected of N frames that are drawn blindly is
computed, not drawn.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler.evaluation.result import interval, resample_counts

NUM_FRAMES, NUM_CANDIDATES = (2, 4, 6, 8), 16
RULES = ("uniform", "random", "frame-difference", "difference-peaks", "farthest-first", "dpp")
ORACLES = ("semi-optimal", "semi-optimal-max", "optimal")
RECIPES = ("default", "paper")
EVENTS = (
    *("address", "toe-up", "mid-backswing", "top"),
    *("mid-downswing", "impact", "mid-follow-through", "finish"),
)
DRAWS = 2000

Numbers = NDArray[np.float64]


def within(frames: Sequence[float], moments: Sequence[float]) -> NDArray[np.bool_]:
    """Which frames [T] show which moments [E], both in frames of the original: [E, T].

    >>> within([0, 8, 16, 24], [9, 20, 40]).astype(int).tolist()
    [[0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]
    """
    places = np.asarray(frames, dtype=np.float64)
    tolerance = float(np.diff(places).mean()) / 2 if len(places) > 1 else 0.0
    return np.abs(np.asarray(moments, dtype=np.float64)[:, None] - places[None]) <= tolerance


def chance_of(near: NDArray[np.bool_], num_frames: int) -> Numbers:
    """With which probability N frames that are drawn blindly hit each moment: [E].

    >>> chance_of(np.array([[True, False, False, False], [False, True, True, False]]), 2).round(3).tolist()
    [0.5, 0.833]
    """
    total = near.shape[1]
    drawn = min(num_frames, total)
    missed = [math.comb(total - int(count), drawn) / math.comb(total, drawn) for count in near.sum(1)]
    return 1 - np.array(missed)


def events_by_video(bank: so.Bank, result: Mapping[str, Any]) -> list[tuple[Numbers, NDArray[np.bool_]]]:
    """Of each video of a split: its stored frames, and which of them show which of the eight moments."""
    step = int(result["native_frames_a_frame"])
    found = []
    for place, item in enumerate(bank.items):
        # The first and the last number are where the clip was cut, not part of the swing.
        moments = result["events"][item.id][1:-1]
        frames = np.asarray(bank[place].frame_indices, dtype=np.float64) * step
        found.append((frames, within(list(frames), moments)))
    return found


def hit_shares(near: Sequence[NDArray[np.bool_]], chosen: Sequence[Sequence[int]]) -> Numbers:
    """Which moments were hit: [V, E]."""
    return np.array(
        [shown[:, [slot for slot in slots if slot >= 0]].any(1) for shown, slots in zip(near, chosen, strict=True)]
    )


def measure(
    bank: Path,
    classifier: Path,
    events: Path,
    samplers: Mapping[str, Path],
    *,
    precision: str | None = None,
    split: str = "test",
    num_candidates: int = NUM_CANDIDATES,
) -> dict[str, Any]:
    """All rows; samplers are named RECIPE#SEED, and those of one recipe are averaged."""
    part = so.Bank(bank).split(split)
    result = json.loads(events.read_text(encoding="utf-8"))
    evaluation = so.evaluate(
        bank,
        {**{name: name for name in (*RULES, *ORACLES)}, **{name: str(path) for name, path in samplers.items()}},
        pairs=[(count, num_candidates) for count in NUM_FRAMES],
        classifier=str(classifier),
        split=split,
        precision=precision,
        bootstrap=0,
    )
    by_id = {item.id: shown for item, (_, shown) in zip(part.items, events_by_video(part, result), strict=True)}
    near = [by_id[name] for name in evaluation.ids]
    counts = resample_counts(len(near), DRAWS, 0)
    names = list(dict.fromkeys(name.partition("#")[0] for name in (*RULES, *ORACLES, *samplers)))
    rows = []
    for count in NUM_FRAMES:
        expected = np.array([chance_of(shown, count).mean() for shown in near])
        for name in names:
            seeds = [one for one in (*RULES, *ORACLES, *samplers) if one.partition("#")[0] == name]
            hits = np.mean([hit_shares(near, evaluation.chosen(one, count).tolist()) for one in seeds], axis=0)
            rows.append(_row(name, count, hits, expected, counts, name in RECIPES and len(seeds)))
    gaps = [float(np.diff(frames).mean()) for frames, _ in events_by_video(part, result) if len(frames) > 1]
    return {
        "what": "how often chosen frames show one of the eight moments of a golf swing",
        **circumstances(("torch", "timm", "numpy")),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "videos": len(near),
        "num_candidates": num_candidates,
        "tolerance": "half the mean distance between two stored frames of the video",
        "tolerance_native_frames": {
            name: round(float(np.quantile(gaps, at)) / 2, 2)
            for name, at in (("median", 0.5), ("least", 0), ("most", 1))
        },
        "in_reach": round(float(np.mean([shown.any(1).mean() for shown in near])), 4),
        "events": list(EVENTS),
        "rows": rows,
    }


def _row(
    name: str, count: int, hits: Numbers, expected: Numbers, counts: NDArray[np.float32], seeds: int | bool
) -> dict[str, Any]:
    share = hits.mean(1)  # [V]
    above = share - expected
    bounds = [interval(values @ counts / len(values)) for values in (share, above)]
    assert bounds[0] is not None
    assert bounds[1] is not None
    return {
        "policy": name,
        "num_frames": count,
        "seeds": int(seeds),
        "hit": round(float(share.mean()), 4),
        "ci95": [round(bound, 4) for bound in bounds[0]],
        "by_chance": round(float(expected.mean()), 4),
        "above_chance": round(float(above.mean()), 4),
        "above_chance_ci95": [round(bound, 4) for bound in bounds[1]],
        "by_event": [round(float(value), 4) for value in hits.mean(0)],
    }


def write(
    bank: Path, classifier: Path, events: Path, samplers: Mapping[str, Path], out: Path, **options: Any
) -> dict[str, Any]:
    found = measure(bank, classifier, events, samplers, **options)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return {"videos": found["videos"], "rows": len(found["rows"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("golfdb", type=Path)
    parser.add_argument("--samplers", nargs="*", default=[], metavar="RECIPE#SEED=FOLDER")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    samplers = {name: Path(path) for name, _, path in (one.partition("=") for one in arguments.samplers)}
    folder = arguments.golfdb
    result = write(
        folder / "bank",
        folder / "classifier",
        folder / "events.json",
        samplers,
        arguments.out,
        precision=arguments.precision,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
