"""AdaFuse: in every residual block, which channels are computed, taken from the frame before, or left out.

After Meng, Panda, Lin, Sattigeri, Karlinsky, Saenko, Oliva and Feris, "AdaFuse: Adaptive Temporal Fusion Network for
Efficient Action Recognition", ICLR 2021. As in the paper: in each residual block of a 2-D ResNet a gate sees the pooled
input of the block at this frame and at the one before, and decides for each channel of the block's first convolution:
keep it, reuse the value of the frame before (before its own gates; zero at the first frame), or skip it (zero). A gate
has two layers, shared between blocks of equal shape; hard Gumbel-softmax with straight-through gradient; cross-entropy
of the mean of the frames' logits + weight · mean GMACs a frame.
Different: the decision at run time is the likeliest one, without noise, and so it is in the last phase of training, or
the batch norms would have the statistics of noisy decisions; videos are mirrored at random in training and not cropped;
the gates' own layers are part of every cost. All frames are computed densely: the cost is what would have to be
computed, and no time is saved.

Its cost is counted twice. "real" (the one in tables): a channel saves its share of the first convolution where it is
neither kept now nor reused by the next frame, and its share of the second one where it is skipped. "upper bound": only
the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.hardware import autocast
from sosampler._util.validation import check_bool, check_float, check_int, one_of
from sosampler.baselines.base import Baseline, BaselineOutput, Loss, Rng, Views, draw_gumbel, draw_uniform, matrix_gmacs
from sosampler.classifiers.base import count_gmacs, to_channels_last
from sosampler.classifiers.pooled import FrameExitClassifier, TimmClassifier, build_timm
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.classifiers.weights import load_weights
from sosampler.errors import InvalidArgument

KEEP, REUSE, SKIP = range(3)
COUNTS = ("real", "upper bound")
_HEAD = ("fc",)
_STAGES = ("layer1", "layer2", "layer3", "layer4")
_GATE_SCALE = 1e-3  # standard deviation of the gates' new weights

Choose = Callable[[Tensor], Tensor]
"""Turns logits [F, C, 3] into decisions [F, C, 3], one-hot in the forward pass."""


class BlockUse(NamedTuple):
    """What the gates of one block decided for F frames, and what its first two convolutions cost."""

    gates: Tensor  # [F, C, 3], one-hot
    conv1_gmacs: float  # of one frame
    conv2_gmacs: float


class Gate(nn.Module):
    """Two layers that decide on the channels of a block from its pooled input at this and at the previous frame."""

    def __init__(self, inputs: int, channels: int, hidden: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(2 * inputs, hidden), nn.BatchNorm1d(hidden)
        self.second = nn.Linear(hidden, 3 * channels)
        for layer in (self.first, self.second):
            nn.init.normal_(layer.weight, 0, _GATE_SCALE)
            nn.init.zeros_(layer.bias)

    def forward(self, pooled: Tensor, first: Tensor) -> Tensor:
        """Return logits [F, C, 3] from the pooled input [F, C_in]; `first` as for `previous`."""
        hidden = self.norm(self.first(torch.cat([previous(pooled, first), pooled], dim=1))).relu()
        return self.second(hidden).unflatten(1, (-1, 3))


class AdaFuse(Baseline):
    """A ResNet with gates in its residual blocks."""

    name = "adafuse"
    feature_sets = ("frames",)
    predict_batch = 16
    phases = ("drawn", "likeliest")  # how decisions are made

    def __init__(
        self,
        num_classes: int,
        *,
        backbone: str | None = None,  # a ResNet of timm; None: that of the classifier it starts from, else resnet50
        gate_quota: int = 196608,  # hidden layer of a gate times the channels that it decides on
        temperature: float = 0.67,  # of the Gumbel-softmax
        efficiency: float = 0.075,  # weight of the mean GMACs a frame
        count: str = "real",  # how these are counted in training
        train_backbone: bool = True,  # False trains the gates alone
        flip: bool = True,  # mirror half of the videos in training
        input_size: int | None = None,  # side of the frames in pixels; None: that of the classifier it starts from
        mean: Sequence[float] | None = None,  # of RGB in 0..1; None: likewise
        std: Sequence[float] | None = None,
        stride_on_1x1: bool = False,  # of the bottlenecks; that of the classifier it starts from
        multi_label: bool = False,  # probabilities by sigmoid instead of softmax
    ) -> None:
        config = {
            "num_classes": check_int("num_classes", num_classes),
            "backbone": backbone,
            "gate_quota": check_int("gate_quota", gate_quota),
            "temperature": check_float("temperature", temperature, above=0),
            "efficiency": check_float("efficiency", efficiency, at_least=0),
            "count": one_of("count", count, COUNTS),
            "train_backbone": check_bool("train_backbone", train_backbone),
            "flip": check_bool("flip", flip),
            "input_size": None if input_size is None else check_int("input_size", input_size),
            "mean": None if mean is None else list(mean),
            "std": None if std is None else list(std),
            "stride_on_1x1": check_bool("stride_on_1x1", stride_on_1x1),
            "multi_label": check_bool("multi_label", multi_label),
        }
        super().__init__(config)
        self._seed = int(torch.randint(2**62, (), device="cpu"))  # of gates for another backbone
        self._build(backbone or "resnet50")
        self._see(Preprocessing(size=(224, 224), resize=224))

    def _build(self, backbone: str) -> None:
        """Make the network and its gates."""
        options = {"num_classes": self.config["num_classes"], "stride_on_1x1": self.config["stride_on_1x1"]}
        self.net: Any = build_timm(backbone, **options).net.requires_grad_()
        if not _is_plain(self.net):
            raise InvalidArgument(f"backbone={backbone!r} must be a plain ResNet of timm, such as resnet50 or resnet18")
        self.gates = nn.ModuleDict()
        for block in self.blocks():
            if _shape(block) not in self.gates:
                inputs, channels = block.conv1.in_channels, block.conv1.out_channels
                self.gates[_shape(block)] = Gate(inputs, channels, max(1, self.config["gate_quota"] // channels))

    def _see(self, default: Preprocessing) -> None:
        """Set how frames are seen: by the config, and by `default` where that has nothing."""
        size = self.config["input_size"] or default.size[0]
        mean, std = (self.config[name] or getattr(default, name) for name in ("mean", "std"))
        self.preprocessing = Preprocessing(size=(size, size), resize=size, mean=mean, std=std)
        self.frame_size = size
        self._fixed_gmacs: float | None = None  # see `_fixed`

    def blocks(self) -> list[Any]:
        """Return the residual blocks in their order."""
        return [block for stage in _STAGES for block in getattr(self.net, stage)]

    def check_classifier(self, classifier: Any) -> None:
        if classifier is None:
            raise InvalidArgument(
                "adafuse starts from a trained ResNet, but none is given; give classifier (--classifier): the folder "
                "of one, such as resnet50"
            )
        net, wanted = _network_of(classifier), self.config["backbone"]
        if net is None:
            raise InvalidArgument(
                f"adafuse has its gates in the blocks of a plain ResNet, but {classifier.name} is none; give a "
                "classifier on one of timm, such as resnet50"
            )
        if wanted not in (None, backbone := net.pretrained_cfg["architecture"]):
            raise InvalidArgument(
                f"{classifier.name} has the network {backbone}, but backbone={wanted!r}; leave backbone out"
            )
        height, width = classifier.preprocessing.size
        if height != width:
            raise InvalidArgument(
                f"{classifier.name} sees {height}x{width} pixels; give a classifier that sees squares"
            )

    def take_networks(self, networks: Mapping[str, Any], weights: str | Path | None) -> None:
        """Start from a classifier on a ResNet; a head of other classes or of another kind is new."""
        classifier = networks["heavy"]
        self.check_classifier(classifier)
        net = _network_of(classifier)
        backbone = net.pretrained_cfg["architecture"]
        self.config |= {
            "backbone": backbone,
            "stride_on_1x1": bool(classifier.options.get("stride_on_1x1")) or self.config["stride_on_1x1"],
        }
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed)
            self._build(backbone)
        self._see(classifier.preprocessing)
        seen = self.preprocessing
        self.config |= {"input_size": self.frame_size, "mean": list(seen.mean), "std": list(seen.std)}
        new_head = net is not classifier.net or classifier.num_classes != self.config["num_classes"]
        load_weights(self.net, net.state_dict(), where=classifier.name, head=_HEAD, new_head=new_head)

    def phase_parameters(self, phase: str) -> Iterator[nn.Parameter]:
        yield from self.parameters() if self.config["train_backbone"] else self.gates.parameters()

    def train_phase(self, phase: str) -> None:
        self.train()
        self.net.train(self.config["train_backbone"])
        if self.device.type == "cuda":
            to_channels_last(self.net)

    def check_training(self, frames: Tensor, *, smallest_batch: int, phases: Collection[str]) -> None:
        if smallest_batch * int(frames.min()) < 2:
            raise InvalidArgument(
                "a batch may hold one frame, but the gates normalise over those of a batch; give a larger batch_size"
            )

    # ---- the network

    def forward(self, frames: Tensor, first: Tensor, choose: Choose) -> tuple[Tensor, list[BlockUse]]:
        """Run on normalised frames [F, 3, h, w] of several videos one after another, each in time order.

        Args:
            frames: of all videos.
            first: bool [F], the first frame of each video.
            choose: turns the gates' logits into decisions.

        Returns:
            Logits [F, C] of each frame, and what each block used.
        """
        net = self.net
        x = net.maxpool(net.act1(net.bn1(net.conv1(frames))))
        used = []
        for block in self.blocks():
            gates = choose(self.gates[_shape(block)](x.mean(dim=(2, 3)), first))
            x, use = run_block(block, x, gates, first)
            used.append(use)
        return net.forward_head(x), used

    def _fixed(self) -> float:
        """Return GMACs of a frame where all channels are kept, with those of the gates."""
        if self._fixed_gmacs is None:
            pixels = torch.empty(1, 3, self.frame_size, self.frame_size, device="meta")
            gates = sum(matrix_gmacs(self.gates[_shape(block)]) for block in self.blocks())
            self._fixed_gmacs = count_gmacs(self.net, pixels) + gates
        return self._fixed_gmacs

    def frame_gmacs(self, used: Sequence[BlockUse], last: Tensor) -> dict[str, Tensor]:
        """Return GMACs [F] of each frame by both counts; `last`: bool [F], the last frame of each video."""
        upper = real = torch.full((len(last),), self._fixed(), device=last.device)
        for gates, conv1_gmacs, conv2_gmacs in used:
            upper = upper - gates[:, :, SKIP].mean(dim=1) * conv2_gmacs
            reused_next = F.pad(gates[1:, :, REUSE], (0, 0, 0, 1)) * ~last[:, None]
            real = real - ((1 - gates[:, :, KEEP]) * (1 - reused_next)).mean(dim=1) * conv1_gmacs
        return {"real": real + upper - self._fixed(), "upper bound": upper}

    # ---- as a baseline

    def loss(
        self, views: Views, labels: Tensor, *, generator: Rng = None, progress: float = 1.0, phase: str | None = None
    ) -> Loss:
        """Return the label loss of the mean of the frames' logits + efficiency · mean GMACs a frame."""
        frames, real = views["frames"], views.real
        if self.config["flip"]:
            mirrored = draw_uniform((len(frames),), generator, frames.device) < 0.5
            frames = torch.where(mirrored.view(-1, 1, 1, 1, 1), frames.flip(-1), frames)
        # Millions of numbers a step, so they are drawn on the device.
        seed = torch.randint(2**62, (), generator=generator, device="cpu" if generator is None else generator.device)
        own_generator = torch.Generator(frames.device).manual_seed(int(seed))

        def choose(logits: Tensor) -> Tensor:
            drawn = phase != "likeliest"
            noise = draw_gumbel(tuple(logits.shape), own_generator, logits.device) if drawn else 0
            soft = ((logits.float().log_softmax(dim=-1) + noise) / self.config["temperature"]).softmax(dim=-1)
            hard = F.one_hot(soft.argmax(dim=-1), 3).to(soft.dtype)
            return hard + soft - soft.detach()  # forward one-hot, backward the gradient of the soft decision

        with autocast(frames.device, _training_precision(frames.device)):
            logits, costs, used = self._run(frames, real, choose)
        label = self.label_loss(_video_mean(logits.float(), real), labels).mean()
        gmacs = costs[self.config["count"]].mean()
        shares = [torch.stack([use.gates[:, :, kind].mean() for use in used]).mean() for kind in (KEEP, REUSE, SKIP)]
        parts = {"label": label, "gmacs": gmacs, "kept": shares[KEEP], "reused": shares[REUSE], "skipped": shares[SKIP]}
        return label + self.config["efficiency"] * gmacs, {name: part.detach() for name, part in parts.items()}

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        return self._classified(views, views.real, _likeliest)

    def classify_frames(self, views: Views, chosen: Tensor) -> BaselineOutput:
        """Keep all channels of the chosen frames; gates are not counted."""
        output = self._classified(views, chosen, lambda logits: _all(KEEP, logits))
        gates = sum(matrix_gmacs(self.gates[_shape(block)]) for block in self.blocks())
        own = (self._fixed() - gates) * chosen.sum(dim=1)
        return output._replace(own=own, other_gmacs={"upper bound": own})

    def frames_gmacs(self, seen: BaselineOutput) -> Tensor:
        return self.own_gmacs(seen)

    def _classified(self, views: Views, real: Tensor, choose: Choose) -> BaselineOutput:
        logits, costs, _ = self._run(views["frames"], real, choose)
        by_count = {count: _video_mean(cost[:, None], real)[:, 0] * real.sum(dim=1) for count, cost in costs.items()}
        probabilities = self.activate(_video_mean(logits, real))
        others = {"upper bound": by_count["upper bound"]}
        return BaselineOutput(probabilities, {"frames": real}, own=by_count["real"], other_gmacs=others)

    def _run(self, frames: Tensor, real: Tensor, choose: Choose) -> tuple[Tensor, dict[str, Tensor], list[BlockUse]]:
        """Return logits [F, C], GMACs [F] by count, and what was used, of the real frames of uint8 [B, T, 3, H, W]."""
        order = real.cumsum(dim=1)
        first, last = (order == 1)[real], (order == order[:, -1:])[real]
        pixels = self.preprocessing.normalised(frames[real]).contiguous(memory_format=torch.channels_last)
        logits, used = self(pixels, first, choose)
        return logits, self.frame_gmacs(used, last), used


