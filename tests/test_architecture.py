"""The rules that keep the parts apart, read from the source; each has a twin that proves it bites.

A rule is a function from a path and its source to the sentences of what is wrong there.
"""

import ast
import fnmatch
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGES = ("vitscale", "launchers", "data_prep")
SOURCES = {
    path.relative_to(CHECKOUT).as_posix(): path.read_text(encoding="utf-8")
    for package in PACKAGES
    for path in sorted((CHECKOUT / package).rglob("*.py"))
}

# One-way: a layer imports lower ones only; of two on one level neither imports the other.
LAYERS = {
    "vitscale.cli": 7,
    "launchers": 6,
    "data_prep": 6,
    "vitscale.training": 5,
    "vitscale.evaluation": 4,
    "vitscale.models": 3,
    "vitscale.data": 3,
    "vitscale.observe": 2,
    "vitscale.distributed": 1,
    "vitscale.config": 0,
}

# Module -> where it may be imported at the top of a file, and where only inside functions.
HOME = {
    "deepspeed": (["vitscale/training/engine.py"], []),
    "boto3": ([], ["vitscale/data/s3_client.py"]),
    "botocore": ([], ["vitscale/data/s3_client.py"]),
    "webdataset": ([], ["data_prep/sources/*"]),
    "mpi4py": ([], ["data_prep/comm.py"]),
    "pyarrow": (["vitscale/data/*", "data_prep/*"], []),
    "PIL": (
        [f"vitscale/data/{n}.py" for n in ("decode", "pixels", "picture")]
        + [f"vitscale/data/{n}.py" for n in ("image_ops", "randaugment")]
        + ["data_prep/*", "launchers/bench/*"],
        [],
    ),
    "simplejpeg": (["data_prep/image_pixels.py"], []),
    "urllib3": ([], ["data_prep/sources/http_files.py", "vitscale/data/s3_client.py"]),
    "scipy": ([], ["data_prep/sources/*"]),
    "cv2": ([], ["data_prep/image_pixels.py"]),
    "imagehash": ([], ["data_prep/fingerprint.py"]),
    "torchvision": ([], []),
    "sklearn": ([], ["data_prep/sources/*", "data_prep/bench/*"]),
    "matplotlib": ([], ["vitscale/observe/report.py", "vitscale/observe/dataset_figure.py"]),
    "tensorboard": ([], ["vitscale/observe/writers.py"]),
    "torch.utils.tensorboard": ([], ["vitscale/observe/writers.py"]),
    "torch.distributed": (["vitscale/training/engine.py"], ["vitscale/distributed.py"]),
    "timm": ([], []),
    "transformers": ([], []),
}
# Files that must work, or start fast, where there is no torch. `safetensors.torch` imports it.
WITHOUT_TORCH = [
    "vitscale/__init__.py",
    "vitscale/cli.py",
    "vitscale/config/*",
    "vitscale/models/__init__.py",
    "vitscale/models/cost.py",
    "vitscale/models/names.py",
    "vitscale/models/resnet_cost.py",
    *(
        f"vitscale/data/{name}.py"
        for name in (
            "__init__",
            "storage",
            "s3_storage",
            "file_storage",
            "manifest",
            "dataset",
            "pixels",
            "augment",
            "decode",
            "picture",
            "resample",
            "image_ops",
            "randaugment",
        )
    ),
    *(
        f"vitscale/data/{name}.py"
        for name in (
            "shard_file",
            "tar_shard",
            "arrow_shard",
            "label_columns",
            "lease",
            "exclusion",
        )
    ),
    *(f"vitscale/data/{name}.py" for name in ("order", "permute", "windows", "cache", "audit")),
    *(f"vitscale/data/{name}.py" for name in ("activity", "hedge", "forked", "cache_folder")),
    *(f"vitscale/data/{name}.py" for name in ("upcoming", "prefetch")),
    *(f"vitscale/data/{name}.py" for name in ("node_share", "shuffle_quality", "train_sets")),
    *(f"vitscale/observe/{name}.py" for name in ("log", "progress", "metrics", "report")),
    *(f"vitscale/observe/{name}.py" for name in ("rounds", "bench_text")),
    "data_prep/*",
]
TORCH_INSIDE_FUNCTIONS = ["launchers/*", "vitscale/distributed.py"]

