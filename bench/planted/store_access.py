"""Planted bugs of the store's access: who reaches it, what is sent to whom, and what a role may do there."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

EMBEDDED = "tests/cli/test_embedded.py::test_"
ACCESS = "tests/streaming/store/test_acl.py::test_"

STORE_ACCESS = (
    bug(
        "the intake may not put jobs",
        "The messages of a broker are refused for want of a right.",
        Edit(
            "streaming/store/acl.py",
            '"put", "cancel", "record", "salvage", "usage", "ended"',
            '"cancel", "record", "salvage", "usage", "ended"',
        ),
        ACCESS + "jobs_are_put_under_a_quota",
    ),
    bug(
        "a right that lacks is the job's fault",
        "A mistake in the store's users makes processes fail at sound jobs, and a broker's messages are rejected.",
        Edit("streaming/redis/failures.py", "if DENIED_IN_SCRIPT in words:", "if DENIED_IN_SCRIPT == words:"),
        ACCESS + "a_right_that_lacks_is_the_stores_refusal",
    ),
    bug(
        "a password for whoever listens",
        "A stranger who listens on the port of an earlier version gets the password.",
        Edit(
            "cli/embedded.py",
            '    if sys.platform == "linux":\n        pids = ',
            '    if kept.get("port", "0") != "0":\n'
            "        with contextlib.suppress(OSError):\n"
            '            _, writer = await asyncio.open_connection("127.0.0.1", int(kept["port"]))\n'
            "            writer.write(f\"AUTH {kept['requirepass']}\\r\\nSHUTDOWN\\r\\n\".encode())\n"
            "            await writer.drain()\n"
            '    if sys.platform == "linux":\n        pids = ',
        ),
        EMBEDDED + "a_squatter_on_the_old_port_sees_nothing",
    ),
    bug(
        "the embedded store on a port",
        "Every user of the machine reaches the store, and may try passwords.",
        Edit("cli/embedded.py", '            "port 0\\n"\n', '            "port 26997\\nbind 127.0.0.1\\n"\n'),
        EMBEDDED + "only_its_owner_reaches_it",
    ),
    bug(
        "a password that strangers have read is kept",
        "A stranger who was sent the password of an earlier version still has it.",
        Edit("cli/embedded.py", 'kept.get("requirepass") if "unixsocket" in kept else None', 'kept.get("requirepass")'),
        EMBEDDED + "a_squatter_on_the_old_port_sees_nothing",
    ),
    bug(
        "a socket in anybody's folder",
        "The password is sent to a socket that another user may have put there.",
        Edit("cli/embedded.py", '    if not is_private(socket.parent):\n        return b""\n', ""),
        EMBEDDED + "only_its_owner_reaches_it",
    ),
    bug(
        "a folder that is there is taken as it is",
        "A data folder that others may enter stays open to them, with the store's socket in it.",
        Edit("cli/instance.py", "            folder.chmod(0o700)\n", ""),
        "tests/cli/test_instance.py::test_nobody_else_may_enter",
    ),
    bug(
        "a long path is no address",
        "In a folder with a long path `up` waits for ever for a store that cannot listen.",
        Edit("cli/embedded.py", "if len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES:", "if str(socket):"),
        EMBEDDED + "a_long_path_gets_a_short_socket",
    ),
    bug(
        "an orphan of an earlier version is not found",
        "Two servers write the same append-only file.",
        Edit("cli/embedded.py", "                os.kill(pid, signal.SIGTERM)\n", "                os.kill(pid, 0)\n"),
        EMBEDDED + "an_orphan_of_an_earlier_version_is_ended",
    ),
    bug(
        "a typed password goes to a command line",
        "Every user of the machine can read the password of Redis for as long as a detached `up` runs.",
        Edit("cli/up.py", 'url = flags.pop("redis_url")', 'url = flags["redis_url"]'),
        "tests/cli/test_up.py::test_a_typed_password_is_not_passed_on",
    ),
    bug(
        "the broker's database is the first",
        "On a Unix socket Celery uses another database than the one that is named.",
        Edit("offline/app.py", 'f"?virtual_host={query[\'db\']}" if "db" in query else ""', '""'),
        "tests/offline/test_app.py::test_the_queues_own_redis_is_the_broker",
    ),
    bug(
        "a role may do everything",
        "Whoever has one role's password reads, changes and ends everything in Redis.",
        Edit("streaming/store/acl.py", '"sanitize-payload", "-@all"]', '"sanitize-payload", "+@all"]'),
        ACCESS + "a_role_may_nothing_beyond_its_own",
    ),
    bug(
        "a role may touch every key",
        "A role's password opens everything that Penstock keeps, and not what the role needs of it.",
        Edit(
            "streaming/store/acl.py",
            "    keys = {_pattern(kind) for kind in _kinds(role)}\n",
            '    keys = {f"{ROOT}*"}\n',
        ),
        ACCESS + "keys_and_channels_of_others_are_closed",
    ),
    bug(
        "Celery's commands on all keys",
        "An offline process may use Celery's commands on the jobs too.",
        Edit("streaming/store/acl.py", "~{BROKER}* &{BROKER}*)", "~{ROOT}* &{BROKER}*)"),
        ACCESS + "keys_and_channels_of_others_are_closed",
    ),
    bug(
        "keys that a record names are forgotten",
        "A job's end is refused in the middle, because its lane's key stands in its record and not in the script.",
        Edit("streaming/store/acl.py", "            found.update(kinds)\n", "            pass\n"),
        ACCESS + "what_a_script_needs_is_read_off_it",
    ),
    bug(
        "a script's new command is nobody's right",
        "A role is refused what its scripts do, and nothing works with an ACL.",
        Edit(
            "streaming/store/acl.py",
            "    for script in SCRIPTS[role]:\n        found |= script_commands(script)\n",
            "    for script in SCRIPTS[role] - {'claim'}:\n        found |= script_commands(script)\n",
        ),
        ACCESS + "the_file_is_what_the_catalogue_gives",
        ACCESS + "the_roles_do_their_work",
    ),
    bug(
        "a command by the name it has in the code",
        "The client library sends another one, which is refused: a broker's messages are never taken.",
        Edit("streaming/store/acl.py", '"incrby": frozenset', '"incr": frozenset'),
        ACCESS + "plain_commands_are_allowed",
    ),
    bug(
        "whoever connects is let in",
        "Without a login the server takes commands.",
        Edit(
            "streaming/store/acl.py",
            '_user("default", ["off"], (), (), ())',
            '_user("default", ["on", "nopass"], ("ping",), (), ())',
        ),
        ACCESS + "without_a_login_there_is_nothing",
    ),
)
