"""Settings of the engine `upstream`: section [upstream]."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from penstock.config import Positive

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Kind = Literal["", "vllm", "sglang", "llama-server", "trtllm", "tgi", "ollama", "mistral", "deepseek", "openai",
               "penstock", "other"]  # fmt: skip

Ability = Literal["images", "audio", "files", "transcribe", "draw"]
ENVIRONMENT = "environment"
"""The value of `proxy` that takes the proxy from the variables."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class UpstreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [upstream]: a server that speaks OpenAI's API generates the texts."""

    urls: tuple[str, ...] = ()
    """Addresses of equal servers, as a client of OpenAI's would name them, such as "http://gpu-1:8000/v1". A request
    goes to the one that runs the fewest."""
    name: str = ""
    """The model's name there; "": the same as here, or the only one that the server has."""
    key_env: tuple[str, ...] = ()
    """Names of environment variables that each hold an API key. Several keys share the requests. The keys are read
    when a worker starts, and are neither logged nor stored."""
    kind: Kind = ""
    """What the server is; "": found out when a worker starts."""
    max_in_flight: Positive = 256
    """Requests that run on each server at once, of all workers together. A server that says how many it runs lowers
    it, and so does one that is seen to let requests wait."""
    slots: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How many requests each server runs at once, where it does not say so itself (llama-server, SGLang and
    text-generation-inference do); 0: 16 at first, and more as the server takes them."""
    context: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens per request (prompt + completion); 0: as the server says, and 8192 if it does not."""
    max_output: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens of an answer at most; 0: the context."""
    default_output: Annotated[int, msgspec.Meta(ge=0)] = 0
    """max_tokens of a request without one; 0: max_output."""
    reasoning: bool | None = None
    """Show the reasoning of all chats, in `reasoning_content`. null: of llama-server if its template has reasoning, of
    others for requests with `reasoning_effort`. Answers that may hold it are continued only on llama-server."""
    abilities: tuple[Ability, ...] = ()
    """What the model takes, or gives, beside text, in addition to what a llama-server or another Penstock says of it.
    Other servers do not say."""
    withhold_fields: tuple[str, ...] = ()
    """Fields of a request that are not passed on to the server, although Penstock does not read them, such as
    "web_search_options"; "*": all of them. What Penstock manages, and what could reach other tenants' data or other
    machines, is never passed on."""
    send_priority: bool = False
    """Send each request's priority. vLLM and SGLang take it only if they were started for it."""
    cache_prompt: bool = False
    """llama-server: reuse cached prompts, also those of other tenants, who could then guess each other's prompts by
    the time to the first token. Off, and with one slot, an interrupted greedy text continues exactly."""
    fallback: tuple[str, ...] = ()
    """Models with this engine, best first, whose servers answer while those of this one cannot: none is there, or they
    broke the request twice, or their rate limit holds it for too long. Only before the first token, and only requests
    that the other model can do; the answer names it (X-Served-By, served_by)."""
    fallback_after_s: Seconds = 10.0
    """A rate limit that holds a request longer leads to a fallback; so long a worker that starts waits for a server of
    its own model before it begins with a fallback alone."""
    refused_s: Seconds = 600.0
    """A request that servers refuse for so long because of a limit (429), without a token between, fails with what they
    said; its own deadline may end it before."""
    proxy: str = ""
    """HTTP proxy to the servers, probes included: its address, such as "http://proxy:3128", or "environment" for
    HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY as they are where a worker starts; "": none, whatever the
    environment says, which is often meant for other programs. Put an address with a password into HTTPS_PROXY."""
    connect_s: Seconds = 5.0
    """Time limit for a connection."""
    first_token_s: Seconds = 300.0
    """From a request to its first token, the server's own queue included. Comments and empty chunks do not count."""
    between_tokens_s: Seconds = 60.0
    """Between two tokens. Nothing limits the time of a whole answer."""
    gauges_s: Seconds = 1.0
    """How often the server is asked how many requests wait in it, while any run."""

    def __post_init__(self) -> None:
        for url in self.urls:
            if problem := url_problem(url):
                raise ValueError(f"urls: {problem}")
        if problem := proxy_problem(self.proxy):
            raise ValueError(f"proxy: {problem}")
        if "@" in self.proxy:
            raise ValueError("proxy: the address holds a user; put it into HTTPS_PROXY, and set environment here")
        for name in self.key_env:
            if not VARIABLE.fullmatch(name):
                raise ValueError("key_env: expected names of environment variables, not the keys themselves")


def address_problem(url: str, example: str) -> str:
    """Why something is no address such as the example, with or without a path; "" if it is. A password in it is not
    repeated."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # whose words may repeat a part of a password
        return f"not an address such as {example}"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return f"expected an address such as {example}, got {parts.scheme or 'no scheme'}"
    return "an address ends with its path, without ? and #" if parts.query or parts.fragment else ""


def proxy_problem(url: str) -> str:
    """Why a setting names no proxy; "" if it does, or is ENVIRONMENT or empty."""
    if url in ("", ENVIRONMENT):
        return ""
    has_path = '"environment", or an address that ends with its port'
    return address_problem(url, "http://proxy:3128") or (has_path if urlsplit(url).path.strip("/") else "")


def url_problem(url: str) -> str:
    """Why the engine cannot use an address; "" if it can. A password in it is not repeated."""
    if problem := address_problem(url, "http://gpu-1:8000/v1"):
        return problem
    has_user = "an address holds a user or a password; put the key into a variable, and its name into key_env"
    return has_user if "@" in urlsplit(url).netloc else ""


SECTION = UpstreamSettings
