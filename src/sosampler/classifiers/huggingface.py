"""Video classifiers of Hugging Face transformers: TimeSformer, VideoMAE, ViViT, V-JEPA 2 and what else it knows.

Frames a clip: TimeSformer takes any number; V-JEPA 2 any multiple of its tubelet (rotary positions); the others exactly
as many as their table of positions holds.
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

from sosampler._util.validation import one_of, whole_number
from sosampler.classifiers.base import Classifier, ClipLength, kinetics400_names, names_for, numbered_names
from sosampler.classifiers.hf_processors import default_preprocessing, processor_preprocessing
from sosampler.classifiers.outputs import unwrap_output
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.classifiers.weights import some_of
from sosampler.errors import InvalidArgument, MissingDependency, WeightsError, first_line

log = logging.getLogger("sosampler")

HEAD = "classifier"
_WEIGHTS, _WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
_PROCESSORS = ("video_preprocessor_config.json", "preprocessor_config.json")
# What is fetched from the hub: never pickled weights, never code.
_FETCHED = ("config.json", *_PROCESSORS, "model*.safetensors", _WEIGHTS_INDEX)

# Of a config, what says where it comes from instead of what the network is; class names are kept elsewhere.
_BOOKKEEPING = {"transformers_version", "architectures", "_name_or_path", "dtype", "id2label", "label2id"}


class HuggingFaceClassifier(Classifier):
    """Any `AutoModelForVideoClassification`; the state dict of `net` is transformers' own."""

    def clip_logits(self, clips: Tensor, positions: Tensor | None = None) -> Tensor:
        self._check_size(clips)
        return unwrap_output(self.net(**{self.net.main_input_name: clips}), self.name)

    def _check_size(self, clips: Tensor) -> None:
        # transformers refuses other sizes for some networks; others would mix up the places of the patches.
        height, width = input_size(self.net.config)
        if tuple(clips.shape[-2:]) != (height, width):
            raise InvalidArgument(
                f"{self.name} was given frames of {clips.shape[-2]}x{clips.shape[-1]} but its table of places is for "
                f"{height}x{width}; leave input_size and the size of the preprocessing as they are"
            )

    def head_names(self) -> tuple[str, ...]:
        return (HEAD,)


class TimeSformer(HuggingFaceClassifier):
    """Divided, joint or space-only attention over any number of frames; `positions` say when each was seen."""

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
    """A transformers video classifier.

    Args:
        source: a folder or hub id with config.json and model.safetensors; or a config, which gives random weights.
            None is TimeSformer (ViT-B/16, 8 frames, 224) for the 400 classes of Kinetics.
        num_classes: with a config, of the head. Other than a checkpoint's it needs `new_head`.
        new_head: start with a fresh last layer; None does so only where num_classes is not the checkpoint's.
        temporal: of TimeSformer: "linear" or "nearest", see `temporal_embeddings`.
        num_frames: with a config, the length of its table of times.
        revision: of a hub id: a branch, tag, commit, or refs/pr/N of a conversion to safetensors.
        pretrained: refuse sources without weights.
    """
    transformers = import_transformers()
    one_of("temporal", temporal, TEMPORAL)
    if num_classes is not None:
        num_classes = whole_number("num_classes", num_classes)
    if num_frames is not None:
        num_frames = whole_number("num_frames", num_frames)
    if isinstance(source, (str, Path)):
        folder = _local_folder(source, revision)
        config = _read_config(folder, source)
        if new_head is None:
            new_head = num_classes is not None and num_classes != config.num_labels
        _set_classes(config, num_classes, source, allowed=new_head)
        _set_frames(config, num_frames, source, allowed=False)
        net = _load_net(folder, config, source, new_head)
        preprocessing = _preprocessing(folder, config, source)
        name, class_names = _source_name(source), _label_names(config)
    else:
        if pretrained:
            raise InvalidArgument("a transformers config brings no weights; give hf:FOLDER or HUB ID to get pretrained")
        config = copy.deepcopy(transformers.TimesformerConfig(num_labels=400) if source is None else source)
        _check_config(config, "the config")
        _set_classes(config, num_classes, "the config", allowed=True)
        _set_frames(config, num_frames, "the config", allowed=True)
        net = _random_net(config)
        preprocessing = default_preprocessing(config.model_type, input_size(config))
        name = _config_name(config)
        class_names = names_for(config.num_labels, kinetics400_names) if source is None else _label_names(config)
    options: dict[str, Any] = {"hf_config": config_to_dict(config)}
    kind: type[HuggingFaceClassifier] = HuggingFaceClassifier
    if config.model_type == "timesformer":
        kind, options = TimeSformer, {**options, "temporal": temporal}
    elif temporal != "linear":
        raise InvalidArgument(f"temporal={temporal!r} is for TimeSformer; {config.model_type} places frames by itself")
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
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency(
            "Hugging Face classifiers need transformers; install it with pip install 'sosampler[hf]'"
        ) from error
    return transformers


