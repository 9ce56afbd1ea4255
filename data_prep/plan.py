"""The plan of a pack: which input gets which key and shard, decided before any work.

A plan depends on the inputs (names, sizes, labels) and the settings alone, so any rank can do any
shard of it, now or after a restart, and write the same bytes. Its record on storage lets a later
run see whether it still is the same job.
"""

import hashlib
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from data_prep.images import Check, ImagePolicy
from data_prep.sources.build import Listing, Source, printable
from vitscale.config.errors import UserError
from vitscale.data.manifest import json_bytes, sha256_hex
from vitscale.data.tar_shard import BLOCK_BYTES, sample_bytes

PLAN_VERSION = 1
KEY_DIGITS = 9
SHOWN_DIFFERENCES = 12


@dataclass(frozen=True)
class Settings:
    """Everything besides the inputs that affects the bytes of a dataset."""

    split: str
    seed: int
    # aimed size of a shard in bytes, from the sizes of the inputs
    shard_bytes: int
    check: Check
    image: ImagePolicy

    def describe(self) -> dict[str, Any]:
        """Give the fields for the plan's record."""
        return {
            "format": "tar",
            "split": self.split,
            "seed": self.seed,
            "shard_bytes": self.shard_bytes,
            "check": self.check,
            "image": self.image.describe(),
        }


class Item(NamedTuple):
    """One input of a shard."""

    # position in the list of sources
    source: int
    name: str
    num_bytes: int
    label: int
    # why it cannot be read, known from the listing; else empty
    problem: str


class Task(NamedTuple):
    """One shard to be written; small enough to travel to whoever does it."""

    number: int
    # ordinal of the first input; keys count on from here
    first: int
    items: list[Item]
    plan_digest: str

    @property
    def name(self) -> str:
        """Name of the shard file."""
        return f"shard-{self.number:06d}.tar"


@dataclass(frozen=True)
class Plan:
    """All tasks, and the record that identifies them."""

    listings: list[Listing]
    classes: list[str]
    # per source: its label -> label in the dataset
    label_maps: list[npt.NDArray[np.int64]]
    # shuffled order of all inputs: source, position in its listing
    source_of: npt.NDArray[np.int64]
    row_of: npt.NDArray[np.int64]
    # shard s holds the inputs bounds[s] to bounds[s + 1]
    bounds: npt.NDArray[np.int64]
    # plan.json
    record: dict[str, Any]
    digest: str

    @property
    def num_inputs(self) -> int:
        """Inputs of all sources."""
        return len(self.source_of)

    @property
    def num_shards(self) -> int:
        """Shards, also those that may turn out empty."""
        return len(self.bounds) - 1

    def task(self, number: int) -> Task:
        """Give the work on one shard."""
        first, last = int(self.bounds[number]), int(self.bounds[number + 1])
        items = []
        for position in range(first, last):
            source, row = int(self.source_of[position]), int(self.row_of[position])
            listing = self.listings[source]
            label = int(self.label_maps[source][listing.labels[row]])
            problem = listing.problems.get(row, "")
            items.append(Item(source, listing.names[row], listing.num_bytes[row], label, problem))
        return Task(number, first, items, self.digest)


def make_plan(sources: list[Source], settings: Settings) -> Plan:
    """List all inputs and assign them to shards.

    Args:
        sources: At least one.
        settings: Of the whole dataset.

    Raises:
        UserError: There is nothing to pack, or more than the keys can count.
    """
    listings = [source.listing() for source in sources]
    num_inputs = sum(len(listing.names) for listing in listings)
    if not num_inputs:
        raise UserError("the sources hold no inputs")
    if num_inputs > 10**KEY_DIGITS:
        raise UserError(
            f"{num_inputs} inputs; one dataset holds at most 10**{KEY_DIGITS}: pack several"
        )
    classes, label_maps = _merge_classes(listings)
    source_of, row_of = _shuffle(listings, settings.seed)
    sizes = np.concatenate([np.asarray(listing.num_bytes, np.int64) for listing in listings])
    starts = np.cumsum([0] + [len(listing.names) for listing in listings])
    bounds = _cut(sizes[starts[source_of] + row_of], settings.shard_bytes)
    record = {
        "version": PLAN_VERSION,
        "settings": settings.describe(),
        "num_inputs": num_inputs,
        "num_input_bytes": int(sizes.sum()),
        "num_shards": len(bounds) - 1,
        "classes": classes,
        "sources": [_describe(*pair) for pair in zip(sources, listings, strict=True)],
    }
    digest = sha256_hex(json_bytes(record))
    record["plan_digest"] = digest
    return Plan(listings, classes, label_maps, source_of, row_of, bounds, record, digest)


