"""How good a trained system is on videos it was not trained on, and what it spends there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sosampler.errors import InvalidArgument
from sosampler.evaluation.metrics import mean_average_precision, top1
from sosampler.systems.base import System, Views, decoded_frames, predict, video_gmacs
from sosampler.training.divergence import finite_or_none


def metric_of(system: System) -> str:
    """mAP for several labels a video, else top-1."""
    return "mAP" if system.multi_label else "top1"


def measure_system(
    system: System, views: Views, labels: Tensor, *, heavy_gmacs: float, light_gmacs: float
) -> dict[str, Any]:
    """The measure by its name, and means over videos of frames and giga multiply-adds.

    Args:
        system: as it is turned.
        views, labels: of videos, as `bank_views` gives them.
        heavy_gmacs, light_gmacs: of one frame in the two networks.
    """
    output = predict(system, views)
    if not bool(output.probabilities.isfinite().all()):
        raise InvalidArgument(
            f"{system.name} gives probabilities that are not finite on dev; look for such numbers in the features of "
            "its videos, or give a lower lr"
        )
    probabilities, truth = output.probabilities.numpy(), labels.cpu().numpy()
    found = mean_average_precision(probabilities, truth) if system.multi_label else top1(probabilities, truth)
    spent = video_gmacs(system, output, heavy_gmacs=heavy_gmacs, light_gmacs=light_gmacs)
    return {
        metric_of(system): finite_or_none(found),
        "frames": float(output.seen_heavy.sum(dim=1).double().mean()),
        "frames_decoded": float(decoded_frames(output).double().mean()),
        "gmacs": float(spent.double().mean()),
    }


def dial_curve(system: System, views: Views, labels: Tensor, **gmacs: float) -> list[dict[str, Any]]:
    """`measure_system` for each value of the dial, from cheap to costly."""
    return [
        {"dial": system.dial, "value": value, **measure_system(system.turned(value), views, labels, **gmacs)}
        for value in system.dial_values
    ]
