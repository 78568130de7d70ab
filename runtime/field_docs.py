"""What the fields of a settings struct mean: the texts that its source has below them."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from itertools import pairwise

SENTENCE = re.compile(r"(?<=[^.]{2}[.!?])\s+(?=[A-Z\"`])")
"""The gap between two sentences."""


def field_meanings(kind: type) -> dict[str, str]:
    """By the name of a field of `kind`, the first sentence of the text below it; fields without a text are left out.
    Empty where the source is not installed."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:
        return {}
    (definition,) = ast.parse(source).body
    if not isinstance(definition, ast.ClassDef):
        return {}
    return {name: text for field, below in pairwise(definition.body) for name, text in _meaning(field, below)}


def _meaning(field: ast.stmt, below: ast.stmt) -> list[tuple[str, str]]:
    match field, below:
        case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
            return [(name, SENTENCE.split(" ".join(text.split()))[0])]
    return []
