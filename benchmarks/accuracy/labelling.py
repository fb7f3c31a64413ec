"""Is `select --total` worth it: how good a classifier becomes with the frames that it chooses to label.

    python benchmarks/accuracy/labelling.py MANIFEST --resnet50 WEIGHTS --work W --out benchmarks/results/labelling.json

MANIFEST is a CSV with path, label, group and split; clips of a group show one scene. Of the clips of `train`, a few
frames are chosen and get the label of their clip. A logistic regression on features of a ResNet-50, another network
than that of the choice, learns them and names the clips of `test`. Its regularisation is the best on dev, for each way
to choose and each number of frames. All is done with the clips as they are, and once more where some are there several
times, as links in W.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.linear_model import LogisticRegression

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler.evaluation.frame_features import FrameFeatures

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import RESULTS, write_result

TOTALS = (100, 200, 400, 800)
CANDIDATES = 8  # of each clip
DRAWS = 10
STRENGTHS = (1.0, 10.0, 100.0, 1000.0)  # C of the regression
COPIED, COPIES = 10, 10  # every 10th clip is there ten times
TITLES = {
    "total": "`--total`",
    "uniform": "uniform, clips in random order",
    "sorted": "uniform, clips sorted by class",
    "random": "random",
}
COLLECTIONS = {"plain": "as it is", "copies": "every tenth clip ten times"}


class Frames(NamedTuple):
    """The candidates of all clips of a split: features [F, D], clip [F], and frame numbers [F]."""

    features: np.ndarray
    clips: np.ndarray
    numbers: np.ndarray


class Clips(NamedTuple):
    paths: list[Path]
    labels: np.ndarray
    groups: np.ndarray


def read_clips(manifest: Path) -> dict[str, Clips]:
    """By split, those that have a label."""
    with manifest.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["label"]]
    found = {}
    for split in ("train", "dev", "test"):
        own = sorted((row for row in rows if row["split"] == split), key=lambda row: row["path"])
        paths = [manifest.parent / row["path"] for row in own]
        columns = [np.array([row[name] for row in own]) for name in ("label", "group")]
        found[split] = Clips(paths, *columns)
    return found


def read_frames(clips: Clips, network: FrameFeatures, kept: Path) -> Frames:
    """Return the candidates of all clips and their features, of length 1."""
    if kept.exists():
        with np.load(kept) as file:
            return Frames(*(file[name] for name in Frames._fields))
    features, owners, numbers = [], [], []
    options: dict[str, Any] = {"policy": "uniform", "candidates": "exact", "on_short": "fewer"}
    for owner, sel in enumerate(so.select_many(clips.paths, CANDIDATES, on_error="raise", **options)):
        rows = network(sel.to_torch()).numpy()
        features.append(rows / np.linalg.norm(rows, axis=1, keepdims=True))
        owners += [owner] * len(sel)
        numbers += sel.frame_indices.tolist()
    frames = Frames(np.concatenate(features), np.array(owners), np.array(numbers))
    np.savez(kept, **frames._asdict())
    return frames


def with_copies(clips: Clips, frames: Frames, folder: Path) -> tuple[Clips, Frames]:
    """Return a collection in which some clips are there several times, under other names."""
    owners = [number for number in range(len(clips.paths)) for _ in range(COPIES if number % COPIED == 0 else 1)]
    paths = []
    for place, owner in enumerate(owners):
        path = folder / f"{place:05}{clips.paths[owner].suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_symlink():
            path.symlink_to(clips.paths[owner].resolve())
        paths.append(path)
    own = [np.flatnonzero(frames.clips == owner) for owner in owners]
    places = np.concatenate([[place] * len(rows) for place, rows in enumerate(own)])
    rows = np.concatenate(own)
    copied = Clips(paths, clips.labels[owners], clips.groups[owners])
    return copied, Frames(frames.features[rows], places, frames.numbers[rows])


# ---- ways to choose


def by_total(clips: Clips, frames: Frames, total: int, work: Path) -> np.ndarray:
    """Return the positions of the frames that `select --total` chooses."""
    chosen = so.select_total(clips.paths, total, out=work, num_candidates=CANDIDATES, candidates="exact")
    places = {(clips.paths[owner], int(number)): at for at, (_, owner, number) in enumerate(zip(*frames, strict=True))}
    return np.array([places[Path(frame["video"]), frame["frame_index"]] for frame in chosen.frames])


def evenly(count: int, total: int) -> np.ndarray:
    """Return evenly spaced positions of all candidates, in the order of clips and time.

    >>> evenly(10, 3).tolist()
    [1, 5, 8]
    """
    return ((np.arange(total) + 0.5) * count / total).astype(int)


def shuffled(frames: Frames, total: int) -> Iterator[np.ndarray]:
    """Yield evenly spaced positions, with the clips in another order each time: nobody knows their classes yet."""
    for seed in range(DRAWS):
        order = np.random.default_rng(seed).permutation(frames.clips.max() + 1)
        positions = np.argsort(order[frames.clips], kind="stable")
        yield positions[evenly(len(positions), total)]


def at_random(count: int, total: int) -> Iterator[np.ndarray]:
    for seed in range(DRAWS):
        yield np.random.default_rng(seed).choice(count, total, replace=False)


# ---- what they are worth


def right_of_test(
    chosen: np.ndarray, clips: dict[str, Clips], frames: dict[str, Frames]
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return which clips of test are named right, and what was chosen."""
    owners = frames["train"].clips[chosen]
    features, labels = frames["train"].features[chosen], clips["train"].labels[owners]
    models = [LogisticRegression(C=strength, max_iter=2000).fit(features, labels) for strength in STRENGTHS]
    scores = [named_right(model, clips["dev"], frames["dev"]).mean() for model in models]
    best = int(np.argmax(scores))
    right = named_right(models[best], clips["test"], frames["test"])
    return right, {
        "top1": float(right.mean()),
        "dev": float(scores[best]),
        "strength": STRENGTHS[best],
        "classes": len(set(labels)),
        "groups": len(set(clips["train"].groups[owners])),
        "clips": len(set(owners)),
    }