def previous(values: Tensor, first: Tensor) -> Tensor:
    """Return what the frame before has in values [F, ...]; zero at the `first` frame of each video, bool [F]."""
    return torch.cat([torch.zeros_like(values[:1]), values[:-1]]) * (~first).view(-1, *[1] * (values.dim() - 1))


def run_block(block: Any, x: Tensor, gates: Tensor, first: Tensor) -> tuple[Tensor, BlockUse]:
    """Run a residual block of timm on x [F, C_in, h, w] with decisions [F, C, 3] on its first convolution's output."""
    fresh = block.act1(block.bn1(block.conv1(x)))
    keep, reuse = (gates[:, :, kind, None, None].to(fresh.dtype) for kind in (KEEP, REUSE))
    y = block.conv2(keep * fresh + reuse * previous(fresh, first))
    use = BlockUse(gates, _conv_gmacs(block.conv1, fresh), _conv_gmacs(block.conv2, y))
    y = block.bn2(y)
    if hasattr(block, "conv3"):
        y = block.bn3(block.conv3(block.act2(y)))
    y = y + (x if block.downsample is None else block.downsample(x))
    return (block.act3 if hasattr(block, "act3") else block.act2)(y), use


def _network_of(classifier: Any) -> Any:
    """Return the plain ResNet of a classifier; None where it has none."""
    net = classifier.net.backbone if isinstance(classifier, FrameExitClassifier) else getattr(classifier, "net", None)
    return net if isinstance(classifier, (TimmClassifier, FrameExitClassifier)) and _is_plain(net) else None


