"""F36, F38-F41: the real llama.cpp engine under kills, held against the same requests undisturbed (greedy); the engine
`upstream` in front of two servers that die, stall, lie, and lose their connections."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from bench.chaos.asks import RESETS, TENANTS, authorization
from bench.chaos.cluster import Begun, PenstockCluster
from bench.chaos.http import Cut, Exchange, fetch
from bench.chaos.processes import ManagedProcess, until
from bench.chaos.proxy import Proxy
from bench.chaos.rows.workers import asks, requests, victim
from bench.chaos.stage import FaultTestbed
from bench.chaos.upstream_server import STALL, UpstreamFault
from bench.ports import free_port
from workers.engines.llamacpp import weights

TOKENS = 48
MODEL = "smollm"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STREAMED = "schema, streamed"
DONE = "[DONE]"
TIE = 0.15
"""Two tokens whose log-probabilities are no further apart may change places: sums depend on the rest of the batch."""
WAIT_TIMEOUT_S = 120.0


def questions(trial: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: path and body of what is asked."""
    chat = {"messages": [{"role": "user", "content": f"Tell me about the number {trial + 2}."}]}
    text = f"The {trial + 2} largest rivers of the world are"
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    both = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0}
    person = {"messages": [{"role": "user", "content": f"Describe person {trial} as JSON."}]}
    return {
        "chat": ("/v1/chat/completions", both | chat),
        "n": ("/v1/chat/completions", both | chat | {"n": 2}),
        "prompts": ("/v1/completions", both | {"prompt": [text, "Once upon a time"], "logprobs": 2}),
        "logprobs": ("/v1/chat/completions", both | chat | {"logprobs": True, "top_logprobs": 2}),
        "schema": (
            "/v1/chat/completions",
            both | person | {"response_format": schema, "max_tokens": 64, "logprobs": True, "top_logprobs": 2},
        ),
    }


async def f36(stage: FaultTestbed) -> None:
    """The same requests undisturbed and while workers are killed: every answer is the same, text for text."""
    path = await asyncio.to_thread(_weights)
    environ = {
        "PENSTOCK_LLAMACPP_PATH": str(path),
        "PENSTOCK_LLAMACPP_THREADS": "1",
        "PENSTOCK_LLAMACPP_CONTEXT": "512",
        # With it the likeliest token is not the one that is taken, and ties could not be told from logprobs.
        "PENSTOCK_LLAMACPP_REPEAT_PENALTY": "1",
    }
    models, schemas = (MODEL,), 0
    async with stage.cluster(workers=2, models=models, engine="llamacpp", environ=environ, lease_ms=2000) as cluster:
        for trial in stage.tries():
            wanted = questions(trial % 3)
            whole = {name: await _ask(cluster, trial, name, *asked) for name, asked in wanted.items()}
            stop = _across_a_token(whole["chat"])
            wanted["stop"] = (wanted["chat"][0], wanted["chat"][1] | {"stop": [stop]})
            whole["stop"] = await _ask(cluster, trial, "stop", *wanted["stop"])
            answers = {name: asyncio.create_task(_ask(cluster, trial, name, *asked)) for name, asked in wanted.items()}
            whole[STREAMED] = whole["schema"]
            answers[STREAMED] = asyncio.create_task(_stream(cluster, trial, *wanted["schema"]))
            await asyncio.sleep(stage.rng.uniform(0.3, 2.0))
            doomed = await victim(stage, cluster)
            stage.fault(f"kill -9 {doomed.name}, which computes")
            doomed.kill()
            for name, task in answers.items():
                schema = name.startswith("schema")
                reference = whole["prompts" if name == "prompts" else "schema" if schema else "logprobs"]
                _compare(stage, f"{name} of trial {trial}", whole[name], await task, _ties(reference))
            begun = {name: (await task)["_attempts"] for name, task in answers.items()}
            stage.bit(max(begun.values()) > 1, "no answer was begun twice")
            schemas += sum(name.startswith("schema") and count > 1 for name, count in begun.items())
            await cluster.ready(120.0)
    stage.figures["schema jobs begun twice"] = schemas
    # The short form has one trial, which may meet other jobs.
    stage.must(stage.short or schemas > 0, "no schema job was begun twice")


