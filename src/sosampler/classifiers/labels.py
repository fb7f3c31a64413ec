"""Names of classes: the well-known lists, and those a user gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sosampler.errors import InvalidArgument


def imagenet_names() -> tuple[str, ...]:
    """The 1000 classes of ImageNet-1k in their usual order, as torchvision names them."""
    from torchvision.models import ResNet50_Weights

    return tuple(ResNet50_Weights.DEFAULT.meta["categories"])


def kinetics400_names() -> tuple[str, ...]:
    """The 400 classes of Kinetics-400 in alphabetical order, as torchvision names them."""
    from torchvision.models.video import R3D_18_Weights

    return tuple(R3D_18_Weights.DEFAULT.meta["categories"])


def numbered_names(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))


def names_for(count: int, known: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """The known list where it has as many classes, numbers otherwise."""
    names = known()
    return names if len(names) == count else numbered_names(count)


def read_names(given: Sequence[str] | str | Path) -> tuple[str, ...]:
    """Class names: a list of them, or a text file with one a line."""
    if isinstance(given, (str, Path)):
        path = Path(given)
        if not path.is_file():
            raise InvalidArgument(
                f"class_names={str(given)!r}: no such file; give a list, or a file with one name a line"
            )
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        names = list(given)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument(f"class_names={names!r} is not allowed; give at least one name, each a text")
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise InvalidArgument(f"class_names holds {twice[0]!r} more than once; every class needs a name of its own")
    return tuple(names)
