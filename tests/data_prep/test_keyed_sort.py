import numpy as np
import pyarrow as pa
import pytest

from data_prep.keyed_sort import HIGH, LOW, KeyedSort, RowFile

SCHEMA = pa.schema([(HIGH, pa.uint64()), (LOW, pa.uint64()), ("name", pa.large_binary())])


def make_rows(count: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    high = rng.integers(0, 2**64, count, np.uint64) & np.uint64(0xFF0000000000000F)
    low = rng.integers(0, 4, count).astype(np.uint64)
    names = [f"{seed}/{number}".encode() for number in range(count)]
    return pa.table([pa.array(high), pa.array(low), pa.array(names, pa.large_binary())], SCHEMA)


@pytest.mark.parametrize("held", [1, 100, 10_000])
def test_keyed_sort_orders_by_both_halves_and_keeps_equal_keys_in_turn(held):
    tables = [make_rows(count, seed) for seed, count in enumerate((700, 0, 1, 500))]
    sort = KeyedSort(SCHEMA, held)
    for table in tables:
        sort.add(table)

    rows = pa.concat_tables(list(sort)).to_pylist()

    everything = [row for table in tables for row in table.to_pylist()]
    assert rows == sorted(everything, key=lambda row: (row[HIGH], row[LOW]))


def test_keyed_sort_of_nothing_gives_nothing():
    assert sum(table.num_rows for table in KeyedSort(SCHEMA)) == 0


@pytest.mark.parametrize("span", [(0, 0), (0, 1), (5, 17), (9, 10), (0, 1201), (1199, 1201)])
def test_row_file_reads_any_stretch(span, monkeypatch):
    monkeypatch.setattr(RowFile, "BATCH_ROWS", 10)
    rows = RowFile(SCHEMA)
    tables = [make_rows(700, 1), make_rows(501, 2)]
    for table in tables:
        rows.append(table)
    rows.finish()

    assert len(rows) == 1201
    expected = pa.concat_tables(tables).slice(span[0], span[1] - span[0])
    assert rows.rows(*span).to_pylist() == expected.to_pylist()
