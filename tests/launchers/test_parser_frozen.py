"""The commands' flags are a contract: scripts of users name them. New knobs go to the recipe."""

import re

import pytest

from vitscale.cli import main

TRAINING = {
    "--recipe",
    "--ds-config",
    "--set",
    "--run-dir",
    "--resume",
    "--init",
    "--dry-run",
    "--help",
}
FLAGS = {
    "pretrain": TRAINING,
    "finetune": TRAINING,
    "evaluate": {
        "--checkpoint",
        "--data",
        "--label-column",
        "--exclude",
        "--ema",
        "--metrics",
        "--out",
        "--batch",
        "--num-workers",
        "--device",
        "--any-classes",
        "--help",
    },
    "export": {"--checkpoint", "--out", "--ema", "--to", "--help"},
    "doctor": {"--recipe", "--set", "--nodes", "--ranks", "--rate", "--out", "--help"},
}


def help_of(verb, capsys):
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def flags_in(text):
    """Flags that the option list of a help text defines; the examples below it do not count."""
    options = text[text.index("options:") : text.index("examples:")]
    return set(re.findall(r"^  (?:-\w, )?(--[a-z_-]+)", options, flags=re.MULTILINE))


@pytest.mark.parametrize("verb", FLAGS)
def test_flags_are_the_documented_ones(verb, capsys):
    assert flags_in(help_of(verb, capsys)) == FLAGS[verb]


def test_the_reading_of_flags_sees_an_added_one():
    text = (
        "options:\n  -h, --help  show\n  --extra-flag N\n              --no\nexamples:\n  --not\n"
    )

    assert flags_in(text) == {"--help", "--extra-flag"}


@pytest.mark.parametrize("verb", ["pretrain", "finetune"])
@pytest.mark.parametrize("words", [["--local_rank=1"], ["--local_rank", "1"]])
def test_local_rank_of_the_deepspeed_launcher_is_taken_and_hidden(verb, words, capsys):
    assert "local_rank" not in help_of(verb, capsys)
    assert main([verb, *words, "--recipe", "no-such.toml"]) == 2
    assert "no file 'no-such.toml'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", FLAGS)
def test_flags_are_not_abbreviated(verb, capsys):
    shortened = {"evaluate": "--check", "export": "--check"}.get(verb, "--recip")

    with pytest.raises(SystemExit) as end:
        main([verb, shortened, "x", "--out", "y", "--data", "z", "--checkpoint", "c"])

    assert end.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
