import pytest

from vitscale.config.duration import Duration


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("60steps", 60, "steps"),
        ("1step", 1, "steps"),
        ("500_000 steps", 500_000, "steps"),
        ("3epochs", 3, "epochs"),
        ("0.5epochs", 0.5, "epochs"),
        ("1.2e9examples", 1_200_000_000, "examples"),
        (" 5% ", 5, "%"),
        ("0steps", 0, "steps"),
    ],
)
def test_parse_reads_a_number_and_a_unit(text, value, unit):
    assert Duration.parse(text) == Duration(value, unit)


@pytest.mark.parametrize(
    "text", ["", "60", "steps", "60 weeks", "-1steps", "1e3", "nan steps", "1steps2", "_1steps"]
)
def test_parse_refuses_what_is_no_duration_and_shows_how(text):
    with pytest.raises(ValueError, match='such as "60steps"'):
        Duration.parse(text)


@pytest.mark.parametrize("text", ["1.5steps", "0.1examples"])
def test_parse_refuses_fractions_of_what_is_counted(text):
    with pytest.raises(ValueError, match="must be a whole number"):
        Duration.parse(text)


def test_parse_refuses_more_than_a_number_can_hold():
    with pytest.raises(ValueError, match="too long"):
        Duration.parse("1e999epochs")


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("60steps", 60),
        ("1epochs", 15),  # 1,438 / 96 = 14.98: the last, partial batch counts
        ("60epochs", 899),
        ("96examples", 1),
        ("97examples", 2),
        ("5%", 3),  # of 60 steps
        ("4%", 3),  # 2.4 of them, rounded up
        ("0%", 0),
    ],
)
def test_steps_counts_once_and_rounds_up(text, steps):
    duration = Duration.parse(text)

    assert duration.steps(num_samples=1438, global_batch=96, total_steps=60) == steps


def test_steps_does_not_round_an_exact_product_up():
    # 0.1 * 30 is 3.0000000000000004 in binary.
    assert Duration.parse("0.1epochs").steps(num_samples=30, global_batch=1) == 3


def test_steps_of_a_percentage_needs_the_length_of_the_run():
    with pytest.raises(ValueError, match=r"5%: a percentage of what\?"):
        Duration.parse("5%").steps(num_samples=10, global_batch=1)


@pytest.mark.parametrize("text", ["60steps", "0.5epochs", "5%"])
def test_duration_writes_itself_the_way_it_is_read(text):
    assert str(Duration.parse(text)) == text
