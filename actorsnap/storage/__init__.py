# SPDX-License-Identifier: Apache-2.0
"""Where snapshots are stored.

``base`` defines a backend's duties; ``registry`` finds and imports one by URL; ``wrapper`` is the
base of wrappers, such as those of ``network``.
"""

from actorsnap.storage.base import (
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    RunBlocking,
    Storage,
    StorageContext,
    StorageFactory,
    check_key,
)
from actorsnap.storage.network import AdaptiveStatistics, AdaptiveStorage, RetryPolicy, RetryStorage
from actorsnap.storage.registry import known_schemes, open_storage, register
from actorsnap.storage.wrapper import Wrapper, WriterWrapper

__all__ = [
    "AdaptiveStatistics",
    "AdaptiveStorage",
    "Capabilities",
    "ObjectInfo",
    "ObjectWriter",
    "RetryPolicy",
    "RetryStorage",
    "RunBlocking",
    "Storage",
    "StorageContext",
    "StorageFactory",
    "Wrapper",
    "WriterWrapper",
    "check_key",
    "known_schemes",
    "open_storage",
    "register",
]
