"""`bench gpu --part served`: the server's slots and words, what its readers have, and the figures of a measurement."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random

import msgspec
import pytest

from bench.gpu import served_figures
from bench.gpu.__main__ import main, told_served
from bench.gpu.killed import KilledStreams, heard_text, killed_streams
from bench.gpu.loads import ClosedLoad, PredictedLoad, as_rows, of_rows
from bench.gpu.served import DIRECT, TURNS, EnergyReadings, LevelCosts, ServedMeasurement, ServedOptions, ServedTurn
from bench.gpu.served_figures import ServedFigures, nearest
from bench.gpu.server import EXACT_ROWS, PROMPT_ROWS, row_counts, serve, shape_of
from bench.gpu.slots import SlotTable, SlotText
from bench.gpu.upstream import NAME as PENSTOCK
from bench.gpu.upstream import UpstreamPenstock
from bench.gpu.words import text_of, tokens_of
from bench.http import fetch
from bench.load.streams import StreamedAnswer
from bench.ports import free_port
from bench.program import OUT, PLOTS, BenchProgram
from bench.table1.client import TargetServer, seen
from planner.fit import (
    FIGURES,
    DecodeRegime,
    EngineFit,
    FittedTimes,
    LoadFigures,
    ServedLimits,
    ServedText,
    predicted_clients,
)

pytestmark = pytest.mark.slow

VOCAB, SLOTS, CONTEXT = 4000, 4, 1024


class ChainedSteps:
    """Steps of a model that knows only the token and its place, but looks whether the cache has all before it."""

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s, self.most = step_s, 0
        self._cache: dict[tuple[int, int], int] = {}

    def run(self, tokens: Sequence[int], slots: Sequence[int], places: Sequence[int]) -> list[int]:
        time.sleep(self._step_s)
        self.most = max(self.most, len(tokens))
        rows = list(zip(tokens, slots, places, strict=True))
        assert len({(slot, place) for _, slot, place in rows}) == len(rows)
        for token, slot, place in rows:
            if place == 0:
                for key in [key for key in self._cache if key[0] == slot]:
                    del self._cache[key]
            self._cache[slot, place] = token
        for _, slot, place in rows:
            assert all((slot, at) in self._cache for at in range(place)), "a token before this one is missing"
        return [chained(token, place) for token, _, place in rows]


def chained(token: int, place: int) -> int:
    return (31 * token + place) % VOCAB


def answer_of(prompt: Sequence[int], tokens: int) -> list[int]:
    found, token = [], prompt[-1]
    for place in range(len(prompt) - 1, len(prompt) - 1 + tokens):
        token = chained(token, place)
        found.append(token)
    return found


# --- slots and words --------------------------------------------------------------------------------------------------


def test_every_text_has_its_answer_whatever_runs_beside_it() -> None:
    """More texts than slots, with prompts longer than a step, some of which are left."""
    random, table, steps = Random(3), SlotTable(SLOTS, 40, 32), ChainedSteps()
    texts = [SlotText([random.randrange(VOCAB) for _ in range(random.randint(1, 90))], random.randint(1, 30))
             for _ in range(40)]  # fmt: skip
    answers: dict[SlotText, list[int]] = {text: [] for text in texts}
    coming = iter(texts)
    for number in count():
        for text in [next(coming, None) for _ in range(number % 3)]:
            if text is not None:
                table.submit(text)
        step = table.next_step()
        if step is None and number > 60:
            break
        if step is not None:
            for text, token, is_last in table.took(step, steps.run(step.tokens, step.slots, step.places)):
                answers[text].append(token)
                assert is_last == (len(answers[text]) == text.limit)
        texts[7].has_left = number > 12
    for text in texts[:7] + texts[8:]:
        assert answers[text] == answer_of(text.prompt, text.limit)
    assert len(answers[texts[7]]) < texts[7].limit and texts[7].slot == -1


def test_a_step_gives_every_running_text_its_token_before_prompts_have_the_rest() -> None:
    table = SlotTable(SLOTS, 12, 10)
    first, second = SlotText(range(5), 9), SlotText(range(30), 9)
    table.submit(first)
    step = table.next_step()
    assert step is not None and step.places == [0, 1, 2, 3, 4]
    table.took(step, [7] * 5)
    table.submit(second)
    step = table.next_step()
    assert step is not None and step.tokens == [7, *range(10)] and step.places == [5, *range(10)]
    assert [text for _, text in step.heard] == [first]
    assert len({step.slots[0], step.slots[1]}) == 2


def test_a_table_that_could_not_give_every_slot_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for prompts"):
        SlotTable(SLOTS, SLOTS, 8)


def test_a_text_continues_where_it_was_cut() -> None:
    """The answer so far behind the prompt is read as the tokens that it was written of."""
    prompt, answer = "7 2b3c river 99999 ² stone", [0, 5, VOCAB - 1]
    begun = prompt + "".join(map(text_of, answer))
    assert tokens_of(begun, VOCAB) == [*tokens_of(prompt, VOCAB), *answer]
    assert tokens_of(prompt, VOCAB)[0] == 7 and max(tokens_of(prompt, VOCAB)) < VOCAB


@pytest.mark.parametrize("slots", [8, 64])
def test_some_size_of_step_holds_all_rows_that_there_may_be(slots: int) -> None:
    sizes = row_counts(slots)
    assert sizes[:2] == [1, 2] and slots in sizes and sizes[-1] == slots + PROMPT_ROWS
    assert slots < EXACT_ROWS and sizes == sorted(set(sizes))


# --- the server -------------------------------------------------------------------------------------------------------


@contextmanager
def engine(steps: ChainedSteps) -> Iterator[TargetServer]:
    """The server with an engine that needs no GPU."""
    shape, port, loop = shape_of("tiny"), free_port(), asyncio.new_event_loop()
    serving = loop.create_task(serve(port, shape, CONTEXT, SlotTable(SLOTS, EXACT_ROWS, PROMPT_ROWS), steps))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                assert fetch(port, "GET", "/health")[0] == 200
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        yield TargetServer.at(f"http://127.0.0.1:{port}/v1", shape.name, name=DIRECT)
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(asyncio.gather(serving, return_exceptions=True))
        loop.close()


def test_the_server_streams_a_text_and_a_chat_with_their_usage() -> None:
    with engine(ChainedSteps()) as server:
        for body, path in (
            ({"prompt": "1 2 3", "max_tokens": 5}, "/v1/completions"),
            ({"messages": [{"role": "user", "content": "1 2 3"}], "max_tokens": 5}, "/v1/chat/completions"),
        ):
            asked = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
            status, _, data = fetch(server.port, "POST", path, asked)
            *chunks, done = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
            said = [json.loads(each) for each in chunks]
            texts = [each["choices"][0].get("text") or each["choices"][0]["delta"]["content"] for each in said[:-1]]
            assert status == 200 and done == "[DONE]"
            assert [int(text) for text in texts] == answer_of([1, 2, 3], 5)
            assert said[-2]["choices"][0]["finish_reason"] == "length" and said[-1]["choices"] == []
            assert said[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


@pytest.mark.parametrize(
    "body", [b"{", b'{"prompt":"","stream":true}', b'{"prompt":"1","max_tokens":1024,"stream":true}', b'{"prompt":"1"}']
)
def test_the_server_refuses_what_it_cannot_answer(body: bytes) -> None:
    with engine(ChainedSteps()) as server:
        status, _, said = fetch(server.port, "POST", "/v1/completions", body)
        assert status == 400 and json.loads(said)["error"]["message"]
        assert fetch(server.port, "GET", "/v1/nothing")[0] == 404


# --- what readers have ------------------------------------------------------------------------------------------------


def streamed(*pieces: str, finish: str = "length", cut: str = "") -> StreamedAnswer:
    lines = [{"choices": [{"index": 0, "text": piece, "finish_reason": None}]} for piece in pieces]
    lines.append({"choices": [{"index": 0, "text": "", "finish_reason": finish}]})
    events = b"".join(b"data: " + msgspec.json.encode(line) + b"\n\n" for line in lines) + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(events)
    return StreamedAnswer(0, 0.0, [(1.0, head + events[:9]), (3.5, events[9:])], cut)


def test_a_text_is_what_its_pieces_say() -> None:
    assert heard_text(streamed(" 1", " 2 3")).text == " 1 2 3"
    assert heard_text(streamed(" 1", " 2")).wrong(2) == ""
    assert "3 tokens" in heard_text(streamed(" 1", " 2", " 2")).wrong(2)
    assert "'stop'" in heard_text(streamed(" 1", finish="stop")).wrong(1)
    assert heard_text(streamed(" 1", cut="cut off")).wrong(1) == "cut off"
    refused = StreamedAnswer(0, 0.0, [(1.0, b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy")])
    assert heard_text(refused).wrong(1) == "status 503: busy"


def test_pieces_of_a_completion_count_as_those_of_a_chat_do() -> None:
    assert len(seen(streamed(" 1", " 2", " 3")).times) == 3


def test_a_text_whose_worker_is_killed_is_the_direct_one(tmp_path: Path) -> None:
    """Through `penstock up`, for real; the engine's steps need no GPU."""
    with (
        engine(ChainedSteps(0.004)) as direct,
        UpstreamPenstock(tmp_path, f"http://127.0.0.1:{direct.port}/v1", "tiny", SLOTS) as penstock,
    ):
        found = killed_streams(direct, penstock, 60, SLOTS)
        assert (found.differ, found.direct_differ, found.wrong, found.restarts) == (0, 0, [], 1)
        assert min(found.killed_at) >= 20 and len(found.silences_s) == found.streams


