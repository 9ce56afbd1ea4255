import pytest
import torch

from vitscale.training.ema import Ema


def test_update_is_the_textbook_average():
    master = torch.tensor([1.0, 2.0], requires_grad=True)
    ema = Ema([master], 0.9)
    wanted = master.detach().clone()

    for step in range(5):
        with torch.no_grad():
            master += step
        ema.update()
        wanted = 0.9 * wanted + 0.1 * master.detach()

    torch.testing.assert_close(ema.average[0], wanted)


def test_average_of_shares_is_the_share_of_the_average():
    torch.manual_seed(0)
    whole = torch.randn(10)
    shares = list(whole.clone().split(4))
    one, cut = Ema([whole], 0.99), Ema(shares, 0.99)

    for _ in range(3):
        noise = torch.randn(10)
        whole += noise
        for share, part in zip(shares, noise.split(4), strict=True):
            share += part
        one.update()
        cut.update()

    assert torch.equal(torch.cat(cut.average), one.average[0])


def test_in_place_lends_the_average_and_gives_the_weights_back():
    master = torch.tensor([1.0, 2.0])
    ema = Ema([master], 0.5)
    master += 2
    ema.update()

    with ema.in_place():
        assert torch.equal(master, torch.tensor([2.0, 3.0]))
    assert torch.equal(master, torch.tensor([3.0, 4.0]))


def test_load_refuses_another_cut():
    ema = Ema([torch.zeros(4)], 0.5)

    with pytest.raises(ValueError, match=r"\[3\]"):
        ema.load([torch.zeros(3)])
