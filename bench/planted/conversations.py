"""Planted bugs of conversations: turns that are added twice or lost, two turns at once, and how long items are kept."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

STORE = "tests/streaming/jobs/test_conversations.py::test_"
CLIENT = "tests/api/responses/test_conversations.py::test_"

CONVERSATIONS = (
    bug(
        "a turn that is added twice",
        "Two readers that come when a response has ended both add its items.",
        lua("amend_conversation", "if version ~= '' and (s[2] ~= version or s[3] ~= turn) then", "if false then"),
        STORE + "of_many_who_end_a_turn_one_adds_its_items",
    ),
    bug(
        "two turns at once",
        "A second response begins while the first one runs: it does not know its answer, and one of them is lost.",
        lua("put", " or known[3] ~= '' then return {'changed'} end", " then return {'changed'} end"),
        STORE + "a_turn_begins_only_if_the_conversation_is_as_it_was_read",
    ),
    bug(
        "a turn of what was read long ago",
        "A response misses the items that were added between its reading and its acceptance.",
        lua("put", " or known[2] ~= version or", " or"),
        STORE + "a_turn_begins_only_if_the_conversation_is_as_it_was_read",
    ),
    bug(
        "a conversation that expires in its turn",
        "The answer of a response that waited for long has no conversation to be added to.",
        lua(
            "conversations",
            "'EXPIRE', conversation_key(conversation), MAX_TURN_S",
            "'TTL', conversation_key(conversation)",
        ),
        STORE + "the_end_of_its_job_sets_how_long_a_conversation_is_kept",
    ),
    bug(
        "a conversation that outlives its last turn's job",
        "It is kept for a month after a turn that nobody read, and its job is gone by then.",
        lua("finish", "  if s[21] then end_turn(s[21], id, retention_s(s[7]), now) end\n", ""),
        STORE + "the_end_of_its_job_sets_how_long_a_conversation_is_kept",
    ),
    bug(
        "a response that takes its turn with it",
        "A response that is deleted before anybody has read its conversation is missing in it.",
        Edit(
            "api/responses/endpoints.py",
            "        await add_turn(services, record.job.tenant, conversation)\n",
            "        pass\n",
        ),
        CLIENT + "a_deleted_or_unstored_response_stays_in_its_conversation",
    ),
    bug(
        "a turn that a full store hides",
        "A conversation whose last turn nobody has read cannot be read while the store is full.",
        Edit("api/responses/turns.py", "            if kept:\n                raise\n", "            raise\n"),
        CLIENT + "a_full_store_shows_a_turn_that_nobody_has_read",
    ),
    bug(
        "a turn that is deleted before it is kept",
        "A response is deleted while the store is too full to add its turn to its conversation, which loses it.",
        Edit("api/responses/turns.py", "conversation_id, kept=True)", "conversation_id)"),
        CLIENT + "a_full_store_shows_a_turn_that_nobody_has_read",
    ),
    bug(
        "corruption that looks like an upgrade",
        "Clients ask again and again for a response whose record nobody can read, of any version.",
        Edit("streaming/jobs/records.py", "return NEWER if self.is_newer_body else MALFORMED", "return NEWER"),
        CLIENT + "a_turn_whose_job_is_corrupt_is_no_newer_versions",
    ),
    bug(
        "items that replace others",
        "Where a conversation's next number is corrupt, the next items take the places of earlier ones.",
        Edit("streaming/jobs/conversations.py", 'if numbers and read_number(raw[b"next"]) < numbers[-1]:', "if False:"),
        STORE + "a_conversation_with_a_corrupt_field_is_unreadable",
    ),
    bug(
        "items that were never added",
        "Other items with the same idempotency key get an answer that says they were added.",
        Edit("api/responses/conversations.py", "if earlier and not any(", "if False and any("),
        CLIENT + "other_items_with_the_same_idempotency_key_are_refused",
    ),
    bug(
        "another tenant's conversation",
        "Whoever knows the id of a conversation reads it.",
        Edit(
            "streaming/jobs/conversations.py",
            'if raw.get(b"tenant", b"").decode(errors="replace") != tenant:',
            "if not raw:",
        ),
        STORE + "a_conversation_of_another_tenant_is_unknown",
    ),
)
