"""Child process that validates texts against JSON schemas: `python -P json_check.py`, started by workers/checker.py.

Schema and text come from users, and a small schema can take a validator hours or exhaust its stack. So a check runs
in this process, which has a limit of CPU time per check and a limit of memory. It imports nothing of Penstock.

Messages on stdin and stdout: four bytes of length, big-endian, then JSON. A request is {"schema", "texts"}; the answer
is {"violation": why a text does not follow the schema, "" if all do} or {"unusable": why the schema cannot be checked}.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from typing import Any, NoReturn

import jsonschema_rs

CHECK_CPU_S = 2.0
"""SIGPROF kills this process beyond it, because the validator cannot be interrupted."""

MAX_MEMORY_BYTES = 1 << 30
MAX_REGEX_BYTES = 1 << 20
"""For one compiled pattern, and for the cache of its automaton. Matching takes linear time."""

MAX_BACKTRACKS = 100_000

MAX_QUOTED = 300
"""Characters of a validator's message that an answer quotes."""


def main() -> None:
    """Answer requests until stdin closes, as it does when the worker exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker handles Ctrl-C
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while len(head := sys.stdin.buffer.read(4)) == 4:
        request = json.loads(sys.stdin.buffer.read(int.from_bytes(head, "big")))
        signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_S)
        answer = json.dumps(check(request["schema"], request["texts"])).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(len(answer).to_bytes(4, "big") + answer)
        sys.stdout.buffer.flush()


def check(schema: Any, texts: list[str]) -> dict[str, str]:
    """The answer to one request."""
    if (circle := _circle(schema)) is not None:
        return {"unusable": f"the reference {circle[:MAX_QUOTED]!r} leads back to itself"}
    limits = {"size_limit": MAX_REGEX_BYTES, "dfa_size_limit": MAX_REGEX_BYTES}
    try:
        validator = _validator(schema, jsonschema_rs.RegexOptions(**limits))
    except ValueError:
        try:  # with look-around and back-references, whose matching may take exponential time
            validator = _validator(schema, jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS, **limits))
        except ValueError as error:
            return {"unusable": _short(error)}
    for text in texts:
        try:
            validator.validate(json.loads(text, parse_constant=_no_constant))
        except jsonschema_rs.ValidationError as error:
            path = "".join(f"[{part!r}]" for part in error.instance_path)
            return {"violation": f"at {path or 'its root'}: {error.message[:MAX_QUOTED]}"}
        except ValueError as error:  # not JSON, or nothing that the validator can hold
            return {"violation": _short(error)}
        except RecursionError:
            return {"violation": "it is nested too deeply"}
    return {"violation": ""}


def _circle(schema: Any) -> str | None:
    """A reference to a definition that is nothing but references back to it; None if there is none. The validator takes
    it for a schema of any value."""
    known = {
        f"#/{section}/{name}": value
        for section in ("$defs", "definitions")
        if isinstance(schema, dict) and isinstance(named := schema.get(section), dict)
        for name, value in named.items()
    }
    for first in known:
        at, seen = first, set[str]()
        while isinstance(value := known.get(at), dict) and isinstance(value.get("$ref"), str):
            if at in seen:
                return first
            seen.add(at)
            at = value["$ref"]
    return None


def _validator(schema: Any, patterns: Any) -> Any:
    """Raises ValueError."""
    return jsonschema_rs.validator_for(
        schema,
        validate_formats=False,  # annotations, as JSON Schema has it
        offline=True,  # references to other documents are refused
        pattern_options=patterns,
    )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0][:MAX_QUOTED]


if __name__ == "__main__":
    main()
