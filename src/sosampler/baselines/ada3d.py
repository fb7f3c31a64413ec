"""Ada3D: of a clip, use only the frames and the convolutions over time that it needs.

After Li, Wu, Shrivastava and Davis, "2D or not 2D? Adaptive 3D Convolution Selection for Efficient Video Recognition",
CVPR 2021 ("Ada2D" in some tables). As in the paper: a light selection network sees all frames of the clip. It has two
heads: one keeps or drops each frame, one each convolution over time of the 3-D network. Both learn by policy gradient,
each from its own reward for right answers with little computation, with the 3-D network frozen (phase "policy"), and
then together with it (phase "joint", off by default).

No published code is known to us. What we could not find out has the form of BlockDrop (Wu et al., CVPR 2018), by the
same group. Decisions are Bernoulli draws; the reward is 1 − (share used)² for a right answer and −penalty
for a wrong one; the baseline is the reward of the decisions above 0.5 (self-critical); probabilities are bounded to
1 − alpha..alpha in training. Chosen here: the selection network is two layers on stored features of a light network,
joined over the frames of the clip, so that it runs with the T of its training alone; the 3-D network is SlowOnly-50,
whose nine convolutions over time (3x1x1, in its two last stages) fall back to their middle tap; at least one frame is
kept, the most probable one; one clip a video, of its T candidates.

Its cost: for each kept frame the network without temporal taps and what each convolution that is on adds, the class
layer, and the selection. Its answers are those of the classifier, which needs the classes of the bank in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as pixels

from sosampler._util.hardware import autocast
from sosampler._util.validation import check_bool, check_float, check_int
from sosampler.baselines.base import FRAMES, Baseline, BaselineOutput, Loss, Rng, Views, draw_uniform, matrix_gmacs
from sosampler.classifiers.base import BATCH_FRAMES, count_gmacs
from sosampler.classifiers.nets.resnet3d import SlowOnly
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.classifiers.spacetime import PYTORCHVIDEO
from sosampler.errors import InvalidArgument

_SMALLEST = 1e-12  # probabilities are clamped here before a logarithm


class Ada3D(Baseline):
    """SlowOnly with policies for frames and for convolutions over time."""

    name = "ada3d"
    feature_sets = (FRAMES, "light")
    same_classes = True
    predict_batch = 64
    phases = ("policy", "joint")
    threshold = "keep"
    threshold_values = (0.9, 0.7, 0.5, 0.3, 0.1, 0.0)  # 0 keeps everything: the 3-D network on all frames

    def __init__(
        self,
        light_width: int,  # d, light features of a frame
        num_classes: int,
        num_candidates: int,  # T, frames of a clip
        *,
        width: int = 128,  # of a frame in the selection network
        hidden: int = 256,  # of the clip in the selection network
        alpha: float = 0.8,  # bound of probabilities in training
        frames_penalty: float = 1.0,  # reward of frames for a wrong answer, times −1; larger keeps more
        convs_penalty: float = 1.0,  # the same for convolutions
        size: int | None = None,  # pixels a side that the 3-D network sees; None: that of the classifier it starts from
        resize: int | None = None,  # short side of the frames from which they are cropped; None: likewise
        mean: Sequence[float] | None = None,  # of RGB in 0..1; None: likewise
        std: Sequence[float] | None = None,
        stride_on_1x1: bool | None = None,
        network_lr: float = 0.01,  # learning rate of the 3-D network in phase "joint", as a share of the other
        keep: float = 0.5,  # frames and convolutions with a probability above this are used
        multi_label: bool = False,  # probabilities by sigmoid instead of softmax
    ) -> None:
        if not 0.5 < check_float("alpha", alpha) <= 1:
            raise InvalidArgument(f"alpha={alpha!r} must be above 0.5 and at most 1")
        if check_float("keep", keep, at_least=0) > 1:
            raise InvalidArgument(f"keep={keep!r} must be a probability from 0 to 1")
        config: dict[str, Any] = {
            "light_width": check_int("light_width", light_width),
            "num_classes": check_int("num_classes", num_classes, at_least=2),
            "num_candidates": check_int("num_candidates", num_candidates),
            "width": check_int("width", width),
            "hidden": check_int("hidden", hidden),
            "alpha": float(alpha),
            "frames_penalty": check_float("frames_penalty", frames_penalty, at_least=0),
            "convs_penalty": check_float("convs_penalty", convs_penalty, at_least=0),
            "size": None if size is None else check_int("size", size),
            "resize": None if resize is None else check_int("resize", resize, at_least=size or 1),
            "mean": None if mean is None else list(mean),
            "std": None if std is None else list(std),
            "stride_on_1x1": None if stride_on_1x1 is None else check_bool("stride_on_1x1", stride_on_1x1),
            "network_lr": check_float("network_lr", network_lr, at_least=0),
            "keep": float(keep),
            "multi_label": check_bool("multi_label", multi_label),
        }
        super().__init__(config)
        self._see(Preprocessing(size=(224, 224), resize=256, **PYTORCHVIDEO))
        self.network = SwitchedSlowOnly(SlowOnly(num_classes, bool(stride_on_1x1)))
        self.reduce = nn.Linear(light_width, width)
        self.join = nn.Linear(num_candidates * width, hidden)
        self.frames_head, self.convs_head = (nn.Linear(hidden, n) for n in (num_candidates, len(self.network.convs)))
        for head in (self.frames_head, self.convs_head):  # it starts from the whole network, almost
            nn.init.normal_(head.weight, std=0.01)
            nn.init.ones_(head.bias)
        self._gmacs: tuple[float, list[float], float] | None = None

    def _see(self, default: Preprocessing) -> None:
        """Set how frames are seen: by the config, and by `default` where that has nothing."""
        resize: Any = self.config["resize"] or max(default.resize, self.config["size"] or 1)
        size: int = self.config["size"] or min(default.size[0], resize)
        mean, std = (self.config[name] or getattr(default, name) for name in ("mean", "std"))
        self.preprocessing = Preprocessing(size=(size, size), resize=resize, mean=mean, std=std)
        self.frame_size = resize

    def check_classifier(self, classifier: Any) -> None:
        if not isinstance(getattr(classifier, "net", None), SlowOnly):
            given = "none" if classifier is None else getattr(classifier, "name", type(classifier).__name__)
            raise InvalidArgument(
                f"ada3d switches the convolutions over time of slowonly_r50, but the classifier is {given}; give "
                "classifier (--classifier): the folder of a slowonly_r50"
            )
        seen = self._settings_of(classifier)
        if seen["resize"] is None:
            raise InvalidArgument(
                f"the classifier {classifier.name} sees frames as {classifier.preprocessing}; ada3d takes one that "
                "crops squares from bilinear frames with a given short side"
            )
        for name, value in seen.items():
            if self.config[name] not in (None, value):
                raise InvalidArgument(
                    f"{name}={self.config[name]} of ada3d is not that of the classifier {classifier.name}, {value}; "
                    f"leave {name} out"
                )

    @staticmethod
    def _settings_of(classifier: Any) -> dict[str, Any]:
        """Return the settings that follow from a classifier.

        `resize` is None where it does not see squares of frames that are resized bilinearly.
        """
        pixels = classifier.preprocessing
        is_square = pixels.size[0] == pixels.size[1] and isinstance(pixels.resize, int)
        is_square = is_square and pixels.interpolation == "bilinear"
        return {
            "size": pixels.size[0],
            "resize": pixels.resize if is_square else None,
            "mean": list(pixels.mean),
            "std": list(pixels.std),
            "stride_on_1x1": bool(classifier.options.get("stride_on_1x1", False)),
        }

    def take_networks(self, networks: Mapping[str, Any], weights: str | Path | None) -> None:
        """Copy the classifier into the 3-D network, which sees frames as it does."""
        classifier: Any = networks.get("heavy")
        self.check_classifier(classifier)
        if classifier.num_classes != self.config["num_classes"]:
            raise InvalidArgument(
                f"the classifier {classifier.name} has {classifier.num_classes} classes, but the bank has "
                f"{self.config['num_classes']}, and ada3d answers as the classifier; give one of the bank's classes"
            )
        self.config |= self._settings_of(classifier)
        self._see(classifier.preprocessing)
        self.network = SwitchedSlowOnly(SlowOnly(self.config["num_classes"], self.config["stride_on_1x1"]))
        self.network.net.load_state_dict(classifier.net.state_dict())

    # ---- decisions

    def select(self, views: Views) -> tuple[Tensor, Tensor]:
        """Return the probabilities that a frame [B, T] and a convolution [B, K] are used."""
        seen = self.reduce(views.filled().light).relu()
        clip = self.join(seen.masked_fill(~views.real[:, :, None], 0).flatten(1)).relu()
        return self.frames_head(clip).sigmoid(), self.convs_head(clip).sigmoid()

    def clip_logits(self, views: Views, videos: Tensor, kept: Tensor, on: Tensor) -> Tensor:
        """Return logits [R, C] of R clips; see `SwitchedSlowOnly.forward`."""
        frames = self.preprocessing.normalised(pixels.center_crop(views[FRAMES], list(self.preprocessing.size)))
        with autocast(self.device, "bfloat16" if self.device.type == "cuda" else "float32"):
            return self.network(frames, videos, kept, on).float()

    # ---- training

    def loss(
        self, views: Views, labels: Tensor, *, generator: Rng = None, progress: float = 1.0, phase: str | None = None
    ) -> Loss:
        """Return the policy gradient of both heads, mean over videos; in phase "joint" also the label loss."""
        real, videos = views.real, torch.arange(len(labels), device=labels.device)
        of_frames, of_convs = self.select(views)
        drawn_frames, frames_likelihood = self._draw(of_frames, real, generator)
        drawn_convs, convs_likelihood = self._draw(of_convs, torch.ones_like(of_convs, dtype=torch.bool), generator)
        kept = keep_one(drawn_frames, of_frames, real), keep_one(of_frames > 0.5, of_frames, real)
        on = drawn_convs, of_convs > 0.5
        if phase == "joint":
            drawn = self.clip_logits(views, videos, kept[0], on[0])
            with torch.no_grad():
                logits = torch.stack([drawn.detach(), self.clip_logits(views, videos, kept[1], on[1])])
        else:
            with torch.no_grad():
                both = self.clip_logits(views, videos.repeat(2), torch.cat(kept), torch.cat(on))
                logits = both.unflatten(0, (2, -1))
        right = labels.gather(1, logits.argmax(dim=2).T).T > 0  # bool [2, B]: of what was drawn, of what is likelier
        frames, convs = real.sum(dim=1), torch.full_like(videos, on[0].shape[1])
        frames_rewards = [
            usage_rewards(used.sum(dim=1), frames, good, self.config["frames_penalty"])
            for used, good in zip(kept, right, strict=True)
        ]
        convs_rewards = [
            usage_rewards(used.sum(dim=1), convs, good, self.config["convs_penalty"])
            for used, good in zip(on, right, strict=True)
        ]
        policy = -(frames_likelihood * (frames_rewards[0] - frames_rewards[1])).mean()
        policy = policy - (convs_likelihood * (convs_rewards[0] - convs_rewards[1])).mean()
        parts = {
            "policy": policy,
            "reward_frames": frames_rewards[1].mean(),
            "reward_convs": convs_rewards[1].mean(),
            "frames": kept[1].sum(dim=1).float().mean(),
            "convs": on[1].sum(dim=1).float().mean(),
            "right": right[1].float().mean(),
        }
        total = policy
        if phase == "joint":
            parts["label"] = label = self.label_loss(drawn, labels).mean()
            total = total + label
        return total, {key: part.detach() for key, part in parts.items()}

    def _draw(self, probabilities: Tensor, real: Tensor, generator: Rng) -> tuple[Tensor, Tensor]:
        """Draw what is used, bool [B, N], from bounded probabilities; also the log-likelihood of the draw [B].

        The likelihood is that of the draw itself, also where a frame is kept beside it.
        """
        alpha = self.config["alpha"]
        bounded = alpha * probabilities + (1 - alpha) * (1 - probabilities)
        drawn = draw_uniform(tuple(bounded.shape), generator, self.device) < bounded.detach()
        likelihood = torch.where(drawn, bounded, 1 - bounded).clamp_min(_SMALLEST).log()
        return drawn & real, likelihood.masked_fill(~real, 0).sum(dim=1)

    def phase_parameters(self, phase: str) -> Iterator[nn.Parameter]:
        modules = [self.reduce, self.join, self.frames_head, self.convs_head]
        for module in [*modules, self.network] if phase == "joint" else modules:
            yield from module.parameters()

    def lr_factors(self, phase: str) -> Mapping[nn.Parameter, float]:
        return dict.fromkeys(self.network.parameters(), self.config["network_lr"])

    def train_phase(self, phase: str) -> None:
        """Leave the 3-D network in eval mode: its batch norms keep their statistics."""
        self.eval()

    # ---- running

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        of_frames, of_convs = self.select(views)
        kept = keep_one(of_frames > self.config["keep"], of_frames, views.real)
        on = of_convs > self.config["keep"]
        return self._classified(views, kept, on, light=True)

    def classify_frames(self, views: Views, chosen: Tensor) -> BaselineOutput:
        """Run the whole 3-D network on the chosen frames."""
        on = chosen.new_ones(len(chosen), len(self.network.convs))
        return self._classified(views, chosen, on, light=False)

    def _classified(self, views: Views, kept: Tensor, on: Tensor, *, light: bool) -> BaselineOutput:
        logits = self.clip_logits(views, torch.arange(len(kept), device=kept.device), kept, on)
        seen = {FRAMES: kept, "light": views.real if light else torch.zeros_like(kept)}
        return BaselineOutput(self.activate(logits), seen, own=self._network_gmacs(kept, on) + light * self._own())

    def _network_gmacs(self, kept: Tensor, on: Tensor) -> Tensor:
        if self._gmacs is None:
            self._gmacs = self.network.gmacs(self.preprocessing.size)
        frame, convs, head = self._gmacs
        return (
            kept.sum(dim=1) * (frame + on.double() @ torch.tensor(convs, dtype=torch.float64, device=on.device)) + head
        )

    def _own(self) -> float:
        """Return giga multiply-adds of the selection, without the light network."""
        heads = matrix_gmacs(self.join, self.frames_head, self.convs_head)
        return float(self.config["num_candidates"] * matrix_gmacs(self.reduce) + heads)

    def frames_gmacs(self, seen: BaselineOutput) -> Tensor:
        return self.own_gmacs(seen)


# ---- a 3-D network with switches


class SwitchedConv(nn.Conv3d):
    """A convolution over time that each clip may switch off; it then applies its middle tap to each frame alone."""

    on: Tensor | None = None  # bool [B] on the CPU; None: on for all

    @classmethod
    def of(cls, conv: nn.Conv3d) -> SwitchedConv:
        """Return one with the same weights in the same memory."""
        with torch.device("meta"):
            switched = cls(conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, bias=False)
        switched.weight = conv.weight
        return switched

    def forward(self, clips: Tensor) -> Tensor:
        if self.on is None or bool(self.on.all()):
            return super().forward(clips)
        if not bool(self.on.any()):
            return self._each_frame(clips)
        on, off = self.on.nonzero()[:, 0], (~self.on).nonzero()[:, 0]
        order = torch.cat([on, off]).argsort().to(clips.device)
        parts = super().forward(clips[on.to(clips.device)]), self._each_frame(clips[off.to(clips.device)])
        return torch.cat(parts)[order]

    def _each_frame(self, clips: Tensor) -> Tensor:
        middle = self.kernel_size[0] // 2
        taps = self.weight[:, :, middle : middle + 1]
        return F.conv3d(clips, taps, stride=self.stride, padding=(0, *self.padding[1:]))


class SwitchedSlowOnly(nn.Module):
    """SlowOnly whose clips may differ in length and in which of its convolutions over time are on."""

    def __init__(self, net: SlowOnly) -> None:
        super().__init__()
        self.net = net
        self.convs: list[SwitchedConv] = []  # K, from the first to the last
        for block in [module for module in net.modules() if hasattr(module, "conv_a")]:
            if block.conv_a.kernel_size[0] > 1:
                block.conv_a = SwitchedConv.of(block.conv_a)
                self.convs.append(block.conv_a)
        switched = [any(isinstance(one, SwitchedConv) for one in stage.modules()) for stage in net.blocks]
        self._first = switched.index(True)  # stage; before it the network sees each frame alone

    @contextmanager
    def switched(self, on: Tensor) -> Iterator[None]:
        """Inside this context clips have these convolutions on, bool [B, K]."""
        try:
            for conv, of_clips in zip(self.convs, on.cpu().unbind(dim=1), strict=True):
                conv.on = of_clips
            yield
        finally:
            for conv in self.convs:
                conv.on = None

    def forward(self, frames: Tensor, videos: Tensor, kept: Tensor, on: Tensor) -> Tensor:
        """Return logits [R, C] of R clips from normalised frames [B, T, 3, h, w].

        Clip r has the frames `kept`[r], bool [R, T] with at least one, of the video `videos`[r], int64 [R], and the
        convolutions `on`[r], bool [R, K]. A frame that several clips keep goes once through the layers before the first
        convolution over time.
        """
        used = kept.new_zeros(frames.shape[:2], dtype=torch.int64).index_add(0, videos, kept.long()) > 0
        numbers = (used.flatten().cumsum(0) - 1).view_as(used)  # of used frames among these
        parts = [_channels_last(part[:, :, None]) for part in frames[used].split(BATCH_FRAMES)]
        maps = torch.cat([self.net.blocks[: self._first](part) for part in parts])  # [F, C, 1, h', w']
        counts, outputs, order = kept.sum(dim=1), [], []
        for count in counts.unique().tolist():
            rows = (counts == count).nonzero()[:, 0]
            chosen = numbers[videos[rows]][kept[rows]].view(len(rows), count)
            clips = _channels_last(maps[chosen, :, 0].transpose(1, 2))  # [R', C, N, h', w']
            with self.switched(on[rows]):
                outputs.append(self.net.blocks[self._first :](clips))
            order.append(rows)
        return torch.cat(outputs)[torch.cat(order).argsort()]

    def gmacs(self, size: tuple[int, int]) -> tuple[float, list[float], float]:
        """Return giga multiply-adds of a frame without any temporal tap, what each convolution adds, and of the head.

        The last counts once a clip, the others for each of its frames.
        """
        outputs: list[Tensor] = []
        hooks = [conv.register_forward_hook(lambda _, __, output: outputs.append(output)) for conv in self.convs]
        try:
            with self.switched(torch.zeros(1, len(self.convs), dtype=torch.bool)):
                clip = count_gmacs(self.net, torch.empty(1, 3, 1, *size, device="meta"))
        finally:
            for hook in hooks:
                hook.remove()
        head = self.net.blocks[-1].proj.weight.numel() / 1e9
        # All taps but the middle one, at each position of the output [1, C, 1, h, w].
        taps = [(1 - 1 / conv.kernel_size[0]) * conv.weight.numel() for conv in self.convs]
        convs = [weights * output[0, 0].numel() / 1e9 for weights, output in zip(taps, outputs, strict=True)]
        return clip - head, convs, head


def _channels_last(clips: Tensor) -> Tensor:
    """Store clips [B, C, T, h, w] as convolutions in half precision are fast."""
    return clips.contiguous(memory_format=torch.channels_last_3d)


# ---- rewards


def usage_rewards(used: Tensor, available: Tensor, right: Tensor, penalty: float) -> Tensor:
    """Return 1 − (used / available)² where the answer is right, else −penalty; all [B].

    >>> usage_rewards(torch.tensor([5, 5]), torch.tensor([10, 10]), torch.tensor([True, False]), 2.0).tolist()
    [0.75, -2.0]
    """
    return torch.where(right, 1 - (used / available) ** 2, -penalty)


def keep_one(kept: Tensor, probabilities: Tensor, real: Tensor) -> Tensor:
    """Return bool [B, T] with the most probable real frame where none is kept, and no padding."""
    best = probabilities.masked_fill(~real, -1).argmax(dim=1, keepdim=True)
    kept = kept & real
    return torch.where(kept.any(dim=1, keepdim=True), kept, torch.zeros_like(kept).scatter(1, best, True))
