"""Planted bugs of what is measured about abuse, of the audit, and of the verdicts: a program that would not see it."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

ABUSE = "tests/bench/test_abuse.py::test_"
CONNECTIONS = "tests/bench/test_connections.py::test_"
AUDIT = "tests/bench/test_audit.py::test_"
SIM = "tests/workers/engines/sim/test_engine.py::test_"
BESIDE = "the_chat_is_measured_beside_another_tenants_large_request"

MEASUREMENTS = (
    bug(
        "an undecided goal is reached",
        "A figure whose interval contains the bound is taken for a success.",
        Edit("bench/report.py", "if least <= low and high <= most:", "if least <= high and low <= most:"),
        "tests/bench/test_report.py::test_what_is_undecided_is_said_to_be_so",
    ),
    bug(
        "a ratio of medians beside the rounds' ratios",
        "The figure that is judged may lie beyond every round that it stands for.",
        Edit("bench/jobs/__main__.py", "median(rounds) if rounds else of_medians", "of_medians"),
        "tests/bench/test_jobs.py::test_a_ratio_shows_what_it_was_in_each_round",
    ),
    bug(
        "chats before the large request runs",
        "The time beside a large request is measured while the engine is still free.",
        Edit("bench/abuse/__main__.py", "                await bodies[0].begun.wait()\n", ""),
        ABUSE + BESIDE,
    ),
    bug(
        "a large request of the chat's own tenant",
        "What one tenant does to another is not measured.",
        Edit("bench/abuse/__main__.py", "TenantClient(port, LARGE_KEY", "TenantClient(port, CHAT_KEY"),
        ABUSE + BESIDE,
    ),
    bug(
        "a large request of one choice",
        "The chat is measured beside next to nothing.",
        Edit("bench/abuse/__main__.py", "LargeRequest(case.choices,", "LargeRequest(1,"),
        ABUSE + BESIDE,
    ),
    bug(
        "a large request that is over",
        "The chat is measured beside nothing, and nobody says so.",
        Edit("bench/abuse/__main__.py", "                body.check()\n", "                pass\n"),
        ABUSE + "a_large_request_that_ends_spoils_the_measurement",
    ),
    bug(
        "simulated prompts are free",
        "A prompt of any size costs the others nothing, and a large request seems harmless.",
        Edit(
            "workers/engines/sim/engine.py",
            "sequence.prompt_left = sequence.used - sequence.cached",
            "sequence.prompt_left = 0",
        ),
        SIM + "prompts_cost_steps_by_their_tokens",
    ),
    bug(
        "simulated texts are free",
        "A step takes as long for a hundred texts as for one.",
        Edit("workers/engines/sim/engine.py", "if settings.step_ms_per_text:", "if not settings:"),
        SIM + "a_step_is_longer_for_each_text_in_it",
    ),
    bug(
        "a freeze nobody looks for",
        "Hundreds of connections expire at once, everybody waits for seconds, and the 99th percentile is as ever.",
        Edit(
            "bench/connections/__main__.py",
            '("connections.slowed", "connections.held_up") if arm',
            '("connections.slowed", None) if arm',
        ),
        CONNECTIONS + "a_freeze_is_missed_whatever_the_99th_percentile_says",
    ),
    bug(
        "slow connections at another server",
        "Penstock is measured beside nothing.",
        Edit(
            "bench/connections/__main__.py",
            'AT_PENSTOCK: (penstock.port, "api-1"), AT_BARE: (bare, "bare")',
            'AT_PENSTOCK: (bare, "bare"), AT_BARE: (bare, "bare")',
        ),
        CONNECTIONS + "the_whole_program_in_short_form",
    ),
    bug(
        "memory when it is over",
        "What a request took and gave back is not counted.",
        Edit("bench/connections/abuse.py", 'status_mib(pid, "VmHWM")', 'status_mib(pid, "VmRSS")'),
        CONNECTIONS + "memory_that_was_given_back_is_counted",
    ),
    bug(
        "merges bring in nothing",
        "A secret that a merge itself added is not found.",
        Edit("bench/audit/secrets.py", '"--diff-merges=first-parent", ', ""),
        AUDIT + "a_secret_that_only_a_merge_brought_in_is_found",
    ),
    bug(
        "a line that begins with pluses is a header",
        "Whatever follows it in the same patch is not looked at.",
        Edit(
            "bench/audit/secrets.py",
            'if added and line.startswith("+"):',
            'if added and line.startswith("+") and not line.startswith("+++ "):',
        ),
        AUDIT + "the_lines_of_a_patch_are_told_from_its_headers",
    ),
    bug(
        "a disturbed baseline helps",
        "A machine that was busy while chats were alone makes their latency beside a backlog look good.",
        Edit("bench/order/colocation.py", "alone = min(row", "alone = max(row"),
        "tests/bench/order/test_parts.py::test_chats_that_were_disturbed_while_alone_do_not_make_the_ratio_smaller",
    ),
    bug(
        "failures that a repetition hides",
        "A run that failed is repeated until it does not, and the file tells only of the last one.",
        Edit("bench/report.py", "(each.at_most != 0 or each.value != 0 or each.earlier)", "each.at_most != 0"),
        "tests/bench/test_report.py::test_a_run_that_is_repeated_shows_what_the_runs_before_gave",
    ),
    bug(
        "a token of the engine on a GPU stands one place too late",
        "Every text that Penstock is measured with has a hole in its cache, and its words mean nothing.",
        Edit("bench/gpu/slots.py", "len(text.prompt) + text.made - 1)", "len(text.prompt) + text.made)"),
        "tests/bench/test_served.py::test_every_text_has_its_answer_whatever_runs_beside_it",
    ),
    bug(
        "of two fits the one that is nearer to what is held out",
        "The error of the prediction was a reason for it: the loads that are held out test nothing any more.",
        Edit("bench/gpu/served_figures.py", "held_out=not each.held_out)", "held_out=each.held_out)"),
        "tests/bench/test_served.py::test_a_fit_that_is_nearer_to_what_is_held_out_is_not_chosen_for_it",
    ),
    bug(
        "figures of a tree that came while they were measured",
        "A benchmark of half an hour names a commit that landed in its last minute, and that it never ran.",
        Edit("bench/program.py", "        report.commit()  # of the tree that begins to run\n", ""),
        "tests/bench/test_program.py::test_the_commit_is_that_of_the_tree_that_began_to_run",
    ),
    bug(
        "a kill that kills nothing is survived",
        "The worker is never killed, no stream breaks, and the benchmark says that all 16 go on.",
        Edit("bench/gpu/killed.py", "if self.restarts else self.streams", "if self.restarts else 0"),
        "tests/bench/test_served.py::test_a_kill_that_kills_nothing_is_a_missed_goal",
    ),
    bug(
        "the line beside the simulator knows what is held out",
        "What stands beside the simulator's error is the measurement itself: nothing could be nearer.",
        Edit(
            "bench/frontier/loads.py",
            "known = [each.load for each in found if not each.held_out]",
            "known = [each.load for each in found]",
        ),
        "tests/bench/test_frontier.py::test_a_line_between_the_fitted_loads_stands_beside_the_simulator",
    ),
    bug(
        "a run that is judged again was measured by the tree that judges it",
        "The page names a commit that never ran on the machine of the measurement.",
        Edit(
            "bench/program.py",
            "found.measured_in(again) if again else msgspec.structs.replace(found, commit=report.commit())",
            "msgspec.structs.replace(found, commit=report.commit())",
        ),
        "tests/bench/test_report.py::test_a_run_that_is_judged_again_keeps_when_and_on_what_it_was_measured",
    ),
)
