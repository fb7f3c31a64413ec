"""Which errors of the package the tests reach: `make coverage` runs them and prints a table of this.

An error path is a `raise`, or the first statement that handles an exception.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path


def error_lines(source: str) -> set[int]:
    """Return the lines on which an error path begins.

    >>> sorted(error_lines("try:\\n  f()\\nexcept OSError:\\n  g()\\nelse:\\n  raise ValueError"))
    [4, 6]
    """
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise):
            lines.add(node.lineno)
        elif isinstance(node, ast.ExceptHandler):
            lines.add(node.body[0].lineno)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="what `coverage json` wrote")
    parser.add_argument("--missing", action="store_true", help="list the paths that no test reaches")
    arguments = parser.parse_args()
    files = json.loads(arguments.report.read_text())["files"]
    there: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    missing: dict[str, list[int]] = defaultdict(list)
    for name, report in sorted(files.items()):
        parts = Path(name).parts
        inner = parts[parts.index("sosampler") + 1 :]
        executed, excluded = set(report["executed_lines"]), set(report["excluded_lines"])
        for line in sorted(error_lines(Path(name).read_text(encoding="utf-8")) - excluded):
            there[inner[0]] += 1
            if line in executed:
                reached[inner[0]] += 1
            else:
                missing[name].append(line)
    there["all"], reached["all"] = there.total(), reached.total()
    rows = [f"{name:14} {reached[name]:5} of {there[name]:5}  {reached[name] / there[name]:6.1%}" for name in there]
    if arguments.missing:
        rows += [f"{name}: {', '.join(map(str, lines))}" for name, lines in missing.items()]
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
