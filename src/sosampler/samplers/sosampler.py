"""SOSampler: a small network that scores every candidate frame by how well it alone shows the video's class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from sosampler._util.hardware import autocast
from sosampler._util.limits import check_count
from sosampler._util.validation import check_bool, check_float, check_fraction, check_int, copy_json, one_of
from sosampler.classifiers.base import PRECISIONS, count_gmacs, digest_of, label_shares, read_names
from sosampler.classifiers.preprocessing import Preprocessing, check_frames
from sosampler.errors import InvalidArgument, WeightsError
from sosampler.samplers.answer import check_answer
from sosampler.samplers.backbones import MOBILENET, create_backbone
from sosampler.samplers.folder import local_folder, read_folder, write_folder
from sosampler.samplers.losses import class_evidence, saliency
from sosampler.samplers.onnx_sampler import MAX_EVIDENCE_FRAMES, SALIENCY, SamplerOutput
from sosampler.samplers.registry import has_belief

_BATCH_FRAMES = 256  # per forward pass, so that memory stays bounded
# Bytes of frames at their original size, in the float32 in which a GPU resizes them, that are resized at a time.
_RESIZE_BYTES = 1 << 30
_MIN_SIDE = 32  # MobileNetV2 halves the frame five times


class SOSampler(nn.Module, PyTorchModelHubMixin):
    """A small network that scores candidate frames; the best N go to the classifier it was trained for.

    Args:
        backbone: "mobilenet_v2" or "timm:NAME".
        shift: divisor of the temporal shift; 0 for none, then the backbone sees each frame alone.
        input_size: height and width that frames are resized to.
        num_classes, class_names: of the class head; None for no class head.
        dropout: fraction of features dropped before the heads in training.
        multi_label: whether several classes of the class head can be true (sigmoid instead of softmax).
        scoring: settings of `Scoring`, which turns the heads' outputs into one score. With a belief a score also
            depends on the other candidates.
        calibration: (a, b), so that sigmoid(a * score + b) is the expected confidence of the classifier.
        about: facts for the model card (classifier, recipe, dev score, ...), any JSON values.
        budget: the largest number of frames that a budget head knows, which predicts how many a video needs; None for
            no such head.
        answer: how the classifier's answers for the chosen frames become one, with what was fitted for that
            (`samplers.answer.check_answer`); None for their mean.
        probe: {"classifier": its fingerprint, "width": D} of a probe: a linear layer of the sampler's own on the D
            features before that classifier's class layer; None for no probe.
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
        budget: int | None = None,
        answer: dict[str, Any] | None = None,
        probe: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.input_size = check_count("input_size", input_size, "MAX_INPUT_SIDE", at_least=_MIN_SIDE)
        self.num_classes = None if num_classes is None else check_count("num_classes", num_classes, "MAX_CONFIG_NUMBER")
        self.class_names = None if class_names is None else read_names(class_names)
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise InvalidArgument(
                f"num_classes={num_classes} must be the number of class_names, {len(self.class_names)}; "
                "give both for a class head, or neither"
            )
        self.multi_label = check_bool("multi_label", multi_label)
        self.calibration = calibration
        self.about = about
        self.precision = "float32"
        self.backbone = create_backbone(backbone, shift=shift, input_size=self.input_size)
        self.dropout = nn.Dropout(check_fraction("dropout", dropout))
        self.importance_head = nn.Linear(self.backbone.num_features, 1)
        self.class_head = None if self.num_classes is None else nn.Linear(self.backbone.num_features, self.num_classes)
        self.budget_head = (
            None
            if budget is None
            else nn.Linear(self.backbone.num_features, check_count("budget", budget, "MAX_CONFIG_NUMBER"))
        )
        self.probe: nn.Linear | None = None
        self.probe_of: str | None = None  # fingerprint of the classifier
        if probe is not None:
            self.probe_of, width = self._check_probe(probe)
            self.probe = nn.Linear(width, self.num_probe_outputs)
        self.scoring = Scoring(scoring, multi_label=self.multi_label, num_classes=self.num_classes)
        self.answer = answer
        self._gmacs: dict[int, float] = {}

    # ---- the network

    def forward(self, frames: Tensor, mask: Tensor | None = None) -> SamplerOutput:
        """Score normalised float frames [B, T, 3, h, w]; gradients flow.

        `mask` bool [B, T] is True for real candidates. Padding does not change the outputs of real candidates, except
        that batch norm in training mode counts it.
        """
        return self.apply_heads(self._features(frames, mask), mask)

    def _features(self, frames: Tensor, mask: Tensor | None) -> Tensor:
        batch, count = frames.shape[:2]
        return self.backbone(frames.flatten(0, 1), count, mask).view(batch, count, self.backbone.num_features)

    def apply_heads(self, features: Tensor, mask: Tensor | None = None) -> SamplerOutput:
        """Compute all outputs from features [B, T, D] in full precision: half precision would turn scores into ties."""
        kind = features.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # the meta device, where costs are counted, has none
            with torch.autocast(kind, enabled=False):
                return self.apply_heads(features, mask)
        features = features.to(self.importance_head.weight.dtype)
        dropped = self.dropout(features)
        importance = self.importance_head(dropped).squeeze(-1)
        class_logits = None if self.class_head is None else self.class_head(dropped)
        return SamplerOutput(self.scoring(importance, class_logits, mask), importance, class_logits, features)

    # ---- how many frames a video needs

    @property
    def budget(self) -> int | None:
        return None if self.budget_head is None else self.budget_head.out_features

    def set_budget(self, weight: Tensor, bias: Tensor) -> None:
        """Add a budget head with this weight [N, D] and bias [N]."""
        self.budget_head = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], device=self.device)
        self.budget_head.load_state_dict({"weight": weight, "bias": bias})

    @torch.no_grad()
    def frames_needed(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the probabilities [B, N] that a video needs 1..N frames, from features [B, T, D] of `look`."""
        if self.budget_head is None:
            raise InvalidArgument("this sampler has no budget head; train it with reinforce={budget: true}")
        return self.budget_head(mean_over_candidates(features.float(), mask)).softmax(-1)

    # ---- the probe: a linear layer on the classifier's features of the frames that it sees

    @property
    def num_probe_outputs(self) -> int:
        """The classes, and the relevance of the frame."""
        assert self.num_classes is not None, "a sampler with a probe has a class head"
        return self.num_classes + 1

    def _check_probe(self, probe: Any) -> tuple[str, int]:
        """Return the classifier's fingerprint and the number of its features."""
        if not isinstance(probe, dict) or set(probe) != {"classifier", "width"}:
            raise InvalidArgument(f"probe={probe!r} must have exactly these settings: classifier, width")
        if self.num_classes is None:
            raise InvalidArgument("a probe needs a class head; give num_classes, or leave it out")
        if not isinstance(probe["classifier"], str):
            raise InvalidArgument(f"probe['classifier']={probe['classifier']!r} must be a fingerprint")
        return probe["classifier"], check_count("probe['width']", probe["width"], "MAX_CONFIG_NUMBER")

    def set_probe(self, weight: Tensor, bias: Tensor, classifier: str) -> None:
        """Add a probe with this weight [C + 1, D] and bias [C + 1] of a classifier with this fingerprint."""
        self.probe = nn.utils.skip_init(nn.Linear, weight.shape[1], self.num_probe_outputs, device=self.device)
        self.probe.load_state_dict({"weight": weight, "bias": bias})
        self.probe_of = classifier

    # ---- inference on decoded frames

    @property
    def preprocessing(self) -> Preprocessing:
        """Resize of the short side to the input size, centre crop, ImageNet's mean and std."""
        return Preprocessing(size=(self.input_size, self.input_size), resize=self.input_size)

    @torch.no_grad()
    def look(self, frames: Tensor, mask: Tensor | None = None) -> SamplerOutput:
        """Return all outputs in float32 for uint8 frames [B, T, 3, H, W] of any size, in bounded memory.

        Puts the network into evaluation mode, so that running statistics do not change.
        """
        self.eval()
        frames = check_frames(frames)
        mask = self._check_mask(mask, frames)
        videos = max(1, _BATCH_FRAMES // frames.shape[1])
        parts = []
        with autocast(self.device, self.precision):
            for begin in range(0, len(frames), videos):
                part = slice(begin, begin + videos)
                parts.append(self._features_of_videos(frames[part], None if mask is None else mask[part]))
        output = self.apply_heads(torch.cat(parts), mask)
        check_scores(output.scores if mask is None else output.scores[mask])
        return SamplerOutput(*(None if part is None else part.float() for part in output))

    def score(self, frames: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return float32 scores [B, T] for uint8 frames [B, T, 3, H, W]; higher is better."""
        return self.look(frames, mask).scores

    def choose(self, frames: Tensor, num_frames: int, mask: Tensor | None = None) -> Tensor:
        """Return the indices int64 [B, N] of the N best of uint8 frames [B, T, 3, H, W], in time order."""
        scores = self.score(frames, mask)
        return top_n(scores, num_frames, self._check_mask(mask, frames))

    def _features_of_videos(self, frames: Tensor, mask: Tensor | None) -> Tensor:
        """Return features [B, T, D]; a long video in segments that overlap by the `reach` of the temporal shift."""
        count, reach = frames.shape[1], self.backbone.reach
        parts = []
        for begin in range(0, count, _BATCH_FRAMES):
            end = min(begin + _BATCH_FRAMES, count)
            low, high = max(begin - reach, 0), min(end + reach, count)
            inputs = self._preprocess(frames[:, low:high])
            features = self._features(inputs, None if mask is None else mask[:, low:high])
            parts.append(features[:, begin - low : end - low])
        return torch.cat(parts, dim=1)

    def _preprocess(self, frames: Tensor) -> Tensor:
        """Return uint8 [B, T, 3, H, W] as the network's input [B, T, 3, h, w]; large frames a few at a time."""
        height, width = frames.shape[-2:]
        parts = frames.flatten(0, 1).split(max(1, _RESIZE_BYTES // (3 * height * width * 4)))
        small = [self.preprocessing(part.to(self.device, non_blocking=True)) for part in parts]
        return torch.cat(small).unflatten(0, frames.shape[:2])

    def _check_mask(self, mask: Any, frames: Tensor) -> Tensor | None:
        if mask is None:
            return None
        mask = torch.as_tensor(mask)
        if mask.dtype != torch.bool or mask.shape != frames.shape[:2]:
            raise InvalidArgument(
                f"mask is {str(mask.dtype).removeprefix('torch.')} {list(mask.shape)} but must be "
                f"bool {list(frames.shape[:2])}; give True for each real candidate"
            )
        return mask.to(self.device)

    def confidences(self, scores: Tensor) -> Tensor:
        """Return the expected confidence in 0..1 of the classifier on each frame alone, from scores of any shape."""
        if self.calibration is None:
            raise InvalidArgument(
                "this sampler is not calibrated, so its scores only rank; train it on a bank with a dev split, "
                "or set sampler.calibration = (a, b) so that sigmoid(a * score + b) is a confidence"
            )
        slope, offset = self.calibration
        return torch.sigmoid(slope * torch.as_tensor(scores).float() + offset)

    # ---- properties

    @property
    def calibration(self) -> tuple[float, float] | None:
        return self._calibration

    @calibration.setter
    def calibration(self, value: Sequence[float] | None) -> None:
        if value is not None:
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                raise InvalidArgument(f"calibration={value!r} must be two numbers (a, b), or None")
            value = (check_float("calibration[0]", value[0]), check_float("calibration[1]", value[1]))
        self._calibration = value

    @property
    def answer(self) -> dict[str, Any] | None:
        return self._answer

    @answer.setter
    def answer(self, value: dict[str, Any] | None) -> None:
        if value is not None:
            value = check_answer(
                value,
                multi_label=self.multi_label,
                class_head=self.num_classes is not None,
                probe=self.probe is not None,
            )
        self._answer = value

    @property
    def precision(self) -> str:
        """Precision of `look`, `score` and `choose`: "float32", or "bfloat16" and "float16" by autocast."""
        return self._precision

    @precision.setter
    def precision(self, value: str) -> None:
        self._precision = one_of("precision", value, PRECISIONS)

    @property
    def about(self) -> dict[str, Any]:
        return self._about

    @about.setter
    def about(self, value: dict[str, Any] | None) -> None:
        self._about = copy_json("about", {} if value is None else value)

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that build this sampler, as plain JSON values."""
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
            # Left out where there is none, so that samplers without one keep their fingerprint.
            **({} if self.budget is None else {"budget": self.budget}),
            **({} if self.answer is None else {"answer": copy_json("answer", self.answer)}),
            **({} if self.probe is None else {"probe": {"classifier": self.probe_of, "width": self.probe.in_features}}),
        }

    @property
    def device(self) -> torch.device:
        return self.importance_head.weight.device

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def gmacs(self, num_candidates: int) -> float:
        """Return the giga multiply-adds of scoring one video's candidates, without decoding and resizing."""
        count = check_int("num_candidates", num_candidates)
        if count not in self._gmacs:
            shape = (1, count, 3, self.input_size, self.input_size)
            self._gmacs[count] = count_gmacs(self, torch.empty(shape, device="meta"))
        budget = 0.0 if self.budget_head is None else self.budget_head.weight.numel() / 1e9
        return self._gmacs[count] + budget

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change with the weights and settings that affect scores or answers."""
        settings = {key: value for key, value in self.config.items() if key not in ("about", "class_names")}
        return digest_of(settings, self.state_dict())

    def freeze(self) -> Self:
        """Switch to evaluation mode and turn gradients off."""
        self.requires_grad_(False).eval()
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

        `config` and `model_card_kwargs`, part of the hub's interface, are ignored: the sampler defines both files.
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
        """Load a sampler from a folder that `save_pretrained` or training wrote, or from the Hugging Face hub.

        `settings` override those of config.json. Weights are safetensors; pickled ones are never loaded.
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


def mean_over_candidates(features: Tensor, mask: Tensor | None = None) -> Tensor:
    """Average [B, T, D] over the real candidates: [B, D]."""
    if mask is None:
        return features.mean(1)
    real = mask.to(features.device)[..., None]
    # Padding may hold any value, even NaN.
    return torch.where(real, features, 0.0).sum(1) / real.sum(1)


def check_scores(scores: Tensor) -> None:
    """Raise an error if scores are NaN or infinite; waits for the device."""
    if bad := int((~torch.isfinite(scores)).sum()):
        raise WeightsError(
            f"the sampler gives NaN or infinite scores for {bad} of {scores.numel()} frames; "
            "run it with precision='float32', or train it again with a lower learning rate"
        )


# ---- scoring: the outputs of the heads -> the score by which frames are ranked


class Scoring(nn.Module):
    """importance [B, T], class_logits [B, T, C] or None, mask [B, T] or None -> scores [B, T]. Has no parameters.

    `settings`: {} for the importance alone; {"belief": strength of the evidence, "relevance": [slope, offset],
    "importance": its weight in the score}; or {"saliency": "max"}, the log-odds of the highest class probability
    (SCSampler).
    """

    def __init__(
        self, settings: dict[str, Any] | None = None, *, multi_label: bool = False, num_classes: int | None = None
    ) -> None:
        super().__init__()
        self.settings = copy_json("scoring", {} if settings is None else settings)
        self.multi_label = multi_label
        if not self.settings:
            return
        if self.settings != SALIENCY and not has_belief(self.settings):
            raise InvalidArgument(
                f"scoring={self.settings} must be {{}} for the importance alone, {SALIENCY}, or all of: belief, "
                "relevance, importance"
            )
        if num_classes is None or num_classes < 2:
            raise InvalidArgument(
                f"scoring={self.settings} needs a class head with two classes or more, not num_classes={num_classes}; "
                "give num_classes, or scoring={}"
            )
        if self.settings == SALIENCY:
            return
        slope_and_offset = self.settings["relevance"]
        if not isinstance(slope_and_offset, (list, tuple)) or len(slope_and_offset) != 2:
            raise InvalidArgument(f"relevance={slope_and_offset!r} must be [slope, offset]")
        self.belief = check_float("belief", self.settings["belief"], above=0.0)
        self.slope = check_float("relevance[0]", slope_and_offset[0])
        self.offset = check_float("relevance[1]", slope_and_offset[1])
        self.importance = check_float("importance", self.settings["importance"], at_least=0.0)

    def forward(self, importance: Tensor, class_logits: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if not self.settings:
            return importance
        assert class_logits is not None, "a sampler that scores by classes has a class head"
        if self.settings == SALIENCY:
            return saliency(class_logits, multi_label=self.multi_label, log_odds=True)
        log_probs = F.logsigmoid(class_logits) if self.multi_label else class_logits.log_softmax(-1)
        log_belief = self.log_belief(importance, class_logits, mask)[:, None]  # [B, 1, C]
        log_of_mean = torch.logsumexp(log_belief + log_probs, dim=-1)
        mean_of_log = (log_belief.exp() * log_probs).sum(-1)
        return self.importance * importance + 0.5 * log_of_mean + 0.5 * mean_of_log

    def log_belief(self, importance: Tensor, class_logits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the belief about the video's class from all of its frames: log probabilities [B, C]."""
        relevance = torch.sigmoid(self.slope * importance + self.offset)
        evidence = class_evidence(relevance, class_logits, multi_label=self.multi_label)
        real = torch.ones_like(importance) if mask is None else mask.to(importance.dtype)
        # Padding may hold any value, even NaN.
        evidence = torch.where(real[..., None] > 0, evidence, torch.zeros_like(evidence))
        count = real.sum(1, keepdim=True).clamp_min(1.0)  # [B, 1]
        strength = self.belief * count.clamp_max(MAX_EVIDENCE_FRAMES) / count
        return (strength * evidence.sum(1)).log_softmax(-1)


# ---- ranking, batched

ACTIVATIONS = ("softmax", "sigmoid")
# Probabilities are clamped here before the logarithm; logits need no clamp.
SMALLEST_PROBABILITY = 1e-12


def real_candidates(mask: Tensor | None, batch: int, num_candidates: int, num_frames: int) -> Tensor | None:
    """Check that every video has `num_frames` real candidates, and return the mask as bool [B, T] or None."""
    num_frames = check_int("num_frames", num_frames)
    fewest = num_candidates
    if mask is not None:
        if tuple(mask.shape) != (batch, num_candidates):
            raise InvalidArgument(
                f"the mask has shape {list(mask.shape)}, but there are {batch} videos with {num_candidates} "
                f"candidates each; give a mask of shape [{batch}, {num_candidates}]"
            )
        mask = mask.bool()
        fewest = int(mask.sum(1).min()) if batch else num_candidates
    if num_frames > fewest:
        raise InvalidArgument(
            f"num_frames={num_frames} is more than the {fewest} real candidates of a video; "
            "choose fewer frames or give more candidates"
        )
    return mask


def check_labels(labels: Tensor, batch: int, num_classes: int) -> Tensor:
    """Return the labels as bool [B, C], each row with at least one positive."""
    if tuple(labels.shape) != (batch, num_classes):
        raise InvalidArgument(
            f"the labels have shape {list(labels.shape)}; give a multi-hot table of shape [{batch}, {num_classes}]"
        )
    positive = labels.bool()
    if not bool(positive.any(1).all()):
        raise InvalidArgument("a video has no label; give at least one positive class in every row of the labels")
    return positive


def top_n(scores: Tensor, num_frames: int, mask: Tensor | None = None) -> Tensor:
    """Return the positions [B, N] of the N highest scores [B, T]; of equal ones the earlier, NaN counts as lowest.

    >>> top_n(torch.tensor([[0.1, 0.9, 0.9, 0.2, 0.9]]), 2).tolist()
    [[1, 2]]
    """
    batch, num_candidates = scores.shape
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    scores = scores if scores.is_floating_point() else scores.double()  # integers have no lowest value
    order = scores.masked_fill(scores.isnan(), -torch.inf).argsort(dim=1, descending=True, stable=True)
    if mask is not None:  # real candidates first, whatever their scores are
        order = order.gather(1, (~mask).gather(1, order).to(torch.uint8).argsort(dim=1, stable=True))
    return order[:, :num_frames].sort(dim=1).values


def log_label_confidence(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of log p over the true labels: log_probs [B, ..., C], labels [B, C] -> [B, ...]."""
    weights = label_shares(labels, log_probs.dtype)
    weights = weights.reshape(len(labels), *(1,) * (log_probs.dim() - 2), labels.shape[1])
    # A class that is no label may have log p = -inf; 0 times it is NaN, so it is masked instead.
    return (log_probs.masked_fill(weights == 0, 0.0) * weights).sum(-1)


def log_confidence(logits: Tensor, labels: Tensor, activation: str = "softmax") -> Tensor:
    """Return the log confidence in the labels of a classifier's logits [B, ..., C], without a clamp: [B, ...]."""
    softmax = one_of("activation", activation, ACTIVATIONS) == "softmax"
    log_probs = logits.log_softmax(-1) if softmax else F.logsigmoid(logits)
    return log_label_confidence(log_probs, labels)


def label_confidence(frame_probs: Tensor, labels: Tensor) -> Tensor:
    """Return each frame's confidence in the labels, the geometric mean of their probabilities: [B, T, C] -> [B, T]."""
    labels = check_labels(labels, frame_probs.shape[0], frame_probs.shape[-1])
    return log_label_confidence(frame_probs.clamp_min(SMALLEST_PROBABILITY).log(), labels).exp()
