"""Video classifiers of Hugging Face transformers: TimeSformer, VideoMAE, ViViT, V-JEPA 2 and others."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.files import load_json
from sosampler._util.validation import check_int, one_of
from sosampler.classifiers.base import Classifier, ClipLength, names_for, numbered_names, unwrap_output
from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, Triple
from sosampler.classifiers.weights import check_network_size, check_numbers, counted, some_of
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError, WeightsError, first_line

log = logging.getLogger("sosampler")

HEAD = "classifier"
_WEIGHTS, _WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
_PROCESSORS = ("video_preprocessor_config.json", "preprocessor_config.json")
# Downloaded from the hub: never pickled weights, never code.
_DOWNLOADS = ("config.json", *_PROCESSORS, "model*.safetensors", _WEIGHTS_INDEX)

# Fields of a config that do not define the network; class names are stored elsewhere.
_BOOKKEEPING = {"transformers_version", "architectures", "_name_or_path", "dtype", "id2label", "label2id"}


class HuggingFaceClassifier(Classifier):
    """Any `AutoModelForVideoClassification`; the state dict of `net` is transformers' own."""

    def clip_logits(self, clips: Tensor, positions: Tensor | None = None) -> Tensor:
        # transformers refuses other sizes for some networks; others would mix up the positions of the patches.
        height, width = input_size(self.net.config)
        if tuple(clips.shape[-2:]) != (height, width):
            raise InvalidArgument(
                f"{self.name} was given frames of {clips.shape[-2]}x{clips.shape[-1]} but its position embeddings are "
                f"for {height}x{width}; do not change input_size or the size of the preprocessing"
            )
        if self.net.config.model_type == "timesformer":
            return timesformer_logits(self.net, clips, positions, self.options["temporal"])
        return unwrap_output(self.net(**{self.net.main_input_name: clips}), self.name)

    def head_names(self) -> tuple[str, ...]:
        return (HEAD,)


def build_huggingface(
    source: Any = None,
    *,
    num_classes: int | None = None,
    new_head: bool | None = False,
    temporal: str = "linear",
    num_frames: int | None = None,
    revision: str | None = None,
    pretrained: bool = False,
) -> HuggingFaceClassifier:
    """Build a transformers video classifier.

    Args:
        source: a folder or hub id with config.json and model.safetensors; or a config, for random weights. None is
            TimeSformer (ViT-B/16, 8 frames, 224) for the 400 classes of Kinetics.
        new_head: start with a random last layer; None does so only if num_classes is not the checkpoint's.
        num_frames: the number of temporal position embeddings, with a config.
        revision: of a hub id: a branch, tag, commit, or refs/pr/N of a conversion to safetensors.
        pretrained: refuse sources without weights.
    """
    transformers = import_transformers()
    one_of("temporal", temporal, TEMPORAL)
    if num_classes is not None:
        num_classes = check_int("num_classes", num_classes)
    if num_frames is not None:
        num_frames = check_int("num_frames", num_frames)
    if isinstance(source, (str, Path)):
        folder = _local_folder(source, revision)
        config = _read_config(folder, source)
        if new_head is None:
            new_head = num_classes is not None and num_classes != config.num_labels
        if num_classes not in (None, config.num_labels) and not new_head:
            raise InvalidArgument(
                f"{source}: has {config.num_labels} classes but num_classes={num_classes}; leave num_classes out, or "
                "give new_head=True for a new last layer"
            )
        table = getattr(config, _frames_key(config))
        if num_frames not in (None, table):
            raise InvalidArgument(
                f"{source}: has position embeddings for {table} frames but num_frames={num_frames}; leave num_frames "
                "out: clips may have another length where the network allows it"
            )
        config.num_labels = num_classes or config.num_labels
        net = _load_net(folder, config, source, new_head)
        preprocessing = _preprocessing(folder, config, source)
        path = Path(source).expanduser()  # a moved folder keeps its name
        name, class_names = f"hf:{path.resolve().name if path.is_dir() else source}", _label_names(config)
    else:
        if pretrained:
            raise InvalidArgument("a transformers config has no weights; give hf:FOLDER or hf:HUB_ID to load some")
        default = transformers.TimesformerConfig(num_labels=400)
        config = copy.deepcopy(default if source is None else source)
        _check_config(config, "the config")
        config.num_labels = num_classes or config.num_labels
        if num_frames is not None:
            setattr(config, _frames_key(config), num_frames)
        with _transformers("transformers does not accept the config", "change it"):
            net = transformers.AutoModelForVideoClassification.from_config(config)
        preprocessing = default_preprocessing(config.model_type, input_size(config))
        # "timesformer" is the network of the paper with any classes.
        name = "timesformer" if _network_of(config) == _network_of(default) else f"hf:{config.model_type}"
        class_names = names_for(config.num_labels, "kinetics") if source is None else _label_names(config)
    options: dict[str, Any] = {"hf_config": config_to_dict(config)}
    if config.model_type == "timesformer":
        options["temporal"] = temporal
    elif temporal != "linear":
        raise InvalidArgument(f"temporal={temporal!r} is for TimeSformer, not {config.model_type}; leave it out")
    classifier = HuggingFaceClassifier(
        net,
        name=name,
        preprocessing=preprocessing,
        class_names=class_names,
        length=clip_length(config),
        multi_label=config.problem_type == "multi_label_classification",
        options=options,
    )
    classifier.fresh_head = bool(new_head) or not isinstance(source, (str, Path))
    return classifier


