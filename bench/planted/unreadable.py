"""Planted bugs: a field of a job's record that cannot be read costs more than its own job."""

from __future__ import annotations

from bench.planted.bug import bug, lua

TEST = "tests/streaming/test_unreadable.py::test_"

UNREADABLE = (
    bug(
        "an unknown error is the server's",
        "A sweep or a claim breaks off at one job because nobody has thought of the error that its record makes.",
        lua(
            "malformed",
            "if string.find(text, refusal, 1, true) then return nil end\n  end\n  return text\n",
            "if string.find(text, refusal, 1, true) then return nil end\n  end\n"
            "  return string.find(text, 'WRONGTYPE', 1, true) and text or nil\n",
        ),
        TEST + "a_sweep_takes_all_jobs_of_a_lost_worker",
    ),
    bug(
        "a refusal that is a job's fault",
        "An operator forgets a permission, and every job that is claimed fails for it.",
        lua("malformed", "'ACL failure', 'executing the script', ", ""),
        lua("malformed", "NOPERM = true, ", ""),
        TEST + "a_refusal_in_the_middle_of_a_claim_loses_no_job",
    ),
    bug(
        "a claim that breaks off counts for nobody",
        "Jobs that it had read wait for a worker that does not know of them, for as long as it lives and longer.",
        lua("claim", "for first = 1, #c.taken, 1000 do", "for first = 1, ran and #c.taken or 0, 1000 do"),
        TEST + "a_refusal_in_the_middle_of_a_claim_loses_no_job",
    ),
    bug(
        "a lease that goes before its jobs",
        "A sweep that breaks off leaves the rest of a dead worker's jobs to no sweep.",
        lua("reap", "  lost = {requeued", "  redis.call('ZREM', leases_key(), worker)\n  lost = {requeued"),
        lua(
            "reap",
            "  redis.call('ZREM', leases_key(), worker) -- after its jobs: if the server refuses one, the next "
            "sweep continues\n",
            "",
        ),
        TEST + "a_refusal_in_the_middle_of_a_sweep_is_made_good_by_the_next",
    ),
    bug(
        "a job whose worker is nobody",
        "Its worker cannot end it, and no sweep takes it: it runs for ever.",
        lua("fences", "      error('invalid worker', 0)\n", "      return false\n"),
        TEST + "jobs_end_beside_one_that_cannot_be_read",
    ),
    bug(
        "a job whose run is none",
        "Its worker cannot end it or hand it back: it runs for as long as that worker lives.",
        lua("fences", "error('invalid run', 0)", "return false"),
        TEST + "jobs_end_beside_one_that_cannot_be_read",
    ),
    bug(
        "ended before it is read",
        "A job whose lane cannot be read is completed and kept for ever; nobody is told, its entry stays.",
        lua("finish", "  local model, priority = require_lane_entry(s[4], s[5])\n", ""),
        lua(
            "finish",
            "  ack_and_delete(s[4], s[5])\n",
            "  ack_and_delete(s[4], s[5])\n  local model, priority = parse_lane(s[4])\n",
        ),
        TEST + "jobs_end_beside_one_that_cannot_be_read",
    ),
    bug(
        "an unreadable job that keeps its entry",
        "The lane counts it as running after it has failed, and its worker's consumer stays.",
        lua("malformed", "pending_entries(worker or s[4] or '')[id] or {}", "{}"),
        TEST + "jobs_end_beside_one_that_cannot_be_read",
    ),
    bug(
        "a waiting job whose entry is unreadable",
        "A claim drops it from its lane, where nobody finds it again: it waits for ever.",
        lua("claims", "s[6] ~= entry and not is_queued_elsewhere(id, s[10], s[6]) then", "false then"),
        TEST + "a_claim_leaves_no_waiting_job_behind",
    ),
    bug(
        "any digits are a number of attempts",
        "One job that is claimed ends its worker, and the next, and the next.",
        lua("claims", "  if s[8] and not integer_text(s[8]) then error('invalid attempt', 0) end\n", ""),
        TEST + "numbers_beyond_all_bounds_are_none",
    ),
    bug(
        "any digits are a number of seconds",
        "A job that is to be kept for longer than the server can count is kept for ever, and its end breaks off.",
        lua("values", "  return integer_text(keep) or 3600", "  return string.match(keep or '', '^%d+$') or 3600"),
        TEST + "jobs_end_beside_one_that_cannot_be_read",
    ),
    bug(
        "a cancel deletes any key",
        "Whatever stands where a job's idempotency key should be goes with a client that leaves.",
        lua("cancel", "    free_idempotency_key(s[5], id)\n", "    if s[5] then redis.call('DEL', s[5]) end\n"),
        TEST + "waiting_jobs_are_cancelled",
    ),
    bug(
        "a full store cannot be emptied",
        "The one command that would make room is refused for want of room.",
        lua("condemn", "#!lua flags=allow-oom\n", ""),
        TEST + "a_full_store_is_reset",
    ),
    bug(
        "an end told of a record that is not read",
        "Who waits for a job hears that it completed, and who asks later that its record cannot be read.",
        lua("finish", "  check_readable(s)\n", ""),
        "tests/streaming/test_malformed.py::test_a_record_spoiled_before_its_end_has_one_end",
    ),
)
