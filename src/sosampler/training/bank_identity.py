"""Which bank a run is trained on, and that the two do not lie inside each other."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from sosampler.data.bank import Bank
from sosampler.errors import InvalidArgument


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