# --- figures ----------------------------------------------------------------------------------------------------------

REGIME = DecodeRegime(0.002, 0.0, 0.00002)
KNOWN = EngineFit(FittedTimes((0.001, 0.00001, 0.0), REGIME, REGIME), ServedLimits(64, 65_536, 512), 0.0, 0.0, 0)
OPTIONS = ServedOptions(levels=(1, 2, 4, 8, 16), slots=64)


def turn(way: str, number: int) -> ServedTurn:
    """As an engine of known step times would serve it. Half of the way lies before the engine, half behind it."""
    random, loads, costs, begin_s = Random(number), [], [], 0.0
    path_s = 0.0025 if way == PENSTOCK else 0.0005
    fit = EngineFit(KNOWN.times, KNOWN.limits, 0.0, path_s, 0)
    for clients in OPTIONS.levels:
        lengths = [(random.randint(128, 384), random.randint(64, 192)) for _ in range(max(20, 6 * clients))]
        texts = sorted(predicted_clients(fit, clients, lengths), key=lambda each: each.arrived_s)
        served = []
        for text in texts:
            assert text.first_s is not None and text.ended_s is not None
            sent_s, first_s, last_s = (
                begin_s + at + path_s / 2 for at in (text.arrived_s - path_s, text.first_s, text.ended_s)
            )
            served.append(ServedText("engine", sent_s, sent_s, first_s, last_s, first_s, text.prompt, text.output))
        begin_s = max(text.last_s for text in served) + 1.0
        loads.append(ClosedLoad(clients, served))
        tokens = sum(text.answer for text in served)
        costs.append(
            LevelCosts(
                clients=clients, tokens=tokens, seconds=2.0, itl_p50_s=0.002, itl_p99_s=0.004,
                penstock_cpu_s=30e-6 * tokens, engine_cpu_s=10e-6 * tokens, client_cpu=0.1, joules=0.05 * tokens,
            )
        )  # fmt: skip
    return ServedTurn(way=way, requests=as_rows(loads), costs=costs)


