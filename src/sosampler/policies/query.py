"""Choose frames for a question or a concept: by how well an image-text model finds that they fit the text."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sosampler._util.arrays import Indices
from sosampler.errors import InvalidArgument
from sosampler.policies.base import Batch, Numbers, Policy, Scores
from sosampler.policies.image_text import ImageTextModel, load_image_text
from sosampler.policies.learned import GENERAL_SIZE, General
from sosampler.policies.positional import Uniform
from sosampler.policies.registry import METHOD_NAMES, split_method, with_method

QUERY = "query"  # the policy's name
DEFAULT_METHOD = "mmr"
MODEL_VARIABLE = "SOSAMPLER_QUERY_MODEL"

# Above this share of the candidates, the scores are flat: the query has no moment, and frames cover the video.
# Not tuned: logits that are noise of one unit (0.01 of CLIP's cosine) give 0.61, and frames of which one half fits 0.5.
MAX_SPREAD = 0.6
# Of the logarithm of the quality beside the logits: an unusable frame (0.01) loses 2.3 units, 0.023 of CLIP's cosine.
_QUALITY_WEIGHT = 0.5
_MIN_QUALITY = 1e-3


class Relevance(Policy):
    """Score frames by a text: their cosine to it, and general's quality as a second term."""

    name = QUERY
    description = "the frames that fit a text best, by an image-text model"
    needs = frozenset({"frames"})
    has_weights = True

    def __init__(self, text: str, model: ImageTextModel) -> None:
        self.text, self.model = text, model
        self.min_size = max(model.image_size, GENERAL_SIZE)
        self._direction = model.encode_text(text)
        self._general = General()

    def default_candidates(self, num_frames: int) -> int:
        return max(64, 4 * num_frames)  # a moment may be short

    def features(self, batch: Batch) -> NDArray[Any]:
        """The embeddings of the frames [B, T, D], so that "+mmr" compares what they show."""
        return batch.cached(("image-text", id(self.model)), lambda: self._embeddings(batch))

    def _embeddings(self, batch: Batch) -> NDArray[Any]:
        assert batch.frames is not None, "it needs frames"
        videos = zip(batch.frames, batch.counts.tolist(), strict=True)
        parts = [self.model.encode_images(frames[:count]) for frames, count in videos]
        table = np.zeros((len(batch), batch.num_candidates, parts[0].shape[1]), dtype=np.float32)
        for row, part in enumerate(parts):
            table[row, : len(part)] = part
        return table

    def cosines(self, batch: Batch) -> Numbers:
        """Return how well each candidate fits the text, [B, T]."""
        return np.asarray(self.features(batch).astype(np.float64) @ self._direction)

    def scores(self, batch: Batch) -> Scores:
        quality = np.log(np.maximum(self._general.quality(batch), _MIN_QUALITY))
        return np.asarray(self.cosines(batch) + _QUALITY_WEIGHT / self.model.logit_scale * quality)

    def chances(self, batch: Batch) -> Numbers:
        """Return the probability that a candidate is the one that the text belongs to, [B, T].

        It is the softmax by which CLIP was trained, over the frames of the video in place of those of a batch.
        """
        logits = np.where(batch.mask, self.model.logit_scale * self.cosines(batch), -np.inf)
        odds = np.exp(logits - logits.max(1, keepdims=True))
        return np.asarray(odds / odds.sum(1, keepdims=True))

    def spread(self, batch: Batch) -> Numbers:
        """Return over which share of the candidates the text is spread, [B]: exp of the entropy, by their number.

        1: all fit it alike. 1 / T: one fits it, and no other.
        """
        chances = self.chances(batch)
        entropy = -(chances * np.log(np.maximum(chances, 1e-300))).sum(1)
        return np.asarray(np.exp(entropy) / batch.counts)

    def fingerprint(self) -> str:
        return self.model.fingerprint()


