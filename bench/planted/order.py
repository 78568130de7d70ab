"""Planted bugs of the order of the queue: lanes, floor and age, tenants and their counters, the index of a lane."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

STATEFUL = "tests/streaming/jobs/test_order_stateful.py::test_every_claim_is_what_the_order_says"
ORDER = "tests/streaming/jobs/test_order.py::test_"

BUGS = (
    bug(
        "a lane of one tenant",
        "A tenant that fills a lane up to its limit shuts all others out.",
        lua("put", "(own > 0 or waiting >= limit + math.ceil(limit / 10))", "true"),
        "tests/streaming/jobs/test_protocol.py::test_a_lane_that_one_tenant_fills_takes_a_job_of_each_other_one",
    ),
    bug(
        "jobs that expired teach nothing",
        "In hopeless overload, every request is accepted and expires.",
        Edit(
            "api/waits/calibration.py",
            "_Error(time.monotonic(), of_predicted, of_told, bound)",
            "_Error(time.monotonic(), of_predicted, of_told, False)",
        ),
        "tests/api/waits/test_calibration.py::test_bounds_move_the_band_only_as_far_as_they_say",
    ),
    bug(
        "a kept place for the tenant that floods",
        "A worker's last places go to the tenant that fills all others: a light tenant waits until a job ends.",
        lua("claims", "return c.crowds > 0 and c.begun + #c.chosen >= c.shared", "return false"),
        STATEFUL,
    ),
    bug(
        "a kept place for a lower lane",
        "A batch of another tenant overtakes chats of one that holds more than its share of a worker.",
        lua("claims", "if each.waits or is_passed_over(c, each) then highest", "if each.waits then highest"),
        ORDER + "a_kept_place_is_not_for_a_lower_lane",
        STATEFUL,
    ),
    bug(
        "a claim that reads every tenant",
        "A claim takes a hundred times as long where ten thousand tenants have waiting jobs.",
        lua("claims", "redis.call('ZRANGE', lane.tenants, 0, most - 1, ", "redis.call('ZRANGE', lane.tenants, 0, -1, "),
        ORDER + "a_claim_costs_the_same_with_very_many_tenants",
    ),
    bug(
        "shares of slots without weights",
        "On a full worker, a tenant that is to get three times the work of another one gets as much as that one.",
        Edit("workers/choices.py", "SlotShares(weights)", "SlotShares()"),
        "tests/workers/test_places.py::test_a_share_of_the_slots_is_by_weight",
    ),
    bug(
        "a flood that fills a worker",
        "A worker keeps no slot from a tenant with more than its share, and a light tenant waits until a job ends.",
        Edit("workers/choices.py", "if kept else ()", "if not kept else ()"),
        "tests/workers/test_places.py::test_a_tenant_with_more_than_its_share_leaves_a_slot_to_others",
    ),
    bug(
        "a flood of choices",
        "The further choices of one job take the slots that a worker keeps for other tenants.",
        Edit("workers/choices.py", "not shared and attempt.job.tenant in crowding", "False"),
        "tests/workers/test_places.py::test_a_tenant_with_more_than_its_share_leaves_a_slot_to_others",
    ),
    bug(
        "an order that forgets arrival",
        "Jobs that are equally urgent start in the order of the digits of their entries: the tenth before the second.",
        lua("index", "pad(ms, 15) .. '-' .. pad(number, 10)", "ms .. '-' .. string.reverse(pad(number, 10))"),
        STATEFUL,
    ),
    bug(
        "a tenant that saves up turns",
        "Whoever comes back after an hour is served alone until it has got as much as those who were there.",
        lua(
            "index",
            "math.max(tonumber(known[2] or 0), tonumber(least[2] or known[1] or 0)), tenant)",
            "tonumber(known[2] or 0), tenant)",
        ),
        ORDER + "a_tenant_cannot_save_up_turns",
        STATEFUL,
    ),
    bug(
        "a limit that begins anew",
        "A job that is put back goes behind later ones of its tenant, and its deadline passes.",
        lua("index", "parse_number(created) or tonumber(string.match(entry, '^%d+'))", "string.match(entry, '^%d+')"),
        ORDER + "a_job_that_is_put_back_keeps_its_latest_start",
    ),
    bug(
        "tokens for nothing",
        "A tenant that cancels its jobs while they wait again has got their tokens, and its turns besides.",
        lua("salvage", "if model and generated then", "if false then"),
        ORDER + "tokens_of_a_job_that_a_script_ends_are_charged",
        STATEFUL,
    ),
    bug(
        "a repair that begins anew",
        "If the index of a long lane is lost, each sweep repairs its first jobs again: the others wait.",
        lua("repair", "redis.call('HGET', repairs_key(), field) or '-'", "'-'"),
        ORDER + "a_lost_index_of_any_length_is_made_again",
    ),
    bug(
        "a job that costs what it might have",
        "A tenant that does not say how long its answers may be gets a fraction of its turns.",
        lua(
            "finish", "  charge_rest(model, priority, s[12] or '', s[14], tonumber(ARGV[9]), tonumber(ARGV[10]))\n", ""
        ),
        ORDER + "a_job_costs_what_it_generated",
        STATEFUL,
    ),
    bug(
        "a prompt that costs its characters",
        "A tenant whose texts have more tokens than their characters suggest gets more than its share.",
        lua("index", "counted > 0 and counted or prompt", "prompt"),
        ORDER + "a_prompt_costs_what_the_engine_counted",
        STATEFUL,
    ),
    bug(
        "a claim that ends jobs without an end",
        "One claim holds the store until all expired jobs have ended.",
        lua("claims", "not lane.empty and c.dropped < MAX_DROPPED do", "not lane.empty do"),
        ORDER + "a_claim_ends_a_bounded_number_of_jobs_that_expired",
    ),
    bug(
        "a floor without a price",
        "A batch goes before chats as soon as these have claimed anything.",
        lua("claims", "return c.credits[lane.rank] >= FLOOR * job.cost", "return true"),
        STATEFUL,
    ),
    bug(
        "a lane that never gets old",
        "A job of a lower lane gets a twentieth of the work, however long it has waited.",
        lua("claims", "oldest[1] and c.now - oldest[2] > BOOST_MS[lane.rank]", "false"),
        STATEFUL,
    ),
    bug(
        "credit from idle times",
        "A batch that begins after a quiet night goes before the first chats of the day.",
        lua(
            "index",
            "  if not least[1] and priority ~= PRIORITIES[1] then redis.call('HDEL'",
            "  if false then redis.call('HDEL'",
        ),
        STATEFUL,
    ),
    bug(
        "a weight that weighs nothing",
        "A tenant with three times the weight gets the share of one.",
        lua("index", "units_of(prompt, output) / weight)", "units_of(prompt, output))"),
        ORDER + "a_weight_is_a_share",
        STATEFUL,
    ),
    bug(
        "a cancelled job that stays in line",
        "The index of a lane outlives its jobs, and the lane seems full.",
        lua("endings", "  if kind == 'lane' and s[12] == 'queued' then leave_line(", "  if false then leave_line("),
        STATEFUL,
    ),
    bug(
        "a lost index that stays lost",
        "Accepted jobs wait for ever.",
        lua("repair", "            rejoin_line(model, priority, s[4] or '', entry, id, s[6], s[5])\n", ""),
        ORDER + "a_lost_index_is_made_again",
    ),
)
