"""Public names with their parameters, and what importing and choosing frames costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import sosampler as so
from golden import check, encode, scenes

HEAVY = {"torch", "torchvision", "torchcodec", "transformers", "timm", "pyarrow", "matplotlib", "sklearn"}


def loaded_by(code: str) -> set[str]:
    code = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}


def test_public_names() -> None:
    names: dict[str, list[str] | None] = {}
    for name in sorted(so.__all__):
        value = getattr(so, name)
        exception = isinstance(value, type) and issubclass(value, Exception)
        names[name] = list(inspect.signature(value).parameters) if callable(value) and not exception else None
    check("names", names)


def test_import_is_light() -> None:
    assert not loaded_by("import sosampler") & (HEAVY | {"numpy", "av", "PIL", "typer", "rich", "onnxruntime"})


def test_help_is_light() -> None:
    code = "import runpy\nsys.argv = ['sosampler', '--help']\ntry: runpy.run_module('sosampler', run_name='__main__')"
    assert not loaded_by(f"{code}\nexcept SystemExit: pass") & (HEAVY | {"numpy", "av", "rich", "onnxruntime"})


@pytest.mark.parametrize("policy", ["uniform", "frame-difference", "general"])
def test_select_imports_no_torch(policy: str, tmp_path: Path) -> None:
    clip = encode(tmp_path / "clip.mp4", scenes(12))
    loaded = loaded_by(f"import sosampler\nsosampler.select({str(clip)!r}, 2, policy={policy!r})")
    assert "av" in loaded
    assert not loaded & HEAVY


def test_import_takes_little_cpu_time() -> None:
    code = "import time\nbefore = time.process_time()\nimport sosampler\nprint(time.process_time() - before)"
    took = [float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3)]
    assert min(took) < 0.5, took
