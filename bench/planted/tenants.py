"""Planted bugs of the walls between tenants: caches, control tokens, terminals, redaction, quotas."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

ENGINES = "tests/workers/test_tenants.py::test_"
TRTLLM = "tests/workers/engines/trtllm/test_engine.py::test_"
CACHE = "tests/system/test_tenant_cache.py::test_"
QUOTAS = "tests/system/test_tenant_quotas.py::test_"
FILES = "tests/system/test_tenant_files.py::test_"
TIDY = "tests/offline/batch/test_tidy.py::test_"
SECRETS = "tests/telemetry/test_redaction.py::test_"
CANARIES = "tests/system/test_canaries.py::test_"
KNOWN = "            return known\n        self._away.pop"
TERMINAL = "tests/cli/test_output.py::test_"

CACHES = (
    bug(
        "a slot's cache for every tenant",
        "A right guess of another tenant's prompt is answered at once, and `cached_tokens` says so.",
        Edit(
            "workers/engines/llamacpp/slots.py",
            "reusable = self.owner == generation.tenant",
            "reusable = bool(self.owner)",
        ),
        ENGINES + "a_right_guess_of_another_tenants_prompt_is_not_seen",
    ),
    bug(
        "a slot is owned too early",
        "A request that is refused before its prompt is computed makes the last tenant's cache its own.",
        Edit(
            "workers/engines/llamacpp/slots.py",
            "        if not reusable:\n            self.disown()\n",
            "        if not reusable:\n            self.own(generation)\n",
        ),
        ENGINES + "a_request_that_never_ran_leaves_no_cache_to_its_tenant",
    ),
    bug(
        "a slot goes back to its last owner",
        "A request that owns nothing leaves the slot's cache, which may be another's by now, to the owner before it.",
        Edit("workers/engines/llamacpp/slots.py", "        if not reusable:\n            self.disown()\n", ""),
        ENGINES + "a_request_that_owns_nothing_leaves_nothing_to_the_owner_before_it",
    ),
    bug(
        "long prompts are everybody's",
        "A right guess of another tenant's long document is answered at once.",
        Edit("workers/engines/sim/cache.py", "if owner == tenant]", "if owner == tenant or len(prompt) > 4096]"),
        ENGINES + "what_the_simulated_engine_caches_is_its_owners_at_any_length",
    ),
    bug(
        "one salt for all",
        "TensorRT-LLM reuses the blocks of one tenant for another.",
        Edit("workers/engines/trtllm/engine.py", "request.tenant.encode()", 'b"tenant"'),
        TRTLLM + "cached_prompts_of_tenants_are_told_apart",
    ),
    bug(
        "reuse without salts",
        "A version of TensorRT-LLM that cannot tell tenants apart goes on reusing what it has cached.",
        Edit(
            "workers/engines/trtllm/engine.py",
            "fields(self._settings, context, salted=salted)",
            "fields(self._settings, context)",
        ),
        TRTLLM + "a_version_that_cannot_tell_tenants_apart_reuses_nothing",
    ),
    bug(
        "a worker that forgets whose request it is",
        "Every engine takes all requests for one tenant's.",
        Edit("workers/attempt.py", "            self.job.tenant,\n", '            "",\n'),
        CACHE + "a_right_guess_is_not_told",
    ),
)

CONTROL = (
    bug(
        "control tokens of messages are roles",
        "A user message opens a turn of the system.",
        Edit(
            "workers/engines/llamacpp/prompt.py", "marked, mark = self._control.mark(turns)", 'marked, mark = turns, ""'
        ),
        ENGINES + "a_message_cannot_open_a_turn",
    ),
    bug(
        "control tokens of lost output are roles",
        "Text that a lost worker's model wrote letter by letter opens a turn where it is resumed.",
        Edit(
            "workers/engines/llamacpp/prompt.py",
            'parts.extend(self._control.cut("".join(text for text, _, _ in rows)))',
            'parts.append("".join(text for text, _, _ in rows))',
        ),
        ENGINES + "what_a_lost_worker_generated_stays_text",
    ),
    bug(
        "a mark that can be guessed",
        "A message holds all of the few marks there are, and its control tokens are read where it likes.",
        Edit("workers/engines/control_tokens.py", "secrets.token_hex(8)", "secrets.token_hex(1)"),
        ENGINES + "a_mark_cannot_be_guessed",
    ),
    bug(
        "the other tokenizer reads them",
        "TensorRT-LLM's tokenizer reads control tokens in messages.",
        Edit(
            "workers/engines/trtllm/text.py",
            "return self._ids(text.split(mark) if mark else [text])",
            'return self._ids([text.replace(mark, "") if mark else text])',
        ),
        TRTLLM + "control_tokens_of_a_message_are_text",
    ),
)

TERMINALS = (
    bug(
        "a chat as it comes",
        "A model moves the cursor and writes to the clipboard of whoever chats with it.",
        Edit("cli/job.py", "self._wrapper.feed(visible(text))", "self._wrapper.feed(text)"),
        Edit("cli/job.py", "            emit(text)\n", "            sys.stdout.write(text)\n"),
        TERMINAL + "a_model_cannot_drive_the_terminal",
    ),
    bug(
        "eight-bit controls",
        "Terminals that obey C1 codes obey those of a model.",
        Edit("cli/output.py", r"\x7f-\x9f", r"\x7f"),
        TERMINAL + "what_a_terminal_would_obey_is_shown",
    ),
    bug(
        "a batch as it comes",
        "The answers of a batch, printed to a terminal, move its cursor and write to its clipboard.",
        Edit("cli/batch.py", "    if not sys.stdout.isatty():\n", "    if sys.stdout:\n"),
        TERMINAL + "the_answers_of_a_batch_cannot_drive_the_terminal",
    ),
    bug(
        "words that nobody sees",
        "Tag characters carry an instruction through a terminal into whatever is pasted to.",
        Edit("cli/output.py", r"\U000e0000-\U000e007f", ""),
        TERMINAL + "no_character_that_is_not_seen_gets_through",
    ),
)

REDACTION = (
    bug(
        "spans are not redacted",
        "The text of an error, with the password of a URL in it, goes to the collector.",
        Edit(
            "telemetry/recorded_spans.py",
            "else redact(str(error)))",
            "else str(error))",
        ),
        SECRETS + "spans_are_redacted",
    ),
    bug(
        "one word after a scheme",
        "Of `Authorization: Some S` the scheme is hidden and the secret stays.",
        Edit("telemetry/redaction.py", "if kind is Kind.LINE:", "if kind is Kind.LINE and tie[1] is None:"),
        SECRETS + "secrets_behind_these_names_are_hidden",
    ),
    bug(
        "names in one case",
        "encryptionKey and sessionToken, as many programs write them, are logged.",
        Edit("telemetry/secret_names.py", 'r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+"', 'r"[A-Za-z]+"'),
        SECRETS + "secrets_behind_these_names_are_hidden",
    ),
    bug(
        "every token is a secret",
        "No log says any more how many tokens there were.",
        Edit("telemetry/secret_names.py", "if words[-2] in _ORDINARY[last] else", "if not words[-2] else"),
        SECRETS + "words_behind_ordinary_names_stay",
    ),
    bug(
        "a value read to its end to judge it",
        "A line of `sig=sig=sig=` holds up its process.",
        Edit(
            "telemetry/redaction.py", "_VALUE.match(text, begin, begin + MAX_NAME_CHARS)", "_VALUE.match(text, begin)"
        ),
        SECRETS + "no_text_is_slow_to_redact",
    ),
    bug(
        "a quadratic pattern",
        "A line of a client's making holds up its process for minutes.",
        Edit("telemetry/redaction.py", r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.", r"eyJ[A-Za-z0-9_-]{8,}\."),
        SECRETS + "no_text_is_slow_to_redact",
    ),
    bug(
        "passwords in the port's place",
        "A password with a slash in it stands in the error that refuses its URL.",
        Edit("streaming/address.py", '        if scheme != "unix":\n            _check_port(url)\n', ""),
        CANARIES + "no_secret_comes_out_again",
    ),
    bug(
        "a prompt in the log",
        "What a client asked stands in the log of the worker that failed at it.",
        Edit(
            "workers/attempt.py",
            "            self.stop(JobState.FAILED, piece.failure)\n",
            "            self.stop(JobState.FAILED, piece.failure)\n"
            '            __import__("logging").getLogger("workers").error("failed: %s", self.job.prompt)\n',
        ),
        CANARIES + "no_secret_comes_out_again",
    ),
    bug(
        "an answer in the log",
        "What a model answered stands in the log of the worker that computed it.",
        Edit(
            "workers/attempt.py",
            "        state, failure = self._stopped or (JobState.COMPLETED, None)\n        return",
            "        state, failure = self._stopped or (JobState.COMPLETED, None)\n"
            '        text = "".join(delta.text for delta in unpacked(self.seq, self._record))\n'
            '        __import__("logging").getLogger("workers").info("job ended: %s", text)\n        return',
        ),
        CANARIES + "no_secret_comes_out_again",
    ),
)

STORAGE = (
    bug(
        "the loss of one partition refuses everywhere",
        "While one of many primaries is away, no tenant with a quota gets a job into any partition.",
        Edit("streaming/jobs/quotas.py", KNOWN, KNOWN.replace("return known", "raise")),
        QUOTAS + "the_loss_of_one_partition_refuses_nobody_elsewhere",
    ),
    bug(
        "what was known of a lost partition is forgotten",
        "While one of many primaries is away, a tenant's limit does not count what it keeps there.",
        Edit("streaming/jobs/quotas.py", KNOWN, KNOWN.replace("known", "Usage()")),
        QUOTAS + "the_loss_of_one_partition_refuses_nobody_elsewhere",
    ),
    bug(
        "puts that do not see each other",
        "Requests that come at once each find the room of a quota that is there for one.",
        lua("put", "  if usage then usage.jobs, usage.requests = usage.jobs + 1, usage.requests + size end\n", ""),
        QUOTAS + "many_puts_at_once_share_what_is_left",
    ),
    bug(
        "results that are not counted",
        "A tenant fills the store with results.",
        lua("finish", "#record + #summary)", "0)"),
        QUOTAS + "bytes_are_those_that_are_stored",
    ),
    bug(
        "spans without an end",
        "Bytes of jobs that are gone are counted for ever.",
        lua("amounts", "    if ends and tonumber(ends) > now / 1000 then\n", "    if ends then\n"),
        QUOTAS + "bytes_are_counted_until_the_record_is_gone_and_no_longer",
    ),
    bug(
        "a deleted file still counts",
        "Who deletes files has no more room than before.",
        lua("file_costs", "  set_file_cost(sizes_key(tenant), id, nil)\n", ""),
        lua("file_costs", "~= (files > 0 and files + 1 or 0) then", "< 0 then"),
        QUOTAS + "files_are_bounded_by_their_bytes",
    ),
    bug(
        "what others hold is old",
        "With several partitions a tenant brings for a minute what it likes.",
        Edit("streaming/jobs/quotas.py", "OTHERS_MAX_AGE_S = 1.0", "OTHERS_MAX_AGE_S = 60.0"),
        QUOTAS + "what_other_partitions_hold_is_as_it_was_a_second_ago",
    ),
    bug(
        "messages of a broker are not counted",
        "Through the broker a tenant keeps as many jobs as it likes.",
        Edit("offline/broker/intake.py", ", quota=self._quota\n            )", "\n            )"),
        "tests/offline/broker/test_events.py::test_what_a_tenant_may_keep_bounds_its_messages_too",
    ),
    bug(
        "the input of a batch is free",
        "Who uploads, begins a batch, deletes the file and begins anew fills the disk.",
        lua("file_costs", "  if is_file_in_use(id) then\n", "  if false then\n"),
        FILES + "a_deleted_input_is_counted_until_its_batch_has_ended",
    ),
    bug(
        "the input of a batch is counted for ever",
        "Who deletes inputs while their batches run has less room with each.",
        lua("save", "    release_file_cost(s[6], s[4])\n", ""),
        FILES + "an_input_is_counted_once_and_for_as_long_as_any_batch_has_it",
    ),
    bug(
        "a lost answer removes the bytes alone",
        "An upload that was refused with 503 is a file without bytes, and counted.",
        Edit(
            "api/files.py",
            "services.spawn(withdraw(partial(_drop, services, file)))",
            "await asyncio.to_thread(services.file_store.remove, file.id)",
        ),
        FILES + "an_upload_whose_answer_was_lost_leaves_nothing",
    ),
    bug(
        "an upload is weighed when it is there",
        "A body that the quota does not hold lies on the disk in full before it is refused.",
        Edit(
            "api/files.py",
            "services.files_settings.size_limit, used, quota",
            "services.files_settings.size_limit, used, None",
        ),
        FILES + "a_body_that_cannot_fit_is_refused_before_it_is_sent",
    ),
    bug(
        "uploads that do not see each other",
        "Each of many that come at once may bring as much as the quota leaves for one.",
        Edit("api/uploads.py", "self._used + self._receiving[self._tenant] - self._taken", "self._used"),
        FILES + "uploads_that_come_at_once_share_what_is_left",
    ),
    bug(
        "a file without a record is charged for ever",
        "Nobody can delete it, and a hundred of them keep all other files from being forgotten.",
        Edit("streaming/batches/files.py", 'if name.startswith("file-")]', "if name in await self.known([name])]"),
        TIDY + "files_whose_records_are_lost_end_with_their_time",
    ),
    bug(
        "small files cost nothing",
        "A tenant keeps millions of files of a few bytes, each with a record in the store.",
        lua("file_costs", "local MIN_FILE_COST = 4096", "local MIN_FILE_COST = 0"),
        FILES + "small_files_are_bounded_too",
    ),
    bug(
        "the sum of all files is made anew",
        "The store stands still for every upload of a tenant with many files.",
        lua(
            "file_costs",
            "  return math.max(0, (redis.call('HGET', sizes, 'total')",
            "  redis.call('HVALS', sizes)\n  return math.max(0, (redis.call('HGET', sizes, 'total')",
        ),
        FILES + "a_file_costs_the_same_beside_many",
    ),
    bug(
        "other partitions are not asked",
        "With several partitions a tenant keeps as many times what it may.",
        Edit("streaming/jobs/quotas.py", "max(0, limit - held)", "limit"),
        QUOTAS + "partitions_share_a_limit",
    ),
)

BUGS = (*CACHES, *CONTROL, *TERMINALS, *REDACTION, *STORAGE)