def named_right(model: LogisticRegression, clips: Clips, frames: Frames) -> np.ndarray:
    """Return whether the mean over the frames of each clip has its label first."""
    probabilities = model.predict_proba(frames.features)
    means = np.stack([probabilities[frames.clips == owner].mean(0) for owner in range(len(clips.labels))])
    return model.classes_[means.argmax(1)] == clips.labels


def interval(difference: np.ndarray, groups: np.ndarray, draws: int = 2000) -> list[float]:
    """Return the 95 % interval of a mean over clips; whole groups are resampled."""
    names, owners = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(owners, difference), np.bincount(owners)
    drawn = np.random.default_rng(0).integers(0, len(names), (draws, len(names)))
    return [float(bound) for bound in np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1), [2.5, 97.5])]


def rows_of(total: int, clips: dict[str, Clips], frames: dict[str, Frames], work: Path) -> list[dict[str, Any]]:
    """Return a row for each way to choose."""
    count = len(frames["train"].clips)
    ways = {
        "total": [by_total(clips["train"], frames["train"], total, work)],
        "uniform": list(shuffled(frames["train"], total)),
        "sorted": [evenly(count, total)],
        "random": list(at_random(count, total)),
    }
    rights, rows = {}, []
    for way, choices in ways.items():
        measured = [right_of_test(chosen, clips, frames) for chosen in choices]
        rights[way] = np.mean([right for right, _ in measured], axis=0)
        facts = [fact for _, fact in measured]
        row = {name: statistics.mean(fact[name] for fact in facts) for name in facts[0] if name != "strength"}
        if len(facts) > 1:
            row["top1_sd"] = statistics.stdev(fact["top1"] for fact in facts)
        rows.append({"way": way, "total": total, "strengths": [fact["strength"] for fact in facts], **row})
    for row in rows:
        if row["way"] != "total":
            difference = rights["total"] - rights[row["way"]]
            row["total_minus_this"] = {
                "difference": float(difference.mean()),
                "ci95": interval(difference, clips["test"].groups),
            }
    return rows


