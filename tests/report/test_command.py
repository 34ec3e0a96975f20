"""``python -m attnmon.report``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnmon.report.__main__ import main


def test_the_page_and_its_path(plain, tmp_path, capsys):
    assert main([str(plain), "--output", str(tmp_path / "new" / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "new" / "page.html")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["page.html", "page.json"]


def test_only_the_figures(plain, capsys):
    assert main([str(plain), "--json"]) == 0
    assert capsys.readouterr().out.strip() == str(plain / "attention_report.json")
    assert not (plain / "attention_report.html").exists()


def test_the_page_is_opened_where_asked(plain, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    main([str(plain)])
    assert opened == []
    main([str(plain), "--open"])
    assert opened == [(plain / "attention_report.html").as_uri()]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none"], "none does not exist"),
        (["."], "or the metrics.csv of Lightning's CSV logger, but found none in"),
        (["none"], "a folder with event files or a metrics.csv"),
        (["{plain}", "--output", "page.txt"], "ends in .html, but got page.txt"),
        (["{plain}", "--output", "page.html", "--json"], "ends in .json, but got page.html"),
        (["{plain}", "--open", "--json"], "leave one of them out"),
        (["{plain}", "{plain}", "{plain}"], "one folder or two, but got 3"),
        (["{plain}", "--output", "taken/page"], "can be written"),
        ([], "RUN_DIR"),
    ],
)
def test_errors_end_with_2_and_say_what_to_do(plain, tmp_path, monkeypatch, capsys, arguments, says):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    if "taken/page" in arguments:
        (tmp_path / "here" / "taken").write_text("a file")
    with pytest.raises(SystemExit) as left:
        main([argument.format(plain=plain) for argument in arguments])
    assert left.value.code == 2
    assert says in capsys.readouterr().err


def test_the_help_names_all_that_can_be_read(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "from their TensorBoard event files, or the metrics.csv of Lightning's CSV logger" in words
    assert "folder with the event files or the metrics.csv of a run" in words


def test_it_is_a_command_without_torch(plain):
    """A report must not wait for torch, nor need it."""
    script = (
        "import sys; import attnmon.report.__main__ as command; code = command.main(sys.argv[1:]);"
        "heavy = {'torch', 'lightning', 'transformers', 'tensorflow'} & set(sys.modules); print(code, heavy)"
    )
    run = subprocess.run([sys.executable, "-c", script, str(plain)], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "0 set()"
