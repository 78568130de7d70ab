"""Planted bugs of readers of events: what a script ended, what retention took, and more deltas than are held."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

EVENTS = "tests/api/test_events.py::test_"
RELAY = "tests/streaming/jobs/test_relay.py::test_"

READERS = (
    bug(
        "a cut job's log is not read at its end",
        "Whoever reads a job that is cancelled between two workers loses the deltas that only the log has.",
        Edit("streaming/jobs/reader.py", "if record is None or not was_cut_short(record):", "if True:"),
        EVENTS + "a_reader_that_comes_while_a_job_waits_again_misses_nothing_of_its_log",
        EVENTS + "the_end_of_a_cut_job_comes_behind_deltas_that_only_its_log_has",
    ),
    bug(
        "a log with a hole is shown as the text",
        "Of a job that was cancelled the reader gets a text from which a part is missing.",
        Edit("streaming/jobs/salvage.py", "record.job, history.intact", "record.job, history"),
        EVENTS + "a_cut_job_whose_log_has_a_hole_ends_before_it",
    ),
    bug(
        "retention that passes is a loss",
        "A slow reader of a completed job is told in the end that the job failed.",
        Edit("api/events.py", "if terminal is None or terminal.failure is GONE:", "if True:"),
        EVENTS + "a_job_whose_retention_passes_while_it_is_read_never_ends_twice",
    ),
    bug(
        "an unreadable job ends before its deltas",
        "The id of its end is smaller than those that its reader has.",
        Edit("api/openai/cursor.py", "in (MALFORMED.code, GONE.code):", "in (GONE.code,):"),
        "tests/api/openai/test_cursor.py::test_the_end_of_an_unreadable_job_is_behind_all_that_was_shown",
    ),
    bug(
        "the end of another epoch",
        "A reader is told an end behind event ids that stand for something else by then.",
        Edit(
            "api/events.py",
            "if not record.state.final or record.epoch != self._record.epoch:",
            "if not record.state.final:",
        ),
        EVENTS + "the_end_of_another_epoch_is_not_told_as_the_end",
    ),
    bug(
        "half a frame is held",
        "A job with more deltas in a step than are held has its log read again with every step.",
        Edit("streaming/jobs/reorder_buffer.py", "(not self.full or 0 < number == self.number)", "not self.full"),
        RELAY + "a_frame_that_is_begun_is_held_whole",
    ),
    bug(
        "a log is read on for a full reader",
        "With every look a late reader has the whole log read, and takes a small part of it.",
        Edit("streaming/jobs/relay.py", "if all(buffer.full for buffer in buffers):", "if False:"),
        RELAY + "a_late_reader_reads_a_long_log_about_once",
    ),
    bug(
        "copies are nobody's",
        "Of a job that was logged anew after a loss a late reader sees nothing until it ends.",
        Edit("streaming/jobs/relay.py", "Run(worker, abs(row.stream)) in valid", "Run(worker, row.stream) in valid"),
        RELAY + "copies_of_what_earlier_runs_wrote_stand_in_for_a_log_that_is_gone",
    ),
    bug(
        "a log is read from its last run on",
        "A reader of a job that one worker was given twice sees nothing until it ends.",
        Edit("streaming/jobs/relay.py", "min(first, behind", "max(first, behind"),
        RELAY + "what_one_worker_logged_in_two_runs_is_read_from_the_first_of_them_on",
    ),
    bug(
        "a slow reader begins anew",
        "Each time its buffer is full, the parked log of a long job is read from its start: ever more for each delta.",
        Edit("streaming/jobs/subscribers.py", "logged.frame or buffer.seq // MAX_ROWS_PER_FRAME + 1", "logged.frame"),
        "tests/workers/test_parking.py::test_a_slow_reader_goes_on_where_it_was",
    ),
    bug(
        "another epoch is gone on with",
        "A reader is given ids of a new epoch without being told that there is one.",
        Edit("api/events.py", "        if record.epoch != self._record.epoch:", "        if False:"),
        EVENTS + "a_job_that_goes_on_in_another_epoch_is_told_anew",
    ),
    bug(
        "a cut job's end hides what was lost",
        "Whoever comes back to a cancelled job keeps a text that nobody else is shown.",
        Edit("streaming/jobs/salvage.py", "        history.sections,\n", "        (),\n"),
        EVENTS + "who_comes_back_to_a_cut_job_is_told_that_what_it_saw_was_lost",
    ),
    bug(
        "the end of a lost job among its own events",
        "Whoever comes back with the id of `started` is taken for one that has everything.",
        Edit("api/openai/cursor.py", "in (MALFORMED.code, GONE.code):", "in (MALFORMED.code,):"),
        EVENTS + "the_end_of_a_lost_job_comes_behind_all_that_was_told",
    ),
    bug(
        "a stream of events breaks off with the store",
        "A store that is away for two seconds ends every stream of a waiting job, and no event says why.",
        Edit("api/events.py", "itertools.repeat(STORE_RETRY_DELAY_S)", "()"),
        EVENTS + "readers_wait_while_the_store_is_away",
        EVENTS + "each_read_of_a_stream_that_has_begun_is_tried_again",
    ),
)
