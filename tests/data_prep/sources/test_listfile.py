import gzip
import http.server
import json
import os
import pickle
import re
import threading
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.sources.build import Column, SourceOptions, build_source
from data_prep.sources.listfile import ListFile
from tests.helpers.tars import contents
from vitscale.config.errors import DataError, UserError
from vitscale.data.storage import open_storage

NAMES = ["cat/1.jpg", "dog/2.png", "a,b.jpg", 'say "hi".jpg', "two words.jpg", "caf\u00e9.jpg"]
CLASSES = ["cat", "dog", "cat", "dog, small", "7", "cat"]
ROWS = list(zip(NAMES, CLASSES, strict=True))
WANTED = {name: ((int(label) if label == "7" else label,), name.encode()) for name, label in ROWS}


@pytest.fixture
def folder(tmp_path):
    """A folder with the images; what they hold is their name."""
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def listed(path, content, **options):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ListFile(str(path), SourceOptions(**options))


def labels_of(source):
    return {entry.name: entry.problem or entry.labels for entry in source.entries()}


def delimited(mark, header=True, end="\n", blank=""):
    def quoted(text):
        return '"' + text.replace('"', '""') + '"' if {mark, '"'} & set(text) else text

    rows = ([("filename", "label")] if header else []) + ROWS
    return "".join((mark + blank).join(map(quoted, row)) + end for row in rows)


CSV = delimited(",")
TEXTS = {
    "comma": CSV.encode(),
    "tab": delimited("\t").encode(),
    "semicolon": delimited(";").encode(),
    "bar": delimited("|").encode(),
    "no header": delimited(",", header=False).encode(),
    "mark of UTF-8, CRLF": b"\xef\xbb\xbf" + delimited(",", end="\r\n").encode(),
    "UTF-16": CSV.encode("utf-16"),
    "UTF-16 without a mark": CSV.encode("utf-16-be"),
    "gzip": gzip.compress(CSV.encode()),
    "blank after commas": delimited(",", blank="  ").encode(),
    "comments and blank lines": ("# my list\n\n" + CSV + "\n,\n# end\n").encode(),
    "a third column": CSV.replace("\n", ",x\n").replace("label,x", "label,note").encode(),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_dialect_is_found(folder, name):
    source = listed(folder / "list", TEXTS[name])

    assert contents(source) == WANTED
    assert source.columns() == [Column("label")]


def test_json_lines_and_parquet_are_lists_too(folder):
    lines = [json.dumps({"label": label, "file_name": name}) for name, label in ROWS]
    table = pa.table({"label": pa.array(CLASSES).dictionary_encode(), "file_name": NAMES})
    pq.write_table(table, folder / "table")

    assert contents(listed(folder / "lines", "\n\n".join(lines))) == WANTED
    assert contents(ListFile(str(folder / "table"), SourceOptions())) == WANTED


def test_lists_of_caffe_have_the_label_at_the_end(folder):
    text = "".join(f"{name} {number}\n" for number, name in enumerate(NAMES))

    found = contents(listed(folder / "train.txt", text))

    assert found == {name: ((number,), name.encode()) for number, name in enumerate(NAMES)}


def test_names_that_are_not_utf8_are_found(folder):
    name = os.fsdecode(b"caf\xe9.jpg")
    (folder / name).write_bytes(b"latin")

    assert contents(listed(folder / "list", b"caf\xe9.jpg,cat\n")) == {name: (("cat",), b"latin")}


def test_paths_are_relative_absolute_or_addresses(folder):
    (folder / "lists").mkdir()
    (folder / "images").mkdir()
    (folder / "images" / "a b.jpg").write_bytes(b"here")
    paths = ["../images/a b.jpg", f"{folder}/images/a b.jpg", f"file://{folder}/images/a%20b.jpg"]
    text = "path\tlabel\n" + "".join(f"{path}\tx\n" for path in paths)

    assert {data for _, data in contents(listed(folder / "lists" / "l", text)).values()} == {
        b"here"
    }
    rooted = listed(folder / "l", "path,label\na b.jpg,x\n", image_root=f"file://{folder}/images")
    assert contents(rooted) == {"a b.jpg": (("x",), b"here")}


def test_a_list_in_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "l.csv").write_text(CSV)

    assert contents(ListFile("l.csv", SourceOptions())) == WANTED


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("gone.jpg,cat", "missing_file: .*/gone.jpg$"),
        ("cat/1.jpg/x,cat", "missing_file: .*"),
        ("cat,cat", "unreadable: not a regular file"),
        ("cat/1.jpg,", "bad_label: row 3: the label is empty"),
        (",cat", "missing_file: row 3: the path is empty"),
        ("cat/1.jpg", "bad_label: row 3: 1 fields, expected 2"),
        ("cat/1.jpg,dog,x", "bad_label: row 3: 3 fields, expected 2; put values that hold ','"),
    ],
)  # fmt: skip
def test_rows_that_do_not_work_have_a_problem(folder, row, problem):
    text = f"filename,label\ndog/2.png,dog\n{row}\n" + 'two words.jpg,"cat"\n' * 30

    entries = list(listed(folder / "l", text).entries())

    assert [entry.labels for entry in entries] == [("dog",), entries[1].labels, *[("cat",)] * 30]
    assert re.match(problem, entries[1].problem), entries[1].problem
    assert entries[1].num_bytes == 0


