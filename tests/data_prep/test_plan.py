from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from data_prep.images import ImagePolicy
from data_prep.plan import Settings, changed_plan_message, differences, make_plan
from data_prep.sources.build import Column, Entry
from vitscale.config.errors import UserError


class Inputs:
    """A source whose entries are given: name, num_bytes, label."""

    kind = "given"

    def __init__(
        self, rows: list[tuple[str, int, int]], classes: tuple[str, ...] | None = ("a", "b")
    ) -> None:
        self._rows, self._classes = rows, classes

    def entries(self) -> Iterator[Entry]:
        for name, num_bytes, label in self._rows:
            yield Entry(name, num_bytes, (label,))

    def columns(self) -> list[Column]:
        return [Column("label", names=self._classes)]

    def read(self, entry: Entry) -> bytes:
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
    return [
        item.entry.name for number in range(plan.num_shards) for item in plan.task(number).items
    ]


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
        np.mean([item.labels[0][0] for item in plan.task(number).items])
        for number in range(plan.num_shards)
    ]
    assert all(0 < share < 1 for share in shares)


def test_make_plan_shards_are_balanced():
    plan = make_plan([Inputs(ROWS)], settings())

    sizes = [
        sum(item.entry.num_bytes for item in plan.task(number).items)
        for number in range(plan.num_shards)
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

    labels = {(item.source, item.entry.name): item.labels for item in plan.task(0).items}
    assert plan.columns[0].names == ("a", "b", "c")
    assert labels == {(0, "x"): ((1,),), (0, "y"): ((2,),), (1, "x"): ((0,),)}


def problems(plan) -> dict[str, str]:
    items = [item for number in range(plan.num_shards) for item in plan.task(number).items]
    return {item.entry.name: item.entry.problem for item in items if item.entry.problem}


def test_make_plan_numbers_names_that_occur_in_byte_order():
    rows = [("1", 1, "bee"), ("2", 1, "Ant"), ("3", 1, "cow"), ("4", 1, "bee")]

    plan = make_plan([Inputs(rows, None)], settings())

    labels = {item.entry.name: item.labels[0] for item in plan.task(0).items}
    assert plan.columns[0].names == ("Ant", "bee", "cow")
    assert labels == {"1": (1,), "2": (0,), "3": (2,), "4": (1,)}


def test_make_plan_keeps_numbers_as_classes():
    plan = make_plan([Inputs([("x", 1, 3), ("y", 1, 0)], None)], settings())

    assert plan.columns[0].names == ("0", "1", "2", "3")
    assert {i.entry.name: i.labels[0] for i in plan.task(0).items} == {"x": (3,), "y": (0,)}


def test_make_plan_holds_more_than_65535_classes():
    rows = [(f"{n}.jpg", 1, f"c{n:06d}") for n in range(70_000)]

    plan = make_plan([Inputs(rows, None)], settings(shard_bytes=10**9))

    assert len(plan.columns[0].names) == 70_000
    assert max(item.labels[0][0] for item in plan.task(0).items) == 69_999


def test_make_plan_label_map_decides_and_names_strangers():
    rows = [("x", 1, "a"), ("y", 1, "c"), ("z", 1, "b")]

    plan = make_plan([Inputs(rows, None)], settings(label_map=("b", "a")))

    assert {i.entry.name: i.labels[0] for i in plan.task(0).items} == {
        "x": (1,), "z": (0,), "y": (-1,)
    }  # fmt: skip
    assert problems(plan) == {"y": "bad_label: not one of the 2 classes of 'label'"}


@pytest.mark.parametrize("label", [-1, 2, 99])
def test_make_plan_label_outside_the_classes_is_a_problem(label):
    plan = make_plan([Inputs([("x", 1, label), ("y", 1, 1)])], settings())

    assert problems(plan) == {"x": "bad_label: not one of the 2 classes of 'label'"}


def test_make_plan_case_twins_are_refused_unless_allowed():
    sources = [Inputs([("x", 1, "Cat"), ("y", 1, "cat")], None)]

    with pytest.raises(UserError, match=r"'Cat' and 'cat' .* --allow-case-twins"):
        make_plan(sources, settings())
    plan = make_plan(sources, settings(allow_case_twins=True))

    assert plan.columns[0].names == ("Cat", "cat")


def test_make_plan_marks_what_is_listed_twice():
    rows = [("1", 5, 0), ("2", 5, 1), ("1", 5, 0), ("3", 5, 0), ("3", 5, 1), ("1", 5, 0)]

    plan = make_plan([Inputs(rows)], settings())

    found = [(i.entry.name, i.entry.problem) for i in plan.task(0).items]
    assert sorted(found) == [
        ("1", ""),
        ("1", "duplicate: listed more than once"),
        ("1", "duplicate: listed more than once"),
        ("2", ""),
        ("3", "duplicate: listed more than once, with different labels"),
        ("3", "duplicate: listed more than once, with different labels"),
    ]


def test_make_plan_is_the_same_in_little_memory():
    small, large = (make_plan([Inputs(ROWS)], settings(), held_rows=n) for n in (16, 10_000))

    assert small.record == large.record
    assert names(small) == names(large)
    assert small.bounds.tolist() == large.bounds.tolist()


def test_make_plan_stratified_gives_every_shard_its_share():
    rows = [(f"{n}.jpg", 3000, 0 if n % 10 else 1) for n in range(2000)]

    plain = make_plan([Inputs(rows)], settings())
    even = make_plan([Inputs(rows)], settings(stratify=True))

    def rare(plan) -> list[int]:
        tasks = [plan.task(number) for number in range(plan.num_shards)]
        return [sum(item.labels[0] == (1,) for item in task.items) for task in tasks]

    assert sorted(names(even)) == sorted(names(plain))
    assert max(rare(even)) - min(rare(even)) <= 1
    assert max(rare(plain)) - min(rare(plain)) > 3, "else the test shows nothing"


class Blocks(Inputs):
    def entries(self) -> Iterator[Entry]:
        for number, entry in enumerate(super().entries()):
            yield entry._replace(block=f"b{number // 50}")


def test_make_plan_keeps_blocks_together():
    plan = make_plan([Blocks(ROWS)], settings())

    blocks = [int(name.partition("/")[2].removesuffix(".jpg")) // 50 for name in names(plan)]
    runs = 1 + sum(a != b for a, b in pairwise(blocks))
    assert runs == 10
    assert blocks != sorted(blocks)


def test_make_plan_spread_names_lie_below_prefixes():
    plan = make_plan([Inputs(ROWS)], settings(spread=True))

    prefixes = {plan.task(number).name.partition("/")[0] for number in range(plan.num_shards)}
    assert len(prefixes) > 25
    assert all(len(prefix) == 2 for prefix in prefixes)


def test_make_plan_different_columns_are_refused():
    class Other(Inputs):
        def columns(self) -> list[Column]:
            return [Column("kind", names=("a", "b"))]

    with pytest.raises(UserError, match="different label columns"):
        make_plan([Inputs(ROWS), Other(ROWS)], settings())


def test_differences_name_changed_leaves():
    old = {"a": {"b": 1, "c": [1, 2]}, "check": "x", "d": {"check": "y"}, "plan_digest": "p"}
    new = {"a": {"b": 2, "c": [1, 3]}, "check": "x", "d": {"check": "z"}, "e": "new"}

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


def test_make_plan_numbers_count_in_the_label_map():
    rows = [("x", 1, 1), ("y", 1, 0), ("z", 1, 2)]

    plan = make_plan([Inputs(rows, None)], settings(label_map=("ant", "bee")))

    labels = {item.entry.name: item.labels[0] for item in plan.task(0).items}
    assert labels == {"x": (1,), "y": (0,), "z": (-1,)}
    assert problems(plan) == {"z": "bad_label: not one of the 2 classes of 'label'"}


def test_make_plan_numbers_among_names_are_names():
    plan = make_plan([Inputs([("x", 1, 3), ("y", 1, "ant")], None)], settings())

    assert plan.columns[0].names == ("3", "ant")
    assert {i.entry.name: i.labels[0] for i in plan.task(0).items} == {"x": (0,), "y": (1,)}


def test_make_plan_huge_number_is_refused():
    with pytest.raises(UserError, match="label 99999999 in column 'label'"):
        make_plan([Inputs([("x", 1, 99_999_999)], None)], settings())


def test_make_plan_column_named_like_a_field_is_refused():
    class Clash(Inputs):
        def columns(self) -> list[Column]:
            return [Column("width")]

    with pytest.raises(UserError, match="'width' has the name of a field of ours"):
        make_plan([Clash(ROWS)], settings())
