# SPDX-License-Identifier: Apache-2.0
"""What does a save of thousands of ranks cost the one process that coordinates it?

And an agreement on a save that rank 0 decides (``CheckpointManager``)?

All machines of a save in one process, without a clock; what goes through the job's store is
encoded, framed and counted as ``transport.store`` does it. First comes a save of which no
rank remembers anything, then one with the structure unchanged. The coordinator's seconds and
memory are those of a second coordinator, which is given what the first one was sent.

Prints one JSON line per row (job x ranks) on standard output, or all as a table. bench/README.md
has it. ``python -m bench.protocol --ranks 1024 4096 --markdown``
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from actorsnap.format.layout import data_key
from actorsnap.format.manifest import SaveRecord
from actorsnap.planning.inventory import Inventory, Scope, digest_of
from actorsnap.planning.packing import Item, PackingRules, RankPlan
from actorsnap.planning.save import plan_save
from actorsnap.protocol.agreement import Agreed, Calls, Entered, Wish, Wishes
from actorsnap.protocol.messages import (
    Arrived,
    Ask,
    CallKind,
    Failed,
    Invite,
    Label,
    Proceed,
    SaveWanted,
    ToCoordinator,
)
from actorsnap.protocol.rounds import (
    Continue,
    Coordinator,
    CoordinatorEvent,
    CoordinatorState,
    Decide,
    Decision,
    End,
    Participant,
    ParticipantEvent,
    ParticipantState,
    Reached,
    SendTo,
    ToRank,
)
from actorsnap.protocol.save import (
    Assignment,
    Details,
    Joined,
    ManifestStored,
    PlanCache,
    Question,
    SaveDecisions,
    Token,
    decode,
    encode,
    manifest_sizes,
)
from actorsnap.release import RELEASE
from actorsnap.transport.mailbox import PIECE_BYTES, Frame, Kind, Pulse
from bench.local import LOAD_AT_START, machine, note

ATTEMPT = "20260101T000000-0123abcd-1-89abcdef"
URL = "s3://training-runs/llama-70b/2026-01-01/step-00010000"
LABEL = Label(CallKind.ASYNC_TAKE, URL, 10_000)
RULES = PackingRules(chunk_bytes=16 << 20, max_objects=8, min_object_bytes=64 << 20)
SESSION = b"8 bytes."
BEAT_S = 5.0
MAX_REPEATED_BYTES = 200


class Held(NamedTuple):
    """What a rank holds."""

    inventory: Inventory
    lists: Mapping[bytes, tuple[Item, ...]]


# Jobs ---------------------------------------------------------------------------------------


def tensors(count: int, rows: int, first_row: int | None = None) -> tuple[Item, ...]:
    """``count`` bfloat16 tensors of 4,096 columns; the rank's rows of them, if it has a part."""
    place: dict[str, Any] = {}
    if first_row is not None:
        place = {"offsets": (first_row, 0), "global_shape": (4096, 4096)}
    return tuple(
        Item(
            f"model/layers.{index // 9}.block.{index % 9}.weight",
            "bfloat16",
            (rows, 4096),
            rows * 8192,
            2,
            replicated=first_row is None,
            **place,
        )
        for index in range(count)
    )


def ddp(ranks: int, count: int) -> list[Held]:
    """All hold the same; a few bytes of each rank's own."""
    items = tensors(count, 1024)
    return [held(4096, {None: items})] * ranks


def fsdp(ranks: int, count: int) -> list[Held]:
    """Each holds a shard of its own of everything. The last one's are smaller."""
    full = held(count * 8192 * 4, {})
    return [full] * (ranks - 1) + [held(count * 8192, {})]


