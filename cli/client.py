"""API client of the CLI: finds the API by a command's flags, asks it, completes ids, and gives failures exit codes."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self
from urllib.parse import urlencode, urlsplit

import click
import httpx2

from api.settings import ApiSettings
from api.tls import trusting
from cli.instance import DataDir, url_of
from cli.options import F, Where
from cli.output import Exit, Problem, note
from penstock.client import (
    EMPTY,
    ApiRefusal,
    EventsUnreadable,
    InvalidAddress,
    InvalidRequest,
    NoAnswer,
    Pause,
    PenstockClient,
    StreamEvent,
    refusal_of,
    without_login,
)
from penstock.text import read_text

KEY = "PENSTOCK_API_KEY"
CONNECT_TIMEOUT_S = 5.0
PATIENCE_S = 60.0
"""How long a command that waits for an answer tries again while no server answers."""
PAGE = 100
NAME_ONE = "--url http://HOST:8000 (or PENSTOCK_URL)"
ADMIN = "/admin/"
NEXT_STEPS = {
    "model_not_found": "name one of these with --model, or leave the model out",
    "job_not_found": "penstock jobs ls",
    "batch_not_found": "penstock batch ls",
    "dead_letter_not_found": "penstock dlq ls",
    "webhook_not_found": "penstock webhooks ls",
    "tenant_not_found": "penstock tenants",
    "permission_denied": "use a key with admin = true",
    "admin_token_required": f"use --data-dir FOLDER, or set {KEY} to the contents of FOLDER/run/admin-token",
}
"""What to do about a refusal, by its code: mostly the command that lists the right names."""
SAME_MACHINE = ("127.0.0.1", "localhost", "::1")
"""Host names of an instance on this machine."""


class Client:
    """Client of one API. Its methods raise Problem, with an exit code, for every failure but a job's own end.

    Args:
        home: data folder of the instance, if it is known to run on this machine: its first answer is waited for.
        certificate: file of the only certificate to trust; None: the authorities of this machine or SSL_CERT_FILE.
    """

    key: str
    """Sent as a bearer token; "" if there is none."""

    def __init__(
        self, url: str, key: str, *, model: str = "", home: DataDir | None = None, certificate: Path | str | None = None
    ) -> None:
        self.url, self.key, self._model, self._home = url.rstrip("/"), key, model, home
        self._admin_token = _kept_key(home.admin_token) if home else ""
        with self._explained():
            first_s = PATIENCE_S if home else 0.0
            trust = trusting(certificate) if certificate else None
            self._api = PenstockClient(url, key, patience_s=PATIENCE_S, first_patience_s=first_s, trust=trust)
        self._api.http.event_hooks["response"] = [_note_ignored]

    def worker_problem(self, model: str) -> str:
        """That no worker of a model is ready, and why, as `penstock ps` has it; "" if one is, or if the instance runs
        on another machine."""
        instance = self._home.read() if self._home is not None else None
        return instance.worker_problem(model) if instance is not None else ""

    def on_retry(self, tell: Callable[[Pause], object]) -> None:
        """Call `tell` before each wait for another try."""
        self._api.on_retry = tell

    @classmethod
    def find(cls, where: Where) -> Client:
        """Find the API by --url or by the running instance of the data folder. If the folder was not given and is new,
        and there is no key, try Redis, then the configured port. Any program may answer there, so a key is never sent
        to them. Raises Problem, also if other users can read the key's file, or while the instance only prepares its
        start.
        """
        home, named = where.home(), os.environ.get(KEY, "")
        instance = home.read() if where.url or not where.redis_url else None
        if instance is not None and (not where.url or _address(where.url) == _address(instance.url)):
            if instance.state == "starting" and not instance.processes:
                what, next_step = f"penstock is starting in {home.path}", "wait for it: penstock ps"
                raise Problem(what, cause=instance.phase, next_step=next_step, code="not_running")
            # To its own address, not to `where.url`: another process may listen on that port of localhost or ::1.
            model = "" if where.url else instance.models[0]
            key, certificate = named or _kept_key(home.api_key), instance.certificate
            return cls(instance.url, key, model=model, home=home, certificate=certificate)
        if where.url:
            return cls(where.url, named)
        config = where.config()
        by_redis = "url" in config.raw.get("redis", {})
        key, is_other = named or _kept_key(home.api_key), where.data_dir and not where.redis_url
        if by_redis and key and not is_other:
            what = "an API key is not sent to an address out of Redis"
            cause = "every process that may write there can name an API"
            raise Problem(what, cause=cause, next_step=NAME_ONE, code="address_required")
        if is_other or key or (home.was_used() and not by_redis):
            what, next_step = f"nothing is running in {home.path}", f"penstock up, or {NAME_ONE}"
            cause = "an API key is not sent to whoever may listen at the configured port" if key else ""
            raise Problem(what, cause=cause, next_step=next_step, code="not_running")
        api = config.section("api", ApiSettings)
        if not by_redis:
            return cls(url_of(api.host, api.port, api.scheme), "", certificate=api.tls_certificate)
        from cli.registry import processes  # noqa: PLC0415 - imports a Redis client, rarely needed

        urls = (each.url for each in processes(config) if each.role == "api" and each.url and each.state == "ready")
        if url := next(urls, ""):
            return cls(url, "", certificate=api.tls_certificate)
        raise Problem("no API process is registered in this Redis", next_step="penstock up", code="unreachable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.close()

    def default_model(self) -> str:
        """The instance's default model, else the first model served."""
        if not self._model:
            models = self.get("/v1/models")["data"]
            if not models:
                raise Problem("no model is served there", next_step="penstock ps")
            self._model = str(models[0]["id"])
        return self._model

    def get(self, path: str, *, patient: bool = False, job_id: str = "", **params: Any) -> dict[str, Any]:
        """Get a JSON response. Parameters that are None are omitted. `patient`: as a command that waits for an answer,
        try again while no server answers. `job_id`: the job that goes on without this command."""
        query = urlencode({name: value for name, value in params.items() if value is not None})
        return self._json("GET", f"{path}?{query}" if query else path, patient=patient, job_id=job_id)

    def pages(self, path: str, limit: int, **params: Any) -> Iterator[dict[str, Any]]:
        """Yield up to `limit` objects of a list, fetching pages as needed."""
        while limit > 0:
            page = self.get(path, **params, limit=min(limit, PAGE))
            yield from page["data"][:limit]
            limit -= len(page["data"])
            if not page["has_more"]:
                return
            params |= {"cursor": page["next_cursor"]} if "next_cursor" in page else {"after": page["last_id"]}

    def submit(self, body: Mapping[str, Any], idempotency_key: str = "") -> dict[str, Any]:
        """Put a job in the queue, once however often it must be sent."""
        with self._explained():
            return self._api.submit(body, idempotency_key=idempotency_key)

    def wait(self, job_id: str, timeout_s: float) -> dict[str, Any]:
        """Return the job once it has completed. Raises JobFailed, WaitTimeout."""
        with self._explained(job_id=job_id):
            return self._api.wait(job_id, timeout_s)

    def stream(self, job_id: str, after: str = "") -> Iterator[StreamEvent]:
        """Yield a job's events after a cursor to its end. Raises JobFailed, StreamReset."""
        with self._explained(job_id=job_id):
            yield from self._api.stream(job_id, after)

    def post(self, path: str, body: Mapping[str, Any], **headers: str) -> dict[str, Any]:
        return self._json("POST", path, dict(body), headers)

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._json("PUT", path, dict(body))

    def delete(self, path: str) -> dict[str, Any]:
        return self._json("DELETE", path)

    def upload(self, path: str, name: str, file: BinaryIO, **fields: str) -> dict[str, Any]:
        """Upload a file as a form, streamed."""
        form = {"file": (name, file, "application/jsonl")}
        with self._streamed("POST", path, data=fields, files=form) as response:
            return dict(json.loads(response.read()))

    def download(self, path: str, write: Callable[[bytes], object]) -> None:
        """Write a response's bytes as they arrive."""
        with self._streamed("GET", path) as response:
            for chunk in response.iter_bytes():
                write(chunk)

    def lines(self, path: str) -> Iterator[bytes]:
        """Yield the lines of a response of JSON lines, which end at a newline only."""
        rest = b""
        with self._streamed("GET", path) as response:
            for chunk in response.iter_bytes():
                *whole, rest = (rest + chunk).split(b"\n")
                yield from filter(None, whole)

    @contextmanager
    def _streamed(self, method: str, path: str, **options: Any) -> Iterator[httpx2.Response]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout, url = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S), self._api.url + path
        try:
            with (
                self._explained(),
                self._api.http.stream(method, url, headers=headers, timeout=timeout, **options) as response,
            ):
                if response.status_code >= 400:
                    raise refusal_of(response.status_code, response.read(), response.headers.get("x-request-id", ""))
                yield response
        except httpx2.TransportError as error:
            raise _no_penstock(self._api.url, str(error) or type(error).__name__) from None

    def _json(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] = EMPTY,
        *,
        patient: bool = False,
        job_id: str = "",
    ) -> dict[str, Any]:
        """One try, unless `patient`: a command that a person typed ends at once where nothing answers."""
        if self._admin_token and path.startswith(ADMIN):
            headers = {**headers, "Authorization": f"Bearer {self._admin_token}"}
        with self._explained(path, job_id):
            return self._api.request(method, path, body, headers, tries_again=patient)

    @contextmanager
    def _explained(self, path: str = "", job_id: str = "") -> Iterator[None]:
        """Raises Problem for what is wrong in the block. `job_id`: the job that goes on without it."""
        try:
            yield
        except NoAnswer as error:
            raise _no_penstock(error.url, error.cause, job_id) from None
        except ApiRefusal as error:
            exit_code = Exit.FORBIDDEN if error.status in (401, 403) else Exit.FAILED
            more = {"next_step": self._next_step(error.code, path), "request_id": error.request_id}
            raise Problem(error.message, exit_code=exit_code, code=error.code, **more) from None
        except EventsUnreadable as error:
            raise Problem(error.message, code=error.code) from None
        except InvalidRequest as error:
            raise Problem(str(error), code="usage") from None
        except InvalidAddress as error:
            what, next_step = f"{without_login(self.url)} is no address", "e.g. http://127.0.0.1:8000"
            raise Problem(what, cause=str(error), next_step=next_step, code="usage") from None

    def _next_step(self, code: str, path: str) -> str:
        """What to do about a refusal; "" if its message says so."""
        if code == "invalid_api_key":
            key = "an admin key" if path.startswith(ADMIN) else "a key"
            return f"set {KEY} to {key} of [keys], or put it in the file `api-key` (mode 0600) of the data folder"
        if code == "misdirected_request" and not (self.key or self._admin_token):
            port = urlsplit(self._api.url).port or 80
            return f"use --url http://127.0.0.1:{port} (ssh -L from another machine), or configure a key"
        return NEXT_STEPS.get(code, "")


