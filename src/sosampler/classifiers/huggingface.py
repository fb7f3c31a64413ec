"""Video classifiers of Hugging Face transformers: TimeSformer, VideoMAE, ViViT, V-JEPA 2 and others.

Frames per clip: TimeSformer takes any number; V-JEPA 2 any multiple of its tubelet (rotary positions); the others
exactly as many as they have temporal position embeddings.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.validation import check_int, one_of
from sosampler.classifiers.base import (
    Classifier,
    ClipLength,
    kinetics400_names,
    names_for,
    numbered_names,
    unwrap_output,
)
from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, Triple
from sosampler.classifiers.weights import some_of
from sosampler.errors import InvalidArgument, MissingDependency, WeightsError, first_line

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
        self._check_size(clips)
        return unwrap_output(self.net(**{self.net.main_input_name: clips}), self.name)

    def _check_size(self, clips: Tensor) -> None:
        # transformers refuses other sizes for some networks; others would mix up the positions of the patches.
        height, width = input_size(self.net.config)
        if tuple(clips.shape[-2:]) != (height, width):
            raise InvalidArgument(
                f"{self.name} was given frames of {clips.shape[-2]}x{clips.shape[-1]} but its position embeddings are "
                f"for {height}x{width}; do not change input_size or the size of the preprocessing"
            )

    def head_names(self) -> tuple[str, ...]:
        return (HEAD,)


class TimeSformer(HuggingFaceClassifier):
    """Divided, joint or space-only attention over any number of frames at any `positions`."""

    @property
    def temporal(self) -> str:
        return str(self.options["temporal"])

    def clip_logits(self, clips: Tensor, positions: Tensor | None = None) -> Tensor:
        self._check_size(clips)
        return timesformer_logits(self.net, clips, positions, self.temporal)


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
        num_classes: of the head, with a config; a number other than a checkpoint's needs `new_head`.
        new_head: start with a random last layer; None does so only if num_classes is not the checkpoint's.
        temporal: of TimeSformer: "linear" or "nearest", see `temporal_embeddings`.
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
        if num_frames not in (None, getattr(config, _frames_key(config))):
            raise InvalidArgument(
                f"{source}: has position embeddings for {getattr(config, _frames_key(config))} frames but "
                f"num_frames={num_frames}; leave num_frames out: clips may have another length where the network "
                "allows it"
            )
        config.num_labels = num_classes or config.num_labels
        net = _load_net(folder, config, source, new_head)
        preprocessing = _preprocessing(folder, config, source)
        path = Path(source).expanduser()  # a moved folder keeps its name
        name, class_names = f"hf:{path.resolve().name if path.is_dir() else source}", _label_names(config)
    else:
        if pretrained:
            raise InvalidArgument("a transformers config has no weights; give hf:FOLDER or hf:HUB_ID to load some")
        config = copy.deepcopy(transformers.TimesformerConfig(num_labels=400) if source is None else source)
        _check_config(config, "the config")
        config.num_labels = num_classes or config.num_labels
        if num_frames is not None:
            setattr(config, _frames_key(config), num_frames)
        try:
            with _quiet():
                net = transformers.AutoModelForVideoClassification.from_config(config)
        except ValueError as error:
            raise InvalidArgument(
                f"transformers does not accept the config ({first_line(error)}); change it"
            ) from error
        preprocessing = default_preprocessing(config.model_type, input_size(config))
        name = _config_name(config)
        class_names = names_for(config.num_labels, kinetics400_names) if source is None else _label_names(config)
    options: dict[str, Any] = {"hf_config": config_to_dict(config)}
    kind: type[HuggingFaceClassifier] = HuggingFaceClassifier
    if config.model_type == "timesformer":
        kind, options = TimeSformer, {**options, "temporal": temporal}
    elif temporal != "linear":
        raise InvalidArgument(f"temporal={temporal!r} is for TimeSformer, not {config.model_type}; leave it out")
    classifier = kind(
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
        import transformers
    except ImportError as error:
        raise MissingDependency(
            "Hugging Face classifiers need transformers; install it with pip install 'sosampler[hf]'"
        ) from error
    return transformers


# ---- configs


def input_size(config: Any) -> tuple[int, int]:
    """Return the height and width that the network's position embeddings are for."""
    size = getattr(config, "image_size", None) or config.crop_size  # V-JEPA 2 calls it crop_size
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def clip_length(config: Any) -> ClipLength:
    """Return how many frames per clip the network takes."""
    if config.model_type == "timesformer":
        return ClipLength()
    tubelet = getattr(config, "tubelet_size", 1)  # frames, or (frames, height, width)
    tubelet = tubelet if isinstance(tubelet, int) else int(tubelet[0])
    if config.model_type == "vjepa2":
        return ClipLength(multiple_of=tubelet)
    frames = int(config.num_frames)
    if frames % tubelet:
        raise InvalidArgument(f"num_frames={frames} must be a multiple of the config's tubelet_size={tubelet}")
    return ClipLength(at_least=frames, at_most=frames)


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return everything that defines the network, as plain JSON values for `config_from_dict`."""
    generic = json.loads(import_transformers().PreTrainedConfig().to_json_string(use_diff=False))
    values = json.loads(config.to_json_string(use_diff=False))
    return {
        "model_type": config.model_type,
        "num_labels": config.num_labels,
        **{
            key: value
            for key, value in sorted(values.items())
            if key not in _BOOKKEEPING and not (key in generic and generic[key] == value)
        },
    }


def config_from_dict(values: dict[str, Any]) -> Any:
    """Return the transformers config that `config_to_dict` described."""
    transformers = import_transformers()
    try:
        with _quiet():
            return transformers.AutoConfig.for_model(**values)
    except _config_errors() as error:
        raise InvalidArgument(
            f"transformers {transformers.__version__} cannot build a config of model type "
            f"{values.get('model_type')!r} ({first_line(error)}); use the version that the classifier was saved with"
        ) from error


def _config_name(config: Any) -> str:
    """Return "timesformer" for the network of the paper with any classes, else hf:MODEL_TYPE."""

    def network(any_config: Any) -> dict[str, Any]:
        return {k: v for k, v in config_to_dict(any_config).items() if k not in ("num_labels", "problem_type")}

    default = network(import_transformers().TimesformerConfig())
    return "timesformer" if network(config) == default else f"hf:{config.model_type}"


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
    try:
        with _quiet():
            config = import_transformers().AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except _config_errors() as error:
        raise InvalidArgument(
            f"{where}: config.json is not of a network in transformers ({first_line(error)}); give a checkpoint of a "
            "video classifier that transformers itself contains"
        ) from error
    _check_config(config, where)
    return config


def _load_net(folder: Path, config: Any, where: Any, new_head: bool) -> nn.Module:
    from safetensors import SafetensorError

    if not any((folder / name).is_file() for name in (_WEIGHTS, _WEIGHTS_INDEX)):
        raise WeightsError(
            f"{where}: has no {_WEIGHTS}; pickled weights are not read because they can run code: convert them with "
            "save_pretrained, or give the revision= of the hub that holds safetensors"
        )
    try:
        with _quiet():
            net, report = import_transformers().AutoModelForVideoClassification.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # checked below
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise WeightsError(
            f"{where}: the weights cannot be read ({first_line(error)}); download or save them again"
        ) from error
    _check_loaded(report, net, where, new_head)
    if new_head:
        nn.init.trunc_normal_(net.classifier.weight, std=config.initializer_range)
        nn.init.zeros_(net.classifier.bias)
    loaded: nn.Module = net
    return loaded


def _check_loaded(report: dict[str, Any], net: Any, where: Any, new_head: bool) -> None:
    """Refuse missing tensors, which transformers fills with random numbers; only a new head may be random."""
    trunk = f"{net.base_model_prefix}."
    shapes = sorted(key for key, *_ in report["mismatched_keys"] if not (new_head and key.startswith(f"{HEAD}.")))
    missing = sorted(key for key in report["missing_keys"] if not (new_head and not key.startswith(trunk)))
    if shapes or missing:
        problems = [
            f"{len(keys)} {what}: {some_of(keys)}"
            for keys, what in ((missing, "missing"), (shapes, "of another shape"))
            if keys
        ]
        raise WeightsError(
            f"{where}: the weights do not fill the network; {'; '.join(problems)}; give a checkpoint of the whole "
            "classifier, or new_head=True if only its last layers are missing"
        )
    random_keys = sorted(key for key in report["missing_keys"] if not key.startswith(f"{HEAD}."))
    if random_keys:
        log.warning("%s: %d tensors besides the head are random: %s", where, len(random_keys), some_of(random_keys))
    unused = sorted(report["unexpected_keys"])
    if unused:
        log.warning(
            "%s: %d tensors are not part of the network and are ignored: %s", where, len(unused), some_of(unused)
        )


def _preprocessing(folder: Path, config: Any, where: Any) -> Preprocessing:
    """Return the preprocessing of the checkpoint's processor file, or the model's usual one if there is no file."""
    size = input_size(config)
    if not any((folder / name).is_file() for name in _PROCESSORS):
        return default_preprocessing(config.model_type, size)
    try:
        with _quiet():
            transformers = import_transformers()
            try:
                processor = transformers.AutoVideoProcessor.from_pretrained(folder, trust_remote_code=False)
            except ValueError:  # earlier versions have only an image processor for some models
                processor = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidArgument(
            f"{where}: its processor file cannot be read ({first_line(error)}); download it again, or remove it to use "
            "the network's usual size and normalisation"
        ) from error
    return processor_preprocessing(processor.to_dict(), size, where=str(where))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars, reports and advice; this module reports what matters."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _config_errors() -> tuple[type[Exception], ...]:
    """Return what transformers raises for a config that is unreadable, unknown or has values of a wrong type."""
    from huggingface_hub.errors import StrictDataclassError

    return OSError, ValueError, TypeError, StrictDataclassError


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
        log.warning(
            "%s: its normalisation is unknown; ImageNet's mean and std are used, give preprocessing= for others",
            model_type,
        )
    ratio, mean, std = _INPUTS.get(model_type, (1.0, IMAGENET_MEAN, IMAGENET_STD))
    return Preprocessing(size=size, resize=int(max(size) * ratio), mean=mean, std=std)


def processor_preprocessing(processor: dict[str, Any], size: tuple[int, int], *, where: str) -> Preprocessing:
    """Return the preprocessing of a processor's `to_dict()`, for a network that takes `size` (height, width)."""
    sides = processor.get("size")
    resize: int | tuple[int, int] | None = _pair(sides)
    if isinstance(sides, dict) and sides.get("shortest_edge"):
        resize = int(sides["shortest_edge"])
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
    mean, std = (
        _three(processor.get(key, default) if normalised else default, scale, shift)
        for key, default, shift in (("image_mean", 0.0, offset), ("image_std", 1.0, 0.0))
    )
    return mean, std


