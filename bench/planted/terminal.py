"""Planted bugs of the command line: what a terminal shows, short ids, and errors that name their cause."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

IDS = "tests/cli/test_ids.py::test_"
OUTPUT = "tests/cli/test_output.py::test_"
COMMANDS = "tests/cli/test_commands.py::test_"

TERMINAL = (
    bug(
        "the newest of two ids",
        "The beginning of several ids stands for the newest: `jobs cancel` ends a job that nobody meant.",
        Edit("cli/ids.py", "    if len(found) > 1:\n", "    if len(found) > 9999:\n"),
        Edit("cli/ids.py", "return found[0] if len(found) == 1 else given", "return found[0] if found else given"),
        IDS + "two_ids_that_begin_alike_are_an_error",
    ),
    bug(
        "the newest hundred ids",
        "A beginning is completed from a list that is cut off: an older message may begin alike.",
        Edit("cli/ids.py", "    if len(found) == PAGE:\n", "    if len(found) > PAGE:\n"),
        IDS + "a_list_that_is_cut_off_completes_nothing",
    ),
    bug(
        "one page of ids",
        "A beginning is looked up on the first page only: two jobs that begin alike are not told apart.",
        Edit("cli/ids.py", "client.pages(listing.path, sys.maxsize,", "client.pages(listing.path, PAGE,"),
        IDS + "a_beginning_stands_for_the_one_id",
    ),
    bug(
        "progress that wraps",
        "A progress line longer than the terminal begins a new line ten times a second.",
        Edit("cli/progress.py", "room = terminal_width(self._stream) - 1\n", "room = 10_000\n"),
        OUTPUT + "progress_never_wraps",
    ),
    bug(
        "short ids in a pipe",
        "A script that reads a table from a pipe gets ids without their end and times without a date.",
        Edit("cli/output.py", "    if sys.stdout.isatty():\n        lines", "    if True:\n        lines"),
        "tests/cli/test_tables.py::test_a_pipe_gets_whole_ids_and_times",
    ),
    bug(
        "a missing model file starts workers",
        "`penstock up` starts everything, and a worker three times, before it says that the model file is missing.",
        Edit("cli/up.py", "        deployment.check_model_files()\n", ""),
        COMMANDS + "missing_model_file_is_found_before_the_start",
    ),
    bug(
        "a priority without effect",
        "A request with its priority outside `queue` is accepted, and runs on another lane than its sender thinks.",
        Edit("api/openai/refused_fields.py", "name in _QUEUE_FIELDS and", "False and"),
        "tests/api/openai/test_schemas.py::test_an_option_of_the_queue_outside_it_is_refused",
    ),
    bug(
        "the line of another key",
        "An error of a setting names the line after the one that set it.",
        Edit("runtime/sources.py", "left[middle] + 1, left", "left[middle] + 2, left"),
        "tests/runtime/test_sources.py::test_the_line_that_sets_a_key",
    ),
)
