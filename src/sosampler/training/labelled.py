"""Which videos of a bank are trained on and which are measured."""

from __future__ import annotations

from sosampler.data.bank import Bank
from sosampler.errors import InvalidArgument


def labelled_rows(bank: Bank, *, least: int = 2) -> dict[str, list[int]]:
    """Places in the bank of the videos of "train" and "dev" with a label, and of those of both that are "unlabelled".

    Args:
        bank: a bank, or one split of it.
        least: videos that train must have.
    """
    found: dict[str, list[int]] = {"train": [], "dev": [], "unlabelled": []}
    for row, item in enumerate(bank.items):
        split = item.split or "train"
        if split in ("train", "dev"):
            found[split if item.labels else "unlabelled"].append(row)
    if len(found["train"]) < least:
        raise InvalidArgument(
            f"{bank.path}: {len(found['train'])} videos with a label in the train split; give at least {least}"
        )
    return found
