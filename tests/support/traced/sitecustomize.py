"""Read by every interpreter that finds this folder on its path: notes through which files a job and its tokens go.

For each call of one of SENDS, one JSON line to the file that TRACED_CALLS names: the files of the project on the call
stack, the outermost first, a file in a row named once; and the beginning of what is sent.
"""

import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

TREE = Path(__file__).parents[3].as_posix() + "/"
STARTS = ("penstock/process.py", "/__main__.py")
"""Files that start the event loop: they are below every call."""
SENDS = {
    "HttpToolsProtocol._start_asgi_task": "cycle",
    "Rounds.ask": "item",
    "PipelinedProtocol.send": "commands",
    "TokenFlow.write": "row",
}
"""Functions that hand a job or a token on to another task or process, and the argument with what they hand on."""


def _files(frame: FrameType | None) -> list[str]:
    files: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename.removeprefix(TREE)
        if not name.startswith(("/", "<", "tests/", ".venv/")) and files[-1:] != [name]:
            files.append(name)
        frame = frame.f_back
    files.reverse()
    while files and files[0].endswith(STARTS):
        del files[0]
    return files


def _note(frame: FrameType, event: str, argument: Any) -> None:
    sent = SENDS.get(frame.f_code.co_qualname) if event == "call" else None
    if sent:
        line = {"files": _files(frame), "sent": str(frame.f_locals[sent])[:2000]}
        with Path(os.environ["TRACED_CALLS"]).open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


if "TRACED_CALLS" in os.environ:
    sys.setprofile(_note)
