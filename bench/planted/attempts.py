"""Planted bugs of what is kept of a job's attempts: their ends, and the tokens of jobs that scripts ended."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

BOUNDS = "tests/workers/test_output_bounds.py::test_"
JOBS = "tests/streaming/jobs/test_attempts.py::test_"

ATTEMPTS = (
    bug(
        "an attempt whose end is not noted",
        "Of a job that lost two workers nobody can say which, or when.",
        lua("reap", "  close_attempt(id, 'lost', now)\n", ""),
        JOBS + "a_job_that_is_given_up_keeps_its_tokens_its_usage_and_its_attempts",
    ),
    bug(
        "a log of attempts without a bound",
        "The record of a job that is handed on again and again grows with each worker.",
        lua("endings", "  for _ = MAX_PAST_ATTEMPTS + 1, count do past", "  for _ = count + 1, count do past"),
        JOBS + "the_log_holds_the_newest_twenty_attempts",
    ),
    bug(
        "a first token that moves",
        "A job that another worker continues seems to have begun to answer only then.",
        Edit("workers/attempt.py", "self._first_ms or generated.first // 1000", "generated.first // 1000"),
        "tests/workers/test_runs.py::test_the_first_token_of_a_job_stays_that_of_the_attempt_that_gave_it",
    ),
    bug(
        "the logs of a poison job go with its last worker",
        "A minute after it was given up nobody knows what it had generated.",
        lua("reap", "  lost.heirs[#lost.heirs + 1] = id -- last", "  -- last"),
        JOBS + "the_logs_of_a_job_are_kept_until_its_tokens_are_stored",
    ),
    bug(
        "every process stores the same tokens",
        "All of them read the log of a dead worker at once.",
        lua("reap", "do redis.call('ZADD', cut_key(), now + lease, id) end", "do now = now end"),
        JOBS + "one_process_at_a_time_stores_a_jobs_tokens",
    ),
    bug(
        "one pass over the log for each job",
        "The end of a worker with hundreds of jobs keeps its readers busy for minutes.",
        Edit(
            "streaming/jobs/reader.py",
            "await asyncio.gather(*(self._with_tokens(each, bodies=bodies) for each in read))",
            "[await self._with_tokens(each, bodies=bodies) for each in read]",
        ),
        JOBS + "very_many_jobs_of_a_dead_worker_read_its_log_together",
    ),
    bug(
        "a replay without a past",
        "Whoever looks at the new job does not see that three workers died of it.",
        Edit("streaming/jobs/dead_letters.py", "        past=record.attempts,\n", ""),
        JOBS + "a_replay_keeps_the_attempts_at_the_job_that_was_given_up",
    ),
    bug(
        "a piece that cannot be encoded is everybody's",
        "An engine that gives one huge number for one job ends the other jobs of its step, or all of its worker.",
        Edit("workers/worker.py", "except Exception as error:", "except KeyError as error:"),
        BOUNDS + "it_fails_its_own_job_and_the_others_go_on",
    ),
    bug(
        "an end that cannot be encoded",
        "It stays in the worker's writer, and no later job of the partition ever ends.",
        Edit("workers/output_bounds.py", "        _check(end)\n", ""),
        BOUNDS + "it_fails_its_own_job_and_the_others_go_on",
    ),
    bug(
        "a write that cannot be encoded is lost in silence",
        "The worker stays ready, claims, computes, and ends no job of that partition.",
        Edit(
            "workers/writer.py",
            "            self._failed.put_nowait(error)\n            return\n        write = ",
            "            raise error\n        write = ",
        ),
        "tests/workers/test_writer.py::test_what_cannot_be_encoded_ends_the_run",
    ),
    bug(
        "a request id that shows a secret",
        "A client that sends its key as the id of its request finds it in the log of the API process.",
        Edit("api/middleware.py", "request_id if OWN_ID.fullmatch(request_id) else redact(request_id)", "request_id"),
        "tests/api/test_middleware.py::test_a_request_leaves_one_line_without_what_its_client_wrote",
    ),
)
