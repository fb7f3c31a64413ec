"""Print the tables of docs/results/reels.md from samplers.json, which benchmarks/accuracy/samplers.py writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sosampler.samplers.registry import TITLES

NAMES = {
    "uniform": "uniform",
    "random": "random",
    "all": "all ten",
    "paper": TITLES["paper"],
    "authors": TITLES["authors"],
    "default, importance alone": f"{TITLES['default']}, importance alone",
    "default": f"**{TITLES['default']}**",
    "semi-optimal-max": "π_s, max confidence (oracle)",
    "semi-optimal": "π_s, label confidence (oracle)",
    "optimal": "π_o (oracle)",
}
TEN = (1, 2, 3, 4, 6, 8)
LONG = ((8, 30), (16, 60), (32, 100))
Lines = dict[tuple[str, int, int], dict[str, Any]]


def by_cell(result: dict[str, Any]) -> Lines:
    """The lines of the table by policy, N and T."""
    return {(line["policy"], line["num_frames"], line["num_candidates"]): line for line in result["table"]}


def percent(line: dict[str, Any] | None, name: str = "top1") -> str:
    if line is None or line[name] is None:
        return ""
    spread = line.get(f"{name}_sd")
    return f"{100 * line[name]:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def accuracy(lines: Lines) -> list[str]:
    columns = (*TEN, 10)  # of ten; "all" has no other column
    rows = ["| top-1, % | " + " | ".join(f"N={n}" for n in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for policy, shown in NAMES.items():
        cells = [percent(lines.get((policy, n, 10))) for n in columns]
        rows.append(f"| {shown} | " + " | ".join(cells) + " |")
    return rows


def shares(lines: Lines) -> list[str]:
    rows = [
        "| N=6 of T=10 | share of π_s's gain recovered, % | fidelity to π_o, % | GMACs |",
        "|---|---|---|---|",
    ]
    for policy, shown in NAMES.items():
        line = lines.get((policy, 6, 10))
        if line is not None:
            cost = "" if line["gmacs"] is None else f"{line['gmacs']:.1f}"
            rows.append(f"| {shown} | {percent(line, 'recovered')} | {percent(line, 'fidelity')} | {cost} |")
    return rows


def longer(lines: Lines) -> list[str]:
    rows = ["| top-1, % | " + " | ".join(f"{n} of {t}" for n, t in LONG) + " |", "|---" * (len(LONG) + 1) + "|"]
    for policy, shown in NAMES.items():
        if policy == "all":
            rows.append("| all | " + " | ".join(percent(lines.get(("all", t, t))) for _, t in LONG) + " |")
        elif any((policy, *pair) in lines for pair in LONG):
            rows.append(f"| {shown} | " + " | ".join(percent(lines.get((policy, *pair))) for pair in LONG) + " |")
    return rows


def variants(lines: Lines) -> list[str]:
    """Return the effect of single changes; one seed each."""
    found = sorted({policy for policy, _, _ in lines if policy not in NAMES})
    rows = ["| top-1, %, one seed | N=1 | N=3 | N=6 |", "|---|---|---|---|"]
    return rows + [
        f"| {policy} | " + " | ".join(percent(lines.get((policy, n, 10))) for n in (1, 3, 6)) + " |" for policy in found
    ]


def tables(path: Path) -> list[list[str]]:
    lines = by_cell(json.loads(path.read_text(encoding="utf-8")))
    found = [accuracy(lines), shares(lines), longer(lines)]
    return [*found, variants(lines)] if any(policy not in NAMES for policy, _, _ in lines) else found


if __name__ == "__main__":
    path = Path(__file__).with_name("samplers.json")
    if not path.exists():
        raise SystemExit(f"{path} does not exist; benchmarks/accuracy/samplers.py writes it")
    print("\n\n".join("\n".join(rows) for rows in tables(path)))
