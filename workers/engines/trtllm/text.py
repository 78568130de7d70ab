"""Tokenizer adapter of TensorRT-LLM: prompts to token ids, ids to text up to a stop string; sampling parameters.

It works with any tokenizer that has encode, decode and apply_chat_template, and does not know the engine.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engine import Logprob, Request, Sampling, token_text
from workers.engines.calls import BEGIN_TAG, END_TAG
from workers.engines.chats import NONE, OF_TEMPLATE, ChatFormat, Shown, Variables, opens_reasoning, refused
from workers.engines.reasoning import BEGIN, END
from workers.engines.text import ControlTokens

TAGS = frozenset((BEGIN, END, BEGIN_TAG, END_TAG))
INCOMPLETE = "\ufffd"
"""A decoder's output for the bytes of an incomplete character."""

NO_VARIABLES = frozenset(("chat_template", "messages", "self"))
"""Names that every rendering uses itself."""

WINDOW = 16
"""Tokens decoded again with each step, because a token's text depends on its neighbours. Half are kept as context."""


class CheckpointInfo(NamedTuple):
    """Properties of a model from its checkpoint folder; 0 and () if missing."""

    context: int
    vocabulary: int
    end_ids: tuple[int, ...]


def read_checkpoint(folder: Path) -> CheckpointInfo:
    """Read the folder's configuration files. Raises ValueError if one is not JSON, OSError."""
    config, generation = (_read_json(folder / name) for name in ("config.json", "generation_config.json"))
    model = config | config.get("text_config", {})
    ends = generation.get("eos_token_id", model.get("eos_token_id"))
    return CheckpointInfo(
        int(model.get("max_position_embeddings") or 0),
        int(model.get("vocab_size") or 0),
        tuple(ends if isinstance(ends, list) else [] if ends is None else [ends]),
    )


MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "down_proj": "mlp_4h_to_h",
    "up_proj": "mlp_gate",
    "gate_up_proj": "mlp_gate_up",
}
"""TensorRT-LLM's names of the modules that an adapter may change, by PEFT's."""


def adapter_modules(folders: Mapping[str, str], max_rank: int) -> list[str]:
    """The modules that these adapters change, all together. Raises ValueError, OSError."""
    found: dict[str, None] = {}
    for name, folder in folders.items():
        config = _read_json(Path(folder) / "adapter_config.json")
        targets, rank = config.get("target_modules"), config.get("r")
        if not isinstance(targets, list) or not MODULES.keys() >= {str(each) for each in targets}:
            raise ValueError(f"adapter {name}: its target_modules are {targets!r}, known are {', '.join(MODULES)}")
        if not isinstance(rank, int) or rank > max_rank:
            raise ValueError(f"adapter {name}: its rank is {rank}, and max_lora_rank {max_rank}")
        found |= dict.fromkeys([MODULES[each] for each in targets])
    return [*found]


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes()) if path.exists() else {}
    return content if isinstance(content, dict) else {}


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A byte in the vocabulary of a SentencePiece tokenizer."""
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [each for each in range(256) if each not in _VISIBLE]
_BYTE_LETTERS = {chr(each): each for each in _VISIBLE} | {chr(256 + at): each for at, each in enumerate(_HIDDEN)}
"""The bytes that the letters of a byte-level tokenizer's vocabulary stand for."""


class Prompt(NamedTuple):
    """A prompt as token ids."""

    ids: list[int]
    opened: bool
    """It ends with the tag that begins reasoning."""


