"""The kinds of label that a dataset gives to its samples, and the names of their classes.

    labels.json    {"version": 2, "columns": [{"name": "label", "multi": false, "names": [..]}, ..]}

The first column is the one that is trained on when none is named. A sample has one class in a
column, or any number of classes where the column is multi-label; -1 stands for none.
"""

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

LABELS_VERSION = 2
LABELS_NAME = "labels.json"
NO_LABEL = -1


@dataclass(frozen=True)
class LabelColumn:
    """One kind of label."""

    # field name in indexes, Arrow shards and KEY.json
    name: str
    # any number of classes a sample
    multi: bool
    # index = label
    names: tuple[str, ...]

    @property
    def field(self) -> pa.Field:
        """Field of the column in a table: int64, or lists of them."""
        return pa.field(self.name, pa.list_(pa.int64()) if self.multi else pa.int64())

    def value(self, labels: tuple[int, ...]) -> int | list[int]:
        """Give a sample's labels as they are stored in the field."""
        if self.multi:
            return list(labels)
        return labels[0] if labels else NO_LABEL

    def summary(self) -> dict[str, Any]:
        """Give what a manifest says of the column."""
        return {"name": self.name, "multi": self.multi, "num_classes": len(self.names)}


def labels_json(columns: list[LabelColumn]) -> dict[str, Any]:
    """Give the content of labels.json."""
    return {
        "version": LABELS_VERSION,
        "columns": [
            {"name": column.name, "multi": column.multi, "names": list(column.names)}
            for column in columns
        ],
    }


def parse_labels(data: bytes) -> list[LabelColumn]:
    """Read labels.json.

    Raises:
        ValueError, KeyError, TypeError: It is not one, or of another version.
    """
    value = json.loads(data)
    if value["version"] != LABELS_VERSION:
        raise ValueError(f"version {value['version']}, expected {LABELS_VERSION}")
    return [
        LabelColumn(row["name"], bool(row["multi"]), tuple(row["names"]))
        for row in value["columns"]
    ]
