import pytest

from vitscale.config.augment import AugmentConfig


@pytest.mark.parametrize(
    ("leaves", "text"),
    [
        ({"randaug_magnitude": 9.0}, "augment.randaug_magnitude = 9.0 has no meaning without"),
        (
            {"randaug_ops": 2, "randaug_magnitude": 15.0, "randaug_form": "deit"},
            'randaug_form = "deit" takes 0 to 10',
        ),
        ({"crop_scale": (0.9, 0.1)}, "augment.crop_scale = [0.9, 0.1]: the first value"),
        ({"std": (0.5, 0.0, 0.5)}, "augment.std = [0.5, 0.0, 0.5]: every value"),
    ],
)
def test_contradictions_are_told(leaves, text):
    problems = list(AugmentConfig(**leaves).problems())

    assert len(problems) == 1
    assert text in problems[0]


def test_augreg_s_level_of_no_strength_is_no_contradiction():
    assert list(AugmentConfig(randaug_ops=2).problems()) == []
