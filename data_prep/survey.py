"""A first look at somebody else's shards: which labels there are, and that no key comes twice."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from data_prep.foreign_shards import Reading
from data_prep.keyed_sort import HELD_ROWS, HIGH, LOW, KeyedSort
from data_prep.sources.build import Column
from vitscale.config.errors import DataError

# Groups of equal hashes that are looked into for an example.
LOOKED_INTO = 20


class Survey(NamedTuple):
    """What the labels and keys of one shard are."""

    number: int
    columns: list[Column]
    # by column: all that occur
    values: list[set[str | int]]
    # xxh64 of the keys of usable samples
    key_hashes: npt.NDArray[np.uint64]
    num_samples: int
    # why it cannot be read; then nothing else is known
    damage: str = ""


@dataclass(frozen=True)
class SurveyWork:
    """Looks at the labels and keys of shards.

    Args:
        reading: How to read them.
    """

    reading: Reading

    def __call__(self, task: tuple[int, str]) -> Survey:
        """Survey one shard."""
        number, name = task
        shard = self.reading.open(name)
        values: list[set[str | int]] = [set() for _ in self.reading.label_columns or "1"]
        hashes: list[int] = []
        count = 0
        try:
            for row in shard.rows():
                count += 1
                if row.problem:
                    continue
                hashes.append(xxhash.xxh64_intdigest(row.key.encode()))
                for own, label in zip(values, row.labels, strict=True):
                    own.update(label if isinstance(label, tuple) else (label,))
        except DataError as error:
            return Survey(number, [], [], np.empty(0, np.uint64), 0, str(error))
        return Survey(number, shard.columns(), values, np.asarray(hashes, np.uint64), count)


class Doubles:
    """Finds keys that come twice, in bounded memory.

    Args:
        held_rows: Keys to hold in memory.
    """

    def __init__(self, held_rows: int = HELD_ROWS) -> None:
        self._sort = KeyedSort(pa.schema([(HIGH, pa.uint64()), (LOW, pa.uint64())]), held_rows)

    def add(self, survey: Survey) -> None:
        """Take the keys of a shard."""
        shards = np.full(len(survey.key_hashes), survey.number, np.uint64)
        columns = [pa.array(survey.key_hashes), pa.array(shards)]
        self._sort.add(pa.table(columns, names=[HIGH, LOW]))

    def _groups(self) -> Iterator[tuple[int, list[int]]]:
        """Give every hash that comes more than once, with two of its shards."""
        for rows in self._sort:
            hashes, shards = rows[HIGH].to_numpy(), rows[LOW].to_numpy()
            for at in np.flatnonzero(hashes[1:] == hashes[:-1]).tolist():
                yield int(hashes[at]), shards[at : at + 2].tolist()

    def refuse(self, reading: Reading, names: list[str]) -> None:
        """Make sure that no key comes twice.

        Args:
            reading: How to read the shards.
            names: Of all shards.

        Raises:
            DataError: Keys come twice; names some with their shards.
        """
        count = 0
        first: list[tuple[int, list[int]]] = []
        for group in self._groups():
            count += 1
            if len(first) < LOOKED_INTO:
                first.append(group)
        examples: list[str] = []
        for digest, shards in first:
            places = [
                (row.key, names[shard])
                for shard in dict.fromkeys(shards)
                for row in reading.open(names[shard]).rows()
                if not row.problem and xxhash.xxh64_intdigest(row.key.encode()) == digest
            ]
            # Two keys may have the same hash by chance.
            if places[0][0] == places[1][0]:
                examples.append(f"{places[0][0]} in {places[0][1]} and {places[1][1]}")
            if len(examples) == 3:
                break
        if examples:
            raise DataError(
                f"{reading.uri}: {count} keys come twice, for example "
                f"{'; '.join(examples)}; a dataset needs unique keys: `vitscale pack --source "
                "webdataset:...` gives new ones"
            )
