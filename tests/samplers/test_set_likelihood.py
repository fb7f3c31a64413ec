"""Likelihoods of draws without replacement against permutations, exact fractions, and draws themselves."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations

import pytest
import torch
from torch import Tensor

from sosampler.errors import InvalidArgument
from sosampler.samplers.ocsampler import entropy, plackett_luce_log_prob, sample_without_replacement, set_log_prob


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def whole_weights(num_candidates: int, most: int, seed: int = 0) -> list[int]:
    return torch.randint(1, most + 1, (num_candidates,), generator=generator(seed)).tolist()


def order_log_prob(weights: list[float], order: tuple[int, ...]) -> float:
    """One draw after the other, by hand."""
    left, total = sum(weights), 0.0
    for position in order:
        total += math.log(weights[position] / left)
        left -= weights[position]
    return total


def exact_set_probability(weights: list[int], chosen: list[int]) -> Fraction:
    """The integral of the set's probability in fractions: whole weights make its integrand a sum of powers."""
    powers = {0: 1}  # of the product over the set of (1 − z^w)
    for weight in (weights[position] for position in chosen):
        for power in list(powers):
            powers.setdefault(power + weight, 0)
        powers = {power: factor - powers.get(power - weight, 0) for power, factor in powers.items()}
    left_over = sum(weights) - sum(weights[position] for position in chosen)
    return sum((Fraction(factor * left_over, left_over + power) for power, factor in powers.items()), Fraction(0))


def log_fraction(value: Fraction) -> float:
    return math.log(value.numerator) - math.log(value.denominator)


def batch_of(log_weights: Tensor, rows: int) -> Tensor:
    return log_weights.expand(rows, -1)


class TestOrdered:
    def test_is_one_draw_after_the_other(self) -> None:
        log_weights = normal(1, 6, scale=2.0)
        orders = list(permutations(range(6), 3))
        actual = plackett_luce_log_prob(batch_of(log_weights, len(orders)), torch.tensor(orders))
        weights = log_weights[0].exp().tolist()
        assert actual.tolist() == pytest.approx([order_log_prob(weights, order) for order in orders], rel=1e-12)

    @pytest.mark.parametrize("num_frames", [1, 2, 3, 4])
    def test_all_orders_sum_to_one(self, num_frames: int) -> None:
        orders = torch.tensor(list(permutations(range(4), num_frames)))
        actual = plackett_luce_log_prob(batch_of(normal(1, 4, seed=1), len(orders)), orders)
        assert actual.exp().sum().item() == pytest.approx(1.0, abs=1e-12)

    def test_a_frame_with_all_of_the_weight_leaves_the_rest_in_proportion(self) -> None:
        log_weights = torch.tensor([[900.0, 0.0, math.log(3.0)]], dtype=torch.float64)
        actual = plackett_luce_log_prob(log_weights, torch.tensor([[0, 2]]))
        assert actual.item() == pytest.approx(math.log(3 / 4), abs=1e-12)

    def test_gradient(self) -> None:
        log_weights = normal(2, 5).requires_grad_()
        order = torch.tensor([[3, 0, 4], [1, 2, 0]])
        mask = torch.tensor([[True] * 5, [True, True, True, False, True]])
        assert torch.autograd.gradcheck(lambda x: plackett_luce_log_prob(x, order, mask), log_weights)


