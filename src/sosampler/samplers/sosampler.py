"""SOSampler: a small network that scores every candidate frame by how well it alone tells what the video shows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from sosampler._util.devices import autocast
from sosampler._util.validation import one_of, real_number, true_or_false, whole_number
from sosampler.classifiers.base import PRECISIONS, read_names
from sosampler.classifiers.cost import count_gmacs
from sosampler.classifiers.preprocessing import Preprocessing, check_frames
from sosampler.errors import InvalidArgument, WeightsError
from sosampler.samplers.backbones import MOBILENET, create_backbone
from sosampler.samplers.folder import local_folder, read_folder, write_folder
from sosampler.samplers.ranking import top_n
from sosampler.samplers.scoring import Scoring

# Frames that go through the network at once where the caller gives more, so that memory stays bounded.
_FRAMES_AT_ONCE = 256
# Bytes of frames in their stored size, as the float32 in which a GPU resizes them, that are brought to the input's size
# at once.
_PIXEL_BYTES_AT_ONCE = 1 << 30
_LEAST_SIDE = 32  # MobileNetV2 halves the frame five times


class SamplerOutput(NamedTuple):
    """What the network says about T candidates of B videos; what it says about masked ones means nothing."""

    scores: Tensor  # [B, T], what frames are ranked by
    importance: Tensor  # [B, T], the linear head
    class_logits: Tensor | None  # [B, T, C], where there is a class head
    features: Tensor  # [B, T, D]


class SOSampler(nn.Module, PyTorchModelHubMixin):
    """Scores candidate frames; the best N are those to give to the classifier it was trained for.

    Args:
        backbone: "mobilenet_v2" or "timm:NAME".
        shift: divisor of the temporal shift, 0 for none: then the backbone looks at each frame by itself.
        input_size: height and width that frames are brought to.
        num_classes, class_names: of the class head; none without num_classes.
        dropout: share of features dropped before the heads in training.
        multi_label: whether the classes of the class head do not exclude each other.
        scoring: settings of `Scoring`, by which the heads become one score. With a belief a score also depends on
            what the other candidates show.
        calibration: (a, b), so that sigmoid(a * score + b) is the confidence to expect of the classifier.
        about: facts for the model card (classifier, recipe, dev score, ...), any JSON values.
    """

    def __init__(
        self,
        *,
        backbone: str = MOBILENET,
        shift: int = 0,
        input_size: int = 128,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        dropout: float = 0.0,
        multi_label: bool = False,
        scoring: dict[str, Any] | None = None,
        calibration: Sequence[float] | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.input_size = whole_number("input_size", input_size, at_least=_LEAST_SIDE)
        self.num_classes = None if num_classes is None else whole_number("num_classes", num_classes)
        self.class_names = _check_names(class_names, self.num_classes)
        self.multi_label = true_or_false("multi_label", multi_label)
        if real_number("dropout", dropout, at_least=0.0) >= 1:
            raise InvalidArgument(f"dropout={dropout!r} is not allowed; give a share from 0 to below 1")
        self.calibration = calibration
        self.about = about
        self.precision = "float32"
        self.backbone = create_backbone(backbone, shift=shift, input_size=self.input_size)
        self.dropout = nn.Dropout(float(dropout))
        self.importance_head = nn.Linear(self.backbone.num_features, 1)
        self.class_head = None if self.num_classes is None else nn.Linear(self.backbone.num_features, self.num_classes)
        self.scoring = Scoring(
            _plain_json("scoring", scoring), multi_label=self.multi_label, num_classes=self.num_classes
        )
        self._gmacs: dict[int, float] = {}

    # ---- the network

    def forward(self, frames: Tensor, mask: Tensor | None = None) -> SamplerOutput:
        """Normalised float [B, T, 3, h, w], mask bool [B, T] (True: a real candidate) -> all outputs; gradients flow.

        Padding changes nothing for real candidates, except that batch norm in training mode counts it.
        """
        return self._judge(self._features(frames, mask), mask)

    def _features(self, frames: Tensor, mask: Tensor | None) -> Tensor:
        batch, count = frames.shape[:2]
        features: Tensor = self.backbone(frames.flatten(0, 1), count, mask)
        return features.view(batch, count, self.backbone.num_features)

    def _judge(self, features: Tensor, mask: Tensor | None) -> SamplerOutput:
        """Features [B, T, D] -> all outputs, at full precision: in half precision close scores would become ties."""
        kind = features.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # the meta device, where costs are counted, has none
            with torch.autocast(kind, enabled=False):
                return self._judge(features, mask)
        features = features.to(self.importance_head.weight.dtype)
        kept = self.dropout(features)
        importance = self.importance_head(kept).squeeze(-1)
        class_logits = None if self.class_head is None else self.class_head(kept)
        return SamplerOutput(self.scoring(importance, class_logits, mask), importance, class_logits, features)

    # ---- from frames as they come

    @property
    def preprocessing(self) -> Preprocessing:
        """Short side to the input size, centre crop, ImageNet's mean and std."""
        return Preprocessing(size=(self.input_size, self.input_size), resize=self.input_size)

    @torch.no_grad()
    def look(self, frames: Tensor, mask: Tensor | None = None) -> SamplerOutput:
        """uint8 [B, T, 3, H, W] of any size -> all outputs in float32, in bounded memory.

        Puts the network into evaluation mode, as running statistics must not move.
        """
        self.eval()
        frames = check_frames(frames)
        mask = self._check_mask(mask, frames)
        with autocast(self.device, self.precision):
            features = self._features_in_parts(frames, mask)
        said = self._judge(features, mask)
        _check_finite(said.scores if mask is None else said.scores[mask])
        return SamplerOutput(*(None if part is None else part.float() for part in said))

    def score(self, frames: Tensor, mask: Tensor | None = None) -> Tensor:
        """uint8 [B, T, 3, H, W] -> float32 scores [B, T]; the higher, the better. Those of masked ones mean nothing."""
        return self.look(frames, mask).scores

    def choose(self, frames: Tensor, num_frames: int, mask: Tensor | None = None) -> Tensor:
        """uint8 [B, T, 3, H, W] -> positions int64 [B, N] of the N best candidates of each video, in time order."""
        scores = self.score(frames, mask)
        return top_n(scores, num_frames, self._check_mask(mask, frames))

    def _features_in_parts(self, frames: Tensor, mask: Tensor | None) -> Tensor:
        """Features [B, T, D], a bounded number of frames at a time."""
        batch, count = frames.shape[:2]
        videos = max(1, _FRAMES_AT_ONCE // count)
        parts = []
        for begin in range(0, batch, videos):
            some = slice(begin, begin + videos)
            parts.append(self._features_of_few(frames[some], None if mask is None else mask[some]))
        return torch.cat(parts)

    def _features_of_few(self, frames: Tensor, mask: Tensor | None) -> Tensor:
        """Features of as many videos as go at once; a very long one in stretches that overlap.

        Through the shift a frame depends on `reach` frames to each side, so that features further inside than that
        are those of the whole video.
        """
        count, reach = frames.shape[1], self.backbone.reach
        parts = []
        for begin in range(0, count, _FRAMES_AT_ONCE):
            end = min(begin + _FRAMES_AT_ONCE, count)
            low, high = max(begin - reach, 0), min(end + reach, count)
            prepared = self._prepared(frames[:, low:high])
            features = self._features(prepared, None if mask is None else mask[:, low:high])
            parts.append(features[:, begin - low : end - low])
        return torch.cat(parts, dim=1)

    def _prepared(self, frames: Tensor) -> Tensor:
        """uint8 [B, T, 3, H, W] -> the network's input [B, T, 3, h, w] on its device; large frames a few at a time."""
        height, width = frames.shape[-2:]
        at_once = max(1, _PIXEL_BYTES_AT_ONCE // (3 * height * width * 4))
        parts = [
            self.preprocessing(part.to(self.device, non_blocking=True)) for part in frames.flatten(0, 1).split(at_once)
        ]
        return torch.cat(parts).unflatten(0, frames.shape[:2])

    def _check_mask(self, mask: Any, frames: Tensor) -> Tensor | None:
        if mask is None:
            return None
        mask = torch.as_tensor(mask)
        if mask.dtype != torch.bool or mask.shape != frames.shape[:2]:
            raise InvalidArgument(
                f"mask is {str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}; "
                f"give bool {list(frames.shape[:2])}, True for a real candidate"
            )
        return mask.to(self.device)

    def confidences(self, scores: Tensor) -> Tensor:
        """Scores [...] -> the confidence in 0..1 to expect of the classifier that sees such a frame alone."""
        if self.calibration is None:
            raise InvalidArgument(
                "this sampler is not calibrated, so its scores only rank; train it on a bank with a dev split, "
                "or set sampler.calibration = (a, b) so that sigmoid(a * score + b) is a confidence"
            )
        slope, offset = self.calibration
        return torch.sigmoid(slope * torch.as_tensor(scores).float() + offset)

    # ---- facts

    @property
    def calibration(self) -> tuple[float, float] | None:
        return self._calibration

    @calibration.setter
    def calibration(self, value: Sequence[float] | None) -> None:
        if value is not None:
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                raise InvalidArgument(f"calibration={value!r} is not allowed; give two numbers (a, b), or None")
            value = (real_number("calibration[0]", value[0]), real_number("calibration[1]", value[1]))
        self._calibration = value

    @property
    def precision(self) -> str:
        """Of `look`, `score` and `choose`: "float32", or "bfloat16" and "float16", which run under autocast."""
        return self._precision

    @precision.setter
    def precision(self, value: str) -> None:
        self._precision = one_of("precision", value, PRECISIONS)

    @property
    def about(self) -> dict[str, Any]:
        return self._about

    @about.setter
    def about(self, value: dict[str, Any] | None) -> None:
        self._about = _plain_json("about", value)

    @property
    def config(self) -> dict[str, Any]:
        """All arguments that build this sampler again, as plain JSON values."""
        return {
            "backbone": self.backbone.name,
            "shift": self.backbone.shift,
            "input_size": self.input_size,
            "num_classes": self.num_classes,
            "class_names": None if self.class_names is None else list(self.class_names),
            "dropout": self.dropout.p,
            "multi_label": self.multi_label,
            "scoring": self.scoring.settings,
            "calibration": None if self.calibration is None else list(self.calibration),
            "about": self.about,
        }

    @property
    def device(self) -> torch.device:
        return self.importance_head.weight.device

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def gmacs(self, num_candidates: int) -> float:
        """Giga multiply-adds of scoring one video's candidates, without decoding and resizing."""
        count = whole_number("num_candidates", num_candidates)
        if count not in self._gmacs:
            shape = (1, count, 3, self.input_size, self.input_size)
            self._gmacs[count] = count_gmacs(self, torch.empty(shape, device="meta"))
        return self._gmacs[count]

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the weights and whatever else decides a score."""
        settings = {key: value for key, value in self.config.items() if key not in ("about", "class_names")}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for key, tensor in sorted(self.state_dict().items()):
            digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def freeze(self) -> Self:
        """Evaluation mode and no gradients."""
        self.requires_grad_(False)
        self.eval()
        return self

    def __repr__(self) -> str:
        shift = f", shift {self.backbone.shift}" if self.backbone.shift else ""
        classes = "" if self.num_classes is None else f", {self.num_classes} classes"
        size = f"{self.input_size}x{self.input_size}"
        return f"SOSampler({self.backbone.name}{shift}, {size}{classes}, {self.num_parameters / 1e6:.2f} M parameters)"

    # ---- files

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        config: Any = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        model_card_kwargs: dict[str, Any] | None = None,
        **push_to_hub_kwargs: Any,
    ) -> str | None:
        """Write config.json, model.safetensors and README.md (the model card); optionally push them to the hub.

        `config` and `model_card_kwargs` are the hub's, and not used: both files follow from the sampler.
        """
        folder = Path(save_directory)
        write_folder(folder, self)
        if push_to_hub:
            return str(self.push_to_hub(repo_id or folder.name, **push_to_hub_kwargs))
        return None

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
        **settings: Any,
    ) -> Self:
        """The sampler of a folder that `save_pretrained` or training wrote, or of an id on the Hugging Face hub.

        `settings` replace those of config.json. Weights are safetensors; pickled ones are never loaded.
        """
        folder = local_folder(
            pretrained_model_name_or_path,
            force_download=force_download,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            revision=revision,
        )
        return read_folder(folder, cls, settings)


def _check_finite(scores: Tensor) -> None:
    bad = int((~torch.isfinite(scores)).sum())
    if bad:
        raise WeightsError(
            f"the sampler gives NaN or infinite scores for {bad} of {scores.numel()} frames; "
            "run it with precision='float32', or train it again with a lower learning rate"
        )


def _check_names(names: Sequence[str] | None, num_classes: int | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    if num_classes is None:
        raise InvalidArgument(
            f"class_names are given without num_classes; give num_classes={len(names)} for a class head, or neither"
        )
    checked = read_names(names)
    if len(checked) != num_classes:
        raise InvalidArgument(
            f"num_classes={num_classes} but {len(checked)} class names are given; give one name a class"
        )
    return checked


def _plain_json(name: str, value: dict[str, Any] | None) -> dict[str, Any]:
    """A copy of a dict that JSON can hold exactly, or say that it cannot."""
    if value is None:
        return {}
    try:
        copied = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{name} holds what JSON cannot ({error}); give texts, finite numbers, lists, dicts"
        ) from error
    if not isinstance(copied, dict):
        raise InvalidArgument(f"{name}={value!r} is not allowed; give a dict")
    return copied
