"""TimeSformer on clips of any length, with a temporal embedding that follows the frames' true times.

transformers' own forward pass takes exactly `config.num_frames` frames and numbers them 0, 1, 2, ... whatever their
distance. Here the same modules are run for any number of frames; nothing in the network is changed or written to, so
that several threads can share it and its state dict stays the published one. Hooks on whole layers, and with them
transformers' gradient checkpointing, are passed by.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
