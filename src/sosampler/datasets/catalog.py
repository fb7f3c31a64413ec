"""Known public data sets: size, metric, and where to get them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """A public data set. Counts are those of its authors or of papers that use it; None where they differ."""

    name: str
    reader: str  # the argument of `datasets import`
    videos: int
    classes: int
    metric: str  # "mAP" or "top-1", as published results are given
    multi_label: bool
    where: str
    files: str  # arguments of the importer
    train: int | None = None
    test: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_KINETICS = "https://github.com/cvdfoundation/kinetics-dataset"
CATALOG: tuple[Known, ...] = (
    Known(
        name="activitynet-v1.3",
        reader="activitynet",
        videos=14_950,
        train=10_024,
        test=4_926,
        classes=200,
        metric="mAP",
        multi_label=True,
        where="http://activity-net.org/download.html (a form for the videos that left the web)",
        files="activity_net.v1-3.min.json; validation is test, the official test set has no labels",
    ),
    # The set of AR-Net, which all papers on frame sampling use. s9xie/Mini-Kinetics-200 is another one: other classes
    # of Kinetics, about 80,000 and 5,000 clips.
    Known(
        name="mini-kinetics",
        reader="frames",
        videos=131_082,
        train=121_215,
        test=9_867,
        classes=200,
        metric="top-1",
        multi_label=False,
        where="https://github.com/mengyuest/AR-Net and https://github.com/mengyuest/AdaFuse (lists; "
        f"s9xie/Mini-Kinetics-200 is another set), {_KINETICS}",
        files="mini_train_videofolder.txt mini_val_videofolder.txt (dir n_frames label), with --classes "
        "minik_classInd.txt; folders of frames or clips called ID_START_END",
    ),
    Known(
        name="mini-sports1m",
        reader="sports1m",
        videos=19_441,
        train=14_586,
        test=4_855,
        classes=487,
        metric="mAP",
        multi_label=False,
        where="https://github.com/IBM/AdaMML/issues/1 (lists)",
        files="train_minisports1m.txt test_minisports1m.txt, with --classes labels.txt of Sports-1M",
    ),
    Known("coin", "coin", 11_827, 180, "top-1", False, "https://coin-dataset.github.io", files="COIN.json"),
    Known("kinetics-400", "kinetics", 306_245, 400, "top-1", False, _KINETICS, files="train.csv val.csv; val is test"),
    Known(
        name="sports-1m",
        reader="sports1m",
        videos=1_133_158,
        classes=487,
        metric="mAP",
        multi_label=True,
        where="https://github.com/gtoderici/sports-1m-dataset",
        files="train_partition.txt test_partition.txt (or .gz), with --classes labels.txt",
    ),
)

# Not a data set, but a format in which several are shared.
FRAME_LISTS = "lists of frame folders (dir n_frames label ...), as of OCSampler, AR-Net and AdaMML: import frames"
