"""A model by its name, as command lines and tests give it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError
from .model import declared


def load_model(named: str) -> Any:
    """The model of this name, `module:name` or `file.py:name`; of a class, an instance made without arguments. Also
    `model.xml`, which is SAS's, and `model.xml:without=window,window`.

    ConfigError where there is none. The module is imported, and does what it does when it is.
    """
    file, _, left_out = named.partition(":without=") if isinstance(named, str) else ("", "", "")
    if file.endswith(".xml"):
        from ..windows import load_project  # which takes time to load

        return load_project(file, left_out.split(",") if left_out else ())
    module, colon, name = named.rpartition(":") if isinstance(named, str) else ("", "", "")
    if not colon or not module or not name:
        raise ConfigError(f"a model is named by its module and its name, such as vwap.py:Vwap, not {named!r}")
    found = getattr(_load_module(module), name, None)
    if found is None:
        raise ConfigError(f"there is no {name} in {module}")
    if isinstance(found, type):
        try:
            found = found()
        except TypeError as e:
            raise ConfigError(f"{named} cannot be made without arguments: {e}") from None
    declared(found)
    return found


def _load_module(name: str) -> ModuleType:
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert spec is not None  # the suffix says what loads it
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as e:  # whatever a module may do when it is imported
        raise ConfigError(f"the model's module {name} cannot be imported: {type(e).__name__}: {e}") from e