def import_transformers() -> Any:
    """Import transformers, or raise MissingDependency."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise MissingDependency(
            "Hugging Face classifiers need transformers; install it with pip install 'sosampler[hf]'"
        ) from error


@contextmanager
def _transformers(problem: str, advice: str, kind: type[SosamplerError] = InvalidArgument) -> Iterator[Any]:
    """Yield transformers without its progress bars, reports and advice; an error becomes "problem (error); advice"."""
    transformers = import_transformers()
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield transformers
    except (OSError, ValueError, TypeError, RuntimeError, StrictDataclassError, SafetensorError) as error:
        raise kind(f"{problem} ({first_line(error)}); {advice}") from error
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


# ---- configs


def input_size(config: Any) -> tuple[int, int]:
    """Return the height and width that the network's position embeddings are for."""
    size = getattr(config, "image_size", None) or config.crop_size  # V-JEPA 2 calls it crop_size
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def clip_length(config: Any) -> ClipLength:
    """Return how many frames per clip the network takes; most exactly as many as they have position embeddings."""
    if config.model_type == "timesformer":
        return ClipLength()
    tubelet = getattr(config, "tubelet_size", 1)  # frames, or (frames, height, width)
    tubelet = tubelet if isinstance(tubelet, int) else int(tubelet[0])
    if config.model_type == "vjepa2":  # rotary positions
        return ClipLength(multiple_of=tubelet)
    frames = int(config.num_frames)
    if frames % tubelet:
        raise InvalidArgument(f"num_frames={frames} must be a multiple of the config's tubelet_size={tubelet}")
    return ClipLength(at_least=frames, at_most=frames)


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return everything that defines the network, as plain JSON values for `config_from_dict`."""
    generic = json.loads(import_transformers().PreTrainedConfig().to_json_string(use_diff=False))
    values = json.loads(config.to_json_string(use_diff=False))
    special = {key: value for key, value in sorted(values.items()) if key not in generic or generic[key] != value}
    network = {key: value for key, value in special.items() if key not in _BOOKKEEPING}
    return {"model_type": config.model_type, "num_labels": config.num_labels, **network}


def config_from_dict(values: Any, where: str = "the config") -> Any:
    """Return the transformers config that `config_to_dict` described; `where` is its file, for messages."""
    if not isinstance(values, dict):
        raise WeightsError(f"{where}: hf_config is not an object; save the classifier again")
    check_numbers(values, where)
    version, kind = import_transformers().__version__, values.get("model_type")
    problem = f"transformers {version} cannot build a config of model type {kind!r}"
    with _transformers(problem, "use the version that the classifier was saved with") as transformers:
        return transformers.AutoConfig.for_model(**values)


def _network_of(config: Any) -> dict[str, Any]:
    """Return what defines the network apart from its classes."""
    return {key: value for key, value in config_to_dict(config).items() if key not in ("num_labels", "problem_type")}


def _label_names(config: Any) -> tuple[str, ...]:
    """Return the config's class names if it has one for each class, numbers otherwise."""
    labels = config.id2label or {}
    names = tuple(str(labels.get(number, "")) for number in range(config.num_labels))
    generic = names == tuple(f"LABEL_{number}" for number in range(config.num_labels))
    return numbered_names(config.num_labels) if generic or "" in names or len(set(names)) < len(names) else names


def _check_config(config: Any, where: Any) -> None:
    transformers = import_transformers()
    if not isinstance(config, transformers.PreTrainedConfig):
        raise InvalidArgument(
            f"a classifier cannot be built from a {type(config).__name__}; give a folder, a hub id or a transformers "
            "config"
        )
    known = transformers.models.auto.modeling_auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES
    if config.model_type not in known:
        raise InvalidArgument(
            f"{where}: {config.model_type!r} is not a video classifier; choose one of: {', '.join(known)}"
        )
    channels = getattr(config, "num_channels", getattr(config, "in_chans", 3))
    if channels != 3:
        raise InvalidArgument(f"{where}: the network takes {channels} channels but must take 3 (RGB); give another")


