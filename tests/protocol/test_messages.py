"""What messages make of what they are given."""

import pytest

from actorsnap.protocol.save import Token


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
