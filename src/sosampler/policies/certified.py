"""Certified search for pi_o of classifiers that average logits, where enumeration ends.

Such a classifier sees only the sum of the chosen rows, and minus the log confidence is a convex function of that sum.
So letting every candidate in by a weight between 0 and 1 gives a convex problem whose optimum no subset can beat; a
primal-dual interior-point method solves it in a dozen Newton steps for a whole batch. Relax, round, improve by swaps:
that gives a subset and a bound that no subset can exceed. Where the two are too far apart, branch and bound closes the
gap, within a budget of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sosampler._util.validation import check_float, check_int, one_of
from sosampler.policies.optimal import ClipLoss, OptimalChoice, clip_loss, usable_logits
from sosampler.samplers.sosampler import ACTIVATIONS, check_labels, log_confidence, real_candidates, top_n

# Numbers of the largest table at a time (32 MiB of float64; a handful of such are alive together).
_MAX_NUMBERS = 2**22

_MAX_STEPS = 40


class Relaxed(NamedTuple):
    weights: Tensor  # [M, F] solution, 0 where not free
    bound: Tensor  # [M] no choice of `count` free candidates has a lower loss
    slopes: Tensor  # [M, F] derivative of the loss by weight at the point that gave the bound; +inf where not free


def relax(loss: ClipLoss, base: Tensor, free: Tensor, count: Tensor, enough: Tensor, tolerance: float) -> Relaxed:
    """Minimise loss(base + sum of w * rows) over 0 <= w <= 1 of the free candidates with sum w = count.

    base [M, K] is the sum of what is chosen already; 0 < count < number of free ones in every row. Every step yields a
    bound that holds whatever the steps' quality: the loss is above its tangent, whose minimum is a sum of `count`
    slopes. A row is done when bound and value lie within `tolerance`, or the bound reaches `enough` [M].
    """
    loss = ClipLoss(loss.rows * free[..., None], loss.weights)
    w = free * (count.to(base.dtype) / free.sum(1))[:, None]
    relaxed = Relaxed(w.clone(), torch.full_like(base[:, 0], -torch.inf), torch.zeros_like(w))
    rows = torch.arange(len(base), device=base.device)  # those that are not done
    state: _State | None = None
    for _ in range(_MAX_STEPS):
        total = base + torch.einsum("mf,mfk->mk", w, loss.rows)
        value = loss.value(total)
        slopes = torch.einsum("mfk,mk->mf", loss.rows, loss.gradient(total))
        ranked = slopes.masked_fill(~free, torch.inf)
        lowest = ranked.sort(dim=1).values.cumsum(1).gather(1, count[:, None] - 1)[:, 0]  # sum of the `count` lowest
        bound = value - (slopes * w).sum(1) + lowest
        better = bound > relaxed.bound[rows]
        relaxed.bound[rows[better]] = bound[better]
        relaxed.slopes[rows[better]] = ranked[better]
        relaxed.weights[rows] = w
        going = (value - relaxed.bound[rows] > tolerance) & (relaxed.bound[rows] < enough)
        left = int(going.sum())
        if not left:
            break
        if state is None:
            state = _first_state(w, slopes, ranked, free, count)
        if 2 * left < len(rows):  # leave behind what is done
            rows, base, free, count, enough = (part[going] for part in (rows, base, free, count, enough))
            total, slopes, loss = total[going], slopes[going], loss.at(going)
            state = _State(*(part[going] for part in state))
        state = _newton(loss, total, slopes, free, count, state)
        w = state.w
    return relaxed


class _State(NamedTuple):
    w: Tensor  # [M, F]
    low: Tensor  # multipliers of w >= 0 [M, F]
    high: Tensor  # of w <= 1 [M, F]
    level: Tensor  # of the sum [M, 1]


def _first_state(w: Tensor, slopes: Tensor, ranked: Tensor, free: Tensor, count: Tensor) -> _State:
    """Multipliers that fit the first slopes: those above the `count`-th lowest want out, those below want in."""
    level = -ranked.sort(dim=1).values.gather(1, count[:, None] - 1)
    over = (slopes + level) * free
    spread = over.abs().sum(1, keepdim=True) / free.sum(1, keepdim=True) + 1e-9
    return _State(w, (over.clamp_min(0) + spread) * free, ((-over).clamp_min(0) + spread) * free, level)


def _newton(loss: ClipLoss, total: Tensor, slopes: Tensor, free: Tensor, count: Tensor, state: _State) -> _State:
    """One primal-dual step towards a tenth of the present complementarity."""
    w, low, high, level = state
    inside = free.to(w.dtype)
    room, gap = w.masked_fill(~free, 1.0), (1 - w).masked_fill(~free, 1.0)
    centre = 0.1 * ((w * low + gap * high * inside).sum(1) / (2 * free.sum(1)))[:, None]
    diagonal = (low / room + high / gap).masked_fill(~free, 1.0)
    right = (-(slopes + level) + centre / room - centre / gap) * inside
    solved = _solve(loss.hessian_factor(total), diagonal, torch.stack([right, inside], -1))
    missing = count[:, None] - w.sum(1, keepdim=True)
    step_level = (solved[..., 0].sum(1, keepdim=True) - missing) / solved[..., 1].sum(1, keepdim=True)
    step = (solved[..., 0] - step_level * solved[..., 1]) * inside
    step_low = (centre / room - low - low / room * step) * inside
    step_high = (centre / gap - high + high / gap * step) * inside
    primal = torch.minimum(_longest(room, step), _longest(gap, -step))
    dual = torch.minimum(_longest(low, step_low), _longest(high, step_high))
    length = torch.minimum(primal, dual)
    # A system too ill-conditioned to solve gives no step; the bound so far holds.
    length = length.masked_fill(~(step.isfinite().all(1, keepdim=True) & step_level.isfinite()), 0.0)
    steps = zip(state, (step, step_low, step_high, step_level), strict=True)
    return _State(*(old + torch.where(length > 0, length * new, 0.0) for old, new in steps))


def _longest(value: Tensor, step: Tensor) -> Tensor:
    """How far [M, 1] the step can be followed, at most wholly, before a value [M, F] is at 1 % of itself."""
    ratio = torch.where(step < 0, -0.99 * value / step, torch.ones_like(value))
    return ratio.amin(1, keepdim=True).clamp_max(1.0)


def _solve(factor: Tensor, diagonal: Tensor, right: Tensor) -> Tensor:
    """(diag + M M')^-1 right for factor M [M, F, K]; in K dimensions where that is the smaller system."""
    candidates, classes = factor.shape[1:]
    if classes < candidates:
        scaled = factor / diagonal[..., None]
        small = scaled.mT @ factor
        small.diagonal(dim1=1, dim2=2).add_(1.0)
        plain = right / diagonal[..., None]
        root = torch.linalg.cholesky_ex(small).L
        return plain - scaled @ torch.cholesky_solve(factor.mT @ plain, root)
    system = factor @ factor.mT
    system.diagonal(dim1=1, dim2=2).add_(diagonal)
    return torch.cholesky_solve(right, torch.linalg.cholesky_ex(system).L)


# How many of those inside and of those outside are paired in one step, the best ones by the tangent. Exchanges that
# do not improve the tangent cannot improve the loss, which is convex and above it.
_SIDE = 16
MAX_SWAPS = _SIDE**2
_MIN_GAIN = 1e-13  # below is rounding


def loss_of(loss: ClipLoss, chosen: Tensor) -> Tensor:
    """Loss of the subsets chosen [B, T] bool -> [B]."""
    return loss.value(torch.einsum("bt,btk->bk", chosen.to(loss.rows.dtype), loss.rows))


def improve_by_swaps(loss: ClipLoss, chosen: Tensor, free: Tensor, max_steps: int = 1000) -> Tensor:
    """Follow the best exchange of a chosen for another free candidate until none helps; chosen, free bool [B, T]."""
    chosen = chosen.clone()
    active = torch.arange(len(chosen), device=chosen.device)
    for _ in range(max_steps):
        if not len(active):
            break
        leave, enter, gain = _best_swap(loss.at(active), chosen[active], free[active])
        helps = gain > _MIN_GAIN
        active, leave, enter = active[helps], leave[helps], enter[helps]
        chosen[active, leave] = False
        chosen[active, enter] = True
    return chosen


def _best_swap(loss: ClipLoss, chosen: Tensor, free: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the candidates that leave and enter [B], and the decrease of the loss."""
    rows = loss.rows
    total = torch.einsum("bt,btk->bk", chosen.to(rows.dtype), rows)
    slopes = torch.einsum("btk,bk->bt", rows, loss.gradient(total))
    # Best exchanges by tangent pair one of the highest slopes inside with one of the lowest outside.
    side = min(_SIDE, rows.shape[1])
    leaving = slopes.masked_fill(~(chosen & free), -torch.inf).topk(side, dim=1)
    entering = slopes.masked_fill(chosen | ~free, torch.inf).topk(side, dim=1, largest=False)
    promise = leaving.values[:, :, None] - entering.values[:, None, :]  # [B, side, side], -inf where impossible
    width = rows.shape[2]
    out = rows.gather(1, leaving.indices[..., None].expand(-1, -1, width))
    new = rows.gather(1, entering.indices[..., None].expand(-1, -1, width))
    after = loss.value(total[:, None, None] - out[:, :, None] + new[:, None])  # [B, side, side]
    gain = (loss.value(total)[:, None, None] - after).masked_fill(~(promise > 0), -torch.inf).flatten(1)
    best = gain.argmax(1, keepdim=True)
    leave = leaving.indices.gather(1, best // side)[:, 0]
    enter = entering.indices.gather(1, best % side)[:, 0]
    return leave, enter, gain.gather(1, best)[:, 0]


# Nodes solved at a time: enough to hide the cost of a call, few enough that promising ones are solved first.
_MAX_NODES = 512
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

    def update(self, videos: Tensor, chosen: Tensor, loss: Tensor) -> None:
        """Take subsets [M, T] that are better than what is known of their videos [M]."""
        pick = (_rank_of(videos, loss) == 0) & (loss < self.loss[videos])
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


class Nodes(NamedTuple):
    """Parts of the search: candidates that are in (1), out (-1) or undecided (0), and a lower bound on the loss."""

    video: Tensor  # [M]
    fixed: Tensor  # [M, T] int8
    bound: Tensor  # [M]

    def where(self, which: Tensor) -> Nodes:
        return Nodes(*(part[which] for part in self))

    def and_also(self, *others: Nodes) -> Nodes:
        return Nodes(*map(torch.cat, zip(self, *others, strict=True)))


class BranchAndBound:
    """Searches for the subset of lowest loss and a bound on it; `best` is improved in place.

    Candidates with equal rows are interchangeable, so only subsets that take the earliest of them are searched.
    """

    def __init__(self, loss: ClipLoss, real: Tensor, num_frames: int, best: Incumbent, equals: Equals) -> None:
        self.loss, self.num_frames, self.best, self.equals = loss, num_frames, best, equals
        self.real = real  # [B, T]
        self.slack = torch.zeros_like(best.loss)  # gap in confidence that is good enough by now
        rows = loss.rows
        self.size = max(1, min(_MAX_NODES, _MAX_NUMBERS // (rows.shape[1] * rows.shape[2])))
        self.closed = best.loss.clone()  # lowest bound of all parts that are done with, the best subset included

    def run(self, tolerance: float, max_nodes: int) -> Tensor:
        """A loss [B] that no subset of real candidates is below.

        A video ends when its best subset is proven, when after some nodes the gap is at most `tolerance` in
        confidence, or after `max_nodes`.
        """
        videos = torch.arange(len(self.real), device=self.real.device)
        fixed = torch.where(self.real, 0, _OUT).to(torch.int8)
        open_nodes = Nodes(videos, fixed, torch.full_like(self.best.loss, -torch.inf))
        spent = torch.zeros_like(videos)
        while len(open_nodes.video):
            # The lowest bounds of each video, about as many of each.
            rank = _rank_of(open_nodes.video, open_nodes.bound)
            taken = rank < max(1, self.size // int((rank == 0).sum()))
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
        if not len(nodes.video):
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
        self.best.update(leaves.video, chosen, value)
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
        slopes = torch.full_like(weights, torch.inf).scatter_(1, where, small.slopes)
        return Relaxed(weights, small.bound, slopes)

    def _round(self, nodes: Nodes, free: Tensor, count: Tensor, weights: Tensor) -> None:
        """Take the largest weights of each node, the best of each video improved by swaps."""
        order = weights.masked_fill(~free, -1.0).argsort(dim=1, descending=True, stable=True)
        chosen = (nodes.fixed == _IN) | (order.argsort(dim=1) < count[:, None])  # argsort of an order: the ranks
        values = loss_of(self.loss.at(nodes.video), chosen)
        pick = _rank_of(nodes.video, values) == 0
        video = nodes.video[pick]
        part = self.loss.at(video)
        better = improve_by_swaps(part, chosen[pick], self.real[video])
        self.best.update(video, better, loss_of(part, better))

    def _branch(self, nodes: Nodes, weights: Tensor) -> Nodes:
        """Two children of each node, by its most undecided candidate; a node with one subset left stays as it is."""
        leaf = self._left(nodes)[2]
        parents = nodes.where(~leaf)
        undecided = (weights - 0.5).abs().masked_fill(nodes.fixed != 0, torch.inf)[~leaf].argmin(1, keepdim=True)
        # Of equal candidates the later go out with it, and the earlier come in with it.
        group, rank = self.equals.group[parents.video], self.equals.rank[parents.video]
        same, own_rank = group == group.gather(1, undecided), rank.gather(1, undecided)
        into = parents.fixed.masked_fill(same & (rank <= own_rank), _IN)
        out = parents.fixed.masked_fill(same & (rank >= own_rank), _OUT)
        children = nodes.where(leaf).and_also(*(Nodes(parents.video, side, parents.bound) for side in (into, out)))
        number, count, _ = self._left(children)
        return children.where((count >= 0) & (count <= number))  # others hold no subset

    def _left(self, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor]:
        """Free candidates [M], how many of them must be taken [M], and whether that leaves one subset only [M]."""
        number, count = (nodes.fixed == 0).sum(1), self.num_frames - (nodes.fixed == _IN).sum(1)
        return number, count, (count == 0) | (count == number)


def _equal_rows(rows: Tensor) -> Tensor:
    """Which candidates [B, T, K] are the same in every number: [B, T, T]. Few are, and a few numbers rule most out."""
    some = rows[..., :_FEW]
    same = (some[:, :, None] == some[:, None]).all(-1)
    size = max(1, _MAX_NUMBERS // rows.shape[2])
    for pairs in same.tril(-1).nonzero().split(size):
        video, one, other = pairs.unbind(1)
        equal = (rows[video, one] == rows[video, other]).all(-1)
        same[video, one, other] = same[video, other, one] = equal
    return same


def _cost_of_forcing(slopes: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """How much the tangent's minimum rises when a candidate [M, T] must be in, and when it must be out."""
    ranked = slopes.sort(dim=1).values
    last_in, first_out = ranked.gather(1, count[:, None] - 1), ranked.gather(1, count[:, None])
    return (slopes - last_in).clamp_min(0), (first_out - slopes).clamp_min(0)


def _rank_of(video: Tensor, key: Tensor) -> Tensor:
    """How many rows of the same video have a lower key, or an equal one and come before: [M] -> [M]."""
    order = key.argsort(stable=True)
    order = order[video[order].argsort(stable=True)]
    sizes = video[order].unique_consecutive(return_counts=True)[1]
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device) - starts)