def _no_penstock(url: str, cause: str, job_id: str = "") -> Problem:
    next_step = "penstock up, or say where: --url or --data-dir"
    if job_id:
        next_step = f"the job goes on: penstock jobs result {job_id}"
    what = f"no penstock answers at {without_login(url)}"
    return Problem(what, cause=cause, next_step=next_step, code="unreachable")


def _address(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port; all names of this machine count as one host."""
    try:
        parts = urlsplit(url)
        host = SAME_MACHINE[0] if parts.hostname in SAME_MACHINE else parts.hostname
        return parts.scheme, host, parts.port
    except ValueError:  # the request will report the error
        return "", None, None


def _note_ignored(response: httpx2.Response) -> None:
    """Tell which fields of the request had no effect."""
    if fields := response.headers.get("x-ignored-fields"):
        note(f"ignored by the server: {fields}")


def _kept_key(path: Path) -> str:
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise Problem(f"{path} can be read by others", next_step=f"chmod 600 {path}", code="key_exposed")
        return read_text(path).strip()
    except FileNotFoundError:
        return ""
    except PermissionError as error:
        next_step = "run the command as that user, or give --url and set PENSTOCK_API_KEY"
        raise Problem(f"{path} belongs to another user", next_step=next_step, code="key_unreadable") from error


BEGINNING = re.compile(r"(?:job_|batch_|msg_|key_)[0-9a-f]{4,31}|[0-9]{1,3}-[0-9]{4,15}")
"""Beginning of an id. At least four digits, because commands that cancel and drop take beginnings, too."""
DIGITS = re.compile(r"[0-9a-f]{1,32}")
"""An id without the word at its front."""
TOO_SHORT = re.compile(r"(?:job_|batch_|msg_|key_)[0-9a-f]{0,3}|[0-9]{1,3}-[0-9]{0,3}")
MAX_NAMED = 5
"""Candidates that an error names."""


class Listing(NamedTuple):
    """The list that has all ids of one kind. `front` is the word that they begin with; `other` is a field whose ids are
    taken, too; one that is not `whole` has only the newest PAGE."""

    path: str
    noun: str
    front: str = ""
    other: str = ""
    whole: bool = True


LISTINGS = {
    "job_id": Listing("/v1/jobs", "job", "job_"),
    "batch_id": Listing("/v1/batches", "batch", "batch_"),
    "letter_id": Listing("/admin/dlq", "dead letter", other="job_id", whole=False),
    "message_id": Listing("/admin/webhooks", "webhook message", "msg_", whole=False),
    "key_id": Listing("/admin/keys", "key", "key_", whole=False),
}
"""By the name of a command's argument."""


def whole_id(client: Client, argument: str, given: str) -> str:
    """Complete the beginning of an id, with or without its front, from the whole list. A whole id, and text that begins
    none, is returned unchanged: the server then answers. Raises Problem if it is too short, if several ids begin so, or
    if the list is cut off before its end."""
    listing = LISTINGS[argument]
    if listing.front and DIGITS.fullmatch(given):
        given = listing.front + given
    if TOO_SHORT.fullmatch(given):
        what = f"{given} is too short to stand for one {listing.noun}"
        raise Problem(what, next_step="give more digits: at least four", code="ambiguous_id")
    if not BEGINNING.fullmatch(given):
        return given
    if listing.whole:
        rows = list(client.pages(listing.path, sys.maxsize))
    elif len(rows := client.get(listing.path, limit=PAGE)["data"]) == PAGE:
        cause = f"the server lists only the newest {PAGE}"
        next_step = "give the whole id; a pipe or --json of `ls` shows it"
        raise Problem(f"{given} cannot be completed", cause=cause, next_step=next_step, code="ambiguous_id")
    ids = dict.fromkeys(str(each.get(field) or "") for each in rows for field in ("id", listing.other))
    found = [each for each in ids if each.startswith(given)]
    if len(found) > 1:
        names = ", ".join(found[:MAX_NAMED]) + (" …" if len(found) > MAX_NAMED else "")
        what = f"{given} is the beginning of several {listing.noun} ids"
        raise Problem(what, cause=names, next_step="give more digits", code="ambiguous_id")
    return found[0] if found else given


def whole_ids(client: Client, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Those of a command's arguments that are ids, as whole ones."""
    return {name: whole_id(client, name, given) for name, given in arguments.items() if name in LISTINGS}


def limit_option(most: int | None = None) -> Callable[[F], F]:
    """Add --limit to a command that lists."""
    kind = click.IntRange(1, most)
    return click.option("--limit", type=kind, default=20, show_default=True, help="Maximum number, newest first.")