def _frames_key(config: Any) -> str:
    return "num_frames" if hasattr(config, "num_frames") else "frames_per_clip"


# ---- from a folder or the hub


def _local_folder(source: str | Path, revision: str | None) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise InvalidArgument(f"{source}: is a file; give the folder with config.json and {_WEIGHTS}")
    if isinstance(source, Path) or path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise InvalidArgument(f"{source}: no such folder; give one with config.json and {_WEIGHTS}, or a hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(_DOWNLOADS)))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{source}: is neither a folder nor available from the Hugging Face hub ({first_line(error)}); check the "
            f"name and the connection; without one, copy config.json and {_WEIGHTS} into a folder and give its path"
        ) from error


def _read_config(folder: Path, where: Any) -> Any:
    if not (folder / "config.json").is_file():
        raise InvalidArgument(f"{where}: has no config.json; give a folder or hub id of a transformers checkpoint")
    problem = f"{where}: config.json is not of a network in transformers"
    try:
        values = load_json(folder / "config.json")
    except ValueError as error:
        raise InvalidArgument(f"{problem} ({first_line(error)}); download it again") from error
    check_numbers(values if isinstance(values, dict) else {}, str(folder / "config.json"))
    with _transformers(problem, "give a checkpoint of a video classifier that transformers itself contains") as hf:
        config = hf.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _check_config(config, where)
    return config


def _load_net(folder: Path, config: Any, where: Any, new_head: bool) -> nn.Module:
    if not any((folder / name).is_file() for name in (_WEIGHTS, _WEIGHTS_INDEX)):
        raise WeightsError(
            f"{where}: has no {_WEIGHTS}; pickled weights are not read because they can run code: convert them with "
            "save_pretrained, or give the revision= of the hub that holds safetensors"
        )
    with _transformers(f"{where}: the weights cannot be read", "download or save them again", WeightsError) as hf:
        num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        build = partial(hf.AutoModelForVideoClassification.from_config, config)
        check_network_size(build, num_bytes, folder / "config.json")
        net, report = hf.AutoModelForVideoClassification.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # checked below
            output_loading_info=True,
        )
    # transformers fills missing tensors with random numbers; only a new head may be random.
    trunk = f"{net.base_model_prefix}."
    shapes = sorted(key for key, *_ in report["mismatched_keys"] if not (new_head and key.startswith(f"{HEAD}.")))
    missing = sorted(key for key in report["missing_keys"] if not (new_head and not key.startswith(trunk)))
    if problems := counted({"missing": missing, "of another shape": shapes}):
        raise WeightsError(
            f"{where}: the weights do not fill the network; {problems}; give a checkpoint of the whole classifier, or "
            "new_head=True if only its last layers are missing"
        )
    if random_keys := sorted(key for key in report["missing_keys"] if not key.startswith(f"{HEAD}.")):
        log.warning("%s: %d tensors besides the head are random: %s", where, len(random_keys), some_of(random_keys))
    if unused := sorted(report["unexpected_keys"]):
        text = "%s: %d tensors are not part of the network and are ignored: %s"
        log.warning(text, where, len(unused), some_of(unused))
    if new_head:
        nn.init.trunc_normal_(net.classifier.weight, std=config.initializer_range)
        nn.init.zeros_(net.classifier.bias)
    return net


def _preprocessing(folder: Path, config: Any, where: Any) -> Preprocessing:
    """Return the preprocessing of the checkpoint's processor file, or the model's usual one if there is no file."""
    size = input_size(config)
    if not any((folder / name).is_file() for name in _PROCESSORS):
        return default_preprocessing(config.model_type, size)
    problem = f"{where}: its processor file cannot be read"
    advice = "download it again, or remove it to use the network's usual size and normalisation"
    with _transformers(problem, advice) as hf:
        try:
            processor = hf.AutoVideoProcessor.from_pretrained(folder, trust_remote_code=False)
        except ValueError:  # earlier versions have only an image processor for some models
            processor = hf.AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    return processor_preprocessing(processor.to_dict(), size, where=str(where))


# ---- preprocessing

