"""Views: what is left out does not exist for order, audit, readers and evaluation."""

from itertools import islice

import numpy as np
import pytest

from data_prep.labels import main as labels
from data_prep.pack import main as pack
from tests.helpers.corpus import crop, encoded
from tests.helpers.small_dataset import local_dataset
from vitscale.config.errors import DataError, UserError
from vitscale.config.recipe import AugmentConfig, DataConfig
from vitscale.data import open_dataset
from vitscale.data.audit import EpochAudit, hash_key
from vitscale.data.dataset import Dataset
from vitscale.data.exclusion import exclusions_bytes
from vitscale.data.loader import build_eval_loader, build_train_loader
from vitscale.data.manifest import load_class_names, load_index, load_manifest
from vitscale.data.order import Order
from vitscale.data.storage import open_storage
from vitscale.data.view import check_trainable, view_of

SIZES = [7, 0, 12, 3, 9]  # 31 samples
# The fourth shard loses all of its samples.
GONE = [0, 6, 8, 19, 20, 21, 30]
UNLABELLED = [0, 1, 19, 25]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A dataset, a list for it in `x`, and an added column without labels for some samples."""
    root = tmp_path_factory.mktemp("view")
    storage, manifest = local_dataset(root / "out", SIZES)
    (root / "x").write_bytes(excluded(manifest, GONE))
    rows = [f"{n:09d},odd{n % 3}\n" for n in range(31) if n not in UNLABELLED]
    (root / "list.csv").write_text("key,label\n" + "".join(rows))
    assert labels([storage.uri, "--add", "odd", "--from", str(root / "list.csv")]) == 0
    return storage, manifest, str(root / "x")


def excluded(manifest, numbers, digest=None, **other) -> bytes:
    """A list of these samples."""
    starts, names = manifest.shards.starts, manifest.shards.names
    place = {n: names[np.searchsorted(starts, n, side="right") - 1] for n in numbers}
    rows = [
        {"shard": place[n], "key": f"{n:09d}", "xxh3_64": 0, "reason": "near", "distance": 1.0,
         "against": "", "against_key": "", **other}
        for n in numbers
    ]  # fmt: skip
    return exclusions_bytes(rows, digest or manifest.digest, {})


def keys_of(numbers) -> list[str]:
    return [f"{number:09d}" for number in numbers]


CASES = {
    "exclude": (None, True, GONE),
    "column": ("odd", False, UNLABELLED),
    "both": ("odd", True, [*GONE, *UNLABELLED]),
}


@pytest.fixture(params=CASES)
def arguments(request, dataset):
    """A column and a list, and the samples that stay."""
    column, with_list, gone = CASES[request.param]
    return column, dataset[2] if with_list else None, [n for n in range(31) if n not in gone]


@pytest.fixture
def case(dataset, arguments):
    """A dataset, a view of it, and the samples that stay."""
    storage, manifest, _ = dataset
    column, place, left = arguments
    return storage, view_of(storage, manifest, column, place), left


def test_view_counts_what_is_left(case):
    _, view, left = case

    assert view.num_samples == view.shards.num_samples.sum() == len(left)
    assert view.keys_sum64 == sum(map(hash_key, keys_of(left))) % 2**64
    assert view.shards.names == view.view.stored.shards.names


def test_view_cuts_every_index(case):
    storage, view, left = case

    indexes = [load_index(storage, view, shard_id) for shard_id in range(len(SIZES))]

    assert [len(index) for index in indexes] == view.shards.num_samples.tolist()
    assert [key for index in indexes for key in index.keys] == keys_of(left)
    whole = [load_index(storage, view.view.stored, shard_id) for shard_id in range(len(SIZES))]
    offsets = np.concatenate([index.offsets for index in whole])
    assert np.concatenate([index.offsets for index in indexes]).tolist() == offsets[left].tolist()


def test_dataset_has_only_what_is_left_with_the_labels_of_the_column(dataset, arguments):
    storage = dataset[0]
    column, place, left = arguments

    data = open_dataset(storage.uri, label_column=column, exclude=place)

    samples = list(data)
    assert [sample.key for sample in samples] == keys_of(left)
    assert [data[i] for i in range(len(data))] == samples
    whole = open_dataset(storage.uri)
    assert [sample.image for sample in samples] == [whole[n].image for n in left]
    modulus, names = (3, ["odd0", "odd1", "odd2"]) if column else (5, list("abcde"))
    assert [sample.label for sample in samples] == [n % modulus for n in left]
    assert data.class_names == names
    assert samples[0].labels["label"] == left[0] % 5


def test_an_epoch_of_a_view_feeds_what_is_left_exactly_once(case, tmp_path):
    storage, view, left = case
    order = Order(view.shards.num_samples, 1, 4, 2, 2, dataset_digest=view.digest)
    config = DataConfig(train=storage.uri, num_workers=2, cache_dir=str(tmp_path))
    loader = build_train_loader(
        config, AugmentConfig(), [Dataset(storage, view)], order=order, img_size=8, in_chans=3,
        rank=0, world_size=1, micro_batch=4, start_step=0, seed=1,
    )  # fmt: skip
    audit = EpochAudit.expecting(view, order)

    batches = list(islice(loader, -(-len(left) // 4)))
    loader.close()

    for batch in batches:
        columns = batch.epochs, batch.key_hash, batch.substitutes, batch.replaced
        audit.add(*(column.numpy() for column in columns))
    assert audit.verdict(audit.totals([0])[0]) is None
    hashes = {hash_key(key): number for number, key in enumerate(keys_of(range(31)))}
    pairs = [
        (hashes[int(np.int64(key).astype(np.uint64))], int(label))
        for batch in batches
        for key, label in zip(batch.key_hash.tolist(), batch.labels.tolist(), strict=True)
    ]
    modulus = 5 if view.columns[0]["name"] == "label" else 3
    assert all(label == number % modulus for number, label in pairs)
    assert sorted(number for number, _ in pairs[: len(left)]) == left


def test_evaluation_of_a_view_counts_what_is_left(case, tmp_path):
    storage, view, left = case
    config = DataConfig(train=storage.uri, num_workers=0, cache_dir=str(tmp_path))
    seen = []

    for rank in range(2):
        batches = build_eval_loader(
            config, AugmentConfig(), storage, view, img_size=8, in_chans=3, rank=rank,
            world_size=2, micro_batch=4,
        )  # fmt: skip
        seen += [h for b in batches for h in b.key_hash[b.labels >= 0].tolist()]

    wanted = [int(np.uint64(hash_key(key)).astype(np.int64)) for key in keys_of(left)]
    assert seen == wanted


@pytest.mark.parametrize("column", [None, "label"])
def test_nothing_to_change_is_the_dataset_itself(dataset, column):
    storage, manifest, _ = dataset

    assert view_of(storage, manifest, column) is manifest


def test_every_view_has_a_digest_of_its_own_and_no_run_goes_on_with_another(dataset, tmp_path):
    storage, manifest, place = dataset
    (tmp_path / "y").write_bytes(excluded(manifest, GONE[1:]))
    lists = [None, place, str(tmp_path / "y")]
    views = [view_of(storage, manifest, column, x) for column in (None, "odd") for x in lists]

    assert len({view.digest for view in views}) == len({view.samples_sha256 for view in views}) == 6
    assert view_of(storage, manifest, "odd", place).digest == views[4].digest
    one, other = (
        Order(view.shards.num_samples, 1, 4, dataset_digest=view.digest) for view in views[1:3]
    )
    with pytest.raises(UserError, match="dataset_digest: the checkpoint has"):
        other.check_state(one.state(8))


def test_an_empty_list_leaves_everything(dataset, tmp_path):
    storage, manifest, _ = dataset
    (tmp_path / "none").write_bytes(excluded(manifest, []))

    view = view_of(storage, manifest, exclude=str(tmp_path / "none"))

    assert (view.num_samples, view.keys_sum64) == (31, manifest.keys_sum64)
    assert view.digest != manifest.digest


@pytest.mark.parametrize(
    ("numbers", "changes", "error", "said"),
    [
        (GONE, {"digest": "ab" * 32}, UserError, "was made for another dataset than .*dedup"),
        (GONE, {"shard": "shard-000099.tar"}, DataError, "names shard shard-000099.tar, which"),
        (range(31), {}, UserError, "no sample is left with label_column = 'label'"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(dataset, tmp_path, numbers, changes, error, said):
    storage, manifest, _ = dataset
    (tmp_path / "x").write_bytes(excluded(manifest, numbers, **changes))

    with pytest.raises(error, match=said):
        view_of(storage, manifest, exclude=str(tmp_path / "x"))


def test_a_list_with_a_key_that_is_not_there_is_seen_at_its_shard(dataset, tmp_path):
    storage, manifest, _ = dataset
    (tmp_path / "x").write_bytes(excluded(manifest, [3], key="000000017"))
    view = view_of(storage, manifest, exclude=str(tmp_path / "x"))

    with pytest.raises(DataError, match="7 samples are left of 7, expected 6: the list"):
        load_index(storage, view, 0)
    assert len(load_index(storage, view, 2)) == 12


def test_a_missing_list_or_column_says_how_to_make_one(dataset):
    storage, manifest, _ = dataset

    with pytest.raises(UserError, match="make one with `vitscale dedup`"):
        view_of(storage, manifest, exclude="/nowhere/x")
    with pytest.raises(UserError, match=r"no label column 'x'; it has label, odd.*vitscale"):
        view_of(storage, manifest, "x")


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A dataset with three stored columns, the second multi-label."""
    root = tmp_path_factory.mktemp("several")
    rows = []
    for n in range(8):
        (root / f"{n}.png").write_bytes(encoded(crop(n), "PNG"))
        row = f'{{"path": "{n}.png", "kind": "k{n % 2}", "tags": ["t{n % 3}", "t3"], "wing": {n}}}'
        rows.append(row + "\n")
    (root / "list.jsonl").write_text("".join(rows))
    words = ["--source", f"list:{root}/list.jsonl", "--out", str(root / "out"), "--workers", "1"]
    words += [word for name in ("kind", "tags", "wing") for word in ("--label-column", name)]
    assert pack(words) == 0
    storage = open_storage(root / "out")
    return storage, load_manifest(storage)


