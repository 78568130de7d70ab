"""Planted bugs of the streams that other clients resume: pages, offsets, and cursors of live reads."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

STREAMS = "tests/api/durable/test_streams.py::test_"
OFFSETS = "tests/api/durable/test_offsets.py::test_"

DURABLE = (
    bug(
        "a page that is the last before its time",
        "A reader of a long answer stops after its first page.",
        Edit(
            "api/durable/pages.py", "closed = self.record.state.final and all_rows", "closed = self.record.state.final"
        ),
        STREAMS + "a_long_stream_comes_in_pages",
    ),
    bug(
        "an offset of another text",
        "A reader that comes back after a loss of data gets the new text behind the old one.",
        Edit(
            "api/durable/pages.py",
            "return place if author(self.sections, place.after) == place.runs[-1] else None",
            "return place",
        ),
        STREAMS + "a_reader_that_comes_back_to_a_running_job_is_told_that_its_text_was_lost",
    ),
    bug(
        "an offset that changes the job",
        "A reader with a made-up offset makes all readers of the job begin again.",
        Edit(
            "api/durable/pages.py",
            "    if seen.epoch == log.record.epoch:\n        raise errors.offset_gone()\n",
            "    if seen.epoch == log.record.epoch:\n"
            "        await services.queue.reset(record.job.id, log.record.resets)\n"
            "        log = await _StoredLog.read(services, await services.job_reader.outline(record.job.id))\n",
        ),
        STREAMS + "a_made_up_offset_is_refused_and_changes_nothing",
    ),
    bug(
        "an event id that changes the job",
        "A reader with a made-up event id makes all readers of the job begin again.",
        Edit("api/events.py", "(_new_epoch if shown else _read_again)", "_new_epoch"),
        "tests/api/test_events.py::test_a_made_up_id_gets_a_reset_and_makes_no_other_reader_begin_anew",
        "tests/api/test_events.py::test_a_two_part_id_makes_no_other_reader_begin_anew",
    ),
    bug(
        "a cursor that stands still",
        "A cache answers a live reader with the same bytes again and again.",
        Edit("api/durable/offsets.py", "seen < current", "seen <= current"),
        OFFSETS + "a_live_cursor_is_the_interval_and_never_one_that_the_reader_had",
    ),
    bug(
        "a cursor that is drawn again",
        "Once in about 190 times a live reader gets the cursor that it had, and a cache the same bytes.",
        Edit(
            "api/durable/offsets.py",
            "max(1, random.randint(1, MAX_JITTER_S) // INTERVAL_S)",
            "random.randint(1, MAX_JITTER_S) // INTERVAL_S",
        ),
        OFFSETS + "a_live_cursor_is_the_interval_and_never_one_that_the_reader_had",
    ),
)
