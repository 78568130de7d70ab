"""Planted bugs of pools: plans, overrides, pods, and the model that nobody serves yet."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

PLANS = "tests/streaming/fleet/test_plans.py::test_"
PODS = "tests/scheduler/pools/test_kubernetes.py::test_"
MALFORMED = "tests/streaming/test_malformed.py::test_"

POOLS = (
    bug(
        "workers for a server that is away",
        "While no server of engine upstream is there, the scheduler adds workers, which wait as well.",
        Edit("scheduler/policy/decide.py", "    if snapshot.away:\n", "    if False:\n"),
        "tests/scheduler/policy/test_decide.py::test_no_worker_is_added_while_no_server_is_there",
    ),
    bug(
        "a wait while nothing can begin",
        "A job is told that it begins at once although the servers of all workers are away.",
        Edit(
            "api/waits/readiness.py",
            'WAITING if worker.away and worker.state == "ready" else worker.state',
            "worker.state",
        ),
        "tests/api/waits/test_estimates.py::test_a_worker_whose_servers_are_away_begins_nothing",
    ),
    bug(
        "a plan without its fence",
        "A scheduler that was suspended goes on as the leader when it wakes up, over another's decisions.",
        lua(
            "plan",
            "if redis.call('GET', leader_key()) ~= ARGV[1] or redis.call('GET', leader_epoch_key()) ~= ARGV[2]"
            " then return 0 end\n",
            "",
        ),
        PLANS + "a_plan_is_taken_from_the_leader_only",
    ),
    bug(
        "a pool that follows anybody",
        "Workers are started and stopped for a plan that another leader has overturned.",
        lua("act", "if redis.call('GET', leader_epoch_key()) ~= ARGV[1] then return 0 end\n", ""),
        PLANS + "a_pool_acts_only_under_the_current_epoch",
    ),
    bug(
        "an epoch that stays",
        "The next leader has the epoch of the last one: nobody can tell their acts apart.",
        lua("lead", "math.max(epoch + 1, math.floor(now_ms() / 1000))", "math.max(epoch, 1)"),
        PLANS + "one_leads_and_keeps_leading",
    ),
    bug(
        "a scale without its version",
        "A suspended leader sets the number of pods over its successor's.",
        Edit("scheduler/pools/kubernetes.py", "resourceVersion=version),", "),"),
        PODS + "a_leader_stopped_after_its_stamp_is_refused",
    ),
    bug(
        "pods that go undrained",
        "The scale is lowered at once, and running work is cut off when the grace period is over.",
        Edit("scheduler/pools/leaving.py", "want + len(chosen) - len(drained)", "want"),
        PODS + "a_pod_is_drained_before_it_goes",
    ),
    bug(
        "one Deployment for two pools",
        "Two models whose names differ only in a dot or a capital scale the same pods against each other.",
        Edit("scheduler/settings.py", "            if other != pool:\n", "            if not other:\n"),
        "tests/scheduler/test_process.py::test_two_pools_of_one_deployment_are_refused",
    ),
    bug(
        "every machine starts them all",
        "Two machines that follow one plan run twice the workers that are wanted.",
        Edit(
            "cli/pool.py",
            "size = await plans.share(plan.epoch, pool, by, len(members), total)",
            "size = total if len(members) < 99 else None",
        ),
        "tests/cli/test_pool.py::test_two_machines_share_what_is_wanted",
    ),
    bug(
        "one entry ends the scheduler",
        "A process, plan or card that cannot be read ends whoever looks at the fleet.",
        Edit(
            "streaming/fleet/entries.py",
            'is left out: %s", name, kind.__name__, error)\n        return None',
            'is left out: %s", name, kind.__name__, error)\n        raise',
        ),
        MALFORMED + "an_entry_of_the_fleet_that_cannot_be_read_is_left_out",
    ),
    bug(
        "an unreadable override is none",
        "The scheduler decides over the head of somebody whose word it cannot read.",
        Edit("streaming/fleet/overrides.py", ' or Override(by="unreadable")', ' or Override(want=1, by="unreadable")'),
        MALFORMED + "an_override_that_cannot_be_read_is_a_pause",
    ),
    bug(
        "loading holds up the loop",
        "While TensorRT-LLM loads, its worker does not say that it is there.",
        Edit(
            "workers/engines/trtllm/engine.py",
            "library = await asyncio.to_thread(load_library)",
            "library = load_library()",
        ),
        "tests/workers/engines/trtllm/test_engine.py::test_the_event_loop_goes_on_while_it_loads",
    ),
    bug(
        "a sleeper nobody wakes at once",
        "The first request at zero workers waits for the next tick.",
        lua("put", "wake_scheduler(model)", "has_consumer(lane)"),
        PLANS + "a_put_nobody_is_there_for_wakes_the_scheduler",
    ),
)
