"""Frames between a trainer and its uploader process come back as they were sent."""

from __future__ import annotations

import msgspec

from actorsnap.format.compression import Codec
from actorsnap.planning.packing import Item, PackingRules, RankPlan
from actorsnap.protocol.failure import EncodedError
from actorsnap.protocol.uploader import (
    AbsenceAsked,
    AbsenceReported,
    Alive,
    AttemptsEnded,
    Begun,
    CancelSave,
    ChunksReleased,
    ChunksStaged,
    EndReceived,
    EndSave,
    Finished,
    FromProcess,
    LeaveTeam,
    Logged,
    MessageSent,
    ProcessStarted,
    Progressed,
    Remember,
    Save,
    StagingEnded,
    StagingFailed,
    StagingWaits,
    StagingWanted,
    Structure,
    TakeOver,
    TakeOverPrepared,
    TeamRank,
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
    save = Save(
        number=7,
        structure=b"d",
        values=[(0, b"{}")],
        url="s3://b/x",
        at=b"s3://b/x",
        storage_options={"key": 1},
        options=b"o",
        left_s=3.5,
        budget_bytes=1 << 30,
        overwrite=True,
        resume=False,
        metadata=b"{}",
        after="a",
        team=TeamRank(team=0, rank=1, world_size=2),
    )
    to_process: list[ToProcess] = [
        Remember(b"d", structure, [b"{}"], b"e"),
        save,
        ChunksStaged(7, [(0, 4096), (1, None)]),
        StagingWaits(7),
        StagingEnded(7),
        StagingFailed(7, (EncodedError("MemoryError", "no memory"),)),
        CancelSave(7, "enough"),
        EndSave(7, "rank 1 has failed"),
        EndReceived(7, True, b"m"),
        AbsenceReported(7, None),
        TakeOver(7, "h", 29500, "p", "job", b"s", 3),
        LeaveTeam(3),
        AttemptsEnded(["a"]),
        Alive(),
    ]
    from_process: list[FromProcess] = [
        ProcessStarted("0.1.0"),
        MessageSent(7, None, b"m"),
        MessageSent(7, 1, b"m"),
        AbsenceAsked(7),
        TakeOverPrepared(7, "no route"),
        Begun(7, "a"),
        StagingWanted(7, rules, RankPlan()),
        StagingWanted(7, rules, RankPlan(), "a", b"/s"),
        ChunksReleased(7, [0, 1]),
        Progressed(7, 5, 3),
        Finished(7, (EncodedError("StorageFull", "full", b"f", ("note",)),)),
        Finished(7, None),
        Logged(30, "actorsnap", "text"),
        AttemptsEnded(["a"]),
        Alive(),
    ]
    for frames, union in ((to_process, ToProcess), (from_process, FromProcess)):
        encoded = [msgspec.msgpack.encode(frame) for frame in frames]
        assert [msgspec.msgpack.decode(data, type=union) for data in encoded] == frames