def test_another_stored_column_is_chosen(several):
    storage, manifest = several

    data = open_dataset(storage.uri, "wing")

    assert data.class_names == load_class_names(storage, data.manifest) == list("01234567")
    assert [own.name for own in data.label_columns] == ["wing", "kind", "tags"]
    assert data.manifest.num_classes == 8
    assert data.manifest.num_samples == manifest.num_samples
    samples = list(data)
    assert sorted(sample.label for sample in samples) == list(range(8))
    assert all(sample.label == sample.labels["wing"] for sample in samples)
    assert len({data.manifest.labels_sha256, manifest.labels_sha256}) == 2


def test_multi_label_columns_can_be_read_but_not_trained_on(several):
    storage, manifest = several

    data = open_dataset(storage.uri, "tags")

    assert {tuple(sample.labels["tags"]) for sample in data} == {(0, 3), (1, 3), (2, 3)}
    check_trainable(storage.uri, manifest)
    with pytest.raises(UserError, match="column 'tags' is multi-label; training and evaluation"):
        check_trainable(storage.uri, data.manifest)


def test_a_multi_label_column_that_was_added_leaves_nothing_out(dataset, tmp_path):
    storage, _, _ = dataset
    (tmp_path / "m.csv").write_text("key,label\n000000003,b\n000000003,a\n000000020,a\n")
    words = ["--add", "many", "--multi", "--from", str(tmp_path / "m.csv")]
    assert labels([storage.uri, *words]) == 0

    samples = list(open_dataset(storage.uri, "many"))

    assert len(samples) == 31
    assert samples[3].labels["many"] == [1, 0]
    assert [samples[n].label for n in (3, 4, 20)] == [1, -1, 0]
    assert samples[4].labels["many"] == []
