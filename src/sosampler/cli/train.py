"""`sosampler train` and `sosampler train-classifier`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from sosampler.cli import options as shared
from sosampler.samplers.registry import TITLES

_SETTINGS = ("epochs", "batch_size", "lr", "seed")  # of the recipe, with options of their own


@shared.stoppable()
def train_command(
    bank: Annotated[Path, Argument(help="A bank with outputs of a classifier, from `sosampler prepare`.")],
    out: Annotated[Path, Option(help="Folder for the sampler or baseline, the log and the result.")],
    sampler: Annotated[
        str,
        Option(
            help="sosampler, ocsampler, scsampler; or a baseline, which classifies itself: frameexit, liteeval, "
            "adaframe, marl, ar-net, videoiq, adafocus, adafuse, ada3d, listen-to-look."
        ),
    ] = "sosampler",
    recipe: Annotated[
        str | None,
        Option(
            help=f"default ({TITLES['default']}, this package's recipe), paper ({TITLES['paper']}), authors "
            f"({TITLES['authors']}), ocsampler, scsampler-rank, scsampler-ac, or a YAML file of settings; for a "
            "baseline a YAML file. Default: the sampler's own."
        ),
    ] = None,
    classifier: Annotated[
        str | None,
        Option(
            "--classifier",
            "-c",
            help="The teacher, or features of a baseline: saved folder, fingerprint or name. With a folder its "
            "features are added to a bank that has none, for a probe.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        Option(
            help="Initial weights of the backbone, of which the recipe default keeps three quarters: a file, or "
            "'pretrained' from the web; for liteeval, adaframe, ar-net, videoiq, adafocus, ada3d and listen-to-look "
            "those of their light network, MobileNetV2; for frameexit a checkpoint of its authors, with --epochs 0."
        ),
    ] = None,
    light: Annotated[
        str | None,
        Option(
            help="Another light network for liteeval, adaframe, ar-net, videoiq, ada3d and listen-to-look: the folder "
            "of a sampler without shift, or the name of features in the bank."
        ),
    ] = None,
    features: Annotated[
        list[str] | None,
        Option(
            help="SET=SOURCE for further networks of a baseline (r34 and r18 of ar-net): the folder of a classifier or "
            "of a sampler without shift, or the name of features in the bank; repeatable."
        ),
    ] = None,
    teacher: Annotated[str, Option(help="bank: the stored outputs; online: run the classifier on each crop.")] = "bank",
    setting: Annotated[
        list[str] | None,
        Option(
            "--set", help="KEY=VALUE of the recipe, e.g. loss=listwise, or of the baseline, e.g. beta=1e-2; repeatable."
        ),
    ] = None,
    epochs: Annotated[int | None, Option(help="Passes over the training split.")] = None,
    batch_size: Annotated[int | None, Option(help="Videos per step, of all processes.")] = None,
    lr: Annotated[float | None, Option(help="Highest learning rate.")] = None,
    seed: Annotated[int | None, Option(help="Random seed.")] = None,
    device: shared.Device = None,
    precision: shared.Precision = None,
    workers: Annotated[int | None, Option(min=0, help="Threads or processes that decode frames.")] = None,
    overwrite: shared.Overwrite = False,
    json_output: shared.Json = False,
) -> None:
    """Train a sampler or a baseline on a bank. Run again, a run that was killed resumes.

    A baseline first computes features of the classifier and of its light network for the whole bank, unless they are
    stored there. Its training takes minutes, starts again after a kill and gives the same weights.

    Several GPUs: accelerate launch --num_processes 2 -m sosampler train ...; without GPUs: torchrun --nproc-per-node 2.
    """
    options = shared.without(locals(), "setting", "json_output")
    options["features"] = shared.named_sources(features)
    from sosampler import import_frameexit, train  # raises where packages are missing
    from sosampler.baselines.recipe import recipe_settings, refuse_light
    from sosampler.baselines.registry import baseline_class, list_systems
    from sosampler.errors import InvalidArgument
    from sosampler.samplers.recipe import SETTINGS, read_settings
    from sosampler.training.distributed import OtherProcessFailed

    allowed: Sequence[str] = SETTINGS
    if sampler in list_systems():
        allowed = recipe_settings(sampler)
        own = sampler == "frameexit" or baseline_class(sampler).takes_weights
        refuse_light(sampler, {"--light": light, "--weights": None if own else weights})
    if sampler == "frameexit" and weights is not None:
        if epochs != 0:
            raise InvalidArgument("--weights of frameexit are its authors', which are not trained here; add --epochs 0")
        given = read_settings(setting or [], ("first_exit", "gate_exit"))
        import_frameexit(bank, weights, out=out, classifier=classifier, device=device, say=shared.say, **given)
        if json_output:
            typer.echo(json.dumps({"folder": str(out)}))
        return
    settings = read_settings(setting or [], allowed) | shared.given(options, *_SETTINGS)
    try:
        trained = train(**shared.without(options, *_SETTINGS), **settings, say=shared.say)
    except OtherProcessFailed as error:
        time.sleep(1)  # launchers end all when one ends: the process that failed prints first
        raise typer.Exit(2) from error
    if json_output and os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps({"folder": str(trained.folder), **trained.result}))


@shared.stoppable()
def train_classifier_command(
    data: Annotated[Path, Argument(help="A folder of class folders (images or videos), a CSV or JSONL, or a bank.")],
    out: Annotated[Path, Option(help="Folder for the best weights, the log and the result.")],
    classifier: Annotated[str, Option("--classifier", "-c", help="A name; see docs/classifiers.md.")] = "resnet50",
    weights: Annotated[str | None, Option(help="Start from this file, or 'pretrained' weights on the web.")] = None,
    option: shared.ClassifierOption = None,
    input_size: shared.InputSize = None,
    epochs: Annotated[int | None, Option(help="Passes over the training split (30).")] = None,
    batch_size: Annotated[int | None, Option(help="Clips per step (64).")] = None,
    optimizer: Annotated[str | None, Option(help="sgd or adamw; default: by network.")] = None,
    lr: Annotated[float | None, Option(help="Highest learning rate; default: by optimiser.")] = None,
    weight_decay: Annotated[float | None, Option(help="Default: by optimiser.")] = None,
    label_smoothing: Annotated[float | None, Option(help="0 to below 1 (0.1).")] = None,
    crop_scale: Annotated[tuple[float, float] | None, Option(help="Min and max area of random crops (0.3 1).")] = None,
    trainable: Annotated[str | None, Option(help="all, or only the head.")] = None,
    freeze: Annotated[float | None, Option(help="First layers that do not learn, as a share (0).")] = None,
    mixup: Annotated[float | None, Option(help="Mixing of clips in pairs; 0.2 is usual (0).")] = None,
    ema: Annotated[float | None, Option(help="Decay of the moving average of the weights, as 0.999 (0).")] = None,
    num_frames: Annotated[int | None, Option("--num-frames", "-n", help="Frames per clip of a video (8).")] = None,
    dev_share: Annotated[float | None, Option(help="Share of train for dev, where there is none (0.1).")] = None,
    exclusive: shared.Exclusive = None,
    seed: Annotated[int | None, Option(help="Random seed (0).")] = None,
    device: shared.Device = None,
    precision: shared.Precision = None,
    workers: Annotated[int | None, Option(min=0, help="Processes that read examples.")] = None,
    overwrite: shared.Overwrite = False,
    json_output: shared.Json = False,
) -> None:
    """Fine-tune a classifier on your own videos or images. Run again, a run that was killed resumes."""
    given = {name: value for name, value in locals().items() if value is not None}
    arguments = shared.without(given, "option", "json_output")
    import sosampler as so

    trained = so.train_classifier(**arguments, options=shared.key_values(option), say=shared.say)
    if json_output:
        typer.echo(json.dumps({"folder": str(trained.folder), **trained.result}))
