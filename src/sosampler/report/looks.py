"""How a policy is drawn: what kind it is, and a colour, a mark and a dash that tell it from the others.

Kinds differ in colour, dash and the filling of their marks, policies of one kind in the shape of their marks: nothing
depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

RULE, LEARNED, ORACLE = "rule", "learned", "oracle"

MEANINGS = {
    RULE: "learned nothing: goes by places in time, or by how much the pictures differ",
    LEARNED: "looks at the candidates with a small network",
    ORACLE: "knows what the classifier says about every candidate; a bound, not a method",
}
"""Kinds and what they know."""

_RULES = (
    *("uniform", "random", "centre", "frameexit", "all", "keyframe"),
    *("frame-difference", "difference-peaks", "farthest-first", "dpp"),
)
_ORACLES = ("semi-optimal", "semi-optimal-max", "optimal")

_DASHES = {RULE: (4.0, 2.2), LEARNED: (), ORACLE: (1.2, 1.8)}  # lengths of line and gap, in line widths
_NUM_COLOURS = {RULE: 1, LEARNED: 3, ORACLE: 1}
# matplotlib's marks, and the same as text: filled ones, for oracles open ones
_MARKS = {
    RULE: (("s", "■"), ("X", "✖"), ("P", "✚"), ("v", "▼"), ("^", "▲")),
    LEARNED: (("o", "●"), ("p", "⬟"), ("h", "⬢")),
    ORACLE: (("D", "◇"), ("^", "△"), ("v", "▽"), ("s", "□"), ("p", "⬠")),
}


@dataclass(frozen=True)
class Look:
    """How one policy is drawn."""

    kind: str
    colour: str  # name of a colour of the page: "rule", "learned-1", "oracle"
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


def looks_of(policies: Iterable[str]) -> dict[str, Look]:
    """A look for each policy, in the order in which they are first named."""
    looks: dict[str, Look] = {}
    used = dict.fromkeys(MEANINGS, 0)
    for policy in dict.fromkeys(policies):
        kind = kind_of(policy)
        number = used[kind]
        used[kind] += 1
        mark, symbol = _MARKS[kind][number % len(_MARKS[kind])]
        several = _NUM_COLOURS[kind]
        colour = kind if several == 1 else f"{kind}-{number % several + 1}"
        looks[policy] = Look(kind, colour, mark, symbol, _DASHES[kind])
    return looks
