import os
from typing import get_args

import pytest
from pydantic import BaseModel

from vitscale.config.errors import UserError
from vitscale.config.load import find_config, load_recipe, parse_set
from vitscale.config.recipe import RunConfig

RECIPE = """
[model]
img_size = 32
[data]
train = "somewhere"
[optim]
lr = 1e-3
[run]
duration = "10steps"
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("optim.lr=1e-3", ["optim", "lr"], 1e-3),
        ("run.seed=7", ["run", "seed"], 7),
        ("model.class_token=false", ["model", "class_token"], False),
        ("augment.crop_scale=[0.1, 1]", ["augment", "crop_scale"], [0.1, 1]),
        ('model.variant="H/14"', ["model", "variant"], "H/14"),
        ("model.variant=H/14", ["model", "variant"], "H/14"),
        ("data.train=s3://bucket/a=b", ["data", "train"], "s3://bucket/a=b"),
        ("run.duration=3epochs", ["run", "duration"], "3epochs"),
        ("data.val=none", ["data", "val"], None),
        (" optim . lr = 2 ", ["optim", "lr"], 2),
        ("data.train=", ["data", "train"], ""),
    ],
)
def test_parse_set_reads_toml_values_and_plain_text(assignment, path, value):
    assert parse_set(assignment) == (path, value)
    assert type(parse_set(assignment)[1]) is type(value)


@pytest.mark.parametrize("assignment", ["optim.lr", "=1", "optim.=1", ".lr=1", ""])
def test_parse_set_refuses_what_has_no_key_or_value(assignment):
    with pytest.raises(UserError, match=r"table\.key=value"):
        parse_set(assignment)


def test_load_recipe_lets_the_last_override_win(recipe):
    config, problems = load_recipe(recipe, ["run.seed=1", "run.seed=2", "optim.ema_decay=0.9"])

    assert problems == []
    assert (config.run.seed, config.optim.ema_decay) == (2, 0.9)


def test_load_recipe_unsets_a_leaf(recipe):
    recipe.write_text(RECIPE.replace('train = "somewhere"', 'train = "somewhere"\nval = "there"'))

    config, problems = load_recipe(recipe, ["data.val=none"])

    assert problems == []
    assert config.data.val is None


def test_load_recipe_takes_a_table_in_one_assignment(recipe):
    config, problems = load_recipe(recipe, ['data.build.train={source = "digits:train"}'])

    assert problems == []
    assert config.data.build.train.source == "digits:train"


def test_load_recipe_names_a_nested_key_with_its_path(recipe):
    _, problems = load_recipe(recipe, ["data.build.train.sorce=digits:train"])

    assert "unknown key 'data.build.train.sorce'; did you mean 'source'?" in problems


def test_load_recipe_tells_contradictions_beside_typos(recipe):
    config, problems = load_recipe(
        recipe, ["optim.min_lr=1.0", "optim.ema=0.9", "model.img_size=33", "loss.nam=softmax"]
    )

    assert config is not None
    assert len(problems) == 4
    assert any("optim.min_lr = 1.0 is above" in text for text in problems)
    assert any("model.img_size = 33 is not a multiple" in text for text in problems)


def test_load_recipe_does_not_tell_what_follows_from_a_told_problem(recipe):
    # Without the faulty leaf the default of 224 px would be measured against the patch of 9.
    _, problems = load_recipe(recipe, ['model.img_size="x"', "model.variant=Ti/9"])

    assert len(problems) == 1
    assert problems[0].startswith("model.img_size: ")


def test_load_recipe_stands_in_for_missing_leaves_without_talking_about_them(recipe):
    recipe.write_text("[model]\nimg_size = 33\n[optim]\nmin_lr = 0.1\n")

    _, problems = load_recipe(recipe, [])

    assert sorted(text.split(";")[0].split(" is not")[0] for text in problems) == [
        "missing key 'data'",
        "missing key 'optim.lr'",
        "missing key 'run'",
        "model.img_size = 33",
    ]


@pytest.mark.parametrize("text", ["model = 3", "[model", "a = 2026-01-01", "\x00", "[[model]]\n"])
def test_load_recipe_survives_any_text(recipe, text):
    recipe.write_text(text)

    _, problems = load_recipe(recipe, ["model.img_size=33", "model.x.y=1", "optim=2"])

    assert problems


def test_load_recipe_survives_bytes_that_are_no_text(recipe):
    recipe.write_bytes(b"\xff\xfe")

    config, problems = load_recipe(recipe, [])

    assert config is None
    assert "is not TOML" in problems[0]


def test_find_config_prefers_the_file_as_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "zero2.json").write_text("{}")

    assert find_config("configs/zero2.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["zero2.json", "configs/zero2.json", "quickstart.toml"])
def test_find_config_finds_the_shipped_ones_from_anywhere(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)

    assert find_config(name).name == os.path.basename(name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("configs/zero22.json", "did you mean configs/zero2.json?"),
        ("quikstart.toml", "did you mean configs/quickstart.toml?"),
        ("mine/recipee.toml", "did you mean mine/recipe.toml?"),
        ("other/zero2.json", "did you mean configs/zero2.json?"),
        ("mine", "there are configs/"),
        ("xyz.json", "there are configs/zero0.json"),
    ],
)
def test_find_config_says_what_is_near(tmp_path, monkeypatch, name, hint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.toml").write_text("")

    with pytest.raises(UserError) as caught:
        find_config(name)

    assert hint in str(caught.value)


def leaves(section=RunConfig, prefix=""):
    for name, info in section.model_fields.items():
        yield f"{prefix}{name}"
        for option in (info.annotation, *get_args(info.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from leaves(option, f"{prefix}{name}.")


ODD_VALUES = ["none", "true", "0", "-1", "1.5", "nan", "1e308", '""', "x", "[]", "[1, 'x']", "{}"]


@pytest.mark.parametrize("leaf", list(leaves()))
def test_no_value_of_any_leaf_is_more_than_a_problem(recipe, leaf):
    for value in [
        *ODD_VALUES,
        "{x = 1}",
        "{train = {source = 3}}",
        "1_0steps",
        "99999999999999999",
    ]:
        config, problems = load_recipe(recipe, [f"{leaf}={value}"])

        assert config is not None or problems, (leaf, value)
        if problems:
            assert any(leaf.split(".")[0] in text for text in problems), (leaf, value, problems)