# Without a processor file (a config alone, a bare folder): model type -> short side before the crop over the crop,
# mean, std of RGB in 0..1. TimeSformer and VideoMAE are those of the authors' code, where transformers 5.22 has
# ImageNet's and (.5, .5); ViViT's is transformers' x / 127.5 - 1, then (.5, .5).
_INPUTS: dict[str, tuple[float, Triple, Triple]] = {
    "timesformer": (1.0, (0.45, 0.45, 0.45), (0.225, 0.225, 0.225)),
    "videomae": (1.0, IMAGENET_MEAN, IMAGENET_STD),
    "vivit": (256 / 224, (0.75, 0.75, 0.75), (0.25, 0.25, 0.25)),
    "vjepa2": (256 / 224, IMAGENET_MEAN, IMAGENET_STD),
}
# Pillow's numbers for filters, which processor files use, or their names.
_INTERPOLATIONS: dict[Any, str] = {2: "bilinear", 3: "bicubic", "bilinear": "bilinear", "bicubic": "bicubic"}


def default_preprocessing(model_type: str, size: tuple[int, int]) -> Preprocessing:
    """Return the usual preprocessing of a model type, for a network that takes `size` (height, width)."""
    if model_type not in _INPUTS:
        text = "%s: its normalisation is unknown; ImageNet's mean and std are used, give preprocessing= for others"
        log.warning(text, model_type)
    ratio, mean, std = _INPUTS.get(model_type, (1.0, IMAGENET_MEAN, IMAGENET_STD))
    return Preprocessing(size=size, resize=int(max(size) * ratio), mean=mean, std=std)


def processor_preprocessing(processor: dict[str, Any], size: tuple[int, int], *, where: str) -> Preprocessing:
    """Return the preprocessing of a processor's `to_dict()`, for a network that takes `size` (height, width)."""
    sides = processor.get("size")
    shortest = sides.get("shortest_edge") if isinstance(sides, dict) else None
    resize: int | tuple[int, int] | None = int(shortest) if shortest else _pair(sides)
    interpolation = _INTERPOLATIONS.get(processor.get("resample"))
    if resize is None or interpolation is None or not processor.get("do_resize", True):
        resize, interpolation = resize or max(size), interpolation or "bilinear"
        log.warning(
            "%s: its processor file has size %s, resample %s, do_resize %s; frames are resized to %s, %s instead",
            *(where, sides, processor.get("resample"), processor.get("do_resize"), resize, interpolation),
        )
    crop = _pair(processor.get("crop_size")) if processor.get("do_center_crop") else None
    if crop is None:
        crop = resize if isinstance(resize, tuple) else size
    mean, std = _normalisation(processor)
    preprocessing = Preprocessing(size=crop, resize=resize, mean=mean, std=std, interpolation=interpolation)
    if preprocessing.size != size:
        log.warning(
            "%s: its processor file gives frames of %s but the network takes %s; frames are resized to that",
            *(where, preprocessing.size, size),
        )
        preprocessing = preprocessing.with_size(size)
    return preprocessing


def _normalisation(processor: dict[str, Any]) -> tuple[Triple, Triple]:
    """Return mean and std for RGB in 0..1; the processor maps x in 0..255 to (x * factor - offset - mean) / std."""
    rescaled, normalised = processor.get("do_rescale", True), processor.get("do_normalize", True)
    scale = 255 * float(processor.get("rescale_factor", 1 / 255)) if rescaled else 255.0
    # ViViT's maps x to -1..1 first, unless its file sets another offset.
    kind = str(processor.get("video_processor_type") or processor.get("image_processor_type") or "")
    offset = 1.0 if rescaled and processor.get("offset", kind.startswith("Vivit")) else 0.0

    def three(key: str, default: float, shift: float) -> Triple:
        value = processor.get(key, default) if normalised else default
        channels = value if isinstance(value, (list, tuple)) else (value, value, value)
        red, green, blue = (round((float(channel) + shift) / scale, 9) for channel in channels)
        return red, green, blue

    return three("image_mean", 0.0, offset), three("image_std", 1.0, 0.0)


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, dict) and size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    return (size, size) if isinstance(size, int) else None


# ---- TimeSformer

# nearest: by frame index, as the authors and transformers do. linear: by the frames' positions.
TEMPORAL = ("linear", "nearest")