def _merge_classes(listings: list[Listing]) -> tuple[list[str], list[npt.NDArray[np.int64]]]:
    classes = listings[0].classes
    if any(listing.classes != classes for listing in listings):
        # Several class lists: one class a name, whichever source it comes from.
        classes = sorted(
            {name for listing in listings for name in listing.classes}, key=os.fsencode
        )
    index = {name: label for label, name in enumerate(classes)}
    return classes, [
        np.asarray([index[name] for name in listing.classes], np.int64) for listing in listings
    ]


def _shuffle(
    listings: list[Listing], seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Order all inputs by a keyed hash of their names: the same on every machine and Python."""
    digests = []
    for source, listing in enumerate(listings):
        prefix = f"{seed}/{source}/".encode()
        digests += [xxhash.xxh3_128_digest(prefix + os.fsencode(name)) for name in listing.names]
    words = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2)
    order = np.lexsort((words[:, 1], words[:, 0]))
    counts = [len(listing.names) for listing in listings]
    source_of = np.repeat(np.arange(len(listings)), counts)
    row_of = np.concatenate([np.arange(count) for count in counts])
    return source_of[order], row_of[order]


def _cut(input_bytes: npt.NDArray[np.int64], shard_bytes: int) -> npt.NDArray[np.int64]:
    """Cut the order into shards of nearly equal size in bytes, as few as fit the aimed size."""
    blocks = -(-input_bytes // BLOCK_BYTES) * BLOCK_BYTES
    ends = np.cumsum(blocks + sample_bytes(0))
    total = int(ends[-1])
    num_shards = max(1, -(-total // shard_bytes))
    goals = np.asarray([total * shard // num_shards for shard in range(1, num_shards)], np.int64)
    inner = np.searchsorted(ends, goals, side="left") + 1
    # An input larger than a shard swallows the cuts inside itself.
    return np.unique(np.concatenate([[0], inner, [len(ends)]])).astype(np.int64)


def _describe(source: Source, listing: Listing) -> dict[str, Any]:
    """Sum up a source by class, so that a changed one can be named."""
    hashes = [hashlib.sha256() for _ in listing.classes]
    counts, sizes = [0] * len(hashes), [0] * len(hashes)
    rows = zip(listing.names, listing.num_bytes, listing.labels, strict=True)
    for row, (name, num_bytes, label) in enumerate(rows):
        problem = listing.problems.get(row, "")
        hashes[label].update(f"{printable(name)}\0{num_bytes}\0{problem}\n".encode())
        counts[label] += 1
        sizes[label] += num_bytes
    described = {
        name: {
            "num_inputs": counts[label],
            "num_bytes": sizes[label],
            "sha256": hashes[label].hexdigest(),
        }
        for label, name in enumerate(listing.classes)
    }
    return {"kind": source.kind, "classes": described}


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Name the leaves in which two plan records differ, `place: old -> new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            if key == "plan_digest":
                continue
            place = f"{where}.{key}" if where else key
            found += differences(old.get(key), new.get(key), place)
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [text for at, (a, b) in pairs for text in differences(a, b, f"{where}[{at}]")]
    if old == new:
        return []
    if where.endswith(".sha256"):
        return [f"{where.removesuffix('.sha256')}: names or sizes of inputs changed"]
    return [f"{where}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 100 else text[:97] + "..."


def changed_plan_message(uri: str, old: Any, new: dict[str, Any]) -> str:
    """Explain why a dataset that another plan began cannot be continued with this one."""
    found = differences(old, new)
    shown = "".join(f"\n  {text}" for text in found[:SHOWN_DIFFERENCES])
    more = (
        f"\n  and {len(found) - SHOWN_DIFFERENCES} more" if len(found) > SHOWN_DIFFERENCES else ""
    )
    return (
        f"{uri} was begun with other inputs or settings; they are never mixed. Changed (there -> "
        f"now):{shown}{more}\n"
        "Use the same inputs and settings again, or pack into an empty --out."
    )