RANK_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 420, 80
# Packages that hold more than a docstring, and why.
SPEAKING_INITS = {
    "vitscale/__init__.py": "the version",
    "vitscale/data/__init__.py": "open_dataset is what notebooks import",
    "vitscale/models/__init__.py": "create_model, loaded lazily because it needs torch",
}


@dataclass(frozen=True)
class Import:
    """One imported module; `from a import b` counts as a.b, which may be a module."""

    module: str
    line: int
    # Runs when the file is imported: not in a function, not for the type checker only.
    at_top: bool

    def is_of(self, package: str) -> bool:
        return self.module == package or self.module.startswith(f"{package}.")


def imports_of(source: str) -> list[Import]:
    found = []

    def visit(node: ast.AST, at_top: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            found.extend(Import(f"{start}.{a.name}", node.lineno, at_top) for a in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_top = False
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, at_top)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, at_top)

    visit(ast.parse(source), True)
    return found


def is_any(path: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def layer_of(module: str) -> str | None:
    fits = [name for name in LAYERS if module == name or module.startswith(f"{name}.")]
    return fits[0] if fits else None


def layers(path: str, source: str) -> list[str]:
    own = layer_of(path.removesuffix(".py").replace("/", "."))
    problems = []
    for found in imports_of(source):
        other = layer_of(found.module)
        if own is None or other is None or own == other or LAYERS[other] < LAYERS[own]:
            continue
        problems.append(f"{path}:{found.line}: {own} must not import {found.module}")
    return problems


def third_parties(path: str, source: str) -> list[str]:
    problems = []
    for found in imports_of(source):
        for module, (anywhere, inside) in HOME.items():
            if not found.is_of(module) or is_any(path, anywhere):
                continue
            if not is_any(path, inside):
                problems.append(f"{path}:{found.line}: {module} has no place here")
            elif found.at_top:
                problems.append(f"{path}:{found.line}: {module} only inside functions")
    return problems


def torch_free(path: str, source: str) -> list[str]:
    problems = []
    for found in imports_of(source):
        if not (found.is_of("torch") or found.is_of("safetensors.torch")):
            continue
        for_types_only = is_any(path, TORCH_INSIDE_FUNCTIONS) and not found.at_top
        if is_any(path, [*WITHOUT_TORCH, *TORCH_INSIDE_FUNCTIONS]) and not for_types_only:
            problems.append(f"{path}:{found.line}: {found.module} in a file that needs no torch")
    return problems


def absolute_imports(path: str, source: str) -> list[str]:
    return [
        f"{path}:{found.line}: relative import or future annotations"
        for found in imports_of(source)
        if found.module.startswith(".") or found.module == "__future__.annotations"
    ]


def strings_of(source: str) -> list[tuple[str, int]]:
    nodes = ast.walk(ast.parse(source))
    return [
        (n.value, n.lineno)
        for n in nodes
        if isinstance(n, ast.Constant) and n.value and isinstance(n.value, str)
    ]


def rank_readers(path: str, source: str) -> list[str]:
    if path == "vitscale/distributed.py":
        return []
    found = [(text, line) for text, line in strings_of(source) if text in RANK_NAMES]
    return [
        f"{path}:{line}: {text} is read in vitscale/distributed.py only" for text, line in found
    ]


def verbs_in_cli_only(path: str, source: str) -> list[str]:
    if not path.startswith("vitscale/") or path == "vitscale/cli.py":
        return []
    names = [(found.module, found.line) for found in imports_of(source)]
    pattern = re.compile(r"(launchers|data_prep)(\.\w+)*")
    return [
        f"{path}:{line}: the library must not name {text}"
        for text, line in [*strings_of(source), *names]
        if pattern.fullmatch(text)
    ]


def quiet_imports(path: str, source: str) -> list[str]:
    calls = [
        n
        for n in ast.parse(source).body
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)
    ]
    return [f"{path}:{node.lineno}: importing a module must do nothing" for node in calls]


