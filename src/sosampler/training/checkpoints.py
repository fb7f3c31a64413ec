"""Curves for TensorBoard, where it is installed."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sosampler._util.files import replacing
from sosampler.bank.bank import Bank
from sosampler.classifiers.factory import CONFIG, WEIGHTS
from sosampler.errors import InvalidArgument, WeightsError, first_line


class EventLog:
    """Writes the numbers of each epoch into a folder; does nothing without the package tensorboard."""

    def __init__(self, folder: Path, first_epoch: int) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return  # not asked for by anybody: the same numbers are in log.jsonl
        # Epochs that a killed run had already written are replaced.
        self._writer = SummaryWriter(str(folder), purge_step=first_epoch)

    def write(self, line: dict[str, Any]) -> None:
        if self._writer is not None:
            for name, value in line.items():
                if name != "epoch" and isinstance(value, (int, float)):
                    self._writer.add_scalar(name, value, line["epoch"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def check_apart(folder: Path, bank: Bank) -> None:
    """Overwriting a run must not touch a bank."""
    here, there = folder.resolve(), bank.path.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise InvalidArgument(f"out={folder} and the bank {bank.path} lie inside each other; keep them apart")


def bank_identity(bank: Bank) -> dict[str, str]:
    """Path and digest: they change with the videos, their labels and splits, and how frames were taken."""
    told = [[asdict(item) for item in bank.items], bank.classes, bank.multi_label, bank.settings]
    digest = hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()[:16]
    return {"path": str(bank.path.resolve()), "digest": digest}


SETTINGS, CHECKPOINT, LOG, RESULT = "run.json", "checkpoint.pt", "log.jsonl", "result.json"
_FILES = (RESULT, CHECKPOINT, LOG, WEIGHTS, CONFIG, SETTINGS)


class RunFolder:
    """The folder of one run: its settings, its last checkpoint, its log and its result.

    `kind`: what is trained, so that a run of one kind never takes the place of another's; None for classifiers.
    """

    def __init__(self, folder: Path, kind: str | None = None) -> None:
        self.folder, self.kind = folder, kind

    def begin(self, settings: dict[str, Any]) -> None:
        """Start, or go on with a run of the same settings; one of other settings is refused, once it has begun."""
        settings = json.loads(json.dumps(settings))  # as they come back from the file
        if self.kind is not None:
            settings = {"kind": self.kind, **settings}
        path = self.folder / SETTINGS
        if path.exists():
            self._refuse_others()
            self._remove_leftovers()
        if path.exists() and self._has_begun():
            changed = differences(self._read_json(SETTINGS), settings)
            if changed:
                raise InvalidArgument(
                    f"{self.folder}: holds a run with other settings: {'; '.join(changed[:4])}; "
                    "give another folder, the same settings to go on with it, or overwrite it"
                )
            return
        self._refuse_others()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)

    def begun_with(self, name: str) -> Any:
        """A setting of the run that lies in the folder; None where there is none or nobody can read it."""
        try:
            told = json.loads((self.folder / SETTINGS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return told.get(name) if isinstance(told, dict) else None

    def _refuse_others(self) -> None:
        """Weights and settings that no run wrote are somebody's own, and so is what a run of another kind wrote."""
        if not (self.folder / SETTINGS).exists():
            for name in (WEIGHTS, CONFIG):
                if (self.folder / name).exists():
                    raise InvalidArgument(
                        f"{self.folder}: holds a {name} that is not of a training run and would be replaced; "
                        "give another folder"
                    )
            return
        found = self._kind_found()
        if found != self.kind:
            raise InvalidArgument(
                f"{self.folder}: holds the run of a {found or 'classifier'}, not of a {self.kind or 'classifier'}; "
                "give another folder"
            )

    def _kind_found(self) -> str | None:
        try:
            told = json.loads((self.folder / SETTINGS).read_text(encoding="utf-8"))
        except ValueError:
            return self.kind  # damaged: who overwrites it may have it
        return told.get("kind") if isinstance(told, dict) else self.kind

    def _remove_leftovers(self) -> None:
        """What a killed run was writing, under the names that `replacing` gives."""
        for name in _FILES:
            for leftover in self.folder.glob(f".{Path(name).stem}.*.part{Path(name).suffix}"):
                leftover.unlink(missing_ok=True)

    def _has_begun(self) -> bool:
        """Whether anything would be lost or mixed up if other settings were taken now."""
        return self.frames.exists() or any((self.folder / name).exists() for name in (CHECKPOINT, LOG, RESULT, WEIGHTS))

    def clear(self) -> None:
        """Forget the run, its weights and the frames that were decoded for it."""
        self._refuse_others()
        for name in _FILES:
            (self.folder / name).unlink(missing_ok=True)
        if (self.frames / "bank.json").exists():
            shutil.rmtree(self.frames)

    @property
    def frames(self) -> Path:
        """Where decoded frames go."""
        return self.folder / "decoded_frames"

    @property
    def has_checkpoint(self) -> bool:
        return (self.folder / CHECKPOINT).exists()

    def save(self, state: dict[str, Any]) -> None:
        with replacing(self.folder / CHECKPOINT) as temporary:
            torch.save(state, temporary)

    def load(self) -> dict[str, Any] | None:
        """The last checkpoint, on the CPU: networks and optimisers take what they need to their device themselves.

        Counts of steps of an optimiser belong on the CPU, where reading them waits for nothing.
        """
        path = self.folder / CHECKPOINT
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
            raise WeightsError(f"{path}: cannot be read ({first_line(error)}); remove it to start again") from error
        return state

    def log(self, history: list[dict[str, Any]]) -> None:
        """The whole log again: lines of an epoch that is run twice never stand twice."""
        with replacing(self.folder / LOG) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in history), encoding="utf-8")

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.folder / RESULT, result)
        (self.folder / CHECKPOINT).unlink(missing_ok=True)

    def result(self) -> dict[str, Any] | None:
        return self._read_json(RESULT) if (self.folder / RESULT).exists() else None

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            told = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except ValueError as error:
            told = error
        if not isinstance(told, dict):
            raise WeightsError(f"{self.folder / name}: is damaged; start the run again: overwrite it") from None
        return told


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Which fields differ between two settings, with both values.

    >>> differences({"lr": 0.1, "recipe": {"epochs": 3}}, {"lr": 0.1, "recipe": {"epochs": 5}})
    ['recipe.epochs was 3, is 5']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        return [found for key in keys for found in differences(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))]
    return [] if old == new else [f"{name} was {old!r}, is {new!r}"]


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