def measurement() -> ServedMeasurement:
    killed = KilledStreams(
        streams=16, tokens=600, differ=0, direct_differ=0, wrong=[], restarts=1, killed_at=[200] * 16,
        silences_s=[1.5] * 16,
    )  # fmt: skip
    turns = [turn(way, number) for way, number in zip(TURNS, (1, 1, 2, 2), strict=True)]
    tokens = sum(each.tokens for one in turns[1:3] for each in one.costs)
    energy = EnergyReadings(seconds=30.0, tokens=tokens, nvml_j=0.05 * tokens, metric_j=0.0505 * tokens,
                            report_j=0.05 * tokens, report_j_token=0.049)  # fmt: skip
    tuned = {"knee": {"concurrency": 16}}
    return ServedMeasurement(device="a GPU", options=OPTIONS, logits_off_by=0.01, turns=turns, energy=energy,
                             tuned=tuned, killed=killed)  # fmt: skip


def test_figures_are_those_of_the_requests() -> None:
    figures = ServedFigures(measurement())
    rows = {(row["clients"], row["way"]): row for row in figures.rows()}
    assert len(rows) == 2 * len(OPTIONS.levels)
    through, direct = rows[16, PENSTOCK], rows[16, DIRECT]
    assert 0.8 < through["share"] < 1 and direct["share"] is None
    assert rows[1, PENSTOCK]["added_ms"] == pytest.approx(2.0, abs=0.2)
    assert through["penstock_us"] == pytest.approx(30.0) and direct["penstock_us"] is None
    assert (through["role"], rows[2, DIRECT]["role"]) == ("fitted", "held out")
    held = {ratio.what: ratio for ratio in figures.ratios()}
    added = held["TTFT p50 through Penstock - direct, ms, at its worst level"]
    assert added.value == pytest.approx(max(row["added_ms"] for row in rows.values() if row["way"] == PENSTOCK))
    assert (added.at_most, added.verdict) == (5, "reached")
    share = held["the same at its worst level"].value
    assert share == pytest.approx(min(row["share"] for row in rows.values() if row["way"] == PENSTOCK))
    assert held["J/token of the turns through Penstock, by NVML"].value == pytest.approx(0.05)
    assert held["joules by penstock_gpu_energy_joules / by NVML"].value == pytest.approx(1.01)
    assert held["J/token by `penstock report` / by NVML"].value == pytest.approx(0.98)
    assert held["direct: throughput of the held-out loads, median error, %"].verdict == "reached"
    line = held["direct: throughput of the held-out loads, a line between the fitted ones, %"]
    assert min(line.rounds) > 0.5, "no engine yields a power of its clients"
    assert not [ratio for ratio in held.values() if ratio.at_most == 0 and ratio.verdict != "reached"]
    assert "front of it" in figures.notes()[0]


