"""Planted bugs of the lines of batches, and of what is kept, tidied and owned in the store."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

BATCHES = "tests/streaming/batches/test_store.py::test_"
LEDGER = "tests/streaming/batches/test_ledger.py::test_"
TIDY = "tests/offline/batch/test_tidy.py::test_"
IDENTITY = "tests/streaming/store/test_identity.py::test_"
INPUT_VALIDATION = "tests/offline/batch/test_input_validation.py::test_"
MALFORMED = "tests/streaming/test_malformed.py::test_"

LINES = (
    bug(
        "a batch without its fence",
        "A process that was overtaken goes on saying how far the batch is, and ends it.",
        lua("save", "s[1] ~= epoch or ", ""),
        BATCHES + "one_works_on_it_at_a_time",
    ),
    bug(
        "two that work on one batch",
        "Every message that says that there is work begins a turn, whoever has the batch.",
        lua("hold", "if s[8] and tonumber(s[8]) > now then return 'held' end\n", ""),
        lua("due", "now + repeat_ms", "now"),
        BATCHES + "one_works_on_it_at_a_time",
        BATCHES + "a_new_batch_is_due_once",
    ),
    bug(
        "a batch that is told of once",
        "A message that Celery loses is never sent again: the batch stands still for ever.",
        lua("due", "redis.call('ZADD', due_key(), now + repeat_ms, id)", "redis.call('ZREM', due_key(), id)"),
        lua("hold", " or not redis.call('ZSCORE', due_key(), id)", ""),
        BATCHES + "a_new_batch_is_due_once",
    ),
    bug(
        "a cancel that progress undoes",
        "A word about how far a batch is takes its owner's cancel back.",
        lua("save", "if s[2] == 'cancelling' and not FINAL[status] then status = 'cancelling' end\n", ""),
        BATCHES + "what_the_owner_wants_is_heard",
    ),
    bug(
        "a batch that sleeps through its owner's wish",
        "Resumed or cancelled just as it is laid aside, a paused batch is not looked at before its window ends.",
        lua("save", "  if resume_ms ~= '' and s[3] == '' then resume_ms = 0 end\n", ""),
        BATCHES + "a_wish_that_comes_as_a_paused_turn_ends_is_not_slept_through",
    ),
    bug(
        "a half-written row counts",
        "A process killed while it wrote leaves a line with an answer of something else.",
        Edit(
            "streaming/batches/ledger.py",
            'if zlib.crc32(data[at:end]).to_bytes(CHECK_BYTES, "little") != check:',
            "if not check:",
        ),
        LEDGER + "a_spoilt_row_and_what_follows_do_not_count",
    ),
    bug(
        "the last answer is right",
        "A process that was overtaken changes answers that were given.",
        Edit("streaming/batches/ledger.py", "if self.ends[row.line] is None:", "if row.outcome.ends:"),
        LEDGER + "the_first_turn_that_ended_a_line_is_right",
    ),
    bug(
        "equal prompts are equal requests",
        "A line gets the answer of one that asked for something else, or for another sample.",
        Edit("api/openai/batch_lines.py", "(request.model, job_prompt, sampling, ", "(request.model, job_prompt, "),
        INPUT_VALIDATION + "equal_lines_are_computed_once_if_their_answer_is_sure",
    ),
    bug(
        "the file of the first try",
        "A batch whose create is tried again with another file computes the first one.",
        Edit(
            "streaming/batches/file_store.py",
            'return self.work(batch_id) / f"input.{_safe(file_id)}"',
            'return self.work(batch_id) / "input"',
        ),
        "tests/api/test_batches.py::test_a_create_tried_again_with_another_file_computes_that_one",
    ),
    bug(
        "a line cancelled by the turn before",
        "A line whose job an overtaken turn has cancelled gets that as its answer.",
        Edit(
            "offline/batch/lines.py",
            "        elif record.state is JobState.CANCELLED:\n",
            "        elif record.state is JobState.QUEUED:\n",
        ),
        "tests/api/test_batches.py::test_a_line_whose_job_was_cancelled_is_computed",
    ),
    bug(
        "a refused create that keeps its file",
        "Every refused try to create a batch leaves a link to its input, so a deleted file takes room on the disk.",
        Edit(
            "api/batches.py",
            "    except KeyReused:\n        await _discard_input(services, batch)\n",
            "    except KeyReused:\n",
        ),
        "tests/api/test_batches.py::test_a_refused_create_leaves_no_link_to_its_file",
    ),
    bug(
        "a refused offer that takes the input away",
        "A refused try with the file of the batch that has not begun removes the input of that batch.",
        Edit(
            "streaming/batches/file_store.py",
            'if file_id != used or (self.work(batch_id) / "input").exists():',
            "if file_id:",
        ),
        "tests/api/test_batches.py::test_the_other_offers_go_when_a_batch_takes_its_input",
    ),
    bug(
        "one batch that cannot be read fails the list",
        "Its owner sees none of the others.",
        Edit(
            "streaming/batches/store.py",
            "        return BatchRecord(batch=nothing, state=BatchState.FAILED",
            "        raise\n        return BatchRecord(batch=nothing, state=BatchState.FAILED",
        ),
        MALFORMED + "a_batch_that_cannot_be_read_fails_and_is_shown",
    ),
    bug(
        "one webhook message ends the deliveries",
        "A message whose record cannot be read ends the process that would deliver the others.",
        Edit(
            "streaming/events/webhooks.py",
            "                except (ValueError, TypeError, AttributeError) as error:\n",
            "                except LookupError as error:\n",
        ),
        MALFORMED + "a_webhook_message_that_cannot_be_read_is_given_up",
    ),
    bug(
        "a custom_id twice",
        "Two lines of the output have the same name, and nobody knows which is which.",
        Edit("offline/batch/input_validation.py", "return earlier if earlier != number else 0", "return 0"),
        INPUT_VALIDATION + "a_bad_line_is_named",
    ),
)

STORE = (
    bug(
        "tidy that removes what the store forgot",
        "A store restored to an earlier moment destroys the files that were uploaded since.",
        Edit(
            "offline/batch/batch_runner.py",
            "asyncio.to_thread(self._context.file_store.set_aside, part, name)",
            "asyncio.to_thread(self._context.file_store.remove, name)",
        ),
        TIDY + "what_the_store_forgot_is_quarantined",
    ),
    bug(
        "a plain file that ends the emptying",
        "One file that somebody put into the quarantine, and nothing is ever removed from it again.",
        Edit(
            "streaming/batches/file_store.py",
            "for part in day.iterdir() if part.is_dir() for",
            "for part in day.iterdir() for",
        ),
        TIDY + "what_lies_in_the_quarantine_ends_no_emptying",
    ),
    bug(
        "a day that ends the emptying",
        "What cannot be removed on one day keeps what was set aside on all later ones.",
        Edit(
            "streaming/batches/file_store.py",
            '            except OSError as error:\n                log.warning("what was quar',
            '            except LookupError as error:\n                log.warning("what was quar',
        ),
        TIDY + "what_lies_in_the_quarantine_ends_no_emptying",
    ),
    bug(
        "a look at adoption that writes",
        "`penstock store adopt` without --yes gives an identity to whatever store its settings lead to.",
        Edit(
            "cli/store.py",
            "await enter_store(store_client) if yes else await read_identity(store_client)",
            "await enter_store(store_client)",
        ),
        "tests/cli/test_store.py::test_adopt_without_yes_writes_nothing",
    ),
    bug(
        "tidy for another deployment",
        "Penstock pointed at another or an emptied Redis clears the folder of files.",
        Edit(
            "offline/batch/batch_runner.py",
            "        if not await self._store_matches():\n            return\n        while",
            "        while",
        ),
        TIDY + "an_emptied_store_touches_nothing",
    ),
    bug(
        "a folder that any store takes",
        "Files of a deployment that nobody named are handed to the first store that comes.",
        Edit(
            "streaming/batches/file_store.py",
            "if owner or not deployment or not self.is_empty:",
            "if owner or not deployment:",
        ),
        TIDY + "a_folder_with_files_of_nobody_is_not_taken",
    ),
    bug(
        "an emptied store under its old name",
        "Nobody can tell that the store has forgotten everything.",
        Edit("streaming/store/identity.py", "new_deployment_id())\n    return _parsed", '"dep_0")\n    return _parsed'),
        IDENTITY + "an_emptied_store_has_another_deployment",
    ),
    bug(
        "an identity that each start writes",
        "Processes that start at once disagree on which deployment this is.",
        lua("identify", "if redis.call('EXISTS', store_key()) == 0 then", "do"),
        IDENTITY + "processes_that_start_at_once_agree",
    ),
    bug(
        "partitions that nobody compares",
        "Two processes spread jobs over different numbers of partitions; some are never claimed.",
        Edit(
            "streaming/store/identity.py",
            "if identity.partitions != settings.partitions:",
            "if identity.partitions < 1:",
        ),
        IDENTITY + "another_number_of_partitions_is_refused",
    ),
    bug(
        "an earlier version's store taken for an empty one",
        "Keys and messages of two versions are mixed.",
        Edit(
            "streaming/store/identity.py",
            "if found is None and await _is_used(client):",
            "if found is None and not client:",
        ),
        IDENTITY + "a_store_of_an_earlier_version_is_refused",
    ),
    bug(
        "a store that is checked once",
        "A server that evicts or has no append-only file is given jobs if it was not the first.",
        Edit(
            "streaming/store/monitor.py",
            "if servers == self._servers and time.monotonic() - self._checked_at < CHECK_INTERVAL_S:",
            "if self._servers:",
        ),
        "tests/streaming/store/test_monitor.py::test_settings_that_change_are_seen_a_little_later",
    ),
    bug(
        "a promoted replica taken for the primary before it",
        "Nobody looks at the settings of the server that Sentinel has named.",
        Edit(
            "streaming/store/monitor.py",
            "if servers == self._servers and time.monotonic()",
            "if self._servers and time.monotonic()",
        ),
        "tests/streaming/redis/test_sentinel.py::test_a_promoted_replica_is_checked",
    ),
    bug(
        "processes known by their names",
        "Two machines run the documented commands, and each hides the other's worker.",
        Edit("streaming/fleet/processes.py", "{process.role}:{process.life}", "{process.role}:{process.id}"),
        "tests/streaming/fleet/test_presence.py::test_machines_may_use_the_same_name",
    ),
)
