"""`penstock batch`: what people hand over becomes lines, and a run goes on where it stopped."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batching import answers_are_right, jsonl, line, said
from house import House, eventually, module_house

from cli.__main__ import main
from cli.batch import BatchRun, Recipe, batch_lines, prepare
from cli.output import Problem

pytestmark = pytest.mark.slow

RECIPE = Recipe("sim", options={"max_tokens": 6})


house = module_house("workers", "offline", PENSTOCK_SIM_SLOTS="8")
"""One of each role."""


@pytest.mark.parametrize(("name", "text"), [
    ("in.jsonl", '{"prompt": "é"}\n{"prompt": "b"}\n'), ("in.csv", "prompt\né\nb\n"), ("a.txt", "é"),
])  # fmt: skip
def test_files_may_have_a_byte_order_mark_and_no_other_encoding(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8-sig"))
    source = tmp_path if name == "a.txt" else tmp_path / name
    found = [row["body"]["messages"][0]["content"] for row in batch_lines(source, RECIPE)]
    assert found == ["é", "b"][: len(found)] and found
    if name == "in.jsonl":
        (tmp_path / name).write_bytes(text.replace("\n", "\r").encode())
        assert len(list(batch_lines(source, RECIPE))) == 2
    at = text.index("é") + 1
    for encoding, words in (("utf-16", "UTF-16"), ("latin-1", f"byte {at} is 0xe9")):
        (tmp_path / name).write_bytes(text.encode(encoding))
        with pytest.raises(Problem, match=words):
            list(batch_lines(source, RECIPE))


@pytest.fixture
def here(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own, and commands that find the house."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_URL", house.url)
    return tmp_path


def prompts(source: Path, recipe: Recipe = RECIPE) -> dict[str, str]:
    """Prompt by name."""
    return {each["custom_id"]: each["body"]["messages"][0]["content"] for each in batch_lines(source, recipe)}


def test_json_lines(tmp_path: Path) -> None:
    """Requests as they are; objects with messages, a prompt, or the template's fields."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl([line(1)]) + b"\n" + jsonl([{"prompt": "p"}, {"custom_id": "x", "messages": [], "n": 2}]))
    whole, prompt, chat = batch_lines(path, RECIPE)
    assert whole == line(1)
    assert (prompt["custom_id"], prompt["body"]) == (
        "row-3",
        {"model": "sim", "messages": [{"role": "user", "content": "p"}], "max_tokens": 6},
    )
    assert (chat["custom_id"], chat["body"]) == ("x", {"model": "sim", "messages": [], "max_tokens": 6, "n": 2})


def test_a_table_with_a_template(tmp_path: Path) -> None:
    """Columns by name, other braces left alone; a byte order mark and newlines in cells do no harm."""
    path = tmp_path / "in.csv"
    path.write_text('\ufeffid,word,text\na,été,"two\nlines"\nb,x,\n', encoding="utf-8")
    assert prompts(path, Recipe("m", 'Say {word}: {text} {"a": 1}', "id")) == {
        "a": 'Say été: two\nlines {"a": 1}',
        "b": 'Say x:  {"a": 1}',
    }
    assert prompts(path) == {"row-1": "two\nlines", "row-2": ""}


def test_a_folder_of_texts(tmp_path: Path) -> None:
    """Each file is a row, named by its path, in the order of the names."""
    for name in ("b.txt", "a/c.md", "a/ignored.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}", encoding="utf-8")
    assert list(prompts(tmp_path).items()) == [("a/c.md", "text of a/c.md"), ("b.txt", "text of b.txt")]
    assert prompts(tmp_path, Recipe("m", "{name}!"))["b.txt"] == "b!"


