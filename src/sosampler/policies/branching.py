"""Branch and bound over which candidates are in or out, batched over the nodes of many videos."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sosampler.policies.relaxation import ClipLoss, Relaxed, relax
from sosampler.policies.swaps import improve_by_swaps, loss_of

# Nodes solved at once: enough to hide the cost of a call, few enough that promising ones are solved first; and
# numbers in their rows (32 MiB of float64).
_NODES_AT_ONCE = 512
_MAX_NUMBERS = 2**22
# The first nodes of a video go for the proof that its subset is the best, to this difference in log confidence.
_PROOF_NODES = 100
_EXACT = 1e-9
_IN, _OUT = 1, -1
# Numbers of a row that are compared before all of them are.
_FEW = 3


@dataclass
class Incumbent:
    """The best subset known of each video."""

    chosen: Tensor  # [B, T] bool
    loss: Tensor  # [B]

    def offer(self, videos: Tensor, chosen: Tensor, loss: Tensor) -> None:
        """Take subsets [M, T] that are better than what is known of their videos [M]."""
        pick = _first_of_each(videos, loss)
        pick = pick[loss[pick] < self.loss[videos[pick]]]
        self.chosen[videos[pick]] = chosen[pick]
        self.loss[videos[pick]] = loss[pick]


@dataclass(frozen=True)
class Equals:
    """Candidates of a video with exactly equal rows."""

    group: Tensor  # [B, T] the first candidate that equals this one
    rank: Tensor  # [B, T] how many equal ones come before

    @staticmethod
    def of(loss: ClipLoss, real: Tensor) -> Equals:
        same = _equal_rows(loss.rows)
        same &= (real[:, None] & real[:, :, None]) | torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
        return Equals(same.to(torch.uint8).argmax(-1), same.tril(-1).sum(-1))

    def earliest(self, video: Tensor, weights: Tensor) -> Tensor:
        """Move the weights [M, T] among equal candidates to the earliest; their sum is the same."""
        group = self.group[video]
        sums = torch.zeros_like(weights).scatter_add_(1, group, weights).gather(1, group)
        return (sums - self.rank[video]).clamp(0, 1)


@dataclass(frozen=True)
class Nodes:
    """Parts of the search: who is in (1), out (-1) or undecided (0), and a loss that nothing there is below."""

    video: Tensor  # [M]
    fixed: Tensor  # [M, T] int8
    bound: Tensor  # [M]

    def __len__(self) -> int:
        return len(self.video)

    def where(self, which: Tensor) -> Nodes:
        return Nodes(self.video[which], self.fixed[which], self.bound[which])

    def and_also(self, *others: Nodes) -> Nodes:
        every = (self, *others)
        return Nodes(
            torch.cat([nodes.video for nodes in every]),
            torch.cat([nodes.fixed for nodes in every]),
            torch.cat([nodes.bound for nodes in every]),
        )


class BranchAndBound:
    """Searches for the subset of lowest loss and a bound on it; `best` is improved in place.

    Candidates with equal rows are interchangeable, so only subsets that take the earliest of them are searched.
    """

    def __init__(self, loss: ClipLoss, real: Tensor, num_frames: int, best: Incumbent, equals: Equals) -> None:
        self.loss, self.num_frames, self.best, self.equals = loss, num_frames, best, equals
        self.real = real  # [B, T]
        self.slack = torch.zeros_like(best.loss)  # gap in confidence that is good enough by now
        rows = loss.rows
        self.at_once = max(1, min(_NODES_AT_ONCE, _MAX_NUMBERS // (rows.shape[1] * rows.shape[2])))
        self.closed = best.loss.clone()  # lowest bound of all parts that are done with, the best subset included

    def run(self, tolerance: float, max_nodes: int) -> Tensor:
        """A loss [B] that no subset of real candidates is below.

        A video ends when its best subset is proven, when after some nodes the gap is at most `tolerance` in
        confidence, or after `max_nodes`.
        """
        videos = torch.arange(len(self.real), device=self.real.device)
        fixed = torch.where(self.real, 0, _OUT).to(torch.int8)
        open_nodes = Nodes(videos, fixed, torch.full_like(self.best.loss, -float("inf")))
        spent = torch.zeros_like(videos)
        while len(open_nodes):
            taken = _most_promising(open_nodes, self.at_once)
            nodes = open_nodes.where(taken)
            spent += torch.bincount(nodes.video, minlength=len(spent))
            self.slack[spent >= _PROOF_NODES] = tolerance
            open_nodes = open_nodes.where(~taken).and_also(self._split(nodes))
            keep = self._worth(open_nodes.video, open_nodes.bound) & (spent[open_nodes.video] < max_nodes)
            self._close(open_nodes.video[~keep], open_nodes.bound[~keep])
            open_nodes = open_nodes.where(keep)
        return self.closed

    def _worth(self, video: Tensor, bound: Tensor) -> Tensor:
        """Whether something clearly better than the best known could lie above this bound."""
        best = self.best.loss[video]
        return (bound < best - _EXACT) & ((-bound).exp() - (-best).exp() > self.slack[video])

    def _close(self, video: Tensor, bound: Tensor) -> None:
        self.closed = self.closed.scatter_reduce(0, video, bound, "amin")

    def _split(self, nodes: Nodes) -> Nodes:
        """Bound each node, and give back its children where it may still hold something better."""
        _, count, leaf = self._left(nodes)
        self._settle(nodes.where(leaf), (count > 0)[leaf])
        nodes, count = nodes.where(~leaf), count[~leaf]
        free = nodes.fixed == 0
        if not len(nodes):
            return nodes
        relaxed = self._relax(nodes, free, count)
        weights = self.equals.earliest(nodes.video, relaxed.weights + (nodes.fixed == _IN))
        self._round(nodes, free, count, weights)
        # Subtrees that forcing one candidate in or out makes hopeless are closed, and the opposite is settled.
        into, out_of = _cost_of_forcing(relaxed.slopes, count)
        fixed = nodes.fixed.clone()
        for cost, settled in ((into, _OUT), (out_of, _IN)):
            bound = relaxed.bound[:, None] + cost
            hopeless = free & ~self._worth(nodes.video[:, None].expand_as(bound), bound)
            hopeless &= self._worth(nodes.video, relaxed.bound)[:, None]  # else the whole node is closed later
            self._close(nodes.video[:, None].expand_as(bound)[hopeless], bound[hopeless])
            fixed[hopeless] = settled
        bound = torch.maximum(nodes.bound, relaxed.bound)
        return self._branch(Nodes(nodes.video, fixed, bound), weights)

    def _settle(self, leaves: Nodes, takes_rest: Tensor) -> None:
        """Nodes with one subset left."""
        chosen = (leaves.fixed == _IN) | ((leaves.fixed == 0) & takes_rest[:, None])
        value = loss_of(self.loss.at(leaves.video), chosen)
        self.best.offer(leaves.video, chosen, value)
        self._close(leaves.video, value)

    def _relax(self, nodes: Nodes, free: Tensor, count: Tensor) -> Relaxed:
        """Solve the nodes' relaxations on their free candidates alone, which are few after a while."""
        width = int(free.sum(1).max())
        where = free.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]  # [M, F]
        part = self.loss.at(nodes.video)
        base = torch.einsum("mt,mtk->mk", (nodes.fixed == _IN).to(part.rows.dtype), part.rows)
        enough = self.best.loss[nodes.video] - _EXACT
        rows = part.rows.gather(1, where[..., None].expand(-1, -1, part.rows.shape[2]))
        small = relax(ClipLoss(rows, part.weights), base, free.gather(1, where), count, enough, _EXACT / 4)
        weights = torch.zeros_like(free, dtype=base.dtype).scatter_(1, where, small.weights)
        slopes = torch.full_like(weights, float("inf")).scatter_(1, where, small.slopes)
        return Relaxed(weights, small.bound, slopes)

    def _round(self, nodes: Nodes, free: Tensor, count: Tensor, weights: Tensor) -> None:
        """Take the largest weights of each node, the best of each video improved by swaps."""
        order = weights.masked_fill(~free, -1.0).argsort(dim=1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        chosen = (nodes.fixed == _IN) | (rank < count[:, None])
        values = loss_of(self.loss.at(nodes.video), chosen)
        pick = _first_of_each(nodes.video, values)
        video = nodes.video[pick]
        part = self.loss.at(video)
        better = improve_by_swaps(part, chosen[pick], self.real[video])
        self.best.offer(video, better, loss_of(part, better))

    def _branch(self, nodes: Nodes, weights: Tensor) -> Nodes:
        """Two children of each node, by its most undecided candidate; a node with one subset left stays as it is."""
        leaf = self._left(nodes)[2]
        parents = nodes.where(~leaf)
        undecided = (weights - 0.5).abs().masked_fill(nodes.fixed != 0, float("inf"))[~leaf].argmin(1, keepdim=True)
        # Of equal candidates the later go out with it, and the earlier come in with it.
        group, rank = self.equals.group[parents.video], self.equals.rank[parents.video]
        fellow, place = group == group.gather(1, undecided), rank.gather(1, undecided)
        into = parents.fixed.masked_fill(fellow & (rank <= place), _IN)
        out = parents.fixed.masked_fill(fellow & (rank >= place), _OUT)
        children = nodes.where(leaf).and_also(*(Nodes(parents.video, side, parents.bound) for side in (into, out)))
        number, count, _ = self._left(children)
        return children.where((count >= 0) & (count <= number))  # others hold no subset

    def _left(self, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor]:
        """Free candidates [M], how many of them must be taken [M], and whether that leaves one subset only [M]."""
        number, count = (nodes.fixed == 0).sum(1), self.num_frames - (nodes.fixed == _IN).sum(1)
        return number, count, (count == 0) | (count == number)


def _equal_rows(rows: Tensor) -> Tensor:
    """Which candidates [B, T, K] are the same in every number: [B, T, T]. Few are, which a few numbers tell of most."""
    some = rows[..., :_FEW]
    same = (some[:, :, None] == some[:, None]).all(-1)
    at_once = max(1, _MAX_NUMBERS // rows.shape[2])
    for pairs in same.tril(-1).nonzero().split(at_once):
        video, one, other = pairs.unbind(1)
        equal = (rows[video, one] == rows[video, other]).all(-1)
        same[video, one, other] = same[video, other, one] = equal
    return same


def _cost_of_forcing(slopes: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """How much the tangent's minimum rises when a candidate [M, T] must be in, and when it must be out."""
    ranked = slopes.sort(dim=1).values
    last_in, first_out = ranked.gather(1, count[:, None] - 1), ranked.gather(1, count[:, None])
    return (slopes - last_in).clamp_min(0), (first_out - slopes).clamp_min(0)


def _first_of_each(video: Tensor, key: Tensor) -> Tensor:
    """Indices of the row with the lowest key of each video that occurs; of equal keys the first."""
    order = key.argsort(stable=True)
    order = order[video[order].argsort(stable=True)]
    owner = video[order]
    return order[torch.cat([torch.ones_like(owner[:1], dtype=torch.bool), owner[1:] != owner[:-1]])]


def _most_promising(nodes: Nodes, at_once: int) -> Tensor:
    """Which nodes [M] bool to solve next: the lowest bounds of each video, about as many of each."""
    order = nodes.bound.argsort(stable=True)
    order = order[nodes.video[order].argsort(stable=True)]
    sizes = nodes.video[order].unique_consecutive(return_counts=True)[1]
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    rank = torch.arange(len(order), device=order.device) - starts
    taken = torch.zeros_like(nodes.video, dtype=torch.bool)
    taken[order] = rank < max(1, at_once // len(sizes))
    return taken
