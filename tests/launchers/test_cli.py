import os
import subprocess
import sys
from pathlib import Path

import pytest

import vitscale
from vitscale.cli import VERBS, main

CHECKOUT = Path(__file__).resolve().parents[2]


def test_cli_without_a_verb_prints_its_usage_and_fails(capsys):
    assert main([]) == 2
    assert "usage: vitscale VERB" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["-h", "--help", "help"])
def test_cli_help_names_every_verb(word, capsys):
    assert main([word]) == 0

    text = capsys.readouterr().out
    for verb, (_, summary) in VERBS.items():
        assert verb in text
        assert summary in text


def test_cli_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vitscale {vitscale.__version__}\n"


@pytest.mark.parametrize(
    ("verb", "hint"),
    [
        ("pretrian", "did you mean 'pretrain'?"),
        ("eval", "did you mean 'evaluate'?"),
        ("PACK", "did you mean 'pack'?"),
        ("zzz", "there are: pack, verify"),
    ],
)
def test_cli_refuses_an_unknown_verb_with_a_hint(verb, hint, capsys):
    assert main([verb]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_with_examples(verb, capsys):
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])

    text = capsys.readouterr().out
    assert end.value.code == 0
    assert f"usage: vitscale {verb}" in text
    examples = text[text.index("examples:") :]
    # Under a launcher the verb's script is named instead.
    assert f"vitscale {verb}" in examples or f"{verb}.py" in examples


def started(words, folder, **extra):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment | extra,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_the_three_ways_to_start_a_verb_are_one(verb, tmp_path):
    module = VERBS[verb][0]
    script = CHECKOUT / f"{module.replace('.', '/')}.py"

    by_path = started([str(script), "--help"], tmp_path)
    by_module = started(["-m", module, "--help"], CHECKOUT)
    by_command = started(["-m", "vitscale.cli", verb, "--help"], tmp_path, PYTHONPATH=str(CHECKOUT))

    assert by_path == by_module == by_command
    assert f"usage: vitscale {verb}" in by_path


def test_a_script_started_by_path_finds_its_own_checkout_first(tmp_path):
    # Whatever lies around where it is started, or beside it, must not be imported.
    for name in ("vitscale", "launchers", "argparse"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")

    assert "usage:" in started([str(CHECKOUT / "launchers" / "pretrain.py"), "--help"], tmp_path)
