"""Messages of ``protocol.messages`` between ranks, never bulk bytes."""
