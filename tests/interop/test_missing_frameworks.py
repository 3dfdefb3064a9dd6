# SPDX-License-Identifier: Apache-2.0
"""An adapter without its framework says which extra to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    adapter = f"actorsnap.interop.{name}"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, adapter, raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'actorsnap\[{name}\]'"):
        importlib.import_module(adapter)
