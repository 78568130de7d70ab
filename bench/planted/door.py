"""Planted bugs of who is let in: Host names, origins, content types, access table, admin token, audit log."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

DOOR = "tests/api/auth/test_door.py::test_"
SESSION = "tests/api/console/test_session.py::test_"
ACCESS = "tests/api/auth/test_access.py::test_"
GUARD = "tests/api/auth/test_guard.py::test_"
CLIENT = "tests/cli/test_client.py::test_"
UP = "tests/cli/test_up.py::test_"

DOORS = (
    bug(
        "any host name without keys",
        "A page whose name was rebound to 127.0.0.1 reads jobs and sets pools.",
        Edit("api/auth/hosts.py", "self._any = not keyless and not self._allowed", "self._any = not self._allowed"),
        DOOR + "a_rebound_name_reads_nothing_and_changes_nothing",
    ),
    bug(
        "a host name that ends like loopback",
        "evillocalhost, or a name with anything in front, counts as this machine.",
        Edit("api/auth/hosts.py", 'bare.endswith(".localhost")', 'bare.endswith("localhost")'),
        DOOR + "only_loopback_names_are_served",
    ),
    bug(
        "no host at all",
        "HTTP/1.1 without a Host is served, although every browser and client sends one.",
        Edit("api/auth/hosts.py", 'if value is None and http_version == "1.0":', "if value is None:"),
        DOOR + "a_request_without_a_host_is_served_as_http_1_0_only",
    ),
    bug(
        "a proxy before a server without keys",
        "Whoever reaches a proxy of this machine has chats computed: to the server they come from this machine.",
        Edit("api/auth/guard.py", 'b"x-forwarded-for", ', ""),
        DOOR + "what_a_proxy_forwards_needs_keys",
    ),
    bug(
        "every origin that is refused is logged",
        "A page with many names fills the disk with the server's log.",
        Edit("api/auth/refusals.py", " or len(self._logged) > MAX_LOGGED:", ":"),
        ACCESS + "senders_do_not_fill_the_log",
    ),
    bug(
        "the reason of a refused page is nowhere",
        "Its browser says CORS error, and the log says nothing.",
        Edit("api/auth/guard.py", '            self._refusals.log_once(error, scope["path"])\n', ""),
        DOOR + "the_log_says_why_a_page_is_refused",
    ),
    bug(
        "the null origin is this machine",
        "A sandboxed frame of any page has the origin null, and has chats computed.",
        Edit("api/auth/origins.py", "if not _is_loopback", 'if origin != b"null" and not _is_loopback'),
        DOOR + "a_page_of_another_origin_has_no_chat_computed",
    ),
    bug(
        "only known bad sites are refused",
        "What a later browser says in Sec-Fetch-Site is let in.",
        Edit("api/auth/origins.py", "site not in OWN_SITES and", 'site == b"cross-site" and'),
        DOOR + "other_origins_are_refused_on_every_route",
    ),
    bug(
        "a frame is a visit",
        "A foreign page shows this server in a frame.",
        Edit("api/auth/origins.py", '        and headers.get(b"sec-fetch-dest") == b"document"\n', ""),
        DOOR + "other_origins_are_refused_on_every_route",
    ),
    bug(
        "a link leads anywhere",
        "A foreign page opens any address of this server, and looks at how long it takes.",
        Edit("api/auth/origins.py", '        and (path in ("/", "/console") or path.startswith("/console/"))\n', ""),
        DOOR + "a_link_may_lead_to_the_front_page_only",
    ),
    bug(
        "a page of another port uses the console's session",
        "Browsers send the cookie to it, and it has learned the token.",
        Edit("api/auth/console.py", "if secret is None or not _is_own_page(headers):", "if secret is None:"),
        SESSION + "a_request_needs_both_secrets_and_the_consoles_own_page",
    ),
    bug(
        "a link to the console works again",
        "Whoever reads the terminal's scrollback within a minute is logged in.",
        Edit("streaming/lua/console.lua", "  redis.call('DEL', key)\n", ""),
        SESSION + "a_link_works_once",
    ),
    bug(
        "a session of the console outlives its key",
        "The key was taken away, and its holder still administers.",
        Edit("api/auth/keys.py", " or not hmac.compare_digest(self.seal(name, secret).encode(), seal.encode())", ""),
        SESSION + "another_key_of_the_same_name_ends_it",
    ),
    bug(
        "a body of no type is JSON",
        "A page sends one to another origin without asking first.",
        Edit("api/admission.py", 'b"content-type").part', 'b"content-type", "application/json").part'),
        DOOR + "json_needs_its_content_type",
    ),
    bug(
        "CORS by prefix",
        "Whoever owns a name that begins like a listed origin reads every answer.",
        Edit("api/auth/origins.py", "return origin in self._allowed", "return origin.startswith(tuple(self._allowed))"),
        DOOR + "everybody_else_is_refused_as_before",
    ),
    bug(
        "CORS for admins",
        "A listed page sets pools.",
        Edit("api/auth/origins.py", 'CORS_PATH_PREFIX = "/v1/"', 'CORS_PATH_PREFIX = "/"'),
        DOOR + "everybody_else_is_refused_as_before",
    ),
    bug(
        "a stream without its CORS headers",
        "A listed page may send, and cannot read what it gets.",
        Edit("api/auth/guard.py", "        send = self._origins.with_cors_headers(scope, send)\n", ""),
        DOOR + "listed_origins_may_ask_send_and_read",
    ),
    bug(
        "all origins without a key",
        "One setting opens a server of this machine to every page.",
        Edit("api/auth/keys.py", 'if keyring.open and "*" in', 'if not keyring.open and "*" in'),
        DOOR + "all_origins_need_a_key",
    ),
    bug(
        "a route without a row is served",
        "Whoever adds a route and forgets to say who may call it opens it to all.",
        Edit("api/auth/guard.py", "return self._unlisted(scope)", "return self._table.find('GET', '/')"),
        ACCESS + "a_route_without_a_row_cannot_be_reached",
    ),
    bug(
        "a method that was forgotten",
        "Every other method of a route is let in as if it were a GET.",
        Edit(
            "api/auth/access.py", 'rows.get("GET" if method == "HEAD" else method)', 'rows.get(method, rows.get("GET"))'
        ),
        ACCESS + "a_method_without_a_row_cannot_be_reached",
    ),
    bug(
        "any key is an admin's",
        "A tenant reads everybody's dead letters.",
        Edit("api/auth/keys.py", "            if not caller.admin:", "            if not caller.name:"),
        ACCESS + "each_role_reaches_its_routes_and_no_other",
    ),
    bug(
        "no admin token is any token",
        "An API process that was told none lets everybody administer.",
        Edit("api/auth/keys.py", "            raise admin_not_configured()", "            return OPERATOR"),
        ACCESS + "without_a_token_nobody_is_an_admin",
    ),
    bug(
        "the admin token is not compared",
        "Whoever sends any token administers.",
        Edit("api/auth/keys.py", "if not hmac.compare_digest(", "if not token and not hmac.compare_digest("),
        ACCESS + "each_role_reaches_its_routes_and_no_other",
    ),
    bug(
        "metrics stay open with keys",
        "Every tenant, and everybody else, sees how much all tenants do.",
        Edit("api/settings.py", "return keyless if self.metrics", "return True if self.metrics"),
        ACCESS + "each_role_reaches_its_routes_and_no_other",
    ),
    bug(
        "the command sends the admin token to any server",
        "A server at another address learns it.",
        Edit("cli/client.py", " and (not where.url or _address(where.url) == _address(instance.url))", ""),
        CLIENT + "the_admin_token_goes_to_its_own_instance_alone",
    ),
    bug(
        "the command sends the admin token to another name of this machine",
        "Another user's program at the same port of ::1 learns it.",
        Edit("cli/client.py", "return cls(instance.url, key", "return cls(where.url or instance.url, key"),
        CLIENT + "by_another_name_of_this_machine_the_token_goes_to_the_instances_own_address",
    ),
    bug(
        "a key goes where the store says",
        "A worker's password for the store gets the operator's admin key: it reports an API of its own.",
        Edit(
            "cli/client.py",
            "        if named or _kept_key(home.api_key):\n",
            "        if not by_redis and (named or _kept_key(home.api_key)):\n",
        ),
        Edit(
            "cli/client.py",
            'return cls(_registered(config.section("redis", RedisSettings)), "", ',
            'return cls(_registered(config.section("redis", RedisSettings)), os.environ.get(KEY, ""), ',
        ),
        CLIENT + "an_address_out_of_the_store_is_sent_no_key",
    ),
    bug(
        "the folder's key goes to whoever listens",
        "Nothing runs, and another user's process at that address is sent the key.",
        Edit("cli/client.py", "cls(where.url, named)", "cls(where.url, named or _kept_key(home.api_key))"),
        CLIENT + "the_key_of_the_folder_goes_to_its_own_instance_alone",
    ),
    bug(
        "an admin token that all may read",
        "Another user of this machine administers the server.",
        Edit("cli/instance.py", "os.O_EXCL, 0o600)", "os.O_EXCL, 0o644)"),
        UP + "the_admin_commands_work_without_any_setting",
    ),
    bug(
        "processes are told the admin token itself",
        "It lies in their settings, where its hash would do.",
        Edit("cli/instance.py", "return hashlib.sha256(token.encode()).hexdigest()", "return token"),
        CLIENT + "the_admin_token_goes_to_its_own_instance_alone",
    ),
    bug(
        "refused admins are not logged",
        "Somebody tries keys for a night, and nobody sees it.",
        Edit("api/auth/guard.py", "                audit.refused(scope, found, error)\n", "                pass\n"),
        DOOR + "what_admins_do_and_are_refused_is_logged",
    ),
    bug(
        "the audit log is quiet at a high log level",
        "Who sets log_level to error has no record of what admins did.",
        Edit("api/auth/audit.py", "    log.setLevel(logging.INFO)\n", ""),
        DOOR + "what_admins_do_and_are_refused_is_logged",
    ),
    bug(
        "the audit log names the wrong key",
        "A refused stranger is logged as the local admin.",
        Edit("api/auth/guard.py", "        if not self._keyring.open:", "        if True:"),
        DOOR + "refusals_of_a_server_without_keys_are_logged",
    ),
    bug(
        "what failed is not in the audit log",
        "An endpoint that fails halfway leaves no line of what an admin did.",
        Edit(
            "api/auth/guard.py",
            "        try:\n            await self._app(scope, receive, send)\n        finally:\n",
            "        await self._app(scope, receive, send)\n        if True:\n",
        ),
        GUARD + "what_an_admin_tried_is_written_down_however_it_ended",
    ),
    bug(
        "refusals are not counted",
        "Somebody tries keys for a night, and no metric moves.",
        Edit("api/error_answers.py", "    count(error.code)\n", "    del count\n"),
        GUARD + "what_the_guard_refuses_is_counted",
    ),
    bug(
        "a page of an app is this machine's",
        "An app that shows strangers' pages under tauri://localhost lets them use the server.",
        Edit("api/auth/origins.py", 'match["scheme"] in ("http", "https") and is_loopback', "is_loopback"),
        GUARD + "a_page_of_an_app_is_no_page_of_this_machines",
    ),
    bug(
        "a key under another scheme",
        "What was meant for another kind of server opens this one.",
        Edit("api/auth/keys.py", 'scheme.lower() == "bearer"', 'scheme.lower() in ("bearer", "token")'),
        GUARD + "a_key_comes_with_one_scheme",
    ),
)
