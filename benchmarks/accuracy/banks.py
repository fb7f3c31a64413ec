"""Banks of real clips: one for each set of a folder of clips with a common list.

    python benchmarks/accuracy/banks.py CLIPS --reels PICTURES --work BANKS --out benchmarks/results/banks.json

CLIPS holds `manifest.csv` with the columns set, path, label (several separated by |) and group. For each set a manifest
with splits by group is written to BANKS, a bank prepared from it, verified, and described. From PICTURES, labelled
pictures and distractors, the 6000 reels of the preset `sports22` go straight into a bank.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler.bank.inspect import bank_info, verify_bank
from sosampler.datasets.manifest import Item


def manifests(clips: Path) -> dict[str, so.Manifest]:
    with (clips / "manifest.csv").open(newline="", encoding="utf-8") as rows:
        listed = list(csv.DictReader(rows))
    found = {}
    for name in sorted({row["set"] for row in listed}):
        rows_of_set = [row for row in listed if row["set"] == name]
        labels = [row["label"].split("|") for row in rows_of_set]
        classes = tuple(sorted({label for several in labels for label in several}))
        items = tuple(
            Item(row["path"], row["path"], tuple(sorted({classes.index(label) for label in several})), "", row["group"])
            for row, several in zip(rows_of_set, labels, strict=True)
        )
        several = any(len(item.labels) != 1 for item in items)
        manifest = so.Manifest(items, classes, several, clips)
        found[name] = so.make_splits(manifest, dev_share=0.1, test_share=0.3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", type=Path)
    parser.add_argument("--reels", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    makers: dict[str, Callable[[], so.Bank]] = {
        name: partial(so.prepare, manifest, out=arguments.work / name)
        for name, manifest in manifests(arguments.clips).items()
    }
    if arguments.reels:
        makers["reels"] = partial(so.make_reels, arguments.reels, arguments.work / "reels", preset="sports22")
    banks: dict[str, Any] = {}
    for name, make in makers.items():
        begin = time.perf_counter()
        bank = make()
        seconds = time.perf_counter() - begin
        info = bank_info(bank.path)
        info.pop("path", None)
        banks[name] = {"info": info, "failures": bank.failures, "problems": verify_bank(bank.path)}
        print(f"{name}: {len(bank)} videos in {seconds:.1f} s, {len(banks[name]['problems'])} problems")
    result = {
        "what": "banks of real clips, and of reels",
        **circumstances(("av", "pyarrow", "pillow", "numpy")),
        "banks": banks,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
