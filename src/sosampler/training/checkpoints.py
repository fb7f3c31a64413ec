"""The folder of a training run: its settings, the last checkpoint, the log and the result.

It is resumable: the same settings continue a run that was killed, other settings are refused.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sosampler._util.files import load_json, plain, remove_leftovers, replacing, write_text
from sosampler.bank.bank import Bank
from sosampler.classifiers.factory import CONFIG, WEIGHTS
from sosampler.errors import InvalidArgument, WeightsError, first_line
from sosampler.samplers.folder import CARD

SETTINGS, CHECKPOINT, LOG, RESULT, EVENTS = "run.json", "checkpoint.pt", "log.jsonl", "result.json", "tensorboard"
_FILES = (RESULT, CHECKPOINT, LOG, WEIGHTS, CONFIG, SETTINGS)
PRETRAIN = "pretrain"  # the folder of that stage in the run's: its checkpoint and log


class RunFolder:
    """The folder of one run.

    `kind`: what is trained, so that a run of one kind never replaces one of another; None for classifiers.
    """

    def __init__(self, folder: Path, kind: str | None = None) -> None:
        self.folder, self.kind = folder, kind
        self.frames = folder / "decoded_frames"  # the bank of frames that were decoded for the run

    def begin(self, settings: dict[str, Any], *, overwrite: bool = False) -> None:
        """Start, or resume a run of the same settings; one of other settings is refused once it has begun.

        `overwrite`: delete it first, with its weights and the frames that were decoded for it.
        """
        settings = ({} if self.kind is None else {"kind": self.kind}) | plain(settings)
        self._refuse_foreign()
        folders = (self.folder, self.folder / PRETRAIN)
        remove_leftovers(*(folder / name for folder in folders for name in (*_FILES, CARD)))
        if overwrite:
            for name in _FILES:
                for folder in folders:
                    (folder / name).unlink(missing_ok=True)
            if (self.frames / "bank.json").exists():
                shutil.rmtree(self.frames)
        if (self.folder / SETTINGS).exists():
            # Where nothing would be lost or mixed up yet, the settings may still change.
            files = (CHECKPOINT, LOG, RESULT, WEIGHTS)
            if self.frames.exists() or any((folder / name).exists() for folder in folders for name in files):
                changed = differences(self._read_json(SETTINGS), settings)
                if changed:
                    raise InvalidArgument(
                        f"{self.folder}: holds a run with other settings: {'; '.join(changed[:4])}; "
                        "give another folder, the same settings to resume it, or overwrite it"
                    )
                return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / SETTINGS, settings)

    def begun_with(self, name: str) -> Any:
        """Return a setting of the run in the folder; None where there is none that can be read."""
        return (self._known_settings() or {}).get(name)

    def _known_settings(self) -> dict[str, Any] | None:
        """Return the settings of the run in the folder; None where there are none that can be read."""
        try:
            settings = load_json(self.folder / SETTINGS)
        except (OSError, ValueError):
            return None
        return settings if isinstance(settings, dict) else None

    def _refuse_foreign(self) -> None:
        """Refuse weights and settings that no run wrote, and a run of another kind; a damaged one may be replaced."""
        if not (self.folder / SETTINGS).exists():
            for name in (WEIGHTS, CONFIG):
                if (self.folder / name).exists():
                    raise InvalidArgument(
                        f"{self.folder}: holds a {name} that is not of a training run and would be replaced; "
                        "give another folder"
                    )
        settings = self._known_settings()
        if settings is not None and settings.get("kind") != self.kind:
            titles: dict[Any, Any] = {None: "classifier", "system": "baseline"}
            kinds = [titles.get(kind, kind) for kind in (settings.get("kind"), self.kind)]
            raise InvalidArgument(
                f"{self.folder}: holds the run of a {kinds[0]}, not of a {kinds[1]}; give another folder"
            )

    def stage(self, name: str) -> RunFolder:
        """Return the folder of a stage before the run itself."""
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        return RunFolder(self.folder / name, self.kind)

    @property
    def has_checkpoint(self) -> bool:
        return (self.folder / CHECKPOINT).exists()

    def history(self) -> list[dict[str, Any]]:
        """Read the log."""
        return [json.loads(line) for line in (self.folder / LOG).read_text(encoding="utf-8").splitlines()]

    def save(self, state: dict[str, Any]) -> None:
        with replacing(self.folder / CHECKPOINT) as temporary, open(temporary, "wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:
                # Where the disk is full, torch reports its position in the file instead.
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    def load(self) -> dict[str, Any] | None:
        """Read the last checkpoint to the CPU; networks and optimisers copy what they need to their device.

        Step counts of an optimiser belong on the CPU, where reading them waits for nothing.
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
        """Write the whole log, so that an epoch that is run twice has one line."""
        write_text(self.folder / LOG, (json.dumps(line) + "\n" for line in history))

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.folder / RESULT, result)
        self.remove_checkpoint()

    def remove_checkpoint(self) -> None:
        (self.folder / CHECKPOINT).unlink(missing_ok=True)

    def result(self) -> dict[str, Any] | None:
        return self._read_json(RESULT) if (self.folder / RESULT).exists() else None

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            value = load_json(self.folder / name)
        except ValueError as error:
            value = error
        if not isinstance(value, dict):
            raise WeightsError(f"{self.folder / name}: is damaged; start the run again: overwrite it") from None
        return value


def event_writer(folder: Path, first_epoch: int) -> Any:
    """Return a `SummaryWriter` for the numbers of each epoch; None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None  # the same numbers are in log.jsonl
    # Epochs that a killed run had already written are replaced.
    return SummaryWriter(str(folder / EVENTS), purge_step=first_epoch)


def check_apart(folder: Path, bank: Bank) -> None:
    """Refuse a run folder inside a bank and the other way round: overwriting a run must not touch a bank."""
    run_path, bank_path = folder.resolve(), bank.path.resolve()
    if run_path == bank_path or run_path in bank_path.parents or bank_path in run_path.parents:
        raise InvalidArgument(f"out={folder} and the bank {bank.path} lie inside each other; keep them apart")


def bank_identity(bank: Bank) -> dict[str, str]:
    """Return path and digest, which change with the videos, their labels and splits, and how frames were taken."""
    contents = [[asdict(item) for item in bank.items], bank.classes, bank.multi_label, bank.settings]
    digest = hashlib.sha256(json.dumps(contents, default=str).encode()).hexdigest()[:16]
    return {"path": str(bank.path.resolve()), "digest": digest}


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """List the fields that differ between two settings, with both values.

    >>> differences({"lr": 0.1, "recipe": {"epochs": 3}}, {"lr": 0.1, "recipe": {"epochs": 5}})
    ['recipe.epochs was 3, is 5']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        return [text for key in keys for text in differences(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))]
    return [] if old == new else [f"{name} was {old!r}, is {new!r}"]


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")
