"""What the compose deployment is tried with: each judge passes what is right, and finds what is wrong. Playing the rows
is `make test-stack`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import told_streams

from bench.chaos.history import Event
from bench.report import REVISION, commit
from bench.stack import rows
from bench.stack.deployment import ROLES, StackError
from bench.stack.rows import ERRORS, IMAGES, STREAMS, KeptThings, NotTried, judged

FAULT = {"t": 0.1, "event": "fault", "trial": 1, "what": ""}


def told(*, silence_s: float = 0.5, whole: int = STREAMS, before: int = STREAMS) -> list[Event]:
    """As many streams, of which so many have a token before the fault, and so many an end."""
    events = [event for n in range(STREAMS) for event in told_streams.begun(n)[: None if n < before else 2]]
    events.append(FAULT)
    for n in range(STREAMS):
        events += told_streams.tokens(n, silence_s, int(n < before))
        events += told_streams.ended(n, 2.0 + silence_s) if n < whole else []
    return events


def refusals() -> list[Event]:
    """One stream is whole, and all others were refused."""
    others = range(1, STREAMS)
    events = [*told_streams.begun(0), *(told_streams.asked(n) for n in others)]
    events += [told_streams.refused(n, 0.5) for n in others]
    return [*events, FAULT, *told_streams.tokens(0, 1.5, 1), *told_streams.ended(0, 2.0)]


def test_a_disturbance_that_streams_outlast_passes() -> None:
    assert judged(told(), "scheduler", 2.4, 16) == "back 2 s, open 16, stall 0.5 s"
    assert judged(told(silence_s=2.0), "redis", 2.4, 16)


@pytest.mark.parametrize(
    ("events", "service", "unfinished"),
    [
        ([], "scheduler", 0),
        ([], "api", 16),
        (told(), "worker", 0),
        (told(silence_s=600), "api", 16),
        (told(silence_s=2.0), "scheduler", 16),
        (told(before=1), "worker", 16),
        (told(whole=1), "worker", 16),
        (refusals(), "redis", 16),
        (refusals(), "worker", 16),
    ],
)
def test_a_disturbance_that_shows_nothing_fails(events: list[Event], service: str, unfinished: int) -> None:
    with pytest.raises(StackError):
        judged(events, service, 2.4, unfinished)


def asking(posted: Any = None, read: Any = None) -> Any:
    """A stack whose API says these."""

    def ask(method: str, *_: Any) -> tuple[dict[str, str], bytes]:
        said = posted if method == "POST" else read
        return {"x-job-id": "job"}, said if isinstance(said, bytes) else json.dumps(said).encode()

    return SimpleNamespace(ask=ask)


def answer(text: str | None) -> Any:
    return {"choices": [{"message": {"content": text}}]}


def streamed(parts: list[str], stored: str) -> str:
    chunks = [json.dumps({"choices": [{"delta": {"content": part}}]}) for part in parts]
    events = "".join(f"data: {each}\n\n" for each in [*chunks, "[DONE]"])
    return rows.streamed(asking(events.encode(), {"result": answer(stored)}))


def job(result: Any, status: str = "completed") -> str:
    return KeptThings().job(asking({"id": "job"}, {"status": status, "result": result}))


COUNTS = {"total": 8, "completed": 8, "failed": 0}
LINE = json.dumps({"response": {"body": answer("Rhine")}}) + "\n"
BATCH = {"id": "b", "input_file_id": "i", "output_file_id": "o", "request_counts": COUNTS}


def batch(folder: Path, lines: str) -> str:
    stack = asking(read={"data": [BATCH]})
    stack.docker, stack.penstock = folder, lambda *_: (folder / "answers.jsonl").write_text(lines)
    return KeptThings().batch(stack)


def hidden(folder: Path, shown: str, scheme: str = "redis") -> str:
    (folder / "secrets").mkdir()
    for role in ROLES:
        (folder / f"secrets/{role}.toml").write_text(f'url = "{scheme}://{role}:of-{role}@redis:6379/0"')
    found = SimpleNamespace(compose=folder, containers=lambda: {"api": "a"}, inspected=lambda *_: [{"Args": shown}])
    return rows.hidden(found)  # type: ignore[arg-type]


def traced(*roles: str) -> str:
    log = "".join(f"spans of penstock-{role}\n" for role in roles)
    return rows.traced(SimpleNamespace(log=lambda _: log))  # type: ignore[arg-type]


def built(revision: str) -> str:
    image = {"Config": {"Labels": {REVISION: revision}}}
    return rows.built(SimpleNamespace(image=str, inspected=lambda *_: [image]))  # type: ignore[arg-type]


def back(service: str, *, running: bool) -> str:
    def engine(*_: str) -> str:
        if not running:
            raise StackError("it is down")
        return ""

    state = [{"State": {"Running": running}}]
    stack: Any = SimpleNamespace(engine=engine, inspected=lambda *_: state)
    rows.await_service(stack, service, "name")
    return service


def test_what_is_right_passes(tmp_path: Path) -> None:
    assert streamed(["a", "b"], "ab") == "2 parts" and job(answer("Como"))
    assert batch(tmp_path, LINE * 8) == "8 lines" and hidden(tmp_path, "", "rediss") == "4 in 1 containers"
    assert traced("api", "worker", "offline") and built(commit()) == f"{len(IMAGES)} images"
    assert back("redis", running=True) and back("collector", running=True)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda _: streamed(["ab"], "ab"),
        lambda _: streamed(["a", "b"], "abc"),
        lambda _: job(None),
        lambda _: job(answer("")),
        lambda _: job(answer("Como"), "failed"),
        lambda folder: batch(folder, ""),
        lambda folder: batch(folder, "x\n" * 8),
        lambda folder: batch(folder, LINE * 7),
        lambda _: KeptThings().restart(asking({"id": "key"})),
        lambda folder: hidden(folder, "of-api"),
        lambda folder: hidden(folder, "of-api", "rediss"),
        lambda folder: hidden(folder, "", "unix"),
        lambda _: traced("api", "worker"),
        lambda _: built("another"),
        lambda _: built(""),
        lambda _: back("api", running=False),
        lambda _: back("prometheus", running=False),
    ],
)
def test_what_is_wrong_fails(wrong: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SETTLE_TIMEOUT_S", 0.0)
    with pytest.raises(ERRORS):
        wrong(tmp_path)


def test_an_image_that_is_not_there_is_not_tried() -> None:
    with pytest.raises(NotTried):
        rows.tensorrt_llm(SimpleNamespace(image=lambda _: ""))  # type: ignore[arg-type]
