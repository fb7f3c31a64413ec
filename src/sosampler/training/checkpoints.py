"""Where a run stands, on disk, so that a killed one goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sosampler.errors import InvalidArgument, WeightsError
from sosampler.files import replacing

SETTINGS, CHECKPOINT, LOG, RESULT = "run.json", "checkpoint.pt", "log.jsonl", "result.json"


class RunFolder:
    """The folder of one run: its settings, its last checkpoint, its log and its result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, settings: dict[str, Any]) -> None:
        """Start, or go on with a run of the same settings; one of other settings is refused."""
        settings = json.loads(json.dumps(settings))  # as they come back from the file
        path = self.folder / SETTINGS
        if path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            for key in sorted({*old, *settings}):
                if old.get(key) != settings.get(key):
                    raise InvalidArgument(
                        f"{self.folder}: holds a run with {key}={old.get(key)!r}, now {key}={settings.get(key)!r}; "
                        "give another folder, the same settings to go on with it, or overwrite it"
                    )
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)

    def clear(self) -> None:
        for name in (SETTINGS, CHECKPOINT, LOG, RESULT):
            (self.folder / name).unlink(missing_ok=True)

    def save(self, state: dict[str, Any]) -> None:
        with replacing(self.folder / CHECKPOINT) as temporary:
            torch.save(state, temporary)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        path = self.folder / CHECKPOINT
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            raise WeightsError(f"{path}: cannot be read ({error}); remove it to start this run again") from error
        return state

    def log(self, history: list[dict[str, Any]]) -> None:
        """The whole log again: lines of an epoch that is run twice never stand twice."""
        with replacing(self.folder / LOG) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in history), encoding="utf-8")

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.folder / RESULT, result)
        (self.folder / CHECKPOINT).unlink(missing_ok=True)

    def result(self) -> dict[str, Any] | None:
        path = self.folder / RESULT
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
