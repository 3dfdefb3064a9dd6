"""The control plane between ranks: messages of ``protocol.messages``, never bulk bytes."""
