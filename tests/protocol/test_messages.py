"""What messages make of what they are given."""

import pytest

from actorsnap.protocol.messages import Token


@pytest.mark.parametrize("token", [b"a/data/x/0-0.safetensors", b"upload-7", b"\xff"])
def test_a_token_says_its_key_once(token: bytes) -> None:
    key = "a/data/x/0-0.safetensors"
    found = Token.of("a", key, token)
    assert found.opened("a") == (key, token)
    assert found.key == "data/x/0-0.safetensors"
    assert (found.token == b"") == (token == key.encode())
