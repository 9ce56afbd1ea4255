import copy
import json
from pathlib import Path

import pytest

from vitscale.config.ds_json import load_ds_json, resolve
from vitscale.config.ds_keys import ANY_TABLE, REFUSED, SHARED, TOP, ZERO, sound_part
from vitscale.config.load import find_config, load_recipe
from vitscale.config.recipe import RunConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def recipe(**tables):
    needed = {"data": {"train": "x"}, "optim": {"lr": 1e-3}, "run": {"duration": "10steps"}}
    tables = {"batch": {"global_batch": 48}, **tables}
    tree = {name: needed.get(name, {}) | tables.get(name, {}) for name in needed | tables}
    return RunConfig.model_validate_json(json.dumps(tree))


def run(ds, world_size=1, **tables):
    return resolve(recipe(**tables), ds, world_size, "r.toml", "d.json")


def autos(value, path=""):
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in autos(item, f"{path}.{key}")]
    return [path] if value == "auto" else []


ABSENT = object()


@pytest.mark.parametrize(
    ("in_recipe", "in_json", "agreed"),
    [
        (1.0, ABSENT, 1.0),
        (1.0, "auto", 1.0),
        (1.0, 1.0, 1.0),
        (1.0, 1, 1.0),
        (None, 0.5, 0.5),
        (0.0, 0, 0.0),
        (None, ABSENT, 0.0),  # DeepSpeed itself would clip at 1.0
        (None, "auto", 0.0),
        (1.0, 0.5, "contradicts"),
        (0.0, 1.0, "contradicts"),
    ],
)
def test_resolve_fills_or_matches_clipping(in_recipe, in_json, agreed):
    ds = {} if in_json is ABSENT else {"gradient_clipping": in_json}

    resolved, problems = run(ds, optim={"grad_clip_norm": in_recipe})

    if agreed == "contradicts":
        assert resolved is None
        assert len(problems) == 1
        for part in ("optim.grad_clip_norm", "r.toml", "gradient_clipping", "d.json"):
            assert part in problems[0]
    else:
        assert problems == []
        assert resolved.ds["gradient_clipping"] == agreed
        assert resolved.config.optim.grad_clip_norm == agreed


@pytest.mark.parametrize(
    ("batch", "ds", "world_size", "expected"),
    [
        ({"global_batch": 48}, {}, 1, (48, 48, 1)),
        ({"global_batch": 48}, {}, 4, (48, 12, 1)),
        ({"global_batch": 48, "micro_batch": 4}, {}, 3, (48, 4, 4)),
        ({}, {"train_batch_size": 48}, 2, (48, 24, 1)),
        ({}, {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 8}, 2, (48, 8, 3)),
        ({"global_batch": 48}, {"gradient_accumulation_steps": 4}, 2, (48, 6, 4)),
        ({"global_batch": 48}, {"gradient_accumulation_steps": "auto"}, 2, (48, 24, 1)),
        ({"global_batch": 48, "micro_batch": 8}, {"train_batch_size": 48}, 2, (48, 8, 3)),
        ({"global_batch": 48, "micro_batch": 8}, {"gradient_accumulation_steps": 3}, 2, (48, 8, 3)),
    ],
)
def test_resolve_derives_the_batch_arithmetic(batch, ds, world_size, expected):
    resolved, problems = run(ds, world_size, batch={"global_batch": None} | batch)

    assert problems == []
    parts = resolved.batch
    assert (parts.global_batch, parts.micro_batch, parts.grad_accum) == expected
    assert parts.global_batch == parts.micro_batch * parts.grad_accum * world_size
    assert resolved.ds["train_batch_size"] == expected[0]
    assert resolved.ds["train_micro_batch_size_per_gpu"] == expected[1]
    assert resolved.ds["gradient_accumulation_steps"] == expected[2]
    assert resolved.config.batch.micro_batch == expected[1]


