import json
from pathlib import Path

import pytest

from data_prep.index import main as index
from data_prep.labels import main as labels
from data_prep.pack import main as pack
from data_prep.show import main
from tests.helpers.corpus import crop, encoded, make_folder
from tests.helpers.tars import write_tar
from vitscale.data import open_dataset


@pytest.fixture(params=["tar", "arrow"])
def packed(request, tmp_path) -> Path:
    source = make_folder(tmp_path / "in", {"ant": 8, "bee": 4})
    (source / "bee" / "bad").write_bytes(b"no image")
    (source / "bee" / "empty").write_bytes(b"")
    out = tmp_path / "out"
    words = ["--source", f"imagefolder:{source}", "--out", str(out), "--shard-bytes", "8KB"]
    assert pack([*words, "--format", request.param, "--workers", "1"]) == 0
    return out


def test_show_says_what_a_dataset_holds(packed, capsys):
    assert main([str(packed), "--num", "0"]) == 0

    out = capsys.readouterr().out
    assert "num_samples=12 num_classes=2" in out
    assert "num_failed=2 num_excluded=0" in out
    assert "label column=label num_classes=2 (one class a sample)" in out
    assert "classes of label: ant 8, bee 4\n" in out
    assert "formats: jpg 9, png 3\n" in out
    assert "failed inputs: " in out
    assert "not_an_image 1" in out
    assert "key=" not in out


def test_show_prints_and_saves_samples(packed, capsys, tmp_path):
    assert main([str(packed), "--num", "3", "--save", str(tmp_path / "look")]) == 0

    out = capsys.readouterr().out
    assert out.count("key=") == 3
    dataset = open_dataset(packed)
    for sample in [dataset[0], dataset[1], dataset[2]]:
        path = tmp_path / "look" / f"{sample.key}.{sample.image_format}"
        assert path.read_bytes() == sample.image
        name = dataset.class_names[sample.label]
        assert f"key={sample.key} label={sample.label} class={name!r}" in out


def test_show_finds_a_key(packed, capsys):
    wanted = open_dataset(packed)[9]

    assert main([str(packed), "--key", wanted.key]) == 0

    assert f"key={wanted.key} label={wanted.label} class=" in capsys.readouterr().out


def test_show_unknown_key_is_named(packed, capsys):
    assert main([str(packed), "--key", "nobody"]) == 2

    assert "no sample 'nobody'; keys look like '000000000'" in capsys.readouterr().err


def test_show_gives_all_labels_and_names_added_columns(tmp_path, capsys):
    members = []
    for number in range(3):
        fields = {"label": number % 2, "tags": ["x", "y"][:number]}
        members.append((f"{number}.jpg", encoded(crop(number))))
        members.append((f"{number}.json", json.dumps(fields).encode()))
    write_tar(tmp_path / "wds" / "a.tar", members)
    words = ["--label-column", "label", "--label-column", "tags", "--workers", "1"]
    assert index([str(tmp_path / "wds"), *words]) == 0
    table = tmp_path / "more.csv"
    table.write_text("key,label\n0,old\n2,new\n")
    assert labels([str(tmp_path / "wds"), "--add", "age", "--from", str(table)]) == 0

    assert main([str(tmp_path / "wds")]) == 0

    out = capsys.readouterr().out
    assert "label column=tags num_classes=2 (several classes a sample)" in out
    assert "added columns, for --label-column: age" in out
    assert "key=2 label=0 class='0' tags=[0, 1] class=['x', 'y']" in out
    assert main([str(tmp_path / "wds"), "--label-column", "age"]) == 0
    out = capsys.readouterr().out
    assert "num_samples=2" in out
    assert "key=2 age=0 class='new' label=0 class='0' tags=[0, 1]" in out
