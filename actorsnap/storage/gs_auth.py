"""Access tokens for Google Cloud Storage, and their renewal.

They come from the caller, or from gcloud-aio-auth: Google's application default credentials.
"""

from __future__ import annotations

import inspect
from typing import Any

import aiohttp
import anyio
from gcloud.aio.auth import Token
from gcloud.aio.storage import SCOPES

from actorsnap.storage.base import RunBlocking
from actorsnap.storage.wire import is_unknown_host

__all__ = ["Credentials", "CredentialsError", "GivenToken"]

_REMEDY = (
    "Name a key by credentials_file or GOOGLE_APPLICATION_CREDENTIALS, run `gcloud auth "
    "application-default login`, or say anonymous=True for an emulator or a public bucket"
)


class CredentialsError(Exception):
    def __init__(self, detail: str, *, is_retryable: bool) -> None:
        super().__init__(detail)
        self.detail = detail
        self.is_retryable = is_retryable


class GivenToken:
    """One token, which cannot be renewed."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def get(self) -> str:
        return self._token

    def forget(self, token: str) -> bool:
        return False

    def close(self) -> None:
        pass


class Credentials:
    """Tokens that are renewed in time.

    Args:
        file: None: the application's default.
        limit_s: Bound of a fetch.
    """

    def __init__(
        self,
        file: str | None,
        session: aiohttp.ClientSession,
        run_blocking: RunBlocking,
        limit_s: float,
    ) -> None:
        self._file = file
        self._session = session
        self._run = run_blocking
        self._limit_s = limit_s
        self._source: Any = None  # a ``Token``, once needed
        # All waiters share gcloud-aio's fetching task: one at a time, or the cancellation of one
        # would reach the others.
        self._turn = anyio.Lock()

    async def get(self) -> str:
        """Returns a token that is valid for some minutes."""
        async with self._turn:
            try:
                with anyio.fail_after(self._limit_s):
                    if self._source is None:
                        self._source = await self._run(self._load)
                    token: str = await self._source.get()
            except TimeoutError as error:
                raise CredentialsError(
                    f"no access token came within {self._limit_s:g} s. {_REMEDY}",
                    is_retryable=True,
                ) from error
            except aiohttp.ClientResponseError as error:
                answer = f"{error.status} {error.message[:300]}"
                raise CredentialsError(
                    f"no access token was given: {answer}. {_REMEDY}",
                    is_retryable=error.status >= 500 or error.status == 429,
                ) from error
            except aiohttp.ClientError as error:
                raise CredentialsError(
                    f"no access token can be fetched: {error}. {_REMEDY}",
                    is_retryable=not is_unknown_host(error),
                ) from error
            except (OSError, ValueError, LookupError) as error:
                raise CredentialsError(
                    f"the credentials cannot be used: {type(error).__name__}: {error}. {_REMEDY}",
                    is_retryable=False,
                ) from error
            return token

    def forget(self, token: str) -> bool:
        """Drops a refused ``token``. Returns whether ``get`` will return another one."""
        if self._source is None:
            return False
        if self._source.access_token == token:
            self._source.access_token = None
        return True

    def close(self) -> None:
        if self._source is not None and self._source.acquiring is not None:
            self._source.acquiring.cancel()

    def _load(self) -> Token:
        return _SingleTryToken(service_file=self._file, session=self._session, scopes=SCOPES)


class _SingleTryToken(Token):  # type: ignore[misc]
    """Requests a token once: gcloud-aio's retries are silent; the storage retries."""

    async def acquire_access_token(self) -> None:
        await inspect.unwrap(Token.acquire_access_token)(self)