def hsdp(ranks: int, count: int) -> list[Held]:
    """Replicas of 64 shards: rank r holds shard r % 64."""
    num_shards = min(64, ranks // 2)
    rows = 4096 // num_shards
    shards = [
        held(4096, {tuple(range(shard, ranks, num_shards)): tensors(count, rows, shard * rows)})
        for shard in range(num_shards)
    ]
    return [shards[rank % num_shards] for rank in range(ranks)]


JOBS: dict[str, Callable[[int, int], list[Held]]] = {"DDP": ddp, "FSDP": fsdp, "HSDP": hsdp}


def held(private_bytes: int, scopes: Mapping[tuple[int, ...] | None, tuple[Item, ...]]) -> Held:
    lists = {digest_of(items): items for items in scopes.values()}
    found = tuple(
        Scope(ranks, digest, sum(item.nbytes for item in lists[digest]))
        for ranks, digest in zip(scopes, lists, strict=True)
    )
    return Held(Inventory(private_bytes, found), lists)


# A save -------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What went one way."""

    messages: int = 0
    nbytes: int = 0
    largest: int = 0

    def count(self, kind: Kind, sender: int, payload: bytes) -> None:
        framed = 0
        for begin in range(0, max(1, len(payload)), PIECE_BYTES):
            piece = payload[begin : begin + PIECE_BYTES]
            is_last = begin + PIECE_BYTES >= len(payload)
            framed += len(msgspec.msgpack.encode(Frame(kind, sender, SESSION, 7, piece, is_last)))
        self.messages += 1
        self.nbytes += framed
        self.largest = max(self.largest, framed)


@dataclass
class Save:
    """One save by all ranks; ``memory`` and ``plans`` are of the save before."""

    job: list[Held]
    memory: PlanCache
    plans: dict[int, tuple[bytes, RankPlan]]
    up: Traffic = field(default_factory=Traffic)
    down: Traffic = field(default_factory=Traffic)
    heard: list[ToCoordinator] = field(default_factory=list)

    def run(self) -> None:
        coordinator = Coordinator(world_size=len(self.job))
        decisions = new_decisions(len(self.job), self.memory)
        ranks = [Rank(rank, held, self.plans.get(rank)) for rank, held in enumerate(self.job)]
        to_do: deque[tuple[int, Any]] = deque((rank.number, next(rank.work)) for rank in ranks)
        while to_do:
            number, event = to_do.popleft()
            if number >= 0:
                self._of_rank(ranks[number], event, to_do)
            else:
                self._of_coordinator(coordinator, decisions, event, to_do)
        assert coordinator.state is CoordinatorState.PASSED
        assert {rank.machine.state for rank in ranks} == {ParticipantState.ENDED}
        self.plans.update((rank.number, rank.plan) for rank in ranks if rank.plan is not None)

    def _of_rank(self, rank: Rank, event: ParticipantEvent, to_do: deque[tuple[int, Any]]) -> None:
        for command in rank.machine.handle(event):
            match command:
                case Arrived() | Failed() as message:
                    if rank.number > 0:  # messages to oneself do not touch the store
                        self.up.count(Kind.UP, rank.number, msgspec.msgpack.encode(message))
                    self.heard.append(message)
                    to_do.append((-1, message))
                case Ask(payload=question):
                    to_do.append((rank.number, rank.answer(question)))
                case Proceed(payload=payload):
                    to_do.append((rank.number, rank.work.send(payload)))
                case End(failure):
                    assert failure is None

    def _of_coordinator(
        self,
        machine: Coordinator,
        decisions: SaveDecisions,
        event: CoordinatorEvent,
        to_do: deque[tuple[int, Any]],
    ) -> None:
        for command in machine.handle(event):
            match command:
                case SendTo(rank, message):
                    if rank > 0:
                        self.down.count(Kind.DOWN, 0, msgspec.msgpack.encode(message))
                    to_do.append((rank, message))
                case Decide():
                    to_do.append((-1, decide(decisions, command)))


class Rank:
    """A rank's part in a save, where all work takes no time.

    Attributes:
        work: Yields each arrival; is sent the decisions.
        plan: The last one, with its digest.
    """

    def __init__(self, number: int, held: Held, plan: tuple[bytes, RankPlan] | None) -> None:
        self.number = number
        self.machine = Participant(rank=number)
        self.work = self._work()
        self.plan = plan
        self._held = held

    def answer(self, payload: bytes) -> Reached:
        question = decode(payload, Question)
        if question.inventory:
            return Reached(encode(Details(self._held.inventory)))
        lists = {digest: self._held.lists[digest] for digest in question.lists}
        return Reached(encode(Details(lists=lists)))

    def _work(self) -> Generator[Reached, bytes, None]:
        remembered = b"" if self.plan is None else self.plan[0]
        joined = Joined(RELEASE, digest_of(self._held.inventory), remembered)
        assignment = decode((yield Reached(encode(joined))), Assignment)
        if assignment.plan is not None:
            self.plan = (assignment.digest, assignment.plan)
        if assignment.shares_objects:
            yield Reached(encode(self._tokens()))
            yield Reached()
        stored = ManifestStored(100_000 + self.number)
        yield Reached(encode(stored), commits=True)

    def _tokens(self) -> list[Token]:
        assert self.plan is not None
        keys = [
            data_key(ATTEMPT, "model", share.rank, share.first + part.number)
            for share in self.plan[1].shares
            for part in share.parts
            if part.opens and part.is_shared
        ]
        return [Token.of(ATTEMPT, key, key.encode()) for key in keys]


def decide(decisions: SaveDecisions, command: Decide) -> Decision:
    if command.commits:
        manifest_sizes(command.payloads)
        return Continue(is_last=True)
    return decisions.decide(command.round, command.payloads)


def new_decisions(world_size: int, memory: PlanCache) -> SaveDecisions:
    save = SaveRecord(world_size=world_size)
    common = Assignment(attempt=ATTEMPT, url=URL.encode(), fsync=True, rules=RULES, save=save)
    return SaveDecisions(common, release=RELEASE, memory=memory)


def replay(world_size: int, frames: Iterable[bytes], memory: PlanCache) -> None:
    """All that the coordinator's process does for a save: decode, decide, encode."""
    machine = Coordinator(world_size=world_size)
    decisions = new_decisions(world_size, memory)
    decoder = msgspec.msgpack.Decoder(ToCoordinator)
    for frame in frames:
        commands = deque(machine.handle(decoder.decode(frame)))
        while commands:
            match commands.popleft():
                case SendTo(_, message):
                    msgspec.msgpack.encode(message)
                case Decide() as command:
                    commands += machine.handle(decide(decisions, command))
    assert machine.state is CoordinatorState.PASSED


# An agreement ------------------------------------------------------------------------------


@dataclass
class AgreementRun:
    """One agreement of ranks that train (``protocol.agreement``); rank 1 asks for it.

    Attributes:
        first: The ranks never communicated before: all but rank 0 say hello.
        messages: Greatest number that one rank sends up, and gets.
    """

    ranks: int
    first: bool
    up: Traffic = field(default_factory=Traffic)
    down: Traffic = field(default_factory=Traffic)
    messages: tuple[int, int] = (0, 0)
    seconds: float = 0.0

    def run(self) -> None:
        topic = bytes(8)
        num_up, num_down = [0] * self.ranks, [0] * self.ranks

        def send(to: int | None, sender: int, message: object, kind: Kind) -> bytes:
            payload = b"" if message is None else msgspec.msgpack.encode(message)
            traffic = self.up if to is None else self.down
            traffic.count(kind, sender, payload)
            if to is None:
                num_up[sender] += 1
            else:
                num_down[to] += 1
            return payload

        wanted = SaveWanted(1, topic, "before the upgrade", 1001, grace_s=25.0)
        send(None, 1, wanted, Kind.UP)
        participants = [Participant(rank=rank) for rank in range(self.ranks)]
        calls = [Calls() for _ in participants]
        arrived: list[bytes] = []
        for rank, participant in enumerate(participants):
            calls[rank].entered = 1000 + rank % 2
            if rank:
                send(rank, 0, Invite(topic, 30.0), Kind.DOWN)
            if rank and self.first:
                send(None, rank, None, Kind.HELLO)
                send(rank, 0, None, Kind.WELCOME)
            entered = msgspec.msgpack.encode(calls[rank].hold(-2))
            (message,) = participant.handle(Reached(entered))
            if rank:
                arrived.append(send(None, rank, message, Kind.UP))
            else:
                arrived.append(msgspec.msgpack.encode(message))
        answers = self._coordinate(arrived)
        for rank, answer in answers:
            if rank:
                send(rank, 0, answer, Kind.DOWN)
            (end,) = participants[rank].handle(answer)
            assert isinstance(end, End)
            calls[rank].agree(msgspec.msgpack.decode(end.payload, type=Agreed))
        assert all(each.agreed == calls[0].agreed for each in calls)
        assert calls[0].agreed[0].at == 1002
        self.messages = (max(num_up), max(num_down))

    def _coordinate(self, arrived: Iterable[bytes]) -> list[tuple[int, ToRank]]:
        """All that rank 0 does: encode, decode, decide."""
        begin = time.process_time()
        for _ in range(1, self.ranks):
            msgspec.msgpack.encode(Invite(bytes(8), 30.0))
        machine = Coordinator(world_size=self.ranks)
        wishes = Wishes(saves_on_notice=True)
        wishes.add(Wish("before the upgrade (rank 1)", 1001))
        decoder = msgspec.msgpack.Decoder(ToCoordinator)
        sent: list[tuple[int, ToRank]] = []
        for frame in arrived:
            commands = deque(machine.handle(decoder.decode(frame)))
            while commands:
                match commands.popleft():
                    case SendTo(rank, message):
                        msgspec.msgpack.encode(message)
                        sent.append((rank, message))
                    case Decide(payloads=payloads):
                        entered = {
                            rank: msgspec.msgpack.decode(payload, type=Entered)
                            for rank, payload in payloads.items()
                        }
                        answer, _ = wishes.decide(entered, lambda until_s, num_steps: True)
                        common = msgspec.msgpack.encode(answer)
                        commands += machine.handle(Continue(common=common, is_last=True))
        self.seconds = time.process_time() - begin
        return sent


def measure_agreement(ranks: int) -> dict[str, Any]:
    note(f"agreement, {ranks} ranks")
    runs = {"first": AgreementRun(ranks, True), "repeated": AgreementRun(ranks, False)}
    for run in runs.values():
        run.run()
    rows = {
        which: {
            "up": msgspec.to_builtins(run.up),
            "down": msgspec.to_builtins(run.down),
            "up_most_of_a_rank": run.messages[0],
            "down_most_of_a_rank": run.messages[1],
            "coordinator_cpu_s": round(run.seconds, 3),
        }
        for which, run in runs.items()
    }
    return {
        "row": "agreement",
        "ranks": ranks,
        "ok": all(max(run.messages) <= 3 for run in runs.values()),
        **rows,
        "machine": machine(),
        "load_at_start": LOAD_AT_START,
        "date": time.strftime("%Y-%m-%d"),
    }


def agreement_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "| ranks | agreement | frames up, down | most of a rank | bytes up, down | rank 0, CPU s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        for which in ("first", "repeated"):
            run = row[which]
            up, down = run["up"], run["down"]
            lines.append(
                f"| {row['ranks']:,} | {which} | {up['messages']:,}, {down['messages']:,} "
                f"| {run['up_most_of_a_rank']}, {run['down_most_of_a_rank']} "
                f"| {up['nbytes']:,}, {down['nbytes']:,} | {run['coordinator_cpu_s']} |"
            )
    return lines


# Rows ---------------------------------------------------------------------------------------


def beats_bytes_s(ranks: int) -> float:
    pulse = msgspec.msgpack.encode(Pulse(BEAT_S, {7: LABEL.digest}))
    beat = len(msgspec.msgpack.encode(Frame(Kind.BEAT, ranks - 1, SESSION, payload=pulse)))
    return (ranks - 1) * beat / BEAT_S


def measure(name: str, ranks: int, count: int) -> dict[str, Any]:
    note(f"{name}, {ranks} ranks")
    job = JOBS[name](ranks, count)
    memory, plans = PlanCache(), dict[int, tuple[bytes, RankPlan]]()
    saves = {"first": Save(job, memory, plans)}
    saves["first"].run()
    saves["repeated"] = Save(job, memory, plans)
    saves["repeated"].run()
    frames = {
        which: [msgspec.msgpack.encode(message) for message in save.heard]
        for which, save in saves.items()
    }
    seconds = {}
    memory = PlanCache()
    for which in frames:
        begin = time.process_time()
        replay(ranks, frames[which], memory)
        seconds[which] = round(time.process_time() - begin, 3)
    tracemalloc.start()
    memory = PlanCache()
    replay(ranks, frames["first"], memory)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    begin = time.process_time()
    lists = {digest: items for held in job for digest, items in held.lists.items()}
    plan_save([held.inventory for held in job], lists, RULES)
    plan_s = time.process_time() - begin
    rows = {
        which: {
            "up": msgspec.to_builtins(save.up),
            "down": msgspec.to_builtins(save.down),
            "up_bytes_a_rank": round(save.up.nbytes / ranks, 1),
            "down_bytes_a_rank": round(save.down.nbytes / ranks, 1),
            "coordinator_cpu_s": seconds[which],
        }
        for which, save in saves.items()
    }
    return {
        "row": f"protocol {name}",
        "ranks": ranks,
        "tensors": count,
        "ok": rows["repeated"]["up_bytes_a_rank"] <= MAX_REPEATED_BYTES,
        **rows,
        "plan_cpu_s": round(plan_s, 3),
        "coordinator_peak_mib": round(peak / 2**20, 2),
        "coordinator_kept_mib": round(kept / 2**20, 2),
        "beats_up_bytes_s": round(beats_bytes_s(ranks)),
        "machine": machine(),
        "load_at_start": LOAD_AT_START,
        "date": time.strftime("%Y-%m-%d"),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| job | ranks | save | up, B/rank | down, B/rank | messages up + down, per rank "
        "| largest up | coordinator CPU, s | plan, s | peak, kept MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ranks = row["ranks"]
        for which in ("first", "repeated"):
            save = row[which]
            up, down = save["up"], save["down"]
            is_first = which == "first"
            memory = f"{row['coordinator_peak_mib']}, {row['coordinator_kept_mib']}"
            cells = [
                row["row"].split()[-1] if is_first else "",
                f"{ranks:,}" if is_first else "",
                which,
                f"{save['up_bytes_a_rank']:,}",
                f"{save['down_bytes_a_rank']:,}",
                f"{up['messages'] / ranks:.2f} + {down['messages'] / ranks:.2f}",
                f"{up['largest']:,} B",
                f"{save['coordinator_cpu_s']}",
                f"{row['plan_cpu_s']}" if is_first else "",
                memory if is_first else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *growth(rows)]
    last = rows[-1]
    lines += [
        "",
        f"Heartbeats while a save is in flight: {last['beats_up_bytes_s']:,} B/s up at "
        f"{last['ranks']:,} ranks, and as much down.",
        "",
        f"Machine: {last['machine']}. Date: {last['date']}. Load average at the start: "
        f"{last['load_at_start']}.",
    ]
    return "\n".join(lines)


def growth(rows: list[dict[str, Any]]) -> list[str]:
    """How much more it is with more ranks; linear is the ratio of the ranks."""
    lines = []
    for name in dict.fromkeys(row["row"] for row in rows):
        small, *_, large = (found := [row for row in rows if row["row"] == name]) + found[-1:]
        ratio = large["ranks"] / small["ranks"]
        parts = [
            f"{which} {way} x{large[which][way]['nbytes'] / small[which][way]['nbytes']:.2f}"
            for which in ("first", "repeated")
            for way in ("up", "down")
        ]
        lines.append(f"- {name}, x{ratio:g} ranks: bytes {', '.join(parts)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.protocol", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--jobs", nargs="*", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--markdown", action="store_true", help="a table instead of JSON lines")
    args = parser.parse_args()
    rows = []
    for name in args.jobs:
        for ranks in args.ranks:
            rows.append(measure(name, ranks, args.tensors))
            if not args.markdown:
                print(json.dumps(rows[-1]), flush=True)
    agreements = [measure_agreement(ranks) for ranks in args.ranks]
    if args.markdown:
        print(
            "\n".join(
                [markdown(rows), *agreement_table(agreements)]
                if rows
                else agreement_table(agreements)
            )
        )
    else:
        for row in agreements:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
