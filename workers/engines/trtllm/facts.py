"""Facts about one version of TensorRT-LLM, read from its Python source without importing it.

The adapter decides by them, at its start and in `penstock doctor trtllm`, and not by version numbers: a build may have
any mixture of changes. A file or name that is not there means: this version cannot do it.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

PUBLIC = ("tensorrt_llm.llmapi", "tensorrt_llm", "tensorrt_llm.executor")
"""Modules whose names are public, in the order in which they are asked for one."""
LLM_ARGS, SAMPLING = "tensorrt_llm.llmapi.llm_args", "tensorrt_llm.sampling_params"
SYMBOLS = {
    "LLM": "tensorrt_llm.llmapi.llm",
    "RequestOutput": "tensorrt_llm.llmapi.llm",
    "CompletionOutput": "tensorrt_llm.executor.result",
    "SamplingParams": SAMPLING,
    "GuidedDecodingParams": SAMPLING,
    "TorchLlmArgs": LLM_ARGS,
    "KvCacheConfig": LLM_ARGS,
    "SchedulerConfig": LLM_ARGS,
    "WaitingQueuePolicy": LLM_ARGS,
    "DecodingBaseConfig": LLM_ARGS,
    "LoRARequest": "tensorrt_llm.executor.request",
    "RequestError": "tensorrt_llm.executor.utils",
    "ThinkingBudgetLogitsProcessor": "tensorrt_llm.llmapi.thinking_budget",
}
"""What the adapter uses, and the module in which it looks for a name that no public module has."""
CALL = "LLM.generate_async"
MAX_LOOKUPS = 200
"""Modules asked for one name, and base classes of one class."""
PYEXECUTOR = "tensorrt_llm._torch.pyexecutor"
SAMPLER = f"{PYEXECUTOR}.sampler"
GRAMMAR, GUIDED = f"{PYEXECUTOR}.grammar_matcher", f"{PYEXECUTOR}.guided_decoder"


@dataclass(frozen=True)
class Facts:
    """What the adapter decides by."""

    version: str
    """"": unknown."""
    modules: Mapping[str, str]
    """By name in SYMBOLS, the module from which to import it. A name that is not there cannot be imported."""
    names: Mapping[str, frozenset[str]]
    """By symbol: the fields of a class, the members of an enumeration, the keywords of "LLM.generate_async", and of
    "LLM" its methods."""
    penalties: bool
    """The sampler applies presence, frequency and repetition penalties."""
    prompt_ignore_length: bool
    """Presence and frequency penalties can leave out the first tokens of the prompt."""
    seed: bool
    """Each request's seed is honoured, also in a batch."""
    top_k: bool
    """The sampler reads it beside `top_p`."""
    min_p: bool
    embedding_bias: bool
    """The sampler reads it."""
    alternatives: bool
    """Log-probabilities come with those of other tokens."""
    grammar_errors: bool
    """A schema that its library does not take fails its request alone; else it ends the engine."""
    tag_formats: bool
    """A structural tag goes to the grammar library as it is, in the library's newer form."""
    max_logprobs: int
    """The most alternatives per token."""

    def has(self, name: str) -> bool:
        """Whether e.g. "SamplingParams.min_tokens" exists."""
        symbol, _, member = name.rpartition(".")
        return member in self.names.get(symbol, ())

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Of such names, those that do not exist. A symbol whose source was not found may have any."""
        return [name for name in names if name.rpartition(".")[0] in self.names and not self.has(name)]

    @property
    def cache_salt(self) -> bool:
        """Cached prompts of tenants can be kept apart."""
        return self.has(f"{CALL}.cache_salt")

    @property
    def priority(self) -> bool:
        """Requests that wait in the engine can be ordered."""
        return self.has(f"{CALL}.priority") and self.has("WaitingQueuePolicy.PRIORITY")

    @property
    def structural_tag(self) -> bool:
        """Guided decoding can begin at a tag, as calls of tools do."""
        return self.has("GuidedDecodingParams.structural_tag") and self.tag_formats and self.grammar_errors

    @property
    def logit_bias(self) -> bool:
        return self.has("SamplingParams.embedding_bias") and self.embedding_bias


@dataclass(frozen=True, slots=True)
class Definition:
    """Where a name is defined."""

    module: str
    node: ast.AST
    place: str
    """Path and line in the folder of the package."""


class Source:
    """The source of a package `tensorrt_llm`, parsed file by file. `root`: its folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, tuple[str, ast.Module] | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        """None: there is no such file, or it cannot be parsed."""
        return found[1] if (found := self._read(module)) else None

    def within(self, package: str) -> list[str]:
        """A module and, if it is a package, all modules in its folder."""
        folder = self.root.joinpath(*package.split(".")[1:])
        inner = [path.relative_to(folder).with_suffix("").parts for path in sorted(folder.rglob("*.py"))]
        return [package, *(".".join((package, *parts)) for parts in inner if parts[-1] != "__init__")]

    def place(self, module: str, node: ast.AST | None = None) -> str:
        """Path and line of a module or of a part of it; "": there is none."""
        found = self._read(module)
        return f"{found[0]}:{getattr(node, 'lineno', 1)}" if found else ""

    def _read(self, module: str) -> tuple[str, ast.Module] | None:
        if module not in self._trees:
            self._trees[module] = None
            path = Path(*module.split(".")[1:])
            for each in (path.with_name(f"{path.name}.py") if path.name else path, path / "__init__.py"):
                with contextlib.suppress(SyntaxError, ValueError, OSError, RecursionError, MemoryError):
                    if (self.root / each).is_file():
                        self._trees[module] = str(each), ast.parse((self.root / each).read_bytes())
                        break
        return self._trees[module]

    def find(self, module: str, name: str, asked: set[tuple[str, str]] | None = None) -> Definition | None:
        """The definition of `name` as `module` has it, through the imports that lead there. The last one counts.
        `asked`: modules and names where it was looked for already, because imports may run in circles."""
        asked = set() if asked is None else asked
        if (module, name) in asked or len(asked) == MAX_LOOKUPS:
            return None
        asked.add((module, name))
        tree = self.tree(module)
        for node in reversed([*statements(tree.body if tree else [])]):
            if name in bound(node):
                return Definition(module, node, self.place(module, node))
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name) or alias.name == "*":
                        wanted = name if alias.name == "*" else alias.name
                        if found := self.find(self._origin(module, node), wanted, asked):
                            return found
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """The module that a `from ... import` names."""
        if not node.level:
            return node.module or ""
        found = self._read(module)
        inside = 0 if found and found[0].endswith("__init__.py") else 1
        parts = module.split(".")
        base = parts[: len(parts) - node.level + 1 - inside]
        return ".".join([*base, *([node.module] if node.module else [])])

    def bases(self, found: Definition) -> Iterator[Definition]:
        """A class and its base classes, as far as their source is there."""
        known = [found]
        for each in known:
            yield each
            for base in each.node.bases if isinstance(each.node, ast.ClassDef) else ():
                parent = self.find(each.module, base.id) if isinstance(base, ast.Name) else None
                if parent and len(known) < MAX_LOOKUPS and parent.place not in [other.place for other in known]:
                    known.append(parent)

    def members(self, found: Definition) -> Iterator[tuple[str, Definition]]:
        """The fields, methods and attributes of a class with its bases; the parameters of a function."""
        if isinstance(args := getattr(found.node, "args", None), ast.arguments):
            yield from ((each.arg, found) for each in [*args.args, *args.kwonlyargs])
            return
        for each in self.bases(found):
            own = [(name, node) for node in getattr(each.node, "body", ()) for name in bound(node)]
            own += [(name, node) for node in ast.walk(each.node) for name in attributes(node)]
            for name, node in own:
                yield name, Definition(each.module, node, self.place(each.module, node))

    def member(self, found: Definition, name: str) -> Definition | None:
        return next((each for own, each in self.members(found) if own == name), None)

    def names(self, found: Definition) -> frozenset[str]:
        return frozenset(name for name, _ in self.members(found))

    def imports(self, module: str, last: str) -> str:
        """Where `module` imports from another one whose name ends with `last`."""
        tree = self.tree(module)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] == last:
                return self.place(module, node)
        return ""


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those in the branches of `if` and `try` too."""
    rest = body[::-1]
    while rest:
        yield (node := rest.pop())
        if isinstance(node, ast.If | ast.Try):
            rest += [*node.body, *node.orelse][::-1]


def bound(node: ast.AST) -> list[str]:
    """The names that a statement defines, imports aside."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    return [target.id for target in targets(node) if isinstance(target, ast.Name)]


