"""The cases of `vitscale bench data`, on few small pictures, and what is said of their figures."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from launchers import bench_data
from launchers.bench import loader_parts as names
from launchers.bench import order_simulation, own_cases, peers, pictures
from launchers.bench.loader_report import make_report, text_of
from tests.helpers.small_dataset import encoded, local_dataset, picture
from vitscale import cli
from vitscale.config.errors import UserError, VitscaleError
from vitscale.data.order import Order
from vitscale.data.windows import EpochTable
from vitscale.observe.rounds import Case, Outcome, measure

NUM_IMAGES, BATCH, SIDE = 40, 4, 32


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for number in range(10):
        folder = root / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        data = encoded(picture(number, 90 + number, 70), quality=95)
        (folder / f"{number}.jpg").write_bytes(data)
    return root


@pytest.fixture(scope="module")
def taken(images, tmp_path_factory):
    return pictures.from_folder(str(images), NUM_IMAGES, tmp_path_factory.mktemp("work"))


@pytest.fixture
def request_of(taken, tmp_path):
    return {
        "uri": taken.uri,
        "cache_dir": str(tmp_path / "cache"),
        "workers": 1,
        "batch": BATCH,
        "side": SIDE,
        "area": [0.05, 1.0],
        "warm_batches": 1,
        "num_batches": 3,
        "num_inputs": NUM_IMAGES,
        "inputs": taken.inputs,
        "folder": str(taken.folder),
        "store": str(tmp_path),
    }


def shape_of(path):
    with Image.open(path) as image:
        return image.format, image.size


def test_pictures_are_repeated_under_other_names(taken, images):
    originals = {path.read_bytes() for path in images.rglob("*.jpg")}

    assert len(taken.inputs) == NUM_IMAGES
    assert {Path(path).read_bytes() for path, _ in taken.inputs} == originals
    assert {label for _, label in taken.inputs} == {0, 1}
    assert "40 JPEGs, mean" in taken.described


def test_pictures_of_a_dataset_are_its_samples(tmp_path):
    storage, _ = local_dataset(tmp_path / "data", [10, 10])

    found = pictures.from_dataset(storage.uri, 8, tmp_path / "work")

    assert found.uri == storage.uri
    assert len(found.inputs) == 8
    assert all(shape_of(path)[0] == "JPEG" for path, _ in found.inputs)


def test_pictures_that_are_no_jpegs_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    picture(0).save(tmp_path / "a" / "0.png")

    with pytest.raises(UserError, match=r"no \.jpg or \.jpeg in class folders"):
        pictures.from_folder(str(tmp_path), 5, tmp_path / "work")


@pytest.mark.parametrize("case", ["torchvision", "webdataset", "limit"])
def test_peers_give_batches_under_the_clock(request_of, tmp_path, case):
    command = [sys.executable, peers.__file__]

    outcomes = measure([Case("it", command, request_of | {"case": case})], 1, tmp_path, 0, 0)

    assert outcomes["it"].runs[0]["seconds"] > 0


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (np.zeros((BATCH, SIDE, SIDE, 3), np.float32), r"\(4, 32, 32, 3\)"),
        (np.zeros((BATCH, 3, SIDE, SIDE), np.float64), "float64"),
        (np.full((BATCH, 3, SIDE, SIDE), 9, np.float32), "to 9"),
    ],
)
def test_batches_of_another_kind_are_not_compared(request_of, batch, problem):
    with pytest.raises(RuntimeError, match=problem):
        peers.clocked(iter([(batch, None)] * 9), request_of | {"case": "some"})


def test_limit_ends_when_a_picture_cannot_be_decoded(request_of):
    broken = [("/nowhere.jpg", 0)]

    with pytest.raises(RuntimeError, match="a process of the limit ended"):
        next(iter(peers.CASES["limit"](request_of | {"inputs": broken})))


@pytest.mark.parametrize("scale", ["exact", "fast"])
def test_loader_gives_batches_under_the_clock(request_of, scale):
    found = own_cases.CASES["loader"](request_of | {"jpeg_scale": scale, "case": "loader"})

    assert found["seconds"] > 0


def test_breakdown_tells_every_stage(request_of):
    stages = own_cases.CASES["breakdown"](request_of)["stages_us"]

    measured = {"verify", "decode, crop, resize, flip", "hand-over", "normalise"}
    # These two are what is left of others, which for a few small pictures may be nothing.
    assert set(stages) == measured | {"fetch", "collate"}
    assert all(stages[name] > 0 for name in measured)


@pytest.mark.parametrize(("scale", "most"), [("exact", 1.0), ("fast", 3.0)])
def test_fidelity_is_near_to_pillow(request_of, scale, most):
    found = own_cases.CASES["fidelity"](request_of | {"jpeg_scale": scale})

    assert found["mean_levels"] < most
    assert found["mean_levels"] <= found["worst_levels"]


def test_resume_is_checked_and_timed(request_of):
    found = own_cases.CASES["resume"](request_of)

    assert len(found["start_s"]) == len(found["resumed_s"]) == own_cases.RESUME_TIMES
    assert found["resumed_step"] == 9


def test_memory_counts_the_readers_too(request_of):
    found = own_cases.CASES["memory"](request_of | {"num_batches": 60})

    assert len(found["bytes"]) == 60 - own_cases.MEMORY_SETTLED
    assert found["bytes"][0] > own_cases.proportional_bytes([]) / 4
    assert own_cases.proportional_bytes([os.getpid()]) > own_cases.proportional_bytes([])


def test_small_pictures_are_packed(taken, tmp_path):
    uri = pictures.small_ones(taken, 50, tmp_path)

    found = pictures.from_dataset(uri, 50, tmp_path / "seen")
    side = pictures.SMALL_SIDE
    assert {shape_of(path) for path, _ in found.inputs} == {("JPEG", (side, side))}


def setting(**changes) -> order_simulation.Setting:
    values = {
        "samples": 200_000,
        "shards": 900,
        "ranks": 16,
        "ranks_per_node": 4,
        "workers": 2,
        "global_batch": None,
        "lanes": None,
        "seed": 0,
    }
    return order_simulation.Setting(**(values | changes)).resolved()


def test_order_of_a_run_is_checked_and_measured():
    found = order_simulation.simulate(setting())

    assert found["setting"]["global_batch"] == 128
    assert found["setting"]["lanes"] == 4
    assert {row["verdict"] for row in found["targets"][:3]} == {"PASS"}
    assert found["positions_sampled"] > 100_000
    assert "16, 4, 32" in order_simulation.text_of(found)


def test_sizes_of_made_up_shards_add_up():
    sizes, num_bytes = order_simulation.uneven_shards(setting(samples=12_345, shards=100))

    assert sizes.sum() == 12_345
    assert sizes.min() >= 1
    assert sizes.max() > 1.5 * sizes.min()
    assert num_bytes.min() > 0


def test_lanes_that_nodes_must_share_miss_the_target():
    found = order_simulation.simulate(setting(lanes=2))

    rows = {row["name"]: row["verdict"] for row in found["targets"]}
    assert rows["bytes a node / even share"] == "FAIL"


@pytest.mark.parametrize("broken", ["starts", "shards"])
def test_wrong_order_does_not_pass(broken):
    sizes = np.full(60, 20)
    table = EpochTable(sizes, 0, 0, 1200, 4, 3)
    values = getattr(table, broken).copy()
    values[5] = values[4]
    setattr(table, broken, values)

    with pytest.raises(VitscaleError, match="the order is wrong"):
        order_simulation.check_table(table, sizes, np.random.default_rng(0))


def test_sound_order_passes():
    sizes = np.array([20, 0, 7, 33] * 15)
    order = Order(sizes, 0, 12, 4, 3)

    table = EpochTable(sizes, 0, 5, order.usable, 4, 3)

    assert order_simulation.check_table(table, sizes, np.random.default_rng(0)) > 12


@pytest.mark.slow
def test_largest_run_stays_within_its_limits():
    large = setting(samples=10**9, shards=400_000, ranks=4096, ranks_per_node=8, workers=8)

    found = order_simulation.simulate(large)

    verdicts = {row["name"]: row["verdict"] for row in found["targets"]}
    # What takes time depends on who else works on the machine.
    for name in ("exactly once", "bytes a node / even share", "state of a rank"):
        assert verdicts[name] == "PASS", found


def one_run(seconds: float, **fields) -> Outcome:
    return Outcome({0: {"seconds": seconds, "busy": 0.1, "others": 0.0, **fields}})


def report_of(outcomes: dict[str, Outcome]) -> dict:
    cases = [Case(name, [], {"num_inputs": 10}) for name in outcomes]
    return make_report(outcomes, cases, {"pictures": "few"})


@pytest.mark.parametrize(("seconds", "verdict"), [(1.41, "PASS"), (1.39, "FAIL")])
def test_target_of_a_ratio(seconds, verdict):
    report = report_of({names.EXACT: one_run(1), names.DALI: one_run(seconds)})

    (row,) = report["targets"]
    assert (row["name"], row["verdict"]) == ("exact / DALI", verdict)
    assert report["cases"][names.EXACT]["images_per_s"] == [10]


def test_target_without_its_peer_is_not_measured():
    report = report_of({names.EXACT: one_run(1), names.MOSAIC: Outcome(missing="not installed: x")})

    assert [row["verdict"] for row in report["targets"]] == ["not measured"]
    assert "not installed: x" in text_of(report)


@pytest.mark.parametrize(
    ("name", "fields", "verdict"),
    [
        (names.FIDELITY_FAST, {"mean_levels": 2.9, "worst_levels": 7.0}, "PASS"),
        (names.FIDELITY_FAST, {"mean_levels": 3.1, "worst_levels": 7.0}, "FAIL"),
        (names.RESUME, {"start_s": [1, 9], "resumed_s": [1, 10], "resumed_step": 5}, "PASS"),
        (names.RESUME, {"start_s": [1, 1], "resumed_s": [1, 2], "resumed_step": 5}, "FAIL"),
        (names.MEMORY, {"bytes": [100e6, 103e6, 104e6]}, "PASS"),
        (names.MEMORY, {"bytes": [100e6, 106e6, 104e6]}, "FAIL"),
    ],
)
def test_other_targets(name, fields, verdict):
    report = report_of({name: one_run(1, **fields)})

    assert [row["verdict"] for row in report["targets"]] == [verdict]


def test_stages_of_both_scales_stand_side_by_side():
    stages = {"fetch": 40.0, "verify": 10.0}
    text = text_of(report_of({names.BREAKDOWN_EXACT: one_run(1, stages_us=stages)}))

    assert "fetch" in text
    assert "50 [50-50]" in text


def test_command_measures_and_reports(images, tmp_path, capsys):
    # An interpreter that has nothing installed.
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    words = ["--only", "speed", "--rounds", "1", "--wait", "0", "--work", str(tmp_path / "work")]
    words += [word for peer in names.PEERS for word in ("--peer", f"{peer}={bare}")]
    words += ["--images", str(images), "--num-images", "40", "--batch", "2", "--workers", "1"]

    code = cli.main(["bench", "data", *words, "--out", str(tmp_path / "report.json")])

    report = json.loads((tmp_path / "report.json").read_text())
    text = capsys.readouterr().out
    assert code == 0
    assert report["ratios"]["exact / limit"][0] > 0
    assert report["ratios"]["fast / limit"][0] > 0
    assert report["versions"]["vitscale"]
    assert "not installed: pip install litdata, or --peer litdata=PYTHON" in text
    assert list((tmp_path / "work").iterdir()) == []


def test_command_checks_the_order_alone(tmp_path, capsys):
    words = ["--samples", "50000", "--shards", "300", "--ranks", "8", "--workers", "8"]

    code = cli.main(["bench", "data", "--order-only", *words, "--out", str(tmp_path / "o.json")])

    assert code == 0
    assert "exactly once" in capsys.readouterr().out
    assert json.loads((tmp_path / "o.json").read_text())["nodes"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --images DIR, --data URI, or --order-only"),
        (["--images", "x", "--peer", "ffcv=python3"], "write NAME=PYTHON"),
        (["--images", "x", "--peer", "dali=/no/such/python"], "there is no program"),
        (["--images", "x", "--rounds", "0"], "must be at least 1"),
        (["--images", "x", "--num-images", "64"], "need 960 at least"),
        (["--images", "/no/such/folder"], "no .jpg or .jpeg in class folders there"),
        (["--order-only", "--ranks", "12"], "not a multiple of --ranks-per-node 8"),
        (["--order-only", "--shards", "0"], "must be at least 1"),
        (["--order-only", "--lanes", "7"], "lanes = 7 must divide global_batch"),
    ],
)
def test_wrong_arguments_are_refused(words, message, capsys):
    assert bench_data.main(words) == UserError.exit_code
    assert message in capsys.readouterr().err
