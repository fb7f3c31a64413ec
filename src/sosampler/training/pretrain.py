"""The stage `pretrain`: a sampler's backbone learns the labels of the train split before the sampler's own training.

OCSampler and SOSampler start from a network that was trained on the data set's labels. How is not published; here the
logits of single frames are averaged over T and compared with the label by cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from sosampler._util.hardware import autocast
from sosampler.samplers.losses import label_guidance
from sosampler.samplers.recipe import SamplerRecipe, pretrain_recipe
from sosampler.samplers.sosampler import SOSampler
from sosampler.training.checkpoints import PRETRAIN
from sosampler.training.distributed import send
from sosampler.training.loop import LoopOptions, TrainingLoop
from sosampler.training.optim import make_optimizer
from sosampler.training.sampler_data import Batch, NormalisedCrops, SamplerBatches


class FrameLabels(nn.Module):
    """A sampler's backbone and dropout with a class layer: its class head where it has one, else one for this stage."""

    def __init__(self, sampler: SOSampler, num_classes: int, seed: int) -> None:
        super().__init__()
        self.backbone, self.dropout = sampler.backbone, sampler.dropout
        if sampler.class_head is None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed % 2**63)
                self.class_head = nn.Linear(self.backbone.num_features, num_classes).to(sampler.device)
        else:
            self.class_head = sampler.class_head

    def forward(self, frames: Tensor) -> Tensor:
        """Return class logits [B, T, C] of normalised frames [B, T, 3, h, w]."""
        features = self.backbone(frames.flatten(0, 1), frames.shape[1]).unflatten(0, frames.shape[:2])
        with torch.autocast(frames.device.type, enabled=False):  # as the heads of a sampler
            return self.class_head(self.dropout(features.to(self.class_head.weight.dtype)))


class PretrainLoop(TrainingLoop):
    """The training of a sampler's backbone by the labels; the last epoch is kept."""

    save_every_epoch, logged, title = True, ("lr", "seconds"), "pretraining"

    def __init__(
        self, sampler: SOSampler, recipe: SamplerRecipe, batches: SamplerBatches, options: LoopOptions
    ) -> None:
        self.plan, self.multi_label, self.precision = batches.plan, sampler.multi_label, options.precision
        self.crops = NormalisedCrops(sampler.preprocessing, batches.source.sizes, options.processes.device)
        network = FrameLabels(sampler, batches.table.labels.shape[1], recipe.seed)
        optimizer, scheduler = make_optimizer(network, recipe, len(batches), momentum=recipe.momentum)
        super().__init__(network, batches, options, optimizer, scheduler)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        crops = self.crops(send(batch.frames, self.device), batch.draw.crops, batch.sizes)
        crops = crops.contiguous(memory_format=torch.channels_last).unflatten(0, batch.draw.positions.shape)
        labels = send(batch.labels, self.device)
        with autocast(self.device, self.precision):
            logits = self.forward(crops)
        best = logits.detach().mean(1).argmax(1, keepdim=True)
        accuracy = labels.gather(1, best).mean()
        return label_guidance(logits, labels, multi_label=self.multi_label), {"accuracy": accuracy}

    def share(self, batch: Batch) -> float:
        return len(batch.labels) / self.plan.batch_size


def pretrain(sampler: SOSampler, recipe: SamplerRecipe, batches: SamplerBatches, options: LoopOptions) -> None:
    """Train the backbone in place, in a folder of its own within the run's, where a killed stage resumes.

    `options` are those of the sampler's own training. Once that has a checkpoint, which holds the backbone, this stage
    is over.
    """
    assert options.run is not None, "the stage resumes from a folder"
    if not recipe.pretrain or options.run.has_checkpoint:
        return
    own = pretrain_recipe(recipe)
    report: Callable[[str], None] = options.say
    options = replace(
        options,
        epochs=own.epochs,
        lr=own.lr,
        say=lambda text: report(f"pretraining on the labels: {text}"),
        run=options.run.stage(PRETRAIN),
        ema=None,
    )
    PretrainLoop(sampler, own, batches, options).train()