@pytest.mark.parametrize(
    ("wish", "ds", "agreed"),
    [
        (None, {}, "fp32"),
        ("bf16", {}, "bf16"),
        (None, {"bf16": {"enabled": True}}, "bf16"),
        (None, {"fp16": {"enabled": True, "loss_scale": 128}}, "fp16"),
        (None, {"bf16": {"enabled": False}}, "fp32"),
        (None, {"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "fp16"),
        ("bf16", {"bf16": {"enabled": True}}, "bf16"),
        ("bf16", {"fp16": {"enabled": False}}, "bf16"),
        ("bf16", {"bf16": {"check_grad_overflow": False}}, "bf16"),
        ("fp32", {"bf16": {"enabled": False}}, "fp32"),
        ("fp32", {"bf16": {"enabled": True}}, None),
        ("bf16", {"bf16": {"enabled": False}}, None),
        ("bf16", {"fp16": {"enabled": True}}, None),
    ],
)
def test_resolve_fills_or_matches_the_precision(wish, ds, agreed):
    resolved, problems = run(ds, run={"precision": wish})

    if agreed is None:
        assert len(problems) == 1
        assert "run.precision" in problems[0]
    else:
        assert problems == []
        assert resolved.config.run.precision == agreed
        assert {k: resolved.ds[k]["enabled"] for k in ("bf16", "fp16")} == {
            "bf16": agreed == "bf16",
            "fp16": agreed == "fp16",
        }


@pytest.mark.parametrize(
    ("stage", "precision", "given", "written"),
    [
        (0, "fp32", None, "fp32"),
        (0, "bf16", None, "bf16"),  # DeepSpeed's stage 0 cannot accumulate in another type
        (1, "bf16", None, "fp32"),
        (3, "bf16", None, "fp32"),
        (2, "bf16", "bf16", "bf16"),
        (2, "fp16", None, "fp32"),
    ],
)
def test_resolve_always_writes_the_accumulation_dtype(stage, precision, given, written):
    ds = {"zero_optimization": {"stage": stage}}
    if given:
        ds["data_types"] = {"grad_accum_dtype": given}

    resolved, problems = run(ds, run={"precision": precision})

    assert problems == []
    assert resolved.ds["data_types"]["grad_accum_dtype"] == written


@pytest.mark.parametrize(
    ("block", "is_fine"),
    [
        ({"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}}, True),
        ({"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}, True),
        ({"type": "adamw"}, True),
        ({"type": "Adam"}, False),
        ({"type": "AdamW", "params": {"betas": [0.9, 0.95]}}, False),
        ({"type": "AdamW", "params": {"weight_decay": 0.1}}, False),
        ({"type": "AdamW", "params": {"bias_correction": False}}, False),
    ],
)
def test_resolve_lets_an_optimizer_block_only_repeat_the_recipe(block, is_fine):
    resolved, problems = run({"optimizer": block})

    assert (problems == []) is is_fine
    if is_fine:
        assert "optimizer" not in resolved.ds  # vitscale hands over the object


def test_resolve_tells_every_contradiction_at_once():
    ds = {
        "train_batch_size": 64,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Lamb", "params": {"lr": 1.0}},
    }

    resolved, problems = run(
        ds, optim={"grad_clip_norm": 1.0, "min_lr": 1.0}, run={"precision": "fp32"}
    )

    assert resolved is None
    told = ("batch.global_batch", "optim.grad_clip_norm", "run.precision", "optim.name", "optim.lr")
    for leaf in (*told, "optim.min_lr"):
        assert sum(text.startswith(f"{leaf} =") for text in problems) == 1, (leaf, problems)
    assert len(problems) == 6


def test_resolve_leaves_the_json_as_it_was_read():
    ds = {"zero_optimization": {"stage": 1}, "bf16": {"check_grad_overflow": True}}
    before = copy.deepcopy(ds)

    run(ds)

    assert ds == before


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", ["zero0.json", "zero1.json", "zero2.json", "zero3.json"])
@pytest.mark.parametrize("recipe_name", ["quickstart.toml", "quickstart_finetune.toml"])
def test_shipped_configs_go_together_on_any_of_these_ranks(recipe_name, name, world_size):
    config, problems = load_recipe(find_config(f"configs/{recipe_name}"), [])
    ds, ds_problems = load_ds_json(CONFIGS / name)
    resolved, contradictions = resolve(config, ds, world_size, "recipe", name)

    assert problems + ds_problems + contradictions == []
    assert resolved.zero_stage == int(name[4])
    assert autos(resolved.ds) == []
    assert isinstance(resolved.ds["gradient_clipping"], float)
    assert resolved.ds["data_types"]["grad_accum_dtype"] == "fp32"
    assert autos(ds) != [], "the shipped files should leave the shared keys to the recipe"


def test_all_shipped_jsons_are_known_to_the_table_above():
    assert sorted(p.name for p in CONFIGS.glob("*.json")) == [f"zero{n}.json" for n in range(4)]


def paths(table=TOP, prefix=""):
    for key, kind in table.items():
        yield f"{prefix}{key}", kind
        if isinstance(kind, dict):
            yield from paths(kind, f"{prefix}{key}.")


@pytest.mark.parametrize("path", [p for p, kind in paths() if not isinstance(kind, dict)])
def test_sound_part_lets_auto_through_for_shared_keys_only(path):
    table = "auto"
    for part in reversed(path.split(".")):
        table = {part: table}
    problems = []

    sound = sound_part(table, problems)

    assert (problems == []) is (path in SHARED)
    assert bool(autos(sound)) is (path in SHARED)


@pytest.mark.parametrize("path", [p for p, _ in paths() if len(p.split(".")[-1]) > 4])
def test_sound_part_finds_a_misspelt_key_at_any_depth(path):
    *tables, key = path.split(".")
    table = {key[:-2] + key[-1]: 1}
    for part in reversed(tables):
        table = {part: table}
    problems = []

    sound_part(table, problems)

    assert len(problems) == 1
    assert "did you mean" in problems[0]


@pytest.mark.parametrize("key", REFUSED)
def test_sound_part_says_why_a_known_key_is_not_taken(key):
    problems = []

    assert sound_part({key: {}}, problems) == {}
    assert problems == [f"{key!r} is not taken: {REFUSED[key]}"]


def test_load_ds_json_refuses_numbers_that_are_none(tmp_path):
    path = tmp_path / "d.json"
    path.write_text('{"gradient_clipping": NaN, "zero_optimization": {"sub_group_size": Infinity}}')

    ds, problems = load_ds_json(path)

    assert ds == {"zero_optimization": {}}
    assert len(problems) == 2


def known_to(model):
    return {
        name
        for field, info in model.model_fields.items()
        for name in (field, info.alias)
        if name is not None
    }


@pytest.fixture(scope="module")
def installed():
    """The schemas of the installed DeepSpeed, by the path of the table they describe."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config, offload_config

    return {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
    }


def test_tables_hold_only_keys_of_the_installed_deepspeed(installed):
    tables = {path: kind for path, kind in paths() if isinstance(kind, dict)}

    for path, model in installed.items():
        assert set(tables[path]) - known_to(model) == set(), path
    # The comparison can fail.
    assert {*ZERO, "stage4_magic"} - known_to(installed["zero_optimization"]) == {"stage4_magic"}


def test_other_keys_stand_in_the_constants_of_the_installed_deepspeed(installed):
    import deepspeed.profiling.constants as profiling
    import deepspeed.runtime.constants as runtime
    import deepspeed.runtime.swap_tensor.constants as swap
    from deepspeed.runtime.activation_checkpointing import config as activation

    names = {
        value
        for module in (runtime, swap, profiling, activation)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    modelled = {"zero_optimization", "bf16", "fp16", "comms_logger"}
    leaves = {
        key
        for path, kind in paths()
        if path.split(".")[0] not in modelled and kind is not ANY_TABLE
        for key in path.split(".")
    }

    assert leaves - names == set()
    assert "gradient_cliping" not in names


ODD_VALUES = [None, True, 0, -1, 1.5, 1e308, "", "auto", "x", [], [1], {}, {"x": 1}, {"enabled": 1}]


@pytest.mark.parametrize("path", [path for path, _ in paths()])
def test_no_value_of_any_key_is_more_than_a_problem(tmp_path, path):
    for value in ODD_VALUES:
        table = value
        for part in reversed(path.split(".")):
            table = {part: table}
        (tmp_path / "d.json").write_text(json.dumps(table))

        ds, problems = load_ds_json(tmp_path / "d.json")
        resolved, more = run(ds)

        assert (resolved is None) is (more != []), (value, problems, more)
        if problems + more == []:
            assert autos(resolved.ds) == []
