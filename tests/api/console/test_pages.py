"""The console's files: strict headers, kept by the browser, nothing inline, nothing foreign."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urljoin

import pytest
from api_in_process import LocalApi, api_in_process

import api.console
from api.console.pages import POLICY, build_hash
from streaming.redis.client import RedisClient

STATIC = Path(api.console.__file__).parent / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))
FORBIDDEN = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://|@import|url\("


@pytest.fixture
async def local(wire: RedisClient) -> AsyncIterator[LocalApi]:
    async with api_in_process(wire) as local:
        yield local


async def test_every_address_is_the_page(local: LocalApi) -> None:
    for path in ("/console", "/console/", "/console/jobs", "/console/jobs/job_0", "/console/a/b"):
        answer = await local.client.get(path)
        assert answer.status_code == 200 and answer.headers["content-security-policy"] == POLICY
        assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-content-type-options"] == "nosniff"
        (main,) = re.findall(r'src="([^"]*main.js)"', answer.text)
        for address in (path, f"/below/a/proxy{path}"):
            begin = address.partition("/console")[0]
            assert urljoin(address, main) == f"{begin}/console/assets/{build_hash()}/main.js"
            links = re.findall(r'<a [^>]*href="([^"#]+)"', answer.text)
            assert len(links) == 9 and all(urljoin(address, link).startswith(f"{begin}/console") for link in links)
        again = await local.client.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content
        assert again.headers["content-security-policy"] == POLICY


async def test_a_browser_keeps_the_files_of_this_version_only(local: LocalApi) -> None:
    own = await local.client.get(f"/console/assets/{build_hash()}/main.js")
    assert own.status_code == 200 and "immutable" in own.headers["cache-control"]
    assert own.headers["content-type"].startswith("text/javascript")
    other = await local.client.get("/console/assets/0123456789abcdef/main.js")
    assert other.status_code == 200 and other.headers["cache-control"] == "no-cache"
    for name in ("index.html", "nothing.js", "%2e%2e", "pages.py", "main.js%00"):
        assert (await local.client.get(f"/console/assets/{build_hash()}/{name}")).status_code == 404


async def test_a_link_of_another_site_may_lead_to_it(local: LocalApi) -> None:
    """To its pages, as a document: not in a frame, and to nothing that has data."""
    visit = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert (await local.client.get("/console/jobs", headers=visit)).status_code == 200
    assert (await local.client.get("/console/jobs", headers=visit | {"Sec-Fetch-Dest": "iframe"})).status_code == 403
    assert (await local.client.get("/v1/jobs", headers=visit)).status_code == 403
    assert (await local.client.post("/console/session", json={}, headers=visit)).status_code == 403


def test_nothing_is_inline_or_foreign() -> None:
    """The policy would block it: no script or style in the page, no text that becomes markup or code, no other host."""
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|<script(?![^>]*src=)|\sstyle=|\son\w+=|javascript:", page)
    for file in [*SCRIPTS, STATIC / "index.html", STATIC / "style.css"]:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        found = re.search(FORBIDDEN, text)
        assert found is None, (file.name, found)


def test_every_import_leads_somewhere() -> None:
    for file in SCRIPTS:
        text = file.read_text()
        imports = re.findall(r"import \{([^}]*)\} from \"\./([\w.]+)\"", text)
        assert len(imports) == len(re.findall(r"^import ", text, re.MULTILINE)), file.name
        for names, target in imports:
            exported = (STATIC / target).read_text()
            for name in (word.strip() for word in names.split(",")):
                assert re.search(
                    rf"export (async )?(function\*?|const|let|class) {name}\b|export \{{[^}}]*\b{name}\b", exported
                ), (file.name, name)
                assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{file.name} imports {name} and does not use it"