def test_a_list_of_missing_files_keeps_its_classes(folder):
    assert labels_of(listed(folder / "l", "gone.jpg,ant\ncat/1.jpg,bee\n")).keys() == {
        "gone.jpg",
        "cat/1.jpg",
    }
    entry = next(listed(folder / "l", "gone.jpg,ant\n").entries())
    assert entry.labels == ("ant",)


def test_integers_are_indices_and_mixtures_are_announced(folder, capsys):
    text = "filename,label\ncat/1.jpg,0\ndog/2.png,11\ntwo words.jpg,-1\n"
    source = listed(folder / "l", text)
    assert list(labels_of(source).values()) == [(0,), (11,), (-1,)]
    assert source.columns() == [Column("label")]
    assert capsys.readouterr().err == ""

    mixed = listed(folder / "l", text + "cat/1.jpg,03\n")
    list(mixed.entries())
    mixed.columns()
    assert "other labels, the first in row 5: '03'" in capsys.readouterr().err


def test_large_integers_are_no_indices(folder):
    source = listed(folder / "l", "cat/1.jpg,99999999999\n")
    list(source.entries())

    with pytest.raises(UserError, match="number them from 0"):
        source.columns()


@pytest.mark.parametrize("kind", ["text", "json", "parquet"])
def test_several_labels(folder, kind):
    own = {"cat/1.jpg": [1, 3, 7], "dog/2.png": [3], "a,b.jpg": [], "two words.jpg": [2, 2, 0]}
    options = {}
    if kind == "text":
        text = "".join(f'"{name}",{";".join(map(str, v))}\n' for name, v in own.items())
        (folder / "l").write_text("filename,labels\n" + text)
        options = {"label_separator": ";"}
    elif kind == "json":
        lines = [json.dumps({"file_name": name, "labels": v}) for name, v in own.items()]
        (folder / "l").write_text("\n".join(lines))
    else:
        pq.write_table(pa.table({"image": list(own), "labels": list(own.values())}), folder / "l")
    source = ListFile(str(folder / "l"), SourceOptions(**options))

    assert labels_of(source) == {name: (tuple(values),) for name, values in own.items()}
    assert source.columns() == [Column("label", multi=True)]


def test_joined_labels_are_not_taken_for_a_class(folder):
    with pytest.raises(UserError, match="multi-label column give --label-separator ';'"):
        list(listed(folder / "l", "cat/1.jpg,1;3;7\ndog/2.png,3\n").entries())


def test_several_label_columns(folder):
    text = "id,fine label,coarse,img\n1,tabby,cat,cat/1.jpg\n2,pug,dog,dog/2.png\n"
    source = listed(folder / "l", text, label_columns=("fine label", "coarse"))

    assert labels_of(source) == {"cat/1.jpg": ("tabby", "cat"), "dog/2.png": ("pug", "dog")}
    assert source.columns() == [Column("fine_label"), Column("coarse")]


def test_columns_without_names_have_numbers(folder):
    text = "1,tabby,cat/1.jpg,cat\n2,pug,dog/2.png,dog\n"
    source = listed(folder / "l", text, image_column="2", label_columns=("1",))

    assert labels_of(source) == {"cat/1.jpg": ("tabby",), "dog/2.png": ("pug",)}
    assert source.columns() == [Column("label")]


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", {}, "is empty"),
        ("\n \n", {}, "holds no rows"),
        ("path,label\n", {}, "holds no rows"),
        ("a.jpg\nb.jpg\n", {}, "has a single column"),
        ("[{}]", {}, "write JSON lines"),
        ("path,label\na.jpg,x\n", {"label_columns": ("klass",)}, "no column 'klass'; it has path"),
        ("path,label\na.jpg,x\n", {"image_column": "img"}, "no column 'img'; it has path, label"),
        ("path,class_id,tags\na.jpg,0,x\n", {}, "choose one with --label-column: class_id, tags"),
        ("path,url,label\na.jpg,b,x\n", {}, "choose one with --image-column: path, url"),
        ("a.jpg,1,2\nb.jpg,2,3\n", {}, "has 3 columns and no header"),
        ('path,label\n"a.jpg,x\nb.jpg,y\n', {}, "row 3: unexpected end of data"),
        ("path,label\n", {"delimiter": "ab"}, "write one character"),
        (b"\x1f\x8bnot gzip", {}, "cannot be read"),
        ("path,label\na.jpg,x\n".encode("utf-16")[:-1], {}, "cannot be read"),
        (b"PAR1 no table", {}, "is no sound Parquet file"),
    ],
)  # fmt: skip
def test_lists_that_cannot_be_understood_are_refused(tmp_path, text, options, said):
    with pytest.raises(UserError, match=said):
        list(listed(tmp_path / "l", text, **options).entries())