def certified_mean_logits(
    logits: Tensor,
    labels: Tensor,
    num_frames: int,
    *,
    activation: str = "softmax",
    mask: Tensor | None = None,
    tolerance: float = 5e-4,
    max_nodes: int = 1000,
) -> OptimalChoice:
    """Search for the subset whose averaged logits [B, T, C] are most confident in the labels, with a bound on others.

    It first tries to prove that the subset is the best; where that takes more than a hundred relaxations a gap of
    `tolerance` in probability is enough, and after `max_nodes` the remaining gap is reported.
    """
    one_of("activation", activation, ACTIVATIONS)
    check_float("tolerance", tolerance, above=0)
    check_int("max_nodes", max_nodes)
    batch, num_candidates, num_classes = logits.shape
    labels = check_labels(labels, batch, num_classes)
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    logits = usable_logits(logits, mask)
    real = torch.ones(batch, num_candidates, dtype=torch.bool, device=logits.device) if mask is None else mask
    per_video = max(num_candidates**2, num_classes * max(num_candidates, MAX_SWAPS))
    chunk = max(1, _MAX_NUMBERS // per_video)
    parts = [
        _search(*part, num_frames, activation, tolerance, max_nodes)
        for part in zip(logits.split(chunk), labels.split(chunk), real.split(chunk), strict=True)
        if len(part[0])
    ]
    if not parts:
        empty = torch.zeros(0, dtype=torch.float64, device=logits.device)
        return OptimalChoice(empty.long().reshape(0, num_frames), empty, empty, "certified")
    positions, value, bound = map(torch.cat, zip(*parts, strict=True))
    return OptimalChoice(positions, value, bound, "certified")


def _search(
    logits: Tensor, labels: Tensor, real: Tensor, num_frames: int, activation: str, tolerance: float, max_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions [B, N], their log confidence [B], and a bound on that of all subsets [B]."""
    loss = clip_loss(logits, labels, num_frames, activation)
    alone = log_confidence(logits, labels, activation)
    start = improve_by_swaps(loss, torch.zeros_like(real).scatter_(1, top_n(alone, num_frames, real), True), real)
    best = Incumbent(start, loss_of(loss, start))
    equals = Equals.of(loss, real)
    bound = BranchAndBound(loss, real, num_frames, best, equals).run(tolerance, max_nodes)
    chosen = equals.earliest(torch.arange(len(real), device=real.device), best.chosen.double()) > 0.5
    positions = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :num_frames].sort(1).values
    value = -loss_of(loss, chosen)
    return positions, value, torch.maximum(value, -bound)
