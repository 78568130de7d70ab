"""Content rules on requests: a request is refused or redacted before its job is queued, whichever way it came.

Prompt, earlier calls, tools and fields that are passed on are looked at; a match does not span two of their texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from api.openai.errors import ApiError, content_filter, invalid_request
from penstock.content import MAX_LOOKS, Cleaner, ContentSettings, TenantRules, TooMuch, note, rules_of
from streaming.jobs.job import TASKS, Chat, Inputs, Job, Tokens, own_name
from telemetry.metrics import Metrics

T = TypeVar("T")

MAX_INLINE_BYTES, MAX_INLINE_LOOKS = 8192, 50
"""Of a request that is looked at on the event loop, in less than 1 ms, or 7 ms if it was written to take long. Others
are looked at in a thread."""


def input_rules(
    rules: Mapping[str, ContentSettings], tenants: Mapping[str, Sequence[str] | None], metrics: Metrics
) -> InputRules | None:
    """The rules of one process, as `rules_of` compiles them; None without any. Raises ConfigError."""
    plain = {name: replace(rule, action="tag") for name, rule in rules.items()}  # each shows all that it finds
    known = rules_of(plain, tenants, ["input", "output"])
    return None if known is None else InputRules(known, rules_of(rules, tenants, ["input"]), metrics)


class InputRules:
    """The content rules of tenants, as they apply to requests."""

    def __init__(self, known: TenantRules, rules: TenantRules | None, metrics: Metrics) -> None:
        """`known`: all rules, none of which changes a text; `rules`: those that look at requests."""
        self._known, self._rules, self._metrics = known, rules, metrics
        self._thread = ThreadPoolExecutor(1, "content")
        """Of its own: requests that take long hold up no other work in threads."""

    async def admitted(self, job: Job, size: int) -> Job:
        """As `checked`. `size`: bytes of the request; a large one does not hold up others."""
        turns = job.prompt.turns if isinstance(job.prompt, Chat) else ()  # with earlier turns, and texts of files
        size = max(size, sum([len(turn.content) for turn in turns])) if self._rules and self._rules(job.tenant) else 0
        return await self._run(partial(self.checked, job), size)

    async def _run(self, work: Callable[[int], T], size: int) -> T:
        """Do some work, which takes how many places there may be."""
        if size <= MAX_INLINE_BYTES:
            with suppress(TooMuch):
                return work(MAX_INLINE_LOOKS)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, MAX_LOOKS)

    def checked(self, job: Job, looks: int = MAX_LOOKS) -> Job:
        """Return the job as it may be queued. Raises ApiError (400), and TooMuch beyond fewer `looks` than most."""
        patterns = None if self._rules is None else self._rules(job.tenant)
        if patterns is None or (job.task is not None and not job.task.computes):
            return job
        field, cleaner = _field(job), Cleaner(patterns, looks)
        if _has_ids(job) and any(action != "tag" for action in patterns.actions.values()):
            what = "has token ids, which the content rules of this server cannot check. Send text"
            raise invalid_request(f"{field} {what}.", field)
        try:
            clean: Job = cleaner.value(job)
        except TooMuch:
            raise too_much(field, looks) from None
        note(cleaner.hits, self._metrics.content_matches, job.id, set())
        if (blocked := next((hit for hit in cleaner.hits if hit.action == "block"), None)) is not None:
            raise content_filter(blocked.rule, field)
        return clean if cleaner.hits else job

    async def moderated(self, tenant: str, texts: Sequence[str], size: int) -> list[dict[str, bool]]:
        """By text: the names of all rules of a tenant, and whether each finds something. `size`: as in `admitted`.
        Raises ApiError (400)."""
        return await self._run(partial(self._found, tenant, texts), size if self._known(tenant) else 0)

    def _found(self, tenant: str, texts: Sequence[str], looks: int) -> list[dict[str, bool]]:
        if (patterns := self._known(tenant)) is None:
            return [{} for _ in texts]
        cleaner, found = Cleaner(patterns, looks), list[set[str]]()
        try:
            for text in texts:
                cleaner.text(text)
                found.append({hit.rule for hit in cleaner.hits})
                cleaner.hits.clear()
        except TooMuch:
            raise too_much("input", looks) from None
        return [{name: name in rules for name in patterns.actions} for rules in found]


def too_much(field: str, looks: int) -> ApiError | TooMuch:
    """What is raised of a request with more places. One that may have more of them is looked at once more."""
    if looks < MAX_LOOKS:
        return TooMuch()
    what = "has more numbers, keys or phrases than the content rules of this server can look at in one request"
    return invalid_request(f"{field} {what}. Send it in several.", field)


def _has_ids(job: Job) -> bool:
    prompt = job.prompt
    if isinstance(prompt, Inputs):
        return any(not isinstance(each, str) for group in prompt.groups for each in group)
    return isinstance(prompt, Tokens)


def _field(job: Job) -> str:
    """The field of the request that holds its prompt."""
    if job.task is not None:
        return TASKS[job.task.kind].field
    return own_name(job, "messages" if isinstance(job.prompt, Chat) else "prompt")