def test_a_missing_list_is_named(tmp_path):
    with pytest.raises(UserError, match=r"l\.csv'?: no such file"):
        list(ListFile(str(tmp_path / "l.csv"), SourceOptions()).entries())


def test_the_delimiter_can_be_given(folder):
    text = "".join(
        f'"{name}":{label}\n' for name, label in [("cat/1.jpg", "a,b"), ("a,b.jpg", "c,d")]
    )

    assert labels_of(listed(folder / "l", text, delimiter=":")) == {
        "cat/1.jpg": ("a,b",),
        "a,b.jpg": ("c,d",),
    }


def test_long_lists_keep_their_order_and_are_not_held(folder):
    count = 40_000
    text = "".join(f"{number}.jpg,{number % 10}\n" for number in range(count))
    source = listed(folder / "l", text)
    tracemalloc.start()

    for number, entry in enumerate(source.entries()):
        assert entry.name == f"{number}.jpg"
        assert entry.labels == (number % 10,)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert number == count - 1
    # Held together, they take more than 10 MB.
    assert peak < 5_000_000


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda path: path.unlink(), DataError, "was listed but is gone"),
        (lambda path: path.write_bytes(b"other"), DataError, "has 5 bytes, it had 9 when"),
    ],
)
def test_files_that_change_after_listing_end_the_run(folder, change, error, said):
    source = listed(folder / "l", "cat/1.jpg,cat\n")
    entry = next(source.entries())
    other = pickle.loads(pickle.dumps(source))
    assert other.read(entry) == b"cat/1.jpg"

    change(folder / "cat" / "1.jpg")

    with pytest.raises(error, match=said):
        other.read(entry)


class Images(http.server.BaseHTTPRequestHandler):
    """Gives the path as the image; says its size unless that is /unsized."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        body = self.path.encode()
        self.server.seen.append(f"{self.command} {self.path}")
        self.send_response(404 if self.path.startswith("/gone") else 200)
        if self.path == "/unsized":
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(self.path.encode())


@pytest.fixture
def web():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Images)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_images_behind_http(folder, web):
    root = f"http://127.0.0.1:{web.server_port}"
    names = [f"{root}/{n}.jpg" for n in range(200)] + [f"{root}/unsized", f"{root}/gone.jpg"]
    source = listed(folder / "l", "url,label\n" + "".join(f"{name},x\n" for name in names))

    entries = list(source.entries())

    assert [entry.name for entry in entries] == names
    assert [entry.problem for entry in entries[-2:]] == ["", "missing_file: HTTP 404"]
    assert [entry.num_bytes for entry in entries[:11]] == [6] * 10 + [7]
    assert [source.read(entry) for entry in entries[199:201]] == [b"/199.jpg", b"/unsized"]


def test_sizes_in_the_list_save_requests(folder, web):
    text = "path,label,num_bytes\na.jpg,x,5000\nb.jpg,x,\n"
    source = listed(folder / "l", text, image_root=f"http://127.0.0.1:{web.server_port}/")

    entries = list(source.entries())

    assert [entry.num_bytes for entry in entries] == [5000, 6]
    assert web.seen == ["HEAD /b.jpg"]
    assert source.read(entries[0]) == b"/a.jpg"


@pytest.mark.s3
def test_lists_and_images_in_a_store(s3_uri):
    storage = open_storage(s3_uri)
    storage.put("images/1.jpg", b"one")
    storage.put("images/2.jpg", b"two")
    storage.put(
        "l.csv.gz", gzip.compress(f"images/1.jpg,a\n{s3_uri}/images/2.jpg,b\ngone,c\n".encode())
    )
    source = build_source(f"list:{s3_uri}/l.csv.gz", SourceOptions())

    found = contents(source)

    assert found["images/1.jpg"] == (("a",), b"one")
    assert found[f"{s3_uri}/images/2.jpg"] == (("b",), b"two")
    assert found["gone"][1] == f"missing_file: {s3_uri}/gone"
    entry = next(source.entries())
    storage.put("images/1.jpg", b"longer")
    with pytest.raises(DataError, match="has 6 bytes, it had 3"):
        source.read(entry)
    storage.delete("images/1.jpg")
    with pytest.raises(DataError, match="was listed but is gone"):
        source.read(entry)
