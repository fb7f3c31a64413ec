"""Write the expected values of the golden tests anew: `python tests/golden/update.py`. Read the difference in git."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    tests = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).parent), *sys.argv[1:]]
    sys.exit(subprocess.run(tests, env={**os.environ, "SOSAMPLER_UPDATE_GOLDEN": "1"}).returncode)