def test_the_fit_is_chosen_by_the_loads_that_it_was_fitted_to() -> None:
    """A server whose texts begin while a step is under way is known as one."""
    fit, found = nearest(of_rows(turn(DIRECT, 1).requests), OPTIONS)
    assert fit.limits.by_slot and max(map(abs, (_error(each) for each in found))) < 0.15


@pytest.mark.parametrize("better", [True, False])
def test_a_fit_that_is_nearer_to_what_is_held_out_is_not_chosen_for_it(
    better: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is exact where it was fitted and far off elsewhere, the other a little off and exact elsewhere."""

    def said(loads: Sequence[ClosedLoad], limits: ServedLimits) -> tuple[EngineFit, list[PredictedLoad]]:
        off = (1.0, 3.0) if limits.by_slot == better else (1.1, 1.0)
        fit = EngineFit(KNOWN.times, limits, 0.0, 0.0, 0)
        return fit, [PredictedLoad(load, number % 2 == 1, _times(load.figures, off[number % 2]))
                     for number, load in enumerate(loads)]  # fmt: skip

    monkeypatch.setattr(served_figures, "predictions", said)
    assert nearest(of_rows(turn(DIRECT, 1).requests), OPTIONS)[0].limits.by_slot == better


def _times(figures: LoadFigures, factor: float) -> LoadFigures:
    return LoadFigures(*(factor * getattr(figures, key) for key in FIGURES))


def _error(each: PredictedLoad) -> float:
    return each.predicted.ttft_p50_s / each.load.figures.ttft_p50_s - 1


def test_a_text_that_differs_is_a_missed_goal_and_absent_energy_is_no_figure() -> None:
    whole = measurement()
    killed = msgspec.structs.replace(whole.killed, differ=2, wrong=["no end"] * 5)
    energy = msgspec.structs.replace(whole.energy, nvml_j=None, metric_j=None)
    figures = ServedFigures(msgspec.structs.replace(whole, killed=killed, energy=energy))
    missed = [ratio.what for ratio in figures.ratios() if ratio.at_most == 0 and ratio.verdict == "missed"]
    assert len(missed) == 2 and not any("J/token" in ratio.what for ratio in figures.ratios())
    assert [ratio.value for ratio in figures.ratios() if "broken" in ratio.what] == [5]
    assert " ".join(figures.notes()).count("Wrong: no end.") == 3
    assert not any("counter of the driver" in note for note in figures.notes())


def test_a_kill_that_kills_nothing_is_a_missed_goal() -> None:
    """No worker was started again, or the streams had ended: that none of them broke says nothing."""
    whole = measurement()
    for changes, unmet in (({"restarts": 0}, 16), ({"killed_at": [*[200] * 13, 600, 600, 601]}, 3)):
        killed = msgspec.structs.replace(whole.killed, **changes)
        ratios = ServedFigures(msgspec.structs.replace(whole, killed=killed)).ratios()
        assert [ratio.value for ratio in ratios if ratio.verdict == "missed"] == [unmet]


def test_a_kept_run_is_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the requests in its file, without a GPU."""
    words = ["--out", str(tmp_path), "--plots", str(tmp_path)]
    first = BenchProgram("penstock bench gpu", "", lambda run: told_served(run, measurement())).taking(OUT, PLOTS)(
        words
    )
    kept = (tmp_path / "gpu-served.json").read_bytes()
    assert main(["--part", "served", "--again", str(tmp_path), *words]) == first
    assert main(["--part", "served", "--again", str(tmp_path), *words]) == first
    again = json.loads((tmp_path / "gpu-served.json").read_bytes())
    assert again == json.loads(kept), "and it is no further run"
    assert not (tmp_path / "gpu-served-raw.json").exists()
    assert "throughput of the held-out" in capsys.readouterr().out


def test_quick_is_for_this_part_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 2
    assert "--part served" in capsys.readouterr().out
