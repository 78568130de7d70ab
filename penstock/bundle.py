"""Bundle: the folder that holds `api`, `workers` and the other packages of an installed Penstock.

These names are too plain for the top of site-packages, where another project's package of the same name would replace
ours. So the wheel puts them into `penstock/_bundle`, which is on no import path until a process of Penstock adds it.
In a checkout there is no bundle: these packages lie beside this one, and whatever finds one finds all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

BUNDLE = Path(__file__).absolute().with_name("_bundle")

PACKAGES_DIR = BUNDLE if BUNDLE.is_dir() else BUNDLE.parents[1]
"""The folder of the other packages: the bundle, or the root of a checkout."""


def add_to_path() -> None:
    """Let this process and its children import the bundled packages, before any others of these names. Does nothing in
    a checkout."""
    if PACKAGES_DIR != BUNDLE:
        return
    if sys.path[:1] != [str(BUNDLE)]:
        sys.path.insert(0, str(BUNDLE))
    os.environ["PYTHONPATH"] = python_path(os.environ)


def python_path(environ: Mapping[str, str]) -> str:
    """The PYTHONPATH of `environ` with PACKAGES_DIR in front."""
    before = environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in before if path not in ("", str(PACKAGES_DIR))]
    return os.pathsep.join([str(PACKAGES_DIR), *others])
