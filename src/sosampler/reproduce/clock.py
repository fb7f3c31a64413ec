"""How long the rest will take, from how long parts of the same kind took."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sosampler.training.checkpoints import write_json

DURATIONS = "durations.json"
_KEPT = 20  # of each kind


@dataclass(frozen=True)
class Part:
    """Something that takes a while."""

    kind: str  # parts of one kind take about as long as each other
    title: str
    folder: Path  # of the bank and the classifier, whose durations are kept together
    weight: float = field(default=1.0, compare=False)  # how much longer it takes than the least of its kind


@dataclass
class Clock:
    """Parts that are still to be done. Each is begun and ended with `running`."""

    say: Callable[[str], None]
    left: list[Part] = field(default_factory=list)
    _durations: dict[tuple[Path, str], list[float]] = field(default_factory=dict)

    def plan(self, parts: Sequence[Part]) -> None:
        """What is to be done; kinds that an earlier run has timed are known at once."""
        self.left += parts
        for folder in {part.folder for part in parts}:
            for kind, seconds in _read(folder).items():
                self._durations.setdefault((folder, kind), seconds)

    @contextmanager
    def running(self, part: Part) -> Iterator[None]:
        """Tells what begins; afterwards how long it took and how long the rest will take."""
        self.say(f"{part.title} ...")
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        self._durations.setdefault((part.folder, part.kind), []).append(round(seconds / part.weight, 3))
        if part in self.left:
            self.left.remove(part)
        _write(part.folder, {kind: kept for (folder, kind), kept in self._durations.items() if folder == part.folder})
        self.say(f"    done in {in_words(seconds)}; {self.rest()}")

    def skip(self, part: Part) -> None:
        """It was done before."""
        if part in self.left:
            self.left.remove(part)

    def rest(self) -> str:
        """How much is left, as far as it can be told."""
        if not self.left:
            return "nothing is left"
        known, unknown = 0.0, 0
        for part in self.left:
            seconds = self._durations.get((part.folder, part.kind))
            if seconds:
                known += part.weight * statistics.median(seconds)
            else:
                unknown += 1
        count = f"{len(self.left)} {'part is' if len(self.left) == 1 else 'parts are'} left"
        if unknown == len(self.left):
            return f"{count}, for an unknown time"
        more = f" and {unknown} of unknown length" if unknown else ""
        return f"{count}, for about {in_words(known)}{more}"


def in_words(seconds: float) -> str:
    """
    >>> in_words(4.2), in_words(75), in_words(7500)
    ('4 s', '1 min 15 s', '2 h 5 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _read(folder: Path) -> dict[str, list[float]]:
    """What earlier runs took; a file that cannot be read only costs the forecast."""
    path = folder / DURATIONS
    if not path.is_file():
        return {}
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    if not isinstance(told, dict):
        return {}
    return {
        str(kind): [float(value) for value in seconds if isinstance(value, (int, float))]
        for kind, seconds in told.items()
        if isinstance(seconds, list)
    }


def _write(folder: Path, durations: dict[str, list[float]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DURATIONS, {kind: seconds[-_KEPT:] for kind, seconds in sorted(durations.items())})
