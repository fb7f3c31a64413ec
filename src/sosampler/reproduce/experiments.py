"""What each table and figure of the paper needs and makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sosampler.errors import InvalidArgument

ACCURACY = "accuracy"  # a table of accuracy and cost
FIDELITY = "fidelity"  # a table of the share of the optimal set that was chosen
THROUGHPUT = "throughput"  # a table of accuracy, cost and videos a second
CURVE = "curve"  # accuracy against frames and against cost, drawn
CASES = "cases"  # single videos with the frames that were chosen
INDEPENDENCE = "independence"  # densities of the likeness of neighbouring frames

KINDS = {
    ACCURACY: "table of accuracy and cost",
    FIDELITY: "table of fidelity to the optimal choice",
    THROUGHPUT: "table of accuracy, cost and videos a second",
    CURVE: "curves of accuracy against frames and cost",
    CASES: "videos with the frames that were chosen",
    INDEPENDENCE: "densities of the likeness of neighbouring frames",
}

EVERYTHING = "all"
_ANET, _KINETICS, _SPORTS, _COIN = "activitynet", "mini_kinetics", "mini_sports1m", "coin"


@dataclass(frozen=True)
class Experiment:
    """One table or figure."""

    name: str
    kind: str
    title: str
    claim: str  # what the paper says that it shows
    data: tuple[str, ...]  # the paper's data sets
    rows: tuple[str, ...] = ()  # names of the files in recipes/<name>/, in the order in which they are shown
    tables: tuple[str, ...] = ()  # where the paper prints figures of these rows; the first is the table itself
    # Cases: what the sampler does right and uniform wrong, or the other way round; None: the first videos.
    success: bool | None = None

    @property
    def metric(self) -> str:
        """What its recipes call their metric."""
        return ACCURACY if self.kind == CURVE else self.kind


_SMALL = ("uniform", "liteeval", "scsampler", "frameexit", "ocsampler", "sosampler", "sosampler-authors")
_LARGE = ("uniform", "ocsampler", "sosampler", "sosampler-default")
_CASES = ("uniform", "sosampler", "semi-optimal", "optimal")

_EXPERIMENTS = (
    Experiment(
        "table1",
        ACCURACY,
        "The optimal and the semi-optimal policy",
        "Frames that are scored one by one come near to the best set of frames, and both are far above uniform.",
        (_ANET, _KINETICS),
        ("uniform", "all", "semi-optimal", "optimal"),
        ("table1",),
    ),
    Experiment(
        "table2",
        FIDELITY,
        "Fidelity to the optimal choice",
        "The semi-optimal policy shares most frames with the optimal one, a fixed order as many as chance.",
        (_ANET, _KINETICS),
        ("random", "frameexit", "semi-optimal"),
        ("table2",),
    ),
    Experiment(
        "table3",
        ACCURACY,
        "Few frames of few candidates: ActivityNet and Mini-Kinetics",
        "SOSampler is ahead of other systems at the same or a lower cost, whatever the classifier.",
        (_ANET, _KINETICS),
        (*_SMALL, "sosampler-default"),
        ("table3", "table1"),
    ),
    Experiment(
        "table4",
        ACCURACY,
        "Few frames of few candidates: Mini-Sports1M and COIN",
        "SOSampler is ahead of other systems at the same or a lower cost on two more data sets.",
        (_SPORTS, _COIN),
        ("uniform", "liteeval", "scsampler", "ocsampler", "sosampler", "sosampler-default"),
        ("table4",),
    ),
    Experiment(
        "table5",
        ACCURACY,
        "Many frames of many candidates, long videos",
        "SOSampler stays above uniform as N and T grow; OCSampler, which searches sets of frames, falls behind.",
        (_ANET, _SPORTS),
        _LARGE,
        ("table5",),
    ),
    Experiment(
        "table6",
        ACCURACY,
        "Which loss",
        "Ranking is better than squared errors, the highest confidence better than the label's, and label guidance "
        "helps a little.",
        (_ANET,),
        ("uniform", "mse-label", "mse-label-lg", "ranking-label", "ranking-label-lg", "ranking-max-lg"),
        ("table6", "table1"),
    ),
    Experiment(
        "table7",
        ACCURACY,
        "How many frames of how many candidates",
        "More frames and more candidates help, each a little less than the one before.",
        (_ANET,),
        ("uniform", "sosampler-6-of-6", "sosampler", "sosampler-default"),
        ("table7", "table1"),
    ),
    Experiment(
        "tableI",
        ACCURACY,
        "Many frames of many candidates, short videos",
        "Where neighbouring frames are alike the gain is small, but SOSampler stays ahead of OCSampler.",
        (_KINETICS, _COIN),
        _LARGE,
        ("tableI",),
    ),
    Experiment(
        "tableII",
        THROUGHPUT,
        "Videos a second",
        "SOSampler takes fewer multiply-adds than other systems and classifies more videos a second.",
        (_ANET,),
        ("uniform", "adaframe", "frameexit", "ocsampler", "sosampler", "sosampler-6"),
        ("tableII", "table3", "table1"),
    ),
    Experiment(
        "figure1",
        INDEPENDENCE,
        "How alike neighbouring frames are",
        "Up to one frame a second frames stand by themselves; five a second are on the borderline.",
        (_ANET,),
    ),
    Experiment(
        "figure2",
        CASES,
        "What the semi-optimal policy chooses",
        "Each frame is scored by itself, and the six surest are taken.",
        (_ANET,),
        ("uniform", "semi-optimal"),
        ("table1",),
    ),
    Experiment(
        "figure4",
        CURVE,
        "Accuracy by sampler across N of T",
        "OCSampler falls below uniform from 16 of 60 on, SOSampler does not.",
        (_ANET,),
        _LARGE,
        ("table5", "table3", "table1"),
    ),
    Experiment(
        "figureI",
        CURVE,
        "Accuracy against cost",
        "At every cost SOSampler is ahead of the other systems.",
        (_ANET,),
        ("uniform", "liteeval", "scsampler", "frameexit", "ocsampler", "sosampler", "sosampler-default"),
        ("table7", "table3", "table1"),
    ),
    Experiment(
        "figureII",
        CASES,
        "Where SOSampler does well",
        "On most videos it chooses nearly as the semi-optimal and the optimal policy do.",
        (_ANET,),
        _CASES,
        ("table3", "table1"),
        success=True,
    ),
    Experiment(
        "figureIII",
        CASES,
        "Where SOSampler fails",
        "On some videos it scatters its frames while the semi-optimal policy finds the right part.",
        (_ANET,),
        _CASES,
        ("table3", "table1"),
        success=False,
    ),
)

EXPERIMENTS = {experiment.name: experiment for experiment in _EXPERIMENTS}


def list_experiments() -> list[str]:
    """Names that `reproduce` takes, besides "all".

    >>> list_experiments()[:3]
    ['table1', 'table2', 'table3']
    """
    return list(EXPERIMENTS)


def experiments_of(names: Iterable[str] | str, data: str | None = None) -> list[Experiment]:
    """The experiments that are meant, each once and in the paper's order.

    Args:
        names: of experiments; "all" is every one that the paper has for this data set.
        data: one of the paper's data sets, or None, for which "all" is all.
    """
    asked: Sequence[str] = [names] if isinstance(names, str) else list(names)
    if not asked:
        raise InvalidArgument(f"no experiment is named; give some of: {', '.join(EXPERIMENTS)}, or {EVERYTHING}")
    wanted = set()
    for name in asked:
        if name == EVERYTHING:
            wanted |= {one.name for one in _EXPERIMENTS if data is None or data in one.data}
        elif name in EXPERIMENTS:
            wanted.add(name)
        else:
            raise InvalidArgument(
                f"experiment={name!r} is unknown; choose from: {', '.join(EXPERIMENTS)}, or {EVERYTHING}"
            )
    return [experiment for experiment in _EXPERIMENTS if experiment.name in wanted]