@pytest.mark.parametrize(("name", "data", "template", "words"), [
    ("in.jsonl", b'{"t": 1}\nx\n', "{t}", "line 2 is not JSON"),
    ("in.jsonl", b"[]\n", "", "line 1 is not an object"),
    ("in.jsonl", b"\n", "", "nothing to compute"),
    ("in.csv", b"a,b\n1,2\n", "", "row 1: which column is the text?"),
    ("in.jsonl", jsonl([{"prompt": "x"}, {"prompt": ""}, {"promt": "x"}]), "", "row 3: which column is the text?"),
    ("in.csv", b"a,b\n1,2\n", "{c}", "row 1 has no column 'c'"),
    ("in.csv", b"a,b\n\xff,2\n", "{a}", "byte 5 is 0xff"),
    ("in.jsonl", jsonl([line(1), line(2) | {"url": "/v1/completions"}]), "", "several endpoints"),
    ("in.jsonl", b'{"text": 1}\n{"text": NaN}\n', "", "line 2 is not JSON: NaN is no finite number"),
    ("in.jsonl", b'{"text": -1e999}\n', "", "line 1 is not JSON: -1e999 is no finite number"),
    ("in.jsonl", b'{"text": 1}\n{"text": %b}' % (b"[" * 100_000 + b"]" * 100_000), "", "row 2 is nested too deep"),
    ("in.jsonl", b'{"custom_id": "a", "body": {}}\n', "", "line 1: a request needs a url"),
    ("in.csv", b"Product Name,b\n1,2\n", "{Product Nam}", "names no column of row 1, which are Product Name, b"),
    ("in.csv", b"a,b\n1,2\n", "all the same", "names no column of row 1"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes, template: str, words: str) -> None:
    """Wrong usage, with the row."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(Problem, match=words) as problem:
        prepare(tmp_path / name, Recipe("m", template), io.BytesIO())
    assert problem.value.exit_code == 2


def outputs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_bytes().split(b"\n")[:-1]]


def test_run_from_a_table(here: Path, told: Any) -> None:
    """Answers in order under the ids of a column; again, it is there already and nothing is computed."""
    (here / "in.csv").write_text("id,text\n" + "".join(f"k{number},hello {number}\n" for number in range(20)))
    command = ["batch", "run", "in.csv", "-o", "out.jsonl", "--template", "{text}", "--id-column", "id"]
    assert "20 of 20 lines" in told(*command, "--max-tokens", "6").out
    found = outputs(here / "out.jsonl")
    assert [each["custom_id"] for each in found] == [f"k{number}" for number in range(20)]
    assert found[7]["response"]["body"]["choices"][0]["message"]["content"] == said("hello 7")
    captured = told(*command, "--max-tokens", "6", "--json")
    assert json.loads(captured.out)["id"] in captured.err
    assert "belongs to another run" in told(*command, "--max-tokens", "7", code=2).err
    assert "completed" in told(*command, "--max-tokens", "7", "--again").out


def test_failed_lines_are_told_and_kept(here: Path, told: Any) -> None:
    """Exit 5; the answers, the errors beside them, and the list of them."""
    (here / "in.jsonl").write_bytes(jsonl([line(0), line(1, temperature=5), line(2)]))
    assert "1 line without an answer in out.errors.jsonl" in told("batch run in.jsonl -o out.jsonl", code=5).err
    answers_are_right(outputs(here / "out.jsonl"), [line(0), line(2)])
    (failed,) = outputs(here / "out.errors.jsonl")
    assert failed["custom_id"] == "r-1"
    batch_id = json.loads(told("batch ls --limit 1 --json").out)["id"]
    assert "2     r-1        invalid_request_error" in told("batch errors", batch_id).out
    assert json.loads(told("batch errors", batch_id, "--json").out)["line"] == 2
    assert "2 completed, 1 failed, 3 in all" in told("batch show", batch_id).out


def test_an_interrupted_run_goes_on(here: Path, house: House, told: Any) -> None:
    """Killed while it watches: paused, shown, resumed, cancelled from elsewhere; the same command fetches the rest."""
    lines = [line(number, max_tokens=60) for number in range(400)]
    (here / "in.jsonl").write_bytes(jsonl(lines))
    words = ["batch", "run", "in.jsonl", "-o", "out.jsonl"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", *words],
        env={**os.environ, "PENSTOCK_URL": house.url},
        stderr=subprocess.PIPE,
        text=True,
    )
    note = here / "out.jsonl.batch"
    eventually(lambda: note.exists() and json.loads(note.read_bytes())["batch"])
    process.send_signal(signal.SIGINT)
    _, said_by_it = process.communicate(timeout=30)
    assert process.returncode == 130 and "the same command takes it up again" in said_by_it
    batch_id = json.loads(note.read_bytes())["batch"]
    for command, words_of_it in (("pause", "paused"), ("resume", "")):
        assert words_of_it in told("batch", command, batch_id).out
    assert f"going on with {batch_id}" in told(*words).err
    answers_are_right(outputs(here / "out.jsonl"), lines)
    assert told("batch output", batch_id).out == (here / "out.jsonl").read_text()
    assert "cannot be told to cancel" in told("batch cancel", batch_id, code=1).err


def test_a_column_may_have_any_name(tmp_path: Path) -> None:
    """`body` in a table, or as a text, is one like others; what is no column stays, as JSON in a template."""
    table, lines = tmp_path / "in.csv", tmp_path / "in.jsonl"
    table.write_text("Product Name,first-name,body,url\na,b,c,d\n")
    told = prompts(table, Recipe("m", '{Product Name} {first-name} {body} {"x": 1} {a b}'))
    assert list(told.values()) == ['a b c {"x": 1} {a b}']
    lines.write_bytes(jsonl([{"id": 0, "body": "text"}, {"id": "", "body": "x"}, {"id": None, "body": "y"}]))
    assert prompts(lines, Recipe("m", "{body}", "id")) == {"0": "text", "row-2": "x", "row-3": "y"}
    with pytest.raises(Problem, match="row 1 has no column 'di', which --id-column names"):
        prompts(lines, Recipe("m", "{body}", "di"))


@pytest.mark.parametrize("words", [
    ("in.jsonl", "in.jsonl"), ("out.errors.jsonl", "out.jsonl"), ("out.batch", "out"), ("in.jsonl", "pipe"),
])  # fmt: skip
def test_what_would_be_lost_is_not_replaced(
    here: Path, words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The input, under the name of each file that is written, and what is no regular file."""
    os.mkfifo(here / "pipe")
    (here / words[0]).write_bytes(jsonl([line(0)]))
    assert main(["batch", "run", words[0], "-o", words[1]]) == 2
    assert "would be replaced" in capsys.readouterr().err
    assert (here / words[0]).read_bytes() == jsonl([line(0)]) and (here / "pipe").is_fifo()


def test_a_batch_that_failed_deletes_only_what_an_earlier_one_wrote(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says how to start over."""
    (here / "good.jsonl").write_bytes(jsonl([line(0)]))
    (here / "bad.jsonl").write_bytes(jsonl([line(0), line(0)]))
    (here / "out.jsonl").write_text("mine")
    assert main(["batch", "run", "bad.jsonl", "-o", "out.jsonl"]) == 5
    assert "with --again starts over" in capsys.readouterr().err and (here / "out.jsonl").read_text() == "mine"
    assert main(["batch", "run", "good.jsonl", "-o", "out.jsonl", "--again"]) == 0
    assert "--again" not in capsys.readouterr().err
    answers_are_right(outputs(here / "out.jsonl"), [line(0)])
    assert main(["batch", "run", "bad.jsonl", "-o", "out.jsonl", "--again"]) == 5
    assert not (here / "out.jsonl").exists()


def test_a_run_outlives_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It asks as patiently as commands that wait, and in the end says that the batch goes on."""
    (tmp_path / "in.jsonl").write_bytes(jsonl([line(0)]))
    batch = {"id": "batch_1", "status": "in_progress", "paused": False, "lines_per_second": None,
             "request_counts": {"total": 1, "completed": 0, "failed": 0}}  # fmt: skip
    asked: list[dict[str, Any]] = []

    def get(_path: str, **more: Any) -> dict[str, Any]:
        asked.append(more)
        raise Problem("no penstock answers", code="unreachable")

    client: Any = SimpleNamespace(get=get, upload=lambda *_, **__: {"id": "file-1"}, post=lambda *_, **__: batch)
    work = BatchRun(client, tmp_path / "in.jsonl", tmp_path / "out.jsonl", RECIPE, "24h", again=False)
    with pytest.raises(Problem) as problem:
        work.start()
    assert asked == [{"patient": True}]
    assert problem.value.next_step == "batch_1 goes on: the same command takes it up again"
