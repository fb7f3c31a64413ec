"""Train, dev and test splits: `make_splits` takes dev out of train and keeps groups together."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sosampler._util.validation import check_float, check_int
from sosampler.errors import InvalidArgument

if TYPE_CHECKING:
    from sosampler.datasets.manifest import Item, Manifest


SPLITS = ("train", "dev", "test")


def make_splits(manifest: Manifest, *, dev_share: float = 0.1, test_share: float = 0.0, seed: int = 0) -> Manifest:
    """Move part of train to dev, and optionally to test: whole groups, with about the same share of each class.

    Shares are of the videos in train. A manifest without splits is all train. A dev split that exists stays.
    The result depends on ids, groups, labels and `seed`, not on the order of the lines.
    """
    shares = {"dev": _share("dev_share", dev_share), "test": _share("test_share", test_share)}
    check_int("seed", seed, at_least=0)
    if sum(shares.values()) >= 1:
        raise InvalidArgument(
            f"dev_share={dev_share!r} and test_share={test_share!r} leave nothing for train; their sum must be below 1"
        )
    existing = {item.split or "train" for item in manifest.items}
    if test_share and "test" in existing:
        raise InvalidArgument(f"test_share={test_share!r} must be 0, since the manifest has a test split; leave it out")
    if "dev" in existing:
        shares["dev"] = 0.0

    groups = _groups_of([item for item in manifest.items if (item.split or "train") == "train"], seed)
    total = sum(group.size for group in groups)
    new_split: dict[str, str] = {}
    targets = {name: max(1.0, share * total) for name, share in shares.items() if share}
    class_sizes = _sum_of(groups)
    for name, target in targets.items():
        taken = _take_groups(groups, target, shares[name], class_sizes)
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
    rank: bytes  # pseudo-random order, from the seed and the key alone


def _share(name: str, value: float) -> float:
    share = check_float(name, value, at_least=0)
    if share >= 1:
        raise InvalidArgument(f"{name}={value!r} must be a share from 0 to below 1")
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


def _take_groups(groups: Sequence[_Group], target: float, share: float, class_sizes: Counter[int]) -> list[_Group]:
    """Return groups of about `target` videos, with each class near `share` of its size. `groups` are in random order.

    First every group that brings each of its classes nearer to its share, then every one that does so on average. If
    they are still too few (many classes of few videos), the groups that overshoot least: their cost only grows as
    others are taken, so a heap whose entries are updated when they surface finds them.
    """
    taken: dict[str, _Group] = {}
    got: Counter[int] = Counter()
    left = _sum_of(groups)
    size = 0

    def change(group: _Group) -> float:
        """Return how the squared distance to the shares would change, each class in units of its size."""
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

    for criterion in (helps_all, helps):
        for group in groups:
            if group.key not in taken and fits(group) and criterion(group):
                size += take(group)
    if size < target:
        heap = [(change(g) / g.size, index, g) for index, g in enumerate(groups) if g.key not in taken and fits(g)]
        heapq.heapify(heap)
        while heap and size < target:
            cost, index, group = heapq.heappop(heap)
            if not fits(group):
                continue  # nor will it later
            now = change(group) / group.size
            if now > cost:
                heapq.heappush(heap, (now, index, group))
            else:
                size += take(group)
    if not taken:
        # Every group is larger than the target: the smallest is better than none, unless it is most of train.
        whole = sum(group.size for group in groups)
        small = [g for g in groups if 2 * g.size <= whole and all(left[c] > n for c, n in g.classes)]
        return [min(small, key=lambda group: group.size)] if small else []
    return list(taken.values())
