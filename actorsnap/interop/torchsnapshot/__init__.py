# SPDX-License-Identifier: Apache-2.0
"""torchsnapshot's calls over actorsnap: change the import. See ``docs/migrate/torchsnapshot.md``.

from actorsnap.interop.torchsnapshot import Snapshot, StateDict, RNGState
"""

from actorsnap.interop.formats.torchsnapshot_records import (
    ChunkedRecord as ChunkedTensorEntry,
)
from actorsnap.interop.formats.torchsnapshot_records import (
    DictRecord as DictEntry,
)
from actorsnap.interop.formats.torchsnapshot_records import (
    ListRecord as ListEntry,
)
from actorsnap.interop.formats.torchsnapshot_records import (
    Metadata as SnapshotMetadata,
)
from actorsnap.interop.formats.torchsnapshot_records import (
    OrderedDictRecord as OrderedDictEntry,
)
from actorsnap.interop.formats.torchsnapshot_records import (
    PickleRecord as ObjectEntry,
)
from actorsnap.interop.formats.torchsnapshot_records import (
    ShardedRecord as ShardedTensorEntry,
)
from actorsnap.interop.formats.torchsnapshot_records import (
    TensorRecord as TensorEntry,
)
from actorsnap.interop.formats.torchsnapshot_records import (
    ValueRecord as PrimitiveEntry,
)
from actorsnap.interop.torchsnapshot.snapshots import PendingSnapshot, Snapshot
from actorsnap.interop.torchsnapshot.statefuls import RNGState, StateDict
from actorsnap.state.stateful import Stateful

__all__ = [
    "ChunkedTensorEntry",
    "DictEntry",
    "ListEntry",
    "ObjectEntry",
    "OrderedDictEntry",
    "PendingSnapshot",
    "PrimitiveEntry",
    "RNGState",
    "ShardedTensorEntry",
    "Snapshot",
    "SnapshotMetadata",
    "StateDict",
    "Stateful",
    "TensorEntry",
]