class Codec:
    """Wraps the model's tokenizer behind one interface."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decoder = copy.deepcopy(tokenizer)
        """For answers: while one thread tokenises a prompt, another must not use the same tokenizer."""
        self._inner = inner = getattr(tokenizer, "tokenizer", tokenizer)
        added = getattr(inner, "added_tokens_decoder", {})
        special = {token: str(each) for token, each in added.items() if getattr(each, "special", False)}
        # Texts that this tokenizer recognises as control tokens anywhere.
        self._control = ControlTokens([*special.values(), *map(str, getattr(inner, "all_special_tokens", ()))])
        self._tags = {token: text for token, text in special.items() if text in TAGS}
        """Tags that mark reasoning and calls, and that the tokenizer would leave out of a text."""
        self._named = NO_VARIABLES.union(_parameters(tokenizer), _parameters(inner))
        self.chats = ChatFormat(_template_of(tokenizer, inner), self._render, self._control)
        own = getattr(tokenizer, "eos_token_id", None)
        self.end_ids = () if own is None else (own,)
        self.vocabulary = len(inner) if hasattr(inner, "__len__") else 0
        """Number of token ids; 0: unknown."""

    def prompt(self, request: Request, *, begins: bool = True, special: bool = True, most: float = math.inf) -> Prompt:
        """Convert a prompt to token ids. Control tokens in messages become text, those in a raw prompt stay.

        Args:
            begins: a conversation goes up to where the answer begins.
            special: a raw text gets the tokens that the tokenizer adds.
            most: bytes of the text that is tokenised.

        Raises Refused when the chat template rejects the conversation, and for a longer text.
        """
        raw = request.prompt if isinstance(request.prompt, str) else None
        if raw is None and not request.turns:
            return Prompt(list(request.ids), opened=False)
        pieces = self.chats.conversation(request, begins=begins) if raw is None else [raw]
        if sum([len(piece.encode()) for piece in pieces]) > most:
            param = "messages" if request.turns else "prompt"
            raise refused(f"{param}: the token ids of {most} bytes are told at most. Send its parts.", param)
        if raw is None:
            return Prompt(self.ids(pieces), opens_reasoning(pieces[-1]))
        return Prompt(list(self._tokenizer.encode(raw, add_special_tokens=special)), opened=False)

    def ids(self, pieces: Sequence[str]) -> list[int]:
        """Tokenise each piece separately, so that a control token that was cut in two stays text."""
        return [each for piece in pieces for each in self._tokenizer.encode(piece, add_special_tokens=False)]

    def _render(
        self, messages: Shown, tools: Shown | None = None, variables: Variables = NONE, *, begins: bool = True
    ) -> str:
        if taken := sorted(self._named & variables.keys()):
            raise refused(f"{taken[0]} is no variable of a chat template", OF_TEMPLATE)
        more = dict(variables) if tools is None else {"tools": tools, **variables}
        try:
            # As text: the result of tokenize=True differs between versions of the tokenizer library.
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begins, **more)
        except Exception as error:  # the template is the model's own code and may raise anything
            raise refused(f"the model's chat template does not take these messages: {error}", "messages") from error
        return str(text)

    def past_ids(self, past: Sequence[tuple[str, Sequence[int], int]]) -> list[int]:
        """Token ids of what earlier attempts generated; text is tokenised again where not all ids are known."""
        ids: list[int] = []
        for text, known, count in past:
            ids += known if len(known) == count else self.ids(self._control.cut(text))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids without special tokens, tags aside."""
        if self._tags.keys().isdisjoint(ids):
            return self.text(ids, special=False)
        parts = groupby(ids, self._tags.get)
        return "".join([tag * len([*run]) if tag else self.text([*run], special=False) for tag, run in parts])

    def text(self, ids: Sequence[int], *, special: bool = True) -> str:
        """The text of token ids, special tokens included."""
        return str(self._decoder.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def name(self, token: int) -> str:
        """The text of one token, special tokens included, as `token_text` writes it."""
        text = self.text([token])
        if INCOMPLETE not in text or not hasattr(self._inner, "convert_ids_to_tokens"):
            return text
        piece = str(self._inner.convert_ids_to_tokens(token))
        if _BYTE.fullmatch(piece):
            return token_text(bytes([int(piece[3:5], 16)]))
        data = [_BYTE_LETTERS.get(letter, -1) for letter in piece]
        return text if -1 in data else token_text(bytes(data))


def _template_of(tokenizer: Any, inner: Any) -> str:
    """The source of the chat template, or of all; "": the model has none."""
    if not hasattr(tokenizer, "apply_chat_template"):
        return ""
    source = getattr(inner, "chat_template", "a tokenizer's own code") or ""
    return "\n".join(map(str, source.values())) if isinstance(source, Mapping) else str(source)


def _parameters(tokenizer: Any) -> list[str]:
    """What the tokenizer is told of a rendering by name, beside variables of the template."""
    try:
        return [*inspect.signature(tokenizer.apply_chat_template).parameters]
    except (AttributeError, TypeError, ValueError):
        return []


class TextStream:
    """The text of one request's token ids; bytes of an incomplete character wait for the rest."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        past: Sequence[int] = (),
        shown: str = "",
    ) -> None:
        """`past`: the ids that earlier attempts generated; `shown`: what was shown of them. They may have held text
        back, which comes with the next one."""
        self._decode = decode
        self._window = list(prompt[-WINDOW // 2 :])
        self._shown = len(decode(self._window).rstrip(INCOMPLETE)) if self._window else 0
        generated = self._added(past)
        self._overdue = generated[len(shown) :] if generated.startswith(shown) else ""

    def feed(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Return the text that they add. `last`: nothing follows, so nothing waits."""
        text, self._overdue = self._overdue + self._added(ids), ""
        if not last:
            return text
        return text + (self._decode(self._window)[self._shown :] if self._window else "")

    def _added(self, ids: Sequence[int]) -> str:
        """The text that these ids add."""
        if not ids:
            return ""
        self._window += ids
        whole = self._decode(self._window)
        ready = whole.rstrip(INCOMPLETE)
        added, self._shown = ready[self._shown :], max(self._shown, len(ready))
        if ready == whole and len(self._window) > WINDOW:
            self._window = self._window[-WINDOW // 2 :]
            self._shown = len(self._decode(self._window))
        return added


UNLIKELY = -9999.0
"""Replaces a missing log-probability; finite, because JSON has no infinity."""


def keywords(
    sampling: Sampling, max_tokens: int, end_ids: Sequence[int], *, prompt: int = 0, timed: bool = False
) -> dict[str, Any]:
    """Keyword arguments of a new SamplingParams, into which the engine writes, so that requests never share one. None:
    the engine's own default.

    Stop strings are left out: without the engine's detokeniser they would match only one exact tokenisation.

    Args:
        prompt: tokens that penalties do not count.
        timed: the engine measures when it ran the request.
    """
    greedy, seed = 0 in (sampling.temperature, sampling.top_p), sampling.seed
    penalised = sampling.presence_penalty or sampling.frequency_penalty
    return ({"prompt_ignore_length": prompt} if penalised else {}) | {
        "max_tokens": max_tokens,
        "end_id": end_ids[0],
        "stop_token_ids": list(end_ids[1:]) or None,
        "n": 1,
        "best_of": 1,
        "detokenize": False,
        "return_perf_metrics": timed,
        "temperature": None if greedy else _or_one(sampling.temperature),
        "top_p": None if greedy else _or_one(sampling.top_p),
        "top_k": 1 if greedy else sampling.top_k,  # 1 is greedy by every version's definition
        "min_p": None if greedy else sampling.min_p,
        "seed": None if greedy or seed is None else seed % 2**63,  # the engine takes no negative seed
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        # Versions differ on whether 0 means "the token's own" or "off".
        "logprobs": None if sampling.logprobs is None else max(1, sampling.logprobs),
        "guided_decoding": None,
    }


def _or_one(asked: float | None) -> float:
    return 1.0 if asked is None else asked


def logprob(token: int, entry: Any, alternatives: int, text: Callable[[int], str]) -> Logprob:
    """The log-probability of a token. An entry maps token ids to objects with `.logprob`, or is the token's own
    number."""
    if not isinstance(entry, Mapping):
        return Logprob(text(token), float(entry))
    values: dict[int, float] = {other: float(value.logprob) for other, value in entry.items()}
    best = sorted(values.items(), key=lambda pair: pair[1], reverse=True)[:alternatives]
    return Logprob(text(token), values.get(token, UNLIKELY), tuple((text(other), value) for other, value in best))
