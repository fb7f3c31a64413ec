"""Choose frames from thousands of damaged files: python -m tests.fuzz --files 20000 --out .fuzz

Each file is opened in a child process with limits on time and memory, many files to a process. Prints a JSON summary;
exit code 1 where a file crashed it, raised an error that is not the package's own, or took too much. Such files are
kept in OUT/failing. Run again, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.fuzz.run import Settings, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--reader", choices=("pyav", "torchcodec"), default="pyav")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(".fuzz"))
    given = parser.parse_args()
    settings = Settings(given.out, given.reader)
    summary = run(range(given.first, given.first + given.files), settings, workers=given.workers)
    sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    return int(any(summary[kind] for kind in ("crashes", "foreign", "over_time", "over_memory")))


if __name__ == "__main__":
    sys.exit(main())
