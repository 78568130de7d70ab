"""Planted bugs of the order of the queue: lanes, floor and age, tenants and their counters, the index of a lane."""

from __future__ import annotations

from bench.planted.bug import Bug, lua

STATEFUL = "tests/streaming/jobs/test_order_stateful.py::test_every_claim_is_what_the_order_says"
ORDER = "tests/streaming/jobs/test_order.py::test_"

BUGS = (
    Bug(
        "an order that forgets arrival",
        "Jobs that are equally urgent start in the order of the digits of their entries: the tenth before the second.",
        (lua("prelude", "pad(ms, 15) .. '-' .. pad(number, 10)", "ms .. '-' .. string.reverse(pad(number, 10))"),),
        (STATEFUL,),
    ),
    Bug(
        "a tenant that saves up turns",
        "Whoever comes back after an hour is served alone until it has got as much as those who were there.",
        (
            lua(
                "prelude",
                "local lift = math.max(tonumber(known[1] or 0), tonumber(least[2] or 0))",
                "local lift = 0",
            ),
        ),
        (ORDER + "a_tenant_cannot_save_up_turns", STATEFUL),
    ),
    Bug(
        "a refund for what the return had settled",
        "A tenant whose long job ends early gets turns for it that its return had given it already.",
        (lua("prelude", "math.max(counter + change, lift), tenant", "counter + change, tenant"),),
        (ORDER + "a_tenant_cannot_save_up_turns", STATEFUL),
    ),
    Bug(
        "a job that costs what it might have",
        "A tenant that does not say how long its answers may be gets a fraction of its turns.",
        (
            lua(
                "finish", "  correct_counter(model, priority, s[12] or '', parse_order(s[14]), tonumber(ARGV[9]))\n", ""
            ),
        ),
        (ORDER + "a_job_costs_what_it_generated", STATEFUL),
    ),
    Bug(
        "a floor without a price",
        "A batch goes before chats as soon as these have claimed anything.",
        (lua("claim", "return credits[lane.rank] >= FLOOR * job.cost, job", "return true, job"),),
        (STATEFUL,),
    ),
    Bug(
        "a lane that never gets old",
        "A job of a lower lane gets a twentieth of the work, however long it has waited.",
        (lua("claim", "oldest[1] and now - oldest[2] > lane.boost", "false"),),
        (STATEFUL,),
    ),
    Bug(
        "credit from idle times",
        "A batch that begins after a quiet night goes before the first chats of the day.",
        (lua("prelude", "  if not least[1] then redis.call('HDEL', credit_key(model), priority) end", "  --"),),
        (STATEFUL,),
    ),
    Bug(
        "a weight that weighs nothing",
        "A tenant with three times the weight gets the share of one.",
        (lua("prelude", "units_of(order[1], output) / order[3])", "units_of(order[1], output))"),),
        (ORDER + "a_weight_is_a_share", STATEFUL),
    ),
    Bug(
        "a cancelled job that stays in line",
        "The index of a lane outlives its jobs, and the lane seems full.",
        (
            lua(
                "prelude",
                "  if kind == 'lane' and s[12] == 'queued' then leave_line(model, priority, s[10] or '', s[2]) end\n",
                "",
            ),
        ),
        (STATEFUL,),
    ),
    Bug(
        "a lost index that stays lost",
        "Accepted jobs wait for ever.",
        (
            lua(
                "prelude",
                "            join_line(model, priority, s[4] or '', entry, parse_order(s[5])[4])\n",
                "",
            ),
        ),
        (ORDER + "a_lost_index_is_made_again",),
    ),
)
