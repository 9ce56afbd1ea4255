"""From files and flags to a RunConfig: TOML, `--set`, and every problem in one message."""

import copy
import difflib
import json
import sys
import tomllib
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from vitscale.config.errors import UserError
from vitscale.config.recipe import RunConfig

PACKAGE_DIR = Path(__file__).resolve().parents[1]


def find_config(path: str) -> Path:
    """Find a recipe or DeepSpeed JSON: as given, else among the configs that come with vitscale.

    Raises:
        UserError: It is in neither place.
    """
    given = Path(path).expanduser()
    if given.is_file():
        return given
    # An installed package carries them inside, a checkout beside it.
    folders = [PACKAGE_DIR / "configs", PACKAGE_DIR.parent / "configs"]
    if given.parent in (Path("."), Path("configs")):
        for folder in folders:
            if (folder / given.name).is_file():
                return folder / given.name
    beside = _files_in(given.parent, given.suffix)
    shipped = {f"configs/{f.name}" for folder in folders for f in _files_in(folder, given.suffix)}
    known = {path.stem: str(path) for path in beside} | {Path(p).stem: p for p in sorted(shipped)}
    close = difflib.get_close_matches(given.stem, known, n=1)
    hint = (
        f"did you mean {known[close[0]]}?" if close else f"there are {', '.join(sorted(shipped))}"
    )
    raise UserError(f"no file {path!r}; {hint}")


def _files_in(folder: Path, suffix: str) -> list[Path]:
    """List the recipes of a folder, or the JSONs; both when the suffix is neither's."""
    kinds = {suffix} & {".toml", ".json"} or {".toml", ".json"}
    if not folder.is_dir():
        return []
    return sorted(f for f in folder.iterdir() if f.suffix in kinds and f.is_file())


def parse_set(assignment: str) -> tuple[list[str], Any]:
    """Split "optim.lr=1e-3" into its path and value; the value is TOML, or else plain text.

    Raises:
        UserError: There is no "=" or no key before it.
    """
    key, equals, text = assignment.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise UserError(f"--set {assignment!r}: write it as table.key=value, such as optim.lr=1e-3")
    if text.strip() == "none":
        return path, None
    try:
        return path, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return path, text


def apply_sets(tree: dict[str, Any], assignments: list[str]) -> list[str]:
    """Write `--set` values into the tree in place and return what was wrong with them."""
    problems = []
    for assignment in assignments:
        try:
            path, value = parse_set(assignment)
        except UserError as error:
            problems.append(str(error))
            continue
        node: Any = tree
        for part in path[:-1]:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            problems.append(f"--set {assignment!r}: {'.'.join(path[:-1])} is not a table")
            continue
        node[path[-1]] = value
    return problems


def load_recipe(path: Path | None, assignments: list[str]) -> tuple[RunConfig | None, list[str]]:
    """Read a recipe with its overrides.

    Args:
        path: A TOML file; None: an empty recipe, which the overrides fill.
        assignments: "table.key=value", as `--set` takes them.

    Returns:
        The recipe, or None where there is none, and all problems found. Where there are problems
        it holds the sound leaves only, so that contradictions among them can be told as well.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8")) if path else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return None, [f"{path} is not TOML: {error}"]
    problems = apply_sets(tree, assignments)
    try:
        text = json.dumps(tree)
    except TypeError as error:
        return None, [*problems, f"{path}: {error}; dates and times have no place in a recipe"]
    config, faults = _validate(text)
    if config is None:
        problems += dict.fromkeys(_sentence(fault) for fault in faults)
        config, _ = _validate(json.dumps(_without(tree, faults)))
    more = config.problems() if config is not None else ()
    return config, problems + [text for text in more if not is_told(text, problems)]


def is_told(text: str, problems: list[str]) -> bool:
    """Whether a problem only follows from another one with the same leaf, or is that one."""
    leaf = text.split()[0]
    return any(problem == text or problem.startswith(f"{leaf}:") for problem in problems)


def _validate(text: str) -> tuple[RunConfig | None, list[Any]]:
    try:
        # The JSON route is strict and still takes TOML's arrays where the tree has tuples.
        return RunConfig.model_validate_json(text), []
    except ValidationError as error:
        return None, list(error.errors())


# What is missing and needed gets these values while the rest is checked; no check looks at them.
# Parts of a fault's place that name a branch of a union, not a key.
BRANCHES = ("str", "list[str]", "<uri>", "<sets>")
STAND_INS: dict[str, dict[str, Any]] = {
    "data": {"train": "missing"},
    "optim": {"lr": sys.float_info.max},
    "run": {"duration": "1steps"},
}


def _without(tree: dict[str, Any], faults: list[Any]) -> dict[str, Any]:
    """Copy a tree without its faulty leaves, and with stand-ins for those that must be there."""
    tree = copy.deepcopy(tree)
    for fault in faults:
        node: Any = tree
        *tables, leaf = fault["loc"]
        for part in tables:
            # Inside a tuple or a union the whole leaf is left out.
            if not isinstance(node.get(part), dict):
                leaf = part
                break
            node = node[part]
        node.pop(leaf, None)
    for table, leaves in STAND_INS.items():
        tree[table] = {**leaves, **tree.get(table, {})}
    return tree


def _sentence(detail: Any) -> str:
    """Say one pydantic error the way this project says errors."""
    path = ".".join(str(part) for part in detail["loc"] if part not in BRANCHES)
    if detail["type"] == "extra_forbidden":
        fields = _fields_at(detail["loc"][:-1])
        close = difflib.get_close_matches(str(detail["loc"][-1]), fields, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(fields))}"
        return f"unknown key {path!r}; {hint}"
    if detail["type"] == "missing":
        return f"missing key {path!r}; every recipe needs it"
    message = detail["msg"].removeprefix("Value error, ")
    got = detail.get("input")
    shown = f", got {got!r}" if not isinstance(got, dict) else ""
    return f"{path}: {message[:1].lower()}{message[1:]}{shown}"


def _fields_at(path: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the section at this path."""
    section: type[BaseModel] = RunConfig
    for part in path:
        if not isinstance(part, int) and part not in BRANCHES:
            section = _section_in(section.model_fields[part].annotation)
    return list(section.model_fields)


def _section_in(annotation: Any) -> type[BaseModel]:
    """Find the section in a field's type, which may be a union or a list of it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(inner) for inner in typing.get_args(annotation) if _holds(inner))
    return next(found)


def _holds(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(_holds(inner) for inner in typing.get_args(annotation))