def _is_plain(net: Any) -> bool:
    """Return whether a network is a ResNet whose blocks do no more than `run_block` does."""
    stages = [getattr(net, stage, ()) for stage in _STAGES]
    return all(stages) and all(
        type(block).__name__ in ("BasicBlock", "Bottleneck")
        and isinstance(block.conv1, nn.Conv2d)
        and block.se is None
        and isinstance(block.aa, nn.Identity)
        for stage in stages
        for block in stage
    )


def _conv_gmacs(conv: nn.Conv2d, output: Tensor) -> float:
    """Return GMACs of a convolution for one frame, from its output [F, C, h, w]."""
    return int(conv.weight.numel() * output.shape[2] * output.shape[3]) / 1e9


def _shape(block: Any) -> str:
    """Return the key of the gate of a block: blocks with as many channels before and after their first convolution."""
    return f"{block.conv1.in_channels}_{block.conv1.out_channels}"


def _video_mean(values: Tensor, real: Tensor) -> Tensor:
    """Return means [B, D] over the real frames of each video, from values [F, D] of these."""
    table = values.new_zeros(*real.shape, values.shape[1])
    table[real] = values
    return table.sum(dim=1) / real.sum(dim=1, keepdim=True)


def _all(kind: int, logits: Tensor) -> Tensor:
    """Return the same decision [F, C, 3] for all channels."""
    return F.one_hot(torch.full(logits.shape[:2], kind, device=logits.device), 3).to(logits.dtype)


def _likeliest(logits: Tensor) -> Tensor:
    """Return the likeliest decisions [F, C, 3]; of equal ones the first, keep before reuse before skip."""
    return F.one_hot(logits.argmax(dim=-1), 3).to(logits.dtype)


def _training_precision(device: torch.device) -> str:
    """Return bfloat16 on GPUs that have it, else float32, which needs no scaling of the gradient."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16"
    return "float32"
