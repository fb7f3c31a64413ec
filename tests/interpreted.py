"""Triton's kernels without a GPU: its interpreter runs them line by line in numpy, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def check_interpreted(code: str) -> None:
    """Run code that may import test modules and prints "same" at its end."""
    given = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr[-2000:]
