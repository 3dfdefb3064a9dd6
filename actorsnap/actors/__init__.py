"""The shell that performs what the protocol decides. anyio only; no decisions here."""
