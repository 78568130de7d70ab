"""Batch runner of the CLI: uploads a batch, waits for it, downloads its results, and resumes an interrupted run.

A small state file beside the output records the progress before each step that must not be repeated.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from cli.batch_input import Prepared, Recipe, prepare
from cli.client import Client
from cli.errors import DONE, ENDED_BADLY, INTERRUPTED, USAGE, Problem
from cli.output import note
from cli.progress import ProgressLine
from penstock.files import replacing, write_file
from penstock.text import counted

FINAL = ("completed", "failed", "expired", "cancelled")
POLL_INTERVAL_S = 0.5


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """State file: what an earlier run has done."""

    digest: str
    """Digest of the input and its options."""
    key: str
    """The batch's idempotency key, so that a repeated creation yields the same batch."""
    file: str = ""
    batch: str = ""


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One run, with the command's arguments."""

    client: Client
    source: Path
    target: Path
    recipe: Recipe
    window: str
    again: bool

    @property
    def errors(self) -> Path:
        """The file for failed lines."""
        return self.target.with_name(f"{self.target.stem}.errors{self.target.suffix or '.jsonl'}")

    @property
    def _note(self) -> Path:
        return self.target.with_name(self.target.name + ".batch")

    def start(self) -> dict[str, Any]:
        """Run to the end and return the batch's final state. Ctrl-C stops watching, not the batch."""
        with ProgressLine(sys.stderr, os.environ) as progress:
            batch = self._batch(progress)
            try:
                while batch["status"] not in FINAL:
                    show(progress, batch)
                    time.sleep(POLL_INTERVAL_S)
                    batch = self.client.get(f"/v1/batches/{batch['id']}")
            except KeyboardInterrupt:
                counts = batch["request_counts"]
                done = f"{counts['completed'] + counts['failed']} of {counted(counts['total'], 'line')} done"
                progress.say(f"{batch['id']}: {done}, {counts['failed']} of them failed")
                raise
            progress.phase("fetching the answers")
            self._fetch(batch["output_file_id"], self.target)
            self._fetch(batch["error_file_id"], self.errors)
        return batch

    def _batch(self, progress: ProgressLine) -> dict[str, Any]:
        """Return the batch of an earlier run, or create it."""
        progress.phase(f"reading {self.source}")
        with tempfile.TemporaryFile() as lines:
            prepared = prepare(self.source, self.recipe, lines)
            begun = self._begun(prepared)
            if begun.batch:
                try:
                    return self.client.get(f"/v1/batches/{begun.batch}")
                except Problem as problem:
                    if problem.code != "batch_not_found":
                        raise
                    begun = self._begin(prepared)
            if not begun.file:
                uploaded = self._upload(progress, lines)
                begun = self._keep(msgspec.structs.replace(begun, file=uploaded["id"]))
        body = {"input_file_id": begun.file, "endpoint": prepared.endpoint, "completion_window": self.window}
        batch = self.client.post("/v1/batches", body, **{"Idempotency-Key": begun.key})
        self._keep(msgspec.structs.replace(begun, batch=batch["id"]))
        return batch

    def _begun(self, prepared: Prepared) -> Begun:
        try:
            begun = msgspec.json.decode(self._note.read_bytes(), type=Begun)
        except FileNotFoundError:
            return self._begin(prepared)
        except OSError as error:
            raise self._unusable(error) from None
        except msgspec.MsgspecError as error:
            raise Problem(f"{self._note} cannot be read", cause=str(error), next_step=f"rm {self._note}") from None
        if self.again:
            return self._begin(prepared)
        if begun.digest != self._digest(prepared):
            raise Problem(
                f"{self.target} belongs to another run",
                cause="its input or its options were different",
                next_step="another -o, or --again to start over",
                exit_code=USAGE,
                code="another_run",
            )
        if begun.batch:
            note(f"going on with {begun.batch}")
        return begun

    def _begin(self, prepared: Prepared) -> Begun:
        return self._keep(Begun(digest=self._digest(prepared), key=secrets.token_hex(16)))

    def _digest(self, prepared: Prepared) -> str:
        return f"{prepared.digest}:{self.window}"

    def _keep(self, begun: Begun) -> Begun:
        try:
            write_file(self._note, msgspec.json.encode(begun))
        except OSError as error:
            raise self._unusable(error) from None
        return begun

    def _unusable(self, error: OSError) -> Problem:
        """The error for a folder of the output that this user cannot use."""
        cause = error.strerror or str(error)
        return Problem(f"{self.target.parent} cannot be used", cause=cause, next_step="choose another -o")

    def _upload(self, progress: ProgressLine, lines: BinaryIO) -> dict[str, Any]:
        total = lines.seek(0, os.SEEK_END)
        lines.seek(0)
        name = f"{self.source.stem or 'batch'}.jsonl"
        return self.client.upload(
            "/v1/files", name, lines, on_read=lambda done: progress.amount("uploading", done, total), purpose="batch"
        )

    def _fetch(self, file_id: str | None, target: Path) -> None:
        """Download a file completely or not at all. Without one, delete an old `target`, which is not this batch's."""
        if not file_id:
            target.unlink(missing_ok=True)
            return
        try:
            with replacing(target) as write:
                self.client.download(f"/v1/files/{file_id}/content", write)
        except OSError as error:
            raise Problem(f"cannot write {target}", cause=error.strerror or str(error)) from None


def show(progress: ProgressLine, batch: dict[str, Any]) -> None:
    """Show the progress: lines done, rate, ETA, failures."""
    counts = batch["request_counts"]
    done, total = counts["completed"] + counts["failed"], counts["total"]
    state = "paused" if batch["paused"] else batch["status"]
    words = [state] if state != "in_progress" else []
    if rate := batch["lines_per_second"]:
        words += [f"{rate:.1f}/s", f"ETA {duration((total - done) / rate)}"]
    if counts["failed"]:
        words.append(f"{counts['failed']} failed")
    progress.steps(str(batch["id"]), done, total, "  ".join(words))


def duration(seconds: float) -> str:
    """A duration in its two largest units."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def watched(run: BatchRun) -> tuple[dict[str, Any] | None, int]:
    """Run, and return the batch's final state and the exit code; None after Ctrl-C."""
    try:
        batch = run.start()
    except KeyboardInterrupt:
        note("\nnot watching any more; the batch goes on, and the same command takes it up again")
        return None, INTERRUPTED
    failed = batch["request_counts"]["failed"]
    return batch, DONE if batch["status"] == "completed" and not failed else ENDED_BADLY