class TestSet:
    @pytest.mark.parametrize(("num_candidates", "num_frames"), [(4, 1), (5, 2), (6, 3), (6, 4), (7, 5), (5, 5)])
    def test_is_the_sum_over_all_orders(self, num_candidates: int, num_frames: int) -> None:
        log_weights = normal(4, num_candidates, seed=num_frames, scale=2.0)
        chosen = sample_without_replacement(log_weights, num_frames, generator())
        by_order = torch.stack(
            [plackett_luce_log_prob(log_weights, chosen[:, list(order)]) for order in permutations(range(num_frames))]
        )
        torch.testing.assert_close(set_log_prob(log_weights, chosen), by_order.logsumexp(0), rtol=1e-11, atol=1e-12)

    @pytest.mark.parametrize(("num_candidates", "num_frames"), [(5, 1), (5, 2), (5, 5), (10, 6), (12, 3), (9, 8)])
    @pytest.mark.parametrize("scale", [0.5, 5.0])
    def test_all_subsets_sum_to_one(self, num_candidates: int, num_frames: int, scale: float) -> None:
        every = torch.combinations(torch.arange(num_candidates), num_frames)
        log_weights = normal(1, num_candidates, seed=num_candidates, scale=scale)
        actual = set_log_prob(batch_of(log_weights, len(every)), every)
        assert actual.exp().sum().item() == pytest.approx(1.0, abs=1e-11)

    @pytest.mark.parametrize(
        ("num_candidates", "num_frames", "most"),
        [(10, 6, 9), (12, 8, 10**9), (30, 8, 50), (60, 16, 20), (100, 32, 12), (100, 99, 6), (101, 100, 3)],
    )
    def test_agrees_with_exact_fractions(self, num_candidates: int, num_frames: int, most: int) -> None:
        for seed in range(2):
            weights = whole_weights(num_candidates, most, seed)
            chosen = torch.randperm(num_candidates, generator=generator(seed))[:num_frames]
            wanted = log_fraction(exact_set_probability(weights, chosen.tolist()))
            actual = set_log_prob(torch.tensor([weights], dtype=torch.float64).log(), chosen[None])
            assert actual.item() == pytest.approx(wanted, rel=1e-12, abs=1e-12)

    def test_equal_weights_make_all_subsets_equally_likely(self) -> None:
        actual = set_log_prob(torch.full((1, 100), -7.0, dtype=torch.float64), torch.arange(32)[None])
        assert actual.item() == pytest.approx(-math.log(math.comb(100, 32)), rel=1e-13)

    @pytest.mark.parametrize("ahead", [10.0, 30.0, 100.0, 1000.0])
    def test_a_set_with_nearly_all_or_nearly_none_of_the_weight(self, ahead: float) -> None:
        log_weights = torch.tensor([[ahead] * 3 + [0.0] * 3], dtype=torch.float64).expand(2, -1).clone()
        log_weights.requires_grad_()
        actual = set_log_prob(log_weights, torch.tensor([[0, 1, 2], [3, 4, 5]]))
        slopes = torch.autograd.grad(actual.sum(), log_weights)[0]
        # To first order in exp(−ahead): one of the light ones comes before the last heavy one; and each of the light
        # ones comes before all heavy ones, where the waiting time of the first heavy one is Exp(3).
        light = math.exp(-ahead)
        near = [-3 * light * (1 + 1 / 2 + 1 / 3), -3 * ahead + math.log(math.factorial(3) / 3**3)]
        assert actual.tolist() == pytest.approx(near, rel=1e-3, abs=1e-13)
        assert slopes[0].tolist() == pytest.approx([-near[0] / 3] * 3 + [near[0] / 3] * 3, rel=1e-3, abs=1e-13)
        assert slopes[1].tolist() == pytest.approx([-1.0] * 3 + [1.0] * 3, rel=1e-3)

    @pytest.mark.parametrize("num_frames", [1, 7, 100])
    def test_everything_chosen_is_certain(self, num_frames: int) -> None:
        log_weights = normal(3, num_frames, scale=20.0).requires_grad_()
        actual = set_log_prob(log_weights, torch.arange(num_frames).expand(3, -1))
        actual.sum().backward()
        assert actual.tolist() == [0.0] * 3
        assert log_weights.grad is not None
        assert log_weights.grad.abs().max() == 0

    def test_never_positive(self) -> None:
        log_weights = normal(500, 12, scale=40.0)
        assert set_log_prob(log_weights, sample_without_replacement(log_weights, 6, generator())).max() <= 0

    @pytest.mark.parametrize("scale", [0.3, 4.0])
    def test_gradient_and_its_gradient(self, scale: float) -> None:
        log_weights = normal(3, 6, scale=scale).requires_grad_()
        chosen = torch.tensor([[0, 2, 5], [4, 3, 1], [5, 0, 1]])
        mask = torch.tensor(
            [[True] * 6, [True, True, False, True, True, True], [True, True, False, False, False, True]]
        )
        assert torch.autograd.gradcheck(lambda x: set_log_prob(x, chosen, mask), log_weights, atol=1e-7)
        assert torch.autograd.gradgradcheck(lambda x: set_log_prob(x, chosen, mask), log_weights, atol=1e-6)

    def test_does_not_depend_on_order_nor_on_a_constant(self) -> None:
        log_weights, chosen = normal(4, 9), torch.tensor([[0, 3, 4, 8]] * 4)
        actual = set_log_prob(log_weights, chosen)
        torch.testing.assert_close(set_log_prob(log_weights, chosen.flip(1)), actual, rtol=1e-13, atol=0)
        torch.testing.assert_close(set_log_prob(log_weights + 300, chosen), actual, rtol=1e-11, atol=0)

    def test_many_frames_against_random_orders(self) -> None:
        """P(S) is N! times the mean over random orders of the probability of the order."""
        log_weights = normal(1, 100, seed=3, scale=0.4)
        chosen = torch.randperm(100, generator=generator(4))[:32]
        weights = log_weights[0].exp()
        shuffled = weights[chosen][torch.rand(20_000, 32, generator=generator(5)).argsort(dim=1)]  # [orders, N]
        left = weights.sum() - (shuffled.cumsum(dim=1) - shuffled)
        log_mean = (shuffled / left).log().sum(dim=1)
        shares = (log_mean - log_mean.max()).exp()
        error = (shares.std() / shares.mean() / math.sqrt(len(shares))).item()  # of the logarithm
        wanted = (shares.mean().log() + log_mean.max()).item() + math.lgamma(33)
        assert error < 0.02
        assert set_log_prob(log_weights, chosen[None]).item() == pytest.approx(wanted, abs=4 * error)

    def test_many_frames_against_draws(self) -> None:
        log_weights = torch.cat([torch.full((1, 32), 7.0), torch.zeros(1, 68)], dim=1) + normal(1, 100, scale=0.2)
        probability = set_log_prob(log_weights, torch.arange(32)[None]).exp().item()
        draws = sample_without_replacement(batch_of(log_weights, 10_000), 32, generator())
        share = (draws < 32).all(dim=1).double().mean().item()
        assert 0.1 < probability < 0.9
        assert share == pytest.approx(probability, abs=4 * math.sqrt(probability * (1 - probability) / 10_000))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_low_precision_comes_back_as_float32(self, dtype: torch.dtype) -> None:
        log_weights = normal(2, 8).to(dtype).requires_grad_()
        chosen = torch.tensor([[0, 1, 5], [2, 3, 7]])
        actual = set_log_prob(log_weights, chosen)
        actual.sum().backward()
        assert actual.dtype == torch.float32
        assert log_weights.grad is not None
        assert log_weights.grad.dtype == dtype
        torch.testing.assert_close(actual.double(), set_log_prob(log_weights.double(), chosen), rtol=1e-6, atol=1e-6)


