"""`sosampler train`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def train_command(
    bank: Annotated[Path, typer.Argument(help="A bank with outputs of a classifier, from `sosampler prepare`.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the sampler or baseline, the log and the result.")],
    sampler: Annotated[
        str,
        typer.Option(
            "--sampler",
            help="sosampler, ocsampler, scsampler; or a baseline, which classifies itself: frameexit, liteeval, "
            "adaframe, marl.",
        ),
    ] = "sosampler",
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="default, paper, authors, ocsampler, scsampler-rank, scsampler-ac, or a YAML file of settings; for a "
            "baseline a YAML file. Default: the sampler's own.",
        ),
    ] = None,
    classifier: Annotated[
        str | None,
        typer.Option(
            "--classifier",
            "-c",
            help="The teacher, or for a baseline the source of its features: a saved folder, a fingerprint or a name.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            help="Initial weights of the backbone: a file, or 'pretrained' from the web; for liteeval and adaframe "
            "those of their light network, MobileNetV2.",
        ),
    ] = None,
    light: Annotated[
        str | None,
        typer.Option(
            "--light",
            help="Another light network for liteeval and adaframe: the folder of a sampler without shift, or the name "
            "of features in the bank.",
        ),
    ] = None,
    teacher: Annotated[
        str, typer.Option("--teacher", help="bank: the stored outputs; online: run the classifier on each crop.")
    ] = "bank",
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="KEY=VALUE of the recipe, e.g. loss=listwise, or of the baseline, e.g. beta=1e-2; repeatable."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the training split.")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Videos per step, of all processes.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Highest learning rate.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, ...; default: the GPU if there is one.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="float32, bfloat16 or float16.")] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=0, help="Threads or processes that decode frames.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again where --out holds another run.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a sampler or a baseline on a bank. Run again, a run that was killed resumes.

    A baseline first computes features of the classifier and of its light network for the whole bank, unless they are
    stored there. Its training takes minutes, starts again after a kill and gives the same weights.

    Several GPUs: accelerate launch --num_processes 2 -m sosampler train ...; without GPUs: torchrun --nproc-per-node 2.
    """
    import os
    import time

    from sosampler import train  # raises where packages are missing
    from sosampler.baselines.recipe import recipe_settings, refuse_light
    from sosampler.baselines.registry import list_systems
    from sosampler.samplers.recipe import SETTINGS, read_settings
    from sosampler.training.distributed import OtherProcessFailed

    allowed: Sequence[str] = SETTINGS
    if sampler in list_systems():
        allowed = recipe_settings(sampler)
        refuse_light(sampler, {"--light": light, "--weights": weights})
    given: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    settings = read_settings(setting or [], allowed) | {
        name: value for name, value in given.items() if value is not None
    }
    try:
        trained = train(
            bank,
            out=out,
            recipe=recipe,
            sampler=sampler,
            classifier=classifier,
            weights=weights,
            light=light,
            teacher=teacher,
            device=device,
            precision=precision,
            workers=workers,
            overwrite=overwrite,
            say=lambda text: typer.echo(text, err=True),
            **settings,
        )
    except OtherProcessFailed as error:
        time.sleep(1)  # launchers end all when one ends: the process that failed prints first
        raise typer.Exit(2) from error
    if json_output and os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps({"folder": str(trained.folder), **trained.result}))


# ---- `sosampler train-classifier`


def train_classifier_command(
    data: Annotated[
        Path, typer.Argument(help="A folder with one folder a class (images or videos), a CSV or JSONL, or a bank.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the best weights, the log and the result.")],
    classifier: Annotated[
        str, typer.Option("--classifier", "-c", help="A name; see docs/classifiers.md.")
    ] = "resnet50",
    weights: Annotated[
        str | None, typer.Option("--weights", help="Start from this file, or from 'pretrained' weights on the web.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="KEY=VALUE of the classifier, e.g. head=frameexit.")
    ] = None,
    input_size: Annotated[int | None, typer.Option("--input-size", help="Height and width of the input.")] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the training split (30).")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Clips per step (64).")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="sgd or adamw; default: by network.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Highest learning rate; default: by optimiser.")] = None,
    weight_decay: Annotated[float | None, typer.Option("--weight-decay", help="Default: by optimiser.")] = None,
    label_smoothing: Annotated[float | None, typer.Option("--label-smoothing", help="0 to below 1 (0.1).")] = None,
    crop_scale: Annotated[
        tuple[float, float] | None, typer.Option("--crop-scale", help="Min and max area of random crops (0.3 1).")
    ] = None,
    trainable: Annotated[str | None, typer.Option("--trainable", help="all, or only the head.")] = None,
    num_frames: Annotated[
        int | None, typer.Option("--num-frames", "-n", help="Frames per clip of a video (8).")
    ] = None,
    dev_share: Annotated[
        float | None, typer.Option("--dev-share", help="Share of train for dev, where there is none (0.1).")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed (0).")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, ...; default: the GPU if there is one.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="float32, bfloat16 or float16.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=0, help="Processes that read examples.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again where --out holds another run.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Fine-tune a classifier on your own videos or images. Run again, a run that was killed resumes."""
    given: dict[str, Any] = {
        "epochs": epochs,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "lr": lr,
        "weight_decay": weight_decay,
        "label_smoothing": label_smoothing,
        "crop_scale": crop_scale,
        "trainable": trainable,
        "num_frames": num_frames,
        "dev_share": dev_share,
        "seed": seed,
    }
    import sosampler as so
    from sosampler.cli.options import key_values

    trained = so.train_classifier(
        data,
        classifier,
        out=out,
        weights=weights,
        input_size=input_size,
        device=device,
        precision=precision,
        workers=workers,
        overwrite=overwrite,
        options=key_values(option or []),
        say=lambda text: typer.echo(text, err=True),
        **{name: value for name, value in given.items() if value is not None},
    )
    if json_output:
        typer.echo(json.dumps({"folder": str(trained.folder), **trained.result}))
