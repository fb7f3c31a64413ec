"""Entry point. Nothing heavy is imported here: `sosampler --help` must answer at once."""

from __future__ import annotations

import sys

import typer

from sosampler import __version__
from sosampler.cli import (
    bank,
    bench,
    classify,
    datasets,
    demo,
    evaluate,
    independence,
    prepare,
    reels,
    select,
    train,
    train_classifier,
)
from sosampler.errors import SosamplerError

# Plain help text: importing rich for its boxes takes longer than everything else together.
app = typer.Typer(
    name="sosampler",
    help="Pick the few frames of a video that matter.",
    no_args_is_help=True,
    add_completion=False,
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
app.command("classify")(classify.classify_command)
app.command("train-classifier")(train_classifier.train_classifier_command)
app.add_typer(datasets.app, name="datasets")
app.command("prepare")(prepare.prepare_command)
app.add_typer(bank.app, name="bank")
app.command("train")(train.train_command)
app.command("evaluate")(evaluate.evaluate_command)
app.command("independence")(independence.independence_command)
app.command("reels")(reels.reels_command)
app.command("demo")(demo.demo_command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line; bad input ends with one sentence and exit code 2."""
    try:
        app()
    except SosamplerError as error:
        typer.echo(f"sosampler: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise  # no file is at fault, so it is ours
        typer.echo(
            f"sosampler: {error.filename}: {error.strerror}; give a place that can be read and written", err=True
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
