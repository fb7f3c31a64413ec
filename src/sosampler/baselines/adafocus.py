"""AdaFocus: glance at every frame as a whole, then see one patch of it in detail.

Version 1, after Wang, Chen, Jiang, Song, Han and Huang, "Adaptive Focus for Efficient Video Recognition", ICCV 2021. As
in the paper: MobileNetV2 glances at each frame of 224 pixels; a recurrent policy reads its last map (7 x 7) and chooses
one of 7 x 7 corners of a patch; ResNet-50 sees the patch; a GRU reads the features of both frame after frame, and its
last state classifies. Three phases: "classifier" trains the GRU on random patches with cross-entropy at every frame,
"policy" trains the policy alone by PPO with the reward p_label(its patch) − p_label(random patch) from one state of the
GRU, "finetune" trains the GRU on the most probable patches. Sizes and settings of PPO are those of the published code.
Different: both networks are frozen (the paper fine-tunes them on the data set, and ResNet-50 on patches in its first
phase; `tune_local` does the latter where inputs are frames), so that a ResNet-50 trained on whole frames sees patches;
random patches lie on the grid; AdamW at one rate instead of SGD for the GRU; fewer epochs.

Version 2, after Wang et al., "AdaFocus V2: End-to-End Training of Spatial Dynamic Networks for Video Recognition", CVPR
2022. As in the paper: the policy gives a real corner, the patch is interpolated there, and everything is trained end to
end in one phase, "joint", without rewards: cross-entropy at every frame, also of class layers on the features of either
network (auxiliary supervision), for the policy's patches and for random ones (diversity); the policy's gradient does
not reach the glance (stop-gradient). Different: the GRU of version 1 classifies; all losses have weight 1; AdamW.

Both see frames in time order and one patch of each, and stop at the first frame after which the highest probability is
above `confidence`: version 2's exit, with one threshold for all frames. The maps of the glance and the features of all
patches of the grid may be stored in the bank (`inputs: features`, version 1 only), or the networks run on pixels
(`inputs: frames`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sosampler._util.hardware import autocast
from sosampler._util.validation import check_bool, check_float, check_fraction, check_int, one_of
from sosampler.baselines.adaframe import discount_factor
from sosampler.baselines.base import (
    FRAMES,
    Baseline,
    BaselineOutput,
    Loss,
    Rng,
    Views,
    draw_gumbel,
    draw_uniform,
    matrix_gmacs,
)
from sosampler.baselines.patches import (
    FrameFeatures,
    GlanceMaps,
    PatchGrid,
    backbone_gmacs,
    cut_patches,
    grid_corners,
    last_map,
    map_side,
    sample_patches,
)
from sosampler.classifiers.pooled import FrameExitClassifier, TimmClassifier, timm_head_names
from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from sosampler.classifiers.weights import load_weights, without_head
from sosampler.errors import InvalidArgument
from sosampler.samplers.backbones import MOBILENET, create_backbone, load_backbone_weights
from sosampler.samplers.sosampler import log_label_confidence

_SMALLEST = 1e-12  # probabilities are clamped here before a logarithm


class Look(NamedTuple):
    """What is known of F frames after the glance."""

    maps: Tensor  # [F, C, s, s], of the glance
    detail: Tensor  # features of all patches of the grid [F, grid², D], or normalised pixels [F, 3, h, w]

    @property
    def glance(self) -> Tensor:
        """[F, C], the features of the glance."""
        return self.maps.mean(dim=(2, 3))


class AdaFocus(Baseline):
    """Glance, patch policy and recurrent classifier."""

    name = "adafocus"
    feature_sets: tuple[str, ...] = ("patches", "glance")  # with inputs="frames" these alone
    takes_weights = True
    made_of: Mapping[str, str] = {
        "patches": "classifier (--classifier): the folder of a 2-D classifier",
        "glance": "weights (--weights): a file of MobileNetV2, or 'pretrained'",
    }
    predict_batch = 64
    phases = ("classifier", "policy", "finetune", "joint")  # the last is version 2's, the others version 1's
    threshold = "confidence"
    threshold_values = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)

    def __init__(
        self,
        num_classes: int,
        patches_width: int | None = None,  # numbers a frame in the set "patches", all patches of the grid together
        glance_width: int | None = None,  # numbers a frame in the set "glance", its map
        *,
        version: int = 1,
        inputs: str = "features",  # stored in the bank; "frames": the networks are layers of its own and see pixels
        size: int = 224,  # pixels a side of a frame, as the classifier sees it
        patch: int = 128,  # pixels a side of a patch
        grid: int = 7,  # corners a side
        hidden: int = 1024,  # units of the classifier's GRU
        policy_width: int = 1024,  # units of the policy's GRU and the layer before it
        policy_channels: int = 32,  # of the map, as the policy sees it
        dropout: float = 0.5,  # before the class layer
        discount: float = 0.7,  # of rewards, per frame
        ppo_clip: float = 0.2,
        value_weight: float = 0.5,
        entropy_weight: float = 0.01,
        local_net: str = "timm:resnet50",  # of inputs="frames"
        glance_net: str = MOBILENET,  # of inputs="frames"
        tune_local: bool = False,  # train the local network too in phase "classifier"; version 2 always trains both
        network_lr: float = 0.1,  # learning rate of the two networks, as a share of that of the other layers
        confidence: float = 1.0,  # stop after the first frame with a probability above this; 1: see all frames
        multi_label: bool = False,  # probabilities by sigmoid instead of softmax
    ) -> None:
        config: dict[str, Any] = {
            "num_classes": check_int("num_classes", num_classes, at_least=2),
            "patches_width": None if patches_width is None else check_int("patches_width", patches_width),
            "glance_width": None if glance_width is None else check_int("glance_width", glance_width),
            "version": check_int("version", version, at_most=2),
            "inputs": one_of("inputs", inputs, ("features", FRAMES)),
            "size": check_int("size", size, at_least=2),
            "patch": check_int("patch", patch, at_most=size - 1),
            "grid": check_int("grid", grid, at_least=2),
            "hidden": check_int("hidden", hidden),
            "policy_width": check_int("policy_width", policy_width),
            "policy_channels": check_int("policy_channels", policy_channels),
            "dropout": check_fraction("dropout", dropout),
            "discount": discount_factor(discount),
            "ppo_clip": check_float("ppo_clip", ppo_clip, above=0),
            "value_weight": check_float("value_weight", value_weight, at_least=0),
            "entropy_weight": check_float("entropy_weight", entropy_weight, at_least=0),
            "local_net": str(local_net),
            "glance_net": str(glance_net),
            "tune_local": check_bool("tune_local", tune_local),
            "network_lr": check_float("network_lr", network_lr, at_least=0),
            "confidence": check_float("confidence", confidence, at_least=0),
            "multi_label": check_bool("multi_label", multi_label),
        }
        super().__init__(config)
        if inputs == "features" and (version == 2 or tune_local):
            what = (
                "version=2 cuts patches anywhere" if version == 2 else "tune_local=True trains the network of patches"
            )
            raise InvalidArgument(f"{what}, of which no features can be stored; give inputs='frames' with it")
        self.version, self.grid, self.patch, self.frame_size = version, grid, patch, size
        self.map_side = map_side(size)
        if inputs == FRAMES:
            self.feature_sets = (FRAMES,)
            self.local, self.glance = create_backbone(local_net), create_backbone(glance_net)
            self.local.requires_grad_(version == 2 or tune_local)
            self.glance.requires_grad_(version == 2)
            local_width, channels = self.local.num_features, self.glance.num_features
        else:
            # Rounded up; `check_shapes` refuses widths that do not divide.
            local_width, channels = -(-(patches_width or 1) // grid**2), -(-(glance_width or 1) // self.map_side**2)
        self.policy = PatchPolicy(
            channels,
            self.map_side,
            grid**2 if version == 1 else 2,
            reduced=policy_channels,
            width=policy_width,
            critic=version == 1,
        )
        self.cell = nn.GRUCell(channels + local_width, hidden)
        self.dropout = nn.Dropout(config["dropout"])
        self.classify = nn.Linear(hidden, num_classes)
        if version == 2:  # for training alone
            self.classify_glance, self.classify_local = (nn.Linear(n, num_classes) for n in (channels, local_width))

    # ---- networks

    def check_classifier(self, classifier: Any) -> None:
        name = "none" if classifier is None else getattr(classifier, "name", type(classifier).__name__)
        local = self.config["local_net"]
        if self.config["inputs"] != FRAMES:
            size = getattr(getattr(classifier, "preprocessing", None), "size", None)
            if classifier is not None and size != (self.frame_size, self.frame_size):
                raise InvalidArgument(
                    f"the classifier {name} sees frames of {size}, but adafocus of {self.frame_size} pixels a side; "
                    "set size to that of the classifier (--set size=...)"
                )
            return
        if not isinstance(classifier, (TimmClassifier, FrameExitClassifier)):
            raise InvalidArgument(
                f"adafocus with inputs='frames' sees patches with a 2-D classifier, but the classifier is {name}; give "
                f"classifier (--classifier): the folder of one with the network {local}"
            )
        pixels = classifier.preprocessing
        if (pixels.mean, pixels.std) != (IMAGENET_MEAN, IMAGENET_STD) or "stride_on_1x1" in classifier.options:
            raise InvalidArgument(
                f"{name} normalises pixels or strides otherwise than {local}, where its weights would mean something "
                "else; give another classifier, or inputs='features'"
            )

    def frame_network(self, name: str, classifier: Any, weights: str | Path | None) -> FrameFeatures | None:
        """Return the network of patches from the classifier, that of the glance from its weights."""
        if name == "patches" and classifier is not None:
            return PatchGrid(classifier, patch=self.patch, grid=self.grid)
        if name == "glance" and weights is not None:
            backbone = create_backbone(MOBILENET)
            load_backbone_weights(backbone, weights)
            return GlanceMaps(backbone, self.frame_size)
        return None

    def take_networks(self, networks: Mapping[str, Any], weights: str | Path | None) -> None:
        """Copy the classifier into the local network and `weights` into the glance, where inputs are frames."""
        if self.config["inputs"] != FRAMES:
            return
        classifier: Any = networks.get("heavy")
        self.check_classifier(classifier)
        if weights is None:
            raise InvalidArgument(f"the glance of adafocus has no weights; give {self.made_of['glance']}")
        net = classifier.net.backbone if isinstance(classifier, FrameExitClassifier) else classifier.net
        state = without_head(net.state_dict(), timm_head_names(net))
        load_weights(self.local.weights_net(), state, where=f"the classifier {classifier.name}")
        load_backbone_weights(self.glance, weights)

    def look(self, views: Views, rows: Tensor, steps: Tensor) -> Look:
        """Glance at the frames `steps` [F] of the videos `rows` [F]; reads nothing else of the views."""
        if self.config["inputs"] == FRAMES:
            size = (self.frame_size, self.frame_size)
            pixels = Preprocessing(size=size, resize=size).normalised(views[FRAMES][rows, steps])
            pixels = pixels.contiguous(memory_format=torch.channels_last)
            with autocast(self.device, self._precision):
                return Look(last_map(self.glance, pixels).float(), pixels)
        maps, patches = (views[name][rows, steps] for name in ("glance", "patches"))
        return Look(maps.unflatten(1, (-1, self.map_side, self.map_side)), patches.unflatten(1, (self.grid**2, -1)))

    def see(self, look: Look, places: Tensor) -> Tensor:
        """Return features [F, D] of one patch a frame.

        Its place is an action int64 [F] or, in version 2, its corner (y, x) as shares of the way, [F, 2] in 0..1.
        """
        if self.config["inputs"] != FRAMES:
            return look.detail.take_along_dim(places[:, None, None], 1)[:, 0]
        if self.version == 2:
            patches = sample_patches(look.detail, places * (self.frame_size - self.patch), self.patch)
        else:
            corners = grid_corners(places, grid=self.grid, patch=self.patch, size=self.frame_size)
            patches = cut_patches(look.detail, corners, self.patch)
        with autocast(self.device, self._precision):
            return self.local(patches.contiguous(memory_format=torch.channels_last), 1).float()

    @property
    def _precision(self) -> str:
        return "bfloat16" if self.device.type == "cuda" else "float32"

    # ---- places

    def _states(self, look: Look, real: Tensor) -> Tensor:
        """Return the policy's states [B, T, W] from the real frames in order."""
        observed = _spread(self.policy.observe(look.maps.detach()), real)
        return unroll(self.policy.cell, observed, real)[:, 1:]

    def best_places(self, states: Tensor) -> Tensor:
        """Return the places that the policy prefers in states [..., W]."""
        outputs = self.policy.actor(states)
        return outputs.sigmoid() if self.version == 2 else outputs.argmax(dim=-1)

    def random_places(self, count: int, generator: Rng) -> Tensor:
        """Return as many places, all equally likely."""
        if self.version == 2:
            return draw_uniform((count, 2), generator, self.device)
        drawn = (draw_uniform((count,), generator, self.device) * self.grid**2).long()
        return drawn.clamp_max(self.grid**2 - 1)  # a float just below 1 may round up

    def centre_places(self, count: int) -> Tensor:
        """Return the middle of the frame, or of the grid, as often."""
        if self.version == 2:
            return torch.full((count, 2), 0.5, device=self.device)
        return torch.full((count,), (self.grid // 2) * (self.grid + 1), device=self.device)

    # ---- training

    def loss(
        self, views: Views, labels: Tensor, *, generator: Rng = None, progress: float = 1.0, phase: str | None = None
    ) -> Loss:
        phase = phase or ("joint" if self.version == 2 else "classifier")
        real = views.real
        rows, steps = real.nonzero(as_tuple=True)  # of F real frames
        with torch.set_grad_enabled(phase == "joint" and torch.is_grad_enabled()):
            look = self.look(views, rows, steps)
        if phase == "joint":
            return self._joint_loss(look, real, labels, generator)
        if phase == "policy":
            return self._policy_loss(look, real, labels, generator)
        with torch.no_grad():
            random = self.random_places(len(rows), generator)
            places = random if phase == "classifier" else self.best_places(self._states(look, real)[real])
        losses = self.label_loss(self._logits(look, self.see(look, places), real), labels[:, None])
        every, last = _mean(losses, real), losses.gather(1, _last(real)).mean()
        return every, {"last": last.detach()}

    def _policy_loss(self, look: Look, real: Tensor, labels: Tensor, generator: Rng) -> Loss:
        """Return PPO's loss of patches drawn from the policy, means over frames.

        Each draw is used once, as in the paper, so that its probability has not changed and the ratio is 1.
        """
        states = self._states(look, real)
        log_probabilities = self.policy.actor(states).log_softmax(dim=-1)  # [B, T, grid²]
        values = self.policy.value(states)
        noise = draw_gumbel(tuple(log_probabilities.shape), generator, self.device)
        actions = (log_probabilities.detach() + noise).argmax(dim=-1)  # a draw from the policy
        random = self.random_places(len(look.maps), generator)
        rewards = self.rewards(look, actions[real], random, real, labels)
        returns = normalised(discounted_returns(rewards, real, self.config["discount"]), real)
        chosen = log_probabilities.gather(2, actions[:, :, None])[:, :, 0]
        advantages = returns - values.detach()
        policy = ppo_losses(chosen, chosen.detach(), advantages, self.config["ppo_clip"])[real].mean()
        value = ((values - returns) ** 2)[real].mean()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1)[real].mean()
        total = policy + self.config["value_weight"] * value - self.config["entropy_weight"] * entropy
        parts = {"policy": policy, "value": value, "entropy": entropy, "reward": rewards[real].mean()}
        return total, {key: part.detach() for key, part in parts.items()}

    @torch.no_grad()
    def rewards(self, look: Look, places: Tensor, others: Tensor, real: Tensor, labels: Tensor) -> Tensor:
        """Return p_label after the patch at a place minus that after the other one at the same frame, [B, T].

        Both follow the same frames, seen at `places`.
        """
        seen, other = (_spread(torch.cat([look.glance, self.see(look, p)], dim=1), real) for p in (places, others))
        states = unroll(self.cell, seen, real)
        instead = self.cell(other.flatten(0, 1), states[:, :-1].flatten(0, 1)).unflatten(0, real.shape)
        first, second = (
            log_label_confidence(self.activate(self.classify(after)).clamp_min(_SMALLEST).log(), labels).exp()
            for after in (states[:, 1:], instead)
        )
        return torch.where(real, first - second, 0)

    def _joint_loss(self, look: Look, real: Tensor, labels: Tensor, generator: Rng) -> Loss:
        """Return version 2's loss: the policy's patches and random ones by halves, and the class layers beside."""
        of_frames = labels[real.nonzero(as_tuple=True)[0]]
        places = [self.best_places(self._states(look, real)[real]), self.random_places(len(of_frames), generator)]
        twice = Look(look.maps, torch.cat([look.detail, look.detail]))  # one batch, for its normalisation
        halves = self.see(twice, torch.cat(places)).chunk(2)
        focused, random = (
            _mean(self.label_loss(self._logits(look, half, real), labels[:, None]), real) for half in halves
        )
        local = self.label_loss(self.classify_local(torch.cat(halves)), torch.cat([of_frames, of_frames])).mean()
        glance = self.label_loss(self.classify_glance(look.glance), of_frames).mean()
        parts = {"focused": focused, "random": random, "local": local, "glance": glance}
        return (focused + random) / 2 + local + glance, {key: part.detach() for key, part in parts.items()}

    def _logits(self, look: Look, patches: Tensor, real: Tensor) -> Tensor:
        """Return logits [B, T, C] after each frame, from features of the patches [F, D]."""
        states = unroll(self.cell, _spread(torch.cat([look.glance, patches], dim=1), real), real)
        return self.classify(self.dropout(states[:, 1:]))

    def _trained(self, phase: str) -> list[nn.Module]:
        if self.version == 2:
            return list(self.children()) if phase == "joint" else []
        if phase == "policy":
            return [self.policy]
        tuned = [self.local] if self.config["tune_local"] and phase == "classifier" else []
        return [] if phase == "joint" else [self.cell, self.dropout, self.classify, *tuned]

    def phase_parameters(self, phase: str) -> Iterator[nn.Parameter]:
        for module in self._trained(phase):
            yield from module.parameters()

    def lr_factors(self, phase: str) -> Mapping[nn.Parameter, float]:
        networks = [self.local, self.glance] if self.config["inputs"] == FRAMES else []
        return {weight: self.config["network_lr"] for network in networks for weight in network.parameters()}

    def train_phase(self, phase: str) -> None:
        self.eval()
        for module in self._trained(phase):
            module.train()

    # ---- running

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        return self._classified(views, views.real, focus=True)

    def classify_frames(self, views: Views, chosen: Tensor) -> BaselineOutput:
        """See the middle patch of the chosen frames in time order, without policy and exit."""
        return self._classified(views, chosen, focus=False)

    def _classified(self, views: Views, allowed: Tensor, *, focus: bool) -> BaselineOutput:
        """Classify from frames bool [B, T] in time order."""
        looking, seen = allowed.any(dim=1), torch.zeros_like(allowed)
        probabilities = torch.zeros(len(allowed), self.config["num_classes"], device=self.device)
        state = torch.zeros(len(allowed), self.config["hidden"], device=self.device)
        of_policy = torch.zeros(len(allowed), self.config["policy_width"], device=self.device)
        for step in range(allowed.shape[1]):
            rows = (looking & allowed[:, step]).nonzero()[:, 0]
            if not len(rows):
                continue
            look = self.look(views, rows, torch.full_like(rows, step))
            places = self.centre_places(len(rows))
            if focus:
                of_policy[rows] = self.policy.cell(self.policy.observe(look.maps), of_policy[rows])
                places = self.best_places(of_policy[rows])
            state[rows] = self.cell(torch.cat([look.glance, self.see(look, places)], dim=1), state[rows])
            probabilities[rows] = self.activate(self.classify(state[rows]))
            seen[rows, step] = True
            if focus:
                looking[rows] = probabilities[rows].amax(dim=1) <= self.config["confidence"]
        return BaselineOutput(probabilities, dict.fromkeys(self.feature_sets, seen))

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        return self.frames_gmacs(seen) + self.policy.gmacs() * seen.seen[self.feature_sets[0]].sum(dim=1)

    def frames_gmacs(self, seen: BaselineOutput) -> Tensor:
        frame = matrix_gmacs(self.cell, self.classify) + self._networks_gmacs()
        return frame * seen.seen[self.feature_sets[0]].sum(dim=1)

    def _networks_gmacs(self) -> float:
        """Return giga multiply-adds of the two networks for a frame, where they are layers of its own."""
        if self.config["inputs"] != FRAMES:
            return 0.0
        glance, local = self.config["glance_net"], self.config["local_net"]
        return backbone_gmacs(glance, self.frame_size) + backbone_gmacs(local, self.patch)

    def check_shapes(self, views: Views) -> None:
        super().check_shapes(views)
        positions = {"patches": self.grid**2, "glance": self.map_side**2}
        for name in self.feature_sets:
            width = self.config.get(f"{name}_width") or 0
            if name in positions and width % positions[name]:
                raise InvalidArgument(
                    f"{name} features of {width} numbers a frame are not those of {positions[name]} positions; give "
                    "features that adafocus stored with the same patch and grid"
                )


# ---- layers


class PatchPolicy(nn.Module):
    """Says where to look: the glance map of a frame [C, s, s] and a state -> outputs, and the value of the state."""

    def __init__(self, channels: int, size: int, outputs: int, *, reduced: int, width: int, critic: bool) -> None:
        super().__init__()
        self.size = size
        self.reduce = nn.Conv2d(channels, reduced, 1, bias=False)
        self.embed = nn.Linear(reduced * size * size, width)
        self.cell = nn.GRUCell(width, width)
        self.actor = nn.Linear(width, outputs)
        self.critic = nn.Linear(width, 1) if critic else None

    def observe(self, maps: Tensor) -> Tensor:
        """[F, C, s, s] -> [F, W], each frame alone."""
        return self.embed(self.reduce(maps).relu().flatten(1)).relu()

    def value(self, states: Tensor) -> Tensor:
        """Return the expected return of states [..., W]."""
        assert self.critic is not None, "only version 1 has rewards"
        return self.critic(states)[..., 0]

    def gmacs(self) -> float:
        """Return giga multiply-adds of one frame, without the critic, which only training needs."""
        reduce = self.reduce.weight.numel() * self.size**2 / 1e9
        return float(reduce + matrix_gmacs(self.embed, self.cell, self.actor))


def unroll(cell: nn.GRUCell, inputs: Tensor, real: Tensor) -> Tensor:
    """Return the state of a GRU before each frame and after the last: inputs [B, T, D] -> [B, T + 1, H].

    Padding leaves it as it is.
    """
    states = [inputs.new_zeros(len(inputs), cell.hidden_size)]
    for step in range(inputs.shape[1]):
        states.append(torch.where(real[:, step, None], cell(inputs[:, step], states[-1]), states[-1]))
    return torch.stack(states, dim=1)


def _spread(values: Tensor, real: Tensor) -> Tensor:
    """Return the values [F, ...] of the real frames at their places [B, T, ...], 0 elsewhere."""
    return values.new_zeros(*real.shape, *values.shape[1:]).index_put(real.nonzero(as_tuple=True), values)


def _mean(losses: Tensor, real: Tensor) -> Tensor:
    """Average [B, T] over the real frames of each video, then over videos."""
    return (losses.masked_fill(~real, 0).sum(dim=1) / real.sum(dim=1)).mean()


def _last(real: Tensor) -> Tensor:
    """Return the position of the last real frame, int64 [B, 1]."""
    return real.shape[1] - 1 - real.flip(1).to(torch.uint8).argmax(dim=1, keepdim=True)


# ---- reinforcement


def ppo_losses(log_new: Tensor, log_old: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return −min(ratio · advantage, clipped ratio · advantage) of each action, ratio = new / old probability."""
    ratio = (log_new - log_old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def discounted_returns(rewards: Tensor, real: Tensor, discount: float) -> Tensor:
    """Return the discounted sum of the rewards [B, T] from each step on; padding neither counts nor discounts.

    >>> rewards, real = torch.tensor([[1.0, 9.0, 4.0]]), torch.tensor([[True, False, True]])
    >>> discounted_returns(rewards, real, 0.5).tolist()
    [[3.0, 0.0, 4.0]]
    """
    total, returns = torch.zeros_like(rewards[:, 0]), []
    for reward, here in zip(reversed(rewards.unbind(dim=1)), reversed(real.unbind(dim=1)), strict=True):
        total = torch.where(here, reward + discount * total, total)
        returns.append(torch.where(here, total, 0))
    return torch.stack(returns[::-1], dim=1)


def normalised(values: Tensor, real: Tensor) -> Tensor:
    """Return values [B, T] with mean 0 and standard deviation 1 over the real ones; 0 elsewhere."""
    used = values[real]
    scale = used.std(correction=0).clamp_min(1e-5)
    return torch.where(real, (values - used.mean()) / scale, 0)
