"""Curves for TensorBoard, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
