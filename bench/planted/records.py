"""Planted bugs of the records on the local disk: a request that is missing or counted twice, a loop that waits."""

from __future__ import annotations

from bench.planted.bug import Bug, Edit, lua

SYSTEM = "tests/system/test_request_records.py::test_"
WRITER = "tests/telemetry/records/test_record_writer.py::test_"
REPORT = "tests/telemetry/report/test_"
RECORD_WRITER = "telemetry/records/writer.py"

RECORDS = (
    Bug(
        "a job that a script ended has no record",
        "Expired and cancelled requests are missing in every report, which looks all the better for it.",
        (lua("endings", "  note_script_end(id)\n", ""),),
        (SYSTEM + "jobs_that_no_worker_ends_have_records_from_the_api_alone",),
    ),
    Bug(
        "every sweep records the same end",
        "A request that was cancelled in the queue counts once for each sweep.",
        (lua("reap", "'LPOP', script_ends_key(), most", "'LRANGE', script_ends_key(), 0, most"),),
        (SYSTEM + "jobs_that_no_worker_ends_have_records_from_the_api_alone",),
    ),
    Bug(
        "a record of an end that the store refused",
        "A job that a script has failed counts as completed, and once more as failed.",
        (Edit("workers/writer.py", "strict=True) if answer == 0]", "strict=True) if answer is None]"),),
        ("tests/workers/test_request_records.py::test_an_end_that_the_store_refuses_is_not_recorded",),
    ),
    Bug(
        "a version that is never written",
        "A later reader takes the fields of an old line for its own.",
        (Edit("telemetry/records/schema.py", "    return VERSION\n", "    return 0\n"),),
        (WRITER + "every_line_names_its_version",),
    ),
    Bug(
        "a line behind half a line",
        "After a full disk, the first whole record is lost with the torn one.",
        (Edit(RECORD_WRITER, '        if self._torn:\n            os.write(file, b"\\n")\n', ""),),
        (WRITER + "a_full_disk_costs_records_and_nothing_else",),
    ),
    Bug(
        "records without a bound",
        "The disk of a server that runs for a month is full of them.",
        (Edit("telemetry/records/folder.py", "if total > max_bytes or now", "if now"),),
        (WRITER + "the_folder_is_bounded",),
    ),
    Bug(
        "a write to the disk under the lock",
        "A disk that does not answer stops the event loop, and with it every stream.",
        (
            Edit(
                RECORD_WRITER,
                "            for rest in self._append(data):\n                left = rest\n",
                "            with self._lock:\n                left = [*self._append(data)][-1]\n",
            ),
        ),
        (WRITER + "a_disk_that_does_not_answer_holds_up_no_writer",),
    ),
    Bug(
        "a percentile one rank too low",
        "The slowest of a hundred requests is left out of the 99th percentile of fifty.",
        (Edit("telemetry/report/figures.py", "math.ceil(share * len(ordered)) - 1", "int(share * len(ordered)) - 1"),),
        (REPORT + "figures.py::test_counts_tokens_and_percentiles_equal_the_raw_lines",),
    ),
    Bug(
        "a slow worker that is compared with itself",
        "Of two workers, one is named only if it takes three times as long as the other.",
        (
            Edit(
                "telemetry/report/advice.py",
                "others = [pace for other, pace in medians.items() if other != name]",
                "others = list(medians.values())",
            ),
        ),
        (REPORT + "advice.py::test_a_worker_is_slow_from_half_as_long_again",),
    ),
    Bug(
        "a slow worker beside others of another model",
        "Every worker of the larger model counts as slow.",
        (Edit("telemetry/report/advice.py", "paces[each.record.model][each.record.by]", 'paces[""][each.record.by]'),),
        (REPORT + "advice.py::test_models_are_not_compared",),
    ),
    Bug(
        "a GPU that costs nothing",
        "Tokens per joule are infinite on machines that do not measure energy.",
        (Edit("telemetry/report/energy.py", "        if len(each) > 1\n", ""),),
        (REPORT + "energy.py::test_without_two_readings_there_is_none",),
    ),
    Bug(
        "idle energy for tenants",
        "Tenants pay for a GPU that runs for nobody.",
        (Edit("telemetry/report/energy.py", "            idle += spent\n", "            idle += 0.0\n"),),
        (REPORT + "energy.py::test_idle_energy_belongs_to_nobody",),
    ),
    Bug(
        "ratios of some requests by what all of them took",
        "A report about one tenant divides the energy and the CPU of everybody by its tokens alone.",
        (
            Edit(
                "telemetry/report/report.py",
                "    shared = len(evidence.requests) < len(found.requests)\n",
                "    shared = False\n",
            ),
        ),
        ("tests/telemetry/report/test_energy.py::test_a_report_about_one_tenant_splits_the_energy_over_all",),
    ),
    Bug(
        "slots that others hold count as free",
        "A report about one lane says that it waits beside free slots, which another lane holds.",
        (
            Edit(
                "telemetry/report/advice.py",
                "        holders = [each for each in everyone if",
                "        holders = [each for each in requests if",
            ),
        ),
        ("tests/telemetry/report/test_advice.py::test_slots_that_others_hold_are_not_free",),
    ),
    Bug(
        "a part that an unknown stamp ends",
        "The metric of parts loses the time of a part whose end an engine does not tell.",
        (
            Edit(
                "telemetry/latency.py",
                "        since = end or since\n",
                "        since = end\n",
            ),
        ),
        ("tests/telemetry/test_latency.py::test_the_parts_up_to_the_last_token_are_those_of_the_split",),
    ),
)