def temporal_embeddings(table: Tensor, num_frames: int, positions: Tensor | None, temporal: str) -> Tensor:
    """Resample K embeddings [1, K, D] for N frames: [1, N, D], or [B, N, D] for positions [B, N] in 0..1.

    "linear": embedding k belongs to the centre (k + 1/2) / K of its segment of the video; values are interpolated
    between centres and constant beyond the first and the last. Without positions, frames are at (i + 1/2) / N.
    "nearest": embedding floor(i K / N) for frame i, whatever its position; a single frame gets the first one.
    """
    if temporal == "nearest":
        return F.interpolate(table.transpose(1, 2), size=num_frames, mode="nearest").transpose(1, 2)
    length = table.shape[1]
    if positions is None:
        positions = ((torch.arange(num_frames, device=table.device) + 0.5) / num_frames)[None]
    index = (positions.to(table.device, torch.float32) * length - 0.5).clamp(0, length - 1)
    before = index.floor().long()
    after = (before + 1).clamp(max=length - 1)
    fraction = (index - before)[..., None].to(table.dtype)  # [B, N, 1]
    return torch.lerp(table[0][before], table[0][after], fraction)


def timesformer_logits(net: Any, clips: Tensor, positions: Tensor | None = None, temporal: str = "linear") -> Tensor:
    """Compute scores [B, C] of normalised clips [B, N, 3, h, w] with a `TimesformerForVideoClassification`."""
    model = net.timesformer
    embeddings, kind = model.embeddings, model.embeddings.attention_type
    batch, frames = clips.shape[:2]
    spatial = embeddings.position_embeddings  # [1, 1 + P, D], the class token first
    cls = embeddings.pos_drop(embeddings.cls_token + spatial[:, :1])[None]  # [1, 1, 1, D]
    patches = embeddings.patch_embeddings.projection(clips.flatten(0, 1)).flatten(2).transpose(1, 2)  # [B * N, P, D]
    patches = embeddings.pos_drop(patches + spatial[:, 1:]).unflatten(0, (batch, frames))  # [B, N, P, D]
    if kind == "space_only":  # every frame alone, averaged at the end
        tokens = torch.cat([cls.expand(batch, frames, -1, -1), patches], 2).flatten(0, 1)  # [B * N, 1 + P, D]
    else:
        times = temporal_embeddings(embeddings.time_embeddings, frames, positions, temporal)
        patches = embeddings.time_drop(patches + times[:, :, None])
        tokens = torch.cat([cls.expand(batch, 1, -1, -1).flatten(1, 2), patches.flatten(1, 2)], 1)  # [B, 1 + N * P, D]
    for layer in model.encoder.layer:
        if kind == "divided_space_time":
            tokens = _divided(layer, tokens, frames)
        else:  # attention between all tokens
            tokens = tokens + layer.drop_path(_attend(layer.attention, layer.layernorm_before(tokens)))
        tokens = tokens + layer.drop_path(layer.output(layer.intermediate(layer.layernorm_after(tokens))))
    first = tokens[:, 0]
    if kind == "space_only":
        first = first.unflatten(0, (batch, frames)).mean(1)  # as the authors do; transformers omits it
    return net.classifier(first if model.layernorm is None else model.layernorm(first))


def _divided(layer: Any, tokens: Tensor, frames: int) -> Tensor:
    """Apply attention of each patch along time, then within each frame: [B, 1 + N * P, D] -> the same shape."""
    batch = len(tokens)
    cls, patches = tokens[:, :1], tokens[:, 1:].unflatten(1, (frames, -1))  # [B, 1, D], [B, N, P, D]

    # Many short sequences: transformers' plain attention has no limit on the batch (B * P), fused kernels do.
    along = patches.transpose(1, 2).flatten(0, 1)  # [B * P, N, D]
    along = layer.drop_path(layer.temporal_attention(layer.temporal_layernorm(along))[0])
    patches = patches + layer.temporal_dense(along).unflatten(0, (batch, -1)).transpose(1, 2)

    within = torch.cat([cls[:, None].expand(-1, frames, -1, -1), patches], 2).flatten(0, 1)  # [B * N, 1 + P, D]
    within = layer.drop_path(_attend(layer.attention, layer.layernorm_before(within))).unflatten(0, (batch, frames))
    cls = cls + within[:, :, 0].mean(1, keepdim=True)
    patches = patches + within[:, :, 1:]
    return torch.cat([cls, patches.flatten(1, 2)], 1)


def _attend(attention: Any, tokens: Tensor) -> Tensor:
    """Apply self-attention [S, L, D] -> [S, L, D] by torch's fused kernel; transformers stores the [L, L] matrix."""
    weights = attention.attention
    parts = weights.qkv(tokens).unflatten(-1, (3, weights.num_heads, -1)).permute(2, 0, 3, 1, 4)
    query, key, value = parts.unbind(0)  # [S, heads, L, D / heads] each
    dropout = weights.attn_drop.p if weights.training else 0.0
    attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=weights.scale)
    return attention.output(attended.transpose(1, 2).flatten(2))