class QueryPolicy(Policy):
    """Choose by the scores of a text, and evenly in time where these are flat: the query then has no moment."""

    needs = frozenset({"frames"})
    default_mode = "auto"
    has_weights = True

    def __init__(self, text: str, model: ImageTextModel, method: str = "") -> None:
        self.relevance = Relevance(text, model)
        self._chooser = with_method(self.relevance, method) if method else self.relevance
        self._uniform, self._general = Uniform(), General()
        self.name, self.description = self._chooser.name, self._chooser.description
        self.min_size = self.view_size = self.relevance.min_size

    def default_candidates(self, num_frames: int) -> int:
        return self.relevance.default_candidates(num_frames)

    def scores(self, batch: Batch) -> Scores:
        return self.relevance.scores(batch)

    def features(self, batch: Batch) -> NDArray[Any]:
        return self.relevance.features(batch)

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        flat = self.relevance.spread(batch) > MAX_SPREAD
        even = self._uniform.choose(batch, num_frames)
        return even if flat.all() else np.where(flat[:, None], even, self._chooser.choose(batch, num_frames))

    def expected(self, batch: Batch) -> Numbers:
        """Return at [:, k - 1] the probability that one of the k likeliest candidates is the one, [B, T].

        Where the scores are flat, the share of the video that k frames show.
        """
        found = np.sort(self.relevance.chances(batch), axis=1)[:, ::-1].cumsum(1)
        flat = self.relevance.spread(batch) > MAX_SPREAD
        covered = self._general.expected(batch)
        return np.where(flat[:, None], covered, np.where(batch.mask, found, -np.inf))

    def query_result(self, batch: Batch) -> dict[str, Any]:
        spread = float(self.relevance.spread(batch)[0])
        found = spread <= MAX_SPREAD
        return {"text": self.relevance.text, "model": self.relevance.model.name, "spread": spread, "localised": found}

    def fingerprint(self) -> str:
        return self.relevance.fingerprint()


def flat_note(result: dict[str, Any]) -> str | None:
    """Return the note of a query whose scores were flat; None for one that has its moments."""
    if result["localised"]:
        return None
    return (
        f"query: no part of the video fits it better than the rest (spread {result['spread']:.2f}, above "
        f"{MAX_SPREAD:g}), so the frames cover the video evenly"
    )


def query_policy(query: Any, model: Any = None, policy: Any = None, *, device: Any = None) -> QueryPolicy:
    """Return the policy for a text.

    Args:
        query: a question or a concept, in the language of the model.
        model: an `ImageTextModel`, or the folder or hub name of one; None takes SOSAMPLER_QUERY_MODEL.
        policy: "query" (the best scores) or "query+METHOD"; None is "query+mmr". Or a `QueryPolicy` of this text.
        device: of a model that torch runs.
    """
    if not isinstance(query, str) or not query.strip():
        raise InvalidArgument(f"query={query!r} must be a text; say what the frames should show, or leave it out")
    text = " ".join(query.split())
    if isinstance(policy, QueryPolicy) and policy.relevance.text == text:
        return policy
    base, method = split_method(policy) if isinstance(policy, str) else (None, "")
    if policy is None:
        method = DEFAULT_METHOD
    elif base != QUERY or method not in ("", *METHOD_NAMES):
        names = ", ".join([QUERY, *(f"{QUERY}+{name}" for name in METHOD_NAMES)])
        raise InvalidArgument(f"policy={policy!r} does not read the query; leave it out, or choose one of: {names}")
    if not isinstance(model, ImageTextModel):
        given = model or os.environ.get(MODEL_VARIABLE)
        if not given:
            raise InvalidArgument(
                "query needs an image-text model, which does not ship with the package; give query_model "
                f"(--query-model), a folder or a hub name, or set {MODEL_VARIABLE}"
            )
        model = load_image_text(given, device=device)
    return QueryPolicy(text, model, method)
