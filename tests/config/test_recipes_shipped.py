"""Every recipe in configs/ is sound, says its cost, and follows its paper's learning rate."""

import math
import re

import pytest

from launchers import finetune, pretrain
from tests.helpers.runs import step_rows
from tests.helpers.shipped import (
    CONFIGS,
    PAPERS,
    QUICK,
    sets,
    source_of,
    toy_words,
    tree_of,
    verb_of,
)
from vitscale.config.duration import Duration
from vitscale.config.load import load_recipe
from vitscale.models.cost import memory_per_rank, train_flops_per_example
from vitscale.training.rhythm import rhythm_of, schedule_of

SAMPLES = {"jft": 303_000_000, "imagenet21k": 14_197_122, "imagenet1k": 1_281_167}
SAMPLES |= {"cifar10": 50_000, "cifar100": 50_000, "pets": 3_680, "flowers102": 2_040, "vtab": 1000}
CLASSES = {"jft": 18_291, "imagenet21k": 21_843, "imagenet1k": 1000}
COMMANDS = {"pretrain": pretrain.main, "finetune": finetune.main}


def config_of(name):
    config, problems = load_recipe(CONFIGS / f"{name}.toml", [])
    assert config is not None, problems
    return config, problems


def dataset_of(config):
    return config.data.train.removeprefix("s3://YOUR-BUCKET/").split("/")[0]


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty folder, and no launcher's variables."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_every_recipe_passes_a_dry_run_by_the_verb_that_its_comment_shows(capsys):
    nowhere = sets("data.train=nowhere", "data.val=nowhere")
    for name in PAPERS:
        words = ["--recipe", f"configs/{name}.toml", *nowhere, "--dry-run"]

        code = COMMANDS[verb_of(name)](words)

        captured = capsys.readouterr()
        assert code == 0, f"{name}: {captured.err}"
        assert f"run_dir = runs/{name}-zero2" in captured.out


def test_the_table_of_recipes_names_every_one_and_no_other():
    table = (CONFIGS / "README.md").read_text()

    assert set(re.findall(r"^\| `(\w+)\.toml` \|", table, re.MULTILINE)) == {*PAPERS, *QUICK}


def test_a_recipe_starts_from_the_run_of_another_one_of_the_same_shape():
    for name in PAPERS:
        source = source_of(name)
        assert (source is None) == (verb_of(name) == "pretrain") or name.endswith("_224"), name
        if source is not None:
            own, its = tree_of(name)["model"], tree_of(source)["model"]
            for leaf in ("variant", "act", "init_values", "no_embed_class"):
                assert own.get(leaf) == its.get(leaf), (name, leaf)


def test_the_cost_in_a_recipe_is_that_of_the_cost_model():
    units = {"petaFLOPs": 1e15, "exaFLOPs": 1e18}
    for name in PAPERS:
        config, _ = config_of(name)
        kind = dataset_of(config)
        known = {"cifar10": 10, "cifar100": 100, "pets": 37, "flowers102": 102, "vtab": 100}
        classes = {**CLASSES, **known}[kind]
        model = config.model.model_copy(update={"num_classes": classes})
        duration, batch = Duration.parse(config.run.duration), config.batch.global_batch
        is_steps = duration.unit == "steps"
        examples = duration.value * (batch if is_steps else SAMPLES[kind])
        text = (CONFIGS / f"{name}.toml").read_text()
        number, unit = re.search(r"cost: ([\d.]+) (\w+), ", text).groups()

        flops = train_flops_per_example(model) * examples

        assert float(number) * units[unit] == pytest.approx(flops, rel=0.01), name
        plan = memory_per_rank(model, 2, 8, "bf16", config.batch.micro_batch, ema=False)
        assert plan.total < 60 * 2**30, name  # of 80 GB, for buffers and what a kernel needs


def warm(step, warmup):
    return min(1.0, step / warmup)


def linear_or_cosine(step, base, end, warmup, total, kind):
    """vision_transformer's create_learning_rate_schedule, from its description in the paper."""
    part = min(max((step - warmup) / (total - warmup), 0), 1)
    if kind == "linear":
        return (end + (base - end) * (1 - part)) * warm(step, warmup)
    return (end + (base - end) * 0.5 * (1 + math.cos(math.pi * part))) * warm(step, warmup)


