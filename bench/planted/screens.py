"""Planted bugs of what people read: the verdict of the screens, the state of a worker, the words of a report."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

VERDICT, TOP, PS = (
    "tests/api/admin/test_verdict.py::test_",
    "tests/cli/test_top.py::test_",
    "tests/cli/test_ps.py::test_",
)
UNNAMED = "tests/telemetry/report/test_unnamed.py::test_"

SCREENS = (
    bug(
        "a verdict that asks for workers where the server is away",
        "The only server of a model is away, and the screens ask for more workers, which would change nothing.",
        Edit("api/admin/verdict.py", 'if away and len(away) == pool["ready"]:', "if False:"),
        VERDICT + "a_server_that_is_away_is_named_and_no_more_workers_are_asked_for",
    ),
    bug(
        "a verdict that stops at the first server that is away",
        "One of two servers is away, and the screens say that no job runs.",
        Edit("api/admin/verdict.py", 'if away and len(away) == pool["ready"]:', "if away:"),
        VERDICT + "a_server_that_is_away_from_one_worker_only_stops_nothing",
    ),
    bug(
        "a worker that top calls ready while its server is away",
        "Every line of `penstock top` is green, and no job ends.",
        Edit("cli/top_view.py", 'each.get("away") and each["state"] == "ready"', "False"),
        TOP + "a_worker_whose_server_is_away_is_not_ready",
    ),
    bug(
        "a worker that ps calls ready while its server is away",
        "`penstock ps` shows a pool that serves, and no job ends.",
        Edit("cli/ps.py", 'each["away"] and each["state"] == "ready"', "False"),
        PS + "a_worker_whose_server_is_away_is_not_ready",
    ),
    bug(
        "a pool without a worker that counts as well",
        "Every worker crashes at its start, and the overview says that jobs start at once.",
        Edit("api/admin/verdict.py", '(pool["want"] or 0) > 0', "False"),
        VERDICT + "each_cause_has_its_words_and_a_next_step",
    ),
    bug(
        "a large share of waiting without a word",
        "The report's first sentence says that most of the time was waiting, and nothing below says why.",
        Edit("telemetry/report/advice.py", "    found += unnamed(", "    unnamed("),
        UNNAMED + "few_requests_that_waited_are_told_with_their_number",
    ),
    bug(
        "waiting that is told twice",
        "A report that has named a full pool names the waiting again, as if it were another problem.",
        Edit("telemetry/report/unnamed.py", "if part not in explained}", "if part}"),
        UNNAMED + "what_a_bottleneck_explains_is_not_told_again",
    ),
    bug(
        "waiting that another model's finding explains",
        "A lane of one model starves, so nothing is said of the requests of another that waited for minutes.",
        Edit("telemetry/report/unnamed.py", ' if each.model in ("", group.name)}', "}"),
        UNNAMED + "what_explains_the_waiting_of_one_model_explains_that_of_no_other",
    ),
)
