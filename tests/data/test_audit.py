"""The proof that every sample was fed once an epoch (promise P4)."""

from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from vitscale.data.audit import EpochAudit, batch_digest, hash_key
from vitscale.data.order import Order

KEYS = [f"{i:09d}" for i in range(101)]
HASHES = np.array([hash_key(key) for key in KEYS], dtype=np.uint64)
MANIFEST = SimpleNamespace(num_samples=101, keys_sum64=sum(map(int, HASHES)) % 2**64)


def feed(audit, order, positions):
    due, found = order.places(positions), order.samples(positions)
    replaced = np.where(due.substitute, HASHES[due.sample_index].view(np.int64), 0)
    hashes = HASHES[found.sample_index].view(np.int64)
    audit.add(found.epoch, hashes, due.substitute, replaced)


def add_plain(audit, hashes):
    nobody = np.zeros(len(hashes), dtype=np.int64)
    audit.add(nobody, hashes.view(np.int64), nobody.astype(bool), nobody)


def test_audit_proves_epochs_over_ranks_restart_and_resize():
    order = Order([40, 40, 21], 0, 12, 4, 2)
    first = [EpochAudit.expecting(MANIFEST, order) for _ in range(2)]
    for step in range(11):  # into epoch 1, whose beginning lies in step 8
        for rank, audit in enumerate(first):
            feed(audit, order, order.step_positions(step)[order.rank_slots(rank, 2)])
    epochs = [0, 1]
    saved = sum(audit.totals(epochs) for audit in first)
    assert first[0].verdict(saved[0]) is None
    assert first[0].verdict(saved[1]) == "31 examples were fed, 101 were due"

    second = [EpochAudit.expecting(MANIFEST, order) for _ in range(3)]
    second[0].load({1: saved[1].tolist()})
    for step in range(11, 17):
        for rank, audit in enumerate(second):
            feed(audit, order, order.step_positions(step)[order.rank_slots(rank, 3)])

    assert order.epoch_at(17 * 12) == 2
    totals = sum(audit.totals([1, 2]) for audit in second)
    assert totals.dtype == np.int64
    assert second[0].verdict(totals[0]) is None
    assert second[0].verdict(totals[1]) == "2 examples were fed, 101 were due"
    second[0].close([1])
    assert second[0].totals([1]).tolist() == [[0, 0, 0, 0]]


def test_audit_notices_an_exchanged_sample():
    order = Order([101], 0, 1)
    audit = EpochAudit.expecting(MANIFEST, order)
    hashes = HASHES.copy()
    hashes[3] = hashes[4]
    add_plain(audit, hashes)

    assert "some were fed twice" in audit.verdict(audit.totals([0])[0])


@pytest.mark.parametrize("count", [100, 102])
def test_audit_notices_a_wrong_count(count):
    audit = EpochAudit.expecting(MANIFEST, Order([101], 0, 1))
    hashes = np.resize(HASHES, count)
    add_plain(audit, hashes)

    assert audit.verdict(audit.totals([0])[0]) == f"{count} examples were fed, 101 were due"


def test_audit_counts_quarantined_samples_under_their_own_keys():
    audit, order = quarantined([5, 70])

    feed(audit, order, np.arange(101))

    (totals,) = audit.totals([0])
    assert (totals[0], totals[2]) == (99, 2)
    assert audit.verdict(totals) is None


def test_audit_does_not_mind_when_the_damage_was_found():
    audit, order = quarantined([])
    feed(audit, order, np.arange(60))
    order.quarantine([5, 70])  # one of them may have been fed before it was found

    feed(audit, order, np.arange(60, 101))

    assert audit.verdict(audit.totals([0])[0]) is None


def test_audit_notices_a_sample_that_was_fed_and_replaced():
    audit, order = quarantined([5, 70])
    feed(audit, order, np.arange(101))
    totals = audit.totals([0])[0].copy()
    totals[3] += 1

    assert "99 examples and 2 in quarantine sum up to" in audit.verdict(totals)


def quarantined(bad):
    order = Order([40, 40, 21], 0, 12, 4, 2, quarantine=bad)
    return EpochAudit.expecting(MANIFEST, order), order


def test_audit_with_dropped_tail_judges_the_count():
    order = Order([40, 40, 21], 0, 12, 4, 2, "drop")
    audit = EpochAudit.expecting(MANIFEST, order)

    feed(audit, order, np.arange(96))

    assert audit.verdict(audit.totals([0])[0]) is None


def test_batch_digest_is_xxh64_of_the_hashes_in_slot_order():
    signed = HASHES.view(np.int64)

    expected = xxhash.xxh64_hexdigest(b"".join(int(h).to_bytes(8, "little") for h in HASHES))

    assert batch_digest(signed) == expected
    assert batch_digest(signed[::-1]) != expected
