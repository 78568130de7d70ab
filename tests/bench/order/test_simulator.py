"""The simulator: it loses no text, repeats itself, and its queue is the order of the product."""

from __future__ import annotations

from random import Random

import pytest

from bench.order.replay import CONTENDERS, FIFO, LANES, OURS, VLLM, arrivals, is_in_time, ran
from bench.order.rule import LaneQueue, PenstockQueue, WaitingJob, credits_after, next_job
from planner.simulator.engine import EngineShape, ModelText
from planner.simulator.queues import LANES as ALL
from streaming.order import Priority

pytestmark = pytest.mark.slow

SHAPE = EngineShape(kv_tokens=8000, slots=16)
SHARES = {Priority.INTERACTIVE: 0.3, Priority.STANDARD: 0.5, Priority.BATCH: 0.2}


def made(rate: float, seed: int, seconds: float) -> list[ModelText]:
    """Texts of three tenants in all lanes, by arrival."""
    random = Random(seed)
    texts = []
    for at in arrivals(rate, 5.0, random, seconds):
        output = min(1024, 1 + int(random.lognormvariate(5.3, 0.8)))
        text = ModelText(random.randint(64, 512), output, 1 << (output - 1).bit_length(), arrived_s=at)
        text.lane = random.choices(list(SHARES), list(SHARES.values()))[0]
        text.tenant = random.choice("abc")
        texts.append(text)
    return texts


@pytest.mark.parametrize("name", list(CONTENDERS))
def test_every_text_ends(name: str) -> None:
    texts = made(6.0, 3, 60.0)
    ran(name, texts, SHAPE, 1)
    for text in texts:
        assert text.generated == text.output and text.arrived_s <= text.begun_s < text.first_s <= text.ended_s


def test_the_queue_gives_what_next_job_says_of_all_that_wait() -> None:
    """It shows `next_job` only the heads of its lines, and that makes no difference."""
    random, queue, now_s = Random(5), PenstockQueue(), 0.0
    waiting: dict[int, tuple[ModelText, WaitingJob]] = {}
    for number in range(1500):
        now_s += 10 * random.random()
        if random.random() < 0.55:
            text = ModelText(random.randint(1, 90), 5, random.randint(5, 400), lane=random.choice(ALL))
            text.tenant = random.choice("abc")
            queue.put(text, now_s)
            waiting[id(text)] = text, list(queue._lanes[Priority(text.lane)].waiting.values())[-1]
        elif waiting:
            lanes = {
                name: LaneQueue(
                    [job for text, job in waiting.values() if text.lane == name],
                    (),
                    dict(lane.counters),
                    lane.credit,
                )
                for name, lane in queue._lanes.items()
            }
            pick = next_job(lanes, int(1000 * now_s))
            text = queue.take(now_s, ALL)
            assert waiting.pop(id(text))[1] is pick.job, number
            after = credits_after(lanes, pick, int(1000 * now_s))
            assert {name: queue._lanes[name].credit for name in after} == after, number
            if random.random() < 0.8:
                text.generated = random.randint(0, text.limit)
                queue.note_end(text)
    assert len(queue) == len(waiting)


def a_chat_beside_lines(name: str) -> list[ModelText]:
    """Twenty lines fill an engine of four slots; a chat comes after two seconds."""
    lines = [ModelText(50, 300, 300, lane="batch", tenant="b") for _ in range(20)]
    chat = ModelText(50, 20, 20, arrived_s=2.0, lane="interactive", tenant="c")
    ran(name, [*lines, chat], EngineShape(kv_tokens=4000, slots=4), 1)
    assert all(text.generated == text.output for text in [*lines, chat])
    return [chat, *lines]


def test_a_chat_preempts_a_line_which_goes_on_where_it_was() -> None:
    chat, *lines = a_chat_beside_lines(OURS)
    assert is_in_time(chat) and sum(line.preemptions for line in lines) <= 1
    assert a_chat_beside_lines(FIFO)[0].begun_s > a_chat_beside_lines(LANES)[0].begun_s > chat.begun_s  # type: ignore[operator]


def test_an_engine_by_rank_begins_the_chat_next_and_evicts_lines_first() -> None:
    chat, *lines = a_chat_beside_lines(VLLM)
    assert chat.first_s is not None and sum(line.first_s < chat.first_s for line in lines if line.first_s) <= 8
    chats = [ModelText(100, 200, 200, lane="interactive", tenant="c", arrived_s=1.0) for _ in range(3)]
    more = [ModelText(100, 200, 200, lane="batch", tenant="b") for _ in range(8)]
    ran(VLLM, [*chats, *more], EngineShape(kv_tokens=1100, slots=16), 1)
    assert sum(each.evictions for each in chats) == 0 < sum(each.evictions for each in more)
