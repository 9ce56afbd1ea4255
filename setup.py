"""Three ordinary packages and a small C extension; everything else is in pyproject.toml."""

import sys

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

APPS = ["launchers", "data_prep"]
# One build serves all Pythons from 3.11 on. Sums must come out the same on every processor, so
# multiplications and additions are not fused.
PIXELS = Extension(
    "vitscale.data._pixels",
    ["vitscale/data/_pixels.c"],
    libraries=["jpeg", "m"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    extra_compile_args=["-O3", "-ffp-contract=off"],
    py_limited_api=True,
    optional=True,
)


class BuildOrGoOn(build_ext):
    """Builds the extension, or says why not and what that means."""

    def build_extension(self, ext: Extension) -> None:
        """Build one extension; an optional one may fail."""
        try:
            super().build_extension(ext)
        except Exception as error:  # no compiler, no headers, or a libjpeg that is not turbo
            print(
                f"vitscale: {ext.name} is not built ({error}). JPEGs will be decoded by Pillow: "
                "the same pixels, several times slower. For the fast path install a C compiler and "
                "the headers of libjpeg-turbo (libjpeg-turbo8-dev, libjpeg62-turbo-dev or "
                "libjpeg-turbo-devel), then install vitscale again.",
                file=sys.stderr,
            )
            raise  # setuptools goes on, for it is optional


setup(
    packages=[
        *find_packages(include=["vitscale", "vitscale.*", *APPS, *(f"{a}.*" for a in APPS)]),
        "vitscale.configs",
    ],
    package_dir={"vitscale.configs": "configs"},
    package_data={
        "vitscale": ["py.typed"],
        "vitscale.data": ["*.pyi"],
        "vitscale.configs": ["*.json", "*.toml"],
    },
    exclude_package_data={"vitscale.data": ["*.c"]},
    ext_modules=[PIXELS],
    cmdclass={"build_ext": BuildOrGoOn},
)
