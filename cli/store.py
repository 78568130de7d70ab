"""`penstock store`: shows the store's identity and contents, adopts a folder of files, prints ACL users, or resets."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import click

from cli.app import Group
from cli.embedded import start_embedded
from cli.instance import DataDir
from cli.options import Where, command
from cli.output import CommandResult, Problem, note, print_table
from cli.registry import connected, store_settings, unreachable
from cli.supervisor import Supervisor
from penstock.text import counted
from streaming.batches.file_store import FileStore
from streaming.errors import Unavailable
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store import identity as identities
from streaming.store.acl import acl_file

REDIS_START_S = 60.0
WORDS = {
    "keys": "keys",
    "unfinished": "jobs that wait or run",
    "running": "of these, held by workers",
    "jobs": "records of jobs",
    "batches_unfinished": "batches that have not ended",
    "batches": "records of batches",
    "files": "records of files",
    "dead_letters": "dead letters",
    "events": "events not passed on",
    "webhooks": "webhook messages not delivered",
}


@click.group(cls=Group)
def store() -> None:
    """Show what the store is, adopt a folder of files, or delete everything.

    \b
    Examples:
      penstock store show
      penstock store reset
    """


def with_store(function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """Let a coroutine be a command: it gets a connected client, and the folder of files. Raises Problem if Redis is
    unavailable."""

    @functools.wraps(function)
    def call(where: Where, **given: Any) -> Any:
        async def run() -> Any:
            async with _store(where) as settings, connected(settings) as client:
                files = FileStore(where.home().files_of(where.config()))
                return await function(client, files, where=where, **given)

        try:
            return asyncio.run(run())
        except Unavailable as error:
            instance = None if where.redis_url else where.home().read()
            raise unreachable("the store cannot be reached", error, where.config(), instance) from None

    call.__annotations__ = function.__annotations__  # `command` reads them; from 3.14 on, `wraps` does not copy them
    return call


@command("show", store)
@with_store
async def show(store_client: RedisClient, files: FileStore, where: Where) -> CommandResult:
    """Show format, partitions and deployment of the store, and the deployment of the folder of files.

    \b
    Examples:
      penstock store show
      penstock store show --redis-url redis://127.0.0.1:6379/0
    """
    identity = await identities.read_identity(store_client)
    facts: dict[str, Any] = {
        "format": identity.format if identity else None,
        "needed_format": identities.FORMAT,
        "partitions": identity.partitions if identity else None,
        "deployment": identity.deployment if identity else None,
        "files": str(files.folder),
        "files_deployment": files.owner or None,
        "files_quarantined": files.quarantined(),
    }
    rows = [(name.replace("_", " "), "-" if value is None else str(value)) for name, value in facts.items()]
    return CommandResult(facts, lambda: print_table(("FIELD", "VALUE"), rows))


@command("adopt", store)
@click.option("--yes", is_flag=True, help="Do it.")
@with_store
async def adopt(store_client: RedisClient, files: FileStore, yes: bool, where: Where) -> None:
    """Declare that the folder of files belongs to this store.

    For a store that was emptied or replaced on purpose. From then on files that the store has no record of are moved
    into the folder `quarantine` beside them, and removed after [files] quarantine_s.

    \b
    Examples:
      penstock store adopt
      penstock store adopt --yes
    """
    identity = await identities.enter_store(store_client) if yes else await identities.read_identity(store_client)
    if identity is not None:
        identities.check_identity(identity, store_client.settings)
    before = files.owner
    if identity is not None and before == identity.deployment:
        note(f"{files.folder} belongs to this store already")
        return
    if not yes or identity is None:
        is_now = identity.deployment if identity else "of no deployment yet: it is given one with --yes"
        what = f"nothing was changed: {files.folder} belongs to {before or 'no deployment'}, the store is {is_now}"
        cause = "once it is adopted, files that this store has no record of are moved into quarantine"
        raise Problem(what, cause=cause, next_step="penstock store adopt --yes", code="not_confirmed")
    files.adopt(identity.deployment)
    note(f"{files.folder} belongs to {identity.deployment} now")


@command("reset", store)
@click.option("--yes", is_flag=True, help="Delete it.")
@with_store
async def reset(store_client: RedisClient, files: FileStore, yes: bool, where: Where, as_json: bool) -> None:
    """Delete everything Penstock keeps in its store: jobs, results, batches, records of files.

    Nothing else in that Redis is touched, and no file is. Without --yes it only counts what would be deleted.

    \b
    Examples:
      penstock store reset
      penstock store reset --yes
    """
    names = await identities.live_processes(store_client)
    if names and yes:
        what = f"{counted(len(names), 'process uses', 'processes use')} this store: {', '.join(names[:5])}"
        next_step = "stop them first: penstock down, or SIGTERM; they are forgotten ten seconds later"
        raise Problem(what, next_step=next_step, code="in_use")
    counts = await identities.count_contents(store_client)
    deleted = await identities.reset_store(store_client) if yes else 0
    rows = [(words, str(counts[name])) for name, words in WORDS.items()]
    CommandResult(counts, lambda: print_table(("WHAT", "NUMBER"), rows)).print(as_json=as_json)
    if not yes:
        what = "nothing was deleted; the table says what would be"
        raise Problem(what, next_step="penstock store reset --yes", code="not_confirmed")
    kept = "No file was: to use their folder with the emptied store, penstock store adopt --yes"
    note(f"{counted(deleted, 'key')} deleted. {kept}")


@command("acl", store)
def acl() -> None:
    """Print the users of an ACL file for a Redis of yours: one for each role, with what it needs and no more.

    All but `probe`, which may only ping, are off: add `on` and `#` with the SHA-256 of a password to their lines.

    \b
    Examples:
      penstock store acl > users.acl
    """
    sys.stdout.write(acl_file())


@asynccontextmanager
async def _store(where: Where) -> AsyncIterator[RedisSettings]:
    """The store's settings: by --redis-url, by the instance of the data folder, by the configured Redis; else those of
    the embedded server, which is started for the duration. Raises Problem, ConfigError."""
    config, home = where.config(), where.home()
    instance = None if where.redis_url else home.read()
    if (instance is not None and instance.redis_url) or "url" in config.raw.get("redis", {}):
        yield store_settings(config, instance)
    elif not home.redis.exists():
        raise Problem(f"there is no store in {home.path}", next_step="name one: --redis-url or --data-dir")
    else:
        with home.lock():
            async with _embedded(home) as url:
                yield config.section("redis", RedisSettings, {"url": url})


@asynccontextmanager
async def _embedded(home: DataDir) -> AsyncIterator[str]:
    """Run the data folder's embedded server while no `penstock up` does. Raises Problem."""
    home.prepare()
    supervisor = Supervisor(lambda _child: None)
    embedded, child = await start_embedded(home, supervisor, 0)
    try:
        async with asyncio.timeout(REDIS_START_S):
            await supervisor.until(lambda: child.status.state == "ready")
        yield embedded.url
    except TimeoutError:
        raise Problem("the embedded server does not start", next_step=f"its log is {home.log('redis-1')}") from None
    finally:
        await supervisor.stop("redis")
        embedded.clean_up()
