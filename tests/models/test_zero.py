"""Every kind of layer under ZeRO's partitions: what stage 3 trains is what stage 0 trains."""

import pytest

from tests.helpers.runs import CHECKOUT, Commands, step_rows

pytestmark = [pytest.mark.dist, pytest.mark.e2e, pytest.mark.slow]

DROPS = ["drop_rate=0.1", "drop_path_rate=0.2"]
MODELS = {
    "serial": [
        "class_token=false", "global_pool=map", "mlp=swiglu", "qk_norm=true", "init_values=0.1",
        "pos_embed=relative", "pos_embed_at=every", "grad_checkpointing=true", *DROPS,
    ],
    "parallel": [
        "block=parallel", "qkv_bias=false", "norm=rmsnorm", "reg_tokens=2", "pre_norm=true",
        "pos_embed=learned2d", "patch_drop_rate=0.25", *DROPS,
    ],
    "pairs": ["block=pairs", "pos_embed_at=every", "grad_checkpointing=true", *DROPS],
    "hybrid": ["variant=R26+mu/32", "img_size=32", "grad_checkpointing=true", *DROPS],
    "resnet": ["variant=R26x1", "depth=none", "num_heads=none", "embed_dim=none", "mlp_dim=none",
               "grad_checkpointing=true"],
}  # fmt: skip


# Four starts of two ranks each: the rest is for the long runs.
QUICK = ("serial", "hybrid")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.soak) for n in MODELS]
)
def test_stage_3_trains_what_stage_0_trains(commands: Commands, tiny_recipe: str, name: str):
    words = [word for leaf in MODELS[name] for word in ("--set", f"model.{leaf}")]
    words += ["--set", "run.duration=4steps"]
    rows = {}
    for stage in (0, 3):
        run_dir = commands.folder / f"zero{stage}"
        ds_config = str(CHECKOUT / "configs" / f"zero{stage}.json")
        commands.run(
            "pretrain", "--recipe", tiny_recipe, "--ds-config", ds_config, "--run-dir",
            str(run_dir), *words, ranks=2,
        )  # fmt: skip
        rows[stage] = step_rows(run_dir)

    assert len(rows[0]) == 4
    for key in ("train/loss", "train/grad_norm"):
        found, wanted = ([row[key] for row in rows[stage]] for stage in (3, 0))
        assert found == pytest.approx(wanted, rel=1e-3), key
    assert all(row["train/grad_norm"] > 0 for row in rows[0])