# ---- facts in a config


def input_size(config: Any) -> tuple[int, int]:
    """Height and width that the network's table of places is made for."""
    size = getattr(config, "image_size", None) or config.crop_size  # V-JEPA 2 calls it crop_size
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def clip_length(config: Any) -> ClipLength:
    """How many frames the network takes."""
    if config.model_type == "timesformer":
        return ClipLength()
    tubelet = getattr(config, "tubelet_size", 1)  # frames, or (frames, height, width)
    tubelet = tubelet if isinstance(tubelet, int) else int(tubelet[0])
    if config.model_type == "vjepa2":
        return ClipLength(multiple_of=tubelet)
    frames = int(config.num_frames)
    if frames % tubelet:
        raise InvalidArgument(
            f"the config asks for {frames} frames in tubelets of {tubelet}; give num_frames as a multiple of {tubelet}"
        )
    return ClipLength(at_least=frames, at_most=frames)


def config_to_dict(config: Any) -> dict[str, Any]:
    """All that makes the network, as plain JSON values; `config_from_dict` makes a config of it."""
    generic = json.loads(import_transformers().PreTrainedConfig().to_json_string(use_diff=False))
    told = json.loads(config.to_json_string(use_diff=False))
    return {
        "model_type": config.model_type,
        "num_labels": config.num_labels,
        **{
            key: value
            for key, value in sorted(told.items())
            if key not in _BOOKKEEPING and not (key in generic and generic[key] == value)
        },
    }


def config_from_dict(told: dict[str, Any]) -> Any:
    transformers = import_transformers()
    try:
        with _quiet():
            return transformers.AutoConfig.for_model(**told)
    except _config_errors() as error:
        raise InvalidArgument(
            f"transformers {transformers.__version__} cannot make a config of model type "
            f"{told.get('model_type')!r} ({first_line(error)}); use the version that the classifier was saved with"
        ) from error


def _config_name(config: Any) -> str:
    """The network of the papers is "timesformer" whatever its classes; others are hf:MODEL_TYPE."""

    def network(any_config: Any) -> dict[str, Any]:
        return {k: v for k, v in config_to_dict(any_config).items() if k not in ("num_labels", "problem_type")}

    default = network(import_transformers().TimesformerConfig())
    return "timesformer" if network(config) == default else f"hf:{config.model_type}"


def _source_name(source: str | Path) -> str:
    """A folder goes by its last name: the same network has the same name wherever its folder lies."""
    path = Path(source).expanduser()
    return f"hf:{path.resolve().name if path.is_dir() else source}"


def _label_names(config: Any) -> tuple[str, ...]:
    """The config's own names where it has any, one for each class; numbers otherwise."""
    labels = config.id2label or {}
    names = tuple(str(labels.get(number, "")) for number in range(config.num_labels))
    made_up = names == tuple(f"LABEL_{number}" for number in range(config.num_labels))
    return numbered_names(config.num_labels) if made_up or "" in names or len(set(names)) < len(names) else names