def attributes(node: ast.AST) -> list[str]:
    """The attributes of `self` that a statement sets."""
    found = [target for target in targets(node) if isinstance(target, ast.Attribute)]
    return [each.attr for each in found if isinstance(each.value, ast.Name) and each.value.id == "self"]


def targets(node: ast.AST) -> list[ast.expr]:
    """What an assignment sets; [] for any other statement."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


# --- behaviour: each probe says what it found and where -------------------------------------------------------------

Found: TypeAlias = tuple[bool, str]


def _penalties(source: Source) -> Found:
    place = source.imports(f"{SAMPLER}.sampler", "penalties")
    return bool(place) and source.tree(f"{SAMPLER}.penalties") is not None, place


def _prompt_ignore_length(source: Source) -> Found:
    """Taken is not enough: the penalties must read it."""
    module, name = f"{SAMPLER}.penalties", "prompt_ignore_length"
    return _mentions(source, [module], lambda node: isinstance(node, ast.Attribute) and node.attr == name)


def _seed(source: Source) -> Found:
    """A version that warns that its kernels honour only a batch's first seed does not count."""
    place = source.imports(f"{SAMPLER}.sampler", "seed_manager")
    partly, where = _mentions(source, [f"{SAMPLER}.seed_manager"], lambda node: (
        isinstance(node, ast.Constant) and "seed_unsupported" in str(node.value)
    ))  # fmt: skip
    return bool(place) and not partly, where or place