def sizes(path: str, source: str) -> list[str]:
    problems = []
    if (count := source.count("\n")) > MAX_FILE_LINES:
        problems.append(f"{path}: {count} lines, {MAX_FILE_LINES} at most")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            count = node.end_lineno - node.lineno + 1
            if count > MAX_FUNCTION_LINES:
                problems.append(
                    f"{path}: {node.name} has {count} lines, {MAX_FUNCTION_LINES} at most"
                )
    return problems


def empty_inits(path: str, source: str) -> list[str]:
    if not path.endswith("__init__.py") or path in SPEAKING_INITS:
        return []
    body = ast.parse(source).body
    rest = body[1:] if body and ast.get_docstring(ast.parse(source)) else body
    return [f"{path}: holds more than a docstring"] if rest else []


def foreign_names() -> set[str]:
    installed = importlib.metadata.packages_distributions()
    return (set(sys.stdlib_module_names) | set(installed)) - set(PACKAGES)


def names(
    path: str, source: str, foreign: frozenset[str] = frozenset(foreign_names())
) -> list[str]:
    stem = Path(path).stem
    if stem in VAGUE_NAMES:
        return [f"{path}: a name that says nothing"]
    # Started by path, a script has its own folder first on the import path.
    if path.startswith(("launchers/", "data_prep/")) and stem in foreign:
        return [f"{path}: has the name of another module"]
    return []


def plain_text(path: str, source: str) -> list[str]:
    problems = [] if source.isascii() else [f"{path}: not ASCII"]
    pattern = r"(?<![\w.])/(home|root|work)/|\bindex-url\b|INDEX_URL"
    if path == "tests/test_architecture.py":
        return problems
    for number, line in enumerate(source.splitlines(), 1):
        if found := re.search(pattern, line):
            problems.append(f"{path}:{number}: {found[0]!r} ties the text to one machine")
    return problems


