"""The wheel: what is in it, and that it works away from the checkout."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vitscale

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGES = ("vitscale", "launchers", "data_prep")
# What a build reads; the tests and docs are left behind on purpose.
INPUTS = (*PACKAGES, "configs", "setup.py", "pyproject.toml", "README.md", "LICENSE")

pytestmark = pytest.mark.slow


def command(words, folder, **extra):
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | extra,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build from a copy, so that no build folder of the checkout plays a part."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in (*INPUTS, "tests"):
        source = CHECKOUT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            shutil.copy(source, copy / name)
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command(["-m", "pip", "wheel", *flags, "--wheel-dir", str(out), "."], copy)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the unpacked wheel and nothing else."""
    target = tmp_path_factory.mktemp("site")
    flags = ["--no-deps", "--no-index", "--quiet", "--target", str(target)]
    command(["-m", "pip", "install", *flags, str(wheel)], target)
    return target


def expected_files():
    code = {
        path.relative_to(CHECKOUT).as_posix()
        for package in PACKAGES
        for path in (CHECKOUT / package).rglob("*.py")
    }
    shipped = {
        f"vitscale/configs/{path.name}"
        for kind in ("*.json", "*.toml")
        for path in (CHECKOUT / "configs").glob(kind)
    }
    return code | shipped | {"vitscale/py.typed", "vitscale/data/_pixels.pyi"}


def test_wheel_holds_the_three_packages_and_the_configs_and_no_more(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}

    # The C extension is there where it could be built.
    assert files - {"vitscale/data/_pixels.abi3.so"} == expected_files()
    assert "vitscale/configs/zero2.json" in files
    assert wheel.name.startswith(f"vitscale-{vitscale.__version__}-")


def test_installed_command_works_from_anywhere(installed):
    text = command(["-m", "vitscale.cli", "pretrain", "--dry-run"], "/", PYTHONPATH=str(installed))

    assert "batch: global_batch 48" in text
    assert "<- this run" in text


def test_installed_package_brings_its_configs(installed):
    script = (
        "from vitscale.config.load import find_config\n"
        "print(find_config('configs/zero2.json'), find_config('quickstart.toml'))"
    )

    places = command(["-c", script], "/", PYTHONPATH=str(installed)).split()

    folder = installed / "vitscale" / "configs"
    assert places == [str(folder / "zero2.json"), str(folder / "quickstart.toml")]


@pytest.mark.parametrize("verb", ["pack", "verify", "show", "finetune", "evaluate", "export"])
def test_installed_verbs_load(installed, verb):
    text = command(["-m", "vitscale.cli", verb, "--help"], "/", PYTHONPATH=str(installed))

    assert f"usage: vitscale {verb}" in text


def test_installed_script_is_the_console_command(installed):
    script = installed / "bin" / "vitscale"

    text = command([str(script), "--version"], "/", PYTHONPATH=str(installed))
    assert text == f"vitscale {vitscale.__version__}\n"


def test_generic_package_names_belong_to_vitscale_alone(installed):
    script = (
        "from importlib.metadata import packages_distributions\n"
        f"print(*(sorted(set(packages_distributions()[n])) for n in {PACKAGES}))"
    )

    text = command(["-c", script], "/", PYTHONPATH=str(installed))

    assert text.strip() == " ".join(["['vitscale']"] * len(PACKAGES))


def test_no_other_distribution_here_provides_our_packages():
    installed = importlib.metadata.packages_distributions()

    for package in PACKAGES:
        assert set(installed.get(package, ["vitscale"])) == {"vitscale"}