def _weights() -> Path:
    """The default model, where the tests keep it."""
    folder = Path(os.environ.get("PENSTOCK_TEST_CACHE") or Path.home() / ".cache" / "penstock-tests")
    folder.mkdir(parents=True, exist_ok=True)
    return weights.fetch(folder, lambda _what, _done, _of: None)


def _across_a_token(answer: Mapping[str, Any]) -> str:
    """A stop string out of the middle of an undisturbed answer; it begins and ends within words."""
    text = _texts(answer)[0]
    middle = len(text) * 2 // 3
    return text[middle : middle + 7] or "never"


async def _ask(cluster: PenstockCluster, trial: int, name: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, and how often its job was begun."""
    tenant = TENANTS[trial % 2]
    try:
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            exchange = await Exchange.begin(
                cluster.ports[trial % 2], "POST", path, msgspec.json.encode(body), authorization(tenant)
            )
            await exchange.answer()
            answer: dict[str, Any] = msgspec.json.decode(await exchange.body())
    except (Cut, TimeoutError) as error:
        return {"_error": f"{name}: {error!r}", "_attempts": 0}
    if exchange.status != 200:
        return {"_error": f"{name}: {exchange.status} {answer}", "_attempts": 0}
    job = exchange.headers["x-job-id"]
    cluster.clients.owners[job] = tenant
    _, view = await cluster.clients.fetch(job, cluster.ports[0], "GET", f"/v1/jobs/{job}")
    return answer | {"_attempts": msgspec.json.decode(view)["attempts"]}


async def _stream(cluster: PenstockCluster, trial: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same request as a stream: the job's result, how often it was begun, and what was wrong with the stream."""
    tenant, shown, code = TENANTS[trial % 2], "", ""
    sent = msgspec.json.encode(body | {"stream": True})
    try:
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            exchange = await Exchange.begin(cluster.ports[trial % 2], "POST", path, sent, authorization(tenant))
            await exchange.answer()
            job = exchange.headers["x-job-id"]
            cluster.clients.owners[job] = tenant
            async for block in exchange.blocks():
                if (data := block.get("data", "")) == DONE:
                    code = DONE
                    break
                chunk = msgspec.json.decode(data)
                code = chunk.get("error", {}).get("code", code)
                shown += "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
            await cluster.clients.read_finally(job, WAIT_TIMEOUT_S)
            _, view = await cluster.clients.fetch(job, cluster.ports[0], "GET", f"/v1/jobs/{job}")
    except (Cut, TimeoutError, KeyError) as error:
        return {"_error": f"{STREAMED}: {error!r}", "_attempts": 0}
    found = msgspec.json.decode(view)
    answer: dict[str, Any] = found["result"] or {}
    fault = fault_of_stream(shown, code, "".join(_texts(answer)), found["attempts"])
    return answer | {"_attempts": found["attempts"]} | ({"_error": f"{STREAMED}: {fault}"} if fault else {})


def fault_of_stream(shown: str, code: str, result: str, attempts: int) -> str:
    """What is wrong with a stream of JSON, "" if nothing: it showed the result to its end, or said after a loss that
    what it had shown is not what will be stored."""
    if code == DONE:
        return "" if shown == result else f"showed {shown!r:.150} of the result {result!r:.150}"
    if code in RESETS:
        return "" if attempts > 1 and shown else f"told {code} without a loss after {shown!r:.150}"
    return f"ended with {code!r}"


def _texts(answer: Mapping[str, Any]) -> list[str]:
    choices = answer.get("choices", ())
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]


