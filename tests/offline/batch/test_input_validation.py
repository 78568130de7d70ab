"""Reading an input: what is wrong has its line number, equal lines are found, lines that begin alike come together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from batching import MODELS, jsonl, line

from offline.batch.lines import MAX_FAULTS, Terms, ValidatedInput, ValidationInterrupted, validate_input
from streaming.batches.ledger import InputPlan, Ledger, LineOutcome, Segment, read_answer
from streaming.fleet.aliases import Aliases

TERMS = Terms("/v1/chat/completions", MODELS, 1000)


def validated(folder: Path, data: bytes, terms: Terms = TERMS, **more: Any) -> tuple[ValidatedInput, Ledger]:
    (folder / "input").write_bytes(data)
    segment = Segment(folder, 1)
    found = validate_input(folder / "input", terms, segment, **more)
    segment.commit()
    segment.close()
    return found, Ledger.load(folder, len(found.plan))


def test_a_good_input(tmp_path: Path) -> None:
    """Every line in its place, with the longest name and with no method; reading one gives it back."""
    lines = [line(number) for number in range(5)]
    lines[3]["custom_id"] = "x" * 512
    del lines[4]["method"]
    found, ledger = validated(tmp_path, jsonl(lines[:2]) + b"\n" + jsonl(lines[2:]))
    assert (found.faults, found.models, list(found.plan.numbers)) == ([], {"sim"}, [1, 2, 4, 5, 6])
    assert list(found.plan.order) == [0, 1, 2, 3, 4]
    assert found.tokens == sum(found.plan.tokens) > 5 * 6
    assert ledger.ends == [None] * 5
    with (tmp_path / "input").open("rb") as source:
        assert [json.loads(found.plan.read(source, place)) for place in range(5)] == lines


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r", b"\r\r", b"\n\r"])
def test_each_line_end_and_a_byte_order_mark_are_taken(tmp_path: Path, end: bytes, mark: bytes) -> None:
    lines = [line(number, "é" * (900 if number == 3 else 1)) for number in range(5)]
    found, _ = validated(tmp_path, mark + end.join(json.dumps(each).encode() for each in lines) + end)
    assert (found.faults, len(found.plan)) == ([], 5)
    with (tmp_path / "input").open("rb") as source:
        assert [json.loads(found.plan.read(source, place)) for place in range(5)] == lines


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_file_in_another_encoding_has_one_fault_that_names_it(tmp_path: Path, encoding: str) -> None:
    found, _ = validated(tmp_path, "\n".join(json.dumps(line(number)) for number in range(5)).encode(encoding))
    (fault,) = found.faults
    assert (fault.line, fault.code) == (1, "invalid_json_line") and encoding[:6].upper() in fault.message


def test_the_byte_that_is_no_utf8_or_no_json_is_named(tmp_path: Path) -> None:
    data = ['{"custom_id": "é"}'.encode("latin-1"), b'{"custom_id": "a", "body": {"model": "sim", "top_p": NaN}}']
    found, _ = validated(tmp_path, b"\n".join(data))
    first, second = found.faults
    assert "byte 16 is 0xe9" in first.message
    assert (second.code, second.param) == ("invalid_json_line", "body.top_p") and "finite" in second.message


@pytest.mark.parametrize(("bad", "code", "param"), [
    (b"{not json", "invalid_json_line", None),
    (b"\xff\xfe", "invalid_json_line", None),
    (b"[1]", "invalid_request", None),
    (b'{"custom_id": 1, "method": "POST", "url": "/v1/chat/completions", "body": {}}', "invalid_request", None),
    (jsonl([line(9) | {"method": "GET"}]), "invalid_method", "method"),
    (jsonl([line(9) | {"url": "/v1/completions"}]), "mismatched_endpoint", "url"),
    (jsonl([line(9) | {"custom_id": ""}]), "invalid_custom_id", "custom_id"),
    (jsonl([line(9) | {"custom_id": "x" * 513}]), "invalid_custom_id", "custom_id"),
    (jsonl([line(0)]), "duplicate_custom_id", "custom_id"),
    (jsonl([line(9, "x" * 3000)]), "line_too_long", None),
])  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, bad: bytes, code: str, param: str | None) -> None:
    """Its number and, in a sentence, what is wrong; nothing of the batch is run."""
    terms = Terms("/v1/chat/completions", MODELS, 1000, max_line_bytes=2000)
    data = jsonl([line(0), line(1)]) + bad.rstrip() + b"\n" + jsonl([line(2)])
    found, _ = validated(tmp_path, data, terms)
    (fault,) = found.faults
    assert (fault.line, fault.code, fault.param) == (3, code, param)
    assert " " in fault.message and fault.message.endswith(".")


@pytest.mark.parametrize("levels", [257, 100_000])
def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path, levels: int) -> None:
    """Also where it could be read now, but not by one who has called more functions before."""
    deep = b'{"custom_id": "x", "url": "/v1/chat/completions", "body": %b}'
    data = jsonl([line(0)]) + deep % (b"[" * (levels - 1) + b"]" * (levels - 1)) + b"\n" + jsonl([line(1)])
    found, _ = validated(tmp_path, data)
    assert [(fault.line, fault.code) for fault in found.faults] == [(2, "invalid_json_line")]


def test_a_heavy_line_is_answered_with_the_error(tmp_path: Path) -> None:
    """As the same request would be, and so is one that is nested too deeply for a request; the others are run."""
    heavy, deep = line(1, z=[[]] * 100_000), line(2, z="DEEP")
    nested = jsonl([deep]).replace(b'"DEEP"', b"[" * 250 + b"]" * 250)
    found, ledger = validated(tmp_path, jsonl([line(0), heavy]) + nested + jsonl([line(3)]))
    assert (found.faults, found.refused, list(found.plan.order)) == ([], 2, [0, 3])
    kept = [json.loads(read_answer(tmp_path, end)) for end in ledger.ends if end]
    codes = [each["response"]["body"]["error"]["code"] for each in kept]
    assert codes == ["body_too_complex", "invalid_request_error"]


@pytest.mark.parametrize(("data", "faults"), [
    (b"", [(0, "empty_file")]),
    (b"\n \n", [(0, "empty_file")]),
    (jsonl([line(n) for n in range(4)]), [(4, "too_many_lines")]),
    (b"x\n" * 500, [(number, "invalid_json_line") for number in range(1, MAX_FAULTS + 1)]),
], ids=["empty", "blank", "long", "bad"])  # fmt: skip
def test_too_few_and_too_many(tmp_path: Path, data: bytes, faults: list[tuple[int, str]]) -> None:
    """A file without lines, one with more than may be, and the first hundred of many bad lines."""
    most = 3 if faults[0][1] == "too_many_lines" else 1000
    found, _ = validated(tmp_path, data, Terms("/v1/chat/completions", MODELS, most))
    assert [(fault.line, fault.code) for fault in found.faults] == faults


def test_a_wrong_request_is_that_lines_answer(tmp_path: Path) -> None:
    """The others are run."""
    wrong: list[dict[str, Any]] = [{"model": "gone"}, {"temperature": 9}, {"messages": []}, {"unread": 10**40}]
    lines = [line(0), *[line(number, **fields) for number, fields in enumerate(wrong, 1)], line(5)]
    found, ledger = validated(tmp_path, jsonl(lines))
    assert (found.faults, found.refused, list(found.plan.order)) == ([], 4, [0, 5])
    assert [end.outcome if end else None for end in ledger.ends] == [None, *[LineOutcome.FAILED] * 4, None]


def test_a_line_keeps_the_model_that_its_alias_meant(tmp_path: Path) -> None:
    """In the plan: also where the alias means another model later, or is gone."""
    terms = Terms("/v1/chat/completions", MODELS, 9, aliases=Aliases({"gpt-*": "sim"}, {}))
    found, _ = validated(tmp_path, jsonl([line(0), line(1, model="gpt-1"), line(2, model="gpt-2")]), terms)
    assert found.refused == 0 and found.models == {"sim"}
    found.plan.save(tmp_path)
    assert InputPlan.load(tmp_path).meant == {"gpt-1": "sim", "gpt-2": "sim"}


def test_equal_lines_are_computed_once_if_their_answer_is_sure(tmp_path: Path) -> None:
    """At temperature 0 or with a seed; with another model, seed or length it is another request."""
    cold: dict[str, Any] = {"temperature": 0}
    lines = [
        line(0, "same", **cold), line(1, "same", **cold), line(2, "same"), line(3, "same"),
        line(4, "same", seed=1), line(5, "same", seed=1), line(6, "same", seed=2),
        line(7, "same", model="other", **cold), line(8, "same", max_tokens=9, **cold),
        line(9, "same", user="somebody", metadata={"a": "b"}, **cold),
    ]  # fmt: skip
    found, _ = validated(tmp_path, jsonl(lines))
    assert list(found.plan.duplicate_of) == [0, 0, 2, 3, 4, 4, 6, 7, 8, 0]
    assert sorted(found.plan.order) == [0, 2, 3, 4, 6, 7, 8]


def test_lines_that_begin_alike_follow_each_other(tmp_path: Path) -> None:
    """Long common beginnings, then longer ones; what has none keeps its place."""
    a, b = "a" * 300, "b" * 300
    deep = a + "c" * 1000
    texts = [a + "1", b + "1", "short 1", deep + "1", b + "2", a + "2", "short 2", deep + "2"]
    found, _ = validated(tmp_path, jsonl([line(number, text) for number, text in enumerate(texts)]))
    order = [texts[place] for place in found.plan.order]
    alike, others = [a + "1", a + "2", deep + "1", deep + "2"], [b + "1", b + "2", "short 1", "short 2"]
    assert order[4:] == others and order[:4] in (alike, [alike[0], alike[2], alike[3], alike[1]])


def test_it_stops_when_it_is_to(tmp_path: Path) -> None:
    """In the middle of a long input."""
    with pytest.raises(ValidationInterrupted):
        validated(tmp_path, jsonl([line(number) for number in range(500)]), should_continue=lambda: False)


def test_lines_whose_answers_show_other_fields_are_computed_each(tmp_path: Path) -> None:
    """A response shows the user, the labels and the names of its request; a chat does not."""
    asked: list[dict[str, Any]] = [{}, {}, {"user": "a"}, {"metadata": {"a": "b"}}, {"safety_identifier": "a"}]
    body = {"model": "sim", "input": "same", "temperature": 0}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/responses", "body": body | fields}
        for number, fields in enumerate(asked)
    ]
    found, _ = validated(tmp_path, jsonl(lines), Terms("/v1/responses", MODELS, 1000))
    assert list(found.plan.duplicate_of) == [0, 0, 2, 3, 4]
