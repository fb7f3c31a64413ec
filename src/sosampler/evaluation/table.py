"""Rows of an evaluation as text and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sosampler.evaluation.rows import EvaluationRow

_NAMES = {"top1": "top-1 %", "mAP": "mAP %"}


def text_table(rows: Sequence[EvaluationRow], metric: str) -> str:
    """Columns for people: metrics in percent, the main one first and with its 95 % interval.

    N and decoded of a system are means over videos, which their decimals tell. Where uniform has another N than the
    row, that N stands behind the difference.
    """
    other = "mAP" if metric == "top1" else "top1"
    heads = ["policy", "N", "T", _NAMES[metric], "95 %", _NAMES[other], "vs uniform", "95 %"]
    # Without the classifier at hand the cost of the samplers is all that is known.
    whole = any(row.gmacs is not None for row in rows)
    cost = "gmacs" if whole else "sampler_gmacs"
    some_cost = any(getattr(row, cost) for row in rows)
    heads += ["fidelity %", "recovered %", "GMACs" if whole else "sampler GMACs", "decoded"]
    lines = [heads]
    for row in rows:
        versus = row.versus_uniform
        lines.append(
            [
                row.policy,
                _frames(row.frames_classified),
                str(row.num_candidates),
                _percent(getattr(row, metric)),
                _bounds(row.ci95.get(metric)),
                _percent(getattr(row, other)),
                _versus(row),
                "" if versus is None else _bounds(versus["ci95"], sign=True),
                _percent(row.fidelity),
                _percent(row.recovered),
                f"{getattr(row, cost):.2f}" if some_cost and getattr(row, cost) is not None else "",
                _frames(row.frames_decoded),
            ]
        )
    # A column in which nobody has anything is left out.
    kept = [column for column in range(len(heads)) if any(line[column] for line in lines[1:])]
    widths = [max(len(line[column]) for line in lines) for column in kept]
    text = []
    for line in lines:
        cells = [line[column].rjust(width) for column, width in zip(kept, widths, strict=True)]
        cells[0] = line[kept[0]].ljust(widths[0])
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def _percent(value: float | None, *, sign: bool = False) -> str:
    """
    >>> _percent(0.1234), _percent(0.05, sign=True), _percent(-0.0001, sign=True), _percent(None)
    ('12.3', '+5.0', '+0.0', '')
    """
    if value is None:
        return ""
    rounded = round(100 * value, 1) + 0.0  # no -0.0
    return f"{rounded:{'+' if sign else ''}.1f}"


def _versus(row: EvaluationRow) -> str:
    versus = row.versus_uniform
    if versus is None:
        return ""
    with_frames = f" (N={versus['num_frames']})" if versus["num_frames"] != row.num_frames else ""
    return _percent(versus["difference"], sign=True) + with_frames


def _frames(count: float) -> str:
    """
    >>> _frames(6), _frames(3.42), _frames(3.0)
    ('6', '3.4', '3.0')
    """
    return str(count) if isinstance(count, int) else f"{count:.1f}"


def _bounds(bounds: Sequence[float] | None, *, sign: bool = False) -> str:
    return "" if bounds is None else f"{_percent(bounds[0], sign=sign)}..{_percent(bounds[1], sign=sign)}"


def csv_text(rows: Sequence[EvaluationRow]) -> str:
    """One line a row, one column a number; what is not known is empty."""
    flat = [_flat(row) for row in rows]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def _flat(row: EvaluationRow) -> dict[str, Any]:
    told = row.to_dict()
    ci95, versus, gap = told.pop("ci95"), told.pop("versus_uniform"), told.pop("gap")
    for name in ("top1", "mAP"):
        told[f"{name}_low"], told[f"{name}_high"] = ci95.get(name, (None, None))
    told["versus_uniform"] = None if versus is None else versus["difference"]
    bounds = None if versus is None else versus["ci95"]
    told["versus_uniform_low"], told["versus_uniform_high"] = bounds or (None, None)
    told["versus_uniform_num_frames"] = None if versus is None else versus["num_frames"]
    for name in ("max", "mean", "share_below_1e-3"):
        told[f"gap_{name}"] = None if gap is None else gap[name]
    return told
