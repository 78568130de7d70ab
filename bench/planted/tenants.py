"""Planted bugs of the walls between tenants: caches, control tokens, terminals, redaction, quotas."""

from __future__ import annotations

from bench.planted.bug import Bug, Edit

ENGINES = "tests/test_workers_tenants.py::test_"
TRTLLM = "tests/test_workers_trtllm.py::test_"
CACHE = "tests/test_tenant_cache.py::test_"
QUOTAS = "tests/test_tenant_quotas.py::test_"
SECRETS = "tests/test_telemetry_redaction.py::test_"
CANARIES = "tests/test_canaries.py::test_"
TERMINAL = "tests/test_cli_output.py::test_"


def _lua(script: str, old: str, new: str) -> Edit:
    return Edit(f"streaming/lua/{script}.lua", old, new)


CACHES = (
    Bug(
        "a slot's cache for every tenant",
        "A right guess of another tenant's prompt is answered at once, and `cached_tokens` says so.",
        (
            Edit(
                "workers/llamacpp_slots.py", "reusable = self.owner == generation.tenant", "reusable = bool(self.owner)"
            ),
        ),
        (ENGINES + "a_right_guess_of_another_tenants_prompt_is_not_seen",),
    ),
    Bug(
        "a slot is owned too early",
        "A request that is refused before its prompt is computed makes the last tenant's cache its own.",
        (
            Edit(
                "workers/llamacpp_slots.py",
                "        if not reusable:\n            self.disown()\n",
                "        if not reusable:\n            self.own(generation)\n",
            ),
        ),
        (ENGINES + "a_request_that_never_ran_leaves_no_cache_to_its_tenant",),
    ),
    Bug(
        "one salt for all",
        "TensorRT-LLM reuses the blocks of one tenant for another.",
        (Edit("workers/trtllm.py", "request.tenant.encode()", 'b"tenant"'),),
        (TRTLLM + "cached_prompts_of_tenants_are_told_apart",),
    ),
    Bug(
        "reuse without salts",
        "A version of TensorRT-LLM that cannot tell tenants apart goes on reusing what it has cached.",
        (
            Edit(
                "workers/trtllm.py", "fields(self._settings, context, salted=salted)", "fields(self._settings, context)"
            ),
        ),
        (TRTLLM + "a_version_that_cannot_tell_tenants_apart_reuses_nothing",),
    ),
    Bug(
        "a worker that forgets whose request it is",
        "Every engine takes all requests for one tenant's.",
        (Edit("workers/attempt.py", "sampling, past, self.job.tenant)", "sampling, past)"),),
        (CACHE + "a_right_guess_is_not_told",),
    ),
)

CONTROL = (
    Bug(
        "control tokens of messages are roles",
        "A user message opens a turn of the system.",
        (Edit("workers/llamacpp_prompt.py", "marked, mark = self._control.mark(turns)", 'marked, mark = turns, ""'),),
        (ENGINES + "a_message_cannot_open_a_turn",),
    ),
    Bug(
        "control tokens of lost output are roles",
        "Text that a lost worker's model wrote letter by letter opens a turn where it is resumed.",
        (
            Edit(
                "workers/llamacpp_prompt.py",
                'parts.extend(self._control.cut("".join(text for text, _, _ in rows)))',
                'parts.append("".join(text for text, _, _ in rows))',
            ),
        ),
        (ENGINES + "what_a_lost_worker_generated_stays_text",),
    ),
    Bug(
        "the other tokenizer reads them",
        "TensorRT-LLM's tokenizer reads control tokens in messages.",
        (Edit("workers/trtllm_text.py", "return self._ids(text.split(mark) if mark else [text])",
              'return self._ids([text.replace(mark, "") if mark else text])'),),
        (TRTLLM + "control_tokens_of_a_message_are_text",),
    ),
)  # fmt: skip

TERMINALS = (
    Bug(
        "a chat as it comes",
        "A model moves the cursor and writes to the clipboard of whoever chats with it.",
        (Edit("cli/chat.py", "emit(text)", "sys.stdout.write(text)"),),
        (TERMINAL + "a_model_cannot_drive_the_terminal",),
    ),
    Bug(
        "eight-bit controls",
        "Terminals that obey C1 codes obey those of a model.",
        (Edit("cli/visible.py", r"\x7f-\x9f", r"\x7f"),),
        (TERMINAL + "what_a_terminal_would_obey_is_shown",),
    ),
)

REDACTION = (
    Bug(
        "spans are not redacted",
        "The text of an error, with the password of a URL in it, goes to the collector.",
        (
            Edit(
                "telemetry/tracing.py",
                "Status(StatusCode.ERROR, redact(str(error)))",
                "Status(StatusCode.ERROR, str(error))",
            ),
        ),
        (SECRETS + "spans_are_redacted",),
    ),
    Bug(
        "a quadratic pattern",
        "A line of a client's making holds up its process for minutes.",
        (Edit("telemetry/redaction.py", r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.", r"eyJ[A-Za-z0-9_-]{8,}\."),),
        (SECRETS + "no_text_is_slow_to_redact",),
    ),
    Bug(
        "passwords in the port's place",
        "A password with a slash in it stands in the error that refuses its URL.",
        (Edit("streaming/address.py", '        if scheme != "unix":\n            _check_port(url)\n', ""),),
        (CANARIES + "no_secret_comes_out_again",),
    ),
    Bug(
        "a prompt in the log",
        "What a client asked stands in the log of the worker that failed at it.",
        (
            Edit(
                "workers/attempt.py",
                "            self.stop(State.FAILED, piece.failure)\n",
                "            self.stop(State.FAILED, piece.failure)\n"
                '            __import__("logging").getLogger("workers").error("failed: %s", self.job.prompt)\n',
            ),
        ),
        (CANARIES + "no_secret_comes_out_again",),
    ),
)

STORAGE = (
    Bug(
        "puts that do not see each other",
        "Requests that come at once each find the room of a quota that is there for one.",
        (_lua("put", "  if kept then kept.jobs, kept.requests = kept.jobs + 1, kept.requests + size end\n", ""),),
        (QUOTAS + "many_puts_at_once_share_what_is_left",),
    ),
    Bug(
        "results that are not counted",
        "A tenant fills the store with results.",
        (_lua("finish", "#record + #summary)", "0)"),),
        (QUOTAS + "bytes_are_those_that_are_stored",),
    ),
    Bug(
        "spans without an end",
        "Bytes of jobs that are gone are counted for ever.",
        (_lua("prelude", "    if ends and tonumber(ends) > now / 1000 then\n", "    if ends then\n"),),
        (QUOTAS + "bytes_are_counted_until_the_record_is_gone_and_no_longer",),
    ),
    Bug(
        "a deleted file still counts",
        "Who deletes files has no more room than before.",
        (_lua("forget", "redis.call('HDEL', sizes_key(tenant), id)", "redis.call('HGET', sizes_key(tenant), id)"),
         _lua("prelude", "~= redis.call('ZCARD', files_key(tenant))", "< 0")),
        (QUOTAS + "files_are_bounded_by_their_bytes",),
    ),
    Bug(
        "other partitions are not asked",
        "With several partitions a tenant keeps as many times what it may.",
        (Edit("streaming/quotas.py", "max(0, limit - held)", "limit"),),
        (QUOTAS + "partitions_share_a_limit",),
    ),
)  # fmt: skip

BUGS = (*CACHES, *CONTROL, *TERMINALS, *REDACTION, *STORAGE)
