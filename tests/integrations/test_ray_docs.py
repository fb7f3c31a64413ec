"""docs/scale.md says what is there: its table is that of the benchmarks, its commands have the right options."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scale_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale_table", ROOT / "benchmarks" / "tables" / "scale_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale_table"] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


def test_the_table_is_current(scale_table: ModuleType) -> None:
    assert scale_table.page(PAGE) == PAGE, "run python benchmarks/tables/scale_table.py"


def test_the_arithmetic(scale_table: ModuleType) -> None:
    """Ten million times 0.36 s are 1000 core-hours, and on 640 cores 1.6 hours."""
    step = scale_table.Step("one", "x.json", lambda result: [])
    assert scale_table.row(step, [0.36]) == "| one | 0.36 s of a core | `x.json` | 1 000 core-hours | 1.6 h |"
    gpu = scale_table.Step("two", "x.json", lambda result: [], "GPU")
    assert scale_table.row(gpu, [0.0036]) == "| two | 0.0036 s of a GPU | `x.json` | 10 GPU-hours | 0.12 h |"
    assert "not measured yet" in scale_table.row(step, None)


def test_rates_that_are_there_are_told(scale_table: ModuleType) -> None:
    measured = [step.file for step in scale_table.STEPS if scale_table.seconds_of(step)]
    assert {"decode.json", "prepare.json"} <= set(measured)
    lines = scale_table.table().splitlines()
    assert sum("not measured yet" in line for line in lines if line.startswith("|")) == len(scale_table.STEPS) - len(
        measured
    )


def test_rates_of_the_engine(scale_table: ModuleType) -> None:
    """The file as benchmarks/speed/frame_engine.py writes it, with one device measured or both."""
    row = {"batch": 8, "videos_per_second": {"engine": 4.0}, "facts": {"engine": {"threads": 2}}}
    of_gpu, of_cpu = (step for step in scale_table.STEPS if step.file == "frame_engine.json")
    assert of_cpu.seconds({"cpu": {"batches": [row]}}) == [0.5]
    with pytest.raises(KeyError):
        of_gpu.seconds({"cpu": {"batches": [row]}})
    assert of_gpu.seconds({"gpu": {"batches": [row, {**row, "batch": 128}]}}) == [0.25]


def test_commands_have_the_right_options() -> None:
    from typer.main import get_command

    from sosampler.cli.main import app

    blocks = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line]
    assert len(commands) == 3
    for command in commands:
        _, name, *words = shlex.split(command)
        get_command(app).commands[name].make_context(name, words)  # type: ignore[attr-defined]


def test_the_files_it_names_are_there() -> None:
    for name in re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", PAGE):
        assert (ROOT / name).exists(), name
