from pathlib import Path

from vitscale.observe.metrics import MetricsFile, read_metrics


def write(path: Path, steps: list[int]) -> None:
    file = MetricsFile(path, 10**9)
    file.write({"step": step, "train/loss": step / 2} for step in steps)
    file.close()


def test_rows_come_back_in_order(tmp_path: Path):
    write(tmp_path / "metrics.jsonl", [1, 2, 3])

    rows = read_metrics(tmp_path / "metrics.jsonl")

    assert rows == [{"step": step, "train/loss": step / 2} for step in (1, 2, 3)]


def test_a_resume_forgets_what_it_will_write_again(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3, 4])

    file = MetricsFile(path, resume_step=2)
    file.write([{"step": 3, "train/loss": 9.0}])
    file.close()

    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    assert read_metrics(path)[2]["train/loss"] == 9.0


def test_a_torn_last_line_does_not_count_and_does_not_stay(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    with path.open("a") as file:
        file.write('{"step": 3, "tra')

    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    MetricsFile(path, resume_step=2).close()

    assert path.read_text().count("\n") == 2