def _ties(answer: Mapping[str, Any]) -> list[list[tuple[int, int]]]:
    """By choice: where in the text two tokens were about equally likely."""
    found = []
    for choice in answer.get("choices", ()):
        at, ties = 0, []
        for token, best in _best(choice.get("logprobs") or {}):
            if len(best) > 1 and abs(best[0] - best[1]) < TIE:
                ties.append((at, at + max(1, len(token))))
            at += len(token)
        found.append(ties)
    return found


def _best(logprobs: Mapping[str, Any]) -> list[tuple[str, list[float]]]:
    """Tokens with their best log-probabilities, of a chat or of a completion."""
    if content := logprobs.get("content"):
        return [(token["token"], [top["logprob"] for top in token["top_logprobs"]]) for token in content]
    pairs = zip(logprobs.get("tokens") or (), logprobs.get("top_logprobs") or (), strict=False)
    return [(token, sorted((best or {}).values(), reverse=True)) for token, best in pairs]


def _part_at_ties(one: Sequence[str], other: Sequence[str], ties: list[list[tuple[int, int]]]) -> bool:
    """Whether every two texts that differ do so first where two tokens were about equally likely."""
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        at = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if a != b and not any(first <= at < last for first, last in ties[min(number, len(ties) - 1)]):
            return False
    return True


def _apart(one: Sequence[Any], other: Sequence[Any]) -> str:
    """Where two answers part, and how."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b and isinstance(a, str | list) and isinstance(b, str | list):
            at = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            first = max(0, at - 5)
            return f"of choice {number} parts at {at}: {b[first : at + 20]!r}, undisturbed {a[first : at + 20]!r}"
    return f"{other!r:.150}, undisturbed {one!r:.150}"


def _compare(
    stage: FaultTestbed,
    name: str,
    undisturbed: Mapping[str, Any],
    disturbed: Mapping[str, Any],
    ties: list[list[tuple[int, int]]],
) -> None:
    stage.must("_error" not in undisturbed, str(undisturbed.get("_error")))
    stage.must("_error" not in disturbed, str(disturbed.get("_error")))
    if "_error" in undisturbed or "_error" in disturbed:
        return
    texts = _texts(undisturbed), _texts(disturbed)
    if name.startswith("schema"):
        stage.must(_is_person(texts[1][0]), f"{name}: not of its schema: {texts[1][0]!r}")
    if texts[0] != texts[1] and len(texts[0]) == len(texts[1]) and _part_at_ties(*texts, ties):
        stage.figures["answers that part at a tie"] = int(stage.figures.get("answers that part at a tie", 0)) + 1
        return
    for what, told in (("text", _texts), ("finish", _finishes), ("tokens of logprobs", _logprobs), ("usage", _usage)):
        one, other = told(undisturbed), told(disturbed)
        stage.must(one == other, f"{name}: {what} {_apart(one, other)}")


def _finishes(answer: Mapping[str, Any]) -> list[str]:
    return [choice["finish_reason"] for choice in answer["choices"]]


def _logprobs(answer: Mapping[str, Any]) -> list[list[str]]:
    found = [(choice.get("logprobs") or {}).get("content") or () for choice in answer["choices"]]
    return [[token["token"] for token in content] for content in found]


def _usage(answer: Mapping[str, Any]) -> tuple[int, int]:
    return answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


def _is_person(text: str) -> bool:
    """Whether a text is JSON of the schema."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return isinstance(found, dict) and isinstance(found.get("name"), str) and isinstance(found.get("age"), int)


KINDS = ("vllm", "ollama")
"""One continues an answer by token ids, the other by the beginning of a message; both serve one model."""
BETWEEN_TOKENS_S, FIRST_TOKEN_S = 1.0, 2.0
LATE_S = 1.6 * BETWEEN_TOKENS_S
"""A server that is silent for so long has been given up, and speaks again while the answer goes on elsewhere."""
EARLY, LATE = 8, 6
"""Streams that are begun before a fault, and at it."""
LONG_OUTAGE_S = 60.0


