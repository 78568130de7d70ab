"""What the compose deployment is tried with. Each row returns its figure, and raises an error of ERRORS if it fails."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from bench.chaos.asks import ANY, NOTHING, Ask, Budget
from bench.chaos.checker import check
from bench.chaos.clients import Clients
from bench.chaos.history import ClientHistory, Event, of_kind, stalls_ms
from bench.http import fetch
from bench.report import REVISION, of_another_tree
from bench.stack.deployment import MODEL, PROJECT, ROLES, UNANSWERED, Stack, StackError

STREAMS = 16
TOKENS = 800
DRAIN_TOKENS = 3200
"""With the simulated engine's steps, longer than [api] and [worker] drain_s: the rest is handed over."""
SETTLE_TIMEOUT_S = 60.0
MAX_MEGABYTES = {"penstock-api": 180, "penstock-worker": 250}
"""Of images, beyond their base."""
ERRORS = (StackError, LookupError, TypeError, ValueError, TimeoutError, *UNANSWERED)
IMAGES = ("penstock-api", "penstock-scheduler", "penstock-offline", "penstock-worker", "penstock-worker-smollm2")
KEPT = 5
"""A job, a batch with its two files, and a key."""
AWAY = Budget(refused=ANY, broken=ANY, codes=("store_unavailable", "draining"), why="it is what clients wait for")
BUDGETS = {"api": AWAY, "redis": AWAY}
"""Whoever reads during another fault notices nothing but a pause."""
MAX_STALL_S = {"api": 11.0, "redis": 4.0, "worker": 10.0}
"""About twice what was measured; a second for every other container."""
PROBES = {role: ("penstock", "probe", role) for role in ROLES}
PROBES["redis"] = ("sh", "-c", "redis-cli --user probe --pass none --no-auth-warning ping | grep PONG")


class NotTried(Exception):
    """What the row needs is not there."""


Row: TypeAlias = "tuple[str, Callable[[Stack], str]]"


def rows(stack: Stack, folder: Path) -> Iterator[Row]:
    """Every row by its title; the second one starts the stack."""
    kept = KeptThings()
    yield "images are of this commit", built
    yield "every role is ready", ready
    yield "a chat is streamed", streamed
    yield "a job is done", kept.job
    yield "a batch is done", kept.batch
    yield "Prometheus scrapes every role", scraped
    yield "traces reach the collector", traced
    yield "a restart of all keeps", kept.restart
    for service in stack.containers():
        yield f"kill {service}", Disturbance(folder, service).kill
    for service in ("worker", "api"):
        yield f"stop {service}", Disturbance(folder, service).stop
    yield "no secret in inspect", hidden
    yield "nothing written outside volumes", unwritten
    for image in MAX_MEGABYTES:
        yield f"{image} beyond its base", partial(sized, image)
    yield "worker on TensorRT-LLM's image", tensorrt_llm


