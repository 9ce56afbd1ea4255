import io

from vitscale.observe.log import RunLog, clock
from vitscale.observe.progress import Progress


def test_a_log_file_gets_the_last_line_at_least():
    stream = io.StringIO()
    progress = Progress(3, "shards", "pack", stream=stream)

    for _ in range(3):
        progress.update(1, failed=0)
    progress.close()

    lines = stream.getvalue().splitlines()
    assert lines[-1].startswith("pack 3/3 shards rate=")
    assert lines[-1].endswith("eta=00:00 failed=0")


def test_a_silent_progress_says_nothing():
    stream = io.StringIO()
    progress = Progress(1, "shards", "pack", stream=stream, show=False)

    progress.update()

    assert stream.getvalue() == ""


def test_clock_writes_hours_only_when_there_are_any():
    assert [clock(s) for s in (0, 61, 3661, -5)] == ["00:00", "01:01", "1:01:01", "00:00"]


def test_run_log_writes_key_value_lines(tmp_path, capsys):
    log = RunLog(tmp_path / "log.txt", echo=True)
    log.line("step 1/2", loss=0.123456789, ranks=2)
    log.close()

    assert capsys.readouterr().out == "step 1/2 loss=0.12346 ranks=2\n"
    assert (tmp_path / "log.txt").read_text().endswith(" step 1/2 loss=0.12346 ranks=2\n")