class ServerUnderTest:
    """One upstream server, behind a proxy of its own."""

    def __init__(self, stage: FaultTestbed, number: int) -> None:
        self.kind = KINDS[number]
        self._port = free_port()
        argv = [sys.executable, "-m", "bench.chaos.upstream_server", str(self._port), self.kind]
        self.child = ManagedProcess(f"upstream-{self.kind}", argv, dict(os.environ), stage.folder)
        self.proxy = Proxy(self._port)

    async def start(self) -> None:
        await self.proxy.start()
        await self.child.start()
        await self.answers()

    async def answers(self) -> None:
        """Until it does. Raises TimeoutError."""
        await until(self._listens, 10.0)

    async def _listens(self) -> bool:
        with suppress(Cut):
            return (await fetch(self._port, "GET", "/v1/models"))[0] == 200
        return False

    async def stop(self) -> None:
        await self.child.end()
        await self.proxy.stop()

    async def set_fault(self, fault: UpstreamFault) -> int:
        """From now on. Returns how many replies have met faults so far. Raises Cut."""
        _, _, body = await fetch(self._port, "POST", "/fault", msgspec.json.encode(fault))
        return int(msgspec.json.decode(body)["met"])


Servers = Sequence[ServerUnderTest]
Injection = Callable[[Servers], Coroutine[Any, Any, None]]
"""Does what it should to these servers; new requests come while it does."""


@asynccontextmanager
async def in_front(stage: FaultTestbed) -> AsyncIterator[tuple[Servers, PenstockCluster]]:
    """Two servers, and a cluster whose workers send to both."""
    servers = [ServerUnderTest(stage, number) for number in range(len(KINDS))]
    environ = {
        "PENSTOCK_UPSTREAM_URLS": ",".join(f"http://127.0.0.1:{server.proxy.port}/v1" for server in servers),
        "PENSTOCK_UPSTREAM_BETWEEN_TOKENS_S": str(BETWEEN_TOKENS_S),
        "PENSTOCK_UPSTREAM_FIRST_TOKEN_S": str(FIRST_TOKEN_S),
    }
    try:
        await asyncio.gather(*(server.start() for server in servers))
        async with stage.cluster(workers=2, engine="upstream", environ=environ) as cluster:
            yield servers, cluster
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


async def play(
    stage: FaultTestbed, servers: Servers, cluster: PenstockCluster, trial: int, what: str, inject: Injection
) -> list[Begun]:
    """One trial: streams run, some servers meet the fault, more streams are begun. All have ended when it returns."""
    begun = cluster.begin(asks(stage.row.id, trial, EARLY))
    await asyncio.sleep(stage.rng.uniform(0.2, 1.0))
    hit = servers if trial % 2 else [stage.rng.choice(servers)]
    stage.fault(f"{what}: {', '.join(server.kind for server in hit)}")
    injected = asyncio.create_task(inject(hit))
    begun += cluster.begin(asks(f"{stage.row.id} late", trial, LATE))
    await injected
    await cluster.finish(begun)
    for told, _ in begun:
        lost = await cluster.losses(told.job)
        stage.must(not lost, f"{what}: {told.job} has spent {lost} attempts")
    stage.must(not any(worker.exits for worker in cluster.workers), f"{what}: a worker has ended")
    return begun


