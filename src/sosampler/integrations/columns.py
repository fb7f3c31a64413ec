"""Selections and predictions as rows of flat columns, and those as a Parquet file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler.errors import MissingDependency
from sosampler.steps import Row, as_text


def import_parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency("Parquet needs pyarrow; install it with: pip install 'sosampler[parquet]'") from error
    return pyarrow, pyarrow.parquet


@dataclass(frozen=True)
class Column:
    """One column: "text", "whole", "real", or a list of these ("texts", ...), and where its value is in a row."""

    kind: str
    value: Callable[[Row], Any]


def _at(*keys: str) -> Callable[[Row], Any]:
    def value(row: Row) -> Any:
        found: Any = row
        for key in keys:
            found = found[key]
        return found

    return value


def _selection_columns(*under: str) -> dict[str, Column]:
    """Of a selection that lies under these keys of the row, but for the video."""
    own = {
        **{"policy": "text", "num_frames": "whole", "num_candidates": "whole"},
        **{"frame_indices": "wholes", "pts_seconds": "reals", "scores": "reals"},
    }
    offered = {"mode": "text", "frame_indices": "wholes", "pts_seconds": "reals", "moved_seconds": "reals"}
    video = {
        **{"total_num_frames": "whole", "fps": "real", "duration": "real"},
        **{"width": "whole", "height": "whole", "codec": "text"},
    }
    return {
        **{name: Column(kind, _at(*under, name)) for name, kind in own.items()},
        **{f"candidate_{name}": Column(kind, _at(*under, "candidates", name)) for name, kind in offered.items()},
        **{name: Column(kind, _at(*under, "metadata", name)) for name, kind in video.items()},
        "notes": Column("texts", _at(*under, "notes")),
    }


_VIDEO = Column("text", lambda row: as_text(row["video"]))
SELECTION_COLUMNS = {"video": _VIDEO, **_selection_columns()}
PREDICTION_COLUMNS = {
    "video": _VIDEO,
    "label": Column("text", _at("label")),
    "probability": Column("real", _at("probability")),
    "top_labels": Column("texts", lambda row: [each["label"] for each in row["top"]]),
    "top_probabilities": Column("reals", lambda row: [each["probability"] for each in row["top"]]),
    "seconds": Column("real", _at("timing", "total")),
    **_selection_columns("selection"),
}


def write_parquet(path: Path, rows: Sequence[Row], columns: dict[str, Column]) -> None:
    """The rows as one file."""
    pa, pq = import_parquet()
    kinds = {"text": pa.string(), "whole": pa.int64(), "real": pa.float64()}
    kinds |= {f"{name}s": pa.list_(kind) for name, kind in kinds.items()}
    schema = pa.schema({name: kinds[column.kind] for name, column in columns.items()})
    flat = [{name: column.value(row) for name, column in columns.items()} for row in rows]
    pq.write_table(pa.Table.from_pylist(flat, schema=schema), path)