RULES = [
    layers,
    third_parties,
    torch_free,
    absolute_imports,
    rank_readers,
    verbs_in_cli_only,
    quiet_imports,
    sizes,
    empty_inits,
    names,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_obey(rule):
    problems = [text for path, source in SOURCES.items() for text in rule(path, source)]

    assert not problems, "\n".join(problems)


def test_text_files_are_plain_and_name_no_machine():
    kinds = {".py", ".md", ".toml", ".json", ".txt", ".sh", ".cfg", ".sbatch", ""}
    tops = [*PACKAGES, "tests", "configs", "docs", "benchmarks", ".ci"]
    files = [path for path in CHECKOUT.iterdir() if path.is_file()]
    files += [path for top in tops for path in (CHECKOUT / top).rglob("*") if path.is_file()]
    texts = [p for p in files if p.suffix in kinds and "__pycache__" not in p.parts]

    problems = []
    for path in texts:
        source = path.read_text(encoding="utf-8")
        problems += plain_text(path.relative_to(CHECKOUT).as_posix(), source)

    assert len(texts) > len(SOURCES)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (layers, "vitscale/config/x.py", "import vitscale.distributed"),
        (layers, "vitscale/observe/x.py", "def f():\n    from vitscale import data"),
        (layers, "vitscale/models/x.py", "from vitscale.data.order import Order"),
        (layers, "vitscale/data/x.py", "import vitscale.models.vit"),
        (layers, "vitscale/training/x.py", "from launchers import pretrain"),
        (layers, "launchers/x.py", "from data_prep.pack import main"),
        (layers, "data_prep/x.py", "import launchers.export"),
        (layers, "vitscale/evaluation/x.py", "if TYPE_CHECKING:\n    import vitscale.training"),
        (third_parties, "vitscale/training/loop.py", "import deepspeed"),
        (third_parties, "vitscale/data/s3_storage.py", "import boto3"),
        (third_parties, "vitscale/data/cache.py", "def f():\n    from botocore import config"),
        (third_parties, "vitscale/data/tar_shard.py", "from webdataset.writer import TarWriter"),
        (third_parties, "data_prep/comm.py", "try:\n    import mpi4py\nexcept OSError: ..."),
        (third_parties, "vitscale/training/x.py", "import pyarrow.parquet"),
        (third_parties, "vitscale/training/x.py", "from torch.utils import tensorboard"),
        (third_parties, "vitscale/models/vit.py", "def f():\n    import timm"),
        (third_parties, "vitscale/training/x.py", "import torch.distributed as dist"),
        (third_parties, "vitscale/distributed.py", "from torch import distributed"),
        (torch_free, "vitscale/config/x.py", "def f():\n    import torch"),
        (torch_free, "vitscale/models/cost.py", "from torch import nn"),
        (torch_free, "data_prep/x.py", "import torch.utils.data"),
        (torch_free, "vitscale/observe/log.py", "from safetensors.torch import load_file"),
        (torch_free, "launchers/x.py", "import torch"),
        (absolute_imports, "vitscale/x.py", "from . import config"),
        (absolute_imports, "vitscale/x.py", "from __future__ import annotations"),
        (rank_readers, "launchers/x.py", 'rank = os.environ["RANK"]'),
        (rank_readers, "vitscale/training/x.py", 'os.environ.get("WORLD_SIZE", 1)'),
        (verbs_in_cli_only, "vitscale/data/x.py", 'import_module("data_prep.pack")'),
        (verbs_in_cli_only, "vitscale/data/x.py", "def f():\n    import launchers.export"),
        (quiet_imports, "vitscale/x.py", "import logging\nlogging.basicConfig()"),
        (sizes, "vitscale/x.py", "\n" * 421),
        (sizes, "vitscale/x.py", "def f():\n" + "    a = 1\n" * 80),
        (empty_inits, "vitscale/training/__init__.py", '"""Words."""\nimport os'),
        (empty_inits, "launchers/__init__.py", "X = 1"),
        (names, "vitscale/data/utils.py", ""),
        (names, "launchers/profile.py", ""),
        (names, "data_prep/datasets/numpy.py", ""),
        (plain_text, "docs/x.md", "see /home/me/runs"),
        (plain_text, "Makefile", "pip --index-url x"),
        (plain_text, "vitscale/x.py", "# caf\u00e9"),
    ],
)  # fmt: skip
def test_every_rule_can_fail(rule, path, source):
    assert len(rule(path, source)) == 1


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (layers, "vitscale/cli.py", "import launchers.pretrain"),
        (layers, "vitscale/training/x.py", "import vitscale.models.vit, vitscale.data.order"),
        (third_parties, "vitscale/data/s3_client.py", "def f():\n    import boto3"),
        (third_parties, "vitscale/data/x.py", "import pyarrow as pa"),
        (torch_free, "vitscale/distributed.py", "if TYPE_CHECKING:\n    import torch"),
        (torch_free, "launchers/x.py", "def f():\n    import torch"),
        (rank_readers, "vitscale/x.py", 'name = "LOCAL_RANKS"'),
        (sizes, "vitscale/x.py", "\n" * 420),
        (empty_inits, "vitscale/x/__init__.py", '"""Words."""'),
        (names, "launchers/pretrain.py", ""),
        (plain_text, "docs/x.md", "the network/work of the workers"),
    ],
)  # fmt: skip
def test_rules_let_pass_what_is_right(rule, path, source):
    assert rule(path, source) == []


def test_the_tables_name_what_exists():
    patterns = [p for pair in HOME.values() for part in pair for p in part]
    for pattern in [*patterns, *WITHOUT_TORCH, *TORCH_INSIDE_FUNCTIONS, *SPEAKING_INITS]:
        assert any(fnmatch.fnmatch(path, pattern) for path in SOURCES), f"{pattern}: no such file"
    for path in SOURCES:
        module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        assert module == "vitscale" or layer_of(module), f"{path} is in no layer"
