"""The light install: its size on disk, and how long it takes from nothing to the frames of a 30-second clip.

    python benchmarks/speed/light.py CLIP.mp4

Builds the wheel, installs it with its core dependencies into a fresh environment that is removed afterwards, and starts
`sosampler select` there anew for every measurement: as it is, which is with the sampler that ships, and with uniform,
in turns. Needs uv and a package index.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sosampler._util.environment import circumstances
from sosampler._util.files import replacing
from sosampler.policies.learned import FOLDER

ROOT = Path(__file__).parents[2]
MEGABYTE = 2**20


def install(folder: Path) -> Path:
    """A Python with the wheel and its core dependencies."""
    uv = str(Path(sys.executable).parent / "uv")
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    python = folder / "venv" / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv")], check=True)
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    # Compiled as the first import would: what lies on disk after it, and a start that is the same every time.
    given = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), *constraints, str(wheel)]
    subprocess.run(given, check=True)
    return python


def megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink()) / MEGABYTE


def start(python: Path, clip: Path, *options: str) -> tuple[float, dict[str, Any]]:
    """Seconds from the start of the process to its end, and what it printed."""
    command = [str(python), "-m", "sosampler", "select", str(clip), "-n", "8", "--json", *options]
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - begin, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clip", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "light.json")
    given = parser.parse_args()
    ways = {"uniform": ("--policy", "uniform"), "sampler": ()}
    with tempfile.TemporaryDirectory(prefix="sosampler-light-") as name:
        python = install(Path(name))
        size = megabytes(Path(name) / "venv" / "lib")
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        summary: dict[str, dict[str, Any]] = {}
        for number in range(given.rounds + 1):  # the first reads everything from disk, and is told apart
            for way, options in ways.items():
                took, summary[way] = start(python, given.clip, *options)
                seconds[way].append(took)
                print(f"round {number} {way}: {took:.2f} s", flush=True)
    metadata = summary["uniform"]["video_metadata"]
    result = {
        **circumstances(("onnxruntime", "numpy", "av")),
        "install_megabytes": round(size, 1),
        "model_megabytes": round((FOLDER / "model.onnx").stat().st_size / MEGABYTE, 2),
        "clip": {"name": given.clip.name, **{key: metadata[key] for key in ("duration", "width", "height")}},
        "num_frames": 8,
        "num_candidates": {way: row["num_candidates"] for way, row in summary.items()},
        "first_start_seconds": {way: round(taken[0], 3) for way, taken in seconds.items()},
        "cold_start_seconds": {way: round(statistics.median(taken[1:]), 3) for way, taken in seconds.items()},
        "rounds": {way: [round(value, 3) for value in taken[1:]] for way, taken in seconds.items()},
    }
    with replacing(given.out) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: result[key] for key in ("install_megabytes", "cold_start_seconds")}))


if __name__ == "__main__":
    main()
