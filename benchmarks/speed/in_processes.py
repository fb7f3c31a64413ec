"""Time variants in turns, each in a process of its own.

Some variants change their process for good (how the C library treats freed memory, kernels a library has chosen), so
that two of them in one process would affect each other.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from sosampler.errors import first_line

# Builds the function that one run of a variant calls, from the caller's argument. A new process must be able to import
# it.
Build = Callable[[Any], tuple[Callable[[], Any], Callable[[], dict[str, Any]]]]


class WayFailed(Exception):
    """A variant could not be built or run; the text has the reason."""


class WayProcess:
    """One variant in a process of its own. `build(argument)` returns a function to time and one that returns facts.

    The process starts immediately and imports the modules in `imports`, but builds only when `build` is called.
    """

    def __init__(self, build: Build, argument: Any, imports: Sequence[str] = ()) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, argument, imports), daemon=True)
        self._process.start()
        theirs.close()

    def build(self) -> None:
        try:
            self._connection.send(("build", None))
        except BrokenPipeError as error:
            raise self._ended() from error
        self._answer()

    def seconds(self, repeats: int) -> float:
        """Of one of `repeats` runs that follow each other."""
        self._connection.send(("time", repeats))
        return float(self._answer())

    def facts(self) -> dict[str, Any]:
        self._connection.send(("facts", None))
        facts: dict[str, Any] = self._answer()
        return facts

    def end(self) -> None:
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self) -> Any:
        try:
            good, answer = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._ended() from error
        if not good:
            raise WayFailed(answer)
        return answer

    def _ended(self) -> WayFailed:
        self._process.join(5)
        return WayFailed(f"its process ended with code {self._process.exitcode}")


def _serve(connection: Any, build: Build, argument: Any, imports: Sequence[str]) -> None:
    try:
        for name in imports:
            import_module(name)
        connection.recv()
        run, facts = build(argument)
        run()
        connection.send((True, None))
        while True:
            try:
                what, repeats = connection.recv()
            except EOFError:
                return
            if what == "facts":
                connection.send((True, facts()))
                continue
            begin = time.perf_counter()
            for _ in range(repeats):
                last = run()
            wait(last)
            connection.send((True, (time.perf_counter() - begin) / repeats))
    except Exception as error:  # noqa: BLE001  # reported to the parent, which leaves this variant out
        connection.send((False, f"{type(error).__name__}: {first_line(error)}"))


def wait(result: Any) -> None:
    """Wait until the device has finished."""
    device = getattr(result, "device", None)
    if getattr(device, "type", None) == "cuda":
        import torch

        torch.cuda.synchronize(device)


def in_turns_of_processes(
    ways: Mapping[str, tuple[Build, Any]],
    *,
    rounds: int,
    repeats: int,
    imports: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]], dict[str, str]]:
    """Return seconds of each variant in each round, facts of each variant, and why others failed."""
    running = {name: WayProcess(build, argument, imports) for name, (build, argument) in ways.items()}
    failed: dict[str, str] = {}
    try:
        for name in list(running):  # one after the other, so that building disturbs no other variant
            _try(name, running, failed, running[name].build, say)
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for number in range(rounds + 1):  # the first is not counted
            for name in list(running):
                took = _try(name, running, failed, partial(running[name].seconds, repeats), say)
                if number and took is not None:
                    seconds[name].append(took)
        facts = {name: _try(name, running, failed, running[name].facts, say) or {} for name in list(running)}
        return {name: seconds[name] for name in running}, facts, failed
    finally:
        for way in running.values():
            way.end()


def _try(
    name: str,
    running: dict[str, WayProcess],
    failed: dict[str, str],
    ask: Callable[[], Any],
    say: Callable[[str], None],
) -> Any:
    try:
        return ask()
    except WayFailed as error:
        say(f"{name}: {error}")
        failed[name] = str(error)
        running.pop(name).end()
        return None
