"""Planted bugs of an audit: bytes and buffers that stay behind, and what readers, lists and joined jobs are told."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

EPOCH = "tests/api/test_events.py::test_a_job_that_begins_in_another_epoch_is_told_with_a_reset_after_a_pause"
LEFT = "tests/streaming/jobs/test_relay.py::test_a_buffer_whose_reader_left_is_not_looked_at_any_more"

LEAVINGS = (
    bug(
        "bytes of a refused file",
        "Uploads that the store refuses fill the disk, and no record names what lies there.",
        Edit(
            "api/files.py",
            "    except QuotaExceeded:\n"
            "        await asyncio.to_thread(services.file_store.remove, file.id)\n"
            "        raise\n",
            "    except QuotaExceeded:\n        raise\n",
        ),
        "tests/system/test_tenant_files.py::test_what_the_store_refuses_leaves_no_bytes",
    ),
    bug(
        "a full page seems to be the last",
        "Who lists 500 files to a page is told that there are no more, and never sees the rest.",
        Edit("api/files.py", "while more and len(found) <= limit:", "while more and len(found) < limit:"),
        "tests/api/test_files.py::test_a_list_goes_on_behind_the_records_of_one_call",
    ),
    bug(
        "a joined job gets the ETA of a new one",
        "Who asks again for a job that is next in its lane is told to wait as long as for one at the lane's end.",
        Edit("api/admission.py", "wait = None if accepted.joined else _expected_wait(", "wait = _expected_wait("),
        "tests/api/admin/test_pools.py::test_a_waiting_job_is_told_when_its_model_will_be_awake",
    ),
    bug(
        "a reset without a pause",
        "A reader of a log that changes all the time has it read from its beginning without end.",
        Edit("api/events.py", "            await asyncio.sleep(RESET_DELAY_S)\n", ""),
        EPOCH,
    ),
    bug(
        "a beginning of another epoch",
        "A reader that waits is given an id of an epoch of which it knows nothing, before it is told of the reset.",
        Edit(
            "api/events.py",
            "if not self._started and record.runs and record.epoch == self._record.epoch:",
            "if not self._started and record.runs:",
        ),
        EPOCH,
    ),
    bug(
        "a closed buffer is still behind",
        "The relay keeps what a reader that has left did not take, and looks for more of it ever after.",
        Edit("streaming/jobs/relay.py", "        self._behind.discard(buffer)\n", ""),
        LEFT,
    ),
    bug(
        "a buffer falls behind after it was closed",
        "The relay keeps the full buffer of a reader that left while its log was read, and never rests again.",
        Edit(
            "streaming/jobs/relay.py",
            "if buffer.stale and buffer in self._listeners(buffer.job_id):",
            "if buffer.stale:",
        ),
        LEFT,
    ),
)
