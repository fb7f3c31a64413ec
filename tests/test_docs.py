"""What the documents say is what is there."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import sosampler as so
from sosampler.options import SelectOptions
from sosampler.policies import describe_policies
from sosampler.synthetic import numbered_frame, numbered_video

ROOT = Path(__file__).parent.parent
TINY = "timm:test_resnet.r160_in1k"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the README's commands find what they name."""
    from PIL import Image

    video = numbered_video(num_frames=300, gop=6, fps=2)  # two and a half minutes
    for name in ("match.mp4", "videos/a.mp4", "videos/deeper/b.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(video)
    (tmp_path / "dump").mkdir()
    for number in range(20):
        Image.fromarray(numbered_frame(number)).save(tmp_path / f"dump/img_{number + 1:05d}.jpg")
    for name in ("ant", "bee"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(numbered_frame(number)).save(tmp_path / f"pictures/{name}/{number}.png")
    (tmp_path / "videos.csv").write_text("path,label\nvideos/a.mp4,ant\nvideos/deeper/b.mp4,bee\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_readme_works(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("sosampler ")]
    assert len(commands) >= 9
    for command in commands:
        # The same with a network that a test has time for.
        command = command.replace("-c resnet50 --epochs 30", f"-c {TINY} --epochs 1 --workers 0 --input-size 32")
        if command.startswith("sosampler train "):
            command += f" --set backbone={TINY} --set input_size=32 --epochs 1 --batch-size 2"
        assert "resnet50" not in command
        done = subprocess.run([sys.executable, "-m", *shlex.split(command)], capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, (command, done.stderr)
    assert (folder / "frames.parquet").exists()
    assert (folder / "sheet.png").exists()
    assert len(list((folder / "frames").rglob("*.jpg"))) == 16


def test_the_python_of_the_readme_works(folder: Path) -> None:
    pytest.importorskip("torch")
    names: dict[str, object] = {}
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), names)
    sel = names["sel"]
    assert isinstance(sel, so.Selection)
    assert len(sel) == 6
    assert isinstance(names["clf"], so.Classifier)


def test_the_json_of_the_readme_has_the_right_keys(folder: Path) -> None:
    (block,) = blocks("json")
    shown, real = json.loads(block), so.select("match.mp4", 2).to_dict()
    assert list(shown) == list(real)
    assert list(shown["candidates"]) == list(real["candidates"])


def test_every_policy_is_in_the_readme_with_its_words() -> None:
    for name, says in describe_policies().items():
        assert f"| `{name}` | {says}" in README


def test_select_documents_every_option() -> None:
    assert so.select.__doc__ is not None
    for field in SelectOptions.__dataclass_fields__:
        assert re.search(rf"^\s+(\w+, )?{field}(, \w+)?: ", so.select.__doc__, flags=re.MULTILINE), field


def test_speed_table_is_that_of_the_benchmark() -> None:
    spec = importlib.util.spec_from_file_location("speed_table", ROOT / "benchmarks" / "speed_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table(json.loads(module.RESULTS.read_text())) in README


def test_published_ratios_are_those_of_the_times() -> None:
    """The ratios in the file follow from the seconds in it."""
    result = json.loads((ROOT / "benchmarks" / "decode.json").read_text())
    from statistics import median

    for video in result["videos"]:
        assert video["same_times_as_torchcodec"]
        for row in video["comparisons"]:
            seconds = video["seconds"]
            expected = median(seconds[row["reference"]]) / median(seconds[row["way"]])
            assert row["times_faster"] == pytest.approx(expected)
            assert row["met"] in (None, True)


def test_classifier_table_is_what_is_counted() -> None:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("classifier_table", ROOT / "benchmarks" / "classifier_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    document = (ROOT / "docs" / "classifiers.md").read_text(encoding="utf-8")
    for given in module.ROWS[:7]:  # the rest are torchvision's, whose cost has a test of its own
        assert module.row(*given) in document
    for given in module.ROWS[7:]:
        assert f"| `{given[0]}` |" in document


def test_systems_are_shown_as_measured() -> None:
    """Reels as soon as they are measured, then real clips."""
    spec = importlib.util.spec_from_file_location("systems_table", ROOT / "benchmarks" / "systems_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files = [ROOT / "benchmarks" / f"systems_{name}.json" for name in ("reels", "yoga", "airtlab")]
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    assert module.beside_published(results) in (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", ["classifiers.md", "data.md", "reproduce.md", "sampler.md", "systems.md"])
def test_commands_of_the_guides_have_the_right_options(document: str) -> None:
    """Parsed, not run: they take their time."""
    from typer.main import get_command

    from sosampler.cli.main import app

    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    commands = [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line]
    assert len(commands) >= 2
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "sosampler"
        known = get_command(app)
        while hasattr(known, "commands") and words and words[0] in known.commands:
            known = known.commands[words.pop(0)]
        known.make_context(command, words)  # says what is unknown or missing


def test_the_python_of_the_classifier_guide_works(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    text = (ROOT / "docs" / "classifiers.md").read_text(encoding="utf-8")
    codes = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    so.save_classifier(so.create_classifier("resnet50", num_classes=22), folder / "saved")
    (folder / "saved/model.safetensors").rename(folder / "my.safetensors")
    (folder / "classes.txt").write_text("ant\nbee\n", encoding="utf-8")

    class Net(torch.nn.Module):
        def forward(self, clips):
            return clips.mean((2, 3, 4))[:, :2] * 9

    names: dict[str, object] = {"module": Net()}
    for code in codes:
        exec(compile(code, "classifiers.md", "exec"), names)
    assert names["clf"].class_names == ("ant", "bee")
