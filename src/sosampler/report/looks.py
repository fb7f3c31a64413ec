"""How a policy is drawn: what kind it is, and a colour, a mark and a dash that tell it from the others.

Kinds differ in colour, dash and the filling of their marks, policies of one kind in the shape of their marks: nothing
depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sosampler.evaluation.dials import AUTO_SUFFIX, is_system, split_dial

RULE, LEARNED, SYSTEM, ORACLE = "rule", "learned", "system", "oracle"

MEANINGS = {
    RULE: "learned nothing: goes by places in time, or by how much the pictures differ",
    LEARNED: "looks at the candidates with a small network",
    SYSTEM: "looks at one frame after another, stops by itself, and names the class with layers of its own",
    ORACLE: "knows what the classifier says about every candidate; a bound, not a method",
}
"""Kinds and what they know."""

_RULES = (
    *("uniform", "random", "centre", "frameexit", "all", "keyframe"),
    *("frame-difference", "difference-peaks", "farthest-first", "dpp"),
)
_ORACLES = ("semi-optimal", "semi-optimal-max", "optimal")

# lengths of line and gap, in line widths
_DASHES = {RULE: (4.0, 2.2), LEARNED: (), SYSTEM: (6.0, 1.6, 1.2, 1.6), ORACLE: (1.2, 1.8)}
_NUM_COLOURS = {RULE: 1, LEARNED: 3, SYSTEM: 2, ORACLE: 1}
# matplotlib's marks, and the same as text: filled ones, for oracles open ones
_MARKS = {
    RULE: (("s", "■"), ("X", "✖"), ("P", "✚"), ("v", "▼"), ("^", "▲"), ("d", "♦"), ("H", "⬣")),
    LEARNED: (("o", "●"), ("p", "⬟"), ("h", "⬢"), ("D", "◆"), ("*", "★")),
    SYSTEM: (("<", "◀"), (">", "▶"), ("D", "◆"), ("*", "★"), ("d", "♦")),
    ORACLE: (("D", "◇"), ("^", "△"), ("v", "▽"), ("s", "□"), ("p", "⬠")),
}


@dataclass(frozen=True)
class Look:
    """How one policy is drawn."""

    kind: str
    colour: str  # name of a colour of the page: "rule", "learned-1", "system-1", "oracle"
    mark: str  # matplotlib's name
    symbol: str  # the same as text
    dash: tuple[float, ...]

    @property
    def is_open(self) -> bool:
        """Whether its marks are outlines."""
        return self.kind == ORACLE


def kind_of(policy: str) -> str:
    """
    >>> kind_of("uniform"), kind_of("dpp"), kind_of("semi-optimal+mmr"), kind_of("runs/a"), kind_of("runs/a+dpp")
    ('rule', 'rule', 'oracle', 'learned', 'learned')
    """
    base = policy.split("+")[0]
    return RULE if base in _RULES else ORACLE if base in _ORACLES else LEARNED


def looks_of(policies: Iterable[str], systems: Collection[str] = ()) -> dict[str, Look]:
    """A look for each policy, in the order in which they are first named.

    Names in `systems` are systems. All values NAME@VALUE of a dial have the look of NAME, which is given too.
    """
    looks: dict[str, Look] = {}
    used = dict.fromkeys(MEANINGS, 0)
    for policy in dict.fromkeys(policies):
        of_system = policy in systems
        name = split_dial(policy)[0] if of_system else policy
        if name not in looks:
            kind = SYSTEM if of_system and not name.endswith(AUTO_SUFFIX) else kind_of(policy)
            number = used[kind]
            used[kind] += 1
            mark, symbol = _MARKS[kind][number % len(_MARKS[kind])]
            several = _NUM_COLOURS[kind]
            colour = kind if several == 1 else f"{kind}-{number % several + 1}"
            looks[name] = Look(kind, colour, mark, symbol, _DASHES[kind])
        looks[policy] = looks[name]
    return looks


def looks_of_rows(rows: Sequence[Mapping[str, Any]], more: Iterable[str] = ()) -> dict[str, Look]:
    """The same for rows of an evaluation, as its JSON has them, and further policies."""
    systems = {row["policy"] for row in rows if is_system(row)}
    return looks_of([*(row["policy"] for row in rows), *more], systems)
