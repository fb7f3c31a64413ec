"""What `--engine ray` means for select and classify: options that do not go with it, progress, and the last words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sosampler.checks import one_of
from sosampler.errors import InvalidArgument

if TYPE_CHECKING:
    from sosampler.data.shards import Progress
    from sosampler.integrations.ray_rows import RowsWritten

ENGINES = ("local", "ray")
ENGINE_HELP = "local, or ray: on a cluster; --out is then a folder of Parquet files."
ADDRESS_HELP = "HOST:PORT of a Ray cluster, or auto.  [default: one that is started on this machine]"
# Failures that are told one by one; all are in the folder.
_MAX_TOLD = 10


def check_engine(engine: str, address: str | None) -> bool:
    """Whether Ray is meant."""
    if one_of("--engine", engine, ENGINES) == "ray":
        return True
    if address is not None:
        raise InvalidArgument(f"--address {address} is of --engine ray; add that, or leave the address out")
    return False


def check_folder(out: Path | None, **unfit: Any) -> Path:
    """The folder for rows; `unfit` are options, by name, that a cluster has no use for."""
    for option, value in unfit.items():
        if value is not None:
            raise InvalidArgument(
                f"--{option.replace('_', '-')} does not go with --engine ray, which gives rows without pixels; "
                "leave it out"
            )
    if out is None:
        raise InvalidArgument("--engine ray writes rows to a folder of Parquet files; give it with --out FOLDER")
    if out.suffix.lower() in (".jsonl", ".csv"):
        raise InvalidArgument(f"--out {out}: --engine ray writes a folder of Parquet files; give the name of a folder")
    return out


def run_rows(work: Callable[[Callable[[Progress], None]], RowsWritten], what: str, json_output: bool) -> int:
    """Do the work, which is given where to tell how far it is, and say what came of it; the exit code."""
    from sosampler.cli.telling import telling

    with telling(what) as on_progress:
        done = work(on_progress)
    if done.damaged:
        typer.echo(
            f"{len(done.damaged)} damaged files in {done.out} were deleted and their videos done again", err=True
        )
    if json_output:
        told = {"num_videos": done.num_videos, "num_done_before": done.num_before, "num_failed": len(done.failures)}
        typer.echo(json.dumps({**told, "out": str(done.out), "num_written": done.num_rows, "failures": done.failures}))
    else:
        typer.echo(f"{done.num_rows} rows in {done.out}, {done.num_before} of them from an earlier run")
    for failure in done.failures[:_MAX_TOLD]:
        typer.echo(f"failed: {failure['error']}", err=True)
    if done.failures:
        typer.echo(
            f"{len(done.failures)} of {done.num_videos} videos failed, see {done.out / '_failed.jsonl'}; the same "
            "command tries them again",
            err=True,
        )
    return 1 if done.failures else 0
