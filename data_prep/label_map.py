"""A given order of the classes: `--label-map`."""

import json
from pathlib import Path

from vitscale.config.errors import UserError
from vitscale.data.manifest import load_class_names, load_manifest
from vitscale.data.storage import open_storage


def load_label_map(place: str) -> tuple[str, ...]:
    """Read the names of the classes in their order.

    Args:
        place: A text file with one name a line, a JSON file with a list of names or an object name
            -> index, or the URI of a packed dataset, whose first label column is taken.

    Raises:
        UserError: It cannot be read, or is no map.
    """
    path = Path(place.removeprefix("file://")).expanduser()
    if "://" in place.removeprefix("file://") or path.is_dir():
        storage = open_storage(place)
        return tuple(load_class_names(storage, load_manifest(storage)))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--label-map {place}: cannot be read: {error}") from error
    names = _from_json(place, text) if text.lstrip()[:1] in ("[", "{") else text.splitlines()
    names = [name for name in names if name]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(names) < 10_000 else []
    if twice or len(set(names)) != len(names):
        raise UserError(f"--label-map {place}: names come twice: {', '.join(twice[:5])}")
    if not names:
        raise UserError(f"--label-map {place}: holds no names; write one a line")
    return tuple(names)


def _from_json(place: str, text: str) -> list[str]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"--label-map {place}: is no JSON: {error}") from error
    if isinstance(value, dict):
        by_index = {index: name for name, index in value.items()}
        if sorted(by_index) != list(range(len(value))):
            raise UserError(
                f"--label-map {place}: the indices are not 0 to {len(value) - 1}, each once"
            )
        return [by_index[index] for index in range(len(value))]
    if not all(isinstance(name, str) for name in value):
        raise UserError(f"--label-map {place}: holds other things than names")
    return list(value)
