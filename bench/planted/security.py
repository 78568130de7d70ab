"""Planted bugs of the door's matrices, the manifests of models and the audit."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

DOORS = "tests/system/test_security_doors.py::test_"
FIELDS = "tests/system/test_security_fields.py::test_"
MANIFEST = "tests/workers/engines/test_manifest.py::test_"
AUDIT = "tests/bench/test_audit.py::test_"

SECURITY = (
    bug(
        "a batch is everybody's",
        "Whoever knows a batch's id reads and steers it, whatever its tenant.",
        Edit(
            "streaming/batches/store.py",
            "record is None or record.batch.tenant != tenant:",
            "record is None or not tenant:",
        ),
        DOORS + "what_is_anothers_is_as_if_it_were_not",
    ),
    bug(
        "what is another's is told apart",
        "An answer says whether an id that is not one's own exists.",
        Edit(
            "api/jobs.py",
            "            return record\n        raise errors.job_not_found()",
            '            return record\n        raise errors.permission_denied("This job is another tenant\'s.")',
        ),
        Edit("api/jobs.py", "job_reader.outline(job_id, caller.tenant)", "job_reader.outline(job_id)"),
        DOORS + "what_is_anothers_is_as_if_it_were_not",
    ),
    bug(
        "every key administers",
        "A tenant's key drops dead letters and steers pools.",
        Edit("api/auth/keys.py", "if not caller.admin:", "if not caller.tenant:"),
        DOORS + "a_key_reaches_as_far_as_it_may",
    ),
    bug(
        "a list of everybody's files",
        "A page of files is read for another tenant's name.",
        Edit("api/files.py", "services.files.recent(caller.tenant, after,", 'services.files.recent("blue", after,'),
        DOORS + "lists_show_ones_own",
    ),
    bug(
        "a number as long as a URL",
        "A limit of some thousand digits is a fault of ours: Python refuses to read it.",
        Edit("api/query.py", " and len(text) <= MAX_DIGITS", ""),
        DOORS + "no_parameter_is_a_fault_of_ours",
    ),
    bug(
        "a 405 names the first method only",
        "A client is told that an address does not answer to what it answers to.",
        Edit("api/auth/guard.py", '{*methods, "HEAD"} if "GET" in methods else methods', "list(methods)[:1]"),
        DOORS + "methods_that_are_not_listed_do_nothing",
    ),
    bug(
        "log probabilities without a bound",
        "A request asks for as many as it likes, and the document says so.",
        Edit(
            "api/openai/schemas.py",
            "top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]",
            "top_logprobs: Annotated[int, Field(ge=0)]",
        ),
        FIELDS + "the_matrix_has_every_model_and_every_bound",
    ),
    bug(
        "a text without a bound",
        "A name of any size goes into the record of its job.",
        Edit("api/openai/queued_request.py", "user: Annotated[str, Field(max_length=256)] | None", "user: str | None"),
        FIELDS + "whatever_a_body_may_hold_is_bounded",
    ),
    bug(
        "an upload of any number of parts",
        "A form of a million small parts keeps each of them in memory.",
        Edit("api/uploads.py", "MAX_PARTS = 16", "MAX_PARTS = 10**6"),
        "tests/api/test_uploads.py::test_parts_and_their_headers_are_bounded",
    ),
    bug(
        "a webhook's answer is read to its end",
        "An endpoint that answers without end holds an attempt, and the network, until its time is over.",
        Edit(
            "offline/webhooks/dispatcher.py",
            "                if size > MAX_ANSWER_BYTES:\n                    break\n",
            "",
        ),
        "tests/offline/webhooks/test_dispatcher.py::test_an_answer_without_end_is_not_read_to_its_end",
    ),
    bug(
        "workers may read dead letters",
        "Whoever has a worker's password reads what has nothing to do with its work.",
        Edit(
            "streaming/store/acl.py",
            '"xrange": frozenset({"log"}),\n        "hgetall": frozenset({"card"}),\n        "hmget',
            '"xrange": frozenset({"log", "dead"}),\n        "hgetall": frozenset({"card"}),\n        "hmget',
        ),
        "tests/streaming/store/test_excess.py::test_each_row_of_the_table_is_sent_and_nothing_else",
    ),
    bug(
        "an unknown endpoint is a chat",
        "A job for an endpoint that is not there is told that its messages are missing.",
        Edit("api/openai/schemas.py", "if not isinstance(endpoint, str) or endpoint not in JOB_MODELS:", "if False:"),
        Edit("api/openai/schemas.py", "return JOB_MODELS[endpoint]", "return JOB_MODELS.get(endpoint, ChatJobRequest)"),
        FIELDS + "a_field_is_bounded_and_named",
    ),
    bug(
        "a file that nobody listed is loaded",
        "Code beside the weights is loaded with them although the manifest does not name it.",
        Edit(
            "workers/engines/manifest.py",
            "    if expected is None:\n        raise",
            "    if expected is None:\n        return\n        raise",
        ),
        MANIFEST + "what_nobody_vouches_for_is_refused",
    ),
    bug(
        "adapters without a manifest",
        "An adapter's files are loaded unchecked.",
        Edit(
            "workers/engines/trtllm/args.py",
            "for name in (*named, *settings.lora.values()) if name",
            "for name in named if name",
        ),
        "tests/workers/engines/trtllm/test_engine.py::test_nothing_of_a_checkpoint_is_loaded_that_its_manifest_does_not_list",
    ),
    bug(
        "an audit that nobody answered passes",
        "Without an advisory service no vulnerability is known, and that is taken for none.",
        Edit("bench/audit/locks.py", 'return [f"{UNANSWERED} ({last[0][:300]})"]', "return []"),
        AUDIT + "anything_else_is_a_finding",
    ),
    bug(
        "secrets of the last commit alone",
        "A secret that was committed and removed is not found.",
        Edit("bench/audit/secrets.py", '"log", "-p"', '"log", "-1", "-p"'),
        AUDIT + "a_secret_is_found_in_the_tree_and_in_the_history",
    ),
)