# Name -> peak, end, warm-up and whole length in steps, decay.
JFT_STEPS = {7: 517_823, 14: 1_035_645}
CURVES = {
    "jft_b16": (8e-4, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_b32": (8e-4, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_l32": (6e-4, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_l16_7ep": (4e-4, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_l16_14ep": (4e-4, 1e-5, 10_000, JFT_STEPS[14], "linear"),
    "jft_h14": (3e-4, 1e-5, 10_000, JFT_STEPS[14], "linear"),
    "jft_r50x1": (1e-3, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_r50x2": (1e-3, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_r101x1": (8e-4, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_r152x1": (6e-4, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_r152x2": (6e-4, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_r50_b16": (8e-4, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_r50_b32": (8e-4, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_r50_l32": (2e-4, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_r50_l16_7ep": (4e-4, 1e-5, 10_000, JFT_STEPS[7], "linear"),
    "jft_r50_l16_14ep": (4e-4, 1e-5, 10_000, JFT_STEPS[14], "linear"),
    "in21k_b16": (1e-3, 1e-5, 10_000, 311_949, "linear"),
    "in21k_b32": (1e-3, 1e-5, 10_000, 311_949, "linear"),
    "in21k_l16_30ep": (1e-3, 1e-5, 10_000, 103_983, "linear"),
    "in21k_l32_30ep": (1e-3, 1e-5, 10_000, 103_983, "linear"),
    "in21k_l16_90ep": (1e-3, 1e-5, 10_000, 311_949, "linear"),
    "in21k_l32_90ep": (1e-3, 1e-5, 10_000, 311_949, "linear"),
    **{f"in1k_{v}": (3e-3, 0, 10_000, 93_836, "cosine") for v in ("b16", "b32", "l16", "l32")},
    **{
        f"augreg_in21k_{v}": (1e-3, 0, 10_000, 1_039_829, "cosine")
        for v in ("ti16", "s32", "s16", "b32", "b16", "l16", "r_ti16", "r26_s32", "r50_l32")
    },
    **{f"augreg_in1k_{v}": (1e-3, 0, 10_000, 93_836, "cosine") for v in ("s16", "b32", "b16")},
    "plain_s16_90ep": (1e-3, 0, 10_000, 112_603, "cosine"),
    "plain_s16_150ep": (1e-3, 0, 10_000, 187_671, "cosine"),
    "plain_s16_300ep": (1e-3, 0, 10_000, 375_342, "cosine"),
    "deit3_in1k_s16": (4e-3, 1e-5, 3_128, 500_456, "cosine"),
    **{f"deit3_in1k_{v}": (3e-3, 1e-5, 3_128, 500_456, "cosine") for v in ("b16", "l16", "h14")},
    **{
        f"deit3_in1k_{v}_224": (1e-5, 1e-5, 12_512, 50_046, "cosine") for v in ("b16", "l16", "h14")
    },
    **{
        f"deit3_in21k_{v}": (1e-3, 1e-5, 34_661, 1_663_726, "cosine") for v in ("s16", "b16", "l16")
    },
    "deit3_in21k_h14": (1e-3, 1e-5, 34_661, 623_897, "cosine"),
    **{
        f"deit3_in21k_{v}_in1k": (3e-4, 1e-5, 3_128, 31_279, "cosine")
        for v in ("s16", "b16", "l16", "h14")
    },
    "finetune_imagenet": (0.03, 0, 500, 20_000, "cosine"),
    "finetune_imagenet_l16_512": (0.03, 0, 500, 20_000, "cosine"),
    "finetune_imagenet_h14_518": (0.03, 0, 500, 20_000, "cosine"),
    "finetune_cifar10": (0.003, 0, 500, 10_000, "cosine"),
    "finetune_cifar100": (0.01, 0, 500, 10_000, "cosine"),
    "finetune_pets": (0.003, 0, 100, 500, "cosine"),
    "finetune_flowers": (0.003, 0, 100, 500, "cosine"),
    "finetune_vtab": (0.01, 0, 200, 2_500, "cosine"),
}
# Name -> warm-up, drops, whole length in steps.
DROPS = {
    "bit_small": (100, (200, 300, 400), 500),
    "bit_medium": (500, (3_000, 6_000, 9_000), 10_000),
    "bit_large": (500, (6_000, 12_000, 18_000), 20_000),
}


def schedule_by(name):
    config, _ = config_of(name)
    samples = SAMPLES[dataset_of(config)]
    total = rhythm_of(config, samples).total_steps
    return schedule_of(config, total, samples)


def test_every_recipe_has_a_curve_here():
    assert {*CURVES, *DROPS} == set(PAPERS)


@pytest.mark.parametrize("name", CURVES)
def test_the_learning_rate_is_the_paper_s_at_five_points(name):
    base, end, warmup, total, kind = CURVES[name]
    schedule = schedule_by(name)

    assert schedule.total_steps == total
    for step in (warmup // 2, warmup, total // 3, total * 3 // 4, total - 1):
        wanted = linear_or_cosine(step, base, end, warmup, total, kind)
        assert schedule.lr_at(step) == pytest.approx(wanted, rel=1e-9), step


@pytest.mark.parametrize("name", DROPS)
def test_the_bit_hyper_rule_drops_where_its_code_does(name):
    warmup, drops, total = DROPS[name]
    schedule = schedule_by(name)

    assert schedule.total_steps == total
    assert schedule.lr_at(warmup // 2) == pytest.approx(0.0015)
    for number, (start, stop) in enumerate(zip((warmup, *drops), (*drops, total), strict=True)):
        assert schedule.lr_at((start + stop) // 2) == pytest.approx(0.003 / 10**number)


@pytest.mark.slow
def test_five_recipes_train_two_steps_as_toys(commands, digits, tmp_path):
    names = ("augreg_in1k_b16", "deit3_in1k_s16", "plain_s16_90ep", "in21k_b16", "finetune_cifar10")
    for name in names:
        run_dir = tmp_path / name
        words = toy_words(name, digits, run_dir)
        if verb_of(name) == "finetune":
            words += ["--init", str(tmp_path / source_of(name))]

        commands.run(verb_of(name), *words)

        rows = step_rows(run_dir)
        assert [row["step"] for row in rows] == [1, 2]
        assert all(math.isfinite(row["train/loss"]) for row in rows)
