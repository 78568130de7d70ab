"""Catalogue of the clients that are tried: their packages with pinned versions, their programs, and their cases."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bench.clients.node import NodeEnvironment
from bench.environments import ROOT, Environment

PROGRAMS = ROOT / "examples" / "clients"
SIM, MODEL = "sim", "llamacpp"
"""The simulated engine knows tools, and the text of its answers is known; the embedded model can be held to JSON."""
ENGINES = (SIM, MODEL)
NO_SCHEMAS = "cannot be held to JSON"
NO_CHOICE = "cannot let its model choose a tool"

PLAIN, STREAMED, TOOLS, STRUCTURED, RESUMED = "plain", "streamed", "tools", "structured", "resumed"
CASES = (PLAIN, STREAMED, TOOLS, STRUCTURED, RESUMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProgram:
    """One client. `refused`: words of the 400 that a case must get on an engine that lacks what it needs."""

    name: str
    title: str
    environment: Environment | NodeEnvironment
    program: str
    cases: tuple[str, ...] = (PLAIN, STREAMED, TOOLS, STRUCTURED)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    skipped: dict[tuple[str, str], str] = field(default_factory=dict)
    """Why a case is not run on an engine."""

    @property
    def path(self) -> Path:
        return PROGRAMS / self.program


def _python(name: str, *packages: str) -> Environment:
    return Environment(name=f"client-{name}", packages=packages)


_SCHEMA = {(SIM, STRUCTURED): NO_SCHEMAS, (MODEL, TOOLS): NO_CHOICE}
"""A client that sends a schema for a structured answer, and lets the model choose a tool."""
_CALL = {(MODEL, TOOLS): NO_CHOICE}
"""A client that forces a call for a structured answer."""

CLIENTS = (
    ClientProgram(
        name="openai",
        title="openai (Python)",
        environment=_python("openai", "openai==3.57.0"),
        program="openai_client.py",
        cases=CASES,
        refused=_SCHEMA,
    ),
    ClientProgram(
        name="openai-node",
        title="openai (Node)",
        environment=NodeEnvironment("client-openai-node", ("openai@7.57.0", "zod@4.6.7")),
        program="openai_node.mjs",
        cases=CASES,
        refused=_SCHEMA,
    ),
    ClientProgram(
        name="agents",
        title="OpenAI Agents SDK",
        environment=_python("agents", "openai-agents==0.24.0"),
        program="agents_sdk.py",
        refused=_SCHEMA,
    ),
    ClientProgram(
        name="langchain",
        title="LangChain",
        environment=_python("langchain", "langchain-openai==1.7.4"),
        program="langchain_client.py",
        refused=_SCHEMA,
    ),
    ClientProgram(
        name="llama-index",
        title="LlamaIndex",
        environment=_python("llama-index", "llama-index-llms-openai-like==0.8.1"),
        program="llama_index_client.py",
        refused=_CALL,
    ),
    ClientProgram(
        name="instructor",
        title="Instructor, default mode",
        environment=_python("instructor", "instructor==1.17.0"),
        program="instructor_client.py",
        cases=(STREAMED, TOOLS, STRUCTURED),
        skipped={(MODEL, TOOLS): "its schema of a list requires no field, and the small model leaves them out"},
    ),
    ClientProgram(
        name="pydantic-ai",
        title="Pydantic AI",
        environment=_python("pydantic-ai", "pydantic-ai-slim[openai]==2.68.0"),
        program="pydantic_ai_client.py",
        refused=_CALL,
    ),
    ClientProgram(
        name="ai-sdk",
        title="Vercel AI SDK",
        environment=NodeEnvironment("client-ai-sdk", ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "zod@4.6.7")),
        program="ai_sdk.mjs",
        refused=_SCHEMA,
    ),
)