def _check_config(config: Any, where: Any) -> None:
    transformers = import_transformers()
    if not isinstance(config, transformers.PreTrainedConfig):
        raise InvalidArgument(
            f"{type(config).__name__} is not a source of a classifier; give a folder, a hub id or a transformers config"
        )
    known = transformers.models.auto.modeling_auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES
    if config.model_type not in known:
        raise InvalidArgument(
            f"{where}: {config.model_type!r} is not a video classifier; transformers has these: {', '.join(known)}"
        )
    channels = getattr(config, "num_channels", getattr(config, "in_chans", 3))
    if channels != 3:
        raise InvalidArgument(f"{where}: the network takes {channels} channels; frames are RGB, give one that takes 3")


def _set_classes(config: Any, num_classes: int | None, where: Any, *, allowed: bool) -> None:
    if num_classes is None or num_classes == config.num_labels:
        return
    if not allowed:
        raise InvalidArgument(
            f"{where}: has {config.num_labels} classes but num_classes={num_classes}; leave num_classes out, or give "
            "new_head=True to start with a fresh head"
        )
    config.num_labels = num_classes


def _set_frames(config: Any, num_frames: int | None, where: Any, *, allowed: bool) -> None:
    key = "num_frames" if hasattr(config, "num_frames") else "frames_per_clip"
    if num_frames is None or num_frames == getattr(config, key):
        return
    if not allowed:
        raise InvalidArgument(
            f"{where}: its table of times is for {getattr(config, key)} frames but num_frames={num_frames}; leave "
            "num_frames out, clips may be of another length where the network allows it"
        )
    setattr(config, key, num_frames)


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
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(_FETCHED)))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{source}: neither a folder here nor to be had from the Hugging Face hub ({first_line(error)}); check "
            f"the name and the network; without one, copy config.json and {_WEIGHTS} into a folder and give its path"
        ) from error


def _read_config(folder: Path, where: Any) -> Any:
    if not (folder / "config.json").is_file():
        raise InvalidArgument(f"{where}: has no config.json; give a folder or hub id of a transformers checkpoint")
    try:
        with _quiet():
            config = import_transformers().AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except _config_errors() as error:
        raise InvalidArgument(
            f"{where}: config.json is not that of a network in transformers ({first_line(error)}); give a checkpoint "
            "of a video classifier that transformers itself contains"
        ) from error
    _check_config(config, where)
    return config


def _random_net(config: Any) -> nn.Module:
    try:
        with _quiet():
            return import_transformers().AutoModelForVideoClassification.from_config(config)
    except ValueError as error:
        raise InvalidArgument(f"transformers refuses the config ({first_line(error)}); change the config") from error


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
                ignore_mismatched_sizes=True,  # judged below, by what they are
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise WeightsError(
            f"{where}: the weights cannot be read ({first_line(error)}); fetch or save them again"
        ) from error
    _judge(report, net, where, new_head)
    if new_head:
        nn.init.trunc_normal_(net.classifier.weight, std=config.initializer_range)
        nn.init.zeros_(net.classifier.bias)
    loaded: nn.Module = net
    return loaded


def _judge(report: dict[str, Any], net: Any, where: Any, new_head: bool) -> None:
    """transformers fills what a checkpoint lacks with random numbers; only a new head may be random."""
    trunk = f"{net.base_model_prefix}."
    shapes = sorted(key for key, *_ in report["mismatched_keys"] if not (new_head and key.startswith(f"{HEAD}.")))
    missing = sorted(key for key in report["missing_keys"] if not (new_head and not key.startswith(trunk)))
    if shapes or missing:
        said = [
            f"{len(keys)} {what}: {some_of(keys)}"
            for keys, what in ((missing, "missing"), (shapes, "of another shape"))
            if keys
        ]
        raise WeightsError(
            f"{where}: the weights do not fill the network; {'; '.join(said)}; give a checkpoint of the whole "
            "classifier, or new_head=True where only its last layers are missing"
        )
    fresh = sorted(key for key in report["missing_keys"] if not key.startswith(f"{HEAD}."))
    if fresh:
        log.warning("%s: %d tensors besides the head start fresh: %s", where, len(fresh), some_of(fresh))
    unused = sorted(report["unexpected_keys"])
    if unused:
        log.warning(
            "%s: %d tensors have no place in the network and are left out: %s", where, len(unused), some_of(unused)
        )


