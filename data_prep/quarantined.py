"""What a run put in quarantine, looked at again, and taken out of the dataset for later runs."""

import json
import sys
from pathlib import Path
from typing import Any

from data_prep.images import decode_fully
from data_prep.verdict import BadInputError
from vitscale.config.errors import EXIT_DATA, EXIT_DONE, DataError, UserError
from vitscale.data.dataset import Dataset, open_dataset
from vitscale.data.exclusion import load_exclusions, write_exclusions
from vitscale.data.manifest import load_index

REASON = "quarantine"


def merge_quarantine(uri: str, quarantine: Path, exclude: str | None) -> int:
    """Look again at the bad samples of a run, and list those that are still bad.

    Args:
        uri: The dataset.
        quarantine: quarantine.jsonl of a run, or its folder.
        exclude: List of excluded samples to write or to add to (data.exclude); None: only look.

    Returns:
        The exit code: 0 when none is bad or all that are were listed.

    Raises:
        UserError: The file or the list is none, or they are of another dataset.
    """
    data = open_dataset(uri)
    rows = _rows_of(quarantine, data)
    bad = []
    for row in rows:
        problem = _problem(data, int(row["at"]))
        print(f"shard {row['shard']}, key {row['key']}: {problem or 'is sound now'}")
        if problem:
            bad.append(row)
    print(f"{len(bad)} of {len(rows)} samples in quarantine are damaged", file=sys.stderr)
    if not bad or exclude is None:
        return EXIT_DATA if bad else EXIT_DONE
    kept = _listed(exclude, data)
    known = {(row["shard"], row["key"]) for row in kept}
    added = [_listing(row) for row in bad if (row["shard"], row["key"]) not in known]
    about = {"made_by": "vitscale verify --quarantine"}
    write_exclusions(exclude, kept + added, data.manifest.digest, about)
    print(
        f"excluded {len(added)} more, {len(kept) + len(added)} in all: --set data.exclude={exclude}"
    )
    return EXIT_DONE


def _rows_of(quarantine: Path, data: Dataset) -> list[dict[str, Any]]:
    """Read the samples of this dataset, with their place in it."""
    path = quarantine / "quarantine.jsonl" if quarantine.is_dir() else quarantine
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [row for row in lines if row["shard"] in data.manifest.shards.names]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no quarantine of a run: {error!r}; give the run folder or its "
            "quarantine.jsonl"
        ) from error
    names = {name: shard_id for shard_id, name in enumerate(data.manifest.shards.names)}
    starts = data.manifest.shards.starts
    found = []
    for row in rows:
        shard_id = names[row["shard"]]
        index = load_index(data.storage, data.manifest, shard_id)
        if row["key"] not in index.keys:
            raise UserError(
                f"{path}: key {row['key']} of shard {row['shard']} is not in {data.storage.uri}; "
                "the run read another dataset"
            )
        at = index.keys.index(row["key"])
        found.append(row | {"at": int(starts[shard_id]) + at, "xxh3_64": int(index.xxh3[at])})
    return found


def _problem(data: Dataset, sample_index: int) -> str:
    try:
        decode_fully(data[sample_index].image)
    except (DataError, BadInputError) as error:
        return str(error)
    return ""


def _listed(place: str, data: Dataset) -> list[dict[str, Any]]:
    """Read the rows of a list that is there."""
    try:
        known = load_exclusions(place)
    except UserError:
        return []
    if known.train_digest != data.manifest.digest:
        raise UserError(
            f"{place} is for another dataset than {data.storage.uri}; choose another file"
        )
    rows: list[dict[str, Any]] = known.rows.to_pylist()
    return rows


def _listing(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "shard": row["shard"],
        "key": row["key"],
        "xxh3_64": row["xxh3_64"],
        "reason": REASON,
        "distance": 0.0,
        "against": "",
        "against_key": "",
    }
