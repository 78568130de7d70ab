"""/v1/files: upload, list, show, read and delete files, compatible with OpenAI's files API."""

from __future__ import annotations

import asyncio
import errno
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from api.admission import caller_of, services_of, withdraw
from api.jobs import as_json, as_page
from api.openai import errors
from api.openai.batch_lines import MAX_EXPIRY_S, MIN_EXPIRY_S
from api.query import value_of, whole_number
from api.services import Services
from api.uploads import Allowance, Upload, receive
from streaming.batches.store import StoredFile
from streaming.errors import QuotaExceeded, UnknownFile

BATCH = "batch"
MAX_FILES_PER_PAGE = 10_000
RECORDS_PER_CALL = 500


async def create(request: Request) -> Response:
    """POST /v1/files: store the upload on disk and return the file object."""
    services, caller = services_of(request), caller_of(request)
    if services.refusal:
        raise errors.store_full(services.refusal)
    quota = services.quotas(caller).file_bytes
    used = 0 if quota is None else await services.quota_usage.file_bytes(caller.tenant)
    length = request.headers.get("content-length", "")
    try:
        with Allowance(
            services.receiving_bytes, caller.tenant, services.files_settings.size_limit, used, quota
        ) as allowance:
            allowance.check_length(int(length) if length.isdecimal() else 0)
            kind = request.headers.get("content-type", "")
            idle_timeout_s = services.settings.send_timeout_s
            await asyncio.to_thread(services.file_store.claim, services.store.deployment)
            upload = await receive(request.stream(), kind, services.file_store, allowance, idle_timeout_s)
            file = await _keep(services, caller.tenant, upload, quota)
    except QuotaExceeded as error:
        raise errors.quota_exceeded(error, "file") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise errors.store_full("the disk that holds files is full") from None
    return as_json(file_object(file))


async def _keep(services: Services, tenant: str, upload: Upload, limit: int | None) -> StoredFile:
    """Keep an upload; on an error remove all of it. Raises ApiError (400), QuotaExceeded, OSError, Unavailable."""
    incoming = upload.incoming
    try:
        if incoming is None:
            raise errors.invalid_request("The body must have a part named 'file'.", "file")
        if upload.fields.get("purpose") != BATCH:
            raise errors.invalid_request(f"purpose must be {BATCH!r}: files are the input of batches.", "purpose")
        max_lines = services.batch_settings.max_lines
        if upload.lines > max_lines:
            raise errors.invalid_request(
                f"The file has more than {max_lines} lines, the most one batch may have.", "file"
            )
        now_ms = await services.store_client.now_ms()
        file = StoredFile(
            id=services.files.new_id(tenant),
            tenant=tenant,
            name=upload.name,
            size=incoming.size,
            purpose=BATCH,
            created_ms=now_ms,
            expires_ms=now_ms + 1000 * _keep_s(upload, services.files_settings.retention_s),
        )
        await asyncio.to_thread(services.file_store.keep, incoming, file.id)
    finally:
        if incoming is not None:
            incoming.discard()
    try:
        await services.files.put(file, limit)
    except QuotaExceeded:
        await asyncio.to_thread(services.file_store.remove, file.id)
        raise
    except BaseException:  # the store may have the record: remove it first, then the bytes
        services.spawn(withdraw(partial(_drop, services, file)))
        raise
    return file


async def _drop(services: Services, file: StoredFile) -> None:
    """Remove a file's record and its bytes. Raises Unavailable, and UnknownFile if it had no record."""
    known = await services.files.known([file.id])
    await services.files.forget(file.id, file.tenant)
    await asyncio.to_thread(services.file_store.remove, file.id)
    if not known:
        raise UnknownFile(file.id)


def _keep_s(upload: Upload, default: int) -> int:
    """Return `expires_after` in seconds. Raises ApiError (400)."""
    anchor, seconds = upload.fields.get("expires_after[anchor]"), upload.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return default
    if anchor != "created_at":
        raise errors.invalid_request("expires_after.anchor must be 'created_at'.", "expires_after.anchor")
    return whole_number(seconds or "", "expires_after.seconds", MIN_EXPIRY_S, MAX_EXPIRY_S)


async def listing(request: Request) -> Response:
    """GET /v1/files[?purpose=&limit=&order=&after=]: list the caller's files."""
    services, caller, query = services_of(request), caller_of(request), request.query_params
    limit, purpose = value_of(query, "file_limit") or MAX_FILES_PER_PAGE, query.get("purpose")
    newest_first = value_of(query, "order") != "asc"
    found: list[StoredFile] = []
    after, more = query.get("after"), True
    while more and len(found) <= limit:
        try:
            page = await services.files.recent(caller.tenant, after, RECORDS_PER_CALL, newest_first=newest_first)
        except UnknownFile:
            raise errors.invalid_request("after names no file of yours.", "after") from None
        found += [file for file in page if purpose in (None, file.purpose)]
        after = page[-1].id if page else after
        more = len(page) == RECORDS_PER_CALL
    return as_page({file.id: file_object(file) for file in found[:limit]}, has_more=len(found) > limit)


async def show(request: Request) -> Response:
    """GET /v1/files/{id}: show the file object."""
    return as_json(file_object(await own_file(request)))


async def content(request: Request) -> Response:
    """GET /v1/files/{id}/content: stream the file's bytes from disk."""
    services, file = services_of(request), await own_file(request)
    path = services.file_store.path(file.id)
    if not await asyncio.to_thread(path.exists):
        raise errors.file_not_found()
    return FileResponse(
        path, media_type="application/octet-stream", filename=file.name, headers={"X-Content-Type-Options": "nosniff"}
    )


async def delete(request: Request) -> Response:
    """DELETE /v1/files/{id}: delete the file. Batches created from it continue."""
    services, file = services_of(request), await own_file(request)
    await asyncio.to_thread(services.file_store.remove, file.id)
    await services.files.forget(file.id, file.tenant)
    return as_json({"id": file.id, "object": "file", "deleted": True})


async def own_file(request: Request) -> StoredFile:
    """Return the file in the path, if the caller owns it. Raises UnknownFile (404)."""
    return await services_of(request).files.get(request.path_params["file_id"], caller_of(request).tenant)


def file_object(file: StoredFile) -> dict[str, Any]:
    """Render OpenAI's file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created_ms // 1000,
        "expires_at": file.expires_ms // 1000,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
