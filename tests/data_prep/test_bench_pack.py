import io
import json
import os
import sys
import tarfile
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

from data_prep import bench_pack
from data_prep.bench import corpus, packer, references
from data_prep.bench import pack_cases as names
from data_prep.bench.pack_report import make_report, text_of
from tests.helpers.corpus import crop, encoded
from vitscale import cli
from vitscale.config.errors import UserError, VitscaleError
from vitscale.observe.rounds import Case, Outcome, measure, ratios


def script(text: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", f"import json, os, sys\n{text}"]


SAYS_ARGUMENT = script("print(json.dumps({'seconds': 2.0, 'seen': json.load(open(sys.argv[1]))}))")


@pytest.fixture
def images(tmp_path):
    root = tmp_path / "images"
    for number in range(6):
        folder = root / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encoded(crop(number, side=96)))
    return root


@pytest.fixture
def request_of(images, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    inputs = corpus.list_folder(images)
    return {
        "inputs": inputs,
        "folder": str(images),
        "num_inputs": len(inputs),
        "num_bytes": 1,
        "work": str(work),
        "shard_bytes": 8000,
        "processes": 2,
        "side": 48,
        "quality": 90,
        "flags": [],
    }


def members(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in folder.rglob("*.tar"):
        with tarfile.open(path) as archive:
            for member in archive:
                found[member.name] = archive.extractfile(member).read()
    return found


def test_every_case_runs_once_a_round_in_changing_order(tmp_path, capsys):
    cases = [Case(name, SAYS_ARGUMENT, {"case": name}) for name in "abc"]

    outcomes = measure(cases, 3, tmp_path, 0, 0)

    assert all(sorted(outcome.runs) == [0, 1, 2] for outcome in outcomes.values())
    assert outcomes["b"].runs[0]["seen"]["case"] == "b"
    lines = capsys.readouterr().out.splitlines()
    orders = ["".join(line.split()[2][0] for line in lines[n : n + 3]) for n in (0, 3, 6)]
    assert [sorted(order) for order in orders] == [list("abc")] * 3
    assert len(set(orders)) > 1


def test_a_case_gets_an_empty_folder_each_time_and_leaves_nothing(tmp_path):
    write = script(
        "work = json.load(open(sys.argv[1]))['work']\n"
        "assert os.listdir(work) == []\n"
        "open(work + '/left', 'w').close()\n"
        "print(json.dumps({'seconds': 1.0}))"
    )

    measure([Case("a", write, {})], 2, tmp_path, 0, 0)

    assert not list(tmp_path.rglob("left"))


def test_a_case_with_fewer_rounds_ends_early(tmp_path):
    outcomes = measure([Case("a", SAYS_ARGUMENT, {}, rounds=1)], 2, tmp_path, 0, 0)

    assert sorted(outcomes["a"].runs) == [0]


def test_what_is_not_installed_is_told_and_not_tried_again(tmp_path, capsys):
    missing = script("print(json.dumps({'missing': 'ImportError: no streaming'}))")

    outcomes = measure([Case("a", missing, {}, hint="pip install x")], 2, tmp_path, 0, 0)

    assert outcomes["a"].missing == "not installed: pip install x"
    assert capsys.readouterr().out.count("no streaming") == 1


def test_a_case_that_fails_ends_the_run_with_what_it_said(tmp_path):
    broken = script("sys.exit('the disk is full')")

    with pytest.raises(VitscaleError, match=r"case 'a' ended with 1:\n.*the disk is full"):
        measure([Case("a", broken, {})], 1, tmp_path, 0, 0)


def test_ratios_are_taken_within_rounds():
    fast = Outcome({0: {"seconds": 1.0}, 1: {"seconds": 2.0}})
    slow = Outcome({1: {"seconds": 3.0}, 2: {"seconds": 9.0}})

    assert ratios(fast, slow) == [1.5]


@pytest.mark.parametrize("case", ["shard_writer", "tarfile"])
def test_reference_writers_store_all_images(request_of, case):
    references.CASES[case](request_of)()

    found = members(Path(request_of["work"]))
    wanted = {f"{n:09d}.jpg": Path(path) for n, (path, _) in enumerate(request_of["inputs"])}
    assert {name for name in found if name.endswith(".jpg")} == wanted.keys()
    assert all(found[name] == path.read_bytes() for name, path in wanted.items())
    labels = [found[f"{n:09d}.cls"] for n in range(6)]
    assert labels == [str(label).encode() for _, label in request_of["inputs"]]
    assert len(list(Path(request_of["work"]).glob("*.tar"))) > 1


def test_tar_command_stores_all_files(request_of):
    references.CASES["tar"](request_of)()

    found = members(Path(request_of["work"]))
    assert sorted(found.values()) == sorted(Path(p).read_bytes() for p, _ in request_of["inputs"])


def test_reference_of_resizing_makes_the_shorter_side(request_of):
    references.CASES["shard_writer_pillow"](request_of)()

    found = members(Path(request_of["work"]))
    pictures = [data for name, data in found.items() if name.endswith(".jpg")]
    assert [Image.open(io.BytesIO(data)).size for data in pictures] == [(48, 48)] * 6


def test_limit_of_resizing_works_on_every_image(request_of):
    request_of["inputs"].append(("/nowhere.jpg", 0))

    with pytest.raises(RuntimeError, match="a process of the case ended with 1"):
        references.CASES["turbo"](request_of)()

    request_of["inputs"].pop()
    assert references.CASES["turbo"](request_of)()["versions"].keys() >= {"simplejpeg"}


def test_server_gives_files_by_other_names(images):
    path = images / "a" / "0.jpg"

    with (
        references._serving({"7.jpg": str(path)}) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/7.jpg") as answer,
    ):
        assert answer.read() == path.read_bytes()


@pytest.mark.parametrize("processes", [1, 2])
def test_packer_clocks_the_work_within_the_whole(request_of, processes):
    found = packer.CASES["pack"](request_of | {"processes": processes})()

    assert 0 < found["seconds"] < found["whole_seconds"]
    assert len(members(Path(request_of["work"]))) == 12


def test_packer_refuses_to_measure_a_pack_that_lost_images(request_of):
    with pytest.raises(RuntimeError, match="6 samples of 7"):
        packer.CASES["pack"](request_of | {"num_inputs": 7})()


def test_memory_is_told_for_every_process(request_of):
    found = packer.CASES["memory"](request_of)()

    # One hands out; how many of the two others get a shard is a matter of speed.
    assert 2 <= len(found["peaks"]) <= 3
    assert all(20e6 < peak < 4e9 for peak in found["peaks"])


def test_fidelity_is_small_for_photographs(request_of):
    found = packer.CASES["fidelity"](request_of)()

    assert found["mean_levels"] < 3
    assert found["mean_levels"] <= found["worst_levels"] < 6
    assert found["mean_levels_unencoded"] > 0


@pytest.mark.mpi
def test_dispatch_runs_all_tasks_over_mpi(tmp_path):
    (case,) = names.dispatch_cases(_bench(tmp_path))
    case.request["num_inputs"] = 20

    outcomes = measure([case], 1, tmp_path, 0, 0)

    assert outcomes[case.name].runs[0]["seconds"] > 0


def _bench(work: Path) -> names.Bench:
    nothing = names.Folder(work, [])
    return names.Bench(work, {}, nothing, nothing, (1, 1))


def test_made_images_are_as_large_as_said(tmp_path):
    corpus.make_images(tmp_path / "images", 12)
    corpus.make_originals(tmp_path / "originals", 1)

    sizes = [os.path.getsize(path) for path, _ in corpus.list_folder(tmp_path / "images")]
    assert len(sizes) == 12
    assert 60_000 < sum(sizes) / len(sizes) < 160_000
    ((original, _),) = corpus.list_folder(tmp_path / "originals")
    with Image.open(original) as image:
        assert 2e6 < image.width * image.height < 8e6


def test_links_give_images_more_names(images, tmp_path):
    inputs = corpus.list_folder(images)

    corpus.link_copies(inputs, tmp_path / "links", 15)

    linked = corpus.list_folder(tmp_path / "links")
    assert len(linked) == 15
    assert sum(label for _, label in linked) == 6
    assert all(os.stat(path).st_nlink > 1 for path, _ in linked)


def one_run(seconds: float, **fields) -> Outcome:
    return Outcome({0: {"seconds": seconds, "busy": 0.1, "others": 0.0, **fields}})


def report_of(outcomes: dict[str, Outcome]) -> dict:
    cases = [Case(name, [], {"num_inputs": 10}) for name in outcomes]
    return make_report(outcomes, cases, {"images": "few"})


@pytest.mark.parametrize(("seconds", "verdict"), [(1.41, "PASS"), (1.39, "FAIL")])
def test_target_of_a_ratio(seconds, verdict):
    report = report_of({names.KEEP: one_run(1), names.KEEP_SHARD_WRITER: one_run(seconds)})

    (row,) = report["targets"]
    assert (row["name"], row["verdict"]) == ("keep / ShardWriter", verdict)
    assert report["ratios"] == {"keep / ShardWriter": [seconds]}


def test_target_without_its_reference_is_not_measured():
    report = report_of({names.KEEP: one_run(1), names.KEEP_MDS: Outcome(missing="not installed")})

    assert [row["verdict"] for row in report["targets"]] == ["not measured"]
    assert "not installed" in text_of(report)


@pytest.mark.parametrize(
    ("few", "many", "verdicts"),
    [
        ([100e6, 120e6], [105e6, 125e6, 110e6], ["PASS", "PASS"]),
        ([100e6, 120e6], [111e6, 125e6], ["FAIL", "PASS"]),
        ([100e6, 410e6], [100e6, 405e6], ["PASS", "FAIL"]),
    ],
)
def test_target_of_memory(few, many, verdicts):
    outcomes = {
        names.MEMORY_FEW: one_run(1, peaks=few),
        names.MEMORY_MANY: one_run(1, peaks=many),
    }

    assert [row["verdict"] for row in report_of(outcomes)["targets"]] == verdicts


@pytest.mark.parametrize(("share", "is_told"), [(0.1, False), (0.4, True)])
def test_figures_of_a_busy_machine_are_marked(share, is_told):
    outcome = one_run(1)
    outcome.runs[0]["others"] = share

    assert ("these figures say little" in text_of(report_of({names.KEEP: outcome}))) == is_told


def test_command_measures_and_reports(images, tmp_path, capsys):
    # An interpreter that has nothing installed.
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    words = ["--only", "keep", "--rounds", "1", "--wait", "0", "--work", str(tmp_path / "work")]
    words += ["--peer", f"mosaic={bare}", "--peer", f"webdataset={bare}"]
    words += ["--images", str(images), "--out", str(tmp_path / "report.json")]

    code = cli.main(["bench", "pack", *words])

    report = json.loads((tmp_path / "report.json").read_text())
    text = capsys.readouterr().out
    assert code == 0
    assert report["cases"]["keep: vitscale"]["num_inputs"] == 6
    assert report["cases"]["keep: vitscale"]["images_per_s"][0] > 0
    assert report["ratios"]["keep / tarfile"][0] > 0
    for name in ("mosaicml-streaming, or --peer mosaic", "webdataset, or --peer webdataset"):
        assert f"not installed: pip install {name}=PYTHON" in text
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peer", "mosaic"], "write NAME=PYTHON"),
        (["--peer", "dali=python3"], "write NAME=PYTHON"),
        (["--peer", "mosaic=/no/such/python"], "there is no program '/no/such/python'"),
        (["--rounds", "0"], "must be at least 1"),
        (["--images", "/no/such/folder", "--only", "keep"], "cannot list '/no/such/folder'"),
    ],
)
def test_wrong_arguments_are_refused(words, message, capsys):
    assert bench_pack.main(words) == UserError.exit_code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("words", "code"), [(["bench"], 2), (["bench", "--help"], 0)])
def test_bench_alone_lists_its_verbs(words, code, capsys):
    assert cli.main(words) == code
    assert "vitscale bench pack  measure" in capsys.readouterr().out


def test_a_verb_of_two_words_is_suggested(capsys):
    assert cli.main(["bench", "pakc"]) == 2
    assert "no verb 'bench pakc'; did you mean 'bench pack'?" in capsys.readouterr().err