def _three(value: Any, scale: float, shift: float) -> Triple:
    channels = value if isinstance(value, (list, tuple)) else (value, value, value)
    red, green, blue = (round((float(channel) + shift) / scale, 9) for channel in channels)
    return red, green, blue


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict) and size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    return None


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
    kind = model.embeddings.attention_type
    batch, frames = clips.shape[:2]
    cls, patches = _embed(model.embeddings, clips, positions, temporal)
    if kind == "space_only":  # every frame alone, averaged at the end
        tokens = torch.cat([cls.expand(batch, frames, -1, -1), patches], 2).flatten(0, 1)  # [B * N, 1 + P, D]
    else:
        tokens = torch.cat([cls.expand(batch, 1, -1, -1).flatten(1, 2), patches.flatten(1, 2)], 1)  # [B, 1 + N * P, D]
    for layer in model.encoder.layer:
        tokens = _divided(layer, tokens, frames) if kind == "divided_space_time" else _joint(layer, tokens)
    first = tokens[:, 0]
    if kind == "space_only":
        first = first.unflatten(0, (batch, frames)).mean(1)  # as the authors do; transformers omits it
    if model.layernorm is not None:
        first = model.layernorm(first)
    scores: Tensor = net.classifier(first)
    return scores


def _embed(module: Any, clips: Tensor, positions: Tensor | None, temporal: str) -> tuple[Tensor, Tensor]:
    """Return the class token [1, 1, 1, D] and patches [B, N, P, D], with spatial and (patches) temporal embeddings."""
    batch, frames = clips.shape[:2]
    spatial = module.position_embeddings  # [1, 1 + P, D], the class token first
    cls = module.pos_drop(module.cls_token + spatial[:, :1])[None]
    patches = module.patch_embeddings.projection(clips.flatten(0, 1)).flatten(2).transpose(1, 2)  # [B * N, P, D]
    patches = module.pos_drop(patches + spatial[:, 1:]).unflatten(0, (batch, frames))
    if module.attention_type == "space_only":
        return cls, patches
    temporal_part = temporal_embeddings(module.time_embeddings, frames, positions, temporal)
    return cls, module.time_drop(patches + temporal_part[:, :, None])


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
    return _feed_forward(layer, torch.cat([cls, patches.flatten(1, 2)], 1))


def _joint(layer: Any, tokens: Tensor) -> Tensor:
    """Apply attention between all tokens."""
    return _feed_forward(layer, tokens + layer.drop_path(_attend(layer.attention, layer.layernorm_before(tokens))))


def _feed_forward(layer: Any, tokens: Tensor) -> Tensor:
    inner = layer.intermediate(layer.layernorm_after(tokens))
    return tokens + layer.drop_path(layer.output(inner))


def _attend(attention: Any, tokens: Tensor) -> Tensor:
    """Apply self-attention [S, L, D] -> [S, L, D] by torch's fused kernel; transformers stores the [L, L] matrix."""
    weights = attention.attention
    parts = weights.qkv(tokens).unflatten(-1, (3, weights.num_heads, -1)).permute(2, 0, 3, 1, 4)
    query, key, value = parts.unbind(0)  # [S, heads, L, D / heads] each
    dropout = weights.attn_drop.p if weights.training else 0.0
    attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=weights.scale)
    mixed: Tensor = attention.output(attended.transpose(1, 2).flatten(2))
    return mixed
