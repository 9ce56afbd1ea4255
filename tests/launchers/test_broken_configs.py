"""P7: no typo survives. Every broken input ends with code 2 before any process group exists.

All rows go through `launchers.pretrain.main` in one process; the real command is tried once.
"""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

RECIPE = """
[model]
variant = "Ti/16"
img_size = 32
[data]
train = "{data}"
num_workers = 0
[optim]
lr = 1e-3
grad_clip_norm = 1.0
[batch]
global_batch = 48
[run]
duration = "2steps"
"""
DS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 1},
}


@dataclass(frozen=True)
class Broken:
    """One broken input, and what the message must hold: the key, and the way out."""

    name: str
    says: tuple[str, ...]
    # Replacements in the recipe's text.
    recipe: dict[str, str] = field(default_factory=dict)
    # Top-level keys of the JSON; or its whole text.
    ds: dict | str = field(default_factory=dict)
    words: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    verb: str = "pretrain"


def ranks(number):
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(number)}


def sets(*assignments):
    return tuple(word for text in assignments for word in ("--set", text))


ZERO = "zero_optimization"
BROKEN = [
    # Names that do not exist.
    Broken(
        "recipe-key", ("'optim.weight_decy'", "'weight_decay'"), {"lr =": "weight_decy = 1\nlr ="}
    ),
    Broken("recipe-table", ("'optin'", "did you mean 'optim'"), {"[optim]": "[optin]"}),
    Broken(
        "recipe-far-key", ("'batch.zzz'", "known: global_batch"), {"[batch]": "[batch]\nzzz = 1"}
    ),
    Broken("ds-key", ("'gradient_cliping'", "'gradient_clipping'"), ds={"gradient_cliping": 1.0}),
    Broken(
        "ds-zero-key",
        ("'zero_optimization.overlap_com'", "'overlap_comm'"),
        ds={ZERO: {"stage": 1, "overlap_com": True}},
    ),
    Broken("ds-bf16-key", ("'bf16.enable'", "'enabled'"), ds={"bf16": {"enable": True}}),
    Broken(
        "ds-offload-key",
        ("'zero_optimization.offload_optimizer.devise'", "'device'"),
        ds={ZERO: {"stage": 2, "offload_optimizer": {"devise": "cpu"}}},
    ),
    Broken(
        "set-path", ("'optim.learning_rate'", "known: ", "lr"), words=sets("optim.learning_rate=1")
    ),
    Broken("set-table", ("'modle'", "did you mean 'model'"), words=sets("modle.img_size=32")),
    Broken(
        "set-unset-typo", ("'optim.ema_deca'", "'ema_decay'"), words=sets("optim.ema_deca=none")
    ),
    Broken("set-without-equals", ("'optim.lr'", "table.key=value"), words=sets("optim.lr")),
    Broken("set-through-leaf", ("optim.lr is not a table",), words=sets("optim.lr.peak=1")),
    Broken("flag", ("unrecognized arguments: --recip", "--recipe"), words=("--recip", "x.toml")),
    Broken("variant", ('"Big/16"', '"B/16"'), {"Ti/16": "Big/16"}),
    Broken("variant-patch", ('"L"', "patch side is missing", '"L/16"'), {"Ti/16": "L"}),
    # "auto" where DeepSpeed would quietly take something.
    Broken("ds-bf16-auto", ("bf16.enabled", "true or false"), ds={"bf16": {"enabled": "auto"}}),
    Broken("ds-fp16-auto", ("fp16.enabled", "true or false"), ds={"fp16": {"enabled": "auto"}}),
    Broken(
        "ds-zero-auto",
        ("zero_optimization.reduce_bucket_size", "leave it out"),
        ds={ZERO: {"stage": 2, "reduce_bucket_size": "auto"}},
    ),
    Broken(
        "ds-table-auto", ("zero_optimization must be a table", "leave it out"), ds={ZERO: "auto"}
    ),
    # Batches.
    Broken(
        "micro-batch",
        ("global_batch = 48", "micro_batch = 9", "8, 12"),
        words=sets("batch.micro_batch=9"),
    ),
    Broken("ranks", ("global_batch = 48", "5 ranks", "45 or 50"), env=ranks(5)),
    Broken(
        "ranks-micro",
        ("global_batch = 48", "micro_batch = 16", "on 2 ranks", "12, 24"),
        words=sets("batch.micro_batch=16"),
        env=ranks(2),
    ),
    Broken("few-examples", ("global_batch = 48", "64 ranks", "can: 64"), env=ranks(64)),
    Broken(
        "ds-accum",
        ("gradient_accumulation_steps = 3", "= 2", "leave it out"),
        ds={"gradient_accumulation_steps": 3},
        words=sets("batch.micro_batch=24"),
    ),
    Broken(
        "ds-accum-alone",
        ("global_batch = 48", "5 gradient_accumulation_steps", "45 or 50"),
        ds={"gradient_accumulation_steps": 5},
    ),
    Broken(
        "ds-batch",
        ("batch.global_batch = 48", "train_batch_size = 64", "change one"),
        ds={"train_batch_size": 64},
    ),
    Broken("ds-batch-zero", ("train_batch_size", "from 1", "got 0"), ds={"train_batch_size": 0}),
    Broken(
        "no-batch", ("batch.global_batch is missing", "train_batch_size"), {"global_batch = 48": ""}
    ),
    Broken("lanes", ("data.lanes = 7", "global_batch = 48", "6, 8"), words=sets("data.lanes=7")),
    Broken(
        "lanes-ds-batch",
        ("data.lanes = 7", "global_batch = 64", "8"),
        {"global_batch = 48": ""},
        ds={"train_batch_size": 64},
        words=sets("data.lanes=7"),
    ),
    # Other contradictions.
    Broken(
        "clipping",
        ("optim.grad_clip_norm = 1.0", "gradient_clipping = 0.5", "change one"),
        ds={"gradient_clipping": 0.5},
    ),
    Broken(
        "precision",
        ("run.precision = fp32", "bf16", "change one"),
        ds={"bf16": {"enabled": True}},
        words=sets("run.precision=fp32"),
    ),
    Broken(
        "precision-off",
        ("run.precision = bf16", "fp32", "change one"),
        ds={"bf16": {"enabled": False}},
        words=sets("run.precision=bf16"),
    ),
    Broken(
        "both-precisions",
        ("bf16 and fp16", "keep one"),
        ds={"bf16": {"enabled": True}, "fp16": {"enabled": True}},
    ),
    Broken(
        "accumulation-dtype",
        ("data_types.grad_accum_dtype = fp32", "raise the stage"),
        ds={
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            ZERO: {"stage": 0},
        },
    ),
    Broken(
        "optimizer",
        ("optim.lr = 0.001", "optimizer.params.lr = 0.01", "leave it out"),
        ds={"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}},
    ),
    Broken(
        "optimizer-name",
        ("optim.name = adamw", "optimizer.type = Lamb", "leave it out"),
        ds={"optimizer": {"type": "Lamb"}},
    ),
    Broken(
        "optimizer-param",
        ("optimizer.params.max_grad_norm", "[optim]"),
        ds={"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}},
    ),
    Broken("scheduler", ("'scheduler'", "optim.schedule"), ds={"scheduler": {"type": "WarmupLR"}}),
    Broken(
        "sigmoid-smoothing",
        ("loss.label_smoothing = 0.1", '"softmax"'),
        words=sets("loss.name=sigmoid", "loss.label_smoothing=0.1"),
    ),
    Broken("min-lr", ("optim.min_lr = 0.01", "optim.lr = 0.001"), words=sets("optim.min_lr=0.01")),
    Broken(
        "in-chans",
        ("model.in_chans = 2", "1 (grey) and 3 (RGB)"),
        words=sets("model.in_chans=2"),
    ),
    Broken(
        "crop-scale",
        ("augment.crop_scale = [0.9, 0.1]", "must not be the larger"),
        words=sets("augment.crop_scale=[0.9, 0.1]"),
    ),
    Broken(
        "pool-without-token",
        ("model.class_token is false", 'global_pool = "avg"'),
        words=sets("model.class_token=false"),
    ),
    # Shapes.
    Broken(
        "patch",
        ("model.img_size = 512", "H/14", "504 or 518"),
        words=sets("model.variant=H/14", "model.img_size=512"),
    ),
    Broken(
        "heads",
        ("model.embed_dim = 130", "num_heads = 4", "128 or 132"),
        words=sets("model.embed_dim=130", "model.num_heads=4"),
    ),
    # Values.
    Broken("text-for-number", ("optim.lr", "valid number", "'fast'"), words=sets("optim.lr=fast")),
    Broken(
        "bool-for-int",
        ("model.img_size", "valid integer", "True"),
        words=sets("model.img_size=true"),
    ),
    Broken(
        "float-for-int",
        ("batch.global_batch", "valid integer", "48.0"),
        {"global_batch = 48": "global_batch = 48.0"},
    ),
    Broken("nan", ("optim.lr", "finite number"), words=sets("optim.lr=nan")),
    Broken(
        "negative",
        ("optim.weight_decay", "greater than or equal to 0"),
        words=sets("optim.weight_decay=-1"),
    ),
    Broken("choice", ("optim.schedule", "'step' or 'wsd'"), words=sets("optim.schedule=cosin")),
    Broken(
        "ds-number",
        ("gradient_clipping must be a number", "'1.0'"),
        ds={"gradient_clipping": "1.0"},
    ),
    Broken(
        "ds-negative",
        ("reduce_bucket_size", "above 0, got -1"),
        ds={ZERO: {"stage": 1, "reduce_bucket_size": -1}},
    ),
    Broken("ds-bool", ("bf16.enabled must be true or false, got 1",), ds={"bf16": {"enabled": 1}}),
    Broken("ds-table", ("bf16 must be a table", "leave it out"), ds={"bf16": True}),
    Broken(
        "ds-stage", ("zero_optimization.stage", "0, 1, 2 or 3", "got 4"), ds={ZERO: {"stage": 4}}
    ),
    Broken(
        "ds-device",
        ("offload_optimizer.device", "'cpu' or 'nvme'", "'gpu'"),
        ds={ZERO: {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
    ),
    Broken("duration", ("run.duration", "'2 weeks'", '"60steps"'), {"2steps": "2 weeks"}),
    Broken(
        "duration-number",
        ("run.duration", "needs a unit", '"60steps"'),
        words=sets("run.duration=60"),
    ),
    Broken("duration-none", ("run.duration", "longer than nothing"), {"2steps": "0epochs"}),
    Broken("duration-percent", ("run.duration", "percentage of itself"), {"2steps": "50%"}),
    Broken("duration-endless", ("run.duration", "too long"), {"2steps": "1e999steps"}),
    # Missing leaves.
    Broken("no-lr", ("missing key 'optim.lr'", "every recipe needs it"), {"lr = 1e-3": ""}),
    Broken("no-duration", ("missing key 'run.duration'",), {'duration = "2steps"': ""}),
    Broken("no-run", ("missing key 'run'",), {'[run]\nduration = "2steps"': ""}),
    Broken("no-train", ("missing key 'data.train'",), {'train = "{data}"': ""}),
    # What DeepSpeed 0.19 no longer has.
    Broken("elasticity", ("'elasticity'", "removed"), ds={"elasticity": {"enabled": True}}),
    Broken("amp", ("'amp'", "use bf16 or fp16"), ds={"amp": {"enabled": True}}),
    # Files.
    Broken(
        "ds-twice",
        ("'gradient_clipping' is given twice", "keep one"),
        ds='{"gradient_clipping": 1.0, "gradient_clipping": 1.0}',
    ),
    Broken("ds-syntax", ("ds.json is not JSON", "line 1"), ds='{"gradient_clipping": 1.0,}'),
    Broken("ds-list", ("one JSON object", "list"), ds="[]"),
    Broken("recipe-syntax", ("recipe.toml is not TOML", "line"), {"lr = 1e-3": "lr = "}),
    Broken(
        "recipe-date",
        ("recipe.toml", "no place in a recipe"),
        {'duration = "2steps"': "duration = 2026-01-01"},
    ),
    Broken(
        "recipe-near-name",
        ("'recip.toml'", "did you mean recipe.toml"),
        words=("--recipe", "recip.toml"),
    ),
    Broken(
        "ds-near-name",
        ("'configs/zero_2.json'", "did you mean configs/zero2.json"),
        words=("--ds-config", "configs/zero_2.json"),
    ),
    Broken(
        "both-files",
        ("'a/b.toml'", "configs/quickstart.toml", "'other-steps.json'", "configs/zero0.json"),
        words=("--recipe", "a/b.toml", "--ds-config", "other-steps.json"),
    ),
    Broken(
        "no-data",
        ("data.train: no dataset at nowhere", "vitscale pack --source"),
        words=sets("data.train=nowhere"),
    ),
    Broken(
        "no-val-data",
        ("data.val: no dataset at nowhere", "[data.build]"),
        words=sets("data.val=nowhere"),
    ),
    Broken(
        "no-init", ("init.source", "'runs/none'", "train that first"), words=("--init", "runs/none")
    ),
    Broken(
        "no-init-restart",
        ("init.source", "train that first"),
        words=("--init", "runs/none", "--resume", "never"),
    ),
    Broken(
        "finetune-without-init", ("needs weights to start from", "--init RUN_DIR"), verb="finetune"
    ),
    Broken("no-resume", ("--resume 'runs/none'", "auto, never"), words=("--resume", "runs/none")),
    # The launcher's environment.
    Broken(
        "half-an-environment",
        ("RANK", "['LOCAL_RANK']", "deepspeed or torchrun"),
        env={"RANK": "0", "WORLD_SIZE": "2"},
    ),
    Broken(
        "rank-too-high",
        ("RANK = 2", "WORLD_SIZE = 2"),
        env={"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    ),
]

SIX_FAULTS = Broken(
    "six-faults",
    (
        "6 problems in",
        "unknown key 'optim.weight_decy'; did you mean 'weight_decay'?",
        "--set 'oops': write it as table.key=value",
        "unknown key 'gradient_cliping'; did you mean 'gradient_clipping'?",
        "bf16.enabled = \"auto\" cannot be resolved",
        "model.img_size = 32 is not a multiple of the patch side 14",
        "batch.global_batch = 48 in recipe.toml contradicts train_batch_size = 64 in ds.json",
    ),
    {"lr =": "weight_decy = 1\nlr =", "Ti/16": "Ti/14"},
    {"gradient_cliping": 1.0, "bf16": {"enabled": "auto"}, "train_batch_size": 64},
    sets("oops"),
)  # fmt: skip
SOUND = Broken("sound", (), words=("--dry-run",))

DRIVER = """
import contextlib, importlib, io, json, os, sys

results = []
for row in json.load(open("rows.json")):
    os.chdir(row["folder"])
    environment = dict(os.environ)
    os.environ.update(row["env"])
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = importlib.import_module(f"launchers.{row['verb']}").main(row["argv"])
        except SystemExit as end:  # argparse
            code = end.code
    os.environ.clear()
    os.environ.update(environment)
    loaded = [name for name in ("torch", "torch.distributed", "deepspeed") if name in sys.modules]
    files = sorted(os.listdir("."))
    result = {"code": code, "stderr": errors.getvalue(), "loaded": loaded, "files": files}
    results.append(result)
print(json.dumps(results))
"""


def write_documents(folder, row, data):
    folder.mkdir()
    text = RECIPE
    for old, new in row.recipe.items():
        assert old in text, f"row {row.name}: {old!r} is not in the recipe"
        text = text.replace(old, new)
    (folder / "recipe.toml").write_text(text.replace("{data}", str(data)))
    ds = row.ds if isinstance(row.ds, str) else json.dumps(DS | row.ds)
    (folder / "ds.json").write_text(ds)


def clean_environment(**extra):
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"}
    rest = {key: value for key, value in os.environ.items() if key not in names}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return rest | {"PATH": path, "PYTHONPATH": str(CHECKOUT), **extra}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A packed dataset of a few digits."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    words = ["--source", "digits:test", "--out", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "data_prep.pack", *words],
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def results(data, tmp_path_factory):
    """What became of every row, by its name."""
    root = tmp_path_factory.mktemp("broken")
    rows = [*BROKEN, SIX_FAULTS, SOUND]
    jobs = []
    for row in rows:
        write_documents(root / row.name, row, data)
        # The last of two equal flags counts, so a row may name other files.
        argv = ["--recipe", "recipe.toml", "--ds-config", "ds.json", *row.words]
        folder = str(root / row.name)
        jobs.append({"folder": folder, "argv": argv, "env": row.env, "verb": row.verb})
    (root / "rows.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=root,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip((row.name for row in rows), json.loads(done.stdout), strict=True))


def test_the_table_is_long_enough_and_its_names_are_distinct():
    assert len(BROKEN) >= 30
    assert len({row.name for row in BROKEN}) == len(BROKEN)


def test_pretrain_takes_the_unbroken_input(results):
    assert results["sound"]["code"] == 0, results["sound"]["stderr"]


@pytest.mark.parametrize("row", [*BROKEN, SIX_FAULTS], ids=lambda row: row.name)
def test_pretrain_refuses_broken_input_and_says_what_to_change(results, row):
    result = results[row.name]

    absent = [text for text in row.says if text not in result["stderr"]]
    assert result["code"] == 2, result
    assert not absent, f"not said: {absent}\n{result['stderr']}"
    assert "Traceback" not in result["stderr"]


def test_each_broken_input_has_one_problem_where_one_thing_is_wrong(results):
    # What follows from a told problem is not told again, and no row trips over another fault.
    for row in BROKEN:
        count = results[row.name]["stderr"].count("\n  - ")
        expected = 2 if row.name == "recipe-table" else 1  # an unknown table and a missing one
        assert count in (0, expected), f"{row.name}: {results[row.name]['stderr']}"


def test_broken_input_is_refused_before_any_process_group(results):
    for name, result in results.items():
        assert result["loaded"] == [], f"{name} loaded {result['loaded']}"
        assert result["files"] == ["ds.json", "recipe.toml"], f"{name} left something behind"


def test_the_check_of_loaded_modules_can_fail(tmp_path):
    script = "import torch.distributed\n" + textwrap.dedent(DRIVER)
    (tmp_path / "rows.json").write_text(
        json.dumps([{"folder": ".", "argv": ["--recipe", "x"], "env": {}, "verb": "pretrain"}])
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )

    assert "torch.distributed" in json.loads(done.stdout)[0]["loaded"]


@pytest.mark.e2e
def test_the_deepspeed_launcher_passes_the_refusal_on(tmp_path, data):
    write_documents(tmp_path / "run", SIX_FAULTS, data)
    script = str(CHECKOUT / "launchers" / "pretrain.py")
    words = ["--num_gpus", "1", script, "--recipe", "recipe.toml", "--ds-config", "ds.json"]

    done = subprocess.run(
        ["deepspeed", *words],
        cwd=tmp_path / "run",
        env=clean_environment(DS_ACCELERATOR="cpu"),
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2, done.stdout + done.stderr
    assert "did you mean 'gradient_clipping'?" in done.stderr
    assert not (tmp_path / "run" / "runs").exists()