def table(result: dict[str, Any]) -> str:
    """Return the tables of docs/collections.md: top-1 on test, and how many scenes the chosen frames show."""
    totals = sorted({row["total"] for row in result["rows"]})
    at = {(row["collection"], row["way"], row["total"]): row for row in result["rows"]}

    def grid(head: str, cell: Callable[[dict[str, Any]], str]) -> str:
        lines = [f"| collection | {head} | " + " | ".join(f"{total} frames" for total in totals) + " |"]
        lines.append("|---" * (len(totals) + 2) + "|")
        for name, title in COLLECTIONS.items():
            for way, words in TITLES.items():
                cells = [cell(at[name, way, total]) for total in totals]
                lines.append(f"| {title} | {words} | {' | '.join(cells)} |")
        return "\n".join(lines)

    return grid("top-1 on test, %", _top1) + "\n\n" + grid("scenes among them", lambda row: f"{row['groups']:.0f}")


def _top1(row: dict[str, Any]) -> str:
    return f"{100 * row['top1']:.1f}" + (f" ± {100 * row['top1_sd']:.1f}" if "top1_sd" in row else "")


def in_short(result: dict[str, Any]) -> str:
    """Return the sentence below the tables: differences to uniform frames of clips in random order."""
    parts = []
    for name, title in COLLECTIONS.items():
        versus = [
            row["total_minus_this"] for row in result["rows"] if (row["collection"], row["way"]) == (name, "uniform")
        ]
        shown = [
            f"{100 * each['difference']:+.1f} ({100 * each['ci95'][0]:+.1f} to {100 * each['ci95'][1]:+.1f})"
            for each in versus
        ]
        parts.append(f"{title}: {', '.join(shown)}")
    return f"`--total` minus uniform frames of clips in random order, in points; {'; '.join(parts)}."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--resnet50", type=Path, required=True, help="Weights trained on ImageNet.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--totals", type=int, nargs="+", default=TOTALS)
    parser.add_argument("--out", type=Path, default=RESULTS / "labelling.json")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    network = FrameFeatures(so.create_classifier("resnet50_v1", weights=given.resnet50, input_size=128))
    clips = read_clips(given.manifest)
    frames = {split: read_frames(own, network, given.work / f"{split}.npz") for split, own in clips.items()}
    copied = with_copies(clips["train"], frames["train"], given.work / "clips")
    rows = []
    for name in COLLECTIONS:
        own = (clips, frames) if name == "plain" else ({**clips, "train": copied[0]}, {**frames, "train": copied[1]})
        for total in given.totals:
            measured = rows_of(total, *own, given.work / f"picked-{name}")
            rows += [{"collection": name, **row} for row in measured]
            print(name, total, {row["way"]: round(row["top1"], 3) for row in measured}, flush=True)
    result = {
        "benchmark": "labelling",
        "what": "a classifier of frames that were chosen to be labelled, by way to choose and number",
        **circumstances(("numpy", "torch", "scikit-learn", "onnxruntime", "av")),
        "clips": {split: len(own.paths) for split, own in clips.items()},
        "groups": {split: len(set(own.groups)) for split, own in clips.items()},
        "classes": len(set(clips["train"].labels)),
        "copies": {"of_every": COPIED, "times": COPIES, "clips": len(copied[0].paths)},
        "candidates": {"of_each": CANDIDATES, **{split: len(own.clips) for split, own in frames.items()}},
        "seeds": list(range(DRAWS)),
        "rows": rows,
    }
    write_result(given.out, result)
    print(table(result), in_short(result), sep="\n\n")


if __name__ == "__main__":
    main()