async def play_faults(stage: FaultTestbed, faults: Sequence[UpstreamFault]) -> None:
    """Trials with these faults in turn, each at one server and then at both."""
    async with in_front(stage) as (servers, cluster):
        met = 0
        for trial in stage.tries():
            fault = faults[trial // 2 % len(faults)]

            async def inject(hit: Servers, fault: UpstreamFault = fault) -> None:
                await asyncio.gather(*(server.set_fault(fault) for server in hit))

            begun = await play(stage, servers, cluster, trial, fault.what, inject)
            before, met = met, sum([await server.set_fault(UpstreamFault()) for server in servers])
            stage.bit(met > before and stage.across(requests(begun)), "no reply met the fault")
        stage.figures["replies that met a fault"] = met


async def f38(stage: FaultTestbed) -> None:
    """kill -9 of one server or of both, which are back after a while; the last time after a minute."""
    async with in_front(stage) as (servers, cluster):
        for trial in stage.tries():
            last = not stage.short and stage.trials + 1 == stage.wanted
            away_s = LONG_OUTAGE_S if last else stage.rng.uniform(0.1, 3.0)

            async def inject(hit: Servers, away_s: float = away_s, *, last: bool = last) -> None:
                await asyncio.gather(*(_down(server, away_s) for server in (servers if last else hit)))

            begun = await play(stage, servers, cluster, trial, f"kill -9, back after {away_s:.1f} s", inject)
            stage.bit(stage.across(requests(begun)), "no stream was open")


async def _down(server: ServerUnderTest, seconds: float) -> None:
    lives = len(server.child.exits)
    server.child.patient.clear()
    server.child.kill()
    await server.child.exited(lives + 1)
    await asyncio.sleep(seconds)
    server.child.patient.set()
    await server.answers()


async def f39(stage: FaultTestbed) -> None:
    """Silences shorter and longer than the limits, and a trickle."""
    await play_faults(stage, SLOW)


async def f39b(stage: FaultTestbed) -> None:
    """The whole server stands still, with its connections open."""

    async def inject(hit: Servers) -> None:
        for server in hit:
            server.child.send(signal.SIGSTOP)
        await asyncio.sleep(stage.rng.choice((LATE_S, 3 * BETWEEN_TOKENS_S)))
        for server in hit:
            server.child.send(signal.SIGCONT)

    async with in_front(stage) as (servers, cluster):
        for trial in stage.tries():
            begun = await play(stage, servers, cluster, trial, "SIGSTOP", inject)
            stage.bit(stage.across(requests(begun)), "no stream was open")


async def f40(stage: FaultTestbed) -> None:
    """Replies that are not what they say."""
    await play_faults(stage, LIES)


async def f41(stage: FaultTestbed) -> None:
    """Connections that one side has closed, or that were reset."""
    await play_faults(stage, BROKEN)


async def f41b(stage: FaultTestbed) -> None:
    """A network that swallows what servers say, or closes every connection."""

    async def swallow(hit: Servers) -> None:
        for server in hit:
            server.proxy.cut(to_server=False)
        await asyncio.sleep(3 * BETWEEN_TOKENS_S)
        for server in hit:
            server.proxy.heal()

    async def drop(hit: Servers) -> None:
        for server in hit:
            server.proxy.drop()

    async with in_front(stage) as (servers, cluster):
        for trial in stage.tries():
            what, inject = (("answers swallowed", swallow), ("connections closed", drop))[trial // 2 % 2]
            begun = await play(stage, servers, cluster, trial, what, inject)
            stage.bit(stage.across(requests(begun)), "no stream was open")


SLOW = (
    UpstreamFault(what=STALL, replies=10, seconds=0.6 * BETWEEN_TOKENS_S),
    UpstreamFault(what=STALL, replies=6, seconds=LATE_S),
    UpstreamFault(what=STALL, replies=400, seconds=0.05),
    UpstreamFault(what="no head", replies=4, seconds=2 * FIRST_TOKEN_S),
)
LIES = (
    *(
        UpstreamFault(what=what, replies=8)
        for what in ("no finish reason", "error after 200", "malformed chunk", "[DONE] alone", "finish reason abort")
    ),
    UpstreamFault(what="nothing but [DONE]", replies=4),
    UpstreamFault(what="429", replies=12, seconds=1),
    UpstreamFault(what="429", replies=12),
    UpstreamFault(what="503", replies=6),
)
BROKEN = (
    *(UpstreamFault(what=what, replies=8) for what in ("cut", "half-closed", "reset")),
    UpstreamFault(what="reset at once", replies=4),
)
