"""What the scripts share: their result files, and processes that end with their parent."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from sosampler._util.files import replacing

RESULTS = Path(__file__).parent / "results"
ROW_LENGTH = 1000  # letters


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write the JSON file of one run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


class Results:
    """The JSON file. It is written anew after every step, and what it holds is not measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def put(self, **parts: Any) -> None:
        self.data |= _rounded(parts)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            temporary.write_text(_laid_out(self.data) + "\n", encoding="utf-8")

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def needed(self, key: str, stage: str) -> Any:
        if key not in self.data:
            raise SystemExit(f"{self.path}: has no {key!r} yet; run --stage {stage} first")
        return self.data[key]

    def took(self, stage: str, seconds: float) -> None:
        times = self.data.get("seconds", {})
        self.put(seconds=times | {stage: [*times.get(stage, []), round(seconds, 1)]})


def _rounded(value: Any) -> Any:
    """Six digits; more would be noise."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _laid_out(value: Any, indent: int = 0) -> str:
    """JSON with one row a line: what fits into a line stays in one, the rest is broken up."""
    whole = json.dumps(value)
    if len(whole) <= ROW_LENGTH or not isinstance(value, (dict, list)):
        return whole
    inner = " " * (indent + 1)
    parts = (
        [f"{inner}{json.dumps(key)}: {_laid_out(one, indent + 1)}" for key, one in value.items()]
        if isinstance(value, dict)
        else [inner + _laid_out(one, indent + 1) for one in value]
    )
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n" + ",\n".join(parts) + f"\n{' ' * indent}{end}"


def device() -> str:
    import torch  # seconds, and not all scripts need it

    return "cuda" if torch.cuda.is_available() else "cpu"


def fast_precision() -> str:
    """Return the precision in which networks run fast on this machine, the same for all of a comparison."""
    import torch

    from sosampler._util.hardware import cpu_is_fast_in_bfloat16, keep_memory
    from sosampler.training.optim import settled_precision

    if device() == "cpu":
        keep_memory()
        return "bfloat16" if cpu_is_fast_in_bfloat16() else "float32"
    return settled_precision(torch.device(device()), None)


def end_with_parent() -> None:
    """Jobs of a benchmark that was killed must not meet those of the next: this process ends when its parent does."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
