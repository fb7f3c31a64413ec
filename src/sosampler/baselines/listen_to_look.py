"""Listen to Look: a recurrent network attends to a preview of all frames and picks those worth the large network.

After Gao, Oh, Grauman and Torresani, "Listen to Look: Action Recognition by Previewing Audio", CVPR 2020, and its
released skimming network. As there: keys of every candidate by a linear layer with batch norm and ReLU, an LSTM of 1024
with weight normalisation whose first input is the mean feature, queries by two layers from its state, attention
q.k / sqrt(512) over the candidates that were not used before; soft attention in training, so that it needs no
reinforcement, and its argmax at run time; the features of the picked frames are averaged and classified by one layer.
With sound, image and sound have keys and queries of their own, and two weights from the state mix both attentions.
Different: the preview is a frozen light network on each candidate instead of features that were distilled from a clip
network; heavy features of the picked frames are classified. The candidates are the T of the bank, not all clips of a
long video. With `audio`, a small residual network on the bank's spectra is first trained on the labels and then frozen;
a light and a sound feature are fused by two layers, which are trained here; heavy and sound features of the picked
frames are classified together; at run time the argmax is that of the mixed attention, where the released code takes
that of the image, so that sound can choose; and a frame that was picked is closed for both.
The audio network is half as deep and half as wide as the ResNet-18 of the paper: a 7 x 7 convolution of stride 1, max
pooling, four stages of one block with 32, 64, 128 and 256 channels, and a layer of 512 whose maximum over time and
frequency is the feature.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from sosampler._util.validation import check_bool, check_int
from sosampler.baselines.base import AUDIO, SPECTRUM, Baseline, BaselineOutput, Loss, Rng, Views, matrix_gmacs
from sosampler.classifiers.base import count_gmacs
from sosampler.errors import InvalidArgument

SOUND_WIDTH = 512  # features of the audio network

State = tuple[Tensor, Tensor]  # hidden and cell, [B, H] each


class ListenToLook(Baseline):
    """Skims light features, and sound where the bank has it, for the frames to classify."""

    name = "listen-to-look"
    feature_sets: tuple[str, ...] = ("heavy", "light")
    phases = ("audio", "skim")  # the first only with sound
    threshold = "steps"
    threshold_values = (1, 2, 3, 4, 5, 6, 8)

    def __init__(
        self,
        heavy_width: int,  # D, heavy features of a frame
        light_width: int,  # d, light features of a frame
        num_classes: int,
        *,
        steps: int = 4,  # frames that are picked, as far as a video has so many
        hidden: int = 1024,  # state of the LSTM
        width: int = 512,  # keys and queries
        audio: bool = False,  # also listen; the bank must have sound
        audio_channels: int = 32,  # of the first layer of the audio network
        multi_label: bool = False,  # probabilities by sigmoid instead of softmax
    ) -> None:
        config = {
            "heavy_width": check_int("heavy_width", heavy_width),
            "light_width": check_int("light_width", light_width),
            "num_classes": check_int("num_classes", num_classes),
            "steps": check_int("steps", steps),
            "hidden": check_int("hidden", hidden),
            "width": check_int("width", width),
            "audio": check_bool("audio", audio),
            "audio_channels": check_int("audio_channels", audio_channels),
            "multi_label": check_bool("multi_label", multi_label),
        }
        super().__init__(config)
        preview = [light_width]  # features of a candidate that are skimmed: image, sound
        self.fuse: nn.Module = nn.Identity()
        heard = 0  # sound features that are classified
        fused = light_width
        if audio:
            self.feature_sets = ("heavy", "light", AUDIO)
            self.audio_net = AudioNet(audio_channels)
            self.audio_head = nn.Linear(SOUND_WIDTH, num_classes)  # of the phase "audio" alone
            preview, heard, fused = [light_width, SOUND_WIDTH], SOUND_WIDTH, width
            self.fuse = nn.Sequential(
                nn.Linear(light_width + SOUND_WIDTH, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
            )
            self.mix = nn.Linear(hidden, 2)
        self.keys = nn.ModuleList(_layer(features, width) for features in preview)
        self.queries = nn.ModuleList(nn.Sequential(_layer(hidden, hidden), nn.Linear(hidden, width)) for _ in preview)
        self.lstm = nn.LSTMCell(fused, hidden)
        for part in ("bias_ih", "bias_hh"):
            nn.init.zeros_(getattr(self.lstm, part))
        for part in ("weight_ih", "weight_hh"):
            weight_norm(self.lstm, part)
        self.classify = nn.Linear(heavy_width + heard, num_classes)

    # ---- training

    def phase_parameters(self, phase: str) -> Iterator[nn.Parameter]:
        for name, module in self.named_children():
            if (phase == "audio") == name.startswith("audio_"):
                yield from module.parameters()

    def train_phase(self, phase: str) -> None:
        self.train()
        if phase == "skim" and self.config["audio"]:
            self.audio_net.eval()  # frozen, with the statistics of its own training

    def check_training(self, frames: Tensor, *, smallest_batch: int, phases: Collection[str]) -> None:
        if smallest_batch < 2:
            raise InvalidArgument(
                f"{self.name} normalises over the videos of a batch, and one would have a single video; give "
                "batch_size of at least 2 and at least 2 videos to train on"
            )

    def loss(
        self, views: Views, labels: Tensor, *, generator: Rng = None, progress: float = 1.0, phase: str | None = None
    ) -> Loss:
        """Return the label loss of the mean feature of all steps; in the phase "audio" that of every sound alone."""
        if phase == "audio":
            return self._sound_loss(views, labels), {}
        features, _ = self._skim(views, soft=True)
        return self.label_loss(self.classify(features), labels).mean(), {}

    def _sound_loss(self, views: Views, labels: Tensor) -> Tensor:
        """Return the mean over candidates that are not silent."""
        real, spectra = views.real, views.filled()[AUDIO]
        video = real.nonzero()[:, 0]
        loss = self.label_loss(self.audio_head(self.audio_net(spectra[real])), labels[video])
        heard = spectra[real].flatten(1).any(dim=1).to(loss.dtype)
        return (loss * heard).sum() / heard.sum().clamp_min(1)

    # ---- skimming

    def _skim(self, views: Views, *, soft: bool) -> tuple[Tensor, Tensor]:
        """Return the mean of the features [B, D] over the steps, and which candidates were picked, bool [B, T].

        Soft: each step takes the mean of all open candidates by attention. Hard: the one with the most attention.
        """
        real, views = views.real, views.filled()
        previews = [views.light, self._hear(views)] if self.config["audio"] else [views.light]  # [B, T, d] each
        keys = [_by_real(real, key, values) for key, values in zip(self.keys, previews, strict=True)]
        classified = [views.heavy, *previews[1:]]
        count = real.sum(dim=1, keepdim=True)
        inputs = [values.sum(dim=1) / count for values in previews]  # padding is 0
        state = (views.light.new_zeros(len(real), self.config["hidden"]),) * 2
        closed, total = ~real, views.heavy.new_zeros(len(real), self.classify.in_features)
        for _ in range(min(self.config["steps"], real.shape[1])):
            left = ~closed.all(dim=1)  # videos with a candidate that is not used yet
            state = self.lstm(self.fuse(torch.cat(inputs, dim=1)), state)
            attention = self._attention(state[0], keys, closed)
            index = attention.argmax(dim=1, keepdim=True)  # [B, 1]

            def taken(values: Tensor, by: Tensor = attention, at: Tensor = index) -> Tensor:
                if soft:
                    return torch.einsum("bt,btd->bd", by, values)
                return values.gather(1, at[:, :, None].expand(-1, -1, values.shape[2]))[:, 0]

            inputs = [taken(values) for values in previews]
            step = torch.cat([taken(values) for values in classified], dim=1)
            total = total + torch.where(left[:, None], step, 0)
            closed = closed.scatter(1, index, True)
        return total / count.clamp_max(self.config["steps"]), closed & real

    def _attention(self, hidden: Tensor, keys: Sequence[Tensor], closed: Tensor) -> Tensor:
        """Return the attention [B, T] from the state [B, H], 0 where closed: that of each kind of keys, mixed."""
        of_kind = []
        for query, key in zip(self.queries, keys, strict=True):
            scores = torch.einsum("bw,btw->bt", query(hidden), key) / math.sqrt(key.shape[2])
            # A video without any open candidate has equal numbers, which are not used.
            of_kind.append(scores.masked_fill(closed, torch.finfo(scores.dtype).min).softmax(dim=1))
        if len(of_kind) == 1:
            return of_kind[0]
        weights = self.mix(hidden).softmax(dim=1)  # [B, 2]
        return weights[:, :1] * of_kind[0] + weights[:, 1:] * of_kind[1]

    def _hear(self, views: Views) -> Tensor:
        """Return the sound features [B, T, 512] of the frozen audio network."""
        with torch.no_grad():
            return _by_real(views.real, self.audio_net, views[AUDIO])

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        real = views.real
        features, picked = self._skim(views, soft=False)
        seen = {"heavy": picked, "light": real} | ({AUDIO: real} if self.config["audio"] else {})
        steps = real.sum(dim=1).clamp_max(self.config["steps"])
        return BaselineOutput(self.activate(self.classify(features)), seen, steps)

    def classify_frames(self, views: Views, chosen: Tensor) -> BaselineOutput:
        count = chosen.sum(dim=1, keepdim=True)
        parts = [torch.where(chosen[:, :, None], views.heavy, 0).sum(dim=1)]
        seen = {"heavy": chosen}
        if self.config["audio"]:
            parts.append(_by_real(chosen, self.audio_net, views[AUDIO]).sum(dim=1))
            seen[AUDIO] = chosen
        return BaselineOutput(self.activate(self.classify(torch.cat(parts, dim=1) / count)), seen)

    # ---- cost

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        """Count keys and audio network for each candidate; LSTM, queries and attention for each step; classifying."""
        assert seen.steps is not None, "`decide` counts them"
        hidden, width, kinds = self.config["hidden"], self.config["width"], len(self.keys)
        lstm = 4 * hidden * (self.lstm.input_size + hidden) / 1e9  # the weights are normalised, so not all are used
        each_step = lstm + matrix_gmacs(self.queries, self.fuse) + (2 * hidden / 1e9 if self.config["audio"] else 0)
        previewed = seen.seen_light.sum(dim=1)
        attention = kinds * width / 1e9 * previewed  # of a step
        return self.frames_gmacs(seen) + matrix_gmacs(self.keys) * previewed + (each_step + attention) * seen.steps

    def frames_gmacs(self, seen: BaselineOutput) -> Tensor:
        classify = torch.full((len(seen.seen_heavy),), matrix_gmacs(self.classify), device=seen.seen_heavy.device)
        return classify + self._sound_gmacs * seen.seen_in(AUDIO).sum(dim=1)

    @cached_property
    def _sound_gmacs(self) -> float:
        """Of the audio network for the sound around one frame."""
        return count_gmacs(self.audio_net, torch.zeros(1, *SPECTRUM)) if self.config["audio"] else 0.0


class AudioNet(nn.Module):
    """A small residual network of spectra [B, 64, 100]; returns [B, 512]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(1, channels, 7), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        widths = [channels, channels, 2 * channels, 4 * channels, 8 * channels]
        self.stages = nn.Sequential(
            *(_Block(widths[k], widths[k + 1], stride=1 if k == 0 else 2) for k in range(4)),
            _convolution(widths[-1], SOUND_WIDTH, 1),
            nn.ReLU(),
        )

    def forward(self, spectra: Tensor) -> Tensor:
        features: Tensor = self.stages(self.stem(spectra[:, None])).amax(dim=(2, 3))
        return features


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(_convolution(before, after, 3, stride), nn.ReLU(), _convolution(after, after, 3))
        self.shortcut = nn.Identity() if stride == 1 else _convolution(before, after, 1, stride)

    def forward(self, maps: Tensor) -> Tensor:
        return torch.relu(self.inner(maps) + self.shortcut(maps))


def _convolution(before: int, after: int, side: int, stride: int = 1) -> nn.Module:
    layer = nn.Conv2d(before, after, side, stride, side // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after))


def _layer(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU())


def _by_real(real: Tensor, module: nn.Module, values: Tensor) -> Tensor:
    """Run a module on the real candidates alone, so that padding is in no batch norm; the rest is 0.

    [B, T, ...] -> [B, T, W]
    """
    features = module(values[real])
    return features.new_zeros(*real.shape, features.shape[-1]).masked_scatter(real[:, :, None], features)
