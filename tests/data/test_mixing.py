import numpy as np
import pytest
import scipy.stats
import torch
from torchvision.transforms import v2

from vitscale.config.errors import UserError
from vitscale.config.recipe import AugmentConfig
from vitscale.data.mixing import Draws, Mixing, check_pairs
from vitscale.data.order import Order

CLASSES, SIDE = 7, 12
BOTH = AugmentConfig(mixup=0.8, cutmix=1.0)


def examples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return images, torch.randint(CLASSES, (count,), generator=generator)


def mix(config: AugmentConfig, positions: range, seed: int = 5):
    images, labels = examples(64)
    own = torch.tensor(positions)
    return Mixing(config, CLASSES, seed)(images[own], labels[own], own)


def many_draws(config: AugmentConfig, height: int = 32, width: int = 32) -> Draws:
    return Mixing(config, CLASSES, 3).draw(np.arange(20_000), height, width)


@pytest.mark.parametrize("config", [AugmentConfig(mixup=0.8), AugmentConfig(cutmix=1.0), BOTH])
def test_pairs_are_mixed_as_torchvision_mixes_two_examples(config: AugmentConfig):
    images, labels = examples(64)
    mixed, targets = mix(config, range(64))
    draws = Mixing(config, CLASSES, 5).draw(np.arange(32), SIDE, SIDE)

    for pair in range(32):
        own = slice(2 * pair, 2 * pair + 2)
        classes = labels[own]  # the transform tells them from images by identity
        params = {"labels": classes, "batch_size": 2, "lam": float(draws.shares[pair])}
        transform = v2.MixUp(num_classes=CLASSES)
        if draws.is_cut[pair]:
            top, bottom, left, right = draws.boxes[pair].tolist()
            params |= {"box": (left, top, right, bottom), "lam_adjusted": params["lam"]}
            transform = v2.CutMix(num_classes=CLASSES)
        torch.testing.assert_close(mixed[own], transform.transform(images[own], params))
        torch.testing.assert_close(targets[own], transform.transform(classes, params))


def test_a_mixed_batch_is_the_same_in_any_micro_batches():
    mixed, targets = mix(BOTH, range(64))

    for start in range(0, 64, 4):
        part_mixed, part_targets = mix(BOTH, range(start, start + 4))
        assert torch.equal(part_mixed, mixed[start : start + 4])
        assert torch.equal(part_targets, targets[start : start + 4])


def test_draws_change_with_seed_and_pair():
    draws = many_draws(AugmentConfig(mixup=1.0))

    assert len(np.unique(draws.shares)) > 19_990
    assert not torch.equal(mix(BOTH, range(64), seed=5)[0], mix(BOTH, range(64), seed=6)[0])


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 2.0])
def test_shares_follow_the_beta_distribution(alpha: float):
    shares = many_draws(AugmentConfig(mixup=alpha)).shares

    assert scipy.stats.kstest(shares, scipy.stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_share_of_cutmix_is_the_area_that_stays():
    draws = many_draws(AugmentConfig(cutmix=1.0), height=20, width=30)
    top, bottom, left, right = draws.boxes.T

    assert draws.is_cut.all()
    assert (top.min(), left.min(), bottom.max(), right.max()) == (0, 0, 20, 30)
    np.testing.assert_allclose(draws.shares, 1 - (bottom - top) * (right - left) / 600)


def test_switch_prob_is_the_part_of_cutmix():
    config = AugmentConfig(mixup=0.8, cutmix=1.0, mix_switch_prob=0.3)

    assert many_draws(config).is_cut.mean() == pytest.approx(0.3, abs=0.02)
    assert not many_draws(AugmentConfig(mixup=0.8)).is_cut.any()


def test_mixing_keeps_the_type_of_the_images():
    images, labels = examples(4)

    mixed, targets = Mixing(BOTH, CLASSES, 0)(images.bfloat16(), labels, torch.arange(4))

    assert (mixed.dtype, targets.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(targets.sum(1), torch.ones(4))


@pytest.mark.parametrize(
    ("lanes", "world_size"), [(16, 1), (16, 2), (16, 8), (3, 1), (8, 4), (1, 2)]
)
def test_pairs_that_meet_are_accepted(lanes: int, world_size: int):
    check_pairs(Order([400], seed=0, global_batch=48, lanes=lanes), world_size, 6)


@pytest.mark.parametrize(("lanes", "world_size"), [(16, 16), (4, 4), (6, 4)])
def test_pairs_that_ranks_part_are_refused(lanes: int, world_size: int):
    order = Order([400], seed=0, global_batch=48, lanes=lanes)

    with pytest.raises(UserError, match=rf"multiple of {2 * world_size} that divides"):
        check_pairs(order, world_size, 2)


def test_odd_micro_batches_are_refused():
    with pytest.raises(UserError, match=r"micro_batch = 3 must be even"):
        check_pairs(Order([400], seed=0, global_batch=48, lanes=16), 1, 3)
