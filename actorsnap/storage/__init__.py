"""Where snapshots are stored: the seam, the registry and the policies around a backend.

``base`` states what a backend must do; ``registry`` finds one by URL; ``wrappers`` adds
policies, and ``adaptive`` the one that learns. Backends are imported only when a URL asks for them.
"""

from actorsnap.storage.adaptive import AdaptiveStatistics, AdaptiveStorage
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
from actorsnap.storage.registry import known_schemes, open_storage, register
from actorsnap.storage.wrappers import (
    LimitedStorage,
    PrefixStorage,
    RetryPolicy,
    RetryStorage,
    Wrapper,
    WriterWrapper,
)

__all__ = [
    "AdaptiveStatistics",
    "AdaptiveStorage",
    "Capabilities",
    "LimitedStorage",
    "ObjectInfo",
    "ObjectWriter",
    "PrefixStorage",
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
