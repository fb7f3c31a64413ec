"""A Ray cluster, and Ray Data on it: tables stream through a pool of decoders and a pool of networks.

Decoders run on CPUs, networks on GPUs or CPUs. Ray Data keeps as much in flight as fits into its object store, and
repeats what was in flight on an actor or machine that died.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sosampler._util.validation import check_int
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError, first_line

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class RaySettings:
    """The cluster, and how many actors run on it."""

    # HOST:PORT, or "auto" for the cluster on this machine; None: that of RAY_ADDRESS, or one that is started here.
    address: str | None = None
    decoders: int | None = None  # actors that decode, one CPU each; None takes as many as the cluster has
    networks: int | None = None  # actors that run the networks; None takes one a GPU, or half of the CPUs without GPUs
    gpus_each: float | None = None  # of a network's actor; None takes 1 where the cluster has GPUs, 0 keeps it on CPUs
    batch_size: int = 8  # videos in one call of a network

    def __post_init__(self) -> None:
        for name in ("decoders", "networks"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name))
        check_int("batch_size", self.batch_size)


def import_ray() -> Any:
    """Return ray, with ray.data."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingDependency("Ray is not installed; install it with: pip install 'sosampler[ray]'") from error
    return ray


def absolute(name: Any) -> Any:
    """Return the path of an existing file or folder for workers in other folders; other names as they are."""
    return os.path.abspath(name) if isinstance(name, (str, os.PathLike)) and os.path.exists(name) else name


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect to Ray. An existing connection is used, and kept."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray's own messages belong into its log files
    options: dict[str, Any] = {"include_dashboard": False} if where == "local" else {}
    try:
        try:
            ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:
            if where != "local":
                raise _no_cluster(where, error) from error
            raise SosamplerError(f"Ray cannot be started on this machine ({first_line(error)}); try again") from error
        yield ray
    finally:
        ray.shutdown()


def check_address(address: str | None) -> None:
    """Check that HOST:PORT accepts connections; Ray itself would wait for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(str(address), error) from error


def _no_cluster(address: str, error: Exception) -> InvalidArgument:
    return InvalidArgument(
        f"address={address!r}: no Ray cluster answers there ({first_line(error)}); start one with `ray start --head`, "
        "or leave the address out to use this machine alone"
    )


@dataclass(frozen=True)
class Stage:
    """A pool of actors: tables in, tables out."""

    actor: type
    arguments: tuple[Any, ...]
    batch_size: int | None = None  # rows of a call; None takes a block as it is


def execute(
    rows: list[dict[str, Any]], decode: Stage, network: Stage | None, settings: RaySettings, *, max_block: int
) -> Iterator[Any]:
    """Yield the tables of the last stage, in no order, but for blocks that Ray gives up. Call it connected."""
    ray = import_ray()
    pools = pool_sizes(ray.cluster_resources(), settings, with_network=network is not None)
    # A few blocks an actor, so that all of them have work until the end.
    block = min(max_block, max(1, len(rows) // (4 * pools.decoders)))
    with _context(ray):
        data = ray.data.from_items(rows, override_num_blocks=math.ceil(len(rows) / block))
        for stage, actors, gpus in ((decode, pools.decoders, None), (network, pools.networks, pools.gpus_each or None)):
            if stage is not None:
                data = data.map_batches(
                    stage.actor,
                    fn_constructor_args=stage.arguments,
                    batch_size=stage.batch_size,
                    batch_format="pyarrow",
                    # A pool that grows is half as large for the first minute. One actor alone is enough to begin.
                    compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors, initial_size=actors),
                    num_cpus=pools.cpus_each,
                    num_gpus=gpus,
                )
        try:
            yield from data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
        except ray.exceptions.RayError as error:
            raise SosamplerError(
                f"the Ray cluster failed ({first_line(error)}); finished work stays: run the same again to resume"
            ) from error


@contextmanager
def _context(ray: Any) -> Iterator[None]:
    """Make Ray Data quiet, and let it continue when it gives up a block."""
    context = ray.data.DataContext.get_current()
    changed = {"enable_progress_bars": False, "print_on_execution_start": False, "max_errored_blocks": -1}
    before = {name: getattr(context, name) for name in changed}
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # lost videos are sent again or listed as failed
    for name, value in changed.items():
        setattr(context, name, value)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            setattr(context, name, value)


@dataclass(frozen=True)
class Pools:
    """Maximum numbers of actors, and what each takes."""

    decoders: int
    networks: int
    cpus_each: float
    gpus_each: float


def pool_sizes(resources: dict[str, float], settings: RaySettings, *, with_network: bool) -> Pools:
    """Return as many actors as the cluster can hold.

    >>> pool_sizes({"CPU": 32, "GPU": 4}, RaySettings(), with_network=True)
    Pools(decoders=28, networks=4, cpus_each=1.0, gpus_each=1.0)
    >>> pool_sizes({"CPU": 1}, RaySettings(), with_network=True)
    Pools(decoders=1, networks=1, cpus_each=0.5, gpus_each=0.0)
    """
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    gpus_each = (1.0 if gpus >= 1 else 0.0) if settings.gpus_each is None else float(settings.gpus_each)
    if gpus_each > gpus:
        raise InvalidArgument(f"gpus_each={gpus_each:g} is more than the cluster has ({gpus:g}); lower it, or add GPUs")
    if not with_network:
        return Pools(settings.decoders or max(1, int(cpus)), 0, min(1.0, cpus or 1.0), 0.0)
    each = 1.0 if cpus >= 2 else 0.5
    networks = settings.networks or max(1, int(gpus / gpus_each) if gpus_each else int(cpus / 2))
    return Pools(settings.decoders or max(1, int(cpus) - min(networks, int(cpus / 2))), networks, each, gpus_each)


def placed(device: str | None, settings: RaySettings, resources: dict[str, float]) -> tuple[str, RaySettings]:
    """Return the device of the networks: the given one, or GPUs where the cluster has any."""
    if device is not None and not device.startswith("cuda"):
        return device, replace(settings, gpus_each=0.0)
    gpus = pool_sizes(resources, settings, with_network=True).gpus_each
    if device is not None and not gpus:
        raise InvalidArgument(f"device={device!r}: the cluster has no GPU; leave the device out, or add a GPU")
    return "cuda" if gpus else "cpu", settings
