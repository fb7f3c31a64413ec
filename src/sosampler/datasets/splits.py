"""Train, dev and test: what they are called, and how dev is carved out of train without tearing a group apart."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sosampler._util.validation import real_number, whole_number
from sosampler.errors import InvalidArgument

if TYPE_CHECKING:
    from sosampler.datasets.manifest import Item, Manifest


SPLITS = ("train", "dev", "test")

# What users call them. An official "validation" on which papers report is mapped by its importer instead.
_WORDS = {"train": "train", "training": "train", "dev": "dev", "val": "dev", "valid": "dev", "validation": "dev"} | {
    "test": "test",
    "testing": "test",
}


def split_word(word: str) -> str | None:
    """train, dev or test for a word that means one of them, else None.

    >>> split_word("Validation"), split_word("fold1")
    ('dev', None)
    """
    return _WORDS.get(word.strip().lower())


def make_splits(manifest: Manifest, *, dev_share: float = 0.1, test_share: float = 0.0, seed: int = 0) -> Manifest:
    """Carve dev, and test if asked, out of train: whole groups, each class in its share as well as groups allow.

    Shares are of the videos in train. A manifest without splits is all train. A dev split that is already there stays
    as it is. The result depends on ids, groups, labels and `seed`, not on the order of the lines.
    """
    shares = {"dev": _share("dev_share", dev_share), "test": _share("test_share", test_share)}
    whole_number("seed", seed, at_least=0)
    if sum(shares.values()) >= 1:
        raise InvalidArgument(
            f"dev_share={dev_share!r} and test_share={test_share!r} leave nothing to train on; give less than 1 in all"
        )
    there = {item.split or "train" for item in manifest.items}
    if test_share and "test" in there:
        raise InvalidArgument(
            f"test_share={test_share!r} was asked for, but the manifest has a test split; leave test_share at 0"
        )
    if "dev" in there:
        shares["dev"] = 0.0

    groups = _groups_of([item for item in manifest.items if (item.split or "train") == "train"], seed)
    total = sum(group.size for group in groups)
    new_split: dict[str, str] = {}
    targets = {name: max(1.0, share * total) for name, share in shares.items() if share}
    class_sizes = _sum_of(groups)
    for name, target in targets.items():
        taken = _carve(groups, target, shares[name], class_sizes)
        if not taken:
            raise InvalidArgument(
                f"{name}_share={shares[name]!r} takes no group out of the {len(groups)} in train "
                f"({total} videos) without losing a class there; give smaller groups, more videos or a share of 0"
            )
        new_split |= dict.fromkeys((group.key for group in taken), name)
        groups = [group for group in groups if group.key not in new_split]
    items = tuple(
        replace(item, split=new_split.get(item.group_key, "train")) if (item.split or "train") == "train" else item
        for item in manifest.items
    )
    return replace(manifest, items=items)


@dataclass(frozen=True)
class _Group:
    key: str
    size: int  # videos
    classes: tuple[tuple[int, int], ...]  # (class, videos of it), sorted; -1 stands for "no label"
    rank: bytes  # pseudo-random place, from the seed and the key alone


def _share(name: str, value: float) -> float:
    share = real_number(name, value, at_least=0)
    if share >= 1:
        raise InvalidArgument(f"{name}={value!r} is not allowed; give a share from 0 to below 1")
    return share


def _groups_of(items: Sequence[Item], seed: int) -> list[_Group]:
    sizes: Counter[str] = Counter()
    classes: dict[str, Counter[int]] = {}
    for item in items:
        sizes[item.group_key] += 1
        classes.setdefault(item.group_key, Counter()).update(item.labels or (-1,))
    groups = [_Group(key, size, tuple(sorted(classes[key].items())), _rank(seed, key)) for key, size in sizes.items()]
    return sorted(groups, key=lambda group: (group.rank, group.key))


def _rank(seed: int, key: str) -> bytes:
    return hashlib.blake2b(f"{seed}\n{key}".encode(), digest_size=8).digest()


def _sum_of(groups: Sequence[_Group]) -> Counter[int]:
    total: Counter[int] = Counter()
    for group in groups:
        for label, count in group.classes:
            total[label] += count
    return total


def _carve(groups: Sequence[_Group], target: float, share: float, class_sizes: Counter[int]) -> list[_Group]:
    """Groups of about `target` videos together, each class near `share` of its size. `groups` are in random order.

    First every group in turn that brings each of its classes nearer to its share, then every one that does so on the
    whole. Then, if the whole is still too small
    (many classes of few videos), the groups that overshoot least: what they cost only grows as others are taken, so a
    heap whose entries are brought up to date when they surface finds them.
    """
    taken: dict[str, _Group] = {}
    got: Counter[int] = Counter()
    left = _sum_of(groups)
    size = 0

    def change(group: _Group) -> float:
        """How the squared distance to the shares would change, each class in units of its size."""
        return sum(n * (2 * (got[c] - share * class_sizes[c]) + n) / class_sizes[c] for c, n in group.classes)

    def helps_all(group: _Group) -> bool:
        return all(2 * (got[c] - share * class_sizes[c]) + n < 0 for c, n in group.classes)

    def helps(group: _Group) -> bool:
        return change(group) < 0

    def fits(group: _Group) -> bool:
        # Nearer to the target than without it, and no class is lost to what remains.
        return group.size < 2 * (target - size) and all(left[c] > n for c, n in group.classes)

    def take(group: _Group) -> int:
        taken[group.key] = group
        for c, n in group.classes:
            got[c] += n
            left[c] -= n
        return group.size

    for rule in (helps_all, helps):
        for group in groups:
            if group.key not in taken and fits(group) and rule(group):
                size += take(group)
    if size < target:
        heap = [(change(g) / g.size, place, g) for place, g in enumerate(groups) if g.key not in taken and fits(g)]
        heapq.heapify(heap)
        while heap and size < target:
            believed, place, group = heapq.heappop(heap)
            if not fits(group):
                continue  # nor will it later
            now = change(group) / group.size
            if now > believed:
                heapq.heappush(heap, (now, place, group))
            else:
                size += take(group)
    if not taken:
        # Every group is larger than asked for: the smallest is better than none, unless it is most of train.
        whole = sum(group.size for group in groups)
        small = [g for g in groups if 2 * g.size <= whole and all(left[c] > n for c, n in g.classes)]
        return [min(small, key=lambda group: group.size)] if small else []
    return list(taken.values())
