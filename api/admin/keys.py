"""/admin/keys: lists all API keys, and creates, changes, rotates and revokes those that are kept in the store.

A key is shown once, in the answer that makes it; the store has its hash. Keys of the settings file are only listed.
Needs an admin key, or without keys in the settings the admin token.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace
from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from api.admission import caller_of, read_body, services_of
from api.auth import audit
from api.auth.keys import Caller
from api.jobs import as_json, fields_of
from api.openai import errors
from api.openai.fields import ClosedBody, refusal
from api.openai.json_body import read_object, validated
from api.services import Services
from api.settings import ENDPOINTS
from streaming.fleet.api_keys import CreatedKey
from streaming.ids import TENANT_NAME
from streaming.jobs.settings import LimitSettings
from streaming.order import Priority

MAX_KEYS = 10_000
"""Created keys that a store holds, revoked ones among them: every API process reads them all."""
MAX_EXPIRY_S = 10 * 366 * 86_400
PREFIX = "sk-penstock-"


def _tenant(name: str) -> str:
    if not TENANT_NAME.fullmatch(name):
        raise refusal("must be a letter or digit, then letters, digits and . _ @ / -, at most 128 in all")
    return name


LimitName = Annotated[str, Field(max_length=64)]
Names = Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=100)]
Lifetime = Annotated[int, Field(ge=1, le=MAX_EXPIRY_S)]


def _limit_settings(given: dict[str, int | float]) -> LimitSettings:
    try:
        return msgspec.convert(given, LimitSettings)
    except msgspec.ValidationError as error:
        names = ", ".join(LimitSettings.__struct_fields__)
        raise refusal(f"must hold numbers by the names {names}: {error}") from None


class KeyUpdate(ClosedBody):
    """The body of POST /admin/keys/{key_id}: what is left out stays as it is."""

    label: Annotated[str, Field(max_length=200)] | None = None
    """What it is for, in words."""
    highest_lane: Literal["interactive", "standard", "batch"] | None = None
    admin: bool | None = None
    models: Names | None = None
    """The models that it may use; an empty list: all."""
    endpoints: Names | None = None
    """What it may call, by the word behind /v1/ in the path; an empty list: all."""
    expires_in_s: Lifetime | None = None
    """Seconds from now on."""
    limits: Annotated[dict[LimitName, int | float], AfterValidator(_limit_settings)] | None = None
    """How fast and how much it may use, in place of all earlier limits; empty: no limit."""


class KeyRequest(KeyUpdate):
    """The body of POST /admin/keys."""

    tenant: Annotated[str, Field(max_length=128), AfterValidator(_tenant)]


async def listing(request: Request) -> Response:
    """List the keys.

    GET /admin/keys: list all keys, those of the settings by name, then the created ones by age.
    """
    services = services_of(request)
    created, used = await services.api_keys.read(), await services.api_keys.used()
    rows = sorted((one for one in services.keyring.callers if one.created is None), key=lambda one: one.name)
    made = sorted((key for key in created.values() if key is not None), key=lambda key: key.created_ms)
    return as_json({"object": "list", "data": [*map(_row, rows), *(_created(key, used.get(key.id)) for key in made)]})


async def show(request: Request) -> Response:
    """Show a created key.

    GET /admin/keys/{key_id}.
    """
    services, key_id = services_of(request), request.path_params["key_id"]
    key = (await services.api_keys.read()).get(key_id)
    return as_json(_created(_known(key), (await services.api_keys.used()).get(key_id)))


async def create(request: Request) -> Response:
    """Create a key, which is shown only in this answer.

    POST /admin/keys: create a key; 201 with the key itself, which is shown only here.
    """
    services, caller = services_of(request), caller_of(request)
    asked = validated(KeyRequest, read_object(await read_body(request.scope, request.receive, MAX_BODY_BYTES)))
    _check_names(services, asked, asked.tenant)
    if len(await services.api_keys.read()) >= MAX_KEYS:
        raise errors.invalid_request(f"There are {MAX_KEYS:,} created keys, which is the most.")
    secret = _new_secret()
    made = CreatedKey(
        id=f"key_{secrets.token_hex(8)}",
        sha256=_hash(secret),
        tenant=asked.tenant,
        created_ms=_now_ms(),
        created_by=caller.name or caller.tenant,
    )
    key = _changed(made, asked)
    audit.detail(request.scope, **_told(key))
    _granted(caller, key)
    await services.api_keys.add(key)
    await services.read_keys()
    return as_json(_created(key, None) | {"key": secret}, 201)


async def update(request: Request) -> Response:
    """Change a created key.

    POST /admin/keys/{key_id}: change a created key; it acts within three seconds at every API process.
    """
    services = services_of(request)
    asked = validated(KeyUpdate, read_object(await read_body(request.scope, request.receive, MAX_BODY_BYTES)))
    caller = caller_of(request)

    def changed(key: CreatedKey) -> CreatedKey:
        _check_names(services, asked, key.tenant)
        return _granted(caller, _changed(_granted(caller, _valid(key)), asked))

    return as_json(await _change(request, changed))


async def rotate(request: Request) -> Response:
    """Replace the secret of a created key.

    POST /admin/keys/{key_id}/rotate: replace the secret of a created key; the old one is void.
    """
    secret, caller = _new_secret(), caller_of(request)
    shown = await _change(request, lambda key: replace(_granted(caller, _valid(key)), sha256=_hash(secret)))
    return as_json(shown | {"key": secret})


async def revoke(request: Request) -> Response:
    """Revoke a created key.

    DELETE /admin/keys/{key_id}: revoke a created key for good, and end its open answers. Idempotent.
    """
    now_ms = _now_ms()
    return as_json(
        await _change(request, lambda key: key if key.revoked_ms is not None else replace(key, revoked_ms=now_ms))
    )


MAX_BODY_BYTES = 64 * 1024


async def _change(request: Request, change: Callable[[CreatedKey], CreatedKey]) -> dict[str, Any]:
    """Change the key in the path, at this process at once; return it as it is shown. Raises ApiError (404)."""
    services, key_id = services_of(request), request.path_params["key_id"]
    key = _known(await services.api_keys.change(key_id, change))
    audit.detail(request.scope, **_told(key))
    await services.read_keys()
    services.open_answers.end(services.keyring.holds)
    return _created(key, (await services.api_keys.used()).get(key_id))


def _known(key: CreatedKey | None) -> CreatedKey:
    """Raise ApiError (404) if there is no key."""
    if key is None:
        raise errors.key_not_found()
    return key


def _valid(key: CreatedKey) -> CreatedKey:
    """Raise ApiError (409) if the key was revoked."""
    if key.revoked_ms is not None:
        raise errors.key_revoked()
    return key


def _changed(key: CreatedKey, asked: KeyUpdate) -> CreatedKey:
    """Return the key with what is asked for."""
    given = {
        "label": asked.label,
        "priority": None if asked.highest_lane is None else Priority(asked.highest_lane),
        "admin": asked.admin,
        "models": None if asked.models is None else tuple(asked.models),
        "endpoints": None if asked.endpoints is None else tuple(asked.endpoints),
        "limits": asked.limits,
        "expires_ms": None if asked.expires_in_s is None else _now_ms() + 1000 * asked.expires_in_s,
    }
    return replace(key, **{name: value for name, value in given.items() if value is not None})


def _granted(caller: Caller, key: CreatedKey) -> CreatedKey:
    """Return a key that the caller may make, change or rotate: one that outlives or outranks a created admin key is
    not for that. Raise ApiError (400, 403)."""
    if key.admin and (key.models or key.endpoints):
        raise errors.invalid_request("An admin key has no models and endpoints: it may administer all.", "admin")
    own = caller.created
    if own is None:
        return key
    if own.expires_ms is not None and (key.expires_ms is None or key.expires_ms > own.expires_ms):
        raise errors.beyond_own_key("expires_in_s")
    if key.priority.rank < own.priority.rank:
        raise errors.beyond_own_key("highest_lane")
    return key


def _check_names(services: Services, asked: KeyUpdate, tenant: str) -> None:
    """Raise ApiError (400, 404) for an endpoint that there is not, or what is no model's name or alias for `tenant`."""
    for name in asked.models or ():
        if services.meant(tenant, name) is None:
            raise errors.model_not_found(name, services.models)
    for name in asked.endpoints or ():
        if name not in ENDPOINTS:
            known = ", ".join(sorted(ENDPOINTS))
            raise errors.invalid_request(f"{name!r} is no endpoint; there are {known}.", "endpoints")