def _samples(field: str) -> Callable[[Source], Found]:
    """Whether the sampler resolves a request's `field`. Samplers without this class take `top_p` alone."""
    return lambda source: _mentions(source, _sampler(source), lambda node: (
        isinstance(node, ast.ClassDef) and node.name == "UtilsSamplingParams"
        and any(field in bound(each) for each in node.body)
    ))  # fmt: skip


def _reads(field: str) -> Callable[[Source], Found]:
    """Whether the sampler reads a `field` of a request, whose name there may have more parts."""
    return lambda source: _mentions(
        source, _sampler(source), lambda node: isinstance(node, ast.Attribute) and field in node.attr
    )


def _sampler(source: Source) -> list[str]:
    return [*source.within(SAMPLER), f"{PYEXECUTOR}.sampling_utils"]


def _grammar_errors(source: Source) -> Found:
    """The step of guided decoding returns the requests that failed."""
    kind = source.find(GUIDED, "GuidedDecoder")
    step = source.member(kind, "execute") if kind else None
    nodes = ast.walk(step.node) if step else ()
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    return any(returned), step.place if step else ""


def _tag_formats(source: Source) -> Found:
    """The older form is taken apart before, into tags and triggers."""
    return _mentions(source, [GRAMMAR], lambda node: (
        isinstance(node, ast.Call) and len(node.args) == 1
        and getattr(node.func, "attr", "") == "compile_structural_tag"
    ))  # fmt: skip


def _mentions(source: Source, modules: Iterable[str], wanted: Callable[[ast.AST], bool]) -> Found:
    for module in modules:
        tree = source.tree(module)
        if node := next((each for each in ast.walk(tree) if wanted(each)), None) if tree else None:
            return True, source.place(module, node)
    return False, ""


BEHAVIOURS: Mapping[str, tuple[str, Callable[[Source], Found]]] = {
    "penalties": (SAMPLER, _penalties),
    "prompt_ignore_length": (SAMPLER, _prompt_ignore_length),
    "seed": (SAMPLER, _seed),
    "top_k": (SAMPLER, _samples("top_k")),
    "min_p": (SAMPLER, _samples("min_p")),
    "embedding_bias": (SAMPLER, _reads("embedding_bias")),
    "alternatives": (SAMPLER, _reads("num_logprobs")),
    "grammar_errors": (GUIDED, _grammar_errors),
    "tag_formats": (GRAMMAR, _tag_formats),
}
"""Fields of Facts, each with its probe and the module without which nothing can be said."""
MIN_LOGPROBS = 20
"""Of versions that do not say how many alternatives they give."""


def constant(source: Source, module: str, name: str) -> object:
    """The value of a constant of a module; None if it has none."""
    found = source.find(module, name)
    value = getattr(found.node, "value", None) if found else None
    return value.value if isinstance(value, ast.Constant) else None


def definitions(source: Source) -> dict[str, tuple[str, Definition]]:
    """By symbol, the module from which to import it and its definition; also of the call that submits a request."""
    found: dict[str, tuple[str, Definition]] = {}
    for symbol, home in SYMBOLS.items():
        tried = ((module, source.find(module, symbol)) for module in (*PUBLIC, home))
        if first := next(((module, each) for module, each in tried if each is not None), None):
            found[symbol] = first
    if "LLM" in found and (call := source.member(found["LLM"][1], CALL.partition(".")[2])):
        found[CALL] = found["LLM"][0], call
    return found


def read(root: Path) -> Facts:
    """The facts of the package in the folder `root`, which is called tensorrt_llm or has its content."""
    source = Source(root)
    found = definitions(source)
    limit = None
    if "SamplingParams" in found:
        limit = constant(source, found["SamplingParams"][1].module, "MAX_TOP_LOGPROBS")
    return Facts(
        version=str(constant(source, "tensorrt_llm.version", "__version__") or ""),
        modules={symbol: module for symbol, (module, _) in found.items() if symbol in SYMBOLS},
        names={symbol: source.names(each) for symbol, (_, each) in found.items()},
        max_logprobs=limit if isinstance(limit, int) else MIN_LOGPROBS,
        **{name: probe(source)[0] for name, (_, probe) in BEHAVIOURS.items()},
    )
