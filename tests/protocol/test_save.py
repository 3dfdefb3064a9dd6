# SPDX-License-Identifier: Apache-2.0
"""The decisions of a save."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actorsnap.errors import UsageError
from actorsnap.format.manifest import SaveRecord
from actorsnap.planning.inventory import (
    Inventory,
    Scope,
    Sharded,
    ShardedTable,
    digest_of,
)
from actorsnap.planning.packing import Item, PackingRules
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.rounds import AskMore, Continue, Decision
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

ATTEMPT = "20260101T000000-0123abcd-1-89abcdef"
RULES = PackingRules(chunk_bytes=2 << 20, max_objects=4, min_object_bytes=1 << 20)
LARGE = Item("m/w", "uint8", (5 << 20,), 5 << 20, 1, replicated=True)
ALL_INVENTORY = Question(inventory=True)


def decisions(world_size: int, **more: Any) -> SaveDecisions:
    save = SaveRecord(world_size=world_size, metadata={"a": 1})
    common = Assignment(attempt=ATTEMPT, url=b"/s", fsync=True, rules=RULES, save=save)
    return SaveDecisions(common, release="1", **more)


def inventory_of(*items: Item, sharded: tuple[Sharded, ...] = ()) -> Inventory:
    scope = Scope(None, digest_of(items), sum(item.nbytes for item in items))
    return Inventory(7, (scope,) if items else (), sharded=digest_of(sharded) if sharded else b"")


class Ranks:
    """Ranks with these items each, who answer all questions."""

    def __init__(
        self,
        *items: tuple[Item, ...],
        sharded: tuple[tuple[Sharded, ...], ...] = (),
        memory: PlanCache | None = None,
    ) -> None:
        self.items = items
        self.sharded = sharded or ((),) * len(items)
        self.inventories = [
            inventory_of(*own, sharded=parts)
            for own, parts in zip(items, self.sharded, strict=True)
        ]
        self.memory = memory or PlanCache()
        self.asked: list[dict[int, Question]] = []

    def join(self, *plans: bytes) -> Decision:
        self.decisions = decisions(len(self.items), memory=self.memory)
        digests = plans or (b"",) * len(self.items)
        payloads = {
            rank: encode(Joined("1", digest_of(own), digests[rank]))
            for rank, own in enumerate(self.inventories)
        }
        decision = self.decisions.decide(0, payloads)
        while isinstance(decision, AskMore):
            questions = {
                rank: decode(payload, Question) for rank, payload in decision.questions.items()
            }
            self.asked.append(questions)
            answers = {rank: self.answer(rank, asked) for rank, asked in questions.items()}
            decision = self.decisions.decide(0, answers)
        return decision

    def answer(self, rank: int, question: Question) -> bytes:
        if question.inventory:
            return encode(Details(self.inventories[rank]))
        if question.sharded:
            return encode(Details(sharded=ShardedTable.of(self.sharded[rank])))
        own = {digest_of(self.items[rank]): self.items[rank]}
        return encode(Details(lists={digest: own[digest] for digest in question.lists}))

    def assignments(self, *plans: bytes) -> list[Assignment]:
        decision = self.join(*plans)
        assert isinstance(decision, Continue)
        return [decode(decision.payloads[rank], Assignment) for rank in range(len(self.items))]


def test_what_is_unknown_is_asked_of_one_rank_and_then_remembered() -> None:
    ranks = Ranks(*[(LARGE,)] * 4)
    assignments = ranks.assignments()
    digest = digest_of((LARGE,))
    assert ranks.asked == [{0: ALL_INVENTORY}, {0: Question(lists=(digest,))}]
    again = Ranks(*[(LARGE,)] * 4, memory=ranks.memory)
    known = again.assignments(*[own.digest for own in assignments])
    assert again.asked == []
    assert [own.plan for own in known] == [None] * 4
    forgot = Ranks(*[(LARGE,)] * 4, memory=ranks.memory)
    found = forgot.assignments(assignments[0].digest, b"", b"other", assignments[3].digest)
    assert [own.plan is None for own in found] == [True, False, False, True]
    assert found[1] == assignments[1]


def test_each_rank_lists_other_items_of_a_scope() -> None:
    more = (LARGE, msgspec.structs.replace(LARGE, path="m/norm"))
    ranks = Ranks((LARGE,), more)
    ranks.assignments()
    assert ranks.asked == [
        {0: ALL_INVENTORY, 1: ALL_INVENTORY},
        {0: Question(lists=(digest_of((LARGE,)),)), 1: Question(lists=(digest_of(more),))},
    ]


def test_ranks_with_different_sharded_tensors_send_them_once() -> None:
    def sharded(rank: int) -> tuple[Sharded, ...]:
        paths = ("m/tied", f"m/{rank}")
        return tuple(Sharded(path, "uint8", (8,), b"%d" % rank, 1) for path in paths)

    stages = (sharded(0), sharded(0), sharded(1))
    ranks = Ranks((), (), (), sharded=stages)
    ranks.assignments()
    question = Question(sharded=True)
    assert ranks.asked == [{0: ALL_INVENTORY, 2: ALL_INVENTORY}, {0: question, 2: question}]
    again = Ranks((), (), (), sharded=stages, memory=ranks.memory)
    again.assignments()
    assert again.asked == []
    changed = Ranks((), (), (), sharded=(sharded(0), sharded(1), sharded(1)), memory=ranks.memory)
    changed.assignments()
    assert changed.asked == []


def test_ranks_that_disagree_about_a_tensor() -> None:
    parts = [(Sharded("m/w", "uint8", (8 + rank,), b"x", 2),) for rank in range(2)]
    ranks = Ranks((), (), sharded=tuple(parts))
    with pytest.raises(UsageError, match="m/w"):
        ranks.join()
    assert ranks.decisions.stage is Stage.PLAN
    other = msgspec.structs.replace(LARGE, shape=(5 << 20, 1))
    with pytest.raises(UsageError, match="m/w"):
        Ranks((LARGE,), (other,)).join()


def test_another_release_is_refused_and_named() -> None:
    payloads = {0: encode(Joined("1", b"a")), 1: encode(Joined("0.9", b"a"))}
    decision = decisions(2).decide(0, payloads)
    assert isinstance(decision, Failure)
    assert decision.rank == 1
    assert "rank 1 runs actorsnap 0.9, the coordinator 1" in decision.reason


def test_only_rank_0_repeats_the_metadata() -> None:
    saves = [own.save for own in Ranks((), ()).assignments()]
    assert [save.metadata for save in saves] == [{"a": 1}, {}]
    assert [save.world_size for save in saves] == [2, 2]


def test_ranks_that_share_nothing_store_at_once() -> None:
    decision = Ranks((), ()).join()
    assert isinstance(decision, Continue)
    assert decision.commits_next
    assert not decision.skips


def test_ranks_that_share_objects_exchange_tokens_and_wait_for_each_other() -> None:
    ranks = Ranks((LARGE,), (LARGE,), ())
    decision = ranks.join()
    assert isinstance(decision, Continue)
    assert (decision.skips, decision.commits_next) == ({2: 2}, False)
    shares = [decode(decision.payloads[rank], Assignment).shares_objects for rank in range(3)]
    assert shares == [True, True, False]
    token = Token("m/0-0", b"t")
    opened = ranks.decisions.decide(1, {0: encode((token,)), 1: encode(())})
    assert isinstance(opened, Continue)
    assert decode(opened.payloads[1], tuple[Token, ...]) == (token,)
    assert decode(opened.payloads.get(0, opened.common), tuple[Token, ...]) == ()
    written = ranks.decisions.decide(2, {0: b"", 1: b""})
    assert written == Continue(commits_next=True)
    assert ranks.decisions.stage is Stage.STORE


def test_the_manifests_to_commit() -> None:
    payloads = {1: encode(ManifestStored(20)), 0: encode(ManifestStored(10))}
    assert manifest_sizes(payloads) == [10, 20]


@pytest.mark.parametrize("key", ["a/data/x/0-0.safetensors", "a/data/x/0-0.chunks/7", "a/x"])
@pytest.mark.parametrize("token", [b"", b"upload-7", b"\xff"])
def test_a_token_says_its_key_once(key: str, token: bytes) -> None:
    token = token or key.encode()
    found = Token.of("a", key, token)
    assert found.opened("a") == (key, token)
    assert (found.token == b"") == (token == key.encode())


def test_a_token_of_a_data_object_is_short() -> None:
    key = "a/data/x/0-0.safetensors"
    assert Token.of("a", key, key.encode()) == Token("x/0-0")