def _preprocessing(folder: Path, config: Any, where: Any) -> Preprocessing:
    """What the checkpoint's processor file says; the model's usual input where there is no file."""
    size = input_size(config)
    if not any((folder / name).is_file() for name in _PROCESSORS):
        return default_preprocessing(config.model_type, size)
    try:
        with _quiet():
            told = _read_processor(folder)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidArgument(
            f"{where}: its processor file cannot be read ({first_line(error)}); fetch it again, or take it out of the "
            "folder to use the network's usual size and normalisation"
        ) from error
    return processor_preprocessing(told, size, where=str(where))


def _read_processor(folder: Path) -> dict[str, Any]:
    transformers = import_transformers()
    try:
        processor = transformers.AutoVideoProcessor.from_pretrained(folder, trust_remote_code=False)
    except ValueError:  # earlier versions know some models by their image processor only
        processor = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    told: dict[str, Any] = processor.to_dict()
    return told


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its progress bars, reports and advice; what matters of them is said by this module."""
    from transformers.utils import logging as talk

    verbosity, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    try:
        yield
    finally:
        talk.set_verbosity(verbosity)
        if bars:
            talk.enable_progress_bar()


def _config_errors() -> tuple[type[Exception], ...]:
    """What transformers raises for a config that it cannot read, does not know, or whose values are of a wrong type."""
    from huggingface_hub.errors import StrictDataclassError

    return OSError, ValueError, TypeError, StrictDataclassError


# nearest: as the authors and transformers stretch their table, by frame number. linear: by the frames' positions.
TEMPORAL = ("linear", "nearest")


def temporal_embeddings(table: Tensor, num_frames: int, positions: Tensor | None, temporal: str) -> Tensor:
    """What a table [1, K, D] of K moments gives to N frames: [1, N, D], or [B, N, D] for positions [B, N] in 0..1.

    "linear": entry k stands at the centre (k + 1/2) / K of its segment of the video; between centres it is
    interpolated, beyond the first and the last it stays. Without positions, frames stand at (i + 1/2) / N.
    "nearest": entry floor(i K / N) for frame i, positions or not; a single frame gets the first entry.
    """
    if temporal == "nearest":
        return F.interpolate(table.transpose(1, 2), size=num_frames, mode="nearest").transpose(1, 2)
    moments = table.shape[1]
    if positions is None:
        positions = ((torch.arange(num_frames, device=table.device) + 0.5) / num_frames)[None]
    place = (positions.to(table.device, torch.float32) * moments - 0.5).clamp(0, moments - 1)
    before = place.floor().long()
    after = (before + 1).clamp(max=moments - 1)
    share = (place - before)[..., None].to(table.dtype)  # [B, N, 1]
    return torch.lerp(table[0][before], table[0][after], share)


def timesformer_logits(net: Any, clips: Tensor, positions: Tensor | None = None, temporal: str = "linear") -> Tensor:
    """Normalised [B, N, 3, h, w] -> scores [B, C] of a `TimesformerForVideoClassification`."""
    model = net.timesformer
    kind = model.embeddings.attention_type
    batch, frames = clips.shape[:2]
    cls, patches = _embed(model.embeddings, clips, positions, temporal)
    if kind == "space_only":  # every frame by itself, joined at the end
        tokens = torch.cat([cls.expand(batch, frames, -1, -1), patches], 2).flatten(0, 1)  # [B * N, 1 + P, D]
    else:
        tokens = torch.cat([cls.expand(batch, 1, -1, -1).flatten(1, 2), patches.flatten(1, 2)], 1)  # [B, 1 + N * P, D]
    for layer in model.encoder.layer:
        tokens = _divided(layer, tokens, frames) if kind == "divided_space_time" else _joint(layer, tokens)
    first = tokens[:, 0]
    if kind == "space_only":
        first = first.unflatten(0, (batch, frames)).mean(1)  # as the authors do; transformers leaves it out
    if model.layernorm is not None:
        first = model.layernorm(first)
    scores: Tensor = net.classifier(first)
    return scores


def _embed(module: Any, clips: Tensor, positions: Tensor | None, temporal: str) -> tuple[Tensor, Tensor]:
    """The class token [1, 1, 1, D] and the patches [B, N, P, D], with what tells place and (patches only) time."""
    batch, frames = clips.shape[:2]
    where = module.position_embeddings  # [1, 1 + P, D], the class token first
    cls = module.pos_drop(module.cls_token + where[:, :1])[None]
    patches = module.patch_embeddings.projection(clips.flatten(0, 1)).flatten(2).transpose(1, 2)  # [B * N, P, D]
    patches = module.pos_drop(patches + where[:, 1:]).unflatten(0, (batch, frames))
    if module.attention_type == "space_only":
        return cls, patches
    when = temporal_embeddings(module.time_embeddings, frames, positions, temporal)
    return cls, module.time_drop(patches + when[:, :, None])


def _divided(layer: Any, tokens: Tensor, frames: int) -> Tensor:
    """Attention of each patch along time, then within each frame: [B, 1 + N * P, D] -> the same."""
    batch = len(tokens)
    cls, patches = tokens[:, :1], tokens[:, 1:].unflatten(1, (frames, -1))  # [B, 1, D], [B, N, P, D]

    # Many short sequences: transformers' plain attention, whose batch (B * P) no fused kernel limits.
    along = patches.transpose(1, 2).flatten(0, 1)  # [B * P, N, D]
    along = layer.drop_path(layer.temporal_attention(layer.temporal_layernorm(along))[0])
    patches = patches + layer.temporal_dense(along).unflatten(0, (batch, -1)).transpose(1, 2)

    within = torch.cat([cls[:, None].expand(-1, frames, -1, -1), patches], 2).flatten(0, 1)  # [B * N, 1 + P, D]
    within = layer.drop_path(_attend(layer.attention, layer.layernorm_before(within))).unflatten(0, (batch, frames))
    cls = cls + within[:, :, 0].mean(1, keepdim=True)
    patches = patches + within[:, :, 1:]
    return _feed_forward(layer, torch.cat([cls, patches.flatten(1, 2)], 1))


def _joint(layer: Any, tokens: Tensor) -> Tensor:
    """Attention of all tokens with all others."""
    return _feed_forward(layer, tokens + layer.drop_path(_attend(layer.attention, layer.layernorm_before(tokens))))


def _feed_forward(layer: Any, tokens: Tensor) -> Tensor:
    inner = layer.intermediate(layer.layernorm_after(tokens))
    return tokens + layer.drop_path(layer.output(inner))


def _attend(attention: Any, tokens: Tensor) -> Tensor:
    """Self-attention [S, L, D] -> [S, L, D] by torch's fused kernel, where transformers writes the [L, L] table out."""
    weights = attention.attention
    parts = weights.qkv(tokens).unflatten(-1, (3, weights.num_heads, -1)).permute(2, 0, 3, 1, 4)
    query, key, value = parts.unbind(0)  # [S, heads, L, D / heads] each
    dropout = weights.attn_drop.p if weights.training else 0.0
    seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=weights.scale)
    mixed: Tensor = attention.output(seen.transpose(1, 2).flatten(2))
    return mixed
