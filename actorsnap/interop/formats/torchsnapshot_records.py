# SPDX-License-Identifier: Apache-2.0
"""Contents of torchsnapshot's ``.snapshot_metadata``: a record per leaf and container."""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from importlib import import_module
from typing import Annotated, Any, TypeAlias

import msgspec

from actorsnap.errors import FormatError, UsageError
from actorsnap.format.manifest import MAX_RANKS

METADATA_KEY = ".snapshot_metadata"

_MAX_YAML_DEPTH = 32

_DOUBLE = struct.Struct("<d")

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Tagged(msgspec.Struct, frozen=True, tag_field="type"):
    @property
    def type(self) -> str:
        return str(type(self).__struct_config__.tag)


class TensorRecord(_Tagged, frozen=True, tag="Tensor"):
    """A tensor: bytes of a file (``buffer_protocol``), or a file of ``torch.save``."""

    location: str
    serializer: str
    dtype: str
    shape: tuple[_Size, ...]
    replicated: bool = False
    byte_range: tuple[_Size, _Size] | None = None


class ShardRecord(msgspec.Struct, frozen=True):
    offsets: tuple[_Size, ...]
    sizes: tuple[_Size, ...]
    tensor: TensorRecord


class ShardedRecord(_Tagged, frozen=True, tag="ShardedTensor"):
    """The shards that one rank saved. The shape of the whole tensor is not recorded."""

    shards: tuple[ShardRecord, ...]


class DTensorRecord(ShardedRecord, frozen=True, tag="DTensor"):
    """Written by development versions only. Ranks may list equal shards."""


class ChunkedRecord(_Tagged, frozen=True, tag="ChunkedTensor"):
    """A large tensor, cut along its first dim."""

    dtype: str
    shape: tuple[_Size, ...]
    chunks: tuple[ShardRecord, ...]
    replicated: bool = False


class PickleRecord(_Tagged, frozen=True, tag="object"):
    """Anything else: a file of ``torch.save``."""

    location: str
    serializer: str
    obj_type: str = ""
    replicated: bool = False


class ListRecord(_Tagged, frozen=True, tag="list"):
    """Its children are named by their positions."""


class DictRecord(_Tagged, frozen=True, tag="dict"):
    keys: tuple[bool | int | str, ...]


class OrderedDictRecord(DictRecord, frozen=True, tag="OrderedDict"):
    pass


class ValueRecord(_Tagged, frozen=True):
    """A value, as text. ``replicated`` as of tensors: all ranks may read it."""

    serialized_value: str
    replicated: bool = False

    @property
    def value(self) -> Any:
        """Raises ``ValueError`` if it is malformed."""
        return self.serialized_value

    @property
    def readable(self) -> str | None:
        return None


class StrRecord(ValueRecord, frozen=True, tag="str"):
    pass


class IntRecord(ValueRecord, frozen=True, tag="int"):
    @property
    def value(self) -> Any:
        return int(self.serialized_value)


class BoolRecord(ValueRecord, frozen=True, tag="bool"):
    @property
    def value(self) -> Any:
        if self.serialized_value not in ("True", "False"):
            raise ValueError("it is neither True nor False")
        return self.serialized_value == "True"


class BytesRecord(ValueRecord, frozen=True, tag="bytes"):
    @property
    def value(self) -> Any:
        return b64decode(self.serialized_value, validate=True)


class FloatRecord(ValueRecord, frozen=True, tag="float"):
    @property
    def value(self) -> Any:
        (value,) = _DOUBLE.unpack(self._bytes())
        return value

    @property
    def readable(self) -> str | None:
        return str(self.value)

    def _bytes(self) -> bytes:
        data = b64decode(self.serialized_value, validate=True)
        if len(data) != _DOUBLE.size:
            raise ValueError(f"{len(data)} bytes are not a double")
        return data


def value_record(
    value: object, *, replicated: bool
) -> BoolRecord | IntRecord | StrRecord | BytesRecord | FloatRecord | None:
    """Returns None for a value that torchsnapshot pickles."""
    kind = type(value)
    if isinstance(value, bool) and kind is bool:
        return BoolRecord(str(value), replicated)
    if kind is int:
        return IntRecord(str(value), replicated)
    if kind is str:
        return StrRecord(str(value), replicated)
    if isinstance(value, bytes) and kind is bytes:
        return BytesRecord(b64encode(value).decode(), replicated)
    if isinstance(value, float) and kind is float:
        return FloatRecord(b64encode(_DOUBLE.pack(value)).decode(), replicated)
    return None


Record: TypeAlias = (
    TensorRecord
    | ShardedRecord
    | DTensorRecord
    | ChunkedRecord
    | PickleRecord
    | ListRecord
    | DictRecord
    | OrderedDictRecord
    | StrRecord
    | IntRecord
    | BoolRecord
    | BytesRecord
    | FloatRecord
)


class Metadata(msgspec.Struct, frozen=True):
    """``manifest``: by rank and path, ``"0/model/weight"``."""

    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    manifest: dict[str, Record]
    version: str = ""


def parse_metadata(data: bytes) -> Metadata:
    """Raises FormatError: It is malformed, or has an entry of an unknown type."""
    try:
        # Every JSON text is said to be YAML. A parser of YAML refuses some, and is slow.
        if data.lstrip()[:1] == b"{":
            return msgspec.json.decode(data, type=Metadata)
        return msgspec.convert(_parse_yaml(data), Metadata)
    except (ValueError, RecursionError) as error:
        raise FormatError(key=METADATA_KEY, detail=f"it is malformed: {error}"[:500]) from error


def _parse_yaml(data: bytes) -> Any:
    """Parses what torchsnapshot wrote before its release 0.1.0."""
    try:
        yaml: Any = import_module("yaml")
    except ImportError as error:
        raise UsageError(
            f"{METADATA_KEY} is written in YAML, as before torchsnapshot 0.1.0: install PyYAML"
        ) from error
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        # The loader recurses without a limit, and a few aliases stand for any number of values.
        depth = 0
        for event in yaml.parse(data, Loader=loader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > _MAX_YAML_DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError("it has aliases, or nests deeper than torchsnapshot's metadata")
        return yaml.load(data, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