def chat(text: str, **more: Any) -> dict[str, Any]:
    """The body of a request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


def eventually(condition: Callable[[], str], what: str) -> str:
    """Poll until it returns a figure. Raises TimeoutError."""
    until = time.monotonic() + SETTLE_TIMEOUT_S
    while not (found := condition()):
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(1)
    return found


# --- in use -----------------------------------------------------------------------------------------------------------


def built(stack: Stack) -> str:
    labels = {name: stack.inspected(stack.image(name))[0]["Config"]["Labels"] or {} for name in IMAGES}
    if other := of_another_tree({name: label.get(REVISION, "") for name, label in labels.items()}):
        raise StackError(other)
    return f"{len(labels)} images"


def ready(stack: Stack) -> str:
    return f"{stack.up():.0f} s"


def streamed(stack: Stack) -> str:
    """Its text is what is stored."""
    headers, answer = stack.ask("POST", "/v1/chat/completions", chat("Name a river.", stream=True, max_tokens=24))
    *lines, done = re.findall(r"^data: (.*)$", answer.decode(), re.MULTILINE)
    parts = [choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]]
    _, job = stack.ask("GET", f"/v1/jobs/{headers['x-job-id']}?wait=10")
    text = json.loads(job)["result"]["choices"][0]["message"]["content"]
    if done != "[DONE]" or "".join(parts) != text or (count := sum(map(bool, parts))) < 2:
        raise StackError(f"streamed {parts!r}, stored {text!r}, ended {done!r}")
    return f"{count} parts"


class KeptThings:
    """What the first rows made, and must be there after everything was restarted."""

    def __init__(self) -> None:
        self._paths: list[str] = []

    def job(self, stack: Stack) -> str:
        began = time.monotonic()
        _, answer = stack.ask("POST", "/v1/jobs", chat("Name a lake.", max_tokens=8))
        path = f"/v1/jobs/{json.loads(answer)['id']}"
        _, view = stack.ask("GET", f"{path}?wait=60")
        job = json.loads(view)
        if job["status"] != "completed" or not job["result"]["choices"][0]["message"]["content"]:
            raise StackError(f"the job is {job['status']}: {job['result']}")
        self._paths.append(path)
        return f"{time.monotonic() - began:.1f} s"

    def batch(self, stack: Stack) -> str:
        source, target = stack.docker / "lines.jsonl", stack.docker / "answers.jsonl"
        source.write_text("".join(f'{{"prompt": "Name {number} rivers."}}\n' for number in range(8)))
        stack.penstock("batch", "run", str(source), "-o", str(target), "--max-tokens", "8")
        _, found = stack.ask("GET", "/v1/batches")
        batch = json.loads(found)["data"][0]
        self._paths += [f"/v1/batches/{batch['id']}"]
        self._paths += [f"/v1/files/{batch[name]}/content" for name in ("input_file_id", "output_file_id")]
        if batch["request_counts"] != {"total": 8, "completed": 8, "failed": 0}:
            raise StackError(f"lines: {batch['request_counts']}")
        answers = [json.loads(line)["response"]["body"] for line in target.read_text().splitlines()]
        if len(answers) != 8 or not all(each["choices"][0]["message"]["content"] for each in answers):
            raise StackError(f"{len(answers)} lines, or one without a text")
        return f"{len(answers)} lines"

    def restart(self, stack: Stack) -> str:
        """Every container is removed and made again. From then on the engine is the simulated one."""
        _, key = stack.ask("POST", "/admin/keys", {"tenant": "third"})
        self._paths.append(f"/admin/keys/{json.loads(key)['id']}")
        if len(self._paths) != KEPT:
            raise StackError(f"there are {len(self._paths)} of {KEPT} things to keep")
        before = [stack.ask("GET", path) for path in self._paths]
        stack.down()
        stack.up()
        for path, (_, body) in zip(self._paths, before, strict=True):
            if stack.ask("GET", path)[1] != body:
                raise StackError(f"{path} is another after the restart")
        stack.simulate()
        return f"{len(before)} of {len(self._paths)} things"


# --- monitoring -------------------------------------------------------------------------------------------------------


def scraped(stack: Stack) -> str:
    address = stack.address("prometheus", "monitoring")
    wanted = {f"penstock-{role}" for role in ROLES}

    def up() -> str:
        _, _, answer = fetch(9090, "GET", "/api/v1/query?query=up", host=address)
        found = json.loads(answer)["data"]["result"]
        good = {each["metric"]["job"] for each in found if each["value"][1] == "1"}
        return f"{len(good)} roles" if good == wanted else ""

    return eventually(up, "Prometheus does not see all of them up")


TRACED = {"api", "worker", "offline"}
"""The scheduler has no requests, and so no spans."""


def traced(stack: Stack) -> str:
    """By what the stand-in for the collector prints."""

    def arrived() -> str:
        exports = Counter(re.findall(r"spans of penstock-(\w+)", stack.log("collector")))
        return ", ".join(f"{exports[role]} x {role}" for role in exports) if {*exports} >= TRACED else ""

    return eventually(arrived, f"not all of {sorted(TRACED)} have spans in the collector's log")


# --- disturbed --------------------------------------------------------------------------------------------------------


class Disturbance:
    """Open streams, half of them jobs' events, while one container is killed or stopped; then every text is checked."""

    def __init__(self, folder: Path, service: str) -> None:
        self._folder, self._service = folder, service

    def kill(self, stack: Stack) -> str:
        """SIGKILL. The container is started again, as its restart policy would."""
        name = stack.containers()[self._service]

        def inject() -> None:
            stack.engine("kill", name)
            time.sleep(1)
            stack.engine("start", name)
            await_service(stack, self._service, name)

        return self._under_streams(stack, f"kill {self._service}", inject, TOKENS)

    def stop(self, stack: Stack) -> str:
        """As compose does: it must end by itself within its grace period, else its exit code is that of a kill."""
        name, began = stack.containers()[self._service], time.monotonic()

        def inject() -> None:
            stack.engine("compose", "stop", self._service)
            if code := stack.inspected(name)[0]["State"]["ExitCode"]:
                raise StackError(f"exit code {code} after {time.monotonic() - began:.0f} s")
            stack.engine("start", name)
            await_service(stack, self._service, name)

        return self._under_streams(stack, f"stop {self._service}", inject, DRAIN_TOKENS)

    def _under_streams(self, stack: Stack, what: str, inject: Callable[[], None], tokens: int) -> str:
        history = ClientHistory(self._folder / f"{what}.jsonl")
        try:
            took, unfinished = asyncio.run(self._play(stack, history, what, inject, tokens))
        finally:
            history.close()
        return judged(history.events, self._service, took, unfinished)

    async def _play(
        self, stack: Stack, history: ClientHistory, what: str, inject: Callable[[], None], tokens: int
    ) -> tuple[float, int]:
        """How long the fault took, and how many streams it met to its end."""
        clients = Clients(history, [stack.port])
        asks = [Ask(f"{what} {n}", tokens, chat=n % 2 == 0, key=f"{what} {n}", model=MODEL) for n in range(STREAMS)]
        views = [clients.tell(ask) for ask in asks]
        running = [asyncio.create_task(clients.run(view)) for view in views]
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            await asyncio.gather(*(view.begun.wait() for view in views))
        history.add("fault", trial=1, what=what)
        began = time.monotonic()
        await asyncio.to_thread(inject)
        took, unfinished = time.monotonic() - began, sum(not view.state for view in views)
        await asyncio.gather(*running)
        await asyncio.gather(*(clients.read_finally(view.job) for view in views if view.job))
        return took, unfinished


