"""Three ordinary packages of one distribution; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

APPS = ["launchers", "data_prep"]
setup(
    packages=[
        *find_packages(include=["vitscale", "vitscale.*", *APPS, *(f"{a}.*" for a in APPS)]),
        "vitscale.configs",
    ],
    package_dir={"vitscale.configs": "configs"},
    package_data={"vitscale": ["py.typed"], "vitscale.configs": ["*.json", "*.toml"]},
)