class TestMask:
    def test_masked_candidates_do_not_count_nor_get_a_gradient(self) -> None:
        log_weights = normal(2, 5)
        padded = torch.cat([log_weights, torch.full((2, 3), math.nan, dtype=torch.float64)], dim=1).requires_grad_()
        mask = torch.arange(8).expand(2, -1) < 5
        chosen = torch.tensor([[4, 0, 1], [2, 3, 0]])
        for log_prob in (plackett_luce_log_prob, set_log_prob):
            torch.testing.assert_close(log_prob(padded, chosen, mask), log_prob(log_weights, chosen))
        torch.testing.assert_close(entropy(padded, mask), entropy(log_weights))
        total = (
            plackett_luce_log_prob(padded, chosen, mask) + set_log_prob(padded, chosen, mask) + entropy(padded, mask)
        )
        slopes = torch.autograd.grad(total.sum(), padded)[0]
        assert slopes[:, :5].isfinite().all()
        assert slopes[:, 5:].abs().max() == 0

    def test_all_real_candidates_chosen_is_certain(self) -> None:
        log_weights = normal(2, 5).requires_grad_()
        mask = torch.tensor([[True, False, True, True, False], [True] * 5])
        chosen = torch.tensor([[0, 2, 3], [0, 2, 3]])
        actual = set_log_prob(log_weights, chosen, mask)
        slopes = torch.autograd.grad(actual.sum(), log_weights)[0]
        assert actual[0] == 0
        assert actual[1] < -0.1
        assert slopes[0].abs().max() == 0
        assert slopes[1].abs().min() > 0

    def test_is_never_drawn(self) -> None:
        mask = torch.rand(2000, 9, generator=generator()) < 0.5
        mask[:, 3:6] = True
        log_weights = torch.where(mask, normal(2000, 9), 50.0)
        drawn = sample_without_replacement(log_weights, 3, generator(), mask)
        assert mask.gather(1, drawn).all()


