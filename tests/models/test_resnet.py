import pytest
import torch
from torch.nn import functional as F

from vitscale.models import create_model
from vitscale.models.resnet import GroupNormAct, SameMaxPool2d, StdConv2d


def test_convolution_ignores_shift_and_scale_of_its_weight():
    torch.manual_seed(0)
    conv = StdConv2d(8, 4, 3)
    x = torch.randn(2, 8, 6, 6)
    before = conv(x)

    with torch.no_grad():
        conv.weight.mul_(3.0).add_(0.7)

    torch.testing.assert_close(conv(x), before, rtol=1e-4, atol=1e-4)
    weight = conv.weight
    standard = (weight - weight.mean((1, 2, 3), True)) / weight.std((1, 2, 3), False, True)
    torch.testing.assert_close(before, F.conv2d(x, standard, padding=1), rtol=1e-4, atol=1e-4)


def test_convolution_standardises_in_float32():
    torch.manual_seed(0)
    conv = StdConv2d(64, 32, 1).bfloat16()
    x = torch.eye(64).view(64, 64, 1, 1).bfloat16()

    kernel = conv(x).float().view(64, 32)

    # Rounded once, at the end: bfloat16 has 8 bits.
    assert kernel.mean(0).abs().max() < 5e-3
    assert (kernel.std(0, correction=0) - 1).abs().max() < 5e-3


@pytest.mark.parametrize(("side", "expected"), [(8, 4), (7, 4), (9, 5)])
def test_same_padding_puts_the_odd_row_behind(side, expected):
    image = torch.zeros(1, 1, side, side)
    image[..., -1, -1] = 1
    conv = StdConv2d(1, 1, 3, stride=2, same=True)

    assert conv(image).shape[-1] == expected
    assert SameMaxPool2d()(image).shape[-1] == expected
    # An even side is padded behind only, so the first window starts at the first pixel.
    first = torch.zeros(1, 1, side, side)
    first[..., 2, 2] = 1
    assert SameMaxPool2d()(first)[..., 0, 0].item() == (1 if side % 2 == 0 else 0)


def test_group_norm_can_start_silent():
    x = torch.randn(2, 64, 3, 3)

    assert not GroupNormAct(64, act=False, zero_init=True)(x).any()
    assert (GroupNormAct(64)(x) >= 0).all()
    assert (GroupNormAct(64, act=False)(x) < 0).any()


def test_resnet_starts_with_a_silent_classifier_and_its_bias():
    model = create_model("R26x1", num_classes=3, head_bias=-10.0)

    assert (model(torch.randn(1, 3, 32, 32)) == -10).all()


def test_resnet_does_not_depend_on_the_rest_of_the_batch():
    torch.manual_seed(0)
    model = create_model("R26x1", num_classes=0).train()
    images = torch.randn(3, 3, 32, 32)

    together = model(images)

    torch.testing.assert_close(together[:1], model(images[:1]), rtol=1e-4, atol=1e-5)
    assert together.shape == (3, model.num_features)


def test_resnet_features_are_what_the_classifier_reads():
    torch.manual_seed(0)
    model = create_model("R26x1", num_classes=3)
    torch.nn.init.normal_(model.head.fc.weight)
    maps = model.forward_features(torch.randn(2, 3, 48, 64))

    features = model.forward_head(maps, pre_logits=True)

    assert maps.shape == (2, 2048, 2, 2)
    torch.testing.assert_close(features, maps.mean((2, 3)))
    expected = F.linear(features, model.head.fc.weight.flatten(1), model.head.fc.bias)
    torch.testing.assert_close(model.forward_head(maps), expected)
