"""Planted bugs of room in the store: what never fits, who waits for room, and what a restored store has forgotten."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

ROOM = "tests/offline/batch/test_room.py::test_"
RESTORE = "tests/offline/batch/test_restore.py::test_"
MEMORY = "streaming/store/memory.py"
LINES = "offline/batch/lines.py"

ROOM_BUGS = (
    bug(
        "nothing is refused for good",
        "A request that no store of this size can hold is told to try again, and a line of it waits for ever.",
        Edit(MEMORY, "if size + owed > (ever := max_job_bytes(share.memory, most)):", "if (ever := 0):"),
        ROOM + "what_is_refused_for_good_depends_on_the_store_alone",
    ),
    bug(
        "an idle store is an empty one",
        "A job that fits beside nothing at all, not even the server's own memory, waits for room for ever.",
        Edit(MEMORY, "int((most - IDLE_SHARE) * memory.allowed) - IDLE_BYTES - memory.at_start", "memory.allowed"),
        ROOM + "what_is_refused_for_good_depends_on_the_store_alone",
    ),
    bug(
        "what others hold refuses for good",
        "A request that would fit in a minute is answered with 400, and a line of it fails.",
        Edit(
            MEMORY,
            "if size + owed > (ever := max_job_bytes(share.memory, most)):",
            "if size + owed > (ever := room_of(share.memory, most) - share.taken):",
        ),
        ROOM + "what_is_refused_for_good_depends_on_the_store_alone",
    ),
    bug(
        "a message that never fits waits at the broker",
        "It is tried again for ever, and no message behind it is taken.",
        Edit("offline/broker/intake.py", "except NeverFits as error:", "except ZeroDivisionError as error:"),
        ROOM + "a_message_that_never_fits_is_rejected",
    ),
    bug(
        "a request that never fits may try again",
        "Clients repeat with 503 and Retry-After what can never be accepted.",
        Edit("api/admission.py", "except NeverFits as error:", "except ZeroDivisionError as error:"),
        ROOM + "a_request_that_never_fits_is_no_reason_to_try_again",
    ),
    bug(
        "a line that never fits is waited for",
        "Its batch never ends.",
        Edit(LINES, "case NeverFits():", "case Exception() if False:"),
        ROOM + "a_line_that_never_fits_is_answered_with_the_error",
    ),
    bug(
        "the first line that does not fit ends the round",
        "One large line keeps all smaller ones behind it from the queue.",
        Edit(
            "streaming/jobs/queue.py",
            "                refused[job.id] = error\n                continue",
            "                for each in jobs[jobs.index(job) :]:\n"
            "                    refused[each.id] = error\n                break",
        ),
        ROOM + "a_line_that_waits_for_room_lets_smaller_ones_pass",
    ),
    bug(
        "lines that wait are tried at every look",
        "Five times a second large lines are read, encoded and refused again.",
        Edit(LINES, "if needed is None or self._tools.headroom.fits(", "if True or self._tools.headroom.fits("),
        ROOM + "lines_that_wait_are_not_read_again",
    ),
    bug(
        "smaller lines pass without end",
        "A large line waits until all lines behind it are done.",
        Edit(LINES, "draining = self._overtaking >= MAX_OVERTAKING", "draining = False"),
        ROOM + "smaller_lines_do_not_keep_a_larger_one_waiting_for_ever",
    ),
    bug(
        "an empty queue goes on waiting",
        "A line that others keep from its room holds up its whole batch.",
        Edit(LINES, "        if self.idle:\n            self._overtaking = 0\n", ""),
        ROOM + "lines_pass_one_that_others_keep_from_its_room",
    ),
    bug(
        "lines that were passed over are lost",
        "The store goes away while lines are put: those taken from the file are never computed in this turn.",
        Edit(
            LINES,
            "            self._waiting.extendleft(line for line in reversed(tried) if line not in settled)\n",
            "            self._waiting.extendleft(line for line in reversed(tried) if line in self._needs)\n",
        ),
        ROOM + "lines_that_are_being_put_when_the_store_goes_away_keep_their_order",
    ),
    bug(
        "a restored store's batch is not looked for",
        "A batch that was completed becomes a failed one without output, although its files are there.",
        Edit("offline/batch/turn.py", ".exists) and await self._restore_ending():", ".exists) and not self._lease:"),
        RESTORE + "a_batch_that_had_ended_ends_again_as_it_did",
    ),
    bug(
        "lost work was cancelled",
        "A batch that nobody cancelled is shown as cancelled, without a word.",
        Edit(
            "offline/batch/turn.py",
            "            await self._finish(BatchState.CANCELLED, faults=lost)\n        else:\n",
            "            await self._finish(BatchState.CANCELLED, faults=lost)\n        elif lost:\n"
            "            await self._finish(BatchState.CANCELLED)\n        else:\n",
        ),
        RESTORE + "a_batch_that_had_ended_ends_again_as_it_did",
    ),
    bug(
        "outputs stay in quarantine",
        "The output of a batch that a restored store had forgotten is removed after ninety days.",
        Edit(
            "streaming/batches/file_store.py",
            "                found.rename(path)\n                os.utime(path)",
            "                os.utime(found)",
        ),
        RESTORE + "a_batch_that_had_ended_ends_again_as_it_did",
    ),
    bug(
        "the oldest note counts",
        "A turn that was overtaken decides how a batch ended.",
        Edit("streaming/batches/file_store.py", '.????????"), reverse=True)]', '.????????"))]'),
        RESTORE + "the_last_note_whose_files_are_there_counts",
    ),
)
