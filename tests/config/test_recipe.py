import json
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from vitscale.config.recipe import RunConfig, Section, nearest_divisors

SMALLEST = {
    "data": {"train": "somewhere"},
    "optim": {"lr": 1e-3},
    "run": {"duration": "10steps"},
}


def build(**tables: dict[str, Any]) -> RunConfig:
    tree = {name: SMALLEST.get(name, {}) | tables.get(name, {}) for name in SMALLEST | tables}
    return RunConfig.model_validate_json(json.dumps(tree))


def all_sections(section: type[BaseModel] = RunConfig) -> set[type[BaseModel]]:
    found = {section}
    for field in section.model_fields.values():
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                found |= all_sections(option)
    return found


def test_run_config_needs_three_leaves_only():
    config = build()

    assert config.model.variant == "B/16"
    assert config.batch.global_batch is None
    assert list(config.problems()) == []


@pytest.mark.parametrize("section", sorted(all_sections(), key=lambda s: s.__name__))
def test_every_section_is_strict_frozen_and_refuses_what_it_does_not_know(section):
    settings = section.model_config

    assert issubclass(section, Section)
    assert settings.get("extra") == "forbid"
    assert settings.get("strict") is True
    assert settings.get("frozen") is True


def test_the_search_for_sections_finds_nested_ones():
    assert {s.__name__ for s in all_sections()} >= {"RunConfig", "ModelConfig", "BuildSection"}


def test_run_config_is_immutable():
    with pytest.raises(ValidationError, match="frozen"):
        build().optim.lr = 1.0


def test_whole_numbers_serve_as_fractions_but_not_the_reverse():
    assert build(optim={"lr": 1}).optim.lr == 1.0
    with pytest.raises(ValidationError, match="valid integer"):
        build(model={"img_size": 224.0})


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"model": {"img_size": 230}}, "nearest that fit: 224 or 240"),
        ({"model": {"variant": "H/14", "img_size": 512}}, "504 or 518"),
        ({"augment": {"crop_scale": [1.0, 0.5]}}, "augment.crop_scale"),
        ({"augment": {"crop_ratio": [2.0, 0.5]}}, "augment.crop_ratio"),
        ({"augment": {"std": [0.5, 0.5, 0.0]}}, "augment.std"),
        ({"optim": {"min_lr": 1.0}}, "optim.min_lr = 1.0 is above optim.lr = 0.001"),
        ({"loss": {"name": "sigmoid", "label_smoothing": 0.1}}, "loss.label_smoothing"),
        ({"data": {"build": {"val": {"source": "digits"}}}}, "data.val does not say where"),
        (
            {"data": {"lanes": 5}, "batch": {"global_batch": 12}},
            "data.lanes = 5 must divide batch.global_batch = 12; the nearest that do: 3, 4, 6",
        ),
        ({"run": {"save_every": "0steps"}}, "run.save_every"),
        ({"run": {"duration": "10%"}}, "percentage of itself"),
    ],
)
def test_problems_names_what_does_not_go_together(tables, says):
    problems = list(build(**tables).problems())

    assert len(problems) == 1
    assert says in problems[0]


def test_problems_tells_all_of_them():
    config = build(
        model={"img_size": 230}, optim={"min_lr": 1.0}, augment={"crop_scale": [1.0, 0.5]}
    )

    assert len(list(config.problems())) == 3


@pytest.mark.parametrize(
    ("number", "wish", "nearest"),
    [
        (48, 7, "4, 6, 8"),
        (48, 1, "1, 2, 3"),
        (13, 7, "1, 13"),
        (1, 5, "1"),
        (2**30, 1000, "512, 1024, 256"),
    ],
)
def test_nearest_divisors_names_three_at_most(number, wish, nearest):
    named = nearest_divisors(number, wish).split(", ")

    assert sorted(named) == sorted(nearest.split(", "))
    assert all(number % int(d) == 0 for d in named)