def _new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _now_ms() -> int:
    return int(time.time() * 1000)


def _told(key: CreatedKey) -> dict[str, Any]:
    """What the audit log has of a key."""
    shown = fields_of(key, "tenant", "admin", "models", "endpoints", "label")
    shown["expires_at"] = None if key.expires_ms is None else key.expires_ms // 1000
    return {**shown, "limits": _limits(key), "key": key.id, "highest_lane": key.priority.value}


def _row(caller: Caller) -> dict[str, Any]:
    """Render a key of the settings."""
    quotas = msgspec.structs.asdict(caller.quotas)
    shown = fields_of(caller, "name", "tenant", "admin", "batch_tokens", "models", "endpoints")
    shown["limits"] = _limits(caller)
    return {"object": "key", **shown, "highest_lane": caller.ceiling.value, "quotas": quotas}


def _limits(key: Caller | CreatedKey) -> dict[str, float]:
    """The limits of a key that are set."""
    return {} if key.limits is None else msgspec.to_builtins(key.limits)


def _created(key: CreatedKey, used_ms: int | None) -> dict[str, Any]:
    """Render a created key. Times are Unix seconds."""
    state = "revoked" if key.revoked_ms is not None else "valid" if key.is_valid(_now_ms()) else "expired"
    at_ms = {"created": key.created_ms, "expires": key.expires_ms, "revoked": key.revoked_ms, "last_used": used_ms}
    times = {f"{name}_at": None if at is None else at // 1000 for name, at in at_ms.items()}
    shown = fields_of(key, "id", "tenant", "label", "admin", "models", "endpoints", "created_by")
    shown["limits"] = _limits(key)
    return {"object": "key", "name": key.id, **shown, "highest_lane": key.priority.value, "state": state, **times}
