"""What a network said about the frames of a bank, read from disk: the base of teachers and of features."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from sosampler.data.bank_format import AnswersFolder, read_json
from sosampler.data.bank_rows import OpenShards, checked_index
from sosampler.errors import SosamplerError

if TYPE_CHECKING:
    from sosampler.data.bank import Bank

Answer = TypeVar("Answer")


class BankAnswers(Sequence[Answer]):
    """One network's answers, in the order of the bank's videos. Pickles as its name, so that workers reopen it."""

    def __init__(self, bank: Bank, name: str, folder: AnswersFolder, about: dict[str, Any], schema: Any) -> None:
        self.bank, self.name, self.folder, self.about = bank, name, folder, about
        self.schema = schema  # columns of its shards
        self._shards = OpenShards(folder.shard, folder.again)

    def __reduce__(self) -> Any:
        return type(self), (self.bank, self.name)

    def __len__(self) -> int:
        return len(self.bank)

    def __getitem__(self, index: Any) -> Any:
        """Of one video; a list for a slice."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return self._answer(self.batch(index))

    def batch(self, index: Any) -> Any:
        """The row of a video as Arrow keeps it."""
        row = self.bank.rows[checked_index(index, len(self), self.bank.path)]
        batch = self._shards.batch(row)
        if batch.schema != self.schema:
            raise SosamplerError(
                f"{self.folder.shard(row.shard)}: does not hold what {self.folder.head.name} says; "
                f"delete the folder of both and {self.folder.again}"
            )
        return batch

    @property
    def fingerprint(self) -> str:
        return str(self.about["fingerprint"])

    @abstractmethod
    def _answer(self, batch: Any) -> Answer:
        """What a row says."""


def read_answers_head(folder: AnswersFolder, kind: str, keys: Sequence[str], remedy: str) -> dict[str, Any]:
    """teacher.json or features.json, with all keys."""
    told = read_json(folder.head, kind, remedy)
    missing = [key for key in keys if key not in told]
    if missing:
        raise SosamplerError(f"{folder.head}: lacks {missing[0]!r}; {remedy}")
    return told


def check_finished(folder: AnswersFolder, num_shards: int, what: str, remedy: str) -> None:
    """All shards are there, or say how many are not."""
    missing = folder.missing(num_shards)
    if missing:
        raise SosamplerError(f"{folder.path}: {len(missing)} of {num_shards} parts of {what} are missing; {remedy}")
