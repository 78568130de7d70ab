"""Child process that validates texts against JSON schemas: `python -P json_check.py`, started by workers/checker.py.

Schema and text come from users, and a small schema can take a validator hours or exhaust its stack. So a check runs
in this process, which has a limit of CPU time per check and a limit of memory. It imports nothing of Penstock.

Messages on stdin and stdout: four bytes of length, big-endian, then JSON. A request is {"schema", "texts"}, with the
plain form of a schema (workers/engines/schema.py); the answer is {"violation": why a text does not follow the schema,
"" if all do} or {"unusable": why the schema cannot be checked}.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jsonschema_rs

CHECK_CPU_S = 2.0
"""SIGPROF kills this process beyond it, because the validator cannot be interrupted."""

MAX_MEMORY_BYTES = 1 << 30
MAX_REGEX_BYTES = 1 << 20
"""For one compiled pattern, and for the cache of its automaton. Matching takes linear time."""

MAX_BACKTRACKS = 100_000

MAX_QUOTED = 300
"""Characters of what is said of a schema, which may have long names."""


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
    limits = {"size_limit": MAX_REGEX_BYTES, "dfa_size_limit": MAX_REGEX_BYTES}
    try:
        validator = _validator(schema, jsonschema_rs.RegexOptions(**limits))
    except ValueError:
        try:  # with look-around and back-references, whose matching may take exponential time
            validator = _validator(schema, jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS, **limits))
        except ValueError as error:
            return {"unusable": f"{_pointer(schema, getattr(error, 'instance_path', ()))} is not valid"[:MAX_QUOTED]}
    for text in texts:
        try:
            validator.validate(json.loads(text, parse_constant=_no_constant))
        except jsonschema_rs.ValidationError as error:
            return {"violation": _violation(schema, error)}
        except ValueError:  # nothing that the validator can hold, either
            return {"violation": "it is not JSON"}
        except RecursionError:
            return {"violation": "it is nested too deeply"}
    return {"violation": ""}


def _pointer(schema: Any, path: Sequence[Any]) -> str:
    """The place of a keyword as the client wrote it. `path`: in the plain schema."""
    at, steps = "#", [str(step) for step in path]
    if steps[:1] == ["$defs"]:
        at, steps = schema["$defs"][steps[1]]["$comment"], steps[2:]
    return at + "".join([f"/{step.replace('~', '~0').replace('/', '~1')}" for step in steps])


def _violation(schema: Any, error: Any) -> str:
    path = "".join(f"[{part!r}]" for part in error.instance_path)
    return f"at {path or 'its root'}, {_pointer(schema, error.schema_path)} of the schema is not kept"[:MAX_QUOTED]


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


if __name__ == "__main__":
    main()
