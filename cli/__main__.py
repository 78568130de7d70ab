"""The `penstock` command: runs the subcommand, and maps its outcome to an exit code."""

from __future__ import annotations

import io
import os
import sys

import click

from cli.app import app
from cli.output import Exit, Problem, complain, drop


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code; `penstock help exit-codes` lists them."""
    words = arguments
    if words is None:  # as UTF-8, whatever the locale: questions are text of any script
        words = [os.fsencode(word).decode("utf-8", "surrogateescape") for word in sys.argv[1:]]
    _speak_utf8()
    try:
        code = app.main(words, prog_name="penstock", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _unread()
    except SystemExit as end:  # click's own way out: of shell completion with 0, of a broken pipe with 1
        return _unread() if end.code else Exit.DONE
    except (KeyboardInterrupt, click.Abort):
        return Exit.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the boundary: whatever went wrong becomes an error block and a code
        return _failed(error, as_json="--json" in words, debug="--debug" in words)
    return code if isinstance(code, int) else Exit.DONE


def _unread() -> int:
    """The reader of our output closed the pipe: this is no error, and the exit must flush nothing more into it."""
    drop(sys.__stdout__)  # type: ignore[arg-type]
    return Exit.DONE


def _failed(error: Exception, *, as_json: bool, debug: bool) -> int:
    if debug:
        import traceback  # noqa: PLC0415 - ten milliseconds that only this needs

        traceback.print_exception(error)
    problem = _problem(error)
    complain(problem, as_json=as_json)
    return problem.exit_code


def _problem(error: Exception) -> Problem:
    from penstock.config import ConfigError  # noqa: PLC0415 - not on the path of --help

    match error:
        case Problem():
            return error
        case click.exceptions.NoArgsIsHelpError(ctx=context):
            next_step = f"{context.command_path if context else 'penstock'} --help"
            group = context.command if context else None
            names = group.list_commands(context) if context and isinstance(group, click.Group) else []
            cause = f"it is one of {', '.join(names)}" if names else ""
            return Problem("a command is missing", cause=cause, next_step=next_step, code="usage")
        case click.UsageError(ctx=context):
            page = f"{context.command_path} --help" if context else "penstock --help"
            return Problem(error.format_message(), next_step=page, code="usage")
        case click.ClickException():
            return Problem(error.format_message(), exit_code=error.exit_code)
        case ConfigError():
            from cli.instance import problem_of  # noqa: PLC0415 - as above

            return problem_of(error)
        case _:
            cause = f"{type(error).__name__}: {error}"
            return Problem("the command failed", cause=cause, next_step="the same with --debug shows where")


def _speak_utf8() -> None:
    """Make stdin, stdout and stderr UTF-8: a terminal set up for ASCII alone must not stop an answer. What is piped in
    must be UTF-8, and may begin with a byte order mark."""
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8", "utf-8-sig"):
            stream.reconfigure(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    sys.exit(main())
