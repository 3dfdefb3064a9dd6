# SPDX-License-Identifier: Apache-2.0
"""Frames between a trainer and its uploader process come back as they were sent."""

from __future__ import annotations

import msgspec

from actorsnap.format.compression import Codec
from actorsnap.planning.packing import Item, PackingRules, RankPlan
from actorsnap.protocol.failure import EncodedError
from actorsnap.protocol.uploader import (
    Alive,
    Answered,
    AnswerWanted,
    AttemptsEnded,
    BeginCopy,
    BeginSave,
    Begun,
    CancelSave,
    Configure,
    CopyEnded,
    CopyMoved,
    EndReceived,
    Finished,
    FromProcess,
    LeaveTeam,
    Logged,
    MessageSent,
    Progressed,
    SentLocation,
    Staged,
    StagingWanted,
    Structure,
    TakeOver,
    TakeOverPrepared,
    ToProcess,
)


def test_frames_come_back_as_they_were() -> None:
    rules = PackingRules(
        chunk_bytes=1 << 22,
        max_objects=4,
        min_object_bytes=1,
        codec=Codec(name="zstd", level=3),
    )
    structure = Structure(
        globs=(),
        sharded=(),
        items=[Item("model/w", "float32", (2, 3), 24, 4)],
        kinds=["parameter"],
        dtypes=["float32"],
        requires_grad=[0],
        holders=[((0, 2), [0])],
        rank_zero_wins=[0],
        memory_formats={0: "channels_last"},
        attributes=b"[]",
        entries=b"[]",
        values=[1],
        optimizers={"o": "torch.optim.sgd.SGD"},
    )
    save = BeginSave(
        number=7,
        digest=b"d",
        structure=structure,
        values=[(0, b"{}")],
        forgotten=b"e",
        place=SentLocation("s3://b/x", b"s3://b/x", {"key": 1}),
        options=b"o",
        left_s=3.5,
        budget_bytes=1 << 30,
        overwrite=True,
        resume=False,
        metadata=b"{}",
        previous_attempt="a",
        team=0,
        rank=1,
        world_size=2,
    )
    to_process: list[ToProcess] = [
        save,
        msgspec.structs.replace(save, structure=None, team=None),
        BeginCopy(7, save.place, SentLocation("/d", b"/d", {}), b"o", is_paced=True),
        Staged(7, [(0, 4096), (1, None)]),
        Staged(7, is_waiting=True),
        Staged(7, is_last=True),
        Staged(7, error=(EncodedError("MemoryError", "no memory"),)),
        CancelSave(7, "enough"),
        CancelSave(7, "rank 1 has failed", is_concluded=True),
        Configure([(b"A", b"1"), (b"B", None)], log_level=10),
        Configure(duty=0.5),
        EndReceived(7, True, b"m"),
        Answered(7, "suspicion", None),
        Answered(7, "suspicion", "rank 1 is silent"),
        Answered(7, "turn", True),
        TakeOver(7, "h", 29500, "p", "job", b"s", 3),
        LeaveTeam(3),
        AttemptsEnded(["a"]),
        Alive(),
    ]
    from_process: list[FromProcess] = [
        MessageSent(7, None, b"m"),
        MessageSent(7, 1, b"m"),
        AnswerWanted(7, "turn"),
        AnswerWanted(7, "suspicion"),
        TakeOverPrepared(7, "no route"),
        Begun(7, "a"),
        StagingWanted(7, rules, RankPlan()),
        StagingWanted(7, rules, RankPlan(), "a", b"/s"),
        Progressed(7, 5, 3, [0, 1]),
        Finished(7, (EncodedError("StorageFull", "full", b"f", ("note",)),)),
        Finished(7, None, record=b"r", retries=2),
        CopyMoved(7, 1, 2),
        CopyEnded(7, (EncodedError("StorageFull", "full", b"f", ("note",)),)),
        CopyEnded(7, None, b"r"),
        Logged(30, "actorsnap", "text"),
        AttemptsEnded(["a"]),
        Alive(),
    ]
    for frames, union in ((to_process, ToProcess), (from_process, FromProcess)):
        encoded = [msgspec.msgpack.encode(frame) for frame in frames]
        assert [msgspec.msgpack.decode(data, type=union) for data in encoded] == frames
