import numpy as np
import pytest

from data_prep.images import ImagePolicy
from data_prep.plan import Settings, changed_plan_message, differences, make_plan
from data_prep.sources.build import Listing
from vitscale.config.errors import UserError


class Inputs:
    """A source whose listing is given."""

    kind = "given"

    def __init__(
        self, rows: list[tuple[str, int, int]], classes: tuple[str, ...] = ("a", "b")
    ) -> None:
        self._rows, self._classes = rows, classes

    def listing(self) -> Listing:
        listing = Listing(classes=list(self._classes))
        for row in self._rows:
            listing.add(*row)
        return listing

    def read(self, name: str, num_bytes: int) -> bytes:
        raise AssertionError("a plan reads no input")


def settings(**changes) -> Settings:
    values = {
        "split": "train",
        "seed": 0,
        "shard_bytes": 100_000,
        "check": "header",
        "image": ImagePolicy("keep"),
    }
    return Settings(**{**values, **changes})


ROWS = [(f"{index % 2}/{index}.jpg", 3000 + 7 * index, index % 2) for index in range(500)]


def names(plan) -> list[str]:
    return [item.name for number in range(plan.num_shards) for item in plan.task(number).items]


def test_make_plan_holds_every_input_once():
    plan = make_plan([Inputs(ROWS)], settings())

    assert sorted(names(plan)) == sorted(row[0] for row in ROWS)
    assert plan.task(3).first == sum(len(plan.task(number).items) for number in range(3))


def test_make_plan_does_not_depend_on_the_order_of_the_listing():
    forward, backward = (
        make_plan([Inputs(ROWS)], settings()),
        make_plan([Inputs(ROWS[::-1])], settings()),
    )

    assert names(forward) == names(backward)


def test_make_plan_order_is_pinned():
    # Written down once: another machine, Python or library version must give the same order (P1).
    assert names(make_plan([Inputs(ROWS)], settings()))[:4] == PINNED


PINNED = ["1/245.jpg", "0/236.jpg", "0/384.jpg", "1/199.jpg"]


def test_make_plan_seed_changes_the_order():
    first, second = (names(make_plan([Inputs(ROWS)], settings(seed=seed))) for seed in (0, 1))

    assert first != second
    assert sorted(first) == sorted(second)


def test_make_plan_shuffle_mixes_classes():
    plan = make_plan([Inputs(ROWS)], settings())

    shares = [
        np.mean([item.label for item in plan.task(number).items])
        for number in range(plan.num_shards)
    ]
    assert all(0 < share < 1 for share in shares)


def test_make_plan_shards_are_balanced():
    plan = make_plan([Inputs(ROWS)], settings())

    sizes = [
        sum(item.num_bytes for item in plan.task(number).items) for number in range(plan.num_shards)
    ]
    assert plan.num_shards == 33
    assert max(sizes) < 1.15 * np.mean(sizes)
    assert min(sizes) > 0.85 * np.mean(sizes)


def test_make_plan_giant_input_takes_a_shard_and_loses_nobody():
    plan = make_plan([Inputs([*ROWS, ("0/giant.jpg", 900_000, 0)])], settings())

    assert len(names(plan)) == 501
    assert all(plan.task(number).items for number in range(plan.num_shards))


@pytest.mark.parametrize(
    "changes",
    [
        {"split": "val"},
        {"seed": 1},
        {"shard_bytes": 100_001},
        {"check": "full"},
        {"image": ImagePolicy("resize", 100, 90)},
    ],
)
def test_make_plan_digest_covers_settings(changes):
    assert (
        make_plan([Inputs(ROWS)], settings()).digest
        != make_plan([Inputs(ROWS)], settings(**changes)).digest
    )


def test_make_plan_digest_covers_name_size_and_label():
    digests = {make_plan([Inputs([*ROWS[1:], row])], settings()).digest for row in (
        ROWS[0], ("0/x.jpg", 3000, 0), ("0/0.jpg", 3001, 0), ("0/0.jpg", 3000, 1)
    )}  # fmt: skip

    assert len(digests) == 4


def test_make_plan_without_inputs_is_refused():
    with pytest.raises(UserError, match="hold no inputs"):
        make_plan([Inputs([])], settings())


def test_make_plan_joins_classes_by_name():
    sources = [Inputs([("x", 1, 0), ("y", 1, 1)], ("b", "c")), Inputs([("x", 1, 0)], ("a", "b"))]

    plan = make_plan(sources, settings())

    labels = {(item.source, item.name): item.label for item in plan.task(0).items}
    assert plan.classes == ["a", "b", "c"]
    assert labels == {(0, "x"): 1, (0, "y"): 2, (1, "x"): 0}


def test_differences_name_changed_leaves():
    old = {"a": {"b": 1, "c": [1, 2]}, "sha256": "x", "d": {"sha256": "y"}, "plan_digest": "p"}
    new = {"a": {"b": 2, "c": [1, 3]}, "sha256": "x", "d": {"sha256": "z"}, "e": "new"}

    assert differences(old, new) == [
        "a.b: 1 -> 2",
        "a.c[1]: 2 -> 3",
        "d: names or sizes of inputs changed",
        "e: absent -> new",
    ]


def test_changed_plan_message_is_cut_to_size():
    message = changed_plan_message("/x", {}, {f"key{index:02d}": index for index in range(30)})

    assert "key11: absent -> 11" in message
    assert "key12" not in message
    assert "and 18 more" in message
