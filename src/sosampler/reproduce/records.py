"""The folder of one experiment: what was asked for, what was measured, and what came out."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sosampler.bench.measure import circumstances
from sosampler.errors import InvalidArgument
from sosampler.training.checkpoints import differences, write_json

RUN, EVALUATION, RESULT = "run.json", "evaluation.json", "result.json"
VIDEOS = "videos"  # a folder for each part
KIND = "sosampler reproduction"
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "transformers")
_GIT_SECONDS = 20
_OF_ROWS = ("policy", "num_frames", "num_candidates", "top1", "mAP", "ci95", "versus_uniform")
_OF_RESULTS = (
    *("experiment", "kind", "title", "claim", "bank", "classifier", "metric", "seeds", "paper", "rows", "left_out"),
    *("elsewhere", "notes", "files", "refused"),
)


class ExperimentFolder:
    """Files of one experiment with one bank and one classifier.

    run.json: the settings, which must stay the same, and circumstances. evaluation.json: every part as soon as it is
    measured, so that a killed run goes on. result.json: written last.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check(self, settings: dict[str, Any]) -> None:
        """Whether these settings may go on here, without writing anything."""
        path = self.folder / RUN
        if not path.exists():
            others = [name for name in (EVALUATION, RESULT) if (self.folder / name).exists()]
            if others:
                raise InvalidArgument(
                    f"{self.folder}: holds a {others[0]} that no reproduction wrote and that would be replaced; give "
                    "another --out"
                )
            return
        told = self._read(RUN)
        if told.get("kind") != KIND:
            raise InvalidArgument(f"{self.folder}: holds a {RUN} of something else; give another --out")
        begun = (self.folder / EVALUATION).exists() or (self.folder / RESULT).exists()
        changed = differences(told.get("settings"), _plain(settings))
        if begun and changed:
            raise InvalidArgument(
                f"{self.folder}: holds a run with other settings: {'; '.join(changed[:3])}; give the same to go on "
                "with it, another --out, or delete the folder"
            )

    def begin(self, settings: dict[str, Any], device: str, begun: str) -> None:
        """Start, or go on; `begun`: when training for it began."""
        self.check(settings)
        if (self.folder / RUN).exists() and self._read(RUN).get("settings") == _plain(settings):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        told = {
            "kind": KIND,
            "settings": _plain(settings),
            "begun": begun,
            "ended": None,
            **circumstances(_PACKAGES),
            "device": device,
            "git": git_state(Path.cwd()),
        }
        write_json(self.folder / RUN, told)

    def finished_parts(self) -> dict[str, Any]:
        """What was measured, by the name of the part."""
        if not (self.folder / EVALUATION).exists():
            return {}
        parts = self._read(EVALUATION).get("parts")
        if not isinstance(parts, dict) or not all(_is_evaluation(told) for told in parts.values()):
            raise InvalidArgument(
                f"{self.folder / EVALUATION}: is not what a reproduction writes; delete the folder to start again"
            )
        return parts

    def videos(self, name: str) -> Path:
        """Where a part says what was chosen of every video, in the form of `Evaluation.write_run`."""
        return self.folder / VIDEOS / name

    def add_part(self, name: str, told: dict[str, Any]) -> None:
        write_json(self.folder / EVALUATION, {"parts": {**self.finished_parts(), name: told}})

    def result(self) -> dict[str, Any] | None:
        """What came out, once it is finished."""
        if not (self.folder / RESULT).exists():
            return None
        told = self._read(RESULT)
        missing = [name for name in _OF_RESULTS if name not in told]
        if missing:
            raise InvalidArgument(
                f"{self.folder / RESULT}: has no {', '.join(missing[:3])}; delete the folder to start again"
            )
        return told

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.folder / RUN, {**self._read(RUN), "ended": now()})
        write_json(self.folder / RESULT, result)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidArgument(f"{path}: is not JSON ({error}); delete the folder to start again") from error
        if not isinstance(told, dict):
            raise InvalidArgument(f"{path}: is not a JSON object; delete the folder to start again")
        return told


def _is_evaluation(told: Any) -> bool:
    """Whether a part has the form that `Evaluation.to_dict` gives it."""
    if not isinstance(told, dict) or not isinstance(told.get("notes"), list) or not isinstance(told.get("rows"), list):
        return False
    return all(isinstance(row, dict) and all(name in row for name in _OF_ROWS) for row in told["rows"])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout in a folder, and whether anything in it differs; None where there is none."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says; None where it is not there or refuses."""
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As they come back from the file."""
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found
