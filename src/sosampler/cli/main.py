"""Entry point. Nothing heavy is imported here: `sosampler --help` must be fast."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from sosampler import __version__
from sosampler._util.files import FULL
from sosampler._util.text import escaped
from sosampler.cli import bench, datasets, evaluate, export, mcp, prepare, reels, reproduce, select, train, ui, watch
from sosampler.errors import SosamplerError, first_line


class _Group(TyperGroup):
    """Prints each command's whole summary, over several lines where it is long, instead of cutting it off."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = {name: command for name, command in self.commands.items() if not command.hidden}
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=1000)) for name, command in shown.items()])


# Plain help text: importing rich for its boxes takes longer than everything else together.
app = typer.Typer(
    name="sosampler",
    cls=_Group,
    help="Pick the few frames of a video that matter.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"sosampler {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


app.command("select")(select.select_command)
app.command("classify")(select.classify_command)
app.command("watch")(watch.watch_command)
app.command("train-classifier")(train.train_classifier_command)
app.add_typer(datasets.app, name="datasets")
app.command("prepare")(prepare.prepare_command)
app.add_typer(prepare.app, name="bank")
app.command("train")(train.train_command)
app.command("evaluate")(evaluate.evaluate_command)
app.command("independence")(evaluate.independence_command)
app.command("reproduce")(reproduce.reproduce_command)
app.command("report")(evaluate.report_command)
app.command("export")(export.export_command)
app.command("quantize")(export.quantize_command)
app.command("ui")(ui.ui_command)
app.command("mcp")(mcp.mcp_command)
app.command("reels")(reels.reels_command)
app.command("demo")(reels.demo_command)
app.add_typer(bench.app, name="bench")


# Which extra brings a package that the light core lacks.
_EXTRAS = {name: name for name in ("torchcodec", "ray", "openvino", "onnx")}
_EXTRAS |= {"transformers": "hf", "huggingface_hub": "hub"}
_EXTRAS |= dict.fromkeys(("torch", "torchvision", "timm", "accelerate", "safetensors", "pyarrow"), "train")
_EXTRAS |= dict.fromkeys(("sklearn", "matplotlib", "jinja2"), "train")


def main() -> None:
    """Run the command line; bad input ends with one sentence and exit code 2."""
    # OpenMP's threads spin while they wait for each other. Beside another busy process the one they wait for is not
    # running, and they burn its time: a training took five to twenty times as long. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    before = _stuck_threads()
    try:
        _main()
    except SystemExit as end:
        if _stuck_threads() - before:  # a decoder of this command has not returned: Python would wait for it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


def _stuck_threads() -> set[Any]:
    workers = sys.modules.get("sosampler._util.workers")
    return set() if workers is None else workers.abandoned_threads()


def _main() -> None:
    try:
        app()
    except SosamplerError as error:
        _end(str(error))
    except OSError as error:
        if error.errno in FULL:
            where = "standard output or a file" if error.filename is None else str(error.filename)
            _end(f"{where}: cannot be written ({error.strerror}); make room, and run the same command again")
        if error.filename is None:
            raise  # no file of the user is involved: a bug
        _end(f"{error.filename}: {error.strerror}; give a path that can be read and written")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        _end(f"{missing} is not installed; install it with: pip install 'sosampler[{_EXTRAS[missing]}]'")
    except RuntimeError as error:
        if not _gpu_is_full(error):
            raise
        _end(
            f"the GPU has too little memory for this ({first_line(error)}); lower --batch-size where the command has "
            "it, take --precision bfloat16, end other programs on the GPU, or use --device cpu"
        )


def _gpu_is_full(error: RuntimeError) -> bool:
    torch = sys.modules.get("torch")  # imported where the error comes from
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _end(sentence: str) -> NoReturn:
    typer.echo(f"sosampler: {escaped(sentence)}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