def await_service(stack: Stack, service: str, name: str) -> None:
    """Until its probe says that it serves; a container without one must run. Raises TimeoutError."""

    def serves() -> str:
        with suppress(StackError):
            if probe := PROBES.get(service):
                return stack.engine("exec", name, *probe) or "it does"
            return "it does" if stack.inspected(name)[0]["State"]["Running"] else ""
        return ""

    eventually(serves, f"{service} does not come back")


def judged(events: Sequence[Event], service: str, took: float, unfinished: int) -> str:
    """The figure of a disturbance: every stream was open before it and whole after it, and some outlasted it."""
    stalls = [stall / 1000 for stall in stalls_ms(events)]
    whole = sum(event["state"] == "completed" for event in of_kind(events, "end"))
    figure = f"back {took:.0f} s, open {unfinished}, stall {max(stalls, default=0.0):.1f} s"
    if wrong := check(events, budget=BUDGETS.get(service, NOTHING)):
        raise StackError(f"{len(wrong)} violations: {wrong[0]}")
    if not unfinished or len(stalls) != STREAMS or whole != STREAMS:
        raise StackError(f"{figure}; {len(stalls)} streams across it and {whole} whole, of {STREAMS}")
    if max(stalls) > (allowed := MAX_STALL_S.get(service, 1.0)):
        raise StackError(f"{figure}, allowed: {allowed:g} s")
    return figure


# --- containers and images --------------------------------------------------------------------------------------------


def hidden(stack: Stack) -> str:
    """The passwords that containers are given: each role's, and Grafana's."""
    secrets, names = set(), stack.containers()
    for role in ROLES:
        (found,) = re.findall(r"rediss?://\w+:([^@]+)@", (stack.compose / "secrets" / f"{role}.toml").read_text())
        secrets.add(found)
    if "grafana" in names:
        secrets.add((stack.compose / "secrets" / "grafana.password").read_text().strip())
    containers = stack.inspected(*names.values())
    told = json.dumps(containers)
    if shown := [secret for secret in secrets if secret in told]:
        raise StackError(f"{len(shown)} of {len(secrets)} are shown")
    return f"{len(secrets)} in {len(containers)} containers"


def unwritten(stack: Stack) -> str:
    """What an engine makes so that it can mount something is not written by the container."""
    names = stack.containers().values()
    for found in stack.inspected(*names):
        mounts = [each["Destination"] for each in found["Mounts"]]
        for line in stack.engine("diff", found["Name"].lstrip("/")).splitlines():
            path = line.split()[1]
            if not any(mount == path or mount.startswith(f"{path}/") for mount in mounts):
                raise StackError(f"{found['Name']}: {line}")
    return f"{len(names)} containers"


def sized(image: str, stack: Stack) -> str:
    """Beyond the image that it is built on."""
    base = dict(line.split("=") for line in (stack.compose / ".env").read_text().split())["PYTHON_IMAGE"]
    found, below = stack.inspected(stack.image(image), base)
    size, most = (found["Size"] - below["Size"]) // 1_000_000, MAX_MEGABYTES[image]
    if size > most:
        raise StackError(f"{size} MB, at most {most}")
    return f"{size} MB of {most}"


def tensorrt_llm(stack: Stack) -> str:
    """Beside the worker that is there, with the simulated engine and a collector to send spans to."""
    if not (image := stack.image("penstock-worker-tensorrt-llm")):
        raise NotTried("not built")
    (worker,) = stack.inspected(stack.containers()["worker"])
    binds = [each for each in worker["Mounts"] if each["Type"] == "bind"]
    volumes = [f"--volume={each['Source']}:{each['Destination']}:ro" for each in binds]
    name, began = f"{PROJECT}-tensorrt-llm", time.monotonic()
    stack.engine(
        "run", "--detach", f"--name={name}", f"--network={PROJECT}_back", "--read-only", "--tmpfs=/tmp", *volumes,
        "--cap-drop=ALL", "--security-opt=no-new-privileges", "--pids-limit=512",
        "--env=PENSTOCK_TELEMETRY_OTLP_ENDPOINT=http://collector:4318", image, "--model", MODEL,
    )  # fmt: skip

    def probed() -> str:
        with suppress(StackError):
            stack.engine("exec", name, "penstock", "probe", "worker")
            return f"{time.monotonic() - began:.0f} s"
        return ""

    try:
        return eventually(probed, "it did not become ready")
    finally:
        stack.engine("rm", "--force", name)
