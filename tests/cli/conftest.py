"""The command line inside this process; starting Python for each check would take minutes in all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from sosampler.cli.main import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Fails unless standard output is one JSON object and nothing else."""
        return json.loads(self.out)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run `sosampler` with these arguments."""

    def run(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["sosampler", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return Ran(int(stopped.value.code or 0), captured.out, captured.err)

    return run