class TestDraws:
    def test_orders_come_as_often_as_they_are_likely(self) -> None:
        log_weights = normal(1, 4, seed=2)
        orders = torch.tensor(list(permutations(range(4), 2)))
        draws = sample_without_replacement(batch_of(log_weights, 40_000), 2, generator())
        shares = (draws[:, None] == orders).all(dim=2).double().mean(dim=0)
        wanted = plackett_luce_log_prob(batch_of(log_weights, len(orders)), orders).exp()
        assert shares.sum() == 1
        assert ((shares - wanted).abs() < 4.5 * (wanted * (1 - wanted) / 40_000).sqrt()).all()

    def test_same_generator_same_draws(self) -> None:
        log_weights = normal(50, 10)
        first = sample_without_replacement(log_weights, 6, generator(1))
        assert torch.equal(first, sample_without_replacement(log_weights, 6, generator(1)))
        assert not torch.equal(first, sample_without_replacement(log_weights, 6, generator(2)))
        assert all(len(set(row)) == 6 for row in first.tolist())

    def test_all_can_be_drawn_but_no_more(self) -> None:
        assert sample_without_replacement(normal(3, 5), 5, generator()).sort(dim=1).values.tolist() == [[*range(5)]] * 3
        with pytest.raises(InvalidArgument, match="num_frames=6 is more than the 5 real candidates"):
            sample_without_replacement(normal(3, 5), 6)
        mask = torch.tensor([[True, True, False]])
        with pytest.raises(InvalidArgument, match="num_frames=3 is more than the 2 real candidates"):
            sample_without_replacement(normal(1, 3), 3, mask=mask)


class TestEntropy:
    def test_of_known_distributions(self) -> None:
        log_weights = torch.tensor([[5.0] * 4, [0.0, 0.0, -math.inf, -math.inf], [900.0, 0.0, 0.0, 0.0]])
        assert entropy(log_weights).tolist() == pytest.approx([math.log(4), math.log(2), 0.0])

    def test_agrees_with_torch(self) -> None:
        log_weights = normal(5, 7, scale=3.0)
        torch.testing.assert_close(entropy(log_weights), torch.distributions.Categorical(logits=log_weights).entropy())

    def test_gradient(self) -> None:
        mask = torch.tensor([[True, True, False, True], [True] * 4])
        assert torch.autograd.gradcheck(lambda x: entropy(x, mask), normal(2, 4).requires_grad_())


@pytest.mark.parametrize("log_prob", [plackett_luce_log_prob, set_log_prob])
class TestRefused:
    @pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 6), (2, 0)])
    def test_shapes(self, log_prob, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(InvalidArgument, match=r"must be \[2, N\] with N from 1 to 5"):
            log_prob(normal(2, 5), torch.zeros(shape, dtype=torch.int64))

    @pytest.mark.parametrize("row", [[1, 1], [0, 5], [-1, 2]])
    def test_positions(self, log_prob, row: list[int]) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(InvalidArgument, match=r"must be different and in 0\.\.4"):
            log_prob(normal(1, 5), torch.tensor([row]))

    def test_frames_without_weight(self, log_prob) -> None:  # type: ignore[no-untyped-def]
        mask = torch.tensor([[True, True, False]])
        with pytest.raises(InvalidArgument, match="a chosen frame is masked"):
            log_prob(normal(1, 3), torch.tensor([[0, 2]]), mask)
        with pytest.raises(InvalidArgument, match="not finite"):
            log_prob(torch.tensor([[0.0, math.nan, 1.0]]), torch.tensor([[0, 1]]))
        with pytest.raises(InvalidArgument, match="shape \\[3\\]"):
            log_prob(torch.zeros(3), torch.tensor([[0, 1]]))
