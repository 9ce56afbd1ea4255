"""The recipes in configs/, and what makes a toy of each."""

import re
import tomllib
from pathlib import Path

from tests.helpers.runs import CHECKOUT
from vitscale.config.variants import is_resnet, split_hybrid

CONFIGS = CHECKOUT / "configs"
# Those that need no store: their data is made at the start.
QUICK = ("quickstart", "quickstart_finetune")
PAPERS = sorted(path.stem for path in CONFIGS.glob("*.toml") if path.stem not in QUICK)


def tree_of(name: str) -> dict:
    return tomllib.loads((CONFIGS / f"{name}.toml").read_text())


def verb_of(name: str) -> str:
    """Give the verb in the command that the recipe's own comment shows."""
    text = (CONFIGS / f"{name}.toml").read_text()
    command = rf"^#   deepspeed launchers/(\w+)\.py --recipe configs/{name}\.toml --ds-config "
    match = re.search(command, text, flags=re.MULTILINE)
    assert match is not None, name
    return match[1]


def source_of(name: str) -> str | None:
    """Give the recipe whose run folder a recipe starts from."""
    source = tree_of(name).get("init", {}).get("source")
    return Path(source).name.removesuffix("-zero2") if source else None


def sets(*assignments: str) -> list[str]:
    return [word for text in assignments for word in ("--set", text)]


def toy_words(name: str, digits: Path, run_dir: Path) -> list[str]:
    """Give flags that shrink model, picture, batch and length, and leave all else as it is."""
    tree = tree_of(name)
    variant = tree["model"]["variant"]
    small = ["model.img_size=" + ("32" if is_resnet(variant) else str(2 * _stride(variant)))]
    if not is_resnet(variant):
        small += ["model.embed_dim=32", "model.depth=2", "model.num_heads=2", "model.mlp_dim=64"]
    small += [f'data.train="{digits}/train"', f'data.val="{digits}/test"', "data.num_workers=0"]
    small += ["batch.global_batch=24", "batch.micro_batch=none", "optim.warmup=1steps"]
    small += ["run.duration=2steps", "run.precision=fp32", "run.log_every=1"]
    small += ["run.eval_every=none", "run.save_every=none"]
    if "drop_at" in tree["optim"]:
        small += ['optim.drop_at=["1steps"]']
    return [
        *("--recipe", f"configs/{name}.toml", "--run-dir", str(run_dir)),
        *("--ds-config", "configs/zero2.json"),
        *sets(*small),
    ]


def _stride(variant: str) -> int:
    """Give the side of what becomes one token, px."""
    return int(split_hybrid(variant)[1].partition("/")[2])
